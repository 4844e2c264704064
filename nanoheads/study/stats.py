"""
From scores to verdicts: one model of all variants and seeds, Holm's correction, what could have been found.
The plain GPT is a variant, too.

A difference is variant minus baseline in test bits per byte: below 0 is better. Two spreads answer two
questions. Over seeds (judge): would it win again if both were trained again? Over text (block_bootstrap of
intervals.py): would these two trained models rank the same on other text of this kind? Verdicts rest on the
first.

    score[variant, seed] = mean[variant] + effect[seed] + noise,    the noise with a variance for each variant

A few seeds say little of a variant's own spread, so all are fitted together. What a seed does to all of
them is taken out where it shows at all: without it a difference is the unpaired one, with nothing but it the
paired one. The variances of similar variants are drawn to each other (Smyth 2004, limma); a variant whose
variance is clearly another one keeps its own. tests/simulate.py counts the wrong verdicts: each rule here is
there because that count was too high without it.
"""

import math
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from scipy.special import chdtri, digamma, fdtr, fdtrc, polygamma, stdtr, stdtrit

SEEDS_MATTER = 0.01  # the p at which a shared seed is believed to move the variants together
OUTLIER = 0.001      # the p at which a variant's spread is not that of the others
LOUD = 8             # times the median spread: so far off that chance hardly brings such a variant near it
LEAST_VARIANTS = 4   # fewer do not show how similar their spreads are
PRIOR_COUNTS = 0.6   # this share of the prior's degrees of freedom: it is an estimate from the same scores
STRICT = 0.7         # times alpha: p of better and worse where spreads, never quite equal, are drawn together


class Comparison(NamedTuple):
    """One comparison over seeds: difference and uncorrected interval in bits/byte; p two-sided."""

    n: int              # seeds of the variant
    n_baseline: int
    mean: float
    low: float
    high: float
    se: float
    df: float
    p: float
    p_corrected: float  # Holm's; never below the p that the two variants' own spreads give
    p_same: float       # of a difference of margin or more; corrected likewise
    verdict: str        # "better", "worse", "same", "leaning" or "undecided"
    more_seeds: int | None  # of the variant, for a verdict four times in five if the difference is as seen


# ---- the model of variants and seeds ----

def prior_of(var, df):
    """(variance, degrees of freedom) [...] that var, df [..., A] of variants expect of one more of them.

    By mean and variance of log var (limma's fitFDist). Never more degrees of freedom than the variants have.
    """
    log_var, most = np.log(var) - digamma(df / 2) + np.log(df / 2), df.sum(-1)
    unlike = log_var.var(-1, ddof=1) - polygamma(1, df / 2).mean(-1)  # beyond what sampling does
    unlike = np.maximum(unlike, polygamma(1, most / 2))
    half = 0.5 + 1 / unlike  # solve trigamma(half) = unlike by Newton's steps
    for _ in range(6):
        half = half + polygamma(1, half) * (1 - polygamma(1, half) / unlike) / polygamma(2, half)
    centre = np.exp(log_var.mean(-1) + digamma(half) - np.log(half))
    pooled = (df * var).sum(-1) / most
    return np.where(2 * half > 0.999 * most, pooled, centre), np.minimum(2 * half, most)


def similar(var, df):
    """Indices of the variants whose spread the prior of the others explains; of three or fewer with one, all.

    First against the median spread, since several loud variants would hide each other in a prior.
    """
    found = np.flatnonzero((var > 0) & (df > 0.5))
    if len(found) >= LEAST_VARIANTS:
        typical = np.median(var[found] * df[found] / chdtri(df[found], 0.5))
        found = found[var[found] < LOUD ** 2 * typical]
    if len(found) < LEAST_VARIANTS:
        return found
    others = np.array([found[found != one] for one in found])
    prior, prior_df = prior_of(var[others], df[others])
    below = fdtr(df[found], prior_df, var[found] / prior)
    return found[np.minimum(below, 1 - below) > OUTLIER / 2]


def moderated(var, df):
    """(variances [A], degrees of freedom [A]): those of similar variants drawn to their prior."""
    kept = similar(var, df)
    if len(kept) < LEAST_VARIANTS:
        return var, df
    var, df = var.copy(), df.copy()
    prior, prior_df = prior_of(var[kept], df[kept])
    var[kept] = (prior_df * prior + df[kept] * var[kept]) / (prior_df + df[kept])
    df[kept] += PRIOR_COUNTS * prior_df
    return var, df


