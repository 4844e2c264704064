"""
docs/ledger.html: the rows of ledger.py as one page, which loads nothing, sorts and filters itself.

The rows are plain HTML, and open without a script; ledger.js sorts them, filters them and adds their age.
"""

import html as escaping
import re
from pathlib import Path

from nanoheads.common import ROOT
from nanoheads.study.findings import MEANING, known
from nanoheads.study.page import Html, badge, details, document, note, tag

OWN_CSS = Path(__file__).with_name("ledger.css").read_text(encoding="utf-8")
SCRIPT = Path(__file__).with_name("ledger.js").read_text(encoding="utf-8")
# heading: (what is shown, what is sorted by, whether it is a number)
COLUMNS = {
    "mechanism": ("label", "label", False), "size": ("size", "blocks", True),
    "text, recipe": ("text", "text", False), "stage": ("stage", "stage", False),
    "difference, bits/byte": ("difference", "mean", True), "worth × compute": ("worth", "value", True),
    "FLOPs ×": ("flops", "flops_value", True), "step time ×": ("time", "time_value", True),
    "verdict": ("verdict", "verdict", False), "seeds": ("seeds", "seeds", True),
    "date, code": ("date", "date", False)}
CODE_STATES = ("today's", "older", "unknown")  # of a row's runs
FILTERS = ("verdict", "size", "text", "recipe", "stage", "code")
STAGES = {
    "judged on test": "seeds that chose nothing, the test split: what a claim rests on",
    "judged on validation": "a first look at text that also chooses: no claim rests on it",
    "screened on validation": "few seeds, to choose what is judged: no verdict",
    "plain GPT": "the other side of the comparisons of its study"}
LEAD = ("Every variant of every study in results/, against the plain GPT that was trained beside it. Lower "
        "bits/byte are better: a difference below 0 is a gain.")
READING = (
    "Intervals are over seeds, 95 % where their study sets nothing else, and not corrected; verdicts are, "
    "for all comparisons of their study.",
    "Worth: at that multiple of its training compute the plain GPT is as good. FLOPs as executed and the "
    "time of a step are those of the variant over the plain GPT's. Without a step time: it was not measured, "
    "or other programs ran on the machine meanwhile.",
    "Size: parameters of the plain GPT's blocks. Recipe: that of both sides, and the plain GPT's steps.",
    "Code: today's, where every run of both sides would be computed by the same code today; older and in "
    "grey, where that has changed since, so that it may come out otherwise; unknown, where the mechanism's "
    "file is not here. That was so when python compare.py --ledger last wrote this page.")


def value_of(row, key, is_number):
    """What a cell is sorted by; "": nothing, and it stands last."""
    value = row[key]
    return (f"{value:.8g}" if known(value) else "") if is_number else str(value).lower()


def breakable(text):
    """A name that may be broken behind its underscores."""
    return Html(tag("span", text).replace("_", "_<wbr>"))


def cell(row, title):
    """A cell of a row under a title of COLUMNS."""
    shown, key, is_number = COLUMNS[title]
    text = str(row[shown])
    classes = f"{'n' if is_number else 'w'} c-{shown}"
    more = f" data-sort='{escaping.escape(value_of(row, key, is_number))}' data-label='{title}'"
    if title == "verdict":
        text = badge(text)
    elif key == "text":
        text = Html(breakable(text) + " " + tag("small", row["recipe"]))
    elif key == "date":
        text = Html(tag(f"time datetime='{escaping.escape(text)}'", text) + " "
                    + tag("small class=code", f"{row['code']} code"))
    elif is_number:
        mean, bracket, interval = text.replace("-", "−").partition(" [")
        text = Html(tag("span", mean) + (" " + tag("small", "[" + interval) if bracket else ""))
    return tag(f"td role=cell class='{classes}'{more}", text)


def first_cell(row):
    """The mechanism, which opens the row; below it what is not the plain GPT at equal hyperparameters."""
    against = [f"against {row['against']}"] if row["against"] not in ("plain GPT", "–") else []
    against += [f"equal {row['equal']}"] if row["equal"] not in ("hyperparameters", "–") else []
    under = [", ".join(against), "" if row["is_named"] else row["flags"]]
    small = "".join(tag("small", text) for text in under if text)
    opened = tag("details", tag("summary", breakable(row["label"])))
    sort = escaping.escape(value_of(row, "label", False))
    return tag(f"th scope=row role=rowheader class=w data-label=mechanism data-sort='{sort}'",
               opened, Html(small))


def link(text, target):
    return tag(f"a href='{escaping.escape(target)}'", text)


