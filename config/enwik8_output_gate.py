# The rival gated attention: a gate per head, computed from the token
from config.paper import *

out_dir = "out/enwik8-output_gate"

output_gate = "headwise"
