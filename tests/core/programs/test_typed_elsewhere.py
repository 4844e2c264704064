"""
The command lines of nanoGPT's README and of the head-routing write-up run as printed, but for a few steps.
"""

import json
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

import evaluate
import plot_curves
import sample
import train
from helpers import TINY, write_settings
from model import GPTConfig
from nanoheads import configurator
from nanoheads.common import UserError
from nanoheads.config import TrainConfig

BOTH = (GPTConfig, TrainConfig)
SMALL = [f"--{key}={value}" for key, value in TINY.items() if key not in ("device", "lr_decay_iters")]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- programs ----

@pytest.mark.slow
def test_nanogpts_commands_are_taken_as_they_are(here, chars_data, capsys):
    """Its README's line for a MacBook, but for the steps; and sampling with its flags, or with none."""
    with pytest.raises(SystemExit, match="sample: no --ckpt is named, and there is no run under out/"):
        sample.main([])
    line = ("config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 "
            "--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 "
            "--lr_decay_iters=2000 --dropout=0.0")
    train.main([*line.split(), f"--dataset={chars_data}", "--max_iters=2", "--lr_decay_iters=2"])
    said = capsys.readouterr().out
    assert "eval_iters=20 sets eval_tokens=15360" in said and "wrote out-shakespeare-char/ckpt.pt" in said
    config = json.loads((here / "out-shakespeare-char/config.json").read_text())
    assert config["model"]["n_embd"] == 128 and config["model"]["block_size"] == 64
    sample.main(["--out_dir=out-shakespeare-char", "--device=cpu", "--max_new_tokens=5"])
    assert "--out_dir out-shakespeare-char means --ckpt out-shakespeare-char" in capsys.readouterr().err
    (here / "prompt.txt").write_text("abc")
    sample.main(["--start=FILE:prompt.txt", "--max_new_tokens=3"])
    said = capsys.readouterr()
    assert said.out.startswith("abc") and "sample: --ckpt out-shakespeare-char, the newest run" in said.err


@pytest.mark.slow
def test_the_routing_pair_is_trained_evaluated_plotted_and_sampled(here, chars_data, capsys,
                                                                   monkeypatch):
    """By the write-up's commands, with its arguments and without; the baseline is what is compared with."""
    baseline, routing = "out-enwik8-routing-ablation", "out-enwik8-routing"
    for name in ("train_enwik8_routing", "train_enwik8_routing_ablation"):
        train.main([f"config/{name}.py", f"--dataset={chars_data}", *SMALL, "--n_head=4", "--dropout=0",
                    "--device=cpu"])
    config = json.loads((here / routing / "config.json").read_text())["model"]
    assert config["routing"] == "published" and config["routing_mask"] == "zero"
    capsys.readouterr()
    named = ["--routing_checkpoint", f"{routing}/ckpt.pt", "--baseline_checkpoint", f"{baseline}/ckpt.pt"]
    for argv, first in (([*named, "--test_data", f"{chars_data}/test.bin"], f"{baseline}/ckpt.pt"),
                        (["--use_full_dataset", "--batch_size=512", "--test_data=data/enwik8/test.bin"],
                         baseline)):
        evaluate.main(argv)
        said = capsys.readouterr()
        assert f"less {first}" in said.out and "letters, test: 200 tokens" in said.out
    assert f"evaluate: --ckpt {baseline} --ckpt {routing}, the newest runs\n" in said.err
    assert "--test_data data/enwik8/test.bin means --split test" in said.err

    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **how: file.write(b"drawn"))
    plot_curves.main(["--log_file", f"{baseline}/training_log.json"])
    assert f"{baseline}/figures/curves.png" in capsys.readouterr().out
    plot_curves.main([])
    said = capsys.readouterr().out
    assert f"{routing}/figures/curves.png" in said and f"{routing}/figures/comparison.png" in said

    sample.main(["--start", "a b", "--max_new_tokens", "4"])
    said = capsys.readouterr()
    assert said.out.count("==== sample") == 3 and f"sample: --ckpt {baseline} --ckpt {routing}, " in said.err
    sample.main(["--start", "a b", "--ckpt", routing, "--max_new_tokens", "4"])  # one run, one sample
    assert "==== sample" not in capsys.readouterr().out


# ---- nanoGPT's config files ----

# what nanoGPT's config/train_gpt2.py sets, under its names, but for its names on Weights & Biases
TRAIN_GPT2 = dict(
    wandb_log=False, batch_size=12, block_size=1024, gradient_accumulation_steps=40, max_iters=600000,
    lr_decay_iters=600000, eval_interval=1000, eval_iters=200, log_interval=10, weight_decay=0.1)


