"""
What does a head look at? Attention on random tokens that come twice, and on text with a needle.

On the tokens that come twice: the token before, earlier copies of the token, what followed them (induction),
as transformer_lens.head_detector scores attention. On text with a planted needle, which begins again at the
end: how often its next token is what the head looks at most (at needle), and also what the model says
(retrieval, arXiv 2404.15574). Random tokens are the frequent ones of the split, each as likely.
"""

import numpy as np
import torch

from nanoheads.common import table
from nanoheads.heads.detectors import (PATTERNS, common_tokens, needles, pattern_scores, repeats,
                                       retrieval_scores, similarity, typical_maps)
from nanoheads.heads.measuring import all_heads
from nanoheads.heads.pictures import draw_head_scores
from nanoheads.intervals import t_interval
from nanoheads.probes.runs import about_text, finite, numbers_of, open_runs, picture_path, plus_minus


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
    """{detector: [its score where attention is the same for all keys, where it is on the pattern alone]}."""
    scores = {name: [] for name in PATTERNS}
    for ids in twice.cpu():
        for name, pattern in PATTERNS.items():
            maps = torch.stack(typical_maps(pattern(ids)))
            scores[name].append(similarity(maps, pattern(ids), args.measure, args.exclude).tolist())
    return {name: np.mean(each, 0).tolist() for name, each in scores.items()}


def rows_of(run, twice, texts, begins, size, asked, args):
    """What is written of a run: scores of each head, nats of random tokens, share of needles it outputs."""
    half = twice.size(1) // 2
    scores, nats = pattern_scores(run.model, twice, args.measure, args.exclude)
    finite(nats, run)
    *of_needle, output = retrieval_scores(run.model, texts, begins, size, asked)
    scores.update(zip(NEEDLE, of_needle))
    rows = [dict(layer=layer, head=head, **{name: t_interval(each[:, i]) for name, each in scores.items()})
            for i, (layer, head) in enumerate(all_heads(run.model))]
    return dict(heads=rows, nats_first=t_interval(nats[:, :half].mean(1)),
                nats_again=t_interval(nats[:, half:].mean(1)), said=t_interval(output))


def detector_table(runs, rows, typical):
    """A line for each head of each run, above them what attention of two kinds would score."""
    detectors = *PATTERNS, *NEEDLE
    cells = [(what, "", "", *(f"{typical[name][i]:.3f}" for name in PATTERNS), "", "")
             for i, what in enumerate(("if alike to all keys", "if on that alone"))]
    cells += [(run.name, r["layer"], r["head"], *(plus_minus(r[name], 3, sign=False) for name in detectors))
              for run, row in zip(runs, rows) for r in row["heads"]]
    return table(("run", "block", "head", *detectors), cells)


def probe(args):
    """What each head looks at: the token before, copies, what followed them, a needle."""
    picture = picture_path(args.picture) if args.picture else None
    runs, data, context = open_runs(args, args.context)
    twice, texts, begins, size = detector_tokens(args, data, context)
    typical, asked = typical_scores(twice, args), max(1, size // 3)
    rows = [rows_of(run, twice, texts, begins, size, asked, args) for run in runs]
    above = [f"{about_text(data, args)}: {args.samples} x {twice.size(1) // 2:,} random tokens twice; "
             f"{args.samples} texts of {context:,} with a needle of {size}, {asked} of which ask for the "
             "others"]
    below = [f"{run.name}: {plus_minus(row['nats_first'], 3, False)} nats per random token, "
             f"{plus_minus(row['nats_again'], 3, False)} where it comes again; "
             f"says {plus_minus(row['said'], 2, False)} of a needle" for run, row in zip(runs, rows)]
    lines = [*above, detector_table(runs, rows, typical), *below]
    if picture:
        drawn = [(run.name, run.model, row["heads"]) for run, row in zip(runs, rows)]
        ends = {name: ends if args.measure == "abs" else (0, ends[1]) for name, ends in typical.items()}
        draw_head_scores(drawn, ends | dict.fromkeys(NEEDLE, (0, 1)), picture)
        lines.append(args.picture)
    return numbers_of(runs, data, args, rows) | dict(typical=typical), lines
