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
import zlib
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Optional

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_, get_total_norm
from tqdm import tqdm

import checkpoint
import configurator
from checkpoint import last_save
from common import UserError, explain, pick_device
from dataset import Batches, Dataset
from evaluate import bits, score
from model import ALL_ON, MECHANISMS, GPTConfig
from optim import lr_multiplier, make_optimizers
from runlog import Log, write_config

# What an optimizer means for keys left at None. Muon's were tuned on Shakespeare's characters (docs/log.md).
OPTIMIZERS = {
    "adamw": dict(lr=1e-3, min_lr=1e-4, beta2=0.95, weight_decay=0.1, grad_clip=1.0, schedule="cosine",
                  warmup_iters=100),
    "muon": dict(lr=4e-3, min_lr=0.0, beta2=0.95, weight_decay=0.0, grad_clip=0.0, schedule="trapezoid",
                 warmup_iters=0),
}


@dataclass
class TrainConfig:
    # ---- run ----
    out_dir: Optional[str] = None        # the run's folder; None: out/<scale or config file>-<mechanisms>
    dataset: str = "shakespeare_char"    # a folder under data/, or a path to one
    resume: bool = False                 # go on from out_dir/ckpt.pt, if there is one
    overwrite: bool = False              # start over in a folder that already holds a run
    init_from: Optional[str] = None      # a checkpoint (ours or nanoGPT's) whose weights to start from
    eval_only: bool = False              # evaluate once and stop
    device: str = "auto"                 # auto: cuda, mps or cpu, whichever is there first
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
                                         # auto: bfloat16 (or float16) on cuda, else float32
    compile: Optional[bool] = None       # torch.compile; None: on cuda only
    # ---- batch: batch_size * grad_accum sequences of block_size tokens each step, over all ranks ----
    batch_size: int = 12                 # sequences in one forward pass
    grad_accum: int = 1                  # forward passes in one step; a multiple of the number of ranks, or 1
    max_iters: int = 2000                # steps
    # ---- optimizer: keys left at None follow from the optimizer ----
    optimizer: Optional[Literal["adamw", "muon"]] = None
                                         # muon: for the blocks' matrices, AdamW for the rest;
                                         # None: muon for recipe=modern, else adamw
    lr: Optional[float] = None           # peak learning rate of AdamW
    min_lr: Optional[float] = None       # where lr ends; every other rate falls by the same factor
    muon_lr: float = 0.02                # peak learning rate of Muon
    muon_momentum: float = 0.95          # momentum of Muon
    embed_lr: Optional[float] = None     # the embeddings' peak learning rate; None: lr, with muon 5 * lr
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
             "log_interval", "save_interval", "lr_decay_iters", "lr", "muon_lr", "embed_lr", "decay_frac")
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
    try:
        dataset = Dataset(config.dataset)
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


def flags_by_name():
    """{name: flags} that `mechanism` chooses from: model.MECHANISMS and all_on.

    A scale may have dropout, and some mechanisms have no kernel for it on the attention weights: their names
    turn that off too, and the plain GPT to compare with is the one with --attn_dropout=0.
    """
    named = {**MECHANISMS, "all_on": ALL_ON}
    for name, flags in named.items():
        if GPTConfig(dropout=0.1, **flags).problems() and not GPTConfig(**flags).problems():
            named[name] = {**flags, "attn_dropout": 0.0}
    return named


def note_on_dropout(model_config):
    """What to compare with, where a mechanism takes a model's dropout on the attention weights; else None."""
    if model_config.attn_dropout == 0 and replace(model_config, attn_dropout=None).problems():
        return ("no dropout on the attention weights, for which there is no fused kernel here: "
                "the plain GPT to compare with is the one with --attn_dropout=0")


# ---- small helpers ----

