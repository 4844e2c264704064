"""
Checkpoints: written whole or not at all, read without running their code, and what a run starts from.

nanoheads/own_mechanism.py and nanoheads/hub/ are imported by the functions that need them: most checkpoints
have no mechanism of one's own, and are no folders of transformers'.
"""

import json
import math
import zipfile
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path

import torch

from model import GPT, MECHANISM_CLASSES, NEUTRAL, RECIPES, GPTConfig
from nanoheads.common import (UserError, fault_of_own_file, json_safe, ran_out_of_memory,
                              with_names_of_today, write_atomic)
from nanoheads.configurator import UNNAMED, keys_of, nearest, parse, type_name
from nanoheads.folders import find

# what a run needs to go on, beside model, config and meta
RESUMABLE = {"optimizers", "scaler", "train", "step", "best_val_loss", "elapsed_s", "run_id", "last_eval"}


# ---- write ----

def save(path, state):
    write_atomic(path, lambda f: torch.save(state, f))


# ---- read ----

def file_of(path):
    """The checkpoint file that a path means: of a run folder its best."""
    path = Path(path)
    if not path.is_dir():
        return path
    return next((path / n for n in ("best.pt", "ckpt.pt") if (path / n).is_file()), path / "ckpt.pt")


def newest_run():
    """The run folder, under out/ or called out-..., that was saved last. UserError: there is none."""
    saved = [path for pattern in ("out/*/", "out-*/", "out/") for folder in Path().glob(pattern)
             if (path := file_of(folder)).is_file()]
    if not saved:
        raise UserError("no --ckpt is named, and there is no run under out/: train one, for instance with "
                        "python train.py --scale=tiny")
    return str(max(saved, key=lambda path: path.stat().st_mtime).parent)


def read(path, device="cpu", trust_code=False):
    """The dict in a checkpoint file: ours, or nanoGPT's, or a Hugging Face folder's, put into our form.

    Nothing that is read is run. trust_code: of a mechanism in a file of one's own, the file in the
    checkpoint's folder is run, and a line says so. Raises UserError.
    """
    if not file_of(path).is_file():  # no file of ours: a folder of transformers', or a name on the hub
        from nanoheads.hub import huggingface as hf
        if hf.is_folder(path):
            return hf.read(path, trust_code)
        if hf.is_name(path) and not Path(path).exists():
            return hf.read(hf.fetch(path))
    path = file_of(path)
    if not path.is_file():
        raise UserError(f"no checkpoint {path}")
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("cut short, or no torch file at all")
        if broken := zipfile.ZipFile(path).testzip():  # torch itself does not verify the checksums
            raise ValueError(f"damaged in {broken}")
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as e:  # damage shows in many ways, all meaning the same to the reader
        if ran_out_of_memory(e):
            raise
        why = str(e).splitlines()[0][:80] if type(e) is ValueError else type(e).__name__
        raise UserError(f"{path} cannot be read as a checkpoint ({why})") from None
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise UserError(f"{path} is a torch file, but neither nanoHeads' nor nanoGPT's checkpoint")
    check_form(state, path)
    if isinstance(state.get("model_args"), dict):
        return from_nanogpt(state)
    if not {"config", "meta"} <= set(state) or not isinstance(state["config"], dict):
        raise UserError(f"{path} is a torch file, but neither nanoHeads' nor nanoGPT's checkpoint")
    if trust_code:
        from nanoheads import own_mechanism
        own_mechanism.trust(state, path)
    if state.get("train"):
        state["train"] = with_names_of_today(state["train"])
    return state


def check_form(state, path):
    """UserError where a part of a checkpoint, ours or nanoGPT's, is not of the kind that is written."""
    def need(what, holds):
        if not holds:
            raise UserError(f"{path} is damaged, or no checkpoint of this program: {what}")

    for name, t in state["model"].items():
        need(f"the tensor {name!r} has a name that is no text", isinstance(name, str))
        need(f"{name} is a {type(t).__name__}, not a tensor", isinstance(t, torch.Tensor))
    for key in ("config", "train", "model_args"):
        names = state.get(key) or {}
        need(f"{key} is a {type(names).__name__}, not a dict of flags",
             isinstance(names, dict) and all(isinstance(name, str) for name in names))
    meta = state.get("meta") or {}
    need(f"meta, its dataset's, is a {type(meta).__name__}, not a dict", isinstance(meta, dict))
    for key, kind in dict(name=str, encoding=str, vocab_size=int).items() if meta else ():
        need(f"meta, its dataset's, has no {key}", isinstance(meta.get(key), kind))
    need(f"step={state.get('step')!r} is no number", isinstance(state.get("step", 0), int))
    need(f"dataset={state.get('dataset')!r} is no text", isinstance(state.get("dataset"), (str, type(None))))


