# ACAG as its write-up has it: context length, mean and standard deviation of the row as they are
from config.tiny import *

out_dir = "out/tiny-acag_published"

acag = "headwise"
acag_mode = "published"
