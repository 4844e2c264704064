"""Pruning trained checkpoints: every criterion against brute force, what is written, and what is refused."""

import functools
import json
import math
import os
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest
import torch

from lab import prune
import helpers
import train
from nanoheads import checkpoint
from model import ALL_ON, MECHANISMS, GPTConfig
from nanoheads.configurator import load as configure
from nanoheads.dataset import Dataset
from nanoheads.pruning import prune_heads
from nanoheads.scoring import evaluate, score
from nanoheads.tasks import TaskData, score_levels, summary
from lab.heads.measuring import closed, fixed_text, measure, nats_on
from lab.prune import (CRITERIA, SCORES, attentions, blocks_to_drop, draw_curves, memory_bytes, main,
                       removal_order, why_unfit, without_blocks, without_heads)

SIZES = dict(block_size=16, vocab_size=256, n_layer=3, n_head=4, n_embd=32)
tiny = functools.partial(helpers.tiny, std=0.3, states=False, **SIZES)
MODELS = {"gpt2": {}, "modern": dict(recipe="modern"), "all_on": ALL_ON,
          "constraint_b": dict(MECHANISMS["constraint_b"], n_embd=64), "moh": MECHANISMS["moh"],
          "unet": MECHANISMS["unet_concat"], "tied": MECHANISMS["a2c_published"],
          "roles": MECHANISMS["roles"]}


