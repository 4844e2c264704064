"""
Writes the tables and pictures of README.md and docs/ that come from results/, and the lists of files in
docs/code.md (compare.py report --tables).

A table stands between `<!-- table: KIND FILE [rows] -->` and `<!-- end -->`, and is written anew each time.
PICTURE_FILES names each picture and its results files. One file: the picture shows a study's differences;
several: it shows what studies of several sizes find. A list of files stands between `<!-- files -->` and
`<!-- end -->`: each file keeps its place there, and gets the first sentence of its docstring.
"""

import ast
import json
import re
import statistics
from pathlib import Path

from nanoheads import drawing
from nanoheads.common import ROOT, UserError, write_atomic
from nanoheads.tasks import LEARNED_SHARE
from study import pictures, records
from study.records import PLAIN
from study.tables import (Table, cost_cell, drop_columns, drop_unmeasured, escape_markdown,
                          in_markdown, mean_cell, others_table, score_cell, sizes_table,
                          tasks_table, texts_table, verdicts_on_texts, verdicts_table)
from study.verdicts import comparisons_by_text, comparisons_of, same_size
from study.words import (against_plain, confidence_level, interval, label_of, verdict_of,
                         worth_in_words)

PICTURE_FILES = {"docs/forest.png": ["all-tiny.json.gz"],
                 "docs/ladder.png": [f"ladder-nano/{size}.json.gz" for size in ("0.1M", "0.33M", "1M")]}

# what a variant of the table "explained" does, in words
DESCRIPTIONS = {
    "plain": "the same model without any mechanism",
    "short_conv_kv": "each key and value is mixed with those of the two tokens before",
    "short_conv": "each query, key and value is mixed with those of the two tokens before",
    "short_conv_x": "the input of the attention layer is mixed with that of the two tokens before",
    "constraint_a": "constraint heads: three more attention heads in one block, used without labels here",
    "key_offset": "half of each key's dimensions come from the token before",
    "diff": "differential attention: each head subtracts a second attention map from its first",
    "constraint_published": "constraint heads by the literal formula of their write-up",
    "mudd": "a block reads weighted sums of the outputs of all blocks before it",
    "output_gate": "each head's output is multiplied by a gate between 0 and 1, which depends on the token",
    "unet_scalar": "a later block's output also gets an earlier block's, times a learned number",
    "stream_scalars": "each block reads a learned mix of the residual stream and the embedding",
    "xsa": "exclusive attention: the part of a head's output along the token's own value is taken out",
    "routing_inf": "a router lets each token use two of the four heads",
    "routing_train_only": "a router lets each token use two of the four heads, in training only",
    "routing_published": "the router as its write-up prints it, whose gates act in training only",
    "routing, no entropy": "the router as printed, without the entropy term of its loss",
}

# gpu-compile.json has tables of its own: tests/lab/gpu/report.py
MARK = re.compile(r"(<!-- table: (\w+) (?!gpu-compile)(\S+\.json(?:\.gz)?)(?: ([^>]*?))? -->\n)"
                  r".*?(<!-- end -->)", re.S)
LEGEND_OF_TASKS = ("+ better and − worse than the plain GPT, = the same within {margin:g}; without a mark "
                   "undecided; a number behind @ is the median step from which on {learned:.0%} are right, "
                   "where more than half of the runs learn it")


# ---- tables of a study in Markdown; only: names of variants, None: all ----

def measured_markdown(table):
    """A Table as Markdown without the columns in which nothing was measured, which it names below."""
    table, left_out = drop_unmeasured(table)
    return "\n\n".join([in_markdown(table), *filter(None, [escape_markdown(left_out)])])


def verdicts_markdown(study, comparisons, only):
    """Both tables of verdicts."""
    tables = verdicts_table(study, comparisons, only), others_table(study, comparisons)
    return "\n\n".join(measured_markdown(drop_columns(table, "params", "seeds"))
                       for table in tables if table.rows)


def short_markdown(study, comparisons, only):
    """The table of verdicts against the plain GPT, without its column at equal time."""
    table = verdicts_table(study, comparisons, only, mean_cell)
    return measured_markdown(drop_columns(table, "params", "seeds", "corrected p", "at equal time"))


