"""
What does it save and cost to skip constraint heads whose router gate stays low (constraint_skip)?

By threshold: how many heads are closed, bits per byte, the time of scoring a window and of writing a context.
"""

import copy

import torch

from nanoheads.common import UserError, table
from nanoheads.scoring import score_windows
from nanoheads.timing import take_turns, time_rows
from lab.heads.measuring import attentions, in_float64
from lab.probes.constraints.setup import numbers_of_setup, open_setup, windows_of_split
from lab.probes.shared import CONTEXT, about_text, ask, positive


def at_threshold(model, below):
    """A copy that skips constraint heads whose gate is below a threshold."""
    model = copy.deepcopy(model).eval()
    for attn in attentions(model):
        if attn.constraint is not None:
            attn.constraint.skip = below
    return model


@torch.no_grad()
def closed_shares(model, ids, below):
    """(share of windows x heads, of tokens x heads) with gates below a threshold, of ids [B, T]."""
    traces = model(ids, traces=True).traces
    low = torch.cat([each for key, each in traces.items() if key.endswith("router_gates")], -1) < below
    return in_float64(low.all(1)).mean().item(), in_float64(low).mean().item()


def probe(args):
    """What skipping closed constraint heads saves and costs, threshold by threshold, beside computing all."""
    if not all(0 < below <= 1 for below in args.below):
        raise UserError(f"--below={' '.join(map(str, args.below))} must be above 0 and at most 1")
    setup, rows = open_setup(args), []
    if setup.ckpts[0].model.config.constraint_gate != "output":
        raise UserError("skip is for models whose router gates outputs; a gate elsewhere turns no head off")
    ids = windows_of_split(setup, args, args.batch)
    for ckpt in setup.ckpts:
        models = {"all": at_threshold(ckpt.model, 0.0)} | {b: at_threshold(ckpt.model, b) for b in args.below}

        def write(below):
            models[below].generate(ids[:1, :1], setup.context - 1, temperature=0)

        def score_ids(below):
            with torch.no_grad():
                models[below].hidden(ids)

        times = {what: {row["name"]: row for row in time_rows(what, take_turns(models, act, args, what),
                                                              "all", ids.numel(), 1)}
                 for what, act in (("a window", score_ids), ("decoding", write))}
        for below, model in models.items():
            windows, each = (0.0, 0.0) if below == "all" else closed_shares(models["all"], ids, below)
            row = dict(run=ckpt.name, below=below, windows=windows, tokens=each,
                       bpb=score_windows(model, setup.data, args.split, args.tokens)[1]["bpb"])
            for what, found in times.items():
                row[what] = [found[below][key] for key in ("time_ratio", "time_ratio_low", "time_ratio_high")]
            rows.append(row)
    cells = [(row["run"], row["below"], f"{row['windows']:.3f}", f"{row['tokens']:.3f}", f"{row['bpb']:.4f}",
              *("{:.3f} [{:.3f}, {:.3f}]".format(*row[what]) for what in ("a window", "decoding")))
             for row in rows]
    line = (f"{about_text(setup.data, args)}; closed: share of windows x heads, of tokens x heads; "
            f"times over computing all heads, {args.rounds} rounds in turns, {len(ids)} windows at once")
    head = ("run", "skipped below", "windows closed", "tokens closed", "bits/byte", "a window", "decoding")
    return numbers_of_setup(setup, args, dict(rows=rows)), [line, table(head, cells)]


def main(argv):
    ask("constraints skip", probe, "test", argv,
        context=CONTEXT,
        below=(float, [0.5, 0.9], "gates that count as closed"),
        batch=(positive, 16, "windows at once"),
        rounds=(positive, 9, "of timing"),
        tokens=(int, 262_144, "to score; 0: all"))
