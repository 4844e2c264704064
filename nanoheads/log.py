"""What a run writes beside its checkpoints: config.json, log.jsonl and, with wandb_log, Weights & Biases."""

import json
import os
import platform
import shlex
import sys
from contextlib import suppress
from dataclasses import asdict

import numpy as np
from tqdm import tqdm

from nanoheads.common import (ROOT, UserError, from_json, git_commit, in_place, json_safe, no_link, number,
                              plural, printable, say, write_atomic, write_json)


def write_config(path, model_config, config, step, machine, asked):
    """Write config.json: both configs, what it takes to run this again, what it ran on, and every launch.

    asked: see start.asked_for().
    """
    import torch  # late here and below: the reader of a log does without
    launch = dict(command=shlex.join(["python", *sys.argv]), commit=git_commit(), machine=machine,
                  versions=dict(python=platform.python_version(), torch=torch.__version__,
                                numpy=np.__version__))
    before = []
    if step:
        with suppress(OSError, ValueError, KeyError, TypeError):
            before = [*from_json(path.read_bytes())["launches"]]
    details = dict(model=model_config.flags(), train=asdict(config), asked=asked, **launch,
                   launches=[*before, dict(step=step, **launch)])
    write_json(path, details)
    return details


def stamps(paths):
    """What changes when one of these files does; hashable."""
    there = ((path, os.stat(path)) for path in paths if path.is_file())
    return tuple((path, now.st_ino, now.st_mtime_ns, now.st_size) for path, now in there)


def set_aside(*paths, why):
    """Rename files that cannot be used to <name>.damaged, and report it in one line."""
    there = [path for path in paths if path.is_file()]
    for path in there:
        os.replace(path, f"{path}.damaged")
    names = " and ".join(f"{path.name}.damaged" for path in there)
    tqdm.write(printable(f"{paths[0]} {why}; set aside as {names}"), file=sys.stderr)


def read_json(path):
    """The dict in a JSON file; None where there is no file, or none that can be read: that is set aside."""
    try:
        content = from_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        content = None
    return content if isinstance(content, dict) else set_aside(path, why="is damaged")


def parsed(line):
    """The dict in a line of a log that has a step; None where there is none."""
    try:
        row = from_json(line)
        return row if number(row.get("step")) >= 0 else None
    except (ValueError, AttributeError):  # not JSON; JSON but not an object
        return None


def read_rows(path, sound=bool, repair=False, complain=None):
    """The rows of a .jsonl log in the file's order, without damaged lines; [] where there is no file.

    A process that was killed leaves half a line, behind which a later row may stand. sound(row): whether it
    is one. repair: where lines are damaged, set the file aside and write one without them. complain(message):
    is called where lines are damaged.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    lines, rows, damaged = text.split("\n"), [], []
    for n, line in enumerate(lines, 1):
        row = parsed(line)
        if not (row and sound(row)) and line.strip():
            damaged.append(n)
            row = parsed(line[line.rfind('{"step"'):])
        if row and sound(row):
            rows.append(row)
    if damaged and complain:
        complain(f"{plural(len(damaged), 'broken line')} in {path.name}, the first is line {damaged[0]}; "
                 "the rest is used")
    if damaged and repair:
        n = sum(bool(line.strip()) for line in lines)
        set_aside(path, why=f"has {len(damaged)} damaged of {plural(n, 'line')}, kept without them")
        write_rows(path, rows)
    return rows


def warn(run_dir, message):
    say(f"{run_dir}: {message}", file=sys.stderr)


def write_rows(path, rows):
    write_atomic(path, lambda f: f.write("".join(json.dumps(row) + "\n" for row in rows).encode()))


def write_whole(file, data):
    """Write bytes into an unbuffered file, which takes a part of them where a disk is nearly full.

    OSError: it does not take the rest.
    """
    while data:
        data = data[file.write(data):]


class Log:
    """log.jsonl, one row a line, and Weights & Biases, whose failure is reported once and stops nothing.

    Of a log that is there already it keeps the training rows up to `step` and the evaluations up to
    `evaluated`: what a killed process wrote after its last save is about to be written again.
    """

    def __init__(self, out_dir, step, evaluated, closing):
        self.path = out_dir / "log.jsonl"
        self.wandb_run = None
        self.tensorboard = None
        before = read_rows(self.path)
        write_rows(self.path, [row for row in before
                               if row["step"] <= (evaluated if "val_loss" in row else step)])
        # unbuffered: a row is in the file, or was refused at once
        self.file = closing.enter_context(open(self.path, "ab", buffering=0, opener=in_place))
        closing.callback(self.add, b"", sync=True)

    def add(self, text, sync):
        """Write at the end; sync: wait until everything written so far is on the disk."""
        try:
            write_whole(self.file, text)
            if sync:
                os.fsync(self.file.fileno())
        except OSError as e:
            from nanoheads.checkpoint import last_save
            raise UserError(f"could not write {self.path} ({e.strerror}); {last_save(self.path.parent)}")

    def write(self, row):
        row = json_safe(row)
        # an evaluation is the dear one: a step's row reaches the disk with the next of them
        self.add((json.dumps(row) + "\n").encode(), sync="val_loss" in row)
        if self.tensorboard:
            for key, value in row.items():
                if key != "step" and isinstance(value, (int, float)):
                    self.tensorboard.add_scalar(key, value, row["step"])
        if self.wandb_run:
            values = {key: value for key, value in row.items() if key != "step"}
            self.attempt(lambda: self.wandb_run.log(values, step=row["step"]))

    def start_tensorboard(self, closing):
        """Write the same rows for TensorBoard, too. UserError where it is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter  # only here: it needs an optional package
        except ImportError:
            raise UserError("tensorboard=True needs TensorBoard: pip install tensorboard") from None
        folder = no_link(self.path.with_name("tensorboard"))
        last = read_rows(self.path)[-1:]
        # what a killed run wrote behind its last save is written again: TensorBoard shows the newer ones
        self.tensorboard = SummaryWriter(str(folder), purge_step=last[0]["step"] + 1 if last else None)
        closing.callback(self.tensorboard.close)

    def start_wandb(self, config, details, run_id, closing):
        def start():
            import wandb  # only here: an optional dependency
            for folder in ("wandb", ".wandb"):  # it takes the second where that is there
                no_link(self.path.with_name(folder))
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
        closing.callback(lambda: self.wandb_run and self.attempt(self.wandb_run.finish))

    def attempt(self, action):
        try:
            action()
        except Exception as e:  # a network, a login or a quota must not cost a training run
            self.wandb_run = None
            problem = " ".join(f"{type(e).__name__}: {e}".split())[:200]
            tqdm.write(f"wandb: {problem}; training goes on without it", file=sys.stderr)


# ---- what was learned of a task ----

LEARNED = 0.9  # the share of answers that must be right


def learned_from(steps, shares, enough=LEARNED):
    """The first of these steps from which on a share is at least `enough` to the end; None: there is none."""
    first = None
    for step, share in zip(steps, shares):
        if share < enough:
            first = None
        elif first is None:
            first = step
    return first
