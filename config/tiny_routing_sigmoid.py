# Head routing with a gate for each of the 4 chosen heads by itself
from config.tiny import *

out_dir = "out/tiny-routing_sigmoid"

routing = "sigmoid"
