"""
The report of a study: a table for the terminal, report.md, report.html (page.py), the forest plot; of a
ladder, ladder.md and its picture, and the report of each size.

All of it comes from a results.json.gz: `python compare.py --from_results=FILE` makes it again.
"""

import html as escaping
import re
import textwrap
from pathlib import Path

from nanoheads.common import table, write_atomic
from nanoheads.study import page, pictures
from nanoheads.study.findings import (Table, against_plain, candidates_table, costs_table, equal_of, headline,
                                      label_of, labelled, ladder_sentences, ladder_table, lives_tables,
                                      mean_alone, notices, others, others_table, printable, remarks,
                                      screened_table, sentence_of, settings_of, tuned_table, verdicts_table,
                                      without)

# ---- terminal ----

def table_of(found, width=120):
    """The plain GPT and each variant, the best first; long names lose their beginning to keep to `width`."""
    if "sizes" in found:
        above, tables = [f"{found['name']}: effects over sizes"], [ladder_table(found)]
        below = [f"{name}: {text}" for name, text in ladder_sentences(found)]
    else:
        whose, said = f"{found['name']}: ", headline(found)
        above = [said if said.startswith(whose) else whose + said, *notices(found)]
        below = [" ".join(remarks(found))]
        main, more = (without(part(found), "seeds", "corrected p") for part in (verdicts_table, others_table))
        # of differences at equal cost the mean alone: intervals and costs are on the page
        rows = [[cell.split()[0] if title.startswith("at equal") else cell
                 for title, cell in zip(main.head, row)] for row in main.rows]
        tables = [Table([title.removeprefix("at ") for title in main.head], rows, main.words), more,
                  *lives_tables(found)]
    above, below = ([line for text in texts for line in textwrap.wrap(printable(text), width)]
                    for texts in (above, below))
    tables = [table(head, rows, left=words, width=width) + "\n" for head, rows, words in tables if rows]
    return "\n".join([*above, *tables, *below])


# ---- markdown ----

def escaped(text):
    """Text that is nothing but text in Markdown, also in a cell of a table."""
    return re.sub(r"([\\`*_|\[\]#~])", r"\\\1", " ".join(escaping.escape(str(text), quote=False).split()))


def in_markdown(head, rows, words):
    rule = ["---" if i in words else "---:" for i in range(len(head))]
    return "\n".join([f"| {' | '.join(map(escaped, head))} |", f"|{'|'.join(rule)}|",
                      *(f"| {' | '.join(map(escaped, row))} |" for row in rows)])


def verdicts(found, only=None, drop=("params", "seeds")):
    tables = verdicts_table(found, only), others_table(found, only)
    return "\n\n".join(in_markdown(*without(each, *drop)) for each in tables if each.rows)


def short_verdicts(found, only=None):
    """The first of the two tables alone, of differences at equal FLOPs the mean alone."""
    more = ("params", "seeds", "corrected p", "at equal time")
    return in_markdown(*without(verdicts_table(found, only, mean_alone), *more))


def of_each_size(make):
    """The table of a study; of a ladder, one for each size under its name."""
    def text(found, only=None):
        if "sizes" in found:
            return "\n\n".join(f"**{size}**\n\n{make(study, only)}" for size, study in found["sizes"].items())
        return make(found, only)
    return text


# what README.md and docs/ can hold of a results file: kind -> text(found, names of variants or None: all)
TABLES = {
    "verdicts": of_each_size(verdicts),
    "short": of_each_size(short_verdicts),
    "screened": of_each_size(lambda found, only=None: in_markdown(*screened_table(found, only))),
    "costs": of_each_size(lambda found, only=None: in_markdown(*costs_table(found, only))),
    "lives": of_each_size(lambda found, only=None: "\n\n".join(
        in_markdown(*each) for each in lives_tables(found, only))),
    "tuned": of_each_size(lambda found, only=None: in_markdown(*tuned_table(found, only))),
    "candidates": of_each_size(lambda found, only=None: in_markdown(*candidates_table(found, only))),
    "ladder": lambda found, only=None: in_markdown(*ladder_table(found, only)),
}


