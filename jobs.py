"""
Where the runs of a comparison go: a folder each, named by a hash of what its numbers depend on, and a queue that fills them.

out/trials/<hash>/ holds one run (trial.py). The hash covers the resolved flags, the data's checksums, the torch version, the
kind of device, and the code that matters - without its comments and docstrings, so that rewording them repeats nothing.
"""

import ast
import functools
import hashlib
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

import trial
from common import ROOT, UserError, pick_device, write_atomic
from dataset import Dataset

TRIALS = Path("out/trials")
CODE = ("model.py", "optim.py", "dataset.py", "train.py", "evaluate.py", "trial.py")  # what the numbers of a run come from


# ---- folders ----

@functools.cache
def code_digest():
    """A hash of CODE that comments, line breaks and the words of a docstring do not change."""
    digest = hashlib.sha256()
    for name in CODE:
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
                body[0] = ast.Pass()
        digest.update(ast.unparse(tree).encode())
    return digest.hexdigest()


def folder_of(spec, trials=TRIALS):
    """The folder of a trial, a function of its spec (trial.py says what is in one) and of what it does not name itself."""
    return Path(trials) / hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def make(spec, trials=TRIALS):
    """folder_of(), made and with its trial.json."""
    folder = folder_of(spec, trials)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "trial.json").is_file():
        try:
            write_atomic(folder / "trial.json", lambda f: f.write(json.dumps(spec, indent=1).encode()))
        except UserError:  # another study that begins in this instant writes the same
            if not (folder / "trial.json").is_file():
                raise
    return folder


def done(folder):
    return (folder / "result.json").is_file()


def result(folder):
    """What a finished trial found, as a dict; None while it is not done."""
    return json.loads((folder / "result.json").read_text(encoding="utf-8")) if done(folder) else None


def failure(folder):
    """Why a trial failed when it last ran, in one line; None where it did not."""
    path = folder / "failed.txt"
    return path.read_text(encoding="utf-8") if path.is_file() and not done(folder) else None


def last_words(folder):
    """The last line that a failed trial left, for a report."""
    path = folder / "trial.log"
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it left no message")


# ---- places to run ----