def least_squares(there, var, seed_var):
    """(precision [A, A, S], weights [A, A, S]): the inverse covariance of the scores of each seed, and the
    weight of each score in each variant's mean (generalised least squares)."""
    own = there / var[:, None]
    precision = -own[:, None] * own * (seed_var / (1 + seed_var * own.sum(0)))
    precision[range(len(var)), range(len(var))] += own
    return precision, np.einsum("ab,bcs->acs", np.linalg.inv(precision.sum(2)), precision)


def seed_variance(residual, there, var):
    """The variance of what a seed does to all variants; 0 where an F-test does not show it (SEEDS_MATTER).

    Believing in it wrongly makes intervals too short, not believing only too long: hence the test.
    """
    n, shared = there.sum(1), there.sum(0) > 1
    runs, seeds = there[:, shared].sum(0), shared.sum()
    scaled = (residual / np.sqrt(var)[:, None])[:, shared]
    between = (scaled.sum(0) ** 2 / runs).sum()
    within = (scaled ** 2).sum() - between
    lost = 1 if len(var) == 2 else 0  # two variants: their own spreads were divided out
    df = seeds - 1 - lost, runs.sum() - len(var) - seeds + 1 - lost
    if min(df) < 1 or fdtrc(*df, between / df[0] / max(within / df[1], 1e-30)) > SEEDS_MATTER:
        return 0.0
    # mean covariance of two variants; variants of little spread say more of it
    both = there.astype(float) @ there.T
    expected = both * (1 - 1 / n - 1 / n[:, None] + both / n / n[:, None]) / var / var[:, None]
    weighted = residual / var[:, None]
    found = (weighted.sum(0) ** 2).sum() - (weighted ** 2).sum()
    return max(0.0, float(found / (expected.sum() - np.trace(expected))))


class Fit(NamedTuple):
    mean: np.ndarray      # [A]
    weights: np.ndarray   # [A, A, S], of the scores in each mean
    own: tuple            # variances [A] and degrees of freedom [A] by each variant's scores alone
    drawn: tuple          # the same after moderated()
    seed_var: float
    seed_df: float

    def found_at(self, alpha, *variants):
        """The corrected p up to which a difference of these variants is better or worse."""
        drawn = any(self.drawn[1][i] > self.own[1][i] for i in variants)
        return STRICT * alpha if drawn else alpha


def fit(y):
    """Fit of scores y [A, S], nan where a variant has no run of that seed; each variant has two or more."""
    there = ~np.isnan(y)
    y = np.where(there, y, 0)
    df = there.sum(1) - 1.0
    residual = np.where(there, y - (y.sum(1) / there.sum(1))[:, None], 0)
    least = 1e-24 * (y ** 2).max() + 1e-60  # less is rounding

    def variances(squares, df):
        own = np.where(squares / df > least, squares / df, 0)
        drawn, drawn_df = moderated(own, df)
        return (np.maximum(own, least), df), (np.maximum(drawn, least), drawn_df)

    own, drawn = variances((residual ** 2).sum(1), df)
    seed_var = seed_variance(residual, there, drawn[0])
    if seed_var:  # the variances above hold the seed's: again, from what is left beside it
        var = drawn[0] * max(1e-6, 1 - seed_var / np.median(drawn[0]))
        precision, weights = least_squares(there, var, seed_var)
        residual = np.where(there, y - np.einsum("abs,bs->a", weights, y)[:, None], 0)
        noise = var[:, None] * np.einsum("abs,bs->as", precision, residual)
        left = precision.diagonal().T - np.einsum("abs,bas->as", precision, weights)
        own, drawn = variances((noise ** 2).sum(1), var * left.sum(1))
    _, weights = least_squares(there, drawn[0], seed_var)
    shared = (there.sum(0) > 1).sum()
    return Fit(np.einsum("abs,bs->a", weights, y), weights, own, drawn, seed_var, max(shared - 1.0, 1.0))


def error_of(weights, variances, fitted):
    """(se, df) of a difference: the sum of scores with these weights [A, S].

    Degrees of freedom by Satterthwaite's formula (Welch's), but never more than for equal spreads: where an
    variant's spread is small by chance, the formula would believe the baseline's many seeds instead.
    """
    var, df = variances
    squares, seeds = (weights ** 2).sum(1), fitted.seed_var * (weights.sum(0) ** 2).sum()
    total = squares @ var + seeds
    parts = [np.append(squares * v, seeds) for v in (var, squares @ var / squares.sum())]
    dfs = [float(p.sum() ** 2 / (p ** 2 / np.append(df, fitted.seed_df)).sum()) for p in parts]
    return math.sqrt(total), min(*dfs, float(fitted.own[1].sum()))


