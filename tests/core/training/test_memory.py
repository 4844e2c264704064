"""The calculated memory of a training step, compared with what a CPU allocates; what to lower, in words."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import train
from model import GPT, MECHANISMS, GPTConfig
from nanoheads.config import TrainConfig
from nanoheads.memory import advice, memory_lines, rows_at_once, step_memory
from nanoheads.optim import precision

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


def run_of(size="small", rows=4, dtype="float32", vocab_size=512, grad_accum=1, **flags):
    """A run that can take steps."""
    model = GPT(GPTConfig(vocab_size=vocab_size, **{**SIZES[size], **flags})).train()
    config = TrainConfig(batch_size=rows, dtype=dtype, grad_accum=grad_accum)
    return train.ready_to_step(model, config.for_recipe(model.config.recipe))


@pytest.mark.slow
@pytest.mark.parametrize("size, dtype, flags", [
    ("small", "float32", {}), ("small", "float32", dict(recipe="modern", checkpoint_activations=True)),
    ("small", "float32", dict(loss_chunks=4)),
    ("wide", "float32", dict(recipe="modern") | MECHANISMS["acag"]),
    ("long", "bfloat16", dict(recipe="llama"))], ids=str)
def test_a_step_allocates_what_was_calculated(size, dtype, flags):
    """Backward frees activations while the weights' gradients come, so both together are never reached."""
    run = run_of(size, dtype=dtype, **flags)
    model = run.model
    x = torch.randint(0, 512, (4, model.config.block_size))
    train.training_step(run, x, x)  # makes the optimizers' moments
    need = step_memory(model, run.config, 4, precision(dtype, "cpu")[1])
    found = allocated(lambda: train.forward_backward(run, x, x))
    stored = need.activations + need.backward
    assert 0.75 * stored < found < 1.25 * (stored + need.gradients)
    moments = sum(t.numel() * t.element_size() for optimizer in run.optimizers
                  for state in optimizer.state.values() for t in state.values())
    assert need.optimizers == pytest.approx(moments, rel=0.01)
    assert need.weights == need.gradients == sum(4 * p.numel() for p in model.parameters())


@pytest.mark.slow
def test_activations_grow_with_the_rows_and_a_frozen_trunk_needs_no_gradients():
    run = run_of()
    one, four = (step_memory(run.model, run.config, rows, nullcontext()) for rows in (1, 4))
    assert four.activations == pytest.approx(4 * one.activations, rel=0.03) and four[:3] == one[:3]
    assert four.backward == 4 * one.backward == 2 * 4 * 4 * 128 * 512
    for p in run.model.parameters():
        p.requires_grad_(False)
    frozen = step_memory(run.model, run.config, 4, nullcontext())
    assert frozen.gradients == frozen.optimizers == 0 and frozen.activations < 0.01 * four.activations


@pytest.mark.slow
def test_a_large_model_says_what_it_takes_and_what_fits(monkeypatch):
    """On machines with so much memory that two thirds of the rows fit, and with less than the weights."""
    assert memory_lines(run_of(rows=8)) == []  # a small one starts at once
    run = run_of(rows=8, grad_accum=3, n_embd=128, vocab_size=40_000)
    line, = memory_lines(run)
    need = step_memory(run.model, run.config, 8, run.autocast)
    assert line.startswith(f"a step takes about {need.total / 2**30:.1f} GiB of memory: weights ")
    assert line.endswith("for 8 x 128 tokens at once")
    by_rows = need.activations + need.backward
    run.process = SimpleNamespace(kind="cuda", world=1, device=0)
    for there, words in ((need.total - by_rows // 3, "--batch_size=4 --grad_accum=6 makes the same step in"),
                         (need.weights, "lower block_size or n_embd, or set checkpoint_activations=True")):
        monkeypatch.setattr(torch.cuda, "get_device_properties",
                            lambda device: SimpleNamespace(total_memory=there))
        _, line = memory_lines(run)
        assert line.startswith("that is more than the ") and words in line


@pytest.mark.parametrize("keys, world, words", [
    (dict(batch_size=12, grad_accum=40), 1, "--batch_size=10 --grad_accum=48 "),
    (dict(batch_size=64), 8, "--batch_size=4 --grad_accum=16 "),
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
