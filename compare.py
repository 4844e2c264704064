"""
Does a mechanism beat a plain GPT? Runs over seeds, verdicts with intervals, a report.

    python compare.py --mechanism=mine.py                        # the challenge: is mine better?
    python compare.py config/studies/all.py                      # a study from its file
    python compare.py --mechanisms=unet_concat,unet_add          # without a file; unet_* is each that fits
    python compare.py --task=recall,copy --mechanisms=sink,fox   # what is learned of tasks
    python compare.py plan config/studies/all.py                 # what would run, and for how long
    python compare.py report results/all-tiny.json.gz            # a report once more, from its numbers alone
    python compare.py report config/studies/all.py               # the report of the runs that are done
    python compare.py recheck results/all-tiny.json.gz           # every figure of it, computed once more
    python compare.py scores scores.csv --baseline=plain         # verdicts on the runs of another program

Every run is kept in out/trials, under a hash of its flags, seed, data and the code that it can reach: start a
study again and it goes on where it stopped; change a flag or the code and what depends on it runs again.
--accept_code takes runs of other code too, for who knows that it computes the same. A config file is Python
code, and reading it runs it: name only files that you trust. --help: all keys.

A study flows one way: study/plan.py names the runs that it needs, study/queue.py trains those that are
missing, study/verdicts.py judges their scores, study/report.py says what came of it. This file parses, calls
and prints.
"""

import json
import platform
import re
import shlex
import sys
import textwrap
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import NamedTuple

import nanoheads.threads  # noqa: F401  before torch, whose threads it has wait briefly
from nanoheads import configurator, own_mechanism, usage
from nanoheads.common import (UserError, as_program, git_commit, json_safe, pick_device, plural, say, table,
                              writable, writable_folder, write_json)
from nanoheads.dataset import NotPrepared
from nanoheads.files import LONGEST, choose_folder, folders_named, name_of_words
from nanoheads.log import read_json
from nanoheads.timing import progress_bar
from study import records, scores
from study.config import SCORES_KEYS, StudyConfig, variants_of
from study.records import PLAIN, Failure, Result, Study, Variant, hash_of
from study.verdicts import compare_with_target, comparisons_of
from study.words import settings_in_words

RESULTS = "results.json.gz"
FLAGS_WIDTH = 70  # characters of a variant's flags in a line of a plan


# ---- the subcommands ----

class Command(NamedTuple):
    """A subcommand: its arguments, what it does, the keys that it takes (None: those of a study)."""
    usage: str
    about: str
    keys: tuple | None = None


FILE_KEYS = ("json", "out_dir")
COMMANDS = {
    "run": Command("[config.py] [--key=value ...]", "train what is not done, judge, write the report"),
    "plan": Command("[config.py] [--key=value ...]",
                    "print what would run, for how long, and what must be made first; nothing is trained"),
    "report": Command("FILE.json.gz | config.py [--key=value ...] | --tables",
                      "write the report of a results file once more, without its runs; or that of a study "
                      "from the runs that are done; with --tables the tables of README.md and docs/"),
    "recheck": Command("FILE.json.gz", "compute every figure of a results file once more, and compare", ()),
    "scores": Command("FILE.csv [--key=value ...]",
                      "judge the runs of another program; its columns, in any order: variant, seed (any "
                      "name), score (a number, or failed), and where they are known tokens, bytes, cost",
                      (*SCORES_KEYS, "alpha", "margin", *FILE_KEYS)),
}


