# The scale of tasks, --scale=task: a plain GPT that learns one in some seconds on one CPU core
# 2 blocks of 64 have 98,304 parameters, a step reads 32 rows of 48 tokens. The tasks: nanoheads/tasks.py

task = "recall"

recipe = "modern"
qk_max = 12.0
n_layer = 2
n_head = 4
n_embd = 64
block_size = 48

batch_size = 32
max_iters = 800
muon_momentum = 0.9
muon_lr = 0.01
adamw_lr = 0.008

eval_interval = 50
task_rows = 64
