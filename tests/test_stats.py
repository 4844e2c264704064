"""Verdicts: each number against another way to it, each rate by simulation, and controls that break it."""
import math
from itertools import product

import numpy as np
import pytest
from scipy import stats as scipy_stats
from scipy.optimize import brentq
from scipy.signal import lfilter
from scipy.special import digamma, polygamma

from nanoheads.intervals import block_bootstrap
from nanoheads.study import stats
from nanoheads.study.stats import (Comparison, error_of, findable, fit, holm, in_words, judge, least_squares,
                                   moderated, prior_of, seed_variance, similar)

pytestmark = pytest.mark.filterwarnings("error")  # a division by zero is a warning in numpy


def rng(*seed):
    return np.random.default_rng(seed)


def within(count, trials, rate, sigmas=4):
    """Whether a count is one that a true rate gives, but for one case in 10,000."""
    return abs(count - trials * rate) <= sigmas * math.sqrt(trials * rate * (1 - rate))


def named(*variants):
    """Scores of variants "0", "1", ...: each a list over seeds, nan where there is no run."""
    return {str(i): {s: float(x) for s, x in enumerate(own) if x == x} for i, own in enumerate(variants)}


def against_first(scores):
    return [(variant, "0") for variant in list(scores)[1:]]


def judged(*variants, **settings):
    scores = named(*variants)
    return judge(scores, against_first(scores), **settings)


def unequal(seed, *counts, spread=1.0, shared=0.0):
    """y [A, S] with so many seeds for each variant, nan beyond; shared: sd of what a seed does to all."""
    y = rng(seed).normal(size=(len(counts), max(counts))) * spread
    y += shared * rng(seed, 1).normal(size=max(counts))
    for row, count in zip(y, counts):
        row[count:] = math.nan
    return y


# ---- special cases that have a name ----

@pytest.mark.parametrize("n", (2, 3, 5, 40))
@pytest.mark.parametrize("level", (0.8, 0.95, 0.999))
def test_two_variants_of_equal_size_are_welchs_t_test(n, level):
    baseline, variant = rng(0, n).normal(1, [[0.01], [0.03]], (2, n))
    if n == 40:  # so that chance correlation is not taken for the seeds' doing
        variant = variant[::-1]
    got, = judged(baseline, variant, alpha=1 - level)
    want = scipy_stats.ttest_ind(variant, baseline, equal_var=False)
    interval = want.confidence_interval(level)
    se = math.sqrt((variant.var(ddof=1) + baseline.var(ddof=1)) / n)
    assert np.allclose(got[2:9], (variant.mean() - baseline.mean(), interval.low, interval.high, se, want.df,
                                  want.pvalue, want.pvalue), rtol=1e-9)


@pytest.mark.parametrize("n, n_baseline", ((3, 16), (5, 14), (14, 5)))
def test_with_more_seeds_of_the_baseline_df_are_welchs_or_those_of_equal_spreads(n, n_baseline):
    smaller = set()
    for seed in range(20):
        y = unequal(seed, n_baseline, n)
        got, = judged(*y)
        variant, baseline = y[1, :n], y[0, :n_baseline]
        want = scipy_stats.ttest_ind(variant, baseline, equal_var=False)
        one, other = 1 / n, 1 / n_baseline
        equal = (one + other) ** 2 / (one ** 2 / (n - 1) + other ** 2 / (n_baseline - 1))
        if got.df == pytest.approx(min(want.df, equal)):
            assert got.mean / got.se == pytest.approx(want.statistic)
            smaller.add(want.df < equal)
    assert smaller == {True, False}


@pytest.mark.parametrize("n", (5, 8, 30))
def test_two_variants_that_a_seed_moves_together_are_the_paired_t_test(n):
    shared = 100 * rng(1, n).normal(size=n)
    baseline, variant = shared + rng(2, n).normal(0, 1, (2, n))
    got, want = judged(baseline, variant)[0], scipy_stats.ttest_rel(variant, baseline)
    interval = want.confidence_interval(0.95)
    assert np.allclose((got.mean, got.low, got.high, got.p),
                       (np.mean(variant - baseline), interval.low, interval.high, want.pvalue), rtol=2e-2)
    assert got.df == pytest.approx(n - 1, rel=1e-2)
    assert got.se < 0.02 * scipy_stats.ttest_ind(variant, baseline)._standard_error  # control


def test_seeds_of_the_baseline_alone_add_nothing_where_a_seed_moves_all_together():
    shared = 1000 * rng(3).normal(size=14)
    y = shared + rng(4).normal(size=(2, 14))
    y[1, 6:] = math.nan
    got, = judged(*y)
    assert got.mean == pytest.approx(np.mean(y[1, :6] - y[0, :6]), abs=0.02)
    assert abs(np.nanmean(y[1]) - y[0].mean()) > 10  # control: the unpaired difference is the seeds' doing


