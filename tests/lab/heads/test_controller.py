"""controller.py: what moves, prunes and grows heads between steps; exact resumes; nothing where it is off."""
import copy
import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from model import GPT, MECHANISMS, Agency, GPTConfig
from nanoheads import checkpoint
from nanoheads.common import UserError
from nanoheads.config import TrainConfig, flags_by_name
from nanoheads.batches import Batches
from nanoheads.dataset import Dataset
from nanoheads.pruning import constant_gate, pack
from nanoheads.ranks import Process
from lab.heads import controller, measuring
from lab.heads.gates import features_of, move_gates
from lab.heads.measuring import METRICS, Measurements, Metrics, all_heads, attentions
from lab.heads.rules import Rules
from lab.heads.states import States, states_of
from lab.heads.surgery import fold_gates
from helpers import ROOT, TINY
from helpers import make_model, same, weights
from train import main

SMALL = dict(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=256, recipe="modern")
OFTEN = dict(controller_interval=2, controller_tokens=64, controller_heldout=64, controller_warmup=1,
             controller_patience=2)
LIVE = {**TINY, **OFTEN, "n_layer": 2, "n_head": 4, "n_embd": 32, "max_iters": 16, "eval_interval": 8}


def rows_of(folder, name="heads.jsonl"):
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def events(folder):
    return [(row["step"], e["what"], e["layer"], e["head"]) for row in rows_of(folder)
            for e in row.get("events", ())]


