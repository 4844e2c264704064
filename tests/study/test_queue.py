"""The queue of a study: what is missing is trained, nothing is trained twice, nothing is left running."""

import errno
import io
import os
import signal
import subprocess
import time

import pytest
import torch
from helpers import ending, forks
from runs import Ended, changed, figures, is_held, last_step, run_here, run_of, wait_until

from nanoheads.common import UserError
from study import queue, trial
from study.records import Failure, Result


def long_run(data, seed, steps):
    """A Run that takes a moment, and saves now and then."""
    return run_of(data, seed, max_iters=steps, eval_interval=500, save_interval=50)


def study_beside(runs):
    """The number of a process in which a study trains these runs; it ends with 130 where it was stopped."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            queue.execute(runs, jobs=1, device="cpu")
            code = 0
        except KeyboardInterrupt:
            code = 130
        finally:
            os._exit(code)
    return child


# ---- what is missing is trained ----

@pytest.mark.slow
def test_a_failed_run_is_a_failure_and_the_study_goes_on(bytes_data, capsys, monkeypatch):
    """One fails by itself, and the process of another is killed. Another time both are tried once more.

    What is done is not trained again, unless its result was damaged meanwhile, which a line says.
    """
    good, bad = run_of(bytes_data), changed(run_of(bytes_data, 2), code="0" * 64)
    killed, damaged = run_of(bytes_data, 3), run_of(bytes_data, 4)

    def kill_one(command, **how):
        return Ended(-signal.SIGKILL) if str(trial.folder_of(killed)) in command else run_here(command, **how)
    monkeypatch.setattr(subprocess, "Popen", kill_one)
    outcomes = queue.execute([killed, bad, good, good, damaged], jobs=2, device="cpu")
    why = "the code changed after this run was planned; start the study again"
    assert outcomes[bad.name] == trial.outcome(bad) == Failure(why)
    assert outcomes[killed.name] == trial.outcome(killed) == Failure("killed by SIGKILL: out of memory?")
    assert isinstance(outcomes[good.name], Result) and outcomes[good.name] == trial.outcome(good)
    said = capsys.readouterr().err
    assert said.count(f"plain, seed 2, failed: {why} (out/trials/{bad.name}/trial.log)\n") == 1
    before = (trial.folder_of(good) / "log.jsonl").stat().st_mtime_ns
    monkeypatch.setattr(subprocess, "Popen", run_here)
    path = trial.folder_of(damaged) / "result.json"
    path.write_text(path.read_text()[:20])
    again = queue.execute([killed, bad, good, damaged], jobs=2, device="cpu")
    assert [again[run.name] for run in (bad, good)] == [outcomes[run.name] for run in (bad, good)]
    assert isinstance(again[killed.name], Result)
    assert (trial.folder_of(good) / "log.jsonl").stat().st_mtime_ns == before
    assert figures(again[damaged.name]) == figures(outcomes[damaged.name])
    assert capsys.readouterr().err.count(f"{path} is damaged, or the result of another run") == 1


def test_what_cannot_be_started_is_a_failure(bytes_data, monkeypatch):
    """The command names the files of one's own that may be run for it."""
    commands = []

    def refuse(command, **how):
        commands.append(command)
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    run = run_of(bytes_data)
    run = changed(run, train={**run.spec["train"], "own_mechanism": "a.py,b.py"})
    assert queue.execute([run], 1, "cpu") == {
        run.name: Failure("could not be started: Resource temporarily unavailable")}
    assert "--mechanism=a.py,b.py" in commands[0]


# ---- two studies in one folder, and what stops one ----

@pytest.mark.slow
@forks
def test_two_studies_at_once_train_each_run_once(bytes_data, here):
    """This one waits for the run that the other is in the midst of, and the other finds what is done here."""
    short, long = runs = [long_run(bytes_data, 1, 20), long_run(bytes_data, 2, 200)]
    other = study_beside([long, short])
    assert wait_until(lambda: last_step(trial.folder_of(long)) > 0)
    outcomes = queue.execute(runs, jobs=1, device="cpu")
    assert ending(other) == 0
    for run in runs:
        assert outcomes[run.name] == trial.outcome(run)
        log = (trial.folder_of(run) / "trial.log").read_text()
        assert log.count("the run starts anew") == 1 and "going on" not in log


