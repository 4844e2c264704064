"""compare.py: one real study of tiny models from its file to its report, and what its commands refuse."""
import gzip
import json
import re
import shutil
import signal
import subprocess
import sys

import pytest
from helpers import ROOT
from runs import wait_until

import compare
from nanoheads import configurator
from study import records, trial
from study.config import StudyConfig
from study.plan import Planner

BASE = """
dataset = {data!r}
recipe = "modern"
n_layer, n_head, n_embd, block_size, batch_size = 1, 2, 16, 16, 4
max_iters, eval_interval, eval_tokens, log_interval = {steps}, {steps}, 64, 1
"""
STUDY = """
question = "Does any of it help?"
base = {base!r}
variants = {{"again": dict(seed=100), "bad": dict(muon_lr=1e-6, adamw_lr=1e-6, min_lr=0.0, embed_lr=1e-6)}}
seeds, plain_seeds, budgets = [1, 2], 2, [2.0]
device, jobs = "cpu", 2
"""


def write_study(folder, data, steps=6):
    """The config files of a tiny study in a folder; the study's path."""
    (folder / "base.py").write_text(BASE.format(data=str(data), steps=steps))
    (folder / "tiny_study.py").write_text(STUDY.format(base=str(folder / "base.py")))
    return folder / "tiny_study.py"


@pytest.fixture(scope="module")
def home(bytes_data, tmp_path_factory):
    """A folder in which the study has run to its end."""
    folder = tmp_path_factory.mktemp("home")
    path = write_study(folder, bytes_data)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        compare.main([str(path), "--json=verdicts.json"])
    return folder


@pytest.fixture
def inside(home, monkeypatch):
    monkeypatch.chdir(home)
    return home


def results_of(folder):
    (path,) = folder.glob("out/*/results.json.gz")
    return path


def untimed(comparisons):
    """Comparisons of a results file without what follows from the time of a step, which is measured anew."""
    return [{key: value for key, value in each.items() if key != "equal_time"} for each in comparisons]


def refused(*words):
    """The one line with which compare.py refuses a command line."""
    with pytest.raises(SystemExit) as e:
        compare.main([str(word) for word in words])
    assert isinstance(e.value.code, str), "it went through"
    return e.value.code


# ---- a study ----

def test_a_study_runs_from_its_file_to_its_report(inside):
    study, on_file = records.read(results_of(inside))
    assert study.finished and len(study.runs) == 4 * 2 and not study.failures
    found = {c["variant"]: c["verdict"] for c in on_file}
    assert found["again"] in ("undecided", "same") and set(found) == {"again", "bad"}
    out = results_of(inside).parent
    assert {path.name for path in out.iterdir()} >= {"report.html", "report.md", "forest.svg", "forest.png"}
    told = json.loads((inside / "verdicts.json").read_text())
    assert {row["variant"]: row["verdict"] for row in told["comparisons"]} == found
    assert told["question"] == "Does any of it help?"


def test_the_same_command_trains_nothing_and_says_the_same(inside, capsys):
    before = {path: path.stat().st_mtime_ns for path in inside.glob("out/trials/*/result.json")}
    first = records.read(results_of(inside))[1]
    compare.main(["tiny_study.py"])
    assert {path: path.stat().st_mtime_ns for path in inside.glob("out/trials/*/result.json")} == before
    assert records.read(results_of(inside))[1] == first


def test_a_plan_names_every_variant_and_counts_what_is_done(inside, capsys):
    compare.main(["plan", "tiny_study.py", "--seeds=[1,2,3]", "--plain_seeds=3"])
    told = capsys.readouterr().out
    assert all(f"\n{name} " in told for name in ("plain", "again", "bad", "plain x 2"))
    assert "12 runs, 4 of them to do" in told


def test_no_stage_of_a_study_is_silent(inside, capsys):
    """Also after the last run: on a busy machine each takes minutes."""
    compare.main(["tiny_study.py"])
    assert capsys.readouterr().err.splitlines() == ["planning ...", "counting FLOPs and timing steps ...",
                                                    "judging ..."]
    compare.main(["plan", "tiny_study.py"])
    assert capsys.readouterr().err.splitlines() == ["planning ...", "counting FLOPs ...",
                                                    "timing the plain GPT ..."]


