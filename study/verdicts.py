"""
Judges all comparisons of a study together, from scores to verdicts, also at equal parameters, FLOPs or time.

The plain GPT is also trained at several multiples of its budget. Between two of them its score is a
straight line over the logarithm of the multiple. So a variant of any cost is compared with a weighted mean
of two groups of runs, by the same test as everything else.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from study import stats
from study.records import PLAIN, Comparison, DifferenceAtCost, Pair, TargetTest, Worth
from study.scores import mean_of, scores_of

SAME_SIZE = 0.001  # two models whose parameters differ by at most this share count as equally large


@dataclass(frozen=True)
class Measure:
    """A kind of score, and what follows from the kind.

    name: the head of its column. unit: behind a difference in a sentence. test: (variant, baseline, alpha,
    margin) -> stats.Difference, each side a list of scores for each text. margin: what is called the same,
    unless a study says otherwise. pools: several texts are one comparison. has_costs: flags and costs of
    the runs are known, and the plain GPT's other budgets are a curve. equal_is_identical: equal scores at
    every seed show that the variant changed nothing. They do not where a task's answers are all right, nor
    where another program's seeds are only names.
    """
    name: str
    unit: str
    test: Callable
    margin: float
    higher_is_better: bool
    pools: bool
    has_costs: bool
    equal_is_identical: bool


MEASURES = {
    "bits/byte": Measure("bits/byte", "bits/byte", stats.welch, 0.01,
                         higher_is_better=False, pools=True, has_costs=True,
                         equal_is_identical=True),
    "right answers": Measure("right answers", "of the answers", stats.permutation, 0.05,
                             higher_is_better=True, pools=False, has_costs=False,
                             equal_is_identical=False),
    "score": Measure("score", "", stats.welch, 0.01,
                     higher_is_better=False, pools=True, has_costs=False,
                     equal_is_identical=False),
    "score, higher is better": Measure("score", "", stats.welch, 0.01,
                                       higher_is_better=True, pools=True, has_costs=False,
                                       equal_is_identical=False),
}


# ---- verdicts ----

def comparisons_of(study):
    """The Comparisons of a study's pairs, corrected together."""
    return judge(study, study.pairs)


def comparisons_by_text(study):
    """{text: the Comparisons on it alone, corrected by themselves} of a study that pools several texts, else
    {}.
    """
    if len(study.texts) < 2 or not MEASURES[study.measure].pools:
        return {}
    return {text: judge(study, [replace(pair, texts=(text,)) for pair in study.pairs])
            for text in study.texts}


def judge(study, pairs):
    """The Comparisons of these pairs, corrected together."""
    measure, scores, failure_counts = MEASURES[study.measure], scores_of(study), failures_of(study)
    differences = [difference(scores, pair, measure, study.alpha, study.margin) for pair in pairs]
    n_tested = sum(each is not stats.IDENTICAL for each in differences)
    comparisons = []
    for pair, observed, corrected in zip(pairs, differences, stats.holm_correct(differences)):
        n, n_baseline = (seed_count(scores, name, pair.texts) for name in (pair.variant, pair.baseline))
        verdict, seeds = verdict_on(corrected, study.alpha, measure.higher_is_better), None
        if verdict == "undecided":
            seeds = stats.seeds_to_decide(observed, n, study.alpha, study.margin, n_tested)
        n_failed = sum(failure_counts[side] for side in sides_that_matter(pair, verdict))
        withheld = verdict if n_failed and verdict != "undecided" else ""
        comparisons.append(Comparison(
            variant=pair.variant, baseline=pair.baseline, texts=pair.texts, equal=pair.equal,
            n=n, n_baseline=n_baseline, mean=observed.mean, low=observed.low, high=observed.high,
            se=observed.se, df=observed.df, p=observed.p, p_corrected=corrected.p, p_same=corrected.p_same,
            verdict="undecided" if withheld else verdict, seeds=seeds, failed=n_failed, withheld=withheld,
            **figures_at_equal_cost(study, scores, pair, observed)))
    return tuple(comparisons)


def difference(scores, pair, measure, alpha, margin):
    """The stats.Difference of a pair."""
    variant, baseline = ([scores.get(name, {}).get(text, {}) for text in pair.texts]
                         for name in (pair.variant, pair.baseline))
    if measure.equal_is_identical and all(map(identical, variant, baseline)):
        return stats.IDENTICAL
    return measure.test([[*by_seed.values()] for by_seed in variant],
                        [[*by_seed.values()] for by_seed in baseline], alpha, margin)


def identical(scores, other_scores):
    """Whether two {seed: score} agree at each seed of the one with fewer, at two at least."""
    shared = scores.keys() & other_scores.keys()
    return (len(shared) == min(len(scores), len(other_scores)) > 1
            and all(scores[seed] == other_scores[seed] for seed in shared))


def verdict_on(corrected, alpha, higher_is_better):
    """The verdict on a Difference whose p are corrected."""
    if corrected is stats.IDENTICAL:
        return "identical"
    if corrected.p <= alpha:
        return "better" if (corrected.mean > 0) == higher_is_better else "worse"
    return "same" if corrected.p_same <= alpha else "undecided"


