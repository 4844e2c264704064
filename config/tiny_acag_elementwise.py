# ACAG with a gate for each of a head's dimensions
from config.tiny import *

out_dir = "out/tiny-acag_elementwise"

acag = "elementwise"
