"""
Does a mechanism beat a plain GPT? A study in two stages, intervals, effects as compute, a report.

    python compare.py --mechanism=mine.py                        # the challenge: is mine better?
    python compare.py --task=recall,copy --mechanisms=sink,fox   # what is learned of tasks (docs/tasks.md)
    python compare.py config/studies/all.py                      # this machine: its GPUs, or its cores
    python compare.py --mechanisms=unet_concat,unet_add          # without a file; unet_* is each that fits
    python compare.py config/studies/all.py --scale=mid          # tiny, nano, mid, ...
    python compare.py config/studies/all.py --jobs_per_gpu=4     # small models: four runs at once on each GPU
    python compare.py plan config/studies/all.py                 # what would run, and for how long
    python compare.py report results/all-tiny.json.gz            # a report once more, from its numbers alone
    python compare.py recheck results/all-tiny.json.gz           # every figure of it, computed once more
    python compare.py scores scores.csv --baseline=plain         # verdicts on runs of another program
    python compare.py scores scores.csv --target=3.28            # and is each mean below a target?
    python compare.py config/studies/all.py --fresh              # train everything anew: do the scores agree?
    python compare.py --mechanism=mine.py --seeds=1,2,3,4,5,6,7,8 --looks=2    # half the seeds may be enough

Every run is kept in out/trials, under a hash of its flags, its data and the code that it can reach: start a
study again and it goes on where it stopped; change a flag or the code and what depends on it runs again.
Nothing else counts as done. --accept_code takes runs of other code too, for who knows that it computes the
same; the report says how many. Before it reports, a study scores one in ten of its runs once more from their
checkpoints, or as many as --rescore says, and ends with an error where a score is not the one on file. A
config file is Python code, and reading it runs it: name only files that you trust. --help: all keys.
"""

import itertools
import json
import re
import shlex
import signal
import sys
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import nanoheads.threads  # noqa: F401  before torch, whose threads it has wait briefly
import train
from nanoheads import answer_interrupts, configurator, own_mechanism, promises
from nanoheads.common import (UserError, as_program, explain, fault_of_own_file, json_safe, pick_device,
                              plural, say, table, without_lab, writable, writable_folder, write_json)
from nanoheads.dataset import NotPrepared
from nanoheads.files import LONGEST, find, joined

try:
    from lab.study import (budget, commands, costs, effects, findings, looks, power, queue, report, results,
                           tables, task_report, task_study, trial)
    from lab.study import scores as score_file
    from lab.study.records import Candidate, Screen, TwoLooks, Untuned, as_read
    from lab.study.runs import OtherCode, Runs, agreement, refused_sentence
    from lab.study.variants import StudyConfig, VariantBuilder, variants_of
except ModuleNotFoundError as e:
    sys.exit(f"compare: {without_lab(e, 'a study')}")

PLAIN = "plain"
FLAGS_WIDE = 70  # characters of a variant's flags in a line of a dry run


def by_name(variants):
    return {variant.name: variant for variant in variants}


def extend_grid(tried, tuned):
    """Add to {variant: {group: factors}} what lies beyond a best factor at the end of those tried.

    tuned: {variant: {group: {factor: bits/byte}}}.
    """
    for name, groups in tuned.items():
        for group, scores in groups.items():
            best = min(scores, key=scores.get)
            if best == min(tried[name][group]):
                tried[name][group].add(best / 2)
            elif best == max(tried[name][group]):
                tried[name][group].add(best * 2)


def scale_of(config):
    """What <scale> is in out/<study>-<scale>: the plain GPT's config, and its size where one is set."""
    scale = Path(config.base).stem if config.base else config.scale
    return f"{scale}-{config.size}" if config.size else scale


