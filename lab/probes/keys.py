"""
Do the tokens matter that a ranking calls important? Each ranking's first keys are removed by a mask.

No later query of any head sees a key that is removed, a token still sees itself, positions stay. Ranked are
the advantages that an A2C model predicts for a token (mean over heads and blocks; they do not depend on the
query), the attention weight from the query (mean over heads and blocks), gradient x input at the first block,
nearness, and chance. Keys nearer than --nearest, the query's own token included, are no candidates; a larger
value asks about far keys, where nearness is no longer all. The running mean that a constraint router reads
still holds what is removed.
"""

from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from scipy.stats import spearmanr
from torch.nn import functional as F

from nanoheads.common import plural
from nanoheads.intervals import t_interval
from nanoheads.scoring import nats_of, windows_of
from nanoheads.timing import progress_bar
from lab.probes.shared import (CONTEXT, about_text, ask, finite, numbers_of, open_checkpoints, plus_minus,
                               positive, run_table, window_text)


@contextmanager
def without_keys(model, removed):
    """Within it, no later query of row b of a batch sees the keys removed[b] (bool [B, T], True: gone).

    A token sees itself. Only the mask is replaced, and with it the count of keys that ACAG and the statistics
    of the rows go by.
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
        self.seen = self.mask.dense(past, T, pad, device) & ~self.removed[:, None, None] | itself
        return self.seen

    def n_keys(self, positions):  # of rows without padding alone
        return self.seen.sum(-1)


@torch.no_grad()
def without_each(model, ids, removed, take):
    """take(the same ids in several rows), [rows, ...], of ids [T] without each set of keys: [sets, ...].

    removed [sets, T], bool: True at the keys of a set.
    """
    found, rows = [], max(1, (1 << 24) // len(ids) ** 2)  # the masks are sets x T x T
    for sets in torch.from_numpy(removed).split(rows):
        with without_keys(model, sets.to(ids.device)):
            found.append(take(ids.expand(len(sets), -1)))
    return np.concatenate(found)


def nats_without(model, ids, target, removed):
    """Nats of the token `target` after ids [T] without each set of keys, see without_each(): [sets] float64.
    """
    def nats(rows):
        logits = model.head(model.hidden(rows)[:, -1:])
        return nats_of(logits, target.expand(len(rows), 1))[:, 0]
    return without_each(model, ids, removed, nats)


def rankings(model, ids, targets, queries):
    """{name: score of every key, [queries, T]}, high where a key should matter after the query."""
    with torch.no_grad():
        traces = model(ids[None], traces="maps").traces  # T x T for every head of every block

    def of_blocks(name):
        keys = [f"blocks.{i}.{name}" for i in range(model.config.n_layer)]
        return [traces[key][0] for key in keys if key in traces]

    scores, shape = {}, (len(queries), len(ids))
    advantages, maps = of_blocks("advantage"), of_blocks("map")
    if advantages:
        scores["advantage"] = torch.cat(advantages, -1).mean(-1).expand(shape)
    if model.config.a2c == "key_bias":  # what is really added to the logits: the mix may turn the sign
        mix = torch.cat([block.attn.a2c.mix for block in model.transformer.h]).detach()
        scores["key bias"] = (torch.cat(advantages, -1) * mix).mean(-1).expand(shape)
    scores["attention"] = sum(m[:, queries].sum(0) for m in maps) / sum(len(m) for m in maps)
    scores["gradient"] = gradient_times_input(model, ids, targets, queries)
    scores["recency"] = torch.arange(len(ids)).expand(shape)
    return {name: each.cpu().double().numpy() for name, each in scores.items()}


def gradient_times_input(model, ids, targets, queries):
    """-x_s . d nats_t / d x_s, [queries, T]: the rise in loss, to first order, were x_s zero.

    x is the first block's input, behind the norm of the embedding, which makes its scale irrelevant: before
    it the product is always 0.
    """
    inputs = []

    def keep(module, args, x):
        inputs.append(x.detach().requires_grad_())
        return inputs[0]

    hook = model.transformer.drop.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            logits = model(ids[None]).logits[0, queries]
            nats = F.cross_entropy(logits, targets[queries], reduction="none")
            grads = [torch.autograd.grad(n, inputs[0], retain_graph=True)[0] for n in nats]
    finally:
        hook.remove()
    return -(torch.cat(grads) * inputs[0].detach()).sum(-1)


def gone(T, keys):
    """bool [T], True at the keys."""
    return np.isin(np.arange(T), keys)


def window_effects(model, ids, targets, args, rng):
    """What removing keys does in a window of T tokens.

    Returns the mean nats at the queries with all keys, {(ranking, m): mean rise}, and {ranking: Spearman}
    between a ranking's scores and the rises from removing single keys, at the first query.
    """
    T, base, rise, correlation = len(ids), [], {}, {}
    late_keys = np.arange(3 * T // 4, T)
    queries = np.sort(rng.choice(late_keys, min(args.queries, len(late_keys)), replace=False))
    scores = rankings(model, ids, targets, queries)
    for i, t in enumerate(queries):
        n = t + 1 - args.nearest  # candidates: keys 0 .. n - 1
        order = {name: np.argsort(-s[i, :n], kind="stable") for name, s in scores.items()}
        sets = {(name, m): [order[name][:m]] for name in order for m in args.remove}
        for m in args.remove:
            sets["random", m] = [rng.choice(n, m, replace=False) for _ in range(args.draws)]
        singles = rng.choice(n, min(args.singles, n), replace=False) if i == 0 else []
        removed = [[], *(keys for group in sets.values() for keys in group), *([key] for key in singles)]
        removed = np.stack([gone(t + 1, keys) for keys in removed])
        nats = nats_without(model, ids[:t + 1], targets[t], removed)

        # in the order in which they were removed: nothing, the sets, single keys
        base.append(nats[0])
        at = 1
        for key, group in sets.items():
            rise.setdefault(key, []).append((nats[at:at + len(group)] - nats[0]).mean())
            at += len(group)
        for name, s in scores.items() if len(singles) > 2 else ():
            if np.ptp(nats[at:]) and np.ptp(s[i, singles]):  # a constant has no ranks
                correlation[name] = spearmanr(s[i, singles], nats[at:]).statistic
    return np.mean(base), {key: np.mean(values) for key, values in rise.items()}, correlation


def ranking_rows(effects, args):
    """A dict for each ranking, from window_effects() of every window."""
    _, rises, correlations = zip(*effects)
    rise = {key: np.array([r[key] for r in rises]) for key in rises[0]}
    rows = []
    for name in dict.fromkeys(name for name, _ in rise):
        removed = []
        for m in args.remove:
            over = None if name == "random" else t_interval(rise[name, m] - rise["random", m])
            removed.append(dict(keys=m, rise=t_interval(rise[name, m]), over_random=over))
        spearman = [each[name] for each in correlations if name in each]
        rows.append(dict(ranking=name, removed=removed, spearman=t_interval(spearman) if spearman else None,
                         windows=len(effects)))
    return rows


def columns(args):
    """Of the table with a line for each ranking, see run_table()."""
    found = [("ranking", lambda r: r["ranking"])]
    for i, m in enumerate(args.remove):
        found += [(f"rise, {m} gone", lambda r, i=i: plus_minus(r["removed"][i]["rise"])),
                  ("over random", lambda r, i=i: plus_minus(r["removed"][i]["over_random"]))]
    return [*found, ("Spearman, one gone", lambda r: plus_minus(r["spearman"], 2))]


def probe(args):
    """What it costs the next token to lose the keys that a ranking puts first."""
    ckpts, data, context = open_checkpoints(args, args.context)
    fewest = 3 * context // 4 + 1 - args.nearest
    if fewest < max(args.remove):
        raise ValueError(f"a context of {context:,} with --nearest={args.nearest} leaves "
                         f"{max(0, fewest)} keys to remove {max(args.remove)} of")
    cuts = windows_of(data, args.split, context, 0, args.windows * context)
    cuts = [cut for cut in cuts if cut[2] == context]
    rows = []
    with progress_bar(len(ckpts) * len(cuts), "keys") as progress:
        for ckpt in ckpts:
            effects, device = [], next(ckpt.model.parameters()).device
            for w, (start, end, _) in enumerate(cuts):
                rng = np.random.default_rng([args.seed, w])  # the same for all checkpoints
                ids, targets = window_text(data, args.split, start, end, device)
                effects.append(window_effects(ckpt.model, ids, targets, args, rng))
                progress.update(1)
            nats = finite(np.array([base for base, _, _ in effects]), ckpt)
            rows.append(dict(nats=float(np.mean(nats)), rankings=ranking_rows(effects, args)))
    what = [f"{about_text(data, args)}: {plural(len(cuts), 'window')} of {context:,}, "
            f"{args.queries} queries in the last quarter of each",
            f"rise of the next token's nats; candidates: keys from {args.nearest} tokens back; "
            f"random: mean of {args.draws} draws",
            *(f"{ckpt.name}: {row['nats']:.4f} nats with all keys" for ckpt, row in zip(ckpts, rows))]
    rankings = run_table(ckpts, [row["rankings"] for row in rows], columns(args))
    return numbers_of(ckpts, data, args, rows), [*what, rankings]


def main(argv):
    ask("keys", probe, "test", argv,
        context=CONTEXT,
        windows=(positive, 32, "windows, evenly spaced"),
        queries=(positive, 4, "queries in each"),
        remove=(positive, [4, 8], "how many keys to remove"),
        draws=(positive, 8, "random sets of each size"),
        nearest=(positive, 2, "the nearest key that may go, in tokens back"),
        singles=(int, 32, "keys to remove one by one, at the first query of a window"))
