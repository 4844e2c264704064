"""bench.py: its intervals, what is printed and written, and that what fails is a row too."""

import json
import math

import pytest
import torch

import bench
from model import MECHANISMS
from nanoheads.timing import median_interval, peak_memory

SMALL = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=8", "--batch_size=2", "--rounds=1",
         "--steps=1", "--threads=1", "--device=cpu", "--no-memory"]
FAILING = '''
from typing import Literal, Optional
from nanoheads.mechanism import Mechanism

class Failing(Mechanism):
    """Cannot be trained."""

    class Options:
        failing: Optional[Literal["memory", "interrupt"]] = None  # how

    name = flag = "failing"
    modes = {"fail_memory": dict(failing="memory"), "fail_interrupt": dict(failing="interrupt")}

    def at_step(self, config, step):
        if config.failing == "interrupt":
            raise KeyboardInterrupt
        raise RuntimeError("CUDA out of memory.\\nTried to allocate 1 GiB")
'''


@pytest.fixture
def failing(tmp_path, own_mechanisms_go):
    """The argument that adds two mechanisms, fail_memory and fail_interrupt."""
    (tmp_path / "failing.py").write_text(FAILING)
    return f"--own_mechanism={tmp_path / 'failing.py'}"


@pytest.fixture
def measured(tmp_path):
    """measured(argument, ...) -> (what the program ends with or None, what --json holds)."""
    def call(*argv):
        path, end = tmp_path / "rows.json", None
        try:
            bench.main([*SMALL, *argv, f"--json={path}"])
        except SystemExit as e:
            end = e.code
        return end, json.loads(path.read_text())
    return call


@pytest.mark.parametrize("n, cut", [(5, 0), (8, 0), (15, 3)])
def test_the_interval_of_the_median_covers_95_percent(n, cut):
    values = [3.0 * i for i in range(n)][::-1]
    median, low, high = median_interval(values)
    assert (low, high) == (3.0 * cut, 3.0 * (n - 1 - cut)) and median == 3.0 * (n - 1) / 2

    def coverage(c):
        return 1 - 2 * sum(math.comb(n, i) for i in range(c + 1)) / 2**n
    assert n < 6 or coverage(cut) >= 0.95 > coverage(cut + 1)  # the narrowest that does


def test_every_recipe_is_timed_in_training_and_decoding_beside_the_first(measured, capsys):
    end, found = measured("--rounds=3")
    rows = found["rows"]
    assert end is None and found["finished"] is True
    assert [(row["what"], row["name"]) for row in rows] == [
        (what, name) for what in ("train", "decode") for name in ("gpt2", "modern")]
    for row in rows:
        assert row["reference"] == "gpt2" and row["rounds"] == 3 and row["tokens_per_s"] > 0
        assert row["time_ratio_low"] <= row["time_ratio"] <= row["time_ratio_high"]
        assert row["name"] != "gpt2" or row["time_ratio"] == 1
        tokens, actions = (16, 1) if row["what"] == "train" else (7, 7)
        assert row["ms"] == pytest.approx(1000 * tokens / row["tokens_per_s"] / actions)
    lines = capsys.readouterr().out.splitlines()
    assert all(any({row["what"], row["name"], f"{row['ms']:.3f}"} <= {*line.split()} for line in lines)
               for row in rows)


@pytest.mark.slow
def test_a_mechanism_that_fails_is_a_row_and_the_rest_go_on(measured, failing, capsys):
    end, found = measured(failing, "--mechanisms=unet_add,fail_memory,sink")
    unet, memory, plain, sink = found["rows"]  # in the order in which they are known
    assert end == "bench: 2 failed: unet_add, fail_memory" and found["finished"] is True
    assert [row["name"] for row in (plain, sink)] == ["gpt2", "sink"]
    assert all(row["what"] == "train" and row["tokens_per_s"] > 0 for row in (plain, sink))
    assert "at least two layers" in unet["error"] and memory["error"].startswith("out of memory")
    out = capsys.readouterr().out
    assert out.count("sink") == 2 and out.count("failed:") == 2  # as soon as it is made, and in the table


@pytest.mark.slow
def test_what_is_done_is_kept_when_the_benchmark_is_stopped(measured, failing):
    end, found = measured(failing, "--mechanisms=sink,fail_interrupt")
    assert end == 130 and found["finished"] is False
    assert [row["name"] for row in found["rows"]] == ["gpt2", "sink"]


def test_every_mechanism_is_a_contestant_against_the_plain_gpt_and_heads_are_pruned():
    names = bench.contestants_of(bench.arguments(["--mechanisms=all", "--recipes=gpt2"]))
    assert [*names] == ["gpt2", *MECHANISMS, "all_on"]
    args = bench.arguments([*SMALL, "--heads_off", "0", "0.5", "--recipes=gpt2"])
    bench.check(args)
    whole, half = (build()[0] for build in bench.contestants_of(args).values())
    assert [block.attn.n_head for block in half.transformer.h] == [1]
    assert whole.num_params() > half.num_params()


def test_a_step_on_a_task_stands_beside_one_on_text_and_drawing_its_rows(measured, capsys):
    _, found = measured("--task=copy", "--block_size=64")
    assert [row["name"] for row in found["rows"]] == ["text", "copy", "drawing its rows"]
    assert "drawing its rows" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--task times training steps of one plain GPT: leave out"):
        bench.main(["--task=copy", "--mechanisms=sink"])


@pytest.mark.slow
def test_peak_memory_is_the_models_and_not_the_libraries(measured, capsys):
    """Each is measured in a process of its own."""
    plain, = measured("--what=memory", "--recipes=gpt2", "--n_layer=4", "--n_embd=256")[1]["rows"]
    weights = 4 * 4 * 12 * 256**2  # in bytes; beside them gradients and two moments
    assert plain["peak_bytes"] is None or 3 * weights < plain["peak_bytes"] < 9 * weights
    assert "MiB" in capsys.readouterr().out


def test_a_run_on_the_cpu_has_resident_memory_whatever_gpu_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *args: 0)
    assert peak_memory("cpu") != 0 and peak_memory("cuda") == 0
