"""
Files of mechanisms of one's own: read, copied and run. docs/add-a-mechanism.md

Such a file stands alone: it imports installed libraries, model.py and nanoheads/, and nothing else, so that
its text is all that a run has to keep, and all that a digest has to cover.
"""

import ast
import functools
import hashlib
import importlib.util
import platform
import sys
import sysconfig
import types
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from nanoheads.common import OWN_FILES, UserError, fault_of_own_file, read_whole, write_atomic
from nanoheads.configurator import where_it_failed

OURS = ("model", "nanoheads")  # the repository's own modules, wherever a file lies
INSTALLED = [Path(sysconfig.get_path(name)).resolve()
             for name in ("stdlib", "platstdlib", "purelib", "platlib")]


class OwnFile(NamedTuple):
    """A file as it was when it was read: it may be edited while a run goes on."""

    path: Path
    text: bytes

    @property
    def sha256(self):
        return hashlib.sha256(self.text).hexdigest()

    @property
    def digest(self):
        """The first 16 digits of its SHA-256."""
        return self.sha256[:16]


def add_arguments(parser):
    """The arguments of every program that reads checkpoints, by which code of one's own may run."""
    parser.add_argument("--mechanism", action="append", default=[], metavar="FILE",
                        help="the file of a mechanism of one's own that a checkpoint was made with; several "
                             "with commas, or repeated")
    parser.add_argument("--trust_code", action="store_true",
                        help="run the file of such a mechanism that lies in the checkpoint's own folder, and "
                             "say so; without this or --mechanism nothing that is read is run")


# ---- reading ----

def opened(path):
    """The OwnFile of a path, which is not run. UserError: it is not there, no Python, or not alone."""
    path = Path(path)
    try:
        file = OwnFile(path, read_whole(path))
    except OSError as e:
        raise UserError(f"no mechanism file {path} ({e.strerror}); it holds a class for each mechanism, see "
                        "docs/add-a-mechanism.md") from None
    check_that_it_stands_alone(file)
    return file


def check_that_it_stands_alone(file):
    """UserError where a file imports another one that is neither installed nor of this repository."""
    for name in sorted(imported(file)):
        if name in OURS or name in sys.stdlib_module_names:
            continue
        place = place_of(name, file.path.parent)
        if place is not None and not is_installed(place):
            raise UserError(f"{file.path} imports {name}, which is {place}: a mechanism's file stands alone, "
                            "so put that code into it")


def imported(file):
    """The first names of all that a file's import statements name. UserError: it is no Python."""
    try:
        tree = ast.parse(file.text)
    except (SyntaxError, ValueError) as e:
        raise UserError(f"{file.path}, {where_it_failed(e, file.path)}") from None
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise UserError(f"{file.path}, line {node.lineno}: it imports from its own folder, but a "
                            "mechanism's file stands alone, so put that code into it")
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names


def place_of(name, folder):
    """The Path of the module of this name: on Python's path, else in a folder. None: there is none."""
    spec = sys.modules[name].__spec__ if name in sys.modules else importlib.util.find_spec(name)
    if spec is not None:
        places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
        return Path(places[0]) if places else None
    return next((place for place in (folder / f"{name}.py", folder / name) if place.exists()), None)


def is_installed(place):
    """Whether a Path belongs to Python or to its installed libraries."""
    place = place.resolve()
    return bool({"site-packages", "dist-packages"} & set(place.parts)
                or any(place.is_relative_to(base) for base in INSTALLED))


def inside(folder, name):
    """The Path of a file in a folder, or below it. UserError: its name, or a link, leads out of it."""
    place = Path(folder, name)
    if not name or Path(name).is_absolute() or ".." in Path(name).parts or "\\" in name or ":" in name:
        raise UserError(f"{folder}: {name!r} must be the name of a file in this folder: paths that are "
                        "absolute or lead out of it are never run")
    if not place.resolve().is_relative_to(Path(folder).resolve()):
        raise UserError(f"{place} leads out of {folder}, to {place.resolve()}: that is never run")
    return place


