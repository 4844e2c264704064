"""
What constraint heads know of their labels, beside a prior and probes of a plain GPT (docs/constraints.md).

    python constraints.py score      --ckpt out/c [--ckpt ...] --plain out/plain [--plain ...] --labels weak
    python constraints.py adjudicate --ckpt out/c --plain out/plain --labels weak [--task cited]
    python constraints.py explain    --ckpt out/c [--k 5]
    python constraints.py skip       --ckpt out/c [--below 0.5 0.9]

score       For each name: AUROC, average precision, F1, calibration of the heads' scores token by token;
            against the prior, a linear probe and an MLP probe of as many parameters as the heads have. Probes
            read what the attention of the same block of the plain GPT reads, --own: of the model itself, too.
adjudicate  Passages of held-out documents, classified by what is made of the heads' scores, against the mean
            hidden state of the plain GPT and against its probes' scores.
explain     Do the tokens with the highest scores explain a passage's score? They are hidden from all later
            tokens, as in probe.py keys, against those with the lowest, random ones, and their neighbours.
skip        Heads whose router gate stays below a threshold are not computed (constraint_skip): how many,
            what that does to bits per byte, to scoring a window and to writing a context.

A token whose label is above 1/2 is positive, below negative; exactly 1/2 and unknown are left out. Thresholds
and weight decay are chosen on val; --split val measures on its second half and chooses on the first. One
checkpoint: 95 % intervals over text; several: by t over checkpoints, which pair with as many --plain.
"""

import argparse
import copy
from os.path import relpath

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import (average_precision_score, brier_score_loss, f1_score, log_loss,
                             precision_recall_curve, roc_auc_score)
from sklearn.preprocessing import StandardScaler

from nanoheads.common import (ROOT, UserError, last_words, pick_device, table, writable, write_atomic,
                              write_json)
from nanoheads.drawing import COLOURS
from nanoheads.heads.measuring import attentions
from nanoheads.probes.tokens import (HEADS, Part, branch_size, labels_of, layers_of, names_of, open_setup,
                                     outputs, read, starts_of, takers_of)
from nanoheads.study.pictures import drawn, panels
from nanoheads.study.trial import score_windows
from nanoheads.text.dataset import TITLE, beginnings
from nanoheads.text.quality import interval as jackknife
from nanoheads.text.targets import UNKNOWN
from nanoheads.timing import progress_bar, take_turns, time_rows
from nanoheads.training.scoring import add_arguments
from probe import BLOCKS, around, interval, positive, spell, without_keys

PRIOR, STATE = "prior", "mean hidden state"
METRICS = dict(auroc="AUROC", ap="av. precision", f1="F1", ece="ECE", brier="Brier")
BINS = 15                        # of equal width, for calibration
STRENGTHS = (1e-3, 1e-2, 0.1, 1.0, 10.0)  # C of a passage's logistic regression
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)   # of a passage's scores, beside their mean and largest
TASKS = dict(cited="testifiability", hedged="decidability", dialogue="reciprocity")
DOCUMENT = 16                    # passages: a document of text without titles
DRAWS = 1000                     # of documents, for an interval


# ---- figures ----

def sigmoid(logits):
    return torch.as_tensor(logits).double().sigmoid().numpy()


def bins(y, p):
    """(count, mean p, share of positives) of BINS equal parts of [0, 1], [BINS] each; NaN where empty."""
    which = np.minimum((p * BINS).astype(int), BINS - 1)
    count = np.bincount(which, minlength=BINS)
    with np.errstate(invalid="ignore"):
        return count, np.bincount(which, p, BINS) / count, np.bincount(which, y, BINS) / count


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
    """{metric: [1 + blocks]} of all tokens, then without each block in turn, see textquality.interval()."""
    rows = [figures(y, p, threshold)]
    if block is not None:
        order = p.argsort(kind="stable")  # once: what is sorted is sorted again in no time
        y, p, block = y[order], p[order], block[order]
        rows += [figures(y[block != b], p[block != b], threshold) for b in np.unique(block)]
    return {metric: np.array([row[metric] for row in rows]) for metric in METRICS}


