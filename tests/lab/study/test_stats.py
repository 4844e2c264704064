"""Verdicts: against scipy's Welch test, each rate by simulation, and controls that break it."""
import math
from itertools import product

import numpy as np
import pytest
from scipy import stats as scipy_stats
from scipy.signal import lfilter

from nanoheads.intervals import block_bootstrap
from lab.study import stats
from lab.study.stats import (Comparison, Difference, difference, findable, holm, in_words, judge, p_same,
                             seeds_to_find)
from simulate import error_of_two_looks

pytestmark = pytest.mark.filterwarnings("error")  # a division by zero is a warning in numpy


def rng(*seed):
    return np.random.default_rng(seed)


def within(count, trials, rate, sigmas=4):
    """Whether a count is one that a true rate gives, but for one case in 10,000."""
    return abs(count - trials * rate) <= sigmas * math.sqrt(trials * rate * (1 - rate))


def welch(variant, baseline, alpha=0.05):
    return difference([(1, variant), (-1, baseline)], alpha)


def judged(baseline, *variants, alpha=0.05, **settings):
    """Each variant against the baseline, all of them lists of scores."""
    found = [welch(variant, baseline, alpha) for variant in variants]
    return judge(found, [(len(variant), len(baseline)) for variant in variants], alpha, **settings)


def studies(n, n_plain, m, trials, true=0.0, spread=0.0, seed=17):
    """(baseline, m variants) of simulated studies; true [m]: their true differences, in sd of a seed."""
    r = rng(seed, n, m)
    for _ in range(trials):
        scale = np.exp(spread * r.normal(size=(m, 1)))
        yield r.normal(size=n_plain), scale * r.normal(size=(m, n)) + np.reshape(true, (-1, 1))


# ---- one difference ----

@pytest.mark.slow
@pytest.mark.parametrize("n, n_baseline", ((2, 2), (5, 5), (40, 40), (5, 14), (14, 5), (3, 16)))
@pytest.mark.parametrize("level", (0.8, 0.95, 0.999))
def test_a_difference_is_welchs_t_test(n, n_baseline, level):
    """Where its degrees of freedom exceed those of equal spreads, it is the t test at the latter."""
    capped = 0
    for seed in range(10):
        r = rng(seed, n, n_baseline)
        baseline, variant = r.normal(1, 0.01, n_baseline), r.normal(1, 0.03, n)
        got = welch(variant, baseline, 1 - level)
        want = scipy_stats.ttest_ind(variant, baseline, equal_var=False)
        one, other = 1 / n, 1 / n_baseline
        equal = (one + other) ** 2 / (one ** 2 / (n - 1) + other ** 2 / (n_baseline - 1))
        df, error = min(want.df, equal), abs((variant.mean() - baseline.mean()) / want.statistic)
        low, high = scipy_stats.t.interval(level, df, variant.mean() - baseline.mean(), error)
        p = 2 * scipy_stats.t.sf(abs(want.statistic), df)
        assert np.allclose(got, (variant.mean() - baseline.mean(), low, high, error, df, p), rtol=1e-9)
        if want.df <= equal * (1 + 1e-12):
            interval = want.confidence_interval(level)
            assert np.allclose((got.low, got.high, got.p), (interval.low, interval.high, want.pvalue))
        else:
            capped += 1
            assert got.p > want.pvalue  # never surer than Welch's
    assert n != n_baseline or not capped


def test_a_pooled_variance_would_not_be_welchs():
    """Negative control: Student's test, of equal spreads."""
    baseline, variant = rng(1).normal(0, 1, 5), rng(2).normal(4, 5, 20)
    student = scipy_stats.ttest_ind(variant, baseline)
    assert abs(welch(variant, baseline).p - student.pvalue) > 1e-3


def test_a_difference_over_two_texts_is_the_mean_with_errors_in_squares():
    texts = [(rng(3, i).normal(2, s, 6), rng(4, i).normal(1, s, 9)) for i, s in enumerate((0.01, 0.05))]
    alone = [welch(*text) for text in texts]
    got = difference([(weight / 2, scores) for text in texts for weight, scores in zip((1, -1), text)])
    assert got.mean == pytest.approx(np.mean([each.mean for each in alone]))
    assert got.se == pytest.approx(math.hypot(*(each.se for each in alone)) / 2)
    assert max(min(each.df for each in alone), 1) <= got.df <= sum(each.df for each in alone)
    summed = sum(each.se for each in alone) / 2  # control: errors added as they are
    assert summed > 1.1 * got.se


