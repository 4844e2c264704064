"""
From the scores of a results file to every figure of its page: differences with their verdicts, what they are
worth in training compute, what is left of them at equal cost, the text's share in the uncertainty.

All of it is a function of the results file alone. A study on several texts has the mean of the texts'
differences; a study of one text is the case of one.

The plain GPT is also trained at several multiples of the budget. Between two of them its score is
interpolated, in a straight line over the logarithm of the multiple. So a variant at any cost is compared with
a weighted mean of two groups of runs, by the same test as everything else.
"""

import math
from dataclasses import fields, replace

import numpy as np
from scipy.optimize import brentq

from nanoheads.common import number, plural
from nanoheads.intervals import block_bootstrap
from nanoheads.scoring import BLOCK
from lab.study import stats
from lab.study.records import (AgainstTarget, AtCost, Comparison, Figures, Interval, Rescored, Reused,
                               Screened, TextsResults, Worth)

PROCEDURE = "Welch, Holm, two one-sided tests"  # files of another one are not read
NOT_FALLING = "the plain GPT's bits/byte does not fall all along its budgets: no value in compute"


def figures(study, texts=None):
    """The records.Figures of a study, by the rest of its results.

    texts: the studies, one for each text, that `study` puts together; None: it is of one text. Below,
    by_text is a list too, of scores alone: what each function says of one text, for each of them.
    """
    variants, alpha, margin = study.arms, study.alpha, study.margin
    studies = texts or [study]
    scores, plan, levels = [scores_of(each.arms) for each in studies], study.two_looks, None
    kind = study.kind
    if plan:
        rows, levels = planned_looks(scores[0], study.pairs, plan, alpha, margin, study.failures)
    else:
        by_text = scores if kind.same_seeds else [apart(each) for each in scores]
        rows = comparisons(by_text, study.pairs, alpha, margin, kind.higher_is_better, kind.unit)
    curve = curve_of(studies)
    for row in rows:
        own = scores_of(variants)
        row.differences = differences(of_first_look(own, plan) if row.look == 1 else own, row)
        row.text = None if texts else text_interval(study, row)
        if row.baseline == "plain":
            set_as_compute(row, curve, scores, variants, alpha)
        if not plan:
            withhold_where_runs_failed(row, study.failures)
    last = rows_of_last_look(study, rows)
    level = levels[plan.look - 1] if plan else alpha
    as_multiples = [multiple_of(curve, each) for each in (margin, -margin)] if curve else None
    return Figures(procedure=PROCEDURE, comparisons=rows, screened=screened(study),
                   findable=findable(scores_of(variants), last, len(tested(rows)), level),
                   targets=against_target(study),
                   margin_as_compute=as_multiples, levels=levels,
                   taken=best_rates(study.candidates) if study.candidates else None)


def with_figures(study):
    """The results of a study with their figures."""
    own = figures(study)
    return replace(study, **{each.name: getattr(own, each.name) for each in fields(Figures)})


# ---- differences and verdicts ----

def finished_scores(variant):
    """{seed: bits/byte} of a variant's finished runs."""
    return {str(seed): bpb for seed, bpb in zip(variant.seeds, variant.bpb) if bpb is not None}


def scores_of(variants):
    """{variant: {seed: bits/byte}} of those that have a finished run."""
    return {name: finished_scores(variant) for name, variant in variants.items() if finished_scores(variant)}


def apart(scores):
    """{variant: {seed: score}} whose seeds are names: that two variants have some in common pairs no runs."""
    return {name: {(name, seed): score for seed, score in own.items()} for name, own in scores.items()}


def comparisons(by_text, pairs, alpha=0.05, margin=0.01, higher_is_better=False, unit="bits/byte",
                level=None, decided=None):
    """[records.Comparison] of each pair (variant, baseline, what is equal beside the hyperparameters), all
    corrected together.

    by_text: {variant: {seed: score}} of each text. level: what corrected p are held against, None: alpha.
    decided: {pair_of(): row} of comparisons that count as they were at an earlier look. ValueError: a score
    is not finite.
    """
    for name, own in (each for scores in by_text for each in scores.items()):
        for seed, score in own.items():
            if not math.isfinite(score):
                raise ValueError(f"the score of {name}, seed {seed}, is {score}: not a finite number")
    differences, sizes = [], []
    for pair in pairs:
        if row := (decided or {}).get(pair_of(*pair)):
            differences.append(stats.Difference(*(getattr(row, key) for key in stats.Difference._fields)))
            sizes.append([row.n, row.n_baseline])
        else:
            differences.append(compared(by_text, *pair[:2], alpha))
            sizes.append([seeds_of(by_text, name) for name in pair[:2]])
    judged = stats.judge(differences, sizes, level or alpha, margin, higher_is_better)
    return [Comparison(variant=variant, baseline=baseline, equal=equal, **each._asdict(), differences=[],
                       words=stats.in_words(each, alpha, margin, unit,
                                            "the plain GPT" if baseline == "plain" else baseline))
            for (variant, baseline, equal), each in zip(pairs, judged)]