def over_checkpoints(samples, alone):
    """[value, low, high] of samples, an array [1 + ...] for each checkpoint: by t; one: alone(samples[0])."""
    return interval([each[0] for each in samples]) if len(samples) > 1 else alone(samples[0])


def by_jackknife(values):
    value, half = jackknife(values)
    return [value, value - half, value + half]


def by_bootstrap(values):
    return [float(values[0]), *map(float, np.nanquantile(values[1:], (0.025, 0.975)))]


def compared(found, metrics, alone, paired):
    """({scorer: {metric: interval}}, the same of the heads less each other scorer).

    found: {scorer: {metric: array [1 + ...]}} of each checkpoint. paired: whether the plain GPTs are as many;
    if not, they are no pairs, and there is no difference.
    """
    def of(what):
        return {metric: over_checkpoints([what(each, metric) for each in found], alone) for metric in metrics}

    whole, less = {}, {}
    for scorer in found[0]:
        whole[scorer] = of(lambda each, metric: each[scorer][metric])
        if scorer != HEADS and (paired or not scorer.endswith("plain")):
            less[scorer] = of(lambda each, metric: each[HEADS][metric] - each[scorer][metric])
    return whole, less


def comparison_table(rows, metrics, sizes, unit="parameters", write=spell):
    """rows: [(name, whole, less)] of compared()."""
    cells = []
    for name, whole, less in rows:
        cells += [(name, scorer, f"{sizes[scorer]:,}", *(write(x[m], 4, False) for m in metrics))
                  for scorer, x in whole.items()]
        cells += [(name, f"heads less {scorer}", "", *(write(x[m], 4, True) for m in metrics))
                  for scorer, x in less.items()]
    return table(("name", "scorer", unit, *metrics.values()), cells, left=2)


def ends(bounds, digits, sign):
    """An interval of draws in words: it has no middle."""
    value, low, high = (f"{x:{'+' if sign else ''}.{digits}f}" for x in bounds)
    return f"{value} [{low}, {high}]"


def two_classes(y, name, part):
    """y, if it is of two classes. UserError."""
    if not y.any() or y.all():
        raise UserError(f"{name}: what is read of {part.split} is of one class only "
                        f"({len(y):,} labelled, {int(y.sum()):,} positive)")
    return y


# ---- score ----

def prior_of(setup):
    """[names]: the share of positives among the labelled tokens of the training split. UserError: 0 or 1."""
    shares = []
    for name in setup.names:
        codes = setup.targets.codes(name, "train")
        y = codes[(codes != 127) & (codes != UNKNOWN)] > 127  # 127 is 1/2
        shares.append(two_classes(y, name, setup.parts[0]).mean())
    return np.array(shares)


