"""Bits/byte as compute: fits against slow least squares, intervals by simulation, controls that fail."""
import json
import math
import warnings

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import t

from nanoheads.common import UserError
from nanoheads.study import compute
from nanoheads.study.compute import Curve, Worth, at_equal_cost, ladder, margin_as_compute, minus_plain, worth

BUDGETS = {0.7: 4, 1.0: 14, 1.4: 4, 2.0: 4}  # seeds of the plain GPT
SIZES = (98304, 331776, 983040)


@pytest.fixture(autouse=True)
def strict():
    with warnings.catch_warnings():  # a division by zero is a warning in numpy
        warnings.simplefilter("error")
        yield


def rng(*seed):
    return np.random.default_rng(seed)


def truth(multiple):
    """A power law, which the parabola only comes near to."""
    return 1.1 + np.asarray(multiple) ** -0.2


def plain_runs(r, sd=0.006, budgets=BUDGETS, truth=truth):
    return {m: list(truth(m) + r.normal(0, sd, n)) for m, n in budgets.items()}


def effect_of(r, plain, score, n=5, sd=0.006, welch=False):
    """(mean, se, df) of n runs of a variant with this true score against the plain runs at 1."""
    a, p = score + r.normal(0, sd, n), np.array(plain[1.0])
    df = n + len(p) - 2
    se = math.sqrt((((a - a.mean()) ** 2).sum() + ((p - p.mean()) ** 2).sum()) / df * (1 / n + 1 / len(p)))
    if welch:
        va, vp = a.var(ddof=1) / n, p.var(ddof=1) / len(p)
        se, df = math.sqrt(va + vp), (va + vp) ** 2 / (va ** 2 / (n - 1) + vp ** 2 / (len(p) - 1))
    return a.mean() - p.mean(), se, df


def exact(slope=-0.19, bend=0.03, multiples=(0.7, 1.0, 1.4, 2.0), n=3):
    """Plain runs on a parabola, with a spread that is the same at each budget."""
    spread = np.linspace(-0.004, 0.004, n)
    return {m: list(2.1 + slope * math.log(m) + bend * math.log(m) ** 2 + spread) for m in multiples}


# ---- the curve ----

@pytest.mark.parametrize("budgets", (BUDGETS, {0.7: 2, 1.0: 5, 1.4: 3}, {1.0: 3, 1.4: 6}))
def test_curve_is_least_squares_over_all_runs(budgets):
    plain = plain_runs(rng(1), budgets=budgets)
    terms = min(len(plain), 3)
    rows = [([1, math.log(m), math.log(m) ** 2][:terms], y) for m, scores in plain.items() for y in scores]
    x, y = np.array([row for row, _ in rows]), np.array([y for _, y in rows])
    coefficients = np.linalg.solve(x.T @ x, x.T @ y)
    spread = sum((s - np.mean(scores)) ** 2 for scores in plain.values() for s in scores)
    variance = spread / (len(y) - len(plain))
    curve = Curve(plain)
    for m in (1.0, 1.1, 1.37):
        at = np.array([1, math.log(m), math.log(m) ** 2][:terms])
        assert curve.value(m) == pytest.approx(at @ coefficients, rel=1e-9)
        assert curve.se(m) == pytest.approx(math.sqrt(variance * at @ np.linalg.inv(x.T @ x) @ at), rel=1e-7)
        assert curve.inverse(curve.value(m)) == pytest.approx(m)
    assert math.isnan(curve.value(2.1)) and math.isnan(curve.value(0.6)) and curve.inverse(9.0) is None
    unweighted = np.polyfit(np.log(list(plain)), [np.mean(s) for s in plain.values()], terms - 1)
    if len(plain) > terms:  # control: the number of seeds matters where the parabola misses the means
        assert abs(np.polyval(unweighted, 0.1) - curve.value(math.exp(0.1))) > 1e-6


def test_the_error_counts_the_shared_plain_mean_once():
    """Against the spread of the same figure over many simulated studies with known variance."""
    r, sd, m = rng(2), 0.006, 1.3
    figures = []
    for _ in range(4000):
        plain = plain_runs(r, sd)
        mean = truth(m) + r.normal(0, sd / math.sqrt(5)) - np.mean(plain[1.0])
        curve = Curve(plain)
        curve.variance = sd * sd
        se = sd * math.sqrt(1 / 5 + 1 / 14)
        figure, error, _ = minus_plain(curve, mean, se, math.inf, m)
        figures.append(figure)
    assert np.std(figures) == pytest.approx(error, rel=0.04)
    summed = math.sqrt(se ** 2 + curve.se(m) ** 2)  # control: the mean at 1 counted in both
    assert summed > 1.07 * error


