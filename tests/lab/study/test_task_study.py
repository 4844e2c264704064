"""A study of tasks: which mechanisms learn what the plain GPT does not, from runs to verdicts and back."""

import copy
import gzip
import json
import re

import pytest

import compare
from nanoheads.common import ROOT, UserError
from nanoheads.tasks import TASKS
from lab.study import digest, permutation, tables, task_study, trial
from lab.study.variants import StudyConfig

from lab_helpers import in_this_process

PLAIN = """
task = 'copy'
n_layer = 1
n_head = 2
n_embd = 16
block_size = 16
batch_size = 4
max_iters = 4
eval_interval = 2
recipe = 'modern'
task_levels = [2, 4]
task_test_levels = [2, 4]
task_rows = 2
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty folder with plain.py, a plain GPT on a task that is trained in a moment; no processes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text(PLAIN)
    place = in_this_process(monkeypatch)
    monkeypatch.setattr(compare, "place_for", lambda config: place)
    monkeypatch.setattr(trial, "ROWS_OF_TASK", 4)
    return tmp_path


# where two seeds are a study, what seems better is chance: no wider plain GPTs, but where they are asked for
STUDY = ["--match_parameters=False",
         "--base=plain.py", "--mechanisms=key_offset", "--seeds=1,2", "--plain_seeds=3", "--device=cpu",
         "--out_dir=out/study", "--alpha=0.6"]


def study_of_two(home):
    compare.main(["--task=copy,induction", *STUDY, "--json=verdicts.json"])
    return task_study.read(home / "out/study/results.json.gz")


def test_a_study_from_its_runs_to_its_verdicts(home, capsys):
    found = study_of_two(home)
    said = capsys.readouterr().out
    assert found["finished"] and found["planned"] == found["done"] == 2 * (3 + 2 + 2)
    arms = found["tasks"]["copy"]["arms"]
    assert list(arms) == ["plain", "plain x 2", "key_offset"] and arms["plain"]["judge"]["seeds"] == [1, 2, 3]
    assert arms["plain x 2"]["steps"] == 2 * arms["plain"]["steps"] == 8
    # scores are those of the runs, and the runs' those of their answers
    for task in found["tasks"].values():
        for arm in task["arms"].values():
            for name, acc in zip(arm["judge"]["runs"], arm["judge"]["acc"]):
                levels = task["runs"][name]["levels"].values()
                assert acc == pytest.approx(sum(right / asked for _, right, asked in levels) / len(levels))
    rows = json.loads((home / "verdicts.json").read_text())["verdicts"]
    assert [(row["task"], row["variant"]) for row in rows if row["baseline"] == "plain"] == [
        (task, name) for task in ("copy", "induction") for name in ("plain x 2", "key_offset")]
    row = rows[1]
    assert row["p"] == permutation.p_of(arms["key_offset"]["judge"]["acc"], arms["plain"]["judge"]["acc"])
    assert "4 comparisons with the plain GPT on 2 tasks" in said and "guessing" in said
    page = (home / "out/study/report.html").read_text()
    assert "data:image/svg+xml;base64" in page and "permutation tests" in page
    # again: nothing runs, and the report is the same
    again = study_of_two(home)
    assert again["verdicts"] == found["verdicts"] and "runs on tasks" not in capsys.readouterr().err


def test_every_figure_is_computed_once_more_and_what_was_changed_is_found(home, capsys):
    found = study_of_two(home)
    path = home / "out/study/results.json.gz"
    compare.main([f"--recheck={path}"])
    assert "computed once more from its runs, all of them the same" in capsys.readouterr().out

    def refused(change, words):
        other = copy.deepcopy(found)
        change(other["tasks"]["copy"], other)
        with pytest.raises(UserError, match=words):
            task_study.recheck(other, "x.json.gz")

    def run_of(task):
        return task["runs"][task["arms"]["key_offset"]["judge"]["runs"][0]]

    refused(lambda task, _: task["arms"]["plain"]["judge"]["acc"].__setitem__(0, 0.99), "another score")
    refused(lambda task, _: run_of(task).update(acc=0.99), "does not follow from its answers")
    refused(lambda task, _: run_of(task)["levels"]["2"].__setitem__(1, 7), "does not follow from its answers")
    refused(lambda task, _: run_of(task)["spec"]["train"].update(adamw_lr=9.0), "the flags of another run")
    refused(lambda task, _: task["arms"]["plain"]["judge"]["runs"].__setitem__(
        0, task["arms"]["key_offset"]["judge"]["runs"][0]), "its run has another model.key_offset")
    refused(lambda _, whole: whole["verdicts"][1].update(verdict="better", mean=0.5), "the verdict on")


def test_the_report_is_made_once_more_from_the_file_alone(home, capsys):
    study_of_two(home)
    capsys.readouterr()
    compare.main(["--from_results=out/study/results.json.gz", "--out_dir=out/again", "--json=again.json"])
    said = capsys.readouterr().out
    assert "4 comparisons" in said and "all of them the same" in said
    assert (home / "again.json").read_bytes() == (home / "verdicts.json").read_bytes()
    for name in ("report.html", "task_map.svg"):
        assert (home / "out/again" / name).read_bytes() == (home / "out/study" / name).read_bytes()


def test_a_report_on_a_file_with_another_figure_says_so(home, capsys):
    found = study_of_two(home)
    found["tasks"]["copy"]["arms"]["plain"]["judge"]["acc"][0] += 0.1
    task_study.write(found, home / "out/changed")
    capsys.readouterr()
    compare.main(["report", "out/changed/results.json.gz", "--out_dir=out/again"])
    assert capsys.readouterr().out.startswith("NOT AS COMPUTED: out/changed/results.json.gz: copy: ")


def test_runs_of_other_code_are_taken_where_that_is_accepted(home, capsys, monkeypatch):
    first = study_of_two(home)
    monkeypatch.setattr(digest, "code_digest", lambda *args, **keys: "tomorrow's")
    capsys.readouterr()
    compare.main(["--task=copy", *STUDY, "--accept_code", "--out_dir=out/second"])
    assert "copy: 7 runs taken from out/trials, 7 of them made by other code" in capsys.readouterr().out
    second = task_study.read(home / "out/second/results.json.gz")
    assert second["finished"] and second["tasks"]["copy"]["arms"] == first["tasks"]["copy"]["arms"]
    task_study.recheck(second, "x")


def test_a_part_that_only_a_report_needs_is_missed_in_one_line(home):
    found = study_of_two(home)
    found["tasks"]["copy"]["arms"]["plain"]["judge"].pop("seeds")
    task_study.write(found, home / "out/changed")
    for command in (["report", "out/changed/results.json.gz", "--out_dir=out/again"],
                    ["recheck", "out/changed/results.json.gz"]):
        with pytest.raises(SystemExit, match="changed/results.json.gz is not what compare.py"):
            compare.main(command)


def test_runs_of_other_code_are_trained_anew_and_named(home, capsys, monkeypatch):
    study_of_two(home)
    monkeypatch.setattr(digest, "code_digest", lambda *args, **keys: "tomorrow's")
    words = ("7 runs of out/trials do not count, since other code or other libraries made them; "
             "--accept_code takes them as they are.")
    more = ["--task=copy", *STUDY, "--out_dir=out/second"]
    compare.main([*more, "--dry_run"])
    assert words in " ".join(capsys.readouterr().out.split())
    compare.main(more)
    assert words in " ".join(capsys.readouterr().out.split())


def test_an_interim_report_without_a_run(home, capsys, recwarn):
    compare.main(["report", "--task=copy", *STUDY])
    assert "INTERIM, 0 of 7 runs: 0 comparisons" in capsys.readouterr().out
    assert not [each for each in recwarn if "legend" in str(each.message)]


def test_the_table_of_a_page_is_that_of_the_file(home, monkeypatch):
    study_of_two(home)
    monkeypatch.setattr(tables, "ROOT", home / "out")
    (home / "out/results").mkdir()
    (home / "out/study/results.json.gz").rename(home / "out/results/two.json.gz")
    page = tables.filled("<!-- table: learned two.json.gz -->\n<!-- end -->", "page.md")
    head, *rows = page.splitlines()[1:7]
    assert head == "| variant | copy | induction |" and rows[1].startswith("| plain |")
    with pytest.raises(UserError, match="holds no study of tasks"):
        (home / "out/results/two.json.gz").write_bytes(b"{}")
        tables.filled("<!-- table: learned two.json.gz -->\n<!-- end -->", "page.md")


def test_with_rates_tuned_what_differs_has_a_grid_and_fresh_seeds(home, monkeypatch):
    monkeypatch.setattr(task_study, "GRID", (0.5, 1.0))
    monkeypatch.setattr(task_study.TaskStudy, "to_tune", lambda self: {"copy": ["key_offset"]})
    compare.main(["--task=copy", *STUDY, "--tune_lr", "--screen_seeds=101"])
    found = task_study.read(home / "out/study/results.json.gz")
    arms = found["tasks"]["copy"]["arms"]
    assert not arms["plain x 2"]["grid"] and not arms["plain x 2"]["best"]["acc"]
    for name, n in (("plain", 3), ("key_offset", 2)):
        assert [(each["muon"], each["adamw"]) for each in arms[name]["grid"]] == [
            (0.5, 0.5), (0.5, 1.0), (1.0, 0.5), (1.0, 1.0)]
        seeds = arms[name]["best"]["seeds"]
        assert len(seeds) == n and not {*seeds} & {1, 2, 3, 101}
    splits = {run["spec"]["score"]["split"]: run for run in found["tasks"]["copy"]["runs"].values()}
    assert splits.keys() == {"val", "test"} and splits["val"]["spec"]["model"]["seed"] == 101
    best = [row for row in found["verdicts"] if row["stage"] == "best"]
    assert [row["variant"] for row in best] == ["key_offset"]
    task_study.recheck(found, "x")


def test_what_seems_better_meets_a_plain_gpt_of_as_many_parameters(home, monkeypatch):
    monkeypatch.setattr(task_study.OnTask, "pairs", lambda task, stage: [
        ("plain x 2", [1.0] * 5, [0.3] * 16), ("output_gate", [1.0] * 5, [0.3] * 16)])
    compare.main(["--task=copy", *STUDY[1:], "--mechanisms=output_gate"])
    found = task_study.read(home / "out/study/results.json.gz")["tasks"]["copy"]
    wide = [name for name, arm in found["arms"].items() if arm["kind"] == "baseline"]
    assert len(wide) == 1 and ["output_gate", wide[0]] in found["pairs"]
    assert found["arms"][wide[0]]["params"] == pytest.approx(found["arms"]["output_gate"]["params"], rel=0.01)
    seeds = [found["arms"][name]["judge"]["seeds"] for name in ("plain", wide[0])]
    assert seeds[0] == seeds[1] and len(seeds[0]) == 3  # with fewer no verdict would be possible


@pytest.mark.parametrize("tried, best", [
    ({(0.5, 1): [(0.5, None)], (1, 1): [(0.9, 200)], (2, 1): [(1.0, 300)]}, (2, 1)),  # the most right
    ({(0.5, 1): [(1.0, 200)], (1, 1): [(0.999, 100)], (2, 1): [(1.0, 300)]}, (1, 1)),  # to 0.01: the first
    ({(0.5, 0.5): [(0.3, None)], (1, 1): [(0.3, None)], (2, 2): [(0.3, None)]}, (1, 1)),  # then the nearest
    ({(1, 1): [(0.99, 500), (0.99, 500)], (2, 2): [(1.0, 100), (0.4, None)]}, (1, 1))])  # both seeds count
def test_the_best_rates(tried, best):
    runs = {factors: {"acc": [acc for acc, _ in each], "learned_from": [step for _, step in each]}
            for factors, each in tried.items()}
    assert task_study.best_of(runs) == best


def test_a_run_that_fails_is_named_and_the_rest_is_judged(home, monkeypatch, capsys):
    started = trial.run

    def fails_once(folder, train):
        spec = json.loads((folder / "trial.json").read_text())
        if spec["train"]["task"] == "copy" and spec["model"].get("key_offset"):
            raise UserError("no luck")
        return started(folder, train)

    monkeypatch.setattr(trial, "run", fails_once)
    with pytest.raises(SystemExit, match="2 runs failed"):
        compare.main(["--task=copy,induction", *STUDY])
    said = capsys.readouterr().out
    assert "INTERIM, 12 of 14 runs" in said and "failed: key_offset, seed 1: no luck" in said
    found = task_study.read(home / "out/study/results.json.gz")
    assert not found["finished"]
    assert [row["task"] for row in found["verdicts"]] == ["copy", "induction", "induction"]


def test_the_plain_gpt_has_as_many_seeds_as_a_verdict_needs():
    config = StudyConfig(task=["all"], mechanisms=["sink"], seeds=[1, 2, 3, 4, 5])
    seeds = task_study.seeds_of_plain(config, 416)
    assert len(seeds) == 16 and len({*seeds}) == 16 and seeds[:5] == [1, 2, 3, 4, 5]
    assert permutation.smallest_p(5, 16) * 416 <= 0.025 < permutation.smallest_p(5, 15) * 416
    assert len(task_study.seeds_of_plain(config, 1)) == 10


def test_a_plan_says_how_many_runs_and_what_a_verdict_needs(home, capsys):
    compare.main(["--task=lookback,copy", *STUDY[:5], "--dry_run"])
    said = capsys.readouterr().out
    assert said.startswith("2 tasks: copy, lookback\n1 variant and a plain GPT trained twice as long")
    assert "2 seeds each against 3 of the plain GPT: 4 comparisons, of which the smallest p is 0.1" in said
    assert "14 runs, 14 of them to do" in said and not (home / "out").exists()


def test_all_tasks_fit_their_own_scale():
    names = task_study.names_of(StudyConfig(task=["all"], mechanisms=["sink"]).task)
    assert names == list(TASKS) and task_study.names_of(["parity", "copy"]) == ["copy", "parity"]


@pytest.mark.parametrize("argv, words", [
    (["--task=recal", "--mechanisms=sink"], "task: unknown 'recal'; there are recall"),
    (["--task=copy", "--mechanisms=sink", "--texts=a,b"], "task=\\['copy'\\] and texts"),
    (["--task=copy", "--mechanisms=sink", "--looks=2"], "task=\\['copy'\\] and looks"),
    (["--task=copy", "--mechanisms=sink,fox", '--contrasts=[["sink", "fox"]]'],
     "task=\\['copy'\\] and contrasts"),
    (["--task=copy", "--mechanism=sink", "--screen"], "task=\\['copy'\\] and screen"),
    (["--task=copy", "--mechanisms=sink", "--budgets=3"], "task=\\['copy'\\] and budgets"),
    (["--task=copy", "--mechanisms=sink", '--settings={"dataset": "x"}'], "dataset='x' is of a text"),
    (["--task=copy", "--mechanisms=sink", '--settings={"task": "recall"}'], "task='recall' makes no"),
    (["--scale=task", "--mechanisms=sink"], "config/task.py trains on the task recall: add --task=recall"),
    (["plan", "--scale=task", "--mechanisms=sink"], "config/task.py trains on the task recall: add")])
def test_what_cannot_be_asked_of_tasks_is_one_line(argv, words, home):
    with pytest.raises(SystemExit, match=words) as e:
        compare.main(argv)
    assert "\n" not in e.value.code


def test_a_studys_scale_and_margin_are_those_given_or_those_of_tasks():
    of_task, of_text = (StudyConfig(mechanisms=["sink"], task=task) for task in (["copy"], []))
    assert (of_task.scale, of_task.margin, of_text.scale, of_text.margin) == ("task", 0.05, "tiny", 0.01)
    asked = StudyConfig(mechanisms=["sink"], task=["copy"], scale="tiny", margin=0.01)
    assert (asked.scale, asked.margin) == ("tiny", 0.01)
    assert task_study.TaskStudy(asked, "x").tasks[0].plain.model.block_size > 48
    challenge = StudyConfig(mechanism="sink", task=["copy"])
    assert not challenge.problems() and not StudyConfig(mechanism="sink", task=["copy"]).screen


def test_medians_of_steps_count_runs_that_never_learn():
    assert task_study.median_step(dict(learned_from=[100, None, 200])) == 200
    assert task_study.median_step(dict(learned_from=[100, None, None])) is None
    assert task_study.median_step(dict(learned_from=[100, None])) is None
    assert task_study.count_learned(dict(acc=[0.3, 0.9, 1.0])) == 2


def test_a_damaged_file_is_no_study_of_tasks(tmp_path):
    path = tmp_path / "x.json.gz"
    for data in (b"", b"\x1f\x8b", gzip.compress(b"{}"), gzip.compress(b'{"kind": "tasks"')):
        path.write_bytes(data)
        assert task_study.read(path) is None


def copy_in(found):
    return found["tasks"]["copy"]


def fox_of(found):
    return copy_in(found)["arms"]["fox"]


def a_run(found):
    return next(iter(copy_in(found)["runs"].values()))


@pytest.mark.parametrize("damage, words", [
    (lambda f: f.pop("tasks"), "tasks is missing"),
    (lambda f: f.update(tasks={}), "tasks holds none"),
    (lambda f: f.update(finished=None), "finished is None, not a bool"),
    (lambda f: f.update(margin=0.0), "between 0 and 1 and margin=0.0 positive"),
    (lambda f: f["config"].update(jobs="two"), "config.jobs is 'two', not int"),
    (lambda f: f["verdicts"][0].update(variant="bob"), "verdicts[0] is on bob and plain, which recall"),
    (lambda f: f["verdicts"][0].update(verdict="good"), "verdicts[0].verdict is 'good', not one of"),
    (lambda f: f["verdicts"][0].update(stage="last"), "verdicts[0].stage is 'last', not judge or"),
    (lambda f: f["verdicts"][0].update(low=None), "verdicts[0].low is None, not a number"),
    (lambda f: copy_in(f)["arms"].pop("plain"), "tasks.copy.arms has no plain, the plain GPT"),
    (lambda f: copy_in(f)["pairs"].append(["plain"]), "tasks.copy.pairs: ['plain'] is not two"),
    (lambda f: copy_in(f).update(guesses={}), "tasks.copy.guesses has a level without a guess"),
    (lambda f: copy_in(f)["runs"].clear(), "tasks.copy: plain has a score of run "),
    (lambda f: a_run(f)["levels"].pop("2"), "has answers of other levels than guesses"),
    (lambda f: a_run(f)["levels"].update({"2": [1.0, 3]}), "levels.2 is [1.0, 3], not nats, right"),
    (lambda f: a_run(f)["curve"]["acc"].pop(), "curve has lists of several lengths"),
    (lambda f: fox_of(f)["judge"]["acc"].append(None), "judge.acc[5] is None, not a number"),
    (lambda f: fox_of(f)["judge"]["acc"].__setitem__(0, 2), "judge.acc has 2, which is no share"),
    (lambda f: fox_of(f)["judge"]["learned_from"].pop(), "judge has lists of several lengths"),
    (lambda f: fox_of(f)["judge"].pop("seeds"), "judge.seeds is missing"),
    (lambda f: fox_of(f).pop("flags"), "tasks.copy.arms.fox.flags is missing"),
    (lambda f: fox_of(f).update(best=[]), "fox.best is [], not a dict"),
    (lambda f: fox_of(f).update(best=fox_of(f)["judge"]), "and no what_best that says which these"),
])
def test_a_file_that_somebody_edited_is_one_line(tmp_path, damage, words):
    found = task_study.read(ROOT / "results/tasks/few.json.gz")
    path = tmp_path / "x.json"
    damage(found)
    path.write_text(json.dumps(found))
    line = f"^{re.escape(str(path))} is not what compare.py --task writes: .*{re.escape(words)}"
    with pytest.raises(UserError, match=line):
        task_study.read(path)