def score(args):
    """The heads' scores and their rivals', token by token."""
    setup = open_setup(args)
    prior, sizes = prior_of(setup), {HEADS: branch_size(setup.runs[0].model), PRIOR: 0}
    parts = setup.parts[1:]
    starts = [starts_of(part, setup.context, args.tokens) for part in parts]
    labels = [labels_of(setup, part.split, each, setup.context).numpy() for part, each in zip(parts, starts)]
    known = [(each >= 0) & (each != 0.5) for each in labels]
    truth = [[two_classes(each[k[:, n], n] > 0.5, name, part)
              for each, k, part in zip(labels, known, parts)] for n, name in enumerate(setup.names)]
    windows = np.repeat(np.arange(len(starts[1])), setup.context)
    blocks = windows * min(BLOCKS, len(starts[1])) // len(starts[1])

    def said_by(run):
        """{scorer: [p [n, names] of each part]} of a run."""
        takers, own = takers_of(run, setup, args)
        sizes.update(own)
        each = [outputs(run, setup, part.split, s, setup.context, takers) for part, s in zip(parts, starts)]
        return {name: [sigmoid(x[name].flatten(0, 1)) for x in each] for name in takers}

    plain = [said_by(run) for run in setup.plain] or [{}]
    constant = {PRIOR: [np.broadcast_to(prior, each.shape) for each in labels]}
    said = [{**said_by(run), **constant, **plain[i % len(plain)]} for i, run in enumerate(setup.runs)]
    rows = []
    for n, (name, (chosen, y)) in enumerate(zip(setup.names, truth)):
        before, after = (each[:, n] for each in known)
        found, calibration, thresholds = [], {}, {}
        for each in progress_bar(said, f"figures of {name}"):
            found.append({})
            for scorer, (p_chosen, p) in each.items():
                threshold = best_threshold(chosen, p_chosen[before, n])
                block = blocks[after] if len(said) == 1 else None
                found[-1][scorer] = over_text(y, p[after, n], threshold, block)
                calibration.setdefault(scorer, []).append(bins(y, p[after, n]))
                thresholds.setdefault(scorer, []).append(threshold)
        whole, less = compared(found, METRICS, by_jackknife, len(setup.plain) == len(setup.runs))
        calibration = {scorer: pooled(each) for scorer, each in calibration.items()}
        rows.append(dict(name=name, tokens=len(y), positive=float(y.mean()), prior=float(prior[n]),
                         figures=whole, heads_less=less, thresholds=thresholds, calibration=calibration))
    bpb = {run.name: score_windows(run.model, setup.data, args.split, args.tokens)[1]["bpb"]
           for run in progress_bar([*setup.runs, *setup.plain], "bits per byte")}
    lines = [about(setup, args), *(f"{row['name']}: {row['tokens']:,} labelled tokens, "
                                   f"{row['positive']:.4f} positive" for row in rows),
             comparison_table([(r["name"], r["figures"], r["heads_less"]) for r in rows], METRICS, sizes),
             *bits_lines(setup, bpb)]
    if args.picture:
        picture = drawn(reliability, rows, "png")
        write_atomic(args.picture, lambda f: f.write(picture))
        lines.append(str(args.picture))
    return results(setup, args, dict(parameters=sizes, names=rows, bits_per_byte=bpb)), lines


def bits_lines(setup, bpb):
    """Bits per byte in words: of each model, and by how much the constraint models differ."""
    lines = [f"{name}: {value:.4f} bits/byte" for name, value in bpb.items()]
    if len(setup.plain) == len(setup.runs) > 1:
        pairs = interval([bpb[a.name] - bpb[b.name] for a, b in zip(setup.runs, setup.plain)])
        lines.append(f"bits/byte less plain: {spell(pairs)}")
    return lines


def pooled(each):
    """bins() of several checkpoints as one, a dict of lists."""
    count = sum(count for count, _, _ in each)
    sums = [sum(np.nan_to_num(x[i]) * x[0] for x in each) for i in (1, 2)]
    with np.errstate(invalid="ignore"):
        return dict(count=count.tolist(), p=(sums[0] / count).tolist(), share=(sums[1] / count).tolist())