# ---- the model, by explicit matrices ----

def slow_least_squares(y, var, seed_var):
    """(mean [A], covariance of the means, residual degrees of freedom [A], weights by score) of scores y."""
    variant, seed = np.nonzero(~np.isnan(y))
    design = (variant[:, None] == np.arange(len(y))).astype(float)
    covariance = np.diag(var[variant]) + seed_var * (seed[:, None] == seed)
    inverse = np.linalg.inv(covariance)
    of_means = np.linalg.inv(design.T @ inverse @ design)
    weights = of_means @ design.T @ inverse
    left = inverse - inverse @ design @ weights
    df = [(left @ np.diag(var[variant] * (variant == a))).trace() for a in range(len(y))]
    return weights @ y[variant, seed], of_means, np.array(df), weights


@pytest.mark.parametrize("seed_var", (0.0, 0.3, 50.0))
@pytest.mark.parametrize("counts", ((5, 5), (14, 5, 5, 3), (9, 4, 4, 4, 2, 7)))
def test_weights_are_those_of_generalised_least_squares(counts, seed_var):
    y = unequal(5, *counts)
    y[0, 1] = math.nan  # and a hole
    var, there = rng(6, len(counts)).random(len(counts)) + 0.1, ~np.isnan(y)
    precision, weights = least_squares(there, var, seed_var)
    mean, of_means, df, slow = slow_least_squares(y, var, seed_var)
    assert np.allclose(weights[:, there], slow, atol=1e-9) and not weights[:, ~there].any()
    assert np.allclose(np.einsum("abs,bs->a", weights, np.nan_to_num(y)), mean)
    left = precision.diagonal().T - np.einsum("abs,bas->as", precision, weights)
    assert np.allclose(var * left.sum(1), df)
    # the error of a difference from the same weights
    fitted = stats.Fit(mean, weights, (var, df), (var, df), seed_var, 4.0)
    contrast = np.eye(len(y))[1] - np.eye(len(y))[0]
    se, _ = error_of(weights[1] - weights[0], (var, df), fitted)
    assert se ** 2 == pytest.approx(contrast @ of_means @ contrast)


def test_satterthwaite_is_the_moment_match():
    y = unequal(7, 6, 6, 6)
    fitted = fit(y)
    var, df = np.array([1.0, 4.0, 1.0]), np.array([5.0, 5.0, 5.0])
    se, got = error_of(fitted.weights[1] - fitted.weights[0], (var, df), fitted)
    assert se ** 2 == pytest.approx(5 / 6)
    draws = (rng(8).chisquare(5, (200_000, 2)) / 5 * [1, 4]).sum(1) / 6  # of the squared error
    assert got == pytest.approx(2 * draws.mean() ** 2 / draws.var(), rel=0.02)


def test_the_variance_of_seeds_is_found_where_it_is_and_nowhere_else():
    found = {}
    for shared in (0.0, 1.0):
        each = []
        for seed in range(300):
            y = unequal(1000 + seed, 14, *[5] * 8, shared=shared)
            there = ~np.isnan(y)
            residual = np.where(there, y - np.nanmean(y, 1, keepdims=True), 0)
            each.append(seed_variance(residual, there, np.ones(9)))
        found[shared] = np.array(each)
    assert (found[0.0] > 0).mean() <= 0.03
    assert (found[1.0] > 0).mean() > 0.75 and found[1.0].mean() == pytest.approx(1, abs=0.15)


# ---- spreads drawn to each other ----

def test_the_prior_solves_its_equation():
    var, df = rng(9).chisquare(4, 30) * rng(10).lognormal(0, 1, 30), np.full(30, 4.0)
    centre, prior_df = prior_of(var, df)
    log_var = np.log(var) - digamma(2) + np.log(2)
    half = brentq(lambda y: polygamma(1, y) - (log_var.var(ddof=1) - polygamma(1, 2)), 1e-3, 1e6)
    assert prior_df == pytest.approx(2 * half)
    assert math.log(centre) == pytest.approx(log_var.mean() + digamma(half) - math.log(half))
    # all rows at once is row by row
    rows = rng(11).chisquare(4, (7, 6))
    assert np.allclose(prior_of(rows, np.full((7, 6), 4.0)),
                       np.transpose([prior_of(row, np.full(6, 4.0)) for row in rows]))


def test_the_prior_of_many_variants_is_the_true_one():
    true = 2.5 * 6 / rng(12).chisquare(6, 20_000)
    centre, prior_df = prior_of(true * rng(13).chisquare(4, 20_000) / 4, np.full(20_000, 4.0))
    assert centre == pytest.approx(2.5, rel=0.05) and prior_df == pytest.approx(6, rel=0.1)


