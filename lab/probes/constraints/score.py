"""
Do constraint heads' scores match their labels, token by token, beside a prior and probes?

constraint heads   sigmoid of a name's score: its logit, the mean over its heads, and over the blocks whose
                   scores the loss trains (constraint_loss_layers, or all that have such heads)
prior              the share of positives among the labelled tokens of train
linear probe       logistic regression on the hidden state of a token, fitted by L-BFGS
MLP probe          one ReLU layer on the same states, with as many parameters as heads, router and scorers
                   have; by Adam, 6,000 steps of 512 tokens, the best of 20 checks on val

The hidden state is what the attention of the same blocks reads in the plain GPT; --own adds probes of the
model's own. Probes are fitted to --fit tokens of train. They minimise the cross-entropy with the labels plus
d/2 |W|^2, on standardised states, with that d of 1e-6, 1e-4 and 1e-2 which is best on val. They are kept in
the run's folder, under probes/, and the next command with the same model, text and labels reads them.

AUROC, average precision, F1 (at the threshold that is best on val) and Brier score are scikit-learn's. ECE is
the sum over 15 bins of equal width of n_i/n |mean p - share of positives|; where positives are rare, a small
one means little. Intervals are 95 %: for one checkpoint by the jackknife over 32 blocks of windows, paired by
block; for several by t over checkpoints. Differences to plain GPTs need as many --plain, in the same order.
"""

import numpy as np

from nanoheads.common import writable, write_atomic
from nanoheads.drawing import picture_bytes
from nanoheads.intervals import t_interval
from nanoheads.scoring import score_windows
from nanoheads.timing import progress_bar
from lab.labels.targets import UNKNOWN
from lab.probes.constraints.metrics import (METRICS, best_threshold, bins, compare, comparison_table,
                                            over_text, pool, reliability, sigmoid)
from lab.probes.constraints.setup import (COMPARED, HEADS, about_setup, branch_size, labels_of,
                                          numbers_of_setup, open_setup, outputs, starts_of, two_classes)
from lab.probes.constraints.token_probes import takers_of
from lab.probes.intervals import blocks_of, jackknife_interval
from lab.probes.shared import ask, plus_minus

PRIOR = "prior"


def prior_of(setup):
    """[names]: the share of positives among the labelled tokens of the training split. UserError: 0 or 1."""
    shares = []
    for name in setup.names:
        codes = setup.targets.codes(name, "train")
        y = codes[(codes != 127) & (codes != UNKNOWN)] > 127  # 127 is 1/2
        shares.append(two_classes(y, name, setup.parts[0]).mean())
    return np.array(shares)


def model_scores(setup, args, parts, starts, prior):
    """([{scorer: [p [n, names] of each part]} of each pair of checkpoints], {scorer: parameters})."""
    sizes = {HEADS: branch_size(setup.ckpts[0].model), PRIOR: 0}

    def scorer_outputs(ckpt):
        takers, probe_sizes = takers_of(ckpt, setup, args)
        sizes.update(probe_sizes)
        part_outputs = [outputs(ckpt, setup, part.split, part_starts, setup.context, takers)
                        for part, part_starts in zip(parts, starts)]
        return {name: [sigmoid(x[name].flatten(0, 1)) for x in part_outputs] for name in takers}

    plain = [scorer_outputs(ckpt) for ckpt in setup.plain] or [{}]
    shapes = [(len(s) * setup.context, len(setup.names)) for s in starts]
    constant = {PRIOR: [np.broadcast_to(prior, shape) for shape in shapes]}
    models = [{**scorer_outputs(ckpt), **constant, **plain[i % len(plain)]}
              for i, ckpt in enumerate(setup.ckpts)]
    return models, sizes


