"""The leak probe: functions that leak at a known place are found there, a causal one passes."""

import json
import subprocess
import sys

import pytest
import torch

from helpers import ROOT
from helpers import tiny
from nanoheads.common import UserError
from lab.probe import main
from lab.probes.leak import leaks

PROGRAM = "probe.py leak"  # see the fixture refusal
V, T = 37, 12
FIRST = [None, None]  # of both_needed(): the tokens at 7 and 9 before they are changed
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


def mean_of_row(ids):
    return causal(ids) + TABLE[ids].mean(1, keepdim=True)


def next_to_last(ids):
    """The last position but one reads the last token, whatever the length."""
    found = causal(ids)
    found[:, -2] += TABLE[ids[:, -1]]
    return found


def both_needed(ids):
    """Position 4 reads tokens 7 and 9, but only where both are other ones than they were."""
    found = causal(ids)
    a, b = (TABLE[ids[:, i]][:, 0] if ids.size(1) > i else torch.zeros(len(ids)) for i in (7, 9))
    found[:, 4, 0] += torch.where((a == FIRST[0][:len(ids)]) | (b == FIRST[1][:len(ids)]), 0.0, 1.0)
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


@pytest.mark.slow
@pytest.mark.parametrize("function, words", [
    (at(5, 9), "position 5 changes with the token at 9"),
    (at(0, T - 1), "position 0 changes with the token at 11"),
    (at(T - 2, T - 1), "position 10 changes with the token at 11"),
    (at(3, 4), "position 3 changes with the token at 4"),
    (off_by_one, "position 0 changes with the token at 1"),
    (mean_of_row, "position 0 changes with the token at 1"),
    (next_to_last, "position 10 changes with the token at 11"),
    (batch_norm, "row 0 of a batch changes with other rows"),
    (row_before, "row 2 of a batch changes with other rows"),
    (by_length, "position 0 changes when the last token is cut off"),
    (at(5, 9, 1e-3), "position 5 changes with the token at 9"),
])
def test_a_leak_is_found_at_its_place(function, words):
    assert leak_of(function) == words


