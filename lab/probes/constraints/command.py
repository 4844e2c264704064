"""
What constraint heads know of their labels, beside a prior and probes of a plain GPT (docs/constraints.md).

    python -m lab.probe constraints score --ckpt out/c [...] --plain out/plain [--plain ...] --labels weak
    python -m lab.probe constraints adjudicate --ckpt out/c --plain out/plain --labels weak [--task cited]
    python -m lab.probe constraints explain --ckpt out/c [--k 5]

score       For each name: AUROC, average precision, F1, calibration of the heads' scores token by token;
            against the prior, a linear probe and an MLP probe of as many parameters as the heads have. Probes
            read what the attention of the same block of the plain GPT reads, --own: of the model itself, too.
adjudicate  Passages of held-out documents, classified by what is made of the heads' scores, against the mean
            hidden state of the plain GPT and against its probes' scores.
explain     Do the tokens with the highest scores explain a passage's score? They are hidden from all later
            tokens, against those with the lowest, random ones, and their neighbours.

The models read whole windows, evenly spaced over a split. A token whose label is above 1/2 is positive, below
it negative; exactly 1/2 and unknown are left out. Probes and prior are fitted on train, weight decay and
thresholds are chosen on val, and figures are those of test. --split val, for data without a test split,
chooses on the first half of val and measures on the second. Intervals are 95 %.
"""

from lab.probes.constraints import adjudicate, explain, score
from lab.probes.shared import parser_of

COMMANDS = dict(score=score, adjudicate=adjudicate, explain=explain)


def main(argv):
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]].main(argv[1:])
    parser = parser_of("constraints", __doc__)  # --help, and what is wrong with another word
    words = parser.add_subparsers(required=True, dest="what", metavar="|".join(COMMANDS))
    for word, command in COMMANDS.items():
        words.add_parser(word, help=command.probe.__doc__)
    parser.parse_args(argv)
