"""
How often the verdicts of a study are wrong, and how often they find what is there: simulated studies.

    python tests/simulate.py                  # all tables: about 20 minutes on one idle core
    python tests/simulate.py --sims=200       # a first look
    python tests/simulate.py --only=looks     # second looks, and seeds that are chosen by their scores
    python tests/simulate.py --only=two_looks  # studies that are planned in two looks

Each simulated study goes through effects.comparisons() as a real one would. Spreads are in units of a typical
arm's, the margin is one of those; true differences are 0, or exactly the margin, which is where "same" is
wrong most often. It is no test: tests/lab/study/test_stats.py holds a small part of it.
"""

import argparse
import math
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scipy.special import stdtr  # noqa: E402
from scipy.stats import ttest_1samp  # noqa: E402

from lab.study import effects  # noqa: E402
from lab.study.records import TwoLooks  # noqa: E402
from lab.study.stats import SPENDING, findable, holm, satterthwaite  # noqa: E402

# how the scores of a study may be: keywords of study()
WORLDS = {
    "normal": {},
    "t3 tails": dict(tails=3),
    "spreads 1.6x": dict(unequal=0.25),
    "spreads 2.2x": dict(unequal=0.4),
    "one arm 10x": dict(loud=10),
    "corr. 0.5": dict(correlation=0.5),
    "corr. 0.95": dict(correlation=0.95),
}


def study(rng, n, n_plain, m, tails=0, unequal=0.0, loud=1, correlation=0.0, true=0.0):
    """(scores, comparisons) of m arms with n seeds and the plain GPT; true [m]: their true differences.

    unequal: sd of the log of the arms' spreads, two arms in three lie within a factor exp(2 * unequal).
    loud: factor of the first arm's. correlation: of two arms at a seed. tails: of t, its degrees of freedom;
    0 is normal.
    """
    def noise(*shape):
        if tails:
            return rng.standard_t(tails, shape) * math.sqrt((tails - 2) / tails)  # variance 1
        return rng.normal(size=shape)

    spread = np.exp(unequal * rng.normal(size=(m + 1, 1)))
    spread[1] *= loud
    seeds = max(n, n_plain)
    y = spread * (math.sqrt(1 - correlation) * noise(m + 1, seeds) + math.sqrt(correlation) * noise(seeds))
    y[1:] += np.reshape(true, (-1, 1))
    counts = [n_plain] + [n] * m
    names = ["plain"] + [f"arm {i}" for i in range(m)]
    scores = {name: dict(enumerate(row[:count].tolist())) for name, row, count in zip(names, y, counts)}
    return scores, [(name, "plain", []) for name in names[1:]]


def judge(scores, pairs, margin=0.01):
    return effects.comparisons([scores], pairs, margin=margin)


def wrong(verdict, true, margin):
    """Whether a verdict says what is not so."""
    if verdict == "better":
        return true >= 0
    if verdict == "worse":
        return true <= 0
    return verdict == "same" and abs(true) >= margin


def studies_at_once(n, n_plain, m, sims, true, margin, own_df=False, families=1):
    """Percent of studies with a wrong verdict: all of them in arrays, which is 100 times as fast as judge().

    true [m]: true differences, in the sd of a seed. Without what stats.py has: own_df, Welch's own degrees of
    freedom; families=2, differences and "same" corrected apart.
    """
    rng = np.random.default_rng([n, n_plain, m])
    y, plain = rng.normal(size=(sims, m, n)) + true[:, None], rng.normal(size=(sims, 1, n_plain))
    mean = y.mean(-1) - plain.mean(-1)
    squares = y.var(-1, ddof=1) / n, plain.var(-1, ddof=1) / n_plain
    se, df = np.sqrt(sum(squares)), satterthwaite(squares, (n, n_plain))
    if not own_df:
        df = np.minimum(df, satterthwaite((1 / n, 1 / n_plain), (n, n_plain)))
    p = 2 * stdtr(df, -abs(mean) / se), stdtr(df, (abs(mean) - margin) / se)
    if families == 2:
        differs, same = (np.array([holm(row) for row in each]) for each in p)
    else:
        both = np.array([holm(row, most_true=m) for row in np.concatenate(p, 1)])
        differs, same = both[:, :m], both[:, m:]
    if not own_df and families == 1:  # the first study, as judge() has it
        scores = {f"arm {i}": dict(enumerate(row.tolist())) for i, row in enumerate(y[0])}
        rows = judge({"plain": dict(enumerate(plain[0, 0].tolist())), **scores},
                     [(name, "plain", []) for name in scores], margin)
        assert np.allclose([row.p_corrected for row in rows], differs[0])
        assert np.allclose([row.p_same for row in rows], same[0])
    differs = differs <= 0.05
    wrong = differs & (np.sign(mean) != np.sign(true)) | ~differs & (same <= 0.05) & (abs(true) >= margin)
    return 100 * wrong.any(1).mean()


