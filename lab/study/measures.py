"""
What kinds of scores studies have, and what follows from the kind: which side is better, how two variants are
compared, what a report calls the score and the baseline, which columns its main table has.

The kind stands under `measure` in the results of a study. A study of another kind of score is another row of
MEASURES, beside what fills the scores of its runs in: effects.figures() tests them, and the same report shows
them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """A kind of score.

    name: the head of its column; unit: behind a difference in a sentence, "" where it has none. baseline:
    what sentences call the baseline; None: its label. columns: which of the main table's columns on costs
    are shown, see findings.verdicts_table(). same_seeds: whether a seed stands for the same random numbers in
    two variants, so that equal scores at every seed say that nothing acted. trained_here: whether this
    program made the runs, and knows their costs, settings and text.
    """
    name: str
    unit: str
    higher_is_better: bool
    baseline: str | None
    columns: tuple
    same_seeds: bool
    trained_here: bool


COSTS_HERE = ("params", "worth × compute", "at equal FLOPs", "at equal time", "tokens ×")
COSTS_ELSEWHERE = ("tokens ×", "bytes ×", "cost ×")
MEASURES = {
    "bits/byte": Measure("bits/byte", "bits/byte", False, "the plain GPT", COSTS_HERE, True, True),
    # of another program, whose seeds are names
    "score": Measure("score", "", False, None, COSTS_ELSEWHERE, False, False),
    "score, higher is better": Measure("score", "", True, None, COSTS_ELSEWHERE, False, False),
}
