"""The layout: who may import whom, what stands in the root, and how long files and functions may be.

Imports go down one order: the modules at the package's top, model.py, then the folders, then the programs.
Imports inside functions count. Nothing imports a program, and text/ does not know the model.
"""
import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("train", "evaluate", "sample", "compare", "probe", "prune", "bench", "plot_curves", "export_hf")
FOLDERS = ("text", "hub", "training", "heads", "probes", "study", "gpu")
ORDER = ("top", "model", *FOLDERS, "data", "program")  # each may import its own kind and those before it
APART = {"text": {"model"}}  # kinds before it that it does not import all the same
# module:function -> why it has more than 60 lines
LONG = {}


def name_of(path, root):
    """nanoheads/text/dataset.py -> nanoheads.text.dataset; a package's own file has the package's name."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def kind_of(name):
    """The kind of a module of this repository, by its dotted name; None: it is another's."""
    first, *rest = name.split(".")
    if first in PROGRAMS:
        return "program"
    if first == "nanoheads":
        return rest[0] if rest and rest[0] in FOLDERS else "top"
    return first if first in ("model", "data") else None


def imported(tree):
    """Yield the dotted name of every import, those inside functions and import_module() of a string too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) \
                and ast.unparse(node.func).endswith("import_module"):
            yield str(node.args[0].value)


def sources(root):
    """Every source file that is no test: {dotted name: path}."""
    paths = [*root.glob("*.py"), *root.glob("nanoheads/**/*.py"), *root.glob("data/**/*.py")]
    return {name_of(path, root): path for path in sorted(paths)}


def climbing(root):
    """The imports that go up, as "importer -> imported"."""
    found = set()
    for name, path in sources(root).items():
        here = kind_of(name)
        for other in imported(ast.parse(path.read_text(encoding="utf-8"))):
            there = kind_of(other)
            if there and (there == "program" or ORDER.index(there) > ORDER.index(here)
                          or there in APART.get(here, ())):
                found.add(f"{name} -> {other}")
    return sorted(found)


def test_imports_go_down():
    assert climbing(ROOT) == []


MADE = {
    "nanoheads/heads/gates.py": "import torch\nfrom nanoheads import kernels\nfrom model import GPT\n",
    "nanoheads/kernels.py": "import torch\n", "model.py": "from nanoheads.kernels import attend\n",
    "train.py": "import model\nfrom nanoheads.study.report import page\n", "nanoheads/study/report.py": ""}


@pytest.mark.parametrize("path, text, arrow", [
    (None, "", None),
    ("nanoheads/heads/gates.py", "from nanoheads.study import report", "nanoheads.study.report"),
    ("nanoheads/heads/gates.py", "def f():\n    import nanoheads.gpu.check", "nanoheads.gpu.check"),
    ("nanoheads/study/report.py", "from train import main", "train.main"),
    ("nanoheads/study/report.py", "import importlib\nimportlib.import_module('bench')", "bench"),
    ("sample.py", "import train", "train"),
    ("nanoheads/kernels.py", "import model", "model"),
    ("model.py", "from nanoheads.text.tokenizer import Tokenizer", "nanoheads.text.tokenizer.Tokenizer"),
    ("nanoheads/text/dataset.py", "from model import GPT", "model.GPT"),
    ("nanoheads/hub/dropin.py", "from nanoheads.training import scoring", "nanoheads.training.scoring"),
    ("nanoheads/text/dataset.py", "from data.label import main", "data.label.main"),
])
def test_an_import_that_climbs_is_noticed(path, text, arrow, tmp_path):
    """Controls: trees that are made, the first without a climbing import."""
    for name, content in {**MADE, **({path: text} if path else {})}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    importer = path and path.removesuffix(".py").replace("/", ".")
    assert climbing(tmp_path) == ([f"{importer} -> {arrow}"] if path else [])


def test_the_root_holds_the_model_and_the_programs():
    assert {path.stem for path in ROOT.glob("*.py")} == {"model", *PROGRAMS}


def test_every_folder_of_the_package_has_a_place_in_the_order():
    folders = {path.parent.name for path in ROOT.glob("nanoheads/*/*.py")}
    assert folders == set(FOLDERS)


# ---- order and functions ----

def test_the_plain_gpt_comes_before_the_first_mechanism():
    classes = [node for node in ast.parse((ROOT / "model.py").read_text(encoding="utf-8")).body
               if isinstance(node, ast.ClassDef)]
    gpt, = [node for node in classes if node.name == "GPT"]
    mechanisms = [node for node in classes if "Mechanism" in map(ast.unparse, node.bases)]
    assert mechanisms and all(node.lineno > gpt.end_lineno for node in mechanisms)


def test_no_function_is_longer_than_60_lines_without_a_reason():
    long = set()
    for name, path in sources(ROOT).items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) \
                    and node.end_lineno - node.lineno >= 60:
                long.add(f"{name}:{node.name}")
    assert long <= set(LONG), "shorten it, or give a reason in LONG"


# ---- tests that `make test` leaves out ----

def test_every_slow_test_is_there():
    gone = []
    for line in (ROOT / "tests/slow.txt").read_text().splitlines():
        file, name = line.split("::")
        path = ROOT / "tests" / file
        if not path.is_file() or f"def {name}(" not in path.read_text(encoding="utf-8"):
            gone.append(line)
    assert gone == []
