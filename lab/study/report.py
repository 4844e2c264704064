"""
The report of a study: a table for the terminal, report.html from templates/, the forest plot; of a study of
several texts also the report of each.

All of it comes from a results.json.gz: `python compare.py report FILE` makes it again. The page loads
nothing from the network, and text from a results file is escaped where it is shown: samples hold anything.
"""

import base64
import math
import re
import textwrap
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from nanoheads import drawing
from nanoheads.common import no_link, printable, say, table, write_atomic
from lab.study import effects, pictures
from lab.study.findings import (BUT, INTERIM, MEANING, Table, against_plain, baseline_of, better_side,
                                candidates_table, costs_table, dynamic_tables, equal_of, headline, interval,
                                known, label_of, labelled, level, limited_verdict, mean_alone,
                                mean_of, measured, next_study, notices, others, others_table, part_of,
                                question_of, remarks, screened_table, sentence_of,
                                settings_of, show, steps_table, target_table, texts_table,
                                tuned_table, verdict_of, verdicts_table, without)
from lab.study.records import TextsResults

SEEDS_ABREAST = 10  # columns of a table that a desk's window holds

# ---- terminal ----

def in_text(results, width=120):
    """The plain GPT and each variant, the best first; long names lose their end to keep to `width`."""
    if isinstance(results, TextsResults):
        both = effects.pooled(results)
        above = [headline(both), *notices(both)]
        tables = [without(texts_table(both), "bits/byte"),
                  without(others_table(both), "the other's")]
        below, following = remarks(both), next_study(both)
    else:
        study = results
        name, first = f"{study.name}: ", headline(study)
        if not study.question:
            name = f"{question_of(study)} "
        above = [first if first.startswith(name) else name + first, *notices(study)]
        below, following = remarks(study), next_study(study)
        # of differences at equal cost the mean alone: intervals, costs and sizes are on the page
        main = without(verdicts_table(study, difference=mean_alone), "params", "seeds")
        rows = [[cell.partition(" at ")[0] if title.startswith("at equal") else cell
                 for title, cell in zip(main.head, row)] for row in main.rows]
        main = Table([title.removeprefix("at ") for title in main.head], rows, main.words)
        tables = [main, without(others_table(study), "the other's"),
                  *([target_table(study)] if study.targets else []),
                  *dynamic_tables(study)]
    tables, left_out = zip(*map(measured, tables))
    below = [*left_out, *below]
    lines = [in_terminal(above, tables, [" ".join(filter(None, below))], width)]
    if following:  # a command is not broken into lines: it is there to be copied
        lines += ["", *textwrap.wrap(printable(following["words"]), width)]
        lines += [f"    {following['command']}"] if following["command"] else []
    return "\n".join(lines)


def in_terminal(above, tables, below, width=120):
    """Sentences, tables and sentences as lines of at most `width` characters."""
    above, below = ([line for text in texts for line in textwrap.wrap(printable(text), width)]
                    for texts in (above, below))
    tables = [table(head, rows, left=words, width=width) + "\n" for head, rows, words in tables if rows]
    return "\n".join([*above, *tables, *below])


# ---- the page ----

def numeric(text):
    """A cell of numbers, which may break before an interval and before a cost alone."""
    return re.sub(r" (?!\[|at )", "\N{NO-BREAK SPACE}", text.replace("-", "−"))


def breakable(text):
    """Text as HTML that may break behind each underscore and plus: names of variants have no spaces."""
    return Markup(re.sub(r"([_+])", r"\1<wbr>", str(escape(printable(text)))))


def shaded(value):
    """Rows of (depth of colour in percent, text) of a statistic: a row a layer, a cell a head."""
    rows = [row if isinstance(row, list) else [row]
            for row in (value if any(isinstance(row, list) for row in value) else [value])]
    cells = [v for row in rows for v in row if known(v)] or [0]
    low, span = min(cells), max(cells) - min(cells) or math.inf
    return [[(f"{45 * (v - low) / span:.0f}" if known(v) else "0", show(v, ".3g").replace("-", "−"))
             for v in row] for row in rows]


def shown_text(value):
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


PAGES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
                           autoescape=True, finalize=shown_text, undefined=jinja2.StrictUndefined,
                           trim_blocks=True, lstrip_blocks=True)
PAGES.filters.update(numeric=numeric, breakable=breakable, shaded=shaded, measured=measured,
                     shown=lambda value: show(value, ".4g"),
                     base64=lambda data: base64.b64encode(data).decode())
PAGES.globals.update(MEANING=MEANING, BUT=BUT,
                     BADGES=(*MEANING, "failed", "no runs yet", *(INTERIM + word for word in MEANING)))


