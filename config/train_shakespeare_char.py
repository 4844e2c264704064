# nanoGPT's baby GPT on Shakespeare's characters, its hyperparameters as they are: a few minutes on one GPU.
# It overfits; best.pt keeps the lowest validation loss (nanoGPT reports 1.4697).

out_dir = "out-shakespeare-char"
dataset = "shakespeare_char"

n_layer = 6
n_head = 6
n_embd = 384
block_size = 256
dropout = 0.2

batch_size = 64
max_iters = 5000
adamw_lr = 1e-3             # small networks can afford a higher rate
min_lr = 1e-4
beta2 = 0.99          # few tokens a step
warmup_iters = 100

eval_interval = 250
eval_tokens = 0       # the whole validation split each time
