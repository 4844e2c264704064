"""
Ask trained checkpoints what one loss does not say. Everything is paired: all checkpoints read the same windows.

    python probe.py needle --ckpt out/a [--ckpt out/b ...] [--contexts 1024 4096] [--depths 0.1 0.5 0.9] [--json FILE]
    python probe.py late   --ckpt out/a [--ckpt out/b ...] [--context 1024]
    python probe.py keys   --ckpt out/a [--remove 4 8] [--nearest 2]
    python probe.py heads  --ckpt out/a

needle  Does a fact far back help? A fact "[QZX4831]" (data/needle) is planted into real text at a depth (0: the beginning,
        1: just before the question), the text ends in "[QZX", and the four digits are scored, teacher forced. The control is
        the same text without the fact: recall gain = bits of the answer in the control minus bits with the fact (13.3 is
        all there is). Train on data/needle first: other text does not teach what the question means.
late    Does a longer context help? Loss by position within disjoint windows.
keys    Do the tokens matter that a ranking calls important? The first m of each ranking are removed by a mask: no later
        query of any head sees such a key, a token still sees itself, positions stay. Ranked are the advantages that an A2C
        model predicts for a token (mean over heads and blocks; they do not depend on the query), the attention weight from the
        query (mean over heads and blocks), gradient x input at the first block, nearness, and chance. Keys nearer than
        --nearest, the query's own token included, are no candidates; a larger value asks about far keys, where nearness is
        no longer all. The running mean that a constraint router reads still holds what is removed.
heads   Which heads can go? Entropy of a head's rows and gradient of its gate, beside the loss with its gate at 0.

Intervals are 95 %, by t over samples (needle), windows (keys) or blocks of neighbouring windows (late, heads). Contexts
beyond the training length take rotary positions; ACAG's length and a window stay those of the training.
"""

import argparse
import json
import math
import sys
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata, spearmanr
from torch.nn import functional as F
from tqdm import tqdm

import checkpoint
from common import UserError, pick_device, write_atomic
from data.needle.prepare import DIGITS, digits_of, fact, names, question
from evaluate import aligned, nats_of, opened, score, windows_of, writable
from model import GPT
from study.stats import paired

BLOCKS = 32  # of neighbouring windows, at most: what intervals over text rest on


class Run(NamedTuple):
    """A checkpoint, opened: what it is called, the model, and the context that it was trained on."""
    name: str
    model: GPT
    trained: int


# ---- checkpoints and windows ----

def open_runs(a, context=None):
    """([Run], Dataset, context), all checkpoints at one context (None: the shortest training). UserError."""
    found = [(path, *opened(path, a.split, 0, a.device, a.dataset, a.settings)) for path in a.ckpt]
    data = found[0][3]
    for path, *_, other in found:
        if other.splits[a.split] != data.splits[a.split]:
            raise UserError(f"{path} and {a.ckpt[0]} were trained on different data; name one for both with --dataset")
    context = context or min(model.config.block_size for _, _, model, _ in found)
    if context > (n := len(data.tokens(a.split))):
        raise UserError(f"a context of {context:,} is longer than the {a.split} split of {data.dir}, {n:,} tokens")
    return [Run(path.removesuffix("/best.pt"), at_context(model, context, state, path, a), checkpoint.config_of(state, path).block_size)
            for path, state, model, _ in found], data, context


def at_context(model, context, state, path, a):
    """The model with block_size=context; the checkpoint holds ACAG's length and the window, which stay. UserError."""
    longest = model.config.block_size
    if context <= longest:
        model.crop_block_size(context)
        return model
    if model.config.pos == "learned":
        raise UserError(f"{path} has learned positions, which end at {longest:,}: it cannot read a context of {context:,}")
    return checkpoint.build(state, path, a.device, [*a.settings, f"block_size={context}"])


def text_of(data, split, start, end, device):
    """Inputs and targets, [end - start] each, of a window: the separator comes before the first token of the split."""
    tokens = data.tokens(split)
    ids = tokens[start - 1:end] if start else np.concatenate(([data.separator], tokens[:end]))
    ids = torch.from_numpy(ids.astype(np.int64)).to(device)
    return ids[:-1], ids[1:]


