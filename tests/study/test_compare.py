"""compare.py: a study of tiny models from its file to its report, and what is done with its results."""

import gzip
import json
import re
import shutil
import signal
import subprocess

import pytest
from helpers import EDITS, damaged
from hypothesis import example, given, settings
from runs import results_of, run_here, run_of_study

import compare
from study import records, trial


def refused(*words):
    """The lines with which compare.py refuses a command line."""
    with pytest.raises(SystemExit) as e:
        compare.main([str(word) for word in words])
    assert isinstance(e.value.code, str), "it went through"
    return e.value.code


# ---- a study ----

def test_a_study_runs_from_its_file_to_its_report(finished_study, capsys):
    study, on_file = records.read(results_of(finished_study))
    assert study.finished and len(study.runs) == 3 * 2 and not study.failures
    verdicts = {c["variant"]: c["verdict"] for c in on_file}
    assert verdicts.keys() == {"again"} and verdicts["again"] in ("undecided", "same")
    there = {path.name for path in results_of(finished_study).parent.iterdir()}
    assert there >= {"report.html", "report.md", "forest.svg", "forest.png"}
    told = json.loads((finished_study / "verdicts.json").read_text())
    assert {row["variant"]: row["verdict"] for row in told["comparisons"]} == verdicts
    assert told["question"] == "Does any of it help?"
    compare.main(["recheck", str(results_of(finished_study))])
    assert "all of them the same" in capsys.readouterr().out


@pytest.mark.slow
def test_a_study_that_was_stopped_goes_on_to_the_same_figures(tiny_study, monkeypatch, here, capsys):
    """SIGTERM ends it with its status, without results, and with what was trained, which stays as it is."""
    before = records.read(results_of(tiny_study))[1]
    for seed in (1, 2):  # of its six runs two are to be trained
        shutil.rmtree(trial.folder_of(run_of_study("again", seed)))
    results_of(tiny_study).unlink()
    started = []

    def until_the_second(command, **how):
        if "--trial" in command:
            started.append(command)
        if len(started) == 2:
            signal.raise_signal(signal.SIGTERM)
        return run_here(command, **how)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", until_the_second)
        with pytest.raises(SystemExit) as e:
            compare.main(["tiny_study.py"])
    kept = {path: path.stat().st_mtime_ns for path in tiny_study.glob("out/trials/*/result.json")}
    assert e.value.code == 130 and len(kept) == 5 and not [*tiny_study.glob("out/*/results.json.gz")]
    capsys.readouterr()
    compare.main(["tiny_study.py"])
    assert len(capsys.readouterr().err.splitlines()) >= 3, "no stage is silent: each may take minutes"
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    assert records.read(results_of(tiny_study))[1] == before


def test_a_plan_counts_what_is_done_and_says_what_must_be_made_first(tiny_study, bytes_data, capsys):
    """Data, a teacher, labels: the rest is planned all the same, and only a study refuses."""
    compare.main(["plan", "tiny_study.py", "--seeds=[1,2,3]", "--plain_seeds=3"])
    told = capsys.readouterr().out
    assert all(f"\n{name} " in told for name in ("plain", "again", "plain x 2"))
    assert "9 runs, 3 of them to do" in told
    compare.main(["plan", "tiny_study.py", "--settings={'dataset': 'wikitext103'}"])
    told = capsys.readouterr().out
    assert "again" in told and "wikitext103" in told and "is not prepared" in told
    names = dict(constraint_names=["digit"])
    variants = dict(taught=dict(**names, teacher="out/taught/ckpt.pt", constraint_match="kl"),
                    labelled=dict(**names, labels="weak"))
    compare.main(["plan", "tiny_study.py", f"--variants={variants}", "--match_parameters=False",
                  "--first={'out/taught/ckpt.pt': 'python train.py it.py'}"])
    told = capsys.readouterr().out
    assert "teacher=out/taught/ckpt.pt is not there yet; first run: python train.py it.py" in told
    assert f"no labels 'weak' for {bytes_data}" in told and "8 runs, 4 of them to do" in told
    assert "is not there yet" in refused("tiny_study.py", f"--variants={variants}", "--mechanisms=xsa")


# ---- a report of the runs that are done ----

def test_a_report_never_takes_the_place_of_scores_that_it_lacks(tiny_study):
    before = results_of(tiny_study).read_bytes()
    shutil.rmtree("out/trials")
    assert "has 6 scores, and of these runs 0 are done" in refused("report", "tiny_study.py")
    assert results_of(tiny_study).read_bytes() == before