def find_ranks(name):
    """(rank, world, device) of this process: from torchrun's environment, after joining its process group, or alone."""
    device, local = pick_device(name), int(os.environ.get("LOCAL_RANK", 0))
    if "RANK" not in os.environ:
        return 0, 1, device
    if device.startswith("cuda:"):
        raise UserError(f"device={device} under torchrun would put every process on one GPU; say device=cuda")
    if device == "mps" or device == "cuda" and local >= torch.cuda.device_count():
        raise UserError(f"torchrun started more processes than there are GPUs ({torch.cuda.device_count()}): fewer, or --device=cpu")
    if device == "cuda":
        device = f"cuda:{local}"
        torch.cuda.set_device(device)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    return dist.get_rank(), dist.get_world_size(), device


def all_sum(values, device, world):
    """The sum over ranks of a few numbers."""
    if world == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def leave_together(world):
    """Wait for all ranks: one that takes the process group down while another still saves may abort it."""
    if world > 1:
        dist.barrier()


def seed_step(kind, *key):
    """Make all randomness of a step a function of `key`, so that a resumed run draws the same dropout masks."""
    seed = zlib.crc32(repr(key).encode())
    torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every backend there is, and takes 0.1 ms
    if kind != "cpu":
        getattr(torch, kind).manual_seed(seed)


class StopSignal:
    """Remembers the first SIGINT or SIGTERM. A second one ends the process at once, unless torchrun passes signals on."""

    def __init__(self, closing):
        self.name = None
        for number in (signal.SIGINT, signal.SIGTERM):
            closing.callback(signal.signal, number, signal.signal(number, self.catch))

    def catch(self, number, frame):
        self.name = signal.Signals(number).name
        if "RANK" not in os.environ:
            signal.signal(number, signal.SIG_DFL)


def eval_line(row):
    return (f"step {row['step']:>7,}   train {row['train_loss']:.4f}   val {row['val_loss']:.4f} nats/token   "
            f"val {row['val_bpb']:.4f} bits/byte   {row['elapsed_s']:,.1f} s")


# ---- the run ----

def train(model_config, config):
    """Train as configured; returns the last evaluation's row of log.jsonl."""
    with ExitStack() as closing:
        return run(model_config, config, closing)


