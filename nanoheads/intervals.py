"""95 % intervals of a mean over independent values, and of the difference of two models on one text."""

import math

import numpy as np
from scipy.special import ndtr, stdtrit  # scipy.stats has them too, and takes 0.5 s more to import


def t_interval(values):
    """[mean, low, high] of the mean of values [n], by t; infinite ends for one."""
    n, mean = len(values), float(np.mean(values))
    half = -stdtrit(n - 1, 0.025) * np.std(values, ddof=1) / math.sqrt(n) if n > 1 else math.inf
    return [mean, float(mean - half), float(mean + half)]


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
    for first in range(0, resamples, at_once):
        indices = rng.integers(blocks, size=(min(at_once, resamples - first), blocks))
        # the last block is short: a ratio gives it its weight
        per_window.append(nats[indices].sum(1) / size[indices].sum(1))
    # percentiles of few blocks are too narrow, as z is beside t: Hesterberg's expanded percentiles (2015)
    tail = ndtr(math.sqrt(blocks / (blocks - 1)) * stdtrit(blocks - 1, (1 - level) / 2))
    low, high = np.quantile(np.concatenate(per_window), (tail, 1 - tail)) * n / (math.log(2) * bytes_scored)
    return mean, float(low), float(high)
