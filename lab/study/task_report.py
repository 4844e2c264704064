"""
The report of a study of tasks: a table of mechanisms by tasks, two lines for each cell that is better or
worse, a map of the shares that are right, learning curves. All of it comes from a results.json.gz.
"""

import math
import statistics
from pathlib import Path

import numpy as np

from nanoheads.common import plural, say, table
from nanoheads.drawing import COLOURS, GREY, canvas, coloured_table
from nanoheads.tasks import LEARNED
from lab.study import report
from lab.study.task_study import PLAIN, count_learned, median_step

MARKS = {"better": "+", "worse": "−", "same": "=", "undecided": ""}
MEANINGS = ("+ better and − worse than the plain GPT, = the same within {margin:g}; without a mark "
            "undecided; a number behind @ is the median step from which on {learned:.0%} are right, where "
            "more than half of the runs learn it")
WHY_PERMUTED = (
    "Scores of a task are nearly all or nothing, so that means with Welch's interval do not suit them. The "
    "verdicts come from permutation tests: each way of calling as many of the scores the variant's is as "
    "likely as any other, if both sides do the same. They are exact for that. Where the means are equal and "
    "one side spreads far more than the other, a variant with few seeds may still be called better or worse "
    "by luck. Both tests of all comparisons are one family, corrected by Holm.")


def meanings_of(found):
    """What the marks of the table mean."""
    return MEANINGS.format(margin=found["margin"], learned=LEARNED)


def learned_in_words(learned, n, step):
    """How many of n runs learn a task; the median step is known where more than half of them do."""
    return f"{learned} of {n}" + ("" if step is None else f" from step {step:,.0f} on")


def by_cell(found, stage):
    """{(task, variant): row of found["verdicts"]} of a stage, against the plain GPT."""
    return {(row["task"], row["variant"]): row for row in found["verdicts"]
            if row["stage"] == stage and row["baseline"] == PLAIN}


def names_in(found):
    """The variants of a study, the plain GPT first, then by the mean share that is right, best first."""
    tasks = found["tasks"].values()
    names = dict.fromkeys(name for each in tasks for name, arm in each["arms"].items()
                          if arm["kind"] != "baseline")  # wider plain GPTs are in sentences alone

    def mean(name):
        scores = [statistics.mean(arm["judge"]["acc"]) for each in tasks
                  if (arm := each["arms"].get(name)) and arm["judge"]["acc"]]
        return -statistics.mean(scores) if scores else math.inf
    return sorted(names, key=lambda name: (name != PLAIN, mean(name), name))


def cell_of(found, cells, task, name):
    """What stands in the table for a variant on a task: share right, mark, step."""
    arm = found["tasks"][task]["arms"].get(name)
    if not arm or not arm["judge"]["acc"]:
        return "–"
    row, step = cells.get((task, name)), median_step(arm["judge"])
    mark = MARKS[row["verdict"]] if row else ""
    return f"{statistics.mean(arm['judge']['acc']):.2f}{mark}" + ("" if step is None else f" @{step:,.0f}")


def table_of(found):
    """(head, rows): variants by tasks; the last row is what guessing gives."""
    cells, tasks = by_cell(found, "judge"), list(found["tasks"])
    rows = [(name, *(cell_of(found, cells, task, name) for task in tasks)) for name in names_in(found)]
    guess = ("guessing", *(f"{guess_of(found['tasks'][task]):.2f}" for task in tasks))
    return ("variant", *tasks), [*rows, guess]


def guess_of(task):
    """What guessing gives on a task, the mean over its levels of the best guess."""
    return statistics.mean(max(each.values()) for each in task["guesses"].values())


