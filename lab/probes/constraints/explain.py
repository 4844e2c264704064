"""
Do the tokens with the highest scores explain a passage's score?

A passage is a window of --context tokens, wherever documents begin. For each name --k of its tokens are
hidden from all later ones: those with the highest scores, those with the lowest, neighbours of the highest,
and random ones, --draws times. A token that is hidden still sees itself, and positions stay. The running mean
that the router reads still holds it.

final, mean       change of the name's score, in logits: at the last token; mean over tokens that no set hides
|final|, |mean|   the same without sign, for each passage
highest less ..   the difference to another set, in the same passages. Where its interval leaves out 0, for
                  random ones and for neighbours, the highest explain the score

Intervals are 95 %, by t over blocks of neighbouring passages.
"""

from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from nanoheads.common import UserError, plural, table
from nanoheads.timing import progress_bar
from lab.probes.constraints.setup import names_of, numbers_of_setup, open_setup, read_scores, windows_of_split
from lab.probes.intervals import over_windows
from lab.probes.shared import CONTEXT, about_text, ask, finite, plus_minus, positive

SETS = ("highest", "lowest", "neighbours", "random")


@contextmanager
def without_keys(model, removed):
    """Within it, no later query of row b of a batch sees the keys removed[b] (bool [B, T], True: gone).

    Only the mask is replaced, and with it the count of keys that ACAG and the statistics of the rows go by.
    """
    masks = {name: getattr(model, name) for name in ("mask", "whole_mask")}
    try:
        for name, mask in masks.items():
            setattr(model, name, mask and MaskWithout(mask, removed))
        yield
    finally:
        for name, mask in masks.items():
            setattr(model, name, mask)


class MaskWithout(nn.Module):
    """A model's mask of which row b of a batch does not show the keys removed[b] to later queries."""

    def __init__(self, mask, removed):
        super().__init__()
        self.mask, self.removed, self.mask_mod = mask, removed, mask.mask_mod

    def make(self, past, T, pad, device, cached, counted, maps, begins=None):
        itself = torch.eye(T, dtype=torch.bool, device=device)
        self.visible = self.mask.dense(past, T, pad, device) & ~self.removed[:, None, None] | itself
        return self.visible

    def n_keys(self, positions):  # of rows without padding alone
        return self.visible.sum(-1)


@torch.no_grad()
def without_each(model, ids, removed, take):
    """take(the same ids in several rows), [rows, ...], of ids [T] without each set of keys: [sets, ...].

    removed [sets, T], bool: True at the keys of a set.
    """
    results, rows = [], max(1, (1 << 24) // len(ids) ** 2)  # the masks are sets x T x T
    for sets in torch.from_numpy(removed).split(rows):
        with without_keys(model, sets.to(ids.device)):
            results.append(take(ids.expand(len(sets), -1)))
    return np.concatenate(results)


def removal_sets(scores, k, draws, rng):
    """bool [3 + draws, T]: the k tokens of highest score, of lowest, neighbours of the highest, random ones.

    scores [T]. The last token, whose score is asked for, is no candidate. A neighbour is the nearest token
    that is neither among the highest nor taken, the earlier of two.
    """
    order = np.argsort(scores[:-1], kind="stable")
    top, free = order[-k:], set(order[:-k].tolist())
    neighbours = []
    for token in top:
        neighbours.append(min(free, key=lambda i: (abs(i - token), i)))
        free.remove(neighbours[-1])
    token_sets = [top, order[:k], neighbours, *(rng.permutation(len(order))[:k] for _ in range(draws))]
    removed = np.zeros((len(token_sets), len(scores)), bool)
    for row, tokens in zip(removed, token_sets):
        row[tokens] = True
    return removed


def scores_without(model, ids, removed):
    """Scores [sets, T, names], float64, of ids [T] with the keys of each set hidden, removed [sets, T]."""
    return without_each(model, ids, removed,
                        lambda rows: read_scores(model, rows, [])[1].cpu().double().numpy())


def window_changes(model, ids, k, draws, rng):
    """{(name, set): [4]}: by how much the last token's score moves, and the mean of those never hidden.

    Then the size of both; of random sets, means over the draws.
    """
    none = np.zeros((1, len(ids)), bool)
    scores_before, changes = scores_without(model, ids, none)[0], {}
    sets = [removal_sets(scores_before[:, n], k, draws, rng) for n in range(scores_before.shape[1])]
    scores_after = scores_without(model, ids, np.concatenate(sets))
    for n, (name, removed) in enumerate(zip(names_of(model), sets)):
        change = scores_after[n * len(removed):(n + 1) * len(removed), :, n] - scores_before[:, n]
        both_changes = np.stack((change[:, -1], change[:, ~removed.any(0)].mean(1)), 1)
        for s, set_changes in zip(SETS, (*both_changes[:3, None], both_changes[3:])):
            changes[name, s] = np.concatenate((set_changes, np.abs(set_changes)), 1).mean(0)
    return changes


def probe(args):
    """Whether the tokens of highest score explain the score of their passage."""
    setup = open_setup(args)
    if 2 * args.k >= setup.context:
        raise UserError(f"--k {args.k}: highest and lowest do not fit a passage of {setup.context:,} tokens")
    windows = windows_of_split(setup, args, args.windows)
    n = np.arange(len(windows))
    columns = ("final", "mean", "|final|", "|mean|")
    rows, cells = [], []
    for ckpt in setup.ckpts:
        changes = []
        for w, ids in enumerate(progress_bar(windows, ckpt.name)):
            rng = np.random.default_rng([args.seed, w])
            changes.append(window_changes(ckpt.model, ids, args.k, args.draws, rng))
        by = {key: np.stack([window[key] for window in changes]) for key in changes[0]}  # [windows, 4]
        finite(np.concatenate(list(by.values())), ckpt, "as a score")
        for name in setup.names:
            values_of_sets = {s: by[name, s] for s in SETS}
            values_of_sets |= {f"highest less {s}": by[name, "highest"] - by[name, s] for s in SETS[1:]}
            for s, values in values_of_sets.items():
                row = {c: over_windows(values[:, i], n, len(n)) for i, c in enumerate(columns)}
                rows.append(dict(run=ckpt.name, name=name, removed=s, **row))
                cells.append((ckpt.name, name, s, *(plus_minus(row[c]) for c in columns)))
    line = (f"{about_text(setup.data, args)}: {plural(len(windows), 'passage')} of {setup.context:,} tokens, "
            f"{args.k} hidden; change of the score in logits; random: mean of {args.draws} draws")
    head = ("run", "name", "hidden", *columns)
    return numbers_of_setup(setup, args, dict(rows=rows)), [line, table(head, cells, left=3)]


def main(argv):
    ask("constraints explain", probe, "test", argv,
        context=CONTEXT,
        k=(positive, 5, "tokens to hide"),
        windows=(positive, 128, "passages"),
        draws=(positive, 8, "random sets of each"))
