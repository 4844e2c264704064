"""From scores to figures: worth and equal cost by hand and by simulation, several texts, controls."""
import copy
import gzip
import json
import math
import warnings

import numpy as np
import pytest
from scipy import stats as scipy_stats

from nanoheads.common import ROOT, UserError
from lab_helpers import but, some
from lab.study import effects, records, results, stats
from lab.study.effects import at_equal_cost, parts_of, plain_at, worth

BUDGETS = {0.7: 4, 1.0: 14, 1.4: 4, 2.0: 4}  # seeds of the plain GPT


@pytest.fixture(autouse=True)
def strict():
    with warnings.catch_warnings():  # a division by zero is a warning in numpy
        warnings.simplefilter("error")
        yield


def rng(*seed):
    return np.random.default_rng(seed)


def seeds(scores):
    return {str(seed): float(score) for seed, score in enumerate(scores, 1)}


def curve(scores):
    """A curve of one text; scores: {multiple: [bits/byte]}."""
    return {multiple: [seeds(own)] for multiple, own in scores.items()}


def own(scores):
    return parts_of([seeds(scores)], 1)


def line(slope=-0.1, multiples=(0.7, 1.0, 1.4, 2.0), spread=0.004, n=3):
    """A plain GPT on a straight line over log(multiple)."""
    return curve({m: 2.1 + slope * math.log(m) + np.linspace(-spread, spread, n) for m in multiples})


def truth(multiple):
    """A power law, which straight lines between the budgets only come near to."""
    return 1.1 + np.asarray(multiple) ** -0.2


# ---- compute ----

def test_the_plain_gpt_is_interpolated_between_neighbouring_budgets():
    plain = curve({m: truth(m) + rng(1, i).normal(0, 0.01, n) for i, (m, n) in enumerate(BUDGETS.items())})
    means = [np.mean([*texts[0].values()]) for texts in plain.values()]
    for multiple in (0.7, 0.8, 1.0, 1.2, 1.4, 1.9, 2.0):
        found = stats.difference(plain_at(plain, multiple, 1))
        assert found.mean == pytest.approx(np.interp(math.log(multiple), np.log(list(plain)), means))
    errors = [np.std([*texts[0].values()], ddof=1) / math.sqrt(len(texts[0])) for texts in plain.values()]
    middle = stats.difference(plain_at(plain, math.sqrt(1.4), 1))
    assert middle.se == pytest.approx(math.hypot(errors[1], errors[2]) / 2)
    assert plain_at(plain, 0.69) is None and plain_at(plain, 2.01) is None


def test_worth_by_hand():
    # a straight line of -0.1 a unit of log: 0.02 worse is exp(-0.2) of the compute, 0.03 better exp(0.3)
    plain, spread = line(), np.array([-1e-9, 0, 1e-9])
    assert worth(plain, own(2.12 + spread), 0.05)["mean"] == pytest.approx(math.exp(-0.2), rel=1e-6)
    assert worth(plain, own(2.07 + spread), 0.05)["mean"] == pytest.approx(math.exp(0.3), rel=1e-6)
    found = at_equal_cost(plain, own(2.12 + spread), math.exp(-0.2), 0.05)
    assert found["mean"] == pytest.approx(0, abs=1e-9)
    assert effects.multiple_of(plain, 0.01) == pytest.approx(math.exp(-0.1))
    assert effects.multiple_of(plain, -0.01) == pytest.approx(math.exp(0.1))
    assert effects.multiple_of(plain, 0.2) is None


