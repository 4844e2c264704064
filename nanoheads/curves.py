"""
The curves of runs, read from log.jsonl and drawn: losses, bits per byte, the learning rate, the gap between
training and validation. Of runs on a task: losses, the share of answers that are right, the schedule.
"""
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib as mpl
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter

from nanoheads.common import number, printable
from nanoheads.drawing import COLOURS, GREY, RC, canvas, label_right, save
from nanoheads.log import MAIN_RATE, read_rows, warn

# what --x of plot_curves.py names -> key of log.jsonl, label
AXES = {"step": ("step", "step"), "tokens": ("tokens", "training tokens"),
        "time": ("elapsed_s", "elapsed minutes")}
DASHES = ["-", "--", ":", "-."]  # beyond 7 runs the colours repeat; dash and number differ
TITLES = {"bpb": "Bits per byte", "bpc": "Bits per character", "loss": "Loss, nats per token",
          "lr": "Learning rate", "gap": "Gap, val − train loss, nats per token",
          "acc": "Answers that are right, mean over levels"}
BITS = 1 / np.log(2)  # nats -> bits
OF_TASK = {"loss": "Loss, nats an answer", "acc": "Answers that are right, by level"}  # of a run alone


# ---- log.jsonl as arrays ----

def read_log(run_dir):
    """log.jsonl -> (training rows, evaluation rows), by step; of a step logged twice the later row wins."""
    if not (Path(run_dir) / "log.jsonl").is_file():
        warn(run_dir, "no log.jsonl, skipped")
        return [], []
    train, evals = {}, {}
    for row in read_rows(Path(run_dir) / "log.jsonl"):
        for rows, key in ((train, "loss"), (evals, "val_loss")):
            if key in row:
                rows[row["step"]] = row
    if not train and not evals:
        warn(run_dir, "log.jsonl has no rows to plot, skipped")
    return [train[s] for s in sorted(train)], [evals[s] for s in sorted(evals)]


LARGEST = 1e30  # of what is drawn: beyond it the distance between two values would overflow


def column(rows, key):
    """One key of all rows, [n]; NaN: not there, or no number that can be drawn."""
    values = np.array([number(row.get(key)) for row in rows])
    return np.where(np.abs(values) <= LARGEST, values, np.nan)


def curves_of(run_dir, x="step"):
    """The log as arrays, None if there is nothing to draw; a line to stderr for each thing that is wrong."""
    train, evals = read_log(run_dir)
    if not train and not evals:
        return None
    key, unit = AXES[x][0], 60 if x == "time" else 1
    c = SimpleNamespace(
        x=x,
        tx=column(train, key) / unit,
        loss=column(train, "loss"),
        lr=column(train, MAIN_RATE),
        ex=column(evals, key) / unit,
        step=column(evals, "step"),
        etrain=column(evals, "train_loss"),
        val=column(evals, "val_loss"),
        bpb=column(evals, "val_bpb"),
        acc=column(evals, "val_acc"),
        levels={key.removeprefix("acc/"): column(evals, key) for key in (evals or [{}])[-1]
                if key.startswith("acc/")})
    if not np.isfinite(np.r_[c.tx, c.ex]).any():
        return warn(run_dir, f"no {key!r} in log.jsonl, skipped")
    if x == "time" and (np.diff(c.tx) < 0).any():
        warn(run_dir, "elapsed_s restarts in log.jsonl, so its curves fold back; --x step does not")
    if not evals:
        warn(run_dir, "no evaluation rows yet: validation loss, bits per byte and gap are left out")
    c.of_task = bool(c.levels)
    c.of_characters = bool(evals) and all("val_bpc" in row for row in evals)
    not_finite = np.r_[column(train, "step")[np.isnan(c.loss)], c.step[np.isnan(c.val)]]
    if not_finite.size:
        warn(run_dir, f"{not_finite.size} loss(es) not finite, the first at step {not_finite.min():g}; "
                      "drawn as gaps")
    c.gap = c.val - c.etrain
    has_ratio = np.isfinite(c.bpb) & (c.val > 0)
    # nats per token -> bits per byte
    c.ratio = np.median(c.bpb[has_ratio] / c.val[has_ratio]) if has_ratio.any() else np.nan
    c.window = len(train) // 40 * 2 + 1
    c.smooth = moving_mean(c.loss, c.window)
    return c


def moving_mean(values, window):
    """The mean of the finite ones among `window` values around each; NaN where the value itself is."""
    if not len(values):
        return values
    finite = np.isfinite(values)
    total = np.convolve(np.nan_to_num(values), np.ones(window), "same")
    count = np.convolve(finite, np.ones(window), "same")
    return np.where(finite, total / np.maximum(count, 1), np.nan)


# ---- figures ----

def points(line):
    xy = np.array(line.get_data(), float)
    return xy[:, np.isfinite(xy).all(0)]