def reliability(rows):
    """A Figure: for each name, the share of positives against the probability that was given."""
    figure, axes = panels(1 + 4 * len(rows), 4.6, len(rows))
    for ax, row in zip(np.atleast_1d(axes), rows):
        ax.plot([0, 1], [0, 1], color="0.6", linewidth=1)
        for colour, (scorer, each) in zip(COLOURS, row["calibration"].items()):
            p, share, count = (np.array(each[key]) for key in ("p", "share", "count"))
            there = count > 0
            ax.plot(p[there], share[there], color=colour, linewidth=1.2, label=scorer)
            ax.scatter(p[there], share[there], 4 + 60 * np.sqrt(count[there] / count.sum()), color=colour)
        ax.set(title=row["name"], xlabel="probability given", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    np.atleast_1d(axes)[0].set_ylabel("share of positives; area: root of tokens")
    figure.legend(*np.atleast_1d(axes)[0].get_legend_handles_labels(), loc="outside lower center",
                  ncols=3, frameon=False)
    return figure


# ---- adjudicate ----

def documents(data, part):
    """[(first, last)] of the articles of a part: from a WikiText title to the next; [] where it has none.

    What stands before the first title is left out: it may belong to an article of another part.
    """
    tokens = np.asarray(data.tokens(part.split)[part.first:part.last])
    titles = beginnings(data.tokenizer, tokens, TITLE).tolist()
    cuts = [part.first + at for at in titles if at or not part.first]  # a line that was cut is none
    cuts.append(part.last)
    return list(zip(cuts, cuts[1:]))


def passages(data, parts, length, count):
    """[(starts [n], document of each [n])] of the parts: whole passages, evenly spaced, at most `count` each.

    A text without titles in each part has documents of DOCUMENT passages one after the other, the first of
    each part left out. UserError where there is no passage.
    """
    found, every = [], [documents(data, part) for part in parts]
    if min(map(len, every)) < 2:
        size = DOCUMENT * length
        every = [[(first, min(first + size, part.last))
                  for first in range(part.first + size, part.last, size)] for part in parts]
    for part, each in zip(parts, every):
        places = np.array([(start, number) for number, (first, last) in enumerate(each)
                           for start in range(first, last - length + 1, length)]).reshape(-1, 2)
        if not len(places):
            raise UserError(f"{part.split} has no passage of {length:,} tokens within a document")
        n = min(count, len(places))
        found.append(tuple(places[np.arange(n) * len(places) // n].T))
    return found


def aggregated(scores):
    """[passages, names * (2 + QUANTILES)] of token scores [passages, length, names]."""
    return np.concatenate((scores.mean(1), scores.max(1), *np.quantile(scores, QUANTILES, 1)), 1)


def passage_features(run, setup, args, cuts, length):
    """{features: [float64 [passages, F] of each part]} of a run."""
    takers, _ = takers_of(run, setup, args)
    if not layers_of(run.model) or args.own:
        takers[f"{STATE}, {'own' if layers_of(run.model) else 'plain'}"] = lambda states, _: states.mean(1)
    T, found = min(length, setup.context), {}
    for part, (starts, _) in zip(setup.parts, cuts):
        windows = (starts[:, None] + np.arange(0, length, T)).ravel()
        for name, each in outputs(run, setup, part.split, windows, T, takers).items():
            each = each.double().numpy().reshape(len(starts), -1, each.size(-1))
            found.setdefault(name, []).append(each.mean(1) if name.startswith(STATE) else aggregated(each))
    return found


def judged(x, y):
    """(p of what is measured on [n], threshold) by logistic regression; x, y: of the three parts."""
    scaler = StandardScaler().fit(x[0])
    x = [scaler.transform(each) for each in x]
    models = [LogisticRegression(C=strength, max_iter=2000).fit(x[0], y[0]) for strength in STRENGTHS]
    best = min(models, key=lambda model: log_loss(y[1], model.predict_proba(x[1])[:, 1]))
    before, after = (best.predict_proba(each)[:, 1] for each in x[1:])
    return after, best_threshold(y[1], before)


def over_documents(y, p, threshold, document, seed):
    """{metric: [1 + DRAWS]}: of all passages, then of documents drawn with replacement, the same for all.

    NaN where those drawn are of one class.
    """
    names, document = np.unique(document, return_inverse=True)
    n, said = len(names), p >= threshold
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), DRAWS)
    weights = np.concatenate((np.ones((1, n)), draws))  # how often a document counts
    of = np.eye(n)[document]
    wins = (p[y][:, None] > p[~y]) + 0.5 * (p[y][:, None] == p[~y])  # AUROC is their mean
    pairs = of[y].T @ wins @ of[~y]

    def total(values):
        return weights @ np.bincount(document, values, n)

    with np.errstate(invalid="ignore"):
        auroc = ((weights @ pairs) * weights).sum(1) / (total(y) * total(~y))
        found = dict(accuracy=total(said == y) / total(np.ones(len(y))),
                     f1=2 * total(said & y) / (total(said) + total(y)), auroc=auroc)
    return {metric: np.where(np.isnan(auroc), np.nan, each) for metric, each in found.items()}


def adjudicate(args):
    """Passages of held-out documents, told apart by what their labels say on the whole."""
    setup = open_setup(args)
    tasks, T = tasks_of(args.task, setup), min(args.passage, setup.context)
    length = args.passage // T * T  # whole windows
    cuts = passages(setup.data, setup.parts, length, args.passages)
    labels = [labels_of(setup, part.split, starts, length).reshape(len(starts), length, -1).double().numpy()
              for part, (starts, _) in zip(setup.parts, cuts)]
    sorts = [classes([each[..., setup.names.index(name)] for each in labels], name, setup.parts)
             for name in tasks.values()]
    plain = [passage_features(run, setup, args, cuts, length) for run in setup.plain] or [{}]
    said = [{**passage_features(run, setup, args, cuts, length), **plain[i % len(plain)]}
            for i, run in enumerate(setup.runs)]
    sizes = {name: x[0].shape[1] for name, x in said[0].items()}
    metrics, rows = dict(accuracy="accuracy", f1="F1", auroc="AUROC"), []
    for (task, name), (chosen, y, terciles) in zip(tasks.items(), sorts):
        document, found = cuts[2][1][chosen[2]], []
        for features in progress_bar(said, task):
            found.append({})
            for scorer, x in features.items():
                p, threshold = judged([each[c] for each, c in zip(x, chosen)], y)
                found[-1][scorer] = over_documents(y[2], p, threshold, document, args.seed)
        whole, less = compared(found, metrics, by_bootstrap, len(setup.plain) == len(setup.runs))
        rows.append(dict(task=task, name=name, terciles=terciles, passages=[len(each) for each in y],
                         positive=[float(each.mean()) for each in y], documents=len(np.unique(document)),
                         figures=whole, heads_less=less))
    lines = [about(setup, args), f"passages of {length:,} tokens: {', '.join(str(len(s)) for s, _ in cuts)} "
             f"of {', '.join(part.split for part in setup.parts)}; classes are made of the labels themselves"]
    lines += [f"{row['task']}: mean {row['name']} above {row['terciles'][1]:.4f} against at most "
              f"{row['terciles'][0]:.4f}; {row['passages'][2]} passages of {row['documents']} documents, "
              f"{row['positive'][2]:.3f} positive" for row in rows]
    shown = [(row["task"], row["figures"], row["heads_less"]) for row in rows]
    lines.append(comparison_table(shown, metrics, sizes, "features", ends))
    return results(setup, args, dict(features=sizes, tasks=rows)), lines


def tasks_of(task, setup):
    """{task: name}. UserError for one without labels."""
    if task == "auto":
        words = {name: task for task, name in TASKS.items()}
        return {words.get(name, name): name for name in setup.names}
    name = TASKS.get(task, task)
    if name not in setup.names:
        raise UserError(f"--task {task} is about {name}; heads and labels are for {', '.join(setup.names)}")
    return {task: name}


def classes(labels, name, parts):
    """(which passages [n] of each part, their class, bool, terciles): of labels [passages, length].

    The class is the mean of the known labels, above the upper tercile of the training passages or at most
    the lower; those between are left out. Where a third of them have the highest mean, they are the upper
    class. UserError where a part has one class.
    """
    means = []
    for each in labels:
        known = each >= 0
        with np.errstate(invalid="ignore"):
            means.append((each * known).sum(1) / known.sum(1))
    if np.isnan(means[0]).all():
        raise UserError(f"{name}: no passage of train has a label")
    low, high = np.nanquantile(means[0], (1 / 3, 2 / 3))
    below = means[0][means[0] < high]
    if high == np.nanmax(means[0]) and below.size:  # nothing is above it: it is the upper class itself
        high = below.max()
        low = min(low, high)
    chosen = [np.flatnonzero((mean <= low) | (mean > high)) for mean in means]
    y = [two_classes(mean[c] > high, f"passages by {name}", part)
         for mean, c, part in zip(means, chosen, parts)]
    return chosen, y, [float(low), float(high)]


# ---- explain ----

SETS = ("highest", "lowest", "neighbours", "random")


def removal_sets(scores, k, draws, rng):
    """bool [3 + draws, T]: the k tokens of highest score, of lowest, neighbours of the highest, random ones.

    scores [T]. The last token, whose score is asked for, is no candidate. A neighbour is the nearest token
    that is neither among the highest nor taken, the earlier of two.
    """
    order = np.argsort(scores[:-1], kind="stable")
    top, free = order[-k:], set(order[:-k].tolist())
    beside = []
    for at in top:
        beside.append(min(free, key=lambda i: (abs(i - at), i)))
        free.remove(beside[-1])
    chosen = [top, order[:k], beside, *(rng.permutation(len(order))[:k] for _ in range(draws))]
    removed = np.zeros((len(chosen), len(scores)), bool)
    for row, each in zip(removed, chosen):
        row[each] = True
    return removed


def scores_without(model, ids, removed):
    """Scores [sets, T, names], float64, of ids [T] with the keys of each set hidden, removed [sets, T]."""
    found, rows = [], max(1, (1 << 24) // len(ids) ** 2)  # the masks are sets x T x T
    for sets in torch.from_numpy(removed).split(rows):
        with without_keys(model, sets.to(ids.device)):
            found.append(read(model, ids.expand(len(sets), -1), [])[1].double().cpu())
    return torch.cat(found).numpy()


def window_changes(model, ids, k, draws, rng):
    """{(name, set): [4]}: by how much the last token's score moves, and the mean of those never hidden.

    Then the size of both; of random sets, means over the draws.
    """
    none = np.zeros((1, len(ids)), bool)
    before, changes = scores_without(model, ids, none)[0], {}
    sets = [removal_sets(before[:, n], k, draws, rng) for n in range(before.shape[1])]
    after = scores_without(model, ids, np.concatenate(sets))
    for n, (name, removed) in enumerate(zip(names_of(model), sets)):
        change = after[n * len(removed):(n + 1) * len(removed), :, n] - before[:, n]
        both = np.stack((change[:, -1], change[:, ~removed.any(0)].mean(1)), 1)
        for s, each in zip(SETS, (*both[:3, None], both[3:])):
            changes[name, s] = np.concatenate((each, np.abs(each)), 1).mean(0)
    return changes


def explain(args):
    """Whether the tokens of highest score explain the score of their passage."""
    setup = open_setup(args)
    if 2 * args.k >= setup.context:
        raise UserError(f"--k {args.k}: highest and lowest do not fit a passage of {setup.context:,} tokens")
    part = Part(args.split, 0, len(setup.data.tokens(args.split)))
    starts = starts_of(part, setup.context, args.windows * setup.context)
    tokens, n = setup.data.tokens(args.split), np.arange(len(starts))
    columns = ("final", "mean", "|final|", "|mean|")
    rows, cells = [], []
    for run in setup.runs:
        device, found = next(run.model.parameters()).device, []
        for w, start in enumerate(progress_bar(starts, run.name)):
            ids = torch.from_numpy(tokens[start:start + setup.context].astype(np.int64)).to(device)
            rng = np.random.default_rng([args.seed, w])
            found.append(window_changes(run.model, ids, args.k, args.draws, rng))
        by = {key: np.stack([each[key] for each in found]) for key in found[0]}  # [windows, 4]
        if not np.isfinite(np.concatenate(list(by.values()))).all():
            raise UserError(f"{run.name} gives scores that are not finite: its weights are damaged")
        for name in setup.names:
            what = {s: by[name, s] for s in SETS}
            what |= {f"highest less {s}": by[name, "highest"] - by[name, s] for s in SETS[1:]}
            for s, values in what.items():
                row = {c: around(values[:, i], n, len(n)) for i, c in enumerate(columns)}
                rows.append(dict(run=run.name, name=name, removed=s, **row))
                cells.append((run.name, name, s, *(spell(row[c]) for c in columns)))
    line = (f"{setup.data.meta['name']}, {args.split}: {len(starts)} passages of {setup.context:,} tokens, "
            f"{args.k} hidden; change of the score in logits; random: mean of {args.draws} draws")
    head = ("run", "name", "hidden", *columns)
    return results(setup, args, dict(rows=rows)), [line, table(head, cells, left=3)]


# ---- skip ----

def at_threshold(model, below):
    """A copy that skips constraint heads whose gate is below a threshold."""
    model = copy.deepcopy(model).eval()
    for attn in attentions(model):
        if attn.constraint is not None:
            attn.constraint.skip = below
    return model


@torch.no_grad()
def closed_shares(model, ids, below):
    """(share of windows x heads, of tokens x heads) with gates below a threshold, of ids [B, T]."""
    traces = model(ids, traces=True).traces
    low = torch.cat([each for key, each in traces.items() if key.endswith("router_gates")], -1) < below
    return low.all(1).double().mean().item(), low.double().mean().item()


def skip(args):
    """What skipping closed constraint heads saves and costs, threshold by threshold, beside computing all."""
    setup, rows = open_setup(args), []
    if setup.runs[0].model.config.constraint_gate != "output":
        raise UserError("skip is for models whose router gates outputs; a gate elsewhere turns no head off")
    part = Part(args.split, 0, len(setup.data.tokens(args.split)))
    starts = starts_of(part, setup.context, args.batch * setup.context)
    tokens = setup.data.tokens(args.split)
    ids = torch.from_numpy(np.stack([tokens[s:s + setup.context] for s in starts]).astype(np.int64))
    ids = ids.to(args.device)
    for run in setup.runs:
        models = {"all": at_threshold(run.model, 0.0)} | {b: at_threshold(run.model, b) for b in args.below}

        def write(below):
            models[below].generate(ids[:1, :1], setup.context - 1, temperature=0)

        def score_ids(below):
            with torch.no_grad():
                models[below].hidden(ids)

        times = {what: {row["name"]: row for row in time_rows(what, take_turns(models, act, args, what),
                                                              "all", ids.numel(), 1)}
                 for what, act in (("a window", score_ids), ("decoding", write))}
        for below, model in models.items():
            windows, each = (0.0, 0.0) if below == "all" else closed_shares(models["all"], ids, below)
            row = dict(run=run.name, below=below, windows=windows, tokens=each,
                       bpb=score_windows(model, setup.data, args.split, args.tokens)[1]["bpb"])
            for what, found in times.items():
                row[what] = [found[below][key] for key in ("time_ratio", "time_ratio_low", "time_ratio_high")]
            rows.append(row)
    cells = [(row["run"], row["below"], f"{row['windows']:.3f}", f"{row['tokens']:.3f}", f"{row['bpb']:.4f}",
              *("{:.3f} [{:.3f}, {:.3f}]".format(*row[what]) for what in ("a window", "decoding")))
             for row in rows]
    line = (f"{setup.data.meta['name']}, {args.split}; closed: share of windows x heads, of tokens x heads; "
            f"times over computing all heads, {args.rounds} rounds in turns, {len(ids)} windows at once")
    head = ("run", "skipped below", "windows closed", "tokens closed", "bits/byte", "a window", "decoding")
    return results(setup, args, dict(rows=rows)), [line, table(head, cells)]


# ---- output ----

def about(setup, args):
    """What was measured, on which labels, by how many checkpoints."""
    weak = " (weak: nobody has checked them)" if setup.targets.meta.get("weak") else ""
    many = f"; {len(setup.runs)} checkpoints, mean and t interval" if len(setup.runs) > 1 else ""
    half = ", second half" if args.split == "val" else ""
    return (f"{setup.data.meta['name']}, {args.split}{half}: labels {setup.targets.dir.name}{weak}; "
            f"block {', '.join(map(str, setup.layers))}, windows of {setup.context:,}{many}")


def results(setup, args, found):
    """What --json writes: every number, intervals as [value, low, high]."""
    options = {key: value for key, value in vars(args).items() if key not in ("json", "what", "picture")}
    labels = setup.targets and dict(folder=relpath(setup.targets.dir, ROOT), splits=setup.targets.splits,
                                    weak=setup.targets.meta.get("weak"))
    return dict(what=args.what, dataset=setup.data.meta["name"], layers=setup.layers, context=setup.context,
                split_sha256=setup.data.splits[args.split].get("sha256"), labels=labels, options=options,
                runs=[run.name for run in setup.runs], plain=[run.name for run in setup.plain], **found)


# ---- command line ----

COMMANDS = dict(score=score, adjudicate=adjudicate, explain=explain, skip=skip)


def arguments(argv):
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    commands = parser.add_subparsers(dest="what", required=True, metavar="|".join(COMMANDS))
    for name, command in COMMANDS.items():
        p = commands.add_parser(name, help=command.__doc__, description=command.__doc__)
        add_arguments(p, "test")
        p.add_argument("--context", type=positive, help="tokens in a window (default: the shortest training)")
        p.add_argument("--seed", type=int, default=1337, help="of probes and draws (default: 1337)")
        if name == "explain":
            p.add_argument("--k", type=positive, default=5, help="tokens to hide (default: 5)")
            p.add_argument("--windows", type=positive, default=128, help="passages (default: 128)")
            p.add_argument("--draws", type=positive, default=8, help="random sets of each (default: 8)")
            continue
        if name == "skip":
            p.add_argument("--below", type=float, nargs="+", default=[0.5, 0.9], help="(default: 0.5 0.9)")
            p.add_argument("--batch", type=positive, default=16, help="windows at once (default: 16)")
            p.add_argument("--rounds", type=positive, default=9, help="of timing (default: 9)")
            p.add_argument("--tokens", type=int, default=262_144, help="to score; 0: all (default: 262144)")
            continue
        p.add_argument("--plain", action="append", default=[], help="a plain GPT; may be repeated, as --ckpt")
        p.add_argument("--labels", required=True, help="a set in <dataset>/labels, or its folder")
        p.add_argument("--fit", type=positive, default=200_000, help="tokens to fit probes to, and as many "
                       "to choose their weight decay on (default: 200000)")
        p.add_argument("--own", action="store_true", help="probes on the constraint models' states as well")
        if name == "score":
            p.add_argument("--tokens", type=int, default=262_144, help="of each split, in evenly spaced "
                           "windows; 0: all (default: 262144)")
            p.add_argument("--picture", help="write a reliability picture, .png, to this file")
        else:
            p.add_argument("--task", default="auto",
                           help=f"{', '.join(TASKS)}, a name, or auto: all that is labelled (default)")
            p.add_argument("--passage", type=positive, default=512, help="tokens of one (default: 512)")
            p.add_argument("--passages", type=positive, default=4096, help="of a split (default: 4096)")
    return parser.parse_args(argv)


def main(argv=None):
    args = arguments(argv)
    with last_words("constraints"):
        if not all(0 < below <= 1 for below in vars(args).get("below", ())):
            raise ValueError(f"--below={' '.join(map(str, args.below))} must be above 0 and at most 1")
        for key in ("seed", "tokens"):
            if vars(args).get(key, 0) < 0:
                raise ValueError(f"--{key}={vars(args)[key]} must not be negative")
        args.device = pick_device(args.device)
        out = writable(args.json) if args.json else None
        if getattr(args, "picture", None):
            args.picture = writable(args.picture, "--picture")
        numbers, lines = COMMANDS[args.what](args)
        if out:
            write_json(out, numbers)
        print(*lines, *([args.json] if out else []), sep="\n")


if __name__ == "__main__":
    main()
