"""
Do the heads' scores tell passages of held-out documents apart? Against the mean hidden state of the plain GPT
and against its probes' scores.

A passage is --passage tokens of one document; at most --passages of a split are taken, evenly spaced.
Documents are WikiText articles; in a text without titles, 16 passages in a row. No document is in two splits.
A passage is positive where the mean of its labels is above the upper tercile of the training passages,
negative where it is at most the lower one, and left out between.

--task   cited is testifiability, hedged decidability (positive: definite), dialogue reciprocity; any other is
         the name of a label, and auto takes all

A logistic regression reads the mean, the maximum and five quantiles of every name's scores in the passage:
the heads', or those of the plain GPT's probes. Another one reads the mean hidden state. Accuracy and F1 are
at the threshold that is best on val. Intervals are 95 %: for one checkpoint of 1,000 draws of test documents,
for several by t over checkpoints.
"""

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler

from nanoheads.common import UserError, plural
from nanoheads.dataset import TITLE, beginnings
from nanoheads.timing import progress_bar
from lab.probes.constraints.metrics import best_threshold, brackets, compare, comparison_table, over_documents
from lab.probes.constraints.setup import (COMPARED, about_setup, labels_of, layers_of, numbers_of_setup,
                                          open_setup, outputs, two_classes)
from lab.probes.constraints.token_probes import takers_of
from lab.probes.intervals import draws_interval
from lab.probes.shared import ask, positive

STATE = "mean hidden state"
STRENGTHS = (1e-3, 1e-2, 0.1, 1.0, 10.0)  # C of a passage's logistic regression
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)   # of a passage's scores, beside their mean and largest
TASKS = dict(cited="testifiability", hedged="decidability", dialogue="reciprocity")
METRICS = dict(accuracy="accuracy", f1="F1", auroc="AUROC")
DOCUMENT = 16  # passages: a document of text without titles


def documents(data, part):
    """[(first, last)] of the articles of a part: from a WikiText title to the next; [] where it has none.

    What stands before the first title is left out: it may belong to an article of another part.
    """
    tokens = np.asarray(data.tokens(part.split)[part.first:part.last])
    titles = beginnings(data.tokenizer, tokens, TITLE).tolist()
    cuts = [part.first + title for title in titles if title or not part.first]  # a line that was cut is none
    cuts.append(part.last)
    return list(zip(cuts, cuts[1:]))


