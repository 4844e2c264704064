"""
The pictures of a report: differences as a forest, learning curves, scores against compute, and of a ladder
differences and worth against size. White, so that they read on a dark page too; the same results give the
same bytes.
"""

import math
import textwrap
from types import SimpleNamespace

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from nanoheads.common import cut_short, number, printable
from nanoheads.drawing import COLOURS, canvas, label_right, panels, ticks
from lab.study import effects
from lab.study.findings import (INTERIM, MEANING, against_plain, baseline_of, but_not_at, is_interim, known,
                                label_of, level, mean_of, not_shown_at, short)

# blue, orange, green, purple, grey, and black for the plain GPT: as on the page
VERDICT_COLOURS = dict(zip([*MEANING, "plain"],
                           ("#0067a3", "#a94400", "#00735a", "#7a4a8c", "#5a636d", "#000000")))
LIMITED = "#3f8fc8"  # better, and not shown to be so where costs are equal: paler, and its dot is hollow
FEW = 8  # variants that colours can show; of more, the best and the worst are


def cut(text):
    return cut_short(" ".join(printable(text).split()), 40)


def folded(text, letters):
    """Text in lines of at most so many letters, which may break behind an underscore too."""
    return "\n".join(textwrap.wrap(text.replace("_", "_ "), letters)).replace("_ ", "_")


def look(study, c):
    """{"color", "markerfacecolor"} of what is drawn of a comparison."""
    if not_shown_at(study, c):
        return dict(color=LIMITED, markerfacecolor="white")
    colour = VERDICT_COLOURS.get(c.verdict, VERDICT_COLOURS["undecided"])
    return dict(color=colour, markerfacecolor=colour)


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


def forest_narrow(study):
    """forest() for a phone, where the letters of the other are too small."""
    return forest(study, 4.4, letters=18, words=44)


def forest(study, width=8.6, letters=40, words=100):
    """A Figure: the plain GPT's seeds, then each variant against it, the best on top; None: nothing yet.

    width: in inches; letters, words: how many letters a line of a name, and of the words below, has at most.
    """
    rows = [c for c in against_plain(study) if known(c.mean)]
    if not rows:
        return None
    scores = [v for v in study.arms["plain"].bpb if known(v)]
    half = effects.uncertainty(study, "plain")
    ends = dict(low=None, high=None) if half is None else dict(low=-half, high=half)
    rows.insert(0, SimpleNamespace(variant="plain", verdict="plain", mean=0.0, **ends,
                                   differences=[v - sum(scores) / len(scores) for v in scores]))
    left, right = range_of([(c.low, c.high, c.mean, *c.differences) for c in rows])
    names = [folded(cut(label_of(study, c.variant)), letters) for c in rows]
    lines = 1 + max(name.count("\n") for name in names)
    figure, axes = panels(width, 1.9 + (0.09 + 0.18 * lines) * len(rows))
    axes.axvspan(-study.margin, study.margin, color="0.93", linewidth=0, zorder=0)
    axes.axvline(0, color="black", linewidth=1.2, zorder=1)
    for y, c in enumerate(rows):
        draw_row(axes, y, c, left, right, look(study, c))
    axes.set_yticks(range(len(rows)), names)
    axes.set(xlim=(left, right), ylim=(len(rows) - 0.4, -0.6))
    axes.grid(axis="y", visible=False)
    title = f"{study.data.dataset}, {study.scale} scale" if study.kind.trained_here else study.name
    axes.set_title(folded(cut(title), words - letters), fontsize=11)
    axes.set_xlabel(folded(printable(axis_of(study)), words - letters))
    text = f"mean and {level(study)} interval over seeds; small dots: the seeds; grey band: the margin"
    handles = legend_of(study, rows[1:], words - letters)
    long = any(len(handle.get_label()) > 30 for handle in handles)
    figure.legend(handles=handles, title=folded(text, words), loc="outside lower center",
                  ncols=2 if words < 50 else 3 if long else 5, frameon=False, fontsize=10, title_fontsize=10)
    return figure