def equal_parameters_cell(study, comparisons, c):
    """A variant's difference to a plain GPT of as many parameters, and its verdict; –: none was trained."""
    if same_size(study.variant(c.variant).params, study.variant(PLAIN).params):
        return f"{mean_cell(c)}, {verdict_of(study, c)}"  # the plain GPT itself
    at_equal = next((row for row in comparisons if row.variant == c.variant and row.equal == "parameters"),
                    None)
    return f"{mean_cell(at_equal)}, {verdict_of(study, at_equal)}" if at_equal else "–"


def explained_markdown(study, comparisons, only):
    """The variants with DESCRIPTIONS, or `only`, against the plain GPT: for readers who know none."""
    head = ("variant: what it does", "verdict", "on each text alone", "bits/byte",
            f"difference [{confidence_level(study)}]", "worth × compute", "at equal parameters",
            "at equal FLOPs", "at equal time")
    rows = [("plain GPT: " + DESCRIPTIONS["plain"], "–", "–", score_cell(study, PLAIN), "–", "1", *3 * "–")]
    by_text = comparisons_by_text(study)
    for c in against_plain(study, comparisons, only or list(DESCRIPTIONS)):
        if c.variant not in DESCRIPTIONS:
            raise UserError(f"DESCRIPTIONS in study/docs_tables.py does not say what {c.variant} does")
        rows.append((f"{label_of(study, c.variant)}: {DESCRIPTIONS[c.variant]}", verdict_of(study, c),
                     verdicts_on_texts(study, by_text, c.variant) if by_text else "–",
                     score_cell(study, c.variant), interval(c), worth_in_words(c),
                     equal_parameters_cell(study, comparisons, c),
                     cost_cell(c, "equal_flops", mean_cell), cost_cell(c, "equal_time", mean_cell)))
    table = Table(head, rows, (0, 1, 2))
    return in_markdown(table if by_text else drop_columns(table, "on each text alone"))


def each_text_markdown(study, comparisons, only):
    """Differences over all texts, and on each."""
    table = texts_table(study, comparisons)
    return in_markdown(drop_columns(table, "bits/byte", "corrected p", "worth × compute", "verdict"))


def learned_markdown(study, comparisons, only):
    """Which variants of a study of tasks learn which task."""
    meaning = LEGEND_OF_TASKS.format(margin=study.margin, learned=LEARNED_SHARE)
    return f"{in_markdown(tasks_table(study, comparisons))}\n\n{escape_markdown(meaning)}"


TABLES = {
    "verdicts": verdicts_markdown,
    "short": short_markdown,
    "explained": explained_markdown,
    "each_text": each_text_markdown,
    "others": lambda study, comparisons, only: in_markdown(others_table(study, comparisons)),
    "learned": learned_markdown,
}


# ---- tables of other files ----

def pruned_markdown(folder, file, only):
    """prune.py's bits per byte: the mean over checkpoints and the range, for each number of heads kept."""
    results = json.loads(Path(folder, file).read_text(encoding="utf-8"))
    scores, heads = {}, max(row["heads"] for row in results["rows"])
    for row in results["rows"]:
        scores.setdefault(row["by"], {}).setdefault(row["kept"], []).append(row["bpb"])
    kept = sorted({n for by_kept in scores.values() for n in by_kept} - {heads}, reverse=True)
    rows = [(by, *(range_cell(by_kept.get(n)) for n in kept)) for by, by_kept in scores.items()]
    whole = statistics.mean(row["bpb_before"] for row in results["rows"])
    head = f"removed by (nothing: {whole:.3f})", *(f"{n} of {heads} heads kept" for n in kept)
    return in_markdown(Table(head, rows))


def range_cell(values):
    """The mean and the range of some values; –: there are none."""
    return f"{statistics.mean(values):.3f} [{min(values):.3f}, {max(values):.3f}]" if values else "–"


def read_and_judge(path):
    """(Study, its Comparisons) of a results file."""
    study, _ = records.read(path)
    return study, comparisons_of(study)


