"""
Train a GPT, with any mechanism that its flags turn on.

    python train.py config/x.py [--key=value ...]              # one process: cuda, mps or cpu, whichever is there
    python train.py config/x.py --resume                       # go on exactly where the last save was
    torchrun --standalone --nproc_per_node=8 train.py config/x.py   # data parallel, the same global batch

A run is a folder (out_dir): config.json, log.jsonl, ckpt.pt (last), best.pt (lowest validation loss).
`python train.py --help` lists every key.
"""

import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
import zlib
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import checkpoint
import configurator
from dataset import Batches, DataError, Dataset
from evaluate import bits, score
from model import GPT, GPTConfig
from optim import lr_multiplier, make_optimizers

# What an optimizer means for the keys that were left at None. Muon's were tuned on Shakespeare characters (docs/log.md).
OPTIMIZERS = {
    "adamw": dict(lr=1e-3, min_lr=1e-4, beta2=0.95, weight_decay=0.1, grad_clip=1.0, schedule="cosine", warmup_iters=100),
    "muon": dict(lr=4e-3, min_lr=0.0, beta2=0.95, weight_decay=0.0, grad_clip=0.0, schedule="trapezoid", warmup_iters=0),
}


@dataclass
class TrainConfig:
    # ---- run ----
    out_dir: str = "out/gpt"             # the run's folder
    dataset: str = "shakespeare_char"    # a folder under data/, or a path to one
    resume: bool = False                 # go on from out_dir/ckpt.pt, if there is one
    overwrite: bool = False              # start over in a folder that already holds a run
    init_from: Optional[str] = None      # a checkpoint (ours or nanoGPT's) whose weights to start from
    eval_only: bool = False              # evaluate once and stop
    device: str = "auto"                 # auto: cuda, mps or cpu, whichever is there first
    dtype: str = "auto"                  # float32 | bfloat16 | float16; auto: bfloat16 (or float16) on cuda, else float32
    compile: Optional[bool] = None       # torch.compile; None: on cuda only
    # ---- batch: batch_size * grad_accum sequences of block_size tokens each step, over all ranks ----
    batch_size: int = 12                 # sequences in one forward pass
    grad_accum: int = 1                  # forward passes in one step; a multiple of the number of ranks, or 1
    max_iters: int = 2000                # steps
    # ---- optimizer: keys left at None follow from the optimizer ----
    optimizer: Optional[str] = None      # adamw | muon (matrices of the blocks; AdamW for the rest); None: muon for recipe=modern
    lr: Optional[float] = None           # peak learning rate of AdamW
    min_lr: Optional[float] = None       # where lr ends; every other rate falls by the same factor
    muon_lr: float = 0.02                # peak learning rate of Muon
    muon_momentum: float = 0.9           # momentum of Muon
    embed_lr: Optional[float] = None     # peak learning rate of the embeddings; None: 5 * lr with muon, lr with adamw
    beta1: float = 0.9                   # AdamW
    beta2: Optional[float] = None        # AdamW
    weight_decay: Optional[float] = None  # of matrices; never of biases, norms and gates
    grad_clip: Optional[float] = None    # clip the gradient's norm; 0: off
    # ---- schedule ----
    schedule: Optional[str] = None       # cosine | trapezoid (stable, then a straight line down)
    warmup_iters: Optional[int] = None   # linear warm-up, in steps
    decay_frac: float = 0.5              # trapezoid: the last part of the steps, in which the rate falls
    lr_decay_iters: Optional[int] = None  # the step at which the rate is down; None: max_iters
    # ---- evaluation and saving ----
    eval_interval: int = 250             # steps between evaluations
    eval_tokens: int = 131072            # tokens of train and of val to score each time, evenly spaced; 0: the whole split
    save_interval: Optional[int] = None  # steps between saves of ckpt.pt; None: at each evaluation
    # ---- logging ----
    log_interval: int = 10               # steps between rows of log.jsonl
    wandb_log: bool = False              # also log to Weights & Biases
    wandb_project: str = "nanoheads"
    wandb_run_name: Optional[str] = None  # None: the name of out_dir
    wandb_mode: str = "online"           # online | offline
    wandb_tags: Optional[list[str]] = None

    def for_recipe(self, recipe):
        """Fill in what follows from the recipe and the optimizer; returns self."""
        self.optimizer = self.optimizer or ("muon" if recipe == "modern" else "adamw")
        for key, value in OPTIMIZERS[self.optimizer].items():
            if getattr(self, key) is None:
                setattr(self, key, value)
        if self.embed_lr is None:
            self.embed_lr = 5 * self.lr if self.optimizer == "muon" else self.lr
        self.min_lr = min(self.min_lr, self.lr)
        self.save_interval = self.save_interval or self.eval_interval
        return self

    def problems(self):
        """Everything that is wrong with this config, as a list of sentences (empty: fine)."""
        bad = []
        for key, allowed in dict(dtype=("auto", "float32", "bfloat16", "float16"), optimizer=(None, *OPTIMIZERS),
                                 schedule=(None, "cosine", "trapezoid"), wandb_mode=("online", "offline")).items():
            if getattr(self, key) not in allowed:
                bad.append(f"{key}={getattr(self, key)!r} must be one of {', '.join(map(str, allowed))}")
        for key in ("batch_size", "grad_accum", "max_iters", "eval_interval", "log_interval", "save_interval", "lr", "muon_lr", "embed_lr"):
            if getattr(self, key) is not None and getattr(self, key) <= 0:
                bad.append(f"{key}={getattr(self, key)} must be positive")
        for key in ("eval_tokens", "warmup_iters", "weight_decay", "grad_clip", "min_lr"):
            if (getattr(self, key) or 0) < 0:
                bad.append(f"{key}={getattr(self, key)} must not be negative")
        for key in ("beta1", "beta2", "muon_momentum"):
            if not 0 <= (getattr(self, key) or 0) < 1:
                bad.append(f"{key}={getattr(self, key)} must be in [0, 1)")
        if not 0 < self.decay_frac <= 1:
            bad.append(f"decay_frac={self.decay_frac} must be in (0, 1]")
        if self.lr and self.min_lr and self.min_lr > self.lr:
            bad.append(f"min_lr={self.min_lr} must not be above lr={self.lr}")
        if (self.warmup_iters or 0) >= (self.lr_decay_iters or self.max_iters):
            bad.append(f"warmup_iters={self.warmup_iters} must be below lr_decay_iters or max_iters={self.lr_decay_iters or self.max_iters}")
        if self.resume and (self.init_from or self.overwrite):
            bad.append("resume goes with neither init_from nor overwrite: it takes weights and state from out_dir/ckpt.pt")
        return bad