def help_of(name, argv):
    """What these arguments of a subcommand, with --help or --help=KEY, ask for, as text. UserError."""
    study_keys = [key for key in configurator.keys_of((StudyConfig,)) if key not in SCORES_KEYS]
    lines = [__doc__.strip(), "", "---- subcommands; each has its own --help ----"] if name == "run" else []
    for subcommand, command in COMMANDS.items() if name == "run" else [(name, COMMANDS[name])]:
        lines.append(f"  python compare.py {subcommand} {command.usage}")
        lines += textwrap.wrap(command.about, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    keys = study_keys if COMMANDS[name].keys is None else COMMANDS[name].keys
    return usage.answer(argv, "\n".join(lines), (StudyConfig,), keys)


def one_file(name, argv):
    """(the file, the StudyConfig) of a subcommand that takes a file and keys behind it. UserError."""
    keys = COMMANDS[name].keys or FILE_KEYS if name != "recheck" else ()
    files, values = configurator.split(argv, configurator.keys_of((StudyConfig,)))
    if len(files) != 1:
        raise UserError(f"{name} takes one file, {COMMANDS[name].usage.split()[0]}: {len(files)} are given")
    if unknown := [key for key in values if key not in keys]:
        accepted = ", ".join(f"--{key}" for key in keys) or "no keys"
        raise UserError(f"{name} has no key {unknown[0]}: beside its file it takes {accepted}")
    (config,), _ = configurator.build_configs(configurator.Command((StudyConfig,), [], [], values))
    configurator.validate((config,))
    check_writable(config)
    return Path(files[0]), config


# ---- a study, from its plan to its records ----

def begin(stage):
    """Say which part of the work begins, on standard error: each may take minutes on a busy machine."""
    say(f"{stage} ...", file=sys.stderr, flush=True)


def outcomes_of(config, planner, train_missing):
    """({name of a run: Result or Failure}, {variant: how many of its runs other code made}) of all runs that
    a study needs, planned again until nothing new follows. Without train_missing, of the runs that are done.
    """
    from study import finished, queue, trial
    outcomes, other_code, seen_names = {}, {}, set()
    while True:
        plan = planner.plan(outcomes)
        new = [run for run in plan.runs if run.name not in outcomes]
        if config.fresh and train_missing:
            finished.set_aside([run for run in new if run.name not in seen_names])
            seen_names |= {run.name for run in new}
        on_disk = {run.name: trial.outcome(run) for run in new}
        # a run that failed is tried again, unless nothing is trained: then its failure is its outcome
        new_outcomes = {run: outcome for run, outcome in on_disk.items()
                        if isinstance(outcome, Result) or outcome and not train_missing}
        if config.accept_code:
            missing = [run for run in new if run.name not in new_outcomes]
            of_other_code = finished.results_of_other_code(missing)
            for run in new:
                if run.name in of_other_code:
                    other_code[run.variant] = other_code.get(run.variant, 0) + 1
            new_outcomes |= of_other_code
        missing = [run for run in new if run.name not in new_outcomes]
        if missing and train_missing:
            new_outcomes |= queue.execute(missing, config.jobs, config.device, config.jobs_per_gpu,
                                          STAGES[missing[0].stage])
        outcomes |= new_outcomes
        if not new_outcomes:
            return outcomes, other_code


STAGES = {"screen": "screening", "tune": "learning rates", "judge": "runs"}  # as the progress bar has them


def study_of(planner, outcomes, name, command, out, other_code):
    """The Study of a planner, as far as its runs have ended."""
    import torch
    from study import finished, queue
    out.mkdir(parents=True, exist_ok=True)
    config, plan = planner.config, planner.plan(outcomes)
    device = pick_device(config.device)
    slots = queue.find_slots(config.jobs, config.device, config.jobs_per_gpu)
    plain = plan.models[PLAIN]
    begin("counting FLOPs and timing steps")
    variants = [variant_of(model, plain, device, slots.threads, out)
                for model in progress_bar([*plan.models.values()], "costs")]
    data = {text: planner.models.data_on(text, plain.training, plain.config.block_size)
            for text in planner.texts}
    names = {run.name for run in plan.runs}
    planned = {name: outcome for name, outcome in outcomes.items() if name in names}
    made = dict(date=date.today().isoformat(), commit=git_commit(), torch=torch.__version__,
                python=platform.python_version(), processor=nanoheads.threads.processor(device),
                jobs=slots.count, threads=slots.threads)
    return Study(
        name=name, measure=planner.measure, variants=tuple(variants), pairs=plan.pairs, texts=planner.texts,
        runs=plan.runs, alpha=config.alpha, margin=config.margin, question=config.question, command=command,
        results={name: outcome for name, outcome in planned.items() if isinstance(outcome, Result)},
        failures={name: outcome for name, outcome in planned.items() if isinstance(outcome, Failure)},
        made=made, config=json_safe(asdict(config)), rates=plan.rates, untuned=untuned_of(config, plan),
        whole=whole_of(planner, data), guesses=guesses_of(planner, data), other_code=other_code,
        left_out=finished.seeds_left_out(plan.runs), notes=notes_of(plan, data))


def variant_of(model, plain, device, threads, out):
    """The Variant of a Model, with what it costs; the times of steps are measured once, and kept in `out`."""
    import train
    from study import costs
    if model.kind in ("plain", "budget"):
        time = (1.0, 1.0, 1.0)
    else:
        path = out / "clock.json"
        times = read_json(path) or {}
        key = hash_of([repr(model.config), repr(plain.config), asdict(model.training), device, threads])
        if key not in times:
            times[key] = costs.step_time(model, plain, device, threads, train)
            write_json(path, times)
        time = tuple(times[key])
    return Variant(name=model.name, kind=model.kind, flags=model.flags, params=model.params,
                   tokens=model.tokens, flops=costs.flops(model, device), time=time,
                   steps=model.training.max_iters, needed=model.counts.flops_per_token)


def untuned_of(config, plan):
    """{variant: {flag: rate}} of the weights that each variant adds, where no rate was tuned."""
    if config.tune_lr:
        return {}
    return {name: model.rates_of_its_own() for name, model in plan.models.items() if model.kind == "variant"}


def whole_of(planner, data):
    """The steps, tokens and {text: bytes} of a run of the scale that is not cut short; {}: of tasks."""
    if planner.config.task:
        return {}
    steps, tokens = planner.models.whole_run()
    return dict(steps=steps, tokens=tokens,
                bytes={text: dataset.splits[planner.config.split]["bytes"] for text, dataset in data.items()})


def guesses_of(planner, data):
    """{task: {level: the share of answers that guessing gets right}}."""
    if not planner.config.task:
        return {}
    from study.plan import ROWS_OF_TASK
    return {task: {str(level): max(task_data.guesses(planner.config.split, level, ROWS_OF_TASK).values())
                   for level in task_data.test_levels} for task, task_data in data.items()}


def notes_of(plan, data):
    """Notes on the plan and on the data, as sentences."""
    notes = [dataset.meta["note"] for dataset in data.values() if getattr(dataset, "meta", {}).get("note")]
    return (*plan.notes, *dict.fromkeys(notes))


# ---- what this program does ----

def run_study(config, name, command):
    """Train the runs that are missing, judge, write the report."""
    from study import finished, queue
    from study.plan import Planner
    check_writable(config)
    begin("planning")
    planner = Planner(config)
    # what cannot be made, or run here, is refused before there is a folder
    planner.plan({})
    queue.find_slots(config.jobs, config.device, config.jobs_per_gpu)
    for line in notes_on_promises(config):
        say(line, flush=True)
    out = folder_of(config, name)
    out.mkdir(parents=True, exist_ok=True)  # refused now rather than after the last run
    for file in own_mechanism.FILES.values():  # so that it can be run again elsewhere
        own_mechanism.copy(file, out)
    outcomes, other_code = outcomes_of(config, planner, train_missing=True)
    study = study_of(planner, outcomes, name, command, out, other_code)
    begin("judging")
    write_report(study, out, config)
    if config.fresh:
        say(finished.agreement_in_words(study.runs))
    exit_where_runs_failed(study)


def exit_where_runs_failed(study):
    """Exit with status 1 where runs of a study failed, once its report is written."""
    if study.failures:
        them = "it" if len(study.failures) == 1 else "them"
        sys.exit(f"compare: {plural(len(study.failures), 'run')} failed, the report names {them}; start "
                 f"the study again to try {them} once more")


def notes_on_promises(config):
    """refuse_broken() of nanoheads/promises.py, of one variant after the other."""
    from nanoheads import promises
    variants = [*variants_of(config).items()] if own_mechanism.FILES else []
    if variants:
        begin("trying what mechanisms of your own promise")
    return [line for name, flags in progress_bar(variants, "promises")
            for line in promises.refuse_broken({name: flags})]


def write_report(study, out, config):
    """Judge a study, write its results file, print its report and write it, also for a program."""
    from study import report  # which imports matplotlib
    comparisons, target_tests = comparisons_of(study), compare_with_target(study)
    Path(out).mkdir(parents=True, exist_ok=True)
    records.write(out / RESULTS, study, comparisons)
    report.write_all(study, comparisons, out, target_tests)
    if config.json:
        write_json(config.json, report.json_report(study, comparisons, target_tests, out))
        say(config.json)


def report_finished_runs(config, name, command):
    """The report of a study from the runs that are done."""
    from study.plan import Planner
    check_writable(config)
    begin("planning")
    planner, out = Planner(config), folder_of(config, name)
    outcomes, other_code = outcomes_of(config, planner, train_missing=False)
    study = study_of(planner, outcomes, name, command, out, other_code)
    if (n_on_file := scores_on_file(out / RESULTS)) > len(study.results):
        raise UserError(f"{out / RESULTS} has {plural(n_on_file, 'score')}, and of these runs "
                        f"{len(study.results):,} are done by this code: name another --out_dir, or report "
                        "that file")
    begin("judging")
    write_report(study, out, config)
    exit_where_runs_failed(study)


def scores_on_file(path):
    """How many runs a results file has the scores of; 0: it is none."""
    try:
        return len(records.read(path)[0].results)
    except UserError:
        return 0


def show_plan(config):
    """Print what a study would train, as far as that is known without scores, and for how long."""
    import train
    from study import costs, queue, trial
    from study.plan import Planner
    begin("planning")
    planner = Planner(config, needs_files=False)
    outcomes, _ = outcomes_of(config, planner, train_missing=False)
    plan = planner.foresee(outcomes)
    device = pick_device(config.device)
    slots = queue.find_slots(config.jobs, config.device, config.jobs_per_gpu)
    rows = []
    begin("counting FLOPs")
    for model in progress_bar([*plan.models.values()], "FLOPs"):
        cells = (model.name, f"{model.params:,}", f"{model.training.max_iters:,}",
                 f"{costs.flops(model, device):.3g}")
        rows += rows_with_flags(cells, model.flags)
    print(table(("variant", "parameters", "steps", "training FLOPs", "flags"), rows, left=(0, 4)))
    runs = {run.name: run for run in plan.runs}
    missing = [run for name, run in runs.items() if name not in outcomes]
    begin("timing the plain GPT")
    plain = plan.models[PLAIN]
    data = planner.models.data_on(planner.texts[0], plain.training, plain.config.block_size)
    scored_tokens, val_tokens = token_counts(config, data)
    seconds_per_run = costs.seconds_of_run(plain, device, slots.threads, train, scored_tokens, val_tokens)
    steps = sum(queue.steps_of(run) for run in missing) / plain.training.max_iters
    say(f"{plural(len(runs), 'run')}, {len(missing):,} of them to do, in {trial.TRIALS}",
        f"about {queue.time_in_words(seconds_per_run * steps / slots.count)}, {slots.count} at once, if each "
        f"took as long as the plain GPT's here, {seconds_per_run:,.0f} s; what the others take: bench.py "
        "--mechanisms")
    if config.screen or config.tune_lr:
        say("what is judged, and at which rates, follows from scores: more runs may follow")
    notes = [*dict.fromkeys(f"To be made first: {problem}" for problem in planner.not_made), *plan.notes]
    for line in (*notes, *notes_on_promises(config)):
        say(line)


def token_counts(config, data):
    """(tokens of the split that a run is scored on, tokens of validation) of a Dataset; (0, 0): of a task."""
    if config.task:
        return 0, 0
    splits = data.splits
    return config.test_tokens or splits[config.split]["tokens"], splits["val"]["tokens"]


def plan_without_data(config, missing):
    """What a study compares, as text, where its data is missing: the rest of a plan follows from the data.
    UserError: flags of a variant cannot be.
    """
    from study.models import Models
    models = Models(config)
    rows = [(PLAIN, ""), *((f"plain x {multiple:g}", "") for multiple in config.budgets)]
    for name, flags in variants_of(config).items():
        models.checked(name, flags)
        rows += rows_with_flags((name,), flags)
    return (f"{table(('variant', 'flags'), rows, left=(0, 1))}\n"
            f"{missing}; then plan shows parameters, FLOPs, runs and time too")


def rows_with_flags(cells, flags):
    """Rows of a table: these cells, and a variant's flags with at most FLAGS_WIDTH characters a row."""
    lines = textwrap.wrap(settings_in_words(flags), FLAGS_WIDTH, break_long_words=False,
                          break_on_hyphens=False) or [""]
    return [(*cells, lines[0]), *((*("" for _ in cells), line) for line in lines[1:])]


def report_file(path, config):
    """report FILE: the report of a results file, without its runs."""
    from study import report  # which imports matplotlib
    study, on_file = records.read(path)
    out = Path(config.out_dir or Path("out", name_of_words([f"{path.name.split('.')[0]}-report"])))
    with report_damage(path):
        comparisons, target_tests = comparisons_of(study), compare_with_target(study)
        problems = problems_of(study, on_file)
        report.write_all(study, comparisons, out, target_tests)
    if config.json:
        write_json(config.json, report.json_report(study, comparisons, target_tests, out))
        say(config.json)
    if problems:
        sys.exit(f"compare: {path} is NOT AS COMPUTED: {problems[0]}"
                 + f", and {len(problems) - 1:,} more" * (len(problems) > 1)
                 + "; the report is what its runs give")


def recheck(path):
    """recheck FILE: whether every figure of a results file is what its runs give."""
    study, on_file = records.read(path)
    with report_damage(path):
        problems = problems_of(study, on_file)
    if problems:
        more = [f"{path}: {len(problems):,} in all"] if len(problems) > 20 else []
        raise UserError("\n".join([*(f"{path}: {line}" for line in problems[:20]), *more]))
    say(f"{path}: {plural(len(on_file), 'comparison')} of {plural(len(study.runs), 'run')}, computed once "
        "more, all of them the same")


@contextmanager
def report_damage(path):
    """Inside, an error of computing with a results file becomes a UserError. JSON may have a name, a text or
    nothing in place of any number, which is too much to check for.
    """
    try:
        yield
    except UserError:  # a disk that refuses the report
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, StopIteration) as e:
        raise UserError(f"{path} is damaged: {type(e).__name__}, {e}") from e


