"""
The pictures of a report: differences with their intervals, and learning curves; of several studies,
differences and worth against size. They are white, so that they read on a dark page too. The same study gives
the same bytes.

Each function takes (Study, Comparisons) and returns a Figure; nanoheads.drawing.picture_bytes() draws it.
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
from study.verdicts import MEASURES, half_interval, seed_differences
from study.words import (BUT, INTERIM, MEANING, against_plain, baseline_label, confidence_level, ends_of,
                         guess_of, is_known, is_of_tasks, join_words, label_of, limits_at_equal, si_number)

# blue, orange, green, purple, grey, and black for the plain GPT: as on the page
VERDICT_COLOURS = dict(zip([*MEANING, PLAIN],
                           ("#0067a3", "#a94400", "#00735a", "#7a4a8c", "#5a636d", "#000000")))
LIMITED = "#3f8fc8"  # better, but not shown to be so at equal cost: paler, and its dot is hollow
MAX_COLOURED = 8     # variants in colour; of more, only the best and the worst are


def short_label(text):
    """A name, short enough for a picture."""
    return shorten(" ".join(printable(text).split()), 40)


def fold(text, letters):
    """Text in lines of at most this many letters, which may also break behind an underscore."""
    return "\n".join(textwrap.wrap(text.replace("_", "_ "), letters)).replace("_ ", "_")


# ---- differences ----

def range_of(spans):
    """(left, right) of an axis for lists of differences, with zero well inside and far outliers cut off."""
    spans = [span for span in ([v for v in span if is_known(v)] for span in spans) if span]
    limit = 3 * np.median([max(map(abs, span)) for span in spans]) or math.inf
    values = [v for span in spans for v in span if max(map(abs, span)) <= limit]
    left, right = min(values), max(values)
    left, right = min(left, -0.25 * right), max(right, -0.25 * left)
    pad = 0.05 * (right - left) or 0.01
    return left - pad, right + pad


def forest_narrow(study_and_comparisons):
    """forest() for a phone, where the letters of the other are too small."""
    return forest(study_and_comparisons, 4.4, letters=18, words=44)


def forest(study_and_comparisons, width=8.6, letters=40, words=100):
    """A Figure: the plain GPT's seeds, then each variant against it, the best on top, task by task; None:
    there is no difference yet.

    width: in inches; letters, words: how many letters a line of a name, and of the words below, has at most.
    """
    study, comparisons = study_and_comparisons
    rows = [c for c in against_plain(study, comparisons) if is_known(c.mean)]
    if not rows:
        return None
    scores, tasks = scores_of(study), is_of_tasks(study)
    if tasks:
        rows.sort(key=lambda c: study.texts.index(c.texts[0]))
    drawn_rows = [] if tasks else [row_of_plain(study, scores)]
    for c in rows:
        name = f"{c.texts[0]}: {label_of(study, c.variant)}" if tasks else label_of(study, c.variant)
        drawn_rows.append((name, c.mean, c.low, c.high, seed_differences(scores, c),
                           colours_of(study, comparisons, c)))
    left, right = range_of([(low, high, mean, *seeds) for _, mean, low, high, seeds, _ in drawn_rows])
    names = [fold(short_label(name), letters) for name, *_ in drawn_rows]
    lines = 1 + max(name.count("\n") for name in names)
    figure, axes = panels(width, 1.9 + (0.09 + 0.18 * lines) * len(drawn_rows))
    axes.axvspan(-study.margin, study.margin, color="0.93", linewidth=0, zorder=0)
    axes.axvline(0, color="black", linewidth=1.2, zorder=1)
    for y, (_, *row) in enumerate(drawn_rows):
        draw_row(axes, y, *row, left, right)
    axes.set_yticks(range(len(drawn_rows)), names)
    axes.set(xlim=(left, right), ylim=(len(drawn_rows) - 0.4, -0.6))
    axes.grid(axis="y", visible=False)
    scale = study.config.get("scale")
    title = join_words(study.texts) + (f", {scale} scale" if scale else "")
    axes.set_title(fold(short_label(title), words - letters), fontsize=11)
    axes.set_xlabel(fold(printable(axis_of(study)), words - letters))
    text = (f"mean and {confidence_level(study)} interval over seeds; small dots: the seeds; grey band: the "
            "margin")
    handles = legend_of(study, comparisons, rows, words - letters)
    has_long_labels = any(len(handle.get_label()) > 30 for handle in handles)
    figure.legend(handles=handles, title=fold(text, words), loc="outside lower center",
                  ncols=2 if words < 50 else 3 if has_long_labels else 5, frameon=False, fontsize=10,
                  title_fontsize=10)
    return figure


def row_of_plain(study, scores):
    """The plain GPT's row: its seeds around its mean, and the interval of that."""
    half = half_interval(study, PLAIN, study.texts)
    scores_by_text = [scores.get(PLAIN, {}).get(text, {}) for text in study.texts]
    shared = [seed for seed in scores_by_text[0] if all(seed in by_seed for by_seed in scores_by_text)]
    mean = mean_of(scores, PLAIN, study.texts)
    seeds = [float(np.mean([by_seed[seed] for by_seed in scores_by_text])) - mean for seed in shared]
    ends = (math.nan, math.nan) if half is None else (-half, half)
    black = VERDICT_COLOURS[PLAIN]
    return label_of(study, PLAIN), 0.0, *ends, seeds, dict(color=black, markerfacecolor=black)


