# `make demo`: a small GPT on Python's own source code, bytes, about two minutes on two CPU cores
# 16 sequences x 128 bytes = 2,048 bytes a step, 700 steps = 1.4 MB read

dataset = "pystdlib"

recipe = "modern"
n_layer = 4
n_head = 4
n_embd = 128
block_size = 128

batch_size = 16
max_iters = 700
warmup_iters = 0      # whatever --scale has
muon_lr = 0.03
muon_momentum = 0.9

eval_interval = 100
eval_tokens = 32768
