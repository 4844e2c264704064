"""
The statistical tests of a study, from scores to p values: Welch's for bits per byte, permutations for right
answers, Holm's correction.

A difference is variant minus baseline, over seeds: would it come out so again if both were trained again?
Nothing here knows of runs, files or verdicts. Two things differ from a plain Welch test with Holm's
correction, because simulated studies were wrong too often without them (tests/simulate.py):

- Welch's degrees of freedom are at most those of equal spreads. With 3 seeds against 16, a spread that is
  small by chance would otherwise be believed for the 16.
- Both tests of all comparisons are one family, since either can give a false verdict. At most one of the two
  hypotheses of a comparison is true, so Holm's factors need not exceed the number of comparisons.
"""

import functools
import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtr, stdtrit  # scipy.stats has them too, and takes 0.5 s more to import


@dataclass(frozen=True)
class Difference:
    """A difference of means with its interval, and what is known of it.

    se, df: the standard error and its degrees of freedom; nan and 0 of a permutation test, and where no
    spread is known. p: of no difference. p_same: of a difference of the margin or more, in either
    direction. nan: no test.
    """
    mean: float = math.nan
    low: float = -math.inf
    high: float = math.inf
    se: float = math.nan
    df: float = 0.0
    p: float = math.nan
    p_same: float = math.nan


# both sides have the same score at each seed that they share: nothing acted, and there is nothing to test
IDENTICAL = Difference(mean=0.0, low=0.0, high=0.0, se=0.0, df=math.inf)


# ---- Welch's test ----

def welch(variant, baseline, alpha, margin):
    """The Difference of two sides, each a list of scores for each text; over several texts the mean of the
    texts'.

    Source: Welch 1947; of several texts Satterthwaite 1946.
    """
    return of_parts([*parts_of(variant, 1), *parts_of(baseline, -1)], alpha, margin)


def parts_of(scores_by_text, weight):
    """The mean over texts, of a list of scores for each, as parts of of_parts()."""
    return [(weight / len(scores_by_text), scores) for scores in scores_by_text]


def of_parts(parts, alpha=0.05, margin=math.nan):
    """The Difference that is the sum of weight x mean over independent parts, [(weight, scores [n])].

    Two parts of weights 1 and -1 are Welch's t test. More have their errors added in squares: several
    texts, or a baseline that is interpolated between two budgets. Where a part has one score or none shows
    a spread, the mean alone is known.
    """
    parts = [(weight, np.asarray(scores, np.float64)) for weight, scores in parts if weight]
    sizes = [scores.size for _, scores in parts]
    if not all(sizes):
        return Difference()
    mean = float(sum(weight * scores.mean() for weight, scores in parts))
    if min(sizes) < 2:
        return Difference(mean)
    squares = [weight ** 2 * scores.var(ddof=1) / scores.size for weight, scores in parts]
    se = math.sqrt(sum(squares))
    if se <= 1e-12 * max(abs(scores).max() for _, scores in parts):  # rounding alone
        return Difference(mean)
    squares_of_equal_spreads = [weight ** 2 / scores.size for weight, scores in parts]
    df = min(satterthwaite(squares, sizes), satterthwaite(squares_of_equal_spreads, sizes))
    half = float(stdtrit(df, 1 - alpha / 2)) * se
    return Difference(mean, mean - half, mean + half, se, df,
                      p=float(2 * stdtr(df, -abs(mean) / se)),
                      # the larger of two one-sided p (Schuirmann 1987)
                      p_same=float(stdtr(df, (abs(mean) - margin) / se)))


def satterthwaite(squares, sizes):
    """Degrees of freedom of a sum of squared errors, each from so many scores."""
    return sum(squares) ** 2 / sum(square ** 2 / (n - 1) for square, n in zip(squares, sizes))


def p_beyond_target(scores, target, above=False):
    """p of the hypothesis that the true mean is not below a target, or not above it: a one-sided t test of
    scores [n]; nan: there is no test.
    """
    difference = of_parts([(1, scores)])
    if not difference.df:
        return math.nan
    t = (difference.mean - target) / difference.se
    return float(stdtr(difference.df, -t if above else t))


def seeds_to_decide(observed, n, alpha, margin, m, power=0.8, max_seeds=1000):
    """Seeds of the variant, with the baseline's in proportion, that decide with this power if the difference
    and its spread are as observed. None: more than max_seeds, or no spread is known.

    observed: the Difference of n seeds, one of m that are corrected together. The count is for the first of
    Holm's steps.
    """
    if not math.isfinite(observed.se):
        return None

    def enough(seeds):
        se, df = observed.se * math.sqrt(n / seeds), observed.df * seeds / n
        differs = stdtr(df, abs(observed.mean) / se - stdtrit(df, 1 - alpha / m / 2))
        inside = stdtrit(df, 1 - alpha / m)
        outside = sum(stdtr(df, inside - (margin + sign * observed.mean) / se) for sign in (1, -1))
        return max(differs, 1 - outside) >= power

    needed = n + 1 + bisect_left(range(n + 1, max_seeds + 1), True, key=enough)
    return needed if needed <= max_seeds else None