def chapter_of(flag, page):
    """(heading, anchor) of the chapter of docs/mechanisms.md with the row of a flag; None: there is none."""
    for part in re.split(r"^## ", page, flags=re.M)[2:]:
        heading = part.splitlines()[0]
        if re.search(rf"^\| `{re.escape(flag)}` \| .* \| .* \|", part, re.M) and heading != "The entries":
            return heading, re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def inside(row, mechanisms):
    """What a row opens to: the study's words, its runs, flags, write-up, claims and commands."""
    facts = tag("dl", *(Html(tag("dt", what) + tag("dd", text)) for what, text in row["facts"]))
    heads = tag("thead", tag("tr", *(tag("th", title) for title in ("seed", "bits/byte", "run"))))
    runs = tag("table class=runs", heads,
               tag("tbody", *(tag("tr", *(tag("td", str(part)) for part in run)) for run in row["runs"])))
    chapters = [found for flag in row["kinds"] if (found := chapter_of(flag, mechanisms))]
    about = [tag("li", "Formula and source: ", link(heading, f"mechanisms.md#{anchor}"))
             for heading, anchor in chapters]
    about += [tag("li", link(f"{number}", f"claims.md#{anchor}"), f" {claim}: ", tag("em", verdict))
              for number, anchor, claim, verdict in row["claims"]]
    file = link(row["file"], f"../results/{row['file']}")
    parts = [tag("div", tag("h3", "What the study says"), facts),
             tag("div", tag("h3", f"Runs ({len(row['runs'])})"), runs, tag("p", "In results/", file)),
             tag("div", tag("h3", "Flags"), tag("pre", row["flags"] or "those of the plain GPT")),
             tag("div", tag("h3", "Write-up and claims"), tag("ul", *about) if about else tag("p", "none")),
             tag("div class=wide", tag("h3", "Commands"), tag("pre", "\n".join([
                 *row["commands"], f"python compare.py --from_results=results/{row['file']}   # its report",
                 f"python compare.py --recheck=results/{row['file']}        # its figures"])))]
    return Html("".join(parts))


def entry(row, mechanisms):
    """Two rows of the table, of which the second is there while the first is open."""
    cells = [first_cell(row), *(cell(row, title) for title in list(COLUMNS)[1:])]
    data = "".join(f" data-{key}='{escaping.escape(str(row[key]))}'" for key in FILTERS)
    file = escaping.escape(row["file"])
    style = f"tbody role=rowgroup id='{row['id']}' data-file='{file}'{data}"
    more = tag(f"td role=cell colspan={len(COLUMNS)}", tag("div class=inside", inside(row, mechanisms)))
    return tag(style, tag("tr role=row", *cells), tag("tr role=row class=more", more))


def controls(rows):
    """The search box and the filters, hidden until the script is there."""
    def choice(key, words):
        options = "".join(tag(f"option value='{escaping.escape(value)}'", text) for value, text in words)
        return tag("label", key, tag(f"select id='{key}'", Html(options)))

    def in_order(key):
        if key == "code":  # whichever there is: each change of the code makes rows older
            return CODE_STATES
        values = list(dict.fromkeys(row[key] for row in sorted(rows, key=lambda row: row["blocks"])))
        first = {"size": values, "verdict": [*MEANING], "stage": [*STAGES]}.get(key, [])
        return [*(value for value in first if value in values), *sorted({*values} - {*first})]

    box = tag("label class=search", "search", Html("<input id=search type=search autocomplete=off>"))
    filters = [choice(key, [("", "all"), *((value, value) for value in in_order(key))]) for key in FILTERS]
    sorting = [("", "as listed"), *((str(i), title) for i, title in enumerate(COLUMNS))]
    return tag("form id=controls hidden", box, *filters, choice("sort", sorting),
               tag("button type=button id=turn aria-pressed=false", "largest first"),
               tag("button type=reset", "show all"))


def html(rows):
    """The page of these rows."""
    mechanisms = (ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8")
    heads = [tag(f"th role=columnheader scope=col aria-sort=none class={'n' if is_number else 'w'}",
                 tag("button type=button", title)) for title, (_, _, is_number) in COLUMNS.items()]
    words = [*(Html(badge(word) + f" {escaping.escape(text)}.") for word, text in MEANING.items()),
             *(Html(tag("strong", stage) + f": {text}.") for stage, text in STAGES.items()), *READING]
    header = tag("header", tag("h1", "Ledger"), tag("p", LEAD),
                 details("How to read this", *(tag("p", text) for text in words)))
    files = len({row["file"] for row in rows})
    count = tag("p id=count role=status class=note", f"{len(rows)} rows of {files} files")
    grid = tag("table id=ledger role=table", tag("thead role=rowgroup", tag("tr role=row", *heads)),
               *(entry(row, mechanisms) for row in rows))
    foot = note("Written from results/ by python compare.py --ledger, which computes every figure once more.")
    return document("Ledger", tag("main", header, controls(rows), count, grid, foot), OWN_CSS, SCRIPT)