def print_error_rates(sims):
    print("\nPercent of studies with a wrong verdict. None: no arm differs; half: every second arm (or the "
          "only one) differs\nby the margin of 1 or 3 sd. Monte-Carlo error (one sd at 5 %): "
          f"{100 * math.sqrt(0.05 * 0.95 / sims):.1f}")
    heads = "none", "half, 1 sd", "half, 3 sd", "none, own df", "half, 1 sd, 2 families"
    print("arms  seeds  plain " + "".join(f"{head:>24}" for head in heads))
    for m, n, n_plain in ((1, 5, 5), (8, 3, 8), (8, 5, 5), (8, 5, 14), (8, 20, 57), (25, 8, 32), (30, 3, 16)):
        none, half = np.zeros(m), np.where(np.arange(m) % 2, 1.0, 0.0) if m > 1 else np.ones(1)
        cells = (studies_at_once(n, n_plain, m, sims, *case) for case in (
            (none, 1.0), (half, 1.0), (3 * half, 3.0), (none, 1.0, True), (half, 1.0, False, 2)))
        print(f"{m:4} {n:6} {n_plain:6} " + "".join(f"{cell:24.1f}" for cell in cells), flush=True)


# ---- looking again, and choosing seeds ----

def subsets(n, size):
    """All sets of so many of n seeds."""
    return [list(each) for each in combinations(range(n), size)]


# what a report is made of, one after the other, until one says what is hoped for: lists of seeds
LOOKS = {
    "3 seeds": [range(3)],
    "5 seeds": [range(5)],
    "3, then 5": [range(3), range(5)],
    "3, 4, ... 8": [range(n) for n in range(3, 9)],
    "3, 4, ... 20": [range(n) for n in range(3, 21)],
    "any 2 of 5": subsets(5, 2),
    "any 3 of 5": subsets(5, 3),
    "any 4 of 5": subsets(5, 4),
    "any 5 of 10": subsets(10, 5),
}


def seen_in_looks(rng, looks, true):
    """The verdicts of reports on a variant and the plain GPT, each by its own of the seeds that both have."""
    plain, arm = rng.normal(size=(2, 1 + max(map(max, looks))))
    scores = dict(plain=plain.tolist(), arm=(arm + true).tolist())
    of_looks = ({name: {seed: y[seed] for seed in look} for name, y in scores.items()} for look in looks)
    return {judge(own, [("arm", "plain", [])], margin=1.0)[0].verdict for own in of_looks}


def print_looks(sims):
    print("\nPercent of studies in which one of several reports is wrong: one variant, both sides by the\n"
          "same seeds, no true difference, or one of the margin, 1 sd. Monte-Carlo error (one sd at 5 %): "
          f"{100 * math.sqrt(0.05 * 0.95 / sims):.1f}")
    print(f"{'reports':<20}{'none: better or worse':>24}{'none: better':>16}{'1 sd: same':>14}")
    for name, looks in LOOKS.items():
        rng = np.random.default_rng(11)
        none, true = ([seen_in_looks(rng, looks, size) for _ in range(sims)] for size in (0.0, 1.0))
        cells = ({"better", "worse"}, none), ({"better"}, none), ({"same"}, true)
        wrong, better, same = (100 * np.mean([bool(words & seen) for seen in of]) for words, of in cells)
        print(f"{name:<20}{wrong:24.1f}{better:16.1f}{same:14.1f}", flush=True)


# ---- two looks that are planned ----

def two_looks(rng, true, n=10, n_plain=None, **world):
    """{way of looking: (verdicts, mean number of seeds that a variant was trained with)} of one study.

    true [m]: true differences of the variants to the plain GPT, in sd of a seed. Every way sees the same
    scores: one look at half of the seeds, or at all of them; both without a correction, where what the first
    decides stays decided; and two looks as they are planned.
    """
    n_plain = n_plain or n
    scores, pairs = study(rng, n, n_plain, len(true), true=true, **world)
    first = effects.first_half([*range(n)])
    plan = TwoLooks(spending="obrien_fleming", seeds=[*range(n)], first_seeds=first, pairs=pairs, look=2,
                    plain_seeds=[*range(round(n_plain * len(first) / n))])
    half = judge(effects.of_first_look(scores, plan), pairs, margin=1.0)
    whole = judge(scores, pairs, margin=1.0)
    found = {f"{len(first)} seeds": half, f"{n} seeds": whole, "peeking": [
        early if early.verdict != "undecided" else late for early, late in zip(half, whole)]}
    for spending in SPENDING:
        of_spending = replace(plan, spending=spending)
        found[spending], _ = effects.planned_looks(scores, pairs, of_spending, 0.05, 1.0, [])
    return {name: ([row.verdict for row in rows], np.mean([row.n for row in rows]))
            for name, rows in found.items()}


