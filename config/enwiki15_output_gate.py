# The rival gated attention: a gate per head, computed from the token
from config.small import *

out_dir = "out/enwiki15-output_gate"

output_gate = "headwise"
