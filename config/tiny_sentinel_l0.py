# Sentinel gates that can close for good: hard concrete, with the L0 penalty
from config.tiny import *

out_dir = "out/tiny-sentinel_l0"

sentinel = "hard_concrete"
