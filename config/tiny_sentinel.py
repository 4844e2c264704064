# Sentinel gates: one learned gate per head, starting near 1, and a small price on their sum
from config.tiny import *

out_dir = "out/tiny-sentinel"

sentinel = "sigmoid"
