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
        ("window", "long"): (None, None), ("window", "bpe"): (None, None),
        ("window", "tasks"): (None, None)}
    said = predictions.headline(predictions.judged(page, effects_of))
    assert said.startswith(
        "1 of 3 predictions for scales came true; guessing that no scale agrees with the record is right "
        "for 2 of them. 3 are open. On tasks 1 of 1 came true: ")
    assert said.endswith("Of 2 cells of which a measurement was on file before, which are no predictions, "
                         "1 are as expected.")


def test_of_tasks_one_may_decide_and_else_it_takes_all_of_them():
    """One that is better agrees with helps; that none is, and that all are neutral, takes all eight."""
    better, nothing = effect(3, better=0.4), effect(0.5, better=0.01)
    for word, decides, rest in (("helps", better, nothing), ("neutral", better, nothing)):
        agrees = word == "helps"
        assert predictions.agrees_on_tasks(word, [rest, decides]) is agrees
        assert predictions.agrees_on_tasks(word, 7 * [rest]) is None
        assert predictions.agrees_on_tasks(word, 8 * [rest]) is not agrees
        assert predictions.agrees_on_tasks(word, 7 * [rest] + [decides]) is agrees
        assert predictions.agrees_on_tasks(word, []) is None
    assert predictions.agrees_on_tasks("hurts", [effect(-3)]) is True
    assert predictions.agrees_on_tasks("neutral", [effect(1, better=0.06)]) is False  # beyond the margin


def of_eight(better, record=lambda i: 1 - i / 10):
    """(cells, effects, the Transfer) of {proxy: effects of eight mechanisms}, all expected to help."""
    names, words = [f"mechanism_{i}" for i in range(8)], " | ".join(["yes"] * 5)
    rows = "\n".join(f"| `{name}` | helps | {words} | why | by |" for name in names)
    page = predictions.on_the_page(rows)
    effects_of = {proxy: {name: effect(x) for name, x in zip(names, own)}
                  for proxy, own in better.items()}
    known = {name: outside.Summary(name, 1, 0, 0, record(i), 1, None, None, 0)
             for i, name in enumerate(names)}
    return predictions.judged(page, effects_of), effects_of, transfer.judged_by(effects_of, known, [])


def test_sentences_on_all_mechanisms():
    """deep agrees most, bpe differs from tiny in five, and both proxies that are right are above chance."""
    better = dict(tiny=[1, 1, 1, 0, 0, 0, 0, 0], deep=[8, 7, 6, 5, 4, 3, 2, 1], long=[1, 1, 1, 1, 1, 0, 0, 0],
                  bpe=[3, 3, 3, 3, 3, 0, 0, 0], recall=[3, 3, 0, 0, 0, 0, 0, 0])
    said = predictions.sentences(*of_eight(better))
    assert [number for number, _ in said] == [1, 2, 2, 3, 4, 5]
    first, bpe, long, third, fourth, fifth = (text for _, text in said)
    assert first == ("so far came true: of 8 mechanisms these agree with the record: tiny 0, deep 7, long 0, "
                     "bpe 5, tasks 2")
    assert bpe.startswith("so far refuted: bpe differs from tiny for 5 of 8 mechanisms (mechanism_0, mech")
    assert long == "so far came true: long differs from tiny for 0 of 8 mechanisms"
    assert third.startswith("so far refuted, and apart") and "deep, by a rank correlation of +1.00" in third
    assert fourth == "cannot be refuted: guessing helps is right for all that the record has a sign for"
    assert fifth.startswith("so far came true: over 8 mechanisms two together have")
    assert fifth.endswith("deep alone +1.00")
    del better["deep"]
    first, _, _, third, _, _ = (text for _, text in predictions.sentences(*of_eight(better)))
    assert first == "open, since no mechanism is measured at tiny, deep, long and bpe"


def test_a_proxy_with_more_signs_right_than_the_guess_refutes_where_it_can():
    right, wrong = [3, 3, 3, 3, -3, -3, -3, -3], [-3, -3, 3, 3, -3, -3, -3, 3]
    cells, effects_of, found = of_eight(dict(tiny=right, deep=wrong), record=lambda i: 1.0 if i < 4 else -1.0)
    assert predictions.more_signs(found) == "refuted: tiny, deep has more signs right than the guess"
    del effects_of["tiny"]
    assert predictions.unlike_tiny(effects_of, "bpe") == "open, since tiny and bpe are not both measured"
    said = dict(predictions.sentences(cells, effects_of, None))
    assert said[5] == "open, since no proxy has enough mechanisms"


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