def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class Processes:
    """The GPUs of this machine, a trial each, or its CPU cores shared among `jobs` trials. UserError without the device."""

    def __init__(self, jobs, device):
        device, gpus = pick_device(device), [None]
        if device == "cuda":
            visible = [gpu.strip() for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
            there = torch.cuda.device_count()
            gpus = visible[:there] or [str(i) for i in range(there)]
        self.slots = jobs or (cores() if device == "cpu" else len(gpus))
        self.threads = max(1, cores() // self.slots)
        self.places = [gpus[i % len(gpus)] for i in range(self.slots)]

    def start(self, folder):
        place, env = self.places.pop(0), {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
        if place is not None:
            env["CUDA_VISIBLE_DEVICES"] = place
        # a session of its own: Ctrl-C reaches this program alone, which then asks each trial to save
        job = subprocess.Popen(command_of(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env, start_new_session=True)
        job.place = place
        return job

    def ended(self, job, folder):
        """None while it runs, "" when it is done, else why it is not."""
        if job.poll() is None:
            return None
        self.places.append(job.place)
        if done(folder):
            return ""
        if job.returncode < 0:
            return f"killed by {signal.Signals(-job.returncode).name}" + (": out of memory?" if job.returncode == -signal.SIGKILL else "")
        return last_words(folder)

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
    """submitit: Slurm where there is one, processes of this machine otherwise. `options` are its update_parameters()."""

    def __init__(self, submit, jobs, options):
        try:
            import submitit  # only here: an optional dependency
        except ModuleNotFoundError:
            raise UserError("submit needs submitit, which is not installed: pip install submitit")
        self.command, slurm = submitit.helpers.CommandFunction, on_slurm(submit)
        options = {"timeout_min": 240, "gpus_per_node": 1 if slurm else min(1, torch.cuda.device_count()), "name": "nanoheads", **options}
        try:
            self.executor = submitit.AutoExecutor(folder=str(TRIALS / "submitit" / "%j"), cluster="slurm" if slurm else "local")
            self.executor.update_parameters(**({"cpus_per_task": 8} if slurm else {}), **options)
        except (RuntimeError, NameError, TypeError, ValueError, AssertionError) as e:
            raise UserError(f"submit={submit}: {' '.join(str(e).split())[:300]}")
        self.slots = jobs or (1000 if slurm else cores())  # a cluster queues by itself
        self.env = {} if slurm else {"OMP_NUM_THREADS": str(max(1, cores() // self.slots))}

    def start(self, folder):
        # a command rather than trial.run itself: a node would have to import the module before it has a path
        return self.executor.submit(self.command(command_of(folder), cwd=str(Path.cwd()), env=self.env, verbose=False))

    def ended(self, job, folder):
        if not job.done():
            return None
        if done(folder):
            return ""
        if job.exception() is None:  # it says that it went well: a network file system may show the result a little later
            job.ended = getattr(job, "ended", time.monotonic())
            return None if time.monotonic() - job.ended < 60 else "it ended without a result"
        return last_words(folder)

    def stop(self, jobs):
        """Take the jobs back; each goes on from its last save when it is submitted again."""
        for job in jobs:
            job.cancel()


# ---- the queue ----

def watch(folder):
    """(step, loss, tokens/s) that a running trial last logged; None before its first row."""
    path = folder / "log.jsonl"
    if not path.is_file():
        return None
    with open(path, "rb") as f:
        f.seek(max(0, path.stat().st_size - 2000))
        rows = f.read().decode(errors="replace").splitlines()
    for line in reversed(rows):
        try:
            row = json.loads(line)
            return row["step"], row["loss"], row["tokens_per_s"]
        except (ValueError, KeyError, TypeError):  # half a line, or an evaluation
            continue


def run_all(folders, place, what="runs", poll=0.5):
    """Run every trial that is not done, as many at once as the place has slots; {folder: why} of those that failed.

    A failed trial does not stop the others. Ctrl-C stops the running ones, then raises KeyboardInterrupt.
    """
    waiting, running, failed = [f for f in dict.fromkeys(folders) if not done(f)], {}, {}
    total = len(set(folders))
    with tqdm(total=total, initial=total - len(waiting), desc=what, unit="run", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:
        spoke = time.monotonic()
        try:
            while waiting or running:
                while waiting and len(running) < place.slots:
                    folder = waiting.pop(0)
                    (folder / "failed.txt").unlink(missing_ok=True)
                    try:
                        running[folder] = place.start(folder)
                    except Exception as e:  # a full queue, a wrong partition: what runs already should not be lost with it
                        failed[folder] = f"could not be started: {' '.join(str(e).split())[:300]}"
                time.sleep(poll)
                for folder, job in list(running.items()):
                    why = place.ended(job, folder)
                    if why is None:
                        continue
                    del running[folder]
                    if why:
                        failed[folder] = why
                        (folder / "failed.txt").write_text(why, encoding="utf-8")
                        tqdm.write(f"{folder} failed: {why}", file=sys.stderr)
                    bar.update(1)
                seen = [w for w in map(watch, running) if w]
                if seen:
                    loss, speed = sum(w[1] for w in seen) / len(seen), sum(w[2] for w in seen)
                    bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tok/s, {len(running)} at once", refresh=False)
                if bar.disable and time.monotonic() - spoke > 60:  # a file or a pipe gets a line now and then instead of the bar
                    spoke = time.monotonic()
                    print(f"{what}: {total - len(waiting) - len(running)} of {total}, {len(running)} running", flush=True)
        except BaseException:
            place.stop(list(running.values()))
            raise
    return failed


# ---- a job ----

def command_of(folder):
    return [sys.executable, str(ROOT / "jobs.py"), str(folder)]


def main(argv):
    """trial.main() with its output in trial.log, alone in its folder: where two studies want the same run, the second waits."""
    folder = Path(argv[0])
    log = os.open(folder / "trial.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    with open(folder / "lock", "w") as f:
        try:
            import fcntl  # not on every system
            fcntl.flock(f, fcntl.LOCK_EX)
        except (ImportError, OSError):  # OSError: a file system without locks
            pass
        if done(folder):
            return
        spec = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
        if spec.get("code", code_digest()) != code_digest():
            sys.exit("trial: the code changed after this run was planned; start the study again")
        now = {name: split["sha256"] for name, split in Dataset(spec["train"]["dataset"]).splits.items()}
        if spec.get("data", now) != now:
            sys.exit("trial: the data changed after this run was planned; start the study again")
        if not (folder / "ckpt.pt").is_file():  # a best.pt alone, left where the disk was full, is nothing to go on from
            (folder / "best.pt").unlink(missing_ok=True)
        trial.main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
