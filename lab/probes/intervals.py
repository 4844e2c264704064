"""
95 % intervals of what probes measure, each as [value, low, high], by what they are an interval of.

over_checkpoints    samples of several checkpoints, each with an interval of its own where there is one alone
over_windows        the mean over a text, whose neighbouring windows resemble each other
jackknife_interval  any figure, from what it is without each part of the text in turn
draws_interval      any figure, from what it is on parts drawn again and again

The t interval, on which they rest, is nanoheads/intervals.py's.
"""

import math

import numpy as np
from scipy.special import stdtrit  # scipy.stats has it too, and takes 0.5 s more to import

from nanoheads.intervals import t_interval

BLOCKS = 32  # of neighbouring windows, at most: what intervals over text rest on


def over_checkpoints(samples, alone):
    """[value, low, high] of samples, an array [1 + ...] for each checkpoint: by t; one: alone(samples[0])."""
    return t_interval([sample[0] for sample in samples]) if len(samples) > 1 else alone(samples[0])


def blocks_of(window, n_windows):
    """The block of neighbours, of BLOCKS at most, that each of these windows [n] is in: [n]."""
    return window * min(BLOCKS, n_windows) // n_windows


def over_windows(values, window, n_windows):
    """[mean, low, high] of values [n]: their plain mean, the interval of the means of blocks of windows.

    window [n]: which window each value is of; neighbours make a block.
    """
    block = blocks_of(window, n_windows)
    size = np.bincount(block)
    is_filled = size > 0  # a short last window has no late positions
    middle, low, high = t_interval(np.bincount(block, values)[is_filled] / size[is_filled])
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


def jackknife_interval(values):
    """[value, low, high] by jackknife()."""
    value, half = jackknife(values)
    return [value, value - half, value + half]


def draws_interval(values):
    """[value, low, high] of values [1 + draws]: a figure of all parts, then of parts drawn, where defined."""
    return [float(values[0]), *map(float, np.nanquantile(values[1:], (0.025, 0.975)))]