class TrainError(Exception):
    """Why training stopped, in one line."""


# ---- small helpers ----

def find_ranks(device):
    """(rank, world, local device) from torchrun's environment, after joining its process group."""
    if "RANK" not in os.environ:
        return 0, 1, device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


def all_sum(values, device, world):
    """The sum over ranks of a few numbers."""
    if world == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def describe(model_config, config):
    """What config.json holds: both configs, and what is needed to run this again."""
    def git(*args):
        return subprocess.run(["git", *args], cwd=configurator.ROOT, capture_output=True, text=True).stdout.strip()
    return dict(model=asdict(model_config), train=asdict(config), command=shlex.join(["python", *sys.argv]),
                commit=git("describe", "--always", "--dirty") or None,
                versions=dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__))


class StopSignal:
    """Remembers the first SIGINT or SIGTERM; a second one ends the process the hard way."""

    def __init__(self):
        self.name = None
        for s in (signal.SIGINT, signal.SIGTERM):
            signal.signal(s, self.catch)

    def catch(self, number, frame):
        self.name = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)


class Wandb:
    """Weights & Biases, or nothing at all; whatever fails there is said once and never stops the training."""

    def __init__(self, config, details, run_id, out_dir):
        self.run = None
        if config.wandb_log:
            self.attempt(lambda: self.start(config, details, run_id, out_dir))

    def start(self, config, details, run_id, out_dir):
        import wandb  # only here: an optional dependency
        self.run = wandb.init(project=config.wandb_project, name=config.wandb_run_name or out_dir.name, id=run_id, resume="allow",
                              config=details, mode=config.wandb_mode, tags=config.wandb_tags, dir=str(out_dir))
        code = wandb.Artifact(f"code-{run_id}", type="code")
        for path in sorted(configurator.ROOT.glob("*.py")):
            code.add_file(str(path))
        code.add_file(str(out_dir / "config.json"))
        self.run.log_artifact(code)

    def attempt(self, action):
        try:
            action()
        except Exception as e:  # a network, a login or a disk quota must not cost a training run
            self.run = None
            tqdm.write(f"wandb: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}; training goes on without it", file=sys.stderr)

    def log(self, row):
        if self.run:
            self.attempt(lambda: self.run.log({k: v for k, v in row.items() if k != "step"}, step=row["step"]))

    def finish(self):
        if self.run:
            self.attempt(self.run.finish)