def sides_that_matter(pair, verdict):
    """The sides of a pair whose failed runs might change a verdict: the one that it favours, else both."""
    return {"better": [pair.variant], "worse": [pair.baseline]}.get(verdict, [pair.variant, pair.baseline])


def failures_of(study):
    """{variant: how many of its judged runs failed}, 0 for any other."""
    return Counter(run.variant for run in study.runs if run.stage == "judge" and run.name in study.failures)


def seed_count(scores, name, texts):
    """How many seeds a variant has on every one of these texts."""
    return min(len(scores.get(name, {}).get(text, ())) for text in texts)


def seems_better(c, alpha, higher_is_better=False):
    """Whether a Comparison is on the better side before anything is corrected."""
    return c.p <= alpha and (c.mean > 0) == higher_is_better


def compare_with_target(study):
    """The TargetTest of each variant, corrected together, apart from the comparisons; (): the study has no
    target.
    """
    if study.target is None:
        return ()
    above, failure_counts = MEASURES[study.measure].higher_is_better, failures_of(study)
    scores = {name: [score for values in texts.values() for score in values.values()]
              for name, texts in scores_of(study).items()}
    p_values = [stats.p_beyond_target(values, study.target, above) for values in scores.values()]
    tests = []
    for (name, values), p, corrected in zip(scores.items(), p_values, stats.holm(p_values)):
        mean = stats.of_parts([(1, values)], study.alpha)
        tests.append(TargetTest(name, len(values), mean.mean, mean.low, mean.high, p, corrected,
                                corrected <= study.alpha and not failure_counts[name], failure_counts[name]))
    return tuple(tests)


# ---- what a report shows beside verdicts ----

def half_interval(study, name, texts):
    """Half of the interval of a variant's own mean over these texts; None: its seeds show no spread."""
    scores = scores_of(study).get(name, {})
    parts = stats.parts_of([[*scores.get(text, {}).values()] for text in texts], 1)
    mean = stats.of_parts(parts, study.alpha)
    return (mean.high - mean.low) / 2 if mean.df else None


def seed_differences(scores, c):
    """Each seed of a Comparison's variant minus the baseline's mean, over its texts."""
    variant, baseline = ([scores.get(name, {}).get(text, {}) for text in c.texts]
                         for name in (c.variant, c.baseline))
    mean = np.mean([np.mean([*by_seed.values()]) for by_seed in baseline])
    seeds = [seed for seed in variant[0] if all(seed in by_seed for by_seed in variant)]
    return [float(np.mean([by_seed[seed] for by_seed in variant]) - mean) for seed in seeds]


def on_validation(study):
    """{variant: (mean score, stats.Difference to the plain GPT)} of the screening, the best first; nothing is
    corrected, and there are no verdicts.
    """
    scores, measure = scores_of(study, "screen"), MEASURES[study.measure]
    if PLAIN not in scores:
        return {}
    (text,) = scores[PLAIN]
    rows = {name: (mean_of(scores, name, [text]),
                   difference(scores, Pair(name, PLAIN, (text,)), measure, study.alpha, study.margin))
            for name in scores if name != PLAIN}
    sign = -1 if measure.higher_is_better else 1
    return dict(sorted(rows.items(), key=lambda row: sign * row[1][0]))


def same_size(params, other_params):
    """Whether two numbers of parameters count as equal."""
    return None not in (params, other_params) and abs(other_params - params) <= SAME_SIZE * params


def better_at_equal(study, comparisons, c):
    """{"parameters", "FLOPs" or "time": whether a better variant is shown to be better at an equal amount of
    it; None: not measured}.

    At equal parameters the comparison has a verdict. At equal FLOPs and equal time the variant is better if
    the uncorrected interval lies on the better side. A variant that needs no more of something than the
    plain GPT is better at an equal amount of it.
    """
    if not MEASURES[study.measure].has_costs:
        return {}
    variant, plain = study.variant(c.variant), study.variant(c.baseline)
    better_at = {"parameters": None}
    if variant.params and plain.params and (variant.params <= plain.params
                                            or same_size(variant.params, plain.params)):
        better_at["parameters"] = True
    for row in comparisons:
        if row.variant == c.variant and row.equal and row.texts == c.texts:
            better_at[row.equal] = row.verdict == "better" and row.high < 0
    tokens = quotient(variant.tokens, plain.tokens)
    flops = [quotient(variant.flops, plain.flops), quotient(variant.needed, plain.needed) * tokens]
    flops = max((value for value in flops if not math.isnan(value)), default=math.nan)
    time = variant.time[2] * tokens if variant.time else math.nan
    better_at["FLOPs"] = is_better_at_cost(c.equal_flops, flops)
    better_at["time"] = is_better_at_cost(c.equal_time, time)
    return better_at


def is_better_at_cost(result, ratio):
    """Whether a variant is better at equal cost; without a figure, whether it costs no more."""
    if result and result.high is not None:
        return result.high < 0
    return True if (result.ratio if result else ratio) <= 1 else None


