"""How programs end: with one line where they cannot go on, and quietly where their reader is gone."""

import io
import json
import re
import sys
from contextlib import redirect_stdout, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from tqdm import tqdm

import train
from helpers import make_checkpoint, unread
from nanoheads.common import (UserError, as_program, explain, last_folders, printable, say,
                              table)

ESCAPES = "\x1b[31mred\x1b[0m\x07 \x9b2J"


# ---- errors ----

def test_what_ends_a_program_is_a_line_and_a_bug_keeps_its_traceback():
    for e, line in (
            (UserError("one\nother"), "demo: one\ndemo: other"),
            (OSError(28, "No space left on device", "x.txt"), "demo: x.txt: No space left on device"),
            (OSError(5, "Input/output error"), "demo: input or output: Input/output error"),
            (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "demo: out of memory; take less"),
            (UserError(f"no dataset {ESCAPES}"), "demo: no dataset �[31mred�[0m� �2J")):
        with pytest.raises(SystemExit) as ended, as_program("demo", "take less"):
            raise e
        assert ended.value.code == line
    for e in (RuntimeError("a bug"), ValueError("a bug")):
        with pytest.raises(type(e), match="a bug"), as_program("demo"):
            raise e
        assert explain(e) is None


@pytest.mark.parametrize("leave, end", [(True, "\n"), (False, "\r")])
def test_the_last_line_is_not_glued_to_a_progress_bar(capsys, leave, end):
    with pytest.raises(SystemExit), as_program("demo"):
        for _ in tqdm(range(3), file=sys.stderr, leave=leave, mininterval=0):
            raise UserError("damaged weights")
    err = capsys.readouterr().err
    assert "0/3" in err and err.endswith(end)


# ---- what is printed cannot be written, or nobody reads it ----

@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_what_programs_print_on_a_full_disk_is_one_line(args, tiny_run):
    for program, *argv in (["train", *args("other")], ["evaluate", "--ckpt", tiny_run, "--device=cpu"],
                           ["plot_curves", tiny_run],
                           ["sample", "--ckpt", tiny_run, "--device=cpu", "--max_new_tokens=3"]):
        with pytest.raises(SystemExit) as ended, open("/dev/full", "w") as full, redirect_stdout(full):
            import_module(program).main([*map(str, argv)])
        assert ended.value.code == f"{program}: input or output: No space left on device"


def test_a_reader_that_has_seen_enough_ends_a_program_quietly(tmp_path, capsys):
    for program, *argv in (["evaluate", "--help"], ["train", "--help"],
                           ["sample", "--ckpt", make_checkpoint(tmp_path / "a.pt"), "--device=cpu",
                            "--max_new_tokens=9999999"]):
        with suppress(SystemExit), unread():  # argparse's own way
            import_module(program).main(argv)
        assert capsys.readouterr().err == "", program


# ---- encodings that lack some characters, and what steers a terminal ----

def test_help_is_shown_whatever_the_encoding(monkeypatch):
    for program in ("bench", "evaluate", "plot_curves", "sample", "train"):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
        with suppress(SystemExit):
            import_module(program).main(["--help"])
        print("…", flush=True)
        shown = raw.getvalue().decode("ascii")
        assert f"python {program}.py" in shown and "--json" in shown
        assert shown.endswith("\n?\n")


def test_what_would_steer_a_terminal_is_shown(tmp_path, capsys):
    """In names, and in what models of bytes write side by side."""
    assert printable(ESCAPES) == "�[31mred�[0m� �2J" and printable("a\tb\né 日本 😀") == "a\tb\né 日本 😀"
    say(ESCAPES, table(("name", ESCAPES), [(ESCAPES, 1)]))
    ckpts = [f"--ckpt={make_checkpoint(tmp_path / name, 'byte')}" for name in ("a.pt", "b.pt")]
    import_module("sample").main([*ckpts, "--device=cpu", "--max_new_tokens=100", "--temperature=9"])
    shown = capsys.readouterr().out
    assert "�" in shown and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


# ---- the file of --json ----

@pytest.mark.slow
def test_each_program_writes_its_result(args, tiny_run, tmp_path):
    """Whether it has anything to do or not; that of a run which is trained stands in test_train.py."""
    def result(program, *argv):
        import_module(program).main([*map(str, argv), f"--json={tmp_path / program}.json"])
        return json.loads((tmp_path / f"{program}.json").read_text())
    again = result("train", *args("tiny"), "--resume")
    assert again["out_dir"] == str(tiny_run) and again["step"] == 6 and again["parameters"] > 0
    assert result("train", *args("tiny"), "--eval_only")["val_bpb"] > 0
    assert len(result("evaluate", "--ckpt", tiny_run, "--device=cpu")["runs"]) == 1
    argv = ["--ckpt", tiny_run, "--num_samples=2", "--max_new_tokens=3", "--device=cpu"]
    texts, = result("sample", *argv)
    assert texts["ckpt"] == str(tiny_run) and texts["prompt"] == "\n" and len(texts["texts"]) == 2
    assert result("plot_curves", tiny_run) == [f"{tiny_run}/figures/curves.{kind}" for kind in ("png", "svg")]


# ---- numbers and tables ----

def test_a_table_that_is_too_wide_breaks_its_heads_and_then_cuts_the_ends_of_names():
    head, rows = ("variant", "two words", "verdict"), [("temperature_by_position", "1", "better"),
                                                       ("plain GPT", "2", "same")]
    lines = table(head, rows, left=(0, 2), width=44).splitlines()
    assert lines[0] == "variant                  two words  verdict" and len(lines) == 3  # it fits
    assert table(head, rows, left=(0, 2), width=40).splitlines() == [
        "                           two",
        "variant                  words  verdict",
        "temperature_by_position      1  better",
        "plain GPT                    2  same"]
    assert [line.split()[0] for line in table(head, rows, width=30).splitlines()[2:]] == [
        "temperature_b…", "plain"]
    path = "out/some/folder/tiny-sentinel_l0+mechanism_lr=0.04"
    assert last_folders(path, 99) == path
    assert last_folders(path, 45) == "…/folder/tiny-sentinel_l0+mechanism_lr=0.04"
    assert last_folders(path, 20) == "tiny-sentinel_l0+me…"


# ---- TensorBoard ----

def test_tensorboard_shows_the_rows_of_the_log_or_a_line_says_what_to_install(args, fails, rows, tmp_path,
                                                                             monkeypatch):
    if find_spec("tensorboard"):  # an optional library
        train.main([*args(max_iters=3), "--tensorboard"])
        train.main([*args(), "--tensorboard", "--resume"])
        accumulator = import_module("tensorboard.backend.event_processing.event_accumulator")
        seen = accumulator.EventAccumulator(str(tmp_path / "run/tensorboard"))
        seen.Reload()
        losses, evals = rows(tmp_path / "run")
        for tag, of in (("loss", losses), ("val_bpb", evals)):
            shown = {event.step: event.value for event in seen.Scalars(tag)}
            assert shown == pytest.approx({row["step"]: row[tag] for row in of})
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    line, = fails([*args("other"), "--tensorboard"])
    assert line == "tensorboard=True needs TensorBoard: pip install tensorboard"
