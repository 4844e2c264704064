"""Dynamic heads: what moves, prunes and grows them between steps; exact resumes; nothing where it is off."""
import copy
import json
import math
import os
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import train
from model import GPT, GPTConfig
from nanoheads import checkpoint
from nanoheads.batches import Batches
from nanoheads.common import UserError
from nanoheads.config import TrainConfig
from nanoheads.dataset import Dataset
from nanoheads.pruning import constant_gate, pack
from nanoheads.ranks import Process
from lab.heads import controller
from lab.heads.gates import MOVERS, move_gates
from lab.heads.measuring import METRICS, Measurements, Metrics, all_heads, attentions, head_ids
from lab.heads.rules import Rules
from lab.heads.states import conditions, share_with_agency, states_of
from lab.heads.surgery import fold_gates
from helpers import TINY, ending, forks, in_child, make_model, same, small_models, tiny, weights
from train import main

SMALL = dict(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=256, recipe="modern")
OFTEN = dict(controller_interval=2, controller_tokens=64, controller_heldout=64, controller_warmup=1,
             controller_patience=2)
LIVE = {**TINY, **OFTEN, "n_layer": 2, "n_head": 4, "n_embd": 32, "max_iters": 16, "eval_interval": 8}
X = torch.arange(32).view(2, 16)


def rows_of(folder, name="heads.jsonl"):
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def untimed(rows):
    return [{key: value for key, value in row.items() if key not in ("seconds", "time")} for row in rows]


def events(folder):
    return [(e["what"], e["layer"], e["head"]) for row in rows_of(folder) for e in row.get("events", ())]