class Study:
    """A study: its variants, the runs that it consists of so far, and which are compared with each other.

    `builder` makes models on top of the plain GPT. Until tune() has found better rates, that is the plain GPT
    at the rates on file. From then on it is the one at its best rates, and the budgets and wider plain GPTs
    that are made later have them too. A stage plans its runs, has them run and reads their scores. With
    `place` None nothing runs: a stage then goes on with the scores that there are, or takes the first
    variants where there are none, so that a plan shows what would come.
    """

    training = train  # its steps are timed; lab/ imports no program

    def __init__(self, config, name):
        self.config, self.name = config, name
        self.scale = scale_of(config)
        self.out = Path(config.out_dir or Path("out", folder_name(config, name)))
        trials = self.out / "fresh" if config.fresh else trial.TRIALS
        if config.fresh and (left := [*trials.glob("*/result.json")]):
            many = plural(len(left), "finished run")
            print(f"--fresh goes on where it was stopped: {many} in {trials}; delete that folder to train "
                  "all once more", flush=True)
        of_other_code = OtherCode(trials=None) if config.fresh else OtherCode(config.accept_code)
        self.builder = VariantBuilder(config)
        self.variants = by_name(self.builder.variants())
        self.compared = {PLAIN: self.builder.plain}  # all that are judged: variants, budgets, baselines
        self.runs = Runs(config, self.builder.data, trials, of_other_code)
        self.pairs = []      # (variant, baseline, what is equal beside the hyperparameters)
        # {variant: MLP width of the plain GPT of its parameters, None: not made yet} of those that are
        # compared with one even if they do not seem better here, since they do on another text
        self.wider = {}
        self.tuned_on = None  # the text on which the best rates were found, where it is not this study's
        self.screened = None  # a records.Screen, once the first stage has chosen
        self.two_looks = None  # a records.TwoLooks, see effects.first_look()
        self.decided = []    # pairs, as pair_of() has them, that the first of two looks decided
        self.tuned = {}      # variant: {group: {factor: bits/byte on validation}}
        self.candidates = {}  # variant: [records.Candidate]

    # ---- the stages ----

    def run(self, place):
        """Screen, tune what is judged, judge it, compare winners with wider plain GPTs.

        place: of queue.py; None: plan alone, see the class.
        """
        c = self.config
        chosen = list(self.variants)
        if self.screens():
            variants = [self.builder.plain, *self.variants.values()]
            self.runs.execute(self.runs.plan("screen", variants, c.screen_seeds, "val"), place, "screening")
            chosen = self.choose()
        if c.tune_lr:
            self.tune(chosen, place)
        self.judge(chosen, place)
        if place is None and not c.report_only:
            return
        if c.match_parameters:
            self.match_parameters(place)

    def screens(self):
        """Whether a first stage is asked for and can leave a variant out."""
        c = self.config
        return c.screen and len(self.variants.keys() - self.named()) > c.best + c.worst

    def named(self):
        """The variants that are judged wherever they stand on validation, in order."""
        c = self.config
        named = [*c.always, *(name for names in c.contrasts for name in names if name != PLAIN)]
        return dict.fromkeys(named)

    def choose(self):
        """The variants to judge: the best and the worst on validation, those named, those contrasted."""
        c, scores = self.config, self.runs.scores("screen")
        means = {name: sum(own.values()) / len(own) for name, own in scores.items() if name in self.variants}
        ranked = sorted(means, key=means.get) or list(self.variants)  # none is known before the first run
        named = self.named()
        others = [name for name in ranked if name not in named]
        chosen = {*named, *others[:c.best], *others[max(c.best, len(others) - c.worst):]}
        self.screened = Screen(seeds=c.screen_seeds, split="val", scores=scores,
                               chosen=[name for name in self.variants if name in chosen],
                               rule=f"the best {c.best} and the worst {c.worst} on validation"
                                    + (f", and {', '.join(named)}" if named else ""))
        return self.screened.chosen

    def plain_seeds(self, n_variants):
        """The seeds of the plain GPT, which stands in every comparison: more than a variant has."""
        c, seeds = self.config, list(self.config.seeds)
        n = c.plain_seeds or round(len(seeds) * max(1, n_variants) ** 0.5)
        more = (seed for seed in itertools.count(max(seeds) + 1) if seed not in c.screen_seeds)
        return [*seeds, *(next(more) for _ in range(n - len(seeds)))]

    def judge(self, chosen, place):
        """Train the chosen with fresh seeds, the plain GPT with more of them and at the other budgets.

        In two looks, those that the first one leaves undecided have all of their seeds.
        """
        c = self.config
        variants = [self.variants[name] for name in chosen]
        budgets = [self.builder.at_budget(multiple) for multiple in c.budgets]
        self.compared.update(by_name([*budgets, *variants]))
        self.pairs += [(name, PLAIN, []) for name in chosen]
        self.pairs += [(one, other, []) for one, other in c.contrasts if PLAIN not in (one, other)]
        names = [each.name for each in (self.builder.plain, *variants, *budgets)]
        seeds, of_plain = c.seeds, self.plain_seeds(len(variants))
        if c.looks == 2:
            first, of_first = effects.first_half(seeds), self.first_of_plain(of_plain)
            self.two_looks = TwoLooks(spending=c.spending, look=1, seeds=seeds, first_seeds=first,
                                      plain_seeds=of_first, pairs=[])
            self.first_look(names, place)
            names = self.in_open_pairs(names)
            seeds, of_plain = ([seed for seed in every if seed not in done]
                               for every, done in ((seeds, first), (of_plain, of_first)))
        self.train(names, seeds, of_plain, place)

    def train(self, names, seeds, of_plain, place):
        """Train these of what is compared with these seeds, the plain GPT with its own."""
        folders = self.runs.plan("judge", [self.compared[name] for name in names], seeds)
        if PLAIN in names:
            more = [seed for seed in of_plain if seed not in seeds]
            folders += self.runs.plan("judge", [self.compared[PLAIN]], more)
        self.runs.execute(folders, place)

    # ---- two looks ----

    def first_of_plain(self, seeds):
        """The plain GPT's seeds at the first of two looks: the variants', and as many of its others."""
        first = effects.first_half(self.config.seeds)
        n = round(len(seeds) * len(first) / len(self.config.seeds))
        others = [seed for seed in seeds if seed not in self.config.seeds]
        return [*first, *others[:n - len(first)]]

    def first_look(self, names, place):
        """Train the first half of the seeds and judge by them; what is better meets its wider plain GPT.

        Until all of these runs have ended nothing is decided, and the study is at its first look. A plan has
        both looks whole, also where runs are done: the same command has the same seeds in --minutes then.
        """
        plan = self.two_looks
        self.train(names, plan.first_seeds, plan.plain_seeds, place)
        if place is None:
            return
        if self.config.match_parameters:
            better = [row.variant for row in self.rows_of_first_look() if row.verdict == "better"]
            self.meet_wider(better)
            self.train([each.name for each in self.baselines()], plan.first_seeds, [], place)
        rows = self.rows_of_first_look()
        self.decided = [effects.pair_of(row.variant, row.baseline, row.equal) for row in rows
                        if row.verdict != "undecided"]
        left = len(self.open_pairs())
        plan.look = 2 if rows and left else 1
        if rows:
            print(f"look 1 of 2: {len(self.decided)} of {len(self.pairs)} comparisons are decided"
                  + ", the others go on" * bool(left), flush=True)

    def rows_of_first_look(self):
        """All comparisons that there are, as the first look judges them; [] before its runs have ended."""
        c, plan = self.config, self.two_looks
        plan.pairs = [*self.pairs]
        folders = [folder for (stage, *_), folder in self.runs.folders.items() if stage == "judge"]
        if not self.runs.ended(folders):
            return []
        return effects.first_look(self.runs.scores("judge"), plan, c.alpha, c.margin,
                                  results.failures_of(self))

    def open_pairs(self):
        """The pairs that the first look left undecided, and those that were made after it."""
        return [pair for pair in self.pairs if effects.pair_of(*pair) not in self.decided]

    def in_open_pairs(self, names):
        """Of these names, and of the wider plain GPTs, those in a pair that is open; the plain GPT's budgets
        go with it.
        """
        in_pairs = {name for pair in self.open_pairs() for name in pair[:2]}
        names = dict.fromkeys([*names, *(each.name for each in self.baselines())])
        return [name for name in names if name in in_pairs
                or PLAIN in in_pairs and self.compared[name].kind == "budget"]

    # ---- equal parameters ----

    def seem_better(self):
        """The variants whose interval lies below the plain GPT, by the runs that are done."""
        c, pairs = self.config, self.open_pairs()
        return effects.seem_better([self.runs.scores("judge")], pairs, c.alpha, c.margin)

    def match_parameters(self, place):
        """Compare each variant that seems better with a plain GPT of as many parameters."""
        if not self.two_looks:
            self.meet_wider({*self.wider, *self.seem_better()})
            self.train([each.name for each in self.baselines()], self.config.seeds, [], place)
        elif self.two_looks.look == 2:
            self.meet_wider(self.seem_better())
            open_ones = [name for name in self.in_open_pairs([]) if self.compared[name].kind == "baseline"]
            self.train(open_ones, self.config.seeds, [], place)

    def meet_wider(self, named):
        """Pair these variants with a plain GPT of as many parameters, made where there is none yet."""
        for name in [name for name, other, equal in self.pairs
                     if name in named and other == PLAIN and not equal]:
            width, variant = self.wider.get(name), self.compared[name]
            baseline = (self.builder.wide(width) if width else
                        self.builder.same_parameters(variant, self.baselines()))
            if baseline is None:
                say(f"{name} has fewer parameters than any plain GPT of this size", file=sys.stderr)
                continue
            self.compared.setdefault(baseline.name, baseline)
            if baseline.name != PLAIN and (name, baseline.name, ["parameters"]) not in self.pairs:
                self.pairs.append((name, baseline.name, ["parameters"]))

    def widths(self):
        """{variant: MLP width of the plain GPT of its parameters} of those that meet one."""
        return {name: self.compared[baseline].model.n_inner for name, baseline, equal in self.pairs
                if equal == ["parameters"]}

    def baselines(self):
        """The plain GPTs that were made for a variant, wider ones."""
        return [variant for variant in self.compared.values() if variant.kind == "baseline"]

    def tune(self, chosen, place):
        """Give the plain GPT and the chosen their own best rates before they are judged: a grid.

        Runs have the full number of steps and seeds of the first stage, and are scored on validation. First
        each group of RATES is moved by itself, with one seed, by factors of 0.5, 1 and 2. Where the best is
        the smallest or the largest factor tried, the next one beyond it is tried too, twice at most. Then
        take_best_rates() decides. Without variants this is the search for the plain GPT's rates.
        """
        variants = [self.builder.plain, *(self.variants[name] for name in chosen)]
        groups, seed = {variant.name: variant.groups() for variant in variants}, self.config.screen_seeds[:1]
        tried = {name: {group: {0.5, 1.0, 2.0} for group in own} for name, own in groups.items()}
        for _ in range(3):
            folder_at = {}
            for variant in variants:
                name = variant.name
                for group, factor in ((g, f) for g in groups[name] for f in sorted(tried[name][g])):
                    changed = variant.at_rates({group: factor}, f"{name}, {group} x {factor:g}")
                    folder_at[name, group, factor], = self.runs.plan("tune", [changed], seed, "val")
            folders = list(dict.fromkeys(folder_at.values()))
            self.runs.execute(folders, place, "learning rates")
            scores = {key: result["bpb"] for key, folder in folder_at.items()
                      if (result := self.runs.result(folder))}
            self.tuned = {}
            for (name, group, factor), bpb in scores.items():
                self.tuned.setdefault(name, {}).setdefault(group, {})[factor] = bpb
            if not self.runs.ended(folders):
                return
            extend_grid(tried, self.tuned)
            for group in groups[PLAIN]:  # what is tried for a variant is tried for the plain GPT
                tried[PLAIN][group].update(*(own[group] for own in tried.values() if group in own))
        self.take_best_rates(variants, place)

    def runs_to_tune(self):
        """(runs of the first round of tune(), those that may follow at most), each as names of variants.

        Of what is judged, or would be. After the first round each group of rates gets two more factors at
        most, of the plain GPT's own four, since it is tried at the variants' too. Then come the candidates;
        those that move one group have been run with the first seed.
        """
        groups = {name: self.compared[name].groups()
                  for name in dict.fromkeys([PLAIN, *(name for name, other, _ in self.pairs)])}
        of_variants = {group for name, own in groups.items() if name != PLAIN for group in own}
        first, more, seeds = [], [], len(self.config.screen_seeds)
        for name, own in groups.items():
            first += [name] * (1 + 2 * len(own))
            factors = sum(4 if name == PLAIN and group in of_variants else 2 for group in own)
            candidates = (seeds - 1) * (1 + len(own)) + seeds * (len(own) > 1)
            more += [name] * (factors + candidates)
        return first, more

    def may_follow(self):
        """The runs that tune() may add to those planned, at most, as names of variants."""
        if not self.config.tune_lr or self.candidates:
            return []
        first, more = self.runs_to_tune()
        tuning = {folder for (stage, *_), folder in self.runs.folders.items() if stage == "tune"}
        return [*first, *more][len(tuning):]

    def at_most(self):
        """The runs of all stages as names of variants: of tune() at most, however many of them are done."""
        names = {folder: name for (stage, name, _), folder in self.runs.folders.items() if stage != "tune"}
        tuning = itertools.chain(*self.runs_to_tune()) if self.config.tune_lr else ()
        return [*names.values(), *tuning]

    def untuned(self):
        """The records.Untuned of a study whose rates are not tuned; None: they are.

        rates: {variant: {flag: learning rate of the weights that it adds}}; runs: how many --tune_lr would
        train to find the best ones, at least and at most.
        """
        judged = [name for name, other, equal in self.pairs if other == PLAIN and not equal]
        if self.config.tune_lr or self.tuned_on or not judged:
            return None
        first, more = self.runs_to_tune()
        return Untuned(rates={name: self.compared[name].rates_of_its_own() for name in judged},
                       runs=[len(first), len(first) + len(more)])

    def take_best_rates(self, variants, place):
        """Decide on each variant's rates, by runs with all seeds of the first stage.

        The candidates: the rates as they are; for each group, its best factor alone; the best factors of all
        groups together. One seed's best of six is luck in part, and what is good by itself may be bad
        together: the plain GPT's best two were.
        """
        tried, seeds = {}, self.config.screen_seeds
        for variant in variants:
            best = {group: min(scores, key=scores.get)
                    for group, scores in self.tuned.get(variant.name, {}).items()}
            moved = {group: factor for group, factor in best.items() if factor != 1}
            tried[variant.name] = [{}, *({group: factor} for group, factor in moved.items())]
            if len(moved) > 1:
                tried[variant.name].append(moved)
        at = {(variant.name, i): variant.at_rates(rates, f"{variant.name}, candidate {i}")
              for variant in variants for i, rates in enumerate(tried[variant.name])}
        folders = self.runs.plan("tune", at.values(), seeds, "val")
        self.runs.execute(folders, place, "best rates")
        if not self.runs.ended(folders):
            return
        scores = self.runs.scores("tune")
        self.candidates = {name: [Candidate(rates=rates, bpb=scores.get(at[name, i].name, {}))
                                  for i, rates in enumerate(each)] for name, each in tried.items()}
        taken = effects.best_rates(self.candidates)
        factors = {name: each[taken[name]] for name, each in tried.items()}
        flags = self.builder.plain.at_rates(factors.pop(PLAIN), PLAIN).flags
        self.builder = VariantBuilder(self.config, flags)
        self.compared = {PLAIN: self.builder.plain}
        self.variants.update(by_name(variant.at_best_rates(factors[variant.name], self.builder.plain)
                                     for variant in variants[1:]))


