"""
How a folder beside the core adds settings to training, and actions between its steps.

There is one such folder, lab/heads, which measures and changes the heads of a model. It adds an Extension to
EXTENSIONS when it is imported, at the end of this file. Without the folder TrainConfig has none of its keys,
and nothing acts between steps. The core knows nothing else of it.
"""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Callable

EXTENSIONS = []


@dataclass(frozen=True)
class Extension:
    """What a folder adds to training, in functions of a run's configs.

    start() returns the object that acts between the steps of a run. Of it the core uses
        interval          every so many steps it acts; before that the run reads the values of its last step
        step(run)         called after every step; returns whether the model gained or lost parameters
        state()           what ckpt.pt saves of it, from which a resumed run goes on
        as_scored(model)  a model that computes the same by its weights alone, for best.pt
    """
    name: str            # under which ckpt.pt has the state
    keys: type           # a dataclass, whose fields become keys of TrainConfig
    is_on: Callable      # (TrainConfig) -> whether anything acts between the steps of such a run
    problems: Callable   # (GPTConfig, TrainConfig) -> sentences that say what does not go together
    new_model: Callable  # (GPTConfig, TrainConfig) -> the GPTConfig with which a new model begins
    start: Callable      # (Run, the checkpoint to go on from, or {}) -> what acts; UserError where it cannot
    files: tuple = ()    # those of the keys that name a file, which a run reads
    set_with: dict = field(default_factory=dict)  # {flag of a model: {key: value that its name sets too}}


try:
    import_module("lab.heads")
except ModuleNotFoundError as e:
    if e.name not in ("lab", "lab.heads"):
        raise
