"""The training loop: exact resumes, nothing lost to a kill or a full disk, ranks that agree, clear errors."""
import fcntl
import itertools
import json
import os
import pty
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch.nn.modules.module import register_module_forward_hook

import train
from helpers import ROOT, TINY, TINY_GPT, ending, forks, in_child, same, untimed, weights
from model import MECHANISM_CLASSES, GPT, GPTConfig
from nanoheads import causality, checkpoint, ranks
from nanoheads.common import UserError
from nanoheads.config import TrainConfig
from nanoheads.ranks import Process
from train import main

CONSTANT = dict(warmup_iters=0, schedule="constant", lr_decay_iters=...)  # with adamw_lr
TINY_SIZES = {key: TINY[key] for key in ("n_layer", "n_head", "n_embd", "block_size")}
BY_CHECKPOINT = dict.fromkeys(TINY_SIZES, ...)


def before_pass(n, act, training=True):
    """A hook: act(model, output) gives what the model returns in its n-th pass, of those in training alone.

    The hook is PyTorch's own, and stays until its remove().
    """
    count = itertools.count(1)

    def hook(module, arguments, output):
        if isinstance(module, GPT) and (module.training or not training) and next(count) == n:
            return act(module, output)
    return register_module_forward_hook(hook)


@pytest.fixture
def at_step(request):
    """at_step(n, act): see before_pass()."""
    return lambda *what: request.addfinalizer(before_pass(*what).remove)


def not_finite(model, output):
    return output._replace(loss=output.loss * float("nan"))


def broken_gradient(model, output):
    """A finite loss with a gradient that is not: the derivative of sqrt at 0, times 0."""
    return output._replace(loss=output.loss + (0 * output.loss).sqrt())


def signalled(number):
    return lambda model, output: os.kill(os.getpid(), number)


# ---- a run ----

@pytest.mark.slow
def test_what_a_run_writes_and_prints_agrees(args, rows, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--adamw_lr=1", "a b"])
    argv = args(grad_clip=1.0, adamw_lr=1e-2, json=tmp_path / "result.json")
    main(argv)
    run, said = tmp_path / "run", capsys.readouterr()
    losses, evals = rows(run)

    # the log
    assert [r["step"] for r in losses] == [1, 2, 3, 4, 5, 6] and [r["step"] for r in evals] == [0, 3, 6]
    assert all(set(r) == {"step", "tokens", "loss", "adamw_lr", "tokens_per_s", "elapsed_s", "grad_norm"}
               for r in losses)
    assert all(set(r) == {"step", "tokens", "train_loss", "val_loss", "val_bpb", "elapsed_s"} for r in evals)
    assert all(r["tokens"] == r["step"] * 4 * 16 for r in losses + evals)
    assert [r["elapsed_s"] for r in losses] == sorted(r["elapsed_s"] for r in losses)

    # the folder: what it takes to run this again, and two checkpoints
    names = {path.name for path in run.iterdir()}
    assert names == {"config.json", "log.jsonl", "ckpt.pt", "best.pt", "lock"}
    config = json.loads((run / "config.json").read_text())
    assert config["model"]["vocab_size"] == 256 and config["train"]["warmup_iters"] == 10
    assert config["command"] == "python train.py --adamw_lr=1 'a b'"
    assert config["versions"]["torch"] == torch.__version__ and "json" not in config["asked"]
    if (ROOT / ".git").exists():
        assert len(config["commit"].removesuffix("-dirty")) == 40
    best = min(evals[1:], key=lambda r: r["val_loss"])
    assert [checkpoint.read(run / name)["step"] for name in ("best.pt", "ckpt.pt")] == [best["step"], 6]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result.pop("best_val_loss") == best["val_loss"] and result.pop("out_dir") == str(run)
    assert result.pop("parameters") > 0 and result == evals[-1]

    # what is printed, where there is no terminal
    assert said.err == "" and "\r" not in said.out
    lines = said.out.splitlines()
    of_evals = [f"step {r['step']:>7,}   train {r['train_loss']:.4f}   val {r['val_loss']:.4f} nats/token   "
                f"val {r['val_bpb']:.4f} bits/byte" for r in evals]
    assert [line for line in lines if "bits/byte" in line and not line.startswith(tuple(of_evals))] == []
    assert sum("bits/byte" in line for line in lines) == 3 and sum("   loss  " in line for line in lines) == 6
    for words in (f"{best['val_loss']:.4f}", f"{run}/ckpt.pt", f"{run}/best.pt", f"{run}/log.jsonl"):
        assert words in lines[-1]

    # it has ended, and says so; evaluating writes nothing, and scores the best checkpoint
    def files():
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.iterdir()
                if path.name != "lock"}
    before = files()
    for max_iters in (6, 4):
        main([*args(max_iters=max_iters), "--resume"])
        assert f"run has ended at step 6 by max_iters={max_iters}, best val loss " in capsys.readouterr().out
    main([f"--out_dir={run}", "--eval_only"])  # its folder says of which text
    assert of_evals[evals.index(best)] in capsys.readouterr().out
    assert files() == before


