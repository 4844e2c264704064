# The rival MoH: each token uses 1 shared head and the best 3 of the other 7, load balanced
from config.tiny import *

out_dir = "out/tiny-moh"

routing = "moh"
routing_shared = 1
