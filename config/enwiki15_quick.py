# Wikipedia as bytes, a few hundred steps: a check that everything works, some minutes on two CPU cores
# 16 sequences x 256 bytes = 4,096 bytes a step

dataset = "enwiki15"

recipe = "modern"
n_layer = 4
n_head = 4
n_embd = 128
block_size = 256

batch_size = 16
max_iters = 400
warmup_iters = 0      # whatever --scale has
muon_lr = 0.03
muon_momentum = 0.9

eval_interval = 100
eval_tokens = 65536
