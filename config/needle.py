# Recall over a long context: facts planted in WikiText-2, asked again up to 16 KiB later
# python train.py config/needle.py --mechanism=acag    # or acag_detach, output_gate
# 8 sequences x 1,024 bytes = 8,192 bytes a step, 800 steps = 6.55 MB read, 0.45 passes over train

dataset = "needle"

recipe = "modern"
qk_max = 12.0         # to pick one key out of thousands the logits must be large
n_layer = 4
n_head = 4
n_embd = 128
block_size = 1024     # python -m lab.probe needle reads on, up to 16 KiB

batch_size = 8
max_iters = 800
warmup_iters = 0      # whatever --scale has
muon_lr = 0.03
muon_momentum = 0.9

eval_interval = 100
eval_tokens = 32768
