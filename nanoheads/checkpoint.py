"""
Checkpoints: what is in the file, how it is written and read, and the model that it becomes.

Below, CONTENT describes the file. read() gives it as a dict, config_of() its flags, build() its model. A file
is written whole or not at all, and reading it runs no code that is in it.

What a run starts from is in start.py, what else lies in its folder in log.py. own_mechanism.py and lab/hub/
are imported by the functions that need them: most checkpoints have no mechanism of one's own, and are no
folders of transformers'.
"""

import argparse
import errno
import math
import reprlib
import sys
import zipfile
from pathlib import Path
from typing import Callable, NamedTuple

import torch

from model import GPT, RECIPES, GPTConfig
from nanoheads.common import (UserError, fault_of_own_file, from_lab, number, of_an_older_version, plural,
                              ran_out_of_memory, write_atomic)
from nanoheads.configurator import keys_of, nearest, parse, type_name, typed
from nanoheads.mechanism import Mechanism
from nanoheads.other_names import ROUTING_PAIR
from nanoheads.tokenizer import problem_of_meta


# ---- what is in the file ----

def has_names(value):
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def is_text(value):
    return isinstance(value, str)


def is_count(value):
    return type(value) is int and 0 <= value < 2**63


def is_number(value):
    return type(value) in (int, float)


def is_size(value):
    return is_number(value) and number(value) >= 0  # which has NaN for what is infinite


def is_list_of(kind):
    return lambda value: isinstance(value, list) and all(type(each) is kind for each in value)


def none_or(fits):
    return lambda value: value is None or fits(value)


def is_float_tensor(value):
    return torch.is_tensor(value) and value.is_floating_point()


def is_evaluation(value):
    """Whether a value is a row of log.jsonl as train.py's evaluations are, of text or of a task; step -1: of
    none so far.
    """
    if not has_names(value):
        return False
    of_text = {"step", "tokens", "train_loss", "val_loss", "val_bpb", "elapsed_s"}
    of_task = {"step", "tokens", "val_loss", "val_acc", "elapsed_s"}
    return value.get("step") == -1 or of_text <= value.keys() or of_task <= value.keys()


def are_files_of_own(value):
    """Whether a value is own_mechanism.record()'s, [{"file": name, "digest": digest}]."""
    return is_list_of(dict)(value) and all(is_text(each.get(key)) for each in value
                                           for key in ("file", "digest"))


# which files have an entry
EVERY = "every checkpoint"  # also nanoGPT's, and a folder of transformers', once they are in this form
RUN = "best.pt and ckpt.pt of train.py"
PROGRESS = "best.pt and ckpt.pt of train.py, whose Run has an attribute of that name"
GOING_ON = "ckpt.pt of train.py, from which a run goes on"
SOME = "those that it applies to"


# flags of older checkpoints, at the values with which a model is the same without them
WITHOUT_EFFECT = [("agency_scope", "head")]


class Entry(NamedTuple):
    """An entry of a checkpoint, which is a dict: what it must be, and what is inside it."""

    files: str      # which have it: one of the words above
    what: str       # what it must be, as an error says it
    fits: Callable  # value -> whether it is that
    inside: dict = {}  # place in it, such as "*.state", where * is each of them -> (what, fits) of that place


# All that a checkpoint may hold: save() writes nothing else, and read() lets nothing else than this pass
CONTENT = {
    # read by every program: the model, and what its token ids mean
    "model": Entry(EVERY, "a dict of tensors by name", has_names, {
        "*": ("a tensor", torch.is_tensor)}),
    "config": Entry(EVERY, "a dict of flags", has_names),                  # of its GPTConfig
    "meta": Entry(EVERY, "a dict or None", none_or(has_names)),            # its dataset's meta.json

    # read by what scores a model on its own text, and where a run goes on
    "dataset": Entry(RUN, "a text or None", none_or(is_text)),             # as --dataset named it
    "train": Entry(RUN, "a dict of flags or None", none_or(has_names)),    # of its TrainConfig
    "own_mechanism": Entry(SOME, "a list of files' names and digests", are_files_of_own),  # own_mechanism.py

    # read where a run goes on, step by every program that says how old a model is
    "step": Entry(PROGRESS, "a number of steps", is_count),
    "best_val_loss": Entry(PROGRESS, "a loss, at least 0", lambda value: is_size(value) or value == math.inf),
    "evals_since_best": Entry(PROGRESS, "a number of evaluations", is_count),
    "elapsed_s": Entry(PROGRESS, "seconds, at least 0", is_size),
    "run_id": Entry(PROGRESS, "a text", is_text),
    "last_eval": Entry(PROGRESS, "an evaluation", is_evaluation, {
        "*": ("a number", is_number)}),

    # read where a run goes on
    "optimizers": Entry(GOING_ON, "a list of dicts", is_list_of(dict), {
        "*.state": ("a dict", lambda value: isinstance(value, dict)),
        "*.state.*": ("a dict of moments", has_names),
        "*.state.*.*": ("a tensor of floats", is_float_tensor),
        "*.param_groups": ("a list of dicts", is_list_of(dict)),
        "*.param_groups.*.params": ("a list of numbers", is_list_of(int))}),
    "scaler": Entry(GOING_ON, "a dict of numbers", has_names, {            # of float16; else empty
        "scale": ("a number above 0", lambda value: is_size(value) and value > 0),
        "_growth_tracker": ("a number of steps", is_count)}),
    "controller": Entry(SOME, "a dict", has_names),                        # of lab/heads, dynamic heads

    # read by nobody: what lab/prune.py did to the model
    "pruned": Entry(SOME, "a dict", has_names),
}


