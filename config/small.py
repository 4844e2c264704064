# The small scale, --scale=small: a plain GPT on Wikipedia as bytes, half an hour on one H100
# 64 sequences x 1,024 bytes = 65,536 bytes a step, 20,000 steps = 1.31 GB read, 10.6 passes over train
# Estimated, not measured: 152 MFLOP a byte make 1.99e17 FLOPs. At 40 % of the 989 TFLOP/s that the GPU has in
# bf16 that is 8 minutes, out of reach at this width; at 20 % it is 17 minutes, at 12 % it is 28.

dataset = "enwiki15"

recipe = "modern"
qk_max = 12.0         # at sqrt(head size) small heads' attention is too soft: whatever sharpens it looks good
n_layer = 6
n_head = 8
n_embd = 512
block_size = 1024

batch_size = 64       # out of memory: 16, with grad_accum = 4
max_iters = 20000

eval_interval = 1000
eval_tokens = 1 << 20