def seeds_of(by_text, name):
    """How many seeds a variant has on every text."""
    return min(len(scores.get(name, ())) for scores in by_text)


def compared(by_text, variant, baseline, alpha):
    """The Difference of two variants: the mean of those on each text."""
    if identical_on_each(by_text, variant, baseline):
        return stats.IDENTICAL
    own, other = ([scores.get(name, {}) for scores in by_text] for name in (variant, baseline))
    return stats.difference([*parts_of(own, 1), *parts_of(other, -1)], alpha)


def parts_of(by_text, weight):
    """The mean over texts, of {seed: score} of each, as parts of stats.difference()."""
    return [(weight / len(by_text), [*scores.values()]) for scores in by_text]


def identical_on_each(by_text, variant, other):
    """Whether two variants are identical() on each text."""
    return all(identical(scores.get(variant, {}), scores.get(other, {})) for scores in by_text)


def identical(scores, others):
    """Whether two variants have the same score at each seed of the one with fewer, two at least."""
    shared = scores.keys() & others.keys()
    enough = len(shared) == min(len(scores), len(others)) > 1
    return enough and all(scores[seed] == others[seed] for seed in shared)


def uncertainty(study, name):
    """Half the interval of a variant's own mean over seeds; None: it has not two, or they show no spread."""
    studies = [*(study.texts or {"": study}).values()]
    mean = stats.difference(parts_of([finished_scores(each.arms[name]) for each in studies], 1), study.alpha)
    return (mean.high - mean.low) / 2 if math.isfinite(mean.se) else None


def seem_better(by_text, pairs, alpha, margin):
    """The variants whose interval lies below the plain GPT, before anything else is made equal."""
    pairs = [pair for pair in pairs if pair[1] == "plain" and not pair[2]]
    rows = comparisons(by_text, pairs, alpha, margin)
    return [row.variant for row in rows if row.verdict == "better" or row.high < 0]


def pair_of(variant, baseline, equal):
    """A pair as a key of a dict."""
    return variant, baseline, *equal


def withhold_where_runs_failed(row, failures):
    """Call a verdict undecided where runs failed of the side that it favours, for "same" of either side:
    those might change it.
    """
    sides = {"better": ["variant"], "worse": ["baseline"]}.get(row.verdict, ["variant", "baseline"])
    judged = [f.arm for f in failures if f.stage == "judge"]
    count = {side: judged.count(getattr(row, side)) for side in sides}
    failed = sum(count.values())
    if failed and row.verdict != "undecided":
        whose = " and ".join({"variant": "its", "baseline": "the other side's"}[side]
                             for side in sides if count[side])
        row.words = f"not called {row.verdict}, since {failed} of {whose} runs failed; else {row.words}"
        row.verdict = "undecided"


def failed_runs(failures):
    """How many runs failed: one may stand under several names, such as a rate times 1 in each group."""
    return len({row.log for row in failures})


def progress(*studies):
    """{"finished", "planned", "done"} of studies: whether all planned runs are done or failed, and how many
    there are of the first two.
    """
    left = [study.planned - study.done - failed_runs(study.failures) for study in studies]
    return dict(finished=max(left) <= 0, planned=sum(study.planned for study in studies),
                done=sum(study.done for study in studies))


def differences(scores, row):
    """Each seed of the variant minus the mean of the baseline, for the picture."""
    own, base = scores.get(row.variant, {}), list(scores.get(row.baseline, {}).values())
    return [score - float(np.mean(base)) for score in own.values()] if base else []


