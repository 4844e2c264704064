"""
Measure speed and memory of training and of decoding, as ratios between models that take turns in one run.

    python bench.py                                   # our recipes against the plain GPT (recipe=gpt2)
    python bench.py --nanogpt ../nanoGPT              # and nanoGPT, which the ratios are then to
    python bench.py --n_layer 6 --n_head 6 --n_embd 384 --block_size 256 --what decode --nanogpt ../nanoGPT
    python bench.py --mechanisms unet_add,agency --recipes modern    # mechanisms against the plain GPT
    python bench.py --mechanisms all --recipes modern                # all: half an hour on two cores
    python bench.py --mechanisms all --recipes modern --rounds 3 --steps 2 --no-memory    # 75 seconds
    python bench.py --mechanisms acag,output_gate --what memory --block_size 4096 --batch_size 1
    python bench.py --mechanisms=mine.py              # one in a file of your own (docs/your-own-mechanism.md)
    python bench.py --heads_off 0 .25 .5 .75          # the plain GPT with heads pruned
    python bench.py --task recall                     # a step on a task beside one on text
    python bench.py --race --nanogpt ../nanoGPT       # how soon nanoGPT's loss is reached: --race --help

The models take turns, a few steps each, round after round, so that a machine that slows down slows all of
them. A ratio is computed within each round, and the median over the rounds is printed with a 95 % interval.
A time by itself means nothing on a shared machine. A training step is that of train.py.

With --mechanisms, each takes turns with the plain GPT alone. Rows are printed, and written to --json, as they
are made, so that a run that is stopped keeps them. A mechanism that fails is a row too.

On a CPU nanoGPT always runs in float32 and is not compiled, as its own programs run there.
"""

import argparse
import functools
import gc
import itertools
import math
import multiprocessing
import statistics
import sys

from nanoheads import threads  # before torch, whose threads it has wait briefly

import torch

import train
from model import ALL_ON, GPT, MECHANISMS, RECIPES, GPTConfig
from nanoheads import configurator, own_mechanism
from nanoheads.common import (ROOT, UserError, as_program, explain, from_lab, keep_freed_memory, pick_device,
                              plural, say, table, writable, write_json)
from nanoheads.config import TrainConfig
from nanoheads.kernels import allow_graphs
from nanoheads.optim import CUDA_GRAPHS, check_compile, compiles, precision
from nanoheads.pruning import prune_heads
from nanoheads.ranks import Process
from nanoheads.tasks import TASKS, TaskBatches, TaskData
from nanoheads.timing import (mfu, on_cuda, peak_memory, progress_bar, take_turns, time_action, time_line,
                              time_rows, time_table)

# option, default on cpu, default on cuda
SIZES = (("n_layer", 4, 12), ("n_head", 4, 12), ("n_embd", 128, 768), ("block_size", 64, 1024),
         ("batch_size", 12, 32))
LARGEST = 2**31 - 1  # of any count: what is above fits no machine, and is no number for torch


# ---- contestants: {name: build() -> (model, train step, decode)} ----

def gpt_builder(recipe, args, flags={}, pruned_share=0.0):
    """build() of a GPT with a mechanism's flags, and with this share of each layer's heads pruned."""
    def build():
        sizes = "vocab_size", "block_size", "n_layer", "n_head", "n_embd"
        try:
            model = GPT(GPTConfig(**{key: getattr(args, key) for key in sizes}, recipe=recipe, **flags))
            if pruned_share:
                heads = range(round(pruned_share * args.n_head))
                prune_heads(model, dict.fromkeys(range(args.n_layer), heads))
        except ValueError as e:  # sizes that make no model, or heads that cannot go
            raise UserError(str(e)) from None
        config = TrainConfig(dtype=args.dtype, compile=args.compile,
                             compile_mode=args.compile_mode).for_recipe(recipe)
        run = train.ready_to_step(model.to(args.device), config, Process(args.device))
        return model, functools.partial(train.training_step, run), model.generate
    return build


