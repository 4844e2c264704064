"""
The report of a study: a table for the terminal, Markdown, JSON for a program, and a page of HTML that loads
nothing from the network. All of it is a function of a Study, its Comparisons and its means beside a target
(verdicts.compare_with_target()). The sentences are made in words.py and notices.py, the tables in tables.py.
"""

import base64
import re
import textwrap
from dataclasses import asdict
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from nanoheads import drawing
from nanoheads.common import json_safe, printable, say, table, write_atomic
from nanoheads.timing import progress_bar
from study import pictures, tables
from study.notices import next_study, notices, remarks
from study.records import PLAIN
from study.scores import mean_of, scores_of
from study.verdicts import MEASURES, comparisons_by_text
from study.words import (AMOUNTS, BUT, INTERIM, MEANING, against_in_words, against_plain, baseline_label,
                         confidence_level, cut_of, differing_keys, full_sentence, headline, is_of_tasks,
                         join_words, label_of, learning_counts, limits_at_equal, other_comparisons, progress,
                         question_of, ratio, tested_comparisons, texts_of_validation, trained_here,
                         verdict_on_target, verdict_so_far, verdict_with_limits)

WIDTH = 120  # of a line in the terminal


# ---- terminal ----

def in_text(study, comparisons, target_tests=(), width=WIDTH):
    """The report for a terminal, the best variant first; long names lose their end to keep to `width`."""
    answer = headline(study, comparisons, target_tests)
    opening = [f"{question_of(study)} {answer}" if not study.question else f"{study.name}: {answer}",
               *notices(study, comparisons)]
    shown, left_out = zip(*map(tables.drop_unmeasured, terminal_tables(study, comparisons, target_tests)))
    lines = [*wrap(opening, width)]
    lines += [table(each.head, each.rows, left=each.words, width=width) + "\n" for each in shown if each.rows]
    if is_of_tasks(study):
        lines += wrap([f"{against_in_words(study, c)}: {full_sentence(study, c)}."
                       for c in [*against_plain(study, comparisons), *other_comparisons(comparisons)]
                       if c.verdict in ("better", "worse") or c.withheld], width)
    if trained_here(study):
        lines += [*wrap([f"{label} differs from the plain GPT in {words.replace('–', 'no key')}."
                         for label, _, kind, words in tables.variants_table(study).rows if kind != "plain"],
                        width), ""]
    lines += wrap([" ".join(filter(None, [*left_out, *remarks(study, comparisons, target_tests)]))], width)
    if follow_up := next_study(study, comparisons):  # a command is not broken into lines: it is to be copied
        lines += ["", *wrap([follow_up["words"]], width)]
        lines += [f"    {follow_up['command']}"] if follow_up["command"] else []
    return "\n".join(lines)


def wrap(texts, width):
    """Sentences as lines of at most `width` characters."""
    return [line for text in texts for line in textwrap.wrap(printable(text), width)]


def terminal_tables(study, comparisons, target_tests):
    """The Tables of the terminal. Differences at equal cost have no intervals here, but on the page."""
    if is_of_tasks(study):
        return [tables.tasks_table(study, comparisons)]
    main = tables.verdicts_table(study, comparisons, difference=tables.mean_cell)
    main = tables.drop_columns(main, "params", "seeds")
    rows = [tuple(cell.partition(" at ")[0] if title.startswith("at equal") else cell
                  for title, cell in zip(main.head, row)) for row in main.rows]
    shown = [tables.Table(tuple(title.removeprefix("at ") for title in main.head), rows, main.words),
             tables.drop_columns(tables.others_table(study, comparisons), "the other's")]
    by_text = tables.texts_table(study, comparisons)
    if by_text.rows:
        measure = MEASURES[study.measure].name
        shown += [tables.drop_columns(by_text, "corrected p", "worth × compute", "verdict", measure),
                  tables.single_texts_table(study)]
    return [*shown, *([tables.target_table(study, target_tests)] if target_tests else [])]


# ---- Markdown ----

