"""Profiles training steps (--profile): a trace in a file, and a table of where the time went."""

import os
from collections import Counter
from contextlib import contextmanager

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from nanoheads.common import UserError, plural, table

WARM_UP = 3  # steps before those that are recorded: in them code is compiled and caches are filled
ROWS = 10
STEP = "training step"  # what the trace calls one


def profile_run(run):
    """The Profile that a run's config asks for, of its first rank; on other ranks None.

    UserError, on all ranks, where the run has too few steps left.
    """
    steps, steps_left = run.config.profile, run.config.max_iters - run.step
    if steps_left < WARM_UP + steps:
        raise UserError(f"profile={steps} takes {WARM_UP + steps} steps, the first {WARM_UP} to warm up, and "
                        f"this run has {steps_left:,} to go: set a larger max_iters")
    return Profile(steps, run.process.device) if run.process.rank == 0 else None


class Profile:
    """What train.py's loop has around its training steps while some of them are recorded.

    step() is the context of each training step, and is_done() is asked after it. What is done between steps,
    such as an evaluation, is in the trace and not in the rows.
    """

    def __init__(self, steps, device):
        self.steps, self.device, self.steps_done = steps, torch.device(device), 0
        self.on_cuda = self.device.type == "cuda"
        if not self.on_cuda:  # where its errors say why there are no kernels in the trace
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints lines of no use
        # the last step of our warm-up is that of torch, in which the profiler is on and records nothing
        self.profiler = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.on_cuda,
            schedule=schedule(wait=WARM_UP - 1, warmup=1, active=steps, repeat=1))

    @contextmanager
    def step(self):
        if self.steps_done == 0:
            self.profiler.start()
        with record_function(STEP):
            yield
        self.steps_done += 1
        if self.is_done() and self.on_cuda:
            torch.cuda.synchronize(self.device)  # the last step's kernels belong to it
        if not self.is_done():
            self.profiler.step()

    def is_done(self):
        """Whether all steps are recorded."""
        return self.steps_done == WARM_UP + self.steps

    def close(self):
        """Stop recording."""
        if self.profiler:
            self.profiler.stop()
            self.profiler = None

    def write(self, path):
        """Write the trace to a file, in Chrome's form; returns what it comes to, as lines of text."""
        profiler = self.profiler
        self.close()
        profiler.export_chrome_trace(str(path))
        return self.summarise(profiler.events())

    def summarise(self, events):
        """The ROWS operators that took most of the steps' time, as a table with a line before it.

        An operator's time is without that of the operators that it calls: on a CPU against the time of the
        steps, on CUDA that of the kernels that it starts, against the time of all of them.
        """
        events = [e for e in events if e.device_type == DeviceType.CPU and not e.is_async]
        steps = [e.time_range for e in events if e.name == STEP]
        times, calls = Counter(), Counter()
        for e in events:
            inside = any(step.start <= e.time_range.start and e.time_range.end <= step.end for step in steps)
            if inside and not e.is_user_annotation:
                times[e.name] += e.self_device_time_total if self.on_cuda else e.self_cpu_time_total
                calls[e.name] += 1
        in_operators = sum(times.values())
        whole = in_operators if self.on_cuda else sum(step.elapsed_us() for step in steps)
        remainder = "" if self.on_cuda else f", {1 - in_operators / whole:.1%} of it outside operators"
        what = "kernels on the GPU" if self.on_cuda else "time"
        rows = [(name, f"{time / whole:.1%}", f"{calls[name] / len(steps):,.1f}")
                for name, time in times.most_common(ROWS)]
        return (f"profile of {plural(len(steps), 'step')}: {whole / len(steps) / 1000:,.2f} ms of {what} a "
                f"step{remainder}\n{table(('operator', 'share of the step', 'calls a step'), rows)}")
