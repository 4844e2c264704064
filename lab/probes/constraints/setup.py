"""
What the probes of constraint heads read: checkpoints, plain GPTs, labels, and the parts of the text to fit
on, to choose on and to measure on; and what the models give for tokens of it.
"""

from os.path import relpath
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from model import ConstraintHeads
from nanoheads.common import ROOT, UserError
from nanoheads.dataset import Dataset
from nanoheads.timing import progress_bar
from lab.heads.measuring import attentions, ids_at, inputs_of
from lab.labels.targets import Targets, decode
from lab.probes.shared import CONTEXT, Checkpoint, about_text, finite, open_checkpoints, positive

HEADS = "constraint heads"  # as a scorer, beside prior and probes
# the arguments of what compares the heads with probes of hidden states
COMPARED = dict(
    context=CONTEXT,
    plain=dict(action="append", default=[], help="a plain GPT; may be repeated, as --ckpt"),
    labels=dict(required=True, help="a set in <dataset>/labels, or its folder"),
    fit=(positive, 200_000, "tokens to fit probes to, and as many to choose their weight decay on"),
    own=dict(action="store_true", help="probes on the constraint models' states as well"))


# ---- checkpoints, labels, text ----

class Part(NamedTuple):
    """Tokens first to last of a split."""
    split: str
    first: int
    last: int


class Setup(NamedTuple):
    """What is compared: checkpoints and plain GPTs, their data, blocks and names."""
    ckpts: list[Checkpoint]
    plain: list[Checkpoint]
    data: Dataset
    context: int
    layers: list[int]     # blocks whose constraint heads are measured
    names: list[str]      # that the heads are for and the labels have
    targets: Targets | None
    parts: list[Part]     # to fit on, to choose on, to measure on


def layers_of(model):
    """Blocks whose constraint heads are trained on labels: all that have some, or constraint_loss_layers."""
    blocks = ConstraintHeads.blocks(model.config)
    return sorted(blocks and model.config.constraint_loss_layers or blocks)


def branch_size(model):
    """Parameters of these blocks' constraint heads, with router and scorers."""
    return sum(p.numel() for i in layers_of(model) for p in attentions(model)[i].constraint.parameters())


def parts_of(data, split):
    """(Part to fit on, to choose on, to measure on). UserError for the training split."""
    if split == "train":
        raise UserError("--split train is what probes are fitted to; take test, or val")
    sizes = {s: len(data.tokens(s)) for s in ("train", "val", split)}
    if split == "val":
        half = sizes["val"] // 2
        return [Part("train", 0, sizes["train"]), Part("val", 0, half), Part("val", half, sizes["val"])]
    return [Part(s, 0, n) for s, n in sizes.items()]


def open_setup(args):
    """The Setup of a command line. UserError where its checkpoints do not belong together."""
    plain, labels = getattr(args, "plain", []), getattr(args, "labels", None)
    all_args = SimpleNamespace(**vars(args) | dict(ckpt=args.ckpt + plain))
    ckpts, data, context = open_checkpoints(all_args, args.context)
    ckpts, plain = ckpts[:len(args.ckpt)], ckpts[len(args.ckpt):]
    first = ckpts[0].model
    for ckpt in ckpts:
        if not layers_of(ckpt.model):
            raise UserError(f"{ckpt.name} has no constraint heads; --mechanism=constraint_a trains some")
        if [f(ckpt.model) for f in (names_of, layers_of, branch_size)] != \
                [f(first) for f in (names_of, layers_of, branch_size)]:
            raise UserError(f"{ckpt.name} and {ckpts[0].name} have other constraint heads: one at a time")
    layers, width = layers_of(first), first.config.n_embd
    for ckpt in plain:
        if layers_of(ckpt.model):
            raise UserError(f"--plain {ckpt.name} has constraint heads itself")
        if ckpt.model.config.n_embd != width or ckpt.model.config.n_layer <= layers[-1]:
            raise UserError(f"--plain {ckpt.name} is {ckpt.model.config.n_layer} blocks of "
                            f"{ckpt.model.config.n_embd}: a probe of as many inputs reads block {layers[-1]} "
                            f"of {width}")
    if len(plain) not in (0, 1, len(ckpts)):
        raise UserError(f"{len(plain)} --plain for {len(ckpts)} --ckpt: give none, one, or as many")
    if labels is None:
        return Setup(ckpts, plain, data, context, layers, names_of(first), None, [])
    targets = Targets(data, labels)
    names = [name for name in names_of(first) if name in targets.names]
    if not names:
        raise UserError(f"{ckpts[0].name} has heads for {', '.join(names_of(first))}, and "
                        f"{targets.dir} labels for {', '.join(targets.names)}")
    parts = parts_of(data, args.split)
    for name in names:  # what is missing shows before anything is read
        for part in parts:
            targets.codes(name, part.split)
    return Setup(ckpts, plain, data, context, layers, names, targets, parts)