# ---- worth ----

def coverage(m, trials=250, **how):
    """Shares: intervals that hold m, equal-cost intervals that hold 0, agreements with the t test at 1."""
    r, held, equal, agree = rng(3, int(100 * m)), 0, 0, 0
    for _ in range(trials):
        plain = plain_runs(r)
        curve, variant = Curve(plain), effect_of(r, plain, truth(m), **how)
        w, e = worth(curve, *variant), at_equal_cost(curve, *variant, m)
        low, high = w.low or 0, w.high or math.inf
        held += low <= m <= high
        equal += e.low <= 0 <= e.high
        assert (e.p >= 0.05) == (e.low <= 0 <= e.high)
        agree += (low <= 1 <= high) == (abs(variant[0]) <= t.isf(0.025, variant[2]) * variant[1])
    return held / trials, equal / trials, agree / trials


@pytest.mark.parametrize("m", (0.75, 1.0, 1.07, 1.8))
@pytest.mark.parametrize("how", ({}, dict(sd=0.018, welch=True)), ids=("pooled", "welch"))
def test_intervals_hold_the_truth_19_times_in_20(m, how):
    held, equal, agree = coverage(m, **how)
    assert 0.90 <= held <= 0.99 and 0.90 <= equal <= 0.99 and agree == 1, (held, equal, agree)


def test_an_interval_without_the_curves_error_is_too_narrow(monkeypatch):
    monkeypatch.setattr(compute, "minus_plain", lambda curve, mean, se, df, m: (
        mean - curve.value(m) + curve.value(1.0), 0.5 * se + 0 * np.asarray(m), df + 0 * np.asarray(m)))
    assert coverage(1.8)[0] < 0.85


def test_worth_by_hand():
    # a straight line of -0.1 a unit of log: 0.02 worse is exp(-0.2) of the compute, 0.03 better exp(0.3)
    curve = Curve(exact(-0.1, 0, n=1000))
    assert worth(curve, 0.02, 1e-9, 50).mean == pytest.approx(math.exp(-0.2), rel=1e-6)
    assert worth(curve, -0.03, 1e-9, 50).mean == pytest.approx(math.exp(0.3), rel=1e-6)
    w = worth(curve, 0.0, 0.004, math.inf)
    assert [w.low, w.high] == pytest.approx([math.exp(-0.0784), math.exp(0.0784)], rel=3e-3)
    assert margin_as_compute(curve, 0.01) == pytest.approx((math.exp(-0.1), math.exp(0.1)), rel=1e-6)
    assert at_equal_cost(curve, 0.02, 0.004, 50, math.exp(-0.2)).mean == pytest.approx(0, abs=1e-9)


def test_words():
    assert Worth(0.93, 0.88, 0.99, 0.7, 2.0).words() == \
        "worth 0.93 x [0.88, 0.99] of the plain GPT's training compute"
    curve = Curve(exact())
    less, more = worth(curve, 0.3, 0.001, 20), worth(curve, -0.3, 0.001, 20)
    assert less.mean is None and less.words() == "worth less than 0.7 x of the plain GPT's training compute"
    assert more.mean is None and more.words() == "worth more than 2 x of the plain GPT's training compute"
    open_below = worth(curve, 0.065, 0.01, 20)
    assert open_below.low is None and "[less than 0.7, 0." in open_below.words()
    reaching = worth(curve, 0.08, 0.005, 20)  # itself beyond, its interval not all
    assert reaching.mean is None and 0.7 < reaching.high < 0.75
    assert "worth less than 0.7 x [less than 0.7, 0.7" in reaching.words()


def test_a_worth_holds_1_where_the_difference_holds_0():
    """The difference's interval just reaches 0; beside 1 the two are told apart, farther off not."""
    curve = Curve({0.7: [2.134, 2.159], 1.0: [2.084, 2.069, 2.051], 1.4: [2.022, 2.013], 2.0: [1.955, 1.918]})
    half = 0.0162 * t.isf(0.025, 1)
    w = worth(curve, -0.9999 * half, 0.0162, 1)
    assert w.low <= 1 and w.high is None, w
    w = worth(curve, -1.001 * half, 0.0162, 1)  # control
    assert w.low > 1.1, w


