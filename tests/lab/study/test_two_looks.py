"""A study in two planned looks, and what to type where a study leaves something undecided."""
import json
import shlex
from pathlib import Path

import pytest

import compare
from compare import main
from helpers import ROOT
from nanoheads.common import UserError
from lab_helpers import as_on_file, but
from lab.study import effects, findings, follow_up, records, results, stats
from lab.study.report import page as html_of

BIG = {"big": dict(n_inner=96, max_iters=18)}  # better than the plain GPT, and of more parameters


@pytest.fixture
def study(plain, here, monkeypatch):
    """study(*more) -> what --json has of a study of sink with two looks, at the seeds 1 to 6 if no others."""
    monkeypatch.setattr(compare, "place_for", lambda config: here)

    def call(*more):
        here.started = []
        main(["--base", str(plain), "--device=cpu", "--mechanisms=sink", "--budgets=[]", "--rescore=0",
              "--seeds=1,2,3,4,5,6", "--looks=2", "--plain_seeds=8", "--json=v.json", *more])
        return json.loads(Path("v.json").read_text()) if Path("v.json").is_file() else None
    return call


def seeds_of(found):
    return {name: sorted(arm["seeds"]) for name, arm in found["arms"].items()}


def started_seeds(here):
    return [json.loads((folder / "trial.json").read_text())["model"]["seed"] for folder in here.started]


# ---- two looks ----

@pytest.mark.slow
def test_what_the_first_look_decides_is_not_trained_again(study, here, capsys):
    told = study(f"--variants={BIG}", "--spending=pocock")
    found, wider = results.read("out/sink+big-plain/results.json.gz"), "plain, MLP 96"
    assert seeds_of(found) == {"plain": [*range(1, 9)], "sink": [*range(1, 7)], "big": [1, 2, 3],
                               wider: [1, 2, 3]}
    assert found["two_looks"]["plain_seeds"] == [1, 2, 3, 7]
    seeds = started_seeds(here)
    later = [seeds.index(seed) for seed in (4, 5, 6, 8)]
    assert max(i for i, seed in enumerate(seeds) if seed in (1, 2, 3, 7)) < min(later)
    rows = {(c["variant"], c["baseline"]): c for c in told["comparisons"]}
    big, equal = rows["big", "plain"], rows["big", wider]
    assert (big["verdict"], big["look"], big["n"], big["n_baseline"]) == ("better", 1, 3, 4)
    assert (equal["verdict"], equal["look"], equal["n"], equal["n_baseline"]) == ("better", 1, 3, 3)
    sink = rows["sink", "plain"]
    assert (sink["verdict"], sink["look"], sink["n"], sink["n_baseline"]) == ("undecided", 2, 6, 8)
    levels = stats.levels(0.05, "pocock", 0.5, 3)
    assert told["two_looks"] == dict(spending="pocock", look=2, levels=levels)
    assert big["words"].endswith(f"; look 1 of 2, held against {levels[0]:.4f}")
    line, = (line for line in told["notices"] if line.startswith("Look "))
    assert line.startswith("Look 2 of 2, as planned (Pocock): corrected p is held against "
                           f"{levels[0]:.4f} at look 1, by 3 of 6 seeds, and against {levels[1]:.4f} at look")
    assert line.endswith("Look 1 decided big against plain GPT and big against plain GPT, MLP 96 wide, "
                         "which stays as it was there, by its seeds.")
    printed, page = capsys.readouterr().out, Path("out/sink+big-plain/report.html").read_text()
    assert "look 1 of 2: 2 of 3 comparisons are decided, the others go on" in printed
    for text in (printed, page):
        assert "".join(line.split()) in "".join(text.split())
    # its own first look is none that was not planned; started again, nothing runs and all is as it was
    assert told["looks"] == told["left_out"] == [] and told["finished"]
    assert study(f"--variants={BIG}", "--spending=pocock") == told and not here.started
    main(["--recheck=out/sink+big-plain/results.json.gz"])
    assert "all of them the same" in capsys.readouterr().out
    for change in (lambda f: f["levels"].__setitem__(0, 0.05),
                   lambda f: f["two_looks"].update(spending="obrien_fleming"),
                   lambda f: f["two_looks"].update(first_seeds=[1, 2])):
        other = as_on_file(found)
        change(other)
        results.write(other, "out")
        with pytest.raises(UserError, match="not what its runs give"):
            results.recheck("out/results.json.gz", complain=False)


