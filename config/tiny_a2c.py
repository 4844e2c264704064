# A2C attention, corrected: a temperature per head and token; critic and value head learn from the returns to come
from config.tiny import *

out_dir = "out/tiny-a2c"

a2c = "temperature"
