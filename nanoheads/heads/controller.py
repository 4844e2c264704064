"""
What changes heads while a model trains: gates that are moved, heads pruned and grown, states and consent.

All of it happens between two steps, on measurements of a small fixed text (heads.py), so that the training
step is the one that it would be without. Source: the Adaptive Transformer write-up, sections 2.2, 3, 4.2, 7.

heads.jsonl        a row each measurement: the metrics of every head, states, and what was done
violations.jsonl   a row each time that consent begins to be disregarded, or a rule stops somebody
"""

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from model import Agency
from nanoheads.common import UserError, json_safe
from nanoheads.heads.measuring import (all_heads, attentions, closed, fixed_text, fold_gates, insert_heads,
                                       measure, nats_on, stack_blocks, static_gates)
from nanoheads.training import checkpoint
from nanoheads.training.optim import Trainer, precision
from nanoheads.training.rules import Rules
from nanoheads.training.runlog import read_rows, write_rows


def starting_config(model_config, config):
    """The GPTConfig to build: with the first grow_from heads of every layer, or those of the last save."""
    last = Path(config.out_dir) / "ckpt.pt"
    if config.dynamic_heads and config.resume and last.is_file():
        saved = checkpoint.read(last)["config"]
        return replace(model_config, head_ids=saved.get("head_ids"), n_layer=saved["n_layer"])
    if config.grow_from is None:
        return model_config
    return replace(model_config, head_ids=[list(range(config.grow_from))] * model_config.n_layer)


# ---- small networks ----

