# The paper scale, --scale=paper: a plain GPT of the head-routing write-up's size, 90,397,440 parameters on
# enwik8's 6,064 characters, to reproduce its bits per character (all else here is in bytes)
# 32 sequences x 1,024 characters = 32,768 characters a step, 200,000 steps = 6.55 G read, 72.8 passes
# AdamW's betas 0.9 and 0.95, weight decay 0.1, clipping at 1 and the cosine are the defaults of this recipe

dataset = "enwik8_char"

recipe = "gpt2"
n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
dropout = 0.1         # acag and window have none on the attention weights, see config/acag.py

batch_size = 32       # out of memory: 8, with grad_accum = 4, is the same batch
grad_accum = 1
max_iters = 200000
adamw_lr = 6e-4
min_lr = 6e-5
warmup_iters = 1000

eval_interval = 2000
eval_tokens = 1 << 20
