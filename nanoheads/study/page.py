"""
report.html: what a study found as one page, which loads nothing from the network.

Text from a results file is escaped where it is shown: samples hold anything.
"""

import base64
import hashlib
import html as escaping
import math
import re
from pathlib import Path

from nanoheads.study.findings import (MEANING, Table, against_plain, candidates_table, costs_table,
                                      dynamic_tables, equal_of, headline, interval, known, label_of, labelled,
                                      ladder_sentences, ladder_table, level, mean_of, notices, others,
                                      others_table, plain_rates_table, printable, remarks, screened_table,
                                      sentence_of, settings_of, show, steps_table, texts_table,
                                      tuned_table, verdict_of, verdicts_table)
from nanoheads.study.stats import STRICT

SEEDS_ABREAST = 10  # columns of a table that a desk's window holds
BADGES = (*MEANING, "failed", "no runs yet")
CSS = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")


# ---- pieces ----

class Html(str):
    """Text that is HTML already; all other text is escaped on its way into the page."""


def tag(name, *parts):
    """tag("p class=note", ...) -> Html; a part that is no Html is escaped."""
    parts = (p if isinstance(p, Html) else escaping.escape(printable(p)) for p in parts)
    return Html(f"<{name}>{''.join(parts)}</{name.split()[0]}>")


def badge(verdict):
    return tag(f"span class='badge {verdict if verdict in MEANING else 'undecided'}'", verdict)


def grid(table):
    """A Table; "" without rows. It fits a desk; on a phone it scrolls in a box of its own."""
    if not table.rows:
        return ""

    def line(cells, first, other):
        shown = [number_cell(cell) if other == "td" and i not in table.words else cell
                 for i, cell in enumerate(cells)]
        shown = [badge(cell) if title == "verdict" and cell in BADGES else cell
                 for title, cell in zip(table.head, shown)]
        return tag("tr", *(tag((other if i else first) + " class=w" * (i in table.words), cell)
                           for i, cell in enumerate(shown)))

    body = tag("tbody", *(line(row, "th scope=row", "td") for row in table.rows))
    return tag("div class=scroll tabindex=0", tag("table", tag("thead", line(table.head, "th", "th")), body))


def number_cell(text):
    """A cell of numbers, which may break before an interval and before a cost alone."""
    return re.sub(r" (?!\[|at )", "\N{NO-BREAK SPACE}", text.replace("-", "−"))


def details(summary, *parts):
    return tag("details", tag("summary", summary), *parts)


def note(text):
    return tag("p class=note", text)


def image(data, words):
    """An SVG within the page; "" without one."""
    if not data:
        return ""
    source = base64.b64encode(data).decode()
    img = Html(f"<img alt='{words}' src='data:image/svg+xml;base64,{source}'>")
    return tag("div class=scroll tabindex=0", img)


# ---- sections ----

