"""Who may import whom: libraries import no program, text/ does not know the model, nothing runs back up."""

import ast
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from helpers import CODE

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


def written_in_place(path):
    """The calls of a file that write into whatever stands at a path, also behind a link, as "file:line"."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or "os.devnull" in ast.unparse(node):
            continue
        name, given = ast.unparse(node.func), [ast.unparse(each) for each in node.args]
        opener = next((ast.unparse(each.value) for each in node.keywords if each.arg == "opener"), None)
        opens = name == "open" and set("".join(given[1:2])) & set("wa+") and opener != "in_place"
        if opens or name.endswith((".write_text", ".write_bytes")) or name == "os.open" and "WR" in given[1]:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_files_are_written_by_what_follows_no_link():
    """write_atomic(), opened_anew() and in_place() of common.py; an export's folder is a new one."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("nanoheads/**/*.py"), *ROOT.glob("data/**/*.py")]
    found = {place for path in files for place in written_in_place(path)}
    assert {place.split(":")[0] for place in found} == {"nanoheads/hub/huggingface.py"}


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


# ---- the map in README.md ----

BESIDE_MODEL = {"own_mechanism"}  # a file of nanoheads/ that knows the model


def part_of(name):
    """The part of the project that a module is in, as README.md's map calls it; None: it is none of ours."""
    first, *rest = name.split(".")
    if first != "nanoheads":
        return f"{first}.py" if (ROOT / f"{first}.py").is_file() else None
    if rest and (ROOT / "nanoheads" / rest[0]).is_dir():
        return f"{rest[0]}/"
    if rest and rest[0] in BESIDE_MODEL:
        return "own_mechanism.py"
    return "nanoheads/*.py" if rest and (ROOT / "nanoheads" / f"{rest[0]}.py").is_file() else None


def imports_by_part():
    """{part: {part that it imports: whether only inside functions}}."""
    found = {}
    for path in [*ROOT.glob("*.py"), *ROOT.glob("nanoheads/**/*.py"), *ROOT.glob("data/**/*.py")]:
        place = path.relative_to(ROOT).with_suffix("").parts
        part = "data/" if place[0] == "data" else part_of(".".join(place))
        if part is None:
            continue  # an empty __init__.py
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inside = {node for function in functions for node in ast.walk(function)}
        row = found.setdefault(part, {})
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for other in {part_of(name) for name in names} - {None, part}:
                row[other] = row.get(other, True) and node in inside
    return found


def parts_on_the_map():
    """{part: {part that it imports: whether a * follows it}} of README.md's map, in its order."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block, = re.findall(r"\*\*Who imports whom.*?^```\n(.*?)^```$", text, re.M | re.S)
    found = {}
    for row in block.splitlines():
        part, _, others = row.partition("->")
        found[part.strip()] = {other.removesuffix("*"): other.endswith("*") for other in others.split()}
    return found


def test_the_map_names_who_imports_whom():
    assert parts_on_the_map() == imports_by_part()


def upward(order, imports):
    """The imports {part: parts} that lead up in this order of parts."""
    return [f"{part} -> {other}" for part, others in imports.items() for other in others
            if order.index(other) < order.index(part)]


def test_no_part_imports_one_that_stands_above_it():
    assert upward(list(parts_on_the_map()), imports_by_part()) == []


def test_an_import_that_leads_up_is_found():
    order = list(parts_on_the_map())
    assert upward(order, {"training/": ["hub/", "study/"], "study/": ["train.py"]}) == ["training/ -> study/"]
    for part in ("compare.py", "study/", "probes/", "heads/"):
        assert upward(order, {"training/": [part]})


LOADED = {  # by `import train` -> why every run needs it
    "train": "the run itself",
    "model": "the GPT and its mechanisms",
    "nanoheads.mechanism": "what a mechanism is, which model.py extends",
    "nanoheads.rivals": "the literature's mechanisms, whose flags are among GPTConfig's",
    "nanoheads.attention": "attention, by whichever kernel",
    "nanoheads.kernels": "norms, heads, linear maps and the loss",
    "nanoheads.cpu": "by which library a CPU multiplies",
    "nanoheads.logits": "losses and sampling from logits",
    "nanoheads.common": "errors in one line, whole files, devices",
    "nanoheads.threads": "must set how threads wait before torch is loaded",
    "nanoheads.configurator": "reads the command line and config files",
    "nanoheads.other_names": "nanoGPT's names of keys, which any command line may have",
    "nanoheads.folders": "the name of a run's folder",
    "nanoheads.locks": "one writer for each folder",
    "nanoheads.timing": "mfu, in each row of a GPU's log",
    "nanoheads.text.dataset": "batches",
    "nanoheads.text.tokenizer": "bytes of a token, for bits per byte",
    "nanoheads.text.checksums": "each split is compared with its checksum before it is read",
    "nanoheads.training.config": "the keys of training",
    "nanoheads.training.checkpoint": "what a run starts from, and its saves",
    "nanoheads.training.optim": "AdamW, Muon, precision",
    "nanoheads.training.ranks": "the process, its device, signals",
    "nanoheads.training.runlog": "config.json and log.jsonl",
    "nanoheads.training.scoring": "evaluation",
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
