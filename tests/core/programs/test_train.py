"""The training loop: exact resumes, nothing lost to a kill or a full disk, ranks that agree, clear errors."""
import io
import json
import os
import pty
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import model as model_py
import train
from model import GPT, GPTConfig
from nanoheads import causality, checkpoint, scoring
from nanoheads.common import UserError
from nanoheads.batches import Batches
from nanoheads.dataset import Dataset
from nanoheads.ranks import Process
from nanoheads.start import settings_in
from helpers import ROOT, TINY
from helpers import same, torchrun, untimed, weights
from train import main


@pytest.fixture
def at_step(monkeypatch):
    """at_step(n, f): f(output) takes the place of what the model returns in training step n."""
    def patch(n, change):
        forward, seen = GPT.forward, []

        def patched(self, *a, **kw):
            out = forward(self, *a, **kw)
            if self.training:
                seen.append(1)
                if len(seen) == n:
                    return change(out)
            return out
        monkeypatch.setattr(GPT, "forward", patched)
    return patch


# ---- learning ----

@pytest.mark.slow
@pytest.mark.parametrize("keys", [dict(recipe="gpt2"), dict(recipe="modern"),
                                  dict(recipe="gpt2", optimizer="muon"),
                                  dict(recipe="modern", optimizer="adamw", schedule="trapezoid"),
                                  dict(dtype="bfloat16"),
                                  dict(dtype="float16", adamw_lr=1e-2)],
                         ids=lambda k: "-".join(map(str, k.values())))
def test_a_tiny_model_learns(args, rows, tmp_path, keys):
    main(args(max_iters=60, eval_interval=30, lr_decay_iters=60, **keys))
    losses, evals = rows(tmp_path / "run")
    assert [r["step"] for r in evals] == [0, 30, 60] and evals[-1]["val_loss"] < evals[0]["val_loss"] - 0.3
    assert losses[-1]["adamw_lr"] < max(r["adamw_lr"] for r in losses) / 4, "the rate falls"


@pytest.mark.slow
def test_the_log_has_what_its_readers_rely_on(args, rows, tmp_path):
    main(args(grad_clip=1.0))
    losses, evals = rows(tmp_path / "run")
    assert [r["step"] for r in losses] == [1, 2, 3, 4, 5, 6] and [r["step"] for r in evals] == [0, 3, 6]
    assert all(set(r) == {"step", "tokens", "loss", "adamw_lr", "tokens_per_s", "elapsed_s", "grad_norm"}
               for r in losses)
    assert all(set(r) == {"step", "tokens", "train_loss", "val_loss", "val_bpb", "elapsed_s"} for r in evals)
    assert all(r["tokens"] == r["step"] * 4 * 16 for r in losses + evals)
    assert [r["elapsed_s"] for r in losses] == sorted(r["elapsed_s"] for r in losses)


@pytest.mark.slow
@pytest.mark.parametrize("a2c", ["temperature", "published"])
def test_the_log_says_how_well_the_critic_predicts(args, rows, tmp_path, a2c):
    """At each evaluation, where a critic is trained: that of the trained model on val, the same each time."""
    main(args(a2c=a2c))
    evals = rows(tmp_path / "run")[1]
    found = [r.get("a2c_explained_variance") for r in evals]
    if a2c == "published":
        assert set(found) == {None}
        return
    assert all(each <= 1 for each in found) and len(set(found)) > 1
    state = checkpoint.read(tmp_path / "run/ckpt.pt")
    data = Dataset(state["train"]["dataset"])
    metrics = scoring.critic_metrics(checkpoint.build(state, "x"), data, "val")
    assert metrics["a2c_explained_variance"] == found[-1]


def test_train_returns_the_last_evaluation(args, rows, tmp_path):
    config = GPTConfig(**{k: TINY[k] for k in ("n_layer", "n_head", "n_embd", "block_size")})
    settings = train.TrainConfig(out_dir=str(tmp_path / "run"),
                                 dataset=args()[0].split("=")[1], batch_size=4, max_iters=4, eval_tokens=512)
    assert train.train(config, settings) == rows(tmp_path / "run")[1][-1]
    assert config.vocab_size is None and settings.optimizer is None, "what the caller passed stays as it was"


# ---- a profile ----

def profile_in(printed):
    """[(operator, share of the step in %, calls a step)] of the rows that a run printed."""
    rows = printed.split("calls a step\n")[1].split("\ntrace, ")[0].splitlines()
    return [(name, float(share.rstrip("%")), float(calls.replace(",", "")))
            for name, share, calls in (row.rsplit(maxsplit=2) for row in rows)]  # some names have a space


def test_a_profiled_run_learns_the_same_and_leaves_a_trace(args, rows, tmp_path, capsys):
    main(args("plain"))
    assert not (tmp_path / "plain/trace.json").exists() and "operator" not in capsys.readouterr().out
    main(args(profile=2))
    printed = capsys.readouterr().out
    assert same(weights(tmp_path / "plain/ckpt.pt"), weights(tmp_path / "run/ckpt.pt"))
    assert untimed(rows(tmp_path / "run")[0]) == untimed(rows(tmp_path / "plain")[0])
    trace = json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "training step" and event["cat"] == "user_annotation" for event in trace) == 2
    found = profile_in(printed)
    shares = [share for _, share, _ in found]
    assert "profile of 2 steps: " in printed and len(found) == 10
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 100
    assert "profile" not in json.loads((tmp_path / "run/config.json").read_text())["asked"]


@pytest.mark.slow
def test_an_evaluation_between_profiled_steps_is_in_the_trace_alone(args, tmp_path, capsys):
    attention, calls = "aten::_scaled_dot_product_flash_attention_for_cpu", []
    for interval in (1, 6):
        main(args(f"every-{interval}", profile=3, eval_interval=interval))
        calls.append({name: n for name, _, n in profile_in(capsys.readouterr().out)})
        trace = json.loads((tmp_path / f"every-{interval}/trace.json").read_text())["traceEvents"]
        forwards = sum(event["name"] == attention for event in trace)
        assert forwards == 3 if interval == 6 else forwards > 3
    both = calls[0].keys() & calls[1].keys()  # of ten rows each, by time: on a busy machine few
    assert both and all(calls[0][name] == calls[1][name] for name in both)