def run(model_config, config, closing):
    rank, world, device = find_ranks(config.device)
    main_rank, kind, out_dir = rank == 0, torch.device(device).type, Path(config.out_dir)

    def say(text):
        if main_rank:
            tqdm.write(text)
            sys.stdout.flush()  # into a file or a pipe, too, line by line

    there = [name for name in ("ckpt.pt", "best.pt") if (out_dir / name).is_file()]
    if there and not (config.eval_only or config.overwrite or (config.resume and "ckpt.pt" in there)):
        how = "go on with --resume" if "ckpt.pt" in there else f"take its weights with --init_from={out_dir / 'best.pt'}"
        raise UserError(f"{out_dir} already holds a run; {how}, start over with --overwrite, or choose another --out_dir")
    dataset = Dataset(config.dataset)
    raw, state = checkpoint.starting_point(model_config, config, dataset, device)  # `raw`: never compiled, never wrapped
    model_config, config = raw.config, config.for_recipe(raw.config.recipe)
    tokens_per_step = config.batch_size * config.grad_accum * model_config.block_size
    step, best, elapsed, run_id, last = 0, math.inf, 0.0, os.urandom(4).hex(), dict(step=-1)
    if state:
        step, best, elapsed, run_id, last = (state.get(k) for k in ("step", "best_val_loss", "elapsed_s", "run_id", "last_eval"))

    # precision
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if kind != "cuda" else "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    autocast = torch.autocast(kind, getattr(torch, dtype)) if dtype != "float32" else nullcontext()
    scaler = torch.amp.GradScaler(kind, enabled=dtype == "float16")
    if kind == "cuda":
        torch.set_float32_matmul_precision("high")

    def evaluation():
        """Train and val loss on fixed tokens, dropout off; every rank scores its share."""
        row = dict(step=step, tokens=step * tokens_per_step)
        for split in ("train", "val"):
            tokens = config.eval_tokens or dataset.splits["val"]["tokens"]
            nats, count = all_sum(score(raw, dataset, split, max_tokens=tokens, rank=rank, world=world, autocast=autocast), device, world)
            row[f"{split}_loss"] = nats / count
        row["val_bpb"] = bits(row["val_loss"], dataset.bytes_per_token("val"))
        return {**row, "elapsed_s": round(elapsed or 0.0, 3)}

    if config.eval_only:
        last = evaluation()
        say(eval_line(last))
        return last
    if last["step"] >= config.max_iters:
        say(f"{out_dir} is finished: {step:,} of {config.max_iters:,} steps, best val loss {best:.4f} nats; a larger max_iters goes on")
        return last

    batches = Batches(dataset, "train", model_config.block_size, config.batch_size * config.grad_accum, model_config.seed)
    micro_steps = max(1, config.grad_accum // world)
    params = list(raw.train().parameters())
    optimizers = make_optimizers(raw, config)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    if state:
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            checkpoint.restore(optimizer, saved, out_dir / "ckpt.pt")
        if state["scaler"]:  # empty when dtype was another one
            scaler.load_state_dict(state["scaler"])
        for key in sorted(set(asdict(config)) - {"resume", "overwrite", "init_from"}):
            if getattr(config, key) != state["train"].get(key):
                say(f"changed since the last save: {key}={getattr(config, key)}, was {state['train'].get(key)}")
        state = None  # so that its tensors can go
    compiles = config.compile if config.compile is not None else kind == "cuda"
    model = torch.compile(raw) if compiles else raw
    if world > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device] if kind == "cuda" else None,
                                                          broadcast_buffers=False,  # they are the same everywhere
                                                          find_unused_parameters=bool(model_config.constraint_names) or not model_config.unet_skips)

    # the run folder
    log = None
    if main_rank:
        out_dir.mkdir(parents=True, exist_ok=True)
        for name in there if config.overwrite else ():
            (out_dir / name).unlink()
        machine = dict(device=torch.cuda.get_device_name(device) if kind == "cuda" else kind, dtype=dtype, compile=compiles, ranks=world)
        details = write_config(out_dir / "config.json", model_config, config, step, machine)
        log = Log(out_dir, step or -1, last["step"], closing)
        if config.wandb_log:
            log.start_wandb(config, details, run_id, closing)
    say(f"{model_config.recipe}: {raw.num_params():,} parameters, {tokens_per_step:,} tokens a step, {kind} {dtype} x {world}, "
        + (f"going on at step {step:,} of {config.max_iters:,}" if step else f"{config.max_iters:,} steps") + f" in {out_dir}"
        + (", where no checkpoint is yet: starting anew" if config.resume and not there else ""))

    def save(name, full=True):
        if not main_rank:
            return
        if not get_total_norm([p.detach() for p in params]).isfinite():
            raise UserError(f"the weights are no longer finite at step {step}, not saved; {last_save(out_dir)}, "
                             "with a lower lr or muon_lr")
        content = dict(model=raw.state_dict(), config=asdict(model_config), meta=dataset.meta, dataset=config.dataset,
                       train=asdict(config), step=step, best_val_loss=best, elapsed_s=elapsed, run_id=run_id, last_eval=last)
        if full:
            content.update(optimizers=[o.state_dict() for o in optimizers], scaler=scaler.state_dict())
        checkpoint.save(out_dir / name, content)

    def fetch(at):
        """This rank's rows of batch `at`, on their way to the device."""
        ids = batches(at, rank, world)
        ids = ids.pin_memory().to(device, non_blocking=True) if kind == "cuda" else ids.to(device)
        return ids[:, :-1], ids[:, 1:]

    stop = StopSignal(closing)
    bar = tqdm(total=config.max_iters, initial=step, unit="step", disable=not (main_rank and sys.stderr.isatty()), dynamic_ncols=True)
    closing.callback(bar.close)
    shown, spoke, timed_steps, clock = {}, -math.inf, 0, time.perf_counter()
    x, y = fetch(step)
    while True:
        if (step % config.eval_interval == 0 or step == config.max_iters) and last["step"] < step:
            last = evaluation()
            if log:
                log.write(last)
            shown["val bpb"] = f"{last['val_bpb']:.3f}"
            say(eval_line(last))
            if last["val_loss"] < best and (step or config.init_from):  # untrained weights are nobody's best
                best = last["val_loss"]
                save("best.pt", full=False)
            if step == config.max_iters:
                save("ckpt.pt")
            timed_steps, clock = 0, time.perf_counter()
        if step >= config.max_iters:
            break

        began = time.perf_counter()
        multiplier = lr_multiplier(step, config)
        for optimizer, lrs in zip(optimizers, peaks):
            for group, lr in zip(optimizer.param_groups, lrs):
                group["lr"] = lr * multiplier
        seed_step(kind, model_config.seed, step, rank)
        loss, aux, norm = 0.0, {}, None
        for micro, (xm, ym) in enumerate(zip(x.chunk(micro_steps), y.chunk(micro_steps))):
            with autocast, (nullcontext() if world == 1 or micro == micro_steps - 1 else model.no_sync()):
                out = model(xm, ym)
            scaler.scale(sum(out.aux.values(), out.loss) / micro_steps).backward()
            loss = loss + out.loss.detach() / micro_steps
            for name, term in out.aux.items():
                aux[f"aux/{name}"] = aux.get(f"aux/{name}", 0.0) + term.detach() / micro_steps
        if step + 1 < config.max_iters:
            x, y = fetch(step + 1)  # while the device is busy
        if config.grad_clip or scaler.is_enabled():
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            norm = clip_grad_norm_(params, config.grad_clip or math.inf)
        # one look at the device and one exchange tell every rank the means, and whether any of them was asked to stop
        seen = {"loss": loss, **aux, **({} if norm is None else {"grad_norm": norm})}
        values = [v / world for v in torch.stack(list(seen.values())).tolist()]
        *values, stopping = all_sum([*values, float(stop.name is not None)], device, world)
        seen = dict(zip(seen, values))
        for name, value in seen.items():
            if not math.isfinite(value) and not (name == "grad_norm" and scaler.is_enabled()):  # the scaler skips such a step
                raise UserError(f"{name} is {value} in step {step + 1}: stopped before the update; {last_save(out_dir)}, "
                                 "with a lower lr or muon_lr, or another dtype")
        if math.isfinite(seen.get("grad_norm", 0.0)):  # in fp16 an overflow skips the step of every optimizer, not of one
            for optimizer in optimizers:
                scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        step, timed_steps = step + 1, timed_steps + 1
        elapsed += time.perf_counter() - began

        if (step % config.log_interval == 0 or step == config.max_iters) and log:
            now = time.perf_counter()
            speed = timed_steps * tokens_per_step / (now - clock)
            timed_steps, clock = 0, now
            row = dict(step=step, tokens=step * tokens_per_step, **seen, lr=config.lr * multiplier, tokens_per_s=round(speed, 1),
                       elapsed_s=round(elapsed, 3))
            mfu = raw.mfu(speed / world, device, dtype)
            if mfu is not None:
                row["mfu"] = round(mfu, 4)
            log.write(row)
            shown.update({"loss": f"{row['loss']:.3f}", "tok/s": f"{speed:,.0f}", **({"mfu": f"{mfu:.1%}"} if mfu else {})})
            bar.set_postfix(shown, refresh=False)
            if bar.disable and now - spoke > 10:  # a file or a pipe gets a line now and then instead of the bar
                spoke = now
                say(f"step {step:>7,}   loss  {row['loss']:.4f}   lr {row['lr']:.2e}   {speed:>10,.0f} tokens/s   {elapsed:,.1f} s")
        bar.update(1)
        if stopping or (step % config.save_interval == 0 and step < config.max_iters):
            save("ckpt.pt")
        if stopping:
            leave_together(world)
            say(f"stopped by {stop.name or 'a signal to another rank'} at step {step:,}: saved {out_dir / 'ckpt.pt'}; go on with --resume")
            raise SystemExit(128 + getattr(signal, stop.name or "SIGTERM"))
    leave_together(world)
    say(f"best val loss {best:.4f} nats; wrote {out_dir / 'ckpt.pt'}, {out_dir / 'best.pt'}, {out_dir / 'log.jsonl'}")
    return last


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
