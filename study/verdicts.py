"""
From scores to verdicts: every comparison of a study, judged together, and what is left of it at equal cost.

The plain GPT is also trained at several multiples of its budget. Between two of them its score is a
straight line over the logarithm of the multiple. So a variant of any cost is compared with a weighted mean
of two groups of runs, by the same test as everything else.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq

from study import stats
from study.records import PLAIN, AtCost, Beyond, Comparison, Pair, Worth
from study.scores import mean_of, scores_of

SAME_SIZE = 0.001  # of the parameters: so far apart, two models count as equally large


@dataclass(frozen=True)
class Measure:
    """A kind of score, and what follows from the kind.

    name: the head of its column. unit: behind a difference in a sentence. test: (own, baseline, alpha,
    margin) -> stats.Difference, each side a list of scores for each text. margin: what is called the same,
    unless a study says otherwise. pools: several texts are one comparison. has_costs: flags and costs of
    the runs are known, and the plain GPT's other budgets are a curve. acts: equal scores at every seed say
    that nothing acted, which at the top of a task they do not, nor where a seed of another program is but a
    name.
    """
    name: str
    unit: str
    test: Callable
    margin: float
    higher_is_better: bool
    pools: bool
    has_costs: bool
    acts: bool


MEASURES = {
    "bits/byte": Measure("bits/byte", "bits/byte", stats.welch, 0.01,
                         higher_is_better=False, pools=True, has_costs=True, acts=True),
    "right answers": Measure("right answers", "of the answers", stats.permutation, 0.05,
                             higher_is_better=True, pools=False, has_costs=False, acts=False),
    "score": Measure("score", "", stats.welch, 0.01,
                     higher_is_better=False, pools=True, has_costs=False, acts=False),
    "score, higher is better": Measure("score", "", stats.welch, 0.01,
                                       higher_is_better=True, pools=True, has_costs=False, acts=False),
}


# ---- verdicts ----

def verdicts(study):
    """The Comparison of each pair of a study, corrected together."""
    return judged(study, study.pairs)


def on_each_text(study):
    """{text: the Comparisons on it alone, corrected by themselves} of a study that pools texts; {}: it has
    one.
    """
    if len(study.texts) < 2 or not MEASURES[study.measure].pools:
        return {}
    return {text: judged(study, [replace(pair, texts=(text,)) for pair in study.pairs])
            for text in study.texts}


def judged(study, pairs):
    """The Comparison of each of these pairs, corrected together."""
    measure, scores, failed = MEASURES[study.measure], scores_of(study), failures_of(study)
    seen = [difference(scores, pair, measure, study.alpha, study.margin) for pair in pairs]
    tested = sum(each is not stats.IDENTICAL for each in seen)
    found = []
    for pair, each, corrected in zip(pairs, seen, stats.corrected(seen)):
        n, n_baseline = (seeds_of(scores, name, pair.texts) for name in (pair.variant, pair.baseline))
        verdict, seeds = verdict_on(corrected, study.alpha, measure.higher_is_better), None
        if verdict == "undecided":
            seeds = stats.seeds_to_decide(each, n, study.alpha, study.margin, tested)
        missing = sum(failed[side] for side in sides_that_matter(pair, verdict))
        withheld = verdict if missing and verdict != "undecided" else ""
        found.append(Comparison(
            variant=pair.variant, baseline=pair.baseline, texts=pair.texts, equal=pair.equal,
            n=n, n_baseline=n_baseline, mean=each.mean, low=each.low, high=each.high, se=each.se, df=each.df,
            p=each.p, p_corrected=corrected.p, p_same=corrected.p_same,
            verdict="undecided" if withheld else verdict, seeds=seeds, failed=missing, withheld=withheld,
            **at_equal_costs(study, scores, pair, each)))
    return tuple(found)


def difference(scores, pair, measure, alpha, margin):
    """The stats.Difference of a pair."""
    own, baseline = ([scores.get(name, {}).get(text, {}) for text in pair.texts]
                     for name in (pair.variant, pair.baseline))
    if measure.acts and all(map(identical, own, baseline)):
        return stats.IDENTICAL
    return measure.test([[*each.values()] for each in own], [[*each.values()] for each in baseline],
                        alpha, margin)


def identical(scores, others):
    """Whether two {seed: score} agree at each seed of the one with fewer, at two at least."""
    shared = scores.keys() & others.keys()
    return len(shared) == min(len(scores), len(others)) > 1 and all(scores[s] == others[s] for s in shared)


def verdict_on(corrected, alpha, higher_is_better):
    """The verdict on a Difference whose p are corrected."""
    if corrected is stats.IDENTICAL:
        return "identical"
    if corrected.p <= alpha:
        return "better" if (corrected.mean > 0) == higher_is_better else "worse"
    return "same" if corrected.p_same <= alpha else "undecided"


def sides_that_matter(pair, verdict):
    """The sides of a pair whose failed runs might change a verdict: the one that it favours, of others
    both.
    """
    return {"better": [pair.variant], "worse": [pair.baseline]}.get(verdict, [pair.variant, pair.baseline])


def failures_of(study):
    """{variant: how many of its judged runs failed}, 0 for any other."""
    return Counter(run.variant for run in study.runs if run.stage == "judge" and run.name in study.failures)


def seeds_of(scores, name, texts):
    """How many seeds a variant has on every one of these texts."""
    return min(len(scores.get(name, {}).get(text, ())) for text in texts)


def seems_better(c, alpha, higher_is_better=False):
    """Whether a Comparison is on the better side before anything is corrected."""
    return c.p <= alpha and (c.mean > 0) == higher_is_better


def beyond_target(study):
    """The Beyond of each variant of a study with a target, corrected together, apart from the comparisons."""
    if study.target is None:
        return ()
    above, failed = MEASURES[study.measure].higher_is_better, failures_of(study)
    scores = {name: [score for own in texts.values() for score in own.values()]
              for name, texts in scores_of(study).items()}
    p = [stats.p_beyond(own, study.target, above) for own in scores.values()]
    found = []
    for (name, own), single, corrected in zip(scores.items(), p, stats.holm(p)):
        mean = stats.of_parts([(1, own)], study.alpha)
        found.append(Beyond(name, len(own), mean.mean, mean.low, mean.high, single, corrected,
                            corrected <= study.alpha and not failed[name], failed[name]))
    return tuple(found)


# ---- what a report shows beside verdicts ----

def uncertainty(study, name, texts):
    """Half of the interval of a variant's own mean over these texts; None: its seeds show no spread."""
    scores = scores_of(study).get(name, {})
    own = stats.of_parts(stats.parts_of([[*scores.get(text, {}).values()] for text in texts], 1), study.alpha)
    return (own.high - own.low) / 2 if own.df else None


