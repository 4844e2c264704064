# All seven mechanisms at once, each in its corrected form
from config.tiny import *

out_dir = "out/tiny-all"

routing = "moh"
sentinel = "sigmoid"
agency = True
unet = "concat"
constraint_names = ["reciprocity", "testifiability", "decidability"]
a2c = "temperature"
acag = "headwise"
