"""Verdicts: each number against another way to it, each rate by simulation, and controls that break it."""
import math
from itertools import product

import numpy as np
import pytest
from scipy import stats as scipy_stats
from scipy.signal import lfilter

from study.stats import Paired, block_bootstrap, detectable, holm, in_words, paired, verdict

pytestmark = pytest.mark.filterwarnings("error")  # a division by zero is a warning in numpy


def rng(*seed):
    return np.random.default_rng(seed)


def within(count, trials, rate, sigmas=4):
    """Whether a count is one that a true rate gives, but for one case in 10,000."""
    return abs(count - trials * rate) <= sigmas * math.sqrt(trials * rate * (1 - rate))


def p_values(differences):
    """The p of paired(), [...], of differences [..., n_seeds], all at once."""
    return scipy_stats.ttest_1samp(differences, 0, axis=-1).pvalue


# ---- one comparison ----

@pytest.mark.parametrize("n", (2, 3, 5, 40))
@pytest.mark.parametrize("level", (0.8, 0.95, 0.999))
def test_paired_is_the_paired_t_test_of_scipy(n, level):
    variant, baseline = rng(0, n).normal(1, 0.01, (2, n))
    got, want = paired(variant - baseline, level), scipy_stats.ttest_rel(variant, baseline)
    interval = want.confidence_interval(level)
    assert np.allclose(got, (n, np.mean(variant - baseline),
                             interval.low, interval.high, np.std(variant - baseline, ddof=1),
                             want.pvalue), rtol=1e-9)


def test_paired_by_hand():
    # mean 3, squares 4 + 1 + 0 + 1 + 4 = 10, sd sqrt(10 / 4), error sqrt(1 / 2)
    # the table says 2.776 at 4 degrees and 97.5 %
    got = paired([1, 2, 3, 4, 5])
    assert got.mean == 3 and got.sd == math.sqrt(2.5)
    assert got.low == pytest.approx(3 - 2.776 * math.sqrt(0.5), abs=5e-4)
    assert got.high == pytest.approx(3 + 2.776 * math.sqrt(0.5), abs=5e-4)
    # t / sqrt(df), in the closed form of the distribution of t at 4 degrees
    u = got.mean / math.sqrt(0.5) / 2
    assert got.p == pytest.approx(1 - (u / math.sqrt(1 + u * u)) * (1 + 0.5 / (1 + u * u)))


def test_one_seed_shows_nothing():
    assert paired([-0.5])._replace(sd=0) == Paired(1, -0.5, -math.inf,
                                                   math.inf, 0, 1.0) and math.isnan(paired([-0.5]).sd)
    none = paired([])
    assert none.n == 0 and math.isnan(none.mean) and none.p == 1 and (none.low,
                                                                      none.high) == (-math.inf, math.inf)


@pytest.mark.parametrize("n", (2, 3, 7))
def test_differences_without_spread_do_not_divide_by_zero(n):
    assert paired([0.0] * n) == Paired(n, 0, 0, 0, 0, 1)
    assert paired([0.1] * n) == Paired(n, 0.1, 0.1, 0.1, 0, 0)


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_a_diverged_run_is_refused(bad):
    with pytest.raises(ValueError, match="difference 1 of 3 is not a finite number"):
        paired([0.1, bad, 0.2])


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


# ---- how often a verdict is wrong: two models that are the same ----

def test_five_seeds_of_the_same_model_differ_in_one_comparison_of_twenty():
    trials = 2000
    seen = dict.fromkeys(("better", "worse", "no difference shown"), 0)
    for d in rng(4).normal(0, 0.01, (trials, 5)):
        result = paired(d)
        seen[verdict(result, holm([result.p])[0])] += 1
    assert within(trials - seen["no difference shown"], trials, 0.05), seen
    assert within(seen["better"], trials, 0.025) and within(seen["worse"], trials, 0.025), seen


def families(shared, trials=2000, m=28, seeds=5):
    """Differences [trials, m, seeds] of m variants that are the baseline; shared: one baseline for all."""
    r = rng(5, shared)
    return r.normal(1, 0.01, (trials, m, seeds)) - r.normal(1, 0.01, (trials, 1 if shared else m, seeds))


@pytest.mark.parametrize("shared", (False, True), ids=("own-baseline", "shared-baseline"))
def test_twenty_eight_comparisons_together_are_wrong_in_one_family_of_twenty(shared):
    differences = families(shared)
    p, trials = p_values(differences), len(differences)
    wrong = sum((holm(row) <= 0.05).any() for row in p)
    assert wrong <= trials * 0.05 or within(wrong, trials, 0.05), wrong
    assert wrong > 0  # control: the simulation can be wrong at all
    uncorrected = (p <= 0.05).any(1).mean()  # negative control
    assert uncorrected > (0.4 if shared else 0.7), uncorrected
    for d, row in zip(differences[:20], p[:20]):  # and these p are the ones of paired()
        assert np.allclose([paired(each).p for each in d], row, rtol=1e-9)


