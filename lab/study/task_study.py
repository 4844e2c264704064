"""
A study of tasks: which mechanisms learn what the plain GPT does not, over seeds, with a verdict for each.

    python compare.py --task=recall --mechanisms=sink,fox      # one task
    python compare.py --task=all config/studies/tasks.py       # all of them
    python compare.py --task=recall --mechanisms=fox --tune_lr # and at each one's best rates

A run's score is the share of answers that are right on fresh rows, the mean over the levels of its task; and
beside it the step from which on LEARNED of them are. The verdicts are those of permutation.py, corrected over
all comparisons of the study. With tune_lr what differs at the shared rates is looked at once more: a grid
over Muon's and AdamW's rate, for the plain GPT too, and then the best rates of each, judged with fresh seeds.

How the table, the pictures and the words look is task_report.py; a run is trial.py's.
"""

import gzip
import math
import statistics
import zlib
from dataclasses import asdict, replace
from pathlib import Path

from nanoheads.common import (UserError, from_json, git_commit, json_safe, pick_device, plural, read_whole,
                              write_json)
from nanoheads.tasks import LEARNED, TASKS
from lab.study import costs, findings, permutation, queue, results, trial
from lab.study.records import NotThatRecord, TasksResults, as_json, as_record
from lab.study.runs import OtherCode, Runs, refused_sentence, say_what_is_refused
from lab.study.variants import VariantBuilder

PLAIN = "plain"
GRID = (0.5, 1.0, 2.0)       # factors of Muon's rate, and of AdamW's
OF_ADAMW = ("adamw_lr", "embed_lr", "mechanism_lr")  # groups of variants.RATES that one factor moves
TWICE = 2                    # budgets of the control: as many times the steps


def names_of(asked):
    """The tasks that --task names, in the order of TASKS."""
    return [name for name in TASKS if name in asked or "all" in asked]


def seeds_of_plain(config, comparisons):
    """The plain GPT's seeds: so many that a verdict is possible at all, after Holm's correction.

    With five seeds against ten the smallest p is 1 in 3,003, and of 320 comparisons none could be shown.
    """
    n = len(config.seeds)
    count = config.plain_seeds or next(
        m for m in range(2 * n, 1000) if permutation.smallest_p(n, m) * comparisons <= config.alpha / 2)
    more = (seed for seed in range(1, 10_000) if seed not in (*config.seeds, *config.screen_seeds))
    return [*config.seeds, *(next(more) for _ in range(count - n))]


class OnTask:
    """One task of a study: its plain GPT, its variants and their runs."""

    def __init__(self, config, name, of_other_code):
        self.name = name
        self.config = replace(config, task=[name])
        self.builder = VariantBuilder(self.config)
        self.plain = self.builder.plain
        self.variants = {each.name: each for each in self.builder.variants()}
        self.twice = self.builder.at_budget(TWICE)
        self.runs = Runs(self.config, self.builder.data, trial.TRIALS, of_other_code)
        self.tuned = {}   # variant: {(Muon's factor, AdamW's): its runs, {acc, learned_from}, a list each}
        self.at_best = {}  # variant: the Variant at its best rates
        self.wider = {}    # variant: the plain GPT of as many parameters, of those that seem better

    @property
    def compared(self):
        return {PLAIN: self.plain, self.twice.name: self.twice, **self.variants}

    @property
    def arms(self):
        """All that is trained: what is compared with the plain GPT, and wider plain GPTs."""
        return {**self.compared, **{wide.name: wide for wide in self.wider.values()}}

    @property
    def against(self):
        """[(name, name of what it is compared with)]."""
        return [*((name, PLAIN) for name in self.compared if name != PLAIN),
                *((name, wide.name) for name, wide in self.wider.items())]

    def results(self, stage, variant):
        """{seed: result} of what is done of a variant in a stage."""
        return {seed: result for (at, name, seed), folder in self.runs.folders.items()
                if (at, name) == (stage, variant) and (result := self.runs.result(folder))}

    def scores(self, stage, variant):
        return [result["acc"] for result in self.results(stage, variant).values()]

    def pairs(self, stage):
        """[(variant, its scores, the plain GPT's)] of a stage, where both sides have one."""
        names = [name for name in self.compared if name != PLAIN]
        plain = self.scores(stage, PLAIN)
        found = [(name, self.scores(stage, name), plain) for name in names]
        return [each for each in found if each[1] and plain]

    def at_factors(self, variant, muon, adamw):
        """A variant with Muon's rate times one factor, and AdamW's rates times another."""
        factors = {"muon_lr": muon, **dict.fromkeys(OF_ADAMW, adamw)}
        own = [group for group in variant.groups() if group in factors]
        return variant.at_rates({group: factors[group] for group in own},
                                f"{variant.name}, muon x {muon:g}, adamw x {adamw:g}")


