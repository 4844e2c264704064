"""What the lines, the table and the picture say of a text is what the model did, token for token."""
import functools
import json
import re
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
NASTY = "café 日本 😀\u202e\r\n".encode() + b"\xff\x00"


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
    return look.look(look.Viewer(model, "a"), text, "b", **how).line


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
    assert printed[-2:] == [str(out), str(tmp_path / "o.png")]
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")
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
def test_json_has_the_mean_of_each_series_and_the_picture(make, tmp_path, capsys):
    paths, raw = [make(), make(name="b.pt", sentinel="sigmoid")], random_text(2 * T + 5)
    (tmp_path / "t.txt").write_bytes(raw)
    out, found = tmp_path / "o.jsonl", tmp_path / "found.json"
    look.main(["--ckpt", paths[0], "--ckpt", paths[1], "--text", str(tmp_path / "t.txt"), "--out", str(out),
               "--json", str(found)])
    assert capsys.readouterr().out.splitlines()[-1] == str(found)
    found = json.loads(found.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert (found["text"], found["tokens"], found["windows"]) == (str(tmp_path / "t.txt"), 37, 3)
    assert (found["lines"], found["picture"]) == (str(out), str(tmp_path / "o.png"))
    assert [run["ckpt"] for run in found["runs"]] == paths
    for number, run in enumerate(found["runs"]):
        lines, means = lines_of(out)[number::2], run["means"]
        nats = [each for line in lines for each in line["nats"] if each is not None]
        assert len(nats) == 34 and means["nats"] == pytest.approx(np.mean(nats), abs=1e-5)
        of_constraints = {key for key in means if look.is_of_constraints(key)}
        assert of_constraints and means.keys() == {"nats", *lines[0]["series"]} | of_constraints
        for key, heads in lines[0]["heads"].items():
            for row, head in enumerate(heads):  # a gate has one number for all the tokens of a line
                values = [line["series"][key][row] for line in lines]
                values = [v if len(v) > 1 else v * len(line["ids"]) for v, line in zip(values, lines)]
                assert means[key][str(head)] == pytest.approx(np.mean(sum(values, [])), abs=1e-5)
        scores = [each for line in lines for each in line["blocks"]["0"]["probabilities"]["fair"]]
        assert means["blocks.0.constraint.fair"] == pytest.approx(np.mean(scores), abs=1e-5)
    assert "blocks.0.gates.sentinel" in found["runs"][1]["means"]


def test_json_of_one_token_has_no_mean_of_what_no_token_has(make, tmp_path, capsys):
    found = tmp_path / "found.json"
    look.main(["--ckpt", make(), "--start", "a", "--out", str(tmp_path / "o.jsonl"), "--json", str(found)])
    found = json.loads(found.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert found["tokens"] == 1 and found["runs"][0]["means"]["nats"] is None


@pytest.mark.slow
def test_heads_that_no_label_trained_say_so(make, tmp_path, capsys):
    """In the terminal, and under a sample; once a label has moved a score, nowhere."""
    (tmp_path / "t.txt").write_bytes(random_text(T))
    for trained in (False, True):
        path, out = make(trained=trained), tmp_path / "o.jsonl"
        look.main(["--ckpt", path, "--text", str(tmp_path / "t.txt"), "--out", str(out)])
        sample.main(["--ckpt", path, "--start", "a", "--max_new_tokens", "3",
                     "--audit", str(tmp_path / "s.jsonl")])
        printed = capsys.readouterr().out
        assert printed.count(look.UNTRAINED) == 2 * (not trained)


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
    for name, shown in zip(NAMES, seen.series["blocks.0.router_gates"].values, strict=True):
        (gate,), = seen.line["blocks"]["0"]["gates"][name]
        assert shown == [pytest.approx(gate, abs=1e-6)]


# ---- series ----

AGENCY = ("agency_utilisation", "agency_last_signal")


def wanted(traces):
    """What the series of a pass must be, trace by trace: {key: [heads, T or 1] or [T], an array}."""
    by_hand = {
        "entropy": lambda x: x[0], "concentration": lambda x: x[0], "gates.sink": lambda x: 1 - x[0, :, :, 0],
        "gates.acag": lambda x: x[0].mean(-1), "gates.output_gate": lambda x: x[0].mean(-1),
        "gates.router": lambda x: x[0].mean(-1), "gates.constraint": lambda x: x[0].mean(-1),
        "advantage": lambda x: x[0].T, "log_forget": lambda x: x[0].T,
        "routing_weights": lambda x: x[0].T, "selected": lambda x: x[0].T.double(),
        "routing_logits": lambda x: x[0].T,
        **dict.fromkeys(("gates.sentinel", "gates.agency", "gates.by_hand"), lambda x: x[:, 0]),
        **dict.fromkeys(AGENCY, lambda x: x[:, None])}
    found = {}
    for key, x in traces.items():
        name = key.split(".", 2)[-1] if key.startswith("blocks.") else key
        if name.startswith("a2c."):
            found[key] = torch.cat((x[0, :-1], torch.tensor([torch.nan])))
        elif name == "map":
            found[key.replace("map", "first_token")] = x[0, :, :, 0]
        elif name in by_hand:
            found[key.replace("gates.sink", "sink_mass")] = by_hand[name](x)
        else:
            assert name in ("head_scores", "router_gates") or name.startswith("constraint."), name
    return {key: x.numpy() for key, x in found.items()}


tiny = functools.partial(helpers.tiny, std=0.3, states=False, block_size=T, vocab_size=256, n_head=4,
                         n_embd=64)


def read_by(model, ids):
    """(its Viewer, the JSON line of token ids)."""
    viewer, raw = look.Viewer(model, "a"), [bytes([i]) for i in ids]
    return viewer, look.look(viewer, look.Text(ids, raw, [[i, i + 1] for i in range(len(ids))]), "b").line


def write_lines(path, raw, folder):
    """What look_at_text() gives for --json of a text as a checkpoint reads it; its files go to the folder."""
    model, tokenizer = model_and_tokenizer(path, "cpu")
    ids, files = tokenizer.encode(raw).tolist(), (folder / "lines.jsonl", folder / "lines.png")
    return look.look_at_text([look.Viewer(model, path)], tokenizer, ids, "text", files)[0]


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
            assert key.startswith("a2c.") or len(line["heads"][key]) == len(rows)
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
            assert line["series"]["blocks.1.gates.acag"][h][t] == pytest.approx(
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


def trace_too(monkeypatch, outputs, extra):
    """Have HeadNorm trace these, {name: function of y and x}, too; outputs gets each y."""
    def after(self, attn, heads):
        heads.traces.update({name: make(heads.y, heads.x) for name, make in extra.items()})
        outputs.append(heads.y[0])

    monkeypatch.setattr(HeadNorm, "after_attention", after)


def test_traces_of_a_mechanism_of_ones_own_are_shown_by_their_shape(monkeypatch):
    """[H], [B, T] and [B, T, H] are; a trace of another shape is left out."""
    extra = {"of_heads": lambda y, x: y[0].mean((1, 2)), "of_tokens": lambda y, x: y.mean((1, 3)),
             "of_both": lambda y, x: y.mean(-1).mT,
             "pairs": lambda y, x: x @ x.mT, "wide": lambda y, x: y[..., :5], "one": lambda y, x: x.sum()}
    outputs = []
    trace_too(monkeypatch, outputs, extra)
    viewer, line = read_by(tiny(head_norm=True), list(random_text(9)))
    for block, y in enumerate(outputs[-2:]):
        y, series = y.detach(), {key.split(".")[2]: rows for key, rows in line["series"].items()
                                 if key.startswith(f"blocks.{block}.")}
        assert same(series["of_heads"], y.mean((1, 2))[:, None]) and same(series["of_both"], y.mean(-1))
        assert same(series["of_tokens"], y.mean((0, 2)))
        assert not {"pairs", "wide", "one"} & series.keys()
    assert viewer.left_out == {"pairs", "wide", "one"}


def test_traces_that_are_left_out_are_named(monkeypatch, make, tmp_path):
    path = make(constraint_names=None, head_norm=True)
    trace_too(monkeypatch, [], {"one": lambda y, x: x.sum()})
    assert write_lines(path, b"text", tmp_path)["notes"] == [
        "Left out, since their shapes are none of [H], [B, T] and [B, T, H]: one."]


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


def test_maps_entropy_and_first_token_are_those_by_hand(make, tmp_path):
    path, out = make(n_layer=2, n_head=2, constraint_names=None), tmp_path / "o.jsonl"
    look.main(["--ckpt", path, "--start", "Hello you.", "--maps", "--out", str(out)])
    (line,), model = lines_of(out), model_and_tokenizer(path, "cpu")[0].double()
    for block in (0, 1):
        want = map_by_hand(model, line["ids"], block)
        assert np.allclose(line["series"][f"blocks.{block}.first_token"], want[:, :, 0], atol=2e-6)
        entropy = -(want * want.clamp_min(1e-30).log()).sum(-1)
        assert np.allclose(line["series"][f"blocks.{block}.entropy"], entropy, atol=1e-5)
        for head in (0, 1):
            for t, row in enumerate(line["maps"][str(block)][head]):
                assert np.allclose(row, want[head, t, :t + 1], atol=2e-6)
                assert not np.allclose(row, want[1 - head, t, :t + 1], atol=0.01) or t == 0  # control


def test_a_router_that_acts_in_training_alone_says_so(make, tmp_path):
    numbers = write_lines(make(constraint_names=None, **MECHANISMS["routing_published"]), b"text", tmp_path)
    assert numbers["notes"] == ["The router acts in training alone: it chooses nothing here."]
    numbers = write_lines(make(constraint_names=None, **MECHANISMS["routing_zero"]), b"text", tmp_path)
    assert numbers["notes"] == []


# ---- tokens as text ----

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


def test_bytes_that_are_no_text_are_escaped():
    raw = [b"a", b"\xc3", b"\xa9", b" \xe6", b"\x97\xa5", b"\xff"]
    assert [look.decode(piece) for piece in raw] == ["a", r"\xc3", r"\xa9", r" \xe6", r"\x97\xa5", r"\xff"]


# ---- samples ----

def test_samples_are_audited_with_their_prompt(make, tmp_path, capsys):
    path, out = make("char"), tmp_path / "s.jsonl"
    args = ["--ckpt", path, "--start", "abc", "--num_samples", "2", "--max_new_tokens", "9"]
    sample.main(args)
    plain = capsys.readouterr().out
    sample.main([*args, "--audit", str(out)])
    shown, lines = capsys.readouterr(), lines_of(out)
    model, tokenizer = model_and_tokenizer(path, "cpu")
    assert shown.err.splitlines()[-2:] == [str(out), str(tmp_path / "s.png")]
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
    line, = lines_of(out)
    assert {"a2c.value", "blocks.0.advantage", "blocks.0.first_token"} <= line["series"].keys()
    assert line["explain"] == [] and line["blocks"] == {}
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


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
def test_what_was_set_counts_and_is_said(make, tmp_path, capsys):
    path, out = make(constraint_names=NAMES, n_layer=3), tmp_path / "o.jsonl"
    (tmp_path / "t.txt").write_text("some text")
    scores = []
    for settings in ([], ["--set", "gate.0.0=0", "--set", "gate.1.1=0"]):
        look.main(["--ckpt", path, "--text", str(tmp_path / "t.txt"), "--out", str(out), *settings])
        line, = lines_of(out)
        assert line["set"] == settings[1::2]
        scores.append(line["blocks"]["2"]["logits"]["fair"])
    assert scores[0] != scores[1]
    assert "a.pt, gate.0.0=0, gate.1.1=0, the first window: " in capsys.readouterr().out
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


# ---- the table and the picture ----

@pytest.mark.parametrize("flags", [FLAGS["two blocks, two heads"],
                                   dict(constraint_names=None, a2c="temperature", acag="headwise")], ids=str)
def test_the_table_has_the_means_over_blocks_and_heads(make, tmp_path, capsys, flags):
    path, out = make(**flags), tmp_path / "o.jsonl"
    look.main(["--ckpt", path, "--start", "some\nwords", "--out", str(out)])
    (line,), printed = lines_of(out), capsys.readouterr().out.splitlines()
    head = next(i for i, row in enumerate(printed) if row.split()[:2] == ["token", "nats"])
    names, rows = printed[head].split()[1:], [row.split() for row in printed[head + 1:head + 11]]
    assert [row[:2] for row in rows] == [[str(i), repr(token)] for i, token in enumerate(line["tokens"])]
    columns = {"nats": [line["nats"]]}
    for key, values in line["series"].items():
        each = values if np.ndim(values) > 1 else [values]
        columns.setdefault(key.removeprefix("blocks.").lstrip("0123456789."), []).extend(each)
    for block in line["blocks"].values():
        for name in NAMES:
            columns.setdefault(f"constraint.{name}", []).append(block["probabilities"][name])
    assert {*columns} == {*names} - {"head_scores", "router_gates"} and len(names) > 3
    for name, values in columns.items():
        for t, row in enumerate(rows):
            each = [one[t] if len(one) > 1 else one[0] for one in values]
            shown = row[2 + names.index(name)]
            assert shown == "-" if None in each else float(shown) == pytest.approx(np.mean(each), abs=6e-4)


@pytest.mark.parametrize("name", ["plain", "sink", "diff", "window", "sentinel", "constraint_a"])
def test_the_picture_is_the_attention_maps_and_gates(name):
    """Each map over its highest weight, at its place; over it the number of the head and its mean gate."""
    model, ids = tiny(**MECHANISMS.get(name, {})), list(random_text(9))
    viewer = look.Viewer(model, "a")
    ax, = look.picture([viewer], ids, "b").axes
    with torch.no_grad():
        traces = model(torch.tensor([ids]), traces="maps").traces
    grid, labels = ax.images[0].get_array().filled(np.nan), iter(text.get_text() for text in ax.texts)
    assert np.isfinite(grid).sum() == 45 * sum(attn.n_total for attn in viewer.layers)
    for block, attn in enumerate(viewer.layers):
        for i, p in enumerate(traces[f"blocks.{block}.map"][0].numpy()):
            cut = grid[11 * block + 2:11 * block + 11, 11 * i:11 * i + 9]
            for t in range(9):
                assert np.allclose(cut[t, :t + 1], p[t, :t + 1] / p.max()) and np.isnan(cut[t, t + 1:]).all()
            label, gate = next(labels), traces.get(f"blocks.{block}.gates.sentinel")
            assert label.split(" x ")[0] == f"{block}.{attn.all_head_ids()[i]}"
            if name == "sentinel":
                assert label.endswith(f" x {gate.flatten()[i].item():.2f}")
    assert name != "plain" or not any(" x " in text.get_text() for text in ax.texts)


def test_two_checkpoints_have_lines_in_turn_and_one_picture(make, tmp_path, capsys):
    paths = [make(n_layer=2, constraint_names=None, block_size=24),
             make(name="b.pt", n_layer=3, constraint_names=None, acag="headwise", seed=1)]
    (tmp_path / "t.txt").write_bytes(b"Hello you.\nTwo windows.")
    out = tmp_path / "o.jsonl"
    look.main(["--ckpt", paths[0], "--ckpt", paths[1], "--text", str(tmp_path / "t.txt"), "--out", str(out)])
    assert [(line["checkpoint"], line["first"]) for line in lines_of(out)] == [
        (paths[0], 0), (paths[1], 0), (paths[0], 16), (paths[1], 16)]  # the shorter context
    printed = capsys.readouterr().out
    assert "\nWindows of 16 tokens, the shorter context.\n" in printed
    assert [f"\n{path}, the first window: " in printed for path in paths] == [True, True]
    viewers = [look.Viewer(model_and_tokenizer(path, "cpu")[0], path) for path in paths]
    figure = look.picture(viewers, [1, 2, 3], "t.txt")
    assert [ax.get_title().split(":")[0] for ax in figure.axes] == paths


def test_of_a_long_window_the_first_tokens_are_drawn(make, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(look, "DRAWN", 6)
    monkeypatch.setattr(look, "draw_maps", lambda ax, viewer, traces, n, T: drawn.append(T))
    write_lines(make(), b"x" * 2 * T, tmp_path)
    assert drawn == [6]


def test_heads_that_are_all_gone_leave_a_picture(tmp_path):
    model = tiny()
    prune_heads(model, {0: [0, 1, 2, 3]})
    look.write_picture(tmp_path / "a.png", [look.Viewer(model, "a")], [1, 2], "b")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_maps_that_memory_does_not_hold_are_not_made(make, tmp_path, monkeypatch):
    monkeypatch.setattr(look, "FLOATS", 2 * T * T - 1)
    numbers = write_lines(make(constraint_names=None), b"x" * T, tmp_path)
    line, = lines_of(numbers["lines"])
    assert numbers["notes"] == ["No attention to the first token: the maps of all blocks would not fit into "
                                "memory."]
    assert "blocks.0.first_token" not in line["series"] and "blocks.0.entropy" in line["series"]
