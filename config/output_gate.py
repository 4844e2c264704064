# The rival gated attention: a gate per head, computed from the token
# output_gate_elementwise: a gate for each of a head's dimensions; output_gate_narrow: read from 12 channels

scale = "tiny"
mechanism = ["output_gate"]
