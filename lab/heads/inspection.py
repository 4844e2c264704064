"""
Change the heads of a checkpoint by hand, see what that costs, and save the changed model.

    python -m lab.probe inspect --ckpt out/a                                    # a table of the heads
    python -m lab.probe inspect --ckpt out/a --set gate.0.3=0 --set state.1.2=withdrawn --prune 0.1 0.2
    python -m lab.probe inspect --ckpt out/a --set unet_skips=False --save out/b    # writes out/b/best.pt

A head is named block.number, as in the table. Bits per byte are given before and after the change, on the
same text, and the table shows the heads after it. A gate that was set by hand is no part of a checkpoint, so
--save multiplies it into the head's output projection. Compare what the two models write with
`python sample.py --ckpt out/a --ckpt out/b`.
"""

import argparse
import math
import re
from pathlib import Path

from nanoheads import checkpoint, own_mechanism, scoring
from nanoheads.common import (ArgumentParser, UserError, last_words, pick_device, say, table, writable,
                              write_json)
from nanoheads.files import only_writer
from nanoheads.pruning import prune_heads
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


def inspect(args):
    """Change a checkpoint as the arguments say; print what that costs, the heads, and what was written."""
    path, device = args.ckpt[0], pick_device(args.device)
    out = writable(args.json) if args.json else None
    written = free_path(args.save) if args.save is not None else None
    read, loaded, data = scoring.load(path, args.split, 0, device, args.dataset)
    model = checkpoint.build(read, path, device, args.settings)
    prune(model, args.prune)

    # bits per byte before and after, on the same windows
    tokens, T = data.tokens(args.split), loaded.config.block_size
    cuts = scoring.windows_of(data, args.split, T, 0, args.tokens)
    n_bytes, _ = scoring.text_size(data, args.split, cuts)

    def bits_per_byte(each):
        nats, _ = scoring.score(each, data, args.split, max_tokens=args.tokens)
        return scoring.bits(nats, n_bytes)

    before, after = bits_per_byte(loaded), None
    if not math.isfinite(before):
        raise UserError(f"{path} gives {before} bits/byte on {args.split}: "
                        "its weights are damaged, or its training diverged")
    scored = sum(n for *_, n in cuts)
    lines = [f"{path}: {before:.4f} bits/byte on {scored:,} tokens of {data.meta['name']}, {args.split}"]
    if args.settings or args.prune:
        after = bits_per_byte(model)
        if not math.isfinite(after):
            raise UserError(f"the change makes {after} bits/byte")
        changes = [*args.settings, *([f"without {', '.join(args.prune)}"] if args.prune else [])]
        lines.append(f"{', '.join(changes)}: {after:.4f} bits/byte ({after - before:+.4f})")

    x, y = fixed_text(data, args.split, T, min(METRIC_TOKENS, len(tokens) - 1))
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
        write_json(out, dict(ckpt=path, dataset=data.meta["name"], split=args.split, tokens=scored,
                             set=args.settings, prune=args.prune, bpb=before, bpb_after=after,
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
