"""
Do the tokens with the highest scores explain a passage's score? They are hidden from all later tokens, as in
probe.py keys, against those with the lowest, random ones, and their neighbours.
"""

import numpy as np
import torch

from nanoheads.common import UserError, plural, table
from nanoheads.intervals import over_windows
from nanoheads.timing import progress_bar
from lab.probes.constraints.setup import Part, names_of, numbers_of_setup, open_setup, read, starts_of
from lab.probes.keys import without_keys
from lab.probes.shared import plus_minus

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
            found.append(read(model, ids.expand(len(sets), -1), [])[1].cpu().double())
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


def probe(args):
    """Whether the tokens of highest score explain the score of their passage."""
    setup = open_setup(args)
    if 2 * args.k >= setup.context:
        raise UserError(f"--k {args.k}: highest and lowest do not fit a passage of {setup.context:,} tokens")
    part = Part(args.split, 0, len(setup.data.tokens(args.split)))
    starts = starts_of(part, setup.context, args.windows * setup.context)
    tokens, n = setup.data.tokens(args.split), np.arange(len(starts))
    columns = ("final", "mean", "|final|", "|mean|")
    rows, cells = [], []
    for ckpt in setup.ckpts:
        device, found = next(ckpt.model.parameters()).device, []
        for w, start in enumerate(progress_bar(starts, ckpt.name)):
            ids = torch.from_numpy(tokens[start:start + setup.context].astype(np.int64)).to(device)
            rng = np.random.default_rng([args.seed, w])
            found.append(window_changes(ckpt.model, ids, args.k, args.draws, rng))
        by = {key: np.stack([each[key] for each in found]) for key in found[0]}  # [windows, 4]
        if not np.isfinite(np.concatenate(list(by.values()))).all():
            raise UserError(f"{ckpt.name} gives scores that are not finite: its weights are damaged")
        for name in setup.names:
            what = {s: by[name, s] for s in SETS}
            what |= {f"highest less {s}": by[name, "highest"] - by[name, s] for s in SETS[1:]}
            for s, values in what.items():
                row = {c: over_windows(values[:, i], n, len(n)) for i, c in enumerate(columns)}
                rows.append(dict(run=ckpt.name, name=name, removed=s, **row))
                cells.append((ckpt.name, name, s, *(plus_minus(row[c]) for c in columns)))
    line = (f"{setup.data.meta['name']}, {args.split}: {plural(len(starts), 'passage')} of "
            f"{setup.context:,} tokens, {args.k} hidden; change of the score in logits; "
            f"random: mean of {args.draws} draws")
    head = ("run", "name", "hidden", *columns)
    return numbers_of_setup(setup, args, dict(rows=rows)), [line, table(head, cells, left=3)]
