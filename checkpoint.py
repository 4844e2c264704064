"""Checkpoints: written whole or not at all, read without running anybody's code, resumed only as the same run."""

import os
import zipfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from model import GPT, GPTConfig

# what a run needs to go on, beside model, config and meta
RESUMABLE = {"optimizers", "scaler", "train", "step", "best_val_loss", "elapsed_s", "run_id", "last_eval"}


class CheckpointError(Exception):
    """What is wrong with a checkpoint, or with writing it, in one line."""


# ---- write ----

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
    except (OSError, RuntimeError) as e:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        cause = e.__context__ if isinstance(e.__context__, OSError) else e  # torch wraps a failed write in a RuntimeError
        if not isinstance(cause, OSError):
            raise
        before = "the previous one is intact" if path.exists() else "there is no previous one"
        raise CheckpointError(f"could not write {path} ({cause.strerror or cause}); {before}") from None


def save(path, state):
    write_atomic(path, lambda f: torch.save(state, f))


# ---- read ----

def read(path, device="cpu"):
    """The dict in a checkpoint file: ours, or nanoGPT's put into our form. Raises CheckpointError."""
    path = Path(path)
    if path.is_dir():  # a run folder means its best checkpoint
        path = next((path / n for n in ("best.pt", "ckpt.pt") if (path / n).is_file()), path / "ckpt.pt")
    if not path.is_file():
        raise CheckpointError(f"no checkpoint {path}")
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("cut short, or no torch file at all")
        if broken := zipfile.ZipFile(path).testzip():  # torch itself does not look at the checksums
            raise ValueError(f"damaged in {broken}")
        state = torch.load(path, map_location=device, weights_only=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # damage shows in many ways, all meaning the same to the reader
        why = str(e) if type(e) is ValueError else type(e).__name__
        raise CheckpointError(f"{path} cannot be read as a checkpoint ({why})") from None
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise CheckpointError(f"{path} is a torch file, but neither nanoHeads' nor nanoGPT's checkpoint")
    if isinstance(state.get("model_args"), dict):
        return from_nanogpt(state)
    if not {"config", "meta"} <= set(state) or not isinstance(state["config"], dict):
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


def config_of(state, path, **overrides):
    """The GPTConfig of a read checkpoint; flags that it does not know take their defaults. Raises CheckpointError."""
    unknown = sorted(set(state["config"]) - set(GPTConfig.__dataclass_fields__))
    if unknown:
        raise CheckpointError(f"{path} was written by a newer version: unknown flags {', '.join(unknown)}")
    try:
        return GPTConfig(**{**state["config"], **overrides})
    except (ValueError, TypeError) as e:
        raise CheckpointError(f"{path}: its config is impossible: {' '.join(str(e).split())}")


def build(state, path, device="cpu", **overrides):
    """The GPT of a read checkpoint, in eval mode. Raises CheckpointError when the weights and the config disagree."""
    try:
        model = GPT(config_of(state, path, **overrides))
        model.load_state_dict(state["model"])
    except (ValueError, TypeError, AttributeError, RuntimeError) as e:
        raise CheckpointError(f"{path}: its weights do not fit its config: {' '.join(str(e).split())[:300]}")
    return model.to(device).eval()


# ---- is it the same thing? ----

def same_vocabulary(state, dataset, path):
    """Raise CheckpointError unless the checkpoint's token ids mean what the dataset's do."""
    meta = state["meta"] or {}
    for key in ("encoding", "vocab") if meta else ():
        if meta.get(key) != dataset.meta.get(key):
            raise CheckpointError(f"{path} was trained on {meta['name']} ({meta['encoding']}, {meta['vocab_size']:,} symbols), "
                                  f"whose vocabulary is not that of {dataset.meta['name']} ({dataset.meta['encoding']}, {dataset.vocab_size:,})")
    if (state["config"].get("vocab_size") or 0) < dataset.vocab_size:
        raise CheckpointError(f"{path} knows {state['config'].get('vocab_size') or 0:,} tokens; {dataset.meta['name']} has {dataset.vocab_size:,}")


def same_model(state, path, config, keys):
    """Raise CheckpointError, naming the flags, unless those of `config` among `keys` are the checkpoint's."""
    old, new = asdict(config_of(state, path)), asdict(config)
    new["vocab_size"] = new["vocab_size"] or old["vocab_size"]
    differ = [f"{k}={new[k]!r} is {old[k]!r} there" for k in old if k in keys and new[k] != old[k]]
    if differ:
        raise CheckpointError(f"{path} has another model: {'; '.join(differ)}")


def same_run(state, path, config, dataset):
    """Raise CheckpointError unless a run that goes on from `state` as configured is still the same run."""
    if lacks := sorted(RESUMABLE - set(state)):
        raise CheckpointError(f"{path} holds no state to go on from ({', '.join(lacks)}); begin a new run with its weights: --init_from={path}")
    old, new = state["train"], asdict(config)
    differ = [f"{k}={new[k]!r} is {old[k]!r} there" for k in ("optimizer", "batch_size", "grad_accum") if new[k] != old[k]]
    if old["batch_size"] * old["grad_accum"] == new["batch_size"] * new["grad_accum"]:
        differ = [d for d in differ if d.startswith("optimizer")]  # the same batch, in other portions
    if state["meta"]["splits"] != dataset.meta["splits"]:
        differ.append(f"{dataset.dir} holds other data than {state['meta']['name']} did")
    if differ:
        raise CheckpointError(f"{path} cannot go on as configured: {'; '.join(differ)}; begin a new run with its weights: --init_from={path}")


def restore(optimizer, saved, path):
    """Load an optimizer's moments; rates, betas and decay stay those of the config. Raises CheckpointError."""
    fresh = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(saved)
    except (ValueError, KeyError) as e:
        raise CheckpointError(f"{path}: its optimizer state does not fit this config ({' '.join(str(e).split())[:120]})")
    for group, values in zip(optimizer.param_groups, fresh):
        group.update(values)


def pick_device(name):
    """'auto' -> cuda, mps or cpu, whichever is there first; else the name, checked. Raises CheckpointError."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as e:
        raise CheckpointError(f"device={name} cannot be used: {(str(e) or 'not there').splitlines()[0][:120]}")
    return name