def coverage(m, trials=250, n=5, sd=0.006, interpolate=plain_at, monkeypatch=None):
    """Shares: worths whose interval holds m, equal-cost ones that hold 0, agreements with the test at 1."""
    if monkeypatch:
        monkeypatch.setattr(effects, "plain_at", interpolate)
    held = equal = agree = 0
    for trial in range(trials):
        r = rng(3, int(100 * m), trial)
        # on the interpolated line, so that what is counted is the noise alone
        straight = {each: np.interp(math.log(each), np.log(list(BUDGETS)), truth(list(BUDGETS)))
                    for each in (*BUDGETS, m)}
        plain = curve({each: straight[each] + r.normal(0, 0.006, count) for each, count in BUDGETS.items()})
        scores = straight[m] + r.normal(0, sd, n)
        w, e = worth(plain, own(scores), 0.05), at_equal_cost(plain, own(scores), m, 0.05)
        low, high = w["low"] or 0, w["high"] or math.inf
        held += low <= m <= high
        equal += e["low"] <= 0 <= e["high"]
        assert (e["p"] >= 0.05) == (e["low"] <= 0 <= e["high"])
        at_one = stats.difference([*own(scores), *parts_of(plain[1.0], -1)])
        agree += (low <= 1 <= high) == (at_one.p >= 0.05)
    return held / trials, equal / trials, agree / trials


@pytest.mark.slow
@pytest.mark.parametrize("m", (0.75, 1.0, 1.07, 1.8))
@pytest.mark.parametrize("sd", (0.006, 0.018))
def test_intervals_hold_the_truth_19_times_in_20(m, sd):
    held, equal, agree = coverage(m, sd=sd)
    assert 0.91 <= held <= 0.99 and 0.91 <= equal <= 0.99 and agree == 1, (held, equal, agree)


@pytest.mark.slow
def test_an_interval_without_the_curves_error_is_too_narrow(monkeypatch):
    """Negative control: the plain GPT at a multiple taken to be known."""
    def exact(plain, multiple, weight=-1):
        mean = stats.difference(plain_at(plain, multiple, 1)).mean
        return [(weight, mean + np.array([-1e-9, 0, 1e-9]))]

    assert coverage(1.8, n=30, interpolate=exact, monkeypatch=monkeypatch)[0] < 0.89


def test_what_lies_beyond_the_budgets_says_so():
    plain, spread = line(spread=0.001), np.array([-0.001, 0, 0.001])
    less, more = worth(plain, own(2.4 + spread), 0.05), worth(plain, own(1.8 + spread), 0.05)
    assert less["mean"] is None and less["low"] == less["high"] == 0.7
    assert less["words"] == "worth less than 0.7 x of the plain GPT's training compute"
    assert more["mean"] is None and more["words"] == "worth more than 2 x of the plain GPT's training compute"
    reaching = worth(plain, own(2.137 + spread), 0.05)  # itself beyond, its interval not all
    assert reaching["mean"] is None and reaching["low"] is None and 0.7 < reaching["high"] < 0.75
    assert "worth less than 0.7 x [less than 0.7, 0.7" in reaching["words"]
    inside = worth(plain, own(2.1 + spread), 0.05)
    assert inside["words"].startswith("worth 1.00 x [0.9") and inside["low"] < 1 < inside["high"]


def test_one_seed_gives_a_number_and_no_interval():
    plain = line()
    w = worth(plain, own([2.11]), 0.05)
    assert 0.9 < w["mean"] < 1 and w["low"] is w["high"] is None
    assert "[less than 0.7, more than 2]" in w["words"]
    e = at_equal_cost(plain, own([2.11]), 1.2, 0.05)
    assert e["mean"] == pytest.approx(2.11 - 2.1 + 0.1 * math.log(1.2))
    assert e["low"] is e["high"] is e["p"] is None
    # a budget of one seed: its spread is not known, and at 1 x nothing of it is needed
    lone = {**plain, 1.4: [seeds([2.07])]}
    scores = 2.11 + np.array([-0.004, 0, 0.005])
    assert at_equal_cost(lone, own(scores), 1.2, 0.05)["low"] is None
    assert at_equal_cost(lone, own(scores), 1.0, 0.05) == at_equal_cost(plain, own(scores), 1.0, 0.05)
    assert worth({1.0: plain[1.0], 1.4: lone[1.4]}, own(scores), 0.05)["beyond"] == "less"


