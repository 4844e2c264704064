# GPT-2 (124M) on OpenWebText: about 4 days on 8 x A100 40GB, to a validation loss of 2.85 (nanoGPT's figures)
# torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
# 12 sequences x 1,024 tokens x 5 micro-steps x 8 ranks = 491,520 tokens a step

dataset = "openwebtext"

vocab_size = 50304    # GPT-2's 50,257 rounded up to a multiple of 64, which GPUs like
n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
dropout = 0.0

batch_size = 12
grad_accum = 5 * 8
max_iters = 600000
adamw_lr = 6e-4
min_lr = 6e-5
warmup_iters = 2000
weight_decay = 0.1

eval_interval = 1000
eval_tokens = 1 << 20
log_interval = 10
wandb_log = False     # --wandb_log logs to Weights & Biases