def differences(scores, c):
    """Each seed of a Comparison's variant minus the baseline's mean, over its texts."""
    own, base = ([scores.get(name, {}).get(text, {}) for text in c.texts] for name in (c.variant, c.baseline))
    mean = np.mean([np.mean([*each.values()]) for each in base])
    seeds = [seed for seed in own[0] if all(seed in each for each in own)]
    return [float(np.mean([each[seed] for each in own]) - mean) for seed in seeds]


def on_validation(study):
    """{variant: (mean score, stats.Difference to the plain GPT)} of the screening, the best first; nothing is
    corrected, and there are no verdicts.
    """
    scores, measure = scores_of(study, "screen"), MEASURES[study.measure]
    if PLAIN not in scores:
        return {}
    (text,) = scores[PLAIN]
    found = {name: (mean_of(scores, name, [text]),
                    difference(scores, Pair(name, PLAIN, (text,)), measure, study.alpha, study.margin))
             for name in scores if name != PLAIN}
    sign = -1 if measure.higher_is_better else 1
    return dict(sorted(found.items(), key=lambda row: sign * row[1][0]))


def same_size(params, others):
    """Whether two numbers of parameters count as equal."""
    return None not in (params, others) and abs(others - params) <= SAME_SIZE * params


def shown_at_equal(study, comparisons, c):
    """{what is equal: whether a variant that is better is shown to be so there; None: not measured}.

    At equal parameters that is a verdict. At equal FLOPs and equal time the interval, which is not corrected,
    lies on the better side. A variant that needs no more of something than the plain GPT is better at an
    equal amount of it.
    """
    if not MEASURES[study.measure].has_costs:
        return {}
    variant, plain = study.variant(c.variant), study.variant(c.baseline)
    shown = {"parameters": None}
    if variant.params and plain.params and (variant.params <= plain.params
                                            or same_size(variant.params, plain.params)):
        shown["parameters"] = True
    for other in comparisons:
        if other.variant == c.variant and other.equal and other.texts == c.texts:
            shown[other.equal] = other.verdict == "better" and other.high < 0
    tokens = over(variant.tokens, plain.tokens)
    flops = [over(variant.flops, plain.flops), over(variant.needed, plain.needed) * tokens]
    flops = max((each for each in flops if not math.isnan(each)), default=math.nan)
    time = variant.time[2] * tokens if variant.time else math.nan
    shown["FLOPs"] = shown_at_cost(c.equal_flops, flops)
    shown["time"] = shown_at_cost(c.equal_time, time)
    return shown


