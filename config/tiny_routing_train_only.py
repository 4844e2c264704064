# Head routing with gates in training only, as its write-up's code has it: evaluated, it is another function
from config.tiny import *

out_dir = "out/tiny-routing_train_only"

routing = "published"
routing_eval_gate = False
