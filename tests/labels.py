"""Checks that the labels of a picture can be read."""

import matplotlib as mpl
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from nanoheads import drawing


def hidden_labels(figure):
    """The texts of a Figure that a curve of one of its axes runs through."""
    with mpl.rc_context(drawing.RC):
        figure.draw_without_rendering()
    renderer, hidden = figure.canvas.get_renderer(), []
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    for ax in figure.axes:
        for line in ax.get_lines():
            path = line.get_transform().transform_path(line.get_path())
            for text in texts:
                box = Bbox.intersection(text.get_window_extent(renderer), ax.bbox)  # curves end at the axes
                if box and path.intersects_bbox(box, filled=False):
                    hidden.append(text.get_text())
    return hidden