def screened(study):
    """The first stage's rows, the best first: differences on validation, with intervals and no verdicts."""
    screen = study.screen
    if not screen or "plain" not in screen.scores:
        return []
    rows = []
    for name, own in screen.scores.items():
        if name != "plain":
            each = compared([screen.scores], name, "plain", study.alpha)
            rows.append(Screened(variant=name, bpb=float(np.mean([*own.values()])), mean=each.mean,
                                 low=each.low, high=each.high, chosen=name in screen.chosen))
    return sorted(rows, key=lambda row: row.mean)


def tested(rows):
    """The comparisons that have a test, for which verdicts are corrected: not those of identical scores."""
    return [row for row in rows if row.se != 0]


def against_target(study):
    """[records.AgainstTarget] of each variant of a study with a target; None: it has none.

    They are corrected together, and apart from the comparisons: this is another question.
    """
    if study.target is None:
        return None
    above, rows = study.kind.higher_is_better, []
    side = "above" if above else "below"
    scores = {name: [*finished_scores(arm).values()] for name, arm in study.arms.items()}
    means = [stats.difference([(1, own)], study.alpha) for own in scores.values()]
    p = [stats.p_beyond(mean, study.target, above) for mean in means]
    for (name, own), mean, single, corrected in zip(scores.items(), means, p, stats.holm(p).tolist()):
        failed = sum(f.arm == name for f in study.failures if f.stage == "judge")
        verdict = side if corrected <= study.alpha and not failed else "not shown" if mean.df else "no test"
        row = AgainstTarget(variant=name, n=len(own), words="", verdict=verdict,
                            **{**mean._asdict(), "p": single}, p_corrected=corrected)
        row.words = target_in_words(row, study.target, side, study.alpha, failed)
        rows.append(row)
    return rows


def target_in_words(row, target, side, alpha, failed):
    """The verdict of an AgainstTarget; side: of the target that is hoped for; failed: so many of its runs."""
    if not row.n:
        return "no test: no run has a score"
    if row.verdict == "no test":
        why = (f"all {row.n} scores are {row.mean:.6g}, which shows no spread" if row.n > 1
               else "one seed shows no spread")
        return f"no test: {why}"
    p = stats.p_in_words(row.p_corrected)
    seen = f"mean {row.mean:.4f}, {100 * (1 - alpha):g} % interval {row.low:.4f} to {row.high:.4f}, {p}"
    if row.verdict == side:
        return f"{side} {target:g}: {seen}"
    if failed and row.p_corrected <= alpha:
        return f"not called {side} {target:g}, since {plural(failed, 'run')} of it failed: {seen}"
    return f"not shown to be {side} {target:g}: {seen}"


def corrected_for(study):
    """How many comparisons the verdicts of a study are corrected for."""
    return len(tested(study.comparisons))


def findable(scores, rows, m, alpha):
    """The smallest difference to the plain GPT found four times in five, at a careful spread; or None.

    rows: the comparisons whose seeds count; m: how many are corrected together.
    """
    sizes = [row.n for row in tested(rows) if row.baseline == "plain"]
    if not sizes or min(sizes) < 2:
        return None
    groups = [[*own.values()] for own in scores.values()]
    return stats.findable(groups, int(np.median(sizes)), len(scores.get("plain", ())), m, alpha)


def best_rates(candidates):
    """{variant: index of the candidate taken}. candidates: {variant: [records.Candidate]}.

    The first is the variant as it is, which stays unless the best is better by more than a standard error of
    such a difference, from the median spread over seeds of all candidates (the one-standard-error rule,
    Breiman et al. 1984). One with a run that diverged is none, unless all have.
    """
    scores = {name: [list(each.bpb.values()) for each in own] for name, own in candidates.items()}
    sds = [np.std(each, ddof=1) for own in scores.values() for each in own if len(each) > 1]
    taken = {}
    for name, own in scores.items():
        n = max(map(len, own))
        means = [float(np.mean(each)) if len(each) == n > 0 else np.inf for each in own]
        error = float(np.median(sds or [0.0])) * (2 / max(1, n)) ** 0.5
        best = int(np.argmin(means))
        taken[name] = best if means[0] - means[best] > error else 0
    return taken


# ---- two looks that are planned ----

