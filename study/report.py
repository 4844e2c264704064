"""
The report of a study: a table for the terminal, report.md, report.html (page.py), the forest plot.

All of it comes from a results.json: `python compare.py --from_results=FILE` makes it again without the runs.
"""

import html as escaping
import json
import re
import textwrap
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from common import UserError, table, write_atomic
from plot_curves import RC
from study import page
from study.findings import (BETTER, EQUAL, SAME, WORSE, corrected, headline, known, label_of, labelled,
                            level, listed, notices, printable, range_of, ranked, rows_of, settings_of,
                            short, show, verdict_of, verdicts_of)

# keys of a results.json that the report cannot do without
KEYS = dict(name=str, question=str, command=str, seeds=list,
            alpha=float, data=dict, machine=dict, versions=dict,
            arms=dict, comparisons=list, missing=dict, failures=list,
            comparisons_made=int, planned=int, done=int)


# ---- terminal ----

def table_of(study, width=120):
    """One line a comparison, the best variant first; long names lose their beginning to keep to `width`."""
    difference = f"difference [{level(study)}]"
    head = ("variant", "matched", "params", "bits/byte", difference, "p (Holm)", "verdict")
    rows = []
    for name, _, matched, *cells, _ in rows_of(study):
        equal = "+".join(EQUAL[what] for what in matched) or "–"
        rows.append((name, equal, short(study["arms"][name].get("params")), *cells))
    above = [f"{study['name']}: {headline(study)}", *notices(study)]
    above = [line for text in above for line in textwrap.wrap(text, width)]
    below = textwrap.wrap(corrected(study), width)
    return "\n".join([*above, table(head, rows, left=(0, 1, 6), width=width), *below])


# ---- markdown ----

def escaped(text):
    """Text that is nothing but text in Markdown, also in a cell of a table."""
    return re.sub(r"([\\`*_|\[\]#~])", r"\\\1", " ".join(escaping.escape(str(text), quote=False).split()))


def markdown(study):
    lines = [f"# {escaped(study['question'] or study['name'])}", "", f"**{escaped(headline(study))}**", "",
             *(f"> {escaped(text)}\n" for text in notices(study)),
             *markdown_table(study), "", escaped(corrected(study)), "", "## Verdicts in words"]
    for name, comparisons in ranked(study):
        label = escaped(label_of(study, name))
        for c in comparisons:
            lines.append(f"- **{label}**, at equal {listed(c['matched'])}: {escaped(c['words'])}")
        if not comparisons:
            lines.append(f"- **{label}**: {listed([*verdicts_of(study, name, [])])}")
    lines += ["", "## Settings", *(f"- {key}: {escaped(value)}" for key, value in settings_of(study))]
    if study["failures"]:
        lines += ["", "## Failures"]
    for f in study["failures"]:
        lines.append(f"- {escaped(f['arm'])}, seed {f['seed']}: {escaped(f['why'])} ({escaped(f['log'])})")
    lines += ["", "## Commands", "", f"    {study['command']}"]
    for label, arm in labelled(study):
        folders = escaped(", ".join(arm.get("folders") or ["–"]))
        commands = ["    " + " ".join(command.splitlines()) for command in arm.get("commands") or ["–"]]
        lines += ["", f"{escaped(label)}, kept in {folders}:", "", *commands]
    return "\n".join(lines) + "\n"


def markdown_table(study):
    head = ("variant", "baseline", "matched by", "parameters", "bits/byte", f"difference [{level(study)}]",
            "p (Holm)", "verdict", "smallest detectable")
    rule = ["---" if i in (0, 1, 2, 7) else "---:" for i in range(len(head))]
    rows = []
    for name, baseline, matched, *cells in rows_of(study):
        params = show(study["arms"][name].get("params"))
        rows.append((name, baseline, ", ".join(matched) or "–", params, *cells))
    return [f"| {' | '.join(head)} |", f"|{'|'.join(rule)}|",
            *(f"| {' | '.join(map(escaped, row))} |" for row in rows)]


# ---- the forest plot ----

# blue, orange, grey: as on the page
VERDICT_COLOURS = {BETTER: "#0067a3", WORSE: "#a94400", SAME: "#5a636d"}


