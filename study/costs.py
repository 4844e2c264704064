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
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from model import GPT, CausalMask, Window
from nanoheads.common import call_without_compiler, keep_freed_memory
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
FLOP_COUNTS = {}  # {a GPTConfig as text: what count() returns}

if counting := getattr(flop_counter, "_FlopCounterMode", None):  # a private name, which torch may change
    call_without_compiler(counting.__torch_dispatch__)


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
    if key not in FLOP_COUNTS:
        FLOP_COUNTS[key] = count(config)
    total, attention = FLOP_COUNTS[key]
    if config.window and torch.device(device).type == "cuda":
        total -= attention * (1 - share_of_blocks_read(config))
    return round(total)


def count(config):
    """(FLOPs of all matrix products, those of attention), per token of one sequence.

    A small model is counted while it computes, a large one on tensors without memory that count as on the
    CPU: it takes 1.5 s at most, GPT-2's size too. A mechanism that asks for values, by .item() or a mask as
    an index, is counted on tensors that have some.
    """
    try:
        with nullcontext() if is_small(config) else FakeTensorMode():
            counter = counter_of_pass(config)
    except (DataDependentOutputException, DynamicOutputShapeException):
        counter = counter_of_pass(config)
    by_kernel = counter.get_flop_counts()["Global"]
    attention = by_kernel.get(FLASH, 0) + by_kernel.get(FLASH_BACKWARD, 0)
    return counter.get_total_flops() / config.block_size, attention / config.block_size


def counter_of_pass(config):
    """The counter of FLOPs after a forward and a backward pass of one sequence."""
    gpt = GPT(config).train()
    ids = torch.zeros(1, config.block_size + 1, dtype=torch.long)
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        out = gpt(ids[:, :-1], ids[:, 1:])
        sum(out.aux.values(), out.loss).backward()
    return counter


def share_of_blocks_read(config):
    """The share of causal attention's blocks that FlexAttention reads under a config's window."""
    mask = (Window if config.window else CausalMask)(config).block_mask(config.block_size, "cpu")
    rows = mask.kv_num_blocks.size(-1)
    blocks = mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()
    return blocks.item() / (rows * (rows + 1) / 2)


# ---- the time of a step ----

ROUNDS, STEPS = 11, 4  # of timing, and steps of each side in a round


@contextmanager
def run_settings(device, threads):
    """Inside, threads, precision and the handling of freed memory are those of a run."""
    n_threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(threads)
    if torch.device(device).type == "cuda":
        torch.set_float32_matmul_precision("high")
    if torch.device(device).type == "cpu":
        keep_freed_memory()  # without it the logits of 4,096 byte pairs took 1.7 times as long
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)
        torch.set_float32_matmul_precision(precision)


def step_time(model, plain, device, threads, training):
    """(median, low, high) of the time of a model's training step over the plain GPT's, with a 95 % interval.

    Both take turns, STEPS steps at a time, so that other work on the machine hits both. One thread on a CPU
    is timed by its processor time, which stands still while others have the core: at a load of twice the
    cores the intervals were a quarter as wide. training: train.py, whose steps these are.
    """
    clock = time.process_time if torch.device(device).type == "cpu" and threads == 1 else time.perf_counter
    with run_settings(device, threads):
        # in a run it is the one model that is compiled; after several, torch would run the next one eager
        torch._dynamo.reset()
        sides = [stepper_of(side, device, training) for side in (plain, model)]
        for take_steps in sides:
            take_steps()  # compilation, allocation, caches
        rounds = [[time_action(take_steps, device, clock) for take_steps in sides] for _ in range(ROUNDS)]
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # the next runs share this GPU
    return median_interval([seconds / plain_seconds for plain_seconds, seconds in rounds])


def prepare_run(model, rows, device, training):
    """(a Run of train.py, x and y [rows, T]) to time training steps with, on random tokens."""
    gpt, shape = GPT(model.config).to(device), (rows, model.config.block_size + 1)
    ids = torch.randint(model.config.vocab_size, shape, device=device)
    return training.ready_to_step(gpt, model.training, Process(device)), ids[:, :-1], ids[:, 1:]


def stepper_of(model, device, training):
    """A function that trains a model for STEPS steps."""
    run, x, y = prepare_run(model, model.training.batch_size * model.training.grad_accum, device, training)

    def take_steps():
        for _ in range(STEPS):
            training.training_step(run, x, y)
    return take_steps


# ---- the seconds of a run ----

OVERHEAD_SECONDS = 5.0  # of a run: starting Python, importing torch, looking for leaks, writing files
PROBE_FLOPS = 2e11    # of a step that is timed on a CPU: some seconds


def seconds_of_run(model, device, threads, training, scored_tokens, val_tokens):
    """Seconds of one run, estimated from a probe: its steps, its evaluations and its scoring.

    scored_tokens: how many tokens it is scored on. val_tokens: the size of the validation split, which
    eval_tokens=0 means. The estimate includes other work that the machine does now; it does not include
    compilation, nor what runs at the same time take from each other.
    """
    c = model.training
    seconds_per_step, seconds_per_token = probe(model, device, threads, training)
    evaluations = 1 + -(-c.max_iters // c.eval_interval)  # at step 0, every so often, at the end
    tokens = evaluations * 2 * (c.eval_tokens or val_tokens) + scored_tokens
    return c.max_iters * seconds_per_step + tokens * seconds_per_token + OVERHEAD_SECONDS


def probe(model, device, threads, training):
    """(seconds of a training step, seconds to score a token).

    Where a step is large, a part of its rows is timed, and the step's time is in proportion to its rows.
    """
    c, T = model.training, model.config.block_size
    on_cpu = torch.device(device).type == "cpu"
    max_tokens = int(PROBE_FLOPS / executed_flops(model.config)) if on_cpu else 1 << 30
    rows = max(1, min(c.batch_size, max_tokens // T))
    portions = c.batch_size * c.grad_accum / rows
    with run_settings(device, threads):
        without_accumulation = SimpleNamespace(config=model.config, training=replace(c, grad_accum=1))
        run, x, y = prepare_run(without_accumulation, rows, device, training)
        seconds = median_seconds(lambda: training.training_step(run, x, y), device)
        if portions > 1:  # only the last portion is followed by an update
            seconds += (portions - 1) * median_seconds(lambda: training.forward_backward(run, x, y), device)
        size = max(T, min(max_tokens, 4096 if on_cpu else 16384))  # a batch of score()
        ids = np.random.default_rng(1).integers(model.config.vocab_size, size=size)
        text = SimpleNamespace(tokens=lambda split: ids, first=0)
        return seconds, median_seconds(lambda: score(run.model, text, "test"), device) / size


def median_seconds(action, device, calls=9, max_seconds=5.0):
    """The median of these calls of action(), after a first that does not count; fewer if they take long."""
    action()
    seconds = []
    while len(seconds) < calls and sum(seconds) < max_seconds:
        seconds.append(time_action(action, device))
    return float(np.median(seconds))