def problems_of(study, on_file):
    """What is wrong with a results file, as lines: scores that do not follow from the counts, runs with other
    flags, comparisons that do not follow from the scores.
    """
    problems, variants = [], {variant.name: variant for variant in study.variants}
    for run in {run.name: run for run in study.runs}.values():
        result = study.results.get(run.name)
        if result and not scores.score_follows(result):
            problems.append(f"the score {result.score} of {run.variant}, seed {run.seed}, does not follow "
                            f"from what was counted ({run.name})")
        if run.stage == "judge" and "model" in run.spec and run.variant in variants:
            problems += [f"the run {run.name} of {run.variant} has another {key}"
                         for key in scores.differing_flags(run, variants[run.variant])]
    recomputed = json_safe([asdict(c) for c in comparisons_of(study)])
    if len(recomputed) != len(on_file):
        problems.append(f"{len(on_file)} comparisons, where its runs give {len(recomputed)}")
    on_file = {compared_in(c): c for c in on_file}
    for new in recomputed:
        name, old = f"{new['variant']} against {new['baseline']}", on_file.get(compared_in(new))
        if old is None:
            problems.append(f"{name}: its runs give this comparison, and the file does not have it")
            continue
        problems += [f"{name}: {key} is {old.get(key)}, where its runs give {new[key]}" for key in new
                     if not records.are_close(new[key], old.get(key))]
    return problems


