"""
What a variant costs: FLOPs of its training as a machine executes them, the time of a step over the plain
GPT's, and the seconds of a run.

A model here is what has `config` (a GPTConfig), `training` (a TrainConfig in which every key has its value)
and `tokens` (that it is trained on), as models.Model.
"""

import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from torch._subclasses.fake_tensor import (DataDependentOutputException, DynamicOutputShapeException,
                                           FakeTensorMode)
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from model import GPT, CausalMask, Window
from nanoheads.common import keep_freed_memory
from nanoheads.ranks import Process
from nanoheads.scoring import score
from nanoheads.timing import median_interval, time_action
from study.models import is_small

# ---- FLOPs ----

# the CPU's attention, which the counter of torch 2.11 and 2.13 does not know; it passes shapes for tensors
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FORMULAS = {
    FLASH: lambda q, k, v, *args, **kw: sdpa_flop_count(q, k, v),
    FLASH_BACKWARD: lambda dy, q, k, v, *args, **kw: sdpa_backward_flop_count(dy, q, k, v),
}
COUNTS = {}  # {config, as text: count() of it}


def flops(model, device="cpu"):
    """FLOPs of a model's whole training."""
    return executed_flops(model.config, device) * model.tokens


def executed_flops(config, device="cpu"):
    """FLOPs to train on one token, forward and backward, as the kernels execute them at block_size.

    Beyond model.flops_per_token() they have the keys that a window's mask hides, logits computed again in the
    backward pass, passes for statistics of the rows, and columns that a kernel wants for padding. Causality
    is not deducted, as there; evaluations and the optimizer are not counted. On a GPU the passes are the
    CPU's, less the blocks of 128 keys that FlexAttention does not read under a window.
    """
    key = repr(replace(config, seed=0))
    if key not in COUNTS:
        COUNTS[key] = count(config)
    total, attention = COUNTS[key]
    if config.window and torch.device(device).type == "cuda":
        total -= attention * (1 - blocks_read(config))
    return round(total)


def count(config):
    """(FLOPs of all matrix products, those of attention), per token of one sequence.

    A small model is counted while it computes, a large one on tensors without memory that count as on the
    CPU: it takes 1.5 s at most, GPT-2's size too. A mechanism that asks for values, by .item() or a mask as
    an index, is counted on tensors that have some.
    """
    try:
        with nullcontext() if is_small(config) else FakeTensorMode():
            counter = one_pass(config)
    except (DataDependentOutputException, DynamicOutputShapeException):
        counter = one_pass(config)
    by_kernel = counter.get_flop_counts()["Global"]
    attention = by_kernel.get(FLASH, 0) + by_kernel.get(FLASH_BACKWARD, 0)
    return counter.get_total_flops() / config.block_size, attention / config.block_size


def one_pass(config):
    """The counter of FLOPs after a forward and a backward pass of one sequence."""
    gpt = GPT(config).train()
    ids = torch.zeros(1, config.block_size + 1, dtype=torch.long)
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        out = gpt(ids[:, :-1], ids[:, 1:])
        sum(out.aux.values(), out.loss).backward()
    return counter


def blocks_read(config):
    """The share of causal attention's blocks that FlexAttention reads under a config's window."""
    mask = (Window if config.window else CausalMask)(config).block_mask(config.block_size, "cpu")
    rows = mask.kv_num_blocks.size(-1)
    read = mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()
    return read.item() / (rows * (rows + 1) / 2)


# ---- the time of a step ----

ROUNDS, STEPS = 11, 4  # of timing, and steps of each side in a round