TWO_LOOKS = {  # variants, seeds of each, of the plain GPT, keywords of study()
    "1 variant, 5 then 10 seeds": (1, 10, 10, {}),
    "1 variant, 3 then 6": (1, 6, 6, {}),
    "1 variant, 3 then 5": (1, 5, 5, {}),
    "1 variant, 5 then 10, spreads 2.2x": (1, 10, 10, WORLDS["spreads 2.2x"]),
    "8 variants, 5 then 10, plain 14 then 28": (8, 10, 28, {}),
    "8, 5 then 10, plain 14 then 28, spreads 2.2x": (8, 10, 28, WORLDS["spreads 2.2x"]),
    "8, 5 then 10, plain 14 then 28, t3 tails": (8, 10, 28, WORLDS["t3 tails"]),
    "8, 3 then 5, plain 8 then 14": (8, 5, 14, {}),
}


def error_of_two_looks(sims, m, n, n_plain, world, true):
    """{way of looking: percent of studies with a wrong verdict}; true: of the only or each second variant.
    """
    rng, wrong_in = np.random.default_rng(13), {}
    truth = true * (np.arange(m) % 2) if m > 1 else np.array([true])
    for _ in range(sims):
        for name, (verdicts, _) in two_looks(rng, truth, n, n_plain, **world).items():
            bad = any(wrong(verdict, t, 1.0) for verdict, t in zip(verdicts, truth))
            wrong_in[name] = wrong_in.get(name, 0) + bad
    return {name: 100 * count / sims for name, count in wrong_in.items()}


def print_two_looks(sims):
    heads = ("one look", "peeking", "O'Brien-Fleming", "Pocock")
    print("\nPercent of studies with a wrong verdict: one look at all seeds; peeking, which is a look at "
          "half of them and one\nat all for what is undecided then, without a correction; two planned looks. "
          "No variant differs, or every second\none by the margin, 1 sd. Monte-Carlo error (one sd at 5 %): "
          f"{100 * math.sqrt(0.05 * 0.95 / sims):.1f}")
    print(f"{'':<50}" + "".join(f"{head:>17}" for head in heads))
    for title, (m, n, n_plain, world) in TWO_LOOKS.items():
        for words, true in (("none", 0.0), ("1 sd", 1.0)):
            found = error_of_two_looks(sims, m, n, n_plain, world, true)
            cells = (found[name] for name in (f"{n} seeds", "peeking", *SPENDING))
            print(f"{title + ', ' + words:<50}" + "".join(f"{cell:17.1f}" for cell in cells), flush=True)
    print("\nFound, percent, and the mean number of seeds that were trained: one variant, as many seeds of "
          f"the plain GPT.\nMonte-Carlo error: up to {50 / math.sqrt(sims):.1f}")
    print(f"{'true difference, sd':<22}" + "".join(f"{head:>19}" for head in (
        "5 seeds", "10 seeds", *heads[2:])))
    for true in (0.5, 1.0, 1.5, 2.0, 3.0):
        rng, seen = np.random.default_rng(17), {}
        for _ in range(sims):
            for name, (verdicts, seeds) in two_looks(rng, np.array([true])).items():
                seen.setdefault(name, []).append((verdicts == ["worse"], seeds))
        means = (np.mean(seen[name], 0) for name in ("5 seeds", "10 seeds", *SPENDING))
        print(f"{true:<22}" + "".join(f"{100 * found:11.0f} ({seeds:4.1f}) " for found, seeds in means),
              flush=True)


# ---- screened, then judged ----

def judged_of(validation):
    """The numbers of the arms that go on: the best six and the worst two."""
    order = validation.argsort()
    return np.concatenate([order[:6], order[-2:]])


def two_stages(rng, fresh, true, sd=0.006, text=0.006, n=5, n_plain=14, **world):
    """(any wrong verdict, arms of the judged that do differ, found): 34 arms, two seeds each on validation.

    The best six and the worst two go on. Validation and test differ by what their texts do to an arm (sd
    `text`). What seems better then meets a wider plain GPT, which is as good as the plain one. fresh=False
    judges on the screening's own seeds (and more): what must not be done.
    """
    m = len(true)
    y = np.asarray(true)[:, None] + sd * rng.normal(size=(m, 2))
    validation = y.mean(1) + text * rng.normal(size=m) / 2
    chosen = judged_of(validation)
    unit, comparisons = study(rng, n, n_plain, len(chosen), true=true[chosen] / sd, **world)
    scores = {arm: {seed: sd * score for seed, score in of_arm.items()} for arm, of_arm in unit.items()}
    if not fresh:
        for (arm, *_), i in zip(comparisons, chosen):
            scores[arm].update(enumerate(y[i].tolist()))
    truth = dict(zip((arm for arm, *_ in comparisons), true[chosen]))
    wider = effects.seem_better([scores], comparisons, 0.05, 0.01)
    for arm in wider:
        scores[f"plain for {arm}"] = dict(enumerate((sd * rng.normal(size=n)).tolist()))
    judged = judge(scores, [*comparisons, *((arm, f"plain for {arm}", ["parameters"]) for arm in wider)])
    false = [wrong(row.verdict, truth[row.variant], 0.01) for row in judged]
    found = sum(row.verdict in ("better", "worse") and not bad
                for row, bad in zip(judged[:len(comparisons)], false))
    return any(false), (true[chosen] != 0).sum(), found