# ---- command line ----

def plan_of(study):
    """What a study consists of, as text: every variant with its cost, how many runs are left, how long."""
    c = study.config
    slots = queue.Slots(c.jobs, c.device, c.jobs_per_gpu)
    variants = {**study.variants, **study.compared}
    device = pick_device(c.device)
    plain, sizes = study.builder.plain, study.builder.data.splits
    scored = c.test_tokens or sizes[c.split]["tokens"]
    seconds = costs.seconds_per_run(plain, device, slots.threads, train, scored, sizes["val"]["tokens"])
    rows = []
    for variant in variants.values():
        own = SimpleNamespace(**results.sizes_of(variant, device))
        rows += with_flags((variant.name, f"{own.params:,}", f"{own.steps:,}",
                            findings.short(effects.training_flops(own))), variant.flags)
    names, left = folders_of(study)
    left, more = [names[folder] for folder in left], study.may_follow()

    def length(names):
        return findings.duration(in_runs_of_plain(study, names) * seconds / slots.count)

    notes = [f"{plural(len(names), 'run')}, {len(left):,} of them to do, in {study.runs.trials}"
             + f"; then at most {len(more):,} more, until the best rates are known" * bool(more),
             *([findings.reused_sentence(study.runs.reused(), len(names))] if study.runs.taken else []),
             *([refused_sentence(study.runs.refused.values())] if study.runs.refused else []),
             f"about {length(left)}{f', at most {length([*left, *more])}' if more else ''}, {slots.count} at "
             f"once, if each took as long as the plain GPT's here, {seconds:,.0f} s; what the others take: "
             "bench.py --mechanisms"]
    if slots.per_gpu > 1:
        notes.append(f"{slots.per_gpu} runs share a GPU, and each takes longer than alone: not in the hours")
    if study.two_looks:
        first = {*study.two_looks.first_seeds, *study.two_looks.plain_seeds}
        later = {folder for (stage, _, seed), folder in study.runs.folders.items()
                 if stage == "judge" and seed not in first}
        notes.append(f"two looks: {len(later):,} of these runs are of the second one, which trains only what "
                     "the first one leaves undecided")
    if study.screens():
        notes.append("which are judged is known after the screening; here it is taken for the first ones")
    if untuned := study.untuned():
        planned = SimpleNamespace(arms=study.compared, settings=study.builder.settings)
        rates = findings.rates_in_words(planned, untuned.rates)
        (least, most), (first, more) = untuned.runs, study.runs_to_tune()
        notes.append(f"no learning rate is tuned: {rates}; --tune_lr looks for the best ones first, in "
                     f"{least} to {most} runs more, {length(first)} to {length([*first, *more])}")
    head = ("variant", "parameters", "steps", "training FLOPs", "flags")
    return "\n".join([table(head, rows, left=(0, 4)), *notes])


