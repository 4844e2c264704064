"""
Runs dynamic heads: between two steps of training it measures the heads, and changes gates, heads and states.

It measures a small fixed text (measuring.py), so that the training step is the one that it would be without;
gates.py moves the gates, surgery.py drops and grows heads, states.py moves agency's states. Source: the
Adaptive Transformer write-up, sections 2.2, 3, 4.2, 7.

heads.jsonl        a row each measurement: the metrics of every head, states, and what was done
violations.jsonl   see states.py
"""

import time

import torch

from nanoheads.common import UserError, plural
from nanoheads.config import trained_with
from nanoheads.log import append_row, read_rows, write_rows
from nanoheads.pruning import refuse_joined
from lab.heads.gates import MOVERS, move_gates, set_sparsity
from lab.heads.measuring import Measurements, attentions, constant_gates, head_ids
from lab.heads.states import States, share_with_agency, states_of
from lab.heads.surgery import Surgery, fold_gates


class Controller:
    """The measurements of a run's heads, and what changes them: a mover of gates, Surgery, and States.

    events: what was done since the last row of heads.jsonl; seconds: what all of it took.
    """

    def __init__(self, run):
        self.model = run.model
        self.interval = run.config.controller_interval
        self.generator = torch.Generator().manual_seed(run.model.config.seed)
        self.events, self.seconds = [], 0.0
        self.measurements = Measurements(run)
        self.mover = MOVERS[run.config.controller](run.config, self.generator)
        self.surgery = Surgery(run.config, self.events)
        self.states = States(run.config, self.events, self.measurements.heads.shape)

    # ---- keeping ----

    def state(self):
        """For a checkpoint: a dict of tensors, lists and numbers."""
        return dict(seconds=self.seconds, generator=self.generator.get_state(), mover=self.mover.state(),
                    overrides=[attn.gate_by_hand for attn in attentions(self.model)],
                    **self.measurements.state(), **self.surgery.state(), **self.states.state())

    def load(self, state, run):
        self.seconds = state["seconds"]
        self.generator.set_state(state["generator"].cpu())
        for part in (self.measurements, self.surgery, self.states):
            part.load(state)
        self.mover.load(state["mover"])
        device = run.model.transformer.wte.weight.device
        for attn, gates in zip(attentions(run.model), state["overrides"], strict=True):
            # where no gate was set by hand, checkpoints of before 2026-11-28 have NaN
            if gates is not None:
                gates = gates.view(attn.n_total).to(device).nan_to_num(1.0)
            attn.gate_by_hand = gates
        set_sparsity(run)

    def as_scored(self, model):
        """A copy of the model with gates set by hand multiplied into what heads send out, for a best.pt."""
        return fold_gates(model)

    # ---- between two steps ----

    def measure(self, run):
        """Measure the heads, and let agency have what was measured."""
        set_sparsity(run)
        self.measurements.update(run)
        if run.model.config.agency:
            share_with_agency(self.measurements.heads, run.model)

    def act(self, run):
        """Move states and gates, drop and grow heads; whether any came or went."""
        c, changed = run.config, False
        if c.policy:
            self.states.follow_policy(self.measurements, run)
        if run.model.config.agency_learned:
            self.states.follow_learned(run)
        if c.controller:
            move_gates(self.mover, self.measurements, run)
        if c.prune_gate:
            changed |= self.surgery.drop(self.measurements, run)
            self.surgery.freeze(self.measurements, run)
        if c.grow_heads:
            grown = self.surgery.grow(self.measurements, run)
            if grown and c.policy:
                self.states.withhold(run)
            changed |= grown
        return changed

    def step(self, run):
        """Between two steps: measure where it is due, and let heads change. Returns whether any came or went.
        """
        c = run.config
        if run.step % c.controller_interval:
            self.surgery.open_ramps(run)
            return False
        began = time.perf_counter()
        self.measure(run)
        changed = self.measurements.count >= c.controller_warmup and self.act(run)
        self.surgery.open_ramps(run)  # by hand, so after the states: a head withdrawn just now stays so
        if run.model.config.agency:
            self.states.watch(run)
        self.measurements.count += 1
        self.seconds += time.perf_counter() - began
        if run.process.rank == 0:
            append_row(run.out_dir / "heads.jsonl", self.row(run))
        if line := describe_heads(self.events):
            n_heads = sum(attn.n_total for attn in attentions(run.model))
            run.process.print0(f"step {run.step:>7,}   {line}; {plural(n_heads, 'head')}")
        self.events.clear()
        if run.step + c.controller_interval > c.max_iters:
            share = self.seconds / max(run.elapsed_s + time.perf_counter() - began, 1e-9)
            run.process.print0(f"heads: {self.measurements.count} measurements took {share:.1%} of the "
                               f"training time; wrote {run.out_dir / 'heads.jsonl'}")
        return changed

    def row(self, run):
        """A row of heads.jsonl."""
        model, ids, measurements = run.model, head_ids(run.model), self.measurements
        row = dict(step=run.step, heldout=round(measurements.held_out_loss, 6),
                   seconds=round(self.seconds, 3), heads=ids)
        for name, values in measurements.heads.latest.items():
            row[name] = [round_all(values[layer, heads]) for layer, heads in enumerate(ids)]
        row["static_gate"] = [[round(g, 5) for g in gate.tolist()] for gate in constant_gates(model)]
        row["active"] = sum(g > model.config.agency_threshold for g in sum(row["static_gate"], []))
        if model.config.agency:
            states = states_of(model)
            row["state"] = [[states[layer, head] for head in heads] for layer, heads in enumerate(ids)]
            kinds = [kind for _, _, kind in self.states.violations]
            row.update(forced=kinds.count("forced"), blocked=kinds.count("blocked"))
        if self.events:
            row["events"] = self.events
        return row


