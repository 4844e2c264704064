"""
The tables of a report, as text: verdicts, each text alone, screening, learning rates, costs, tasks, runs. For
the terminal, for Markdown, for a page and for docs. Nothing is tested here.
"""

import html
import re
import statistics
from typing import NamedTuple

from study.notices import TRIALS_FOLDER, rates_of, runs_of_search
from study.records import PLAIN
from study.scores import mean_of, scores_of
from study.verdicts import MEASURES, comparisons_by_text, half_interval, on_validation, quotient
from study.words import (AMOUNTS, NOT_MEASURED, against_plain, confidence_level, differing_keys, guess_of,
                         interval, is_known, is_of_tasks, join_words, label_of, learned_in_words,
                         learning_counts, other_comparisons, p_cell, ratio, ratio_in_digits,
                         settings_in_words, show, si_number, side_in_words, side_of_target, trained_here,
                         verdict_of, verdict_on_target, worth_in_words)

SEEDS_ABREAST = 10  # columns of a table that a desk's window holds
MARKS = {"better": "+", "worse": "−", "same": "="}  # of a cell in the table of tasks
EQUAL = {"equal_flops": "at equal FLOPs", "equal_time": "at equal time"}


class Table(NamedTuple):
    """Rows of text; words: the columns that hold words, the others hold numbers."""
    head: tuple
    rows: list
    words: tuple = (0,)


def escape_markdown(text):
    """Text with all characters escaped that mean something in Markdown, also in a cell of a table."""
    return re.sub(r"([\\`*_|\[\]#~])", r"\\\1", " ".join(html.escape(str(text), quote=False).split()))


def in_markdown(table):
    """A Table in Markdown."""
    rule = ["---" if i in table.words else "---:" for i in range(len(table.head))]
    return "\n".join([f"| {' | '.join(map(escape_markdown, table.head))} |", f"|{'|'.join(rule)}|",
                      *(f"| {' | '.join(map(escape_markdown, row))} |" for row in table.rows)])


def drop_columns(table, *titles):
    """A Table without the columns of these titles."""
    kept = [i for i, title in enumerate(table.head) if title not in titles]
    return Table(tuple(table.head[i] for i in kept), [tuple(row[i] for i in kept) for row in table.rows],
                 tuple(kept.index(i) for i in table.words if i in kept))


def put_behind_the_first(table, titles):
    """A Table with the columns of these titles behind the first, in this order."""
    first = [0, *(table.head.index(title) for title in titles if title in table.head)]
    order = [*first, *(i for i in range(len(table.head)) if i not in first)]
    return Table(tuple(table.head[i] for i in order), [tuple(row[i] for i in order) for row in table.rows],
                 tuple(order.index(i) for i in table.words))


def drop_unmeasured(table):
    """(A Table without the columns in which nothing was measured, a sentence that names them or "")."""
    cells = {title: {row[i] for row in table.rows} for i, title in enumerate(table.head)}
    empty = [title for title, column in cells.items()
             if NOT_MEASURED in column and column <= {NOT_MEASURED, "–", "1"}]  # –, 1: the plain GPT's row
    titles = join_words([title.removeprefix("at ") for title in empty])
    return drop_columns(table, *empty), f"Not measured, and so not in the table: {titles}." if empty else ""


# ---- cells ----

def head_of_difference(study):
    """The head of a column of intervals, which says what side is better: the cells have only a sign."""
    return f"difference [{confidence_level(study)}], {side_in_words(study)}"


def score_cell(study, name, texts=None):
    """A variant's mean score."""
    return show(mean_of(scores_of(study), name, texts or study.texts), ".4f")


def interval_of_plain(study, texts=None):
    """The interval of the plain GPT's own mean over seeds, for its row in a table of differences to it."""
    half = half_interval(study, PLAIN, texts or study.texts)
    return "–" if half is None else f"its mean ±{half:.4f}"


