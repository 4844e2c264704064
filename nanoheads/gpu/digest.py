"""What a check's result follows from, as one hash: the code that its model reaches, its flags, its recipe."""

import ast
import copy
import functools
import hashlib
import json
import re

from nanoheads.common import ROOT
from nanoheads.gpu.entries import MUON, NANOGPT, TRAINING, attention, settings
from nanoheads.gpu.environment import HERE, TORCH
from nanoheads.study.fingerprint import off_mechanisms, own_flags, parsed, reached

ROOTS = {"model": (("model.py", "GPT"), ("nanoheads/training/optim.py", "precision")),
         MUON: (("nanoheads/training/optim.py", "orthogonalise"),)}
# the Trainer's methods that a training step runs
TRAINER = ("__init__", "freeze", "zero_grad", "backward", "judged_by")
OWN = ("fake.py", "steps.py")  # of this folder: how it is compiled


class Wordless(ast.NodeTransformer):
    """Leaves out docstrings, and what a person is told where something is wrong."""

    def visit_FunctionDef(self, node):
        if node.name.endswith("problems"):  # these check flags, and are words for the most part
            return None
        node.body = [line for line in node.body if not (isinstance(line, ast.Expr)
                                                        and isinstance(line.value, ast.Constant))]
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    visit_ClassDef = visit_FunctionDef

    def visit_Raise(self, node):
        return ast.Raise(exc=None, cause=None)


def text(node):
    """A definition's code without words, which are taken out of the node; None where nothing is left."""
    node = Wordless().visit(node)
    return node and ast.unparse(node)


@functools.cache
def code(root, roots, names, fields):
    """The code that is reached from roots, without mechanisms called `names` and their flags."""
    found = reached(root, names, fields, False, roots)
    return sorted(f"{file}: {text(node)}" for (file, _), node in found.items())


@functools.cache
def of_trainer(root):
    """The Trainer's part in a training step."""
    definitions = copy.deepcopy(parsed(root / "nanoheads/training/optim.py")[0])
    methods = [m for m in definitions["Trainer"].body if getattr(m, "name", None) in TRAINER]
    return [text(node) for node in (*methods, definitions["CastWeights"])]


@functools.cache
def recipe():
    """How it is compiled: torch, the patches of it, the card that is reported."""
    runtime = re.sub(r"/\*.*?\*/", "", (HERE / "fake_runtime.c").read_text(encoding="utf-8"), flags=re.S)
    own = [text(node) for name in OWN for node in ast.parse((HERE / name).read_text(encoding="utf-8")).body
           if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    return [TORCH, " ".join(runtime.split()), *own]


def unused(check):
    """Kernels that a check does not come to, which the code that it reaches names all the same."""
    if check.kind == "eval":  # traces take row statistics in every model
        return {"ChunkedCrossEntropy"}
    uses, config = attention(check.entry), settings(check)
    names = {"attend_selected", "attend_in_rows"}  # of decoding
    names |= set() if uses.row_stats else {"row_statistics", "attend_lse"}
    names |= set() if uses.packed else {"attend_packed"}
    names |= set() if any(uses) else {"flex"}
    return names | (set() if config.loss_chunks or check.kind == "bytes" else {"ChunkedCrossEntropy"})


def digest(check, root=ROOT):
    """A check's hash: it changes where the result may."""
    parts = [*check, *recipe()]
    if check.entry == MUON:
        parts += code(root, ROOTS[MUON], frozenset(), frozenset())
    elif check.entry != NANOGPT:
        config = settings(check)
        off = off_mechanisms(config)
        names = {cls.__name__ for cls in off} | unused(check)
        parts += code(root, ROOTS["model"], frozenset(names),
                      frozenset(name for cls in off for name in cls.fields()))
        parts += [json.dumps(own_flags(config), sort_keys=True, default=str), TRAINING.get(check.entry)]
        parts += of_trainer(root) if check.kind != "eval" else []
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