def test_train_returns_the_last_evaluation(rows, tmp_path, bytes_data, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no git
    config = GPTConfig(**TINY_SIZES)
    settings = train.TrainConfig(out_dir=str(tmp_path / "run"), dataset=str(bytes_data), batch_size=4,
                                 max_iters=4, eval_tokens=512)
    assert train.train(config, settings) == rows(tmp_path / "run")[1][-1]
    assert config.vocab_size is None and settings.optimizer is None, "what the caller passed stays as it was"
    assert json.loads((tmp_path / "run/config.json").read_text())["commit"] is None


@pytest.mark.slow
@pytest.mark.parametrize("keys", [dict(recipe="modern", schedule="trapezoid", dtype="bfloat16"),
                                  dict(dtype="float16", adamw_lr=1e-2)],
                         ids=lambda k: "-".join(map(str, k.values())))
def test_a_tiny_model_learns(args, rows, tmp_path, keys):
    main(args(max_iters=50, eval_interval=25, lr_decay_iters=50, **keys))
    losses, evals = rows(tmp_path / "run")
    assert evals[-1]["val_loss"] < evals[0]["val_loss"] - 0.3
    assert losses[-1]["adamw_lr"] < max(r["adamw_lr"] for r in losses) / 4, "the rate falls"


@pytest.mark.slow
def test_a_profiled_run_learns_the_same_and_leaves_a_trace(args, finished_run, tmp_path, capsys):
    """What is evaluated between recorded steps is in the trace, and not in the table of a step's calls."""
    main(args(profile=2, eval_interval=1))
    assert same(weights(finished_run / "ckpt.pt"), weights(tmp_path / "run/ckpt.pt"))
    events = json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    assert names.count("training step") == 2
    table = capsys.readouterr().out.split("calls a step\n")[1].split("\ntrace, ")[0]
    found = [(name, float(share.rstrip("%")), float(calls.replace(",", "")))
             for name, share, calls in (line.rsplit(maxsplit=2) for line in table.splitlines())]
    shares = [share for _, share, _ in found]
    assert len(found) == 10 and shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 100
    extra = [names.count(name) - 2 * calls for name, _, calls in found if name.startswith("aten::")]
    assert min(extra) >= 0 and max(extra) > 0, extra


# ---- the same losses ----

@pytest.mark.slow
def test_evaluating_logging_and_saving_change_nothing_of_what_is_computed(args, rows, tmp_path):
    main(args("a", max_iters=11, dropout=0.2, eval_interval=2, save_interval=3))
    main(args("b", max_iters=11, dropout=0.2, eval_interval=5, save_interval=4, log_interval=3))
    a, b = (rows(tmp_path / out) for out in "ab")
    assert [r["step"] for r in b[0]] == [3, 6, 9, 11] and [r["step"] for r in b[1]] == [0, 5, 10, 11]
    for mine, theirs in zip(a, b):
        by_step = {r["step"]: r for r in untimed(mine)}
        assert all(r == by_step[r["step"]] for r in untimed(theirs) if r["step"] in by_step)
    assert same(weights(tmp_path / "a/ckpt.pt"), weights(tmp_path / "b/ckpt.pt"))


@pytest.mark.slow
def test_a_step_in_portions_is_the_same_step(args, rows, tmp_path):
    """Of its rows and of its tokens, which the number of portions need not divide; a critic's too."""
    def losses(out, **keys):
        main(args(out, **keys))
        return [(r["tokens"], r["loss"]) for r in rows(tmp_path / out)[0]]
    whole = losses("whole")
    keys = dict(batch_size=1, grad_accum=4, loss_chunks=3, checkpoint_activations=True)
    assert np.array(losses("portions", **keys)) == pytest.approx(np.array(whole), abs=1e-5)
    whole, chunks = losses("critic", a2c="temperature"), losses("chunks", a2c="temperature", loss_chunks=3)
    assert np.array(chunks) == pytest.approx(np.array(whole), abs=1e-4)
    explained = [r["a2c_explained_variance"] for r in rows(tmp_path / "critic")[1]]  # by the critic, on val
    assert all(each <= 1 for each in explained) and len(set(explained)) > 1


@pytest.mark.slow
def test_a_compiled_run_has_the_same_losses_or_says_what_to_do(args, rows, fails, finished_run, tmp_path,
                                                              monkeypatch):
    def no_compiler(graph, inputs):
        raise RuntimeError("Failed to find C compiler")
    compiled = torch.compile  # without the C++ compiler, and as where there is none
    monkeypatch.setattr(torch, "compile", partial(compiled, backend="eager"))
    main(args(compile=True))
    a, b = rows(finished_run)[0], rows(tmp_path / "run")[0]
    assert [r["loss"] for r in a] == pytest.approx([r["loss"] for r in b], abs=1e-6)
    assert weights(tmp_path / "run/ckpt.pt").keys() == weights(finished_run / "ckpt.pt").keys()
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(compiled, backend=no_compiler))
    said, = fails(args("other", compile=True))
    assert "Failed to find C compiler" in said and "--compile=False" in said


