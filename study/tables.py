"""
The tables of a report, as text: verdicts, each text alone, screening, learning rates, costs, tasks, runs. For
the terminal, for Markdown, for a page and for docs. Nothing is tested here.
"""

import html
import re
import statistics
from typing import NamedTuple

from study.notices import OUT, rates_of, tried
from study.records import PLAIN
from study.scores import mean_of, scores_of
from study.verdicts import MEASURES, on_each_text, on_validation, over, uncertainty
from study.words import (AMOUNTS, NOT_MEASURED, against_plain, better_side, guess_of, in_times, interval,
                         is_of_tasks, known, label_of, learned, learned_in_words, level, listed, others, p_of,
                         ratio, settings_in_words, short, show, side_of_target, trained_here, verdict_of,
                         verdict_on_target, worth_of)

SEEDS_ABREAST = 10  # columns of a table that a desk's window holds
MARKS = {"better": "+", "worse": "−", "same": "="}  # of a cell in the table of tasks
EQUAL = {"equal_flops": "at equal FLOPs", "equal_time": "at equal time"}


class Table(NamedTuple):
    """Rows of text; words: the columns that hold words, the others hold numbers."""
    head: tuple
    rows: list
    words: tuple = (0,)


def escaped(text):
    """Text that is nothing but text in Markdown, also in a cell of a table."""
    return re.sub(r"([\\`*_|\[\]#~])", r"\\\1", " ".join(html.escape(str(text), quote=False).split()))


def in_markdown(table):
    """A Table in Markdown."""
    rule = ["---" if i in table.words else "---:" for i in range(len(table.head))]
    return "\n".join([f"| {' | '.join(map(escaped, table.head))} |", f"|{'|'.join(rule)}|",
                      *(f"| {' | '.join(map(escaped, row))} |" for row in table.rows)])


def without(table, *titles):
    """A Table without the columns of these titles."""
    shown = [i for i, title in enumerate(table.head) if title not in titles]
    return Table(tuple(table.head[i] for i in shown), [tuple(row[i] for i in shown) for row in table.rows],
                 tuple(shown.index(i) for i in table.words if i in shown))


def measured(table):
    """(A Table without the columns in which nothing was measured, a sentence that names them or "")."""
    cells = {title: {row[i] for row in table.rows} for i, title in enumerate(table.head)}
    empty = [title for title, own in cells.items()
             if NOT_MEASURED in own and own <= {NOT_MEASURED, "–", "1"}]  # the last two: of the plain GPT
    titles = listed([title.removeprefix("at ") for title in empty])
    return without(table, *empty), f"Not measured, and so not in the table: {titles}." if empty else ""


# ---- cells ----

def head_of_difference(study):
    """The head of a column of intervals: its numbers have a sign, and no word says which is better."""
    return f"difference [{level(study)}], {better_side(study)}"


def score_cell(study, name, texts=None):
    """A variant's mean score."""
    return show(mean_of(scores_of(study), name, texts or study.texts), ".4f")


def own_interval(study, texts=None):
    """The interval of the plain GPT's own mean over seeds, for its row in a table of differences to it."""
    half = uncertainty(study, PLAIN, texts or study.texts)
    return "–" if half is None else f"its mean ±{half:.4f}"


def mean_alone(c):
    """A difference without its interval."""
    return show(c.mean, "+.4f")


def at_cost(c, key, difference):
    """What is left of a difference at equal cost, and that cost; or that it was not measured."""
    each = getattr(c, key)
    if not each:
        return NOT_MEASURED
    return f"{difference(each) if known(each.mean) else NOT_MEASURED} at {show(each.ratio, '.2f')} ×"


def equal_of(study, c):
    """What is equal on both sides of a Comparison."""
    return c.equal or "hyperparameters" + ", rates aside" * bool(study.rates)


def seeds_of(study, name):
    """How many seeds of a variant have a score, on every text."""
    scores = scores_of(study).get(name, {})
    return min((len(scores.get(text, ())) for text in study.texts), default=0)


# ---- verdicts ----

