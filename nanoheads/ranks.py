"""Training on several GPUs: which of torchrun's processes this one is, and how a run is asked to stop."""

import os
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Optional

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm
from tqdm import tqdm

from nanoheads.common import UserError, drop, explain, pick_device, printable, ran_out_of_memory, say


START_WITHIN = timedelta(minutes=5)  # in which all processes of a run must have started
ALONE_AFTER = 5  # seconds in which torchrun ends a process where the first one fails as well


@dataclass
class Process:
    """One process of a run, and the device that it computes on."""
    device: str = "cpu"
    rank: int = 0
    world: int = 1
    stop: Optional["StopSignal"] = None  # while steps are made: what the run is asked to stop by

    @property
    def kind(self):
        return torch.device(self.device).type

    def print0(self, text):
        """Print on the first rank alone: above the bar, and line by line into a file or a pipe.

        Where the pipe's reader is gone while steps are made, such as `| head`, or `| tee` after Ctrl-C, the
        run is saved before it ends.
        """
        if self.rank:
            return
        try:
            tqdm.write(printable(text))
            sys.stdout.flush()
        except BrokenPipeError:
            if self.stop is None:
                raise
            self.stop.lose_reader()

    def all_reduce_sum(self, values):
        """The sum over ranks of a few numbers, in float64."""
        if self.world == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def average_gradients(self, params, size=1 << 23):
        """Replace each gradient by its mean over ranks, `size` numbers at a time or one gradient: a bucket is
        filled while others are on their way. A parameter without a gradient has none on any rank.
        """
        grads = [p.grad for p in params if p.grad is not None] if self.world > 1 else []
        buckets, transfers = [], []
        for grad in grads:
            last = buckets[-1] if buckets else []
            if not last or sum(g.numel() for g in last) >= size or last[0].dtype != grad.dtype:
                buckets.append([])
            buckets[-1].append(grad)
        for bucket in buckets:
            flat = torch.cat([grad.flatten() for grad in bucket]).div_(self.world)
            transfers.append((flat, dist.all_reduce(flat, async_op=True)))
        for bucket, (flat, work) in zip(buckets, transfers):
            work.wait()
            parts = flat.split([grad.numel() for grad in bucket])
            torch._foreach_copy_(bucket, [part.view_as(grad) for part, grad in zip(parts, bucket)])

    def check_agreement(self, run):
        """UserError where ranks begin with other weights or at another step, whose gradients have no mean."""
        if self.world == 1:
            return
        values = [float(run.step), float(get_total_norm([p.detach() for p in run.model.parameters()]))]
        sums = self.all_reduce_sum(values)
        differ = any(abs(total - self.world * value) > 1e-6 * abs(total)
                     for total, value in zip(sums, values))
        if self.all_reduce_sum([float(differ)])[0]:
            raise UserError("the processes begin with different weights or at different steps: "
                            f"{run.out_dir}, and what init_from names, must be on a disk all machines share")

    def barrier(self):
        """Wait for all ranks: one that takes the process group down may abort another that still saves."""
        if self.world > 1:
            dist.barrier()


@contextmanager
def report_once():
    """Only the first process of a machine reports an error that all processes of torchrun there meet, and
    then torchrun ends the others. One that is still alive a little later met it alone, and says so. Memory
    runs out in each by itself.
    """
    try:
        yield
    except Exception as e:
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        if other_is_gone(e):
            message = UserError("another process of this run has ended, for the reason that it gives")
            raise (message if is_first else SystemExit(1)) from None
        if not is_first and explain(e) and not ran_out_of_memory(e):
            time.sleep(ALONE_AFTER)
            say(f"train: rank {os.environ['RANK']}: {explain(e)}", file=sys.stderr, flush=True)
            sys.exit(1)
        raise
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def other_is_gone(e):
    """Whether an exception says that a process group cannot go on without another process."""
    return (dist.is_available() and dist.is_initialized()
            and (isinstance(e, dist.DistError) or isinstance(e, RuntimeError) and "gloo" in str(e)))


def join_ranks(name):
    """The Process on the device called `name`: one of torchrun's, in their process group, or alone."""
    device = pick_device(name)
    if "RANK" not in os.environ:
        return Process(device)
    local = int(os.environ.get("LOCAL_RANK", 0))
    if problem := problem_of_ranks(device, local):
        raise UserError(problem)
    if device == "cuda":
        device = f"cuda:{local}"
        torch.cuda.set_device(device)
    # the group itself waits for half an hour, also for a process that has failed on another machine
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=START_WITHIN))
        store.set(f"rank {rank}", "is here")
        store.wait([f"rank {number}" for number in range(world)], START_WITHIN)
    except dist.DistError:
        raise UserError(f"not all processes of this run have started within {START_WITHIN.seconds} s: one "
                        "has failed, for the reason that it gives, or its machine cannot be reached"
                        ) from None
    dist.init_process_group(dist.get_default_backend_for_device(device), rank=rank, world_size=world,
                            store=dist.PrefixStore("group", store))
    return Process(device, dist.get_rank(), dist.get_world_size())


def problem_of_ranks(device, local):
    """What keeps torchrun's processes from working together on a device, in a line; None: nothing does.

    local: this one's number on its machine.
    """
    if not dist.is_available():
        return ("torchrun needs torch.distributed, which this build of PyTorch does not have: start one "
                "process")
    if device.startswith("cuda:"):
        return f"device={device} under torchrun would put every process on one GPU; say device=cuda"
    if device == "mps":
        return ("device=mps under torchrun would put every process on the Mac's one GPU: start one process, "
                "or --device=cpu")
    if device == "cuda" and local >= torch.cuda.device_count():
        return (f"torchrun started more processes than there are GPUs ({torch.cuda.device_count()}): fewer, "
                "or --device=cpu")
    if device == "cuda" and not dist.is_nccl_available():
        return ("device=cuda under torchrun needs NCCL, which this build of PyTorch does not have (none for "
                "Windows has it): start one process, or --device=cpu")


class StopSignal:
    """Remembers the first SIGINT, SIGTERM or SIGHUP, until `exit_stack` puts the handlers back.

    A second one ends the process at once, unless torchrun passes signals on. SIGHUP says that the terminal
    is gone: from then on what would be printed there is dropped, since printing would end the run before it
    is saved. Where SIGHUP is ignored, as under nohup, it stays so.
    """

    def __init__(self, exit_stack):
        self.name = None
        self.terminal_streams = [number for number in (1, 2) if os.isatty(number)]
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is None or name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN:
                continue
            exit_stack.callback(signal.signal, number, signal.signal(number, self.catch))

    def lose_reader(self):
        """Drop what is printed from now on, and ask the run to stop."""
        drop(1)
        self.name = self.name or "SIGPIPE"

    def catch(self, number, frame):
        self.name = signal.Signals(number).name
        if self.name == "SIGHUP":
            for stream in self.terminal_streams:
                drop(stream)
        if "RANK" not in os.environ:
            signal.signal(number, signal.SIG_DFL)
