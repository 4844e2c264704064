"""
What a mechanism is: a class with its flags, formula and checks. model.py has those that come with the
repository; a file of one's own is read by --mechanism=mine.py (docs/add-a-mechanism.md).
"""

import copy
import functools
import math
import typing
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple, Optional

import torch
from torch import nn

# ---- flags: a field says what it is and which values it takes, and one function checks them all ----

# words of a flag's range -> does a value keep to it?
RANGES = {
    "at_least": ("at least", lambda value, limit: value >= limit),
    "above": ("above", lambda value, limit: value > limit),
    "below": ("below", lambda value, limit: value < limit),
    "at_most": ("at most", lambda value, limit: value <= limit),
}


def flag(default, help="", section="", at_least=None, above=None, below=None, at_most=None):
    """A dataclass field with a default, its line of --help, and a range: flag(4, "blocks", at_least=1).

    None is always allowed, and means that the value follows from other flags. section: a heading in --help,
    above this field and those after it.
    """
    metadata = dict(help=help, section=section, at_least=at_least, above=above, below=below, at_most=at_most)
    if isinstance(default, (list, dict)):  # each config gets one of its own
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@functools.cache
def choices(cls):
    """{name: values that may be chosen} of a dataclass's fields of a Literal type, optional or not."""
    allowed = {}
    for name, hint in typing.get_type_hints(cls).items():
        for t in (hint, *typing.get_args(hint)):
            if typing.get_origin(t) is Literal:
                allowed[name] = typing.get_args(t)
    return allowed


def range_problems(config, names=None, options=None):
    """Yield a sentence for each flag (of these names, None: all) outside of its range or its choices.

    options: the dataclass that has these flags as fields; None: the config's own.
    """
    allowed = choices(options or type(config))
    for f in fields(options or config):
        value = getattr(config, f.name)
        if value is None or names is not None and f.name not in names:
            continue
        if f.name in allowed and value not in allowed[f.name]:
            yield f"{f.name}={value!r} must be one of {', '.join(map(str, allowed[f.name]))}"
            continue
        limits = {key: f.metadata[key] for key in RANGES if f.metadata.get(key) is not None}
        broken = [f"{RANGES[key][0]} {limit}" for key, limit in limits.items()
                  if not RANGES[key][1](value, limit)]
        if broken:
            yield f"{f.name}={value!r} must be {' and '.join(broken)}"


