"""
Hashes what the numbers of a run depend on beside its flags: the sources that train.py can reach, the data,
files of one's own, PyTorch.

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
from nanoheads.dataset import NotPrepared
from nanoheads.extensions import EXTENSIONS
from nanoheads.teacher import is_function
from study.records import hash_of

QUOTED_MODULE = re.compile(rb'"((?:nanoheads|lab|study)(?:\.\w+)+)"')  # modules, as from_lab() names them


def dependencies(training, model, command=None):
    """{"data", "own", "code", "torch"} for the spec of a run with this TrainConfig and GPTConfig, as they are
    now. command: the one that makes a teacher. UserError: a file is missing, or the data is damaged.
    """
    return dict(**digests_of(training, model, command), code=digest_of_code(), torch=torch.__version__)


def hash_without_code(spec):
    """A hash of a run's flags, seed, data and score, but not of the code and the libraries that made it.

    The text of a mechanism in a user's own file counts as code.
    """
    rest = {key: value for key, value in spec.items() if key not in ("code", "torch")}
    rest["own"] = {key: value for key, value in spec["own"].items() if not key.startswith("mechanism ")}
    rest["train"] = {key: value for key, value in spec["train"].items() if key != "own_mechanism"}
    return hash_of(rest)


# ---- data and files of one's own ----

def digests_of(training, model, command=None):
    """{"data": {split: sha256}, "own": {file: sha256}} of all that a run reads; see dependencies()."""
    data = data_of(training, model.block_size)
    for split in () if training.task else data.splits:
        data.tokens(split)  # its file is compared with its sha256
    own_files = {f"mechanism {name}": sha256 for file in mechanism_files(training, model)
                 for name, sha256 in file.sha256.items()}
    if training.labels:
        own_files.update(digests_of_labels(data, training, model))
    for key in ("teacher", *(key for extension in EXTENSIONS for key in extension.files)):
        if path := getattr(training, key):
            file = checkpoint.file_of(path)
            if not file.is_file():
                hint = f"first run: {command}" if command else "make it first"
                raise NotPrepared(f"{key}={path} is not there yet; {hint}")
            own_files[key] = files.sha256(file)
    return dict(data=data.digests, own=own_files)


def mechanism_files(training, model):
    """The OwnFiles of the mechanisms of one's own that a run needs: its model's, and those of a teacher that
    is a checkpoint. UserError: those of the teacher are not named.
    """
    own_files = {file.digest: file for file in own_mechanism.files_for(model)}
    teacher = training.teacher and checkpoint.file_of(training.teacher)
    if teacher and not is_function(training.teacher) and teacher.is_file():
        state = read_flags(teacher, teacher.stat().st_mtime_ns, teacher.stat().st_size)
        own_mechanism.flags_of(state, training.teacher)
        digests = {record["digest"] for record in state["own_mechanism"]}
        own_files |= {file.digest: file for file in own_mechanism.FILES.values() if file.digest in digests}
    return [*own_files.values()]


@functools.cache
def read_flags(path, *stamp):
    """What a checkpoint says of its flags and of the mechanisms of one's own that they need."""
    state = checkpoint.read(path)
    return dict(config=state["config"], own_mechanism=state.get("own_mechanism") or [])


def digests_of_labels(data, training, model):
    """{"labels name.split": sha256} of the labels that a run is trained on, as their labels.json has it."""
    targets = from_lab("lab.labels.targets", f"labels={training.labels}")
    labels = targets.Targets(data, training.labels, model.constraint_names)
    return {f"labels {name}.{split}": row["names"][name]["sha256"]
            for split, row in labels.splits.items() for name in labels.names}


# ---- sources ----

def digest_of_code(root=ROOT, program="train.py"):
    """The sha256 of the sources that a program can reach, in a folder that may lie anywhere."""
    digests, queue = {}, [Path(root, program)]
    while queue:
        path = queue.pop()
        if path not in digests:
            digests[path], imports = read_source(path, path.stat().st_mtime_ns, path.stat().st_size)
            queue += [file for name in imports for file in files_of_module(root, name)]
    texts = [f"{path.relative_to(root).as_posix()} {digests[path]}" for path in sorted(digests)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


@functools.cache
def read_source(path, *stamp):
    """(the sha256 of a file's syntax, the names of all modules that it may import, wherever it does)."""
    text = path.read_bytes()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as e:
        raise UserError(f"{path} cannot be read as Python ({' '.join(str(e).split())})") from None
    imports = {name.decode() for name in QUOTED_MODULE.findall(text)}
    for node in statements(tree):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if ast.get_docstring(node, clean=False) is not None:
                    del node.body[0]
            case ast.AnnAssign(value=ast.Call(func=ast.Name(id="flag")) as call):  # what --help says of it
                call.args = call.args[:1]
                call.keywords = [word for word in call.keywords if word.arg not in ("help", "section")]
            case ast.Import():
                imports |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module)):
                imports |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), frozenset(imports)


def statements(tree):
    """All statements in a syntax tree, and itself: a tenth of what ast.walk() gives."""
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            children = getattr(node, block, ())
            stack += children if isinstance(children, list) else ()


@functools.cache
def files_of_module(root, name):
    """The files of the module of a name and of the packages that it is in, of those that are in a folder."""
    parts = name.split(".")
    if not (Path(root, parts[0]).is_dir() or Path(root, f"{parts[0]}.py").is_file()):
        return []
    paths = [Path(root, *parts[:end]) for end in range(1, len(parts) + 1)]
    return [file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py")
            if file.is_file()]
