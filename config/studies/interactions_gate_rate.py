# The two quarrels on output gates once more, at better rates. At 0.016, the default rate of what a mechanism
# adds, the gate is worse than the plain GPT here by 0.024, so that nobody would use it so. Eight times that
# rate was its best on validation under NorMuon (config/studies/all.py, gate_rates.py), and under AdamW its
# default was. AdamW's rate of the embedding is 0.02 here in place of 0.008 (adamw_rates.py)
# Tiny scale, 27 seeds of each cell: 189 runs, of which interactions_gate_xsa.py has 54. What is asked of the
# gate under AdamW is the contrast too, since one rate of its own suits it under NorMuon, and another there

question = "Does an output gate at a better rate do the same beside XSA, and under AdamW?"

variants = {"AdamW": dict(optimizer="adamw", adamw_lr=8e-3, embed_lr=0.02, min_lr=0.0, weight_decay=0.1),
            "AdamW, gate": dict(optimizer="adamw", adamw_lr=8e-3, embed_lr=0.02, min_lr=0.0, weight_decay=0.1,
                                output_gate="headwise"),
            "gate at 8 x": dict(output_gate="headwise", mechanism_lr=0.128)}
contrasts = [["AdamW, gate", "AdamW"]]
interactions = [("xsa", "gate at 8 x"), ("gate at 8 x", "AdamW")]
seeds = list(range(1, 28))
plain_seeds = 27
budgets = []
test_tokens = 200_000  # as the battery, with which it shares runs
match_parameters = False
