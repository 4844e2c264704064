"""
Reads what a forward pass records of its heads (traces): axes, constraint scores in words, figures of routers
and of A2C.
"""

# ---- axes ----

# The axes of traces whose shape does not tell them. Programs that show traces know "token" and the axes of
# head_numbers(), and take the mean over all others.
AXES = {
    "entropy": ("row", "head", "token"), "concentration": ("row", "head", "token"),
    "map": ("row", "head", "token", "key"),
    "routing_weights": ("row", "token", "base"), "selected": ("row", "token", "base"),
    "routing_logits": ("row", "token", "routed"),
    "router_gates": ("row", "token", "added"), "head_scores": ("row", "added", "token"),
}
GATE = ("row", "head", "token", "size")


def head_numbers(attn):
    """{axis: numbers of the heads along it} in a layer. "base" and "routed", of a router, are those of before
    pruning.
    """
    numbers, shared = attn.all_head_ids(), attn.router.n_shared if attn.router else 0
    return {"head": numbers, "own": numbers[:attn.n_head], "added": numbers[attn.n_head:],
            "base": [*range(attn.n_base)], "routed": [*range(shared, attn.n_base)]}


def axes_of(name, trace, attn):
    """The axes of a trace of this name in a layer; None: they are not known.

    A gate broadcasts over [B, H, T, D]. Any other trace that is not in AXES has a number for each head [H],
    for each token [B, T], or for each token and head [B, T, H], of the layer's own heads or of all.
    """
    if name in AXES:
        return AXES[name]
    if name.startswith("gates."):
        return GATE[len(GATE) - trace.dim():]
    if trace.dim() == 3:
        return "row", "token", "own" if trace.size(-1) == attn.n_head else "head"
    return {1: ("head",), 2: ("row", "token")}.get(trace.dim())


# ---- in short ----

def explain(traces, tokens, name, k=5, row=0):
    """One line a block: the k tokens of a sequence with the highest scores for a constraint.

    traces: of model(..., traces=True). tokens: the sequence's tokens as text. Raises ValueError when there is
    no such trace.
    """
    scores = {key: value for key, value in traces.items() if key.endswith(f".constraint.{name}")}
    if not scores:
        names = sorted({key.rsplit(".", 1)[1] for key in traces if ".constraint." in key})
        raise ValueError(f"no scores for {name!r}" + (f"; there are {', '.join(names)}" if names else
                                                      ": the model has no constraint heads"))
    lines = []
    for key, value in scores.items():
        top = value[row].topk(min(k, len(tokens)))
        words = [f"{tokens[i]!r} {s:.2f}" for s, i in zip(top.values.tolist(), top.indices.tolist())]
        lines.append(f"{name} (block {key.split('.')[1]}): {', '.join(words)}")
    return "\n".join(lines)


def summaries(traces, targets=None):
    """{"blocks.<i>.<name>": value} of every router, see routing_summary(), and, with the targets [B, T] of
    the pass, of A2C, see critic_summary().
    """
    summary = {}
    for key, weights in traces.items():
        block, _, trace = key.rpartition(".")
        if trace == "routing_weights":
            values = routing_summary(weights, traces[f"{block}.selected"])
            summary.update({f"{block}.{name}": value for name, value in values.items()})
    if targets is not None and "a2c.return" in traces:
        summary.update(critic_summary(traces, targets != -1))
    return summary


def routing_summary(weights, selected):
    """{name: value} of a router's weights and selection [B, T, H].

    routing_load: the share of tokens that select each head. dead_heads: heads that no token selects.
    effective_heads: exp of the load's entropy. token_entropy: the mean entropy of a token's weights, and
    batch_entropy: that of the mean weights of all tokens, both in nats.
    """
    def entropy(p):
        return -(p * p.clamp_min(1e-12).log()).sum(-1)

    def share(w):
        return w / w.sum(-1, keepdim=True).clamp_min(1e-12)

    load = selected.flatten(0, 1).float().mean(0)
    return dict(routing_load=load, dead_heads=(load == 0).sum(), effective_heads=entropy(share(load)).exp(),
                token_entropy=entropy(share(weights)).mean(),
                batch_entropy=entropy(share(weights.flatten(0, 1).mean(0))))


def critic_summary(traces, scored):
    """How well A2C's value and advantages are predicted, over the scored tokens, bool [B, T]. What does not
    vary is left out, as the returns of a new model whose logits are all 0.
    """
    G, V, advantage = (traces[f"a2c.{name}"] for name in ("return", "value", "advantage"))
    summary = {}
    if varies(G, scored):
        summary["a2c.explained_variance"] = 1 - variance(G - V, scored) / variance(G, scored)
    for key, a in traces.items():
        if key.startswith("blocks.") and key.split(".", 2)[2] == "advantage" and a.size(-1):
            mean = a.mean(-1).to(G.dtype)
            if not (varies(mean, scored) and varies(advantage, scored)):
                continue
            summary[key.replace("advantage", "advantage_correlation")] = correlation(mean, advantage, scored)
    return summary


def centred(x, scored):
    """x [B, T] less its mean over the scored tokens, 0 at the others."""
    return (x - (x * scored).sum() / scored.sum()) * scored


def variance(x, scored):
    """The variance of x [B, T] over the scored tokens, times their number."""
    return centred(x, scored).square().sum()


def varies(x, scored):
    """Whether x [B, T] differs over the scored tokens by more than rounding does."""
    return variance(x, scored) > scored.sum() * (1e-5 * x.abs().max()).square()


def correlation(a, b, scored):
    """Pearson's correlation of a and b [B, T] over the scored tokens."""
    a, b = centred(a, scored), centred(b, scored)
    return (a * b).sum() / (a.square().sum() * b.square().sum()).sqrt()
