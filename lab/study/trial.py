"""
One run of a study: its folder, what its numbers depend on, and the run itself: train, score, result.json.

    python train.py --trial out/trials/0123456789abcdef    # queue.py starts these; again: it goes on

trial.json: {"model": {flags}, "train": {flags}, "score": {"split", "tokens"}}, where tokens 0 means the whole
split, and "code", "data", "torch", "libraries" and "environment": what else the numbers depend on. The
folder's name is a hash of it. Beside a run's usual files it gets trial.log, nats.npy (float64, nats of each
scored window, in order) and, last, result.json, with the sha256 of the best.pt that was scored: what has
that, in agreement with its nats.npy and its hash, is done. What is damaged, or was copied from another run's
folder, is set aside, as <name>.damaged, and made again.
"""

import functools
import hashlib
import json
import math
import os
import shutil
import signal
import statistics
import sys
import threading
from dataclasses import replace
from pathlib import Path

from nanoheads import threads  # noqa: F401  before torch, whose threads it has wait briefly

import numpy as np
import torch

from model import GPT, GPTConfig
from nanoheads import causality, checkpoint, own_mechanism as own, replaced, tasks
from nanoheads.common import (LESS, UserError, explain, in_place, no_link, output_written, pick_device, say,
                              write_atomic)
from nanoheads.config import TrainConfig, data_of
from nanoheads.dataset import digests_of
from nanoheads.files import only_writer, stamp
from nanoheads.log import read_json, read_rows, set_aside, stamps
from nanoheads.scoring import BLOCK, bits, score_windows
from nanoheads.threads import processor
from nanoheads.timing import peak_memory
from lab.heads import controller
from lab.labels.targets import Targets, sha256
from lab.study.digest import code_digest
from lab.study.own_files import libraries_of, variables_of

TRIALS = Path("out/trials")
TRIALS_ON_GPU = "NANOHEADS_TRIALS_ON_GPU"  # environment variable: how many trials share the GPU
CONTEXT = 0.75 * 2**30  # bytes of a GPU that a process takes beside what it allocates, about
ROWS_OF_TASK = 256  # of each level, by which a run on a task is scored
WITH_PARENT = "--stop_with_parent"  # an argument behind the folder: standard input is a pipe of the parent's


# ---- folders ----

def folder_of(spec, trials=TRIALS):
    """The folder of a trial, a function of everything in its trial.json."""
    return Path(trials) / hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def make(spec, trials=TRIALS):
    """folder_of(), made and with its trial.json."""
    folder = folder_of(spec, trials)
    planned = read_json(folder / "trial.json")
    if planned is not None and folder_of(planned) != folder_of(spec):  # its checkpoints are no start either
        foreign = no_link(folder.with_name(f"{folder.name}.damaged"))
        shutil.rmtree(foreign, ignore_errors=True)
        folder.rename(foreign)
        say(f"{folder} held another run; it is set aside as {foreign}", file=sys.stderr)
        planned = None
    folder.mkdir(parents=True, exist_ok=True)
    if planned is None:
        try:
            write_atomic(folder / "trial.json", lambda f: f.write(json.dumps(spec, indent=1).encode()))
        except UserError:  # another study that begins in this instant writes the same
            if not (folder / "trial.json").is_file():
                raise
    return folder


def done(folder):
    return result(folder) is not None


def result(folder):
    """The result.json of a finished trial; None while it is not done."""
    found = checked(folder, stamps(folder / name for name in ("result.json", "nats.npy", "trial.json")))
    return found and dict(found)


def rows(folder):
    """The rows of a trial's log.jsonl; once nothing writes there, a damaged one is set aside and repaired."""
    return read_rows(folder / "log.jsonl", repair=done(folder))


def failure(folder):
    """Why a trial failed when it last ran, in one line; None where it did not."""
    path = folder / "failed.txt"
    return path.read_text(encoding="utf-8") if path.is_file() and not done(folder) else None


def last_line(folder):
    """The last line in a failed trial's log, for a report."""
    path = folder / "trial.log"
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it left no message")


def check_figures(found, parts):
    """ValueError where a result's bits per byte do not follow from its nats, or those from their parts."""
    nats = found["nats"]
    if "levels" in found:  # of a task: its accuracy follows from the answers counted
        if not (math.isclose(found["acc"], tasks.summary(found["levels"])["right"], rel_tol=1e-9)
                and math.isclose(np.sum(parts), nats, rel_tol=1e-9)):
            raise ValueError("a figure was changed")
        return
    if not (math.isfinite(nats) and math.isclose(found["bpb"], bits(nats, found["bytes"]), rel_tol=1e-9)
            and math.isclose(np.sum(parts), nats, rel_tol=1e-9)):
        raise ValueError("a figure was changed")


