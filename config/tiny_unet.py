# U-Net skips: the output of block i joins that of block N - i + 1 through a matrix
from config.tiny import *

out_dir = "out/tiny-unet"

unet = "concat"