class TaskStudy:
    """All tasks of a study. With `place` None nothing runs, and what is planned can be counted."""

    def __init__(self, config, name):
        self.config, self.name = config, name
        of_other_code = OtherCode(config.accept_code)
        self.tasks = [OnTask(config, task, of_other_code) for task in names_of(config.task)]
        comparisons = sum(len(task.compared) - 1 for task in self.tasks)
        self.plain_seeds = seeds_of_plain(config, max(1, comparisons))

    @property
    def folders(self):
        return [folder for task in self.tasks for folder in dict.fromkeys(task.runs.folders.values())]

    def run(self, place):
        """Judge all at the shared rates; with tune_lr what differs there once more, at its best rates."""
        self.judge(place)
        if self.config.tune_lr:
            self.tune(place)

    def execute(self, place, what):
        """Run what is planned and not done, seed by seed over all tasks; place None: nothing."""
        if self.config.report_only or place:
            say_what_is_refused([each for task in self.tasks
                                 for each in task.runs.newly_refused(task.runs.folders.values())])
        if place is None or self.config.report_only:
            return
        todo = {}  # folder: its seed
        for task in self.tasks:
            for (_, _, seed), folder in task.runs.folders.items():
                if folder not in task.runs.taken and folder not in todo:
                    trial.make(task.runs.specs[folder])
                    todo[folder] = seed
        failed = queue.run_all(sorted(todo, key=todo.get), place, what)  # what is stopped is balanced
        for task in self.tasks:
            task.runs.failed |= failed.keys() & {*task.runs.folders.values()}

    def judge(self, place):
        for task in self.tasks:
            others = [each for each in task.compared.values() if each.name != PLAIN]
            task.runs.plan("judge", [task.plain], self.plain_seeds)
            task.runs.plan("judge", others, self.config.seeds)
        self.execute(place, "runs on tasks")
        if self.config.match_parameters:
            self.meet_wider(place)

    def meet_wider(self, place):
        """Train a plain GPT of as many parameters as each variant that seems better has, uncorrected."""
        for task in self.tasks:
            for name, scores, plain in task.pairs("judge"):
                better = statistics.mean(scores) > statistics.mean(plain)
                if name in task.variants and better and permutation.p_of(scores, plain) <= self.config.alpha:
                    wide = task.builder.same_parameters(task.variants[name], [*task.wider.values()])
                    if wide and wide.name != PLAIN:
                        task.wider[name] = wide
            wider = {wide.name: wide for wide in task.wider.values()}
            task.runs.plan("judge", wider.values(), self.plain_seeds)  # with fewer nothing could be shown
        self.execute(place, "plain GPTs of as many parameters")

    # ---- rates ----

    def to_tune(self):
        """{task: [names]}: what differs from the plain GPT at the shared rates, uncorrected."""
        return {task.name: [name for name, scores, plain in task.pairs("judge") if name in task.variants
                            and permutation.p_of(scores, plain) <= self.config.alpha] for task in self.tasks}

    def tune(self, place):
        """A grid over both rates for what differs, and for the plain GPT of its task; then fresh seeds.

        With one seed the best of nine pairs may be a lucky one: the plain GPT learned recall at it, then with
        fresh seeds in two of ten, and at the rates of its scale it does so in all of them.
        """
        names, seeds = self.to_tune(), self.config.screen_seeds
        grid = [(muon, adamw) for muon in GRID for adamw in GRID]
        tuned = [task for task in self.tasks if names[task.name]]
        for task in tuned:
            for name in (PLAIN, *names[task.name]):
                at = [task.at_factors(task.compared[name], *factors) for factors in grid]
                task.runs.plan("grid", at, seeds, "val")  # which rates are best no test row decides
        self.execute(place, "a grid of rates")
        for task in tuned:
            for name in (PLAIN, *names[task.name]):
                found = {}
                for factors in grid:
                    runs = runs_of(task, "grid", task.at_factors(task.compared[name], *factors).name)
                    if len(runs["acc"]) == len(seeds):
                        found[factors] = runs
                task.tuned[name] = found
                if len(found) == len(grid):
                    task.at_best[name] = replace(
                        task.at_factors(task.compared[name], *best_of(found)), name=name, label=name)
        fresh = [max(*self.plain_seeds, *self.config.screen_seeds) + i
                 for i in range(1, 1 + len(self.plain_seeds))]
        for task in tuned:
            if PLAIN not in task.at_best:
                continue
            task.runs.plan("best", [task.at_best[PLAIN]], fresh)
            others = [each for name, each in task.at_best.items() if name != PLAIN]
            task.runs.plan("best", others, fresh[:len(self.config.seeds)])
        self.execute(place, "at the best rates")

    # ---- what came of it ----

    def collect(self, command):
        """The study as a dict, which results.json.gz holds: all scores, runs, verdicts; see verdicts()."""
        tasks = {}
        for task in self.tasks:
            arms = {}
            for name, variant in task.arms.items():
                arms[name] = dict(flags=variant.flags, params=variant.params, steps=variant.train.max_iters,
                                  kind=variant.kind, judge=runs_of(task, "judge", name),
                                  best=runs_of(task, "best", name),
                                  what=what_runs(task, variant),
                                  best_flags=task.at_best[name].flags if name in task.at_best else None,
                                  what_best=what_runs(task, task.at_best.get(name)),
                                  grid=[dict(muon=muon, adamw=adamw, **runs)
                                        for (muon, adamw), runs in task.tuned.get(name, {}).items()])
            data = task.builder.data
            guesses = {str(level): data.guesses(self.config.split, level, trial.ROWS_OF_TASK)
                       for level in data.test_levels}
            runs = {folder.name: {**result, "spec": task.runs.specs[folder]}
                    for folder in dict.fromkeys(task.runs.folders.values())
                    if (result := task.runs.result(folder))}
            tasks[task.name] = dict(arms=arms, pairs=task.against, unit=data.task.unit, guesses=guesses,
                                    length=data.length, vocab_size=data.vocab_size, runs=runs,
                                    failures=failures_of(task), reused=as_json(task.runs.reused()))
        planned, done = len(self.folders), sum(len(each["runs"]) for each in tasks.values())
        found = dict(kind="tasks", name=self.name, question=self.config.question, command=command,
                     commit=git_commit(), config=asdict(self.config), alpha=self.config.alpha,
                     margin=self.config.margin, seeds=self.config.seeds, plain_seeds=self.plain_seeds,
                     planned=planned, done=done, finished=planned == done, tasks=tasks)
        found = json_safe(found)
        return {**found, "verdicts": verdicts(found)}


