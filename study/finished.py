"""
Finished runs that are in out/trials already: those that other code made, which --accept_code takes, and those
that --fresh trains once more, to compare the scores.
"""

import json
import shutil

from nanoheads.common import from_json, plural
from study import trial
from study.records import Result, hash_of

OF_CODE = ("code", "torch")  # what of a spec says what computed a run; texts of one's own mechanisms do too


# ---- of other code ----

def of_other_code(runs):
    """{name of a Run: Result} of those of these Runs that are in out/trials as other code, another PyTorch or
    another text of a mechanism's file made them; of several the newest.
    """
    wanted, found = {key_of(run.spec): run.name for run in runs}, {}
    paths = sorted(trial.TRIALS.glob("*/result.json"), key=lambda path: path.stat().st_mtime)
    for folder in (path.parent for path in paths):
        try:
            spec = from_json((folder / "spec.json").read_bytes())
            name = wanted.get(key_of(spec))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # no spec.json of ours
            continue
        if name and name != folder.name == hash_of(spec) and (result := trial.result_in(folder)):
            found[name] = result
    return found


def key_of(spec):
    """What a run is, whatever its code: flags, data, seed and score, as text."""
    rest = {key: value for key, value in spec.items() if key not in OF_CODE}
    rest["train"] = {key: value for key, value in spec["train"].items() if key != "own_mechanism"}
    rest["own"] = {key: value for key, value in spec["own"].items() if not key.startswith("mechanism ")}
    return json.dumps(rest, sort_keys=True)


# ---- once more ----

def set_aside(runs):
    """Put what these Runs gave before beside their folders, so that they are trained anew.

    One for which that is done already, by a study that was stopped, goes on.
    """
    for run in runs:
        if not before(run).exists() and isinstance(trial.outcome(run), Result):
            trial.folder_of(run).rename(before(run))


def before(run):
    """The folder of what a Run gave before it was trained anew."""
    folder = trial.folder_of(run)
    return folder.with_name(f"{folder.name}.before")


def agreement(runs):
    """How many scores of Runs that were trained anew are those of before, as a sentence. What was set aside
    is removed.
    """
    pairs = [(old, new) for run in {run.name: run for run in runs}.values()
             if isinstance(new := trial.outcome(run), Result) and (old := trial.result_in(before(run)))]
    for run in runs:
        if isinstance(trial.outcome(run), Result):
            shutil.rmtree(before(run), ignore_errors=True)
    if not pairs:
        return "Nothing was there before to compare these scores with."
    equal = sum(old.score == new.score for old, new in pairs)
    far = max(abs(old.score - new.score) for old, new in pairs)
    are = "is the one that was" if equal == 1 else "are those that were"
    return (f"Trained anew: {equal:,} of {plural(len(pairs), 'score')} {are} there, to the last digit"
            + f"; the others differ by up to {far:.4f}" * (equal < len(pairs)) + ".")
