# The nano ladder, --scale=nano: plain GPTs of 0.1, 0.33 and 1 M parameters in their blocks (SIZES in
# study/config.py), 20 bytes a parameter each, to see how an effect goes with size:
# `python compare.py config/studies/ladder_01M.py`, and so 033M and 1M. By itself this file is the second of
# them, five minutes on one CPU core; the first is config/tiny.py
# 16 sequences x 128 bytes = 2,048 bytes a step, 3,240 steps = 6.64 MB read; at 1 M 19.7 MB, 1.8 passes over
# WikiText-2, which is why the ladder reads enwiki15
# The rates are the defaults: muon_lr 0.02, adamw_lr 0.004, embed_lr 0.02. At 0.33 M, half and double of
# each were tried with two seeds on enwiki15, and none was better by a standard error of the difference
# (2026-11-25, docs/results/recipe.md)

dataset = "wikitext2_byte"

recipe = "modern"
qk_max = 12.0         # as in config/tiny.py, and so is all below
n_layer = 3
n_head = 6
n_embd = 96
block_size = 128

batch_size = 16
max_iters = 3240
muon_momentum = 0.9   # 0.95 on validation at this size: 1.7818, 0.9: 1.7633, one seed each

eval_interval = 324
eval_tokens = 16384