def sentences(found):
    """Two lines for each cell that is better or worse: at the shared rates, also against a plain GPT of as
    many parameters where there is one, and at each one's best.
    """
    wider = {(row["task"], row["variant"]): row for row in found["verdicts"]
             if row["stage"] == "judge" and row["baseline"] != PLAIN}
    best, lines = by_cell(found, "best"), []
    for (task, name), row in by_cell(found, "judge").items():
        if row["verdict"] not in ("better", "worse"):
            continue
        words = f"{task}, {name}: {in_words(row)}"
        if (task, name) in wider:
            row = wider[task, name]
            words += (f"; against a plain GPT of as many parameters {row['verdict']}, {row['acc_plain']:.3f} "
                      f"({row['mean']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}])")
        lines.append((words, at_best_in_words(found, task, name, best)))
    return lines


def in_words(row):
    """A verdict as a sentence."""
    p = "corrected p < 0.0001" if row["p_corrected"] < 1e-4 else f"corrected p = {row['p_corrected']:.3g}"
    mine = learned_in_words(row["learned"], row["n"], row["step"])
    plain = learned_in_words(row["learned_plain"], row["n_baseline"], row["step_plain"])
    return (f"{row['verdict']}, {row['acc']:.3f} right against {row['acc_plain']:.3f} "
            f"({row['mean']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}], {p}); runs that learn it: {mine}, "
            f"of the plain GPT {plain}")


def at_best_in_words(found, task, name, best):
    """What became of a difference at each one's best rates, as a sentence."""
    arms = found["tasks"][task]["arms"]
    if not arms[name]["grid"]:
        return "at the rates of the plain GPT's scale alone: no grid was run for it"
    learned = {which: sum(min(each["acc"]) >= LEARNED for each in arms[which]["grid"])
               for which in (name, PLAIN)}
    pairs, seeds = len(arms[name]["grid"]), len(arms[name]["grid"][0]["acc"])
    grid = (f"of {pairs} pairs of rates {learned[name]} learn it with each of {plural(seeds, 'seed')}, "
            f"of the plain GPT {learned[PLAIN]} of {len(arms[PLAIN]['grid'])}")
    if (task, name) not in best:
        return f"{grid}; not judged at the best of them yet"
    return f"at each one's best rates, with fresh seeds: {in_words(best[task, name])}; {grid}"


def headline(found):
    """What came of a study in one line."""
    cells = by_cell(found, "judge")
    counts = {word: sum(row["verdict"] == word for row in cells.values()) for word in MARKS}
    interim = "" if found["finished"] else f"INTERIM, {found['done']:,} of {found['planned']:,} runs: "
    return (f"{interim}{plural(len(cells), 'comparison')} with the plain GPT on "
            f"{plural(len(found['tasks']), 'task')}: {counts['better']} better, {counts['worse']} worse, "
            f"{counts['same']} the same, {counts['undecided']} undecided")


def in_text(found, width=150):
    """The table and the sentences, for a terminal."""
    head, rows = table_of(found)
    lines = [found["question"] or found["name"], headline(found),
             table(head, rows, left=(0,), width=width),
             meanings_of(found)]
    for first, second in sentences(found):
        lines += [first, f"    {second}"]
    failed = [row for each in found["tasks"].values() for row in each["failures"]]
    lines += [f"failed: {row['arm']}, seed {row['seed']}: {row['why']}" for row in failed]
    return "\n".join(lines + taken_in_words(found))


def taken_in_words(found):
    """A line for each task and place that runs were taken from instead of trained."""
    return [f"{task}: {plural(row['runs'], 'run')} taken from {row['from']}"
            + (f", {row['other_code']:,} of them made by other code or other libraries"
               if row["other_code"] else "")
            for task, each in found["tasks"].items() for row in each.get("reused", ())]


# ---- pictures ----

