"""
The check agree.py, on a CPU: float32 agrees with float64, a device that computes something else does not.
"""

import json
import sys

import pytest
import torch

from tests.lab.gpu import agree

NAMES = ["routing_moh", "constraint_a", "acag"]


@pytest.fixture
def rows(tmp_path):
    """rows(arguments) -> (exit code, the rows that were written)."""
    def run(*argv):
        with pytest.raises(SystemExit) as e:
            agree.main([*argv, "--device=cpu", f"--out={tmp_path / 'rows.jsonl'}"])
        return e.value.code, [json.loads(line) for line in (tmp_path / "rows.jsonl").open()]
    return run


@pytest.mark.slow
def test_float32_agrees_with_float64_and_what_fails_is_a_row(rows, monkeypatch):
    monkeypatch.setitem(agree.CASES, "sink", dict(sink=True, n_inner=-1))  # a model that cannot be
    code, (failed, *found) = rows("sink", *NAMES, "--recipes", "modern", "--dtypes", "float32")
    assert code == 1 and [r["name"] for r in found] == NAMES
    assert all(r["passed"] and 0 < r["off"] < 1e-4 and not r["compiled"] for r in found)
    kinds = {kind for r in found for kind in r["largest"]}
    assert kinds == {"logits", "loss", "aux", "gradient", "decoding", "choices"}
    assert not failed["passed"] and "n_inner=-1" in failed["error"] and "\n" not in failed["error"]


@pytest.mark.slow
def test_a_device_that_computes_with_other_weights_fails(rows, monkeypatch):
    """Simulated: what is put on the device here has one head that sends out a quarter more than it should."""
    place = agree.placed

    def wrong(gpt, device):
        gpt = place(gpt, device)
        with torch.no_grad():
            gpt.transformer.h[1].attn.c_proj.weight[:, :16] *= 1.25
        return gpt
    monkeypatch.setattr(agree, "placed", wrong)
    code, found = rows("acag", "--recipes", "modern", "--dtypes", "float32", "bfloat16")
    assert code == 1 and [row["dtype"] for row in found] == ["float32", "bfloat16"]
    assert not any(row["passed"] for row in found) and all(row["off"] > row["allowed"] for row in found)


@pytest.mark.slow
def test_a_device_that_decodes_from_a_wrong_cache_fails(rows, monkeypatch):
    """Simulated, as no device here is wrong: the values of the cache are a token late."""
    append = agree.KVCache.append

    def late(cache, layer, k, v):
        keys, values = append(cache, layer, k, v)
        return keys, values.roll(1, 2) if cache.length else values
    monkeypatch.setattr(agree.KVCache, "append", late)
    code, (row,) = rows("plain", "--recipes", "gpt2", "--dtypes", "float32")
    assert code == 1 and row["worst"].startswith("decoding") and row["largest"]["gradient"] < 1e-4


def test_what_is_not_finite_or_missing_never_passes():
    one = torch.ones(3, dtype=torch.float64)
    assert agree.error(one * torch.nan, one, 0.0) == agree.error(None, one, 0.0) == torch.inf
    assert agree.error(one[:2], one, 0.0) == torch.inf and agree.error(None, None, 0.0) == 0.0
    assert agree.error(one * 1.5, one, 0.0) == pytest.approx(0.5)


@pytest.mark.slow
def test_of_several_processes_one_that_dies_takes_no_other_with_it(rows, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$3" = sink ] && exit 3\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    code, found = rows("plain", "sink", "--recipes", "gpt2", "--dtypes", "float32", "--jobs=2")
    assert code == 1 and {row["name"]: row["passed"] for row in found} == {"plain": True, "sink": False}
    assert "ended with 3" in next(row["error"] for row in found if row["name"] == "sink")


@pytest.mark.parametrize("options, words", [(["routng"], "no routng"), (["--jobs", "0"], "--jobs must be")])
def test_what_makes_no_sense_is_refused_in_one_line(options, words):
    with pytest.raises(SystemExit, match=words):
        agree.main([*options, "--device=cpu"])
