"""probe.py engagement: its texts, costs and shares against slow references, a head made by hand, chance."""
import functools
import json
import re
from dataclasses import asdict
from itertools import combinations, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from test_detectors import by_hand

from nanoheads.dataset import Dataset
from lab.heads.measuring import all_heads, attentions, measure, out_projections
from lab.probe import main
from lab.probes import engagement
from lab.probes.engagement import (Kind, all_active, by_chance, copying_texts, critical_heads, engagements,
                                   kept, last_nats, needle_texts, needles, overlaps, pattern_texts,
                                   power_sent, result_of, texts_of, window_texts)
from lab.probes.shared import Checkpoint
import helpers
from model import GPT, Roles

SIZE = dict(block_size=24, vocab_size=16, n_layer=2, n_head=4, n_embd=32)
tiny = functools.partial(helpers.tiny, std=0.3, states=False, **SIZE)
FLAGS = {"plain": {}, "states": dict(recipe="modern", agency=True, sentinel="sigmoid"),
         "constraint": dict(recipe="modern", constraint_names=["one", "two"])}


class Progress:
    def update(self, n):
        pass


def some_texts(samples=5, T=12, scored=7, n=16, seed=0):
    ids = np.random.default_rng(seed).integers(n, size=(samples, T + 1))
    return Kind(ids, scored)


