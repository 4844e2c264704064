# The tiny scale, --scale=tiny: a plain GPT on WikiText-2 as bytes, half a minute to a minute and a half of a
# CPU core
# 2 blocks of 64 have 98,304 parameters; 16 sequences x 128 bytes = 2,048 bytes a step, 960 steps = 1.97 MB
# read, 20 bytes a parameter of the blocks. Tried on validation: docs/results/recipe.md

dataset = "wikitext2_byte"

recipe = "modern"
qk_max = 12.0         # at sqrt(head size) small heads' attention is too soft: whatever sharpens it looks good
n_layer = 2
n_head = 4
n_embd = 64
block_size = 128

batch_size = 16
max_iters = 960
muon_momentum = 0.9   # the rates: docs/results/recipe.md
adamw_lr = 0.016
embed_lr = 0.02

eval_interval = 96    # points of the curves
eval_tokens = 16384
