"""
Sentences that a reader needs beside the verdicts: on failed and missing runs, on learning rates, on what the
tests cannot know, on what to run next.
"""

import itertools
import math
import re
import shlex
import statistics
from collections import Counter

from nanoheads.common import number, plural, printable
from nanoheads.tasks import LEARNED_SHARE
from study.records import PLAIN
from study.scores import scores_of
from study.verdicts import MEASURES
from study.words import (against_in_words, against_plain, baseline_label, confidence_level, cut_in_words,
                         differing_amounts, is_known, is_of_tasks, join_words, label_of,
                         longer_runs_in_words, margin_in_words, progress, ratio, show, side_of_target,
                         tested_comparisons, trained_here, verdict_so_far)

NO_BUDGETS = ("This study has no plain GPT of other budgets, by which a difference would be compared with "
              'compute, FLOPs and time: --budgets="[0.7, 1.4, 2.0]" adds them.')
MAX_NAMED = 20   # failed runs that are listed
MAX_SEEDS = 300  # of a new study; two variants that need more are too close for runs to tell them apart
TRIALS_FOLDER = "out/trials"  # where the runs are kept


# ---- notices ----

def notices(study, comparisons):
    """What a reader must know before the numbers, as sentences."""
    lines, counts, rows = [], progress(study), against_plain(study, comparisons)
    if words := cut_in_words(study):
        lines.append(words)
    if not study.finished:
        lines.append(f"This study is not finished: {counts['done']:,} of {plural(counts['planned'], 'run')} "
                     "are done; all of this may still change.")
    lines += failures_in_words(study)
    lines += [f"{against_in_words(study, c)}: not called {c.withheld}, since {plural(c.failed, 'run')} "
              "failed." for c in comparisons if c.withheld]
    if study.left_out:
        runs = join_words([f"{len(seeds)} of {label_of(study, name)} ({seeds_in_words(seeds)})"
                           for name, seeds in study.left_out.items()])
        lines.append(f"Finished runs of the same variants lie in {TRIALS_FOLDER} and are left out: {runs}. p "
                     "holds where seeds were chosen before their scores were known.")
    if trained_here(study):
        lines += rates_in_words(study)
    if amounts := differing_amounts(study, rows):
        clauses = [f"{label_of(study, name)} {words}" for name, words in amounts.items()]
        lines.append(f"{join_words(clauses)}: that alone may make a difference.")
    if not trained_here(study) and (dearer := [
            label_of(study, c.variant) for c in rows
            if verdict_so_far(study, c) == "better" and ratio(study, "cost", c.variant) > 1.001]):
        lines.append(f"Better and dearer: {join_words(dearer)}. Whether {baseline_label(study)} would be as "
                     "good at that cost was not measured.")
    if study.other_code:
        names = join_words([label_of(study, name) for name in study.other_code])
        n_runs = sum(study.other_code.values())
        were = "was" if n_runs == 1 else "were"
        lines.append(f"{plural(n_runs, 'run')} {were} made by other code or other libraries, which "
                     f"--accept_code allowed: of {names}.")
    lines += [f"{note[:1].upper()}{note[1:].rstrip('.')}." for note in study.notes]
    if early_variants := variants_scored_early(study):
        lines.append("Scored long before the end, where validation was best, since it got worse after: "
                     f"{join_words(early_variants)}.")
    if (study.made.get("commit") or "").endswith("-dirty"):
        lines.append("The code had changes that are in no commit.")
    return lines


def failures_in_words(study):
    """A line for each failed run."""
    run_of, lines = {}, []
    for run in study.runs:
        if run.name in study.failures and run.name not in run_of:
            run_of[run.name] = run
    for name, run in run_of.items():
        stage = "" if run.stage == "judge" else f", {run.stage}"
        where = f" on {run.text}" if len(study.texts) > 1 else ""
        log = f" ({TRIALS_FOLDER}/{name}/trial.log)" if trained_here(study) else ""
        label = label_of(study, run.variant)
        lines.append(f"Failed: {label}{where}, seed {run.seed}{stage}: {study.failures[name].why}{log}")
    if len(lines) > MAX_NAMED:
        lines[MAX_NAMED:] = [f"and {plural(len(lines) - MAX_NAMED, 'more failed run')}"]
    return lines


