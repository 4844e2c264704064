"""A study in so many minutes: what fits is what was planned, and what is left out is said."""

from dataclasses import replace

import pytest

from nanoheads.common import UserError
from lab.study.budget import fitted
from lab.study.variants import StudyConfig

STEPS = 960


def seconds(config):
    """A made-up clock: 30 s a run at all steps, a variant and a plain GPT with each seed."""
    runs = 2 * len(config.seeds) + 3 * len(config.budgets) + 10 * config.screen + 20 * config.tune_lr
    share = (config.tokens_per_param or 20) / 20 * config.settings.get("max_iters", STEPS) / STEPS
    return 30 * runs * share


def study(**keys):
    return StudyConfig(**{"mechanisms": ["xsa"], "seeds": [1, 2, 3, 4, 5], "budgets": [0.7], **keys})


def test_what_fits_stays_as_it_is():
    config = study(minutes=7)
    found, line = fitted(config, seconds, STEPS)
    assert found == config
    assert line == "7 minutes: all of it fits, 5 seeds, 960 steps a run; about 6.5 minutes"


def test_a_line_of_one_seed_and_one_minute_has_no_plurals():
    found, line = fitted(study(minutes=1, seeds=[1], budgets=[]), seconds, STEPS)
    assert line == "1 minute: all of it fits, 1 seed, 960 steps a run; about 1.0 minutes"
    _, line = fitted(study(minutes=1, seeds=[1]), seconds, STEPS)
    assert line.startswith("1 minute: 1 seed of 1, 960 steps a run; without other budgets")
    _, line = fitted(study(minutes=1, seeds=[1], budgets=[]), seconds, 1)
    assert "1 seed, 1 step a run" in line


def test_first_what_is_not_the_comparison_goes_then_seeds():
    found, line = fitted(study(minutes=5, screen=True, tune_lr=True), seconds, STEPS)
    assert (found.seeds, found.screen, found.tune_lr, found.budgets) == ([1, 2, 3, 4, 5], False, False, [])
    assert line == ("5 minutes: 5 seeds of 5, 960 steps a run; without the screening, the search for rates, "
                    "other budgets; about 5.0 minutes")
    found, line = fitted(study(minutes=4), seconds, STEPS)
    assert found.seeds == [1, 2, 3, 4] and "4 seeds of 5, 960 steps a run; without other budgets" in line


def test_then_steps_go_and_never_below_three_seeds():
    found, line = fitted(study(minutes=1.5), seconds, STEPS)
    assert found.seeds == [1, 2, 3] and found.settings == {"max_iters": 480}
    assert "3 seeds of 5, 480 of 960 steps a run" in line and seconds(found) <= 90
    # a study by tokens has them cut in the same proportion
    found, _ = fitted(study(minutes=1.5, tokens_per_param=20.0), seconds, STEPS)
    assert found.tokens_per_param == pytest.approx(10) and "max_iters" not in found.settings


def test_a_variant_with_steps_of_its_own_is_shortened_as_the_plain_gpt_is():
    found, _ = fitted(study(minutes=1.5, variants={"long": dict(max_iters=2000), "gate": dict(xsa=True)}),
                      seconds, STEPS)
    steps = round(2000 * found.settings["max_iters"] / STEPS)
    assert steps < 2000 and found.variants == {"long": dict(max_iters=steps), "gate": dict(xsa=True)}


def test_too_few_minutes_are_refused_with_what_the_least_takes():
    words = "^minutes=0.2 are too few: 3 seeds at 10% of the steps take about 0.3 minutes$"
    with pytest.raises(UserError, match=words):
        fitted(study(minutes=0.2), seconds, STEPS)


def test_of_two_seeds_none_goes():
    found, _ = fitted(study(minutes=1, seeds=[1, 2]), seconds, STEPS)
    assert found.seeds == [1, 2] and found.settings == {"max_iters": 480}
    assert replace(found, settings={}, budgets=[0.7]) == study(minutes=1, seeds=[1, 2])


def test_a_challenge_in_so_many_minutes_loses_seeds_alone():
    """It has no other budgets that could go first."""
    config = StudyConfig(mechanism="xsa", screen=False, minutes=12)
    found, line = fitted(config, seconds, STEPS)
    assert found.seeds == [*range(1, 13)] and found.budgets == []
    assert line == "12 minutes: 12 seeds of 15, 960 steps a run; about 12.0 minutes"
