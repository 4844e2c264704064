# Constraint heads on other text than WikiText-2: what their labels cost, and then what the heads know
# (`python -m lab.probe constraints` on these runs). For plays: another --out_dir, and
#     --settings='{"dataset": "shakespeare_char"}'
# Tiny scale: 9 runs of about a minute on a core; the labels first:
#     python -m lab.label --dataset=enwiki15 --by=weak        # and shakespeare_char

question = "Do constraint heads learn their labels on other text?"

_heads = dict(constraint_names=["reciprocity", "testifiability", "decidability"])

settings = dict(dataset="enwiki15")
variants = {
    "no labels": _heads,
    "labels": dict(_heads, labels="weak", constraint_warmup=100),
}
contrasts = [["labels", "no labels"]]
seeds = [1, 2, 3]
plain_seeds = 3
budgets = []
match_parameters = False
