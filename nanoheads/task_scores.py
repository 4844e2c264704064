"""
Checkpoints that were trained on a task: opened side by side, scored on fresh rows, their answers.

evaluate.py and sample.py print what is found here. A checkpoint of a text has none of it.
"""

import argparse
import math
from typing import NamedTuple

import torch

from model import GPT
from nanoheads import checkpoint, scoring
from nanoheads.common import UserError
from nanoheads.tasks import NOT_ASKED, SIZES, TaskData, answers_of, of_training, score_levels, summary

ROWS = 256  # of each level, in evaluate.py
# flags of a task by which the words or what is asked for are others
SAME = ("task", *SIZES)


class Trained(NamedTuple):
    """A checkpoint of a task, opened: its name, what was read, the model with room for the rows."""
    name: str
    state: dict
    model: GPT
    data: TaskData


# ---- which checkpoints are of a task ----

def task_in(path):
    """The flags of the task that a checkpoint was trained on; None: of a text, or nothing that can be read.

    Its tensors stay on the disk. What is wrong with a file is said by checkpoint.read().
    """
    try:
        state = torch.load(checkpoint.file_of(path), map_location="cpu", weights_only=True, mmap=True)
        return state["meta"]["task"]
    except Exception:  # damage shows in many ways
        return None


def are_of_tasks(paths):
    """Whether these checkpoints were trained on a task. UserError: on several, or some of them on texts."""
    found = [task_in(path) for path in paths]
    of_texts = [path for path, flags in zip(paths, found) if flags is None]
    if len(of_texts) == len(paths):
        return False
    if of_texts:
        path, flags = next((path, flags) for path, flags in zip(paths, found) if flags)
        raise UserError(f"{path} was trained on the task {flags['task']}, and {of_texts[0]} on a text: "
                        "one kind at a time")
    for path, flags in zip(paths, found):
        differ = [f"{key}={flags.get(key)!r} and {found[0].get(key)!r}" for key in SAME
                  if flags.get(key) != found[0].get(key)]
        if differ:
            raise UserError(f"{path} and {paths[0]} were trained on different tasks, {'; '.join(differ)}: "
                            "one at a time")
    return True


def refuse_given(args, parser, keys, why):
    """UserError where one of these arguments was given; why: half a sentence."""
    for key in keys:
        value = getattr(args, key)
        if value != parser.get_default(key):
            shown = ",".join(map(str, value)) if isinstance(value, list) else value
            raise UserError(f"--{key}={shown} {why}")


def numbers(text):
    """The type of --levels: whole numbers above 0, in a list with commas."""
    try:
        found = [int(word) for word in text.split(",")]
        if min(found) < 1:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers above 0, as in 12,24") from None
    return list(dict.fromkeys(found))


# ---- opened, and scored ----

def opened(args, device):
    """([Trained] of args.ckpt, the levels, tokens of a row): rows long enough for args.levels. UserError."""
    loaded = [scoring.load(path, args.split, 0, device, None, args.settings, task=True) for path in args.ckpt]
    _, _, first = loaded[0]
    levels = args.levels or first.test_levels
    length = max(data.longer(levels) for _, _, data in loaded)
    for level in levels:
        first.check_level("--levels", level, length)
    runs = []
    for path, (state, model, data) in zip(args.ckpt, loaded):
        if length > model.config.block_size:
            model = scoring.at_context(model, length, state, path, device, args.settings)
        runs.append(Trained(str(path).removesuffix("/best.pt"), state, model, data))
    return runs, levels, length


def scored(run, levels, length, split, rows):
    """What a Trained gets right in so many rows of each level, as a dict. UserError: it is not finite.

    levels, right, nats: see tasks.summary(). trained_on: the flags that say which rows it was trained on.
    """
    found = summary(score_levels(run.model, run.data, split, rows, levels, length))
    if not math.isfinite(found["nats"]):
        raise UserError(f"{run.name} gives {found['nats']} nats on {split}: its weights are damaged, or its "
                        "training diverged")
    return dict(name=run.name, **found, params=run.model.num_params(), step=run.state.get("step"),
                trained_on=of_training(run.data.meta))


def guessed(data, levels, length, split, rows):
    """{level: {way of guessing: share right}}, see TaskData.guesses()."""
    return {level: data.guesses(split, level, rows, length) for level in levels}


def rows_with_answers(runs, level, length, split, n, seed):
    """Yield ([word] of a row, [wanted, None: nothing is asked], [[answer] of each Trained]), all as text."""
    words = runs[0].data.words
    x, y = runs[0].data.rows(split, level, n, length, seed)
    answers = [answers_of(run.model, torch.from_numpy(x)).tolist() for run in runs]
    known = len(words.vocab)

    def shown(word):
        return words.shown(word) if word < known else "�"  # a padded vocabulary has more

    for row, wanted, *found in zip(x.tolist(), y.tolist(), *answers):
        yield ([shown(word) for word in row],
               [None if word == NOT_ASKED else shown(word) for word in wanted],
               [[shown(word) for word in each] for each in found])
