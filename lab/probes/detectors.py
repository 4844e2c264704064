"""
What kind of head is it? How much of its attention lies on three patterns that the field has names for.

    previous token    on the token before
    duplicate token   on earlier copies of the token
    induction         on what came after earlier copies of the token

Each model reads sequences of random tokens that come twice, drawn from the frequent tokens of the split, each
as likely. A head's score is the share of its attention that lies on the pattern, as
transformer_lens.head_detector measures it with error_measure="mul". Two lines above the table say what a head
would score that attends to all keys alike, and one that attends to the pattern alone.
"""

import numpy as np
import torch
from torch.nn import functional as F

from nanoheads.common import table
from nanoheads.intervals import t_interval
from nanoheads.scoring import nats_of
from lab.heads.measuring import all_heads, evaluating, in_float64
from lab.probes.shared import (CONTEXT, about_text, ask, finite, numbers_of, open_checkpoints, plus_minus,
                               positive)


# ---- patterns ----

def previous_token(ids):
    """Pattern [T, T] of ids [T]: 1 where such a head looks from a token (row) at a key (column), else 0."""
    return torch.ones(len(ids) - 1).diag(-1)


def duplicate_token(ids):
    return (ids[:, None] == ids).float().tril(-1)


def induction(ids):
    return F.pad(duplicate_token(ids)[:, :-1], (1, 0))


PATTERNS = {"previous token": previous_token, "duplicate token": duplicate_token, "induction": induction}


def share_on(maps, pattern):
    """The share of the attention of maps [..., T, T] that lies on a pattern [T, T]: float64 [...]."""
    maps = in_float64(maps)
    pattern = pattern.to(maps.device)
    return (maps * pattern).sum((-2, -1)) / maps.sum((-2, -1))


def typical_maps(pattern):
    """(attention that is the same for all keys, attention that is on the pattern alone), [T, T] each.

    Where the pattern has nothing for a token, the second looks at the first token.
    """
    uniform = torch.ones_like(pattern).tril()
    first = torch.zeros_like(pattern)
    first[:, 0] = 1.0
    perfect = torch.where(pattern.any(-1, keepdim=True), pattern, first)
    return uniform / uniform.sum(-1, keepdim=True), perfect / perfect.sum(-1, keepdim=True)


# ---- tokens to read ----

def common_tokens(tokens, share=0.99):
    """The most frequent tokens of a text that make up `share` of it, in order of their numbers."""
    count = np.bincount(tokens)
    order = np.argsort(-count, kind="stable")
    enough = np.searchsorted(np.cumsum(count[order]), share * len(tokens)) + 1
    return np.sort(order[:enough])


def repeats(alphabet, n, samples, separator, rng):
    """Token ids [samples, 1 + 2 n]: the corpus separator, n random tokens of an alphabet, the same again."""
    half = rng.choice(alphabet, (samples, n))
    return joined(separator, half, half)


def joined(*parts):
    """Token ids [B, ...] side by side, a single number for every row."""
    samples = max(len(part) for part in parts if np.ndim(part))
    return np.concatenate([part if np.ndim(part) else np.full((samples, 1), part) for part in parts],
                          1).astype(np.int64)


# ---- scores ----

@torch.no_grad()
def pattern_scores(model, ids):
    """({name of PATTERNS: [B, heads of all blocks]}, nats of each token but the first [B, T - 1]).

    ids [B, T] on the model's device; one sequence at a time, since a map takes T x T numbers a head.
    """
    scores, nats = {name: [] for name in PATTERNS}, []
    with evaluating(model):
        for row in ids.split(1):
            output = model(row, traces="maps")
            nats.append(nats_of(output.logits[:, :-1], row[:, 1:]))
            maps = torch.cat([output.traces[f"blocks.{i}.map"][0].cpu() for i in range(model.config.n_layer)])
            for name, pattern in PATTERNS.items():
                scores[name].append(share_on(maps, pattern(row[0].cpu())).numpy())
    return {name: np.stack(each) for name, each in scores.items()}, np.concatenate(nats)


# ---- the probe ----

def random_tokens_twice(args, data, context):
    """repeats() of the arguments' length, on the device. ValueError where a context does not hold them."""
    length = args.length or max(1, min(64, (context - 2) // 2))
    if 2 * length + 1 > context:
        raise ValueError(f"--length={length}: the separator and so many tokens twice are more than "
                         f"a context of {context:,}")
    alphabet, rng = common_tokens(data.tokens(args.split)), np.random.default_rng(args.seed)
    return torch.from_numpy(repeats(alphabet, length, args.samples, data.separator, rng)).to(args.device)


def typical_scores(ids):
    """{pattern: [the score of attention that is the same for all keys, of attention on it alone]}."""
    found = {}
    for name, pattern in PATTERNS.items():
        patterns = [pattern(row) for row in ids.cpu()]
        scores = [share_on(torch.stack(typical_maps(each)), each).tolist() for each in patterns]
        found[name] = np.mean(scores, 0).tolist()
    return found


def rows_of(ckpt, ids):
    """What is written of a checkpoint: the scores of each head, and the nats of the random tokens."""
    half = ids.size(1) // 2
    scores, nats = pattern_scores(ckpt.model, ids)
    finite(nats, ckpt)
    rows = [dict(layer=layer, head=head, **{name: t_interval(each[:, i]) for name, each in scores.items()})
            for i, (layer, head) in enumerate(all_heads(ckpt.model))]
    return dict(heads=rows, nats_first=t_interval(nats[:, :half].mean(1)),
                nats_again=t_interval(nats[:, half:].mean(1)))


def probe(args):
    """What each head looks at: the token before, copies, what followed them."""
    ckpts, data, context = open_checkpoints(args, args.context)
    ids = random_tokens_twice(args, data, context)
    typical, rows = typical_scores(ids), [rows_of(ckpt, ids) for ckpt in ckpts]
    cells = [(what, "", "", *(f"{typical[name][i]:.3f}" for name in PATTERNS))
             for i, what in enumerate(("if alike to all keys", "if on that alone"))]
    cells += [(ckpt.name, r["layer"], r["head"], *(plus_minus(r[name], 3, sign=False) for name in PATTERNS))
              for ckpt, row in zip(ckpts, rows) for r in row["heads"]]
    lines = [f"{about_text(data, args)}: {args.samples} x {ids.size(1) // 2:,} random tokens twice",
             table(("run", "block", "head", *PATTERNS), cells)]
    for ckpt, row in zip(ckpts, rows):
        lines.append(f"{ckpt.name}: {plus_minus(row['nats_first'], 3, False)} nats per random token, "
                     f"{plus_minus(row['nats_again'], 3, False)} where it comes again")
    return numbers_of(ckpts, data, args, rows) | dict(typical=typical), lines


def main(argv):
    ask("detectors", probe, "val", argv,
        context=CONTEXT,
        samples=(positive, 32, "sequences of random tokens"),
        length=(positive, None, "random tokens before they come again (default: 64, or what fits)"))
