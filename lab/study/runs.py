"""
The runs of a study: which there are, what each gave, and which of them other code made.

A run is a folder of out/trials, named after a hash of its flags, its data and its code (trial.py, digest.py).
A study trains every run that is not done there. `--accept_code` also takes runs there that other code or
other libraries made, matched by flags, data and seed; the report says how many.
"""

import json
import shutil
from collections import Counter
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from nanoheads import checkpoint, own_mechanism
from nanoheads.common import UserError, from_json, no_link, pick_device, plural, say
from lab.study import digest, queue, trial
from lab.study.records import Reused
from lab.study.variants import BOOKKEEPING

TRIALS_THERE = "out/trials"  # where a run of other code is said to come from
CODE = "code", "torch", "libraries", "environment"  # keys of trial.json that say what computed a run


class Runs:
    """The runs of a study so far, on one dataset.

    trials: the folder that they lie in; of_other_code: the OtherCode of those that may be taken there.
    """

    def __init__(self, config, data, trials, of_other_code):
        self.config, self.data, self.trials, self.of_other_code = config, data, trials, of_other_code
        self.folders = {}    # (stage, variant, seed): folder; a stage is screen, tune or judge
        self.specs = {}      # folder: its trial.json
        self.taken = {}      # folder: (run of OtherCode, the trial.json that was planned)
        self.refused = {}    # folder of a run that does not count since other code made it: see OtherCode
        self.said = set()    # folders of these that newly_refused() has named
        self.failed = set()  # folders; another study may have started these again meanwhile

    def spec(self, variant, seed, split):
        """trial.json of one run: everything that its numbers depend on. UserError: its teacher is missing."""
        c, teacher = self.config, variant.train.teacher
        if teacher and not checkpoint.file_of(teacher).is_file():
            made = f"first run: {c.first[teacher]}" if teacher in c.first else "train it first"
            raise UserError(f"{variant.name}: teacher={teacher} is not there yet; {made}")
        model = replace(variant.model, seed=seed + variant.flags.get("seed", 0))
        training = digest.own_training(variant.train)
        flags = {key: value for key, value in training.items() if key not in BOOKKEEPING}
        flags["device"] = pick_device(c.device).split(":")[0]  # GPUs are handed out by number
        files = own_mechanism.files_for(model)
        what = dict(rows=trial.ROWS_OF_TASK) if variant.train.task else dict(tokens=c.test_tokens)
        return dict(model=digest.own_flags(model), train=flags, score=dict(split=split, **what),
                    data=trial.digests_of_all(self.data, variant.train.labels, teacher, files,
                                              training.get("policy_rules")),
                    code=digest.code_digest(model, variant.train), torch=torch.__version__,
                    **trial.surroundings_of(files))

    def plan(self, stage, variants, seeds, split=None):
        """Plan runs of these variants; returns their folders.

        Seed by seed, so that a stage that is interrupted has all variants of the seeds that it has.
        """
        planned = []
        for seed in seeds:
            for variant in variants:
                spec = self.spec(variant, seed, split or self.config.split)
                folder = trial.folder_of(spec, self.trials)
                if not trial.done(folder) and (run := self.of_other_code.find(spec)):
                    asked, spec = spec, run["spec"]
                    folder = trial.folder_of(spec)
                    self.taken[folder] = run, asked
                elif not trial.done(folder) and (refused := self.of_other_code.refused(spec)) is not None:
                    self.refused[folder] = refused
                self.specs[folder] = spec
                self.folders[stage, variant.name, seed] = folder
                planned.append(folder)
        return planned

    def execute(self, folders, place, what="runs"):
        """Run those of these folders that are not done. place: of queue.py; None: nothing runs."""
        if self.config.report_only or place:
            say_what_is_refused(self.newly_refused(folders))
        if self.config.report_only or place is None:
            return
        folders = [folder for folder in folders if folder not in self.taken]
        for folder in folders:
            trial.make(self.specs[folder], self.trials)  # of what is done, its trial.json may be damaged
        self.failed |= queue.run_all(folders, place, what).keys()

    def newly_refused(self, folders):
        """What `refused` has of those of these folders that were not asked for before."""
        new = {*folders} & {*self.refused} - self.said
        self.said |= new
        return [self.refused[folder] for folder in new]

    def result(self, folder):
        """What a run gave, of today's code or taken from another; None: it is not done."""
        return trial.result(folder) or self.taken.get(folder, (None,))[0]

    def scores(self, stage):
        """{variant: {seed: bits/byte}} of what is done in a stage."""
        found = {}
        for (at, name, seed), folder in self.folders.items():
            if at == stage and (result := self.result(folder)):
                found.setdefault(name, {})[seed] = result["bpb"]
        return found

    def ended(self, folders):
        """Whether all of these runs are done or have failed."""
        return all(self.result(f) or f in self.failed or trial.failure(f) for f in folders)

    def reused(self):
        """[records.Reused]: how many runs were taken that other code or other libraries made, if any."""
        names = {folder: name for (_, name, _), folder in self.folders.items()}
        taken = [folder for folder in names if folder in self.taken]
        other = [folder for folder in taken if not is_same_code(self.taken[folder][0]["spec"],
                                                                self.taken[folder][1])]
        of = list(dict.fromkeys(names[folder] for folder in other))
        return [Reused(source=TRIALS_THERE, runs=len(taken), other_code=len(other), of=of)] if taken else []

    def take_into_trials(self):
        """Put the runs that a study trained anew in the place of those in out/trials."""
        for folder in {*self.folders.values()}:
            there = trial.TRIALS / folder.name
            if trial.done(folder) and (trial.done(there) or not there.exists()):
                trial.TRIALS.mkdir(parents=True, exist_ok=True)
                arrived = no_link(there.with_name(f"{there.name}.new"))
                shutil.rmtree(arrived, ignore_errors=True)
                shutil.move(folder, arrived)  # perhaps from another disk; the old run goes once this is here
                shutil.rmtree(there, ignore_errors=True)
                arrived.rename(there)