def compared_in(comparison):
    """What is compared in a comparison of a results file: variant, baseline, texts, and what is equal."""
    return comparison["variant"], comparison["baseline"], (*comparison["texts"],), comparison["equal"]


def compare_scores(path, config):
    """scores FILE: verdicts on the runs of another program."""
    study = scores.from_csv(path, config.baseline, config.alpha, config.margin, config.higher_is_better,
                            config.target)
    study = replace(study, command=shlex.join(["python", "compare.py", "scores", str(path)]))
    write_report(study, Path(config.out_dir or Path("out", name_of_words([f"{path.stem}-report"]))), config)


def write_tables():
    """report --tables: the tables in README.md and docs/, from results/."""
    from study import docs_tables
    print(*docs_tables.write() or ["every table is as results/ has it"], sep="\n")


# ---- names and folders ----

def name_of(config, files):
    """A study's name: its config files', else that of its mechanisms and variants."""
    max_length = LONGEST - len("-small-0.33M")  # which comes behind it
    if config.mechanism and not files:
        return name_of_words(config.mechanism.split(","), "challenge", max_length)
    names = [Path(file).stem for file in files]
    for name in [] if files else [*config.mechanisms, *config.variants]:
        names.append(re.sub(r"_?\*", "-all", name).lstrip("-"))
    names = name_of_words(names or [PLAIN], longest=max_length)
    return f"tasks-{names}" if config.task else names


