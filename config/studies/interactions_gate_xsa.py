# Does an output gate still help beside exclusive attention? XSA takes out of each head what its own value
# says, and a gate can close a head that says nothing new: they may do one thing twice.
# Tiny scale, 27 seeds of each cell: 108 runs of half a minute. Two seeds differ by about 0.008, so that the
# interaction is known to 0.006

question = "Do an output gate and XSA do one thing twice?"

interactions = [("xsa", "output_gate")]
seeds = list(range(1, 28))
plain_seeds = 27
budgets = []
test_tokens = 200_000  # as the battery, with which it shares runs
match_parameters = False
