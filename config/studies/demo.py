# What `make demo` trains, on the source code of your own Python's standard library: the plain GPT with four
# seeds; with three seeds each, short convolutions, which help, and a write-up's head routing, which does not.
# Ten short runs: some two minutes on two quiet cores

question = "Do short convolutions, or top-k head routing, beat a plain GPT? (a demonstration: three seeds)"

mechanisms = ["short_conv", "routing_inf"]
settings = dict(dataset="pystdlib", max_iters=320, eval_interval=80)
seeds = [1, 2, 3]
plain_seeds = 4
budgets = []
match_parameters = False
out_dir = "out/demo"
