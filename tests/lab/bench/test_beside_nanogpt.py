"""Our models beside nanoGPT, of which there is a stand-in."""

import json

import pytest
import torch

import bench
from lab.bench import nanogpt, race

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
        assert seen == [torch.float32, torch.bfloat16]
        with nanogpt.autocast(args):
            model(bench.batch(args)[0])
    assert seen[2] == torch.float32
    assert nanogpt.setting(args) == "; nanoGPT float32, not compiled"
    args.dtype, args.compile = "float32", False
    assert nanogpt.setting(args) == ""


def test_the_race_trains_our_side_as_it_is_told(tmp_path, monkeypatch):
    commands = []

    def run_timed(command, folder):
        commands.append(command)
        return [(2.5, "")]
    monkeypatch.setattr(race, "run_timed", run_timed)
    (tmp_path / "log.jsonl").write_text('{"elapsed_s": 1.5}\n')
    for argv, words in (([], ["--dtype=float32", "--compile=False"]),
                        (["--dtype=bfloat16", "--compile"], ["--dtype=bfloat16", "--compile=True"])):
        args = race.arguments(["--nanogpt=x", *argv])
        assert race.race_modern(args, 1337, tmp_path) == (1.5, 2.5)
        assert {*words} < {*commands[-1]}
