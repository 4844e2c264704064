# Where constraint heads stand: each block of six in turn, beside heads without labels in the default one
# Six blocks as wide as the tiny scale's: 16 runs of two minutes on a core; the labels first:
#     python -m lab.label --dataset=wikitext2_byte --by=weak

question = "Is one block near two thirds of the depth the best place for constraint heads?"

_heads = dict(constraint_names=["reciprocity", "testifiability", "decidability"])
_labels = dict(_heads, labels="weak", constraint_warmup=100)

settings = dict(n_layer=6)
variants = {"no labels": _heads,
            **{f"block {i}": dict(_labels, constraint_layers=[i]) for i in range(6)}}
contrasts = [[f"block {i}", "block 4"] for i in (0, 1, 2, 3, 5)]
seeds = [1, 2]
plain_seeds = 2
budgets = []
match_parameters = False
