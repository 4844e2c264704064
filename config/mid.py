# The middle scale, --scale=mid: a plain GPT on Wikipedia as bytes, between what cores and what hours on a GPU
# can do: 10.6 M parameters in its blocks
# 64 sequences x 512 bytes = 32,768 bytes a step, 6,000 steps = 197 MB read, 2.2 passes over enwik8's train
# Not run yet. 78 MFLOP a byte make 1.5e16 FLOPs: at 12 to 20 % of the 989 TFLOP/s of an H100 in bf16 it is
# two minutes, at half of a card's 30 TFLOP/s a quarter of an hour

dataset = "enwik8"

recipe = "modern"
qk_max = 12.0         # at sqrt(head size) small heads' attention is too soft: whatever sharpens it looks good
n_layer = 6
n_head = 6
n_embd = 384
block_size = 512

batch_size = 64       # out of memory: 16, with grad_accum = 4
max_iters = 6000

eval_interval = 300
eval_tokens = 1 << 19
