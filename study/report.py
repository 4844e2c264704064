"""
The report of a study: a table for the terminal, Markdown, JSON for a program, and a page of HTML that loads
nothing from the network. All of it is a function of a Study, its Comparisons and its means beside a target
(verdicts.beyond_target()); what is said is words.py's and notices.py's, tables are tables.py's.
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
from study import pictures, tables
from study.notices import next_study, notices, remarks
from study.records import PLAIN
from study.scores import mean_of, scores_of
from study.verdicts import MEASURES, on_each_text
from study.words import (AMOUNTS, BUT, INTERIM, MEANING, against_in_words, against_plain, baseline_of,
                         cut_of, full_sentence, headline, is_of_tasks, label_of, learned, level,
                         limited_verdict, listed, not_shown_at, others, progress, question_of, ratio, tested,
                         trained_here, verdict_on_target, verdict_so_far)

WIDTH = 120  # of a line in the terminal


# ---- terminal ----

def in_text(study, comparisons, beyond=(), width=WIDTH):
    """The report for a terminal, the best variant first; long names lose their end to keep to `width`."""
    first, below = headline(study, comparisons, beyond), remarks(study, comparisons, beyond)
    above = [f"{question_of(study)} {first}" if not study.question else f"{study.name}: {first}",
             *notices(study, comparisons)]
    shown, left_out = zip(*map(tables.measured, terminal_tables(study, comparisons, beyond)))
    lines = [*wrapped(above, width)]
    lines += [table(each.head, each.rows, left=each.words, width=width) + "\n" for each in shown if each.rows]
    if is_of_tasks(study):
        lines += wrapped([f"{against_in_words(study, c)}: {full_sentence(study, c)}."
                          for c in [*against_plain(study, comparisons), *others(comparisons)]
                          if c.verdict in ("better", "worse") or c.withheld], width)
    lines += wrapped([" ".join(filter(None, [*left_out, *below]))], width)
    if following := next_study(study, comparisons):  # a command is not broken into lines: it is to be copied
        lines += ["", *wrapped([following["words"]], width)]
        lines += [f"    {following['command']}"] if following["command"] else []
    return "\n".join(lines)


def wrapped(texts, width):
    """Sentences as lines of at most `width` characters."""
    return [line for text in texts for line in textwrap.wrap(printable(text), width)]


def terminal_tables(study, comparisons, beyond):
    """The Tables of the terminal: of differences at equal cost the mean alone, the rest is on the page."""
    if is_of_tasks(study):
        return [tables.tasks_table(study, comparisons)]
    main = tables.verdicts_table(study, comparisons, difference=tables.mean_alone)
    main = tables.without(main, "params", "seeds")
    rows = [tuple(cell.partition(" at ")[0] if title.startswith("at equal") else cell
                  for title, cell in zip(main.head, row)) for row in main.rows]
    found = [tables.Table(tuple(title.removeprefix("at ") for title in main.head), rows, main.words),
             tables.without(tables.others_table(study, comparisons), "the other's")]
    each = tables.texts_table(study, comparisons)
    found += [tables.without(each, "corrected p", "worth × compute", "verdict", MEASURES[study.measure].name),
              tables.alone_table(study)] if each.rows else []
    return [*found, *([tables.target_table(study, beyond)] if beyond else [])]


# ---- Markdown ----

def in_markdown(study, comparisons, beyond=()):
    """The verdicts in Markdown, to be quoted: the headline, the notices, the tables."""
    first = tables.tasks_table(study, comparisons) if is_of_tasks(study) else tables.verdicts_table(
        study, comparisons, verdict=lambda study, c: limited_verdict(study, comparisons, c))
    more = [tables.others_table(study, comparisons), tables.texts_table(study, comparisons),
            *([tables.target_table(study, beyond)] if beyond else [])]
    parts = [f"# {tables.escaped(question_of(study))}",
             f"**{tables.escaped(headline(study, comparisons, beyond))}**",
             "\n".join(f"- {tables.escaped(line)}" for line in notices(study, comparisons))]
    for each in [first, *more]:
        each, left_out = tables.measured(each)
        parts += [tables.in_markdown(each), tables.escaped(left_out)] if each.rows else []
    parts.append(tables.escaped(" ".join(remarks(study, comparisons, beyond))))
    return "\n\n".join(filter(None, parts)) + "\n"


# ---- for a program ----

def for_a_program(study, comparisons, beyond=(), out=None):
    """The verdicts as a dict for JSON; docs/compare.md names its fields."""
    scores = scores_of(study)
    means = {name_of(study, each.name): mean_of(scores, each.name, study.texts) for each in study.variants}
    found = dict(name=study.name, question=question_of(study), command=study.command, out=out and str(out),
                 measure=study.measure, texts=study.texts, **progress(study),
                 headline=headline(study, comparisons, beyond), notices=notices(study, comparisons),
                 cut=cut_of(study), alpha=study.alpha, margin=study.margin, failures=len(study.failures),
                 left_out=[dict(variant=name, seeds=seeds) for name, seeds in study.left_out.items()],
                 comparisons=[row_for_a_program(study, comparisons, c)
                              for c in [*against_plain(study, comparisons), *others(comparisons)]],
                 on_each_text={text: [row_for_a_program(study, own, c) for c in own]
                               for text, own in on_each_text(study).items()},
                 follow_up=next_study(study, comparisons))
    found["bpb" if study.measure == "bits/byte" else "scores"] = means
    if not trained_here(study):
        found.update(higher_is_better=MEASURES[study.measure].higher_is_better,
                     baseline=label_of(study, PLAIN))
    if beyond:
        found.update(target=study.target, targets=[
            {**asdict(each), "variant": name_of(study, each.variant),
             "verdict": verdict_on_target(study, each)} for each in beyond])
    return json_safe(found)


def name_of(study, name):
    """A variant as a program knows it: of another program's file, what that calls it."""
    return name if trained_here(study) else label_of(study, name)


