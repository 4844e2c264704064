"""
What a run starts from: its folder, its model, and the state that it goes on with.

train.py asks, in this order:
    left_open()         of --resume --out_dir=X, what X/config.json says of keys that the command leaves open
    default_folder()    without --out_dir, out/<name>, or with a number behind it where another run has that
    saves_in()          which checkpoints are in the folder, and may they stay, be gone on with, or go?
    starting_point()    the model: that of X/ckpt.pt, which must be the same run, of --init_from, or a new one
    restore()           the moments of each optimizer of a run that goes on
What is in a checkpoint, and how it is read, is in checkpoint.py; the step's number, the losses and the log
are set by train.py.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch

from model import GPT, MECHANISM_CLASSES, GPTConfig
from nanoheads import checkpoint
from nanoheads.common import UserError, from_json, json_safe, of_an_older_version
from nanoheads.config import trained_with
from nanoheads.configurator import print_once
from nanoheads.dataset import digests_of
from nanoheads.files import find
from nanoheads.tasks import of_training


# ---- its folder ----

RUN_FILES = ("config.json", "ckpt.pt", "best.pt")  # of which a folder that holds a run has one
# keys that say what one command does, and nothing of the run
OF_A_COMMAND = set("own_mechanism out_dir resume overwrite eval_only init_anyway json profile".split())
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
        asked = {key: value for key, value in asked.items()
                 if key in ("dataset", "eval_tokens", "device", "dtype") or key.startswith("task")}
    if asked.pop("own_mechanism", None):
        from nanoheads import own_mechanism
        last = Path(folder, "ckpt.pt")
        own_mechanism.flags_of(checkpoint.read(last, trust_code=trusted), last)
    return str(path), asked


# ---- its model, and the state that it goes on with ----

def saves_in(config):
    """Names of the checkpoints in out_dir. UserError unless the config says what becomes of them."""
    out_dir = Path(config.out_dir)
    names = [name for name in ("ckpt.pt", "best.pt") if (out_dir / name).is_file()]
    for key in ("init_from", "teacher") if config.overwrite else ():
        start = getattr(config, key) and checkpoint.file_of(getattr(config, key))
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


def trust_what_it_starts_from(config):
    """Run the code of mechanisms that lies beside the checkpoints a run starts from, where they need some.

    config: the TrainConfig, which names these checkpoints. Raises UserError.
    """
    from nanoheads.teacher import is_function
    teacher = None if is_function(config.teacher) else config.teacher
    for path in filter(None, (config.init_from, teacher)):
        checkpoint.read(path, trust_code=True)
    evaluates = config.eval_only and not config.init_from
    if (config.resume or evaluates) and checkpoint.file_of(config.out_dir).is_file():
        checkpoint.read(config.out_dir, trust_code=True)


def starting_point(model_config, config, dataset, device, given):
    """(model, the state to go on from or None) of a run; given: {flag: value} that were set for it.

    The model is out_dir/ckpt.pt, has another checkpoint's weights, or is new. Raises UserError when what
    there is does not fit what is asked for.
    """
    last = Path(config.out_dir) / "ckpt.pt"
    goes_on = config.resume and last.is_file() and not config.eval_only
    if goes_on:
        path = last
    elif config.init_from or config.eval_only:
        path = config.init_from or config.out_dir
    else:
        vocab_size = model_config.vocab_size or dataset.vocab_size
        return GPT(replace(model_config, vocab_size=vocab_size)).to(device), None
    state = checkpoint.read(path, device)
    old = checkpoint.config_of(state, path)
    checkpoint.same_vocabulary(state, dataset, path)

    # what may change: how it is trained; in a new run also dropout, data order, a shorter context, and what
    # the flags turn on
    free, turned_on, crop = {"checkpoint_activations", "loss_chunks"}, [], False
    if not goes_on:
        free |= {"dropout", "attn_dropout", "seed"}
        crop = "block_size" in given and model_config.block_size < old.block_size
    if config.init_from and not goes_on:
        free |= {"unet_from", "unet_ramp"}
        turned_on = [cls for cls in MECHANISM_CLASSES
                     if cls.flag in given and cls.is_on(model_config) and not cls.is_on(old)]

    # what must be the checkpoint's: all else, or of a model that comes from elsewhere what was given of it
    flags = set(GPTConfig.defaults())
    if config.init_from or config.eval_only:
        flags &= set(given)
    flags -= free | ({"block_size"} if crop else set()) | {key for cls in turned_on for key in cls.fields()}
    same_model(state, path, model_config, flags)

    overrides = {key: getattr(model_config, key) for key in free}
    if turned_on:
        from nanoheads import neutral  # only here: most runs turn nothing on over a checkpoint's weights
        model = neutral.extended(state, path, device, given, turned_on, config.init_anyway, overrides)
    else:
        model = checkpoint.build(state, path, device, **overrides)
    if crop:
        model.crop_block_size(model_config.block_size)
    if goes_on:
        same_run(state, path, config.for_recipe(model.config.recipe), dataset)
    return model, state if goes_on or config.eval_only else None


def same_model(state, path, config, flags):
    """Raise UserError, naming the flags, unless those of `config` among `flags` are the checkpoint's."""
    old, new = checkpoint.config_of(state, path).flags(), config.flags()
    new["vocab_size"] = new["vocab_size"] or old["vocab_size"]
    # a flag of a mechanism in a file of one's own that was not named is off here
    new.update((name, value) for name, value in GPTConfig.defaults().items() if name not in new)
    differ = [f"{k}={new[k]!r} here is {old[k]!r} there" for k in old if k in flags and new[k] != old[k]]
    if differ:
        raise UserError(f"{path} holds another model: {'; '.join(differ)}")


def same_run(state, path, config, dataset):
    """Raise UserError unless a run that goes on from `state` as configured is still the same run."""
    instead = f"to begin a new run with its weights: --init_from={path} and another --out_dir"
    if missing := sorted(name for name in checkpoint.TO_GO_ON if state.get(name) is None):
        raise UserError(f"{path} holds no state to go on from (no {', '.join(missing)}); {instead}")
    old, new = ({"optimizer": c.optimizer, "batch_size * grad_accum": c.batch_size * c.grad_accum}
                for c in (trained_with(state["train"], path), config))
    differ = [f"{key}={new[key]!r} here is {old[key]!r} there" for key in old if new[key] != old[key]]
    old, new = (of_training(meta) for meta in (state["meta"], dataset.meta))  # {} of a text
    differ += [f"{key}={new.get(key)!r} here is {old.get(key)!r} there" for key in {**old, **new}
               if new.get(key) != old.get(key)]
    if not new and digests_of(state["meta"]) != digests_of(dataset.meta):
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
            there = f"shape {list(moments[key].shape)}" if key in moments else "none"
            raise ValueError(f"{key} must have the shape {list(shape)}, and there is {there}")
        if not checkpoint.is_finite(moments[key]):
            raise ValueError(f"{key} holds NaN or infinities")
        if "sq" in key and (moments[key] < 0).any():
            raise ValueError(f"{key}, a mean of squares, holds numbers below 0")
    if "step" in shapes and not 0 < moments["step"] <= steps:
        raise ValueError(f"moments of {moments['step'].item():g} steps in a run of {steps:,}")
    for key in moments.keys() - shapes:
        del moments[key]
