"""
Train a GPT, with any mechanism that its flags turn on.

    python train.py config/x.py [--key=value ...]         # one process: cuda, mps or cpu, whichever is there
    python train.py --scale=tiny --mechanism=moh,agency   # the plain GPT of a scale, with mechanisms by name
    python train.py config/x.py --resume                  # go on exactly where the last save was
    python train.py --init_from=out/x --dataset=y         # fine-tune: a checkpoint's model, a fresh optimizer
    torchrun --standalone --nproc_per_node=8 train.py config/x.py   # data parallel, the same global batch

A run is a folder (out_dir): config.json, log.jsonl, ckpt.pt (last), best.pt (lowest validation loss).
`python train.py --help` lists every key.
"""

import math
import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, Optional

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm
from tqdm import tqdm

from model import ALL_ON, GPT, MECHANISMS, GPTConfig, SkipFusion
from nanoheads import configurator
from nanoheads.common import UserError, explain
from nanoheads.heads import controller
from nanoheads.heads.controller import Controller
from nanoheads.text.dataset import Batches, Dataset, DocumentBatches
from nanoheads.text.targets import Targets
from nanoheads.training import checkpoint
from nanoheads.training.checkpoint import last_save
from nanoheads.training.config import ControllerConfig, controller_conflicts
from nanoheads.training.optim import CUDA_GRAPHS, Trainer, compiles, lr_multiplier, precision
from nanoheads.training.ranks import Process, StopSignal, join_ranks
from nanoheads.training.runlog import Log, write_config
from nanoheads.training.scoring import bits, score

# What an optimizer means for keys left at None. Muon's were tuned on Shakespeare's characters (docs/log.md).
OPTIMIZERS = {
    "adamw": dict(lr=1e-3, min_lr=1e-4, beta2=0.95, weight_decay=0.1, grad_clip=1.0, schedule="cosine",
                  warmup_iters=100),
    "muon": dict(lr=4e-3, min_lr=0.0, beta2=0.95, weight_decay=0.0, grad_clip=0.0, schedule="trapezoid",
                 warmup_iters=0),
}


