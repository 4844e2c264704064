"""The queue of a study: what is missing is trained, nothing is trained twice, nothing is left running."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
import torch
from runs import changed, is_held, last_step, python, run_of, wait_until

from nanoheads.common import UserError
from nanoheads.log import read_rows
from study import queue, trial
from study.records import Failure, Result


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty folder to work in, and one thread for each run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# a study in a process of its own: the runs of these seeds, two at once; argv: the text, steps, seeds
STUDY = """
import sys
from runs import run_of
from study import queue
data, steps, *seeds = sys.argv[1:]
runs = [run_of(data, int(seed), max_iters=int(steps), eval_interval=500, save_interval=50) for seed in seeds]
try:
    outcomes = queue.execute(runs, jobs=2, device="cpu")
except KeyboardInterrupt:
    sys.exit(130)
print(*(outcomes[run.name].score for run in runs))
"""


# ---- what is missing is trained ----

def test_a_result_that_is_damaged_is_trained_anew_which_a_line_says(bytes_data, capsys):
    run = run_of(bytes_data)
    before = queue.execute([run], jobs=1, device="cpu")[run.name]
    path = trial.folder_of(run) / "result.json"
    path.write_text(path.read_text()[:20])
    capsys.readouterr()
    assert queue.execute([run], jobs=1, device="cpu")[run.name].score == before.score
    assert capsys.readouterr().err.count(f"{path} is damaged, or the result of another run") == 1


@pytest.mark.slow
def test_a_failed_run_is_a_failure_and_the_study_goes_on(bytes_data, capsys):
    good, bad = [run_of(bytes_data, seed) for seed in (1, 2)], changed(run_of(bytes_data, 3), code="0" * 64)
    outcomes = queue.execute([good[0], bad, good[1], good[0]], jobs=2, device="cpu")
    assert all(isinstance(outcomes[run.name], Result) for run in good) and len(outcomes) == 3
    why = "the code changed after this run was planned; start the study again"
    assert outcomes[bad.name] == trial.outcome(bad) == Failure(why)
    said = capsys.readouterr().err
    assert said.count(f"plain, seed 3, failed: {why} (out/trials/{bad.name}/trial.log)\n") == 1
    assert "step       6 " in (trial.folder_of(good[0]) / "trial.log").read_text()
    # another time nothing is trained but what failed
    times = [(trial.folder_of(run) / "log.jsonl").stat().st_mtime_ns for run in good]
    assert queue.execute([*good, bad], jobs=2, device="cpu") == outcomes
    assert times == [(trial.folder_of(run) / "log.jsonl").stat().st_mtime_ns for run in good]


@pytest.mark.slow
def test_a_run_that_is_killed_is_a_failure_with_its_reason(bytes_data):
    endless, short = run_of(bytes_data, max_iters=10**6), run_of(bytes_data, 2)
    folder = trial.folder_of(endless)

    def kill():
        assert wait_until(lambda: last_step(folder) > 0)
        os.kill(int((folder / "lock").read_text().split()[0]), signal.SIGKILL)
    killer = threading.Thread(target=kill)
    killer.start()
    outcomes = queue.execute([endless, short], jobs=2, device="cpu")
    killer.join()
    assert outcomes[endless.name] == trial.outcome(endless) == Failure("killed by SIGKILL: out of memory?")
    assert isinstance(outcomes[short.name], Result)


def test_what_cannot_be_started_is_a_failure(bytes_data, monkeypatch):
    def refuse(*args, **how):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    run = run_of(bytes_data)
    assert queue.execute([run], 1, "cpu") == {
        run.name: Failure("could not be started: Resource temporarily unavailable")}


def test_a_full_disk_ends_the_study_in_a_line(bytes_data, monkeypatch):
    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"^could not write \S+spec.json \(No space left on device\)[^\n]*$"):
        queue.execute([run_of(bytes_data)], 1, "cpu")


# ---- two studies in one folder ----

@pytest.mark.slow
def test_two_studies_at_once_train_each_run_once(bytes_data):
    long = dict(max_iters=60, eval_interval=500, save_interval=50)
    studies = [python(STUDY, bytes_data, 60, *seeds, stdout=subprocess.PIPE, text=True)
               for seeds in ([1, 2, 3], [3, 2, 1])]
    (first, _), (second, _) = [study.communicate(timeout=300) for study in studies]
    assert [study.returncode for study in studies] == [0, 0]
    assert first.split() == second.split()[::-1] and len({*first.split()}) == 3
    for run in (run_of(bytes_data, seed, **long) for seed in (1, 2, 3)):
        printed = (trial.folder_of(run) / "trial.log").read_text()
        assert printed.count("the run starts anew") == 1 and "going on" not in printed


# ---- what stops it ----

STEPS = 2000


@pytest.fixture(scope="module")
def uninterrupted(bytes_data, tmp_path_factory):
    """The score of the run that is stopped below."""
    study = python(STUDY, bytes_data, STEPS, 1, cwd=tmp_path_factory.mktemp("whole"), stdout=subprocess.PIPE)
    return float(study.communicate(timeout=500)[0])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_nothing_is_left_running_and_what_is_done_is_kept(how, bytes_data, uninterrupted):
    """SIGHUP is a closed terminal; SIGKILL leaves a study no time, and its runs stop all the same."""
    long = dict(max_iters=STEPS, eval_interval=500, save_interval=50)
    runs = [run_of(bytes_data, seed, **long) for seed in (1, 2, 3)]
    folders = [trial.folder_of(run) for run in runs]
    study = python(STUDY, bytes_data, STEPS, 1, 2, 3)
    assert wait_until(lambda: all(last_step(folder) > 20 for folder in folders[:2]))
    children = [int((folder / "lock").read_text().split()[0]) for folder in folders[:2]]
    study.send_signal(getattr(signal, how))
    assert study.wait(120) == (-signal.SIGKILL if how == "SIGKILL" else 130)
    for folder, child in zip(folders, children):
        if how == "SIGKILL":  # then it is nobody's child, and may stay as a zombie
            assert wait_until(lambda folder=folder: not is_held(folder))
        else:
            with pytest.raises(ProcessLookupError):
                os.kill(child, 0)
        assert "stopped by SIGTERM" in (folder / "trial.log").read_text()
        assert 0 < torch.load(folder / "ckpt.pt", weights_only=True)["step"] < STEPS
    assert not folders[2].exists() and not any(trial.outcome(run) for run in runs)
    if how == "SIGTERM":
        outcomes = queue.execute(runs[:1], 1, "cpu")
        assert outcomes[runs[0].name].score == uninterrupted
        assert "going on at step" in (folders[0] / "trial.log").read_text()
        steps = [row["step"] for row in read_rows(folders[0] / "log.jsonl") if "loss" in row]
        assert steps == [*range(1, STEPS + 1)]


# ---- places ----

def gpus(monkeypatch, count):
    """This machine has so many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(queue, "pick_device", lambda name: "cuda" if name == "auto" and count else name)


