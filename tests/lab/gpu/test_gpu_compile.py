"""The GPU check: what is compiled again, what counts as wrong, what is refused. No GPU, no CUDA build."""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from model import MECHANISMS
from nanoheads.common import ROOT
from tests.lab.gpu import check, entries, environment, report
from tests.lab.gpu.entries import CARDS, ENTRIES, Check

FINE = {"kernels": 44, "bytes": 10**8, "shared": 2048, "limit": 101376, "largest": "triton_0", "too_large": 0}


@pytest.fixture
def results(monkeypatch):
    """Results that are kept in memory; results.compiled: the checks that were compiled, each with row()."""
    monkeypatch.setattr(report, "write", lambda rows: found.rows.update(rows))
    monkeypatch.setattr(report, "read", lambda: dict(found.rows))
    monkeypatch.setattr(report, "code_commit", lambda: found.commit)
    monkeypatch.setattr(report, "write_page", lambda: False)
    monkeypatch.setattr(check, "prepare", lambda: None)
    found = SimpleNamespace(rows={}, compiled=[], commit="1234abcd", row=lambda check: FINE)

    def compile_all(wanted, jobs, done):
        found.compiled = list(wanted)
        for each in wanted:
            done(each, dict(found.row(each)))

    monkeypatch.setattr(check, "compile_all", compile_all)
    return found


def run(*argv):
    """The exit code of the check with these arguments."""
    with pytest.raises(SystemExit) as e:
        check.main(list(argv))
    return e.value.code


# ---- the entries ----

@pytest.mark.slow
def test_every_mechanism_is_compiled_on_every_card():
    trained = {(c.entry, c.card) for c in entries.checks() if c.kind == "train"}
    assert {(name, card) for name in (*MECHANISMS, "all_on", "muon") for card in CARDS} <= trained


@pytest.mark.slow
def test_every_check_is_a_model_that_can_be_built():
    for each in entries.checks():
        if each.entry in ENTRIES:
            assert entries.settings(each).problems() == [], each.key


def test_what_uses_flex_attention_is_compiled_at_every_head_size():
    sizes = {(c.head_size, c.dtype) for c in entries.checks(("acag",)) if c.kind == "train"}
    assert sizes == {(16, "bfloat16"), (32, "bfloat16"), (64, "bfloat16"), (128, "bfloat16"),
                     (64, "float32"), (128, "float32")}
    assert {c.head_size for c in entries.checks(("xsa",))} == {64}


def test_moving_schedules_are_those_of_the_mechanisms_that_are_on():
    config = entries.settings(Check("all_on", "steps"))
    assert config.unet_ramp == 3 and config.constraint_stop == 2
    assert entries.settings(Check("plain", "steps")).unet_ramp == 0


# ---- what is compiled again ----

def test_what_a_commit_has_compiled_is_not_compiled_again(results):
    every = entries.checks(("xsa",))
    assert run("xsa") == 0 and results.compiled == every
    assert all(row["commit"] == "1234abcd" for row in results.rows.values())
    assert run("xsa") == 0 and results.compiled == []
    results.rows[every[0].key]["commit"] = "another"
    assert run("xsa") == 0 and results.compiled == every[:1]
    results.rows[every[1].key]["error"] = "the process died"
    run("xsa")
    assert results.compiled == every[1:2]
    run("xsa", "--again")
    assert results.compiled == every


@pytest.mark.parametrize("commit", ["1234abcd-dirty", None])
def test_code_that_is_in_no_commit_is_always_compiled(results, commit):
    results.commit = commit
    for _ in range(2):
        assert run("xsa") == 0 and results.compiled == entries.checks(("xsa",))


def test_the_commit_is_the_last_that_changed_the_code(tmp_path, monkeypatch):
    def git(*args):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a", *args]
        return subprocess.check_output(command, cwd=tmp_path, text=True).strip()

    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert report.code_commit() is None
    git("init", "-q")
    for name in ("model.py", "README.md"):
        (tmp_path / name).write_text("x")
        git("add", name)
        git("commit", "-q", "-m", name)
    commit = git("rev-parse", "HEAD~")[:8]
    (tmp_path / "README.md").write_text("y")
    assert report.code_commit() == commit
    (tmp_path / "model.py").write_text("y")
    assert report.code_commit() == f"{commit}-dirty"


