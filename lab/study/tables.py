"""
The tables and the picture of README.md and docs/ that come from results/. `python compare.py report --tables`
makes them.

A table stands between `<!-- table: KIND FILE [rows] -->` and `<!-- end -->`; what is between is written anew.
PICTURES names each picture and its results files: of one file it shows the differences of a study, of several
what studies of several sizes find.
"""

import json
import re
import statistics
from pathlib import Path

from nanoheads import drawing
from nanoheads.common import ROOT, UserError, write_atomic
from lab.study import effects, pictures, results, task_report, task_study
from lab.study.findings import (Table, against_plain, at_cost, candidates_table, costs_table, dynamic_tables,
                                escaped, in_markdown, interval, label_of, ladder_table, level, mean_alone,
                                measured, on_each_text, others, others_table, score_of,
                                screened_table, texts_table, tuned_table, verdict_of, verdicts_table, without,
                                worth_of)
from lab.study.records import TextsResults

PICTURES = {"docs/forest.png": ["all-tiny.json.gz"],
            "docs/ladder.png": [f"ladder-nano/{size}.json.gz" for size in ("0.1M", "0.33M", "1M")]}

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

# gpu-compile.json has tables of its own: tests/lab/gpu/report.py
MARK = re.compile(r"(<!-- table: (\w+) (?!gpu-compile)(\S+\.json(?:\.gz)?)(?: ([^>]*?))? -->\n)"
                  r".*?(<!-- end -->)", re.S)


# ---- tables of a study ----

def measured_alone(table):
    """A table as Markdown without the columns in which nothing was measured, which it names below."""
    table, left_out = measured(table)
    return "\n\n".join([in_markdown(*table), *filter(None, [escaped(left_out)])])


def verdicts(study, only=None):
    tables = verdicts_table(study, only), others_table(study, only)
    return "\n\n".join(measured_alone(without(each, "params", "seeds")) for each in tables if each.rows)


def short_verdicts(study, only=None):
    """The first of the two tables alone, of differences at equal FLOPs the mean alone."""
    return measured_alone(without(timed_table(study, only), "at equal time"))


def short_and_timed(study, only=None):
    """short_verdicts() and equal time, for a page that says how time was measured: findings.timed_how()."""
    return measured_alone(timed_table(study, only))


def timed_table(study, only):
    return without(verdicts_table(study, only, mean_alone), "params", "seeds", "corrected p")


def at_equal_parameters(study, c):
    """A variant's difference to a plain GPT of as many parameters, and its verdict; –: none was trained."""
    if effects.same_size(*(study.arms[name].params for name in (c.variant, "plain"))):
        return f"{mean_alone(c)}, {verdict_of(study, c)}"  # the plain GPT itself
    row = next((row for row in others(study)
                if row.variant == c.variant and row.equal == ["parameters"]), None)
    return f"{mean_alone(row)}, {verdict_of(study, row)}" if row else "–"


def explained_table(study, only):
    """The variants that IN_WORDS explains, or `only`, against the plain GPT: for a reader who knows none.

    study: of several texts, all of them together.
    """
    head = ("variant: what it does", "verdict", "on each text alone", "bits/byte",
            f"difference [{level(study)}]", "worth × compute", "at equal parameters", "at equal FLOPs",
            "at equal time")
    rows = [("plain GPT: " + IN_WORDS["plain"], "–", "–", score_of(study, "plain"), "–", "1", *3 * "–")]
    for c in against_plain(study, only or list(IN_WORDS)):
        if c.variant not in IN_WORDS:
            raise UserError(f"IN_WORDS in lab/study/tables.py does not say what {c.variant} does")
        rows.append((f"{label_of(study, c.variant)}: {IN_WORDS[c.variant]}", verdict_of(study, c),
                     on_each_text(study, c.variant), score_of(study, c.variant), interval(c),
                     worth_of(c), at_equal_parameters(study, c), at_cost(c, "equal_flops", mean_alone),
                     at_cost(c, "equal_time", mean_alone)))
    table = Table(head, rows, (0, 1, 2))
    return table if study.texts else without(table, "on each text alone")


def explained(study, only=None):
    return in_markdown(*explained_table(study, only))


def front(study, only=None):
    """explained() in so few columns that they fit a front page."""
    return in_markdown(*without(explained_table(study, only), "on each text alone", "worth × compute",
                                "at equal time"))


def counted(study, only=None):
    """What each variant costs as it is counted, without the times, which other work on a machine disturbs."""
    table = costs_table(study, only)
    times = [title for title in table.head if title.startswith(("seconds", "time of"))]
    return in_markdown(*without(table, *times))


def over_all_texts(make):
    """The table of a study; of several texts, over all."""
    def text(found, only=None):
        return make(effects.pooled(found) if isinstance(found, TextsResults) else found, only)
    return text


