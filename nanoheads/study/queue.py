"""
The queue of a study: every run that is not done, as many at once as this machine or a cluster has places for.

A run is a process of its own (train.py --trial), so that one that crashes or is killed takes nothing with it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from nanoheads.common import ROOT, UserError, pick_device
from nanoheads.study.trial import TRIALS, TRIALS_ON_GPU, WITH_PARENT, done, last_line


def command_of(folder):
    """What runs a trial, from any working directory."""
    return [sys.executable, str(ROOT / "train.py"), f"--trial={folder}"]


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

    def next_gpu(self):
        """The GPU with the fewest trials; None where there is none."""
        return min(self.running, key=self.running.get, default=None)

    def env(self, gpu):
        """What a trial on this GPU finds in its environment beside what this program does."""
        env = {"OMP_NUM_THREADS": str(self.threads)}
        return env if gpu is None else {**env, "CUDA_VISIBLE_DEVICES": gpu, TRIALS_ON_GPU: str(self.per_gpu)}

    def take(self, job, gpu):
        """A job has begun on this GPU."""
        job.gpu = gpu
        if gpu is not None:
            self.running[gpu] += 1

    def free(self, job):
        """A job has ended."""
        if job.gpu is not None:
            self.running[job.gpu] -= 1


class Processes:
    """This machine: a process for each trial, in its Slots. UserError: no such device."""

    def __init__(self, jobs, device, jobs_per_gpu=1):
        self.room = Slots(jobs, device, jobs_per_gpu)
        self.slots = self.room.count

    def start(self, folder):
        gpu = self.room.next_gpu()
        # a session of its own: Ctrl-C reaches this program alone, which then asks each trial to save;
        # a pipe that only this program holds: when it is killed, the trial finds the pipe closed
        job = subprocess.Popen([*command_of(folder), WITH_PARENT], env={**os.environ, **self.room.env(gpu)},
                               start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
        self.room.take(job, gpu)
        return job

    def ended(self, job, folder):
        """None while it runs, "" when it is done, else why it is not."""
        if job.poll() is None:
            return None
        job.stdin.close()
        self.room.free(job)
        if done(folder):
            return ""
        if job.returncode < 0:
            hint = ": out of memory?" if job.returncode == -signal.SIGKILL else ""
            return f"killed by {signal.Signals(-job.returncode).name}{hint}"
        return last_line(folder)

    def stop(self, jobs):
        """Ask the running trials to save, and wait for them."""
        for job in jobs:
            job.send_signal(signal.SIGTERM)
        for job in jobs:
            try:
                job.wait(60)
            except subprocess.TimeoutExpired:
                job.kill()


def on_slurm(submit):
    return submit == "slurm" or submit == "auto" and shutil.which("srun") is not None


class Cluster:
    """submitit: Slurm where there is one, else this machine, in its Slots.

    `options` are submitit's update_parameters(). UserError: no submitit, no such device, a wrong option.
    """

    def __init__(self, submit, jobs, options, device="auto", jobs_per_gpu=1):
        try:
            import submitit  # only here: an optional dependency
        except ModuleNotFoundError:
            raise UserError("submit needs submitit, which is not installed: pip install submitit")
        slurm = on_slurm(submit)
        if slurm and (jobs_per_gpu > 1 or device.startswith("cuda:")):
            key = f"jobs_per_gpu={jobs_per_gpu}" if jobs_per_gpu > 1 else f"device={device}"
            raise UserError(f"{key} means nothing on Slurm, which gives each run a GPU of its own")
        self.room = None if slurm else Slots(jobs, device, jobs_per_gpu)
        options = {"timeout_min": 240, "name": "nanoheads", **options}
        if slurm:
            options = {"gpus_per_node": 1, "cpus_per_task": 8, **options}
        try:
            folder = str(TRIALS / "submitit" / "%j")
            self.executor = submitit.AutoExecutor(folder=folder, cluster="slurm" if slurm else "local")
            self.executor.update_parameters(**options)
        except (RuntimeError, NameError, TypeError, ValueError, AssertionError) as e:
            raise UserError(f"submit={submit}: {' '.join(str(e).split())[:300]}")
        self.command = submitit.helpers.CommandFunction
        self.slots = self.room.count if self.room else jobs or 1000  # a cluster queues by itself

    def start(self, folder):
        gpu = self.room and self.room.next_gpu()
        # `env` adds to the environment that submitit gives a job; its own env= would stand in its place
        words = [f"{key}={value}" for key, value in self.room.env(gpu).items()] if self.room else []
        # a command rather than a function: a node would have to import its module before it has a path
        command = self.command(["env", *words, *command_of(folder)], cwd=str(Path.cwd()), verbose=False)
        job = self.executor.submit(command)
        if self.room:
            self.room.take(job, gpu)
        return job

    def ended(self, job, folder):
        why = self.outcome(job, folder)
        if why is not None and self.room:
            self.room.free(job)
        return why

    def outcome(self, job, folder):
        """As ended(), of the job alone."""
        if not job.done():
            return None
        if done(folder):
            return ""
        # it ended well, but a network file system may show the result a little later
        if job.exception() is None:
            job.ended = getattr(job, "ended", time.monotonic())
            return None if time.monotonic() - job.ended < 60 else "it ended without a result"
        return last_line(folder)

    def stop(self, jobs):
        """Take the jobs back; each goes on from its last save when it is submitted again."""
        for job in jobs:
            job.cancel()


# ---- the queue ----

def progress_of(folder):
    """(loss, tokens/s) that a running trial last logged; None before its first row."""
    path = folder / "log.jsonl"
    if not path.is_file():
        return None
    with open(path, "rb") as f:
        f.seek(max(0, path.stat().st_size - 2000))
        rows = f.read().decode(errors="replace").splitlines()
    for line in reversed(rows):
        try:
            row = json.loads(line)
            return row["loss"], row["tokens_per_s"]
        except (ValueError, KeyError, TypeError):  # half a line, or an evaluation
            continue


def run_all(folders, place, what="runs", poll=0.5):
    """Run what is not done, as many at once as the place has slots; {folder: why} of the trials that failed.

    A failed trial does not stop the others. Ctrl-C stops the running ones, then raises KeyboardInterrupt.
    """
    waiting = [f for f in dict.fromkeys(folders) if not done(f)]
    running, failed = {}, {}
    total = len(set(folders))
    with tqdm(total=total, initial=total - len(waiting), desc=what, unit="run", dynamic_ncols=True,
              disable=not sys.stderr.isatty()) as bar:
        printed = time.monotonic()
        try:
            while waiting or running:
                while waiting and len(running) < place.slots:
                    start(waiting.pop(0), place, running, failed)
                time.sleep(poll)
                bar.update(collect(place, running, failed))
                progress = [p for p in map(progress_of, running) if p]
                if progress:
                    loss = sum(p[0] for p in progress) / len(progress)
                    speed = sum(p[1] for p in progress)
                    text = f"loss {loss:.3f}, {speed:,.0f} tok/s, {len(running)} at once"
                    bar.set_postfix_str(text, refresh=False)
                # a file or a pipe gets a line now and then instead of the bar
                if bar.disable and time.monotonic() - printed > 60:
                    printed = time.monotonic()
                    ended = total - len(waiting) - len(running)
                    print(f"{what}: {ended} of {total}, {len(running)} running", flush=True)
        except BaseException:
            place.stop(list(running.values()))
            raise
    return failed


def start(folder, place, running, failed):
    """Start one trial: into `running`, or into `failed` where the place refuses."""
    (folder / "failed.txt").unlink(missing_ok=True)
    try:
        running[folder] = place.start(folder)
    except Exception as e:  # a full queue, a wrong partition: what runs already should not be lost with it
        fail(folder, f"could not be started: {' '.join(str(e).split())[:300]}", failed)


def fail(folder, why, failed):
    """Keep why a trial failed, in its folder too, where trial.failure() reads it, and print it."""
    failed[folder] = why
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "failed.txt").write_text(why, encoding="utf-8")
    tqdm.write(f"{folder} failed: {why}", file=sys.stderr)


def collect(place, running, failed):
    """Take trials that have ended out of `running`, put those that failed into `failed`; how many ended."""
    before = len(running)
    for folder, job in list(running.items()):
        why = place.ended(job, folder)
        if why is not None:
            del running[folder]
        if why:
            fail(folder, why, failed)
    return before - len(running)
