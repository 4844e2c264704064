"""The command lines of nanoGPT's README and of the head-routing write-up, as printed, but for a few steps."""

import json
from dataclasses import replace

import pytest

import evaluate
import plot_curves
import sample
import train
from helpers import TINY, in_nanogpts_words, torchrun
from model import GPTConfig
from nanoheads import checkpoint, configurator
from nanoheads.config import TrainConfig

SMALL = [f"--{key}={value}" for key, value in TINY.items() if key not in ("device", "lr_decay_iters")]
FEW = ["--max_iters=2", "--eval_interval=2", "--eval_tokens=64", "--device=cpu"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- nanoGPT ----

@pytest.mark.slow
def test_the_baby_gpt_is_trained_and_sampled_from(here, chars_data, capsys):
    train.main(["config/train_shakespeare_char.py", f"--dataset={chars_data}", *SMALL, "--device=cpu"])
    assert "wrote out-shakespeare-char/ckpt.pt" in capsys.readouterr().out
    sample.main(["--out_dir=out-shakespeare-char", "--max_new_tokens=5"])
    said = capsys.readouterr()
    assert said.out.strip() and "--out_dir out-shakespeare-char means --ckpt out-shakespeare-char" in said.err


@pytest.mark.slow
def test_the_line_for_a_macbook_is_taken_as_it_is(here, chars_data, rows, capsys):
    line = ("config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 "
            "--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 "
            "--lr_decay_iters=2000 --dropout=0.0")
    train.main([*line.split(), f"--dataset={chars_data}", "--max_iters=2", "--lr_decay_iters=2"])
    said = capsys.readouterr().out
    assert "eval_iters=20 sets eval_tokens=15360" in said
    config = json.loads((here / "out-shakespeare-char/config.json").read_text())
    assert config["model"]["n_embd"] == 128 and config["model"]["block_size"] == 64
    sample.main(["--out_dir=out-shakespeare-char", "--device=cpu", "--max_new_tokens=5"])


@pytest.mark.slow
def test_sampling_without_any_argument_takes_the_newest_run(here, chars_data, capsys):
    with pytest.raises(SystemExit, match="sample: no --ckpt is named, and there is no run under out/"):
        sample.main([])
    for out in ("out/old", "out-new"):
        train.main([f"--out_dir={out}", f"--dataset={chars_data}", *SMALL, "--device=cpu"])
    capsys.readouterr()
    sample.main(["--max_new_tokens=3"])
    assert "sample: --ckpt out-new, the newest run" in capsys.readouterr().err
    (here / "prompt.txt").write_text("abc")
    sample.main(["--start=FILE:prompt.txt", "--max_new_tokens=3"])
    assert capsys.readouterr().out.startswith("abc")


@pytest.mark.slow
def test_gpt2_is_trained_on_ranks(here, gpt2_data, rows):
    """Two gloo ranks in the place of eight GPUs; 40 portions in a step, as in the config."""
    done = torchrun(["config/train_gpt2.py", f"--dataset={gpt2_data}", "--out_dir=out", "--n_layer=1",
                     "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=1", "--log_interval=1",
                     *FEW], 2)
    assert done.returncode == 0, done.stderr
    assert "warmup_iters=2000 is longer than the schedule of 2 steps" in done.stdout
    assert rows("out")[0][-1]["step"] == 2


@pytest.mark.slow
def test_nanogpts_own_config_file_is_read(here, chars_data, rows, capsys):
    """All keys of its train_shakespeare_char.py and finetune_shakespeare.py, in a file of the reader's."""
    (here / "theirs.py").write_text(f"""
import time
out_dir = 'out-theirs'
eval_interval = 250
eval_iters = 200
log_interval = 10
always_save_checkpoint = False
wandb_log = False
wandb_project = 'shakespeare-char'
wandb_run_name = 'ft-' + str(time.time())
dataset = {str(chars_data)!r}
init_from = 'scratch'
gradient_accumulation_steps = 1
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = 5000
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
decay_lr = True
backend = 'nccl'
""")
    train.main(["theirs.py", *SMALL, "--device=cpu"])
    said = capsys.readouterr().out
    for name in ("eval_iters", "always_save_checkpoint", "init_from", "gradient_accumulation_steps",
                 "learning_rate", "decay_lr", "backend"):
        assert f"theirs.py: {name}=" in said
    assert rows("out-theirs")[0][-1]["step"] == TINY["max_iters"]


# what nanoGPT's config/train_gpt2.py sets, under its names, but for its names on Weights & Biases
TRAIN_GPT2 = dict(
    wandb_log=False, batch_size=12, block_size=1024, gradient_accumulation_steps=40, max_iters=600000,
    lr_decay_iters=600000, eval_interval=1000, eval_iters=200, log_interval=10, weight_decay=0.1)


def test_nanogpts_defaults_hold_in_nanogpts_config_files(here, capsys):
    """They come to what our own file of that name says in full."""
    path = in_nanogpts_words(here / "train_gpt2.py", TRAIN_GPT2)
    same = ["--vocab_size=50304", "--eval_tokens=9"]
    theirs, ours = (configurator.load((GPTConfig, TrainConfig), [file, *same])
                    for file in (path, "config/train_gpt2.py"))
    assert theirs[0] == ours[0]
    assert theirs[1].for_recipe("gpt2") == replace(ours[1].for_recipe("gpt2"), lr_decay_iters=600000)
    assert capsys.readouterr().out.splitlines()[0] == (
        f"{path} is written for nanoGPT, whose defaults hold for what it leaves open: dataset=openwebtext, "
        "n_layer=12, n_head=12, n_embd=768, dropout=0.0, bias=False, adamw_lr=0.0006, min_lr=6e-05, "
        "warmup_iters=2000, beta1=0.9, beta2=0.95, grad_clip=1.0")


def test_the_first_lines_name_dataset_rates_and_warm_up(here, chars_data, capsys):
    path = in_nanogpts_words(here / "train_gpt2.py", TRAIN_GPT2)
    train.main([path, f"--dataset={chars_data}", "--n_layer=1", "--n_head=2", "--n_embd=16",
                "--block_size=16", "--batch_size=1", "--grad_accum=1", "--lr_decay_iters=600000", *FEW])
    said = capsys.readouterr().out
    assert "dataset=openwebtext" not in said and "grad_accum=" not in said.splitlines()[0]
    assert (f"dataset={chars_data}, optimizer=adamw, adamw_lr=0.0006, min_lr=6e-05, schedule=cosine, "
            "warmup_iters=2000\n") in said


def test_a_scale_is_a_start_of_its_own(here):
    (here / "mine.py").write_text("scale = 'tiny'\nlearning_rate = 1e-3")
    (model, config), tiny = (configurator.load((configurator.Presets, GPTConfig, TrainConfig), [arg])
                             for arg in ("mine.py", "--scale=tiny"))
    assert model == tiny[0] and config == replace(tiny[1], adamw_lr=1e-3, out_dir=config.out_dir)


# ---- head routing ----

@pytest.mark.slow
def test_the_routing_pair_is_trained_evaluated_plotted_and_sampled(here, chars_data, capsys):
    small = [each for each in SMALL if not each.startswith("--n_head")] + ["--n_head=4", "--dropout=0"]
    for name in ("train_enwik8_routing", "train_enwik8_routing_ablation"):
        train.main([f"config/{name}.py", f"--dataset={chars_data}", *small, "--device=cpu"])
    config = checkpoint.read("out-enwik8-routing")["config"]
    assert config["routing"] == "published" and config["routing_mask"] == "zero"
    capsys.readouterr()
    evaluate.main(["--routing_checkpoint", "out-enwik8-routing/ckpt.pt",
                   "--baseline_checkpoint", "out-enwik8-routing-ablation/ckpt.pt",
                   "--test_data", f"{chars_data}/test.bin", "--use_full_dataset", "--batch_size", "512"])
    said = capsys.readouterr().out
    assert "less out-enwik8-routing-ablation/ckpt.pt" in said and ", test: " in said
    for run in ("out-enwik8-routing", "out-enwik8-routing-ablation"):
        plot_curves.main(["--log_file", f"{run}/training_log.json"])
        assert (here / run / "figures/curves.png").is_file()
    sample.main(["--ckpt=out-enwik8-routing-ablation", "--ckpt=out-enwik8-routing", "--start", "a b",
                 "--num_samples", "2", "--max_new_tokens", "4", "--temperature", "1.2", "--top_k", "100"])


@pytest.mark.slow
def test_the_routing_write_ups_commands_without_arguments(here, chars_data, capsys):
    """They find its two runs, with as many samples as it prints; the baseline is what is compared with."""
    small = [each for each in SMALL if not each.startswith("--n_head")] + ["--n_head=4", "--dropout=0"]
    pair = ["out-enwik8-routing-ablation", "out-enwik8-routing"]
    for name in ("train_enwik8_routing", "train_enwik8_routing_ablation"):
        train.main([f"config/{name}.py", f"--dataset={chars_data}", *small, "--device=cpu"])
    capsys.readouterr()
    for more in ([], ["--use_full_dataset", "--batch_size", "512"], ["--test_data", "data/enwik8/test.bin"]):
        evaluate.main(more)
        said = capsys.readouterr()
        assert f"evaluate: --ckpt {pair[0]} --ckpt {pair[1]}, the newest runs\n" in said.err
        assert f"\nless {pair[0]}" in said.out and "letters, test: 200 tokens" in said.out
    assert "--test_data data/enwik8/test.bin means --split test" in said.err
    plot_curves.main([])
    assert {f"{run}/figures/curves.png" for run in pair} <= {*capsys.readouterr().out.split()}
    assert (here / "figures/comparison.png").is_file()
    sample.main(["--start", "a b"])
    said = capsys.readouterr()
    assert said.out.count("==== sample") == 3 and f"sample: --ckpt {pair[0]} --ckpt {pair[1]}, " in said.err
    sample.main(["--start", "a b", "--ckpt", pair[1], "--max_new_tokens", "4"])  # one run, one sample
    assert "==== sample" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_routing_write_ups_keys_make_its_model(here, chars_data):
    train.main([f"--dataset={chars_data}", "--use_routing=True", "--top_k_heads=None",
                "--entropy_reg_coef=0.02", *SMALL, "--device=cpu", "--out_dir=out/all"])
    config = checkpoint.read("out/all")["config"]
    assert config["routing_top_k"] == TINY["n_head"] and config["routing_coef"] == 0.02