def round_all(values):
    return [float(f"{v:.5g}") for v in values]


# ---- what a run begins with ----

def start(run, state):
    """The Controller of a run, from the state in a checkpoint if there is one. UserError: it cannot act."""
    unit = run.model.config.unit
    if unit > 1 and (run.config.prune_gate or run.config.grow_heads):
        raise UserError("prune_gate and grow_heads take single heads: not with n_kv_head or pairs of heads, "
                        f"where {unit} go together")
    if run.config.prune_gate or run.config.grow_heads:
        try:
            refuse_joined(attentions(run.model))
        except ValueError as e:
            raise UserError(f"not with prune_gate or grow_heads: {e}") from None
    controller = Controller(run)
    set_sparsity(run)
    path = run.out_dir / "ckpt.pt"
    if state and "controller" in state:
        try:
            controller.load(state["controller"], run)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as e:
            why = f"{type(e).__name__}: {' '.join(str(e).split())[:120]}"
            raise UserError(f"{path}: its controller's state does not fit this config ({why})") from None
    elif state and trained_with(state["train"], path).dynamic_heads:
        raise UserError(f"{path} is damaged: its heads were measured, and it has no controller's state")
    elif run.config.policy:
        controller.states.withhold(run)
    if run.process.rank == 0:  # what a killed process wrote after its last save will be written again
        run.out_dir.mkdir(parents=True, exist_ok=True)
        for name in ("heads.jsonl", "violations.jsonl"):
            path = run.out_dir / name
            if path.is_file():
                write_rows(path, [row for row in read_rows(path) if state and row["step"] <= run.step])
    return controller


def describe_heads(events):
    """The heads that came and went, in a line; "": none."""
    heads = {}
    for event in events:
        if event["what"] in ("pruned", "grown"):
            heads.setdefault(event["what"], []).append(f"{event['layer']}.{event['head']}")
    return "   ".join(f"heads {what}: {', '.join(names)}" for what, names in heads.items())
