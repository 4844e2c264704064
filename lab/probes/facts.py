"""
Facts such as "[QZX4831]" in a text of bytes, and the question for one, "[QZX" at the end of a text.

lab/needle.py plants them, `lab/probe.py needle` asks for them.
"""

from itertools import product
from string import ascii_uppercase

import numpy as np

DIGITS = 4


# Nothing stands between name and digits: to find where the last letter was before and to read on is then most
# of recall. Each is asked seven times: 44 % of all lines then have an earlier one in the same 1,024 bytes;
# asked once, twice as many, it is 16 %.
def question(name):
    return b"\n[%s" % name


def fact(name, digits):
    return question(name) + digits + b"]\n"


def names(split):
    """The names of a split, three capitals each, in no order: train has 8 of 10, val and test one each."""
    every = ["".join(letters).encode() for letters in product(ascii_uppercase, repeat=3)]
    # the same for every seed: what is learnt can never be tested
    order = np.random.default_rng(0).permutation(len(every))
    cut = {"train": (0.0, 0.8), "val": (0.8, 0.9), "test": (0.9, 1.0)}[split]
    return [every[i] for i in order[int(cut[0] * len(every)):int(cut[1] * len(every))]]


def digits_of(number):
    return b"%0*d" % (DIGITS, number)