@functools.cache
def checked(folder, at):
    """result.json with its block_nats; None where there is none, where nats.npy does not bear it out, or
    where it is that of another run.

    at: the stamps of its files. They are read again when one of these changes, and only then.
    """
    found, spec = (read_json(folder / name) for name in ("result.json", "trial.json"))
    if found is None:
        return None
    of_runs = {found.get("trial", folder.name), folder.name, *([folder_of(spec).name] if spec else [])}
    if len(of_runs) > 1:
        return set_aside(folder / "nats.npy", folder / "result.json", why="is that of another run")
    try:
        per_window = np.load(folder / "nats.npy")
        check_figures(found, per_window)
    except Exception as e:  # numpy has no one error for a file that is damaged
        if isinstance(e, OSError) and not isinstance(e, FileNotFoundError):
            raise
        return set_aside(folder / "nats.npy", folder / "result.json", why="does not bear out its result.json")
    if spec and not spec["train"].get("task"):
        found["block_nats"] = sums_of_blocks(per_window, spec["model"]["block_size"])
    return found


# ---- the run ----

def run(folder, train):
    """Train (or go on), score, measure; returns what it wrote into result.json.

    train: the function of train.py. UserError where the model looks ahead or mixes rows, before training or
    after it, or where a mechanism of one's own replaced something of these programs: it is not scored then.
    """
    folder = Path(folder)
    if found := result(folder):
        return found
    spec = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
    # a best.pt alone, left where the disk was full or the result damaged, is nothing to go on from
    if not (folder / "ckpt.pt").is_file():
        (folder / "best.pt").unlink(missing_ok=True)
    config = TrainConfig(**spec["train"], out_dir=str(folder), resume=True)
    device = pick_device(config.device)
    libraries = peak_memory(device)
    if not config.own_mechanism:  # with one, train() looks itself
        refuse_leak(GPTConfig(**spec["model"]), config, device)
    last = train(GPTConfig(**spec["model"]), config)
    memory = None if libraries is None else (peak_memory(device) - libraries) / 2**20

    state, model, per_window, scored = score_of(folder, spec, device)
    replaced.refuse()  # a mechanism's code ran until here
    speeds = [row["tokens_per_s"] for row in rows(folder) if "tokens_per_s" in row]
    if config.task:
        of_run = learning(folder)
    else:
        of_run = dict(block_nats=sums_of_blocks(per_window, model.config.block_size))
    found = dict(**scored, trial=folder.name, params=model.num_params(),
                 flops_per_token=model.flops_per_token(), best_step=state["step"], steps=last["step"],
                 seconds=last["elapsed_s"], tokens_per_s=statistics.median(speeds) if speeds else None,
                 memory_mib=memory, threads=torch.get_num_threads(), processor=processor(device),
                 torch=torch.__version__, **of_run)
    write_atomic(folder / "nats.npy", lambda f: np.save(f, per_window))
    write_atomic(folder / "result.json", lambda f: f.write(json.dumps(found, indent=1).encode()))
    # the optimizer's moments: three times the weights, and nothing goes on from them
    (folder / "ckpt.pt").unlink(missing_ok=True)
    return found


def score_of(folder, spec, device):
    """(state, model, nats of each window, figures) of what was trained in a folder: its best.pt.

    UserError where it looks ahead or mixes rows, or was trained on other data than was planned: then there is
    no score, and of the latter no checkpoint to go on from.
    """
    digest, state = sha256(checkpoint.file_of(folder)), checkpoint.read(folder)
    of_data = tasks.of_training if state["meta"].get("task") else digests_of
    if of_data(state["meta"]) != check_data(spec).digests:
        for name in ("ckpt.pt", "best.pt"):
            (folder / name).unlink(missing_ok=True)
        raise UserError("the data changed while this run was trained, which begins anew when the study is "
                        "started again")
    model = checkpoint.build(state, folder, device)
    config = TrainConfig(**spec["train"])
    tried = causality.refuse(model, config, "after training", step=max(0, state["step"] - 1))
    per_window, scored = score_as_planned(model, spec)
    return state, model, per_window, dict(**scored, checkpoint=digest, looked_for_leaks=tried)


