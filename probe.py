"""
Ask trained checkpoints what one loss does not say; paired, since all checkpoints read the same windows.

    python probe.py needle --ckpt out/a [--ckpt out/b ...] [--contexts 1024 4096] [--depths 0.1 0.9]
    python probe.py late   --ckpt out/a [--ckpt out/b ...] [--context 1024]
    python probe.py keys   --ckpt out/a [--remove 4 8] [--nearest 2]
    python probe.py heads  --ckpt out/a
    python probe.py states --ckpt out/a [--pieces 64]
    python probe.py detectors --ckpt out/a [--ckpt out/b ...] [--picture heads.png]
    python probe.py arrays --ckpt out/a --text FILE [--out maps.npz] [--results]
    python probe.py fewshot --ckpt out/a [--ckpt out/b ...] [--file items.jsonl] [--shots 0 1 2 4 8]

needle  Does a fact far back help? A fact "[QZX4831]" (data/needle) is planted into real text at a depth (0:
        the beginning, 1: just before the question), the text ends in "[QZX", and the four digits are scored,
        teacher forced. The control is the same text without the fact: recall gain = bits of the answer in
        the control minus bits with the fact (13.3 is all there is). Train on data/needle first: other text
        does not teach what the question means.
late    Does a longer context help? Loss by position within disjoint windows.
keys    Do the tokens matter that a ranking calls important? The first m of each ranking are removed by a
        mask: no later query of any head sees such a key, a token still sees itself, positions stay. Ranked
        are the advantages that an A2C model predicts for a token (mean over heads and blocks; they do not
        depend on the query), the attention weight from the query (mean over heads and blocks), gradient x
        input at the first block, nearness, and chance. Keys nearer than --nearest, the query's own token
        included, are no candidates; a larger value asks about far keys, where nearness is no longer all. The
        running mean that a constraint router reads still holds what is removed.
heads   Which heads can go? Entropy of a head's rows and gradient of its gate, beside the loss with its gate
        at 0.
states  Do states follow how hard the text is? Heads are measured on pieces of text, and those counted that
        agency's policy would call overloaded, misaligned or idle at its default thresholds, beside the loss.
detectors
        What does a head look at? On random tokens that come twice: the token before, earlier copies of the
        token, what followed them (induction), as transformer_lens.head_detector scores attention. On text
        with a planted needle, which begins again at the end: how often its next token is what the head looks
        at most (at needle), and also what the model says (retrieval, arXiv 2404.15574). Random tokens are
        the frequent ones of the split, each as likely.
arrays  The attention maps of a text and what each head puts out, as arrays that other tools take
        (bertviz, circuitsvis).
fewshot Does it learn from examples in front? Of several choices the likeliest after a prompt is the answer;
        before the prompt stand so many others of the same task with their right choices, the earliest left
        out where the context is too short. Items are a file's (fewshot.py says how one is written), or made
        of the split's own words: copy one, its first letter, its plural, the next letter, the word left out.

Intervals are 95 %, by t over samples (needle, detectors), windows (keys), items (fewshot) or blocks of
neighbouring windows (late, heads). Contexts beyond the training length take rotary positions; ACAG's length
and a window stay those of the training.
"""

import argparse
import math
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata, spearmanr
from scipy.stats import t as student
from torch.nn import functional as F
from tqdm import tqdm

from data.needle.prepare import DIGITS, digits_of, fact, names, question
from model import GPT
from nanoheads.common import UserError, last_words, pick_device, table, writable, write_atomic, write_json
from nanoheads.heads.audit import read_ids
from nanoheads.training.config import ControllerConfig
from nanoheads.heads.detectors import (ARRAYS, EXCLUDED, MEASURES, PATTERNS, common_tokens, head_arrays,
                                       needles, pattern_scores, repeats, retrieval_scores, similarity,
                                       typical_maps)
from nanoheads.heads.measuring import attentions, closed, measure, nats_on, places, static_gates
from nanoheads.heads.pictures import draw_head_scores, spelled
from nanoheads.probes.fewshot import choice_nats, contexts, judged, made_items, read_items, save_items
from nanoheads.training import checkpoint
from nanoheads.training.sampling import model_and_tokenizer
from nanoheads.training.scoring import add_arguments, load, nats_of, score, window_ids, windows_of

BLOCKS = 32  # of neighbouring windows, at most: what intervals over text rest on


class Run(NamedTuple):
    """A checkpoint, loaded: what it is called, the model, and the context that it was trained on."""
    name: str
    model: GPT
    trained: int


# ---- checkpoints and windows ----

