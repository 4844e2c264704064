"""
Removes and adds heads between the steps of a run (Surgery): gates are folded into weights, heads inserted.

Nothing here touches the training step. Source: the Adaptive Transformer write-up, sections 2.2 and 7.
"""

import copy
import math
from dataclasses import replace

import numpy as np
import torch

from model import GPT
from nanoheads.pruning import head_axes, prune_heads, put, refuse_joined, rows_of, scale_heads, set_heads
from lab.heads.measuring import attentions, closed, head_ids


def fold_gates(model):
    """A copy of the same logits, whose output projections hold the gates that were set by hand.

    A head that is closed by hand leaves the copy where others read what it holds: they take nothing from a
    closed head, but would go on reading one whose projection is 0.
    """
    model, closed = copy.deepcopy(model), {}
    for layer, attn in enumerate(attentions(model)):
        if attn.gate_by_hand is None:
            continue
        heads = [head for head, gate in zip(attn.head_ids, attn.gate_by_hand.tolist()) if gate == 0]
        if heads and is_read_by_others(attn):
            closed[layer] = heads
        scale_heads(attn, attn.gate_by_hand)
        attn.gate_by_hand = None
    if closed:
        prune_heads(model, closed)
    return model


def is_read_by_others(attn):
    """Whether others than the layer's projection out read what its heads hold: head_mix does, and from the
    first layer value_residual.
    """
    first = attn.value_residual is not None and attn.value_residual.share is None
    return first or attn.head_mix is not None


# ---- heads that are inserted ----

@torch.no_grad()
def insert_heads(model, heads, optimizers=(), seed=0):
    """Put heads {layer: [head, ...]} into the free numbers below n_head; the logits stay what they are.

    A new head begins as in a new model of another `seed`, but what it sends out is 0, and so are the
    optimizers' moments. A compiled or data-parallel wrapper has to be made anew. Raises ValueError for a
    number that is taken, or that there is not, or where heads depend on one another.
    """
    refuse_joined(attentions(model))
    for layer, numbers in heads.items():
        if not 0 <= layer < model.config.n_layer:
            raise ValueError(f"cannot insert into block {layer}; "
                             f"they go from 0 to {model.config.n_layer - 1}")
        if numbers and is_read_by_others(attentions(model)[layer]):
            raise ValueError(f"cannot insert into block {layer}: others read what its heads hold")
        free = set(range(model.config.n_head)) - set(attentions(model)[layer].head_ids)
        if not set(numbers) <= free:
            raise ValueError(f"cannot insert {sorted(numbers)} into block {layer}: "
                             f"free are {', '.join(map(str, sorted(free))) or 'none'}")
    ids = [sorted([*attn.head_ids, *heads.get(layer, ())]) for layer, attn in enumerate(attentions(model))]
    config = replace(model.config, head_ids=ids, seed=model.config.seed + seed)
    fresh = GPT(config).to(model.transformer.wte.weight.device, model.transformer.wte.weight.dtype)
    for layer in heads:
        attn, fresh_attn = attentions(model)[layer], attentions(fresh)[layer]
        is_old = torch.tensor([i in attn.head_ids for i in ids[layer]])
        fresh_attn.c_proj.weight[:, (~is_old).repeat_interleave(attn.head_size)] = 0.0
        if attn.gate_by_hand is not None:
            fresh_attn.gate_by_hand = attn.gate_by_hand.new_ones(fresh_attn.n_total)
        for (module, name, axis), (fresh_module, _, _) in zip(head_axes(attn), head_axes(fresh_attn)):
            if (tensor := getattr(module, name, None)) is not None:
                put_rows(module, name, axis.dim, getattr(fresh_module, name),
                         rows_of(axis, tensor, is_old, attn), optimizers)
        set_heads(attn, ids[layer])
    model.config = replace(model.config, head_ids=ids)


def put_rows(module, name, dim, fresh, rows, optimizers):
    """Put a module's tensor at `rows` of a fresh one, larger along `dim`, which takes its place.

    What optimizers hold of the old rows moves along; of the new ones they begin at 0.
    """
    def larger(t):
        return fresh.detach().clone().index_copy_(dim, rows.to(t.device), t)

    def larger_moments(t):
        shape = list(t.shape)
        shape[dim] = fresh.size(dim)
        return t.new_zeros(shape).index_copy_(dim, rows.to(t.device), t)
    put(module, name, dim, larger, larger_moments, optimizers)


