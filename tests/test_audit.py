"""The audit: what the lines and the page say is what the heads said, token for token, in any browser."""
import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import sample
from evaluate import main
from model import GPT
from nanoheads.common import UserError
from nanoheads.heads import audit
from nanoheads.traces import explain
from nanoheads.training.sampling import model_and_tokenizer
from test_sample import make_checkpoint

NAMES = ["fair", "clear"]
FLAGS = {
    "one head": dict(constraint_names=NAMES),
    "two blocks, two heads": dict(n_layer=3, constraint_names=NAMES, constraint_heads=2,
                                  constraint_layers=[0, 2]),
    "one name, B": dict(n_embd=48, constraint_names=["fair"], constraint_variant="B"),
    "published": dict(constraint_names=NAMES, constraint_mode="published", recipe="modern", zero_init=False),
}
T, SOURCE = 16, ("a", [], "b")  # block_size; where a line comes from
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


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("n", [1, 5, T, 2 * T, 2 * T + 3])
def test_a_line_says_what_one_token_at_a_time_says(make, flags, n):
    model, tokenizer = model_and_tokenizer(make(**FLAGS[flags]), "cpu")
    model, ids = model.double(), list(random_text(n))
    text = audit.spell(tokenizer, ids)
    for start in range(0, n, T):
        line = audit.audit(model, text, SOURCE, maps=True, start=start, end=start + T)
        assert agree(said(line), slowly(model, ids[start:start + T]))
        assert line["first"] == start and line["nats"][0] is None and line["ids"] == ids[start:start + T]


def shifted(values):
    return [*values[1:], values[0]]


@pytest.mark.parametrize("wrong", ["logits", "probabilities", "head_logits", "gates", "maps", "nats",
                                   "names"])