# ---- what is wrong ----

@pytest.mark.parametrize("row, words", [
    ({"shared": 200000, "too_large": 1}, "asks for 200,000 bytes of shared memory, the card has 101,376"),
    ({"error": "InductorError: no"}, "does not compile: InductorError: no"),
    ({"breaks": ["aten.nonzero"]}, "graph break: aten.nonzero"),
    ({"graphs": [1, 1, 2, 2, 2]}, "recompiled: [1, 1, 2, 2, 2]"),
], ids=["shared memory", "error", "graph break", "recompilation"])
def test_each_fault_makes_the_check_fail(results, capsys, row, words):
    results.row = lambda each: {**FINE, **(row if each.card == "sm_89" or each.kind == "steps" else {})}
    assert run("xsa") == 1
    said = capsys.readouterr().out
    assert words in said and "1 problems" in said


@pytest.mark.parametrize("entry, graphs", [("thaw", [1, 1, 1, 2, 2]), ("constraint_a", [1, 1, 2, 2, 2]),
                                           ("plain", [1, 1, 1, 1, 1])])
def test_a_switch_of_the_gradient_may_compile_once_more(entry, graphs):
    """The trunk thaws, or constraint heads begin to send a gradient into it."""
    check = Check(entry, "steps")
    assert not [*report.problems(check, {"graphs": graphs})]
    assert [*report.problems(check, {"graphs": [*graphs[:4], graphs[4] + 1]})]


# ---- processes ----

STAND_IN = """
import json, os, signal, sys
for entry, *_ in json.loads(sys.argv[1])["checks"]:
    if entry == "sink" and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
    print(json.dumps({"entry": entry}), flush=True)
"""


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """compiled(wanted, jobs, signal) -> {check: row}; the first process that comes to "sink" dies of it.

    compiled.started: the checks of each process.
    """
    def start(checks):
        run.started.append(checks)
        command = [sys.executable, "-c", STAND_IN, json.dumps({"checks": checks})]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                text=True)

    def run(wanted, jobs=2, signal="SIGKILL"):
        rows = {}
        monkeypatch.setenv("SIGNAL", signal)
        check.compile_all(wanted, jobs, lambda each, row: rows.__setitem__(each, row))
        return rows

    run.started = []
    monkeypatch.setattr(check, "start", lambda checks: start(list(checks)))
    return run


@pytest.mark.slow
def test_each_check_goes_to_a_process_of_its_card_and_kind(compiled):
    wanted = entries.checks(("xsa", "plain"))
    assert compiled(wanted) == {each: {"entry": each.entry} for each in wanted}
    for checks in compiled.started:
        assert len({(check.WORK[each.kind], each.card) for each in checks}) == 1


def test_a_process_that_dies_takes_no_other_check_with_it(compiled):
    wanted = [Check(name, "train") for name in ("plain", "sink", "xsa")]
    rows = compiled(wanted, jobs=1)
    assert [*rows] == wanted and len(compiled.started) == 2
    assert "the process died" in rows[wanted[1]].pop("error")
    assert [row.get("entry") for row in rows.values()] == ["plain", None, "xsa"]


def test_after_an_interrupt_nothing_more_is_compiled(compiled):
    wanted = [Check(name, "train") for name in ("plain", "sink", "xsa")]
    assert [*compiled(wanted, jobs=1, signal="SIGINT")] == wanted[:1] and len(compiled.started) == 1


def test_a_process_that_takes_too_long_is_killed(monkeypatch):
    monkeypatch.setattr(check, "LIMIT", 0.2)
    process = subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE, text=True)
    assert check.answer(process) is None and process.wait() == -signal.SIGKILL
    process.stdout.close()


# ---- what is refused, in one line ----

