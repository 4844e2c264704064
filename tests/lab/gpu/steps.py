"""
One process of the GPU check: compiles the checks that its argument names, and prints a JSON line for each.

It runs in the environment that environment.py made, with its variables: tensors are fake, kernels are
compiled and never launched.
"""

import json
import os
import sys
import time
import traceback
import warnings

import torch
from torch._inductor import metrics
from torch._subclasses.fake_tensor import FakeTensorMode

import train
from model import GPT, KVCache
from nanoheads import optim
from nanoheads.config import TrainConfig
from nanoheads.ranks import Process
from tests.lab.gpu import fake
from tests.lab.gpu.entries import BATCH, MUON, NO_LABELS, TRAINING, Check, settings
from tests.lab.gpu.fake import SEEN

STEPS = 5


def ready(check, config):
    """A train.Run on the card, for the model of a config."""
    training = TrainConfig(dtype=check.dtype, compile=True, max_iters=1000, **TRAINING.get(check.entry, {}))
    model = fake.to_cuda(GPT(config))
    return train.ready_to_step(model, training.for_recipe(config.recipe), Process("cuda"))


def tokens(config):
    return torch.zeros(BATCH, config.block_size, dtype=torch.long, device="cuda")


def labels(check, config):
    """What constraint heads are trained on, where the check is with labels."""
    if not config.constraint_names or check.entry.endswith(NO_LABELS):
        return None
    return {name: torch.zeros(BATCH, config.block_size, device="cuda") for name in config.constraint_names}


def one_step(check):
    """Compile a training step."""
    config = settings(check)
    run = ready(check, config)
    gradients(run, tokens(config), labels(check, config))


def gradients(run, x, targets):
    """What a training step does before the update, which launches kernels of torch's own."""
    run.model.at_step(run.step)
    if run.step == run.config.thaw_from:
        train.freeze_or_thaw(run)
    train.forward_backward(run, x, x, targets)


def steps(check):
    """Five training steps, the schedules moving: the number of graphs after each."""
    config = settings(check)
    run, graphs = ready(check, config), []
    x = tokens(config)
    for run.step in range(STEPS):
        for block in run.model.transformer.h:  # as the controller does
            if block.attn.sentinel is not None:
                block.attn.sentinel.set_coef(config.sentinel_coef * run.step / STEPS)
        gradients(run, x, labels(check, config))
        train.clear_gradients(run)
        graphs.append(SEEN.graphs)
    return {"graphs": graphs}


@torch.no_grad()
def evaluate(check):
    """Compile FlexAttention as evaluation, traces, a prompt and one cached step use it, where any does."""
    config = settings(check)
    model = fake.to_cuda(GPT(config)).eval()
    x, cache = tokens(config), KVCache(config)
    _, autocast = optim.precision(check.dtype, "cuda")
    with autocast:
        model(x)
        model(x, x)
        model(x, x, traces=True)
        model.head(model.hidden(x[:, :-1], cache))
        model.head(model.hidden(x[:, -1:], cache))


def muon():
    """Compile Muon's update of matrices of two shapes, and run it uncompiled."""
    for shape in ((4, 768, 768), (1, 768, 3072)):
        matrices = torch.zeros(shape, device="cuda")
        optim.orthogonalise(matrices, low_precision=True)
        torch.compile(optim.orthogonalise)(matrices, low_precision=True)


def run(check):
    """What compiling a check shows, as it goes into the results file; check.py judges it."""
    SEEN.clear()
    torch.set_float32_matmul_precision("high")  # as train.py sets it
    row, begin = {}, time.time()
    try:
        with FakeTensorMode():
            if check.entry == MUON:
                muon()
            elif check.kind == "eval":
                evaluate(check)
            elif check.kind == "steps":
                row.update(steps(check))
            else:
                one_step(check)
    except Exception as e:
        traceback.print_exc()  # into the log
        row["error"] = first_line(e)
    if breaks := SEEN.breaks():
        row["breaks"] = breaks
    if check.kind != "steps":
        row.update(figures())
    return {**row, "seconds": round(time.time() - begin, 1)}


def first_line(e):
    """An exception in one line."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {lines[0][:300] if lines else ''}"


def figures():
    """Kernels, bytes moved, and the most shared memory that a kernel asks for."""
    row = {"kernels": metrics.generated_kernel_count, "bytes": metrics.num_bytes_accessed}
    if SEEN.shared:
        largest = max(SEEN.shared, key=SEEN.shared.get)
        limit = fake.shared_memory_limit()
        row.update(shared=SEEN.shared[largest], limit=limit, largest=largest[:60])
        row["too_large"] = sum(shared > limit for shared in SEEN.shared.values())
    return row


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torch prints is no answer
    warnings.simplefilter("ignore")
    request = json.loads(sys.argv[1])
    fake.prepare()
    fake.compile_with(fake.no_compiler if request["work"] == "graphs" else fake.inductor)
    for check in request["checks"]:
        print(json.dumps(run(Check(*check))), file=answers, flush=True)


if __name__ == "__main__":
    main()