# ---- permutations, for scores that are nearly all or nothing ----

MAX_DIVISIONS = 200_000  # ways of dividing the scores; of more, so many are drawn
TOLERANCE = 1e-9         # differences of means that are nearer than this are equal
MAX_SHIFT = 2.0          # an interval's end is looked for this far out: right answers lie between 0 and 1


def permutation(variant, baseline, alpha, margin):
    """The Difference of the scores on one task, each side a list that holds one list.

    Welch's test takes means of scores to be normal, which they are not for five scores of 0 or 1. This test
    assumes that if the variant did what the baseline does, each way of choosing which of the scores are the
    variant's would be equally likely. Source: Fisher 1935; Good, Permutation Tests, chapter 3. It
    is exact for "both sides have one distribution", and may be wrong more often where spreads and numbers
    of seeds differ.
    """
    (variant,), (baseline,) = variant, baseline
    if not (variant and baseline):
        return Difference()
    mean = float(np.mean(variant) - np.mean(baseline))
    low, high = (end_of_interval(variant, baseline, alpha, mean, side) for side in (-1, 1))
    p_same = max(p_of_shift(variant, baseline, margin, side=-1),
                 p_of_shift(variant, baseline, -margin, side=1))
    return Difference(mean, low, high, p=p_of_shift(variant, baseline), p_same=p_same)


def p_of_shift(variant, baseline, shift=0.0, side=0):
    """p of the hypothesis that the variant's scores [n] are the baseline's [m] plus `shift`.

    side: 0: against a difference either way; 1: against a larger one; -1: against a smaller one.
    """
    scores = np.concatenate((np.asarray(variant, np.float64) - shift, np.asarray(baseline, np.float64)))
    differences = divisions(len(variant), len(baseline)) @ scores
    observed = differences[0]
    if side == 0:
        return float((np.abs(differences) >= abs(observed) - TOLERANCE).mean())
    return float((side * differences >= side * observed - TOLERANCE).mean())


@functools.lru_cache(maxsize=8)
def divisions(n, m):
    """Weights [ways, n + m] whose products with n + m scores are the differences of means, a row for each
    way of choosing which n of them are the variant's. The first row is the true one, the first n.
    """
    if math.comb(n + m, n) <= MAX_DIVISIONS:
        chosen = np.array([*itertools.combinations(range(n + m), n)])
    else:
        rng = np.random.default_rng(0)
        chosen = np.concatenate((np.arange(n)[None], rng.random((MAX_DIVISIONS, n + m)).argsort(1)[:, :n]))
    weights = np.full((len(chosen), n + m), -1 / m)
    np.put_along_axis(weights, chosen, 1 / n, 1)
    return weights


def end_of_interval(variant, baseline, alpha, mean, side):
    """The last shift on one side (-1 or 1) of the mean that the test does not refuse at alpha, to 0.001."""
    inside, outside = mean, side * MAX_SHIFT
    while abs(outside - inside) > 0.001:
        middle = (inside + outside) / 2
        if p_of_shift(variant, baseline, middle) > alpha:
            inside = middle
        else:
            outside = middle
    return outside


def smallest_p(n, m):
    """The smallest p that n seeds against m can give in a permutation test."""
    return (2 if n == m else 1) / min(math.comb(n + m, n), MAX_DIVISIONS + 1)


# ---- many comparisons ----

def holm_correct(differences):
    """The same Differences with both p corrected by Holm, all in one family; IDENTICAL ones have no test.

    A comparison whose p is nan counts among the rest: one that failed must not make the others seem better.
    """
    tested = [difference for difference in differences if difference is not IDENTICAL]
    p_values = [*(difference.p for difference in tested), *(difference.p_same for difference in tested)]
    adjusted = holm(p_values, max_true=len(tested))
    pairs = iter(zip(adjusted, adjusted[len(tested):]))
    results = []
    for difference in differences:
        if difference is not IDENTICAL:
            p, p_same = next(pairs)
            difference = replace(difference, p=p, p_same=p_same)
        results.append(difference)
    return results


def holm(p_values, max_true=None):
    """Holm's adjusted p values: where each is held to alpha, the chance of any false claim is below alpha.

    max_true: how many of the hypotheses can be true at once, at most (Shaffer 1986); None: all. nan stays
    nan.
    """
    p = np.asarray(p_values, np.float64)
    order = np.argsort(p)  # nan last
    factors = np.minimum(np.arange(p.size, 0, -1), max_true or p.size)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(np.where(np.isnan(p), 1, p)[order] * factors), 1)
    return np.where(np.isnan(p), math.nan, adjusted).tolist()