def t_by_hand(values):
    values = np.asarray(values)
    half = student.isf(0.025, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return [values.mean(), values.mean() - half, values.mean() + half]


# ---- texts ----

def test_a_needle_is_planted_in_text_and_begins_again_at_the_end():
    rng, text = np.random.default_rng(0), np.arange(1000)
    ids, at = needles(text, np.arange(1000, 1020), 40, 6, 200, rng)
    for row, place in zip(ids, at):
        needle, rest = row[place:place + 6], np.delete(row[:-5], range(place, place + 6))
        assert needle.min() >= 1000 and len(set(needle)) == 6 and (row[-5:] == needle[:-1]).all()
        assert (np.diff(rest) == 1).all() and rest.max() < 1000 and len(rest) == 40 - 11
    assert at.min() == 0 and at.max() == 40 - 11, "from before the text to behind it"


def test_a_pattern_comes_again_and_again_and_its_control_once():
    kind = pattern_texts(np.arange(5, 15), 4, 18, 30, 3, np.random.default_rng(0))
    assert kind.ids.shape == kind.control.shape == (30, 19) and kind.scored == 4
    assert (kind.ids[:, 0] == 3).all() and (kind.control[:, 0] == 3).all() and kind.ids[:, 1:].min() >= 5
    assert (kind.ids[:, 5:] == kind.ids[:, 1:-4]).all(), "what is scored was there a period before"
    assert (kind.control[:, -4:] == kind.ids[:, -4:]).all()
    assert 0.05 < (kind.control[:, 5:] == kind.control[:, 1:-4]).mean() < 0.15, "one in ten by chance"
    assert len(np.unique(kind.ids[:, 1:5], axis=0)) > 28


def test_a_copy_comes_after_a_separator_and_its_control_has_no_original():
    kind = copying_texts(np.arange(5, 15), 8, 30, 3, np.random.default_rng(0))
    assert kind.ids.shape == (30, 18) and kind.scored == 8
    assert (kind.ids[:, :9] == kind.ids[:, 9:]).all() and (kind.ids[:, 0] == 3).all()
    assert (kind.control[:, 9:] == kind.ids[:, 9:]).all()
    assert (kind.control[:, 1:9] == kind.ids[:, 1:9]).mean() < 0.2


def test_a_needle_begins_again_and_its_control_has_another_in_its_place():
    text, alphabet = np.arange(1000), np.arange(1000, 1020)
    kind = needle_texts(text, alphabet, 40, 6, 2, 50, np.random.default_rng(0))
    assert kind.ids.shape == kind.control.shape == (50, 41) and kind.scored == 4
    for row, control in zip(kind.ids, kind.control):
        end = row[-6:]
        places = [i for i in range(35) if (row[i:i + 6] == end).all()]
        assert len(places) == 1 and end.min() >= 1000 and (control[-6:] == end).all()
        off = np.flatnonzero(row != control)
        assert len(off) >= 4 and off.min() >= places[0] and off.max() < places[0] + 6
        assert control[places[0]:places[0] + 6].min() >= 1000


def test_late_and_natural_windows_are_apart_and_a_late_control_is_cut_short():
    text = np.arange(500)
    late, natural = window_texts(text, 16, 10)
    assert late.scored == 4 and natural.scored == 16 and natural.control is None
    assert (late.control == late.ids[:, -5:]).all() and late.ids.shape == natural.ids.shape == (10, 17)
    assert not {*late.ids[:, :-1].ravel()} & {*natural.ids[:, :-1].ravel()}
    assert natural.ids[0, 0] == 0 and late.ids[-1, -1] == 499


# ---- one model ----

def without_by_hand(model, layer, head, ids, scored):
    """Nats of each text's scored tokens with a head's columns of the output projection at 0, one by one."""
    other = GPT(model.config).double().eval()
    other.load_state_dict(model.state_dict())
    attn = other.transformer.h[layer].attn
    D, i = attn.head_size, attn.all_head_ids().index(head)
    out, i = (attn.c_proj, i) if i < attn.n_head else (attn.constraint.c_proj, i - attn.n_head)
    with torch.no_grad():
        out.weight[:, i * D:i * D + D] = 0
        logp = other(ids[:, :-1]).logits.double().log_softmax(-1)
    T = ids.size(1) - 1
    return np.array([np.mean([-logp[b, t, ids[b, t + 1]].item() for t in range(T - scored, T)])
                     for b in range(len(ids))])


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAGS)
def test_costs_are_those_of_heads_zeroed_by_hand(name):
    """Under states too: the others are active; the model keeps its states."""
    model, kind = tiny(**FLAGS[name]), some_texts()
    ids = torch.from_numpy(kind.ids)
    if name == "states":
        model.set_head(0, 1, state="withdrawn")
        model.set_head(1, 2, state="overloaded")
    states = {key: t.clone() for key, t in model.state_dict().items() if "agency" in key}
    as_it_is = last_nats(model, ids, 7)
    result = result_of(Checkpoint("m", model, 24), dict(text=kind), Progress())
    assert all(torch.equal(t, model.state_dict()[key]) for key, t in states.items())
    assert (last_nats(model, ids, 7) == as_it_is).all() and not any(
        attn.gate_override is not None for attn in attentions(model))
    assert result["texts"]["text"]["nats"] == pytest.approx(as_it_is.mean())
    with all_active(model):
        before = np.array([np.mean(row) for row in last_nats(model, ids, 7)])
        assert result["texts"]["text"]["nats_all_active"] == pytest.approx(before.mean())
        assert [(row["layer"], row["head"]) for row in result["heads"]] == all_heads(model)
        for row in result["heads"]:
            want = without_by_hand(model, row["layer"], row["head"], ids, 7) - before
            assert row["text"]["cost"] == pytest.approx(t_by_hand(want), abs=2e-6)
            assert abs(row["text"]["cost"][0]) > 1e-4
    if name == "states":
        factors = {(r["layer"], r["head"]): (r["state"], r["factor"]) for r in result["heads"]}
        assert factors[0, 1] == ("withdrawn", 0.0) and factors[1, 2] == ("overloaded", 0.5)
        assert [v for k, v in factors.items() if k not in ((0, 1), (1, 2))] == [("active", 1.0)] * 6


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAGS)
def test_engagement_is_what_each_head_sends_one_token_at_a_time(name):
    """The norm of W y by hand, per head; with every token scored it is measure()'s utilisation x heads."""
    model, kind = tiny(**FLAGS[name]), some_texts(samples=6)
    ids = torch.from_numpy(kind.ids)
    if name == "states":
        model.set_head(0, 1, state="withdrawn")
        model.set_head(0, 2, state="overloaded")
    sizes = [attn.n_total for attn in attentions(model)]
    kept_y = {}
    hooks = [out.register_forward_pre_hook(lambda m, a, key=(i, extra): kept_y.update({key: a[0]}))
             for i, attn in enumerate(attentions(model))
             for extra, out in enumerate(out_projections(attn))]
    model(ids[:, :-1])
    [hook.remove() for hook in hooks]
    found, at = np.array(engagements(power_sent(model, ids, 7), sizes)), 0
    for i, attn in enumerate(attentions(model)):
        norms = []
        for h in range(attn.n_total):
            extra, j = (0, h) if h < attn.n_head else (1, h - attn.n_head)
            out, D = (attn.constraint if extra else attn).c_proj.weight, attn.head_size
            sent = [(out[:, j * D:j * D + D] @ kept_y[i, extra][b, t, j * D:j * D + D]).square().sum().item()
                    for b, t in product(range(6), range(5, 12))]
            norms.append(np.mean(sent) ** 0.5)
        assert found[at:at + len(norms), 0] == pytest.approx(np.array(norms) / np.mean(norms), abs=1e-6)
        at += len(norms)
    assert (found[:, 1] <= found[:, 0]).all() and (found[:, 0] <= found[:, 2]).all()
    if name == "states":
        assert (found[1] == 0).all()
    used = torch.cat([u * len(u) for u in measure(model, ids[:, :-1], ids[:, 1:])["utilisation"]])
    every = engagements(power_sent(model, ids, 12), sizes)
    assert [value for value, *_ in every] == pytest.approx(used.tolist(), abs=1e-6)


