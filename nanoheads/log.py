"""
What a run writes beside its checkpoints: config.json, log.jsonl and, where they are on, TensorBoard and
Weights & Biases. read_rows(), write_rows() and append_row() are for every file of JSON lines in its folder.
"""

import json
import platform
import shlex
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanoheads.common import (ROOT, UserError, git_commit, is_there, json_safe, number, plural, say,
                              write_atomic, write_json)

# the learning rate of all weights that have no other: a key of TrainConfig and a column of log.jsonl
MAIN_RATE = "adamw_lr"


def write_config(path, model_config, config, step, machine, settings):
    """Write config.json: both configs, what it takes to run this again, what it ran on, and every launch.

    settings: see start.settings_of().
    """
    import torch  # late here and below: the reader of a log does without
    launch = dict(command=shlex.join(["python", *sys.argv]), commit=git_commit(), machine=machine,
                  versions=dict(python=platform.python_version(), torch=torch.__version__,
                                numpy=np.__version__))
    earlier_launches = (read_json(path) or {}).get("launches", []) if step else []
    details = dict(model=model_config.flags(), train=asdict(config), asked=settings, **launch,
                   launches=[*earlier_launches, dict(step=step, **launch)])
    write_json(path, details)
    return details


def read_json(path):
    """The dict in a JSON file; None where there is no file, or none that can be read."""
    with suppress(FileNotFoundError, ValueError):
        content = json.loads(path.read_bytes())
        return content if isinstance(content, dict) else None


def warn(run_dir, message):
    """A line about a run's folder on standard error."""
    say(f"{run_dir}: {message}", file=sys.stderr)


def last_save(out_dir):
    """Half a sentence about what can be done after a failure."""
    path = Path(out_dir) / "ckpt.pt"
    if path.is_file():
        return f"the last save is {path}, --resume goes on from it"
    return "nothing was saved yet: start again"


# ---- JSON lines ----

def read_rows(path):
    """The rows of a .jsonl log in the file's order, each with its step; [] where there is no file.

    Lines that hold no row are left out, which a line on standard error says: a process that is killed leaves
    half a row.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if is_there(path) else ""
    rows, broken_lines = [], []
    for n, line in enumerate(text.split("\n"), 1):
        if row := parse_row(line):
            rows.append(row)
        elif line:
            broken_lines.append(n)
    if broken_lines:
        warn(path.parent, f"{plural(len(broken_lines), 'broken line')} in {path.name}, the first is line "
                          f"{broken_lines[0]}; the rest is used")
    return rows


def parse_row(line):
    """The dict in a line of a log, which has a step; None where there is none."""
    with suppress(ValueError, RecursionError, AttributeError):  # not JSON, or too deep; JSON, but no object
        row = json.loads(line)
        return row if number(row.get("step")) >= 0 else None


def write_rows(path, rows):
    """Write a .jsonl log anew, whole or not at all. UserError: the disk refuses."""
    write_atomic(path, lambda f: f.write("".join(json.dumps(row) + "\n" for row in rows).encode()))


def append_row(path, row):
    """Write a row at the end of a .jsonl log. UserError: the disk refuses."""
    try:
        with open(path, "ab") as file:
            file.write((json.dumps(json_safe(row)) + "\n").encode())
    except OSError as e:
        raise UserError(f"could not write {path} ({e.strerror}); {last_save(path.parent)}") from None


# ---- the log of a run ----

class Log:
    """log.jsonl, one row a line, and Weights & Biases, whose failure is reported once and stops nothing.

    Of a log that is there already it keeps the training rows up to `step` and the evaluations up to
    `evaluation_step`: what a killed process wrote after its last save is about to be written again.
    """

    def __init__(self, out_dir, step, evaluation_step):
        self.path = out_dir / "log.jsonl"
        self.wandb_run = None
        self.tensorboard = None
        write_rows(self.path, [row for row in read_rows(self.path)
                               if row["step"] <= (evaluation_step if "val_loss" in row else step)])

    def write(self, row):
        row = json_safe(row)
        append_row(self.path, row)
        if self.tensorboard:
            for key, value in row.items():
                if key != "step" and isinstance(value, (int, float)):
                    self.tensorboard.add_scalar(key, value, row["step"])
        if self.wandb_run:
            values = {key: value for key, value in row.items() if key != "step"}
            self.attempt(lambda: self.wandb_run.log(values, step=row["step"]))

    def start_tensorboard(self, exit_stack):
        """Write the same rows for TensorBoard, too. UserError where it is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter  # only here: it needs an optional package
        except ImportError:
            raise UserError("tensorboard=True needs TensorBoard: pip install tensorboard") from None
        folder = self.path.with_name("tensorboard")
        last = read_rows(self.path)[-1:]
        # what a killed run wrote behind its last save is written again: TensorBoard shows the newer ones
        self.tensorboard = SummaryWriter(str(folder), purge_step=last[0]["step"] + 1 if last else None)
        exit_stack.callback(self.tensorboard.close)

    def start_wandb(self, config, details, run_id, exit_stack):
        def start():
            import wandb  # only here: an optional dependency
            name = config.wandb_run_name or self.path.parent.resolve().name
            settings = dict(project=config.wandb_project, name=name, id=run_id, resume="allow",
                            config=details, tags=config.wandb_tags, dir=str(self.path.parent))
            try:
                # mode None: wandb takes WANDB_MODE or its settings; it looks for an API key by itself, too
                self.wandb_run = wandb.init(**settings, mode=config.wandb_mode)
            except wandb.errors.UsageError as e:  # no API key, and no terminal to ask for one
                self.wandb_run = wandb.init(**settings, mode="offline")
                upload = shlex.join(["wandb", "sync", self.wandb_run.settings.sync_dir])
                tqdm.write(f"wandb: {e} This run is logged offline, and `{upload}` uploads it",
                           file=sys.stderr)
            if self.wandb_run.disabled:  # nothing is logged, so no code either
                return
            code = wandb.Artifact(f"code-{run_id}", type="code")
            for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("nanoheads/**/*.py")]):
                code.add_file(str(path), str(path.relative_to(ROOT)))
            code.add_file(str(self.path.with_name("config.json")))
            self.wandb_run.log_artifact(code)

        self.attempt(start)
        exit_stack.callback(lambda: self.wandb_run and self.attempt(self.wandb_run.finish))

    def attempt(self, action):
        try:
            action()
        except Exception as e:  # a network, a login or a quota must not cost a training run
            self.wandb_run = None
            problem = " ".join(f"{type(e).__name__}: {e}".split())[:200]
            tqdm.write(f"wandb: {problem}; training goes on without it", file=sys.stderr)
