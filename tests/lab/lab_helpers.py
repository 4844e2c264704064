"""What tests of the lab need: studies without processes, labels."""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

import train
from compare import Study
from nanoheads import causality
from lab.labels.targets import encode, label_file, write_meta
from lab.study import costs, digest, queue, results, trial
from lab.study.variants import StudyConfig

MOVED = ["export_hf", "probe", "prune"]  # programs of lab/, whose names at the root say where they are
MOVED_FROM_DATA = {"data/label.py": "label", "data/needle/prepare.py": "needle"}  # likewise


# ---- studies ----


SMALL = """
n_layer = 1
n_head = 2
n_embd = 16
block_size = 16
batch_size = 4
max_iters = 6
eval_interval = 3
eval_tokens = 64
recipe = 'modern'
"""


def study_of(plain, **keys):
    return Study(StudyConfig(**{"base": str(plain), "device": "cpu", "seeds": [1, 2], "plain_seeds": 2,
                                "budgets": [], "mechanisms": ["output_gate"], **keys}), "test")


class Here:
    """A place to run trials without a process, one at a time."""
    slots = 1

    def __init__(self):
        self.started = []

    def run(self, folder):
        self.started.append(folder)
        try:
            trial.run(folder, train.train)
            return ""
        except Exception as e:
            return str(e)

    def stop(self):
        pass


class NoThreads(ThreadPoolExecutor):
    """Runs what is submitted at once: a trial without a process of its own needs the main thread."""

    def submit(self, function, *args):
        job = Future()
        job.set_result(function(*args))
        return job


def forget_code():
    """Have files of code read again: in one process they are read once, as they were when it began."""
    for cached in (digest.digest_of, digest.files_of, digest.tree_of, digest.statements_of):
        cached.cache_clear()


def small_plain(folder, data, monkeypatch):
    """A config file of a plain GPT that trains in a moment; its folder is made the working directory."""
    monkeypatch.chdir(folder)
    path = folder / "plain.py"
    path.write_text(SMALL + f"dataset = {str(data)!r}\n")
    return path


def in_this_process(monkeypatch):
    """A place to run trials without processes, in a moment.

    The time of a step is made up, samples are short, and nobody looks for leaks before and after each run:
    tests/lab/probes/test_lookahead.py has runs that look, and takes most of a run's time for it.
    """
    monkeypatch.setattr(queue, "ThreadPoolExecutor", NoThreads)
    monkeypatch.setattr(causality, "refuse", lambda *args, **keys: "nowhere, in a test")
    monkeypatch.setattr(results, "SAMPLE_TOKENS", 20)
    row = dict(ratio=1.1, low=1.0, high=1.2, ratios=[1.0, 1.1, 1.2], clock="wall", load=0.0, cores=2,
               processor="AMD EPYC", compiled=False, threads=1)
    monkeypatch.setattr(costs, "step_time_ratios", lambda found, *args: {each.name: row for each in found})
    return Here()


# ---- labels ----


def write_labels(folder, data, shift=0, splits=("train", "val", "test"), digit=None):
    """Make the label set of a byte dataset.

    digit: the token is one (some unknown, some 1/2), and for `shift` tokens earlier; noise: by chance.
    """
    folder.mkdir()
    for split in splits:
        tokens = np.asarray(data.tokens(split))
        is_digit = np.roll((tokens >= 48) & (tokens < 58), -shift).astype(float)
        is_digit[::7], is_digit[::11] = np.nan, 0.5
        noise = np.random.default_rng(len(tokens)).random(len(tokens))
        encode(is_digit if digit is None else np.full(len(tokens), digit)).tofile(
            label_file(folder, "digit", split))
        encode(noise).tofile(label_file(folder, "noise", split))
    write_meta(folder, data, ["digit", "noise"], splits, weak=True, note="made up")
    return str(folder)
