"""
The heads of a model, seen from outside: what each does on given text, closing, and inserting them.

controller.py, prune.py and inspect_heads.py read this. Nothing here touches the training step.
"""

import copy
import math
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from model import GPT, KVCache
from nanoheads.common import UserError

# what measure() gives of every head
METRICS = {
    "entropy": "of its attention rows, over the log of the row's length: 0 one key, 1 all alike",
    "gradient": "norm of the loss's gradient in the head's slices of the projections, nats",
    "importance": "|y . d loss / d y| a sequence, its output times the gradient there, nats a token",
    "utilisation": "share of the layer's output norm",
    "gate": "mean over tokens of all factors on its output",
    "conflict": "cosine of its gradients on two halves of the text",
}
GATES = ("gate", "output_gate", "acag_gate", "sink_gate")  # traces that are factors on y, over [B, H, T, D]


def attentions(model):
    return [block.attn for block in model.transformer.h]


def static_gates(model):
    """[a tensor [H] a block]: the factor of each head that depends on no token, as evaluated; 1: no gate."""
    gates = [attn.static_gate(noisy=False) for attn in attentions(model)]
    return [attn.c_proj.weight.new_ones(attn.n_total) if gate is None else gate.detach()
            for attn, gate in zip(attentions(model), gates)]


@torch.no_grad()
def cache_bytes(model):
    """Bytes that keys and values of a full context take."""
    cache = KVCache(model.config)
    model.hidden(torch.zeros(1, 1, dtype=torch.long, device=model.transformer.wte.weight.device), cache)
    return sum(t.numel() * t.element_size() for t in [*cache.k, *cache.v] if t is not None)


def all_heads(model):
    """[(layer, head)] of every head, constraint heads too, by the original numbers."""
    return [(layer, head) for layer, attn in enumerate(attentions(model)) for head in attn.all_head_ids()]


# ---- text to measure on ----

