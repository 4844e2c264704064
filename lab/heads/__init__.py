"""
Adds dynamic heads to training: heads that are measured, gated, pruned and grown between its steps. See
nanoheads/extensions.py.
"""

from nanoheads.extensions import EXTENSIONS, Extension
from lab.heads import config


def start(run, state):
    """The Controller of a run, from the read checkpoint that it goes on from, or {}."""
    from lab.heads import controller  # only here: most runs measure no heads
    return controller.start(run, state)


EXTENSIONS.append(Extension(
    name="controller", keys=config.ControllerConfig, is_on=lambda training: training.dynamic_heads,
    problems=config.controller_conflicts, new_model=config.new_model, start=start, files=("policy_rules",),
    # learned states are predicted from what is measured of the heads
    set_with={"agency_learned": dict(controller_log=True)}))