def seeds_in_words(seeds):
    """1, 2, 3, 7 as "seeds 1 to 3, 7"; seeds: in order."""
    ranges = []
    for seed in seeds:
        if ranges and seed == ranges[-1][-1] + 1:
            ranges[-1].append(seed)
        else:
            ranges.append([seed])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in ranges]
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(words)}"


def rates_in_words(study):
    """Sentences on whether learning rates were tuned, and on those whose best is at the edge of the grid."""
    if study.rates:
        edge = rates_at_edge(study)
        lines = ["The plain GPT and all that are judged have their own best rates: see Learning rates."]
        if edge:
            lines.append("The best learning rate tried lies at the edge of the grid for "
                         f"{join_words(edge)}: a better one may lie beyond.")
        return lines
    if study.config.get("tune_lr"):
        return []  # they are not known yet
    labels_of = {}  # {a rate in words: the variants whose own weights learn at it}
    for name, rates in study.untuned.items():
        for flag, rate in rates.items():
            is_given = flag in {**study.config.get("settings", {}), **study.variant(name).flags}
            setting = f"{flag}={rate:g}, {'as given' if is_given else 'the default'}"
            labels_of.setdefault(setting, []).append(label_of(study, name))
    clauses = [f"what {join_words(labels)} add{'s' * (len(labels) == 1)} learns at {setting}"
               for setting, labels in labels_of.items()]
    sentence = ": ".join(["No learning rate was tuned", *filter(None, ["; ".join(clauses)])])
    return [f"{sentence}. With --tune_lr both sides first get their best rates on validation."]


def variants_scored_early(study):
    """["variant (step)"] of those that were scored at a best step long before the end."""
    best_steps = {}
    for run in study.runs:
        result = study.results.get(run.name)
        if study.measure == "bits/byte" and run.stage == "judge" and result and result.curve:
            steps, scores = result.curve["steps"], [number(score) for score in result.curve["scores"]]
            if any(map(is_known, scores)):
                best = min(range(len(scores)), key=lambda i: (not is_known(scores[i]), scores[i]))
                best_steps.setdefault((run.variant, run.text), []).append((steps[best], steps[-1]))
    medians = {key: [statistics.median(steps) for steps in zip(*steps_of_runs)]  # of the best steps, the last
               for key, steps_of_runs in best_steps.items()}
    return [f"{label_of(study, name)}{f' on {text}' * (len(study.texts) > 1)} (step {show(best)} of "
            f"{show(last)})" for (name, text), (best, last) in medians.items() if best < 0.9 * last]


# ---- learning rates that were tried ----

def runs_of_search(study):
    """{variant: {((group, factor), ...): the name of its runs}} of the search for rates; (): as they are."""
    names_by_factors, names = {}, sorted((variant.name for variant in study.variants), key=len, reverse=True)
    for run in study.runs:
        name = next((name for name in names if run.variant.startswith(f"{name}, ")), None)
        if run.stage == "tune" and name:
            rates = re.findall(r"(\w+) x ([\d.e-]+)", run.variant.removeprefix(name))
            key = tuple((group, float(factor)) for group, factor in rates)
            names_by_factors.setdefault(name, {})[key] = run.variant
    return names_by_factors


