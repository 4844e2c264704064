"""
How a text reads, in numbers: repetition, diversity, loops. No model here; `probe.py text` has them.

Words are what lies between white space, whatever the tokens of a model are, so that vocabularies of different
kinds compare. Loops and first repeats are counted in bytes, where one without white space shows as well. NaN:
not defined for such a text.
"""

import math

import numpy as np

ORDERS = (1, 2, 3, 4)  # n of rep-n and distinct-n
REPEAT = 16            # bytes that come back: three words or so


# ---- a text: a list of words, or bytes ----

def words(raw):
    """bytes -> [str], what lies between white space; bytes that are not UTF-8 show as U+FFFD."""
    return raw.decode("utf-8", "replace").split()


def ngrams(items, n):
    """[tuple], the runs of n neighbours; none where there are fewer than n items."""
    return list(zip(*(items[i:] for i in range(n))))


def rep_n(items, n):
    """Share of one text's n-grams that came before: 1 - different / all (seq-rep-n, arXiv 1908.04319)."""
    grams = ngrams(items, n)
    return 1 - len(set(grams)) / len(grams) if grams else math.nan


def loop(items):
    """Share of one text that its longest loop takes up: a stretch of one period, twice round at least."""
    codes, longest = np.unique(list(items), return_inverse=True)[1], 0
    for period in range(1, len(codes) // 2 + 1):
        same = codes[period:] == codes[:-period]
        ends = np.flatnonzero(np.concatenate(([True], ~same, [True])))
        run = int(np.diff(ends).max()) - 1  # so many neighbours are what stands a period later
        if run >= period:
            longest = max(longest, run + period)
    return longest / len(codes) if len(codes) else math.nan


def first_repeat(items, n):
    """How many items were read when for the first time their last n had been there before; None: never."""
    seen = set()
    for i, gram in enumerate(ngrams(items, n)):
        if gram in seen:
            return i + n
        seen.add(gram)


# ---- a set of texts ----

def distinct_n(texts, n):
    """Share of the n-grams of all texts, [[word]], that are different (arXiv 1510.03055); none spans two."""
    grams = [gram for text in texts for gram in ngrams(text, n)]
    return len(set(grams)) / len(grams) if grams else math.nan


def self_bleu(texts):
    """BLEU of each text, [[word]], against all others, their mean, 0 to 1 (arXiv 1802.01886).

    sacrebleu's sentence BLEU: 4-grams, shorter ones in a shorter text, exponential smoothing. Empty texts are
    left out.
    """
    from sacrebleu.metrics import BLEU
    lines = [" ".join(text) for text in texts if text]
    if len(lines) < 2:
        return math.nan
    bleu = BLEU(tokenize="none", effective_order=True)
    return sum(bleu.sentence_score(line, lines[:i] + lines[i + 1:]).score
               for i, line in enumerate(lines)) / len(lines) / 100


# ---- many samples of many prompts ----

def sample_figures(raw):
    """{figure: value} of one sample, bytes; one in which nothing comes twice counts with its length."""
    text, repeat = words(raw), first_repeat(raw, REPEAT)
    figures = {f"rep_{n}": rep_n(text, n) for n in ORDERS}
    return figures | dict(loop=loop(raw), repeats=float(repeat is not None) if raw else math.nan,
                          first_repeat=repeat or len(raw) or math.nan)


def set_figures(sets):
    """{figure: value} of sets of texts, [[[word]]]: the mean over the sets."""
    figures = {f"distinct_{n}": [distinct_n(texts, n) for texts in sets] for n in ORDERS}
    figures["self_bleu"] = [self_bleu(texts) for texts in sets]
    return {name: mean(values) for name, values in figures.items()}


def mean(values):
    """The mean of those that are defined; NaN where none is."""
    values = [v for v in values if not math.isnan(v)]
    return sum(values) / len(values) if values else math.nan


def leave_one_out(samples, bits=None):
    """{figure: [P + 1]}: of all samples, then without those of each prompt in turn, for jackknife().

    samples [P][S] are bytes: S of each of P prompts, two or more. A set is one sample of each prompt. bits
    [P][S]: of each under a judge, which gives "judge", bits per byte.
    """
    sample_rows = [[sample_figures(raw) for raw in row] for row in samples]
    texts = [[words(raw) for raw in row] for row in samples]
    P, figure_sets = len(samples), []
    for keep in [list(range(P)), *([p for p in range(P) if p != left_out] for left_out in range(P))]:
        rows = [texts[p] for p in keep]
        samples_kept = [sample for p in keep for sample in sample_rows[p]]
        figures = {name: mean([sample[name] for sample in samples_kept]) for name in samples_kept[0]}
        figures |= set_figures(list(zip(*rows)))
        if bits is not None:
            size = sum(len(raw) for p in keep for raw in samples[p])
            figures["judge"] = sum(sum(bits[p]) for p in keep) / size if size else math.nan
        figure_sets.append(figures)
    return {name: np.array([figures[name] for figures in figure_sets]) for name in figure_sets[0]}