def plain(state):
    """A checkpoint's state as text: tensors as lists, to the last digit."""
    if isinstance(state, dict):
        return {str(key): plain(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [plain(value) for value in state]
    return str(state.tolist()) if torch.is_tensor(state) else str(state)


@pytest.fixture
def run(bytes_data, tmp_path):
    """run(flags of the model, **keys of training) -> a Run with optimizers and its Controller, not trained.

    fresh: with the initial values, else all weights send something.
    """
    def make(flags=None, fresh=False, **keys):
        config = TrainConfig(**{**OFTEN, "dataset": str(bytes_data), "out_dir": str(tmp_path / "run"),
                                "batch_size": 4, "device": "cpu", **keys}).for_recipe("modern")
        model = GPT(GPTConfig(**{**SMALL, **(flags or {})}))
        torch.manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.1 * (not fresh))
        found = train.Run(config, model, Dataset(bytes_data), Process())
        train.set_up(found)
        found.out_dir.mkdir(parents=True, exist_ok=True)
        found.controller = controller.start(found, {})
        found.acting = {"controller": found.controller}
        return found
    return make


def between_steps(run):
    """Measure, and set up again where heads came or went, as train.py does."""
    if run.between_steps():
        train.set_up_again(run)


def measured(run, n=1):
    """The rows of heads.jsonl after n more measurements, one each interval."""
    for _ in range(n):
        run.step += run.config.controller_interval
        between_steps(run)
    return rows_of(run.out_dir)


class MadeUp(Measurements):
    """Numbers that nobody measured: what each head's metrics are, and what closing a head costs."""

    def __init__(self, run, costs=lambda layer, head: 0.0):
        super().__init__(run)
        self.model, self.costs = run.model, costs

    def tell(self, nats=3.0, **values):
        """One more measurement: of each metric a number, or a function of (layer, head); 0 of who rests."""
        found, factors = {name: [] for name in METRICS}, []
        for layer, attn in enumerate(attentions(self.model)):
            factors.append(torch.ones(attn.n_total) if attn.agency is None else attn.agency.gate().detach())
            for name in METRICS:
                value = values.get(name, 0.25)
                of_heads = [value(layer, head) if callable(value) else value for head in attn.all_head_ids()]
                rests = (factors[-1] == 0) & torch.tensor(name != "entropy")
                found[name].append(torch.tensor(of_heads).double().masked_fill(rests, 0.0))
        self.heads.add(found, factors, head_ids(self.model), 0.0)
        self.held_out_loss = nats
        self.losses.append(nats)
        self.count += 1

    def held_out_nats(self, run):
        shut = [(layer, head) for layer, attn in enumerate(attentions(self.model))
                if attn.gate_by_hand is not None
                for head, gate in zip(attn.all_head_ids(), attn.gate_by_hand.tolist()) if gate == 0]
        return 3.0 + sum(self.costs(*place) for place in shut)


def logits(run):
    return torch.stack([attn.sentinel.logit.detach().clone() for attn in attentions(run.model)])


# ---- off, measured alone ----

def test_measuring_changes_no_digit_of_the_training_and_off_leaves_no_trace(args, tmp_path):
    off, on = tmp_path / "off", tmp_path / "on"
    main(args("off", **{**LIVE, **{key: ... for key in OFTEN}}))
    main(args("on", **LIVE, controller_log=True))
    assert "controller" not in checkpoint.read(off / "ckpt.pt") and not rows_of(off)
    assert same(weights(off / "ckpt.pt"), weights(on / "ckpt.pt"))
    found = rows_of(on)
    assert [row["step"] for row in found] == list(range(2, 17, 2))
    assert all(len(row[name]) == 2 and len(row[name][0]) == 4 for row in found for name in METRICS)
    assert found[-1]["active"] == 8 and found[-1]["heldout"] < found[0]["heldout"]


def slow_averages(history, past_weight):
    """{(metric, layer, head): average}, one head at a time, of [(metrics, factors), arrays by heads each]."""
    means = {}
    for metrics, factors in history:
        for layer, gates in enumerate(metrics["gate"]):
            peers = [head for head, gate in enumerate(gates) if gate != 0]
            now = {name: of_layers[layer] for name, of_layers in metrics.items()}
            equal = np.mean([now["utilisation"][head] for head in peers]) if peers else 0
            now["load"] = [sent / equal if equal else 0 for sent in now["utilisation"]]
            for name, values in now.items():
                of_peers = np.mean([values[head] for head in peers]) if peers else 0
                for head, value in enumerate(values):
                    old = means.get((name, layer, head))
                    rests = factors[layer][head] == 0 == gates[head]
                    if rests and name in ("load", "importance", "gradient", "conflict"):
                        new = of_peers if old is None else old
                    else:
                        new = value if old is None else past_weight * old + (1 - past_weight) * value
                    means[name, layer, head] = new
    return means


def test_averages_weigh_the_past():
    """What a head sends is over those at work, and of who rests it stands still, or is the others' mean."""
    numbers, heads, history = np.random.default_rng(0), Metrics((3, 4)), []
    for _ in range(12):
        factors = numbers.choice([0.0, 0.5, 1.0], (3, 4), p=[0.4, 0.2, 0.4])
        opened = factors + (numbers.random((3, 4)) < 0.1)  # by hand, some that agency holds back
        metrics = {name: numbers.uniform(0.1, 1, (3, 4)) * (opened > 0) for name in METRICS}
        history.append((metrics, factors))
        tensors = {name: [*map(torch.from_numpy, values)] for name, values in metrics.items()}
        heads.add(tensors, [*map(torch.from_numpy, factors)], [[0, 1, 2, 3]] * 3, 0.7)
        want = slow_averages(history, 0.7)
        for (name, layer, head), value in want.items():
            assert heads.mean[name][layer, head] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    assert len(want) == 12 * (len(METRICS) + 1)


def test_a_metric_that_is_not_finite_stops_with_its_name(run):
    r = run(controller_log=True)
    with torch.no_grad():
        attentions(r.model)[0].c_proj.weight.fill_(math.nan)
    with pytest.raises(UserError, match="step 2: .* is not finite; lower adamw_lr or muon_lr$"):
        measured(r)


def test_portions_of_the_loss_need_not_divide_what_a_controller_reads(args, rows, tmp_path):
    flags = dict(mechanism="sentinel", controller="rules", controller_interval=2, controller_tokens=256,
                 controller_heldout=256)
    for portions in (3, 1):
        main(args(str(portions), loss_chunks=portions, **flags))
    some, whole = (rows(tmp_path / out)[0] for out in "31")
    assert [r["loss"] for r in some] == pytest.approx([r["loss"] for r in whole], abs=1e-4)


# ---- gates ----

def test_rules_lower_what_is_long_high_and_a_little_what_is_long_small(run):
    """High is an entropy above 0.8, and until it is below 0.75; small a gradient far below its layer's."""
    r = run(dict(sentinel="sigmoid"), controller="rules", controller_step=0.4)
    told, start, falls = MadeUp(r), logits(r), []
    for entropy in (0.9, 0.9, 0.77, 0.74, 0.77, 0.9, 0.9):
        told.tell(entropy=lambda layer, head: entropy if (layer, head) == (0, 1) else 0.3,
                  gradient=lambda layer, head: 0.01 if (layer, head) == (1, 2) else 1.0)
        before = logits(r)
        move_gates(r.controller.mover, told, r)
        falls.append(before - logits(r))
    of_high, of_small = ([fall[place].item() for fall in falls] for place in ((0, 1), (1, 2)))
    assert of_high == pytest.approx([0, 0.4, 0.4, 0, 0, 0, 0.4], abs=1e-6)
    assert of_small == pytest.approx([0, *[0.1] * 6], abs=1e-6)
    assert (logits(r) != start).sum() == 2


@pytest.mark.slow
def test_a_network_learns_which_heads_are_worth_their_cost(run):
    """Closing a head of high importance costs 0.01 nats, of the others nothing: the network finds out."""
    def worthy(layer, head):
        return (layer + head) % 2 == 0
    r = run(dict(sentinel="sigmoid"), controller="ann", controller_cost=0.001)
    told, start = MadeUp(r, lambda *place: 0.01 * worthy(*place)), logits(r)
    for _ in range(20):
        told.tell(importance=lambda *place: 0.02 if worthy(*place) else 0.001)
        move_gates(r.controller.mover, told, r)
    change = logits(r) - start
    for place in all_heads(r.model):
        assert change[place] > 0.5 if worthy(*place) else change[place] < -0.5, place


@pytest.mark.slow
def test_a_policy_by_reward_learns_to_close_what_costs(run):
    """Where the loss does not depend on the gates, open heads only cost: they are lowered."""
    r = run(dict(sentinel="sigmoid"), controller="rl", controller_step=0.3)
    told = MadeUp(r)
    for _ in range(150):
        gates = torch.stack([constant_gate(attn).detach() for attn in attentions(r.model)])
        told.tell(gate=lambda *place: gates[place].item())
        move_gates(r.controller.mover, told, r)
    assert logits(r).mean() < 2.5  # they began at 3


NUMBERS = st.sampled_from([0.0, 0.25, 1.0, -1.0, 1e30])


@settings(max_examples=4)
@given(values=st.fixed_dictionaries({name: NUMBERS for name in METRICS}), odd=st.sampled_from([*METRICS]))
def test_whatever_is_measured_gates_stay_within_their_bounds(run, values, odd):
    for who in sorted(filter(None, MOVERS)):
        r = run(dict(sentinel="hard_concrete"), controller=who, controller_step=2.0, controller_bound=4.0)
        told = MadeUp(r)
        for _ in range(6):
            told.tell(**{**values, odd: lambda layer, head: (layer + head) % 2})
            move_gates(r.controller.mover, told, r)
        assert logits(r).isfinite().all() and logits(r).abs().max() <= 4.0


def test_sparsity_warms_up(run):
    r = run(dict(sentinel="hard_concrete", sentinel_coef=0.01), sparsity_warmup=6)
    seen = [float(attentions(r.model)[1].sentinel.coef)]
    for _ in range(4):
        measured(r)
        seen.append(float(attentions(r.model)[1].sentinel.coef))
    assert seen == pytest.approx([0.01 * min(1, step / 6) for step in range(0, 10, 2)])


# ---- pruning ----

def close(run, *places):
    with torch.no_grad():
        for layer, head in places:
            attentions(run.model)[layer].sentinel.logit[head] = -9.0


def trains_on(run):
    """A step is made with the heads that are there, and the optimizers hold these parameters alone."""
    in_groups = {id(p) for optimizer in run.optimizers for group in optimizer.param_groups
                 for p in group["params"]}
    assert in_groups == {id(p) for p in run.model.parameters()}
    x = torch.randint(256, (4, 17))
    train.training_step(run, x[:, :-1], x[:, 1:])


def test_heads_are_frozen_then_dropped_and_the_logits_stay(run):
    r = run(dict(sentinel="hard_concrete"), prune_gate=0.05, prune_margin=1.0)
    close(r, (0, 2))
    measured(r, 3)  # the first measurement is warm-up
    assert r.model.config.head_ids is None and events(r.out_dir) == [("frozen", 0, 2)]
    before = r.model.eval()(X).logits
    row = measured(r)[-1]
    assert r.model.config.head_ids == row["heads"] == [[0, 1, 3], [0, 1, 2, 3]]
    assert torch.allclose(r.model.eval()(X).logits, before, atol=1e-5)
    assert events(r.out_dir) == [("frozen", 0, 2), ("pruned", 0, 2)] and len(row["entropy"][0]) == 3
    trains_on(r)


def test_a_drop_that_costs_too_much_is_taken_back(run):
    r = run(dict(sentinel="sigmoid"), prune_gate=0.05)
    cheap, dear = (0, 2), (1, 0)
    told = MadeUp(r, lambda *place: 0.005 if place == cheap else 0.02)
    close(r, cheap, dear)
    for _ in range(3):
        told.tell()
        r.controller.surgery.freeze(told, r)
    found = [(e["what"], e["layer"], e["head"]) for e in r.controller.events]
    assert sorted(found) == [("frozen", *cheap), ("kept", *dear)], "it has to be low for long again"
    assert attentions(r.model)[0].gate_by_hand[2] == 0
    assert attentions(r.model)[1].gate_by_hand is None, "its gate is its own again"


def test_every_layer_keeps_its_floor_and_constraint_heads_stay(run):
    r = run(dict(sentinel="sigmoid", sentinel_init=-9.0, constraint_names=["a"], constraint_layers=[1]),
            prune_gate=0.05, prune_floor=2, prune_margin=100.0)
    measured(r, 8)
    assert [len(ids) for ids in r.model.config.head_ids] == [2, 2]
    assert attentions(r.model)[1].n_extra == 1


# ---- growth ----

def test_growth_on_a_plateau_preserves_the_logits_and_opens_slowly(run, capsys):
    """Nothing is trained here, so that the held-out loss does not fall."""
    r = run(dict(head_ids=[[0, 1]] * 2, sentinel="sigmoid"), grow_heads=1, grow_ramp=4, grow_used=0.1)
    before = r.model.eval()(X).logits
    measured(r, 2)
    assert r.model.config.head_ids == [[0, 1], [0, 1]]
    measured(r)
    assert r.model.config.head_ids == [[0, 1, 2], [0, 1, 2]]
    assert torch.allclose(r.model.eval()(X).logits, before, atol=1e-5)
    assert events(r.out_dir) == [("grown", 0, 2), ("grown", 1, 2)]
    assert "heads grown: 0.2, 1.2; 6 heads" in capsys.readouterr().out
    own = attentions(r.model)[0].sentinel.gate(noisy=False)[2].item()
    opened = []
    for _ in range(5):
        opened.append(constant_gate(attentions(r.model)[0])[2].item())
        r.step += 1
        between_steps(r)
    assert opened == pytest.approx([own * done for done in (0, 0.25, 0.5, 0.75, 1)], abs=1e-6)
    trains_on(r)


def test_no_growth_while_the_loss_falls_or_heads_idle_or_none_is_free(run):
    ids = [[0, 1]] * 2
    r = run(dict(head_ids=ids), grow_heads=1)
    told = MadeUp(r)
    for nats in np.linspace(3, 1, 8):
        told.tell(nats)
        assert not r.controller.surgery.grow(told, r), "it falls"
    r = run(dict(head_ids=ids), grow_heads=1, grow_used=1.01)
    measured(r, 5)
    assert r.model.config.head_ids == ids, "some head sends less"
    r = run(dict(head_ids=ids, agency=True), grow_heads=1)
    r.model.set_state(0, 1, state="withdrawn")
    r.model.set_state(1, 0, consent=False)
    measured(r, 5)
    assert r.model.config.head_ids == ids, "a withdrawn head sends nothing"
    r = run(dict(head_ids=[[0, 1, 2], [0, 1, 2, 3]]), grow_heads=3, grow_used=0.0, grow_ramp=1)
    measured(r, 7)
    assert r.model.config.head_ids == [[0, 1, 2, 3]] * 2, "as many as are free"


def test_a_head_that_opens_is_not_pruned_and_one_that_grows_back_is_still_without_consent(run):
    """The gate of the first is low by hand. The second is new, and what the config says of it still holds."""
    flags = dict(agency=True, sentinel="sigmoid", head_ids=[[0, 2], [0, 1, 2]])
    keys = dict(policy=True, policy_no_consent=["0.1", "1.2"], policy_dwell=1000)
    r = run(flags, **keys, grow_heads=2, grow_used=0.0, grow_ramp=100, grow_delta=99.0, prune_gate=0.3)
    row = measured(r, 8)[-1]
    assert {e for e in events(r.out_dir) if e[0] != "state"} == {("grown", 0, 1), ("grown", 0, 3),
                                                                ("grown", 1, 3)}
    withdrawn = [place for place, state in states_of(r.model).items() if state == "withdrawn"]
    assert withdrawn == [(0, 1), (1, 2)] and row["blocked"] == 2
    assert (constant_gate(attentions(r.model)[0]) > 0).tolist() == [True, False, True, True]
    with pytest.raises(UserError, match="^policy: block 0 has no head 1; it has 0, 2$"):
        run(flags, **keys)  # where none is grown, it must be there


def test_the_best_checkpoint_says_what_was_scored(run):
    """Also while a head opens and another is frozen; gates set by hand are in no checkpoint."""
    r = run(dict(head_ids=[[0, 1]] * 2, sentinel="hard_concrete"), grow_heads=1, grow_ramp=10,
            grow_used=0.0)
    measured(r, 3)
    r.step += 3
    between_steps(r)
    with torch.no_grad():  # as if the new heads had learned to send something
        for attn in attentions(r.model):
            attn.c_proj.weight.normal_()
    r.model.set_gate(1, 0, 0.0)
    scored = r.model.eval()(X).logits
    for resumable in (False, True):  # the second is the model as it is, without the gates
        train.save_checkpoint(r, "best.pt", resumable=resumable)
        saved = checkpoint.build(checkpoint.read(r.out_dir / "best.pt"), "best.pt")
        assert torch.allclose(saved(X).logits, scored, atol=1e-5) != resumable
    assert torch.equal(r.model(X).logits, scored)


@settings(max_examples=10)
@given(flags=small_models())
def test_gates_by_hand_go_into_the_projections_of_every_mechanism(flags):
    model = tiny(flags)
    shown, x = copy.deepcopy(model), torch.arange(32).view(2, 16)
    for layer, attn in enumerate(attentions(model)):
        for head in attn.all_head_ids()[1:]:
            shown.set_gate(layer, head, 0.3 * head - 0.5)
    folded = fold_gates(shown)
    assert all(attn.gate_by_hand is None for attn in attentions(folded))
    before, want, found = (each(x).logits for each in (model, shown, folded))
    largest = want.abs().max()
    assert (found - want).abs().max() < 1e-6 * largest < (before - want).abs().max()  # gates are float32


def test_a_head_that_others_read_and_that_is_closed_by_hand_leaves_the_copy():
    model = make_model(n_head=4, n_embd=64, head_mix=True)
    model.set_gate(0, 1, 0.0)
    model.set_gate(0, 2, 0.5)
    folded = fold_gates(model)
    assert folded.config.head_ids[0] == [0, 2, 3] and attentions(model)[0].head_ids == [0, 1, 2, 3]
    assert torch.allclose(folded(X).logits, model(X).logits, atol=1e-5)


# ---- whole runs ----

LIFE = dict(sentinel="hard_concrete", agency=True, controller="ann", prune_gate=0.4, prune_margin=5.0,
            sentinel_init=-0.5, policy=True, policy_budget=0.75, policy_dwell=1, grow_heads=1, grow_from=3,
            grow_delta=1.0, grow_used=0.0, grow_ramp=5, sparsity_warmup=10, mechanism_lr=0.05,
            sentinel_coef=0.01, controller_interval=1)
# measured, since the mechanism's name says so, at every other step: the last metrics count in between;
# without the policy, which moves states too
LEARNED = {**LIFE, "policy": ..., "policy_budget": ..., "policy_dwell": ..., "agency": ..., "controller": ...,
           "mechanism": "agency_learned", "mechanism_lr": 0.3, "adamw_lr": 0.01, "warmup_iters": 0,
           "prune_floor": 2, "controller_interval": 2}


@pytest.mark.slow
@pytest.mark.parametrize("who", ["ann", "rl", "learned"])
def test_a_life_of_12_steps_equals_5_and_7(args, tmp_path, who):
    """Rows that a killed run wrote after its last save, half a one too, are written again."""
    keys = {**LIVE, **LEARNED} if who == "learned" else {**LIVE, **LIFE, "controller": who}
    keys.update(max_iters=12, eval_interval=6)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    main(args("whole", **keys))
    main(args("parts", **{**keys, "max_iters": 5}))
    with open(parts / "heads.jsonl", "a") as file:
        file.write(json.dumps({**rows_of(parts)[-1], "step": 6}) + '\n{"step": 8, "hea')
    main([*args("parts", **keys), "--resume"])
    assert {"pruned", "grown", "state"} <= {what for what, *_ in events(whole)}, "something happens in it"
    assert same(weights(whole / "ckpt.pt"), weights(parts / "ckpt.pt"))
    for name in ("heads.jsonl", "violations.jsonl"):
        assert untimed(rows_of(whole, name)) == untimed(rows_of(parts, name))
    a, b = (checkpoint.read(folder / "ckpt.pt") for folder in (whole, parts))
    a["controller"].pop("seconds"), b["controller"].pop("seconds")
    assert a["config"] == b["config"] and plain(a["controller"]) == plain(b["controller"])
    if who == "ann":  # the best checkpoint is one like any other
        best = checkpoint.build(checkpoint.read(whole / "best.pt"), "best.pt")
        assert best.generate(torch.zeros(1, 3, dtype=torch.long), 5).shape == (1, 8)
        main(args("more", init_from=whole, max_iters=1, n_layer=..., n_head=..., n_embd=..., block_size=...))


def test_a_damaged_state_of_a_controller_is_one_line(args, fails, tmp_path):
    keys = {**LIVE, **LIFE, "controller": "ann", "max_iters": 4}
    main(args(**keys))
    path = tmp_path / "run/ckpt.pt"
    whole = checkpoint.read(path)
    for change, words in (
            (lambda c: c.pop("mean"), "does not fit this config (KeyError: 'mean')"),
            (lambda c: c.update(high=torch.zeros(1, 1)), "does not fit this config (RuntimeError: "),
            (None, "is damaged: its heads were measured, and it has no controller's state")):
        state = copy.deepcopy(whole)
        change(state["controller"]) if change else state.pop("controller")
        torch.save(state, path)
        said, = fails([*args(**{**keys, "max_iters": 6}), "--resume"])
        assert said.startswith(str(path)) and words in said


@pytest.mark.slow
@forks
def test_two_ranks_decide_alike(args, tmp_path, free_port):
    """Were they not to, their models would no longer fit together and the run would end."""
    argv = args(**{**LIVE, **LIFE, "controller": "rules", "grad_clip": 1.0})
    of_both = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port))
    with open(tmp_path / "said.txt", "w") as said:
        ranks = [in_child(argv, partial(os.environ.update, of_both, RANK=rank, LOCAL_RANK=rank), said, said)
                 for rank in "01"]
        assert [ending(rank) for rank in ranks] == [0, 0], (tmp_path / "said.txt").read_text()[-2000:]
    assert checkpoint.read(tmp_path / "run/ckpt.pt")["step"] == 16
    assert {"pruned", "grown", "state"} <= {what for what, *_ in events(tmp_path / "run")}
    assert [row["step"] for row in rows_of(tmp_path / "run")] == list(range(1, 17)), "from one rank alone"


