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
        None, "what moves the sentinel gates; None: nothing",
        section="controller: dynamic heads, measured, moved, pruned, grown between steps")
    controller_log: bool = flag(False, "measure the heads, whatever moves them")
    controller_interval: int = flag(100, "steps between measurements", at_least=1)
    controller_tokens: int = flag(
        2048, "of train, always the same: what the heads are measured on", at_least=1)
    controller_heldout: int = flag(
        2048, "of val, always the same: what decides on a change of heads", at_least=1)
    controller_average: float = flag(
        0.7, "weight of the past in the metrics' moving averages", at_least=0, below=1)
    controller_warmup: int = flag(3, "measurements before anything moves", at_least=0)
    controller_patience: int = flag(3, "measurements in a row that a reason to act must last", at_least=1)
    controller_step: float = flag(0.5, "the largest change of a gate's logit at once", at_least=0)
    controller_bound: float = flag(6.0, "logits are not moved beyond this, up or down", above=0)
    controller_entropy: float = flag(0.8, "rules: a gate sinks while its head's entropy is above")
    controller_gradient: float = flag(
        0.3, "rules: and a little where its gradient is below this x its layer's", at_least=0)
    controller_cost: float = flag(1e-3, "ann, rl: nats a token that a head must be worth", at_least=0)
    sparsity_warmup: int = flag(0, "steps over which sentinel_coef rises from 0", at_least=0)

    prune_gate: float = flag(
        0.0, "heads whose gate stays below this are dropped for good; 0: never", at_least=0,
        section="pruning while training")
    prune_floor: int = flag(1, "heads that every layer keeps", at_least=0)
    prune_margin: float = flag(
        0.01, "nats on the held-out text: a drop that costs more is taken back", at_least=0)

    grow_from: Optional[int] = flag(
        None, "heads in each layer at the start; None: n_head",
        section="growth: into the free numbers below n_head")
    grow_heads: int = flag(0, "heads inserted at once into a layer; 0: never", at_least=0)
    grow_delta: float = flag(
        0.002, "nats that the held-out loss must fall within patience, else grow", at_least=0)
    grow_used: float = flag(0.5, "where no head sends less than this x an equal share of its layer")
    grow_ramp: int = flag(100, "steps over which a new head's gate opens", at_least=1)

    policy: bool = flag(
        False, "move the states and consent of agency's heads",
        section="agency's policy: states that follow from the metrics")
    policy_budget: float = flag(
        1.0, "part of the heads that may be at work; the least important withdraw", above=0, at_most=1)
    policy_unit: Literal["head", "layer"] = flag("head", "who withdraws: single heads, or all of a layer")
    policy_overloaded: float = flag(1.5, "overloaded: sends this x the mean of its layer's heads at work")
    policy_conflict: float = flag(-0.1, "misaligned: cosine of its gradients on two texts is below")
    policy_entropy: float = flag(0.95, "withdrawn: entropy above, below half a share sent")
    policy_dwell: int = flag(3, "measurements that a state lasts at least", at_least=1)
    policy_no_consent: list[str] = flag([], '"layer.head": consent withheld')
    policy_rules: Optional[str] = flag(None, "a JSON file: who may change which states of which heads")

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
