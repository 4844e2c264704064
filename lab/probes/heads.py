"""
Which heads can go? Entropy of a head's rows and gradient of its gate, beside the loss with its gate at 0.

    python -m lab.probe heads --ckpt out/a [--ckpt out/b ...] [--tokens 16384] [--json heads.json]

The table has a row for each head, constraint heads too:

entropy, nats               of its attention rows, mean over tokens: 0 where it reads one token
|d loss / d gate|           of one more factor on its output, at 1; mean over windows
loss change when off, nats  nats per token with that factor at 0, less those with all heads; above 0 the head
                            helps. The interval is over blocks of neighbouring windows

Below it stands how well entropy, gradient, and both together (the gradient's rank less the entropy's) order a
checkpoint's heads by that change: Spearman's rank correlation, and its p.
"""

import numpy as np
import torch
from scipy.stats import rankdata, spearmanr

from nanoheads.common import table
from nanoheads.scoring import score, window_ids, windows_of
from nanoheads.timing import progress_bar
from lab.heads.measuring import all_heads, attentions, closed, gates_by_hand
from lab.probes.intervals import over_windows
from lab.probes.shared import CONTEXT, about_text, ask, finite, numbers_of, open_checkpoints, plus_minus


# ---- windows ----

def window_text(data, split, start, end, device):
    """Inputs and targets, [end - start] each, of a window."""
    ids = torch.from_numpy(window_ids(data.tokens(split), data.first, start, end)).to(device)
    return ids[:-1], ids[1:]


def token_nats(ckpt, data, args):
    """Nats of every scored token, [n] float64. UserError where they are not finite."""
    nats = score(ckpt.model, data, args.split, max_tokens=args.tokens, per_token=True)
    return finite(nats.astype(np.float64), ckpt)


# ---- heads ----

def head_metrics(model, data, split, cuts, progress=None):
    """(entropy of its rows in nats, |d loss / d gate|) of every head, block by block, [heads] each: means.

    The gate is one set by hand, at 1.
    """
    device, layers, entropy, slope = next(model.parameters()).device, attentions(model), [], []
    gates = {layer: attn.c_proj.weight.new_ones(attn.n_total).requires_grad_()
             for layer, attn in enumerate(layers)}
    with gates_by_hand(model, gates):
        for start, end, _ in cuts:
            ids, targets = window_text(data, split, start, end, device)
            out = model(ids[None], targets[None], traces=True)
            grads = torch.autograd.grad(out.loss, list(gates.values()))
            rows = [out.traces[f"blocks.{i}.entropy"].detach()[0].mean(-1) for i in range(len(layers))]
            slope.append(torch.cat(grads).abs().cpu().double())
            entropy.append(torch.cat(rows).cpu().double())
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


def describe_tests(tests):
    """Those tests in words."""
    return ", ".join(f"{name} {t['rho']:+.2f} (p = {t['p']:.2g})" if t else f"{name} -"
                     for name, t in tests.items())


def rows_of(ckpt, data, args, cuts, progress):
    """What is written of a checkpoint: nats per token, a row for each head, ranks beside the loss change."""
    window = np.repeat(np.arange(len(cuts)), [end - start for start, end, _ in cuts])  # of each token
    whole_nats = token_nats(ckpt, data, args)
    entropy, slope = head_metrics(ckpt.model, data, args.split, cuts, progress)
    rows = []
    for (layer, head), e, g in zip(all_heads(ckpt.model), entropy, slope):
        change = without_head(ckpt.model, layer, head, data, args.split, args.tokens) - whole_nats
        rows.append(dict(layer=layer, head=head, entropy=float(e), gate_gradient=float(g),
                         change=over_windows(change, window, len(cuts))))
        progress.update(1)
    change = np.array([row["change"][0] for row in rows])
    metrics = {"entropy": entropy, "gate gradient": slope, "both ranks": rankdata(slope) - rankdata(entropy)}
    return dict(nats_per_token=float(whole_nats.mean()), heads=rows, n=len(rows),
                spearman=spearman_tests(change, metrics))


def probe(args):
    """Entropy and gate gradient of every head, beside what its absence costs."""
    ckpts, data, context = open_checkpoints(args, args.context)
    cuts = windows_of(data, args.split, context, 0, args.tokens)
    steps = sum(len(cuts) + len(all_heads(ckpt.model)) for ckpt in ckpts)
    with progress_bar(steps, "heads") as progress:
        rows = [rows_of(ckpt, data, args, cuts, progress) for ckpt in ckpts]
    lines_above = [f"{about_text(data, args)}: {sum(cut[2] for cut in cuts):,} tokens "
                   f"in {len(cuts):,} disjoint windows of {context:,}"]
    cells, lines_below = [], []
    for ckpt, row in zip(ckpts, rows):
        cells += [(ckpt.name, r["layer"], r["head"], f"{r['entropy']:.3f}", f"{r['gate_gradient']:.2e}",
                   plus_minus(r["change"])) for r in row["heads"]]
        lines_above.append(f"{ckpt.name}: {row['nats_per_token']:.4f} nats per token with all heads")
        lines_below.append(f"{ckpt.name}, Spearman with the loss change, n = {row['n']} heads: "
                           f"{describe_tests(row['spearman'])}")
    head = ("run", "block", "head", "entropy, nats", "|d loss / d gate|", "loss change when off, nats")
    return numbers_of(ckpts, data, args, rows), [*lines_above, table(head, cells), *lines_below]


def main(argv):
    ask("heads", probe, "val", argv,
        context=CONTEXT,
        tokens=(int, 16384, "tokens to score for each head, in evenly spaced windows; 0: all"))
