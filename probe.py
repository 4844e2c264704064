"""
Ask trained checkpoints what one loss does not say; paired, since all checkpoints read the same windows.

    python probe.py needle --ckpt out/a [--ckpt out/b ...] [--contexts 1024 4096] [--depths 0.1 0.9]
    python probe.py late --ckpt out/a [--ckpt out/b ...] [--context 1024]
    python probe.py keys --ckpt out/a [--remove 4 8] [--nearest 2]
    python probe.py heads --ckpt out/a
    python probe.py engagement --ckpt out/a [--ckpt out/b ...] [--samples 128]
    python probe.py states --ckpt out/a [--pieces 64]
    python probe.py detectors --ckpt out/a [--ckpt out/b ...]
    python probe.py fewshot --ckpt out/a [--ckpt out/b ...] [--file items.jsonl] [--shots 0 1 2 4 8]
    python probe.py constraints score|adjudicate|explain|skip --ckpt out/a [...]
    python probe.py inspect --ckpt out/a
    python probe.py text --ckpt out/a [--ckpt out/b ...] [--judge out/big]
    python probe.py look --ckpt out/a [--ckpt out/b] --text FILE
    python probe.py leak --module file.py:function [--vocab 256] [--length 32] [--batch 3] [--device cpu]

`python probe.py needle --help` says what a probe measures, and how. Intervals are 95 %, by t over samples
(needle, detectors, engagement), windows (keys), items (fewshot) or blocks of neighbouring windows (late,
heads).
"""

import argparse
import sys
from importlib import import_module

import nanoheads.threads  # noqa: F401  before torch, whose threads it has wait briefly
from nanoheads.common import last_words, output_written, pick_device, writable, write_json
from nanoheads.configurator import near
from nanoheads.probes import detectors, engagement, fewshot, heads, keys, late, needle, states
from nanoheads.probes.shared import positive
from nanoheads.training import checkpoint
from nanoheads.training.scoring import add_arguments

# word -> (module, split, {flag: (type, default, help)}); a list as default takes several
CONTEXT = (positive, None, "tokens in a window (default: the shortest training length)")
PROBES = {
    "needle": (needle, "test", dict(
        contexts=(positive, [1024, 2048, 4096, 8192, 16384], "bytes, question and answer included"),
        depths=(float, [0.1, 0.5, 0.9], "where the fact is, from 0 to 1"),
        samples=(positive, 32, "texts for each context"))),
    "late": (late, "test", dict(
        context=CONTEXT,
        tokens=(int, 262144, "tokens to score, in evenly spaced windows; 0: all"))),
    "keys": (keys, "test", dict(
        context=CONTEXT,
        windows=(positive, 32, "windows, evenly spaced"),
        queries=(positive, 4, "queries in each"),
        remove=(positive, [4, 8], "how many keys to remove"),
        draws=(positive, 8, "random sets of each size"),
        nearest=(positive, 2, "the nearest key that may go, in tokens back"),
        singles=(int, 32, "keys to remove one by one, at the first query of a window"))),
    "heads": (heads, "val", dict(
        context=CONTEXT,
        tokens=(int, 16384, "tokens to score for each head, in evenly spaced windows; 0: all"))),
    "engagement": (engagement, "val", dict(
        context=CONTEXT,
        samples=(positive, 128, "texts of each kind"),
        period=(positive, 8, "tokens in a pattern"))),
    "states": (states, "val", dict(
        context=CONTEXT,
        pieces=(positive, 64, "pieces of text, evenly spaced"),
        windows=(positive, 4, "windows in a piece, one after the other"))),
    "detectors": (detectors, "val", dict(
        context=CONTEXT,
        samples=(positive, 32, "sequences of random tokens"),
        length=(positive, None, "random tokens before they come again (default: 64, or what fits)"))),
    "fewshot": (fewshot, "test", dict(
        file=(str, None, "items, a JSON object a line (default: made of the split's words)"),
        items=(positive, 200, "items of each task, at most"),
        shots=(int, [0, 1, 2, 4, 8], "examples before an item"),
        save=(str, None, "write the items to this file, as --file reads them"))),
}
# word -> (the module whose main() takes what follows, help); imported when asked for: they need more packages
PROGRAMS = {
    "constraints": ("nanoheads.probes.constraints.command", "What constraint heads know of their labels."),
    "inspect": ("nanoheads.heads.inspection", "Heads one by one, by commands: set gates, prune, save."),
    "text": ("nanoheads.probes.continuations", "What models write: repetition, diversity, loops, bits/byte."),
    "look": ("nanoheads.heads.look", "What mechanisms do to a text, token by token, as a page."),
    "leak": ("nanoheads.probes.leak", "Whether any function from token ids to logits looks ahead."),
}


def parser_of_all():
    """The parser of every probe; of PROGRAMS the names alone, which --help lists."""
    def plain(prog):
        return argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=110)

    parser = argparse.ArgumentParser(prog="probe.py", description=__doc__, formatter_class=plain)
    commands = parser.add_subparsers(dest="what", required=True, metavar="|".join((*PROBES, *PROGRAMS)))
    for name, (module, split, options) in PROBES.items():
        p = commands.add_parser(name, help=module.probe.__doc__, description=module.__doc__,
                                formatter_class=plain)
        add_arguments(p, split)
        p.add_argument("--seed", type=int, default=1337,
                       help="of texts, queries and random keys (default: 1337)")
        for flag, option in options.items():
            add_option(p, flag, *option)
    for name, (_, words) in PROGRAMS.items():
        commands.add_parser(name, help=words)
    return parser


def add_option(parser, flag, kind, default, words):
    """An argument of PROBES."""
    several = isinstance(default, list)
    if default not in (None, []):
        words += f" (default: {' '.join(map(str, default)) if several else default})"
    parser.add_argument(f"--{flag}", type=kind, default=default, nargs="+" if several else None, help=words)


@output_written("probe")
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    word = argv[0] if argv else "-"
    if word in PROGRAMS:
        return import_module(PROGRAMS[word][0]).main(argv[1:])
    if word not in PROBES and not word.startswith("-"):
        known = (*PROBES, *PROGRAMS)
        meant = near(word, known)
        words = f"did you mean {meant}?" if meant else f"there are {', '.join(known)}"
        sys.exit(f"probe: no probe {word!r}; {words}")
    args = parser_of_all().parse_args(argv)
    with last_words("probe"):
        for key in ("seed", "tokens", "singles"):
            if vars(args).get(key, 0) < 0:
                raise ValueError(f"--{key}={vars(args)[key]} must not be negative")
        checkpoint.allow_code(args)
        args.device = pick_device(args.device)
        module = PROBES[args.what][0]
        out = writable(args.json) if args.json else None
        numbers, lines = module.probe(args)
        if out:
            write_json(out, numbers)
        print(*lines, *([args.json] if out else []), sep="\n")


if __name__ == "__main__":
    main()
