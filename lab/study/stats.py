"""
From scores to verdicts: Welch's test of a difference of means, two one-sided tests for "same", Holm.

A difference is variant minus baseline, in bits per byte of a study: below 0 is better. It is over seeds:
would it come out so again if both were trained again? Nothing here knows of runs or files.

Two things differ from a plain Welch test with Holm's correction, because simulated studies were wrong too
often without them (tests/simulate.py):

- Welch's degrees of freedom are at most those of equal spreads. With as many seeds on both sides they always
  are. With 3 seeds against 16, a spread that is small by chance would otherwise be believed for the 16.
- Both tests of all comparisons are one family, since either can give a false verdict. At most one of the two
  null hypotheses of a comparison is true, so Holm's factors need not exceed the number of comparisons.
"""

import functools
import math
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
# scipy.stats has them too, and takes 0.5 s more to import
from scipy.special import chdtri, ndtr, ndtri, stdtr, stdtrit

from nanoheads.common import plural


class Difference(NamedTuple):
    """A difference of means with its uncorrected interval; p two-sided. No spread known: infinite, nan."""
    mean: float
    low: float
    high: float
    se: float
    df: float
    p: float


UNKNOWN = Difference(math.nan, -math.inf, math.inf, math.inf, 0.0, math.nan)
IDENTICAL = Difference(0.0, 0.0, 0.0, 0.0, math.inf, math.nan)  # the same score at each shared seed: no test


class Comparison(NamedTuple):
    """A difference and the verdict on it; n, n_baseline: seeds of the variant and of the baseline."""
    n: int
    n_baseline: int
    mean: float
    low: float
    high: float
    se: float
    df: float
    p: float
    p_corrected: float  # of no difference, by Holm
    p_same: float       # of a difference of the margin or more, likewise
    verdict: str        # "better", "worse", "same", "identical" or "undecided"
    more_seeds: int | None  # of the variant, for a verdict four times in five if the difference is as seen


# ---- one difference ----

def difference(parts, alpha=0.05):
    """Difference: the sum of weight x mean of scores over independent parts, [(weight, scores [n])].

    Two parts of weights 1 and -1 are Welch's t test. More parts have their errors added in squares, with
    Satterthwaite's degrees of freedom: means over several texts, an interpolated baseline. The interval's
    level is 1 - alpha; it is infinite where a part has one score, or no part shows a spread.
    """
    parts = [(weight, np.asarray(scores, np.float64)) for weight, scores in parts if weight]
    if not all(scores.size for _, scores in parts):
        return UNKNOWN
    mean = float(sum(weight * scores.mean() for weight, scores in parts))
    if min(scores.size for _, scores in parts) < 2:
        return UNKNOWN._replace(mean=mean)
    squares = [weight ** 2 * scores.var(ddof=1) / scores.size for weight, scores in parts]
    se = math.sqrt(sum(squares))
    if se <= 1e-12 * max(abs(scores).max() for _, scores in parts):  # rounding alone
        return UNKNOWN._replace(mean=mean)
    sizes = [scores.size for _, scores in parts]
    equal_spreads = [weight ** 2 / scores.size for weight, scores in parts]
    df = min(satterthwaite(squares, sizes), satterthwaite(equal_spreads, sizes))
    half = float(stdtrit(df, 1 - alpha / 2)) * se
    return Difference(mean, mean - half, mean + half, se, df, float(2 * stdtr(df, -abs(mean) / se)))


def satterthwaite(squares, sizes):
    """Degrees of freedom of a sum of squared errors, each from so many scores."""
    return sum(squares) ** 2 / sum(square ** 2 / (n - 1) for square, n in zip(squares, sizes))


def p_same(difference, margin):
    """p of a true difference of the margin or more: the larger p of two one-sided tests (Schuirmann 1987)."""
    mean, se, df = difference.mean, difference.se, difference.df
    if not df:  # no spread is known
        return math.nan
    return float(stdtr(df, (abs(mean) - margin) / se))


def p_beyond(mean, target, above=False):
    """p of a true mean that is not below a target, or not above it: a one-sided t test.

    mean: the Difference of one part of weight 1; nan: it has no spread.
    """
    if not mean.df:
        return math.nan
    t = (mean.mean - target) / mean.se
    return float(stdtr(mean.df, -t if above else t))


