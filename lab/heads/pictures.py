"""
The pictures of a run's heads, for plot_curves.py --heads: from heads.jsonl, violations.jsonl and log.jsonl.

gates      each head's gate over the run, and when heads were closed, pruned, kept and grown
states     the state over the run of each head (agency), and when it was forced without consent
active     heads at work against bits per byte

And a table, a line for each run: heads at work, time in each state, violations.
"""

from pathlib import Path
from types import SimpleNamespace

import matplotlib as mpl
import numpy as np
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from model import Agency
from nanoheads.common import number, say, table
from nanoheads.curves import curves_of
from nanoheads.drawing import COLOURS, GREY, RC, canvas, label_right, panels, save
from nanoheads.log import read_rows, warn

STATES = list(Agency.STATES)
STATE_COLOURS = ["#d6e2ec", "#E69F00", "#0072B2", "#000000"]  # ever darker, so that they differ in grey too
# event: marker, in words, side of the step: what ends a head stands before it
MARKS = {"frozen": ("s", "closed, to be pruned", 1), "pruned": ("X", "pruned", -1),
         "kept": ("o", "kept: closing it cost too much", 1), "grown": ("^", "grown", 1)}
FORCED = ("D", "forced without consent, from here", 1)
SHAPES = "osD^vPX"
MEASURED = ("static_gate", "gate")


# ---- reading ----

def number_of_state(state):
    """The place of a state in STATES; None for what is none."""
    return STATES.index(state) if state in STATES else None


def spread(rows, key, shape, value=number):
    """One key of all rows, [rows, layers, heads] by the heads' numbers; NaN: gone, or not measured."""
    array = np.full((len(rows), *shape), np.nan)
    for i, row in enumerate(rows):
        for layer, (heads, values) in enumerate(zip(row["heads"], row.get(key) or [])):
            for head, v in zip(heads, values):
                array[i, layer, head] = value(v)  # None becomes NaN
    return array


def history(run_dir):
    """heads.jsonl as arrays over [measurements, layers, heads]; None: there is none, reported on stderr."""
    path = Path(run_dir) / "heads.jsonl"
    if not path.is_file():
        return warn(run_dir, "no heads.jsonl; train with --controller_log to have the heads measured")
    rows = {row["step"]: row for row in read_rows(path) if isinstance(row.get("heads"), list)}
    rows = [rows[step] for step in sorted(rows)]
    if not rows:
        return warn(run_dir, "heads.jsonl has no measurements")
    events = [(e["what"], row["step"], e["layer"], e["head"])
              for row in rows for e in row.get("events") or [] if e.get("what") in [*MARKS]]
    ids = [head for row in rows for heads in row["heads"] for head in heads] + [head for *_, head in events]
    shape = max(len(row["heads"]) for row in rows), 1 + max(ids, default=0)
    h = SimpleNamespace(**{name: spread(rows, name, shape) for name in MEASURED}, events=events,
                        step=np.array([row["step"] for row in rows]),
                        active=np.array([number(row.get("active")) for row in rows]),
                        is_present=np.isfinite(spread(rows, "heads", shape)),
                        state=spread(rows, "state", shape, number_of_state))
    h.absent = np.where(h.is_present.any(0), "gone", "–")  # what to write where there is no head
    rows = read_rows(path.with_name("violations.jsonl"))
    h.forced, h.blocked = ([(kind, row["step"], row["layer"], row["head"])
                            for row in rows if row.get("type") == kind] for kind in ("forced", "blocked"))
    return h


def edges(steps):
    """Where the time that each measurement speaks for begins, and where the last one's ends, [n + 1]."""
    return np.append(steps, steps[-1] + (np.median(np.diff(steps)) if len(steps) > 1 else 1))


def points_at_evaluations(h, c):
    """(step, heads at work, bits per byte) of each evaluation after the first measurement."""
    i = np.searchsorted(h.step, c.step, side="right") - 1
    keep = (i >= 0) & np.isfinite(c.bpb)
    return c.step[keep], h.active[i[keep]], c.bpb[keep]


# ---- as numbers ----

def stay_lengths(h):
    """How many steps each stay of a head in a state lasts: until another state, until the head was last seen,
    or until the last measurement.
    """
    lengths = []
    for states in h.state.reshape(len(h.step), -1).T:
        began = None
        for i, state in enumerate(states):
            if began is not None and state != states[i - 1]:
                lengths.append(h.step[i - int(np.isnan(state))] - began)
                began = None
            if began is None and np.isfinite(state):
                began = h.step[i]
        if began is not None:
            lengths.append(h.step[-1] - began)
    return lengths