@pytest.mark.slow
def test_a_report_of_what_is_done_names_what_failed_is_missing_or_left_out(tiny_study):
    """Of two seeds of a variant one failed, another has not begun, and a third is done and not asked for."""
    failed = trial.folder_of(run_of_study("again", 2))
    (failed / "result.json").unlink()
    trial.write_failure(failed, "the loss is not finite")
    said = refused("report", "tiny_study.py", "--seeds=[2,9]", "--out_dir=out/part", "--json=part.json")
    assert "1 run failed" in said
    told = json.loads((tiny_study / "part.json").read_text())
    assert not told["finished"] and {row["verdict"] for row in told["comparisons"]} == {"unfinished"}
    assert told["failures"] == 1 and any("the loss is not finite" in line for line in told["notices"])
    assert dict(variant="again", seeds=[1]) in told["left_out"]


# ---- files of results ----

def changed(path, change):
    """A copy of a results file in which something was changed."""
    found = json.loads(gzip.decompress(path.read_bytes()))
    change(found)
    with gzip.open("changed.json.gz", "wt") as file:
        json.dump(found, file)
    return "changed.json.gz"


def result_in(found, variant):
    """The result of a variant's first run in the document of a results file."""
    run = next(run for run in found["study"]["runs"] if run["variant"] == variant)
    return found["study"]["results"][records.hash_of(run["spec"])]


CHANGES = {
    "a score": lambda found: result_in(found, "again").update(score=1.0),
    "a verdict": lambda found: found["comparisons"][0].update(verdict="better"),
    "a comparison that is missing": lambda found: found["comparisons"].pop(),
    "the flags of a variant": lambda found: found["study"]["variants"][0]["flags"].update(n_layer=9),
}


def test_what_was_edited_is_found(finished_study):
    for change in CHANGES.values():
        copy = changed(results_of(finished_study), change)
        lines = refused("recheck", copy).splitlines()
        assert lines and all(copy in line for line in lines)


def test_an_edit_of_the_sixth_digit_is_found(finished_study):
    def edit(found):
        found["comparisons"][0]["high"] *= 1 + 1e-6
    assert "high is " in refused("recheck", changed(results_of(finished_study), edit))


@pytest.mark.slow
def test_a_report_is_what_the_runs_give_whatever_the_file_says(finished_study, tmp_path):
    """It needs no runs, and fails where a verdict was edited."""
    copy = changed(results_of(finished_study), CHANGES["a verdict"])
    assert "NOT AS COMPUTED" in refused("report", copy, "--json=again.json")
    assert (tmp_path / "out/changed-report/report.html").is_file()
    again, before = (json.loads(path.read_text())["comparisons"]
                     for path in (tmp_path / "again.json", finished_study / "verdicts.json"))
    assert again == before


def test_what_nothing_can_be_computed_of_is_a_line(finished_study):
    for damage in (lambda found: found["study"].update(measure="nats"),
                   lambda found: result_in(found, "plain").update(score="x")):
        copy = changed(results_of(finished_study), damage)
        for command in ("recheck", "report"):
            line = refused(command, copy)
            assert line.startswith(f"compare: {copy} is damaged: ") and "\n" not in line


@settings(max_examples=15)
@given(edits=EDITS)
@example([("cut", 0.0, 2**16)])
@example([("cut", 0.9, 2**16)])
def test_a_damaged_file_is_read_as_it_was_or_refused_in_a_line(finished_study, edits):
    """Its own checksum finds what changes the content; the date in its head may differ."""
    content = results_of(finished_study).read_bytes()
    with open("damaged.json.gz", "wb") as file:
        file.write(damaged(content, edits))
    try:
        compare.main(["recheck", "damaged.json.gz"])
    except SystemExit as e:
        assert re.match(r"compare: (cannot read )?damaged.json.gz[^\n]*$", e.code)


# ---- scores of another program ----

def test_scores_of_a_file_are_judged(tmp_path):
    (tmp_path / "scores.csv").write_text("variant,seed,score\n" + "".join(
        f"{name},{seed},{mean + seed / 1000}\n" for name, mean in (("plain", 3.3), ("mine", 3.2))
        for seed in range(5)))
    compare.main(["scores", "scores.csv", "--target=3.28", "--json=verdicts.json"])
    told = json.loads((tmp_path / "verdicts.json").read_text())
    assert [(row["variant"], row["verdict"]) for row in told["comparisons"]] == [("mine", "better")]
    assert {row["variant"]: row["beyond"] for row in told["targets"]} == {"plain": False, "mine": True}
    compare.main(["recheck", "out/scores-report/results.json.gz"])