def test_a_profile_needs_steps(args, fails, tmp_path):
    line, = fails(args(profile=4))
    assert line == ("profile=4 takes 7 steps, the first 3 to warm up, and this run has 6 to go: "
                    "set a larger max_iters")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_folder_says_how_to_run_it_again(args, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--adamw_lr=1", "a b"])
    main(args(optimizer="muon"))
    said = json.loads((tmp_path / "run" / "config.json").read_text())
    assert said["model"]["vocab_size"] == 256 and said["train"]["muon_lr"] == 0.02
    assert said["train"]["adamw_lr"] == 4e-3
    assert said["command"] == "python train.py --adamw_lr=1 'a b'"
    assert said["versions"]["torch"] == torch.__version__
    if (ROOT / ".git").exists():
        assert len(said["commit"].removesuffix("-dirty")) == 40
    main([*args(optimizer="muon", max_iters=8), "--resume"])
    said = json.loads((tmp_path / "run" / "config.json").read_text())
    assert said["train"]["max_iters"] == 8 and [launch["step"] for launch in said["launches"]] == [0, 6]


def test_without_git_a_run_still_starts(args, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    main(args())
    assert json.loads((tmp_path / "run" / "config.json").read_text())["commit"] is None


# ---- the same losses ----

@pytest.mark.slow
def test_evaluation_never_changes_the_training_losses(args, rows, tmp_path):
    for every in (2, 5):
        main(args(f"every{every}", eval_interval=every, max_iters=11, dropout=0.2))
    a, b = (rows(tmp_path / f"every{every}") for every in (2, 5))
    assert [r["loss"] for r in a[0]] == [r["loss"] for r in b[0]]
    assert [r for r in untimed(a[1]) if r["step"] == 10] == [r for r in untimed(b[1]) if r["step"] == 10]
    assert same(weights(tmp_path / "every2/ckpt.pt"), weights(tmp_path / "every5/ckpt.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("change", [dict(checkpoint_activations=True), dict(compile=True)],
                         ids=lambda k: next(iter(k)))
def test_the_same_losses_with(args, rows, tmp_path, change, monkeypatch):
    # everything but the C++ compiler
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    for out, keys in (("plain", {}), ("changed", change)):
        main(args(out, dropout=0.2 if "compile" not in change else 0.0, n_layer=2, **keys))
    a, b = (rows(tmp_path / out) for out in ("plain", "changed"))
    assert [r["loss"] for r in a[0]] == pytest.approx([r["loss"] for r in b[0]], abs=1e-6)
    names = [weights(tmp_path / out / "ckpt.pt").keys() for out in ("plain", "changed")]
    assert names[0] == names[1], "uncompiled names"


@pytest.mark.slow
def test_gradient_accumulation_is_the_same_batch_in_portions(args, rows, tmp_path):
    main(args("whole", batch_size=8))
    main(args("portions", batch_size=2, grad_accum=4))
    a, b = (rows(tmp_path / out)[0] for out in ("whole", "portions"))
    assert [r["loss"] for r in a] == pytest.approx([r["loss"] for r in b], abs=1e-5)
    assert [r["tokens"] for r in a] == [r["tokens"] for r in b]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [dict(recipe="gpt2", grad_accum=2), dict(recipe="modern", dropout=0.2)],
                         ids=["gpt2", "modern"])
def test_the_step_that_benchmarks_time_is_the_step_of_a_run(args, tmp_path, keys):
    main(args(max_iters=1, **keys))
    said = json.loads((tmp_path / "run/config.json").read_text())
    model_config, config = GPTConfig(**said["model"]), train.TrainConfig(**said["train"])
    rows = config.batch_size * config.grad_accum
    batches = Batches(Dataset(config.dataset), "train", model_config.block_size, rows, model_config.seed)
    run = train.ready_to_step(GPT(model_config), config)
    train.training_step(run, batches(0)[:, :-1], batches(0)[:, 1:])
    assert same(run.model.state_dict(), weights(tmp_path / "run/ckpt.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("portions", [dict(batch_size=8), dict(batch_size=2, grad_accum=4, optimizer="muon")],
                         ids=["whole", "portions"])
def test_two_ranks_train_as_one_process_does(args, rows, tmp_path, portions):
    main(args("one", **portions))
    done = torchrun(args("two", **portions), 2)
    assert done.returncode == 0, done.stderr
    for one, two in zip(rows(tmp_path / "one"), rows(tmp_path / "two")):
        assert len(one) == len(two)
        for a, b in zip(one, two):
            assert a.keys() == b.keys()
            assert all(a[k] == pytest.approx(b[k], abs=1e-5)
                       for k in a if k not in ("elapsed_s", "tokens_per_s"))
    one, two = weights(tmp_path / "one/ckpt.pt"), weights(tmp_path / "two/ckpt.pt")
    assert one.keys() == two.keys() and max((one[k] - two[k]).abs().max() for k in one) < 1e-4
    assert done.stdout.count("best val loss") == 1, "one rank speaks"


@pytest.mark.parametrize("key", ["step", "weights"])
def test_ranks_that_begin_apart_are_refused(args, key):
    """As where only one of two machines finds the checkpoint that --resume names."""
    gpt = GPT(GPTConfig(vocab_size=16, block_size=8, n_layer=1, n_head=2, n_embd=16))
    norm = float(torch.nn.utils.get_total_norm([p.detach() for p in gpt.parameters()]))

    class OfTwo(Process):
        """One of two processes, with what the other one says, and then whether that sees a difference too."""

        def __init__(self, *others):
            super().__init__(world=2)
            self.answers = iter([others, [0.0]])

        def all_reduce_sum(self, own):
            return [a + b for a, b in zip(own, next(self.answers))]

    run = SimpleNamespace(model=gpt, step=3, out_dir="out/a")
    OfTwo(3.0, norm).check_agreement(run)
    other = OfTwo(0.0, norm) if key == "step" else OfTwo(3.0, norm * 1.01)
    with pytest.raises(UserError, match="different weights or at different steps: out/a"):
        other.check_agreement(run)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["start.begin", "training_step"])
def test_the_rank_that_fails_alone_says_why(args, tmp_path, place):
    """Before training and in it. The first rank knows nothing of it, and says that another one has ended."""
    code = ("import os, sys, train\n"
            f"real = train.{place}\n"
            "def broken(*arguments):\n"
            "    if os.environ['RANK'] == '1':\n"
            "        raise train.UserError('its rows hold a token that is none')\n"
            "    return real(*arguments)\n"
            f"train.{place} = broken\n"
            "train.main(sys.argv[1:])\n")
    (tmp_path / "broken.py").write_text(code)
    done = torchrun(args("two", batch_size=8), 2, program=tmp_path / "broken.py")
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if line.startswith("train: ")] == [
        "train: rank 1: its rows hold a token that is none",
        "train: another process of this run has ended, for the reason that it gives"]


def test_a_rank_does_not_wait_for_one_that_never_starts(args, free_port):
    code = ("import datetime, sys, train\n"
            "from nanoheads import ranks\n"
            "ranks.START_WITHIN = datetime.timedelta(seconds=1)\n"
            "train.main(sys.argv[1:])\n")
    group = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                 MASTER_PORT=str(free_port))
    done = subprocess.run([sys.executable, "-c", code, *args("two", batch_size=8)], cwd=ROOT,
                          env={**os.environ, **group}, capture_output=True, text=True, timeout=100)
    assert "train: not all processes of this run have started within 1 s: one has failed" in done.stderr
    assert done.returncode == 1