# ---- what its mechanisms read beside it ----

@functools.cache
def libraries_of(file):
    """{name: version and digest} of Python and of what is installed that an OwnFile imports; None: not there.

    A library's Python files may be changed by hand, so their digest is part of it, as they were when this
    process asked first. PyTorch and NumPy are left out: every run has their versions.
    """
    found = {"python": platform.python_version()}
    for name in sorted(imported(file) - sys.stdlib_module_names - {*OURS, "torch", "numpy"}):
        place = place_of(name, file.path.parent)
        found[name] = place and version_of(name, place)
    return found


def version_of(name, place):
    """The versions of the distributions that a module is of, if any, and a digest of its Python files."""
    found = [metadata.version(each) for each in sorted({*metadata.packages_distributions().get(name, ())})]
    folder = place.parent if place.name == "__init__.py" else place
    text = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [place]:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        text.update(f"{digest} {path.relative_to(folder).as_posix()}\n".encode())
    return ", ".join([*found, f"sha256 {text.hexdigest()[:16]}"])


def variables_of(file):
    """The names of the environment variables that an OwnFile reads, sorted.

    UserError: it uses the environment and does not name the variable in that place.
    """
    tree, names, said = ast.parse(file.text), set(), set()
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "os"]
    known = {alias.asname or alias.name: alias.name for node in imports for alias in node.names}

    def is_any(node, *of_os):
        return getattr(node, "attr", known.get(getattr(node, "id", None))) in of_os

    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):  # os.environ["NAME"]
            place, name = node.value, node.slice
        elif isinstance(node, ast.Compare):  # "NAME" in os.environ
            place, name = node.comparators[0], node.left
        elif isinstance(node, ast.Call):     # os.getenv("NAME"), os.environ.get("NAME")
            place = node.func if is_any(node.func, "getenv") else getattr(node.func, "value", None)
            name = next(iter([*node.args, *(each.value for each in node.keywords)]), None)
        else:
            continue
        if is_any(place, "environ", "getenv") and isinstance(getattr(name, "value", None), str):
            said.add(place)
            if not isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
                names.add(name.value)
    for node in ast.walk(tree):
        # by other ways there is no name to record
        other = is_any(node, "environb", "getenvb", "expandvars") or getattr(node, "value", None) in (
            "environ", "environb", "getenv", "getenvb", "expandvars")
        other = other or isinstance(node, ast.ImportFrom) and node.module in ("os", "os.path", "posix") and (
            node.names[0].name == "*")
        if other or is_any(node, "environ", "getenv") and node not in said:
            raise UserError(f"{file.path}, line {node.lineno}: it uses the environment and does not name the "
                            "variable there, so no run can record it: write os.environ[\"NAME\"] or "
                            "os.getenv(\"NAME\")")
    return sorted(names)


# ---- copying and running ----

def import_ahead(file):
    """Import what the import statements at the top of an OwnFile name; where that fails, run() says so.

    What a library changes when it is imported is then not taken for what the file changes.
    """
    for node in ast.parse(file.text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            with suppress(Exception):
                exec(compile(ast.Module([node], []), str(file.path), "exec"), {})


def copy(file, folder):
    """A copy of an OwnFile in a folder; its path. UserError."""
    target = Path(folder) / file.path.name
    if not target.is_file() or target.read_bytes() != file.text:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, lambda f: f.write(file.text))
    return target


def run(file, name):
    """The module of this name that an OwnFile's text makes. UserError, in one line, where it fails."""
    path = str(file.path)
    OWN_FILES.add(path)
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = path
    try:
        exec(compile(file.text, path, "exec"), vars(module))
    except Exception as e:  # whatever a file of one's own may do
        del sys.modules[name]
        raise UserError(fault_of_own_file(e) or str(e)) from None
    return module