# ---- verdicts ----

NOTHING = Comparison(0, 0, mean=math.nan, low=-math.inf, high=math.inf, se=math.inf, df=0.0, p=math.nan,
                 p_corrected=math.nan, p_same=1.0, verdict="undecided", more_seeds=None)


def repeats_of(scores):
    """{variant: that whose scores it repeats on all seeds that both have, two or more; else itself}."""
    found = {}
    for name in sorted(scores, key=lambda name: -len(scores[name])):  # stable: equals stay in their order
        for other in [other for other in found if found[other] == other]:
            shared = scores[name].keys() & scores[other].keys()
            if len(shared) > 1 and all(scores[name][s] == scores[other][s] for s in shared):
                found[name] = other
                break
        else:
            found[name] = name
    return found


def judge(scores, comparisons, alpha=0.05, margin=0.01):
    """[Comparison], one for each (variant, baseline), from scores {variant: {seed: bits/byte}}.

    All of scores count for the spread, also what is not compared. ValueError: a score is not
    finite. Below two seeds, or one degree of freedom, the verdict is "undecided" and the interval infinite.
    """
    for name, of_seed in scores.items():
        for seed, score in of_seed.items():
            if not math.isfinite(score):
                raise ValueError(f"the score of {name}, seed {seed}, is {score}: not a finite number")
    same_as = repeats_of(scores)
    names = [name for name in scores if same_as[name] == name and len(scores[name]) > 1]
    seeds = sorted({seed for name in names for seed in scores[name]})
    y = np.array([[scores[name].get(seed, math.nan) for seed in seeds] for name in names])
    fitted = fit(y) if names else None
    rows, own_p, levels, m = [], [], [], len(comparisons)
    for variant, baseline in comparisons:
        n = len(scores.get(variant, ())), len(scores.get(baseline, ()))
        own, row, found_at = math.nan, NOTHING._replace(n=n[0], n_baseline=n[1]), alpha
        a, b = same_as.get(variant), same_as.get(baseline)
        if min(n) > 1 and a == b:
            own, row = 1.0, row._replace(mean=0.0, low=0.0, high=0.0, se=0.0, df=math.inf, p=1.0, p_same=0.0)
        elif min(n) > 1:
            a, b = names.index(a), names.index(b)
            mean, weights = float(fitted.mean[a] - fitted.mean[b]), fitted.weights[a] - fitted.weights[b]
            se, df = error_of(weights, fitted.drawn, fitted)
            row, found_at = row._replace(mean=mean, se=se, df=df), fitted.found_at(alpha, a, b)
            if df > 1 - 1e-9:
                p, p_same = p_values(mean, se, df, margin)
                own, own_same = p_values(mean, *error_of(weights, fitted.own, fitted), margin)
                half = float(stdtrit(df, 1 - alpha / 2)) * se
                row = row._replace(low=mean - half, high=mean + half, p=p,
                                   p_same=max(min(1.0, m * p_same), own_same))
        elif min(n) == 1:
            one, other = ([*scores[name].values()] for name in (variant, baseline))
            row = row._replace(mean=float(np.mean(one) - np.mean(other)))
        rows.append(row)
        own_p.append(own)
        levels.append(found_at)
    corrected = np.maximum(holm([row.p for row in rows]), own_p)
    return [decided(row, float(p), at, alpha, margin, m) for row, p, at in zip(rows, corrected, levels)]


def p_values(mean, se, df, margin):
    """p of no difference, two-sided; the larger p of the one-sided tests of a difference beyond +-margin."""
    return float(2 * stdtr(df, -abs(mean) / se)), float(stdtr(df, (abs(mean) - margin) / se))


def decided(row, p_corrected, found_at, alpha, margin, m):
    """The row with its verdict; nan decides nothing. "same" has its whole interval within the margin."""
    verdict, wanted = "undecided", None
    if p_corrected <= found_at:
        verdict = "better" if row.mean < 0 else "worse"
    elif row.p_same <= alpha and max(-row.low, row.high) <= margin:  # one comparison: p_same asks for less
        verdict = "same"
    elif math.isfinite(row.low):
        verdict = "undecided" if row.low <= 0 <= row.high else "leaning"
        wanted = seeds_wanted(row, found_at, alpha, margin, m)
    return row._replace(p_corrected=p_corrected, verdict=verdict, more_seeds=wanted)


