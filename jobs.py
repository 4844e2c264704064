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
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import trial
from checkpoint import write_atomic

ROOT = Path(__file__).resolve().parent
TRIALS = Path("out/trials")
CODE = ("model.py", "optim.py", "dataset.py", "train.py", "evaluate.py", "trial.py")  # what the numbers of a run come from


# ---- folders ----

@functools.cache
def code_digest():
    """A hash of CODE that comments, docstrings and line breaks do not change."""
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
        write_atomic(folder / "trial.json", lambda f: f.write(json.dumps(spec, indent=1).encode()))
    return folder


def done(folder):
    return (folder / "result.json").is_file()


def result(folder):
    """What a finished trial found, as a dict; None while it is not done."""
    return json.loads((folder / "result.json").read_text(encoding="utf-8")) if done(folder) else None


def last_words(path):
    """The last line that a failed trial left, for a report."""
    lines = [line.strip() for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()] if Path(path).is_file() else []
    return lines[-1][:300] if lines else "it left no message"


# ---- places to run ----

class Processes:
    """The GPUs of this machine, a trial each, or its CPU cores shared among `jobs` trials."""

    def __init__(self, jobs, device):
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = gpus.split(",") if gpus else [str(i) for i in range(torch.cuda.device_count())]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.on_gpu = device.startswith("cuda") or device == "auto" and torch.cuda.is_available()
        self.slots = jobs or (len(gpus) if self.on_gpu else 1 if device not in ("auto", "cpu") else cores)
        self.threads = max(1, cores // self.slots)
        self.places = [gpus[i % len(gpus)] for i in range(self.slots)] if self.on_gpu else [None] * self.slots

    def start(self, folder):
        place, env = self.places.pop(0), {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
        if place is not None:
            env["CUDA_VISIBLE_DEVICES"] = place
        with open(folder / "trial.log", "ab") as log:
            # a session of its own: Ctrl-C reaches this program alone, which then asks each trial to save
            job = subprocess.Popen([sys.executable, str(ROOT / "jobs.py"), str(folder)], stdout=log, stderr=log, env=env, start_new_session=True)
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
        return last_words(folder / "trial.log")

    def stop(self, jobs):
        """Ask the running trials to save, and wait for them."""
        for job in jobs:
            job.send_signal(signal.SIGTERM)
        for job in jobs:
            try:
                job.wait(60)
            except subprocess.TimeoutExpired:
                job.kill()


class Cluster:
    """submitit: Slurm where there is one, processes of this machine otherwise. `options` are its update_parameters()."""

    def __init__(self, kind, jobs, options):
        import submitit  # only here: an optional dependency
        self.command = submitit.helpers.CommandFunction  # not trial.run itself: a node would have to find the module before it has a path
        self.executor = submitit.AutoExecutor(folder=str(TRIALS / "submitit" / "%j"), cluster=None if kind == "auto" else kind)
        self.executor.update_parameters(**{"timeout_min": 240, "cpus_per_task": 8, "gpus_per_node": 1, "name": "nanoheads", **options}
                                        if self.executor.cluster == "slurm" else {"timeout_min": 240, **options})
        self.slots = jobs or (1000 if self.executor.cluster == "slurm" else os.cpu_count())  # a cluster queues by itself

    def start(self, folder):
        return self.executor.submit(self.command([sys.executable, str(ROOT / "jobs.py"), str(folder)], cwd=str(Path.cwd()), verbose=False))

    def ended(self, job, folder):
        if not job.done():
            return None
        if done(folder):
            return ""
        words = [line.strip() for line in str(job.exception() or "").splitlines() if "trial:" in line or "Error" in line]
        return words[-1][:300] if words else last_words(job.paths.stderr)

    def stop(self, jobs):
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

    A failed trial does not stop the others. Ctrl-C asks the running ones to save, then raises KeyboardInterrupt.
    """
    waiting, running, failed = [f for f in dict.fromkeys(folders) if not done(f)], {}, {}
    total = len(set(folders))
    with tqdm(total=total, initial=total - len(waiting), desc=what, unit="run", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:
        spoke = time.monotonic()
        try:
            while waiting or running:
                while waiting and len(running) < place.slots:
                    folder = waiting.pop(0)
                    running[folder] = place.start(folder)
                time.sleep(poll)
                for folder, job in list(running.items()):
                    why = place.ended(job, folder)
                    if why is None:
                        continue
                    del running[folder]
                    if why:
                        failed[folder] = why
                        tqdm.write(f"{folder} failed: {why}", file=sys.stderr)
                    bar.update(1)
                seen = [w for w in map(watch, running) if w]
                if seen:
                    bar.set_postfix_str(f"loss {sum(w[1] for w in seen) / len(seen):.3f}, {sum(w[2] for w in seen):,.0f} tok/s, {len(running)} at once", refresh=False)
                if bar.disable and time.monotonic() - spoke > 60:  # a file or a pipe gets a line now and then instead of the bar
                    spoke = time.monotonic()
                    print(f"{what}: {total - len(waiting) - len(running)} of {total}, {len(running)} running", flush=True)
        except BaseException:
            place.stop(list(running.values()))
            raise
    return failed


# ---- a job ----

def main(argv):
    """trial.main(), alone in its folder: where two studies want the same run, or a dead study's run goes on, the second waits."""
    with open(Path(argv[0]) / "lock", "w") as f:
        try:
            import fcntl  # not on every system
            fcntl.flock(f, fcntl.LOCK_EX)
        except (ImportError, OSError):  # OSError: a file system without locks
            pass
        trial.main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
