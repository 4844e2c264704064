"""Measures times, as ratios of actions that take turns, and peak memory; and shows how far a program is."""

import math
import re
import statistics
import sys
import time
from contextlib import suppress
from io import StringIO
from pathlib import Path

import torch
from tqdm import tqdm

from nanoheads.common import say, table


def on_cuda(args):
    return torch.device(args.device).type == "cuda"


LINE_EVERY = 30  # seconds, of progress that goes into a file


class Lines(tqdm):
    """A bar for a standard error that is no terminal: a line of it every LINE_EVERY seconds, else nothing."""

    def display(self, msg=None, pos=None):
        if self.n and self.total and msg is None:
            elapsed = self.format_dict["elapsed"]
            remaining = tqdm.format_interval((self.total - self.n) * elapsed / self.n)
            say(f"{self.desc}: {self.n:,} of {self.total:,}, {tqdm.format_interval(elapsed)} so far, about "
                f"{remaining} left", file=sys.stderr, flush=True)


def progress_bar(items, what):
    """A tqdm over items, or one that counts up to `items`, a number, with update(); without a terminal it
    prints Lines.
    """
    is_count = isinstance(items, int)
    options = dict(desc=what, total=items if is_count else None, leave=False)
    if not sys.stderr.isatty():
        return Lines(None if is_count else items, mininterval=LINE_EVERY, miniters=1, file=StringIO(),
                     **options)
    return tqdm(None if is_count else items, mininterval=0.5 if is_count else 0.1, **options)


def time_action(action, device, clock=time.perf_counter):
    """Seconds that action() takes, the device's work included."""
    kind = torch.device(device).type
    wait = getattr(torch, kind).synchronize if kind in ("cuda", "mps") else lambda: None
    wait()
    start = clock()
    action()
    wait()
    return clock() - start


def take_turns(names, action, args, what):
    """{name: [seconds of action(name), a round each]}, the contestants taking turns."""
    seconds = {name: [] for name in names}
    for name in names:  # warm up: compilation, allocation, caches
        action(name)
        action(name)
    for _ in progress_bar(range(args.rounds), what):
        for name in names:
            seconds[name].append(time_action(lambda: action(name), args.device))
    return seconds


def median_interval(values):
    """Median and its 95 % interval from order statistics (from 6 values on; below that the range)."""
    s, n = sorted(values), len(values)
    cut = 0
    while cut < (n - 1) // 2 and 2 * sum(math.comb(n, i) for i in range(cut + 2)) / 2**n <= 0.05:
        cut += 1
    return statistics.median(s), s[cut], s[n - 1 - cut]


def time_rows(what, seconds, reference, tokens, repeats):
    """A row for each name in `seconds`, of take_turns(); a round was `tokens` tokens in `repeats` actions."""
    rows = []
    for name, times in seconds.items():
        median = statistics.median(times)
        ratio, low, high = median_interval([a / b for a, b in zip(times, seconds[reference])])
        rows.append(dict(what=what, name=name, tokens_per_s=tokens / median, ms=1000 * median / repeats,
                         time_ratio=ratio, time_ratio_low=low, time_ratio_high=high,
                         reference=reference, rounds=len(times)))
    return rows


def time_line(row):
    """A row of time_rows() in a line."""
    return (f"{row['what']:<8}{row['name']:<24}{row['tokens_per_s']:>12,.0f} tokens/s  "
            f"{row['time_ratio']:.3f} [{row['time_ratio_low']:.3f}, {row['time_ratio_high']:.3f}] "
            f"of {row['reference']}'s time")


def time_table(rows):
    """The table of time_rows(); of training steps also peak memory and the share of the device's rate, where
    measured.
    """
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


def peak_memory(device):
    """Peak bytes of this process so far: allocated on a cuda device, else resident; None where not known."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError, TypeError):  # Linux, where getrusage begins with the parent's peak
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return 2**10 * int(re.search(r"VmHWM:\s*(\d+)", status)[1])
    try:
        import resource  # not on every system
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 2**10)


# Dense bf16 peaks in TFLOP/s by a part of the device's name, from NVIDIA's datasheets; the first counts.
PEAK_TFLOPS = (("B200", 2250), ("GH200", 989), ("H200", 989), ("H100 PCIe", 756), ("H100 NVL", 835),
               ("H100", 989), ("A100", 312), ("L40S", 362), ("L40", 181), ("L4", 121), ("A10G", 70),
               ("A10", 125), ("RTX 4090", 165), ("RTX 3090", 71))


def mfu(model, tokens_per_s, device, dtype):
    """Share of the device's peak that this training speed is; None where the peak is not known."""
    if torch.device(device).type != "cuda" or dtype == "float32":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((tflops for part, tflops in PEAK_TFLOPS if part in name), None)
    return None if peak is None else tokens_per_s * model.flops_per_token() / (peak * 1e12)
