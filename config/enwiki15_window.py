# The rival sliding window: a token sees the last 256, itself included, and the first 4
from config.small import *

out_dir = "out/enwiki15-window"

window = 256
window_global = 4
