"""
The files of a mechanism of one's own: the one that is named and all that it imports, outside the installed
libraries and this repository's nanoheads/ and model.py. Found by reading them, without running any.

A module is looked for beside the named file first, then on Python's path. While the process lives, what these
files import comes from the texts that were read, whatever happens to the files; no folder is put on the path.
"""

import ast
import hashlib
import importlib.machinery
import importlib.util
import linecache
import sys
import sysconfig
import types
from pathlib import Path
from typing import NamedTuple

from nanoheads.common import OWN_FILES, ROOT, UserError, fault_of_own_file, write_atomic
from nanoheads.configurator import where_it_failed

OURS = ("model", "nanoheads")  # the repository's own, wherever a file lies
INSTALLED = {Path(sysconfig.get_path(name)).resolve()
             for name in ("stdlib", "platstdlib", "purelib", "platlib")}


class Module(NamedTuple):
    """What a file of one's own imports."""

    name: str    # as it is imported: parts.rates
    path: Path   # its file, or the folder of a package without one
    text: bytes | None  # None: of a folder

    @property
    def place(self):
        """Where it lies in a copy, beside the file that imports it."""
        whole = Path(*self.name.split("."))
        return whole / self.path.name if self.path.stem == "__init__" else whole.with_name(self.path.name)


class OwnFile(NamedTuple):
    """A file as it was when it was read, with all that it imports: they may be edited while a run goes on."""

    path: Path
    text: bytes
    modules: tuple = ()  # the Module of each import, folders of packages too

    @property
    def others(self):
        """The modules that are files."""
        return [module for module in self.modules if module.text is not None]

    @property
    def paths(self):
        """All its files, itself first."""
        return [self.path, *(module.path for module in self.others)]

    @property
    def sha256(self):
        """The SHA-256 of its text; where it imports others, of the digests of all."""
        mine = hashlib.sha256(self.text).hexdigest()
        if not self.others:
            return mine
        lines = sorted(f"{hashlib.sha256(each.text).hexdigest()}  {each.place.as_posix()}\n"
                       for each in self.others)
        return hashlib.sha256("".join([mine, "\n", *lines]).encode()).hexdigest()

    @property
    def digest(self):
        """The first 16 digits of its SHA-256."""
        return self.sha256[:16]


# ---- the command line ----

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
    """The OwnFile of a path. UserError: it is not there, or no Python."""
    path = Path(path)
    text = read(path)
    return OwnFile(path, text, tuple(modules_of(path, text)))


def read(path):
    """The bytes of a file. UserError."""
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise UserError(f"no mechanism file {path} ({e.strerror}); it holds a class for each mechanism, see "
                        "docs/add-a-mechanism.md") from None


def files_of(path):
    """The files that a file of one's own consists of, itself too, sorted; none of them is run. UserError."""
    return sorted(each.resolve() for each in opened(path).paths)


def modules_of(path, text):
    """The Modules that a file imports, directly or not, sorted by name. UserError."""
    found, waiting, roots = {}, [(None, path, text)], {}
    while waiting:
        module, file, content = waiting.pop()
        for name in imported(content, file, module):
            parts = name.split(".")
            if parts[0] not in roots:
                roots[parts[0]] = root_of(parts[0], path)
            for i in range(1, len(parts) + 1) if roots[parts[0]] else ():
                inner = ".".join(parts[:i])
                place = None if inner in found else located(roots[parts[0]], parts[:i])
                if place:
                    found[inner] = Module(inner, place, None if place.is_dir() else read(place))
                    if place.suffix == ".py":
                        waiting.append((inner, place, found[inner].text))
    return [found[name] for name in sorted(found)]


def imported(text, path, module):
    """Yield the dotted names that a text imports; what follows `from x import` may be a module, too.

    module: what the file itself is imported as; None: it is the one that was named. UserError: no Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as e:
        raise UserError(f"{path}, {where_it_failed(e, path)}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # from . import x: counted from the package that the file is in
                package = (module or "").split(".")[:len((module or "").split(".")) - node.level
                                                    + (path.stem == "__init__")]
                base = ".".join(filter(None, [*package, base]))
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) \
                and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield str(node.args[0].value)


def root_of(name, path):
    """The folder in which a file's import of this name is found; None: it is installed, ours, or nowhere.

    UserError where a file beside it has an installed module's name.
    """
    if name in OURS or name in sys.stdlib_module_names:
        return None
    beside, folders = path.parent, [Path(folder or ".") for folder in sys.path]
    on_path = next((folder for folder in folders if located(folder, [name], False)), None)
    installed = on_path is not None and is_installed(on_path)
    if located(beside, [name], False):
        if installed:
            raise UserError(f"{path} imports {name}, and {located(beside, [name])} has the name of an "
                            f"installed module ({located(on_path, [name])}): rename it")
        return beside
    if on_path is not None:
        return None if installed else on_path
    return next((folder for folder in (beside, *folders) if (folder / name).is_dir()
                 and not is_installed(folder)), None)


def located(root, parts, folders=True):
    """The file of a module below a folder; None: there is none.

    folders: a package without __init__.py is its folder.
    """
    inner = Path(root, *parts)
    suffixes = [*importlib.machinery.EXTENSION_SUFFIXES, ".py", ".pyc"]
    for place in (inner / "__init__.py", *(inner.with_name(inner.name + suffix) for suffix in suffixes)):
        if place.is_file():
            return place
    return inner if folders and inner.is_dir() else None


def is_installed(folder):
    """Whether a folder of Python's path belongs to Python or to its installed libraries."""
    folder = folder.resolve()
    return bool({"site-packages", "dist-packages"} & set(folder.parts)
                or any(folder.is_relative_to(base) for base in INSTALLED)
                or folder.is_relative_to(ROOT / "nanoheads"))


