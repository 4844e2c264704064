# Every mechanism in every mode, and every rival, against plain GPTs: the same hyperparameters, parameters,
# training FLOPs
# Tiny scale: 5 seeds of about a minute on a core for each; then the best four against all three baselines

question = "Does any head mechanism or rival beat a plain GPT?"

mechanisms = ["*", "all_on"]  # each entry of model.MECHANISMS, and all seven mechanisms at once
variants = {"unet_add at 1": dict(unet="add", unet_init=1.0)}  # where others report that skips help
matched = 4
