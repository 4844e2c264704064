"""
What kind of head is it? Its attention beside patterns that the field has names for; and what heads do on a
text as arrays, for other tools. probe.py detectors and probe.py arrays print and write it.

previous token   looks at the token before
duplicate token  at earlier copies of the token
induction        at what came after earlier copies of the token
retrieval        copies a needle out of a text (Wu et al., arXiv 2404.15574)

The first three are patterns of 0 and 1 that follow from the tokens; how much of a head's attention lies on
one is measured as transformer_lens.head_detector does it.
"""

import numpy as np
import torch
from torch.nn import functional as F

from nanoheads.heads.measuring import all_heads, attentions, evaluating, inputs_of, out_projections
from nanoheads.training.scoring import nats_of

FLOATS = 1 << 26  # of attention maps that are held at once


# ---- maps ----

@torch.no_grad()
def attention_maps(model, ids):
    """(logits [B, T, V], [attention weights [B, heads, T, T] a block]) of ids [B, T]."""
    with evaluating(model):
        output = model(ids, traces="maps")
    return output.logits, [output.traces[f"blocks.{i}.map"] for i in range(model.config.n_layer)]


# ---- patterns ----

def previous_token(ids):
    """Pattern [T, T] of ids [T]: 1 where such a head looks from a token (row) at a key (column), else 0."""
    return torch.ones(len(ids) - 1).diag(-1)


def duplicate_token(ids):
    return (ids[:, None] == ids).float().tril(-1)


def induction(ids):
    return F.pad(duplicate_token(ids)[:, :-1], (1, 0))


PATTERNS = {"previous token": previous_token, "duplicate token": duplicate_token, "induction": induction}
MEASURES = ("mul", "abs")
EXCLUDED = ("first", "self")


def similarity(maps, pattern, measure="mul", exclude=()):
    """How much attention maps [..., T, T] are like a pattern [T, T]: float64 [...].

    mul: the share of all attention that lies on the pattern. abs: 1 minus the mean over rows of
    sum |map - pattern|, to three decimals; 1 where they are equal. exclude: leave out attention to the first
    token, and to the token itself. NaN where nothing is left to take a share of.
    """
    T = len(pattern)
    out = torch.zeros(T, T, dtype=torch.bool, device=maps.device)
    if "first" in exclude:
        out[:, 0] = True
    if "self" in exclude:
        out.fill_diagonal_(True)
    maps, pattern = maps.double(), pattern.to(maps.device).double()
    if measure == "mul":
        maps = maps.masked_fill(out, 0.0)
        return (maps * pattern).sum((-2, -1)) / maps.sum((-2, -1))
    off = (maps - pattern).abs().masked_fill(out, 0.0)
    return 1 - (off.sum((-2, -1)) / T).round(decimals=3)


def typical_maps(pattern):
    """(attention that is the same for all keys, attention that is on the pattern alone), [T, T] each.

    Where the pattern has nothing for a token, the second looks at the first token.
    """
    alike = torch.ones_like(pattern).tril()
    first = torch.zeros_like(pattern)
    first[:, 0] = 1.0
    perfect = torch.where(pattern.any(-1, keepdim=True), pattern, first)
    return alike / alike.sum(-1, keepdim=True), perfect / perfect.sum(-1, keepdim=True)


# ---- tokens to look at ----

def common_tokens(tokens, share=0.99):
    """The most frequent tokens of a text that make up `share` of it, in order of their numbers."""
    count = np.bincount(tokens)
    order = np.argsort(-count, kind="stable")
    enough = np.searchsorted(np.cumsum(count[order]), share * len(tokens)) + 1
    return np.sort(order[:enough])


def repeats(alphabet, n, samples, separator, rng):
    """Token ids [samples, 1 + 2 n]: the corpus separator, n random tokens of an alphabet, the same again."""
    half = rng.choice(alphabet, (samples, n))
    return np.concatenate((np.full((samples, 1), separator), half, half), 1).astype(np.int64)


def needles(text, alphabet, context, n, samples, rng):
    """(ids [samples, context], where the needle begins [samples]).

    A needle of n random tokens, no two alike where the alphabet has as many, is planted into real text at a
    random place; the text ends in all but its last token.
    """
    ids, at = [], rng.integers(context - 2 * n + 2, size=samples)
    for place in at:
        start = rng.integers(len(text) - context + 1)
        rest = text[start:start + context - 2 * n + 1]
        needle = rng.choice(alphabet, n, replace=len(alphabet) < n)
        ids.append(np.concatenate((rest[:place], needle, rest[place:], needle[:-1])))
    return np.array(ids).astype(np.int64), at


# ---- scores ----