def on_task(args):
    """{name: build} of a step on as many tokens of text, one on a task, and drawing the task's rows alone."""
    data = TaskData({"task": args.task}, args.block_size)
    build = gpt_builder(args.recipes[0], args)

    def on_rows():
        model, step, generate = build()
        batches, step_numbers = TaskBatches(data, args.batch_size, seed=0), itertools.count()

        def step_on_rows(*_):
            step_number = next(step_numbers)
            x, y = (t.to(args.device) for t in batches(step_number))
            step(x, y, None, batches.n_scored(step_number))
        return model, step_on_rows, generate

    def draw_rows():
        batches, step_numbers = TaskBatches(data, args.batch_size, seed=0), itertools.count()
        return None, lambda *_: batches(next(step_numbers)), None
    return {"text": build, args.task: on_rows, "drawing its rows": draw_rows}


def nanogpt():
    """The module that knows nanoGPT. UserError: there is no lab/."""
    return from_lab("lab.bench.nanogpt", "--nanogpt")


def mechanisms():
    """{name: flags} that --mechanisms takes: those of model.MECHANISMS, and everything together."""
    return {**MECHANISMS, "all_on": ALL_ON}


def contestants_of(args):
    """{name: build} of all contestants. Ratios are to the first one."""
    recipe = args.recipes[0]
    if args.task:
        return on_task(args)
    if args.heads_off:
        return {f"{recipe}-{share:.0%}": gpt_builder(recipe, args, pruned_share=share)
                for share in args.heads_off}
    if args.mechanisms:
        flags, names = mechanisms(), []
        for name in args.mechanisms.split(","):
            names += flags if name == "all" else [name]
        return {recipe: gpt_builder(recipe, args),
                **{name: gpt_builder(recipe, args, flags[name]) for name in names}}
    first = {"nanogpt": nanogpt().contestant(args.nanogpt, args)} if args.nanogpt else {}
    return {**first, **{recipe: gpt_builder(recipe, args) for recipe in args.recipes}}


# ---- measuring ----

def autocast(args):
    return precision(args.dtype, torch.device(args.device).type)[1]


def batch(args):
    """Random inputs and targets, [B, T] each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(args.vocab_size, (2, args.batch_size, args.block_size), generator=generator)
    return ids.to(args.device)


def matmul_rate(args, n=8192):
    """Measured bf16 matrix-product rate in TFLOP/s: the ceiling that utilisation is a share of."""
    a, b = torch.randn(2, n, n, device=args.device, dtype=torch.bfloat16)
    seconds = [time_action(lambda: [a @ b for _ in range(10)], args.device) / 10 for _ in range(5)]
    return 2 * n**3 / statistics.median(seconds) / 1e12


def peak_memory_cpu(name, args):
    """Resident bytes that building and three steps add at most, in a process of its own; None: not known."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(memory_worker, (name, args))


def memory_worker(name, args):
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    for path in (vars(args).get("own_mechanism") or "").split(","):
        if path:  # this process has not read it yet
            own_mechanism.add(path)
    # what the libraries load at a first step is not the model's memory
    tiny = argparse.Namespace(**{**vars(args), "n_layer": 2, "n_head": 6, "n_embd": 96, "block_size": 16,
                                 "batch_size": 1})
    contestants_of(tiny)[name]()[1](*batch(tiny))
    bytes_before = peak_memory(args.device)
    _, step, _ = contestants_of(args)[name]()
    for _ in range(3):
        step(*batch(args))
    return None if bytes_before is None else peak_memory(args.device) - bytes_before


# ---- training steps, decoding and memory of all contestants ----

