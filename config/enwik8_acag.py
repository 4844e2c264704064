# ACAG: a gate per head from the context length and the entropy and concentration of its attention row
from config.paper import *

out_dir = "out/enwik8-acag"

acag = "headwise"
attn_dropout = 0.0    # no fused kernel takes any here: the plain GPT to compare with is
                      # config/paper.py --attn_dropout=0
