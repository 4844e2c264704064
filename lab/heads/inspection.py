"""
Change the heads of a checkpoint by hand, see what that costs, and save the changed model.

    python -m lab.probe inspect --ckpt out/a                                    # a table of the heads
    python -m lab.probe inspect --ckpt out/a --set gate.0.3=0 --set state.1.2=withdrawn --prune 0.1 0.2
    python -m lab.probe inspect --ckpt out/a --set unet_skips=False --save out/b    # writes out/b/best.pt

A head is named block.number, as in the table. Bits per byte are given before and after the change, on the
same text, of a checkpoint of a task what share of the answers is right, on the same rows; and the table shows
the heads after it. A gate that was set by hand is no part of a checkpoint, so
--save multiplies it into the head's output projection. Compare what the two models write with
`python sample.py --ckpt out/a --ckpt out/b`.
"""

import argparse
import math
import re
from pathlib import Path

from nanoheads import checkpoint, own_mechanism, scoring
from nanoheads.common import (ArgumentParser, UserError, last_words, pick_device, plural, say, table,
                              writable, write_json)
from nanoheads.files import only_writer
from nanoheads.pruning import prune_heads
from nanoheads.tasks import TaskData, rows_per_level, score_levels, summary
from lab.heads.measuring import METRICS, attentions, fixed_text, measure, measure_pieces
from lab.heads.states import find_violations
from lab.heads.surgery import fold_gates

PROGRAM = "probe.py inspect"
METRIC_TOKENS = 4096  # what the table is measured on, forward and backward
# the metrics of the table, and how each is written
SHOWN = {"entropy": ".3f", "importance": ".2e", "utilisation": ".3f", "gradient": ".2e", "conflict": "+.2f"}


# ---- what is done to a model ----

def prune(model, words):
    """Remove the heads that these words L.H name. UserError for a word that names none, or one that stays."""
    gone = {}
    for word in words:
        match = re.fullmatch(r"(\d+)\.(\d+)", word)
        if not match:
            raise UserError(f"--prune: {word!r} is no head; write block.number, as in 0.3")
        layer, head = int(match[1]), int(match[2])
        try:
            model.unit(layer, head)
        except ValueError as e:
            raise UserError(f"--prune: {e}") from None
        if head not in attentions(model)[layer].head_ids:
            raise UserError(f"--prune: {word} is a constraint head, which stays for its scores; "
                            f"--set gate.{word}=0 closes it")
        gone.setdefault(layer, set()).add(head)
    prune_heads(model, gone)


def folded(model):
    """A copy whose output projections hold the gates that were set by hand: the same logits.

    UserError for a head that runs by hand while its own gate is 0: no factor leads from there.
    """
    copied, stuck = fold_gates(model)
    for unit in stuck:
        gate = model.unit(unit.layer, unit.head).by_hand
        raise UserError(f"{unit.kind} {unit} is at {gate:g} by hand while its own gate is 0, "
                        f"which no checkpoint can hold; leave out gate.{unit}")
    return copied


def free_path(folder):
    """The best.pt to write into a folder. UserError where a run is there, or no folder is named."""
    if not folder.strip():
        raise UserError("--save is empty, as it is when a variable of the shell is not set")
    path = Path(folder.strip()).expanduser() / "best.pt"
    if taken := [p for p in (path, path.with_name("ckpt.pt")) if p.exists()]:
        raise UserError(f"{taken[0]} is there already; name another folder")
    return path


def save(path, model, read, meta, edits):
    """Write the model as a checkpoint. UserError where a checkpoint could not hold it."""
    state = {key: read[key] for key in ("dataset", "train", "step") if key in read}
    state.update(model=folded(model).state_dict(), config=model.config.flags(), meta=meta, edits=edits)
    device = model.transformer.wte.weight.device
    if not checkpoint.same_logits(checkpoint.build(state, path, device), model):
        raise UserError("a checkpoint of it would have other logits; nothing was written")
    with only_writer(path.parent):
        state.update(own_mechanism.held(model.config, path.parent))
        checkpoint.save(path, state)


# ---- what is reported ----

def rows_of(units, metrics):
    """A dict of each Unit: where it is, its state and consent under agency, its metrics, as of measure()."""
    rows = []
    for unit in units:
        row = dict(layer=unit.layer, **({} if unit.head is None else dict(head=unit.head)),
                   set_by_hand=unit.by_hand is not None)
        if unit.agency is not None:
            row.update(state=unit.state, consent=unit.consent)
        rows.append(row | {name: values[unit.layer][unit.i].item() for name, values in metrics.items()})
    return rows


def table_of(rows, places):
    """rows_of() as a table; places: {title: key} of the columns that say where it is."""
    consent, n = {True: "yes", False: "no", None: "-"}, len(places)
    metrics, cells = [name for name in SHOWN if name in rows[0]], []
    for row in rows:
        cells.append((*(row[key] for key in places.values()),
                      f"{row['gate']:.3f}" + (" ", "*")[row["set_by_hand"]],
                      row.get("state", "-"), consent[row.get("consent")],
                      *(f"{row[name]:{SHOWN[name]}}" for name in metrics)))
    return table((*places, "gate ", "state", "consent", *metrics), cells, left=(n + 1, n + 2))


def table_of_violations(violations):
    """A table of what has no consent and a gate that says that it is in use; "": there is none."""
    rows = [(v["layer"], v.get("head", v.get("scope")), v["type"], f"{v['gate']:.3f}", v["state"],
             f"{v['utilisation']:.3f}", v["last_signal"]) for v in violations]
    head = ("layer", "head", "without consent", "gate", "state", "utilisation", "last signal")
    return table(head, rows, left=(2, 4)) if rows else ""


