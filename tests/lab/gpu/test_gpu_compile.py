"""The GPU check: what is compiled again, what counts as wrong, what is refused. No GPU, no CUDA build: the
processes that compile are stand-ins, which print rows.
"""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from model import MECHANISMS
from nanoheads.common import ROOT, UserError
from tests.lab.gpu import check, entries, environment, report
from tests.lab.gpu.entries import CARDS, ENTRIES, Check

FINE = {"kernels": 44, "bytes": 10**8, "shared": 2048, "limit": 101376, "largest": "triton_0", "too_large": 0}
STAND_IN = """
import contextlib, json, os, signal, sys
checks, row, number = json.loads(sys.argv[1])
for entry, *_ in checks:
    if entry == "sink" and number:
        with contextlib.suppress(FileExistsError):  # where another process has died already
            open("died", "x").close()
            os.kill(os.getpid(), number)
    print(json.dumps(row), flush=True)
"""
PAGE = "<!-- table: commits gpu-compile.json -->\n<!-- end -->\n"


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """gpu(argument, ...) -> (exit code, the checks that were compiled), in a repository of its own.

    gpu.row: what each of them gives; gpu.dies: the signal by which the first process that comes to "sink"
    ends; gpu.started: the checks of each process; gpu.rows(): the results by now.
    """
    def git(*args):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a", *args]
        return subprocess.check_output(command, cwd=tmp_path, text=True).strip()

    def start(checks):
        gpu.started.append(checks)
        request = json.dumps([checks, gpu.row, gpu.dies])
        return subprocess.Popen([sys.executable, "-c", STAND_IN, request], cwd=tmp_path, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def gpu(*argv):
        gpu.started = []
        with pytest.raises(SystemExit) as e:
            check.main([*argv, "--jobs=2"])
        return e.value.code, [each for checks in gpu.started for each in checks]

    git("init", "-q")
    for name, text in (("model.py", "x"), ("page.md", PAGE)):
        (tmp_path / name).write_text(text)
        git("add", name)
        git("commit", "-q", "-m", name)
    for module in (check, report):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "gpu-compile.json")
    monkeypatch.setattr(report, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(check, "LOG", tmp_path / "log")
    monkeypatch.setattr(check, "prepare", lambda: None)  # of what only a CUDA build has
    monkeypatch.setattr(check, "start", lambda checks: start([*checks]))
    gpu.row, gpu.dies, gpu.started, gpu.git = FINE, None, [], git
    gpu.rows = lambda: json.loads(report.RESULTS.read_text())["checks"]
    return gpu


# ---- the entries ----


def test_every_mechanism_is_compiled_on_every_card_and_can_be_built():
    every = entries.checks()
    trained = {(each.entry, each.card) for each in every if each.kind == "train"}
    assert {(name, card) for name in (*MECHANISMS, "all_on", "muon") for card in CARDS} <= trained
    for each in {each for each in every if each.entry in ENTRIES and each.card == CARDS[0]}:
        assert entries.settings(each).problems() == [], each.key
    # what uses FlexAttention at every head size
    sizes = {(each.head_size, each.dtype) for each in entries.checks(("acag",)) if each.kind == "train"}
    assert sizes == {*((size, "bfloat16") for size in (16, 32, 64, 128)), (64, "float32"), (128, "float32")}
    assert {each.head_size for each in entries.checks(("xsa",))} == {64}
    # moving schedules are those of the mechanisms that are on
    config = entries.settings(Check("all_on", "steps"))
    assert config.unet_ramp == 3 and config.constraint_stop == 2
    assert entries.settings(Check("plain", "steps")).unet_ramp == 0


# ---- what is compiled again ----


def test_what_a_commit_has_compiled_is_not_compiled_again(gpu, tmp_path):
    """The commit is the last that changed the code; where that has changed since, all is compiled."""
    every, commit = {*entries.checks(("xsa",))}, gpu.git("rev-parse", "HEAD~")[:8]
    code, compiled = gpu("xsa")
    assert code == 0 and {*compiled} == every and {row["commit"] for row in gpu.rows().values()} == {commit}
    assert {each.key for each in every} == {*gpu.rows()} and f"| {commit} |" in report.PAGE.read_text()
    for checks in gpu.started:  # a process compiles for one card
        assert len({(check.WORK[each.kind], each.card) for each in checks}) == 1
    assert gpu("xsa") == (0, [])
    rows, (one, other, *_) = gpu.rows(), compiled
    rows[one.key]["commit"], rows[other.key]["error"] = "another", "the process died"
    report.write({**rows, "gone train 64 bfloat16 sm_90": FINE})
    assert {*gpu("xsa")[1]} == {one, other} and len(gpu.rows()) == len(every)
    assert {*gpu("xsa", "--again")[1]} == every
    (tmp_path / "model.py").write_text("y")
    for _ in range(2):
        assert {*gpu("xsa")[1]} == every
    assert {row["commit"] for row in gpu.rows().values()} == {f"{commit}-dirty"}


# ---- what is wrong ----


@pytest.mark.parametrize("row, words", [
    ({"shared": 200000, "too_large": 1}, "asks for 200,000 bytes of shared memory, the card has 101,376"),
    ({"error": "InductorError: no"}, "does not compile: InductorError: no"),
    ({"breaks": ["aten.nonzero"]}, "graph break: aten.nonzero"),
    ({"graphs": [1, 1, 2, 2, 2]}, "recompiled: [1, 1, 2, 2, 2]")], ids=lambda value: "".join(value)[:9])
def test_each_fault_makes_the_check_fail(gpu, capsys, row, words):
    gpu.row = {**FINE, **row}
    assert gpu("xsa")[0] == 1
    said = capsys.readouterr().out
    assert words in said and "1 problems" in said


# ---- processes ----


def test_a_process_that_dies_takes_no_other_check_with_it(gpu):
    gpu.dies = signal.SIGKILL
    code, _ = gpu("sink", "xsa")
    wrong = [key for key, row in gpu.rows().items() if "error" in row]
    assert code == 1 and len(gpu.rows()) == len(entries.checks(("sink", "xsa")))
    assert len(wrong) == 1 and wrong[0].startswith("sink") and "died" in gpu.rows()[wrong[0]]["error"]


def test_after_an_interrupt_nothing_more_is_compiled(gpu):
    gpu.dies, rows = signal.SIGINT, {}
    wanted = [Check(name, "train") for name in ("plain", "sink", "xsa")]
    check.compile_all(wanted, 1, rows.__setitem__)
    assert [*rows] == wanted[:1] and len(gpu.started) == 1


# ---- what is refused, in one line ----


@pytest.mark.parametrize("tools, free, version, words", [
    ("nm", 9, None, ["no gcc"]),
    ("gcc nm", 3, None, ["3.0 GB are free", "5 GB are needed"]),
    ("gcc nm", 9, ("2.99.1+cu130", "'13.0'"), ["2.99.1", "knows the inner parts of"]),
    ("gcc nm", 9, ("2.13.0+cpu", "None"), ["2.13.0", "is a CPU build"])])
def test_an_environment_that_cannot_compile_is_one_line(monkeypatch, tmp_path, tools, free, version, words):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(environment.shutil, "which", lambda tool: tool if tool in tools.split() else None)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda place: SimpleNamespace(free=free << 30))
    folder = tmp_path / "venv/lib/python3.11/site-packages/torch"
    if version:
        folder.mkdir(parents=True)
        (folder / "version.py").write_text("__version__ = '%s'\ncuda: Optional[str] = %s\n" % version)
    with pytest.raises(SystemExit) as e:
        environment.main([str(tmp_path / "venv")])
    assert "\n" not in e.value.code and e.value.code.startswith("gpu-check: ")
    assert all(word in e.value.code for word in words) and (tmp_path / "venv").exists() == bool(version)


def test_the_recipe_is_for_the_torch_that_the_project_pins():
    assert f"torch=={environment.TORCH}\n" in (ROOT / "requirements.txt").read_text()


def test_what_makes_no_sense_is_one_line(gpu):
    assert gpu("acg")[0].startswith("gpu-check: no entry is called 'acg'")
    report.RESULTS.write_text("{")
    assert gpu("xsa")[0].startswith(f"gpu-check: {report.RESULTS} is not a results file")
    with pytest.raises(UserError, match="--jobs=0 must be at least 1"):
        check.wanted_checks(check.arguments(["--jobs=0"]))


# ---- tables ----


def test_the_page_holds_the_tables_of_the_results():
    text = report.PAGE.read_text(encoding="utf-8")
    assert report.filled(text) == text, "run: python -m tests.lab.gpu.check --tables"
