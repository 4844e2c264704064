"""
The queue of a study: it trains the runs that are missing, several at once, each in a process of its own, so
that a crash of one leaves the others alone.

Whatever stops the study, be it Ctrl-C, SIGTERM, a closed terminal or an error, the running ones save first.
The same command goes on from there.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import NamedTuple

import torch
from tqdm import tqdm

from nanoheads import files
from nanoheads.common import ROOT, UserError, pick_device, plural, printable
from nanoheads.config import TrainConfig
from study import trial
from study.records import Result

POLL_SECONDS = 0.05  # between two looks at the processes
LOG_SECONDS = 0.5    # between two looks at the logs and locks of their runs
SAVE_SECONDS = 60    # that a run has to save, once it is asked to stop


# ---- slots ----

class Slots(NamedTuple):
    """Room for runs on this machine: how many at once, on which GPUs, how many a GPU, threads of each."""
    count: int
    gpus: list
    per_gpu: int
    threads: int


def cores():
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def threads_per_run(count):
    """Threads for each of `count` runs at once: its share of the cores, OMP_NUM_THREADS at most."""
    max_threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    share = cores() // count
    return max(1, min(share, int(max_threads)) if max_threads.isdigit() else share)


def gpus_of(device):
    """The GPUs that a device stands for, as CUDA_VISIBLE_DEVICES names them, by numbers or UUIDs."""
    device = torch.device(device)
    if device.type != "cuda":
        return []
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")
    gpus = [name for name in visible if name][:count] or [str(i) for i in range(count)]
    return gpus if device.index is None else [gpus[device.index]]


def find_slots(jobs=0, device="auto", jobs_per_gpu=1):
    """The Slots of this machine; jobs: at most so many runs at once, 0: one a CPU core, or jobs_per_gpu a
    GPU. Without jobs_per_gpu more jobs than GPUs share them too. UserError: no such device.
    """
    device = pick_device(device)
    gpus = gpus_of(device)
    if jobs_per_gpu > 1 and not gpus:
        raise UserError(f"jobs_per_gpu={jobs_per_gpu} means nothing on device={device}, which has no CUDA "
                        "GPU; jobs says how many run at once")
    max_count = len(gpus) * jobs_per_gpu or (cores() if device == "cpu" else 1)
    count = min(jobs, max_count) if jobs and jobs_per_gpu > 1 else jobs or max_count
    return Slots(count, gpus, -(-count // len(gpus)) if gpus else 1, threads_per_run(count))


# ---- the queue ----

def execute(runs, jobs=0, device="auto", jobs_per_gpu=1, label="runs"):
    """Train these Runs where they have no Result yet, and return {name: Result or Failure} of all.

    A run that fails does not stop the others, and one that failed before is tried again. A run that another
    study trains at the moment is waited for while others are trained. KeyboardInterrupt, also for SIGTERM and
    a closed terminal: the running ones were asked to save, and have ended.
    """
    slots, run_of = find_slots(jobs, device, jobs_per_gpu), {run.name: run for run in runs}
    outcomes = {name: trial.outcome(run) for name, run in run_of.items()}
    outcomes = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Result)}
    waiting = [run for name, run in run_of.items() if name not in outcomes]
    running, last_fill = {}, 0.0  # {process: (its Run, its GPU)}
    progress = Progress(label, waiting, len(run_of))
    with progress.bar, signals_raise():
        try:
            while waiting or running:
                ended_processes = [process for process in running if process.poll() is not None]
                for process in ended_processes:
                    run, _ = running.pop(process)
                    outcomes[run.name] = outcome_of(run, process)
                if ended_processes or time.monotonic() - last_fill > LOG_SECONDS:
                    fill_slots(slots, waiting, running, outcomes)
                    progress.show(waiting, [run for run, _ in running.values()])
                    last_fill = time.monotonic()
                time.sleep(POLL_SECONDS if waiting or running else 0)
        finally:
            stop(running)
    return outcomes


def fill_slots(slots, waiting, running, outcomes):
    """Start waiting runs while there is room, except those that another study trains at the moment."""
    for run in [*waiting]:
        if len(running) == slots.count:
            break
        if is_trained_elsewhere(run):
            continue
        waiting.remove(run)
        if isinstance(result := trial.outcome(run), Result):  # another study has trained it meanwhile
            outcomes[run.name] = result
            continue
        busy_gpus = [gpu for _, gpu in running.values()]
        gpu = min(slots.gpus, key=busy_gpus.count, default=None)
        try:
            running[start(run, slots, gpu)] = run, gpu
        except OSError as e:  # no process to be had: what runs already must not be lost with it
            outcomes[run.name] = record_failure(run, f"could not be started: {e.strerror or e}")


def is_trained_elsewhere(run):
    """Whether another process holds the folder of a Run."""
    try:
        with open(trial.folder_of(run) / "lock", "rb") as file:
            return not files.lock(file, wait=False)
    except OSError:  # there is no lock: no process ever trained it
        return False


def start(run, slots, gpu):
    """Start a Run, on a GPU where there is one, and return its process. OSError: it cannot be started."""
    folder = trial.make_folder(run)
    (folder / "failed.json").unlink(missing_ok=True)
    if (folder / "result.json").is_file():  # else it would not be started
        tqdm.write(printable(f"{folder / 'result.json'} is damaged, or the result of another run: it is "
                             "trained anew"), file=sys.stderr)
    env = {**os.environ, "OMP_NUM_THREADS": str(slots.threads)}
    if gpu is not None:
        env.update({"CUDA_VISIBLE_DEVICES": gpu, trial.RUNS_PER_GPU: str(slots.per_gpu)})
    # a session of its own, so that Ctrl-C reaches this program alone, which then asks each run to save. And a
    # pipe that this program holds: when it is killed, the run finds the pipe closed, and saves too
    with open(folder / "trial.log", "ab") as log:
        return subprocess.Popen(command_of(run), env=env, start_new_session=True, stdin=subprocess.PIPE,
                                stdout=log, stderr=log)


def command_of(run):
    """The command that trains a Run. It names the files of one's own that may be run for it."""
    mechanism_file = run.spec["train"].get("own_mechanism")
    return [sys.executable, str(ROOT / "train.py"), "--trial", str(trial.folder_of(run)), trial.WITH_PARENT,
            *([f"--mechanism={mechanism_file}"] if mechanism_file else [])]


