"""The memory of a training step by calculation, against what a CPU allocates; what to lower, in words."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import train
from model import GPT, MECHANISMS, GPTConfig
from nanoheads import memory
from nanoheads.config import TrainConfig
from nanoheads.memory import advice, memory_lines, rows_at_once, step_memory
from nanoheads.optim import precision
from nanoheads.ranks import Process

SIZES = {"small": dict(n_layer=2, n_head=4, n_embd=64, block_size=128),
         "wide": dict(n_layer=3, n_head=4, n_embd=192, block_size=64),
         "long": dict(n_layer=2, n_head=2, n_embd=64, block_size=512)}


def allocated(f):
    """The largest sum of bytes that are allocated at once while f() runs, over those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        f()
    total = largest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            largest = max(largest, total)
    return largest


def model_and_run(rows=4, optimizer=None, dtype="float32", **flags):
    model = GPT(GPTConfig(vocab_size=512, **flags)).train()
    config = TrainConfig(batch_size=rows, optimizer=optimizer, dtype=dtype).for_recipe(model.config.recipe)
    return model, train.ready_to_step(model, config)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    {}, dict(recipe="modern"), dict(recipe="llama"), dict(recipe="modern", checkpoint_activations=True),
    dict(loss_chunks=4), dict(dropout=0.1), MECHANISMS["acag"], MECHANISMS["short_conv"],
    MECHANISMS["constraint_a"], MECHANISMS["unet_concat"]], ids=str)
def test_a_step_allocates_what_was_calculated(flags):
    check_allocated("small", "float32", flags)


@pytest.mark.slow
@pytest.mark.parametrize("size, dtype", [("small", "bfloat16"), ("wide", "float32"), ("long", "bfloat16")])
def test_a_step_of_another_size_or_dtype_allocates_what_was_calculated(size, dtype):
    check_allocated(size, dtype, dict(recipe="modern"))


def check_allocated(size, dtype, flags):
    """Backward frees activations while the weights' gradients come, so both together are never reached."""
    model, run = model_and_run(dtype=dtype, **{**SIZES[size], **flags})
    x = torch.randint(0, 512, (4, model.config.block_size))
    train.training_step(run, x, x)  # makes the optimizers' moments
    need = step_memory(model, run.config, 4, precision(dtype, "cpu")[1])
    found = allocated(lambda: train.forward_backward(run, x, x))
    stored = need.activations + need.backward
    assert 0.75 * stored < found < 1.25 * (stored + need.gradients)
    moments = sum(t.numel() * t.element_size() for optimizer in run.optimizers
                  for state in optimizer.state.values() for t in state.values())
    assert need.optimizers == pytest.approx(moments, rel=0.01)  # but for scorers that have no labels
    assert need.weights == need.gradients == sum(4 * p.numel() for p in model.parameters())


@pytest.mark.slow
def test_activations_grow_with_the_rows_and_a_frozen_trunk_needs_no_gradients():
    model, run = model_and_run(**SIZES["small"])
    one, four = (step_memory(model, run.config, rows, nullcontext()) for rows in (1, 4))
    assert four.activations == pytest.approx(4 * one.activations, rel=0.03) and four[:3] == one[:3]
    assert four.backward == 4 * one.backward == 2 * 4 * 4 * 128 * 512
    for p in model.parameters():
        p.requires_grad_(False)
    frozen = step_memory(model, run.config, 4, nullcontext())
    assert frozen.gradients == frozen.optimizers == 0 and frozen.activations < 0.01 * four.activations


def test_a_model_is_as_before_when_its_memory_could_not_be_counted(monkeypatch):
    model, run = model_and_run(**SIZES["small"], checkpoint_activations=True)
    count = iter([1000])
    monkeypatch.setattr(memory, "stored_for_backward", lambda *args: next(count))
    with pytest.raises(StopIteration):
        step_memory(model, run.config, 1, nullcontext())
    assert model.config.checkpoint_activations is True


def run_on(kind, **keys):
    model, run = model_and_run(**SIZES["small"])
    run.config, run.process = TrainConfig(**keys).for_recipe("gpt2"), SimpleNamespace(kind=kind, world=1)
    return run


def test_a_small_model_on_a_cpu_says_nothing_and_a_larger_one_does(monkeypatch):
    run = run_on("cpu", batch_size=8)
    assert memory_lines(run) == []
    monkeypatch.setattr(memory, "SHOWN_FROM", 0)
    line, = memory_lines(run)
    assert line.startswith("a step takes about 0.0 GiB of memory: weights ") and "8 x 128 tokens" in line


@pytest.mark.slow
def test_what_does_not_fit_is_said_with_the_batch_that_does(monkeypatch):
    monkeypatch.setattr(memory, "SHOWN_FROM", 0)
    run = run_on("cpu", batch_size=8, grad_accum=3)
    need = step_memory(run.model, run.config, 8, run.autocast)
    by_rows = need.activations + need.backward
    monkeypatch.setattr(memory, "device_memory", lambda process: need.total - by_rows // 3)
    _, line = memory_lines(run)  # two thirds of the rows fit: five, of which four divide the batch
    assert line.startswith("that is more than the 0.0 GiB of this machine: ")
    assert line.endswith("--batch_size=4 --grad_accum=6 makes the same step in less")
    monkeypatch.setattr(memory, "device_memory", lambda process: need.weights)
    assert memory_lines(run)[1].endswith("lower block_size or n_embd, or set checkpoint_activations=True")


@pytest.mark.parametrize("keys, world, words", [
    (dict(batch_size=12, grad_accum=40), 1, "--batch_size=10 --grad_accum=48 "),
    (dict(batch_size=64), 1, "--batch_size=32 --grad_accum=2 "),
    (dict(batch_size=64), 8, "--batch_size=4 --grad_accum=16 "),
    (dict(batch_size=12, grad_accum=40), 8, "--batch_size=10 --grad_accum=48 "),
    (dict(batch_size=7), 1, "--batch_size=1 --grad_accum=7 "),
    (dict(batch_size=1, grad_accum=7), 1, "lower block_size"),
])
def test_the_advice_keeps_the_step_as_it_is(keys, world, words):
    config = TrainConfig(**keys)
    assert advice(config, world).startswith(words)
    if words.startswith("--"):
        batch, accum = (int(word.split("=")[1]) for word in words.split())
        assert batch * accum == config.batch_size * config.grad_accum and accum % world == 0
        assert batch < rows_at_once(config, world)


def test_a_process_without_a_gpu_counts_the_machines_memory():
    assert memory.device_memory(Process()) == memory.memory_of_machine() > 0
