# WikiText-2 in GPT-2's tokens, a few hundred steps: a check that everything works,
# with a vocabulary of 50,257
# 8 sequences x 128 tokens = 1,024 tokens a step

dataset = "wikitext2"

recipe = "modern"
n_layer = 4
n_head = 4
n_embd = 128
block_size = 128

batch_size = 8
max_iters = 300
warmup_iters = 0      # whatever --scale has

eval_interval = 100
eval_tokens = 16384