def expectations(study, text=None):
    """What a planned study would find, and what it does not measure, as lines; text: of several the first."""
    if not (lines := power.expected(study)):
        return []
    first = f"On {text} alone: {lines[0]}" if text else lines[0]
    return [first, *lines[1:], *([] if study.config.budgets else [findings.NO_BUDGETS])]


def folders_of(study):
    """({folder: name of its variant} of the runs that a study has planned, those that are to be done)."""
    names = {folder: name for (_, name, _), folder in study.runs.folders.items()}
    return names, [folder for folder in names if study.runs.result(folder) is None]


def in_runs_of_plain(study, names):
    """How many runs of the plain GPT, counted in steps, the runs of these variants amount to."""
    plain, variants = study.builder.plain, {**study.variants, **study.compared}
    return sum(variants.get(name, plain).train.max_iters for name in names) / plain.train.max_iters


def within_minutes(config, name):
    """(the study in config.minutes, a line about what was left out of it), see budget.fitted().

    Runs that are done count as if they were to be done, so that the same command is the same study when it
    goes on, and a script that tries one mechanism after the other has the same seeds and steps for each.
    """
    if config.texts:
        raise UserError("minutes is for a study on one text: leave out texts")
    slots, study = queue.Slots(config.jobs, config.device, config.jobs_per_gpu), Study(config, name)
    plain, splits = study.builder.plain, study.builder.data.splits
    config = replace(config, screen=study.screens())  # else it would be named among what is left out
    device = pick_device(config.device)
    probed = costs.probe(plain, device, slots.threads, train)
    test_tokens = config.test_tokens or splits[config.split]["tokens"]

    def seconds(smaller):
        planned = Study(smaller, name)
        planned.run(None)
        # a wider plain GPT for each variant that may seem better is counted too
        runs = in_runs_of_plain(planned, planned.at_most())
        runs += smaller.match_parameters * len(planned.variants) * len(smaller.seeds)
        one_run = costs.seconds_per_run(planned.builder.plain, device, slots.threads, train, test_tokens,
                                        splits["val"]["tokens"], probed)
        return runs * (one_run + costs.SECONDS_BESIDE_STEPS) / slots.count

    return budget.fitted(config, seconds, plain.train.max_iters)


