"""lab/label.py: labels stand at their tokens, follow from the text before, and are written whole."""
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from helpers import write_dataset
from lab.label import main
from nanoheads.common import UserError
from nanoheads.dataset import Dataset
from lab.labels import labellers, weak
from lab.labels.labellers import TASKS, Text, truth
from lab.labels.targets import UNKNOWN, Targets, decode, label_file

WIKI = """
 = Homarus = 

 Homarus is a lobster of H. americanus 's kind . It may grow to 60 cm ( 24 in )
and is caught by people who trade with each other . According to Dr. Smith it is blue !

 = = Life = = 

 Females were recently seen . Is that so ? They lived there , perhaps in May 1901 , and were happy . 
"""
PLAY = """First Citizen:
Before we proceed any further, hear me speak.

All:
Speak, speak.

First Citizen:
You are all resolved rather to die
Than to famish? I have three daughters.

MENENIUS:
It is the café of Élan, methinks.

CORIOLANUS:
Thanks. I'll repay thee; what is it
To them?
"""
LONG_LINE = "\n\n\n  " + "a long line, without a Break. " * 60 + "\n \t\n"
SLOW_PLAY = PLAY.replace("Speak, speak.", "Speak, speak. " * 30)
MIXED = (WIKI + "\n" + PLAY + "\n") * 3 + LONG_LINE + SLOW_PLAY + "\n" + WIKI + PLAY


def made(folder, text, encoding="byte"):
    """A Dataset of one text in all its splits."""
    vocab = sorted(set(text)) if encoding == "char" else None
    text = text if encoding != "byte" or isinstance(text, bytes) else text.encode()
    return Dataset(write_dataset(folder, dict.fromkeys(("train", "val", "test"), text), encoding, vocab))


@pytest.fixture
def mixed(tmp_path):
    return made(tmp_path / "mixed", MIXED)


def run(dataset, *args):
    """Label; {name.split: values, -1 unknown} of the set, which Targets must accept."""
    out = next((arg.removeprefix("--out=") for arg in args if arg.startswith("--out=")), args[0][5:])
    main([f"--dataset={dataset.dir}", *args])
    targets = Targets(dataset, out)
    return {f"{name}.{split}": decode(np.array(targets.codes(name, split))).numpy()
            for name in targets.names for split in targets.splits}


def refused(dataset, words, *args):
    with pytest.raises(SystemExit) as e:
        main([f"--dataset={dataset.dir}", *args])
    assert re.search(words, str(e.value)) and "\n" not in str(e.value), e.value


# ---- rules ----

def labelled(text, value, spans):
    """The stretches of a text that spans give a value, in order."""
    return [" ".join(text[a:b].split()) for a, b, v in spans if v == value]


def test_sentences_are_found_in_articles_and_plays():
    found = [" ".join(WIKI[a:b].split()) for a, b in weak.sentences(WIKI)]
    assert found == ["Homarus is a lobster of H. americanus 's kind .",
                     "It may grow to 60 cm ( 24 in ) and is caught by people who trade with each other .",
                     "According to Dr. Smith it is blue !", "Females were recently seen .", "Is that so ?",
                     "They lived there , perhaps in May 1901 , and were happy ."]
    found = [" ".join(PLAY[a:b].split()) for a, b in weak.sentences(PLAY)]
    assert found[2:] == ["You are all resolved rather to die Than to famish?", "I have three daughters.",
                         "It is the café of Élan, methinks.", "Thanks.",
                         "I'll repay thee; what is it To them?"]
    assert weak.sentences("Title Without End\n\nName:\n* an item.\n") == []


