"""
The verdicts on file, once more from their scores.

tests/golden.json holds the scores, the costs and every figure of all comparisons that were ever published
here, as the code of 86da9e9 computed them. It outlives the results files that it was made from: whatever
computes verdicts in this repository must give these.
"""
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.study import effects, permutation, stats
from lab.study.measures import MEASURES
from lab.study.records import Failure, TimeRatio

STUDIES = json.loads((Path(__file__).resolve().parents[2] / "golden.json").read_text())["studies"]
OF_CORRECTION = ("p_corrected", "p_same", "verdict", "more_seeds")


def name_of(study):
    return f"{study['file'].removeprefix('results/')} {study['part']}".strip()


def scores_of_texts(study):
    """[{variant: {seed: score}}] of each text; a run that failed has no score."""
    return [{name: own for name, texts in study["scores"].items()
             if (own := {seed: score for seed, score in texts.get(text, {}).items() if score is not None})}
            for text in study["texts"]]


def variant_of(costs):
    """What a comparison reads of a variant's costs."""
    time = costs.get("time_ratio")
    return SimpleNamespace(kind=costs["kind"], multiple=costs["multiple"], tokens=costs["tokens"],
                           executed_flops_per_token=costs["executed_flops_per_token"],
                           time_ratio=TimeRatio(**time) if time else None)


def curve_of(study, by_text):
    """{multiple: the plain GPT's scores on each text} of the budgets that have scores on all of them."""
    curve = {}
    for name, costs in study["costs"].items():
        if costs["kind"] in ("plain", "budget") and all(name in scores for scores in by_text):
            curve[costs["multiple"]] = [scores[name] for scores in by_text]
    return dict(sorted(curve.items())) if len(curve) > 1 and 1.0 in curve else None


def judged(study):
    """The comparisons of a study of text, or of a program's scores, in the order of the file."""
    kind, by_text = MEASURES[study["measure"]], scores_of_texts(study)
    pairs = [(row["variant"], row["baseline"], row["equal"]) for row in study["comparisons"]]
    rows = effects.comparisons(by_text if kind.same_seeds else [effects.apart(each) for each in by_text],
                               pairs, study["alpha"], study["margin"], kind.higher_is_better, kind.unit)
    failures = [Failure(arm=name, seed=None, stage="judge", why="", log="")
                for name, count in study["failed"].items() for _ in range(count)]
    if kind.trained_here:
        variants = {name: variant_of(costs) for name, costs in study["costs"].items()}
        curve = curve_of(study, by_text)
        for row in rows:
            if row.baseline == "plain":
                effects.set_as_compute(row, curve, by_text, variants, study["alpha"])
    for row in rows:
        effects.withhold_where_runs_failed(row, failures)
    return rows


def judged_by_permutation(study):
    """The comparisons of a study of tasks, in the order of the file."""
    scores = study["scores"]
    pairs = [tuple([*scores[row[side]][row["task"]].values()] for side in ("variant", "baseline"))
             for row in study["comparisons"]]
    return permutation.judge(pairs, study["alpha"], study["margin"])


def same(now, then):
    """To nine digits; None on file is what was not finite, or not measured."""
    if now is None or then is None or isinstance(now, str) or isinstance(then, str):
        return now == then or then is None and isinstance(now, float) and not math.isfinite(now)
    return math.isclose(now, then, rel_tol=1e-9, abs_tol=1e-12)


def differing(now, then, but=()):
    """["figure: now, then"] of a comparison and its row on file."""
    wrong = []
    for key, value in then.items():
        if key in but or key in ("task", "variant", "baseline", "equal"):
            continue
        parts = value.items() if isinstance(value, dict) else [(None, value)]
        for part, figure in parts:
            found = getattr(now, key)
            found = found if part is None else getattr(found, part)
            if not same(found, figure):
                wrong.append(f"{key} {part or ''}: {found} where {figure} was")
    return wrong


@pytest.mark.parametrize("study", STUDIES, ids=name_of)
def test_every_figure_follows_from_the_scores_as_it_did(study):
    rows = (judged_by_permutation if study["measure"] == "right answers" else judged)(study)
    # where interactions stood in the family of Holm's correction, corrected figures need those too
    but = OF_CORRECTION if study.get("corrected_beside") else ()
    assert len(rows) == len(study["comparisons"]) > 0
    for now, then in zip(rows, study["comparisons"]):
        assert differing(now, then, but) == [], (then["variant"], then["baseline"])


@pytest.mark.parametrize("study", [study for study in STUDIES if "targets" in study], ids=name_of)
def test_every_mean_is_beside_its_target_as_it_was(study):
    scores = {name: [*own.values()] for name, own in scores_of_texts(study)[0].items()}
    above = MEASURES[study["measure"]].higher_is_better
    means = [stats.difference([(1, scores[row["variant"]])], study["alpha"]) for row in study["targets"]]
    p = [stats.p_beyond(mean, study["target"], above) for mean in means]
    for row, mean, single, corrected in zip(study["targets"], means, p, stats.holm(p).tolist()):
        now = [mean.mean, mean.low, mean.high, mean.se, mean.df, single, corrected]
        then = [row[key] for key in ("mean", "low", "high", "se", "df", "p", "p_corrected")]
        assert all(map(same, now, then)), row["variant"]
        assert (row["verdict"] == ("above" if above else "below")) == (corrected <= study["alpha"])


def test_another_margin_changes_verdicts():
    """A control: the figures depend on what is asked."""
    moved = [{**study, "margin": 1.1 * study["margin"]} for study in STUDIES
             if study["measure"] == "bits/byte"]
    changed = sum(bool(differing(now, then)) for study in moved
                  for now, then in zip(judged(study), study["comparisons"]))
    assert changed > 5
