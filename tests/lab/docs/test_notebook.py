"""docs/heads.ipynb runs from a fresh clone and on anybody's run; its figures are those of the programs."""
import base64
import copy
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from itertools import zip_longest

import pytest
import torch

from lab import prune
import sample
from nanoheads import scoring
from nanoheads.dataset import Dataset
from helpers import ROOT
from helpers import make_model

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: requirements-test.txt has it")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: requirements-test.txt has it")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: requirements-test.txt has it")
from nbclient.exceptions import CellExecutionError  # noqa: E402

NOTEBOOK = ROOT / "docs" / "heads.ipynb"
COMPARISON = ROOT / "docs" / "compare.ipynb"
COPIED = ("*.py", "config/*.py", "data/*.py", "data/pystdlib/*.py", "nanoheads/*.py", "lab/**/*.py",
          "study/*", "docs/*.ipynb")
# Where sums are rounded as when the outputs were stored, all digits come out again. Elsewhere Muon amplifies
# the rounding: without vector instructions losses differ by up to 1.3 %, and what single heads do by a third.
TOLERANCE, ELSEWHERE = 0.02, 0.04  # of the largest number of a column; losses on another processor
SAMPLED = {"samples"}  # one token drawn otherwise changes all that follow
NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?")


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
        nbclient.NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=where,
                                coalesce_streams=True).execute()
    return {cell["id"]: cell for cell in notebook.cells}


def printed(cell, stream="stdout"):
    return "".join(out["text"] for out in cell["outputs"] if out.get("name") == stream)


def pictures(cell):
    return sum("image/png" in out.get("data", {}) for out in cell["outputs"])


def table_of(text):
    """{first cell: [the others]} of a table's lines."""
    lines = [line.replace("random ", "random_").split() for line in text.splitlines()]
    return {words[0]: words[1:] for words in lines if words}


def copy_into(folder):
    """What of the repository the notebook needs, as in a fresh clone."""
    for path in (path for pattern in COPIED for path in ROOT.glob(pattern) if path.is_file()):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)


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


def taken_apart(text):
    """(lines with # for each measured number, in order of their words; those numbers, {place: (value, unit)})

    Measured is what has a decimal point or an exponent and does not begin its line; a place is the kind of
    line, by its number of words, its first words, and the column; a unit is one in the last digit shown.
    """
    lines, numbers = [], {}
    for line in text.splitlines():
        words = line.split()
        measured = [i for i, word in enumerate(words) if i and (m := NUMBER.fullmatch(word.rstrip(",")))
                    and any(m.groups())]
        first = " ".join(words[:measured[0]]) if measured else ""
        for i in measured:
            number = words[i].rstrip(",").replace(",", "")
            digits, _, exponent = number.partition("e")
            unit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
            numbers[len(words), i, first] = float(number), unit
            words[i] = "#"
        lines.append(" ".join(words))
    return sorted(lines), numbers


def differences(stored, fresh, numbers=True, tolerance=TOLERANCE):
    """Where the outputs of two executions of the same cells differ by more than the tolerance, in words.

    Words, rows and whole numbers must be equal, the rows in any order: some are ordered by what is measured.
    Without `numbers` any number equals any other.
    """
    found = []
    for name, cell in stored.items():
        if cell["cell_type"] != "code":
            continue
        if pictures(cell) != pictures(fresh[name]):
            found.append(f"{name}: {pictures(cell)} pictures, {pictures(fresh[name])} now")
        texts = printed(cell), printed(fresh[name])
        if name in SAMPLED:
            texts = ["\n".join(text.split("\n")[:1]) for text in texts]
        if not numbers:
            texts = [re.sub(r"[+-]?\d[\d.,]*(e[+-]\d+)?", "#", text) for text in texts]
        (old_lines, old), (new_lines, new) = map(taken_apart, texts)
        found += [f"{name}: {line!r}, {other!r} now"
                  for line, other in zip_longest(old_lines, new_lines) if line != other]
        for place in old.keys() & new.keys():
            (value, unit), (now, _) = old[place], new[place]
            largest = max(abs(v) for other, (v, _) in old.items() if other[:2] == place[:2])
            if abs(value - now) > tolerance * largest + 1.001 * unit:
                found.append(f"{name}: {place[2]} {value:g}, {now:g} now")
    return found