def test_rules_label_what_their_page_says():
    """Something to check; a word of exchange, or a third turn; a hedge, questions aside."""
    spans = weak.testifiability(WIKI)
    assert labelled(WIKI, 1, spans) == [
        "0 cm ( 24 in ) and is caught by people who trade with each other .",
        "Dr. Smith it is blue !", "901 , and were happy ."]
    assert labelled(WIKI, 0, spans) == [
        "Homarus is a lobster of H. americanus 's kind .", "It may grow to 6", "According to",
        "Females were recently seen .", "Is that so ?", "They lived there , perhaps in May 1"]
    assert labelled(PLAY, 1, weak.testifiability(PLAY)) == ["daughters."]

    third = ["You are all resolved rather to die Than to famish?", "I have three daughters."]
    thee = "thee; what is it To them?"
    other = PLAY.replace("First Citizen:\nYou", "Second Citizen:\nYou")
    far = PLAY.replace("Speak, speak.", "Speak, speak. " * (weak.WINDOW // 14))
    assert labelled(WIKI, 1, weak.reciprocity(WIKI)) == ["each other ."]  # after "trade with"
    assert labelled(PLAY, 1, weak.reciprocity(PLAY)) == [*third, thee]
    assert labelled(other, 1, weak.reciprocity(other)) == [thee]
    assert third[0] not in labelled(far, 1, weak.reciprocity(far))
    at = PLAY.index("You are")  # a text that begins there knows its speakers from what was before
    assert labelled(PLAY[at:], 1, weak.reciprocity(PLAY[at:], PLAY[:at]))[:2] == third

    spans = weak.decidability(WIKI)
    assert labelled(WIKI, 1, spans) == ["a lobster of H. americanus 's kind .", "recently seen .",
                                        "there , perhaps"]
    assert labelled(WIKI, 0, spans) == [
        "grow to 60 cm ( 24 in ) and is caught by people who trade with each other .",
        "in May 1901 , and were happy ."]
    assert labelled(PLAY, 0, weak.decidability(PLAY)) == ["."]  # after "methinks"
    whole = labelled(WIKI, 0, weak.decidability(WIKI, whole=True))
    assert whole[1] == "They lived there , perhaps in May 1901 , and were happy ."


@pytest.mark.parametrize("name", weak.LABELLERS)
def test_a_label_follows_from_the_text_up_to_it(name):
    """What a label says must not change with what comes later; labels of whole sentences do change."""
    text = WIKI + PLAY

    def changes(whole):
        count = 0
        full = labellers.paint(weak.LABELLERS[name](text, "", whole), len(text))
        for stop in range(1, len(text), 3):
            part = labellers.paint(weak.LABELLERS[name](text[:stop] + ".", "", whole), stop + 1)[:stop]
            both = (part != UNKNOWN) & (full[:stop] != UNKNOWN)
            count += int((part[both] != full[:stop][both]).any())
        return count

    assert changes(whole=False) == 0 and changes(whole=True) > 5


# ---- a known truth ----

def test_synthetic_truth_is_what_it_says():
    text = "Ab, e 1e (Capital. eee" + "x" * 70 + ",y,ee" + "q" * 65 + "Z"
    for i, c in enumerate(text):
        seen = text[max(0, i - 63):i + 1]
        marks = [c for c in seen if c in ",.;:?!()"]
        assert truth("comma", text)[i] == (marks[-1:] == [","])
        assert truth("parity", text)[i] == text[max(0, i - 7):i + 1].count("e") % 2
        behind = [k for k, c in enumerate(reversed(text[:i + 1])) if "A" <= c <= "Z"]
        assert truth("capital", text)[i] == pytest.approx(max(0, 1 - behind[0] / 16) if behind else 0)
    assert set(TASKS) == {"comma", "parity", "capital"}


def test_noise_turns_a_share_of_the_labels(mixed):
    clean, noisy, again, other = (
        run(mixed, "--by=synthetic", "--names", "a=comma", "b=capital", f"--out=set{i}", *more)
        for i, more in enumerate(([], ["--noise=0.1"], ["--noise=0.1"], ["--noise=0.1", "--seed=1"])))
    for name in clean:
        turned = noisy[name] != clean[name]
        np.testing.assert_allclose(noisy[name][turned], 1 - clean[name][turned], atol=1e-6)
        assert 0.07 < np.mean(turned) < 0.13
        assert (again[name] == noisy[name]).all() and (other[name] != noisy[name]).any()
    assert ((noisy["a.train"] != clean["a.train"]) != (noisy["b.train"] != clean["b.train"])).any()
    ends = [len(MIXED[:i + 1].encode()) - 1 for i in range(len(MIXED))]
    np.testing.assert_array_equal(clean["a.val"][ends], truth("comma", MIXED))
    assert not Targets(mixed, "set0").meta["weak"]


# ---- pieces ----

@pytest.mark.parametrize("encoding", ["byte", "gpt2"])
def test_no_label_knows_where_pieces_are_cut(tmp_path, encoding, request, monkeypatch):
    if encoding == "gpt2":
        request.getfixturevalue("gpt2_files")
    dataset = made(tmp_path / "data", MIXED, encoding)
    monkeypatch.setattr(labellers, "LONG", 300)  # tokens: some blocks are longer
    args = SimpleNamespace(names=None, reach=None, noise=0.2, seed=3)
    for kind in (labellers.Weak, labellers.Synthetic):
        found = []
        for size in (1, 90, 1 << 20):
            pieces = [*Text(dataset, size).pieces("train")]
            assert "".join(p.text for p in pieces) == MIXED and len(pieces) > 1
            assert [p.start for p in pieces[1:]] == [p.stop for p in pieces[:-1]]
            labels = [kind(args, dataset)(p) for p in pieces]
            found.append({name: np.concatenate([each[name] for each in labels]) for name in labels[0]})
        for name, codes in found[0].items():
            assert all((other[name] == codes).all() for other in found[1:])


def test_a_long_block_is_not_cut_inside_a_character(tmp_path, monkeypatch):
    monkeypatch.setattr(labellers, "LONG", 10)
    raw = "é€😀".encode() * 30 + b"\xe2\x82" + b"\x80" * 40 + b"\xff" + "é".encode() * 9
    for size in (1, 50, 1 << 20):
        cut = [*Text(made(tmp_path / f"{size}", raw), size).pieces("train")]
        assert "".join(p.text for p in cut) == raw.decode("utf-8", "surrogateescape")
        assert max(p.stop - p.start for p in cut) <= 13


# ---- a user's labels ----

def spans_file(folder, *rows, name="labels.jsonl"):
    (folder / name).write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return f"--file={folder / name}"


def span(start, end, value=1.0, name="truth"):
    return dict(name=name, start=start, end=end, value=value)


@pytest.mark.parametrize("encoding", ["byte", "char", "gpt2"])
def test_spans_of_characters_reach_their_tokens(tmp_path, encoding, request, monkeypatch):
    """The oracle goes through the text token by token; emoji are several GPT-2 tokens, and words are one."""
    if encoding == "gpt2":
        request.getfixturevalue("gpt2_files")
    monkeypatch.setattr(labellers, "LONG", 20)
    monkeypatch.setattr(labellers.Spans, "size", 20)  # tokens of a piece: spans go over several
    text = "Le café 😀😀 coûte 12 € à Élan.\n\nUn second paragraph, naïve.\n" * 3
    dataset = made(tmp_path / "data", text, encoding)
    ask = [(3, 7, 1.0), (8, 9, 0.25), (20, 21, 0.0), (40, 77, 0.5)]
    file = spans_file(tmp_path, *(span(*row) for row in ask), "", span(41, 60, 0.5))
    found = run(dataset, "--by=spans", file, "--split=val")["truth.val"]
    per_byte = []  # the character that each byte is part of
    for i, c in enumerate(text):
        per_byte += [i] * len(c.encode())
    at, several = 0, 0
    for i, token in enumerate(dataset.tokens("val")):
        size = len(dataset.tokenizer.decode_bytes([token]))
        held, at = per_byte[at:at + size], at + size
        want = {value for a, b, value in ask if any(a <= char < b for char in held)}
        assert found[i] == pytest.approx(want.pop() if want else -1, abs=0.5 / 254)
        several += len(set(held)) > 1 and any(a in held[1:] for a, _, _ in ask)
    assert at == len(text.encode()) and (several > 0) == (encoding == "gpt2")
    assert (found >= 0).sum() > 15


def test_scores_of_tokens_the_rest_and_a_file_for_each_split(mixed, tmp_path):
    n = len(mixed.tokens("val"))
    file = spans_file(tmp_path, dict(name="soft", token=5, values=[0.5, None, 1]), dict(
        name="soft", token=n - 1, value=0.0), dict(name="soft", token=5, value=0.5), span(0, 2, name="hard"),
        span(4, 6, None, name="hard"))
    found = run(mixed, "--by=spans", file, "--split=val")
    want = np.full(n, -1.0)
    want[[5, 7, n - 1]] = 0.5, 1, 0
    np.testing.assert_allclose(found["soft.val"], want, atol=1e-6)
    assert found["hard.val"][:7].tolist() == [1, 1, -1, -1, -1, -1, -1]
    other = spans_file(tmp_path, span(1, 2, 0.0, name="hard"), name="other.jsonl")
    found = run(mixed, "--by=spans", file, "--split=val", other, "--split=test", "--rest=0", "--out=zero")
    np.testing.assert_allclose(found["soft.val"], np.where(np.arange(n) == 6, -1, want.clip(0)), atol=1e-6)
    assert found["hard.val"][:7].tolist() == [1, 1, 0, 0, -1, -1, 0]
    assert (found["hard.test"] == 0).all() and (found["soft.test"] == 0).all()
    assert list(Targets(mixed, "zero").splits) == ["val", "test"] and not Targets(mixed, "zero").meta["weak"]


def test_a_byte_that_is_not_utf8_is_a_character(tmp_path):
    raw = b"\xc3\xa9\xff\xe2\x82a\xe2\x82\xacz\n"  # é, three strays, a, €, z
    found = run(made(tmp_path / "data", raw), "--by=spans", "--split=val",
                spans_file(tmp_path, span(1, 2), span(4, 5, 0.0), span(5, 6)))["truth.val"]
    assert found.tolist() == [-1, -1, 1, -1, -1, 0, 1, 1, 1, -1, -1]


@pytest.mark.parametrize("row, words", [
    (span(0, 10**9), "ends at 1,000,000,000; the split has [0-9,]+ characters"),
    (span(5, 5), "the span from 5 to 5 holds nothing"), (span(0, 5, 1.01), r"1.01 must be in \[0, 1\]"),
    (span(0, 5, True), "must be numbers from 0 to 1, or null"),
    (dict(span(0, 5), label="x"), "has the keys name, start, end, value, label where it needs"),
    (span(0, 5, name="a.b"), "'a.b' is no name"), ("{", "is not JSON"),
    (span(0, 5, np.nan), "is not JSON: NaN is no number; null: not labelled"),
    (dict(name="truth", token=1, value=1), "counts tokens, and line 1 counts characters for truth")],
    ids=lambda value: str(value)[:40])
def test_a_bad_line_is_refused_with_its_number(mixed, tmp_path, row, words):
    file = spans_file(tmp_path, span(0, 1), "", row)
    refused(mixed, f"labels.jsonl, line 3: .*{words}", "--by=spans", file, "--split=val")
    assert not (mixed.dir / "labels").exists()


def test_spans_that_overlap_must_agree(mixed, tmp_path):
    long, short, later = span(0, 100), span(10, 20), span(30, 40, 0.0)
    ask = "--by=spans", "--split=val", "--force"
    assert run(mixed, *ask, spans_file(tmp_path, long, short))["truth.val"][:101].sum() == 99  # -1 at the end
    scores = dict(name="truth", token=0, values=[0, 1]), dict(name="truth", token=1, value=0.9)
    for lines, *rows in (("1 and 3", long, short, later), ("1 and 3", later, short, long),
                         ("1 and 2", *scores)):
        refused(mixed, f"labels.jsonl, lines {lines}: spans of truth overlap and disagree", *ask,
                spans_file(tmp_path, *rows))
    run(mixed, *ask, spans_file(tmp_path, short, dict(later, start=20)))  # side by side
    run(mixed, *ask, spans_file(tmp_path, long, dict(later, name="other")))


# ---- the program ----

def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())
            if path.suffix != ".checked"}


