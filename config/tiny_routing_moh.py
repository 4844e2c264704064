# Head routing, corrected: 4 of 8 heads, weights of mean 1 and a load balance, no shared heads
from config.tiny import *

out_dir = "out/tiny-routing_moh"

routing = "moh"
