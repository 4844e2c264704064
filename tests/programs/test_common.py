"""What every program shares: the last line of one that cannot go on, places to write, numbers."""

import sys

import pytest
from tqdm import tqdm

from nanoheads.common import (UserError, in_place, last_words, number, opened_anew, writable,
                              writable_folder, write_atomic)
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


@pytest.mark.parametrize("there", [True, False])
def test_no_file_is_written_through_a_link(tmp_path, there):
    victim, link = tmp_path / "victim", tmp_path / "link"
    if there:
        victim.write_text("mine")
    link.symlink_to(victim)
    with pytest.raises(UserError, match="link is a link to '.*victim': remove it"):
        open(link, "ab", opener=in_place)
    for name in ("file.part", "file"):
        (tmp_path / name).symlink_to(victim)
    write_atomic(tmp_path / "file", lambda f: f.write(b"new"))
    with opened_anew(link) as f:
        f.write(b"new")
    assert victim.read_text() == "mine" if there else not victim.exists()
    for path in (link, tmp_path / "file"):
        assert path.read_bytes() == b"new" and not path.is_symlink()
    with open(link, "ab", opener=in_place) as f:
        f.write(b"er")
    assert link.read_bytes() == b"newer"


def test_a_file_that_the_user_names_may_be_a_link(tmp_path):
    (tmp_path / "mine.json").symlink_to(tmp_path / "disk.json")
    write_atomic(writable(tmp_path / "mine.json"), lambda f: f.write(b"{}"))
    assert (tmp_path / "mine.json").is_symlink() and (tmp_path / "disk.json").read_bytes() == b"{}"


def test_an_int_beyond_all_floats_is_no_number():
    assert str(number(10**400)) == "nan" and number(3) == 3.0
    with pytest.raises(ValueError):
        check(10**400, float)
