"""
The scores of a study: of its finished runs, or of a CSV file that another program wrote.

    variant,seed,score,tokens      tokens, bytes and cost are optional, other columns are left alone
    plain,1,3.281,1e9
    mine,1,3.275,1e9
    mine,2,failed,1e9              a run that has no score
"""

import csv
import math
import re
from pathlib import Path
from typing import NamedTuple

from nanoheads.common import UserError, printable
from study.records import PLAIN, Failure, Pair, Result, Run, Study, Variant

REQUIRED = ("variant", "seed", "score")
OPTIONAL = ("tokens", "bytes", "cost")  # of a run, in any unit
FAILED = "failed"  # in the place of a score
MAX_NAMED = 20     # wrong lines that an error names
MAX_NUMBER = 1e50  # the squares of larger numbers would not be finite


def scores_of(study, stage="judge"):
    """{variant: {text: {seed: score}}} of the runs of one stage that are done; seeds as text."""
    return scores_in(study.runs, study.results, stage)


def scores_in(runs, results, stage="judge"):
    """The same of Runs and their {name: Result}."""
    scores = {}
    for run in runs:
        if run.stage == stage and (result := results.get(run.name)):
            scores.setdefault(run.variant, {}).setdefault(run.text, {})[str(run.seed)] = result.score
    return scores


def score_follows(result):
    """Whether a Result's score follows from its counts."""
    if result.nats is None:  # of another program
        return True
    if result.levels:
        score = sum(n_right / n_asked for _, n_right, n_asked in result.levels.values()) / len(result.levels)
    else:
        score = result.nats / math.log(2) / result.bytes
    return math.isclose(result.score, score, rel_tol=1e-9)


def differing_flags(run, variant):
    """The flags of a judged Run that differ from its Variant's, its seed among them."""
    spec = {**run.spec["train"], **run.spec["model"]}
    keys = [key for key, value in variant.flags.items()
            if key in spec and key != "seed" and spec[key] != value]
    return keys + ["seed"] * (spec.get("seed", 0) != run.seed + variant.flags.get("seed", 0))


def mean_of(scores, name, texts):
    """A variant's mean over texts of its means over seeds; None: it has no score on one of them."""
    by_text = [scores.get(name, {}).get(text) for text in texts]
    if not all(by_text):
        return None
    return sum(sum(by_seed.values()) / len(by_seed) for by_seed in by_text) / len(by_text)


# ---- of another program ----

class Row(NamedTuple):
    """A run of another program; score: None: it failed; tokens, bytes, cost: None: not given."""
    variant: str
    seed: str
    score: float | None
    tokens: float | None
    bytes: float | None
    cost: float | None


def from_csv(path, baseline=None, alpha=0.05, margin=0.01, higher_is_better=False, target=None):
    """The Study of a CSV file.

    baseline: what the others are compared with; None: the first variant. target: what each mean is to lie
    below, or above where higher is better. Raises UserError.
    """
    rows, name = read_csv(path), Path(path).name
    names = [*dict.fromkeys(row.variant for row in rows)]
    baseline = baseline or names[0]
    if baseline not in names:
        raise UserError(f"--baseline={baseline} is no variant of {name}; it has {', '.join(names)}")
    if len(names) < 2 and target is None:
        raise UserError(f"{name} has one variant, {names[0]}: nothing to compare it with; --target=NUMBER "
                        "asks whether its mean lies beyond a number")
    # the baseline is called PLAIN here, as in any study
    name_here = {**{label: label for label in names}, PLAIN: f"plain of {name}", baseline: PLAIN}
    runs = [Run("judge", name_here[row.variant], name, row.seed,
                dict(file=name, variant=row.variant, seed=row.seed)) for row in rows]
    scores = {run.name: row.score for run, row in zip(runs, rows)}
    variants = [variant_of(name_here[label], label, [row for row in rows if row.variant == label])
                for label in names]
    return Study(
        name=name, question=f"{name}: against {baseline}", texts=(name,), variants=tuple(variants),
        measure="score, higher is better" if higher_is_better else "score",
        pairs=tuple(Pair(variant.name, PLAIN, (name,)) for variant in variants if variant.name != PLAIN),
        runs=tuple(runs), alpha=alpha, margin=margin, target=target,
        results={run: Result(score) for run, score in scores.items() if score is not None},
        failures={run: Failure(FAILED) for run, score in scores.items() if score is None})


