"""
The queue of a study: every run that is not done, as many at once as this machine has places for.

A run is a process of its own (lab/study/trial.py), so that one that crashes or is killed takes nothing
with it.
"""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import torch
from tqdm import tqdm

from nanoheads.common import ROOT, UserError, from_json, pick_device, plural, printable, write_atomic
from nanoheads.log import read_json
from lab.study.trial import TRIALS_ON_GPU, WITH_PARENT, done, last_line


def command_of(folder):
    """What runs a trial, from any working directory. It names the files of mechanisms that may run."""
    files = (read_json(Path(folder) / "trial.json") or {}).get("train", {}).get("own_mechanism")
    return [sys.executable, str(ROOT / "train.py"), "--trial", str(folder),
            *([f"--mechanism={files}"] if files else [])]


# ---- places to run ----

def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def threads_each(slots):
    """Threads for each of so many trials at once: the cores shared out, OMP_NUM_THREADS at most."""
    most = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    shared = cores() // slots
    return max(1, min(shared, int(most)) if most.isdigit() else shared)


def gpus_of(device):
    """The GPUs that a device stands for, as CUDA_VISIBLE_DEVICES names them (numbers or UUIDs)."""
    device = torch.device(device)
    if device.type != "cuda":
        return []
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")
    gpus = [name for name in visible if name][:count] or [str(i) for i in range(count)]
    return gpus if device.index is None else [gpus[device.index]]


