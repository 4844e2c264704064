"""
What a variant costs: its FLOPs, compared with a count by hand, and the time of its step over the plain GPT's.
"""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers import ROOT
from runs import TINY_MODEL

import train
from model import GPTConfig
from nanoheads.config import TrainConfig
from study import costs


def model_of(**flags):
    """What costs.py takes for a model."""
    config = GPTConfig(**{**TINY_MODEL, "block_size": 64, **flags})
    training = TrainConfig(batch_size=2, max_iters=10, eval_interval=5, eval_tokens=128, device="cpu")
    return SimpleNamespace(config=config, training=training.for_recipe(config.recipe), tokens=1280)


def test_flops_are_those_of_matrix_products_and_attention():
    """Two for each weight of a matrix forward, four backward; attention has two products of [T, T] forward,
    and in the backward pass of a fused kernel five, of which one is the scores once more."""
    c = model_of().config
    matrices = c.n_layer * 12 * c.n_embd ** 2 + c.vocab_size * c.n_embd
    attention = (4 + 10) * c.block_size * c.n_embd * c.n_layer
    assert costs.executed_flops(c) == pytest.approx(6 * matrices + attention, rel=0.08)
    assert costs.flops(model_of()) == 1280 * costs.executed_flops(c)
    assert costs.executed_flops(model_of(n_layer=2).config) > costs.executed_flops(c)
    c = model_of(block_size=512, window=128).config  # which a GPU alone leaves out of its products
    assert costs.executed_flops(c, "cuda") < costs.executed_flops(c)


@pytest.mark.slow
def test_the_time_of_a_step_is_over_the_plain_gpts():
    plain = model_of(n_layer=2)
    median, low, high = costs.step_time(plain, plain, "cpu", 1, train)
    assert low <= median <= high and 0.8 < median < 1.25
    median, low, _ = costs.step_time(model_of(n_layer=8), plain, "cpu", 1, train)
    assert low > 1.5


def test_a_probe_gives_the_seconds_of_a_run():
    seconds = costs.seconds_of_run(model_of(), "cpu", 1, train, scored_tokens=1000, val_tokens=2000)
    assert costs.OVERHEAD_SECONDS < seconds < costs.OVERHEAD_SECONDS + 10


def test_counting_does_not_wait_for_torchs_compiler():
    """In a process of its own: other tests have imported it."""
    code = f"""
import sys
from model import GPTConfig
from study import costs
costs.executed_flops(GPTConfig(**{TINY_MODEL!r}))
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "False\n", done.stderr