def inside(folder, name):
    """The Path of a file in a folder, or below it. UserError: its name is absolute or leads out of it."""
    place = Path(folder, name)
    if not name or Path(name).is_absolute() or ".." in Path(name).parts or "\\" in name or ":" in name:
        raise UserError(f"{folder}: {name!r} must be the name of a file in this folder: paths that are "
                        "absolute or lead out of it are never run")
    return kept_inside(folder, place)


def kept_inside(folder, place):
    """The same Path. UserError where it leads out of the folder, by a link, say."""
    if not place.resolve().is_relative_to(Path(folder).resolve()):
        raise UserError(f"{place} leads out of {folder}, to {place.resolve()}: that is never run")
    return place


# ---- copies ----

def copy(file, folder):
    """A copy of an OwnFile in a folder, with what it imports; the path of the file that was named. UserError.
    """
    target = Path(folder) / file.path.name
    texts = {target: file.text, **{Path(folder, each.place): each.text for each in file.others}}
    for place, text in texts.items():
        if not place.is_file() or place.read_bytes() != text:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(place, lambda f: f.write(text))
    return target


# ---- running ----

LOADED = {}  # name -> Module that a file of one's own imports: where this process takes it from


class Loader(importlib.machinery.SourceFileLoader):
    """Runs the text that was read, never bytecode that stands beside the file."""

    def get_code(self, fullname):
        return compile(LOADED[fullname].text, str(LOADED[fullname].path), "exec")


class Finder:
    """Finds what is in LOADED, for Python's import."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in LOADED:
            return None
        place = LOADED[name].path
        if LOADED[name].text is None:
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(place)]
            return spec
        loader = Loader(name, str(place)) if place.suffix == ".py" else None
        return importlib.util.spec_from_file_location(name, place, loader=loader)


def decoded(text):
    """The bytes of a Python file as text, in the encoding that they name, without a byte order mark."""
    try:
        return importlib.util.decode_source(text)
    except (SyntaxError, UnicodeDecodeError):  # of which compile() will say more
        return text.decode(errors="replace")


def run(file, name):
    """The module of this name that an OwnFile's text makes. UserError, in one line, where it fails."""
    names = {module.name for module in file.modules}
    for each in (file, *file.others):
        for other in imported(each.text, each.path, getattr(each, "name", None)):
            if (first := other.split(".")[0]) in LOADED and first not in names:
                raise UserError(f"{each.path} imports {first}, which is not there; {LOADED[first].path}, "
                                "which another file imports, is not taken for it")
    new = [module for module in file.modules if is_new(module, file)]
    LOADED.update({module.name: module for module in new})
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
    path, before = str(file.path), set(OWN_FILES)
    for each, text in [(path, file.text), *((str(each.path), each.text) for each in file.others)]:
        # their source, for the comments of flags, also when a file is edited or gone
        lines = decoded(text).splitlines(keepends=True)
        linecache.cache[each] = len(text), None, lines, each
        OWN_FILES.add(each)
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = path
    try:
        exec(compile(file.text, path, "exec"), vars(module))
    except Exception as e:  # whatever a file of one's own may do
        problem = fault_of_own_file(e) or f"{path}, {where_it_failed(e, path)}"
        forget(name, new)
        OWN_FILES.intersection_update(before)
        raise UserError(problem) from None
    return module


def is_new(module, file):
    """Whether a Module is still to be loaded. UserError: another one of its name is there already."""
    there = LOADED.get(module.name)
    if there is None and module.name in sys.modules:
        other = getattr(sys.modules[module.name], "__file__", None)
        if module.text is None or other and Path(other).resolve() == module.path.resolve():
            return False
    elif there is None or there.text == module.text and there.path.name == module.path.name:
        return there is None
    else:
        other = there.path
    raise UserError(f"{file.path} imports {module.name} from {module.path}, and another module of that name "
                    f"is loaded already, from {other}: rename one of them")


def forget(name, modules):
    """Take a module of this name, and these Modules, out of this process again."""
    sys.modules.pop(name, None)
    for module in modules:
        LOADED.pop(module.name, None)
        sys.modules.pop(module.name, None)