def finite(nats, run):
    if not np.isfinite(nats).all():
        raise UserError(f"{run.name} gives {nats[~np.isfinite(nats)][0]} nats: its weights are damaged, or its training diverged")
    return nats


def progress_bar(total, words):
    return tqdm(total=total, desc=words, leave=False, mininterval=0.5, disable=not sys.stderr.isatty())


def interval(differences):
    """[mean, low, high] of the mean of differences [n], by t."""
    p = paired(differences)
    return [p.mean, p.low, p.high]


def around(values, window, n_windows):
    """[mean, low, high] of values [n]: their plain mean, and the interval of the means of blocks of neighbouring windows.

    window [n]: which window each value is of.
    """
    block = window * min(BLOCKS, n_windows) // n_windows
    size = np.bincount(block)
    middle, low, high = interval(np.bincount(block, values)[size > 0] / size[size > 0])  # a short last window has no late positions
    mean = float(values.mean())
    return [mean, mean - (middle - low), mean + (high - middle)]


# ---- needle ----

def haystacks(text, split, context, depths, samples, seed):
    """Token ids [samples, 1 + depths, context]: the control without the fact, then the fact at each depth. The answer is last.

    Within a sample all is the same but the fact, for which the text before it begins a little later.
    """
    rng, pool, ids = np.random.default_rng([seed, context]), names(split), []
    length = context - len(question(pool[0])) - DIGITS
    for _ in range(samples):
        end = int(rng.integers(length, len(text) + 1))
        end = text.find(b" ", end) + 1 or end  # facts and questions come after spaces, as in training
        piece = text[end - length:end]
        name = next(pool[i] for i in rng.permutation(len(pool)) if b"[" + pool[i] not in piece)
        answer, rows = digits_of(rng.integers(10 ** DIGITS)), [piece]
        rest = piece[len(fact(name, answer)):]
        for depth in depths:
            at = int(depth * len(rest))
            at = rest.find(b" ", at, at + 64) + 1 or at
            rows.append(rest[:at] + fact(name, answer) + rest[at:])
        ids.append([np.frombuffer(row + question(name) + answer, np.uint8) for row in rows])
    return np.array(ids).astype(np.int64)


