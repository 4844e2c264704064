"""One run of a study: its score, what it refuses, and that no kill and no damage changes a digit."""

import errno
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers import CODE, ROOT, TINY_TASK, untimed, write_dataset
from runs import TINY_MODEL, by_hand, changed, figures, last_step, run_of, wait_until

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


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained(bytes_data, tmp_path_factory):
    """(a Run, its folder of out/trials), trained to its end."""
    home, before = tmp_path_factory.mktemp("trained"), os.getcwd()
    os.chdir(home)
    try:
        run = run_of(bytes_data)
        perform(run)
        return run, home / trial.folder_of(run)
    finally:
        os.chdir(before)


@pytest.fixture
def finished(trained):
    """A Run that is done here."""
    run, folder = trained
    shutil.copytree(folder, trial.folder_of(run))
    return run


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

def test_the_score_is_the_one_of_evaluate(finished):
    folder, result = trial.folder_of(finished), trial.outcome(finished)
    scored = scoring.evaluate(str(folder), "test", 0, "cpu", progress=False)
    assert (result.score, result.bytes) == (pytest.approx(scored["bpb"], rel=1e-7), scored["bytes"])
    assert result.score == scoring.bits(result.nats, result.bytes)
    assert result.curve["steps"] == [0, 3, 6] and len(result.curve["scores"]) == 3
    assert result.seconds > 0 and result.leaks.startswith("15 positions in 4 rows in training")
    there = {path.name for path in folder.iterdir()}
    assert {"spec.json", "config.json", "log.jsonl", "best.pt", "result.json"} <= there
    assert not {"ckpt.pt", "failed.json"} & there


def test_a_run_that_is_done_is_not_trained_again(finished):
    path = trial.folder_of(finished) / "log.jsonl"
    before = path.stat().st_mtime_ns
    assert isinstance(perform(finished), Result) and path.stat().st_mtime_ns == before


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
    shares = {int(level): right / asked for level, (_, right, asked) in result.levels.items()}
    assert shares == scored["levels"]


# ---- what stops it, and damage ----

@pytest.fixture(scope="module")
def long_run(bytes_data):
    """A Run that takes some seconds and saves often."""
    return run_of(bytes_data, max_iters=240, eval_interval=80, save_interval=20)


