"""
What a variant costs: FLOPs as a machine executes them, the time of a step against the plain GPT's, and the
seconds of a run. model.flops_per_token() counts what the algorithm needs; this counts what is done.
"""

import os
import statistics
import time
from contextlib import contextmanager
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
from nanoheads.threads import processor
from nanoheads.timing import median_interval, timed

# ---- FLOPs ----

# the CPU's attention, which the counter of torch 2.11 and 2.13 does not know; it passes shapes for tensors
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FORMULAS = {
    FLASH: lambda q, k, v, *args, **kw: sdpa_flop_count(q, k, v),
    FLASH_BACKWARD: lambda dy, q, k, v, *args, **kw: sdpa_backward_flop_count(dy, q, k, v),
}
counts = {}  # config, as text: count() of it


def executed_flops(config, device="cpu"):
    """FLOPs to train on one token, forward and backward, as the kernels here execute them at block_size.

    Beyond model.flops_per_token() they have the keys that a window's mask hides, logits computed again in the
    backward pass, passes for statistics of the rows, and columns that a kernel wants for padding. Causality
    is not deducted, as there; nor is the optimizer counted. For device "cuda" the CPU's passes are counted,
    less the blocks of 128 keys that FlexAttention does not read under a window. That it pads less is not
    deducted.
    """
    key = repr(replace(config, seed=0))
    if key not in counts:
        counts[key] = count(config)
    total, attention = counts[key]
    if config.window and torch.device(device).type == "cuda":
        total -= attention * (1 - blocks_read(config))
    return round(total)


def count(config):
    """(FLOPs of all matrix products, those of attention), per token of one sequence.

    Tensors without memory that count as on the CPU: it takes 1.5 s at most, GPT-2's size too. A mechanism
    that asks for values, by .item() or a mask as an index, is counted on tensors that have some.
    """
    try:
        with FakeTensorMode():
            counter = one_pass(config)
    except (DataDependentOutputException, DynamicOutputShapeException):
        counter = one_pass(config)
    by_kernel = counter.get_flop_counts()["Global"]
    attention = by_kernel.get(FLASH, 0) + by_kernel.get(FLASH_BACKWARD, 0)
    return counter.get_total_flops() / config.block_size, attention / config.block_size


def one_pass(config):
    """The counter of FLOPs after a forward and a backward pass of one sequence."""
    model = GPT(config).train()
    ids = torch.zeros(1, config.block_size + 1, dtype=torch.long)
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        out = model(ids[:, :-1], ids[:, 1:])
        sum(out.aux.values(), out.loss).backward()
    return counter


def blocks_read(config):
    """Share of causal attention's blocks that FlexAttention reads under a config's window."""
    mask = (Window if config.window else CausalMask)(config).block_mask(config.block_size, "cpu")
    rows = mask.kv_num_blocks.size(-1)
    read = mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()
    return read.item() / (rows * (rows + 1) / 2)


# ---- time ----

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


def ready(variant, device, rows, training):
    """(a Run of a variant's model, x and y [rows, T]), as in training but on random text.

    training: train.py's functions, here and below. A program imports lab/, and not the other way.
    """
    model = GPT(variant.model).to(device)
    ids = torch.randint(variant.model.vocab_size, (rows, variant.model.block_size + 1), device=device)
    return training.ready_to_step(model, variant.train, Process(device)), ids[:, :-1], ids[:, 1:]


def stepper(variant, device, steps, training):
    """A function that trains a variant's model for `steps` steps."""
    run, x, y = ready(variant, device, variant.train.batch_size * variant.train.grad_accum, training)

    def take_steps():
        for _ in range(steps):
            training.training_step(run, x, y)
    return take_steps


def clock_of(device, threads):
    """("processor" or "wall", its function) by which runs on a device are timed, see step_time_ratios()."""
    if torch.device(device).type == "cpu" and threads == 1:
        return "processor", time.process_time
    return "wall", time.perf_counter


def taking_turns(pair, device, clock, rounds):
    """[[seconds of each of a pair of actions] of each round], after a call of each that does not count."""
    for action in pair:
        action()  # compilation, the plain GPT's again; allocation, caches
    return [[timed(action, device, clock) for action in pair] for _ in range(rounds)]


