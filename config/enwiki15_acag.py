# ACAG: a gate per head from the context length and the entropy and concentration of its attention row
from config.small import *

out_dir = "out/enwiki15-acag"

acag = "headwise"