@contextmanager
def as_in_a_run(device, threads):
    """Threads, precision and what becomes of freed memory are those of a run."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(threads)
    if torch.device(device).type == "cuda":
        torch.set_float32_matmul_precision("high")
    if torch.device(device).type == "cpu":
        keep_freed_memory()  # without it the logits of 4,096 byte pairs took 1.7 times as long
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])


def step_time(model, plain, device, threads, training):
    """(median, low, high) of the time of a model's training step over the plain GPT's, with a 95 % interval.

    Both take turns, STEPS steps at a time, so that other work on the machine hits both. One thread on a CPU
    is timed by its processor time, which stands still while others have the core: at a load of twice the
    cores the intervals were a quarter as wide. training: train.py, whose steps these are.
    """
    clock = time.process_time if torch.device(device).type == "cpu" and threads == 1 else time.perf_counter
    with as_in_a_run(device, threads):
        # in a run it is the one model that is compiled; after several, torch would run the next one eager
        torch._dynamo.reset()
        pair = [steps_of(each, device, training) for each in (plain, model)]
        for take_steps in pair:
            take_steps()  # compilation, allocation, caches
        rounds = [[time_action(take_steps, device, clock) for take_steps in pair] for _ in range(ROUNDS)]
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # the next runs share this GPU
    return median_interval([own / other for other, own in rounds])


def ready(model, rows, device, training):
    """(a Run of train.py, x and y [rows, T]), as in training but on random tokens."""
    gpt, shape = GPT(model.config).to(device), (rows, model.config.block_size + 1)
    ids = torch.randint(model.config.vocab_size, shape, device=device)
    return training.ready_to_step(gpt, model.training, Process(device)), ids[:, :-1], ids[:, 1:]


def steps_of(model, device, training):
    """A function that trains a model for STEPS steps."""
    run, x, y = ready(model, model.training.batch_size * model.training.grad_accum, device, training)

    def take_steps():
        for _ in range(STEPS):
            training.training_step(run, x, y)
    return take_steps


# ---- the seconds of a run ----

SECONDS_BESIDE = 5.0  # of a run beside its steps: starting Python, reading torch, looking for leaks, writing
PROBE_FLOPS = 2e11    # of a step that is timed on a CPU: some seconds


def seconds_of_run(model, device, threads, training, scored, val_tokens):
    """Seconds of one run, from a probe: steps, evaluations, and the scoring of so many tokens.

    val_tokens: the size of the validation split, which eval_tokens=0 means. Other work that runs now is in
    it; compilation, and what runs at once take from each other, are not.
    """
    c = model.training
    step, token = probe(model, device, threads, training)
    evaluations = 1 + -(-c.max_iters // c.eval_interval)  # at step 0, every so often, at the end
    tokens = evaluations * 2 * (c.eval_tokens or val_tokens) + scored
    return c.max_iters * step + tokens * token + SECONDS_BESIDE


def probe(model, device, threads, training):
    """(seconds of a training step, seconds to score a token).

    Where a step is large, a part of its rows is timed and the rest taken to be in proportion.
    """
    c, T = model.training, model.config.block_size
    on_cpu = torch.device(device).type == "cpu"
    most = int(PROBE_FLOPS / executed_flops(model.config)) if on_cpu else 1 << 30  # tokens in the probe
    rows = max(1, min(c.batch_size, most // T))
    portions = c.batch_size * c.grad_accum / rows
    with as_in_a_run(device, threads):
        alone = SimpleNamespace(config=model.config, training=replace(c, grad_accum=1))
        run, x, y = ready(alone, rows, device, training)
        step = median_seconds(lambda: training.training_step(run, x, y), device)
        if portions > 1:  # an update follows the last alone
            step += (portions - 1) * median_seconds(lambda: training.forward_backward(run, x, y), device)
        size = max(T, min(most, 4096 if on_cpu else 16384))  # a batch of score()
        ids = np.random.default_rng(1).integers(model.config.vocab_size, size=size)
        text = SimpleNamespace(tokens=lambda split: ids, separator=0)
        return step, median_seconds(lambda: score(run.model, text, "test"), device) / size


def median_seconds(action, device, times=9, at_most=5.0):
    """The median of so many calls of action(), after one that does not count; fewer where they take long."""
    action()
    seconds = []
    while len(seconds) < times and sum(seconds) < at_most:
        seconds.append(time_action(action, device))
    return float(np.median(seconds))