def test_equal_spreads_are_pooled_and_hold_no_more_than_all_variants_do():
    var, df = np.array([1.0, 1.1, 0.9, 1.05, 0.95]), np.array([13.0, 4, 4, 4, 4])
    centre, prior_df = prior_of(var, df)
    assert prior_df == 29 and centre == pytest.approx(df @ var / 29)
    fitted = judged(*unequal(14, 14, *[5] * 8))
    assert all(j.df <= 13 + 8 * 4 for j in fitted)


def test_a_few_variants_are_not_moderated():
    var, df = np.array([1.0, 2.0, 3.0]), np.full(3, 4.0)
    assert moderated(var, df) == (var, df)


@pytest.mark.parametrize("loud", (10.0, 0.001))
def test_a_variant_of_another_spread_is_left_alone(loud):
    var, df = rng(15).chisquare(4, 9) / 4, np.full(9, 4.0)
    var[3] = loud ** 2
    assert similar(var, df).tolist() == [0, 1, 2, 4, 5, 6, 7, 8]
    got, got_df = moderated(var, df)
    assert got[3] == var[3] and got_df[3] == 4
    others = np.delete(np.arange(9), 3)
    want = moderated(var[others], df[others])
    assert np.allclose(got[others], want[0]) and np.allclose(got_df[others], want[1])


@pytest.mark.parametrize("variants", (4, 5))
def test_one_loud_variant_among_the_fewest_is_left_alone(variants):
    """The prior of four variants, one of them with 10 times the spread, would shorten that one's interval."""
    var, df = np.array([0.8, 100.0, 1.3, 1.0, 0.9][:variants]), np.full(variants, 4.0)
    got, got_df = moderated(var, df)
    assert 1 not in similar(var, df) and got[1] == 100 and got_df[1] == 4
    assert len(similar(np.append(var[[0, 2, 3]], 1.1), df[:4])) == 4  # control: four similar ones are kept


# ---- how often a verdict is wrong ----

def loud_variant_errors(trials=300, n=5):
    """How often the variant of ten times the spread, and any other variant, is called different; none is."""
    r, loud, others = rng(16), 0, 0
    for _ in range(trials):
        y = r.normal(size=(9, n))
        y[1] *= 10
        verdicts = [j.verdict for j in judged(*y, margin=1e-9)]
        loud += verdicts[0] in ("better", "worse")
        others += any(v in ("better", "worse") for v in verdicts[1:])
    return loud / trials, others / trials


def test_a_variant_of_ten_times_the_spread_is_not_called_different():
    loud, others = loud_variant_errors()
    assert loud <= 0.03 and others <= 0.09, (loud, others)


def test_pooling_it_in_would_call_it_different(monkeypatch):
    """Negative control: one spread for all variants, and no look at the variant's own."""
    def pooled(var, df):
        return (df * var).sum(-1) / df.sum(-1), df.sum(-1)
    monkeypatch.setattr(stats, "prior_of", pooled)
    monkeypatch.setattr(stats, "OUTLIER", -1)
    monkeypatch.setattr(stats, "error_of", lambda weights, _, fitted: error_of(weights, fitted.drawn, fitted))
    loud, _ = loud_variant_errors(200)
    assert loud > 0.12, loud


def families(n, n_plain, m, trials, seed=17, spread=0.0):
    r = rng(seed, n, m)
    for _ in range(trials):
        y = r.normal(size=(m + 1, max(n, n_plain))) * np.exp(spread * r.normal(size=(m + 1, 1)))
        y[1:, n:] = math.nan
        y[0, n_plain:] = math.nan
        yield y


@pytest.mark.parametrize("n, n_plain, m", ((3, 8, 8), (5, 14, 8), (3, 16, 30)))
def test_a_study_is_wrong_in_one_of_twenty(n, n_plain, m):
    trials = 300 if m < 30 else 150
    wrong = sum(any(j.p_corrected <= 0.05 for j in judged(*y)) for y in families(n, n_plain, m, trials))
    assert wrong <= trials * 0.05 or within(wrong, trials, 0.05, 3), wrong / trials
    assert wrong > 0  # control: the simulation can be wrong at all


def test_welchs_own_degrees_of_freedom_would_be_wrong_five_times_as_often():
    """Negative control: a small spread by chance makes Welch's formula believe the baseline's many seeds."""
    wrong, trials = 0, 200
    for y in families(3, 16, 30, trials):
        p = scipy_stats.ttest_ind(y[1:, :3], y[:1], axis=1, equal_var=False).pvalue
        wrong += (holm(p) <= 0.05).any()
    assert wrong / trials > 0.18, wrong / trials


