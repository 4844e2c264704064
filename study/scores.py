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

NEEDED = ("variant", "seed", "score")
OPTIONAL = ("tokens", "bytes", "cost")  # of a run, in any unit
FAILED = "failed"  # in the place of a score
MOST_NAMED = 20    # lines that are wrong
LARGEST = 1e50     # number that is taken: the squares of larger ones would not be finite


def scores_of(study, stage="judge"):
    """{variant: {text: {seed: score}}} of the runs of one stage that are done; seeds as text."""
    return scores_in(study.runs, study.results, stage)


def scores_in(runs, results, stage="judge"):
    """The same of Runs and their {name: Result}."""
    found = {}
    for run in runs:
        if run.stage == stage and (result := results.get(run.name)):
            found.setdefault(run.variant, {}).setdefault(run.text, {})[str(run.seed)] = result.score
    return found


def follows(result):
    """Whether the score of a Result follows from what was counted."""
    if result.nats is None:  # of another program
        return True
    if result.levels:
        score = sum(right / asked for _, right, asked in result.levels.values()) / len(result.levels)
    else:
        score = result.nats / math.log(2) / result.bytes
    return math.isclose(result.score, score, rel_tol=1e-9)


def other_flags(run, variant):
    """The flags of a judged Run that are not its Variant's, its seed among them."""
    spec = {**run.spec["train"], **run.spec["model"]}
    wrong = [key for key, value in variant.flags.items()
             if key in spec and key != "seed" and spec[key] != value]
    return wrong + ["seed"] * (spec.get("seed", 0) != run.seed + variant.flags.get("seed", 0))


def mean_of(scores, name, texts):
    """The mean of a variant over texts, of its means over seeds on each; None: it has no score on one."""
    own = [scores.get(name, {}).get(text) for text in texts]
    return sum(sum(each.values()) / len(each) for each in own) / len(own) if all(own) else None


# ---- of another program ----

class Row(NamedTuple):
    """A run of another program; score: None: it failed; tokens, bytes, cost: None: not said."""
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
    key = {**{each: each for each in names}, PLAIN: f"plain of {name}", baseline: PLAIN}
    runs = [Run("judge", key[row.variant], name, row.seed,
                dict(file=name, variant=row.variant, seed=row.seed)) for row in rows]
    scores = {run.name: row.score for run, row in zip(runs, rows)}
    variants = [variant_of(key[each], each, [row for row in rows if row.variant == each]) for each in names]
    return Study(
        name=name, question=f"{name}: against {baseline}", texts=(name,), variants=tuple(variants),
        measure="score, higher is better" if higher_is_better else "score",
        pairs=tuple(Pair(each.name, PLAIN, (name,)) for each in variants if each.name != PLAIN),
        runs=tuple(runs), alpha=alpha, margin=margin, target=target,
        results={run: Result(score) for run, score in scores.items() if score is not None},
        failures={run: Failure(FAILED) for run, score in scores.items() if score is None})


def variant_of(name, label, rows):
    """The Variant of another program's runs; flags: its own name, and the means of what its runs took."""
    took = {column: mean([getattr(row, column) for row in rows]) for column in OPTIONAL}
    return Variant(name, "plain" if name == PLAIN else "variant", tokens=took["tokens"],
                   flags=dict(variant=label, **{each: value for each, value in took.items() if value}))


def mean(values):
    """The mean of what is known of every run, or None."""
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
        if missing := [title for title in NEEDED if title not in head]:
            raise UserError(f"{path}, line 1: no column {', '.join(missing)}; it must name "
                            f"{', '.join(NEEDED)}, and has {', '.join(map(printable, head)) or 'nothing'}")
        if twice := [title for title in (*NEEDED, *OPTIONAL) if head.count(title) > 1]:
            raise UserError(f"{path}, line 1: the column {twice[0]} is there twice")
        rows, wrong, first = [], [], {}
        for cells in lines:
            if not any(cell.strip() for cell in cells):
                continue
            row, problem = parsed(head, [cell.strip() for cell in cells])
            if row and not problem and first.setdefault(row[:2], lines.line_num) != lines.line_num:
                problem = f"{row.variant} with seed {row.seed} is on line {first[row[:2]]} already"
            if problem:
                wrong.append(f"{path}, line {lines.line_num}: {problem}")
            else:
                rows.append(row)
    except csv.Error as e:
        raise UserError(f"{path}, line {lines.line_num}: {e}") from None
    if wrong:
        more = [f"and {len(wrong) - MOST_NAMED} more"] if len(wrong) > MOST_NAMED else []
        raise UserError("\n".join([*wrong[:MOST_NAMED], *more]))
    if not rows:
        raise UserError(f"{path} has no runs")
    return rows


def parsed(head, cells):
    """(Row or None, what is wrong with it or None) of a line's cells."""
    if len(cells) != len(head):
        return None, f"{len(cells)} cells, where the first line has {len(head)}"
    found = dict(zip(head, cells))
    if empty := [title for title in NEEDED if not found[title]]:
        return None, f"no {' and no '.join(empty)}"
    score, failed = number(found["score"]), found["score"].lower() == FAILED
    if score is None and not failed:
        return None, f"score {printable(found['score'])!r} is not a finite number, nor '{FAILED}'"
    if large := [title for title in ("score", *OPTIONAL) if abs(number(found.get(title, "")) or 0) > LARGEST]:
        return None, f"{large[0]} {printable(found[large[0]])!r} is beyond {LARGEST:g}"
    took = {title: number(found[title]) if found.get(title) else None for title in OPTIONAL}
    for title in OPTIONAL:
        if found.get(title) and not (took[title] or 0) > 0:
            return None, f"{title} {printable(found[title])!r} is not a number above 0"
    return Row(printable(found["variant"]), seed_of(found["seed"]), score, **took), None


def seed_of(text):
    """A seed as it is named here: 01 and 1.0, as other programs write it, are the seed 1."""
    whole = re.fullmatch(r"0*(\d+)(\.0*)?", text, re.ASCII)
    return whole[1] if whole else printable(text)


def number(text):
    """A finite number, written with ASCII digits, or None: 1_000 is a slip, though Python takes it."""
    try:
        value = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None