def axis_of(study):
    """What the axis of differences says."""
    side = "right" if study.kind.higher_is_better else "left"
    return f"{study.kind.name}, variant − {baseline_of(study).removeprefix('the ')} ({side} is better)"


def legend_of(study, rows, letters):
    """A handle for each verdict among the comparisons, and for those that are better at other costs alone."""
    limits = [(c, not_shown_at(study, c)) for c in rows]
    shown = {c.verdict: look(study, c) for c, whats in limits if not whats}
    every = [(verdict, shown[verdict]) for verdict in MEANING if verdict in shown]
    if limited := [(c, whats) for c, whats in limits if whats]:
        whats = dict.fromkeys(what for _, own in limited for what in own)
        at = int("better" in shown)
        every.insert(at, (but_not_at("better", [*whats]), look(study, limited[0][0])))
    interim = INTERIM * is_interim(study)
    return [Line2D([], [], marker="o", linewidth=2, label=folded(interim + text, letters), **own)
            for text, own in every]


def draw_row(axes, y, c, left, right, look):
    """One comparison: interval, mean, and below the line the seeds; a triangle at the edge: it goes on."""
    colour = look["color"]
    seeds = [d for d in c.differences if known(d)]
    axes.plot(seeds, [y + 0.25] * len(seeds), "o", color=colour, alpha=0.45, markersize=3, markeredgewidth=0)
    ends = [c.low, c.high] if known(c.low) else [c.mean, c.mean]
    axes.plot(ends, [y, y], color=colour, linewidth=2, solid_capstyle="round")
    axes.plot([c.mean], [y], "o", markersize=6, **look)
    for edge, marker, beyond in ((left, "<", ends[0] < left), (right, ">", ends[1] > right)):
        if beyond:
            axes.plot([edge], [y], marker, color=colour, markersize=8, clip_on=False)
    if not left <= c.mean <= right:
        at, side = (right, "right") if c.mean > right else (left, "left")
        above = 7 * any(left < end < right for end in ends)  # the interval's line runs through the picture
        axes.annotate(f"{c.mean:+.3f}", (at, y), (-10 if side == "right" else 10, above), color=colour,
                      textcoords="offset points", ha=side, va="center", fontsize=9)


# ---- learning curves ----

def mean_curve(variant, runs):
    """Mean, lowest, highest validation bits/byte where all finished seeds have one, and their mean on
    training text, NaN where that was not kept; None without a curve.
    """
    curves = [runs[run].curve for run, bpb in zip(variant.runs, variant.bpb) if run in runs and known(bpb)]
    seeds = []
    for c in filter(None, curves):
        rows = np.array([c.tokens, c.seconds, c.bpb, c.train], float).T
        seeds.append({row[0]: row for row in rows if np.isfinite(row[2])})
    at = sorted(set.intersection(*map(set, seeds))) if seeds else []
    if not at:
        return None
    tokens, seconds, bpb, train = np.array([[seed[t] for t in at] for seed in seeds]).transpose(2, 0, 1)
    return {"training tokens": tokens[0], "train": train.mean(0),
            "mean": bpb.mean(0), "low": bpb.min(0), "high": bpb.max(0),
            "training FLOPs, executed": tokens[0] * number(variant.executed_flops_per_token),
            "seconds of training": seconds.mean(0)}