def text(B=6, T=16, seed=1):
    ids = torch.randint(256, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def ascending(scores, n, floor=0):
    """The oracle of an order: all places sorted by score, and those passed over that a layer has to keep."""
    order, left = [], {layer: len(each) for layer, each in enumerate(scores)}
    for _, layer, head in sorted((v, layer, head) for layer, each in enumerate(scores)
                                 for head, v in each.items()):
        if left[layer] > floor and len(order) < n:
            order.append((layer, head))
            left[layer] -= 1
    return order


@pytest.fixture(scope="module")
def data(bytes_data):
    return Dataset(bytes_data)


@pytest.fixture(scope="module")
def run(bytes_data, tmp_path_factory):
    """A run folder: a model that was trained for a few steps."""
    out = tmp_path_factory.mktemp("runs") / "plain"
    argv = [f"--out_dir={out}", f"--dataset={bytes_data}", "--recipe=modern", "--device=cpu",
            "--max_iters=80", "--eval_interval=80", "--eval_tokens=512", "--log_interval=1",
            "--batch_size=16", "--block_size=32", "--n_layer=2", "--n_head=4", "--n_embd=32"]
    train.train(*configure((GPTConfig, train.TrainConfig), argv))
    return out


def saved(path, model, data):
    checkpoint.save(path, dict(model=model.float().state_dict(), config=asdict(model.config), meta=data.meta,
                               dataset=str(data.dir)))
    return str(path)


def model_of(path):
    return checkpoint.build(checkpoint.read(path), path)


def prune_json(argv, tmp_path):
    out = tmp_path / "rows.json"
    main([*map(str, argv), "--device=cpu", f"--json={out}"])
    return json.loads(out.read_text())


# ---- criteria, each against brute force ----

def order_of(score, model, n=11, floor=0, seed=3, B=6, rescored=False):
    return removal_order(model, score, n, floor, *text(B), seed, rescored)


def test_gate_takes_the_lowest_product_of_sentinel_and_agency():
    model = tiny(**MECHANISMS["sentinel"], **MECHANISMS["agency"])
    model.set_state(2, 1, state="overloaded")
    model.set_state(0, 3, consent=False)
    factors = {(2, 1): 0.5, (0, 3): 0.0}
    scores = [{h: factors.get((layer, h), 1.0) / (1 + math.exp(-attn.sentinel.logit[h].item()))
               for h in range(4)} for layer, attn in enumerate(attentions(model))]
    assert order_of("gate", model) == ascending(scores, 11)


def test_entropy_takes_the_highest_first():
    model, (x, y) = tiny(), text()
    with torch.no_grad():
        traces = model(x, y, traces="maps").traces
    scores = []
    for layer in range(3):
        p = traces[f"blocks.{layer}.map"]
        rows = [-torch.special.entr(p[:, :, t, :t + 1]).sum(-1) / math.log(t + 1) for t in range(1, 16)]
        scores.append(dict(enumerate(torch.stack(rows).mean((0, 1)).tolist())))
    assert order_of("entropy", model) == ascending(scores, 11)


def gate_slopes(model, x, y):
    """[{head: mean over sequences of |d loss / d gate|}], from gates that are there to be differentiated."""
    layers, slopes = attentions(model), []
    with closed(model, []):
        for attn in layers:
            attn.gate_by_hand = torch.ones(attn.n_head, dtype=torch.float64, requires_grad=True)
        gates = [attn.gate_by_hand for attn in layers]
        for i in range(len(x)):
            each = torch.autograd.grad(model(x[i:i + 1], y[i:i + 1]).loss, gates)
            slopes.append(torch.stack([g.abs() for g in each]))
    return [dict(zip(attn.head_ids, v.tolist())) for attn, v in zip(layers, torch.stack(slopes).mean(0))]


def test_importance_is_the_slope_of_the_loss_by_the_gate():
    model, (x, y) = tiny(), text(4)
    assert order_of("importance", model, B=4) == ascending(gate_slopes(model, x, y), 11)


@pytest.mark.slow
@pytest.mark.parametrize("floor", [0, 1, 2])
def test_rescored_importance_is_that_of_the_model_without_what_went(floor):
    model, order, n = tiny(draw=2), [], 12 - 3 * max(1, floor)
    for _ in range(n):
        smaller = without_heads(model, order)
        values = measure(smaller, *text())["importance"]
        scores = [dict(zip(attn.head_ids, each.tolist())) for attn, each in zip(attentions(smaller), values)]
        order += ascending(scores, 1, floor)
    assert order_of("importance", model, n, floor, rescored=True) == order
    assert order != order_of("importance", model, n, floor)  # else it says nothing here


def test_random_is_a_draw_by_the_seed():
    model = tiny()
    assert order_of("random", model) == order_of("random", model)
    assert sorted(order_of("random", model, 12)) == list(product(range(3), range(4)))
    assert order_of("random", model) != order_of("random", model, seed=4)


@pytest.mark.slow
def test_importance_beats_its_reverse(run, data, monkeypatch):
    """The control: the same heads in the other order must cost more."""
    model = model_of(run)
    x, y = fixed_text(data, "train", 32, 2048)
    xv, yv = fixed_text(data, "val", 32, 1900)
    monkeypatch.setitem(SCORES, "reverse", lambda *args: [-v for v in SCORES["importance"](*args)])
    once, again, reverse = (
        nats_on(without_heads(model, removal_order(model, score, 4, 1, x, y, 0, rescored)), xv, yv)
        for score, rescored in (("importance", False), ("importance", True), ("reverse", False)))
    assert once < reverse - 0.1 and again < reverse - 0.1


# ---- what goes ----

@pytest.mark.slow
@pytest.mark.parametrize("score, rescored", [("random", False), ("entropy", False), ("importance", False),
                                             ("importance", True)])
@pytest.mark.parametrize("floor", [1, 3])
def test_every_layer_keeps_the_floor(score, rescored, floor):
    model = tiny(**MODELS["constraint_b"]).float()
    order = order_of(score, model, 12 - 3 * floor, floor, rescored=rescored)
    assert [len(attn.head_ids) for attn in attentions(without_heads(model, order))] == [floor] * 3


def test_without_a_floor_a_layer_can_be_emptied():
    model = tiny()
    with torch.no_grad():
        attentions(model)[1].c_proj.weight.mul_(1e-3)
    slopes = gate_slopes(model, *text())
    assert order_of("importance", model, 4, 0) == ascending(slopes, 4)
    smaller = without_heads(model, order_of("importance", model, 4, 0))
    assert [attn.n_head for attn in attentions(smaller)] == [4, 0, 4]
    assert len(order_of("importance", smaller, 3, 1)) == 3  # and it can be pruned further


@pytest.mark.slow
@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_a_pruned_model_is_the_model_with_gates_at_0(flags):
    model, (x, _) = tiny(**flags), text()
    order = order_of("importance", model, 6, 1)
    extra = [attn.n_extra for attn in attentions(model)]
    with torch.no_grad():
        for gone in (order[:2], order):  # the second from what the first left, by the same numbers
            smaller = without_heads(without_heads(model, gone[:2]), gone[2:])
            assert [attn.n_extra for attn in attentions(smaller)] == extra
            with closed(model, gone):
                want = model(x).logits
            assert (smaller(x).logits - want).abs().max() <= 1e-9 * want.abs().max()
            assert (model(x).logits - want).abs().max() > 1e-6 * want.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("score, rescored", [("random", False), ("entropy", False), ("importance", False),
                                             ("importance", True)])
def test_heads_that_share_keys_go_together(score, rescored):
    """By the mean of what they score alone; the model is the one with their gates at 0."""
    model, (x, _) = tiny(n_kv_head=2), text()
    order = order_of(score, model, 4, rescored=rescored)
    assert len(order) == 4 and all(b == (a[0], a[1] + 1) and a[1] % 2 == 0
                                   for a, b in zip(order[::2], order[1::2]))
    if score == "importance" and not rescored:
        alone = gate_slopes(model, *text())
        means = {(layer, h): (scores[h] + scores[h + 1]) / 2 for layer, scores in enumerate(alone)
                 for h in (0, 2)}
        assert order[::2] == sorted(means, key=means.get)[:2]
    smaller = without_heads(model, order)
    with torch.no_grad(), closed(model, order):
        assert (smaller(x).logits - model(x).logits).abs().max() < 1e-9
    with pytest.raises(ValueError, match="groups of 2 heads go together"):
        without_heads(model, order[:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"unet"}))
