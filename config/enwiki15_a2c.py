# A2C attention, corrected: a temperature per head and token; critic and value head learn from the returns to come
from config.small import *

out_dir = "out/enwiki15-a2c"

a2c = "temperature"
