"""
How long a training step takes with oneDNN's products (nanoheads/cpu.py), and how long with PyTorch's own.

    python tests/onednn.py --scale tiny      # one thread, 25 rounds
    python tests/onednn.py --scale 124M --steps 1 --rounds 3

One model takes steps as bench.py's do, in turns with and without. Times are of the processor, not of the
wall, for a machine that is shared. It is no test: another processor has other times.
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import bench
from nanoheads import cpu, kernels
from nanoheads.common import keep_freed_memory
from nanoheads.timing import time_action, time_rows

SIZES = {"tiny": (2, 4, 64, 128, 16, 256), "nano": (3, 6, 96, 128, 16, 256), "1M": (5, 8, 128, 128, 16, 256),
         "124M": (12, 12, 768, 1024, 1, 50304)}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--scale", choices=SIZES, default="tiny")
    p.add_argument("--rounds", type=int, default=25)
    p.add_argument("--steps", type=int, default=10)
    mine = p.parse_args()
    sizes = zip(("n_layer", "n_head", "n_embd", "block_size", "batch_size", "vocab_size"), SIZES[mine.scale])
    args = bench.arguments(["--device=cpu", "--threads=1", *(f"--{name}={value}" for name, value in sizes)])
    bench.check(args)
    torch.set_num_threads(1)
    cpu.ONEDNN = True  # on Intel too, where its products are not taken
    keep_freed_memory()
    _, step, _ = bench.gpt_builder("modern", args)()
    x, y = bench.batch(args)
    ways = {"oneDNN": kernels.onednn_is_faster, "PyTorch": lambda x, weight: False}
    seconds = {name: [] for name in ways}
    for turn in range(1 + mine.rounds):
        for name, kernels.onednn_is_faster in ways.items():
            took = time_action(lambda: [step(x, y) for _ in range(mine.steps)], "cpu", time.process_time)
            if turn:  # the first one warms up
                seconds[name].append(took)
    print(f"torch {torch.__version__}, {bench.threads.describe_threads()}, {mine.scale}, {mine.rounds} "
          f"rounds of {mine.steps} steps, load {os.getloadavg()[1]:.1f}")
    for row in time_rows("train", seconds, "oneDNN", mine.steps * x.numel(), mine.steps):
        print(f"{row['name']:<8} {row['ms']:9.1f} ms  {row['time_ratio']:.2f} "
              f"[{row['time_ratio_low']:.2f}, {row['time_ratio_high']:.2f}]")


if __name__ == "__main__":
    main()
