"""The benchmark: its interval is what it says, and it runs with a stand-in for a nanoGPT checkout."""

import argparse
import json
import math

import pytest

import bench

STAND_IN = '''
from dataclasses import dataclass
import torch

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate)
    def forward(self, x, y):
        logits = self.table(x)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    def generate(self, idx, n):
        return idx.repeat(1, n + 1)
'''


@pytest.mark.parametrize("n, cut", [(5, 0), (6, 0), (8, 0), (9, 1), (11, 1), (15, 3)])
def test_the_interval_of_the_median_covers_95_percent(n, cut):
    values = [3.0 * i for i in range(n)][::-1]
    median, low, high = bench.median_interval(values)
    assert (low, high) == (3.0 * cut, 3.0 * (n - 1 - cut)) and median == 3.0 * (n - 1) / 2
    def coverage(c):
        return 1 - 2 * sum(math.comb(n, i) for i in range(c + 1)) / 2**n
    assert n < 6 or coverage(cut) >= 0.95 > coverage(cut + 1)  # the narrowest that does


def test_all_contestants_are_measured_in_one_run_and_written_as_json(tmp_path, capsys):
    (tmp_path / "nanoGPT").mkdir()
    (tmp_path / "nanoGPT" / "model.py").write_text(STAND_IN)
    bench.main(["--nanogpt", str(tmp_path / "nanoGPT"), "--n_layer=1",
                "--n_head=1", "--n_embd=8", "--block_size=8", "--batch_size=2",
                "--vocab_size=11", "--rounds=3", "--steps=1",
                "--threads=1", "--device=cpu", "--json", str(tmp_path / "b.json")])
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [(r["what"], r["name"]) for r in rows] == [(w, n) for w in ("train", "decode")
                                                      for n in ("nanogpt", "gpt2", "modern")]
    for r in rows:
        assert r["tokens_per_s"] > 0 and r["reference"] == "nanogpt"
        assert r["time_ratio_low"] <= r["time_ratio"] <= r["time_ratio_high"]
    assert rows[0]["time_ratio"] == 1 and "decode" in capsys.readouterr().out


def test_a_missing_checkout_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match="--nanogpt must name a nanoGPT checkout"):
        bench.main(["--nanogpt", str(tmp_path)])
    with pytest.raises(SystemExit, match="--nanogpt must name"):
        bench.main(["--race"])


@pytest.mark.parametrize("bad, line", [(["--rounds=0"], "--rounds must be"),
                                       (["--block_size=1"], "--block_size=1"), (["--n_head=3"], "n_embd=128"),
                                       (["--json", "/nowhere/x"], "--json"),
                                       (["--device=cuda:99"], "device=cuda:99")])
def test_impossible_arguments_are_one_line_before_anything_runs(bad, line):
    with pytest.raises(SystemExit) as e:
        bench.main([*bad, "--rounds=1"] if "--rounds=0" not in bad else bad)
    assert str(e.value.code).startswith("bench: ") and line in e.value.code


def test_peak_memory_counts_the_model_and_not_the_libraries(tmp_path):
    args = dict(nanogpt=None, mechanisms=None, heads_off=None, recipes=["gpt2"], threads=1, device="cpu",
                dtype="float32", compile=False, vocab_size=64, n_head=1, block_size=8, batch_size=1)
    small = bench.peak_memory_cpu("gpt2", argparse.Namespace(**args, n_layer=1, n_embd=8))
    large = bench.peak_memory_cpu("gpt2", argparse.Namespace(**args, n_layer=4, n_embd=512))
    # weights and two moments, in float32
    assert small is None or small < 8 << 20 and large > 3 * 4 * 12 * 4 * 512**2


def test_every_mechanism_is_a_contestant_against_the_plain_gpt():
    args = argparse.Namespace(nanogpt=None, mechanisms="all", heads_off=None, recipes=["gpt2"])
    assert list(bench.contestants_of(args)) == ["gpt2", *bench.MECHANISMS, "all_on"]
    args = argparse.Namespace(nanogpt=None, mechanisms=None, heads_off=[0, 0.5],
                              recipes=["gpt2"], block_size=8, vocab_size=16, n_layer=2, n_head=4,
                              n_embd=32, device="cpu", dtype="float32", compile=False)
    whole, half = (build()[0] for build in bench.contestants_of(args).values())
    assert [block.attn.n_head for block in half.transformer.h] == [2, 2]
    assert whole.num_params() > half.num_params()


@pytest.mark.parametrize("options, words", [(["--mechanisms", "routng"], "no routng"),
                                            (["--heads_off", "1"], "below 1"),
                                            (["--contexts", "0"], "positive"),
                                            (["--mechanisms", "all", "--heads_off", "0"], "one at a time")])
def test_what_cannot_be_measured_is_refused_in_one_line(options, words):
    with pytest.raises(SystemExit, match=words):
        bench.main(options)


def test_decoding_after_a_context_and_memory_are_measured(capsys, tmp_path):
    size = ["--n_layer", "1", "--n_head", "6", "--n_embd", "48",
            "--rounds", "1", "--steps", "1", "--threads", "1", "--device", "cpu"]
    bench.main(["--contexts", "8", *size])
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("plain", "dense", "skip"))
    bench.main(["--what", "memory", "--mechanisms", "output_gate",
                "--block_size", "32", "--batch_size", "2", *size])
    assert "output_gate" in capsys.readouterr().out
