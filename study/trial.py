"""
One run of a study, in its folder: it is trained, or goes on where it stopped, is tried for a look ahead, and
scored.

    python train.py --trial out/trials/0123456789abcdef [--mechanism=mine.py]    # queue.py starts these

The folder holds spec.json, the usual files of a run (config.json, log.jsonl, ckpt.pt, best.pt), what it
printed (trial.log, where queue.py started it) and in the end result.json, or failed.json with the reason.

spec.json is all that the run's numbers depend on, and the folder is called after its hash:

    {"model": {flags}, "train": {flags}, "score": {"split", "tokens": 0 for all, or of a task "rows"},
     "device", and "data", "own", "code", "torch" of digest.dependencies()}

A run whose code, data or PyTorch are not those of its spec is refused, so that a result.json is the result of
just that. A folder of an older version has another name and another file in it, so that no run is ever
looked for there.
"""

import math
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from nanoheads import threads  # noqa: F401  before torch, whose threads it has wait briefly

import torch

from model import GPT, GPTConfig
from nanoheads import causality, checkpoint, dataset, own_mechanism, tasks
from nanoheads.common import (LESS, UserError, explain, is_there, json_safe, number, pick_device, plural,
                              write_json)
from nanoheads.config import TrainConfig, data_of
from nanoheads.files import only_writer
from nanoheads.log import read_json, read_rows
from nanoheads.scoring import score_windows
from nanoheads.start import new_model_config
from study.digest import dependencies
from study.records import Failure, Result, hash_of

TRIALS = Path("out/trials")
WITH_PARENT = "--stop_with_parent"  # an option: standard input is a pipe that the study holds open
RUNS_PER_GPU = "NANOHEADS_RUNS_ON_GPU"  # environment variable: how many runs share the GPU
CONTEXT = 0.75 * 2**30  # bytes of a GPU that a process takes beside what it allocates, about


# ---- the folder ----

def folder_of(run):
    """The folder of a Run."""
    return TRIALS / run.name


def make_folder(run):
    """The folder of a Run, with its spec.json. UserError: the disk refuses."""
    folder = folder_of(run)
    folder.mkdir(parents=True, exist_ok=True)
    spec = folder / "spec.json"
    if read_json(spec) != run.spec:
        try:
            write_json(spec, run.spec)
        except UserError:  # another study may have written the same at the same instant
            if read_json(spec) != run.spec:
                raise
    return folder


def outcome(run):
    """The Result or the Failure of a Run; None: it has not ended."""
    return result_in(folder_of(run)) or failure_in(folder_of(run))


def result_in(folder):
    """The Result that a folder holds; None: there is none, or it is damaged, or it is that of another run."""
    saved = read_json(folder / "result.json") or {}
    if saved.get("check") == check_of(folder, saved.get("result")):
        return Result(**saved["result"])


def failure_in(folder):
    """The Failure that a folder holds, or None."""
    saved = read_json(folder / "failed.json") or {}
    return Failure(saved["why"]) if isinstance(saved.get("why"), str) else None


def write_result(folder, result):
    """Write result.json, whole or not at all. UserError: the disk refuses."""
    fields = json_safe(asdict(result))
    write_json(folder / "result.json", dict(result=fields, check=check_of(folder, fields)))
    (folder / "failed.json").unlink(missing_ok=True)


def check_of(folder, result):
    """The hash in result.json that shows that it was written for this folder, whatever suffix it has now."""
    return hash_of([folder.resolve().stem, result])


def write_failure(folder, why):
    """Write failed.json, and return the Failure. A disk that refuses loses no more than the line."""
    with suppress(UserError, OSError):
        write_json(folder / "failed.json", dict(why=why))
    return Failure(why)


# ---- the run ----

