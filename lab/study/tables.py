"""
The tables and the picture of README.md and docs/ that come from results/. `python compare.py --tables` makes
them.

A table stands between `<!-- table: KIND FILE [rows] -->` and `<!-- end -->`; what is between is written anew.
PICTURES names each picture of a study, its differences or what it finds at each size, and its results file.
"""

import html as escaping
import re
from pathlib import Path

from nanoheads import drawing
from nanoheads.common import ROOT, UserError, write_atomic
from lab.study import effects, pictures, results
from lab.study.findings import (Table, against_plain, at_cost, candidates_table, costs_table, dynamic_tables,
                                interval, label_of, ladder_table, level, mean_alone, measured, on_each_text,
                                others, others_table, plain_rates_table, score_of, screened_table,
                                texts_table, tuned_table, verdict_of, verdicts_table, without, worth_of)

PICTURES = {"docs/forest.png": "all-tiny.json.gz", "docs/ladder.png": "ladder-nano.json.gz"}

# what a variant of the tables "explained" and "front" does, in words
IN_WORDS = {
    "plain": "the same model without any mechanism",
    "short_conv": "each query, key and value is mixed with those of the two tokens before",
    "constraint_a": "constraint heads: three more attention heads in one block, used without labels here",
    "key_offset": "half of each key's dimensions come from the token before",
    "diff": "differential attention: each head subtracts a second attention map from its first",
    "output_gate": "each head's output is multiplied by a gate between 0 and 1, which depends on the token",
    "unet_scalar": "a later block's output also gets an earlier block's, times a learned number",
    "xsa": "exclusive attention: the part of a head's output along the token's own value is taken out",
    "routing_inf": "a router lets each token use two of the four heads",
    "routing_published": "the router as its write-up prints it, whose gates act in training only",
}

MARK = re.compile(r"(<!-- table: (\w+) (\S+\.gz)(?: ([^>]*?))? -->\n).*?(<!-- end -->)", re.S)


# ---- a table as Markdown ----

def escaped(text):
    """Text that is nothing but text in Markdown, also in a cell of a table."""
    return re.sub(r"([\\`*_|\[\]#~])", r"\\\1", " ".join(escaping.escape(str(text), quote=False).split()))


def in_markdown(head, rows, words):
    rule = ["---" if i in words else "---:" for i in range(len(head))]
    return "\n".join([f"| {' | '.join(map(escaped, head))} |", f"|{'|'.join(rule)}|",
                      *(f"| {' | '.join(map(escaped, row))} |" for row in rows)])


def measured_alone(table):
    """A table as Markdown without the columns in which nothing was measured, which it names below."""
    table, left_out = measured(table)
    return "\n\n".join([in_markdown(*table), *filter(None, [escaped(left_out)])])


def verdicts(found, only=None):
    tables = verdicts_table(found, only), others_table(found, only)
    return "\n\n".join(measured_alone(without(each, "params", "seeds")) for each in tables if each.rows)


def short_verdicts(found, only=None):
    """The first of the two tables alone, of differences at equal FLOPs the mean alone."""
    return measured_alone(without(timed_table(found, only), "at equal time"))


def short_and_timed(found, only=None):
    """short_verdicts() and equal time, for a page that says how time was measured: findings.timed_how()."""
    return measured_alone(timed_table(found, only))


def timed_table(found, only):
    return without(verdicts_table(found, only, mean_alone), "params", "seeds", "corrected p")


def at_equal_parameters(found, c):
    """A variant's difference to a plain GPT of as many parameters, and its verdict; –: none was trained."""
    if effects.same_size(*(found["arms"][name].get("params") for name in (c["variant"], "plain"))):
        return f"{mean_alone(c)}, {verdict_of(found, c)}"  # the plain GPT itself
    row = next((row for row in others(found)
                if row["variant"] == c["variant"] and row["equal"] == ["parameters"]), None)
    return f"{mean_alone(row)}, {verdict_of(found, row)}" if row else "–"


