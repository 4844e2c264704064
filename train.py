"""
Train a GPT. Its flags set size, recipe and training, and turn on attention-head mechanisms.

    python train.py --scale=tiny                          # the plain GPT, a minute or two on a core
    python train.py --scale=tiny --mechanism=moh,agency   # with mechanisms, by name
    python train.py --scale=tiny --mechanism=mine.py      # with one in a file of your own
    python train.py --mechanism=mine.py --check           # try that one first, in seconds
    python train.py config/x.py --max_iters=500           # keys from a file; the command line wins
    python train.py --resume --out_dir=out/x              # go on exactly where the run in out/x stopped
    python train.py --init_from=out/x --dataset=y         # fine-tune: the weights of a run, a fresh optimizer
    torchrun --standalone --nproc_per_node=8 train.py config/x.py   # on eight GPUs, the same global batch

A run is a folder with config.json, log.jsonl and two checkpoints. Its name is out/<scale>-<mechanisms>,
unless --out_dir says otherwise. ckpt.pt is the last save and has the optimizers' states, so --resume goes on
from it. best.pt has the weights with the lowest validation loss. Ctrl-C saves the run before it ends. Keys
and values that are wrong are listed before anything runs.

`--help` lists keys and mechanisms, and `--help=routing` says what a mechanism does and has all of its keys. A
config file is Python code, and reading it runs it: name only files that you trust.
"""

import math
import os
import signal
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional

from nanoheads import threads  # before torch, since it sets how long torch's threads spin while they wait

import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm
from tqdm import tqdm

from model import GPT, GPTConfig
from nanoheads import checkpoint, configurator, start, tasks
from nanoheads.batches import Batches, DocumentBatches, PackedBatches
from nanoheads.common import UserError, as_program, from_lab, plural, say, write_json
from nanoheads.config import TrainConfig
from nanoheads.dataset import Dataset
from nanoheads.extensions import EXTENSIONS
from nanoheads.kernels import allow_graphs
from nanoheads.log import Log, last_save, read_rows, write_config
from nanoheads.memory import advising, memory_lines
from nanoheads.optim import (CUDA_GRAPHS, carry_moments, compiles, keys_of_rates, load_moments,
                             lr_multiplier, make_optimizers, note_on_bfloat16, note_on_compile, precision,
                             rates_at, roles, seed_step)
from nanoheads.ranks import Process, StopSignal, report_once
from nanoheads.scoring import bits, critic_metrics, score
from nanoheads.timing import mfu


# ---- a training step, and the loop around it ----

def forward_backward(run, x, y, targets=None, scored=None, positions=None):
    """Forward and backward on this rank's rows x, y [B, T], in portions.

    targets: {name: [B, T]} of constraint heads, -1 where unknown. scored: how many tokens of this step have a
    target, over all portions and ranks; None: as many in each portion. positions [B, T]: of the tokens in
    their documents, where rows hold several; else None.
    Returns {name: 0-dim tensor}, means over these rows: the loss first, then the mechanisms' own losses.
    """
    means = {}
    for i, (x_part, y_part) in enumerate(zip(x.chunk(run.portions), y.chunk(run.portions))):
        if run.replays_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        arguments = for_constraint_heads(run, x_part, targets, i)
        if positions is not None:
            arguments["positions"] = positions.chunk(run.portions)[i]
        with run.autocast:
            out = run.forward(x_part, y_part, **arguments)
        terms = {"loss": out.loss, **{f"aux/{name}": term for name, term in out.aux.items()}}
        # the loss is a mean over this portion's tokens, and the gradient is that of the mean over the whole
        # batch: divide by the number of portions or, where they differ in tokens, weigh each by its tokens
        divisor = run.portions if scored is None else scored / ((y_part != -1).sum() * run.process.world)
        run.scaler.scale(sum(terms.values()) / divisor).backward()
        for name, term in terms.items():
            means[name] = means.get(name, 0.0) + term.detach() / divisor
    return means