def test_an_estimate_beyond_the_budgets_lies_in_its_own_interval():
    """Told apart at the near end, where the error is small, and not farther off."""
    curve = Curve({1.0: [2.05, 2.02], 1.4: [1.94, 2.06]})
    w = worth(curve, 0.148, 0.0517, 5)
    difference, error, df = minus_plain(curve, 0.148, 0.0517, 5, 1.0)
    assert difference > t.isf(0.025, df) * error and w.beyond == "less" and w.low is None, w
    assert w.words().startswith("worth less than 1 x [less than 1, 1.28]")


# ---- odd input ----

def test_a_variant_equal_to_plain_is_worth_1():
    w = worth(Curve(exact()), 0.0, 0.0, 8)
    assert (w.mean, w.low, w.high) == pytest.approx((1, 1, 1), abs=1e-9)
    e = at_equal_cost(Curve(exact()), 0.0, 0.0, 8, 1.0)
    assert e == (0, 0, 0, 1)


def test_two_budgets_make_a_line_and_worse_is_beyond():
    curve = Curve(exact(-0.1, 0, (1.0, 1.4)))
    assert worth(curve, -0.02, 0.001, 9).mean == pytest.approx(math.exp(0.2), rel=1e-3)
    assert worth(curve, 0.02, 0.001, 9).words().startswith("worth less than 1 x of")
    assert margin_as_compute(curve, 0.01)[0] is None
    assert at_equal_cost(curve, 0.0, 0.001, 9, 0.9) is None
    assert at_equal_cost(curve, 0.0, 0.001, 9, 1.5) is None


def test_one_seed_each_gives_a_number_and_no_interval():
    curve = Curve(exact(n=1))
    assert curve.se(1.2) == math.inf
    for se, df in ((0.002, 9), (math.nan, 0), (math.inf, 0)):
        w = worth(curve, 0.01, se, df)
        assert 0.9 < w.mean < 1 and (w.high is None or w.high < 1.01)
        assert "[less than 0.7" in w.words()
    one = at_equal_cost(curve, 0.01, 0.002, 9, 1.2)
    assert one.low is one.high is None and one.p == 1
    # at 1 x nothing of the curve is needed
    assert at_equal_cost(curve, 0.01, 0.002, 9, 1.0).p == pytest.approx(2 * t.sf(5, 9))


def test_a_plain_gpt_that_gets_no_better_is_said_so():
    for plain in (exact(+0.1, 0), exact(-0.05, 0.1)):
        w = worth(Curve(plain), 0.01, 0.002, 9)
        assert w.mean is None and w.words() == compute.NOT_FALLING
        assert margin_as_compute(Curve(plain), 0.01) == (None, None)
    sizes = {n: dict(plain=exact(0.1, 0), arms=dict(a=(0.01, 0.002, 9))) for n in SIZES}
    assert compute.NOT_FALLING in ladder(sizes, SIZES[2])["arms"]["a"]["sentence"]


@pytest.mark.parametrize("plain", ({1.0: [2.0]}, {0.7: [2.0], 1.4: [1.9]}, {0.0: [2.0], 1.0: [1.9]},
                                   {0.7: [], 1.0: [2.0]}, {0.7: [math.nan], 1.0: [2.0]}))
def test_a_curve_that_cannot_be_fitted_is_refused(plain):
    with pytest.raises(UserError, match="plain GPT"):
        Curve(plain)


def test_a_ladder_needs_two_sizes():
    size = dict(plain=exact(), arms={})
    for sizes, held_out in (({1: size}, None), ({1: size, 2: size}, 2), ({1: size, 2: size}, 3)):
        with pytest.raises(UserError, match="needed"):
            ladder(sizes, held_out)


# ---- over sizes ----

def at_size(n, multiple):
    return 0.9 + 1.2 * (n / SIZES[0]) ** -0.2 * np.asarray(multiple, float) ** -0.17


def sizes_of(r, log_worths=None, effects=None, sd=0.004, sizes=SIZES):
    """A study in which variants are worth exp(a + s log N), or have the effect a N^s in bits/byte."""
    result = {}
    for n in sizes:
        plain = plain_runs(r, sd, {0.7: 4, 1.0: 8, 1.4: 4}, lambda m: at_size(n, m))
        scores = {name: at_size(n, math.exp(a + s * math.log(n / SIZES[1])))
                  for name, (a, s) in (log_worths or {}).items()}
        for name, (a, s) in (effects or {}).items():
            scores[name] = at_size(n, 1) + a * (n / SIZES[1]) ** s
        result[n] = dict(plain=plain, arms={k: effect_of(r, plain, v, 4, sd) for k, v in scores.items()})
    return result


