# The rival sliding window: a token sees the last 32, itself included
from config.tiny import *

out_dir = "out/tiny-window"

window = 32          # a quarter of block_size