def whole_groups(heads, size):
    """Whether heads, by their numbers, are whole groups of so many: with size=2, 0 and 1, 2 and 3, ..."""
    return {h // size * size + i for h in heads for i in range(size)} == {*heads}


def plain_problems(config):
    """What in the flags of a plain GPT does not go together, sentence by sentence."""
    if config.n_head > 0 and config.head_dim is None and config.n_embd % config.n_head:
        yield f"n_embd={config.n_embd} must be a multiple of n_head={config.n_head}"
    elif config.n_head > 0 and config.pos == "rope" and config.head_size % 2:
        what = "n_embd/n_head" if config.head_dim is None else "head_dim"
        yield f"pos='rope' needs an even head size, {what}={config.head_size}"
    scaling = config.rope_scaling
    if scaling is not None and (len(scaling) != 4 or min(scaling) <= 0 or scaling[1] >= scaling[2]):
        yield f"rope_scaling={scaling} must be four numbers above 0: factor, low, high above low, context"
    if scaling is not None and config.pos != "rope":
        yield f"rope_scaling={scaling} needs pos='rope', not {config.pos!r}"
    if config.qk_scale and not config.qk_norm:
        yield "qk_scale=True needs qk_norm, whose scale it is"
    if config.n_kv_head and config.n_head % config.n_kv_head:
        yield f"n_kv_head={config.n_kv_head} must divide n_head={config.n_head}, into groups of heads"
    if config.qk_max is not None and not config.qk_norm:
        yield f"qk_max={config.qk_max} needs qk_norm, without which nothing bounds the logits"
    every = range(config.n_head)
    if config.head_ids is not None and (len(config.head_ids) != config.n_layer
                                      or any(h != sorted({*h}.intersection(every)) for h in config.head_ids)):
        yield (f"head_ids={config.head_ids} must list, for each of the {config.n_layer} layers, "
               f"heads from 0 to {config.n_head - 1} in order")
    elif config.head_ids is not None and any(not whole_groups(h, config.unit) for h in config.head_ids):
        yield f"head_ids={config.head_ids} must list whole groups of {config.unit} heads, which go together"


# ---- a mechanism ----

CONSTRAINTS = ["reciprocity", "testifiability", "decidability"]  # of the constraint write-up: heads, labels


class HeadAxis(NamedTuple):
    """A tensor with a head axis: what pruning slices."""

    module: nn.Module
    tensor: str         # its name there; where the module has no such tensor, nothing is sliced
    dim: int = 0
    size: int = 1       # entries of one head along dim
    extra: bool = True  # constraint heads come behind the base heads
    parts: int = 1      # how often that is repeated along dim: 3 where q, k and v are stacked
    shared: int = 0     # how many of those parts, the last ones, have a row for each group of heads alone


class Uniform(NamedTuple):
    """An initial value: uniform in (-bound, bound)."""

    bound: float


class Outcome(NamedTuple):
    """What a GPT's forward pass has computed when its last block is done."""

    x: torch.Tensor                   # the final hidden states, [B, T, C]
    predictions: dict                 # "blocks.<i>.<name>" -> what hooks put into heads.predictions
    inputs: dict                      # name -> what GPT.forward() was given for a mechanism, or None
    positions: Optional[torch.Tensor]  # [B, T], what GPT.forward() was given; None: a row is one text
    targets: Optional[torch.Tensor]   # [B, T], -1 where a token is not scored; None: there is no loss
    nats: Optional[torch.Tensor]      # loss of each token, [B, T], where a mechanism has needs_nats
    traces: Optional[dict]            # gets traces of the whole model; None: none are wanted


def no_dropout(config, flag):
    """Yield a sentence where attention dropout is on and `flag` needs a kernel that has none."""
    if config.weight_dropout:
        yield (f"{flag} has no fused kernel with dropout on the attention weights: set attn_dropout=0 "
               "(and on what it is compared with)")


class Mechanism(nn.Module):
    """One change to the heads of a layer, built where its flag is on. A subclass overrides what it changes.

    Weight decay leaves its own parameters alone, but not those of layers inside it. It must not keep `attn`,
    because then two modules would contain each other.
    """

    class Options:
        """Its flags, as annotated fields: the one that turns it on, then details, named <flag>_..."""

    name = ""                # its attribute of the layer, and so the prefix of its parameters
    flag = ""                # the one of its Options that turns it on
    modes = {}               # name -> flags: its entries in MECHANISMS
    # mode -> {flag or parameter (* stands for any text): value} at which it equals the plain GPT. A mode that
    # is missing has no such setting.
    neutral = {}
    # What it reads: "lse" of each attention row, or "shape", which is its entropy and log_p2 too.
    needs_row_stats = None
    needs_spread = False     # and its spread
    detach = False           # no gradient goes into those statistics
    needs_positions = False  # it reads heads.positions or heads.n_keys
    needs_nats = False       # model_losses() reads the loss of each token
    takes = ()               # arguments of GPT.forward() that are for it: heads.inputs has what is given
    scores_added_heads = False  # its score_mod() acts on heads that another mechanism adds, too
    adds_heads = False       # added_heads() is not 0 everywhere. Own mechanisms act before heads are added
    # Its tensors. GPT.init_weights() overwrites what __init__ puts into them.
    starts = {}              # parameter -> number, tensor or Uniform: what does not start as in GPT-2
    per_head = ()            # its tensors with a row for each head, added heads too: pruning slices them
    trace_axes = {}          # trace -> its axes, where they are not those of a gate: see nanoheads/traces.py
    # What it means for pruning and growing.
    in_pairs = False         # heads 0 and 1 belong together, 2 and 3, ...: they are pruned together
    joins_blocks = False     # its part differs from block to block: none can be taken out
    passes_on = False        # others read what its layer's heads hold, not only what the layer sends out
    least_head_size = 1      # it needs heads of so many dimensions
    one_head_size = False    # it needs heads of the same size in all layers
    absorbs = False          # it starts as a constant factor, for which a checkpoint's weights can make up
    no_effect_because = ""   # why a new model of it computes what the plain GPT does, where it is meant to
    # How it is trained, what it costs and what it averages.
    learning_rate = None     # of one between blocks: the key of its rate, where that is not mechanism_lr
    averages = ()            # its flags for means over all tokens of a row, padding included
    attention_cost = 0.0     # FLOPs beyond those of plain attention, as a share of them

    # ---- flags ----

    def __init_subclass__(cls):
        if "Options" in vars(cls):
            cls.Options = dataclass(cls.Options)

    def __init__(self, config=None, attn=None):
        super().__init__()

    @classmethod
    def fields(cls):
        """The names of its fields in GPTConfig."""
        return [f.name for f in fields(cls.Options)]

    @classmethod
    def is_on(cls, config):
        """Whether a model has it."""
        return getattr(config, cls.flag) not in (None, False)

    @classmethod
    def is_idle(cls, config):
        """Whether its parameters act on nothing, by a flag of its own."""
        return False

    @classmethod
    def on(cls, config, layer):
        """Whether block `layer` has it."""
        return cls.is_on(config)

    @classmethod
    def added_heads(cls, config, layer):
        """How many heads it adds to those of block `layer`; see merge_added()."""
        return 0

    @classmethod
    def head_size_in(cls, config, layer):
        """The head size that it gives block `layer`; None: it leaves that as it is."""

    @staticmethod
    def queries_are_keys(config):
        """Whether a layer's projection gives one set of vectors, which are queries and keys; values are then
        slices of its input.
        """
        return False

    @staticmethod
    def needs_one_input(config):
        """Whether it takes a layer's queries, keys and values for projections of one input."""
        return False

    @classmethod
    def model_modules(cls, config):
        """{attribute of the GPT: module} of what it has outside of the layers, for model_losses()."""
        return {}

    @staticmethod
    def settle(config):
        """Set flags that follow from others, once, when a config is made."""

    @staticmethod
    def problems(config):
        """Yield what is wrong with its flags where it is on, sentence by sentence."""
        return ()

    @classmethod
    def training_problems(cls, config, training):
        """Yield what is wrong with its flags, or for want of it, beside a TrainConfig, on or off."""
        return ()

    @classmethod
    def all_problems(cls, config):
        """Yield all that is wrong with its flags: details of what is off, and what goes with no kernel."""
        if cls.is_on(config):
            yield from [*range_problems(config, options=cls.Options)] or cls.problems(config)
            if cls.in_pairs and config.n_head % 2:
                yield f"{cls.flag}=True joins heads in pairs: n_head={config.n_head} is odd"
            if config.head_size < cls.least_head_size:
                yield (f"{cls.flag} needs a head size of at least {cls.least_head_size}: it is "
                       f"{config.head_size}")
            if cls.needs_row_stats:
                yield from no_dropout(config, cls.flag)
            return
        for f in fields(cls.Options):
            value = getattr(config, f.name)
            if f.name != cls.flag and value != f.default:
                yield f"{f.name}={value!r} means nothing while {cls.flag} is off"

    @property
    def changes_scores(self):
        """Whether score_mod() gives a function. A class says so itself where that depends on its flags."""
        return type(self).score_mod is not Mechanism.score_mod

    # ---- tensors ----

    def initial_values(self):
        """`starts`, where it depends on flags."""
        return self.starts

    def check_loaded(self, name):
        """ValueError where what was loaded into its buffers is impossible. name: its path in the model."""

    def head_axes(self):
        """The HeadAxis of each tensor that has one: of `per_head`, where no tensor is more complicated."""
        return [HeadAxis(self, name) for name in self.per_head]

    # ---- training ----

    def at_step(self, config, step):
        """Set what of it depends on the number of a training step, before that step."""

    @classmethod
    def aux_at_step(cls, config, aux, step):
        """The losses `aux` at their weights in a training step."""
        return aux

    # ---- the forward pass ----

    def before_projection(self, attn, heads):
        """Before queries, keys and values are projected: rewrite heads.x, the layer's normed input."""

    def after_projection(self, attn, qkv, heads):
        """After the projection, before QK-norm and RoPE: give back qkv [B, T, 3 * H, D] rewritten."""
        return qkv

    def before_attention(self, attn, heads):
        """Before attention: rewrite heads.q, heads.k, heads.v; add gates and losses that need heads.x alone.

        What it puts into heads.for_later, later layers find in heads.shared by the same name.
        """

    def score_mod(self, attn, heads):
        """What it makes of the attention scores: None, or a function (score, b, h, t, s) -> score.

        It has the signature of FlexAttention's score_mod. score is the scaled logit of query t for key s in
        row b and head h, before the softmax. The numbers are integer tensors that broadcast against it, so a
        function indexes tensors with them, such as rate[h] or c[b, h, s], and computes with them, as in t -
        s. These tensors get gradients; on a GPU each of them may be indexed once in a function, so whoever
        needs one twice captures c and -c, say. t and s count the columns read so far: with a cache the T
        queries are the last ones. It acts on the layer's own heads, and with scores_added_heads on added ones
        too.
        """
        return None

    def after_kernel(self, attn, heads, y, row_stats):
        """Right after the attention kernel, before any after_attention(): give back the heads' outputs y
        [B, H, T, D] and the RowStats as if the softmax itself had been another one. It sees no weights.
        """
        return y, row_stats

    def after_attention(self, attn, heads):
        """After attention: rewrite heads.y; add gates that need heads.y, heads.v or heads.row_stats."""

    def merge_added(self, out, y):
        """Where it adds heads: what the layer's own heads send out [B, T, C], joined by what the added heads'
        outputs y [B, added heads, T, D] give.
        """
        return out

    @classmethod
    def model_losses(cls, model, outcome):
        """After the last block: {name: weighted loss} of an Outcome, asked of each class, on or off."""
        return {}

    def trace_map(self, attn, weights, heads):
        """Where attention maps are traced: give back the weights [B, H, T, S] as this mechanism leaves them.
        """
        return weights

    def static_gate(self, noisy=None):
        """A factor per head that depends on no token, [H], or None."""


LARGEST_GATE = torch.finfo(torch.float32).max


class HeadControl:
    """What the heads of a GPT can be set to by hand: gates, states and consent."""

    def place_of(self, layer, head):
        """(the attention of a head by its original number, its place there). ValueError: there is none.
        """
        if not 0 <= layer < self.config.n_layer:
            raise ValueError(f"there is no block {layer}; they go from 0 to {self.config.n_layer - 1}")
        attn = self.transformer.h[layer].attn
        heads = attn.all_head_ids()
        if head not in heads:
            raise ValueError(f"block {layer} has no head {head}; it has {', '.join(map(str, heads))}")
        return attn, heads.index(head)

    def set_head(self, layer, head, gate=None, state=None, consent=None, step=0):
        """Set a head's gate by hand (above its own ones; None leaves it), its agency state, its consent.

        Raises ValueError for a head or a state that there is not.
        """
        attn, i = self.place_of(layer, head)
        if gate is not None:
            if abs(gate) > LARGEST_GATE:  # NaN is none by hand
                raise ValueError(f"the gate must be a number of at most {LARGEST_GATE:g} either way")
            if attn.gate_override is None:
                attn.gate_override = torch.full((attn.n_total,), math.nan, device=attn.c_proj.weight.device)
            attn.gate_override[i] = gate
        if state is not None or consent is not None:
            agency = getattr(attn, "agency", None)  # with no Agency in model.py no head has states
            if agency is None:
                raise ValueError("the model has no head states: it was trained with agency off")
            agency.set(i, state, consent, step)

    @contextmanager
    def gates(self, by_layer):
        """Inside of it, gates set by hand: {layer: [H], NaN: the layer's own; None: all}. Then as before."""
        layers = [block.attn for block in self.transformer.h]
        before = [attn.gate_override for attn in layers]
        try:
            for layer, gate in by_layer.items():
                layers[layer].gate_override = gate
            yield self
        finally:
            for attn, gate in zip(layers, before):
                attn.gate_override = gate
