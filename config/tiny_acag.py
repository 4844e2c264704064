# ACAG: a gate per head from the context length and the entropy and concentration of its attention row
from config.tiny import *

out_dir = "out/tiny-acag"

acag = "headwise"
