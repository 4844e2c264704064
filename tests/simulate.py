"""
How often the verdicts of a study are wrong, and how often they find what is there: simulated studies.

    python tests/simulate.py                  # all tables: some minutes on one idle core
    python tests/simulate.py --sims=200       # a first look
    python tests/simulate.py --only=stages    # one of them: errors, stages or power

Each simulated study is judged by study/verdicts.py, as a real one is. Spreads are in units of a typical
variant's, the margin is one of those; true differences are 0, or exactly the margin, which is where "same" is
wrong most often. It is no test: tests/study/test_stats.py holds a small part of it.
"""

import argparse
import math
import sys
from pathlib import Path

import numpy as np
from scipy.special import stdtr

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from study import stats  # noqa: E402
from study.records import PLAIN, Pair, Result, Run, Study, Variant  # noqa: E402
from study.verdicts import MEASURES, seems_better, comparisons_of  # noqa: E402

# how the scores of a study may be: keywords of scores_of()
WORLDS = {
    "normal": {},
    "t3 tails": dict(tails=3),
    "one variant 10x": dict(loud=10),
    "spreads 1.6x": dict(unequal=0.25),
    "spreads 2.2x": dict(unequal=0.4),
}


def scores_of(rng, n, n_plain, m, tails=0, unequal=0.0, loud=1, true=0.0):
    """{variant: scores} of the plain GPT and m variants with n seeds each; true [m]: their true differences.

    unequal: sd of the log of the variants' spreads, two in three lie within a factor exp(2 * unequal). loud:
    factor of the first variant's. tails: of t, its degrees of freedom; 0 is normal.
    """
    noise = rng.normal(size=(m + 1, max(n, n_plain)))
    if tails:
        noise = rng.standard_t(tails, noise.shape) * math.sqrt((tails - 2) / tails)  # variance 1
    spread = np.exp(unequal * rng.normal(size=(m + 1, 1)))
    spread[1] *= loud
    y = spread * noise
    y[1:] += np.reshape(true, (-1, 1))
    return {PLAIN: y[0, :n_plain], **{f"variant {i}": row[:n] for i, row in enumerate(y[1:])}}


def judge(scores, pairs=None, margin=0.01):
    """The Comparisons of {variant: scores}, each with the plain GPT; pairs: other (variant, baseline)."""
    runs = [(Run("judge", name, "text", seed, dict(variant=name, seed=seed)), float(score))
            for name, of in scores.items() for seed, score in enumerate(of)]
    pairs = pairs or [(name, PLAIN) for name in scores if name != PLAIN]
    return comparisons_of(Study(
        "simulated", "bits/byte", tuple(Variant(name, "variant") for name in scores),
        tuple(Pair(*pair, ("text",), "parameters" * (pair[1] != PLAIN)) for pair in pairs), ("text",),
        tuple(run for run, _ in runs), {run.name: Result(score) for run, score in runs}, margin=margin))


def wrong(verdict, true, margin):
    """Whether a verdict says what is not so."""
    if verdict == "better":
        return true >= 0
    if verdict == "worse":
        return true <= 0
    return verdict == "same" and abs(true) >= margin


# ---- errors ----

def studies_at_once(n, n_plain, m, sims, true, margin, own_df=False, families=1):
    """Percent of studies with a wrong verdict: all of them in arrays, which is 100 times as fast as judge().

    true [m]: true differences, in the sd of a seed. Without what stats.py has: own_df, Welch's own degrees of
    freedom; families=2, differences and "same" corrected apart.
    """
    rng = np.random.default_rng([n, n_plain, m])
    y, plain = rng.normal(size=(sims, m, n)) + true[:, None], rng.normal(size=(sims, 1, n_plain))
    mean = y.mean(-1) - plain.mean(-1)
    squares = y.var(-1, ddof=1) / n, plain.var(-1, ddof=1) / n_plain
    se, df = np.sqrt(sum(squares)), stats.satterthwaite(squares, (n, n_plain))
    if not own_df:
        df = np.minimum(df, stats.satterthwaite((1 / n, 1 / n_plain), (n, n_plain)))
    p = 2 * stdtr(df, -abs(mean) / se), stdtr(df, (abs(mean) - margin) / se)
    if families == 2:
        differs, same = (np.array([stats.holm(row) for row in each]) for each in p)
    else:
        both = np.array([stats.holm(row, max_true=m) for row in np.concatenate(p, 1)])
        differs, same = both[:, :m], both[:, m:]
    if not own_df and families == 1:  # the first study, as judge() has it
        rows = judge({PLAIN: plain[0, 0], **{f"variant {i}": row for i, row in enumerate(y[0])}},
                     margin=margin)
        assert np.allclose([row.p_corrected for row in rows], differs[0])
        assert np.allclose([row.p_same for row in rows], same[0])
    differs = differs <= 0.05
    bad = differs & (np.sign(mean) != np.sign(true)) | ~differs & (same <= 0.05) & (abs(true) >= margin)
    return 100 * bad.any(1).mean()