def row_for_a_program(study, comparisons, c):
    """A Comparison as a dict: what asks for "better" must not find it in an unfinished study."""
    keys = ("mean", "low", "high", "se", "df", "p", "p_corrected", "p_same", "n", "n_baseline", "failed",
            "withheld")
    costs = {key: value and asdict(value) for key in ("worth", "equal_flops", "equal_time")
             for value in [getattr(c, key)]}
    so_far, amounts = verdict_so_far(study, c), ("tokens",) if trained_here(study) else AMOUNTS
    verdict = dict(verdict=so_far, interim_verdict=None) if study.finished else dict(
        verdict="unfinished", interim_verdict=so_far)
    scores, of_task = scores_of(study), {}
    if is_of_tasks(study):
        task = c.texts[0]
        own, _, step = learned(study, c.variant, task)
        plain, _, step_plain = learned(study, c.baseline, task)
        of_task = dict(task=task, acc=mean_of(scores, c.variant, c.texts),
                       acc_plain=mean_of(scores, c.baseline, c.texts), learned=own, learned_plain=plain,
                       step=step, step_plain=step_plain)
    return dict(variant=name_of(study, c.variant), baseline=name_of(study, c.baseline), texts=c.texts,
                equal=[c.equal] if c.equal else [], **verdict,
                but_not_at=not_shown_at(study, comparisons, c), more_seeds=c.seeds,
                **{key: getattr(c, key) for key in keys}, **costs, **of_task,
                **{f"{key}_ratio": ratio(study, key, c.variant, c.baseline) for key in amounts},
                words=full_sentence(study, c))


# ---- the page ----

def numeric(text):
    """A cell of numbers, which may break before an interval and before a cost alone."""
    return re.sub(r" (?!\[|at )", "\N{NO-BREAK SPACE}", text.replace("-", "−"))


