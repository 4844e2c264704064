"""
Finished runs that are in out/trials already: those that other code made, which --accept_code takes, and those
that --fresh trains once more, to compare the scores.
"""

import json
import shutil
from contextlib import suppress

from nanoheads.common import plural
from study import trial
from study.digest import whatever_code
from study.records import Result, hash_of


# ---- of other code ----

def of_other_code(runs):
    """{name of a Run: Result} of those of these Runs that are in out/trials as other code, another PyTorch or
    another text of a mechanism's file made them; of several the newest.
    """
    wanted, times, found = {whatever_code(run.spec): run.name for run in runs}, {}, {}
    for path in trial.TRIALS.glob("*/result.json"):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # no run, or gone
            folder, written = path.parent, path.stat().st_mtime
            spec = json.loads((folder / "spec.json").read_bytes())
            name = wanted.get(whatever_code(spec))
            if name and name != folder.name == hash_of(spec) and written >= times.get(name, 0):
                if result := trial.result_in(folder):
                    times[name], found[name] = written, result
    return found


def left_out(runs):
    """{variant: seeds} of finished runs in out/trials that are those of judged Runs but for their seed, and
    are none of them.

    Variants that differ by what they add to each seed alone are told apart by it: seed 1002 is seed 2 of one
    that adds 1000.
    """
    judged, like, found = {run.name for run in runs if run.stage == "judge"}, {}, {}
    for run in runs:
        if run.stage == "judge":
            added = run.spec["model"]["seed"] - run.seed
            like.setdefault(but_for_the_seed(run.spec), {})[added] = run.variant
    for path in trial.TRIALS.glob("*/result.json"):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # no run, or gone
            spec = json.loads((path.parent / "spec.json").read_bytes())
            variants, seed = like.get(but_for_the_seed(spec), {}), spec["model"]["seed"]
            added = max((each for each in variants if each <= seed), default=None)
            if added is not None and path.parent.name == hash_of(spec) and path.parent.name not in judged:
                found.setdefault(variants[added], set()).add(seed - added)
    return {name: sorted(seeds) for name, seeds in found.items()}


def but_for_the_seed(spec):
    """A hash of a run's spec without its seed."""
    return hash_of({**spec, "model": {key: value for key, value in spec["model"].items() if key != "seed"}})


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
