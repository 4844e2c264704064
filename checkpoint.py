"""Checkpoints: written whole or not at all, read without running anybody's code, and what a run starts from."""

import zipfile
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

from common import UserError, write_atomic
from configurator import keys_of, nearest, parse, type_name
from model import GPT, RECIPES, GPTConfig

# what a run needs to go on, beside model, config and meta
RESUMABLE = {"optimizers", "scaler", "train", "step", "best_val_loss", "elapsed_s", "run_id", "last_eval"}


# ---- write ----

def save(path, state):
    write_atomic(path, lambda f: torch.save(state, f))


# ---- read ----

def read(path, device="cpu"):
    """The dict in a checkpoint file: ours, or nanoGPT's put into our form. Raises UserError."""
    path = Path(path)
    if path.is_dir():  # a run folder means its best checkpoint
        path = next((path / n for n in ("best.pt", "ckpt.pt") if (path / n).is_file()), path / "ckpt.pt")
    if not path.is_file():
        raise UserError(f"no checkpoint {path}")
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("cut short, or no torch file at all")
        if broken := zipfile.ZipFile(path).testzip():  # torch itself does not look at the checksums
            raise ValueError(f"damaged in {broken}")
        state = torch.load(path, map_location=device, weights_only=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # damage shows in many ways, all meaning the same to the reader
        why = str(e).splitlines()[0][:80] if type(e) is ValueError else type(e).__name__
        raise UserError(f"{path} cannot be read as a checkpoint ({why})") from None
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise UserError(f"{path} is a torch file, but neither nanoHeads' nor nanoGPT's checkpoint")
    if isinstance(state.get("model_args"), dict):
        return from_nanogpt(state)
    if not {"config", "meta"} <= set(state) or not isinstance(state["config"], dict):
        raise UserError(f"{path} is a torch file, but neither nanoHeads' nor nanoGPT's checkpoint")
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
    """The GPTConfig of a read checkpoint; flags younger than it are off, as in the plain GPT. Raises UserError."""
    unknown = sorted(set(state["config"]) - set(GPTConfig.__dataclass_fields__))
    if unknown:
        raise UserError(f"{path} was written by a newer version: unknown flags {', '.join(unknown)}")
    try:
        return GPTConfig(**{**RECIPES["gpt2"], **state["config"], **overrides})
    except (ValueError, TypeError) as e:
        raise UserError(f"{path}: its config is impossible: {' '.join(str(e).split())}")


def build(state, path, device="cpu", settings=(), **overrides):
    """The GPT of a read checkpoint, in eval mode, with switches moved by `settings` (texts, see read_settings()).

    Raises UserError, also when the weights and the config disagree.
    """
    flags, by_hand = read_settings(settings)
    config = config_of(state, path, **overrides, **switchable(state, path, flags))
    try:
        model = GPT(config)
        model.load_state_dict(state["model"])
    except (ValueError, TypeError, AttributeError, RuntimeError) as e:
        raise UserError(f"{path}: its weights do not fit its config: {' '.join(str(e).split())[:300]}")
    model.to(device).eval()
    for kind, layer, head, value in by_hand:
        try:
            model.set_head(layer, head, **{kind: value})
        except ValueError as e:
            raise UserError(f"{path}: --set {kind}.{layer}.{head}={value}: {e}")
    return model


# ---- switches of a trained model ----

HEAD_KEYS = {"gate": float, "state": str, "consent": bool}  # <key>.<layer>.<head>, for GPT.set_head()
FIXED = ("recipe", "n_layer", "n_head", "tied", "heads", "constraint_names")  # what the tensors mean, even where their shapes stay


def read_settings(settings):
    """Texts "flag=value" and "gate.<layer>.<head>=value" -> ({flag: value}, [(key, layer, head, value)]). Raises UserError."""
    types, flags, by_hand = {key: t for key, (t, _, _) in keys_of((GPTConfig,)).items()} | HEAD_KEYS, {}, []
    for text in settings:
        (name, equals, value), where = text.partition("="), []
        if (key := name.split(".")[0]) in HEAD_KEYS:
            where = name.split(".")[1:]
            if not equals or len(where) != 2 or not all(w.isdecimal() for w in where):
                raise UserError(f"--set {text}: it must be {key}.<layer>.<head>=value")
        elif name not in types:
            meant, words = nearest(key, types)
            raise UserError(f"--set {text}: unknown key {name}; " + (words if meant else "train.py --help lists the flags of a model"))
        elif not equals:
            raise UserError(f"--set {text}: it must be {key}=value")
        try:
            value = parse(value, types[key])
        except ValueError:
            raise UserError(f"--set {text}: {value!r} is not {type_name(types[key])}")
        if where:
            by_hand.append((key, *map(int, where), value))
        else:
            flags[key] = value
    return flags, by_hand


def switchable(state, path, flags):
    """{flag: value} for config_of(), after checking that no tensor of a read checkpoint depends on them. Raises UserError."""
    old, details = tensors(config_of(state, path)) if flags else None, {}
    for key, value in flags.items():
        # what is off has no details: window=None takes window_block with it
        off = {f.name: f.default for f in fields(GPTConfig) if (value is None or value is False) and f.name.startswith(key + "_")}
        details.update(off)
        try:
            new = old if key in FIXED else tensors(config_of(state, path, **{**off, key: value}))
        except ValueError:  # impossible by itself; all of them together are judged below
            continue
        changed = sorted(name for name in {**old, **new} if old.get(name) != new.get(name))
        if changed or key in FIXED:
            raise UserError(f"{path}: {key} cannot be changed after training" + (f": {changed[0]} depends on it" if changed else ""))
    if bad := config_of(state, path, **{**details, **flags}).problems() if flags else []:
        raise UserError(f"{path}: {'; '.join(bad)}")
    return {**details, **flags}


def tensors(config):
    """{name: shape} of all that a checkpoint of this config holds. Raises ValueError on an impossible one."""
    with torch.device("meta"):
        return {name: t.shape for name, t in GPT(config).state_dict().items()}


# ---- what a run starts from ----

def starting_point(model_config, config, dataset, device):
    """(model, the state to go on from or None) of a run: out_dir/ckpt.pt, another checkpoint's weights, or a new model.

    Raises UserError when what there is does not fit what is asked for.
    """
    last = Path(config.out_dir) / "ckpt.pt"
    new_run = config.eval_only or not config.resume or not last.is_file()
    path = last if not new_run else config.init_from or (config.out_dir if config.eval_only else None)
    if path is None:
        return GPT(replace(model_config, vocab_size=model_config.vocab_size or dataset.vocab_size)).to(device), None
    state = read(path, device)
    same_vocabulary(state, dataset, path)
    # a model that comes from elsewhere needs no flags: only those that were given can be wrong
    flags = getattr(model_config, "given", set()) if config.init_from or config.eval_only else {f.name for f in fields(GPTConfig)}
    # what may change: how it is trained; in a new run also dropout, the data order, and the context if it gets shorter
    keep = {"checkpoint_activations"} | ({"dropout", "attn_dropout", "seed"} if new_run else set())
    crop = new_run and "block_size" in flags and model_config.block_size < state["config"].get("block_size", 0)
    same_model(state, path, model_config, flags - keep - ({"block_size"} if crop else set()))
    model = build(state, path, device, **{key: getattr(model_config, key) for key in keep})
    if crop:
        model.crop_block_size(model_config.block_size)
    if not new_run:
        same_run(state, path, config.for_recipe(model.config.recipe), dataset)
    return model, None if new_run and not config.eval_only else state


def same_vocabulary(state, dataset, path):
    """Raise UserError unless the checkpoint's token ids mean what the dataset's do."""
    meta, size, here = state["meta"], state["config"].get("vocab_size") or 0, dataset.meta
    if meta and any(meta.get(key) != here.get(key) for key in ("encoding", "vocab")):
        raise UserError(f"{path} was trained on {meta['name']} ({meta['encoding']}, {meta['vocab_size']:,} symbols), "
                              f"whose vocabulary is not that of {here['name']} ({here['encoding']}, {dataset.vocab_size:,})")
    if size < dataset.vocab_size:
        raise UserError(f"{path} knows {size:,} tokens; {here['name']} has {dataset.vocab_size:,}")


def same_model(state, path, config, flags):
    """Raise UserError, naming the flags, unless those of `config` among `flags` are the checkpoint's."""
    old, new = asdict(config_of(state, path)), asdict(config)
    new["vocab_size"] = new["vocab_size"] or old["vocab_size"]
    differ = [f"{k}={new[k]!r} here is {old[k]!r} there" for k in old if k in flags and new[k] != old[k]]
    if differ:
        raise UserError(f"{path} holds another model: {'; '.join(differ)}")


def same_run(state, path, config, dataset):
    """Raise UserError unless a run that goes on from `state` as configured is still the same run."""
    instead = f"to begin a new run with its weights: --init_from={path} and another --out_dir"
    if lacks := sorted(RESUMABLE - set(state)):
        raise UserError(f"{path} holds no state to go on from (no {', '.join(lacks)}); {instead}")
    old, new = ({**c, "batch_size * grad_accum": c["batch_size"] * c["grad_accum"]} for c in (state["train"], asdict(config)))
    differ = [f"{k}={new[k]!r} here is {old[k]!r} there" for k in ("optimizer", "batch_size * grad_accum") if new[k] != old[k]]
    if state["meta"]["splits"] != dataset.meta["splits"]:
        differ.append(f"{dataset.dir} holds other data than {state['meta']['name']} did")
    if differ:
        raise UserError(f"{path} cannot go on like this: {'; '.join(differ)}; {instead}")


def restore(optimizer, saved, path):
    """Load an optimizer's moments; rates, betas and decay stay those of the config. Raises UserError."""
    fresh = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(saved)
    except (ValueError, KeyError) as e:
        raise UserError(f"{path}: its optimizer state does not fit this config ({' '.join(str(e).split())[:120]})")
    for group, values in zip(optimizer.param_groups, fresh):
        group.update(values)


def last_save(out_dir):
    path = Path(out_dir) / "ckpt.pt"
    return f"the last save is {path}, --resume goes on from it" if path.is_file() else "nothing was saved yet: start again"
