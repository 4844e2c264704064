"""
Removes heads for good: their rows leave parameters, buffers and the moments of optimizers.

Nothing here imports the model: a layer of another library that has `per_head` is pruned in the same way.
"""

import copy
import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from nanoheads.mechanism import whole_groups


PAIRED = ("paired_heads", "diff_v1")  # flags that join heads 0 and 1, 2 and 3, ...: a pair is pruned whole


class HeadAxis(NamedTuple):
    """Where a tensor has its heads; by default along dim 0, one row a head.

    Whether added heads have rows too, behind the layer's own, follows from the tensor's size.
    """

    dim: int = 0
    size: int = 1    # rows of one head along dim
    parts: int = 1   # how often the heads are repeated along dim: 3 where q, k and v are stacked
    shared: int = 0  # of these parts, how many at the end have one head for each group of heads


def head_axes(attn):
    """[(module, name of a tensor of it, HeadAxis)] of all tensors of a layer with rows for each head."""
    axes = []
    for part in (attn, *attn.mechanisms()):
        per_head = part.per_head or ()
        if not isinstance(per_head, dict):
            per_head = dict.fromkeys(per_head, HeadAxis())
        for path, axis in per_head.items():
            module, _, name = path.rpartition(".")
            axes.append((part.get_submodule(module), name, axis))
    return axes


def joined_by(attn):
    """The class name of a mechanism of a layer that says that its heads depend on one another; None: none."""
    return next((type(m).__name__ for m in attn.mechanisms() if m.per_head is None), None)


def refuse_joined(layers):
    """ValueError where heads of one of these layers depend on one another: none comes or goes by itself."""
    for name in filter(None, map(joined_by, layers)):
        raise ValueError(f"heads of {name} depend on one another (per_head = None), so that none can be "
                         "pruned or grown")


# mechanisms with a gate that depends on no text; gate() gives it without the noise of training, [H]
CONSTANT_GATES = ("sentinel", "agency")


def constant_gate(attn):
    """The product of a layer's gates that depend on no text, [H]; None: it has no such gate."""
    modules = [getattr(attn, name, None) for name in CONSTANT_GATES]
    gates = [attn.gate_by_hand, *(m.gate() for m in modules if m is not None)]
    gates = [gate for gate in gates if gate is not None]
    return math.prod(gates) if gates else None


def prune_heads(model, heads, optimizers=()):
    """Remove heads of a GPT for good, {layer: [head, ...]} by their original numbers.

    The logits are those of the model with these heads' gates at 0. Constraint heads cannot be pruned, since
    they are there for their scores. A compiled or data-parallel wrapper has to be made anew. Raises
    ValueError for a head that is not there, or where heads depend on one another.
    """
    layers = [block.attn for block in model.transformer.h]
    refuse_joined(layers)
    for layer, removed in heads.items():
        if not 0 <= layer < len(layers):
            raise ValueError(f"cannot prune block {layer}; they go from 0 to {len(layers) - 1}")
        if set(removed) - set(layers[layer].head_ids):
            raise ValueError(f"cannot prune {sorted(removed)} from block {layer}: not all of them are there")
        if not whole_groups(removed, n := layers[layer].unit):
            raise ValueError(f"cannot prune {sorted(removed)} from block {layer}: groups of "
                             f"{n} heads go together")
    for layer, removed in heads.items():
        prune_layer(layers[layer], removed, optimizers)
    model.config = replace(model.config, head_ids=[attn.head_ids for attn in layers])


def pack(model):
    """A copy of the model for evaluation, with the same logits, without the heads whose gates make 0."""
    return pack_in_place(copy.deepcopy(model).eval())


def pack_in_place(model):
    """The model itself, pruned as pack() prunes its copy; one without closed heads stays as it is."""
    closed = {layer: closed_heads(block.attn) for layer, block in enumerate(model.transformer.h)}
    closed = {layer: heads for layer, heads in closed.items() if heads}
    if closed:
        prune_heads(model, closed)
    return model


def closed_heads(attn):
    """The layer's own heads whose gate is exactly 0 when evaluated, in whole groups, by original number; none
    where the others depend on them.
    """
    gate = constant_gate(attn)
    if gate is None or joined_by(attn):
        return []
    closed = {i for i, g in zip(attn.head_ids, gate.tolist()) if g == 0}
    n = attn.unit
    return [i for i in attn.head_ids if closed.issuperset(range(i // n * n, i // n * n + n))]


@torch.no_grad()
def prune_layer(attn, removed, optimizers=()):
    """Remove own heads, by their original numbers, from every tensor of a layer and from the moments."""
    kept = torch.tensor([i not in removed for i in attn.head_ids], dtype=torch.bool)
    for module, name, axis in head_axes(attn):
        if (tensor := getattr(module, name, None)) is not None:
            keep_rows(module, name, axis.dim, rows_of(axis, tensor, kept, attn), optimizers)
    set_heads(attn, [i for i in attn.head_ids if i not in removed])


def rows_of(axis, tensor, heads, attn):
    """The indices of the rows along a HeadAxis that a layer's own heads have, where `heads`, bool [H], is
    True, and that all added heads have. tensor: the one with the axis.
    """
    shared = heads[::attn.group] if attn.group > 1 else heads
    parts = [heads] * (axis.parts - axis.shared) + [shared] * axis.shared
    if has_added_heads(axis, tensor, attn):
        parts.append(torch.ones(attn.n_extra, dtype=torch.bool))
    return torch.cat(parts).repeat_interleave(axis.size).nonzero().flatten()


def has_added_heads(axis, tensor, attn):
    """Whether a tensor with this HeadAxis has rows for the layer's added heads, too."""
    own_rows = attn.n_head * (axis.parts - axis.shared) + attn.n_head // attn.group * axis.shared
    return tensor.size(axis.dim) != own_rows * axis.size


def keep_rows(module, name, dim, rows, optimizers):
    """Keep only `rows` along `dim` of a module's parameter or buffer, and of its moments in optimizers."""
    def select(t):
        return t.index_select(dim, rows.to(t.device))
    put(module, name, dim, select, select, optimizers)


def put(module, name, dim, change, change_moments, optimizers):
    """Put change(t) in the place of a module's parameter or buffer t, in optimizers too.

    Its gradient, and those of its moments that have its rows along `dim`, are put through change_moments().
    """
    old = getattr(module, name)
    if not isinstance(old, nn.Parameter):
        return setattr(module, name, change(old))
    new = nn.Parameter(change(old.detach()), old.requires_grad)
    new.grad = None if old.grad is None else change_moments(old.grad)
    setattr(module, name, new)

    def has_rows(t):  # as moments have of the parameter's shape, or one number for each row, [rows, 1]
        return torch.is_tensor(t) and t.dim() == old.dim() and t.size(dim) == old.size(dim)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
        if old in optimizer.state:
            optimizer.state[new] = {key: change_moments(t) if has_rows(t) else t
                                    for key, t in optimizer.state.pop(old).items()}


def set_heads(attn, head_ids):
    """Set a layer's heads, and the sizes that its linear modules state, by their weights."""
    attn.head_ids, attn.n_head = head_ids, len(head_ids)
    for module in attn.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape


@torch.no_grad()
def scale_heads(attn, factor):
    """Multiply the output of each head of a layer by factor [H], for good."""
    attn.c_proj.weight.mul_(factor[:attn.n_head].repeat_interleave(attn.head_size))
    if attn.n_extra:
        attn.constraint.c_proj.weight.mul_(factor[attn.n_head:].repeat_interleave(attn.head_size))
