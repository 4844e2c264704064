# One life of heads, a minute on a CPU core: gates move by a network, what closes is dropped for good, and
# where the held-out loss no longer falls new heads join; states follow the policy (docs/heads.md)
# Kill it, even with -9, and --resume: it goes on exactly

scale = "tiny"
mechanism = ["sentinel_l0", "agency"]

mechanism_lr = 0.04        # at the plain GPT's rate no gate closes
sentinel_coef = 0.01
sparsity_warmup = 300
controller = "ann"
controller_cost = 0.01
controller_interval = 40
controller_patience = 2
policy = True
prune_gate = 0.05
prune_margin = 0.02
grow_heads = 1
grow_delta = 0.03
grow_used = 0.2
grow_ramp = 80
save_interval = 48
