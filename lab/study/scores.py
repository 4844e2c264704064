"""
Verdicts on runs that another program made: a CSV file with a row for each run, judged as a study is.

    python compare.py --scores=scores.csv --baseline=plain

Columns: variant, seed, score. Optional: tokens or bytes that a run was trained on, and its cost in any unit.
A score `failed` is a run without one. Other columns are left alone. docs/scores.md has examples.
"""

import csv
import json
import re
from pathlib import Path

from nanoheads.common import UserError, json_safe, plural, printable, read_whole, say, write_atomic
from lab.study import effects, pictures, report
from lab.study.findings import (MEANING, Table, against_plain, head_of_difference, in_full, interval, known,
                                label_of, mean_of, own_interval, p_of, show, verdict_of)
from lab.study.shape import LARGEST, is_finite

NEEDED, OPTIONAL = ("variant", "seed", "score"), ("tokens", "bytes", "cost")
FAILED = "failed"  # in the place of a score
MOST_NAMED = 20    # bad rows


# ---- the file ----

def read(path):
    """The rows of a CSV file: {"variant", "seed", "score" (None: failed), "tokens", "bytes", "cost"}.

    UserError names every row that cannot be used by its line.
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
    if missing := [title for title in NEEDED if title not in head]:
        raise UserError(f"{path}, line 1: no column {', '.join(missing)}; it must name variant, seed and "
                        f"score, and has {', '.join(head) or 'nothing'}")
    if twice := [title for title in (*NEEDED, *OPTIONAL) if head.count(title) > 1]:
        raise UserError(f"{path}, line 1: the column {twice[0]} is there twice")
    rows, wrong, first = [], [], {}
    try:
        for cells in lines:
            if not any(cell.strip() for cell in cells):
                continue
            row, problem = parsed(dict(zip(head, (cell.strip() for cell in cells))), len(cells), len(head))
            key = row.get("variant"), row.get("seed")
            if not problem and key in first:
                problem = f"{key[0]} with seed {key[1]} is on line {first[key]} already"
            if problem:
                wrong.append(f"{path}, line {lines.line_num}: {problem}")
            else:
                first[key] = lines.line_num
                rows.append(row)
    except csv.Error as e:
        wrong.append(f"{path}, line {lines.line_num}: {e}")
    if wrong:
        more = len(wrong) - MOST_NAMED
        raise UserError("\n".join([*wrong[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]))
    if not rows:
        raise UserError(f"{path} has no runs")
    return rows


def parsed(cells, n, wanted):
    """(one row, what is wrong with it or None); cells: {column: text}."""
    if n != wanted:
        return {}, f"{n} cells, where the first line has {wanted}"
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


# ---- the figures ----

def study_of(rows, name, baseline=None, alpha=0.05, margin=0.01, higher_is_better=False):
    """A study of these rows as the report's functions take it: the baseline is its "plain".

    baseline: None: the first variant of the file. UserError: there is no such variant, or no other one.
    """
    names = list(dict.fromkeys(row["variant"] for row in rows))
    baseline = baseline or names[0]
    if baseline not in names:
        raise UserError(f"--baseline={baseline} is not a variant of {name}; it has {', '.join(names)}")
    if len(names) < 2:
        raise UserError(f"{name} has one variant, {names[0]}: nothing to compare it with")
    arms, failures = {}, []
    for variant in names:
        own = [row for row in rows if row["variant"] == variant]
        key = "plain" if variant == baseline else f"plain of {name}" if variant == "plain" else variant
        arms[key] = dict(label=variant, seeds=[row["seed"] for row in own], bpb=[row["score"] for row in own],
                         **{column: mean([row[column] for row in own]) for column in OPTIONAL})
        failures += [dict(arm=key, seed=row["seed"], stage="judge", why="failed",
                          log=f"{variant} {row['seed']}") for row in own if row["score"] is None]
    scores = effects.scores_of(arms)
    pairs = [(key, "plain", []) for key in arms if key != "plain"]
    # another program's seeds are names: that two variants have some in common makes no pairs of their runs
    apart = {key: {(key, seed): score for seed, score in own.items()} for key, own in scores.items()}
    found = effects.comparisons([apart], pairs, alpha, margin, higher_is_better, unit="")
    for row in found:
        row["differences"] = effects.differences(scores, row)
        effects.withhold_where_runs_failed(row, failures)
    better = "right" if higher_is_better else "left"
    return dict(name=name, arms=arms, comparisons=found, alpha=alpha, margin=margin, failures=failures,
                planned=len(rows), done=len(rows) - len(failures),
                higher_is_better=higher_is_better, procedure=effects.PROCEDURE,
                forest=dict(title=name, axis=f"score, variant − {baseline} ({better} is better)"))


def mean(values):
    """The mean of what is known; None: not of every run."""
    return sum(values) / len(values) if None not in values else None


def in_order(found):
    """The comparisons, the best first."""
    rows = against_plain(found)
    with_score = [c for c in rows if known(c["mean"])]
    return [*(with_score[::-1] if found["higher_is_better"] else with_score),
            *(c for c in rows if not known(c["mean"]))]


def ratio(found, name, column):
    """A variant's mean tokens, bytes or cost over the baseline's; None: not known of both."""
    own, base = found["arms"][name][column], found["arms"]["plain"][column]
    return own / base if own and base else None


def times(value):
    """A ratio in digits enough to tell it from 1: 2.00, 1.0026."""
    return show(value, ".4f" if known(value) and 0 < abs(value - 1) < 0.1 else ".2f")


def headline(found):
    rows, baseline = in_order(found), label_of(found, "plain")
    if len(rows) == 1:
        return f"{label_of(found, rows[0]['variant'])} against {baseline}: {in_full(found, rows[0])}."
    counts = {word: sum(verdict_of(found, c) == word for c in rows) for word in (*MEANING, "failed")}
    words = [f"{n} {word}" + f" within ±{found['margin']:g}" * (word == "same")
             for word, n in counts.items() if n]
    return f"Of {len(rows)} variants, against {baseline}: {', '.join(words)}."


def notices(found):
    """What a reader must know before the numbers."""
    lines = []
    for column in ("tokens", "bytes"):
        for c in in_order(found):
            more = ratio(found, c["variant"], column)
            if more and abs(more - 1) > 0.001:
                lines.append(f"{label_of(found, c['variant'])} was trained on {times(more)} × the {column} "
                             f"of {label_of(found, 'plain')}: that alone may make a difference.")
    dearer = [label_of(found, c["variant"]) for c in in_order(found)
              if verdict_of(found, c) == "better" and (ratio(found, c["variant"], "cost") or 0) > 1.001]
    if dearer:
        lines.append(f"Better and dearer: {', '.join(dearer)}. Whether {label_of(found, 'plain')} would be "
                     "as good at that cost was not measured.")
    if found["failures"]:
        n = len(found["failures"])
        lines.append(f"{plural(n, 'run')} failed and {'has' if n == 1 else 'have'} no score; a verdict that "
                     "favours a side with such runs is withheld.")
    return lines


def scores_table(found):
    """The baseline, then each variant against it, the best first."""
    columns = [column for column in OPTIONAL if any(arm[column] for arm in found["arms"].values())]
    head = ("variant", "verdict", "seeds", "score", head_of_difference(found), "corrected p",
            *(f"{column} ×" for column in columns))

    def line(name, verdict, *figures):
        arm = found["arms"][name]
        return (label_of(found, name), verdict, str(sum(map(known, arm["bpb"]))), show(mean_of(arm), ".4f"),
                *figures, *(times(ratio(found, name, column)) for column in columns))

    rows = [line("plain", "–", own_interval(found), "–"),
            *(line(c["variant"], verdict_of(found, c), interval(c), p_of(c)) for c in in_order(found))]
    return Table(head, rows, (0, 1))


def remarks(found):
    n, side = len(effects.tested(found["comparisons"])), "higher" if found["higher_is_better"] else "lower"
    corrected = "One comparison: no correction." if n < 2 else (
        f"Verdicts are corrected for the {n} comparisons of this file, and for nothing else that was tried.")
    return (f"{corrected} A {side} score is better. The margin is ±{found['margin']:g}. Intervals are over "
            "seeds.")


def verdicts(found):
    """The verdicts for a program to read, as a dict for JSON."""
    rows = []
    for c in in_order(found):
        kept = {key: c[key] for key in ("verdict", "n", "n_baseline", "mean", "low", "high", "p",
                                        "p_corrected", "p_same", "more_seeds")}
        rows.append(dict(variant=label_of(found, c["variant"]), score=mean_of(found["arms"][c["variant"]]),
                         **kept, words=in_full(found, c),
                         **{f"{column}_ratio": ratio(found, c["variant"], column) for column in OPTIONAL}))
    return json_safe(dict(name=found["name"], baseline=label_of(found, "plain"), **effects.progress(found),
                          baseline_score=mean_of(found["arms"]["plain"]), alpha=found["alpha"],
                          margin=found["margin"], higher_is_better=found["higher_is_better"],
                          procedure=found["procedure"], headline=headline(found), notices=notices(found),
                          comparisons=rows))


# ---- what is written ----

def page(found, drawn):
    cards = [dict(variant=label_of(found, c["variant"]), baseline=label_of(found, "plain"), equal="",
                  verdict=verdict_of(found, c), sentence=in_full(found, c), worth=None)
             for c in in_order(found)]
    return report.PAGES.get_template("scores.html").render(
        found=found, title=f"{found['name']}: against {label_of(found, 'plain')}", headline=headline(found),
        notices=notices(found), table=scores_table(found), remarks=remarks(found), cards=cards, drawn=drawn,
        runs=report.runs_tables(found), corrected_for=len(effects.tested(found["comparisons"])))


def write(found, folder, json_file=None):
    """Print the table; write report.html, the forest plot and the verdicts as JSON; print their paths."""
    print(report.in_terminal([headline(found), *notices(found)], [scores_table(found)], [remarks(found)]))
    paths = report.write_page(found, folder, page, [pictures.forest, pictures.forest_narrow])
    if json_file:
        text = json.dumps(verdicts(found), indent=1).encode()
        write_atomic(Path(json_file), lambda f: f.write(text + b"\n"))
        paths.append(json_file)
    say(*paths)