def fixed_text(data, split, block_size, n_tokens, rank=0, world=1):
    """(x, y) [B, T] each, evenly spaced windows of a split, always the same; a rank gets its share.

    At least two windows a rank. UserError where the split has not as many.
    """
    tokens = data.tokens(split)
    n = max(2, n_tokens // block_size // world) * world
    if len(tokens) < n * block_size + 1 or block_size < 2:
        raise UserError(f"measuring heads takes {n} windows of {max(2, block_size)} tokens; "
                        f"{data.dir} has {len(tokens):,} tokens of {split}, block_size={block_size}")
    starts = np.linspace(0, len(tokens) - block_size - 1, n).astype(np.int64)[rank::world]
    ids = torch.from_numpy(np.stack([tokens[s:s + block_size + 1] for s in starts]).astype(np.int64))
    return ids[:, :-1], ids[:, 1:]


@contextmanager
def inputs_of(modules):
    """A list of what each of these modules was given last, filled by forward passes meanwhile."""
    kept = [None] * len(modules)

    def keep(i):
        def hook(module, args):
            kept[i] = args[0]
        return hook

    hooks = [module.register_forward_pre_hook(keep(i)) for i, module in enumerate(modules)]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def evaluating(model):
    """The model in eval mode, and then as it was."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


@torch.no_grad()
def nats_on(model, x, y, autocast=None, rows=16):
    """Mean nats per token of y after x, [B, T] each, dropout off."""
    total = 0.0
    with evaluating(model), autocast or nullcontext():
        for xs, ys in zip(x.split(rows), y.split(rows)):
            total += model(xs, ys).loss.double().item() * len(xs)
    return total / len(x)


# ---- metrics ----

def measure(model, x, y, autocast=None):
    """{metric: [a float64 tensor [H] a block]} of METRICS on x, y [B, T], B and T at least 2, in eval mode.

    Importance is Michel et al.'s (arXiv 1905.10650, eq. 2). Raises ValueError where one is not finite.
    """
    layers, halves = attentions(model), list(zip(x.chunk(2), y.chunk(2)))
    if len(halves) < 2 or x.size(1) < 2:
        raise ValueError(f"measuring heads takes two sequences of two tokens, not {tuple(x.shape)}")
    parts, weights = [], [w for attn in layers for w in projections(attn)]
    outs = [p for attn in layers for p in out_projections(attn)]
    with inputs_of(outs) as ys_of, evaluating(model), torch.enable_grad():
        for xs, ys in halves:
            with autocast or nullcontext():
                out = model(xs, ys, traces=True)
            found = torch.autograd.grad(out.loss, [*weights, *ys_of], allow_unused=True)
            found = [torch.zeros_like(t) if g is None else g for t, g in zip([*weights, *ys_of], found)]
            parts.append(half_metrics(model, out.traces, found, ys_of))
    metrics = {name: [] for name in METRICS}
    for layer, (a, b) in enumerate(zip(*parts)):
        both = (a["slope"] + b["slope"]) / 2
        metrics["gradient"].append(both.norm(dim=-1))
        metrics["conflict"].append(F.cosine_similarity(a["slope"], b["slope"], dim=-1, eps=1e-30))
        norms = ((a["power"] + b["power"]) / 2).clamp_min(0).sqrt()
        metrics["utilisation"].append(norms / norms.sum().clamp_min(1e-30))
        for name in ("entropy", "importance", "gate"):
            metrics[name].append((a[name] + b[name]) / 2)
    for name, values in metrics.items():
        for layer, value in enumerate(values):
            if not value.isfinite().all():
                raise ValueError(f"{name} of a head in block {layer} is not finite")
    return metrics


def projections(attn):
    """The weights that are a head's own: into q, k, v and out, of the layer's heads and constraint heads."""
    own = [attn.c_attn.weight, attn.c_proj.weight]
    return own + ([attn.constraint.c_attn.weight, attn.constraint.c_proj.weight] if attn.n_extra else [])


def out_projections(attn):
    return [attn.c_proj] + ([attn.constraint.c_proj] if attn.n_extra else [])


def half_metrics(model, traces, found, outputs):
    """A dict of [H] tensors a block, from gradients `found` of projections and of what goes into c_proj."""
    layers, rows, T = attentions(model), [], outputs[0].size(1)
    slopes, grads = found[:-len(outputs)], found[-len(outputs):]
    slopes, grads, outputs = iter(slopes), iter(grads), iter(outputs)
    for layer, attn in enumerate(layers):
        row = dict(slope=[], power=[], importance=[])
        groups = [(attn.n_head, attn.parts, attn.c_proj)]
        if attn.n_extra:
            groups.append((attn.n_extra, 3, attn.constraint.c_proj))
        for n, count, out in groups:
            D = attn.head_size
            into, away = next(slopes).double(), next(slopes).double()
            own = into.view(count, n, D * into.size(1)).transpose(0, 1).flatten(1)
            row["slope"].append(torch.cat((own, away.view(len(away), n, D).transpose(0, 1).flatten(1)), 1))
            y, g = (next(each).detach().double().unflatten(-1, (n, D)) for each in (outputs, grads))
            # the loss is a mean over sequences: times their number, a sequence's own
            row["importance"].append((y * g).sum((1, 3)).abs().mean(0) * len(y))
            weight = out.weight.detach().double().view(len(away), n, D)
            gram = torch.einsum("cnd,cne->nde", weight, weight)
            row["power"].append(torch.einsum("btnd,nde,btne->n", y, gram, y) / (y.size(0) * y.size(1)))
        row = {name: torch.cat(values) for name, values in row.items()}
        own = {key.split(".", 2)[2]: t for key, t in traces.items() if key.startswith(f"blocks.{layer}.")}
        positions = torch.arange(T, device=row["power"].device)
        n_keys = model.mask_of(layer).n_keys(positions).double()
        seen = n_keys > 1  # a row of one key has no entropy to speak of
        entropy = own["entropy"].detach().double()[..., seen] / n_keys[seen].log()
        row["entropy"] = entropy.mean((0, 2))
        row["gate"] = mean_gate(attn, own)
        rows.append(row)
    return rows


def mean_gate(attn, traces):
    """[H]: the mean over tokens of the product of all that multiplies a head's output.

    Of constraint heads as published, what multiplies their values; a gate on their scores is no factor.
    """
    gate = torch.ones(1, attn.n_total, 1, 1, dtype=torch.float64, device=attn.c_proj.weight.device)
    for name in GATES:
        if name in traces:
            each = traces[name].detach().double()
            gate = gate * (each if each.dim() == 4 else each[None])
    if "routing_weights" in traces:
        each = traces["routing_weights"].detach().double()
        each = each if each.size(-1) == attn.n_head else each[..., attn.head_ids]
        gate = gate * F.pad(each, (0, attn.n_extra), value=1.0).transpose(1, 2)[..., None]
    if "router_gates" in traces and attn.constraint.gate != "score":
        each = F.pad(traces["router_gates"].detach().double(), (attn.n_head, 0), value=1.0)
        gate = gate * each.transpose(1, 2)[..., None]
    return gate.mean((0, 2, 3))


# ---- closing, and gates set by hand ----

@contextmanager
def closed(model, heads):
    """The model with these (layer, head) at gate 0, and then as it was."""
    before = [attn.gate_override if attn.gate_override is None else attn.gate_override.clone()
              for attn in attentions(model)]
    try:
        for layer, head in heads:
            model.set_head(layer, head, gate=0.0)
        yield
    finally:
        for attn, override in zip(attentions(model), before):
            attn.gate_override = override


def fold_gates(model):
    """(a copy whose output projections hold the gates that were set by hand, [(layer, head)] it cannot hold).

    No factor leads from a head's own gate of 0 to another: in the copy such a head stays closed.
    """
    model, stuck = copy.deepcopy(model), []
    for layer, attn in enumerate(attentions(model)):
        hand, attn.gate_override = attn.gate_override, None
        if hand is None:
            continue
        own = static_gates(model)[layer]
        factor = torch.where(hand.isnan() | (hand == own), 1.0, hand / own)
        stuck += [(layer, head) for head, f in zip(attn.all_head_ids(), factor) if not f.isfinite()]
        attn.scale_heads(torch.where(factor.isfinite(), factor, 1.0))
    return model, stuck


# ---- inserting ----

@torch.no_grad()
def insert_heads(model, heads, optimizers=(), seed=0):
    """Put heads {layer: [head, ...]} into the free numbers below n_head; the logits stay what they are.

    A new head begins as in a new model of another `seed`, but what it sends out is 0, and so are the
    optimizers' moments. A compiled or data-parallel wrapper has to be made anew. Raises ValueError for a
    number that is taken, or that there is not.
    """
    for layer, new in heads.items():
        if not 0 <= layer < model.config.n_layer:
            raise ValueError(f"cannot insert into block {layer}; "
                             f"they go from 0 to {model.config.n_layer - 1}")
        free = set(range(model.config.n_head)) - set(attentions(model)[layer].head_ids)
        if not set(new) <= free:
            raise ValueError(f"cannot insert {sorted(new)} into block {layer}: "
                             f"free are {', '.join(map(str, sorted(free))) or 'none'}")
    ids = [sorted([*attn.head_ids, *heads.get(layer, ())]) for layer, attn in enumerate(attentions(model))]
    config = replace(model.config, head_ids=ids, seed=model.config.seed + seed)
    fresh = GPT(config).to(model.transformer.wte.weight.device, model.transformer.wte.weight.dtype)
    for layer in heads:
        attn, other = attentions(model)[layer], attentions(fresh)[layer]
        old = torch.tensor([i in attn.head_ids for i in ids[layer]])
        other.c_proj.weight[:, (~old).repeat_interleave(attn.head_size)] = 0.0
        if attn.gate_override is not None:
            other.gate_override = torch.full((other.n_total,), math.nan, device=attn.gate_override.device)
        for axis, start in zip(attn.head_axes(), other.head_axes()):
            kept = torch.cat((old, torch.ones(attn.n_extra * axis.extra, dtype=torch.bool)))
            rows = kept.repeat(axis.parts).repeat_interleave(axis.size).nonzero().flatten()
            put_rows(axis, getattr(start.module, start.tensor, None), rows, optimizers)
        attn.head_ids, attn.n_head = ids[layer], len(ids[layer])
        for module in attn.modules():
            if isinstance(module, nn.Linear):
                module.out_features, module.in_features = module.weight.shape
    model.config = replace(model.config, head_ids=ids)


def stack_blocks(model):
    """Put a copy of all blocks on top of them (stacking, arXiv 2405.15319); {new parameter: what it copies}.

    Another function than before: a control for growth by heads. Raises ValueError where blocks are not alike.
    """
    c = model.config
    if c.unet or c.constraint_names or c.window_layers is not None:
        raise ValueError("blocks with U-Net skips, constraint heads or window_layers are not alike: "
                         "they cannot be stacked")
    blocks, ids = model.transformer.h, model.config.head_ids
    copies = copy.deepcopy(blocks)
    for block in copies:
        block.attn.layer += len(blocks)
    copied = dict(zip(copies.parameters(), blocks.parameters()))
    model.transformer.h = nn.ModuleList([*blocks, *copies])
    model.config = replace(model.config, n_layer=2 * len(blocks), head_ids=ids and [*ids, *map(list, ids)])
    return copied


def put_rows(axis, fresh, rows, optimizers):
    """Put the tensor of a HeadAxis at `rows` of a fresh, larger one, which takes its place.

    What optimizers hold of the old rows moves along; of the new ones they begin at 0.
    """
    module, name, dim = axis.module, axis.tensor, axis.dim
    old = getattr(module, name, None)
    if old is None:
        return
    rows = rows.to(old.device)

    def larger(t, start):
        return start.clone().index_copy_(dim, rows, t)

    if not isinstance(old, nn.Parameter):
        return setattr(module, name, larger(old, fresh))
    new = nn.Parameter(larger(old.detach(), fresh.detach()), old.requires_grad)
    setattr(module, name, new)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
        if old in optimizer.state:
            optimizer.state[new] = {
                key: larger(t, torch.zeros_like(new)) if torch.is_tensor(t) and t.shape == old.shape else t
                for key, t in optimizer.state.pop(old).items()}
