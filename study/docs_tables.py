"""
The tables and the pictures of README.md and docs/ that come from results/. `compare.py report --tables` makes
them.

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
from nanoheads.tasks import LEARNED_SHARE
from study import pictures, records
from study.records import PLAIN
from study.tables import (Table, across_table, at_cost, costs_table, escaped, in_markdown, mean_alone,
                          measured, on_each_in_words, others_table, score_cell, screened_table, tasks_table,
                          texts_table, verdicts_table, without)
from study.verdicts import on_each_text, same_size, verdicts
from study.words import against_plain, interval, label_of, level, verdict_of, worth_of

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
OF_TASKS = ("+ better and − worse than the plain GPT, = the same within {margin:g}; without a mark "
            "undecided; a number behind @ is the median step from which on {learned:.0%} are right, where "
            "more than half of the runs learn it")


# ---- tables of a study: text(study, comparisons, names of variants or None: all) ----

def measured_alone(table):
    """A Table as Markdown without the columns in which nothing was measured, which it names below."""
    table, left_out = measured(table)
    return "\n\n".join([in_markdown(table), *filter(None, [escaped(left_out)])])


def all_verdicts(study, comparisons, only):
    """Both tables of verdicts."""
    both = verdicts_table(study, comparisons, only), others_table(study, comparisons, only)
    return "\n\n".join(measured_alone(without(each, "params", "seeds")) for each in both if each.rows)


def timed_table(study, comparisons, only):
    """The first of the two, of differences at equal cost the mean alone."""
    return without(verdicts_table(study, comparisons, only, mean_alone), "params", "seeds", "corrected p")


def short_verdicts(study, comparisons, only):
    """The same without equal time, which a page must say how it was measured."""
    return measured_alone(without(timed_table(study, comparisons, only), "at equal time"))


def short_and_timed(study, comparisons, only):
    """The same with equal time."""
    return measured_alone(timed_table(study, comparisons, only))


def at_equal_parameters(study, comparisons, c):
    """A variant's difference to a plain GPT of as many parameters, and its verdict; –: none was trained."""
    if same_size(study.variant(c.variant).params, study.variant(PLAIN).params):
        return f"{mean_alone(c)}, {verdict_of(study, c)}"  # the plain GPT itself
    row = next((row for row in comparisons if row.variant == c.variant and row.equal == "parameters"), None)
    return f"{mean_alone(row)}, {verdict_of(study, row)}" if row else "–"


def explained_table(study, comparisons, only):
    """The variants that IN_WORDS explains, or `only`, against the plain GPT: for a reader who knows none."""
    head = ("variant: what it does", "verdict", "on each text alone", "bits/byte",
            f"difference [{level(study)}]", "worth × compute", "at equal parameters", "at equal FLOPs",
            "at equal time")
    rows = [("plain GPT: " + IN_WORDS["plain"], "–", "–", score_cell(study, PLAIN), "–", "1", *3 * "–")]
    each = on_each_text(study)
    for c in against_plain(study, comparisons, only or list(IN_WORDS)):
        if c.variant not in IN_WORDS:
            raise UserError(f"IN_WORDS in study/docs_tables.py does not say what {c.variant} does")
        rows.append((f"{label_of(study, c.variant)}: {IN_WORDS[c.variant]}", verdict_of(study, c),
                     on_each_in_words(study, each, c.variant) if each else "–", score_cell(study, c.variant),
                     interval(c), worth_of(c), at_equal_parameters(study, comparisons, c),
                     at_cost(c, "equal_flops", mean_alone), at_cost(c, "equal_time", mean_alone)))
    table = Table(head, rows, (0, 1, 2))
    return table if each else without(table, "on each text alone")


def explained(study, comparisons, only):
    """The same in Markdown."""
    return in_markdown(explained_table(study, comparisons, only))


def front(study, comparisons, only):
    """explained() in so few columns that they fit a front page."""
    return in_markdown(without(explained_table(study, comparisons, only), "on each text alone",
                               "worth × compute", "at equal time"))


def counted(study, comparisons, only):
    """What each variant costs as it is counted, without the times, which other work on a machine disturbs."""
    table = costs_table(study, only)
    times = [title for title in table.head if title.startswith(("seconds", "time"))]
    return in_markdown(without(table, *times))


def each_text(study, comparisons, only):
    """Differences over all texts, and on each."""
    table = texts_table(study, comparisons, only)
    return in_markdown(without(table, "bits/byte", "corrected p", "worth × compute", "verdict"))