def stop(processes):
    """Ask processes to save, and wait for them. One that takes longer than SAVE_SECONDS is killed."""
    for process in processes:  # in one way alone: who is asked twice ends at once
        if sys.platform == "win32":  # where a signal would end it at once
            process.stdin.close()
        else:
            process.terminate()
    for process in processes:
        try:
            process.wait(SAVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        process.stdin.close()


@contextmanager
def signals_raise():
    """Inside, SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that what runs is stopped first.

    A SIGHUP that is ignored, as under nohup, stays so.
    """
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():  # where Python sets no handlers
        numbers = []
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, handler in handlers.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# ---- how a run ended ----

def outcome_of(run, process):
    """The Result or the Failure of a Run whose process has ended."""
    process.stdin.close()
    outcome = trial.outcome(run)
    if isinstance(outcome, Result):
        return outcome
    if process.returncode < 0:
        hint = ": out of memory?" if process.returncode == -signal.SIGKILL else ""
        return record_failure(run, f"killed by {signal.Signals(-process.returncode).name}{hint}")
    return record_failure(run, outcome.why if outcome else last_line(trial.folder_of(run) / "trial.log"))


def record_failure(run, why):
    """Print why a Run failed, keep it in the run's folder, and return the Failure."""
    folder = trial.folder_of(run)
    tqdm.write(printable(f"{run.variant}, seed {run.seed}, failed: {why} ({folder / 'trial.log'})"),
               file=sys.stderr)
    return trial.write_failure(folder, why)


def last_line(path):
    """The last line of a log, for a run that left no other reason."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it left no message")


# ---- progress ----

def steps_of(run):
    """The optimizer steps of a Run."""
    return run.spec["train"].get("max_iters") or TrainConfig.max_iters


def last_row(run):
    """(step, loss, tokens/s) that a running Run last logged; None before its first row."""
    path = trial.folder_of(run) / "log.jsonl"
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 2000))
        lines = file.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        try:
            row = json.loads(line)
            return row["step"], row["loss"], row["tokens_per_s"]
        except (ValueError, KeyError, TypeError):  # half a line, or an evaluation
            continue
    return None


def time_in_words(seconds):
    """A length of time for a person: 40 s, 12 min, 3.5 h."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}" if unit == "h" else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


class Progress:
    """The progress of a queue, on a bar: runs done, time left, mean loss, total tokens/s. Without a terminal
    it prints a line a minute. The time left follows from the share of all optimizer steps that is done.
    """
    last_print = None  # when the last line was printed, of any queue

    def __init__(self, label, todo, total):
        self.label, self.total, self.started = label, total, time.monotonic()
        Progress.last_print = Progress.last_print or self.started
        self.steps = {run.name: steps_of(run) for run in todo}
        self.first_steps = {}  # {run: its step when it was first seen}: it may go on from an earlier start
        self.bar = tqdm(total=total, initial=total - len(todo), desc=label, dynamic_ncols=True,
                        bar_format="{desc}: {percentage:3.0f}% |{bar}| {n:.1f} of {total} runs, "
                                   "{elapsed}{postfix}", disable=not sys.stderr.isatty())

    def show(self, waiting, running):
        """Show the progress. waiting, running: the Runs that have not ended."""
        rows = {run.name: row for run in running if (row := last_row(run))}
        for name, (step, *_) in rows.items():
            self.first_steps.setdefault(name, step)
        steps_left = sum(self.steps[run.name] for run in waiting)
        steps_left += sum(max(0, self.steps[run.name] - rows.get(run.name, (0,))[0]) for run in running)
        steps_done = sum(self.steps.values()) - steps_left - sum(self.first_steps.values())
        words = []
        if steps_done > 0:
            seconds = (time.monotonic() - self.started) * steps_left / steps_done
            words.append(f"{time_in_words(seconds)} left")
        if rows:
            words += [f"loss {sum(row[1] for row in rows.values()) / len(rows):.3f}",
                      f"{sum(row[2] for row in rows.values()):,.0f} tok/s"]
        words.append(f"{len(running)} at once")
        ended = self.total - len(waiting) - len(running)
        self.bar.n = max(self.bar.n, ended + sum(min(1.0, row[0] / self.steps[name])
                                                 for name, row in rows.items()))
        self.bar.set_postfix_str(", ".join(words), refresh=False)
        self.bar.refresh()
        if self.bar.disable and time.monotonic() - Progress.last_print > 60:
            Progress.last_print = time.monotonic()
            print(f"{self.label}: {ended} of {plural(self.total, 'run')} done, "
                  f"{len(waiting) + len(running)} to do, {', '.join(words)}", flush=True)
