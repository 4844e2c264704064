"""
Finds finished runs that are in out/trials already: those of other code, which --accept_code takes, and those
that --fresh trains once more to compare the scores.
"""

import json
import shutil
from contextlib import suppress

from nanoheads.common import plural
from study import trial
from study.digest import hash_without_code
from study.records import Result, hash_of


# ---- of other code ----

def results_of_other_code(runs):
    """{name of a Run: Result} of these Runs where out/trials has a result that other code, another PyTorch or
    another text of a mechanism's file made; of several, the newest.
    """
    names, modified_at, results = {hash_without_code(run.spec): run.name for run in runs}, {}, {}
    for path in trial.TRIALS.glob("*/result.json"):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # no run, or gone
            folder, modified = path.parent, path.stat().st_mtime
            spec = json.loads((folder / "spec.json").read_bytes())
            name = names.get(hash_without_code(spec))
            if name and name != folder.name == hash_of(spec) and modified >= modified_at.get(name, 0):
                if result := trial.result_in(folder):
                    modified_at[name], results[name] = modified, result
    return results


def seeds_left_out(runs):
    """{variant: seeds} of finished runs in out/trials that differ from a judged Run in their seed alone, and
    that are not judged.

    Variants may differ only in the offset that they add to each seed: seed 1002 is seed 2 of a variant that
    adds 1000.
    """
    judged = {run.name for run in runs if run.stage == "judge"}
    variants_by_hash, seeds_of = {}, {}  # hash without the seed -> {offset: variant}; variant -> seeds
    for run in runs:
        if run.stage == "judge":
            offset = run.spec["model"]["seed"] - run.seed
            variants_by_hash.setdefault(hash_without_seed(run.spec), {})[offset] = run.variant
    for path in trial.TRIALS.glob("*/result.json"):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # no run, or gone
            spec = json.loads((path.parent / "spec.json").read_bytes())
            variants, seed = variants_by_hash.get(hash_without_seed(spec), {}), spec["model"]["seed"]
            offset = max((offset for offset in variants if offset <= seed), default=None)
            if offset is not None and path.parent.name == hash_of(spec) and path.parent.name not in judged:
                seeds_of.setdefault(variants[offset], set()).add(seed - offset)
    return {name: sorted(seeds) for name, seeds in seeds_of.items()}


def hash_without_seed(spec):
    """A hash of a run's spec without its seed."""
    return hash_of({**spec, "model": {key: value for key, value in spec["model"].items() if key != "seed"}})


# ---- once more ----

def set_aside(runs):
    """Move the folders of these finished Runs aside, so that they are trained anew.

    A run that was moved already, by a study that was stopped, goes on where it stopped.
    """
    for run in runs:
        if not backup_of(run).exists() and isinstance(trial.outcome(run), Result):
            trial.folder_of(run).rename(backup_of(run))


def backup_of(run):
    """The folder of a Run's earlier result, before it was trained anew."""
    folder = trial.folder_of(run)
    return folder.with_name(f"{folder.name}.before")


def agreement_in_words(runs):
    """A sentence on how many Runs that were trained anew have the same score as before. Removes the folders
    that were set aside.
    """
    pairs = [(old, new) for run in {run.name: run for run in runs}.values()
             if isinstance(new := trial.outcome(run), Result) and (old := trial.result_in(backup_of(run)))]
    for run in runs:
        if isinstance(trial.outcome(run), Result):
            shutil.rmtree(backup_of(run), ignore_errors=True)
    if not pairs:
        return "Nothing was there before to compare these scores with."
    n_equal = sum(old.score == new.score for old, new in pairs)
    largest = max(abs(old.score - new.score) for old, new in pairs)
    verb = "is the one that was" if n_equal == 1 else "are those that were"
    return (f"Trained anew: {n_equal:,} of {plural(len(pairs), 'score')} {verb} there, to the last digit"
            + f"; the others differ by up to {largest:.4f}" * (n_equal < len(pairs)) + ".")