@pytest.mark.slow
def test_the_error_of_a_weighted_mean_is_what_simulation_gives():
    """An interpolated baseline: 0.3 of one budget and 0.7 of another."""
    means, errors = [], []
    for seed in range(4000):
        r = rng(5, seed)
        parts = [(1, r.normal(0, 1, 5)), (-0.3, r.normal(0, 2, 4)), (-0.7, r.normal(0, 1, 12))]
        found = difference(parts)
        means.append(found.mean)
        errors.append(found.se)
    assert np.mean(np.square(errors)) == pytest.approx(np.var(means), rel=0.06)


def test_satterthwaite_is_the_moment_match():
    got = stats.satterthwaite([1 / 6, 4 / 6], [6, 6])
    draws = (rng(8).chisquare(5, (200_000, 2)) / 5 * [1, 4]).sum(1) / 6  # of the squared error
    assert got == pytest.approx(2 * draws.mean() ** 2 / draws.var(), rel=0.02)


def test_same_is_two_one_sided_tests():
    variant, baseline = rng(6).normal(0.1, 1, 30), rng(7).normal(0, 1, 30)
    # each side is a Welch test of its own, of scores moved by the margin
    sides = (scipy_stats.ttest_ind(variant - 1, baseline, equal_var=False, alternative="less").pvalue,
             scipy_stats.ttest_ind(variant + 1, baseline, equal_var=False, alternative="greater").pvalue)
    found = welch(variant, baseline)
    assert p_same(found, 1.0) == pytest.approx(max(sides))
    assert abs(p_same(found, 1.0) - min(sides)) > 1e-3  # control: one of the tests alone


@pytest.mark.parametrize("variant, baseline", (([1.0], [1.0, 2.0]), ([], [1.0, 2.0]), ([1.0, 2.0], [1.0]),
                                               ([1.0], [1.0])))
def test_below_two_seeds_nothing_is_decided(variant, baseline):
    got, = judged(baseline, variant)
    assert got.verdict == "undecided" and (got.low, got.high) == (-math.inf, math.inf)
    assert math.isnan(got.p) and math.isnan(got.p_corrected) and got.more_seeds is None
    assert math.isnan(got.mean) if not variant else got.mean == np.mean(variant) - np.mean(baseline)


def test_scores_without_spread_decide_nothing():
    got, = judged([0.1] * 3, [0.2] * 3)
    assert got.verdict == "undecided" and got.mean == pytest.approx(0.1) and "do not show" in in_words(got)
    one_sided, = judged([0.1] * 3, [0.2, 0.3, 0.25])
    assert math.isfinite(one_sided.p)


# ---- how often a verdict is wrong ----

def wrong(found, true, margin):
    """Whether a verdict says what is not so."""
    if found.verdict in ("better", "worse"):
        return true == 0 or (found.verdict == "better") != (true < 0)
    return found.verdict == "same" and abs(true) >= margin


def share_wrong(n, n_plain, m, trials, true=None, margin=1.0, **world):
    true = np.zeros(m) if true is None else np.asarray(true)
    return sum(any(wrong(c, t, margin) for c, t in zip(judged(plain, *variants, margin=margin), true))
               for plain, variants in studies(n, n_plain, m, trials, true, **world)) / trials


def bound(trials):
    """What a true rate of 5 % stays below, but for one case in 700."""
    return 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)


@pytest.mark.slow
@pytest.mark.parametrize("n, n_plain, m", ((5, 5, 1), (3, 8, 8), (5, 14, 8), (3, 16, 30)))
@pytest.mark.parametrize("spread", (0.0, 0.4))
def test_a_study_without_differences_is_wrong_in_one_of_twenty_at_most(n, n_plain, m, spread):
    trials = 300 if m < 30 else 150
    assert share_wrong(n, n_plain, m, trials, spread=spread) <= bound(trials)


@pytest.mark.slow
def test_the_simulation_can_be_wrong_at_all():
    assert share_wrong(5, 5, 1, 600) > 0.02


@pytest.mark.slow
@pytest.mark.parametrize("n, margin", ((5, 1.0), (10, 1.5), (20, 1.0)))
def test_a_study_in_which_every_second_variant_differs_by_the_margin_is_not_wrong_more_often(n, margin):
    true = margin * (np.arange(8) % 2)
    assert share_wrong(n, 3 * n, 8, 300, true, margin) <= bound(300)


