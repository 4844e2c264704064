# The rival gated attention with a gate for each of a head's dimensions
from config.tiny import *

out_dir = "out/tiny-output_gate_elementwise"

output_gate = "elementwise"
