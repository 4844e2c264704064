"""docs/heads.ipynb runs from a fresh clone, and what it prints is what the programs say."""

import base64
import json
import os
import platform
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT


nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: requirements-test.txt has it")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: requirements-test.txt has it")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: requirements-test.txt has it")

NOTEBOOK = ROOT / "docs" / "heads.ipynb"
COMPARISON = ROOT / "docs" / "compare.ipynb"
COPIED = ("*.py", "config/*.py", "data/*.py", "data/pystdlib/*.py", "nanoheads/*.py", "lab/**/*.py",
          "study/*", "docs/*.ipynb")
SHORTER = {"STEPS = 120 ": "STEPS = 6 ", "TOKENS = 4096 ": "TOKENS = 512 "}  # of what a test executes


def execute(notebook, folder, own):
    """Run all cells in a folder; {id: cell} with outputs. CellExecutionError: one fails.

    own: a folder for what Jupyter and IPython write.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
            patch.setenv(name, str(own))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("NANOHEADS_RUN", raising=False)
        where = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=where,
                                coalesce_streams=True).execute()
    return {cell["id"]: cell for cell in notebook.cells}


def printed(cell, stream="stdout"):
    return "".join(out["text"] for out in cell["outputs"] if out.get("name") == stream)


def pictures(cell):
    return sum("image/png" in out.get("data", {}) for out in cell["outputs"])


def copy_into(folder):
    """What of the repository the notebook needs, as in a fresh clone."""
    for path in (path for pattern in COPIED for path in ROOT.glob(pattern) if path.is_file()):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)


def words_of(cell):
    """What a cell shows, in lines of words: # for each number, in any order, since some rows are sorted by
    what is measured; and how many pictures. Of texts that a model samples the first line.
    """
    text = printed(cell).partition("\n")[0] if cell["id"] == "samples" else printed(cell)
    lines = re.sub(r"[+-]?\d[\d.,]*(e[+-]\d+)?", "#", text).splitlines()
    return sorted(" ".join(line.split()) for line in lines), pictures(cell)


def problems_of(notebook):
    """What a stored notebook should not hold, or lacks, in words."""
    found, count = [], 0
    for cell in notebook["cells"]:
        if cell["metadata"]:
            found.append(f"{cell['id']}: metadata {sorted(cell['metadata'])}")
        if cell["cell_type"] != "code":
            continue
        count += 1
        if cell["execution_count"] != count:
            found.append(f"{cell['id']}: execution count {cell['execution_count']}, not {count}")
        for out in cell["outputs"]:
            text, png = "".join(out.get("text", "")), out.get("data", {}).get("image/png", "")
            if out["output_type"] == "error" or out.get("name") == "stderr":
                found.append(f"{cell['id']}: {out['output_type']} on stderr")
            if re.search(r"(^|[\s'\"(=])(/|~|[A-Z]:\\)\w", text):
                found.append(f"{cell['id']}: an absolute path")
            if re.search(rf"\b{re.escape(platform.node() or 'localhost')}\b", text):
                found.append(f"{cell['id']}: this machine's name")
            if re.search(r"\d ?(s|ms|seconds|tokens/s)\b", text):
                found.append(f"{cell['id']}: a time")
            if len(base64.b64decode(png)) > 60_000:
                found.append(f"{cell['id']}: a picture of more than 60 kB")
    return found


@pytest.mark.parametrize("path", [NOTEBOOK, COMPARISON], ids=lambda path: path.name)
def test_a_notebook_can_be_read_without_running(path):
    """It holds text and small pictures, and nothing of the machine that made them."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3" and path.stat().st_size < 400_000
    assert problems_of(notebook) == [] and any(cell.get("outputs") for cell in notebook["cells"])


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """(folder, {id: cell}): the notebook in a fresh clone, after fewer steps and scored on fewer tokens."""
    folder, notebook = tmp_path_factory.mktemp("clone"), nbformat.read(NOTEBOOK, 4)
    copy_into(folder)
    settings, = (cell for cell in notebook.cells if cell["id"] == "settings")
    for line, shorter in SHORTER.items():
        assert settings["source"].count(line) == 1
        settings["source"] = settings["source"].replace(line, shorter)
    return folder, execute(notebook, folder / "docs", folder)


@pytest.mark.slow
def test_a_fresh_clone_prepares_trains_measures_and_draws(fresh):
    """And shows what the stored outputs show, but for the numbers."""
    folder, cells = fresh
    assert (folder / "data/pystdlib/meta.json").is_file() and (folder / "out/heads/ckpt.pt").is_file()
    stored = {cell["id"]: cell for cell in nbformat.read(NOTEBOOK, 4).cells if cell["cell_type"] == "code"}
    for name, cell in stored.items():
        assert words_of(cells[name]) == words_of(cell), f"{name}: make notebook"
    assert not printed(cells["draw"], "stderr")


# ---- in a hosted notebook ----

def test_far_from_a_clone_the_first_cell_fetches_and_installs_or_says_what_to_set(tmp_path):
    """pip is one that notes its arguments."""
    for name in ("pip", "source", "hosted"):
        (tmp_path / name).mkdir()
    (tmp_path / "pip/__init__.py").touch()
    note = "import sys\nopen('pip.txt', 'w').write(' '.join(sys.argv[1:]))"
    (tmp_path / "pip/__main__.py").write_text(note)
    (tmp_path / "source/model.py").touch()
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m a"):
        subprocess.run(["git", *command.split()], cwd=tmp_path / "source", check=True)
    cell, = (cell["source"] for cell in nbformat.read(NOTEBOOK, 4).cells if cell["id"] == "install")
    assert cell.count('REPOSITORY = ""') == 1
    folder = tmp_path / "hosted"

    def install(address):
        source = cell.replace('REPOSITORY = ""', f"REPOSITORY = {address!r}")
        return subprocess.run([sys.executable, "-c", source], cwd=folder, capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": str(tmp_path)})
    run = install("")
    assert run.returncode == 1 and "set REPOSITORY" in run.stderr and not list(folder.iterdir())
    run = install((tmp_path / "source").as_uri())
    assert (run.returncode, run.stdout) == (0, "") and (folder / "nanoheads/model.py").is_file()
    assert (folder / "pip.txt").read_text() == f"install --quiet -e {folder / 'nanoheads'}[hf]"