def plans(config, name):
    """plan_of() a study, and what else is to be known before it runs, as lines. UserError."""
    notes, study = check_parts(config), planned(config, name)
    lines = [plan_of(study), *expectations(study, *config.texts[:1])]
    if config.texts[1:]:
        lines.append(f"What is judged is trained again on {', '.join(config.texts[1:])}.")
    return [*lines, *notes]


def planned(config, name):
    """The Study, planned and not run; of several texts, on the first of them."""
    study = Study(on_text(config, *config.texts[:1] or [None]), name)
    study.run(None)
    return study


def print_expectations(config, name):
    """What the runs of a study that are to do would find."""
    # not as --fresh: that is said once, by the study itself
    study = planned(replace(config, fresh=False), name)
    if config.fresh or folders_of(study)[1]:
        for line in expectations(study, *config.texts[:1]):
            say(line, flush=True)


def plan_without_data(config, missing):
    """What a study compares where its data is missing, which everything else follows from, as text."""
    rows = [(PLAIN, "")]
    for name, flags in variants_of(config).items():
        rows += with_flags((name,), flags)
    rows += [(f"plain x {multiple:g}", "") for multiple in config.budgets]
    return (f"{table(('variant', 'flags'), rows, left=(0, 1))}\n"
            f"{missing}; then plan shows parameters, FLOPs, runs and time too")