def test_a_second_run_verifies_and_mends(mixed, capsys):
    first = run(mixed, "--by=weak", "--splits", "val")
    printed = capsys.readouterr().out
    assert "weak: not checked by a person" in printed and "already" not in printed
    assert "\ntestifiability  val" in printed and printed.count("{1}") > 3
    folder = mixed.dir / "labels/weak"
    before = files_of(folder)
    run(mixed, "--by=weak", "--splits", "val")
    assert "already labelled, verified" in capsys.readouterr().out
    path = label_file(folder, "testifiability", "val")
    path.write_bytes(b"\0" + before[path.name][1:])
    run(mixed, "--by=weak", "--splits", "val")
    assert "is not the file that labels.json describes" in capsys.readouterr().out
    assert files_of(folder) == before
    both = run(mixed, "--by=weak", "--splits", "train")  # one split more
    assert (both["testifiability.val"] == first["testifiability.val"]).all()
    assert set(Targets(mixed, "weak").splits) == {"val", "train"}
    refused(mixed, "holds other labels, of mixed: .*--force replaces", "--by=weak", "--from=start")
    run(mixed, "--by=weak", "--from=start", "--force")


@pytest.mark.parametrize("more", [["--force"], []], ids=["over a finished set", "over nothing"])
def test_a_stopped_run_leaves_no_labels_and_starts_over(mixed, tmp_path, monkeypatch, more):
    """Stopped in the second split: what was labelled otherwise is gone, no part is left, nothing is mixed."""
    folder, replace = tmp_path / "set", os.replace
    run(mixed, "--by=weak", "--from=start", f"--out={tmp_path}/whole")
    if more:
        run(mixed, "--by=weak", f"--out={folder}")

    def interrupted(source, to):
        if ".val." in str(to):
            raise KeyboardInterrupt
        return replace(source, to)

    with monkeypatch.context() as m, pytest.raises(SystemExit, match="130"):
        m.setattr(os, "replace", interrupted)
        run(mixed, "--by=weak", *([] if not more else ["--from=start"]), f"--out={folder}", *more)
    with pytest.raises(UserError, match="no labels"):
        Targets(mixed, folder)
    assert {path.suffixes[0] for path in folder.iterdir()} == {".train"}
    run(mixed, "--by=weak", "--from=start", f"--out={folder}", *more)
    assert files_of(folder) == files_of(tmp_path / "whole")
