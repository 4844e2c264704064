# How effects go with size: plain GPTs of 0.1, 0.33 and 1 M parameters, 20 bytes a parameter each, at several
# budgets, with the two best, the two worst and one null of what config/studies/all.py found on 2026-11-22.
# Nano scale, one core a run: half a minute, five minutes, forty minutes. Four seeds of everything at the two
# smaller sizes are five hours on one core, and 1 M with one variant and three seeds as many again

question = "Do the effects of head mechanisms grow or shrink with size?"

scale = "nano"
sizes = ["0.1M", "0.33M", "1M"]
tokens_per_param = 20.0
mechanisms = ["constraint_a", "output_gate_elementwise", "xsa", "routing_inf", "routing_published"]
seeds = [1, 2, 3, 4]
plain_seeds = 6
budgets = [0.7, 1.4]
match_parameters = False
at = {"1M": dict(mechanisms=["constraint_a"], seeds=[1, 2, 3], plain_seeds=3, budgets=[0.7])}