def passages(data, parts, length, count):
    """[(starts [n], document of each [n])] of the parts: whole passages, evenly spaced, at most `count` each.

    A text without titles in each part has documents of DOCUMENT passages one after the other, the first of
    each part left out. UserError where there is no passage.
    """
    result, part_documents = [], [documents(data, part) for part in parts]
    if min(map(len, part_documents)) < 2:
        size = DOCUMENT * length
        part_documents = [[(first, min(first + size, part.last))
                           for first in range(part.first + size, part.last, size)] for part in parts]
    for part, part_docs in zip(parts, part_documents):
        places = np.array([(start, number) for number, (first, last) in enumerate(part_docs)
                           for start in range(first, last - length + 1, length)]).reshape(-1, 2)
        if not len(places):
            raise UserError(f"{part.split} has no passage of {length:,} tokens within a document")
        n = min(count, len(places))
        result.append(tuple(places[np.arange(n) * len(places) // n].T))
    return result


def aggregate(scores):
    """[passages, names * (2 + QUANTILES)] of token scores [passages, length, names]."""
    return np.concatenate((scores.mean(1), scores.max(1), *np.quantile(scores, QUANTILES, 1)), 1)


def passage_features(ckpt, setup, args, cuts, length):
    """{features: [float64 [passages, F] of each part]} of a checkpoint."""
    takers, _ = takers_of(ckpt, setup, args)
    if not layers_of(ckpt.model) or args.own:
        takers[f"{STATE}, {'own' if layers_of(ckpt.model) else 'plain'}"] = lambda states, _: states.mean(1)
    T, features = min(length, setup.context), {}
    for part, (starts, _) in zip(setup.parts, cuts):
        windows = (starts[:, None] + np.arange(0, length, T)).ravel()
        for name, output in outputs(ckpt, setup, part.split, windows, T, takers).items():
            output = output.cpu().double().numpy().reshape(len(starts), -1, output.size(-1))
            passages_of_part = output.mean(1) if name.startswith(STATE) else aggregate(output)
            features.setdefault(name, []).append(passages_of_part)
    return features


def classify(x, y):
    """(p of what is measured on [n], threshold) by logistic regression; x, y: of the three parts."""
    scaler = StandardScaler().fit(x[0])
    x = [scaler.transform(part) for part in x]
    models = [LogisticRegression(C=strength, max_iter=2000).fit(x[0], y[0]) for strength in STRENGTHS]
    best = min(models, key=lambda model: log_loss(y[1], model.predict_proba(x[1])[:, 1]))
    p_chosen, p_measured = (best.predict_proba(part)[:, 1] for part in x[1:])
    return p_measured, best_threshold(y[1], p_chosen)


def row_of(setup, task, name, models, cuts, classes_of_task, seed):
    """What is written of a task: figures of each scorer on the passages of its classes, see classes()."""
    in_class, y, terciles = classes_of_task
    document, figures_of = cuts[2][1][in_class[2]], []
    bar = progress_bar(sum(map(len, models)), task)
    for features in models:
        figures_of.append({})
        for scorer, x in features.items():
            p, threshold = classify([part_features[c] for part_features, c in zip(x, in_class)], y)
            figures_of[-1][scorer] = over_documents(y[2], p, threshold, document, seed)
            bar.update(1)
    bar.close()
    is_paired = len(setup.plain) == len(setup.ckpts)
    intervals, differences = compare(figures_of, METRICS, draws_interval, is_paired)
    return dict(task=task, name=name, terciles=terciles, passages=[len(part_classes) for part_classes in y],
                positive=[float(part_classes.mean()) for part_classes in y],
                documents=len(np.unique(document)), figures=intervals, heads_less=differences)


def probe(args):
    """Passages of held-out documents, classified by what their labels are on the whole."""
    setup = open_setup(args)
    tasks, T = tasks_of(args.task, setup), min(args.passage, setup.context)
    length = args.passage // T * T  # whole windows
    cuts = passages(setup.data, setup.parts, length, args.passages)
    labels = [labels_of(setup, part.split, starts, length).reshape(len(starts), length, -1).double().numpy()
              for part, (starts, _) in zip(setup.parts, cuts)]
    sorts = [classes([part_labels[..., setup.names.index(name)] for part_labels in labels], name, setup.parts)
             for name in tasks.values()]
    plain = [passage_features(ckpt, setup, args, cuts, length) for ckpt in setup.plain] or [{}]
    models = [{**passage_features(ckpt, setup, args, cuts, length), **plain[i % len(plain)]}
              for i, ckpt in enumerate(setup.ckpts)]
    sizes = {name: x[0].shape[1] for name, x in models[0].items()}
    rows = [row_of(setup, task, name, models, cuts, classes_of_task, args.seed)
            for (task, name), classes_of_task in zip(tasks.items(), sorts)]
    counts, splits = ", ".join(str(len(s)) for s, _ in cuts), ", ".join(part.split for part in setup.parts)
    lines = [about_setup(setup, args), f"passages of {length:,} tokens: {counts} of {splits}; "
                                       "classes are made of the labels themselves"]
    lines += [f"{row['task']}: mean {row['name']} above {row['terciles'][1]:.4f} against at most "
              f"{row['terciles'][0]:.4f}; {plural(row['passages'][2], 'passage')} of "
              f"{plural(row['documents'], 'document')}, {row['positive'][2]:.3f} positive" for row in rows]
    table_rows = [(row["task"], row["figures"], row["heads_less"]) for row in rows]
    lines.append(comparison_table(table_rows, METRICS, sizes, "features", brackets))
    return numbers_of_setup(setup, args, dict(features=sizes, tasks=rows)), lines


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
    for part_labels in labels:
        is_known = part_labels >= 0
        with np.errstate(invalid="ignore"):
            means.append((part_labels * is_known).sum(1) / is_known.sum(1))
    if np.isnan(means[0]).all():
        raise UserError(f"{name}: no passage of train has a label")
    low, high = np.nanquantile(means[0], (1 / 3, 2 / 3))
    lower_means = means[0][means[0] < high]
    if high == np.nanmax(means[0]) and lower_means.size:  # nothing is above it: it is the upper class itself
        high = lower_means.max()
        low = min(low, high)
    in_class = [np.flatnonzero((mean <= low) | (mean > high)) for mean in means]
    y = [two_classes(mean[c] > high, f"passages by {name}", part)
         for mean, c, part in zip(means, in_class, parts)]
    return in_class, y, [float(low), float(high)]


def main(argv):
    ask("constraints adjudicate", probe, "test", argv, **COMPARED,
        task=(str, "auto", f"{', '.join(TASKS)}, a name, or auto: all that is labelled"),
        passage=(positive, 512, "tokens of one"),
        passages=(positive, 4096, "of a split"))