def learning(study):
    """A Figure: bits/byte of each variant against tokens, FLOPs and time; None: no curves yet."""
    curves = {name: c for name, variant in study.arms.items() if (c := mean_curve(variant, study.runs))}
    if not curves:
        return None
    order = [c.variant for c in against_plain(study) if c.variant in curves]
    chosen = order if len(order) < FEW else order[:3] + order[-2:]
    styles = {name: dict(color=COLOURS[i % 6], linestyle="-" if i < 6 else "--")
              for i, name in enumerate(chosen)}
    styles |= {"plain": dict(color="black")} if "plain" in curves else {}
    late = [c["high"][len(c["high"]) // 3:].max() for c in curves.values()]  # after the steep start
    trained = np.concatenate([curves[name]["train"] for name in styles])
    top = np.quantile(late, 0.9)
    low = np.nanmin([*(c["low"].min() for c in curves.values()), *trained])
    figure, every = panels(11, 4.4, 3)
    for axes, against in zip(every, ("training tokens", "training FLOPs, executed", "seconds of training")):
        for name in [name for name in curves if name not in styles]:
            axes.plot(curves[name][against], curves[name]["mean"], color="0.8", linewidth=0.8)
        for name, style in styles.items():
            c = curves[name]
            axes.fill_between(c[against], c["low"], c["high"], color=style["color"], alpha=0.12, linewidth=0)
            axes.plot(c[against], c["mean"], **style)
            if np.isfinite(c["train"]).any():
                axes.plot(c[against], c["train"], color=style["color"], linewidth=1, linestyle=":")
        axes.set_xlabel(against)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: short(v)))
    axes.set_ylim(low - 0.05 * (top - low) - 1e-3, top + 0.05 * (top - low) + 1e-3)
    every[0].set_ylabel("bits/byte")
    last = {name: curves[name]["mean"][-1] for name in styles}
    handles = [Line2D([], [], label=f"{cut(label_of(study, name))}, {last[name]:.3f}", **styles[name])
               for name in sorted(last, key=last.get)]
    words = ("lines: validation, with its last value; dotted: train" if np.isfinite(trained).any() else
             "validation, with its last value; the train loss is not in this results file")
    figure.legend(handles=handles, title=words, loc="outside lower center", ncols=3, frameon=False,
                  fontsize=10, title_fontsize=10)
    return figure


# ---- compute ----

def compute(study):
    """A Figure: the plain GPT's score against its compute, the variants at theirs; None: one budget."""
    variants = study.arms
    plain = sorted((variant.multiple, mean_of(variant.bpb), effects.uncertainty(study, name) or 0)
                   for name, variant in variants.items()
                   if variant.kind in ("plain", "budget") and mean_of(variant.bpb))
    if len(plain) < 2:
        return None
    x, y, half = zip(*plain)
    span = max(y) - min(y) or 0.01
    low, high = min(y) - 0.3 * span, max(y) + 0.3 * span
    rows = [(c, c.equal_flops.ratio, mean_of(variants[c.variant].bpb)) for c in against_plain(study)
            if c.equal_flops]
    rows = [row for row in rows if known(row[1]) and known(row[2])]
    figure, axes = panels(8.6, max(4.6, 1.2 + 0.2 * len(rows)))
    axes.plot(x, y, "o-", color="black", markersize=5)
    axes.vlines(x, np.subtract(y, half), np.add(y, half), color="black")
    places = {}
    for c, ratio, score in rows:
        own, at = look(study, c), min(max(score, low), high)
        # of the difference to the line; where that has ended, to the plain GPT as it is
        each = c.equal_flops if known(c.equal_flops.low) else c
        if known(each.low):
            ends = np.clip([score + end - each.mean for end in (each.low, each.high)], low, high)
            axes.vlines([ratio], *ends, color=own["color"], linewidth=1)
        axes.plot([ratio], [at], "o" if at == score else "^" if at == high else "v", **own)
        places[at, cut(label_of(study, c.variant)), own["color"]] = ratio
    axes.set(xscale="log", xlabel="executed training FLOPs, × the plain GPT's (black: the plain GPT)",
             ylabel=f"bits/byte, {study.data.split}", ylim=(low - 0.05 * span, high + 0.05 * span))
    ticks(axes.xaxis, x)
    # the names stand right of the axes, each at the end of a thin line from its dot: no curve hides one
    for height, label in label_right(axes, places, size=9):
        axes.annotate("", (places[label], label[0]), (1.015, height), textcoords="axes fraction",
                      arrowprops=dict(arrowstyle="-", color=label[2], linewidth=0.5, alpha=0.5))
    return figure


