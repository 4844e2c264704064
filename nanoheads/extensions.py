"""
What a folder beside the core adds to training: keys of its own, and what acts on the model between steps.

Such a folder registers an Extension when it is imported, which happens below. Where it is missing,
TrainConfig has none of its keys, and nothing acts between steps. The core knows nothing else of it.
"""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Callable

EXTENSIONS = []  # those that are registered


@dataclass(frozen=True)
class Extension:
    """What a folder adds to training.

    What start() returns is called between steps. It has
        interval          steps between its actions; before one the run reads the values of its last step
        step(run)         is called after every step, and returns whether parameters came or went
        state()           what ckpt.pt holds of it
        as_scored(model)  a model that computes the same by its weights alone, for best.pt
    """
    name: str           # of its state in ckpt.pt
    keys: type          # a dataclass, whose fields are keys of training
    is_on: Callable     # (TrainConfig) -> whether it acts in such a run
    problems: Callable  # (GPTConfig, TrainConfig) -> what does not go together, as sentences
    problems_of_model: Callable  # (GPT, TrainConfig) -> the same of a model, also of one from a checkpoint
    chooses_heads: Callable  # (TrainConfig) -> whether a run's heads are other ones than its head_ids say
    new_model: Callable  # (GPTConfig, TrainConfig) -> the GPTConfig of a new model
    start: Callable     # (Run, the read checkpoint that it goes on from or {}) -> what acts between steps
    files: tuple = ()   # those of its keys that name files which a run reads
    set_with: dict = field(default_factory=dict)  # {flag: {key: value}}: what a mechanism's name also sets


def register(extension):
    """Add an Extension, before nanoheads/config.py makes TrainConfig."""
    EXTENSIONS.append(extension)


def start(run, state):
    """{name: what acts between the steps of a run} of the extensions that are on."""
    return {each.name: each.start(run, state) for each in EXTENSIONS if each.is_on(run.config)}


try:
    import_module("lab.heads")
except ModuleNotFoundError as e:
    if e.name not in ("lab", "lab.heads"):
        raise
