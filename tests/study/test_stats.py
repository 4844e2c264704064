"""The tests beside scipy's, beside slow references of their own, and by simulated studies."""
import itertools
import math

import numpy as np
import pytest
from scipy.stats import permutation_test, ttest_1samp, ttest_ind

from study import stats
from study.records import PLAIN, Failure, Pair, Result, Run, Study, Variant
from study.verdicts import compare_with_target, comparisons_by_text, comparisons_of

SIZES = [(2, 2), (3, 16), (5, 5), (8, 32), (15, 15), (2, 40)]


def scores(seed, *sizes, spread=0.006):
    """Scores of so many seeds a side, around means that differ by a little."""
    rng = np.random.default_rng(seed)
    return [(2.0 + rng.normal(0, 0.01) + spread * (1 + i) * rng.standard_normal(n)).tolist()
            for i, n in enumerate(sizes)]


# ---- one difference ----

@pytest.mark.parametrize("sizes", SIZES)
def test_a_difference_is_welchs(sizes):
    """With degrees of freedom that are never above those of equal spreads."""
    own, baseline = scores(7, *sizes)
    found, (n, m) = stats.welch([own], [baseline], 0.05, 0.01), sizes
    scipys = ttest_ind(own, baseline, equal_var=False)
    capped = min(scipys.df, (1 / n + 1 / m) ** 2 / (1 / n ** 2 / (n - 1) + 1 / m ** 2 / (m - 1)))
    assert found.mean == pytest.approx(np.mean(own) - np.mean(baseline))
    assert found.df == pytest.approx(capped)
    if found.df == pytest.approx(scipys.df):
        interval = scipys.confidence_interval()
        assert (found.p, found.low, found.high) == pytest.approx((scipys.pvalue, *interval))
    else:
        assert found.p > scipys.pvalue, "fewer degrees of freedom never make a difference more certain"


def test_as_many_seeds_on_both_sides_are_welchs_own():
    for seed in range(50):
        own, baseline = scores(seed, 6, 6, spread=0.05)
        assert stats.welch([own], [baseline], 0.05, 0.01).p == pytest.approx(
            ttest_ind(own, baseline, equal_var=False).pvalue)


def test_same_is_two_one_sided_tests():
    own, baseline = scores(3, 9, 9)
    found = stats.welch([own], [baseline], 0.05, 0.01)
    shifted = [ttest_ind(own, np.add(baseline, by), equal_var=False, alternative=side).pvalue
               for by, side in ((0.01, "less"), (-0.01, "greater"))]
    assert found.p_same == pytest.approx(max(shifted))


def test_over_several_texts_errors_add_in_squares():
    texts = [scores(seed, 5, 8) for seed in (1, 2, 3)]
    found = stats.welch([own for own, _ in texts], [baseline for _, baseline in texts], 0.05, 0.01)
    alone = [stats.welch([own], [baseline], 0.05, 0.01) for own, baseline in texts]
    assert found.mean == pytest.approx(np.mean([each.mean for each in alone]))
    assert found.se == pytest.approx(math.sqrt(sum(each.se ** 2 for each in alone)) / 3)


@pytest.mark.parametrize("own, baseline", [([], [1.0, 2.0]), ([1.0], [1.0, 2.0]), ([3.0, 3.0], [3.0, 3.0])])
def test_without_a_spread_there_is_no_test(own, baseline):
    found = stats.welch([own], [baseline], 0.05, 0.01)
    assert math.isnan(found.p) and math.isnan(found.p_same) and found.low == -math.inf


def test_a_mean_beyond_a_target_is_a_one_sided_t_test():
    (own,) = scores(5, 7)
    for above, side in ((False, "less"), (True, "greater")):
        assert stats.p_beyond_target(own, 2.0, above) == pytest.approx(
            ttest_1samp(own, 2.0, alternative=side).pvalue)


def test_seeds_to_decide_are_enough_four_times_in_five():
    """By simulation, of a difference that is exactly what was seen."""
    rng = np.random.default_rng(0)
    seen = stats.of_parts([(1, [0.0, 0.01, 0.02, 0.0, 0.01]), (-1, [0.012, 0.022, 0.03, 0.014, 0.02])])
    n = stats.seeds_to_decide(seen, 5, 0.05, 0.001, 1)
    sd = seen.se / math.sqrt(2 / 5)
    found = [ttest_ind(seen.mean + sd * rng.standard_normal(n), sd * rng.standard_normal(n)).pvalue < 0.05
             for _ in range(1000)]
    assert 0.75 < np.mean(found) < 0.9 and n > 5