# ---- during a run ----

class Surgery:
    """Heads dropped and grown while a model trains; what is done goes into the list `events`.

    frozen: closed and to be dropped; ramps: {(layer, head): first step} of gates that open.
    """

    def __init__(self, config, events):
        self.config, self.events = config, events
        self.frozen, self.ramps = [], {}

    def event(self, what, layer, head, **details):
        self.events.append(dict(what=what, layer=layer, head=head, **details))

    # ---- pruning ----

    def drop(self, measurements, run):
        """Drop what was frozen; whether there was any."""
        dropped = {}
        for layer, head in self.frozen:
            dropped.setdefault(layer, []).append(head)
            self.event("pruned", layer, head)
        if dropped:
            prune_heads(run.model, dropped, run.optimizers)
            self.frozen = []
            is_gone = measurements.forget_missing(run.model)
            self.ramps = {place: step for place, step in self.ramps.items() if not is_gone[place]}
        return bool(dropped)

    def freeze(self, measurements, run):
        """Close heads whose gate has long been low, for good if the held-out loss agrees."""
        c = self.config
        # the sentinel's own gate: a withdrawn head may come back
        own_gates = [attn.sentinel.gate(noisy=False).detach() for attn in attentions(run.model)]
        gates = measurements.heads.spread(own_gates, head_ids(run.model))
        gates[:, run.model.config.n_head:] = math.nan  # constraint heads stay: their scores are their purpose
        with np.errstate(invalid="ignore"):
            low = measurements.lasts("low", gates < c.prune_gate)
        loss_before = measurements.held_out_loss
        for layer, head in sorted(zip(*np.nonzero(low)), key=lambda place: gates[place]):
            layer, head = int(layer), int(head)
            n_closing = sum(place[0] == layer for place in self.frozen)
            n_left = len(attentions(run.model)[layer].head_ids) - n_closing
            if n_left <= c.prune_floor:
                continue
            with closed(run.model, [(layer, head)]):
                loss_after = measurements.held_out_nats(run)
            measurements.counts["low"][layer, head] = 0
            if loss_after - loss_before > c.prune_margin:
                self.event("kept", layer, head, cost=loss_after - loss_before)
                continue
            run.model.set_gate(layer, head, 0.0)
            self.ramps.pop((layer, head), None)  # else it would open again
            self.frozen.append((layer, head))
            self.event("frozen", layer, head, cost=loss_after - loss_before)
            loss_before = loss_after

    # ---- growth ----

    def is_plateau(self, losses):
        """Whether the held-out loss has fallen by less than grow_delta within the last measurements."""
        n = self.config.controller_patience
        return len(losses) > n and min(losses[:-n]) - min(losses[-n:]) < self.config.grow_delta

    def grow(self, measurements, run):
        """Insert heads where all are used and the held-out loss no longer falls; whether any."""
        c, model = self.config, run.model
        if self.ramps or not self.is_plateau(measurements.losses):
            return False
        new_heads = {}
        for layer, attn in enumerate(attentions(model)):
            free = sorted(set(range(model.config.n_head)) - set(attn.head_ids))
            if not free or not attn.head_ids or is_read_by_others(attn):
                continue
            metrics = measurements.heads
            load = np.where(metrics.withdrawn, 0.0, metrics.mean["load"])[layer, attn.head_ids]
            if load.min() >= c.grow_used:
                new_heads[layer] = free[:c.grow_heads]
        if not new_heads:
            return False
        insert_heads(model, new_heads, run.optimizers, seed=run.step)
        for layer, heads in new_heads.items():
            for head in heads:
                self.ramps[layer, head] = run.step
                self.event("grown", layer, head)
        measurements.losses = []
        return True

    def open_ramps(self, run):
        """Open the gates of new heads step by step, by hand, until their own gates act alone."""
        for (layer, head), start in list(self.ramps.items()):
            share = min(1.0, (run.step - start) / self.config.grow_ramp)
            run.model.set_gate(layer, head, share)
            if share == 1:
                del self.ramps[layer, head]

    # ---- keeping ----

    def state(self):
        """For a checkpoint: a dict of lists and numbers."""
        return dict(frozen=self.frozen, ramps=[[*place, step] for place, step in self.ramps.items()])

    def load(self, state):
        self.frozen = [tuple(place) for place in state["frozen"]]
        self.ramps = {(layer, head): step for layer, head, step in state["ramps"]}
