"""lab.probe look: lines, table and picture say of a text what the model did, token for token."""
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F

import sample
from helpers import make_checkpoint, small_models, tiny
from lab_helpers import make_labelled_checkpoint
from model import MECHANISMS
from nanoheads import checkpoint, own_mechanism
from nanoheads.pruning import prune_heads
from nanoheads.sampling import model_and_tokenizer
from nanoheads.tasks import TaskData
from nanoheads.traces import explain
from lab.heads import look

NAMES = ["fair", "clear"]
FLAGS = {
    "one head": dict(constraint_names=NAMES),
    "two blocks, two heads": dict(n_layer=3, constraint_names=NAMES, constraint_heads=2,
                                  constraint_layers=[0, 2]),
    "published": dict(constraint_names=NAMES, constraint_mode="published", recipe="modern", zero_init=False),
}
T = 16  # block_size
PNG = b"\x89PNG"


@pytest.fixture
def make(tmp_path):
    """make(encoding="byte", **flags) -> path of a checkpoint with constraint heads that labels have moved."""
    def call(encoding="byte", name="a.pt", trained=True, **flags):
        make = make_labelled_checkpoint if trained else make_checkpoint
        return make(tmp_path / name, encoding, **{**FLAGS["one head"], **flags})
    return call


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def line_of(model, ids, **how):
    """The JSON line of token ids, bytes; model: itself or its Viewer."""
    viewer = model if isinstance(model, look.Viewer) else look.Viewer(model, "a")
    text = look.Text(ids, [bytes([i]) for i in ids], [[i, i + 1] for i in range(len(ids))])
    return look.look(viewer, text, "b", **how).line


def random_text(n, symbols=256):
    return np.random.default_rng(0).integers(0, symbols, n).astype(np.uint8).tobytes()


# ---- lines ----

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


@pytest.mark.parametrize("flags", FLAGS)
def test_a_line_says_what_one_token_at_a_time_says(make, flags):
    """Of each window of a text; and explain() names the tokens with the highest scores."""
    model, tokenizer = model_and_tokenizer(make(**FLAGS[flags]), "cpu")
    ids = list(random_text(T + 3))
    text, viewer = look.spell(tokenizer, ids), look.Viewer(model.double(), "a")
    for start in (0, T):
        line = look.look(viewer, text, "b", maps=True, start=start, end=start + T).line
        got, want = said(line), slowly(model, ids[start:start + T])
        assert got.keys() == want.keys()
        for key, value in want.items():  # logits of the language model are float32
            assert got[key] == pytest.approx(value, abs=2e-5 if key[0] == "nats" else 2e-6), key
        assert line["first"] == start and line["nats"][0] is None and line["ids"] == ids[start:start + T]
        with torch.no_grad():
            traces = model(torch.tensor([line["ids"]]), traces=True).traces
        assert line["explain"] == [row for name in viewer.names
                                   for row in explain(traces, line["tokens"], name).split("\n")]
        for row in line["explain"]:
            name, block = re.match(r"(\w+) \(block (\d)\)", row).groups()
            top, scores = (line["blocks"][block][key][name] for key in ("top", "logits"))
            assert [x["logit"] for x in top] == sorted(scores, reverse=True)[:5]
            assert all(scores[x["token"]] == x["logit"] and line["tokens"][x["token"]] == x["text"]
                       for x in top)


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
        **dict.fromkeys(("agency_utilisation", "agency_last_signal"), lambda x: x[:, None])}
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


def near(rows, want):
    """Whether series in a line are an array's numbers; NaN is null."""
    return np.allclose(np.array(rows, float), want, rtol=0, atol=2e-6, equal_nan=True)


