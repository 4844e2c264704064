"""How programs end, and what they print: a line where they cannot go on, quietly where the reader goes."""

import io
import json
import re
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
from tqdm import tqdm

import train
from helpers import ROOT, TINY, make_checkpoint
from nanoheads.common import (UserError, as_program, explain, last_folders, number, plural, printable, say,
                              table)

PROGRAMS = "bench", "evaluate", "plot_curves", "sample", "train"
ESCAPES = "\x1b[31mred\x1b[0m\x07 \x9b2J"


def started(*command, **how):
    return subprocess.Popen([sys.executable, "-u", *map(str, command)], cwd=ROOT, text=True,
                            stderr=subprocess.PIPE, **how)


# ---- errors ----

@pytest.mark.parametrize("e, line", [
    (UserError("so it is"), "demo: so it is"),
    (UserError("one\nother"), "demo: one\ndemo: other"),
    (OSError(28, "No space left on device", "x.txt"), "demo: x.txt: No space left on device"),
    (OSError(5, "Input/output error"), "demo: input or output: Input/output error"),
    (MemoryError(), "demo: out of memory; take less"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "demo: out of memory; take less"),
    (UserError(f"no dataset {ESCAPES}"), "demo: no dataset �[31mred�[0m� �2J")])
def test_what_ends_a_program_is_a_line(e, line):
    with pytest.raises(SystemExit) as ended, as_program("demo", "take less"):
        raise e
    assert ended.value.code == line


@pytest.mark.parametrize("e", [RuntimeError("a bug"), ValueError("a bug")])
def test_a_bug_keeps_its_traceback(e):
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


@pytest.mark.slow
def test_an_interrupt_is_a_line_and_an_exit_code(tmp_path):
    argv = ["--ckpt", make_checkpoint(tmp_path / "a.pt"), "--device=cpu", "--max_new_tokens=9999999"]
    process = started("sample.py", *argv, stdout=subprocess.PIPE)
    assert process.stdout.read(9)
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("\nsample: interrupted\n", 130)


# ---- what is printed cannot be written, or nobody reads it ----

@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_what_programs_print_on_a_full_disk_is_one_line(args, tmp_path):
    train.main(args())
    run = tmp_path / "run"
    for program, *argv in (["train", *args("other")], ["evaluate", "--ckpt", run, "--device=cpu"],
                           ["plot_curves", run],
                           ["sample", "--ckpt", run, "--device=cpu", "--max_new_tokens=3"]):
        with open("/dev/full", "w") as full:
            done = started(f"{program}.py", *argv, stdout=full)
        lines = [line for line in done.communicate()[1].splitlines() if "\r" not in line]
        assert lines == [f"{program}: input or output: No space left on device"] and done.returncode == 1


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_ends_a_program_quietly(args, tmp_path):
    for command in (["evaluate.py", "--help"], ["train.py", "--help"],
                    ["sample.py", "--ckpt", make_checkpoint(tmp_path / "a.pt"), "--device=cpu",
                     "--max_new_tokens=9999999"]):
        process = started(*command, stdout=subprocess.PIPE)
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 0, command


@pytest.mark.slow
def test_a_run_without_a_reader_is_saved_first(args, tmp_path, rows):
    process = started("train.py", *args(max_iters=99999), stdout=subprocess.PIPE)
    while "val" not in process.stdout.readline():
        pass
    process.stdout.close()
    assert "Traceback" not in process.stderr.read() and process.wait() == 128 + 13
    last = rows(tmp_path / "run")[0][-1]["step"]
    train.main([*args(max_iters=last + 1), "--resume"])
    assert rows(tmp_path / "run")[0][-1]["step"] == last + 1


# ---- encodings that lack some characters, and what steers a terminal ----