def test_a_plain_gpt_that_gets_no_better_is_said_so():
    for plain in (line(+0.1), {**line(), 2.0: [seeds([2.2, 2.21])]}):
        w = worth(plain, own([2.1, 2.11]), 0.05)
        assert w["mean"] is None and w["words"] == effects.NOT_FALLING
        assert effects.multiple_of(plain, 0.01) is None
    assert worth(line(), own([]), 0.05)["problem"] == "no difference was measured"


def test_cost_outside_the_budgets_is_not_measured():
    found = at_equal_cost(line(), own([2.1, 2.11]), 2.5, 0.05)
    assert found == records.AtCost(ratio=2.5, mean=None, low=None, high=None, p=None)
    assert at_equal_cost(line(), own([2.1, 2.11]), math.nan, 0.05)["mean"] is None


# ---- a whole study ----

def study(scores, failures=(), **more):
    """A study with these {variant: [bits/byte]}; "plain x 2" is the plain GPT at twice the budget."""
    def arm(name, own):
        multiple = float(name.partition(" x ")[2] or 1)
        kind = "plain" if name == "plain" else "budget" if " x " in name else "variant"
        return dict(kind=kind, label=name, multiple=multiple, seeds=list(range(1, len(own) + 1)),
                    bpb=list(own), time_ratio=None,
                    runs=[f"{name} {i}" for i in range(len(own))],
                    executed_flops_per_token=10, tokens=multiple)

    arms = {name: arm(name, own) for name, own in scores.items()}
    pairs = [[name, "plain", []] for name, own in arms.items() if own["kind"] == "variant"]
    return some(records.StudyResults, dict(
        arms=arms, pairs=pairs, alpha=0.05, margin=0.01, screen=None, runs={}, failures=list(failures),
        plain=dict(block_size=8), data=dict(tokens=8, bytes=8, of_bytes=8), planned=1, done=1, **more))


def noisy(seed, mean, n=5, sd=0.004):
    return (mean + rng(seed).normal(0, sd, n)).tolist()


def test_figures_are_welch_holm_and_nothing_else():
    scores = {"plain": noisy(1, 2.1), "a": noisy(2, 2.06), "b": noisy(3, 2.1), "c": noisy(4, 2.11)}
    rows = effects.figures(study(scores))["comparisons"]
    tests = [scipy_stats.ttest_ind(scores[name], scores["plain"], equal_var=False) for name in "abc"]
    assert [row["p"] for row in rows] == pytest.approx([test.pvalue for test in tests])
    for row, test in zip(rows, tests):
        assert (row["low"], row["high"]) == pytest.approx(tuple(test.confidence_interval(0.95)))
        assert row["p_corrected"] >= row["p"]
    assert rows[0]["verdict"] == "better" and rows[0]["p_corrected"] == pytest.approx(3 * rows[0]["p"])


def test_a_study_is_a_function_of_its_file():
    found = study({"plain": noisy(1, 2.1), "plain x 2": noisy(5, 2.0), "a": noisy(2, 2.06)})
    before = copy.deepcopy(found)
    assert effects.figures(found) == effects.figures(before) and found == before


def test_a_difference_over_texts_is_the_mean_of_those_on_each():
    texts = {name: study({"plain": noisy((k, 1), 2 + k), "plain x 2": noisy((k, 2), 1.9 + k),
                          "a": noisy((k, 3), 1.95 + k, sd=0.01 * (1 + k))})
             for k, name in enumerate(("one", "two"))}
    alone = [effects.figures(each)["comparisons"][0] for each in texts.values()]
    both = effects.together(texts, "", "")["together"]["comparisons"][0]
    assert both["mean"] == pytest.approx(np.mean([row["mean"] for row in alone]))
    assert both["se"] == pytest.approx(math.hypot(*(row["se"] for row in alone)) / 2)
    assert both["worth"]["mean"] is not None and both["equal_flops"]["mean"] == pytest.approx(
        np.mean([row["equal_flops"]["mean"] for row in alone]))
    # control: seeds averaged over the texts first would be another error, with fewer degrees of freedom
    means = [np.mean([texts[text]["arms"][name]["bpb"] for text in texts], 0) for name in ("a", "plain")]
    assert both["df"] != pytest.approx(scipy_stats.ttest_ind(*means, equal_var=False).df, rel=1e-3)


