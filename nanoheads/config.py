"""The settings of training (TrainConfig), and which settings do not go together."""

import os
from dataclasses import dataclass, fields, replace
from typing import Literal, Optional

from model import ALL_ON, MECHANISMS, GPTConfig
from nanoheads.common import UserError
from nanoheads.configurator import convert_fields
from nanoheads.dataset import Dataset
from nanoheads.extensions import EXTENSIONS
from nanoheads.mechanism import flag, no_dropout, range_problems
from nanoheads.optim import CUDA_GRAPHS, OPTIMIZERS, TUNED, added_parameters
from nanoheads.tasks import TaskConfig, TaskData


# (flag of a mechanism, its weight of a loss that is a mean over all tokens of a row, padding included)
MEANS_OVER_ROWS = (("routing", "routing_coef"), ("constraint_names", "constraint_sparsity_coef"),
                   ("constraint_names", "constraint_entropy_coef"))


@dataclass
class CoreTrainConfig(*dict.fromkeys(cls.Options for cls in OPTIMIZERS.values()), TaskConfig):
    """The keys of training that the core itself has; TrainConfig, below, has those of extensions too."""

    of_recipe = (*TUNED,)  # the keys that a scale sets for its own recipe alone

    out_dir: Optional[str] = flag(
        None, "the run's folder; None: out/<scale or file>-<mechanisms>, with a number behind it (-2, -3, "
              "...) if another run has that name",
        section="run")
    dataset: str = flag(
        "shakespeare_char", "the text to train on: the name of a folder under data/, or a path to one")
    labels: Optional[str] = flag(
        None, "the labels that constraint heads are trained on: a folder of <dataset>/labels")
    own_mechanism: Optional[str] = flag(
        None, "files with mechanisms of your own; --mechanism=mine.py sets it")
    teacher: Optional[str] = flag(
        None, "what constraint_match compares with: a checkpoint, or mine.py with a function features(ids "
              "[B, T]) -> [B, T, constraint_features]")
    resume: bool = flag(
        False, "go on from out_dir/ckpt.pt, if there is one; if out_dir is given, keys that the command "
               "leaves out are read from out_dir/config.json")
    overwrite: bool = flag(False, "start over in a folder that already holds a run")
    init_from: Optional[str] = flag(
        None, "start from the weights of this checkpoint: a run's, nanoGPT's, or a model's on Hugging Face, "
              "such as gpt2")
    init_anyway: bool = flag(
        False, "with init_from: also add mechanisms that change the model's outputs from the start")
    freeze_trunk: bool = flag(False, "with init_from: train only what mechanisms add")
    thaw_from: Optional[int] = flag(
        None, "with freeze_trunk: from this step on train all parameters; None: never", at_least=1)
    eval_only: bool = flag(False, "evaluate once, and stop")
    device: str = flag("auto", "auto: the first of cuda, mps and cpu that is there")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto", "auto: on cuda bfloat16, or float16 if the card has no bfloat16; else float32")
    compile: Optional[bool] = flag(None, "use torch.compile; None: on cuda, except on Windows")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = flag(
        "default", "the mode of torch.compile; the other two replay CUDA graphs, which saves time where "
                   "launching kernels takes longer than running them")

    batch_size: int = flag(
        12, "sequences in one forward pass", at_least=1,
        section="batch: a step takes batch_size * grad_accum sequences of block_size tokens, over all ranks")
    grad_accum: int = flag(
        1, "forward passes in one step: 1, or a multiple of the number of ranks. A mechanism's own losses "
           "(labels, a router's balance) are means over one forward pass, so they depend on this", at_least=1)
    max_iters: int = flag(2000, "training steps", at_least=1)
    documents: Optional[int] = flag(
        None, "each row is a document, not block_size tokens from anywhere; documents of fewer tokens than "
              "this are left out (docs/data.md)", at_least=1)
    documents_packed: Optional[Literal["whole", "cut"]] = flag(
        None, "with documents: fill each row with documents, none of which sees another. whole: a document "
              "that fits into a row is not cut; cut: there is no padding, and a document that does not fit "
              "goes on in another row; None: one document in a row, and padding")

    optimizer: Optional[Literal[tuple(OPTIMIZERS)]] = flag(
        None, "muon: Muon for the matrices of the blocks, AdamW for the rest; None: muon with recipe=modern, "
              "else adamw",
        section="optimizer: keys left at None follow from the optimizer")
    adamw_lr: Optional[float] = flag(
        None, "AdamW's peak learning rate, for all parameters that no other rate is for", above=0)
    min_lr: Optional[float] = flag(
        None, "the rate at which adamw_lr ends; all other rates fall by the same factor", at_least=0)
    embed_lr: Optional[float] = flag(
        None, "peak learning rate of the embeddings; None: adamw_lr, with muon 5 * adamw_lr", above=0)
    mechanism_lr: Optional[float] = flag(
        None, "peak learning rate of what mechanisms add, except matrices that Muon trains; None: adamw_lr",
        above=0)
    skip_lr: Optional[float] = flag(
        None, "peak learning rate of what U-Net skips add; None: mechanism_lr", above=0)
    beta1: float = flag(0.9, "AdamW's beta1", at_least=0, below=1)
    beta2: Optional[float] = flag(None, "AdamW's beta2", at_least=0, below=1)
    weight_decay: Optional[float] = flag(
        None, "weight decay of matrices; biases, norms and gates have none", at_least=0)
    grad_clip: Optional[float] = flag(None, "clip the norm of the gradient to this; 0: off", at_least=0)

    schedule: Optional[Literal["cosine", "trapezoid", "constant"]] = flag(
        None, "how the learning rates fall; trapezoid: constant at first, then in a straight line",
        section="schedule")
    warmup_iters: Optional[int] = flag(
        None, "steps of linear warm-up; if the schedule has no more steps than that, a tenth of it",
        at_least=0)
    decay_frac: float = flag(
        0.5, "trapezoid: the share of the steps, at the end, in which the rates fall", above=0, at_most=1)
    lr_decay_iters: Optional[int] = flag(
        None, "the step at which the rates reach their end; None: max_iters", at_least=1)

    eval_interval: int = flag(250, "steps between evaluations", at_least=1, section="evaluation and saving")
    eval_tokens: int = flag(
        131072, "tokens of train and of val that each evaluation scores, evenly spaced; 0: all of val, and "
                "as many of train", at_least=0)
    patience: Optional[int] = flag(
        None, "stop after this many evaluations in a row without a lower validation loss; None: train to "
              "max_iters", at_least=1)
    save_interval: Optional[int] = flag(
        None, "steps between saves of ckpt.pt; None: eval_interval", at_least=1)

    log_interval: int = flag(10, "steps between rows of log.jsonl", at_least=1, section="logging")
    profile: Optional[int] = flag(
        None, "record this many steps, after three others, with torch.profiler: out_dir/trace.json opens in "
              "chrome://tracing or ui.perfetto.dev, and the ten operators that took most of the time are "
              "printed. The run itself goes on as without it", at_least=1)
    json: Optional[str] = flag(None, "write the result to this file too, for a program to read")
    tensorboard: bool = flag(False, "also write files for TensorBoard, into out_dir/tensorboard")
    wandb_log: bool = flag(False, "also log to Weights & Biases")
    wandb_project: str = flag("nanoheads", "the project in Weights & Biases")
    wandb_run_name: Optional[str] = flag(None, "the run's name there; None: the name of out_dir")
    wandb_mode: Optional[Literal["online", "offline", "disabled"]] = flag(
        None, "offline: keep the run on this machine, for `wandb sync`; None: what the environment variable "
              "WANDB_MODE says, else online, or offline if there is no API key")
    wandb_tags: Optional[list[str]] = flag(None, "the run's tags")

    def __post_init__(self):
        if self.out_dir is None:
            self.out_dir = "out/gpt"  # start.configure() chooses a better name

    def for_recipe(self, recipe):
        """A copy in which every key has a value: what was None follows from recipe and optimizer."""
        c = replace(self, optimizer=self.optimizer or ("muon" if recipe == "modern" else "adamw"))
        chosen, end = OPTIMIZERS[c.optimizer], c.lr_decay_iters or c.max_iters
        values = chosen.values
        c.adamw_lr = values["adamw_lr"] if c.adamw_lr is None else c.adamw_lr
        values = {
            **values,
            "min_lr": min(values["min_lr"], c.adamw_lr),
            "warmup_iters": min(values["warmup_iters"], end // 10),
            "embed_lr": chosen.embed_factor * c.adamw_lr,
            "mechanism_lr": c.adamw_lr,
            "save_interval": c.eval_interval,
        }
        for key, value in values.items():
            if getattr(c, key) is None:
                setattr(c, key, value)
        if c.warmup_iters >= end:
            c.warmup_iters = end // 10
        return c

    def task_flags(self):
        """{key: value} of the flags of a task, see tasks.TaskConfig."""
        return {f.name: getattr(self, f.name) for f in fields(TaskConfig)}

    def problems(self):
        """Everything that is wrong with this config, as a list of sentences (empty: fine)."""
        bad = [*range_problems(self)]
        if None not in (self.adamw_lr, self.min_lr) and self.min_lr > self.adamw_lr:
            bad.append(f"adamw_lr={self.adamw_lr} is below min_lr={self.min_lr}, to which it falls: set both")
        if self.overwrite and self.resume:
            bad.append("overwrite=True must not be given with resume, which goes on with what it would "
                       "remove")
        if self.thaw_from is not None and self.thaw_from >= self.max_iters:
            bad.append(f"thaw_from={self.thaw_from} must be below max_iters={self.max_iters}; without it the "
                       "trunk stays frozen")
        for key, needed in (("init_anyway", "init_from"), ("freeze_trunk", "init_from"),
                            ("thaw_from", "freeze_trunk")):
            if getattr(self, key) and not getattr(self, needed):
                bad.append(f"{key}={getattr(self, key)!r} means nothing without {needed}")
        if self.profile and self.eval_only:
            bad.append(f"profile={self.profile} is of training steps, and eval_only makes none")
        if self.compile is False and self.compile_mode != "default":
            bad.append(f"compile_mode={self.compile_mode!r} means nothing with compile=False")
        if self.documents_packed and self.documents is None:
            bad.append(f"documents_packed={self.documents_packed!r} means nothing without documents, the "
                       "fewest tokens of one: 1 for all")
        if self.documents and not self.documents_packed and self.compile_mode in CUDA_GRAPHS:
            bad.append(f"compile_mode={self.compile_mode!r} replays CUDA graphs of one shape, and documents="
                       f"{self.documents} has rows of several widths")
        if self.documents and (self.labels or self.teacher):
            bad.append(f"documents={self.documents} has rows without labels or a teacher: leave those out")
        for key, value in self.task_flags().items():
            if value not in (None, TaskConfig.__dataclass_fields__[key].default) and not self.task:
                bad.append(f"{key}={value!r} means nothing without task")
        for key in ("documents", "labels"):
            if self.task and getattr(self, key):
                bad.append(f"{key}={getattr(self, key)!r} is of a text, and task={self.task!r} has none")
        return bad


@dataclass
class TrainConfig(*(extension.keys for extension in EXTENSIONS), CoreTrainConfig):
    """All keys of training. Those of an extension, see extensions.py, are the last in --help."""

    @property
    def acts_between_steps(self):
        """Whether an extension measures or changes the model between steps."""
        return any(extension.is_on(self) for extension in EXTENSIONS)


def trained_with(flags, path):
    """The TrainConfig that a read checkpoint's flags are, without those of another version. UserError."""
    try:
        config = TrainConfig(**convert_fields(flags, TrainConfig))
        for problem in range_problems(config):
            raise ValueError(problem)
    except ValueError as e:
        raise UserError(f"{path}: what it was trained with is impossible: {e}") from None
    return config


def data_of(config, block_size):
    """What a run is trained on: the rows of its task, or else its dataset. UserError."""
    return TaskData(config.task_flags(), block_size) if config.task else Dataset(config.dataset)


# ---- what does not go together ----

def check_configs(model_config, config):
    """UserError with a line for each thing that is wrong with one of the configs, or else with both together.
    """
    bad = [*model_config.problems(), *config.problems()]
    if config.init_from and any("means nothing while" in problem for problem in bad):
        bad.append("what a checkpoint of init_from has on it brings with all its flags: leave those out")
    refuse(bad)
    bad, world = config.for_recipe(model_config.recipe).problems(), int(os.environ.get("WORLD_SIZE", 1))
    sequences = config.batch_size * config.grad_accum
    if sequences % world or (config.grad_accum > 1 and config.grad_accum % world):
        bad.append(f"batch_size={config.batch_size} * grad_accum={config.grad_accum} sequences cannot be "
                   f"shared evenly by {world} ranks")
    if world > 1 and config.compile_mode in CUDA_GRAPHS and model_config.routing in ("moh", "sigmoid"):
        bad.append(f"compile_mode={config.compile_mode!r} replays CUDA graphs, in which routing="
                   f"{model_config.routing!r} cannot ask the other ranks for their load: use default")
    refuse(bad + training_problems(model_config, config))


def check_data(model_config, config, data):
    """UserError with a line for each reason why a new model cannot learn from its Dataset or TaskData."""
    bad = []
    if (model_config.vocab_size or data.vocab_size) < data.vocab_size:
        bad.append(f"vocab_size={model_config.vocab_size} is smaller than {data.meta['name']}'s "
                   f"{data.vocab_size:,}")
    if config.task and data.length > model_config.block_size:
        bad.append(f"task_length={data.length} must be at most block_size={model_config.block_size}")
    # of train and of val, in pieces of block_size
    for split, pieces in () if config.task else (("train", 2), ("val", 1)):
        try:
            data.need(split, pieces * model_config.block_size, model_config.block_size)
        except UserError as e:
            bad.append(str(e))
    refuse(bad)


def refuse(problems):
    """UserError of these sentences, if there are any."""
    if problems:
        raise UserError("\n".join(problems))


def training_problems(model_config, config):
    """What does not go together of a GPTConfig and a TrainConfig, extensions' keys too, as sentences."""
    checks = [*(extension.problems for extension in EXTENSIONS), constraint_conflicts, skip_conflicts]
    bad = [problem for check in checks for problem in check(model_config, config)]
    if model_config.agency_learned and not EXTENSIONS:
        bad.append("agency_learned predicts from what is measured of the heads between steps, which is work "
                   "of lab/heads: see docs/heads.md")
    return bad


def constraint_conflicts(model, training):
    """Yield what does not go together of the flags of constraint heads and their labels or teacher."""
    if not model.constraint_names:
        for key in ("labels", "teacher"):
            if getattr(training, key) and not training.init_from:  # a checkpoint may bring them
                yield f"{key}={getattr(training, key)!r} is for constraint heads: set constraint_names"
        return
    if bool(training.teacher) != bool(model.constraint_match):
        yield (f"teacher={training.teacher!r} and constraint_match={model.constraint_match!r} go together: "
               "the model to match, and what of it")
    elif training.teacher and training.teacher.endswith(".py") != bool(model.constraint_features):
        yield (f"teacher={training.teacher!r} and constraint_features={model.constraint_features} do not "
               "fit: a file mine.py with a function features(ids) goes with their width, a GPT with None")
    unused = []
    if not training.labels:
        unused += ["loss_layers", "name_coef", "positive_coef", "focal"]
    if not (training.labels or training.teacher):
        unused += ["warmup", "stop"]
    for key in (f"constraint_{name}" for name in unused):
        if getattr(model, key) != GPTConfig.defaults()[key]:
            yield f"{key}={getattr(model, key)!r} is of the loss on labels: set labels"


def skip_conflicts(model, training):
    """Yield what does not go together of the steps in which U-Net skips begin and the run's steps."""
    if not model.unet:
        return
    if model.unet_from >= training.max_iters:
        yield (f"unet_from={model.unet_from} must be below max_iters={training.max_iters}: skips never "
               "start")
    if not model.unet_skips and (model.unet_from or model.unet_ramp):
        yield (f"unet_from={model.unet_from}, unet_ramp={model.unet_ramp} mean nothing with "
               "unet_skips=False")


def check_model(model, config):
    """UserError where a model, new or from a checkpoint, cannot be trained as a TrainConfig says."""
    bad, c = [], model.config
    if config.skip_lr and not c.unet:
        bad.append(f"skip_lr={config.skip_lr:g} is of U-Net skips, and the model has none")
    if config.freeze_trunk and not trained_alone(model):
        bad.append("freeze_trunk=True leaves nothing to train: no mechanism of the model has a parameter "
                   "that acts")
    if config.documents:
        if 2 * config.documents > c.block_size and config.documents_packed != "cut":
            bad.append(f"documents={config.documents} must be at most half of block_size={c.block_size}, "
                       "since longer documents are cut into even parts")
        if config.documents_packed != "cut":  # there is no padding in these
            bad += [f"documents={config.documents}: {key}={getattr(c, key)} would count padding; set {key}=0"
                    for turned_on, key in MEANS_OVER_ROWS if getattr(c, turned_on) and getattr(c, key)]
    if config.documents_packed:
        bad += no_dropout(c, "documents_packed")
    refuse(bad)


def trained_alone(model):
    """Names of the parameters that freeze_trunk=True leaves to train."""
    c = model.config
    skips_are_off = c.unet and not c.unet_skips
    return {name for name in added_parameters(model) if not (skips_are_off and name.startswith("fuse."))}


# ---- the command line's `mechanism` ----

def flags_by_name():
    """{name: flags} that `mechanism` chooses from: model.MECHANISMS and all_on, with keys of extensions.

    A scale may have dropout, and some mechanisms have no kernel for it on the attention weights. Their names
    turn that off too, and the plain GPT to compare with is the one with --attn_dropout=0.
    """
    named = {**MECHANISMS, "all_on": ALL_ON}
    for name, flags in named.items():
        if GPTConfig(dropout=0.1, **flags).problems() and not GPTConfig(**flags).problems():
            named[name] = {**flags, "attn_dropout": 0.0}
        named[name] = with_extensions(named[name])
    return named


def with_extensions(flags):
    """A variant's flags, and the keys that extensions set with them."""
    flags = dict(flags)
    for extension in EXTENSIONS:
        for model_flag, keys in extension.set_with.items():
            if model_flag in flags:
                flags.update(keys)
    return flags


def note_on_warmup(config):
    """A line that says how a warm-up changes which is as long as the whole schedule; else None."""
    end = config.lr_decay_iters or config.max_iters
    if config.warmup_iters and config.warmup_iters >= end:
        first = f"rises in the first {end // 10:,} steps instead" if end >= 20 else "does not rise first"
        return (f"warmup_iters={config.warmup_iters} is longer than the schedule of {end:,} steps: the rate "
                f"{first}")


def note_on_dropout(model_config):
    """A line that says what to compare with, where a mechanism turned dropout on the attention weights off;
    else None.
    """
    if model_config.attn_dropout == 0 and replace(model_config, attn_dropout=None).problems():
        return ("no dropout on the attention weights, for which there is no fused kernel here: "
                "the plain GPT to compare with is the one with --attn_dropout=0")