# keys of a study that change none of its figures: how it runs, and which runs count as done
NEUTRAL_KEYS = {"question", "first", "out_dir", "jobs", "jobs_per_gpu", "device", "accept_code", "fresh",
                "json"}


def identity_of(config):
    """{key: value} of the settings that distinguish one study from another, of a StudyConfig as a dict."""
    defaults, config = (json.loads(json.dumps(json_safe(each))) for each in (asdict(StudyConfig()), config))
    return {key: value for key, value in config.items()
            if key in defaults and key not in NEUTRAL_KEYS and value != defaults[key]}


def identity_in(folder):
    """identity_of() the study in a folder; None: its results do not say."""
    try:
        return identity_of(records.read(folder / RESULTS)[0].config)
    except UserError:
        return None


def folder_of(config, name):
    """The folder of a study's report; a line is printed where another study has its name."""
    if config.out_dir:
        return Path(config.out_dir)
    scale = Path(config.base).stem if config.base else config.scale
    default = name_of_words([f"{name}-{scale}" + (f"-{config.size}" if config.size else "")])
    identities = {path: identity_in(path) for path in folders_named(default, [RESULTS])}
    out, line = choose_folder(default, identity_of(asdict(config)), identities)
    if line:
        say(line, flush=True)
    return Path(out)


