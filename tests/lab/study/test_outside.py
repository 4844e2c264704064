"""The public record: its file is read or its bad rows named, its sums are of the rows that count, and studies
have it beside their verdicts."""

import json

import pytest

from model import MECHANISMS
from nanoheads.common import UserError
from lab.study import findings, outside, report, results, task_report, task_study
from helpers import ROOT

CELLS = dict.fromkeys(outside.COLUMNS, "") | dict(
    mechanism="key_offset", detail="every layer", source="somebody/runs #1", params="300M",
    effect_kind="nats", effect="-0.01", verdict_there="helps", quality="b")


def write(path, *rows):
    """A record with a row for each dict of what differs from CELLS."""
    lines = [",".join(outside.COLUMNS), *(",".join({**CELLS, **row}.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A function that makes these rows the record."""
    def make(*rows):
        monkeypatch.setattr(outside, "FILE", write(tmp_path / f"record{len(rows)}.csv", *rows))
        return outside.summaries()
    return make


@pytest.fixture
def no_record(tmp_path, monkeypatch):
    monkeypatch.setattr(outside, "FILE", tmp_path / "outside.csv")


# ---- the file ----

def test_the_record_on_file_is_read_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [row for rows in outside.on_file(outside.FILE).values() for row in rows]
    assert len(rows) == 319
    assert {row.mechanism for row in rows} >= outside.WITHOUT_ENTRY.keys()  # no reason without a row
    assert not outside.WITHOUT_ENTRY.keys() & MECHANISMS.keys()
    assert outside.words_on("short_conv", {"short_conv": "qkv"}).startswith("helps in 3 of 3")


@pytest.mark.parametrize("cells, words", [
    (dict(effect="about 3"), "effect 'about 3' is not a number; leave it empty"),
    (dict(effect="nan"), "effect 'nan' is not a number"),
    (dict(effect_kind="loss"), "effect_kind 'loss' must be one of nats, bpb"),
    (dict(verdict_there="good"), "verdict_there 'good' must be one of helps, neutral, hurts"),
    (dict(quality="d"), "quality 'd' must be one of a, b, c"),
    (dict(mechanism="sconv"), "mechanism 'sconv' is no entry of MECHANISMS, and WITHOUT_ENTRY"),
    (dict(source=""), "source is empty"),
    (dict(effect="0.01"), "effect 0.01 nats and verdict_there helps contradict each other"),
    (dict(effect="0", effect_kind="compute_multiplier"), "effect '0' must be above 0: it is a multiplier"),
    (dict(effect="0.9", effect_kind="compute_multiplier"), "effect 0.9 compute_multiplier and verdict_there"),
    (dict(effect="2", effect_kind="accuracy", verdict_there="hurts"), "effect 2 accuracy and verdict_there"),
    ({}, "it repeats line 2"),
    (dict(noise="one, two"), "18 cells, where the first line has 17")])
def test_a_row_that_cannot_be_used_is_named_in_one_line(cells, words, tmp_path):
    path = write(tmp_path / "record.csv", {}, cells, dict(effect=""))
    with pytest.raises(UserError) as e:
        outside.read(path)
    line, = str(e.value).splitlines()
    assert line.startswith(f"{path}, line 3: {words}")


def test_an_effect_without_a_number_is_none(tmp_path):
    row, = outside.read(write(tmp_path / "record.csv", dict(effect="")))
    assert row.effect is None and row.size == (300e6, 300e6)


def test_what_a_row_that_does_not_count_says_need_not_agree(tmp_path):
    row, = outside.read(write(tmp_path / "record.csv", dict(effect="0.01", set_aside="another form")))
    assert row.gain == -0.01


@pytest.mark.parametrize("text, size", [
    ("124M", (124e6, 124e6)), ("0.7B non-embedding", (0.7e9, 0.7e9)), ("150M-2B", (150e6, 2e9)),
    ("22-27M params (16 MB artifact)", (22e6, 27e6)), ("1.2B and 3B", (1.2e9, 3e9)),
    ("7B dense (6.9-7.1B)", (7e9, 7e9)), ("Qwen3-1.7B shape", (1.7e9, 1.7e9)),
    ("1.8B MoE, 405M active", (405e6, 405e6)), ("MoE, 20.8M and 60.6M active (1.42B)", (20.8e6, 60.6e6)),
    ("GPT-2 small class (12 layers, 768 wide) + 463M embedding params", (124e6, 124e6)),
    ("9 layers, 512 wide", (12 * 9 * 512 ** 2,) * 2), ("16 MB artifact", None), ("d12-d20", None),
    ("", None)])
def test_a_size_is_read_from_what_a_source_says(text, size):
    assert outside.size_of(text) == size


# ---- what it says ----

def test_a_verdict_is_the_mean_weighted_by_quality(record):
    found = record(dict(quality="a", params="8B"), dict(quality="b", verdict_there="neutral"),
                   dict(quality="c", verdict_there="hurts", effect="", params="",
                        source="somebody/runs PR #2"))
    each = found["key_offset"]
    assert (each.helps, each.neutral, each.hurts, each.sources) == (1, 1, 1, 1)
    assert each.verdict == pytest.approx((3 * 1 + 2 * 0 - 1 * 1) / (3 + 2 + 1))
    assert outside.in_words(each) == "helps in 1 of 3, hurts in 1, at 300 M to 8 B where stated"


def test_rows_of_other_forms_are_in_no_sum(record):
    other = dict(verdict_there="hurts", effect="", set_aside="another form")
    found = record({}, other, dict(other, mechanism="sentinel"), dict(mechanism="gqa"))
    assert list(found) == ["key_offset"] and found["key_offset"].verdict == 1
    assert outside.summaries(every_row=True)["key_offset"].verdict == 0
    said = outside.in_text(outside.on_file(outside.FILE), found)
    assert "  key_offset, 1 row:\n    every layer (another form); somebody/runs #1\n" in said
    assert "  sentinel, 1 row:\n" in said and "  gqa, 1 row: fewer key and value heads" in said


def test_strict_sums_leave_out_what_has_something_beside_the_mechanism(record):
    found = record({}, dict(verdict_there="neutral", beside="a faster RoPE"),
                   dict(mechanism="xsa", beside="more"))
    assert found["key_offset"].verdict == 0.5 and found["key_offset"].beside == 1
    assert outside.summaries(strict=True)["key_offset"].verdict == 1
    assert "xsa" in found and "xsa" not in outside.summaries(strict=True)
    said = outside.in_text(outside.on_file(outside.FILE), found)
    assert "  key_offset, 1 row:\n    every layer (a faster RoPE); somebody/runs #1\n" in said


def test_what_outside_md_says_of_rows_with_something_beside_is_so():
    rows = [row for rows in outside.on_file(outside.FILE).values() for row in rows]
    beside = [row for row in rows if row.beside]
    assert len(beside) == 33 and not any(row.set_aside for row in beside)
    assert sum(row.mechanism.startswith("short_conv") for row in beside) == 18
    assert sum(row.mechanism == "key_offset" for row in beside) == 10
    strict = outside.summaries(strict=True)
    assert len(strict) == 22 and round(strict["output_gate_narrow"].verdict, 2) == -0.2


@pytest.mark.parametrize("name, flags, entry", [
    ("short_conv", {"short_conv": "qkv", "adamw_lr": 0.016}, "short_conv"),
    ("short_conv", {"short_conv": "k"}, None), ("mine", {"short_conv": "qkv"}, None), ("plain", {}, None)])
def test_a_variant_is_an_entry_by_its_name_and_its_flags(name, flags, entry):
    assert outside.entry_of(name, flags) == entry


# ---- the program ----

def test_the_command_prints_and_writes_the_sums(capsys, tmp_path):
    outside.main([f"--json={tmp_path / 'record.json'}"])
    said, found = capsys.readouterr().out, json.loads((tmp_path / "record.json").read_text())
    assert outside.BIASES in said and len(found["rows"]) == 319
    by_name = {each["mechanism"]: each for each in found["mechanisms"]}
    own = [row for row in found["rows"] if row["mechanism"] == "xsa" and not row["set_aside"]]
    assert by_name["xsa"]["helps"] == sum(row["verdict_there"] == "helps" for row in own)


def test_without_a_record_the_command_ends_in_one_line(no_record):
    with pytest.raises(SystemExit, match="^outside: .*outside.csv is not there: the record is in the "):
        outside.main([])


def test_a_record_without_rows_is_not_called_missing(record):
    record()
    with pytest.raises(SystemExit, match="^outside: .*record0.csv has no rows"):
        outside.main([])


def test_entries_of_one_class_are_told_apart():
    said = outside.in_text(outside.on_file(outside.FILE), outside.summaries())
    for flags in ("output_gate=headwise: ", "output_gate=elementwise: ", "short_conv=x: ", "short_conv=kv: "):
        assert flags in said


# ---- beside the verdicts of a study ----

@pytest.fixture(scope="module")
def study():
    return results.read(ROOT / "results" / "controls-tiny.json.gz")


def test_the_record_stands_beside_the_verdicts_of_a_study(study):
    words = outside.words_on("query_gain", {"query_gain": True})
    line = next(line for line in report.in_text(study).splitlines() if line.startswith("query_gain"))
    assert words == "helps in 1 of 1, at 124 M" and " undecided  1 of 1 " in line
    page = report.page(study)
    assert page.count(words) == 1 and findings.ABOUT_RECORD in page
    rows = {row["variant"]: row["record"] for row in findings.verdicts(study)["comparisons"]}
    assert rows["query_gain"] == words and rows["AdamW for Muon"] is None


def test_without_a_record_a_study_says_nothing_of_it(study, no_record):
    assert "record" not in report.in_text(study) and "public record" not in report.page(study)
    assert {row["record"] for row in findings.verdicts(study)["comparisons"]} == {None}


def test_the_record_stands_beside_the_verdicts_on_tasks(tmp_path, monkeypatch):
    found = task_study.read(ROOT / "results/tasks/few.json.gz")
    line = next(line for line in task_report.in_text(found).splitlines() if line.startswith("short_conv"))
    assert line.endswith(" 3 of 3")
    assert "helps in 3 of 3, at 1.7 B" in task_report.page(found, {"task_map": None, "curves": None})
    task_study.write_verdicts(found, tmp_path / "verdicts.json")
    rows = json.loads((tmp_path / "verdicts.json").read_text())["verdicts"]
    said = {row["variant"]: row["record"] for row in rows}
    assert said["short_conv"] == "helps in 3 of 3, at 1.7 B" and said["acag"] is None
    monkeypatch.setattr(outside, "FILE", tmp_path / "outside.csv")
    assert "record" not in task_report.in_text(found)
