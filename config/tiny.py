# The tiny scale, --scale=tiny: a plain GPT on WikiText-2 as bytes, about a minute on one CPU core
# 16 sequences x 128 bytes = 2,048 bytes a step, 150 steps = 0.31 MB read: five seeds of all mechanisms in two
# hours on two cores

dataset = "wikitext2_byte"

recipe = "modern"
qk_max = 12.0         # at sqrt(head size) small heads' attention is too soft: whatever sharpens it looks good
n_layer = 4
n_head = 8
n_embd = 128
block_size = 128

batch_size = 16
max_iters = 150
muon_lr = 0.03
muon_momentum = 0.9

eval_interval = 50    # points of the curves
eval_tokens = 8192
