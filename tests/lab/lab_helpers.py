"""What tests of the lab need: studies without processes, labels."""

import json
import types
import typing
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import MISSING, fields, replace

import numpy as np

import train
from compare import Study
from nanoheads import causality
from lab.labels.targets import encode, label_file, write_meta
from lab.study import costs, digest, queue, records, results, trial
from lab.study.variants import StudyConfig

OF_LAB = ["export_hf", "probe", "prune"]  # programs of lab/ for users of a checkpoint


# ---- records ----

class ByKey:
    """Lets tests look into a record, and change it, as into the JSON that it is written as."""

    def keys(self):
        return [each.name for each in fields(self)
                if getattr(self, each.name) != each.default or not each.metadata]

    def __getitem__(self, key):
        if key not in self.keys():
            raise KeyError(key)
        return getattr(self, key)

    def __setitem__(self, key, value):
        setattr(self, key, some(typing.get_type_hints(type(self))[key], value))

    def __iter__(self):
        return iter(self.keys())

    def __contains__(self, key):
        return key in self.keys()

    def get(self, key, default=None):
        return self[key] if key in self else default

    def update(self, values=(), **more):
        for key, value in {**dict(values), **more}.items():
            self[key] = value

    def pop(self, key, *default):
        setattr(self, key, None)

    __delitem__ = pop


for name, method in vars(ByKey).items():
    if callable(method):
        setattr(records.Record, name, method)


def some(kind, value):
    """A record of a kind, also one inside of others, from a dict that has only what a test needs.

    What that leaves out is None, or an empty list or dict where the record has one.
    """
    kinds = [each for each in typing.get_args(kind) if each is not type(None)] or [kind]
    if typing.get_origin(kind) in (list, dict):
        each = kinds[-1]
        pairs = value.items() if isinstance(value, dict) else enumerate(value or [])
        made = {key: some(each, own) for key, own in pairs} if typing.get_args(kind) else value
        return made if isinstance(value, dict) or made is value else [*made.values()]
    if typing.get_origin(kind) is typing.Union or isinstance(kind, types.UnionType):
        return value if value is None else some(kinds[0], value)
    if not (isinstance(kind, type) and issubclass(kind, records.Record) and isinstance(value, dict)):
        return value
    hints = typing.get_type_hints(kind)
    empty = {each.name: [] if typing.get_origin(hints[each.name]) is list else
             {} if typing.get_origin(hints[each.name]) is dict or hints[each.name] is dict else None
             for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING}
    return kind(**{**empty, **{key: some(hints[key], own) for key, own in value.items()}})


def but(record, **values):
    """A record with other values, see some()."""
    hints = typing.get_type_hints(type(record))
    return replace(record, **{key: some(hints[key], value) for key, value in values.items()})


def as_on_file(results):
    """A record as it would be read from its file."""
    return records.as_record(type(results), json.loads(json.dumps(records.as_json(results))))


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
    tests/lab/study/test_leaks_in_a_study.py has runs that look, and takes most of a run's time for it.
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
