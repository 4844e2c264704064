"""
How the threads of a CPU wait for each other, so that training stays fast beside other work; and the
processor's name.

A program imports this module before torch. PyTorch's Linux wheels compute with GNU's OpenMP, whose threads
spin while they wait for each other: for the next operation to begin, or for the slowest of them to end. Where
other work shares the machine, a spinning thread takes the core that the thread it waits for would need, and
training becomes many times slower. So they spin briefly here, and then sleep. docs/results/speed.md has the
measurements.

OpenMP reads its settings once, when torch loads it. What the user has set counts, and other systems, whose
PyTorch comes with another OpenMP, are left as they are.
"""

import os
import platform
import sys

# turns of the waiting loop. Of 1,000 to 1,000,000 the fewest that cost an idle machine little: 1,000 were the
# best on an AMD EPYC, and cost an idle Intel Xeon 40 %
SPIN_COUNT = 10_000
# any of these means that the user has decided how threads wait
WAIT_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "KMP_LIBRARY")


def wait_briefly():
    """Let OpenMP's threads spin for SPIN_COUNT turns only, unless the environment says how they wait."""
    if sys.platform == "linux" and not any(name in os.environ for name in WAIT_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def processor(device="cpu"):
    """A GPU by its name; else the processor, on Linux with the family and model, which tell generations of
    one name apart.
    """
    if device.startswith("cuda"):
        import torch  # not before wait_briefly() has been called
        return torch.cuda.get_device_name(device)
    from nanoheads.cpu import cpuinfo  # which imports torch
    info = cpuinfo()
    if "model name" in info:
        generation = f"family {info.get('cpu family', '?')}, model {info.get('model', '?')}"
        return f"{info['model name']} ({generation})"
    return platform.processor() or platform.machine() or "unknown processor"


def describe_threads():
    """The threads that torch has, and of what: "2 threads of AMD EPYC 9R14 (family 25, model 17)"."""
    import torch  # late, as above
    threads = torch.get_num_threads()
    return f"{threads} thread{'s' * (threads != 1)} of {processor()}"


wait_briefly()