def test_a_model_without_a_block_passes_the_stream_by_it(name):
    flags = {k: v for k, v in MODELS[name].items() if not k.startswith("unet")}
    model, (x, _) = tiny(**flags, n_layer=4), text()
    prune_heads(model, {3: [1]})
    has_extra = [i for i, attn in enumerate(attentions(model)) if attn.n_extra]
    for gone in ([0], [1], [0, 1]):
        assert not set(gone) & set(has_extra)
        hooks = [model.transformer.h[i].register_forward_hook(lambda m, args, out: (args[0], out[1]))
                 for i in gone]
        with torch.no_grad():
            want = model(x).logits
            for hook in hooks:
                hook.remove()
            smaller = without_blocks(model, gone)
            assert (smaller(x).logits - want).abs().max() <= 1e-9 * want.abs().max()
            assert (model(x).logits - want).abs().max() > 1e-6 * want.abs().max()
        assert smaller.config.n_layer == 4 - len(gone)
        assert attentions(smaller)[-1].head_ids == [0, 2, 3]


@pytest.mark.slow
def test_blocks_are_those_that_cost_least_at_no_more_flops():
    model, (x, y) = tiny(n_layer=5), text()
    one = model.flops_per_token() - without_blocks(model, [0]).flops_per_token()
    costs = {i: nats_on(without_blocks(model, [i]), x, y) for i in range(5)}
    first = min(costs, key=costs.get)
    costs = {i: nats_on(without_blocks(model, [first, i]), x, y) for i in range(5) if i != first}
    second = min(costs, key=costs.get)
    assert blocks_to_drop(model, one - 1, x, y) == []
    assert blocks_to_drop(model, one, x, y) == [first]
    assert blocks_to_drop(model, 2 * one + 1, x, y) == [first, second]
    assert len(blocks_to_drop(model, 9 * one, x, y)) == 4  # one stays


def test_blocks_with_constraint_heads_stay():
    model = tiny(**MODELS["constraint_b"])
    assert [attn.n_extra for attn in attentions(model)] == [0, 0, 3]
    assert sorted(blocks_to_drop(model, 10**12, *text())) == [0, 1]


def test_memory_is_weights_and_cache():
    model = tiny().float()
    n = sum(p.numel() for p in model.parameters())
    assert memory_bytes(model) == 4 * (n + 2 * 3 * 16 * 32)  # k and v, blocks, positions, width
    smaller = without_heads(model, [(0, 1), (2, 3)])
    assert memory_bytes(model) - memory_bytes(smaller) == 4 * (2 * 4 * 32 * 8 + 2 * 2 * 16 * 8)


# ---- the program ----

@pytest.mark.slow
def test_best_pt_is_the_model_with_these_heads_closed(run, data, tmp_path):
    found = prune_json(["--ckpt", run, "--to", "0.5", "--by", "importance_rescored", "--out_dir",
                        tmp_path / "half", "--tokens", "0", "--rounds", "1"], tmp_path)
    row, = found["rows"]
    assert row["kept"] == 4 and row["speed"] > 0
    again = evaluate(tmp_path / "half", "val", 0, "cpu", progress=False)
    assert math.isclose(again["bpb"], row["bpb"], rel_tol=1e-7)
    assert (again["params"], again["flops_per_token"]) == (row["params"], row["flops"])
    assert again["params"] == evaluate(run, "val", 0, "cpu", progress=False)["params"] - 4 * 4 * 32 * 8
    model = model_of(run)
    with closed(model, map(tuple, row["gone"])):
        nats, count = score(model, data, "val")
    assert math.isclose(row["bpb"], nats / count / math.log(2), rel_tol=1e-6)
    assert row["bpb"] > row["bpb_before"]


