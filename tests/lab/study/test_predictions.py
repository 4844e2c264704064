"""Which predictions came true: cells by effects, sentences over all mechanisms, and the page itself."""

import json

import pytest

from nanoheads.common import UserError
from lab.study import outside, predictions, transfer
from helpers import ROOT

PAGE = """
| mechanism | the record | tiny | deep | long | bpe | tasks | why | refuted by |
|---|---|---|---|---|---|---|---|---|
| `fox` | helps | no° | yes | no | yes | yes | words | words |
| `window` | neutral | yes° | no | yes | yes | no | words | words |
"""


def effect(in_errors, better=None):
    se = 0.004
    return transfer.Effect(in_errors * se if better is None else better,
                           se if better is None else better / in_errors, 3, "")


def test_a_proxy_agrees_by_two_standard_errors_and_for_neutral_within_the_margin_too():
    page = predictions.on_the_page(PAGE)
    assert page["fox"] == ("helps", dict(tiny=(False, True), deep=(True, False), long=(False, False),
                                         bpe=(True, False), tasks=(True, False)))
    effects_of = {
        "tiny": {"fox": effect(-9), "window": effect(1, better=0.011)},  # neither better nor within 0.01
        "deep": {"fox": effect(1.9), "window": effect(-1.9)},            # -0.0076
        "long": {"fox": effect(1.9)},
        "recall": {"fox": effect(-3), "window": effect(1, better=0.04)}, "copy": {"fox": effect(2)},
    }
    found = {(c.mechanism, c.proxy): (c.agrees, c.right) for c in predictions.judged(page, effects_of)}
    assert found == {
        ("fox", "tiny"): (False, True), ("fox", "deep"): (False, False), ("fox", "long"): (False, True),
        ("fox", "bpe"): (None, None), ("fox", "tasks"): (True, True),  # one task of two is enough
        ("window", "tiny"): (False, False), ("window", "deep"): (True, False),
        ("window", "long"): (None, None), ("window", "bpe"): (None, None), ("window", "tasks"): (True, False)}
    said = predictions.headline(predictions.judged(page, effects_of))
    assert said.startswith("2 of 5 predictions came true; guessing that no proxy agrees with the record "
                           "is right for 2 of them. Of 2 cells that were on file before, a new measurement "
                           "comes out as the old one in 1. Open: 3.")


def test_neutral_on_tasks_is_neutral_on_each():
    page = predictions.on_the_page(PAGE)
    own = {"recall": {"window": effect(0.5)}, "copy": {"window": effect(-5)}}
    cell, = (c for c in predictions.judged(page, own) if c.agrees is not None)
    assert (cell.mechanism, cell.proxy, cell.agrees, cell.right) == ("window", "tasks", False, True)


def test_sentences_on_all_mechanisms():
    """deep agrees most, bpe differs from tiny in five, and both proxies that are right are above chance."""
    names = [f"mechanism_{i}" for i in range(8)]
    words = " | ".join(["yes"] * 5)
    page = predictions.on_the_page("\n".join(f"| `{name}` | helps | {words} | why | by |" for name in names))
    better = dict(tiny=[1, 1, 1, 0, 0, 0, 0, 0], deep=[8, 7, 6, 5, 4, 3, 2, 1], long=[1, 1, 1, 1, 1, 0, 0, 0],
                  bpe=[3, 3, 3, 3, 3, 0, 0, 0], recall=[1, 0, 0, 0, 0, 0, 0, 0])
    effects_of = {proxy: {name: effect(x) for name, x in zip(names, own)} for proxy, own in better.items()}
    record = {name: outside.Summary(name, 1, 0, 0, 1 - i / 10, 1, None, None, 0)
              for i, name in enumerate(names)}
    found = transfer.judged_by(effects_of, record, [])
    said = predictions.sentences(predictions.judged(page, effects_of), found)
    assert [number for number, _ in said] == [1, 2, 2, 3, 4, 5]
    first, bpe, long, third, fourth, fifth = (text for _, text in said)
    assert first == ("came true: the proxies agree with the record for tiny 0 of 8, deep 7 of 8, "
                     "long 0 of 8, bpe 5 of 8, tasks 0 of 8")
    assert bpe.startswith("refuted: bpe differs from tiny for 5 of 8 mechanisms (mechanism_0, mechanism_1")
    assert long == "came true: long differs from tiny for 0 of 8 mechanisms"
    assert third.startswith("refuted: ") and "deep, by a rank correlation of +1.00" in third
    assert fourth == "came true: no proxy has more signs right than the guess"
    assert fifth.startswith("came true: two together") and "deep alone +1.00 over 8" in fifth
    del effects_of["deep"]
    found = transfer.judged_by(effects_of, record, [])
    first, _, _, third, _, _ = (text for _, text in
                                predictions.sentences(predictions.judged(page, effects_of), found))
    assert first.startswith("open, since not all proxies are measured") and third.startswith("so far ")


def test_the_page_names_every_mechanism_of_the_record_and_its_word():
    page = predictions.on_the_page(predictions.PAGE.read_text(encoding="utf-8"))
    of_record = {name: each.verdict for name, each in outside.summaries().items()}
    assert {*page} == {*of_record}
    for name, (word, _) in page.items():
        verdict = of_record[name]
        assert word == ("helps" if verdict >= 0.25 else "hurts" if verdict <= -0.25 else "neutral")


def test_a_table_that_cannot_be_read_is_refused_in_one_line():
    with pytest.raises(UserError, match="`fox` must have helps, neutral or hurts.*and has helps, no°, maybe"):
        predictions.on_the_page(PAGE.replace("no° | yes", "no° | maybe"))
    with pytest.raises(UserError, match="has no table of predictions"):
        predictions.on_the_page("# Predictions\n")


def test_the_command_says_how_many_came_true(tmp_path, capsys):
    out = tmp_path / "found.json"
    predictions.main([str(ROOT / "results/all-tiny.json.gz"), str(ROOT / "results/tasks/few.json.gz"),
                      f"--json={out}"])
    found = json.loads(out.read_text())
    assert found["headline"] in capsys.readouterr().out
    cell, = (c for c in found["cells"] if (c["mechanism"], c["proxy"]) == ("short_conv", "tiny"))
    assert cell["agrees"] and cell["right"] and cell["known_before"]
    with pytest.raises(SystemExit, match="No such file"):
        predictions.main([str(tmp_path / "none.json.gz")])
