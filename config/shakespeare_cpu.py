# nanoGPT's CPU setting (4 layers, 4 heads, 128 wide, context 64, batch 12) with the modern recipe: its
# validation loss of 1.886 after 240 steps instead of 2,000. python bench.py --race runs both.

dataset = "shakespeare_char"

recipe = "modern"
n_layer = 4
n_head = 4
n_embd = 128
block_size = 64
dropout = 0.0

batch_size = 12
max_iters = 240
warmup_iters = 0      # whatever --scale has
muon_lr = 0.03        # both tuned for this short run, see docs/archive/log-2026-11.md
muon_momentum = 0.85

eval_interval = 240
eval_tokens = 0       # the whole validation split