def page(study, drawn=None):
    """report.html of a study; drawn: {name of a drawing: SVG as bytes, or None}."""
    rows, more = against_plain(study), others(study)
    every = [*rows, *more]
    verdicts = [*(limited_verdict(study, c) for c in rows), *(verdict_of(study, c) for c in more)]
    cards = [dict(variant=label_of(study, c.variant), baseline=label_of(study, c.baseline),
                  verdict=verdict, equal=equal_of(study, c), sentence=sentence_of(study, c),
                  worth=c.worth and c.worth.words) for c, verdict in zip(every, verdicts)]
    seeds = {name: len(arm.seeds) for name, arm in study.arms.items()}
    lost = [(label_of(study, f.arm), str(f.seed), f.why, f.log) for f in study.failures]
    configs = [(label_of(study, name), name, arm.kind,
                " ".join(f"{key}={value}" for key, value in (arm.flags or {}).items()) or "–")
               for name, arm in study.arms.items()]
    in_order = dict.fromkeys(["plain", *(c.variant for c in against_plain(study)), *study.arms])
    samples = [(label_of(study, name), study.arms[name].sample) for name in in_order
               if study.arms[name].sample]
    return PAGES.get_template("report.html").render(
        study=study, baseline=baseline_of(study), title=question_of(study), level=level(study),
        where=" · ".join(str(each) for each in (study.name, study.scale, study.date) if each),
        headline=headline(study), notices=notices(study),
        verdicts=verdicts_table(study, verdict=limited_verdict), cards=cards,
        remarks=" ".join(remarks(study, "the table under Seed by seed")), following=next_study(study),
        drawn={"forest": None, "forest_narrow": None, "learning": None, "compute": None, **(drawn or {})},
        texts=texts_table(study, verdict=limited_verdict) if study.texts else None,
        others=others_table(study),
        target=target_table(study) if study.targets else None,
        screened=screened_table(study), steps=steps_table(study),
        costs=costs_table(study), tuned=tuned_table(study), candidates=candidates_table(study),
        dynamic=dynamic_tables(study), runs=runs_tables(study), over_text=over_text_table(study, every),
        heads=[(name, arm.heads) for name, arm in labelled(study) if arm.heads], samples=samples,
        configs=Table(("variant", "name", "kind", "what differs from the plain GPT"), configs, range(4)),
        labelled=labelled(study),
        corrected_for=effects.corrected_for(study),
        settings=settings_of(study) if study.kind.trained_here else [],
        more_seeds=seeds["plain"] > min(seeds.values()),
        failures=Table(("variant", "seed", "why", "log"), lost, (0, 2, 3)))


def runs_tables(study):
    """Bits/byte of every run, SEEDS_ABREAST seeds a table: of the later ones only what has such seeds."""
    seeds = sorted({seed for arm in study.arms.values() for seed in arm.seeds})
    tables = []
    for at in range(0, len(seeds), SEEDS_ABREAST):
        part, rows = seeds[at:at + SEEDS_ABREAST], []
        for label, arm in labelled(study):
            own = dict(zip(arm.seeds, arm.bpb))
            if not at or {*part} & {*own}:
                rows.append((label, show(mean_of(arm.bpb), ".4f"),
                             *(show(own.get(seed), ".4f") for seed in part)))
        tables.append(Table(("variant", "mean", *(f"seed {seed}" for seed in part)), rows))
    return tables


def over_text_table(study, every):
    """The interval of each comparison over seeds, and the one over the text beside it."""
    rows = []
    for c in every:
        low, high = (show(end, "+.4f") for end in ((c.text.low, c.text.high) if c.text else (None, None)))
        rows.append((label_of(study, c.variant), label_of(study, c.baseline), interval(c),
                     f"[{low}, {high}]"))
    over = [f"over {what} [{level(study)}], {better_side(study)}" for what in ("seeds", "text")]
    return Table(("variant", "against", *over), rows, (0, 1))


# ---- files ----

def write_all(results, folder):
    """Print the table, write every file of the report, print their paths. UserError: the disk refuses."""
    print(in_text(results))
    say(*write(results, folder))


def write(results, folder):
    """Write every file of the report -> their paths. UserError: the disk refuses."""
    draws = [pictures.forest, pictures.forest_narrow, pictures.learning, pictures.compute]
    several = isinstance(results, TextsResults)
    paths = write_page(effects.pooled(results) if several else results, folder, page, draws)
    for name in results.texts if several else ():
        paths += write(part_of(results, name), no_link(Path(folder, name)))
    return paths


def write_page(results, folder, make, draws):
    """Write report.html by make(results, drawings) and the first drawing by itself -> their paths."""
    folder, paths = Path(folder), []
    folder.mkdir(parents=True, exist_ok=True)

    def save(name, data):
        write_atomic(folder / name, lambda f: f.write(data))
        paths.append(folder / name)

    drawn = {draw.__name__: drawing.drawn(draw, results) for draw in draws}
    save("report.html", make(results, drawn).encode("utf-8", "replace"))
    main = draws[0].__name__
    if drawn[main]:
        save(f"{main}.svg", drawn[main])
        save(f"{main}.png", drawing.drawn(draws[0], results, "png"))
    return paths
