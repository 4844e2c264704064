"""What a study would find, said before it runs: from runs on file, and from nothing else."""

import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

import compare
from compare import plan_of
from nanoheads.common import UserError
from lab.study import costs, findings, power, report, results, stats
from lab.study.variants import SEEDS_OF_CHALLENGE, StudyConfig

from helpers import ROOT
from lab_helpers import study_of


@pytest.fixture
def nothing_there(tmp_path, monkeypatch):
    """An installed copy: no results/ beside the programs."""
    monkeypatch.setattr(power, "ROOT", tmp_path)


def planned(plain, **keys):
    study = study_of(plain, **{"mechanisms": ["xsa"], "seeds": [1, 2, 3, 4], "plain_seeds": None, **keys})
    study.run(None)
    return study


def on_disk(plain, here, folder, **keys):
    """The results of a small study in a folder's results/, of which no run is left in out/trials."""
    study = study_of(plain, seeds=[11, 12, 13], plain_seeds=3, mechanisms=["output_gate"], **keys)
    study.run(here)
    found = results.collect(study, "test")
    (folder / "results").mkdir()
    results.write(found, folder / "results")
    (folder / "results" / "results.json.gz").rename(folder / "results" / "small.json.gz")
    shutil.rmtree("out/trials")
    return found


# ---- from what is on file ----

def test_where_nothing_is_on_file_it_says_so(plain, nothing_there):
    line, = power.expected(planned(plain))
    assert line.startswith("What 4 seeds would find is not known yet: neither out/trials nor results/ has")
    assert power.expected(planned(plain, seeds=[1])) == [
        "One seed a variant finds nothing: a verdict needs two or more on each side."]
    assert power.expected(planned(plain, mechanisms=[], tune_lr=True)) == []


def test_finished_runs_of_the_plain_gpt_say_what_would_be_found(plain, here, nothing_there):
    study = study_of(plain, seeds=[11, 12, 13], plain_seeds=3)
    study.run(here)
    scores = [*study.runs.scores("judge")["plain"].values()]
    size = stats.findable([scores], 4, 4, 1)
    n = stats.seeds_to_find(0.01, [scores], 1, 1)
    assert power.expected(planned(plain)) == [
        f"4 seeds a variant and 4 of the plain GPT find a difference of {size:.4f} bits/byte four times in "
        f"five; for 0.01, the margin, it takes {n or 'more than 1,000'} seeds.",
        "The spread over seeds for that is at its upper 90 % bound, from 3 runs of this plain GPT in "
        "out/trials."]
    # two comparisons, the plain GPT's sqrt(2) times as many seeds
    size = stats.findable([scores], 4, 6, 2)
    said = " ".join(power.expected(planned(plain, mechanisms=["xsa", "sink"], match_parameters=False)))
    assert f"4 seeds a variant and 6 of the plain GPT find a difference of {size:.4f} bits/byte" in said
    assert "four times in five, corrected for 2 comparisons;" in said
    # what adds weights may meet a wider plain GPT, too
    assert "corrected" not in power.expected(planned(plain, match_parameters=True))[0]
    assert "corrected for 2" in power.expected(planned(plain, mechanisms=["output_gate"]))[0]
    # a plain GPT of another length or another rate is another one
    for settings in (dict(max_iters=5), dict(muon_lr=0.01)):
        assert "is not known yet" in power.expected(planned(plain, settings=settings))[0]


def test_results_on_file_say_it_where_out_trials_has_few_runs(plain, here, tmp_path, monkeypatch):
    monkeypatch.setattr(power, "ROOT", tmp_path)
    found = on_disk(plain, here, tmp_path)
    (tmp_path / "results" / "broken.json.gz").write_bytes(b"no gzip")
    groups = [found["arms"][name]["bpb"] for name in ("plain", "output_gate")]
    size = stats.findable(groups, 4, 4, 1)
    effect = abs(np.mean(groups[1]) - np.mean(groups[0]))
    first, second, third = power.expected(planned(plain, settings=dict(muon_lr=0.01)))  # at any rate
    assert f"find a difference of {size:.4f} bits/byte" in first
    assert second.endswith("from 6 runs in results/, of this plain GPT and variants of it.")
    assert third == ("Of 1 effects of mechanisms on file at this size, text and number of steps, half are "
                     f"below {effect:.4f}, and {int(effect < size)} are below {size:.4f}.")
    assert "is not known yet" in power.expected(planned(plain, settings=dict(max_iters=5)))[0]
    # a few runs of one's own stand behind many on file, and ENOUGH of them before
    study = study_of(plain, seeds=[21, 22], plain_seeds=2, mechanisms=["xsa"])
    study.run(here)
    assert "in results/" in power.expected(planned(plain))[1]
    monkeypatch.setattr(power, "ENOUGH", 2)
    assert "from 2 runs of this plain GPT in out/trials" in power.expected(planned(plain))[1]


