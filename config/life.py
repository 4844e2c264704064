# Dynamic heads of every kind in one run, a minute on a CPU core: L0 closes gates, with a nudge by the rules,
# what stays closed is dropped for good, where the held-out loss no longer falls new heads join, and states
# follow the policy (docs/heads.md). Kill it, even with -9, and --resume: it goes on exactly

scale = "tiny"

sentinel = "hard_concrete"
agency = True
mechanism_lr = 0.04        # at the plain GPT's rate no gate closes
sentinel_coef = 0.1
sparsity_warmup = 300
controller = "rules"
controller_step = 0.1
controller_entropy = 0.45
controller_interval = 60
controller_patience = 2
policy = True
prune_gate = 0.05
prune_margin = 0.02        # nats
grow_heads = 1
grow_delta = 0.045
grow_used = 0.2
grow_ramp = 80
save_interval = 48
