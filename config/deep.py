# The deep scale, --scale=deep: for what acts over depth (skips, streams, scalars, values of earlier blocks)
# 8 blocks of 32 have the 98,304 parameters of config/tiny.py, and read the same text in the same order: 16
# sequences x 128 bytes = 2,048 bytes a step, 960 steps = 1.97 MB. A step takes 2.8 times as long as tiny's
# Its rates are those of config/tiny.py: on validation half of Muon's is worse by 0.040 and double by 0.004,
# half and double of AdamW's and the embedding's by 0.006 and 0.014, with one seed (docs/results/proxies.md)

dataset = "wikitext2_byte"

recipe = "modern"
qk_max = 12.0         # as in config/tiny.py, and so is all below
n_layer = 8
n_head = 4            # of 8; two of 16 would leave out routing and roles, which choose among heads
n_embd = 32
block_size = 128

batch_size = 16
max_iters = 960
muon_momentum = 0.9
adamw_lr = 0.016
embed_lr = 0.02

eval_interval = 96
eval_tokens = 16384