def verdicts_table(study, comparisons, only=None, difference=interval, verdict=verdict_of):
    """The plain GPT, then each variant against it, the best first.

    only: names of variants, in their order. difference: how one at equal cost is shown; verdict: how that is.
    """
    rows = against_plain(study, comparisons, only)
    has_costs, measure = MEASURES[study.measure].has_costs, MEASURES[study.measure]
    least = 0.001 if trained_here(study) else 0  # what another program says is shown
    amounts = [amount for amount in (AMOUNTS if not trained_here(study) else AMOUNTS[:1])
               if any(abs(ratio(study, amount, c.variant) - 1) >= least for c in rows)]
    costs = ["worth × compute", *EQUAL.values()] if has_costs else []
    head = ("variant", "verdict", *["params"] * has_costs, "seeds", measure.name, head_of_difference(study),
            "corrected p", *costs, *(f"{amount} ×" for amount in amounts))

    def sizes(name):
        return [*[short(study.variant(name).params)] * has_costs, str(seeds_of(study, name)),
                score_cell(study, name)]

    table = [(label_of(study, PLAIN), "–", *sizes(PLAIN), own_interval(study), "–",
              *("1", "–", "–")[:len(costs)], *("1" for _ in amounts))]
    for c in rows:
        left = [worth_of(c), *(at_cost(c, key, difference) for key in EQUAL)][:len(costs)]
        table.append((label_of(study, c.variant), verdict(study, c), *sizes(c.variant), interval(c), p_of(c),
                      *left, *(in_times(ratio(study, amount, c.variant)) for amount in amounts)))
    return Table(head, table, (0, 1))


def others_table(study, comparisons, only=None):
    """Comparisons with plain GPTs of equal parameters, and of two variants."""
    head = ("variant", "verdict", "against", "what is equal", MEASURES[study.measure].name, "the other's",
            head_of_difference(study), "corrected p")
    tasks = is_of_tasks(study)
    rows = [(label_of(study, c.variant), verdict_of(study, c), label_of(study, c.baseline),
             equal_of(study, c), score_cell(study, c.variant, c.texts),
             score_cell(study, c.baseline, c.texts), interval(c), p_of(c), *[c.texts[0]] * tasks)
            for c in others(comparisons) if only is None or c.variant in only]
    return Table((*head, *["task"] * tasks), rows, (0, 1, 2, 3, *[8] * tasks))


def texts_table(study, comparisons, only=None, verdict=verdict_of):
    """Each variant's difference over all texts and on each of them, its worth and its verdict."""
    each = on_each_text(study)
    rows = [(label_of(study, PLAIN), "–", score_cell(study, PLAIN), own_interval(study), "–",
             *(own_interval(study, (text,)) for text in each), "1")]
    for c in against_plain(study, comparisons, only):
        alone = (interval(own) for found in each.values() for own in against_plain(study, found, [c.variant]))
        rows.append((label_of(study, c.variant), verdict(study, c), score_cell(study, c.variant), interval(c),
                     p_of(c), *alone, worth_of(c)))
    head = ("variant", "verdict", MEASURES[study.measure].name, head_of_difference(study), "corrected p",
            *(f"on {text}" for text in each), "worth × compute")
    return Table(head, rows if each else [], (0, 1))


def alone_table(study):
    """The verdict on each text by itself, corrected for that text alone."""
    each = on_each_text(study)
    names = [c.variant for c in against_plain(study, next(iter(each.values()), ()))]
    rows = [(label_of(study, name), *(verdict_of(study, c) for found in each.values()
                                      for c in against_plain(study, found, [name]))) for name in names]
    return Table(("variant", *(f"on {text} alone" for text in each)), rows, range(1 + len(each)))


def on_each_in_words(study, each, name):
    """A variant's verdict on each text by itself, in words; each: on_each_text()."""
    verdicts = {text: verdict_of(study, c) for text, found in each.items()
                for c in against_plain(study, found, [name])}
    if len(set(verdicts.values())) == 1:
        return f"{next(iter(verdicts.values()))} on {'both' if len(verdicts) == 2 else 'all'}"
    return ", ".join(f"{verdict} on {text}" for text, verdict in verdicts.items())


def target_table(study, beyond):
    """Each variant's mean with its interval, and whether it lies beyond the target of a study."""
    head = ("variant", f"{side_of_target(study)} {show(study.target, 'g')}?", "seeds",
            f"mean [{level(study)}]", "p, one-sided", "corrected p")
    rows = []
    for each in beyond:
        p, corrected = ("<0.00001" if known(value) and value < 1e-5 else show(value, ".5f")
                        for value in (each.p, each.p_corrected))
        rows.append((label_of(study, each.variant), verdict_on_target(study, each), str(each.n),
                     interval(each, ".4f"), p, corrected))
    return Table(head, rows, (0, 1))


# ---- what chose, on validation ----

def screened_table(study, only=None):
    """All variants of the first stage, on validation."""
    found = on_validation(study)
    judged = {run.variant for run in study.runs if run.stage == "judge"}
    text = next((run.text for run in study.runs if run.stage == "screen"), None)
    head = ("variant", f"{MEASURES[study.measure].name}, validation", head_of_difference(study), "judged")
    plain = mean_of(scores_of(study, "screen"), PLAIN, [text])
    rows = [(label_of(study, PLAIN), show(plain, ".4f"), "–", "yes")]
    for name, (mean, difference) in found.items():
        if only is None or name in only:
            rows.append((label_of(study, name), show(mean, ".4f"), interval(difference),
                         "yes" if name in judged else "no"))
    return Table(head, rows if found else [], (0, 3))


