# A2C attention as its write-up has it: keys are queries, values are slices of x, the critic scales the logits
from config.tiny import *

out_dir = "out/tiny-a2c_published"

a2c = "published"