def variant_of(name, label, rows):
    """The Variant of another program's runs; flags: its own name, and the means of its runs' amounts."""
    means = {column: mean([getattr(row, column) for row in rows]) for column in OPTIONAL}
    return Variant(name, "plain" if name == PLAIN else "variant", tokens=means["tokens"],
                   flags=dict(variant=label, **{column: value for column, value in means.items() if value}))


def mean(values):
    """The mean of values; None: one is not known."""
    return None if None in values else sum(values) / len(values)


def read_csv(path):
    """The Rows of a CSV file. UserError: it cannot be read, or names each line that cannot be used."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"cannot read {path}: not UTF-8 text") from None
    try:
        lines = csv.reader(text.splitlines(), strict=True)
        head = [title.strip().lower() for title in next(lines, [])]
        if missing_columns := [title for title in REQUIRED if title not in head]:
            raise UserError(f"{path}, line 1: no column {', '.join(missing_columns)}; it must name "
                            f"{', '.join(REQUIRED)}, and has {', '.join(map(printable, head)) or 'nothing'}"
                            + "; commas separate columns" * (len(head) == 1))
        if repeated := [title for title in (*REQUIRED, *OPTIONAL) if head.count(title) > 1]:
            raise UserError(f"{path}, line 1: the column {repeated[0]} is there twice")
        rows, problems, line_of = [], [], {}
        for cells in lines:
            if not any(cell.strip() for cell in cells):
                continue
            row, problem = parse_cells(head, [cell.strip() for cell in cells])
            if row and not problem and line_of.setdefault(row[:2], lines.line_num) != lines.line_num:
                problem = f"{row.variant} with seed {row.seed} is on line {line_of[row[:2]]} already"
            if problem:
                problems.append(f"{path}, line {lines.line_num}: {problem}")
            else:
                rows.append(row)
    except csv.Error as e:
        raise UserError(f"{path}, line {lines.line_num}: {e}") from None
    if problems:
        more = [f"and {len(problems) - MAX_NAMED} more"] if len(problems) > MAX_NAMED else []
        raise UserError("\n".join([*problems[:MAX_NAMED], *more]))
    if not rows:
        raise UserError(f"{path} has no runs")
    return rows


def parse_cells(head, cells):
    """(Row or None, what is wrong with it or None) of a line's cells."""
    if len(cells) != len(head):
        return None, f"{len(cells)} cells, where the first line has {len(head)}"
    by_title = dict(zip(head, cells))
    if empty_titles := [title for title in REQUIRED if not by_title[title]]:
        return None, f"no {' and no '.join(empty_titles)}"
    score, failed = number(by_title["score"]), by_title["score"].lower() == FAILED
    if score is None and not failed:
        return None, f"score {printable(by_title['score'])!r} is not a finite number, nor '{FAILED}'"
    if too_large := [title for title in ("score", *OPTIONAL)
                     if abs(number(by_title.get(title, "")) or 0) > MAX_NUMBER]:
        return None, f"{too_large[0]} {printable(by_title[too_large[0]])!r} is beyond {MAX_NUMBER:g}"
    amounts = {title: number(by_title[title]) if by_title.get(title) else None for title in OPTIONAL}
    for title in OPTIONAL:
        if by_title.get(title) and not (amounts[title] or 0) > 0:
            return None, f"{title} {printable(by_title[title])!r} is not a number above 0"
    return Row(printable(by_title["variant"]), seed_of(by_title["seed"]), score, **amounts), None


def seed_of(text):
    """A seed's name: 01 and 1.0, as other programs write it, are the seed 1."""
    whole = re.fullmatch(r"0*(\d+)(\.0*)?", text, re.ASCII)
    return whole[1] if whole else printable(text)


def number(text):
    """A finite number, written with ASCII digits, or None: 1_000 is a slip, though Python takes it."""
    try:
        value = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None
