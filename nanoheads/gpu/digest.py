"""What a check's result follows from, as one hash: the code of its model, its flags, how it is compiled."""

import ast
import functools
import hashlib
import json
import re

from nanoheads.common import ROOT
from nanoheads.gpu.entries import MUON, NANOGPT, TRAINING, attention, settings
from nanoheads.gpu.environment import HERE, TORCH
from nanoheads.study import fingerprint
from nanoheads.study.fingerprint import code_of, model_names, on_mechanisms, own_flags

# the Trainer's part in a training step
TRAINER = {f"Trainer.{name}" for name in ("__init__", "freeze", "zero_grad", "backward", "judged_by")}
TRAINER |= {"CastWeights", "precision"}
OWN = ("fake.py", "steps.py")  # of this folder: how it is compiled


@functools.cache
def recipe():
    """How it is compiled: torch, the patches of it, the card that is reported."""
    runtime = re.sub(r"/\*.*?\*/", "", (HERE / "fake_runtime.c").read_text(encoding="utf-8"), flags=re.S)
    own = [fingerprint.Bare((), ()).visit(node) for name in OWN
           for node in ast.parse((HERE / name).read_text(encoding="utf-8")).body]
    return [TORCH, " ".join(runtime.split()), *(ast.unparse(node) for node in own if node)]


def kernels_of(check):
    """(kernels that a check comes to beyond those named for its model, those of them that it does not)."""
    decoding = {"attend_selected", "attend_in_rows"}
    if check.kind == "eval":  # traces take row statistics in every model
        return set(fingerprint.ROW_STATISTICS), decoding | {"ChunkedCrossEntropy"}
    uses, left = attention(check.entry), decoding
    left = left if uses.packed else left | {"attend_packed"}
    left = left if any(uses) else left | set(fingerprint.FLEX)
    whole = not settings(check).loss_chunks and check.kind != "bytes"
    return set(), left | {"ChunkedCrossEntropy"} if whole else left


def names_of(check):
    """The definitions that a check's result follows from."""
    if check.entry == MUON:
        return {*fingerprint.MUON} - {"Muon"}
    more, left = kernels_of(check)
    names = (model_names(settings(check)) | more) - left
    return names | ({"precision"} if check.kind == "eval" else TRAINER)


def digest(check, root=ROOT):
    """A check's hash: it changes where the result may."""
    parts = [*check, *recipe()]
    if check.entry != NANOGPT:
        parts += code_of(root, names_of(check))
    if check.entry not in (MUON, NANOGPT):
        config = settings(check)
        parts += [*on_mechanisms(config), json.dumps(own_flags(config), sort_keys=True, default=str),
                  TRAINING.get(check.entry)]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