def test_drawing_spreads_together_alone_would_be_too_sure():
    """Negative control: limma's p alone, without the variants' own; unequal spreads."""
    wrong = naive = 0
    for y in families(3, 16, 30, 150, spread=0.4):
        rows = judged(*y)
        wrong += any(j.p_corrected <= 0.05 for j in rows)
        naive += (holm([j.p for j in rows]) <= 0.05).any()
    assert wrong / 150 <= 0.1 and naive >= wrong + 5, (wrong, naive)


def test_same_is_wrong_in_one_of_twenty_at_the_margin():
    wrong = 0
    for y in families(10, 20, 3, 300):
        y[1:] += 1.0
        wrong += any(j.verdict == "same" for j in judged(*y, margin=1.0))
    assert wrong <= 300 * 0.05 + 3 * math.sqrt(300 * 0.05), wrong / 300


# ---- what is found ----

def found(true, n=5, n_plain=14, m=8, trials=400):
    """How often the first variant's true difference, in its seeds' sd, is found."""
    r, count = rng(18), 0
    for _ in range(trials):
        y = r.normal(size=(m + 1, n_plain))
        y[1:, n:] = math.nan
        y[1] += true
        count += judged(*y)[0].verdict == "worse"
    return count / trials


def test_two_sd_are_found_about_four_times_in_five():
    assert found(2.0) >= 0.74  # 79 % of 8,000; tests/simulate.py


def test_paired_t_and_69_comparisons_found_one_of_twenty():
    y = rng(19).normal(size=(2000, 5)) - rng(20).normal(size=(2000, 5)) + 2
    assert (scipy_stats.ttest_1samp(y, 0, axis=1).pvalue * 69 <= 0.05).mean() < 0.07


@pytest.mark.parametrize("n, n_plain, m", ((5, 14, 8), (10, 10, 1), (5, 10, 2)))
def test_findable_is_found_four_times_in_five_with_the_spread_known(n, n_plain, m, monkeypatch):
    monkeypatch.setattr(stats, "chdtri", lambda df, q: df)  # the spread itself, not its upper bound
    quiet = rng(21).normal(size=(4, 100))
    quiet = (quiet - quiet.mean(1, keepdims=True)) / quiet.std(1, ddof=1, keepdims=True)
    smallest = findable(named(*quiet), n, n_plain, m)
    assert 0.74 <= found(smallest, n, n_plain, m, 300) <= 0.87


def test_findable_rests_on_the_upper_bound_of_the_spread():
    above = 0
    for seed in range(200):
        scores = named(*unequal(seed, 14, *[5] * 8))
        own = [np.var([*variant.values()], ddof=1) for variant in scores.values()]
        got = findable(scores, 5, 14, 8)
        pooled, df = np.average(own, weights=[13] + [4] * 8), 45
        se = math.sqrt(pooled * 45 / scipy_stats.chi2.ppf(0.1, df) * (1 / 5 + 1 / 14))
        if len(similar(np.array(own), np.array([13.0] + [4.0] * 8))) == 9:
            want = se * (scipy_stats.t.isf(0.7 * 0.025 / 8, 45) + scipy_stats.t.ppf(0.8, 45))
            assert got == pytest.approx(want)
        true = math.sqrt(1 / 5 + 1 / 14) * (scipy_stats.t.isf(0.025 / 8, 45) + scipy_stats.t.ppf(0.8, 45))
        above += got > true
    assert within(above, 200, 0.9)


def test_findable_at_its_edges():
    scores = named(*unequal(22, 6, 6, 6))
    assert math.isnan(findable({}, 5, 5, 1)) and math.isnan(findable({"a": {1: 2.0}}, 5, 5, 1))
    assert math.isnan(findable(scores, 1, 5, 1))
    assert findable(scores, 3, 3, 8) > findable(scores, 5, 5, 8) > findable(scores, 5, 14, 8) > 0
    assert findable(scores, 5, 5, 30) > findable(scores, 5, 5, 1)


@pytest.mark.parametrize("true, word", ((0.9, "worse"), (0.1, "same")))
def test_more_seeds_decide_four_times_in_five(true, word):
    """With a pilot that shows exactly the true difference and the true spread."""
    base = unequal(23, 8, *[4] * 5)
    base = (base - np.nanmean(base, 1, keepdims=True)) / np.nanstd(base, 1, ddof=1, keepdims=True)
    base[1] += true
    pilot = judged(*base, margin=1.0 if word == "same" else 0.01)[0]
    assert pilot.mean == pytest.approx(true) and pilot.verdict in ("undecided", "leaning")
    n, decided, r = pilot.more_seeds, 0, rng(24)
    for _ in range(250):
        y = r.normal(size=(6, 2 * n))
        y[1:, n:] = math.nan
        y[1] += true
        decided += judged(*y, margin=1.0 if word == "same" else 0.01)[0].verdict == word
    assert 0.7 <= decided / 250 <= 0.92, (n, decided / 250)