@pytest.mark.slow
def test_a_compiled_run_lives_the_same(args, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    keys = {**LIVE, **LIFE, "n_layer": 1, "max_iters": 5, "controller": "rules"}
    main(args("eager", **keys))
    main(args("compiled", **keys, compile=True))
    found = events(tmp_path / "eager")
    assert found == events(tmp_path / "compiled") and {"grown", "pruned"} & {what for what, *_ in found}


# ---- agency ----

@pytest.mark.parametrize("now, current, want", [
    (dict(load=1.4), "active", "active"), (dict(load=1.6), "active", "overloaded"),
    (dict(load=1.3), "overloaded", "overloaded"), (dict(load=1.2), "overloaded", "active"),
    (dict(conflict=-0.08), "active", "active"), (dict(conflict=-0.12), "active", "misaligned"),
    (dict(conflict=-0.06), "misaligned", "misaligned"), (dict(conflict=-0.04), "misaligned", "active"),
    (dict(load=1.3), "misaligned", "active"),  # slack is that of the present state alone
    (dict(entropy=0.96, load=0.4), "active", "withdrawn"), (dict(entropy=0.96, load=0.6), "active", "active"),
    (dict(entropy=0.96, load=0.4, conflict=-1.0), "active", "withdrawn")])
def test_a_state_follows_from_the_averages_and_is_left_a_little_later(now, current, want):
    holds = conditions({**dict(entropy=0.5, load=1.0, conflict=0.2), **now}, TrainConfig(), current)
    assert next((state for state in holds if holds[state]), "active") == want


def test_states_follow_the_metrics_keep_a_dwell_and_what_rules_refuse_is_logged_once(run, tmp_path):
    """In layer 0 nobody may be misaligned; in layer 1 states last four measurements at least."""
    rules = tmp_path / "rules.json"
    rules.write_text('{"who": "policy", "layers": [0], "states": ["misaligned"], "allow": false}')  # no list
    r = run(dict(agency=True), policy=True, policy_rules=str(rules), policy_dwell=4)
    told, seen = MadeUp(r), []
    for n in range(13):
        r.step += 2
        told.tell(conflict=0.5 if n % 2 else -0.5)
        share_with_agency(told.heads, r.model)
        r.controller.states.follow_policy(told, r)
        seen.append(states_of(r.model))
    assert {states[0, head] for states in seen for head in range(4)} == {"active"}
    found = rows_of(r.out_dir, "violations.jsonl")
    assert len(found) == 4 and {v["type"] for v in found} == {"refused to policy"}
    changes = [i for i in range(1, 13) if seen[i][1, 0] != seen[i - 1][1, 0]]
    assert len(changes) > 1 and min(np.diff(changes)) >= 4
    agency = attentions(r.model)[1].agency
    assert agency.utilisation.tolist() == [0.25] * 4 and agency.last_signal[0] == 2 * changes[-1] + 2
    who = Rules.read(rules)
    assert who.allow("config", 0, 1, "misaligned") and not who.allow("policy", 0, 1, "misaligned")
    assert who.allow("policy", 0, 0, "active") and who.allow("policy", 1, 0, "misaligned")


@pytest.mark.parametrize("unit, asleep", [("head", [(0, 0), (0, 1), (0, 2)]), ("layer", [(0, 0), (0, 1),
                                                                                        (0, 2), (0, 3)])])
def test_a_budget_withdraws_the_least_important_for_real(run, unit, asleep):
    r = run(dict(agency=True), policy=True, policy_budget=5 / 8, policy_unit=unit)
    told = MadeUp(r)
    told.tell(importance=lambda layer, head: 1.0 + layer + head / 10)
    r.controller.states.follow_policy(told, r)
    assert [place for place, state in states_of(r.model).items() if state == "withdrawn"] == asleep
    packed = pack(r.model)
    assert all_heads(packed) == [place for place in all_heads(r.model) if place not in asleep]
    assert torch.allclose(packed(X).logits, r.model.eval()(X).logits, atol=1e-5)


@pytest.mark.parametrize("unit, refuse", [("head", []), ("layer", []), ("head", ["0.0", "0.1", "1.0"])])
def test_everyones_turn_comes_within_the_budget_and_nobody_is_overloaded_by_it(run, unit, refuse):
    """What a head sends is its own, 1 to 1.25, and a little noise. What it is worth, or its layer, changes.

    Nobody sends 1.5 times the mean of those at work, whoever comes and goes meanwhile.
    """
    r = run(dict(agency=True, n_layer=4), policy=True, policy_budget=0.5, policy_dwell=2, policy_unit=unit,
            policy_no_consent=refuse)
    numbers, told, at_work = np.random.default_rng(0), MadeUp(r), []
    norms = numbers.uniform(1, 1.25, (4, 4))
    for n in range(60):
        if n % 8 == 0:
            worth = np.exp(1.5 * numbers.normal(size=(4, 4 if unit == "head" else 1))) * np.ones((4, 4))
        told.tell(utilisation=lambda *place: norms[place] * numbers.uniform(0.99, 1.01), conflict=0.3,
                  importance=lambda *place: worth[place] * numbers.uniform(0.7, 1.4))
        r.controller.states.follow_policy(told, r)
        states = states_of(r.model)
        assert set(states.values()) <= {"active", "withdrawn"}, "nobody is overloaded"
        at_work.append({place for place in states if states[place] == "active"})
        of_layers = [sum(place[0] == layer for place in at_work[-1]) for layer in range(4)]
        assert sum(of_layers) == 8 and (unit == "head" or {*of_layers} == {0, 4})
    never = {tuple(map(int, name.split("."))) for name in refuse}
    assert set.union(*at_work) == set(states) - never


@pytest.mark.parametrize("enforce, kind", [(True, "blocked"), (False, "forced")])
def test_violations_are_counted_on_transitions(run, enforce, kind):
    r = run(dict(agency=True, agency_enforce=enforce), policy=True, policy_no_consent=["0.1", "1.3"],
            policy_dwell=1000)
    row, *_ = measured(r, 3)
    found = rows_of(r.out_dir, "violations.jsonl")
    assert [(v["layer"], v["head"], v["type"], v["state"]) for v in found] == [
        (0, 1, kind, "withdrawn"), (1, 3, kind, "withdrawn")]
    assert (found[0]["step"], found[0]["gate"], found[0]["last_signal"]) == (2, 1.0, 0)
    assert found[0]["utilisation"] == pytest.approx(row["utilisation"][0][1], abs=1e-5)
    assert (found[0]["utilisation"] == 0) == enforce, "forced it runs, and is measured"
    for state in ("active", "withdrawn"):
        r.model.set_state(0, 1, state=state)
        last = measured(r, 2)[-1]
    assert len(rows_of(r.out_dir, "violations.jsonl")) == 3
    assert last[kind] == 2 and last["active"] == (6 if enforce else 8)


# ---- learned agency ----

def test_learned_agency_is_told_the_features_and_takes_the_likeliest_state(run):
    r = run(dict(agency=True, agency_learned=True, constraint_names=["a"], constraint_layers=[1],
                 head_ids=[[0, 2], [1, 2, 3]]), controller_log=True)
    told, agencies = MadeUp(r), [attn.agency for attn in attentions(r.model)]
    with torch.no_grad():
        for agency in agencies:
            agency.weight.zero_(), agency.bias.copy_(torch.tensor([0.5, 0.0, 0.0, 0.0]))
            agency.weight[3, 0] = 1.0  # withdrawn from an entropy of 0.5 on
    r.model.set_state(0, 2, consent=False)
    told.tell(entropy=lambda layer, head: 0.9 if head == 2 else 0.1, conflict=-0.3,
              gate=lambda layer, head: 0.1 * head)
    share_with_agency(told.heads, r.model)
    assert [len(agency.metrics) for agency in agencies] == [2, 4], "a constraint head, too"
    # entropy, gradient and importance over the layer's, load, gate, conflict
    assert torch.allclose(agencies[1].metrics, torch.tensor(
        [[entropy, 0.0, 0.0, 1.0, gate, -0.3] for entropy, gate in ((0.1, 0.1), (0.9, 0.2), (0.1, 0.3),
                                                                    (0.1, 0.4))]))
    r.step = 4
    r.controller.states.follow_learned(r)
    assert [place for place, state in states_of(r.model).items() if state == "withdrawn"] == [(1, 2)]
    assert agencies[1].last_signal.tolist() == [0, 4, 0, 0] and agencies[1].consent.all()
    assert pack(r.model).config.head_ids == [[0], [1, 3]]
    with torch.no_grad():
        agencies[1].bias[0] = 1.0
    r.controller.states.follow_learned(r)
    assert set(states_of(r.model).values()) == {"active"}, "and back by itself"


@pytest.mark.slow
def test_learned_agency_withdraws_a_head_that_says_nothing(run):
    """Noise stands for what head 0.1 reads. The control: where it reads the text, no head moves."""
    for is_noisy in (True, False):
        r = run(dict(agency=True, agency_learned=True), fresh=True, controller_log=True, batch_size=16,
                mechanism_lr=0.03)
        attn, generator = attentions(r.model)[0], torch.Generator().manual_seed(0)

        def with_noise(module, args):
            heads = args[0].unflatten(-1, (4, 8)).clone()
            heads[..., 1, :] = 3 * attn.agency.gate()[1] * torch.randn(heads[..., 1, :].shape,
                                                                       generator=generator)
            return heads.flatten(-2)

        if is_noisy:
            attn.c_proj.register_forward_pre_hook(with_noise)
        batches = Batches(r.dataset, "train", 16, 16, 1)
        for step in range(24):
            ids = batches(step, 0, 1)
            train.training_step(r, ids[:, :-1], ids[:, 1:])
            r.step += 1
            between_steps(r)
        moved = [place for place, state in states_of(r.model).items() if state != "active"]
        assert moved == [(0, 1)] * is_noisy
