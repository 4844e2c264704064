"""One run of a study: its score, what it refuses, and that no kill and no damage changes a digit."""

import errno
import json
import os
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from helpers import CODE, EDITS, ROOT, TINY_TASK, damaged, ending, forks, in_child, untimed, write_dataset
from hypothesis import example, given, settings
from runs import TINY_MODEL, changed, figures, last_step, run_of, run_of_study, wait_until

import train
from model import GPTConfig
from nanoheads import own_mechanism, scoring, task_scores
from nanoheads.common import UserError
from nanoheads.config import TrainConfig
from nanoheads.log import read_rows
from study import trial
from study.digest import dependencies
from study.records import Failure, Result, Run

LEAKS = ROOT / "tests" / "leaks.py"


def perform(run, *options):
    """Train a Run in this process; its outcome."""
    trial.main([str(trial.make_folder(run)), *options], train.train)
    return trial.outcome(run)


def refused(run, *options):
    """The line with which a Run is refused, which its Failure says too; it has no score then."""
    with pytest.raises(SystemExit) as e:
        perform(run, *options)
    line = e.value.code.removeprefix("trial: ")
    assert "\n" not in line and trial.outcome(run) == Failure(line)
    return line


# ---- to the end ----

def test_the_score_is_the_one_of_evaluate(tiny_study):
    run = run_of_study()
    folder, result = trial.folder_of(run), trial.outcome(run)
    scored = scoring.evaluate(str(folder), "test", 0, "cpu", progress=False)
    assert (result.score, result.bytes) == (pytest.approx(scored["bpb"], rel=1e-7), scored["bytes"])
    assert result.curve["steps"] == [0, 3, 6] and len(result.curve["scores"]) == 3
    assert result.seconds > 0 and result.leaks
    there = {path.name for path in folder.iterdir()}
    assert {"spec.json", "config.json", "log.jsonl", "best.pt", "result.json"} <= there
    assert not {"ckpt.pt", "failed.json"} & there
    before = (folder / "log.jsonl").stat().st_mtime_ns
    assert perform(run) == result and (folder / "log.jsonl").stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_run_on_a_task_has_the_share_of_right_answers():
    training = {key: value for key, value in TINY_TASK.items() if key in TrainConfig.__dataclass_fields__}
    training = {**training, "task_levels": [1, 2, 3], "task_test_levels": [1, 3]}
    del training["device"]
    model = {**TINY_MODEL, "block_size": 12, "vocab_size": None, "seed": 1}
    spec = dict(model=model, train=training, score=dict(split="test", rows=8), device="cpu",
                **dependencies(TrainConfig(**training), GPTConfig(**model)))
    run = Run("judge", "plain", "recall", 1, spec)
    result = perform(run)
    assert result.levels.keys() == {"1", "3"} and result.bytes is None
    loaded = scoring.load(str(trial.folder_of(run)), "test", 0, "cpu", task=True)
    scored = task_scores.score_run(task_scores.TaskRun("run", *loaded), [1, 3], None, "test", 8)
    assert result.score == scored["right"]
    assert scored["levels"] == {int(level): right / asked for level, (_, right, asked) in
                                result.levels.items()}


# ---- what stops it, and damage ----

@forks
@pytest.mark.slow
def test_killed_at_any_instant_it_ends_in_the_same_digits(bytes_data):
    """Between two saves, in a process of its own; and after its last step, before it is scored."""
    run = run_of(bytes_data, max_iters=120, eval_interval=40, save_interval=20)
    whole = perform(run)
    rows = untimed(read_rows(trial.folder_of(run) / "log.jsonl"))

    def check():
        assert figures(perform(run)) == figures(whole)
        assert untimed(read_rows(trial.folder_of(run) / "log.jsonl")) == rows
        shutil.rmtree(trial.TRIALS)
    shutil.rmtree(trial.TRIALS)
    folder = trial.make_folder(run)
    child = in_child(["--trial", str(folder)])
    assert wait_until(lambda: last_step(folder) >= 50)
    os.kill(child, signal.SIGKILL)
    assert ending(child) == -signal.SIGKILL
    assert trial.outcome(run) is None and (folder / "ckpt.pt").is_file()
    check()

    def and_stop(*configs):
        train.train(*configs)
        raise KeyboardInterrupt
    with pytest.raises(SystemExit):
        trial.main([str(trial.make_folder(run))], and_stop)
    assert trial.outcome(run) is None
    check()


def other_digit(text):
    place = text.index('"score": ') + 14
    return text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1:]


