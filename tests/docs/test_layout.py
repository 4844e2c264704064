"""The layout of the code: what docs/code.md says of it, who may import whom, and what a run loads."""

import ast
import functools
import re
import subprocess
import sys

import pytest
from helpers import CODE, ROOT

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

def on_the_page(heading):
    """The files and folders in the lists of a section of docs/code.md, in order."""
    text = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```\n(.*?)^```$", section, re.M | re.S)
    return [row.split()[0] for block in blocks for row in block.splitlines()]


def test_the_page_names_every_file_of_the_core_and_of_the_study_and_every_room_of_the_lab():
    files = {str(path.relative_to(ROOT)) for pattern in CORE for path in ROOT.glob(pattern)}
    assert sorted(on_the_page("The core")) == sorted(files - {"nanoheads/__init__.py"})
    of_study = {f"study/{path.name}" for path in ROOT.glob("study/*.py")} - {"study/__init__.py"}
    assert sorted(on_the_page("The study")) == sorted({*of_study, "compare.py"})
    rooms = {f"lab/{path.parent.name}/" for path in ROOT.glob("lab/*/__init__.py")}
    programs = {f"lab/{path.name}" for path in ROOT.glob("lab/*.py")} - {"lab/__init__.py"}
    assert sorted(on_the_page("The lab")) == sorted({*rooms, *programs})


@pytest.mark.parametrize("heading", ["The core", "The study", "The lab"])
def test_each_file_imports_from_those_above_it(heading):
    """A file or a room of the lab, as the page has them in order."""
    order, wrong = on_the_page(heading), []
    place = {name.removesuffix("/").removesuffix(".py").replace("/", "."): i for i, name in enumerate(order)}
    for i, entry in enumerate(order):
        for path in [ROOT / entry] if entry.endswith(".py") else (ROOT / entry).glob("**/*.py"):
            for name in imported(path):
                parts = name.split(".")
                known = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
                wrong += [f"{entry} -> {each}" for each in known if place.get(each, i) > i]
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