def test_few_rows_at_a_time_are_all_of_them(monkeypatch):
    model, ids = tiny(**FLAGS["constraint"]), torch.from_numpy(some_texts(9).ids)
    once = last_nats(model, ids, 7), power_sent(model, ids, 7)
    monkeypatch.setattr(engagement, "AT_ONCE", 30)
    assert np.allclose(last_nats(model, ids, 7), once[0]) and np.allclose(power_sent(model, ids, 7), once[1])


@pytest.mark.slow
def test_the_head_that_copies_is_the_critical_one():
    """One of two heads says what followed earlier copies; on random text it is not critical."""
    model, rng = by_hand(), np.random.default_rng(0)
    kinds = dict(copying=copying_texts(np.arange(15), 12, 40, 15, rng),
                 pattern=pattern_texts(np.arange(15), 8, 40, 40, 15, rng),
                 needle=needle_texts(rng.integers(8, size=500), np.arange(8, 15), 40, 6, 2, 40, rng),
                 random=some_texts(40, 24, 24, 15))
    result = result_of(Checkpoint("m", model, 40), kinds, Progress())
    for name in ("copying", "pattern", "needle"):
        copies, other = (row[name]["cost"] for row in result["heads"])
        assert copies[1] > 0.2 and abs(other[0]) < 0.01 and result["texts"][name]["gain"][1] > 0.2
        assert result["critical"][name] == [[0, 0]]
    assert result["critical"]["random"] == [] and result["texts"]["random"]["gain"] is None
    with torch.no_grad():  # control: the head that copies says nothing
        model.transformer.h[0].attn.c_proj.weight.zero_()
    result = result_of(Checkpoint("m", model, 40), kinds, Progress())
    assert not any(result["critical"].values())
    assert all(abs(text["gain"][0]) < 1e-6 for text in result["texts"].values() if text["gain"])


def test_critical_takes_an_interval_above_0_and_the_first_quarter():
    above = [[c, c - 0.1, c + 0.1] for c in (0.5, 0.2, 0.9, 0.3, 0.4, 0.6, 0.7, 0.8)]
    assert critical_heads(above) == [2, 7]
    assert critical_heads([*above[:2], [0.9, -0.1, 1.9], *above[3:]]) == [7], "none moves up"
    assert critical_heads(above[:3]) == [2] and critical_heads([[0.0, 0.0, 0.0]] * 8) == []


# ---- many models ----

def test_chance_is_that_of_every_choice_there_is():
    cases = [(6, 2, 3, 1), (5, 2, 2, 2)]
    sums = [len({*range(2)} & {*one}) + len({*range(2)} & {*other})
            for one in combinations(range(6), 3) for other in combinations(range(5), 2)]
    share = {hits: sums.count(hits) / len(sums) for hits in range(5)}
    found = by_chance(cases)
    assert (found["hits"], found["of"]) == (3, 4) and found["expected"] == pytest.approx(np.mean(sums))
    assert found["p"] == pytest.approx(sum(p for p in share.values() if p <= share[3] + 1e-12))
    assert by_chance([(8, 2, 8, 2)])["p"] == pytest.approx(1.0), "with all at work nothing is shown"
    assert by_chance([]) == dict(hits=0, of=0, expected=0.0, p=1.0)