def mean_cell(c):
    """A difference without its interval."""
    return show(c.mean, "+.4f")


def cost_cell(c, key, difference):
    """A difference at equal cost and that cost, or "not measured"; difference: how it is shown."""
    result = getattr(c, key)
    if not result:
        return NOT_MEASURED
    return f"{difference(result) if is_known(result.mean) else NOT_MEASURED} at {show(result.ratio, '.2f')} ×"


def equal_in_words(study, c):
    """What is equal on both sides of a Comparison."""
    return c.equal or "all other keys"


def seed_count(study, name):
    """How many seeds of a variant have a score, on every text."""
    scores = scores_of(study).get(name, {})
    return min((len(scores.get(text, ())) for text in study.texts), default=0)


# ---- verdicts ----

def verdicts_table(study, comparisons, only=None, difference=interval, verdict=verdict_of):
    """The plain GPT, then each variant against it, the best first.

    only: names of variants, in their order. difference: the text of a difference at equal cost; verdict: the
    text of a verdict.
    """
    rows = against_plain(study, comparisons, only)
    has_costs, measure = MEASURES[study.measure].has_costs, MEASURES[study.measure]
    min_change = 0.001 if trained_here(study) else 0  # amounts that another program names are always shown
    amounts = [amount for amount in (AMOUNTS if not trained_here(study) else AMOUNTS[:1])
               if any(abs(ratio(study, amount, c.variant) - 1) >= min_change for c in rows)]
    costs = ["worth × compute", *EQUAL.values()] if has_costs else []
    head = ("variant", "verdict", *["params"] * has_costs, "seeds", measure.name, head_of_difference(study),
            "corrected p", *costs, *(f"{amount} ×" for amount in amounts))

    def sizes(name):
        return [*[si_number(study.variant(name).params)] * has_costs, str(seed_count(study, name)),
                score_cell(study, name)]

    table_rows = [(label_of(study, PLAIN), "–", *sizes(PLAIN), interval_of_plain(study), "–",
                   *("1", "–", "–")[:len(costs)], *("1" for _ in amounts))]
    for c in rows:
        cost_cells = [worth_in_words(c), *(cost_cell(c, key, difference) for key in EQUAL)][:len(costs)]
        ratios = [ratio_in_digits(ratio(study, amount, c.variant)) for amount in amounts]
        table_rows.append((label_of(study, c.variant), verdict(study, c), *sizes(c.variant), interval(c),
                           p_cell(c), *cost_cells, *ratios))
    return Table(head, table_rows, (0, 1))


def others_table(study, comparisons):
    """Comparisons with plain GPTs of equal parameters, and of two variants."""
    head = ("variant", "verdict", "against", "what is equal", MEASURES[study.measure].name, "the other's",
            head_of_difference(study), "corrected p")
    of_tasks = is_of_tasks(study)
    rows = [(label_of(study, c.variant), verdict_of(study, c), label_of(study, c.baseline),
             equal_in_words(study, c), score_cell(study, c.variant, c.texts),
             score_cell(study, c.baseline, c.texts), interval(c), p_cell(c), *[c.texts[0]] * of_tasks)
            for c in other_comparisons(comparisons)]
    return Table((*head, *["task"] * of_tasks), rows, (0, 1, 2, 3, *[8] * of_tasks))


def texts_table(study, comparisons, verdict=verdict_of):
    """Each variant's difference over all texts and on each of them, its worth and its verdict."""
    by_text = comparisons_by_text(study)
    rows = [(label_of(study, PLAIN), "–", score_cell(study, PLAIN), interval_of_plain(study), "–",
             *(interval_of_plain(study, (text,)) for text in by_text), "1")]
    for c in against_plain(study, comparisons):
        intervals = (interval(alone) for on_text in by_text.values()
                     for alone in against_plain(study, on_text, [c.variant]))
        rows.append((label_of(study, c.variant), verdict(study, c), score_cell(study, c.variant), interval(c),
                     p_cell(c), *intervals, worth_in_words(c)))
    head = ("variant", "verdict", MEASURES[study.measure].name, head_of_difference(study), "corrected p",
            *(f"on {text}" for text in by_text), "worth × compute")
    return Table(head, rows if by_text else [], (0, 1))