def in_markdown(study, comparisons, target_tests=()):
    """The verdicts in Markdown, to be quoted: the headline, the notices, the tables."""
    main = tables.tasks_table(study, comparisons) if is_of_tasks(study) else tables.verdicts_table(
        study, comparisons, verdict=lambda study, c: verdict_with_limits(study, comparisons, c))
    more = [tables.others_table(study, comparisons), tables.texts_table(study, comparisons),
            *([tables.target_table(study, target_tests)] if target_tests else [])]
    if trained_here(study):
        more.append(tables.drop_columns(tables.variants_table(study), "name", "kind"))
    parts = [f"# {tables.escape_markdown(question_of(study))}",
             f"**{tables.escape_markdown(headline(study, comparisons, target_tests))}**",
             "\n".join(f"- {tables.escape_markdown(line)}" for line in notices(study, comparisons))]
    for each in [main, *more]:
        measured, left_out = tables.drop_unmeasured(each)
        parts += [tables.in_markdown(measured), tables.escape_markdown(left_out)] if measured.rows else []
    parts.append(tables.escape_markdown(" ".join(remarks(study, comparisons, target_tests))))
    return "\n\n".join(filter(None, parts)) + "\n"


# ---- for a program ----

def json_report(study, comparisons, target_tests=(), out=None):
    """The verdicts as a dict for JSON; docs/compare.md names its fields."""
    scores = scores_of(study)
    means = {name_for_program(study, variant.name): mean_of(scores, variant.name, study.texts)
             for variant in study.variants}
    rows = [*against_plain(study, comparisons), *other_comparisons(comparisons)]
    fields = dict(name=study.name, question=question_of(study), command=study.command, out=out and str(out),
                  measure=study.measure, texts=study.texts, **progress(study),
                  headline=headline(study, comparisons, target_tests), notices=notices(study, comparisons),
                  cut=cut_of(study), scored_on_validation=texts_of_validation(study), alpha=study.alpha,
                  margin=study.margin, failures=len(study.failures),
                  differing=differing_keys(study) if trained_here(study) else {},
                  left_out=[dict(variant=name, seeds=seeds) for name, seeds in study.left_out.items()],
                  comparisons=[json_row(study, comparisons, c) for c in rows],
                  on_each_text={text: [json_row(study, on_text, c) for c in on_text]
                                for text, on_text in comparisons_by_text(study).items()},
                  follow_up=next_study(study, comparisons))
    fields["bpb" if study.measure == "bits/byte" else "scores"] = means
    if not trained_here(study):
        fields.update(higher_is_better=MEASURES[study.measure].higher_is_better,
                      baseline=label_of(study, PLAIN))
    if target_tests:
        fields.update(target=study.target, targets=[
            {**asdict(test), "variant": name_for_program(study, test.variant),
             "verdict": verdict_on_target(study, test)} for test in target_tests])
    return json_safe(fields)


def name_for_program(study, name):
    """A variant's name for a program: in a study of another program's file, the name in that file."""
    return name if trained_here(study) else label_of(study, name)


def json_row(study, comparisons, c):
    """A Comparison as a dict. A program that asks for "better" must not find it in an unfinished study."""
    keys = ("mean", "low", "high", "se", "df", "p", "p_corrected", "p_same", "n", "n_baseline", "failed",
            "withheld")
    costs = {key: value and asdict(value) for key in ("worth", "equal_flops", "equal_time")
             for value in [getattr(c, key)]}
    so_far, amounts = verdict_so_far(study, c), ("tokens",) if trained_here(study) else AMOUNTS
    verdict = dict(verdict=so_far, interim_verdict=None) if study.finished else dict(
        verdict="unfinished", interim_verdict=so_far)
    scores, task_fields = scores_of(study), {}
    if is_of_tasks(study):
        task = c.texts[0]
        n_learned, _, step = learning_counts(study, c.variant, task)
        n_learned_plain, _, step_plain = learning_counts(study, c.baseline, task)
        task_fields = dict(task=task, acc=mean_of(scores, c.variant, c.texts),
                           acc_plain=mean_of(scores, c.baseline, c.texts), learned=n_learned,
                           learned_plain=n_learned_plain, step=step, step_plain=step_plain)
    return dict(variant=name_for_program(study, c.variant), baseline=name_for_program(study, c.baseline),
                texts=c.texts, equal=[c.equal] if c.equal else [], **verdict,
                but_not_at=limits_at_equal(study, comparisons, c), more_seeds=c.seeds,
                **{key: getattr(c, key) for key in keys}, **costs, **task_fields,
                **{f"{key}_ratio": ratio(study, key, c.variant, c.baseline) for key in amounts},
                words=full_sentence(study, c))


# ---- the page ----

