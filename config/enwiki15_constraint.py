# Constraint heads: three more heads with a router, in the block at 2/3 depth. Text alone has no constraint targets,
# so that only the language model's loss trains them, and their scorers stay as they start
from config.small import *

out_dir = "out/enwiki15-constraint"

constraint_names = ["reciprocity", "testifiability", "decidability"]
