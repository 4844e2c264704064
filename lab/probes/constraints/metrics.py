"""
How well probabilities predict labels: AUROC, average precision, F1, calibration.

Also without parts of the text, for intervals; scorers beside each other as a table, and as a picture.
"""

import numpy as np
import torch
from sklearn.metrics import (average_precision_score, brier_score_loss, f1_score, precision_recall_curve,
                             roc_auc_score)

from nanoheads.common import table
from nanoheads.drawing import COLOURS, canvas
from lab.probes.constraints.setup import HEADS
from lab.probes.intervals import over_checkpoints
from lab.probes.shared import plus_minus

METRICS = dict(auroc="AUROC", ap="av. precision", f1="F1", ece="ECE", brier="Brier")
BINS = 15     # of equal width, for calibration
DRAWS = 1000  # of documents, for an interval


def sigmoid(logits):
    return torch.as_tensor(logits).cpu().double().sigmoid().numpy()


def bins(y, p):
    """(count, mean p, share of positives) of BINS equal parts of [0, 1], [BINS] each; NaN where empty."""
    bin_of = np.minimum((p * BINS).astype(int), BINS - 1)
    count = np.bincount(bin_of, minlength=BINS)
    with np.errstate(invalid="ignore"):
        return count, np.bincount(bin_of, p, BINS) / count, np.bincount(bin_of, y, BINS) / count


def figures(y, p, threshold):
    """{metric: value} of labels y [n], bool, and probabilities p [n]; all NaN where y is of one class."""
    if y.all() or not y.any():
        return dict.fromkeys(METRICS, np.nan)
    count, mean, share = bins(y, p)
    ece = np.nansum(count * np.abs(mean - share)) / len(y)
    return dict(auroc=roc_auc_score(y, p), ap=average_precision_score(y, p),
                f1=f1_score(y, p >= threshold, zero_division=0), ece=ece, brier=brier_score_loss(y, p))


def best_threshold(y, p):
    """Where "p at least that" has the highest F1, the lowest of equals."""
    precision, recall, thresholds = precision_recall_curve(y, p)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-30)
    return thresholds[f1[:-1].argmax()]


def over_text(y, p, threshold, block=None):
    """{metric: [1 + blocks]} of all tokens, then without each block in turn, see jackknife()."""
    rows = [figures(y, p, threshold)]
    if block is not None:
        order = p.argsort(kind="stable")  # once: what is sorted is sorted again in no time
        y, p, block = y[order], p[order], block[order]
        rows += [figures(y[block != b], p[block != b], threshold) for b in np.unique(block)]
    return {metric: np.array([row[metric] for row in rows]) for metric in METRICS}


def over_documents(y, p, threshold, document, seed):
    """{metric: [1 + DRAWS]}: of all passages, then of documents drawn with replacement, the same for all.

    NaN where those drawn are of one class.
    """
    names, document = np.unique(document, return_inverse=True)
    n, is_above = len(names), p >= threshold
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), DRAWS)
    weights = np.concatenate((np.ones((1, n)), draws))  # how often a document counts
    in_document = np.eye(n)[document]
    wins = (p[y][:, None] > p[~y]) + 0.5 * (p[y][:, None] == p[~y])  # AUROC is their mean
    pairs = in_document[y].T @ wins @ in_document[~y]

    def total(values):
        return weights @ np.bincount(document, values, n)

    with np.errstate(invalid="ignore"):
        auroc = ((weights @ pairs) * weights).sum(1) / (total(y) * total(~y))
        figures_by_name = dict(accuracy=total(is_above == y) / total(np.ones(len(y))),
                               f1=2 * total(is_above & y) / (total(is_above) + total(y)), auroc=auroc)
    return {metric: np.where(np.isnan(auroc), np.nan, shares) for metric, shares in figures_by_name.items()}


def compare(scorer_figures, metrics, alone, is_paired):
    """({scorer: {metric: interval}}, the same of the heads less each other scorer).

    scorer_figures: {scorer: {metric: array [1 + ...]}} of each checkpoint. is_paired: whether the plain GPTs
    are as many; if not, they are no pairs, and there is no difference.
    """
    def intervals_of(figure):
        return {metric: over_checkpoints([figure(ckpt, metric) for ckpt in scorer_figures], alone)
                for metric in metrics}

    intervals, differences = {}, {}
    for scorer in scorer_figures[0]:
        intervals[scorer] = intervals_of(lambda ckpt, metric: ckpt[scorer][metric])
        if scorer != HEADS and (is_paired or not scorer.endswith("plain")):
            differences[scorer] = intervals_of(
                lambda ckpt, metric: ckpt[HEADS][metric] - ckpt[scorer][metric])
    return intervals, differences


def comparison_table(rows, metrics, sizes, unit="parameters", write=plus_minus):
    """rows: [(name, intervals, differences)] of compare()."""
    cells = []
    for name, intervals, differences in rows:
        cells += [(name, scorer, f"{sizes[scorer]:,}", *(write(x[m], 4, False) for m in metrics))
                  for scorer, x in intervals.items()]
        cells += [(name, f"heads less {scorer}", "", *(write(x[m], 4, True) for m in metrics))
                  for scorer, x in differences.items()]
    return table(("name", "scorer", unit, *metrics.values()), cells, left=2)


def brackets(bounds, digits, sign):
    """An interval of draws in words: it has no middle."""
    value, low, high = (f"{x:{'+' if sign else ''}.{digits}f}" for x in bounds)
    return f"{value} [{low}, {high}]"


def pool(bin_sets):
    """bins() of several checkpoints as one, a dict of lists."""
    count = sum(count for count, _, _ in bin_sets)
    sums = [sum(np.nan_to_num(x[i]) * x[0] for x in bin_sets) for i in (1, 2)]
    with np.errstate(invalid="ignore"):
        return dict(count=count.tolist(), p=(sums[0] / count).tolist(), share=(sums[1] / count).tolist())


def reliability(rows):
    """A Figure: for each name, the share of positives against the probability that was given.

    Each panel has axes of its own, of what was given and found there: names that are rare or nearly always
    true would fill a corner of axes from 0 to 1.
    """
    figure = canvas(1 + 4 * len(rows), 4.6)
    axes = figure.subplots(1, len(rows), squeeze=False)[0]
    for ax, row in zip(axes, rows):
        ends = []
        for colour, (scorer, bars) in zip(COLOURS, row["calibration"].items()):
            p, share, count = (np.array(bars[key], float) for key in ("p", "share", "count"))
            is_filled = count > 0
            ax.plot(p[is_filled], share[is_filled], color=colour, linewidth=1.2, label=scorer)
            area = 4 + 60 * np.sqrt(count[is_filled] / count.sum())
            ax.scatter(p[is_filled], share[is_filled], area, color=colour)
            ends.append((p[is_filled], share[is_filled]))
        ax.axline((0, 0), slope=1, color="0.6", linewidth=1, zorder=1, label="both the same")
        x, y = (np.concatenate(shares) for shares in zip(*ends))
        ax.set(title=row["name"], xlabel="probability given", xlim=padded_limits(x), ylim=padded_limits(y))
    axes[0].set_ylabel("share of positives; area: root of tokens")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def padded_limits(values):
    """(low, high) of an axis on which these shares stand, with a little room."""
    room = max(0.06 * np.ptp(values), 0.001)
    return values.min() - room, values.max() + room
