# The plain GPT's best rates: every rate and the momentum by factors of 2, until no neighbour is better. Then
# the plain GPT alone is judged at what was found. Other scales: --scale=nano; other text:
# --settings="{'dataset': 'enwiki15'}"

question = "At which rates is the plain GPT at its best?"

tune_plain = True
budgets = []