def explained_table(found, only):
    """The variants that IN_WORDS explains, or `only`, against the plain GPT: for a reader who knows none.

    found: of several texts, all of them together.
    """
    head = ("variant: what it does", "verdict", "on each text alone", "bits/byte",
            f"difference [{level(found)}]", "worth × compute", "at equal parameters", "at equal FLOPs",
            "at equal time")
    rows = [("plain GPT: " + IN_WORDS["plain"], "–", "–", score_of(found, "plain"), "–", "1", *3 * "–")]
    for c in against_plain(found, only or list(IN_WORDS)):
        if c["variant"] not in IN_WORDS:
            raise UserError(f"IN_WORDS in lab/study/tables.py does not say what {c['variant']} does")
        rows.append((f"{label_of(found, c['variant'])}: {IN_WORDS[c['variant']]}", verdict_of(found, c),
                     on_each_text(found, c["variant"]), score_of(found, c["variant"]), interval(c),
                     worth_of(c), at_equal_parameters(found, c), at_cost(c, "equal_flops", mean_alone),
                     at_cost(c, "equal_time", mean_alone)))
    table = Table(head, rows, (0, 1, 2))
    return table if found.get("texts") else without(table, "on each text alone")


def explained(found, only=None):
    return in_markdown(*explained_table(found, only))


def front(found, only=None):
    """explained() in so few columns that they fit a front page."""
    return in_markdown(*without(explained_table(found, only), "on each text alone", "worth × compute",
                                "at equal time"))


def counted(found, only=None):
    """What each variant costs as it is counted, without the times, which other work on a machine disturbs."""
    table = costs_table(found, only)
    times = [title for title in table.head if title.startswith(("seconds", "time of"))]
    return in_markdown(*without(table, *times))


def of_each_size(make):
    """The table of a study; of a ladder, one for each size under its name; of several texts, over all."""
    def text(found, only=None):
        if "sizes" in found:
            return "\n\n".join(f"**{size}**\n\n{make(study, only)}" for size, study in found["sizes"].items())
        return make(effects.pooled(found) if "texts" in found else found, only)
    return text


# what README.md and docs/ can hold of a results file: kind -> text(found, names of variants or None: all)
TABLES = {
    "verdicts": of_each_size(verdicts),
    "short": of_each_size(short_verdicts),
    "short_timed": of_each_size(short_and_timed),
    "explained": of_each_size(explained),
    "front": of_each_size(front),
    "each_text": lambda found, only=None: in_markdown(*without(
        texts_table(found, only), "bits/byte", "corrected p", "worth × compute", "verdict")),
    "others": of_each_size(lambda found, only=None: in_markdown(*others_table(found, only))),
    "counted": of_each_size(counted),
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


def picture(file):
    """The PNG of a results file's differences; of several texts, over all of them; of a ladder, by size."""
    found = results.read(ROOT / "results" / file)
    if "sizes" in found:
        return drawing.drawn(pictures.ladder, found, "png")
    return drawing.drawn(pictures.forest, effects.pooled(found) if "texts" in found else found, "png")


def write_pictures():
    """Draw PICTURES; a line for each that changed."""
    changed = []
    for name, file in PICTURES.items():
        path, data = ROOT / name, picture(file)
        if not path.is_file() or path.read_bytes() != data:
            write_atomic(path, lambda f, data=data: f.write(data))
            changed.append(f"{name}: drawn from results/{file}")
    return changed


def write():
    """Write every table of pages() and draw PICTURES; a line for each file that changed."""
    before = {page: (ROOT / page).read_text(encoding="utf-8") for page in pages()}
    after = {page: filled(text, page) for page, text in before.items()}
    changed = [page for page in before if after[page] != before[page]]
    for page in changed:
        write_atomic(Path(ROOT, page), lambda f, text=after[page]: f.write(text.encode()))
    return [*(f"{page}: tables written from results/" for page in changed), *write_pictures()]
