# From which size on does the plain GPT learn each task? Blocks and width, at the rates of config/task.py
# 8 tasks x 6 sizes and the scale itself, two seeds each: 128 runs of ten seconds or so on a core

question = "From which size on does a plain GPT learn each task?"

task = ["all"]
variants = {
    "1 block of 16": dict(n_layer=1, n_head=2, n_embd=16),
    "1 block of 32": dict(n_layer=1, n_head=4, n_embd=32),
    "1 block of 64": dict(n_layer=1, n_head=4, n_embd=64),
    "2 blocks of 16": dict(n_layer=2, n_head=2, n_embd=16),
    "2 blocks of 32": dict(n_layer=2, n_head=4, n_embd=32),
    "3 blocks of 64": dict(n_layer=3, n_head=4, n_embd=64),
}
seeds = [1, 2]
plain_seeds = 2          # it is asked what is learned, not which differs
match_parameters = False
settings = dict(task_enough=0.99)
