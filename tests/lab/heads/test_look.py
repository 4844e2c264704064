"""What the lines and the page say of a text is what the model did, token for token, in any browser."""
import base64
import functools
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import helpers
import sample
from model import GPT, MECHANISMS, HeadNorm
from nanoheads.common import UserError
from nanoheads import checkpoint
from nanoheads.pruning import prune_heads
from nanoheads.sampling import model_and_tokenizer
from nanoheads.tasks import TaskData
from nanoheads.traces import explain
from lab.heads import look
from helpers import make_checkpoint

NAMES = ["fair", "clear"]
FLAGS = {
    "one head": dict(constraint_names=NAMES),
    "two blocks, two heads": dict(n_layer=3, constraint_names=NAMES, constraint_heads=2,
                                  constraint_layers=[0, 2]),
    "one name, B": dict(n_embd=48, constraint_names=["fair"], constraint_variant="B"),
    "published": dict(constraint_names=NAMES, constraint_mode="published", recipe="modern", zero_init=False),
}
T = 16  # block_size
NASTY = "café 日本 😀</script><b>&amp;<!--\u202e\r\n".encode() + b"\xff\x00"


@pytest.fixture
def make(tmp_path):
    """make(encoding="byte", **flags) -> path of a checkpoint with constraint heads that labels have moved."""
    def call(encoding="byte", name="a.pt", trained=True, **flags):
        path = make_checkpoint(tmp_path / name, encoding, **{**FLAGS["one head"], **flags})
        state = torch.load(path)
        for key in [key for key in state["model"] if key.endswith("constraint.b2") and trained]:
            state["model"][key] += 0.01
        torch.save(state, path)
        return path
    return call


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def look_at(model, text, **how):
    """The JSON line of a window of a text."""
    return look.look(look.Viewer(model, "a"), text, "b", room=look.Room(), **how).line


def test_lines_are_rows_of_a_task(task_run, tmp_path):
    out = tmp_path / "rows.jsonl"
    look.main(["--ckpt", str(task_run), "--levels", "1,5", "--out", str(out)])
    data = TaskData(checkpoint.read(task_run)["meta"]["task"], 24)
    assert [line["ids"] for line in lines_of(out)] == [data.rows("test", level, 1, 24)[0][0].tolist()
                                                       for level in (1, 5)]
    sample.main(["--ckpt", str(task_run), "--levels", "1,3", "--audit", str(out)])
    assert [line["ids"] for line in lines_of(out)] == [data.rows("test", level, 1, 12, 1337)[0][0].tolist()
                                                       for level in (1, 3)]


def random_text(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n).astype(np.uint8).tobytes()


# ---- scores ----

@torch.no_grad()
def slowly(model, ids):
    """What a line must say of a window, from prefix after prefix: {(block, kind, name, head, t): number}."""
    found, names, heads = {}, model.config.constraint_names, model.config.constraint_heads
    for t in range(len(ids)):
        output = model(torch.tensor([ids[:t + 1]]), traces="maps")
        if t + 1 < len(ids):
            found["nats", t + 1] = -F.log_softmax(output.logits[0, -1].double(), -1)[ids[t + 1]].item()
        for key, value in output.traces.items():
            _, block, kind, *name = key.split(".")
            if f"blocks.{block}.head_scores" not in output.traces:
                continue
            if kind == "constraint":
                found[(block, "logit", *name, t)] = value[0, -1].item()
                found[(block, "probability", *name, t)] = 1 / (1 + np.exp(-value[0, -1].item()))
            for e in range(len(names) * heads if kind in ("head_scores", "router_gates", "map") else 0):
                where = block, kind, names[e // heads], e % heads, t
                if kind == "map":
                    extra = value[0, -len(names) * heads:]
                    found.update({(*where, s): extra[e, -1, s].item() for s in range(t + 1)})
                else:
                    found[where] = value[0, e, -1].item() if kind == "head_scores" else value[0, -1, e].item()
    return found


def said(line):
    """The same of a line."""
    found = {("nats", t): nats for t, nats in enumerate(line["nats"]) if t}
    for block, part in line["blocks"].items():
        for name in part["logits"]:
            for kind, key in (("logit", "logits"), ("probability", "probabilities")):
                found.update({(block, kind, name, t): v for t, v in enumerate(part[key][name])})
            for kind, key in (("head_scores", "head_logits"), ("router_gates", "gates")):
                found.update({(block, kind, name, e, t): v for e, head in enumerate(part[key][name])
                              for t, v in enumerate(head)})
            found.update({(block, "map", name, e, t, s): v for e, head in enumerate(part["maps"][name])
                          for t, row in enumerate(head) for s, v in enumerate(row)})
    return found


def agree(got, want):
    return got.keys() == want.keys() and all(abs(got[key] - want[key]) < 2e-6 + 2e-5 * (key[0] == "nats")
                                             for key in want)  # logits of the language model are float32


@pytest.mark.slow
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("n", [1, 5, T, 2 * T, 2 * T + 3])
def test_a_line_says_what_one_token_at_a_time_says(make, flags, n):
    model, tokenizer = model_and_tokenizer(make(**FLAGS[flags]), "cpu")
    model, ids = model.double(), list(random_text(n))
    text = look.spell(tokenizer, ids)
    for start in range(0, n, T):
        line = look_at(model, text, maps=True, start=start, end=start + T)
        assert agree(said(line), slowly(model, ids[start:start + T]))
        assert line["first"] == start and line["nats"][0] is None and line["ids"] == ids[start:start + T]


def shifted(values):
    return [*values[1:], values[0]]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["logits", "probabilities", "head_logits", "gates", "maps", "nats",
                                   "names"])
def test_the_oracle_catches_a_shifted_line(make, wrong):
    model, tokenizer = model_and_tokenizer(make(**FLAGS["two blocks, two heads"]), "cpu")
    ids = list(random_text(9))
    line = look_at(model.double(), look.spell(tokenizer, ids), maps=True)
    want = slowly(model, ids)
    assert agree(said(line), want)
    part = line["blocks"]["2"]
    if wrong == "nats":
        line["nats"] = [None, *shifted(line["nats"][1:])]
    elif wrong == "names":
        part["logits"] = dict(zip(NAMES, reversed(part["logits"].values())))
    elif wrong in ("logits", "probabilities"):
        part[wrong]["fair"] = shifted(part[wrong]["fair"])
    else:
        part[wrong]["fair"] = shifted(part[wrong]["fair"])  # the heads in another order
    assert not agree(said(line), want)