def text_read(cells):
    """What the notebook's model has learned: a library of Python, by its version."""
    return printed(cells["heads"]).split("\n")[0].partition(" on ")[2]


def arithmetic():
    """How sums are rounded here, as a few letters: torch's version and a chaotic chain of what layers do."""
    torch.manual_seed(0)
    x, w = torch.randn(8, 4, 128, 16), torch.randn(64, 64)
    for _ in range(30):
        x = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        x = torch.nn.functional.rms_norm(x.transpose(1, 2).reshape(8, 128, 64) @ w, (64,)).exp().sin()
        x = 3 * x.view(8, 128, 4, 16).transpose(1, 2)
    return f"{torch.__version__.split('+')[0]} {hashlib.sha256(x.numpy().tobytes()).hexdigest()[:8]}"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """(folder, {id: cell}): the notebook in a fresh clone."""
    folder = tmp_path_factory.mktemp("clone")
    copy_into(folder)
    return folder, execute(nbformat.read(NOTEBOOK, 4), folder / "docs", folder)


@pytest.fixture(scope="module")
def stored():
    """{id: cell} of the notebook as it is kept."""
    return {cell["id"]: cell for cell in nbformat.read(NOTEBOOK, 4).cells}


@pytest.fixture(scope="module")
def opened(tmp_path_factory, bytes_data):
    """(run, {id: cell}): the notebook on a plain GPT that was never measured, and whose heads all matter."""
    model, run = make_model(n_head=4), tmp_path_factory.mktemp("mine")
    state = dict(model=model.state_dict(), config=asdict(model.config), meta=Dataset(bytes_data).meta)
    torch.save(dict(state, step=7, train=dict(dataset=str(bytes_data))), run / "best.pt")
    notebook = nbformat.read(NOTEBOOK, 4)
    absent = nbformat.v4.new_code_cell('load(RUN / "none", "val", 0, device)', id="absent",
                                       metadata=dict(tags=["raises-exception"]))
    notebook.cells.append(absent)  # the kernel is running: another one would take seconds
    return run, execute(notebook, NOTEBOOK.parent, tmp_path_factory.mktemp("jupyter"), run)


# ---- as it is kept ----

