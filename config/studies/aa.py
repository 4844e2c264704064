# A/A: the plain GPT against itself, trained from other initial values on the data in another order. There is
# no difference to find, so "better" or "worse" here is a false alarm, and the interval is what chance alone
# does without shared seeds

question = "Does a comparison that must find nothing find nothing?"

variants = {"plain again": dict(seed=1000)}   # added to each of the study's seeds
match = []
