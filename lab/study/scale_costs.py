"""
What a cheap scale costs beside tiny: the time of a training step, and that of a token that is scored.

    python bench.py --scales deep,long,bpe

The plain GPT of each scale takes turns with tiny's. On one thread of a CPU the clock is the processor's,
which stands still while others have the core. Tokens are random, and scored in batches as large as a study's.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from model import GPT
from nanoheads.common import table
from nanoheads.scoring import score
from nanoheads.timing import median_interval
from lab.study import costs
from lab.study.variants import StudyConfig, VariantBuilder

SCORED = 4096  # tokens in a batch of score()


def plain_of(scale):
    """The plain GPT of a scale, a Variant. UserError: there is no such scale, or its text is not prepared."""
    return replace(VariantBuilder(StudyConfig(scale=scale)).plain, name=scale)


def tokens_of(variant):
    """How many tokens are scored at once."""
    return max(variant.model.block_size, SCORED)


def scorer(variant, device):
    """A function that scores random tokens with a variant's model."""
    model = GPT(variant.model).to(device)
    ids = np.random.default_rng(1).integers(variant.model.vocab_size, size=tokens_of(variant))
    text = SimpleNamespace(tokens=lambda split: ids, separator=0)
    return lambda: score(model, text, "test")


def costs_of(names, device, threads, rounds, steps, training):
    """Rows (name, ms of a step, ratios of steps to tiny's, ratios of scored tokens), a ratio for each round.

    training: train.py's functions, see costs.ready().
    """
    tiny, rows = plain_of("tiny"), []
    _, clock = costs.clock_of(device, threads)
    for name in names:
        each = plain_of(name)
        step = costs.step_time_ratios([each], tiny, device, threads, training, rounds, steps)[name]
        scorers = scorer(tiny, device), scorer(each, device)
        with costs.as_in_a_run(device, threads):
            seconds = costs.taking_turns(scorers, device, clock, rounds)
        tokens = tokens_of(tiny) / tokens_of(each)
        rows.append((name, step["ms"], step["ratios"], [b / a * tokens for a, b in seconds]))
    return rows


def costs_table(rows):
    """The rows of costs_of() as a text: medians over rounds with 95 % intervals."""
    def in_words(ratios):
        return "{:.2f} [{:.2f}, {:.2f}]".format(*median_interval(ratios))
    return table(("scale", "ms a step", "a step over tiny's [95 %]", "a scored token over tiny's [95 %]"),
                 [(name, f"{ms:.1f}", in_words(of_steps), in_words(of_tokens))
                  for name, ms, of_steps, of_tokens in rows], left=(0,))
