# U-Net skips as a weighted sum: one number per pair of blocks
from config.tiny import *

out_dir = "out/tiny-unet_add"

unet = "add"