def test_a_batch_that_ranks_cannot_share_is_one_line(args, fails, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    for sizes in (dict(batch_size=4, grad_accum=1), dict(batch_size=3, grad_accum=4)):
        message, = fails(args(**sizes))
        assert all(f"{key}={value}" in message for key, value in sizes.items()) and "3 ranks" in message


# ---- resuming ----

@pytest.mark.parametrize("keys", [dict(recipe="gpt2", dropout=0.2, grad_accum=2),
                                  dict(recipe="modern", dropout=0.2),
                                  dict(dropout=0.2, dtype="float16"),
                                  dict(dropout=0.2, checkpoint_activations=True, weight_decay=0.3)],
                         ids=lambda k: "-".join(map(str, k)))
def test_20_steps_equal_10_and_10(args, rows, tmp_path, keys):
    keys = dict(eval_interval=5, lr_decay_iters=20, **keys)
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
    moments = [checkpoint.read(tmp_path / out / "ckpt.pt")["optimizers"] for out in ("once", "twice")]
    for a, b in zip(*moments):
        assert all(same(a["state"][p], b["state"][p]) for p in a["state"])


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


def rises(said):
    return [line for line in said.splitlines() if "learning rate" in line]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["cosine", "trapezoid"])
def test_a_rate_that_rises_again_is_said_with_both_rates(args, rows, tmp_path, capsys, schedule):
    keys = dict(schedule=schedule, adamw_lr=1e-2, min_lr=1e-4, warmup_iters=0, lr_decay_iters=...)
    main(args(**keys))
    capsys.readouterr()
    main([*args(**keys, max_iters=12), "--resume"])
    line, = rises(capsys.readouterr().out)
    by_step = {row["step"]: row["adamw_lr"] for row in rows(tmp_path / "run")[0]}
    assert by_step[7] > 2 * by_step[6], "it does"
    assert f"it ended at {by_step[6]:.2e} and goes on with {by_step[7]:.2e}, by the schedule of 12" in line
    assert line.endswith("; --lr_decay_iters=6 keeps it low")


@pytest.mark.slow
def test_a_rate_that_goes_on_as_planned_is_not_mentioned(args, rows, tmp_path, capsys):
    """In the warm-up, where it rises anyway, and where it stays low as the message says."""
    main(args(warmup_iters=20, lr_decay_iters=100, max_iters=4))
    main([*args(warmup_iters=20, lr_decay_iters=100, max_iters=8), "--resume"])
    low = dict(adamw_lr=1e-2, min_lr=1e-4, warmup_iters=0)
    main(args("low", **low, lr_decay_iters=...))
    main([*args("low", **low, max_iters=9, lr_decay_iters=6), "--resume"])
    assert rises(capsys.readouterr().out) == []
    assert rows(tmp_path / "low")[0][-1]["adamw_lr"] == pytest.approx(1e-4)


def test_resume_where_nothing_is_says_that_it_starts_anew(args, capsys):
    main(args(resume=True))
    assert "ckpt.pt is not there yet: the run starts anew" in capsys.readouterr().out


@pytest.mark.slow
def test_a_finished_run_says_so_and_stays_as_it_is(args, tmp_path, capsys):
    main(args())
    def files():
        return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / "run").iterdir()
                if p.name != "lock"}
    before = files()
    capsys.readouterr()
    for max_iters in (6, 4):
        main([*args(max_iters=max_iters), "--resume"])
        assert f"run has ended at step 6 by max_iters={max_iters}, best val loss " in capsys.readouterr().out
    assert files() == before


def test_resume_without_a_save_starts_at_the_beginning(args, rows, tmp_path):
    main([*args(), "--resume"])
    assert [r["step"] for r in rows(tmp_path / "run")[1]] == [0, 3, 6]


def test_a_run_killed_before_its_first_save_begins_anew_as_it_was_asked(args, rows, tmp_path):
    main(args(n_embd=24))
    run = tmp_path / "run"
    asked, losses = settings_in(run), [row["loss"] for row in rows(run)[0]]
    for name in ("ckpt.pt", "best.pt"):
        (run / name).unlink()
    main(["--resume", f"--out_dir={run}"])
    assert settings_in(run) == asked and [row["loss"] for row in rows(run)[0]] == losses


@pytest.mark.slow
def test_overwrite_starts_over(args, rows, tmp_path):
    main(args(max_iters=9))
    main([*args(seed=5), "--overwrite"])
    assert [r["step"] for r in rows(tmp_path / "run")[0]] == [1, 2, 3, 4, 5, 6]
    assert checkpoint.read(tmp_path / "run/ckpt.pt")["config"]["seed"] == 5


# ---- checkpoints as a beginning ----

@pytest.mark.slow
def test_fine_tuning_takes_the_model_and_a_fresh_optimizer(args, rows, tmp_path):
    main(args("base", recipe="modern", n_layer=2))
    keys = dict(n_layer=..., n_head=..., n_embd=..., block_size=8, init_from=tmp_path / "base", dropout=0.1)
    main(args("tuned", **keys))
    state = checkpoint.read(tmp_path / "tuned/ckpt.pt")
    assert state["step"] == 6
    assert state["train"]["optimizer"] == "muon", "what follows from the recipe follows from the checkpoint's"
    assert state["config"].items() >= dict(recipe="modern", n_layer=2, block_size=8, dropout=0.1).items()
    base, tuned = (rows(tmp_path / out)[1][0]["val_loss"] for out in ("base", "tuned"))
    assert tuned < 0.97 * base, "it begins where the other ended"
    main([*args("tuned", **keys, max_iters=9), "--resume"])
    assert checkpoint.read(tmp_path / "tuned/ckpt.pt")["step"] == 9, "and is resumed with the same command"