@pytest.mark.slow
def test_welchs_own_degrees_of_freedom_would_be_wrong_five_times_as_often(monkeypatch):
    """Negative control: a small spread by chance makes Welch's formula believe the baseline's many seeds."""
    count, trials = 0, 200
    for plain, variants in studies(3, 16, 30, trials):
        p = scipy_stats.ttest_ind(variants, plain[None], axis=1, equal_var=False).pvalue
        count += (holm(p) <= 0.05).any()
    assert count / trials > 0.18, count / trials


@pytest.mark.slow
def test_two_families_would_be_wrong_more_often(monkeypatch):
    """Negative control: differences by themselves and "same" by themselves, each at 5 %."""
    true = 1.0 * (np.arange(8) % 2)

    def apart(p, most_true):
        return np.concatenate([holm(p[:len(p) // 2]), holm(p[len(p) // 2:])])

    together = share_wrong(20, 57, 8, 800, true)
    monkeypatch.setattr(stats, "holm", apart)
    assert share_wrong(20, 57, 8, 800, true) > max(0.055, 1.3 * together)


@pytest.mark.slow
def test_no_correction_would_be_wrong_in_every_third_study(monkeypatch):
    """Negative control: eight comparisons, each at 5 %."""
    monkeypatch.setattr(stats, "holm", lambda p, most_true: np.asarray(p))
    assert share_wrong(5, 14, 8, 200) > 0.15


# ---- two looks ----

@pytest.mark.parametrize("spending, alpha, share, want", (
    ("pocock", 0.05, 0.5, (0.0294, 0.0294)), ("obrien_fleming", 0.05, 0.5, (0.0052, 0.0480)),
    ("pocock", 0.01, 0.5, (0.0056, 0.0056)), ("obrien_fleming", 0.01, 0.5, (0.0003, 0.0099)),
    ("obrien_fleming", 0.05, 0.6, (0.0101, 0.0464))))
def test_the_levels_of_two_looks_are_those_of_the_textbooks(spending, alpha, share, want):
    """Jennison and Turnbull, Group Sequential Methods, tables 2.1 and 2.3: z of 2.178; 2.797 and 1.977; at
    alpha 0.01 of 2.772; 3.649 and 2.580.
    """
    assert stats.levels(alpha, spending, share) == pytest.approx(want, abs=6e-5)


@pytest.mark.parametrize("spending", stats.SPENDING)
@pytest.mark.parametrize("share, m", ((0.5, 1), (0.6, 1), (0.5, 8)))
def test_two_looks_together_have_the_chance_that_is_allowed(spending, share, m):
    """By scipy's bivariate normal; m comparisons have an m-th of it each, and the design's shape."""
    levels = stats.levels(0.05, spending, share, m)
    z = [float(scipy_stats.norm.isf(level / m / 2)) for level in levels]
    both = scipy_stats.multivariate_normal([0, 0], [[1, math.sqrt(share)], [math.sqrt(share), 1]])
    inside = both.cdf(z, lower_limit=[-each for each in z])
    assert 1 - inside == pytest.approx(0.05 / m, rel=1e-3)
    single = stats.levels(0.05, spending, share)
    assert levels[0] / levels[1] == pytest.approx(single[0] / single[1])
    assert m == 1 or all(a < b for a, b in zip(levels, single))


@pytest.mark.slow
def test_two_planned_looks_are_wrong_in_one_of_twenty_and_two_others_more_often():
    """A part of tests/simulate.py --only=two_looks; looks without a correction are the negative control."""
    alone = error_of_two_looks(400, 1, 10, 10, {}, 0.0)
    several = error_of_two_looks(100, 4, 6, 12, dict(unequal=0.4), 0.0)
    for spending in stats.SPENDING:
        assert 0 < alone[spending] / 100 <= bound(400) and several[spending] / 100 <= bound(100)
        assert alone["peeking"] > 1.3 * alone[spending]


# ---- a weighted sum of means ----

def slowly(cells, weights, alpha=0.05):
    """Welch and Satterthwaite for a weighted sum of means, from their formulas."""
    means, squares, dfs = [], [], []
    for weight, scores in zip(weights, cells):
        n, mean = len(scores), sum(scores) / len(scores)
        variance = sum((score - mean) ** 2 for score in scores) / (n - 1)
        means.append(weight * mean)
        squares.append(weight ** 2 * variance / n)
        dfs.append(n - 1)
    se = math.sqrt(sum(squares))
    df = sum(squares) ** 2 / sum(square ** 2 / own for square, own in zip(squares, dfs))
    low, high = scipy_stats.t.interval(1 - alpha, df, sum(means), se)
    return sum(means), low, high, se, df, 2 * scipy_stats.t.sf(abs(sum(means)) / se, df)


def four_cells(r, n=9, spreads=(0.008, 0.004, 0.012, 0.006)):
    """Scores of four models, whose spreads differ."""
    return [r.normal(mean, spread, n) for mean, spread in zip((2.10, 2.08, 2.07, 2.06), spreads)]


@pytest.mark.parametrize("seed", range(5))
def test_a_weighted_sum_of_means_has_welchs_interval(seed):
    """As of the mean of the differences on two texts."""
    cells, weights = four_cells(rng(31, seed)), [0.5, -0.5, -0.5, 0.5]
    got = stats.difference([*zip(weights, cells)], 0.05)
    assert np.allclose(got, slowly(cells, weights), rtol=1e-9)
    # negative control: a sign that is wrong gives another number
    assert not np.allclose(slowly(cells, [0.5, -0.5, 0.5, -0.5])[0], got.mean, atol=1e-3)


# ---- what is found ----

def found(true, n=5, n_plain=14, m=8, trials=300):
    """How often the first variant's true difference, in its seeds' sd, is found."""
    truths = [true] + [0] * (m - 1)
    return sum(judged(plain, *variants)[0].verdict == "worse"
               for plain, variants in studies(n, n_plain, m, trials, truths)) / trials


@pytest.mark.slow
@pytest.mark.parametrize("n, n_plain, m", ((5, 14, 8), (10, 10, 1), (5, 10, 2)))
def test_findable_is_found_four_times_in_five_with_the_spread_known(n, n_plain, m, monkeypatch):
    monkeypatch.setattr(stats, "chdtri", lambda df, q: df)  # the spread itself, not its upper bound
    quiet = rng(21).normal(size=(4, 100))
    quiet = (quiet - quiet.mean(1, keepdims=True)) / quiet.std(1, ddof=1, keepdims=True)
    assert 0.74 <= found(findable(quiet, n, n_plain, m), n, n_plain, m) <= 0.87


def test_findable_at_its_edges():
    scores = rng(22).normal(size=(3, 6))
    assert math.isnan(findable([], 5, 5, 1)) and math.isnan(findable([[2.0]], 5, 5, 1))
    assert math.isnan(findable(scores, 1, 5, 1))
    assert findable(scores, 3, 3, 8) > findable(scores, 5, 5, 8) > findable(scores, 5, 14, 8) > 0
    assert findable(scores, 5, 5, 30) > findable(scores, 5, 5, 1)
    loud = [*scores, 1000 * scores[0]]  # the median spread hardly sees one of another
    assert findable(loud, 5, 5, 8) < 3 * findable(scores, 5, 5, 8)


@pytest.mark.parametrize("per_seed, m", [(1.0, 1), (2.5, 8)])
def test_seeds_to_find_are_the_fewest_that_find_a_difference(per_seed, m):
    scores = [[1.0, 1.01, 1.02, 0.99, 1.005], [2.0, 2.015, 1.995, 2.01]]
    n = seeds_to_find(0.01, scores, per_seed, m)
    assert findable(scores, n, round(per_seed * n), m) <= 0.01
    assert findable(scores, n - 1, round(per_seed * (n - 1)), m) > 0.01
    assert seeds_to_find(1.0, scores, per_seed, m) == 2
    assert seeds_to_find(1e-6, scores, per_seed, m) is None and seeds_to_find(0.01, [], per_seed, m) is None


@pytest.mark.slow
@pytest.mark.parametrize("true, margin, word", ((0.9, 0.01, "worse"), (0.1, 1.0, "same")))
def test_more_seeds_decide_four_times_in_five(true, margin, word):
    """With a pilot that shows exactly the true difference and the true spread."""
    base = [rng(23, i).normal(size=size) for i, size in enumerate((8, *[4] * 5))]
    base = [(each - each.mean()) / each.std(ddof=1) for each in base]
    pilot = judged(base[0], base[1] + true, *base[2:], margin=margin)[0]
    assert pilot.mean == pytest.approx(true) and pilot.verdict == "undecided"
    n, decided = pilot.more_seeds, 0
    for plain, variants in studies(n, 2 * n, 5, 250, [true, 0, 0, 0, 0], seed=24):
        decided += judged(plain, *variants, margin=margin)[0].verdict == word
    assert 0.7 <= decided / 250 <= 0.95, (n, decided / 250)


def test_no_number_of_seeds_up_to_1000_tells_almost_nothing_from_nothing():
    y = rng(25).normal(size=(2, 5))
    y = (y - y.mean(1, keepdims=True)) / y.std(1, ddof=1, keepdims=True)
    assert judged(y[0], y[1] + 0.02, margin=0.03)[0].more_seeds is None


# ---- verdicts ----

def test_each_verdict():
    """Spread 1, six seeds a variant and nine of plain: by size of the difference alone."""
    y = [rng(26, i).normal(size=size) for i, size in enumerate((9, *[6] * 4))]
    y = [(each - each.mean()) / each.std(ddof=1) for each in y]
    variants = [each + gap for each, gap in zip(y[1:], (-4, 4, 0.1, 1.2))]
    rows = judged(y[0], *variants, margin=0.01)
    assert [c.verdict for c in rows] == ["better", "worse", "undecided", "undecided"]
    wide = judged(y[0], *variants, margin=1.9)
    assert [c.verdict for c in wide] == ["better", "worse", "same", "undecided"]
    assert [c.verdict for c in judged(y[0], *variants, margin=0.01, higher_is_better=True)] == [
        "worse", "better", "undecided", "undecided"]
    for c in rows:
        assert (c.n, c.n_baseline) == (6, 9) and (c.more_seeds or 7) > 6
        assert c.low < c.mean < c.high and c.p <= c.p_corrected
        assert (c.p <= 0.05) == (not c.low <= 0 <= c.high)


def test_a_difference_that_is_real_and_within_the_margin_is_called_by_its_sign():
    y = rng(27).normal(size=(2, 400))
    got, = judged(y[0], y[1] + 0.5, margin=1.0)
    assert got.p_same <= 0.05 and got.verdict == "worse"


def test_both_tests_of_all_comparisons_are_one_family():
    plain, variants = next(studies(6, 9, 5, 1, (-0.9, 0.8, 0, 0.4, 1.2)))
    rows = judged(plain, *variants, margin=1.5)
    own = [*(c.p for c in rows), *(p_same(welch(variant, plain), 1.5) for variant in variants)]
    assert np.allclose([*(c.p_corrected for c in rows), *(c.p_same for c in rows)],
                       slow_holm(own, most_true=5))


def test_verdicts_depend_on_neither_order_nor_level_nor_unit():
    plain, variants = next(studies(5, 9, 6, 1, (0, 1.5, 0, 0, 0, 0)))
    rows = judged(plain, *variants)
    backwards = judged(plain[::-1], *(variant[::-1] for variant in variants[::-1]))[::-1]
    assert np.allclose([c[:10] for c in backwards], [c[:10] for c in rows])
    moved = judged(0.006 * plain + 2.4, *(0.006 * variants + 2.4), margin=0.006 * 0.01)
    assert np.allclose([c.p_corrected for c in moved], [c.p_corrected for c in rows])
    assert np.allclose([c.low for c in moved], [0.006 * c.low for c in rows])


def test_a_variant_without_runs_counts_and_makes_no_other_look_better():
    plain, (variant,) = next(studies(5, 5, 1, 1))
    alone, = judged(plain, variant)
    with_it, missing = judged(plain, variant, [])
    assert with_it.p_corrected == pytest.approx(min(1, 2 * alone.p)) and missing.verdict == "undecided"
    assert judge([], []) == [] and missing.n == 0


@pytest.mark.slow
@pytest.mark.parametrize("n, m", ((2, 1), (2, 8), (3, 30)))
def test_nothing_overflows_at_the_fewest_seeds(n, m):
    """Warnings are errors here; one variant has 1000 times the spread."""
    for plain, variants in studies(n, 2 * n, m, 40):
        variants[0] *= 1000
        assert all(0 <= c.p <= c.p_corrected <= 1 for c in judged(plain, *variants))


# ---- many comparisons ----

def slow_holm(p, most_true=10**9):
    """Step down: the smallest p times m, the next times m - 1; none below the one before, none above 1."""
    adjusted, before = [0.0] * len(p), 0.0
    for step, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        factor = min(most_true, len(p) - step)  # how many that are left can be true
        before = adjusted[i] = max(before, min(1.0, p[i] * factor))
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_interval_over_text_holds_the_truth_as_often_as_it_says():
    assert 0.90 <= coverage(block=32) <= 0.98  # 31 blocks of 32 windows and one of 8
    assert 0.92 <= coverage(block=1, phi=0) <= 0.98


@pytest.mark.slow
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


# ---- in words ----

BETTER = Comparison(5, 14, -0.0123, -0.0145, -0.0101, 0.001, 30.0, 1e-4, 0.004, 1.0, "better", None)


@pytest.mark.parametrize("change, sentence", (
    ({}, "better by 0.0123 bits/byte (95 % interval 0.0101 to 0.0145, corrected p = 0.004)"),
    (dict(mean=0.0123, low=0.0101, high=0.0145, verdict="worse", p_corrected=3e-6),
     "worse by 0.0123 bits/byte (95 % interval 0.0101 to 0.0145, corrected p < 0.0001)"),
    (dict(mean=0.0011, low=-0.003, high=0.0052, verdict="same", p_corrected=1.0, p_same=0.03),
     "the same within 0.01 bits/byte: +0.0011 bits/byte (95 % interval -0.0030 to +0.0052, corrected "
     "p = 0.03 of more)"),
    (dict(verdict="undecided", p_corrected=0.0812, more_seeds=9),
     "undecided: -0.0123 bits/byte (95 % interval -0.0145 to -0.0101, corrected p = 0.0812); about 9 seeds, "
     "now 5, would probably decide"),
    (dict(mean=0.0011, low=-0.003, high=0.0052, verdict="undecided", p_corrected=1.0),
     "undecided: +0.0011 bits/byte (95 % interval -0.0030 to +0.0052, corrected p = 1); more than 1000 "
     "seeds, now 5, would probably decide"),
    (dict(n=1, low=-math.inf, high=math.inf, se=math.inf, verdict="undecided"),
     "undecided: 1 and 14 seeds are too few, each side needs two or more"),
    (dict(n=1, n_baseline=1, low=-math.inf, high=math.inf, se=math.inf, verdict="undecided"),
     "undecided: 1 and 1 seed are too few, each side needs two or more"),
    (dict(low=-math.inf, high=math.inf, se=math.inf, verdict="undecided"),
     "undecided: 5 and 14 seeds do not show the spread of these scores"),
    (dict(mean=0.0, low=0.0, high=0.0, se=0.0, df=math.inf, verdict="identical"),
     "identical: nothing acted, the scores are those of the other side on every shared seed"),
), ids=("better", "worse", "same", "p-too-large", "undecided", "one-seed", "one-each", "no-spread",
        "identical"))
def test_a_verdict_reads_as_it_should(change, sentence):
    assert in_words(BETTER._replace(**change), 0.05, 0.01) == sentence


def test_words_are_at_the_level_margin_and_unit_that_were_asked_for():
    assert "(99 % interval" in in_words(BETTER, alpha=0.01)
    assert "by 0.0123 nats (" in in_words(BETTER, unit="nats")
    assert "within 0.002 bits/byte" in in_words(BETTER._replace(verdict="same"), margin=0.002)
    plain, variants = next(studies(4, 9, 3, 1, (2, 0, 0)))
    p = judged(plain, *variants)[0].p_corrected
    assert judged(plain, *variants, alpha=p * 1.01)[0].verdict == "worse"
    assert judged(plain, *variants, alpha=p * 0.99)[0].verdict != "worse"


def test_identical_scores_are_no_finding_and_take_nothing_of_the_familys_error():
    tested = [difference([(1, [2.0, 2.1, 2.05 + k]), (-1, [2.2, 2.25, 2.21, 2.3])]) for k in (0, 0.04, 1)]
    alone = judge(tested, 3 * [(3, 4)])
    first, *rest, last = judge([stats.IDENTICAL, *tested, stats.IDENTICAL], 5 * [(3, 4)])
    assert rest == alone and alone[0].p_corrected > 2 * alone[0].p  # of three comparisons, not of five
    for got in (first, last):
        assert (got.verdict, got.mean, got.low, got.high, got.n) == ("identical", 0, 0, 0, 3)
        assert math.isnan(got.p_corrected) and math.isnan(got.p_same) and got.more_seeds is None
    assert [c.verdict for c in judge(2 * [stats.IDENTICAL], 2 * [(3, 4)])] == 2 * ["identical"]
    assert isinstance(stats.IDENTICAL, Difference)
