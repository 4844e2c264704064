"""What a check's result follows from, as one hash: the code of its model, its flags, how it is compiled."""

import functools
import hashlib
import json
import re

from model import MECHANISM_CLASSES
from nanoheads.common import ROOT
from nanoheads.gpu.entries import MUON, NANOGPT, TRAINING, settings
from nanoheads.gpu.environment import HERE, TORCH
from nanoheads.study.digest import digest_of, off_classes, own_flags

MODEL = ("model.py", "nanoheads/training/optim.py")  # the model, and what a step does with it
COMPILING = ("nanoheads/gpu/fake.py", "nanoheads/gpu/steps.py")  # how it is compiled without a card


@functools.cache
def runtime():
    """The stand-in for the card's driver, without comments."""
    text = (HERE / "fake_runtime.c").read_text(encoding="utf-8")
    return " ".join(re.sub(r"/\*.*?\*/", "", text, flags=re.S).split())


def digest(check, root=ROOT):
    """A check's hash: it changes where the result may."""
    parts = [*check, TORCH, runtime()]
    if check.entry in (MUON, NANOGPT):
        off = frozenset((cls.__module__, cls.__name__) for cls in MECHANISM_CLASSES)
    else:
        config = settings(check)
        off = off_classes(config)
        parts += [json.dumps(own_flags(config), sort_keys=True, default=str), TRAINING.get(check.entry)]
    programs = (*(MODEL if check.entry != NANOGPT else ()), *COMPILING)
    parts.append(digest_of(root, tuple(root / program for program in programs), off))
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