def names_of(model):
    return list(model.config.constraint_names or [])


def starts_of(part, length, tokens=0):
    """First tokens [n] of whole windows of a part, evenly spaced; tokens: at most so many, 0: all."""
    count = (part.last - part.first) // length
    if not count:
        raise UserError(f"{part.last - part.first:,} tokens of {part.split} hold no window of {length:,}")
    n = min(count, max(1, tokens // length)) if tokens else count
    return part.first + length * (np.arange(n) * count // n)


def windows_of_split(setup, args, n):
    """The ids [n, context] of at most n whole windows of the split, evenly spaced."""
    tokens = setup.data.tokens(args.split)
    starts = starts_of(Part(args.split, 0, len(tokens)), setup.context, n * setup.context)
    return ids_at(tokens, starts, setup.context).to(args.device)


def labels_of(setup, split, starts, length):
    """float32 [windows * length, names]: a value in [0, 1], -1: unknown."""
    columns = [np.stack([setup.targets.codes(name, split)[s:s + length] for s in starts])
               for name in setup.names]
    return decode(np.stack(columns, -1)).flatten(0, 1)


def two_classes(y, name, part):
    """y, if it is of two classes. UserError."""
    if not y.any() or y.all():
        raise UserError(f"{name}: what is read of {part.split} is of one class only "
                        f"({len(y):,} labelled, {int(y.sum()):,} positive)")
    return y


# ---- what models give for tokens ----

@torch.no_grad()
def read_scores(model, ids, layers):
    """(states [B, T, layers * C], scores [B, T, names]) of ids [B, T].

    States are what the attention of these blocks reads: the residual stream that enters them, normed. Scores
    are logits, the mean over layers_of(model); a model without such heads has no names.
    """
    with inputs_of([attentions(model)[i] for i in layers]) as inputs:
        predictions = model.predictions(ids)
    name_logits = [torch.stack([predictions[f"blocks.{i}.constraint.{name}"] for i in layers_of(model)])
                   for name in names_of(model)]
    scores = ids.new_empty(*ids.shape, 0)
    if name_logits:
        scores = torch.stack([logits.mean(0) for logits in name_logits], -1)
    states = torch.cat(inputs, -1) if layers else ids.new_empty(*ids.shape, 0)
    return states.float(), scores.float()


@torch.no_grad()
def outputs(ckpt, setup, split, starts, length, takers):
    """{name: float32 [windows, ...]}: what each taker(states, scores) makes of the windows. UserError: NaN.
    """
    device, tokens = next(ckpt.model.parameters()).device, setup.data.tokens(split)
    rows = max(1, (4096 if device.type == "cpu" else 65536) // length)
    results = {name: [] for name in takers}
    for first in progress_bar(range(0, len(starts), rows), f"{ckpt.name}, {split}"):
        ids = ids_at(tokens, starts[first:first + rows], length).to(device)
        states, scores = read_scores(ckpt.model, ids, setup.layers)
        for name, take in takers.items():
            results[name].append(take(states, scores).cpu())
    results = {name: torch.cat(parts) for name, parts in results.items()}
    for name, parts in results.items():
        finite(parts.numpy(), ckpt, f"for {name}")
    return results


# ---- output ----

def about_setup(setup, args):
    """What was measured, on which labels, by how many checkpoints."""
    weak = " (weak: unchecked)" if setup.targets.meta.get("weak") else ""
    n = len(setup.ckpts)
    checkpoints_note = f"; {n} checkpoints, mean and t interval" if n > 1 else ""
    half = ", second half" if args.split == "val" else ""
    return (f"{about_text(setup.data, args)}{half}: labels {setup.targets.dir.name}{weak}; "
            f"block {', '.join(map(str, setup.layers))}, windows of {setup.context:,}{checkpoints_note}")


def numbers_of_setup(setup, args, results):
    """What --json writes: every number, intervals as [value, low, high]."""
    options = {key: value for key, value in vars(args).items() if key not in ("json", "what", "picture")}
    labels = setup.targets and dict(folder=relpath(setup.targets.dir, ROOT), splits=setup.targets.splits,
                                    weak=setup.targets.meta.get("weak"))
    return dict(what=args.what, dataset=setup.data.meta["name"], layers=setup.layers, context=setup.context,
                split_sha256=setup.data.splits[args.split].get("sha256"), labels=labels, options=options,
                runs=[ckpt.name for ckpt in setup.ckpts], plain=[ckpt.name for ckpt in setup.plain],
                **results)