@pytest.mark.slow
def test_what_seems_better_at_the_second_look_meets_its_wider_plain_gpt_by_all_seeds(study, monkeypatch):
    monkeypatch.setattr(effects, "seem_better", lambda scores, pairs, *level: [
        name for name, *_ in pairs if name == "big"])
    told = study("--variants={'big': {'n_inner': 96}}")  # the wider plain GPT itself, so that both are equal
    assert seeds_of(results.read("out/sink+big-plain/results.json.gz"))["plain, MLP 96"] == [*range(1, 7)]
    assert [(c["variant"], c["equal"], c["look"], c["n"]) for c in told["comparisons"]] == [
        ("big", [], 2, 6), ("sink", [], 2, 6), ("big", ["parameters"], 2, 6)]
    assert told["two_looks"]["levels"] == [stats.levels(0.05, "obrien_fleming", 0.5, 2)[0],
                                           stats.levels(0.05, "obrien_fleming", 0.5, 3)[1]]


def test_a_study_whose_first_look_decides_everything_has_no_second(study, here, capsys):
    told = study("--margin=0.3", "--spending=pocock", "--match_parameters=False")
    c, = told["comparisons"]
    assert (c["verdict"], c["look"], told["planned"], told["finished"]) == ("same", 1, 7, True)
    assert max(started_seeds(here)) == 7 and len(here.started) == 7
    assert any("Look 1 decided everything, so the other seeds were not trained." in line
               for line in told["notices"])
    capsys.readouterr()
    study("--margin=0.3", "--spending=pocock", "--match_parameters=False", "--dry_run", "--json=None")
    assert "14 runs, 7 of them to do" in capsys.readouterr().out  # a plan is that of both looks


@pytest.mark.slow
def test_a_study_in_two_looks_goes_on_where_it_was_stopped(study, here, capsys, monkeypatch):
    """A report between the two looks is the planned one; what it is of other plans is a look of its own."""
    run = here.run

    def stopped(folder):
        if json.loads((folder / "trial.json").read_text())["model"]["seed"] == 4:
            raise KeyboardInterrupt
        return run(folder)

    monkeypatch.setattr(here, "run", stopped)
    with pytest.raises(SystemExit):
        study()
    first = [*here.started]
    between = study("--report_only")
    assert between["finished"] is False and (between["done"], between["planned"]) == (7, 14)
    assert between["comparisons"][0]["verdict"] == "unfinished"
    monkeypatch.setattr(here, "run", run)
    told = study()
    assert len(first) == len(here.started) == 7 and not {*first} & {*here.started}
    assert told["looks"] == [] and told["comparisons"][0]["n"] == 6
    whole, = (look["seeds"] for look in study("--seeds=1,2,3", "--plain_seeds=4", "--looks=1")["looks"]
              if look["seeds"]["sink"] != [1, 2, 3])
    assert whole == dict(plain=[*range(1, 9)], sink=[*range(1, 7)])


@pytest.mark.slow
def test_a_first_look_that_was_not_planned_as_one_is_told(study):
    study("--seeds=1,2,3", "--plain_seeds=4", "--looks=1")
    told = study()
    assert [look["seeds"] for look in told["looks"]] == [dict(plain=[1, 2, 3, 4], sink=[1, 2, 3])]


@pytest.mark.slow
def test_without_planned_looks_nothing_of_them_is_on_file(study):
    told = study("--looks=1", "--seeds=1,2,3")
    found, = (results.read(path) for path in Path("out").glob("*/results.json.gz"))
    assert not {"two_looks", "levels"} & {*found.keys(), *told}
    assert "look" not in told["comparisons"][0] and "look" not in found["comparisons"][0]
    assert "held against" not in told["comparisons"][0]["words"]


def test_a_plan_names_the_runs_that_the_second_look_may_spare(plain, capsys):
    main(["--base", str(plain), "--mechanisms=output_gate,xsa", "--dry_run", "--device=cpu", "--looks=2",
          "--seeds=1,2,3,4,5", "--budgets=[0.5]"])
    said = capsys.readouterr().out
    # of 5 seeds the first look has 3, of the plain GPT's 7 it has 4
    assert "22 runs, 22 of them to do" in said and "two looks: 9 of these runs are of the second one" in said


