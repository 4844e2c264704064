# The plain GPT's best rates: every rate and the momentum by factors of 2, each by itself with one seed, and
# further while the best is at an end; then the best of each, and all together, with four seeds. What is found
# is judged with seeds of its own. Other scales: --scale=nano; another text:
# --settings="{'dataset': 'enwiki15'}"

question = "At which rates is the plain GPT at its best?"

tune_lr = True
screen_seeds = [111, 112, 113, 114]
budgets = []