def size_of(path):
    """The name of a study of a ladder: 0.33M of ladder-nano/0.33M.json.gz."""
    return Path(path).name.removesuffix(".json.gz")


def ladder_markdown(folder, file, names):
    """The table of studies of several sizes, of this file and of the other files' names."""
    files = [file, *(names or ())]
    return in_markdown(sizes_table({size_of(name): read_and_judge(Path(folder, name)) for name in files}))


# kind -> text(the folder of results, the file's name, the rest of its mark or None)
TABLES_OF_FILES = {"ladder": ladder_markdown, "pruned": pruned_markdown}


# ---- lists of files ----

LIST = re.compile(r"(<!-- files -->\n)(.*?)(<!-- end -->)", re.S)


def files_in(text):
    """The files that the lists of a page name, in their order."""
    return [name for _, rows, _ in LIST.findall(text) for name in re.findall(r"^\| `(\S+)` \|", rows, re.M)]


def first_sentence(path):
    """What a file of Python is for: the first sentence of its docstring, without the full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph.split(". ")[0].removesuffix(".")


def fill_lists(text, where):
    """A page's text with the first sentence of each file in its lists. UserError: a file is not there."""
    def fill(match):
        rows = []
        for name in files_in(match[0]):
            if not (ROOT / name).is_file():
                raise UserError(f"{where}: there is no file {name}")
            rows.append((f"`{name}`", first_sentence(ROOT / name).replace("<", "&lt;")))
        lines = [f"| {name} | {sentence} |\n" for name, sentence in [("file", "what it is for"), *rows]]
        return "".join([match[1], lines[0], "|---|---|\n", *lines[1:], match[3]])

    return LIST.sub(fill, text)


# ---- the pages ----

def pages(root):
    """README.md and every page of docs/."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def fill_tables(text, where, folder):
    """A page's text with every table written from the folder of results. UserError: an unknown kind, or no
    file.
    """
    def fill(match):
        head, kind, file, only, end = match.groups()
        if kind not in (kinds := {**TABLES, **TABLES_OF_FILES}):
            raise UserError(f"{where}: no table is called {kind}; there are {', '.join(kinds)}")
        names = re.split(r",\s*", only) if only else None
        if kind in TABLES_OF_FILES:
            text = TABLES_OF_FILES[kind](folder, file, names)
        else:
            text = TABLES[kind](*read_and_judge(Path(folder, file)), names)
        return f"{head}{text}\n{end}"

    return MARK.sub(fill, text)


def draw_picture(folder, files):
    """The PNG of a results file's differences; of several files, by size."""
    studies = [read_and_judge(Path(folder, file)) for file in files]
    if len(studies) == 1:
        return drawing.picture_bytes(pictures.forest, studies[0], "png")
    sizes = [(size_of_blocks(study), study, comparisons) for study, comparisons in studies]
    return drawing.picture_bytes(pictures.ladder, sizes, "png")


def size_of_blocks(study):
    """Parameters of the plain GPT's blocks, as its width and depth have them."""
    run = next(run for run in study.runs if run.stage == "judge" and run.variant == PLAIN)
    return 12 * run.spec["model"]["n_layer"] * run.spec["model"]["n_embd"] ** 2


def write(root=ROOT, picture_files=None):
    """Write every table and list of README.md and docs/ and draw the pictures; a line for each changed file.

    picture_files: {picture: its results files}; None: PICTURE_FILES.
    """
    folder, changed = Path(root, "results"), []
    before = {page: page.read_text(encoding="utf-8") for page in pages(Path(root))}
    after = {page: fill_tables(fill_lists(text, page.name), page.name, folder)
             for page, text in before.items()}
    for page in before:
        if after[page] != before[page]:
            write_atomic(page, lambda file, text=after[page]: file.write(text.encode()))
            changed.append(f"{page.relative_to(root)}: tables written")
    for name, files in (PICTURE_FILES if picture_files is None else picture_files).items():
        path, data = Path(root, name), draw_picture(folder, files)
        if not path.is_file() or path.read_bytes() != data:
            write_atomic(path, lambda file, data=data: file.write(data))
            changed.append(f"{name}: drawn from {', '.join(f'results/{file}' for file in files)}")
    return changed
