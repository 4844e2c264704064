# The rival gated attention: a gate per head, computed from the token
from config.needle_baseline import *

out_dir = "out/needle-output_gate"

output_gate = "headwise"