def cut_log(path, step):
    """Drop the rows of log.jsonl after `step` (and a half-written last line): they are about to be written again."""
    if path.is_file():
        rows = []
        for line in path.read_text().splitlines():
            try:
                rows += [line] if json.loads(line)["step"] <= step else []
            except (ValueError, KeyError, TypeError):
                pass
        checkpoint.write_atomic(path, lambda f: f.write("".join(r + "\n" for r in rows).encode()))


def load_run(model_config, config, dataset, out_dir, device):
    """(model config with the dataset's vocabulary, state to resume or None, weights to start from or None)."""
    last = out_dir / "ckpt.pt"
    if model_config.vocab_size is None:
        model_config.vocab_size = dataset.vocab_size
    if model_config.vocab_size < dataset.vocab_size:
        raise TrainError(f"vocab_size={model_config.vocab_size} is smaller than {dataset.meta['name']}'s {dataset.vocab_size:,}")
    if config.init_from:
        state = checkpoint.read(config.init_from, device)
        checkpoint.same_vocabulary(state, dataset, config.init_from)
        kept = dict(dropout=model_config.dropout, attn_dropout=model_config.attn_dropout, seed=model_config.seed,
                    checkpoint_activations=model_config.checkpoint_activations)
        weights = checkpoint.build(state, config.init_from, device, **kept)
        if model_config.block_size < weights.config.block_size:
            weights.crop_block_size(model_config.block_size)
        return weights.config, None, weights
    if not config.resume or not last.is_file():
        return model_config, None, None
    state = checkpoint.read(last, device)
    checkpoint.same_vocabulary(state, dataset, last)
    old, new = state["config"], asdict(model_config)
    differ = [f"{k}: {old.get(k)!r} there, {new[k]!r} here" for k in new if k in old and old[k] != new[k] and k != "checkpoint_activations"]
    if differ:
        raise TrainError(f"--resume: {last} has another model ({'; '.join(differ)}); give the same config, or another out_dir")
    return model_config, state, None


# ---- the run ----