@pytest.mark.parametrize("jobs, device, each, expected", [
    (0, "cpu", 1, (8, [], 1, 1)), (3, "cpu", 1, (3, [], 1, 2)), (1, "cpu", 1, (1, [], 1, 8)),
    (0, "mps", 1, (1, [], 1, 8)), (0, "cuda", 1, (2, ["0", "1"], 1, 4)),
    (0, "auto", 3, (6, ["0", "1"], 3, 1)), (4, "cuda", 1, (4, ["0", "1"], 2, 2)),
    (5, "cuda", 3, (5, ["0", "1"], 3, 1)),
    (9, "cuda", 3, (6, ["0", "1"], 3, 1)), (0, "cuda:1", 1, (1, ["1"], 1, 8))])
def test_cores_and_gpus_are_shared_out(jobs, device, each, expected, monkeypatch):
    gpus(monkeypatch, 2)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(8)})
    assert queue.find_slots(jobs, device, each) == expected


@pytest.mark.parametrize("visible, device, names", [
    ("4,6", "cuda", ["4", "6"]), ("4,6", "cuda:1", ["6"]), (" GPU-a , GPU-b", "cuda", ["GPU-a", "GPU-b"]),
    ("", "cuda", ["0", "1"])])
def test_gpus_have_the_names_that_the_environment_gives_them(visible, device, names, monkeypatch):
    gpus(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert queue.find_slots(0, device).gpus == names


def test_gpus_that_are_not_there_cannot_be_shared(monkeypatch):
    gpus(monkeypatch, 0)
    with pytest.raises(UserError, match="^jobs_per_gpu=2 means nothing on device=cpu, which has no CUDA GPU"):
        queue.find_slots(0, "cpu", 2)


@pytest.mark.parametrize("asked, threads", [("1", [1, 1]), ("3,2", [3, 2]), ("64", [8, 2]), ("", [8, 2]),
                                            ("many", [8, 2])])
def test_a_run_has_no_more_threads_than_were_asked_for(asked, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(8)})
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert [queue.find_slots(jobs, "cpu").threads for jobs in (1, 3)] == threads


