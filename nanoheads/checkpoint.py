"""
Checkpoints: what is in one, how it is written and read, and how a model is built from it.

A checkpoint is a dict that torch.save() wrote. Every one holds
    model, config, meta       the weights by name, the flags of its GPTConfig, its dataset's meta.json or None
    version                   that of this file when it was written; older files, and others', have none
Those of train.py hold also
    dataset, train            what --dataset named, and the flags of its TrainConfig
    own_mechanism             names and digests of the files with mechanisms of one's own, where it has any
    step, best_val_loss, ...  how far the run is: PROGRESS
ckpt.pt, from which a run goes on, holds also
    optimizers, scaler        their states
    controller                the state of dynamic heads, where they are on; other extensions have theirs by
                              their names, see extensions.py
and what lab/prune.py wrote holds `pruned`, which says how.

read() gives the dict, config_of() its flags, build() its model. It is read with weights_only=True, which runs
no code that is in it, and its weights are loaded by strict names and shapes: that is the check.

What a run starts from is in start.py, what else lies in its folder in log.py, --ckpt in arguments.py.
own_mechanism.py and lab/hub/ are imported by the functions that need them: most checkpoints have no mechanism
of one's own, and are no folders of transformers'.
"""

import json
import math
import os
import re
import warnings
from pathlib import Path

import torch

from model import GPT, RECIPES, GPTConfig
from nanoheads.common import (UserError, fault_of_own_file, from_lab, is_there, number,
                              old_version_message, ran_out_of_memory, write_atomic)
from nanoheads.configurator import convert_fields, keys_of, likely_key, parse, type_name
from nanoheads.tokenizer import same_vocabulary

VERSION = 1  # of new files; to be raised when an older program would misread them

# how far a run is, in all that train.py saves: attributes of its Run
PROGRESS = ("step", "best_val_loss", "evals_since_best", "elapsed_s", "run_id", "last_eval")
# what a file must hold, besides its model, for a run to go on from it
RESUME_KEYS = ("meta", "train", *PROGRESS, "optimizers", "scaler")
# the types of what may be missing, or None
TYPES = dict(dataset=str, train=dict, step=int, best_val_loss=float, evals_since_best=int, elapsed_s=float,
             run_id=str, last_eval=dict, optimizers=list, scaler=dict)
# what is in ckpt.pt beside the states of extensions
CORE_KEYS = {"version", "model", "config", "dataset", "own_mechanism", *RESUME_KEYS}

# what `meta` must say of tokens
TOKEN_FIELDS = dict(name=str, encoding=str, vocab_size=int)

# flags of older checkpoints, at the values with which a model is the same without them
IGNORED_FLAGS = [("agency_scope", "head")]


# ---- write ----

def save(path, state):
    """Write a checkpoint, whole or not at all. UserError: the disk refuses."""
    write_atomic(path, lambda f: torch.save({**state, "version": VERSION}, f))


# ---- read ----

def file_of(path):
    """The checkpoint file that a path means: of a run folder its best."""
    path = Path(path)
    if not path.is_dir():
        return path
    return next((path / n for n in ("best.pt", "ckpt.pt") if os.path.lexists(path / n)), path / "ckpt.pt")


def read(path, device="cpu"):
    """The dict in a checkpoint file: ours, or nanoGPT's, or a Hugging Face folder's, put into our form.

    Nothing that is read is run. Raises UserError.
    """
    file = file_of(path)
    if is_there(file):
        state = load_file(file, device)
    else:  # no file of ours: a folder of transformers', or a name on the hub
        hf = from_lab("lab.hub.huggingface", f"no checkpoint {file}; a folder or a name of Hugging Face's")
        from_hub = hf.is_name(path) and not Path(path).exists()
        if not (from_hub or hf.is_folder(path)):
            raise UserError(f"no checkpoint {file}")
        state = hf.read(hf.fetch(path) if from_hub else path)
    meta = state["meta"]
    if meta is not None and not (has_string_keys(meta) and is_json(meta) and
                                 all(isinstance(meta.get(key), kind) for key, kind in TOKEN_FIELDS.items())):
        raise UserError(f"{path} is damaged: its meta does not say what its tokens mean")
    if problem := problem_of_progress(state):
        raise UserError(f"{path} is damaged: {problem}")
    flags = state["config"].items()
    state["config"] = {key: value for key, value in flags if (key, value) not in IGNORED_FLAGS}
    return state


