"""
Does a longer context help? Loss by position within disjoint windows.

Contexts beyond the training length take rotary positions; ACAG's length and a window stay those of the
training.
"""

import sys

import numpy as np

from nanoheads.common import table
from nanoheads.intervals import over_windows
from nanoheads.probes.runs import (about_windows, beyond, numbers_of, open_runs, plus_minus,
                                   position_in_windows, token_nats)
from nanoheads.training.scoring import windows_of


def rows_of(run, nats, first, window, position, n_windows):
    """A dict for each range of positions, and for all: of a run's nats [n], and less the first run's [n].

    first: None for the first run itself. window, position [n]: of position_in_windows().
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
                         over_first=over, beyond_training=b is not None and end >= run.trained))
    return rows


def position_table(runs, rows, unit):
    """A line for each range of positions of each run."""
    over = ["over the first"] * (len(runs) > 1)
    cells = []
    for run, run_rows in zip(runs, rows):
        for r in run_rows:
            span = r["positions"]
            span = span if span == "all" else "-".join(f"{x:,}" for x in sorted(set(span)))
            cells.append((run.name, span, f"{r['tokens']:,}", plus_minus(r["nats_per_token"], 4, sign=False),
                          *[plus_minus(r["over_first"], 4) for _ in over], beyond(r)))
    return table(("run", "positions", "tokens", f"nats/{unit}", *over, ""), cells)


def probe(args):
    """Loss by position in the window."""
    runs, data, context = open_runs(args, args.context)
    cuts = windows_of(data, args.split, context, 0, args.tokens)
    window, position = position_in_windows(cuts)
    nats = [token_nats(run, data, args, progress=sys.stderr.isatty()) for run in runs]
    rows = [rows_of(run, each, None if run is runs[0] else nats[0], window, position, len(cuts))
            for run, each in zip(runs, nats)]
    unit = "byte" if data.meta["encoding"] == "byte" else "token"
    lines = [about_windows(data, args, cuts, context), position_table(runs, rows, unit)]
    return numbers_of(runs, data, args, rows), lines