def with_flags(cells, flags):
    """Rows of a table: these cells and a variant's flags, of which every FLAGS_WIDE characters take a row."""
    lines = textwrap.wrap(" ".join(f"{key}={value}" for key, value in flags.items()), FLAGS_WIDE,
                          break_long_words=False, break_on_hyphens=False) or [""]
    return [(*cells, lines[0]), *((*("" for _ in cells), line) for line in lines[1:])]


def name_of(config, files):
    """A study's name: its config files', else that of its mechanisms and variants."""
    longest = LONGEST - len("-small-0.33M")  # which comes behind it
    if config.mechanism and not files:
        return joined(config.mechanism.split(","), "challenge", longest)
    names = [Path(file).stem for file in files]
    for name in [] if files else [*config.mechanisms, *config.variants]:
        names.append(re.sub(r"_?\*", "-all", name).lstrip("-"))
    return joined(names or [PLAIN], longest=longest)


def folder_name(config, name):
    """What the folder of a study of this name is called, out/<study>-<scale>, without a number."""
    return joined([f"{name}-{scale_of(config)}"])


# keys of a study that change none of its figures: how it runs, and what counts as done
NOT_ASKED = {"question", "first", "out_dir", "jobs", "jobs_per_gpu", "device", "dry_run", "report_only",
             "accept_code", "fresh", "rescore", "from_results", "recheck", "tables", "scores", "baseline",
             "higher_is_better", "target", "json"}


def asked_for(config):
    """{key: value} of what makes a study another one, from a StudyConfig as a dict."""
    defaults, config = (json.loads(json.dumps(json_safe(each))) for each in (asdict(StudyConfig()), config))
    return {key: value for key, value in config.items()
            if key in defaults and key not in NOT_ASKED and value != defaults[key]}


def asked_in(folder):
    """What was asked for in a study's folder, as asked_for(); None: its results do not say."""
    try:
        return asked_for(results.read(folder / "results.json.gz").config or {})
    except UserError:
        return None