def learned(study, comparisons, only):
    """Which variants of a study of tasks learn which."""
    meaning = OF_TASKS.format(margin=study.margin, learned=LEARNED_SHARE)
    return f"{in_markdown(tasks_table(study, comparisons))}\n\n{escaped(meaning)}"


TABLES = {
    "verdicts": all_verdicts,
    "short": short_verdicts,
    "short_timed": short_and_timed,
    "explained": explained,
    "front": front,
    "each_text": each_text,
    "others": lambda study, comparisons, only: in_markdown(others_table(study, comparisons, only)),
    "screened": lambda study, comparisons, only: in_markdown(screened_table(study, only)),
    "counted": counted,
    "learned": learned,
}


# ---- tables of other files ----

def pruned(folder, file, only):
    """prune.py's bits per byte: the mean over checkpoints and the range, for each number of heads kept."""
    found = json.loads(Path(folder, file).read_text(encoding="utf-8"))
    scores, heads = {}, max(row["heads"] for row in found["rows"])
    for row in found["rows"]:
        scores.setdefault(row["by"], {}).setdefault(row["kept"], []).append(row["bpb"])
    kept = sorted({n for of in scores.values() for n in of} - {heads}, reverse=True)
    rows = [(by, *(f"{statistics.mean(of[n]):.3f} [{min(of[n]):.3f}, {max(of[n]):.3f}]" if n in of else "–"
                   for n in kept)) for by, of in scores.items()]
    whole = statistics.mean(row["bpb_before"] for row in found["rows"])
    head = f"removed by (nothing: {whole:.3f})", *(f"{n} of {heads} heads kept" for n in kept)
    return in_markdown(Table(head, rows))


def judged(path):
    """(Study, its Comparisons) of a results file."""
    study, _ = records.read(path)
    return study, verdicts(study)


def size_of(path):
    """What a study of a ladder is called: 0.33M, of ladder-nano/0.33M.json.gz."""
    return Path(path).name.removesuffix(".json.gz")


def ladder(folder, file, more):
    """What studies of several sizes find: that of a file, and those of `more` names."""
    files = [file, *(more or ())]
    return in_markdown(across_table({size_of(each): judged(Path(folder, each)) for each in files}))


# kind -> text(the folder of results, the file's name, the rest of its mark or None)
TABLES_OF_FILES = {"ladder": ladder, "pruned": pruned}


# ---- the pages ----

def pages(root):
    """README.md and every page of docs/."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def filled(text, where, folder):
    """A page's text, every table in it as the folder of results has it now. UserError: an unknown kind, or no
    file.
    """
    def fill(match):
        head, kind, file, only, end = match.groups()
        if kind not in (known := {**TABLES, **TABLES_OF_FILES}):
            raise UserError(f"{where}: no table is called {kind}; there are {', '.join(known)}")
        names = re.split(r",\s*", only) if only else None
        if kind in TABLES_OF_FILES:
            text = TABLES_OF_FILES[kind](folder, file, names)
        else:
            text = TABLES[kind](*judged(Path(folder, file)), names)
        return f"{head}{text}\n{end}"

    return MARK.sub(fill, text)


def picture(folder, files):
    """The PNG of a results file's differences; of several files, by size."""
    found = [judged(Path(folder, file)) for file in files]
    if len(found) == 1:
        return drawing.picture_bytes(pictures.forest, found[0], "png")
    sizes = [(size_of_blocks(study), study, own) for study, own in found]
    return drawing.picture_bytes(pictures.ladder, sizes, "png")


def size_of_blocks(study):
    """Parameters of the plain GPT's blocks, as its width and depth have them."""
    run = next(run for run in study.runs if run.stage == "judge" and run.variant == PLAIN)
    return 12 * run.spec["model"]["n_layer"] * run.spec["model"]["n_embd"] ** 2


def write(root=ROOT, drawn=None):
    """Write every table of README.md and docs/ and draw the pictures; a line for each file that changed.

    drawn: {picture: its results files}; None: PICTURES.
    """
    folder, changed = Path(root, "results"), []
    before = {page: page.read_text(encoding="utf-8") for page in pages(Path(root))}
    after = {page: filled(text, page.name, folder) for page, text in before.items()}
    for page in before:
        if after[page] != before[page]:
            write_atomic(page, lambda file, text=after[page]: file.write(text.encode()))
            changed.append(f"{page.relative_to(root)}: tables written from results/")
    for name, files in (PICTURES if drawn is None else drawn).items():
        path, data = Path(root, name), picture(folder, files)
        if not path.is_file() or path.read_bytes() != data:
            write_atomic(path, lambda file, data=data: file.write(data))
            changed.append(f"{name}: drawn from {', '.join(f'results/{file}' for file in files)}")
    return changed