# what README.md and docs/ can hold of a results file: kind -> text(found, names of variants or None: all)
TABLES = {
    "verdicts": over_all_texts(verdicts),
    "short": over_all_texts(short_verdicts),
    "short_timed": over_all_texts(short_and_timed),
    "explained": over_all_texts(explained),
    "front": over_all_texts(front),
    "each_text": lambda found, only=None: in_markdown(*without(
        texts_table(effects.pooled(found), only), "bits/byte", "corrected p", "worth × compute", "verdict")),
    "others": over_all_texts(lambda found, only=None: in_markdown(*others_table(found, only))),
    "counted": over_all_texts(counted),
    "screened": over_all_texts(lambda found, only=None: in_markdown(*screened_table(found, only))),
    "costs": over_all_texts(lambda found, only=None: in_markdown(*costs_table(found, only))),
    "lives": over_all_texts(lambda found, only=None: "\n\n".join(
        in_markdown(*each) for each in dynamic_tables(found, only))),
    "tuned": over_all_texts(lambda found, only=None: in_markdown(*tuned_table(found, only))),
    "candidates": over_all_texts(lambda found, only=None: in_markdown(*candidates_table(found, only))),
    "texts": lambda found, only=None: in_markdown(*texts_table(effects.pooled(found), only)),
}


# ---- results of other programs ----

def pruned(found, only=None):
    """prune.py's bits per byte: the mean over checkpoints and the range, for each number of heads kept."""
    scores, heads = {}, max(row["heads"] for row in found["rows"])
    for row in found["rows"]:
        scores.setdefault(row["by"], {}).setdefault(row["kept"], []).append(row["bpb"])
    kept = sorted({n for of in scores.values() for n in of} - {heads}, reverse=True)
    rows = [(by, *(f"{statistics.mean(of[n]):.3f} [{min(of[n]):.3f}, {max(of[n]):.3f}]" if n in of else "–"
                   for n in kept)) for by, of in scores.items()]
    whole = statistics.mean(row["bpb_before"] for row in found["rows"])
    head = f"removed by (nothing: {whole:.3f})", *(f"{n} of {heads} heads kept" for n in kept)
    return in_markdown(head, rows, (0,))


def learned(path, only=None):
    """Which variants of a study of tasks learn which, as the page of the study has it."""
    found = task_study.read(path)
    if found is None:
        raise UserError(f"{path} holds no study of tasks")
    head, rows = task_report.table_of(found)
    meanings = task_report.meanings_of(found)
    return f"{in_markdown(head, rows, (0,))}\n\n{escaped(meanings)}"


def ladder(path, more=None):
    """What studies of several sizes find: that of a file, and those of `more` names in results/."""
    paths = [path, *(ROOT / "results" / name for name in more or ())]
    return in_markdown(*ladder_table([results.read(each) for each in paths]))


# kind -> text(the file's path, the rest of its mark)
TABLES_OF_FILES = {"ladder": ladder, "learned": learned}
# kind -> text(what the JSON file holds, its rows or None: all)
OTHER_TABLES = {"pruned": pruned}


# ---- the pages ----

def pages():
    """README.md and every page of docs/, as names in the repository."""
    return ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]


def filled(text, where):
    """A page's text, every table in it as results/ has it now. UserError: an unknown kind, or no file."""
    def fill(match):
        head, kind, file, only, end = match.groups()
        if kind not in (known := {**TABLES, **OTHER_TABLES, **TABLES_OF_FILES}):
            raise UserError(f"{where}: no table is called {kind}; there are {', '.join(known)}")
        path, names = ROOT / "results" / file, re.split(r",\s*", only) if only else None
        if kind in TABLES_OF_FILES:
            text = TABLES_OF_FILES[kind](path, names)
        elif kind in OTHER_TABLES:
            text = OTHER_TABLES[kind](json.loads(path.read_text(encoding="utf-8")), names)
        else:
            text = TABLES[kind](results.read(path), names)
        return f"{head}{text}\n{end}"

    return MARK.sub(fill, text)


def picture(files):
    """The PNG of a results file's differences, of several texts over all of them; of several files, by size.
    """
    found, *more = (results.read(ROOT / "results" / file) for file in files)
    if more:
        return drawing.drawn(pictures.ladder, [found, *more], "png")
    study = effects.pooled(found) if isinstance(found, TextsResults) else found
    return drawing.drawn(pictures.forest, study, "png")


def write_pictures():
    """Draw PICTURES; a line for each that changed."""
    changed = []
    for name, files in PICTURES.items():
        path, data = ROOT / name, picture(files)
        if not path.is_file() or path.read_bytes() != data:
            write_atomic(path, lambda f, data=data: f.write(data))
            changed.append(f"{name}: drawn from {', '.join(f'results/{file}' for file in files)}")
    return changed


def write():
    """Write every table of pages() and draw PICTURES; a line for each file that changed."""
    before = {page: (ROOT / page).read_text(encoding="utf-8") for page in pages()}
    after = {page: filled(text, page) for page, text in before.items()}
    changed = [page for page in before if after[page] != before[page]]
    for page in changed:
        write_atomic(Path(ROOT, page), lambda f, text=after[page]: f.write(text.encode()))
    return [*(f"{page}: tables written from results/" for page in changed), *write_pictures()]
