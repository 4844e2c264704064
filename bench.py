"""
Speed and memory, as ratios measured in one run: training step and cached decoding.

    python bench.py                                   # our recipes against the plain GPT (recipe=gpt2)
    python bench.py --nanogpt ../nanoGPT              # nanoGPT in the same run, and the ratios are to it
    python bench.py --n_layer 6 --n_head 6 --n_embd 384 --block_size 256 --what decode --nanogpt ../nanoGPT
    python bench.py --race --nanogpt ../nanoGPT       # train both to the loss that nanoGPT's README names
    python bench.py --mechanisms all --recipes modern # every mechanism against the plain GPT of one recipe
    python bench.py --mechanisms acag,output_gate --what memory --block_size 4096 --batch_size 1
    python bench.py --mechanisms=mine.py              # one in a file of your own (docs/add-a-mechanism.md)
    python bench.py --heads_off 0 .25 .5 .75          # the plain GPT with heads pruned
    python bench.py --contexts 1024 4096 16384        # decoding after so many: routing that skips or not
    python bench.py --contexts 128 1024 --nanogpt ../nanoGPT     # and nanoGPT, which reads all again

Contestants take turns, a few steps each, round after round: a machine that slows down slows all of them.
The ratio of a round is within that round; what is printed is the median over rounds with a 95 % interval
(order statistics of the median). A time alone means nothing on a shared machine.

With --mechanisms each takes turns with the plain GPT alone, and is gone before the next is built. Rows are
printed and written (--json) as they are made, so that a run that is stopped keeps them. One that fails is a
row too.
"""

import argparse
import math
import sys
from pathlib import Path

from nanoheads import threads  # before torch, whose threads it has wait briefly

import torch

from model import MECHANISMS, RECIPES
from nanoheads.common import UserError, last_words, output_written, pick_device, table, writable, write_json
from nanoheads.hub import own_mechanism
from nanoheads.kernels import allow_graphs
from nanoheads.timing import on_cuda
from nanoheads.training.contest import MORE, contest_rows, decode_rows, matmul_rate, memory_rows, pair_rows
from nanoheads.training.optim import CUDA_GRAPHS
from nanoheads.training.race import race

# option, default on cpu, default on cuda
SIZES = (("n_layer", 4, 12), ("n_head", 4, 12), ("n_embd", 128, 768), ("block_size", 64, 1024),
         ("batch_size", 12, 32))
LARGEST = 2**31 - 1  # of any count: what is above fits no machine, and is no number for torch


# ---- output ----

def line_of(row):
    """A row as soon as it is made."""
    if "error" in row:
        text = f"failed: {row['error']}"
    elif row["what"] == "memory":
        text = f"{(row['peak_bytes'] or math.nan) / 2**20:>12,.0f} MiB"
    else:
        text = (f"{row['tokens_per_s']:>12,.0f} tokens/s  {row['time_ratio']:.3f} "
                f"[{row['time_ratio_low']:.3f}, {row['time_ratio_high']:.3f}] of {row['reference']}'s time")
    return f"{row['what']:<8}{row['name']:<24}{text}"


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


def time_table(rows):
    """Times; of training steps also peak memory and the share of the device's rate, where measured."""
    interval = "[95 %]" if rows[0]["rounds"] >= 6 else "[range]"
    head = ["work", "model", "tokens/s", "ms", f"time ratio {interval}", "speed"]
    cells = [[r["what"], r["name"], f"{r['tokens_per_s']:,.0f}", f"{r['ms']:.3f}",
              f"{r['time_ratio']:.3f} [{r['time_ratio_low']:.3f}, {r['time_ratio_high']:.3f}]",
              f"{1 / r['time_ratio']:.2f}x"] for r in rows]
    if first := rows[0].get("peak_bytes"):
        head += ["peak memory", "ratio"]
        for row, r in zip(cells, rows):
            peak = r.get("peak_bytes")
            row += [f"{peak / 2**20:,.0f} MiB", f"{peak / first:.2f}"] if peak else ["", ""]
    for key, title in (("share_of_matmul_rate", "of the measured rate"), ("mfu", "MFU")):
        if any(r.get(key) for r in rows):
            head.append(title)
            for row, r in zip(cells, rows):
                row.append(f"{r[key]:.1%}" if r.get(key) else "")
    return table(head, cells, left=2)


# ---- command line ----