def ladder(studies):
    """A Figure of studies of several sizes: each variant's difference in bits/byte against size, and beside
    it, where the plain GPT was trained at other budgets too, what the variant is worth in the plain GPT's
    compute; None: nothing known.
    """
    points = {}  # variant -> [(parameters of the plain GPT's blocks, comparison)]
    for study in studies:
        plain = study.plain
        size = 12 * plain["n_layer"] * plain["n_embd"] ** 2
        for c in against_plain(study):
            if known(c.mean):
                points.setdefault(c.variant, []).append((size, c))
    if not points:
        return None
    some_worth = any(has_worth(c) for own in points.values() for _, c in own)
    figure = canvas(10 if some_worth else 6, 5.1, f"{cut(studies[0].name)}: effect against size")
    panels_of = figure.subplots(1, 1 + some_worth, squeeze=False)[0]
    lines = [(cut(name), COLOURS[i % len(COLOURS)],
              [(n * 1.03 ** (i - (len(points) - 1) / 2), c) for n, c in own])  # beside each other
             for i, (name, own) in enumerate(points.items())]
    draw_differences(panels_of[0], lines)
    if some_worth:
        draw_worth(panels_of[1], lines)
    for axes, has_data in zip(panels_of, (lambda c: True, has_worth)):
        axes.set(xscale="log", xlabel="parameters of the plain GPT's blocks")
        shown = {n for own in points.values() for n, c in own if has_data(c)}
        ticks(axes.xaxis, sorted(shown), [short(n) for n in sorted(shown)])
    text = f"bars: {level(studies[0])} intervals over seeds; a triangle lies farther out"
    figure.legend(handles=[Line2D([], [], color=colour, marker="o", label=name) for name, colour, _ in lines],
                  title=text, loc="outside lower center", ncols=4, frameon=False, fontsize=10,
                  title_fontsize=10)
    return figure


def draw_differences(axes, lines):
    """Means and intervals against size; a triangle at the edge: the mean lies beyond it."""
    low, high = range_of([(c.low, c.high, c.mean) for *_, own in lines for _, c in own])
    axes.axhline(0, color="black", linewidth=1.2)
    for name, colour, own in lines:
        heights = [min(max(c.mean, low), high) for _, c in own]
        axes.plot([n for n, _ in own], heights, color=colour, label=name)
        for (n, c), height in zip(own, heights):
            if known(c.low):
                axes.plot([n, n], [min(max(end, low), high) for end in (c.low, c.high)], color=colour)
            marker = "v" if c.mean < low else "^" if c.mean > high else "o"
            axes.plot([n], [height], marker, color=colour, clip_on=False)
    axes.set(ylim=(low, high), ylabel="bits/byte, variant − plain GPT (lower is better)")


def has_worth(c):
    return bool(c.worth) and (known(c.worth.mean) or bool(c.worth.beyond))


def draw_worth(axes, lines):
    """Worth in the plain GPT's compute against size; a triangle: beyond the budgets that were trained."""
    axes.axhline(1, color="black", linewidth=1.2)
    ends = {"less": "smallest", "more": "largest"}
    for name, colour, own in lines:
        own = [(n, c.worth) for n, c in own if has_worth(c)]
        values = [getattr(w, ends.get(w.beyond, "mean")) for _, w in own]
        axes.plot([n for n, _ in own], values, color=colour, label=name)
        for (n, w), value in zip(own, values):
            # an open end goes on to where the measured budgets end
            low, high = (end if known(end) else beyond
                         for end, beyond in ((w.low, w.smallest), (w.high, w.largest)))
            axes.plot([n, n], [low, high], color=colour)
            axes.plot([n], [value], {"less": "v", "more": "^"}.get(w.beyond, "o"), color=colour)
    axes.set(yscale="log", ylabel="worth, × the plain GPT's compute")
    low, high = axes.get_ylim()
    multiples = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.7, 2, 3)
    ticks(axes.yaxis, [m for m in multiples if low <= m <= high])
