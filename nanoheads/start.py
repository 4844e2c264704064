"""
What a run starts from: a new model, its own last save (--resume), or another checkpoint (--init_from).

train.py asks, in this order:
    configure()   how the run is configured: by its command, and where that goes on with a run by config.json
    join_run()    which rank this process is, and that no other run writes into the folder
    begin()       the Start: one value with all that is decided of the run, its data, and what it goes on with
    model_of()    the model of the Start
and makes a Run of them. What is in a checkpoint, and how it is read, is in checkpoint.py.
"""

import copy
import json
import os
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Optional

from model import GPT, MECHANISM_CLASSES, GPTConfig
from nanoheads import checkpoint
from nanoheads.common import UserError, is_there, json_safe, old_version_message, plural, writable
from nanoheads.config import (TrainConfig, check_configs, check_data, check_model, data_of, flags_by_name,
                              note_on_dropout, note_on_warmup, trained_with)
from nanoheads.configurator import build_configs, print_once
from nanoheads.dataset import Dataset, digests_of
from nanoheads.extensions import EXTENSIONS
from nanoheads.files import choose_folder, folders_named, only_writer
from nanoheads.mechanism import flags_of
from nanoheads.optim import MAIN_RATE, SCHEDULE, check_compile, check_precision, precision, rates_at
from nanoheads.ranks import Process, join_ranks
from nanoheads.tasks import TaskData, training_flags


# ---- the configuration ----

def configure(command):
    """(GPTConfig, TrainConfig, {key: value} of what was set) of a configurator.Command. Prints notes on the
    configs. UserError: one of them is invalid, or they do not go together.
    """
    # what --resume --out_dir=X leaves open is as X/config.json says
    base = settings_to_resume(command)
    (model_config, config), set_values = build_configs(command, flags_by_name(), base=base)
    check_configs(model_config, config)
    # the file of a scale names a text, too; a user who names one beside a task expects it to be read
    if config.task and (text_keys := {"dataset", "eval_tokens"} & {*command.arguments}):
        key = min(text_keys)
        raise UserError(f"{key}={set_values[key]} is of a text, and task={config.task} has none")
    notes = [note_on_dropout(model_config), note_on_warmup(config)]
    # all ranks find the same name, since no rank makes the folder before all of them have looked
    if set_values.get("out_dir") is None:
        config.out_dir, line = default_folder(model_config, config)
        notes.append(line)
    for note in filter(None, notes):
        print_once(note)
    if config.json:
        writable(config.json)
    return model_config, config, set_values


# ---- its folder, and the settings of the run there ----

RUN_FILES = ("config.json", "ckpt.pt", "best.pt")  # of which a folder that holds a run has one
# keys that say what one command does, and nothing of the run
COMMAND_KEYS = set("own_mechanism out_dir resume overwrite eval_only init_anyway json profile".split())
# keys that change nothing of what is trained: they make no other run
SAME_RUN_KEYS = set("""
    device dtype compile compile_mode patience eval_interval eval_tokens save_interval log_interval
    loss_chunks checkpoint_activations tensorboard wandb_log wandb_project wandb_run_name wandb_mode
    wandb_tags
""".split())


def settings_of(model_config, config):
    """{key: value} of what was set for a run, as config.json holds it: a GPTConfig and a TrainConfig.

    No defaults, and no COMMAND_KEYS; of mechanisms in files of one's own the texts. The configs are as
    the command line made them: nothing in them follows from a checkpoint yet.
    """
    defaults = {**GPTConfig().flags(), **asdict(type(config)())}
    settings = {key: value for key, value in {**model_config.flags(), **asdict(config)}.items()
                if key not in COMMAND_KEYS and (key not in defaults or value != defaults[key])}
    if model_config.own:
        from nanoheads import own_mechanism
        if records := own_mechanism.record(model_config):
            settings["own_mechanism"] = [own_mechanism.record_text(record) for record in records]
    return json.loads(json.dumps(json_safe(settings)))  # as it will be read


