"""
The pictures of a report: differences with their intervals, learning curves; and of several studies,
differences and worth against size. White, so that they read on a dark page too; the same study gives the same
bytes.

Each takes (Study, Comparisons), and is drawn by nanoheads.drawing.picture_bytes().
"""

import math
import textwrap

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from nanoheads.common import printable, shorten
from nanoheads.drawing import COLOURS, GREY, canvas, panels, ticks
from study.records import PLAIN
from study.scores import mean_of, scores_of
from study.verdicts import MEASURES, differences, uncertainty
from study.words import (BUT, INTERIM, MEANING, against_plain, baseline_of, ends_of, guess_of, is_of_tasks,
                         known, label_of, level, listed, not_shown_at, short)

# blue, orange, green, purple, grey, and black for the plain GPT: as on the page
VERDICT_COLOURS = dict(zip([*MEANING, PLAIN],
                           ("#0067a3", "#a94400", "#00735a", "#7a4a8c", "#5a636d", "#000000")))
LIMITED = "#3f8fc8"  # better, and not shown to be so where costs are equal: paler, and its dot is hollow
FEW = 8  # variants that colours can show; of more, the best and the worst are


def cut(text):
    """A name, short enough for a picture."""
    return shorten(" ".join(printable(text).split()), 40)


def folded(text, letters):
    """Text in lines of at most so many letters, which may break behind an underscore too."""
    return "\n".join(textwrap.wrap(text.replace("_", "_ "), letters)).replace("_ ", "_")


# ---- differences ----

def range_of(spans):
    """(left, right) of an axis for lists of differences, zero well inside; what lies far out is cut off."""
    spans = [span for span in ([v for v in span if known(v)] for span in spans) if span]
    far = 3 * np.median([max(map(abs, span)) for span in spans]) or math.inf
    near = [v for span in spans for v in span if max(map(abs, span)) <= far]
    left, right = min(near), max(near)
    left, right = min(left, -0.25 * right), max(right, -0.25 * left)
    pad = 0.05 * (right - left) or 0.01
    return left - pad, right + pad


def forest_narrow(found):
    """forest() for a phone, where the letters of the other are too small."""
    return forest(found, 4.4, letters=18, words=44)


def forest(found, width=8.6, letters=40, words=100):
    """A Figure: the plain GPT's seeds, then each variant against it, the best on top, tasks by turns; None:
    nothing yet.

    width: in inches; letters, words: how many letters a line of a name, and of the words below, has at most.
    """
    study, comparisons = found
    rows = [c for c in against_plain(study, comparisons) if known(c.mean)]
    if not rows:
        return None
    scores, tasks = scores_of(study), is_of_tasks(study)
    if tasks:
        rows.sort(key=lambda c: study.texts.index(c.texts[0]))
    drawn = [] if tasks else [row_of_plain(study, scores)]
    for c in rows:
        name = f"{c.texts[0]}: {label_of(study, c.variant)}" if tasks else label_of(study, c.variant)
        drawn.append((name, c.mean, c.low, c.high, differences(scores, c), look(study, comparisons, c)))
    left, right = range_of([(low, high, mean, *seeds) for _, mean, low, high, seeds, _ in drawn])
    names = [folded(cut(name), letters) for name, *_ in drawn]
    lines = 1 + max(name.count("\n") for name in names)
    figure, axes = panels(width, 1.9 + (0.09 + 0.18 * lines) * len(drawn))
    axes.axvspan(-study.margin, study.margin, color="0.93", linewidth=0, zorder=0)
    axes.axvline(0, color="black", linewidth=1.2, zorder=1)
    for y, (_, *row) in enumerate(drawn):
        draw_row(axes, y, *row, left, right)
    axes.set_yticks(range(len(drawn)), names)
    axes.set(xlim=(left, right), ylim=(len(drawn) - 0.4, -0.6))
    axes.grid(axis="y", visible=False)
    scale = study.config.get("scale")
    title = listed(study.texts) + (f", {scale} scale" if scale else "")
    axes.set_title(folded(cut(title), words - letters), fontsize=11)
    axes.set_xlabel(folded(printable(axis_of(study)), words - letters))
    text = f"mean and {level(study)} interval over seeds; small dots: the seeds; grey band: the margin"
    handles = legend_of(study, comparisons, rows, words - letters)
    long = any(len(handle.get_label()) > 30 for handle in handles)
    figure.legend(handles=handles, title=folded(text, words), loc="outside lower center",
                  ncols=2 if words < 50 else 3 if long else 5, frameon=False, fontsize=10, title_fontsize=10)
    return figure


def row_of_plain(study, scores):
    """The plain GPT's row: its seeds around its mean, and the interval of that."""
    half = uncertainty(study, PLAIN, study.texts)
    own = [scores.get(PLAIN, {}).get(text, {}) for text in study.texts]
    shared = [seed for seed in own[0] if all(seed in each for each in own)]
    mean = mean_of(scores, PLAIN, study.texts)
    seeds = [float(np.mean([each[seed] for each in own])) - mean for seed in shared]
    ends = (math.nan, math.nan) if half is None else (-half, half)
    black = VERDICT_COLOURS[PLAIN]
    return label_of(study, PLAIN), 0.0, *ends, seeds, dict(color=black, markerfacecolor=black)


