"""agree.py, on the CPU: float32 agrees with float64, and a model with other weights does not."""

import json

import pytest
import torch

from tests.lab.gpu import agree

NAMES = ["plain", "routing_moh", "sentinel_l0", "constraint_a", "acag"]


@pytest.fixture
def rows(tmp_path):
    """rows(arguments) -> (exit code, the rows that were written)."""
    def run(*argv):
        with pytest.raises(SystemExit) as e:
            agree.main([*argv, "--device", "cpu", "--out", str(tmp_path / "rows.jsonl")])
        return e.value.code, [json.loads(line) for line in (tmp_path / "rows.jsonl").open()]
    return run


@pytest.mark.slow
def test_float32_agrees_with_float64_and_every_row_is_written(rows):
    code, found = rows(*NAMES, "--dtypes", "float32")
    assert code == 0
    recipes = ("gpt2", "llama", "modern")
    assert [(r["name"], r["recipe"]) for r in found] == [(n, r) for n in NAMES for r in recipes]
    assert all(r["passed"] and 0 < r["off"] < 1e-4 and not r["compiled"] for r in found)
    kinds = {kind for r in found for kind in r["largest"]}
    assert kinds == {"logits", "loss", "aux", "gradient", "decoding", "choices"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["plain", "acag"])
def test_a_device_that_computes_with_other_weights_fails(rows, monkeypatch, name, dtype):
    """Negative control: one head of one block sends out a quarter more than it should."""
    place = agree.placed

    def wrong(gpt, device):
        gpt = place(gpt, device)
        with torch.no_grad():
            gpt.transformer.h[1].attn.c_proj.weight[:, :16] *= 1.25
        return gpt
    monkeypatch.setattr(agree, "placed", wrong)
    code, (row,) = rows(name, "--recipes", "modern", "--dtypes", dtype)
    assert code == 1 and not row["passed"] and row["off"] > row["allowed"]


@pytest.mark.slow
def test_decoding_that_reads_a_wrong_cache_fails(rows, monkeypatch):
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
def test_a_model_that_fails_is_a_row_and_the_rest_go_on(rows, monkeypatch):
    monkeypatch.setitem(agree.CASES, "sink", dict(sink=True, n_inner=-1))
    code, found = rows("sink", "plain", "--recipes", "gpt2", "--dtypes", "float32")
    assert code == 1 and [r["passed"] for r in found] == [False, True]
    assert "n_inner=-1" in found[0]["error"] and "\n" not in found[0]["error"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["routing_published", "moh", "routing_sigmoid"])
def test_routers_choose_as_they_are_told(name):
    """Also where rounding would have chosen other heads: here, whatever the reference chose."""
    gpt = agree.drawn("modern", agree.CASES[name])
    with agree.watched(gpt) as own, torch.no_grad():
        gpt(agree.batch(None, "cpu")[0])
    told = [t.roll(1, 1) for t in own]  # the choices for the token before
    with agree.mock.patch.object(agree.model, "float32_linear", agree.forced_linear), torch.no_grad():
        agree.force(gpt, told)
        with agree.watched(gpt) as forced:
            gpt(agree.batch(None, "cpu")[0])
    assert all(torch.equal(a, b) for a, b in zip(forced, told, strict=True))
    assert not torch.equal(told[0], own[0])


@pytest.mark.slow
def test_several_processes_write_into_one_file(rows):
    code, found = rows("plain", "sink", "--recipes", "gpt2", "--dtypes", "float32", "--jobs", "2")
    assert code == 0 and {r["name"] for r in found} == {"plain", "sink"} and all(r["passed"] for r in found)


@pytest.mark.parametrize("options, words", [(["routng"], "no routng"), (["--jobs", "0"], "--jobs must be"),
                                            (["--out", "/nowhere/x"], "--out")])
def test_what_makes_no_sense_is_refused_in_one_line(options, words):
    with pytest.raises(SystemExit, match=words):
        agree.main([*options, "--device", "cpu"])