def test_identical_scores_say_that_nothing_acted_and_one_digit_off_is_another_model():
    scores = noisy(1, 2.1, 9)
    rows = effects.figures(study({"plain": scores, "a": scores[:4], "b": [*scores[:3], scores[3] + 1e-9]}))
    a, b = rows["comparisons"]
    assert (a["verdict"], a["mean"], a["low"], a["high"], a["n"]) == ("identical", 0, 0, 0, 4)
    assert a["words"] == ("identical: nothing acted, the scores are those of the plain GPT on every shared "
                          "seed")
    assert b["mean"] != 0 and b["p_corrected"] == b["p"]  # one comparison is tested
    alone = effects.figures(study({"plain": scores, "b": [*scores[:3], scores[3] + 1e-9]}))
    assert alone["comparisons"] == [b]
    pair = but(study({"plain": scores, "a": scores[:4], "b": scores[:4]}), pairs=[["a", "b", []]])
    assert "those of b on every" in effects.figures(pair)["comparisons"][0]["words"]


def test_two_seeds_that_coincide_make_no_identity():
    own = {"1": 0.50, "2": 0.51, "8": 0.90, "9": 0.90}
    plain = {"1": 0.50, "2": 0.51, "3": 0.50, "4": 0.49}
    assert not effects.identical(own, plain) and effects.identical({"1": 0.5, "2": 0.51}, plain)


def test_a_diverged_run_is_refused_by_name():
    with pytest.raises(ValueError, match="the score of a, seed 2, is nan: not a finite number"):
        effects.figures(study({"plain": [2.0, 2.1], "a": [2.0, math.nan]}))


def test_equal_time_reaches_from_its_least_to_its_most():
    found = study({"plain": noisy(1, 2.1), "plain x 2": noisy(5, 2.0), "a": noisy(2, 2.06)})
    found["arms"]["a"]["time_ratio"] = dict(mean=1.2, low=1.1, high=1.3)
    row, = effects.figures(found)["comparisons"]
    plain, scores = effects.curve_of([found]), own(found["arms"]["a"]["bpb"])
    assert row["equal_time"]["low"] == at_equal_cost(plain, scores, 1.1, 0.05)["low"]
    assert row["equal_time"]["high"] == at_equal_cost(plain, scores, 1.3, 0.05)["high"]
    assert row["equal_time"]["mean"] == at_equal_cost(plain, scores, 1.2, 0.05)["mean"]
    assert row["equal_flops"]["ratio"] == 1


# ---- the results on file ----

def verdicts(found):
    return [(row["variant"], row["baseline"], row["verdict"]) for row in found["comparisons"]]


def test_a_file_of_an_older_version_is_refused_in_a_line_that_names_the_commit(tmp_path):
    path = tmp_path / "old.json"
    line = f"{path} is of an older version of this program; commit 7a2abeb is the last one that reads it"

    def refusal(found):
        path.write_text(json.dumps(found))
        with pytest.raises(UserError) as e:
            results.read(path)
        return str(e.value)

    found = json.loads(gzip.decompress((ROOT / "results/demo.json.gz").read_bytes()))
    old = {key: value for key, value in found.items() if key != "procedure"}
    assert refusal(old) == refusal(dict(name="x", command="", texts={"a": found, "b": old})) == line
    together = json.loads(gzip.decompress((ROOT / "results/all-tiny.json.gz").read_bytes()))
    del together["together"]["procedure"]
    assert refusal(together) == line
    run, *_ = json.loads(json.dumps(found))["runs"].values()
    del run["spec"]["libraries"]
    assert refusal({**found, "runs": {**found["runs"], "x": run}}) == line
    old["comparisons"] = [{**row, "verdict": "leaning"} for row in old["comparisons"]]
    # one of today's procedure is shown as it is, and --recheck names what is not as computed
    old["procedure"] = effects.PROCEDURE
    (tmp_path / "new.json").write_text(json.dumps(old))
    assert {row[2] for row in verdicts(results.read(tmp_path / "new.json"))} == {"leaning"}
