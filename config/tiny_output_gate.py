# The rival gated attention: a gate per head, computed from the token
from config.tiny import *

out_dir = "out/tiny-output_gate"

output_gate = "headwise"
