# U-Net skips: the output of block i joins that of block N - i + 1 through a matrix
from config.small import *

out_dir = "out/enwiki15-unet"

unet = "concat"