def fit_y(ax):
    """Fit y to the curves after their steep start, so that the end can be read; note how high they began."""
    lines = [xy for xy in map(points, ax.lines) if xy.size]
    if lines:
        x, y = np.concatenate(lines, 1)
        start = x.min() + 0.15 * np.ptp(x)
        # the second half of a short run is shown even where the others are still in their start
        high = max(ly[lx >= min(start, (lx[0] + lx[-1]) / 2)].max() for lx, ly in lines)
        pad = 0.06 * (high - y.min()) or 0.1
        ax.set_ylim(y.min() - pad, high + pad)
        if y.max() > high + pad:  # above the axes, where no curve hides it
            ax.set_title(f"↑ from {y.max():.2f}", loc="right", color=GREY, fontsize=12, fontweight="normal")


def draw_levels(ax, c, colour, labels):
    """The share of answers that are right at each level of a task, darker the harder the level."""
    for i, (level, share) in enumerate(c.levels.items()):
        alpha = 0.3 + 0.7 * (i + 1) / len(c.levels)
        ax.plot(c.ex, share, color=colour, lw=1.6, alpha=alpha, marker="o" if len(c.ex) == 1 else "")
        # of equal shares the easier level stands above
        labels[ax].append((round(share[-1], 2) - 1e-4 * i, f"{level}: {share[-1]:.2f}", colour))


def losses_in(axes, c):
    """[(axes, what nats a token are multiplied by there)] of the panels that show losses of a run."""
    ratios = {"bpb": c.ratio, "bpc": BITS, "loss": 1}
    return [(axes[name], ratio) for name, ratio in ratios.items() if name in axes]


def panels_of(runs):
    """The rows of panels that show these runs: losses above, and below them the schedule and the gap.

    Where tokens are characters, losses are in bits for each, which others publish; else in nats for a token.
    Where they are bytes too, both panels of losses would be one curve, so there is one as wide as the others.
    """
    if all(c.of_task for _, c, _, _ in runs):
        return [["loss", "acc"], ["lr", "acc"]]
    if np.allclose([c.ratio for _, c, _, _ in runs], BITS, rtol=1e-6):
        return [["bpb"], ["gap"], ["lr"]]
    return [["bpb", "bpc" if all(c.of_characters for _, c, _, _ in runs) else "loss"], ["lr", "gap"]]


def draw_training(axes, c, colour):
    """The minibatch losses of a run alone; returns their lines for the legend."""
    mean = f"train, mean of {c.window} logged steps" if c.window > 1 else "train, as logged"
    for ax, ratio in losses_in(axes, c):
        minibatch, = ax.plot(c.tx, c.loss * ratio, color=colour, lw=0.8, alpha=0.3, label="train, minibatch")
        smooth, = ax.plot(c.tx, c.smooth * ratio, color=colour, lw=1.4, alpha=0.7, label=mean)
    ax, ratio = losses_in(axes, c)[-1]
    evaluated, = ax.plot(c.ex, c.etrain * ratio, color=colour, lw=1.4, ls="--", label="train, evaluated")
    for line in (line for ax, _ in losses_in(axes, c) for line in ax.lines):
        if points(line).shape[1] == 1:  # a line through one point is none
            line.set(marker="o", markersize=4)
    return [line for line in (minibatch, smooth, evaluated) if points(line).size]


def draw_train_loss(axes, c, style):
    """The evaluated train losses of one of several runs, thin beside its validation losses."""
    thin = {**style, "lw": 1, "alpha": 0.6, "ms": 3, "marker": "o" if len(c.ex) == 1 else ""}
    for ax, ratio in losses_in(axes, c):
        ax.plot(c.ex, c.etrain * ratio, **thin)


def draw_validation(axes, c, style, tag, alone, labels):
    """The evaluations of a run, its best marked; what stands beside them goes into labels {axes: [...]}."""
    gap, evaluated = axes.get("gap"), {"bpb": c.bpb, "bpc": c.val * BITS, "loss": c.val, "gap": c.gap}
    if not alone:
        evaluated["acc"] = c.acc
    for ax, y in ((axes[name], y) for name, y in evaluated.items() if name in axes):
        ax.plot(c.ex, y, **style)
        if np.isfinite(y).any():
            last = ax is gap or ax is axes.get("acc")
            i = np.flatnonzero(np.isfinite(y))[-1] if last else np.nanargmin(y)
            text = f"{y[i]:+.3f}" if ax is gap else f"{y[i]:.3f}"
            if alone:
                text = f"{'last' if last else 'best'} {text}\nstep {c.step[i]:,g}"
            labels[ax].append((y[i], tag + text, style["color"]))
            if not last:
                ax.plot(c.ex[i], y[i], "o", ms=9, mfc="white", mec=style["color"], mew=2.2, zorder=5)