def test_ladder_holds_the_truth_19_times_in_20():
    variants = dict(win=(0.1, 0.04), bad=(-0.15, 0.05), null=(0.0, 0.0))
    r, seen, verdicts = rng(5), {"slope": [], "held out": [], "plain": []}, {name: [] for name in variants}
    for _ in range(60):
        result = ladder(sizes_of(r, variants), SIZES[2])
        for name, variant in result["arms"].items():
            seen["slope"].append(variant["slope"]["low"] <= variants[name][1] <= variant["slope"]["high"])
            seen["held out"].append(variant["held_out"]["inside"])
            verdicts[name].append(variant["verdict"])
        seen["plain"].append(result["plain"]["held_out"]["inside"])
    shares = {what: np.mean(held) for what, held in seen.items()}
    assert 0.89 <= shares["slope"] < 1 and 0.89 <= shares["held out"] < 1 and shares["plain"] > 0.95, shares
    # a loss that gets smaller shrinks; and power: most of the true trends are found
    assert set(verdicts["bad"]) <= {"the loss shrinks with size", "cannot be told"}
    assert verdicts["bad"].count("the loss shrinks with size") > 40
    assert verdicts["win"].count("the gain grows with size") > 25
    assert verdicts["null"].count("cannot be told") >= 53


def test_held_out_sizes_that_break_the_model_are_outside():
    """Control: the check can fail, in the worth, in the exponent and in the plain GPT's scores."""
    study = sizes_of(rng(6), dict(a=(0.1, 0.04), b=(-0.1, 0.04)), sd=0.001)
    broken = sizes_of(rng(6), dict(a=(-0.1, 0.0), b=(-0.1, 0.04)), sd=0.001)[SIZES[2]]
    broken["plain"] = {m: [y - 0.1 for y in scores] for m, scores in broken["plain"].items()}
    good, bad = ladder(study, SIZES[2]), ladder({**study, SIZES[2]: broken}, SIZES[2])
    assert good["arms"]["a"]["held_out"]["inside"] and not bad["arms"]["a"]["held_out"]["inside"]
    assert good["plain"]["held_out"]["inside"] and not bad["plain"]["held_out"]["inside"]
    assert bad["arms"]["a"]["held_out"]["sentence"].endswith("outside")
    # what was held out was not fitted
    assert good["arms"]["a"]["slope"] == bad["arms"]["a"]["slope"]
    assert good["exponent"]["b"] == bad["exponent"]["b"] is not None


def test_the_slope_is_that_of_the_two_worths():
    study = sizes_of(rng(7), dict(a=(0.1, 0.04)))
    variant = ladder(study, SIZES[2])["arms"]["a"]
    logs = [math.log(worth(Curve(study[n]["plain"]), *study[n]["arms"]["a"]).mean) for n in SIZES]
    slope = (logs[1] - logs[0]) / math.log(SIZES[1] / SIZES[0])
    assert variant["slope"]["mean"] == pytest.approx(slope)
    assert variant["held_out"]["predicted"] == pytest.approx(
        math.exp(logs[1] + slope * math.log(SIZES[2] / SIZES[1])))
    three = ladder(study)["arms"]["a"]["slope"]["mean"]
    assert three == pytest.approx(np.polyfit(np.log(SIZES), logs, 1)[0])


def test_the_shared_exponent_is_least_squares():
    variants = dict(a=(-0.03, 0.3), b=(0.02, 0.3), c=(0.005, 0.3))
    study = sizes_of(rng(8), effects=variants)
    found = ladder(study, SIZES[2])["exponent"]
    inverses = []
    for n in SIZES[:2]:
        errors = [study[n]["arms"][k][1] for k in variants]
        plain_error = math.sqrt(Curve(study[n]["plain"]).variance / 8)
        shared = [min(plain_error, e * math.sqrt(0.5)) for e in errors]
        inverses.append(np.linalg.inv([[errors[i] ** 2 if i == j else shared[i] * shared[j] for j in range(3)]
                                       for i in range(3)]))

    def squares(theta):  # c in hundredths
        left = [[study[n]["arms"][k][0] - 0.01 * c * (n / SIZES[1]) ** theta[3]
                 for k, c in zip(variants, theta)]
                for n in SIZES[:2]]
        return sum(np.array(e) @ inverse @ e for e, inverse in zip(left, inverses))

    best = minimize(squares, [-3, 2, 0.5, 0.1], method="Nelder-Mead",
                    options=dict(xatol=1e-9, fatol=1e-13, maxiter=9000, maxfev=9000))
    assert found["b"] == pytest.approx(best.x[3], abs=1e-4)
    for name, c in zip(variants, best.x):
        assert found["held_out"][name]["predicted"] == pytest.approx(
            0.01 * c * (SIZES[2] / SIZES[1]) ** best.x[3], rel=1e-4)


