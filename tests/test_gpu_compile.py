"""The GPU check: what makes a result stale, what counts as wrong, what is refused. No GPU, no CUDA build."""

import json
import shutil
from types import SimpleNamespace

import pytest

from model import MECHANISMS
from nanoheads.common import ROOT
from nanoheads.gpu import check, digest, entries, environment, report
from nanoheads.gpu.entries import CARDS, ENTRIES, Check

from conftest import forget_code as forget

FINE = {"kernels": 44, "bytes": 10**8, "shared": 2048, "limit": 101376, "largest": "triton_0", "too_large": 0}


@pytest.fixture
def results(monkeypatch):
    """Results that are kept in memory; results.compiled: the checks that were compiled, each with row()."""
    monkeypatch.setattr(report, "write", lambda rows: found.rows.update(rows))
    monkeypatch.setattr(report, "read", lambda: dict(found.rows))
    monkeypatch.setattr(check, "prepare", lambda: None)
    found = SimpleNamespace(rows={}, compiled=[], row=lambda check: FINE)

    def compile_all(wanted, jobs, nanogpt, done):
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

def test_every_mechanism_is_compiled_on_every_card():
    trained = {(c.entry, c.card) for c in entries.checks() if c.kind == "train"}
    assert {(name, card) for name in (*MECHANISMS, "all_on", "muon") for card in CARDS} <= trained
    assert {c.entry for c in entries.byte_checks()} >= set(MECHANISMS)


def test_every_check_is_a_model_that_can_be_built():
    for each in (*entries.checks(), *entries.byte_checks()):
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


# ---- what makes a result stale ----

def digests(root):
    forget()
    return {name: digest.digest(Check(name, "train"), root) for name in ("plain", "xsa", "sink", "muon")}


@pytest.fixture(scope="module")
def as_they_are():
    return digests(ROOT)


@pytest.fixture
def stale_after(tmp_path, as_they_are):
    """stale_after((file, before, after), ...) -> the entries whose digest these edits change."""
    for path in [*ROOT.glob("*.py"), *ROOT.glob("nanoheads/**/*.py")]:
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)

    def edit(*edits):
        for file, before, after in edits:
            text = (tmp_path / file).read_text(encoding="utf-8")
            assert before in text, (file, before)
            (tmp_path / file).write_text(text.replace(before, after, 1), encoding="utf-8")
        new = digests(tmp_path)
        return {name for name in new if new[name] != as_they_are[name]}

    yield edit
    forget()


def test_words_make_nothing_stale(stale_after):
    """A comment, a docstring, another program."""
    assert stale_after(
        ("nanoheads/kernels.py", "# its values do not matter", "# whatever they are"),
        ("nanoheads/kernels.py", '"""Rotate x [..., D] by its', '"""Turn x [..., D] by its'),
        ("compare.py", "def main(", "def main_(")) == set()


@pytest.mark.parametrize("file, before, after, stale", [
    ("nanoheads/kernels.py", "F.relu(x).square()", "F.relu(x) ** 2", {"plain", "xsa", "sink", "muon"}),
    ("nanoheads/rivals.py", "self.strength.tanh()", "self.strength.sin()", {"xsa"}),
    ("nanoheads/training/optim.py", "X = X.bfloat16()", "X = X.half()", {"plain", "xsa", "sink", "muon"}),
], ids=["kernel of all", "mechanism", "optimizer"])
def test_code_makes_stale_what_reaches_it(stale_after, file, before, after, stale):
    assert stale_after((file, before, after)) == stale


def test_what_was_compiled_is_not_compiled_again(results):
    assert run("xsa") == 0 and len(results.compiled) == len(entries.checks(("xsa",)))
    assert run("xsa") == 0 and results.compiled == []
    next(iter(results.rows.values()))["digest"] = "another"
    assert run("xsa") == 0 and len(results.compiled) == 1


def test_lint_lists_what_has_changed_and_does_not_fail(results, monkeypatch, capsys):
    for module in (check, report):
        monkeypatch.setattr(module, "checks", lambda names=None: entries.checks(("plain", "xsa")))
    check.main(["--changed"])
    assert "2 of 2 entries have changed" in (said := capsys.readouterr().out) and "plain, xsa" in said
    run("plain", "xsa")
    capsys.readouterr()
    check.main(["--changed"])
    assert capsys.readouterr().out == "gpu-check: all 2 entries were compiled for a GPU as they are\n"
    lint = (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0]
    assert "nanoheads.gpu.check --changed" in lint