def entries(*files):
    """The names of the entries that these files have, in the order of CONTENT."""
    return [name for name, entry in CONTENT.items() if entry.files in files]


def parts(value, place):
    """Yield (name, part) of all that stands at a place, see Entry, of a dict or list; None: it is missing."""
    key, _, rest = place.partition(".")
    each = value.items() if isinstance(value, dict) else enumerate(value)
    for name, part in each if key == "*" else [(key, value.get(key))]:
        if not rest:
            yield name, part
        elif part:
            for inner, found in parts(part, rest):
                yield f"{name}.{inner}", found


def check_form(state, path):
    """UserError, naming the part and its value, where a read checkpoint is not as CONTENT says."""
    damaged = f"{path} is damaged, or no checkpoint of this program"

    def refuse(name, value, what):
        raise UserError(f"{damaged}: {name}={' '.join(reprlib.repr(value).split())} must be {what}")

    for name, entry in CONTENT.items():
        if name not in state:
            continue
        if not entry.fits(state[name]):
            refuse(name, state[name], entry.what)
        for place, (what, fits) in entry.inside.items() if state[name] else ():
            for inner, part in parts(state[name], place):
                if not fits(part):
                    refuse(f"{name}.{inner}", part, what)
    if state["meta"] is not None and (problem := problem_of_meta(state["meta"], of_folder=False)):
        raise UserError(f"{damaged}: meta, its dataset's: {problem}")
    step, last = state.get("step"), (state.get("last_eval") or {}).get("step")
    most = (state.get("train") or {}).get("max_iters")
    if None not in (step, most) and not (is_count(most) and step <= most):
        refuse("step", step, f"at most max_iters={reprlib.repr(most)}")
    if None not in (step, last) and last not in range(-1, step + 1):
        refuse("last_eval.step", last, f"from -1 to step={step}")


# ---- write ----

def save(path, state):
    """Write a checkpoint, whole or not at all. UserError: the disk refuses.

    ValueError: it has entries that CONTENT does not describe.
    """
    if unknown := state.keys() - CONTENT:
        raise ValueError(f"CONTENT describes no {', '.join(map(str, unknown))}")
    write_atomic(path, lambda f: torch.save(state, f))


def last_save(out_dir):
    """Half a sentence about what can be done after a failure."""
    path = Path(out_dir) / "ckpt.pt"
    if path.is_file():
        return f"the last save is {path}, --resume goes on from it"
    return "nothing was saved yet: start again"


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


def default_runs(program):
    """The run folders that a command without --ckpt means, which a line says: the newest run, or where it is
    one of the head-routing write-up's pair, both. UserError: there is none.
    """
    newest, pair = newest_run(), list(ROUTING_PAIR)
    found = pair if newest in pair and all(file_of(each).is_file() for each in pair) else [newest]
    words = "the newest run" if len(found) == 1 else "the newest runs"
    print(f"{program}:", *(f"--ckpt {path}" for path in found[:-1]), f"--ckpt {found[-1]}, {words}",
          file=sys.stderr)
    return found


def read(path, device="cpu", trust_code=False):
    """The dict in a checkpoint file: ours, or nanoGPT's, or a Hugging Face folder's, put into our form.

    Nothing that is read is run. trust_code: of a mechanism in a file of one's own, the file in the
    checkpoint's folder is run, and a line says so; never what comes from the hub. Raises UserError.
    """
    if file_of(path).is_file():
        path = file_of(path)
        state = in_file(path, device)
    else:  # no file of ours: a folder of transformers', or a name on the hub
        what = f"no checkpoint {file_of(path)}; a folder or a name of Hugging Face's"
        hf = from_lab("lab.hub.huggingface", what)
        from_hub = hf.is_name(path) and not Path(path).exists()
        if not (from_hub or hf.is_folder(path)):
            raise UserError(f"no checkpoint {file_of(path)}")
        state = hf.read(hf.fetch(path) if from_hub else path)
        trust_code = trust_code and not from_hub
    check_form(state, path)
    flags = state["config"].items()
    state["config"] = {key: value for key, value in flags if (key, value) not in WITHOUT_EFFECT}
    if trust_code:
        from nanoheads import own_mechanism
        own_mechanism.trust(state, path)
    return state


