# U-Net skips as a weighted sum: one number per pair of blocks
from config.tiny_baseline import *

out_dir = "out/tiny-unet_add"

unet = "add"