def test_a_file_is_read_once_from_end_to_end(make, tmp_path, capsys):
    path, raw = make(), random_text(2 * T + 5)
    (tmp_path / "t.txt").write_bytes(raw)
    out = tmp_path / "o.jsonl"
    look.main(["--ckpt", path, "--text", str(tmp_path / "t.txt"), "--out", str(out)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("t.txt: 37 tokens in 3 windows of 16")
    assert printed[1:] == [str(out), str(out.with_suffix(".html"))]
    lines, (model, _) = lines_of(out), model_and_tokenizer(path, "cpu")
    assert [i for line in lines for i in line["ids"]] == list(raw)
    assert [line["first"] for line in lines] == [0, 16, 32]
    for line in lines:
        with torch.no_grad():
            traces = model(torch.tensor([line["ids"]]), traces=True).traces
        for name in NAMES:
            assert line["blocks"]["0"]["logits"][name] == pytest.approx(
                traces[f"blocks.0.constraint.{name}"][0].tolist(), abs=1e-6)
        assert (line["checkpoint"], line["text"]) == (path, str(tmp_path / "t.txt"))
        assert "maps" not in line["blocks"]["0"]
    look.main(["--ckpt", path, "--text", str(tmp_path / "t.txt"), "--out", str(out), "--maps"])
    maps = lines_of(out)[0]["blocks"]["0"]["maps"]["fair"][0]
    assert [len(row) for row in maps] == list(range(1, T + 1))
    assert all(sum(row) == pytest.approx(1, abs=1e-4) for row in maps)


@pytest.mark.slow
def test_json_has_the_mean_of_each_series_and_the_page(make, tmp_path, capsys):
    paths, raw = [make(), make(name="b.pt", sentinel="sigmoid")], random_text(2 * T + 5)
    (tmp_path / "t.txt").write_bytes(raw)
    out, found = tmp_path / "o.jsonl", tmp_path / "found.json"
    look.main(["--ckpt", paths[0], "--ckpt", paths[1], "--text", str(tmp_path / "t.txt"), "--out", str(out),
               "--json", str(found)])
    assert capsys.readouterr().out.splitlines()[-1] == str(found)
    found = json.loads(found.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert (found["text"], found["tokens"], found["windows"]) == (str(tmp_path / "t.txt"), 37, 3)
    assert (found["lines"], found["page"]) == (str(out), str(out.with_suffix(".html")))
    assert [run["ckpt"] for run in found["runs"]] == paths
    for number, run in enumerate(found["runs"]):
        lines, means = lines_of(out)[number::2], run["means"]
        nats = [each for line in lines for each in line["nats"] if each is not None]
        assert len(nats) == 34 and means["nats"] == pytest.approx(np.mean(nats), abs=1e-5)
        of_constraints = {key for key in means if look.of_constraints(key)}
        assert of_constraints and means.keys() == {"nats", *lines[0]["series"]} | of_constraints
        for key, heads in lines[0]["heads"].items():
            for row, head in enumerate(heads):  # a gate has one number for all the tokens of a line
                values = [line["series"][key][row] for line in lines]
                values = [v if len(v) > 1 else v * len(line["ids"]) for v, line in zip(values, lines)]
                assert means[key][str(head)] == pytest.approx(np.mean(sum(values, [])), abs=1e-5)
        scores = [each for line in lines for each in line["blocks"]["0"]["probabilities"]["fair"]]
        assert means["blocks.0.constraint.fair"] == pytest.approx(np.mean(scores), abs=1e-5)
    assert "blocks.0.gate" in found["runs"][1]["means"]


def test_json_of_one_token_has_no_mean_of_what_no_token_has(make, tmp_path, capsys):
    found = tmp_path / "found.json"
    look.main(["--ckpt", make(), "--start", "a", "--out", str(tmp_path / "o.jsonl"), "--json", str(found)])
    found = json.loads(found.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert found["tokens"] == 1 and found["runs"][0]["means"]["nats"] is None


@pytest.mark.slow
def test_heads_that_no_label_trained_say_so(make, tmp_path, capsys):
    """On the page, in the terminal, and under a sample; once a label has moved a score, nowhere."""
    (tmp_path / "t.txt").write_bytes(random_text(T))
    for trained in (False, True):
        path, out = make(trained=trained), tmp_path / "o.jsonl"
        look.main(["--ckpt", path, "--text", str(tmp_path / "t.txt"), "--out", str(out)])
        sample.main(["--ckpt", path, "--start", "a", "--max_new_tokens", "3",
                     "--audit", str(tmp_path / "s.jsonl")])
        printed = capsys.readouterr().out
        assert printed.count(look.UNTRAINED) == 2 * (not trained)
        for name in ("o.html", "s.html"):
            assert ((tmp_path / name).read_text().count(look.UNTRAINED) == 1) != trained


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, T])
def test_the_top_tokens_are_those_of_explain(make, n):
    model, tokenizer = model_and_tokenizer(make(**FLAGS["two blocks, two heads"]), "cpu")
    line = look_at(model, look.spell(tokenizer, list(b"abcdefghijklmnop"[:n])))
    with torch.no_grad():
        traces = model(torch.tensor([line["ids"]]), traces=True).traces
    assert line["explain"] == [row for name in NAMES
                               for row in explain(traces, line["tokens"], name).split("\n")]
    for row in line["explain"]:
        name, block = re.match(r"(\w+) \(block (\d)\)", row).groups()
        top, scores = (line["blocks"][block][key][name] for key in ("top", "logits"))
        assert row == f"{name} (block {block}): " + ", ".join(f"{x['text']!r} {x['logit']:.2f}" for x in top)
        assert [x["logit"] for x in top] == sorted(scores, reverse=True)[:5]
        assert all(scores[x["token"]] == x["logit"] and line["tokens"][x["token"]] == x["text"] for x in top)


def test_one_gate_for_a_whole_row_stays_one(make, tmp_path):
    model, tokenizer = model_and_tokenizer(make(), "cpu")
    forward = model.forward
    model.forward = lambda idx, **more: forward(idx, router_hint=torch.ones(1, 16), **more)
    text = look.spell(tokenizer, list(b"some text"))
    seen = look.look(look.Viewer(model, "a"), text, "b")
    pane, = look.for_page([seen], text.raw)["panes"]
    for name, shown in zip(NAMES, pane["values"]["blocks.0.router_gates"], strict=True):
        (gate,), = seen.line["blocks"]["0"]["gates"][name]
        assert shown == [pytest.approx(gate, rel=1e-3)]


# ---- series ----

AGENCY = ("agency", "agency_utilisation", "agency_last_signal")


def wanted(traces):
    """What the series of a pass must be, trace by trace: {key: [heads, T or 1] or [T], an array}."""
    by_hand = {
        "entropy": lambda x: x[0], "concentration": lambda x: x[0], "sink_gate": lambda x: 1 - x[0, :, :, 0],
        "acag_gate": lambda x: x[0].mean(-1), "output_gate": lambda x: x[0].mean(-1),
        "advantage": lambda x: x[0].T, "log_forget": lambda x: x[0].T,
        "routing_weights": lambda x: x[0].T, "selected": lambda x: x[0].T.double(),
        "routing_logits": lambda x: x[0].T, "gate": lambda x: x[:, 0],
        **dict.fromkeys(AGENCY, lambda x: x[:, None])}
    found = {}
    for key, x in traces.items():
        name = key.split(".", 2)[-1] if key.startswith("blocks.") else key
        if name.startswith("a2c."):
            found[key] = torch.cat((x[0, :-1], torch.tensor([torch.nan])))
        elif name == "map":
            found[key.replace("map", "first_token")] = x[0, :, :, 0]
        elif name in AGENCY and len(x) == 1:  # of an MLP or a block: these models have four heads
            found[key] = x.expand(traces["blocks.0.entropy"].size(-1))
        elif name in by_hand:
            found[key.replace("sink_gate", "sink_mass")] = by_hand[name](x)
        else:
            assert name in ("head_scores", "router_gates") or name.startswith("constraint."), name
    return {key: x.numpy() for key, x in found.items()}


tiny = functools.partial(helpers.tiny, std=0.3, states=False, block_size=T, vocab_size=256, n_head=4,
                         n_embd=64)


def read_by(model, ids):
    """(its Viewer, the JSON line of token ids)."""
    viewer, raw = look.Viewer(model, "a"), [bytes([i]) for i in ids]
    return viewer, look.look(viewer, look.Text(ids, raw, [[i, i + 1] for i in range(len(ids))]), "b",
                             room=look.Room()).line


def same(rows, want):
    """Whether series in a line are tensors' numbers; NaN is null."""
    return np.allclose(np.array(rows, float), want, rtol=0, atol=2e-6, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MECHANISMS, "plain"])
def test_series_are_the_traces_of_every_mechanism(name):
    """Also where a text has as many tokens as a layer has heads, or one."""
    model = tiny(**MECHANISMS.get(name, {}))
    for n in (9, 4, 1):
        ids = list(random_text(n))
        _, line = read_by(model, ids)
        with torch.no_grad():
            targets = torch.tensor([[*ids[1:], -1]])
            want = wanted(model(torch.tensor([ids]), targets=targets, traces="maps").traces)
        assert line["series"].keys() == want.keys()
        for key, rows in line["series"].items():
            assert same(rows, want[key]), key
            of_a_piece = key.endswith(AGENCY) and name in ("agency_mlp", "agency_block")
            of_heads = not key.startswith("a2c.") and not of_a_piece
            assert not of_heads or len(line["heads"][key]) == len(rows)
        key = "blocks.1.entropy"  # a control: turned around it is no longer the same
        assert n == 1 or not same(line["series"][key], want[key][:, ::-1])


@torch.no_grad()
def test_a2c_shows_the_discounted_log_probabilities_to_come():
    model, ids = tiny(a2c="temperature", a2c_gamma=0.7), list(random_text(9))
    _, line = read_by(model, ids)
    log_p = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    log_p = [log_p[t, ids[t + 1]].item() for t in range(8)]
    x = model.hidden(torch.tensor([ids]))[0]
    for t in range(8):
        shares = [0.7 ** k for k in range(8 - t)]  # those beyond the end are shared out
        G = sum(share * log_p[t + k] for k, share in enumerate(shares)) / sum(shares)
        V = (x[t] @ model.value.weight[0] + model.value.bias[0]).item()
        assert line["series"]["a2c.return"][t] == pytest.approx(G, abs=1e-5)
        assert line["series"]["a2c.value"][t] == pytest.approx(V, abs=1e-5)
        assert line["series"]["a2c.advantage"][t] == pytest.approx(G - V, abs=1e-5)
        assert line["nats"][t + 1] == pytest.approx(-log_p[t], abs=1e-5)
    assert line["series"]["a2c.return"][8] is None


@torch.no_grad()
def test_acags_gate_follows_from_the_rows_and_the_length():
    """The normalised formula, from the attention map, row by row."""
    model, ids = tiny(acag="headwise"), list(random_text(9))
    viewer, line = read_by(model, ids)
    p = model(torch.tensor([ids]), traces="maps").traces["blocks.1.map"][0]
    gate = viewer.layers[1].acag
    for h in range(4):
        for t in range(9):
            row, n = p[h, t, :t + 1], t + 1
            entropy, square = -(row * row.log()).sum(), row.square().sum()
            shape = (1 - entropy / np.log(n), (n * square).log()) if t else (0.0, 0.0)
            z = sum(w * f for w, f in zip(gate.weight[h], (np.log(1 + t) / np.log(1 + T), *shape)))
            assert line["series"]["blocks.1.acag_gate"][h][t] == pytest.approx(
                2 / (1 + np.exp(-(z + gate.bias[h]).item())), abs=1e-5)


def test_heads_keep_their_numbers_when_others_are_pruned():
    model, ids = tiny(routing="sigmoid", routing_top_k=3, constraint_names=["fair"]), list(random_text(9))
    whole = read_by(model, ids)[1]
    prune_heads(model, {0: [1]})
    _, line = read_by(model, ids)
    assert line["heads"]["blocks.0.entropy"] == line["heads"]["blocks.0.selected"] == [0, 2, 3]
    assert line["heads"]["blocks.1.entropy"] == [0, 1, 2, 3, 4]  # with the constraint head
    for name in ("entropy", "routing_weights"):
        kept = [whole["series"][f"blocks.0.{name}"][h] for h in (0, 2, 3)]
        assert same(line["series"][f"blocks.0.{name}"], kept)
    prune_heads(model, {0: [0, 2, 3]})  # none is left
    viewer, line = read_by(model, ids)
    assert not [key for key in line["series"] if key.startswith("blocks.0.")]
    assert line["heads"]["blocks.1.entropy"] == [0, 1, 2, 3, 4]
    shared = read_by(tiny(routing="moh", routing_shared=1), ids)[1]
    assert shared["heads"]["blocks.0.routing_logits"] == [1, 2, 3]


def test_constraint_heads_have_their_own_numbers_where_there_are_as_many_others(make):
    """Two heads of the layer, and two of constraints."""
    model, tokenizer = model_and_tokenizer(make(n_head=2), "cpu")
    viewer, text = look.Viewer(model, "a"), look.spell(tokenizer, list(b"some text"))
    series = look.look(viewer, text, "b").series
    for name in ("head_scores", "router_gates"):
        assert series[f"blocks.0.{name}"].heads == [2, 3]


def test_an_mlp_with_a_state_is_no_head_where_there_is_one_head():
    _, line = read_by(tiny(n_head=1, agency=True, agency_scope="mlp"), list(random_text(9)))
    assert "blocks.0.agency" in line["series"] and "blocks.0.agency" not in line["heads"]


def own_traces(monkeypatch, kept, own, axes):
    """Have HeadNorm trace own, {name: function of y and x}, with these trace_axes; kept gets each y."""
    def after(self, attn, heads):
        heads.traces.update({name: make(heads.y, heads.x) for name, make in own.items()})
        kept.append(heads.y[0])

    monkeypatch.setattr(HeadNorm, "after_attention", after)
    monkeypatch.setattr(HeadNorm, "trace_axes", axes)


@pytest.mark.parametrize("n", [4, 9])
def test_traces_of_a_mechanism_of_ones_own_are_shown_by_name(monkeypatch, n):
    """With the axes that it names, or as a gate; what has neither is named on the page."""
    own = {"by_head": lambda y, x: y.mean(-1), "by_token": lambda y, x: y.mean((1, 3)),
           "last": lambda y, x: y.mean(-1).mT, "wide": lambda y, x: y[..., :5],
           "for_all": lambda y, x: y[:, :1, :, :5],
           "pairs": lambda y, x: x @ x.mT, "one": lambda y, x: x.sum()}
    axes = {"by_head": ("row", "head", "token"), "by_token": ("row", "token"),
            "last": ("row", "token", "own")}

    kept = []
    own_traces(monkeypatch, kept, own, axes)
    viewer, line = read_by(tiny(head_norm=True), list(random_text(n)))
    for block, y in enumerate(kept[-2:]):
        y, series = y.detach(), {key.split(".")[2]: rows for key, rows in line["series"].items()
                                 if key.startswith(f"blocks.{block}.")}
        assert same(series["by_head"], y.mean(-1)) and same(series["last"], y.mean(-1))
        assert same(series["by_token"], y.mean((0, 2))) and same(series["wide"], y[..., :5].mean(-1))
        assert same(series["for_all"], y[0, :, :5].mean(-1))
        assert not {"pairs", "one"} & series.keys()
    assert look.kind_of("by_head").label == "by_head"


def test_axes_that_are_not_there_are_refused_and_traces_without_are_named(monkeypatch, make, tmp_path):
    path = make(constraint_names=None, head_norm=True)
    own_traces(monkeypatch, [], {"one": lambda y, x: x.sum()}, {})
    assert data_of(write_page(path, b"text", tmp_path))["notes"] == [
        "Not shown, since trace_axes does not name their axes: one."]
    own_traces(monkeypatch, [], {"sums": lambda y, x: y.sum(-1)}, {"sums": ("row", "token", "own")})
    with pytest.raises(UserError, match=r"the trace sums of shape \[1, \d+, 4\] does not have the axes row, "
                                        r"token, own: trace_axes of its mechanism says which it has"):
        write_page(path, b"text", tmp_path)


def unpacked(text, n):
    """packed()'s rows of a head, as docs/look.md has them."""
    raw = base64.b64decode(text)
    ends, codes = np.frombuffer(raw[:8 * n], "<f4").reshape(n, 2), np.frombuffer(raw[8 * n:], np.uint8)
    starts = np.arange(n) * (np.arange(n) + 1) // 2
    return [low + (high - low) / 255 * codes[start:start + t + 1]
            for t, (start, (low, high)) in enumerate(zip(starts, ends.astype(float)))]


@pytest.mark.parametrize("name", ["plain", "sink", "diff", "window"])
def test_a_packed_map_is_the_map_to_8_bits(name):
    """Also one with weights below 0 (diff), or whose rows sum to less than 1 (sink)."""
    with torch.no_grad():
        ids = torch.tensor([list(random_text(T))])
        p = tiny(**MECHANISMS.get(name, {}))(ids, traces="maps").traces["blocks.1.map"][0]
    for head, text in zip(p.numpy(), look.packed(p), strict=True):
        for t, row in enumerate(unpacked(text, T)):
            width = head[t].max() - min(head[t].min(), 0)
            assert np.abs(row - head[t, :t + 1]).max() <= width / 509
    assert (p < 0).any() == (name == "diff")


def test_a_router_that_acts_in_training_alone_says_so(make, tmp_path):
    page = write_page(make(constraint_names=None, **MECHANISMS["routing_published"]), b"text", tmp_path)
    note = "The router acts in training alone: it chooses nothing here."
    assert data_of(page)["notes"] == [note]
    page = write_page(make(constraint_names=None, **MECHANISMS["routing_zero"]), b"text", tmp_path)
    assert data_of(page)["notes"] == []


# ---- tokens as text ----

@pytest.mark.parametrize("pieces, want", [
    ([*"It's 19, ok."], ["It's", " ", "19", ",", " ", "ok", "."]),
    (["The", " qu", "ick", "ly", ",", " fox", "\n\n", "é", "t"],
     ["The", " quickly", ",", " fox", "\n\n", "ét"]),
    (["a", "", "b"], ["a", "", "b"]), ([], []),
])
def test_tokens_are_grouped_into_words(pieces, want):
    starts = look.word_starts(pieces)
    assert ["".join(pieces[a:b]) for a, b in zip(starts, [*starts[1:], len(pieces)])] == want


class Pieces:
    """A tokenizer whose tokens are pieces of bytes, as GPT-2's are."""

    def __init__(self, *pieces):
        self.pieces, self.vocab_size = pieces, len(pieces)

    def decode_bytes(self, ids):
        return b"".join(self.pieces[i] for i in ids)


TEXTS = {"plain": [b"some ", b"words", b"\n"], "bytes": [bytes([b]) for b in NASTY],
         "pieces": [b"a \xe6", b"\x97\xa5", b"\xe6\x9c", b"\xac\xe6\x97", b"\xa5 b", b"\xff\xfe", b"\xf0"],
         "beyond the vocabulary": [b"a", b"", b"\xc3", b"\xa9"]}


@pytest.mark.parametrize("kind", TEXTS)
def test_offsets_are_the_characters_that_a_token_has_bytes_of(kind):
    pieces = TEXTS[kind]
    text = look.spell(Pieces(*filter(None, pieces)),
                       [len(pieces) if not p else list(filter(None, pieces)).index(p) for p in pieces])
    owners = []  # of each byte: the character it belongs to
    for number, character in enumerate(b"".join(pieces).decode("utf-8", "surrogateescape")):
        owners += [number] * len(character.encode("utf-8", "surrogateescape"))
    at = 0
    for piece, (begin, end) in zip(pieces, text.offsets):
        own = owners[at:at + len(piece)]
        assert list(range(begin, end)) == sorted(set(own))
        at += len(piece)
    assert text.raw == pieces and at == len(owners)


def test_bytes_that_are_no_text_are_escaped_and_a_page_joins_characters():
    raw = [b"a", b"\xc3", b"\xa9", b" \xe6", b"\x97\xa5", b"\xff"]
    text = look.spell(Pieces(*raw), range(len(raw)))
    assert [look.printed(piece) for piece in raw] == ["a", r"\xc3", r"\xa9", r" \xe6", r"\x97\xa5", r"\xff"]
    assert look.cells(dict(offsets=text.offsets), text.raw) == [
        ["a", 0, 0], ["é", 2, 1], [" 日", 4, 2], [r"\xff", 5, 4]]
    # a character that the end of a window cuts is shown as its bytes on both sides
    halves = [look.cells(dict(offsets=text.offsets[cut]), text.raw[cut])
              for cut in (slice(0, 2), slice(2, 3))]
    assert [half[-1][0] for half in halves] == [r"\xc3", r"\xa9"]


# ---- samples ----

def test_samples_are_audited_with_their_prompt(make, tmp_path, capsys):
    path, out = make("char"), tmp_path / "s.jsonl"
    args = ["--ckpt", path, "--start", "abc", "--num_samples", "2", "--max_new_tokens", "9"]
    sample.main(args)
    plain = capsys.readouterr().out
    sample.main([*args, "--audit", str(out)])
    shown, lines = capsys.readouterr(), lines_of(out)
    model, tokenizer = model_and_tokenizer(path, "cpu")
    assert shown.err.splitlines()[-2:] == [str(out), str(tmp_path / "s.html")]
    rest = shown.out
    for number, line in enumerate(lines, 1):
        text = "".join(line["tokens"])
        assert line["text"] == f"sample {number}" and len(line["ids"]) == 12 and line["prompt"] == 3
        assert text.startswith("abc") and text in plain
        with torch.no_grad():
            traces = model(torch.tensor([tokenizer.encode(text).tolist()]), traces=True).traces
        assert line["blocks"]["0"]["logits"]["clear"] == pytest.approx(
            traces["blocks.0.constraint.clear"][0].tolist(), abs=1e-6)
        under = "\n".join(explain(traces, line["tokens"], name) for name in NAMES)
        assert text + "\n\n" + under in rest
        rest = rest.replace("\n\n" + under, "", 1)
    assert rest == plain


def test_a_sample_of_any_model_is_seen(make, tmp_path, capsys):
    """Without constraint heads nothing is listed under the text."""
    path, out = make("char", constraint_names=None, a2c="key_bias"), tmp_path / "s.jsonl"
    args = ["--ckpt", path, "--start", "abc", "--max_new_tokens", "9"]
    sample.main(args)
    plain = capsys.readouterr().out
    sample.main([*args, "--audit", str(out)])
    assert capsys.readouterr().out == plain
    (line,), page = lines_of(out), out.with_suffix(".html").read_text()
    assert {"a2c.value", "blocks.0.advantage", "blocks.0.first_token"} <= line["series"].keys()
    assert line["explain"] == [] and line["blocks"] == {} and "a2c.value" in page


@pytest.mark.slow
def test_of_a_long_sample_the_last_block_is_audited(make, tmp_path, capsys):
    out = tmp_path / "s.jsonl"
    sample.main(["--ckpt", make(), "--start", "abcdefghij", "--max_new_tokens", "30", "--audit", str(out)])
    line, = lines_of(out)
    assert (line["first"], len(line["ids"]), line["prompt"]) == (24, T, 0)
    sample.main(["--ckpt", make(), "--start", "abcdefghij", "--max_new_tokens", "10", "--audit", str(out)])
    line, = lines_of(out)
    assert (line["first"], len(line["ids"]), line["prompt"]) == (4, T, 6)
    assert "".join(line["tokens"]).startswith("efghij")
    assert capsys.readouterr().out.count("fair (block 0)") == 2


@pytest.mark.slow
def test_what_was_set_counts_and_is_said(make, tmp_path):
    path, out = make(constraint_names=NAMES, n_layer=3), tmp_path / "o.jsonl"
    (tmp_path / "t.txt").write_text("some text")
    scores = []
    for settings in ([], ["--set", "gate.0.0=0", "--set", "gate.1.1=0"]):
        look.main(["--ckpt", path, "--text", str(tmp_path / "t.txt"), "--out", str(out), *settings])
        line, = lines_of(out)
        assert line["set"] == settings[1::2]
        scores.append(line["blocks"]["2"]["logits"]["fair"])
    assert scores[0] != scores[1]
    assert "a.pt with gate.0.0=0, gate.1.1=0 on" in out.with_suffix(".html").read_text()
    sample.main(["--ckpt", path, "--set", "gate.0.0=0", "--max_new_tokens", "2", "--audit", str(out)])
    assert lines_of(out)[0]["set"] == ["gate.0.0=0"]


def test_a_sample_ends_before_its_stop_token(make, tmp_path, capsys, monkeypatch):
    def stream(self, idx, *args, **kwargs):
        yield from (torch.tensor(row) for row in ([97, 10], [98, 10], [10, 10]))

    monkeypatch.setattr(GPT, "stream", stream)
    out = tmp_path / "s.jsonl"
    sample.main(["--ckpt", make(), "--start", "x", "--stop", "--num_samples", "2", "--audit", str(out)])
    assert ["".join(line["tokens"]) for line in lines_of(out)] == ["xab", "x"]


# ---- what fails on the way ----

def test_an_old_audit_stays_when_the_new_one_fails(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("char")
    Path("t.txt").write_text("abc" * T)
    Path("o.jsonl").write_text("old")
    calls = []

    def broken(*args, **more):
        calls.append(1)
        if len(calls) == 3:
            raise UserError("no more")
        return real(*args, **more)

    real = look.look
    monkeypatch.setattr(look, "look", broken)
    before = set(tmp_path.iterdir())
    with pytest.raises(SystemExit, match="no more"):
        look.main(["--ckpt", "a.pt", "--text", "t.txt", "--out", "o.jsonl"])
    assert Path("o.jsonl").read_text() == "old" and set(tmp_path.iterdir()) == before


# ---- the page ----

class Reader(HTMLParser):
    """The elements of a page and what stands in its scripts."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.scripts, self.inside = [], [], None
        self.feed(page)

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        self.inside = name
        if name == "script":
            self.scripts.append("")

    def handle_data(self, text):
        if self.inside == "script":
            self.scripts[-1] += text

    def handle_endtag(self, name):
        self.inside = None


def write_page(paths, raw, folder, name="page", maps=False):
    """The page of a text as one checkpoint, or two, read it."""
    paths = [paths] if isinstance(paths, str) else paths
    pairs = [model_and_tokenizer(path, "cpu") for path in paths]
    viewers = [look.Viewer(model, path) for (model, _), path in zip(pairs, paths)]
    out = folder / f"{name}.jsonl"
    ids = pairs[0][1].encode(raw).tolist()
    look.of_text(viewers, pairs[0][1], ids, f"{name}.txt", (out, out.with_suffix(".html")), maps)
    return out.with_suffix(".html")


def data_of(page):
    """What the script of a page reads."""
    return json.loads(Reader(page.read_text()).scripts[0])


def test_the_page_holds_any_text_and_asks_for_nothing(make, tmp_path):
    folder = tmp_path / "<b>{{DATA}}&'"
    folder.mkdir()
    page = write_page(make(), NASTY * 3, folder).read_text()
    read = Reader(page)
    data, script = read.scripts
    lines = json.loads(data)["lines"]
    assert "".join(text for line in lines for text, _, _ in line["cells"]).count("</script><b>") == 3
    assert {name for name, _ in read.elements} <= {
        "html", "head", "meta", "link", "title", "style", "body", "header", "h1", "p", "div", "main",
        "noscript", "aside", "script", "details", "summary", "kbd", "svg"}
    policy = next(a["content"] for _, a in read.elements if a.get("http-equiv"))
    code = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == ("default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
                      f"script-src 'sha256-{code}'")
    assert not re.search(r"https?:|url\(|@import|innerHTML|eval\(", page.replace(data, ""))
    assert page.count(data) == 1


def test_a_token_cannot_end_the_script_that_holds_it(make):
    model, tokenizer = model_and_tokenizer(make(), "cpu")
    text = look.spell(tokenizer, list(b"ab"))
    line = look.for_page([look.look(look.Viewer(model, "a"), text, "b")], text.raw)
    line["cells"][0][0] = evil = "</script><!--<script><b>\u2028"
    read = Reader(look.page([line], [("a", [])]))
    assert len(read.scripts) == 2 and json.loads(read.scripts[0])["lines"][0]["cells"][0][0] == evil


def test_the_page_says_what_the_lines_say(make, tmp_path):
    page = write_page(make(**FLAGS["two blocks, two heads"]), b"plain text of two windows", tmp_path)
    data = data_of(page)
    (pane,), lines = data["panes"], lines_of(page.with_suffix(".jsonl"))
    assert len(data["lines"]) == len(lines) == 2
    for line, found in zip(lines, data["lines"]):
        assert [text for text, _, _ in found["cells"]] == line["tokens"]
        values = dict(found["panes"][0]["values"])
        assert values.pop("nats")[1:] == pytest.approx(line["nats"][1:], rel=1e-3)
        for block, part in line["blocks"].items():
            for name in NAMES:
                shown = values.pop(f"blocks.{block}.constraint.{name}")
                assert shown == pytest.approx(part["probabilities"][name], rel=1e-3)
            for kind, key in (("router_gates", "gates"), ("head_scores", "head_logits")):
                want = [row for name in NAMES for row in part[key][name]]
                assert np.allclose(values.pop(f"blocks.{block}.{kind}"), want, rtol=1e-3)
        assert values.keys() == line["series"].keys() and len(values) > 8
        for key, rows in line["series"].items():
            assert np.allclose(values[key], rows, rtol=1e-3, atol=1e-6), key
    about = {each["key"]: each for each in pane["series"]}
    assert about.keys() == {*lines[0]["series"], "nats", *(key for key in found["panes"][0]["values"])}
    assert about["blocks.2.entropy"]["heads"] == ["0", "1", "2 fair", "3 fair", "4 clear", "5 clear"]


@pytest.mark.slow
def test_a_long_text_has_its_beginning_on_the_page(make, tmp_path, monkeypatch):
    monkeypatch.setattr(look, "PAGE_TOKENS", 40)
    page = write_page(make(), b"x" * 100, tmp_path)
    data = data_of(page)
    assert len(data["lines"]) == 2
    assert data["notes"] == ["The first 32 of 100 tokens; page.jsonl has them all."]
    assert len(lines_of(page.with_suffix(".jsonl"))) == 7
    monkeypatch.setattr(look, "PAGE_NUMBERS", 1)  # the first part is there whatever it takes
    assert len(data_of(write_page(make(), b"x" * 100, tmp_path))["lines"]) == 1


def test_maps_fill_the_page_only_so_far_and_it_says_so(make, tmp_path, monkeypatch):
    of_a_block = 4 * (8 * T + T * (T + 1) // 2)  # bytes of four heads
    monkeypatch.setattr(look, "PAGE_MAPS", 3 * of_a_block - 1)
    page = write_page(make(n_layer=2, n_head=4, constraint_names=None), b"x" * 2 * T, tmp_path)
    data = data_of(page)
    assert [[*line["panes"][0]["maps"]] for line in data["lines"]] == [["0", "1"], []]
    assert data["notes"] == ["Attention maps fill 0 MB: 2 of 4 (each of a block in a part of the text) are "
                             "here, the first."]
    monkeypatch.setattr(look, "PAGE_MAPS", 0)
    data = data_of(write_page(make(constraint_names=None), b"x", tmp_path))
    assert "0 of 1" in data["notes"][0]


def test_maps_that_memory_does_not_hold_are_not_made(make, tmp_path, monkeypatch):
    monkeypatch.setattr(look, "FLOATS", 2 * T * T - 1)
    page = write_page(make(constraint_names=None), b"x" * T, tmp_path)
    data, (line,) = data_of(page), lines_of(page.with_suffix(".jsonl"))
    assert data["notes"] == ["No attention maps: those of one block would not fit into memory."]
    assert data["lines"][0]["panes"][0]["maps"] == {} and "blocks.0.first_token" not in line["series"]
    assert "blocks.0.entropy" in line["series"]


# ---- a browser ----

FOCUS = "document.activeElement.index"
SHOWN = "document.querySelector('#readout').innerText"
# how much of its colour each token of the first pane has; orange counts as below 0
SHARES = (r"lines.flatMap(l => l.panes[0].spans.map(s => /^rgba?\((\d+), \d+, (\d+)(?:, ([\d.]+))?\)/"
          r".exec(getComputedStyle(s).backgroundColor))"
          ".map(m => Number(m[3] ?? 1) * (+m[1] > +m[2] ? -1 : 1)))")
PICKED = "[state.name, state.block, state.head]"
MODELS = {  # a checkpoint of each kind: what the page must show of it, in which block
    "plain": ({}, "nats", None),
    "a2c": ({"a2c": "temperature"}, "a2c.advantage", None),
    "acag": ({"acag": "headwise"}, "acag_gate", 1),
    "routing": ({"routing": "moh", "routing_top_k": 2}, "routing_weights", 1),
    "sink": ({"sink": True}, "sink_mass", 1),
    "output gate": ({"output_gate": "elementwise"}, "output_gate", 1),
    "sentinel": ({"sentinel": "sigmoid"}, "gate", 1),
    "constraint": ({"constraint_names": NAMES}, "constraint.fair", 1),
}


def choose(browser, **values):
    """Choose in the page's lists, as a person does."""
    for name, value in values.items():
        browser.ask(f"$('{name}').value = {json.dumps(value)}; $('{name}').onchange({{target: $('{name}')}})")


@pytest.mark.parametrize("kind", MODELS)
def test_in_a_browser_each_mechanism_shows_its_numbers(make, tmp_path, browser, kind):
    """Colours and readout are the model's own traces, at both widths, whatever is clicked."""
    flags, name, block = MODELS[kind]
    path = make(n_layer=2, n_head=4, **{"constraint_names": None, **flags})
    page = write_page(path, b"Hello you.\nTwo parts.", tmp_path, maps=True)
    first, second = lines_of(page.with_suffix(".jsonl"))
    values = {**first["series"], "nats": first["nats"],
              **{f"blocks.{i}.constraint.{n}": b["probabilities"][n]
                 for i, b in first["blocks"].items() for n in NAMES}}
    for width in (390, 1200):
        browser.open(page, width)
        assert browser.ask("document.documentElement.scrollWidth") <= width
        assert browser.ask("state.name") == name  # what the mechanism does is shown first
        if block is not None:
            choose(browser, block=str(block))
        rows = values[name if block is None else f"blocks.{block}.{name}"]
        if np.ndim(rows) > 1:
            choose(browser, head="1")
            rows = rows[1]
        browser.point("lines[0].panes[0].spans[6]", click=True)
        assert browser.ask(FOCUS) == 6
        number = f"{rows[6 if len(rows) > 1 else 0]:.3f}"
        assert number in browser.ask("$('token').innerText")
        assert number in browser.ask("document.querySelector('.numbers tr.on').innerText")
        assert browser.ask("document.querySelectorAll('.plot path.bold').length") == 1
        # colours rise with the numbers
        order = [v for v in rows if v is not None]
        if len(order) > 2:
            shares = [s for s, v in zip(browser.ask(SHARES), rows) if v is not None]
            assert all(a <= b + 0.02 for _, a, b in
                       ((i, shares[i], shares[j]) for i in range(len(order)) for j in range(len(order))
                        if order[i] <= order[j]))


@torch.no_grad()
def map_by_hand(model, ids, layer):
    """Attention rows of a plain GPT-2's layer, [heads, T, T], token by token in float64."""
    x = model.transformer.wte.weight[ids] + model.transformer.wpe.weight[:len(ids)]
    for block in model.transformer.h[:layer + 1]:
        h = F.layer_norm(x, x.shape[-1:], block.ln_1.weight, block.ln_1.bias)
        q, k, v = (h @ block.attn.c_attn.weight.T).chunk(3, -1)
        D, p, y = block.attn.head_size, [], []
        for head in range(block.attn.n_head):
            cut = slice(head * D, (head + 1) * D)
            rows = torch.zeros(len(ids), len(ids), dtype=torch.float64)
            for t in range(len(ids)):
                weights = torch.stack([(q[t, cut] * k[s, cut]).sum() / D ** 0.5 for s in range(t + 1)]).exp()
                rows[t, :t + 1] = weights / weights.sum()
            p.append(rows)
            y.append(rows @ v[:, cut])
        x = x + torch.cat(y, -1) @ block.attn.c_proj.weight.T
        h = F.layer_norm(x, x.shape[-1:], block.ln_2.weight, block.ln_2.bias)
        x = x + F.gelu(h @ block.mlp.c_fc.weight.T) @ block.mlp.c_proj.weight.T
    return torch.stack(p)


def test_in_a_browser_a_clicked_token_shows_what_each_head_reads(make, tmp_path, browser):
    """The page's rows, bands and strips are softmax(q k) by hand, to 8 bits of a row's highest weight."""
    path = make(n_layer=2, n_head=2, constraint_names=None)
    page = write_page(path, b"Hello you.", tmp_path, maps=True)
    line, = lines_of(page.with_suffix(".jsonl"))
    model = model_and_tokenizer(path, "cpu")[0].double()
    browser.open(page, 1200)
    for block in (0, 1):
        want = map_by_hand(model, line["ids"], block)
        assert np.allclose(line["series"][f"blocks.{block}.first_token"], want[:, :, 0], atol=2e-6)
        entropy = -(want * want.clamp_min(1e-30).log()).sum(-1)
        assert np.allclose(line["series"][f"blocks.{block}.entropy"], entropy, atol=1e-5)
        choose(browser, block=str(block))
        for t in (0, 7):
            browser.point(f"lines[0].panes[0].spans[{t}]", click=True)
            for head in (0, 1):
                row = want[head, t, :t + 1].numpy()
                assert np.allclose(line["maps"][str(block)][head][t], row, atol=2e-6)
                got = browser.ask(f"reads(lines[0], 0, {head}, {t})")
                assert np.abs(np.array(got) - row).max() <= row.max() / 509
                assert not np.allclose(got, want[1 - head, t, :t + 1], atol=0.01) or t == 0  # control
                browser.press(str(head))
                assert browser.ask(PICKED)[2] == str(head)
                band = browser.ask("lines[0].panes[0].spans.map(s => s.style.backgroundImage)")
                shares = [float(re.search(r"/ ([\d.]+)\)", b)[1]) if "/" in b else None for b in band]
                assert shares[t + 1:] == [None] * (len(band) - t - 1)
                assert np.allclose(shares[:t + 1], row / row.max(), atol=0.006)
                best = int(row.argmax())
                shown = browser.ask(f"document.querySelector('.rows').children[{3 * head + 2}].innerText")
                where = best - t or "itself"
                assert shown.startswith(f'"{line["tokens"][best]}" {where}: {row[best]:.2f}')
            browser.press("m")
            assert browser.ask("document.querySelectorAll('.maps canvas').length") == 2


def test_in_a_browser_keys_and_pointer_move_and_choose(make, tmp_path, browser):
    path = make(**FLAGS["two blocks, two heads"], routing="sigmoid")
    page = write_page(path, b"Hello you.\nTwo windows.", tmp_path)
    browser.open(page, 1280)
    # by Tab from the last control over the grid, which is one step, into the text; then the arrows
    browser.ask("$('stretch').focus()")
    for _ in range(3):
        browser.press("Tab")
    assert browser.ask(FOCUS) == browser.ask("opening()")
    for key, where in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("ArrowDown", 12),
                       ("ArrowUp", 1), ("End", 6), ("ArrowLeft", 5), ("Home", 0), ("PageDown", 0)):
        browser.press(key)
        assert browser.ask(FOCUS) == where, key
    assert browser.ask("document.activeElement.line.number") == 1
    word, number = browser.ask("$('live').textContent").rsplit(" ", 1)
    scores = lines_of(page.with_suffix(".jsonl"))[1]["blocks"]["2"]["probabilities"]["fair"]
    assert word == "score: fair" and float(number) == pytest.approx(scores[0], abs=6e-4)
    # letters choose: series, block (only those that have it), head
    assert browser.ask(PICKED) == ["constraint.fair", 2, "mean"]
    browser.press("b")
    assert browser.ask("state.block") == 0
    assert browser.ask("[...$('block').options].map(o => o.disabled)") == [False, True, False]
    choose(browser, series="entropy")
    for key, head in (("h", "0"), ("h", "1"), ("3", "3 fair"), ("m", "mean")):
        browser.press(key)
        assert browser.ask("state.head") == head, key
    browser.press("s")
    assert browser.ask("state.name") == "concentration"
    # a click in the grid, and arrows in it
    cells = "document.querySelectorAll('.grid td[tabindex]')"
    browser.point(f"{cells}[1]", click=True)
    assert browser.ask(PICKED) == ["concentration", 0, "1"]
    browser.ask(f"[...{cells}].find(c => c.tabIndex == 0).focus()")
    browser.press("ArrowDown")
    assert browser.ask(PICKED) == ["concentration", 1, "1"]
    # pointing at a word shows its mean and its tokens, and leaves the cursor
    choose(browser, series="nats")
    browser.point("lines[0].panes[0].spans[7]")
    nats = lines_of(page.with_suffix(".jsonl"))[0]["nats"][6:9]
    shown = browser.ask("$('word').innerText")
    found = re.fullmatch(r'Word "you": mean (\S+), sum (\S+) of y (\S+) · o (\S+) · u (\S+)', shown).groups()
    assert [*map(float, found)] == pytest.approx([np.mean(nats), sum(nats), *nats], abs=0.06)
    assert browser.ask("document.querySelectorAll('.text .word').length") == 3
    assert browser.ask("cursor.line.number") == 1
    # a click in the curve goes to its token
    browser.point("document.querySelector('.plot')", click=True)
    assert browser.ask(FOCUS) == round(6 / 2)
    # stretched, the lowest has no colour and the highest the deepest
    browser.point("$('stretch')", click=True)
    shares = browser.ask(SHARES)
    assert min(shares) == 0 and max(shares) == pytest.approx(0.6, abs=0.01)


def test_in_a_browser_the_page_opens_where_a_head_reads_one_other_token(make, tmp_path, browser):
    path = make(**FLAGS["two blocks, two heads"])
    page = write_page(path, b"Hello you.\nTwo windows.", tmp_path, maps=True)
    browser.open(page, 500)
    block, at = browser.ask("[state.block, cursor.index]")
    line = lines_of(page.with_suffix(".jsonl"))[0]
    of_constraints = line["blocks"][str(block)]["maps"].values()
    maps = [*line["maps"][str(block)], *(head for each in of_constraints for head in each)]
    most = {t: max(max(head[t][1:t - 1]) for head in maps) for t in range(3, len(line["ids"]))}
    assert most[at] == pytest.approx(max(most.values()), abs=4e-3), "not the first, nor the one before"
    # the axes of the maps and the scale of the curve are written beside them
    assert browser.ask("[...document.querySelectorAll('.maps figure')].every("
                       "f => f.innerText.includes('key') && f.innerText.includes('query'))")
    assert browser.ask("document.querySelector('.plot .top').getBoundingClientRect().right <= "
                       "document.querySelector('.plot svg').getBoundingClientRect().left")


def test_in_a_browser_two_checkpoints_stand_side_by_side(make, tmp_path, browser):
    paths = [make(name="a.pt", n_layer=2, constraint_names=None, block_size=24),
             make(name="b.pt", n_layer=1, constraint_names=None, acag="headwise", seed=1)]
    page = write_page(paths, b"Hello you.\nTwo windows.", tmp_path)
    lines = lines_of(page.with_suffix(".jsonl"))
    assert [(line["checkpoint"], line["first"]) for line in lines] == [
        (paths[0], 0), (paths[1], 0), (paths[0], 16), (paths[1], 16)]  # the shorter context
    assert data_of(page)["notes"] == ["Parts of 16 tokens, the shorter context."]
    for width in (1200, 390):
        browser.open(page, width)
        assert browser.ask("document.documentElement.scrollWidth") <= width
        lefts = browser.ask("[0, 1].map(p => lines[0].panes[p].spans[0].getBoundingClientRect().left)")
        assert (lefts[0] < lefts[1] - 200) == (width == 1200)
        browser.point("lines[0].panes[1].spans[4]", click=True)
        browser.press("ArrowRight")
        assert browser.ask("[...document.querySelectorAll('.cursor')].map(s => [s.pane, s.index])") == [
            [0, 5], [1, 5]]
        a, b = (line["nats"][5] for line in lines[:2])
        assert browser.ask("$('token').innerText").endswith(f"surprise, nats {a:.3f} | {b:.3f}")
        choose(browser, series="acag_gate")
        assert browser.ask("$('about').textContent").endswith(f"(not in {paths[0]})")
        assert browser.ask("$('token').innerText").endswith(
            f"– | {np.mean([row[5] for row in lines[1]['series']['blocks.0.acag_gate']]):.3f}")
        choose(browser, series="nats", block="1")  # which the second has not
        assert browser.ask("document.querySelectorAll('.maps').length") == 1
        highest = browser.ask("[...document.querySelectorAll('.plot .top')].map(x => x.innerText)")
        assert len(highest) == 2 and highest[0] == highest[1]  # one scale


def test_in_a_browser_any_text_is_text_and_every_width_fits(make, tmp_path, browser):
    names = ["a_name_that_is_long_beyond_all_measure", *"bcdefghi"]
    pages = [write_page(make(block_size=len(NASTY)), NASTY * 2, tmp_path, "nasty"),
             write_page(make(), b"x", tmp_path, "one"),
             write_page(make(constraint_names=names), b"x" * 99, tmp_path, "names")]
    for page in pages:
        for width, dark in ((390, True), (360, False), (1280, False)):
            browser.open(page, width, dark)
            assert browser.ask("document.documentElement.scrollWidth") <= width
            assert browser.ask("getComputedStyle(document.body).backgroundColor") == (
                "rgb(21, 24, 27)" if dark else "rgb(255, 255, 255)")
            assert browser.ask("[...document.querySelectorAll('body *')].every(x => ![...x.childNodes].some("
                               "n => n.nodeType == 3) || parseFloat(getComputedStyle(x).fontSize) >= 14)")
    browser.open(pages[0], 390)
    text = browser.ask("[...document.querySelectorAll('.text')].map(x => x.textContent).join('')")
    want = NASTY.decode("utf-8", "backslashreplace")
    want = want.replace("\u202e", "\\u202e").replace("\r", "\\u000d").replace("\0", "\\u0000")
    assert text == want * 2
    browser.ask("lines[0].panes[0].spans.forEach(go)")  # nor is it anything else in the readout
    assert browser.ask("document.querySelectorAll('main b, #token b, .rows b, #word b').length") == 0


def luminance(colour):
    """Relative luminance of WCAG 2 of (r, g, b), 0 to 255."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in np.array(colour) / 255]
    return np.dot(linear, (0.2126, 0.7152, 0.0722))


@pytest.mark.parametrize("dark", [False, True])
def test_in_a_browser_text_on_the_deepest_colours_is_readable(make, tmp_path, browser, dark):
    """Contrast of at least 4.5 (WCAG 2, AA), for the text and what is dim."""
    browser.open(write_page(make(), b"x", tmp_path), 390, dark)

    def rgb(script):
        return [float(v) for v in re.findall(r"[\d.]+", browser.ask(script))]

    style = "getComputedStyle(document.documentElement).getPropertyValue"
    ink, paper = (rgb(f"getComputedStyle(document.body).{key}") for key in ("color", "backgroundColor"))
    dim = rgb("getComputedStyle(document.querySelector('.dim')).color")
    soft = rgb("getComputedStyle($('readout')).backgroundColor")
    grounds = [(ink, paper), (ink, soft), (dim, paper), (dim, soft)]
    for name in ("plus", "minus"):
        colour = np.array(rgb(f"{style}('--{name}')"))
        grounds.append((ink, 0.6 * colour + 0.4 * np.array(paper)))
    for text, ground in grounds:
        light, deep = sorted((luminance(text), luminance(ground)), reverse=True)
        assert (light + 0.05) / (deep + 0.05) >= 4.5


def test_in_a_browser_16k_tokens_are_there_and_can_be_walked(make, tmp_path, browser):
    page = write_page(make(block_size=1024), b"many words " * 1500, tmp_path)
    browser.open(page, 390)
    assert browser.ask("document.querySelectorAll('.text span').length") == 16500
    browser.ask("lines[0].panes[0].spans[0].focus()")
    place = "(s => document.querySelector(s).getBoundingClientRect())"
    for key in ("End", "ArrowUp", "PageUp", "s"):
        browser.press(key)  # and the token stays in sight
        assert browser.ask(f"{place}('#bar').bottom < {place}('.cursor').top"), key
        assert browser.ask(f"{place}('.cursor').bottom < {place}('#readout').top"), key
    assert browser.ask("[document.activeElement.line.number, document.activeElement.index]") == [15, 0]