@torch.no_grad()
def answers(model, ids, progress=None, batch_tokens=16384):
    """Of the last DIGITS tokens of ids [n, context], given all before: nats, and whether each is the likeliest, [n, DIGITS]."""
    device, rows, nats, right = next(model.parameters()).device, max(1, batch_tokens // ids.shape[1]), [], []
    for at in range(0, len(ids), rows):
        x = torch.from_numpy(ids[at:at + rows]).to(device)
        logits = model.head(model.hidden(x[:, :-1])[:, -DIGITS:])
        nats.append(nats_of(logits, x[:, -DIGITS:]))
        right.append((logits.argmax(-1) == x[:, -DIGITS:]).cpu().numpy())
        if progress is not None:
            progress.update(len(x))
    return np.concatenate(nats), np.concatenate(right)


def recalled(nats, right):
    """What nats and hits [samples, 1 + depths, DIGITS] say: gain in bits [samples, depths], and one dict per depth."""
    bits = nats.sum(-1) / math.log(2)
    gain = bits[:, :1] - bits[:, 1:]
    return gain, [dict(nats_per_byte=float(nats[:, 1 + i].mean()), exact=float(right[:, 1 + i].all(-1).mean()),
                       control_nats_per_byte=float(nats[:, 0].mean()), gain_bits=interval(gain[:, i])) for i in range(gain.shape[1])]


def needle(a):
    """Recall of a planted fact by context and depth."""
    if min(a.contexts) < 64:
        raise ValueError(f"--contexts: {min(a.contexts)} is too short for a fact and its question; take at least 64")
    if not all(0 <= depth <= 1 for depth in a.depths):
        raise ValueError(f"--depths: {' '.join(f'{d:g}' for d in a.depths)} must be from 0 (the beginning) to 1 (before the question)")
    runs, data, _ = open_runs(a, max(a.contexts))
    if data.meta["encoding"] != "byte":
        raise UserError(f"{data.dir} is {data.meta['encoding']}, not byte: the facts are bytes")
    text, rows = data.tokens(a.split).tobytes(), [[] for _ in runs]
    with progress_bar(len(runs) * len(a.contexts) * a.samples * (1 + len(a.depths)), "needle") as progress:
        for context in a.contexts:
            ids, first = haystacks(text, a.split, context, a.depths, a.samples, a.seed), None
            for run, found in zip(runs, rows):
                scored = answers(run.model, ids.reshape(-1, context), progress)
                nats, right = (part.reshape(*ids.shape[:2], DIGITS) for part in scored)
                gain, about = recalled(finite(nats, run), right)
                first = gain if first is None else first
                over = [interval((gain - first)[:, i]) if run is not runs[0] else None for i in range(len(a.depths))]
                found += [dict(context=context, depth=depth, samples=a.samples, **row, over_first=o, beyond_training=context > run.trained)
                          for depth, row, o in zip(a.depths, about, over)]
    several = len(runs) > 1
    head = ("run", "context", "depth", "nats/byte", "exact", "control", "recall gain, bits", *["over the first"] * several, "")
    cells = [(run.name, f"{r['context']:,}", f"{r['depth']:g}", f"{r['nats_per_byte']:.3f}", f"{r['exact']:.0%}",
              f"{r['control_nats_per_byte']:.3f}", spell(r["gain_bits"], 2), *[spell(r["over_first"], 2)] * several, beyond(r))
             for run, found in zip(runs, rows) for r in found]
    what = f"{about_text(data, a)}: {a.samples} texts a context, the same for all; answers of {DIGITS} digits, teacher forced"
    return results(runs, data, a, rows), [what, *lines(head, cells)]


# ---- late ----

def late(a):
    """Loss by position in the window."""
    runs, data, context = open_runs(a, a.context)
    cuts = windows_of(data, a.split, context, 0, a.tokens)
    window = np.repeat(np.arange(len(cuts)), [end - start for start, end, _ in cuts])
    position = np.concatenate([np.arange(end - start) for start, end, _ in cuts])
    bucket = np.frexp(position)[1]  # 0 | 1 | 2-3 | 4-7 | ...
    each, rows = [], []
    for run in runs:
        nats = score(run.model, data, a.split, max_tokens=a.tokens, per_token=True, progress=sys.stderr.isatty())
        each.append(finite(nats.astype(np.float64), run))
    for run, nats in zip(runs, each):
        rows.append([])
        for b in [*np.unique(bucket), None]:
            here = np.full(len(bucket), True) if b is None else bucket == b
            spread = lambda values: around(values[here], window[here], len(cuts))
            last = int(position[here].max())
            rows[-1].append(dict(positions="all" if b is None else [int(position[here].min()), last], tokens=int(here.sum()),
                                 nats_per_token=spread(nats), over_first=None if run is runs[0] else spread(nats - each[0]),
                                 beyond_training=b is not None and last >= run.trained))
    several, unit = len(runs) > 1, "byte" if data.meta["encoding"] == "byte" else "token"
    head = ("run", "positions", "tokens", f"nats/{unit}", *["over the first"] * several, "")
    spelled = lambda p: p if p == "all" else "-".join(f"{x:,}" for x in sorted(set(p)))
    cells = [(run.name, spelled(r["positions"]), f"{r['tokens']:,}", spell(r["nats_per_token"], 4, sign=False),
              *[spell(r["over_first"], 4)] * several, beyond(r)) for run, found in zip(runs, rows) for r in found]
    return results(runs, data, a, rows), [about_windows(data, a, cuts, context), *lines(head, cells)]


# ---- keys ----

@contextmanager
def without_keys(model, removed):
    """Within it, no later query of row b of a batch sees the keys removed[b] (bool [B, T], True: gone); a token sees itself.

    Only the mask is replaced, and with it the count of keys that ACAG and the statistics of the rows go by.
    """
    plain = model.context

    def context(at, past, T, cache, pad, device, **asked):
        ctx = plain(at, past, T, cache, pad, device, **asked)
        mask = model.mask(past, T, pad, device) & ~removed[:, None, None] | torch.eye(T, dtype=torch.bool, device=device)
        return ctx._replace(mask=mask, n=None if ctx.n is None else mask.sum(-1).to(ctx.n.dtype))

    model.context = context  # on the instance, where it hides the method
    try:
        yield
    finally:
        del model.context


@torch.no_grad()
def nats_without(model, ids, target, removed):
    """Nats of the token `target` after ids [T] without each set of keys, removed bool [sets, T]: [sets], float64."""
    nats, rows = [], max(1, (1 << 24) // len(ids) ** 2)  # the masks are sets x T x T
    for some in torch.from_numpy(removed).split(rows):
        with without_keys(model, some.to(ids.device)):
            logits = model.head(model.hidden(ids.expand(len(some), -1))[:, -1:])
        nats.append(nats_of(logits, target.expand(len(some), 1))[:, 0])
    return np.concatenate(nats)


def rankings(model, ids, targets, queries):
    """{name: score of every key, [queries, T]}, high where a key is said to matter for what follows the query."""
    with torch.no_grad():
        traces = model(ids[None], traces="maps").traces  # T x T for every head of every block
    of = lambda name: [traces[key][0] for i in range(model.config.n_layer) if (key := f"blocks.{i}.{name}") in traces]
    found, shape, advantages, maps = {}, (len(queries), len(ids)), of("advantage"), of("map")
    if advantages:
        found["advantage"] = torch.cat(advantages, -1).mean(-1).expand(shape)
    if model.config.a2c == "key_bias":  # what is really added to the logits: the mix may turn the sign
        mix = torch.cat([block.attn.a2c.mix for block in model.transformer.h]).detach()
        found["key bias"] = (torch.cat(advantages, -1) * mix).mean(-1).expand(shape)
    found["attention"] = sum(m[:, queries].sum(0) for m in maps) / sum(len(m) for m in maps)
    found["gradient"] = gradient_times_input(model, ids, targets, queries)
    found["recency"] = torch.arange(len(ids)).expand(shape)
    return {name: scores.cpu().double().numpy() for name, scores in found.items()}


def gradient_times_input(model, ids, targets, queries):
    """-x_s . d nats_t / d x_s, [queries, T]: the rise in loss, to first order, were the first block's input x_s zero.

    x is taken behind the norm of the embedding, which makes its scale irrelevant: before it the product is always 0.
    """
    kept = []
    hook = model.transformer.drop.register_forward_hook(lambda module, inputs, x: kept.append(x.detach().requires_grad_()) or kept[0])
    try:
        with torch.enable_grad():
            nats = F.cross_entropy(model(ids[None]).logits[0, queries], targets[queries], reduction="none")
            grads = [torch.autograd.grad(n, kept[0], retain_graph=True)[0] for n in nats]
    finally:
        hook.remove()
    return -(torch.cat(grads) * kept[0].detach()).sum(-1)


def gone(T, keys):
    """bool [T], True at the keys."""
    return np.isin(np.arange(T), keys)


def window_effects(model, ids, targets, a, rng):
    """One window of T tokens: nats at the queries with all keys, {(ranking, m): mean rise}, {ranking: Spearman}.

    The correlation is between a ranking's scores and the rises from removing single keys, at the first query.
    """
    T, base, rise, like = len(ids), [], {}, {}
    queries = np.sort(rng.choice(np.arange(3 * T // 4, T), min(a.queries, T - 3 * T // 4), replace=False))
    scores = rankings(model, ids, targets, queries)
    for i, t in enumerate(queries):
        n = t + 1 - a.nearest  # candidates: keys 0 .. n - 1
        order = {name: np.argsort(-s[i, :n], kind="stable") for name, s in scores.items()}
        sets = {(name, m): [order[name][:m]] for name in order for m in a.remove}
        sets |= {("random", m): [rng.choice(n, m, replace=False) for _ in range(a.draws)] for m in a.remove}
        singles = rng.choice(n, min(a.singles, n), replace=False) if i == 0 else []
        removed = [[], *(keys for some in sets.values() for keys in some), *([key] for key in singles)]
        nats = nats_without(model, ids[:t + 1], targets[t], np.stack([gone(t + 1, keys) for keys in removed]))
        base.append(nats[0])
        done = 1
        for key, some in sets.items():
            rise.setdefault(key, []).append((nats[done:done + len(some)] - nats[0]).mean())
            done += len(some)
        for name, s in scores.items() if len(singles) > 2 else ():
            if np.ptp(nats[done:]) and np.ptp(s[i, singles]):  # a constant has no ranks
                like[name] = spearmanr(s[i, singles], nats[done:]).statistic
    return np.mean(base), {key: np.mean(values) for key, values in rise.items()}, like


def keys(a):
    """What it costs the next token to lose the keys that each ranking puts first."""
    runs, data, context = open_runs(a, a.context)
    fewest = 3 * context // 4 + 1 - a.nearest
    if fewest < max(a.remove):
        raise ValueError(f"a context of {context:,} with --nearest={a.nearest} leaves {max(0, fewest)} keys to remove {max(a.remove)} of")
    cuts = [c for c in windows_of(data, a.split, context, 0, a.windows * context) if c[2] == context]
    rows = []
    with progress_bar(len(runs) * len(cuts), "keys") as progress:
        for run in runs:
            found, device = [], next(run.model.parameters()).device
            for w, (start, end, _) in enumerate(cuts):
                rng = np.random.default_rng([a.seed, w])  # chance is that of the window: all runs are asked the same
                found.append(window_effects(run.model, *text_of(data, a.split, start, end, device), a, rng))
                progress.update(1)
            base, rises, likes = zip(*found)
            finite(np.array(base), run)
            rise = {key: np.array([r[key] for r in rises]) for key in rises[0]}
            rows.append(dict(nats=float(np.mean(base)), rankings=[]))
            for name in dict.fromkeys(name for name, _ in rise):
                like, over = [one[name] for one in likes if name in one], lambda m: interval(rise[name, m] - rise["random", m])
                removed = [dict(keys=m, rise=interval(rise[name, m]), over_random=None if name == "random" else over(m)) for m in a.remove]
                rows[-1]["rankings"].append(dict(ranking=name, removed=removed, spearman=interval(like) if like else None, windows=len(cuts)))
    head = ("run", "ranking", *(cell for m in a.remove for cell in (f"rise, {m} gone", "over random")), "Spearman, one gone")
    both = lambda r: (cell for x in r["removed"] for cell in (spell(x["rise"]), spell(x["over_random"])))
    cells = [(run.name, r["ranking"], *both(r), spell(r["spearman"], 2)) for run, row in zip(runs, rows) for r in row["rankings"]]
    what = [f"{about_text(data, a)}: {len(cuts):,} windows of {context:,}, {a.queries} queries in the last quarter of each",
            f"rise of the next token's nats; candidates: keys from {a.nearest} tokens back; random: mean of {a.draws} draws",
            *(f"{run.name}: {row['nats']:.4f} nats with all keys" for run, row in zip(runs, rows))]
    return results(runs, data, a, rows), [*what, *lines(head, cells)]


# ---- heads ----

def head_metrics(model, data, split, cuts, progress=None):
    """Of every head, block by block, [heads]: mean entropy of its rows in nats, and mean over windows of |d loss / d gate|."""
    device, blocks = next(model.parameters()).device, model.transformer.h
    before, entropy, slope = [block.attn.hand for block in blocks], [], []
    try:
        for block in blocks:  # the gates as they are, set by hand, so that each has a gradient
            gate = block.attn.static_gate(noisy=False)
            gate = torch.ones(len(block.attn.numbers()), device=device) if gate is None else gate.detach().clone()
            block.attn.hand = gate.requires_grad_()
        for start, end, _ in cuts:
            ids, targets = text_of(data, split, start, end, device)
            out = model(ids[None], targets[None], traces=True)
            grads = torch.autograd.grad(out.loss, [block.attn.hand for block in blocks])
            slope.append(torch.cat(grads).abs().double().cpu())
            entropy.append(torch.cat([out.traces[f"blocks.{i}.entropy"].detach()[0].mean(-1) for i in range(len(blocks))]).double().cpu())
            if progress is not None:
                progress.update(1)
    finally:
        for block, hand in zip(blocks, before):
            block.attn.hand = hand
    return torch.stack(entropy).mean(0).numpy(), torch.stack(slope).mean(0).numpy()


def without_head(model, layer, head, data, split, tokens=0):
    """Nats of every token, [n] float64, with one head's gate at 0."""
    attn = model.transformer.h[layer].attn
    before = None if attn.hand is None else attn.hand.clone()
    try:
        model.set_head(layer, head, gate=0.0)
        return score(model, data, split, max_tokens=tokens, per_token=True).astype(np.float64)
    finally:
        attn.hand = before


def heads(a):
    """Entropy, gate gradient and loss change of every head, and how well the first two tell the third."""
    runs, data, context = open_runs(a, a.context)
    cuts = windows_of(data, a.split, context, 0, a.tokens)
    window = np.repeat(np.arange(len(cuts)), [end - start for start, end, _ in cuts])
    every = [[(i, head) for i, block in enumerate(run.model.transformer.h) for head in block.attn.numbers()] for run in runs]
    rows = []
    with progress_bar(sum(len(cuts) + len(there) for there in every), "heads") as progress:
        for run, there in zip(runs, every):
            plain = finite(score(run.model, data, a.split, max_tokens=a.tokens, per_token=True).astype(np.float64), run)
            entropy, slope = head_metrics(run.model, data, a.split, cuts, progress)
            found = []
            for (layer, head), e, g in zip(there, entropy, slope):
                change = without_head(run.model, layer, head, data, a.split, a.tokens) - plain
                change = around(change, window, len(cuts))
                found.append(dict(layer=layer, head=head, entropy=float(e), gate_gradient=float(g), change=change))
                progress.update(1)
            change, tests = np.array([f["change"][0] for f in found]), {}
            both = rankdata(slope) - rankdata(entropy)
            for name, metric in {"entropy": entropy, "gate gradient": slope, "both ranks": both}.items():
                known = len(found) > 2 and np.ptp(metric) and np.ptp(change)
                tests[name] = dict(zip(("rho", "p"), map(float, spearmanr(metric, change)))) if known else None
            rows.append(dict(nats_per_token=float(plain.mean()), heads=found, n=len(found), spearman=tests))
    head = ("run", "block", "head", "entropy, nats", "|d loss / d gate|", "loss change when off, nats")
    cells = [(run.name, str(f["layer"]), str(f["head"]), f"{f['entropy']:.3f}", f"{f['gate_gradient']:.2e}", spell(f["change"]))
             for run, row in zip(runs, rows) for f in row["heads"]]
    said = lambda tests: ", ".join(f"{name} {t['rho']:+.2f} (p = {t['p']:.2g})" if t else f"{name} -" for name, t in tests.items())
    below = [f"{run.name}, Spearman with the loss change, n = {row['n']} heads: {said(row['spearman'])}" for run, row in zip(runs, rows)]
    what = [about_windows(data, a, cuts, context),
            *(f"{run.name}: {row['nats_per_token']:.4f} nats per token with all heads" for run, row in zip(runs, rows))]
    return results(runs, data, a, rows), [*what, *lines(head, cells), *below]


# ---- output ----

def about_text(data, a):
    return f"{data.meta['name']}, {a.split}" + (f", with {', '.join(a.settings)}" if a.settings else "")


def about_windows(data, a, cuts, context):
    return f"{about_text(data, a)}: {sum(c[2] for c in cuts):,} tokens in {len(cuts):,} disjoint windows of {context:,}"


def beyond(row):
    return "beyond training length" if row["beyond_training"] else ""


def spell(found, digits=4, sign=True):
    """An interval [mean, low, high] as "mean ±half"; a dash where there is none."""
    if found is None:
        return "-"
    mean, low, high = found
    return f"{mean:{'+' if sign else ''}.{digits}f} ±{(high - low) / 2:.{digits}f}"


def lines(head, rows):
    wide = [max(map(len, column)) for column in zip(head, *rows)]
    return [aligned(row, wide).rstrip() for row in (head, *rows)]


def results(runs, data, a, rows):
    """What --json writes: every number, intervals as [mean, low, high]."""
    options = {key: value for key, value in vars(a).items() if key not in ("ckpt", "json", "what", "settings")}
    return dict(what=a.what, dataset=data.meta["name"], split_sha256=data.splits[a.split].get("sha256"), set=a.settings, options=options,
                runs=[dict(name=run.name, trained_block_size=run.trained, results=found) for run, found in zip(runs, rows)])


def plain_json(x):
    """x without infinities, which JSON lacks: the interval of a single sample has no bounds."""
    if isinstance(x, dict):
        return {key: plain_json(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain_json(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


# ---- command line ----

def positive(text):
    if (number := int(text)) < 1:
        raise ValueError
    return number


# what -> (function, split, {flag: (type, default, words)}); a list as default takes several
CONTEXT = (positive, None, "tokens in a window (default: the shortest training length)")
PROBES = {
    "needle": (needle, "test", dict(contexts=(positive, [1024, 2048, 4096, 8192, 16384], "bytes, question and answer included"),
                                    depths=(float, [0.1, 0.5, 0.9], "where the fact is, from 0 to 1"),
                                    samples=(positive, 32, "texts for each context"))),
    "late": (late, "test", dict(context=CONTEXT, tokens=(int, 262144, "tokens to score, in evenly spaced windows; 0: all"))),
    "keys": (keys, "test", dict(context=CONTEXT, windows=(positive, 32, "windows, evenly spaced"), queries=(positive, 4, "queries in each"),
                                remove=(positive, [4, 8], "how many keys to remove"), draws=(positive, 8, "random sets of each size"),
                                nearest=(positive, 2, "the nearest key that may go, in tokens back"),
                                singles=(int, 32, "keys to remove one by one, at the first query of a window"))),
    "heads": (heads, "val", dict(context=CONTEXT, tokens=(int, 16384, "tokens to score for each head, in evenly spaced windows; 0: all"))),
}


def arguments(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = p.add_subparsers(dest="what", required=True, metavar="needle|late|keys|heads")
    for name, (probe, split, more) in PROBES.items():
        s = what.add_parser(name, help=probe.__doc__, description=probe.__doc__)
        s.add_argument("--ckpt", action="append", required=True, help="a checkpoint or a run folder (its best.pt); may be repeated")
        s.add_argument("--split", default=split, help=f"train, val or test (default: {split})")
        s.add_argument("--dataset", help="read this dataset, which must have the same vocabulary (default: the one trained on)")
        s.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="as in evaluate.py")
        for flag, (kind, default, words) in more.items():
            several = isinstance(default, list)
            words += "" if default is None else f" (default: {' '.join(map(str, default)) if several else default})"
            s.add_argument(f"--{flag}", type=kind, default=default, nargs="+" if several else None, help=words)
        s.add_argument("--seed", type=int, default=1337, help="of texts, queries and random keys (default: 1337)")
        s.add_argument("--json", help="write the results to this file as well")
        s.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, mps")
    return p.parse_args(argv)


def main(argv=None):
    a = arguments(argv)
    try:
        if bad := [f"--{key}={vars(a)[key]}" for key in ("seed", "tokens", "singles") if vars(a).get(key, 0) < 0]:
            raise ValueError(f"{bad[0]} must not be negative")
        a.device, out = pick_device(a.device), writable(a.json) if a.json else None
        found, text = PROBES[a.what][0](a)
        if out:
            write_atomic(out, lambda f: f.write(json.dumps(plain_json(found), indent=1).encode() + b"\n"))
        print(*text, *([a.json] if out else []), sep="\n")
    except ValueError as e:
        sys.exit(f"probe: {e}")
    except KeyboardInterrupt:
        print("\nprobe: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