def in_file(path, device):
    """The dict in a file, in our form; check_form() looks into it. UserError: it is no checkpoint."""
    try:
        with open(path, "rb") as file:
            # torch asks for the first bytes alone, and takes what has others for a file of its oldest form
            if file.read(4) != b"PK\3\4" or not zipfile.is_zipfile(file):
                raise ValueError("cut short, or no torch file at all")
            if broken := zipfile.ZipFile(file).testzip():  # torch itself does not verify the checksums
                raise ValueError(f"damaged in {broken}")
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as e:  # damage shows in many ways, all meaning the same to the reader
        if ran_out_of_memory(e):
            raise
        why = str(e).splitlines()[0][:80] if type(e) is ValueError else type(e).__name__
        if isinstance(e, OSError):  # such as: Permission denied; EINVAL: a place before the start of the file
            why = "damaged" if e.errno == errno.EINVAL else e.strerror or why
        raise UserError(f"{path} cannot be read as a checkpoint ({why})") from None
    state = state if has_names(state) else {}
    if has_names(state.get("model")) and isinstance(state.get("model_args"), dict):
        state = from_nanogpt(state)
    if not state.keys() >= {*entries(EVERY)}:
        raise UserError(f"{path} is a torch file, but neither nanoHeads' nor nanoGPT's checkpoint")
    return state


def from_nanogpt(state):
    """nanoGPT's checkpoint in our form; it names the dataset but lacks its vocabulary (meta: None).

    Its GELU was the tanh form until 17 May 2023, which those from before February are known by. For one in
    between there is --set act=gelu_tanh.
    """
    flags = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "dropout")
    config = dict(recipe="gpt2", **{k: state["model_args"][k] for k in flags if k in state["model_args"]})
    masks = (".attn.bias", ".attn.masked_bias")
    weights = {k.removeprefix("_orig_mod."): v for k, v in state["model"].items() if not k.endswith(masks)}
    if "bias" not in config:  # from before 27 January 2023, when biases became a choice: the tensors tell
        wte, head = weights.get("transformer.wte.weight"), weights.get("lm_head.weight")
        tied = wte is None or head is None or torch.equal(wte, head)  # two matrices until 14 January 2023
        config.update(bias="transformer.ln_f.bias" in weights, tied=tied, act="gelu_tanh")
    settings = state.get("config")
    return dict(model=weights, config=config, meta=None, step=state.get("iter_num", 0),
                dataset=settings.get("dataset") if isinstance(settings, dict) else None)


def config_of(state, path, **overrides):
    """The GPTConfig of a read checkpoint; flags younger than it are off, as in the plain GPT. UserError.

    Its flags may need the code of a mechanism in a file of one's own: see allow_code().
    """
    flags = state["config"]
    if is_of_an_older_version(state):
        raise UserError(of_an_older_version(path))
    if state.get("own_mechanism") or not set(flags) <= set(GPTConfig.defaults()):
        from nanoheads import own_mechanism
        flags = own_mechanism.flags_of(state, path)
    try:
        config = GPTConfig(**{**RECIPES["gpt2"], **flags, **typed(flags, GPTConfig), **overrides})
        check_sizes(state, config, overrides)
    except (ValueError, TypeError) as e:
        why = fault_of_own_file(e) or " ".join(str(e).split())
        raise UserError(f"{path}: its config is impossible: {why}")
    return config


def is_of_an_older_version(state):
    """Whether a read checkpoint is of before 2026-11-26: a flag of that time is in its config."""
    return "routing_capacity" in state["config"]


# which size of a config is one of which tensor's
SIZES = {"n_embd": ("transformer.wte.weight", "the embedding is"),
         "vocab_size": ("transformer.wte.weight", "the embedding is"),
         "block_size": ("transformer.wpe.weight", "the table of positions is")}


def check_sizes(state, config, others=()):
    """ValueError where a config has other blocks or sizes than the tensors beside it; others: keys that may.

    A model of 20,000 layers takes minutes to build, and one of a billion positions takes all memory, only to
    find that its weights are those of 12 layers and 1,024 positions.
    """
    weights = state.get("model", {})
    layers = {name.split(".")[2] for name in weights if name.startswith("transformer.h.")}
    if weights and "n_layer" not in others and len(layers) != config.n_layer:
        raise ValueError(f"n_layer={config.n_layer}, and there are tensors of {plural(len(layers), 'block')}")
    for key, (name, words) in SIZES.items():
        size, shape = getattr(config, key), weights[name].shape if name in weights else None
        if shape is not None and key not in others and size not in shape:
            raise ValueError(f"{key}={size}, and {words} {' x '.join(map(str, shape))}")