# ---- several processes ----

def of_torchrun(rank, port):
    """What torchrun sets in the environment of one of two ranks."""
    return dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port))


@pytest.fixture
def two_ranks(tmp_path, free_port, monkeypatch):
    """two_ranks(argv, before) -> [(exit code, its lines "train: ...")] of two forked ranks of a run.

    before(rank): done in each of them first. What they print goes into 0.out and 1.out.
    """
    monkeypatch.setattr(ranks, "ALONE_AFTER", 1)

    def run(argv, before=lambda rank: None):
        def begin(rank):
            os.environ.update(of_torchrun(rank, free_port))
            before(rank)
        children = []
        for rank in (0, 1):
            with open(tmp_path / f"{rank}.txt", "w") as err, open(tmp_path / f"{rank}.out", "w") as out:
                children.append(in_child(argv, partial(begin, rank), out, err))
        codes = [ending(child) for child in children]
        return [(code, [line for line in (tmp_path / f"{rank}.txt").read_text().splitlines()
                        if line.startswith("train: ")]) for rank, code in enumerate(codes)]
    return run


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does(args, rows, tmp_path, monkeypatch):
    """Started by torchrun, they end in the same step, by patience, take the folder that is free, and one of
    them prints.
    """
    monkeypatch.chdir(tmp_path)
    main(args(out_dir=..., max_iters=1))
    keys = dict(CONSTANT, batch_size=2, grad_accum=2, optimizer="muon", adamw_lr=0.3, min_lr=0.3,
                max_iters=30, eval_interval=1, patience=1)
    main(args("one", **keys))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*torchrun, ROOT / "train.py", *args(out_dir=..., **keys)],
                          capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    for one, two in zip(rows("one"), rows("out/gpt-2"), strict=True):
        assert len(one) == len(two) and one[-1]["step"] < 30
        for a, b in zip(one, two):
            assert a.keys() == b.keys()
            assert all(a[k] == pytest.approx(b[k], abs=1e-4)
                       for k in a if k not in ("elapsed_s", "tokens_per_s"))
    one, two = weights("one/ckpt.pt"), weights("out/gpt-2/ckpt.pt")
    assert max((one[k] - two[k]).abs().max() for k in one) < 1e-3
    assert done.stdout.startswith("out/gpt holds another run: this one goes into out/gpt-2\n")
    assert done.stdout.count(" by patience=1, best val loss") == 1


@pytest.mark.slow
@forks
def test_the_rank_that_fails_alone_says_why(args, two_ranks):
    """The first rank knows nothing of it, and says that another one has ended."""
    def fail(model, output):
        raise UserError("its rows hold a token that is none")

    def before(rank):
        if rank == 1:
            before_pass(3, fail)
    (first, says), (second, why) = two_ranks(args(), before)
    assert first == second == 1 and why == ["train: rank 1: its rows hold a token that is none"]
    assert says == ["train: another process of this run has ended, for the reason that it gives"]


@pytest.mark.slow
@forks
def test_ranks_that_begin_apart_are_refused(args, two_ranks, tmp_path):
    """As where only one of two machines finds the checkpoint that --resume names."""
    main(args("0/run"))
    (tmp_path / "1").mkdir()
    (code, said), (other, _) = two_ranks([*args(out_dir="run", max_iters=9), "--resume"],
                                         lambda rank: os.chdir(tmp_path / str(rank)))
    assert code and other and len(said) == 1
    assert "different weights or at different steps: run" in said[0]
    assert "on a disk all machines share" in said[0]


@pytest.mark.slow
def test_a_rank_does_not_wait_for_one_that_never_starts(args, fails, free_port, monkeypatch):
    for name, value in of_torchrun(0, free_port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "START_WITHIN", ranks.START_WITHIN / 300)
    said, = fails(args())
    assert "not all processes of this run have started within 1 s: one has failed" in said


