# A2C attention, corrected: each key's predicted advantage is added to its logits
from config.tiny import *

out_dir = "out/tiny-a2c_key_bias"

a2c = "key_bias"
