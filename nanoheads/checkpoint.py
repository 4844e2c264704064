"""
Checkpoints: written whole or not at all, read without running their code, and what a run starts from.

nanoheads/own_mechanism.py and lab/hub/ are imported by the functions that need them: most checkpoints
have no mechanism of one's own, and are no folders of transformers'.
"""

import argparse
import errno
import json
import math
import reprlib
import sys
import zipfile
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path

import torch

from model import GPT, MECHANISM_CLASSES, NEUTRAL, RECIPES, Agency, GPTConfig
from nanoheads.common import (UserError, fault_of_own_file, from_json, from_lab, json_safe, number,
                              of_an_older_version, plural, ran_out_of_memory, write_atomic)
from nanoheads.config import trained_with
from nanoheads.configurator import keys_of, nearest, parse, print_once, type_name, typed
from nanoheads.dataset import digests_of
from nanoheads.files import find
from nanoheads.other_names import ROUTING_PAIR
from nanoheads.tokenizer import problem_of_meta


# ---- what is in the file ----

def is_flags(value):
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


def none_or(holds):
    return lambda value: value is None or holds(value)


def is_evaluation(value):
    """Whether a value is a row of log.jsonl as train.py's evaluations are; step -1: of none so far."""
    keys = {"step", "tokens", "train_loss", "val_loss", "val_bpb", "elapsed_s"}
    return is_flags(value) and (value.get("step") == -1 or keys <= set(value))


# place, * for each -> (what train.py writes there, whether a value is that). Keys of the top level may be
# missing, where a run is not to go on: it needs those of RESUMABLE
FORM = {
    "model": ("a dict of tensors by name", is_flags),
    "model.*": ("a tensor", torch.is_tensor),
    "config": ("a dict of flags", is_flags),
    "dataset": ("a text or None", none_or(is_text)),
    "meta": ("a dict or None", none_or(is_flags)),
    "train": ("a dict of flags or None", none_or(is_flags)),
    "step": ("a number of steps", is_count),
    "best_val_loss": ("a loss, at least 0", lambda value: is_size(value) or value == math.inf),
    "evals_since_best": ("a number of evaluations", is_count),
    "elapsed_s": ("seconds, at least 0", is_size),
    "run_id": ("a text", is_text),
    "last_eval": ("an evaluation", is_evaluation),
    "last_eval.*": ("a number", is_number),
    "optimizers": ("a list of dicts", is_list_of(dict)),
    "optimizers.*.state": ("a dict", lambda value: isinstance(value, dict)),
    "optimizers.*.state.*": ("a dict of moments", is_flags),
    "optimizers.*.state.*.*": ("a tensor of floats", lambda t: torch.is_tensor(t) and t.is_floating_point()),
    "optimizers.*.param_groups": ("a list of dicts", is_list_of(dict)),
    "optimizers.*.param_groups.*.params": ("a list of numbers", is_list_of(int)),
    "scaler": ("a dict of numbers", is_flags),
    "scaler.scale": ("a number above 0", lambda value: is_size(value) and value > 0),
    "scaler._growth_tracker": ("a number of steps", is_count),
    "controller": ("a dict", is_flags),
}
RESUMABLE = {"optimizers", "scaler", "train", "step", "best_val_loss", "elapsed_s", "run_id", "last_eval",
             "meta"}


def parts(value, place):
    """Yield (name, part) of what stands at a place of FORM in nested dicts and lists; None: it is missing."""
    key, _, rest = place.partition(".")
    each = value.items() if isinstance(value, dict) else enumerate(value)
    for name, part in each if key == "*" else [(key, value.get(key))]:
        if not rest:
            yield name, part
        elif part:
            for inner, found in parts(part, rest):
                yield f"{name}.{inner}", found


