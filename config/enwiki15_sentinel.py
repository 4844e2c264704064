# Sentinel gates: one learned gate per head, starting near 1, and a small price on their sum
from config.small import *

out_dir = "out/enwiki15-sentinel"

sentinel = "sigmoid"