@pytest.mark.slow
def test_fine_tuning_a_nanogpt_checkpoint(args, rows, tmp_path):
    sizes = dict(n_layer=2, n_head=2, n_embd=8, block_size=32, vocab_size=300, bias=True, dropout=0.0)
    weights = {f"_orig_mod.{k}": v for k, v in GPT(GPTConfig(**sizes)).state_dict().items()}
    torch.save(dict(model=weights, optimizer={}, model_args=sizes,
                    iter_num=5, best_val_loss=torch.tensor(9.0), config=dict(dataset="x")),
               tmp_path / "theirs.pt")
    main(args(n_layer=..., n_head=..., n_embd=..., block_size=..., init_from=tmp_path / "theirs.pt"))
    assert checkpoint.read(tmp_path / "run/ckpt.pt")["config"].items() >= sizes.items()


@pytest.mark.slow
def test_the_best_checkpoint_of_a_fine_tuning_may_be_its_start(args, rows, tmp_path):
    main(args("a", max_iters=60, eval_interval=60, lr_decay_iters=60))
    main(args("b", init_from=tmp_path / "a", adamw_lr=0.5, min_lr=0.5,
              warmup_iters=0, n_layer=..., n_head=..., n_embd=..., block_size=...))
    _, evals = rows(tmp_path / "b")
    assert evals[0]["val_loss"] < evals[-1]["val_loss"], "this training only spoils"
    assert same(weights(tmp_path / "b" / "best.pt"), weights(tmp_path / "a" / "best.pt"))


@pytest.mark.slow
def test_eval_only_scores_the_best_checkpoint_and_writes_nothing(args, rows, tmp_path, capsys):
    main(args())
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "run").iterdir()}
    capsys.readouterr()
    argv = [f"--out_dir={tmp_path}/run", f"--dataset={args()[0].split('=')[1]}",
            "--eval_only", "--eval_tokens=512"]
    main(argv)
    best = min(rows(tmp_path / "run")[1][1:], key=lambda r: r["val_loss"])
    line = f"step {best['step']:>7,}   train {best['train_loss']:.4f}   val {best['val_loss']:.4f}"
    assert line in capsys.readouterr().out
    main([*argv, f"--init_from={tmp_path}/run/ckpt.pt"])
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "run").iterdir()} == before


# ---- stops, kills and full disks ----

