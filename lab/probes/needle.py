"""
Does a fact far back help? Recall of a planted fact by context and depth.

A fact "[QZX4831]" is planted into real text at a depth (0: the beginning, 1: just before the question), the
text ends in "[QZX", and the four digits are scored, teacher forced. The control is the same text without the
fact: recall gain = bits of the answer in the control minus bits with the fact (13.3 is all there is). Train
on data/needle first: other text does not teach what the question means. Contexts beyond the training length
take rotary positions; ACAG's length and a window stay those of the training.
"""

import math

import numpy as np
import torch

from nanoheads.common import UserError, plural
from nanoheads.intervals import t_interval
from nanoheads.scoring import nats_of
from nanoheads.timing import progress_bar
from lab.probes.facts import DIGITS, digits_of, fact, names, question
from lab.probes.shared import (OVER, about_text, ask, beyond, finite, numbers_of, open_checkpoints,
                               plus_minus, positive, run_table)


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
                         control_nats_per_byte=float(nats[:, 0].mean()), gain_bits=t_interval(gain[:, i])))
    return gain, rows


def check(args):
    """ValueError for contexts and depths that no text can have."""
    if min(args.contexts) < 64:
        raise ValueError(f"--contexts: {min(args.contexts)} is too short for a fact and its question; "
                         "take at least 64")
    if not all(0 <= depth <= 1 for depth in args.depths):
        given = " ".join(f"{depth:g}" for depth in args.depths)
        raise ValueError(f"--depths: {given} must be from 0 (the beginning) to 1 (before the question)")


def rows_of(ckpts, ids, context, args, progress):
    """[[a dict for each depth] of each checkpoint], on the texts ids of one context, see haystacks()."""
    found, first = [], None
    for ckpt in ckpts:
        scored = answers(ckpt.model, ids.reshape(-1, context), progress)
        nats, right = (part.reshape(*ids.shape[:2], DIGITS) for part in scored)
        gain, depth_rows = recalled(finite(nats, ckpt), right)
        first = gain if first is None else first
        found.append([])
        for i, (depth, row) in enumerate(zip(args.depths, depth_rows)):
            over = None if ckpt is ckpts[0] else t_interval((gain - first)[:, i])
            found[-1].append(dict(context=context, depth=depth, samples=args.samples, **row,
                                  over_first=over, beyond_training=context > ckpt.trained))
    return found


COLUMNS = [  # of the table with a line for each context and depth, see run_table()
    ("context", lambda r: f"{r['context']:,}"),
    ("depth", lambda r: f"{r['depth']:g}"),
    ("nats/byte", lambda r: f"{r['nats_per_byte']:.3f}"),
    ("exact", lambda r: f"{r['exact']:.0%}"),
    ("control", lambda r: f"{r['control_nats_per_byte']:.3f}"),
    ("recall gain, bits", lambda r: plus_minus(r["gain_bits"], 2)),
    (OVER, lambda r: plus_minus(r["over_first"], 2)),
    ("", beyond),
]


def probe(args):
    """Recall of a planted fact by context and depth."""
    check(args)
    ckpts, data, _ = open_checkpoints(args, max(args.contexts))
    if data.meta["encoding"] != "byte":
        raise UserError(f"{data.dir} is {data.meta['encoding']}, not byte: the facts are bytes")
    text, rows = data.tokens(args.split).tobytes(), [[] for _ in ckpts]
    n_texts = args.samples * (1 + len(args.depths))
    with progress_bar(len(ckpts) * len(args.contexts) * n_texts, "needle") as progress:
        for context in args.contexts:
            ids = haystacks(text, args.split, context, args.depths, args.samples, args.seed)
            for own_rows, more in zip(rows, rows_of(ckpts, ids, context, args, progress)):
                own_rows += more
    what = (f"{about_text(data, args)}: {plural(args.samples, 'text')} a context, the same for all; "
            f"answers of {DIGITS} digits, teacher forced")
    return numbers_of(ckpts, data, args, rows), [what, run_table(ckpts, rows, COLUMNS)]


def main(argv):
    ask("needle", probe, "test", argv,
        contexts=(positive, [1024, 2048, 4096, 8192, 16384], "bytes, question and answer included"),
        depths=(float, [0.1, 0.5, 0.9], "where the fact is, from 0 to 1"),
        samples=(positive, 32, "texts for each context"))
