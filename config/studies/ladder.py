# How effects go with size: plain GPTs of 0.1, 0.33 and 1 M parameters, 20 bytes a parameter each, on
# enwiki15, of which no byte is read twice. The variants are short convolutions, key offset and constraint
# heads, which were better than the plain GPT at 0.1 M in config/studies/all.py, and head routing as its
# write-up describes it, which was worse
# Nano scale, one core a run: one minute, eight minutes, an hour, which makes 1, 4 and 9 hours of one core in
# all. 1 M has few seeds and no other budgets for that reason

question = "Do the effects of head mechanisms grow or shrink with size?"

scale = "nano"
sizes = ["0.1M", "0.33M", "1M"]
settings = dict(dataset="enwiki15")
tokens_per_param = 20.0
mechanisms = ["short_conv_kv", "key_offset", "constraint_a", "routing_inf"]
seeds = [1, 2, 3, 4]
plain_seeds = 6
test_tokens = 1_500_000  # a quarter of the test split; all of it takes a sixth of a run's time
budgets = [0.7, 1.4]
match_parameters = False
at = {"1M": dict(mechanisms=["short_conv_kv", "key_offset"], seeds=[1, 2, 3], plain_seeds=3, budgets=[])}
