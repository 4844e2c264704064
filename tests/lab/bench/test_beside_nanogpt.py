"""Our models beside nanoGPT, of which there is a stand-in, and decoding after long contexts."""

import json

import pytest

import bench
from lab.bench import contexts

SIZES = ["--n_layer=1", "--n_head=6", "--n_embd=48", "--batch_size=2", "--rounds=1", "--steps=1",
         "--threads=1", "--device=cpu"]


@pytest.mark.slow
def test_all_contestants_are_measured_in_one_run_and_written_as_json(checkout, tmp_path, capsys):
    bench.main(["--nanogpt", checkout, "--n_layer=1", "--n_head=1", "--n_embd=8", "--block_size=8",
                "--batch_size=2", "--vocab_size=11", "--rounds=3", "--steps=1", "--threads=1", "--device=cpu",
                "--json", str(tmp_path / "b.json")])
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [(r["what"], r["name"]) for r in rows] == [(w, n) for w in ("train", "decode")
                                                      for n in ("nanogpt", "gpt2", "modern")]
    for r in rows:
        assert r["tokens_per_s"] > 0 and r["reference"] == "nanogpt"
        assert r["time_ratio_low"] <= r["time_ratio"] <= r["time_ratio_high"]
    assert rows[0]["time_ratio"] == 1 and "decode" in capsys.readouterr().out


def test_decoding_after_a_context_is_measured(capsys):
    contexts.main(["8", *SIZES])
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("plain", "dense", "skip"))


def test_decoding_after_a_context_beside_nanogpt(checkout, tmp_path):
    path = tmp_path / "contexts.json"
    contexts.main(["4", "8", "--nanogpt", checkout, "--json", str(path), *SIZES])
    found = json.loads(path.read_text())
    assert found["finished"] and [(r["what"], r["name"]) for r in found["rows"]] == [
        (context, name) for context in ("4", "8") for name in ("nanogpt", "gpt2", "modern")]
