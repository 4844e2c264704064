"""Dynamic heads, registered as what they add to training: see nanoheads/extensions.py."""

from nanoheads.extensions import Extension, register
from lab.heads import config


def start(run, state):
    """The Controller of a run, from the read checkpoint that it goes on from, or {}."""
    from lab.heads import controller  # only here: most runs measure no heads
    return controller.start(run, state)


register(Extension(
    name="controller", keys=config.ControllerConfig, is_on=lambda training: training.dynamic_heads,
    problems=config.controller_conflicts, problems_of_model=config.problems_of_model,
    chooses_heads=config.chooses_heads, new_model=config.new_model, start=start, files=("policy_rules",),
    # the name of learned agency has the heads measured, from which its states are predicted
    set_with={"agency_learned": dict(controller_log=True)}))
