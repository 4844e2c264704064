"""What every program shares: its last line where it cannot go on, files, JSON, places to write, numbers."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tqdm import tqdm

from nanoheads import common, curves, files, own_mechanism, sampling, start
from nanoheads.common import (UserError, from_json, in_place, last_folders, last_words, number, opened_anew,
                              plural, printable, read_whole, table, text_of, writable, writable_folder,
                              write_atomic)
from nanoheads.configurator import check
from nanoheads.dataset import Dataset
from nanoheads.tokenizer import Tokenizer
from lab.heads import look
from lab.heads.rules import Rules
from lab.hub import huggingface
from lab.labels import labellers
from lab.labels.targets import Targets
from study import records, scores


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


# ---- JSON ----

def nested(levels):
    return "[" * levels + "]" * levels


def test_json_nested_too_deeply_is_damaged_like_any_other():
    assert from_json(nested(90)) == json.loads(nested(90)) and from_json(b'{"a": [1, {"b": 2.5}]}') == \
        {"a": [1, {"b": 2.5}]}
    # at 100,000 Python's recursion ends while it is read, at 700 in what comes after, such as json_safe()
    for levels in (101, 700, 100_000):
        for text in (nested(levels), '{"step": 1, "a": ' + nested(levels) + "}", "[" * levels):
            with pytest.raises(ValueError):
                from_json(text)


def refused(read):
    """Whether a reader refuses a file in one line."""
    with pytest.raises(ValueError) as e:
        read()
    return len(str(e.value).splitlines()) == 1


@pytest.mark.parametrize("levels", [700, 100_000])
@pytest.mark.parametrize("name, is_told", [
    ("meta.json", lambda path: refused(lambda: Dataset(path.parent))),
    ("labels.json", lambda path: refused(lambda: Targets(SimpleNamespace(dir=path.parent), path.parent))),
    ("rules.json", lambda path: refused(lambda: Rules.read(path))),
    ("results.json", lambda path: refused(lambda: records.read(path))),
    ("config.json", lambda path: start.asked_in(path.parent) is None),
    ("config.json", lambda path: curves.dataset_name(path.parent) == "?"),
    ("config.json", lambda path: refused(lambda: huggingface.config_of(path.parent))),
    ("labels.jsonl", lambda path: refused(lambda: labellers.read_spans(path, dict(tokens=9)))),
    ("x.checked", lambda path: files.confirmed(path.with_name("x"), "0" * 64) is None),
])
def test_every_reader_takes_deeply_nested_json_for_a_damaged_file(tmp_path, name, is_told, levels):
    (tmp_path / "x").touch()
    (tmp_path / name).write_text('{"step": 1, "loss": ' + nested(levels) + ', "tokens_per_s": 1}\n')
    assert is_told(tmp_path / name)


# ---- files that a person names ----

def test_text_of_a_file_has_one_kind_of_line_end(tmp_path):
    (tmp_path / "a.txt").write_bytes("é\r\nb\rc\n".encode())
    assert text_of(tmp_path / "a.txt") == "é\nb\nc\n" and read_whole(tmp_path / "a.txt")[:2] == "é".encode()


@pytest.mark.parametrize("read", [
    lambda path: sampling.read_prompt(f"FILE:{path}"), lambda path: look.read_ids(path, Tokenizer("byte")),
    Rules.read, records.read, scores.read_csv, own_mechanism.opened,
    lambda path: labellers.read_spans(path, dict(characters=9, tokens=9))])
@pytest.mark.parametrize("endless", [True, False])
def test_a_file_without_an_end_is_one_line(read, endless, tmp_path, monkeypatch):
    """/dev/zero took all memory."""
    monkeypatch.setattr(common, "MOST_READ", 1 << 20)
    monkeypatch.setattr(labellers, "MOST_READ", 1 << 20)
    path = Path("/dev/zero")
    if not endless or not path.exists():
        path = tmp_path / "large.py"
        path.write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(ValueError, match="more than 1 MiB|longer than 1 MiB") as e:
        read(path)
    assert len(str(e.value).splitlines()) == 1 and str(e.value).count(str(path)) == 1


def test_what_a_pipe_holds_is_read_to_its_end(tmp_path):
    if not hasattr(os, "mkfifo"):
        pytest.skip("no pipes with names")
    read, write = os.pipe()
    os.write(write, b"To be")
    os.close(write)
    assert sampling.read_prompt(f"FILE:/dev/fd/{read}") == "To be"
    os.close(read)


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
