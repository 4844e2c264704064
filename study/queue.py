"""
The queue of a study: every run that is not done, as many at once as this machine or a cluster has places for.

A run is a process of its own (study/trial.py), so that one that crashes or is killed takes nothing with it.
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

from common import ROOT, UserError, pick_device
from study.trial import TRIALS, WITH_PARENT, done, last_line


def command_of(folder):
    """What runs a trial, from any working directory."""
    return [sys.executable, str(ROOT / "study" / "trial.py"), str(folder)]


# ---- places to run ----

def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def threads_each(slots):
    """Threads for each of so many trials at once: the cores shared out, OMP_NUM_THREADS at most."""
    most = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    shared = cores() // slots
    return max(1, min(shared, int(most)) if most.isdigit() else shared)


class Processes:
    """This machine: a GPU for each trial, or its cores shared among `jobs` trials. UserError: no device."""

    def __init__(self, jobs, device):
        device, gpus = pick_device(device), [None]
        if device == "cuda":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")
            visible = [gpu for gpu in visible if gpu]
            count = torch.cuda.device_count()
            gpus = visible[:count] or [str(i) for i in range(count)]
        self.slots = jobs or (cores() if device == "cpu" else len(gpus))
        self.threads = threads_each(self.slots)
        self.free_gpus = [gpus[i % len(gpus)] for i in range(self.slots)]

    def start(self, folder):
        gpu = self.free_gpus.pop(0)
        env = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpu
        # a session of its own: Ctrl-C reaches this program alone, which then asks each trial to save;
        # a pipe that only this program holds: when it is killed, the trial finds the pipe closed
        job = subprocess.Popen([*command_of(folder), WITH_PARENT], env=env, start_new_session=True,
                               stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        job.gpu = gpu
        return job

    def ended(self, job, folder):
        """None while it runs, "" when it is done, else why it is not."""
        if job.poll() is None:
            return None
        job.stdin.close()
        self.free_gpus.append(job.gpu)
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
    """submitit: Slurm where there is one, else this machine. `options` are its update_parameters()."""

    def __init__(self, submit, jobs, options):
        try:
            import submitit  # only here: an optional dependency
        except ModuleNotFoundError:
            raise UserError("submit needs submitit, which is not installed: pip install submitit")
        slurm = on_slurm(submit)
        gpus = 1 if slurm else min(1, torch.cuda.device_count())
        options = {"timeout_min": 240, "gpus_per_node": gpus, "name": "nanoheads", **options}
        if slurm:
            options = {"cpus_per_task": 8, **options}
        try:
            folder = str(TRIALS / "submitit" / "%j")
            self.executor = submitit.AutoExecutor(folder=folder, cluster="slurm" if slurm else "local")
            self.executor.update_parameters(**options)
        except (RuntimeError, NameError, TypeError, ValueError, AssertionError) as e:
            raise UserError(f"submit={submit}: {' '.join(str(e).split())[:300]}")
        self.command = submitit.helpers.CommandFunction
        self.slots = jobs or (1000 if slurm else cores())  # a cluster queues by itself
        self.env = {} if slurm else {"OMP_NUM_THREADS": str(threads_each(self.slots))}

    def start(self, folder):
        # a command rather than trial.run itself: a node would have to import the module before it has a path
        command = self.command(command_of(folder), cwd=str(Path.cwd()), env=self.env, verbose=False)
        return self.executor.submit(command)

    def ended(self, job, folder):
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
    """Keep why a trial failed, in its folder too, where trial.failure() looks for it, and say it."""
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
