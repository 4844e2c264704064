"""The layout of the code: what docs/code.md says of it, and who may import whom."""

import ast
import os
import re
import subprocess
import sys

import pytest
from helpers import CODE, ROOT

CORE = ("model.py", "train.py", "sample.py", "evaluate.py", "plot_curves.py", "bench.py", "nanoheads/*.py")
PROGRAMS = {path.stem for path in ROOT.glob("*.py")} - {"model"}


def imported(path):
    """{dotted name: whether only inside functions} of what a file imports; from_lab("lab.x") is an import."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {node for function in ast.walk(tree) if isinstance(function, ast.FunctionDef)
              for node in ast.walk(function)}
    found = {}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            found[name] = found.get(name, True) and node in inside
    return found


def wrong_imports(root):
    """The imports that should not be, as "file -> module"."""
    found = []
    for pattern in ("model.py", "nanoheads/*.py", "study/*.py", "lab/**/*.py"):
        found += [(path, PROGRAMS) for path in root.glob(pattern)]
    for pattern in CORE:
        found += [(path, {"lab", "study"}) for path in root.glob(pattern)]
    found += [(path, {"lab"}) for pattern in ("study/*.py", "compare.py") for path in root.glob(pattern)]
    found += [(path, {"study"}) for path in root.glob("lab/**/*.py")]
    return [f"{path.relative_to(root)} -> {name}" for path, refused in sorted(found)
            for name in sorted({name.split(".")[0] for name in imported(path)} & refused)]


def test_the_core_imports_no_room_beside_it_and_no_room_another_or_a_program():
    assert wrong_imports(ROOT) == []
    folders = {path.name for path in (ROOT / "nanoheads").iterdir() if path.is_dir()}
    assert folders <= {"__pycache__"}


@pytest.mark.parametrize("path, text, said", [
    ("lab/heads/gates.py", "from model import GPT", []),
    ("study/trial.py", "from train import train", ["study/trial.py -> train"]),
    ("study/plan.py", "from model import GPT", []),
    ("study/plan.py", "from lab.heads import gates", ["study/plan.py -> lab"]),
    ("lab/heads/gates.py", "from study import stats", ["lab/heads/gates.py -> study"]),
    ("lab/heads/gates.py", "def f():\n    import bench", ["lab/heads/gates.py -> bench"]),
    ("nanoheads/dataset.py", "from lab.labels import targets", ["nanoheads/dataset.py -> lab"]),
    ("train.py", "def f():\n    from lab.heads import gates", ["train.py -> lab"]),
    ("train.py", "from study import trial", ["train.py -> study"]),
    ("compare.py", "import train, study, lab", ["compare.py -> lab"]),
    ("model.py", "import train", ["model.py -> train"])])
def test_an_import_that_should_not_be_is_found(path, text, said, tmp_path):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    assert wrong_imports(tmp_path) == said


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


def downward(order, imports):
    """The imports that lead down in this order of files, as "file -> file".

    imports: {file: {dotted name: whether only inside functions}}.
    """
    place = {name.removesuffix("/").removesuffix(".py").replace("/", "."): (i, name)
             for i, name in enumerate(order)}
    found = set()
    for file, names in imports.items():
        here = order.index(file)
        for name in names:
            parts = name.split(".")
            known = [place[key] for n in range(1, len(parts) + 1) if (key := ".".join(parts[:n])) in place]
            found |= {f"{file} -> {other}" for i, other in known if i > here}
    return found


def test_each_file_of_the_core_imports_from_those_above_it():
    order = on_the_page("The core")
    imports = {file: imported(ROOT / file) for file in order}
    assert not downward(order, imports)


def test_each_file_of_the_study_imports_from_those_above_it():
    order = on_the_page("The study")
    assert downward(order, {file: imported(ROOT / file) for file in order}) == set()


def test_each_room_of_the_lab_imports_from_those_above_it():
    order = on_the_page("The lab")
    imports = {}
    for room in order:
        for path in [ROOT / room] if room.endswith(".py") else (ROOT / room).glob("**/*.py"):
            imports[room] = {**imports.get(room, {}), **imported(path)}
    assert downward(order, imports) == set()


def test_an_import_that_leads_down_is_found():
    order = ["nanoheads/common.py", "nanoheads/config.py", "model.py"]
    assert downward(order, {"nanoheads/config.py": {"nanoheads.common": False, "model.GPT": False}}) == {
        "nanoheads/config.py -> model.py"}


def test_what_reads_others_weights_is_imported_where_it_is_asked_for():
    code = ("import sys, sample, evaluate, nanoheads.checkpoint\n"
            "print([name for name in sys.modules if name.startswith(('lab.hub', 'transformers'))])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr


# ---- what `import train` loads ----

LOADED = {  # by `import train` -> why every run needs it
    "train": "the run itself",
    "model": "the GPT and its mechanisms",
    "nanoheads.mechanism": "what a mechanism is, which model.py extends",
    "nanoheads.pruning": "in which rows of a tensor a head is, and which gates depend on no text",
    "nanoheads.by_hand": "gates and states set by hand, which are methods of a GPT",
    "nanoheads.rivals": "the literature's mechanisms, whose flags are among GPTConfig's",
    "nanoheads.attention": "attention, by whichever kernel",
    "nanoheads.kernels": "norms, heads, linear maps and the loss",
    "nanoheads.cpu": "by which library a CPU multiplies",
    "nanoheads.logits": "losses and sampling from logits",
    "nanoheads.common": "errors in one line, whole files, devices",
    "nanoheads.threads": "must set how threads wait before torch is loaded",
    "nanoheads.configurator": "reads the command line and config files",
    "nanoheads.other_names": "nanoGPT's names of keys, which any command line may have",
    "nanoheads.files": "the name of a run's folder, its one writer, checksums of splits",
    "nanoheads.timing": "mfu, in each row of a GPU's log",
    "nanoheads.dataset": "the folder of its text",
    "nanoheads.shards": "the files of a text in many of them",
    "nanoheads.batches": "what it reads at each step",
    "nanoheads.tokenizer": "bytes of a token, for bits per byte",
    "nanoheads.config": "the keys of training",
    "nanoheads.extensions": "the keys of folders beside the core",
    "nanoheads.tasks": "the keys of a task, and its rows",
    "nanoheads.checkpoint": "its saves",
    "nanoheads.start": "its folder, its model, and the state that it goes on with",
    "nanoheads.optim": "AdamW, Muon, precision",
    "nanoheads.ranks": "the process, its device, signals",
    "nanoheads.log": "config.json and log.jsonl",
    "nanoheads.memory": "the line on the memory of a step, and what to lower where it ran out",
    "nanoheads.scoring": "evaluation",
}


@pytest.mark.parametrize("argv, read", [
    (["config/scenarios/default.py", "--help"], False), (["--scale=tiny", "config/tiny.py", "--help"], False),
    (["--mechanism", "mine.py", "--help"], True), (["--mechanism=xsa,mine.py:forget", "--help"], True),
    (["named.py", "--help"], True)])
def test_files_of_mechanisms_are_looked_for_where_one_is_named(tmp_path, argv, read):
    (tmp_path / "named.py").write_text("mechanism = ['mine.py']\n")
    (tmp_path / "mine.py").write_text(CODE, encoding="utf-8")
    code = ("import sys, train\n"
            "try:\n    train.main()\n"
            "finally:\n    print('read', 'nanoheads.own_mechanism' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert f"read {read}" in done.stdout.splitlines(), done.stderr


def test_train_loads_only_what_every_run_needs():
    code = ("import sys, train\n"
            "print(*[name for name, module in sys.modules.items() if name.split('.')[0] in "
            "('nanoheads', 'model', 'train', 'config') and not hasattr(module, '__path__')])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert set(done.stdout.split()) == LOADED.keys(), done.stderr