def training_step(run, x, y, targets=None, scored=None, positions=None):
    """One update of the weights. It takes and returns what forward_backward() does, with clipping also the
    gradient's norm.

    Nothing here waits for a GPU, except that with float16 it has to know whether the gradients overflowed.
    """
    config, model = run.config, run.model

    # learning rates and the seed of all randomness depend on the step's number alone, so that a resumed run
    # draws the same dropout masks as one that was never stopped
    multiplier = lr_multiplier(run.step, config)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * multiplier
    seed_step(run.process.kind, model.config.seed, run.step, run.process.rank)
    model.at_step(run.step)
    if run.step == config.thaw_from:  # from this step on the trunk is trained, too
        freeze_or_thaw(run)

    # forward and backward, then the mean of the gradients over ranks
    means = forward_backward(run, x, y, targets, scored, positions)
    run.process.average_gradients(model.parameters())

    # clip; with float16 the norm is needed without clipping too, since it shows an overflow
    optimizers = [optimizer for optimizer in run.optimizers if has_gradients(optimizer)]
    overflow = False
    if config.grad_clip or run.scaler.is_enabled():
        for optimizer in optimizers:
            run.scaler.unscale_(optimizer)
        means["grad_norm"] = clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        overflow = run.scaler.is_enabled() and not means["grad_norm"].isfinite()

    # update: all optimizers, or none of them where float16 overflowed. In other dtypes a NaN does reach the
    # weights here, and read_values() or save_checkpoint() ends the run before any of it is saved
    if not overflow:
        for optimizer in optimizers:
            run.scaler.step(optimizer)
    run.scaler.update()
    clear_gradients(run)
    return means


def loop(run):
    """Train until max_iters, patience or task_enough ends the run, or a signal stops it."""
    config, stop = run.config, run.process.stop
    run.timed_from = run.step, time.perf_counter()
    batch = batch_at(run, run.step)
    while True:
        # evaluate, unless the run did so at this step before it was resumed; keep the weights with the lowest
        # validation loss
        if run.is_due(config.eval_interval) and run.last_eval["step"] < run.step:
            run.last_eval = evaluate_splits(run)
            log_eval(run)
            trained = run.step or config.init_from  # untrained weights do not count as best
            if trained and run.last_eval["val_loss"] < run.best_val_loss:
                run.best_val_loss, run.evals_since_best = run.last_eval["val_loss"], 0
                save_checkpoint(run, "best.pt", resumable=False)
            elif trained:
                run.evals_since_best += 1
            if run.ended_by:
                save_checkpoint(run, "ckpt.pt")
            run.timed_from = run.step, time.perf_counter()
        if run.ended_by:
            break

        # train; the next batch is fetched while a GPU is busy with this one
        began = time.perf_counter()
        with run.profile.step() if run.profile else nullcontext():
            means = training_step(run, *batch)
        run.step += 1
        if run.step < config.max_iters:
            batch = batch_at(run, run.step)

        # read what the step computed, where it is logged and before an evaluation, a save or an action of an
        # extension (such as dynamic heads, docs/heads.md). Only here do we wait for a GPU. All ranks have to
        # read in the same step, so with several of them a signal to stop waits for the next such step
        logging, saving = run.is_due(config.log_interval), run.is_due(config.save_interval)
        acting = any(run.is_due(actor.interval) for actor in run.acting.values())
        stop_asked = stop.name is not None
        stopping = False
        if (logging or saving or acting or run.is_due(config.eval_interval)
                or stop_asked and run.process.world == 1):
            values, stopping = read_values(run, means, stop_asked)
        if run.between_steps():
            set_up_again(run)
        count_time(run, time.perf_counter() - began)
        if run.profile and run.profile.is_done():
            write_profile(run)

        # log and save, also before the last evaluation, in which the run may be killed
        if logging:
            log_step(run, values)
        run.bar.update(1)
        if stopping or saving:
            save_checkpoint(run, "ckpt.pt")
        if stopping:
            end_stopped(run, stop.name)
    run.process.barrier()
    if run.profile:
        run.process.print0(f"no profile: the run ended before the {plural(config.profile, 'step')} of it")
    run.process.print0(f"{run.end_line()}; wrote {run.out_dir / 'ckpt.pt'}, {run.out_dir / 'best.pt'}, "
                       f"{run.out_dir / 'log.jsonl'}")
    if config.task and run.process.rank == 0:
        evaluations = [row for row in read_rows(run.out_dir / "log.jsonl") if "val_acc" in row]
        say(tasks.describe_learning(run.dataset, evaluations))


