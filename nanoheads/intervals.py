"""
95 % intervals, each as [value, low, high], by what they are an interval of.

t_interval       the mean of independent values
over_windows     the mean over a text, whose neighbouring windows resemble each other
jackknife        any figure, from what it is without each part of the text in turn
by_draws         any figure, from what it is on parts drawn again and again
block_bootstrap  the difference of two models on one text, in bits/byte
"""

import math

import numpy as np
from scipy.special import ndtr, stdtrit  # scipy.stats has them too, and takes 0.5 s more to import

BLOCKS = 32  # of neighbouring windows, at most: what intervals over text rest on


def t_interval(values):
    """[mean, low, high] of the mean of values [n], by t; infinite ends for one."""
    n, mean = len(values), float(np.mean(values))
    half = -stdtrit(n - 1, 0.025) * np.std(values, ddof=1) / math.sqrt(n) if n > 1 else math.inf
    return [mean, float(mean - half), float(mean + half)]


def over_checkpoints(samples, alone):
    """[value, low, high] of samples, an array [1 + ...] for each checkpoint: by t; one: alone(samples[0])."""
    return t_interval([each[0] for each in samples]) if len(samples) > 1 else alone(samples[0])


# ---- over text ----

def blocks_of(window, n_windows):
    """The block of neighbours, of BLOCKS at most, that each of these windows [n] is in: [n]."""
    return window * min(BLOCKS, n_windows) // n_windows


def over_windows(values, window, n_windows):
    """[mean, low, high] of values [n]: their plain mean, the interval of the means of blocks of windows.

    window [n]: which window each value is of; neighbours make a block.
    """
    block = blocks_of(window, n_windows)
    size = np.bincount(block)
    there = size > 0  # a short last window has no late positions
    middle, low, high = t_interval(np.bincount(block, values)[there] / size[there])
    mean = float(values.mean())
    return [mean, mean - (middle - low), mean + (high - middle)]


def jackknife(values):
    """(value, half of its interval) of values [P + 1]: a figure of all P parts, then without each in turn.

    For a mean that is the t interval. It holds for shares and for what compares parts with each other, too,
    where the parts' own figures would not be independent. NaN: one part, or not defined without another.
    """
    value, without = values[0], values[1:]
    n = len(without)
    if n < 2:
        return float(value), math.nan
    return float(value), float(stdtrit(n - 1, 0.975) * math.sqrt((n - 1) * np.var(without)))


def by_jackknife(values):
    """[value, low, high] by jackknife()."""
    value, half = jackknife(values)
    return [value, value - half, value + half]


def by_draws(values):
    """[value, low, high] of values [1 + draws]: a figure of all parts, then of parts drawn, where defined."""
    return [float(values[0]), *map(float, np.nanquantile(values[1:], (0.025, 0.975)))]


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
    tail = ndtr(math.sqrt(blocks / (blocks - 1)) * stdtrit(blocks - 1, (1 - level) / 2))
    low, high = np.quantile(np.concatenate(per_window), (tail, 1 - tail)) * n / (math.log(2) * bytes_scored)
    return mean, float(low), float(high)