def test_a_batch_that_ranks_cannot_share_is_one_line(args, fails, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    for sizes in (dict(batch_size=4, grad_accum=1), dict(batch_size=3, grad_accum=4)):
        message, = fails(args(**sizes))
        assert all(f"{key}={value}" in message for key, value in sizes.items()) and "3 ranks" in message


# ---- resuming ----

@pytest.mark.parametrize("keys", [
    dict(recipe="gpt2", grad_accum=2, weight_decay=0.3),
    pytest.param(dict(recipe="modern", checkpoint_activations=True, dtype="float16"),
                 marks=pytest.mark.slow)], ids=lambda k: "-".join(map(str, k)))
def test_20_steps_equal_10_and_10(args, rows, tmp_path, keys):
    keys = dict(eval_interval=5, lr_decay_iters=20, dropout=0.2, **keys)
    main(args("once", max_iters=20, **keys))
    main(args("twice", max_iters=10, **keys))
    middle = rows(tmp_path / "twice")
    main([*args("twice", max_iters=20, **keys), "--resume"])
    once, twice = rows(tmp_path / "once"), rows(tmp_path / "twice")
    assert [untimed(r) for r in once] == [untimed(r) for r in twice]
    assert [r[:len(m)] for r, m in zip(twice, middle)] == list(middle), "what was logged stays"
    assert [r["elapsed_s"] for r in twice[0]] == sorted(r["elapsed_s"] for r in twice[0]), "the clock goes on"
    for name in ("ckpt.pt", "best.pt"):
        assert same(weights(tmp_path / "once" / name), weights(tmp_path / "twice" / name))
    a, b = (checkpoint.read(tmp_path / out / "ckpt.pt") for out in ("once", "twice"))
    for mine, theirs in zip(a["optimizers"], b["optimizers"], strict=True):
        assert all(same(mine["state"][p], theirs["state"][p]) for p in mine["state"])
    assert a["scaler"] == b["scaler"]
    launches = json.loads((tmp_path / "twice/config.json").read_text())["launches"]
    assert [launch["step"] for launch in launches] == [0, 10]


@pytest.mark.slow
@forks
@settings(max_examples=3)
@example([15], 4)  # in the last evaluation
@given(st.lists(st.integers(1, 16), min_size=1, max_size=2), st.integers(1, 4))
def test_killing_the_process_loses_only_unsaved_steps(whole_run, args, rows, passes, interval):
    """Killed at any pass through the model, in training or an evaluation, and again when it goes on."""
    keys, whole = whole_run
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as out:
        run = Path(folder, "run")
        argv = [*args(run, **keys, save_interval=interval), "--resume"]
        for number in passes:
            child = in_child(argv, lambda: before_pass(number, signalled(signal.SIGKILL), False), out, out)
            if ending(child) == 0:  # it has ended before
                break
            logged = rows(run)[0] if (run / "log.jsonl").is_file() else []
            seen = logged[-1]["step"] if logged else 0
            step = checkpoint.read(run / "ckpt.pt")["step"] if (run / "ckpt.pt").is_file() else 0
            assert 0 <= seen - step <= interval, "at most the steps since the last save"
            assert step == seen or seen < keys["max_iters"], "and none in the last evaluation"
        main(argv)
        found, expected = ([untimed(r) for r in rows(each)] for each in (run, whole))
        assert found == expected, "each row once, and the same"
        assert same(weights(run / "ckpt.pt"), weights(whole / "ckpt.pt"))
        assert same(weights(run / "best.pt"), weights(whole / "best.pt"))


@pytest.fixture
def whole_run(args, tmp_path):
    """(its keys, the folder) of a run that nothing stops."""
    keys = dict(max_iters=8, eval_interval=3, dropout=0.2, eval_tokens=64)
    main(args("whole", **keys))
    return keys, tmp_path / "whole"


def test_what_changes_at_a_resume_takes_effect_and_is_said(args, rows, tmp_path, capsys):
    main(args(weight_decay=0.1, warmup_iters=0))
    capsys.readouterr()
    main([*args(max_iters=8, adamw_lr=0.1, min_lr=0.1, weight_decay=0.7,
                batch_size=2, grad_accum=2, warmup_iters=0), "--resume"])
    said = capsys.readouterr().out
    for words in ("max_iters=8, was 6", "adamw_lr=0.1, was 0.001",
                  "weight_decay=0.7, was 0.1", "batch_size=2, was 4"):
        assert f"changed since the last save: {words}" in said
    assert rows(tmp_path / "run")[0][-1]["adamw_lr"] == pytest.approx(0.1)
    adamw, = checkpoint.read(tmp_path / "run/ckpt.pt")["optimizers"]
    assert adamw["param_groups"][0]["weight_decay"] == 0.7


@pytest.mark.slow
def test_a_rate_that_rises_again_is_said_with_both_rates(args, rows, tiny_run, tmp_path, capsys):
    keys = dict(adamw_lr=1e-2, min_lr=1e-4, warmup_iters=0, lr_decay_iters=...)
    main(args("low", **keys))
    shutil.copytree(tmp_path / "low", tmp_path / "high")
    capsys.readouterr()
    main([*args("high", **keys, max_iters=12), "--resume"])
    line, = (line for line in capsys.readouterr().out.splitlines() if "learning rate" in line)
    by_step = {row["step"]: row["adamw_lr"] for row in rows(tmp_path / "high")[0]}
    assert by_step[7] > 2 * by_step[6] and line.endswith("; --lr_decay_iters=6 keeps it low")
    assert all(f"{by_step[step]:.2e}" in line for step in (6, 7))
    main([*args("low", **{**keys, "lr_decay_iters": 6}, max_iters=9), "--resume"])
    assert rows(tmp_path / "low")[0][-1]["adamw_lr"] == pytest.approx(1e-4)
    main([*args("tiny", max_iters=8), "--resume"])  # it is in its warm-up
    assert "learning rate" not in capsys.readouterr().out


def test_resume_where_nothing_is_starts_anew_and_overwrite_starts_over(args, rows, tmp_path, capsys):
    main(args(resume=True, max_iters=9))
    assert "ckpt.pt is not there yet: the run starts anew" in capsys.readouterr().out
    main([*args(seed=5), "--overwrite"])
    assert [r["step"] for r in rows(tmp_path / "run")[0]] == [1, 2, 3, 4, 5, 6]
    assert checkpoint.read(tmp_path / "run/ckpt.pt")["config"]["seed"] == 5


def test_a_folder_and_a_checkpoint_may_be_links(args, tiny_run, tmp_path):
    """A checkpoint that is one is read, and then replaced; what it leads to stays."""
    kept = (tiny_run / "ckpt.pt").rename(tmp_path / "kept.pt")
    before = kept.read_bytes()
    (tiny_run / "ckpt.pt").symlink_to(kept)
    (tmp_path / "run").symlink_to(tiny_run)
    main([*args(max_iters=8), "--resume"])
    assert kept.read_bytes() == before and checkpoint.read(tiny_run / "ckpt.pt")["step"] == 8


# ---- checkpoints as a beginning ----

@pytest.mark.slow
def test_fine_tuning_takes_the_model_and_a_fresh_optimizer(args, rows, tmp_path):
    """What follows from the recipe follows from the checkpoint's. The best weights may be the first ones."""
    main(args("base", recipe="modern", n_layer=2, max_iters=60, eval_interval=60))
    keys = dict(BY_CHECKPOINT, block_size=8, init_from=tmp_path / "base", dropout=0.1, adamw_lr=0.5,
                min_lr=0.5, warmup_iters=0)
    main(args("tuned", **keys))
    state, evals = checkpoint.read(tmp_path / "tuned/ckpt.pt"), rows(tmp_path / "tuned")[1]
    assert state["step"] == 6 and state["train"]["optimizer"] == "muon"
    assert state["config"].items() >= dict(recipe="modern", n_layer=2, block_size=8, dropout=0.1).items()
    assert evals[0]["val_loss"] < 0.97 * rows(tmp_path / "base")[1][0]["val_loss"], "where the other ended"
    assert evals[0]["val_loss"] < evals[-1]["val_loss"], "this training only spoils"
    assert same(weights(tmp_path / "tuned/best.pt"), weights(tmp_path / "base/best.pt"))
    main([*args("tuned", **keys, max_iters=9), "--resume"])
    assert checkpoint.read(tmp_path / "tuned/ckpt.pt")["step"] == 9, "and is resumed with the same command"


def test_fine_tuning_a_nanogpt_checkpoint(args, tmp_path):
    sizes = dict(n_layer=2, n_head=2, n_embd=8, block_size=32, vocab_size=300, bias=True, dropout=0.0)
    weights = {f"_orig_mod.{k}": v for k, v in GPT(GPTConfig(**sizes)).state_dict().items()}
    torch.save(dict(model=weights, optimizer={}, model_args=sizes, iter_num=5,
                    best_val_loss=torch.tensor(9.0), config=dict(dataset="x")), tmp_path / "theirs.pt")
    main(args(**BY_CHECKPOINT, init_from=tmp_path / "theirs.pt"))
    assert checkpoint.read(tmp_path / "run/ckpt.pt")["config"].items() >= sizes.items()


# ---- patience ----

def last_of(losses, patience):
    """The evaluation, of all with these validation losses, by which a run ends; that at 0 does not count."""
    for n in range(1, len(losses)):
        best = min(range(1, n + 1), key=losses.__getitem__)  # of equal ones the first
        if n - best >= patience:
            return n
    return len(losses) - 1


@pytest.mark.slow
def test_evaluations_without_a_lower_loss_end_the_run(args, rows, tmp_path, capsys):
    """A lower one begins the count anew; at this rate the loss goes up and down."""
    keys = dict(CONSTANT, adamw_lr=0.1, min_lr=0.1, eval_interval=1, max_iters=24, batch_size=2)
    main(args("without", **keys))
    losses = [row["val_loss"] for row in rows(tmp_path / "without")[1]]
    ends = {patience: last_of(losses, patience) for patience in (2, 7, 9)}
    assert len({*ends.values()}) == 3 and 24 in ends.values(), losses
    for patience, step in ends.items():
        main([*args(patience=patience, **keys), "--resume"])
        said = capsys.readouterr().out
        assert rows(tmp_path / "run")[1][-1]["step"] == step
        assert step == 24 or f"ended at step {step} by patience={patience}, best val loss " in said
    assert same(weights(tmp_path / "run/ckpt.pt"), weights(tmp_path / "without/ckpt.pt"))


@pytest.mark.parametrize("stopped", [5, 6])
def test_a_resumed_run_has_as_much_patience_left(stopped, args, rows, tmp_path, at_step):
    """Stopped between two evaluations, or before one. At this rate all losses are equal: none is lower."""
    keys = dict(CONSTANT, adamw_lr=1e-30, min_lr=1e-30, eval_interval=2, max_iters=18, patience=3)
    at_step(stopped, signalled(signal.SIGTERM))
    with pytest.raises(SystemExit):
        main(args(**keys))
    assert checkpoint.read(tmp_path / "run/ckpt.pt")["step"] == stopped
    main([*args(**keys), "--resume"])
    assert [row["step"] for row in rows(tmp_path / "run")[1]] == [0, 2, 4, 6, 8]


# ---- signals, terminals and readers that go ----

@pytest.mark.slow
def test_a_signal_saves_and_leaves_with_one_line(args, rows, tmp_path, capsys):
    main(args("whole", dropout=0.2))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        capsys.readouterr()
        handler, run = signal.getsignal(number), tmp_path / number.name
        hook = before_pass(5, signalled(number))
        with pytest.raises(SystemExit) as e:
            main(args(run, dropout=0.2))
        hook.remove()
        assert e.value.code == 128 + number and signal.getsignal(number) is handler
        said = capsys.readouterr()
        assert said.out.splitlines()[-1] == (
            f"stopped by {number.name} at step 5: saved {run}/ckpt.pt; go on with --resume")
        assert not said.err and checkpoint.read(run / "ckpt.pt")["step"] == 5
        main([*args(run, dropout=0.2), "--resume"])
        assert [untimed(r) for r in rows(run)] == [untimed(r) for r in rows(tmp_path / "whole")]
        assert same(weights(run / "ckpt.pt"), weights(tmp_path / "whole/ckpt.pt"))


def test_a_hangup_that_nohup_ignores_stays_ignored(args, at_step, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        at_step(2, signalled(signal.SIGHUP))
        main(args())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert checkpoint.read(tmp_path / "run/ckpt.pt")["step"] == 6


@forks
def test_a_second_signal_ends_a_run_at_once(args):
    def twice(model, output):
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
    assert ending(in_child(args(), lambda: before_pass(5, twice))) == -signal.SIGTERM


@forks
def test_a_run_whose_terminal_closes_is_saved(args, tmp_path):
    """In a session of its own, hung up as when a window is closed. On a terminal there is a bar."""
    def wide():
        fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 250, 0, 0))
    child, terminal = in_child(args(max_iters=5000, eval_interval=5000), wide, fork=pty.fork)
    seen = b""
    bar = b"\r", b"/5000", b"step/s", b"loss=", b"val bpb=", b"tok/s="
    while not all(word in seen for word in bar):
        seen += os.read(terminal, 1000)
    os.close(terminal)
    assert ending(child) == 128 + signal.SIGHUP
    assert checkpoint.read(tmp_path / "run/ckpt.pt")["step"] > 0


