"""
Moves the states and consent of agency's heads between steps, by a policy or as learned from what was
measured, and logs violations. A head is named by its layer and its original number there.

violations.jsonl   a row each time that consent begins to be disregarded, or a rule refuses a change

Source: the Adaptive Transformer write-up, sections 2.2 and 7.
"""

import math
import time

import numpy as np
import torch

from model import Agency
from nanoheads.common import UserError
from nanoheads.log import append_row
from nanoheads.pruning import constant_gate
from lab.heads.measuring import all_heads, attentions
from lab.heads.rules import Rules

FAVOUR = 1.1  # times the importance of a head at work, so that two heads of one importance do not take turns
DRIFT = 0.2  # of the way to the mean of those at work goes a withdrawn head's importance at each measurement


def find_violations(model):
    """Heads without consent whose gate says that they are in use: dicts of layer, head, type, gate, state,
    utilisation (as last measured) and last_signal (the step of the last change of state or consent).

    type: "blocked" (agency holds it back) or "forced" (it runs, since agency_enforce is off).
    """
    rows = []
    for layer, head in all_heads(model):
        attn, i = model.find_head(layer, head)
        if attn.agency is None or attn.agency.consent[i]:
            continue
        gate = gate_beside_agency(attn, i)
        if gate > attn.agency.threshold:
            kind = "blocked" if attn.agency.enforce else "forced"
            rows.append(violation(model, layer, head, kind, gate, state_of(attn, i)))
    return rows


def gate_beside_agency(attn, i):
    """The product of a head's sentinel gate and of the one set by hand; 1: it has neither."""
    gate = 1.0 if attn.sentinel is None else attn.sentinel.gate(noisy=False)[i].item()
    return gate if attn.gate_by_hand is None else gate * attn.gate_by_hand[i].item()


def violation(model, layer, head, kind, gate, state):
    """A row of violations.jsonl, without step and time: with what the head signalled last."""
    attn, i = model.find_head(layer, head)
    return dict(layer=layer, head=head, type=kind, gate=gate, state=state,
                utilisation=attn.agency.utilisation[i].item(), last_signal=attn.agency.last_signal[i].item())


def state_of(attn, i):
    """The name of the state of a layer's head i."""
    return list(Agency.STATES)[attn.agency.state[i]]


def states_of(model):
    """{(layer, head): the name of its state}."""
    return {place: state_of(*model.find_head(*place)) for place in all_heads(model)}


def share_with_agency(metrics, model):
    """Write `utilisation` into agency's buffers, and `metrics` where states are predicted from them."""
    for place in all_heads(model):
        attn, i = model.find_head(*place)
        attn.agency.utilisation[i] = metrics.latest["utilisation"][place]
    if model.config.agency_learned:
        for place, features in zip(all_heads(model), metrics.features(), strict=True):
            attn, i = model.find_head(*place)
            attn.agency.metrics[i] = features


def conditions(mean, limits, current=None):
    """{state: whether these averages of a head, or of many in arrays, call for it}; the first one counts.

    current: the present state. Leaving overloaded or misaligned takes more than not having entered it. No
    other state has such slack. limits: a config with the policy's keys.
    """
    conflict, load = limits.policy_conflict, limits.policy_overloaded
    if current == "misaligned":
        conflict += abs(conflict) / 2
    if current == "overloaded":
        load -= 0.25
    idle = (mean["entropy"] > limits.policy_entropy) & (mean["load"] < 0.5)
    return dict(withdrawn=idle, misaligned=mean["conflict"] < conflict, overloaded=mean["load"] > load)


