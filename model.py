"""
The GPT in one file, to be read top to bottom. Every head mechanism is a flag that joins one equation:

    q, k, v = project(x)          # 1. project; A2C, key offset, roles change q, k; constraint heads add some
    y       = attend(q, k, v)     # 2. attend: causal, fused, no stored T x T; CausalMask says who is seen
    y       = y * gates           # 3. a factor per head and token: sentinel, agency, routing, ACAG, sink, ...
    x       = x + merge(y)        # 4. merge the heads and project out
    x       = fuse(x, skip)       # 5. between blocks: U-Net skips

A flag that is off creates no parameter and no buffer, and leaves the computation as it was. Everything about
a mechanism stands in its class, and HEAD_MECHANISMS lists the classes; MECHANISMS, made from them, names the
flags of each mechanism and mode. docs/mechanisms.md has formulas, shapes, costs and what is wrong in the
sources; docs/add-a-mechanism.md how to add one. Attention kernels are in kernels.py.

References: Radford et al. 2019 (GPT-2); Su et al. 2021, arXiv 2104.09864 (RoPE); Henry et al. 2020,
arXiv 2010.04245 (QK-norm); Zhang & Sennrich 2019, arXiv 1910.07467 (RMSNorm); So et al. 2021,
arXiv 2109.08668 (squared ReLU). The mechanisms' own are at their classes.
"""

import copy
import functools
import hashlib
import math
import typing
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatch
from typing import Literal, NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from nanoheads.kernels import (SKIP_FROM, ChunkedCrossEntropy, RowStats, attend, attend_in_rows,
                               attend_packed, attend_selected, has_flex_attention, linear32, padded_rows,
                               relu2, rms_norm, row_statistics)

# What a recipe means: the values taken by the flags that were left at None.
RECIPES = {
    "gpt2": dict(pos="learned", norm="layernorm", act="gelu", bias=False, qk_norm=False, embed_norm=False,
                 tied=True, zero_init=False, softcap=0.0),
    "modern": dict(pos="rope", norm="rmsnorm", act="relu2", bias=False, qk_norm=True, embed_norm=True,
                   tied=False, zero_init=True, softcap=0.0),
}


@dataclass
class GPTConfig:
    # ---- size ----
    block_size: int = 1024               # context length, in tokens
    vocab_size: Optional[int] = None     # number of tokens; None: the dataset's, when training
    n_layer: int = 12                    # number of blocks
    n_head: int = 12                     # attention heads per block
    n_embd: int = 768                    # width of the residual stream
    n_inner: Optional[int] = None        # width inside the MLP; None: 4 * n_embd
    dropout: float = 0.0                 # on the embedding, the attention weights and both projections
    attn_dropout: Optional[float] = None  # on the attention weights alone; None: same as dropout
    seed: int = 1337                     # initial values and data order
    # ---- recipe: a preset for the flags below; a flag that is set wins ----
    recipe: Literal["gpt2", "modern"] = "gpt2"  # as nanoGPT trains it | RoPE, QK-norm, RMSNorm, ReLU^2, Muon
    pos: Optional[Literal["learned", "rope"]] = None  # positions
    norm: Optional[Literal["layernorm", "rmsnorm"]] = None  # rmsnorm has no learned scale
    act: Optional[Literal["gelu", "gelu_tanh", "relu2"]] = None  # gelu_tanh: OpenAI's own weights
    bias: Optional[bool] = None          # biases in the linear layers and LayerNorms
    qk_norm: Optional[bool] = None       # RMS-normalise every query and key
    qk_max: Optional[float] = None       # the largest logit that qk_norm allows; None: sqrt(head size)
    embed_norm: Optional[bool] = None    # RMS-normalise the embedding before the first block
    tied: Optional[bool] = None          # output head shares the embedding's weights
    zero_init: Optional[bool] = None     # projections into the residual stream and the head start at zero
    softcap: Optional[float] = None      # logits = cap * tanh(logits / cap); 0: off
    rope_base: float = 10000.0           # wavelength base of the rotary positions
    rope_share: float = 1.0              # share of each head's dimensions that they turn
    parallel: bool = False               # attention and MLP read the same input and add to it together
    # ---- memory ----
    checkpoint_activations: bool = False  # recompute each block in the backward pass: less memory, slower
    loss_chunks: Optional[int] = None    # portions of a batch whose logits are in memory at a time when
                                         # training; 1: all at once; None: none of over 1 GB
    # ---- routing: a token uses its best heads only ----
    routing: Optional[Literal["published", "moh", "sigmoid"]] = None  # weights of sum 1 | mean 1 | one by one
    routing_top_k: Optional[int] = None  # heads that a token uses, shared ones too; None: half, shared + 2
    routing_shared: int = 0              # moh: heads that every token uses
    routing_hidden: Optional[int] = None  # width inside the router; 0: linear; None: published n_embd // 2
    routing_coef: float = 0.01           # published: of the token entropy; moh, sigmoid: of the load balance
    routing_mask: Optional[Literal["inf", "zero"]] = None  # unselected logits; None: published zero
    routing_eval_gate: Optional[bool] = None  # False: gates in training only; None: False if published
    routing_skip: bool = True            # decoding reads the selected heads alone, where that pays
    routing_capacity: float = 0.0        # cuda: compute so many times the mean number of queries; 0: all
    # ---- sentinel gates: one learned gate per head ----
    sentinel: Optional[Literal["sigmoid", "hard_concrete"]] = None  # hard_concrete (L0) has real zeros
    sentinel_init: float = 3.0           # initial logit: gates start near 1
    sentinel_coef: float = 1e-4          # of the sum of gates (sigmoid), or of P(gate != 0) (hard_concrete)
    head_norm: bool = False              # RMS-normalise every head's output, per token, before the gates
    # ---- agency: states and consent per head, moved from outside between steps ----
    agency: bool = False                 # active 1, overloaded 0.5, misaligned 0.7, withdrawn or no consent 0
    agency_enforce: bool = True          # False: heads without consent run all the same (counted as forced)
    agency_threshold: float = 0.05       # a gate above it counts as in use
    agency_learned: bool = False         # states predicted from the heads' metrics; needs controller_log
    # ---- U-Net skips: the output of block i joins the output of block N - i + 1 ----
    unet: Optional[Literal["concat", "add", "scalar", "published"]] = None
                                         # h + W[skip; h] | h + sigmoid(l) skip | h + w skip | Linear
    unet_init: Optional[float] = None    # the first decoder block's skip, then falling; None: 0.5, scalar 1
    unet_skips: bool = True              # False: the skip half gives nothing (a switch for trained models)
    unet_from: int = 0                   # training steps in which the skip half gives nothing yet
    unet_ramp: int = 0                   # training steps over which it then rises to all that it gives
    # ---- constraint heads: extra heads with a router, scores per token, and names ----
    constraint_names: Optional[list[str]] = None  # what the extra heads are for; None: off
    constraint_heads: int = 1            # heads per name
    constraint_variant: Literal["A", "B"] = "A"  # the concat gets wider | all heads of the layer get smaller
    constraint_layers: Optional[list[int]] = None  # blocks that have them, from 0; None: the one at 2/3 depth
    constraint_mode: Literal["query", "published"] = "query"  # scores before | after the gate
    constraint_gate: Optional[Literal["output", "value", "score"]] = None
                                         # where the router gates; None: outputs, published: values
    constraint_router: Literal["sigmoid", "hard_concrete"] = "sigmoid"  # gates in (0, 1) | with real zeros
    constraint_router_input: Literal["mean", "first"] = "mean"  # it reads the running mean | the first token
    constraint_hidden: int = 128         # width inside the router
    constraint_skip: float = 0.0         # evaluated, gates below this are 0, and such heads not computed
    constraint_coef: float = 0.2         # of the constraint loss, when targets are given
    constraint_warmup: int = 0           # training steps over which that and match_coef rise from 0
    constraint_stop: int = 0             # training steps in which these heads send no gradient into the trunk
    constraint_loss_layers: Optional[list[int]] = None  # blocks whose scores are judged; None: all with heads
    constraint_name_coef: Optional[list[float]] = None  # of each name in that loss; None: 1 each
    constraint_positive_coef: float = 1.0  # of positive targets in it
    constraint_focal: float = 0.0        # focal exponent of that loss; 0: plain cross-entropy
    constraint_sparsity_coef: float = 0.0  # of the router's mean gate (L1), hard_concrete: of those open (L0)
    constraint_entropy_coef: float = 0.0  # of the mean entropy of its gates, each taken as a coin
    constraint_match: Optional[Literal["kl", "huber"]] = None  # match a teacher's scores | its outputs
    constraint_match_coef: float = 1.0   # of that
    # ---- A2C attention ----
    a2c: Optional[Literal["published", "temperature", "key_bias"]] = None  # a*q, k=q, v=x | exp(a)*q | + w*a
    a2c_gamma: float = 0.9               # discount of the return, per token
    a2c_value_coef: float = 0.1          # of the value head's squared error
    a2c_advantage_coef: float = 0.01     # of the squared error of the predicted advantages
    # ---- ACAG: a gate from context length and the shape of the attention row ----
    acag: Optional[Literal["headwise", "elementwise"]] = None  # a gate per head | per dimension of each head
    acag_mode: Literal["normalised", "published"] = "normalised"  # entropy, concentration | mean, std
    acag_detach: bool = False            # no gradient into the row's statistics: cheaper
    acag_length: Optional[int] = None    # the context length that counts as full; None: block_size
    # ---- head roles: a prior over distances in the logits of each head ----
    roles: Optional[list[str]] = None    # local | long | previous | free, head by head, repeated; None: off
    roles_strength: float = 4.0          # initial strength of each head's prior, in nats of logit at its peak
    roles_waves: Optional[int] = None    # cosines in a prior, in fours; None: log2 of block_size, rounded up
    # ---- rivals ----
    output_gate: Optional[Literal["headwise", "elementwise"]] = None  # sigmoid(x W) on the outputs
    output_gate_width: Optional[int] = None  # channels of x that the gate reads; None: all
    xsa: bool = False                    # take out of each output what points along the token's own value
    sink: bool = False                   # a learned logit in every softmax, to attend to nothing
    key_offset: bool = False             # half of each key's dimensions come from the token before
    window: Optional[int] = None         # tokens seen, oneself too; 0: a quarter of block_size; None: all
    window_global: int = 0               # the first tokens, seen by all
    window_random: int = 0               # earlier blocks, drawn at random, that a block of tokens also sees
    window_block: Optional[int] = None   # tokens in such a block; None: block_size // 16
    window_layers: Optional[list[int]] = None  # blocks that have the window, from 0; None: all
    # ---- pruning ----
    head_ids: Optional[list[list[int]]] = None  # the heads that are left in each layer; None: all

    def __post_init__(self):
        self.unsettled = dict(vars(self))  # as given, before sizes follow from one another
        for name, value in RECIPES.get(self.recipe, {}).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        for cls in MECHANISM_CLASSES:
            cls.settle(self)

    @property
    def head_size(self):
        return self.n_embd // self.n_head

    @property
    def weight_dropout(self):
        """Dropout on the attention weights."""
        return self.dropout if self.attn_dropout is None else self.attn_dropout

    def problems(self):
        """Everything that is wrong with this config, as a list of sentences (empty: fine)."""
        bad = [*self.size_problems()]
        for name, allowed in choices(type(self)).items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                bad.append(f"{name}={value!r} must be one of {', '.join(allowed)}")
        if bad:
            return bad  # the mechanisms' checks assume that the sizes make sense
        bad = [problem for cls in MECHANISM_CLASSES for problem in cls.all_problems(self)]
        if self.head_ids is not None:
            every = set(range(self.n_head))
            if len(self.head_ids) != self.n_layer or any(h != sorted(set(h) & every) for h in self.head_ids):
                bad.append(f"head_ids={self.head_ids} must list, for each of the {self.n_layer} layers, "
                           f"heads from 0 to {self.n_head - 1} in order")
        return bad

    def size_problems(self):
        """What is wrong with sizes and numbers, sentence by sentence."""
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "n_inner"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                yield f"{name}={getattr(self, name)} must be at least 1"
        if self.n_head > 0 and self.n_embd % self.n_head:
            yield f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}"
        elif self.n_head > 0 and self.pos == "rope" and self.head_size % 2:
            yield f"pos='rope' needs an even head size, n_embd/n_head={self.head_size}"
        if not 0 < self.rope_share <= 1:
            yield f"rope_share={self.rope_share} must be above 0, and 1 at most"
        for name in ("dropout", "attn_dropout"):
            if getattr(self, name) is not None and not 0.0 <= getattr(self, name) < 1.0:
                yield f"{name}={getattr(self, name)} must be in [0, 1)"
        if self.seed < 0:
            yield f"seed={self.seed} must not be negative"
        if self.loss_chunks is not None and self.loss_chunks < 1:
            yield f"loss_chunks={self.loss_chunks} must be at least 1 (all logits at once)"
        if self.softcap is not None and self.softcap < 0:
            yield f"softcap={self.softcap} must be 0 (off) or positive"
        if self.qk_max is not None and not (self.qk_max > 0 and self.qk_norm):
            yield (f"qk_max={self.qk_max} must be positive and needs qk_norm, "
                   "without which nothing bounds the logits")


@functools.cache
def choices(cls):
    """{name: values that may be chosen} of a dataclass's fields of a Literal type, optional or not."""
    allowed = {}
    for name, hint in typing.get_type_hints(cls).items():
        for t in (hint, *typing.get_args(hint)):
            if typing.get_origin(t) is Literal:
                allowed[name] = typing.get_args(t)
    return allowed


class Output(NamedTuple):
    """What a forward pass returns: logits [B, T, V], cross-entropy in nats, aux terms, traces; None: nobody
    asked.
    """

    logits: Optional[torch.Tensor]
    loss: Optional[torch.Tensor]
    aux: dict
    traces: Optional[dict]


# ---- pieces ----