def first_half(seeds):
    """The seeds of the first of two looks: half of them, and where their number is odd one more."""
    return seeds[:(len(seeds) + 1) // 2]


def of_first_look(scores, plan):
    """What {variant: {seed: score}} has at the first look of a plan."""
    seeds_of = {name: plan.plain_seeds if name == "plain" else plan.first_seeds for name in scores}
    first = {name: {seed: score for seed, score in own.items() if int(seed) in seeds_of[name]}
             for name, own in scores.items()}
    return {name: own for name, own in first.items() if own}


def first_look(scores, plan, alpha, margin, failures):
    """The comparisons of the first look of a plan, whose pairs are corrected together.

    plan: a records.TwoLooks: `seeds` of a variant, `first_seeds` and `plain_seeds` of a variant and of the
    plain GPT at the first look, the `pairs` that it compares, and `look`, the last one so far.
    """
    level = levels_of(plan, plan.pairs, alpha)[0]
    rows = comparisons([of_first_look(scores, plan)], plan.pairs, alpha, margin, level=level)
    failed = [f for f in failures
              if f.seed in (plan.plain_seeds if f.arm == "plain" else plan.first_seeds)]
    for row in rows:
        say_level(row, 1, level)
        withhold_where_runs_failed(row, failed)
    return rows


def planned_looks(scores, pairs, plan, alpha, margin, failures):
    """([Comparison], levels of both looks) of a study in two looks.

    What was decided at the first look stays as it was there; at the second it still counts among the
    comparisons that are corrected together.
    """
    levels = [levels_of(plan, each, alpha)[look] for look, each in enumerate((plan.pairs, pairs))]
    first = first_look(scores, plan, alpha, margin, failures)
    if plan.look == 1:
        return first, levels
    decided = {pair_of(*pair): row for pair, row in zip(plan.pairs, first)
               if row.verdict != "undecided"}
    rows = comparisons([scores], pairs, alpha, margin, level=levels[1], decided=decided)
    for row in rows:
        say_level(row, 2, levels[1])
        withhold_where_runs_failed(row, failures)
    rows = [decided.get(pair_of(*pair), row) for pair, row in zip(pairs, rows)]
    return rows, levels


def levels_of(plan, pairs, alpha):
    """The levels of both looks, by the share of a variant's seeds that the first one has."""
    return stats.levels(alpha, plan.spending, len(plan.first_seeds) / len(plan.seeds),
                        max(1, len(pairs)))


def say_level(row, look, level):
    """Name in a comparison the look that judged it, and what its corrected p was held against."""
    row.look = look
    row.words += f"; look {look} of 2, held against {level:.4f}"


def rows_of_last_look(study, rows):
    """The comparisons that the last look of a study judged; without planned looks all of them."""
    plan = study.two_looks
    return [row for row in rows if not plan or row.look == plan.look] or rows


# ---- compute ----

def curve_of(studies):
    """{multiple: [{seed: bits/byte} of the plain GPT on each text]} of its budgets; None: only one."""
    curve = {}
    for name, variant in studies[0].arms.items():
        if variant.kind in ("plain", "budget"):
            texts = [finished_scores(study.arms[name]) for study in studies if name in study.arms]
            if len(texts) == len(studies) and all(texts):
                curve[variant.multiple] = texts
    return dict(sorted(curve.items())) if len(curve) > 1 and 1.0 in curve else None


def plain_at(curve, multiple, weight=-1):
    """Parts of stats.difference(): the plain GPT at a multiple of its budget, interpolated between two.

    None where the multiple is not between the smallest and the largest budget.
    """
    budgets = list(curve)
    if not budgets[0] <= multiple <= budgets[-1]:
        return None
    i = min(int(np.searchsorted(budgets, multiple, "right")), len(budgets) - 1)
    below, above = budgets[i - 1], budgets[i]
    share = math.log(multiple / below) / math.log(above / below)
    return [*parts_of(curve[below], weight * (1 - share)), *parts_of(curve[above], weight * share)]


def set_as_compute(row, curve, scores, variants, alpha):
    """Set in a comparison what it is worth in the plain GPT's compute, and what is left at equal cost."""
    if curve is None:
        return
    variant, plain = variants[row.variant], variants["plain"]
    # a variant with the very scores of the plain GPT has no error: its place is taken by the plain GPT, which
    # has more seeds
    name = "plain" if row.se == 0 else row.variant
    own = parts_of([each.get(name, {}) for each in scores], 1)
    time, flops = variant.time_ratio, training_flops(variant) / training_flops(plain)
    row.worth = worth(curve, own, alpha)
    row.equal_flops = at_equal_cost(curve, own, flops, alpha)
    row.equal_time = time and at_equal_time(curve, own, time, variant.multiple, alpha)


SAME_SIZE = 1e-3  # the share of their parameters by which two models of equal parameters may differ


def same_size(params, others):
    """Whether two numbers of parameters count as equal."""
    return abs(number(others) - number(params)) <= SAME_SIZE * number(params)


def training_flops(variant):
    """FLOPs that a variant's whole training executes, evaluations aside; NaN where they were not counted."""
    return number(variant.executed_flops_per_token) * number(variant.tokens)


def at_equal_cost(curve, own, ratio, alpha):
    """A variant against the plain GPT trained at its cost, `ratio` times the plain GPT's own.

    own: the variant as parts of stats.difference(). The figures are None outside the plain GPT's budgets.
    """
    plain = plain_at(curve, ratio)
    left = stats.difference([*own, *plain], alpha) if plain else stats.UNKNOWN
    return AtCost(ratio=ratio, **{key: value if plain and math.isfinite(value) else None
                                  for key, value in left._asdict().items() if key not in ("se", "df")})


def at_equal_time(curve, own, time, multiple, alpha):
    """The same for a time that was measured: from the low end at its least to the high end at its most."""
    middle, least, most = (at_equal_cost(curve, own, each * multiple, alpha)
                           for each in (time.mean, time.low, time.high))
    return replace(middle, low=least.low, high=most.high)


def worth(curve, own, alpha):
    """The multiple of its budget at which the plain GPT has a variant's score.

    It is not divided by what the variant itself costs: one that takes 1.23 times the FLOPs must be worth more
    than 1.23 to be better at equal FLOPs. At equal cost, see at_equal_cost().
    mean, low, high: the interval holds the multiples at which the difference's own interval holds 0. None:
    not between smallest and largest, the plain GPT's budgets; beyond: "less" or "more", where that is so of
    the mean. low and high are equal where all of the interval lies beyond. problem: why there is no number.
    """
    smallest, largest = min(curve), max(curve)
    found = Worth(mean=None, low=None, high=None, smallest=smallest, largest=largest, beyond=None)
    if not falls(curve):
        found.problem = NOT_FALLING
    elif not math.isfinite(stats.difference(own, alpha).mean):
        found.problem = "no difference was measured"
    else:
        def left(end):
            def at(multiple):
                return getattr(stats.difference([*own, *plain_at(curve, multiple)], alpha), end)
            return at

        # what is left of the difference grows with the compute of the plain GPT
        mean, low, high = (crossing(left(end), smallest, largest) for end in ("mean", "high", "low"))
        found.mean, found.beyond = (None, mean) if isinstance(mean, str) else (mean, None)
        if low == high and isinstance(low, str):  # the whole interval lies beyond
            found.low = found.high = smallest if low == "less" else largest
        else:
            found.low, found.high = (None if isinstance(end, str) else end for end in (low, high))
    found.words = worth_in_words(found)
    return found


def falls(curve):
    """Whether the plain GPT is better at each larger budget."""
    scores = [stats.difference(plain_at(curve, multiple, 1)).mean for multiple in curve]
    return bool(np.all(np.diff(scores) < 0))


def crossing(rising, smallest, largest):
    """Where a function that rises crosses 0: "less" or "more" if that is not between the two."""
    if rising(smallest) > 0:
        return "less"
    if rising(largest) < 0:
        return "more"
    # infinite where a budget has one seed, whose spread is not known
    return float(brentq(lambda multiple: np.clip(rising(multiple), -1e9, 1e9), smallest, largest))


def worth_in_words(found):
    if found.problem:
        return found.problem
    less, more = f"less than {found.smallest:g}", f"more than {found.largest:g}"
    value = {"less": less, "more": more}.get(found.beyond) or f"{found.mean:.2f}"
    if found.low is not None and found.low == found.high:
        return f"worth {value} x of the plain GPT's training compute"
    low = less if found.low is None else f"{found.low:.2f}"
    high = more if found.high is None else f"{found.high:.2f}"
    return f"worth {value} x [{low}, {high}] of the plain GPT's training compute"


def multiple_of(curve, difference):
    """The multiple at which the plain GPT is worse by a difference, or better below 0; None: not measured."""
    if not falls(curve):
        return None

    def left(multiple):
        parts = [*plain_at(curve, 1.0, 1), *plain_at(curve, multiple)]
        return stats.difference(parts).mean + difference

    found = crossing(left, min(curve), max(curve))
    return None if isinstance(found, str) else found


# ---- text ----

def text_interval(study, row):
    """The interval over the text: these trained models, other text of its kind; None: blocks unknown.

    The last block, which is shorter, is left out.
    """
    sums = []
    for name in (row.variant, row.baseline):
        runs = [study.runs.get(run) for run in study.arms[name].runs]
        blocks = [run.block_nats[:-1] for run in runs if run and run.block_nats]
        if not blocks or len({len(each) for each in blocks}) > 1:
            return None
        sums.append(np.mean(blocks, 0))
    if len(sums[0]) != len(sums[1]) or len(sums[0]) < 2:
        return None
    T = study.plain["block_size"]
    tokens = len(sums[0]) * max(1, BLOCK // T) * T
    size = study.data.bytes * tokens / study.data.tokens
    _, low, high = block_bootstrap(*sums, size, 1, 1 - study.alpha)
    return Interval(low=low, high=high)


# ---- texts ----

BOTH = " and "  # between the names of two texts, or of two runs, that count as one


def together(texts, name, command):
    """Studies of the same variants on several texts, {text: study}, as one: each, and all of them."""
    return TextsResults(name=name, command=command, texts=texts,
                        together=figures(over_texts(texts), [*texts.values()]))


def pooled(results):
    """The study over all texts of a TextsResults, with the figures that this has."""
    figures_of_all = {each.name: getattr(results.together, each.name) for each in fields(Figures)}
    return replace(over_texts(results.texts), texts=results.texts, **figures_of_all)


def over_texts(texts):
    """One study of those on several texts, without figures; what is judged on every text is in it.

    For tables and pictures the score of a seed is the mean over the texts.
    """
    studies, first = list(texts.values()), next(iter(texts.values()))
    names = [name for name in first.arms if all(name in study.arms for study in studies)]
    variants = {name: over_runs([study.arms[name] for study in studies]) for name in names}
    pairs = [pair for pair in first.pairs if all(pair in study.pairs for study in studies)]
    failures = [failure for study in studies for failure in study.failures]
    reused, rescored = reused_in(studies), rescored_in(studies)
    left_out, looks = ([replace(row, text=text) for text, study in texts.items()
                        for row in getattr(study, key) or ()] for key in ("left_out", "looks"))
    size = {key: sum(getattr(study.data, key) or 0 for study in studies)
            for key in ("tokens", "bytes", "of_bytes")}
    data = replace(first.data, **size, dataset=BOTH.join(texts), sha256=None, note=None)
    settings = {key: value for key, value in (first.settings or {}).items() if key != "dataset"}
    return replace(first, **progress(*studies), settings=settings, arms=variants, pairs=pairs,
                   failures=failures, reused=reused, rescored=rescored, runs={}, data=data,
                   left_out=left_out, looks=looks)


def reused_in(studies):
    """The rows of Runs.reused() of several studies together: how many runs came from each source."""
    found = {}
    for row in (row for study in studies for row in study.reused or ()):
        total = found.setdefault(row.source, Reused(source=row.source, runs=0, other_code=0, of=[]))
        total.runs += row.runs
        total.other_code += row.other_code
        total.of += [name for name in row.of if name not in total.of]
    return [*found.values()]


def rescored_in(studies):
    """What rescoring.rescored() found of several studies, together; None: it is not known of one of them."""
    every = [study.rescored for study in studies]
    if None in every:
        return None
    return Rescored(runs=[name for own in every for name in own.runs],
                    without=sum(own.without for own in every))


def seem_better_over_texts(texts):
    """seem_better() over all texts of {text: study}."""
    whole, scores = over_texts(texts), [scores_of(study.arms) for study in texts.values()]
    return seem_better(scores, whole.pairs, whole.alpha, whole.margin)


def over_runs(variants):
    """A variant of several texts as one: of each seed that all have, the mean score, and its runs' names."""
    first, rows = variants[0], [dict(zip(each.seeds, zip(each.bpb, each.runs))) for each in variants]
    seeds = [seed for seed in first.seeds if all(seed in own for own in rows)]
    scores = [[own[seed][0] for own in rows] for seed in seeds]
    means = [None if None in each else sum(each) / len(each) for each in scores]
    return replace(first, seeds=seeds, bpb=means,
                   runs=[BOTH.join(own[seed][1] for own in rows) for seed in seeds])
