# The model and data of config/train_shakespeare_char.py with the modern recipe and its own optimizer
# settings: not `--recipe=modern` on that file, whose learning rates were chosen for AdamW.

dataset = "shakespeare_char"

recipe = "modern"
n_layer = 6
n_head = 6
n_embd = 384
block_size = 256
dropout = 0.2

batch_size = 64
max_iters = 2000

eval_interval = 250
eval_tokens = 0       # the whole validation split each time