# ---- its model ----

def build(state, path, device="cpu", settings=(), **overrides):
    """The GPT of a read checkpoint, in eval mode, with switches moved by `settings`, see read_settings().

    Raises UserError, also when the weights and the config disagree.
    """
    flags, heads = read_settings(settings)
    config = config_of(state, path, **overrides, **switchable(state, path, flags))
    try:
        model = GPT(config)
        load_weights(model, state["model"], path)
    except UserError:
        raise
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
            raise UserError(f"{path}: --set {key}.{layer}.{head}={value}: {e}")
    return model


def is_finite(t):
    """Whether all numbers of a tensor are. Their sum says so in a tenth of the time, but may overflow."""
    return bool(t.sum().isfinite() or t.isfinite().all())


def load_weights(model, weights, path, strict=True):
    """load_state_dict() of a read checkpoint's weights, which must be of the model's kind, and finite.

    Raises TypeError, ValueError, RuntimeError: they do not fit the model; UserError: they are not finite.
    """
    own = model.state_dict()
    for name, t in weights.items():
        if name in own and (t.is_complex() or t.is_floating_point() != own[name].is_floating_point()):
            raise TypeError(f"{name} holds {t.dtype} in the place of {own[name].dtype}")
    loaded = model.load_state_dict(weights, strict=strict)
    for name, m in model.named_modules():
        if isinstance(m, Mechanism):
            m.check_loaded(name)
    for name, p in model.named_parameters():
        if not is_finite(p):
            raise UserError(f"{path}: {name} holds NaN or infinities: its weights are damaged, or its "
                            "training diverged")
    return loaded


@torch.no_grad()
def same_logits(model, other):
    """Whether two models in eval mode say the same of a few random tokens, but for rounding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(other.config.vocab_size, (2, min(64, other.config.block_size)), generator=generator)
    got, want = (m(ids.to(next(m.parameters()).device)).logits for m in (model, other))
    return (got - want).abs().max() <= 1e-4 * want.abs().max()


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


# ---- the arguments of programs that read them ----

def add_arguments(parser, required=True):
    """The arguments of every program that reads checkpoints."""
    from nanoheads import own_mechanism
    parser.add_argument("--ckpt", action="append", required=required, default=[],
                        help="a checkpoint or a run folder (its best.pt); may be repeated"
                             + ("" if required else "; default: the newest run"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                        help="change a flag that no weight depends on, as in unet_skips=False, or a head by "
                             "layer and number: gate.0.3=0, state.0.3=withdrawn, consent.0.3=False; may be "
                             "repeated")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, mps")
    own_mechanism.add_arguments(parser)


def add_pack(parser, but=""):
    """The argument of a program that does without withdrawn heads; but: when it does not, in words."""
    parser.add_argument("--pack", type=true_or_false, nargs="?", const=True, default=True, metavar="False",
                        help="False: compute heads whose gate is 0 too, and multiply by it, as in training; "
                             f"default: such heads are left out before anything begins{but}")


def true_or_false(text):
    """A bool from the command line, for argparse."""
    try:
        return parse(text, bool)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be True or False") from None


def allow_code(args, *paths):
    """Add the mechanisms in files of one's own that the command line lets run, of --ckpt or of these paths.

    args: what a parser with own_mechanism.add_arguments() made. Raises UserError.
    """
    if args.mechanism:
        from nanoheads import own_mechanism
        own_mechanism.add_named(args)
    for path in (paths or args.ckpt) if args.trust_code else ():
        read(path, trust_code=True)


# ---- switches of a trained model ----

# <key>.<layer>.<head>, for GPT.set_head()
HEAD_KEYS = {"gate": float, "state": str, "consent": bool}
# what the tensors mean depends on these, even where their shapes do not
FIXED = ("recipe", "n_layer", "n_head", "tied", "head_ids", "constraint_names")


def read_settings(settings):
    """({flag: value}, [(key, layer, head, value)]) from texts "flag=value" and "gate.<layer>.<head>=value".

    Raises UserError.
    """
    types = {key: t for key, (t, _, _) in keys_of((GPTConfig,)).items()} | HEAD_KEYS
    flags, heads = {}, []
    for text in settings:
        name, equals, value = text.partition("=")
        key, *place = name.split(".")
        if key in HEAD_KEYS:
            if not equals or len(place) != 2 or not all(number.isdecimal() for number in place):
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
            heads.append((key, *map(int, place), value))
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