def numeric(text):
    """A cell of numbers, which may break before an interval and before a cost alone."""
    return re.sub(r" (?!\[|at )", "\N{NO-BREAK SPACE}", text.replace("-", "−"))


def breakable(text):
    """Text as HTML that may break behind each underscore and plus: names of variants have no spaces."""
    return Markup(re.sub(r"([_+])", r"\1<wbr>", str(escape(printable(text)))))


def printable_value(value):
    """A value as the page shows it: text without characters that no page should get."""
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


PAGES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True,
                           finalize=printable_value, undefined=jinja2.StrictUndefined, trim_blocks=True,
                           lstrip_blocks=True)
PAGES.filters.update(numeric=numeric, breakable=breakable, drop_unmeasured=tables.drop_unmeasured,
                     svg=lambda data: "data:image/svg+xml;base64," + base64.b64encode(data).decode())
PAGES.globals.update(MEANING=MEANING, BUT=BUT, INTERIM=INTERIM,
                     BADGES=(*MEANING, "failed", "no runs yet", *(INTERIM + word for word in MEANING)))


def page(study, comparisons, target_tests=(), images=None):
    """report.html; images: {name of a picture: its SVG as bytes, or None}."""
    rows = [*against_plain(study, comparisons), *other_comparisons(comparisons)]

    def verdict(study, c):
        return verdict_with_limits(study, comparisons, c)
    main = tables.tasks_table(study, comparisons) if is_of_tasks(study) else tables.verdicts_table(
        study, comparisons, verdict=verdict)
    # what is looked for first stands where a phone shows it
    main = tables.put_behind_the_first(main, (tables.head_of_difference(study), "verdict"))
    cards = [(verdict(study, c), against_in_words(study, c), full_sentence(study, c),
              c.worth and c.worth.words) for c in rows]
    sources = [study.name, study.config.get("scale"), study.made.get("date"), join_words(study.texts)]
    return PAGES.get_template("page.html").render(
        study=study, title=question_of(study), where=" · ".join(str(source) for source in sources if source),
        headline=headline(study, comparisons, target_tests), notices=notices(study, comparisons), main=main,
        cards=cards, remarks=" ".join(remarks(study, comparisons, target_tests)),
        following=next_study(study, comparisons), baseline=baseline_label(study),
        level=confidence_level(study),
        images=dict.fromkeys(("forest", "forest_narrow", "learning", "learning_narrow")) | (images or {}),
        texts=tables.texts_table(study, comparisons, verdict=verdict), alone=tables.single_texts_table(study),
        others=tables.others_table(study, comparisons), screened=tables.screened_table(study),
        target=tables.target_table(study, target_tests), rates=tables.rates_table(study),
        costs=tables.costs_table(study) if trained_here(study) else tables.Table((), []),
        variants=tables.variants_table(study), runs=tables.runs_tables(study),
        failures=tables.failures_table(study), settings=tables.settings_of(study), tasks=is_of_tasks(study),
        learned=tables.learned_table(study) if is_of_tasks(study) else None,
        levels=tables.levels_tables(study) if is_of_tasks(study) else [], trained_here=trained_here(study),
        unit=MEASURES[study.measure].unit, measure=MEASURES[study.measure],
        tested=len(tested_comparisons(comparisons)))


# ---- files ----

def write(study, comparisons, folder, target_tests=()):
    """Write report.html, report.md, forest.svg and forest.png into a folder -> their paths. UserError: the
    disk refuses.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    study_and_comparisons = study, comparisons
    images = {draw.__name__: drawing.picture_bytes(draw, study_and_comparisons)
              for draw in progress_bar([pictures.forest, pictures.forest_narrow, pictures.learning,
                                        pictures.learning_narrow], "pictures")}
    files = {"report.html": page(study, comparisons, target_tests, images).encode("utf-8", "replace"),
             "report.md": in_markdown(study, comparisons, target_tests).encode("utf-8", "replace"),
             "forest.svg": images["forest"], "forest.png": images["forest"] and drawing.picture_bytes(
                 pictures.forest, study_and_comparisons, "png")}
    paths = []
    for name, data in files.items():
        if data:
            write_atomic(folder / name, lambda file, data=data: file.write(data))
            paths.append(folder / name)
    return paths


def write_all(study, comparisons, folder, target_tests=()):
    """Print the report, write its files, print their paths. UserError: the disk refuses."""
    print(in_text(study, comparisons, target_tests))
    say(*write(study, comparisons, folder, target_tests))