@pytest.mark.slow
def test_heads_of_a_task_are_judged_by_its_answers(task_run, tmp_path, rows):
    out = tmp_path / "half"
    found = prune_json(["--ckpt", task_run, "--to", "1", "0.5", "--by", "importance", "random",
                        "--tokens", "0", "--rounds", "0", "--out_dir", out, "--recover", "4"], tmp_path)
    for row in found["rows"]:
        place = out / f"{row['by']}-{row['to']:g}"
        for key, path in (("", place / "pruned.pt"), ("_before", task_run), ("_recovered", place)):
            model, data = model_of(path), TaskData(checkpoint.read(path)["meta"]["task"], 12)
            counted = summary(score_levels(model, data, "val"))
            assert row[f"right{key}"] == counted["right"]
            assert row[f"nats{key}"] == pytest.approx(counted["nats"], rel=1e-6)
        assert rows(place)[1][-1]["step"] == 4 and "acc/3" in rows(place)[1][-1]
    whole = next(row for row in found["rows"] if row["to"] == 1)
    assert whole["right"] == whole["right_before"]
    title = prune.result_table(found["rows"]).splitlines()[0]
    assert title.split()[2:8] == ["right", "pruned", "recovered", "nats/answer", "pruned", "recovered"]
    assert draw_curves(found["rows"]).axes[0].get_ylabel().startswith("answers right")


@pytest.mark.slow
def test_what_was_pruned_can_be_pruned_again(run, tmp_path):
    prune_json(["--ckpt", run, "--to", "0.5", "--by", "importance", "--out_dir", tmp_path / "half"], tmp_path)
    found = prune_json(["--ckpt", tmp_path / "half", "--to", "0.5", "--by", "importance", "--out_dir",
                        tmp_path / "quarter", "--rounds", "0"], tmp_path)
    row, = found["rows"]
    first, second = (model_of(tmp_path / name).config.head_ids for name in ("half", "quarter"))
    assert [len(ids) for ids in second] == [1, 1]
    assert {(0, h) for h in first[0]} | {(1, h) for h in first[1]} == \
        {(0, *second[0]), (1, *second[1]), *map(tuple, row["gone"])}


@pytest.mark.slow
def test_recovery_goes_on_from_the_pruned_weights(run, tmp_path, rows):
    out = tmp_path / "out"
    found = prune_json(["--ckpt", run, "--to", "0.5", "--by", "random", "--out_dir", out, "--recover", "20",
                        "--rounds", "0", "--tokens", "0"], tmp_path)
    row, = found["rows"]
    assert math.isclose(evaluate(out / "pruned.pt", "val", 0, "cpu", progress=False)["bpb"], row["bpb"],
                        rel_tol=1e-7)
    assert math.isclose(evaluate(out, "val", 0, "cpu", progress=False)["bpb"], row["bpb_recovered"],
                        rel_tol=1e-7)
    assert row["bpb_recovered"] < row["bpb"] - 0.01
    assert model_of(out).config.head_ids == model_of(out / "pruned.pt").config.head_ids
    assert model_of(out).config.seed == model_of(run).config.seed + 1  # batches in another order
    lr = checkpoint.read(run)["train"]["adamw_lr"]
    steps, _ = rows(out)
    for at, step in enumerate(steps):
        assert math.isclose(step["adamw_lr"], 0.3 * lr * (20 - at) / 20, rel_tol=1e-9)


@pytest.mark.slow
def test_recovery_moves_no_heads(run, tmp_path):
    """Whatever changed heads during the run: only what was pruned is gone afterwards."""
    state = checkpoint.read(run)
    state["train"].update(grow_from=4, controller_log=True, controller_interval=1, controller_tokens=64,
                          controller_heldout=64)
    checkpoint.save(tmp_path / "grown.pt", state)
    out = tmp_path / "out"
    prune_json(["--ckpt", tmp_path / "grown.pt", "--to", "0.5", "--by", "random", "--out_dir", out,
                "--recover", "2", "--rounds", "0", "--tokens", "512"], tmp_path)
    assert model_of(out).config.head_ids == model_of(out / "pruned.pt").config.head_ids
    assert not (out / "heads.jsonl").exists()


