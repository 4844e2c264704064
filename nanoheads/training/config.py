"""What a run is configured with, and what does not go together."""

from dataclasses import dataclass, field
from typing import Literal, Optional

from model import ConstraintHeads
from nanoheads.common import UserError
from nanoheads.training.rules import Rules


@dataclass
class ControllerConfig:
    # ---- dynamic heads: measured, moved, pruned, grown between steps ----
    controller: Optional[Literal["rules", "ann", "rl"]] = None  # what moves the sentinel gates; None: nothing
    controller_log: bool = False         # measure the heads, whatever moves them
    controller_interval: int = 100       # steps between measurements
    controller_tokens: int = 2048        # of train, always the same: what the heads are measured on
    controller_heldout: int = 2048       # of val, always the same: what decides on a change of heads
    controller_average: float = 0.7      # weight of the past in the metrics' moving averages
    controller_warmup: int = 3           # measurements before anything moves
    controller_patience: int = 3         # measurements in a row that a reason to act must last
    controller_step: float = 0.5         # the largest change of a gate's logit at once
    controller_bound: float = 6.0        # logits are not moved beyond this, up or down
    controller_entropy: float = 0.8      # rules: a gate sinks while its head's entropy is above
    controller_gradient: float = 0.3     # rules: and a little where its gradient is below this x its layer's
    controller_cost: float = 1e-3        # ann, rl: nats a token that a head must be worth
    sparsity_warmup: int = 0             # steps over which sentinel_coef rises from 0
    # ---- pruning while training ----
    prune_gate: float = 0.0              # heads whose gate stays below this are dropped for good; 0: never
    prune_floor: int = 1                 # heads that every layer keeps
    prune_margin: float = 0.01           # nats on the held-out text: a drop that costs more is taken back
    # ---- growth: into the free numbers below n_head ----
    grow_from: Optional[int] = None      # heads in each layer at the start; None: n_head
    grow_heads: int = 0                  # heads inserted at once into a layer; 0: never
    grow_delta: float = 0.002            # nats that the held-out loss must fall within patience, else grow
    grow_used: float = 0.5               # where no head sends less than this x an equal share of its layer
    grow_ramp: int = 100                 # steps over which a new head's gate opens
    grow_stack: bool = False             # a control: once, on a plateau, the blocks are doubled instead
    # ---- agency's policy: states that follow from the metrics ----
    policy: bool = False                 # move the states and consent of agency's heads
    policy_budget: float = 1.0           # part of the heads that may be at work; the least important withdraw
    policy_unit: Literal["head", "layer"] = "head"  # who withdraws: single heads, or all of a layer
    policy_overloaded: float = 1.5       # overloaded: sends this x an equal share of its layer
    policy_conflict: float = -0.1        # misaligned: cosine of its gradients on two texts is below
    policy_entropy: float = 0.95         # withdrawn: entropy above, below half a share sent
    policy_dwell: int = 3                # measurements that a state lasts at least
    policy_no_consent: list[str] = field(default_factory=list)  # "layer.head": consent withheld
    policy_rules: Optional[str] = None   # a JSON file: who may change which states of which heads

    def controller_problems(self):
        """Yield what is wrong with these keys alone, sentence by sentence."""
        for key in ("controller_interval", "controller_tokens", "controller_heldout", "controller_patience",
                    "policy_dwell", "grow_ramp"):
            if getattr(self, key) < 1:
                yield f"{key}={getattr(self, key)} must be at least 1"
        for key in ("controller_warmup", "controller_step", "controller_cost", "prune_margin", "prune_gate",
                    "grow_heads", "grow_delta", "controller_gradient", "prune_floor", "sparsity_warmup"):
            if getattr(self, key) < 0:
                yield f"{key}={getattr(self, key)} must not be negative"
        if not 0 <= self.controller_average < 1:
            yield f"controller_average={self.controller_average} must be in [0, 1)"
        if not 0 < self.policy_budget <= 1:
            yield f"policy_budget={self.policy_budget} must be above 0 and at most 1, a part of the heads"
        if not self.controller_bound > 0:
            yield f"controller_bound={self.controller_bound} must be positive"

    @property
    def dynamic_heads(self):
        """Whether heads are measured or changed during a run."""
        return bool(self.controller or self.controller_log or self.prune_gate or self.grow_heads
                    or self.grow_stack or self.policy or self.sparsity_warmup)


def controller_conflicts(model, config):
    """What is wrong with the controller's keys beside a GPTConfig, as sentences."""
    bad = [*config.controller_problems()]
    defaults = {name: f.default for name, f in ControllerConfig.__dataclass_fields__.items()}
    for what, on in (("controller", config.dynamic_heads), ("prune", config.prune_gate),
                     ("policy", config.policy), ("grow", config.grow_heads or config.grow_stack)):
        loose = [key for key, default in defaults.items() if key.startswith(f"{what}_") and not on
                 and key not in ("grow_from", "grow_heads", "grow_stack", "prune_gate")
                 and getattr(config, key) not in (default, [])]
        bad += [f"{key}={getattr(config, key)!r} means nothing without {what}: see --help"
                for key in loose]
    for key in ("controller", "prune_gate", "sparsity_warmup"):
        if getattr(config, key) and not model.sentinel:
            bad.append(f"{key}={getattr(config, key)!r} needs gates: set sentinel")
    if config.policy and not model.agency:
        bad.append("policy needs states: set agency")
    if config.policy and model.agency_learned:
        bad.append("policy and agency_learned both move the states: set one of them")
    if model.agency_learned and not config.dynamic_heads:
        bad.append("agency_learned predicts from what is measured of the heads: set controller_log")
    if config.prune_floor > model.n_head:
        bad.append(f"prune_floor={config.prune_floor} is above n_head={model.n_head}")
    if config.grow_from is not None and not 1 <= config.grow_from <= model.n_head:
        bad.append(f"grow_from={config.grow_from} must be from 1 to n_head={model.n_head}")
    if config.grow_from is not None and model.head_ids is not None:
        bad.append("grow_from and head_ids both say which heads there are at the start: set one")
    if config.grow_heads and config.grow_from is None and model.head_ids is None and not config.prune_gate:
        bad.append(f"grow_heads={config.grow_heads}: all {model.n_head} heads are there from the start; "
                   "set grow_from, the number to begin with")
    if config.grow_stack and (config.grow_heads or model.unet or model.constraint_names
                              or model.window_layers is not None):
        bad.append("grow_stack doubles equal blocks: not with grow_heads, unet, constraint_names or "
                   "window_layers")
    if config.dynamic_heads and model.block_size < 2:
        bad.append("block_size must be at least 2 to measure heads")
    for place in config.policy_no_consent:
        layer, dot, head = place.partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal() and int(layer) < model.n_layer):
            bad.append(f"policy_no_consent: {place!r} must be layer.head, "
                       f"layers from 0 to {model.n_layer - 1}")
        elif int(head) >= model.n_head + ConstraintHeads.count(model, int(layer)):
            bad.append(f"policy_no_consent: {place!r}: block {layer} has no head {head}")
    if config.policy_rules:
        try:
            Rules.read(config.policy_rules)
        except UserError as e:
            bad.append(str(e))
    return bad
