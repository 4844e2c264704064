"""Our models timed beside nanoGPT (bench.py --nanogpt and --race), for which a stand-in is taken."""

import json
import sys

import pytest
import torch

import bench
import train
from lab.bench import nanogpt, race
from model import GPTConfig
from nanoheads import configurator
from nanoheads.config import TrainConfig
from nanoheads.configurator import Presets

SIZES = ["--n_layer=1", "--n_head=6", "--n_embd=48", "--batch_size=2", "--rounds=1", "--steps=1",
         "--threads=1", "--device=cpu", "--no-memory"]


def test_all_contestants_are_measured_in_one_run_beside_nanogpt(checkout, tmp_path, capsys):
    bench.main(["--nanogpt", checkout, *SIZES, "--block_size=8", "--vocab_size=11", "--rounds=3",
                "--json", str(tmp_path / "b.json")])
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [(r["what"], r["name"]) for r in rows] == [(w, n) for w in ("train", "decode")
                                                      for n in ("nanogpt", "gpt2", "modern")]
    for r in rows:
        assert r["tokens_per_s"] > 0 and r["reference"] == "nanogpt"
        assert r["time_ratio_low"] <= r["time_ratio"] <= r["time_ratio_high"]
    assert rows[0]["time_ratio"] == 1 and "decode" in capsys.readouterr().out


def test_on_a_cpu_nanogpt_computes_in_float32_whatever_ours_does(checkout, monkeypatch):
    args = bench.arguments(["--nanogpt", checkout, "--dtype=bfloat16", "--compile", *SIZES])
    bench.check(args)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    seen = []
    model, step, decode = nanogpt.contestant(checkout, args)()
    model.register_forward_hook(lambda *_: seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype))
    with bench.autocast(args):  # as bench.py decodes
        step(*bench.batch(args))
        model(bench.batch(args)[0])
        with nanogpt.autocast(args):
            model(bench.batch(args)[0])
    assert seen == [torch.float32, torch.bfloat16, torch.float32]
    assert nanogpt.setting(args) == "; nanoGPT float32, not compiled"
    args.dtype, args.compile = "float32", False
    assert nanogpt.setting(args) == ""


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for Python is a shell's script")
def test_the_race_trains_our_side_as_it_is_told(tmp_path, monkeypatch):
    """By a command that train.py takes, here given to a stand-in for Python."""
    (tmp_path / "log.jsonl").write_text('{"elapsed_s": 1.5}\n')
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/typed\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    for argv, dtype, compiled in (([], "float32", False),
                                  (["--dtype=bfloat16", "--compile"], "bfloat16", True)):
        loop, process = race.race_modern(race.arguments(["--nanogpt=x", *argv]), 1337, tmp_path)
        assert loop == 1.5 and process > 0
        _, program, *typed = (tmp_path / "typed").read_text().splitlines()
        model, config = configurator.load((Presets, GPTConfig, TrainConfig), typed)
        assert program == train.__file__ and model.recipe == "modern" and model.seed == 1337
        assert (config.dtype, config.compile, config.max_iters) == (dtype, compiled, 175)
