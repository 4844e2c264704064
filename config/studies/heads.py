# Gates that close while training: L0 with a warm-up, then who moves them (rules, a network, reward), heads
# dropped for good; growth from half the heads, beside half the heads from the start
# Tiny scale: 55 runs of a minute on a core, those of the plain GPT being on file

question = "Can heads be pruned or grown while training, at no loss?"

_gates = dict(sentinel="hard_concrete", sentinel_coef=0.1, mechanism_lr=0.04)  # 0.03 would close none
_prune = dict(prune_gate=0.05, prune_margin=0.02, controller_interval=60, controller_patience=2)
_moved = dict(_prune, sentinel="sigmoid", controller_step=1.5)

variants = {
    "l0, a tenth": dict(_gates, sentinel_coef=0.01),
    "l0": _gates,
    "l0, warm-up": dict(_gates, sparsity_warmup=480, controller_interval=60),
    "l0, pruned": dict(_gates, sparsity_warmup=480, **_prune),
    "l0, pruned, policy": dict(_gates, sparsity_warmup=480, **_prune, agency=True, policy=True),
    "rules, pruned": dict(_moved, controller="rules", controller_entropy=0.35),
    "ann, pruned": dict(_moved, controller="ann", controller_cost=0.01),
    "rl, pruned": dict(_moved, controller="rl", controller_cost=0.01),
    "grown from 2": dict(grow_from=2, grow_heads=1, grow_delta=0.05, grow_used=0.2, controller_interval=60,
                         controller_patience=2),
    "2 heads of 4": dict(head_ids="half the heads"),
    "stacked from 1 block": dict(n_layer=1, grow_stack=True, grow_delta=0.05, controller_interval=60,
                                 controller_patience=2),
}
contrasts = [["l0, warm-up", "l0"], ["l0, pruned, policy", "l0, pruned"]]
lives = True
match_parameters = False