def numbers_of(h):
    """A run's line in the table: heads at work in the end, the share of all measurements of heads in each
    state, the mean steps of a stay in one, and its violations.
    """
    known_states = h.state[np.isfinite(h.state)]
    shares, stay = ["–"] * len(STATES), "–"
    if known_states.size:
        shares = [f"{100 * (known_states == i).mean():.0f} %" for i in range(len(STATES))]
        stay = f"{np.mean(stay_lengths(h)):,.0f}"
    return [f"{h.active[-1]:g}", *shares, stay, str(len(h.forced)), str(len(h.blocked))]


def table_of_runs(runs):
    """The table of [(name, history)]."""
    head = ("run", "heads at work", *STATES, "steps in a state", "violations: forced", "blocked")
    return table(head, [(name, *numbers_of(h)) for name, h in runs], width=110)


# ---- time lines ----

def time_lines(h, values, ends, title, cmap, norm):
    """(Figure, axes [layers], mesh) of values [measurements, layers, heads]: a row a head, white: gone.

    ends: [layers][heads] of what to write behind each row.
    """
    _, n_layer, n_head = values.shape
    columns = 1 if n_layer <= 4 else 2 if n_layer <= 8 else 3
    lines = -(-n_layer // columns)
    figure = canvas(4.8 * columns + (4.5 if columns == 1 else 1),
                    1.6 + lines * (0.55 + max(0.5, 0.21 * n_head)), title)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    x = edges(h.step)
    for layer, ax in enumerate(axes[:n_layer]):
        mesh = ax.pcolormesh(x, np.arange(n_head + 1) - 0.5, values[:, layer].T, cmap=cmap, norm=norm,
                             rasterized=True)
        ax.hlines(np.arange(1, n_head) - 0.5, x[0], x[-1], color="white", lw=2.5)
        for head in range(n_head):
            ax.text(1.01, head, ends[layer][head], transform=ax.get_yaxis_transform(), va="center",
                    fontsize=9, color=GREY)
        ax.set(xlim=(x[0], x[-1]), ylim=(n_head - 0.5, -0.5), ylabel="head")
        ax.set_yticks(range(n_head), range(n_head), fontsize=9)
        ax.set_title(f"layer {layer}", fontsize=11)
        ax.grid(False)
        ax.spines[:].set_visible(False)
        if len(h.step) == 1:
            ax.set_xticks(h.step)
        if layer + columns < n_layer:
            ax.tick_params(labelbottom=False)
        else:
            ax.set_xlabel("step")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    for ax in axes[n_layer:]:
        ax.set_visible(False)
    axes[0].text(1.01, 1.04, "at the end", transform=axes[0].transAxes, fontsize=9, color=GREY)
    return figure, axes[:n_layer], mesh


def mark(h, axes, events, marks, handles, colour="white", edge="black"):
    """Put a mark at each (what, step, layer, head), and into handles what the marks mean."""
    x = edges(h.step)
    size = 7 if h.is_present.shape[2] <= 8 else 5
    shift = min(0.25 * (x[1] - x[0]), 0.008 * (x[-1] - x[0]))  # two things may happen to a head at one step
    style = dict(ls="", mfc=colour, mec=edge, mew=1, zorder=5)
    for what, step, layer, head in events:
        shape, _, side = marks[what]
        axes[layer].plot(step + side * shift, head, marker=shape, ms=size, clip_on=False, **style)
    kinds = {what for what, *_ in events}
    handles += [Line2D([], [], marker=shape, ms=8, label=words, **style)
                for what, (shape, words, _) in marks.items() if what in kinds]


def gates(h, name):
    """A Figure of each head's gate over the run; None: all gates are 1, always."""
    fixed = (h.static_gate[h.is_present] == 1).all()
    values = h.gate if fixed else h.static_gate
    finite_gates = values[np.isfinite(values)]
    if not h.events and (finite_gates == 1).all():
        return None
    ends = [[word if np.isnan(g) else f"{g:.2f}" for g, word in zip(*layer)]
            for layer in zip(values[-1], h.absent)]
    norm = Normalize(min(0, finite_gates.min(initial=0)), max(1, finite_gates.max(initial=1)))
    figure, axes, mesh = time_lines(h, values, ends, f"{name}: gates", "viridis", norm)
    what = "gate, mean over tokens" if fixed else "gate"
    figure.colorbar(mesh, ax=axes, label=f"{what} (white: no such head)", pad=0.02, aspect=30)
    handles = []
    mark(h, axes, h.events, MARKS, handles)
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=11)
    return figure


