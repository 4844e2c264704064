"""The benchmark: its interval is what it says, and what is measured is printed and written."""

import argparse
import json
import math

import pytest
import torch

import bench
from model import MECHANISMS
from nanoheads.timing import median_interval, peak_memory

@pytest.mark.parametrize("n, cut", [(5, 0), (6, 0), (8, 0), (9, 1), (11, 1), (15, 3)])
def test_the_interval_of_the_median_covers_95_percent(n, cut):
    values = [3.0 * i for i in range(n)][::-1]
    median, low, high = median_interval(values)
    assert (low, high) == (3.0 * cut, 3.0 * (n - 1 - cut)) and median == 3.0 * (n - 1) / 2
    def coverage(c):
        return 1 - 2 * sum(math.comb(n, i) for i in range(c + 1)) / 2**n
    assert n < 6 or coverage(cut) >= 0.95 > coverage(cut + 1)  # the narrowest that does


@pytest.mark.slow
def test_peak_memory_counts_the_model_and_not_the_libraries(tmp_path):
    args = dict(task=None, nanogpt=None, mechanisms=None, heads_off=None, recipes=["gpt2"], threads=1,
                device="cpu", dtype="float32", compile=False, compile_mode="default", vocab_size=64, n_head=1,
                block_size=8, batch_size=1)
    small = bench.peak_memory_cpu("gpt2", argparse.Namespace(**args, n_layer=1, n_embd=8))
    large = bench.peak_memory_cpu("gpt2", argparse.Namespace(**args, n_layer=4, n_embd=512))
    # weights and two moments, in float32
    assert small is None or small < 8 << 20 and large > 3 * 4 * 12 * 4 * 512**2


def test_a_run_on_the_cpu_has_resident_memory_whatever_gpu_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *args: 0)
    assert peak_memory("cpu") != 0 and peak_memory("cuda") == 0


def test_every_mechanism_is_a_contestant_against_the_plain_gpt():
    args = argparse.Namespace(task=None, nanogpt=None, mechanisms="all", heads_off=None, recipes=["gpt2"])
    assert list(bench.contestants_of(args)) == ["gpt2", *MECHANISMS, "all_on"]
    args = argparse.Namespace(task=None, nanogpt=None, mechanisms=None, heads_off=[0, 0.5],
                              recipes=["gpt2"], block_size=8, vocab_size=16, n_layer=2, n_head=4,
                              n_embd=32, device="cpu", dtype="float32", compile=False, compile_mode="default")
    whole, half = (build()[0] for build in bench.contestants_of(args).values())
    assert [block.attn.n_head for block in half.transformer.h] == [2, 2]
    assert whole.num_params() > half.num_params()


def test_a_step_on_a_task_stands_beside_one_on_text_and_drawing_its_rows(tmp_path, capsys):
    bench.main(["--task=copy", "--n_layer=1", "--n_head=1", "--n_embd=8", "--batch_size=2", "--rounds=2",
                "--steps=1", "--device=cpu", f"--json={tmp_path / 'rows.json'}"])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["text", "copy", "drawing its rows"]
    assert "drawing its rows" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--task times training steps of one plain GPT: leave out"):
        bench.main(["--task=copy", "--mechanisms=sink"])


@pytest.mark.slow
def test_peak_memory_is_measured(capsys):
    bench.main(["--what=memory", "--mechanisms=output_gate", "--n_layer=1", "--n_head=6", "--n_embd=48",
                "--block_size=32", "--batch_size=2", "--threads=1", "--device=cpu"])
    assert "output_gate" in capsys.readouterr().out


# ---- mechanisms, pair by pair ----

TINY = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=8", "--batch_size=2", "--rounds=1",
        "--steps=1", "--threads=1", "--device=cpu", "--no-memory"]


@pytest.fixture
def figures(tmp_path):
    """figures() -> the rows that --json holds by now; figures.path: its file."""
    def read():
        return json.loads(read.path.read_text())["rows"] if read.path.exists() else []
    read.path = tmp_path / "b.json"
    return read


