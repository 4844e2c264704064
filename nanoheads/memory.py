"""
Calculates how much memory a training step takes, before the run starts.

Counted are the weights, their gradients, what the optimizers keep, and what the forward pass of one portion
of the batch stores for the backward pass: activations, logits and weights cast to another dtype. The last of
these is found by a forward pass on fake tensors, which have shapes and no memory, so every mechanism and flag
is in it. Not counted are what a kernel needs while it runs, the memory that the allocator holds in reserve,
and the context of CUDA, which take some 0.5 to 1 GB more. torch.compile fuses kernels and usually stores
less.
"""

import math
import os
from contextlib import contextmanager
from typing import NamedTuple

import torch

from nanoheads.common import UserError, gib, memory_of_machine, ran_out_of_memory
from nanoheads.logits import portions
from nanoheads.optim import make_optimizers


class StepMemory(NamedTuple):
    """Bytes of a training step of one rank."""
    weights: int
    gradients: int
    optimizers: int   # what they keep of each parameter, such as moments
    activations: int  # of one portion, logits and cast weights included
    backward: int     # what the backward pass needs at its start, while all of those are there

    @property
    def total(self):
        return sum(self)


def step_memory(model, config, rows, autocast):
    """The StepMemory of a model that is trained on portions of `rows` rows.

    config: a TrainConfig in which every key has its value. autocast: the context of the forward pass.
    """
    sizes = {p: p.numel() * p.element_size() for p in model.parameters()}
    trained = {p: size for p, size in sizes.items() if p.requires_grad}
    moments = sum(p.element_size() * math.prod(shape)
                  for optimizer in make_optimizers(model, config) for group in optimizer.param_groups
                  for p in group["params"] if p in trained for shape in optimizer.moments(p, group).values())
    activations = stored_for_backward(model, rows, autocast)
    # the gradient of the logits, in float32, is made of another tensor of its size; with recomputed blocks it
    # may be less than what one block stores when its turn comes
    c = model.config
    with autocast:
        no_numbers = model.lm_head.weight.new_empty(rows, c.block_size, 0)
        chunks = portions(c.loss_chunks, no_numbers, c.vocab_size)
    backward = 2 * 4 * rows * c.block_size * c.vocab_size // chunks
    if c.checkpoint_activations:
        c.checkpoint_activations = False
        try:
            whole = stored_for_backward(model, rows, autocast)
        finally:
            c.checkpoint_activations = True
        backward = max(backward, whole // c.n_layer)
    return StepMemory(sum(sizes.values()), sum(trained.values()), moments, activations, backward)


def stored_for_backward(model, rows, autocast):
    """Bytes that a forward pass on [rows, block_size] tokens stores for the backward pass, weights aside."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # only here: importing it takes seconds
    stored = {}  # storage -> (its bytes, a tensor that keeps it alive, so that no other gets its address)

    def pack(t):
        storage = t.untyped_storage()
        stored[storage._cdata] = storage.nbytes(), t
        return t

    with FakeTensorMode(allow_non_fake_inputs=True) as fake, autocast:
        # a kernel saves a weight itself or what stands for it here: no activation either way
        tensors = [*model.parameters(), *model.buffers()]
        weights = [*tensors, *(fake.from_tensor(t) for t in tensors)]
        of_weights = {t.untyped_storage()._cdata for t in weights}
        ids = torch.zeros(rows, model.config.block_size, dtype=torch.long, device=model.lm_head.weight.device)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(ids, ids)
    return sum(size for key, (size, _) in stored.items() if key not in of_weights)


# ---- what a run says before it starts, and when memory ran out ----

SHOWN_FROM = 5_000_000  # parameters: a smaller model on a CPU starts at once, and fits anywhere


def device_memory(process):
    """Bytes of memory of a rank's device; of a CPU those of the machine."""
    if process.kind == "cuda":
        return torch.cuda.get_device_properties(process.device).total_memory
    if process.kind == "mps":
        return torch.mps.recommended_max_memory()
    return memory_of_machine()


def memory_lines(run):
    """What a step of a run takes, in a line; a second one where that is more than the device has."""
    on_cpu = run.process.kind == "cpu"
    if on_cpu and run.model.num_params() < SHOWN_FROM:
        return []
    config, rows = run.config, rows_at_once(run.config, run.process.world)
    need, limit = step_memory(run.model, config, rows, run.autocast), device_memory(run.process)
    parts = dict(weights=need.weights, gradients=need.gradients, optimizers=need.optimizers,
                 activations=need.activations + need.backward)
    lines = [f"a step takes about {gib(need.total)} of memory: "
             + ", ".join(f"{name} {size / 2**30:,.2f}" for name, size in parts.items())
             + f" for {rows} x {run.model.config.block_size:,} tokens at once"]
    if need.total > limit:
        lines.append(f"that is more than the {gib(limit)} of this {'machine' if on_cpu else 'device'}: "
                     + advice(config, run.process.world,
                              1 - (need.total - limit) / (need.activations + need.backward)))
    return lines


@contextmanager
def advising(config):
    """Where memory runs out inside, say what of a TrainConfig to lower. UserError."""
    try:
        yield
    except Exception as e:
        if not ran_out_of_memory(e):
            raise
        hint = advice(config, int(os.environ.get("WORLD_SIZE", 1)))
        raise UserError(f"out of memory; {hint}; a model that is too large itself needs a lower n_embd, "
                        "n_layer or vocab_size") from None


def rows_at_once(config, world):
    """Rows of the batch in one forward pass of one rank."""
    return config.batch_size if config.grad_accum > 1 else max(1, config.batch_size // world)


def advice(config, world, share=None):
    """What to lower so that a forward pass takes less memory and the step stays as it is, in words.

    share: of today's rows, what would fit; None: not known, then the next smaller number is named.
    """
    rows, sequences = rows_at_once(config, world), config.batch_size * config.grad_accum
    largest = rows - 1 if share is None else min(rows - 1, int(share * rows))
    smaller = (n for n in range(largest, max(0, largest - 10**6), -1)  # a million rows are beyond all memory
               if sequences % n == 0 and sequences // n % world == 0)
    if n := next(smaller, None):
        return f"--batch_size={n} --grad_accum={sequences // n} makes the same step in less"
    return "lower block_size or n_embd, or set checkpoint_activations=True"
