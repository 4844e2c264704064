# The two quarrels on output gates once more, at the gate's own best rate. At 0.016, the default rate of what
# a mechanism adds, the gate is worse than the plain GPT here by 0.023, so that nobody would use it so. Eight
# times that rate was its best on validation in the search of config/studies/all.py, by 0.021, and
# config/studies/gate_rates.py tries rates under AdamW. It moves the weights of the gate alone
# Tiny scale, 27 seeds of each cell: 162 runs, of which interactions_gate_xsa.py and
# interactions_gate_optimizer.py have 81

question = "Does an output gate at its own best rate do the same beside XSA, and under AdamW?"

variants = {"AdamW": dict(optimizer="adamw", adamw_lr=8e-3, embed_lr=8e-3, min_lr=0.0, weight_decay=0.1),
            "gate at 8 x": dict(output_gate="headwise", mechanism_lr=0.128)}
interactions = [("xsa", "gate at 8 x"), ("gate at 8 x", "AdamW")]
seeds = list(range(1, 28))
plain_seeds = 27
budgets = []
test_tokens = 200_000  # as the battery, with which it shares runs
match_parameters = False