# ---- all of a study ----

def is_identical(c):
    """Whether a Difference or a Comparison is IDENTICAL."""
    return c.se == 0


def holm(p_values, most_true=None):
    """Holm's adjusted p values [m]: each held to alpha, the chance of any false claim is below alpha.

    most_true: how many of the null hypotheses can be true at once, at most (Shaffer 1986); None: all.
    nan stays nan and yet counts among the m: a comparison that failed must not make the others seem better.
    """
    p = np.asarray(p_values, np.float64)
    order = np.argsort(p)  # nan last
    factors = np.minimum(np.arange(p.size, 0, -1), most_true or p.size)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(np.where(np.isnan(p), 1, p)[order] * factors), 1)
    return np.where(np.isnan(p), math.nan, adjusted)


def judge(differences, sizes, alpha=0.05, margin=0.01, higher_is_better=False):
    """[Comparison] of all differences of a study, corrected together; sizes: [(n, n_baseline)].

    IDENTICAL is no finding: nothing acted, whatever the seeds. It has no test, and none of the others is
    corrected for it.
    """
    tested = [each for each in differences if not is_identical(each)]
    m = len(tested)
    both = [*(each.p for each in tested), *(p_same(each, margin) for each in tested)]
    corrected = holm(both, most_true=m).tolist()
    pairs = iter(zip(corrected, corrected[m:]))
    rows = []
    for each, (n, n_baseline) in zip(differences, sizes):
        p, same = (math.nan, math.nan) if is_identical(each) else next(pairs)
        verdict, more = "undecided", None
        if is_identical(each):
            verdict = "identical"
        elif p <= alpha:
            verdict = "better" if (each.mean > 0) == higher_is_better else "worse"
        elif same <= alpha:
            verdict = "same"
        elif math.isfinite(each.se):
            more = seeds_wanted(each, n, alpha, margin, m)
        rows.append(Comparison(n, n_baseline, *each, p, same, verdict, more))
    return rows


# ---- two looks ----

# how the allowed error is spent on two looks: z of each look over a common factor, at a share of the seeds
SPENDING = {"obrien_fleming": lambda share: (share ** -0.5, 1.0), "pocock": lambda share: (1.0, 1.0)}
GAUSS = np.polynomial.legendre.leggauss(64)  # where an integral from -1 to 1 is read, and the weights there


@functools.cache
def levels(alpha, spending, share, m=1):
    """The two levels that a study in two looks holds Holm's p values of m comparisons against.

    share: of the seeds, at the first look. One comparison has the levels of the textbooks (O'Brien and
    Fleming 1979; Pocock 1977): then the chance of a false verdict at either look is alpha. Holm divides a
    level by up to m, and two looks for so rare an event overlap less. So for m > 1 both levels are lower by
    one factor, such that a comparison which is held against an m-th of them has a chance of alpha / m.
    """
    shape = SPENDING[spending](share)

    def beyond(factor):
        return alpha - crossed([factor * z for z in shape], share)

    factor = brentq(beyond, 1e-3, 40)
    single = [float(2 * ndtr(-factor * z)) for z in shape]
    if m == 1:
        return single

    def above(part):
        return alpha / m - crossed([float(-ndtri(part * level / m / 2)) for level in single], share)

    part = brentq(above, 0.4, 1)
    return [part * level for level in single]


def crossed(limits, share):
    """The chance that |z| of either look exceeds its limit without a true difference.

    The two z are normal, with a correlation of the square root of the share of the seeds that both have.
    """
    first, second = limits
    at, weights = (first * each for each in GAUSS)
    density = np.exp(-at ** 2 / 2) / math.sqrt(2 * math.pi)
    rest, given = math.sqrt(1 - share), math.sqrt(share) * at
    outside = ndtr((given - second) / rest) + ndtr((-given - second) / rest)
    return float(2 * ndtr(-first) + (weights * density * outside).sum())


# ---- how many seeds ----

