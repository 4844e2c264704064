"""
Before the runs of a study: which difference they would find, from the spread over seeds of runs on file.
"""

import gzip
import json
import math
import zlib
from typing import NamedTuple

from model import MECHANISMS
from nanoheads.common import ROOT, from_json, number
from lab.study import effects, looks, stats, trial
from lab.study.records import Spec, is_record
from lab.study.runs import key_of, specs_in
from lab.study.variants import RATES

ENOUGH = 10  # runs of the plain GPT in out/trials: the bound on the spread of fewer is far above it


class OnFile(NamedTuple):
    """Runs whose spread over seeds is taken for that of a study: their scores [n], a list for each model."""
    groups: list
    words: str  # which runs these are


def expected(study):
    """What a planned study would find, as lines; [] where nothing is compared with the plain GPT."""
    c, plain = study.config, study.builder.plain
    judged = [name for name, baseline, equal in study.pairs if baseline == "plain" and not equal]
    if not judged:
        return []
    n, n_plain = len(c.seeds), len(study.plain_seeds(len(judged)))
    if n < 2:
        return ["One seed a variant finds nothing: a verdict needs two or more on each side."]
    spec = study.runs.spec(plain, c.seeds[0], c.split)
    in_results = studies_like(spec)
    found = on_file(spec, in_results)
    # what seems better is also compared with a plain GPT of as many parameters
    wider = [name for name in judged if not effects.same_size(study.compared[name].params, plain.params)]
    m = len(study.pairs) + c.match_parameters * len(wider)
    size = stats.findable(found.groups, n, n_plain, m, c.alpha)
    if math.isnan(size):
        return [f"What {n} seeds would find is not known yet: neither out/trials nor results/ has two runs "
                "of a plain GPT of this size, text and number of steps."]
    for_margin = stats.seeds_to_find(c.margin, found.groups, n_plain / n, m, c.alpha)
    corrected = f", corrected for {m} comparisons" * (m > 1)
    lines = [f"{n} seeds a variant and {n_plain} of the plain GPT find a difference of {size:.4f} bits/byte "
             f"four times in five{corrected}; for {c.margin:g}, the margin, it takes "
             f"{for_margin or 'more than 1,000'} seeds.",
             f"The spread over seeds for that is at its upper 90 % bound, from {found.words}."]
    if known := effects_in(in_results):
        missed = sum(each < size for each in known)
        lines.append(f"Of {len(known)} effects of mechanisms on file at this size, text and number of steps, "
                     f"half are below {known[len(known) // 2]:.4f}, and {missed} are below {size:.4f}.")
    return lines


# ---- what is on file ----

def on_file(spec, in_results):
    """The OnFile for a plain GPT's trial.json: of runs in out/trials, or of studies in results/."""
    here = scores_in_trials(spec)
    if len(here) < ENOUGH and in_results:
        groups = {tuple(arm["runs"]): [bpb for bpb in arm["bpb"] if bpb is not None]
                  for study in in_results for arm in study["arms"].values()}
        runs = len({run for own in groups for run in own})
        return OnFile([*groups.values()], f"{runs:,} runs in results/, of this plain GPT and variants of it")
    return OnFile([here], f"{len(here):,} runs of this plain GPT in out/trials")


def scores_in_trials(spec):
    """Scores of the finished runs in out/trials that differ from this trial.json in seed and code alone."""
    variant, _ = looks.variant_and_seed(spec)
    specs = [each for each in specs_in(trial.TRIALS) if each.get("data") == spec["data"]
             and is_record(Spec, each) and looks.variant_and_seed(each)[0] == variant]
    found = [trial.result(trial.folder_of(each, trial.TRIALS)) for each in specs]
    return [result["bpb"] for result in found if result]


def studies_like(spec):
    """The studies in results/ whose plain GPT is that of a trial.json, at whatever learning rates.

    Read without the checks of results.read(), which take seconds. An installed copy has no results/.
    """
    asked, found = at_any_rates(spec), []
    for path in sorted((ROOT / "results").rglob("*.json.gz")):
        try:
            several = from_json(gzip.decompress(path.read_bytes()))
            for study in (several.get("texts") or {"": several}).values():
                run = next((name for name in study["arms"]["plain"]["runs"] if name in study["runs"]), None)
                if run and at_any_rates(study["runs"][run]["spec"]) == asked:
                    found.append(study)
        except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError):
            continue  # not a results file: `compare.py recheck` says what is wrong with it
    return found


def at_any_rates(spec):
    """What a run is of, but for its seed, learning rates, device, and how much of the split was scored."""
    same = json.loads(key_of(spec))
    rates = (key for group in RATES.values() for key in group)
    # the text's name too, since its digests stay
    for key in (*rates, "dataset", "device", "dtype", "compile", "compile_mode"):
        same["train"].pop(key, None)
    return {**same, "model": {**same["model"], "seed": None}, "score": same["score"]["split"]}


def effects_in(studies):
    """The sizes of the differences to the plain GPT of the mechanisms in studies, the smallest first."""
    flags, found = {flag for own in MECHANISMS.values() for flag in own}, {}
    for study in studies:
        for c in study["comparisons"]:
            variant = study["arms"][c["variant"]]
            if c["baseline"] == "plain" and not c["equal"] and flags & variant["flags"].keys():
                found[tuple(variant["runs"])] = abs(number(c["mean"]))
    return sorted(each for each in found.values() if math.isfinite(each))
