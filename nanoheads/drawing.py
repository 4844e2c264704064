"""What pictures share: the log of a run as arrays, colours, a canvas, and how they are written."""
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# what --x names -> key of log.jsonl, label
AXES = {"step": ("step", "step"), "tokens": ("tokens", "training tokens"),
        "time": ("elapsed_s", "elapsed minutes")}
# Okabe-Ito, safe for colour-blind readers; its yellow is left out, too pale on white
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
GREY = "0.4"
RC = {"figure.dpi": 160, "savefig.dpi": 160, "font.size": 12,
      "axes.titlesize": 13, "axes.titleweight": "bold", "axes.titlelocation": "left",
      "axes.spines.top": False, "axes.spines.right": False,
      "axes.grid": True, "axes.axisbelow": True, "grid.color": "0.9", "text.parse_math": False,
      "svg.hashsalt": "curves"}  # the same log gives the same bytes


# ---- a log ----

def number(value):
    """A float; NaN for whatever is missing, not a number, or infinite."""
    return float(value) if isinstance(value, (int, float)) and np.isfinite(value) else np.nan


def parse(line):
    try:
        row = json.loads(line)
        return row if np.isfinite(number(row.get("step"))) else None
    except (ValueError, AttributeError):  # not JSON; JSON but not an object
        return None


def warn(run_dir, message):
    print(f"{run_dir}: {message}", file=sys.stderr)


def read_rows(run_dir, name, sound=bool):
    """The rows of a log that are `sound`, in the file's order; a line to stderr where some are broken."""
    rows, bad = [], []
    for n, line in enumerate((Path(run_dir) / name).read_text(errors="replace").split("\n"), 1):
        row = parse(line)
        if not (row and sound(row)) and line.strip():
            bad.append(n)
            row = parse(line[line.rfind('{"step"'):])  # a resume after a kill appends a row to the half one
        if row and sound(row):
            rows.append(row)
    if bad:
        warn(run_dir, f"{len(bad)} broken line(s) in {name}, the first is line {bad[0]}; the rest is used")
    return rows


def read_log(run_dir):
    """log.jsonl -> (training rows, evaluation rows), by step; of a step logged twice the later row wins."""
    if not (Path(run_dir) / "log.jsonl").is_file():
        warn(run_dir, "no log.jsonl, skipped")
        return [], []
    train, evals = {}, {}
    for row in read_rows(run_dir, "log.jsonl"):
        for rows, key in ((train, "loss"), (evals, "val_loss")):
            if key in row:
                rows[row["step"]] = row
    if not train and not evals:
        warn(run_dir, "log.jsonl has no rows to plot, skipped")
    return [train[s] for s in sorted(train)], [evals[s] for s in sorted(evals)]


def column(rows, key):
    """One key of all rows, [n]."""
    return np.array([number(row.get(key)) for row in rows])


def load(run_dir, x="step"):
    """The log as arrays, None if there is nothing to draw; a line to stderr for each thing that is wrong."""
    train, evals = read_log(run_dir)
    if not train and not evals:
        return None
    key, unit = AXES[x][0], 60 if x == "time" else 1
    c = SimpleNamespace(
        x=x,
        tx=column(train, key) / unit,
        loss=column(train, "loss"),
        lr=column(train, "lr"),
        ex=column(evals, key) / unit,
        step=column(evals, "step"),
        etrain=column(evals, "train_loss"),
        val=column(evals, "val_loss"),
        bpb=column(evals, "val_bpb"))
    if not np.isfinite(np.r_[c.tx, c.ex]).any():
        return warn(run_dir, f"no {key!r} in log.jsonl, skipped")
    if x == "time" and (np.diff(c.tx) < 0).any():
        warn(run_dir, "elapsed_s restarts in log.jsonl, so its curves fold back; --x step does not")
    if not evals:
        warn(run_dir, "no evaluation rows yet: validation loss, bits per byte and gap are left out")
    lost = np.r_[column(train, "step")[np.isnan(c.loss)], c.step[np.isnan(c.val)]]
    if lost.size:
        warn(run_dir, f"{lost.size} loss(es) not finite, the first at step {lost.min():g}; drawn as gaps")
    c.gap = c.val - c.etrain
    both = np.isfinite(c.bpb) & (c.val > 0)
    # nats per token -> bits per byte
    c.ratio = np.median(c.bpb[both] / c.val[both]) if both.any() else np.nan
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


# ---- a picture ----

def canvas(width, height, title=""):
    """An empty Figure, in inches."""
    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, x=0.01, ha="left", weight="bold")
    return figure


def label_right(ax, labels):
    """Write [(y, text, colour)] right of the axes at their heights, pushed apart where they would overlap."""
    ax.get_ylim()  # settles the autoscale that transData needs
    labels, gap = sorted(labels), min(0.07, 1 / max(len(labels), 1))
    at = [ax.transAxes.inverted().transform(ax.transData.transform((0, y)))[1] for y, _, _ in labels]
    for i in range(1, len(at)):
        at[i] = max(at[i], at[i - 1] + gap)
    for i in reversed(range(len(at))):  # and back down from the top
        at[i] = min(at[i], at[i + 1] - gap if i + 1 < len(at) else 1)
    for height, (_, text, colour) in zip(at, labels):
        ax.text(1.02, height, text, transform=ax.transAxes, va="center", color=colour,
                fontsize=min(12, 170 * gap))


def save(fig, stem):
    """Write STEM.png and STEM.svg -> their paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(f"{stem}.png")
    fig.savefig(f"{stem}.svg", metadata={"Date": None})
    return [Path(f"{stem}.png"), Path(f"{stem}.svg")]