class Contest:
    """Contestants side by side: built and dropped by name, and timed taking turns; rate: matmul_rate()."""

    def __init__(self, args, rate):
        self.args, self.rate = args, rate
        self.x, self.y = batch(args)
        self.builders = contestants_of(args)
        self.contestants, self.own_bytes = {}, {}  # own: on cuda, its weights and the optimizer's state
        self.done_rows = set()  # (kind of work, name)

    def build(self, name):
        cuda = on_cuda(self.args)
        bytes_before = torch.cuda.memory_allocated() if cuda else 0
        self.contestants[name] = self.builders[name]()
        if cuda:
            _, step, _ = self.contestants[name]
            step(self.x, self.y)  # a first step makes the optimizer's state
            self.own_bytes[name] = torch.cuda.memory_allocated() - bytes_before

    def drop(self, name):
        self.contestants.pop(name, None)
        gc.collect()  # its optimizers and its compiled code form cycles
        if on_cuda(self.args):
            torch.cuda.empty_cache()

    def train(self, name):
        _, step, _ = self.contestants[name]
        for _ in range(self.args.steps):
            step(self.x, self.y)

    def decode(self, name):
        _, _, generate = self.contestants[name]
        with autocast(self.args):
            prompts = torch.zeros(self.args.decode_batch, 1, dtype=torch.long, device=self.args.device)
            generate(prompts, self.args.block_size - 1)

    def rows(self):
        """Yield a row for each that is built and each kind of work, once; the ratios are to the first."""
        args, first = self.args, next(iter(self.contestants))
        for what in args.what.split(","):
            if what == "decode":
                seconds = take_turns(self.contestants, self.decode, args, what)
                repeats = args.block_size - 1
                tokens = repeats * args.decode_batch
            else:
                seconds = take_turns(self.contestants, self.train, args, what)
                tokens, repeats = args.steps * args.batch_size * args.block_size, args.steps
            for row in time_rows(what, seconds, first, tokens, repeats):
                if (what, row["name"]) not in self.done_rows:
                    row.update(self.extra_figures(row) if what == "train" else {})
                    self.done_rows.add((what, row["name"]))
                    yield row

    def peak_bytes(self, name):
        """Peak memory: on cuda what one that is built holds and a step adds, else in a process of its own."""
        if not on_cuda(self.args):
            return peak_memory_cpu(name, self.args)
        _, step, _ = self.contestants[name]
        torch.cuda.reset_peak_memory_stats()
        bytes_before = torch.cuda.memory_allocated()
        step(self.x, self.y)
        return self.own_bytes[name] + peak_memory(self.args.device) - bytes_before

    def extra_figures(self, row):
        """What else is known of a training step: its share of the device's rate, its memory."""
        args, name = self.args, row["name"]
        figures = {"peak_bytes": self.peak_bytes(name)} if on_cuda(args) or args.memory else {}
        if not on_cuda(args):
            return figures
        model, _, _ = self.contestants[name]
        if name == "nanogpt":  # which is recipe=gpt2, counted by our formula
            model, _, _ = self.contestants.get("gpt2", (None, None, None))
        if model is not None:
            flops_per_s = model.flops_per_token() * row["tokens_per_s"]
            figures.update(share_of_matmul_rate=flops_per_s / (self.rate * 1e12),
                           mfu=mfu(model, row["tokens_per_s"], args.device, args.dtype))
        return figures


def contest_rows(args, rate):
    """Yield rows of all contestants, which take turns together."""
    contest = Contest(args, rate)
    for name in contest.builders:
        contest.build(name)
    yield from contest.rows()


def pair_rows(args, rate):
    """Yield rows of each contestant taking turns with the first alone; the first's own from one pair."""
    contest = Contest(args, rate)
    first, *other_names = contest.builders
    contest.build(first)
    for name in other_names:
        try:
            contest.build(name)
            yield from contest.rows()
        except Exception as e:
            yield failure(args.what, name, e)
        contest.drop(name)


def memory_rows(args):
    """Yield the peak memory of each contestant alone."""
    contest = Contest(args, None)
    for name in progress_bar(contest.builders, "memory"):
        try:
            if on_cuda(args):
                contest.build(name)
            yield dict(what="memory", name=name, peak_bytes=contest.peak_bytes(name))
        except Exception as e:
            yield failure("memory", name, e)
        contest.drop(name)


