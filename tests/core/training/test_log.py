"""The log of a run: a row is whole or not there, whatever ended the process that wrote it."""

import resource

import pytest
from hypothesis import given, strategies as st

import train
from helpers import EDITS, damaged
from nanoheads.common import UserError
from nanoheads.log import append_row, read_json, read_rows, write_rows

ROWS = [dict(step=step, loss=1 / (1 + step)) for step in range(5)]


@pytest.fixture
def log(tmp_path):
    write_rows(tmp_path / "log.jsonl", ROWS)
    return tmp_path / "log.jsonl"


def test_rows_come_back_as_they_were_written(log, capsys):
    append_row(log, dict(step=5, loss=float("nan")))
    assert read_rows(log) == [*ROWS, dict(step=5, loss=None)]
    assert read_rows(log.with_name("no.jsonl")) == [] and capsys.readouterr().err == ""


@given(st.integers(0, 200))
def test_a_log_that_is_cut_anywhere_has_its_whole_rows(tmp_path, size):
    path = tmp_path / "log.jsonl"
    write_rows(path, ROWS)
    content = path.read_bytes()[:size]
    path.write_bytes(content)
    whole = content.count(b"\n")
    assert read_rows(path) in (ROWS[:whole], ROWS[:whole + 1])


@given(EDITS)
def test_of_a_damaged_log_the_sound_rows_are_read(tmp_path, edits):
    path = tmp_path / "log.jsonl"
    write_rows(path, ROWS)
    path.write_bytes(damaged(path.read_bytes(), edits))
    assert all(row["step"] >= 0 for row in read_rows(path))


def test_what_is_no_row_is_left_out_and_said_in_one_line(log, capsys):
    for text in ("7", "[1]", '{"loss": 2.0}', '{"step": "3"}', '{"step": NaN}', '{"step": -1}',
                 '{"step": 1' + 400 * "0" + "}", 100_000 * "["):
        write_rows(log, ROWS)
        log.write_text(f"{text}\n{log.read_text()}")
        assert read_rows(log) == ROWS
        assert "1 broken line in log.jsonl, the first is line 1; the rest" in capsys.readouterr().err
    write_rows(log, ROWS)
    lines = log.read_text().splitlines()
    log.write_text("\n".join([lines[0], lines[1][:9], "7", *lines[3:]]) + "\n")
    assert read_rows(log) == [ROWS[0], *ROWS[3:]]
    said, = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{log.parent}: 2 broken lines in log.jsonl, the first is line 2")


def test_a_full_disk_is_one_line_that_names_the_last_save(log):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + 9, limits[1]))
    try:
        with pytest.raises(UserError) as e:
            append_row(log, dict(step=5, loss=0.125))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(e.value) == f"could not write {log} (File too large); nothing was saved yet: start again"
    assert read_rows(log) == ROWS


@pytest.mark.slow
def test_a_run_that_goes_on_drops_half_a_row_and_what_came_after_its_last_save(
        args, rows, tiny_run, tmp_path):
    for step in (7, 8):
        append_row(tiny_run / "log.jsonl", dict(step=step, loss=9.0))
    with open(tiny_run / "log.jsonl", "a") as file:
        file.write('{"step": 9, "lo')
    train.main([*args(tiny_run, max_iters=8), "--resume"])
    train.main(args("whole", max_iters=8))
    assert [row["step"] for row in rows(tiny_run)[0]] == [*range(1, 9)]
    losses, whole = ([row["loss"] for row in rows(out)[0]] for out in (tiny_run, tmp_path / "whole"))
    assert losses == whole


def test_a_json_file_that_cannot_be_read_counts_as_missing(tmp_path):
    for text in (b"", b"{", b"[1]", b"\xff"):
        (tmp_path / "spec.json").write_bytes(text)
        assert read_json(tmp_path / "spec.json") is None and read_json(tmp_path / "no.json") is None