def best_of(found):
    """The factors of a grid whose runs are best: the most answers right on average, to 0.01; then learned
    first; then as near to the rates as they are as can be. found: {factors: {acc, learned_from}}.
    """
    def rank(factors):
        step = median_step(found[factors])
        return (-round(statistics.mean(found[factors]["acc"]), 2), math.inf if step is None else step,
                sum(abs(math.log2(f)) for f in factors))
    return min(found, key=rank)


def runs_of(task, stage, name):
    """{seeds, acc, learned_from, runs} of a variant in a stage, each a list over its seeds that are done."""
    results = task.results(stage, name)
    folders = {seed: folder for (at, other, seed), folder in task.runs.folders.items()
               if (at, other) == (stage, name)}
    return dict(seeds=[*results], acc=[each["acc"] for each in results.values()],
                learned_from=[each["learned_from"] for each in results.values()],
                runs=[folders[seed].name for seed in results])


def what_runs(task, variant):
    """{"model", "train", "score"} of a variant's trial.json, whatever the seed; None: there is no variant."""
    if variant is None:
        return None
    spec = task.runs.spec(variant, 0, task.config.split)
    return {**{key: spec[key] for key in ("train", "score")}, "model": without_seed(spec["model"])}


def without_seed(flags):
    return {key: value for key, value in flags.items() if key != "seed"}


