# Which part of a mechanism learns noisy_recall? Head routing and A2C's temperature do, the plain GPT does not
# at its rates. Routing: the selection, the softmax, the loss that balances heads, a head that is always on.
# A2C: the critic's losses, that it reads the text, and how sharp attention may be at all
# 13 variants of five seeds, some 90 runs of ten seconds or so on a core

question = "Which part of head routing and of A2C's temperature learns to look past what distracts?"

task = ["noisy_recall"]
mechanisms = ["routing_moh", "moh", "routing_sigmoid", "a2c_temperature", "query_gain"]
variants = {
    "routing, all heads": dict(routing="moh", routing_top_k="n_head"),      # weights without a selection
    "routing, all heads, no softmax": dict(routing="sigmoid", routing_top_k="n_head"),
    "routing, no balance": dict(routing="moh", routing_coef=0.0),
    "temperature, no critic": dict(a2c="temperature", a2c_value_coef=0.0, a2c_advantage_coef=0.0),
    "two heads": dict(n_head=2),            # a token that uses two of four heads has so many
    "scores up to 24": dict(qk_max=24.0),   # attention twice as sharp as in config/task.py
    "scores up to 48": dict(qk_max=48.0),
    "no QK-norm": dict(qk_norm=False, qk_max=None),
}
seeds = [1, 2, 3, 4, 5]
settings = dict(task_enough=0.99)