UNITS = dict(bpb="bits/byte", right="right", nats="nats/answer")  # of what scorer() measures


def scorer(data, args, T):
    """(what is scored, in words, tokens of it, a function of a model to {key of UNITS: value})."""
    if isinstance(data, TaskData):
        rows = rows_per_level(data, args.tokens)

        def of_rows(model):
            found = summary(score_levels(model, data, args.split, rows))
            return dict(right=found["right"], nats=found["nats"])
        return f"{plural(rows, 'row')} of each level", rows * len(data.test_levels) * data.length, of_rows

    cuts = scoring.windows_of(data, args.split, T, 0, args.tokens)
    n_bytes, _ = scoring.text_size(data, args.split, cuts)

    def of_windows(model):
        nats, _ = scoring.score(model, data, args.split, max_tokens=args.tokens)
        return dict(bpb=scoring.bits(nats, n_bytes))
    scored = sum(n for *_, n in cuts)
    return f"{scored:,} tokens", scored, of_windows


def in_units(scores, before=None):
    """Scores as text; before: others, from which the differences are shown too."""
    return ", ".join(f"{value:.4f} {UNITS[key]}" + (f" ({value - before[key]:+.4f})" if before else "")
                     for key, value in scores.items())


def inspect(args):
    """Change a checkpoint as the arguments say; print what that costs, the heads, and what was written."""
    path, device = args.ckpt[0], pick_device(args.device)
    out = writable(args.json) if args.json else None
    written = free_path(args.save) if args.save is not None else None
    read, loaded, data = scoring.load(path, args.split, 0, device, args.dataset, task=True)
    model = checkpoint.build(read, path, device, args.settings)
    prune(model, args.prune)

    # before and after, on the same windows or rows
    scored, n_scored, score_of = scorer(data, args, loaded.config.block_size)
    before, after = score_of(loaded), {}
    if bad := [f"{value} {UNITS[key]}" for key, value in before.items() if not math.isfinite(value)]:
        raise UserError(f"{path} gives {bad[0]} on {args.split}: "
                        "its weights are damaged, or its training diverged")
    lines = [f"{path}: {in_units(before)} on {scored} of {data.meta['name']}, {args.split}"]
    if args.settings or args.prune:
        after = score_of(model)
        if bad := [f"{value} {UNITS[key]}" for key, value in after.items() if not math.isfinite(value)]:
            raise UserError(f"the change makes {bad[0]}")
        changes = [*args.settings, *([f"without {', '.join(args.prune)}"] if args.prune else [])]
        lines.append(f"{', '.join(changes)}: {in_units(after, before)}")

    most = METRIC_TOKENS
    if not isinstance(data, TaskData):
        most = min(most, len(data.tokens(args.split)) - 1)
    x, y = fixed_text(data, args.split, loaded.config.block_size, most)
    x, y = x.to(device), y.to(device)
    heads = rows_of([unit for unit in model.units() if unit.head is not None], measure(model, x, y))
    pieces = rows_of([unit for unit in model.units() if unit.head is None], measure_pieces(model, x, y))
    violations = find_violations(model)
    lines += ["", table_of(heads, {"layer": "layer", "head": "head"})]
    if pieces:
        lines += ["", table_of(pieces, {model.config.agency_scope: "layer"})]
    if any(row["set_by_hand"] for row in [*heads, *pieces]):
        lines.append("* set by hand")
    if violations:
        lines += ["", table_of_violations(violations)]
    if written:
        save(written, model, read, data.meta, dict(ckpt=str(path), set=args.settings, prune=args.prune))
        lines += ["", str(written)]
        for unit in model.units():
            if unit.by_hand is not None:
                where = "its output projection" if unit.head is not None else "its output projections"
                lines.append(f"gate {unit.by_hand:g} of {unit} is in {where} there")
    if out:
        scores = {name: value for key in before
                  for name, value in ((key, before[key]), (f"{key}_after", after.get(key)))}
        write_json(out, dict(ckpt=path, dataset=data.meta["name"], split=args.split, tokens=n_scored,
                             set=args.settings, prune=args.prune, **scores,
                             heads=heads, pieces=pieces, violations=violations,
                             written=str(written) if written else None))
        lines += ["", args.json]
    say(*lines)


# ---- command line ----

def arguments(argv):
    columns = table(("column", ""), METRICS.items(), left=2)
    p = ArgumentParser(prog=PROGRAM, description=__doc__, epilog=columns,
                       formatter_class=argparse.RawDescriptionHelpFormatter)
    checkpoint.add_arguments(p)
    p.add_argument("--prune", nargs="+", action="extend", default=[], metavar="L.H",
                   help="heads to remove, by block and number, as in 0.3")
    p.add_argument("--save", metavar="FOLDER", help="write the changed model to FOLDER/best.pt")
    p.add_argument("--split", default="val", help="train, val or test (default: val)")
    p.add_argument("--dataset", help="read this dataset, which must have the same vocabulary "
                                     "(default: the one trained on)")
    p.add_argument("--tokens", type=int, default=16384,
                   help="tokens to score, in evenly spaced windows; 0: all (default: 16,384)")
    p.add_argument("--json", help="write what is printed to this file as well")
    return p.parse_args(argv)


def main(argv=None):
    args = arguments(argv)
    with last_words(PROGRAM):
        if len(args.ckpt) > 1:
            raise UserError(f"--ckpt: one at a time, not {len(args.ckpt)}")
        if args.tokens < 0:
            raise UserError(f"--tokens={args.tokens} must not be negative")
        checkpoint.allow_code(args)
        inspect(args)
