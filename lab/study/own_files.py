"""
What a file of one's own depends on beside its text: the libraries that it imports, and the environment
variables that it reads. A study records both with each run.

The file itself is nanoheads/own_mechanism.py's: it keeps and checks the text.
"""

import ast
import functools
import hashlib
import platform
from importlib import metadata

from nanoheads.common import UserError
from nanoheads.own_mechanism import OURS, imported, place_of, tree_of


@functools.cache
def libraries_of(file):
    """{name: version and digest} of Python and of what is installed that an OwnFile imports; None: not there.

    A library's Python files may be changed by hand, so their digest is part of it, as they were when this
    process asked first. PyTorch and NumPy are left out: every run has their versions.
    """
    found = {"python": platform.python_version()}
    for name in sorted(imported(file) - OURS - {"torch", "numpy"}):
        place = place_of(name)
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


READERS = {"environ", "environb", "getenv", "getenvb", "expandvars"}  # names in os that read the environment


def variables_of(file):
    """The names of the environment variables that an OwnFile reads, sorted.

    UserError: it uses the environment and does not name the variable in that place, so no run can record it.
    """
    tree, names, said = tree_of(file), set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(place, ast.Constant(str(name))):           # os.environ["NAME"]
                pass
            case ast.Compare(ast.Constant(str(name)), _, [place]):        # "NAME" in os.environ
                pass
            case ast.Call(place, [ast.Constant(str(name)), *_]):          # os.getenv("NAME")
                place = place if word_of(place) == "getenv" else getattr(place, "value", None)  # environ.get
            case _:
                continue
        if word_of(place) in ("environ", "getenv"):
            said.add(place)
            if not isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
                names.add(name)
    for node in ast.walk(tree):
        if word_of(node) in READERS and node not in said:
            raise UserError(f"{file.path}, line {node.lineno}: it uses the environment and does not name the "
                            "variable there, so no run can record it: write os.environ[\"NAME\"] or "
                            "os.getenv(\"NAME\")")
    return sorted(names)


def word_of(node):
    """The name that a node of a syntax tree is or ends with, or renames in an import; of a text that text."""
    match node:
        case ast.Attribute(attr=word) | ast.Name(id=word) | ast.Constant(str(word)):
            return word
        case ast.alias(word, str()):
            return word
