# How the effects of mechanisms change with size: here 0.1 M parameters in the blocks; ladder_033M.py and
# ladder_1M.py go on. 20 bytes a parameter each, on enwiki15, of which no byte is read twice. The variants are
# short convolutions, key offset and constraint heads, which were better than the plain GPT at this size in
# config/studies/all.py, and head routing as its write-up describes it, which was worse
# One core a run, of a minute: an hour of one core in all

question = "Do the effects of head mechanisms grow or shrink with size? Here 0.1 M parameters"

scale = "nano"
size = "0.1M"
settings = dict(dataset="enwiki15")
tokens_per_param = 20.0
mechanisms = ["short_conv_kv", "key_offset", "constraint_a", "routing_inf"]
seeds = [1, 2, 3, 4]
plain_seeds = 6
test_tokens = 1_500_000  # a quarter of the test split; all of it takes a sixth of a run's time
budgets = [0.7, 1.4]
match_parameters = False
