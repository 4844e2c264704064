# How the effects of mechanisms change with size: here 1 M parameters (ladder_01M.py says more)
# One core a run, of an hour: nine hours of one core in all. Few seeds, two variants and no other budgets for
# that reason

question = "Do the effects of head mechanisms grow or shrink with size? Here 1 M parameters"

scale = "nano"
size = "1M"
settings = dict(dataset="enwiki15")
tokens_per_param = 20.0
mechanisms = ["short_conv_kv", "key_offset"]
seeds = [1, 2, 3]
plain_seeds = 3
test_tokens = 1_500_000
budgets = []
match_parameters = False