def test_no_number_of_seeds_up_to_1000_tells_almost_nothing_from_nothing():
    y = unequal(25, 5, 5)
    y = (y - y.mean(1, keepdims=True)) / y.std(1, ddof=1, keepdims=True)
    assert judged(y[0], y[1] + 0.02, margin=0.03)[0].more_seeds is None


# ---- verdicts ----

def test_each_verdict():
    """Spread 1, four seeds a variant and nine of plain: by size of the difference alone."""
    y = unequal(26, 9, *[4] * 5)
    y = (y - np.nanmean(y, 1, keepdims=True)) / np.nanstd(y, 1, ddof=1, keepdims=True)
    y[1:] += np.array([-3, 3, 0.1, 1.4, -0.5])[:, None]
    rows = judged(*y, margin=0.01)
    assert [j.verdict for j in rows] == ["better", "worse", "undecided", "leaning", "undecided"]
    assert [j.verdict for j in judged(*y, margin=2.6)] == ["better", "worse", "same", "leaning", "same"]
    for j in rows:
        assert (j.n, j.n_baseline) == (4, 9) and (j.more_seeds or 5) > 4
        assert j.low < j.mean < j.high and j.p <= j.p_corrected
        assert (j.p <= 0.05) == (not j.low <= 0 <= j.high)


def test_p_are_holms_and_two_one_sided_tests_times_m():
    y = unequal(27, 9, *[6] * 5)
    y[1:] += np.array([-0.9, 0.8, 0, 0.4, 1.2])[:, None]
    rows = judged(*y, margin=1.5)
    own = [tost_and_p(row, fit(y), i, 1.5) for i, row in enumerate(rows, 1)]
    assert np.allclose([j.p_corrected for j in rows],
                       np.maximum(slow_holm([j.p for j in rows]), [p for _, p in own]))
    for j, (own_same, _) in zip(rows, own):
        below = scipy_stats.t.sf((j.mean + 1.5) / j.se, j.df)   # of a true difference of -1.5 or less
        above = scipy_stats.t.cdf((j.mean - 1.5) / j.se, j.df)  # of 1.5 or more
        assert j.p_same == pytest.approx(max(min(1, 5 * max(below, above)), own_same))
        assert j.p == pytest.approx(2 * scipy_stats.t.sf(abs(j.mean) / j.se, j.df))
    assert any(j.p_corrected > h for j, h in zip(rows, slow_holm([j.p for j in rows])))  # own p is in use


def tost_and_p(row, fitted, i, margin):
    """(p of the larger one-sided test, two-sided p) by the variants' own spreads."""
    se, df = error_of(fitted.weights[i] - fitted.weights[0], fitted.own, fitted)
    return scipy_stats.t.cdf((abs(row.mean) - margin) / se, df), 2 * scipy_stats.t.sf(abs(row.mean) / se, df)


def test_the_interval_of_same_lies_within_the_margin():
    """A lone comparison too, where the one-sided tests at 5 % ask for the 90 % interval alone."""
    lone = several = 0
    for trial in range(200):
        y = rng(37, trial).normal(size=(3, 10))
        for variants in (y[:2], y):
            for j in judged(*variants, margin=1.7):
                assert j.verdict != "same" or -1.7 <= j.low and j.high <= 1.7, j
                hidden = j.verdict == "undecided" and j.p_same <= 0.05
                lone += hidden and len(variants) == 2
                several += hidden and len(variants) == 3
    assert lone > 0 and several == 0  # control: the tests alone would have called these the same


def test_a_contrast_between_variants_is_a_comparison_like_any():
    scores = named(*unequal(28, 9, 5, 5, 5, 5))
    there, back = judge(scores, [("1", "2"), ("2", "1")])
    assert there.mean == -back.mean and (there.low, there.p) == (-back.high, back.p)
    mean = np.mean([*scores["1"].values()]) - np.mean([*scores["2"].values()])
    assert there.mean == pytest.approx(mean) and there.n_baseline == 5


def test_verdicts_depend_on_neither_order_nor_level_nor_unit():
    y = unequal(29, 9, *[5] * 6, shared=2.0)
    y[2] += 1.5
    rows = judged(*y)
    scores = named(*y)
    backwards = {variant: dict(reversed(scores[variant].items())) for variant in reversed(scores)}
    assert np.allclose([j[:10] for j in judge(backwards, against_first(scores))], [j[:10] for j in rows])
    moved = judged(*(0.006 * y + 2.4), margin=0.006 * 0.01)
    assert np.allclose([j.p_corrected for j in moved], [j.p_corrected for j in rows])
    assert np.allclose([j.low for j in moved], [0.006 * j.low for j in rows])