@pytest.fixture(scope="module")
def uninterrupted(long_run, tmp_path_factory):
    """(its Result, the rows of its log) where nothing stops it."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("uninterrupted"))
    try:
        trial.make_folder(long_run)
        assert by_hand(long_run).wait(300) == 0
        return trial.outcome(long_run), read_rows(trial.folder_of(long_run) / "log.jsonl")
    finally:
        os.chdir(before)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before its first save", "between two saves", "after its last step"])
def test_killed_at_any_instant_it_ends_in_the_same_digits(when, long_run, uninterrupted):
    folder = trial.make_folder(long_run)
    job = by_hand(long_run)
    step = {"before its first save": 5, "between two saves": 130, "after its last step": 240}[when]
    assert wait_until(lambda: last_step(folder) >= step)
    job.kill()
    job.wait()
    assert trial.outcome(long_run) is None
    assert by_hand(long_run).wait(300) == 0  # and closed input does not stop it
    result, rows = uninterrupted
    assert figures(trial.outcome(long_run)) == figures(result)
    assert untimed(read_rows(folder / "log.jsonl")) == untimed(rows)


def other_digit(text):
    place = text.index('"score": ') + 14
    return text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1:]


DAMAGE = dict(cut=lambda text: text[:len(text) // 2], empty=lambda text: "", zeros=lambda text: "\0" * 99,
              no_dict=lambda text: "[1]", no_check=lambda text: '{"result": {}}', other_digit=other_digit)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_result_is_not_believed_and_trained_anew(damage, finished):
    path, before = trial.folder_of(finished) / "result.json", trial.outcome(finished)
    path.write_text(damage(path.read_text()))
    assert trial.outcome(finished) is None
    assert figures(perform(finished)) == figures(before)


def test_a_result_that_was_copied_from_another_run_is_not_believed(finished, bytes_data):
    other = run_of(bytes_data, seed=2)
    shutil.copytree(trial.folder_of(finished), trial.folder_of(other))
    assert trial.outcome(other) is None


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

def test_data_that_changed_since_it_was_planned_is_refused(tmp_path):
    text = b"".join(b"%d is %d.\n" % (i, i) for i in range(2000))
    data = write_dataset(tmp_path / "text", dict(train=text, val=text[:3000], test=text[:3000]))
    run = run_of(data)
    shutil.rmtree(data)
    write_dataset(data, dict(train=text[:9000], val=text[:3000], test=text[:3000]))
    assert refused(run) == ("the data (meta, train) changed after this run was planned; start the study "
                            "again")
    (data / "train.bin").write_bytes(b"x" * 9000)
    assert "train.bin is not the file that meta.json describes" in refused(run)


@pytest.mark.parametrize("comes_back", [False, True])
def test_data_that_changes_while_a_run_is_trained_gives_no_score(comes_back, tmp_path):
    """And its checkpoints go, so that it begins anew once the data is back."""
    text = b"".join(b"%d is %d.\n" % (i, i) for i in range(2000))
    splits = dict(train=text, val=text[:3000], test=text[:3000])
    data = write_dataset(tmp_path / "text", splits)
    run = run_of(data)

    def prepare(**splits):
        shutil.rmtree(data)
        write_dataset(data, splits)

    def and_meanwhile(model_config, config):
        if comes_back:
            prepare(**{**splits, "train": text[:-10]})
        last = train.train(model_config, config)
        prepare(**(splits if comes_back else {**splits, "test": text[:2000]}))
        return last
    folder = trial.make_folder(run)
    what = "" if comes_back else r" \(meta, test\)"
    with pytest.raises(SystemExit, match=rf"^trial: the data{what} changed after this run was p"):
        trial.main([str(folder)], and_meanwhile)
    assert isinstance(trial.outcome(run), Failure)
    assert not (folder / "best.pt").exists() and not (folder / "ckpt.pt").exists()
    prepare(**splits)
    assert isinstance(perform(run), Result)


@pytest.mark.parametrize("key, value, words", [
    ("code", "0" * 64, "the code"), ("torch", "0.1", "PyTorch"),
    ("own", {"labels a.train.u8": "0"}, "what it reads (labels a.train.u8)")])
def test_other_code_or_libraries_than_planned_are_refused(key, value, words, bytes_data):
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


def leaking(data, kind, **training):
    """A Run of a mechanism of tests/leaks.py."""
    own_mechanism.add(LEAKS)
    return run_of(data, flags=dict(leak=kind, block_size=64), variant=f"leak_{kind}",
                  own_mechanism=str(LEAKS), **training)


def test_a_look_ahead_is_refused_before_training(bytes_data, own_mechanisms_go):
    run = leaking(bytes_data, "block")
    assert refused(run, f"--mechanism={LEAKS}").startswith("before training it looks ahead: position 0 ")
    assert not (trial.folder_of(run) / "log.jsonl").exists()


def test_a_look_ahead_that_training_grows_has_no_score(bytes_data, own_mechanisms_go):
    run = leaking(bytes_data, "grown", mechanism_lr=1.0)
    assert refused(run, f"--mechanism={LEAKS}").startswith("after training it looks ahead: position ")
    assert (trial.folder_of(run) / "best.pt").is_file()


def test_a_mechanisms_file_runs_only_where_the_command_line_names_it(bytes_data, mine, tmp_path):
    file = mine()
    own_mechanism.add(file)
    run = run_of(bytes_data, flags=dict(forget=True), variant="forget", own_mechanism=str(file))
    for cls in list(own_mechanism.FILES):
        own_mechanism.remove([cls])
    assert refused(run) == (f"this run is of a mechanism in {file}, whose code runs only where it is named: "
                            f"name it, --mechanism={file}")
    ran = tmp_path / "ran"
    file.write_text(f"{CODE}\nopen({str(ran)!r}, 'w').close()\n")
    assert refused(run, f"--mechanism={file}").startswith(f"{file}, the mechanism's file, changed after ")
    assert not ran.exists() and not own_mechanism.FILES
    file.write_text(CODE)
    assert isinstance(perform(run, f"--mechanism={file}"), Result)


def test_a_helper_that_changed_after_a_run_was_planned_is_refused(bytes_data, tmp_path, own_mechanisms_go):
    """The study's own copies are looked at: what they were made of may be edited meanwhile."""
    helper = tmp_path / "gates.py"
    helper.write_text("def rate(slope):\n    return slope.exp()\n")
    mine = tmp_path / "mine.py"
    mine.write_text(CODE.replace("import torch\n", "import torch\nfrom gates import rate\n", 1).replace(
        "rate = F.softplus(self.slope)", "rate_of = rate(self.slope)").replace("rate[h]", "rate_of[h]"))
    own_mechanism.add(mine, keep=tmp_path / "kept")
    file, = own_mechanism.FILES.values()
    run = run_of(bytes_data, flags=dict(forget=True), variant="forget", own_mechanism=str(file.path))
    assert {"mechanism mine.py", "mechanism gates.py"} <= run.spec["own"].keys()
    for cls in list(own_mechanism.FILES):
        own_mechanism.remove([cls])
    helper.write_text("1 / 0\n")
    kept = file.path.parent / "gates.py"
    text = kept.read_text()
    kept.write_text(f"{text}# edited\n")
    said = refused(run, f"--mechanism={file.path}")
    assert said.startswith(f"{kept}, the mechanism's file, changed after ")
    assert not own_mechanism.FILES
    kept.write_text(text)
    assert isinstance(perform(run, f"--mechanism={file.path}"), Result)


@pytest.mark.parametrize("argv", [[], ["nowhere"], ["--mechanism=a.py"]])
def test_what_is_no_run_is_one_line(argv):
    with pytest.raises(SystemExit, match="^trial: give one folder that holds a spec.json"):
        trial.main(argv, train.train)


# ---- a GPU that several runs share ----

def test_a_run_takes_its_part_of_a_gpu_that_it_shares(monkeypatch):
    parts, size = [], 80 * 2**30
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", parts.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=size))
    trial.limit_memory()
    assert parts == [] and trial.memory_advice().startswith("lower batch_size")
    monkeypatch.setenv(trial.RUNS_PER_GPU, "4")
    trial.limit_memory()
    assert parts == [pytest.approx(0.95 / 4 - 0.75 / 80)]
    assert trial.memory_advice().startswith("lower jobs_per_gpu, or jobs, of which 4 share this GPU; or low")
    size = 2 * 2**30
    with pytest.raises(UserError, match="^4 runs on a GPU of 2.0 GiB have no memory: lower jobs_per_gpu$"):
        trial.limit_memory()