def default_folder(config, name):
    """(out_dir for a study that gives none, a line about it or None)."""
    return find(folder_name(config, name), asked_for(asdict(config)), ["results.json.gz"], asked_in)


def place_for(config):
    return queue.Processes(config.jobs, config.device, config.jobs_per_gpu)


def finished(study, command):
    """Run a study and write its results; the results."""
    study.out.mkdir(parents=True, exist_ok=True)  # refused now rather than after the last run
    study.run(place_for(study.config))
    return written(study, command)


def written(study, command):
    """Write the results of a study's runs so far; the results."""
    own = replace(results.collect(study, command), **looks.beside(study))
    results.write(own, study.out)
    looks.keep(study, own)
    return own


def on_text(config, text, **keys):
    """The config of a study on one of its texts; None: on its scale's."""
    settings = {**config.settings, **({"dataset": text} if text else {})}
    return replace(config, **{"texts": [], "settings": settings, **keys})


def config_of_what_was_judged(study, config):
    """The config for other texts: what the study on the first one judged, at the rates that it found."""
    variants = {each.name: each.flags for each in study.compared.values() if each.kind == "variant"}
    return replace(config, settings=study.builder.settings, variants=variants, mechanisms=[], always=[],
                   mechanism=None, screen=False, tune_lr=False)


def on_texts(config, name, command):
    """(results, Study of each): on the first of its texts, what that judged on the others, and all together.

    What seems better on the first text or over all of them meets the same wider plain GPT on each.
    """
    out = Path(config.out_dir)
    texts = {Path(text).name: text for text in config.texts}
    studies, written_on, first = {}, {}, None
    for short, text in texts.items():
        own = config_of_what_was_judged(first, config) if first else config
        study = Study(on_text(own, text, out_dir=str(out / short)), name)
        if first:
            study.wider = first.widths()
            study.tuned_on = first.builder.data.meta["name"] if first.candidates else None
        studies[short], written_on[short] = study, finished(study, command)
        first = first or study
    while config.match_parameters and (more := {*effects.seem_better_over_texts(written_on)} -
                                       {*first.wider, *first.widths()}):
        first.wider.update(dict.fromkeys(more))  # no width yet: that of the first text is made there
        for short, study in studies.items():
            study.wider.update(first.widths())
            study.match_parameters(place_for(study.config))
            written_on[short] = written(study, command)
    whole = replace(effects.together(written_on, name, command), config=json_safe(asdict(config)),
                    **effects.progress(*written_on.values()))
    whole = as_read(whole)
    results.write(whole, out)
    return whole, [*studies.values()]


def check_parts(config):
    """UserError, before anything runs, where a text cannot be had, or a mechanism looks ahead.

    Returns what is known of its mechanisms that does not stop it, as lines.
    """
    notes = promises.refuse_broken(variants_of(config))
    for text in config.texts[1:]:
        VariantBuilder(on_text(config, text)).variants()
    return notes


def keep_file(config, out):
    """The file of a study's own mechanism, into its report's folder: it can be run again elsewhere."""
    for cls, file in own_mechanism.ADDED.items():
        if any(flags.get(cls.flag) for flags in variants_of(config).values()):
            own_mechanism.copy(file, out)


def check_places(config):
    """UserError, before anything is read or run, where the report or the file of --json cannot be written."""
    writable_folder(config.out_dir or "out", "--out_dir")
    if config.json:
        writable(config.json)


# ---- what this program does; run() picks one, see lab/study/commands.py ----

def write_tables(config):
    """report --tables: the tables in README.md and docs/, from results/."""
    print(*tables.write() or ["every table is as results/ has it"], sep="\n")


def recheck(config):
    """recheck: whether every figure of a results file is what its runs give."""
    if found := task_study.read(config.recheck):
        return say(task_study.recheck(found, config.recheck))
    say(results.recheck(config.recheck))


def compare_scores(config):
    """scores: verdicts on the runs of another program."""
    path = Path(config.scores)
    check_places(config)
    study = score_file.study_of(score_file.read(path), path.name, config.baseline, config.alpha,
                                config.margin, config.higher_is_better, config.target)
    report_of(study, config.out_dir or Path("out", joined([f"{path.stem}-report"])), config.json)


def report_of(found, out, json_file):
    """Print and write the report of a study, of whatever scores, and its verdicts for a program."""
    report.write_all(found, out)
    if json_file:
        write_json(json_file, findings.verdicts(found))
        say(json_file)


def report_once_more(config):
    """report FILE: the report of a results file, without its runs."""
    path = Path(config.from_results)
    check_places(config)
    out = config.out_dir or Path("out", joined([f"{path.name.split('.')[0]}-report"]))
    if not (of_tasks := task_study.read(path)):
        found = results.read(path)
        say_if_not_as_computed(lambda: results.recheck(path, complain=False))
        return report_of(found, out, config.json)
    say_if_not_as_computed(lambda: task_study.recheck(of_tasks, path))
    task_report.write_all(of_tasks, out)
    if config.json:
        task_study.write_verdicts(of_tasks, config.json)
        say(config.json)


