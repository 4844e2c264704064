# Does an output gate gain under AdamW what it does not gain under Muon? The plain GPT of the tiny scale has
# NorMuon, which is the gate alone; AdamW at its own rates, those of config/studies/controls.py, is the other
# change, and the gate under AdamW is both
# Tiny scale, 27 seeds of each cell: 108 runs of half a minute, and the interaction is known to 0.006

question = "Does an output gate do the same under AdamW as under NorMuon?"

variants = {"AdamW": dict(optimizer="adamw", adamw_lr=8e-3, embed_lr=8e-3, min_lr=0.0, weight_decay=0.1)}
interactions = [("output_gate", "AdamW")]
seeds = list(range(1, 28))
plain_seeds = 27
budgets = []
test_tokens = 200_000  # as the battery, with which it shares runs
match_parameters = False
