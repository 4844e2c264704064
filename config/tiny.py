# The plain GPT that the other config/tiny_*.py are compared with: WikiText-2 as bytes, about a minute on one CPU core
# 16 sequences x 128 bytes = 2,048 bytes a step, 150 steps = 0.31 MB read: short enough for all of study_all in two hours on two cores

out_dir = "out/tiny-baseline"
dataset = "wikitext2_byte"

recipe = "modern"
qk_max = 12.0         # at sqrt(head size) the attention of small heads is too soft, and any mechanism that sharpens it looks good
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
