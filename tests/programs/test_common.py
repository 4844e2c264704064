"""What every program shares: the last line of one that cannot go on, places to write, numbers."""

import sys

import pytest
from tqdm import tqdm

from nanoheads.common import UserError, last_words, number, writable, writable_folder
from nanoheads.configurator import check


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


def test_an_int_beyond_all_floats_is_no_number():
    assert str(number(10**400)) == "nan" and number(3) == 3.0
    with pytest.raises(ValueError):
        check(10**400, float)