# ---- permutations ----

@pytest.mark.parametrize("n, m", [(3, 4), (5, 10), (4, 4)])
def test_permutations_are_scipys(n, m):
    rng = np.random.default_rng(n)
    own, baseline = rng.choice([0.02, 0.5, 1.0], n).tolist(), rng.choice([0.02, 1.0], m).tolist()

    def difference(x, y, axis):
        return np.mean(x, axis=axis) - np.mean(y, axis=axis)

    for side, alternative in ((1, "greater"), (-1, "less")):
        assert stats.p_of_shift(own, baseline, side=side) == pytest.approx(permutation_test(
            (own, baseline), difference, vectorized=True, n_resamples=np.inf, alternative=alternative).pvalue)
    ways = [np.mean(np.take(own + baseline, chosen)) - np.mean(np.delete(own + baseline, chosen))
            for chosen in itertools.combinations(range(n + m), n)]
    seen = np.mean(own) - np.mean(baseline)
    assert stats.p_of_shift(own, baseline) == pytest.approx(np.mean(np.abs(ways) >= abs(seen) - 1e-9))
    found = stats.permutation([own], [baseline], 0.05, 0.05)
    assert found.low <= found.mean <= found.high and found.p >= stats.smallest_p(n, m) - 1e-12


# ---- many comparisons ----

def slow_holm(p_values, most_true):
    """Step by step, as Holm 1979 writes it, with Shaffer's number of hypotheses that can still be true."""
    order, worst, adjusted = sorted(range(len(p_values)), key=lambda i: p_values[i]), 0.0, {}
    for step, i in enumerate(order):
        worst = max(worst, min(1.0, p_values[i] * min(len(p_values) - step, most_true)))
        adjusted[i] = worst
    return [adjusted[i] for i in range(len(p_values))]


