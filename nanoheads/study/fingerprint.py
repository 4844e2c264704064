"""
What the numbers of a run depend on: its code, as one hash, and those of its flags that mean anything.

The code is all that can be reached: every definition in every file of ours that train.py imports, directly or
not, and in every file that a mechanism in a file of one's own imports. Left out are comments, docstrings, and
the classes of mechanisms that are off and that no other code names. So nothing can be forgotten; the price is
that a change which alters no number, such as another message, makes finished runs those of other code. Who
knows that it is harmless takes them all the same with `compare.py --accept_code`.
"""

import ast
import copy
import functools
import hashlib
import re
from dataclasses import asdict
from pathlib import Path

from model import MECHANISM_CLASSES
from nanoheads.common import ROOT, UserError
from nanoheads.hub import own_mechanism as own
from nanoheads.training.config import ControllerConfig, TrainConfig

# keys of training that change nothing where they are not set
OFF_UNLESS_SET = {"labels", "teacher", "documents", "freeze_trunk", "thaw_from", "skip_lr",
                  "own_mechanism"}


# ---- flags ----

def own_training(config):
    """{key: value} of a TrainConfig that its run depends on: no key of what it does without."""
    return {name: value for name, value in asdict(config).items()
            if (config.dynamic_heads or name not in ControllerConfig.__dataclass_fields__)
            and (value or name not in OFF_UNLESS_SET)}


def own_flags(config):
    """{flag: value} of a GPTConfig that its model depends on: none of a mechanism that is off."""
    off = {name for cls in MECHANISM_CLASSES if not cls.is_on(config) for name in cls.fields()}
    return {name: value for name, value in config.flags().items() if name not in off}


# ---- code ----

def off_classes(config):
    """{(module, name)} of the classes of the mechanisms that a GPTConfig leaves off."""
    return frozenset((cls.__module__, cls.__name__) for cls in MECHANISM_CLASSES if not cls.is_on(config))


def code_digest(config, training=None, root=ROOT):
    """The hash of the code behind a model of this GPTConfig, trained by this TrainConfig.

    root: the folder of train.py. UserError: a file cannot be read as Python.
    """
    mine = ((training or TrainConfig()).own_mechanism or "").split(",")
    files = {file for path in mine if path for file in own.files_of(path) if file.suffix == ".py"}
    # a teacher may have other mechanisms than its student
    off = frozenset() if training and training.teacher else off_classes(config)
    return digest_of(Path(root), (Path(root, "train.py"), *sorted(files)), off)


@functools.lru_cache(maxsize=256)
def digest_of(root, programs, off):
    """The hash of what these programs reach, without the classes in `off`, {(module, name)}."""
    files = files_of(root, programs)
    parts = [part for path in files for part in parts_of(path)]
    modules = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in files
               if path.is_relative_to(root)}
    off = {part for path in modules for part in parts_of(path) if (modules[path], part.defines) in off}
    # a class that other code names may be used although its mechanism is off
    named = set().union(*(part.uses for part in parts if part not in off))
    while used := {part for part in off if part.defines in named}:
        off -= used
        named.update(*(part.uses for part in used))
    names = frozenset(part.defines for part in off)
    texts = ["\n".join(part.text if part.defines else without(part, names)
                       for part in parts_of(path) if part not in off) for path in files]
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()  # wherever the files lie


@functools.cache
def files_of(root, programs):
    """The files that programs are made of, sorted: themselves, and what they import that is under `root`."""
    found, waiting = set(), [*programs]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for at in (Path(*name.split(".")) for name in imported(path)):
            waiting += [file for file in (root / at.with_suffix(".py"), root / at / "__init__.py")
                        if file.is_file()]
    return sorted(found)


@functools.cache
def tree_of(path):
    """A file's syntax tree without docstrings; it never has comments. UserError."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as e:
        raise UserError(f"{path} cannot be read as Python ({' '.join(str(e).split())})") from None
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
    return tree


@functools.cache
def imported(path):
    """The names of all modules that a file may import, wherever in it the import stands."""
    names = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names += [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
    # with a module its packages are imported
    return {name.rsplit(".", i)[0] for name in names if name for i in range(name.count(".") + 1)}


class Part:
    """A statement at the top of a file: its text, the words in it, what it defines, what it uses."""

    def __init__(self, node):
        self.node, self.text = node, ast.unparse(node)
        self.words = set(re.findall(r"\w+", self.text))
        is_definition = isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        self.defines = node.name if is_definition else None
        # a list of all mechanisms, which stands outside of every definition, uses none of them
        self.uses = self.words if is_definition else set()


@functools.cache
def parts_of(path):
    """The parts of a file, in order."""
    return [Part(node) for node in tree_of(path).body]


def without(part, names):
    """The text of a part whose lists and imports do without some classes.

    So a new mechanism, a class and its place in a list, leaves the hash of every run without it.
    """
    if not names & part.words:
        return part.text
    node = copy.deepcopy(part.node)
    for each in ast.walk(node):
        if isinstance(each, (ast.List, ast.Tuple)):
            each.elts = [e for e in each.elts if not (isinstance(e, ast.Name) and e.id in names)]
        elif isinstance(each, (ast.Import, ast.ImportFrom)):
            each.names = [alias for alias in each.names if alias.name not in names]
    return ast.unparse(node) if getattr(node, "names", True) else ""