def print_errors(sims):
    print("\nPercent of studies with a wrong verdict. None: no variant differs; half: every second one (or "
          "the only one) differs\nby the margin of 1 or 3 sd. Monte-Carlo error (one sd at 5 %): "
          f"{100 * math.sqrt(0.05 * 0.95 / sims):.1f}")
    heads = "none", "half, 1 sd", "half, 3 sd", "none, own df", "half, 1 sd, 2 families"
    print("variants  seeds  plain " + "".join(f"{head:>24}" for head in heads))
    for m, n, n_plain in ((1, 5, 5), (8, 3, 8), (8, 5, 5), (8, 5, 14), (8, 20, 57), (25, 8, 32), (30, 3, 16)):
        none, half = np.zeros(m), np.where(np.arange(m) % 2, 1.0, 0.0) if m > 1 else np.ones(1)
        cells = (studies_at_once(n, n_plain, m, sims, *case) for case in (
            (none, 1.0), (half, 1.0), (3 * half, 3.0), (none, 1.0, True), (half, 1.0, False, 2)))
        print(f"{m:8} {n:6} {n_plain:6} " + "".join(f"{cell:24.1f}" for cell in cells), flush=True)


# ---- screened, then judged ----

def judged_of(validation):
    """The numbers of the variants that go on: the best six and the worst two."""
    order = validation.argsort()
    return np.concatenate([order[:6], order[-2:]])


def two_stages(rng, fresh, true, sd=0.006, text=0.006, n=5, n_plain=14, **world):
    """(any wrong verdict, judged variants that do differ, found): 34 of them, two seeds each on validation.

    The best six and the worst two go on. Validation and test differ by what their texts do to a variant (sd
    `text`). What seems better then meets a wider plain GPT, which is as good as the plain one. fresh=False
    judges on the screening's own seeds (and more): what must not be done.
    """
    m = len(true)
    y = np.asarray(true)[:, None] + sd * rng.normal(size=(m, 2))
    validation = y.mean(1) + text * rng.normal(size=m) / 2
    chosen = judged_of(validation)
    scores = {name: sd * row for name, row in
              scores_of(rng, n, n_plain, len(chosen), true=true[chosen] / sd, **world).items()}
    names = [name for name in scores if name != PLAIN]
    if not fresh:
        for name, i in zip(names, chosen):
            scores[name][:2] = y[i]
    truth = dict(zip(names, true[chosen]))
    better = [c.variant for c in judge(scores) if seems_better(c, 0.05)]
    pairs = [*((name, PLAIN) for name in names), *((name, f"plain for {name}") for name in better)]
    scores.update({f"plain for {name}": sd * rng.normal(size=n) for name in better})
    judged = judge(scores, pairs)
    false = [wrong(row.verdict, truth[row.variant], 0.01) for row in judged]
    found = sum(row.verdict in ("better", "worse") and not bad
                for row, bad in zip(judged[:len(names)], false))
    return any(false), (true[chosen] != 0).sum(), found


def print_stages(sims):
    print("\n34 variants screened with 2 seeds, best 6 and worst 2 judged with 5 (plain 14): studies with a "
          f"wrong verdict.\nMonte-Carlo error (one sd at 5 %): {100 * math.sqrt(0.05 * 0.95 / sims):.1f}")
    some = np.zeros(34)
    some[:6] = (-0.012, -0.012, -0.01, 0.01, 0.012, 0.03)
    for name, true in (("no variant differs", np.zeros(34)), ("six variants differ", some)):
        for fresh in (True, False):
            for world, keys in WORLDS.items():
                rng = np.random.default_rng(5)
                seen = np.array([two_stages(rng, fresh, true, **keys) for _ in range(sims)], float)
                bad, differ, found = seen.mean(0)
                power = f", found {100 * found / differ:.0f} % of those that differ" if differ else ""
                print(f"  {name}, {'fresh seeds' if fresh else 'two seeds used twice'}, {world}: "
                      f"{100 * bad:.1f} %{power}", flush=True)


# ---- power ----

def print_power(sims, sd=0.006):
    print(f"\nFound, percent, of true differences (sd {sd} a seed, 5 seeds a variant, plain 14, 8 "
          f"comparisons).\nMonte-Carlo error: up to {50 / math.sqrt(sims):.1f}")
    margin = MEASURES["bits/byte"].margin / sd
    for true in (0.006, 0.009, 0.012, 0.015, 0.02, 0.03):
        rng = np.random.default_rng(3)
        found = sum(judge(scores_of(rng, 5, 14, 8, true=[true / sd] + [0] * 7), margin=margin)[0].verdict
                    == "worse" for _ in range(sims))
        print(f"{true:10.3f}{100 * found / sims:15.1f}", flush=True)
    print("\nNo true difference: called the same within 0.01, percent of variants")
    for n in (3, 5, 10, 20):
        rng, many = np.random.default_rng(n), max(1, sims // 4)
        same = sum(np.mean([c.verdict == "same" for c in judge(
            scores_of(rng, n, round(n * math.sqrt(8)), 8), margin=margin)]) for _ in range(many))
        print(f"  {n} seeds a variant: {100 * same / many:.0f}", flush=True)


TABLES = dict(power=print_power, stages=print_stages, errors=print_errors)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sims", type=int, default=1000, help="simulated studies a cell")
    p.add_argument("--only", choices=TABLES)
    a = p.parse_args(argv)
    for name, print_table in TABLES.items():
        if a.only in (None, name):
            print_table(a.sims)


if __name__ == "__main__":
    main()
