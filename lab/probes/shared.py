"""
What all probes share: checkpoints opened at one context, the command line, and what is written of them.

A probe is a function probe(args) -> (what --json writes, the lines that are printed).
"""

import argparse
import sys
from functools import partial
from typing import NamedTuple

import numpy as np

from model import GPT
from nanoheads import checkpoint, own_mechanism
from nanoheads.arguments import add_scoring
from nanoheads.common import UserError, as_program, pick_device, say, writable, write_json
from nanoheads.scoring import at_context, load


class Checkpoint(NamedTuple):
    """A checkpoint, loaded: what it is called, the model, and the context that it was trained on."""
    name: str
    model: GPT
    trained_context: int


# ---- checkpoints ----

def open_checkpoints(args, context=None):
    """([Checkpoint], Dataset, context), all at one context (None: the shortest training). UserError."""
    contents = [load(path, args.split, 0, args.device, args.dataset, args.settings) for path in args.ckpt]
    _, _, data = contents[0]
    for path, (_, _, other_data) in zip(args.ckpt, contents):
        if other_data.splits[args.split] != data.splits[args.split]:
            raise UserError(f"{path} and {args.ckpt[0]} were trained on different data; "
                            "name one for both with --dataset")
    context = context or min(model.config.block_size for _, model, _ in contents)
    n = len(data.tokens(args.split))
    if context > n:
        raise UserError(f"a context of {context:,} is longer than the {args.split} split of {data.dir}, "
                        f"{n:,} tokens")
    ckpts = []
    for path, (state, model, _) in zip(args.ckpt, contents):
        trained_context = checkpoint.config_of(state, path).block_size
        model = at_context(model, context, state, path, args.device, args.settings)
        ckpts.append(Checkpoint(path.removesuffix("/best.pt"), model, trained_context))
    return ckpts, data, context


def finite(values, ckpt, quantity="nats"):
    """The nats of a checkpoint, or what else it gives. UserError where one is not finite."""
    if not np.isfinite(values).all():
        raise UserError(f"{ckpt.name} gives {values[~np.isfinite(values)][0]} {quantity}: "
                        "its weights are damaged, or its training diverged")
    return values


# ---- output ----

def about_text(data, args):
    settings = f", with {', '.join(args.settings)}" if args.settings else ""
    return f"{data.meta['name']}, {args.split}{settings}"


def plus_minus(bounds, digits=4, sign=True):
    """An interval [mean, low, high] as "mean ±half"."""
    mean, low, high = bounds
    return f"{mean:{'+' if sign else ''}.{digits}f} ±{(high - low) / 2:.{digits}f}"


def numbers_of(ckpts, data, args, rows):
    """What --json writes: every number, intervals as [mean, low, high]."""
    other_keys = ("ckpt", "json", "what", "settings")
    options = {key: value for key, value in vars(args).items() if key not in other_keys}
    return dict(what=args.what, dataset=data.meta["name"],
                split_sha256=data.splits[args.split].get("sha256"), set=args.settings, options=options,
                runs=[dict(name=ckpt.name, trained_block_size=ckpt.trained_context, results=row)
                      for ckpt, row in zip(ckpts, rows)])


# ---- the command line ----

def positive(text):
    """The type of an argument: a whole number from 1 on."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


CONTEXT = (positive, None, "tokens in a window (default: the shortest training length)")


def parser_of(word, description):
    """The parser of `probe.py WORD`."""
    form = partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=110)
    return argparse.ArgumentParser(prog=f"probe.py {word}", description=description, formatter_class=form)


def add_seed(parser):
    parser.add_argument("--seed", type=int, default=1337, help="of probes and random draws (default: 1337)")


def ask(word, probe, split, argv, add_more=add_seed, **options):
    """`probe.py WORD`: print what the probe says of the checkpoints that the command line names.

    Its numbers go to --json. split: the default one. add_more: adds --seed to the parser, and what else other
    programs have too. options: {flag: (type, default, help)}, or a dict of what argparse takes.
    """
    parser = parser_of(word, sys.modules[probe.__module__].__doc__)
    add_scoring(parser, split)
    add_more(parser)
    for flag, option in options.items():
        option = option if isinstance(option, dict) else argument_options(*option)
        parser.add_argument(f"--{flag}", **option)
    args = parser.parse_args(argv)
    words = word.split()
    args.what = words[-1]
    with as_program(f"probe.py {words[0]}"):
        for key in ("seed", "tokens"):
            if vars(args).get(key, 0) < 0:
                raise UserError(f"--{key}={vars(args)[key]} must not be negative")
        own_mechanism.add_named(args)
        args.device = pick_device(args.device)
        out = writable(args.json) if args.json else None
        numbers, lines = probe(args)
        if out:
            write_json(out, numbers)
        say(*lines, *([args.json] if out else []))


def argument_options(kind, default, words):
    """What argparse takes of an option."""
    if default is not None:
        words += f" (default: {default})"
    return dict(type=kind, default=default, help=words)
