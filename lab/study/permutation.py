"""
Verdicts on scores that are nearly all or nothing: permutation tests of a difference of means over seeds.

What a run on a task scores is often 1 or what guessing gives, and nothing between. Welch's interval takes
means of such scores for normal, which with five seeds they are not. A permutation test takes nothing for
granted but this: if the variant did what the baseline does, each way of calling so many of the scores the
variant's would be as likely as any other. Source: Fisher 1935; Good, Permutation Tests, chapter 3.

It is exact for "both sides have the same distribution". Two sides of one mean and of unlike spreads are not
that, and with unlike numbers of seeds it may then be wrong more often (tests/lab/study/test_permutation.py
has how often). "Same within the margin" are two such tests, of one side moved by the margin up and down.
"""

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from lab.study.stats import holm

MOST_EXACT = 200_000  # ways of dividing the scores; beyond it so many are drawn
VERDICTS = ("better", "worse", "same", "undecided")
CLOSE = 1e-9          # differences of means nearer than that are equal


class Comparison(NamedTuple):
    """The difference of a variant's mean score from a baseline's, and the verdict on it."""
    n: int
    n_baseline: int
    mean: float         # above 0: the variant is right more often
    low: float          # the differences that the test does not refuse at alpha, uncorrected
    high: float
    p: float            # two-sided
    p_corrected: float  # by Holm over the study
    p_same: float       # of a difference of the margin or more, likewise
    verdict: str        # one of VERDICTS


@functools.lru_cache(maxsize=8)
def divisions(n, m):
    """Weights [ways, n + m] whose products with n + m scores are the differences of means, a row for each way
    of calling n of them the variant's. The first is how they are: the variant's in front.
    """
    if math.comb(n + m, n) <= MOST_EXACT:
        chosen = np.array([*itertools.combinations(range(n + m), n)])
    else:
        rng = np.random.default_rng(0)
        chosen = np.concatenate((np.arange(n)[None], rng.random((MOST_EXACT, n + m)).argsort(1)[:, :n]))
    weights = np.full((len(chosen), n + m), -1 / m)
    np.put_along_axis(weights, chosen, 1 / n, 1)
    return weights


def smallest_p(n, m):
    """The smallest p that n seeds against m can give."""
    ways = math.comb(n + m, n)
    return (2 if n == m else 1) / min(ways, MOST_EXACT + 1)


def p_of(scores, baseline, shift=0.0, side=0):
    """p of the hypothesis that the variant's scores [n] are the baseline's [m] plus `shift`.

    side: 0: against a difference either way; 1: against a larger one; -1: against a smaller one.
    """
    values = np.concatenate((np.asarray(scores, np.float64) - shift, np.asarray(baseline, np.float64)))
    found = divisions(len(scores), len(baseline)) @ values
    seen = found[0]
    if side == 0:
        return float((np.abs(found) >= abs(seen) - CLOSE).mean())
    return float((side * found >= side * seen - CLOSE).mean())


def p_same(scores, baseline, margin):
    """p of a difference of the margin or more: the larger of two one-sided ones."""
    return max(p_of(scores, baseline, margin, side=-1), p_of(scores, baseline, -margin, side=1))


def interval(scores, baseline, alpha=0.05, widest=2.0):
    """(low, high): the shifts that p_of() does not refuse at alpha, to 0.001, at most `widest` either way."""
    mean, ends = float(np.mean(scores) - np.mean(baseline)), []
    for side in (-1, 1):
        inside, outside = mean, side * widest
        while abs(outside - inside) > 0.001:
            middle = (inside + outside) / 2
            if p_of(scores, baseline, middle) > alpha:
                inside = middle
            else:
                outside = middle
        ends.append(outside)
    return ends[0], ends[1]


def judge(pairs, alpha=0.05, margin=0.05):
    """[Comparison] of all (scores, baseline's scores) of a study, corrected together.

    As in stats.judge(), both tests of all comparisons are one family, with at most one true hypothesis each.
    A side without a score: nan, undecided.
    """
    whole = [bool(len(scores) and len(baseline)) for scores, baseline in pairs]
    differ = [p_of(*pair) if there else math.nan for pair, there in zip(pairs, whole)]
    same = [p_same(*pair, margin) if there else math.nan for pair, there in zip(pairs, whole)]
    corrected = holm([*differ, *same], most_true=len(pairs)).tolist()
    rows = []
    for (scores, baseline), there, p, p_c, p_s in zip(pairs, whole, differ, corrected,
                                                      corrected[len(pairs):]):
        mean = float(np.mean(scores) - np.mean(baseline)) if there else math.nan
        low, high = interval(scores, baseline, alpha) if there else (-math.inf, math.inf)
        verdict = "undecided"
        if p_c <= alpha:
            verdict = "better" if mean > 0 else "worse"
        elif p_s <= alpha:
            verdict = "same"
        rows.append(Comparison(len(scores), len(baseline), mean, low, high, p, p_c, p_s, verdict))
    return rows