def seeds_wanted(row, found_at, alpha, margin, m, power=0.8, most=1000):
    """Seeds of the variant, the baseline's in proportion, at which row.mean is found, or shown the same."""
    def enough(n):
        se, df = row.se * math.sqrt(row.n / n), row.df * n / row.n
        found = stdtr(df, abs(row.mean) / se - stdtrit(df, 1 - found_at / m / 2))
        inside = stdtrit(df, 1 - alpha / max(m, 2))  # the interval, too, within the margin
        outside = stdtr(df, inside - (margin - row.mean) / se) + stdtr(df, inside - (margin + row.mean) / se)
        return max(found, 1 - outside) >= power

    n = row.n + 1 + bisect_left(range(row.n + 1, most + 1), True, key=enough)
    return n if n <= most else None


def findable(scores, n, n_baseline, m, alpha=0.05, power=0.8):
    """The smallest true difference (bits/byte) that n seeds find with this power, in Holm's first of m steps.

    From the upper 90 % bound of the spread that similar variants have together; nan: none shows a spread.
    """
    several = [[*of_seed.values()] for of_seed in scores.values() if len(of_seed) > 1]
    df = np.array([len(s) - 1.0 for s in several])
    var = np.array([np.var(s, ddof=1) if len({*s}) > 1 else 0.0 for s in several])
    kept = similar(var, df)
    if not len(kept) or min(n, n_baseline) < 2:
        return math.nan
    se = math.sqrt(df[kept] @ var[kept] / chdtri(df[kept].sum(), 0.9) * (1 / n + 1 / n_baseline))
    if m + 1 < LEAST_VARIANTS:  # Welch's, for equal spreads
        df = (1 / n + 1 / n_baseline) ** 2 / (1 / n ** 2 / (n - 1) + 1 / n_baseline ** 2 / (n_baseline - 1))
    else:
        df, alpha = m * (n - 1) + n_baseline - 1, STRICT * alpha
    return float(se * (stdtrit(df, 1 - alpha / m / 2) + stdtrit(df, power)))


def holm(p_values):
    """Holm's adjusted p values [m]: each held to alpha, the chance of any false claim is below alpha.

    nan stays nan and yet counts among the m: a comparison that failed must not make the others look better.
    """
    p = np.asarray(p_values, np.float64)
    order = np.argsort(p)  # nan last
    times_left = np.where(np.isnan(p), 1, p)[order] * np.arange(p.size, 0, -1)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(times_left), 1)
    return np.where(np.isnan(p), math.nan, adjusted)


# ---- in words ----

def in_words(comparison, alpha=0.05, margin=0.01):
    """The verdict as one sentence."""
    j, level = comparison, f"{100 * (1 - alpha):g} % interval"
    if math.isinf(j.low) and min(j.n, j.n_baseline) > 1:
        return f"undecided: {j.n} and {j.n_baseline} seeds do not tell the spread of these scores"
    if math.isinf(j.low):
        return f"undecided: {j.n} and {j.n_baseline} seeds are too few, each side needs two or more"
    if j.se == 0:
        return "the same: identical scores on every shared seed"
    p = "corrected p < 0.0001" if j.p_corrected < 1e-4 else f"corrected p = {j.p_corrected:.3g}"
    if j.verdict in ("better", "worse"):  # the word says the sign
        low, high = (-j.high, -j.low) if j.mean < 0 else (j.low, j.high)
        return f"{j.verdict} by {abs(j.mean):.4f} bits/byte ({level} {low:.4f} to {high:.4f}, {p})"
    seen = f"{j.mean:+.4f} bits/byte ({level} {j.low:+.4f} to {j.high:+.4f}"
    if j.verdict == "same":
        return f"the same within {margin:g} bits/byte: {seen})"
    more = f"about {j.more_seeds}" if j.more_seeds else "more than 1000"
    wanted = f"{more} seeds, now {j.n}, would probably decide"
    if j.verdict == "leaning":
        return f"leaning to {'better' if j.mean < 0 else 'worse'}, not certain: {seen}, {p}); {wanted}"
    return f"undecided, better and worse are both possible: {seen}, {p}); {wanted}"
