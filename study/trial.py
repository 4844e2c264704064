"""
One run of a study: its folder, what its numbers depend on, and the run itself: train, score, result.json.

    python study/trial.py out/trials/0123456789abcdef    # study/queue.py starts these; again: it goes on

trial.json: {"model": {flags}, "train": {flags}, "score": {"split", "tokens"}}, where tokens 0 means the whole
split, and "code", "data", "torch": what else the numbers depend on. The folder's name is a hash of it. Beside
a run's usual files it gets trial.log, nats.npy (float64, nats of each scored window, in order) and, last,
result.json: what has that is done.
"""

# ruff: noqa: E402
import os
import sys

if __name__ == "__main__":  # the path begins with study/ then, whose queue.py would hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import hashlib
import json
import statistics
from pathlib import Path

import numpy as np
import torch

import checkpoint
import train
from common import UserError, explain, pick_device, write_atomic
from dataset import Dataset
from evaluate import bits, score, windows_of
from model import GPTConfig
from study.fingerprint import code_digest

TRIALS = Path("out/trials")


# ---- folders ----

def folder_of(spec, trials=TRIALS):
    """The folder of a trial, a function of everything in its trial.json."""
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
    """The result.json of a finished trial, as a dict; None while it is not done."""
    return json.loads((folder / "result.json").read_text(encoding="utf-8")) if done(folder) else None


def failure(folder):
    """Why a trial failed when it last ran, in one line; None where it did not."""
    path = folder / "failed.txt"
    return path.read_text(encoding="utf-8") if path.is_file() and not done(folder) else None


def last_line(folder):
    """The last line in a failed trial's log, for a report."""
    path = folder / "trial.log"
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it left no message")


# ---- the run ----

def run(folder):
    """Train (or go on), score, measure; returns what it wrote into result.json."""
    folder = Path(folder)
    if done(folder):
        return result(folder)
    spec = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
    libraries = peak_memory()
    config = train.TrainConfig(**spec["train"], out_dir=str(folder), resume=True)
    last = train.train(GPTConfig(**spec["model"]), config)
    memory = None if libraries is None else peak_memory() - libraries

    state = checkpoint.read(folder)  # best.pt: the lowest validation loss
    model = checkpoint.build(state, folder, pick_device(spec["train"].get("device", "auto")))
    per_window, scored = score_windows(model, Dataset(spec["train"]["dataset"]), **spec["score"])
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    speed = statistics.median(row["tokens_per_s"] for row in rows if "tokens_per_s" in row)
    found = dict(**scored, params=model.num_params(), flops_per_token=model.flops_per_token(),
                 best_step=state["step"], steps=last["step"], seconds=last["elapsed_s"], tokens_per_s=speed,
                 memory_mib=memory, threads=torch.get_num_threads())
    write_atomic(folder / "nats.npy", lambda f: np.save(f, per_window))
    write_atomic(folder / "result.json", lambda f: f.write(json.dumps(found, indent=1).encode()))
    # the optimizer's moments: three times the weights, and nothing goes on from them
    (folder / "ckpt.pt").unlink(missing_ok=True)
    return found


def score_windows(model, data, split, tokens):
    """(nats of each window [n_windows], {nats, tokens, bytes, bpb}). UserError where they are not finite."""
    nats = score(model, data, split, max_tokens=tokens, per_token=True).astype(np.float64)
    total = float(nats.sum())
    if not np.isfinite(nats).all():
        raise UserError(f"the trained model gives {total} nats on {split}: its training diverged")
    windows = windows_of(data, split, model.config.block_size, max_tokens=tokens)
    size = data.splits[split]["bytes"]
    # a slice, whose tokens may be longer or shorter than the others
    if nats.size < data.splits[split]["tokens"]:
        ids = data.tokens(split)
        size = sum(len(data.tokenizer.decode_bytes(ids[start:end].tolist())) for start, end, _ in windows)
    per_window = np.add.reduceat(nats, np.cumsum([0] + [scored for _, _, scored in windows[:-1]]))
    return per_window, dict(nats=total, tokens=int(nats.size), bytes=size, bpb=bits(total, size))


def peak_memory():
    """Peak memory of this process so far, MiB: allocated on the GPU, else resident; None where not known."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource  # not on every system
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


# ---- the process ----

def log_to(path):
    """From here on, everything that this process prints goes to the end of a file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)


def lock(file):
    """Wait until no other process holds this open file; it is let go when the file is closed."""
    try:
        import fcntl  # not on every system
        fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError):  # OSError: a file system without locks
        pass


def check_unchanged(folder):
    """UserError where the code or the data is not what this run was planned with."""
    spec = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
    code = code_digest(GPTConfig(**spec["model"]))
    if spec.get("code", code) != code:
        raise UserError("the code changed after this run was planned; start the study again")
    data = {name: split["sha256"] for name, split in Dataset(spec["train"]["dataset"]).splits.items()}
    if spec.get("data", data) != data:
        raise UserError("the data changed after this run was planned; start the study again")


def main(argv=None):
    """run(), its output in trial.log, alone in its folder: of two that want one run, the second waits."""
    folders = sys.argv[1:] if argv is None else argv
    if len(folders) != 1 or not Path(folders[0], "trial.json").is_file():
        sys.exit("trial: give one folder that holds a trial.json; compare.py makes them")
    folder = Path(folders[0])
    print(f"what it prints is in {folder / 'trial.log'}", flush=True)
    log_to(folder / "trial.log")
    try:
        with open(folder / "lock", "w") as file:
            lock(file)
            if done(folder):
                return
            check_unchanged(folder)
            # a best.pt alone, left where the disk was full, is nothing to go on from
            if not (folder / "ckpt.pt").is_file():
                (folder / "best.pt").unlink(missing_ok=True)
            run(folder)
    except (Exception, KeyboardInterrupt) as e:
        problem = explain(e)
        if problem is None:
            raise
        sys.exit(f"trial: {problem}")


if __name__ == "__main__":
    main()
