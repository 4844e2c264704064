"""Runs of a study that train in a moment, for the tests of this folder."""

import os
import subprocess
import sys
import time

from helpers import ROOT

from model import GPTConfig
from nanoheads import files
from nanoheads.config import TrainConfig
from nanoheads.log import read_rows
from study import trial
from study.digest import dependencies
from study.records import Run

TINY_MODEL = dict(vocab_size=256, block_size=16, n_layer=1, n_head=2, n_embd=16, recipe="modern")
TINY_TRAINING = dict(batch_size=4, max_iters=6, eval_interval=3, eval_tokens=64, log_interval=1)


def run_of(data, seed=1, flags={}, variant="plain", **training):
    """A Run of a tiny model on a text; flags: of the model; training: keys of its TrainConfig."""
    model = {**TINY_MODEL, **flags, "seed": seed}
    training = dict(dataset=str(data), **{**TINY_TRAINING, **training})
    spec = dict(model=model, train=training, score=dict(split="test", tokens=0), device="cpu",
                **dependencies(TrainConfig(**training), GPTConfig(**model)))
    return Run("judge", variant, str(data), seed, spec)


def changed(run, **changes):
    """A Run whose spec says something else in some places."""
    return Run(run.stage, run.variant, run.text, run.seed, {**run.spec, **changes})


def figures(result):
    """All of a Result but the time that it took."""
    return {key: value for key, value in vars(result).items() if key != "seconds"}


def python(code, *args, **how):
    """A process of Python that can import this repository."""
    places = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "study")))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": places}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], env=env, **how)


def by_hand(run, *options):
    """The process of a Run that somebody started in a shell whose input is closed."""
    return subprocess.Popen([sys.executable, ROOT / "train.py", "--trial", trial.folder_of(run), *options],
                            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})


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