def quotient(numerator, denominator):
    """A ratio; nan: one of both is not known."""
    return numerator / denominator if numerator and denominator else math.nan


# ---- at equal cost ----

def figures_at_equal_cost(study, scores, pair, observed):
    """{worth, equal_flops, equal_time} of a pair with the plain GPT, for a Comparison; {}: not measured."""
    curve = curve_of(study, scores, pair.texts)
    if pair.baseline != PLAIN or pair.equal or not curve:
        return {}
    # identical scores would have no error of their own, so the plain GPT's parts take their place
    name = PLAIN if observed is stats.IDENTICAL else pair.variant
    parts = stats.parts_of([[*scores.get(name, {}).get(text, {}).values()] for text in pair.texts], 1)
    variant, plain = study.variant(pair.variant), study.variant(PLAIN)
    equal_time = None
    if variant.time:  # from the low end at its least to the high end at its most
        ratios = [time * variant.tokens / plain.tokens for time in variant.time]
        middle, shortest, longest = (difference_at_cost(curve, parts, ratio, study.alpha) for ratio in ratios)
        equal_time = replace(middle, low=shortest.low, high=longest.high)
    flops = variant.flops / plain.flops if variant.flops and plain.flops else math.nan
    return dict(worth=worth_of_variant(curve, parts, study.alpha),
                equal_flops=difference_at_cost(curve, parts, flops, study.alpha), equal_time=equal_time)


def curve_of(study, scores, texts):
    """{multiple: the plain GPT's scores on each of these texts} of its budgets; None: it has one alone."""
    if not MEASURES[study.measure].has_costs:
        return None
    plain, curve = study.variant(PLAIN), {}
    for variant in study.variants:
        by_text = [[*scores.get(variant.name, {}).get(text, {}).values()] for text in texts]
        if variant.kind in ("plain", "budget") and all(by_text):
            curve[variant.tokens / plain.tokens] = by_text
    return dict(sorted(curve.items())) if len(curve) > 1 and 1.0 in curve else None


def plain_parts_at(curve, multiple, weight=-1):
    """The plain GPT at a multiple of its budget, as parts of stats.of_parts(); None: beyond its budgets."""
    budgets = [*curve]
    if not budgets[0] <= multiple <= budgets[-1]:
        return None
    i = min(int(np.searchsorted(budgets, multiple, "right")), len(budgets) - 1)
    lower, upper = budgets[i - 1], budgets[i]
    share = math.log(multiple / lower) / math.log(upper / lower)
    return [*stats.parts_of(curve[lower], weight * (1 - share)),
            *stats.parts_of(curve[upper], weight * share)]


def difference_at_cost(curve, parts, ratio, alpha):
    """The DifferenceAtCost of a variant, as parts, to the plain GPT trained at `ratio` times its cost."""
    plain_parts = plain_parts_at(curve, ratio)
    difference = stats.of_parts([*parts, *plain_parts], alpha) if plain_parts else stats.Difference()
    figures = difference.mean, difference.low, difference.high, difference.p
    return DifferenceAtCost(ratio, *(figure if math.isfinite(figure) else None for figure in figures))


def worth_of_variant(curve, parts, alpha):
    """The Worth of a variant, as parts: the multiple at which the plain GPT's interpolated score is its own.

    It is not divided by what the variant costs: one that takes 1.23 times the FLOPs must be worth more than
    1.23 to be better at equal FLOPs. The interval holds the multiples at which the difference's own
    interval holds 0.
    """
    from scipy.optimize import brentq  # takes 0.3 s to import
    scores = [stats.of_parts(plain_parts_at(curve, multiple, 1)).mean for multiple in curve]
    if not np.all(np.diff(scores) < 0):
        return Worth(None, None, None, "the plain GPT's bits/byte does not fall all along its budgets: no "
                                       "value in compute")
    if not math.isfinite(stats.of_parts(parts).mean):
        return Worth(None, None, None, "no difference was measured")
    smallest, largest = min(curve), max(curve)

    def crossing(end):
        """Where one end of the difference, which rises with the plain GPT's compute, crosses 0."""
        def bound(multiple):
            # infinite where a budget has one seed, whose spread is not known
            difference = stats.of_parts([*parts, *plain_parts_at(curve, multiple)], alpha)
            return np.clip(getattr(difference, end), -1e9, 1e9)
        if bound(smallest) > 0:
            return -math.inf
        return math.inf if bound(largest) < 0 else float(brentq(bound, smallest, largest))

    def in_words(multiple):
        if math.isfinite(multiple):
            return f"{multiple:.2f}"
        return f"less than {smallest:g}" if multiple < 0 else f"more than {largest:g}"

    ends = mean, low, high = [crossing(end) for end in ("mean", "high", "low")]
    interval = "" if low == high else f" [{in_words(low)}, {in_words(high)}]"
    return Worth(*(multiple if math.isfinite(multiple) else None for multiple in ends),
                 f"worth {in_words(mean)} x{interval} of the plain GPT's training compute")
