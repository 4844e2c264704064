"""What tests of the lab share: its programs, labels, checkpoints, and the slopes of gates."""

import numpy as np
import torch

from helpers import make_checkpoint
from lab.heads.measuring import attentions, gates_by_hand
from lab.labels.targets import encode, label_file, write_meta
from nanoheads import checkpoint

OF_LAB = ["export_hf", "probe", "prune"]  # programs of lab/ for users of a checkpoint


def is_digit(tokens):
    """Which bytes are digits."""
    return (tokens >= 48) & (tokens < 58)


def put_labels(folder, data, splits=("train", "val"), **names):
    """Write a label set of a Dataset; names: function of a split's tokens -> their values, NaN: unknown."""
    folder.mkdir(parents=True)
    for split in splits:
        tokens = np.asarray(data.tokens(split))
        for name, values in names.items():
            encode(values(tokens)).tofile(label_file(folder, name, split))
    write_meta(folder, data, [*names], splits, weak=True, note="made up")
    return folder


def write_labels(folder, data, shift=0, splits=("train", "val", "test"), digit=None):
    """Write labels of a byte dataset that only some tokens have; the folder as a string.

    digit: 1 on a digit, or on what stands `shift` tokens before one; some tokens are 1/2, some unknown. A
    number: of all tokens. noise: by chance.
    """
    def digits(tokens):
        values = np.roll(is_digit(tokens), -shift).astype(float)
        values[::7], values[::11] = np.nan, 0.5
        return values if digit is None else np.full(len(tokens), digit)

    return str(put_labels(folder, data, splits, digit=digits,
                          noise=lambda tokens: np.random.default_rng(len(tokens)).random(len(tokens))))


def make_labelled_checkpoint(path, encoding="byte", **flags):
    """make_checkpoint() with constraint heads that are no longer new, as if labels had moved them."""
    make_checkpoint(path, encoding, **flags)
    state = torch.load(path)
    for key, value in state["model"].items():
        if key.endswith("constraint.b2"):
            value += 0.01
    torch.save(state, path)
    return str(path)


def model_of(path):
    """The model of a checkpoint, of a run's best one or of a Hugging Face folder."""
    return checkpoint.build(checkpoint.read(path), path)


def gate_slopes(model, x, y):
    """[block][heads]: the mean over rows of |d loss / d gate| of a gate of 1 on the head's output."""
    gates = [torch.ones(attn.n_total, dtype=torch.float64, requires_grad=True) for attn in attentions(model)]
    with gates_by_hand(model, dict(enumerate(gates))):
        slopes = [torch.autograd.grad(model(x[row:row + 1], y[row:row + 1]).loss, gates)
                  for row in range(len(x))]
    return [torch.stack(of_rows).abs().mean(0) for of_rows in zip(*slopes)]
