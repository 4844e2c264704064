"""
What all probes share: checkpoints opened at one context, windows of their text, and what is written of them.

A probe is a function probe(args) -> (what --json writes, the lines that are printed).
"""

import argparse
import sys
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from model import GPT
from nanoheads import checkpoint
from nanoheads.common import (ArgumentParser, UserError, last_words, pick_device, say, table, writable,
                              write_json)
from nanoheads.scoring import (LOGITS_AT_ONCE, add_arguments, at_context, load, nats_of_last, refuse_replaced,
                               score, window_ids, windows)


class Checkpoint(NamedTuple):
    """A checkpoint, loaded: what it is called, the model, and the context that it was trained on."""
    name: str
    model: GPT
    trained: int


# ---- checkpoints and windows ----

def open_checkpoints(args, context=None):
    """([Checkpoint], Dataset, context), all at one context (None: the shortest training). UserError."""
    loaded = [load(path, args.split, 0, args.device, args.dataset, args.settings) for path in args.ckpt]
    _, _, data = loaded[0]
    for path, (_, _, other) in zip(args.ckpt, loaded):
        if other.splits[args.split] != data.splits[args.split]:
            raise UserError(f"{path} and {args.ckpt[0]} were trained on different data; "
                            "name one for both with --dataset")
    context = context or min(model.config.block_size for _, model, _ in loaded)
    n = len(data.tokens(args.split))
    if context > n:
        raise UserError(f"a context of {context:,} is longer than the {args.split} split of {data.dir}, "
                        f"{n:,} tokens")
    ckpts = []
    for path, (state, model, _) in zip(args.ckpt, loaded):
        trained = checkpoint.config_of(state, path).block_size
        model = at_context(model, context, state, path, args.device, args.settings)
        ckpts.append(Checkpoint(path.removesuffix("/best.pt"), model, trained))
    return ckpts, data, context


def window_text(data, split, start, end, device):
    """Inputs and targets, [end - start] each, of a window."""
    ids = torch.from_numpy(window_ids(data.tokens(split), data.separator, start, end)).to(device)
    return ids[:-1], ids[1:]


def token_nats(ckpt, data, args, progress=False):
    """Nats of every scored token, [n] float64. UserError where they are not finite."""
    nats = score(ckpt.model, data, args.split, max_tokens=args.tokens, per_token=True, progress=progress)
    return finite(nats.astype(np.float64), ckpt)