@settings(max_examples=15)
@given(flags=small_models(), n=st.sampled_from([9, 4, 1]))
def test_series_are_the_traces_of_every_mechanism(flags, n):
    """Also where a text has as many tokens as a layer has heads, or one."""
    model, ids = tiny(flags, std=0.3, states=False), list(random_text(n, 37))
    line = line_of(model, ids, maps=True)
    with torch.no_grad():
        targets = torch.tensor([[*ids[1:], -1]])
        traces = model(torch.tensor([ids]), targets=targets, traces="maps").traces
    want = wanted(traces)
    assert line["series"].keys() == want.keys()
    for key, rows in line["series"].items():
        assert near(rows, want[key]), key
        assert key.startswith("a2c.") or len(line["heads"][key]) == len(rows)
    for block, heads in line["maps"].items():  # of the layer's own heads
        for rows, p in zip(heads, traces[f"blocks.{block}.map"][0]):
            assert all(near(row, p[t, :t + 1]) for t, row in enumerate(rows))


def test_heads_keep_their_numbers_when_others_are_pruned():
    model, ids = tiny(n_head=4, routing="sigmoid", routing_top_k=3, constraint_names=["fair"],
                      states=False), list(random_text(9, 37))
    whole = line_of(model, ids)
    prune_heads(model, {0: [1]})
    line = line_of(model, ids)
    assert line["heads"]["blocks.0.entropy"] == line["heads"]["blocks.0.selected"] == [0, 2, 3]
    assert line["heads"]["blocks.1.entropy"] == [0, 1, 2, 3, 4]  # with the constraint head
    for name in ("entropy", "routing_weights"):
        kept = [whole["series"][f"blocks.0.{name}"][h] for h in (0, 2, 3)]
        assert near(line["series"][f"blocks.0.{name}"], kept)
    prune_heads(model, {0: [0, 2, 3]})  # none is left
    line = line_of(model, ids)
    assert look.picture([look.Viewer(model, "a")], ids, "b")
    assert not [key for key in line["series"] if key.startswith("blocks.0.")]
    assert line["heads"]["blocks.1.entropy"] == [0, 1, 2, 3, 4]
    shared = line_of(tiny(routing="moh", routing_shared=1, n_head=4), ids)
    assert shared["heads"]["blocks.0.routing_logits"] == [1, 2, 3]


OWN = '''"""Traces of several shapes."""
from nanoheads.mechanism import Mechanism, flag

class Shapes(Mechanism):
    """It changes nothing."""
    class Options:
        shapes: bool = flag(False, "trace")
    name = flag = "shapes"
    modes = {"shapes": dict(shapes=True)}
    neutral = {"shapes": {}}
    no_effect_because = "it only traces"

    def after_attention(self, attn, heads):
        x, y = heads.x, heads.y
        heads.traces.update(of_heads=y[0].mean((1, 2)), of_tokens=y.mean((1, 3)), of_both=y.mean(-1).mT,
                            pairs=x @ x.mT, wide=y[..., :5], one=x.sum())
'''


def test_traces_of_a_mechanism_of_ones_own_are_shown_by_their_shape(tmp_path, own_mechanisms_go):
    """[H], [B, T] and [B, T, H] are; a trace of another shape is left out, and named."""
    (tmp_path / "mine.py").write_text(OWN)
    own_mechanism.add(tmp_path / "mine.py")
    model, ids = tiny(shapes=True), list(random_text(9, 37))
    viewer = look.Viewer(model, "a")
    line = line_of(viewer, ids)
    with torch.no_grad():
        traces = model(torch.tensor([ids]), traces=True).traces
    for block in (0, 1):
        series = {key.split(".")[2]: rows for key, rows in line["series"].items()
                  if key.startswith(f"blocks.{block}.")}
        of_heads, of_tokens, of_both = (traces[f"blocks.{block}.{name}"]
                                        for name in ("of_heads", "of_tokens", "of_both"))
        assert near(series["of_heads"], of_heads[:, None]) and near(series["of_both"], of_both[0].T)
        assert near(series["of_tokens"], of_tokens[0]) and not {"pairs", "wide", "one"} & series.keys()
    assert viewer.left_out == {"pairs", "wide", "one"}


# ---- tokens as text ----