# what stands under the headings
WORDS = {
    "All variants on validation":
        "All were trained with a few seeds and scored on validation, to choose which are judged. Those "
        "were trained again with other seeds and scored on other text: luck here does not help there. "
        "These intervals are not corrected, and give no verdict.",
    "On each text":
        "The score of a seed is the mean of its runs on all texts: verdicts are over all of them. Each text "
        "has a report of its own, with curves and runs; costs, heads and samples here are of the first.",
    "Rates of the plain GPT":
        "Found on validation before anything else, by factors of 2, with seeds that judge nothing: the "
        "difference in bits/byte at half and at double the value, ± one standard error. A momentum moves by "
        "its memory, 1 / (1 - m). At its best: none is better by more than that.",
    "Effect as compute":
        "The line is the plain GPT, trained for less and for more. A variant below it is better than a plain "
        "GPT that computes as much, one above it worse; a triangle lies farther up or down. Steps to the "
        "same score are those of a plain GPT whose learning rate falls over just as many; a variant's step "
        "may cost more.",
    "Learning curves":
        "Line: mean over the finished seeds on validation; band: lowest seed to highest; dotted: mean on "
        "training text; grey: other variants on validation.",
    "Costs":
        "× is the ratio to the plain GPT. Needed: by the algorithm; executed: by these kernels, which may "
        "compute what is thrown away. Training FLOPs are executed in a whole run, evaluations aside; "
        "--dry_run shows the same. The time of a step was measured in turn with the plain GPT's; seconds "
        "and memory are medians of runs that may have shared a machine.",
    "Learning rates":
        "Bits/byte on validation of whole runs with the learning rates × each factor, one group of them at a "
        "time, one seed. The best of each group, and of all together, then meet the rates as they are over "
        "the first stage's seeds; the best of these is taken if it is better by more than one standard error "
        "of such a difference. At the edge: the best is at an end of what was tried, and a "
        "better one may lie beyond.",
    "Seed by seed":
        "Over seeds: would it come out so again if both were trained again? Over text: would these trained "
        "models rank so on other text of this kind? Verdicts rest on the first.",
    "Dynamic heads":
        "Of every judged run, when it was done: means over seeds, intervals not corrected. Generation and "
        "cache: of the model without the heads that are off, beside the plain GPT of the same seed. Samples "
        "are of fixed prompts at temperature 0.8.",
    "Inside the heads":
        "Of one finished run of each variant: a row for each layer, a column for each head; or one cell for "
        "each layer. Deeper colour: larger.",
    "Samples": "The same prompt for all: the plain GPT, then the variants from the best one on.",
}


def in_words(found):
    """Every verdict as a sentence."""
    lines = [tag("li", tag("strong", label_of(found, c["variant"])), " ", badge(verdict_of(found, c)),
                 tag("p", f"Against {label_of(found, c['baseline'])}, at equal {equal_of(found, c)}: ",
                     sentence_of(found, c)), note((c.get("worth") or {}).get("words") or ""))
             for c in [*against_plain(found), *others(found)]]
    return details("Every verdict in a sentence", tag("ul class=cards", *lines))


def runs_tables(found):
    """Bits/byte of every run, SEEDS_ABREAST seeds a table: of the later ones only what has such seeds."""
    seeds = sorted({seed for variant in found["arms"].values() for seed in variant["seeds"]})
    tables = []
    for at in range(0, len(seeds), SEEDS_ABREAST):
        part, rows = seeds[at:at + SEEDS_ABREAST], []
        for label, variant in labelled(found):
            own = dict(zip(variant["seeds"], variant["bpb"]))
            if not at or {*part} & {*own}:
                rows.append((label, show(mean_of(variant), ".4f"),
                             *(show(own.get(seed), ".4f") for seed in part)))
        tables.append(Table(("variant", "mean", *(f"seed {seed}" for seed in part)), rows))
    return tables


def seeds_of(found):
    tests = []
    for c in [*against_plain(found), *others(found)]:
        low, high = (show((c.get("text") or {}).get(end), "+.4f") for end in ("low", "high"))
        pair = (label_of(found, c["variant"]), label_of(found, c["baseline"]))
        tests.append((*pair, interval(c), f"[{low}, {high}]"))
    over = [f"over {what} [{level(found)}]" for what in ("seeds", "text")]
    tests = Table(("variant", "against", *over), tests, (0, 1))
    return tag("div", details("Bits/byte of every run", *map(grid, runs_tables(found))),
               details("Intervals over seeds and over text", grid(tests)))


def heat(value):
    """A statistic of the heads: a number, or a row for each layer, a cell for each head, darker if larger."""
    if not isinstance(value, list):
        return tag("p", show(value, ".4g"))
    rows = [row if isinstance(row, list) else [row]
            for row in (value if any(isinstance(row, list) for row in value) else [value])]
    cells = [v for row in rows for v in row if known(v)] or [0]
    low, span = min(cells), max(cells) - min(cells) or math.inf

    def cell(v):
        share = 45 * (v - low) / span if known(v) else 0
        return tag(f"td style='--heat:{share:.0f}%'", show(v, ".3g").replace("-", "−"))

    return tag("div class=scroll tabindex=0",
               tag("table class=heat", *(tag("tr", *map(cell, row)) for row in rows)))


