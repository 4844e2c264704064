# ACAG without gradients into the statistics of the row: cheaper
from config.tiny import *

out_dir = "out/tiny-acag_detach"

acag = "headwise"
acag_detach = True