def say_if_not_as_computed(recheck):
    """Print what recheck() returns, or in one line that some figures do not follow from their runs."""
    try:
        say(recheck(), flush=True)
    except UserError as e:
        first, *more = str(e).splitlines()
        also = f" and {len(more):,} more" if more else ""
        say(f"NOT AS COMPUTED: {first}{also}; --recheck names them, and what follows is as the file has it",
            flush=True)


def run_tasks(config, name, command):
    """--task: a study of tasks, see lab/study/task_study.py."""
    check_places(config)
    for line in promises.refuse_broken(variants_of(config)):
        say(line, flush=True)
    out = Path(config.out_dir or Path("out", folder_name(config, f"tasks-{name}")))
    out.mkdir(parents=True, exist_ok=True)
    study = task_study.TaskStudy(config, name)
    study.run(place_for(config))
    found = study.collect(command)
    task_study.write(found, out, config.json)
    task_report.write_all(found, out)
    keep_file(config, out)
    say_failures(sum(len(each["failures"]) for each in found["tasks"].values()))


def show_plan(config, name):
    """plan: what a study would train, and for how long."""
    if config.task:
        return say(*task_study.plan_in_words(task_study.TaskStudy(config, name), train))
    try:
        if config.minutes:
            config, line = within_minutes(config, name)
            print(line)
        say(*plans(config, name))
    except NotPrepared as e:
        say(plan_without_data(config, e))


def run_study(config, name, command):
    """Train what is not done, judge, write the report; returns the results, as results.json.gz has them.

    command: what the report says made it. Raises UserError.
    """
    check_places(config)
    if config.minutes:
        config, line = within_minutes(config, name)
        print(line, flush=True)
    if notes := check_parts(config):
        say(*notes, flush=True)
    if config.out_dir is None:
        out, line = default_folder(config, name)
        config = replace(config, out_dir=str(out))
        if line:
            say(line, flush=True)
    if not config.report_only:
        place_for(config)  # what it refuses is refused before a line is printed
        print_expectations(config, name)
    if config.texts:
        found, studies = on_texts(config, name, command)
    else:
        studies = [Study(config, name)]
        found = finished(studies[0], command)
    out = Path(config.out_dir)
    report.write_all(found, out)
    keep_file(config, out)
    print(results.leaks_looked_for(found))
    if config.fresh:
        print(agreement([study.runs for study in studies]))
        for study in studies:
            study.runs.take_into_trials()
    if config.json:
        write_json(config.json, findings.verdicts(found))
        say(config.json)
    say_failures(results.failures_in(found))
    return found


def say_failures(failures):
    """End the program where so many runs failed, if any did."""
    if failures:
        them = "it" if failures == 1 else "them"
        sys.exit(f"compare: {plural(failures, 'run')} failed, the report names {them}; "
                 f"start again to try {them} once more")


def run(argv):
    command, argv = commands.taken_apart(argv)
    asked = configurator.read((StudyConfig,), argv)
    if asked.wants_help and not (asked.files or asked.settings):
        print(commands.help_of(command, __doc__))
        raise SystemExit(0)
    own_mechanism.take(asked, keep="out/mechanisms")
    (config,), _ = configurator.made(asked, __doc__)
    for key, program in (("tables", write_tables), ("recheck", recheck), ("scores", compare_scores),
                         ("from_results", report_once_more)):
        if getattr(config, key):
            return program(config)
    name = name_of(config, asked.files)
    if config.dry_run:
        return show_plan(config, name)
    command = shlex.join(["python", "compare.py", *asked.words(but=["report_only"])])
    (run_tasks if config.task else run_study)(config, name, command)


@as_program("compare")
def main(argv=None):
    answer_interrupts()
    # so that SIGTERM and a closed terminal, but for nohup's, stop the runs before they end this program
    signals = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    signals = [each for each in signals if signal.getsignal(each) != signal.SIG_IGN]
    before = {each: signal.signal(each, signal.default_int_handler) for each in signals}
    try:
        run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        print("\ncompare: stopped; what is done is kept, and the same command goes on", file=sys.stderr)
        sys.exit(130)
    except UserError as e:
        sys.exit("\n".join(f"compare: {line}" for line in str(e).splitlines()))
    except Exception as e:
        problem = explain(e) if isinstance(e, OSError) else fault_of_own_file(e)
        if problem is None:
            raise
        sys.exit(f"compare: {problem}")
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


if __name__ == "__main__":
    main()