def check_form(state, path):
    """UserError, naming the part and its value, where a read checkpoint is not as FORM says."""
    def refuse(name, value, what):
        value = " ".join(reprlib.repr(value).split())
        raise UserError(f"{path} is damaged, or no checkpoint of this program: {name}={value} must be {what}")

    for place, (what, holds) in FORM.items():
        for name, part in parts(state, place) if place.partition(".")[0] in state else ():
            if not holds(part):
                refuse(name, part, what)
    if state.get("meta") is not None and (wrong := problem_of_meta(state["meta"], of_folder=False)):
        raise UserError(f"{path} is damaged, or no checkpoint of this program: meta, its dataset's: {wrong}")
    step, last = state.get("step"), (state.get("last_eval") or {}).get("step")
    most = (state.get("train") or {}).get("max_iters")
    if None not in (step, most) and not (is_count(most) and step <= most):
        refuse("step", step, f"at most max_iters={reprlib.repr(most)}")
    if None not in (step, last) and last not in range(-1, step + 1):
        refuse("last_eval.step", last, f"from -1 to step={step}")


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
    checkpoint's folder is run, and a line says so. Raises UserError.
    """
    if not file_of(path).is_file():  # no file of ours: a folder of transformers', or a name on the hub
        what = f"no checkpoint {file_of(path)}; a folder or a name of Hugging Face's"
        hf = from_lab("lab.hub.huggingface", what)
        if hf.is_folder(path):
            return hf.read(path, trust_code)
        if hf.is_name(path) and not Path(path).exists():
            return hf.read(hf.fetch(path))
    path = file_of(path)
    if not path.is_file():
        raise UserError(f"no checkpoint {path}")
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
    state = state if is_flags(state) else {}
    if is_flags(state.get("model")) and isinstance(state.get("model_args"), dict):
        state = from_nanogpt(state)
    if None in (state.get("model"), state.get("config")) or "meta" not in state:
        raise UserError(f"{path} is a torch file, but neither nanoHeads' nor nanoGPT's checkpoint")
    check_form(state, path)
    if trust_code:
        from nanoheads import own_mechanism
        own_mechanism.trust(state, path)
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
            place = layer if head is None else f"{layer}.{head}"
            raise UserError(f"{path}: --set {key}.{place}={value}: {e}")
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
        if isinstance(m, Agency) and not {*m.state.flatten().tolist()} <= {*range(len(Agency.STATES))}:
            raise ValueError(f"{name}.state={m.state.tolist()} must be from 0 to {len(Agency.STATES) - 1}")
    for name, p in model.named_parameters():
        if not is_finite(p):
            raise UserError(f"{path}: {name} holds NaN or infinities: its weights are damaged, or its "
                            "training diverged")
    return loaded


def add_arguments(parser, required=True):
    """The arguments of every program that reads checkpoints."""
    from nanoheads import own_mechanism
    parser.add_argument("--ckpt", action="append", required=required, default=[],
                        help="a checkpoint or a run folder (its best.pt); may be repeated"
                             + ("" if required else "; default: the newest run"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                        help="change a flag that no weight depends on, as in unet_skips=False, or a head by "
                             "layer and number: gate.0.3=0, state.0.3=withdrawn, consent.0.3=False; with "
                             "agency_scope an MLP or block by its layer: state.0=withdrawn; may be repeated")
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
# keys that say what one command does, and nothing of the run
OF_A_COMMAND = set("own_mechanism out_dir resume overwrite eval_only init_anyway json".split())
# keys that change nothing of what is trained: they make no other run
NO_OTHER_RUN = set("""
    device dtype compile compile_mode patience eval_interval eval_tokens save_interval log_interval
    loss_chunks checkpoint_activations tensorboard wandb_log wandb_project wandb_run_name wandb_mode
    wandb_tags