def test_identical_scores_are_the_same_and_move_no_other_verdict():
    y = unequal(30, 14, *[5] * 6)
    scores = named(*y)
    comparisons = [("3", "0"), ("4", "0")]
    alone = judge(scores, comparisons)
    scores["copy"] = dict(list(scores["0"].items())[:5])
    got = judge(scores, [*comparisons, ("copy", "0"), ("3", "copy")])
    assert (got[2].verdict, got[2].mean, got[2].low, got[2].high, got[2].n) == ("same", 0, 0, 0, 5)
    assert got[3].mean == got[0].mean
    assert [j[:8] for j in got[:2]] == [j[:8] for j in alone]
    scores["copy"][4] += 1e-9  # not the same model after all
    assert judge(scores, [("copy", "0")])[0].mean != 0


@pytest.mark.parametrize("variant, baseline", (([1.0], [1.0, 2.0]), ([], [1.0, 2.0]), ([1.0, 2.0], [1.0]),
                                               ([1.0], [1.0])))
def test_below_two_seeds_nothing_is_decided(variant, baseline):
    got, = judged(baseline, variant)
    assert got.verdict == "undecided" and (got.low, got.high) == (-math.inf, math.inf)
    assert math.isnan(got.p) and math.isnan(got.p_corrected) and got.more_seeds is None
    assert math.isnan(got.mean) if not variant else got.mean == np.mean(variant) - np.mean(baseline)


def test_a_variant_without_runs_counts_and_makes_no_other_look_better():
    scores = named(*unequal(31, 5, 5))
    alone, = judge(scores, [("1", "0")])
    with_it, missing = judge(scores, [("1", "0"), ("not run", "0")])
    assert with_it.p_corrected == pytest.approx(min(1, 2 * alone.p)) and missing.verdict == "undecided"
    assert judge({}, []) == [] and judge({}, [("a", "b")])[0].n == 0


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_a_diverged_run_is_refused_by_name(bad):
    with pytest.raises(ValueError, match="the score of window, seed 7, is .*: not a finite number"):
        judge({"plain": {7: 1.0, 8: 1.1}, "window": {7: bad, 8: 1.0}}, [("window", "plain")])


def test_scores_without_spread_do_not_divide_by_zero():
    got, = judged([0.1] * 3, [0.2] * 3)
    assert got.verdict == "worse" and got.low == pytest.approx(0.1) == got.high
    noisy = judged(*unequal(32, 6, *[5] * 5), [2.0] * 5)
    assert all(math.isfinite(j.p) for j in noisy)


# ---- many comparisons ----

def slow_holm(p):
    """Step down: the smallest p times m, the next times m - 1; none below the one before, none above 1."""
    adjusted, before = [0.0] * len(p), 0.0
    for step, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        before = adjusted[i] = max(before, min(1.0, p[i] * (len(p) - step)))
    return adjusted