def read_values(run, means, stop_asked):
    """({name: value} of the last step, means over ranks; whether any rank has been asked to stop).

    UserError where a value is not finite. A float16 run goes on after an overflow of its gradients.
    """
    values = torch.stack([*means.values(), means["loss"].new_tensor(float(stop_asked))]).tolist()
    *values, stops = run.process.all_reduce_sum(values)
    values = {name: value / run.process.world for name, value in zip(means, values)}
    for name, value in values.items():
        if not math.isfinite(value) and not (run.scaler.is_enabled() and name == "grad_norm"):
            raise UserError(f"{name} is {value} in step {run.step}: stopped before anything of it is saved; "
                            f"{last_save(run.out_dir)}, with a lower "
                            f"{' or '.join(keys_of_rates(run.config))}, or another dtype")
    return values, stops > 0


# ---- the parts of a step ----

def for_constraint_heads(run, x, targets, i):
    """The model's arguments with targets and teacher of constraint heads, for the i-th portion x [B, T]."""
    arguments = {}
    if targets:
        arguments["constraint_targets"] = {name: t.chunk(run.portions)[i] for name, t in targets.items()}
    if run.teacher is not None:
        arguments["teacher"] = run.teacher.predictions(x)
    return arguments


def freeze_or_thaw(run):
    """With freeze_trunk: freeze all parameters but those that mechanisms add, or thaw them from thaw_from on.
    """
    config = run.config
    frozen = config.freeze_trunk and (config.thaw_from is None or run.step < config.thaw_from)
    for p, role in roles(run.model).items():
        p.requires_grad_(not frozen or role.added)


def has_gradients(optimizer):
    """Whether an optimizer has a gradient to step by. Muon may have none while the trunk is frozen."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def clear_gradients(run):
    """Clear the gradients. CUDA graphs add to the tensors that are there, so with them these become 0."""
    for p in run.model.parameters():
        if not run.replays_graphs:
            p.grad = None
        elif p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.zero_()


def end_stopped(run, name):
    """End this process after a signal of that name (None: another rank got one), with all other ranks."""
    run.process.barrier()
    by = "what read its output, which is gone" if name == "SIGPIPE" else name or "a signal to another rank"
    line = f"stopped by {by} at step {run.step:,}: saved {run.out_dir / 'ckpt.pt'}; go on with --resume"
    if name == "SIGPIPE":
        say(f"train: {line}", file=sys.stderr)
    else:
        run.process.print0(line)
    raise SystemExit(128 + getattr(signal, name or "SIGTERM", 13))  # Windows has no SIGPIPE, which is 13


def batch_at(run, step):
    """(x, y, targets, scored, positions) of the batch at `step`, as training_step() takes them.

    x and y [B, T] are this rank's rows, on their way to the device. targets are those of constraint heads,
    {name: [B, T]} for the tokens of x, or None. scored is None unless rows differ in how many tokens have a
    target (documents, tasks). positions is None unless rows hold several documents.
    """
    batches, process = run.batches, run.process
    if run.config.task:
        x, y = (send(t, process) for t in batches(step, process.rank, process.world))
        return x, y, None, batches.n_scored(step), None
    if run.config.documents_packed:
        x, y, positions = (send(t, process) for t in batches(step, process.rank, process.world))
        return x, y, None, batches.n_scored(step), positions
    ids, targets = send(batches(step, process.rank, process.world), process), None
    if run.targets:
        starts = batches.starts(step, process.rank, process.world)
        targets = run.targets.rows("train", starts, batches.block_size)
        targets = {name: send(t, process) for name, t in targets.items()}
    x = ids[:, :-1]  # documents are padded with -1, for which there is no embedding
    return x.clamp_min(0) if run.config.documents else x, ids[:, 1:], targets, batches.n_scored(step), None


def send(t, process):
    """A tensor on its way to the rank's device."""
    t = t.pin_memory() if process.kind == "cuda" else t
    return t.to(process.device, non_blocking=process.kind == "cuda")


# ---- evaluation, log and checkpoints ----