def print_two_stages(sims):
    error = 100 * math.sqrt(0.05 * 0.95 / sims)
    print("\n34 arms screened with 2 seeds, best 6 and worst 2 judged with 5 (plain 14): studies with a "
          f"wrong verdict.\nMonte-Carlo error (one sd at 5 %): {error:.1f}")
    some = np.zeros(34)
    some[:6] = (-0.012, -0.012, -0.01, 0.01, 0.012, 0.03)
    for name, true in (("no arm differs", np.zeros(34)), ("six arms differ", some)):
        for fresh in (True, False):
            for world in ("normal", "t3 tails", "one arm 10x", "spreads 1.6x", "spreads 2.2x"):
                rng = np.random.default_rng(5)
                seen = np.array([two_stages(rng, fresh, true, **WORLDS[world]) for _ in range(sims)], float)
                bad, differ, found = seen.mean(0)
                power = f", found {100 * found / differ:.0f} % of those that differ" if differ else ""
                print(f"  {name}, {'fresh seeds' if fresh else 'two seeds used twice'}, {world}: "
                      f"{100 * bad:.1f} %{power}", flush=True)


# ---- power ----

def paired_and_holm(scores, comparisons, m):
    """Whether a paired t-test on shared seeds finds the first comparison, in Holm's first of m steps."""
    variant, baseline = (scores[arm] for arm in comparisons[0][:2])
    return ttest_1samp([variant[s] - baseline[s] for s in variant], 0).pvalue * m <= 0.05


def print_power(sims, sd=0.006):
    print(f"\nFound, percent, of true differences (sd {sd} a seed, 5 seeds an arm, plain 14, 8 comparisons). "
          f"Monte-Carlo error:\nup to {50 / math.sqrt(sims):.1f}")
    heads = ("judge", "plain 5", "spreads 1.6x", "spreads 2.2x", "corr. 0.5", "paired t of 69")
    print("difference" + "".join(f"{head:>15}" for head in heads))
    cases = [(14, {}), (5, {}), (14, WORLDS["spreads 1.6x"]), (14, WORLDS["spreads 2.2x"]),
             (14, WORLDS["corr. 0.5"])]
    for true in (0.006, 0.009, 0.012, 0.015, 0.02, 0.03):
        row, old = [], 0
        for n_plain, world in cases:
            rng, found = np.random.default_rng(3), 0
            for _ in range(sims):
                scores, comparisons = study(rng, 5, n_plain, 8, **world, true=[true / sd] + [0] * 7)
                found += judge(scores, comparisons, margin=0.01 / sd)[0].verdict == "worse"
                if not world and n_plain == 5:
                    old += paired_and_holm(scores, comparisons, 69)
            row.append(100 * found / sims)
        print(f"{true:10.3f}" + "".join(f"{x:15.1f}" for x in (*row, 100 * old / sims)), flush=True)
    rng = np.random.default_rng(4)
    quoted = [findable([[*own.values()] for own in study(rng, 5, 14, 8)[0].values()], 5, 14, 8) * sd
              for _ in range(200)]
    print(f"findable() quotes {np.mean(quoted):.4f} (middle 80 %: {np.quantile(quoted, 0.1):.4f} to "
          f"{np.quantile(quoted, 0.9):.4f})")
    print_decided(sims, sd)


def print_decided(sims, sd):
    print("\nNo true difference: called the same within 0.01, percent of arms")
    for n in (3, 5, 10, 20):
        rng, same = np.random.default_rng(n), 0
        for _ in range(sims // 4):
            judged = judge(*study(rng, n, round(n * math.sqrt(8)), 8), margin=0.01 / sd)
            same += np.mean([j.verdict == "same" for j in judged])
        print(f"  {n} seeds an arm: {400 * same / sims:.0f}", flush=True)


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sims", type=int, default=1000, help="simulated studies a cell")
    p.add_argument("--only", choices=("errors", "stages", "power", "looks", "two_looks"))
    a = p.parse_args()
    for name, table in (("power", print_power), ("stages", print_two_stages),
                        ("looks", print_looks), ("two_looks", print_two_looks),
                        ("errors", print_error_rates)):
        if a.only in (None, name):
            table(a.sims)