def train(model_config, config):
    """Train as configured; returns the last evaluation's row of log.jsonl."""
    config.for_recipe(model_config.recipe)
    device = checkpoint.pick_device(config.device)
    rank, world, device = find_ranks(device)
    main_rank, kind = rank == 0, torch.device(device).type
    say = (lambda text: tqdm.write(text)) if main_rank else (lambda text: None)
    torch.set_float32_matmul_precision("high")

    dataset, out_dir = Dataset(config.dataset), Path(config.out_dir)
    if not config.eval_only and not (config.resume or config.overwrite) and (out_dir / "ckpt.pt").is_file():
        raise TrainError(f"{out_dir} already holds a run; go on with --resume, start over with --overwrite, or choose another --out_dir")
    model_config, state, raw = load_run(model_config, config, dataset, out_dir, device)
    rows = config.batch_size * config.grad_accum
    if rows % world or (config.grad_accum > 1 and config.grad_accum % world):
        raise TrainError(f"batch_size={config.batch_size} * grad_accum={config.grad_accum} sequences cannot be shared evenly by {world} ranks")
    micro_steps = max(1, config.grad_accum // world)
    batches = Batches(dataset, "train", model_config.block_size, rows, model_config.seed)

    # precision
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if kind != "cuda" else "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    autocast = torch.autocast(kind, getattr(torch, dtype)) if dtype != "float32" else nullcontext()
    scaler = torch.amp.GradScaler(kind, enabled=dtype == "float16")

    # model and optimizers; `raw` is the plain module, `model` what the training step calls
    raw = raw or GPT(model_config).to(device)
    raw.train()
    optimizers = make_optimizers(raw, config)
    peaks = [[group["lr"] for group in o.param_groups] for o in optimizers]
    step, best, elapsed, run_id, evaluated = 0, math.inf, 0.0, os.urandom(4).hex(), -1
    if state:
        raw.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        scaler.load_state_dict(state["scaler"])
        step, best, elapsed, run_id, evaluated = (state[k] for k in ("step", "best_val_loss", "elapsed_s", "run_id", "evaluated"))
        del state
    model = torch.compile(raw) if (config.compile if config.compile is not None else kind == "cuda") else raw
    if world > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device] if kind == "cuda" else None)

    # the run folder
    details = describe(model_config, config)
    log, wandb = None, None
    if main_rank and not config.eval_only:
        out_dir.mkdir(parents=True, exist_ok=True)
        checkpoint.write_atomic(out_dir / "config.json", lambda f: f.write(json.dumps(details, indent=1).encode()))
        cut_log(out_dir / "log.jsonl", step if step else -1)
        log = open(out_dir / "log.jsonl", "a")
        wandb = Wandb(config, details, run_id, out_dir)
    tokens_per_step = rows * model_config.block_size
    say(f"{model_config.recipe}: {raw.num_params():,} parameters, {tokens_per_step:,} tokens a step, {kind} {dtype} x {world}, "
        + (f"going on at step {step:,} of {config.max_iters:,}" if step else f"{config.max_iters:,} steps") + f" in {out_dir}")

    def record(row):
        if log:
            log.write(json.dumps(row) + "\n")
            log.flush()
        if wandb:
            wandb.log(row)

    def evaluation():
        """Train and val loss on fixed tokens, dropout off; every rank scores its share."""
        row = dict(step=step, tokens=step * tokens_per_step)
        for split in ("train", "val"):
            nats, count = all_sum(score(raw, dataset, split, max_tokens=config.eval_tokens or (0 if split == "val" else 1 << 20),
                                        rank=rank, world=world, autocast=autocast), device, world)
            row[f"{split}_loss"] = nats / count
        row["val_bpb"] = bits(row["val_loss"], dataset.bytes_per_token("val"))
        return {**row, "elapsed_s": round(elapsed, 3)}

    def save(name, full=True):
        if main_rank:
            content = dict(model=raw.state_dict(), config=asdict(model_config), meta=dataset.meta, train=asdict(config), step=step,
                           best_val_loss=best, elapsed_s=elapsed, run_id=run_id, evaluated=evaluated)
            if full:
                content.update(optimizers=[o.state_dict() for o in optimizers], scaler=scaler.state_dict())
            checkpoint.save(out_dir / name, content)

    def fetch(at):
        """This rank's rows of batch `at`, on their way to the device."""
        x, y = batches(at, rank, world)
        if kind == "cuda":
            return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
        return x.to(device), y.to(device)

    stop = StopSignal()
    last = dict(step=step, val_loss=best)
    if config.eval_only:
        last = evaluation()
        say(eval_line(last))
        return last
    bar = tqdm(total=config.max_iters, initial=step, unit="step", disable=not main_rank, dynamic_ncols=True,
               mininterval=0.1 if sys.stderr.isatty() else 15)
    shown, timed_steps, clock = {}, 0, time.perf_counter()
    x, y = fetch(step)
    while True:
        if (step % config.eval_interval == 0 or step == config.max_iters) and evaluated < step:
            last, evaluated = evaluation(), step
            record(last)
            shown["val bpb"] = f"{last['val_bpb']:.3f}"
            say(eval_line(last))
            if last["val_loss"] < best:
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
        if model_config.dropout or model_config.attn_dropout:  # masks are a function of (seed, step, rank), so resuming is exact
            torch.manual_seed(zlib.crc32(f"{model_config.seed} {step} {rank}".encode()))
        total, aux = 0.0, {}
        for micro, (xm, ym) in enumerate(zip(x.chunk(micro_steps), y.chunk(micro_steps))):
            last_micro = micro == micro_steps - 1
            with autocast, (nullcontext() if last_micro or world == 1 else model.no_sync()):
                out = model(xm, ym)
                loss = sum(out.aux.values(), out.loss) / micro_steps
            scaler.scale(loss).backward()
            total = total + out.loss.detach() / micro_steps
            for name, term in out.aux.items():
                aux[f"aux/{name}"] = aux.get(f"aux/{name}", 0.0) + term.detach() / micro_steps
        if step + 1 < config.max_iters:
            x, y = fetch(step + 1)  # while the device is busy
        norm = None
        if config.grad_clip:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(raw.parameters(), config.grad_clip)
        # one exchange tells every rank the mean loss and whether any of them was asked to stop
        total, stopping = all_sum([float(total) / world, float(stop.name is not None)], device, world)
        if not math.isfinite(total):
            raise TrainError(f"the loss is {total} at step {step}: stopped before the update; {out_dir / 'ckpt.pt'} is the last save; "
                             "lower lr or muon_lr, or use dtype=bfloat16 or float32")
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        step, timed_steps = step + 1, timed_steps + 1
        elapsed += time.perf_counter() - began

        if step % config.log_interval == 0 or step == config.max_iters:
            speed = timed_steps * tokens_per_step / (time.perf_counter() - clock)
            timed_steps, clock = 0, time.perf_counter()
            row = dict(step=step, tokens=step * tokens_per_step, loss=total, lr=config.lr * multiplier)
            row.update({k: float(v) for k, v in aux.items()}, tokens_per_s=round(speed, 1), elapsed_s=round(elapsed, 3))
            if norm is not None:
                row["grad_norm"] = float(norm)
            mfu = raw.mfu(speed / world, device, dtype)
            if mfu is not None:
                row["mfu"] = round(mfu, 4)
            record(row)
            shown.update({"loss": f"{total:.3f}", "tok/s": f"{speed:,.0f}", **({"mfu": f"{mfu:.1%}"} if mfu else {})})
            bar.set_postfix(shown, refresh=False)
        bar.update(1)
        if stopping or (step % config.save_interval == 0 and step < config.max_iters):
            save("ckpt.pt")
        if stopping:
            bar.close()
            say(f"stopped by {stop.name or 'another rank'} at step {step}: saved {out_dir / 'ckpt.pt'}; go on with --resume")
            raise SystemExit(128 + getattr(signal, stop.name or "SIGTERM"))
    bar.close()
    if wandb:
        wandb.finish()
    say(f"best val loss {best:.4f} nats; wrote {out_dir / 'ckpt.pt'}, {out_dir / 'best.pt'}, {out_dir / 'log.jsonl'}")
    return last


def eval_line(row):
    return (f"step {row['step']:>7,}   train {row['train_loss']:.4f}   val {row['val_loss']:.4f} nats/token   "
            f"val {row['val_bpb']:.4f} bits/byte   {row['elapsed_s']:,.1f} s")


def main(argv=None):
    try:
        model_config, config = configurator.load((GPTConfig, TrainConfig), sys.argv[1:] if argv is None else argv, __doc__)
        train(model_config, config)
    except (configurator.ConfigError, checkpoint.CheckpointError, DataError, TrainError) as e:
        sys.exit("\n".join(f"train: {line}" for line in str(e).splitlines()))
    except OSError as e:
        sys.exit(f"train: {e.strerror or e}: {e.filename or ''}".rstrip(": "))
    except (torch.OutOfMemoryError, RuntimeError) as e:
        if "out of memory" not in str(e) and "can't allocate memory" not in str(e):
            raise
        sys.exit("train: out of memory; lower batch_size (and raise grad_accum to keep the batch), lower block_size, "
                 "or set checkpoint_activations=True")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