def failures_of(task):
    rows = [dict(arm=name, seed=seed, stage=stage, why=trial.failure(folder), log=str(folder / "trial.log"))
            for (stage, name, seed), folder in task.runs.folders.items() if task.runs.result(folder) is None]
    return [row for row in rows if row["why"]]


def verdicts(found):
    """[{task, variant, baseline, stage, ...Comparison}] of a study's dict, corrected over each stage, by its
    scores.

    stage: "judge", at the shared rates; "best", at each one's best. learned, learned_plain: how many runs
    learned it; step, step_plain: the median step from which on, None where half of them did not.
    """
    rows = []
    for stage in ("judge", "best"):
        pairs = []
        for task, each in found["tasks"].items():
            for name, baseline in each["pairs"]:
                mine, other = (each["arms"][which][stage] for which in (name, baseline))
                if mine["acc"] and other["acc"]:
                    pairs.append((task, name, baseline, mine, other))
        compared = permutation.judge([(mine["acc"], plain["acc"]) for *_, mine, plain in pairs],
                                     found["alpha"], found["margin"])
        for (task, name, baseline, mine, plain), comparison in zip(pairs, compared):
            rows.append(dict(task=task, variant=name, baseline=baseline, stage=stage, **comparison._asdict(),
                             acc=statistics.mean(mine["acc"]), acc_plain=statistics.mean(plain["acc"]),
                             learned=count_learned(mine), learned_plain=count_learned(plain),
                             step=median_step(mine), step_plain=median_step(plain)))
    return json_safe(rows)


def count_learned(arm):
    return sum(acc >= LEARNED for acc in arm["acc"])


def median_step(arm):
    """The median over seeds of the step from which on a task is learned; None: half or more have none."""
    steps = sorted(math.inf if step is None else step for step in arm["learned_from"])
    middle = statistics.median(steps) if steps else math.inf
    return None if math.isinf(middle) else middle


# ---- once more ----

def recheck(found, where):
    """Compute every figure of a study's dict once more from its runs; a line. UserError: one differs."""
    wrong, count = [], 0
    for task, each in found["tasks"].items():
        for name, run in each["runs"].items():
            count += 1
            try:
                trial.check_figures(run, [nats for nats, _, _ in run["levels"].values()])
            except ValueError:
                wrong.append(f"{task}: run {name} has a figure that does not follow from its answers")
            if trial.folder_of(run["spec"]).name != name or run["spec"]["train"].get("task") != task:
                wrong.append(f"{task}: run {name} has the flags of another run")
        for name, arm in each["arms"].items():
            for stage in ("judge", "best"):
                mine = arm[stage]
                what = arm["what_best"] if stage == "best" else arm["what"]
                for run, seed, acc, step in zip(mine["runs"], mine["seeds"], mine["acc"],
                                                mine["learned_from"]):
                    count += 1
                    wrong += problems_of(each["runs"].get(run), what, seed + arm["flags"].get("seed", 0), acc,
                                         step, f"{task}: {name}, seed {seed}")
    again = verdicts(found)
    count += sum(len(row) for row in again)
    if again != found["verdicts"]:
        wrong += [f"{a['task']}: the verdict on {a['variant']} ({a['stage']}) is not what its scores give"
                  for a, b in zip(again, found["verdicts"]) if a != b] or ["verdicts are missing or too many"]
    if wrong:
        raise UserError("\n".join(f"{where}: {line}" for line in wrong))
    return f"{where}: {count:,} figures computed once more from its runs, all of them the same"