def load_file(path, device):
    """The dict in a file, in our form. UserError: it is no checkpoint, or of a newer version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice on pickles of others, which are refused below
            state = torch.load(path, map_location=device, weights_only=True)
    except Exception as e:  # damage shows in many ways, all meaning the same to the reader
        if ran_out_of_memory(e):
            raise
        if isinstance(e, OSError) and e.filename:
            raise  # it cannot be opened at all
        if name := re.search(r"Unsupported global: GLOBAL (\S+)", str(e)):
            raise UserError(f"{path} holds an object of {name[1][:80]}, which is not read, since "
                            "making it would run code: save plain values where it was written, such as "
                            "model_args=vars(config) and float(loss)") from None
        raise UserError(f"{path} cannot be read as a checkpoint: it is cut short, damaged, or no file of "
                        "tensors and plain values; copy it anew, or name another") from None
    state = state if has_string_keys(state) else {}
    version = state.get("version", 0)
    if type(version) is not int or version > VERSION:
        raise UserError(f"{path} is of version {version}, and this program reads checkpoints up to version "
                        f"{VERSION}: update the program")
    if has_string_keys(state.get("model")) and has_string_keys(state.get("model_args")):
        state = convert_nanogpt(state, path)
    if not ("meta" in state and has_string_keys(state.get("model")) and has_string_keys(state.get("config"))):
        raise UserError(f"{path} is a torch file, but no checkpoint: nanoHeads' have model, config and meta, "
                        "nanoGPT's have model and model_args")
    files = state.get("own_mechanism", [])
    if not (isinstance(files, list) and all(map(is_file_record, files))):
        raise UserError(f"{path} is damaged: its own_mechanism must be a list of files with their digests")
    return state


def problem_of_progress(state):
    """What is wrong with what a read dict holds beside its model, in a few words; None: nothing is."""
    def is_a(value, kind):
        return isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)

    for key, kind in TYPES.items():
        value = state.get(key)
        if not (value is None or is_a(value, kind)):
            return f"its {key} must be of type {kind.__name__}, and is of {type(value).__name__}"
        if kind is float and value is not None and math.isnan(value):
            return f"its {key} is {value}"
    scaler, meta = state.get("scaler"), state["meta"] or {}
    if (state.get("step") or 0) < 0:
        return f"its step is {state['step']}"
    if state.get("last_eval") is not None and not is_a(state["last_eval"].get("step"), int):
        return "its last_eval must have a step, which is a number"
    if scaler and not (number(scaler.get("scale")) > 0 and is_a(scaler.get("_growth_tracker"), int)):
        return "its scaler must have a scale above 0 and a _growth_tracker, which are numbers"
    dicts = [meta[key] for key in ("splits", "task", "options") if meta.get(key) is not None]
    dicts += meta["splits"].values() if isinstance(meta.get("splits"), dict) else ()
    if not all(map(has_string_keys, dicts)):
        return "its meta does not say what its splits, its task or its options are"


def has_string_keys(value):
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def is_json(value):
    """Whether JSON can hold a value, as all of a meta.json is held by it: no tensors, no bytes."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def is_file_record(value):
    """Whether a value is what own_mechanism.record() says of a file."""
    if not has_string_keys(value):
        return False
    helpers = value.get("helpers", [])
    names = [value.get("file"), value.get("digest"), *(helpers if isinstance(helpers, list) else [None])]
    return all(isinstance(name, str) for name in names)


