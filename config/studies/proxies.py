# How well a scale shows a known change: the plain GPT, short convolutions, and the plain GPT at 1.4 times the
# budget, on validation, since its answer chooses a scale. `python -m lab.study.signals` puts what is found
# over the spread of the seeds, and beside what a run costs
# python compare.py config/studies/proxies.py --scale=deep, and so tiny, long and bpe: a minute or two a run

question = "How well does this scale show changes that are known?"

scale = "tiny"
mechanisms = ["short_conv"]
budgets = [1.4]
split = "val"
test_tokens = 200_000
seeds = [111, 112, 113]
plain_seeds = 3
match_parameters = False
rescore = 0
