# GPT-2 (124M) on OpenWebText with one GPU of 12 GB: the model and the steps of config/train_gpt2.py
# 12 sequences x 1,024 tokens x 40 portions = 491,520 tokens a step; about 8.2 GiB by calculation, which the
# run says before it starts, and up to 1 GB more for kernels and CUDA itself
# A card without bfloat16 (T4, RTX 20) takes float16 by itself; less memory: --batch_size=6 --grad_accum=80

dataset = "openwebtext"

vocab_size = 50304    # GPT-2's 50,257 rounded up to a multiple of 64, which GPUs like
n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024

batch_size = 12
grad_accum = 40
max_iters = 600000
adamw_lr = 6e-4
min_lr = 6e-5
warmup_iters = 2000
weight_decay = 0.1

eval_interval = 1000
eval_tokens = 1 << 20