@settings(max_examples=15)
@given(edits=EDITS)
@example([("cut", 0.0, 2**16)])
@example([("cut", 0.5, 2**16)])
@example("another digit")
@example("nothing to check")
def test_a_damaged_result_is_not_believed(finished_study, edits):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(finished_study)
        run = run_of_study()
        content, before = (trial.folder_of(run) / "result.json").read_bytes(), trial.outcome(run)
    path = trial.make_folder(run) / "result.json"
    if edits == "another digit":
        path.write_text(other_digit(content.decode()))
    elif edits == "nothing to check":
        path.write_text('{"result": {}}')
    else:
        path.write_bytes(damaged(content, edits))
    found = trial.outcome(run)
    assert found is None or found == before and type(edits) is list


def test_a_result_that_was_copied_from_another_run_is_not_believed(tiny_study):
    run, other = run_of_study(seed=1), run_of_study(seed=2)
    shutil.rmtree(trial.folder_of(other))
    shutil.copytree(trial.folder_of(run), trial.folder_of(other))
    assert trial.outcome(other) is None


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_no_result(bytes_data, monkeypatch):
    run = run_of(bytes_data)
    folder = trial.make_folder(run)

    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(SystemExit, match=r"^trial: could not write \S+ \(No space left on device\).*$"):
            trial.main([str(folder)], train.train)
    assert trial.outcome(run) is None
    assert isinstance(perform(run), Result)


# ---- what it refuses ----

TEXT = b"".join(b"%d is %d.\n" % (i, i) for i in range(2000))
SPLITS = dict(train=TEXT, val=TEXT[:3000], test=TEXT[:3000])


def prepared(folder, **splits):
    """A text that is prepared anew, with other splits."""
    shutil.rmtree(folder, ignore_errors=True)
    return write_dataset(folder, {**SPLITS, **splits})


def test_data_that_changed_since_it_was_planned_is_refused(tmp_path):
    data = prepared(tmp_path / "text")
    run = run_of(data)
    prepared(data, train=TEXT[:9000])
    assert refused(run) == ("the data (meta, train) changed after this run was planned; start the study "
                            "again")
    (data / "train.bin").write_bytes(b"x" * 9000)
    assert "train.bin is not the file that meta.json describes" in refused(run)


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [False, True])
def test_data_that_changes_while_a_run_is_trained_gives_no_score(comes_back, tmp_path):
    """And its checkpoints go, so that it begins anew once the data is back."""
    data = prepared(tmp_path / "text")
    run = run_of(data)

    def and_meanwhile(*configs):
        if comes_back:
            prepared(data, train=TEXT[:-10])
        last = train.train(*configs)
        prepared(data, **({} if comes_back else dict(test=TEXT[:2000])))
        return last
    folder = trial.make_folder(run)
    what = "" if comes_back else r" \(meta, test\)"
    with pytest.raises(SystemExit, match=rf"^trial: the data{what} changed after this run was p"):
        trial.main([str(folder)], and_meanwhile)
    assert isinstance(trial.outcome(run), Failure)
    assert not (folder / "best.pt").exists() and not (folder / "ckpt.pt").exists()
    prepared(data)
    assert isinstance(perform(run), Result)


def test_other_code_or_libraries_than_planned_are_refused(bytes_data):
    for key, value, words in (("code", "0" * 64, "the code"), ("torch", "0.1", "PyTorch"),
                              ("own", {"labels a.train.u8": "0"}, "what it reads (labels a.train.u8)")):
        run = changed(run_of(bytes_data), **{key: value})
        assert refused(run) == f"{words} changed after this run was planned; start the study again"
        assert not (trial.folder_of(run) / "log.jsonl").exists()


def test_a_spec_that_was_edited_is_refused(bytes_data):
    run = run_of(bytes_data)
    path = trial.make_folder(run) / "spec.json"
    path.write_text(json.dumps({**run.spec, "score": dict(split="val", tokens=0)}))
    with pytest.raises(SystemExit, match="^trial: the spec.json of this folder changed after"):
        trial.main([str(path.parent)], train.train)
    assert isinstance(trial.outcome(run), Failure)
    with pytest.raises(SystemExit, match="^trial: give one folder that holds a spec.json"):
        trial.main(["nowhere"], train.train)


def leaking(data, kind, **training):
    """A Run of a mechanism of tests/leaks.py."""
    own_mechanism.add(LEAKS)
    return run_of(data, flags=dict(leak=kind, block_size=64), variant=f"leak_{kind}",
                  own_mechanism=str(LEAKS), **training)