@pytest.mark.slow
def test_recovery_that_cannot_train_is_one_line(run, tmp_path, refusal):
    """What train.py refuses, prune.py says in its own line."""
    state = checkpoint.read(run)
    state["train"].update(labels="weak")
    checkpoint.save(tmp_path / "labelled.pt", state)
    message = refusal(["--ckpt", str(tmp_path / "labelled.pt"), "--to", "0.5", "--by", "random", "--out_dir",
                       str(tmp_path / "out"), "--recover", "2", "--rounds", "0", "--device", "cpu"])
    assert message.startswith("prune: --recover: ") and "labels='weak'" in message


@pytest.mark.slow
def test_a_curve_has_a_folder_each_and_a_picture(run, tmp_path, capsys):
    found = prune_json(["--ckpt", run, "--ckpt", run / "best.pt", "--to", "0.5", "0.75", "--by", "random",
                        "entropy", "--out_dir", tmp_path / "out", "--rounds", "0"], tmp_path)
    assert {(tmp_path / "out" / f"{n}-plain" / f"{by}-{to}" / "best.pt").is_file()
            for n in (1, 2) for by in ("random", "entropy") for to in (0.5, 0.75)} == {True}
    rows = found["rows"]
    assert found["finished"] is True
    for row in rows:
        assert len(row["gone"]) == 8 - row["kept"] == 8 * (1 - row["to"])
    drawn = {(row["ckpt"], row["to"]): row["gone"] for row in rows if row["by"] == "random"}
    assert len({str(gone) for gone in drawn.values()}) == 4  # another draw for each checkpoint
    for ckpt in {row["ckpt"] for row in rows}:
        assert drawn[ckpt, 0.5][:2] == drawn[ckpt, 0.75]  # one order
    assert (tmp_path / "pruning.png").read_bytes().startswith(b"\x89PNG")
    assert "2 checkpoints" in capsys.readouterr().out


def test_the_picture_shows_means_and_names_every_criterion():
    rows = [dict(by=by, to=to, bpb_before=2.0, bpb=2 + k * (1 - to) + 0.1 * seed)
            for k, by in enumerate(CRITERIA, 1) for to in (1.0, 0.5) for seed in (0, 1)]
    axes, = draw_curves(rows).axes
    assert sorted(label.get_text() for label in axes.texts) == sorted(CRITERIA)
    for k, line in enumerate(axes.lines[:-1], 1):  # the last is the whole model's
        assert line.get_xdata().tolist() == pytest.approx([100, 50], abs=11)  # each a little aside
        assert line.get_ydata().tolist() == pytest.approx([2.05, 2.05 + k / 2])
    assert draw_curves([row for row in rows if row["to"] == 0.5]) is None
    assert len(draw_curves([dict(row, bpb_recovered=2.0) for row in rows]).axes) == 2


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(1.0, 0.5), (0.9, 0.1), (0.75, 0.5, 0.25), (0.9, 0.85, 0.8)], ids=str)
def test_every_point_and_every_name_of_the_picture_is_seen(shares):
    """Points lie within the axes, names beside them and apart from one another, no line to any of them."""
    rows = [dict(by=by, to=to, bpb_before=2.0, bpb=2 + 0.01 * k * (1 - to))
            for k, by in enumerate(CRITERIA, 1) for to in shares]
    figure = draw_curves(rows)
    axes, = figure.axes
    high, low = axes.get_xlim()
    for line in axes.lines[:-1]:
        assert low < min(line.get_xdata()) and max(line.get_xdata()) < high
    figure.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
    assert all(box.x0 >= axes.bbox.x1 for box in boxes)
    assert all(a.y1 <= b.y0 + 1 for a, b in zip(boxes, boxes[1:]))


@pytest.mark.slow
def test_all_leaves_out_what_a_checkpoint_has_not(run, tmp_path):
    found = prune_json(["--ckpt", run, "--to", "0.25", "--by", "all", "--rounds", "0"], tmp_path)
    assert [row["by"] for row in found["rows"]] == [by for by in CRITERIA if by not in ("gate", "blocks")]
    assert not (tmp_path / "pruning.png").exists()  # one share is no curve


