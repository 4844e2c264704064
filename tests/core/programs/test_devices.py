"""The device that a program computes on: detected, or refused in a line."""

import platform
import subprocess
import sys

import pytest
import torch

from nanoheads.common import ROOT, UserError, explain, pick_device


@pytest.mark.parametrize("name", ["cpu:x", "gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_one_line(name):
    with pytest.raises(UserError, match=f"^device={name} cannot be used: .+$"):
        pick_device(name)


def test_the_device_is_detected():
    there = [name for name, kind in (("cuda", torch.cuda), ("mps", torch.backends.mps))
             if kind.is_available()]
    assert pick_device("auto") == [*there, "cpu"][0] and pick_device("cpu") == "cpu"


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library decides this by itself")
def test_on_a_cpu_freed_memory_stays_for_the_next_step():
    """Given back and taken again each of its pages is a page fault: a tenth of the time of a small run."""
    program = """
import resource, torch
from nanoheads.common import pick_device
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        [torch.ones(6 << 20) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults()); pick_device("cpu"); print(faults())
"""
    before, after = map(int, subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True,
                                            capture_output=True, text=True).stdout.split())
    assert after < before / 4


def test_a_kernel_without_room_is_not_told_to_run_uncompiled():
    """FlexAttention is compiled with --compile=False too."""
    said = explain(RuntimeError("out of resource: shared memory, Required: 246784, Hardware limit: 232448."))
    assert "246784" in said and "smaller heads" in said and "--compile" not in said
