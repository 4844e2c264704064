"""
What constraint heads know of their labels, beside a prior and probes of a plain GPT (docs/constraints.md).

    python -m lab.probe constraints score --ckpt out/c [...] --plain out/plain [--plain ...] --labels weak
    python -m lab.probe constraints adjudicate --ckpt out/c --plain out/plain --labels weak [--task cited]
    python -m lab.probe constraints explain --ckpt out/c [--k 5]
    python -m lab.probe constraints skip --ckpt out/c [--below 0.5 0.9]

score       For each name: AUROC, average precision, F1, calibration of the heads' scores token by token;
            against the prior, a linear probe and an MLP probe of as many parameters as the heads have. Probes
            read what the attention of the same block of the plain GPT reads, --own: of the model itself, too.
adjudicate  Passages of held-out documents, classified by what is made of the heads' scores, against the mean
            hidden state of the plain GPT and against its probes' scores.
explain     Do the tokens with the highest scores explain a passage's score? They are hidden from all later
            tokens, as in probe.py keys, against those with the lowest, random ones, and their neighbours.
skip        Heads whose router gate stays below a threshold are not computed (constraint_skip): how many,
            what that does to bits per byte, to scoring a window and to writing a context.

A token whose label is above 1/2 is positive, below negative; exactly 1/2 and unknown are left out. Thresholds
and weight decay are chosen on val; --split val measures on its second half and chooses on the first. One
checkpoint: 95 % intervals over text; several: by t over checkpoints, which pair with as many --plain.
"""

import argparse

from nanoheads.common import ArgumentParser
from nanoheads.scoring import add_arguments
from lab.probes.constraints import adjudicate, explain, score, skip
from lab.probes.constraints.adjudicate import TASKS
from lab.probes.shared import answer, positive

COMMANDS = dict(score=score, adjudicate=adjudicate, explain=explain, skip=skip)


def arguments(argv):
    plain = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(prog="probe.py constraints", description=__doc__, formatter_class=plain)
    commands = parser.add_subparsers(dest="what", required=True, metavar="|".join(COMMANDS))
    for name, command in COMMANDS.items():
        p = commands.add_parser(name, help=command.probe.__doc__, description=command.__doc__,
                                formatter_class=plain)
        add_arguments(p, "test")
        p.add_argument("--context", type=positive, help="tokens in a window (default: the shortest training)")
        p.add_argument("--seed", type=int, default=1337, help="of probes and draws (default: 1337)")
        if name == "explain":
            p.add_argument("--k", type=positive, default=5, help="tokens to hide (default: 5)")
            p.add_argument("--windows", type=positive, default=128, help="passages (default: 128)")
            p.add_argument("--draws", type=positive, default=8, help="random sets of each (default: 8)")
            continue
        if name == "skip":
            p.add_argument("--below", type=float, nargs="+", default=[0.5, 0.9], help="(default: 0.5 0.9)")
            p.add_argument("--batch", type=positive, default=16, help="windows at once (default: 16)")
            p.add_argument("--rounds", type=positive, default=9, help="of timing (default: 9)")
            p.add_argument("--tokens", type=int, default=262_144, help="to score; 0: all (default: 262144)")
            continue
        p.add_argument("--plain", action="append", default=[], help="a plain GPT; may be repeated, as --ckpt")
        p.add_argument("--labels", required=True, help="a set in <dataset>/labels, or its folder")
        p.add_argument("--fit", type=positive, default=200_000, help="tokens to fit probes to, and as many "
                       "to choose their weight decay on (default: 200000)")
        p.add_argument("--own", action="store_true", help="probes on the constraint models' states as well")
        if name == "score":
            p.add_argument("--tokens", type=int, default=262_144, help="of each split, in evenly spaced "
                           "windows; 0: all (default: 262144)")
            p.add_argument("--picture", help="write a reliability picture, .png, to this file")
        else:
            p.add_argument("--task", default="auto",
                           help=f"{', '.join(TASKS)}, a name, or auto: all that is labelled (default)")
            p.add_argument("--passage", type=positive, default=512, help="tokens of one (default: 512)")
            p.add_argument("--passages", type=positive, default=4096, help="of a split (default: 4096)")
    return parser.parse_args(argv)


def main(argv):
    args = arguments(argv)
    answer("probe.py constraints", COMMANDS[args.what].probe, args)
