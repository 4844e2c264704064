"""What a run writes beside its checkpoints: config.json, log.jsonl and, when asked, Weights & Biases."""

import json
import platform
import shlex
import sys
from contextlib import suppress
from dataclasses import asdict

import numpy as np
import torch
from tqdm import tqdm

from checkpoint import last_save
from common import ROOT, UserError, git_commit, json_safe, write_atomic


def write_config(path, model_config, config, step, machine):
    """Write config.json: both configs, what it takes to run this again, what it ran on, and every launch."""
    launch = dict(command=shlex.join(["python", *sys.argv]), commit=git_commit(), machine=machine,
                  versions=dict(python=platform.python_version(), torch=torch.__version__,
                                numpy=np.__version__))
    before = []
    if step:
        with suppress(OSError, ValueError, KeyError, TypeError):
            before = json.loads(path.read_text(encoding="utf-8"))["launches"]
    details = dict(model=asdict(model_config), train=asdict(config), **launch,
                   launches=[*before, dict(step=step, **launch)])
    write_atomic(path, lambda f: f.write(json.dumps(details, indent=1).encode()))
    return details


class Log:
    """log.jsonl, one row a line, and Weights & Biases, whose failure is said once and stops nothing.

    Of a log that is there already it keeps the training rows up to `step` and the evaluations up to
    `evaluated`: what a dead process wrote after its last save is about to be written again.
    """

    def __init__(self, out_dir, step, evaluated, closing):
        self.path = out_dir / "log.jsonl"
        self.wandb_run = None
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.is_file() else ""
        lines = []
        for line in text.splitlines():
            with suppress(ValueError, KeyError, TypeError):  # a line that was half-written
                row = json.loads(line)
                if row["step"] <= (evaluated if "val_loss" in row else step):
                    lines.append(line + "\n")
        write_atomic(self.path, lambda f: f.write("".join(lines).encode()))
        # unbuffered: a row is in the file, or was refused at once
        self.file = closing.enter_context(open(self.path, "ab", buffering=0))

    def write(self, row):
        row = json_safe(row)
        try:
            self.file.write((json.dumps(row) + "\n").encode())
        except OSError as e:
            raise UserError(f"could not write {self.path} ({e.strerror}); {last_save(self.path.parent)}")
        if self.wandb_run:
            values = {key: value for key, value in row.items() if key != "step"}
            self.attempt(lambda: self.wandb_run.log(values, step=row["step"]))

    def start_wandb(self, config, details, run_id, closing):
        def start():
            import wandb  # only here: an optional dependency
            name = config.wandb_run_name or self.path.parent.resolve().name
            self.wandb_run = wandb.init(project=config.wandb_project, name=name, id=run_id, resume="allow",
                                        config=details, mode=config.wandb_mode, tags=config.wandb_tags,
                                        dir=str(self.path.parent))
            code = wandb.Artifact(f"code-{run_id}", type="code")
            for path in [*sorted(ROOT.glob("*.py")), self.path.with_name("config.json")]:
                code.add_file(str(path))
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