def from_nanogpt(state):
    """nanoGPT's checkpoint in our form; it names the dataset but lacks its vocabulary (meta: None)."""
    flags = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "dropout")
    config = dict(recipe="gpt2", **{k: state["model_args"][k] for k in flags if k in state["model_args"]})
    masks = (".attn.bias", ".attn.masked_bias")
    weights = {k.removeprefix("_orig_mod."): v for k, v in state["model"].items() if not k.endswith(masks)}
    return dict(model=weights, config=config, meta=None, step=state.get("iter_num", 0),
                dataset=state.get("config", {}).get("dataset"))


def config_of(state, path, **overrides):
    """The GPTConfig of a read checkpoint; flags younger than it are off, as in the plain GPT. UserError.

    Its flags may need the code of a mechanism in a file of one's own: see allow_code().
    """
    flags = state["config"]
    if state.get("own_mechanism") or not set(flags) <= set(GPTConfig.defaults()):
        from nanoheads import own_mechanism
        flags = own_mechanism.flags_of(state, path)
    flags = as_it_was(flags)
    try:
        config = GPTConfig(**{**RECIPES["gpt2"], **flags, **overrides})
        if not {"n_layer", "n_embd"} & set(overrides):
            check_layers(state, config)
    except (ValueError, TypeError) as e:
        why = fault_of_own_file(e) or " ".join(str(e).split())
        raise UserError(f"{path}: its config is impossible: {why}")
    return config


def as_it_was(flags):
    """A checkpoint's flags, with what was true before there was a flag for it, where that is not the default.

    Variant B's head size was always floored to a multiple of 8. unet_init was 0.5 even where unet was off.
    """
    if not flags.get("unet") and flags.get("unet_init") == 0.5:
        flags = {**flags, "unet_init": None}
    if flags.get("constraint_variant") == "B":
        return {"constraint_round": 8, **flags}
    return flags


def check_layers(state, config):
    """ValueError where a config has other blocks or another width than the tensors beside it.

    A model of 20,000 layers takes minutes to build, only to find that its weights are those of 12.
    """
    weights = state.get("model", {})
    layers = {name.split(".")[2] for name in weights if name.startswith("transformer.h.")}
    if weights and len(layers) != config.n_layer:
        raise ValueError(f"n_layer={config.n_layer}, and there are tensors of {len(layers)} blocks")
    wte = weights.get("transformer.wte.weight")
    if wte is not None and config.n_embd not in wte.shape:
        raise ValueError(f"n_embd={config.n_embd}, and the embedding is {' x '.join(map(str, wte.shape))}")


def build(state, path, device="cpu", settings=(), **overrides):
    """The GPT of a read checkpoint, in eval mode, with switches moved by `settings`, see read_settings().

    Raises UserError, also when the weights and the config disagree.
    """
    flags, heads = read_settings(settings)
    config = config_of(state, path, **overrides, **switchable(state, path, flags))
    try:
        model = GPT(config)
        model.load_state_dict(state["model"])
    except (ValueError, TypeError, AttributeError, RuntimeError) as e:
        if ran_out_of_memory(e):
            raise
        if problem := fault_of_own_file(e):
            raise UserError(problem)
        raise UserError(f"{path}: its weights do not fit its config: {' '.join(str(e).split())[:300]}")
    model.to(device).eval()
    if config.unet_from or config.unet_ramp:  # its skips as in the last step before it was saved
        model.at_step(max(0, state.get("step", math.inf) - 1))
    for key, layer, head, value in heads:
        try:
            model.set_head(layer, head, step=state.get("step") or 0, **{key: value})
        except ValueError as e:
            place = layer if head is None else f"{layer}.{head}"
            raise UserError(f"{path}: --set {key}.{place}={value}: {e}")
    return model


