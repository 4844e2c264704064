"""
What a reader must know beside the verdicts, as sentences: failed and missing runs, learning rates, what the
tests do not know of, what to run next.
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
from study.words import (against_in_words, against_plain, baseline_of, cut_in_words, is_of_tasks, known,
                         label_of, level, listed, margin_in_words, of_other_tokens, progress, ratio, show,
                         side_of_target, tested, trained_here, verdict_so_far)

NO_BUDGETS = ("This study has no plain GPT of other budgets, by which a difference would be compared with "
              'compute, FLOPs and time: --budgets="[0.7, 1.4, 2.0]" adds them.')
MOST_NAMED = 20   # failed runs
MOST_SEEDS = 300  # of a new study; where it takes more, the two are too close for runs to tell them apart
OUT = "out/trials"  # where the runs are kept


# ---- notices ----

def notices(study, comparisons):
    """What a reader must know before the numbers, as sentences."""
    lines, done, rows = [], progress(study), against_plain(study, comparisons)
    if words := cut_in_words(study):
        lines.append(words)
    if not study.finished:
        lines.append(f"This study is not finished: {done['done']:,} of {plural(done['planned'], 'run')} are "
                     "done; all of this may still change.")
    lines += failures_in_words(study)
    lines += [f"{against_in_words(study, c)}: not called {c.withheld}, since {plural(c.failed, 'run')} "
              "failed." for c in comparisons if c.withheld]
    if study.left_out:
        runs = listed([f"{len(seeds)} of {label_of(study, name)} ({seeds_in_words(seeds)})"
                       for name, seeds in study.left_out.items()])
        lines.append(f"Finished runs of the same variants lie in {OUT} and are left out: {runs}. p holds "
                     "where seeds were chosen before their scores were known.")
    if trained_here(study):
        lines += rates_in_words(study)
    if other := of_other_tokens(study, rows):
        each = [f"{label_of(study, name)} {words}" for name, words in other.items()]
        lines.append(f"{listed(each)}: that alone may make a difference.")
    if not trained_here(study) and (dearer := [
            label_of(study, c.variant) for c in rows
            if verdict_so_far(study, c) == "better" and ratio(study, "cost", c.variant) > 1.001]):
        lines.append(f"Better and dearer: {listed(dearer)}. Whether {baseline_of(study)} would be as good at "
                     "that cost was not measured.")
    if study.other_code:
        of = listed([label_of(study, name) for name in study.other_code])
        n = sum(study.other_code.values())
        lines.append(f"{plural(n, 'run')} {'was' if n == 1 else 'were'} made by other code or other "
                     f"libraries, which --accept_code allowed: of {of}.")
    lines += [f"{note[:1].upper()}{note[1:].rstrip('.')}." for note in study.notes]
    if not study.notes and is_scored_on_val(study):
        lines.append("Test is val: the test split is the validation split over again, so a test score here "
                     "is a validation score.")
    if early := scored_early(study):
        lines.append("Scored long before the end, where validation was best, since it got worse after: "
                     f"{listed(early)}.")
    if (study.made.get("commit") or "").endswith("-dirty"):
        lines.append("The code had changes that are in no commit.")
    return lines


def failures_in_words(study):
    """A line for each failed run."""
    once, lines = {}, []
    for run in study.runs:
        if run.name in study.failures and run.name not in once:
            once[run.name] = run
    for name, run in once.items():
        stage = "" if run.stage == "judge" else f", {run.stage}"
        where = f" on {run.text}" if len(study.texts) > 1 else ""
        log = f" ({OUT}/{name}/trial.log)" if trained_here(study) else ""
        of = label_of(study, run.variant)
        lines.append(f"Failed: {of}{where}, seed {run.seed}{stage}: {study.failures[name].why}{log}")
    if len(lines) > MOST_NAMED:
        lines[MOST_NAMED:] = [f"and {plural(len(lines) - MOST_NAMED, 'more failed run')}"]
    return lines


def seeds_in_words(seeds):
    """1, 2, 3, 7 as "seeds 1 to 3, 7"; seeds: in order."""
    parts = []
    for seed in seeds:
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    words = [f"{part[0]} to {part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts]
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(words)}"


def rates_in_words(study):
    """Whether learning rates were tuned, as sentences; what lies at the edge of what was tried."""
    if study.rates:
        edge = at_edge(study)
        more = [f"The best learning rate tried lies at the edge of the grid for {listed(edge)}: a better one "
                "may lie beyond."] if edge else []
        return ["The plain GPT and all that are judged have their own best rates: see Learning rates.", *more]
    if study.config.get("tune_lr"):
        return []  # they are not known yet
    names = {}
    for name, own in study.untuned.items():
        for flag, rate in own.items():
            given = flag in {**study.config.get("settings", {}), **study.variant(name).flags}
            at = f"{flag}={rate:g}, {'as given' if given else 'the default'}"
            names.setdefault(at, []).append(label_of(study, name))
    learns = [f"what {listed(own)} add{'s' * (len(own) == 1)} learns at {at}" for at, own in names.items()]
    if study.untuned and not learns:
        learns = ["no mechanism adds weights, and all learn at the plain GPT's rates"]
    said = ": ".join(["No learning rate was tuned", *filter(None, ["; ".join(learns)])])
    return [f"{said}. With --tune_lr both sides first get their best rates on validation."]


def is_scored_on_val(study):
    """Whether the test split of what was judged is the validation split."""
    digests = [run.spec["data"] for run in study.runs
               if run.stage == "judge" and isinstance(run.spec.get("data"), dict)]
    return any(each.get("test") and each.get("test") == each.get("val") for each in digests)


def scored_early(study):
    """[variant with its step] of those that were scored at a best step long before the end."""
    found = {}
    for run in study.runs:
        result = study.results.get(run.name)
        if study.measure == "bits/byte" and run.stage == "judge" and result and result.curve:
            steps, scores = result.curve["steps"], [number(score) for score in result.curve["scores"]]
            if any(map(known, scores)):
                best = min(range(len(scores)), key=lambda i: (not known(scores[i]), scores[i]))
                found.setdefault((run.variant, run.text), []).append((steps[best], steps[-1]))
    medians = {key: [statistics.median(each) for each in zip(*own)] for key, own in found.items()}
    return [f"{label_of(study, name)}{f' on {text}' * (len(study.texts) > 1)} (step {show(best)} of "
            f"{show(last)})" for (name, text), (best, last) in medians.items() if best < 0.9 * last]


# ---- learning rates that were tried ----

def tried(study):
    """{variant: {((group, factor), ...): the name of its runs}} of the search for rates, () as they are."""
    found, names = {}, sorted((each.name for each in study.variants), key=len, reverse=True)
    for run in study.runs:
        name = next((name for name in names if run.variant.startswith(f"{name}, ")), None)
        if run.stage == "tune" and name:
            rates = re.findall(r"(\w+) x ([\d.e-]+)", run.variant.removeprefix(name))
            key = tuple((group, float(factor)) for group, factor in rates)
            found.setdefault(name, {})[key] = run.variant
    return found


def at_edge(study):
    """[variant with its group] whose best rate is at an end of what was tried, one group at a time."""
    sign = -1 if MEASURES[study.measure].higher_is_better else 1
    scores, edge = scores_of(study, "tune"), []
    for name, own in tried(study).items():
        for group in dict.fromkeys(key[0][0] for key in own if len(key) == 1):
            at = {key[0][1] if key else 1.0: of for key, of in own.items()
                  if not key or len(key) == 1 and key[0][0] == group}
            seeds = [seed for of in at.values() for each in scores.get(of, {}).values() for seed in each]
            first = Counter(seeds).most_common(1)[0][0] if seeds else None  # which every factor has
            found = {factor: each[first] for factor, of in at.items()
                     for each in scores.get(of, {}).values() if first in each}
            best = min(found, key=lambda factor: sign * found[factor]) if found else None
            if len(found) > 1 and best in (min(found), max(found)):
                edge.append(f"{label_of(study, name)} ({group})")
    return edge


def rates_of(run):
    """{flag: rate} of a Run, as its spec has them."""
    return {key: value for key, value in run.spec.get("train", {}).items()
            if key.endswith(("_lr", "_momentum"))}


# ---- below the numbers ----

def remarks(study, comparisons, beyond=()):
    """What belongs under the numbers: correction, margin, what seeds do not show, leaks looked for."""
    n, measure = len(tested(comparisons)), MEASURES[study.measure]
    lines = [f"Verdicts are corrected for {n} comparisons."] if n > 1 else [
        "One comparison: no correction."] if n else []
    lines.append(f"The margin is {margin_in_words(study)}.")
    over_text = " and not over other text" * (study.measure == "bits/byte")
    lines.append(f"Intervals ({level(study)}) are over seeds{over_text}.")
    rows = against_plain(study, comparisons)
    if measure.has_costs and n and not any(each.kind == "budget" for each in study.variants):
        lines.append(NO_BUDGETS)
    if any(c.verdict == "better" and c.equal_flops for c in rows):
        lines.append("At equal parameters better is a verdict; at equal FLOPs or time it means that the "
                     "interval, which is not corrected, lies below 0.")
    if is_of_tasks(study):
        lines.append(f"A run learns a task from the step on from which {LEARNED_SHARE:.0%} of its answers "
                     "are right.")
    return [*lines, *remarks_on_target(study, beyond), *leaks_in_words(study), *timed_how(study)]


def leaks_in_words(study):
    """What was tried to find a model that looks ahead, as sentences."""
    if not trained_here(study):
        return []
    judged = {run.name for run in study.runs if run.stage == "judge" and run.name in study.results}
    looked = [study.results[name].leaks for name in judged if study.results[name].leaks]
    if not looked:
        return []
    of = f"{len(looked):,} of {len(judged):,} judged runs were"
    if len(looked) == len(judged):
        of = "Every judged run was"
    return [f"{of} searched for a model that looks ahead or mixes rows, and none was found: {words}."
            for words in sorted(set(looked))[:3]]


def timed_how(study):
    """How the time of a step was measured, as a sentence; []: it was not."""
    if not any(each.time and each.kind == "variant" for each in study.variants):
        return []
    processor = study.made.get("processor") or "one processor"
    return [f"Training steps of both sides were timed in alternation ({processor}). Another machine has "
            "other ratios."]


def remarks_on_target(study, beyond):
    """How means were held against the target of a study; []: it has none."""
    if not beyond:
        return []
    n, side = len(beyond), side_of_target(study)
    corrected = f", corrected for {n} means apart from the comparisons" * (n > 1)
    why = [f"{label_of(study, each.variant)} is not called {side} it, since {plural(each.failed, 'run')} "
           "of it failed." for each in beyond if each.failed and number(each.p_corrected) <= study.alpha]
    return [f"A mean is {side} {study.target:g} by a one-sided t test{corrected}.", *why]


# ---- what to run next ----

def next_study(study, comparisons):
    """What a finished study leaves open: {"undecided", "variants", "seeds", "command", "words"}; None:
    nothing. command: a new study with fresh seeds, for a shell; None: what made this one is not known.
    """
    rows = [c for c in comparisons if c.verdict == "undecided" and not c.withheld and known(c.se)]
    if not study.finished or not rows:
        return None
    near = [c for c in rows if (c.seeds or math.inf) <= MOST_SEEDS]
    seeds = max((c.seeds for c in near), default=None)
    names = dict.fromkeys(name for c in near for name in (c.variant, c.baseline))
    names = [name for name in names if study.variant(name).kind == "variant"]
    lines = []
    if near:
        lines.append(f"Undecided: {listed([open_in_words(study, c) for c in near])}. A new study with "
                     f"{seeds} fresh seeds would decide four times in five, if differences and spreads are "
                     "as they look now. Do not add seeds to this study: that would be a second look at the "
                     "same scores, for which p is not corrected.")
    if far := [f"{open_in_words(study, c)} ({c.seeds or 'more than 1000'})"
               for c in rows if c not in near]:
        lines.append(f"Undecided, and it would take more than {MOST_SEEDS} seeds: {listed(far)}.")
    called = {each.name: each.name if trained_here(study) else label_of(study, each.name)
              for each in study.variants}
    undecided = [dict(variant=called[c.variant], baseline=called[c.baseline], seeds=c.seeds) for c in rows]
    return dict(undecided=undecided, variants=[called[name] for name in names], seeds=seeds,
                command=command_of(study, names, seeds) if near and names else None, words=" ".join(lines))


def open_in_words(study, c):
    """Whom an undecided comparison is of, and against whom if that is not the plain GPT as it is."""
    where = f" on {c.texts[0]}" if len(c.texts) < len(study.texts) else ""
    of, against = (label_of(study, name) for name in (c.variant, c.baseline))
    return (of if c.baseline == PLAIN else f"{of} against {against}") + where


def command_of(study, names, n):
    """The study's command for these variants and n fresh seeds; None: it is not known, or another program
    made the runs.
    """
    if not trained_here(study):
        return None
    try:
        words = shlex.split(study.command)
    except ValueError:  # a quotation without its end
        return None
    if words[:2] != ["python", "compare.py"] or printable(study.command) != study.command:
        return None
    config, own = study.config, [each.name for each in study.variants if each.kind == "variant"]
    used = {run.seed for run in study.runs} | {seed for seeds in study.left_out.values() for seed in seeds}
    last = max(run.seed for run in study.runs if run.stage == "judge")
    fresh = itertools.islice((seed for seed in itertools.count(last + 1) if seed not in used), n)
    more = dict(seeds=",".join(map(str, fresh)), out_dir=f"out/{study.name}-{n}-seeds")
    if {*own} - {*names} and not config.get("mechanism"):
        given = config.get("variants") or {}
        more["mechanisms"] = ",".join(name for name in names if name not in given)
        more["variants"] = str({name: flags for name, flags in given.items() if name in names})
        more["contrasts"] = str([pair for pair in config.get("contrasts", ()) if {*pair} <= {*names, PLAIN}])
        more["always"] = ",".join(name for name in config.get("always", ()) if name in names)
        more = {key: value for key, value in more.items() if value not in ("", "{}", "[]") or config.get(key)}
    stays = [word for word in words[2:] if not word.startswith(tuple(f"--{key}=" for key in more))]
    return " ".join(map(quoted, [*words[:2], *stays, *(f"--{key}={value}" for key, value in more.items())]))


def quoted(word):
    """shlex.quote(), easier to read where a value is a dict of names in single quotes."""
    if "'" in word and not {*word} & {*'"$`\\!'}:
        return f'"{word}"'
    return shlex.quote(word)