def step_time_ratios(variants, plain, device, threads, training, rounds=11, steps=4):
    """{name: row} of the variants: time of a training step over that of `plain`, and under which load.

    Each alternates with `plain`, `steps` steps at a time, so that other work on the machine hits both. One
    thread on a CPU is timed by its processor time, which stands still while others have the core: at a
    load of twice the cores its intervals were a quarter as wide.
    ratios: of each round; ratio: their median; low, high: its 95 % interval (below 6 rounds the range); ms,
    plain_ms: medians of a step; clock: processor or wall; load: processes that wanted to run in the minute
    before (None: not known); cores; processor; compiled: whether either side was.
    """
    name_of_clock, clock = clock_of(device, threads)
    rows = {}
    with as_in_a_run(device, threads):
        plain_steps = stepper(plain, device, steps, training)
        for variant in variants:
            load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
            # in a run it is the one model that is compiled; after several, torch would run the next one eager
            torch._dynamo.reset()
            pair = plain_steps, stepper(variant, device, steps, training)
            seconds = taking_turns(pair, device, clock, rounds)
            ratios = [b / a for a, b in seconds]
            ratio, low, high = median_interval(ratios)
            plain_ms, ms = (1000 * statistics.median(side) / steps for side in zip(*seconds))
            rows[variant.name] = dict(
                ratio=ratio, low=low, high=high, ratios=ratios, ms=ms, plain_ms=plain_ms, rounds=rounds,
                clock=name_of_clock, threads=threads, load=load,
                cores=os.cpu_count(), processor=processor(device),
                compiled=any(each.train.compile for each in (variant, plain)))
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # the next size's runs share this GPU
    return rows


SECONDS_BESIDE_STEPS = 5.0  # of a run: starting Python, reading torch, looking for leaks, writing
PROBE_FLOPS = 2e11  # on a CPU, of a step that is timed: some seconds


def seconds_per_run(variant, device, threads, training, test_tokens, val_tokens=0, probed=None):
    """Seconds of one run, from a probe: training steps, evaluations, and the scoring of test_tokens tokens.

    val_tokens: what eval_tokens=0 means, the size of the validation split. probed: what probe() gave for a
    run that differs in its number of steps alone. Other work that runs now is in it. Left out: the start of a
    process (a few seconds), compilation, and what jobs at once take from each other.
    """
    config = variant.train
    step, token = probed or probe(variant, device, threads, training)
    evaluations = 1 + -(-config.max_iters // config.eval_interval)  # at step 0, every so often, at the end
    scored = evaluations * 2 * (config.eval_tokens or val_tokens) + test_tokens
    return config.max_iters * step + scored * token


def probe(variant, device, threads, training):
    """(seconds of a training step, seconds to score a token).

    Where a step is large, a part of its rows is timed and the rest taken to be in proportion.
    """
    config, T = variant.train, variant.model.block_size
    on_cpu = torch.device(device).type == "cpu"
    most = int(PROBE_FLOPS / executed_flops(variant.model)) if on_cpu else 1 << 30  # tokens in the probe
    rows = max(1, min(config.batch_size, most // T))
    portions = config.batch_size * config.grad_accum / rows
    with as_in_a_run(device, threads):
        alone = SimpleNamespace(model=variant.model, train=replace(config, grad_accum=1))
        run, x, y = ready(alone, device, rows, training)
        step = median_seconds(lambda: training.training_step(run, x, y), device)
        if portions > 1:  # an update follows the last alone
            step += (portions - 1) * median_seconds(lambda: training.forward_backward(run, x, y), device)
        size = max(T, min(most, 4096 if on_cpu else 16384))  # a batch of score()
        ids = np.random.default_rng(1).integers(variant.model.vocab_size, size=size)
        text = SimpleNamespace(tokens=lambda split: ids, separator=0)
        return step, median_seconds(lambda: score(run.model, text, "test"), device) / size


def median_seconds(action, device, times=9, at_most=5.0):
    """The median of so many calls of action(), after one that does not count; fewer where they take long."""
    action()
    seconds = []
    while len(seconds) < times and sum(seconds) < at_most:
        seconds.append(timed(action, device))
    return statistics.median(seconds)
