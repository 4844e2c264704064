# Head routing as its published snippet has it: unselected logits become 0, which leaves those heads some weight
from config.tiny import *

out_dir = "out/tiny-routing_zero"

routing = "published"
routing_mask = "zero"