def single_texts_table(study):
    """The verdict on each text by itself, corrected for that text alone."""
    by_text = comparisons_by_text(study)
    names = [c.variant for c in against_plain(study, next(iter(by_text.values()), ()))]
    rows = [(label_of(study, name), *(verdict_of(study, c) for on_text in by_text.values()
                                      for c in against_plain(study, on_text, [name]))) for name in names]
    return Table(("variant", *(f"on {text} alone" for text in by_text)), rows, range(1 + len(by_text)))


def verdicts_on_texts(study, by_text, name):
    """A variant's verdict on each text by itself, in words; by_text: comparisons_by_text()."""
    verdicts = {text: verdict_of(study, c) for text, on_text in by_text.items()
                for c in against_plain(study, on_text, [name])}
    if len(set(verdicts.values())) == 1:
        return f"{next(iter(verdicts.values()))} on {'both' if len(verdicts) == 2 else 'all'}"
    return ", ".join(f"{verdict} on {text}" for text, verdict in verdicts.items())


def target_table(study, target_tests):
    """Each variant's mean with its interval, and whether it lies beyond the target of a study."""
    head = ("variant", f"{side_of_target(study)} {show(study.target, 'g')}?", "seeds",
            f"mean [{confidence_level(study)}]", "p, one-sided", "corrected p")
    rows = []
    for test in target_tests:
        p, corrected = ("<0.00001" if is_known(value) and value < 1e-5 else show(value, ".5f")
                        for value in (test.p, test.p_corrected))
        rows.append((label_of(study, test.variant), verdict_on_target(study, test), str(test.n),
                     interval(test, ".4f"), p, corrected))
    return Table(head, rows, (0, 1))


# ---- scores on validation, which choose ----

def screened_table(study):
    """All variants of the first stage, on validation."""
    differences = on_validation(study)
    judged = {run.variant for run in study.runs if run.stage == "judge"}
    text = next((run.text for run in study.runs if run.stage == "screen"), None)
    head = ("variant", f"{MEASURES[study.measure].name}, validation", head_of_difference(study), "judged")
    plain = mean_of(scores_of(study, "screen"), PLAIN, [text])
    rows = [(label_of(study, PLAIN), show(plain, ".4f"), "–", "yes")]
    for name, (mean, difference) in differences.items():
        rows.append((label_of(study, name), show(mean, ".4f"), interval(difference),
                     "yes" if name in judged else "no"))
    return Table(head, rows if differences else [], (0, 3))


def rates_table(study):
    """The score on validation of all rates that were tried, and which of them the judged runs have."""
    scores, rows = scores_of(study, "tune"), []
    judged = {run.variant: rates_of(run) for run in study.runs if run.stage == "judge"}
    rates_of_name = {run.variant: rates_of(run) for run in study.runs if run.stage == "tune"}
    for name, runs_by_factors in runs_of_search(study).items():
        for factors, run_name in runs_by_factors.items():
            rates = ", ".join(f"{group} × {factor:g}" for group, factor in factors) or "as they are"
            text, seeds = next(iter(scores.get(run_name, {}).items()), (None, {}))
            is_chosen = bool(rates_of_name[run_name]) and rates_of_name[run_name] == judged.get(name)
            rows.append((label_of(study, name), rates, str(len(seeds)),
                         show(mean_of(scores, run_name, [text]), ".4f"), "taken" * is_chosen))
    head = ("variant", "rates", "seeds", f"{MEASURES[study.measure].name}, validation", "taken")
    return Table(head, rows, (0, 1, 4))


