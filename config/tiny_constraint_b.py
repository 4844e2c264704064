# Constraint heads, variant B: all heads of the layer get smaller, and its width stays (128 / 11 heads, floored to 8)
from config.tiny import *

out_dir = "out/tiny-constraint_b"

constraint_names = ["reciprocity", "testifiability", "decidability"]
constraint_variant = "B"