@pytest.mark.slow
@pytest.mark.parametrize("number,code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_leaves_with_one_line(args, rows, tmp_path, at_step, capsys, number, code):
    main(args("whole", dropout=0.2))
    capsys.readouterr()
    handler = signal.getsignal(number)
    at_step(5, lambda out: (os.kill(os.getpid(), number), out)[1])
    with pytest.raises(SystemExit) as e:
        main(args(dropout=0.2))
    assert e.value.code == code and signal.getsignal(number) is handler
    said = capsys.readouterr()
    *_, last = said.out.splitlines()
    assert last == f"stopped by {number.name} at step 5: saved {tmp_path}/run/ckpt.pt; go on with --resume"
    assert not said.err
    main([*args(dropout=0.2), "--resume"])
    assert [untimed(r) for r in rows(tmp_path / "run")] == [untimed(r) for r in rows(tmp_path / "whole")]
    assert same(weights(tmp_path / "run/ckpt.pt"), weights(tmp_path / "whole/ckpt.pt"))


@pytest.mark.slow
def test_a_hangup_that_nohup_ignores_stays_ignored(args, at_step, monkeypatch, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        at_step(2, lambda out: (os.kill(os.getpid(), signal.SIGHUP), out)[1])
        main(args())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert checkpoint.read(tmp_path / "run/ckpt.pt")["step"] == 6


@pytest.mark.slow
def test_a_run_whose_terminal_closes_is_saved(args, tmp_path):
    """A process in a session of its own whose terminal is hung up, as when a window is closed."""
    command = [sys.executable, str(ROOT / "train.py"), *args(max_iters=10**6, eval_interval=10**6)]
    child, terminal = pty.fork()
    if not child:
        os.execv(sys.executable, command)
    seen = b""
    while b"nats/token" not in seen:  # the first evaluation, by when signals are listened to
        seen += os.read(terminal, 1000)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 129
    assert checkpoint.read(tmp_path / "run/ckpt.pt")["step"] >= 0


def test_a_run_whose_reader_is_gone_is_saved(args, tmp_path):
    """As by `| tee` after Ctrl-C, which ends tee first, or by `| head`."""
    command = [sys.executable, str(ROOT / "train.py"),
               *args(max_iters=10**6, eval_interval=10**6, log_interval=1)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while b"nats/token" not in child.stdout.readline():
        pass
    child.stdout.close()
    said = child.stderr.read().decode()
    assert child.wait() == 128 + signal.SIGPIPE
    step = checkpoint.read(tmp_path / "run/ckpt.pt")["step"]
    assert step > 0 and f"which is gone at step {step:,}: saved {tmp_path}/run/ckpt.pt" in said


def test_a_run_that_is_killed_in_its_last_evaluation_loses_no_step(args, tmp_path, monkeypatch):
    real = train.evaluate_splits

    def killed(run):
        if run.step == run.config.max_iters:
            raise ZeroDivisionError("as if killed")
        return real(run)
    monkeypatch.setattr(train, "evaluate_splits", killed)
    with pytest.raises(ZeroDivisionError):
        main(args(save_interval=100))
    assert checkpoint.read(tmp_path / "run/ckpt.pt")["step"] == 6
    monkeypatch.undo()
    main([*args(save_interval=100), "--resume"])
    main(args("whole", save_interval=100))
    assert same(weights(tmp_path / "run/ckpt.pt"), weights(tmp_path / "whole/ckpt.pt"))


# ---- patience ----

def val_losses(monkeypatch, *losses):
    """Evaluations now give these validation losses, one after the other, the first one at step 0."""
    real = train.evaluate_splits
    monkeypatch.setattr(train, "evaluate_splits",
                        lambda run: {**real(run), "val_loss": losses[run.step // run.config.eval_interval]})


HALTING = 9.0, 4.0, 3.0, 3.5, 3.0, 2.9, 3.1, 3.2, 3.3, 2.0


def test_evaluations_without_a_lower_loss_end_the_run(args, rows, tmp_path, monkeypatch, capsys):
    """An equal loss is no lower one; a lower one begins the count anew."""
    val_losses(monkeypatch, *HALTING)
    keys = dict(eval_interval=2, max_iters=18, json=tmp_path / "a.json")
    main(args(patience=3, **keys))
    said = capsys.readouterr().out
    assert "ended at step 16 by patience=3, best val loss 2.9000 nats" in said
    assert rows(tmp_path / "run")[1][-1]["step"] == 16
    assert json.loads((tmp_path / "a.json").read_text())["step"] == 16
    saved = [checkpoint.read(tmp_path / "run" / name)["step"] for name in ("best.pt", "ckpt.pt")]
    assert saved == [10, 16]
    main([*args(patience=3, **keys), "--resume"])
    assert f"{tmp_path}/run has ended at step 16 by patience=3" in capsys.readouterr().out
    main([*args(patience=4, **keys), "--resume"])  # now it goes on, to the end and a lower loss
    assert checkpoint.read(tmp_path / "run/best.pt")["step"] == 18
    main(args("without", **keys))
    assert rows(tmp_path / "without")[1][-1]["step"] == 18
    assert same(weights(tmp_path / "run/ckpt.pt"), weights(tmp_path / "without/ckpt.pt"))


@pytest.mark.parametrize("stopped", [5, 12, 14])
def test_a_resumed_run_has_as_much_patience_left(stopped, args, rows, tmp_path, monkeypatch):
    """Stopped between two evaluations, and where it saves before one."""
    val_losses(monkeypatch, *HALTING)
    keys = dict(eval_interval=2, max_iters=18, patience=3, save_interval=1)

    def killed(run, *args, **more):
        if run.step == stopped + 1:
            raise ZeroDivisionError("as if killed")
        return real(run, *args, **more)
    real = train.save_checkpoint
    monkeypatch.setattr(train, "save_checkpoint", killed)
    with pytest.raises(ZeroDivisionError):
        main(args(**keys))
    assert checkpoint.read(tmp_path / "run/ckpt.pt")["step"] == stopped
    monkeypatch.setattr(train, "save_checkpoint", real)
    main([*args(**keys), "--resume"])
    assert rows(tmp_path / "run")[1][-1]["step"] == 16


@pytest.mark.slow
def test_all_ranks_end_in_the_same_step_by_patience(args, rows, tmp_path):
    """At this rate the loss rises from the first evaluation on."""
    done = torchrun(args(patience=2, eval_interval=1, max_iters=30, adamw_lr=30.0, min_lr=30.0,
                         warmup_iters=0, grad_clip=0.0), 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" by patience=2, best val loss") == 1
    assert rows(tmp_path / "run")[1][-1]["step"] < 30


def test_overwriting_what_a_run_starts_from_is_refused(args, fails, tmp_path):
    main(args())
    line, = fails(args(init_from=tmp_path / "run/best.pt", overwrite=True))
    assert "--overwrite removes the checkpoints of" in line and "init_from names one of them" in line
    assert (tmp_path / "run/best.pt").is_file()
    main(args("other", init_from=tmp_path / "run/best.pt", overwrite=True))  # control


@pytest.mark.parametrize("flags", [dict(loss_chunks=3), dict(loss_chunks=3, mechanism="a2c_temperature")],
                         ids=str)
def test_portions_of_the_loss_need_divide_nothing(args, flags, rows, tmp_path):
    """Neither a step's 64 tokens, nor what a critic reads."""
    main(args(**flags))
    main(args("whole", **{**flags, "loss_chunks": 1}))
    some, whole = (rows(tmp_path / out)[0] for out in ("run", "whole"))
    assert [r["loss"] for r in some] == pytest.approx([r["loss"] for r in whole], abs=1e-4)
    main(args("other", init_from=tmp_path / "run", loss_chunks=5))  # it is how one trains, not a model


# ---- what no run can be ----



@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_end_an_evaluation(args, fails, tmp_path, value):
    main(args())
    state = checkpoint.read(tmp_path / "run/best.pt")
    state["model"]["transformer.wpe.weight"][3, 1] = value
    torch.save(state, tmp_path / "run/best.pt")
    said, = fails([*args(), "--eval_only"])
    assert said.startswith(f"{tmp_path}/run: transformer.wpe.weight holds NaN or infinities")


@pytest.mark.slow
def test_killing_the_process_loses_only_unsaved_steps(args, rows, tmp_path):
    keys = dict(max_iters=100000, lr_decay_iters=100000, eval_interval=10, save_interval=5, dropout=0.2)
    process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *args(**keys)],
                               stdout=subprocess.DEVNULL,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    log, deadline = tmp_path / "run/log.jsonl", time.time() + 100
    while not log.is_file() or log.read_bytes().count(b"\n") < 40:
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    seen = max(json.loads(line)["step"] for line in log.read_text().splitlines()[:-1])
    step = checkpoint.read(tmp_path / "run/ckpt.pt")["step"]
    assert step % 5 == 0 and seen - step <= 5, "at most the steps since the last save"
    with open(log, "a") as f:
        f.write('{"step": 9')  # and a row that was being written
    keys["max_iters"] = step + 7
    main([*args(**keys), "--resume"])
    main(args("whole", **keys))
    killed, whole = ([untimed(r) for r in rows(tmp_path / out)] for out in ("run", "whole"))
    assert killed == whole, "each row once, and the same"
    assert same(weights(tmp_path / "run/ckpt.pt"), weights(tmp_path / "whole/ckpt.pt"))


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_before_the_update(args, fails, rows, tmp_path, at_step):
    at_step(5, lambda out: out._replace(loss=out.loss * float("nan")))
    said, = fails(args(save_interval=2))
    assert said.startswith("loss is nan in step 5: stopped before anything of it is saved; "
                           f"the last save is {tmp_path}/run/ckpt.pt, --resume goes on from it")
    state = checkpoint.read(tmp_path / "run/ckpt.pt")
    assert state["step"] == 4 and all(w.isfinite().all() for w in state["model"].values())
    assert [r["step"] for r in rows(tmp_path / "run")[0]] == [1, 2, 3, 4]
    main([*args(save_interval=2), "--resume"])


@pytest.mark.slow
def test_a_loss_that_is_not_finite_between_two_logged_steps_is_never_saved(args, fails, tmp_path, at_step):
    """It is read where it is logged, and before that where something is saved."""
    at_step(5, lambda out: out._replace(loss=out.loss * float("nan")))
    said, = fails(args(save_interval=2, log_interval=100, eval_interval=100))
    assert said.startswith("loss is nan in step 6: stopped before anything of it is saved; the last save is")
    state = checkpoint.read(tmp_path / "run/ckpt.pt")
    assert state["step"] == 4 and all(w.isfinite().all() for w in state["model"].values())
    main([*args(save_interval=2), "--resume"])


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 6])
def test_the_row_before_a_loss_that_is_not_finite_is_logged(args, fails, rows, tmp_path, at_step, step):
    """Also where an evaluation or the end wants both at once."""
    at_step(step, lambda out: out._replace(loss=out.loss * float("nan")))
    assert f"loss is nan in step {step}" in fails(args())[0]
    assert [r["step"] for r in rows(tmp_path / "run")[0]] == [*range(1, step)]


@pytest.mark.slow
@pytest.mark.parametrize("interval", [2, 3])
def test_how_often_a_run_logs_changes_nothing_of_what_it_computes(args, rows, tmp_path, interval):
    keys = dict(max_iters=11, eval_interval=5, save_interval=3)
    main(args("each", log_interval=1, **keys))
    main(args("some", log_interval=interval, **keys))
    each, some = (rows(tmp_path / out)[0] for out in ("each", "some"))
    logged = [r["step"] for r in some]
    assert [r["loss"] for r in some] == [r["loss"] for r in each if r["step"] in logged]
    assert logged == [n for n in range(1, 12) if n % interval == 0 or n == 11]
    assert same(weights(tmp_path / "each/ckpt.pt"), weights(tmp_path / "some/ckpt.pt"))


@pytest.mark.slow
def test_a_loss_in_portions_trains_the_same(args, rows, tmp_path, monkeypatch):
    real, portions = model_py.ChunkedCrossEntropy.forward, []
    monkeypatch.setattr(model_py.ChunkedCrossEntropy, "forward",
                        staticmethod(lambda *a: (portions.append(a[4]), real(*a))[1]))
    for out, chunks in (("whole", 1), ("portions", 4)):
        main(args(out, loss_chunks=chunks))
        assert set(portions) == ({16} if chunks == 4 else set())  # of 4 x 16 tokens
    a, b = (rows(tmp_path / out)[0] for out in ("whole", "portions"))
    assert [r["loss"] for r in a] == pytest.approx([r["loss"] for r in b], abs=1e-5)


def broken_gradient(out):
    """A finite loss with a gradient that is not: the derivative of sqrt at 0, times 0."""
    return out._replace(loss=out.loss + (0 * out.loss).sqrt())


def test_a_gradient_that_is_not_finite_stops_the_run(args, fails, tmp_path, at_step):
    at_step(5, broken_gradient)
    said, = fails(args(save_interval=2))
    assert said.startswith("grad_norm is nan in step 5: stopped before anything of it is saved")


@pytest.mark.slow
def test_in_fp16_an_overflow_skips_the_step_of_every_optimizer(args, rows, tmp_path, at_step):
    def overflow(out):  # the head alone is fed an infinite gradient: AdamW's, while Muon's stay finite
        return out._replace(loss=out.loss + (weight[0].sum() - weight[0].sum().detach()) * 1e30)
    weight = []
    init = GPT.__init__
    GPT.__init__ = lambda self, *a, **kw: (init(self, *a, **kw), weight.insert(0, self.lm_head.weight))[0]
    try:
        at_step(1, overflow)
        main(args("skip", recipe="modern", dtype="float16", max_iters=1, eval_interval=1))
    finally:
        GPT.__init__ = init
    fresh = GPT(GPTConfig(vocab_size=256, recipe="modern",
                          **{k: TINY[k] for k in ("n_layer", "n_head", "n_embd", "block_size")}))
    assert same(weights(tmp_path / "skip" / "ckpt.pt"), fresh.state_dict())


def test_weights_that_are_not_finite_are_never_saved(args, fails, tmp_path, at_step):
    at_step(4, broken_gradient)
    said, = fails(args(save_interval=2, grad_clip=0))  # nobody computes the norm
    assert "the weights are no longer finite at step 4, not saved" in said
    assert checkpoint.read(tmp_path / "run/ckpt.pt")["step"] == 2


@pytest.fixture
def limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda n: resource.setrlimit(resource.RLIMIT_FSIZE, (n, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
def test_a_full_disk_keeps_the_previous_checkpoint(args, fails, tmp_path, at_step, limit):
    at_step(5, lambda out: (limit(20000), out)[1])
    said, = fails(args(save_interval=2))
    limit(resource.RLIM_INFINITY)
    assert said == f"could not write {tmp_path}/run/ckpt.pt (File too large); the previous one is intact"
    assert checkpoint.read(tmp_path / "run/ckpt.pt")["step"] == 4
    assert checkpoint.read(tmp_path / "run/best.pt")["step"] == 3
    assert not list((tmp_path / "run").glob("*.part"))
    main([*args(save_interval=2), "--resume"])


@pytest.mark.slow
def test_a_full_disk_under_the_log_is_one_line(args, fails, rows, tmp_path, at_step, limit):
    at_step(5, lambda out: (limit((tmp_path / "run/log.jsonl").stat().st_size + 30), out)[1])
    said, = fails(args(save_interval=4, eval_interval=50))
    limit(resource.RLIM_INFINITY)
    assert said.startswith(
        f"could not write {tmp_path}/run/log.jsonl (File too large); the last save is {tmp_path}/run/ckpt.pt")
    main([*args(save_interval=4, eval_interval=50), "--resume"])
    assert [r["step"] for r in rows(tmp_path / "run")[0]] == [1, 2, 3, 4, 5, 6], "the half row is gone"


# ---- a folder that somebody else made ----

@pytest.fixture(scope="module")
def downloaded(bytes_data, tmp_path_factory):
    """A run with all files that a run writes."""
    folder = tmp_path_factory.mktemp("downloaded") / "run"
    keys = {"dataset": bytes_data, **TINY, "out_dir": folder}
    main([f"--{key}={value}" for key, value in keys.items()])
    return folder


def test_a_checkpoint_that_is_a_link_is_read_and_then_replaced(downloaded, args, tmp_path):
    shutil.copytree(downloaded, tmp_path / "run")
    before = (tmp_path / "run/ckpt.pt").rename(tmp_path / "kept.pt").read_bytes()
    (tmp_path / "run/ckpt.pt").symlink_to(tmp_path / "kept.pt")
    main([*args(max_iters=8), "--resume"])
    assert (tmp_path / "kept.pt").read_bytes() == before
    assert checkpoint.read(tmp_path / "run/ckpt.pt")["step"] == 8


def test_a_runs_folder_may_be_a_link(args, tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "scratch")
    main(args())
    main([*args(max_iters=8), "--resume"])
    assert checkpoint.read(tmp_path / "scratch/ckpt.pt")["step"] == 8


# ---- what the user got wrong ----

@pytest.mark.slow
@pytest.mark.parametrize("error", [lambda out: torch.empty(1 << 60), lambda out: bytearray(1 << 60),
                                   lambda out: exec("raise torch.OutOfMemoryError('CUDA out of memory. "
                                                    "Tried to allocate 20 GiB.')")],
                         ids=["cpu", "python", "cuda"])
def test_running_out_of_memory_is_one_line(args, fails, at_step, error):
    at_step(2, error)
    assert fails(args()) == ["out of memory; --batch_size=2 --grad_accum=2 makes the same step in less; a "
                             "model that is too large itself needs a lower n_embd, n_layer or vocab_size"]


@pytest.mark.parametrize("key", ["batch_size", "grad_accum"])
def test_a_batch_beyond_all_memory_is_one_line(args, fails, key):
    said, = fails(args(**{key: 10**15}))
    assert said.startswith("out of memory; ")


def test_other_errors_are_not_hidden(args, at_step):
    at_step(2, lambda out: exec("raise RuntimeError('a bug')"))
    with pytest.raises(RuntimeError, match="a bug"):
        main(args())


def inductor_errors():
    from torch._inductor import exc  # takes seconds to import
    return exc


@pytest.mark.slow
def test_a_missing_compiler_is_one_line_that_says_what_to_do(args, fails):
    """As with CXX=/nonexistent, which PyTorch reads when it is imported; what was compiled before is no help.
    """
    from torch._inductor import config as inductor_config, cpp_builder  # takes seconds to import
    without = {"cpp.cxx": (None, "/nonexistent"), "force_disable_caches": True}
    cpp_builder.cpp_compiler_search.cache_clear()
    torch._dynamo.reset()
    with inductor_config.patch(without):
        said = fails(args(compile=True))
    cpp_builder.cpp_compiler_search.cache_clear()
    torch._dynamo.reset()
    assert re.fullmatch(r"torch.compile failed \(.*No working C\+\+ compiler found.*\); --compile=False does "
                        "without", *said)


@pytest.mark.slow
@pytest.mark.parametrize("error, words", [
    (lambda: inductor_errors().TritonMissing(None), "a working triton"),
    (lambda: inductor_errors().InductorError(RuntimeError("Failed to find C compiler. Set CC"), None),
     "Failed to find C compiler"),
    (lambda: inductor_errors().InductorError(RuntimeError("another fault"), None), "another fault")])
def test_what_a_gpu_lacks_to_compile_is_one_line_too(args, fails, at_step, error, words):
    def fail(out):
        raise error()
    at_step(2, fail)
    said, = fails(args())
    assert words in said and "--compile=False" in said


# ---- what is shown ----

class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.slow
def test_on_a_terminal_there_is_a_bar(args, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(train, "tqdm", partial(train.tqdm, mininterval=0))
    monkeypatch.setattr(train.tqdm, "write", lambda text: None, raising=False)
    main(args(max_iters=30))
    bar = sys.stderr.getvalue()
    for words in ("\r", "/30", "step/s", "loss=", "val bpb=", "tok/s=", "<"):
        assert words in bar


@pytest.mark.slow
def test_without_a_terminal_there_are_only_lines(args, tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), *args(max_iters=40, eval_interval=20)],
                          cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and "\r" not in done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) == 2 + 3 + 40 + 1, "what is trained, evaluations, steps, what was written"
    evals = [line[:12] for line in lines if "bits/byte" in line]
    assert evals == ["step       0", "step      20", "step      40"]
    assert lines[-1].endswith(
        f"wrote {tmp_path}/run/ckpt.pt, {tmp_path}/run/best.pt, {tmp_path}/run/log.jsonl")


# ---- Weights & Biases ----

class NoKey:
    """What a made-up wandb has in the place of wandb.errors."""
    class UsageError(Exception):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["import", "init", "log", "finish"])
def test_a_wandb_failure_never_stops_training(args, rows, tmp_path, monkeypatch, capsys, broken):
    def step(name, value=None):
        def call(*a, **kw):
            if name == broken:
                raise ConnectionError("no network\nat all")
            return value
        return call
    run = SimpleNamespace(log=step("log"), finish=step("finish"), log_artifact=step("artifact"),
                          disabled=False)
    artifact = SimpleNamespace(add_file=lambda path, name=None: None)
    fake = SimpleNamespace(init=step("init", run), Artifact=lambda *a, **kw: artifact, errors=NoKey)
    monkeypatch.setitem(sys.modules, "wandb", None if broken == "import" else fake)
    main(args(wandb_log=True))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("wandb: ")
    assert said[0].endswith("training goes on without it")
    assert len(rows(tmp_path / "run")[0]) == 6


@pytest.mark.slow
def test_wandb_gets_rows_config_code_and_the_same_id_again(args, tmp_path, monkeypatch):
    calls, logged, files = [], [], []
    run = SimpleNamespace(log=lambda row, step: logged.append((step, set(row))),
                          finish=lambda: calls.append("finish"),
                          log_artifact=lambda artifact: None, disabled=False)
    artifact = SimpleNamespace(add_file=lambda path, name=None: files.append(Path(path).name))
    fake = SimpleNamespace(init=lambda **kw: (calls.append(kw), run)[1],
                           Artifact=lambda *a, **kw: artifact, errors=NoKey)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    main(args(wandb_log=True, wandb_mode="offline", wandb_tags="a,b"))
    main([*args(wandb_log=True, wandb_mode="offline", wandb_tags="a,b", max_iters=8), "--resume"])
    first, _, second, _ = calls
    assert first["id"] == second["id"] and first["resume"] == "allow" and first["mode"] == "offline"
    assert first["tags"] == ["a", "b"]
    assert first["config"]["model"]["n_embd"] == 16 and first["config"]["train"]["adamw_lr"] == 1e-3
    assert first["name"] == "run"
    assert {"train.py", "model.py", "config.json"} <= set(files)
    assert [s for s, keys in logged if "loss" in keys] == list(range(1, 9))
    assert [s for s, keys in logged if "val_bpb" in keys] == [0, 3, 6, 8]


@pytest.fixture
def train_with_wandb(args, tmp_path):
    """run(WANDB_MODE or None, *arguments) -> the finished process of train.py with the real wandb.

    There is no API key, no terminal, and no server: its address is a port that nothing listens on.
    """
    pytest.importorskip("wandb", reason="wandb is not installed")
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("WANDB_") and name != "NETRC"}
    for name in ("CONFIG", "CACHE", "DATA"):
        environment[f"WANDB_{name}_DIR"] = str(tmp_path / f"wandb_{name.lower()}")
    environment.update(HOME=str(tmp_path), WANDB_BASE_URL="http://127.0.0.1:9")

    def run(mode, *more):
        command = [sys.executable, str(ROOT / "train.py"), *args(wandb_log=True, max_iters=2), *more]
        given = {"WANDB_MODE": mode} if mode else {}
        return subprocess.run(command, cwd=tmp_path, env={**environment, **given}, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=300)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("mode, more, logged, said", [
    (None, [], True, True),  # wandb asked for a key and there was nobody to ask
    ("online", [], True, True),
    ("offline", [], True, False),
    ("disabled", [], False, False),
    ("disabled", ["--wandb_mode=offline"], True, False),  # what is given wins
    ("offline", ["--wandb_mode=online"], True, True),
    ("offline", ["--wandb_mode=disabled"], False, False)])
def test_wandb_mode_is_the_key_then_the_environment_and_offline_without_a_key(
        train_with_wandb, tmp_path, mode, more, logged, said):
    done = train_with_wandb(mode, *more)
    assert done.returncode == 0 and "goes on without it" not in done.stderr
    found = [*tmp_path.glob("run/wandb/offline-run-*")]
    assert len(found) == logged and not [*tmp_path.glob("run/wandb/run-*")]
    lines = [line for line in done.stderr.splitlines() if "is logged offline" in line]
    assert lines == (["wandb: No API key configured. Use `wandb login` to log in. This run is logged "
                      f"offline, and `wandb sync {found[0]}` uploads it"] if said else [])


@pytest.mark.slow
@pytest.mark.parametrize("error, tried", [(NoKey.UsageError, [None, "offline"]), (ConnectionError, [None])])
def test_only_a_missing_key_is_tried_again_offline(args, rows, tmp_path, monkeypatch, capsys, error, tried):
    calls = []

    def init(mode, **more):
        calls.append(mode)
        raise error("no key") if mode != "offline" else ConnectionError("no key")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, errors=NoKey))
    main(args(wandb_log=True))
    assert calls == tried and len(rows(tmp_path / "run")[0]) == 6
    assert capsys.readouterr().err == "wandb: ConnectionError: no key; training goes on without it\n"


