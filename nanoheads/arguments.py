"""
The command-line arguments of programs that read checkpoints, such as --ckpt and --set, and the runs that are
meant where no --ckpt is given.
"""

import argparse
import sys
from pathlib import Path

from nanoheads import own_mechanism
from nanoheads.checkpoint import file_of
from nanoheads.common import UserError
from nanoheads.configurator import parse
from nanoheads.other_names import ROUTING_PAIR


def add_checkpoints(parser, required=True):
    """The arguments of every program that reads checkpoints."""
    parser.add_argument("--ckpt", action="append", required=required, default=[],
                        help="a checkpoint, or the folder of a run (its best.pt); may be repeated"
                             + ("" if required else " (default: the newest run)"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                        help="switch a part of the models off, as in unet_skips=False, or change a head by "
                             "layer and number: gate.0.3=0, state.0.3=withdrawn, consent.0.3=False; takes "
                             "every flag that no weight depends on; may be repeated")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, mps")
    own_mechanism.add_arguments(parser)


def add_scoring(parser, split, required=True):
    """The arguments of every program that scores checkpoints; split: the default one; required: --ckpt is."""
    add_checkpoints(parser, required)
    parser.add_argument("--split", default=split, help=f"train, val or test (default: {split})")
    parser.add_argument("--dataset", help="score on this dataset, which must have the same vocabulary "
                                          "(default: the one trained on)")
    parser.add_argument("--json", help="write the result to this file too")


def add_pack(parser, exception=""):
    """The argument of a program that does without withdrawn heads; exception: when it does not, in words."""
    parser.add_argument("--pack", type=true_or_false, nargs="?", const=True, default=True, metavar="False",
                        help="False: compute heads whose gate is 0 too, as in training; by default they are "
                             f"left out{exception}")


def true_or_false(text):
    """A bool from the command line, for argparse."""
    try:
        return parse(text, bool)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be True or False") from None


def default_runs(program):
    """The run folders that a command without --ckpt means, which a line says: under out/, or called out-...,
    the one that was saved last, or where that is one of the head-routing write-up's pair, both. UserError.
    """
    save_times = {str(folder): file.stat().st_mtime for pattern in ("out/*/", "out-*/", "out/")
                  for folder in Path().glob(pattern) if (file := file_of(folder)).is_file()}
    if not save_times:
        raise UserError("no --ckpt is named, and there is no run under out/: train one, for instance with "
                        "python train.py --scale=tiny")
    paths = [max(save_times, key=save_times.get)]
    if paths[0] in ROUTING_PAIR and save_times.keys() >= {*ROUTING_PAIR}:
        paths = [*ROUTING_PAIR]
    print(f"{program}:", *(f"--ckpt {path}" for path in paths[:-1]), f"--ckpt {paths[-1]}, the newest run"
          f"{'s' * (len(paths) > 1)}", file=sys.stderr)
    return paths