""".split())


def asked_for(model_config, config):
    """{key: value} of what was set for a run, as config.json holds it: a GPTConfig and a TrainConfig.

    No defaults, and no keys OF_A_COMMAND; of mechanisms in files of one's own the texts. The configs are as
    the command line made them: nothing in them follows from a checkpoint yet.
    """
    defaults = {**GPTConfig().flags(), **asdict(type(config)())}
    asked = {key: value for key, value in {**model_config.flags(), **asdict(config)}.items()
             if key not in OF_A_COMMAND and (key not in defaults or value != defaults[key])}
    if model_config.own:
        from nanoheads import own_mechanism
        if mine := own_mechanism.record(model_config):
            asked["own_mechanism"] = [f"{each['file']} {each['digest']}" for each in mine]
    return json.loads(json.dumps(json_safe(asked)))  # as it will be read


def asked_in(folder):
    """What was asked for in a run's folder, as asked_for(); None: its config.json does not say."""
    try:
        asked = from_json((Path(folder) / "config.json").read_bytes())["asked"]
        return asked if isinstance(asked, dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def identity(asked):
    """Those keys of asked_for() by which two runs are two, None of None."""
    return asked and {key: value for key, value in asked.items() if key not in NO_OTHER_RUN}


def default_folder(model_config, config):
    """(out_dir for a command that gives none, a line about it or None), from the name that config has.

    A run of other steps is another run, unless the command goes on with one or starts one over.
    """
    goes_on = config.resume or config.eval_only
    folder, line = find(Path(config.out_dir).name, identity(asked_for(model_config, config)), RUN_FILES,
                        lambda folder: identity(asked_in(folder)), goes_on=goes_on,
                        free={"max_iters"} if goes_on or config.overwrite else ())
    return str(folder), line


def left_open(command, trusted):
    """(where it comes from, {key: value}) of what a configurator.Command that goes on in a named folder need
    not repeat, or None.

    That is what the run there was asked for, of --resume all, of --eval_only what evaluating depends on.
    trusted: the code of a mechanism of one's own that lies there may run. UserError: it is needed, and may
    not.
    """
    given = command.values("out_dir", "resume", "init_from", "eval_only")
    folder, resumes = given.get("out_dir"), given.get("resume") or given.get("init_from") == "resume"
    evaluates = given.get("eval_only") and not given.get("init_from")
    if not (folder and (evaluates or resumes and Path(folder, "ckpt.pt").is_file())):
        return None
    path, asked = Path(folder, "config.json"), asked_in(folder)
    if asked is None:
        print_once(f"{path} does not say what the run was asked for: what this command leaves open has its "
                   "default")
        return None
    if "lr" in asked:
        raise UserError(of_an_older_version(path))
    if evaluates:
        asked = {key: asked[key] for key in ("dataset", "eval_tokens", "device", "dtype") if key in asked}
    if asked.pop("own_mechanism", None):
        from nanoheads import own_mechanism
        last = Path(folder, "ckpt.pt")
        own_mechanism.flags_of(read(last, trust_code=trusted), last)
    return str(path), asked


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
    return bool(own_mechanism.lacking(read(path), path))


def trust_what_it_starts_from(config):
    """Run the code of mechanisms that lies beside the checkpoints a run starts from, where they need some.

    config: the TrainConfig, which names these checkpoints; None: nothing is trusted. Raises UserError.
    """
    if config is None:
        return
    here = config.out_dir if config.resume or config.eval_only and not config.init_from else None
    teacher = None if is_function(config.teacher) else config.teacher
    for path in filter(None, (config.init_from, teacher, here)):
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
    longest = config_of(state, path).block_size
    same_vocabulary(state, dataset, path)
    flags = set(GPTConfig.defaults())
    if config.init_from or config.eval_only:
        # a model that comes from elsewhere needs no flags: only those that were given can be wrong
        flags &= set(given)
    # what may change: how it is trained; in a new run also dropout, data order, a shorter context
    free = {"checkpoint_activations", "loss_chunks"}
    free |= {"dropout", "attn_dropout", "seed"} if new_run else set()
    free |= {"unet_from", "unet_ramp"} if new_run and config.init_from else set()  # the new run's own
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
        missing, unknown = load_weights(model, state["model"], path, strict=False)
        if unknown or set(missing) & set(tensors(config_of(state, path))):
            raise ValueError(f"no weights for {', '.join([*unknown, *missing][:3])}")
    except UserError:
        raise
    except (ValueError, TypeError, RuntimeError) as e:
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


def is_function(teacher):
    """Whether a teacher is a file of Python with a function in it, and no checkpoint."""
    return teacher is not None and teacher.endswith(".py")


class Features:
    """A teacher that is a function in a file, features(ids [B, T]) -> [B, T, width]. Raises UserError."""

    def __init__(self, path, width):
        from nanoheads import own_mechanism  # only here: most runs have no such teacher
        if not Path(path).is_file():
            raise UserError(f"teacher={path}: there is no such file")
        self.path, self.width = path, width
        self.function = getattr(own_mechanism.run(own_mechanism.opened(path), "own_teacher"), "features",
                                None)
        if not callable(self.function):
            raise UserError(f"teacher={path}: it must have a function features(ids)")

    @torch.no_grad()
    def predictions(self, ids):
        """Its features of ids [B, T], [B, T, width], on their device. UserError: they are something else."""
        found, shape = self.function(ids), [*ids.shape, self.width]
        if not torch.is_tensor(found) or list(found.shape) != shape:
            what = list(found.shape) if torch.is_tensor(found) else type(found).__name__
            raise UserError(f"teacher={self.path}: features(ids) gives {what} for ids {list(ids.shape)}, and "
                            f"must give {shape}, constraint_features wide")
        return found.to(ids.device)


def teacher_of(config, model, device):
    """What `teacher` names: a model in eval mode, or Features; None: nothing. UserError: it does not fit."""
    if not config.teacher:
        return None
    c = model.config
    if not c.constraint_match:  # one that comes from a checkpoint, where no flag was asked
        raise UserError(f"teacher={config.teacher} has nothing to compare: the model of {config.init_from} "
                        "was made without constraint_match")
    if is_function(config.teacher) != bool(c.constraint_features):
        raise UserError(f"teacher={config.teacher} cannot be compared: the model of {config.init_from} was "
                        f"made with constraint_features={c.constraint_features}")
    if is_function(config.teacher):
        return Features(config.teacher, c.constraint_features)
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
    if lacks := sorted(key for key in RESUMABLE if state.get(key) is None):
        raise UserError(f"{path} holds no state to go on from (no {', '.join(lacks)}); {instead}")
    fixed = []
    for each in (trained_with(state["train"], path), config):
        batch = each.batch_size * each.grad_accum
        fixed.append({"optimizer": each.optimizer, "batch_size * grad_accum": batch})
    old, new = fixed
    differ = [f"{key}={new[key]!r} here is {old[key]!r} there" for key in old if new[key] != old[key]]
    if digests_of(state["meta"]) != dataset.digests:
        differ.append(f"{dataset.dir} holds other data than {state['meta']['name']} did")
    if differ:
        raise UserError(f"{path} cannot go on like this: {'; '.join(differ)}; {instead}")


def restore(optimizer, saved, path, steps, trained=()):
    """Load an optimizer's moments; rates, betas and decay stay those of the config. Raises UserError.

    steps: how many the run has made. trained: {parameter: name} of those that must have moments.
    """
    fresh = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(saved)
        for p, group in ((p, group) for group in optimizer.param_groups for p in group["params"]):
            if p in optimizer.state:
                check_moments(optimizer.state[p], optimizer.moments(p, group), steps)
            elif p in trained:
                raise ValueError(f"{trained[p]} was trained and has no moments")
        if unknown := [key for key in optimizer.state if not torch.is_tensor(key)]:
            raise ValueError(f"no parameter has the number {unknown[0]!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as e:
        why = " ".join(str(e).split())[:120]
        raise UserError(f"{path}: its optimizer state does not fit this config ({why})")
    for group, values in zip(optimizer.param_groups, fresh):
        group.update(values)


def check_moments(moments, shapes, steps):
    """ValueError where a parameter's moments are not finite tensors of these shapes; others are dropped."""
    for key, shape in shapes.items():
        if key not in moments or moments[key].shape != shape:
            found = f"shape {list(moments[key].shape)}" if key in moments else "none"
            raise ValueError(f"{key} must have the shape {list(shape)}, and there is {found}")
        if not is_finite(moments[key]):
            raise ValueError(f"{key} holds NaN or infinities")
        if "sq" in key and (moments[key] < 0).any():
            raise ValueError(f"{key}, a mean of squares, holds numbers below 0")
    if "step" in shapes and not 0 < moments["step"] <= steps:
        raise ValueError(f"moments of {moments['step'].item():g} steps in a run of {steps:,}")
    for key in moments.keys() - shapes:
        del moments[key]


def last_save(out_dir):
    """Half a sentence about what can be done after a failure."""
    path = Path(out_dir) / "ckpt.pt"
    if path.is_file():
        return f"the last save is {path}, --resume goes on from it"
    return "nothing was saved yet: start again"
