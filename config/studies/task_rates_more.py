# What learned noisy_recall in the study of all mechanisms (config/studies/tasks.py), each at its own best
# rates: those that config/studies/task_rates.py does not have. A grid of nine pairs of rates with two seeds
# each for every one of them and for the plain GPT, then fresh seeds
# Some 200 runs of ten seconds or so on a core; those of the plain GPT are the same as there

question = "Do six more mechanisms learn noisy_recall at their best rates too?"

task = ["noisy_recall"]
mechanisms = ["short_conv_kv", "short_conv_x", "value_embedding", "head_norm", "roles", "mudd"]
seeds = [1, 2, 3, 4, 5]
tune_lr = True
match_parameters = False
settings = dict(task_enough=0.99)