def rates_table(study):
    """The score on validation of all rates that were tried, and which are taken."""
    scores, rows = scores_of(study, "tune"), []
    judged = {run.variant: rates_of(run) for run in study.runs if run.stage == "judge"}
    of_runs = {run.variant: rates_of(run) for run in study.runs if run.stage == "tune"}
    for name, own in tried(study).items():
        for key, of in own.items():
            rates = ", ".join(f"{group} × {factor:g}" for group, factor in key) or "as they are"
            text, seeds = next(iter(scores.get(of, {}).items()), (None, {}))
            taken = bool(of_runs[of]) and of_runs[of] == judged.get(name)
            rows.append((label_of(study, name), rates, str(len(seeds)),
                         show(mean_of(scores, of, [text]), ".4f"), "taken" * taken))
    head = ("variant", "rates", "seeds", f"{MEASURES[study.measure].name}, validation", "taken")
    return Table(head, rows, (0, 1, 4))


# ---- costs, runs, settings ----

def costs_table(study, only=None):
    """What each variant costs, with its ratio to the plain GPT where both were counted, or timed in turn."""
    seconds = {}
    for run in study.runs:
        if run.stage == "judge" and run.name in study.results and run.text == study.texts[0]:
            seconds.setdefault(run.variant, []).append(study.results[run.name].seconds)
    columns = {"params": (lambda each: each.params, short),
               "FLOPs/token, needed": (lambda each: each.needed, short),
               "FLOPs/token, executed": (lambda each: over(each.flops, each.tokens), short),
               "steps": (lambda each: each.steps, show),
               "training FLOPs": (lambda each: each.flops, short),
               "seconds a run": (lambda each: median(seconds.get(each.name, [])), show),
               "MiB added": (lambda each: each.memory, lambda mib: show(mib) if mib else NOT_MEASURED)}
    plain, rows = study.variant(PLAIN), []
    for each in study.variants:
        if only is not None and each.name not in (PLAIN, *only):
            continue
        cells = []
        for title, (of, form) in columns.items():
            value = of(each)
            of_plain = over(value, of(plain))
            alone = each.name == PLAIN or title.startswith("seconds")  # other work has its part in those
            cells.append(form(value) + f" ({of_plain:.2f} ×)" * bool(not alone and known(of_plain)))
        time = f"{each.time[0]:.2f} [{each.time[1]:.2f}, {each.time[2]:.2f}]" if each.time else NOT_MEASURED
        rows.append((label_of(study, each.name), *cells, time))
    return Table(("variant", *columns, f"time of a step × [{level(study)}]"), rows, (0,))


def median(values):
    """The median of what is known; None: nothing is."""
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


def runs_tables(study):
    """The score of every judged run, SEEDS_ABREAST seeds a table: of the later ones only what has such."""
    scores, tables, several = scores_of(study), [], len(study.texts) > 1
    seeds = [*dict.fromkeys(seed for own in scores.values() for each in own.values() for seed in each)]
    seeds.sort(key=lambda seed: (not seed.isdigit(), int(seed) if seed.isdigit() else 0, seed))
    for at in range(0, len(seeds), SEEDS_ABREAST):
        part, rows = seeds[at:at + SEEDS_ABREAST], []
        for name, own in scores.items():
            for text, each in own.items():
                if not at or {*part} & {*each}:
                    rows.append((label_of(study, name), *[text] * several,
                                 show(mean_of(scores, name, [text]), ".4f"),
                                 *(show(each.get(seed), ".4f") for seed in part)))
        head = ("variant", *["text"] * several, "mean", *(f"seed {seed}" for seed in part))
        tables.append(Table(head, rows, (0, 1) if several else (0,)))
    return tables


def variants_table(study):
    """Every key of model and training in which a variant differs from the plain GPT that it is judged by."""
    specs = {}
    for run in study.runs:
        if run.stage == "judge" and "model" in run.spec and run.text == study.texts[0]:
            specs.setdefault(run.variant, {**run.spec["model"], **run.spec.get("train", {}), "seed": None})
    rows = []
    for each in study.variants:
        differs = {**each.flags}
        if each.name in specs and PLAIN in specs:
            own, plain = specs[each.name], specs[PLAIN]
            differs = {key: own.get(key, each.flags.get(key, "as by default")) for key in {**plain, **own}
                       if own.get(key, ...) != plain.get(key, ...)}
            differs |= {key: value for key, value in each.flags.items() if key == "seed"}
        rows.append((label_of(study, each.name), each.name, each.kind, settings_in_words(differs)))
    return Table(("variant", "name", "kind", "what differs from the plain GPT"), rows, range(4))