def test_a_study_and_a_plan_say_it_before_anything_trains(plain, here, nothing_there, monkeypatch, capsys):
    monkeypatch.setattr(compare, "place_for", lambda config: here)
    argv = ["--base", str(plain), "--device=cpu", "--mechanism=xsa", "--seeds=1,2", "--plain_seeds=2"]
    compare.main([*argv, "--dry_run"])
    assert "What 2 seeds would find is not known yet" in capsys.readouterr().out and not here.started

    def run(folder, of=here.run):
        if not here.started:
            assert "What 2 seeds would find is not known yet" in capsys.readouterr().out
        return of(folder)

    monkeypatch.setattr(here, "run", run)
    compare.main(argv)
    assert here.started
    capsys.readouterr()
    compare.main(argv)  # all is done: nothing is to be expected any more
    assert "seeds would find" not in capsys.readouterr().out


# ---- the default challenge ----

def test_a_challenge_spends_its_time_on_seeds():
    challenge = StudyConfig(mechanism="xsa")
    assert challenge.seeds == [*range(1, 16)] and challenge.budgets == [] and challenge.plain_seeds is None
    assert StudyConfig(mechanism="xsa", seeds=[1, 2], budgets=[0.7]).seeds == [1, 2]
    assert StudyConfig(mechanism="xsa", budgets=[0.7]).budgets == [0.7]
    study = StudyConfig(mechanisms=["xsa"])
    assert study.seeds == [1, 2, 3, 4, 5] and study.budgets == [0.7, 1.4, 2.0]


def test_the_seeds_of_a_challenge_find_0_015_by_what_is_on_file(tmp_path, monkeypatch):
    """At the tiny scale, also where the variant's sd is 1.5 times the usual and a wider GPT is compared."""
    found = results.read(ROOT / "results" / "controls-tiny.json.gz")
    spec = found["runs"][found["arms"]["plain"]["runs"][0]]["spec"]
    studies = power.studies_like(spec)
    assert {study["name"] for study in studies} >= {"all", "recipes", "controls"}
    monkeypatch.chdir(tmp_path)  # where nothing is in out/trials
    groups, words = power.on_file(spec, studies)
    n = SEEDS_OF_CHALLENGE
    alone, wider, fewer = (stats.findable(groups, *sizes) for sizes in ((n, n, 1), (n, n, 2), (5, 5, 2)))
    uneven = wider * math.sqrt((1 + 1.5 ** 2) / 2)
    assert 0.010 < uneven <= 0.015
    assert alone < wider < fewer and re.match(r"\d+ runs in results/", words)


def test_what_was_traded_for_seeds_is_said(plain, here, capsys):
    words = '--budgets="[0.7, 1.4, 2.0]" adds them'
    study = study_of(plain)
    study.run(here)
    found = results.collect(study, "test")
    assert words in report.in_text(found).replace("\n", " ")
    assert words in compare.expectations(planned(plain))[-1]
    assert "--budgets=" in report.page(found)
    study = study_of(plain, budgets=[0.5])
    study.run(here)
    assert words not in " ".join(findings.remarks(results.collect(study, "test")))
    assert words not in " ".join(compare.expectations(study))


# ---- rates ----

TUNED = dict(tune_lr=True, screen_seeds=[9, 8], match_parameters=False, mechanisms=["output_gate"],
             plain_seeds=2)