class LayerNorm(nn.Module):
    """LayerNorm whose bias can be left out."""

    def __init__(self, n, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.bias = nn.Parameter(torch.zeros(n)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class RMSNorm(nn.Module):
    def forward(self, x):
        return rms_norm(x)


def make_norm(config):
    return RMSNorm() if config.norm == "rmsnorm" else LayerNorm(config.n_embd, config.bias)


def rope_tables(config, head_size=None):
    """cos and signed sin of every position's angles, each [block_size, head_size] (RoPE, eq. 34).

    Dimension i is paired with i + head_size / 2, so rotating is x * cos + (x, halves swapped) * sin. Of those
    pairs the first rope_share turn, at frequencies as of a head of that size; the others stand still.
    """
    half = (head_size or config.head_size) // 2
    turned = max(1, round(config.rope_share * half))
    freq = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / turned)
    freq[turned:] = 0.0
    angle = torch.arange(config.block_size, dtype=torch.float64)[:, None] * freq
    cos = torch.cat((angle.cos(), angle.cos()), -1)
    sin = torch.cat((-angle.sin(), angle.sin()), -1)
    return cos.float(), sin.float()


def rotate(x, cos, sin):
    """Rotate x [..., D] by its position's angles, given as rope_tables' cos and sin [..., D]."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin).type_as(x)


def float32_linear(layer, x):
    """layer(x) in float32 also under autocast, whose rounding would make ties of near logits."""
    with torch.autocast(x.device.type, enabled=False):
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        bias = None if layer.bias is None else layer.bias.to(dtype)
        linear = linear32 if x.is_cuda and dtype == torch.float32 else F.linear
        return linear(x.to(dtype), layer.weight.to(dtype), bias)


def product_dtype(x):
    """The dtype of a matrix product with x: autocast's, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class KVCache:
    """Keys and values of the tokens already read, per block: [B, H, block_size, D], filled up to `length`."""

    def __init__(self, config):
        self.k = [None] * config.n_layer
        self.v = [None] * config.n_layer
        self.sums = {}       # of the inputs of the blocks with constraint heads, [B, 1, C]
        self.last_keys = {}  # of the blocks with key offset, before it, [B, H, 1, D]
        self.block_size = config.block_size
        self.length = 0

    def append(self, layer, k, v):
        """Store k, v [B, H, T, D] after what is there; return all keys and values so far."""
        if self.k[layer] is None:  # made here, where the dtype under autocast is known
            self.k[layer] = k.new_empty(*k.shape[:2], self.block_size, k.size(3))
            self.v[layer] = v.new_empty(*v.shape[:2], self.block_size, v.size(3))
        end = self.length + k.size(2)
        self.k[layer][:, :, self.length:end] = k
        self.v[layer][:, :, self.length:end] = v
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]

    def running_sum(self, layer, total):
        """Running sums [B, T, C] of the new tokens, going on from those before; the last is kept."""
        if layer in self.sums:
            total = total + self.sums[layer]
        self.sums[layer] = total[:, -1:]
        return total

    def last_key(self, layer, k):
        """The key [B, H, 1, D] of the token before k [B, H, T, D], None at first; k's last is kept."""
        before = self.last_keys.get(layer)
        self.last_keys[layer] = k[:, :, -1:]
        return before


class Context(NamedTuple):
    """What blocks need beside x, made once per forward pass. Fields that no flag asks for are None."""

    rope: Optional[dict] = None               # head size -> (cos, sin) of the positions
    cache: Optional[KVCache] = None
    mask: object = None                       # who sees whom: bool [1 or B, 1, T, S], BlockMask, None: causal
    mask_mod: object = None                   # the same as a function of (query, key) positions
    positions: Optional[torch.Tensor] = None  # tokens before each token, [T] or [B, T]
    n_keys: Optional[torch.Tensor] = None     # keys that each query sees, [T] or [B, 1, T]
    valid: Optional[torch.Tensor] = None      # 0 where there is only padding, [B, T, 1]
    hint: Optional[torch.Tensor] = None       # the caller's input of the constraint router, [B, C]
    losses: bool = False                      # are auxiliary losses wanted?
    scores: bool = False                      # are the constraint heads' scores wanted?
    traces: object = False                    # are traces wanted? "maps": attention maps too


# ---- what a mechanism may change ----

@dataclass
class Heads:
    """The heads of one layer in one forward pass. Mechanisms rewrite it."""

    x: torch.Tensor                         # the layer's normed input, [B, T, C]
    q: torch.Tensor                         # queries, keys, values, each [B, H, T, D]
    k: torch.Tensor                         # (after attention with those of the cache: [B, H, S, D])
    v: torch.Tensor
    y: Optional[torch.Tensor] = None        # outputs before the gates, [B, H, T, D]
    row_stats: Optional[RowStats] = None    # of the attention rows, where somebody asked
    used: Optional[torch.Tensor] = None     # the heads to compute, bool [B, H, T]; None: all
    capacity: float = 0.0                   # of those, queries per head and sequence at most
    open_rows: Optional[list] = None        # the rows in which to compute each constraint head; None: all
    self_factor: Optional[torch.Tensor] = None  # of a constraint head's weight on the token itself
    gates: dict = field(default_factory=dict)        # name -> factor on y, broadcasting over [B, H, T, D]
    losses: dict = field(default_factory=dict)       # name -> weighted auxiliary loss
    predictions: dict = field(default_factory=dict)  # name -> what a loss over the logits will judge
    traces: dict = field(default_factory=dict)       # name -> tensor, where traces are wanted

    @property
    def none_open(self):
        """Is there no row in which a constraint head is to be computed?"""
        return bool(self.open_rows) and not any(map(len, self.open_rows))

    def add_gate(self, name, gate, ctx):
        """Multiply y by a gate, broadcasting over [B, H, T, D], and trace it."""
        self.gates[name] = gate
        if ctx.traces:
            self.traces[name] = gate


class Extras(NamedTuple):
    """What a block gives beside x: Heads' losses, predictions and traces."""

    losses: dict
    predictions: dict
    traces: dict


class HeadAxis(NamedTuple):
    """A tensor with a head axis: what pruning slices."""

    module: nn.Module
    tensor: str         # its name there; a name without a tensor is passed over
    dim: int = 0
    size: int = 1       # entries of one head along dim
    extra: bool = True  # constraint heads come behind the base heads
    parts: int = 1      # how often all that is repeated: q, k, v


class Uniform(NamedTuple):
    """An initial value: uniform in (-bound, bound)."""

    bound: float


class Mechanism(nn.Module):
    """One change to the heads of a layer, built where its flag is on. A subclass overrides what it changes.

    Its own parameters (those of layers inside it aside) never decay. It must not keep `attn`: modules would
    contain each other.
    """

    name = ""               # its attribute of CausalSelfAttention, hence the prefix of its parameters
    flag = ""               # the field of GPTConfig that turns it on; fields named <flag>_... are its details
    modes = {}              # name -> flags: its entries of MECHANISMS
    neutral = {}            # mode -> {flag, or parameter, * allowed: value}: the plain GPT; missing: none is
    needs_row_stats = None  # does after() read Heads.row_stats? "lse" | "shape" (entropy and log_p2 too)
    detach = False          # ... without a gradient into them?
    needs_positions = False  # does it read Context.positions?
    absorbs = False         # can a checkpoint's own weights make up for its start? see absorb()
    attention_cost = 0.0    # FLOPs beyond those of plain attention, as a share of them

    # ---- flags ----

    @classmethod
    def prefix(cls):
        return cls.flag + "_"

    @classmethod
    def fields(cls):
        """The names of its fields in GPTConfig."""
        return [f.name for f in fields(GPTConfig) if f.name == cls.flag or f.name.startswith(cls.prefix())]

    @classmethod
    def is_on(cls, config):
        """Whether a model has it."""
        return getattr(config, cls.flag) not in (None, False)

    @classmethod
    def on(cls, config, layer):
        """Whether block `layer` has it."""
        return cls.is_on(config)

    @classmethod
    def mode_of(cls, config):
        """The name of the mode that a config's flags are, the most specific one; None: none of them."""
        def fits(mode):
            for key, value in cls.modes[mode].items():
                free = key == cls.flag and not isinstance(value, (str, bool))  # names, or a number of tokens
                if getattr(config, key) != value and not free:
                    return False
            return True
        return max(filter(fits, cls.modes), key=lambda mode: len(cls.modes[mode]), default=None)

    @staticmethod
    def settle(config):
        """Set flags that follow from others, once, when a config is made."""

    @staticmethod
    def problems(config):
        """Yield what is wrong with its flags where it is on, sentence by sentence."""
        return ()

    @classmethod
    def all_problems(cls, config):
        """Yield all that is wrong with its flags: details of what is off, and what goes with no kernel."""
        if cls.is_on(config):
            yield from cls.problems(config)
            if cls.needs_row_stats:
                yield from no_dropout(config, cls.flag)
            return
        for name in cls.fields():
            value = getattr(config, name)
            if name != cls.flag and value != GPTConfig.__dataclass_fields__[name].default:
                yield f"{name}={value!r} means nothing while {cls.flag} is off"

    # ---- tensors ----

    def initial_values(self):
        """{parameter: number, tensor or Uniform} of those that do not start as GPT-2's would."""
        return {}

    def head_axes(self):
        """The HeadAxis of each tensor that has one."""
        return ()

    def matrices(self):
        """[(weight, matrices stacked in it by rows)] that are like those of attention, for Muon."""
        return []

    # ---- the forward pass ----

    def before(self, attn, h, ctx):
        """Before attention: rewrite h.q, h.k, h.v; add gates and losses that need h.x alone."""

    def after(self, attn, h, ctx):
        """After attention: rewrite h.y; add gates that need h.y, h.v or h.row_stats."""

    def reweigh(self, attn, p, h, ctx):
        """Attention weights [B, H, T, S] as they are after what it does behind the softmax, for maps."""
        return p

    def static_gate(self, noisy=None):
        """A factor per head that depends on no token, [H], or None."""

    def absorb(self, attn):
        """Where `absorbs`: change attn's weights so that the layer does what it did without the mechanism."""


def no_dropout(config, flag):
    """The sentence where attention dropout is on and `flag` needs a kernel that has none."""
    if config.weight_dropout:
        yield (f"{flag} has no fused kernel with dropout on the attention weights: set attn_dropout=0 "
               "(and on what it is compared with)")


def not_negative(config, *names):
    """Yield a sentence for each of these flags that is below 0."""
    for name in names:
        if getattr(config, name) < 0:
            yield f"{name}={getattr(config, name)} must not be negative"


# ---- the mechanisms ----

class KeyOffset(Mechanism):
    """Half of each key's dimensions come from the token before (modded-nanogpt, 2025-12).

    One layer then finds what followed an earlier copy of a token, which else takes two. Moved are the
    dimensions that RoPE turns slowest; the first token keeps its own. Constraint heads are left as they are.
    """

    name = flag = "key_offset"
    modes = {"key_offset": dict(key_offset=True)}
    needs_positions = True

    def __init__(self, config, attn):
        super().__init__()
        half = attn.head_size // 2
        moved = torch.arange(attn.head_size) % half >= (half + 1) // 2
        self.register_buffer("moved", moved, persistent=False)

    @staticmethod
    def problems(config):
        if config.head_size < 4:
            yield f"key_offset moves a part of each key: a head size of {config.head_size} is below 4"

    def before(self, attn, h, ctx):
        last = None if ctx.cache is None else ctx.cache.last_key(attn.layer, h.k)
        before = torch.cat((h.k[:, :, :1] if last is None else last, h.k[:, :, :-1]), 2)
        begins = (ctx.positions if ctx.positions.dim() == 1 else ctx.positions[:, None])[..., None] == 0
        h.k = torch.where(self.moved & ~begins, before, h.k)


class ExclusiveAttention(Mechanism):
    """XSA: take out of each head's output what its own value says (arXiv 2603.09078, eq. 3).

    y - tanh(strength_h) * (y . v) v / |v|^2. The paper takes all of it out; at 0, the start, it is neutral.
    """

    name = flag = "xsa"
    modes = {"xsa": dict(xsa=True)}
    neutral = {"xsa": {}}

    def __init__(self, config, attn):
        super().__init__()
        self.strength = nn.Parameter(torch.empty(attn.n_total))

    def initial_values(self):
        return {"strength": 0.0}

    def head_axes(self):
        return [HeadAxis(self, "strength")]

    def after(self, attn, h, ctx):
        v = h.v[:, :, -h.y.size(2):, :attn.head_size]  # a cache holds earlier tokens too
        share = (h.y * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True).clamp_min(1e-8)
        h.y = h.y - self.strength.tanh()[:, None, None].to(v.dtype) * share * v


class HeadNorm(Mechanism):
    """RMS-normalise every head's output, per token, before the gates (Adaptive Transformer, section 5.3).

    The write-up's own, over batch and sequence, would leak.
    """

    name = flag = "head_norm"
    modes = {"head_norm": dict(head_norm=True)}

    def __init__(self, config, attn):
        super().__init__()

    def after(self, attn, h, ctx):
        h.y = rms_norm(h.y)


