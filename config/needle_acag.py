# ACAG: a gate per head from the context length and the entropy and concentration of its attention row
from config.needle_baseline import *

out_dir = "out/needle-acag"

acag = "headwise"