def look(study, comparisons, c):
    """{"color", "markerfacecolor"} of what is drawn of a Comparison."""
    if not_shown_at(study, comparisons, c):
        return dict(color=LIMITED, markerfacecolor="white")
    return dict(color=VERDICT_COLOURS[c.verdict], markerfacecolor=VERDICT_COLOURS[c.verdict])


def axis_of(study):
    """What the axis of differences says."""
    measure = MEASURES[study.measure]
    side = "right" if measure.higher_is_better else "left"
    return f"{measure.name}, variant − {baseline_of(study).removeprefix('the ')} ({side} is better)"


def legend_of(study, comparisons, rows, letters):
    """A handle for each verdict among the Comparisons, and for those that are better at other costs alone."""
    limits = [(c, not_shown_at(study, comparisons, c)) for c in rows]
    shown = {c.verdict: look(study, comparisons, c) for c, whats in limits if not whats}
    every = [(verdict, shown[verdict]) for verdict in MEANING if verdict in shown]
    if limited := [(c, whats) for c, whats in limits if whats]:
        whats = dict.fromkeys(what for _, own in limited for what in own)
        every.insert(int("better" in shown), (f"better{BUT}{listed(whats, 'or')}",
                                              look(study, comparisons, limited[0][0])))
    interim = INTERIM * (not study.finished)
    return [Line2D([], [], marker="o", linewidth=2, label=folded(interim + text, letters), **own)
            for text, own in every]


def draw_row(axes, y, mean, low, high, seeds, own, left, right):
    """One comparison: interval, mean, and below the line the seeds; a triangle at the edge: it goes on."""
    colour = own["color"]
    axes.plot(seeds, [y + 0.25] * len(seeds), "o", color=colour, alpha=0.45, markersize=3, markeredgewidth=0)
    ends = [low, high] if known(low) else [mean, mean]
    axes.plot(ends, [y, y], color=colour, linewidth=2, solid_capstyle="round")
    axes.plot([mean], [y], "o", markersize=6, **own)
    for edge, marker, beyond in ((left, "<", ends[0] < left), (right, ">", ends[1] > right)):
        if beyond:
            axes.plot([edge], [y], marker, color=colour, markersize=8, clip_on=False)
    if not left <= mean <= right:
        at, side = (right, "right") if mean > right else (left, "left")
        above = 7 * any(left < end < right for end in ends)  # the interval's line runs through the picture
        axes.annotate(f"{mean:+.3f}", (at, y), (-10 if side == "right" else 10, above), color=colour,
                      textcoords="offset points", ha=side, va="center", fontsize=9)


# ---- learning curves ----

def curves_of(study):
    """{text: {variant: (steps, scores [seeds, steps])}} on validation, of the judged runs; one that ended
    early, since it had learned its task, stays at its last score.
    """
    found = {}
    for run in study.runs:
        result = study.results.get(run.name)
        if run.stage == "judge" and result and result.curve:
            curve = [math.nan if score is None else score for score in result.curve["scores"]]
            own = found.setdefault(run.text, {}).setdefault(run.variant, [])
            own.append((result.curve["steps"], curve))
    return {text: {name: on_one_axis(own) for name, own in variants.items()}
            for text, variants in found.items()}


def on_one_axis(curves):
    """(steps, scores [n, steps]) of n curves, [(steps, scores)], on the steps of the longest."""
    steps = max((steps for steps, _ in curves), key=lambda steps: steps[-1])
    return steps, np.array([np.interp(steps, *curve) for curve in curves])


def learning_narrow(found):
    """learning() for a phone: one panel below the other."""
    return learning(found, 1, 4.4)