@pytest.mark.slow
def test_blocks_go_at_the_flops_of_heads(data, tmp_path):
    deep = saved(tmp_path / "deep.pt", tiny(n_layer=8), data)
    found = prune_json(["--ckpt", deep, "--to", "0.25", "--by", "blocks", "importance", "--out_dir",
                        tmp_path / "out", "--rounds", "0"], tmp_path)
    heads, blocks = found["rows"]
    assert (heads["by"], blocks["by"]) == ("importance", "blocks")
    saves = blocks["flops_before"] - blocks["flops"]
    one = saves / len(blocks["blocks_gone"])
    assert saves <= heads["flops_before"] - heads["flops"] < saves + one
    left = evaluate(tmp_path / "out/blocks-0.25", "val", 0, "cpu", progress=False)
    assert left["flops_per_token"] == blocks["flops"]
    assert model_of(tmp_path / "out/blocks-0.25").config.n_layer == 8 - len(blocks["blocks_gone"])


def test_the_rows_that_are_done_are_kept_where_the_next_one_fails(run, data, tmp_path, monkeypatch, capsys):
    two = [saved(tmp_path / name, tiny(draw=seed, n_layer=2), data)
           for seed, name in enumerate(("a.pt", "b.pt"))]
    real, calls = prune.decoding_figures, []

    def stops(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)
    monkeypatch.setattr(prune, "decoding_figures", stops)
    out = tmp_path / "rows.json"
    with pytest.raises(SystemExit):
        main(["--ckpt", two[0], "--ckpt", two[1], "--to", "0.5", "--by", "random", "--rounds=0",
              "--device=cpu", f"--json={out}"])
    told = json.loads(out.read_text())
    assert [row["ckpt"] for row in told["rows"]] == two[:1] and told["finished"] is False
    assert "random" in capsys.readouterr().out


@pytest.mark.slow
def test_a_command_that_was_killed_goes_on_with_the_rows_that_are_done(run, tmp_path, refusal, capsys):
    """A kill leaves prune.json with those rows, and of the next one a folder that holds half of it."""
    argv = ["--ckpt", run, "--to", "0.5", "--by", "random", "entropy", "--out_dir", tmp_path / "out",
            "--recover", "2", "--rounds", "0"]
    found = prune_json(argv, tmp_path)
    capsys.readouterr()
    assert "already holds a run" in refusal([*map(str, argv), "--device=cpu"])
    progress = tmp_path / "out/prune.json"
    progress.write_text(json.dumps({**found, "rows": found["rows"][:1], "finished": False}))
    first, second = (Path(row["folder"], "best.pt") for row in found["rows"])
    before = first.stat().st_mtime_ns, second.stat().st_mtime_ns
    assert prune_json(argv, tmp_path) == json.loads(progress.read_text()) == found
    after = first.stat().st_mtime_ns, second.stat().st_mtime_ns
    assert before[0] == after[0] and before[1] < after[1]
    progress.write_text(json.dumps({**found, "seed": 5, "rows": [], "finished": False}))  # another command's
    capsys.readouterr()
    assert "already holds a run" in refusal([*map(str, argv), "--device=cpu"])


def test_heads_in_groups_are_counted_in_groups(data, tmp_path, refusal):
    """Of two layers with two groups of two, a quarter is one group, and a floor keeps one in each layer."""
    path = saved(tmp_path / "grouped.pt", tiny(n_layer=2, n_kv_head=2), data)
    said = refusal(["--ckpt", path, "--to", "0.25", "--by", "importance", "--rounds=0"])
    assert "--to 0.25 keeps 2 of" in said and "--floor 1 keeps 4" in said
    prune_json(["--ckpt", path, "--to", "0.5", "--by", "importance", "--rounds=0"], tmp_path)  # control


@pytest.mark.parametrize("flags", [dict(window=3, window_layers=[1]),
                                   dict(MECHANISMS["constraint_a"], constraint_loss_layers=[2])], ids=str)
def test_blocks_that_flags_name_by_number_are_not_removed(flags):
    assert "names blocks by their numbers" in why_unfit("blocks", tiny(**flags))


# ---- what is refused, each in one line ----

@pytest.mark.slow
@pytest.mark.parametrize("flag", ["value_residual", "value_embedding", "stream_scalars", "diff_v1", "mudd",
                                  "depth_attention"])
def test_blocks_that_are_not_of_one_kind_stay_as_they_are(flag):
    model = tiny(**{flag: True})
    assert flag in why_unfit("blocks", model) and why_unfit("random", model) is None


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_one_line(run, tmp_path, refusal):
    tmp_path.chmod(0o500)
    try:
        said = refusal(["--ckpt", str(run), "--to", "0.5", "--by", "random",
                        "--out_dir", str(tmp_path / "x")])
        assert f"--out_dir: cannot write into {tmp_path}" in said
    finally:
        tmp_path.chmod(0o700)