class Slots:
    """The room for trials on this machine: its GPUs, `jobs_per_gpu` trials on each, or its cores.

    count: trials at once, `jobs` at most; threads: of each. UserError: no such device, or one without GPUs
    to share. Without jobs_per_gpu, more jobs than GPUs share them too.
    """

    def __init__(self, jobs, device, jobs_per_gpu=1):
        device = pick_device(device)
        gpus = gpus_of(device)
        if jobs_per_gpu > 1 and not gpus:
            raise UserError(f"jobs_per_gpu={jobs_per_gpu} means nothing on device={device}, which has no "
                            "CUDA GPU; jobs says how many run at once")
        room = len(gpus) * jobs_per_gpu or (cores() if device == "cpu" else 1)
        self.count = min(jobs, room) if jobs and jobs_per_gpu > 1 else jobs or room
        self.threads = threads_each(self.count)
        self.running = dict.fromkeys(gpus, 0)  # how many trials each GPU has now
        self.per_gpu = -(-self.count // len(gpus)) if gpus else 1  # at most
        self.lock = Lock()

    @contextmanager
    def gpu(self):
        """The GPU with the fewest trials, which has one more meanwhile; None where there is none."""
        with self.lock:
            gpu = min(self.running, key=self.running.get, default=None)
            if gpu is not None:
                self.running[gpu] += 1
        try:
            yield gpu
        finally:
            with self.lock:
                if gpu is not None:
                    self.running[gpu] -= 1

    def env(self, gpu):
        """What a trial on this GPU finds in its environment beside what this program does."""
        env = {"OMP_NUM_THREADS": str(self.threads)}
        return env if gpu is None else {**env, "CUDA_VISIBLE_DEVICES": gpu, TRIALS_ON_GPU: str(self.per_gpu)}


class Processes:
    """This machine: a process for each trial, in its Slots. UserError: no such device."""

    def __init__(self, jobs, device, jobs_per_gpu=1):
        self.room = Slots(jobs, device, jobs_per_gpu)
        self.slots = self.room.count
        self.jobs, self.lock, self.stopped = [], Lock(), False

    def run(self, folder):
        """Run a trial, and wait for its end: "" when it is done, else why it is not, in a line."""
        with self.room.gpu() as gpu:
            with self.lock:
                if self.stopped:
                    return "stopped"
                job = self.start(folder, {**os.environ, **self.room.env(gpu)})
                self.jobs.append(job)
            job.wait()
            job.stdin.close()
        if done(folder):
            return ""
        if job.returncode < 0:
            hint = ": out of memory?" if job.returncode == -signal.SIGKILL else ""
            return f"killed by {signal.Signals(-job.returncode).name}{hint}"
        return last_line(folder)

    def start(self, folder, env):
        # a session of its own: Ctrl-C reaches this program alone, which then asks each trial to save;
        # a pipe that only this program holds: when it is killed, the trial finds the pipe closed
        return subprocess.Popen([*command_of(folder), WITH_PARENT], env=env, start_new_session=True,
                                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stop(self):
        """Ask the running trials to save, and wait for them. No other one starts."""
        with self.lock:
            self.stopped = True
        for job in self.jobs:
            if sys.platform == "win32":  # there a signal would end it at once; a closed pipe asks it to save
                job.stdin.close()
            else:
                job.send_signal(signal.SIGTERM)  # does nothing to one that has ended
        for job in self.jobs:
            try:
                job.wait(60)
            except subprocess.TimeoutExpired:
                job.kill()


# ---- the queue ----

def progress_of(folder):
    """(step, loss, tokens/s) that a running trial last logged; None before its first row."""
    path = folder / "log.jsonl"
    if not path.is_file():
        return None
    with open(path, "rb") as f:
        f.seek(max(0, path.stat().st_size - 2000))
        rows = f.read().decode(errors="replace").splitlines()
    for line in reversed(rows):
        try:
            row = from_json(line)
            return row["step"], row["loss"], row["tokens_per_s"]
        except (ValueError, KeyError, TypeError):  # half a line, or an evaluation
            continue


class Progress:
    """How far a queue of runs is, on a bar; without a terminal a line a minute.

    steps: {folder: optimizer steps} of all that has to run. Time left follows from the share that is done.
    """
    printed = None  # when the last line was printed, in whichever stage of a study

    def __init__(self, what, steps, total):
        self.what, self.steps, self.total = what, steps, total
        self.began = time.monotonic()
        Progress.printed = Progress.printed or self.began
        self.at = {}  # folder: steps that it had behind it when it was first seen
        bar = "{desc}: {percentage:3.0f}% |{bar}| {n:.1f} of {total} runs, {elapsed}{postfix}"
        self.bar = tqdm(total=total, initial=total - len(steps), desc=what, dynamic_ncols=True,
                        bar_format=bar, disable=not sys.stderr.isatty())

    def show(self, waiting, running):
        """waiting, running: the folders that are not done."""
        rows = {folder: row for folder in running if (row := progress_of(folder))}
        for folder, row in rows.items():
            self.at.setdefault(folder, row[0])  # a run may go on where it was stopped
        left = sum(self.steps[folder] for folder in waiting)
        left += sum(max(0, self.steps[folder] - rows.get(folder, (0,))[0]) for folder in running)
        made = sum(self.steps.values()) - left - sum(self.at.values())
        words = [f"{time_in_words((time.monotonic() - self.began) * left / made)} left"] if made > 0 else []
        if rows:
            losses, speeds = [row[1] for row in rows.values()], [row[2] for row in rows.values()]
            words += [f"loss {sum(losses) / len(losses):.3f}", f"{sum(speeds):,.0f} tok/s"]
        words.append(f"{len(running)} at once")
        ended = self.total - len(waiting) - len(running)
        part = sum(min(1.0, row[0] / self.steps[folder]) for folder, row in rows.items())
        self.bar.n = max(self.bar.n, ended + part)
        self.bar.set_postfix_str(", ".join(words), refresh=False)
        self.bar.refresh()
        if self.bar.disable and time.monotonic() - Progress.printed > 60:
            Progress.printed = time.monotonic()
            print(f"{self.what}: {ended} of {plural(self.total, 'run')} done, "
                  f"{len(waiting) + len(running)} to do, {', '.join(words)}", flush=True)


def time_in_words(seconds):
    """A length of time for a person: 40 s, 12 min, 3.5 h."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}" if unit == "h" else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def steps_of(folder):
    """The optimizer steps of a planned run; 1 where they are not known."""
    spec = read_json(folder / "trial.json") or {}
    return (spec.get("train") or {}).get("max_iters") or 1


def run_all(folders, place, what="runs"):
    """Run what is not done, as many at once as the place has slots; {folder: why} of the trials that failed.

    A failed trial does not stop the others. Ctrl-C stops the running ones, then raises KeyboardInterrupt.
    """
    todo = [folder for folder in dict.fromkeys(folders) if not done(folder)]
    progress = Progress(what, {folder: steps_of(folder) for folder in todo}, len(set(folders)))
    failed = {}
    with progress.bar, ThreadPoolExecutor(place.slots) as pool:
        try:
            jobs = {pool.submit(run_one, folder, place): folder for folder in todo}
            left = {*jobs}
            while left:
                ended, left = wait(left, 0.5, FIRST_COMPLETED)
                for job in ended:
                    if why := job.result():
                        failed[jobs[job]] = why
                        fail(jobs[job], why)
                running = [jobs[job] for job in left if job.running()]
                waiting = [jobs[job] for job in left if not job.running()]
                progress.show(waiting, running)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            place.stop()
            raise
    return failed


def run_one(folder, place):
    """Run one trial, and wait for its end: "" when it is done, else why it is not, in a line."""
    (folder / "failed.txt").unlink(missing_ok=True)
    try:
        return place.run(folder)
    except Exception as e:  # no process to be had: what runs already should not be lost with it
        return f"could not be started: {' '.join(str(e).split())[:300]}"


def fail(folder, why):
    """Keep why a trial failed in its folder, where trial.failure() reads it, and print it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "failed.txt", lambda f: f.write(why.encode()))
    tqdm.write(printable(f"{folder} failed: {why}"), file=sys.stderr)
