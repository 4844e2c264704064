"""Heads removed for good, from parameters, buffers, cache and optimizers.

Nothing here imports the model: a layer of another library that has `per_head` is pruned in the same way.
"""

import copy
import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from nanoheads.mechanism import whole_groups


PAIRED = ("paired_heads", "diff_v1")  # flags that join heads 0 and 1, 2 and 3, ...: these go together


class HeadAxis(NamedTuple):
    """Where a tensor has its heads: in rows of dim 0, one a head, unless these say otherwise.

    Whether heads that were added behind the layer's own have rows too follows from the tensor's size.
    """

    dim: int = 0
    size: int = 1    # entries of one head along dim
    parts: int = 1   # how often the heads are repeated along dim: 3 where q, k and v are stacked
    shared: int = 0  # how many of those parts, the last ones, have a row for each group of heads alone


def head_axes(attn):
    """[(module, name of a tensor there, HeadAxis)] of all tensors of a layer that have rows for each head."""
    axes = []
    for part in (attn, *attn.mechanisms()):
        per_head = part.per_head
        if not isinstance(per_head, dict):
            per_head = dict.fromkeys(per_head, HeadAxis())
        for path, axis in per_head.items():
            module, _, name = path.rpartition(".")
            axes.append((part.get_submodule(module), name, axis))
    return axes


# mechanisms whose gate of a head is the same whatever the text; gate() of each gives it, [H]
CONSTANT_GATES = ("sentinel", "agency")


def constant_gate(attn, noisy=False):
    """The product of a layer's gates that depend on no text, [H]; None: it has no such gate.

    noisy: with the noise that a gate may have in training.
    """
    modules = [getattr(attn, name, None) for name in CONSTANT_GATES]
    gates = [attn.gate_by_hand, *(m.gate(noisy) for m in modules if m is not None)]
    gates = [gate for gate in gates if gate is not None]
    return math.prod(gates) if gates else None


def prune_heads(model, heads, optimizers=()):
    """Remove heads of a GPT for good, {layer: [head, ...]} by their original numbers.

    The logits are those of the model with these heads' gates at 0. Constraint heads stay: their scores are
    what they are for. A compiled or data-parallel wrapper has to be made anew. Raises ValueError for a head
    that is not there.
    """
    layers = [block.attn for block in model.transformer.h]
    for layer, gone in heads.items():
        if not 0 <= layer < len(layers):
            raise ValueError(f"cannot prune block {layer}; they go from 0 to {len(layers) - 1}")
        if set(gone) - set(layers[layer].head_ids):
            raise ValueError(f"cannot prune {sorted(gone)} from block {layer}: not all of them are there")
        if not whole_groups(gone, n := layers[layer].unit):
            raise ValueError(f"cannot prune {sorted(gone)} from block {layer}: groups of "
                             f"{n} heads go together")
    for layer, gone in heads.items():
        prune_layer(layers[layer], gone, optimizers)
    model.config = replace(model.config, head_ids=[attn.head_ids for attn in layers])


def pack(model):
    """A copy for evaluation, of the same logits, without the heads whose gate is 0, for whatever reason."""
    return pack_in_place(copy.deepcopy(model).eval())


def pack_in_place(model):
    """What pack() makes, of the model itself; one in which nothing is withdrawn stays as it is."""
    closed = {layer: closed_heads(block.attn) for layer, block in enumerate(model.transformer.h)}
    if gone := {layer: heads for layer, heads in closed.items() if heads}:
        prune_heads(model, gone)
    return model


def closed_heads(attn):
    """The base heads whose gate is exactly 0 when evaluated, of whole groups, by their original numbers."""
    gate = constant_gate(attn)
    if gate is None:
        return []
    closed = {i for i, g in zip(attn.head_ids, gate.tolist()) if g == 0}
    n = attn.unit
    return [i for i in attn.head_ids if closed.issuperset(range(i // n * n, i // n * n + n))]


@torch.no_grad()
def prune_layer(attn, gone, optimizers=()):
    """Drop base heads, by their original numbers, from every tensor of a layer and from the moments."""
    stays = torch.tensor([i not in gone for i in attn.head_ids], dtype=torch.bool)
    for module, name, axis in head_axes(attn):
        if (tensor := getattr(module, name, None)) is not None:
            keep_rows(module, name, axis.dim, rows_of(axis, tensor, stays, attn), optimizers)
    set_heads(attn, [i for i in attn.head_ids if i not in gone])


def rows_of(axis, tensor, heads, attn):
    """The places along a HeadAxis of the own heads that a bool [H] names, and of all added heads.

    tensor: what has the axis, with rows for each of these own heads that the layer has now.
    """
    shared = heads[::attn.group] if attn.group > 1 else heads
    parts = [heads] * (axis.parts - axis.shared) + [shared] * axis.shared
    if has_added_heads(axis, tensor, attn):
        parts.append(torch.ones(attn.n_extra, dtype=torch.bool))
    return torch.cat(parts).repeat_interleave(axis.size).nonzero().flatten()


def has_added_heads(axis, tensor, attn):
    """Whether a tensor with this HeadAxis has rows for the heads that are added to the layer's own."""
    own_rows = attn.n_head * (axis.parts - axis.shared) + attn.n_head // attn.group * axis.shared
    return tensor.size(axis.dim) != own_rows * axis.size


def keep_rows(module, name, dim, rows, optimizers):
    """Keep only `rows` of a module's parameter or buffer along `dim`, and of what optimizers hold."""
    def select(t):
        return t.index_select(dim, rows.to(t.device))
    put(module, name, dim, select, select, optimizers)


def put(module, name, dim, change, change_moments, optimizers):
    """Put change(t) in the place of a module's parameter or buffer t, in optimizers too.

    Its gradient, and what optimizers hold that has t's rows along `dim`, become change_moments(of it).
    """
    old = getattr(module, name, None)
    if old is None:
        return
    if not isinstance(old, nn.Parameter):
        return setattr(module, name, change(old))
    new = nn.Parameter(change(old.detach()), old.requires_grad)
    new.grad = None if old.grad is None else change_moments(old.grad)
    setattr(module, name, new)

    def follows(t):  # a moment of each row, [rows, 1], follows the rows alone
        return torch.is_tensor(t) and t.dim() == old.dim() and t.size(dim) == old.size(dim)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
        if old in optimizer.state:
            optimizer.state[new] = {key: change_moments(t) if follows(t) else t
                                    for key, t in optimizer.state.pop(old).items()}


def set_heads(attn, head_ids):
    """Set what a layer and its linear modules say of their sizes."""
    attn.head_ids, attn.n_head = head_ids, len(head_ids)
    for module in attn.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape


@torch.no_grad()
def scale_heads(attn, factor):
    """Multiply what each head of a layer sends out by factor [H], for good."""
    attn.c_proj.weight.mul_(factor[:attn.n_head].repeat_interleave(attn.head_size))
    if attn.n_extra:
        attn.constraint.c_proj.weight.mul_(factor[attn.n_head:].repeat_interleave(attn.head_size))
