"""
The states and consent of agency's heads between steps: a policy by what was measured, learned states, and the
log of violations.

violations.jsonl   a row each time that consent begins to be disregarded, or a rule refuses a change

Source: the Adaptive Transformer write-up, sections 2.2 and 7.
"""

import math
import time

import numpy as np
import torch

from model import Agency
from nanoheads.common import UserError
from nanoheads.heads.measuring import all_heads, attentions, layer_mean, static_gates
from nanoheads.training.rules import Rules
from nanoheads.training.runlog import append_row

FAVOUR = 1.1  # times the importance of a head at work, so that two heads of one importance do not take turns


def find_violations(model):
    """Heads without consent whose gate says that they are in use: dicts of layer, head, type, gate, state.

    type: "blocked" (held back all the same) or "forced" (it runs: agency_enforce is off, or its gate was set
    by hand).
    """
    rows = []
    for layer, attn in enumerate(attentions(model)):
        if attn.agency is None:
            continue
        gate = attn.sentinel.static_gate(noisy=False) if attn.sentinel else torch.ones(attn.n_total)
        for i in (~attn.agency.consent).nonzero().flatten().tolist():
            by_hand = attn.gate_override is not None and not attn.gate_override[i].isnan()
            value = (attn.gate_override if by_hand else gate)[i].item()
            if value > attn.agency.threshold:
                kind = "forced" if by_hand or not attn.agency.enforce else "blocked"
                state = list(Agency.STATES)[attn.agency.state[i]]
                head = attn.all_head_ids()[i]
                rows.append(dict(layer=layer, head=head, type=kind, gate=value, state=state))
    return rows


def states_of(model):
    """{(layer, head): the name of its state}."""
    names = list(Agency.STATES)
    return {(layer, head): names[state] for layer, attn in enumerate(attentions(model))
            for head, state in zip(attn.all_head_ids(), attn.agency.state.tolist())}


def share_with_agency(measured, model):
    """Write `utilisation` into agency's buffers, and `metrics` where states are predicted from them."""
    layers = attentions(model)
    for layer, attn in enumerate(layers):
        values = torch.from_numpy(measured.now["utilisation"][layer, attn.all_head_ids()])
        attn.agency.utilisation.copy_(values)
    if model.config.agency_learned:
        features = measured.features()[:, :-1].split([attn.n_total for attn in layers])  # not the depth
        for attn, own in zip(layers, features):
            attn.agency.metrics.copy_(own)