def breakable(text):
    """Text as HTML that may break behind each underscore and plus: names of variants have no spaces."""
    return Markup(re.sub(r"([_+])", r"\1<wbr>", str(escape(printable(text)))))


def shown_text(value):
    """What the page shows of a value: no text with what no page should get."""
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


PAGES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True,
                           finalize=shown_text, undefined=jinja2.StrictUndefined, trim_blocks=True,
                           lstrip_blocks=True)
PAGES.filters.update(numeric=numeric, breakable=breakable, measured=tables.measured,
                     svg=lambda data: "data:image/svg+xml;base64," + base64.b64encode(data).decode())
PAGES.globals.update(MEANING=MEANING, BUT=BUT, INTERIM=INTERIM,
                     BADGES=(*MEANING, "failed", "no runs yet", *(INTERIM + word for word in MEANING)))


def page(study, comparisons, beyond=(), drawn=None):
    """report.html; drawn: {name of a picture: its SVG as bytes, or None}."""
    rows = [*against_plain(study, comparisons), *others(comparisons)]

    def verdict(study, c):
        return limited_verdict(study, comparisons, c)
    main = tables.tasks_table(study, comparisons) if is_of_tasks(study) else tables.verdicts_table(
        study, comparisons, verdict=verdict)
    cards = [(verdict(study, c), against_in_words(study, c), full_sentence(study, c),
              c.worth and c.worth.words) for c in rows]
    where = [study.name, study.config.get("scale"), study.made.get("date"), listed(study.texts)]
    return PAGES.get_template("page.html").render(
        study=study, title=question_of(study), where=" · ".join(str(each) for each in where if each),
        headline=headline(study, comparisons, beyond), notices=notices(study, comparisons), main=main,
        cards=cards, remarks=" ".join(remarks(study, comparisons, beyond)),
        following=next_study(study, comparisons), baseline=baseline_of(study), level=level(study),
        drawn={**dict.fromkeys(("forest", "forest_narrow", "learning", "learning_narrow")), **(drawn or {})},
        texts=tables.texts_table(study, comparisons, verdict=verdict), alone=tables.alone_table(study),
        others=tables.others_table(study, comparisons), screened=tables.screened_table(study),
        target=tables.target_table(study, beyond), rates=tables.rates_table(study),
        costs=tables.costs_table(study) if trained_here(study) else tables.Table((), []),
        variants=tables.variants_table(study), runs=tables.runs_tables(study),
        failures=tables.failures_table(study), settings=tables.settings_of(study), tasks=is_of_tasks(study),
        learned=tables.learned_table(study) if is_of_tasks(study) else None,
        levels=tables.levels_tables(study) if is_of_tasks(study) else [], trained_here=trained_here(study),
        unit=MEASURES[study.measure].unit, measure=MEASURES[study.measure], tested=len(tested(comparisons)))


# ---- files ----

def write(study, comparisons, folder, beyond=()):
    """Write report.html, report.md, forest.svg and forest.png into a folder -> their paths. UserError: the
    disk refuses.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = study, comparisons
    drawn = {draw.__name__: drawing.picture_bytes(draw, found)
             for draw in (pictures.forest, pictures.forest_narrow, pictures.learning,
                          pictures.learning_narrow)}
    files = {"report.html": page(study, comparisons, beyond, drawn).encode("utf-8", "replace"),
             "report.md": in_markdown(study, comparisons, beyond).encode("utf-8", "replace"),
             "forest.svg": drawn["forest"], "forest.png": drawn["forest"] and drawing.picture_bytes(
                 pictures.forest, found, "png")}
    paths = []
    for name, data in files.items():
        if data:
            write_atomic(folder / name, lambda file, data=data: file.write(data))
            paths.append(folder / name)
    return paths


def write_all(study, comparisons, folder, beyond=()):
    """Print the report, write its files, print their paths. UserError: the disk refuses."""
    print(in_text(study, comparisons, beyond))
    say(*write(study, comparisons, folder, beyond))