def refused(venv):
    """The line that gpu/environment.py ends with."""
    with pytest.raises(SystemExit) as e:
        environment.main([str(venv)])
    assert "\n" not in e.value.code and e.value.code.startswith("gpu-check: ")
    return e.value.code


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.setattr(environment.sys, "platform", "linux")
    monkeypatch.setattr(environment.shutil, "which", lambda tool: f"/usr/bin/{tool}")


def test_no_compiler(tools, monkeypatch, tmp_path):
    monkeypatch.setattr(environment.shutil, "which", lambda tool: None if tool == "gcc" else tool)
    assert "no gcc" in refused(tmp_path / "venv")


def test_no_room_on_the_disk(tools, monkeypatch, tmp_path):
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda place: SimpleNamespace(free=3 << 30))
    said = refused(tmp_path / "deep" / "venv")
    assert "3.0 GB are free" in said and "5 GB are needed" in said
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("version, cuda, words", [
    ("2.99.1+cu130", "'13.0'", "knows the inner parts of"), ("2.13.0+cpu", "None", "is a CPU build")])
def test_a_torch_that_the_recipe_does_not_know(tools, tmp_path, version, cuda, words):
    folder = tmp_path / "lib/python3.11/site-packages/torch"
    folder.mkdir(parents=True)
    (folder / "version.py").write_text(f"__version__ = '{version}'\ncuda: Optional[str] = {cuda}\n")
    assert words in refused(tmp_path) and version in refused(tmp_path)


def test_the_recipe_is_for_the_torch_that_the_project_pins():
    assert f"torch=={environment.TORCH}\n" in (ROOT / "requirements.txt").read_text()


@pytest.mark.parametrize("argv, words", [
    (["acg"], "no entry is called 'acg'"), (["--jobs=0"], "--jobs=0 must be at least 1")])
def test_a_wrong_argument_is_one_line(results, argv, words):
    said = run(*argv)
    assert words in said and "\n" not in said


def test_a_broken_results_file_is_named(tmp_path, monkeypatch):
    path = tmp_path / "gpu.json"
    path.write_text("{")
    monkeypatch.setattr(report, "RESULTS", path)
    assert run("xsa") == f"gpu-check: {path} is not a results file of this check: delete it"


def test_results_come_back_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path / "gpu.json")
    rows = {check.key: FINE for check in (Check("acag", "train"), Check("accumulated", "train"))}
    report.write({**rows, "gone train 64 bfloat16 sm_90": FINE})
    assert report.read() == rows
    assert json.loads(report.RESULTS.read_text())["torch"] == environment.TORCH


# ---- tables ----

def test_the_overview_has_a_line_for_each_entry():
    rows = {Check("xsa", "train", card=card).key: {**FINE, "shared": 200000} for card in CARDS}
    head, line, *_ = report.overview(rows, entries.checks(("xsa", "plain"))).splitlines()
    assert line.split() == ["xsa", "44", "100.0", "195", "195", "195", "3", "of", "7"]


def test_a_table_says_of_which_commit_the_results_are():
    old, new = dict(commit="11111111", date="2026-11-23"), dict(commit="22222222", date="2026-11-25")
    rows = {Check("acag", "train").key: old, Check("xsa", "train").key: new, Check("xsa", "steps").key: new}
    new, old, none = report.commits_table(rows).splitlines()[2:]
    assert new == "| 22222222 | 2026-11-25 | 2 | `xsa` |" and old == "| 11111111 | 2026-11-23 | 1 | `acag` |"
    left = len(entries.checks()) - 3
    assert none.startswith(f"| not compiled yet |  | {left} | ")


def test_the_table_of_shared_memory_names_the_largest():
    rows = {Check(name, "train", 64, "bfloat16", card).key: {**FINE, "shared": kb * 1024}
            for name, kb in (("sink", 50), ("acag", 90)) for card in CARDS}
    assert "| 64, bfloat16 | 90, `acag` | 90, `acag` | 90, `acag` |" in report.shared_table(rows)
    assert report.shared_table({}) == ""


def test_the_page_holds_the_tables_of_the_results():
    text = report.PAGE.read_text(encoding="utf-8")
    assert report.filled(text) == text, "run: python -m tests.lab.gpu.check --tables"