class States:
    """What moves the states of a run's heads; what is done goes into the list `events`.

    since: [blocks, heads], the measurement of the last change of state. violating: {(layer, head, type)} now;
    refused: {(who, layer, head, state)} that rules have refused.
    """

    def __init__(self, config, events, shape):
        self.config, self.events = config, events
        self.rules = Rules.read(config.policy_rules) if config.policy_rules else Rules()
        self.violating, self.refused = set(), set()
        self.begin(shape)

    def begin(self, shape):
        """No head of [blocks, heads] has changed its state yet."""
        self.since = np.full(shape, -10**9)
        self.no_consent = [tuple(map(int, place.split("."))) for place in self.config.policy_no_consent]

    # ---- by the policy ----

    def change(self, run, who, layer, head, state, count=0):
        """Move a head to a state, if the rules let `who`; what they refuse is logged once.

        count: measurements so far. UserError: no such head or state.
        """
        change = (who, layer, head, state)
        if not self.rules.allow(*change):
            if change not in self.refused:
                i = attentions(run.model)[layer].all_head_ids().index(head)
                gate = static_gates(run.model)[layer][i]
                log_violation(run, layer, head, f"refused to {who}", gate.item(), state)
            self.refused.add(change)
            return
        try:
            run.model.set_head(layer, head, state=state, step=run.step)
        except ValueError as e:
            raise UserError(f"policy: {e}") from None
        self.since[layer, head] = count
        self.events.append(dict(what="state", layer=layer, head=head, state=state, who=who))

    def withhold(self, run):
        """Withdraw the heads of policy_no_consent: from the start, and as soon as one is grown again."""
        states = states_of(run.model)
        for at in self.no_consent:
            if at not in states and run.config.grow_heads:
                continue  # it may come
            if states.get(at) != "withdrawn":
                self.change(run, "config", *at, "withdrawn")

    def follow_policy(self, measured, run):
        """Move the states of the heads by the metrics, each at most once in policy_dwell measurements."""
        c, states = self.config, states_of(run.model)
        resting = self.withdrawn_by_budget(measured, run, states)
        for layer, head in all_heads(run.model):
            now, at = states[layer, head], (layer, head)
            if at in self.no_consent or measured.count - self.since[at] < c.policy_dwell:
                continue
            wanted = self.wanted(measured, at, now, at in resting)
            if wanted != now:
                self.change(run, "policy", layer, head, wanted, measured.count)

    def wanted(self, measured, at, now, resting):
        """The state that follows from the metrics of the head at (layer, head); now: its present one."""
        c, mean, used = self.config, measured.mean, measured.used()[at]
        # leaving a state takes more than not having entered it
        slack = 0.0 if now == "active" else 1.0
        idle = mean["entropy"][at] > c.policy_entropy and used < 0.5
        if resting or now != "withdrawn" and idle:
            return "withdrawn"
        if now == "withdrawn":
            return "active"  # it was left out long enough: it may try again
        if mean["conflict"][at] < c.policy_conflict * (1 - slack * 0.5):
            return "misaligned"
        if used > c.policy_overloaded - slack * 0.25:
            return "overloaded"
        return "active"

    def withdrawn_by_budget(self, measured, run, states):
        """The heads that the budget has no room for: the least important, a head at work a little favoured.

        What is not at work cannot show what it is worth: its average drifts to that of its layer, so that its
        turn comes.
        """
        c, heads = self.config, all_heads(run.model)
        importance = measured.mean["importance"]
        for at in heads:
            if states[at] == "withdrawn":
                drift = layer_mean(importance)[at[0], 0]
                importance[at] = 0.8 * importance[at] + 0.2 * drift
        room = math.floor(c.policy_budget * len(heads) + 1e-9)
        if room >= len(heads):
            return set()
        bonus = {at: FAVOUR if states[at] != "withdrawn" else 1.0 for at in heads}
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

    # ---- learned ----

    def follow_learned(self, run):
        """Move each head that consents to the state that learned agency gives the largest logit."""
        names = list(Agency.STATES)
        for layer, attn in enumerate(attentions(run.model)):
            agency = attn.agency
            wanted = torch.where(agency.consent, agency.logits().argmax(-1), agency.state)
            for i in (wanted != agency.state).nonzero().flatten().tolist():
                state = names[wanted[i]]
                agency.set(i, state, consent=True, step=run.step)  # it may come back by itself
                self.events.append(dict(what="state", layer=layer, head=attn.all_head_ids()[i], state=state,
                                        who="learned"))

    # ---- violations ----

    def watch(self, run):
        """Log each head whose consent begins to be disregarded."""
        rows = find_violations(run.model)
        now = {(row["layer"], row["head"], row["type"]) for row in rows}
        for row in rows:
            if (row["layer"], row["head"], row["type"]) not in self.violating:
                log_violation(run, row["layer"], row["head"], row["type"], row["gate"], row["state"])
        self.violating = now

    # ---- keeping ----

    def state(self):
        """For a checkpoint: a dict of tensors and lists."""
        return dict(since=torch.from_numpy(self.since.copy()),
                    violating=[list(v) for v in sorted(self.violating)],
                    refused=[list(v) for v in sorted(self.refused)])

    def load(self, state):
        self.since = state["since"].cpu().numpy().copy()
        self.violating, self.refused = ({tuple(v) for v in state[key]} for key in ("violating", "refused"))


def log_violation(run, layer, head, kind, gate, state):
    append_row(run, "violations.jsonl", dict(layer=layer, head=head, type=kind, gate=round(gate, 6),
                                             state=state, step=run.step, time=round(time.time(), 3)))