@pytest.mark.parametrize("m", (1, 2, 3, 28))
def test_holm_steps_down(m):
    for seed in range(20):
        p = rng(3, m, seed).random(m) ** 3
        p[m // 2] = p[0]  # a tie
        assert np.allclose(holm(p), slow_holm(p), rtol=1e-12)
        # the adjusted p decide as the textbook does: stop at the first above alpha / (m - step)
        for alpha in (0.01, 0.05):
            kept = np.sort(p) > alpha / np.arange(m, 0, -1)
            assert (holm(p) <= alpha).sum() == (kept.argmax() if kept.any() else m)


def test_a_failed_comparison_stays_nan_and_makes_no_other_look_better():
    p = [0.01, math.nan, 0.02, math.nan]
    assert np.allclose(holm(p), [0.04, math.nan, 0.06, math.nan], equal_nan=True)
    assert np.isnan(holm([math.nan])).all() and holm([]).shape == (0,)


# ---- one pair of models, over text ----

BYTES = 4096


def nats(bits_per_byte):
    return np.asarray(bits_per_byte) * math.log(2) * BYTES


def autocorrelated(trials, n, phi):
    """[trials, n]: unit variance, correlation phi between neighbours, phi^2 one further, from the first."""
    noise = rng(9).normal(size=(trials, n)) * math.sqrt(1 - phi * phi)
    noise[:, 0] /= math.sqrt(1 - phi * phi)
    return lfilter([1], [1, -phi], noise)


@pytest.mark.parametrize("n, block", ((7, 1), (7, 3), (100, 10), (10_000, 16), (10_000, 1), (5, 5), (5, 9)))
def test_the_mean_over_text_is_the_exact_difference(n, block):
    variant, baseline = rng(10, n).normal(200, 30, (2, n))
    mean, low, high = block_bootstrap(variant, baseline, BYTES, block)
    assert mean == pytest.approx((math.fsum(variant) - math.fsum(baseline)) / math.log(2) / BYTES, rel=1e-9)
    assert low <= mean <= high
    assert math.isinf(low) == math.isinf(high) == (block >= n)  # one block says nothing about the next


def test_the_interval_over_text_is_that_of_all_possible_draws():
    n, block, level = 18, 4, 0.8  # five blocks, the last of two windows
    variant, baseline = rng(11).normal(200, 30, (2, n))
    difference = (variant - baseline) / math.log(2) / BYTES
    blocks = [difference[i:i + block] for i in range(0, n, block)]
    draws = [np.concatenate([blocks[i] for i in drawn]).mean() * n for drawn in product(range(5), repeat=5)]
    out = scipy_stats.norm.cdf(math.sqrt(5 / 4) * scipy_stats.t.ppf((1 + level) / 2, 4))
    got = block_bootstrap(variant, baseline, BYTES, block, level, resamples=50_000)
    assert np.allclose(got[1:], np.quantile(draws, (1 - out, out)), atol=0.05 * np.std(draws))


@pytest.mark.parametrize("n, block", ((9, 4), (1001, 50), (33, 32)))
def test_a_short_last_block_adds_no_spread(n, block):
    baseline = rng(12).normal(200, 30, n)
    mean, low, high = block_bootstrap(baseline + nats(0.25 / n), baseline, BYTES, block)
    # summed without weights, a draw of short blocks would be less
    assert np.allclose((mean, low, high), 0.25, rtol=1e-9)


def test_the_interval_over_text_is_the_same_at_each_call_and_mirrored_when_the_models_swap():
    variant, baseline = rng(13).normal(200, 30, (2, 300))
    mean, low, high = block_bootstrap(variant, baseline, BYTES, 8)
    assert (mean, low, high) == block_bootstrap(list(variant), list(baseline), BYTES, 8)
    assert np.allclose(block_bootstrap(baseline, variant, BYTES, 8), (-mean, -high, -low), rtol=1e-9)
    other = block_bootstrap(variant, baseline, BYTES, 8, seed=1)
    assert other[0] == mean and other[1] != low and np.allclose(other,
                                                                (mean, low, high), atol=0.15 * (high - low))


def coverage(block, phi=0.7, trials=200, n=1000, true=0.02):
    """How often the interval of blocks holds the true difference of texts whose neighbours are similar."""
    baseline, found = rng(14).normal(200, 30, n), 0
    for noise in autocorrelated(trials, n, phi):
        variant = baseline + nats(true / n + 0.01 * noise)
        _, low, high = block_bootstrap(variant, baseline, BYTES, block, resamples=300)
        found += low <= true <= high
    return found / trials


def test_the_interval_over_text_holds_the_truth_as_often_as_it_says():
    assert 0.90 <= coverage(block=32) <= 0.98  # 31 blocks of 32 windows and one of 8
    assert 0.92 <= coverage(block=1, phi=0) <= 0.98


def test_blocks_of_one_window_would_be_too_sure_of_themselves():
    assert coverage(block=1, trials=100) < 0.75  # negative control


def test_pairing_takes_away_what_makes_text_hard_for_both():
    n, block = 800, 8
    hard = 200 + 40 * autocorrelated(1, n, 0.5)[0]
    variant, baseline = hard + rng(15).normal(-1, 3, (1, n))[0], hard + rng(16).normal(0, 3, n)
    mean, low, high = block_bootstrap(variant, baseline, BYTES, block)
    # control: each model with blocks of its own
    draws = rng(17).integers(n // block, size=(2, 1000, n // block))
    sums = [each.reshape(-1, block).sum(1)[drawn].sum(1) for each, drawn in zip((variant, baseline), draws)]
    wide = np.quantile((sums[0] - sums[1]) / math.log(2) / BYTES, (0.025, 0.975))
    assert high < 0 and wide[0] < 0 < wide[1] and wide[1] - wide[0] > 5 * (high - low)


def test_other_windows_are_refused():
    with pytest.raises(ValueError, match="the variant has 3 windows and the baseline 4: not the same text"):
        block_bootstrap(np.ones(3), np.ones(4), BYTES, 2)
    with pytest.raises(ValueError, match="block=0 must be at least 1 window"):
        block_bootstrap(np.ones(3), np.ones(3), BYTES, 0)


@pytest.mark.parametrize("n, m", ((2, 1), (2, 8), (3, 30)))
def test_nothing_overflows_at_the_fewest_seeds(n, m):
    """Warnings are errors here; one variant of 1000 times the spread, and some that a seed moves together."""
    for y in families(n, 2 * n, m, 40):
        y[1] *= 1000
        for each in (y, y + 30 * rng(34).normal(size=y.shape[1])):
            assert all(0 <= j.p <= j.p_corrected <= 1 for j in judged(*each) if math.isfinite(j.low))


# ---- in words ----

BETTER = Comparison(5, 14, -0.0123, -0.0145, -0.0101, 0.001, 30.0, 1e-4, 0.004, 1.0, "better", None)


@pytest.mark.parametrize("change, sentence", (
    ({}, "better by 0.0123 bits/byte (95 % interval 0.0101 to 0.0145, corrected p = 0.004)"),
    (dict(mean=0.0123, low=0.0101, high=0.0145, verdict="worse", p_corrected=3e-6),
     "worse by 0.0123 bits/byte (95 % interval 0.0101 to 0.0145, corrected p < 0.0001)"),
    (dict(mean=0.0011, low=-0.003, high=0.0052, verdict="same", p_corrected=1.0),
     "the same within 0.01 bits/byte: +0.0011 bits/byte (95 % interval -0.0030 to +0.0052)"),
    (dict(verdict="leaning", p_corrected=0.0812, more_seeds=9),
     "leaning to better, not certain: -0.0123 bits/byte (95 % interval -0.0145 to -0.0101, "
     "corrected p = 0.0812); about 9 seeds, now 5, would probably decide"),
    (dict(mean=0.0011, low=-0.003, high=0.0052, verdict="undecided", p_corrected=1.0),
     "undecided, better and worse are both possible: +0.0011 bits/byte (95 % interval -0.0030 to +0.0052, "
     "corrected p = 1); more than 1000 seeds, now 5, would probably decide"),
    (dict(n=1, low=-math.inf, high=math.inf, verdict="undecided"),
     "undecided: 1 and 14 seeds are too few, each side needs two or more"),
    (dict(low=-math.inf, high=math.inf, df=0.7, verdict="undecided"),
     "undecided: 5 and 14 seeds do not tell the spread of these scores"),
    (dict(mean=0.0, low=0.0, high=0.0, se=0.0, df=math.inf, verdict="same"),
     "the same: identical scores on every shared seed"),
), ids=("better", "worse", "same", "leaning", "undecided", "one-seed",
        "no-spread", "identical"))
def test_a_verdict_reads_as_it_should(change, sentence):
    assert in_words(BETTER._replace(**change), 0.05, 0.01) == sentence


def test_words_are_at_the_level_and_margin_that_were_asked_for():
    assert "(99 % interval" in in_words(BETTER, alpha=0.01)
    assert "within 0.002 bits/byte" in in_words(BETTER._replace(verdict="same"), margin=0.002)
    for variants, strict in ((5, 0.7), (1, 1.0)):  # six have their spreads drawn together, two do not
        y = unequal(33, 9, *[4] * variants)
        y[1] += 2.0
        p = judged(*y)[0].p_corrected / strict
        assert judged(*y, alpha=p * 1.01)[0].verdict == "worse"
        assert judged(*y, alpha=p * 0.99)[0].verdict != "worse"


def test_variants_that_keep_their_own_spread_are_judged_at_the_whole_level():
    spread = np.array([1.0] * 9 + [30.0] * 4)
    y = spread[:, None] * rng(11).normal(size=(13, 5))
    y[-1] += 300.0
    scores = {f"variant {i}": dict(enumerate(row.tolist())) for i, row in enumerate(y)}
    for baseline, strict in (("variant 9", 1.0), ("variant 0", 0.7)):  # variant 0 is drawn to its like
        p = judge(scores, [("variant 12", baseline)])[0].p_corrected / strict
        for alpha, found in ((p * 1.01, True), (p * 0.99, False)):
            assert (judge(scores, [("variant 12", baseline)], alpha=alpha)[0].verdict == "worse") is found


def test_several_loud_variants_do_not_hide_each_other(monkeypatch):
    """Four variants of thirty times the spread: the others are judged as if they were not there."""
    spread = np.array([1.0] * 9 + [30.0] * 4)
    y = 0.006 * spread[:, None] * rng(11).normal(size=(13, 5))
    scores = {f"variant {i}": dict(enumerate(row.tolist())) for i, row in enumerate(y)}
    quiet = {name: scores[name] for name in list(scores)[:9]}
    pair = [("variant 1", "variant 0")]
    alone, beside = judge(quiet, pair)[0], judge(scores, pair)[0]
    assert beside.se == pytest.approx(alone.se) and beside.df >= alone.df
    assert findable(scores, 5, 5, 8) == pytest.approx(findable(quiet, 5, 5, 8))
    monkeypatch.setattr(stats, "LOUD", math.inf)  # the control: one prior for all hides them
    assert judge(scores, pair)[0].df < 0.8 * alone.df