def test_nanogpts_defaults_hold_in_nanogpts_config_files(here, capsys):
    """They come to what our own file of that name says in full; a program's settings win over them."""
    path = write_settings(here / "train_gpt2.py", TRAIN_GPT2)
    same = ["--vocab_size=50304", "--eval_tokens=9"]
    theirs, ours = (configurator.load(BOTH, [file, *same])
                    for file in (path, "config/train_gpt2.py"))
    assert theirs[0] == ours[0]
    assert theirs[1].for_recipe("gpt2") == replace(ours[1].for_recipe("gpt2"), lr_decay_iters=600000)
    assert capsys.readouterr().out.splitlines()[0] == (
        f"{path} is written for nanoGPT, whose defaults hold for what it leaves open: dataset=openwebtext, "
        "n_layer=12, n_head=12, n_embd=768, dropout=0.0, bias=False, adamw_lr=0.0006, min_lr=6e-05, "
        "warmup_iters=2000, beta1=0.9, beta2=0.95, grad_clip=1.0")
    model, config = configurator.load(BOTH, [path], more={"settings": dict(n_layer=2, learning_rate=0.5)})
    assert (model.n_layer, model.n_head, config.adamw_lr, config.grad_accum) == (2, 12, 0.5, 40)


def test_the_first_lines_name_dataset_rates_and_warm_up(here, chars_data, rows, capsys):
    """With all keys that nanoGPT's config files set, in a file of the reader's."""
    path = write_settings(here / "theirs.py", dict(
        TRAIN_GPT2, out_dir="out-theirs", always_save_checkpoint=False, wandb_run_name="ft", backend="nccl",
        init_from="scratch", learning_rate=1e-3, min_lr=1e-4, warmup_iters=1000, decay_lr=True, eval_iters=2))
    train.main([path, f"--dataset={chars_data}", *SMALL, "--device=cpu", "--grad_accum=1"])
    said = capsys.readouterr().out
    assert "dataset=openwebtext" not in said and "grad_accum=" not in said.splitlines()[0]
    for name in ("always_save_checkpoint", "init_from", "learning_rate", "decay_lr", "backend"):
        assert f"\n{name}=" in said
    assert (f"dataset={chars_data}, optimizer=adamw, adamw_lr=0.001, min_lr=0.0001, schedule=cosine, "
            "warmup_iters=1000\n") in said
    assert rows("out-theirs")[0][-1]["step"] == TINY["max_iters"]


# ---- keys of both ----

@pytest.mark.parametrize("theirs, ours, line", [
    ("--gradient_accumulation_steps=8", dict(grad_accum=8), "sets grad_accum=8"),
    ("--learning_rate=3e-4", dict(adamw_lr=3e-4, muon_lr=0.02), "sets adamw_lr=0.0003: the peak rate"),
    ("--eval_iters=20 --batch_size=3 --block_size=8", dict(eval_tokens=480), "sets eval_tokens=480: 20 "),
    ("--decay_lr", dict(schedule=None), "decay_lr=True sets nothing here: "),
    ("--decay_lr=False", dict(schedule="constant", warmup_iters=0), "sets schedule=constant, warmup_iters=0"),
    ("--init_from=resume", dict(init_from=None, resume=True), "init_from=resume sets "),
    # the head-routing write-up's, with its defaults for those that are not set
    ("--use_routing=True", dict(routing="published", routing_top_k=12, routing_mask="zero",
                                routing_coef=0.01, routing_eval_gate=False), "sets routing=published"),
    ("--top_k_heads=4 --use_routing=True", dict(routing_top_k=4), "top_k_heads=4 sets routing_top_k=4"),
    ("--routing=moh --top_k_heads=4", dict(routing="moh", routing_top_k=4), "sets routing_top_k=4"),
    ("--use_routing=False --top_k_heads=4", dict(routing=None, routing_top_k=None), "there is no routing"),
])
def test_a_key_of_theirs_is_taken_with_a_line_that_says_what_it_sets(theirs, ours, line, capsys):
    both = configurator.load(BOTH, theirs.split())
    for key, value in ours.items():
        assert next(getattr(config, key) for config in both if hasattr(config, key)) == value, key
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("argv, eval_tokens, adamw_lr", [
    ([], 40, 3e-4),
    (["--eval_iters=3", "--batch_size=10", "--lr=2e-3"], 60, 2e-3),
    (["--eval_iters=3", "--eval_tokens=7", "--lr=1", "--adamw_lr=2"], 7, 2),
    (["--eval_tokens=7", "--eval_iters=3", "--adamw_lr=2", "--lr=1"], 6, 1),
])
def test_of_two_names_for_one_key_the_later_wins(here, argv, eval_tokens, adamw_lr):
    path = write_settings(here / "x.py", dict(
        eval_iters=20, learning_rate=3e-4, batch_size=1, block_size=2, init_from="scratch"))
    _, config = configurator.load(BOTH, [path, *argv, "--resume"])
    assert (config.eval_tokens, config.adamw_lr, config.resume) == (eval_tokens, adamw_lr, True)


def test_a_wrong_value_is_refused_by_their_name():
    with pytest.raises(UserError, match="^command line: eval_iters='many' is not int$"):
        configurator.load(BOTH, ["--eval_iters=many"])
    with pytest.raises(UserError, match="unknown key lr"):  # of a program that does not train
        configurator.load((GPTConfig,), ["--lr=1"])