def test_a_plan_counts_what_a_search_for_rates_takes_at_most(plain, monkeypatch):
    """Every group of both sides has its best rate at an end of what is tried, and these are opposite ends."""
    study = study_of(plain, **TUNED)
    study.run(None)
    first, more = study.runs_to_tune()
    # 4 groups of the plain GPT and 5 of the variant, by 0.5, 1 and 2; 2 runs a side judge
    assert len(first) == 9 + 11 and len(study.runs.folders.values()) - 4 >= 20
    monkeypatch.setattr(compare.costs, "seconds_per_run", lambda *args: 60.0)
    monkeypatch.setattr(compare.queue, "cores", lambda: 1)
    said = plan_of(study)
    assert f"24 runs, 24 of them to do, in out/trials; then at most {len(more)} more, until" in said
    assert f"about 24 minutes, at most {24 + len(more)} minutes, 1 at once" in said

    def result(folder):
        spec = study.runs.specs[folder]
        rates = ("muon_lr", "muon_momentum", "adamw_lr", "embed_lr", "mechanism_lr")
        large = sum(math.log(spec["train"][key]) for key in rates)
        return dict(bpb=10 + (large if spec["model"].get("output_gate") else -large) / 100)

    study = study_of(plain, **TUNED)
    monkeypatch.setattr(study.runs, "result", result)
    study.run(None)
    tuning = {folder for (stage, *_), folder in study.runs.folders.items() if stage == "tune"}
    assert len(tuning) == len(first) + len(more) and study.candidates
    assert study.may_follow() == [] and "; then at most" not in plan_of(study)
    # what it would take is said where it is not asked for, too
    untuned = planned(plain, **{**TUNED, "tune_lr": False})
    assert ("no learning rate is tuned: what output_gate adds learns at mechanism_lr=0.004, the default; "
            f"--tune_lr looks for the best ones first, in 20 to {20 + len(more)} runs more, 20 minutes to "
            f"{20 + len(more)} minutes") in plan_of(untuned)
    assert len(study.at_most()) == len({*study.runs.folders.values()})


def test_minutes_are_those_of_all_rounds_of_a_search_for_rates(plain, monkeypatch):
    study = study_of(plain, **TUNED)
    study.run(None)
    seconds = []
    monkeypatch.setattr(compare.costs, "probe", lambda *args: (0.0, 0.0))
    monkeypatch.setattr(compare.budget, "fitted", lambda config, clock, steps: seconds.append(clock(config)))
    compare.within_minutes(replace(study.config, minutes=5.0, jobs=1), "test")
    assert seconds == [len(study.at_most()) * costs.SECONDS_BESIDE_STEPS]
    assert len(study.at_most()) == sum(map(len, study.runs_to_tune())) + 4


def untuned(plain, here, command="python compare.py --mechanism=mine.py", **keys):
    study = study_of(plain, **keys)
    study.run(here)
    return results.collect(study, command)


def test_an_untuned_study_says_so_and_what_tuning_costs(plain, here):
    found = untuned(plain, here)
    # the plain GPT has four more factors in each of 4 groups, the variant two in each of 5; then come the
    # candidates: as it is and each group moved with the second seed, all groups moved with both
    first, more = 9 + 11, (4 * 4 + 5 + 2) + (2 * 5 + 6 + 2)
    assert vars(found["untuned"]) == dict(rates={"output_gate": {"mechanism_lr": 0.004}},
                                    runs=[first, first + more])
    found["arms"]["plain"]["seconds"], found["machine"]["jobs"] = 30.0, 2
    said, = [line for line in findings.notices(found) if line.startswith("No learning rate was tuned")]
    whole = first + more + 4
    assert said == (
        "No learning rate was tuned: what output_gate adds learns at mechanism_lr=0.004, the default. "
        "With --tune_lr behind this study's command both sides first get their best rates on validation, in "
        f"{first} to {first + more} "
        f"runs, and what these change is judged anew: at most {whole} runs, which would train for about "
        f"{math.ceil(whole * 30 / 2 / 60)} minutes here.")
    assert said in report.in_text(found).replace("\n", " ") and "With --tune_lr" in report.page(found)


def test_an_untuned_rate_is_named_as_what_it_is(plain, here):
    def said(found):
        return findings.untuned_sentence(found)

    mine = {"fast": dict(output_gate="headwise", mechanism_lr=0.05)}
    found = untuned(plain, here, variants=mine, mechanisms=["xsa", "output_gate"])
    assert ("what xsa and output_gate add learns at mechanism_lr=0.004, the default; "
            "what fast adds learns at mechanism_lr=0.05, as given. ") in said(found)
    found = untuned(plain, here, mechanisms=["window"])
    assert "no mechanism adds weights, and all learn at the plain GPT's rates. " in said(found)
    # a study in so many minutes may have no time for it
    found = untuned(plain, here, "python compare.py --mechanism=mine.py --minutes=8")
    found["config"]["minutes"] = 8.0
    assert "With --tune_lr behind this study's command and without --minutes both" in said(found)
    assert said(found).endswith("; with --dry_run too it says how long that takes.")
    found = untuned(plain, here, tune_lr=True, screen_seeds=[9, 8])
    assert found["untuned"] is None and said(found) is None


def test_a_results_file_with_other_rates_is_refused(plain, here, tmp_path):
    found = untuned(plain, here)
    found["untuned"]["rates"] = ["output_gate"]
    results.write(found, tmp_path)
    with pytest.raises(UserError, match="untuned.rates"):
        results.read(tmp_path / "results.json.gz")
