"""docs/heads.ipynb runs from a fresh clone and on anybody's run; its figures are those of the programs."""
import io
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import prune
import sample
from nanoheads.heads import inspection as inspect_heads
from nanoheads.text.dataset import Dataset
from test_inspect_heads import make_model

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: requirements-test.txt has it")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: requirements-test.txt has it")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: requirements-test.txt has it")
from nbclient.exceptions import CellExecutionError  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "docs" / "heads.ipynb"
COPIED = ("*.py", "config/*.py", "data/*.py", "data/pystdlib/*.py", "nanoheads/**/*.py", "docs/heads.ipynb")
SHORTER = {"STEPS = 240 ": "STEPS = 4 ", "TOKENS = 16384 ": "TOKENS = 1024 "}


def execute(notebook, folder, own, run=None):
    """Run all cells in a folder; {id: cell} with outputs. Raises CellExecutionError where one fails.

    own: a folder for what Jupyter and IPython write. run: what NANOHEADS_RUN says, None: nothing.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
            patch.setenv(name, str(own))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("NANOHEADS_RUN", raising=False)
        if run:
            patch.setenv("NANOHEADS_RUN", str(run))
        where = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    return {cell["id"]: cell for cell in notebook.cells}


def printed(cell, stream="stdout"):
    return "".join(out["text"] for out in cell["outputs"] if out.get("name") == stream)


def pictures(cell):
    return sum("image/png" in out.get("data", {}) for out in cell["outputs"])


def table_of(text):
    """{first cell: [the others]} of a table's lines."""
    lines = [line.replace("random ", "random_").split() for line in text.splitlines()]
    return {words[0]: words[1:] for words in lines if words}


def soiled(notebook):
    """Ids of the cells that hold what an execution left."""
    return [cell["id"] for cell in notebook["cells"] if cell.get("outputs") or cell.get("execution_count")
            or cell["metadata"]]


@pytest.fixture(scope="module")
def opened(tmp_path_factory, bytes_data):
    """(run, {id: cell}): the notebook on a plain GPT that was never measured, and whose heads all matter."""
    model, run = make_model(n_head=4), tmp_path_factory.mktemp("mine")
    state = dict(model=model.state_dict(), config=asdict(model.config), meta=Dataset(bytes_data).meta)
    torch.save(dict(state, step=7, train=dict(dataset=str(bytes_data))), run / "best.pt")
    return run, execute(nbformat.read(NOTEBOOK, 4), NOTEBOOK.parent, tmp_path_factory.mktemp("jupyter"), run)


# ---- as it is kept ----

def test_the_notebook_is_kept_without_outputs():
    """They differ from machine to machine; Jupyter has "clear all outputs"."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    assert soiled(notebook) == [] and notebook["metadata"]["kernelspec"]["name"] == "python3"
    notebook["cells"][1]["execution_count"] = 1
    assert soiled(notebook) == ["settings"]


# ---- in a fresh clone ----

def test_a_fresh_clone_prepares_trains_measures_and_draws(tmp_path):
    for path in (path for pattern in COPIED for path in ROOT.glob(pattern)):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    text = NOTEBOOK.read_text(encoding="utf-8")
    for long, short in SHORTER.items():
        assert text.count(long) == 1
        text = text.replace(long, short)
    cells = execute(nbformat.reads(text, 4), tmp_path / "docs", tmp_path)
    for words in ("pystdlib: byte", "4 measurements took", "wrote out/heads/ckpt.pt"):
        assert words in printed(cells["train"])
    measured = [line.split()[0] for line in printed(cells["heads"]).splitlines()[3:]]
    assert measured == [f"{layer}.{head}" for layer in range(4) for head in range(4)]
    names = {path.stem for path in (tmp_path / "out/heads/figures").glob("*.png")}
    assert names == {"gates", "states", "active", "metrics", "attention"}
    assert pictures(cells["draw"]) == len(names) and not printed(cells["draw"], "stderr")
    assert {"whole", "importance", "random_5"} < set(table_of(printed(cells["prune"])))


# ---- on a run of one's own ----

def test_a_run_of_ones_own_is_opened_and_not_trained(opened):
    """It has no gates, no states and no heads.jsonl: what there is to see is shown."""
    run, cells = opened
    assert {path.name for path in run.iterdir()} == {"best.pt", "figures"} and not cells["train"]["outputs"]
    measured = [line.split()[0] for line in printed(cells["heads"]).splitlines()[3:]]
    assert measured == [f"{layer}.{head}" for layer in range(2) for head in range(4)]
    assert "no heads.jsonl" in printed(cells["draw"], "stderr")
    assert pictures(cells["draw"]) == 1 and (run / "figures/attention.png").is_file()


def test_closed_heads_cost_what_inspect_heads_says(opened, monkeypatch, capsys):
    run, cells = opened
    shown = table_of(printed(cells["close"]))
    before = shown["all"][-1]
    assert printed(cells["close"]).endswith(f"all open again: {before}, before: {before}\n")
    for head in ("0.0", "1.3"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"gate {head} 0\n"))
        inspect_heads.main([f"--ckpt={run}", "--max_new_tokens=1", "--device=cpu"])
        _, bits, difference = shown[head]
        assert bits != before
        assert f"bits/byte {before} -> {bits} ({difference})" in capsys.readouterr().out


def test_pruned_models_are_those_of_prune_py(opened, tmp_path, capsys, monkeypatch):
    """Their bits per byte, and what sample.py has them say."""
    run, cells = opened
    prune.main([f"--ckpt={run}", "--to", "0.5", "--by", "importance", "random", "--text=4096",
                "--tokens=16384", "--rounds=0", "--seed=1", "--device=cpu", f"--out_dir={tmp_path}",
                f"--json={tmp_path / 'rows.json'}"])
    rows = {row["by"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    shown = table_of(printed(cells["prune"]))
    for name, by in (("importance", "importance"), ("random_1", "random")):
        row = rows[by]
        assert shown[name] == [str(row["kept"]), f"{row['params']:,}", f"{row['bpb']:.4f}",
                               f"{row['bpb'] - row['bpb_before']:+.4f}"]
        assert shown["whole"][2] == f"{row['bpb_before']:.4f}" != shown[name][2]
    assert len({each[2] for name, each in shown.items() if "random" in name}) > 1, "other draws, other models"
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "110")
    folders = run, tmp_path / "importance-0.5", tmp_path / "random-0.5"
    sample.main([f"--ckpt={folder}" for folder in folders] + ["--start=def ", "--max_new_tokens=240"])
    both = printed(cells["samples"]), capsys.readouterr().out
    said, wanted = (text.rstrip("\n").split("\n") for text in both)
    assert said[0].split() == ["whole", "|", "importance", "|", "random", "1"] and said[2:] == wanted[2:]
    assert len(set(said[2].split(" | "))) == 3, "three models say three things"


# ---- what fails ----

@pytest.mark.parametrize("source, words", [("1 / 0", "ZeroDivisionError"),
                                           ("import sys; sys.exit('train: no')", "train: no")])
def test_a_cell_that_fails_is_a_failure(tmp_path, source, words):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    with pytest.raises(CellExecutionError, match=words):
        execute(notebook, tmp_path, tmp_path)


def test_a_run_that_is_not_there_is_named(tmp_path):
    run = tmp_path / "none"
    with pytest.raises(CellExecutionError, match=f"no checkpoint {run}"):
        execute(nbformat.read(NOTEBOOK, 4), NOTEBOOK.parent, tmp_path, run)
    assert not run.exists()
