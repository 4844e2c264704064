"""
Make labels for constraint heads: a value from 0 to 1, or none, for each token of a dataset.

    python -m lab.label --dataset=wikitext2_byte --by=weak                   # rules for English, unchecked
    python -m lab.label --dataset=wikitext2_byte --by=synthetic --noise=0.1  # a known truth, to test learning
    python -m lab.label --dataset=mine --by=spans --file=val.jsonl --split=val --file=test.jsonl --split=test

docs/constraints.md says what the weak labels mean. At the end a table is printed, and stretches of text with
the labels in them, which you should read. Given once more, the command verifies what is there; other labels
need another --out, or --force.

spans       Your own labels: a JSON object on each line, of characters of the split's text, or of its tokens,
            both counted from 0:

                {"name": "testifiability", "start": 120, "end": 164, "value": 1.0}
                {"name": "decidability", "token": 17, "value": 0.25}
                {"name": "decidability", "token": 18, "values": [0.25, null, 1]}

            The text is the tokens decoded as UTF-8. A byte that is not UTF-8 counts as a character, and the
            separator of GPT-2 datasets as the 13 characters of <|endoftext|>. A token that overlaps a span
            belongs to it; of two spans, its last labelled character decides. What no line names is not
            labelled, or 0 with --rest=0; null is never labelled. Refused, with the number of the line, are
            spans that are empty or outside the text, values outside [0, 1], other keys, characters and tokens
            for one name, and spans that overlap and disagree.
synthetic   Tasks of at most the last 64 characters, for the names in turn, or as in --names mine=parity.
            comma: 1 where the last of ,.;:?!() within 64 characters is a comma, else 0. capital: 1 at A-Z,
            1/16 less at each character after it, 0 from the 16th on. parity: 1 where the last 8 characters
            hold an odd number of e, else 0. --noise turns a label v into 1 - v with that probability.

<dataset>/labels/<set>/ holds labels.json (how the labels were made, whether they are weak, and checksums) and
a file <name>.<split>.u8 with a byte for each token: 0 to 254 stand for 0 to 1 in steps of 1/254, 255 is not
labelled, which no loss and no figure counts. Byte i is about token i, judged from the tokens up to it. Labels
of other tokens are refused where they are read.
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
