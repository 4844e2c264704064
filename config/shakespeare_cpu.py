# nanoGPT's CPU setting (4 layers, 4 heads, 128 wide, context 64, batch 12) with the modern recipe: below its
# validation loss after 175 steps instead of 2,000. python bench.py --race runs both.
# The rates are tuned for this short run, on the last tenth of the training text
# (trials of size shakespeare in results/recipe.json of commit 86da9e9)

dataset = "shakespeare_char"

recipe = "modern"
n_layer = 4
n_head = 4
n_embd = 128
block_size = 64
dropout = 0.0

batch_size = 12
max_iters = 175
warmup_iters = 0      # whatever --scale has
qk_max = 12.0
muon_lr = 0.045
muon_momentum = 0.85
adamw_lr = 8e-3
embed_lr = 2e-3
decay_frac = 0.7

eval_interval = 175
eval_tokens = 0       # the whole validation split