def heads_of(found):
    return Html("".join(details(label, tag("div class=heats", *(tag("div", tag("h3", key), heat(value))
                                                                for key, value in variant["heads"].items())))
                        for label, variant in labelled(found) if variant.get("heads")))


def samples(found):
    order = dict.fromkeys(["plain", *(c["variant"] for c in against_plain(found)), *found["arms"]])
    cards = [tag("div", tag("h3", label_of(found, name)), tag("pre", found["arms"][name]["sample"]))
             for name in order if found["arms"].get(name, {}).get("sample")]
    more = details(f"{len(cards) - 3} more", tag("div class=samples", *cards[3:])) if len(cards) > 3 else ""
    return tag("div", tag("div class=samples", *cards[:3]), more) if cards else ""


def configs(found):
    rows = [(label_of(found, name), name, variant["kind"],
             " ".join(f"{key}={value}" for key, value in (variant.get("flags") or {}).items()) or "–")
            for name, variant in found["arms"].items()]
    plain = details("Every flag of the plain GPT", tag("pre", "\n".join(
        f"{key}={value}" for key, value in (found.get("plain") or {}).items())))
    head = ("variant", "name", "kind", "what differs from the plain GPT")
    return tag("div", grid(Table(head, rows, range(4))), plain)


def commands(found):
    each = [tag("div", tag("h3", label), tag("pre", "\n".join(variant.get("commands") or ["–"])),
                note(f"Runs: {', '.join(variant.get('runs') or ['–'])}"))
            for label, variant in labelled(found)]
    by_variant = details(f"Each of the {len(each)} variants by itself", *each)
    return tag("div", tag("pre", found["command"]), by_variant)


def effect_as_compute(found, picture):
    parts = [image(picture, "score against compute"), grid(steps_table(found))]
    return tag("div", *parts) if any(parts) else ""


def on_each_text(found):
    """Differences on each text of a study of several, and links to their reports; "" for one text."""
    if not found.get("texts"):
        return ""
    links = [tag("li", link_to(text)) for text in found["texts"]]
    return tag("div", grid(texts_table(found)), tag("ul", *links))


def link_to(study):
    """To the report of one of several studies, in a folder of its name."""
    return tag(f"a href='{escaping.escape(study)}/report.html'", study)


def reading(found):
    made, alpha = len(found["comparisons"]), found["alpha"]
    seeds = {name: len(variant["seeds"]) for name, variant in found["arms"].items()}
    more = "has" if seeds["plain"] > min(seeds.values()) else "may have"
    words = [tag("p", badge(word), f" {text}.") for word, text in MEANING.items()]
    texts = [
        "Bits/byte: how many bits the model needs for a byte of text that it has not seen. Lower is better, "
        "whatever the tokenizer.",
        "Seeds: each variant is trained several times from other random numbers, since luck alone makes runs "
        f"differ. The plain GPT, which stands in every comparison, {more} more seeds than a variant.",
        f"Difference [{level(found)}]: the variant's mean minus the other's, and the interval that holds the "
        "true one so often. One model of all variants and seeds takes out what they share at the same seed, "
        "where that shows, and draws similar spreads to each other.",
        f"Corrected: among many comparisons some seem good by chance; here they are {made}. The risk that "
        f"even one better or worse of the whole study is false is {100 * alpha:g} % at most, and so is the "
        "risk of a false same (simulated). So an interval may leave out zero and the verdict be leaning: "
        f"better and worse need a corrected p of {STRICT * alpha:g} where the spread of one of the two was "
        "drawn to that of the other variants, which is never quite right. Seeds that are added because a "
        "verdict is open are a second look, which is not corrected for: judge with a number set beforehand.",
        f"Margin: ±{found['margin']:g} bits/byte, set beforehand; what lies within it counts as the same.",
        "Worth × compute: known where the plain GPT was also trained for less or for more. Worth 0.9: with "
        "0.9 times its training compute it is as good as the variant, which is therefore worse; above 1, "
        "better. < and > stand for less and more than was measured.",
        "At equal FLOPs, at equal time: the difference to a plain GPT trained for as much as the variant "
        "costs, which follows the ×. A variant may win by the step and lose by the hour. Not corrected.",
        "What is equal: a wider plain GPT has as many parameters as the variant; at tuned rates both sides "
        "have their own best learning rates. Not measured: it was not timed, or no plain GPT was trained for "
        "as much. – is what is not known."]
    return tag("div", *words, *(tag("p", text) for text in texts))


