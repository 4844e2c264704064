"""
Does a longer context help? Loss by position within disjoint windows.

Contexts beyond the training length take rotary positions; ACAG's length and a window stay those of the
training.
"""

import sys

import numpy as np

from nanoheads.scoring import windows_of
from lab.probes.intervals import over_windows
from lab.probes.shared import (CONTEXT, OVER, about_windows, ask, beyond, numbers_of, open_checkpoints,
                               plus_minus, position_in_windows, run_table, token_nats)


def rows_of(ckpt, nats, first, window, position, n_windows):
    """A dict for each range of positions, and for all: nats [n] of a checkpoint, and less those of the first.

    first: the first one's nats [n]; None: this is the first. window, position [n]: of position_in_windows().
    """
    rows, bucket = [], np.frexp(position)[1]  # 0 | 1 | 2-3 | 4-7 | ...
    for b in [*np.unique(bucket), None]:
        chosen = np.full(len(bucket), True) if b is None else bucket == b
        start, end = int(position[chosen].min()), int(position[chosen].max())
        over = None
        if first is not None:
            over = over_windows((nats - first)[chosen], window[chosen], n_windows)
        rows.append(dict(positions="all" if b is None else [start, end], tokens=int(chosen.sum()),
                         nats_per_token=over_windows(nats[chosen], window[chosen], n_windows),
                         over_first=over, beyond_training=b is not None and end >= ckpt.trained))
    return rows


def columns(unit):
    """Of the table with a line for each range of positions, see run_table()."""
    def span(row):
        ends = row["positions"]
        return ends if ends == "all" else "-".join(f"{x:,}" for x in sorted(set(ends)))
    return [("positions", span),
            ("tokens", lambda r: f"{r['tokens']:,}"),
            (f"nats/{unit}", lambda r: plus_minus(r["nats_per_token"], sign=False)),
            (OVER, lambda r: plus_minus(r["over_first"])),
            ("", beyond)]


def probe(args):
    """Loss by position in the window."""
    ckpts, data, context = open_checkpoints(args, args.context)
    cuts = windows_of(data, args.split, context, 0, args.tokens)
    window, position = position_in_windows(cuts)
    nats = [token_nats(ckpt, data, args, progress=sys.stderr.isatty()) for ckpt in ckpts]
    rows = [rows_of(ckpt, each, None if ckpt is ckpts[0] else nats[0], window, position, len(cuts))
            for ckpt, each in zip(ckpts, nats)]
    unit = "byte" if data.meta["encoding"] == "byte" else "token"
    lines = [about_windows(data, args, cuts, context), run_table(ckpts, rows, columns(unit))]
    return numbers_of(ckpts, data, args, rows), lines


def main(argv):
    ask("late", probe, "test", argv,
        context=CONTEXT,
        tokens=(int, 262144, "tokens to score, in evenly spaced windows; 0: all"))
