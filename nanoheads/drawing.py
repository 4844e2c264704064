"""What all pictures share: colours, a canvas with panels, labels, and how a picture is written to a file."""

import io
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nanoheads.common import UserError, write_atomic

# Okabe-Ito, safe for colour-blind readers; its yellow is left out, too pale on white
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
GREY = "0.4"
RC = {"figure.dpi": 160, "savefig.dpi": 160, "font.size": 12,
      "axes.titlesize": 13, "axes.titleweight": "bold", "axes.titlelocation": "left",
      "axes.spines.top": False, "axes.spines.right": False,
      "axes.grid": True, "axes.axisbelow": True, "grid.color": "0.9", "text.parse_math": False,
      "svg.hashsalt": "curves"}  # the same log gives the same bytes


def canvas(width, height, title=""):
    """An empty Figure, in inches."""
    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, x=0.01, ha="left", weight="bold")
    return figure


def panels(width, height, n=1, title=""):
    """(Figure, n axes side by side with one y axis; of one panel, its axes)."""
    figure = canvas(width, height, title)
    axes = figure.subplots(1, n, sharey=True, squeeze=False)[0]
    return figure, axes[0] if n == 1 else axes


def ticks(axis, places, text=None):
    """Numbers as they are on a logarithmic axis, at these places alone."""
    axis.set_ticks(places, text or [f"{v:g}" for v in places])
    axis.set_ticks([], minor=True)


def label_right(ax, labels, size=12):
    """Write [(y, text, colour)] right of the axes at their heights, pushed apart where they would overlap.

    size: of the letters, at most. Returns [(height, (y, text, colour))] as written, heights 0 to 1.
    """
    ax.get_ylim()  # settles the autoscale that transData needs
    inches = ax.get_position().height * ax.get_figure().get_figheight()
    labels, gap = sorted(labels), min(max(0.07, size / 72 / inches), 1 / max(len(labels), 1))
    heights = [ax.transAxes.inverted().transform(ax.transData.transform((0, y)))[1] for y, _, _ in labels]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    for i in reversed(range(len(heights))):  # and back down from the top
        heights[i] = min(heights[i], heights[i + 1] - gap if i + 1 < len(heights) else 1)
    for height, (_, text, colour) in zip(heights, labels):
        ax.text(1.02, height, text, transform=ax.transAxes, va="center", color=colour,
                fontsize=min(size, 170 * gap))
    return list(zip(heights, labels))


def encode(figure, kind):
    """The bytes of a Figure as png, svg or pdf; the same each time: an svg has no date."""
    file = io.BytesIO()
    figure.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


def picture_bytes(draw, data, kind="svg"):
    """The bytes of a picture; None where it has nothing to show."""
    with mpl.rc_context({**RC, "font.size": 11, "svg.hashsalt": draw.__name__}):
        figure = draw(data)
        return figure and encode(figure, kind)


def save(figure, stem, kinds=("png", "svg")):
    """Write STEM.png and STEM.svg -> their paths. UserError: the disk refuses."""
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot make the folder {stem.parent} ({e.strerror or e})") from None
    paths = [Path(f"{stem}.{kind}") for kind in kinds]
    for path in paths:
        data = encode(figure, path.suffix[1:])
        write_atomic(path, lambda f, data=data: f.write(data))
    return paths
