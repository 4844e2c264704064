"""The notebooks of docs/ run from a fresh clone, and show what the stored outputs show, but for numbers."""

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
# of what a test executes
SHORTER = {NOTEBOOK: {"STEPS = 120 ": "STEPS = 6 ", "TOKENS = 4096 ": "TOKENS = 512 "},
           COMPARISON: {"seeds=[1, 2, 3]": "seeds=[1, 2], plain_seeds=2",
                        "test_tokens=131072": "test_tokens=2048",
                        "max_iters=160": "max_iters=6, block_size=32, batch_size=4, eval_tokens=1024"}}


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


def execute_shorter(path, folder):
    """Run a notebook in a fresh clone, with fewer steps and scored on fewer tokens.

    Returns ({id: cell}, {id: cell as it is stored}), the latter of cells of code alone.
    """
    notebook, stored = nbformat.read(path, 4), nbformat.read(path, 4)
    copy_into(folder)
    for line, shorter in SHORTER[path].items():
        cell, = (cell for cell in notebook.cells if line in cell["source"])
        assert cell["source"].count(line) == 1
        cell["source"] = cell["source"].replace(line, shorter)
    return (execute(notebook, folder / "docs", folder),
            {cell["id"]: cell for cell in stored.cells if cell["cell_type"] == "code"})


@pytest.mark.slow
def test_heads_prepares_trains_measures_and_draws(tmp_path):
    cells, stored = execute_shorter(NOTEBOOK, tmp_path)
    assert (tmp_path / "data/pystdlib/meta.json").is_file() and (tmp_path / "out/heads/ckpt.pt").is_file()
    for name, cell in stored.items():
        assert words_of(cells[name]) == words_of(cell), f"{name}: make notebook"
    assert not printed(cells["draw"], "stderr")


@pytest.mark.slow
def test_a_comparison_trains_judges_and_draws(tmp_path):
    """With fewer seeds and steps a verdict may be another, so that only the rows' names are as stored."""
    cells, stored = execute_shorter(COMPARISON, tmp_path)
    for name, cell in stored.items():
        first_words = [[line.split()[0] for line in printed(of).splitlines()] for of in (cells[name], cell)]
        assert first_words[0] == first_words[1] and pictures(cells[name]) == pictures(cell), "make notebook"
        assert not printed(cells[name], "stderr")
    assert {word for line in printed(cells["verdicts"]).splitlines()[1:] for word in line.split()[1:2]} <= {
        "better", "worse", "same", "undecided"}


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
