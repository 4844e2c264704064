"""What a run writes beside its checkpoints: config.json, log.jsonl and, when asked, Weights & Biases."""

import json
import math
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from checkpoint import last_save

from common import UserError, write_atomic

ROOT = Path(__file__).resolve().parent


def write_config(path, model_config, config, step, machine):
    """Write config.json: both configs, what it takes to run this again, what it ran on, and every launch so far."""
    commit = None
    with suppress(OSError):  # no git on this machine
        commit = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], cwd=ROOT,
                                capture_output=True, text=True).stdout.strip() or None
    launch = dict(command=shlex.join(["python", *sys.argv]), commit=commit, machine=machine,
                  versions=dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__))
    before = []
    if step:
        with suppress(OSError, ValueError, KeyError, TypeError):
            before = json.loads(path.read_text(encoding="utf-8"))["launches"]
    details = dict(model=asdict(model_config), train=asdict(config), **launch, launches=[*before, dict(step=step, **launch)])
    write_atomic(path, lambda f: f.write(json.dumps(details, indent=1).encode()))
    return details


class Log:
    """log.jsonl, one row a line, and Weights & Biases; a failure of the latter is said once and stops nothing.

    Of a log that is there already it keeps the training rows up to `step` and the evaluations up to `evaluated`:
    what a dead process wrote after its last save is about to be written again.
    """

    def __init__(self, out_dir, step, evaluated, closing):
        self.path, self.run, rows = out_dir / "log.jsonl", None, []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines() if self.path.is_file() else ():
            with suppress(ValueError, KeyError, TypeError):  # a line that was half-written
                row = json.loads(line)
                if row["step"] <= (evaluated if "val_loss" in row else step):
                    rows.append(line + "\n")
        write_atomic(self.path, lambda f: f.write("".join(rows).encode()))
        self.file = closing.enter_context(open(self.path, "ab", buffering=0))  # a row is in the file, or was refused at once

    def write(self, row):
        row = {key: value if math.isfinite(value) else None for key, value in row.items()}  # JSON has no NaN
        try:
            self.file.write((json.dumps(row) + "\n").encode())
        except OSError as e:
            raise UserError(f"could not write {self.path} ({e.strerror}); {last_save(self.path.parent)}")
        if self.run:
            self.attempt(lambda: self.run.log({k: v for k, v in row.items() if k != "step"}, step=row["step"]))

    def start_wandb(self, config, details, run_id, closing):
        def start():
            import wandb  # only here: an optional dependency
            self.run = wandb.init(project=config.wandb_project, name=config.wandb_run_name or self.path.parent.resolve().name,
                                  id=run_id, resume="allow", config=details, mode=config.wandb_mode, tags=config.wandb_tags,
                                  dir=str(self.path.parent))
            code = wandb.Artifact(f"code-{run_id}", type="code")
            for path in [*sorted(ROOT.glob("*.py")), self.path.with_name("config.json")]:
                code.add_file(str(path))
            self.run.log_artifact(code)
        self.attempt(start)
        closing.callback(lambda: self.run and self.attempt(self.run.finish))

    def attempt(self, action):
        try:
            action()
        except Exception as e:  # a network, a login or a quota must not cost a training run
            self.run = None
            tqdm.write(f"wandb: {' '.join(f'{type(e).__name__}: {e}'.split())[:200]}; training goes on without it", file=sys.stderr)
