# The rival sliding window: a token sees the last 256, itself included, and the first 4
from config.paper import *

out_dir = "out/enwik8-window"

window = 256
window_global = 4
attn_dropout = 0.0    # no fused kernel takes any here: the plain GPT to compare with is
                      # config/paper.py --attn_dropout=0