def open_runs(args, context=None):
    """([Run], Dataset, context), all checkpoints at one context (None: the shortest training). UserError."""
    loaded = [load(path, args.split, 0, args.device, args.dataset, args.settings) for path in args.ckpt]
    _, _, data = loaded[0]
    for path, (_, _, other) in zip(args.ckpt, loaded):
        if other.splits[args.split] != data.splits[args.split]:
            raise UserError(f"{path} and {args.ckpt[0]} were trained on different data; "
                            "name one for both with --dataset")
    context = context or min(model.config.block_size for _, model, _ in loaded)
    n = len(data.tokens(args.split))
    if context > n:
        raise UserError(f"a context of {context:,} is longer than the {args.split} split of {data.dir}, "
                        f"{n:,} tokens")
    runs = []
    for path, (state, model, _) in zip(args.ckpt, loaded):
        trained = checkpoint.config_of(state, path).block_size
        model = at_context(model, context, state, path, args)
        runs.append(Run(path.removesuffix("/best.pt"), model, trained))
    return runs, data, context


def at_context(model, context, state, path, args):
    """The model with block_size=context; ACAG's length and the window stay the checkpoint's. UserError."""
    longest = model.config.block_size
    if context <= longest:
        model.crop_block_size(context)
        return model
    if model.config.pos == "learned":
        raise UserError(f"{path} has learned positions, which end at {longest:,}: "
                        f"it cannot read a context of {context:,}")
    return checkpoint.build(state, path, args.device, [*args.settings, f"block_size={context}"])


def text_of(data, split, start, end, device):
    """Inputs and targets, [end - start] each, of a window."""
    ids = torch.from_numpy(window_ids(data.tokens(split), data.separator, start, end)).to(device)
    return ids[:-1], ids[1:]


def token_nats(run, data, args, progress=False):
    """Nats of every scored token, [n] float64. UserError where they are not finite."""
    nats = score(run.model, data, args.split, max_tokens=args.tokens, per_token=True, progress=progress)
    return finite(nats.astype(np.float64), run)


def finite(nats, run):
    if not np.isfinite(nats).all():
        raise UserError(f"{run.name} gives {nats[~np.isfinite(nats)][0]} nats: "
                        "its weights are damaged, or its training diverged")
    return nats


def progress_bar(total, what):
    return tqdm(total=total, desc=what, leave=False, mininterval=0.5, disable=not sys.stderr.isatty())


def interval(differences):
    """[mean, low, high] of the mean of differences [n], by t; infinite ends for one."""
    n, mean = len(differences), float(np.mean(differences))
    half = student.isf(0.025, n - 1) * np.std(differences, ddof=1) / math.sqrt(n) if n > 1 else math.inf
    return [mean, float(mean - half), float(mean + half)]


def around(values, window, n_windows):
    """[mean, low, high] of values [n]: their plain mean, the interval of the means of blocks of windows.

    window [n]: which window each value is of; neighbours make a block.
    """
    block = window * min(BLOCKS, n_windows) // n_windows
    size = np.bincount(block)
    there = size > 0  # a short last window has no late positions
    middle, low, high = interval(np.bincount(block, values)[there] / size[there])
    mean = float(values.mean())
    return [mean, mean - (middle - low), mean + (high - middle)]


def position_in_windows(cuts):
    """(number of its window, position in it) of every scored token of disjoint windows, [n] each."""
    lengths = [end - start for start, end, _ in cuts]
    return np.repeat(np.arange(len(cuts)), lengths), np.concatenate([np.arange(n) for n in lengths])


# ---- needle ----

def haystacks(text, split, context, depths, samples, seed):
    """Token ids [samples, 1 + depths, context]: the control without the fact, then the fact at each depth.

    The answer is last. Within a sample all is the same but the fact, for which the text before it begins a
    little later.
    """
    rng, pool, ids = np.random.default_rng([seed, context]), names(split), []
    length = context - len(question(pool[0])) - DIGITS
    for _ in range(samples):
        end = int(rng.integers(length, len(text) + 1))
        end = text.find(b" ", end) + 1 or end  # facts and questions come after spaces, as in training
        piece = text[end - length:end]
        name = next(pool[i] for i in rng.permutation(len(pool)) if b"[" + pool[i] not in piece)
        answer = digits_of(rng.integers(10 ** DIGITS))
        rows = [piece]
        rest = piece[len(fact(name, answer)):]
        for depth in depths:
            at = int(depth * len(rest))
            at = rest.find(b" ", at, at + 64) + 1 or at
            rows.append(rest[:at] + fact(name, answer) + rest[at:])
        ids.append([np.frombuffer(row + question(name) + answer, np.uint8) for row in rows])
    return np.array(ids).astype(np.int64)


