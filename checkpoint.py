"""Checkpoints: written whole or not at all, read without running anybody's code."""

import os
from pathlib import Path

import torch

from model import GPT, GPTConfig


class CheckpointError(Exception):
    """What is wrong with a checkpoint, or with writing it, in one line."""


def write_atomic(path, write):
    """write(file) into a temporary name, fsync, rename: after a crash `path` is the old file or the new one.

    Raises CheckpointError when the disk is full or refuses, and then leaves the old file as it was.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself must reach the disk
        finally:
            os.close(folder)
    except (OSError, RuntimeError) as e:  # torch reports a failed write as a RuntimeError
        part.unlink(missing_ok=True)
        before = "the previous one is intact" if path.exists() else "there is none yet"
        raise CheckpointError(f"could not write {path} ({str(e).splitlines()[0]}); {before}; free some space and --resume")


def save(path, state):
    write_atomic(path, lambda f: torch.save(state, f))


def read(path, device="cpu"):
    """The dict in a checkpoint file: ours, or nanoGPT's put into our form. Raises CheckpointError."""
    path = Path(path)
    if path.is_dir():  # a run folder means its best checkpoint
        path = next((path / n for n in ("best.pt", "ckpt.pt") if (path / n).is_file()), path / "ckpt.pt")
    if not path.is_file():
        raise CheckpointError(f"no checkpoint {path}")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as e:  # a damaged zip or pickle fails in many ways, all meaning the same to the reader
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {type(e).__name__}, {(str(e) or 'damaged').splitlines()[0][:100]}")
    if isinstance(state, dict) and "model_args" in state and "model" in state:
        return from_nanogpt(state)
    if not isinstance(state, dict) or not {"model", "config", "meta"} <= set(state):
        raise CheckpointError(f"{path} is a torch file, but neither nanoHeads' nor nanoGPT's checkpoint")
    return state


def from_nanogpt(state):
    """nanoGPT's checkpoint in our form; it names the dataset but does not hold its vocabulary (meta: None)."""
    args, weights = state["model_args"], {k.removeprefix("_orig_mod."): v for k, v in state["model"].items()}
    config = dict(recipe="gpt2", **{k: args[k] for k in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "dropout")
                                    if k in args})
    weights = {k: v for k, v in weights.items() if not k.endswith((".attn.bias", ".attn.masked_bias"))}  # masks, not weights
    return dict(model=weights, config=config, meta=None, step=state.get("iter_num", 0),
                dataset=state.get("config", {}).get("dataset"))


def build(state, path, device="cpu", **overrides):
    """The GPT of a read checkpoint, in eval mode. Flags that it does not know take their defaults.

    Raises CheckpointError when the weights and the config disagree.
    """
    known = {k: v for k, v in state["config"].items() if k in GPTConfig.__dataclass_fields__}
    unknown = {k for k, v in state["config"].items() if k not in known}
    if unknown:
        raise CheckpointError(f"{path} was written by a newer version: unknown flags {', '.join(sorted(unknown))}")
    try:
        model = GPT(GPTConfig(**{**known, **overrides}))
        model.load_state_dict(state["model"])
    except (ValueError, RuntimeError, TypeError) as e:
        raise CheckpointError(f"{path}: its weights do not fit its config: {' '.join(str(e).split())[:300]}")
    return model.to(device).eval()


def same_vocabulary(state, dataset, path):
    """Raise CheckpointError unless the checkpoint's token ids mean what the dataset's do."""
    meta = state["meta"] or {}
    for key in ("encoding", "vocab") if meta else ():
        if meta.get(key) != dataset.meta.get(key):
            raise CheckpointError(f"{path} was trained on {meta['name']} ({meta['encoding']}, {meta['vocab_size']:,} symbols), "
                                  f"whose vocabulary is not that of {dataset.meta['name']} ({dataset.meta['encoding']}, {dataset.vocab_size:,})")
    if state["config"]["vocab_size"] < dataset.vocab_size:
        raise CheckpointError(f"{path} knows {state['config']['vocab_size']:,} tokens; {dataset.meta['name']} has {dataset.vocab_size:,}")


def pick_device(name):
    """'auto' -> cuda, mps or cpu, whichever is there first; else the name, checked. Raises CheckpointError."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as e:
        raise CheckpointError(f"device={name} cannot be used: {str(e).splitlines()[0][:120]}")
    return name
