# The bpe scale, --scale=bpe: for what acts over the vocabulary (embeddings, output layer): 4,096 byte pairs
# 2 blocks of 64, the 98,304 parameters of config/tiny.py, beside 524,288 of embedding and output layer:
# 8 sequences x 128 tokens = 1,024 tokens a step, 3.4 bytes each, 960 steps = 3.33 MB. A step takes 1.1
# times as long as tiny's, and to score a token 7.6 times: python bench.py --scales bpe
# The text: python data/enwiki15/prepare.py --encoding=bpe
# Its rates, on validation (docs/results/proxies.md): half of tiny's rate of Muon is better by 0.005 with two
# seeds; a quarter is worse with one, and so are half and double of AdamW's rate with the embedding's

dataset = "enwiki15_bpe"

recipe = "modern"
qk_max = 12.0         # as in config/tiny.py, and so is all below but the size of a batch
n_layer = 2
n_head = 4
n_embd = 64
block_size = 128

batch_size = 8
max_iters = 960
muon_lr = 0.01
muon_momentum = 0.9
adamw_lr = 0.016
embed_lr = 0.02

eval_interval = 96
eval_tokens = 4096    # 13.9 kB