def convert_nanogpt(state, path):
    """nanoGPT's checkpoint in our form; it names the dataset but lacks its vocabulary (meta: None).

    Its GELU was the tanh form until 17 May 2023, which those from before February are known by. For one in
    between there is --set act=gelu_tanh. UserError: a fork's, with arguments that nanoGPT's model has not.
    """
    flags = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "dropout")
    arguments = state["model_args"]
    if unknown := [f"{key}={value!r}"[:60] for key, value in arguments.items() if key not in flags]:
        raise UserError(f"{path} is of a fork of nanoGPT: its model_args have {', '.join(unknown)}, and what "
                        "that changes is not known here; where it changes nothing, take it out: "
                        "docs/from-nanogpt.md says how")
    config = dict(recipe="gpt2", **arguments)
    masks = (".attn.bias", ".attn.masked_bias")
    # DistributedDataParallel and torch.compile put names of their own before those of the model
    weights = {re.sub(r"^((module|_orig_mod)\.)+", "", name): t for name, t in state["model"].items()
               if not name.endswith(masks)}
    # the two matrices are one since 14 January 2023, but not in every fork
    head = weights.get("lm_head.weight")
    wte = weights.get("transformer.wte.weight")
    are_there = torch.is_tensor(head) and torch.is_tensor(wte)
    config["tied"] = not are_there or torch.equal(wte.float(), head.float())
    if "bias" not in config:  # from before 27 January 2023, when biases became a choice: the tensors tell
        config.update(bias="transformer.ln_f.bias" in weights, act="gelu_tanh")
    step, settings = state.get("iter_num"), state.get("config")
    dataset = settings.get("dataset") if isinstance(settings, dict) else None
    return dict(model=weights, config=config, meta=None, step=step if isinstance(step, int) else 0,
                dataset=dataset if isinstance(dataset, str) else None)


def config_of(state, path, **overrides):
    """The GPTConfig of a read checkpoint; flags younger than it are off, as in the plain GPT. UserError.

    Its flags may need the code of a mechanism in a file of one's own: see own_mechanism.add_named().
    """
    flags = state["config"]
    if "routing_capacity" in flags:  # a flag until 2026-11-26
        raise UserError(old_version_message(path))
    if state.get("own_mechanism") or not set(flags) <= set(GPTConfig.defaults()):
        from nanoheads import own_mechanism
        flags = own_mechanism.flags_of(state, path)
    try:
        config = GPTConfig(**{**RECIPES["gpt2"], **flags, **convert_fields(flags, GPTConfig), **overrides})
    except (ValueError, TypeError) as e:
        why = fault_of_own_file(e) or " ".join(str(e).split())
        raise UserError(f"{path}: its config is impossible: {why}")
    return config


# ---- its model ----

def build(state, path, device="cpu", settings=(), **overrides):
    """The GPT of a read checkpoint, in eval mode, with switches moved by `settings`, see read_settings().

    Raises UserError, also when the weights and the config disagree.
    """
    flags, heads = read_settings(settings)
    config = config_of(state, path, **overrides, **flag_changes(state, path, flags))
    try:
        model = GPT(config)
        load_weights(model, state["model"], path)
    except UserError:
        raise
    except (ValueError, RuntimeError) as e:
        if ran_out_of_memory(e) or fault_of_own_file(e):
            raise
        why = " ".join(str(e).split()).removeprefix("Error(s) in loading state_dict for GPT: ")
        raise UserError(f"{path}: its weights do not fit its config: {why[:300]}")
    model.to(device).eval()
    if config.unet_from or config.unet_ramp:  # its skips as in the last step before it was saved
        model.at_step(max(0, state.get("step", math.inf) - 1))
    for key, layer, head, value in heads:
        try:
            if key == "gate":
                model.set_gate(layer, head, value)
            else:
                model.set_state(layer, head, step=state.get("step") or 0, **{key: value})
        except ValueError as e:
            raise UserError(f"{path}: --set {key}.{layer}.{head}={value}: {e}")
    return model


def is_finite(t):
    """Whether all numbers of a tensor are. Their sum says so in a tenth of the time, but may overflow."""
    return bool(t.sum().isfinite() or t.isfinite().all())


def load_weights(model, weights, path, strict=True):
    """load_state_dict() of a read checkpoint's weights, which must be finite.

    Raises ValueError, RuntimeError: they do not fit the model; UserError: they are not finite.
    """
    result = model.load_state_dict(weights, strict=strict)
    for name, p in model.named_parameters():
        if not is_finite(p):
            raise UserError(f"{path}: {name} holds NaN or infinities: its weights are damaged, or its "
                            "training diverged")
    return result


