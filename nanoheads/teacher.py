"""
The teacher that constraint heads may be compared with in place of labels (--teacher): another checkpoint, or
a function in a file.

The losses themselves are ConstraintHeads' in model.py. A run without a teacher does not load this file.
"""

from pathlib import Path

import torch

from nanoheads import checkpoint, own_mechanism
from nanoheads.common import UserError


def is_function(teacher):
    """Whether a teacher is a file of Python with a function in it, and no checkpoint."""
    return teacher is not None and teacher.endswith(".py")


class Features:
    """A teacher that is a function in a file, features(ids [B, T]) -> [B, T, width]. Raises UserError."""

    def __init__(self, path, width):
        if not Path(path).is_file():
            raise UserError(f"teacher={path}: there is no such file")
        self.path, self.width = path, width
        module, file = own_mechanism.run(path)
        if file.helpers:
            raise UserError(f"teacher={path}: it imports {min(file.helpers)}, of which a study would not see "
                            "a change: put that code into it")
        self.function = getattr(module, "features", None)
        if not callable(self.function):
            raise UserError(f"teacher={path}: it must have a function features(ids)")

    @torch.no_grad()
    def predictions(self, ids):
        """Its features of ids [B, T], [B, T, width], on their device. UserError: they are something else."""
        features, shape = self.function(ids), [*ids.shape, self.width]
        if not torch.is_tensor(features) or list(features.shape) != shape:
            what = list(features.shape) if torch.is_tensor(features) else type(features).__name__
            raise UserError(f"teacher={self.path}: features(ids) gives {what} for ids {list(ids.shape)}, and "
                            f"must give {shape}, constraint_features wide")
        return features.to(ids.device)


def teacher_of(config, model, device):
    """What `teacher` names: a model in eval mode, or Features. UserError: it does not fit the model."""
    c = model.config
    if not c.constraint_match:  # one that comes from a checkpoint, where no flag was asked
        raise UserError(f"teacher={config.teacher} has nothing to compare: the model of {config.init_from} "
                        "was made without constraint_match")
    if is_function(config.teacher) != bool(c.constraint_features):
        raise UserError(f"teacher={config.teacher} cannot be compared: the model of {config.init_from} was "
                        f"made with constraint_features={c.constraint_features}")
    if is_function(config.teacher):
        teacher = Features(config.teacher, c.constraint_features)
        teacher.predictions(torch.zeros(1, c.block_size, dtype=torch.long, device=device))  # its shape
        return teacher
    state = checkpoint.read(config.teacher)
    teacher = checkpoint.build(state, config.teacher, device).requires_grad_(False)
    teacher_config = teacher.config
    heads, their_heads = constraint_heads(model), constraint_heads(teacher)
    checks = {"vocab_size": c.vocab_size == teacher_config.vocab_size,
              "constraint_names": c.constraint_names == teacher_config.constraint_names,
              "blocks with constraint heads": len(heads) == len(their_heads),
              "constraint heads' sizes": heads == their_heads or c.constraint_match == "kl",
              "block_size": c.block_size <= teacher_config.block_size}
    for quantity, is_same in checks.items():
        if not is_same:
            raise UserError(f"teacher={config.teacher}: its {quantity} are not this model's, "
                            f"so that constraint_match={c.constraint_match} cannot compare them")
    return teacher


def constraint_heads(model):
    """[(how many, their size)] of each block that has constraint heads."""
    layers = [block.attn for block in model.transformer.h]
    return [(attn.n_extra, attn.head_size) for attn in layers if attn.n_extra]
