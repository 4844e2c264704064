"""
From paired runs to a verdict: t intervals over seeds, Holm's correction, what could have been found, and a
bootstrap over text.

A difference is variant minus baseline in test bits per byte, where both trained from the same seed: below 0
is better. Two spreads answer two questions. Over seeds (paired): would it win again if both were trained
again? Over text (block_bootstrap): would these two trained models rank the same on other text of this kind?
Verdicts rest on the first.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import chdtr
from scipy.stats import chi2, norm, t


class Paired(NamedTuple):
    """What n differences (bits/byte) say of the true mean: interval [low, high], two-sided p, uncorrected."""

    n: int
    mean: float
    low: float
    high: float
    sd: float
    p: float


# ---- over seeds ----

def paired(differences, level=0.95):
    """Paired of differences [n], one per seed. ValueError where one is not finite: a run that diverged.

    Below two seeds nothing can be shown: the interval is infinite, p is 1. Where all seeds give exactly the
    same difference, the interval is that point: p is 1 at zero, else 0, the limit of t as sd goes to 0.
    """
    d = np.asarray(differences, np.float64)
    if not np.isfinite(d).all():
        raise ValueError(f"difference {int(np.argmin(np.isfinite(d)))} of {len(d)} is not a finite number")
    n = len(d)
    if n < 2:
        return Paired(n, float(d[0]) if n else math.nan, -math.inf, math.inf, math.nan, 1.0)
    if (d == d[0]).all():  # std() would be a rounding error of the mean here, and t = mean / rounding error
        same = float(d[0])
        return Paired(n, same, same, same, 0.0, float(same == 0))
    mean, sd = float(d.mean()), float(d.std(ddof=1))
    error = sd / math.sqrt(n)
    half = float(t.isf((1 - level) / 2, n - 1)) * error
    return Paired(n, mean, mean - half, mean + half, sd, float(2 * t.sf(abs(mean) / error, n - 1)))


# ---- over comparisons ----

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


def detectable(sd, n, alpha=0.05, power=0.8):
    """The smallest true mean difference (bits/byte) that n pairs show with this power, if sd is true.

    For a two-sided paired t-test at alpha; pass alpha / m for the most cautious of Holm's m steps. nan below
    two pairs. scipy's nct gives nan for some of these tails (and what builds on it, wrong answers), so the
    power is summed up here: P(|Z + shift| > critical * S), Z normal, S the ratio of estimated to true sd.
    """
    if n < 2:
        return math.nan
    df, critical = n - 1, t.isf(alpha / 2, n - 1)
    z = np.linspace(-9, 9, 4001)
    weight = norm.pdf(z) / norm.pdf(z).sum()

    def surplus(shift):
        return weight @ chdtr(df, df * ((z + shift) / critical) ** 2) - power

    # with chance q, S is below its quantile, and so is -Z: together they suffice at this shift
    q = math.sqrt(power)
    enough = critical * math.sqrt(chi2.ppf(q, df) / df) + norm.ppf(q)
    return float(sd / math.sqrt(n) * brentq(surplus, 0, enough))


# ---- over text ----

def block_bootstrap(variant_nats, baseline_nats, bytes_scored, block, level=0.95, resamples=2000, seed=0):
    """(mean, low, high): the difference of two models on a text in bits/byte, and its interval over text.

    The nats, [n_windows] each, are of the same windows in the order of the text. Neighbours resemble each
    other, so whole blocks of `block` windows are drawn, the same for both models. Take blocks longer than the
    resemblance lasts, but keep 30 of them or more. One block: an infinite interval. ValueError where the
    windows differ in number.
    """
    variant, baseline = np.asarray(variant_nats, np.float64), np.asarray(baseline_nats, np.float64)
    if variant.shape != baseline.shape:
        raise ValueError(f"the variant has {len(variant):,} windows and the baseline {len(baseline):,}: "
                         "not the same text")
    if block < 1:
        raise ValueError(f"block={block} must be at least 1 window")
    difference, n = variant - baseline, len(variant)
    mean = float(difference.sum()) / (math.log(2) * bytes_scored)
    starts = np.arange(0, n, block)
    if (blocks := len(starts)) < 2:
        return mean, -math.inf, math.inf
    nats, size = np.add.reduceat(difference, starts), np.minimum(block, n - starts)
    rng, per_window = np.random.default_rng(seed), []
    at_once = max(1, (1 << 20) // blocks)  # resamples: some 8 MB of indices
    for done in range(0, resamples, at_once):
        drawn = rng.integers(blocks, size=(min(at_once, resamples - done), blocks))
        # the last block is short: a ratio gives it its weight
        per_window.append(nats[drawn].sum(1) / size[drawn].sum(1))
    # percentiles of few blocks are too narrow, as z is beside t: Hesterberg's expanded percentiles (2015)
    tail = norm.sf(math.sqrt(blocks / (blocks - 1)) * t.isf((1 - level) / 2, blocks - 1))
    low, high = np.quantile(np.concatenate(per_window), (tail, 1 - tail)) * n / (math.log(2) * bytes_scored)
    return mean, float(low), float(high)


# ---- in words ----

def verdict(paired, p_adjusted, alpha=0.05):
    """"better", "worse" or "no difference shown"."""
    if paired.n < 2 or paired.mean == 0 or not p_adjusted <= alpha:  # `not <=`, so that nan shows nothing
        return "no difference shown"
    return "better" if paired.mean < 0 else "worse"


def in_words(paired, p_adjusted, smallest, alpha=0.05):
    """The verdict as one sentence; smallest is what detectable() gave, the interval is of level 1 - alpha."""
    if paired.n < 2:
        return f"{'only one seed' if paired.n else 'no pair of runs'}: no verdict"
    if paired.mean == paired.sd == 0:
        return "identical: the same numbers on every seed"
    called = verdict(paired, p_adjusted, alpha)
    p = "corrected p < 0.0001" if p_adjusted < 1e-4 else f"corrected p = {p_adjusted:.3g}"
    if called == "no difference shown":
        interval = f"interval {paired.low:+.4f} to {paired.high:+.4f}"
        return (f"{called} at this budget: {paired.mean:+.4f} bits/byte ({interval}, {p}); "
                f"a difference of {smallest:.4f} would have been found four times in five")
    size = f"{called} by {abs(paired.mean):.4f} bits/byte"
    if paired.sd == 0:
        return f"{size}, exactly so on every seed: does the seed change anything?"
    # the word says the sign
    low, high = (-paired.high, -paired.low) if called == "better" else (paired.low, paired.high)
    return f"{size} ({100 * (1 - alpha):g} % interval {low:.4f} to {high:.4f}, {p})"
