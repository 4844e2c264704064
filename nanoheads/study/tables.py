"""
The tables of README.md and docs/ that come from results/, written by `python compare.py --tables`.

A table stands between `<!-- table: KIND FILE [rows] -->` and `<!-- end -->`; what is between is written anew.
"""

import html as escaping
import re
from pathlib import Path

from nanoheads.common import ROOT, UserError, write_atomic
from nanoheads.study import analysis, results
from nanoheads.study.findings import (candidates_table, costs_table, dynamic_tables, ladder_table, mean_alone,
                                      others_table, plain_rates_table, screened_table, texts_table,
                                      tuned_table, verdicts_table, without)

MARK = re.compile(r"(<!-- table: (\w+) (\S+\.gz)(?: ([^>]*?))? -->\n).*?(<!-- end -->)", re.S)


# ---- a table as Markdown ----

def escaped(text):
    """Text that is nothing but text in Markdown, also in a cell of a table."""
    return re.sub(r"([\\`*_|\[\]#~])", r"\\\1", " ".join(escaping.escape(str(text), quote=False).split()))


def in_markdown(head, rows, words):
    rule = ["---" if i in words else "---:" for i in range(len(head))]
    return "\n".join([f"| {' | '.join(map(escaped, head))} |", f"|{'|'.join(rule)}|",
                      *(f"| {' | '.join(map(escaped, row))} |" for row in rows)])


def verdicts(found, only=None):
    tables = verdicts_table(found, only), others_table(found, only)
    return "\n\n".join(in_markdown(*without(each, "params", "seeds")) for each in tables if each.rows)


def short_verdicts(found, only=None):
    """The first of the two tables alone, of differences at equal FLOPs the mean alone."""
    more = ("params", "seeds", "corrected p", "at equal time")
    return in_markdown(*without(verdicts_table(found, only, mean_alone), *more))


def of_each_size(make):
    """The table of a study; of a ladder, one for each size under its name; of several texts, over all."""
    def text(found, only=None):
        if "sizes" in found:
            return "\n\n".join(f"**{size}**\n\n{make(study, only)}" for size, study in found["sizes"].items())
        return make(analysis.pooled(found) if "texts" in found else found, only)
    return text


# what README.md and docs/ can hold of a results file: kind -> text(found, names of variants or None: all)
TABLES = {
    "verdicts": of_each_size(verdicts),
    "short": of_each_size(short_verdicts),
    "screened": of_each_size(lambda found, only=None: in_markdown(*screened_table(found, only))),
    "costs": of_each_size(lambda found, only=None: in_markdown(*costs_table(found, only))),
    "lives": of_each_size(lambda found, only=None: "\n\n".join(
        in_markdown(*each) for each in dynamic_tables(found, only))),
    "plain_rates": of_each_size(lambda found, only=None: in_markdown(*plain_rates_table(found))),
    "tuned": of_each_size(lambda found, only=None: in_markdown(*tuned_table(found, only))),
    "candidates": of_each_size(lambda found, only=None: in_markdown(*candidates_table(found, only))),
    "texts": lambda found, only=None: in_markdown(*texts_table(found, only)),
    "ladder": lambda found, only=None: in_markdown(*ladder_table(found, only)),
}


# ---- the pages ----

def pages():
    """README.md and every page of docs/, as names in the repository."""
    return ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]


def filled(text, where):
    """A page's text, every table in it as results/ has it now. UserError: an unknown kind, or no file."""
    def fill(match):
        head, kind, file, only, end = match.groups()
        if kind not in TABLES:
            raise UserError(f"{where}: no table is called {kind}; there are {', '.join(TABLES)}")
        found = results.read(ROOT / "results" / file)
        names = re.split(r",\s*", only) if only else None
        return f"{head}{TABLES[kind](found, names)}\n{end}"

    return MARK.sub(fill, text)


def write():
    """Write every table of pages(); a line for each page that changed."""
    before = {page: (ROOT / page).read_text(encoding="utf-8") for page in pages()}
    after = {page: filled(text, page) for page, text in before.items()}
    changed = [page for page in before if after[page] != before[page]]
    for page in changed:
        write_atomic(Path(ROOT, page), lambda f, text=after[page]: f.write(text.encode()))
    return [f"{page}: tables written from results/" for page in changed]