def markdown(found):
    lines = [f"# {escaped(found['question'] or found['name'])}", "", f"**{escaped(headline(found))}**", "",
             *(f"> {escaped(text)}\n" for text in notices(found)),
             verdicts(found, drop=()), "", escaped(" ".join(remarks(found))), "", "## Verdicts in words"]
    for c in [*against_plain(found), *others(found)]:
        who, other = escaped(label_of(found, c["variant"])), escaped(label_of(found, c["baseline"]))
        words = escaped(sentence_of(found, c))
        lines.append(f"- **{who}** against {other}, at equal {equal_of(c)}: {words}")
    for title, part in (("All variants on validation", screened_table(found)), ("Costs", costs_table(found)),
                        ("Learning rates", tuned_table(found)), ("Best rates", candidates_table(found))):
        if part.rows:
            lines += ["", f"## {title}", "", in_markdown(*part)]
    for each in lives_tables(found):
        lines += ["", "## What became of the heads" if each.head[0].startswith("mean") else "",
                  in_markdown(*each)]
    lines += ["", "## Settings", *(f"- {key}: {escaped(value)}" for key, value in settings_of(found))]
    if found["failures"]:
        lines += ["", "## Failures"]
    for f in found["failures"]:
        lines.append(f"- {escaped(f['arm'])}, seed {f['seed']}: {escaped(f['why'])} ({escaped(f['log'])})")
    lines += ["", "## Commands", "", "    " + " ".join(found["command"].splitlines())]
    for label, variant in labelled(found):
        commands = ["    " + " ".join(command.splitlines()) for command in variant.get("commands") or ["–"]]
        lines += ["", f"{escaped(label)}, runs {', '.join(variant.get('runs') or ['–'])}:", "", *commands]
    return "\n".join(lines) + "\n"


def ladder_markdown(found):
    lines = [f"# {escaped(found['name'])}: effects over sizes", "", in_markdown(*ladder_table(found)), "",
             *(f"- **{escaped(name)}**: {escaped(text)}" for name, text in ladder_sentences(found)), "",
             "![worth of each variant against size](ladder.svg)", "",
             "Worth: at that multiple of its training compute the plain GPT of that size has the same score.",
             "Reports: " + ", ".join(f"[{size}]({size}/report.md)" for size in found["sizes"])]
    return "\n".join([*lines, "", "    " + " ".join(found["command"].splitlines())]) + "\n"


# ---- files ----

def write_all(found, folder):
    """Print the table, write every file of the report, print their paths. UserError: the disk refuses."""
    print(table_of(found))
    print(*write(found, folder), sep="\n")


def write(found, folder):
    """Write every file of the report -> their paths. UserError: the disk refuses."""
    folder, paths = Path(folder), []
    folder.mkdir(parents=True, exist_ok=True)

    def save(name, put):
        write_atomic(folder / name, put)
        paths.append(folder / name)

    def save_text(name, text):
        save(name, lambda f: f.write(text.encode("utf-8", "replace")))

    if "sizes" in found:
        save_text("ladder.md", ladder_markdown(found))
        main, drawn = "ladder", {"ladder": pictures.drawn(pictures.ladder, found)}
    else:
        main, drawn = "forest", {draw.__name__: pictures.drawn(draw, found)
                                 for draw in (pictures.forest, pictures.learning, pictures.compute)}
        save_text("report.md", markdown(found))
        save_text("report.html", page.html(found, drawn))
    if drawn[main]:
        save(f"{main}.svg", lambda f: f.write(drawn[main]))
        save(f"{main}.png", lambda f: f.write(pictures.drawn(getattr(pictures, main), found, "png")))
    for size, study in found.get("sizes", {}).items():
        paths += write(study, folder / size)
    return paths
