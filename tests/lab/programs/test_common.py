"""What every program shares: its last line where it cannot go on, files, JSON, places to write, numbers."""

import sys

import pytest
from tqdm import tqdm

from nanoheads.common import (UserError, last_folders, last_words, plural, printable, table, writable,
                              writable_folder, write_atomic)


@pytest.mark.parametrize("e, line", [
    (UserError("so it is"), "demo: so it is"),
    (OSError(28, "No space left on device", "x.txt"), "demo: x.txt: No space left on device"),
    (MemoryError(), "demo: out of memory; take less"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "demo: out of memory; take less")])
def test_what_ends_a_program_is_one_line(e, line):
    with pytest.raises(SystemExit) as ended, last_words("demo", "take less"):
        raise e
    assert ended.value.code == line


def test_a_bug_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="a bug"), last_words("demo"):
        raise RuntimeError("a bug")


@pytest.mark.parametrize("leave, end", [(True, "\n"), (False, "\r")])
def test_the_last_line_is_not_glued_to_a_progress_bar(capsys, leave, end):
    with pytest.raises(SystemExit), last_words("demo"):
        for _ in tqdm(range(3), file=sys.stderr, leave=leave, mininterval=0):
            raise UserError("damaged weights")
    err = capsys.readouterr().err
    assert "0/3" in err and err.endswith(end)


def test_places_that_take_no_files_are_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for bad, words in ((file, "is a file"), (file / "x" / "y", f"{file} is a file"),
                       ("/proc/x", "cannot write into /proc")):
        with pytest.raises(UserError, match=words):
            writable_folder(bad)
    with pytest.raises(UserError, match="cannot write into /proc"):
        writable("/proc/x")
    assert writable_folder(tmp_path / "new" / "one") == tmp_path / "new" / "one"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # a check leaves nothing behind


def test_a_file_that_the_user_names_may_be_a_link(tmp_path):
    (tmp_path / "mine.json").symlink_to(tmp_path / "disk.json")
    write_atomic(writable(tmp_path / "mine.json"), lambda f: f.write(b"{}"))
    assert (tmp_path / "mine.json").is_symlink() and (tmp_path / "disk.json").read_bytes() == b"{}"


# ---- names ----

ESCAPES = "\x1b[31mred\x1b[0m\x07 \x9b2J"


def test_what_would_steer_a_terminal_is_shown():
    assert printable(ESCAPES) == "�[31mred�[0m� �2J" and printable("a\tb\né 日本 😀") == "a\tb\né 日本 😀"
    assert "\x1b" not in table(("name",), [(ESCAPES,)]) and "�[31mred" in table((ESCAPES,), [("x",)])


def test_of_one_there_is_one():
    assert [plural(n, "run") for n in (0, 1, 2, 1234)] == ["0 runs", "1 run", "2 runs", "1,234 runs"]
    assert plural(1.0, "minute", "g") == "1 minute" and plural(1.5, "minute", "g") == "1.5 minutes"


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


def test_the_last_line_of_a_program_shows_them_too():
    for e in (UserError(f"no dataset {ESCAPES}"), OSError(2, "No such file", ESCAPES)):
        with pytest.raises(SystemExit) as ended, last_words("demo"):
            raise e
        assert "�[31mred" in ended.value.code and "\x1b" not in ended.value.code