def shown_at_cost(each, ratio):
    """Whether a variant is better at equal cost; without a figure, whether it costs no more."""
    if each and each.high is not None:
        return each.high < 0
    return True if (each.ratio if each else ratio) <= 1 else None


def over(one, other):
    """A ratio; nan: one of both is not known."""
    return one / other if one and other else math.nan


# ---- at equal cost ----

def at_equal_costs(study, scores, pair, seen):
    """{worth, equal_flops, equal_time} of a pair with the plain GPT, for a Comparison; {}: not measured."""
    curve = curve_of(study, scores, pair.texts)
    if pair.baseline != PLAIN or pair.equal or not curve:
        return {}
    # with the very scores of the plain GPT a variant has no error: the plain GPT's own takes its place
    name = PLAIN if seen is stats.IDENTICAL else pair.variant
    own = stats.parts_of([[*scores.get(name, {}).get(text, {}).values()] for text in pair.texts], 1)
    variant, plain = study.variant(pair.variant), study.variant(PLAIN)
    equal_time = None
    if variant.time:  # from the low end at its least to the high end at its most
        middle, least, most = (at_cost(curve, own, time * variant.tokens / plain.tokens, study.alpha)
                               for time in variant.time)
        equal_time = replace(middle, low=least.low, high=most.high)
    flops = variant.flops / plain.flops if variant.flops and plain.flops else math.nan
    return dict(worth=worth(curve, own, study.alpha), equal_flops=at_cost(curve, own, flops, study.alpha),
                equal_time=equal_time)


def curve_of(study, scores, texts):
    """{multiple: the plain GPT's scores on each of these texts} of its budgets; None: it has one alone."""
    if not MEASURES[study.measure].has_costs:
        return None
    plain, curve = study.variant(PLAIN), {}
    for each in study.variants:
        by_text = [[*scores.get(each.name, {}).get(text, {}).values()] for text in texts]
        if each.kind in ("plain", "budget") and all(by_text):
            curve[each.tokens / plain.tokens] = by_text
    return dict(sorted(curve.items())) if len(curve) > 1 and 1.0 in curve else None


def plain_at(curve, multiple, weight=-1):
    """The plain GPT at a multiple of its budget, as parts of stats.of_parts(); None: beyond its budgets."""
    budgets = [*curve]
    if not budgets[0] <= multiple <= budgets[-1]:
        return None
    i = min(int(np.searchsorted(budgets, multiple, "right")), len(budgets) - 1)
    below, above = budgets[i - 1], budgets[i]
    share = math.log(multiple / below) / math.log(above / below)
    return [*stats.parts_of(curve[below], weight * (1 - share)),
            *stats.parts_of(curve[above], weight * share)]


def at_cost(curve, own, ratio, alpha):
    """The AtCost of a variant, as parts, and the plain GPT trained for `ratio` times its own cost."""
    plain = plain_at(curve, ratio)
    left = stats.of_parts([*own, *plain], alpha) if plain else stats.Difference()
    return AtCost(ratio, *(value if math.isfinite(value) else None
                           for value in (left.mean, left.low, left.high, left.p)))


def worth(curve, own, alpha):
    """The Worth of a variant, as parts: the multiple at which the plain GPT's interpolated score is its own.

    It is not divided by what the variant costs: one that takes 1.23 times the FLOPs must be worth more than
    1.23 to be better at equal FLOPs. The interval holds the multiples at which the difference's own
    interval holds 0.
    """
    scores = [stats.of_parts(plain_at(curve, multiple, 1)).mean for multiple in curve]
    if not np.all(np.diff(scores) < 0):
        return Worth(None, None, None, "the plain GPT's bits/byte does not fall all along its budgets: no "
                                       "value in compute")
    if not math.isfinite(stats.of_parts(own).mean):
        return Worth(None, None, None, "no difference was measured")
    smallest, largest = min(curve), max(curve)

    def crossing(end):
        """Where one end of what is left, which rises with the plain GPT's compute, crosses 0."""
        def left(multiple):
            # infinite where a budget has one seed, whose spread is not known
            return np.clip(getattr(stats.of_parts([*own, *plain_at(curve, multiple)], alpha), end), -1e9, 1e9)
        if left(smallest) > 0:
            return -math.inf
        return math.inf if left(largest) < 0 else float(brentq(left, smallest, largest))

    def in_words(at):
        if math.isfinite(at):
            return f"{at:.2f}"
        return f"less than {smallest:g}" if at < 0 else f"more than {largest:g}"

    ends = mean, low, high = [crossing(end) for end in ("mean", "high", "low")]
    interval = "" if low == high else f" [{in_words(low)}, {in_words(high)}]"
    return Worth(*(at if math.isfinite(at) else None for at in ends),
                 f"worth {in_words(mean)} x{interval} of the plain GPT's training compute")