def row_of(setup, n, models, is_labelled, truth, blocks):
    """What is written of the n-th name: figures of each scorer, the heads less each other, calibration.

    models: of model_scores(). is_labelled, truth: of the part to choose on and of the part to measure on, the
    tokens with a label [n, names] and their classes. blocks [n]: of neighbouring windows.
    """
    (is_chosen, is_measured), (y_chosen, y) = (part[:, n] for part in is_labelled), truth
    figures_of, calibration, thresholds = [], {}, {}
    bar = progress_bar(sum(map(len, models)), f"figures of {setup.names[n]}")
    for scorers in models:
        figures_of.append({})
        for scorer, (p_chosen, p) in scorers.items():
            threshold = best_threshold(y_chosen, p_chosen[is_chosen, n])
            block = blocks[is_measured] if len(models) == 1 else None
            figures_of[-1][scorer] = over_text(y, p[is_measured, n], threshold, block)
            calibration.setdefault(scorer, []).append(bins(y, p[is_measured, n]))
            thresholds.setdefault(scorer, []).append(threshold)
            bar.update(1)
    bar.close()
    is_paired = len(setup.plain) == len(setup.ckpts)
    intervals, differences = compare(figures_of, METRICS, jackknife_interval, is_paired)
    calibration = {scorer: pool(bin_sets) for scorer, bin_sets in calibration.items()}
    return dict(name=setup.names[n], tokens=len(y), positive=float(y.mean()),
                prior=float(models[0][PRIOR][0][0, n]), figures=intervals, heads_less=differences,
                thresholds=thresholds, calibration=calibration)


def probe(args):
    """The heads' scores and their rivals', token by token."""
    picture_file = writable(args.picture, "--picture") if args.picture else None
    setup = open_setup(args)
    prior, parts = prior_of(setup), setup.parts[1:]
    starts = [starts_of(part, setup.context, args.tokens) for part in parts]
    labels = [labels_of(setup, part.split, part_starts, setup.context).numpy()
              for part, part_starts in zip(parts, starts)]
    is_labelled = [(part_labels >= 0) & (part_labels != 0.5) for part_labels in labels]
    truth = [[two_classes(part_labels[k[:, n], n] > 0.5, name, part)
              for part_labels, k, part in zip(labels, is_labelled, parts)]
             for n, name in enumerate(setup.names)]
    blocks = blocks_of(np.repeat(np.arange(len(starts[1])), setup.context), len(starts[1]))
    models, sizes = model_scores(setup, args, parts, starts, prior)
    rows = [row_of(setup, n, models, is_labelled, classes, blocks) for n, classes in enumerate(truth)]
    bpb = {ckpt.name: score_windows(ckpt.model, setup.data, args.split, args.tokens)[1]["bpb"]
           for ckpt in progress_bar([*setup.ckpts, *setup.plain], "bits per byte")}
    lines = [about_setup(setup, args), *(f"{row['name']}: {row['tokens']:,} labelled tokens, "
                                         f"{row['positive']:.4f} positive" for row in rows),
             comparison_table([(r["name"], r["figures"], r["heads_less"]) for r in rows], METRICS, sizes),
             *bits_lines(setup, bpb)]
    if picture_file:
        picture = picture_bytes(reliability, rows, "png")
        write_atomic(picture_file, lambda f: f.write(picture))
        lines.append(str(picture_file))
    return numbers_of_setup(setup, args, dict(parameters=sizes, names=rows, bits_per_byte=bpb)), lines


def bits_lines(setup, bpb):
    """Bits per byte in words: of each model, and by how much the constraint models differ."""
    lines = [f"{name}: {value:.4f} bits/byte" for name, value in bpb.items()]
    if len(setup.plain) == len(setup.ckpts) > 1:
        pairs = t_interval([bpb[a.name] - bpb[b.name] for a, b in zip(setup.ckpts, setup.plain)])
        lines.append(f"bits/byte less plain: {plus_minus(pairs)}")
    return lines


def main(argv):
    ask("constraints score", probe, "test", argv, **COMPARED,
        tokens=(int, 262_144, "of each split, in evenly spaced windows; 0: all"),
        picture=(str, None, "write a reliability picture, .png, to this file"))
