# Head routing as its write-up has it: each token uses 4 of 8 heads; their weights sum to 1 (the output starts small)
from config.small import *

out_dir = "out/enwiki15-routing"

routing = "published"
routing_coef = 0.01   # of the token entropy