def builder_that(act, monkeypatch):
    """Have act(all contestants, name) called before each is built."""
    build = bench.Contest.build

    def wrapped(contestants, name):
        act(contestants, name)
        build(contestants, name)
    monkeypatch.setattr(bench.Contest, "build", wrapped)


@pytest.mark.slow
def test_a_mechanism_is_finished_and_written_before_the_next_is_built(figures, monkeypatch, capsys):
    seen = {}
    builder_that(lambda contestants, name: seen.update(
        {name: ([*contestants.contestants], [r["name"] for r in figures()])}), monkeypatch)
    bench.main(["--mechanisms=acag,sink,xsa", "--json", str(figures.path), *TINY])
    assert seen == {"gpt2": ([], []), "acag": (["gpt2"], []), "sink": (["gpt2"], ["gpt2", "acag"]),
                    "xsa": (["gpt2"], ["gpt2", "acag", "sink"])}
    rows = figures()
    assert json.loads(figures.path.read_text())["finished"] is True
    assert [r["name"] for r in rows] == ["gpt2", "acag", "sink", "xsa"]
    assert all(r["what"] == "train" and r["reference"] == "gpt2" for r in rows)
    assert capsys.readouterr().out.count("acag") == 2  # as soon as it is made, and in the table


@pytest.mark.slow
def test_a_mechanism_that_fails_is_a_row_and_the_rest_go_on(figures, monkeypatch, capsys):
    def fail(contestants, name):
        if name == "sink":
            raise RuntimeError("CUDA out of memory.\nTried to allocate 1 GiB")
        if name == "xsa":
            raise ValueError("two\nlines")
    builder_that(fail, monkeypatch)
    with pytest.raises(SystemExit, match="2 failed: sink, xsa"):
        bench.main(["--mechanisms=sink,xsa,acag", "--json", str(figures.path), *TINY])
    sink, xsa, plain, acag = figures()
    assert sink["error"].startswith("out of memory") and xsa["error"] == "ValueError: two lines"
    assert plain["time_ratio"] == 1 and acag["tokens_per_s"] > 0
    assert len([line for line in capsys.readouterr().out.splitlines() if "failed:" in line]) == 2


@pytest.mark.slow
def test_what_is_done_is_kept_when_the_benchmark_is_stopped(figures, monkeypatch):
    def stop(contestants, name):
        if name == "xsa":
            raise KeyboardInterrupt
    builder_that(stop, monkeypatch)
    with pytest.raises(SystemExit) as e:
        bench.main(["--mechanisms=sink,xsa,acag", "--json", str(figures.path), *TINY])
    assert e.value.code == 130 and [r["name"] for r in figures()] == ["gpt2", "sink"]
    assert json.loads(figures.path.read_text())["finished"] is False


@pytest.mark.slow
def test_memory_that_cannot_be_measured_is_a_row_too(figures, monkeypatch):
    def peak(name, args):
        if name == "sink":
            raise MemoryError
        return 2**20
    monkeypatch.setattr(bench, "peak_memory_cpu", peak)
    with pytest.raises(SystemExit, match="1 failed: sink"):
        bench.main(["--what=memory", "--mechanisms=sink,xsa", "--json", str(figures.path), *TINY])
    assert [r.get("peak_bytes") for r in figures()] == [2**20, None, 2**20]


def test_the_share_of_the_peak_is_in_the_table():
    row = dict(what="train", name="gpt2", tokens_per_s=1e6, ms=1.0, time_ratio=1.0, time_ratio_low=1.0,
               time_ratio_high=1.0, rounds=1, peak_bytes=2**20, share_of_matmul_rate=0.51, mfu=0.42)
    head, *lines = bench.table_of([row, {**row, "name": "other", "mfu": None}]).splitlines()
    assert head.endswith("MFU") and lines[0].endswith("51.0%  42.0%") and "42" not in lines[1]


def test_memory_that_is_not_there_is_one_line(monkeypatch):
    """Whatever allocates it: the allocator's error, of a RuntimeError's kind, is no bug."""
    def rows(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    monkeypatch.setattr(bench, "contest_rows", rows)
    with pytest.raises(SystemExit, match="^bench: out of memory; smaller sizes need less$"):
        bench.main(["--rounds=1"])
