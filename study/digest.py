"""
What the numbers of a run depend on beside its flags: the sources that train.py can reach, the data, files of
one's own, PyTorch.

Sources count as their syntax, without comments, docstrings and what --help says of flags: a word about the
code retrains nothing.
"""

import ast
import functools
import hashlib
import re
from pathlib import Path

import torch

from nanoheads import checkpoint, files, own_mechanism
from nanoheads.common import ROOT, UserError, from_lab
from nanoheads.config import data_of
from nanoheads.extensions import EXTENSIONS
from study.records import hash_of

IN_QUOTES = re.compile(rb'"((?:nanoheads|lab|study)(?:\.\w+)+)"')  # modules, as from_lab() names them


def surroundings(training, model, command=None):
    """{"data", "own", "code", "torch"} of the spec of a run with this TrainConfig and GPTConfig, as they are
    now. UserError: a file is missing, or the data is damaged; command: the one that makes a teacher.
    """
    return dict(**digests_of(training, model, command), code=digest_of_code(), torch=torch.__version__)


def whatever_code(spec):
    """A hash of what a run is, whatever code and libraries made it: of its flags, seed, data and score.

    The text of a mechanism in a file of one's own is code, too.
    """
    rest = {key: value for key, value in spec.items() if key not in ("code", "torch")}
    rest["own"] = {key: value for key, value in spec["own"].items() if not key.startswith("mechanism ")}
    rest["train"] = {key: value for key, value in spec["train"].items() if key != "own_mechanism"}
    return hash_of(rest)


# ---- data and files of one's own ----

def digests_of(training, model, command=None):
    """{"data": {split: sha256}, "own": {file: sha256}} of all that a run reads; see surroundings()."""
    data = data_of(training, model.block_size)
    for split in () if training.task else data.splits:
        data.tokens(split)  # its file is compared with its sha256
    own = {f"mechanism {name}": sha256 for file in own_mechanism.files_for(model)
           for name, sha256 in file.sha256.items()}
    if training.labels:
        own.update(digests_of_labels(data, training, model))
    for key in ("teacher", *(key for each in EXTENSIONS for key in each.files)):
        if path := getattr(training, key):
            file = checkpoint.file_of(path)
            if not file.is_file():
                made = f"first run: {command}" if command else "make it first"
                raise UserError(f"{key}={path} is not there yet; {made}")
            own[key] = files.sha256(file)
    return dict(data=data.digests, own=own)


def digests_of_labels(data, training, model):
    """{"labels name.split": sha256} of the labels that a run is trained on, as their labels.json has it."""
    targets = from_lab("lab.labels.targets", f"labels={training.labels}")
    labels = targets.Targets(data, training.labels, model.constraint_names)
    return {f"labels {name}.{split}": row["names"][name]["sha256"]
            for split, row in labels.splits.items() for name in labels.names}


# ---- sources ----

def digest_of_code(root=ROOT, program="train.py"):
    """The sha256 of the sources that a program can reach, in a folder that may lie anywhere."""
    found, waiting = {}, [Path(root, program)]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path], named = read_source(path, path.stat().st_mtime_ns, path.stat().st_size)
            waiting += [file for name in named for file in files_of(root, name)]
    texts = [f"{path.relative_to(root).as_posix()} {found[path]}" for path in sorted(found)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


@functools.cache
def read_source(path, *stamp):
    """(the sha256 of a file's syntax, the names of all modules that it may import, wherever it does)."""
    text = path.read_bytes()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as e:
        raise UserError(f"{path} cannot be read as Python ({' '.join(str(e).split())})") from None
    named = {name.decode() for name in IN_QUOTES.findall(text)}
    for node in statements(tree):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if ast.get_docstring(node, clean=False) is not None:
                    del node.body[0]
            case ast.AnnAssign(value=ast.Call(func=ast.Name(id="flag")) as call):  # what --help says of it
                call.args = call.args[:1]
                call.keywords = [each for each in call.keywords if each.arg not in ("help", "section")]
            case ast.Import():
                named |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module)):
                named |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), frozenset(named)


def statements(tree):
    """All statements in a syntax tree, and itself: a tenth of what ast.walk() gives."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, block, ())
            waiting += inside if isinstance(inside, list) else ()


@functools.cache
def files_of(root, name):
    """The files of the module of a name and of the packages that it is in, of those that are in a folder."""
    parts = name.split(".")
    if not (Path(root, parts[0]).is_dir() or Path(root, f"{parts[0]}.py").is_file()):
        return []
    places = [Path(root, *parts[:end]) for end in range(1, len(parts) + 1)]
    return [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")
            if file.is_file()]