def rates_at_edge(study):
    """["variant (group)"] of those whose best rate is at an end of what was tried for this group alone."""
    sign = -1 if MEASURES[study.measure].higher_is_better else 1
    scores, edge = scores_of(study, "tune"), []
    for name, names_by_factors in runs_of_search(study).items():
        for group in dict.fromkeys(key[0][0] for key in names_by_factors if len(key) == 1):
            names_by_factor = {key[0][1] if key else 1.0: run_name
                               for key, run_name in names_by_factors.items()
                               if not key or len(key) == 1 and key[0][0] == group}
            seeds = [seed for run_name in names_by_factor.values()
                     for by_seed in scores.get(run_name, {}).values() for seed in by_seed]
            first = Counter(seeds).most_common(1)[0][0] if seeds else None  # which every factor has
            score_of = {factor: by_seed[first] for factor, run_name in names_by_factor.items()
                        for by_seed in scores.get(run_name, {}).values() if first in by_seed}
            best = min(score_of, key=lambda factor: sign * score_of[factor]) if score_of else None
            if len(score_of) > 1 and best in (min(score_of), max(score_of)):
                edge.append(f"{label_of(study, name)} ({group})")
    return edge


def rates_of(run):
    """{flag: rate} of a Run, as its spec has them."""
    return {key: value for key, value in run.spec.get("train", {}).items()
            if key.endswith(("_lr", "_momentum"))}


# ---- below the numbers ----

def remarks(study, comparisons, target_tests=()):
    """Sentences under the numbers: on correction, margin, intervals and the search for leaks."""
    n, measure = len(tested_comparisons(comparisons)), MEASURES[study.measure]
    lines = [f"Verdicts are corrected for {n} comparisons."] if n > 1 else [
        "One comparison: no correction."] if n else []
    lines.append(f"The margin is {margin_in_words(study)}.")
    over_text = " and not over other text" * (study.measure == "bits/byte")
    lines.append(f"Intervals ({confidence_level(study)}) are over seeds{over_text}.")
    rows = against_plain(study, comparisons)
    if measure.has_costs and n and not any(variant.kind == "budget" for variant in study.variants):
        lines.append(NO_BUDGETS)
    if any(c.verdict == "better" and c.equal_flops for c in rows):
        lines.append("At equal parameters better is a verdict; at equal FLOPs or time it means that the "
                     "interval, which is not corrected, lies below 0.")
    if is_of_tasks(study):
        lines.append(f"A run learns a task from the step on from which {LEARNED_SHARE:.0%} of its answers "
                     "are right.")
    return [*lines, *remarks_on_target(study, target_tests), *leaks_in_words(study), *timing_in_words(study)]


def leaks_in_words(study):
    """Sentences on the search for models that look ahead."""
    if not trained_here(study):
        return []
    judged = {run.name for run in study.runs if run.stage == "judge" and run.name in study.results}
    searches = Counter(study.results[name].leaks for name in judged if study.results[name].leaks)
    if not searches:
        return []
    searched = sum(searches.values())
    subject = f"{searched:,} of {len(judged):,} judged runs were"
    if searched == len(judged):
        subject = "Every judged run was"
    words = "; ".join(f"{n:,} runs at {search}" if len(searches) > 1 else search
                      for search, n in sorted(searches.items()))
    return [f"{subject} searched for a model that looks ahead or mixes rows, and none was found: {words}."]


def timing_in_words(study):
    """How the time of a step was measured, as a sentence; []: it was not."""
    if not any(variant.time and variant.kind == "variant" for variant in study.variants):
        return []
    processor = study.made.get("processor") or "one processor"
    return [f"Training steps of both sides were timed in alternation ({processor}). Another machine has "
            "other ratios."]


def remarks_on_target(study, target_tests):
    """Sentences on how means are tested against the target of a study; []: it has none."""
    if not target_tests:
        return []
    n, side = len(target_tests), side_of_target(study)
    corrected = f", corrected for {n} means apart from the comparisons" * (n > 1)
    failed_notes = [f"{label_of(study, test.variant)} is not called {side} it, since "
                    f"{plural(test.failed, 'run')} of it failed."
                    for test in target_tests if test.failed and number(test.p_corrected) <= study.alpha]
    return [f"A mean is {side} {study.target:g} by a one-sided t test{corrected}.", *failed_notes]


# ---- what to run next ----