def test_the_notebook_can_be_read_without_running():
    """It holds text and small pictures, and nothing of the machine that made them."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3" and NOTEBOOK.stat().st_size < 400_000
    assert problems_of(notebook) == []
    shown = {cell["id"] for cell in notebook["cells"] if cell.get("outputs")}
    assert shown == {cell["id"] for cell in notebook["cells"] if cell["cell_type"] == "code"} - {
        "install", "settings"}


@pytest.mark.parametrize("words, change", [
    ("train: metadata ['execution']", lambda cell: cell["metadata"].update(execution={})),
    ("train: execution count 2, not 3", lambda cell: cell.update(execution_count=2)),
    ("train: an absolute path", lambda cell: cell["outputs"][0].update(text="wrote /home/me/a")),
    ("train: this machine's name", lambda cell: cell["outputs"][0].update(text=f"on {platform.node()}\n")),
    ("train: a time", lambda cell: cell["outputs"][0].update(text="step 4  2.5 s\n")),
    ("train: stream on stderr", lambda cell: cell["outputs"][0].update(name="stderr")),
    ("train: a picture of more than 60 kB", lambda cell: cell["outputs"][0].update(
        data={"image/png": base64.b64encode(bytes(60_001)).decode()})),
])
def test_what_a_stored_notebook_should_not_hold_is_found(words, change):
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    change(next(cell for cell in notebook["cells"] if cell["id"] == "train"))
    assert problems_of(notebook) == [words]


# ---- in a fresh clone ----

@pytest.mark.slow
def test_a_fresh_clone_prepares_trains_measures_and_draws(fresh):
    folder, cells = fresh
    assert (folder / "data/pystdlib/meta.json").is_file() and (folder / "out/heads/ckpt.pt").is_file()
    assert len((folder / "out/heads/heads.jsonl").read_text().splitlines()) == 6
    measured = [line.split()[0] for line in printed(cells["heads"]).splitlines()[3:]]
    assert measured == [f"{layer}.{head}" for layer in range(4) for head in range(4)]
    names = {path.stem for path in (folder / "out/heads/figures").glob("*.png")}
    assert names == {"gates", "states", "active"} and pictures(cells["attend"]) == 1
    assert pictures(cells["draw"]) == len(names) and not printed(cells["draw"], "stderr")
    assert {"whole", "importance", "random_5"} < set(table_of(printed(cells["prune"])))
    assert not cells["install"]["outputs"], "a clone has all it needs"


@pytest.mark.slow
def test_gates_skips_and_a_folder_are_those_of_evaluate(fresh, monkeypatch):
    """evaluate.py --set says the same of a gate set by hand and of the skips."""
    folder, cells = fresh
    tables = {name: table_of(printed(cells[name])) for name in ("gate", "close", "skips", "folder")}
    head = printed(cells["gate"]).split()[0]
    assert tables["gate"]["0.0"][0] == tables["close"][head][1] != tables["gate"]["1.0"][0]
    monkeypatch.chdir(folder)
    before, twice, skipless = (
        scoring.evaluate("out/heads", "val", 0, "cpu", folder / "data/pystdlib", change, progress=False,
                         max_tokens=4096)["bpb"] for change in ([], [f"gate.{head}=2"], ["unet_skips=False"]))
    whole, closed = tables["gate"]["1.0"][0], tables["skips"]
    assert whole == f"{before:.4f}"
    assert tables["gate"]["2.0"] == [f"{twice:.4f}", f"{twice - before:+.4f}"]
    assert closed["all"][0] == f"{skipless:.4f}" and closed["none"] == [whole]
    assert f": {whole} bits/byte\n" in printed(cells["folder"])
    assert tables["folder"]["0.1"] == tables["close"]["0.1"][1:]


@pytest.mark.slow
def test_stored_outputs_are_what_the_code_gives(fresh, stored):
    """To TOLERANCE where sums are rounded the same; elsewhere the losses, and every word."""
    _, cells = fresh
    if text_read(cells) != text_read(stored):
        assert differences(stored, cells, numbers=False) == []
        pytest.skip(f"stored: {text_read(stored)}; here: {text_read(cells)}. Numbers were not compared")
    if arithmetic() == nbformat.read(NOTEBOOK, 4).metadata["arithmetic"]:
        assert differences(stored, cells) == []
    else:
        assert differences(stored, cells, numbers=False) == []
        assert differences({"train": stored["train"]}, cells, tolerance=ELSEWHERE) == []


@pytest.mark.slow
@pytest.mark.parametrize("name, old, new", [
    ("close", None, None), ("gate", None, None), ("skips", None, None), ("folder", None, None),
    ("heads", None, None), ("prune", None, None), ("train", None, None),
    ("close", "closed ", "opened "), ("prune", "196,618", "196,619"), ("prune", "random 5", "random 6"),
    ("heads", "\n3.3 ", "\n3.4 "), ("folder", "written for nanoheads", "written for gpt2")])
def test_a_stored_output_that_was_changed_is_found(stored, name, old, new):
    """By a word; by a twentieth of its column's largest number where no word is given."""
    assert differences(stored, stored) == []
    changed = copy.deepcopy(stored)
    [out, *_] = changed[name]["outputs"]
    if old is None:
        _, numbers = taken_apart(out["text"])
        value = max((value for value, _ in numbers.values()), key=abs)
        old = next(word for word in out["text"].split()[1:] if NUMBER.fullmatch(word) and float(
            word.replace(",", "")) == value)
        new = f"{value * 1.05:.4g}"
    assert old in out["text"]
    out["text"] = out["text"].replace(old, new, 1)
    assert len(differences(stored, changed)) in (1, 2) and differences(changed, stored)


def test_rows_may_change_places_and_must_not_be_lost(stored):
    changed = copy.deepcopy(stored)
    [out, *_] = changed["close"]["outputs"]
    head, *rows = out["text"].splitlines()
    out["text"] = "\n".join([head, *reversed(rows)]) + "\n"
    assert differences(stored, changed) == []
    out["text"] = "\n".join([head, *rows[1:]]) + "\n"
    assert len(differences(stored, changed)) >= 1
    changed = copy.deepcopy(stored)
    drawn = [out for out in changed["draw"]["outputs"] if "data" in out]
    changed["draw"]["outputs"].remove(drawn[0])
    assert differences(stored, changed) == ["draw: 3 pictures, 2 now"]


# ---- in a hosted notebook ----

