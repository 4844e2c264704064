"""
The verdicts in results/ are computed once more from their scores, and none differs.

tests/golden.json holds the scores, the costs and every figure of all comparisons that were ever published
here, as the code of 86da9e9 computed them. It outlives the results files that it was made from: whatever
computes verdicts in this repository must give these.
"""
import json
import math

from helpers import ROOT

from study.records import PLAIN, Failure, Pair, Result, Run, Study, Variant
from study.verdicts import compare_with_target, comparisons_of

ON_FILE = json.loads((ROOT / "tests/golden.json").read_text())["studies"]
OF_CORRECTION = ("p_corrected", "p_same", "verdict", "more_seeds")
NAMES = {"more_seeds": "seeds"}  # of figures on file, here
WHERE = ("task", "variant", "baseline", "equal")


def name_of(found):
    return f"{found['file'].removeprefix('results/')} {found['part']}".strip()


def variant_of(name, costs):
    """The Variant of what is on file of its costs; a task has costs of its own, which nothing is made of."""
    if "kind" not in costs:
        return Variant(name, "plain" if name == PLAIN else "variant")
    kind = {"baseline": "wider"}.get(costs["kind"], costs["kind"])
    tokens, of_token, time = costs["tokens"], costs.get("executed_flops_per_token"), costs.get("time_ratio")
    return Variant(name, kind, tokens=tokens, flops=of_token and of_token * tokens,
                   time=time and (time["mean"], time["low"], time["high"]))


def study_of(found):
    """The Study of what is on file."""
    runs, results, failures = [], {}, {}
    for variant, by_text in found["scores"].items():
        for text, by_seed in by_text.items():
            for seed, score in by_seed.items():
                run = Run("judge", variant, text, seed, dict(variant=variant, text=text, seed=seed))
                runs.append(run)
                if score is not None:
                    results[run.name] = Result(score)
        missing = [run for run in runs if run.variant == variant and run.name not in results]
        for i in range(count_of_failed(found, variant) - len(missing)):
            spec = dict(variant=variant, failed=i)
            missing.append(Run("judge", variant, found["texts"][0], f"failed {i}", spec))
            runs.append(missing[-1])
        failures.update({run.name: Failure("failed") for run in missing if count_of_failed(found, variant)})
    pairs = [Pair(row["variant"], row["baseline"], (row["task"],) if "task" in row else tuple(found["texts"]),
                  "".join(row.get("equal", ()))) for row in found["comparisons"]]
    variants = tuple(variant_of(*each) for each in found["costs"].items())
    return Study(name_of(found), found["measure"], variants, tuple(pairs), tuple(found["texts"]), tuple(runs),
                 results, failures, found["alpha"], found["margin"], found.get("target"))


def count_of_failed(found, variant):
    count = found["failed"].get(variant, 0)
    return count if isinstance(count, int) else sum(count.values())


def same(now, then):
    """To nine digits; null on file is what was not finite, or not measured."""
    if now is None or then is None or isinstance(now, str) or isinstance(then, str):
        return now == then or then is None and isinstance(now, float) and not math.isfinite(now)
    return math.isclose(now, then, rel_tol=1e-9, abs_tol=1e-12)


def figures_of(row, but=()):
    """{(figure, part of it or ""): value} of a row on file."""
    found = {}
    for key, value in row.items():
        if key in but or key in WHERE:
            continue
        if key == "worth":  # of a mean beyond the budgets the file has an end of them for its interval
            value = {end: value[end] for end in (("mean",) if value["beyond"] else ("mean", "low", "high"))}
        parts = value.items() if isinstance(value, dict) else [("", value)]
        found.update({(key, part): figure for part, figure in parts})
    return found


def differing(now, row, but=()):
    """["figure: now, then"] of a Comparison and its row on file."""
    wrong = []
    for (key, part), figure in figures_of(row, but).items():
        value = getattr(now, NAMES.get(key, key))
        value = getattr(value, part) if part and value is not None else value
        if not same(value, figure):
            wrong.append(f"{key} {part}: {value} where {figure} was")
    return wrong


def test_every_figure_follows_from_the_scores_as_it_did():
    for found in ON_FILE:
        now = comparisons_of(study_of(found))
        # where interactions stood in the family of Holm's correction, corrected figures need those too
        but = OF_CORRECTION if found.get("corrected_beside") else ()
        assert len(now) == len(found["comparisons"]) > 0, name_of(found)
        for comparison, row in zip(now, found["comparisons"]):
            assert differing(comparison, row, but) == [], (name_of(found), row["variant"], row["baseline"])


def test_every_mean_is_beside_its_target_as_it_was():
    with_targets = [found for found in ON_FILE if "targets" in found]
    assert with_targets
    for found in with_targets:
        now = {each.variant: each for each in compare_with_target(study_of(found))}
        assert now.keys() == {row["variant"] for row in found["targets"]}, name_of(found)
        for row in found["targets"]:
            each, where = now[row["variant"]], (name_of(found), row["variant"])
            assert all(same(getattr(each, key), row[key])
                       for key in ("n", "mean", "low", "high", "p", "p_corrected")), where
            assert each.beyond == (row["verdict"] in ("below", "above")), where