@torch.no_grad()
def answers(model, ids, progress=None, batch_tokens=16384):
    """(nats, whether it is the likeliest) of the last DIGITS tokens of ids [n, context]: [n, DIGITS] each."""
    device, nats, right = next(model.parameters()).device, [], []
    rows = max(1, batch_tokens // ids.shape[1])
    for at in range(0, len(ids), rows):
        x = torch.from_numpy(ids[at:at + rows]).to(device)
        logits = model.head(model.hidden(x[:, :-1])[:, -DIGITS:])
        nats.append(nats_of(logits, x[:, -DIGITS:]))
        right.append((logits.argmax(-1) == x[:, -DIGITS:]).cpu().numpy())
        if progress is not None:
            progress.update(len(x))
    return np.concatenate(nats), np.concatenate(right)


def recalled(nats, right):
    """Gain in bits [samples, depths] and a dict a depth, of nats and hits [samples, 1 + depths, DIGITS]."""
    bits = nats.sum(-1) / math.log(2)
    gain = bits[:, :1] - bits[:, 1:]
    rows = []
    for i in range(gain.shape[1]):
        rows.append(dict(nats_per_byte=float(nats[:, 1 + i].mean()),
                         exact=float(right[:, 1 + i].all(-1).mean()),
                         control_nats_per_byte=float(nats[:, 0].mean()), gain_bits=interval(gain[:, i])))
    return gain, rows


def needle(args):
    """Recall of a planted fact by context and depth."""
    if min(args.contexts) < 64:
        raise ValueError(f"--contexts: {min(args.contexts)} is too short for a fact and its question; "
                         "take at least 64")
    if not all(0 <= depth <= 1 for depth in args.depths):
        given = " ".join(f"{depth:g}" for depth in args.depths)
        raise ValueError(f"--depths: {given} must be from 0 (the beginning) to 1 (before the question)")
    runs, data, _ = open_runs(args, max(args.contexts))
    if data.meta["encoding"] != "byte":
        raise UserError(f"{data.dir} is {data.meta['encoding']}, not byte: the facts are bytes")
    text, rows = data.tokens(args.split).tobytes(), [[] for _ in runs]
    n_texts = args.samples * (1 + len(args.depths))
    with progress_bar(len(runs) * len(args.contexts) * n_texts, "needle") as progress:
        for context in args.contexts:
            ids = haystacks(text, args.split, context, args.depths, args.samples, args.seed)
            first = None
            for run, run_rows in zip(runs, rows):
                scored = answers(run.model, ids.reshape(-1, context), progress)
                nats, right = (part.reshape(*ids.shape[:2], DIGITS) for part in scored)
                gain, depth_rows = recalled(finite(nats, run), right)
                first = gain if first is None else first
                for i, (depth, row) in enumerate(zip(args.depths, depth_rows)):
                    over = None if run is runs[0] else interval((gain - first)[:, i])
                    run_rows.append(dict(context=context, depth=depth, samples=args.samples, **row,
                                         over_first=over, beyond_training=context > run.trained))
    several = len(runs) > 1
    head = ("run", "context", "depth", "nats/byte", "exact", "control", "recall gain, bits",
            *["over the first"] * several, "")
    cells = []
    for run, run_rows in zip(runs, rows):
        for r in run_rows:
            cells.append((run.name, f"{r['context']:,}", f"{r['depth']:g}", f"{r['nats_per_byte']:.3f}",
                          f"{r['exact']:.0%}", f"{r['control_nats_per_byte']:.3f}", spell(r["gain_bits"], 2),
                          *[spell(r["over_first"], 2)] * several, beyond(r)))
    what = (f"{about_text(data, args)}: {args.samples} texts a context, the same for all; "
            f"answers of {DIGITS} digits, teacher forced")
    return results(runs, data, args, rows), [what, table(head, cells)]


# ---- late ----

def late(args):
    """Loss by position in the window."""
    runs, data, context = open_runs(args, args.context)
    cuts = windows_of(data, args.split, context, 0, args.tokens)
    window, position = position_in_windows(cuts)
    bucket = np.frexp(position)[1]  # 0 | 1 | 2-3 | 4-7 | ...
    nats = [token_nats(run, data, args, progress=sys.stderr.isatty()) for run in runs]
    rows = []
    for run, each in zip(runs, nats):
        run_rows = []
        for b in [*np.unique(bucket), None]:
            chosen = np.full(len(bucket), True) if b is None else bucket == b
            first, last = int(position[chosen].min()), int(position[chosen].max())
            over = None
            if run is not runs[0]:
                over = around((each - nats[0])[chosen], window[chosen], len(cuts))
            run_rows.append(dict(positions="all" if b is None else [first, last], tokens=int(chosen.sum()),
                                 nats_per_token=around(each[chosen], window[chosen], len(cuts)),
                                 over_first=over, beyond_training=b is not None and last >= run.trained))
        rows.append(run_rows)
    several, unit = len(runs) > 1, "byte" if data.meta["encoding"] == "byte" else "token"
    head = ("run", "positions", "tokens", f"nats/{unit}", *["over the first"] * several, "")
    cells = []
    for run, run_rows in zip(runs, rows):
        for r in run_rows:
            span = r["positions"]
            span = span if span == "all" else "-".join(f"{x:,}" for x in sorted(set(span)))
            cells.append((run.name, span, f"{r['tokens']:,}", spell(r["nats_per_token"], 4, sign=False),
                          *[spell(r["over_first"], 4)] * several, beyond(r)))
    return results(runs, data, args, rows), [about_windows(data, args, cuts, context), table(head, cells)]


# ---- keys ----

@contextmanager
def without_keys(model, removed):
    """Within it, no later query of row b of a batch sees the keys removed[b] (bool [B, T], True: gone).

    A token sees itself. Only the mask is replaced, and with it the count of keys that ACAG and the statistics
    of the rows go by.
    """
    plain = model.context

    def context(positions, past, T, cache, pad, device, **wanted):
        ctx = plain(positions, past, T, cache, pad, device, **wanted)
        itself = torch.eye(T, dtype=torch.bool, device=device)
        mask = wanted.get("who", model.mask).dense(past, T, pad, device) & ~removed[:, None, None] | itself
        n_keys = None if ctx.n_keys is None else mask.sum(-1).to(ctx.n_keys.dtype)
        return ctx._replace(mask=mask, n_keys=n_keys)

    model.context = context  # on the instance, where it hides the method
    try:
        yield
    finally:
        del model.context


@torch.no_grad()
def nats_without(model, ids, target, removed):
    """Nats of the token `target` after ids [T] without each set of keys: [sets] float64.

    removed [sets, T], bool: True at the keys of a set.
    """
    nats, rows = [], max(1, (1 << 24) // len(ids) ** 2)  # the masks are sets x T x T
    for sets in torch.from_numpy(removed).split(rows):
        with without_keys(model, sets.to(ids.device)):
            logits = model.head(model.hidden(ids.expand(len(sets), -1))[:, -1:])
        nats.append(nats_of(logits, target.expand(len(sets), 1))[:, 0])
    return np.concatenate(nats)


def rankings(model, ids, targets, queries):
    """{name: score of every key, [queries, T]}, high where a key is said to matter after the query."""
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
    """A dict for each ranking, from what window_effects() says of every window."""
    _, rises, correlations = zip(*effects)
    rise = {key: np.array([r[key] for r in rises]) for key in rises[0]}
    rows = []
    for name in dict.fromkeys(name for name, _ in rise):
        removed = []
        for m in args.remove:
            over = None if name == "random" else interval(rise[name, m] - rise["random", m])
            removed.append(dict(keys=m, rise=interval(rise[name, m]), over_random=over))
        spearman = [each[name] for each in correlations if name in each]
        rows.append(dict(ranking=name, removed=removed, spearman=interval(spearman) if spearman else None,
                         windows=len(effects)))
    return rows


def keys(args):
    """What it costs the next token to lose the keys that each ranking puts first."""
    runs, data, context = open_runs(args, args.context)
    fewest = 3 * context // 4 + 1 - args.nearest
    if fewest < max(args.remove):
        raise ValueError(f"a context of {context:,} with --nearest={args.nearest} leaves "
                         f"{max(0, fewest)} keys to remove {max(args.remove)} of")
    cuts = windows_of(data, args.split, context, 0, args.windows * context)
    cuts = [cut for cut in cuts if cut[2] == context]
    rows = []
    with progress_bar(len(runs) * len(cuts), "keys") as progress:
        for run in runs:
            effects, device = [], next(run.model.parameters()).device
            for w, (start, end, _) in enumerate(cuts):
                rng = np.random.default_rng([args.seed, w])  # of the window: chance is the same for all runs
                ids, targets = text_of(data, args.split, start, end, device)
                effects.append(window_effects(run.model, ids, targets, args, rng))
                progress.update(1)
            nats = finite(np.array([base for base, _, _ in effects]), run)
            rows.append(dict(nats=float(np.mean(nats)), rankings=ranking_rows(effects, args)))
    titles = [title for m in args.remove for title in (f"rise, {m} gone", "over random")]
    cells = []
    for run, row in zip(runs, rows):
        for r in row["rankings"]:
            removed = [spell(x[what]) for x in r["removed"] for what in ("rise", "over_random")]
            cells.append((run.name, r["ranking"], *removed, spell(r["spearman"], 2)))
    what = [f"{about_text(data, args)}: {len(cuts):,} windows of {context:,}, "
            f"{args.queries} queries in the last quarter of each",
            f"rise of the next token's nats; candidates: keys from {args.nearest} tokens back; "
            f"random: mean of {args.draws} draws",
            *(f"{run.name}: {row['nats']:.4f} nats with all keys" for run, row in zip(runs, rows))]
    head = ("run", "ranking", *titles, "Spearman, one gone")
    return results(runs, data, args, rows), [*what, table(head, cells)]


# ---- heads ----

def head_metrics(model, data, split, cuts, progress=None):
    """(entropy of its rows in nats, |d loss / d gate|) of every head, block by block, [heads] each: means."""
    device, layers, entropy, slope = next(model.parameters()).device, attentions(model), [], []
    with closed(model, []):  # it puts the gates back
        for attn, gate in zip(layers, static_gates(model)):  # set by hand as they are: each has a gradient
            attn.gate_override = gate.clone().requires_grad_()
        for start, end, _ in cuts:
            ids, targets = text_of(data, split, start, end, device)
            out = model(ids[None], targets[None], traces=True)
            grads = torch.autograd.grad(out.loss, [attn.gate_override for attn in layers])
            rows = [out.traces[f"blocks.{i}.entropy"].detach()[0].mean(-1) for i in range(len(layers))]
            slope.append(torch.cat(grads).abs().double().cpu())
            entropy.append(torch.cat(rows).double().cpu())
            if progress is not None:
                progress.update(1)
    return torch.stack(entropy).mean(0).numpy(), torch.stack(slope).mean(0).numpy()


def without_head(model, layer, head, data, split, tokens=0):
    """Nats of every token, [n] float64, with one head's gate at 0."""
    with closed(model, [(layer, head)]):
        return score(model, data, split, max_tokens=tokens, per_token=True).astype(np.float64)


def spearman_tests(loss, metrics):
    """{metric: dict(rho, p) of its rank correlation with a loss; None where there are no ranks}."""
    tests = {}
    for name, metric in metrics.items():
        if len(loss) > 2 and np.ptp(metric) and np.ptp(loss):
            rho, p = spearmanr(metric, loss)
            tests[name] = dict(rho=float(rho), p=float(p))
        else:
            tests[name] = None
    return tests


def told(tests):
    """Those tests in words."""
    return ", ".join(f"{name} {t['rho']:+.2f} (p = {t['p']:.2g})" if t else f"{name} -"
                     for name, t in tests.items())


def heads(args):
    """Entropy, gate gradient and loss change of every head, and how well the first two tell the third."""
    runs, data, context = open_runs(args, args.context)
    cuts = windows_of(data, args.split, context, 0, args.tokens)
    window, _ = position_in_windows(cuts)
    heads_of = [places(run.model) for run in runs]
    rows = []
    with progress_bar(sum(len(cuts) + len(each) for each in heads_of), "heads") as progress:
        for run, each in zip(runs, heads_of):
            plain = token_nats(run, data, args)
            entropy, slope = head_metrics(run.model, data, args.split, cuts, progress)
            head_rows = []
            for (layer, head), e, g in zip(each, entropy, slope):
                change = without_head(run.model, layer, head, data, args.split, args.tokens) - plain
                head_rows.append(dict(layer=layer, head=head, entropy=float(e), gate_gradient=float(g),
                                      change=around(change, window, len(cuts))))
                progress.update(1)
            change = np.array([row["change"][0] for row in head_rows])
            metrics = {"entropy": entropy, "gate gradient": slope,
                       "both ranks": rankdata(slope) - rankdata(entropy)}
            rows.append(dict(nats_per_token=float(plain.mean()), heads=head_rows, n=len(head_rows),
                             spearman=spearman_tests(change, metrics)))
    head = ("run", "block", "head", "entropy, nats", "|d loss / d gate|", "loss change when off, nats")
    cells = [(run.name, r["layer"], r["head"], f"{r['entropy']:.3f}", f"{r['gate_gradient']:.2e}",
              spell(r["change"])) for run, row in zip(runs, rows) for r in row["heads"]]
    above, below = [about_windows(data, args, cuts, context)], []
    for run, row in zip(runs, rows):
        above.append(f"{run.name}: {row['nats_per_token']:.4f} nats per token with all heads")
        below.append(f"{run.name}, Spearman with the loss change, n = {row['n']} heads: "
                     f"{told(row['spearman'])}")
    return results(runs, data, args, rows), [*above, table(head, cells), *below]


# ---- states ----

STATES = ("largest", "overloaded", "misaligned", "idle")


def states_on(model, x, y):
    """{what: number} of x, y [B, T]: the loss, the largest share sent, heads in each state of the policy."""
    limits, found = ControllerConfig(), measure(model, x, y)
    sent = torch.cat([each * len(each) for each in found["utilisation"]])  # 1: an equal share of its layer
    entropy, conflict = torch.cat(found["entropy"]), torch.cat(found["conflict"])
    return dict(nats=nats_on(model, x, y), largest=sent.max().item(),
                overloaded=(sent > limits.policy_overloaded).sum().item(),
                misaligned=(conflict < limits.policy_conflict).sum().item(),
                idle=((entropy > limits.policy_entropy) & (sent < 0.5)).sum().item())


def states(args):
    """Heads that agency would call overloaded, misaligned or idle on pieces of text, beside the loss."""
    runs, data, context = open_runs(args, args.context)
    tokens, size = data.tokens(args.split), args.windows * context
    if len(tokens) < args.pieces * size + 1 or args.windows < 2 or args.pieces < 3:
        raise UserError(f"--pieces {args.pieces} (at least 3) of {args.windows} windows (at least 2) of "
                        f"{context:,}: {args.split} has {len(tokens):,} tokens")
    starts = np.linspace(0, len(tokens) - size - 1, args.pieces).astype(np.int64)
    rows, cells, below = [], [], []
    with progress_bar(len(runs) * len(starts), "states") as progress:
        for run in runs:
            pieces = []
            for start in starts:
                ids = torch.from_numpy(tokens[start:start + size + 1].astype(np.int64)).to(args.device)
                pieces.append(states_on(run.model, ids[:-1].view(-1, context), ids[1:].view(-1, context)))
                progress.update(1)
            by = {key: np.array([piece[key] for piece in pieces]) for key in pieces[0]}
            finite(by["nats"], run)
            tests = spearman_tests(by["nats"], {key: by[key] for key in STATES})
            for third, part in zip(("easiest", "middle", "hardest"), np.array_split(by["nats"].argsort(), 3)):
                cells.append((run.name, third, len(part), f"{by['nats'][part].mean():.3f}",
                              *(spell(interval(by[key][part]), 2, sign=False) for key in STATES)))
            rows.append(dict(pieces=pieces, spearman=tests))
            below.append(f"{run.name}, Spearman with the loss, n = {len(starts)} pieces: {told(tests)}")
    above = [f"{about_text(data, args)}: {len(starts)} pieces of {size:,} tokens"]
    head = ("run", "pieces", "n", "nats", "largest share", "overloaded", "misaligned", "idle")
    return results(runs, data, args, rows), [*above, table(head, cells, left=2), *below]


# ---- detectors ----

NEEDLE = ("retrieval", "at needle")  # scores on a needle: copied, looked at


def detector_tokens(args, data, context):
    """(repeats(), texts and starts of needles(), tokens in a needle), on the device. ValueError."""
    rng, text = np.random.default_rng(args.seed), data.tokens(args.split)
    length = args.length or max(1, min(64, (context - 2) // 2))
    if 2 * length + 1 > context:
        raise ValueError(f"--length={length}: the separator and so many tokens twice are more than "
                         f"a context of {context:,}")
    size = args.needle or max(2, min(12, context // 3))
    if not 2 <= size <= context // 3:
        raise ValueError(f"--needle={size} must be from 2 to {context // 3}, a third of the context")
    alphabet = common_tokens(text)
    twice = repeats(alphabet, length, args.samples, data.separator, rng)
    texts, begins = needles(text, alphabet, context, size, args.samples, rng)
    return *(torch.from_numpy(each).to(args.device) for each in (twice, texts, begins)), size


def typical_scores(twice, args):
    """{detector: [its score where attention is alike to all keys, where it is on the pattern alone]}."""
    scores = {name: [] for name in PATTERNS}
    for ids in twice.cpu():
        for name, pattern in PATTERNS.items():
            maps = torch.stack(typical_maps(pattern(ids)))
            scores[name].append(similarity(maps, pattern(ids), args.measure, args.exclude).tolist())
    return {name: np.mean(each, 0).tolist() for name, each in scores.items()}


def detectors(args):
    """What each head looks at: the token before, copies of the token, what followed them, a needle."""
    picture = picture_path(args.picture) if args.picture else None
    runs, data, context = open_runs(args, args.context)
    twice, texts, begins, size = detector_tokens(args, data, context)
    typical, half, asked = typical_scores(twice, args), twice.size(1) // 2, max(1, size // 3)
    cells = [(what, "", "", *(f"{typical[name][i]:.3f}" for name in PATTERNS), "", "")
             for i, what in enumerate(("if alike to all keys", "if on that alone"))]
    rows, below = [], []
    for run in runs:
        scores, nats = pattern_scores(run.model, twice, args.measure, args.exclude)
        finite(nats, run)
        *of_needle, said = retrieval_scores(run.model, texts, begins, size, asked)
        scores.update(zip(NEEDLE, of_needle))
        head_rows = []
        for i, (layer, head) in enumerate(places(run.model)):
            own = {name: interval(each[:, i]) for name, each in scores.items()}
            head_rows.append(dict(layer=layer, head=head, **own))
            cells.append((run.name, layer, head, *(spell(each, 3, sign=False) for each in own.values())))
        first, again = interval(nats[:, :half].mean(1)), interval(nats[:, half:].mean(1))
        rows.append(dict(heads=head_rows, nats_first=first, nats_again=again, said=interval(said)))
        below.append(f"{run.name}: {spell(first, 3, False)} nats per random token, {spell(again, 3, False)} "
                     f"where it comes again; says {spell(interval(said), 2, False)} of a needle")
    above = [f"{about_text(data, args)}: {args.samples} x {half:,} random tokens twice; {args.samples} texts "
             f"of {context:,} with a needle of {size}, {asked} of which ask for the others"]
    head = ("run", "block", "head", *PATTERNS, *NEEDLE)
    lines = [*above, table(head, cells), *below]
    if picture:
        drawn = [(run.name, run.model, row["heads"]) for run, row in zip(runs, rows)]
        ends = {name: ends if args.measure == "abs" else (0, ends[1]) for name, ends in typical.items()}
        draw_head_scores(drawn, ends | dict.fromkeys(NEEDLE, (0, 1)), picture)
        lines.append(args.picture)
    return results(runs, data, args, rows) | dict(typical=typical), lines


# ---- arrays ----

def arrays(args):
    """The attention maps of a text and what each head puts out, as arrays that other tools take."""
    if len(args.ckpt) > 1:
        raise UserError(f"--ckpt: one at a time, not {len(args.ckpt)}")
    if not args.text:
        raise UserError("--text: name the file to read")
    out = writable(args.out, "--out")
    model, tokenizer = model_and_tokenizer(args.ckpt[0], args.device, args.dataset, args.settings)
    ids = read_ids(args.text, tokenizer)
    n = min(args.tokens or len(ids), len(ids), model.config.block_size)
    found = head_arrays(model, torch.tensor(ids[:n], device=args.device), args.results)
    if not np.isfinite(found["z"]).all():
        raise UserError(f"{args.ckpt[0]}: its heads put out what is no number: its weights are damaged")
    found = dict(tokens=np.array([spelled(tokenizer, i) for i in ids[:n]]), **found)
    write_atomic(out, lambda f: np.savez_compressed(f, **found))
    cells = [(name, " x ".join(map(str, found[name].shape)), *about)
             for name, about in ARRAYS.items() if name in found]
    return None, [f"{args.text}: {n:,} of {len(ids):,} tokens",
                  table(("array", "shape", "axes", ""), cells, left=4), args.out]


# ---- fewshot ----

def items_of(args, data):
    """The Items of a command line, at most args.items of each task. UserError."""
    if not args.file:
        text = data.tokenizer.decode(data.tokens(args.split)[:1 << 21])
        return made_items(text, args.items, args.seed)
    if args.split != "test":
        raise UserError(f"--split {args.split} means nothing with --file")
    every = read_items(args.file)
    of_task = {task: [item for item in every if item.task == task] for task in {item.task for item in every}}
    few = {id(items[i * len(items) // n]) for items in of_task.values()
           for n in [min(len(items), args.items)] for i in range(n)}
    return [item for item in every if id(item) in few]


def fewshot(args):
    """Accuracy on items of several choices, with examples in front."""
    if min(args.shots) < 0:
        raise UserError(f"--shots {min(args.shots)} must not be negative")
    runs, data, context = open_runs(args)
    items = items_of(args, data)
    if args.save:
        save_items(writable(args.save, "--save"), items)
    texts, answer = contexts(items, max(args.shots), args.seed), np.array([item.answer for item in items])
    chance = np.array([1 / len(item.choices) for item in items])
    tasks = [*dict.fromkeys(item.task for item in items), "all"]
    of_task = {task: np.array([task in (item.task, "all") for item in items]) for task in tasks}
    rows, first = [], {}
    with progress_bar(len(runs) * len(args.shots), "fewshot") as progress:
        for run in runs:
            scored = {}
            for shots in args.shots:
                cut = [of_item[:shots + 1] for of_item in texts]
                nats, read = choice_nats(run.model, data.tokenizer, items, cut, context)
                right, surprise = judged(nats, answer)
                scored[shots] = read, right.astype(float), finite(surprise, run)
                progress.update(1)
            first = first or scored
            run_rows = []
            for task, shots in ((task, shots) for task in tasks for shots in args.shots):
                read, right, surprise = (each[of_task[task]] for each in scored[shots])
                _, right_of_first, surprise_of_first = (each[of_task[task]] for each in first[shots])
                over = run is not runs[0]
                run_rows.append(dict(
                    task=task, shots=shots, items=len(read), read=float(read.mean()),
                    chance=float(chance[of_task[task]].mean()), accuracy=interval(right),
                    accuracy_over_first=interval(right - right_of_first) if over else None,
                    nats=interval(surprise),
                    nats_over_first=interval(surprise - surprise_of_first) if over else None))
            rows.append(run_rows)
    over = ["over the first"] * (len(runs) > 1)
    head = ("run", "task", "shots", "read", "items", "chance", "accuracy", *over, "nats", *over)
    cells = [(run.name, r["task"], r["shots"], f"{r['read']:.1f}", r["items"], f"{r['chance']:.2f}",
              spell(r["accuracy"], 3, sign=False), *[spell(r["accuracy_over_first"], 3) for _ in over],
              spell(r["nats"], 3, sign=False), *[spell(r["nats_over_first"], 3) for _ in over])
             for run, run_rows in zip(runs, rows) for r in run_rows]
    source = args.file or f"made of the words of {about_text(data, args)}"
    what = (f"{len(items):,} items, {source}; read: examples that fit into {context:,} tokens; "
            "nats: of the right choice among all")
    return results(runs, data, args, rows), [what, table(head, cells, left=2)]


# ---- output ----

def picture_path(path):
    """The Path of a picture to write, of a kind that can be drawn. UserError."""
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--picture: {path} must end in .png, .svg or .pdf")
    return writable(path, "--picture")


def about_text(data, args):
    settings = f", with {', '.join(args.settings)}" if args.settings else ""
    return f"{data.meta['name']}, {args.split}{settings}"


def about_windows(data, args, cuts, context):
    return (f"{about_text(data, args)}: {sum(c[2] for c in cuts):,} tokens "
            f"in {len(cuts):,} disjoint windows of {context:,}")


def beyond(row):
    return "beyond training length" if row["beyond_training"] else ""


def spell(bounds, digits=4, sign=True):
    """An interval [mean, low, high] as "mean ±half"; a dash where there is none."""
    if bounds is None:
        return "-"
    mean, low, high = bounds
    return f"{mean:{'+' if sign else ''}.{digits}f} ±{(high - low) / 2:.{digits}f}"


def results(runs, data, args, rows):
    """What --json writes: every number, intervals as [mean, low, high]."""
    own = ("ckpt", "json", "what", "settings", "picture")
    options = {key: value for key, value in vars(args).items() if key not in own}
    return dict(what=args.what, dataset=data.meta["name"],
                split_sha256=data.splits[args.split].get("sha256"), set=args.settings, options=options,
                runs=[dict(name=run.name, trained_block_size=run.trained, results=row)
                      for run, row in zip(runs, rows)])


# ---- command line ----

def positive(text):
    if (number := int(text)) < 1:
        raise ValueError
    return number


def one_of(names):
    def choice(text):
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} must be {' or '.join(names)}")
        return text
    return choice


# what -> (function, split, {flag: (type, default, words)}); a list as default takes several, False is a
# switch. Without a split no text of a dataset is read.
CONTEXT = (positive, None, "tokens in a window (default: the shortest training length)")
PROBES = {
    "needle": (needle, "test", dict(
        contexts=(positive, [1024, 2048, 4096, 8192, 16384], "bytes, question and answer included"),
        depths=(float, [0.1, 0.5, 0.9], "where the fact is, from 0 to 1"),
        samples=(positive, 32, "texts for each context"))),
    "late": (late, "test", dict(
        context=CONTEXT,
        tokens=(int, 262144, "tokens to score, in evenly spaced windows; 0: all"))),
    "keys": (keys, "test", dict(
        context=CONTEXT,
        windows=(positive, 32, "windows, evenly spaced"),
        queries=(positive, 4, "queries in each"),
        remove=(positive, [4, 8], "how many keys to remove"),
        draws=(positive, 8, "random sets of each size"),
        nearest=(positive, 2, "the nearest key that may go, in tokens back"),
        singles=(int, 32, "keys to remove one by one, at the first query of a window"))),
    "heads": (heads, "val", dict(
        context=CONTEXT,
        tokens=(int, 16384, "tokens to score for each head, in evenly spaced windows; 0: all"))),
    "states": (states, "val", dict(
        context=CONTEXT,
        pieces=(positive, 64, "pieces of text, evenly spaced"),
        windows=(positive, 4, "windows in a piece, one after the other"))),
    "detectors": (detectors, "val", dict(
        context=CONTEXT,
        samples=(positive, 32, "sequences of random tokens, and texts"),
        length=(positive, None, "random tokens before they come again (default: 64, or what fits)"),
        needle=(positive, None, "tokens of a needle, the first third of which asks for the others "
                                "(default: 12, or a third of the context)"),
        measure=(one_of(MEASURES), "mul", "mul: the share of a head's attention that is on the pattern; "
                                          "abs: how near its attention comes to the pattern"),
        exclude=(one_of(EXCLUDED), [], "leave out attention to the first token, to the token itself, or "
                                       "both: first self"),
        picture=(str, None, "draw the scores into this file, .png, .svg or .pdf"))),
    "arrays": (arrays, None, dict(
        text=(str, None, "the file to read"),
        out=(str, "maps.npz", "the file to write"),
        tokens=(int, 0, "tokens to read, from the first; 0: as many as a context holds"),
        results=(bool, False, "also what each head adds to the residual stream"))),
    "fewshot": (fewshot, "test", dict(
        file=(str, None, "items, a JSON object a line (default: made of the split's words)"),
        items=(positive, 200, "items of each task, at most"),
        shots=(int, [0, 1, 2, 4, 8], "examples before an item"),
        save=(str, None, "write the items to this file, as --file reads them"))),
}


def arguments(argv):
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    commands = parser.add_subparsers(dest="what", required=True, metavar="|".join(PROBES))
    for name, (probe, split, options) in PROBES.items():
        p = commands.add_parser(name, help=probe.__doc__, description=probe.__doc__)
        if split:
            add_arguments(p, split)
            p.add_argument("--seed", type=int, default=1337,
                           help="of texts, queries and random keys (default: 1337)")
        else:
            checkpoint.add_arguments(p)
            p.add_argument("--dataset", help="where a checkpoint without a vocabulary of its own has it")
        for flag, (kind, default, words) in options.items():
            if default is False:
                p.add_argument(f"--{flag}", action="store_true", help=words)
                continue
            several = isinstance(default, list)
            if default not in (None, []):
                words += f" (default: {' '.join(map(str, default)) if several else default})"
            nargs = "+" if several else None
            p.add_argument(f"--{flag}", type=kind, default=default, nargs=nargs, help=words)
    return parser.parse_args(argv)


def main(argv=None):
    args = arguments(argv)
    with last_words("probe"):
        for key in ("seed", "tokens", "singles"):
            if vars(args).get(key, 0) < 0:
                raise ValueError(f"--{key}={vars(args)[key]} must not be negative")
        args.device = pick_device(args.device)
        probe, split, _ = PROBES[args.what]
        out = writable(args.json) if split and args.json else None
        numbers, lines = probe(args)
        if out:
            write_json(out, numbers)
        print(*lines, *([args.json] if out else []), sep="\n")


if __name__ == "__main__":
    main()
