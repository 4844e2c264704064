# Sentinel gates: one learned gate per head, starting near 1, and a small price on their sum
from config.enwik8_baseline import *

out_dir = "out/enwik8-sentinel"

sentinel = "sigmoid"