def arguments(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--what", choices=["train", "decode", "train,decode", "memory"],
                   help="default train,decode; with --mechanisms train")
    p.add_argument("--nanogpt", help="a nanoGPT checkout to run side by side")
    p.add_argument("--recipes", nargs="+", choices=sorted(RECIPES), default=["gpt2", "modern"])
    p.add_argument("--mechanisms",
                   help="all, or names of model.MECHANISMS, all_on, routing_packed, with commas between: "
                        "each against the first of --recipes")
    p.add_argument("--own_mechanism", help="files with mechanisms; --mechanisms=mine.py sets it")
    p.add_argument("--heads_off", nargs="+", type=float,
                   help="shares of pruned heads, from 0 to below 1, each against the first")
    p.add_argument("--contexts", nargs="+", type=int,
                   help="decode one token after so many, with routing dense and skipping; with --nanogpt "
                        "the recipes beside it")
    p.add_argument("--race", action="store_true",
                   help="train both to nanoGPT's published loss (needs --nanogpt, its data prepared)")
    p.add_argument("--seeds", type=int, default=3, help="race: how many")
    p.add_argument("--iters", type=int, default=175, help="race: our training steps")
    for name, cpu, cuda in SIZES:
        p.add_argument(f"--{name}", type=int, help=f"default {cpu} on cpu, {cuda} on cuda")
    p.add_argument("--vocab_size", type=int, default=256)
    p.add_argument("--decode_batch", type=int, default=1, help="texts that are decoded at once")
    p.add_argument("--device", default="auto")
    p.add_argument("--dtype", choices=["float32", "bfloat16"],
                   help="default float32 on cpu, bfloat16 on cuda")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default on cuda only")
    p.add_argument("--compile_mode", choices=["default", *CUDA_GRAPHS], default="default",
                   help="of our training steps; all but default replay CUDA graphs")
    p.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True,
                   help="on cpu: measure peak memory too, a process each")
    p.add_argument("--rounds", type=int, default=11)
    p.add_argument("--steps", type=int, default=10, help="training steps in a round")
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--json", help="write all figures to this file, anew with each row")
    return p.parse_args(argv)


def check(args):
    """Fill in what follows from the device. Raises UserError for the first argument that makes no sense."""
    args.device = pick_device(args.device)
    for name, cpu, cuda in (*SIZES, ("dtype", "float32", "bfloat16"), ("compile", False, True)):
        if getattr(args, name) is None:
            setattr(args, name, cuda if on_cuda(args) else cpu)
    sizes = [name for name, *_ in SIZES]
    for name in ("rounds", "steps", "threads", "seeds", "iters", "decode_batch", "vocab_size", *sizes):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}={getattr(args, name)} must be at least 1")
        if getattr(args, name) > LARGEST:
            raise UserError(f"--{name}={getattr(args, name)} must be at most {LARGEST:,}")
    args.what = args.what or ("train" if args.mechanisms else "train,decode")
    if args.mechanisms:
        if unknown := sorted({*args.mechanisms.split(",")} - {"all", *MECHANISMS, *MORE}):
            known = ", ".join(["all", *MECHANISMS, *MORE])
            raise UserError(f"--mechanisms: no {', '.join(unknown)}; there are {known}")
    if sum(map(bool, (args.mechanisms, args.heads_off, args.contexts, args.race))) > 1:
        raise UserError("--mechanisms, --heads_off, --contexts and --race are four different benchmarks: "
                        "one at a time")
    if any(not 0 <= share < 1 for share in args.heads_off or ()) or any(
            not 1 <= n <= LARGEST for n in args.contexts or ()):
        raise UserError("--heads_off takes shares from 0 to below 1, --contexts positive numbers up to "
                        f"{LARGEST:,}")
    if args.json:
        args.json = str(writable(args.json))
    if args.race and not args.nanogpt or args.nanogpt and not (Path(args.nanogpt) / "model.py").is_file():
        raise UserError("--nanogpt must name a nanoGPT checkout (a folder with model.py)")
    if args.block_size < 2:
        raise UserError(f"--block_size={args.block_size} must be at least 2")


def run(args):
    """Measure what is asked for, print it, write it to --json. Raises UserError where something failed."""
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    allow_graphs()  # each contestant is one more of GPT.forward
    if args.race:
        print(f"torch {torch.__version__}, {threads.on_processor()}, float32: "
              "nanoGPT's CPU setting (4 layers, 4 heads, 128 wide, context 64, batch 12)")
        write(args, race(args), dict(seeds=args.seeds, iters=args.iters))
        return
    machine = torch.cuda.get_device_name() if on_cuda(args) else threads.on_processor()
    print(f"torch {torch.__version__}, {machine}, {args.dtype}{', compiled' if args.compile else ''}: "
          f"{args.n_layer} layers, {args.n_head} heads, {args.n_embd} wide, "
          f"context {args.block_size}, batch {args.batch_size}, vocabulary {args.vocab_size}", flush=True)
    rate = None
    if args.contexts:
        rows = decode_rows(args)
    elif args.what == "memory":
        rows = memory_rows(args)
    else:
        rate = matmul_rate(args) if on_cuda(args) else None
        rows = (pair_rows if args.mechanisms else contest_rows)(args, rate)
    done = []
    for row in rows:
        done.append(row)
        write(args, done, vars(args), rate)
        if args.mechanisms or args.contexts:  # which come one by one
            print(line_of(row), flush=True)
    print(table_of(done))
    if rate:
        print(f"measured bf16 matrix product: {rate:.0f} TFLOP/s")
    if args.json:
        print(args.json)
    if failed := [row["name"] for row in done if "error" in row]:
        raise UserError(f"{len(failed)} failed: {', '.join(failed)}")


def write(args, rows, arguments, rate=None):
    """What is measured so far, into --json."""
    if args.json:
        write_json(args.json, dict(torch=torch.__version__, processor=threads.on_processor(),
                                   arguments=arguments,
                                   measured_matmul_tflops=rate, rows=rows))


@output_written("bench")
def main(argv=None):
    with last_words("bench", "smaller sizes need less"):
        args = arguments(own_mechanism.take(sys.argv[1:] if argv is None else argv))
        check(args)
        run(args)


if __name__ == "__main__":
    main()