def test_a_plan_without_data_says_what_is_missing(inside, capsys):
    compare.main(["plan", "tiny_study.py", "--settings={'dataset': 'wikitext103'}"])
    told = capsys.readouterr().out
    assert "again" in told and "wikitext103" in told and "is not prepared" in told


def test_a_plan_without_its_teacher_or_labels_says_what_makes_them(inside, bytes_data, capsys):
    names = dict(constraint_names=["digit"])
    variants = dict(taught=dict(**names, teacher="out/taught/ckpt.pt", constraint_match="kl"),
                    labelled=dict(**names, labels="weak"))
    compare.main(["plan", "tiny_study.py", f"--variants={variants}", "--match_parameters=False",
                  "--first={'out/taught/ckpt.pt': 'python train.py it.py'}"])
    told = capsys.readouterr().out
    assert "teacher=out/taught/ckpt.pt is not there yet; first run: python train.py it.py" in told
    assert f"no labels 'weak' for {bytes_data}" in told and "8 runs, 4 of them to do" in told
    assert "is not there yet" in refused("tiny_study.py", f"--variants={variants}", "--mechanisms=xsa")


def test_a_report_of_what_is_done_is_unfinished_and_tells_a_program_so(inside, capsys):
    compare.main(["report", "tiny_study.py", "--seeds=[1,2,9]", "--plain_seeds=3", "--out_dir=out/part",
                  "--json=part.json"])
    assert "not finished" in capsys.readouterr().out
    told = json.loads((inside / "part.json").read_text())
    assert {row["verdict"] for row in told["comparisons"]} == {"unfinished"}
    shutil.rmtree("out/part")


def test_a_report_never_takes_the_place_of_scores_that_it_lacks(inside, tmp_path, monkeypatch):
    shutil.copytree(results_of(inside).parent, tmp_path / "out" / results_of(inside).parent.name)
    before = results_of(tmp_path).read_bytes()
    monkeypatch.chdir(tmp_path)  # where no run is done, as after a change of the code
    assert "has 8 scores, and of these runs 0 are done" in refused("report", inside / "tiny_study.py")
    assert results_of(tmp_path).read_bytes() == before


def test_a_report_of_what_is_done_says_what_failed(inside, capsys):
    words = ["tiny_study.py", "--seeds=[1,2,8]", "--plain_seeds=3", "--out_dir=out/failed"]
    (config,), _ = configurator.build_configs(configurator.parse_command((StudyConfig,), words))
    run = next(run for run in Planner(config).plan({}).runs if (run.variant, run.seed) == ("bad", 8))
    trial.write_failure(trial.make_folder(run), "the loss is not finite")
    assert "1 run failed, the report names it" in refused("report", *words)
    assert "the loss is not finite" in capsys.readouterr().out
    shutil.rmtree(trial.folder_of(run))
    shutil.rmtree("out/failed")


def test_seeds_that_were_left_out_are_named(inside, capsys):
    compare.main(["report", "tiny_study.py", "--seeds=[1]", "--plain_seeds=1", "--out_dir=out/fewer"])
    told = " ".join(capsys.readouterr().out.split())
    assert "left out" in told and "again" in told
    shutil.rmtree("out/fewer")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_study_that_was_killed_goes_on_to_the_same_figures(how, home, bytes_data, tmp_path):
    path = write_study(tmp_path, bytes_data)
    command = [sys.executable, ROOT / "compare.py", path]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert wait_until(lambda: [*tmp_path.glob("out/trials/*/result.json")])
    process.send_signal(how)
    process.communicate()
    assert process.returncode == (130 if how == signal.SIGTERM else -signal.SIGKILL)
    assert not [*tmp_path.glob("out/*/results.json.gz")]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    mine, other = (untimed(records.read(results_of(folder))[1]) for folder in (tmp_path, home))
    assert mine == other


