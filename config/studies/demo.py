# What `make demo` runs: the plain GPT, short convolutions, which help, and a write-up's head routing, which
# does not, on the source code of your own Python's standard library, three seeds each, three minutes on two
# quiet cores

question = "Do short convolutions, or top-k head routing, beat a plain GPT? (a demonstration: three seeds)"

mechanisms = ["short_conv", "routing_inf"]
settings = dict(dataset="pystdlib", max_iters=480, eval_interval=96)
seeds = [1, 2, 3]
budgets = [0.7]
match_parameters = False
out_dir = "out/demo"
