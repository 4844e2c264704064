# A2C attention, corrected: a temperature per head and token; critic and value head learn from the returns to come
from config.paper import *

out_dir = "out/enwik8-a2c"

a2c = "temperature"
