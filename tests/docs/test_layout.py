"""Who may import whom: libraries import no program, and text/ does not know the model."""

import ast
import subprocess
import sys

import pytest
from conftest import ROOT

PROGRAMS = {path.stem for path in ROOT.glob("*.py")} - {"model"}
ALLOWED = {"nanoheads/study": {"train"}}  # a run of a study is a run of train.py


def imported(path):
    """The dotted names of all imports of a file, those inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def wrong_imports(root):
    """The imports that should not be, as "file -> module"."""
    found = []
    for path in sorted([*root.glob("nanoheads/**/*.py"), root / "model.py"]):
        folder = path.parent.relative_to(root).as_posix()
        refused = PROGRAMS - ALLOWED.get(folder, set())
        if folder == "nanoheads/text":
            refused = refused | {"model"}
        found += [f"{path.relative_to(root)} -> {name}" for name in sorted(imported(path) & refused)]
    return found


def test_libraries_import_no_program_and_text_no_model():
    assert wrong_imports(ROOT) == []


@pytest.mark.parametrize("path, text, said", [
    ("nanoheads/heads/gates.py", "from model import GPT", []),
    ("nanoheads/study/runs.py", "from train import train", []),
    ("nanoheads/study/runs.py", "from bench import main", ["nanoheads/study/runs.py -> bench"]),
    ("nanoheads/heads/gates.py", "def f():\n    import train", ["nanoheads/heads/gates.py -> train"]),
    ("nanoheads/text/dataset.py", "from model import GPT", ["nanoheads/text/dataset.py -> model"]),
    ("model.py", "import train", ["model.py -> train"])])
def test_an_import_that_should_not_be_is_found(path, text, said, tmp_path):
    (tmp_path / "model.py").write_text("import torch\n")
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    assert wrong_imports(tmp_path) == said


def test_what_reads_others_weights_is_imported_where_it_is_asked_for():
    code = ("import sys, sample, evaluate, nanoheads.training.checkpoint\n"
            "print([name for name in sys.modules if name.startswith(('nanoheads.hub', 'transformers'))])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr


# ---- tests that `make test` leaves out ----

def test_every_slow_test_is_there():
    gone = []
    for line in (ROOT / "tests/slow.txt").read_text().splitlines():
        file, name = line.split("::")
        path = next(ROOT.glob(f"tests/*/{file}"), None)
        if path is None or f"def {name}(" not in path.read_text(encoding="utf-8"):
            gone.append(line)
    assert gone == []