def test_wandb_is_among_what_every_installation_has():
    """And pinned once: requirements-test.txt reads requirements.txt."""
    pins = {name: (ROOT / name).read_text() for name in ("requirements.txt", "requirements-test.txt")}
    assert "\nwandb==" in pins["requirements.txt"] and "wandb" not in pins["requirements-test.txt"]


@pytest.mark.slow
def test_wandb_offline_for_real(args, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb_config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb_cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb_data"))
    main(args(wandb_log=True, wandb_mode="offline"))
    run_id = checkpoint.read(tmp_path / "run/ckpt.pt")["run_id"]
    written, = (tmp_path / "run/wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")
    deadline = time.time() + 30  # a process of wandb's own writes the file
    while not all(word in written.read_bytes()
                  for word in (b"val_bpb", b"n_embd", f"code-{run_id}".encode())):
        assert time.time() < deadline
        time.sleep(0.1)


# ---- a mechanism that is new in model.py ----

def test_what_is_known_to_be_causal_are_the_mechanisms_of_this_repository():
    assert sorted(causality.TRIED) == sorted(cls.__name__ for cls in model_py.MECHANISM_CLASSES)


def test_a_mechanism_that_no_test_has_tried_is_tried_before_it_is_trained(bytes_data, tmp_path, monkeypatch):
    """As a class that somebody adds to model.py is: here one that takes the mean over all of the text."""
    line = [f"--{key}={value}" for key, value in TINY.items()] + [
        f"--dataset={bytes_data}", f"--out_dir={tmp_path / 'run'}", "--head_norm"]
    monkeypatch.setattr(causality, "TRIED", [name for name in causality.TRIED if name != "HeadNorm"])
    train.main(line)
    monkeypatch.setattr(model_py.HeadNorm, "after_attention", lambda self, attn, heads: setattr(
        heads, "y", heads.y.mean(2, keepdim=True).expand_as(heads.y)))
    with pytest.raises(SystemExit, match="train: before training .*its score would mean nothing"):
        train.main([*line, "--overwrite"])


def test_values_that_a_new_mechanism_would_lose_are_refused_by_name(bytes_data, tmp_path, monkeypatch):
    line = [f"--{key}={value}" for key, value in TINY.items()] + [
        f"--dataset={bytes_data}", f"--out_dir={tmp_path / 'run'}", "--fox"]
    monkeypatch.setattr(causality, "TRIED", [name for name in causality.TRIED if name != "FoX"])
    made = model_py.FoX.__init__

    def filled(self, *args):
        made(self, *args)
        for p in self.parameters():
            p.data.fill_(0.25)

    monkeypatch.setattr(model_py.FoX, "__init__", filled)
    with pytest.raises(SystemExit, match="train: FoX: fox: __init__ fills proj.weight, .* start_at"):
        train.main(line)