def evaluate_splits(run):
    """A row of log.jsonl: train and val loss on fixed tokens, without dropout. Every rank scores its share.

    val_bpb counts each token with the bytes of the mean token of the whole split. That is inexact where
    eval_tokens is less than the split; `evaluate.py --tokens` counts the bytes of what it scores. Where
    tokens are characters, val_bpc is in bits per character.
    """
    process, dataset = run.process, run.dataset
    row = dict(step=run.step, tokens=run.tokens(run.step))
    if run.config.task:
        return {**row, **evaluate_task(run), "elapsed_s": round(run.elapsed_s, 3)}
    for split in ("train", "val"):
        share = score(run.model, dataset, split, rank=process.rank, world=process.world,
                      max_tokens=run.config.eval_tokens or dataset.splits["val"]["tokens"],
                      autocast=precision(run.config.dtype, process.kind)[1])
        nats, count = process.all_reduce_sum(share)
        row[f"{split}_loss"] = nats / count
    row["val_bpb"] = bits(row["val_loss"], dataset.bytes_per_token("val"))
    if dataset.tokenizer.encoding == "char":
        row["val_bpc"] = bits(row["val_loss"], 1)
    row["elapsed_s"] = round(run.elapsed_s, 3)
    return {**row, **critic_metrics(run.model, dataset, "val")}


def evaluate_task(run):
    """The values of an evaluation on a task: val_loss in nats per answer, acc/<level> the share of right
    answers at each level, and val_acc the mean of these. Every rank scores its share of the rows.
    """
    process = run.process
    share = tasks.score_levels(run.model, run.dataset, "val", rank=process.rank, world=process.world,
                               autocast=precision(run.config.dtype, process.kind)[1])
    summary = tasks.summary({level: process.all_reduce_sum(counts) for level, counts in share.items()})
    return dict(val_loss=summary["nats"], val_acc=summary["right"],
                **{f"acc/{level}": right for level, right in summary["levels"].items()})


def eval_line(row):
    """A row of evaluate_splits() as a line."""
    if "val_acc" in row:
        levels = "  ".join(f"{level}: {right:.3f}" for level, right in tasks.level_shares(row).items())
        return (f"step {row['step']:>7,}   val {row['val_loss']:.4f} nats/answer   "
                f"right {row['val_acc']:.3f}   by level  {levels}   {row['elapsed_s']:,.1f} s")
    return (f"step {row['step']:>7,}   "
            f"train {row['train_loss']:.4f}   val {row['val_loss']:.4f} nats/token   "
            f"val {row['val_bpb']:.4f} bits/byte   {row['elapsed_s']:,.1f} s")


def log_eval(run):
    """Write the last evaluation into the log, onto the bar and as a line."""
    if run.log:
        run.log.write(run.last_eval)
    if run.config.task:
        run.bar_values["right"] = f"{run.last_eval['val_acc']:.3f}"
    else:
        run.bar_values["val bpb"] = f"{run.last_eval['val_bpb']:.3f}"
    run.process.print0(eval_line(run.last_eval))


def count_time(run, seconds):
    """Add the time of the last step to elapsed_s.

    The time of a step that compiled a graph goes into compile_s, and elapsed_s counts it as long as the next
    step that compiled none.
    """
    so_far = torch._dynamo.utils.counters["stats"]["unique_graphs"] if run.compiled else 0
    if so_far != run.compiled_graphs:
        run.compiled_graphs = so_far
        run.compile_s += seconds
        run.untimed += 1
        run.timed_from = run.step, time.perf_counter()
    else:
        run.elapsed_s += seconds * (1 + run.untimed)
        run.untimed = 0