@forks
@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGHUP", "SIGKILL"])
def test_nothing_is_left_running_and_what_is_done_is_kept(how, bytes_data):
    """SIGHUP is a closed terminal; SIGKILL leaves a study no time, and its runs stop all the same."""
    steps = 400
    running, waiting = runs = [long_run(bytes_data, seed, steps) for seed in (1, 2)]
    folder = trial.folder_of(running)
    study = study_beside(runs)
    assert wait_until(lambda: last_step(folder) > 20)
    child = int((folder / "lock").read_text().split()[0])
    os.kill(study, getattr(signal, how))
    assert ending(study) == (-signal.SIGKILL if how == "SIGKILL" else 130)
    if how == "SIGKILL":  # then it is nobody's child, and may stay as a zombie
        assert wait_until(lambda: not is_held(folder))
    else:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    assert "stopped by SIGTERM" in (folder / "trial.log").read_text()
    assert 0 < torch.load(folder / "ckpt.pt", weights_only=True)["step"] < steps
    assert not trial.folder_of(waiting).exists() and not any(trial.outcome(run) for run in runs)


# ---- cores and GPUs ----

def gpus(monkeypatch, count, visible=""):
    """This machine has 8 cores and so many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(queue, "pick_device", lambda name: name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(8)})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize("jobs, device, each, visible, expected", [
    (3, "cpu", 1, "", (3, [], 1, 2)), (4, "cuda", 1, "", (4, ["0", "1"], 2, 2)),
    (9, "cuda", 3, "", (6, ["0", "1"], 3, 1)), (0, "cuda:1", 1, " 4 , GPU-b", (1, ["GPU-b"], 1, 8))])
def test_cores_and_gpus_are_shared_out(jobs, device, each, visible, expected, monkeypatch):
    """The GPUs have the names that the environment gives them."""
    gpus(monkeypatch, 2, visible)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert queue.find_slots(jobs, device, each) == expected


def test_a_run_has_no_more_threads_than_were_asked_for_and_no_gpu_that_is_not_there(monkeypatch):
    gpus(monkeypatch, 0)
    for asked, threads in (("3,2", [3, 2]), ("64", [8, 2]), ("many", [8, 2])):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        assert [queue.find_slots(jobs, "cpu").threads for jobs in (1, 3)] == threads
    with pytest.raises(UserError, match="^jobs_per_gpu=2 means nothing on device=cpu, which has no CUDA GPU"):
        queue.find_slots(0, "cpu", 2)


def test_the_next_run_gets_the_gpu_with_the_fewest(bytes_data, monkeypatch):
    """Of six runs four are at once; the second ends first, and then all of them."""
    gpus(monkeypatch, 2, visible="4,6")
    started = []

    class Pretended:
        """A process that does nothing, and ends once it may."""
        returncode = 1

        def __init__(self, command, env, **how):
            self.number, self.env, self.stdin = len(started), env, io.BytesIO()
            started.append(self)

        def poll(self):
            may_end = len(started) > 4 or len(started) == 4 and self.number == 1
            return self.returncode if may_end else None
    monkeypatch.setattr(subprocess, "Popen", Pretended)
    queue.execute([run_of(bytes_data, seed) for seed in range(6)], jobs=4, device="cuda")
    assert [each.env["CUDA_VISIBLE_DEVICES"] for each in started[:5]] == ["4", "6", "4", "6", "6"]
    assert {each.env[trial.RUNS_PER_GPU] for each in started} == {"2"}


# ---- how far it is ----

def test_without_a_terminal_a_study_prints_a_line_a_minute(bytes_data, monkeypatch, capsys):
    """How many runs are done, and how long the others take at the pace since it began."""
    now = [time.monotonic() + 1000]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    runs = [run_of(bytes_data, seed, max_iters=100) for seed in (1, 2, 3)]
    folder = trial.make_folder(runs[0])
    progress = queue.Progress("runs", runs, total=5)  # two of five are done already
    shown = []
    for seconds, step in ((0, 10), (59, 20), (2, 60), (30, 60)):
        now[0] += seconds
        (folder / "log.jsonl").write_text(f'{{"step": {step}, "loss": 2.5, "tokens_per_s": 1000.0}}\n'
                                          f'{{"step": {step}, "val_loss": 1}}\n{{"step": ')
        progress.show(waiting=runs[1:], running=runs[:1])
        shown.append(capsys.readouterr().out)
    # 50 of 290 steps took 61 s, since the first ten were there when it began
    assert "2 of 5 runs done, 3 to do, 5 min left" in shown[2] and shown[1] == shown[3] == ""