def test_the_shared_exponent_holds_the_truth_19_times_in_20():
    r, held, inside, fitting = rng(9), [], [], []
    variants = dict(a=(-0.03, 0.3), b=(0.03, 0.3), c=(0.02, 0.3))
    for _ in range(60):
        found = ladder(sizes_of(r, effects=variants), SIZES[2])["exponent"]
        held.append(found["low"] <= 0.3 <= found["high"])
        inside += [check["inside"] for check in found["held_out"].values()]
        fitting.append(found["p_shared"] > 0.05)
    assert np.mean(held) >= 0.9 and 0.9 <= np.mean(inside) < 1 and 0.85 <= np.mean(fitting), (held, inside)


def test_variants_that_share_no_exponent_or_have_no_effect_are_reported():
    apart = ladder(sizes_of(rng(10), effects=dict(a=(-0.05, 0.5), b=(0.05, -0.5))), SIZES[2])["exponent"]
    assert apart["p_shared"] < 0.01 and "does not fit all variants" in apart["sentence"]
    nothing = ladder(sizes_of(rng(11), effects=dict(a=(0.0, 0), b=(0.0, 0))), SIZES[2])["exponent"]
    assert nothing["b"] is None and "cannot be estimated" in nothing["sentence"] and nothing["held_out"] == {}


def test_a_variant_beyond_the_budgets_or_at_one_size_has_no_trend():
    study = sizes_of(rng(12), dict(a=(0.0, 0.0)))
    study[SIZES[0]]["arms"]["far"] = study[SIZES[1]]["arms"]["far"] = (0.9, 0.004, 9)
    study[SIZES[1]]["arms"]["once"] = (0.01, 0.004, 9)
    study[SIZES[2]]["arms"]["a"] = (0.9, 0.004, 9)
    found = ladder(study, SIZES[2])["arms"]
    assert "at 98,304, worth less than 0.7 x" in found["far"]["sentence"] and found["far"]["slope"] is None
    assert "fewer than two sizes" in found["once"]["sentence"]
    assert found["once"]["verdict"] == "cannot be told"
    assert "could not be checked: worth less than 0.7 x" in found["a"]["held_out"]["sentence"]


def test_ladder_is_json_even_with_one_seed_each():
    study = {n: dict(plain={m: [float(at_size(n, m))] for m in (0.7, 1.0, 1.4)}, arms=dict(
        a=(0.01, math.nan, 0), same=(0.0, 0.0, 9))) for n in SIZES}
    result = json.loads(json.dumps(ladder(study, SIZES[2]), allow_nan=False))
    a = result["arms"]["a"]
    assert a["slope"]["mean"] is not None and a["slope"]["low"] is None and a["verdict"] == "cannot be told"
    assert a["held_out"]["inside"] is None and "too few seeds" in a["held_out"]["sentence"]
    assert result["plain"]["held_out"]["inside"] is None and result["exponent"]["b"] is None


def test_the_plain_gpt_is_predicted_for_a_floor_of_0_and_of_1():
    """By hand for two sizes: the ratio of what lies above the floor, to the power of the steps in log N."""
    study = sizes_of(rng(13), sd=0.001)
    plain = ladder(study, SIZES[2])["plain"]
    y = [np.mean(study[n]["plain"][1.0]) for n in SIZES]
    steps = math.log(SIZES[2] / SIZES[1]) / math.log(SIZES[1] / SIZES[0])
    by_hand = [floor + (y[1] - floor) * ((y[1] - floor) / (y[0] - floor)) ** steps for floor in (0, 1)]
    check = plain["held_out"]
    assert check["predicted"] == pytest.approx(np.mean(by_hand))
    assert check["low"] < by_hand[0] < y[2] < by_hand[1] < check["high"] and check["inside"]
    assert plain["alpha"]["0"]["mean"] == pytest.approx(math.log(y[0] / y[1]) / math.log(SIZES[1] / SIZES[0]))