def log_step(run, values):
    """Write the values of the last step as a row of the log, onto the bar, and as a line above it."""
    if not run.log:
        return
    config, now = run.config, time.perf_counter()
    since_step, since = run.timed_from
    if run.step > since_step:  # else all steps since then were compilation
        run.speed = (run.tokens(run.step) - run.tokens(since_step)) / (now - since)
        run.timed_from = run.step, now
    rates = rates_at(config, run.step - 1)
    row = dict(step=run.step, tokens=run.tokens(run.step), **values, **rates,
               elapsed_s=round(run.elapsed_s, 3))
    if run.speed is not None:
        row["tokens_per_s"] = round(run.speed, 1)
    if run.compile_s:
        row["compile_s"] = round(run.compile_s, 1)
    of_peak = mfu(run.model, (run.speed or 0.0) / run.process.world, run.process.device, run.dtype)
    if of_peak:
        row["mfu"] = round(of_peak, 4)
    run.log.write(row)

    pace = "–" if run.speed is None else f"{run.speed:,.0f}"
    run.bar_values.update({"loss": f"{row['loss']:.3f}", "tok/s": pace})
    if of_peak:
        run.bar_values["mfu"] = f"{of_peak:.1%}"
    run.bar.set_postfix(run.bar_values, refresh=False)
    shown = "   ".join(f"{name} {rate:.2e}" for name, rate in rates.items())
    run.process.print0(f"step {run.step:>7,}   loss  {row['loss']:.4f}   {shown}   "
                       f"{pace:>10} tokens/s   {run.elapsed_s:,.1f} s")


def write_profile(run):
    """Write the trace of the recorded steps into the run's folder, and print its summary."""
    path = run.out_dir / "trace.json"
    run.process.print0(run.profile.write(path))
    run.process.print0(f"trace, for chrome://tracing or ui.perfetto.dev: {path}")
    run.profile = None
    run.timed_from = run.step, time.perf_counter()


def open_bar(run, closing):
    """Make the progress bar, which `closing` closes; it is shown on the first rank's terminal alone."""
    shown = run.process.rank == 0 and sys.stderr.isatty()
    run.bar = tqdm(total=run.config.max_iters, initial=run.step, unit="step", dynamic_ncols=True,
                   disable=not shown)
    closing.callback(run.bar.close)


def save_checkpoint(run, name, resumable=True):
    """Write out_dir/name, from the first rank alone. UserError where the weights are not finite.

    resumable: with the states of optimizers, scaler and extensions, for ckpt.pt. best.pt has none, and the
    weights of scored_model().
    """
    if run.process.rank:
        return
    if not get_total_norm([p.detach() for p in run.model.parameters()]).isfinite():
        raise UserError(f"the weights are no longer finite at step {run.step}, not saved; "
                        f"{last_save(run.out_dir)}, with a lower {' or '.join(keys_of_rates(run.config))}")
    content = dict(model=run.model.state_dict(), config=run.model.config.flags(), meta=run.dataset.meta,
                   dataset=run.config.dataset, train=asdict(run.config))
    content.update({key: getattr(run, key) for key in checkpoint.PROGRESS})
    if run.model.config.own:
        from nanoheads import own_mechanism
        if record := own_mechanism.record(run.model.config):
            content["own_mechanism"] = record
    if resumable:
        content["optimizers"] = [optimizer.state_dict() for optimizer in run.optimizers]
        content["scaler"] = run.scaler.state_dict()
        content.update({name: actor.state() for name, actor in run.acting.items()})
    else:
        scored = run.scored_model()
        content.update(model=scored.state_dict(), config=scored.config.flags())
    checkpoint.save(run.out_dir / name, content)


# ---- a run, from its configs to the loop ----