def score_as_planned(model, spec):
    """score_windows() of a model on what a trial.json names.

    UserError where that was not there from before the scoring until after it.
    """
    data = check_data(spec)
    if spec["train"].get("task"):
        return score_on_task(model, data, **spec["score"])
    split = spec["score"]["split"]
    before = [stamp(path) for path in data.files(split)]
    found = score_windows(model, data, **spec["score"])
    # what was put in its place and taken away again has left another stamp
    if [stamp(path) for path in data.files(split)] != before:
        raise UserError(f"{data.name_of(split)} changed while this run was scored; start the study again")
    check_data(spec)
    return found


def score_on_task(model, data, split, rows):
    """(nats of each level [levels], {nats, tokens, acc, levels}) of so many rows of each level of a task.

    levels: {level: [nats, answers right, answers asked]}; tokens: answers asked. UserError: not finite.
    """
    levels = tasks.score_levels(model, data, split, rows)
    nats = np.array([each[0] for each in levels.values()])
    if not np.isfinite(nats).all():
        raise UserError(f"the trained model gives {nats.sum()} nats on {data.dir}: its training diverged")
    return nats, dict(nats=float(nats.sum()), tokens=sum(each[2] for each in levels.values()),
                      acc=tasks.summary(levels)["right"],
                      levels={str(level): list(each) for level, each in levels.items()})


def learning(folder):
    """{learned_from, curve} of a finished run on a task, from its log.

    learned_from: the step from which on LEARNED of the answers are right in each evaluation, None: there is
    none. curve: steps, and the share that is right, the mean over levels.
    """
    evals = [row for row in read_rows(folder / "log.jsonl") if "val_acc" in row]
    steps, shares = [row["step"] for row in evals], [row["val_acc"] for row in evals]
    return dict(learned_from=tasks.learned_from(steps, shares),
                curve=dict(step=steps, acc=[round(share, 4) for share in shares]))


def refuse_leak(model_config, config, device):
    """UserError where the new model of a run looks ahead or mixes rows, with each weight off its start."""
    model_config = controller.starting_config(model_config, config)
    vocab_size = model_config.vocab_size or data_of(config, model_config.block_size).vocab_size
    model = GPT(replace(model_config, vocab_size=vocab_size)).to(device)
    causality.refuse(causality.grown(model), config, "before training", step=0)


