# U-Net skips: the output of block i joins that of block N - i + 1 through a matrix
from config.tiny_baseline import *

out_dir = "out/tiny-unet"

unet = "concat"