@dataclass
class Run:
    """A run: its configs, model and data, how far it is, and what its steps need."""
    config: TrainConfig              # every key has its value
    model: GPT                       # never compiled, never wrapped
    dataset: Dataset | tasks.TaskData
    process: Process
    asked: dict = field(default_factory=dict)  # what was set for it, for config.json: start.settings_of()
    # progress, which checkpoints save: checkpoint.PROGRESS
    step: int = 0                    # steps done
    best_val_loss: float = math.inf
    evals_since_best: int = 0        # evaluations since the one with that loss
    elapsed_s: float = 0.0           # in training steps, over all launches, without compilation
    run_id: str = field(default_factory=lambda: os.urandom(4).hex())
    last_eval: dict = field(default_factory=lambda: dict(step=-1))
    # what a step needs: see make_ready() and set_up()
    batches: Optional[Batches | DocumentBatches | PackedBatches | tasks.TaskBatches] = None
    targets: Optional[Any] = None    # Targets of constraint heads, with labels
    teacher: Optional[Any] = None    # a GPT or Features, whose predictions constraint_match compares with
    forward: Optional[Callable] = None  # the model, compiled or as it is
    compiled: bool = False
    replays_graphs: bool = False     # CUDA graphs, of compile_mode
    optimizers: list = field(default_factory=list)
    dtype: str = "float32"
    autocast: Optional[Any] = None   # the context in which the model runs
    scaler: Optional[torch.amp.GradScaler] = None  # scales the loss in float16; else it changes nothing
    portions: int = 1                # forward passes of this rank in a step
    # of this launch
    acting: dict = field(default_factory=dict)  # {name of an Extension: what acts between steps}
    profile: Optional[Any] = None    # a Profile, on the first rank, until its steps are recorded
    log: Optional[Log] = None        # on the first rank
    bar: Optional[tqdm] = None
    bar_values: dict = field(default_factory=dict)
    compiled_graphs: int = 0         # so far in this process
    compile_s: float = 0.0           # in steps that compiled one
    untimed: int = 0                 # steps that compiled since the last one that did not
    timed_from: tuple = (0, 0.0)     # (step, time) since which tokens/s is measured
    speed: Optional[float] = None    # tokens/s when it was last measured

    @property
    def out_dir(self):
        return Path(self.config.out_dir)

    def is_due(self, interval):
        """Whether what is done every `interval` steps is to be done now; in the last step everything is."""
        return self.step % interval == 0 or self.step == self.config.max_iters

    def between_steps(self):
        """Let extensions act after a step. Returns whether the model gained or lost parameters."""
        return any([actor.step(self) for actor in self.acting.values()])

    def scored_model(self):
        """A model that computes the same by its weights alone, for best.pt: see Extension."""
        model = self.model
        for actor in self.acting.values():
            model = actor.as_scored(model)
        return model

    @property
    def ended_by(self):
        """The key by which no further step is made; None: the run goes on."""
        config = self.config
        if config.task_enough is not None and self.last_eval.get("val_acc", 0.0) >= config.task_enough:
            return "task_enough"
        if config.patience is not None and self.evals_since_best >= config.patience:
            return "patience"
        # a run that was killed after its last step has still to be evaluated
        if self.step > config.max_iters or self.last_eval["step"] >= config.max_iters:
            return "max_iters"
        return None

    def end_line(self):
        """A line that says what ended the run, and its best loss."""
        return (f"ended at step {self.step:,} by {self.ended_by}={getattr(self.config, self.ended_by):,}, "
                f"best val loss {self.best_val_loss:.4f} nats")

    @property
    def tokens_per_step(self):
        length = self.dataset.length if self.config.task else self.model.config.block_size
        return self.config.batch_size * self.config.grad_accum * length

    def tokens(self, step):
        """Tokens trained on in the steps before `step`."""
        return self.batches.tokens(step) if self.batches else step * self.tokens_per_step