@pytest.fixture
def hosted(tmp_path):
    """install(address) -> (folder, process): the first cell far from any clone; pip notes its arguments."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip/__init__.py").touch()
    note = "import sys\nopen('pip.txt', 'w').write(' '.join(sys.argv[1:]))"
    (tmp_path / "pip/__main__.py").write_text(note)
    folder = tmp_path / "hosted"
    folder.mkdir()

    def install(address):
        [source] = (cell["source"] for cell in nbformat.read(NOTEBOOK, 4).cells if cell["id"] == "install")
        assert source.count('REPOSITORY = ""') == 1
        source = source.replace('REPOSITORY = ""', f"REPOSITORY = {address!r}")
        run = subprocess.run([sys.executable, "-c", source], cwd=folder, capture_output=True, text=True,
                             env={**os.environ, "PYTHONPATH": str(tmp_path)})
        return folder, run
    return install


@pytest.mark.slow
def test_the_first_cell_fetches_and_installs(hosted, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.py").touch()
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m a"):
        subprocess.run(["git", *command.split()], cwd=source, check=True)
    folder, run = hosted(source.as_uri())
    assert (run.returncode, run.stdout) == (0, "") and (folder / "nanoheads/model.py").is_file()
    assert (folder / "pip.txt").read_text() == f"install --quiet -e {folder / 'nanoheads'}[hf]"
    assert re.search(r"^hf = ", (ROOT / "pyproject.toml").read_text(), re.M)


def test_without_an_address_the_first_cell_says_what_to_set(hosted):
    folder, run = hosted("")
    assert run.returncode == 1 and not list(folder.iterdir())
    assert run.stderr == "no model.py here: set REPOSITORY, in this cell, to the address of the repository\n"


# ---- on a run of one's own ----

@pytest.mark.slow
def test_a_run_of_ones_own_is_opened_and_not_trained(opened):
    """It has no gates, no states and no heads.jsonl: what there is to see is shown."""
    run, cells = opened
    assert {path.name for path in run.iterdir()} == {"best.pt", "folder"}
    assert not cells["train"]["outputs"] and printed(cells["skips"]).startswith("no skips")
    assert printed(cells["folder"]).startswith("written for gpt2, ")
    measured = [line.split()[0] for line in printed(cells["heads"]).splitlines()[3:]]
    assert measured == [f"{layer}.{head}" for layer in range(2) for head in range(4)]
    assert "no heads.jsonl" in printed(cells["draw"], "stderr")
    assert not pictures(cells["draw"]) and pictures(cells["attend"]) == 1


@pytest.mark.slow
def test_closed_heads_cost_what_evaluate_says(opened):
    run, cells = opened
    shown = table_of(printed(cells["close"]))
    before = shown["all"][-1]
    assert printed(cells["close"]).endswith(f"all open again: {before}, before: {before}\n")
    for head in ("0.0", "1.3"):
        whole, closed = (scoring.evaluate(run, "val", 0, "cpu", settings=change, progress=False,
                                          max_tokens=4096)["bpb"] for change in ([], [f"gate.{head}=0"]))
        _, bits, difference = shown[head]
        assert bits == f"{closed:.4f}" != before and difference == f"{closed - whole:+.4f}"


@pytest.mark.slow
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
    sample.main([f"--ckpt={folder}" for folder in folders] + ["--start=def ", "--num_samples=1",
                                                                   "--max_new_tokens=160"])
    both = printed(cells["samples"]), capsys.readouterr().out
    said, wanted = (text.rstrip("\n").split("\n") for text in both)
    assert said[0].split() == ["whole", "|", "importance", "|", "random", "1"] and said[2:] == wanted[2:]
    assert len(set(said[2].split(" | "))) == 3, "three models say three things"


# ---- what fails ----

@pytest.mark.slow
@pytest.mark.parametrize("source, words", [("1 / 0", "ZeroDivisionError"),
                                           ("import sys; sys.exit('train: no')", "train: no")])
def test_a_cell_that_fails_is_a_failure(tmp_path, source, words):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    with pytest.raises(CellExecutionError, match=words):
        execute(notebook, tmp_path, tmp_path)


def test_a_run_that_is_not_there_is_named(opened):
    run, cells = opened
    [error] = cells["absent"]["outputs"]
    assert error["ename"] == "UserError" and error["evalue"] == f"no checkpoint {run / 'none'}"
