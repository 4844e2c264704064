"""OpenAI's weights by their short names, as nanoGPT's files and command lines ask for them."""

import shutil
from pathlib import Path

import pytest
import torch

import sample
import train
from helpers import in_nanogpts_words

FEW = ["--max_iters=2", "--eval_interval=2", "--eval_tokens=64", "--device=cpu"]

# what two of nanoGPT's config files set, under its names, but for its names on Weights & Biases
FINETUNE_SHAKESPEARE = dict(
    out_dir="out-shakespeare", eval_interval=5, eval_iters=40, wandb_log=False, dataset="shakespeare",
    init_from="gpt2-xl", always_save_checkpoint=False, batch_size=1, gradient_accumulation_steps=32,
    max_iters=20, learning_rate=3e-5, decay_lr=False)
EVAL_GPT2 = dict(batch_size=8, eval_iters=500, eval_only=True, wandb_log=False, init_from="gpt2")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small_gpt2(folder, tokens=None):
    """A random GPT-2 as transformers saves it, with its vocabulary and three layers of 16.

    tokens: the folder of the files of GPT-2's byte pairs, from which its tokenizer is made too.
    """
    transformers = pytest.importorskip("transformers", reason="transformers, an optional library, is absent")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_positions=32, n_embd=16, n_layer=3, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    if tokens:
        for ours, theirs in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
            shutil.copy(tokens / "gpt2_bpe" / ours, Path(folder, theirs))


@pytest.mark.slow
@pytest.mark.parametrize("size", ["", "_medium", "_large", "_xl"])
def test_openais_weights_are_evaluated(size, home, gpt2_data, capsys):
    small_gpt2("gpt2" + size.replace("_", "-"))
    train.main([f"config/eval_gpt2{size}.py", f"--dataset={gpt2_data}", "--device=cpu", "--eval_tokens=64"])
    assert "nats/token" in capsys.readouterr().out and not (home / "out").exists()


@pytest.mark.slow
def test_openais_weights_are_fine_tuned_at_a_constant_rate(home, gpt2_data, rows):
    small_gpt2("gpt2-xl")
    train.main(["config/finetune_shakespeare.py", f"--dataset={gpt2_data}", "--grad_accum=2", *FEW,
                "--log_interval=1"])
    steps = rows("out-shakespeare")[0]
    assert [row["adamw_lr"] for row in steps] == [3e-5, 3e-5]
    sample.main(["--out_dir=out-shakespeare", "--max_new_tokens=3"])


@pytest.mark.slow
def test_openais_weights_are_sampled_from(home, gpt2_files, capsys):
    small_gpt2("gpt2-xl", gpt2_files)
    sample.main(["--init_from=gpt2-xl", "--start=What is the answer to life, the universe, and everything?",
                 "--num_samples=5", "--max_new_tokens=4"])
    said = capsys.readouterr()
    assert said.out.count("==== sample") == 5 and "--init_from gpt2-xl means --ckpt gpt2-xl" in said.err


def test_nanogpts_own_files_take_the_sizes_of_a_checkpoint(home, gpt2_data, rows, capsys):
    small_gpt2("gpt2-xl")
    small_gpt2("gpt2")
    train.main([in_nanogpts_words(home / "finetune.py", FINETUNE_SHAKESPEARE),
                f"--dataset={gpt2_data}", "--max_iters=2", "--grad_accum=2", "--device=cpu",
                "--eval_tokens=64"])
    assert [row["adamw_lr"] for row in rows("out-shakespeare")[0]] == [3e-5, 3e-5]
    capsys.readouterr()
    train.main([in_nanogpts_words(home / "eval.py", EVAL_GPT2), f"--dataset={gpt2_data}",
                "--device=cpu", "--eval_iters=1"])
    assert "nats/token" in capsys.readouterr().out