def settings_in(folder):
    """The settings of the run in a folder, as settings_of(); None: its config.json does not say."""
    try:
        settings = json.loads((Path(folder) / "config.json").read_bytes())["asked"]
        return settings if isinstance(settings, dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def identity_of(settings):
    """The settings that tell two runs apart, out of settings_of(); None of None."""
    return settings and {key: value for key, value in settings.items() if key not in SAME_RUN_KEYS}


def default_folder(model_config, config):
    """(out_dir of a command that names none, a line about it or None); the config has its name.

    A run with another max_iters is another run, unless the command goes on with a run or starts it over.
    """
    goes_on, name = config.resume or config.eval_only, Path(config.out_dir).name
    folder_settings = {folder: identity_of(settings_in(folder)) for folder in folders_named(name, RUN_FILES)}
    free_keys = {"max_iters"} if goes_on or config.overwrite else ()
    folder, line = choose_folder(name, identity_of(settings_of(model_config, config)), folder_settings,
                                 goes_on, free_keys)
    return str(folder), line


def settings_to_resume(command):
    """(config.json, {key: value}) of a run that a configurator.Command goes on with, in a folder that it
    names: the settings that it need not repeat. None: it goes on with none.

    With --resume these are all settings, with --eval_only those that an evaluation depends on. UserError: it
    needs the code of a mechanism of one's own that was not named.
    """
    values = command.values()
    folder, resumes = values.get("out_dir"), values.get("resume") or values.get("init_from") == "resume"
    evaluates = values.get("eval_only") and not values.get("init_from")
    if not (folder and (evaluates or resumes)):
        return None
    path, settings = Path(folder, "config.json"), settings_in(folder)
    if settings is None and not is_there(Path(folder, "ckpt.pt")):
        said = {key for key, value in values.items() if (key, value) != ("init_from", "resume")}
        said -= COMMAND_KEYS | SAME_RUN_KEYS | {"max_iters"}  # a larger one goes on with a run
        if not (evaluates or said or Path(folder, "best.pt").is_file()):
            raise UserError(f"{folder} holds no run to go on with, neither config.json nor ckpt.pt, and this "
                            "command does not say what to train: repeat the one that began the run")
        return None  # there is no run yet, as checkpoint_of() says
    if settings is None:
        print_once(f"{path} does not say what the run was asked for: what this command leaves open has its "
                   "default")
        return None
    if "lr" in settings:
        raise UserError(old_version_message(path))
    if evaluates:
        settings = {key: value for key, value in settings.items()
                    if key in ("dataset", "eval_tokens", "device", "dtype") or key.startswith("task")}
    if files := settings.pop("own_mechanism", None):
        from nanoheads import own_mechanism
        records = [own_mechanism.record_from_text(words) for words in files]
        own_mechanism.flags_of(dict(config={}, own_mechanism=records), path)
    if unknown := sorted(settings.keys() - command.keys.keys()):
        raise UserError(f"{path}: the run was configured with {', '.join(unknown)}, which is no key here: a "
                        "folder beside nanoheads/ may be missing, or the run is of another version")
    return str(path), settings


# ---- what a run starts from ----

@dataclass(frozen=True)
class Start:
    """What a run starts from: see begin(). model_of() builds its model."""

    process: Process
    config: TrainConfig     # every key has its value
    dataset: Dataset | TaskData
    settings: dict          # what was set for the run, as config.json holds it: settings_of()
    progress: dict          # how far it is: {name of checkpoint.PROGRESS: value}; {}: it is new
    model_config: GPTConfig  # of the model, but for what new_mechanisms set
    path: Optional[Path]    # of the checkpoint that the model comes from; None: its weights are new
    state: dict             # that checkpoint as it was read
    goes_on: bool           # with its optimizers and data, too: it is the run's own
    new_mechanisms: dict    # {class: {flag: value}} of mechanisms that the checkpoint's model has not


@contextmanager
def join_run(config):
    """Yield the Process of this rank; until the end no other run writes into out_dir. UserError: one does."""
    process, problem = join_ranks(config.device), None
    check_compile(config, process.kind)
    check_precision(precision(config.dtype, process.kind)[0], process.device)
    with ExitStack() as exit_stack:
        if process.rank == 0 and not config.eval_only:  # which writes nothing
            try:
                exit_stack.enter_context(only_writer(config.out_dir))
            except (UserError, OSError) as e:
                problem = e
        # all ranks stop here together; and no rank reads what another process may still write
        if process.all_reduce_sum([float(problem is not None)])[0]:
            raise problem or UserError(f"the first rank cannot write into {config.out_dir}")
        yield process


def begin(model_config, config, set_flags, process):
    """The Start of a run, as it is configured.

    set_flags: {flag: value} of the flags that were set. A model from another checkpoint must agree with them;
    other flags it brings itself. UserError where the folder, the checkpoint or the data are not what is
    asked for.
    """
    check_folder(config)
    settings = settings_of(model_config, config)
    model_config = new_model_config(model_config, config)
    path, goes_on = checkpoint_of(config)
    state, new_mechanisms = checkpoint.read(path, process.device) if path else {}, {}
    if goes_on:
        check_extensions(state, path)
    if path:
        old_config = checkpoint.config_of(state, path)
        model_config, new_mechanisms = adapt_config(old_config, path, model_config, config, set_flags,
                                                    goes_on)
    dataset = data_of(config, model_config.block_size)
    if path:
        checkpoint.check_vocabulary(state, dataset, path)
    else:
        check_data(model_config, config, dataset)
        model_config = replace(model_config, vocab_size=model_config.vocab_size or dataset.vocab_size)
    config = config.for_recipe(model_config.recipe)
    if goes_on:
        old_values = asdict(trained_with(state.get("train") or {}, path).for_recipe(model_config.recipe))
        check_same_run(state, path, config, dataset, old_values)
        print_changes(config, old_values, state["step"])
    progress = {key: state[key] for key in checkpoint.PROGRESS if state.get(key) is not None}
    return Start(process, config, dataset, settings, progress if goes_on or config.eval_only else {},
                 model_config, path, state, goes_on, new_mechanisms)


# ---- its checkpoint ----

def check_folder(config):
    """UserError where out_dir holds checkpoints, and the config does not say what becomes of them."""
    out_dir = Path(config.out_dir)
    names = [name for name in ("ckpt.pt", "best.pt") if os.path.lexists(out_dir / name)]
    for key in ("init_from", "teacher") if config.overwrite else ():
        start = getattr(config, key) and checkpoint.file_of(getattr(config, key))
        if start and start.is_file() and start.resolve().parent == out_dir.resolve():
            raise UserError(f"--overwrite removes the checkpoints of {out_dir}, and {key} names one of them: "
                            "choose another --out_dir")
    resumes = config.resume and "ckpt.pt" in names
    if names and not (config.eval_only or config.overwrite or resumes):
        advice = f"take its weights with --init_from={out_dir / 'best.pt'}"
        next_step = "go on with --resume" if "ckpt.pt" in names else advice
        raise UserError(f"{out_dir} already holds a run; {next_step}, start over with --overwrite, "
                        "or choose another --out_dir")


def checkpoint_of(config):
    """(the path of the checkpoint that a run's model comes from, whether the run goes on from it); (None,
    False): the model is new.
    """
    path = Path(config.out_dir) / "ckpt.pt"
    if config.resume and not config.eval_only:
        if is_there(path):
            return path, True
        if not config.init_from:
            print_once(f"{path} is not there yet: the run starts anew")
    if config.init_from or config.eval_only:
        return config.init_from or config.out_dir, False
    return None, False


def check_extensions(state, path):
    """UserError where a read checkpoint goes on with the state of an extension that is not here."""
    missing = state.keys() - checkpoint.CORE_KEYS - {extension.name for extension in EXTENSIONS}
    if missing:
        raise UserError(f"{path} holds the state of {', '.join(sorted(missing))}, which belongs to a folder "
                        "that is not there beside nanoheads/: bring it back, or begin a new run with its "
                        f"weights: --init_from={path} and another --out_dir")


# ---- its model ----


def new_model_config(model_config, config):
    """The GPTConfig with which extensions have a new model begin."""
    for extension in EXTENSIONS:
        model_config = extension.new_model(model_config, config)
    return model_config


def adapt_config(old_config, path, model_config, config, set_flags, goes_on):
    """(the GPTConfig of a checkpoint with what a run may change of it, {class: {flag: value}} of the
    mechanisms that the flags turn on over its weights). UserError: the run would change more.
    """
    # what may change: how a model is trained, and in a new run also dropout, the data's order, a shorter
    # context and, over weights that are started from, how skips begin and what the flags turn on
    may_change, new_mechanisms = {"checkpoint_activations", "loss_chunks"}, {}
    if not goes_on:
        may_change |= {"dropout", "attn_dropout", "seed"}
        if "block_size" in set_flags and model_config.block_size < old_config.block_size:
            may_change.add("block_size")
    if config.init_from and not goes_on:
        may_change |= {"unet_from", "unet_ramp"}
        new_mechanisms = {cls: {key: set_flags[key] for key in flags_of(cls) if key in set_flags}
                          for cls in MECHANISM_CLASSES
                          if cls.flag in set_flags and cls.is_on(model_config) and not cls.is_on(old_config)}

    # what must not: any flag of a run that goes on; of another checkpoint what is set, since it says the rest
    must_agree = set(GPTConfig.defaults()) if goes_on and not config.init_from else set(set_flags)
    if goes_on and config.acts_between_steps:  # heads may have come and gone
        must_agree.discard("head_ids")
    must_agree -= may_change | {key for cls in new_mechanisms for key in flags_of(cls)}
    check_same_model(old_config, path, model_config, must_agree)
    return replace(old_config, **{key: getattr(model_config, key) for key in may_change}), new_mechanisms


def check_same_model(old_config, path, config, must_agree):
    """UserError, which names the flags, unless a config and that of a checkpoint agree in these."""
    differences = []
    for key in GPTConfig.defaults():
        value, old_value = getattr(config, key), getattr(old_config, key)
        if key == "vocab_size" and value is None:
            continue  # that is the checkpoint's, or the data's
        if key in must_agree and value != old_value:
            differences.append(f"{key}={value!r} here is {old_value!r} there")
    if differences:
        raise UserError(f"{path} holds another model: {'; '.join(differences)}")


def model_of(start):
    """The GPT of a Start, on its device. UserError where a checkpoint's weights do not fit its flags, or the
    model has no use for what is asked of its training.
    """
    config, path, device = start.config, start.path, start.process.device
    if path is None:
        model = GPT(start.model_config).to(device)
    else:
        flags = {key: value for key, value in start.model_config.flags().items() if key != "block_size"}
        if start.new_mechanisms:
            from nanoheads import neutral  # only here: most runs turn nothing on over a checkpoint's weights
            model = neutral.extended(start.state, path, device, start.new_mechanisms,
                                     config.init_anyway, flags)
        else:
            model = checkpoint.build(start.state, path, device, **flags)
        if start.model_config.block_size < model.config.block_size:
            model.crop_block_size(start.model_config.block_size)
    model.at_step(max(0, start.progress.get("step", 0) - 1))  # an evaluation sees it as its last step left it
    check_model(model, config)
    return model


# ---- the run that goes on ----

def check_same_run(state, path, config, dataset, old_values):
    """UserError unless a run that goes on from a read checkpoint as configured is still the same run.

    old_values: {key: value} of its training at that save.
    """
    advice = f"to begin a new run with its weights: --init_from={path} and another --out_dir"
    if missing := sorted(name for name in checkpoint.RESUME_KEYS if state.get(name) is None):
        raise UserError(f"{path} holds no state to go on from (no {', '.join(missing)}); {advice}")
    old, new = ({"optimizer": c["optimizer"], "batch_size * grad_accum": c["batch_size"] * c["grad_accum"]}
                for c in (old_values, asdict(config)))
    differences = [f"{key}={new[key]!r} here is {old[key]!r} there" for key in old if new[key] != old[key]]
    old, new = (training_flags(meta) for meta in (state["meta"], dataset.meta))  # {} of a text
    differences += [f"{key}={new.get(key)!r} here is {old.get(key)!r} there" for key in {**old, **new}
                    if new.get(key) != old.get(key)]
    if not new and digests_of(state["meta"]) != digests_of(dataset.meta):
        differences.append(f"{dataset.dir} holds other data than {state['meta']['name']} did")
    if differences:
        raise UserError(f"{path} cannot go on like this: {'; '.join(differences)}; {advice}")


def print_changes(config, old_values, step):
    """Print a line for each key of training that has changed since the last save.

    old_values: {key: value} at that save.
    """
    launch_keys = {"resume", "overwrite", "init_from", "init_anyway", "json", "own_mechanism", "profile"}
    for key in sorted(set(asdict(config)) - launch_keys):
        if getattr(config, key) != old_values[key]:
            print_once(f"changed since the last save: {key}={getattr(config, key)}, was {old_values[key]}")

    # and where the learning rate goes on higher than that schedule would have
    old_config = replace(config, **{key: old_values[key] for key in SCHEDULE})
    rate, old_rate = (rates_at(c, step)[MAIN_RATE] for c in (config, old_config))
    last_rate = rates_at(old_config, step - 1)[MAIN_RATE]
    if rate > max(old_rate, last_rate) * (1 + 1e-9):
        end, old_end = (c.lr_decay_iters or c.max_iters for c in (config, old_config))
        was_down = step >= old_end and not config.lr_decay_iters
        low = f"; --lr_decay_iters={old_end} keeps it low" if was_down else ""
        print_once(f"the learning rate rises: it ended at {last_rate:.2e} and goes on with {rate:.2e}, by "
                   f"the schedule of {plural(end, 'step')}{low}")


# ---- what is tried of a model before it is trained ----

def try_mechanisms(model, config):
    """UserError where a mechanism that no test of ours has tried gives a layer what it cannot go on with, or
    loses the values that it starts from, looks ahead or mixes rows; a line where it differs with a cache.
    """
    from nanoheads import causality, class_checks, own_mechanism, promises  # only here: few models do
    classes = causality.untried_classes(model.config)
    for cls in classes:  # a file of one's own was asked this when it was added
        problems = () if cls in own_mechanism.FILES else class_checks.problems_of_models(cls)
        for problem in problems:
            raise UserError(f"{cls.__name__}: {problem}")
    if classes:
        # inside FlexAttention's kernel, or in a compiled step, it would be found later and without its line
        class_checks.try_hooks(copy.deepcopy(model).cpu(), classes)
        causality.refuse(causality.with_noise(model), config, "before training", step=0)
        if note := promises.note_on_cache(model.config, classes):
            print_once(note)