class Pretended:
    """A process that does nothing."""
    every = []

    def __init__(self, command, env, **how):
        self.env = env
        Pretended.every.append(self)


def test_the_next_run_gets_the_gpu_with_the_fewest(bytes_data, monkeypatch):
    gpus(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(subprocess, "Popen", Pretended)
    here, waiting, running = queue.find_slots(4, "cuda"), [run_of(bytes_data, seed) for seed in range(6)], {}
    queue.fill_slots(here, waiting, running, {})
    assert [each.env["CUDA_VISIBLE_DEVICES"] for each in running] == ["4", "6", "4", "6"]
    assert {each.env[trial.RUNS_PER_GPU] for each in running} == {"2"} and len(waiting) == 2
    del running[Pretended.every[1]]
    queue.fill_slots(here, waiting, running, {})
    assert Pretended.every[-1].env["CUDA_VISIBLE_DEVICES"] == "6" and len(waiting) == 1


def test_a_run_names_the_files_that_may_be_run_for_it(bytes_data):
    run = run_of(bytes_data)
    mine = changed(run, train={**run.spec["train"], "own_mechanism": "a.py,b.py"})
    assert queue.command_of(run)[1:] == [str(queue.ROOT / "train.py"), "--trial", str(trial.folder_of(run)),
                                         "--stop_with_parent"]
    assert queue.command_of(mine)[-1] == "--mechanism=a.py,b.py"


# ---- how far it is ----

def logged(run, step):
    """The log of a Run whose last whole rows are of this step, and half of another."""
    folder = trial.folder_of(run)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text(f'{{"step": {step}, "loss": 2.5, "tokens_per_s": 1000.0}}\n'
                                      f'{{"step": {step}, "val_loss": 1}}\n{{"step": ')


def clock(monkeypatch):
    """The time in seconds, as a list of one number that may be changed."""
    now = [1000.0]
    monkeypatch.setattr(queue.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(queue.Progress, "last_print", None)
    return now


def test_without_a_terminal_a_study_prints_a_line_a_minute(bytes_data, monkeypatch, capsys):
    now = clock(monkeypatch)
    runs = [run_of(bytes_data, seed, max_iters=100) for seed in (1, 2, 3)]
    progress = queue.Progress("runs", runs, total=5)  # two of five are done already
    for seconds, step in ((0, 10), (59, 20), (61, 60)):
        now[0] = 1000.0 + seconds
        logged(runs[0], step)
        progress.show(waiting=runs[1:], running=runs[:1])
    # 50 of 290 steps took 61 s, since the first ten were there when it began
    assert capsys.readouterr().out == (
        "runs: 2 of 5 runs done, 3 to do, 5 min left, loss 2.500, 1,000 tok/s, 1 at once\n")
    now[0] += 30
    progress.show(waiting=runs[1:], running=runs[:1])
    assert capsys.readouterr().out == ""


def test_a_bar_has_runs_done_time_left_loss_and_speed(bytes_data, monkeypatch, capsys):
    now = clock(monkeypatch)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run = run_of(bytes_data, max_iters=100)
    progress = queue.Progress("runs", [run], total=1)
    for seconds, step in ((0, 0), (10, 50)):
        now[0] = 1000.0 + seconds
        logged(run, step)
        progress.show(waiting=[], running=[run])
    progress.bar.close()
    shown = capsys.readouterr().err
    assert re.search(r"runs:  50%.*0\.5 of 1 runs.*10 s left, loss 2\.500, 1,000 tok/s", shown)


@pytest.mark.parametrize("seconds, words", [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"),
                                            (7200, "2.0 h"), (36000, "10.0 h")])
def test_a_length_of_time_is_in_words(seconds, words):
    assert queue.time_in_words(seconds) == words
