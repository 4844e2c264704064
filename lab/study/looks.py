"""
What the p values of a study do not know of: finished runs of its variants that it leaves out, and reports
that judged the same variants by other runs.

A run is of a variant where its trial.json is that of the variant's, but for the seed, for the code that made
it, and for how much of the split was scored. Each report keeps the seeds that it judged by in
out/trials/looks, since a study of other seeds has a folder of its own. docs/results/verdicts.md says what
looking twice and choosing seeds do to p.
"""

import hashlib
import json
from dataclasses import replace
from datetime import datetime

from nanoheads.common import UserError, write_json
from lab.study import effects, results, trial
from lab.study.records import LeftOut, Look, PlannedLooks, Spec, StudyResults, as_json, as_record, is_record
from lab.study.runs import key_of, specs_in

LOOKS = "looks"  # the folder in out/trials


def beside(study):
    """{"left_out", "looks"} of a study, for its results.

    left_out: [LeftOut] of the finished runs of what is judged that no stage has: in out/trials, in
    the results file that is in the study's folder.
    looks: [Look] of other reports, the oldest first, that judged one of its variants by other runs of that or
    of the plain GPT; their seeds are of these variants and of the plain GPT. The first of two looks that the
    study itself planned is none.
    """
    before = None
    if (path := study.out / "results.json.gz").is_file():
        try:
            before = results.read(path)
        except UserError as e:
            print(f"what was judged there before is not known: {e}", flush=True)
    before = before if isinstance(before, StudyResults) else None  # not that of several texts
    return dict(left_out=left_out(study.runs, before), looks=looks(study, before))


def hash_of(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def variant_and_seed(spec):
    """(what a run is of, as a hash; its seed), from its trial.json."""
    same = json.loads(key_of(spec))
    same["model"].pop("seed", None)
    same["score"].pop("tokens", None)
    return hash_of(same), spec["model"]["seed"]


# ---- runs ----

def left_out(runs, before):
    """See beside(). before: the results file that is in the study's folder, or None."""
    names, used = {}, set()
    for (stage, name, _), folder in runs.folders.items():
        # as it was planned, too, where another run was taken
        for spec in (runs.specs[folder], *([runs.taken[folder][1]] if folder in runs.taken else [])):
            variant, seed = variant_and_seed(spec)
            used.add((variant, seed))
            if stage == "judge":
                names.setdefault(variant, name)

    def is_left(spec):
        variant, seed = variant_and_seed(spec)
        return variant in names and (variant, seed) not in used

    specs = [spec for spec in specs_in(trial.TRIALS) if is_record(Spec, spec)
             and is_left(spec) and trial.done(trial.folder_of(spec))]
    specs += [run.spec for run in before.runs.values() if is_left(run.spec)] if before else []
    found = {name: set() for name in names.values()}
    for variant, seed in map(variant_and_seed, specs):
        found[names[variant]].add(seed)
    if not runs.config.plain_seeds and not any(seeds for name, seeds in found.items() if name != "plain"):
        return []  # the plain GPT's seeds follow from the variants', unless they are asked for: nobody chose
    return [LeftOut(variant=name, seeds=sorted(seeds)) for name, seeds in found.items() if seeds]


# ---- looks ----

def looks(study, before):
    """See beside(). before: the results file that is in the study's folder, or None."""
    names, now = seeds_of((name, study.runs.specs[folder]) for name, folder in judged(study))
    on_record = [trial.read_json(path) for path in sorted((trial.TRIALS / LOOKS).glob("*.json"))]
    on_record = [as_record(Look, each) for each in on_record if each and is_record(Look, each)]
    found = {}
    for record in [*on_record, *looks_in(before)]:
        seeds = {names[variant]: own for variant, own in record.seeds.items() if variant in names}
        seeds = {name: own for name, own in seeds.items() if len(own) > 1}  # else there was no verdict
        if is_first_of(study, record, seeds):
            continue
        others = [name for name in seeds if name != "plain"
                  and any(seeds.get(side) != now.get(side) for side in (name, "plain"))]
        if others and "plain" in seeds:
            seeds = {name: seeds[name] for name in ("plain", *others)}
            found.setdefault(hash_of(seeds), replace(record, seeds=seeds))
    return sorted(found.values(), key=lambda look: look.date)


def planned(two_looks):
    """What a record says of the plan of two looks; None: there is none."""
    return PlannedLooks(spending=two_looks.spending, seeds=two_looks.seeds) if two_looks else None


def is_first_of(study, record, seeds):
    """Whether a record is of the first look that a study planned; seeds: the record's, {variant: [seed]}."""
    plan = study.two_looks
    return bool(plan) and record.two_looks == planned(plan) and all(
        own == sorted(plan.plain_seeds if name == "plain" else plan.first_seeds)
        for name, own in seeds.items())


def judged(study):
    """[(name, folder)] of the finished runs by which a study judges its variants, and of the plain GPT's."""
    return [(name, folder) for (stage, name, _), folder in study.runs.folders.items()
            if stage == "judge" and study.compared[name].kind in ("plain", "variant")
            and study.runs.result(folder)]


def seeds_of(named):
    """({what a run is of: its name}, {name: [seed]}) of (name, trial.json) of runs."""
    names, seeds = {}, {}
    for name, spec in named:
        variant, seed = variant_and_seed(spec)
        seeds.setdefault(names.setdefault(variant, name), set()).add(seed)
    return names, {name: sorted(own) for name, own in seeds.items()}


def looks_in(before):
    """What a results file was judged by, and what it says of reports before it, as keep() has them."""
    if not before:
        return []
    names, seeds = seeds_of((name, before.runs[run].spec) for name, arm in before.arms.items()
                            if arm.kind in ("plain", "variant")
                            for run, bpb in zip(arm.runs, arm.bpb) if bpb is not None)
    variants = {name: variant for variant, name in names.items()}
    own = Look(date=before.date or "", folder=before.out or "", **effects.progress(before),
               seeds={variant: seeds[name] for variant, name in names.items()},
               two_looks=planned(before.two_looks))
    earlier = [replace(look, seeds={variants[name]: each for name, each in look.seeds.items()
                                    if name in variants}) for look in before.looks or ()]
    return [*earlier, own]


def keep(study, written):
    """Keep by which runs a study was judged, for later ones; written: its StudyResults. The same runs are
    kept once.
    """
    names, seeds = seeds_of((name, study.runs.specs[folder]) for name, folder in judged(study))
    seeds = {variant: seeds[name] for variant, name in names.items()}
    plan = planned(study.two_looks)
    key = [seeds, {"two_looks": as_json(plan)}] if plan else seeds
    path = trial.TRIALS / LOOKS / f"{hash_of(key)}.json"
    now = datetime.now().isoformat(" ", "milliseconds")
    if len(seeds) < 2 or path.is_file():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, as_json(Look(date=now, folder=str(study.out), seeds=seeds, two_looks=plan,
                                      **effects.progress(written))))
    except (OSError, UserError) as e:
        print(f"that these runs were judged is not on record for later studies: {e}", flush=True)
