# U-Net skips: the output of block i joins that of block N - i + 1 through a matrix
from config.paper import *

out_dir = "out/enwik8-unet"

unet = "concat"
