"""The layout of the code: what docs/code.md says of it, who may import whom, and what a run loads."""

import ast
import functools
import subprocess
import sys

import pytest
from helpers import CODE, ROOT

from study import docs_tables

CORE = ("model.py", "train.py", "sample.py", "evaluate.py", "plot_curves.py", "bench.py", "nanoheads/*.py")
PROGRAMS = {path.stem for path in ROOT.glob("*.py")} - {"model"}
# the core's tests and what they share; simulate.py is a program about studies
CORES_TESTS = ["tests/core/**/*.py", *(f"tests/{path.name}" for path in ROOT.glob("tests/*.py")
                                       if path.name != "simulate.py")]


@functools.cache
def imported(path):
    """The dotted names of what a file imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("patterns, refused", [
    (["model.py", "nanoheads/*.py", "study/*.py", "lab/**/*.py"], PROGRAMS), (CORE, {"lab", "study"}),
    (["study/*.py", "compare.py"], {"lab"}), (["lab/**/*.py"], {"study"}),
    (CORES_TESTS, {"lab", "study", "compare"})],
    ids=["a program", "what is beside the core", "the lab", "the study", "tests of what is beside the core"])
def test_the_core_imports_no_room_beside_it_and_no_room_another_or_a_program(patterns, refused):
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    wrong = [f"{path.relative_to(ROOT)} -> {name}" for path in paths for name in imported(path)
             if name.split(".")[0] in refused]
    assert paths and wrong == []


# ---- docs/code.md ----

PAGE = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")
ROOMS = {"The core": CORE, "The study": ("study/*.py", "compare.py"), "The lab": ("lab/**/*.py",)}


def on_the_page(heading):
    """The files in the lists of a section of docs/code.md, in order."""
    return docs_tables.files_in(PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0])


@pytest.mark.parametrize("heading", ROOMS)
def test_the_page_has_a_line_for_each_file(heading):
    files = [path for pattern in ROOMS[heading] for path in ROOT.glob(pattern) if path.stat().st_size]
    assert sorted(on_the_page(heading)) == sorted(str(path.relative_to(ROOT)) for path in files)


def test_the_line_of_a_file_is_the_first_sentence_of_its_docstring():
    assert docs_tables.fill_lists(PAGE, "code.md") == PAGE, "run python compare.py report --tables"


@pytest.mark.parametrize("folder", ["", "nanoheads/**/", "study/**/", "lab/**/", "data/**/", "tests/**/"])
def test_each_file_says_what_it_is_for(folder):
    files = [path for path in ROOT.glob(f"{folder}*.py") if path.stat().st_size]
    assert files and [path for path in files if not docs_tables.first_sentence(path)] == []


@pytest.mark.parametrize("heading", ROOMS)
def test_each_file_imports_from_those_above_it(heading):
    """As the page has them in order. A package's own __init__.py acts when the package is imported."""
    order, wrong = [name for name in on_the_page(heading) if not name.endswith("__init__.py")], []
    place = {name.removesuffix(".py").replace("/", "."): i for i, name in enumerate(order)}
    for i, entry in enumerate(order):
        wrong += [f"{entry} -> {name}" for name in imported(ROOT / entry) if place.get(name, i) > i]
    assert len(order) > 5 and wrong == []


# ---- what a run loads ----

LOADED = """
    train model nanoheads.mechanism nanoheads.pruning nanoheads.by_hand nanoheads.rivals nanoheads.attention
    nanoheads.kernels nanoheads.cpu nanoheads.logits nanoheads.common nanoheads.threads nanoheads.configurator
    nanoheads.other_names nanoheads.files nanoheads.timing nanoheads.dataset nanoheads.shards
    nanoheads.batches nanoheads.tokenizer nanoheads.config nanoheads.extensions nanoheads.tasks
    nanoheads.checkpoint nanoheads.start nanoheads.optim nanoheads.ranks nanoheads.log nanoheads.memory
    nanoheads.scoring"""


def test_programs_load_only_what_every_run_needs(tmp_path):
    """What reads mechanisms of one's own, and others' weights, is loaded where it is asked for."""
    (tmp_path / "mine.py").write_text(CODE, encoding="utf-8")
    code = f"""
import sys, train
print(*[name for name, module in sys.modules.items() if name.split('.')[0] in
        ('nanoheads', 'model', 'train', 'config') and not hasattr(module, '__path__')])
for named in ('config/scenarios/default.py', '--mechanism={tmp_path / 'mine.py'}'):
    try:
        train.main([named, '--help'])
    except SystemExit:
        print('\\nread', 'nanoheads.own_mechanism' in sys.modules)
import sample, evaluate
print([name for name in sys.modules if name.startswith(('lab.hub', 'transformers'))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert set(lines[0].split()) == set(LOADED.split()), done.stderr
    assert [line for line in lines if line.startswith("read ")] == ["read False", "read True"]
    assert lines[-1] == "[]"
