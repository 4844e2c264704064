"""
Make labels for constraint heads: a value from 0 to 1, or none, for each token of a dataset.

python -m lab.label --dataset=wikitext2_byte --by=weak                      lab/labels/weak.py, unchecked
python -m lab.label --dataset=wikitext2_byte --by=synthetic --noise=0.1     a known truth, to test learning
python -m lab.label --dataset=mine --by=spans --file=labels.jsonl --split=val                   your own

Writes <dataset>/labels/<by>/, or --out: another name there, or a folder. lab/labels/targets.py describes
it, docs/constraints.md what the labels mean. Given once more, the command verifies what is there. You should
see, at the end, a table and texts with the labels in them.
"""
import argparse
import os
from pathlib import Path

import nanoheads.threads  # noqa: F401  before torch, whose threads it has wait briefly
from nanoheads.common import UserError, as_program
from nanoheads.dataset import Dataset
from lab.labels.labellers import LABELLERS, NAME, Text
from lab.labels.labels import label, report

# the flags of each way to label; those of the others are refused
FLAGS = {"weak": ("splits", "reach"), "synthetic": ("splits", "seed", "noise"),
         "spans": ("file", "split", "rest")}


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True, help="data/<name>, or a folder of a prepare script")
    parser.add_argument("--by", required=True, choices=list(FLAGS), help="the way to label")
    parser.add_argument("--names", nargs="+", help="the names to label (default: all that there are)")
    parser.add_argument("--out", help="name of the set, or a folder (default: the --by)")
    parser.add_argument("--force", action="store_true", help="replace what is there")
    parser.add_argument("--show", type=int, default=3, help="texts to show of each name")
    parser.add_argument("--splits", nargs="+", help="weak, synthetic: the splits to label (default: all)")
    parser.add_argument("--from", dest="reach", choices=["trigger", "start"],
                        help="weak: what a sentence is labelled from on (default: trigger)")
    parser.add_argument("--seed", type=int, help="synthetic: of the noise (default: 0)")
    parser.add_argument("--noise", type=float, help="synthetic: share of wrong labels (default: 0)")
    parser.add_argument("--file", action="append", help="spans: JSON lines; one for each --split")
    parser.add_argument("--split", action="append", help="spans: the split that the --file is about")
    parser.add_argument("--rest", choices=["0", "ignore"], help="spans: what no line names (default: ignore)")
    args = parser.parse_args(argv)
    args.names = args.names and list(dict.fromkeys(args.names))
    for by, flags in FLAGS.items():
        for flag in flags:
            if getattr(args, flag) is not None and flag not in FLAGS[args.by]:
                flag = "from" if flag == "reach" else flag
                raise UserError(f"--{flag} is for --by={by}, not for --by={args.by}")
    return args


@as_program("label", "take a smaller text")
def main(argv=None):
    run(arguments(argv))


def run(args):
    """Label what the command line names, or verify what is there. UserError."""
    dataset = Dataset(args.dataset)
    splits = list(dict.fromkeys(args.split or args.splits or dataset.splits))
    for split in splits:
        dataset.tokens(split)
    out = args.out or args.by
    folder = Path(out) if os.sep in out else dataset.dir / "labels" / out
    labeller = LABELLERS[args.by](args, dataset)
    if bad_names := [name for name in labeller.names if not NAME.fullmatch(name)]:
        raise UserError(f"{bad_names[0]!r} is no name: letters, digits, _ and -, a letter first")
    if not label(folder, Text(dataset, labeller.size), labeller, splits, args.force):
        print("already labelled, verified")
    report(folder, dataset, args.show)


if __name__ == "__main__":
    main()
