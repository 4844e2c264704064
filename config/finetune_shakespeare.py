# GPT-2 (1558M) fine-tuned on Shakespeare, as nanoGPT does it: a few minutes on one GPU with 40 GB
# 32 sequences x 1,024 tokens = 32,768 tokens a step; the text has 301,966, so a pass is about nine steps
# A smaller one: --init_from=gpt2

out_dir = "out-shakespeare"
init_from = "gpt2-xl"
dataset = "shakespeare"

batch_size = 1
grad_accum = 32
max_iters = 20

adamw_lr = 3e-5
min_lr = 3e-5
schedule = "constant"
warmup_iters = 0

eval_interval = 5
eval_tokens = 40 * 1024
