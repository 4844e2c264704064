# Constraint heads: three more heads with a router, in the block at 2/3 depth. Text alone has no constraint
# targets, so that only the language model trains them, and their scorers stay as they start; those learn in
# constraint_train.py
# constraint_b: all heads of the layer get smaller, and its width stays; constraint_published: as the write-up
# has them, the router gates the values

scale = "tiny"
mechanism = ["constraint_a"]
