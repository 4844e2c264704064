"""
What each hand-written gradient of nanoheads/cpu.py gives: a training step with it against one without it.

    python tests/cpu_gradients.py --scale tiny                          # one thread, 25 rounds
    python tests/cpu_gradients.py --scale tiny --mechanism short_conv   # and the short convolution's
    python tests/cpu_gradients.py --scale 124M --steps 1 --rounds 5

One model takes steps as bench.py's do, and in turns one gradient after the other is PyTorch's own. Times are
of the processor, not of the wall, for a machine that is shared. A ratio of 1.08 means that a step without it
takes 8 % longer. It is no test: another processor has other times.
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.nn import functional as F

import bench
from model import MECHANISMS
from nanoheads import kernels
from nanoheads.common import keep_freed_memory
from nanoheads.timing import progress_bar, time_rows, timed

SIZES = {"tiny": (2, 4, 64, 128, 16, 256), "nano": (3, 6, 96, 128, 16, 256), "1M": (5, 8, 128, 128, 16, 256),
         "124M": (12, 12, 768, 1024, 1, 50304)}


def heads(qkv, cos, sin, _):
    qk, v = qkv.split_with_sizes((2, 1), 2)
    q, k = kernels.normed_and_rotated(qk, True, (cos, sin)).transpose(1, 3).unbind(2)
    return q, k, v.squeeze(2).transpose(1, 2)


def convolution(*args):
    before, kernels.eager_on_cpu = kernels.eager_on_cpu, lambda x: False
    try:
        return kernels.short_convolution(*args)
    finally:
        kernels.eager_on_cpu = before


PLAIN = {"CpuRMSNorm": lambda x, eps: F.rms_norm(x, (x.size(-1),), eps=eps),
         "CpuSquaredReLU": lambda x: F.relu(x).square(),
         "CpuHeads": heads,
         "CpuShortConvolution": convolution,
         "CpuLinear": F.linear}
OURS = {name: getattr(kernels, name) for name in PLAIN}


class Plain:
    """Stands in for a torch.autograd.Function of this name."""

    def __init__(self, name):
        self.apply = PLAIN[name]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--scale", choices=SIZES, default="tiny")
    p.add_argument("--mechanism", choices=MECHANISMS)
    p.add_argument("--recipe", default="modern")
    p.add_argument("--rounds", type=int, default=25)
    p.add_argument("--steps", type=int, default=10)
    mine = p.parse_args()
    sizes = zip(("n_layer", "n_head", "n_embd", "block_size", "batch_size", "vocab_size"), SIZES[mine.scale])
    args = bench.arguments([f"--{name}={value}" for name, value in sizes])
    args.device, args.rounds, args.steps, args.threads = "cpu", mine.rounds, mine.steps, 1
    bench.check(args)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    keep_freed_memory()
    model, step, _ = bench.ours(mine.recipe, args, MECHANISMS.get(mine.mechanism, {}))()
    x, y = bench.batch(args)
    small = [name for name in PLAIN if name != "CpuLinear"]
    without = {"all": [], **{name: [name] for name in PLAIN}, "all but CpuLinear": small}
    if mine.mechanism != "short_conv":
        del without["CpuShortConvolution"]

    def take(name):
        for each in PLAIN:
            setattr(kernels, each, Plain(each) if each in without[name] else OURS[each])
        for _ in range(args.steps):
            step(x, y)
    seconds = {name: [] for name in without}
    for name in without:
        take(name)  # to warm up
    for _ in progress_bar(range(args.rounds), "rounds"):
        for name in without:
            seconds[name].append(timed(lambda: take(name), args.device, time.process_time))
    print(f"torch {torch.__version__}, {bench.threads.on_processor()}, {mine.scale}, {mine.recipe}, "
          f"{mine.mechanism or 'plain'}, {args.rounds} rounds of {args.steps} steps, "
          f"load {os.getloadavg()[1]:.1f}: time without it, of a step with all")
    for row in time_rows("train", seconds, "all", args.steps * x.numel(), args.steps):
        print(f"{row['name']:<20} {row['ms']:9.1f} ms  {row['time_ratio']:.3f} "
              f"[{row['time_ratio_low']:.3f}, {row['time_ratio_high']:.3f}]", flush=True)


if __name__ == "__main__":
    main()
