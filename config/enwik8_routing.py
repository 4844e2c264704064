# Head routing as its write-up has it: each token uses 6 of 12 heads; their weights sum to 1 (the output starts small)
from config.paper import *

out_dir = "out/enwik8-routing"

routing = "published"
routing_top_k = 6
routing_coef = 0.01   # of the token entropy