def sums_of_blocks(per_window, block_size):
    """Nats of each BLOCK tokens in a row, in whole windows, the last block what is left; to 6 decimals."""
    windows = max(1, BLOCK // block_size)
    return np.add.reduceat(per_window, np.arange(0, len(per_window), windows)).round(6).tolist()


# ---- the process ----

def log_to(path):
    """From here on, everything that this process prints goes to the end of a file. A link there is removed.
    """
    if path.is_symlink():  # a refusal would be printed where nobody reads it
        path.unlink()
    log = in_place(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)


def trials_on_gpu():
    return int(os.environ.get(TRIALS_ON_GPU) or 1)


def limit_memory():
    """Let this process allocate its part of a GPU that it shares. UserError: there is none.

    Its part is beside what every process holds of a GPU, and leaves 5 % to what else is there.
    """
    if (n := trials_on_gpu()) == 1:
        return
    total = torch.cuda.get_device_properties(0).total_memory
    part = 0.95 * total / n - CONTEXT
    if part <= 0:
        raise UserError(f"{n} trials on a GPU of {total / 2**30:.1f} GiB have no memory: lower jobs_per_gpu")
    torch.cuda.set_per_process_memory_fraction(part / total)


def stop_with_parent():
    """Wait until the other end of standard input is closed; then this process saves and stops."""
    os.read(0, 1)  # nothing is written there
    if sys.platform == "win32":  # where os.kill() asks nobody
        signal.raise_signal(signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def digests_of_all(dataset, labels=None, teacher=None, files=(), rules=None):
    """{what: sha256} of all that a run reads: splits, what is read of meta.json, labels, teacher, mechanisms
    of one's own, policy rules.

    files: the OwnFiles of those mechanisms, whose digests have commas between them.
    """
    found = dict(dataset.digests)
    for split, row in Targets(dataset, labels).splits.items() if labels else ():
        found.update({f"labels {name}.{split}": file["sha256"] for name, file in row["names"].items()})
    if files:
        found["mechanism"] = ",".join(file.sha256 for file in files)
    if teacher:
        found["teacher"] = sha256(checkpoint.file_of(teacher))
    if rules:
        found["policy_rules"] = sha256(Path(rules))
    return found


def surroundings_of(files=()):
    """{"libraries": {name: version}, "environment": {variable: value}} of a run, each None where not there.

    NumPy, and what the OwnFiles of its mechanisms import and name. UserError: one of them reads an
    environment variable that it does not name.
    """
    libraries, environment = {"numpy": np.__version__}, {}
    for file in files:
        libraries.update(libraries_of(file))
        environment.update({name: os.environ.get(name) for name in variables_of(file)})
    return dict(libraries=libraries, **(dict(environment=environment) if environment else {}))


def add_mechanisms(folder, files):
    """Add the mechanisms of one's own that a run needs, from the OwnFiles that the command line names.

    What trial.json names is never run. UserError: no file is named, or another one.
    """
    spec = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
    if not (planned := spec["train"].get("own_mechanism")):
        return
    if not files:
        raise UserError(f"this run is of a mechanism in {planned}, and what is only read is not run: "
                        f"name it, --mechanism={planned}")
    want = spec.get("data", {}).get("mechanism")
    if want and sorted(want.split(",")) != sorted(file.sha256 for file in files):
        named = ",".join(str(file.path) for file in files)
        raise UserError(f"--mechanism={named} is another text than the one that this run was planned with; "
                        "start the study again")
    for file in files:
        own.add(file)


def check_data(spec):
    """The Dataset of a run. UserError where it, or what else is read, is not what its trial.json was planned
    with; of a mechanism's text add_mechanisms() made sure.
    """
    training = spec["train"]
    dataset = data_of(TrainConfig(**training), GPTConfig(**spec["model"]).block_size)
    for split in dict.fromkeys(("train", "val", spec["score"]["split"])) if not training.get("task") else ():
        dataset.tokens(split)
    found = digests_of_all(dataset, training.get("labels"), training.get("teacher"),
                    rules=training.get("policy_rules"))
    if not found.items() <= spec.get("data", found).items():
        raise UserError("the data changed after this run was planned; start the study again")
    return dataset


def check_unchanged(folder, files=()):
    """UserError where code, data, libraries or environment are not what this run was planned with.

    files: the OwnFiles of its own mechanisms, as the command line names them.
    """
    spec = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
    if folder_of(spec).name != folder.name:
        raise UserError(f"{folder}/trial.json is that of another run; start the study again")
    code = code_digest(GPTConfig(**spec["model"]), TrainConfig(**spec["train"]))
    if spec.get("code", code) != code:
        raise UserError("the code changed after this run was planned; start the study again")
    training, dataset = spec["train"], check_data(spec)
    files = files if training.get("own_mechanism") else ()
    data = digests_of_all(dataset, training.get("labels"), training.get("teacher"), files,
                   training.get("policy_rules"))
    if spec.get("data", data) != data:
        raise UserError("the data changed after this run was planned; start the study again")
    now = surroundings_of(files)
    pairs = [("torch", torch.__version__, spec.get("torch", torch.__version__))]
    for kind, words in (("libraries", ""), ("environment", "the environment variable ")):
        here = now.get(kind, {})
        planned = spec.get(kind, here)
        pairs += [(words + name, value, planned.get(name)) for name, value in here.items()]
    for what, here, planned in pairs:
        if here != planned:
            raise UserError(f"{what} is {here!r} here, and was {planned!r} when this run was planned; start "
                            "the study again, where both are the same")


@output_written("trial")
def main(argv, train):
    """run(), its output in trial.log, alone in its folder: of two that want one run, the second waits.

    argv: the folder; behind it --mechanism=FILE,FILE, WITH_PARENT, or nothing. train: train.py's function,
    which calls this.
    """
    folder, options = Path(*argv[:1]), argv[1:]
    files = next((arg.partition("=")[2] for arg in options if arg.startswith("--mechanism=")), None)
    known = {WITH_PARENT, f"--mechanism={files}"}
    if set(options) - known or read_json(folder / "trial.json") is None:
        sys.exit("trial: give one folder that holds a trial.json; compare.py makes them")
    say(f"what it prints is in {folder / 'trial.log'}", flush=True)
    log_to(folder / "trial.log")
    if WITH_PARENT in argv:
        threading.Thread(target=stop_with_parent, daemon=True).start()
    try:
        with only_writer(folder, wait=True):
            if result(folder):
                return
            opened = [own.opened(path) for path in files.split(",")] if files else []
            add_mechanisms(folder, opened)
            check_unchanged(folder, opened)
            limit_memory()
            run(folder, train)
    except (Exception, KeyboardInterrupt) as e:
        n = trials_on_gpu()
        shared = f"lower jobs_per_gpu, or jobs, of which {n} share this GPU; or " if n > 1 else ""
        problem = explain(e, shared + LESS)
        if problem is None:
            raise
        sys.exit(f"trial: {problem}")

