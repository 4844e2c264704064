"""
What the numbers of a run depend on: its code, as one hash, and those of its flags that mean anything.

The code is every definition in every file of ours that a run imports, directly or not, and in every file of
its own mechanisms. Comments, docstrings and the help of flags do not count. Neither do the classes of
mechanisms that are off, unless other code names them. So nothing can be forgotten. The price is that a change
which alters no number, such as another message, makes finished runs those of other code. Who knows that a
change is harmless takes these runs all the same with `compare.py --accept_code`.
"""

import ast
import functools
import hashlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from model import MECHANISM_CLASSES
from nanoheads.common import ROOT, UserError
from nanoheads.config import ControllerConfig
from nanoheads.tasks import TaskConfig

# keys of training that change nothing where they are not set
OFF_UNLESS_SET = {"labels", "teacher", "documents", "documents_packed", "freeze_trunk", "thaw_from",
                  "skip_lr", "own_mechanism", "patience"}


# ---- flags ----

def own_training(config):
    """{key: value} of a TrainConfig that its run depends on: no key of what it does without."""
    return {name: value for name, value in asdict(config).items()
            if (config.dynamic_heads or name not in ControllerConfig.__dataclass_fields__)
            and (config.task or name not in TaskConfig.__dataclass_fields__)
            and (value or name not in OFF_UNLESS_SET)}


def own_flags(config):
    """{flag: value} of a GPTConfig that its model depends on: none of a mechanism that is off."""
    off = {name for cls in MECHANISM_CLASSES if not cls.is_on(config) for name in cls.fields()}
    return {name: value for name, value in config.flags().items() if name not in off}


# ---- code ----

def code_digest(config, training=None, root=ROOT):
    """The hash of the code behind a run with this GPTConfig and this TrainConfig. UserError: no Python.

    root: the folder of train.py.
    """
    programs = [Path(root, "train.py"), Path(root, "lab", "study", "trial.py")]
    if training and training.own_mechanism:
        programs += sorted(Path(path).resolve() for path in training.own_mechanism.split(","))
    # a teacher may have other mechanisms than its student
    off = frozenset() if training and training.teacher else off_classes(config)
    return digest_of(Path(root), tuple(programs), off)


def off_classes(config):
    """{(module, name)} of the classes of the mechanisms that a GPTConfig leaves off."""
    return frozenset((cls.__module__, cls.__name__) for cls in MECHANISM_CLASSES if not cls.is_on(config))


@functools.lru_cache(maxsize=256)
def digest_of(root, programs, off):
    """The hash of what these programs reach, without the classes in `off`, {(module, name)}."""
    files = files_of(root, programs)
    places = {(root.joinpath(*module.split(".")).with_suffix(".py"), name) for module, name in off}
    kept = [each for path in files for each in statements_of(path)]
    left_out = {each for each in kept if (each.path, each.defines) in places}
    kept = [each for each in kept if each not in left_out]
    # a class that other code names may be used although its mechanism is off
    named = set().union(*(each.words for each in kept if not each.is_list))
    while used := {each for each in left_out if each.defines in named}:
        left_out -= used
        named.update(*(each.words for each in used))
    names = {each.defines for each in left_out}
    texts = ["\n".join(each.without(names) for each in statements_of(path) if each not in left_out)
             for path in files]
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()  # wherever the files lie


@functools.cache
def files_of(root, programs):
    """The files that programs consist of, sorted: themselves, and all that they import under `root`."""
    found, waiting = set(), [*programs]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += imported(path, root)
    return sorted(found)


def imported(path, root):
    """The files that a file may import, wherever in it the import stands; with a module its packages."""
    found = []
    for node in ast.walk(tree_of(path)):
        folder, names = root, []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1] if node.level else root
            module = [node.module] if node.module else []
            names = [".".join([*module, alias.name]) for alias in node.names]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"(nanoheads|lab)(\.\w+)+", str(node.value)):
            names = [node.value]  # for from_lab() and importlib
        for parts in (name.split(".") for name in names):
            places = [folder.joinpath(*parts[:n]) for n in range(1, len(parts) + 1)]
            found += [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")
                      if file.is_file()]
    return found


@functools.cache
def tree_of(path):
    """A file's syntax tree without docstrings and what --help says of a flag; it never has comments.

    UserError: it is no Python.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as e:
        raise UserError(f"{path} cannot be read as Python ({' '.join(str(e).split())})") from None
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "flag":
            node.args = node.args[:1]
            node.keywords = [each for each in node.keywords if each.arg not in ("help", "section")]
    return tree


@dataclass(eq=False)
class Statement:
    """A statement at the top of a file."""
    path: Path
    text: str
    words: set       # all words in it
    defines: object  # the name of the class or function that it defines, else None
    is_list: bool    # an import or a list of names, which uses none of them

    def without(self, names):
        """The text of a list without some names, so that a new mechanism changes no run without it."""
        if not self.is_list or not names & self.words:
            return self.text
        return " ".join(word for word in re.findall(r"\w+|[^\w\s,]", self.text) if word not in names)


@functools.cache
def statements_of(path):
    """The statements at the top of a file, in order."""
    found = []
    for node in tree_of(path).body:
        text = ast.unparse(node)
        defines = getattr(node, "name", None)  # of a class or a function
        is_list = isinstance(node, (ast.Import, ast.ImportFrom)) or (
            isinstance(node, ast.Assign) and isinstance(node.value, (ast.List, ast.Tuple)))
        found.append(Statement(path, text, set(re.findall(r"\w+", text)), defines, is_list))
    return found
