"""
Does a longer context help? Loss by position within disjoint windows.

Contexts beyond the training length take rotary positions; ACAG's length and a window stay those of the
training. What stands at one position is other text than at another. So --cut K scores the second half of
each window once more, the same tokens with the K to 2 K - 1 tokens before each alone, and says how much
worse that is.
"""

import sys

import numpy as np
import torch

from nanoheads.common import UserError
from nanoheads.scoring import nats_of_last, refuse_replaced, window_ids, windows_of
from lab.probes.intervals import over_windows
from lab.probes.shared import (CONTEXT, OVER, about_windows, ask, beyond, finite, numbers_of,
                               open_checkpoints, plus_minus, position_in_windows, positive, run_table,
                               token_nats)


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


def with_less(ckpt, data, args, cuts, context):
    """(nats [n] of the second half of each whole window with a cut context, the number of its window [n]).

    Token t of a window sees what it would see in windows of 2 K that move on by K and score their last K.
    """
    tokens, K, half = data.tokens(args.split), args.cut, context // 2
    device, found = next(ckpt.model.parameters()).device, []
    whole = [number for number, (start, end, _) in enumerate(cuts) if end - start == context]
    for number in whole:
        start = cuts[number][0]
        ids = np.stack([window_ids(tokens, data.separator, end - 2 * K, end)
                        for end in range(start + half + K, start + context + 1, K)])
        with torch.no_grad():
            found.append(nats_of_last(ckpt.model, torch.from_numpy(ids).to(device), K).reshape(-1))
    refuse_replaced()
    return finite(np.concatenate(found), ckpt), np.repeat(whole, half)


def cut_row(ckpt, data, args, cuts, context, nats, window, position):
    """What a longer context gains: a dict. nats, window, position [n]: of every token that was scored."""
    less, number = with_less(ckpt, data, args, cuts, context)
    chosen = (position >= context // 2) & np.isin(window, number)
    return dict(context=[args.cut, 2 * args.cut - 1], positions=[context // 2, context - 1], tokens=len(less),
                nats_per_token=over_windows(less, number, len(cuts)),
                over_longer=over_windows(less - nats[chosen], number, len(cuts)))


def cut_columns(unit):
    """Of the table of cut_row()s."""
    return [("positions", lambda r: "{:,}-{:,}".format(*r["positions"])),
            ("context", lambda r: "{:,}-{:,}".format(*r["context"])),
            ("tokens", lambda r: f"{r['tokens']:,}"),
            (f"nats/{unit}", lambda r: plus_minus(r["nats_per_token"], sign=False)),
            ("over the whole context", lambda r: plus_minus(r["over_longer"]))]


def probe(args):
    """Loss by position in the window."""
    ckpts, data, context = open_checkpoints(args, args.context)
    if args.cut and context % (2 * args.cut):
        raise UserError(f"--cut={args.cut} must divide half of the context, {context // 2:,}")
    cuts = windows_of(data, args.split, context, 0, args.tokens)
    window, position = position_in_windows(cuts)
    nats = [token_nats(ckpt, data, args, progress=sys.stderr.isatty()) for ckpt in ckpts]
    rows = [rows_of(ckpt, each, None if ckpt is ckpts[0] else nats[0], window, position, len(cuts))
            for ckpt, each in zip(ckpts, nats)]
    unit = "byte" if data.meta["encoding"] == "byte" else "token"
    lines = [about_windows(data, args, cuts, context), run_table(ckpts, rows, columns(unit))]
    if args.cut:
        more = [[cut_row(ckpt, data, args, cuts, context, each, window, position)]
                for ckpt, each in zip(ckpts, nats)]
        lines += ["", run_table(ckpts, more, cut_columns(unit))]
        rows = [[*own, *cut] for own, cut in zip(rows, more)]
    return numbers_of(ckpts, data, args, rows), lines


def main(argv):
    ask("late", probe, "test", argv,
        context=CONTEXT,
        tokens=(int, 262144, "tokens to score, in evenly spaced windows; 0: all"),
        cut=(positive, None, "score the second half of windows once more with so many tokens before each"))
