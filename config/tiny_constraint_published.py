# Constraint heads as the write-up has them: the router gates the values
from config.tiny import *

out_dir = "out/tiny-constraint_published"

constraint_names = ["reciprocity", "testifiability", "decidability"]
constraint_mode = "published"