def learning(found, most=3, width=None):
    """A Figure: the score on validation against steps, a panel a text, a line a variant; None: no curves.

    most: panels abreast; width: in inches, None: as these need.
    """
    study, comparisons = found
    curves, measure = curves_of(study), MEASURES[study.measure]
    if not curves:
        return None
    columns = min(most, len(curves))
    lines = -(-len(curves) // columns)
    figure = canvas(width or 3.2 + 3.6 * columns, 4.4 * lines)
    every = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes in every[len(curves):]:
        axes.axis("off")
    for axes, (text, own) in zip(every, curves.items()):
        ranked = [c.variant for c in against_plain(study, comparisons)
                  if text in c.texts and c.variant in own]
        chosen = ranked if len(ranked) < FEW else ranked[:3] + ranked[-2:]
        for name in [name for name in ranked if name not in chosen]:
            axes.plot(own[name][0], own[name][1].mean(0), color="0.8", linewidth=0.8)
        late = []  # scores after the steep start, which the axis shows
        for i, name in enumerate([*chosen, *[PLAIN] * (PLAIN in own)]):
            steps, scores = own[name]
            colour = "black" if name == PLAIN else COLOURS[i % 6]
            mean = scores.mean(0)
            axes.fill_between(steps, scores.min(0), scores.max(0), color=colour, alpha=0.12, linewidth=0)
            axes.plot(steps, mean, color=colour, linestyle="--" if 6 <= i < len(chosen) else "-",
                      label=f"{cut(label_of(study, name))}, {mean[-1]:.3f}")
            late += [value for value in mean[len(mean) // 3:] if known(value)]
        if is_of_tasks(study):
            axes.set_ylim(0, 1.02)
            if (guess := guess_of(study, text)) is not None:
                axes.axhline(guess, color=GREY, linestyle=":", linewidth=1)
        elif late:
            low, top = min(late), float(np.quantile(late, 0.9))
            axes.set_ylim(low - 0.1 * (top - low) - 1e-3, top + 0.1 * (top - low) + 1e-3)
        axes.set(xlabel="steps", ylabel=f"{measure.name}, validation")
        axes.set_title(cut(text), fontsize=11)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: short(v)))
        axes.legend(fontsize=8, frameon=False)
    return figure


# ---- several sizes ----

def ladder(found):
    """A Figure of studies of several sizes: each variant's difference against size, and beside it, where the
    plain GPT was trained at other budgets too, what the variant is worth; None: nothing known.

    found: [(parameters of the plain GPT's blocks, Study, Comparisons)].
    """
    points = {}  # variant -> [(parameters, Comparison)]
    for size, study, comparisons in found:
        for c in against_plain(study, comparisons):
            if known(c.mean):
                points.setdefault(label_of(study, c.variant), []).append((size, c))
    if not points:
        return None
    some_worth = any(ends_of(c.worth) for own in points.values() for _, c in own)
    first = found[0][1]
    figure = canvas(10 if some_worth else 6, 5.1, f"{cut(first.name)}: effect against size")
    panels_of = figure.subplots(1, 1 + some_worth, squeeze=False)[0]
    lines = [(cut(name), COLOURS[i % len(COLOURS)],
              [(n * 1.03 ** (i - (len(points) - 1) / 2), c) for n, c in own])  # beside each other
             for i, (name, own) in enumerate(points.items())]
    draw_differences(panels_of[0], lines, axis_of(first))
    if some_worth:
        draw_worth(panels_of[1], lines)
    for axes, has_data in zip(panels_of, (lambda c: True, lambda c: ends_of(c.worth))):
        axes.set(xscale="log", xlabel="parameters of the plain GPT's blocks")
        shown = sorted({n for own in points.values() for n, c in own if has_data(c)})
        ticks(axes.xaxis, shown, [short(n) for n in shown])
    text = f"bars: {level(first)} intervals over seeds; a triangle lies farther out"
    figure.legend(handles=[Line2D([], [], color=colour, marker="o", label=name) for name, colour, _ in lines],
                  title=text, loc="outside lower center", ncols=4, frameon=False, fontsize=10,
                  title_fontsize=10)
    return figure


def draw_differences(axes, lines, label):
    """Means and intervals against size; a triangle at the edge: the mean lies beyond it."""
    low, high = range_of([(c.low, c.high, c.mean) for *_, own in lines for _, c in own])
    axes.axhline(0, color="black", linewidth=1.2)
    for _, colour, own in lines:
        heights = [min(max(c.mean, low), high) for _, c in own]
        axes.plot([n for n, _ in own], heights, color=colour)
        for (n, c), height in zip(own, heights):
            if known(c.low):
                axes.plot([n, n], [min(max(end, low), high) for end in (c.low, c.high)], color=colour)
            marker = "v" if c.mean < low else "^" if c.mean > high else "o"
            axes.plot([n], [height], marker, color=colour, clip_on=False)
    axes.set(ylim=(low, high), ylabel=label.replace("left is", "lower is").replace("right is", "higher is"))


def draw_worth(axes, lines):
    """Worth in the plain GPT's compute against size; a triangle: beyond the budgets that were trained."""
    axes.axhline(1, color="black", linewidth=1.2)
    for _, colour, own in lines:
        own = [(n, ends) for n, c in own if (ends := ends_of(c.worth))]
        axes.plot([n for n, _ in own], [ends[0][1] for _, ends in own], color=colour)
        for n, ends in own:
            values = [value for _, value in ends[1:]] or [ends[0][1]]
            axes.plot([n] * len(values), values, color=colour)  # an open end goes on to where budgets end
            axes.plot([n], [ends[0][1]], {"<": "v", ">": "^"}.get(ends[0][0], "o"), color=colour)
    axes.set(yscale="log", ylabel="worth, × the plain GPT's compute")
    low, high = axes.get_ylim()
    multiples = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.7, 2, 3)
    ticks(axes.yaxis, [m for m in multiples if low <= m <= high])