# ---- what is wrong ----

@pytest.mark.parametrize("row, words", [
    ({"shared": 200000, "too_large": 1}, "asks for 200,000 bytes of shared memory, the card has 101,376"),
    ({"error": "InductorError: no"}, "does not compile: InductorError: no"),
    ({"breaks": ["aten.nonzero"]}, "graph break: aten.nonzero"),
    ({"graphs": [1, 1, 2, 2, 2]}, "recompiled: [1, 1, 2, 2, 2]"),
    ({"attention": {"decode": ["cudnn_attention"], "prompt": ["flash_attention"]}}, "cuDNN's"),
], ids=["shared memory", "error", "graph break", "recompilation", "cudnn"])
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


def test_each_check_goes_to_a_process_of_its_card(monkeypatch):
    class Process(check.Worker):
        made = []

        def __init__(self, work, card, nanogpt):
            self.work, self.card, self.left = work, card, 3
            self.process = SimpleNamespace(poll=lambda: None)
            self.made.append((work, card))

        def run(self, each):
            self.left -= 1
            assert (check.WORK[each.kind], each.card) == (self.work, self.card)
            return FINE

        def close(self):
            pass

    monkeypatch.setattr(check, "Worker", Process)
    wanted, done = entries.checks(("xsa", "plain")), []
    check.compile_all(wanted, 2, None, lambda each, row: done.append(each))
    assert sorted(done) == sorted(wanted)
    assert set(Process.made) == {("graphs", "sm_90"), *(("binaries", card) for card in CARDS)}


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
    (["acg"], "no entry is called 'acg'"),
    (["--bytes", "--nanogpt=/nowhere"], "there is no /nowhere/model.py")])
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
    key = Check("acag", "train").key
    report.write({key: FINE, "gone train 64 bfloat16 sm_90": FINE})
    assert report.read() == {key: FINE}
    assert json.loads(report.RESULTS.read_text())["torch"] == environment.TORCH


# ---- tables ----

def test_bytes_are_compared_with_nanogpt_and_the_plain_gpt():
    sizes = {"nanogpt": (40, 200), "gpt2": (42, 210), "plain": (48, 220),
             "acag": (60, 300), "sink": (57, 250)}
    rows = {Check(name, "bytes").key: {"bytes": gb * 10**9, "kernels": n} for name, (gb, n) in sizes.items()}
    rows[Check("xsa", "bytes").key] = {"error": "no", "bytes": 0, "kernels": 0}
    lines = report.byte_tables(rows).splitlines()
    assert "| `recipe=gpt2` | 42.00 | 1.05 x, goal 1.00 | 210 |" in lines
    assert "| `recipe=modern` | 48.00 | 1.20 x | 220 |" in lines
    assert "| `acag` | 60.00 | 1.25 x | 300 |" in lines
    assert "| `sink` | 57.00 | 1.19 x, goal 1.15 | 250 |" in lines
    assert "| `xsa` | does not compile |  |  |" in lines


def test_the_overview_has_a_line_for_each_entry():
    rows = {Check("xsa", "train", card=card).key: {**FINE, "shared": 200000} for card in CARDS}
    head, line, *_ = report.overview(rows, entries.checks(("xsa", "plain"))).splitlines()
    assert line.split() == ["xsa", "44", "100.0", "195", "195", "195", "yes", "3", "of", "7"]


def test_the_table_of_shared_memory_names_the_largest():
    rows = {Check(name, "train", 64, "bfloat16", card).key: {**FINE, "shared": kb * 1024}
            for name, kb in (("sink", 50), ("acag", 90)) for card in CARDS}
    assert "| 64, bfloat16 | 90, `acag` | 90, `acag` | 90, `acag` |" in report.shared_table(rows)
    assert report.shared_table({}) == ""


def test_the_page_holds_the_tables_of_the_results():
    text = report.PAGE.read_text(encoding="utf-8")
    assert report.filled(text) == text, "run: python -m gpu.check --tables"