def finish_axes(axes, x, labels, titles):
    """Titles, limits, units, and the labels, all outside the axes: no curve hides one."""
    for name, ax in axes.items():
        ax.set_title(titles[name])
        if not any(points(line).size for line in ax.lines):
            ax.text(0.5, 0.5, "not in the log", transform=ax.transAxes, ha="center", color=GREY)
            ax.set_yticks([])
        elif name == "gap":
            ax.axhline(0, color=GREY, lw=1)
        if name in ("bpb", "bpc", "loss"):
            fit_y(ax)
        elif name == "acc":
            ax.set_ylim(-0.03, 1.03)
        label_right(ax, labels[ax])
        short, plain = EngFormatter(sep=""), FuncFormatter(lambda v, _: f"{v:,.10g}")
        ax.xaxis.set_major_formatter(short if x == "tokens" else plain)
        ax.tick_params(labelbottom=True)
        if ax.get_subplotspec().is_last_row():
            ax.set_xlabel(AXES[x][1])
    axes["lr"].yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.6g}"))


@mpl.rc_context(RC)
def draw(runs, stem, title=""):
    """[(name, curves, colour, dash)] -> the paths of one figure.

    Train and validation losses; a run alone also gets its minibatches'. Runs on tasks have shares of right
    answers in place of bits per byte and of the gap.
    """
    fig = canvas(11, 7.5, title)
    fig.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    rows = panels_of(runs)
    axes = fig.subplot_mosaic(rows, sharex=True, height_ratios=[2, 1, 1] if len(rows) == 3 else None)
    of_task = "acc" in axes
    alone, handles, labels = len(runs) == 1, [], {ax: [] for ax in axes.values()}
    for n, (name, c, colour, dash) in enumerate(runs):
        tag = f"{n + 1}: " if len(runs) > len(COLOURS) else ""
        style = {"color": colour, "ls": dash, "lw": 2, "ms": 4, "marker": "o" if len(c.ex) <= 60 else ""}
        if alone:
            handles += draw_training(axes, c, colour)
            if of_task:
                draw_levels(axes["acc"], c, colour, labels)
        else:
            draw_train_loss(axes, c, style)
        # equal schedules lie on each other: the earlier run is wider, so that each stays visible
        axes["lr"].plot(c.tx, c.lr, color=colour, ls=dash, lw=2 + min(2, 6 / len(runs)) * (len(runs) - 1 - n))
        draw_validation(axes, c, style, tag, alone, labels)
        if not alone or len(c.ex):  # a leading _ would hide the label
            handles.append(Line2D([], [], label="val" if alone else tag + name.lstrip("_"), **style))
    if not alone and any(np.isfinite(c.etrain).any() for _, c, _, _ in runs):
        handles.append(Line2D([], [], color=GREY, lw=1, alpha=0.6, label="thin: train, evaluated"))
    if any(labels[axes[name]] for name in rows[0]):
        handles.append(Line2D([], [], ls="", marker="o", ms=9, mfc="white", mec=GREY, mew=2.2,
                              label="best val"))
    titles = {**TITLES, **(OF_TASK if of_task and alone else {})}
    if of_task:
        titles["loss"] = OF_TASK["loss"]
    elif all(c.of_characters for _, c, _, _ in runs) and "bpc" not in axes:
        titles["bpb"] = "Bits per byte, and per character"
    finish_axes(axes, c.x, labels, titles)
    columns = 5 if alone else max(1, 120 // (max(len(h.get_label()) for h in handles) + 8))
    fig.legend(handles=handles, loc="outside lower center", ncol=min(columns, len(handles) or 1),
               frameon=False)
    return save(fig, stem)


def dataset_name(run_dir):
    """The dataset or the task that a run's config.json names, '?' where it names none."""
    try:
        config = json.loads((Path(run_dir) / "config.json").read_bytes())
        if config["train"].get("task"):
            return printable(f"task {config['train']['task']}")
        return printable(Path(config["train"]["dataset"]).name)
    except (OSError, ValueError, KeyError, TypeError):
        return "?"


def plot_runs(run_dirs, names, comparison_dir, x="step", suffix=""):
    """Draw each run by itself, and all of them into the folder `comparison_dir` -> the paths.

    suffix: what stands behind "comparison" in the name of the latter.
    """
    runs, paths, datasets = [], [], [dataset_name(run) for run in run_dirs]
    if len(set(datasets)) > 1:
        print("runs on different datasets: their losses and bits per byte do not compare", file=sys.stderr)
    for i, (run, name) in enumerate(zip(run_dirs, names)):
        c = curves_of(run, x)
        if c:  # a run that is skipped keeps its place, so the others' colours do not move when it fills up
            colour = COLOURS[i % len(COLOURS)]
            label = f"{name} ({datasets[i]})" if len(set(datasets)) > 1 else name
            runs.append((label, c, colour, DASHES[i // len(COLOURS) % len(DASHES)]))
            paths += draw([(name, c, colour, "-")], run / "figures" / "curves", title=name)
    if len(runs) > 1:
        paths += draw(runs, comparison_dir / f"comparison{suffix}")
    return paths