def failure(what, name, e):
    """The row of a contestant that an exception ended."""
    text = explain(e) or f"{type(e).__name__}: {' '.join(str(e).split())}"
    return dict(what=what, name=name, error=text.splitlines()[0][:300])


# ---- output ----

def line_of(row):
    """A line for a row, printed as soon as the row is made."""
    name = f"{row['what']:<8}{row['name']:<24}"
    if "error" in row:
        return f"{name}failed: {row['error']}"
    if row["what"] == "memory":
        return f"{name}{(row['peak_bytes'] or math.nan) / 2**20:>12,.0f} MiB"
    return time_line(row)


def table_of(rows):
    """The table of all rows but failures; None where nothing is left."""
    good = [row for row in rows if "error" not in row]
    if not good:
        return None
    if good[0]["what"] == "memory":
        return memory_table(good, rows[0]["name"])
    kinds = list(dict.fromkeys(row["what"] for row in good))
    return time_table(sorted(good, key=lambda row: kinds.index(row["what"])))


def memory_table(rows, reference):
    first = {row["name"]: row["peak_bytes"] for row in rows}.get(reference) or math.nan
    cells = []
    for r in rows:
        peak = r["peak_bytes"] or math.nan
        cells.append((r["name"], f"{peak / 2**20:,.0f} MiB", f"{peak / first:.2f}"))
    return table(("model", "peak memory", "ratio"), cells)


# ---- command line ----

def arguments(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--what", choices=["train", "decode", "train,decode", "memory"], metavar="WHAT",
                   help="train, decode, train,decode or memory (default: train,decode; with --mechanisms "
                        "train)")
    p.add_argument("--nanogpt", help="a checkout of nanoGPT, which is measured in the same run")
    p.add_argument("--task", choices=TASKS,
                   help="measure a step on this task, one on text, and how long drawing rows takes")
    p.add_argument("--recipes", nargs="+", choices=sorted(RECIPES), default=["gpt2", "modern"],
                   help="default: gpt2 modern; with --mechanisms the first one counts")
    p.add_argument("--mechanisms",
                   help="measure these against the plain GPT: all, or names with commas between, as "
                        "train.py takes them; all_on is everything together")
    p.add_argument("--own_mechanism", help="files with mechanisms of your own; --mechanisms=mine.py sets it")
    p.add_argument("--heads_off", nargs="+", type=float,
                   help="measure the plain GPT without these shares of its heads, each against the first")
    for name, cpu, cuda in SIZES:
        p.add_argument(f"--{name}", type=int, help=f"default {cpu} on cpu, {cuda} on cuda")
    p.add_argument("--vocab_size", type=int, default=256, help="default 256")
    p.add_argument("--decode_batch", type=int, default=1, help="texts that are decoded at once (default: 1)")
    p.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, mps")
    p.add_argument("--dtype", choices=["float32", "bfloat16"],
                   help="default float32 on cpu, bfloat16 on cuda")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction,
                   help="use torch.compile (default: on cuda, except on Windows)")
    p.add_argument("--compile_mode", choices=["default", *CUDA_GRAPHS], default="default",
                   help="of our training steps; the other two replay CUDA graphs")
    p.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True,
                   help="on a CPU, measure peak memory too, of each model in a process of its own")
    p.add_argument("--rounds", type=int, default=11, help="default 11")
    p.add_argument("--steps", type=int, default=10, help="training steps in a round (default: 10)")
    p.add_argument("--threads", type=int, default=torch.get_num_threads(),
                   help="threads of the CPU (default: as PyTorch has it)")
    p.add_argument("--json", help="write all figures to this file too, again with each row")
    return p.parse_args(argv)