@pytest.mark.slow
def test_two_studies_at_once_share_their_runs(bytes_data, tmp_path):
    path = write_study(tmp_path, bytes_data)
    command = [sys.executable, ROOT / "compare.py", path]
    both = [subprocess.Popen([*command, f"--out_dir=out/{name}"], cwd=tmp_path, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT) for name in ("one", "two")]
    assert [process.wait() for process in both] == [0, 0], [process.stdout.read() for process in both]
    assert len([*tmp_path.glob("out/trials/*/result.json")]) == 8
    one, two = (records.read(tmp_path / f"out/{name}/results.json.gz")[1] for name in ("one", "two"))
    assert untimed(one) == untimed(two)


# ---- files of results ----

def test_every_figure_is_computed_once_more(inside, capsys):
    compare.main(["recheck", str(results_of(inside))])
    assert "all of them the same" in capsys.readouterr().out


def changed(path, tmp_path, change):
    """A copy of a results file in which something was changed."""
    found = json.loads(gzip.decompress(path.read_bytes()))
    change(found)
    copy = tmp_path / "changed.json.gz"
    copy.write_bytes(gzip.compress(json.dumps(found).encode()))
    return copy


def of_run(found, variant):
    """The name and the run of a variant's first judged run."""
    run = next(run for run in found["study"]["runs"] if run["variant"] == variant)
    return records.hash_of(run["spec"]), run