def run(folder, spec, train):
    """Train or go on, score, and return the Result. train: the function of train.py.

    UserError: the model looks ahead or mixes rows, the data changed meanwhile, or a number is not finite.
    """
    config, device = config_of(spec, folder), pick_device(spec["device"])
    model_config = GPTConfig(**spec["model"])
    data = data_of(config, model_config.block_size)
    if not is_there(folder / "ckpt.pt"):
        (folder / "best.pt").unlink(missing_ok=True)  # without a ckpt.pt nothing goes on from it
        if not causality.untried_classes(model_config):  # else train() asks by itself
            refuse_look_ahead(model_config, config, data, device)
    last_row = train(model_config, config)

    state = checkpoint.read(folder)
    check_unchanged(folder, spec)
    if not config.task and dataset.digests_of(state["meta"]) != data.digests:  # changed, and back again
        raise Changed("the data")
    model = checkpoint.build(state, folder, device)
    leak_check = causality.refuse(model, config, "after training", step=max(0, state["step"] - 1))
    result = (score_on_task if config.task else score_on_text)(model, data, spec["score"])
    return replace(result, curve=curve_of(folder, config), seconds=last_row["elapsed_s"], leaks=leak_check)


def config_of(spec, folder):
    """The TrainConfig of the run in a folder, which goes on where it stopped."""
    return TrainConfig(**spec["train"], device=spec["device"], out_dir=str(folder), resume=True)


def refuse_look_ahead(model_config, config, data, device):
    """UserError where the new model, with every weight moved off its start, looks ahead or mixes rows."""
    model_config = new_model_config(model_config, config)
    model_config = replace(model_config, vocab_size=model_config.vocab_size or data.vocab_size)
    model = GPT(model_config).to(device)
    causality.refuse(causality.with_noise(model), config, "before training", step=0)


def score_on_text(model, data, score_spec):
    """The Result of a model on a text, in bits per byte; what: the spec's score."""
    _, figures = score_windows(model, data, **score_spec)
    return Result(figures["bpb"], figures["nats"], figures["bytes"])


def score_on_task(model, data, score_spec):
    """The Result of a model on a task: the share of answers that are right, the mean over levels."""
    levels = tasks.score_levels(model, data, **score_spec)
    nats = sum(counts[0] for counts in levels.values())
    if not math.isfinite(nats):
        raise UserError(f"the trained model gives {nats} nats on {data.dir}: its training diverged")
    return Result(tasks.summary(levels)["right"], nats,
                  levels={str(level): [*counts] for level, counts in levels.items()})


def curve_of(folder, config):
    """{"steps", "scores"} on validation, from the log of a finished run."""
    key = "val_acc" if config.task else "val_bpb"
    rows = [row for row in read_rows(folder / "log.jsonl") if math.isfinite(number(row.get(key)))]
    return dict(steps=[row["step"] for row in rows], scores=[row[key] for row in rows])


# ---- checks that nothing changed since the plan ----

class Changed(UserError):
    """Something that a run depends on is not what it was when the run was planned."""

    def __init__(self, what):
        super().__init__(f"{what} changed after this run was planned; start the study again")


def add_mechanisms(spec, paths):
    """Add the mechanisms of one's own that a run needs, from the files that its command line names.

    A file that spec.json alone names is never run. UserError: none is named; Changed: it, or a module beside
    it that it imports, is another text, which then does not run.
    """
    planned = spec["train"].get("own_mechanism")
    if planned and not paths:
        raise UserError(f"this run is of a mechanism in {planned}, whose code runs only where it is named: "
                        f"name it, --mechanism={planned}")
    names = [key.removeprefix("mechanism ") for key in spec["own"] if key.startswith("mechanism ")]
    for path in paths if planned else ():
        for name, sha256 in own_mechanism.read_own_file(path, names).sha256.items():
            if sha256 != spec["own"].get(f"mechanism {name}"):
                raise Changed(f"{Path(path).parent / name}, the mechanism's file,")
        own_mechanism.add(path)