def plain(state):
    """A checkpoint's state as text: tensors as lists, to the last digit."""
    if isinstance(state, dict):
        return {str(key): plain(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [plain(value) for value in state]
    return str(state.tolist()) if torch.is_tensor(state) else str(state)


@pytest.fixture
def run(bytes_data, tmp_path):
    """run(flags of the model, **keys of training) -> a Run with optimizers and Controller, nothing trained.

    The Controller is run.controller, too. fresh: with the initial values, not alive.
    """
    def make(flags=None, process=None, fresh=False, **keys):
        config = TrainConfig(**{**OFTEN, "dataset": str(bytes_data), "out_dir": str(tmp_path / "run"),
                                "batch_size": 4, "device": "cpu", **keys}).for_recipe("modern")
        model = GPT(GPTConfig(**{**SMALL, **(flags or {})}))
        torch.manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.1 * (not fresh))
        found = train.Run(config, model, Dataset(bytes_data), process or Process())
        train.set_up(found)
        found.out_dir.mkdir(parents=True, exist_ok=True)
        found.controller = controller.start(found, {})
        found.acting = {"controller": found.controller}
        return found
    return make


def step_heads(run):
    """What train.py does between two steps: measure, and set up again where heads came or went."""
    if run.between_steps():
        train.set_up_again(run)


def measured(run, n=1):
    """n measurements, one each interval."""
    for _ in range(n):
        run.step += run.config.controller_interval
        step_heads(run)
    return rows_of(run.out_dir)


def given(monkeypatch, **values):
    """Every head's metrics are what is said here: numbers, or functions of (layer, head); averages are they.

    Of a withdrawn head what it sends is 0, and what follows from that.
    """
    def made_up(model, x, y, autocast):
        found = {name: [] for name in METRICS}
        for layer, attn in enumerate(attentions(model)):
            factor = torch.ones(attn.n_total) if attn.agency is None else attn.agency.gate().detach()
            for name in METRICS:
                value = values.get(name, 0.25)
                of_heads = [value(layer, head) if callable(value) else value for head in attn.all_head_ids()]
                rests = (factor == 0) & torch.tensor(name != "entropy")
                found[name].append(torch.tensor(of_heads).double().masked_fill(rests, 0.0))
        return found
    monkeypatch.setattr(measuring, "measure", made_up)
    without_past(monkeypatch)


def without_past(monkeypatch):
    """Averages weigh the last measurement alone."""
    add = Metrics.add
    monkeypatch.setattr(Metrics, "add", lambda self, *args: add(self, *args[:-1], 0.0))


def logits(run):
    return torch.stack([attn.sentinel.logit.detach() for attn in attentions(run.model)])


# ---- off, measured alone ----

@pytest.mark.slow
def test_off_there_is_no_trace_of_it(args, tmp_path):
    main(args(**{**LIVE, "controller_interval": ..., "controller_tokens": ..., "controller_heldout": ...,
                 "controller_warmup": ..., "controller_patience": ...}))
    assert "controller" not in checkpoint.read(tmp_path / "run" / "ckpt.pt")
    assert not (tmp_path / "run" / "heads.jsonl").exists()


def test_the_name_of_learned_agency_has_its_heads_measured():
    assert flags_by_name()["agency_learned"] == {**MECHANISMS["agency_learned"], "controller_log": True}


def test_a_run_that_begins_with_few_heads_goes_on(args, tmp_path):
    """Also where no head is measured: its heads are those of the checkpoint."""
    keys = dict(grow_from=1, max_iters=2, eval_interval=2)
    main(args(**keys))
    main([*args(**{**keys, "max_iters": 4}), "--resume"])
    state = checkpoint.read(tmp_path / "run/ckpt.pt")
    assert state["step"] == 4 and state["config"]["head_ids"] == [[0]] * state["config"]["n_layer"]


@pytest.mark.slow
def test_measuring_changes_no_digit_of_the_training(args, tmp_path):
    off = {key: ... for key in OFTEN}
    main(args("off", **{**LIVE, **off}))
    main(args("on", **LIVE, controller_log=True))
    assert same(weights(tmp_path / "off" / "ckpt.pt"), weights(tmp_path / "on" / "ckpt.pt"))
    found = rows_of(tmp_path / "on")
    assert [row["step"] for row in found] == list(range(2, 17, 2))
    assert all(len(row[name]) == 2 and len(row[name][0]) == 4 for row in found for name in METRICS)
    assert found[-1]["active"] == 8 and found[-1]["heldout"] < found[0]["heldout"]


def test_averages_weigh_the_past(run):
    r = run(controller_log=True, controller_average=0.7)
    measured(r)
    heads = r.controller.measurements.heads
    first, mean = heads.latest["importance"].copy(), heads.mean["importance"].copy()
    assert np.allclose(first, mean, rtol=1e-14)  # 0.7 x + 0.3 x
    with torch.no_grad():
        for p in r.model.parameters():
            p.mul_(1.1)
    measured(r)
    now = heads.latest["importance"]
    assert np.allclose(heads.mean["importance"], 0.7 * first + 0.3 * now, rtol=1e-12)
    assert not np.allclose(now, first)


def test_a_metric_that_is_not_finite_stops_with_its_name(run):
    r = run(controller_log=True)
    with torch.no_grad():
        attentions(r.model)[0].c_proj.weight.fill_(math.nan)
    with pytest.raises(UserError, match="step 2: .* is not finite; lower adamw_lr or muon_lr$"):
        measured(r)


# ---- gates ----

@pytest.mark.slow
def test_rules_lower_what_is_long_high_and_a_little_what_is_long_small(run, monkeypatch):
    r = run(dict(sentinel="sigmoid"), controller="rules", controller_step=0.4)
    given(monkeypatch, entropy=lambda layer, head: 0.9 if (layer, head) == (0, 1) else 0.3,
          gradient=lambda layer, head: 0.01 if (layer, head) == (1, 2) else 1.0)
    start = logits(r)
    measured(r, 2)
    assert torch.equal(logits(r), start), "warm-up, then not yet patience"
    measured(r)
    want = torch.zeros(2, 4)
    want[0, 1], want[1, 2] = -0.4, -0.1
    assert torch.allclose(logits(r) - start, want, atol=1e-6)
    measured(r, 100)
    assert logits(r).min() == -r.config.controller_bound and logits(r)[0, 0] == start[0, 0]


def test_rules_have_hysteresis(run, monkeypatch):
    """Between the threshold and 0.05 below it a head stays what it was."""
    level = {"now": 0.9}
    r = run(dict(sentinel="sigmoid"), controller="rules")
    given(monkeypatch, entropy=lambda layer, head: level["now"], gradient=1.0)
    moved = []
    for value in (0.9, 0.9, 0.9, 0.77, 0.77, 0.74, 0.77, 0.77, 0.77):
        before, level["now"] = logits(r), value
        measured(r)
        moved.append(bool((logits(r) < before).any()))
    assert moved == [False, False, True, True, True, False, False, False, False]


@pytest.mark.slow
def test_a_network_learns_which_heads_are_worth_their_cost(run, monkeypatch):
    """Closing a head of high importance costs 0.01 nats, of the others nothing: the network finds out."""
    r = run(dict(sentinel="sigmoid"), controller="ann", controller_cost=0.001)

    def worthy(layer, head):
        return (layer + head) % 2 == 0
    given(monkeypatch, importance=lambda *at: 0.02 if worthy(*at) else 0.001)

    def held_out_nats(self, run):
        shut = [(layer, attn.head_ids[i]) for layer, attn in enumerate(attentions(run.model))
                if attn.gate_by_hand is not None
                for i, g in enumerate(attn.gate_by_hand.tolist()) if g == 0]
        return 3.0 + 0.01 * sum(worthy(*at) for at in shut)
    monkeypatch.setattr(Measurements, "held_out_nats", held_out_nats)
    start = logits(r)
    measured(r, 20)
    change = logits(r) - start
    for at in all_heads(r.model):
        assert change[at] > 0.5 if worthy(*at) else change[at] < -0.5, at


@pytest.mark.slow
def test_a_policy_by_reward_learns_to_close_what_costs(run, monkeypatch):
    """Where the loss does not depend on the gates, open heads only cost: the actor lowers all of them."""
    r = run(dict(sentinel="sigmoid"), controller="rl", controller_step=0.3)
    given(monkeypatch)
    monkeypatch.setattr(Measurements, "held_out_nats", lambda self, run: 3.0)

    def as_they_are(self, run, update=Measurements.update):
        update(self, run)
        for layer, attn in enumerate(attentions(run.model)):
            self.heads.latest["gate"][layer] = constant_gate(attn).detach().numpy()
    monkeypatch.setattr(Measurements, "update", as_they_are)
    measured(r, 300)
    with torch.no_grad():
        assert r.controller.mover.actor(features_of(r.controller.measurements)).mean() < -0.1
    assert logits(r).mean() < 2.0


@pytest.mark.slow
@pytest.mark.parametrize("who", ["rules", "ann", "rl"])
@pytest.mark.parametrize("values", [dict(), dict(entropy=1.0, gradient=0.0, importance=0.0, utilisation=0.0),
                                    dict(gradient=1e30, importance=1e30, conflict=-1.0),
                                    dict(entropy=lambda layer, head: (layer + head) % 2)])
def test_constant_and_adversarial_metrics_keep_gates_within_bounds(run, monkeypatch, who, values):
    r = run(dict(sentinel="hard_concrete"), controller=who, controller_step=2.0, controller_bound=4.0)
    given(monkeypatch, **values)
    measured(r, 12)
    assert logits(r).isfinite().all() and logits(r).abs().max() <= 4.0


def test_bounds_hold_back_and_never_push():
    """A logit that training put beyond the bound stays there, whatever the move."""
    c = SimpleNamespace(controller_bound=2.0, controller_step=1.0)
    attn = SimpleNamespace(sentinel=SimpleNamespace())
    model = SimpleNamespace(transformer=SimpleNamespace(h=[SimpleNamespace(attn=attn)]))
    for sign, want in ((1.0, [3.0, -2.0, 2.0, -0.5]), (-1.0, [2.0, -3.0, 0.5, -2.0])):
        attn.sentinel.logit = torch.tensor([3.0, -3.0, 1.5, -1.5])
        mover = SimpleNamespace(moves=lambda *a: torch.full((4,), sign, dtype=torch.float64))
        move_gates(mover, None, SimpleNamespace(model=model, config=c, step=0))
        assert attn.sentinel.logit.tolist() == want


@pytest.mark.slow
def test_sparsity_warms_up(run):
    r = run(dict(sentinel="hard_concrete", sentinel_coef=0.01), sparsity_warmup=20)
    seen = [float(attentions(r.model)[1].sentinel.coef)]
    for _ in range(12):
        measured(r)
        seen.append(float(attentions(r.model)[1].sentinel.coef))
    assert seen == pytest.approx([0.01 * min(1, step / 20) for step in range(0, 26, 2)])


# ---- pruning ----

def parameters_of(run):
    return sum(p.numel() for optimizer in run.optimizers for group in optimizer.param_groups
               for p in group["params"])


def closing(run, at, logit=-9.0):
    with torch.no_grad():
        attentions(run.model)[at[0]].sentinel.logit[at[1]] = logit


@pytest.mark.slow
def test_heads_are_frozen_then_dropped_and_the_logits_stay(run):
    r = run(dict(sentinel="hard_concrete"), prune_gate=0.05, prune_margin=1.0)
    closing(r, (0, 2))
    idx = torch.arange(32).view(2, 16)
    measured(r, 3)  # the first measurement is warm-up
    assert r.model.config.head_ids is None and r.controller.surgery.frozen == [(0, 2)]
    before = r.model.eval()(idx).logits
    whole = parameters_of(r)
    measured(r)
    assert r.model.config.head_ids == [[0, 1, 3], [0, 1, 2, 3]]
    assert torch.allclose(r.model.eval()(idx).logits, before, atol=1e-5)
    assert [e[1:] for e in events(r.out_dir)] == [("frozen", 0, 2), ("pruned", 0, 2)]
    assert parameters_of(r) == sum(p.numel() for p in r.model.parameters()) < whole
    assert np.isnan(r.controller.measurements.heads.mean["entropy"][0, 2])
    assert len(rows_of(r.out_dir)[-1]["entropy"][0]) == 3
    x = torch.randint(256, (4, 17))
    train.training_step(r, x[:, :-1], x[:, 1:])  # training goes on


def test_a_drop_that_costs_too_much_is_taken_back(run, monkeypatch):
    r = run(dict(sentinel="sigmoid"), prune_gate=0.05, prune_margin=0.01)
    closing(r, (0, 2)), closing(r, (1, 0))
    costs = {(0, 2): 0.02, (1, 0): 0.005}

    def held_out_nats(self, run):
        shut = {(layer, i) for layer, attn in enumerate(attentions(run.model))
                if attn.gate_by_hand is not None
                for i, g in enumerate(attn.gate_by_hand.tolist()) if g == 0}
        return 2.0 + sum(costs[at] for at in shut)
    monkeypatch.setattr(Measurements, "held_out_nats", held_out_nats)
    measured(r, 3)
    assert [e[1:] for e in events(r.out_dir)] == [("kept", 0, 2), ("frozen", 1, 0)] or \
        [e[1:] for e in events(r.out_dir)] == [("frozen", 1, 0), ("kept", 0, 2)]
    by_hand = attentions(r.model)[0].gate_by_hand
    assert by_hand is None or (by_hand == 1).all(), "its gate is its own again"
    measured(r)
    assert r.model.config.head_ids == [[0, 1, 2, 3], [1, 2, 3]]
    assert not any(e[1] == "kept" for e in events(r.out_dir)[2:]), "it has to be low for long again"


@pytest.mark.slow
def test_every_layer_keeps_its_floor_and_constraint_heads_stay(run):
    r = run(dict(sentinel="sigmoid", sentinel_init=-9.0, constraint_names=["a"], constraint_layers=[1]),
            prune_gate=0.05, prune_floor=2, prune_margin=100.0)
    measured(r, 12)
    assert [len(ids) for ids in r.model.config.head_ids] == [2, 2]
    assert attentions(r.model)[1].n_extra == 1 and r.controller.surgery.frozen == []


# ---- growth ----

@pytest.mark.slow
def test_growth_on_a_plateau_preserves_the_logits_and_opens_slowly(run, monkeypatch):
    r = run(dict(head_ids=[[0, 1]] * 2, sentinel="sigmoid"), grow_heads=1, grow_ramp=4, grow_used=0.1)
    monkeypatch.setattr(Measurements, "held_out_nats", lambda self, run: 2.0)
    idx = torch.arange(32).view(2, 16)
    before = r.model.eval()(idx).logits
    measured(r, 2)
    assert r.model.config.head_ids == [[0, 1], [0, 1]]
    measured(r)
    assert r.model.config.head_ids == [[0, 1, 2], [0, 1, 2]]
    assert torch.allclose(r.model.eval()(idx).logits, before, atol=1e-5)
    assert [e[1:] for e in events(r.out_dir)] == [("grown", 0, 2), ("grown", 1, 2)]
    own = attentions(r.model)[0].sentinel.gate(noisy=False)[2].item()
    opened = []
    for _ in range(5):
        opened.append(constant_gate(attentions(r.model)[0])[2].item())
        r.step += 1
        step_heads(r)
    assert opened == pytest.approx([own * done for done in (0, 0.25, 0.5, 0.75, 1)], abs=1e-6)
    assert r.controller.surgery.ramps == {} and (attentions(r.model)[0].gate_by_hand == 1).all()
    x = torch.randint(256, (4, 17))
    train.training_step(r, x[:, :-1], x[:, 1:])


@pytest.mark.slow
def test_a_head_that_opens_is_not_taken_for_one_that_closes(run, monkeypatch):
    """Its gate is low by hand: it is neither pruned for that, nor when withdrawn, nor does it then run on.

    Withdrawn by the policy it is held back, though its other gates are open.
    """
    monkeypatch.setattr(Measurements, "held_out_nats", lambda self, run: 2.0)
    flags = dict(head_ids=[[0, 1]] * 2, sentinel="sigmoid", agency=True)
    r = run(flags, grow_heads=1, grow_ramp=100, grow_used=0.0, prune_gate=0.3, policy=True,
            policy_no_consent=[])
    measured(r, 12)
    assert {e[1] for e in events(r.out_dir)} <= {"grown", "state"} and len(r.controller.surgery.ramps) == 2
    r.controller.states.change(r, "policy", (0, 2), "withdrawn")
    r.controller.surgery.open_ramps(r)
    assert constant_gate(attentions(r.model)[0])[2] == 0
    r.config.policy_dwell = 1000
    measured(r, 6)
    assert "frozen" not in {e[1] for e in events(r.out_dir)}
    assert {row["type"] for row in rows_of(r.out_dir, "violations.jsonl")} == {"blocked"}


@pytest.mark.slow
def test_the_best_checkpoint_says_what_was_scored(run, monkeypatch):
    """Also while a head opens and another is frozen; gates set by hand are in no checkpoint."""
    monkeypatch.setattr(Measurements, "held_out_nats", lambda self, run: 2.0)
    r = run(dict(head_ids=[[0, 1]] * 2, sentinel="hard_concrete"), grow_heads=1, grow_ramp=10,
            grow_used=0.0)
    measured(r, 3)
    r.step += 3
    step_heads(r)
    with torch.no_grad():  # as if the new heads had learned to send something
        for attn in attentions(r.model):
            attn.c_proj.weight.normal_()
    r.model.set_gate(1, 0, 0.0)
    x = torch.arange(32).view(2, 16)
    scored = r.model.eval()(x).logits
    train.save_checkpoint(r, "best.pt", resumable=False)
    best = checkpoint.build(checkpoint.read(r.out_dir / "best.pt"), "best.pt")
    assert torch.allclose(best(x).logits, scored, atol=1e-5)
    train.save_checkpoint(r, "best.pt")  # negative control: as it is, it is another model
    plain = checkpoint.build(checkpoint.read(r.out_dir / "best.pt"), "best.pt")
    assert not torch.allclose(plain(x).logits, scored, atol=1e-3)
    assert torch.equal(r.model(x).logits, scored)


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_gates_by_hand_go_into_the_projections_of_every_mechanism(name):
    model = make_model(n_head=4, n_embd=64, **MECHANISMS[name]).double()
    shown = copy.deepcopy(model)
    for layer, attn in enumerate(attentions(model)):
        for head in attn.all_head_ids()[1:]:
            shown.set_gate(layer, head, 0.3 * head - 0.5)
    x = torch.arange(96).view(3, 32)
    folded = fold_gates(shown)
    assert all(attn.gate_by_hand is None for attn in attentions(folded))
    plain, want, found = (each(x).logits for each in (model, shown, folded))
    largest = want.abs().max()
    assert (plain - want).abs().max() > 1e-3 * largest
    assert (found - want).abs().max() < 1e-6 * largest  # a gate by hand is float32


@pytest.mark.parametrize("flags", [dict(head_mix=True), dict(value_residual=True),
                                   dict(head_mix=True, value_residual=True, sentinel="sigmoid",
                                        constraint_names=["a"], constraint_layers=[0])])
def test_a_head_that_others_read_and_that_is_closed_by_hand_leaves_the_copy(flags):
    model = make_model(n_head=4, n_embd=64, **flags)
    x = torch.arange(96).view(3, 32)
    model.set_gate(0, 1, 0.0)
    model.set_gate(0, 2, 0.5)
    folded = fold_gates(model)
    assert folded.config.head_ids[0] == [0, 2, 3] and model.transformer.h[0].attn.head_ids == [0, 1, 2, 3]
    assert torch.allclose(folded(x).logits, model(x).logits, atol=1e-5)


def test_a_head_whose_own_gate_is_0_stays_closed_in_the_copy():
    model = make_model(n_head=4, n_embd=64, agency=True)
    model.set_state(0, 1, state="withdrawn")
    x = torch.arange(96).view(3, 32)
    want = model(x).logits
    model.set_gate(0, 1, 0.5)
    assert torch.equal(fold_gates(model)(x).logits, want)


@pytest.mark.slow
def test_no_growth_while_the_loss_falls_or_heads_idle_or_none_is_free(run, monkeypatch):
    falling = iter(np.linspace(3, 1, 100))
    monkeypatch.setattr(Measurements, "held_out_nats", lambda self, run: float(next(falling)))
    r = run(dict(head_ids=[[0, 1]] * 2), grow_heads=1)
    measured(r, 8)
    assert r.model.config.head_ids == [[0, 1], [0, 1]]
    monkeypatch.setattr(Measurements, "held_out_nats", lambda self, run: 2.0)
    r = run(dict(head_ids=[[0, 1]] * 2), grow_heads=1, grow_used=1.01)
    measured(r, 8)
    assert r.model.config.head_ids == [[0, 1], [0, 1]]
    r = run(dict(head_ids=[[0, 1]] * 2, agency=True), grow_heads=1)
    r.model.set_state(0, 1, state="withdrawn")
    r.model.set_state(1, 0, consent=False)
    measured(r, 8)
    assert r.model.config.head_ids == [[0, 1], [0, 1]], "a withdrawn head sends nothing"
    r = run(dict(head_ids=[[0, 1, 2], [0, 1, 2, 3]]), grow_heads=3, grow_used=0.0, grow_ramp=1)
    measured(r, 12)
    assert r.model.config.head_ids == [[0, 1, 2, 3]] * 2


# ---- whole runs ----

LIFE = dict(sentinel="hard_concrete", agency=True, controller="ann", prune_gate=0.4, prune_margin=5.0,
            sentinel_init=-0.5, policy=True, policy_budget=0.75, policy_dwell=1, grow_heads=1, grow_from=3,
            grow_delta=1.0, grow_used=0.0, grow_ramp=5, sparsity_warmup=10, mechanism_lr=0.05,
            sentinel_coef=0.01, controller_interval=1)


# without the policy, which moves states too; measured at every other step: the last metrics count in between
LEARNED = {**LIFE, "policy": ..., "policy_budget": ..., "policy_dwell": ...,
           "agency_learned": True, "mechanism_lr": 0.3, "adamw_lr": 0.01, "warmup_iters": 0,
           "prune_floor": 2, "controller_interval": 2}


@pytest.mark.slow
@pytest.mark.parametrize("who", ["rules", "ann", "rl", "learned"])
def test_a_life_of_16_steps_equals_8_and_8(args, rows, tmp_path, who):
    keys = {**LIVE, **LIFE, "controller": who}
    if who == "learned":
        keys = {**LIVE, **LEARNED}
    main(args("whole", **keys))
    main(args("parts", **{**keys, "max_iters": 7}))
    main([*args("parts", **keys), "--resume"])
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert {"pruned", "grown", "state"} <= {e[1] for e in events(whole)}, "a life in which something happens"
    assert same(weights(whole / "ckpt.pt"), weights(parts / "ckpt.pt"))
    a, b = (checkpoint.read(folder / "ckpt.pt") for folder in (whole, parts))
    assert a["config"]["head_ids"] == b["config"]["head_ids"]
    for name in ("heads.jsonl", "violations.jsonl"):
        one, two = ([{k: v for k, v in row.items() if k not in ("seconds", "time")}
                     for row in rows_of(folder, name)] for folder in (whole, parts))
        assert one == two, name
    a["controller"].pop("seconds"), b["controller"].pop("seconds")
    assert plain(a["controller"]) == plain(b["controller"])


@pytest.mark.parametrize("change, words", [
    (lambda c: c.pop("mean"), "does not fit this config (KeyError: 'mean')"),
    (lambda c: c.update(mover=None), "does not fit this config (TypeError: "),
    (lambda c: c.update(generator=torch.zeros(3)), "does not fit this config (TypeError: "),
    (lambda c: c["overrides"].pop(), "does not fit this config (ValueError: "),
    (lambda c: c.update(high=torch.zeros(1, 1)), "does not fit this config (RuntimeError: "),
    (lambda c: c["counts"].update(low="x"), "does not fit this config (AttributeError: "),
    (lambda c: c.update(ramps=[3]), "does not fit this config (TypeError: "),
    (None, "is damaged: its heads were measured, and it has no controller's state")])
def test_a_damaged_state_of_a_controller_is_one_line(args, fails, tmp_path, change, words):
    keys = {**LIVE, **LIFE, "controller": "ann", "max_iters": 4}
    main(args(**keys))
    path = tmp_path / "run/ckpt.pt"
    state = checkpoint.read(path)
    change(state["controller"]) if change else state.pop("controller")
    torch.save(state, path)
    said, = fails([*args(**{**keys, "max_iters": 6}), "--resume"])
    assert said.startswith(str(path)) and words in said


@pytest.mark.slow
def test_a_killed_life_goes_on_exactly(args, tmp_path):
    keys = {**LIVE, **LIFE, "max_iters": 60, "eval_interval": 60, "save_interval": 5}
    main(args("whole", **keys))
    command = [sys.executable, "train.py", *args("killed", **keys)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    saved = tmp_path / "killed" / "ckpt.pt"
    while not saved.is_file() and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    if checkpoint.read(saved)["step"] == 60:
        pytest.fail("it was done before the kill")
    main([*args("killed", **keys), "--resume"])
    assert same(weights(tmp_path / "whole" / "ckpt.pt"), weights(saved))
    assert events(tmp_path / "whole") == events(tmp_path / "killed")


@pytest.mark.slow
def test_the_best_checkpoint_of_a_life_can_be_evaluated_sampled_and_continued(args, tmp_path):
    main(args(**{**LIVE, **LIFE}))
    state = checkpoint.read(tmp_path / "run" / "best.pt")
    model = checkpoint.build(state, "best.pt")
    assert sum(map(len, state["config"]["head_ids"])) == len(all_heads(model))
    model.generate(torch.zeros(1, 3, dtype=torch.long), 5)
    main(args("more", init_from=tmp_path / "run", n_layer=..., n_head=..., n_embd=..., block_size=...))


@pytest.mark.slow
def test_two_ranks_decide_alike(args, tmp_path):
    """Were they not to, their models would no longer fit together and the run would end."""
    keys = {**LIVE, **LIFE, "controller": "rules", "grad_clip": 1.0}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*command, "train.py", *args(**keys)], cwd=ROOT, capture_output=True, text=True,
                          timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (tmp_path / "run" / "ckpt.pt").is_file(), done.stderr[-2000:]
    assert checkpoint.read(tmp_path / "run" / "ckpt.pt")["step"] == 16, done.stderr[-2000:]
    assert {"pruned", "grown", "state"} <= {e[1] for e in events(tmp_path / "run")}
    assert [row["step"] for row in rows_of(tmp_path / "run")] == list(range(1, 17)), "from one rank alone"


@pytest.mark.slow
def test_a_compiled_run_lives_the_same(args, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    keys = {**LIVE, **LIFE, "max_iters": 8, "controller": "rules"}
    main(args("eager", **keys))
    main(args("compiled", **keys, compile=True))
    assert events(tmp_path / "eager") == events(tmp_path / "compiled")


# ---- agency ----

def test_states_follow_the_metrics_with_hysteresis_and_dwell(run, monkeypatch):
    use = {"now": 1.0}
    r = run(dict(agency=True), policy=True, policy_dwell=2)
    given(monkeypatch,
          utilisation=lambda layer, head: (use["now"] if head == 1 else (4 - use["now"]) / 3) / 4,
          conflict=lambda layer, head: -0.5 if (layer, head) == (1, 3) else 0.2)
    seen = []
    for value in (1.0, 1.6, 1.6, 1.3, 1.3, 1.3, 1.2, 1.2, 1.2):
        use["now"] = value
        measured(r)
        seen.append(states_of(r.model)[0, 1])
    assert seen == ["active", "overloaded", "overloaded", "overloaded", "overloaded", "overloaded", "active",
                    "active", "active"]
    assert states_of(r.model)[1, 3] == "misaligned"
    assert attentions(r.model)[1].agency.utilisation[0] == pytest.approx(2.8 / 3 / 4)
    assert attentions(r.model)[0].agency.last_signal[1] > 0


def test_slack_is_that_of_the_present_state_alone(run, monkeypatch):
    """A misaligned head is not overloaded below 1.5, an overloaded one not misaligned above the threshold."""
    sends, aligned = {1: 1.3, 2: 1.6}, {1: -0.5, 2: 0.2}
    r = run(dict(agency=True, n_layer=1), policy=True, policy_dwell=1)
    given(monkeypatch, utilisation=lambda layer, head: sends.get(head, 0.55) / 4,
          conflict=lambda layer, head: aligned.get(head, 0.2))
    measured(r, 3)
    assert states_of(r.model) == {(0, 0): "active", (0, 1): "misaligned", (0, 2): "overloaded",
                                  (0, 3): "active"}
    aligned.update({1: 0.2, 2: -0.08})
    measured(r)
    assert states_of(r.model)[0, 1] == "active" and states_of(r.model)[0, 2] == "overloaded"


@pytest.mark.parametrize("limit, seen", [(-0.1, (-0.12, -0.06, -0.04)), (0.2, (0.15, 0.29, 0.31))])
def test_a_misaligned_head_stays_so_a_little_longer(run, monkeypatch, limit, seen):
    r, now = run(dict(agency=True), policy=True, policy_dwell=1, policy_conflict=limit), {}
    given(monkeypatch, conflict=lambda layer, head: now["conflict"])
    states = []
    for now["conflict"] in (1.0, *seen):
        measured(r)
        states.append(states_of(r.model)[0, 0])
    assert states == ["active", "misaligned", "misaligned", "active"]


@pytest.mark.slow
@pytest.mark.parametrize("at_work", [(0, 2), (3,), ()], ids=["two", "one", "none"])
def test_heads_at_work_are_not_overloaded_because_others_are_withdrawn(run, monkeypatch, at_work):
    r = run(dict(agency=True), policy=True, policy_dwell=1)
    for head in set(range(4)) - set(at_work):
        r.model.set_state(0, head, state="withdrawn", consent=False)
    monkeypatch.setattr(States, "state_by_metrics", keep_withdrawn(States.state_by_metrics))
    before = states_of(r.model)
    measured(r, 5)
    heads = r.controller.measurements.heads
    load, share = heads.mean["load"][0], heads.latest["utilisation"][0]
    assert np.isfinite(load).all()
    if at_work:
        assert load[list(at_work)].mean() == pytest.approx(1.0)
        assert share[list(at_work)].max() * 4 > 1.5, "beside the withdrawn ones it would be too much"
    assert {at: state for at, state in states_of(r.model).items() if at[0] == 0} == \
        {at: state for at, state in before.items() if at[0] == 0}


def made_up_life(run, monkeypatch, unit="head", steps=60, **keys):
    """The rows of heads.jsonl of a policy with half of the heads of 4 blocks at work, metrics made up.

    The norm of what a head sends is its own, 1 to 1.25, times its factor and a little noise. What it is
    worth, or its layer with unit=layer, is drawn anew every eight measurements.
    """
    numbers, n = np.random.default_rng(0), 4
    norms = numbers.uniform(1, 1.25, (4, n))
    worths = [np.exp(1.5 * numbers.normal(size=(4, n if unit == "head" else 1))) for _ in range(0, steps, 8)]

    def made_up(model, x, y, autocast):
        found, worth = {name: [] for name in METRICS}, worths[r.controller.measurements.count // 8]
        for layer, attn in enumerate(attentions(model)):
            factor = attn.agency.gate().double()
            sent = factor * torch.from_numpy(norms[layer] * numbers.uniform(0.99, 1.01, n))
            found["utilisation"].append(sent / sent.sum().clamp_min(1e-30))
            found["importance"].append(factor * torch.from_numpy(worth[layer] * numbers.uniform(0.7, 1.4, n)))
            found["gate"].append(factor)
            found["entropy"].append(0 * factor + 0.5)
            for name in ("gradient", "conflict"):
                found[name].append((factor > 0) * 0.3)
        return found
    monkeypatch.setattr(measuring, "measure", made_up)
    r = run(dict(agency=True, n_layer=4), policy=True, policy_budget=0.5, policy_dwell=2, policy_unit=unit,
            **keys)
    return measured(r, steps)


def loads_of(row):
    """What each head sends over the mean of its layer's heads at work, as measured, [layers, heads]."""
    sent, at_work = np.array(row["utilisation"]), np.count_nonzero(row["gate"], 1)[:, None]
    return sent / np.maximum(sent.sum(1, keepdims=True), 1e-30) * at_work


def test_no_head_is_overloaded_by_others_that_come_and_go(run, monkeypatch):
    """No head ever sends more than 1.25 times an equal share, so that none is overloaded at 1.5.

    When the average of a withdrawn head's share moved towards 0, heads that had gone on were overloaded
    as soon as others came back.
    """
    rows = made_up_life(run, monkeypatch)
    every = [event for row in rows for event in row.get("events", ())]
    back = [(e["layer"], e["head"]) for e in every if e["state"] == "active"]
    assert [e for e in every if e["state"] == "overloaded"] == []
    assert max(loads_of(row).max() for row in rows) < 1.25 and len(back) > 10


@pytest.mark.parametrize("unit", ["head", "layer"])
def test_withdrawn_heads_come_back_and_the_budget_holds(run, monkeypatch, unit):
    rows = made_up_life(run, monkeypatch, unit)
    at_work = [frozenset((layer, head) for layer, states in enumerate(row["state"])
                         for head, state in enumerate(states) if state != "withdrawn") for row in rows]
    assert {len(each) for each in at_work} == {16, 8} and max(map(len, at_work[2:])) == 8
    assert frozenset.union(*at_work[2:]) == at_work[0], "everyone's turn comes"
    if unit == "layer":
        assert all(sum(at[0] == layer for at in each) in (0, 4) for each in at_work for layer in range(4))


def test_averages_of_a_withdrawn_head_stand_still(run):
    r = run(dict(agency=True), controller_log=True)
    measured(r, 2)
    r.model.set_state(0, 1, state="withdrawn")
    r.model.set_state(1, 2, consent=False)
    mean = {name: values.copy() for name, values in r.controller.measurements.heads.mean.items()}
    with torch.no_grad():
        for p in r.model.parameters():
            p.mul_(1.1)
    measured(r, 3)
    found = r.controller.measurements.heads
    for name in ("load", "importance", "gradient", "conflict"):
        assert found.latest.get(name, found.latest["importance"])[0, 1] == 0
        same = found.mean[name] == mean[name]
        assert same[0, 1] and same[1, 2] and same.sum() == 2, name
    assert found.mean["gate"][0, 1] == pytest.approx(0.7 ** 3)
    r.model.set_state(0, 1, state="active", consent=True)
    row = measured(r)[-1]
    want = 0.7 * mean["load"][0, 1] + 0.3 * loads_of(row)[0, 1]
    assert found.mean["load"][0, 1] == pytest.approx(want, rel=1e-4)


def test_a_head_that_was_never_at_work_counts_as_the_mean(run):
    r = run(dict(agency=True), policy=True, policy_no_consent=["0.1"])
    measured(r)
    mean = r.controller.measurements.heads.mean
    others = [0, 2, 3]
    assert mean["load"][0, 1] == pytest.approx(1.0)
    assert mean["importance"][0, 1] == pytest.approx(mean["importance"][0, others].mean())
    assert all(np.isfinite(values).all() for values in mean.values())


def test_a_withdrawn_head_that_runs_all_the_same_is_measured(run):
    """Because consent is not enforced."""
    r = run(dict(agency=True, agency_enforce=False), controller_log=True)
    r.model.set_state(0, 1, state="withdrawn")
    measured(r)
    heads = r.controller.measurements.heads
    assert not heads.withdrawn.any() and heads.mean["load"][0, 1] > 0
    r = run(dict(agency=True), controller_log=True)
    r.model.set_state(0, 2, state="withdrawn")
    measured(r)
    assert np.argwhere(r.controller.measurements.heads.withdrawn).tolist() == [[0, 2]]


def test_heads_without_consent_take_no_room_of_the_budget(run, monkeypatch):
    rows = made_up_life(run, monkeypatch, policy_no_consent=["0.0", "0.1", "1.0"])
    at_work = {sum(state != "withdrawn" for states in row["state"] for state in states) for row in rows[2:]}
    assert at_work == {8}
    assert {row["state"][0][0] for row in rows} == {"withdrawn"}


def keep_withdrawn(policy):
    """The policy, but what is withdrawn stays so: no head's turn comes."""
    return lambda self, metrics, key, now, resting: \
        now if now == "withdrawn" else policy(self, metrics, key, now, resting)


def test_a_dwell_is_kept(run, monkeypatch):
    r = run(dict(agency=True), policy=True, policy_dwell=4)
    flip = {"n": 0}

    def conflict(layer, head):
        return -0.5 if flip["n"] % 2 else 0.5
    given(monkeypatch, conflict=conflict)
    states = []
    for flip["n"] in range(1, 14):
        measured(r)
        states.append(states_of(r.model)[0, 0])
    changes = [i for i in range(1, len(states)) if states[i] != states[i - 1]]
    assert len(changes) > 1 and min(np.diff(changes)) >= 4


@pytest.mark.parametrize("unit, room", [("head", 5), ("layer", 4)])
def test_a_budget_withdraws_the_least_important_and_their_turn_comes(run, monkeypatch, unit, room):
    r = run(dict(agency=True), policy=True, policy_budget=5 / 8, policy_unit=unit, policy_dwell=1)

    given(monkeypatch, importance=lambda layer, head: 1.0 + layer + head / 10)
    measured(r, 2)
    states = states_of(r.model)
    asleep = {at for at, state in states.items() if state == "withdrawn"}
    assert len(states) - len(asleep) == room
    if unit == "layer":
        assert asleep == {(0, h) for h in range(4)}, "the layer of least importance, whole"
    else:
        assert asleep == {(0, 0), (0, 1), (0, 2)}
    assert rows_of(r.out_dir)[-1]["active"] == room
    packed = pack(r.model)
    assert len(all_heads(packed)) == room, "what is withdrawn is skipped for real"
    x = torch.arange(16)[None]
    assert torch.allclose(packed(x).logits, r.model.eval()(x).logits, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("enforce, kind", [(True, "blocked"), (False, "forced")])
def test_violations_are_counted_on_transitions(run, enforce, kind):
    r = run(dict(agency=True, agency_enforce=enforce), policy=True, policy_no_consent=["0.1", "1.3"],
            policy_dwell=1000)
    measured(r, 3)
    found = rows_of(r.out_dir, "violations.jsonl")
    assert [(v["layer"], v["head"], v["type"], v["state"]) for v in found] == [
        (0, 1, kind, "withdrawn"), (1, 3, kind, "withdrawn")]
    assert set(found[0]) == {"layer", "head", "type", "gate", "state", "utilisation", "last_signal", "step",
                             "time"}
    assert found[0]["step"] == 2 and found[0]["gate"] == 1.0 and found[0]["last_signal"] == 0
    row = rows_of(r.out_dir)[0]
    assert found[0]["utilisation"] == pytest.approx(row["utilisation"][0][1], abs=1e-5)
    assert (found[0]["utilisation"] == 0) == enforce
    r.model.set_state(0, 1, state="active")
    measured(r, 2)
    r.model.set_state(0, 1, state="withdrawn")
    measured(r, 2)
    assert len(rows_of(r.out_dir, "violations.jsonl")) == 3
    assert rows_of(r.out_dir)[-1][kind] == 2 and rows_of(r.out_dir)[-1]["active"] == (6 if enforce else 8)


@pytest.mark.slow
def test_a_head_that_grows_back_is_still_without_consent(run):
    """Dropped and inserted again it is a new head; what the run's config says of it holds all the same."""
    flags = dict(agency=True, head_ids=[[0, 2], [0, 1, 2]])
    r = run(flags, policy=True, policy_no_consent=["0.1", "1.2"], grow_heads=2, grow_used=0.0, grow_ramp=1,
            grow_delta=99.0, policy_dwell=1000)
    assert states_of(r.model)[1, 2] == "withdrawn" and (0, 1) not in states_of(r.model)
    measured(r, 5)
    grown = {(e["layer"], e["head"]) for row in rows_of(r.out_dir) for e in row.get("events", ())
             if e["what"] == "grown"}
    assert (0, 1) in grown and (0, 3) in grown
    withdrawn = {at for at, state in states_of(r.model).items() if state == "withdrawn"}
    assert withdrawn == {(0, 1), (1, 2)}, "and no other"
    assert rows_of(r.out_dir)[-1]["blocked"] == 2


def test_a_head_without_consent_must_be_there_unless_heads_grow(run):
    with pytest.raises(UserError, match="^policy: block 0 has no head 1; it has 0, 2$"):
        run(dict(agency=True, head_ids=[[0, 2], [0, 1]]), policy=True, policy_no_consent=["0.1"])


@pytest.mark.slow
def test_the_console_says_which_heads_come_and_go(run, capsys):
    r = run(dict(head_ids=[[0, 1]] * 2), grow_heads=1, grow_used=0.0, grow_ramp=1, grow_delta=99.0)
    measured(r, 5)
    grown = [line for line in capsys.readouterr().out.splitlines() if "heads grown" in line]
    assert grown[0].split("   ")[-1] == "heads grown: 0.2, 1.2; 6 heads" and grown[0].startswith("step ")
    gone = [dict(what="pruned", layer=1, head=3), dict(what="kept", layer=0, head=0)]
    assert controller.describe_heads(gone) == "heads pruned: 1.3"
    assert controller.describe_heads([dict(what="state", layer=0, head=1)]) == ""


def test_rules_say_who_may_change_what_and_refusals_are_logged_once(run, tmp_path, monkeypatch):
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([{"who": "policy", "layers": [0], "states": ["misaligned"], "allow": False}]))
    r = run(dict(agency=True), policy=True, policy_rules=str(rules), policy_dwell=1)
    given(monkeypatch, conflict=-0.9)
    measured(r, 4)
    states = states_of(r.model)
    assert {states[0, h] for h in range(4)} == {"active"}
    assert {states[1, h] for h in range(4)} == {"misaligned"}
    found = rows_of(r.out_dir, "violations.jsonl")
    assert len(found) == 4 and {v["type"] for v in found} == {"refused to policy"}
    who = Rules.read(rules)
    assert who.allow("config", 0, 1, "misaligned") and not who.allow("policy", 0, 1, "misaligned")


# ---- learned agency ----

def test_learned_agency_is_told_the_features_and_takes_the_likeliest_state(run, monkeypatch):
    r = run(dict(agency=True, agency_learned=True, constraint_names=["a"], constraint_layers=[1],
                 head_ids=[[0, 2], [1, 2, 3]]), controller_log=True)
    given(monkeypatch, entropy=lambda layer, head: 0.9 if head == 2 else 0.1,
          gate=lambda layer, head: 0.1 * head, conflict=-0.3)
    with torch.no_grad():
        for attn in attentions(r.model):
            attn.agency.weight.zero_(), attn.agency.bias.copy_(torch.tensor([0.5, 0.0, 0.0, 0.0]))
            attn.agency.weight[3, 0] = 1.0  # withdrawn from an entropy of 0.5 on
    r.model.set_state(0, 2, consent=False)
    measured(r)
    told = [attn.agency.metrics for attn in attentions(r.model)]
    assert [len(t) for t in told] == [2, 4], "a constraint head, too"
    assert torch.allclose(told[1], torch.tensor(
        [[entropy, 0.0, 0.0, 1.0, gate, -0.3] for entropy, gate in ((0.1, 0.1), (0.9, 0.2), (0.1, 0.3),
                                                                    (0.1, 0.4))]))
    assert set(states_of(r.model).values()) == {"active"}, "warm-up"
    found = measured(r)[-1]
    assert states_of(r.model)[1, 2] == "withdrawn" and attentions(r.model)[0].agency.state[1] == 0
    assert events(r.out_dir) == [(4, "state", 1, 2)] and found["events"][0]["who"] == "learned"
    agency = attentions(r.model)[1].agency
    assert agency.last_signal.tolist() == [0, 4, 0, 0]
    assert agency.consent.all() and agency.gate()[1] == 0
    assert found["state"] == [["active"] * 2, ["active", "withdrawn", "active", "active"]]
    assert found["active"] == 4 and found["blocked"] == 1, "of the one without consent"
    assert pack(r.model).config.head_ids == [[0], [1, 3]]
    with torch.no_grad():
        agency.bias[0] = 1.0
    measured(r)
    assert agency.state.tolist() == [0] * 4 and (agency.gate() == 1).all(), "and back by itself"


def noisy_life(run, noise=3.0):
    """The states after 24 steps, measured every 2, with noise in place of what head 0.1 reads."""
    r = run(dict(agency=True, agency_learned=True), fresh=True, controller_log=True, batch_size=16,
            mechanism_lr=0.03)
    attn, generator = attentions(r.model)[0], torch.Generator().manual_seed(0)
    attend = attn.attend

    def attend_noise(h):
        y, stats = attend(h)
        y = y.clone()
        y[:, 1] = noise * torch.randn(y[:, 1].shape, generator=generator)
        return y, stats
    if noise:
        attn.attend = attend_noise
    batches = Batches(r.dataset, "train", 16, 16, 1)
    for step in range(24):
        ids = batches(step, 0, 1)
        train.training_step(r, ids[:, :-1], ids[:, 1:])
        r.step += 1
        step_heads(r)
    return {at: state for at, state in states_of(r.model).items() if state != "active"}


@pytest.mark.slow
def test_learned_agency_withdraws_a_head_that_says_nothing(run):
    """The control: where it reads the text, no head moves."""
    assert noisy_life(run) == {(0, 1): "withdrawn"}
    assert noisy_life(run, noise=None) == {}


@pytest.mark.slow
def test_without_straight_through_no_state_is_learned(run, monkeypatch):
    monkeypatch.setattr(Agency, "gate", lambda self: self.factors[self.state])
    assert noisy_life(run) == {}


# ---- what is wrong ----

def test_one_rule_needs_no_list_around_it(tmp_path):
    path = tmp_path / "rules.json"
    path.write_text('{"who": "policy", "states": ["withdrawn"], "allow": false}')
    rules = Rules.read(path)
    assert not rules.allow("policy", 0, 0, "withdrawn") and rules.allow("policy", 0, 0, "active")
    assert rules.allow("config", 0, 0, "withdrawn")


# ---- a folder that somebody else made ----

MEASURED = dict(block_size=8, agency=True, controller_log=True, controller_interval=2, controller_tokens=64,
                controller_heldout=64, max_iters=6)


def test_portions_of_the_loss_need_not_divide_what_a_controller_reads(args, rows, tmp_path):
    flags = dict(loss_chunks=3, mechanism="sentinel", controller="rules", controller_interval=2,
                 controller_tokens=256, controller_heldout=256)
    main(args(**flags))
    main(args("whole", **{**flags, "loss_chunks": 1}))
    some, whole = (rows(tmp_path / out)[0] for out in ("run", "whole"))
    assert [r["loss"] for r in some] == pytest.approx([r["loss"] for r in whole], abs=1e-4)
