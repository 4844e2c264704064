"""
Scores checkpoints that were trained on a task on fresh rows, and reads their answers.

evaluate.py and sample.py print what is found here. A checkpoint of a text has none of it.
"""

import argparse
import math
from typing import NamedTuple

import torch

from model import GPT
from nanoheads import checkpoint, scoring
from nanoheads.common import UserError
from nanoheads.tasks import NOT_ASKED, SIZES, TaskData, answers_of, score_levels, summary, training_flags

ROWS = 256  # of each level, in evaluate.py
# flags of a task by which the words or what is asked for are others
SAME_FLAGS = ("task", *SIZES)


class TaskRun(NamedTuple):
    """A checkpoint of a task: its name, what was read, its model with room for the rows, and its data."""
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
        return dict(state["meta"])["task"]
    except Exception:  # damage shows in many ways
        return None


def are_of_tasks(paths):
    """Whether these checkpoints were trained on a task. UserError: on several, or some of them on texts."""
    task_flags = [task_in(path) for path in paths]
    of_texts = [path for path, flags in zip(paths, task_flags) if flags is None]
    if len(of_texts) == len(paths):
        return False
    if of_texts:
        path, flags = next((path, flags) for path, flags in zip(paths, task_flags) if flags)
        raise UserError(f"{path} was trained on the task {flags['task']}, and {of_texts[0]} on a text: "
                        "one kind at a time")
    for path, flags in zip(paths, task_flags):
        differences = [f"{key}={flags.get(key)!r} and {task_flags[0].get(key)!r}" for key in SAME_FLAGS
                       if flags.get(key) != task_flags[0].get(key)]
        if differences:
            raise UserError(f"{path} and {paths[0]} were trained on different tasks, "
                            f"{'; '.join(differences)}: one at a time")
    return True


def refuse_arguments(args, parser, keys, why):
    """UserError where one of these arguments was given; why: half a sentence."""
    for key in keys:
        value = getattr(args, key)
        if value != parser.get_default(key):
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            raise UserError(f"--{key}={text} {why}")


def numbers(text):
    """The type of --levels: whole numbers above 0, in a list with commas."""
    try:
        values = [int(word) for word in text.split(",")]
        if min(values) < 1:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers above 0, as in 12,24") from None
    return list(dict.fromkeys(values))


# ---- opening and scoring ----

def open_runs(args, device):
    """([TaskRun] of args.ckpt, the levels, tokens of a row): rows long enough for args.levels. UserError."""
    contents = [scoring.load(path, args.split, 0, device, None, args.settings, task=True)
                for path in args.ckpt]
    _, _, first_data = contents[0]
    levels = args.levels or first_data.test_levels
    length = max(data.length_for(levels) for _, _, data in contents)
    for level in levels:
        first_data.check_level("--levels", level, length)
    runs = []
    for path, (state, model, data) in zip(args.ckpt, contents):
        if length > model.config.block_size:
            model = scoring.at_context(model, length, state, path, device, args.settings)
        runs.append(TaskRun(str(path).removesuffix("/best.pt"), state, model, data))
    return runs, levels, length


def score_run(run, levels, length, split, rows):
    """What a TaskRun gets right in so many rows of each level, as a dict. UserError: it is not finite.

    levels, right, nats: see tasks.summary(). trained_on: the flags that say which rows it was trained on.
    """
    result = summary(score_levels(run.model, run.data, split, rows, levels, length))
    if not math.isfinite(result["nats"]):
        raise UserError(f"{run.name} gives {result['nats']} nats on {split}: its weights are damaged, or its "
                        "training diverged")
    return dict(name=run.name, **result, params=run.model.num_params(), step=run.state.get("step"),
                trained_on=training_flags(run.data.meta))


def guess_levels(data, levels, length, split, rows):
    """{level: {way of guessing: share right}}, see TaskData.guesses()."""
    return {level: data.guesses(split, level, rows, length) for level in levels}


def rows_with_answers(runs, level, length, split, n, seed):
    """Yield ([word] of a row, [wanted, None: nothing is asked], [[answer] of each TaskRun]), all as text."""
    words = runs[0].data.words
    x, y = runs[0].data.rows(split, level, n, length, seed)
    answers = [answers_of(run.model, torch.from_numpy(x)).tolist() for run in runs]
    n_words = len(words.vocab)

    def text_of(word):
        return words.text_of(word) if word < n_words else "�"  # a padded vocabulary has more

    for row, targets, *run_answers in zip(x.tolist(), y.tolist(), *answers):
        yield ([text_of(word) for word in row],
               [None if word == NOT_ASKED else text_of(word) for word in targets],
               [[text_of(word) for word in answer_row] for answer_row in run_answers])