def task_map(found):
    """A map of the shares that are right, variants by tasks, a cell marked by its verdict."""
    cells, tasks, names = by_cell(found, "judge"), list(found["tasks"]), names_in(found)
    shares = np.full((len(names), len(tasks)), np.nan)
    for i, name in enumerate(names):
        for j, task in enumerate(tasks):
            arm = found["tasks"][task]["arms"].get(name)
            if arm and arm["judge"]["acc"]:
                shares[i, j] = statistics.mean(arm["judge"]["acc"])
    columns = [f"{task}\nguessing {guess_of(found['tasks'][task]):.2f}" for task in tasks]
    figure, ax = coloured_table(3.2 + 1.15 * len(tasks), 1.2 + 0.27 * len(names),
                                "Share of answers that are right", shares, columns, names,
                                vmin=0, vmax=1, cmap="Blues")
    for (i, j), share in np.ndenumerate(shares):
        if not math.isnan(share):
            row = cells.get((tasks[j], names[i]))
            mark = MARKS[row["verdict"]] if row else ""
            ax.text(j, i, f"{share:.2f} {mark}".rstrip(), ha="center", va="center", fontsize=9,
                    color="white" if share > 0.6 else "black",
                    weight="bold" if mark in ("+", "−") else "normal")
    return figure


def shown_in_curves(found, task, most=6):
    """The variants whose learning curves are drawn: the plain GPT, then what differs, most first."""
    rows = [row for (other, _), row in by_cell(found, "judge").items() if other == task]
    rows.sort(key=lambda row: (row["verdict"] not in ("better", "worse"), -abs(row["mean"])))
    return [PLAIN, *(row["variant"] for row in rows[:most - 1])]


def curves(found):
    """The share that is right against steps, a panel a task, a line a run."""
    tasks = found["tasks"]
    columns = min(4, len(tasks))
    lines = -(-len(tasks) // columns)
    figure = canvas(3.4 * columns, 2.8 * lines, "Learning")
    axes = figure.subplots(lines, columns, sharey=True, squeeze=False).ravel()
    for ax in axes[len(tasks):]:
        ax.axis("off")
    for ax, (task, each) in zip(axes, tasks.items()):
        for i, name in enumerate(shown_in_curves(found, task)):
            colour = COLOURS[-1] if name == PLAIN else COLOURS[i - 1]
            for n, run in enumerate(each["arms"][name]["judge"]["runs"]):
                curve = each["runs"][run]["curve"]
                ax.plot(curve["step"], curve["acc"], color=colour, lw=1, alpha=0.7,
                        label=name if not n else None)
        ax.axhline(guess_of(each), color=GREY, ls=":", lw=1)
        ax.set_title(task, fontsize=10)
        ax.set_ylim(0, 1.02)
        if ax.get_legend_handles_labels()[0]:  # of an interim report perhaps no run is done
            ax.legend(fontsize=7, loc="lower right")
    return figure


# ---- files ----

def page(found, drawn):
    head, rows = table_of(found)
    return report.PAGES.get_template("tasks.html").render(
        found=found, title=found["question"] or f"{found['name']}: tasks", headline=headline(found),
        head=head, rows=rows, meanings=meanings_of(found),
        sentences=sentences(found), why=WHY_PERMUTED, drawn=drawn, levels=levels_table(found),
        taken=taken_in_words(found))


def levels_table(found):
    """[(task, head, rows)]: the mean share that is right by level, of each variant."""
    tables = []
    for task, each in found["tasks"].items():
        levels = list(each["guesses"])
        rows = []
        for name in names_in(found):
            arm = each["arms"].get(name)
            runs = [each["runs"][run] for run in arm["judge"]["runs"]] if arm else []
            if runs:
                shares = [statistics.mean(run["levels"][level][1] / run["levels"][level][2] for run in runs)
                          for level in levels]
                rows.append((name, *(f"{share:.2f}" for share in shares),
                             f"{count_learned(arm['judge'])} of {len(runs)}"))
        rows.append(("guessing", *(f"{max(each['guesses'][level].values()):.2f}" for level in levels), ""))
        tables.append((task, ("variant", *(f"{level} {each['unit']}" for level in levels), "learned"), rows))
    return tables


def write_all(found, out):
    """Print the report and write its files."""
    print(in_text(found))
    say(*report.write_page(found, Path(out), page, [task_map, curves]))
