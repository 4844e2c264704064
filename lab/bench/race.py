"""
Measure how soon nanoGPT and recipe=modern reach the loss that nanoGPT's README names, on a CPU.

    python bench.py --race --nanogpt ../nanoGPT --seeds 5
    python bench.py --race --nanogpt ../nanoGPT --dtype bfloat16 --compile    # only recipe=modern trains so

Each side trains by its own train.py as its users would, in turn, at the CPU setting of nanoGPT's README, and
is scored on all of validation in float32. Both need shakespeare_char prepared, each by its own script. The
time of our loop is without compilation, that of the process is with it.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from nanoheads import checkpoint, threads
from nanoheads.common import ROOT, UserError, say, writable, write_json
from nanoheads.dataset import Dataset
from nanoheads.scoring import score
from lab.bench import nanogpt

# nats per character: what nanoGPT's README reports after 2,000 iterations of its CPU setting
REFERENCE_LOSS = 1.886


def race(args):
    """Train both with each seed, print a line for each run, and compare them. UserError."""
    rows, data, out = [], Dataset("shakespeare_char"), Path("out/race").resolve()
    out.mkdir(parents=True, exist_ok=True)
    for seed in range(1337, 1337 + args.seeds):
        row = dict(seed=seed)
        for name in ("nanogpt", "modern") if seed % 2 else ("modern", "nanogpt"):
            folder = out / f"{name}-{seed}"
            if name == "nanogpt":
                steps, loop, process = 2000, *race_nanogpt(args.nanogpt, seed, folder)
            else:
                steps, loop, process = args.iters, *race_modern(args, seed, folder)
            model = checkpoint.build(checkpoint.read(folder / "ckpt.pt"), folder)
            nats, count = score(model, data, "val")
            result = dict(steps=steps, val_loss=nats / count, loop_s=loop, process_s=process)
            row.update({f"{key}_{name}": value for key, value in result.items()})
            print(f"seed {seed}  {name:<8} {steps:>5} steps  val {nats / count:.4f} nats/char "
                  f"over {count:,}  loop {loop:6.1f} s  process {process:6.1f} s", flush=True)
        rows.append(row)
        if args.json:
            write_json(args.json, dict(torch=torch.__version__, processor=threads.describe_threads(),
                                       arguments=dict(seeds=args.seeds, iters=args.iters, dtype=args.dtype,
                                                      compile=args.compile),
                                       rows=rows, finished=len(rows) == args.seeds))
    for part in ("loop", "process"):
        ratios = [r[f"{part}_s_modern"] / r[f"{part}_s_nanogpt"] for r in rows]
        print(f"wall time of the {part}: {statistics.mean(ratios):.3f} of nanoGPT's "
              f"(each seed: {', '.join(f'{x:.3f}' for x in ratios)})")
    modern_loss = statistics.mean(r["val_loss_modern"] for r in rows)
    nanogpt_loss = statistics.mean(r["val_loss_nanogpt"] for r in rows)
    print(f"mean val loss: modern {modern_loss:.4f} after {args.iters} steps, nanoGPT {nanogpt_loss:.4f} "
          f"after 2,000; {REFERENCE_LOSS} {'reached' if modern_loss <= REFERENCE_LOSS else 'not reached'}")


def race_nanogpt(path, seed, folder):
    """(seconds of the loop, of the process) of its README's CPU command."""
    # its seed is fixed in the script, so each run gets another by text
    source = (Path(path) / "train.py").read_text()
    source = source.replace("torch.manual_seed(1337", f"torch.manual_seed({seed}")
    options = ("--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0 "
               "--device=cpu --compile=False --eval_iters=1 --eval_interval=2000 --log_interval=10 "
               "--max_iters=2000 --lr_decay_iters=2000 --always_save_checkpoint=True")
    lines = run_timed(["-c", f"__file__ = 'train.py'\n{source}", "config/train_shakespeare_char.py",
                       *options.split(), f"--out_dir={folder}"], path)
    stamps = [seconds for seconds, line in lines if re.match(r"iter \d+:", line)]
    return stamps[-1] - stamps[0], lines[-1][0]


def race_modern(args, seed, folder):
    """(seconds of the loop, of the process) of our config for the same model."""
    lines = run_timed([str(ROOT / "train.py"), "config/shakespeare_cpu.py", "--device=cpu",
                       f"--dtype={args.dtype}", f"--compile={args.compile}",
                       f"--max_iters={args.iters}", "--eval_interval=1000000", "--eval_tokens=1000",
                       f"--seed={seed}", f"--out_dir={folder}", "--overwrite"], ROOT)
    log = (folder / "log.jsonl").read_text().splitlines()
    return json.loads(log[-1])["elapsed_s"], lines[-1][0]


def run_timed(command, folder):
    """[(seconds since the start, line)] of a Python command's output, with one more entry for its end."""
    start_time, lines = time.perf_counter(), []
    process = subprocess.Popen([sys.executable, "-u", *command], cwd=folder, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in process.stdout:
        lines.append((time.perf_counter() - start_time, line.rstrip()))
    if process.wait():
        raise UserError(f"{command[0][:40]} failed: {process.stderr.read()[-800:]}")
    return lines + [(time.perf_counter() - start_time, "")]


def arguments(argv):
    p = argparse.ArgumentParser(prog="bench.py --race", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--nanogpt", required=True, help="a checkout of nanoGPT")
    p.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    p.add_argument("--iters", type=int, default=175, help="training steps of recipe=modern (default: 175)")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32",
                   help="of recipe=modern (default: float32)")
    p.add_argument("--compile", action="store_true", help="compile the training step of recipe=modern")
    p.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of the scoring")
    p.add_argument("--json", help="write all figures to this file too, again with each seed")
    return p.parse_args(argv)


def main(argv):
    """What `bench.py --race` does with the other arguments. Raises UserError."""
    args = arguments(argv)
    for name in ("seeds", "iters", "threads"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}={getattr(args, name)} must be at least 1")
    nanogpt.check(args.nanogpt)
    if args.json:
        args.json = str(writable(args.json))
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    print(f"torch {torch.__version__}, {threads.describe_threads()}, "
          f"{args.dtype}{', compiled' if args.compile else ''}; nanoGPT float32, not compiled: "
          "nanoGPT's CPU setting (4 layers, 4 heads, 128 wide, context 64, batch 12)")
    race(args)
    if args.json:
        say(args.json)