def made_result(rng, n=8, at_work=4, chosen=None):
    """What kept() and overlaps() read of a run: critical heads as chosen, or drawn."""
    heads = [dict(layer=i // 4, head=i % 4, factor=float(i < at_work)) for i in range(n)]
    critical = {name: [[i // 4, i % 4] for i in (rng.choice(n, 2, False) if chosen is None else chosen)]
                for name in ("a", "b")}
    return dict(heads=heads, critical=critical)


@pytest.mark.slow
def test_random_labels_are_kept_as_by_chance():
    """Negative control: of 300 studies with critical heads drawn by lot at most 5 % or so have p < 0.05."""
    rng, kinds, p, hits = np.random.default_rng(0), ("a", "b"), [], []
    for _ in range(300):
        results = [made_result(rng) for _ in range(5)]
        found = kept(results, kinds)["a"]
        assert found["expected"] == 5.0 and found["of"] == 10
        p += [found["p"], overlaps(results, kinds)[0]["p"]]
        hits.append(found["hits"])
        assert found["factor_of_all"] == [0.5, 0.5, 0.5]
    assert np.mean(np.array(p) < 0.05) < 0.07 and np.mean(hits) == pytest.approx(5.0, abs=0.3)
    results = [made_result(rng, chosen=(0, 3)) for _ in range(5)]
    found = kept(results, kinds)["a"]
    assert found["hits"] == 10 and found["p"] < 1e-3 and found["factor"] == [1, 1, 1]
    assert overlaps(results, kinds)[0] == dict(kinds=["a", "b"], hits=10, of=10, expected=2.5,
                                               p=pytest.approx(1 / 28 ** 5))
    assert kept([dict(heads=[dict(layer=0, head=0)], critical={})], kinds) == {}, "no states"


# ---- the command ----

@pytest.fixture
def checkpoint_of(tmp_path, bytes_data):
    """checkpoint_of(name, model) -> path of its checkpoint."""
    def make(name, model):
        meta = json.loads((bytes_data / "meta.json").read_text())
        torch.save(dict(model=model.float().state_dict(), config=asdict(model.config), meta=meta, step=1,
                        train=dict(dataset=str(bytes_data))), tmp_path / f"{name}.pt")
        return str(tmp_path / f"{name}.pt")
    return make


def small(**flags):
    return tiny(**{"vocab_size": 256, "recipe": "modern", **flags})


@pytest.mark.slow
def test_the_command_says_which_critical_heads_are_kept(checkpoint_of, bytes_data, tmp_path, capsys):
    models = [small(), small(draw=1, agency=True, roles=["local", "free"])]
    for layer, head in ((0, 0), (0, 3), (1, 1)):
        models[1].set_head(layer, head, state="withdrawn")
    paths = [checkpoint_of(f"m{i}", model) for i, model in enumerate(models)]
    main(["engagement", "--ckpt", paths[0], "--ckpt", paths[1], "--samples=6", "--device=cpu",
          f"--json={tmp_path / 'o.json'}"])
    out, numbers = capsys.readouterr().out, json.loads((tmp_path / "o.json").read_text())
    kinds = texts_of(SimpleNamespace(seed=1337, split="val", samples=6, period=8), Dataset(bytes_data), 24)
    assert [*kinds] == ["pattern", "copying", "needle", "late", "natural"]
    plain, other = (run["results"] for run in numbers["runs"])
    assert "factor" not in plain["heads"][0] and sum(row["factor"] for row in other["heads"]) == 5
    for name, kind in kinds.items():
        nats = last_nats(models[0].float(), torch.from_numpy(kind.ids), kind.scored)
        assert plain["texts"][name]["nats"] == pytest.approx(nats.mean(), abs=1e-5)
        assert plain["texts"][name]["nats_all_active"] == plain["texts"][name]["nats"]
        withdrawn = {(row["layer"], row["head"]) for row in other["heads"] if not row["factor"]}
        critical = {*map(tuple, other["critical"][name])}
        row = numbers["kept"][name]
        assert (row["hits"], row["of"]) == (len(critical - withdrawn), len(critical))
        assert row["expected"] == pytest.approx(len(critical) * 5 / 8)
        assert all(row[name]["engagement"] == [0, 0, 0] for row in other["heads"] if not row["factor"])
        for role in ("local", "free"):
            shares = [row[name]["engagement"][0] for row in other["heads"]
                      if Roles.role_of(models[1].config, row["head"]) == role]
            assert numbers["roles"][role][name][0] == pytest.approx(np.mean(shares))
    assert len(numbers["overlap"]) == 10
    stars = len(re.findall(r"\d\*", out))
    assert stars == sum(len(each["critical"][name]) for each in (plain, other) for name in kinds) > 0
    assert "6 texts of each kind" in out and out.count("withdrawn") == 6
