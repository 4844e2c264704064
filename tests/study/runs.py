"""Runs of a study that train in a moment, and a tiny study, for the tests of this folder."""

import io
import subprocess
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import train
from helpers import write_settings
from model import GPTConfig
from nanoheads import files
from nanoheads.config import TrainConfig
from nanoheads.log import read_rows
from study import records, trial
from study.digest import dependencies
from study.records import Run

TINY_MODEL = dict(vocab_size=256, block_size=16, n_layer=1, n_head=2, n_embd=16, recipe="modern")
TINY_TRAINING = dict(batch_size=4, max_iters=6, eval_interval=3, eval_tokens=64, log_interval=1)
STUDY = """
question = "Does any of it help?"
base = "base.py"
variants = {"again": dict(seed=100)}
seeds, plain_seeds, budgets = [1, 2], 2, [2.0]
device, jobs = "cpu", 2
"""
POPEN = subprocess.Popen


# ---- a study ----

def write_study(folder, data):
    """The config files of a tiny study in a folder: tiny_study.py, which is compared with base.py."""
    folder.mkdir(parents=True, exist_ok=True)
    write_settings(folder / "base.py", dict(dataset=str(data), **TINY_MODEL, **TINY_TRAINING))
    (folder / "tiny_study.py").write_text(STUDY)


def results_of(folder):
    """The results file of the study in a folder."""
    (path,) = folder.glob("out/*/results.json.gz")
    return path


def run_of_study(variant="plain", seed=1):
    """A Run of the study in the folder to work in."""
    study, _ = records.read(results_of(Path()))
    return next(run for run in study.runs if (run.variant, run.seed) == (variant, seed))


# ---- runs ----

def run_of(data, seed=1, flags={}, variant="plain", **training):
    """A Run of a tiny model on a text; flags: of the model; training: keys of its TrainConfig."""
    model = {**TINY_MODEL, **flags, "seed": seed}
    training = dict(dataset=str(data), **{**TINY_TRAINING, **training})
    spec = dict(model=model, train=training, score=dict(split="test", tokens=0), device="cpu",
                **dependencies(TrainConfig(**training), GPTConfig(**model)))
    return Run("judge", variant, str(data), seed, spec)


def changed(run, **changes):
    """A Run whose spec says something else in some places."""
    return replace(run, spec={**run.spec, **changes})


def figures(result):
    """All of a Result but the time that it took."""
    return {key: value for key, value in vars(result).items() if key != "seconds"}


# ---- processes ----

class Ended:
    """A process that has ended."""

    def __init__(self, returncode):
        self.returncode, self.stdin = returncode, io.BytesIO()

    def poll(self):
        return self.returncode

    def terminate(self):
        pass

    def wait(self, timeout):
        return self.returncode


def run_here(command, **how):
    """In the place of subprocess.Popen: a run of a study is trained in this process, at once.

    A process of its own takes seconds to import torch. Other commands have one.
    """
    if "--trial" not in command:
        return POPEN(command, **how)
    folder, *options = command[command.index("--trial") + 1:]
    options = [option for option in options if option.startswith("--mechanism=")]
    with open(Path(folder) / "trial.log", "a") as log, redirect_stdout(log), redirect_stderr(log):
        try:
            trial.main([folder, *options], train.train)
        except SystemExit as e:
            print(e.code)
            return Ended(1)
    return Ended(0)


def wait_until(what, seconds=120):
    """Wait until what() is true; what it gave in the end."""
    until = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def is_held(folder):
    """Whether a process writes into a folder."""
    try:
        with open(folder / "lock", "rb") as file:
            return not files.lock(file, wait=False)
    except FileNotFoundError:
        return False


def last_step(folder):
    """The last step in a run's log; 0: there is none yet."""
    rows = read_rows(folder / "log.jsonl")
    return rows[-1]["step"] if rows else 0
