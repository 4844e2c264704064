# Does another plain GPT at the tiny scale, that is as good, spread less over seeds? A learned factor of each
# head's scores, and twice the batch for half the steps, at the rates of the scale and at 1.4 times those
# On validation, since its answer chooses a scale: 48 runs of half a minute on a core
# python compare.py config/studies/calm.py
# python -m lab.study.signals out/calm-tiny/results.json.gz --spreads

question = "Which plain GPT of equal cost spreads least over seeds?"

mechanisms = ["query_gain"]
variants = {
    "batch 32": dict(batch_size=32, max_iters=480),
    "batch 32, higher rates": dict(batch_size=32, max_iters=480, muon_lr=0.028, adamw_lr=0.0224,
                                   embed_lr=0.028),
}
seeds = list(range(111, 123))
plain_seeds = 12
budgets = []
split = "val"
test_tokens = 200_000
match_parameters = False
rescore = 0