@dataclass
class TrainConfig(ControllerConfig):
    # ---- run ----
    out_dir: Optional[str] = None        # the run's folder; None: out/<scale or config file>-<mechanisms>
    dataset: str = "shakespeare_char"    # a folder under data/, or a path to one
    labels: Optional[str] = None         # what constraint heads are trained on: a folder of <dataset>/labels
    teacher: Optional[str] = None        # a checkpoint that constraint_match compares with
    resume: bool = False                 # go on from out_dir/ckpt.pt, if there is one
    overwrite: bool = False              # start over in a folder that already holds a run
    init_from: Optional[str] = None      # a checkpoint (ours or nanoGPT's) whose weights to start from
    init_anyway: bool = False            # also with mechanisms that have no neutral setting to start from
    freeze_trunk: bool = False           # init_from: train what mechanisms add, and nothing else
    thaw_from: Optional[int] = None      # freeze_trunk: the step from which all is trained; None: never
    eval_only: bool = False              # evaluate once and stop
    device: str = "auto"                 # auto: cuda, mps or cpu, whichever is there first
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
                                         # auto: bfloat16 (or float16) on cuda, else float32
    compile: Optional[bool] = None       # torch.compile; None: on cuda only
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
                                         # torch.compile's own; the latter two replay CUDA graphs, which pays
                                         # where a GPU computes faster than kernels are launched
    # ---- batch: batch_size * grad_accum sequences of block_size tokens each step, over all ranks ----
    batch_size: int = 12                 # sequences in one forward pass
    grad_accum: int = 1                  # forward passes in one step; a multiple of the number of ranks, or 1
    max_iters: int = 2000                # steps
    documents: Optional[int] = None      # rows are documents, each by itself, of so many tokens at least,
                                         # block_size at most; None: block_size tokens from anywhere
    # ---- optimizer: keys left at None follow from the optimizer ----
    optimizer: Optional[Literal["adamw", "muon"]] = None
                                         # muon: for the blocks' matrices, AdamW for the rest;
                                         # None: muon for recipe=modern, else adamw
    lr: Optional[float] = None           # peak learning rate of AdamW
    min_lr: Optional[float] = None       # where lr ends; every other rate falls by the same factor
    muon_lr: float = 0.02                # peak learning rate of Muon
    muon_momentum: float = 0.95          # momentum of Muon
    embed_lr: Optional[float] = None     # the embeddings' peak learning rate; None: lr, with muon 5 * lr
    mechanism_lr: Optional[float] = None  # of what a mechanism adds, Muon's matrices aside; None: lr
    skip_lr: Optional[float] = None      # of what U-Net skips add; None: mechanism_lr
    beta1: float = 0.9                   # AdamW
    beta2: Optional[float] = None        # AdamW
    weight_decay: Optional[float] = None  # of matrices; never of biases, norms and gates
    grad_clip: Optional[float] = None    # clip the gradient's norm; 0: off
    # ---- schedule ----
    schedule: Optional[Literal["cosine", "trapezoid"]] = None
                                         # trapezoid: stable, then a straight line down
    warmup_iters: Optional[int] = None   # linear warm-up, in steps
    decay_frac: float = 0.5              # trapezoid: the last part of the steps, in which the rate falls
    lr_decay_iters: Optional[int] = None  # the step at which the rate is down; None: max_iters
    # ---- evaluation and saving ----
    eval_interval: int = 250             # steps between evaluations
    eval_tokens: int = 131072            # tokens of train and of val to score each time, evenly spaced;
                                         # 0: all of val, as many of train
    save_interval: Optional[int] = None  # steps between saves of ckpt.pt; None: at each evaluation
    # ---- logging ----
    log_interval: int = 10               # steps between rows of log.jsonl
    wandb_log: bool = False              # also log to Weights & Biases
    wandb_project: str = "nanoheads"     # the project that the run is filed under
    wandb_run_name: Optional[str] = None  # None: the name of out_dir
    wandb_mode: Literal["online", "offline"] = "online"  # offline: kept here, for `wandb sync`
    wandb_tags: Optional[list[str]] = None  # words to find the run by

    def __post_init__(self):
        self.out_dir = self.out_dir or "out/gpt"  # the configurator knows better, from the names

    def for_recipe(self, recipe):
        """A copy in which every key has a value: what was None follows from recipe and optimizer."""
        c = replace(self, optimizer=self.optimizer or ("muon" if recipe == "modern" else "adamw"))
        values, end = OPTIMIZERS[c.optimizer], c.lr_decay_iters or c.max_iters
        c.lr = values["lr"] if c.lr is None else c.lr
        values = {
            **values,
            "min_lr": min(values["min_lr"], c.lr),
            "warmup_iters": min(values["warmup_iters"], end // 10),
            "embed_lr": 5 * c.lr if c.optimizer == "muon" else c.lr,
            "mechanism_lr": c.lr,
            "save_interval": c.eval_interval,
        }
        for key, value in values.items():
            if getattr(c, key) is None:
                setattr(c, key, value)
        return c

    def problems(self):
        """Everything that is wrong with this config, as a list of sentences (empty: fine)."""
        bad, end = [], self.lr_decay_iters or self.max_iters

        def rule(words, holds, *keys):
            for key in keys:
                value = getattr(self, key)
                if value is not None and not holds(value):
                    bad.append(f"{key}={value!r} must {words}")

        rule("be positive", lambda v: v > 0, "batch_size", "grad_accum", "max_iters", "eval_interval",
             "log_interval", "save_interval", "lr_decay_iters", "lr", "muon_lr", "embed_lr", "mechanism_lr",
             "skip_lr", "decay_frac", "documents", "thaw_from")
        rule("not be negative", lambda v: v >= 0, "eval_tokens", "warmup_iters", "weight_decay", "grad_clip",
             "min_lr", "beta1", "beta2", "muon_momentum")
        rule("be below 1", lambda v: v < 1, "beta1", "beta2", "muon_momentum")
        rule("be at most 1", lambda v: v <= 1, "decay_frac")
        if self.lr is not None:
            rule(f"not be above lr={self.lr}", lambda v: v <= self.lr, "min_lr")
        rule(f"be below the end of the schedule at step {end} (lower it too)", lambda v: v < max(1, end),
             "warmup_iters")
        rule("not be given with resume, which goes on with what it would remove",
             lambda v: not (v and self.resume), "overwrite")
        rule("be a checkpoint; to go on with a run there is --resume",
             lambda v: v not in ("scratch", "resume"), "init_from")
        rule(f"be below max_iters={self.max_iters}; without it the trunk stays frozen",
             lambda v: v < self.max_iters, "thaw_from")
        for key, needed in (("init_anyway", "init_from"), ("freeze_trunk", "init_from"),
                            ("thaw_from", "freeze_trunk")):
            if getattr(self, key) and not getattr(self, needed):
                bad.append(f"{key}={getattr(self, key)!r} means nothing without {needed}")
        if self.compile is False and self.compile_mode != "default":
            bad.append(f"compile_mode={self.compile_mode!r} means nothing with compile=False")
        if self.documents and self.compile_mode in CUDA_GRAPHS:
            bad.append(f"compile_mode={self.compile_mode!r} replays CUDA graphs of one shape, and documents="
                       f"{self.documents} has rows of several widths")
        if self.documents and (self.labels or self.teacher):
            bad.append(f"documents={self.documents} has rows without labels or a teacher: leave those out")
        if self.freeze_trunk and self.dynamic_heads:
            bad.append("freeze_trunk=True: heads are measured by gradients of the trunk, which has none")
        return bad


def conflicts(model_config, config):
    """What is wrong with both configs, the data and the number of ranks taken together, as sentences."""
    bad, world = [], int(os.environ.get("WORLD_SIZE", 1))
    sequences = config.batch_size * config.grad_accum
    if sequences % world or (config.grad_accum > 1 and config.grad_accum % world):
        bad.append(f"batch_size={config.batch_size} * grad_accum={config.grad_accum} sequences cannot be "
                   f"shared evenly by {world} ranks")
    if not config.problems():  # else what follows from a wrong value is no news
        bad += config.for_recipe(model_config.recipe).problems()
    if not (bad or config.problems() or model_config.problems()):
        bad += step_conflicts(model_config, config, world)
    if config.init_from and any("means nothing while" in problem for problem in model_config.problems()):
        bad.append("what a checkpoint of init_from has on it brings with all its flags: leave those out")
    if not model_config.problems():
        bad += controller_conflicts(model_config, config) + constraint_conflicts(model_config, config)
        bad += skip_conflicts(model_config, config)
    try:
        dataset = Dataset(config.dataset)
        if config.labels and model_config.constraint_names:
            Targets(dataset, config.labels, model_config.constraint_names)
    except UserError as e:
        return bad + [str(e)]
    if (model_config.vocab_size or dataset.vocab_size) < dataset.vocab_size:
        bad.append(f"vocab_size={model_config.vocab_size} is smaller than {dataset.meta['name']}'s "
                   f"{dataset.vocab_size:,}")
    # a checkpoint brings a block_size of its own
    if not (config.init_from or config.eval_only or model_config.block_size < 1):
        for split, pieces in (("train", 2), ("val", 1)):
            try:
                dataset.need(split, pieces * model_config.block_size, model_config.block_size)
            except UserError as e:
                bad.append(str(e))
    return bad


def step_conflicts(model_config, config, world):
    """What of a model's and a run's sizes does not go together in one training step, as sentences."""
    bad, chunks, routing = [], model_config.loss_chunks, model_config.routing
    rows = config.batch_size * config.grad_accum // world // max(1, config.grad_accum // world)
    if chunks and config.documents:
        bad.append(f"loss_chunks={chunks} cannot divide rows of documents={config.documents}, whose widths "
                   "differ: leave it out")
    elif chunks and rows * model_config.block_size % chunks and not config.init_from:
        bad.append(f"loss_chunks={chunks} must divide the tokens of a forward pass, {rows} rows of "
                   f"block_size={model_config.block_size}")
    if world > 1 and config.compile_mode in CUDA_GRAPHS and routing in ("moh", "sigmoid"):
        bad.append(f"compile_mode={config.compile_mode!r} replays CUDA graphs, in which routing={routing!r} "
                   "cannot ask the other ranks for their load: use default")
    return bad


def flags_by_name():
    """{name: flags} that `mechanism` chooses from: model.MECHANISMS and all_on.

    A scale may have dropout, and some mechanisms have no kernel for it on the attention weights: their names
    turn that off too, and the plain GPT to compare with is the one with --attn_dropout=0. The name of learned
    agency has its heads measured.
    """
    named = {**MECHANISMS, "all_on": ALL_ON}
    for name, flags in named.items():
        if GPTConfig(dropout=0.1, **flags).problems() and not GPTConfig(**flags).problems():
            named[name] = {**flags, "attn_dropout": 0.0}
        named[name] = with_log(named[name])
    return named


def with_log(flags):
    """A variant's flags, and that of measuring heads where learned agency predicts from what is measured."""
    return {**flags, "controller_log": True} if "agency_learned" in flags else flags


def note_on_dropout(model_config):
    """What to compare with, where a mechanism takes a model's dropout on the attention weights; else None."""
    if model_config.attn_dropout == 0 and replace(model_config, attn_dropout=None).problems():
        return ("no dropout on the attention weights, for which there is no fused kernel here: "
                "the plain GPT to compare with is the one with --attn_dropout=0")


def constraint_conflicts(model_config, config):
    """What is wrong with labels and teacher beside a GPTConfig, as sentences."""
    c, given = model_config, dict(labels=config.labels, teacher=config.teacher)
    if not c.constraint_names:  # a checkpoint may bring them
        return [f"{key}={value!r} is for constraint heads: set constraint_names"
                for key, value in given.items() if value and not config.init_from]
    bad = []
    if bool(config.teacher) != bool(c.constraint_match):
        bad.append(f"teacher={config.teacher!r} and constraint_match={c.constraint_match!r} go together: "
                   "whom to be like, and in what")
    idle = [] if config.labels else ["loss_layers", "name_coef", "positive_coef", "focal"]
    idle += [] if config.labels or config.teacher else ["warmup", "stop"]
    for key in (f"constraint_{name}" for name in idle):
        if getattr(c, key) != GPTConfig.__dataclass_fields__[key].default:
            bad.append(f"{key}={getattr(c, key)!r} is of the loss on labels: set labels")
    return bad


def skip_conflicts(model_config, config):
    """What is wrong with a late start of U-Net skips beside a TrainConfig, as sentences."""
    c, bad = model_config, []
    if c.unet_from >= config.max_iters:
        bad.append(f"unet_from={c.unet_from} must be below max_iters={config.max_iters}: skips never start")
    if not c.unet_skips and (c.unet_from or c.unet_ramp):
        bad.append(f"unet_from={c.unet_from}, unet_ramp={c.unet_ramp} mean nothing with unet_skips=False")
    return bad


def check_model(model, config):
    """UserError where a model, wherever it comes from, has no use for what is asked of its training."""
    c, bad = model.config, []
    if config.skip_lr and not c.unet:
        bad.append(f"skip_lr={config.skip_lr:g} is of U-Net skips, and the model has none")
    if config.freeze_trunk and not trained_alone(model):
        bad.append("freeze_trunk=True leaves nothing to train: no mechanism of the model has a parameter "
                   "that acts")
    if config.documents:
        if 2 * config.documents > c.block_size:
            bad.append(f"documents={config.documents} must be at most half of block_size={c.block_size}, "
                       "since longer documents are cut into even parts")
        # these are means over all tokens of a row, padding too, or choose among them
        bad += [f"documents={config.documents}: {key}={getattr(c, key)} would count padding; set {key}=0"
                for key, on in (("routing_coef", c.routing), ("routing_capacity", c.routing),
                                ("constraint_sparsity_coef", c.constraint_names),
                                ("constraint_entropy_coef", c.constraint_names)) if on and getattr(c, key)]
    if bad:
        raise UserError("\n".join(bad))


def trained_alone(model):
    """Names of the parameters that are trained while the trunk is frozen."""
    skips = () if model.config.unet_skips else f"{SkipFusion.name}."
    return {name for name in model.of_mechanisms() if not name.startswith(skips)}


def teacher_of(config, model, device):
    """The model that `teacher` names, in eval mode; None: nobody. UserError where it does not fit."""
    if not config.teacher:
        return None
    if not model.config.constraint_match:  # one that comes from a checkpoint, where no flag was asked
        raise UserError(f"teacher={config.teacher} has nothing to compare: the model of {config.init_from} "
                        "was made without constraint_match")
    state = checkpoint.read(config.teacher)
    teacher = checkpoint.build(state, config.teacher, device).requires_grad_(False)
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


# ---- a run: its state, and what is done with it ----

PROGRESS = ("step", "best_val_loss", "elapsed_s", "run_id", "last_eval")  # of a Run, in its checkpoints


@dataclass
class Run:
    """A run, and how far it is."""
    config: TrainConfig              # every key has its value
    model: GPT                       # never compiled, never wrapped
    dataset: Dataset
    process: Process
    targets: Optional[Targets] = None  # of constraint heads
    # in every checkpoint
    step: int = 0                    # steps done
    best_val_loss: float = math.inf
    elapsed_s: float = 0.0           # in training steps, over all launches, compilation aside
    run_id: str = field(default_factory=lambda: os.urandom(4).hex())
    last_eval: dict = field(default_factory=lambda: dict(step=-1))
    # of this launch
    trainer: Optional[Trainer] = None
    batches: Optional[Batches | DocumentBatches] = None
    controller: Optional[Controller] = None  # where heads are measured or moved
    log: Optional[Log] = None        # on the first rank
    bar: Optional[tqdm] = None
    bar_values: dict = field(default_factory=dict)
    last_line: float = -math.inf     # when a line about a step was printed
    graphs: int = 0                  # compiled so far in this process
    compile_s: float = 0.0           # in steps that compiled one
    untimed: int = 0                 # such steps since the last other one
    timed_from: tuple = (0, 0.0)     # (step, time) since which tokens/s is measured
    speed: Optional[float] = None    # tokens/s when it was last measured

    @property
    def out_dir(self):
        return Path(self.config.out_dir)

    @property
    def tokens_per_step(self):
        return self.config.batch_size * self.config.grad_accum * self.model.config.block_size

    def tokens(self, step):
        """Tokens trained on in the steps before `step`."""
        return self.batches.tokens(step) if self.batches else step * self.tokens_per_step


def evaluate(run):
    """A row of log.jsonl: train and val loss on fixed tokens, dropout off; every rank scores its share."""
    process, dataset = run.process, run.dataset
    row = dict(step=run.step, tokens=run.tokens(run.step))
    for split in ("train", "val"):
        share = score(run.model, dataset, split, rank=process.rank, world=process.world,
                      max_tokens=run.config.eval_tokens or dataset.splits["val"]["tokens"],
                      autocast=precision(run.config.dtype, process.kind)[1])
        nats, count = process.all_reduce_sum(share)
        row[f"{split}_loss"] = nats / count
    row["val_bpb"] = bits(row["val_loss"], dataset.bytes_per_token("val"))
    row["elapsed_s"] = round(run.elapsed_s, 3)
    return row


def eval_line(row):
    return (f"step {row['step']:>7,}   "
            f"train {row['train_loss']:.4f}   val {row['val_loss']:.4f} nats/token   "
            f"val {row['val_bpb']:.4f} bits/byte   {row['elapsed_s']:,.1f} s")


def log_eval(run):
    """The last evaluation, into the log, onto the bar and as a line."""
    if run.log:
        run.log.write(run.last_eval)
    run.bar_values["val bpb"] = f"{run.last_eval['val_bpb']:.3f}"
    run.process.print0(eval_line(run.last_eval))


def count_time(run, seconds):
    """Add the time of a step just made to elapsed_s; one that compiled a graph counts as much as the next."""
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if run.trainer.compiled and graphs != run.graphs:
        run.graphs = graphs
        run.compile_s += seconds
        run.untimed += 1
        run.timed_from = run.step, time.perf_counter()
    else:
        run.elapsed_s += seconds * (1 + run.untimed)
        run.untimed = 0


def log_steps(run, read):
    """Log those of the steps just read, of Trainer.read(), that are due."""
    config, last = run.config, run.config.max_iters
    due = [(step + 1, metrics) for step, metrics, _ in read
           if (step + 1) % config.log_interval == 0 or step + 1 == last]
    if not due or not run.log:
        return
    newest, now = read[-1][0] + 1, time.perf_counter()
    since_step, since = run.timed_from
    if newest > since_step:  # else nothing was done since but compilation
        run.speed = (run.tokens(newest) - run.tokens(since_step)) / (now - since)
        run.timed_from = newest, now
    for step, metrics in due:
        log_step(run, step, metrics, run.speed, now)


def log_step(run, step, metrics, speed, now):
    """A row of the log about the first `step` steps, and of the bar; without a bar a line now and then.

    speed: tokens/s; None: not known yet.
    """
    config = run.config
    row = dict(step=step, tokens=run.tokens(step), **metrics,
               lr=config.lr * lr_multiplier(step - 1, config), elapsed_s=round(run.elapsed_s, 3))
    if speed is not None:
        row["tokens_per_s"] = round(speed, 1)
    if run.compile_s:
        row["compile_s"] = round(run.compile_s, 1)
    mfu = run.model.mfu((speed or 0.0) / run.process.world, run.process.device, run.trainer.dtype)
    if mfu:
        row["mfu"] = round(mfu, 4)
    run.log.write(row)

    pace = "–" if speed is None else f"{speed:,.0f}"
    run.bar_values.update({"loss": f"{row['loss']:.3f}", "tok/s": pace})
    if mfu:
        run.bar_values["mfu"] = f"{mfu:.1%}"
    run.bar.set_postfix(run.bar_values, refresh=False)
    if run.bar.disable and now - run.last_line > 10:
        run.last_line = now
        run.process.print0(f"step {step:>7,}   loss  {row['loss']:.4f}   lr {row['lr']:.2e}   "
                           f"{pace:>10} tokens/s   {run.elapsed_s:,.1f} s")


def save_checkpoint(run, name, resumable=True):
    """Write out_dir/name, from the first rank alone. UserError where the weights are not finite."""
    if run.process.rank:
        return
    if not get_total_norm([p.detach() for p in run.model.parameters()]).isfinite():
        raise UserError(f"the weights are no longer finite at step {run.step}, not saved; "
                        f"{last_save(run.out_dir)}, with a lower lr or muon_lr")
    content = dict(model=run.model.state_dict(), config=asdict(run.model.config), meta=run.dataset.meta,
                   dataset=run.config.dataset, train=asdict(run.config))
    content.update({key: getattr(run, key) for key in PROGRESS})
    if resumable:
        content["optimizers"] = [optimizer.state_dict() for optimizer in run.trainer.optimizers]
        content["scaler"] = run.trainer.scaler.state_dict()
        if run.controller:
            content["controller"] = run.controller.state()
    if run.controller and not resumable:
        content["model"] = run.controller.as_scored(run)
    checkpoint.save(run.out_dir / name, content)


# ---- setting up ----

def saves_in(config):
    """Names of the checkpoints in out_dir. UserError unless the config says what becomes of them."""
    out_dir = Path(config.out_dir)
    names = [name for name in ("ckpt.pt", "best.pt") if (out_dir / name).is_file()]
    resumes = config.resume and "ckpt.pt" in names
    if names and not (config.eval_only or config.overwrite or resumes):
        instead = f"take its weights with --init_from={out_dir / 'best.pt'}"
        how = "go on with --resume" if "ckpt.pt" in names else instead
        raise UserError(f"{out_dir} already holds a run; {how}, start over with --overwrite, "
                        "or choose another --out_dir")
    return names


def print_changes(run, state):
    """A line for each key of training that is not what it was at the last save."""
    for key in sorted(set(asdict(run.config)) - {"resume", "overwrite", "init_from", "init_anyway"}):
        now, before = getattr(run.config, key), state["train"].get(key)
        if now != before:
            run.process.print0(f"changed since the last save: {key}={now}, was {before}")


def open_folder(run, saves, closing):
    """Make the run's folder, write config.json, open the log, which `closing` closes.

    saves: what an overwritten run leaves there, to be removed.
    """
    config, process = run.config, run.process
    run.out_dir.mkdir(parents=True, exist_ok=True)
    for name in saves if config.overwrite else ():
        (run.out_dir / name).unlink()
    device = torch.cuda.get_device_name(process.device) if process.kind == "cuda" else process.kind
    machine = dict(device=device, dtype=run.trainer.dtype, compile=run.trainer.compiled, ranks=process.world)
    details = write_config(run.out_dir / "config.json", run.model.config, config, run.step, machine)
    run.log = Log(run.out_dir, run.step or -1, run.last_eval["step"], closing)
    if config.wandb_log:
        run.log.start_wandb(config, details, run.run_id, closing)


def batches_of(run):
    """The training batches of a run. UserError where the data has not enough for one."""
    c, config = run.model.config, run.config
    which = run.dataset, "train", c.block_size, config.batch_size * config.grad_accum, c.seed
    if not config.documents:
        return Batches(*which)
    return DocumentBatches(*which, config.documents, few_widths=compiles(config, run.process))


def train(model_config, config):
    """Train as configured; returns the last evaluation's row of log.jsonl."""
    # the model and how far it is: new, from another checkpoint, or where this run was left
    process = join_ranks(config.device)
    saves = saves_in(config)
    dataset = Dataset(config.dataset)
    model_config = controller.starting_config(model_config, config)
    model, state = checkpoint.starting_point(model_config, config, dataset, process.device)
    progress = {key: state[key] for key in PROGRESS if key in state} if state else {}
    check_model(model, config)
    targets = None
    if config.labels and not model.config.constraint_names:
        raise UserError(f"labels={config.labels!r} is for constraint heads, and {config.init_from} has none")
    if config.labels:
        targets = Targets(dataset, config.labels, model.config.constraint_names)
        targets.check("train")
    run = Run(config.for_recipe(model.config.recipe), model, dataset, process, targets, **progress)
    config, step = run.config, run.step
    model.at_step(max(0, step - 1))  # what is evaluated first is what the last step left

    if config.eval_only:
        row = evaluate(run)
        process.print0(eval_line(row))
        return row
    if run.last_eval["step"] >= config.max_iters:
        process.print0(f"{run.out_dir} is finished: {step:,} of {config.max_iters:,} steps, "
                       f"best val loss {run.best_val_loss:.4f} nats; a larger max_iters goes on")
        return run.last_eval

    # batches, optimizers, precision
    run.batches = batches_of(run)
    run.trainer = Trainer(model, config, process, teacher_of(config, model, process.device))
    controller.start(run, state)
    if state:
        run.trainer.load(state, run.out_dir / "ckpt.pt")
        print_changes(run, state)
        state = None  # so that its tensors can go
    with ExitStack() as closing:
        if process.rank == 0:
            open_folder(run, saves, closing)
        steps = f"{config.max_iters:,} steps"
        if step:
            steps = f"going on at step {step:,} of {config.max_iters:,}"
        if targets:
            weak = "weak " if targets.meta.get("weak") else ""
            unread = f"; not read: {', '.join(targets.unread)}" if targets.unread else ""
            process.print0(f"{weak}labels {targets.dir}: {', '.join(targets.names)}{unread}")
        if config.documents:
            process.print0(str(run.batches))
        anew = ", where no checkpoint is yet: starting anew" if config.resume and not saves else ""
        process.print0(f"{model.config.recipe}: {model.num_params():,} parameters, "
                       f"{'at most ' if config.documents else ''}{run.tokens_per_step:,} tokens a step, "
                       f"{process.kind} {run.trainer.dtype} "
                       f"x {process.world}, {steps} in {run.out_dir}{anew}")
        return loop(run, closing)


# ---- the loop ----

def loop(run, closing):
    """Steps until max_iters, or until a rank is asked to stop; returns the last evaluation's row."""
    config, trainer, process, batches = run.config, run.trainer, run.process, run.batches

    def send(t):
        t = t.pin_memory() if process.kind == "cuda" else t
        return t.to(process.device, non_blocking=process.kind == "cuda")

    def fetch(step):
        """This rank's rows of the batch at `step` on their way to the device: x and y [B, T], targets of
        constraint heads, {name: [B, T]}, beside x, and the tokens scored on all ranks, where rows differ.
        """
        ids, targets = send(batches(step, process.rank, process.world)), None
        if run.targets:
            starts = batches.starts(step, process.rank, process.world)
            targets = run.targets.rows("train", starts, batches.block_size)
            targets = {name: send(t) for name, t in targets.items()}
        x = ids[:, :-1]
        return x.clamp_min(0) if config.documents else x, ids[:, 1:], targets, batches.scored(step)

    stop = StopSignal(closing)
    run.bar = tqdm(total=config.max_iters, initial=run.step, unit="step", dynamic_ncols=True,
                   disable=not (process.rank == 0 and sys.stderr.isatty()))
    closing.callback(run.bar.close)
    run.timed_from = run.step, time.perf_counter()
    batch = fetch(run.step)
    while True:
        # evaluate, and keep the weights with the lowest validation loss
        due = run.step % config.eval_interval == 0 or run.step == config.max_iters
        if due and run.last_eval["step"] < run.step:
            run.last_eval = evaluate(run)
            log_eval(run)
            trained = run.step or config.init_from  # untrained weights are nobody's best
            if trained and run.last_eval["val_loss"] < run.best_val_loss:
                run.best_val_loss = run.last_eval["val_loss"]
                save_checkpoint(run, "best.pt", resumable=False)
            if run.step == config.max_iters:
                save_checkpoint(run, "ckpt.pt")
            run.timed_from = run.step, time.perf_counter()
        if run.step >= config.max_iters:
            break

        # forward and backward; the next batch is fetched while the device is busy with them
        began = time.perf_counter()
        means = trainer.backward(run.step, *batch)
        if run.step + 1 < config.max_iters:
            batch = fetch(run.step + 1)

        # clip, agree with the other ranks, update
        trainer.update(run.step, means, stop.name is not None)
        run.step += 1
        # what a GPU computed is read a step late, but for what comes before an evaluation, a save, or surgery
        due = config.eval_interval, config.save_interval
        everything = bool(run.step == config.max_iters or run.controller
                          or any(run.step % interval == 0 for interval in due))
        read = trainer.read(everything)
        stopping = any(stops for *_, stops in read)
        if stopping:
            read += trainer.read()
        if run.controller:
            trainer = controller.step(run)
        count_time(run, time.perf_counter() - began)

        # log and save
        log_steps(run, read)
        if everything or stopping:
            trainer.read()  # raises where the last of them is not finite
        run.bar.update(1)
        if stopping or (run.step % config.save_interval == 0 and run.step < config.max_iters):
            save_checkpoint(run, "ckpt.pt")

        # stop, all ranks in the same step
        if stopping:
            process.barrier()
            process.print0(f"stopped by {stop.name or 'a signal to another rank'} at step {run.step:,}: "
                           f"saved {run.out_dir / 'ckpt.pt'}; go on with --resume")
            raise SystemExit(128 + getattr(signal, stop.name or "SIGTERM"))
    process.barrier()
    process.print0(f"best val loss {run.best_val_loss:.4f} nats; wrote {run.out_dir / 'ckpt.pt'}, "
                   f"{run.out_dir / 'best.pt'}, {run.out_dir / 'log.jsonl'}")
    return run.last_eval


def main(argv=None):
    try:
        configs = configurator.load((GPTConfig, TrainConfig), sys.argv[1:] if argv is None else argv, __doc__,
                                    conflicts, mechanisms=flags_by_name())
        note = note_on_dropout(configs[0])
        if note and os.environ.get("RANK", "0") == "0":
            print(note, flush=True)
        train(*configs)
        return
    except (Exception, KeyboardInterrupt) as e:
        problem = explain(e)
        if problem is None:
            raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if os.environ.get("LOCAL_RANK", "0") != "0" and "out of memory" not in problem:
        sys.exit(1)  # the first rank of this machine says the same
    sys.exit("\n".join(f"train: {line}" for line in problem.splitlines()))


if __name__ == "__main__":
    main()