def colours_of(study, comparisons, c):
    """{"color", "markerfacecolor"} of a Comparison's lines and dots."""
    if limits_at_equal(study, comparisons, c):
        return dict(color=LIMITED, markerfacecolor="white")
    return dict(color=VERDICT_COLOURS[c.verdict], markerfacecolor=VERDICT_COLOURS[c.verdict])


def axis_of(study):
    """The label of the axis of differences."""
    measure = MEASURES[study.measure]
    side = "right" if measure.higher_is_better else "left"
    return f"{measure.name}, variant − {baseline_label(study).removeprefix('the ')} ({side} is better)"


def legend_of(study, comparisons, rows, letters):
    """A handle for each verdict among the Comparisons, and for those better at unequal cost alone."""
    limits = [(c, limits_at_equal(study, comparisons, c)) for c in rows]
    colours_of_verdict = {c.verdict: colours_of(study, comparisons, c)
                          for c, resources in limits if not resources}
    entries = [(verdict, colours_of_verdict[verdict]) for verdict in MEANING if verdict in colours_of_verdict]
    if limited := [(c, resources) for c, resources in limits if resources]:
        resources = dict.fromkeys(resource for _, names in limited for resource in names)
        entries.insert(int("better" in colours_of_verdict), (f"better{BUT}{join_words(resources, 'or')}",
                                                             colours_of(study, comparisons, limited[0][0])))
    interim = INTERIM * (not study.finished)
    return [Line2D([], [], marker="o", linewidth=2, label=fold(interim + text, letters), **colours)
            for text, colours in entries]


def draw_row(axes, y, mean, low, high, seeds, colours, left, right):
    """One comparison: interval, mean, and the seeds below the line; a triangle: it goes beyond the edge."""
    colour = colours["color"]
    axes.plot(seeds, [y + 0.25] * len(seeds), "o", color=colour, alpha=0.45, markersize=3, markeredgewidth=0)
    ends = [low, high] if is_known(low) else [mean, mean]
    axes.plot(ends, [y, y], color=colour, linewidth=2, solid_capstyle="round")
    axes.plot([mean], [y], "o", markersize=6, **colours)
    for edge, marker, is_beyond in ((left, "<", ends[0] < left), (right, ">", ends[1] > right)):
        if is_beyond:
            axes.plot([edge], [y], marker, color=colour, markersize=8, clip_on=False)
    if not left <= mean <= right:
        edge, side = (right, "right") if mean > right else (left, "left")
        offset = 7 * any(left < end < right for end in ends)  # the interval's line runs through the picture
        axes.annotate(f"{mean:+.3f}", (edge, y), (-10 if side == "right" else 10, offset), color=colour,
                      textcoords="offset points", ha=side, va="center", fontsize=9)