def set_up(run):
    """Make what training steps need of a run: optimizers, precision, the compiled model."""
    config, process, model = run.config, run.process, run.model.train()
    run.compiled = compiles(config, process.kind)
    run.replays_graphs = run.compiled and config.compile_mode in CUDA_GRAPHS
    if config.compile_mode in CUDA_GRAPHS and not (run.compiled and process.kind == "cuda"):
        what = "is not compiled" if process.kind == "cuda" else f"is on {process.kind}"
        raise UserError(f"compile_mode={config.compile_mode!r} replays CUDA graphs, and this run {what}: "
                        "use compile_mode=default")
    # an optimizer's step is compiled on a GPU only, since on a CPU that would change the last bits
    run.optimizers = make_optimizers(model, config, process.rank, process.world,
                                     run.compiled and process.kind == "cuda")
    run.dtype, run.autocast = precision(config.dtype, process.kind)
    run.scaler = run.scaler or torch.amp.GradScaler(process.kind, enabled=run.dtype == "float16")
    run.portions = max(1, config.grad_accum // process.world)
    run.forward = model
    if run.compiled:
        allow_graphs()
        mode = None if config.compile_mode == "default" else config.compile_mode
        several_widths = config.documents and not config.documents_packed
        run.forward = torch.compile(model, dynamic=False if several_widths else None, mode=mode)
    if config.freeze_trunk:
        freeze_or_thaw(run)
    clear_gradients(run)


def set_up_again(run):
    """set_up() after parameters came or went. New optimizers take the moments of the parameters that stayed.
    """
    before = run.optimizers
    set_up(run)
    carry_moments(before, run.optimizers)


def ready_to_step(model, config, process=Process()):
    """A Run that training_step() can be called on, without data, folder or log: for bench.py and the tests.

    config: every key has its value, see TrainConfig.for_recipe().
    """
    run = Run(config, model, None, process)
    set_up(run)
    return run


def make_ready(run, state):
    """Make all that a run's steps need, and load its saved state. state: the read checkpoint, or {}.

    UserError where the data, the labels, the teacher or what was saved do not fit the model.
    """
    config, model = run.config, run.model
    run.process.check_agreement(run)
    if model.config.mechanisms():
        start.try_mechanisms(model, config)
    run.batches = batches_of(run)
    if config.labels:
        run.targets = targets_of(run)
    if config.teacher:
        from nanoheads.teacher import teacher_of  # only here: most runs have none
        run.teacher = teacher_of(config, model, run.process.device)
    set_up(run)
    run.acting = {extension.name: extension.start(run, state) for extension in EXTENSIONS
                  if extension.is_on(config)}
    if state:
        load_moments(run.optimizers, state["optimizers"], run.out_dir / "ckpt.pt")
        if state["scaler"]:  # empty when dtype was another one
            counts = {key: state["scaler"][key] for key in ("scale", "_growth_tracker")}
            run.scaler.load_state_dict({**run.scaler.state_dict(), **counts})


def targets_of(run):
    """The Targets of constraint heads, from labels of the text. UserError: there are no such heads or labels.
    """
    labels, names = run.config.labels, run.model.config.constraint_names
    if not names:
        raise UserError(f"labels={labels!r} is for constraint heads, and {run.config.init_from} has none")
    targets = from_lab("lab.labels.targets", f"labels={labels}").Targets(run.dataset, labels, names)
    targets.check("train")
    return targets


def train(model_config, config, given=None):
    """Train as configured; returns the last evaluation's row of log.jsonl.

    given: {flag: value} of the flags that were set, see start.begin(). UserError: the run cannot begin, or
    cannot go on.
    """
    with start.join_run(config) as process, ExitStack() as closing:
        begun = start.begin(model_config, config, given or {}, process)
        run = Run(begun.config, start.model_of(begun), begun.dataset, process, begun.settings,
                  **begun.progress)
        if config.eval_only:
            evaluate_once(run)
        elif run.ended_by:
            process.print0(f"{run.out_dir} has {run.end_line()}; a larger {run.ended_by} goes on")
        else:
            make_ready(run, begun.state if begun.goes_on else {})
            del begun  # the tensors that were read can go
            open_run(run, closing)
            loop(run)
        write_result(run)
        return run.last_eval


def evaluate_once(run):
    """Evaluate as between two steps, and write nothing. UserError where the result is not finite."""
    run.last_eval = row = evaluate_splits(run)
    if not math.isfinite(row["val_loss"]):
        where = run.config.init_from or checkpoint.file_of(run.out_dir)
        raise UserError(f"{where} gives {row['val_loss']} nats on val: its weights are damaged, or its "
                        "training diverged")
    run.process.print0(eval_line(row))


def write_result(run):
    """Write the result of a run into the file of --json, from the first rank alone.

    val_bpb is that of the last evaluation in bits per byte, best_val_loss the lowest in nats a token.
    """
    if run.config.json and run.process.rank == 0:
        trained = dict(out_dir=str(run.out_dir), best_val_loss=run.best_val_loss)
        write_json(run.config.json, dict(**({} if run.config.eval_only else trained),
                                         parameters=run.model.num_params(), **run.last_eval))


def print_run(run):
    """Print, before the first step, what is trained on which data, and how."""
    config, process, targets = run.config, run.process, run.targets
    steps = plural(config.max_iters, "step")
    if run.step:
        steps = f"going on at step {run.step:,} of {config.max_iters:,}"
    if targets:
        weak = "weak " if targets.meta.get("weak") else ""
        unread = f"; not read: {', '.join(targets.unread)}" if targets.unread else ""
        process.print0(f"{weak}labels {targets.dir}: {', '.join(targets.names)}{unread}")
    if config.documents:
        process.print0(str(run.batches))
    shown = ["task" if config.task else "dataset", "optimizer", *rates_at(config, 0), "min_lr", "schedule",
             "warmup_iters"]
    process.print0(", ".join(f"{key}={getattr(config, key)}" for key in shown))
    for line in memory_lines(run):
        process.print0(line)
    left = run.tokens(config.max_iters) - run.tokens(run.step)
    padded = config.documents and config.documents_packed != "cut"
    for note in (note_on_compile(config, process.kind),
                 note_on_bfloat16(config, process.kind, run.model, left)):
        if note:
            process.print0(note)
    ranks = f"{process.world} x " if process.world > 1 else ""
    where = threads.describe_threads() if process.kind == "cpu" else device_name(process)
    process.print0(f"{run.model.config.recipe}: {run.model.num_params():,} parameters, "
                   f"{'at most ' if padded else ''}{run.tokens_per_step:,} tokens a step, "
                   f"{run.dtype} on {ranks}{where}, {steps} in {run.out_dir}")


def device_name(process):
    """What a rank computes on: its GPU by name, else cpu or mps."""
    return torch.cuda.get_device_name(process.device) if process.kind == "cuda" else process.kind


def open_run(run, closing):
    """Make the run's folder with config.json, its log and its bar, and print_run().

    closing: the ExitStack that closes them, and puts signal handlers back.
    """
    config, process = run.config, run.process
    if config.profile:
        from nanoheads import profiling  # only here: most runs have none
        run.profile = profiling.profile_run(run)
        if run.profile:
            closing.callback(run.profile.close)
    if process.rank == 0:
        run.out_dir.mkdir(parents=True, exist_ok=True)
        if run.model.config.own:
            from nanoheads import own_mechanism  # only here and where it is saved: most runs have none
            own_mechanism.keep(run.model.config, run.out_dir)
        for name in ("ckpt.pt", "best.pt") if config.overwrite else ():
            (run.out_dir / name).unlink(missing_ok=True)
        machine = dict(device=device_name(process), processor=threads.describe_threads(), dtype=run.dtype,
                       compile=run.compiled, ranks=process.world)
        details = write_config(run.out_dir / "config.json", run.model.config, config, run.step, machine,
                               run.asked)
        run.log = Log(run.out_dir, run.step or -1, run.last_eval["step"])
        if config.wandb_log:
            run.log.start_wandb(config, details, run.run_id, closing)
        if config.tensorboard:
            run.log.start_tensorboard(closing)
    print_run(run)
    open_bar(run, closing)
    process.stop = StopSignal(closing)


def batches_of(run):
    """The training batches of a run. UserError where the data is too short for one."""
    c, config = run.model.config, run.config
    which = run.dataset, "train", c.block_size, config.batch_size * config.grad_accum, c.seed
    if config.task:
        return tasks.TaskBatches(run.dataset, config.batch_size * config.grad_accum, c.seed)
    run.dataset.tokens("val")  # raises now if it is damaged, and not in an evaluation hours from here
    if not config.documents:
        return Batches(*which)
    if config.documents_packed:
        return PackedBatches(*which, config.documents, config.documents_packed == "cut")
    return DocumentBatches(*which, config.documents, few_widths=compiles(config, run.process.kind))


@as_program("train")
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--trial"]:  # a run that a study of compare.py has planned
        return from_lab("study.trial", "--trial").main(argv[1:], train)
    with report_once():
        # what config files and arguments set. The files of one's own that --mechanism names are run: their
        # mechanisms join those of model.py
        command = configurator.parse_command((configurator.Presets, GPTConfig, TrainConfig), argv)
        if command.names_own_files:
            from nanoheads import own_mechanism  # only here: most runs have none
            command = own_mechanism.add_from_command(command, all_modes="check" in command.arguments)
        if any(map(configurator.is_help, argv)):
            from nanoheads import usage
            print(usage.answer(argv, __doc__, command.classes))
            sys.exit(0)
        if command.values().get("check"):
            from nanoheads import promises
            return promises.main(command)
        model_config, config, given = start.configure(command)
        with advising(config):
            train(model_config, config, given)


if __name__ == "__main__":
    main()