@torch.no_grad()
def same_logits(model, other):
    """Whether two models in eval mode say the same of a few random tokens, but for rounding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(other.config.vocab_size, (2, min(64, other.config.block_size)), generator=generator)
    logits, other_logits = (m(ids.to(next(m.parameters()).device)).logits for m in (model, other))
    return (logits - other_logits).abs().max() <= 1e-4 * other_logits.abs().max()


def check_vocabulary(state, dataset, path):
    """Raise UserError unless the checkpoint's token ids mean what the dataset's do."""
    old, new = state["meta"], dataset.meta
    if old and not same_vocabulary(*((meta.get("encoding"), meta.get("vocab")) for meta in (old, new))):
        raise UserError(f"{path} was trained on {old['name']} "
                        f"({old['encoding']}, {old['vocab_size']:,} symbols), "
                        f"whose vocabulary is not that of {new['name']} "
                        f"({new['encoding']}, {dataset.vocab_size:,})")
    size = state["config"].get("vocab_size") or 0
    if size < dataset.vocab_size:
        raise UserError(f"{path} knows {size:,} tokens; {new['name']} has {dataset.vocab_size:,}")


# ---- switches of a trained model ----

# <key>.<layer>.<head>, for set_gate() and set_state() of a GPT
HEAD_KEYS = {"gate": float, "state": str, "consent": bool}
# what the tensors mean depends on these, even where their shapes do not
FIXED_FLAGS = ("recipe", "n_layer", "n_head", "tied", "head_ids", "constraint_names")


def read_settings(settings):
    """({flag: value}, [(key, layer, head, value)]) from texts "flag=value" and "gate.<layer>.<head>=value".

    Raises UserError.
    """
    types = {key: t for key, (t, _, _) in keys_of((GPTConfig,)).items()}
    flags, heads = {}, []
    for text in settings:
        name, equals, value = text.partition("=")
        key, *position = name.split(".")
        is_of_head = key in HEAD_KEYS
        if not (is_of_head or name in types):
            suggestion, words = likely_key(key, {**types, **HEAD_KEYS})
            words = words if suggestion else "train.py --help lists the flags of a model"
            raise UserError(f"--set {text}: unknown key {name}; {words}")
        if not equals or is_of_head and not (len(position) == 2 and all(map(str.isdecimal, position))):
            raise UserError(f"--set {text}: it must be {key}{'.<layer>.<head>' * is_of_head}=value")
        t = HEAD_KEYS[key] if is_of_head else types[key]
        try:
            value = parse(value, t)
        except ValueError:
            raise UserError(f"--set {text}: {value!r} is not {type_name(t)}")
        if is_of_head:
            heads.append((key, *map(int, position), value))
        else:
            flags[key] = value
    return flags, heads


def flag_changes(state, path, flags):
    """{flag: value} for config_of(): the flags, and those that go with them.

    Raises UserError where a tensor of the read checkpoint depends on one.
    """
    if not flags:
        return {}
    # what is off has no details: window=None means no window_block
    prefixes = tuple(f"{key}_" for key, value in flags.items() if value is None or value is False)
    details = {name: value for name, value in GPTConfig.defaults().items() if name.startswith(prefixes)}
    changes = {**details, **flags}
    if fixed_flags := [key for key in flags if key in FIXED_FLAGS]:
        raise UserError(f"{path}: {fixed_flags[0]} cannot be changed after training")
    config = config_of(state, path, **changes)
    if problems := config.problems():
        raise UserError(f"{path}: {'; '.join(problems)}")
    old, new = tensor_shapes(config_of(state, path)), tensor_shapes(config)
    if changed_tensors := sorted(name for name in {**old, **new} if old.get(name) != new.get(name)):
        raise UserError(f"{path}: {', '.join(flags)} cannot be changed after training: {changed_tensors[0]} "
                        "depends on it")
    return changes


def tensor_shapes(config):
    """{name: shape} of all that a checkpoint of this config holds. Raises ValueError on an impossible one."""
    with torch.device("meta"):
        return {name: t.shape for name, t in GPT(config).state_dict().items()}
