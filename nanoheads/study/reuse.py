"""
Finished runs that a study takes instead of training them, because its command asks for it.

A study trains every run that is not done in out/trials. `--reuse=FILE` names results files whose runs count
too; they are matched by flags, data and seed. `--accept_code` also takes runs, of these files and of
out/trials, that other code or another torch made. Whatever is taken says where it comes from.
"""

import json
from pathlib import Path

from model import GPTConfig
from nanoheads.common import UserError
from nanoheads import own_mechanism as own
from nanoheads.study import results, trial

TRIALS_THERE = "out/trials"  # where a run of other code is said to come from


def key_of(spec):
    """What a run of this trial.json is: its flags, data, seed and score, without its code and torch.

    The text of a mechanism in a file of one's own is code, too. A flag at its default is as if it were not
    there: a file from before there was the flag does not have it.
    """
    rest = {key: value for key, value in spec.items() if key not in ("code", "torch")}
    flags, defaults = own.as_it_was(spec["model"]), GPTConfig.defaults()
    rest["model"] = {name: value for name, value in flags.items()
                     if name not in defaults or value != defaults[name]}
    rest["train"] = {key: value for key, value in spec["train"].items() if key != "own_mechanism"}
    rest["data"] = {key: value for key, value in spec.get("data", {}).items() if key != "mechanism"}
    return json.dumps(rest, sort_keys=True)


class Reuse:
    """The runs that a study may take. files: results files; accept_code: also those of other code or torch.

    UserError: a file cannot be read, or holds no runs.
    """

    def __init__(self, files=(), accept_code=False, trials=trial.TRIALS):
        self.accept_code = accept_code
        self.runs = {}  # key_of(spec): [result, with its "spec" and "from"]
        for path in files:
            for run in runs_on_file(path):
                self.runs.setdefault(key_of(run["spec"]), []).append({**run, "from": str(path)})
        if not any(self.runs.values()) and files:
            raise UserError(f"reuse={', '.join(map(str, files))} holds no runs")
        for spec in specs_in(Path(trials)) if accept_code else ():
            self.runs.setdefault(key_of(spec), []).append({"spec": spec, "from": TRIALS_THERE})

    def find(self, spec):
        """A finished run in the place of the one with this trial.json, or None: its result, with "spec", the
        trial.json that it was made with, and "from". One of the same code comes before all others.
        """
        same, other = [], []
        for run in self.runs.get(key_of(spec), ()):
            (same if is_same_code(run["spec"], spec) else other).append(run)
        for run in [*same, *(other if self.accept_code else [])]:
            if run["from"] == TRIALS_THERE:
                result = trial.result(trial.folder_of(run["spec"]))
                run = result and {**result, **run}
            if run:
                return run
        return None


def runs_on_file(path):
    """Yield the runs of a results file, each checked against its hash and its nats. UserError."""
    for study in trial.studies_in(results.read(path)).values():
        for name, run in study["runs"].items():
            try:
                trial.check_figures(run, run.get("block_nats", run["nats"]), 1e-6)  # blocks are rounded
                if trial.folder_of(run["spec"]).name != name:
                    raise ValueError("it has the trial.json of another run")
            except (KeyError, TypeError, ValueError) as e:
                raise UserError(f"{path}: run {name} cannot be taken: {e}") from None
            yield run


def is_same_code(spec, other):
    """Whether two runs were made by the same code, files of one's own among it, and the same torch."""
    mine = [each.get("data", {}).get("mechanism") for each in (spec, other)]
    return mine[0] == mine[1] and all(spec.get(key) == other.get(key) for key in ("code", "torch"))


def specs_in(trials):
    """The trial.json of every finished run of a folder of trials, the newest run first."""
    done = [path for path in trials.glob("*/result.json") if path.is_file()]
    specs = (trial.read_json(path.with_name("trial.json"))
             for path in sorted(done, key=lambda path: path.stat().st_mtime, reverse=True))
    return [spec for spec in specs if spec]


def counted(taken, names):
    """[{"from", "runs", "other_code", "of"}] of the runs that a study took.

    taken: {folder: (run, its planned trial.json)}; names: {folder: variant}. of: the variants that have runs
    of other code.
    """
    found = {}
    for folder, (run, planned) in taken.items():
        row = found.setdefault(run["from"], {"from": run["from"], "runs": 0, "other_code": 0, "of": []})
        row["runs"] += 1
        if not is_same_code(run["spec"], planned):
            row["other_code"] += 1
            row["of"] += [names[folder]] * (names[folder] not in row["of"])
    return [*found.values()]