def states(h, name):
    """A Figure of the state over the run of each head; None: no head has any."""
    if not np.isfinite(h.state).any():
        return None
    ends = [[word if np.isnan(s) else STATES[int(s)] for s, word in zip(*layer)]
            for layer in zip(h.state[-1], h.absent)]
    figure, axes, _ = time_lines(h, h.state, ends, f"{name}: states", ListedColormap(STATE_COLOURS),
                                 Normalize(-0.5, len(STATES) - 0.5))
    handles = [Patch(color=colour, label=state)
               for i, (colour, state) in enumerate(zip(STATE_COLOURS, STATES)) if (h.state == i).any()]
    mark(h, axes, h.forced, {"forced": FORCED}, handles, colour="#D55E00", edge="white")
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=11,
                  columnspacing=1.2, handletextpad=0.5)
    return figure


# ---- heads at work against bits per byte ----

def active(runs, title):
    """A Figure of [(name, history, curves, colour, shape)]; None: no run has an evaluation to show."""
    runs = [(name, colour, shape, *points_at_evaluations(h, c)) for name, h, c, colour, shape in runs if c]
    runs = [run for run in runs if len(run[3]) and np.isfinite(run[4]).all()]
    if not runs:
        return None
    figure, ax = panels(9, 6, title=title)
    late = np.concatenate([bpb[step >= 0.15 * step.max()] for *_, step, _, bpb in runs])
    low, high = late.min(), late.max()  # without the steep start
    pad = 0.08 * (high - low) or 0.1
    count = np.concatenate([n[bpb <= high] for *_, n, bpb in runs])
    room = 0.6 + 0.04 * np.ptp(count)
    left, right = count.min() - room, count.max() + room
    ax.set(ylim=(low - pad, high + pad), xlim=(left, right), ylabel="bits/byte, validation",
           xlabel="heads at work: gate above agency_threshold")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    top = max(bpb.max() for *_, bpb in runs)
    if top > high + pad:
        ax.set_title(f"↑ from {top:.2f}", loc="right", fontsize=11, weight="normal", color=GREY)
    label_places = []  # in parts of the axes
    ends = []  # [(y, words, colour)] of the last points
    for i, (name, colour, shape, step, n, bpb) in enumerate(runs):
        n = n + (i - (len(runs) - 1) / 2) * min(0.12, 0.5 / len(runs))  # beside each other
        ax.plot(n, bpb, color=colour, lw=1.5, alpha=0.6)
        ax.plot(n, bpb, shape, color=colour, ms=5)
        ax.plot(n[-1], bpb[-1], shape, color=colour, mfc="white", ms=9, mew=2)
        ends.append((bpb[-1], f"{name}\n{bpb[-1]:.3f}", colour))
        for j in dict.fromkeys([len(step) - 1, 0, *range(0, len(step), max(1, len(step) // 10))]):
            place = np.array([(n[j] - left) / (right - left), (bpb[j] - low) / (high - low + 2 * pad)])
            if bpb[j] > high or any((abs(place - label) < (0.11, 0.05)).all() for label in label_places):
                continue
            label_places.append(place)
            side, ha = (-7, "right") if place[0] > 0.85 else (7, "left")
            ax.annotate(f"step {step[j]:,g}", (n[j], bpb[j]), (side, 7), textcoords="offset points", ha=ha,
                        va="center", fontsize=9, color=colour,
                        path_effects=[withStroke(linewidth=3, foreground="white")])
    label_right(ax, ends)
    return figure


# ---- all of them ----

@mpl.rc_context(RC)
def plot_heads(run_dirs, names, together, suffix="", kinds=("png", "svg")):
    """Draw the heads of each run, and into the folder `together` the active ones of all -> the paths; print
    a table of them.

    suffix: what stands behind "active" in the name of the latter. What cannot be drawn is reported on
    stderr, a line each.
    """
    written, runs = [], []
    for i, (run, name) in enumerate(zip(run_dirs, names)):
        h = history(run)
        if not h:
            continue
        runs.append((name, h, curves_of(run), COLOURS[i % len(COLOURS)], SHAPES[i % len(SHAPES)]))
        figures = dict(gates=gates(h, name), states=states(h, name),
                       active=active(runs[-1:], f"{name}: heads at work and bits per byte"))
        missing = dict(gates="all gates are 1", states="heads have no states, agency is off",
                       active="no evaluation with bits per byte after the first measurement")
        for picture, figure in figures.items():
            if figure is None:
                warn(run, f"{missing[picture]}: no {picture}.png")
            else:
                written += save(figure, Path(run) / "figures" / picture, kinds)
    if runs:
        say(table_of_runs([(name, h) for name, h, *_ in runs]))
    if len(runs) > 1 and (figure := active(runs, "Heads at work and bits per byte")):
        written += save(figure, Path(together) / f"active{suffix}", kinds)
    return written