@torch.no_grad()
def nats_after(model, separator, pairs):
    """Nats [n] of each continuation given its prompt, from pairs (prompt, continuation) of ids.

    Windows move by half a block: beyond the first, a token sees at least half a block before it.
    """
    device, T = next(model.parameters()).device, model.config.block_size
    rows = max(1, min(4096, LOGITS_AT_ONCE // model.config.vocab_size) // T)
    pieces = []  # (number of its pair, ids of a window, how many of its last tokens are scored)
    for number, (prompt, continuation) in enumerate(pairs):
        text = np.array([*prompt, *continuation])
        for start, end, scored in windows(len(text), T, max(1, T // 2)):
            scored = min(scored, end - len(prompt))  # the prompt is context alone
            if scored > 0:
                pieces.append((number, window_ids(text, separator, start, end), scored))

    # windows of one length and one scored part go together
    def shape(piece):
        return len(piece[1]), piece[2]
    totals = np.zeros(len(pairs))
    for (_, scored), group in groupby(sorted(pieces, key=shape), shape):
        group = list(group)
        for first in range(0, len(group), rows):
            batch = group[first:first + rows]
            ids = torch.from_numpy(np.stack([piece[1] for piece in batch])).to(device)
            np.add.at(totals, [piece[0] for piece in batch], nats_of_last(model, ids, scored).sum(1))
    refuse_replaced()
    return totals


def finite(values, ckpt, what="nats"):
    """The nats of a checkpoint, or what else it gives. UserError where one is not finite."""
    if not np.isfinite(values).all():
        raise UserError(f"{ckpt.name} gives {values[~np.isfinite(values)][0]} {what}: "
                        "its weights are damaged, or its training diverged")
    return values


def position_in_windows(cuts):
    """(number of its window, position in it) of every scored token of disjoint windows, [n] each."""
    lengths = [end - start for start, end, _ in cuts]
    return np.repeat(np.arange(len(cuts)), lengths), np.concatenate([np.arange(n) for n in lengths])


# ---- output ----

def about_text(data, args):
    settings = f", with {', '.join(args.settings)}" if args.settings else ""
    return f"{data.meta['name']}, {args.split}{settings}"


def about_windows(data, args, cuts, context):
    return (f"{about_text(data, args)}: {sum(c[2] for c in cuts):,} tokens "
            f"in {len(cuts):,} disjoint windows of {context:,}")


def beyond(row):
    return "beyond training length" if row["beyond_training"] else ""


def plus_minus(bounds, digits=4, sign=True):
    """An interval [mean, low, high] as "mean ±half"; a dash where there is none."""
    if bounds is None:
        return "-"
    mean, low, high = bounds
    return f"{mean:{'+' if sign else ''}.{digits}f} ±{(high - low) / 2:.{digits}f}"


OVER = "over the first"  # a column that shows where there is more than one checkpoint


def run_table(ckpts, rows, columns, left=1):
    """A line for each row of each checkpoint; columns: [(title, what writes the cell of a row)]."""
    shown = [column for column in columns if len(ckpts) > 1 or column[0] != OVER]
    cells = [(ckpt.name, *(write(row) for _, write in shown))
             for ckpt, own_rows in zip(ckpts, rows) for row in own_rows]
    return table(("run", *(title for title, _ in shown)), cells, left)


def numbers_of(ckpts, data, args, rows):
    """What --json writes: every number, intervals as [mean, low, high]."""
    own = ("ckpt", "json", "what", "settings")
    options = {key: value for key, value in vars(args).items() if key not in own}
    return dict(what=args.what, dataset=data.meta["name"],
                split_sha256=data.splits[args.split].get("sha256"), set=args.settings, options=options,
                runs=[dict(name=ckpt.name, trained_block_size=ckpt.trained, results=row)
                      for ckpt, row in zip(ckpts, rows)])


# ---- the command line ----

def positive(text):
    """The type of an argument: a whole number from 1 on."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


CONTEXT = (positive, None, "tokens in a window (default: the shortest training length)")


def parser_of(word, about):
    """The parser of `probe.py WORD`."""
    form = partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=110)
    return ArgumentParser(prog=f"probe.py {word}", description=about, formatter_class=form)


def add_seed(parser):
    parser.add_argument("--seed", type=int, default=1337,
                        help="of texts, queries, random keys, probes and draws (default: 1337)")


def ask(word, probe, split, argv, more=add_seed, **options):
    """`probe.py WORD`: print what the probe says of the checkpoints that the command line names.

    Its numbers go to --json. split: the default one. more: adds --seed to the parser, and what else other
    programs have too. options: {flag: (type, default, help)}, where a list as default takes several; or a
    dict of what argparse takes.
    """
    parser = parser_of(word, sys.modules[probe.__module__].__doc__)
    add_arguments(parser, split)
    more(parser)
    for flag, option in options.items():
        parser.add_argument(f"--{flag}", **(option if isinstance(option, dict) else typed(*option)))
    args = parser.parse_args(argv)
    words = word.split()
    args.what = words[-1]
    with last_words(f"probe.py {words[0]}"):
        for key in ("seed", "tokens", "singles"):
            if vars(args).get(key, 0) < 0:
                raise ValueError(f"--{key}={vars(args)[key]} must not be negative")
        others = [*getattr(args, "plain", ()), getattr(args, "judge", None)]
        checkpoint.allow_code(args, *args.ckpt, *filter(None, others))
        args.device = pick_device(args.device)
        out = writable(args.json) if args.json else None
        numbers, lines = probe(args)
        if out:
            write_json(out, numbers)
        say(*lines, *([args.json] if out else []))


def typed(kind, default, words):
    """What argparse takes of an option."""
    several = isinstance(default, list)
    if default is not None:
        words += f" (default: {' '.join(map(str, default)) if several else default})"
    return dict(type=kind, default=default, help=words, nargs="+" if several else None)
