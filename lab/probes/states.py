"""
Do states follow how hard the text is? Heads are measured on pieces of text, beside the loss.

Counted are those that agency's policy would call overloaded, misaligned or idle at its default thresholds.
"""

import numpy as np
import torch

from nanoheads.common import UserError, plural, table
from nanoheads.config import ControllerConfig
from nanoheads.intervals import t_interval
from nanoheads.timing import progress_bar
from lab.heads.measuring import even_starts, ids_at, measure, nats_on
from lab.heads.states import conditions
from lab.probes.heads import in_words, spearman_tests
from lab.probes.shared import (CONTEXT, about_text, ask, finite, numbers_of, open_checkpoints, plus_minus,
                               positive)


STATES = ("largest", "overloaded", "misaligned", "idle")


def states_on(model, x, y):
    """{what: number} of x, y [B, T]: the loss, the largest share sent, heads in each state of the policy.

    A withdrawn head sends nothing, so that it may count as idle.
    """
    found = measure(model, x, y)
    # 1: the mean of its layer's heads at work, as for the policy
    sent = torch.cat([each / each[gate > 0].mean().nan_to_num(1.0)
                      for each, gate in zip(found["utilisation"], found["gate"])])
    mean = dict(load=sent, **{name: torch.cat(found[name]) for name in ("entropy", "conflict")})
    count = {state: holds.sum().item() for state, holds in conditions(mean, ControllerConfig()).items()}
    return dict(nats=nats_on(model, x, y), largest=sent.max().item(), overloaded=count["overloaded"],
                misaligned=count["misaligned"], idle=count["withdrawn"])


def probe(args):
    """Heads that agency would call overloaded, misaligned or idle, beside the loss."""
    ckpts, data, context = open_checkpoints(args, args.context)
    tokens, size = data.tokens(args.split), args.windows * context
    if len(tokens) < args.pieces * size + 1 or args.windows < 2 or args.pieces < 3:
        raise UserError(f"--pieces {args.pieces} (at least 3) of {args.windows} windows (at least 2) of "
                        f"{context:,}: {args.split} has {len(tokens):,} tokens")
    texts = ids_at(tokens, even_starts(tokens, args.pieces, size), size + 1).to(args.device)
    rows, cells, below = [], [], []
    with progress_bar(len(ckpts) * len(texts), "states") as progress:
        for ckpt in ckpts:
            pieces = []
            for ids in texts:
                pieces.append(states_on(ckpt.model, ids[:-1].view(-1, context), ids[1:].view(-1, context)))
                progress.update(1)
            by = {key: np.array([piece[key] for piece in pieces]) for key in pieces[0]}
            tests = spearman_tests(finite(by["nats"], ckpt), {key: by[key] for key in STATES})
            rows.append(dict(pieces=pieces, spearman=tests))
            cells += [(ckpt.name, *third) for third in thirds(by)]
            n = plural(len(texts), "piece")
            below.append(f"{ckpt.name}, Spearman with the loss, n = {n}: {in_words(tests)}")
    above = [f"{about_text(data, args)}: {plural(len(texts), 'piece')} of {size:,} tokens"]
    head = ("run", "pieces", "n", "nats", "largest share", "overloaded", "misaligned", "idle")
    return numbers_of(ckpts, data, args, rows), [*above, table(head, cells, left=2), *below]


def thirds(by):
    """The cells of the easiest, the middle and the hardest pieces, of {what: numbers of the pieces [n]}."""
    for third, part in zip(("easiest", "middle", "hardest"), np.array_split(by["nats"].argsort(), 3)):
        yield (third, len(part), f"{by['nats'][part].mean():.3f}",
               *(plus_minus(t_interval(by[key][part]), 2, sign=False) for key in STATES))


def main(argv):
    ask("states", probe, "val", argv,
        context=CONTEXT,
        pieces=(positive, 64, "pieces of text, evenly spaced"),
        windows=(positive, 4, "windows in a piece, one after the other"))
