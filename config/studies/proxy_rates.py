# The plain GPT's rates at the scales deep, long and bpe: half and double of Muon's rate, and of AdamW's with
# the embedding's, beginning with those of config/tiny.py, on validation: chosen here, judged elsewhere
# python compare.py config/studies/proxy_rates.py --scale=deep, and so long and bpe: five runs of a minute or
# two on a core each; --seeds="[111, 112]" --plain_seeds=2 where two are close

question = "At which rates is the plain GPT of this scale at its best?"

scale = "deep"
settings = dict(muon_lr=0.02, adamw_lr=0.016, embed_lr=0.02)
variants = {
    "muon_lr x 0.5": dict(muon_lr=0.01),
    "muon_lr x 2": dict(muon_lr=0.04),
    "adamw_lr and embed_lr x 0.5": dict(adamw_lr=0.008, embed_lr=0.01),
    "adamw_lr and embed_lr x 2": dict(adamw_lr=0.032, embed_lr=0.04),
}
split = "val"
test_tokens = 200_000
seeds = [111]
plain_seeds = 1
budgets = []
match_parameters = False
rescore = 0
