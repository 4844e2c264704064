# ACAG without gradients into the statistics of the row: cheaper
from config.needle_baseline import *

out_dir = "out/needle-acag_detach"

acag = "headwise"
acag_detach = True