# ---- the page ----

def html(found, pictures=None):
    """The page; pictures: {"forest", "learning", "compute": SVG as bytes}."""
    pictures = pictures or {}
    lost = [(label_of(found, f["arm"]), str(f["seed"]), f["why"], f["log"]) for f in found["failures"]]
    rule = note(f"Judged: {found['screen']['rule']}.") if found.get("screen") else ""
    sections = {
        "Difference to the plain GPT": image(pictures.get("forest"), "differences and their intervals"),
        "On each text": on_each_text(found),
        "Against other baselines": grid(others_table(found)),
        "Rates of the plain GPT": grid(plain_rates_table(found)),
        "All variants on validation": rule and tag("div", rule, grid(screened_table(found))),
        "Effect as compute": effect_as_compute(found, pictures.get("compute")),
        "Learning curves": image(pictures.get("learning"), "learning curves"),
        "Costs": grid(costs_table(found)),
        "Learning rates": Html(grid(tuned_table(found)) + grid(candidates_table(found))),
        "Dynamic heads": Html("".join(map(grid, dynamic_tables(found)))),
        "Seed by seed": seeds_of(found), "Inside the heads": heads_of(found), "Samples": samples(found),
        "Configurations": configs(found), "Commands": commands(found),
        "Settings": tag("dl", *(tag(kind, text) for pair in settings_of(found)
                                for kind, text in zip(("dt", "dd"), pair))),
        "How to read this": reading(found),
        "Failures": grid(Table(("variant", "seed", "why", "log"), lost, (0, 2, 3)))}
    sections = [tag("section", tag("h2", name), note(WORDS[name]) if name in WORDS else "", part)
                for name, part in sections.items() if part]
    title, warnings = found["question"] or found["name"], [tag("p", text) for text in notices(found)]
    where = " · ".join(str(found[key]) for key in ("name", "scale", "date") if found.get(key))
    header = tag("header", note(where), tag("h1", title), tag("p class=lead", headline(found)),
                 tag("div class=warnings", *warnings) if warnings else "", grid(verdicts_table(found)),
                 note(" ".join(remarks(found, "the table under Seed by seed"))), in_words(found))
    return document(title, tag("main", header, *sections))


def ladder_html(found, pictures=None):
    """The page of a ladder: how effects go with size, and the reports of its sizes."""
    title = f"{found['name']}: effects over sizes"
    lines = [tag("li", tag("strong", name), f": {text}") for name, text in ladder_sentences(found)]
    links = [tag("li", link_to(size)) for size in found["sizes"]]
    worth = "Worth: at that multiple of its training compute the plain GPT of that size has the same score."
    return document(title, tag(
        "main", tag("header", tag("h1", title), grid(ladder_table(found)), note(worth)),
        tag("section", image((pictures or {}).get("ladder"), "worth against size"), tag("ul", *lines)),
        tag("section", tag("h2", "Reports"), tag("ul", *links)),
        tag("section", tag("h2", "Command"), tag("pre", found["command"]))))


def document(title, main, css="", script=""):
    """A page that loads nothing; css: beside CSS; script: the one that may run, behind `main`."""
    # the policy has the browser refuse what the page promises not to do: load anything, run anything
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy, script = f"{policy}; script-src 'sha256-{digest}'", f"<script>{script}</script>"
    return ("<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
            f'<meta http-equiv=Content-Security-Policy content="{policy}"><link rel=icon href=\'data:,\'>'
            "<meta name=viewport content='width=device-width, initial-scale=1'>"
            f"{tag('title', title)}<style>{CSS}{css}</style></head>\n<body>{main}{script}</body></html>\n")