def check(args):
    """Fill in what follows from the device. Raises UserError for the first argument that makes no sense."""
    args.device = pick_device(args.device)
    if args.task:
        if args.mechanisms or args.heads_off or args.nanogpt or args.what not in (None, "train"):
            raise UserError("--task times training steps of one plain GPT: leave out --mechanisms, "
                            "--heads_off, --nanogpt and --what")
        of_scale = configurator.read_file(str(ROOT / "config/task.py"))
        for name, *_ in SIZES:
            setattr(args, name, getattr(args, name) or of_scale[name])
        args.recipes, args.what, args.memory = ["modern"], "train", False
        args.vocab_size = TaskData({"task": args.task}, args.block_size).vocab_size
    for name, cpu, cuda in (*SIZES, ("dtype", "float32", "bfloat16")):
        if getattr(args, name) is None:
            setattr(args, name, cuda if on_cuda(args) else cpu)
    kind = torch.device(args.device).type
    args.compile = compiles(args, kind)
    check_compile(args, kind)
    sizes = [name for name, *_ in SIZES]
    for name in ("rounds", "steps", "threads", "decode_batch", "vocab_size", *sizes):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}={getattr(args, name)} must be at least 1")
        if getattr(args, name) > LARGEST:
            raise UserError(f"--{name}={getattr(args, name)} must be at most {LARGEST:,}")
    args.what = args.what or ("train" if args.mechanisms else "train,decode")
    if args.mechanisms:
        names = ["all", *mechanisms()]
        if unknown := sorted({*args.mechanisms.split(",")} - {*names}):
            raise UserError(f"--mechanisms: no {', '.join(unknown)}; there are {', '.join(names)}")
    if args.mechanisms and args.heads_off:
        raise UserError("--mechanisms and --heads_off are two different benchmarks: one at a time")
    if any(not 0 <= share < 1 for share in args.heads_off or ()):
        raise UserError("--heads_off takes shares from 0 to below 1")
    if args.json:
        args.json = str(writable(args.json))
    if args.nanogpt:
        nanogpt().check(args.nanogpt)
    if args.block_size < 2:
        raise UserError(f"--block_size={args.block_size} must be at least 2")


def run(args):
    """Measure what is asked for, print it, write it to --json. Raises UserError where something failed."""
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    allow_graphs()  # each contestant is one more of GPT.forward
    machine = torch.cuda.get_device_name() if on_cuda(args) else threads.describe_threads()
    print(f"torch {torch.__version__}, {machine}, {args.dtype}{', compiled' if args.compile else ''}: "
          f"{plural(args.n_layer, 'layer')}, {plural(args.n_head, 'head')}, {args.n_embd} wide, "
          f"context {args.block_size}, batch {args.batch_size}, vocabulary {args.vocab_size}"
          f"{nanogpt().setting(args) if args.nanogpt else ''}", flush=True)
    rate = None
    if args.what == "memory":
        rows = memory_rows(args)
    else:
        rate = matmul_rate(args) if on_cuda(args) else None
        rows = (pair_rows if args.mechanisms else contest_rows)(args, rate)
    finished_rows = []
    for row in rows:
        finished_rows.append(row)
        write(args, finished_rows, rate, finished=False)
        if args.mechanisms:  # which come one by one
            say(line_of(row), flush=True)
    write(args, finished_rows, rate, finished=True)
    if text := table_of(finished_rows):
        print(text)
    if rate:
        print(f"measured bf16 matrix product: {rate:.0f} TFLOP/s")
    if args.json:
        say(args.json)
    if failed_names := [row["name"] for row in finished_rows if "error" in row]:
        raise UserError(f"{len(failed_names)} failed: {', '.join(failed_names)}")


def write(args, rows, rate, finished):
    """Write the rows that were measured so far to --json. finished: whether these are all."""
    if args.json:
        write_json(args.json, dict(torch=torch.__version__, processor=threads.describe_threads(),
                                   arguments=vars(args), finished=finished,
                                   measured_matmul_tflops=rate, rows=rows))


@as_program("bench", "smaller sizes need less")
def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    if "--race" in argv:  # which has flags of its own
        return from_lab("lab.bench.race", "--race").main([arg for arg in argv if arg != "--race"])
    args = arguments(argv)
    own_mechanism.add_from_arguments(args)
    check(args)
    run(args)


if __name__ == "__main__":
    main()