@pytest.mark.parametrize("change, words", [
    (dict(levels=None), "levels must be those of two_looks, two numbers"),
    (dict(two_looks=dict(spending="none", look=1, seeds=[1, 2, 3], first_seeds=[1, 2], plain_seeds=[1, 2],
                         pairs=[])), "two_looks is no plan: 'none', look 1, with 2 of 3 seeds"),
    (dict(two_looks=dict(spending="pocock", look=1, seeds=[1, 2, 3], first_seeds=[1, 2], plain_seeds=[1, 2],
                         pairs=[["a", "b", []]])), "pairs: 'a' is not one of its arms"),
])
def test_a_damaged_plan_of_two_looks_is_named(open_study, tmp_path, change, words):
    plan = dict(spending="pocock", look=1, seeds=[1, 2, 3], first_seeds=[1, 2], plain_seeds=[1, 2], pairs=[])
    results.write(but(open_study, **{"two_looks": plan, **change}), tmp_path)
    with pytest.raises(UserError, match="is not what compare.py writes") as e:
        results.read(tmp_path / "results.json.gz")
    assert words in str(e.value)


def test_a_failed_run_of_the_second_look_takes_nothing_from_the_first():
    def scores(mean, n):
        return {str(seed): mean + 0.001 * (seed % 3) for seed in range(1, n + 1)}
    plan = records.TwoLooks(spending="pocock", seeds=[*range(1, 7)], first_seeds=[1, 2, 3],
                            plain_seeds=[1, 2, 3], pairs=[["a", "plain", []], ["b", "plain", []]], look=2)
    by_name = dict(plain=scores(2, 6), a=scores(1.9, 3), b=scores(2.0005, 6))
    failed = [records.Failure(arm=name, seed=seed, stage="judge", why="", log=name)
              for name, seed in (("a", 5), ("plain", 6))]

    def verdicts(failures):
        rows, _ = effects.planned_looks(by_name, plan.pairs, plan, 0.05, 0.0001, failures)
        return [row.verdict for row in rows]
    assert verdicts([]) == verdicts(failed) == ["better", "undecided"]
    assert verdicts([but(failed[0], seed=3)]) == ["undecided", "undecided"]


# ---- what to type ----

@pytest.mark.slow
def test_an_undecided_study_names_a_command_that_works(study, here, capsys):
    told = study("--looks=1", "--seeds=1,2,3", "--plain_seeds=4", "--mechanisms=sink,output_gate",
                 f"--variants={BIG}", "--match_parameters=False")
    printed, following = capsys.readouterr().out, told["follow_up"]
    assert [(row["variant"], row["baseline"]) for row in following["undecided"]] == [
        ("sink", "plain"), ("output_gate", "plain")]
    n, more = following["seeds"], [row["seeds"] for row in following["undecided"]]
    assert following["variants"] == ["sink", "output_gate"] and n == max(more) > 3
    command = following["command"]
    seeds = ",".join(str(seed) for seed in range(5, 5 + n))
    assert command.endswith("--rescore=0 --looks=1 --json=v.json --match_parameters=False "
                            f"--mechanisms=sink,output_gate '--variants={{}}' --seeds={seeds} "
                            f"--plain_seeds={round(4 * n / 3)}")
    assert f"\n    {command}\n" in printed
    page = Path("out/sink+output_gate+big-plain/report.html").read_text()
    assert shlex.split(command)[:2] == ["python", "compare.py"] and "second look at the same scores" in page
    here.started = []
    main([*shlex.split(command)[2:], "--seeds=5,6", "--plain_seeds=2"])  # of its seeds two, in a moment
    again = json.loads(Path("v.json").read_text())
    assert {*again["bpb"]} == {"plain", "sink", "output_gate"} and len(here.started) == 6
    judged, = (line for line in again["notices"] if "judged before" in line)
    assert judged.startswith("The same variants were judged before by other seeds, none of which judges here")
    assert judged.endswith("p holds for this study by itself.")


def pasted(found, **change):
    """The flags of the command that a study on file would name, with another config and command."""
    found = but(found, **change)
    command = findings.next_study(found)["command"]
    return dict(word[2:].split("=", 1) for word in shlex.split(command) if word.startswith("--"))