@forks
def test_a_run_whose_reader_is_gone_is_saved(args, rows, tmp_path):
    """As by `| tee` after Ctrl-C, which ends tee first, or by `| head`."""
    end, start = os.pipe()
    with open(start, "w") as out, open(tmp_path / "said.txt", "w") as err:
        child = in_child(args(max_iters=5000, eval_interval=5000), lambda: os.close(end), out, err)
    with open(end) as reader:
        while "nats/token" not in reader.readline():
            pass
    assert ending(child) == 128 + signal.SIGPIPE
    step = checkpoint.read(tmp_path / "run/ckpt.pt")["step"]
    assert (tmp_path / "said.txt").read_text().endswith(
        f"which is gone at step {step:,}: saved {tmp_path}/run/ckpt.pt; go on with --resume\n")
    main([*args(max_iters=step + 1), "--resume"])
    assert rows(tmp_path / "run")[0][-1]["step"] == step + 1


# ---- what is not finite, full disks, memory ----

@pytest.mark.parametrize("keys, step", [
    (dict(save_interval=2), 5), (dict(save_interval=2, log_interval=100, eval_interval=100, max_iters=8), 6)],
    ids=["logged", "read before a save"])
def test_a_loss_that_is_not_finite_stops_before_the_update(args, fails, rows, tmp_path, at_step, keys, step):
    """It is read where it is logged, and before something is saved; the rows before it are there."""
    at_step(5, not_finite)
    said, = fails(args(**keys))
    assert said.startswith(f"loss is nan in step {step}: stopped before anything of it is saved; ")
    logged = [] if "log_interval" in keys else [*range(1, step)]
    assert [r["step"] for r in rows(tmp_path / "run")[0]] == logged
    assert f"the last save is {tmp_path}/run/ckpt.pt, --resume goes on from it" in said
    state = checkpoint.read(tmp_path / "run/ckpt.pt")
    assert state["step"] == 4 and all(w.isfinite().all() for w in state["model"].values())
    main([*args(**keys), "--resume"])