def test_holm_is_the_written_procedure():
    rng = np.random.default_rng(1)
    for n in (1, 2, 5, 12):
        p = rng.random(n).tolist()
        for most_true in (n, (n + 1) // 2):
            assert stats.holm(p, most_true) == pytest.approx(slow_holm(p, most_true))


def test_a_comparison_that_failed_does_not_help_the_others():
    whole = stats.holm([0.01, 0.02, 0.03])
    lacking = stats.holm([0.01, 0.02, math.nan])
    assert math.isnan(lacking[2]) and lacking[0] == whole[0] and lacking[1] >= 0.02 * 2


# ---- whole studies ----

def study_of(by_variant, **keys):
    """A Study of {variant: scores, or {text: scores}}; the first is the baseline; None: the run failed."""
    runs, results, failures = [], {}, {}
    for name, by_text in by_variant.items():
        for text, own in (by_text if isinstance(by_text, dict) else {"a text": by_text}).items():
            for seed, score in enumerate(own):
                run = Run("judge", name, text, seed, dict(variant=name, text=text, seed=seed))
                runs.append(run)
                if score is None:
                    failures[run.name] = Failure("diverged")
                else:
                    results[run.name] = Result(score)
    texts = tuple(dict.fromkeys(run.text for run in runs))
    keys = dict(measure="bits/byte", pairs=tuple(Pair(name, PLAIN, texts) for name in by_variant
                                                 if name != PLAIN), **keys)
    variants = tuple(Variant(name, "plain" if name == PLAIN else "variant", tokens=1.0)
                     for name in by_variant)
    return Study(name="a study", variants=variants, texts=texts, runs=tuple(runs), results=results,
                 failures=failures, **keys)


def test_the_words_of_verdicts():
    clear, close = np.linspace(-0.004, 0.004, 8), np.linspace(-0.001, 0.001, 8)
    found = {c.variant: c for c in comparisons_of(study_of({
        PLAIN: 2 + close, "better": 1.9 + clear, "worse": 2.1 + clear, "same": 2.0001 + close[::-1],
        "identical": 2 + close, "undecided": [1.9, 2.1]}))}
    assert {name: c.verdict for name, c in found.items()} == {name: name for name in found}
    assert found["undecided"].seeds is None or found["undecided"].seeds > 2


def test_a_failed_run_withholds_the_verdict_that_it_might_change():
    rows = {PLAIN: [2.0, 2.001, 2.002, 1.999], "gains": [1.9, 1.901, 1.902, None],
            "loses": [2.1, 2.101, 2.099, None]}
    found = {c.variant: c for c in comparisons_of(study_of(rows))}
    assert (found["gains"].verdict, found["gains"].withheld) == ("undecided", "better")
    assert (found["loses"].verdict, found["loses"].withheld) == ("worse", "")
    rows[PLAIN].append(None)
    found = {c.variant: c for c in comparisons_of(study_of(rows))}
    assert found["loses"].withheld == "worse"


def test_texts_are_pooled_and_each_judged_alone():
    rng = np.random.default_rng(2)
    of_text = {"a": 0.0, "b": 1.0}
    study = study_of({name: {text: mean + at + 0.005 * rng.standard_normal(8) for text, at in of_text.items()}
                      for name, mean in ((PLAIN, 2.0), ("mine", 1.99))})
    (pooled,), alone = comparisons_of(study), comparisons_by_text(study)
    assert pooled.texts == ("a", "b") and [*alone] == ["a", "b"]
    assert pooled.mean == pytest.approx(np.mean([rows[0].mean for rows in alone.values()]))


def test_right_answers_are_judged_by_permutation_and_never_identical():
    study = study_of({PLAIN: [0.1] * 10, "learns": [1.0] * 8, "guesses": [0.1] * 8}, margin=0.05)
    study = Study(**{**study.__dict__, "measure": "right answers"})
    found = {c.variant: c.verdict for c in comparisons_of(study)}
    assert found == {"learns": "better", "guesses": "same"}


def test_targets_are_corrected_together():
    rng = np.random.default_rng(4)
    rows = {name: 3.27 + shift + 0.002 * rng.standard_normal(6)
            for name, shift in ((PLAIN, 0.02), ("near", 0.009), ("below", -0.01))}
    study = study_of({**rows, "failed": [*rows["below"], None]}, target=3.28)
    study = Study(**{**study.__dict__, "measure": "score"})
    found = {each.variant: each for each in compare_with_target(study)}
    p = {name: ttest_1samp(own, 3.28, alternative="less").pvalue
         for name, own in {**rows, "failed": rows["below"]}.items()}
    held = dict(zip(p, slow_holm([*p.values()], len(p))))
    assert {name: each.p_corrected for name, each in found.items()} == pytest.approx(held)
    assert [name for name, each in found.items() if each.beyond] == ["below"]


def wrong_in(rng, differences, n, m, margin):
    """Whether a simulated study has a wrong verdict; spreads differ by up to a factor of two."""
    spreads = np.exp(rng.uniform(-0.35, 0.35, len(differences) + 1)) * 0.006
    rows = {PLAIN: 2 + spreads[0] * rng.standard_normal(m)}
    for i, (difference, spread) in enumerate(zip(differences, spreads[1:])):
        rows[f"v{i}"] = 2 + difference + spread * rng.standard_normal(n)
    true = {f"v{i}": difference for i, difference in enumerate(differences)}
    for c in comparisons_of(study_of(rows, margin=margin)):
        difference = true[c.variant]
        if c.verdict == "better" and difference >= 0 or c.verdict == "worse" and difference <= 0:
            return True
        if c.verdict == "same" and abs(difference) >= margin:
            return True
    return False


@pytest.mark.parametrize("differences, n, m", [
    ([0.0] * 8, 5, 14), ([0.0], 5, 5), ([0.0] * 8, 3, 8), ([0.0, 0.01] * 4, 8, 24), ([0.01] * 2, 20, 28)])
def test_at_most_one_study_in_twenty_is_wrong(differences, n, m):
    """200 studies: at 5 % the standard error is 1.5 points, so 9 % would be more than two of them above."""
    rng = np.random.default_rng(len(differences) + n)
    assert np.mean([wrong_in(rng, differences, n, m, 0.01) for _ in range(200)]) < 0.09


def test_welchs_own_degrees_of_freedom_would_be_wrong_more_often():
    """A control: with 3 seeds against 16 and 30 comparisons, the cap is what holds the error."""
    def wrong(cap):
        rng, count = np.random.default_rng(9), 0
        for _ in range(100):
            base = rng.standard_normal(16)
            p = []
            for _ in range(30):
                own = rng.standard_normal(3)
                p.append(stats.welch([own], [base], 0.05, 0.5).p if cap
                         else ttest_ind(own, base, equal_var=False).pvalue)
            count += min(stats.holm(p)) < 0.05
        return count / 100
    assert wrong(cap=True) < 0.05 and wrong(cap=False) > 0.12