def test_a_look_ahead_is_refused_before_training(bytes_data, own_mechanisms_go):
    run = leaking(bytes_data, "block")
    assert refused(run, f"--mechanism={LEAKS}").startswith("before training it looks ahead: position 0 ")
    assert not (trial.folder_of(run) / "log.jsonl").exists()


@pytest.mark.slow
def test_a_look_ahead_that_training_grows_has_no_score(bytes_data, own_mechanisms_go):
    run = leaking(bytes_data, "grown", mechanism_lr=1.0)
    assert refused(run, f"--mechanism={LEAKS}").startswith("after training it looks ahead: position ")
    assert (trial.folder_of(run) / "best.pt").is_file()


@pytest.mark.slow
def test_a_mechanisms_file_runs_only_where_the_command_line_names_it(bytes_data, tmp_path,
                                                                     own_mechanisms_go):
    """And as it was planned. Of a study's own copies: what they were made of may be edited meanwhile."""
    helper = tmp_path / "gates.py"
    helper.write_text("def rate(slope):\n    return slope.exp()\n")
    mine = tmp_path / "mine.py"
    mine.write_text(CODE.replace("import torch\n", "import torch\nfrom gates import rate\n", 1).replace(
        "rate = F.softplus(self.slope)", "rate_of = rate(self.slope)").replace("rate[h]", "rate_of[h]"))
    own_mechanism.add(mine, keep=tmp_path / "kept")
    (file,) = (each.path for each in own_mechanism.FILES.values())
    run = run_of(bytes_data, flags=dict(forget=True), variant="forget", own_mechanism=str(file))
    assert {"mechanism mine.py", "mechanism gates.py"} <= run.spec["own"].keys()
    own_mechanism.remove([*own_mechanism.FILES])
    helper.write_text("1 / 0\n")
    assert refused(run) == (f"this run is of a mechanism in {file}, whose code runs only where it is named: "
                            f"name it, --mechanism={file}")
    ran = tmp_path / "ran"
    for edited in (file, file.parent / "gates.py"):
        text = edited.read_text()
        edited.write_text(f"{text}\nopen({str(ran)!r}, 'w').close()\n")
        said = refused(run, f"--mechanism={file}")
        assert said.startswith(f"{edited}, the mechanism's file, changed after ")
        assert not ran.exists() and not own_mechanism.FILES
        edited.write_text(text)
    assert isinstance(perform(run, f"--mechanism={file}"), Result)


# ---- a GPU that several runs share ----

def test_a_run_takes_its_part_of_a_gpu_that_it_shares(monkeypatch):
    parts, size = [], 80 * 2**30
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", parts.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=size))
    trial.limit_memory()
    assert parts == [] and "jobs" not in trial.memory_advice()
    monkeypatch.setenv(trial.RUNS_PER_GPU, "4")
    trial.limit_memory()
    assert parts == [pytest.approx(0.95 / 4 - 0.75 / 80)] and "lower jobs_per_gpu" in trial.memory_advice()
    size = 2 * 2**30
    with pytest.raises(UserError, match="^4 runs on a GPU of 2.0 GiB have no memory: lower jobs_per_gpu$"):
        trial.limit_memory()


# ---- which checkpoint ----

def test_the_checkpoint_of_the_lowest_loss_is_scored(bytes_data):
    """At this rate the loss goes up and down, and with one seed in two the last is not the lowest."""
    for seed in range(1, 11):
        run = run_of(bytes_data, seed, max_iters=12, adamw_lr=0.5, muon_lr=0.5, warmup_iters=0,
                     schedule="constant")
        result = perform(run)
        if result.curve["scores"][-1] > min(result.curve["scores"][1:]):
            break
    assert result.curve["scores"][-1] > min(result.curve["scores"][1:])
    scored = scoring.evaluate(str(trial.folder_of(run)), "test", 0, "cpu", progress=False)
    assert result.score == pytest.approx(scored["bpb"], rel=1e-7)


def test_a_run_that_was_killed_after_its_first_evaluation_starts_anew(bytes_data):
    """There is a best.pt then, and no ckpt.pt from which it could go on."""
    run = run_of(bytes_data)
    whole = perform(run)
    (trial.folder_of(run) / "result.json").unlink()
    assert {path.name for path in trial.folder_of(run).glob("*.pt")} == {"best.pt"}
    assert figures(perform(run)) == figures(whole)
