"""
The states and consent of agency's heads between steps: a policy by what was measured, learned states, and the
log of violations. With agency_scope the MLPs or whole blocks have states instead, each block one piece: its
place is (layer, 0) here, its block's number alone in keys and commands.

violations.jsonl   a row each time that consent begins to be disregarded, or a rule refuses a change

Source: the Adaptive Transformer write-up, sections 2.2 and 7.
"""

import json
import math
import os
import time

import numpy as np
import torch

from model import Agency
from nanoheads.common import UserError, in_place, json_safe
from nanoheads.log import write_whole
from lab.heads.measuring import attentions, static_gates
from lab.heads.rules import Rules

FAVOUR = 1.1  # times the importance of a head at work, so that two heads of one importance do not take turns
DRIFT = 0.2  # of the way to the mean of those at work goes a withdrawn head's importance at each measurement


def agencies(model):
    """[(layer, Agency, the numbers of what has a state there)]: of heads, or [0] of the MLP or the block."""
    if not model.config.agency:
        return []
    if model.config.agency_scope == "head":
        return [(layer, attn.agency, attn.all_head_ids()) for layer, attn in enumerate(attentions(model))]
    return [(layer, block.agency, [0]) for layer, block in enumerate(model.transformer.h)]


def place_of(model, layer, head):
    """What a row of a log says of (layer, head): of a piece its scope, and no head."""
    scope = model.config.agency_scope
    return dict(layer=layer, head=head) if scope == "head" else dict(layer=layer, scope=scope)


def find_violations(model):
    """Heads without consent whose gate says that they are in use: dicts of layer, head, type, gate, state,
    utilisation (as last measured) and last_signal (the step of the last change of state or consent).

    type: "blocked" (held back all the same) or "forced" (it runs: agency_enforce is off, or its gate was set
    by hand). Of MLPs or blocks with scope in the place of head.
    """
    rows = []
    for (layer, agency, ids), attn in zip(agencies(model), attentions(model)):
        gate, hand = torch.ones(len(ids)), agency.by_hand
        if agency.scope == "head":
            gate = attn.sentinel.static_gate(noisy=False) if attn.sentinel else gate
            hand = attn.gate_override
        for i in (~agency.consent).nonzero().flatten().tolist():
            by_hand = hand is not None and not hand[i].isnan()
            value = (hand if by_hand else gate)[i].item()
            if value > agency.threshold:
                kind = "forced" if by_hand or not agency.enforce else "blocked"
                state = list(Agency.STATES)[agency.state[i]]
                rows.append(dict(**place_of(model, layer, ids[i]), type=kind, gate=value, state=state,
                                 **signals_of(agency, i)))
    return rows


def signals_of(agency, i):
    """What the head or piece i of an Agency signalled last, beside its state."""
    return dict(utilisation=agency.utilisation[i].item(), last_signal=agency.last_signal[i].item())


def states_of(model):
    """{(layer, head): the name of its state}; of MLPs or blocks {(layer, 0): ...}."""
    names = list(Agency.STATES)
    return {(layer, head): names[state] for layer, agency, ids in agencies(model)
            for head, state in zip(ids, agency.state.tolist())}


def share_with_agency(measured, model):
    """Write `utilisation` into agency's buffers, and `metrics` where states are predicted from them."""
    found, source = agencies(model), measured.pieces or measured
    for layer, agency, ids in found:
        agency.utilisation.copy_(torch.from_numpy(source.now["utilisation"][layer, ids]))
    if model.config.agency_learned:
        features = source.features()[:, :agency.metrics.size(1)]  # not the depth
        for (_, agency, ids), own in zip(found, features.split([len(ids) for *_, ids in found])):
            agency.metrics.copy_(own)


