"""
Whether the scores on file are those of the trained models: before a study reports, it scores one in ten of
its runs once more, from their checkpoints. A score or a checkpoint that was edited is found if it is drawn.
"""

import hashlib
import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from model import GPTConfig
from nanoheads import checkpoint, replaced
from nanoheads.common import UserError, json_safe, pick_device, write_atomic
from nanoheads.config import TrainConfig
from nanoheads.dataset import digests_of
from nanoheads.threads import processor
from lab.labels.targets import sha256
from lab.study import costs, trial
from lab.study.records import Rescored
from lab.study.variants import BOOKKEEPING

ONE_IN = 10  # of the runs that are done, where --rescore gives no number
# shares by which nats may differ: on the CPU of the run with its torch, where digits are the same but for the
# order of some sums; and elsewhere, where products have other digits
SAME, NEAR = 1e-6, 1e-4


def rescored(study, done, nothing_runs):
    """The records.Rescored of a study: which of its runs were scored once more from their checkpoints, and
    gave what is on file.

    done: {folder: result}. UserError, a line for each run that gives something else.
    """
    trained = [folder for folder in done
               if folder not in study.runs.taken and (folder / "best.pt").is_file()]
    drawn = draw(trained, how_many(study.config, len(done), nothing_runs))
    # who asks for a number does not take the folder's word for it
    todo = [folder for folder in drawn if study.config.rescore is not None or not is_known(folder)]
    if len(todo) > 1:
        print(f"scoring {len(todo)} of {len(done)} runs once more from their checkpoints", flush=True)
    names = {folder: f"{name}, seed {seed}" for (_, name, seed), folder in study.runs.folders.items()}
    wrong = [f"{folder} ({names[folder]}): {why}; delete this folder and start again, and it is trained once "
             "more; --rescore=0 reports what is there"
             for folder in todo if (why := problem_of(folder, study.runs.specs[folder], done[folder]))]
    if wrong:
        raise UserError("\n".join(wrong))
    return Rescored(runs=[folder.name for folder in drawn], without=len(done) - len(trained))


def how_many(config, done, nothing_runs):
    """How many runs to score once more, --rescore or one in ten of those that are done.

    Without --rescore none where runs may still be going, or nothing is to be computed.
    """
    if config.rescore is not None:
        return config.rescore
    if not nothing_runs or config.report_only:
        return 0
    return -(-done // ONE_IN)


def draw(folders, n):
    """n of these folders, as their names shuffle them."""
    every = " ".join(sorted(folder.name for folder in folders))
    return sorted(folders, key=lambda folder: hashlib.sha256(f"{folder.name} {every}".encode()).digest())[:n]


def problem_of(folder, spec, found):
    """Why a run is not what its checkpoint gives, in words; None: it is, which is kept in its folder."""
    path = folder / "best.pt"
    if found["checkpoint"] != sha256(path):
        return "its best.pt is not the file that was scored"
    trial.check_data(spec)  # what is wrong there is no fault of the run
    try:
        device = pick_device(spec["train"]["device"])
        with costs.as_in_a_run(device, found["threads"]):
            state = checkpoint.read(path)
            if other := of_another_run(state, spec, found):
                return f"its best.pt is of another run: {other}"
            nats, again = trial.score_as_planned(checkpoint.build(state, path, device), spec)
    except replaced.Replaced:  # no fault of this run
        raise
    except UserError as e:
        return f"it cannot be scored once more: {e}"
    as_then = device == "cpu" and (processor(device), torch.__version__) == (found["processor"],
                                                                           found["torch"])
    near, before = SAME if as_then else NEAR, np.load(folder / "nats.npy")
    for key in ("tokens", "bytes"):
        if again[key] != found[key]:
            return f"it scored {found[key]:,} {key}, and today these are {again[key]:,}"
    if not (math.isclose(again["nats"], found["nats"], rel_tol=near)
            and np.allclose(nats, before, rtol=10 * near, atol=near * np.mean(before))):
        return f"its best.pt gives {again['bpb']:.6f} bits/byte, and {found['bpb']:.6f} is on file"
    kept = json.dumps(dict(files=digest_of(folder))).encode()
    write_atomic(folder / "rescored.json", lambda f: f.write(kept))


def of_another_run(state, spec, found):
    """In what a run's checkpoint has other flags, steps or text than its trial.json plans, in words, or None.

    state: the checkpoint; found: the run's result. A model whose heads came or went has flags of its own.
    """
    training, config = spec["train"], TrainConfig(**spec["train"])
    # what a trial.json does not name is at its default, as an output gate is off in a plain GPT
    planned = {key: value for key, value in asdict(config).items()
               if key in training or key not in BOOKKEEPING}
    pairs = [(key, state["train"].get(key), value) for key, value in planned.items() if key != "device"]
    if not config.dynamic_heads:
        planned = GPTConfig(**spec["model"]).flags()
        pairs += [(key, there, planned[key]) for key, there in state["config"].items()
                  if key in planned and not (training.get("init_from") and planned[key] is None)]
    pairs += [("steps", found["steps"], training["max_iters"]), ("step", state["step"], found["best_step"])]
    text, planned = digests_of(state["meta"]), spec.get("data", {})
    pairs += [(f"the text's {key}", text[key], planned[key]) for key in planned.keys() & text.keys()]
    for key, there, planned in json.loads(json.dumps(json_safe(pairs))):
        if there != planned:
            return f"{key} is {there!r} there, and {planned!r} was planned"


def is_known(folder):
    """Whether these very files gave the same once already: to report again takes no second time."""
    kept = trial.read_json(folder / "rescored.json")
    return kept is not None and kept.get("files") == digest_of(folder)


def digest_of(folder):
    """What a change of a run's score, or of its checkpoint, changes."""
    return " ".join(sha256(Path(folder, name)) for name in ("result.json", "nats.npy", "best.pt"))
