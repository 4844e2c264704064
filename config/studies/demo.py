# What `make demo` runs: the plain GPT and the write-up's head routing on the source code of your own Python's
# standard library, three seeds each, two to four minutes on two quiet cores

question = "Does top-k head routing, as its write-up has it, beat a plain GPT? (a demonstration: three seeds)"

mechanisms = ["routing_inf"]
settings = dict(dataset="pystdlib", max_iters=480, eval_interval=96)
seeds = [1, 2, 3]
budgets = [0.7]
out_dir = "out/demo"
