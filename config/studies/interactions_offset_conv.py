# Are a key offset and a short convolution two ways to one thing? Both let a key know the token before
# Tiny scale, 27 seeds of each cell: 108 runs of half a minute, and the interaction is known to 0.006

question = "Do a key offset and a short convolution do one thing twice?"

interactions = [("key_offset", "short_conv")]
seeds = list(range(1, 28))
plain_seeds = 27
budgets = []
test_tokens = 200_000  # as the battery, with which it shares runs
match_parameters = False
