# How the effects of mechanisms change with size: here 0.33 M parameters (ladder_01M.py says more)
# One core a run, of eight minutes: four hours of one core in all

question = "Do the effects of head mechanisms grow or shrink with size? Here 0.33 M parameters"

scale = "nano"
size = "0.33M"
settings = dict(dataset="enwiki15")
tokens_per_param = 20.0
mechanisms = ["short_conv_kv", "key_offset", "constraint_a", "routing_inf"]
seeds = [1, 2, 3, 4]
plain_seeds = 6
test_tokens = 1_500_000
budgets = [0.7, 1.4]
match_parameters = False