CHANGES = {
    "a score": lambda found: found["study"]["results"][of_run(found, "again")[0]].update(score=1.0),
    "a verdict": lambda found: found["comparisons"][0].update(verdict="better"),
    "a margin": lambda found: found["study"].update(margin=0.5),
    "a comparison that is missing": lambda found: found["comparisons"].pop(),
    "the flags of a variant": lambda found: found["study"]["variants"][0]["flags"].update(n_layer=9),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_was_edited_is_found(change, inside, tmp_path, capsys):
    copy = changed(results_of(inside), tmp_path, change)
    assert str(copy) in refused("recheck", copy)
    assert "NOT AS COMPUTED" in refused("report", copy, f"--out_dir={tmp_path / 'out'}")


def test_a_comparison_that_is_missing_says_nothing_of_the_others(inside, tmp_path):
    copy = changed(results_of(inside), tmp_path, lambda found: found["comparisons"].pop(0))
    lines = refused("recheck", copy).splitlines()
    assert len(lines) == 2 and "comparisons, where its runs give" in lines[0]
    assert lines[1].endswith(": its runs give this comparison, and the file does not have it")


DAMAGES = {
    "no such measure": lambda found: found["study"].update(measure="nats"),
    "no such variant": lambda found: found["study"]["variants"].pop(0),
    "a pair without texts": lambda found: found["study"]["pairs"][0].update(texts=[]),
    "a score that is text": lambda found: [each.update(score="x")
                                           for each in found["study"]["results"].values()],
    "no number of tokens": lambda found: found["study"]["variants"][0].update(tokens=None),
    "an alpha of nothing": lambda found: found["study"].update(alpha=None),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_nothing_can_be_computed_of_is_a_line(damage, inside, tmp_path):
    copy = changed(results_of(inside), tmp_path, damage)
    for words in (["recheck", copy], ["report", copy, f"--out_dir={tmp_path / 'out'}"]):
        assert refused(*words).startswith(f"compare: {copy} is damaged: ")


def test_a_report_once_more_needs_no_runs(inside, tmp_path, capsys, monkeypatch):
    copy = shutil.copy(results_of(inside), tmp_path / "copy.json.gz")
    monkeypatch.chdir(tmp_path)
    compare.main(["report", str(copy), "--json=again.json"])
    assert "tiny_study: Not one of 2 variants was shown to be better" in capsys.readouterr().out
    assert (tmp_path / "out/copy-report/report.html").is_file()
    assert json.loads((tmp_path / "again.json").read_text())["finished"]


# ---- scores of another program ----

def test_scores_of_a_file_are_judged(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scores.csv").write_text("variant,seed,score\n" + "".join(
        f"{name},{seed},{mean + seed / 1000}\n" for name, mean in (("plain", 3.3), ("mine", 3.2))
        for seed in range(5)))
    compare.main(["scores", "scores.csv", "--target=3.28", "--json=verdicts.json"])
    told = json.loads((tmp_path / "verdicts.json").read_text())
    assert [(row["variant"], row["verdict"]) for row in told["comparisons"]] == [("mine", "better")]
    assert {row["variant"]: row["beyond"] for row in told["targets"]} == {"plain": False, "mine": True}
    compare.main(["recheck", "out/scores-report/results.json.gz"])


BAD_ROWS = {
    "mine,1,1_4695": "score '1_4695' is not a finite number",
    "mine,1,٣.٢": "is not a finite number",
    "mine,1,inf": "score 'inf' is not a finite number",
    "mine,1": "2 cells, where the first line has 3",
    "mine,,3.2": "no seed",
    "plain,1,3.2": "plain with seed 1 is on line 2 already",
}


@pytest.mark.parametrize("row", BAD_ROWS)
def test_a_row_that_is_wrong_is_named_by_its_line(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text(f"variant,seed,score\nplain,1,3.3\n{row}\n", encoding="utf-8")
    line = refused("scores", "bad.csv")
    assert line.startswith("compare: bad.csv, line 3: ") and BAD_ROWS[row] in line


# ---- refusals ----

REFUSALS = [
    (["--mechanisms=xsaa"], "unknown 'xsaa'; did you mean xsa?"),
    (["--mechanisms=xsa", "--sede=1"], "sede"),
    ([], "name at least one variant to compare"),
    (["--mechanisms=xsa", "--seeds=[1,1]"], "must be different numbers"),
    (["--mechanisms=xsa", "--target=3"], "target goes with compare.py scores FILE alone"),
    (["config/studies/nothing.py"], "nothing.py"),
    (["plan", "--mechanisms=xsa", "--scale=deep"], "deep"),
    (["recheck"], "recheck takes one file, FILE.json.gz: 0 are given"),
    (["recheck", "a.json.gz", "--alpha=1"], "recheck has no key alpha"),
    (["recheck", "nowhere.json.gz"], "cannot read nowhere.json.gz"),
    (["report", "nowhere.json"], "cannot read nowhere.json"),
    (["scores", "nowhere.csv"], "cannot read nowhere.csv"),
    (["recheck", "text.json"], "text.json is no results file"),
    (["recheck", "cut.json.gz"], "cut.json.gz is no results file, or it is damaged"),
    (["recheck", "former.json.gz"], "files from before it are read at commit 86da9e9"),
    (["scores", "empty.csv"], "no column variant, seed, score"),
    (["scores", "one.csv"], "one.csv has one variant, plain: nothing to compare it with"),
    (["scores", "one.csv", "--baseline=other"], "--baseline=other is no variant of one.csv"),
]


@pytest.mark.parametrize("words, said", REFUSALS, ids=[" ".join(words) for words, _ in REFUSALS])
def test_what_is_wrong_is_said_in_a_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    former = gzip.compress(json.dumps(dict(name="all", comparisons=[])).encode())
    (tmp_path / "former.json.gz").write_bytes(former)
    (tmp_path / "cut.json.gz").write_bytes(former[:-9])
    (tmp_path / "text.json").write_text("not JSON")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "one.csv").write_text("variant,seed,score\nplain,1,3.3\nplain,2,3.2\n")
    line = refused(*words)
    assert said in line and line.startswith("compare: ") and "Traceback" not in line
    assert capsys.readouterr().out == ""


def test_help_names_the_keys_of_each_command(capsys):
    for command, has, lacks in (("run", "--seeds", "--higher_is_better"), ("scores", "--target", "--seeds"),
                                ("recheck", "FILE.json.gz", "--seeds")):
        with pytest.raises(SystemExit) as e:
            compare.main([command, "--help"])
        assert not e.value.code
        told = capsys.readouterr().out
        assert has in told and not re.search(rf"^ *{lacks}\b", told, re.M), command