# ---- costs, runs, settings ----

def costs_table(study):
    """What each variant costs, with its ratio to the plain GPT where both were counted, or timed in turn."""
    seconds = {}
    for run in study.runs:
        if run.stage == "judge" and run.name in study.results and run.text == study.texts[0]:
            seconds.setdefault(run.variant, []).append(study.results[run.name].seconds)
    columns = {"params": (lambda variant: variant.params, si_number),
               "FLOPs/token, needed": (lambda variant: variant.needed, si_number),
               "FLOPs/token, executed": (lambda variant: quotient(variant.flops, variant.tokens), si_number),
               "steps": (lambda variant: variant.steps, show),
               "training FLOPs": (lambda variant: variant.flops, si_number),
               "seconds a run": (lambda variant: median(seconds.get(variant.name, [])), show),
               "MiB added": (lambda variant: variant.memory, lambda mib: show(mib) if mib else NOT_MEASURED)}
    plain, rows = study.variant(PLAIN), []
    for variant in study.variants:
        cells = []
        for title, (value_of, format_value) in columns.items():
            value = value_of(variant)
            ratio_to_plain = quotient(value, value_of(plain))
            # seconds have no ratio: other work on the machine adds to them
            has_ratio = variant.name != PLAIN and not title.startswith("seconds") and is_known(ratio_to_plain)
            cells.append(format_value(value) + f" ({ratio_to_plain:.2f} ×)" * has_ratio)
        middle, low, high = variant.time or (None, None, None)
        time = f"{middle:.2f} [{low:.2f}, {high:.2f}]" if variant.time else NOT_MEASURED
        rows.append((label_of(study, variant.name), *cells, time))
    return Table(("variant", *columns, f"time of a step × [{confidence_level(study)}]"), rows, (0,))


def median(values):
    """The median of the values that are known; None: none is."""
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


def runs_tables(study):
    """The score of every judged run, SEEDS_ABREAST seeds a table; later ones have no rows without scores."""
    scores, tables, several_texts = scores_of(study), [], len(study.texts) > 1
    seeds = [*dict.fromkeys(seed for by_text in scores.values() for by_seed in by_text.values()
                            for seed in by_seed)]
    seeds.sort(key=lambda seed: (not seed.isdigit(), int(seed) if seed.isdigit() else 0, seed))
    for start in range(0, len(seeds), SEEDS_ABREAST):
        seeds_shown, rows = seeds[start:start + SEEDS_ABREAST], []
        for name, by_text in scores.items():
            for text, by_seed in by_text.items():
                if not start or {*seeds_shown} & {*by_seed}:
                    rows.append((label_of(study, name), *[text] * several_texts,
                                 show(mean_of(scores, name, [text]), ".4f"),
                                 *(show(by_seed.get(seed), ".4f") for seed in seeds_shown)))
        head = ("variant", *["text"] * several_texts, "mean", *(f"seed {seed}" for seed in seeds_shown))
        tables.append(Table(head, rows, (0, 1) if several_texts else (0,)))
    return tables


def variants_table(study):
    """Every key of model and training in which a variant differs from the plain GPT that it is judged by."""
    rows = [(label_of(study, variant.name), variant.name, variant.kind, settings_in_words(differences))
            for variant, differences in zip(study.variants, differing_keys(study).values())]
    return Table(("variant", "name", "kind", "what differs from the plain GPT"), rows, range(4))