def seeds_wanted(seen, n, alpha, margin, m, power=0.8, most=1000):
    """Seeds of the variant, the baseline's in proportion, at which seen.mean is shown, or shown the same.

    At Holm's first of m steps; None: more than `most`.
    """
    def enough(seeds):
        se, df = seen.se * math.sqrt(n / seeds), seen.df * seeds / n
        differs = stdtr(df, abs(seen.mean) / se - stdtrit(df, 1 - alpha / m / 2))
        inside = stdtrit(df, 1 - alpha / m)
        outside = sum(stdtr(df, inside - (margin + sign * seen.mean) / se) for sign in (1, -1))
        return max(differs, 1 - outside) >= power

    wanted = n + 1 + bisect_left(range(n + 1, most + 1), True, key=enough)
    return wanted if wanted <= most else None


def findable(groups, n, n_baseline, m, alpha=0.05, power=0.8):
    """The smallest true difference that n seeds show with this power, at Holm's first of m steps.

    groups: scores over seeds of each variant, see spread_and_df().
    """
    se, df = spread_and_df(groups, n, n_baseline)
    return float(se * (stdtrit(df, 1 - alpha / m / 2) + stdtrit(df, power))) if df else math.nan


def spread_and_df(groups, n, n_baseline):
    """(standard error of a difference of so many seeds, its degrees of freedom); nan and 0: not known.

    The spread is the median one of the groups, at its upper 90 % bound.
    """
    shown = [(float(np.var(each, ddof=1)), len(each) - 1.0) for each in groups if len(each) > 1]
    shown = [each for each in shown if each[0] > 0]
    if not shown or min(n, n_baseline) < 2:
        return math.nan, 0
    variances, dfs = np.transpose(shown)
    typical = np.median(variances * dfs / chdtri(dfs, 0.5))
    bound = typical * dfs.sum() / chdtri(dfs.sum(), 0.9)
    sizes = n, n_baseline
    squares = [1 / size for size in sizes]
    # Welch's lie between those of the smaller side and those of equal spreads
    df = (min(sizes) - 1 + satterthwaite(squares, sizes)) / 2
    return math.sqrt(bound * sum(squares)), df


def seeds_to_find(size, groups, baseline_per_seed, m, alpha=0.05, power=0.8, most=1000):
    """The seeds of the variant at which findable() is at most `size`; None: more than `most`, or no spread.

    baseline_per_seed: how many seeds the baseline has for each of the variant's.
    """
    def enough(n):
        return findable(groups, n, round(baseline_per_seed * n), m, alpha, power) <= size

    wanted = 2 + bisect_left(range(2, most + 1), True, key=enough)
    return wanted if wanted <= most else None


# ---- in words ----

def in_words(c, alpha=0.05, margin=0.01, unit="bits/byte", baseline="the other side"):
    """The verdict of a Comparison as one sentence."""
    level, unit = f"{100 * (1 - alpha):g} % interval", f" {unit}" if unit else ""
    if math.isinf(c.se) and min(c.n, c.n_baseline) > 1:
        return f"undecided: {c.n} and {c.n_baseline} seeds do not show the spread of these scores"
    if math.isinf(c.se):
        seeds = f"{c.n} and {plural(c.n_baseline, 'seed')}"
        return f"undecided: {seeds} are too few, each side needs two or more"
    if is_identical(c):
        return f"identical: nothing acted, the scores are those of {baseline} on every shared seed"
    p = p_in_words(c.p_corrected)
    if c.verdict in ("better", "worse"):  # the word holds the sign
        low, high = (-c.high, -c.low) if c.mean < 0 else (c.low, c.high)
        return f"{c.verdict} by {abs(c.mean):.4f}{unit} ({level} {low:.4f} to {high:.4f}, {p})"
    seen = f"{c.mean:+.4f}{unit} ({level} {c.low:+.4f} to {c.high:+.4f}"
    if c.verdict == "same":
        return f"the same within {margin:g}{unit}: {seen}, {p_in_words(c.p_same)} of more)"
    return f"undecided: {seen}, {p}); {more_in_words(c)} seeds, now {c.n}, would probably decide"


def p_in_words(p):
    return "corrected p < 0.0001" if p < 1e-4 else f"corrected p = {p:.3g}"


def more_in_words(c):
    return f"about {c.more_seeds}" if c.more_seeds else "more than 1000"