@pytest.mark.slow
def test_the_probe_agrees_with_every_pair_tried_by_hand():
    """Two leaks at random places, the slow way: change a token, see who moves."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(8):
        pairs = []
        for _ in range(2):
            position = int(torch.randint(T - 1, (), generator=generator))
            pairs.append((position, int(torch.randint(position + 1, T, (), generator=generator))))

        def function(ids):
            return at(*pairs[0])(ids) + at(*pairs[1])(ids)

        ids = torch.randint(V, (1, T), generator=generator)
        moved = []
        for j in range(T):
            other = ids.clone()
            other[0, j] = (other[0, j] + 1) % V
            moved += [(p, j) for p in range(j) if not torch.equal(function(ids)[0, p], function(other)[0, p])]
        assert leak_of(function, batch=1) == "position {} changes with the token at {}".format(*min(moved))


def test_a_leak_that_takes_two_tokens_is_found(monkeypatch):
    from lab.probes.leak import texts
    ids, _ = texts(V, 1, 3, T, "cpu")
    monkeypatch.setitem(globals(), "FIRST", [TABLE[ids[0][:, i]][:, 0] for i in (7, 9)])
    assert leak_of(both_needed, draws=1) == "position 4 changes with the tokens from 7 on"


def test_a_row_that_changes_with_two_others_together_is_found():
    """The last row reads the first two, but only where both are others than they were."""
    from lab.probes.leak import texts
    first = texts(V, 1, 3, T, "cpu")[0][0]

    def both_rows(ids):
        found = causal(ids)
        if ids.shape == first.shape and (ids[:2] != first[:2]).all(1).all():
            found[2] += 1
        return found
    assert leak_of(both_rows, draws=1) == "row 2 of a batch changes with other rows"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
def test_a_causal_transformer_passes(recipe):
    model = tiny(vocab_size=V, block_size=2 * T, n_head=2, n_embd=16, recipe=recipe, std=0.3).float()
    leak, skipped, calls, _ = leaks(lambda ids: model(ids).logits, V, T)
    assert leak is None and calls > 3 * 2 * (T - 1)
    assert not skipped


@pytest.mark.slow
def test_rounding_of_other_groups_is_no_leak_and_zero_tolerance_finds_it():
    """A sum in another order for rows of other tokens, as experts that take turns have it."""
    def grouped(ids):
        order = TABLE[ids].double() @ torch.ones(5, 4, dtype=torch.float64)
        return (order.float() + 1e-7 * ids[:, -1:, None]).to(torch.float32)
    assert leak_of(grouped) is None
    assert leak_of(grouped, tolerance=0.0) == "position 0 changes with the token at 11"
    for wrong in (-1.0, float("nan")):
        with pytest.raises(UserError, match="tolerance=.* must be 0 or more"):
            leak_of(grouped, tolerance=wrong)


@pytest.mark.slow
def test_a_function_of_one_length_or_one_row_is_tried_as_far_as_it_goes():
    def fixed(ids):
        assert ids.size(1) == T, "one length"
        return causal(ids)
    leak, skipped, *_ = leaks(fixed, V, T, batch=1)
    assert leak is None and [*skipped] == ["rows", "prefixes"] and "one row" in skipped["rows"]
    assert "fails on ids of [1, 11]: AssertionError: one length" in skipped["prefixes"]


@pytest.mark.slow
def test_a_function_may_write_into_what_it_is_given_and_return_one_tensor_again():
    memory = torch.zeros(3, T + 3, 5)

    def careless(ids):
        found = memory[:len(ids), :ids.size(1)]
        found.copy_(causal(ids))
        ids.zero_()
        return found
    assert leak_of(careless) is None


# ---- the command ----

FILE = """import torch
table = torch.eye(37)
def causal(ids):
    return table[ids].cumsum(1)
def late(ids):
    found = causal(ids)
    if ids.size(1) > 23:
        found[:, 17] += table[ids[:, 23]]
    return found
def flat(ids):
    return table[ids].sum(-1)
def nan(ids):
    return causal(ids) / (causal(ids) * 0)
def whole(ids):
    return ids
def noisy(ids):
    return causal(ids) + torch.randn(*ids.shape, 37)
def fails(ids):
    return table[ids + 37]
def holds(ids):
    return type("Out", (), dict(logits=causal(ids)))
number = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "theirs.py"
    path.write_text(FILE)
    return path


@pytest.mark.slow
def test_the_command_exits_with_the_place_or_0(file, capsys):
    for name in ("causal", "holds"):
        main(["leak", "--module", f"{file}:{name}", "--vocab=37"])
        assert "no leak found in" in capsys.readouterr().out
    command = ["-m", "lab.probe", "leak", "--module", f"{file}:late", "--vocab", "37"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "probe.py leak: position 17 changes with the token at 23\n"


@pytest.mark.slow
def test_json_names_the_leak_or_null(file, tmp_path, capsys):
    out = tmp_path / "found.json"
    main(["leak", "--module", f"{file}:causal", "--vocab=37", "--batch=1", f"--json={out}"])
    found = json.loads(out.read_text())
    assert found["leak"] is None and found["calls"] > 3 and list(found["not_tried"]) == ["rows"]
    with pytest.raises(SystemExit):
        main(["leak", "--module", f"{file}:late", "--vocab=37", f"--json={out}"])
    found = json.loads(out.read_text())
    assert found["leak"] == "position 17 changes with the token at 23" and found["module"] == f"{file}:late"


def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, refusal):
    broken = tmp_path / "broken.py"
    broken.write_text("import torch\nimport nothing_of_this_name\n")
    assert "line 2: ModuleNotFoundError" in refusal(["leak", f"--module={broken}:f"])
