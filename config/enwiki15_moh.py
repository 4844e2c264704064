# The rival MoH: each token uses 2 shared heads and the best 4 of the other 6, load balanced
from config.small import *

out_dir = "out/enwiki15-moh"

routing = "moh"
routing_shared = 2
routing_top_k = 6     # the shared ones included