def check_writable(config):
    """UserError, before anything is read or run, where the report or the file of --json cannot be written."""
    writable_folder(config.out_dir or "out", "--out_dir")
    if config.json:
        writable(config.json)


# ---- the command line ----

def run(argv):
    """Do what a command line asks for. UserError."""
    command, argv = (argv[0], argv[1:]) if argv and argv[0] in COMMANDS else ("run", argv)
    if any(map(configurator.is_help, argv)):
        print(help_of(command, argv))
        sys.exit(0)
    if command == "recheck":
        return recheck(one_file(command, argv)[0])
    if command == "scores":
        return compare_scores(*one_file(command, argv))
    if command == "report" and argv == ["--tables"]:
        return write_tables()
    if command == "report" and any(re.search(r"\.json(\.gz)?$", word) for word in argv if word[:2] != "--"):
        return report_file(*one_file(command, argv))
    command_line = configurator.parse_command((StudyConfig,), argv)
    command_line = own_mechanism.add_from_command(command_line, keep="out/mechanisms")
    (config,), _ = configurator.build_configs(command_line)
    configurator.validate((config,))
    if command == "plan":
        try:
            return show_plan(config)
        except NotPrepared as e:
            return say(plan_without_data(config, e))
    words = shlex.join(["python", "compare.py", *command_line.words()])
    act = report_finished_runs if command == "report" else run_study
    act(config, name_of(config, command_line.files), words)


@as_program("compare")
def main(argv=None):
    """The command line. Exit status: 0: all that was asked for is done; 130: it was stopped; else 1."""
    try:
        run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        print("\ncompare: stopped; what is done is kept, and the same command goes on", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
