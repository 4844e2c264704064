"""Finished runs that are there already: those of other code are found, and --fresh compares with them."""

from runs import changed, run_of

from study import finished, trial
from study.records import Result, Run


def done(run, score):
    """A Run that has ended with this score."""
    trial.write_result(trial.make_folder(run), Result(score))
    return run


def test_a_run_of_other_code_is_found_by_flags_data_and_seed(bytes_data):
    run = run_of(bytes_data)
    own = {"mechanism a.py": "1", "teacher": "2"}
    run = changed(run, own=own, train={**run.spec["train"], "own_mechanism": "a.py"})
    assert finished.results_of_other_code([run]) == {}
    done(changed(run, code="x", torch="0.1"), 1.0)
    assert finished.results_of_other_code([run]) == {run.name: Result(1.0)}
    other_text = changed(run, own={**own, "mechanism a.py": "3"},
                         train={**run.spec["train"], "own_mechanism": "b/a.py"})
    path = trial.folder_of(done(other_text, 2.0)) / "result.json"
    assert finished.results_of_other_code([run]) == {run.name: Result(2.0)}  # the newest
    for others in (dict(own={**own, "teacher": "4"}), dict(data={"train": "x"}), dict(device="cuda"),
                   dict(model={**run.spec["model"], "seed": 2})):
        done(changed(run, code="x", **others), 3.0)
    done(run, 4.0)  # its own result is none of other code
    assert finished.results_of_other_code([run]) == {run.name: Result(2.0)}
    path.write_text("{}")
    assert finished.results_of_other_code([run]) == {run.name: Result(1.0)}


def test_runs_that_are_trained_anew_are_compared_with_before(bytes_data):
    runs = [done(run_of(bytes_data, seed), float(seed)) for seed in (1, 2)] + [run_of(bytes_data, 3)]
    finished.set_aside(runs)
    assert [trial.outcome(run) for run in runs] == [None] * 3
    done(runs[0], 1.0)
    finished.set_aside(runs)  # the study was stopped and started again: what is trained anew stays
    assert trial.outcome(runs[0]) == Result(1.0)
    done(runs[1], 2.25)
    done(runs[2], 3.0)
    said = finished.agreement_in_words(runs)
    assert "1 of 2 scores" in said and "by up to 0.2500" in said
    assert "Nothing was there before" in finished.agreement_in_words(runs)
    assert [trial.outcome(run).score for run in runs] == [1.0, 2.25, 3.0]


def test_runs_left_out_are_of_the_variant_whose_seeds_they_have(bytes_data):
    plain, again = run_of(bytes_data), run_of(bytes_data, 101)
    judged = [plain, Run("judge", "again", again.text, 1, again.spec)]
    for seed in (1, 2, 3, 101, 104):
        done(run_of(bytes_data, seed), 1.0)
    assert finished.seeds_left_out(judged) == {"plain": [2, 3], "again": [4]}