def check_unchanged(folder, spec):
    """Raise Changed where code, data, other files or PyTorch are not those of the run's plan."""
    current = dependencies(TrainConfig(**spec["train"]), GPTConfig(**spec["model"]))
    for key, words in dict(code="the code", data="the data", own="what it reads", torch="PyTorch").items():
        planned, present = spec.get(key), current[key]
        if planned != present and isinstance(planned, dict):
            changed = [name for name in sorted({*planned, *present})
                       if planned.get(name) != present.get(name)]
            raise Changed(f"{words} ({', '.join(changed)})")
        if planned != present:
            raise Changed(words)
    if hash_of(spec) != folder.resolve().name:
        raise Changed("the spec.json of this folder")


# ---- the process ----

def main(argv, train):
    """Run the trial in a folder, alone in it: of two processes that want the same run, the second waits.

    argv: the folder; then --mechanism=FILE,FILE and WITH_PARENT, or nothing. train: the function of train.py,
    which calls this.
    """
    folder, options = Path(*argv[:1]), argv[1:]
    files = [option.partition("=")[2] for option in options if option.startswith("--mechanism=")]
    others = [option for option in options if option != WITH_PARENT and not option.startswith("--mechanism=")]
    if others or not argv or not (folder / "spec.json").is_file():
        sys.exit("trial: give one folder that holds a spec.json; compare.py makes them")
    if WITH_PARENT in options:
        threading.Thread(target=stop_with_parent, daemon=True).start()
    with only_writer(folder, wait=True):
        if result_in(folder):
            return
        (folder / "failed.json").unlink(missing_ok=True)
        try:
            perform(folder, ",".join(files).split(",") if files else [], train)
        except KeyboardInterrupt:
            sys.exit("trial: interrupted before the first step, or while it was scored")
        except Exception as e:
            problem = explain(e, memory_advice())
            words = " ".join((problem or f"{type(e).__name__}: {e}").split())
            write_failure(folder, words[:300])
            if problem is None:  # a bug, whose traceback is wanted in trial.log
                raise
            sys.exit(f"trial: {words}")


def perform(folder, files, train):
    """The run in a folder to its end: result.json. UserError. files: of its own mechanisms."""
    spec = read_json(folder / "spec.json")
    if spec is None:
        raise Changed("the spec.json of this folder")
    add_mechanisms(spec, files)
    check_unchanged(folder, spec)
    limit_memory()
    try:
        result = run(folder, spec, train)
        check_unchanged(folder, spec)  # so it was the same from begin to end
    except Changed:
        for name in ("ckpt.pt", "best.pt"):  # nobody knows what these were trained with
            (folder / name).unlink(missing_ok=True)
        raise
    write_result(folder, result)
    (folder / "ckpt.pt").unlink(missing_ok=True)  # three times the weights, and nothing goes on from it


def stop_with_parent():
    """Wait until the other end of standard input is closed, which the study holds; then save and stop."""
    os.read(0, 1)  # nothing is ever written there
    signal.raise_signal(signal.SIGTERM)


# ---- a GPU that several runs share ----

def runs_per_gpu():
    """How many runs share the GPU of this process."""
    return int(os.environ.get(RUNS_PER_GPU) or 1)


def limit_memory():
    """Let this process allocate its part of a GPU that it shares. UserError: its part is nothing.

    Its part is an equal share of 95 % of the memory, less what each process holds in any case.
    """
    n = runs_per_gpu()
    if n == 1:
        return
    total = torch.cuda.get_device_properties(0).total_memory
    part = 0.95 * total / n - CONTEXT
    if part <= 0:
        raise UserError(f"{plural(n, 'run')} on a GPU of {total / 2**30:.1f} GiB have no memory: lower "
                        "jobs_per_gpu")
    torch.cuda.set_per_process_memory_fraction(part / total)


def memory_advice():
    """Which keys to lower for less memory, in words."""
    n = runs_per_gpu()
    return (f"lower jobs_per_gpu, or jobs, of which {n} share this GPU; or " if n > 1 else "") + LESS