# ---- learning curves ----

def curves_of(study):
    """{text: {variant: (steps, scores [seeds, steps])}} on validation, of the judged runs. A run that ended
    early, because it had learned its task, stays at its last score.
    """
    curves = {}
    for run in study.runs:
        result = study.results.get(run.name)
        if run.stage == "judge" and result and result.curve:
            scores = [math.nan if score is None else score for score in result.curve["scores"]]
            runs = curves.setdefault(run.text, {}).setdefault(run.variant, [])
            runs.append((result.curve["steps"], scores))
    return {text: {name: on_one_axis(runs) for name, runs in variants.items()}
            for text, variants in curves.items()}


def on_one_axis(curves):
    """(steps, scores [n, steps]) of n curves, [(steps, scores)], on the steps of the longest."""
    steps = max((steps for steps, _ in curves), key=lambda steps: steps[-1])
    return steps, np.array([np.interp(steps, *curve) for curve in curves])


def learning_narrow(study_and_comparisons):
    """learning() for a phone: one panel below the other."""
    return learning(study_and_comparisons, 1, 4.4)


def learning(study_and_comparisons, max_columns=3, width=None):
    """A Figure: the score on validation against steps, a panel a text, a line a variant; None: no curves.

    max_columns: panels side by side; width: in inches, None: as these need.
    """
    study, comparisons = study_and_comparisons
    curves, measure = curves_of(study), MEASURES[study.measure]
    if not curves:
        return None
    columns = min(max_columns, len(curves))
    n_rows = -(-len(curves) // columns)
    figure = canvas(width or 3.2 + 3.6 * columns, 4.4 * n_rows)
    axes_of_panels = figure.subplots(n_rows, columns, squeeze=False).ravel()
    for axes in axes_of_panels[len(curves):]:
        axes.axis("off")
    for axes, (text, by_variant) in zip(axes_of_panels, curves.items()):
        names_ranked = [c.variant for c in against_plain(study, comparisons)
                        if text in c.texts and c.variant in by_variant]
        chosen = names_ranked if len(names_ranked) < MAX_COLOURED else names_ranked[:3] + names_ranked[-2:]
        for name in [name for name in names_ranked if name not in chosen]:
            axes.plot(by_variant[name][0], by_variant[name][1].mean(0), color="0.8", linewidth=0.8)
        late_scores = []  # scores after the steep start, which the axis shows
        for i, name in enumerate([*chosen, *[PLAIN] * (PLAIN in by_variant)]):
            steps, scores = by_variant[name]
            colour = "black" if name == PLAIN else COLOURS[i % 6]
            mean = scores.mean(0)
            axes.fill_between(steps, scores.min(0), scores.max(0), color=colour, alpha=0.12, linewidth=0)
            axes.plot(steps, mean, color=colour, linestyle="--" if 6 <= i < len(chosen) else "-",
                      label=f"{short_label(label_of(study, name))}, {mean[-1]:.3f}")
            late_scores += [value for value in mean[len(mean) // 3:] if is_known(value)]
        if is_of_tasks(study):
            axes.set_ylim(0, 1.02)
            if (guess := guess_of(study, text)) is not None:
                axes.axhline(guess, color=GREY, linestyle=":", linewidth=1)
        elif late_scores:
            low, top = min(late_scores), float(np.quantile(late_scores, 0.9))
            axes.set_ylim(low - 0.1 * (top - low) - 1e-3, top + 0.1 * (top - low) + 1e-3)
        axes.set(xlabel="steps", ylabel=f"{measure.name}, validation")
        axes.set_title(short_label(text), fontsize=11)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: si_number(v)))
        axes.legend(fontsize=8, frameon=False)
    return figure


# ---- several sizes ----

def ladder(studies):
    """A Figure of studies of several sizes: each variant's difference against size, and beside it, where the
    plain GPT was trained at other budgets too, what the variant is worth; None: nothing known.

    studies: [(parameters of the plain GPT's blocks, Study, Comparisons)].
    """
    points = {}  # variant -> [(parameters, Comparison)]
    for size, study, comparisons in studies:
        for c in against_plain(study, comparisons):
            if is_known(c.mean):
                points.setdefault(label_of(study, c.variant), []).append((size, c))
    if not points:
        return None
    has_worth = any(ends_of(c.worth) for own_points in points.values() for _, c in own_points)
    first = studies[0][1]
    figure = canvas(10 if has_worth else 6, 5.1, f"{short_label(first.name)}: effect against size")
    axes_of_panels = figure.subplots(1, 1 + has_worth, squeeze=False)[0]
    lines = [(short_label(name), COLOURS[i % len(COLOURS)],
              [(n * 1.03 ** (i - (len(points) - 1) / 2), c) for n, c in own_points])  # beside each other
             for i, (name, own_points) in enumerate(points.items())]
    draw_differences(axes_of_panels[0], lines, axis_of(first))
    if has_worth:
        draw_worth(axes_of_panels[1], lines)
    for axes, has_data in zip(axes_of_panels, (lambda c: True, lambda c: ends_of(c.worth))):
        axes.set(xscale="log", xlabel="parameters of the plain GPT's blocks")
        sizes = sorted({n for own_points in points.values() for n, c in own_points if has_data(c)})
        ticks(axes.xaxis, sizes, [si_number(n) for n in sizes])
    text = f"bars: {confidence_level(first)} intervals over seeds; a triangle lies farther out"
    figure.legend(handles=[Line2D([], [], color=colour, marker="o", label=name) for name, colour, _ in lines],
                  title=text, loc="outside lower center", ncols=4, frameon=False, fontsize=10,
                  title_fontsize=10)
    return figure


def draw_differences(axes, lines, label):
    """Means and intervals against size; a triangle at the edge: the mean lies beyond it."""
    low, high = range_of([(c.low, c.high, c.mean) for *_, points in lines for _, c in points])
    axes.axhline(0, color="black", linewidth=1.2)
    for _, colour, points in lines:
        heights = [min(max(c.mean, low), high) for _, c in points]
        axes.plot([n for n, _ in points], heights, color=colour)
        for (n, c), height in zip(points, heights):
            if is_known(c.low):
                axes.plot([n, n], [min(max(end, low), high) for end in (c.low, c.high)], color=colour)
            marker = "v" if c.mean < low else "^" if c.mean > high else "o"
            axes.plot([n], [height], marker, color=colour, clip_on=False)
    axes.set(ylim=(low, high), ylabel=label.replace("left is", "lower is").replace("right is", "higher is"))


def draw_worth(axes, lines):
    """Worth in the plain GPT's compute against size; a triangle: beyond the budgets that were trained."""
    axes.axhline(1, color="black", linewidth=1.2)
    for _, colour, points in lines:
        points = [(n, ends) for n, c in points if (ends := ends_of(c.worth))]
        axes.plot([n for n, _ in points], [ends[0][1] for _, ends in points], color=colour)
        for n, ends in points:
            values = [value for _, value in ends[1:]] or [ends[0][1]]
            axes.plot([n] * len(values), values, color=colour)  # an open end goes on to where budgets end
            axes.plot([n], [ends[0][1]], {"<": "v", ">": "^"}.get(ends[0][0], "o"), color=colour)
    axes.set(yscale="log", ylabel="worth, × the plain GPT's compute")
    low, high = axes.get_ylim()
    multiples = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.7, 2, 3)
    ticks(axes.yaxis, [m for m in multiples if low <= m <= high])
