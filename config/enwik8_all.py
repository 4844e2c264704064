# All seven mechanisms at once, each in its corrected form
from config.paper import *

out_dir = "out/enwik8-all"

routing = "moh"
sentinel = "sigmoid"
agency = True
unet = "concat"
constraint_names = ["reciprocity", "testifiability", "decidability"]
a2c = "temperature"
acag = "headwise"
attn_dropout = 0.0    # no fused kernel takes any here: the plain GPT to compare with is
                      # config/paper.py --attn_dropout=0