class States:
    """What moves the states of a run's heads; what is done goes into the list `events`.

    since: [blocks, heads], the measurement of the last change of state. violations: {(layer, head, type)}
    now; refusals: {(who, layer, head, state)} that rules have refused.
    """

    def __init__(self, config, events, shape):
        self.config, self.events = config, events
        self.rules = Rules.read(config.policy_rules) if config.policy_rules else Rules()
        self.no_consent = [tuple(map(int, name.split("."))) for name in config.policy_no_consent]
        self.violations, self.refusals, self.since = set(), set(), np.full(shape, -10**9)  # none has changed

    # ---- by the policy ----

    def change(self, run, who, place, state, count=0):
        """Move a head (layer, head) to a state, if the rules let `who`; what they refuse is logged once.

        count: measurements so far.
        """
        attn, i = run.model.find_head(*place)
        if not self.rules.allow(who, *place, state):
            refusal = (who, *place, state)
            if refusal not in self.refusals:
                gate = constant_gate(attn)[i].item()
                log_violation(run, violation(run.model, *place, f"refused to {who}", gate, state))
            self.refusals.add(refusal)
            return
        attn.agency.set(i, state, step=run.step)
        self.since[place] = count
        self.record(place, state, who)

    def record(self, place, state, who):
        layer, head = place
        self.events.append(dict(what="state", layer=layer, head=head, state=state, who=who))

    def withhold(self, run):
        """Withdraw the heads of policy_no_consent: from the start, and as soon as one is grown again.

        UserError: there is no such head, and none is grown.
        """
        for place in self.no_consent:
            try:
                attn, i = run.model.find_head(*place)
            except ValueError as e:
                if run.config.grow_heads:
                    continue  # it may come
                raise UserError(f"policy: {e}") from None
            if state_of(attn, i) != "withdrawn":
                self.change(run, "config", place, "withdrawn")

    def follow_policy(self, measurements, run):
        """Move the states of the heads by the metrics, each at most once in policy_dwell measurements."""
        states, metrics = states_of(run.model), measurements.heads
        free = [key for key in states if key not in self.no_consent
                and measurements.count - self.since[key] >= self.config.policy_dwell]
        at_rest = self.heads_beyond_budget(metrics, states, free)
        for key in free:
            state = self.state_by_metrics(metrics, key, states[key], key in at_rest)
            if state != states[key]:
                self.change(run, "policy", key, state, measurements.count)

    def state_by_metrics(self, metrics, key, current, at_rest):
        """The state that follows from the metrics of a head (layer, head); current: its present one."""
        if at_rest:
            return "withdrawn"
        if current == "withdrawn":
            return "active"  # it was left out long enough: it may try again
        mean = {name: values[key] for name, values in metrics.mean.items()}
        holds = conditions(mean, self.config, current)
        return next((state for state in holds if holds[state]), "active")

    def heads_beyond_budget(self, metrics, states, free):
        """Those of the heads `free` to move that the budget has no room for: the least important.

        A head at work is a little favoured. One that is withdrawn cannot show what it is worth. So its
        importance moves towards the mean of all heads at work, of whatever layer, until it is above that of
        one of them: then the two change places, and it is measured again. Heads that are not free keep their
        place, at work or not. policy_unit=layer: whole layers, each by the mean of its heads.
        """
        c, importance = self.config, metrics.mean["importance"]
        room = math.floor(c.policy_budget * len(states) + 1e-9)
        if room >= len(states):
            return set()
        at_work = [key for key in states if states[key] != "withdrawn"]
        level = np.mean([importance[key] for key in at_work]) if at_work else 0.0
        groups = {}
        for key in states:
            if metrics.withdrawn[key]:
                importance[key] += DRIFT * (level - importance[key])
            if key not in self.no_consent:
                groups.setdefault(key if c.policy_unit == "head" else key[0], []).append(key)
        unmovable = [group for group in groups.values() if not set(group) <= set(free)]
        movable = [group for group in groups.values() if set(group) <= set(free)]

        def mean_importance(group):
            favour = FAVOUR if any(key in at_work for key in group) else 1.0
            return favour * np.mean([importance[key] for key in group])

        # of a layer that cannot move as a whole, what rests goes on resting
        at_rest = {key for group in unmovable for key in group if states[key] == "withdrawn"}
        n_working = sum(map(len, groups.values())) - len(at_rest)
        for group in sorted(movable, key=mean_importance):
            if n_working > room and len(group) < n_working:
                at_rest, n_working = at_rest | set(group), n_working - len(group)
        return at_rest

    # ---- learned ----

    def follow_learned(self, run):
        """Move each head that consents to the state that learned agency gives the largest logit."""
        names = list(Agency.STATES)
        for layer, attn in enumerate(attentions(run.model)):
            likeliest = attn.agency.logits().argmax(-1).tolist()
            for i, head in enumerate(attn.all_head_ids()):
                state = names[likeliest[i]]
                if attn.agency.consent[i] and state != state_of(attn, i):
                    attn.agency.set(i, state, consent=True, step=run.step)  # it may come back by itself
                    self.record((layer, head), state, "learned")

    # ---- violations ----

    def watch(self, run):
        """Log each head whose consent begins to be disregarded."""
        rows = {(row["layer"], row["head"], row["type"]): row for row in find_violations(run.model)}
        for key, row in rows.items():
            if key not in self.violations:
                log_violation(run, row)
        self.violations = set(rows)

    # ---- keeping ----

    def state(self):
        """For a checkpoint: a dict of tensors and lists."""
        return dict(since=torch.from_numpy(self.since.copy()),
                    violating=[list(v) for v in sorted(self.violations)],
                    refused=[list(v) for v in sorted(self.refusals)])

    def load(self, state):
        self.since = state["since"].cpu().numpy().copy()
        self.violations, self.refusals = ({tuple(v) for v in state[key]} for key in ("violating", "refused"))


def log_violation(run, row):
    """row: as of find_violations()."""
    numbers = {name: round(row[name], 6) for name in ("gate", "utilisation")}
    if run.process.rank == 0:
        append_row(run.out_dir / "violations.jsonl",
                   {**row, **numbers, "step": run.step, "time": round(time.time(), 3)})