def forest_plot(study):
    """A Figure: each variant against the plain GPT at equal hyperparameters, mean and interval over seeds.

    The best on top; None before there is a difference to show. White, so that it reads on a dark page too.
    """
    rows = [(name, c) for name, comparisons in ranked(study) for c in comparisons
            if "hyperparameters" in c["matched"] and known(c["mean"])]
    if not rows:
        return None
    figure = Figure(figsize=(8.6, 1.8 + 0.27 * len(rows)), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor="white")
    left, right = range_of([c for _, c in rows])
    axes.axvline(0, color="black", linewidth=1.2, zorder=1)
    for y, (_, c) in enumerate(rows):
        draw_row(axes, y, c, left, right)
    labels = [" ".join(printable(label_of(study, name)).split()) for name, _ in rows]
    labels = [textwrap.shorten(label, 40, placeholder="…") for label in labels]
    axes.set_yticks(range(len(rows)), labels)
    axes.set(xlim=(left, right), ylim=(len(rows) - 0.4, -0.6))
    axes.grid(axis="y", visible=False)
    title = f"{study['data']['dataset']}, {study.get('scale')} scale, equal hyperparameters"
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("bits/byte, variant − plain GPT (left is better)")
    n = study["comparisons_made"]
    words = f"mean and {level(study)} interval over {len(study['seeds'])} seeds; small dots: the seeds"
    words += f"; colour: verdict, corrected for {n} comparisons" if n > 1 else ""
    shown = {verdict_of(c) for _, c in rows}
    handles = [Line2D([], [], color=colour, marker="o", linewidth=2, label=verdict)
               for verdict, colour in VERDICT_COLOURS.items() if verdict in shown]
    if handles:
        figure.legend(handles=handles, title=words, loc="outside lower center", ncols=3, frameon=False,
                      fontsize=10, title_fontsize=10)
    return figure


def draw_row(axes, y, c, left, right):
    """One comparison: interval, mean, and below the line the seeds; a triangle at the edge: it goes on."""
    colour = VERDICT_COLOURS.get(verdict_of(c), VERDICT_COLOURS[SAME])
    seeds = [d for d in c["differences"] if known(d)]
    axes.plot(seeds, [y + 0.25] * len(seeds), "o", color=colour, alpha=0.45, markersize=3, markeredgewidth=0)
    ends = [c["low"], c["high"]] if known(c["low"]) else [c["mean"], c["mean"]]
    axes.plot(ends, [y, y], color=colour, linewidth=2, solid_capstyle="round")
    axes.plot([c["mean"]], [y], "o", color=colour, markersize=6)
    for edge, marker, beyond in ((left, "<", ends[0] < left), (right, ">", ends[1] > right)):
        if beyond:
            axes.plot([edge], [y], marker, color=colour, markersize=8, clip_on=False)
    if not left <= c["mean"] <= right:
        at, side = (right, "right") if c["mean"] > right else (left, "left")
        axes.annotate(f"{c['mean']:+.3f}", (at, y), (-10 if side == "right" else 10, 0), color=colour,
                      textcoords="offset points", ha=side, va="center", fontsize=9)


# ---- files ----

def write(study, folder):
    """Write report.md, report.html, forest.svg and forest.png -> their paths. UserError: the disk refuses."""
    folder, paths = Path(folder), []

    def save(name, put):
        write_atomic(folder / name, put)
        paths.append(folder / name)

    save("report.md", lambda f: f.write(markdown(study).encode("utf-8", "replace")))
    save("report.html", lambda f: f.write(page.html(study).encode("utf-8", "replace")))
    with mpl.rc_context({**RC, "font.size": 11, "svg.hashsalt": "forest"}):
        figure = forest_plot(study)
        if figure:  # without the date: the same results give the same bytes
            save("forest.svg", lambda f: figure.savefig(f, format="svg", metadata={"Date": None}))
            save("forest.png", lambda f: figure.savefig(f, format="png"))
    return paths


def read(path):
    """The study in a results.json. Raises UserError, in one line, where there is none."""
    try:
        study = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    except ValueError:
        raise UserError(f"{path} is not JSON") from None
    if not isinstance(study, dict):
        study = {}
    wrong = [key for key, kind in KEYS.items() if not isinstance(study.get(key), kind)]
    if wrong:
        raise UserError(f"{path} is not what compare.py writes: {', '.join(wrong[:4])} "
                        "missing or of another kind")
    return study
