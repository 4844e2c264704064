"""lab.probe leak: functions that look ahead at a known place are found there, a causal one passes."""

import json

import pytest
import torch
from hypothesis import given, settings, strategies as st

from helpers import tiny
from nanoheads.common import UserError
from lab.probe import main
from lab.probes.leak import leaks, texts

PROGRAM = "probe.py leak"  # see the fixture refusal
V, T = 37, 12
TABLE = torch.randn(V, 5, generator=torch.Generator().manual_seed(3))


def causal(ids):
    """Each position: the mean of what came so far."""
    return TABLE[ids].cumsum(1) / torch.arange(1, ids.size(1) + 1)[:, None]


def at(position, token, amount=1.0):
    """causal(), but one position reads one token."""
    def function(ids):
        found = causal(ids)
        if ids.size(1) > max(position, token):
            found[:, position] += amount * TABLE[ids[:, token]]
        return found
    return function


def off_by_one(ids):
    return causal(ids) + TABLE[ids.roll(-1, 1)]


def next_to_last(ids):
    """The last position but one reads the last token, whatever the length."""
    found = causal(ids)
    found[:, -2] += TABLE[ids[:, -1]]
    return found


def batch_norm(ids):
    """Every position by itself, over the rows."""
    x = causal(ids)
    return (x - x.mean(0)) / (1 + x.std(0, correction=0))


def row_before(ids):
    x = causal(ids)
    return x + torch.cat((x[:1] * 0, x[:-1]))


def by_length(ids):
    return causal(ids) * (1 + 0.01 * ids.size(1))


def leak_of(function, **more):
    return leaks(function, **{**dict(vocab=V, length=T, batch=3), **more})[0]


@pytest.mark.parametrize("function, words", [
    (at(3, 4), "position 3 changes with the token at 4"),
    (at(5, 9, 1e-3), "position 5 changes with the token at 9"),
    (off_by_one, "position 0 changes with the token at 1"),
    (next_to_last, "position 10 changes with the token at 11"),
    (batch_norm, "row 0 of a batch changes with other rows"),
    (row_before, "row 2 of a batch changes with other rows"),
    (by_length, "position 0 changes when the last token is cut off")])
def test_a_leak_is_found_at_its_place(function, words):
    assert leak_of(function) == words


PAIR = st.tuples(st.integers(0, T - 1), st.integers(0, T - 1)).filter(lambda pair: pair[0] < pair[1])


@settings(max_examples=8)
@given(first=PAIR, second=PAIR)
def test_of_several_leaks_the_first_is_named(first, second):
    assert leak_of(lambda ids: at(*first)(ids) + at(*second)(ids), batch=1) == \
        "position {} changes with the token at {}".format(*min(first, second))


def test_what_takes_two_tokens_or_two_rows_together_is_found():
    """Only where both are others than in the first text."""
    first = texts(V, 1, 3, T, "cpu")[0][0]

    def both_tokens(ids):
        found = causal(ids)
        if ids.size(1) == T:
            found[:, 4, 0] += ((ids != first[:len(ids)])[:, [7, 9]]).all(1)
        return found

    def both_rows(ids):
        found = causal(ids)
        if ids.shape == first.shape and (ids[:2] != first[:2]).all(1).all():
            found[2] += 1
        return found
    assert leak_of(both_tokens, draws=1) == "position 4 changes with the tokens from 7 on"
    assert leak_of(both_rows, draws=1) == "row 2 of a batch changes with other rows"


def test_a_causal_transformer_passes():
    model = tiny(vocab_size=V, block_size=2 * T, n_head=2, n_embd=16, recipe="modern", std=0.3).float()
    leak, skipped, calls, _ = leaks(lambda ids: model(ids).logits, V, T)
    assert leak is None and not skipped and calls > 3 * 2 * (T - 1)


def test_rounding_is_no_leak_and_zero_tolerance_finds_it():
    """A sum in another order for rows of other tokens, as experts that take turns have it."""
    def grouped(ids):
        order = TABLE[ids].double() @ torch.ones(5, 4, dtype=torch.float64)
        return (order.float() + 1e-7 * ids[:, -1:, None]).to(torch.float32)
    assert leak_of(grouped) is None
    assert leak_of(grouped, tolerance=0.0) == "position 0 changes with the token at 11"
    for wrong in (-1.0, float("nan")):
        with pytest.raises(UserError, match="tolerance=.* must be 0 or more"):
            leak_of(grouped, tolerance=wrong)


def test_a_function_of_one_length_is_tried_as_far_as_it_goes_and_may_be_careless():
    """It may write into what it is given, and return one tensor again."""
    memory = torch.zeros(3, T, 5)

    def fixed(ids):
        assert ids.size(1) == T, "one length"
        found = memory[:len(ids)]
        found.copy_(causal(ids))
        ids.zero_()
        return found
    leak, skipped, *_ = leaks(fixed, V, T, batch=1)
    assert leak is None and [*skipped] == ["rows", "prefixes"] and "one row" in skipped["rows"]
    assert "fails on ids of [1, 11]: AssertionError: one length" in skipped["prefixes"]


# ---- the command ----

FILE = """import torch
table = torch.eye(37)
def causal(ids):
    return type("Out", (), dict(logits=table[ids].cumsum(1)))
def late(ids):
    found = table[ids].cumsum(1)
    if ids.size(1) > 23:
        found[:, 17] += table[ids[:, 23]]
    return found
"""


def test_the_command_ends_with_the_place_or_says_that_there_is_none(tmp_path, capsys, refusal):
    out, file = tmp_path / "found.json", tmp_path / "theirs.py"
    file.write_text(FILE)
    main(["leak", "--module", f"{file}:causal", "--vocab=37", "--batch=1", f"--json={out}"])
    assert "no leak found in" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["leak"] is None and found["calls"] > 3 and list(found["not_tried"]) == ["rows"]
    said = refusal(["leak", "--module", f"{file}:late", "--vocab=37", f"--json={out}"])
    assert said == "probe.py leak: position 17 changes with the token at 23"
    found = json.loads(out.read_text())
    assert f"probe.py leak: {found['leak']}" == said and found["module"] == f"{file}:late"
    file.write_text("import torch\nimport nothing_of_this_name\n")
    assert "line 2: ModuleNotFoundError" in refusal(["leak", f"--module={file}:f"])