class HeadRouter(Mechanism):
    """Which heads each token uses and how much, x [B, T, C] -> weights [B, T, H].

    published: softmax of an MLP's logits, summing to 1 (Learnable Attention Head Routing). The write-up's
    printed code multiplies the logits of heads beyond the top k by 0, which leaves them weight, and gates in
    training only; routing_mask=inf and routing_eval_gate undo the one and the other. moh: softmax over the
    top k, times k, so that the mean is 1; shared heads are always on, and a second softmax weighs the two
    groups (MoH, arXiv 2410.11842, eqs. 5-8, in the scale of its published code). sigmoid: 2 sigmoid(logit) of
    the top k, each for itself. Unselected weights are exactly 0.
    """

    name, flag = "router", "routing"
    modes = {
        "routing_published": dict(routing="published", routing_mask="zero", routing_eval_gate=False),
        "routing_inf": dict(routing="published", routing_mask="inf", routing_eval_gate=True),
        "routing_zero": dict(routing="published", routing_mask="zero", routing_eval_gate=True),
        "routing_train_only": dict(routing="published", routing_mask="inf", routing_eval_gate=False),
        "routing_moh": dict(routing="moh"),
        "routing_sigmoid": dict(routing="sigmoid"),
        "moh": dict(routing="moh", routing_shared=1),  # the rival, as published
    }
    uniform = {"routing_top_k": "n_head", "router.out.weight": 0.0, "router.split.weight": 0.0,
               "router.shared.weight": 0.0}
    neutral = {"routing_moh": uniform, "routing_sigmoid": uniform, "moh": uniform}

    def __init__(self, config, attn):
        super().__init__()
        C, published = config.n_embd, config.routing == "published"
        hidden = config.routing_hidden
        hidden = (C // 2 if published else 0) if hidden is None else hidden
        self.mode, self.coef = config.routing, config.routing_coef
        self.zero = self.zero_mask(config)
        self.in_eval = not published if config.routing_eval_gate is None else config.routing_eval_gate
        self.skip, self.capacity = config.routing_skip, config.routing_capacity
        self.n_shared = config.routing_shared
        self.k = self.top_k(config) - self.n_shared
        self.fc = nn.Linear(C, hidden) if hidden else None
        self.out = nn.Linear(hidden or C, config.n_head - self.n_shared, bias=hidden > 0)
        if self.n_shared > 1:  # one alone has nothing to share
            self.shared = nn.Linear(C, self.n_shared, bias=False)
        if self.n_shared:
            self.split = nn.Linear(C, 2, bias=False)

    @staticmethod
    def top_k(config):
        """Heads that a token uses; half of them, or two beside the shared ones, where nothing is said."""
        if config.routing_top_k is not None:
            return config.routing_top_k
        return max(1, config.n_head // 2, config.routing_shared and config.routing_shared + 2)

    @staticmethod
    def zero_mask(config):
        """Are unselected logits multiplied by 0 (else they go to -inf)?"""
        return config.routing == "published" if config.routing_mask is None else config.routing_mask == "zero"

    @staticmethod
    def problems(c):
        k, shared, zero = HeadRouter.top_k(c), c.routing_shared, HeadRouter.zero_mask(c)
        yield from not_negative(c, "routing_coef", "routing_shared")
        if not 1 <= k <= c.n_head:
            yield f"routing_top_k={k} must be from 1 to n_head={c.n_head}"
        if shared and c.routing != "moh":
            yield f"routing_shared={shared} needs routing='moh', not {c.routing!r}"
        if shared and shared >= k:
            yield f"routing_shared={shared} must be below routing_top_k={k}, which counts shared heads too"
        if k - shared == 1 and c.routing != "sigmoid" and not zero:
            yield (f"routing_top_k={k} leaves one routed head, whose renormalised weight is always 1: "
                   "its router would never learn")
        if c.routing_mask == "zero" and c.routing != "published":
            yield f"routing_mask='zero' needs routing='published', not {c.routing!r}"
        if c.routing_hidden is not None:
            yield from not_negative(c, "routing_hidden")
        if c.routing_capacity:
            if c.routing_capacity < 1:
                yield f"routing_capacity={c.routing_capacity} must be 0 (off) or at least 1"
            if zero:
                yield "routing_capacity needs routing_mask='inf': with 'zero' every head is used"
            readers = [cls.flag for cls in HEAD_MECHANISMS if cls.needs_row_stats]
            for other in (*readers, "routing_shared", "constraint_names"):
                if getattr(c, other):
                    yield f"routing_capacity packs the queries of selected heads alone: not with {other}"
            yield from no_dropout(c, "routing_capacity")

    def forward(self, x):
        """(weights, which heads are selected, each [B, T, H], shared heads first; logits of the routed)."""
        logits = float32_linear(self.out, F.gelu(self.fc(x)) if self.fc else x)
        top = logits.topk(self.k, -1).indices
        selected = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, top, True)
        if self.mode == "sigmoid":
            return 2 * logits.sigmoid() * selected, selected, logits
        weights = logits.masked_fill(~selected, 0.0 if self.zero else -math.inf).softmax(-1)
        if self.mode == "moh":
            weights = self.k * weights
            if self.n_shared:
                split = 2 * float32_linear(self.split, x).softmax(-1)
                shared = 1.0
                if self.n_shared > 1:
                    shared = self.n_shared * float32_linear(self.shared, x).softmax(-1)
                weights = torch.cat((split[..., :1] * shared, split[..., 1:] * weights), -1)
        return weights, F.pad(selected, (self.n_shared, 0), value=True), logits

    def before(self, attn, h, ctx):
        if not (self.training or self.in_eval):
            return
        weights, selected, logits = self(h.x)
        # the router knows of no pruning
        left = weights if attn.n_head == weights.size(-1) else weights[..., attn.head_ids]
        gate = F.pad(left, (0, attn.n_extra), value=1.0).transpose(1, 2)  # constraint heads are always on
        h.gates["routing"] = gate[..., None]
        self.compute_less(gate, h, ctx)
        if ctx.losses:
            h.losses.update(self.penalty(weights, selected, logits))
        if ctx.traces:
            h.traces.update(routing_weights=weights, selected=selected, routing_logits=logits,
                            **routing_summary(weights, selected))

    def compute_less(self, gate, h, ctx):
        """Where it pays, have only the heads of one query computed, or only the selected queries of many."""
        T = h.x.size(1)
        if T == 1:
            keys = T + (ctx.cache.length if ctx.cache is not None else 0)
            if self.skip and keys >= SKIP_FROM and not (h.x.is_cuda or torch.is_grad_enabled()):
                h.used = gate > 0
        elif self.capacity and has_flex_attention(h.x.device) and ctx.cache is None \
                and not isinstance(ctx.mask, torch.Tensor):
            h.used = gate > 0
            h.capacity = self.capacity * self.k / self.out.out_features * T

    def penalty(self, weights, selected, logits):
        """{name: weighted loss}: token entropy in nats, or the load balance R sum_i P_i f_i (MoH, eq. 9)."""
        if self.mode == "published":
            return {"routing_entropy": self.coef * -(weights * (weights + 1e-8).log()).sum(-1).mean()}
        share = logits.softmax(-1).flatten(0, -2).mean(0)
        load = selected[..., self.n_shared:].flatten(0, -2).to(logits.dtype).mean(0)
        if dist.is_available() and dist.is_initialized():  # a product of means is no mean of products
            dist.all_reduce(load)
            load = load / dist.get_world_size()
        return {"routing_balance": self.coef * load.numel() * (share * load).sum()}


def routing_summary(weights, selected):
    """What a router does, from weights and selection [B, T, H]: load of each head, and how spread it is.

    effective_heads: exp of the load's entropy; token_entropy: of one token's weights, batch_entropy: of all
    tokens' mean, in nats.
    """
    def entropy(p):
        return -(p * p.clamp_min(1e-12).log()).sum(-1)

    def share(w):
        return w / w.sum(-1, keepdim=True).clamp_min(1e-12)

    load = selected.flatten(0, 1).float().mean(0)
    return dict(routing_load=load, dead_heads=(load == 0).sum(), effective_heads=entropy(share(load)).exp(),
                token_entropy=entropy(share(weights)).mean(),
                batch_entropy=entropy(share(weights.flatten(0, 1).mean(0))))


class SentinelGate(Mechanism):
    """One learned gate per head, [H] (Adaptive Transformer, section 2.1).

    sigmoid: g = sigmoid(logit). hard_concrete: a stretched, clamped sigmoid, noisy while training, with real
    zeros (arXiv 1712.01312, eqs. 10-13).
    """

    name = flag = "sentinel"
    modes = {"sentinel": dict(sentinel="sigmoid"), "sentinel_l0": dict(sentinel="hard_concrete")}
    neutral = {"sentinel": {"sentinel_init": 50.0}, "sentinel_l0": {}}  # l0: as it starts, when evaluated
    absorbs = True  # at its neutral setting a sigmoid has no slope left to learn by
    BETA, LOW, HIGH = 2 / 3, -0.1, 1.1  # the paper's values

    def __init__(self, config, attn):
        super().__init__()
        self.hard = config.sentinel == "hard_concrete"
        self.coef, self.start = config.sentinel_coef, config.sentinel_init
        self.logit = nn.Parameter(torch.empty(attn.n_total))

    @staticmethod
    def problems(config):
        yield from not_negative(config, "sentinel_coef")

    def initial_values(self):
        return {"logit": self.start}

    def head_axes(self):
        return [HeadAxis(self, "logit")]

    def static_gate(self, noisy=None):
        if not self.hard:
            return self.logit.sigmoid()
        noisy = self.training if noisy is None else noisy
        # one draw for the whole batch: the gates are weights
        return self.hard_concrete(self.logit, torch.rand_like(self.logit) if noisy else None)

    @classmethod
    def hard_concrete(cls, s, u=None):
        """Gates in [0, 1] of logits s, with real zeros; u: uniform noise, which training takes."""
        if u is not None:
            u = u.clamp(1e-6, 1 - 1e-6)
            s = (u.log() - (1 - u).log() + s) / cls.BETA
        return (s.sigmoid() * (cls.HIGH - cls.LOW) + cls.LOW).clamp(0, 1)

    @classmethod
    def chance_open(cls, s):
        """P(gate != 0) of those."""
        return (s - cls.BETA * math.log(-cls.LOW / cls.HIGH)).sigmoid()

    def absorb(self, attn):
        attn.scale_heads(1 / self.static_gate(noisy=False))

    def before(self, attn, h, ctx):
        if ctx.losses:
            h.losses.update(self.penalty())

    def set_coef(self, value):
        """Move the weight of the penalty: a tensor from here on, since a new number compiles a graph anew."""
        if not torch.is_tensor(self.coef):
            self.coef = torch.zeros((), dtype=self.logit.dtype, device=self.logit.device)
        self.coef.fill_(value)

    def penalty(self):
        """{name: weighted loss}: the sum of the gates (L1), or of P(gate != 0) (L0)."""
        if not self.hard:
            return {"gate_l1": self.coef * self.logit.sigmoid().sum()}
        return {"gate_l0": self.coef * self.chance_open(self.logit).sum()}


class Agency(Mechanism):
    """States and consent of the heads, as buffers: moved between steps, a state never recompiles.

    Source: Adaptive Transformer, section 2.2. agency_learned: a layer's heads share a linear map from what
    was measured of a head to the logits of its states. Between two steps a head takes the likeliest; the
    gradient is that of the expected factor (straight-through, arXiv 1308.3432).
    """

    name = flag = "agency"
    modes = {"agency": dict(agency=True), "agency_learned": dict(agency=True, agency_learned=True)}
    neutral = {"agency": {}, "agency_learned": {}}  # all heads active
    STATES = {"active": 1.0, "overloaded": 0.5, "misaligned": 0.7, "withdrawn": 0.0}  # and their factors
    METRICS = 6  # what is measured of a head: Controller.features() but depth

    def __init__(self, config, attn):
        super().__init__()
        n = attn.n_total
        self.enforce, self.threshold = config.agency_enforce, config.agency_threshold
        self.learned = config.agency_learned
        if self.learned:
            self.weight = nn.Parameter(torch.empty(len(self.STATES), self.METRICS))
            self.bias = nn.Parameter(torch.empty(len(self.STATES)))
            self.register_buffer("metrics", torch.zeros(n, self.METRICS))
        self.register_buffer("state", torch.zeros(n, dtype=torch.long))
        self.register_buffer("consent", torch.ones(n, dtype=torch.bool))
        self.register_buffer("utilisation", torch.zeros(n))
        self.register_buffer("last_signal", torch.zeros(n, dtype=torch.long))  # the step of the last change
        *factors, withdrawn = self.STATES.values()
        factors = torch.tensor([*factors, withdrawn if self.enforce else 1.0])
        self.register_buffer("factors", factors, persistent=False)

    @staticmethod
    def problems(config):
        yield from not_negative(config, "agency_threshold")

    def initial_values(self):
        return {"weight": 0.0, "bias": torch.tensor([3.0, 0.0, 0.0, 0.0])} if self.learned else {}

    def head_axes(self):
        names = ("state", "consent", "utilisation", "last_signal", "metrics")
        return [HeadAxis(self, name) for name in names]

    def logits(self):
        """Of each head's states, [H, states], where they are learned."""
        return float32_linear(self, self.metrics)

    def static_gate(self, noisy=None):
        """Factor of each head, [H]; no consent means withdrawn, unless that is not enforced."""
        withdrawn = len(self.STATES) - 1
        gate = self.factors[self.state.masked_fill(~self.consent, withdrawn) if self.enforce else self.state]
        if self.learned:  # adds 0, and the gradient; from a head without consent nothing is learned
            expected = (self.logits().softmax(-1) * self.factors).sum(-1)
            gate = gate + torch.where(self.consent, expected - expected.detach(), 0.0)
        return gate

    def before(self, attn, h, ctx):
        if ctx.traces:
            h.traces["agency"] = self.static_gate()

    def set(self, i, state=None, consent=None, step=0):
        """Move head i to a state, or set its consent. Raises ValueError for a state that there is not."""
        names = list(self.STATES)
        if state is not None:
            if state not in names:
                raise ValueError(f"state {state!r} must be one of {', '.join(names)}")
            old = names[self.state[i]]
            self.state[i] = names.index(state)
            if consent is None and "withdrawn" in (state, old):  # else consent is another matter
                consent = state != "withdrawn"
        if consent is not None:
            self.consent[i] = consent
        self.last_signal[i] = step

    def violations(self, gate, override):
        """Yield (i, type, gate, state) of each head without consent whose gate says that it is in use.

        gate, override: [H], the learned gate and what was set by hand (NaN: not set).
        """
        for i in (~self.consent).nonzero().flatten().tolist():
            by_hand = not override[i].isnan()
            value = (override if by_hand else gate)[i].item()
            if value > self.threshold:
                forced = by_hand or not self.enforce
                yield i, "forced" if forced else "blocked", value, list(self.STATES)[self.state[i]]


class AdvantageAttention(Mechanism):
    """A2C attention: a critic's scalar a [B, T, H], linear in x, acts on the logits of its head.

    published: a_t q_t . q_s / sqrt(d), a signed temperature of the query. temperature: exp(a_t) instead.
    key_bias: w a_s is added to the logits of key s. In the corrected modes a is trained to predict the
    advantage, which needs the future.
    """

    name = flag = "a2c"
    modes = {"a2c_published": dict(a2c="published"), "a2c_temperature": dict(a2c="temperature"),
             "a2c_key_bias": dict(a2c="key_bias")}
    neutral = {"a2c_temperature": {}, "a2c_key_bias": {}}  # as they start
    PAD = 8  # key_bias: the bias is one more dimension of q and k, and kernels want multiples of 8
    MAX = 8.0  # temperature: a is held below it, since exp(a) overflows at 88 in float32 and at 11 in float16

    def __init__(self, config, attn):
        super().__init__()
        self.mode = config.a2c
        self.critic = nn.Linear(config.n_embd, attn.n_head, bias=self.mode == "published")
        if self.mode == "key_bias":
            self.mix = nn.Parameter(torch.empty(attn.n_head))

    @staticmethod
    def problems(config):
        yield from not_negative(config, "a2c_value_coef", "a2c_advantage_coef")
        if not 0 <= config.a2c_gamma < 1:
            yield f"a2c_gamma={config.a2c_gamma} must be in [0, 1)"

    @staticmethod
    def learns(config):
        """Whether a critic and a value head are trained on the returns to come."""
        return config.a2c in ("temperature", "key_bias")

    def initial_values(self):
        linear = Uniform(self.critic.in_features ** -0.5)  # nn.Linear's own
        return {"published": {"critic.weight": linear, "critic.bias": linear},
                "temperature": {"critic.weight": 0.0}, "key_bias": {"mix": 0.0}}[self.mode]

    def head_axes(self):
        return [HeadAxis(self.critic, "weight", extra=False), HeadAxis(self.critic, "bias", extra=False),
                HeadAxis(self, "mix", extra=False)]

    def before(self, attn, h, ctx):
        a = float32_linear(self.critic, h.x)
        h.predictions["advantage"] = a
        if ctx.traces:
            h.traces["advantage"] = a
        per_head = a.transpose(1, 2)[..., None]
        if self.mode == "published":
            h.q = h.q * per_head.to(h.q.dtype)
        elif self.mode == "temperature":
            h.q = h.q * per_head.clamp_max(self.MAX).exp().to(h.q.dtype)
        else:  # q . k + bias as one dimension more: (q, 1) . (k, bias)
            bias = (self.mix[:, None, None] * per_head / attn.scale).to(h.k.dtype)
            h.q = F.pad(torch.cat((h.q, torch.ones_like(bias)), -1), (0, self.PAD - 1))
            h.k = F.pad(torch.cat((h.k, bias), -1), (0, self.PAD - 1))
            h.v = F.pad(h.v, (0, self.PAD))


class ValueHead(nn.Linear):
    """A2C's value of the text so far, [B, T, C] -> [B, T, 1], and the two losses that need the logits.

    The return G_s discounts the log-probabilities of the tokens to come, so it is a target only, never an
    input. The value reads the last hidden state and A its block's input; no gradient of the value's error
    reaches them.
    """

    def __init__(self, config):
        super().__init__(config.n_embd, 1)
        self.gamma = config.a2c_gamma
        self.value_coef, self.advantage_coef = config.a2c_value_coef, config.a2c_advantage_coef

    def losses(self, x, nats, scored, predictions, traces=None):
        """{name: weighted loss} from x [B, T, C], nats and scored [B, T] and the advantages that blocks
        predict.

        traces: gets return, value, advantage [B, T] and how well they are predicted.
        """
        G = discounted_return(-nats, scored, self.gamma)
        V = float32_linear(self, x.detach()).squeeze(-1)
        advantage = (G - V).detach()
        predicted = {key: a for key, a in predictions.items()
                     if key.split(".", 2)[2] == "advantage" and a.size(-1)}
        errors = [((a - advantage[..., None]).square().mean(-1) * scored).sum() for a in predicted.values()]
        if traces is not None:
            traces.update({"a2c.return": G, "a2c.value": V, "a2c.advantage": advantage,
                           "a2c.explained_variance": 1 - variance(G - V, scored) / variance(G, scored)})
            for key, a in predicted.items():
                name = key.replace("advantage", "advantage_correlation")
                traces[name] = correlation(a.mean(-1).to(G.dtype), advantage, scored)
        return {"a2c_value": self.value_coef * ((V - G).square() * scored).sum() / scored.sum(),
                "a2c_advantage": self.advantage_coef * (sum(errors) / max(1, len(predicted))) / scored.sum()}


def discounted_return(r, scored, gamma):
    """G_t = sum_k gamma^k r_(t+k) / sum_k gamma^k over the `scored` tokens that are left, [B, T].

    That is (1 - gamma) sum_k gamma^k r_(t+k), the weights beyond the text's end shared out among the rest.
    The sums are made by doubling steps: log2(T) passes and no T x T matrix.
    """
    both, step = torch.stack((r * scored, scored.to(r.dtype))), 1
    while step < r.size(1):
        both = both + gamma**step * F.pad(both[..., step:], (0, step))
        step *= 2
    return both[0] / both[1].clamp_min(1e-12)


def centred(x, scored):
    """x [B, T] less its mean over the scored tokens, 0 at the others (indexing by a mask would break a
    graph).
    """
    return (x - (x * scored).sum() / scored.sum()) * scored


def variance(x, scored):
    """The variance of x [B, T] over the scored tokens, times their number."""
    return centred(x, scored).square().sum()


def correlation(a, b, scored):
    """Pearson's correlation of a and b [B, T] over the scored tokens."""
    a, b = centred(a, scored), centred(b, scored)
    return (a * b).sum() / (a.square().sum() * b.square().sum()).sqrt()


class HeadRoles(Mechanism):
    """A prior over distances for each base head, by its role: logits[t, s] += sign strength_h p(t - s).

    Source: Adaptive Transformer, section 5.4 (specialised heads, without a formula). p(d) is the mean of
    cos(2 pi (d - offset) / wavelength) over growing wavelengths, 1 at d = offset and below it elsewhere: an
    inner product of features of the two positions, by which queries and keys get wider. Nothing is T x T.
    """

    name = flag = "roles"
    modes = {"roles": dict(roles=["local", "long", "previous", "free"])}
    neutral = {"roles": {"roles_strength": 0.0}}
    needs_positions = True
    # sign, offset and shortest wavelength in tokens: to the near, away from them, to the token before, none
    ROLES = {"local": (1, 0, 16), "long": (-1, 0, 16), "previous": (1, 1, 2), "free": (0, 0, 16)}
    GROWTH = 1.5  # of the wavelengths: at 2 they agree with one another far from the peak, too

    def __init__(self, config, attn):
        super().__init__()
        self.waves, self.start = config.roles_waves, config.roles_strength
        self.attention_cost = self.waves / attn.head_size  # 2 waves wider, in half of the products
        self.strength = nn.Parameter(torch.empty(attn.n_head))
        priors = torch.tensor([self.ROLES[self.role_of(config, head)] for head in attn.head_ids],
                              dtype=torch.float32)
        self.register_buffer("priors", priors.view(-1, 3), persistent=False)

    @staticmethod
    def settle(config):
        if config.roles and config.roles_waves is None:  # stays when the context is cropped
            config.roles_waves = 4 * max(1, -(-(config.block_size - 1).bit_length() // 4))

    @staticmethod
    def problems(c):
        yield from not_negative(c, "roles_strength")
        if not 1 <= len(c.roles) <= c.n_head or set(c.roles) - set(HeadRoles.ROLES):
            yield f"roles={c.roles} must be one to n_head={c.n_head} of {', '.join(HeadRoles.ROLES)}"
        elif c.roles_waves < 4 or c.roles_waves % 4:  # kernels want widths in eights
            yield f"roles_waves={c.roles_waves} must be a multiple of 4, at least 4"

    @staticmethod
    def role_of(config, head):
        """The role of a base head, by its original number."""
        return config.roles[head % len(config.roles)]

    def initial_values(self):
        return {"strength": self.start}

    def head_axes(self):
        return [HeadAxis(self, "strength", extra=False), HeadAxis(self, "priors", extra=False)]

    def before(self, attn, h, ctx):
        dtype = torch.promote_types(self.strength.dtype, torch.float32)  # bfloat16 cannot count to 257
        t = (ctx.positions if ctx.positions.dim() == 1 else ctx.positions[:, None])[..., None].to(dtype)
        sign, offset, shortest = self.priors.to(dtype)[..., None, None].unbind(1)  # (H, 1, 1)
        wavelength = shortest * self.GROWTH ** torch.arange(self.waves, dtype=dtype, device=t.device)
        speed = 2 * math.pi / wavelength  # radians per token, (H, 1, waves)
        strength = sign * self.strength[:, None, None] / (self.waves * attn.scale)

        def widened(x, angle, factor):
            features = factor * torch.cat((angle.cos(), angle.sin()), -1)  # ([B,] H, T, 2 waves)
            return torch.cat((x, features.to(x.dtype).expand(*x.shape[:3], -1)), -1)

        h.q = widened(h.q, (t - offset) * speed, strength)
        h.k = widened(h.k, t * speed, 1.0)
        h.v = F.pad(h.v, (0, 2 * self.waves))


class OutputGate(Mechanism):
    """Gated attention, a rival: sigmoid(x W) on the outputs, per head or element (arXiv 2505.06708, eq. 5).

    width: the gate reads the first channels of x alone (12 in modded-nanogpt, 2025-08).
    """

    name = flag = "output_gate"
    modes = {"output_gate": dict(output_gate="headwise"),
             "output_gate_elementwise": dict(output_gate="elementwise"),
             "output_gate_narrow": dict(output_gate="headwise", output_gate_width=12)}

    def __init__(self, config, attn):
        super().__init__()
        self.size = attn.head_size if config.output_gate == "elementwise" else 1
        self.width = config.output_gate_width or config.n_embd
        self.proj = nn.Linear(self.width, attn.n_total * self.size, bias=False)

    @staticmethod
    def problems(c):
        if c.output_gate_width is not None and not 1 <= c.output_gate_width <= c.n_embd:
            yield f"output_gate_width={c.output_gate_width} must be from 1 to n_embd={c.n_embd}"

    def head_axes(self):
        return [HeadAxis(self.proj, "weight", size=self.size)]

    def before(self, attn, h, ctx):
        gate = self.proj(h.x[..., :self.width]).sigmoid().unflatten(-1, (attn.n_total, self.size))
        h.add_gate("output_gate", gate.transpose(1, 2), ctx)  # (B, H, T, 1 or D)


CONSTRAINTS = ["reciprocity", "testifiability", "decidability"]  # the names of the constraint write-up


class ConstraintHeads(Mechanism):
    """Heads of their own for named constraints: projections, a router over them, a score per token.

    Source: the constraint write-up. The router reads the running mean of x, or its first token, or a hint
    [B, C]; the write-up's mean over the whole sequence would leak. It gates outputs, or values, or (score)
    multiplies each token's weight on itself, the write-up's log(gate) on the diagonal of the logits.
    published: gated values, and scores that read the gated outputs.
    """

    name, flag = "constraint", "constraint_names"
    modes = {"constraint_a": dict(constraint_names=CONSTRAINTS),
             "constraint_b": dict(constraint_names=CONSTRAINTS, constraint_variant="B"),
             "constraint_published": dict(constraint_names=CONSTRAINTS, constraint_mode="published")}
    neutral = {"constraint_a": {"constraint.c_proj.weight": 0.0},
               "constraint_published": {"constraint.c_proj.weight": 0.0}}  # b: its heads have another size
    needs_positions = True

    @classmethod
    def prefix(cls):
        return "constraint_"

    @classmethod
    def on(cls, config, layer):
        layers = [2 * config.n_layer // 3] if config.constraint_layers is None else config.constraint_layers
        return cls.is_on(config) and layer in layers

    @classmethod
    def count(cls, config, layer):
        """Constraint heads of block `layer`."""
        return config.constraint_heads * len(config.constraint_names) if cls.on(config, layer) else 0

    @classmethod
    def head_size(cls, config, layer):
        """Head size in block `layer`: B shares n_embd among more heads, floored to a multiple of 8."""
        if config.constraint_variant == "B" and cls.on(config, layer):
            return config.n_embd // (config.n_head + cls.count(config, layer)) // 8 * 8
        return config.head_size

    def __init__(self, config, attn):
        super().__init__()
        n, C, D = attn.n_extra, config.n_embd, attn.head_size
        self.names, self.n_head, self.per_name = config.constraint_names, n, config.constraint_heads
        self.published, self.gate = config.constraint_mode == "published", config.constraint_gate
        if self.gate == "score":
            self.needs_row_stats = "lse"
        self.hard = config.constraint_router == "hard_concrete"
        self.of_first = config.constraint_router_input == "first"
        self.sparsity_coef = config.constraint_sparsity_coef
        self.entropy_coef = config.constraint_entropy_coef
        self.skip, self.stopped = config.constraint_skip, False
        self.c_attn = nn.Linear(C, 3 * n * D, bias=config.bias)
        self.c_proj = nn.Linear(n * D, C, bias=False)
        self.fc = nn.Linear(C, config.constraint_hidden)
        self.out = nn.Linear(config.constraint_hidden, n)
        # the scorers, one MLP per head
        self.w1 = nn.Parameter(torch.empty(n, D, D))
        self.b1 = nn.Parameter(torch.empty(n, D))
        self.w2 = nn.Parameter(torch.empty(n, D))
        self.b2 = nn.Parameter(torch.empty(n))

    @staticmethod
    def problems(c):
        names = c.constraint_names
        yield from not_negative(c, "constraint_coef", "constraint_focal", "constraint_positive_coef",
                                "constraint_sparsity_coef", "constraint_entropy_coef", "constraint_skip",
                                "constraint_warmup", "constraint_stop", "constraint_match_coef")
        if not len(names) == len(set(names)) > 0 or any("." in name for name in names):
            yield f"constraint_names={names} must be different names, at least one, without dots"
        for name in ("constraint_heads", "constraint_hidden"):
            if getattr(c, name) < 1:
                yield f"{name}={getattr(c, name)} must be at least 1"
        if c.constraint_layers is not None and not set() < set(c.constraint_layers) <= set(range(c.n_layer)):
            yield f"constraint_layers={c.constraint_layers} must be blocks from 0 to {c.n_layer - 1}"
        judged, blocks = c.constraint_loss_layers, ConstraintHeads.blocks(c)
        if judged is not None and not set() < set(judged) <= set(blocks):
            yield f"constraint_loss_layers={judged} must be of the blocks with constraint heads, {blocks}"
        if c.constraint_gate == "score":
            yield from no_dropout(c, "constraint_gate='score'")
        if c.constraint_skip and c.constraint_gate != "output":
            yield (f"constraint_skip={c.constraint_skip} needs constraint_gate='output': a gate on "
                   f"{c.constraint_gate}s does not turn a head off")
        if c.constraint_variant == "B":
            n = c.n_head + c.constraint_heads * len(names)
            if c.n_embd // n < 8:
                yield f"constraint_variant='B' leaves {c.n_embd} / {n} heads, less than 8 wide each"
            if c.a2c == "published":
                yield ("a2c='published' takes x in n_head slices as values, which constraint_variant='B' "
                       "makes too narrow")
        if c.constraint_name_coef is not None and len(c.constraint_name_coef) != len(names):
            yield f"constraint_name_coef={c.constraint_name_coef} must be one for each name"
        if min(c.constraint_name_coef or [0.0]) < 0:
            yield f"constraint_name_coef={c.constraint_name_coef} must not be negative"

    @staticmethod
    def settle(config):
        if config.constraint_names and config.constraint_gate is None:
            config.constraint_gate = "value" if config.constraint_mode == "published" else "output"

    @classmethod
    def blocks(cls, config):
        """The blocks that have such heads."""
        return [layer for layer in range(config.n_layer) if cls.on(config, layer)]

    def initial_values(self):
        return {"b1": 0.0, "b2": 0.0}

    def matrices(self):
        return [(self.c_attn.weight, 3), (self.c_proj.weight, 1)]

    def before(self, attn, h, ctx):
        x = h.x.detach() if self.stopped else h.x
        logits = self.router_logits(x, ctx, attn.layer)
        gates = self.router_gates(logits)
        if ctx.losses:
            self.penalties(h, logits, gates)
        if ctx.traces:
            h.traces["router_gates"] = gates
        factor = gates.transpose(1, 2)[..., None]  # (B, heads, T or 1, 1)
        if self.gate == "output":
            h.gates["router"] = F.pad(gates, (attn.n_head, 0), value=1.0).transpose(1, 2)[..., None]
            h.open_rows = self.open_rows(attn, h, ctx, gates)
            if ctx.cache is None and h.none_open:
                h.v = F.pad(h.v, (0, 0, 0, 0, 0, self.n_head))  # for who reads all values
                return  # not even projected
        q, k, v = attn.split(self.c_attn(x), self.n_head, ctx)
        if self.gate == "value":
            v = v * factor.to(h.x.dtype)
        if self.gate == "score":
            h.self_factor = factor
        width = h.q.size(-1) - attn.head_size  # A2C may have widened the base heads
        h.q, h.k, h.v = (torch.cat((t, F.pad(u, (0, width))), 1) for t, u in ((h.q, q), (h.k, k), (h.v, v)))

    def open_rows(self, attn, h, ctx, gates):
        """[the rows in which it has a gate above 0] of each head, where others can be skipped; else None."""
        if self.training or not self.skip or ctx.scores or ctx.traces or h.used is not None \
                or attn.needs_row_stats or isinstance(ctx.mask, BlockMask):
            return None
        return [rows.nonzero().flatten() for rows in (gates > 0).any(1).unbind(1)]

    def penalties(self, h, logits, gates):
        """Add the router's own losses: its gates shall be few (sparsity), and decided (entropy, nats)."""
        if self.sparsity_coef:
            few = SentinelGate.chance_open(logits) if self.hard else gates
            h.losses["constraint_router"] = self.sparsity_coef * few.mean()
        if self.entropy_coef:
            coins = F.binary_cross_entropy_with_logits(logits, logits.sigmoid(), reduction="none")
            h.losses["constraint_entropy"] = self.entropy_coef * coins.mean()

    def reweigh_self(self, attn, h, ctx):
        """Multiply each token's weight on itself by its gate, and let the row's weights sum to 1 again."""
        n, T, D = attn.n_head, h.q.size(2), attn.head_size
        taken = self.taken(attn, h, ctx)
        y, v = h.y[:, n:].to(taken.dtype), h.v[:, n:, -T:, :D].to(taken.dtype)
        y = (y - taken * v) / (1 - taken).clamp_min(1e-6)
        h.y = torch.cat((h.y[:, :n], y.to(h.y.dtype)), 1)

    def taken(self, attn, h, ctx):
        """What gates of scores take of each row's weights, which sum to 1, [B, heads, T, 1]."""
        n, T, dtype = attn.n_head, h.q.size(2), h.row_stats.lse.dtype
        own = (h.q[:, n:].to(dtype) * h.k[:, n:, -T:]).sum(-1) * attn.scale
        taken = (1 - h.self_factor) * (own - h.row_stats.lse[:, n:]).exp()[..., None].clamp_max(1)
        # a row of one key stays as it is: rounding errors are all that would be left of it
        return taken.masked_fill((ctx.n_keys == 1)[..., None], 0.0)

    def reweigh(self, attn, p, h, ctx):
        if h.self_factor is None:
            return p
        taken, (base, p) = self.taken(attn, h, ctx).to(p.dtype), p.split((attn.n_head, self.n_head), 1)
        own = F.pad(torch.diag_embed(taken.squeeze(-1)), (p.size(-1) - p.size(-2), 0))  # behind a cache's
        return torch.cat((base, (p - own) / (1 - taken).clamp_min(1e-6)), 1)

    def after(self, attn, h, ctx):
        if not (ctx.scores or ctx.traces):
            return
        y = h.y[:, attn.n_head:]
        if self.published and self.gate == "output":
            y = y * h.gates["router"][:, attn.n_head:].to(y.dtype)
        if ctx.scores:
            h.predictions["constraint_y"] = y
        scores = self.scores(y)
        means = scores.unflatten(1, (len(self.names), self.per_name)).mean(2).unbind(1)
        named = {f"constraint.{name}": score for name, score in zip(self.names, means)}
        h.predictions.update(named)
        if ctx.traces:
            h.traces.update(named, head_scores=scores)

    def router_logits(self, x, ctx, layer):
        """[B, T, heads] (T is 1 for a hint)."""
        if ctx.hint is not None:
            read = ctx.hint[:, None].to(x.dtype)
        else:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            x = x if ctx.valid is None else x * ctx.valid
            read = (x * (ctx.positions == 0)[..., None] if self.of_first else x).cumsum(1)
            if ctx.cache is not None:
                read = ctx.cache.running_sum(layer, read)
            if not self.of_first:
                read = read / (ctx.positions + 1)[..., None]
        return float32_linear(self.out, F.relu(self.fc(read.to(self.fc.weight.dtype))))

    def router_gates(self, logits):
        """Gates in [0, 1] of logits [B, T, heads]; hard_concrete: one draw of noise a sequence and head."""
        if not self.hard:
            gates = logits.sigmoid()
        else:
            noise = torch.rand_like(logits[:, :1]) if self.training else None
            gates = SentinelGate.hard_concrete(logits, noise)
        return gates if self.training or not self.skip else gates * (gates >= self.skip)

    def scores(self, y):
        """One logit per head and token, [B, heads, T], of the heads' outputs y [B, heads, T, D]."""
        hidden = torch.einsum("bhtd,hed->bhte", y, self.w1.to(y.dtype)) + self.b1[:, None].to(y.dtype)
        return torch.einsum("bhtd,hd->bht", F.relu(hidden), self.w2.to(y.dtype)) + self.b2[:, None]

    @staticmethod
    def losses(config, predictions, targets):
        """{constraint.<name>: its part of the weighted loss}, means over blocks. ValueError: see below."""
        names = config.constraint_names or ()
        coefs = dict(zip(names, config.constraint_name_coef or ()))
        blocks = config.constraint_loss_layers or ConstraintHeads.blocks(config)
        scores = [{n: predictions[f"blocks.{i}.constraint.{n}"] for n in names} for i in blocks] or [{}]
        focal, positive = config.constraint_focal, config.constraint_positive_coef
        terms = [constraint_losses(s, targets, coefs, focal, positive) for s in scores]
        return {f"constraint.{name}": config.constraint_coef * sum(term[name] for term in terms) / len(terms)
                for name in targets}

    @staticmethod
    def match(config, predictions, teacher):
        """{constraint_match: weighted distance of the scores or outputs from a teacher's}, mean over blocks.

        kl: of the teacher's probabilities to these, nats a token and name; huber: of the heads' outputs. The
        teacher's blocks with heads are taken in their order.
        """
        keys = [f"constraint.{name}" for name in config.constraint_names]
        keys, terms = keys if config.constraint_match == "kl" else ["constraint_y"], []
        for key in keys:
            ours, theirs = ([value.float() for name, value in each.items() if name.split(".", 2)[2] == key]
                            for each in (predictions, teacher))
            for s, t in zip(ours, theirs, strict=True):
                if config.constraint_match == "huber":
                    terms.append(F.huber_loss(s, t))
                    continue
                p = t.sigmoid()
                terms += [F.binary_cross_entropy_with_logits(s, p) - F.binary_cross_entropy_with_logits(t, p)]
        return {"constraint_match": config.constraint_match_coef * sum(terms) / len(terms)}

    @staticmethod
    def at_step(config, aux, step):
        """The losses `aux` at a training step: constraint_warmup is over when its last step has been made."""
        share = min(1.0, (step + 1) / config.constraint_warmup) if config.constraint_warmup else 1.0
        if share == 1.0:
            return aux
        return {name: term * share if name.startswith("constraint.") or name == "constraint_match" else term
                for name, term in aux.items()}


def constraint_losses(scores, targets, coefs=None, focal=0.0, positive=1.0):
    """{name: its part of the mean over names} of weighted BCE with logits, in nats.

    scores, targets: {name: [B, T]}. Targets are in [0, 1], those below 0 are ignored: where all are, the part
    is 0. focal: factor |target - p|^focal (focal loss, arXiv 1708.02002, for soft targets); positive: weight
    of positive targets. Raises ValueError for a name that has no scores.
    """
    unknown = set(targets) - set(scores)
    if unknown or not targets:
        raise ValueError(f"constraint targets for {sorted(unknown) or 'nothing'}; "
                         f"the heads are for {', '.join(scores)}")
    terms = {}
    for name, y in targets.items():
        s, y = scores[name].float(), y.float()
        known, y = y >= 0, y.clamp_min(0)
        weight = torch.tensor(positive, device=s.device)
        nats = F.binary_cross_entropy_with_logits(s, y, reduction="none", pos_weight=weight)
        if focal:  # below an exponent of 1 the slope at 0 is infinite, and infinity times 0 is not a number
            nats = nats * (y - s.sigmoid()).abs().clamp_min(1e-12) ** focal
        mean = (nats * known).sum() / known.sum().clamp_min(1)
        terms[name] = (coefs or {}).get(name, 1.0) * mean / len(targets)
    return terms


def explain(traces, tokens, name, k=5, row=0):
    """One line a block: the k tokens of a sequence with the highest scores for a constraint.

    traces: of model(..., traces=True). tokens: the sequence's tokens as text. Raises ValueError when there is
    no such trace.
    """
    scores = {key: value for key, value in traces.items() if key.endswith(f".constraint.{name}")}
    if not scores:
        names = sorted({key.rsplit(".", 1)[1] for key in traces if ".constraint." in key})
        raise ValueError(f"no scores for {name!r}" + (f"; there are {', '.join(names)}" if names else
                                                      ": the model has no constraint heads"))
    lines = []
    for key, value in scores.items():
        top = value[row].topk(min(k, len(tokens)))
        words = [f"{tokens[i]!r} {s:.2f}" for s, i in zip(top.values.tolist(), top.indices.tolist())]
        lines.append(f"{name} (block {key.split('.')[1]}): {', '.join(words)}")
    return "\n".join(lines)


class ContextGate(Mechanism):
    """ACAG: a gate per head from context length and the shape of the attention row (ACAG README,
    architecture).

    published: sigmoid(W [c, mean, std] + b). normalised: 2 sigmoid(W [c, 1 - entropy / log n, log(n sum p^2)]
    + b), zero at the start: the mean is always 1/n, and the raw std shrinks with n.
    """

    name = flag = "acag"
    modes = {"acag": dict(acag="headwise"), "acag_elementwise": dict(acag="elementwise"),
             "acag_detach": dict(acag="headwise", acag_detach=True),
             "acag_published": dict(acag="headwise", acag_mode="published")}
    neutral = {"acag": {}, "acag_elementwise": {}, "acag_detach": {},  # as they start
               "acag_published": {"acag.weight": 0.0, "acag.bias": 50.0}}
    needs_row_stats = "shape"

    def __init__(self, config, attn):
        super().__init__()
        shape = (attn.n_total,) if config.acag == "headwise" else (attn.n_total, attn.head_size)
        self.published, self.detach = config.acag_mode == "published", config.acag_detach
        self.length = config.acag_length
        self.attention_cost = 0.5 if self.detach else 1.0
        self.weight = nn.Parameter(torch.empty(*shape, 3))
        self.bias = nn.Parameter(torch.empty(*shape))

    @staticmethod
    def settle(config):
        if config.acag and config.acag_length is None:
            config.acag_length = config.block_size  # stays when the context is cropped

    @staticmethod
    def problems(config):
        if config.acag_length < 1:
            yield f"acag_length={config.acag_length} must be at least 1"

    def initial_values(self):
        start = Uniform(3 ** -0.5) if self.published else 0.0
        return {"weight": start, "bias": start}

    def head_axes(self):
        return [HeadAxis(self, "weight"), HeadAxis(self, "bias")]

    def forward(self, stats, n_keys, positions):
        """Gate [B, H, T, 1 or D] from RowStats, the keys seen and the tokens before each token."""
        entropy, log_p2 = stats.entropy, stats.log_p2
        if self.detach:  # another mechanism may have asked for the gradient
            entropy, log_p2 = entropy.detach(), log_p2.detach()
        before = (positions if positions.dim() == 1 else positions[:, None]).to(entropy.dtype)
        alone = n_keys == 1  # nothing to choose from: no logarithm or root whose gradient is not a number
        n = n_keys.masked_fill(alone, 2).to(entropy.dtype)
        if self.published:
            spread = torch.where(alone, 0.0, log_p2.exp() / n - 1 / n**2)  # the population's variance
            spread = torch.where(alone, 0.0, (spread.clamp_min(0) + 1e-12).sqrt())
            features = (before + 1) / self.length, 1 / n_keys, spread
        else:
            features = ((1 + before).log() / math.log(1 + self.length),
                        torch.where(alone, 0.0, 1 - entropy / n.log()),
                        torch.where(alone, 0.0, n.log() + log_p2))
        z = torch.stack([f.expand_as(entropy).to(entropy.dtype) for f in features], -1)
        w = self.weight if self.weight.dim() == 3 else self.weight[:, None]  # (H, 1 or D, 3)
        z = torch.einsum("bhtf,hdf->bhtd", z, w.to(z.dtype)) + self.bias.view(len(w), 1, w.size(1))
        return z.sigmoid() if self.published else 2 * z.sigmoid()

    def after(self, attn, h, ctx):
        h.add_gate("acag_gate", self(h.row_stats, ctx.n_keys, ctx.positions), ctx)


class Sink(Mechanism):
    """A learned logit in each head's softmax, to attend to nothing: y * sigmoid(LSE - logit_h).

    Source: gpt-oss (2025). The same as one key more, of that logit, whose value is 0.
    """

    name = flag = "sink"
    modes = {"sink": dict(sink=True)}
    neutral = {"sink": {"sink.logit": -50.0}}
    needs_row_stats = "lse"

    def __init__(self, config, attn):
        super().__init__()
        self.logit = nn.Parameter(torch.empty(attn.n_total))

    def initial_values(self):
        return {"logit": 0.0}

    def head_axes(self):
        return [HeadAxis(self, "logit")]

    def after(self, attn, h, ctx):
        h.add_gate("sink_gate", (h.row_stats.lse - self.logit[:, None]).sigmoid()[..., None], ctx)

    def reweigh(self, attn, p, h, ctx):
        return p * h.gates["sink_gate"].to(p.dtype)  # rows sum to what the sink leaves


# The mechanisms of a layer, in the order in which they act. A new one is a class above and a name here.
HEAD_MECHANISMS = (KeyOffset, ExclusiveAttention, HeadNorm, HeadRouter, SentinelGate, Agency,
                   AdvantageAttention, HeadRoles, OutputGate, ConstraintHeads, ContextGate, Sink)


# ---- mechanisms outside the layers ----

def identity_of_h(shape):
    """[0, I], the matrix that takes h out of [skip; h], in the shape [C, 2 C]."""
    return torch.cat((torch.zeros(shape[0], shape[0]), torch.eye(shape[0])), 1)


class SkipFusion(Mechanism):
    """U-Net: joins an encoder block's output `skip` to a decoder block's output h, both [B, T, C].

    Source: Adaptive Transformer, section 2.3. concat: h + W [skip; h]; add: h + sigmoid(logit) skip;
    scalar: h + weight skip, as speedruns have it; published: the write-up's Linear([skip; h]). The initial
    weight of the skip falls with depth (its section 5.3).
    """

    name, flag = "fuse", "unet"
    modes = {"unet_concat": dict(unet="concat"), "unet_add": dict(unet="add"),
             "unet_scalar": dict(unet="scalar"),
             "unet_published": dict(unet="published")}
    neutral = {"unet_concat": {"unet_init": 0.0}, "unet_add": {"unet_init": 0.0},
               "unet_scalar": {"unet_init": 0.0},
               "unet_published": {"fuse.*.weight": identity_of_h, "fuse.*.bias": 0.0}}

    def __init__(self, config, depth):
        super().__init__()
        C = config.n_embd
        self.mode, self.skips = config.unet, config.unet_skips
        self.share = config.unet_init * (1 - depth / (config.n_layer // 2))
        ramp = torch.ones(()) if config.unet_from or config.unet_ramp else None
        self.register_buffer("ramp", ramp, persistent=False)  # a tensor: moving it compiles nothing anew
        if self.mode == "add":
            self.logit = nn.Parameter(torch.empty(1))
        else:
            self.weight = nn.Parameter(torch.empty(1) if self.mode == "scalar" else torch.empty(C, 2 * C))
        if self.mode == "published":
            self.bias = nn.Parameter(torch.empty(C))

    @staticmethod
    def settle(config):
        if config.unet and config.unet_init is None:  # at 1 others report that a free number helps
            config.unet_init = 1.0 if config.unet == "scalar" else 0.5
        if not config.unet and config.unet_init == 0.5:  # so say older checkpoints
            config.unet_init = None

    @staticmethod
    def problems(c):
        yield from not_negative(c, "unet_init", "unet_from", "unet_ramp")
        if c.n_layer < 2:
            yield f"unet={c.unet!r} needs at least two layers to join"
        if c.unet == "add" and c.unet_init > 1:
            yield f"unet_init={c.unet_init} must be at most 1 for unet='add', whose weight is a sigmoid"

    def initial_values(self):
        if self.mode == "add":
            # 7 is 0.999: at 1 itself the sigmoid has no slope to learn by
            return {"logit": max(-50.0, min(7.0, logit(self.share)))}
        if self.mode == "scalar":
            return {"weight": self.share}
        if self.mode == "concat":
            C = len(self.weight)
            return {"weight": torch.cat((self.share * torch.eye(C), torch.zeros(C, C)), 1)}
        linear = Uniform(self.weight.size(1) ** -0.5)  # nn.Linear's own
        return {"weight": linear, "bias": linear}

    @staticmethod
    def share_at_step(config, step):
        """The part of the skips that acts in a training step, from 0 to 1."""
        return min(1.0, max(0.0, (step + 1 - config.unet_from) / max(1, config.unet_ramp)))

    def forward(self, h, skip):
        if self.ramp is not None:
            skip = self.ramp * skip
        if self.mode in ("add", "scalar"):
            share = self.logit.sigmoid() if self.mode == "add" else self.weight
            return h + share * skip if self.skips else h
        both = torch.cat((skip if self.skips else torch.zeros_like(skip), h), -1)
        mixed = F.linear(both, self.weight, getattr(self, "bias", None))
        return mixed if self.mode == "published" else h + mixed


def logit(p):
    """log(p / (1 - p)), infinite at 0 and 1."""
    return math.log(p / (1 - p)) if 0 < p < 1 else math.copysign(math.inf, p - 0.5)


KERNEL_BLOCK = 128  # tokens in a block of FlexAttention's masks


class CausalMask(Mechanism):
    """Who sees whom: a token itself and those before; with a window the near, the first, and blocks at
    random.

    Source: Longformer (arXiv 2004.05150), BigBird (arXiv 2007.14062). Every model has one, most without a
    window.
    """

    name, flag = "mask", "window"
    modes = {"window": dict(window=0),
             "window_global_random": dict(window=0, window_global=1, window_random=1)}
    neutral = {"window": {"window": "block_size"}, "window_global_random": {"window": "block_size"}}

    def __init__(self, config, window=True):
        super().__init__()
        self.block_size, self.window = config.block_size, config.window if window else None
        self.n_global, self.n_random = config.window_global, config.window_random
        self.cell = config.window_block
        if not self.window:
            return
        if self.n_random:
            self.register_buffer("random_cells", self.draw_cells(), persistent=False)
            self.register_buffer("random_blocks", self.kernel_blocks(), persistent=False)
        t = torch.arange(self.block_size)
        n = torch.cat([self.mask_mod(rows[:, None], t).sum(-1) for rows in t.split(256)])
        self.register_buffer("n_seen", n, persistent=False)

    @staticmethod
    def settle(config):
        if config.window is not None:  # sizes that must stay when the context is cropped
            config.window = config.window or max(1, config.block_size // 4)
            config.window_block = config.window_block or max(1, config.block_size // 16)

    @staticmethod
    def problems(config):
        yield from not_negative(config, "window_global", "window_random")
        if config.window < 1:
            yield f"window={config.window} must be positive, or 0 for a quarter of block_size"
        if config.window_block < 1:
            yield f"window_block={config.window_block} must be positive"
        blocks = config.window_layers
        if blocks is not None and (not blocks or sorted(set(blocks) & {*range(config.n_layer)}) != blocks):
            yield f"window_layers={blocks} must list blocks from 0 to {config.n_layer - 1} in order"
        yield from no_dropout(config, "window")

    def draw_cells(self):
        """Which blocks before its window each block of tokens also sees, bool [blocks, blocks] (BigBird).

        Drawn alike for every seed: a checkpoint keeps its pattern when it is trained on with another seed.
        """
        n = -(-self.block_size // self.cell)
        reach = -(-(self.window - 1) // self.cell)  # blocks that the window touches
        generator, table = torch.Generator().manual_seed(1337), torch.zeros(n, n, dtype=torch.bool)
        for block in range(reach + 1, n):
            table[block, torch.randperm(block - reach, generator=generator)[:self.n_random]] = True
        return table

    def crop(self, block_size):
        self.block_size = block_size
        if self.window:
            self.n_seen = self.n_seen[:block_size]

    def n_keys(self, positions):
        """How many keys the tokens at these positions see."""
        return self.n_seen[positions] if self.window else positions + 1

    def mean_context(self):
        """The block_size of a model without a window whose tokens see as many keys, on average."""
        return 2 * self.n_seen.float().mean().item() - 1 if self.window else self.block_size

    def mask_mod(self, query, key):
        """Whether the token at position `query` may read position `key`, both from 0, broadcast."""
        visible = key <= query
        if self.window:
            near = (query - key < self.window) | (key < self.n_global)
            if self.n_random:
                row, column = query.clamp_min(0) // self.cell, key.clamp_min(0) // self.cell
                near = near | self.random_cells[row, column]
            visible = visible & near
        return visible

    def make(self, past, T, pad, device, cached, counted, maps):
        """What the kernel needs for T tokens after `past`: BlockMask, bool [1 or B, 1, T, past + T], None:
        causal.

        counted: are row statistics taken? maps: is the dense mask wanted?
        """
        if has_flex_attention(device) and not cached and pad is None and not maps:
            return self.block_mask(T, device) if self.window or counted else None
        off_cpu = counted and T > 1 and device.type != "cpu"
        if pad is not None or (past and T > 1) or self.window or maps or off_cpu:
            return self.dense(past, T, pad, device)
        return None

    def dense(self, past, T, pad, device):
        """Who sees whom, True for yes, [1 or B, 1, T, past + T]; no row sees its padding."""
        query = torch.arange(past, past + T, device=device)[:, None]
        key = torch.arange(past + T, device=device)
        if pad is None:
            return self.mask_mod(query, key)[None, None]
        query, key = query - pad[:, None, None], key - pad[:, None, None]
        # an empty query sees itself: a softmax needs something
        return (self.mask_mod(query, key) & (key >= 0) | (key == query))[:, None]

    def block_mask(self, T, device):
        """The same for FlexAttention: which blocks are seen in part, and which whole. Nothing is T x T."""
        size, n = KERNEL_BLOCK, -(-T // KERNEL_BLOCK)
        i = torch.arange(n, device=device)[:, None]
        j = i.T
        partial_blocks, full_blocks = i >= j, i > j
        if self.window:
            near = ((i - j) * size - (size - 1) < self.window) | (j * size < self.n_global)
            if self.n_random:
                near = near | self.random_blocks[:n, :n].to(device)
            partial_blocks = partial_blocks & near
            full_blocks = full_blocks & (((i - j) * size + size - 1 < self.window)
                                         | (j * size + size - 1 < self.n_global))

        def listed(table):
            """How many blocks each row of a table has, and which, in the form of BlockMask."""
            order = table.int().argsort(dim=-1, descending=True, stable=True)
            return table.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]

        def mask_mod(b, h, query, key):
            return self.mask_mod(query, key)

        return BlockMask.from_kv_blocks(*listed(partial_blocks & ~full_blocks), *listed(full_blocks),
                                        BLOCK_SIZE=size, seq_lengths=(T, T), mask_mod=mask_mod)

    def kernel_blocks(self):
        """The kernel's blocks that random cells reach into, bool [blocks, blocks]: made once, since a number
        of cells that depends on data breaks a compiled graph.
        """
        cells = torch.arange(len(self.random_cells))[:, None]
        blocks = torch.arange(-(-self.block_size // KERNEL_BLOCK))
        # which blocks each cell reaches into: it begins before their end, and ends after their beginning
        reaches = (cells * self.cell < (blocks + 1) * KERNEL_BLOCK) \
            & ((cells + 1) * self.cell > blocks * KERNEL_BLOCK)
        reaches = reaches.float()
        return reaches.T @ self.random_cells.float() @ reaches > 0


MECHANISM_CLASSES = (*HEAD_MECHANISMS, SkipFusion, CausalMask)

# name -> flags: every mechanism in each of its modes. Tests, bench.py, compare.py and the docs read it.
MECHANISMS = {name: flags for cls in MECHANISM_CLASSES for name, flags in cls.modes.items()}

# name -> {flag, or parameter: value} that makes it equal to the plain GPT, where such a setting exists. A
# value may be the name of a size, and a function of the parameter's shape.
NEUTRAL = {name: values for cls in MECHANISM_CLASSES for name, values in cls.neutral.items()}

# The corrected form of all seven together.
ALL_ON = {**MECHANISMS["routing_moh"], **MECHANISMS["sentinel"], **MECHANISMS["agency"],
          **MECHANISMS["unet_concat"], **MECHANISMS["constraint_a"], **MECHANISMS["a2c_temperature"],
          **MECHANISMS["acag"]}


# ---- the transformer ----

class AttentionCore(nn.Module):
    """Attention of one layer from queries, keys and values on, and its mechanisms: no projections.

    A subclass sets layer, head_ids (what pruning left, by the original numbers), n_base (constraint heads are
    numbered on from there), n_head, n_extra, head_size, scale and attn_dropout, and then adds mechanisms.
    """

    def add_mechanisms(self, config):
        for cls in HEAD_MECHANISMS:
            self.register_module(cls.name, cls(config, self) if cls.on(config, self.layer) else None)
        self.register_buffer("gate_override", None, persistent=False)  # gates set by hand, [H], NaN: not set
        readers = [m for m in self.mechanisms() if m.needs_row_stats]
        self.needs_row_stats = max((m.needs_row_stats for m in readers), default=None)  # shape, lse
        self.detach_row_stats = all(m.detach for m in readers)

    @property
    def n_total(self):
        """All heads: those of the layer, then the constraint heads."""
        return self.n_head + self.n_extra

    def mechanisms(self):
        return [m for m in self.children() if isinstance(m, Mechanism)]

    def outputs(self, h, ctx):
        """(Heads after attention, the heads' gated outputs [B, H, T, D])."""
        gate = self.static_gate()
        if gate is not None:
            h.add_gate("gate", gate[:, None, None], ctx)
        for m in self.mechanisms():
            m.before(self, h, ctx)
        self.one_dtype(h)
        if ctx.cache is not None:
            h.k, h.v = ctx.cache.append(self.layer, h.k, h.v)
        y, row_stats = self.attend(h, ctx)
        # a new object: torch.compile loses what is set on an old one behind FlexAttention (torch 2.13)
        h = replace(h, y=y, row_stats=row_stats)
        if h.self_factor is not None:
            self.constraint.reweigh_self(self, h, ctx)
        for m in self.mechanisms():
            m.after(self, h, ctx)
        if ctx.traces:
            self.trace(h, ctx)
        if not h.gates:
            return h, h.y
        # one pass over y: the small factors are multiplied first
        return h, h.y * math.prod(sorted(h.gates.values(), key=lambda g: g.size(-1))).to(h.y.dtype)

    def one_dtype(self, h):
        """Under autocast a norm may have made q and k float32, and x is it anyway; kernels want one dtype."""
        dtype = product_dtype(h.v)
        h.q, h.k, h.v = h.q.to(dtype), h.k.to(dtype), h.v.to(dtype)

    def attend(self, h, ctx):
        """(y [B, H, T, D], RowStats where somebody reads them, else None)."""
        q, k, v, row_stats = h.q, h.k, h.v, None
        dropout = self.attn_dropout if self.training else 0.0
        needs = "shape" if ctx.traces else self.needs_row_stats
        if needs:
            y, row_stats = row_statistics(q, k, v, self.scale, ctx.mask, ctx.n_keys, self.detach_row_stats,
                                          dropout, shape=needs == "shape")
        elif h.used is not None and q.size(2) == 1:
            y = attend_selected(q, k, v, self.scale, h.used.squeeze(-1), ctx.mask)
        elif h.used is not None:
            y, _ = attend_packed(q, k, v, self.scale, h.used, h.capacity, ctx.mask_mod)
        elif h.open_rows:
            y = attend_in_rows(q, k, v, self.scale, h.open_rows, self.n_head, ctx.mask)
        else:
            y = attend(q, k, v, self.scale, ctx.mask, dropout)
        return y[..., :self.head_size], row_stats

    def static_gate(self, noisy=None):
        """Product of the gates that depend on no token, or what was set by hand, [H]; None: there is nothing.
        """
        gates = [m.static_gate(noisy) for m in self.mechanisms()]
        gates = [gate for gate in gates if gate is not None]
        gate = math.prod(gates) if gates else None
        if self.gate_override is not None:
            gate = torch.where(self.gate_override.isnan(), 1.0 if gate is None else gate, self.gate_override)
        return gate

    def trace(self, h, ctx):
        """What every model's traces hold, beside those of its mechanisms."""
        h.traces.update(entropy=h.row_stats.entropy, concentration=h.row_stats.log_p2.exp())
        if ctx.traces == "maps":
            logits = (h.q @ h.k.mT).float() * self.scale
            p = logits.masked_fill(~ctx.mask, -math.inf).softmax(-1)
            for m in self.mechanisms():
                p = m.reweigh(self, p, h, ctx)
            h.traces["map"] = p

    # ---- heads set by hand, and gone ----

    def all_head_ids(self):
        """The heads that are here, by their original numbers, constraint heads too."""
        return self.head_ids + [self.n_base + i for i in range(self.n_extra)]

    def closed_heads(self):
        """The base heads whose gate is exactly 0 when evaluated, by their original numbers."""
        gate = self.static_gate(noisy=False)
        return [] if gate is None else [i for i, g in zip(self.head_ids, gate.tolist()) if g == 0]

    def head_axes(self):
        """Every HeadAxis of the layer and its mechanisms."""
        return [HeadAxis(self, "gate_override"), *(a for m in self.mechanisms() for a in m.head_axes())]

    @torch.no_grad()
    def prune(self, gone, optimizers=()):
        """Drop base heads, by their original numbers, from every tensor, and from the optimizers' moments."""
        left = torch.tensor([i not in gone for i in self.head_ids], dtype=torch.bool)
        for axis in self.head_axes():
            heads = torch.cat((left, torch.ones(self.n_extra * axis.extra, dtype=torch.bool)))
            rows = heads.repeat(axis.parts).repeat_interleave(axis.size).nonzero().flatten()
            keep_rows(axis.module, axis.tensor, axis.dim, rows, optimizers)
        self.head_ids = [i for i in self.head_ids if i not in gone]
        self.n_head = len(self.head_ids)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.out_features, module.in_features = module.weight.shape


class CausalSelfAttention(AttentionCore):
    """Multi-head causal attention and the mechanisms of its config, [B, T, C] -> [B, T, C].

    Two mechanisms are named here, since they change what the projections are. Constraint heads have
    projections of their own, which make the layer's heads more and its output wider (n_extra, merge); A2C as
    published has no keys and values of its own (tied).
    """

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.head_size = ConstraintHeads.head_size(config, layer)
        self.scale = config.qk_max / self.head_size if config.qk_max else self.head_size ** -0.5
        self.head_ids = list(range(config.n_head)) if config.head_ids is None else config.head_ids[layer]
        self.n_base = config.n_head
        self.n_head = len(self.head_ids)
        self.n_extra = ConstraintHeads.count(config, layer)
        self.rope, self.qk_norm = config.pos == "rope", config.qk_norm
        self.tied = config.a2c == "published"  # keys are queries, values are slices of x
        self.parts = 1 if self.tied else 3  # q, k, v in c_attn
        self.c_attn = nn.Linear(config.n_embd, self.parts * self.n_head * self.head_size, bias=config.bias)
        self.c_proj = nn.Linear(self.n_head * self.head_size, config.n_embd, bias=config.bias)
        self.attn_dropout = config.weight_dropout
        self.resid_dropout = nn.Dropout(config.dropout)
        self.add_mechanisms(config)

    def forward(self, x, ctx):
        """(what joins the residual stream, Extras)."""
        heads = Heads(x, *self.split(self.c_attn(x), self.n_head, ctx, x if self.tied else None))
        h, y = self.outputs(heads, ctx)
        return self.merge(y, h.none_open), Extras(h.losses, h.predictions, h.traces)

    def split(self, qkv, n_head, ctx, values=None):
        """[B, T, (3 or 1) * H * D] -> normed and rotated queries and keys, and values, each [B, H, T, D].

        values: x, where keys are queries and values are slices of x.
        """
        B, T, _ = qkv.shape
        if values is None:
            qk, v = qkv.view(B, T, 3, n_head, self.head_size).split((2, 1), dim=2)
        else:
            qk, v = qkv.view(B, T, 1, n_head, self.head_size), values.unflatten(-1, (1, -1, self.head_size))
            v = v if v.size(3) == n_head else v[..., self.head_ids, :]
        if self.qk_norm:
            qk = rms_norm(qk)
        if self.rope:
            qk = rotate(qk, *ctx.rope[self.head_size])
        qk = qk.transpose(1, 3).unbind(2)  # (B, H, 2, T, D) -> 2 x (B, H, T, D)
        return qk[0], qk[-1], v.squeeze(2).transpose(1, 2)

    def merge(self, y, none_open=False):
        """Heads side by side, [B, H, T, D] -> [B, T, C], and out into the residual stream.

        none_open: the constraint heads put out nothing.
        """
        if self.n_extra:  # constraint heads come out through a projection of their own
            y, extra = y.split((self.n_head, self.n_extra), 1)
            out = self.c_proj(y.transpose(1, 2).flatten(2))
            if none_open:
                return out
            return self.resid_dropout(out + self.constraint.c_proj(extra.transpose(1, 2).flatten(2)))
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))

    @torch.no_grad()
    def scale_heads(self, factor):
        """Multiply what each head sends out by factor [H], for good."""
        self.c_proj.weight.mul_(factor[:self.n_head].repeat_interleave(self.head_size))
        if self.n_extra:
            self.constraint.c_proj.weight.mul_(factor[self.n_head:].repeat_interleave(self.head_size))

    def head_axes(self):
        """Every HeadAxis of the layer and its mechanisms."""
        D = self.head_size
        own = [HeadAxis(self.c_attn, "weight", size=D, extra=False, parts=self.parts),
               HeadAxis(self.c_attn, "bias", size=D, extra=False, parts=self.parts),
               HeadAxis(self.c_proj, "weight", dim=1, size=D, extra=False)]
        return own + super().head_axes()

    def matrices(self):
        """[(weight, matrices stacked in it by rows)], for Muon."""
        own = [(self.c_attn.weight, self.parts), (self.c_proj.weight, 1)]
        return own + [matrix for m in self.mechanisms() for matrix in m.matrices()]


def keep_rows(module, name, dim, rows, optimizers):
    """Keep only `rows` of a module's parameter or buffer along `dim`, and of what optimizers hold about it.
    """
    old = getattr(module, name, None)
    if old is None:
        return
    rows = rows.to(old.device)
    if not isinstance(old, nn.Parameter):
        return setattr(module, name, old.index_select(dim, rows))
    new = nn.Parameter(old.index_select(dim, rows), old.requires_grad)
    new.grad = None if old.grad is None else old.grad.index_select(dim, rows)
    setattr(module, name, new)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
        if old in optimizer.state:
            state = optimizer.state.pop(old)
            optimizer.state[new] = {
                key: t.index_select(dim, rows) if torch.is_tensor(t) and t.shape == old.shape else t
                for key, t in state.items()}


class MLP(nn.Module):
    """Two linear layers, n_inner (usually 4 C) wide inside, [B, T, C] -> [B, T, C]."""

    def __init__(self, config):
        super().__init__()
        inner = 4 * config.n_embd if config.n_inner is None else config.n_inner
        self.c_fc = nn.Linear(config.n_embd, inner, bias=config.bias)
        self.c_proj = nn.Linear(inner, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.act = config.act

    def forward(self, x):
        x = self.c_fc(x)
        if self.act == "relu2":
            x = relu2(x)
        else:
            x = F.gelu(x, approximate="tanh" if self.act == "gelu_tanh" else "none")
        return self.dropout(self.c_proj(x))


class Block(nn.Module):
    """Attention, then MLP, each reading the normed residual stream and adding to it.

    parallel: both at once, as in GPT-J and GPT-NeoX (arXiv 2204.06745, section 2.1.2).
    """

    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)
        self.parallel = config.parallel

    def forward(self, x, ctx):
        y, extras = self.attn(self.ln_1(x), ctx)
        if self.parallel:
            return x + y + self.mlp(self.ln_2(x)), extras
        x = x + y
        return x + self.mlp(self.ln_2(x)), extras


LOGITS_AT_ONCE = 1e9  # bytes of logits in memory, above which a loss takes them in portions


class GPT(nn.Module):
    """The language model. Parameter names are nanoGPT's. Raises ValueError on an impossible config."""

    def __init__(self, config):
        super().__init__()
        bad = config.problems() + (["vocab_size is not set"] if config.vocab_size is None else [])
        if bad:
            raise ValueError("; ".join(bad))
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
            ln_f=make_norm(config)))
        layers = [block.attn for block in self.transformer.h]
        if config.pos == "learned":
            self.transformer.wpe = nn.Embedding(config.block_size, config.n_embd)
        else:
            for size in {attn.head_size for attn in layers}:
                for name, table in zip(("cos", "sin"), rope_tables(config, size)):
                    self.register_buffer(f"{name}{size}", table, persistent=False)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.transformer.wte.weight
        if config.unet:
            self.fuse = nn.ModuleList(SkipFusion(config, depth) for depth in range(config.n_layer // 2))
        if AdvantageAttention.learns(config):
            self.value = ValueHead(config)
        self.mask = CausalMask(config)
        self.whole_mask = None if config.window_layers is None else CausalMask(config, window=False)
        self.needs_row_stats = any(attn.needs_row_stats for attn in layers)
        self.needs_positions = any(m.needs_positions for attn in layers for m in attn.mechanisms())
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """GPT-2's initial values, or a mechanism's own; each parameter's generator is keyed by (seed, its
        name).

        Two models therefore start bit-identical in every parameter that they share, whatever else they have.
        """
        starts = {f"{path}.{name}": value for path, m in self.named_modules() if isinstance(m, Mechanism)
                  for name, value in m.initial_values().items()}
        for name, p in self.named_parameters():
            digest = hashlib.sha256(f"{self.config.seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            out = name.endswith("c_proj.weight")  # writes into the residual stream
            start = starts.get(name)
            if isinstance(start, Uniform):
                p.uniform_(-start.bound, start.bound, generator=generator)
            elif start is not None:
                p.copy_(torch.as_tensor(start))
            elif p.dim() < 2:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
            elif self.config.zero_init and (out or name == "lm_head.weight"):
                p.zero_()
            else:
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if out else 0.02
                p.normal_(0.0, std, generator=generator)

    def no_decay(self):
        """Names of the parameters that weight decay leaves alone whatever their shape: mechanisms' own."""
        return {f"{path}.{name}" for path, m in self.named_modules() if isinstance(m, Mechanism)
                for name, _ in m.named_parameters(recurse=False)}

    def of_mechanisms(self):
        """Names of the parameters that mechanisms add to the plain GPT, layers inside them included."""
        return {f"{path}.{name}" for path, m in self.named_modules() if isinstance(m, (Mechanism, ValueHead))
                for name, _ in m.named_parameters()}

    # ---- forward ----

    def hidden(self, idx, cache=None, pad=None, hint=None):
        """Final hidden states [B, T, C] of idx [B, T] after what `cache` holds; row b begins at column
        pad[b].
        """
        return self.run_blocks(idx, cache, pad, hint=hint)[0]

    def at_step(self, step):
        """What of the model depends on the number of a training step, before that step."""
        for block in self.transformer.h:
            if block.attn.constraint is not None:
                block.attn.constraint.stopped = step < self.config.constraint_stop
        if self.config.unet and (self.config.unet_from or self.config.unet_ramp):
            for fuse in self.fuse:
                fuse.ramp.fill_(SkipFusion.share_at_step(self.config, step))

    def aux_at_step(self, aux, step):
        """The losses of an Output at their weights in a training step."""
        return ConstraintHeads.at_step(self.config, aux, step)

    @torch.no_grad()
    def predictions(self, idx):
        """{"blocks.<i>.<name>": what constraint heads and A2C say of idx [B, T]}: what a student matches."""
        return self.run_blocks(idx, scores=True)[1].predictions

    def run_blocks(self, idx, cache=None, pad=None, **wanted):
        """(hidden(), Extras): losses {name: sum over blocks}, predictions and traces {"blocks.<i>.<name>":
        tensor}.
        """
        c, N = self.config, self.config.n_layer
        B, T = idx.shape
        past = cache.length if cache else 0
        if past + T > c.block_size:
            raise ValueError(f"{past + T} tokens do not fit block_size={c.block_size}")
        if pad is None:
            positions = slice(past, past + T)
        else:
            columns = torch.arange(past, past + T, device=idx.device)
            positions = (columns - pad[:, None]).clamp_min(0)  # (B, T)
        masks = [self.mask_of(i) for i in range(N)]
        contexts = {who: self.context(positions, past, T, cache, pad, idx.device, who=who, **wanted)
                    for who in dict.fromkeys(masks)}
        x = self.transformer.wte(idx)
        if c.pos == "learned":
            x = x + self.transformer.wpe.weight[positions]
        if c.embed_norm:
            x = rms_norm(x)
        x = self.transformer.drop(x)
        total, skips = Extras({}, {}, {}), []
        for i, block in enumerate(self.transformer.h):
            ctx = contexts[masks[i]]
            if c.checkpoint_activations and self.training:
                x, extras = checkpoint(block, x, ctx, use_reentrant=False)
            else:
                x, extras = block(x, ctx)
            if c.unet and i < N // 2:
                skips.append(x)
            elif c.unet and i >= N - N // 2:  # of an odd number, the middle one has no partner
                x = self.fuse[i - (N - N // 2)](x, skips.pop())
            for name, loss in extras.losses.items():
                total.losses[name] = total.losses[name] + loss if name in total.losses else loss
            total.predictions.update({f"blocks.{i}.{name}": t for name, t in extras.predictions.items()})
            total.traces.update({f"blocks.{i}.{name}": t for name, t in extras.traces.items()})
        if cache:
            cache.length += T
        return self.transformer.ln_f(x), total

    def mask_of(self, layer):
        """The CausalMask of a block."""
        windowed = self.config.window_layers is None or layer in self.config.window_layers
        return self.mask if windowed else self.whole_mask

    def context(self, positions, past, T, cache, pad, device,
                losses=False, scores=False, traces=False, hint=None, who=None):
        """The Context of a forward pass: only what is asked for. positions: a slice, or [B, T] of padded
        rows; who: the CausalMask of the blocks that it is for, None: the model's first.
        """
        who, counted = who or self.mask, self.needs_row_stats or bool(traces)
        mask = who.make(past, T, pad, device, cache is not None, counted, traces == "maps")
        rope = n_keys = valid = None
        if self.config.pos == "rope":  # over [B, T, (q, k), H, D]
            sizes = {block.attn.head_size for block in self.transformer.h}
            rope = {size: tuple(getattr(self, f"{name}{size}")[positions][..., None, None, :]
                                for name in ("cos", "sin")) for size in sizes}
        if isinstance(positions, slice):
            wanted = counted or self.needs_positions
            positions = torch.arange(past, past + T, device=device) if wanted else None
        elif self.needs_positions:
            valid = (torch.arange(past, past + T, device=device) >= pad[:, None])[..., None]
        if counted:
            dtype = torch.promote_types(self.transformer.wte.weight.dtype, torch.float32)
            n_keys = who.n_keys(positions).to(dtype)
            n_keys = n_keys if pad is None else n_keys[:, None]
        return Context(rope, cache, mask, who.mask_mod, positions, n_keys, valid,
                       hint, losses, scores, traces)

    def head(self, x):
        """Logits in float32, [..., C] -> [..., V]."""
        vocabulary = self.config.vocab_size
        if x.is_cuda and vocabulary % 64 and torch.is_grad_enabled():  # decoding would pad it for each token
            logits = F.linear(x, padded_rows(self.lm_head.weight))[..., :vocabulary].float()
        else:
            logits = self.lm_head(x).float()
        if self.config.softcap:
            logits = self.config.softcap * torch.tanh(logits / self.config.softcap)
        return logits

    def cross_entropy(self, x, targets, logits=None, each=False):
        """(mean over the scored tokens, and where wanted that of each [B, T]) in nats, of the last hidden
        states x [B, T, C]; logits: head(x), where they are there.
        """
        chunks, targets_ = 1 if logits is not None else self.chunks_of(x), targets.flatten()
        if chunks > 1:
            size = -(-targets.numel() // chunks)
            total, nats = ChunkedCrossEntropy.apply(
                x.flatten(0, 1), self.lm_head.weight, targets_, size, product_dtype(x), self.config.softcap,
                torch.is_grad_enabled())
            return total / (targets != -1).sum(), nats.view_as(targets)
        logits = (self.head(x) if logits is None else logits).flatten(0, 1)
        if not each:
            return F.cross_entropy(logits, targets_, ignore_index=-1), None
        nats = F.cross_entropy(logits, targets_, ignore_index=-1, reduction="none").view_as(targets)
        return nats.sum() / (targets != -1).sum(), nats

    def chunks_of(self, x):
        """In how many portions to compute the logits of x [B, T, C]. Raises ValueError where tokens are left.
        """
        chunks, tokens = self.config.loss_chunks, x.size(0) * x.size(1)
        if chunks is None:
            size = tokens * self.config.vocab_size * product_dtype(x).itemsize
            return max(1, math.ceil(size / LOGITS_AT_ONCE))
        if tokens % chunks:
            raise ValueError(f"loss_chunks={chunks} must divide the {tokens:,} tokens of a forward pass, "
                             f"{x.size(0)} rows of {x.size(1)}")
        return chunks

    def forward(self, idx, targets=None, traces=False, constraint_targets=None, router_hint=None,
                teacher=None, logits=False):
        """idx, targets [B, T] -> Output; targets of -1 are not scored. Without targets there are no losses.

        logits: whether they are wanted beside a loss; without targets they are always there. traces: True, or
        "maps" for attention maps too. constraint_targets: {name: [B, T]}, see constraint_losses().
        router_hint [B, C]: read by the constraint router instead of the text so far. teacher: another model's
        predictions() on idx, which constraint_match compares with.
        """
        scores = constraint_targets is not None or teacher is not None
        x, extras = self.run_blocks(idx, losses=targets is not None, scores=scores, traces=traces,
                                    hint=router_hint)
        out, loss, aux = self.head(x) if logits or targets is None else None, None, extras.losses
        critic = AdvantageAttention.learns(self.config)
        if targets is not None:
            loss, nats = self.cross_entropy(x, targets, out, each=critic)
        if targets is not None and critic:
            into = extras.traces if traces else None
            aux.update(self.value.losses(x, nats.detach(), targets != -1, extras.predictions, into))
        if constraint_targets is not None:
            aux.update(ConstraintHeads.losses(self.config, extras.predictions, constraint_targets))
        if teacher is not None:
            aux.update(ConstraintHeads.match(self.config, extras.predictions, teacher))
        return Output(out, loss, aux, extras.traces if traces else None)

    # ---- heads ----

    def set_head(self, layer, head, gate=None, state=None, consent=None, step=0):
        """Set a head's gate by hand (over sentinel and agency; None leaves it), its agency state, its
        consent.

        Raises ValueError for a head or state that there is not.
        """
        if not 0 <= layer < self.config.n_layer:
            raise ValueError(f"there is no block {layer}; they go from 0 to {self.config.n_layer - 1}")
        attn = self.transformer.h[layer].attn
        heads = attn.all_head_ids()
        if head not in heads:
            raise ValueError(f"block {layer} has no head {head}; it has {', '.join(map(str, heads))}")
        i = heads.index(head)
        if gate is not None:
            if attn.gate_override is None:
                attn.gate_override = torch.full((len(heads),), math.nan, device=attn.c_proj.weight.device)
            attn.gate_override[i] = gate
        if state is not None or consent is not None:
            if attn.agency is None:
                raise ValueError("the model has no head states: it was trained with agency off")
            attn.agency.set(i, state, consent, step)

    def violations(self):
        """Heads without consent whose gate says that they are in use: dicts of layer, head, type, gate,
        state.

        type: "blocked" (held back all the same) or "forced" (it runs: agency_enforce is off, or its gate was
        set by hand).
        """
        rows = []
        for layer, block in enumerate(self.transformer.h):
            attn = block.attn
            if attn.agency is None:
                continue
            heads = attn.all_head_ids()
            gate = attn.sentinel.static_gate(noisy=False) if attn.sentinel else torch.ones(len(heads))
            override = attn.gate_override
            override = torch.full((len(heads),), math.nan) if override is None else override
            for i, kind, value, state in attn.agency.violations(gate, override):
                rows.append(dict(layer=layer, head=heads[i], type=kind, gate=value, state=state))
        return rows

    def prune_heads(self, heads, optimizers=()):
        """Remove heads for good, {layer: [head, ...]} by their original numbers: parameters, cache, moments.

        The logits are those of the model with these heads' gates at 0. Constraint heads stay: their scores
        are what they are for. A compiled or data-parallel wrapper has to be made anew. Raises ValueError for
        a head that is not there.
        """
        for layer, gone in heads.items():
            if not 0 <= layer < self.config.n_layer:
                raise ValueError(f"cannot prune block {layer}; they go from 0 to {self.config.n_layer - 1}")
            if set(gone) - set(self.transformer.h[layer].attn.head_ids):
                raise ValueError(f"cannot prune {sorted(gone)} from block {layer}: not all of them are there")
        for layer, gone in heads.items():
            self.transformer.h[layer].attn.prune(gone, optimizers)
        self.config = replace(self.config, head_ids=[block.attn.head_ids for block in self.transformer.h])

    def packed(self):
        """A copy for evaluation without the heads whose gate is 0: withdrawn, closed, set by hand. Same
        logits.
        """
        model = copy.deepcopy(self).eval()
        closed = {layer: block.attn.closed_heads() for layer, block in enumerate(model.transformer.h)}
        model.prune_heads(closed)
        return model

    @torch.no_grad()
    def make_neutral(self, names):
        """Set the parameters of these entries of NEUTRAL: where their flags hold too, the plain GPT's logits.
        """
        for pattern, value in (item for name in names for item in NEUTRAL.get(name, {}).items()):
            for name, p in self.named_parameters():
                if fnmatch(name, f"*{pattern}"):
                    p.copy_(value(p.shape) if callable(value) else torch.as_tensor(value))

    # ---- generation ----

    @torch.inference_mode()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, repetition_penalty=1.0,
               stop_token=None, lengths=None, generator=None, router_hint=None):
        """Yield the next token of every row, [B], up to max_new_tokens times.

        idx [B, T] holds the prompts, flush right where `lengths` [B] are unequal (left padding, never seen).
        A row reads at most block_size tokens; when it would read more it keeps the last half and goes on
        from there. A row that said stop_token repeats it; when all have, the stream ends. router_hint [B, C]:
        what the constraint router reads instead of the text.
        """
        check_sampling(temperature, top_k, top_p, repetition_penalty)
        B, T, block_size = *idx.shape, self.config.block_size
        text = torch.cat((idx, idx.new_empty(B, max_new_tokens)), dim=1)
        first = torch.zeros(B, dtype=torch.long) if lengths is None else T - torch.as_tensor(lengths).cpu()
        if T < 1 or first.min() < 0 or first.max() >= T:
            raise ValueError("every prompt needs at least one token and at most the width of idx")
        begin = torch.maximum(first, torch.tensor(T - block_size))  # the first column that a row still reads
        done = torch.zeros(B, dtype=torch.bool, device=idx.device)
        was_training, cache = self.training, None
        self.eval()
        try:
            for n in range(T, T + max_new_tokens):
                if cache is None:
                    left = int(begin.min())
                    pad = (begin - left).to(idx.device) if (begin > left).any() else None
                    cache, unread = KVCache(self.config), text[:, left:n]
                logits = self.head(self.hidden(unread, cache, pad, router_hint)[:, -1])
                if repetition_penalty != 1.0:
                    for row in range(B):
                        penalise(logits[row], text[row, int(first[row]):n], repetition_penalty)
                token = sample_token(logits, temperature, top_k, top_p, generator)
                if stop_token is not None:
                    token = torch.where(done, stop_token, token)
                    done |= token == stop_token
                text[:, n] = token
                unread = text[:, n:n + 1]
                yield token
                if stop_token is not None and bool(done.all()):
                    break
                if n + 1 - left > block_size:  # the longest row is full: such rows keep half, all start anew
                    begin = torch.where(n + 1 - begin > block_size, n + 1 - max(1, block_size // 2), begin)
                    cache = None
        finally:
            self.train(was_training)

    def generate(self, idx, max_new_tokens, **sampling):
        """idx [B, T] -> [B, T + new]: the prompts and what follows them. Arguments as for stream()."""
        new = list(self.stream(idx, max_new_tokens, **sampling))
        return torch.cat((idx, torch.stack(new, dim=1)), dim=1) if new else idx

    # ---- sizes ----

    def num_params(self, non_embedding=False):
        """Number of parameters; non_embedding leaves out what is looked up: positions, and an untied
        embedding.
        """
        n = sum(p.numel() for p in self.parameters())
        if non_embedding:
            n -= self.transformer.wpe.weight.numel() if self.config.pos == "learned" else 0
            n -= 0 if self.config.tied else self.transformer.wte.weight.numel()
        return n

    def flops_per_token(self):
        """Floating-point operations to train on one token, forward and backward, at block_size (PaLM,
        appendix B).

        6 per parameter in a matrix product, 12 * n_embd * block_size for each block's attention, causality
        not deducted; a window counts as the context that sees as many keys. All heads are computed, selected
        or not.
        """
        attention = 0
        for layer, block in enumerate(self.transformer.h):
            width = block.attn.n_total * block.attn.head_size * self.mask_of(layer).mean_context()
            attention += width * (1 + sum(m.attention_cost for m in block.attn.mechanisms()))
        return int(6 * self.num_params(non_embedding=True) + 12 * attention)

    def mfu(self, tokens_per_s, device, dtype):
        """Share of the device's peak that this training speed is; None where the peak is not known."""
        if torch.device(device).type != "cuda" or dtype == "float32":
            return None
        name = torch.cuda.get_device_name(device)
        peak = next((tflops for part, tflops in PEAK_TFLOPS if part in name), None)
        return None if peak is None else tokens_per_s * self.flops_per_token() / (peak * 1e12)

    def block_matrices(self):
        """[(weight, number of matrices stacked in it by rows)] of the blocks' attention and MLP, for Muon."""
        return [matrix for block in self.transformer.h
                for matrix in (*block.attn.matrices(), (block.mlp.c_fc.weight, 1),
                               (block.mlp.c_proj.weight, 1))]

    def crop_block_size(self, block_size):
        """Shorten the context in place, for instance to fine-tune a long-context checkpoint on short texts.
        """
        if not 1 <= block_size <= self.config.block_size:
            raise ValueError(f"block_size={block_size} must be from 1 to {self.config.block_size}")
        self.config = replace(self.config, block_size=block_size)  # the caller's config stays as it is
        if self.config.pos == "learned":
            wpe = self.transformer.wpe
            wpe.weight = nn.Parameter(wpe.weight[:block_size].detach().clone())
            wpe.num_embeddings = block_size
        else:
            for name, buffer in list(self.named_buffers(recurse=False)):
                if name.startswith(("cos", "sin")):
                    setattr(self, name, buffer[:block_size])
        for mask in {self.mask_of(i) for i in range(self.config.n_layer)}:
            mask.crop(block_size)


# Dense bf16 peaks in TFLOP/s by a part of the device's name, from NVIDIA's datasheets; the first counts.
PEAK_TFLOPS = (("B200", 2250), ("GH200", 989), ("H200", 989), ("H100 PCIe", 756), ("H100 NVL", 835),
               ("H100", 989), ("A100", 312), ("L40S", 362), ("L40", 181), ("L4", 121), ("A10G", 70),
               ("A10", 125), ("RTX 4090", 165), ("RTX 3090", 71))


# ---- sampling ----

def check_sampling(temperature, top_k, top_p, repetition_penalty):
    """Raise ValueError for settings that mean nothing (written so that NaN fails too)."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be 0 (the likeliest token) or positive")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be in (0, 1]")
    if not 0 < repetition_penalty < math.inf:
        raise ValueError(f"repetition_penalty={repetition_penalty} must be positive (1: off)")


def penalise(logits, tokens, penalty):
    """Make the tokens in `tokens` less likely, in place; logits [V] (CTRL, arXiv 1909.05858, section 4.1)."""
    tokens = tokens.unique()
    logits[tokens] = torch.where(logits[tokens] > 0, logits[tokens] / penalty, logits[tokens] * penalty)


def sample_token(logits, temperature, top_k, top_p, generator):
    """One token per row, [B], from logits [B, V]: of the k likeliest, of those that hold top_p of the mass.
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0: cannot overflow
    if top_k is not None and top_k < logits.size(-1):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    probs = F.softmax(logits, dim=-1)
    if top_p is not None and top_p < 1:
        ranked, order = probs.sort(descending=True)
        beyond = ranked.cumsum(-1) - ranked >= top_p  # the mass before it is enough; never the first
        probs = probs.masked_fill(beyond.scatter(-1, order, beyond), 0.0)
    return torch.multinomial(probs, 1, generator=generator).squeeze(-1)
