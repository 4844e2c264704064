# A/A: the plain GPT against itself, trained from other initial values on the data in another order. There is
# no difference to find, so "better" or "worse" here is a false alarm, and the intervals are what chance alone
# does

question = "Does a comparison that must find nothing find nothing?"

variants = {f"plain again {i}": dict(seed=1000 * i) for i in (1, 2, 3, 4)}  # added to each of the seeds
budgets = []