def add_arguments(parser, required=True):
    """The arguments of every program that reads checkpoints."""
    from nanoheads.own_files import add_arguments as add_arguments_of_own
    parser.add_argument("--ckpt", action="append", required=required, default=[],
                        help="a checkpoint or a run folder (its best.pt); may be repeated"
                             + ("" if required else "; default: the newest run"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                        help="change a flag that no weight depends on, as in unet_skips=False, or a head by "
                             "layer and number: gate.0.3=0, state.0.3=withdrawn, consent.0.3=False; with "
                             "agency_scope an MLP or block by its layer: state.0=withdrawn; may be repeated")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, mps")
    add_arguments_of_own(parser)


def allow_code(args, *paths):
    """Add the mechanisms in files of one's own that the command line lets run, of --ckpt or of these paths.

    args: what a parser with own_files.add_arguments() made. Raises UserError.
    """
    if args.mechanism:
        from nanoheads import own_mechanism
        own_mechanism.add_named(args)
    for path in (paths or args.ckpt) if args.trust_code else ():
        read(path, trust_code=True)


# ---- switches of a trained model ----

# <key>.<layer>.<head>, or <key>.<layer>, for GPT.set_head()
HEAD_KEYS = {"gate": float, "state": str, "consent": bool}
# what the tensors mean depends on these, even where their shapes do not
FIXED = ("recipe", "n_layer", "n_head", "tied", "head_ids", "constraint_names")


def read_settings(settings):
    """({flag: value}, [(key, layer, head, value)]) from texts "flag=value" and "gate.<layer>.<head>=value".

    head: None where the text has none, for an MLP or a block. Raises UserError.
    """
    types = {key: t for key, (t, _, _) in keys_of((GPTConfig,)).items()} | HEAD_KEYS
    flags, heads = {}, []
    for text in settings:
        name, equals, value = text.partition("=")
        key, *place = name.split(".")
        if key in HEAD_KEYS:
            if not equals or len(place) not in (1, 2) or not all(number.isdecimal() for number in place):
                raise UserError(f"--set {text}: it must be {key}.<layer>.<head>=value")
        elif name not in types:
            meant, words = nearest(key, types)
            words = words if meant else "train.py --help lists the flags of a model"
            raise UserError(f"--set {text}: unknown key {name}; {words}")
        elif not equals:
            raise UserError(f"--set {text}: it must be {key}=value")
        try:
            value = parse(value, types[key])
        except ValueError:
            raise UserError(f"--set {text}: {value!r} is not {type_name(types[key])}")
        if key in HEAD_KEYS:
            heads.append((key, int(place[0]), int(place[1]) if len(place) > 1 else None, value))
        else:
            flags[key] = value
    return flags, heads


def switchable(state, path, flags):
    """{flag: value} for config_of(): the flags, and those that go with them.

    Raises UserError where a tensor of the read checkpoint depends on one.
    """
    if not flags:
        return {}
    old, details = tensors(config_of(state, path)), {}
    for key, value in flags.items():
        off = {}
        if value is None or value is False:  # what is off has no details: window=None means no window_block
            off = {name: value for name, value in GPTConfig.defaults().items() if name.startswith(key + "_")}
        details.update(off)
        try:
            new = old if key in FIXED else tensors(config_of(state, path, **{**off, key: value}))
        except ValueError:  # impossible by itself; all of them together are checked below
            continue
        changed = sorted(name for name in {**old, **new} if old.get(name) != new.get(name))
        if changed or key in FIXED:
            why = f": {changed[0]} depends on it" if changed else ""
            raise UserError(f"{path}: {key} cannot be changed after training{why}")
    if bad := config_of(state, path, **{**details, **flags}).problems():
        raise UserError(f"{path}: {'; '.join(bad)}")
    return {**details, **flags}


def tensors(config):
    """{name: shape} of all that a checkpoint of this config holds. Raises ValueError on an impossible one."""
    with torch.device("meta"):
        return {name: t.shape for name, t in GPT(config).state_dict().items()}


# ---- which folder a run is in ----

RUN_FILES = ("config.json", "ckpt.pt", "best.pt")  # of which a folder that holds a run has one


def asked_for(model_config, config):
    """{key: value} of what makes a run another one, as config.json holds it: a GPTConfig and a TrainConfig.

    No defaults, and no keys that may change when a run goes on (UNNAMED); of mechanisms in files of one's own
    the texts. The configs are as the command line made them: nothing in them follows from a checkpoint yet.
    """
    defaults = {**GPTConfig().flags(), **asdict(type(config)())}
    asked = {key: value for key, value in {**model_config.flags(), **asdict(config)}.items()
             if key not in UNNAMED and (key not in defaults or value != defaults[key])}
    if model_config.own:
        from nanoheads import own_mechanism
        if mine := own_mechanism.record(model_config):
            asked["own_mechanism"] = [f"{each['file']} {each['digest']}" for each in mine]
    return json.loads(json.dumps(json_safe(asked)))  # as it will be read


def asked_in(folder):
    """What was asked for in a run's folder, as asked_for(); None: its config.json does not say."""
    try:
        asked = json.loads((folder / "config.json").read_bytes())["asked"]
        return asked if isinstance(asked, dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def default_folder(model_config, config):
    """(out_dir for a command that gives none, a line about it or None), from the name that config has."""
    folder, line = find(Path(config.out_dir).name, asked_for(model_config, config), RUN_FILES, asked_in,
                        goes_on=config.resume or config.eval_only)
    return str(folder), line


# ---- what a run starts from ----

def saves_in(config):
    """Names of the checkpoints in out_dir. UserError unless the config says what becomes of them."""
    out_dir = Path(config.out_dir)
    names = [name for name in ("ckpt.pt", "best.pt") if (out_dir / name).is_file()]
    for key in ("init_from", "teacher") if config.overwrite else ():
        start = getattr(config, key) and file_of(getattr(config, key))
        if start and start.is_file() and start.resolve().parent == out_dir.resolve():
            raise UserError(f"--overwrite removes the checkpoints of {out_dir}, and {key} names one of them: "
                            "choose another --out_dir")
    resumes = config.resume and "ckpt.pt" in names
    if names and not (config.eval_only or config.overwrite or resumes):
        instead = f"take its weights with --init_from={out_dir / 'best.pt'}"
        how = "go on with --resume" if "ckpt.pt" in names else instead
        raise UserError(f"{out_dir} already holds a run; {how}, start over with --overwrite, "
                        "or choose another --out_dir")
    return names


def needs_code_of_own(path):
    """Whether the checkpoint of a run needs code of one's own that was not added. UserError."""
    from nanoheads import own_mechanism
    return own_mechanism.needs_code(read(path), path)


def trust_what_it_starts_from(config):
    """Run the code of mechanisms that lies beside the checkpoints a run starts from, where they need some.

    config: the TrainConfig, which names these checkpoints; None: nothing is trusted. Raises UserError.
    """
    if config is None:
        return
    here = config.out_dir if config.resume or config.eval_only and not config.init_from else None
    if config.resume and file_of(here).is_file() and needs_code_of_own(here):
        raise UserError("--resume names the file of a mechanism of one's own again, --mechanism=FILE: "
                        "--trust_code alone does not say which of its modes is trained")
    for path in filter(None, (config.init_from, config.teacher, here)):
        if path != here or file_of(path).is_file():
            read(path, trust_code=True)


def starting_point(model_config, config, dataset, device, given):
    """(model, the state to go on from or None) of a run; given: {flag: value} that were set for it.

    The model is out_dir/ckpt.pt, has another checkpoint's weights, or is new. Raises UserError when what
    there is does not fit what is asked for.
    """
    last = Path(config.out_dir) / "ckpt.pt"
    new_run = config.eval_only or not config.resume or not last.is_file()
    path = last if not new_run else config.init_from or (config.out_dir if config.eval_only else None)
    if path is None:
        vocab_size = model_config.vocab_size or dataset.vocab_size
        return GPT(replace(model_config, vocab_size=vocab_size)).to(device), None
    state = read(path, device)
    same_vocabulary(state, dataset, path)
    flags = set(GPTConfig.defaults())
    if config.init_from or config.eval_only:
        # a model that comes from elsewhere needs no flags: only those that were given can be wrong
        flags &= set(given)
    # what may change: how it is trained; in a new run also dropout, data order, a shorter context
    free = {"checkpoint_activations", "loss_chunks"}
    free |= {"dropout", "attn_dropout", "seed"} if new_run else set()
    free |= {"unet_from", "unet_ramp"} if new_run and config.init_from else set()  # the new run's own
    longest = state["config"].get("block_size", 0)
    crop = new_run and "block_size" in flags and model_config.block_size < longest
    new = turned_on(state, path, model_config, given) if new_run and config.init_from else []
    held = flags - free - ({"block_size"} if crop else set())
    same_model(state, path, model_config, held - {name for cls in new for name in cls.fields()})
    overrides = {key: getattr(model_config, key) for key in free}
    if new:
        model = extended(state, path, device, given, new, config.init_anyway, overrides)
    else:
        model = build(state, path, device, **overrides)
    if crop:
        model.crop_block_size(model_config.block_size)
    if not new_run:
        same_run(state, path, config.for_recipe(model.config.recipe), dataset)
    return model, None if new_run and not config.eval_only else state


def turned_on(state, path, config, given):
    """The classes of the mechanisms that the given flags turn on and a read checkpoint does not have."""
    old = config_of(state, path)
    return [cls for cls in MECHANISM_CLASSES
            if cls.flag in given and cls.is_on(config) and not cls.is_on(old)]


def mode_of(cls, config):
    """The mode of a mechanism that a config's flags are, the most specific one; None: none of them."""
    def fits(mode):
        for key, value in cls.modes[mode].items():
            free = key == cls.flag and not isinstance(value, (str, bool))  # names, or a number of tokens
            if getattr(config, key) != value and not free:
                return False
        return True
    return max(filter(fits, cls.modes), key=lambda mode: len(cls.modes[mode]), default=None)


@torch.no_grad()
def make_neutral(model, names):
    """Set the parameters of these entries of NEUTRAL: where their flags hold too, the plain GPT's logits."""
    for pattern, value in (item for name in names for item in NEUTRAL.get(name, {}).items()):
        for name, p in model.named_parameters():
            if fnmatch(name, f"*{pattern}"):
                p.copy_(value(p.shape) if callable(value) else torch.as_tensor(value))


def neutral_flags(cls, config, given):
    """{flag: value} at which a mechanism of this config equals the plain GPT; flags that were given stay.

    Raises UserError, naming the mechanism, where it has no such setting.
    """
    mode, flags = mode_of(cls, config), {}
    if cls.absorbs:
        return flags
    what = f"{cls.flag}={given[cls.flag]!r}"
    anyway = "--init_anyway starts it as in a new model"
    if mode not in NEUTRAL:
        raise UserError(f"{what} has no neutral setting, that is, the checkpoint's logits; {anyway}")
    for key, value in NEUTRAL[mode].items():
        if key not in GPTConfig.defaults():
            continue  # a parameter
        flags[key] = getattr(config, value) if isinstance(value, str) else value
        if key in given and getattr(config, key) != flags[key]:
            raise UserError(f"{what} is neutral only with {key}={flags[key]}; {anyway}")
    return flags


def extended(state, path, device, given, classes, anyway, overrides):
    """The GPT of a read checkpoint with mechanisms turned on, each at its neutral setting: the same logits.

    anyway: one without such a setting starts as in a new model. Raises UserError without, naming it.
    """
    flags = {name: given[name] for cls in classes for name in cls.fields() if name in given}
    flags = {**overrides, **flags}
    config, modes = config_of(state, path, **flags), []
    for cls in classes:
        try:
            flags.update(neutral_flags(cls, config, given))
            modes.append(mode_of(cls, config))
        except UserError as e:
            if not anyway:
                raise UserError(f"{path}: {e}") from None
    try:
        model = GPT(config_of(state, path, **flags))
        missing, unknown = model.load_state_dict(state["model"], strict=False)
        if unknown or set(missing) & set(tensors(config_of(state, path))):
            raise ValueError(f"no weights for {', '.join([*unknown, *missing][:3])}")
    except (ValueError, RuntimeError) as e:
        names = ", ".join(cls.flag for cls in classes)
        why = " ".join(str(e).split())[:300]
        raise UserError(f"{path}: {names} cannot be turned on over its weights: {why}")
    make_neutral(model, modes)
    from nanoheads.pruning import scale_heads  # only here: no other start of a run needs it
    for block in model.transformer.h:
        for m in block.attn.mechanisms():
            if m.absorbs and type(m) in classes:
                scale_heads(block.attn, 1 / m.static_gate(noisy=False))
    model.to(device).eval()
    if len(modes) == len(classes) and not same_logits(model, build(state, path, device)):
        raise UserError(f"{path}: with {', '.join(modes)} the model is not the checkpoint's at the start; "
                        "--init_anyway starts it all the same")
    return model


@torch.no_grad()
def same_logits(model, other):
    """Whether two models in eval mode say the same of a few random tokens, but for rounding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(other.config.vocab_size, (2, min(64, other.config.block_size)), generator=generator)
    got, want = (m(ids.to(next(m.parameters()).device)).logits for m in (model, other))
    return (got - want).abs().max() <= 1e-4 * want.abs().max()


def teacher_of(config, model, device):
    """The model that `teacher` names, in eval mode; None: none is named. UserError where it does not fit."""
    if not config.teacher:
        return None
    if not model.config.constraint_match:  # one that comes from a checkpoint, where no flag was asked
        raise UserError(f"teacher={config.teacher} has nothing to compare: the model of {config.init_from} "
                        "was made without constraint_match")
    state = read(config.teacher)
    teacher = build(state, config.teacher, device).requires_grad_(False)
    ours, theirs = model.config, teacher.config
    heads = [[(attn.n_extra, attn.head_size) for attn in (block.attn for block in each.transformer.h)
              if attn.n_extra] for each in (model, teacher)]
    for what, same in (("vocab_size", ours.vocab_size == theirs.vocab_size),
                       ("constraint_names", ours.constraint_names == theirs.constraint_names),
                       ("blocks with constraint heads", len(heads[0]) == len(heads[1])),
                       ("constraint heads' sizes", heads[0] == heads[1] or ours.constraint_match == "kl"),
                       ("block_size", ours.block_size <= theirs.block_size)):
        if not same:
            raise UserError(f"teacher={config.teacher}: its {what} are not this model's, "
                            f"so that constraint_match={ours.constraint_match} cannot compare them")
    return teacher


def same_vocabulary(state, dataset, path):
    """Raise UserError unless the checkpoint's token ids mean what the dataset's do."""
    old, new = state["meta"], dataset.meta
    if old and any(old.get(key) != new.get(key) for key in ("encoding", "vocab")):
        raise UserError(f"{path} was trained on {old['name']} "
                        f"({old['encoding']}, {old['vocab_size']:,} symbols), "
                        f"whose vocabulary is not that of {new['name']} "
                        f"({new['encoding']}, {dataset.vocab_size:,})")
    size = state["config"].get("vocab_size") or 0
    if size < dataset.vocab_size:
        raise UserError(f"{path} knows {size:,} tokens; {new['name']} has {dataset.vocab_size:,}")


def same_model(state, path, config, flags):
    """Raise UserError, naming the flags, unless those of `config` among `flags` are the checkpoint's."""
    old, new = config_of(state, path).flags(), config.flags()
    new["vocab_size"] = new["vocab_size"] or old["vocab_size"]
    # a flag of a mechanism in a file of one's own that was not named is off here
    new.update((name, value) for name, value in GPTConfig.defaults().items() if name not in new)
    differ = [f"{k}={new[k]!r} here is {old[k]!r} there" for k in old if k in flags and new[k] != old[k]]
    if differ:
        raise UserError(f"{path} holds another model: {'; '.join(differ)}")


def same_run(state, path, config, dataset):
    """Raise UserError unless a run that goes on from `state` as configured is still the same run."""
    instead = f"to begin a new run with its weights: --init_from={path} and another --out_dir"
    if lacks := sorted(RESUMABLE - set(state)):
        raise UserError(f"{path} holds no state to go on from (no {', '.join(lacks)}); {instead}")
    fixed = []
    for train in (state["train"], asdict(config)):
        batch = train["batch_size"] * train["grad_accum"]
        fixed.append({"optimizer": train["optimizer"], "batch_size * grad_accum": batch})
    old, new = fixed
    differ = [f"{key}={new[key]!r} here is {old[key]!r} there" for key in old if new[key] != old[key]]
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
        why = " ".join(str(e).split())[:120]
        raise UserError(f"{path}: its optimizer state does not fit this config ({why})")
    for group, values in zip(optimizer.param_groups, fresh):
        group.update(values)


def last_save(out_dir):
    """Half a sentence about what can be done after a failure."""
    path = Path(out_dir) / "ckpt.pt"
    if path.is_file():
        return f"the last save is {path}, --resume goes on from it"
    return "nothing was saved yet: start again"