def split(model, ids, *more):
    """Tuples of a few rows of ids [B, T] and of each of `more` [B, ...], as many as maps may be held of."""
    rows = max(1, FLOATS // max(1, len(all_heads(model)) * ids.size(1) ** 2))
    return zip(*(each.split(rows) for each in (ids, *more)))


def pattern_scores(model, ids, measure="mul", exclude=()):
    """({name of PATTERNS: [B, heads of all blocks]}, nats of each token but the first [B, T - 1]).

    ids [B, T] on the model's device; see similarity().
    """
    scores, nats = {name: [] for name in PATTERNS}, []
    for rows, in split(model, ids):
        logits, maps = attention_maps(model, rows)
        nats.append(nats_of(logits[:, :-1], rows[:, 1:]))
        rows, maps = rows.cpu(), [p.cpu() for p in maps]
        for row, tokens in enumerate(rows):
            for name, pattern in PATTERNS.items():
                each = [similarity(p[row], pattern(tokens), measure, exclude) for p in maps]
                scores[name].append(torch.cat(each).numpy())
    return {name: np.stack(each) for name, each in scores.items()}, np.concatenate(nats)


def retrieval_scores(model, ids, at, n, asked):
    """(copied, looked at [B, heads of all blocks]; output [B]): shares of a needle's last n - asked tokens.

    ids [B, T], at [B]: as of needles(). A head looks at the needle where its attention is highest there, at
    the token that comes next; it copies where that token is also the model's likeliest. In the source a model
    goes on from its own output, and a text counts where that holds enough of the needle; here it goes on from
    the needle's own tokens, so that a mistake does not end it. Without a mistake the score is the source's.
    """
    found, n_answer = [], n - asked
    for rows, begin in split(model, ids, at):
        logits, maps = attention_maps(model, rows)
        needle = begin[:, None] + torch.arange(n, device=rows.device)
        answer = rows.gather(1, needle)[:, asked:]
        output = logits[:, -n_answer:].argmax(-1) == answer
        best = torch.cat([p[:, :, -n_answer:].argmax(-1) for p in maps], 1)  # (B, heads, n_answer)
        token = rows[:, None].expand(-1, best.size(1), -1).gather(2, best)
        inside = (best >= needle[:, :1, None]) & (best <= needle[:, -1:, None])
        looks = inside & (token == answer[:, None])
        copies = looks & output[:, None]
        found.append([each.float().mean(-1).cpu().double() for each in (copies, looks, output)])
    return [torch.cat(part).numpy() for part in zip(*found)]


# ---- arrays for other tools ----

# array -> (its axes, what it holds); heads go by their original numbers, and where one is gone are zeros
ARRAYS = {
    "tokens": ("T", "the text, token by token, as labels"),
    "ids": ("T", "the same as numbers"),
    "present": ("layers, heads", "whether there is such a head"),
    "attention": ("layers, heads, T, T", "what each token reads of each before it"),
    "z": ("layers, heads, T, head size", "what each head puts out, its gates included"),
    "bias": ("layers, n_embd", "of the output projections"),
    "result": ("layers, heads, T, n_embd", "what of it joins the residual stream"),
}


def head_arrays(model, ids, results=False):
    """{name of ARRAYS: array} of ids [T], without the tokens' labels; `result` only where it is wanted.

    Results of all heads and the bias add up to what attention puts into the residual stream.
    """
    layers = attentions(model)
    groups = []  # heads that share an output projection
    for layer, attn in enumerate(layers):
        ids_of = attn.head_ids, attn.all_head_ids()[attn.n_head:]
        groups += [(layer, out, heads) for out, heads in zip(out_projections(attn), ids_of)]
    with inputs_of([out for _, out, _ in groups]) as ys:
        _, maps = attention_maps(model, ids[None])
    shape = len(layers), max(attn.n_base + attn.n_extra for attn in layers)
    T, C = len(ids), model.config.n_embd
    present = np.zeros(shape, bool)
    attention = np.zeros((*shape, T, T), np.float32)
    z = np.zeros((*shape, T, max(attn.head_size for attn in layers)), np.float32)
    bias = np.zeros((len(layers), C), np.float32)
    result = np.zeros((*shape, T, C), np.float32) if results else None
    for layer, attn in enumerate(layers):
        present[layer, attn.all_head_ids()] = True
        attention[layer, attn.all_head_ids()] = maps[layer][0].float().cpu()
        if attn.c_proj.bias is not None:
            bias[layer] = attn.c_proj.bias.detach().float().cpu()
    for (layer, out, heads), y in zip(groups, ys):
        D = layers[layer].head_size
        y = y[0].view(T, len(heads), D).transpose(0, 1)
        z[layer, heads, :, :D] = y.float().cpu()
        if results:
            weight = out.weight.detach().view(C, len(heads), D)
            result[layer, heads] = torch.einsum("htd,chd->htc", y, weight).float().cpu()
    arrays = dict(ids=ids.cpu().numpy(), present=present, attention=attention, z=z, bias=bias)
    return {**arrays, "result": result} if results else arrays