class Pieces:
    """A tokenizer whose tokens are pieces of bytes, as GPT-2's are."""

    def __init__(self, pieces):
        self.pieces, self.vocab_size = pieces, len(pieces)

    def decode_bytes(self, ids):
        return b"".join(self.pieces[i] for i in ids)


@settings(max_examples=25)
@given(pieces=st.lists(st.sampled_from([b"a ", b"\n", "é".encode(), "日本".encode(), "😀".encode(), b"\xff",
                                        b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80", b""]), min_size=1))
def test_offsets_are_the_characters_that_a_token_has_bytes_of(pieces):
    """Also of tokens that are parts of a character, or beyond the vocabulary: those have no bytes."""
    known = [piece for piece in pieces if piece]
    ids = [known.index(piece) if piece else len(known) for piece in pieces]
    text, owners, at = look.spell(Pieces(known), ids), [], 0  # of each byte: the character it belongs to
    for number, character in enumerate(b"".join(pieces).decode("utf-8", "surrogateescape")):
        owners += [number] * len(character.encode("utf-8", "surrogateescape"))
    for piece, (begin, end) in zip(pieces, text.offsets):
        assert list(range(begin, end)) == sorted(set(owners[at:at + len(piece)]))
        at += len(piece)
    assert text.raw == pieces and at == len(owners)


def test_bytes_that_are_no_text_are_escaped():
    raw = [b"a", b"\xc3", b"\xa9", b" \xe6", b"\x97\xa5", b"\xff"]
    assert [look.decode(piece) for piece in raw] == ["a", r"\xc3", r"\xa9", r" \xe6", r"\x97\xa5", r"\xff"]


# ---- the command ----

def test_two_checkpoints_read_a_file_once_from_end_to_end(make, tmp_path, capsys):
    """Lines in turn, of the shorter context, one picture; --json has the mean of each series."""
    paths = [make(block_size=24), make(name="b.pt", sentinel="sigmoid", seed=1)]
    raw, file, out = random_text(2 * T + 5), tmp_path / "t.txt", tmp_path / "o.jsonl"
    file.write_bytes(raw)
    look.main(["--ckpt", paths[0], "--ckpt", paths[1], "--text", str(file), "--out", str(out), "--maps",
               "--json", str(tmp_path / "found.json")])
    printed = capsys.readouterr().out
    assert f"{file}: 37 tokens in 3 windows of 16\n" in printed
    assert "\nWindows of 16 tokens, the shorter context.\n" in printed
    assert all(f"\n{path}, the first window: " in printed for path in paths)
    assert printed.splitlines()[-3:] == [str(out), str(tmp_path / "o.png"), str(tmp_path / "found.json")]
    assert (tmp_path / "o.png").read_bytes().startswith(PNG)
    lines = lines_of(out)
    assert [(line["checkpoint"], line["first"], line["text"]) for line in lines] == [
        (path, first, str(file)) for first in (0, 16, 32) for path in paths]
    found = json.loads((tmp_path / "found.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert (found["tokens"], found["windows"], found["lines"]) == (37, 3, str(out))
    for number, run in enumerate(found["runs"]):
        lines, means = lines_of(out)[number::2], run["means"]
        assert run["ckpt"] == paths[number] and bytes(i for line in lines for i in line["ids"]) == raw
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
        maps = lines[0]["blocks"]["0"]["maps"]["fair"][0]
        assert [len(row) for row in maps] == list(range(1, T + 1))
        assert all(sum(row) == pytest.approx(1, abs=1e-4) for row in maps)
    assert "blocks.0.gates.sentinel" in found["runs"][1]["means"]


def test_the_table_has_the_means_over_blocks_and_heads(make, tmp_path, capsys):
    path, out = make(**FLAGS["two blocks, two heads"], acag="headwise"), tmp_path / "o.jsonl"
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


def test_what_a_reader_should_know_is_noted(make, tmp_path, capsys, monkeypatch):
    """Heads that no label trained, a router that acts in training alone, maps that memory does not hold."""
    (tmp_path / "t.txt").write_bytes(b"x" * T)

    def notes(**flags):
        look.main(["--ckpt", make(**flags), "--text", str(tmp_path / "t.txt"), "--out",
                   str(tmp_path / "o.jsonl"), "--json", str(tmp_path / "o.json")])
        found, printed = json.loads((tmp_path / "o.json").read_text())["notes"], capsys.readouterr().out
        assert all(f"\n{note}\n" in printed for note in found)
        return " ".join(found)

    assert notes() == ""
    assert "No label has trained these heads" in notes(trained=False)
    sample.main(["--ckpt", make(trained=False), "--start", "a", "--max_new_tokens", "3", "--audit",
                 str(tmp_path / "s.jsonl")])
    assert "No label has trained these heads" in capsys.readouterr().out
    assert "router acts in training alone" in notes(constraint_names=None, **MECHANISMS["routing_published"])
    monkeypatch.setattr(look, "FLOATS", 2 * T * T - 1)
    assert "would not fit into memory" in notes(constraint_names=None)
    line, = lines_of(tmp_path / "o.jsonl")
    assert "blocks.0.first_token" not in line["series"] and "blocks.0.entropy" in line["series"]


def test_one_token_has_no_mean_of_what_no_token_has(make, tmp_path):
    found = tmp_path / "found.json"
    look.main(["--ckpt", make(), "--start", "a", "--out", str(tmp_path / "o.jsonl"), "--json", str(found)])
    found = json.loads(found.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert found["tokens"] == 1 and found["runs"][0]["means"]["nats"] is None


def test_what_was_set_counts_and_is_said(make, tmp_path, capsys):
    path, out = make(n_layer=3), tmp_path / "o.jsonl"
    scores = []
    for more in ([], ["--set", "gate.0.0=0", "--set", "gate.1.1=0"]):
        look.main(["--ckpt", path, "--start", "some text", "--out", str(out), *more])
        line, = lines_of(out)
        assert line["set"] == more[1::2]
        scores.append(line["blocks"]["2"]["logits"]["fair"])
    assert scores[0] != scores[1]
    assert "a.pt, gate.0.0=0, gate.1.1=0, the first window: " in capsys.readouterr().out
    sample.main(["--ckpt", path, "--set", "gate.0.0=0", "--max_new_tokens", "2", "--audit", str(out)])
    assert lines_of(out)[0]["set"] == ["gate.0.0=0"]


def test_an_old_audit_stays_when_the_new_one_fails(make, tmp_path):
    """The second window is the first that reads weights whose sum is beyond all numbers."""
    path, out = make("char"), tmp_path / "o.jsonl"
    state = torch.load(path)
    state["model"]["transformer.wte.weight"][4] = state["model"]["transformer.wpe.weight"][0] = 3e38
    torch.save(state, path)
    (tmp_path / "t.txt").write_text("ab" * (T // 2) + "cab")
    out.write_text("old")
    before = set(tmp_path.iterdir())
    with pytest.raises(SystemExit, match="its weights are damaged"):
        look.main(["--ckpt", path, "--text", str(tmp_path / "t.txt"), "--out", str(out)])
    assert out.read_text() == "old" and set(tmp_path.iterdir()) == before


def test_lines_are_rows_of_a_task(task_run, tmp_path):
    out, data = tmp_path / "rows.jsonl", TaskData(checkpoint.read(task_run)["meta"]["task"], 24)
    look.main(["--ckpt", str(task_run), "--levels", "1,5", "--out", str(out)])
    assert [line["ids"] for line in lines_of(out)] == [data.rows("test", level, 1, 24)[0][0].tolist()
                                                       for level in (1, 5)]
    sample.main(["--ckpt", str(task_run), "--levels", "1,3", "--audit", str(out)])
    assert [line["ids"] for line in lines_of(out)] == [data.rows("test", level, 1, 12, 1337)[0][0].tolist()
                                                       for level in (1, 3)]


# ---- samples ----

@pytest.mark.parametrize("flags", [{}, dict(constraint_names=None, a2c="key_bias")], ids=["scores", "none"])
def test_samples_are_what_they_are_without_an_audit_and_audited_with_their_prompt(make, tmp_path, capsys,
                                                                                  flags):
    path, out = make("char", **flags), tmp_path / "s.jsonl"
    args = ["--ckpt", path, "--start", "abc", "--num_samples", "2", "--max_new_tokens", "9"]
    sample.main(args)
    plain = capsys.readouterr().out
    sample.main([*args, "--audit", str(out)])
    shown, lines = capsys.readouterr(), lines_of(out)
    model, tokenizer = model_and_tokenizer(path, "cpu")
    assert shown.err.splitlines()[-2:] == [str(out), str(tmp_path / "s.png")]
    assert (tmp_path / "s.png").read_bytes().startswith(PNG)
    rest = shown.out
    for number, line in enumerate(lines, 1):
        text = "".join(line["tokens"])
        assert line["text"] == f"sample {number}" and len(line["ids"]) == 12 and line["prompt"] == 3
        assert text.startswith("abc") and text in plain and [*line["blocks"]] == ["0"] * (not flags)
        with torch.no_grad():
            traces = model(torch.tensor([tokenizer.encode(text).tolist()]), traces=True).traces
        under = "\n".join(explain(traces, line["tokens"], name) for name in NAMES if not flags)
        assert "\n".join(line["explain"]) == under
        rest = rest.replace(f"{text}\n\n{under}", text, 1) if under else rest
    assert rest == plain


def test_of_a_long_sample_the_last_block_is_audited_and_it_ends_before_its_stop(make, tmp_path, capsys):
    out = tmp_path / "s.jsonl"
    for n, first, prompt in ((30, 24, 0), (10, 4, 6)):
        sample.main(["--ckpt", make(), "--start", "abcdefghij", "--max_new_tokens", str(n), "--audit",
                     str(out)])
        line, = lines_of(out)
        assert (line["first"], len(line["ids"]), line["prompt"]) == (first, T, prompt)
    assert "".join(line["tokens"]).startswith("efghij")
    sample.main(["--ckpt", make("char"), "--start", "a", "--max_new_tokens", "40", "--num_samples", "4",
                 "--audit", str(out), "--stop"])
    printed, texts = capsys.readouterr().out, ["".join(line["tokens"]) for line in lines_of(out)]
    assert len(texts) == 4 and not any("\n" in text for text in texts)
    assert min(map(len, texts)) < T and all(text in printed for text in texts)


# ---- the picture ----

@pytest.mark.parametrize("name", ["plain", "sentinel"])
def test_the_picture_is_the_attention_maps_and_gates(name):
    """Each map over its highest weight, at its place; over it the number of the head and its mean gate."""
    model, ids = tiny(MECHANISMS.get(name, {}), n_head=4, n_embd=64, states=False), list(random_text(9, 37))
    viewer = look.Viewer(model, "a")
    ax, = look.picture([viewer], ids, "b").axes
    with torch.no_grad():
        traces = model(torch.tensor([ids]), traces="maps").traces
    grid, labels = ax.images[0].get_array().filled(np.nan), iter(text.get_text() for text in ax.texts)
    assert np.isfinite(grid).sum() == 45 * sum(block.attn.n_total for block in model.transformer.h)
    for number, block in enumerate(model.transformer.h):
        for i, p in enumerate(traces[f"blocks.{number}.map"][0].numpy()):
            cut = grid[11 * number + 2:11 * number + 11, 11 * i:11 * i + 9]
            for t in range(9):
                assert np.allclose(cut[t, :t + 1], p[t, :t + 1] / p.max()) and np.isnan(cut[t, t + 1:]).all()
            label, gate = next(labels), traces.get(f"blocks.{number}.gates.sentinel")
            assert label.split(" x ")[0] == f"{number}.{block.attn.all_head_ids()[i]}"
            if name == "sentinel":
                assert label.endswith(f" x {gate.flatten()[i].item():.2f}")
    assert name != "plain" or not any(" x " in text.get_text() for text in ax.texts)
