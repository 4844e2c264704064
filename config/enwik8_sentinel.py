# Sentinel gates: one learned gate per head, starting near 1, and a small price on their sum
from config.paper import *

out_dir = "out/enwik8-sentinel"

sentinel = "sigmoid"
