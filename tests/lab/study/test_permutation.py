"""Permutation tests of a difference of means, for scores that are nearly all or nothing."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import permutation_test

from lab.study import permutation
from lab.study.permutation import interval, judge, p_of, p_same, smallest_p


def by_hand(scores, baseline, shift=0.0, side=0):
    """p, with one loop over all ways of choosing which scores are the variant's."""
    values = [*(score - shift for score in scores), *baseline]
    n, places = len(scores), range(len(scores) + len(baseline))

    def difference(chosen):
        others = [values[i] for i in places if i not in chosen]
        return sum(values[i] for i in chosen) / n - sum(others) / len(others)

    seen, hits, ways = difference(tuple(range(n))), 0, 0
    for chosen in itertools.combinations(places, n):
        d = difference(chosen)
        at_least = abs(d) >= abs(seen) if side == 0 else side * d >= side * seen
        near = abs(abs(d) - abs(seen)) < 1e-12 if side == 0 else abs(d - seen) < 1e-12
        hits, ways = hits + (at_least or near), ways + 1
    return hits / ways


@pytest.mark.parametrize("n, m", [(1, 1), (1, 4), (3, 2), (4, 4), (3, 6)])
@pytest.mark.parametrize("side", [-1, 0, 1])
def test_p_is_that_of_all_divisions_by_hand(n, m, side):
    rng = np.random.default_rng(n * 10 + m)
    for values in (rng.random(n + m), rng.choice([0.3, 1.0], n + m), np.full(n + m, 0.5)):
        scores, baseline = values[:n], values[n:]
        for shift in (0.0, 0.05, -0.05):
            expected = by_hand(scores, baseline, shift, side)
            assert p_of(scores, baseline, shift, side) == pytest.approx(expected)


@pytest.mark.parametrize("alternative, side", [("two-sided", 0), ("less", -1), ("greater", 1)])
def test_p_is_scipys(alternative, side):
    """Where both sides have as many scores: its two-sided p doubles the smaller of two one-sided ones."""
    rng = np.random.default_rng(1)
    scores, baseline = rng.random(5) + 0.3, rng.random(5)
    theirs = permutation_test((scores, baseline), lambda a, b: a.mean() - b.mean(), n_resamples=np.inf,
                              alternative=alternative)
    assert p_of(scores, baseline, side=side) == pytest.approx(theirs.pvalue)


def test_many_scores_are_divided_at_random_and_the_seen_division_counts(monkeypatch):
    rng = np.random.default_rng(2)
    scores, baseline = rng.random(6), rng.random(6) + 0.2
    exact = p_of(scores, baseline)
    monkeypatch.setattr(permutation, "MOST_EXACT", 900)  # of 924
    permutation.divisions.cache_clear()
    drawn = p_of(scores, baseline)
    assert drawn != exact and drawn == pytest.approx(exact, abs=0.05)
    assert p_of([1.0] * 6, [0.0] * 6) >= 1 / 901  # never 0
    permutation.divisions.cache_clear()


@pytest.mark.parametrize("n, m", [(3, 3), (3, 5), (4, 4)])
def test_the_smallest_p_is_that_of_sides_without_overlap(n, m):
    assert p_of(np.arange(n) + 10.0, np.arange(m)) == pytest.approx(smallest_p(n, m))


def test_the_interval_holds_the_shifts_that_are_not_refused():
    rng = np.random.default_rng(3)
    scores, baseline = rng.normal(0.7, 0.1, 6), rng.normal(0.5, 0.1, 7)
    low, high = interval(scores, baseline)
    assert low < scores.mean() - baseline.mean() < high
    for shift, inside in ((low + 0.005, True), (low - 0.005, False), (high - 0.005, True),
                          (high + 0.005, False)):
        assert (p_of(scores, baseline, shift) > 0.05) == inside


def test_verdicts():
    right, wrong, half = [1.0] * 5, [0.3] * 16, [0.3, 1.0, 1.0, 0.3, 1.0]
    plain = np.linspace(0.99, 1.0, 16)
    better, worse, same, undecided, none = judge(
        [(right, wrong), ([0.3] * 5, plain), ([0.995] * 5, plain), (half, wrong[:3] + [1.0] * 3),
         ([], plain)])
    assert (better.verdict, worse.verdict, same.verdict) == ("better", "worse", "same")
    assert undecided.verdict == none.verdict == "undecided" and math.isnan(none.p)
    assert better.mean == pytest.approx(0.7) and better.low > 0.5
    # of two at the margin neither is the same
    assert p_same([0.5] * 5, [0.55] * 16, 0.05) == 1.0
    assert judge([([0.5] * 5, [0.55] * 16)])[0].verdict == "worse"  # every score of five below every other


def test_five_seeds_against_ten_show_nothing_in_a_study_of_320_comparisons():
    """Why a study of tasks has more seeds of the plain GPT: not even sides without overlap would be shown."""
    m = 320
    apart = ([1.0] * 5, [0.3] * 10)
    others = [([0.3, 1.0, 0.3, 1.0, 0.3], [0.3, 1.0] * 5)] * (m - 1)
    assert smallest_p(5, 10) * m > 0.05 and judge([apart, *others])[0].verdict == "undecided"
    assert smallest_p(5, 16) * m < 0.05


BIMODAL = [0.3, 1.0]


def wrong_verdicts(of_variant, of_plain, studies, k, n, m, margin=0.05):
    """Shares of simulated studies of k variants in which any is called better or worse, or any the same."""
    rng, differ, same = np.random.default_rng(4), 0, 0
    for _ in range(studies):
        plain = of_plain(rng, m)
        verdicts = {row.verdict for row in judge([(of_variant(rng, n), plain) for _ in range(k)],
                                                 margin=margin)}
        differ += bool(verdicts & {"better", "worse"})
        same += "same" in verdicts
    return differ / studies, same / studies


@pytest.mark.parametrize("draw", [
    lambda rng, n: rng.choice(BIMODAL, n), lambda rng, n: rng.normal(0.6, 0.1, n),
    lambda rng, n: rng.choice(BIMODAL, n, p=[0.9, 0.1])])
def test_of_variants_that_do_nothing_at_most_one_study_in_twenty_has_a_verdict(draw, monkeypatch):
    monkeypatch.setattr(permutation, "interval", lambda *_: (0.0, 0.0))  # no part of a verdict, and slow
    differ, _ = wrong_verdicts(draw, draw, studies=200, k=6, n=4, m=8)
    assert differ <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 200)


def test_of_variants_that_differ_by_the_margin_few_are_called_the_same(monkeypatch):
    monkeypatch.setattr(permutation, "interval", lambda *_: (0.0, 0.0))

    def more(rng, n):
        return rng.normal(0.65, 0.02, n)

    def less(rng, n):
        return rng.normal(0.6, 0.02, n)

    _, same = wrong_verdicts(more, less, studies=200, k=6, n=4, m=8)
    assert same <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 200)
    # which is no wonder of a test that never says it: where the margin is wider many are
    _, wider = wrong_verdicts(more, less, studies=50, k=6, n=4, m=8, margin=0.1)
    assert wider > 0.2


def test_sides_of_one_mean_and_unlike_spreads_are_called_different_too_often(monkeypatch):
    """No permutation of five seeds can know that they agree by luck, and the page says so."""
    monkeypatch.setattr(permutation, "interval", lambda *_: (0.0, 0.0))
    differ, _ = wrong_verdicts(lambda rng, n: rng.choice(BIMODAL, n),
                               lambda rng, n: rng.normal(0.65, 0.01, n), studies=40, k=10, n=5, m=10)
    assert differ > 0.2