def settings_of(study):
    """[(heading, text)]: what was run, on what, with what."""
    c, made = study.config, study.made
    seeds = {name: seeds_of(study, name) for name in scores_of(study)}
    of_variants = sorted({n for name, n in seeds.items() if name != PLAIN})
    scale, commit = c.get("scale") and f"{c['scale']} scale", f"commit {made.get('commit') or 'unknown'}"
    rows = [("Study", ", ".join(filter(None, [study.name, scale, made.get("date"), commit]))),
            ("Seeds", f"{listed(map(str, of_variants), 'or') or '–'} of a variant, {seeds.get(PLAIN, 0)} of "
                      "the plain GPT"),
            ("Scored", f"{listed(study.texts)}, {c.get('split') or 'test'} split")]
    if c.get("settings"):
        rows.append(("On both sides", ", ".join(f"{key}={value}" for key, value in c["settings"].items())))
    rest = {key: value for key, value in made.items() if key not in ("date", "commit") and value}
    if rest:
        rows.append(("Made with", ", ".join(f"{key} {value}" for key, value in rest.items())))
    return rows


def failures_table(study):
    """The runs that failed, and why."""
    rows = {run.name: (label_of(study, run.variant), run.text, str(run.seed), run.stage,
                       study.failures[run.name].why, f"{OUT}/{run.name}" * trained_here(study))
            for run in study.runs if run.name in study.failures}
    return Table(("variant", "text", "seed", "stage", "why", "folder"), [*rows.values()], range(6))


# ---- tasks ----

def tasks_table(study, comparisons):
    """Variants by tasks: share right, mark of the verdict, step; the last row is what guessing gives."""
    scores, cells = scores_of(study), {(c.variant, c.texts[0]): c for c in against_plain(study, comparisons)}

    def cell(name, task):
        mean, c, step = mean_of(scores, name, [task]), cells.get((name, task)), learned(study, name, task)[2]
        mark = MARKS.get(c.verdict, "") if c else ""
        return "–" if mean is None else f"{mean:.2f}{mark}" + ("" if step is None else f" @{step:,.0f}")

    def rank(name):
        means = [mean for task in study.texts if (mean := mean_of(scores, name, [task])) is not None]
        return name != PLAIN, -statistics.mean(means) if means else 0, name
    names = sorted((each.name for each in study.variants if each.kind != "wider"), key=rank)
    rows = [(name, *(cell(name, task) for task in study.texts)) for name in names]
    guess = ("guessing", *(show(guess_of(study, task), ".2f") for task in study.texts))
    return Table(("variant", *study.texts), [*rows, guess])


def learned_table(study):
    """How many runs of each variant learn each task, and the median step from which on."""
    rows = [(label_of(study, each.name), *(learned_in_words(study, each.name, task) for task in study.texts))
            for each in study.variants]
    return Table(("runs that learn it", *study.texts), rows, range(1 + len(study.texts)))


def levels_tables(study):
    """[(task, Table)]: the mean share that is right by level, of each variant."""
    tables = []
    for task in study.texts:
        by_variant = {}
        for run in study.runs:
            result = study.results.get(run.name)
            if run.stage == "judge" and run.text == task and result and result.levels:
                by_variant.setdefault(run.variant, []).append(result.levels)
        levels = [*next(iter(by_variant.values()))[0]] if by_variant else []
        rows = [(label_of(study, name), *(f"{statistics.mean(own[at][1] / own[at][2] for own in runs):.2f}"
                                          for at in levels)) for name, runs in by_variant.items()]
        guesses = study.guesses.get(task, {})
        rows += [("guessing", *(show(guesses.get(at), ".2f") for at in levels))] if guesses else []
        tables.append((task, Table(("variant", *(f"level {at}" for at in levels)), rows)))
    return tables


# ---- several studies ----

def across_table(studies):
    """Each variant's difference and its worth in several studies: {size or name: (Study, Comparisons)}."""
    rows = [(label_of(study, PLAIN), size, "–", score_cell(study, PLAIN), own_interval(study), "–", "1")
            for size, (study, _) in studies.items()]
    every = [(size, study, against_plain(study, comparisons))
             for size, (study, comparisons) in studies.items()]
    for name in dict.fromkeys(c.variant for _, _, found in every for c in found):
        rows += [(label_of(study, name), size, verdict_of(study, c), score_cell(study, name), interval(c),
                  p_of(c), worth_of(c)) for size, study, found in every for c in found if c.variant == name]
    first = next(iter(studies.values()))[0]
    head = ("variant", "size", "verdict", MEASURES[first.measure].name, head_of_difference(first),
            "corrected p", "worth × compute")
    return Table(head, rows, (0, 1, 2))
