"""
The settings of dynamic heads, which are measured, gated, pruned and grown while a model trains, and the
checks of these settings. What the keys turn on is in controller.py.
"""

from dataclasses import dataclass, replace
from typing import Literal, Optional

from nanoheads.common import UserError
from nanoheads.mechanism import flag
from lab.heads.rules import Rules


@dataclass
class ControllerConfig:
    controller: Optional[Literal["rules", "ann", "rl"]] = flag(
        None, "what moves the gates of sentinel: rules, a small network (ann), or reinforcement learning "
              "(rl); None: nothing",
        section="controller: measures the heads between steps, and moves, removes or inserts them")
    controller_log: bool = flag(False, "measure the heads, also if nothing moves them")
    controller_interval: int = flag(100, "steps between measurements", at_least=1)
    controller_tokens: int = flag(
        2048, "tokens of train on which the heads are measured, always the same", at_least=1)
    controller_heldout: int = flag(
        2048, "tokens of val that decide whether a change of heads stays, always the same", at_least=1)
    controller_average: float = flag(
        0.7, "weight of the past in the moving averages of what is measured", at_least=0, below=1)
    controller_warmup: int = flag(3, "number of measurements before anything moves", at_least=0)
    controller_patience: int = flag(
        3, "number of measurements in a row that a reason to act must last", at_least=1)
    controller_step: float = flag(0.5, "largest change of a gate's logit at one measurement", at_least=0)
    controller_bound: float = flag(
        6.0, "a gate's logit is not moved above this, or below minus this", above=0)
    controller_entropy: float = flag(0.8, "rules: a gate sinks while the entropy of its head is above this")
    controller_gradient: float = flag(
        0.3, "rules: a gate sinks a little while its gradient is below this share of its layer's", at_least=0)
    controller_cost: float = flag(1e-3, "ann, rl: nats per token that a head must be worth", at_least=0)
    sparsity_warmup: int = flag(0, "steps over which sentinel_coef rises from 0", at_least=0)

    prune_gate: float = flag(
        0.0, "a head whose gate stays below this is removed for good; 0: never", at_least=0,
        section="pruning while training")
    prune_floor: int = flag(1, "number of heads that every layer keeps", at_least=0)
    prune_margin: float = flag(
        0.01, "a removal that costs more nats than this on the held-out tokens is undone", at_least=0)

    grow_from: Optional[int] = flag(
        None, "number of heads in each layer at the start; None: n_head",
        section="growth: heads are inserted, up to n_head in each layer")
    grow_heads: int = flag(0, "number of heads inserted into a layer at once; 0: never", at_least=0)
    grow_delta: float = flag(
        0.002, "heads are inserted if the held-out loss falls by less than this, in nats, within "
               "controller_patience measurements", at_least=0)
    grow_used: float = flag(
        0.5, "and only into layers in which every head sends at least this share of the mean head")
    grow_ramp: int = flag(100, "steps over which the gate of a new head opens", at_least=1)

    policy: bool = flag(
        False, "let rules move the states of agency's heads",
        section="agency's policy: states that follow from the metrics")
    policy_budget: float = flag(
        1.0, "share of the heads that may be at work; the least important are withdrawn", above=0, at_most=1)
    policy_unit: Literal["head", "layer"] = flag(
        "head", "what is withdrawn for the budget: single heads, or whole layers")
    policy_overloaded: float = flag(
        1.5, "a head becomes overloaded if it sends more than this multiple of the mean of its layer's heads")
    policy_conflict: float = flag(
        -0.1, "a head becomes misaligned if the cosine between its gradients on two texts is below this")
    policy_entropy: float = flag(
        0.95, "a head is withdrawn if its entropy is above this and it sends less than half of the mean")
    policy_dwell: int = flag(3, "number of measurements that a state lasts at least", at_least=1)
    policy_no_consent: list[str] = flag([], 'heads without consent, each as "layer.head"')
    policy_rules: Optional[str] = flag(
        None, "a JSON file that says who may change which states of which heads")

    @property
    def dynamic_heads(self):
        """Whether heads are measured or changed during a run."""
        return bool(self.controller or self.controller_log or self.prune_gate or self.grow_heads
                    or self.policy or self.sparsity_warmup)


# ---- what does not go together ----

def controller_conflicts(model, config):
    """What is wrong with these keys of a TrainConfig for a model of this GPTConfig, as sentences."""
    bad = []
    defaults = {name: f.default for name, f in ControllerConfig.__dataclass_fields__.items()}
    for what, on in (("controller", config.dynamic_heads), ("prune", config.prune_gate),
                     ("policy", config.policy), ("grow", config.grow_heads)):
        loose = [key for key, default in defaults.items() if key.startswith(f"{what}_") and not on
                 and key not in ("grow_from", "grow_heads", "prune_gate")
                 and getattr(config, key) not in (default, [])]
        bad += [f"{key}={getattr(config, key)!r} means nothing without {what}: see --help"
                for key in loose]
    for key in ("controller", "prune_gate", "sparsity_warmup"):
        if getattr(config, key) and not model.sentinel:
            bad.append(f"{key}={getattr(config, key)!r} needs gates: set sentinel")
    if config.policy and not model.agency:
        bad.append("policy needs states: set agency")
    if model.agency_learned and not config.dynamic_heads:
        bad.append("agency_learned predicts from what is measured of the heads: set controller_log")
    if config.policy and model.agency_learned:
        bad.append("policy and agency_learned both move the states: set one of them")
    if config.prune_floor > model.n_head:
        bad.append(f"prune_floor={config.prune_floor} is above n_head={model.n_head}")
    if config.grow_from is not None and not 1 <= config.grow_from <= model.n_head:
        bad.append(f"grow_from={config.grow_from} must be from 1 to n_head={model.n_head}")
    if config.grow_from is not None and config.grow_from % model.unit:
        bad.append(f"grow_from={config.grow_from} must be a multiple of {model.unit}, since so many heads go "
                   "together")
    if config.grow_from is not None and model.head_ids is not None:
        bad.append("grow_from and head_ids both say which heads there are at the start: set one")
    if config.grow_heads and config.grow_from is None and model.head_ids is None and not config.prune_gate:
        bad.append(f"grow_heads={config.grow_heads}: all {model.n_head} heads are there from the start; "
                   "set grow_from, the number to begin with")
    if config.dynamic_heads and model.block_size < 2:
        bad.append("block_size must be at least 2 to measure heads")
    if config.policy:
        bad += consent_conflicts(model, config)
    if config.policy_rules:
        try:
            Rules.read(config.policy_rules)
        except UserError as e:
            bad.append(str(e))
    if config.freeze_trunk and config.dynamic_heads:
        bad.append("freeze_trunk=True: heads are measured by gradients of the trunk, which has none")
    return bad


def consent_conflicts(model, config):
    """What is wrong with policy_no_consent: heads that the model does not have."""
    bad = []
    for place in config.policy_no_consent:
        layer, _, head = place.partition(".")
        if not (layer.isdecimal() and int(layer) < model.n_layer and head.isdecimal()):
            bad.append(f"policy_no_consent: {place!r} must be layer.head, "
                       f"layers from 0 to {model.n_layer - 1}")
        elif int(head) >= model.n_head + model.added_heads(int(layer)):
            bad.append(f"policy_no_consent: {place!r}: block {layer} has no head {head}")
    return bad


# ---- which heads there are ----

def new_model(model_config, config):
    """The GPTConfig of a new model, which begins with grow_from heads in each layer."""
    if config.grow_from is None:
        return model_config
    return replace(model_config, head_ids=[list(range(config.grow_from))] * model_config.n_layer)
