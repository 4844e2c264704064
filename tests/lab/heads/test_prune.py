"""Pruning trained checkpoints: every criterion against brute force, what is written, what goes on."""

import functools
import json
import math
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

import helpers
import train
from helpers import small_models
from model import MECHANISMS
from nanoheads import checkpoint
from nanoheads.dataset import Dataset
from nanoheads.scoring import evaluate, score
from nanoheads.tasks import TaskData, score_levels, summary
from lab.heads.measuring import closed, measure, nats_on
from lab.prune import (CRITERIA, attentions, blocks_to_drop, draw_curves, main, memory_bytes, removal_order,
                       result_table, why_unfit, without_blocks, without_heads)

SIZES = dict(block_size=16, vocab_size=256, n_layer=3, n_head=4, n_embd=32)
tiny = functools.partial(helpers.tiny, std=0.3, states=False, **SIZES)


def text(B=6, T=16, vocab=256):
    ids = torch.randint(vocab, (B, T + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def ascending(scores, n, floor=0):
    """The first n of all places sorted by score, but those that a layer has to keep."""
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
    """The folder of a run that was trained for long enough for its heads to matter."""
    out = tmp_path_factory.mktemp("runs") / "plain"
    train.main([f"--out_dir={out}", f"--dataset={bytes_data}", "--recipe=modern", "--device=cpu",
                "--max_iters=60", "--eval_interval=60", "--eval_tokens=512", "--log_interval=1",
                "--batch_size=16", "--block_size=32", "--n_layer=2", "--n_head=4", "--n_embd=32"])
    return out


def saved(path, model, data):
    checkpoint.save(path, dict(model=model.float().state_dict(), config=asdict(model.config), meta=data.meta,
                               dataset=str(data.dir)))
    return str(path)


def model_of(path):
    return checkpoint.build(checkpoint.read(path), path)


def prune_json(argv, tmp_path):
    """What a command writes to --json; nothing is timed unless it says so, and all of the split is scored."""
    out = tmp_path / "rows.json"
    main(["--tokens=0", "--rounds=0", "--text=512", "--device=cpu", f"--json={out}",
          *map(str, argv)])
    return json.loads(out.read_text())


# ---- criteria, each against brute force ----

def order_of(criterion, model, n=11, floor=0, seed=3, rescored=False):
    return removal_order(model, criterion, n, floor, *text(), seed, rescored)


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


def test_importance_is_the_slope_of_the_loss_by_the_gate_and_a_layer_may_be_emptied():
    model = tiny()
    with torch.no_grad():
        attentions(model)[1].c_proj.weight.mul_(1e-3)
    slopes = gate_slopes(model, *text())
    assert order_of("importance", model) == ascending(slopes, 11)
    assert order_of("importance", model, 6, 1) == ascending(slopes, 6, 1)
    smaller = without_heads(model, order_of("importance", model, 4))
    assert [attn.n_head for attn in attentions(smaller)] == [4, 0, 4]
    assert len(order_of("importance", smaller, 3, 1)) == 3  # and it can be pruned further


def test_rescored_importance_is_that_of_the_model_without_what_went():
    model, order = tiny(draw=2), []
    for _ in range(9):
        smaller = without_heads(model, order)
        values = measure(smaller, *text())["importance"]
        scores = [dict(zip(attn.head_ids, each.tolist())) for attn, each in zip(attentions(smaller), values)]
        order += ascending(scores, 1, 1)
    assert order_of("importance", model, 9, 1, rescored=True) == order
    assert order != order_of("importance", model, 9, 1)  # else it says nothing here


def test_heads_that_share_keys_go_together_by_their_mean():
    model = tiny(n_kv_head=2)
    order, alone = order_of("importance", model, 4), gate_slopes(model, *text())
    means = {(layer, h): (scores[h] + scores[h + 1]) / 2 for layer, scores in enumerate(alone)
             for h in (0, 2)}
    first, second = sorted(means, key=means.get)[:2]
    assert order == [first, (first[0], first[1] + 1), second, (second[0], second[1] + 1)]
    with pytest.raises(ValueError, match="groups of 2 heads go together"):
        without_heads(model, order[:1])


# ---- what goes ----

@settings(max_examples=12)
@given(flags=small_models(), share=st.floats(0, 1))
def test_a_pruned_model_is_the_model_with_gates_at_0(flags, share):
    """Also in two steps, the second by the numbers that the heads had at first."""
    model, (x, y) = helpers.tiny(flags, std=0.3, states=False), text(vocab=37)
    assume(not why_unfit("random", model))
    unit = model.config.unit
    n = unit * round(share * sum(attn.n_head for attn in attentions(model)) / unit)
    gone = removal_order(model, "random", n, 0, x, y, 3)
    plain, smaller = model(x).logits, without_heads(without_heads(model, gone[:unit]), gone[unit:])
    assert [attn.n_extra for attn in attentions(smaller)] == [attn.n_extra for attn in attentions(model)]
    with torch.no_grad(), closed(model, gone):
        want = model(x).logits
        assert (smaller(x).logits - want).abs().max() <= 1e-9 * want.abs().max()
    assert torch.equal(model(x).logits, plain), "what was closed comes back"


@settings(max_examples=10)
@given(flags=small_models(), gone=st.sets(st.integers(0, 2), min_size=1, max_size=2))
def test_a_model_without_a_block_passes_the_stream_by_it(flags, gone):
    flags = {"n_layer": 4, **{key: value for key, value in flags.items() if key != "n_layer"}}
    model, (x, _) = helpers.tiny(flags, std=0.3, states=False), text(vocab=37)
    assume(not why_unfit("blocks", model) and not any(attentions(model)[i].n_extra for i in gone))
    hooks = [model.transformer.h[i].register_forward_hook(lambda m, args, out: (args[0], out[1]))
             for i in gone]
    with torch.no_grad():
        want = model(x).logits
        for hook in hooks:
            hook.remove()
        smaller = without_blocks(model, gone)
        assert (smaller(x).logits - want).abs().max() <= 1e-9 * want.abs().max()
    assert smaller.config.n_layer == 4 - len(gone)


def test_blocks_are_those_that_cost_least_at_no_more_flops():
    model, (x, y) = tiny(n_layer=4), text()
    one = model.flops_per_token() - without_blocks(model, [0]).flops_per_token()
    costs = {i: nats_on(without_blocks(model, [i]), x, y) for i in range(4)}
    first = min(costs, key=costs.get)
    costs = {i: nats_on(without_blocks(model, [first, i]), x, y) for i in range(4) if i != first}
    second = min(costs, key=costs.get)
    assert blocks_to_drop(model, one - 1, x, y) == []
    assert blocks_to_drop(model, one, x, y) == [first]
    assert blocks_to_drop(model, 2 * one + 1, x, y) == [first, second]
    assert len(blocks_to_drop(model, 9 * one, x, y)) == 3  # one stays
    model = tiny(**MECHANISMS["constraint_b"], head_dim=8)
    assert [attn.n_extra for attn in attentions(model)] == [0, 0, 3]
    assert sorted(blocks_to_drop(model, 10**12, x, y)) == [0, 1]  # and those with constraint heads


def test_blocks_that_are_not_of_one_kind_or_that_flags_name_by_number_stay():
    for flag in ("value_residual", "mudd"):
        assert f"has {flag}, for which blocks are not" in why_unfit("blocks", tiny(**{flag: True}))
    assert why_unfit("random", tiny(value_residual=True)) is None
    assert "names blocks by their numbers" in why_unfit("blocks", tiny(window=3, window_layers=[1]))


def test_memory_is_weights_and_cache():
    model = tiny().float()
    n = sum(p.numel() for p in model.parameters())
    assert memory_bytes(model) == 4 * (n + 2 * 3 * 16 * 32)  # k and v, blocks, positions, width
    smaller = without_heads(model, [(0, 1), (2, 3)])
    assert memory_bytes(model) - memory_bytes(smaller) == 4 * (2 * 4 * 32 * 8 + 2 * 2 * 16 * 8)


# ---- the program ----

@pytest.mark.slow
def test_a_curve_is_of_models_with_these_heads_closed_and_what_was_pruned_can_be_again(run, data, tmp_path,
                                                                                      capsys):
    """Of two checkpoints: a folder each with a best.pt like any other, one order each, a table, a picture."""
    found = prune_json(["--ckpt", run, "--ckpt", run / "best.pt", "--to", "0.5", "0.75", "--by", "random",
                        "importance_rescored", "--out_dir", tmp_path / "out"], tmp_path)
    rows, model = found["rows"], model_of(run)
    assert found["finished"] is True and len(rows) == 8 and "2 checkpoints" in capsys.readouterr().out
    before = evaluate(run, "val", 0, "cpu", progress=False)
    for row in rows:
        number = 1 + [str(run), str(run / "best.pt")].index(row["ckpt"])
        assert row["folder"] == str(tmp_path / "out" / f"{number}-plain" / f"{row['by']}-{row['to']}")
        assert len(row["gone"]) == 8 - row["kept"] == 8 * (1 - row["to"])
        with closed(model, map(tuple, row["gone"])):
            nats, count = score(model, data, "val")
        assert math.isclose(row["bpb"], nats / count / math.log(2), rel_tol=1e-6)
        assert math.isclose(row["bpb_before"], before["bpb"], rel_tol=1e-6) and row["bpb"] > row["bpb_before"]
    half = next(row for row in rows if row["to"] == 0.5 and row["by"] != "random")
    again = evaluate(half["folder"], "val", 0, "cpu", progress=False)
    assert math.isclose(again["bpb"], half["bpb"], rel_tol=1e-7)
    assert (again["params"], again["flops_per_token"]) == (half["params"], half["flops"])
    assert again["params"] == before["params"] - 4 * 4 * 32 * 8
    drawn = {(row["ckpt"], row["to"]): row["gone"] for row in rows if row["by"] == "random"}
    assert len({str(gone) for gone in drawn.values()}) == 4  # another draw for each checkpoint
    assert all(drawn[ckpt, 0.5][:2] == drawn[ckpt, 0.75] for ckpt in {row["ckpt"] for row in rows})
    assert (tmp_path / "pruning.png").read_bytes().startswith(b"\x89PNG")

    found = prune_json(["--ckpt", half["folder"], "--to", "0.5", "--by", "importance", "--out_dir",
                        tmp_path / "quarter"], tmp_path)
    (row,), left = found["rows"], model_of(tmp_path / "quarter").config.head_ids
    assert [len(ids) for ids in left] == [1, 1]
    assert {*map(tuple, half["gone"] + row["gone"]), (0, *left[0]), (1, *left[1])} == \
        {*product(range(2), range(4))}


@pytest.mark.slow
def test_all_leaves_out_what_a_checkpoint_has_not_and_speed_is_beside_the_whole_model(run, tmp_path):
    found = prune_json(["--ckpt", run, "--to", "0.25", "--by", "all", "--rounds", "1"], tmp_path)
    assert [row["by"] for row in found["rows"]] == [by for by in CRITERIA if by not in ("gate", "blocks")]
    assert all(row["speed_low"] <= row["speed"] <= row["speed_high"] for row in found["rows"])
    assert not (tmp_path / "pruning.png").exists()  # one share is no curve


@pytest.mark.slow
def test_recovery_trains_on_from_the_pruned_weights_and_what_fails_keeps_the_rows_that_are_done(
        run, tmp_path, rows, refusal, capsys):
    """The second checkpoint's labels are not there, as train.py says; the first one's heads came and went."""
    for name, keys in (("grown", dict(grow_from=4, controller_log=True, controller_interval=1,
                                      controller_tokens=64, controller_heldout=64)),
                       ("labelled", dict(labels="weak"))):
        state = checkpoint.read(run)
        state["train"].update(keys)
        (tmp_path / name).mkdir()
        checkpoint.save(tmp_path / name / "best.pt", state)
    argv = ["--ckpt", str(tmp_path / "grown"), "--ckpt", str(tmp_path / "labelled"), "--to", "0.5",
            "--by", "random", "--out_dir", str(tmp_path / "out"), "--recover", "20", "--rounds=0",
            "--tokens=0", "--device=cpu"]
    progress, out = tmp_path / "out/prune.json", tmp_path / "out/1-grown"

    with pytest.raises(SystemExit) as e:
        main(argv)
    assert e.value.code.startswith("prune: --recover: ") and "labels='weak'" in e.value.code
    assert "random" in capsys.readouterr().out, "the table of what is done"
    found = json.loads(progress.read_text())
    (row,), lr = found["rows"], checkpoint.read(run)["train"]["adamw_lr"]
    assert found["finished"] is False and row["ckpt"] == argv[1]
    for path, key in ((out / "pruned.pt", "bpb"), (out, "bpb_recovered")):
        again = evaluate(path, "val", 0, "cpu", progress=False)["bpb"]
        assert math.isclose(again, row[key], rel_tol=1e-7)
    assert row["bpb_recovered"] < row["bpb"] - 0.01
    assert model_of(out).config.head_ids == model_of(out / "pruned.pt").config.head_ids
    assert not (out / "heads.jsonl").exists(), "and recovery moves none"
    assert model_of(out).config.seed == model_of(run).config.seed + 1  # batches in another order
    for at, step in enumerate(rows(out)[0]):
        assert math.isclose(step["adamw_lr"], 0.3 * lr * (20 - at) / 20, rel_tol=1e-9)
    progress.write_text(json.dumps({**found, "seed": 5}))  # another command's
    assert "already holds a run" in refusal(argv)


@pytest.mark.slow
def test_a_command_that_was_killed_goes_on_with_the_rows_that_are_done(run, tmp_path, refusal, capsys):
    argv = ["--ckpt", run, "--to", "0.5", "--by", "random", "entropy", "--out_dir", tmp_path / "out"]
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


@pytest.mark.slow
def test_heads_of_a_task_are_judged_by_its_answers(task_run, tmp_path, rows):
    out = tmp_path / "half"
    row, = prune_json(["--ckpt", task_run, "--to", "0.5", "--by", "importance", "--out_dir", out,
                       "--recover", "4"], tmp_path)["rows"]
    for key, path in (("", out / "pruned.pt"), ("_before", task_run), ("_recovered", out)):
        model, data = model_of(path), TaskData(checkpoint.read(path)["meta"]["task"], 12)
        counted = summary(score_levels(model, data, "val"))
        assert row[f"right{key}"] == counted["right"]
        assert row[f"nats{key}"] == pytest.approx(counted["nats"], rel=1e-6)
    assert rows(out)[1][-1]["step"] == 4 and "acc/3" in rows(out)[1][-1]
    title = result_table([row]).splitlines()[0]
    assert title.split()[2:8] == ["right", "pruned", "recovered", "nats/answer", "pruned", "recovered"]
    figure = draw_curves([row, {**row, "to": 1.0}])
    assert figure.axes[0].get_ylabel().startswith("answers right")


@pytest.mark.slow
def test_blocks_go_at_the_flops_of_heads(data, tmp_path):
    deep = saved(tmp_path / "deep.pt", tiny(n_layer=4), data)
    heads, blocks = prune_json(["--ckpt", deep, "--to", "0.25", "--by", "blocks", "importance", "--out_dir",
                                tmp_path / "out"], tmp_path)["rows"]
    assert (heads["by"], blocks["by"]) == ("importance", "blocks")
    saves = blocks["flops_before"] - blocks["flops"]
    one = saves / len(blocks["blocks_gone"])
    assert saves <= heads["flops_before"] - heads["flops"] < saves + one
    left = evaluate(tmp_path / "out/blocks-0.25", "val", 0, "cpu", progress=False)
    assert left["flops_per_token"] == blocks["flops"]
    assert model_of(tmp_path / "out/blocks-0.25").config.n_layer == 4 - len(blocks["blocks_gone"])


def test_heads_in_groups_are_counted_in_groups(data, tmp_path, refusal):
    """Of two layers with two groups of two, a quarter is one group, and a floor keeps one in each layer."""
    path = saved(tmp_path / "grouped.pt", tiny(n_layer=2, n_kv_head=2), data)
    said = refusal(["--ckpt", path, "--to", "0.25", "--by", "importance", "--rounds=0"])
    assert "--to 0.25 keeps 2 of" in said and "--floor 1 keeps 4" in said


def test_the_picture_shows_means_and_every_point_and_name_is_seen():
    """Points lie within the axes; names beside them, apart from one another."""
    shares = (0.9, 0.85, 0.8)
    rows = [dict(by=by, to=to, bpb_before=2.0, bpb=2 + k * (1 - to) + 0.1 * seed)
            for k, by in enumerate(CRITERIA, 1) for to in shares for seed in (0, 1)]
    figure = draw_curves(rows)
    axes, = figure.axes
    assert sorted(label.get_text() for label in axes.texts) == sorted(CRITERIA)
    high, low = axes.get_xlim()
    for k, line in enumerate(axes.lines[:-1], 1):  # the last is the whole model's
        assert line.get_xdata() == pytest.approx([100 * to for to in shares], abs=11)  # each a little aside
        assert line.get_ydata() == pytest.approx([2.05 + k * (1 - to) for to in shares])
        assert low < min(line.get_xdata()) and max(line.get_xdata()) < high
    figure.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
    assert all(box.x0 >= axes.bbox.x1 for box in boxes)
    assert all(a.y1 <= b.y0 + 1 for a, b in zip(boxes, boxes[1:]))
    assert draw_curves([row for row in rows if row["to"] == shares[0]]) is None
    assert len(draw_curves([dict(row, bpb_recovered=2.0) for row in rows]).axes) == 2