def problems_of(run, what, seed, acc, step, where):
    """Why a run is not what stands under its variant, as sentences."""
    if run is None:
        return [f"{where}: a score without its run"]
    of_run = {**run["spec"], "model": without_seed(run["spec"]["model"])}
    other = [f"{part}.{key}" for part in ("model", "train", "score")
             for key in {**what[part], **of_run[part]} if what[part].get(key) != of_run[part].get(key)]
    if run["spec"]["model"]["seed"] != seed:
        other.append("seed")
    if (run["acc"], run["learned_from"]) != (acc, step):
        other.append("score")
    return [f"{where}: its run has another {', '.join(other)}"] if other else []


# ---- what a study would take ----

def plan_in_words(study, training):
    """What a study consists of, and how long it takes, as lines. training: train.py's functions."""
    study.run(None)
    left = [folder for task in study.tasks for folder in dict.fromkeys(task.runs.folders.values())
            if task.runs.result(folder) is None]
    n, m = len(study.config.seeds), len(study.plain_seeds)
    comparisons = sum(len(task.compared) - 1 for task in study.tasks)
    lines = [f"{plural(len(study.tasks), 'task')}: {', '.join(task.name for task in study.tasks)}",
             f"{plural(len(study.tasks[0].variants), 'variant')} and a plain GPT trained twice as long, with "
             f"{plural(n, 'seed')} each against {m} of the plain GPT: {plural(comparisons, 'comparison')}, "
             f"of which the smallest p is {permutation.smallest_p(n, m):.2g}, "
             f"{min(1, comparisons * permutation.smallest_p(n, m)):.2g} corrected",
             f"{plural(len(study.folders), 'run')}, {len(left):,} of them to do, in {trial.TRIALS}"]
    if refused := [each for task in study.tasks for each in task.runs.refused.values()]:
        lines.append(refused_sentence(refused))
    c, first = study.config, study.tasks[0]
    slots = queue.Slots(c.jobs, c.device, c.jobs_per_gpu)
    step, token = costs.probe(first.plain, pick_device(c.device), slots.threads, training)
    config, data = first.plain.train, first.builder.data
    evaluations = 1 + config.max_iters // config.eval_interval
    scored = data.length * len(data.test_levels) * (evaluations * config.task_rows + trial.ROWS_OF_TASK)
    seconds = config.max_iters * step + scored * token + costs.SECONDS_BESIDE_STEPS
    lines.append(f"at most about {findings.duration(len(left) * seconds / slots.count)}, {slots.count} at "
                 f"once, if each took as long as all steps of the plain GPT here, {seconds:,.0f} s")
    if study.config.tune_lr:
        lines.append(f"then, for what differs, a grid of {len(GRID) ** 2} pairs of rates with "
                     f"{plural(len(study.config.screen_seeds), 'seed')} each, and fresh seeds at the best")
    return lines


def read(path):
    """The dict of a study of tasks in a results file, gzip'd or not; None: it is that of another kind, or
    cannot be read, which results.read() says. UserError: a part of it is missing or is of another type.
    """
    try:
        data = read_whole(Path(path))
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        found = from_json(data)
    except (OSError, ValueError, EOFError, zlib.error):
        return None
    if not isinstance(found, dict) or found.get("kind") != "tasks":
        return None
    try:
        as_record(TasksResults, found)
        if wrong := results.problem_of_config(found["config"]):
            raise NotThatRecord(wrong)
    except NotThatRecord as e:
        raise UserError(f"{path} is not what compare.py --task writes: {e}") from None
    return found


def write(found, out, json=None):
    """Write a study's dict as out/results.json.gz, and its verdicts into `json` where that is given."""
    Path(out).mkdir(parents=True, exist_ok=True)
    results.write(found, Path(out))
    if json:
        write_verdicts(found, json)


def write_verdicts(found, json):
    """Write what a study's dict says without its runs, for a program."""
    keys = ("kind", "name", "question", "command", "alpha", "margin", "planned", "done", "finished")
    write_json(json, {key: found[key] for key in (*keys, "verdicts")})