@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_shown_whatever_the_encoding(program, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    with suppress(SystemExit):  # argparse's own way
        import_module(program).main(["--help"])
    print("…", flush=True)
    shown = raw.getvalue().decode("ascii")
    assert f"python {program}.py" in shown and "--json" in shown
    assert shown.endswith("\n?\n")


def test_what_would_steer_a_terminal_is_shown(capsys):
    assert printable(ESCAPES) == "�[31mred�[0m� �2J" and printable("a\tb\né 日本 😀") == "a\tb\né 日本 😀"
    say(ESCAPES, table(("name", ESCAPES), [(ESCAPES, 1)]))
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.slow
def test_what_byte_models_write_side_by_side_does_not_steer_the_terminal(tmp_path, capsys):
    ckpts = [f"--ckpt={make_checkpoint(tmp_path / name, 'byte')}" for name in ("a.pt", "b.pt")]
    import_module("sample").main([*ckpts, "--device=cpu", "--max_new_tokens=300", "--temperature=9"])
    shown = capsys.readouterr().out
    assert "�" in shown and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


# ---- the file of --json ----

@pytest.mark.slow
def test_each_program_writes_its_result(args, rows, tmp_path):
    def result(program, *argv):
        import_module(program).main([*map(str, argv), f"--json={tmp_path / program}.json"])
        return json.loads((tmp_path / f"{program}.json").read_text())
    run = tmp_path / "run"
    found, last = result("train", *args()), rows(run)[1][-1]
    assert found.pop("best_val_loss") == min(row["val_loss"] for row in rows(run)[1][1:])
    assert found.pop("out_dir") == str(run) and found.pop("parameters") > 0
    assert found == last and found["step"] == TINY["max_iters"]
    again = result("train", *args(), "--resume")  # it is finished already, and says the same
    assert {**found, **again} == again and again["out_dir"] == str(run)
    assert result("train", *args(), "--eval_only")["val_bpb"] > 0
    assert len(result("evaluate", "--ckpt", run, "--device=cpu")["runs"]) == 1
    texts, = result("sample", "--ckpt", run, "--num_samples=2", "--max_new_tokens=3", "--device=cpu")
    assert texts["ckpt"] == str(run) and texts["prompt"] == "\n" and len(texts["texts"]) == 2
    assert result("plot_curves", run) == [f"{run}/figures/curves.png", f"{run}/figures/curves.svg"]
    checked = result("train", "--scale=tiny", "--mechanism=xsa", "--check")
    assert {row["promise"] for row in checked} >= {"causal", "rows", "neutral"}
    assert all(row["mechanism"] == "xsa" and row["broken"] is None for row in checked)


def test_a_command_that_fails_leaves_the_file_as_it_was(args, fails, tmp_path):
    path = tmp_path / "run.json"
    path.write_text("what was there")
    line, = fails([*args(n_head=3), f"--json={path}"])
    assert "n_head=3" in line and path.read_text() == "what was there"
    line, = fails([*args(), f"--json={tmp_path / 'nowhere/run.json'}"])
    assert "--json: cannot write into" in line and not (tmp_path / "run").exists()


# ---- numbers and tables ----

def test_of_one_there_is_one():
    assert [plural(n, "run") for n in (0, 1, 2, 1234)] == ["0 runs", "1 run", "2 runs", "1,234 runs"]
    assert plural(1.0, "minute", "g") == "1 minute" and plural(1.5, "minute", "g") == "1.5 minutes"


@pytest.mark.parametrize("value", [None, "3", float("inf"), float("nan"), [1]])
def test_what_is_no_number_is_nan(value):
    assert number(value) != number(value) and number(3) == 3.0


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

@pytest.mark.slow
def test_tensorboard_shows_the_rows_of_the_log(args, rows, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator",
                                      reason="TensorBoard, an optional library, is absent")
    train.main([*args(max_iters=3), "--tensorboard"])
    train.main([*args(), "--tensorboard", "--resume"])
    seen = accumulator.EventAccumulator(str(tmp_path / "run/tensorboard"))
    seen.Reload()
    losses, evals = rows(tmp_path / "run")
    for tag, of in (("loss", losses), ("val_bpb", evals)):
        shown = {event.step: event.value for event in seen.Scalars(tag)}
        assert shown == pytest.approx({row["step"]: row[tag] for row in of})


def test_without_tensorboard_a_line_says_what_to_install(args, fails, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    line, = fails([*args(), "--tensorboard"])
    assert line == "tensorboard=True needs TensorBoard: pip install tensorboard"
