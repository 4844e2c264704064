# The rival MoH: each token uses 2 shared heads and the best 4 of the other 10, load balanced
from config.paper import *

out_dir = "out/enwik8-moh"

routing = "moh"
routing_shared = 2
routing_top_k = 6     # the shared ones included