class States:
    """What moves the states of a run's heads; what is done goes into the list `events`.

    since: [blocks, heads], the measurement of the last change of state; of pieces [blocks, 1]. violating:
    {(layer, head, type)} now; refused: {(who, layer, head, state)} that rules have refused.
    """

    def __init__(self, config, events, shape):
        self.config, self.events = config, events
        self.rules = Rules.read(config.policy_rules) if config.policy_rules else Rules()
        self.violating, self.refused = set(), set()
        self.begin(shape)

    def begin(self, shape):
        """No head of [blocks, heads] has changed its state yet."""
        self.since = np.full(shape, -10**9)
        self.no_consent = [(int(layer), int(head or 0)) for layer, _, head in
                           (each.partition(".") for each in self.config.policy_no_consent)]

    # ---- by the policy ----

    def change(self, run, who, layer, head, state, count=0):
        """Move a head to a state, if the rules let `who`; what they refuse is logged once.

        count: measurements so far. UserError: no such head or state.
        """
        change, at = (who, layer, head, state), place_of(run.model, layer, head)
        if not self.rules.allow(who, layer, at.get("head"), state):
            if change not in self.refused:
                _, agency, ids = agencies(run.model)[layer]
                gate = static_gates(run.model)[layer] if agency.scope == "head" else agency.gate()
                i = ids.index(head)
                log_violation(run, dict(**at, type=f"refused to {who}", gate=gate[i].item(), state=state,
                                        **signals_of(agency, i)))
            self.refused.add(change)
            return
        try:
            run.model.set_head(layer, at.get("head"), state=state, step=run.step)
        except ValueError as e:
            raise UserError(f"policy: {e}") from None
        self.since[layer, head] = count
        self.events.append(dict(what="state", **at, state=state, who=who))

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
        states, among = states_of(run.model), measured.pieces or measured
        free = [at for at in states if at not in self.no_consent
                and measured.count - self.since[at] >= self.config.policy_dwell]
        resting = self.withdrawn_by_budget(among, states, free)
        for at in free:
            wanted = self.wanted(among, at, states[at], at in resting)
            if wanted != states[at]:
                self.change(run, "policy", *at, wanted, measured.count)

    def wanted(self, measured, at, now, resting):
        """The state that follows from the metrics of what is at (layer, head); now: its present one.

        Leaving overloaded or misaligned takes more than not having entered it. No other state has such slack.
        """
        c, mean = self.config, measured.mean
        # a piece has no rows of attention
        idle = "entropy" in mean and mean["entropy"][at] > c.policy_entropy and mean["load"][at] < 0.5
        if resting or now != "withdrawn" and idle:
            return "withdrawn"
        if now == "withdrawn":
            return "active"  # it was left out long enough: it may try again
        slack = abs(c.policy_conflict) / 2 if now == "misaligned" else 0.0
        if mean["conflict"][at] < c.policy_conflict + slack:
            return "misaligned"
        slack = 0.25 if now == "overloaded" else 0.0
        if mean["load"][at] > c.policy_overloaded - slack:
            return "overloaded"
        return "active"

    def withdrawn_by_budget(self, measured, states, free):
        """Those of the heads `free` to move that the budget has no room for: the least important.

        A head at work is a little favoured. One that is withdrawn cannot show what it is worth. So its
        importance moves towards the mean of all heads at work, of whatever layer, until it is above that of
        one of them: then the two change places, and it is measured again. Heads that are not free keep their
        place, at work or not. policy_unit=layer: whole layers, each by the mean of its heads.
        """
        c, importance = self.config, measured.mean["importance"]
        room = math.floor(c.policy_budget * len(states) + 1e-9)
        if room >= len(states):
            return set()
        at_work = [at for at in states if states[at] != "withdrawn"]
        level = np.mean([importance[at] for at in at_work]) if at_work else 0.0
        groups = {}
        for at in states:
            if measured.withdrawn[at]:
                importance[at] += DRIFT * (level - importance[at])
            if at not in self.no_consent:
                groups.setdefault(at if c.policy_unit == "head" else at[0], []).append(at)
        bound = [own for own in groups.values() if not set(own) <= set(free)]
        moving = [own for own in groups.values() if set(own) <= set(free)]

        def worth(own):
            favour = FAVOUR if any(at in at_work for at in own) else 1.0
            return favour * np.mean([importance[at] for at in own])

        # of a layer that cannot move as a whole, what rests goes on resting
        out = {at for own in bound for at in own if states[at] == "withdrawn"}
        left = sum(map(len, groups.values())) - len(out)
        for own in sorted(moving, key=worth):
            if left > room and len(own) < left:
                out, left = out | set(own), left - len(own)
        return out

    # ---- learned ----

    def follow_learned(self, run):
        """Move each head that consents to the state that learned agency gives the largest logit."""
        names = list(Agency.STATES)
        for layer, agency, ids in agencies(run.model):
            wanted = torch.where(agency.consent, agency.logits().argmax(-1), agency.state)
            for i in (wanted != agency.state).nonzero().flatten().tolist():
                state = names[wanted[i]]
                agency.set(i, state, consent=True, step=run.step)  # it may come back by itself
                self.events.append(dict(what="state", **place_of(run.model, layer, ids[i]), state=state,
                                        who="learned"))

    # ---- violations ----

    def watch(self, run):
        """Log each head whose consent begins to be disregarded."""
        now = {(row["layer"], row.get("head", 0), row["type"]): row for row in find_violations(run.model)}
        for at, row in now.items():
            if at not in self.violating:
                log_violation(run, row)
        self.violating = set(now)

    # ---- keeping ----

    def state(self):
        """For a checkpoint: a dict of tensors and lists."""
        return dict(since=torch.from_numpy(self.since.copy()),
                    violating=[list(v) for v in sorted(self.violating)],
                    refused=[list(v) for v in sorted(self.refused)])

    def load(self, state):
        self.since = state["since"].cpu().numpy().copy()
        self.violating, self.refused = ({tuple(v) for v in state[key]} for key in ("violating", "refused"))


def log_violation(run, row):
    """row: as of find_violations()."""
    numbers = {name: round(row[name], 6) for name in ("gate", "utilisation")}
    append_row(run, "violations.jsonl", {**row, **numbers, "step": run.step, "time": round(time.time(), 3)})


def append_row(run, name, row):
    """Write a row at the end of a file of a run, from the first rank alone. UserError: the disk refuses."""
    if run.process.rank:
        return
    try:
        with open(run.out_dir / name, "ab", buffering=0, opener=in_place) as f:
            write_whole(f, (json.dumps(json_safe(row)) + "\n").encode())
            os.fsync(f.fileno())
    except OSError as e:
        raise UserError(f"could not write {run.out_dir / name} ({e.strerror})") from None
