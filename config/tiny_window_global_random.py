# The rival sliding window as in BigBird: the last 32 tokens, the first one, and one earlier block of 8 at random
from config.tiny import *

out_dir = "out/tiny-window_global_random"

window = 32
window_global = 1
window_random = 1
