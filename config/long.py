# The long scale, --scale=long: meant for what acts over long contexts (forgetting, windows, sinks,
# positions), of which the plain GPT makes no use here (docs/results/proxies.md)
# 2 blocks of 64, the 98,304 parameters of config/tiny.py, on Wikipedia, where 99 % of the text is in articles
# longer than the context: 2 sequences x 1,024 bytes = 2,048 bytes a step, 960 steps = 1.97 MB. A step takes
# twice as long as tiny's
# Its rates are those of config/tiny.py: half and double of Muon's were worse by 0.07 on validation with one
# seed and a rope_base of 10,000; those of AdamW and the embedding were not looked at

dataset = "enwiki15"

recipe = "modern"
rope_base = 1000.0    # better by 0.048 bits/byte than 10,000 with two seeds (docs/results/proxies.md)
qk_max = 12.0         # as in config/tiny.py, and so is all below but the size of a batch
n_layer = 2
n_head = 4
n_embd = 64
block_size = 1024

batch_size = 2
max_iters = 960
muon_momentum = 0.9
adamw_lr = 0.016
embed_lr = 0.02

eval_interval = 96
eval_tokens = 16384