@pytest.fixture(scope="module")
def open_study():
    return results.read(ROOT / "results" / "rivals-tiny.json.gz")


def test_fresh_seeds_are_none_that_chose_or_judged(open_study):
    """The plain GPT's own seeds, those that are left out, and those of other reports are none either."""
    flags = pasted(open_study, left_out=[dict(variant="plain", seeds=[104])],
                   looks=[dict(seeds={"plain": [107]})],
                   config={**open_study["config"], "screen_seeds": [109, 110]})
    seeds = [int(seed) for seed in flags["seeds"].split(",")]
    assert seeds[:3] == [108, 111, 112] and len(seeds) == 51 == int(flags["plain_seeds"])
    assert flags["out_dir"] == "/tmp/rv-2" and flags["split"] == "val" and flags["budgets"] == "[]"
    assert pasted(open_study, command=open_study["command"] + "-2")["out_dir"] == "/tmp/rv-3"


def test_what_would_take_some_hundred_seeds_is_said_and_no_command_given(open_study):
    found = as_on_file(open_study)
    for c, n in zip(found["comparisons"], (None, 640, 9)):
        c["more_seeds"] = n
    found["comparisons"] = found["comparisons"][:3]
    first, second, third = (c["variant"] for c in found["comparisons"])
    following = findings.next_study(found)
    assert following["variants"] == [third] and following["seeds"] == 9
    assert following["words"].endswith("Undecided, and it would take more than 300 seeds: "
                                       f"{first} (more than 1000) and {second} (640).")
    found["comparisons"].pop()
    following = findings.next_study(found)
    assert (following["variants"], following["seeds"], following["command"]) == ([], None, None)
    assert following["words"].startswith("Undecided, and it would take more than 300 seeds: ")


@pytest.mark.parametrize("command", [
    "docs/compare.ipynb", "python compare.py '", "python train.py --seeds=1", "python compare.py --nokey=3",
    "python compare.py --mechanisms=fox \x1b[31m"])
def test_where_the_command_is_not_known_none_is_invented(open_study, command):
    following = findings.next_study(but(open_study, command=command))
    assert following["command"] is None and following["words"]
    page = html_of(but(open_study, command=command))
    assert "A new study with 51 fresh seeds" in page and "--plain_seeds=51" not in page


def test_nothing_is_asked_for_where_nothing_is_undecided_or_runs_are_to_come(open_study):
    assert findings.next_study(but(open_study, planned=open_study["planned"] + 1)) is None
    assert findings.next_study(results.read(ROOT / "results" / "demo.json.gz")) is None
    failed = but(open_study["comparisons"][0], more_seeds=None, p_corrected=0.01)  # withheld, not open
    assert findings.next_study(but(open_study, comparisons=[failed])) is None


def test_a_study_of_variants_of_its_own_keeps_those_that_are_open_and_their_contrasts():
    found = results.read(ROOT / "results" / "all-tiny.json.gz")
    both = effects.pooled(found)
    flags = pasted(both)
    assert flags["mechanisms"] == "output_gate,constraint_published,mudd,routing_published,constraint_a"
    assert flags["variants"].startswith("{'routing, no entropy': {")
    assert flags["contrasts"] == "[['routing_published', 'routing, no entropy']]"
    assert "out_dir" not in flags and "config/studies/all.py" in findings.next_study(both)["command"]
    for name in found["texts"]:  # a command is that of all texts
        following = findings.next_study(findings.part_of(found, name))
        assert following is None or following["command"] is None


def test_a_study_that_was_cut_to_minutes_is_followed_by_one_cut_alike(open_study):
    config = {**open_study["config"], "minutes": 8.0, "tune_lr": False, "screen": False, "budgets": [],
              "settings": {"max_iters": 144}}
    flags = pasted(open_study, config=config, command=open_study["command"] + " --minutes=8 --tune_lr")
    assert "minutes" not in flags and flags["settings"] == "{'max_iters': 144}"
    assert (flags["tune_lr"], flags["screen"], flags["budgets"]) == ("False", "False", "[]")


@pytest.mark.parametrize("word", ["--variants={'a': {'b': None}}", "it's", 'a"b', "$HOME 'x'", "a b", "x=[]"])
def test_a_quoted_word_is_one_word_to_a_shell(word):
    assert shlex.split(follow_up.quoted(word)) == [word]