def next_study(study, comparisons):
    """{"undecided", "variants", "seeds", "command", "words"} on what a finished study leaves open; None:
    nothing. command: a new study with fresh seeds, for a shell; None: longer runs come first, or this study's
    own command is not known.
    """
    rows = [c for c in comparisons if c.verdict == "undecided" and not c.withheld and is_known(c.se)]
    if not study.finished or not rows:
        return None
    longer_runs = longer_runs_in_words(study)
    decidable = [c for c in rows if longer_runs or (c.seeds or math.inf) <= MAX_SEEDS]
    seeds = None if longer_runs else max((c.seeds for c in decidable), default=None)
    names = dict.fromkeys(name for c in decidable for name in (c.variant, c.baseline))
    names = [name for name in names if study.variant(name).kind == "variant"]
    lines = []
    if decidable:
        advice = longer_runs or (
            f"A new study with {seeds} fresh seeds would decide four times in five, if differences and "
            "spreads are as they look now. Do not add seeds to this study: that would be a second look at "
            "the same scores, for which p is not corrected.")
        lines.append(f"Undecided: {join_words([pair_in_words(study, c) for c in decidable])}. {advice}")
    if undecidable := [f"{pair_in_words(study, c)} ({c.seeds or 'more than 1000'})"
                       for c in rows if c not in decidable]:
        lines.append(f"Undecided, and it would take more than {MAX_SEEDS} seeds: {join_words(undecidable)}.")
    label = {variant.name: variant.name if trained_here(study) else label_of(study, variant.name)
             for variant in study.variants}
    undecided = [dict(variant=label[c.variant], baseline=label[c.baseline], seeds=c.seeds) for c in rows]
    command = command_of(study, names, seeds) if seeds and names else None
    return dict(undecided=undecided, variants=[label[name] for name in names], seeds=seeds, command=command,
                words=" ".join(lines))


def pair_in_words(study, c):
    """The names of an undecided comparison; its baseline only where that is not the plain GPT as it is."""
    where = f" on {c.texts[0]}" if len(c.texts) < len(study.texts) else ""
    variant, baseline = (label_of(study, name) for name in (c.variant, c.baseline))
    return (variant if c.baseline == PLAIN else f"{variant} against {baseline}") + where


def command_of(study, names, n):
    """The study's command for these variants and n fresh seeds; None: its own command is not known, or
    another program made the runs.
    """
    if not trained_here(study):
        return None
    try:
        words = shlex.split(study.command)
    except ValueError:  # a quotation without its end
        return None
    if words[:2] != ["python", "compare.py"] or printable(study.command) != study.command:
        return None
    config, variants = study.config, [variant.name for variant in study.variants if variant.kind == "variant"]
    used_seeds = {run.seed for run in study.runs}.union(*study.left_out.values())
    last_seed = max(run.seed for run in study.runs if run.stage == "judge")
    unused_seeds = (seed for seed in itertools.count(last_seed + 1) if seed not in used_seeds)
    fresh_seeds = itertools.islice(unused_seeds, n)
    changes = dict(seeds=",".join(map(str, fresh_seeds)), out_dir=f"out/{study.name}-{n}-seeds")
    if {*variants} - {*names} and not config.get("mechanism"):
        own_variants = config.get("variants") or {}
        changes["mechanisms"] = ",".join(name for name in names if name not in own_variants)
        changes["variants"] = str({name: flags for name, flags in own_variants.items() if name in names})
        contrasts = [pair for pair in config.get("contrasts", ()) if {*pair} <= {*names, PLAIN}]
        changes["contrasts"] = str(contrasts)
        changes["always"] = ",".join(name for name in config.get("always", ()) if name in names)
        changes = {key: value for key, value in changes.items()
                   if value not in ("", "{}", "[]") or config.get(key)}
    unchanged = [word for word in words[2:] if not word.startswith(tuple(f"--{key}=" for key in changes))]
    changed = [f"--{key}={value}" for key, value in changes.items()]
    return " ".join(map(quote, [*words[:2], *unchanged, *changed]))


def quote(word):
    """shlex.quote(), easier to read where a value is a dict of names in single quotes."""
    if "'" in word and not {*word} & {*'"$`\\!'}:
        return f'"{word}"'
    return shlex.quote(word)
