"""
Ask one question of trained models: which heads matter, what constraint heads know, what the models write.

    python -m lab.probe heads --ckpt out/a                          # which heads matter
    python -m lab.probe constraints score --ckpt out/a              # or adjudicate, or explain
    python -m lab.probe text --ckpt out/a --ckpt out/b              # is what they write like real text?
    python -m lab.probe look --ckpt out/a --text FILE               # what mechanisms do to each token
    python -m lab.probe leak --module file.py:function              # does a function of tokens look ahead?

`python -m lab.probe heads --help` says what that probe measures, and how. Several checkpoints read the same
windows of text, so that they can be compared. Intervals are 95 %: over blocks of neighbouring windows
(heads), over prompts (text), and as its help says (constraints).
"""

import argparse
import shlex
import sys
from functools import partial
from importlib import import_module

if __name__ == "__main__" and not __package__:  # as a script it finds lab/ alone, none of its imports
    command = shlex.join(["python", "-m", "lab.probe", *sys.argv[1:]])
    sys.exit(f"probe: type, in the repository's folder: {command}")

import nanoheads.threads  # noqa: F401  before torch, whose threads it has wait briefly
from nanoheads.common import as_program
from nanoheads.configurator import likely_name

# word -> (the module whose main() takes what follows, help); imported when asked for
PROBES = {
    "heads": ("lab.probes.heads",
              "Which heads matter: entropy, gradient, and the loss without the head."),
    "constraints": ("lab.probes.constraints.command", "What constraint heads know of their labels."),
    "text": ("lab.probes.text", "How generated text compares with real text."),
    "look": ("lab.heads.look", "What mechanisms do to a text, token by token; attention maps."),
    "leak": ("lab.probes.leak", "Whether a function from token ids to logits, yours too, looks ahead."),
}


def usage(argv):
    """--help, and what is wrong with a command line that names no probe."""
    form = partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=110)
    parser = argparse.ArgumentParser(prog="probe.py", description=__doc__, formatter_class=form)
    words = parser.add_subparsers(dest="what", required=True, metavar="|".join(PROBES))
    for word, (_, about) in PROBES.items():
        words.add_parser(word, help=about)
    parser.parse_args(argv)


@as_program("probe")
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0].startswith("-"):
        return usage(argv)
    word, *rest = argv
    if word in PROBES:
        return import_module(PROBES[word][0]).main(rest)
    suggestion = likely_name(word, PROBES)
    sys.exit(f"probe: no probe {word!r}; "
             + (f"did you mean {suggestion}?" if suggestion else f"there are {', '.join(PROBES)}"))


if __name__ == "__main__":
    main()