def test_the_oracle_catches_a_shifted_line(make, wrong):
    model, tokenizer = model_and_tokenizer(make(**FLAGS["two blocks, two heads"]), "cpu")
    ids = list(random_text(9))
    line = audit.audit(model.double(), audit.spell(tokenizer, ids), SOURCE, maps=True)
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
    main(["--audit", "--ckpt", path, "--text", str(tmp_path / "t.txt"), "--out", str(out)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("t.txt: 37 tokens in 3 windows of 16, judged for fair, clear")
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
    main(["--audit", "--ckpt", path, "--text", str(tmp_path / "t.txt"), "--out", str(out), "--maps"])
    maps = lines_of(out)[0]["blocks"]["0"]["maps"]["fair"][0]
    assert [len(row) for row in maps] == list(range(1, T + 1))
    assert all(sum(row) == pytest.approx(1, abs=1e-4) for row in maps)


def test_heads_that_no_label_trained_say_so(make, tmp_path, capsys):
    """On the page, in the terminal, and under a sample; once a label has moved a score, nowhere."""
    (tmp_path / "t.txt").write_bytes(random_text(T))
    for trained in (False, True):
        path, out = make(trained=trained), tmp_path / "o.jsonl"
        main(["--audit", "--ckpt", path, "--text", str(tmp_path / "t.txt"), "--out", str(out)])
        sample.main(["--ckpt", path, "--start", "a", "--max_new_tokens", "3",
                     "--audit", str(tmp_path / "s.jsonl")])
        printed = capsys.readouterr().out
        assert printed.count(audit.UNTRAINED) == 2 * (not trained)
        for name in ("o.html", "s.html"):
            assert ((tmp_path / name).read_text().count(audit.UNTRAINED) == 1) != trained


@pytest.mark.parametrize("n", [3, T])
def test_the_top_tokens_are_those_of_explain(make, n):
    model, tokenizer = model_and_tokenizer(make(**FLAGS["two blocks, two heads"]), "cpu")
    line = audit.audit(model, audit.spell(tokenizer, list(b"abcdefghijklmnop"[:n])), SOURCE)
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
    text = audit.spell(tokenizer, list(b"some text"))
    line = audit.audit(model, text, SOURCE)
    gates, shown = line["blocks"]["0"]["gates"], audit.for_page(line, text.raw)["blocks"]["0"]["gates"]
    for name in NAMES:
        (gate,), = gates[name]
        assert shown[name] == [[pytest.approx(gate, rel=1e-3)]]


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
    text = audit.spell(Pieces(*filter(None, pieces)),
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
    text = audit.spell(Pieces(*raw), range(len(raw)))
    assert [audit.printed(piece) for piece in raw] == ["a", r"\xc3", r"\xa9", r" \xe6", r"\x97\xa5", r"\xff"]
    assert audit.cells(dict(offsets=text.offsets), text.raw) == [
        ["a", 0, 0], ["é", 2, 1], [" 日", 4, 2], [r"\xff", 5, 4]]
    # a character that the end of a window cuts is shown as its bytes on both sides
    halves = [audit.cells(dict(offsets=text.offsets[cut]), text.raw[cut])
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


def test_what_was_set_counts_and_is_said(make, tmp_path):
    path, out = make(constraint_names=NAMES, n_layer=3), tmp_path / "o.jsonl"
    (tmp_path / "t.txt").write_text("some text")
    scores = []
    for settings in ([], ["--set", "gate.0.0=0", "--set", "gate.1.1=0"]):
        main(["--audit", "--ckpt", path, "--text", str(tmp_path / "t.txt"), "--out", str(out), *settings])
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


# ---- bad input: one line ----

@pytest.fixture
def files(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_text("abc\n")
    Path("empty.txt").write_text("")
    Path("latin1.txt").write_bytes(b"caf\xe9")
    Path("other.txt").write_text("abcZ")
    Path("folder.html").mkdir()
    make("char")
    make("char", "plain.pt", constraint_names=None)
    state = torch.load("a.pt", weights_only=True)
    state["model"]["transformer.h.0.attn.constraint.w2"].fill_(float("nan"))
    torch.save(state, "nan.pt")
    return tmp_path


@pytest.mark.parametrize("args, line", [
    (["--text", "nowhere.txt"], "--text: nowhere.txt cannot be read: No such file"),
    (["--text", "."], "--text: . cannot be read: Is a directory"),
    (["--text", "empty.txt"], "--text: empty.txt is empty"),
    (["--text", "latin1.txt"], "--text: latin1.txt is not UTF-8 text: unexpected end of data at byte 3"),
    (["--text", "other.txt"], "other.txt: 'Z' (U+005A) at position 3 is not among the 13 symbols"),
    (["--ckpt", "plain.pt"], "plain.pt has no constraint heads, and nothing to audit"),
    (["--ckpt", "nan.pt"], "nan.pt: its scores are not numbers: its weights are damaged"),
    (["--out", "no/such/folder.jsonl"], "--out: cannot write into"),
    (["--out", "."], "--out: "),
    (["--out", "folder.jsonl"], "folder.html is not a file"),
    (["--out", "o.html"], "o.html is the name of the page; the JSON lines need another, such as o.jsonl"),
    (["--text"], "--audit needs the text to read: --text FILE"),
    (["--text", "t.txt", "--ckpt", "a.pt"], "--audit reads with one checkpoint"),
    (["--stride", "3"], "--stride means nothing with --audit"),
    (["--json", "s.json"], "--json means nothing with --audit"),
    (["--split", "val"], "--split means nothing with --audit"),
    (["--dataset", "toy"], "--dataset means nothing with --audit"),
    (["--text", "t.txt", "--out", "t.txt"], "--out: t.txt is the text itself, and would be lost"),
    (["--text", "t.html", "--out", "t.jsonl"], "--out: t.html is the text itself, and would be lost"),
    (["--samples", "3"], "--samples means nothing with --audit"),
])
def test_bad_input_is_one_clear_line(files, refusal, args, line):
    before = set(files.iterdir())
    more = [] if "--text" in args else ["--text", "t.txt"]
    more += ["--ckpt", "a.pt"] if "--ckpt" not in args or line.startswith("--audit reads") else []
    assert line in refusal(["--audit", *more, *args])
    assert set(files.iterdir()) == before  # nothing is left behind


def test_the_program_of_its_own_writes_the_same_files(files, capsys):
    options = ["--ckpt", "a.pt", "--text", "t.txt", "--maps"]
    main(["--audit", *options, "--out", "e.jsonl"])
    audit.main([*options, "--out", "p.jsonl"])
    shown = capsys.readouterr().out.splitlines()
    assert [line.replace("/e.", "/p.") for line in shown[:3]] == shown[3:]
    assert Path("e.jsonl").read_bytes() == Path("p.jsonl").read_bytes()
    assert Path("e.html").read_bytes() == Path("p.html").read_bytes()


@pytest.mark.parametrize("args, line", [
    (["--ckpt", "a.pt", "--text", "nowhere.txt"], "probe.py audit: --text: nowhere.txt cannot be read"),
    (["--ckpt", "a.pt", "--ckpt", "a.pt", "--text", "t.txt"], "probe.py audit: --ckpt: one at a time, not 2"),
])
def test_the_program_of_its_own_refuses_in_one_line(files, args, line):
    with pytest.raises(SystemExit) as e:
        audit.main(args)
    assert e.value.code.startswith(line) and "\n" not in e.value.code


@pytest.mark.parametrize("args, line", [
    (["--text", "t.txt"], "--text t.txt: a file means nothing without --audit"),
    (["--maps"], "--maps means nothing without --audit"),
    (["--out", "o.jsonl"], "--out means nothing without --audit"),
])
def test_what_goes_with_an_audit_is_refused_without(files, refusal, args, line):
    assert line in refusal(["--ckpt", "a.pt", *args])


@pytest.mark.parametrize("args, line", [
    (["--ckpt", "a.pt", "--ckpt", "a.pt"], "sample: --audit takes one checkpoint"),
    (["--ckpt", "plain.pt"], "sample: plain.pt has no constraint heads"),
    (["--ckpt", "a.pt", "--audit", "no/such/s.jsonl"], "sample: --audit: cannot write into"),
    (["--ckpt", "a.pt", "--audit", "s.html"], "sample: --audit: s.html is the name of the page"),
])
def test_a_sample_that_cannot_be_audited_is_not_made(files, capsys, monkeypatch, args, line):
    monkeypatch.setattr(sample, "generate", lambda *a, **k: pytest.fail("generated"))
    with pytest.raises(SystemExit) as e:
        sample.main(["--audit", "s.jsonl", *args])
    assert e.value.code.startswith(line) and "\n" not in e.value.code and capsys.readouterr().out == ""


def test_an_old_audit_stays_when_the_new_one_fails(files, monkeypatch):
    Path("t.txt").write_text("abc" * T)
    Path("o.jsonl").write_text("old")
    calls = []

    def broken(*args, **more):
        calls.append(1)
        if len(calls) == 3:
            raise UserError("no more")
        return real(*args, **more)

    real = audit.audit
    monkeypatch.setattr(audit, "audit", broken)
    before = set(files.iterdir())
    with pytest.raises(UserError, match="no more"):
        audit.of_file(*model_and_tokenizer("a.pt", "cpu"), ("a.pt", [], "t.txt"), "o.jsonl")
    assert Path("o.jsonl").read_text() == "old" and set(files.iterdir()) == before


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


def write_page(path, raw, folder, name="page"):
    """The page of a text, by evaluate.py."""
    (folder / f"{name}.txt").write_bytes(raw)
    out = folder / f"{name}.jsonl"
    source = path, [], str(folder / f"{name}.txt")
    audit.of_file(*model_and_tokenizer(path, "cpu"), source, str(out))
    return out.with_suffix(".html")


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
        "noscript", "aside", "script"}
    policy = next(a["content"] for _, a in read.elements if a.get("http-equiv"))
    code = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == ("default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
                      f"script-src 'sha256-{code}'")
    assert not re.search(r"https?:|url\(|@import|innerHTML|eval\(", page.replace(data, ""))
    assert page.count(data) == 1


def test_a_token_cannot_end_the_script_that_holds_it(make):
    model, tokenizer = model_and_tokenizer(make(), "cpu")
    text = audit.spell(tokenizer, list(b"ab"))
    line = audit.for_page(audit.audit(model, text, SOURCE), text.raw)
    line["cells"][0][0] = evil = "</script><!--<script><b>\u2028"
    read = Reader(audit.page([line], "a"))
    assert len(read.scripts) == 2 and json.loads(read.scripts[0])["lines"][0]["cells"][0][0] == evil


def test_the_page_says_what_the_lines_say(make, tmp_path):
    page = write_page(make(**FLAGS["two blocks, two heads"]), b"plain text of two windows", tmp_path)
    shown = json.loads(Reader(page.read_text()).scripts[0])["lines"]
    for line, found in zip(lines_of(page.with_suffix(".jsonl")), shown, strict=True):
        assert [text for text, _, _ in found["cells"]] == line["tokens"]
        for block, part in line["blocks"].items():
            for name in NAMES:
                assert found["blocks"][block]["logits"][name] == pytest.approx(part["logits"][name], rel=1e-3)
                assert np.allclose(found["blocks"][block]["gates"][name], part["gates"][name], rtol=1e-3)


def test_a_long_text_has_its_beginning_on_the_page(make, tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "PAGE_TOKENS", 40)
    page = write_page(make(), b"x" * 100, tmp_path)
    data = json.loads(Reader(page.read_text()).scripts[0])
    assert len(data["lines"]) == 2 and data["note"] == "The first 32 of 100 tokens; page.jsonl has them all."
    assert len(lines_of(page.with_suffix(".jsonl"))) == 7


# ---- a browser ----

BROWSER = next(filter(None,
                      map(shutil.which,
                          ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None)
CODES = dict(Tab=9, PageUp=33, PageDown=34, End=35, Home=36,
             ArrowLeft=37, ArrowUp=38, ArrowRight=39, ArrowDown=40)
LAUNCH = """import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])"""  # the browser listens on descriptor 3 and answers on 4


class Browser:
    """A headless Chromium, spoken to over a pipe (the DevTools protocol): real clicks, real keys."""

    def __init__(self, folder):
        theirs, self.send = os.pipe()
        self.receive, back = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(theirs), str(back), BROWSER, "--headless", "--no-sandbox",
             "--disable-gpu", "--hide-scrollbars", "--disable-background-networking",
             "--remote-debugging-pipe", f"--user-data-dir={folder}"],
            pass_fds=(theirs, back), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs)
        os.close(back)
        self.unread, self.number, self.session, self.events = b"", 0, {}, []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        attached = self("Target.attachToTarget", targetId=target, flatten=True)
        self.session = dict(sessionId=attached["sessionId"])
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method, **params):
        self.number += 1
        message = dict(id=self.number, method=method, params=params, **self.session)
        os.write(self.send, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.unread:
                block = os.read(self.receive, 1 << 16)
                assert block, "the browser is gone"
                self.unread += block
            answer, _, self.unread = self.unread.partition(b"\0")
            answer = json.loads(answer)
            if answer.get("id") == self.number:
                return answer["result"]
            self.events.append(answer)

    def ask(self, script):
        found = self("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, path, width, dark=False):
        self("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=False)
        scheme = dict(name="prefers-color-scheme", value="dark" if dark else "light")
        self("Emulation.setEmulatedMedia", features=[scheme])
        self("Page.navigate", url=Path(path).as_uri())
        end = time.monotonic() + 30
        while not self.ask("location.protocol == 'file:' && document.readyState == 'complete'"):
            assert time.monotonic() < end, "the page does not load"

    def press(self, key):
        typed = dict(text=key) if len(key) == 1 else {}
        for kind, more in (("keyDown", typed), ("keyUp", {})):
            self("Input.dispatchKeyEvent", type=kind, key=key,
                 windowsVirtualKeyCode=CODES.get(key, ord(key[0])), **more)

    def point(self, script, click=False):
        """The mouse to the middle of an element, and a click there."""
        self.ask(f"{script}.scrollIntoView({{block: 'center'}})")
        x, y = self.ask(f"(r => [r.left + r.width / 2, r.top + r.height / 2])"
                        f"({script}.getBoundingClientRect())")
        self("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def close(self):
        self.process.terminate()
        self.process.wait()
        os.close(self.send)
        os.close(self.receive)


@pytest.fixture
def browser(tmp_path):
    if not BROWSER:
        pytest.skip("no Chromium or Chrome is installed, so no page can be opened")
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()
    said = "Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"
    assert not [event for event in browser.events if event["method"] in said]
    asked = [event["params"]["request"]["url"] for event in browser.events
             if event["method"] == "Network.requestWillBeSent"]
    assert asked and all(url.startswith("file:") and url.endswith(".html") for url in asked)


# how much of its colour each token has for the first layer that is on
SHARES = (r"(l => l.spans.map(s => /rgba?\(\d+, \d+, \d+(?:, ([\d.]+))?\)/.exec(s.style.backgroundImage))"
          ".map(found => Number(found[1] ?? 1)))")
CURSOR = "document.activeElement.index"
READ = "document.querySelector('#readout').innerText"
LAYERS = "getComputedStyle(lines[0].spans[2]).backgroundImage.split('linear-gradient').length - 1"


def test_in_a_browser_switches_keys_and_pointer_show_the_scores(make, tmp_path, browser):
    page = write_page(make(**FLAGS["two blocks, two heads"]), b"Hello you.\nTwo windows.", tmp_path)
    first, second = lines_of(page.with_suffix(".jsonl"))
    browser.open(page, 1280)

    def is_read(line, t, block="2"):
        shown, part = browser.ask(READ), line["blocks"][block]
        assert f"Token {line['first'] + t} " in shown and f"block {block}" in shown
        for name in NAMES:
            gates = " ".join(f"{head[t]:.2f}" for head in part["gates"][name])
            row = f"{name}\t{part['probabilities'][name][t]:.3f}\t{part['logits'][name][t]:.2f}\t{gates}"
            same = re.search(rf"{name}\t(\S+)\t(\S+)\t(\S+) (\S+)", shown).groups()
            assert [float(v) for v in same] == pytest.approx([float(v) for v in row.split()[1:]], abs=0.011)

    # layers are switched by a click and by a digit, and so are the strips
    assert browser.ask(LAYERS) == 2 and browser.ask("document.querySelectorAll('canvas').length") == 8
    browser.point("document.querySelector('#layer-0')", click=True)
    assert browser.ask(LAYERS) == 1 and browser.ask("document.querySelectorAll('canvas').length") == 4
    assert browser.ask("document.querySelector('#layer-0').getAttribute('aria-pressed')") == "false"
    browser.press("2")
    assert browser.ask("getComputedStyle(lines[0].spans[2]).backgroundImage") == "none"
    browser.press("1")
    browser.press("2")
    assert browser.ask(LAYERS) == 2
    # a deeper colour is a higher score
    shares = browser.ask(SHARES + "(lines[0])")
    assert np.allclose(shares, first["blocks"]["2"]["probabilities"]["fair"], atol=1e-2)
    # the pointer shows a token, and leaves the cursor where it was
    browser.point("lines[1].spans[3]")
    is_read(second, 3)
    # one step by Tab from the last control into the text, then the arrows
    browser.ask("document.querySelector('#stretch').focus()")
    browser.press("Tab")
    assert browser.ask(CURSOR) == 0
    is_read(first, 0)
    for key, where in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("ArrowDown", 12),
                       ("ArrowUp", 1), ("End", 6), ("ArrowLeft", 5), ("Home", 0), ("PageDown", 0)):
        browser.press(key)
        assert browser.ask(CURSOR) == where, key
    is_read(second, 0)
    scores = second["blocks"]["2"]["probabilities"]
    words = ", ".join(f"{name} {scores[name][0]:.2f}" for name in NAMES)
    assert browser.ask("document.querySelector('#live').textContent") == words
    # the other block
    browser.ask("document.querySelector('#block').focus()")
    browser.press("0")  # which is what a select listens to
    is_read(second, 0, "0")
    # stretched, the lowest score has no colour and the highest the deepest
    browser.ask("document.querySelector('#stretch').click()")
    shares = browser.ask(f"lines.flatMap({SHARES})")
    assert min(shares) == 0 and max(shares) == 1


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
    assert browser.ask("document.querySelectorAll('main b').length") == 0


def test_in_a_browser_16k_tokens_are_there_and_can_be_walked(make, tmp_path, browser):
    page = write_page(make(block_size=1024), b"many words " * 1500, tmp_path)
    browser.open(page, 390)
    assert browser.ask("document.querySelectorAll('.text span').length") == 16500
    browser.ask("lines[0].spans[0].focus()")
    place = "(s => document.querySelector(s).getBoundingClientRect())"
    for key in ("End", "ArrowUp", "PageUp", "1"):
        browser.press(key)  # and the token stays in sight
        assert browser.ask(f"{place}('#bar').bottom < {place}(':focus').top"), key
        assert browser.ask(f"{place}(':focus').bottom < {place}('#readout').top"), key
    assert browser.ask("[document.activeElement.line.number, document.activeElement.index]") == [15, 0]