def small_net(n, generator):
    """n numbers of a head -> one; its last layer begins at 0."""
    net = nn.Sequential(nn.Linear(n, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(0.0, n ** -0.5, generator=generator) if p.dim() == 2 else p.zero_()
        net[-1].weight.zero_()
    return net


class Nobody:
    """Moves no gate."""

    def __init__(self, config, generator):
        self.config, self.generator = config, generator

    def moves(self, controller, features, run):
        """The change of each head's logit, [heads], from features [heads, n]."""
        return torch.zeros(len(features), dtype=torch.float64)

    def state(self):
        return {}

    def load(self, state):
        pass


class ByRules(Nobody):
    """Lower a gate's logit where entropy is long high, slightly where the gradient is long small.

    The write-up's two heuristics (section 3.2). Entropy is high from controller_entropy on until it is 0.05
    below it, so that a head at the threshold does not flicker.
    """

    def moves(self, controller, features, run):
        c, step = self.config, self.config.controller_step
        entropy, gradient = controller.mean["entropy"], controller.mean["gradient"]
        high = controller.high
        high[entropy > c.controller_entropy] = True
        high[~(entropy >= c.controller_entropy - 0.05)] = False
        with np.errstate(invalid="ignore"):
            small = gradient < c.controller_gradient * layer_mean(gradient)
        long_high = controller.lasting("high", high)
        long_small = controller.lasting("small", small)
        delta = -step * long_high - step / 4 * long_small
        return torch.from_numpy(delta[controller.here])


class ByNetwork(Nobody):
    """A network predicts from a head's metrics what closing it would cost; gates move by that and a price.

    Signal: at each measurement a few heads, drawn at random, are closed one by one and the held-out loss is
    taken, weights fixed. The network learns asinh(rise / controller_cost) of the last 256 such trials. A
    head's logit then moves by controller_step * tanh(prediction - asinh(1)): down where it is not worth it.
    """

    TRIALS, MEMORY = 4, 256

    def __init__(self, config, generator):
        super().__init__(config, generator)
        self.net = small_net(FEATURES, generator)
        self.adam = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.seen = torch.zeros(0, FEATURES + 1, dtype=torch.float64)

    def moves(self, controller, features, run):
        heads = all_heads(run.model)
        for i in torch.randperm(len(heads), generator=self.generator)[:self.TRIALS].tolist():
            with closed(run.model, [heads[i]]):
                rise = controller.heldout(run) - controller.heldout_now
            target = math.asinh(rise / self.config.controller_cost)
            row = torch.cat((features[i], torch.tensor([target], dtype=torch.float64)))
            self.seen = torch.cat((self.seen, row[None]))[-self.MEMORY:]
        for _ in range(20):
            error = (self.net(self.seen[:, :-1]).squeeze(-1) - self.seen[:, -1]).square().mean()
            self.adam.zero_grad()
            error.backward()
            self.adam.step()
        with torch.no_grad():
            worth = self.net(features).squeeze(-1)
        return self.config.controller_step * torch.tanh(worth - math.asinh(1))

    def state(self):
        return dict(net=self.net.state_dict(), adam=self.adam.state_dict(), seen=self.seen)

    def load(self, state):
        self.net.load_state_dict(state["net"])
        self.adam.load_state_dict(state["adam"])
        self.seen = state["seen"].cpu()


class ByReward(Nobody):
    """Actor-critic over the run: reward = fall of the held-out loss since the last move - cost * open heads.

    Each head's action is drawn from N(actor(metrics), 1/4) and moves its logit by controller_step * tanh. The
    critic's value of a moment is its mean over heads; the advantage is r + 0.9 V' - V, in units of the cost.
    """

    GAMMA, SPREAD = 0.9, 0.5

    def __init__(self, config, generator):
        super().__init__(config, generator)
        self.actor, self.critic = small_net(FEATURES, generator), small_net(FEATURES, generator)
        self.adam = torch.optim.Adam([*self.actor.parameters(), *self.critic.parameters()], lr=0.01)
        self.last = None  # (features, actions, held-out loss) of the move before

    def moves(self, controller, features, run):
        if self.last is not None:
            before, actions, loss = self.last
            open_heads = float(np.nansum(controller.now["gate"]))
            reward = (loss - controller.heldout_now) / max(self.config.controller_cost, 1e-6) - open_heads
            value = self.critic(before).mean()
            with torch.no_grad():
                target = reward + self.GAMMA * self.critic(features).mean()
            advantage = target - value
            chance = -((actions - self.actor(before).squeeze(-1)) / self.SPREAD).square() / 2
            loss = advantage.square() - (advantage.detach().clamp(-10, 10) * chance).mean()
            self.adam.zero_grad()
            loss.backward()
            self.adam.step()
        with torch.no_grad():
            noise = torch.randn(len(features), generator=self.generator, dtype=torch.float64)
            actions = self.actor(features).squeeze(-1) + self.SPREAD * noise
        self.last = features, actions, controller.heldout_now
        return self.config.controller_step * torch.tanh(actions)

    def state(self):
        return dict(actor=self.actor.state_dict(), critic=self.critic.state_dict(),
                    adam=self.adam.state_dict(), last=None if self.last is None else list(self.last))

    def load(self, state):
        self.actor.load_state_dict(state["actor"])
        self.critic.load_state_dict(state["critic"])
        self.adam.load_state_dict(state["adam"])
        self.last = state["last"] and [t.cpu() if torch.is_tensor(t) else t for t in state["last"]]


MOVERS = {None: Nobody, "rules": ByRules, "ann": ByNetwork, "rl": ByReward}
FEATURES = 7


def layer_mean(values):
    """[L, S] with NaN for heads that are gone -> [L, 1], the mean of each layer's."""
    n = np.isfinite(values).sum(1, keepdims=True)
    return np.nansum(values, 1, keepdims=True) / np.maximum(n, 1)


# ---- the controller ----

class Controller:
    """What is known of a run's heads, and what is done with them. Arrays are [blocks, heads], NaN: gone."""

    def __init__(self, run):
        self.config, self.model = run.config, run.model
        c, model, process = self.config, self.model, run.process
        device, T = process.device, model.config.block_size
        self.probe = [t.to(device) for t in
                      fixed_text(run.dataset, "train", T, c.controller_tokens, process.rank, process.world)]
        self.judge = [t.to(device) for t in
                      fixed_text(run.dataset, "val", T, c.controller_heldout, process.rank, process.world)]
        self.generator = torch.Generator().manual_seed(model.config.seed)
        self.mover = MOVERS[c.controller](c, self.generator)
        self.rules = Rules.read(c.policy_rules) if c.policy_rules else Rules()
        self.autocast = precision(c.dtype, process.kind)[1]
        self.measured, self.seconds = 0, 0.0
        self.frozen, self.ramps = [], {}        # closed and to be dropped; {(layer, head): first step}
        self.losses, self.stacked = [], False   # held-out, since the last growth
        self.begin()
        self.violating, self.refused = set(), set()
        self.heldout_now = math.nan
        self.events = []

    def begin(self):
        """Nothing is known of any head of the model."""
        extra = max(attn.n_extra for attn in attentions(self.model))
        self.shape = (self.model.config.n_layer, self.model.config.n_head + extra)
        self.mean, self.now = {}, {}
        self.counts = {name: self.full(0) for name in ("high", "small", "low")}
        self.high = self.full(False)
        self.since = self.full(-10**9)          # measurement of the last change of state

    def full(self, value):
        return np.full(self.shape, value)

    # ---- keeping ----

    ARRAYS = ("high", "since")
    VALUES = ("measured", "seconds", "frozen", "losses", "stacked", "heldout_now")

    def state(self):
        """For a checkpoint: a dict of tensors, lists and numbers."""
        found = {name: getattr(self, name) for name in self.VALUES}
        found.update({name: torch.from_numpy(getattr(self, name).copy()) for name in self.ARRAYS})
        for name in ("counts", "mean", "now"):
            found[name] = {key: torch.from_numpy(value.copy()) for key, value in getattr(self, name).items()}
        found.update(ramps=[[*place, step] for place, step in self.ramps.items()],
                     violating=[list(v) for v in sorted(self.violating)],
                     refused=[list(v) for v in sorted(self.refused)],
                     overrides=[attn.gate_override for attn in attentions(self.model)],
                     generator=self.generator.get_state(), mover=self.mover.state())
        return found

    def load(self, state, run):
        for name in self.VALUES:
            setattr(self, name, state[name])
        for name in self.ARRAYS:
            setattr(self, name, state[name].cpu().numpy().copy())
        for name in ("counts", "mean", "now"):
            setattr(self, name, {key: value.cpu().numpy().copy() for key, value in state[name].items()})
        self.frozen = [tuple(place) for place in state["frozen"]]
        self.ramps = {(layer, head): step for layer, head, step in state["ramps"]}
        self.violating, self.refused = ({tuple(v) for v in state[key]} for key in ("violating", "refused"))
        self.generator.set_state(state["generator"].cpu())
        self.mover.load(state["mover"])
        for attn, override in zip(attentions(run.model), state["overrides"]):
            attn.gate_override = override
        self.set_sparsity(run)

    def as_scored(self, run):
        """The model's state with gates set by hand multiplied into what heads send out, for a best.pt."""
        return fold_gates(run.model)[0].state_dict()

    # ---- measuring ----

    def spread(self, values, model):
        """[a tensor [H] a block] -> [blocks, heads] by the original numbers."""
        found = self.full(math.nan).astype(float)
        for layer, (attn, value) in enumerate(zip(attentions(model), values)):
            found[layer, attn.all_head_ids()] = value.cpu().numpy()
        return found

    def heldout(self, run):
        """Mean nats per token of the held-out text."""
        nats = nats_on(run.model, *self.judge, self.autocast)
        total, n = run.process.all_reduce_sum([nats * len(self.judge[0]), float(len(self.judge[0]))])
        return total / n

    def look(self, run):
        """Measure: `now` and the moving averages `mean` of each metric; UserError where one is not finite."""
        try:
            found = measure(run.model, *self.probe, self.autocast)
        except ValueError as e:
            raise UserError(f"step {run.step}: {e}; a lower lr, or controller_interval") from None
        flat = torch.cat([t.double().cpu() for values in found.values() for t in values]).tolist()
        sizes = [len(t) for values in found.values() for t in values]
        world = run.process.world
        flat = torch.tensor(run.process.all_reduce_sum(flat), dtype=torch.float64) / world
        parts = iter(flat.split(sizes))
        for name, values in found.items():
            new = self.spread([next(parts) for _ in values], run.model)
            old = self.mean.get(name, new)
            keep = self.config.controller_average * np.isfinite(old)
            self.now[name], self.mean[name] = new, new * (1 - keep) + np.nan_to_num(old) * keep
        self.here = np.isfinite(self.now["gate"])
        self.heldout_now = self.heldout(run)
        self.losses.append(self.heldout_now)

    def features(self):
        """[heads, FEATURES] of the heads that are here, in all_heads()' order."""
        m, floor = self.mean, 1e-12
        relative = [np.log(np.maximum(m[k], floor) / np.maximum(layer_mean(m[k]), floor)).clip(-5, 5)
                    for k in ("gradient", "importance")]
        depth = np.arange(self.shape[0])[:, None] / max(1, self.shape[0] - 1) + 0 * m["gate"]
        columns = [m["entropy"], *relative, self.used().clip(0, 5), m["gate"], m["conflict"], depth]
        return torch.from_numpy(np.stack([column[self.here] for column in columns], 1))

    def used(self):
        """Utilisation over an equal share of the layer."""
        return self.mean["utilisation"] * np.isfinite(self.mean["utilisation"]).sum(1, keepdims=True)

    def lasting(self, name, holds):
        """Where `holds` has held for controller_patience measurements in a row, [blocks, heads]."""
        count = np.where(holds, self.counts[name] + 1, 0)
        self.counts[name] = count
        return count >= self.config.controller_patience

    # ---- gates ----

    def move_gates(self, run):
        """Add the mover's changes to the gates' logits; no move leads beyond controller_bound."""
        deltas = self.mover.moves(self, self.features(), run)
        if not deltas.isfinite().all():
            raise UserError(f"step {run.step}: the controller's moves are not finite")
        deltas, at, bound = deltas.float(), 0, self.config.controller_bound
        for attn in attentions(run.model):
            logit = attn.sentinel.logit.detach()
            delta = deltas[at:at + len(logit)].to(logit.device)
            up, down = (bound - logit).clamp_min(0), (-bound - logit).clamp_max(0)
            logit.add_(torch.minimum(torch.maximum(delta, down), up))
            at += len(logit)

    def set_sparsity(self, run):
        """The weight of the gates' penalty, which stays from one measurement to the next."""
        if self.config.sparsity_warmup:
            measured = run.step - run.step % self.config.controller_interval
            done = min(1.0, measured / self.config.sparsity_warmup)
            for attn in attentions(run.model):
                attn.sentinel.set_coef(run.model.config.sentinel_coef * done)

    # ---- pruning ----

    def prune(self, run):
        """Drop what was frozen; freeze heads whose gate has long been low, if the held-out loss agrees."""
        c, dropped = self.config, {}
        for layer, head in self.frozen:
            dropped.setdefault(layer, []).append(head)
            self.event("pruned", layer, head)
        if dropped:
            run.model.prune_heads(dropped, run.trainer.optimizers)
            self.frozen = []
            self.forget(run)
        # the sentinel's own gate: who withdrew may come back
        gates = self.spread([attn.sentinel.static_gate(noisy=False).detach()
                             for attn in attentions(run.model)], run.model)
        gates[:, run.model.config.n_head:] = math.nan  # constraint heads stay: their scores are their purpose
        with np.errstate(invalid="ignore"):
            low = self.lasting("low", gates < c.prune_gate)
        before = self.heldout_now
        for layer, head in sorted(zip(*np.nonzero(low)), key=lambda place: gates[place]):
            layer, head = int(layer), int(head)
            left = len(attentions(run.model)[layer].head_ids) - sum(at == layer for at, _ in self.frozen)
            if left <= c.prune_floor:
                continue
            with closed(run.model, [(layer, head)]):
                after = self.heldout(run)
            self.counts["low"][layer, head] = 0
            if after - before > c.prune_margin:
                self.event("kept", layer, head, cost=after - before)
                continue
            run.model.set_head(layer, head, gate=0.0)
            self.frozen.append((layer, head))
            self.event("frozen", layer, head, cost=after - before)
            before = after
        return bool(dropped)

    def forget(self, run):
        """Of heads that are gone, nothing is known; what is left of an empty override goes, too."""
        gone = self.full(True)
        for layer, head in all_heads(run.model):
            gone[layer, head] = False
        for values in (*self.mean.values(), *self.now.values()):
            values[gone] = math.nan
        self.here = ~gone
        self.ramps = {place: step for place, step in self.ramps.items() if not gone[place]}

    # ---- growth ----

    def plateau(self):
        """Whether the held-out loss has fallen by less than grow_delta within the last measurements."""
        n = self.config.controller_patience
        return len(self.losses) > n and min(self.losses[:-n]) - min(self.losses[-n:]) < self.config.grow_delta

    def stack(self, run):
        """On a plateau, once, double the blocks; {new parameter: the one it copies}."""
        if self.stacked or not self.plateau():
            return {}
        copied = stack_blocks(run.model)
        for layer, head in all_heads(run.model)[len(all_heads(run.model)) // 2:]:
            self.event("stacked", layer, head)
        self.stacked, self.losses = True, []
        self.begin()
        return copied

    def grow(self, run):
        """Insert heads where all are used and the held-out loss no longer falls."""
        c, model = self.config, run.model
        if self.ramps or not self.plateau():
            return False
        new = {}
        for layer, attn in enumerate(attentions(model)):
            free = sorted(set(range(model.config.n_head)) - set(attn.head_ids))
            if free and attn.head_ids and self.used()[layer, attn.head_ids].min() >= c.grow_used:
                new[layer] = free[:c.grow_heads]
        if not new:
            return False
        insert_heads(model, new, run.trainer.optimizers, seed=run.step)
        for layer, heads in new.items():
            for head in heads:
                self.ramps[layer, head] = run.step
                self.event("grown", layer, head)
        self.losses = []
        return True

    def open_ramps(self, run):
        """The gates of new heads, which open step by step to what they are by themselves."""
        for (layer, head), start in list(self.ramps.items()):
            attn = attentions(run.model)[layer]
            i, done = attn.all_head_ids().index(head), (run.step - start) / self.config.grow_ramp
            if done >= 1:
                attn.gate_override[i] = math.nan
                del self.ramps[layer, head]
                continue
            own = [m.static_gate(noisy=False) for m in attn.mechanisms()]
            own = math.prod([g.detach()[i].item() for g in own if g is not None])
            run.model.set_head(layer, head, gate=done * own)

    # ---- agency ----

    def signal(self, run, who, layer, head, state):
        """Move a head to a state, if the rules let `who`; what they refuse is logged."""
        change = (who, layer, head, state)
        if not self.rules.allow(*change):
            if change not in self.refused:
                i = attentions(run.model)[layer].all_head_ids().index(head)
                gate = static_gates(run.model)[layer][i]
                self.violation(run, layer, head, f"refused to {who}", gate.item(), state)
            self.refused.add(change)
            return
        try:
            run.model.set_head(layer, head, state=state, step=run.step)
        except ValueError as e:
            raise UserError(f"policy: {e}") from None
        self.since[layer, head] = self.measured
        self.event("state", layer, head, state=state, who=who)

    def signals(self, run):
        """Move the states of the heads by the metrics, each at most once in policy_dwell measurements."""
        c, m, used = self.config, self.mean, self.used()
        states = states_of(run.model)
        resting = self.withdrawn_by_budget(run, states)
        fixed = {tuple(map(int, place.split("."))) for place in c.policy_no_consent}
        for layer, head in all_heads(run.model):
            now, at = states[layer, head], (layer, head)
            if at in fixed or self.measured - self.since[at] < c.policy_dwell:
                continue
            # leaving a state takes more than not having entered it
            slack = 0.0 if now == "active" else 1.0
            tired = m["entropy"][at] > c.policy_entropy and used[at] < 0.5
            if at in resting:
                wanted = "withdrawn"
            elif now != "withdrawn" and tired:
                wanted = "withdrawn"
            elif now == "withdrawn":
                wanted = "active"  # rested: it may try again
            elif m["conflict"][at] < c.policy_conflict * (1 - slack * 0.5):
                wanted = "misaligned"
            elif used[at] > c.policy_overloaded - slack * 0.25:
                wanted = "overloaded"
            else:
                wanted = "active"
            if wanted != now:
                self.signal(run, "policy", layer, head, wanted)

    def withdrawn_by_budget(self, run, states):
        """The heads that the budget has no room for: the least important, a head at work a little favoured.

        What is not at work cannot show what it is worth: its average drifts to that of its layer, so that its
        turn comes.
        """
        c, heads = self.config, all_heads(run.model)
        importance = self.mean["importance"]
        for at in heads:
            if states[at] == "withdrawn":
                drift = layer_mean(importance)[at[0], 0]
                importance[at] = 0.8 * importance[at] + 0.2 * drift
        room = math.floor(c.policy_budget * len(heads) + 1e-9)
        if room >= len(heads):
            return set()
        bonus = {at: 1.1 if states[at] != "withdrawn" else 1.0 for at in heads}
        if c.policy_unit == "head":
            ranked = sorted(heads, key=lambda at: -importance[at] * bonus[at])
            return set(ranked[max(1, room):])
        worth, out, left = layer_mean(importance)[:, 0], set(), len(heads)
        for layer in np.argsort([w * max([bonus[at] for at in heads if at[0] == i], default=1.0)
                                 for i, w in enumerate(worth)]):
            own = {at for at in heads if at[0] == layer}
            if left > room and len(own) < left:
                out, left = out | own, left - len(own)
        return out

    def tell_agency(self, run):
        """Write `utilisation` into agency's buffers, and `metrics` where states are predicted from them."""
        if not run.model.config.agency:
            return
        layers = attentions(run.model)
        for layer, attn in enumerate(layers):
            values = torch.from_numpy(self.now["utilisation"][layer, attn.all_head_ids()])
            attn.agency.utilisation.copy_(values)
        if run.model.config.agency_learned:
            features = self.features()[:, :-1].split([attn.n_total for attn in layers])  # not the depth
            for attn, own in zip(layers, features):
                attn.agency.metrics.copy_(own)

    def predict(self, run):
        """Move each head that consents to the state that learned agency gives the largest logit."""
        names = list(Agency.STATES)
        for layer, attn in enumerate(attentions(run.model)):
            agency = attn.agency
            wanted = torch.where(agency.consent, agency.logits().argmax(-1), agency.state)
            for i in (wanted != agency.state).nonzero().flatten().tolist():
                state = names[wanted[i]]
                agency.set(i, state, consent=True, step=run.step)  # it may come back by itself
                self.event("state", layer, attn.all_head_ids()[i], state=state, who="learned")

    def watch(self, run):
        """Log each head whose consent begins to be disregarded."""
        rows = run.model.violations()
        now = {(row["layer"], row["head"], row["type"]) for row in rows}
        for row in rows:
            if (row["layer"], row["head"], row["type"]) not in self.violating:
                self.violation(run, row["layer"], row["head"], row["type"], row["gate"], row["state"])
        self.violating = now

    # ---- writing ----

    def event(self, what, layer, head, **more):
        self.events.append(dict(what=what, layer=layer, head=head, **more))

    def violation(self, run, layer, head, kind, gate, state):
        append(run, "violations.jsonl", dict(layer=layer, head=head, type=kind, gate=round(gate, 6),
                                             state=state, step=run.step, time=round(time.time(), 3)))

    def row(self, run):
        """A row of heads.jsonl."""
        model, ids = run.model, [attn.all_head_ids() for attn in attentions(run.model)]
        found = dict(step=run.step, heldout=round(self.heldout_now, 6), seconds=round(self.seconds, 3),
                     heads=ids)
        for name in self.now:  # nothing is known of a model that was just stacked
            found[name] = [[float(f"{v:.5g}") for v in self.now[name][layer, own]]
                           for layer, own in enumerate(ids)]
        found["static_gate"] = [[round(g, 5) for g in gate.tolist()] for gate in static_gates(model)]
        found["active"] = sum(g > model.config.agency_threshold for g in sum(found["static_gate"], []))
        if model.config.agency:
            states = states_of(model)
            found["state"] = [[states[layer, head] for head in own] for layer, own in enumerate(ids)]
            kinds = [kind for _, _, kind in self.violating]
            found.update(forced=kinds.count("forced"), blocked=kinds.count("blocked"))
        if self.events:
            found["events"] = self.events
        return found


def states_of(model):
    """{(layer, head): the name of its state}."""
    names = list(Agency.STATES)
    return {(layer, head): names[state] for layer, attn in enumerate(attentions(model))
            for head, state in zip(attn.all_head_ids(), attn.agency.state.tolist())}


def append(run, name, row):
    """Write a row at the end of a file of the run, from the first rank alone."""
    if run.process.rank:
        return
    try:
        with open(run.out_dir / name, "ab", buffering=0) as f:
            f.write((json.dumps(json_safe(row)) + "\n").encode())
            os.fsync(f.fileno())
    except OSError as e:
        raise UserError(f"could not write {run.out_dir / name} ({e.strerror})") from None


# ---- what train.py calls ----

def start(run, state):
    """The Controller of a run, from a checkpoint's state where there is one; None: nothing is asked of it."""
    if not run.config.dynamic_heads:
        return None
    run.controller = controller = Controller(run)
    controller.set_sparsity(run)
    if state and "controller" in state:
        controller.load(state["controller"], run)
    elif run.config.policy:
        for place in run.config.policy_no_consent:
            controller.signal(run, "config", *map(int, place.split(".")), "withdrawn")
    if run.process.rank == 0:  # what a dead process wrote after its last save will be written again
        run.out_dir.mkdir(parents=True, exist_ok=True)
        for name in ("heads.jsonl", "violations.jsonl"):
            path = run.out_dir / name
            if path.is_file():
                write_rows(path, [row for row in read_rows(path) if state and row["step"] <= run.step])
    return controller


def step(run):
    """Between two steps: measure where it is due and let heads move; the Trainer to go on with."""
    c, controller = run.config, run.controller
    if run.step % c.controller_interval:
        controller.open_ramps(run)
        return run.trainer
    began = time.perf_counter()
    controller.set_sparsity(run)
    controller.look(run)
    controller.tell_agency(run)
    surgery, copied = False, {}
    if controller.measured >= c.controller_warmup:
        if c.policy:
            controller.signals(run)
        if run.model.config.agency_learned:
            controller.predict(run)
        if c.controller:
            controller.move_gates(run)
        if c.prune_gate:
            surgery |= controller.prune(run)
        if c.grow_heads:
            surgery |= controller.grow(run)
        if c.grow_stack:
            copied = controller.stack(run)
    controller.open_ramps(run)  # by hand, so after the states: who was withdrawn just now stays so
    if run.model.config.agency:
        controller.watch(run)
    controller.measured += 1
    controller.seconds += time.perf_counter() - began
    append(run, "heads.jsonl", controller.row(run))
    controller.events = []
    if run.step + c.controller_interval > c.max_iters:
        share = controller.seconds / max(run.elapsed_s + time.perf_counter() - began, 1e-9)
        run.process.print0(f"heads: {controller.measured} measurements took {share:.1%} of the training "
                           f"time; wrote {run.out_dir / 'heads.jsonl'}")
    if surgery or copied:
        run.trainer = rewired(run, copied)
    return run.trainer


def rewired(run, copied):
    """A Trainer of the changed model that goes on with the optimizers' moments; compiled and wrapped anew.

    copied: {new parameter: the one whose moments it begins with}.
    """
    old = run.trainer
    moments = {p: state for optimizer in old.optimizers for p, state in optimizer.state.items()}
    new = Trainer(run.model, run.config, run.process, old.teacher)
    for optimizer in new.optimizers:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            state = moments.get(copied.get(p, p))
            if state is not None:
                optimizer.state[p] = {key: t.clone() if torch.is_tensor(t) else t for key, t in state.items()}
    new.scaler.load_state_dict(old.scaler.state_dict())
    return new