def test_a_sign_test_of_five_seeds_could_show_nothing():
    smallest = min(scipy_stats.binomtest(k, 5).pvalue for k in range(6))
    # ranks do no better: hence the t-test
    assert smallest == 0.0625 == scipy_stats.wilcoxon([1, 2, 3, 4, 5]).pvalue
    assert paired([-1.0, -1.1, -0.9, -1.2, -0.8]).p < 0.001


# ---- how often a difference is found ----

def test_a_difference_of_three_sd_at_five_seeds_is_found():
    seen = []
    for d in rng(6).normal(-0.03, 0.01, (500, 5)):
        result = paired(d)
        seen.append(verdict(result, result.p))
    assert seen.count("better") >= 0.95 * len(seen) and "worse" not in seen


@pytest.mark.parametrize("m", (1, 28))
@pytest.mark.parametrize("n", (2, 3, 5, 20))
def test_the_detectable_difference_is_found_four_times_in_five(n, m):
    sd, trials = 0.004, 20000
    smallest = detectable(sd, n, 0.05 / m)
    p = p_values(rng(7, n, m).normal(smallest, sd, (trials, n)))
    assert within((p <= 0.05 / m).sum(), trials, 0.8), (p <= 0.05 / m).mean()
    halved = p_values(rng(8, n, m).normal(smallest / 2, sd, (trials, n)))
    assert (halved <= 0.05 / m).mean() < 0.6  # control


@pytest.mark.parametrize("n, alpha, power",
                         ((5, 0.05, 0.8), (3, 0.05, 0.8), (10, 0.05 / 28, 0.8), (8, 0.01, 0.95),
                                             (30, 0.05, 0.5)))
def test_the_detectable_difference_has_its_power_under_the_noncentral_t(n, alpha, power):
    critical, shift = scipy_stats.t.isf(alpha / 2, n - 1), detectable(1.0, n, alpha, power) * math.sqrt(n)
    upper = 1 - scipy_stats.nct.cdf(critical, n - 1, shift)  # the other tail holds less than 1e-4 here
    assert upper == pytest.approx(power, abs=2e-4)


def test_detectable_at_its_edges():
    assert math.isnan(detectable(0.01, 1)) and math.isnan(detectable(math.nan, 0)) and detectable(0.0, 5) == 0
    assert detectable(0.02, 5) == pytest.approx(2 * detectable(0.01, 5))
    assert detectable(1, 2, 1e-6) > detectable(1, 2,
                                               1e-3) > detectable(1, 3, 1e-3) > detectable(1, 1000, 1e-3) > 0


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
    """How often the interval of blocks holds the true difference of texts whose neighbours are alike."""
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


# ---- in words ----

BETTER, WORSE = Paired(5, -0.0123, -0.0145, -0.0101, 0.0018,
                       0.0001), Paired(5, 0.0123, 0.0101, 0.0145, 0.0018, 0.0001)
UNCLEAR = Paired(5, 0.0011, -0.0030, 0.0052, 0.0033, 0.49)


@pytest.mark.parametrize("result, p, smallest, short, sentence", (
    (BETTER, 0.004, 0.003, "better",
     "better by 0.0123 bits/byte (95 % interval 0.0101 to 0.0145, corrected p = 0.004)"),
    (WORSE, 3e-6, 0.003, "worse",
     "worse by 0.0123 bits/byte (95 % interval 0.0101 to 0.0145, corrected p < 0.0001)"),
    (UNCLEAR, 1.0, 0.008, "no difference shown",
     "no difference shown at this budget: +0.0011 bits/byte (interval -0.0030 to "
     "+0.0052, corrected p = 1); a difference of 0.0080 would have been found four times in five"),
    (BETTER, 0.0501, 0.02, "no difference shown",
     "no difference shown at this budget: -0.0123 bits/byte (interval -0.0145 to "
     "-0.0101, corrected p = 0.0501); a difference of 0.0200 would have been found four times in five"),
    (paired([-0.3]), 1.0, math.nan, "no difference shown", "only one seed: no verdict"),
    (paired([]), math.nan, math.nan, "no difference shown", "no pair of runs: no verdict"),
    (paired([0.0] * 5), 1.0, 0.0, "no difference shown", "identical: the same numbers on every seed"),
    (paired([-0.25] * 5), 0.0, 0.0, "better",
     "better by 0.2500 bits/byte, exactly so on every seed: does the seed change anything?"),
), ids=("better", "worse", "unclear", "lost-in-correction", "one-seed", "no-seed", "identical", "no-spread"))
def test_a_verdict_reads_as_it_should(result, p, smallest, short, sentence):
    assert verdict(result, p) == short
    assert in_words(result, p, smallest) == sentence


def test_a_verdict_is_at_the_alpha_that_was_asked_for():
    assert [verdict(BETTER, 0.03, alpha) for alpha in (0.05, 0.03, 0.01)] == ["better",
                                                                              "better", "no difference shown"]
    assert verdict(BETTER, math.nan) == "no difference shown"
    assert "(99 % interval" in in_words(BETTER, 0.001, 0.0, alpha=0.01)
