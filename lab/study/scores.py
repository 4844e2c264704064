"""
Runs that another program made: a CSV file with a row for each, as the results of a study.

    python compare.py scores scores.csv --baseline=plain

Columns: variant, seed, score. Optional: tokens or bytes that a run was trained on, and its cost in any unit.
A score `failed` is a run without one. Other columns are left alone. docs/scores.md has examples.
"""

import csv
import re

from nanoheads.common import UserError, printable, read_whole
from lab.study import effects
from lab.study.records import LARGEST, Arm, Failure, StudyResults, is_finite

NEEDED, OPTIONAL = ("variant", "seed", "score"), ("tokens", "bytes", "cost")
FAILED = "failed"  # in the place of a score
MOST_NAMED = 20    # bad rows


# ---- the file ----

def read(path):
    """The rows of a CSV file: {"variant", "seed", "score" (None: failed), "tokens", "bytes", "cost"}.

    UserError names every row that cannot be used by its line.
    """
    first = {}

    def parse(cells, line):
        row, problem = parsed(cells)
        key = row["variant"], row["seed"]
        if not problem and first.setdefault(key, line) != line:
            problem = f"{key[0]} with seed {key[1]} is on line {first[key]} already"
        return row, problem

    rows = rows_of(path, NEEDED, OPTIONAL, parse)
    if not rows:
        raise UserError(f"{path} has no runs")
    return rows


def rows_of(path, needed, optional, parse):
    """The rows of a CSV file, each as parse({column: text}, line) -> (row, what is wrong with it or None).

    UserError: it cannot be read, or a column of `needed` is missing; or it names every row that cannot be
    used by its line.
    """
    try:
        text = read_whole(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"cannot read {path}: {getattr(e, 'strerror', None) or 'not UTF-8 text'}") from None
    lines = csv.reader(text.splitlines())
    try:
        head = [title.strip().lower() for title in next(lines, [])]
    except csv.Error as e:
        raise UserError(f"{path}, line 1: {e}") from None
    if missing := [title for title in needed if title not in head]:
        raise UserError(f"{path}, line 1: no column {', '.join(missing)}; it must name "
                        f"{', '.join(needed[:-1])} and {needed[-1]}, and has {', '.join(head) or 'nothing'}")
    if twice := [title for title in (*needed, *optional) if head.count(title) > 1]:
        raise UserError(f"{path}, line 1: the column {twice[0]} is there twice")
    rows, wrong = [], []
    try:
        for cells in lines:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(head):
                row, problem = None, f"{len(cells)} cells, where the first line has {len(head)}"
            else:
                row, problem = parse(dict(zip(head, (cell.strip() for cell in cells))), lines.line_num)
            if problem:
                wrong.append(f"{path}, line {lines.line_num}: {problem}")
            else:
                rows.append(row)
    except csv.Error as e:
        wrong.append(f"{path}, line {lines.line_num}: {e}")
    if wrong:
        more = len(wrong) - MOST_NAMED
        raise UserError("\n".join([*wrong[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]))
    return rows


def parsed(cells):
    """(one row, what is wrong with it or None); cells: {column: text}."""
    row = dict(variant=printable(cells["variant"]), seed=seed_of(cells["seed"]))
    if empty := [key for key in NEEDED if not cells[key]]:
        return row, f"no {' and no '.join(empty)}"
    row["score"] = None if cells["score"].lower() == FAILED else finite(cells["score"])
    if row["score"] is None and cells["score"].lower() != FAILED:
        return row, f"score {cells['score']!r} is not a finite number up to {LARGEST:g}, nor '{FAILED}'"
    for key in OPTIONAL:
        row[key] = finite(cells[key]) if cells.get(key) else None
        if cells.get(key) and not (row[key] and row[key] > 0):
            return row, f"{key} {cells[key]!r} is not a number above 0, and up to {LARGEST:g}"
    return row, None


def seed_of(text):
    """A seed as it is named here: 01 and 1.0, as other programs write it, are the seed 1."""
    number = re.fullmatch(r"0*(\d+)(\.0*)?", text, re.ASCII)
    return number[1] if number else printable(text)


def finite(text):
    """A number up to LARGEST, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if is_finite(value) else None


# ---- the study ----

def study_of(rows, name, baseline=None, alpha=0.05, margin=0.01, higher_is_better=False, target=None):
    """The StudyResults of these rows: the baseline is its "plain".

    baseline: None: the first variant of the file. target: what each mean is to lie below, or above where
    higher is better; None: nothing. UserError: there is no such variant, or no other one and no target.
    """
    names = list(dict.fromkeys(row["variant"] for row in rows))
    baseline = baseline or names[0]
    if baseline not in names:
        raise UserError(f"--baseline={baseline} is not a variant of {name}; it has {', '.join(names)}")
    if len(names) < 2 and target is None:
        raise UserError(f"{name} has one variant, {names[0]}: nothing to compare it with; --target=NUMBER "
                        "asks whether its mean lies below a number")
    arms, failures = {}, []
    for variant in names:
        own = [row for row in rows if row["variant"] == variant]
        key = "plain" if variant == baseline else f"plain of {name}" if variant == "plain" else variant
        arms[key] = arm_of(variant, own, "plain" if variant == baseline else "variant")
        failures += [Failure(arm=key, seed=row["seed"], stage="judge", why=FAILED,
                             log=f"{variant} {row['seed']}") for row in own if row["score"] is None]
    unknown = dict(versions={}, config={}, plain={}, machine=None, data=None, seeds=[], command="")
    study = StudyResults(
        name=name, question=f"{name}: against {baseline}", alpha=alpha, margin=margin, arms=arms, runs={},
        measure="score, higher is better" if higher_is_better else "score",
        pairs=[(key, "plain", []) for key in arms if key != "plain"], failures=failures, planned=len(rows),
        done=len(rows) - len(failures), procedure=effects.PROCEDURE, comparisons=[],
        target=target, **unknown)
    return effects.with_figures(study)


def arm_of(label, rows, kind):
    """A variant of another program: its scores, and the means of what its runs took."""
    amounts = {column: mean([row[column] for row in rows]) for column in OPTIONAL}
    unknown = dict.fromkeys(("steps", "params", "flops_per_token", "executed_flops_per_token", "seconds",
                             "tokens_per_s", "memory_mib", "best_step"))
    return Arm(kind=kind, label=label, flags={}, multiple=1.0, seeds=[row["seed"] for row in rows],
               bpb=[row["score"] for row in rows], runs=["" for _ in rows], **amounts, **unknown)


def mean(values):
    """The mean of what is known; None: not of every run."""
    return sum(values) / len(values) if None not in values else None