def settings_of(study):
    """[(heading, text)]: what was run, on what, with what."""
    c, made = study.config, study.made
    seeds = {name: seed_count(study, name) for name in scores_of(study)}
    seeds_of_variants = sorted({n for name, n in seeds.items() if name != PLAIN})
    scale, commit = c.get("scale") and f"{c['scale']} scale", f"commit {made.get('commit') or 'unknown'}"
    rows = [("Study", ", ".join(filter(None, [study.name, scale, made.get("date"), commit]))),
            ("Seeds", f"{join_words(map(str, seeds_of_variants), 'or') or '–'} of a variant, "
                      f"{seeds.get(PLAIN, 0)} of the plain GPT"),
            ("Scored", f"{join_words(study.texts)}, {c.get('split') or 'test'} split")]
    if c.get("settings"):
        rows.append(("On both sides", ", ".join(f"{key}={value}" for key, value in c["settings"].items())))
    versions = {key: value for key, value in made.items() if key not in ("date", "commit") and value}
    if versions:
        rows.append(("Made with", ", ".join(f"{key} {value}" for key, value in versions.items())))
    return rows


def failures_table(study):
    """The runs that failed, and why."""
    rows = {run.name: (label_of(study, run.variant), run.text, str(run.seed), run.stage,
                       study.failures[run.name].why, f"{TRIALS_FOLDER}/{run.name}" * trained_here(study))
            for run in study.runs if run.name in study.failures}
    return Table(("variant", "text", "seed", "stage", "why", "folder"), [*rows.values()], range(6))


# ---- tasks ----

def tasks_table(study, comparisons):
    """Variants by tasks: share right, mark of the verdict, step; the last row is what guessing gives."""
    scores = scores_of(study)
    comparison_of = {(c.variant, c.texts[0]): c for c in against_plain(study, comparisons)}

    def cell(name, task):
        mean, c = mean_of(scores, name, [task]), comparison_of.get((name, task))
        step = learning_counts(study, name, task)[2]
        mark = MARKS.get(c.verdict, "") if c else ""
        return "–" if mean is None else f"{mean:.2f}{mark}" + ("" if step is None else f" @{step:,.0f}")

    def rank(name):
        means = [mean for task in study.texts if (mean := mean_of(scores, name, [task])) is not None]
        return name != PLAIN, -statistics.mean(means) if means else 0, name
    names = sorted((variant.name for variant in study.variants if variant.kind != "wider"), key=rank)
    rows = [(name, *(cell(name, task) for task in study.texts)) for name in names]
    guess = ("guessing", *(show(guess_of(study, task), ".2f") for task in study.texts))
    return Table(("variant", *study.texts), [*rows, guess])


def learned_table(study):
    """How many runs of each variant learn each task, and the median step from which on."""
    rows = [(label_of(study, variant.name),
             *(learned_in_words(study, variant.name, task) for task in study.texts))
            for variant in study.variants]
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
        rows = []
        for name, runs in by_variant.items():
            shares = [statistics.mean(counts[level][1] / counts[level][2] for counts in runs)
                      for level in levels]
            rows.append((label_of(study, name), *(f"{share:.2f}" for share in shares)))
        guesses = study.guesses.get(task, {})
        rows += [("guessing", *(show(guesses.get(level), ".2f") for level in levels))] if guesses else []
        tables.append((task, Table(("variant", *(f"level {level}" for level in levels)), rows)))
    return tables


# ---- several studies ----

def sizes_table(studies):
    """Each variant's difference and its worth in several studies, {size or name: (Study, Comparisons)}."""
    rows = [(label_of(study, PLAIN), size, "–", score_cell(study, PLAIN), interval_of_plain(study), "–", "1")
            for size, (study, _) in studies.items()]
    all_comparisons = [(size, study, c) for size, (study, comparisons) in studies.items()
                       for c in against_plain(study, comparisons)]
    for name in dict.fromkeys(c.variant for _, _, c in all_comparisons):
        rows += [(label_of(study, name), size, verdict_of(study, c), score_cell(study, name), interval(c),
                  p_cell(c), worth_in_words(c)) for size, study, c in all_comparisons if c.variant == name]
    first = next(iter(studies.values()))[0]
    head = ("variant", "size", "verdict", MEASURES[first.measure].name, head_of_difference(first),
            "corrected p", "worth × compute")
    return Table(head, rows, (0, 1, 2))