# ---- runs of other code ----

def key_of(spec):
    """What a run of this trial.json is: its flags, data, seed and score, without its CODE.

    The text of a mechanism in a file of one's own is code, too.
    """
    rest = {key: value for key, value in spec.items() if key not in CODE}
    rest["train"] = {key: value for key, value in spec["train"].items() if key != "own_mechanism"}
    rest["data"] = {key: value for key, value in spec.get("data", {}).items() if key != "mechanism"}
    return json.dumps(rest, sort_keys=True)


def is_same_code(spec, other):
    """Whether two runs were made by the same CODE, and by the same files of one's own."""
    return files_of(spec) == files_of(other) and all(spec.get(key) == other.get(key) for key in CODE)


def files_of(spec):
    """What a trial.json says of the text of a mechanism's own file; None: it has none."""
    return spec.get("data", {}).get("mechanism")


def refused_sentence(rows):
    """How many runs there are that do not count, and why.

    rows: for each, whether that is because the file of its mechanism had another text.
    """
    parts = []
    for own_file, n in Counter(rows).items():
        runs = f"{plural(n, 'run')} of {TRIALS_THERE} {'does' if n == 1 else 'do'} not count, since"
        parts.append(f"{runs} the file of the mechanism has another text now." if own_file else
                     f"{runs} other code or other libraries made {'it' if n == 1 else 'them'}; --accept_code "
                     f"takes {'it as it is' if n == 1 else 'them as they are'}.")
    return " ".join(parts)


def say_what_is_refused(rows):
    if rows:
        say(refused_sentence(rows))


class OtherCode:
    """The runs of a folder of trials that a study may take though other code made them, with accept_code.

    trials: None: the folder is not looked at.
    """

    def __init__(self, accept_code=False, trials=trial.TRIALS):
        self.accept_code, self.trials = accept_code, trials

    def find(self, spec):
        """A finished run in the place of the one with this trial.json, or None: its result, with "spec", the
        trial.json that it was made with. One of the same code comes before all others.
        """
        specs = self.in_trials.get(key_of(spec), ()) if self.accept_code else ()
        for each in sorted(specs, key=lambda each: not is_same_code(each, spec)):
            if result := trial.result(trial.folder_of(each)):
                return {**result, "spec": each}
        return None

    def refused(self, spec):
        """Whether of the runs of this trial.json that find() does not take each had another text of its own
        file; None: there is no such run.
        """
        specs = () if self.accept_code else self.in_trials.get(key_of(spec), ())
        others = [each for each in specs if not is_same_code(each, spec)
                  and trial.done(trial.folder_of(each, Path(self.trials)))]
        return all(files_of(each) != files_of(spec) for each in others) if others else None

    @cached_property
    def in_trials(self):
        """{key_of(): [trial.json]} of the finished runs of the folder, whatever their code."""
        found = {}
        for spec in specs_in(Path(self.trials)) if self.trials else ():
            found.setdefault(key_of(spec), []).append(spec)
        return found


def specs_in(trials):
    """The trial.json of every finished run of a folder of trials, the newest run first.

    What is no trial.json is passed over, and so is a run that another study moves away meanwhile.
    """
    found = []
    for path in trials.glob("*/result.json"):
        try:
            found.append((path.stat().st_mtime, from_json(path.with_name("trial.json").read_bytes())))
        except (OSError, ValueError):
            continue
    found.sort(key=lambda each: each[0], reverse=True)
    return [spec for _, spec in found
            if isinstance(spec, dict) and all(isinstance(spec.get(key), dict) for key in ("train", "data"))]


def agreement(studies):
    """How many scores that were trained anew are those in out/trials, as a sentence.

    studies: the Runs of each.
    """
    known, pairs = OtherCode(accept_code=True), []
    for runs in studies:
        for folder in {*runs.folders.values()}:
            new, spec = runs.result(folder), runs.specs[folder]
            old = trial.result(trial.folder_of(spec)) or known.find(spec)
            if new and old:
                pairs.append((old["bpb"], new["bpb"], is_same_code(old.get("spec", spec), spec)))
    if not pairs:
        return "Nothing was there before to compare these scores with."
    equal, far = sum(old == new for old, new, _ in pairs), max(abs(old - new) for old, new, _ in pairs)
    are = "is the one that was" if equal == 1 else "are those that were"
    other = sum(not same_code for *_, same_code in pairs)
    return (f"Trained anew: {equal:,} of {plural(len(pairs), 'score')} {are} there, to the last digit"
            + f"; the others differ by up to {far:.4f} bits/byte" * (equal < len(pairs))
            + f"; {other:,} of those that were there were made by other code or other libraries" * bool(other)
            + ".")