def test_a_gradient_that_is_not_finite_stops_the_run(args, fails, at_step):
    at_step(5, broken_gradient)
    said, = fails(args(save_interval=2))
    assert said.startswith("grad_norm is nan in step 5: stopped before anything of it is saved")


def test_weights_that_are_not_finite_are_never_saved(args, fails, tmp_path, at_step):
    at_step(4, broken_gradient)
    said, = fails(args(save_interval=2, grad_clip=0))  # nobody computes the norm
    assert "the weights are no longer finite at step 4, not saved" in said
    assert checkpoint.read(tmp_path / "run/ckpt.pt")["step"] == 2


def test_in_fp16_an_overflow_skips_the_step_of_every_optimizer(args, tmp_path, at_step):
    """The head alone has an infinite gradient: AdamW's, while Muon's stay finite."""
    def overflow(model, output):
        total = model.lm_head.weight.sum()
        return output._replace(loss=output.loss + (total - total.detach()) * 1e30)
    at_step(1, overflow)
    main(args(recipe="modern", dtype="float16", max_iters=1))
    fresh = GPT(GPTConfig(vocab_size=256, recipe="modern", **TINY_SIZES))
    assert same(weights(tmp_path / "run/ckpt.pt"), fresh.state_dict())


@pytest.fixture
def limit():
    """limit(size): no file may become larger, as on a full disk; limit(): on one with room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size=soft: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_the_previous_checkpoint(args, fails, tmp_path, at_step, limit):
    at_step(5, lambda *_: limit(20000))
    said, = fails(args(save_interval=2))
    limit()
    assert said == f"could not write {tmp_path}/run/ckpt.pt (File too large); the previous one is intact"
    steps = [checkpoint.read(tmp_path / "run" / name)["step"] for name in ("best.pt", "ckpt.pt")]
    assert steps == [3, 4] and not list((tmp_path / "run").glob("*.part"))


def test_a_run_whose_disk_is_full_says_so_in_a_line_and_goes_on_later(args, fails, rows, tmp_path, at_step,
                                                                      limit):
    """The log fills it, with half of a row."""
    at_step(5, lambda *_: limit((tmp_path / "run/log.jsonl").stat().st_size + 30))
    said, = fails(args(save_interval=4, eval_interval=50))
    limit()
    assert said.startswith(
        f"could not write {tmp_path}/run/log.jsonl (File too large); the last save is {tmp_path}/run/ckpt.pt")
    main([*args(save_interval=4, eval_interval=50), "--resume"])
    assert [r["step"] for r in rows(tmp_path / "run")[0]] == [1, 2, 3, 4, 5, 6], "the half row is gone"


@pytest.mark.slow
def test_running_out_of_memory_is_one_line_with_a_smaller_batch(args, fails, at_step):
    """On a GPU, and on a CPU where a step asks for more than any machine has."""
    def fail(model, output):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")
    at_step(2, fail)
    said, = fails(args())
    assert said.startswith("out of memory; --batch_size=2 --grad_accum=2 makes the same step in less; ")
    for key in ("batch_size", "grad_accum"):
        said, = fails(args(key, **{key: 10**15}))
        assert said.startswith("out of memory; ")


# ---- Weights & Biases ----

@pytest.fixture
def wandb(monkeypatch):
    """A made-up one, which keeps what it is called with; its runs are wandb.init.return_value."""
    fake = mock.MagicMock()
    fake.errors.UsageError = type("UsageError", (Exception,), {})
    fake.init.return_value.disabled = False
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.mark.parametrize("broken", ["import", "init", "log", "key"])
def test_a_wandb_failure_never_stops_training(args, rows, tmp_path, monkeypatch, capsys, wandb, broken):
    """A missing key, and nothing else, is tried again offline."""
    run, problem, modes = wandb.init.return_value, ConnectionError("no network\nat all"), [None]
    if broken == "key":
        problem, modes = wandb.errors.UsageError("no key"), [None, "offline"]
    if broken == "import":
        modes = []
        monkeypatch.setitem(sys.modules, "wandb", None)
    (run.log if broken == "log" else wandb.init).side_effect = problem
    main(args(wandb_log=True))
    said, = capsys.readouterr().err.splitlines()
    assert said.startswith("wandb: ") and said.endswith("training goes on without it")
    assert [call.kwargs["mode"] for call in wandb.init.call_args_list] == modes
    assert len(rows(tmp_path / "run")[0]) == 6


def test_wandb_gets_rows_config_code_and_the_same_id_again(args, wandb):
    keys, run = dict(wandb_log=True, wandb_mode="offline", wandb_tags="a,b"), wandb.init.return_value
    main(args(**keys))
    main([*args(**keys, max_iters=8), "--resume"])
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    assert first["id"] == second["id"] and first["resume"] == "allow" and run.finish.call_count == 2
    assert first.items() >= dict(mode="offline", tags=["a", "b"], name="run").items()
    assert first["config"]["model"]["n_embd"] == 16 and first["config"]["train"]["adamw_lr"] == 1e-3
    files = {Path(call.args[0]).name for call in wandb.Artifact.return_value.add_file.call_args_list}
    assert {"train.py", "model.py", "config.json"} <= files
    logged = [(call.kwargs["step"], call.args[0]) for call in run.log.call_args_list]
    assert [step for step, row in logged if "loss" in row] == list(range(1, 9))
    assert [step for step, row in logged if "val_bpb" in row] == [0, 3, 6, 8]


@forks
@pytest.mark.slow
@pytest.mark.skipif(not find_spec("wandb"), reason="wandb is not installed")
def test_wandb_logs_offline_where_there_is_no_key(args, tmp_path):
    """The real one. There is nobody to ask for a key, and no server: nothing listens on its port."""
    def alone():
        for name in [*os.environ]:
            if name.startswith("WANDB_") or name == "NETRC":
                del os.environ[name]
        for name in ("CONFIG", "CACHE", "DATA"):
            os.environ[f"WANDB_{name}_DIR"] = str(tmp_path / f"wandb_{name.lower()}")
        os.environ.update(HOME=str(tmp_path), WANDB_BASE_URL="http://127.0.0.1:9")
        os.chdir(tmp_path)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = open(0, closefd=False)
    with open(os.devnull, "w") as out, open(tmp_path / "said.txt", "w") as err:
        assert ending(in_child(args(wandb_log=True), alone, out, err)) == 0
    said = (tmp_path / "said.txt").read_text()
    assert "goes on without it" not in said
    run_id = checkpoint.read(tmp_path / "run/ckpt.pt")["run_id"]
    folder, = tmp_path.glob(f"run/wandb/offline-run-*-{run_id}")
    assert f"`wandb sync {folder}` uploads it" in said
    deadline = time.time() + 30  # a process of wandb's own writes the file
    while not all(word in (folder / f"run-{run_id}.wandb").read_bytes()
                  for word in (b"val_bpb", b"n_embd", f"code-{run_id}".encode())):
        assert time.time() < deadline
        time.sleep(0.1)


# ---- mechanisms that are trained without being asked whether they look ahead ----

def test_what_is_known_to_be_causal_are_the_mechanisms_of_this_repository():
    assert sorted(causality.TRIED) == sorted(cls.__name__ for cls in MECHANISM_CLASSES)


# ---- what a step draws and clips ----

def test_each_step_of_each_rank_has_dropout_of_its_own():
    """And the same one whenever it is made again, whatever was drawn before."""
    x, y = torch.randint(37, (2, 4, 16), generator=torch.Generator().manual_seed(1))

    def loss(step, rank):
        model = GPT(GPTConfig(**TINY_GPT, dropout=0.5))
        run = train.ready_to_step(model, TrainConfig().for_recipe("gpt2"), Process(rank=rank))
        run.step = step
        return train.training_step(run, x, y)["loss"].item()

    places = [*itertools.product(range(3), range(2))]
    losses = [loss(*place) for place in places]
    assert len({*losses}) == 6 and [loss(*place) for place in places[::-1]] == losses[::-1]


def test_a_gradient_is_clipped_before_the_step_and_logged_as_it_was():
    """A first moment is a tenth of the gradient that the optimizer was given."""
    x, y = torch.randint(37, (2, 4, 16), generator=torch.Generator().manual_seed(1))

    def norms(bound):
        run = train.ready_to_step(GPT(GPTConfig(**TINY_GPT)), TrainConfig(grad_clip=bound).for_recipe("gpt2"))
        logged = train.training_step(run, x, y)["grad_norm"].item()
        moments = [state["exp_avg"].flatten() for state in run.optimizers[0].state.values()]
        return logged, 10 * torch.cat(moments).norm().item()

    norm, given = norms(1e9)
    assert norm == pytest.approx(given, rel=1e-4) and norms(0.01) == pytest.approx((norm, 0.01), rel=1e-3)
