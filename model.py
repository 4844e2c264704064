"""
The GPT in one file, to be read top to bottom. Every head mechanism is a flag that joins one equation at one step:

    q, k, v = project(x)                 # 1. project: A2C rewrites q, k (and v); constraint heads add theirs
    y       = attend(q, k, v)            # 2. attend: causal, a fused kernel, no stored T x T; windows say who is seen
    y       = y * factors                # 3. one factor per head and token: sentinel, agency, routing, ACAG, output gate, ...
    x       = x + merge(y)               # 4. merge the heads and project out
    x       = fuse(x, skip)              # 5. between blocks: U-Net skips

A flag that is off creates no parameter and no buffer, and leaves the computation as it was. MECHANISMS names the
flags of each mechanism and mode; docs/mechanisms.md has formulas, shapes, costs and what is wrong in the sources.

References: Radford et al. 2019 (GPT-2); Su et al. 2021, arXiv 2104.09864 (RoPE); Henry et al. 2020,
arXiv 2010.04245 (QK-norm); Zhang & Sennrich 2019, arXiv 1910.07467 (RMSNorm); So et al. 2021,
arXiv 2109.08668 (squared ReLU). The mechanisms' own are at their classes.
"""

import copy
import functools
import hashlib
import math
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

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
    recipe: str = "gpt2"                 # gpt2 | modern
    pos: Optional[str] = None            # positions: learned | rope
    norm: Optional[str] = None           # layernorm | rmsnorm (no learned scale)
    act: Optional[str] = None            # gelu | gelu_tanh (OpenAI's own weights) | relu2
    bias: Optional[bool] = None          # biases in the linear layers and LayerNorms
    qk_norm: Optional[bool] = None       # RMS-normalise every query and key
    qk_max: Optional[float] = None       # the largest logit that qk_norm allows; None: sqrt(head size), soft where heads are small
    embed_norm: Optional[bool] = None    # RMS-normalise the embedding before the first block
    tied: Optional[bool] = None          # output head shares the embedding's weights
    zero_init: Optional[bool] = None     # projections back into the residual stream and the head start at zero
    softcap: Optional[float] = None      # logits = cap * tanh(logits / cap); 0: off
    rope_base: float = 10000.0           # wavelength base of the rotary positions
    # ---- memory ----
    checkpoint_activations: bool = False  # recompute each block in the backward pass: less memory, slower
    # ---- routing: a token uses its best heads only ----
    routing: Optional[str] = None        # seed (weights sum to 1) | moh (mean 1) | sigmoid (each for itself); None: off
    routing_top_k: Optional[int] = None  # heads that a token uses, shared ones included; None: half
    routing_shared: int = 0              # moh: heads that every token uses
    routing_hidden: Optional[int] = None  # width inside the router, 0: one linear layer; None: n_embd // 2 in seed, else 0
    routing_coef: float = 0.01           # weight of seed's token entropy, or of the load balance of moh and sigmoid
    routing_mask: str = "inf"            # seed: an unselected logit becomes -inf (inf) or is multiplied by 0 (zero)
    routing_eval_gate: bool = True       # False: gates in training only, as in the write-up's code
    routing_skip: bool = True            # decoding reads the keys and values of the selected heads alone, where that pays
    routing_capacity: float = 0.0        # cuda: compute only selected queries, up to so many times their mean number; 0: all, masked
    # ---- sentinel gates: one learned gate per head ----
    sentinel: Optional[str] = None       # sigmoid | hard_concrete (L0: real zeros); None: off
    sentinel_init: float = 3.0           # initial logit: gates start near 1
    sentinel_coef: float = 1e-4            # weight of the sum of all gates (sigmoid), or of P(gate != 0) (hard_concrete)
    head_norm: bool = False              # RMS-normalise every head's output, per token, before the gates
    # ---- agency: states and consent per head, moved from outside between steps ----
    agency: bool = False                 # active 1, overloaded 0.5, misaligned 0.7, withdrawn or no consent 0
    agency_enforce: bool = True          # False: heads without consent run all the same (counted as forced)
    agency_threshold: float = 0.05       # a gate above it counts as in use
    # ---- U-Net skips: the output of block i joins the output of block N - i + 1 ----
    unet: Optional[str] = None           # concat (h + W[skip; h]) | add (h + s * skip) | seed (Linear([skip; h])); None: off
    unet_init: float = 0.5               # concat, add: weight of the first decoder block's skip; later ones fall to 0
    unet_skips: bool = True              # False: the skip half contributes nothing (a switch for trained models)
    # ---- constraint heads: extra heads with a router, scores per token, and names ----
    constraint_names: Optional[list[str]] = None  # what the extra heads are for; None: off
    constraint_heads: int = 1            # heads per name
    constraint_variant: str = "A"        # A: the concat gets wider | B: all heads of the layer get smaller
    constraint_layers: Optional[list[int]] = None  # blocks that have them, from 0; None: the one at 2/3 depth
    constraint_mode: str = "query"       # query (gate the outputs, score before the gate) | seed (gate the values, score after)
    constraint_hidden: int = 128         # width inside the router
    constraint_coef: float = 0.2       # weight of the constraint loss, when targets are given
    constraint_name_coef: Optional[list[float]] = None  # weight of each name in that loss; None: 1 each
    constraint_focal: float = 0.0        # focal exponent of that loss; 0: plain cross-entropy
    constraint_positive_coef: float = 1.0     # weight of positive targets in it
    constraint_sparsity_coef: float = 0.0     # weight of the router's mean gate (L1)
    # ---- A2C attention ----
    a2c: Optional[str] = None            # seed (q * a, k = q, v = x) | temperature (q * exp a) | key_bias (logit + w * a); None: off
    a2c_gamma: float = 0.9               # discount of the return, per token
    a2c_value_coef: float = 0.1          # weight of the value head's squared error
    a2c_advantage_coef: float = 0.01     # weight of the squared error of the predicted advantages
    # ---- ACAG: a gate from context length and the shape of the attention row ----
    acag: Optional[str] = None           # headwise | elementwise; None: off
    acag_mode: str = "normalised"        # normalised (entropy and concentration, starts at 1) | seed (mean and std of the row)
    acag_detach: bool = False            # no gradient into the row's statistics: cheaper
    acag_length: Optional[int] = None    # the context length that counts as full; None: block_size
    # ---- rivals ----
    output_gate: Optional[str] = None          # output gate sigmoid(x W): headwise | elementwise; None: off
    window: Optional[int] = None         # tokens seen back, oneself included; 0: a quarter of block_size; None: all
    window_global: int = 0               # the first tokens, seen by all
    window_random: int = 0               # earlier blocks, drawn at random, that each block of tokens also sees
    window_block: Optional[int] = None   # tokens in such a block; None: block_size // 16
    # ---- pruning ----
    heads: Optional[list[list[int]]] = None  # the heads that are left in each layer; None: all

    def __post_init__(self):
        for name, value in RECIPES.get(self.recipe, {}).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.acag:  # sizes that must stay when the context is cropped
            self.acag_length = self.acag_length or self.block_size
        if self.window is not None:
            self.window = self.window or max(1, self.block_size // 4)
            self.window_block = self.window_block or max(1, self.block_size // 16)

    @property
    def head_size(self):
        return self.n_embd // self.n_head

    @property
    def top_k(self):
        """Heads that a routed token uses."""
        return max(1, self.n_head // 2) if self.routing_top_k is None else self.routing_top_k

    @property
    def n_constraint(self):
        return self.constraint_heads * len(self.constraint_names or ())

    def constraint_in(self, layer):
        """Whether block `layer` has constraint heads."""
        layers = [2 * self.n_layer // 3] if self.constraint_layers is None else self.constraint_layers
        return bool(self.constraint_names) and layer in layers

    def head_size_in(self, layer):
        """Head size in block `layer`: variant B shares n_embd among more heads, floored to a multiple of 8."""
        if self.constraint_variant == "B" and self.constraint_in(layer):
            return self.n_embd // (self.n_head + self.n_constraint) // 8 * 8
        return self.head_size

    def problems(self):
        """Everything that is wrong with this config, as a list of sentences (empty: fine)."""
        bad = []
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "n_inner"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                bad.append(f"{name}={getattr(self, name)} must be at least 1")
        for name, allowed in dict(recipe=tuple(RECIPES), pos=("learned", "rope"), norm=("layernorm", "rmsnorm"),
                                  act=("gelu", "gelu_tanh", "relu2")).items():
            if getattr(self, name) not in allowed and (name == "recipe" or self.recipe in RECIPES):
                bad.append(f"{name}={getattr(self, name)!r} must be one of {', '.join(allowed)}")
        if self.n_head > 0 and self.n_embd % self.n_head:
            bad.append(f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}")
        elif self.n_head > 0 and self.pos == "rope" and self.head_size % 2:
            bad.append(f"pos='rope' needs an even head size, n_embd/n_head={self.head_size}")
        for name in ("dropout", "attn_dropout"):
            if getattr(self, name) is not None and not 0.0 <= getattr(self, name) < 1.0:
                bad.append(f"{name}={getattr(self, name)} must be in [0, 1)")
        if self.seed < 0:
            bad.append(f"seed={self.seed} must not be negative")
        if self.softcap is not None and self.softcap < 0:
            bad.append(f"softcap={self.softcap} must be 0 (off) or positive")
        if self.qk_max is not None and not (self.qk_max > 0 and self.qk_norm):
            bad.append(f"qk_max={self.qk_max} must be positive and needs qk_norm, without which nothing bounds the logits")
        return bad or self.mechanism_problems()  # those assume that the sizes make sense

    def mechanism_problems(self):
        """What is wrong with the flags of the mechanisms, or meaningless about them together."""
        bad, H, N = [], self.n_head, self.n_layer

        def need(holds, words):
            if not holds:
                bad.append(words)

        for name, allowed in dict(routing=("published", "moh", "sigmoid"), routing_mask=("inf", "zero"), sentinel=("sigmoid", "hard_concrete"),
                                  unet=("concat", "add", "published"), constraint_variant=("A", "B"), constraint_mode=("query", "published"),
                                  a2c=("published", "temperature", "key_bias"), acag=("headwise", "elementwise"),
                                  acag_mode=("normalised", "published"), output_gate=("headwise", "elementwise")).items():
            value = getattr(self, name)
            need(value is None or value in allowed, f"{name}={value!r} must be one of {', '.join(allowed)}")
        for parent in ("routing", "sentinel", "agency", "unet", "constraint_names", "a2c", "acag", "window"):
            for f in fields(self):
                of_parent = f.name.startswith(parent.split("_")[0] + "_") or (parent, f.name) == ("sentinel", "sentinel_coef")
                if of_parent and f.name != parent and getattr(self, parent) in (None, False) and getattr(self, f.name) != f.default:
                    bad.append(f"{f.name}={getattr(self, f.name)!r} means nothing while {parent} is off")
        for name in ("routing_coef", "sentinel_coef", "constraint_coef", "constraint_focal", "constraint_positive_coef", "constraint_sparsity_coef",
                     "a2c_value_coef", "a2c_advantage_coef", "routing_shared", "window_global", "window_random", "agency_threshold"):
            need(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative")
        if self.routing:
            k, shared = self.top_k, self.routing_shared
            need(1 <= k <= H, f"routing_top_k={k} must be from 1 to n_head={H}")
            need(not shared or self.routing == "moh", f"routing_shared={shared} needs routing='moh', not {self.routing!r}")
            need(shared < k or shared == 0, f"routing_shared={shared} must be below routing_top_k={k}, which counts the shared heads too")
            need(k - shared != 1 or self.routing == "sigmoid" or self.routing_mask == "zero",
                 f"routing_top_k={k} leaves one routed head, whose renormalised weight is always 1: its router would never learn")
            need(self.routing_mask == "inf" or self.routing == "published", f"routing_mask='zero' needs routing='published', not {self.routing!r}")
            need(self.routing_hidden is None or self.routing_hidden >= 0, f"routing_hidden={self.routing_hidden} must not be negative")
            need(self.routing_capacity == 0 or self.routing_capacity >= 1, f"routing_capacity={self.routing_capacity} must be 0 (off) or at least 1")
            need(not (self.routing_capacity and self.routing_mask == "zero"), "routing_capacity needs routing_mask='inf': with 'zero' every head is used")
            for other in ("acag", "routing_shared", "constraint_names"):
                need(not (self.routing_capacity and getattr(self, other)), f"routing_capacity packs the queries of selected heads alone: not with {other}")
        need(not self.unet or N >= 2, f"unet={self.unet!r} needs at least two layers to join")
        need(self.unet_init >= 0, f"unet_init={self.unet_init} must not be negative")
        need(self.unet != "add" or self.unet_init < 1, f"unet_init={self.unet_init} must be below 1 for unet='add', whose weight is a sigmoid")
        if self.constraint_names is not None:
            names, sizes = self.constraint_names, [self.head_size_in(layer) for layer in range(N)]
            need(len(names) == len(set(names)) > 0 and not any("." in name for name in names),
                 f"constraint_names={names} must be different names, at least one, without dots")
            need(self.constraint_heads >= 1, f"constraint_heads={self.constraint_heads} must be at least 1")
            need(self.constraint_hidden >= 1, f"constraint_hidden={self.constraint_hidden} must be at least 1")
            need(all(0 <= layer < N for layer in self.constraint_layers or ()) and self.constraint_layers != [],
                 f"constraint_layers={self.constraint_layers} must be blocks from 0 to {N - 1}")
            need(min(sizes) >= 8, f"constraint_variant='B' leaves {self.n_embd} / {H + self.n_constraint} heads, less than 8 wide each")
            need(not (self.a2c == "published" and self.constraint_variant == "B"),
                 "a2c='published' takes x in n_head slices as values, which constraint_variant='B' makes too narrow")
            weights = self.constraint_name_coef
            need(weights is None or len(weights) == len(names), f"constraint_name_coef={weights} must be one for each name")
        need(0 <= self.a2c_gamma < 1, f"a2c_gamma={self.a2c_gamma} must be in [0, 1)")
        need(self.acag_length is None or self.acag_length >= 1, f"acag_length={self.acag_length} must be at least 1")
        for name in ("window", "window_block"):
            need(getattr(self, name) is None or getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be positive")
        kernel = "acag" if self.acag else "window" if self.window else "routing_capacity" if self.routing_capacity else None
        need(not (kernel and (self.dropout if self.attn_dropout is None else self.attn_dropout)),
             f"{kernel} has no fused kernel with dropout on the attention weights: set attn_dropout=0 (and on what it is compared with)")
        if self.heads is not None:
            need(len(self.heads) == N and all(h == sorted(set(h)) and set(h) <= set(range(H)) for h in self.heads),
                 f"heads={self.heads} must list, for each of the {N} layers, heads from 0 to {H - 1} in order")
        return bad


class Output(NamedTuple):
    """What a forward pass returns: logits [B, T, V], cross-entropy in nats (or None), aux terms, traces."""

    logits: torch.Tensor
    loss: Optional[torch.Tensor]
    aux: dict
    traces: Optional[dict]


THREE = ["reciprocity", "testifiability", "decidability"]  # the names of the constraint write-up

# name -> flags: every mechanism in each of its modes. Tests, bench.py and the docs read this list; a new mechanism is one line.
MECHANISMS = {
    "routing_inf": dict(routing="published"),                    # no neutral setting: its weights sum to 1, not to n_head
    "routing_zero": dict(routing="published", routing_mask="zero"),  # none
    "routing_train_only": dict(routing="published", routing_eval_gate=False),  # none; not the same function in train and eval mode
    "routing_moh": dict(routing="moh"),
    "routing_sigmoid": dict(routing="sigmoid"),
    "sentinel": dict(sentinel="sigmoid"),
    "sentinel_l0": dict(sentinel="hard_concrete"),
    "head_norm": dict(head_norm=True),                       # none
    "agency": dict(agency=True),
    "unet_concat": dict(unet="concat"),
    "unet_add": dict(unet="add"),
    "unet_published": dict(unet="published"),                          # the identity, set by hand
    "constraint_a": dict(constraint_names=THREE),            # the extra heads' projection at 0
    "constraint_b": dict(constraint_names=THREE, constraint_variant="B"),  # none: the heads have another size
    "constraint_published": dict(constraint_names=THREE, constraint_mode="published"),
    "a2c_published": dict(a2c="published"),                            # none: keys are queries
    "a2c_temperature": dict(a2c="temperature"),
    "a2c_key_bias": dict(a2c="key_bias"),
    "acag": dict(acag="headwise"),
    "acag_elementwise": dict(acag="elementwise"),
    "acag_detach": dict(acag="headwise", acag_detach=True),
    "acag_published": dict(acag="headwise", acag_mode="published"),    # the bias at +inf
    "moh": dict(routing="moh", routing_shared=1),            # the rivals: as published, none is neutral at the start
    "output_gate": dict(output_gate="headwise"),
    "output_gate_elementwise": dict(output_gate="elementwise"),
    "window": dict(window=0),
    "window_global_random": dict(window=0, window_global=1, window_random=1),
}

# The corrected form of all seven together, as in config/*_all.py.
ALL_ON = {**MECHANISMS["routing_moh"], **MECHANISMS["sentinel"], **MECHANISMS["agency"], **MECHANISMS["unet_concat"],
          **MECHANISMS["constraint_a"], **MECHANISMS["a2c_temperature"], **MECHANISMS["acag"]}

# name -> (more flags, {end of a parameter's name: value}) that make it equal to the plain GPT, where such a setting exists.
NEUTRAL = {
    "routing_moh": (dict(routing_top_k=-1), {"router.out.weight": 0.0}),  # -1: n_head
    "routing_sigmoid": (dict(routing_top_k=-1), {"router.out.weight": 0.0}),
    "moh": (dict(routing_top_k=-1), {"router.out.weight": 0.0, "router.split.weight": 0.0}),
    "sentinel": ({}, {"sentinel.logit": 50.0}),
    "sentinel_l0": ({}, {}),                                 # as it starts, when evaluated
    "agency": ({}, {}),                                      # as it starts: all heads active
    "unet_concat": (dict(unet_init=0.0), {}),
    "unet_add": (dict(unet_init=0.0), {}),
    "constraint_a": ({}, {"constraint.c_proj.weight": 0.0}),
    "constraint_published": ({}, {"constraint.c_proj.weight": 0.0}),
    "a2c_temperature": ({}, {}),                             # as it starts
    "a2c_key_bias": ({}, {}),
    "acag": ({}, {}),
    "acag_elementwise": ({}, {}),
    "acag_detach": ({}, {}),
    "acag_published": ({}, {"acag.weight": 0.0, "acag.bias": 50.0}),
}


# ---- pieces ----

class LayerNorm(nn.Module):
    """LayerNorm whose bias can be left out."""

    def __init__(self, n, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.bias = nn.Parameter(torch.zeros(n)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class CpuRMSNorm(torch.autograd.Function):
    """rms_norm with a hand-written gradient: half the time of PyTorch's own on CPU, which has no fused kernel."""

    @staticmethod
    def forward(ctx, x):
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(1e-6).rsqrt_()
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, g):
        y, scale = ctx.saved_tensors
        along = (g * y).mean(-1, keepdim=True)
        return torch.addcmul(g, y, along, value=-1).mul_(scale)


class CpuSquaredReLU(torch.autograd.Function):
    """relu(x)^2 with a hand-written gradient: a third of the time on CPU, where every pass over memory counts."""

    @staticmethod
    def forward(ctx, x):
        r = x.clamp_min(0)
        ctx.save_for_backward(r)
        return r * r

    @staticmethod
    def backward(ctx, g):
        r, = ctx.saved_tensors
        return (g * r).mul_(2)


def training_on_cpu(x):
    """True where the hand-written gradients above pay; compiled code fuses by itself, and bfloat16 wants float32 sums."""
    return (x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and torch.is_grad_enabled()
            and not torch.compiler.is_compiling())


def rms_norm(x):
    """x / rms(x) over the last dimension, without a learned scale."""
    return CpuRMSNorm.apply(x) if training_on_cpu(x) else F.rms_norm(x, (x.size(-1),), eps=1e-6)


def relu2(x):
    return CpuSquaredReLU.apply(x) if training_on_cpu(x) else F.relu(x).square()


class RMSNorm(nn.Module):
    def forward(self, x):
        return rms_norm(x)


def make_norm(config):
    return RMSNorm() if config.norm == "rmsnorm" else LayerNorm(config.n_embd, config.bias)


def rope_tables(config, head_size=None):
    """cos and signed sin of every position's angles, each [block_size, head_size] (RoPE, eq. 34).

    Dimension i is paired with i + head_size / 2, so rotating is x * cos + (x, halves swapped) * sin.
    """
    half = (head_size or config.head_size) // 2
    freq = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(config.block_size, dtype=torch.float64)[:, None] * freq
    return torch.cat((angle.cos(), angle.cos()), -1).float(), torch.cat((-angle.sin(), angle.sin()), -1).float()


def rotate(x, cos, sin):
    """Rotate x [..., D] by its position's angles, given as rope_tables' cos and sin [..., D]."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin).type_as(x)


def random_blocks(config):
    """Which blocks before its window each block of tokens also sees, bool [blocks, blocks] (BigBird, arXiv 2007.14062).

    Drawn alike for every seed: a checkpoint keeps its pattern when it is trained on with another seed.
    """
    size = config.window_block
    n, reach = -(-config.block_size // size), -(-(config.window - 1) // size)  # blocks that the window touches
    generator, table = torch.Generator().manual_seed(1337), torch.zeros(n, n, dtype=torch.bool)
    for block in range(reach + 1, n):
        table[block, torch.randperm(block - reach, generator=generator)[:config.window_random]] = True
    return table


class KVCache:
    """Keys and values of the tokens already read, per block: [B, H, block_size, D], filled up to `length`."""

    def __init__(self, config):
        self.k, self.v = [None] * config.n_layer, [None] * config.n_layer
        self.sums = {}  # of the inputs of the blocks with constraint heads, [B, 1, C]
        self.block_size, self.length = config.block_size, 0

    def append(self, layer, k, v):
        """Store k, v [B, H, T, D] after what is there; return all keys and values so far."""
        if self.k[layer] is None:  # made here, where the dtype under autocast is known
            self.k[layer], self.v[layer] = (t.new_empty(*t.shape[:2], self.block_size, t.size(3)) for t in (k, v))
        end = self.length + k.size(2)
        self.k[layer][:, :, self.length:end] = k
        self.v[layer][:, :, self.length:end] = v
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]

    def carry(self, layer, total):
        """Running sums [B, T, C] of the new tokens, going on from those before; the last is kept."""
        if layer in self.sums:
            total = total + self.sums[layer]
        self.sums[layer] = total[:, -1:]
        return total


class Context(NamedTuple):
    """What blocks need beside x, made once per forward pass. Fields that no flag asks for are None."""

    rope: Optional[dict] = None             # head size -> (cos, sin) of the positions
    cache: Optional[KVCache] = None
    mask: object = None                     # who sees whom: bool [1 or B, 1, T, S], a BlockMask, or None: all before
    at: Optional[torch.Tensor] = None       # tokens before each token, [T] or [B, T]
    n: Optional[torch.Tensor] = None        # keys that each query sees, [T] or [B, 1, T]
    real: Optional[torch.Tensor] = None     # 0 where there is only padding, [B, T, 1]
    sees: object = None                     # function of (query, key) positions: whether the one may read the other
    hint: Optional[torch.Tensor] = None     # the caller's input of the constraint router, [B, C]
    losses: bool = False                    # are auxiliary losses wanted?
    scores: bool = False                    # are the constraint heads' scores wanted?
    traces: object = False                  # are traces wanted? "maps": attention maps too


# ---- attention kernels ----

class CpuFlash(torch.autograd.Function):
    """Flash attention on CPU that also returns each row's log-sum-exp [B, H, T], with gradients through both.

    PyTorch's CPU kernel computes the log-sum-exp but passes no gradient through it. With P the weights, that gradient
    adds g * P to dS = P * (dO V' - delta), where delta = rowsum(dO * O): the same as lowering delta by g. The kernel sums
    delta up itself, so it gets one column more, in which dO is 1, V is 0 and O is said to be -g. Several values, given
    as a tuple, share one pass over the logits; padded copies, which the kernel wants, are not kept for the backward pass.
    """

    @staticmethod
    def forward(ctx, q, k, mask, scale, v, more=None):
        values = (v,) if more is None else (v, more)
        widths = [v.size(-1) for v in values]
        q_, k_, v_, bias = CpuFlash.inputs(q, k, mask, values)
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_, k_, v_, 0.0, mask is None, attn_mask=bias, scale=scale)
        outputs = [t.contiguous() for t in y[..., :sum(widths)].split(widths, -1)]
        ctx.save_for_backward(q, k, mask, lse, *values, *outputs)
        ctx.scale = scale
        return lse, *outputs

    @staticmethod
    def inputs(q, k, mask, values):
        """What the kernel takes: q, k and v padded, and the mask as something to add to the logits."""
        bias = None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)
        width = max(q.size(-1), sum(v.size(-1) for v in values) + 1)  # the kernel wants all three of one width
        return *(F.pad(t, (0, width - t.size(-1))) for t in (q, k, torch.cat(values, -1))), bias

    @staticmethod
    def backward(ctx, dlse, *dy):
        q, k, mask, lse, *rest = ctx.saved_tensors
        values, y = rest[:len(dy)], rest[len(dy):]
        widths = [v.size(-1) for v in values]
        q_, k_, v_, bias = CpuFlash.inputs(q, k, mask, values)
        more = (0, q_.size(-1) - sum(widths) - 1)
        dy = F.pad(torch.cat((*dy, torch.ones_like(q[..., :1])), -1), more)
        y = F.pad(torch.cat((*y, -dlse[..., None].to(q.dtype)), -1), more)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q_, k_, v_, y, lse, 0.0, bias is None, attn_mask=bias, scale=ctx.scale)
        dv = dv[..., :sum(widths)].split(widths, -1)
        return dq[..., :q.size(-1)], dk[..., :k.size(-1)], None, None, *dv


def flexes(device):
    """Whether FlexAttention has fused kernels here, forward and backward."""
    return device.type == "cuda"


@functools.cache
def compiled_flex():
    """FlexAttention is a fused kernel only when compiled, also where the model around it is not."""
    torch._dynamo.config.recompile_limit = max(256, torch._dynamo.config.recompile_limit)  # one for each shape; beyond it, silently, T x T
    return torch.compile(flex_attention, dynamic=False)


def flex(q, k, v, scale, mask):
    """FlexAttention on CUDA: (y, log-sum-exp), differentiable in both; mask is a BlockMask."""
    kernel = flex_attention if torch.compiler.is_compiling() or not q.is_cuda else compiled_flex()
    y, aux = kernel(q, k, v, block_mask=mask, scale=scale, return_aux=AuxRequest(lse=True))
    return y, aux.lse


def attend_lse(q, k, scale, mask, *values):
    """Causal attention over one or more values with each row's log-sum-exp: (lse [B, H, T] in float32 or better, y, ...)."""
    if isinstance(mask, BlockMask):
        y, lse = flex(q, k, torch.cat(values, -1), scale, mask)
    elif q.size(2) > 1 and q.device.type == "cpu" and q.numel():
        return CpuFlash.apply(q, k, mask, scale, *values)
    else:  # all logits in memory: for one query, and for prompts outside the CPU
        s = (q @ k.mT).float() * scale if q.dtype != torch.float64 else q @ k.mT * scale
        s = s if mask is None else s.masked_fill(~mask, -math.inf)
        y, lse = s.softmax(-1).to(q.dtype) @ torch.cat(values, -1), s.logsumexp(-1)
    return lse, *y.split([v.size(-1) for v in values], -1)


def row_statistics(q, k, v, scale, mask, n, detach, dropout=0.0):
    """y [B, H, T, D] and, of every attention row, entropy in nats and log of the sum of squared weights, each [B, H, T].

    With s the logits, entropy = LSE(s) - scale q.SDPA(q, k, k) and log sum p^2 = LSE(2s) - 2 LSE(s): no T x T tensor.
    n: how many keys each row sees. detach: no gradient into the statistics, and none of its cost.
    """
    together = not detach and (q.device.type != "cpu" or q.size(2) <= 1024)  # faster, but on CPU all becomes as wide as v and k
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
        lse, mean_key, *y = attend_lse(q, k, scale, mask, k.view_as(k), *([v] if together else []))
        lse2 = attend_lse(q, k, 2 * scale, mask, k[..., :16 * isinstance(mask, BlockMask)])[0]  # its values do not matter
        entropy = (lse - scale * (q.to(lse.dtype) * mean_key.to(lse.dtype)).sum(-1)).clamp_min(0).minimum(n.log())
    return y[0] if together else attend(q, k, v, scale, mask, dropout), entropy, lse2 - 2 * lse


def attend(q, k, v, scale, mask, dropout):
    """Causal attention of q [B, H, T, D] over k, v [B, H, S, D], the last T of S being the queries' own tokens."""
    if isinstance(mask, BlockMask):
        if not dropout:
            return flex(q, k, v, scale, mask)[0]
        mask = None  # it is there for traces alone: a window is refused with dropout
    causal = mask is None and q.size(2) > 1  # one query sees all there is
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, dropout_p=dropout)


SKIP_FROM = 2048  # keys from which skipping heads pays at decode on CPU (measured: docs/results.md)


def attend_selected(q, k, v, scale, used, mask):
    """One query per row, q [B, H, 1, D], through the heads that are `used` [B, H] alone; the others give 0.

    A head is read where it lies: gathering the chosen keys and values into one tensor costs more than it saves.
    """
    y = torch.zeros_like(q)
    for b, h in used.nonzero().tolist():
        m = None if mask is None else mask[min(b, len(mask) - 1), 0]
        y[b, h] = F.scaled_dot_product_attention(q[b:b + 1, h], k[b:b + 1, h], v[b:b + 1, h], attn_mask=m, scale=scale)[0]
    return y


def attend_packed(q, k, v, scale, used, capacity, sees, size=128):
    """Attention of the selected queries alone: used [B, H, T] -> (y [B, H, T, D], 0 where not used; queries dropped [B, H]).

    Each head's queries are packed in order of position, and FlexAttention is told the positions; a block of queries reads
    the keys up to its last position. A head takes `capacity` queries of a sequence: later ones are dropped, which no
    earlier token can notice.
    """
    B, H, T, D = q.shape
    rooms = min(math.ceil(capacity / size), -(-T // size)) * size
    place = used.int().argsort(dim=-1, descending=True, stable=True)[..., :rooms]  # positions of the used queries, in order
    count = used.sum(-1, keepdim=True)
    place = F.pad(place, (0, rooms - place.size(-1)))
    real = torch.arange(rooms, device=q.device) < count
    blocks = torch.where(real, place, 0).unflatten(-1, (-1, size))
    needed = torch.where(real.unflatten(-1, (-1, size)).any(-1), blocks.amax(-1) // size + 1, 0).int()  # blocks of keys
    every = torch.arange(-(-T // size), dtype=torch.int32, device=q.device).expand(*needed.shape, -1).contiguous()
    mask = BlockMask.from_kv_blocks(needed, every, BLOCK_SIZE=size, seq_lengths=(rooms, T),
                                    mask_mod=lambda b, h, i, j: real[b, h, i] & sees(place[b, h, i], j))
    packed = flex(q.gather(2, place[..., None].expand(-1, -1, -1, D)), k, v, scale, mask)[0]
    packed = torch.where(real[..., None], packed, 0.0)
    y = torch.zeros(B, H, T, v.size(-1), dtype=packed.dtype, device=q.device)
    return y.scatter_add(2, place[..., None].expand_as(packed), packed), (count.squeeze(-1) - rooms).clamp_min(0)


# ---- the mechanisms ----

LINEAR = lambda inputs: ("uniform", inputs ** -0.5)


def weight(*shape, start=None):
    """A parameter that does not decay. start: its initial value, LINEAR(inputs) for nn.Linear's own, None for GPT-2's."""
    p = nn.Parameter(torch.empty(*shape))
    p.start, p.no_decay = start, True
    return p


def float32_linear(layer, x):
    """layer(x) in float32 also under autocast, whose rounding would make ties of near logits."""
    with torch.autocast(x.device.type, enabled=False):
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        return F.linear(x.to(dtype), layer.weight.to(dtype), None if layer.bias is None else layer.bias.to(dtype))


class HeadRouter(nn.Module):
    """Which heads each token uses and how much, x [B, T, C] -> weights [B, T, H], exactly 0 where not selected.

    seed: softmax over the top k of an MLP's logits, summing to 1 (Learnable Attention Head Routing, model_novel.py).
    moh: the same times k, so that the mean is 1; shared heads are always on, and a second softmax weighs the two
    groups (MoH, arXiv 2410.11842, eqs. 5-8, in the scale of its published code). sigmoid: 2 sigmoid(logit), each for itself.
    """

    def __init__(self, config):
        super().__init__()
        C, hidden = config.n_embd, config.routing_hidden
        hidden = (C // 2 if config.routing == "published" else 0) if hidden is None else hidden
        self.mode, self.zero, self.coef = config.routing, config.routing_mask == "zero", config.routing_coef
        self.n_shared, self.k = config.routing_shared, config.top_k - config.routing_shared
        self.fc = nn.Linear(C, hidden) if hidden else None
        self.out = nn.Linear(hidden or C, config.n_head - self.n_shared, bias=hidden > 0)
        if self.n_shared > 1:  # one alone has nothing to share
            self.shared = nn.Linear(C, self.n_shared, bias=False)
        if self.n_shared:
            self.split = nn.Linear(C, 2, bias=False)

    def forward(self, x):
        """(weights and which heads are selected, each [B, T, H], shared heads first; logits of the routed ones [B, T, R])."""
        logits = float32_linear(self.out, F.gelu(self.fc(x)) if self.fc else x)
        selected = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, logits.topk(self.k, -1).indices, True)
        if self.mode == "sigmoid":
            return 2 * logits.sigmoid() * selected, selected, logits
        w = logits.masked_fill(~selected, 0.0 if self.zero else -math.inf).softmax(-1)
        if self.mode == "moh":
            w = self.k * w
            if self.n_shared:
                split = 2 * float32_linear(self.split, x).softmax(-1)
                s = self.n_shared * float32_linear(self.shared, x).softmax(-1) if self.n_shared > 1 else 1.0
                w = torch.cat((split[..., :1] * s, split[..., 1:] * w), -1)
        return w, F.pad(selected, (self.n_shared, 0), value=True), logits

    def penalty(self, weights, selected, logits):
        """{name: weighted loss}: seed's token entropy in nats, or the load balance R sum_i P_i f_i (MoH, eq. 9)."""
        if self.mode == "published":
            return {"routing_entropy": self.coef * -(weights * (weights + 1e-8).log()).sum(-1).mean()}
        share, load = logits.softmax(-1).flatten(0, -2).mean(0), selected[..., self.n_shared:].flatten(0, -2).to(logits.dtype).mean(0)
        if dist.is_available() and dist.is_initialized():  # the product of two means is not the mean of the ranks' products
            dist.all_reduce(load)
            load = load / dist.get_world_size()
        return {"routing_balance": self.coef * load.numel() * (share * load).sum()}


class SentinelGate(nn.Module):
    """One learned gate per head, [H] (Adaptive Transformer, section 2.1; hard concrete: arXiv 1712.01312, eqs. 10-13).

    sigmoid: g = sigmoid(logit). hard_concrete: a stretched, clamped sigmoid, noisy while training, with real zeros.
    """

    BETA, LOW, HIGH = 2 / 3, -0.1, 1.1  # the paper's values

    def __init__(self, config, n_head):
        super().__init__()
        self.hard, self.coef = config.sentinel == "hard_concrete", config.sentinel_coef
        self.logit = weight(n_head, start=config.sentinel_init)

    def forward(self, noisy=None):
        if not self.hard:
            return self.logit.sigmoid()
        s = self.logit
        if self.training if noisy is None else noisy:  # one draw for the whole batch: the gates are weights
            u = torch.rand_like(s).clamp(1e-6, 1 - 1e-6)
            s = (u.log() - (1 - u).log() + s) / self.BETA
        return (s.sigmoid() * (self.HIGH - self.LOW) + self.LOW).clamp(0, 1)

    def penalty(self):
        """{name: weighted loss}: the sum of the gates (L1), or of the probabilities that they are not zero (L0)."""
        if not self.hard:
            return {"gate_l1": self.coef * self.logit.sigmoid().sum()}
        return {"gate_l0": self.coef * (self.logit - self.BETA * math.log(-self.LOW / self.HIGH)).sigmoid().sum()}


class Agency(nn.Module):
    """States and consent of the heads, as buffers: moved between steps, a state never recompiles (Adaptive Transformer, 2.2)."""

    STATES = {"active": 1.0, "overloaded": 0.5, "misaligned": 0.7, "withdrawn": 0.0}  # and their factors

    def __init__(self, config, n_head):
        super().__init__()
        self.enforce, self.threshold = config.agency_enforce, config.agency_threshold
        self.register_buffer("state", torch.zeros(n_head, dtype=torch.long))
        self.register_buffer("consent", torch.ones(n_head, dtype=torch.bool))
        self.register_buffer("utilisation", torch.zeros(n_head))
        self.register_buffer("last_signal", torch.zeros(n_head, dtype=torch.long))  # the step of the last change
        *factors, withdrawn = self.STATES.values()
        self.register_buffer("factors", torch.tensor([*factors, withdrawn if self.enforce else 1.0]), persistent=False)

    def forward(self):
        """Factor of each head, [H]; no consent means withdrawn, unless that is not enforced."""
        return self.factors[self.state.masked_fill(~self.consent, len(self.STATES) - 1) if self.enforce else self.state]


class SkipFusion(nn.Module):
    """Joins an encoder block's output `skip` to a decoder block's output h, both [B, T, C] (Adaptive Transformer, 2.3).

    concat: h + W [skip; h]; add: h + sigmoid(logit) skip; seed: the write-up's Linear([skip; h]). The initial weight
    of the skip falls with depth (its section 5.3).
    """

    def __init__(self, config, depth):
        super().__init__()
        C, share = config.n_embd, config.unet_init * (1 - depth / (config.n_layer // 2))
        self.mode, self.on = config.unet, config.unet_skips
        if self.mode == "add":
            self.logit = weight(1, start=math.log(share / (1 - share)) if share else -50.0)
        elif self.mode == "concat":
            self.weight = weight(C, 2 * C, start=torch.cat((share * torch.eye(C), torch.zeros(C, C)), 1))
        else:
            self.weight, self.bias = weight(C, 2 * C, start=LINEAR(2 * C)), weight(C, start=LINEAR(2 * C))

    def forward(self, h, skip):
        if self.mode == "add":
            return h + self.logit.sigmoid() * skip if self.on else h
        mixed = F.linear(torch.cat((skip if self.on else torch.zeros_like(skip), h), -1), self.weight, getattr(self, "bias", None))
        return mixed if self.mode == "published" else h + mixed


class ConstraintHeads(nn.Module):
    """Heads of their own for named constraints: projections, a router over them, a score per token (constraint write-up).

    The router reads the running mean of x, or a hint [B, C]; the write-up's mean over the whole sequence would leak.
    """

    def __init__(self, config, head_size):
        super().__init__()
        n, C, D = config.n_constraint, config.n_embd, head_size
        self.names, self.n_head, self.per_name = config.constraint_names, n, config.constraint_heads
        self.seed, self.sparsity = config.constraint_mode == "published", config.constraint_sparsity_coef
        self.c_attn = nn.Linear(C, 3 * n * D, bias=config.bias)
        self.c_proj = nn.Linear(n * D, C, bias=False)
        self.fc, self.out = nn.Linear(C, config.constraint_hidden), nn.Linear(config.constraint_hidden, n)
        self.w1, self.b1 = weight(n, D, D), weight(n, D, start=0.0)  # the scorers, one MLP per head
        self.w2, self.b2 = weight(n, D), weight(n, start=0.0)

    def gates(self, x, ctx, layer):
        """Router gates in (0, 1), [B, T, heads] (T is 1 for a hint)."""
        if ctx.hint is not None:
            mean = ctx.hint[:, None].to(x.dtype)
        else:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            total = (x if ctx.real is None else x * ctx.real).cumsum(1)
            if ctx.cache is not None:
                total = ctx.cache.carry(layer, total)
            mean = total / (ctx.at + 1)[..., None]
        return float32_linear(self.out, F.relu(self.fc(mean.to(self.fc.weight.dtype)))).sigmoid()

    def scores(self, y):
        """One logit per head and token, [B, heads, T], of the heads' outputs y [B, heads, T, D]."""
        hidden = torch.einsum("bhtd,hed->bhte", y, self.w1.to(y.dtype)) + self.b1[:, None].to(y.dtype)
        return torch.einsum("bhtd,hd->bht", F.relu(hidden), self.w2.to(y.dtype)) + self.b2[:, None]

    def named(self, scores):
        """{name: [B, T]}, the mean over each name's heads of scores [B, heads, T]."""
        return dict(zip(self.names, scores.unflatten(1, (len(self.names), self.per_name)).mean(2).unbind(1)))


class AdvantageAttention(nn.Module):
    """A2C attention: a critic's scalar a [B, T, H], linear in x, acts on the logits of its head (A2C-Attention).

    seed: a_t q_t . q_s / sqrt(d), a signed temperature of the query. temperature: exp(a_t) instead. key_bias: w a_s is
    added to the logits of key s. In the corrected modes a is trained to predict the advantage, which needs the future.
    """

    PAD = 8  # key_bias: the bias is one more dimension of q and k, and kernels want multiples of 8

    def __init__(self, config, n_head):
        super().__init__()
        self.mode = config.a2c
        self.critic = nn.Linear(config.n_embd, n_head, bias=self.mode == "published")
        if self.mode == "published":
            self.critic.weight.start = self.critic.bias.start = LINEAR(config.n_embd)
        if self.mode == "temperature":
            self.critic.weight.start = 0.0
        if self.mode == "key_bias":
            self.mix = weight(n_head, start=0.0)

    def forward(self, q, k, v, x, scale):
        """q, k, v [B, H, T, D (+ PAD)] with the critic's a [B, T, H] worked in, and a."""
        a = float32_linear(self.critic, x)
        per_head = a.transpose(1, 2)[..., None]
        if self.mode == "published":
            return q * per_head.to(q.dtype), k, v, a
        if self.mode == "temperature":
            return q * per_head.exp().to(q.dtype), k, v, a
        bias = (self.mix[:, None, None] * per_head / scale).to(k.dtype)
        q, k, v = (F.pad(t, (0, self.PAD - n)) for t, n in ((torch.cat((q, torch.ones_like(bias)), -1), 1), (torch.cat((k, bias), -1), 1), (v, 0)))
        return q, k, v, a


def discounted_return(r, scored, gamma):
    """G_t = sum_k gamma^k r_(t+k) / sum_k gamma^k over the `scored` tokens that are left, [B, T].

    That is (1 - gamma) sum_k gamma^k r_(t+k), the weights beyond the text's end shared out among the rest. The sums are
    made by doubling steps: log2(T) passes and no T x T matrix.
    """
    both, step = torch.stack((r * scored, scored.to(r.dtype))), 1
    while step < r.size(1):
        both = both + gamma**step * F.pad(both[..., step:], (0, step))
        step *= 2
    return both[0] / both[1].clamp_min(1e-12)


class ContextGate(nn.Module):
    """ACAG: a gate per head from context length and the shape of the head's attention row (ACAG README, architecture).

    seed: sigmoid(W [c, mean, std] + b). normalised: 2 sigmoid(W [c, 1 - entropy / log n, log(n sum p^2)] + b), zero at the
    start: the mean is always 1/n, and the raw std shrinks with n.
    """

    def __init__(self, config, n_head, head_size):
        super().__init__()
        shape = (n_head,) if config.acag == "headwise" else (n_head, head_size)
        self.seed, self.detach, self.length = config.acag_mode == "published", config.acag_detach, config.acag_length
        self.weight, self.bias = (weight(*shape, *last, start=LINEAR(3) if self.seed else 0.0) for last in ((3,), ()))

    def forward(self, entropy, log_p2, n, at):
        """Gate [B, H, T, 1 or D] from the statistics [B, H, T], the keys seen n and the tokens before, at."""
        at = (at if at.dim() == 1 else at[:, None]).to(entropy.dtype)  # padded rows have positions of their own
        alone = n == 1  # nothing to choose from: no statistics, and no logarithm or root whose gradient is not a number
        m = n.masked_fill(alone, 2).to(entropy.dtype)
        if self.seed:
            variance = torch.where(alone, 0.0, log_p2.exp() / m - 1 / m**2)
            spread = torch.where(alone, 0.0, (variance.clamp_min(0) + 1e-12).sqrt())
            features = (at + 1) / self.length, 1 / n, spread
        else:
            features = ((1 + at).log() / math.log(1 + self.length), torch.where(alone, 0.0, 1 - entropy / m.log()),
                        torch.where(alone, 0.0, m.log() + log_p2))
        z = torch.stack([f.expand_as(entropy).to(entropy.dtype) for f in features], -1)
        w = self.weight if self.weight.dim() == 3 else self.weight[:, None]  # (H, 1 or D, 3)
        z = torch.einsum("bhtf,hdf->bhtd", z, w.to(z.dtype)) + self.bias.view(len(w), 1, w.size(1))
        return z.sigmoid() if self.seed else 2 * z.sigmoid()


class OutputGate(nn.Module):
    """Gated attention, the rival: sigmoid(x W) on the heads' outputs, per head or per element (arXiv 2505.06708, eq. 5)."""

    def __init__(self, config, n_head, head_size):
        super().__init__()
        self.n_head, self.per = n_head, head_size if config.output_gate == "elementwise" else 1
        self.proj = nn.Linear(config.n_embd, n_head * self.per, bias=False)

    def forward(self, x):
        """[B, H, T, 1 or D]."""
        return self.proj(x).sigmoid().unflatten(-1, (self.n_head, self.per)).transpose(1, 2)


def explain(traces, tokens, name, k=5, row=0):
    """One line: the k tokens of a sequence with the highest scores for a constraint, by block, from model(..., traces=True).

    tokens: the sequence's tokens as text. Raises ValueError when there is no such trace.
    """
    found = {key: value for key, value in traces.items() if key.endswith(f".constraint.{name}")}
    if not found:
        names = sorted({key.rsplit(".", 1)[1] for key in traces if ".constraint." in key})
        raise ValueError(f"no scores for {name!r}" + (f"; there are {', '.join(names)}" if names else ": the model has no constraint heads"))
    lines = []
    for key, value in found.items():
        top = value[row].topk(min(k, len(tokens)))
        lines.append(f"{name} (block {key.split('.')[1]}): " + ", ".join(f"{tokens[i]!r} {s:.2f}" for s, i in zip(top.values.tolist(), top.indices.tolist())))
    return "\n".join(lines)


def constraint_loss(scores, targets, weights=None, focal=0.0, positive=1.0):
    """Mean over names of weighted BCE with logits, nats. scores, targets: {name: [B, T]}; targets in [0, 1], negative: ignored.

    focal: factor |target - p|^focal (focal loss, arXiv 1708.02002, for soft targets); positive: weight of positive targets.
    Raises ValueError for a name that has no scores.
    """
    unknown = set(targets) - set(scores)
    if unknown or not targets:
        raise ValueError(f"constraint targets for {sorted(unknown) or 'nothing'}; the heads are for {', '.join(scores)}")
    total = 0.0
    for name, y in targets.items():
        s, y = scores[name].float(), y.float()
        known, y = y >= 0, y.clamp_min(0)
        nats = F.binary_cross_entropy_with_logits(s, y, reduction="none", pos_weight=torch.tensor(positive, device=s.device))
        nats = nats * (y - s.sigmoid()).abs() ** focal if focal else nats
        total = total + (weights or {}).get(name, 1.0) * (nats * known).sum() / known.sum().clamp_min(1)
    return total / len(targets)


# ---- the transformer ----

class CausalSelfAttention(nn.Module):
    """Multi-head causal attention with the mechanisms of its config, [B, T, C] -> [B, T, C]."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_size = layer, config.head_size_in(layer)
        self.scale = config.qk_max / self.head_size if config.qk_max else self.head_size ** -0.5
        self.kept = list(range(config.n_head)) if config.heads is None else config.heads[layer]  # what pruning left
        self.n_base, self.n_head, D = config.n_head, len(self.kept), self.head_size  # n_base: before pruning
        self.rope, self.qk_norm, self.head_norm = config.pos == "rope", config.qk_norm, config.head_norm
        self.tied = config.a2c == "published"  # keys are queries, values are x
        self.parts = 1 if self.tied else 3  # q, k, v in c_attn
        self.c_attn = nn.Linear(config.n_embd, self.parts * self.n_head * D, bias=config.bias)
        self.c_proj = nn.Linear(self.n_head * D, config.n_embd, bias=config.bias)
        self.attn_dropout = config.dropout if config.attn_dropout is None else config.attn_dropout
        self.resid_dropout = nn.Dropout(config.dropout)
        self.constraint = ConstraintHeads(config, D) if config.constraint_in(layer) else None
        self.n_extra = config.n_constraint if self.constraint else 0
        n = self.n_head + self.n_extra
        self.router = HeadRouter(config) if config.routing else None
        self.route_in_eval, self.route_skip, self.capacity = config.routing_eval_gate, config.routing_skip, config.routing_capacity
        self.sentinel = SentinelGate(config, n) if config.sentinel else None
        self.agency = Agency(config, n) if config.agency else None
        self.a2c = AdvantageAttention(config, self.n_head) if config.a2c else None
        self.acag = ContextGate(config, n, D) if config.acag else None
        self.output_gate = OutputGate(config, n, D) if config.output_gate else None
        self.register_buffer("hand", None, persistent=False)  # gates set by hand, [heads], NaN: not set

    def split(self, qkv, n_head, ctx, tied_to=None):
        """[B, T, (3 or 1) * H * D] -> normed and rotated queries and keys, and values, each [B, H, T, D]."""
        B, T, _ = qkv.shape
        if tied_to is None:
            qk, v = qkv.view(B, T, 3, n_head, self.head_size).split((2, 1), dim=2)
        else:  # keys are queries, values are slices of x
            qk, v = qkv.view(B, T, 1, n_head, self.head_size), tied_to.unflatten(-1, (1, -1, self.head_size))
            v = v if v.size(3) == n_head else v[..., self.kept, :]
        if self.qk_norm:
            qk = rms_norm(qk)
        if self.rope:
            qk = rotate(qk, *ctx.rope[self.head_size])
        qk = qk.transpose(1, 3).unbind(2)  # (B, H, 2, T, D) -> 2 x (B, H, T, D)
        return qk[0], qk[-1], v.squeeze(2).transpose(1, 2)

    def project(self, x, ctx):
        """q, k, v of x, each [B, H, T, D], base heads before constraint heads; what the critic and the routers said."""
        q, k, v = self.split(self.c_attn(x), self.n_head, ctx, x if self.tied else None)
        said = {}
        if self.router and (self.training or self.route_in_eval):
            said["routing_weights"], said["selected"], said["routing_logits"] = w, *_ = self.router(x)
            w = w if self.n_head == w.size(-1) else w[..., self.kept]
            said["routing"] = F.pad(w, (0, self.n_extra), value=1.0).transpose(1, 2)  # (B, H, T); constraint heads are always on
        if self.a2c:
            q, k, v, said["advantage"] = self.a2c(q, k, v, x, self.scale)
        if self.constraint:
            more = self.split(self.constraint.c_attn(x), self.n_extra, ctx)
            said["router_gates"] = gates = self.constraint.gates(x, ctx, self.layer)
            if self.constraint.seed:  # the write-up gates the values
                more = more[0], more[1], more[2] * gates.transpose(1, 2)[..., None].to(x.dtype)
            q, k, v = (torch.cat((t, F.pad(u, (0, t.size(-1) - self.head_size))), 1) for t, u in zip((q, k, v), more))
        kind = x.device.type  # under autocast a norm may have made q and k float32, and x is it anyway
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else v.dtype
        return q.to(dtype), k.to(dtype), v.to(dtype), said

    def attend(self, q, k, v, said, ctx):
        """y [B, H, T, D], and (entropy, log sum p^2) of the attention rows where somebody asks for them."""
        dropout, rows = self.attn_dropout if self.training else 0.0, None
        if self.acag or ctx.traces:
            detach = self.acag is None or self.acag.detach
            y, *rows = row_statistics(q, k, v, self.scale, ctx.mask, ctx.n, detach, dropout)
        elif "routing" in said and self.route_skip and q.size(2) == 1 and k.size(2) >= SKIP_FROM and not (k.is_cuda or torch.is_grad_enabled()):
            y = attend_selected(q, k, v, self.scale, said["routing"].squeeze(-1) > 0, ctx.mask)
        elif "routing" in said and self.capacity and flexes(q.device) and ctx.cache is None and not isinstance(ctx.mask, torch.Tensor):
            share = self.router.k / self.router.out.out_features
            y, said["dropped"] = attend_packed(q, k, v, self.scale, said["routing"] > 0, self.capacity * share * q.size(2), ctx.sees)
        else:
            y = attend(q, k, v, self.scale, ctx.mask, dropout)
        return y[..., :self.head_size], rows

    def static_gate(self, noisy=None):
        """Sentinel gate times agency factor of each head, [H], or what was set by hand; None where there is nothing."""
        gates = ([self.sentinel(noisy)] if self.sentinel else []) + ([self.agency()] if self.agency else [])
        gate = math.prod(gates) if gates else None
        if self.hand is not None:
            gate = torch.where(self.hand.isnan(), 1.0 if gate is None else gate, self.hand)
        return gate

    def factors(self, x, rows, said, ctx):
        """{name: factor, broadcasting over the heads' outputs [B, H, T, D]}, and auxiliary losses."""
        found, losses = {}, {}
        gate = self.static_gate()
        if gate is not None:
            found["gate"] = gate[:, None, None]
        if "routing" in said:
            found["routing"] = said.pop("routing")[..., None]
            losses.update(self.router.penalty(said["routing_weights"], said["selected"], said["routing_logits"]) if ctx.losses else {})
        if self.output_gate:
            found["output_gate"] = self.output_gate(x)
        if self.acag:
            found["acag_gate"] = self.acag(*rows, ctx.n, ctx.at)
        if self.constraint and not self.constraint.seed:
            found["router"] = F.pad(said["router_gates"], (self.n_head, 0), value=1.0).transpose(1, 2)[..., None]
        if ctx.losses:
            losses.update(self.sentinel.penalty() if self.sentinel else {})
            if self.constraint and self.constraint.sparsity:
                losses["constraint_router"] = self.constraint.sparsity * said["router_gates"].mean()
        return found, losses

    def merge(self, y):
        """Heads side by side, [B, H, T, D] -> [B, T, C], and out into the residual stream."""
        if self.constraint:
            y, extra = y.split((self.n_head, self.n_extra), 1)
            return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)) + self.constraint.c_proj(extra.transpose(1, 2).flatten(2)))
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))

    def forward(self, x, ctx):
        """(what joins the residual stream, {name: auxiliary loss}, {name: trace})."""
        q, k, v, said = self.project(x, ctx)
        if ctx.cache is not None:
            k, v = ctx.cache.append(self.layer, k, v)
        y, rows = self.attend(q, k, v, said, ctx)
        y = rms_norm(y) if self.head_norm else y
        found, losses = self.factors(x, rows, said, ctx)
        out = y
        if found:  # one pass over y: the small factors are multiplied first
            out = y * math.prod(sorted(found.values(), key=lambda f: f.size(-1))).to(y.dtype)
        return self.merge(out), losses, self.traces(q, k, y, rows, found, said, ctx)

    def traces(self, q, k, y, rows, found, said, ctx):
        """{name: tensor} of what was asked for; losses need the advantages and the constraint scores."""
        seen = {"advantage": said["advantage"]} if "advantage" in said else {}
        if self.constraint and (ctx.scores or ctx.traces):
            scores = self.constraint.scores(y[:, self.n_head:])
            seen.update({f"constraint.{name}": score for name, score in self.constraint.named(scores).items()}, head_scores=scores)
        if ctx.traces:
            seen.update(said, entropy=rows[0], concentration=rows[1].exp(), **{n: f for n, f in found.items() if n not in ("routing", "router")})
            if "routing_weights" in said:
                seen.update(routing_summary(said["routing_weights"], said["selected"]))
            if self.agency:
                seen["agency"] = self.agency()
            if ctx.traces == "maps":
                seen["map"] = ((q @ k.mT).float() * self.scale).masked_fill(~ctx.mask, -math.inf).softmax(-1)
        return seen

    # ---- heads set by hand, and gone ----

    def numbers(self):
        """The heads that are here, by their original numbers; constraint heads are numbered on from n_head."""
        return self.kept + [self.n_base + i for i in range(self.n_extra)]

    def off(self):
        """The base heads whose gate is exactly 0 when evaluated, by their original numbers."""
        gate = self.static_gate(noisy=False)
        return [] if gate is None else [h for h, g in zip(self.kept, gate.tolist()) if g == 0]

    @torch.no_grad()
    def prune(self, gone, optimizers=()):
        """Drop base heads, by their original numbers, from every tensor, and from the optimizers' moments."""
        keep = [i for i, h in enumerate(self.kept) if h not in gone]
        H, D = self.n_head, self.head_size

        def index(parts, per, extra=True):
            """What stays of a dimension that holds parts x heads x per entries, and then the constraint heads'."""
            base = torch.arange(parts * H * per).view(parts, H, per)[:, keep].flatten()
            return torch.cat((base, torch.arange(parts * H * per, parts * H * per + extra * self.n_extra * per)))

        todo = [(self.c_attn, ("weight", "bias"), 0, index(self.parts, D, False)), (self.c_proj, ("weight",), 1, index(1, D, False)), (self, ("hand",), 0, index(1, 1))]
        todo += [(self.sentinel, ("logit",), 0, index(1, 1))] if self.sentinel else []
        todo += [(self.agency, ("state", "consent", "utilisation", "last_signal"), 0, index(1, 1))] if self.agency else []
        todo += [(self.acag, ("weight", "bias"), 0, index(1, 1))] if self.acag else []
        todo += [(self.a2c.critic, ("weight", "bias"), 0, index(1, 1, False)), (self.a2c, ("mix",), 0, index(1, 1, False))] if self.a2c else []
        todo += [(self.output_gate.proj, ("weight",), 0, index(1, self.output_gate.per))] if self.output_gate else []
        for module, names, dim, rows in todo:
            for name in names:
                take(module, name, dim, rows, optimizers)
        self.kept, self.n_head = [self.kept[i] for i in keep], len(keep)
        self.c_attn.out_features, self.c_proj.in_features = self.c_attn.weight.size(0), self.c_proj.weight.size(1)
        if self.output_gate:
            self.output_gate.n_head, self.output_gate.proj.out_features = self.n_head + self.n_extra, self.output_gate.proj.weight.size(0)


def take(module, name, dim, rows, optimizers):
    """Keep only `rows` of a module's parameter or buffer along `dim`, and of what optimizers hold about it."""
    old = getattr(module, name, None)
    if old is None:
        return
    rows = rows.to(old.device)
    if not isinstance(old, nn.Parameter):
        return setattr(module, name, old.index_select(dim, rows))
    new = nn.Parameter(old.index_select(dim, rows), old.requires_grad)
    new.__dict__.update(old.__dict__)
    new.grad = None if old.grad is None else old.grad.index_select(dim, rows)
    setattr(module, name, new)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
        if old in optimizer.state:
            state = optimizer.state.pop(old)
            optimizer.state[new] = {k: t.index_select(dim, rows) if torch.is_tensor(t) and t.shape == old.shape else t for k, t in state.items()}


def routing_summary(weights, selected):
    """What a router does, from weights and selection [B, T, H]: load per head, dead heads, and how spread it is.

    effective_heads: exp of the load's entropy; token_entropy: of one token's weights, batch_entropy: of all tokens' mean, nats.
    """
    used = selected.flatten(0, 1).float().mean(0)
    entropy = lambda p: -(p * p.clamp_min(1e-12).log()).sum(-1)
    share = lambda w: w / w.sum(-1, keepdim=True).clamp_min(1e-12)
    return dict(routing_load=used, dead_heads=(used == 0).sum(), effective_heads=entropy(share(used)).exp(),
                token_entropy=entropy(share(weights)).mean(), batch_entropy=entropy(share(weights.flatten(0, 1).mean(0))))


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
    """Attention, then MLP, each reading the normed residual stream and adding to it."""

    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x, ctx):
        y, losses, traces = self.attn(self.ln_1(x), ctx)
        x = x + y
        return x + self.mlp(self.ln_2(x)), losses, traces


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
        if config.pos == "learned":
            self.transformer.wpe = nn.Embedding(config.block_size, config.n_embd)
        else:
            for size in {config.head_size_in(layer) for layer in range(config.n_layer)}:
                for name, table in zip(("cos", "sin"), rope_tables(config, size)):
                    self.register_buffer(f"{name}{size}", table, persistent=False)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.transformer.wte.weight
        if config.unet:
            self.fuse = nn.ModuleList(SkipFusion(config, depth) for depth in range(config.n_layer // 2))
        if config.a2c in ("temperature", "key_bias"):
            self.value = nn.Linear(config.n_embd, 1)
        if config.window:
            if config.window_random:
                self.register_buffer("random_blocks", random_blocks(config), persistent=False)
            t = torch.arange(config.block_size)
            n = torch.cat([self.sees(rows[:, None], t).sum(-1) for rows in t.split(256)])
            self.register_buffer("n_seen", n, persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """GPT-2's initial values, each drawn from a generator of its own that is keyed by (seed, parameter name).

        Two models therefore start bit-identical in every parameter that they share, whatever else they have.
        """
        for name, p in self.named_parameters():
            digest = hashlib.sha256(f"{self.config.seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            out = name.endswith("c_proj.weight")  # writes into the residual stream
            start = getattr(p, "start", None)  # a mechanism's own initial value
            if isinstance(start, tuple):
                p.uniform_(-start[1], start[1], generator=generator)
            elif start is not None:
                p.copy_(torch.as_tensor(start))
            elif p.dim() < 2:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
            elif self.config.zero_init and (out or name == "lm_head.weight"):
                p.zero_()
            else:
                p.normal_(0.0, 0.02 / math.sqrt(2 * self.config.n_layer) if out else 0.02, generator=generator)

    # ---- forward ----

    def hidden(self, idx, cache=None, pad=None):
        """Final hidden states [B, T, C] of idx [B, T], after what `cache` holds; row b's first pad[b] columns are empty."""
        return self.trunk(idx, cache, pad)[0]

    def trunk(self, idx, cache=None, pad=None, **asked):
        """hidden(), auxiliary losses {name: sum over blocks}, and traces {"blocks.<i>.<name>": tensor}."""
        c, N = self.config, self.config.n_layer
        B, T = idx.shape
        past = cache.length if cache else 0
        if past + T > c.block_size:
            raise ValueError(f"{past + T} tokens do not fit block_size={c.block_size}")
        if pad is None:
            at = slice(past, past + T)
        else:
            at = (torch.arange(past, past + T, device=idx.device) - pad[:, None]).clamp_min(0)  # (B, T)
        ctx = self.context(at, past, T, cache, pad, idx.device, **asked)
        x = self.transformer.wte(idx)
        if c.pos == "learned":
            x = x + self.transformer.wpe.weight[at]
        if c.embed_norm:
            x = rms_norm(x)
        x = self.transformer.drop(x)
        losses, traces, skips = {}, {}, []
        for i, block in enumerate(self.transformer.h):
            if c.checkpoint_activations and self.training:
                x, more, seen = checkpoint(block, x, ctx, use_reentrant=False)
            else:
                x, more, seen = block(x, ctx)
            if c.unet and i < N // 2:
                skips.append(x)
            elif c.unet and i >= N - N // 2:  # an odd number of blocks leaves the middle one without a partner
                x = self.fuse[i - (N - N // 2)](x, skips.pop())
            for name, loss in more.items():
                losses[name] = losses[name] + loss if name in losses else loss
            traces.update({f"blocks.{i}.{name}": value for name, value in seen.items()})
        if cache:
            cache.length += T
        return self.transformer.ln_f(x), losses, traces

    def context(self, at, past, T, cache, pad, device, losses=False, scores=False, traces=False, hint=None):
        """The Context of a forward pass: only what its flags ask for."""
        c, mask, rope, n, real = self.config, None, None, None, None
        counts = c.acag or traces
        if flexes(device) and cache is None and pad is None and traces != "maps":
            mask = self.block_mask(T, device) if c.window or counts else None
        elif pad is not None or (past and T > 1) or c.window or traces == "maps" or (counts and T > 1 and device.type != "cpu"):
            mask = self.mask(past, T, pad, device)
        if c.pos == "rope":  # over [B, T, (q, k), H, D]
            sizes = {block.attn.head_size for block in self.transformer.h}
            rope = {d: tuple(getattr(self, f"{name}{d}")[at][..., None, None, :] for name in ("cos", "sin")) for d in sizes}
        if isinstance(at, slice):
            at = torch.arange(past, past + T, device=device) if counts or c.constraint_names else None
        elif c.constraint_names:
            real = (torch.arange(past, past + T, device=device) >= pad[:, None])[..., None]
        if counts:
            n = (self.n_seen[at] if c.window else at + 1).to(torch.promote_types(self.transformer.wte.weight.dtype, torch.float32))
            n = n if pad is None else n[:, None]
        return Context(rope, cache, mask, at, n, real, self.sees, hint, losses, scores, traces)

    def sees(self, query, key):
        """Whether the token at position `query` may read position `key`, both from 0, broadcast."""
        sees = key <= query
        if self.config.window:
            near = (query - key < self.config.window) | (key < self.config.window_global)
            if self.config.window_random:
                size = self.config.window_block
                near = near | self.random_blocks[query.clamp_min(0) // size, key.clamp_min(0) // size]
            sees = sees & near
        return sees

    def mask(self, past, T, pad, device):
        """Who sees whom, True for yes, [1 or B, 1, T, past + T]: causal, within the window, and no row sees its padding."""
        query, key = torch.arange(past, past + T, device=device)[:, None], torch.arange(past + T, device=device)
        if pad is None:
            return self.sees(query, key)[None, None]
        query, key = query - pad[:, None, None], key - pad[:, None, None]
        return (self.sees(query, key) & (key >= 0) | (key == query))[:, None]  # an empty query sees itself: a softmax needs something

    def block_mask(self, T, device, size=128):
        """The same for FlexAttention, from blocks alone: which are seen in part, and which whole. Nothing is T x T."""
        i, j = torch.arange(-(-T // size), device=device)[:, None], torch.arange(-(-T // size), device=device)
        some, whole = i >= j, i > j
        if self.config.window:
            window, first = self.config.window, self.config.window_global
            near = ((i - j) * size - (size - 1) < window) | (j * size < first)
            if self.config.window_random:
                cells, step = self.random_blocks, self.config.window_block
                rows, columns = cells.nonzero().unbind(1)
                hits = torch.zeros_like(some)
                ends = torch.arange(-(-step // size) + 1, device=device)
                touched = lambda cell: (cell[:, None] * step // size + ends).minimum((cell[:, None] * step + step - 1) // size).clamp_max(len(some) - 1)
                hits[touched(rows)[:, :, None], touched(columns)[:, None, :]] = True
                near = near | hits
            some = some & near
            whole = whole & (((i - j) * size + size - 1 < window) | (j * size + size - 1 < first))

        def listed(table):
            """How many blocks each row of a table has, and which, in the form of BlockMask."""
            return table.sum(-1, dtype=torch.int32)[None, None], table.int().argsort(dim=-1, descending=True, stable=True).int()[None, None]

        return BlockMask.from_kv_blocks(*listed(some & ~whole), *listed(whole), BLOCK_SIZE=size, seq_lengths=(T, T),
                                        mask_mod=lambda b, h, q, k: self.sees(q, k))

    def head(self, x):
        """Logits in float32, [..., C] -> [..., V]."""
        logits = self.lm_head(x).float()
        if self.config.softcap:
            logits = self.config.softcap * torch.tanh(logits / self.config.softcap)
        return logits

    def forward(self, idx, targets=None, traces=False, constraint_targets=None, router_hint=None):
        """idx, targets [B, T] -> Output; targets of -1 are not scored. Without targets there are no losses.

        traces: True, or "maps" for attention maps too. constraint_targets: {name: [B, T]}, see constraint_loss().
        router_hint [B, C]: read by the constraint router instead of the text so far.
        """
        c = self.config
        x, losses, seen = self.trunk(idx, losses=targets is not None, scores=constraint_targets is not None, traces=traces, hint=router_hint)
        logits, loss = self.head(x), None
        if targets is not None and c.a2c in ("temperature", "key_bias"):
            nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none").view_as(targets)
            scored = targets != -1
            loss = nats.sum() / scored.sum()
            losses.update(self.critic_losses(x, nats.detach(), scored, seen))
        elif targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        if constraint_targets is not None:
            each = [{n: seen[f"blocks.{i}.constraint.{n}"] for n in c.constraint_names or ()} for i in range(c.n_layer) if c.constraint_in(i)]
            weights = dict(zip(c.constraint_names or (), c.constraint_name_coef or ()))
            terms = [constraint_loss(scores, constraint_targets, weights, c.constraint_focal, c.constraint_positive_coef) for scores in each or [{}]]
            losses["constraint"] = c.constraint_coef * sum(terms) / len(terms)
        return Output(logits, loss, losses, seen if traces else None)

    def critic_losses(self, x, nats, scored, seen):
        """A2C's two auxiliary losses; adds return, value and advantage [B, T] and how well they are predicted to `seen`.

        The return G_s discounts the log-probabilities of the tokens to come, so it is a target only, never an input. The
        value reads the last hidden state and A its block's input; no gradient of the value's error reaches the blocks.
        """
        G = discounted_return(-nats, scored, self.config.a2c_gamma)
        V = float32_linear(self.value, x.detach()).squeeze(-1)
        advantage = (G - V).detach()
        keys = [f"blocks.{i}.advantage" for i in range(self.config.n_layer)]
        predicted = {key: seen[key] for key in keys if seen[key].size(-1)}
        error = sum(((a - advantage[..., None]).square().mean(-1) * scored).sum() for a in predicted.values()) / max(1, len(predicted))
        share = lambda rest, whole: 1 - rest[scored].var() / whole[scored].var()
        if seen and "blocks.0.entropy" in seen:  # traces were asked for
            seen.update({"a2c.return": G, "a2c.value": V, "a2c.advantage": advantage, "a2c.explained_variance": share(G - V, G)})
            for key, a in predicted.items():
                pairs = torch.stack((a.mean(-1)[scored].to(G.dtype), advantage[scored]))
                seen[key.replace("advantage", "advantage_correlation")] = torch.corrcoef(pairs)[0, 1]
        return {"a2c_value": self.config.a2c_value_coef * ((V - G).square() * scored).sum() / scored.sum(),
                "a2c_advantage": self.config.a2c_advantage_coef * error / scored.sum()}

    # ---- heads ----

    def set_head(self, layer, head, gate=None, state=None, consent=None, step=0):
        """Set a head's gate by hand (overrides sentinel and agency; None leaves it), its agency state, its consent.

        Raises ValueError for a head or state that there is not.
        """
        if not 0 <= layer < self.config.n_layer:
            raise ValueError(f"there is no block {layer}; they go from 0 to {self.config.n_layer - 1}")
        attn = self.transformer.h[layer].attn
        heads = attn.numbers()
        if head not in heads:
            raise ValueError(f"block {layer} has no head {head}; it has {', '.join(map(str, heads))}")
        i = heads.index(head)
        if gate is not None:
            if attn.hand is None:
                attn.hand = torch.full((len(heads),), math.nan, device=attn.c_proj.weight.device)
            attn.hand[i] = gate
        if state is not None or consent is not None:
            if attn.agency is None:
                raise ValueError("the model has no head states: it was trained with agency off")
            if state is not None:
                if state not in Agency.STATES:
                    raise ValueError(f"state {state!r} must be one of {', '.join(Agency.STATES)}")
                was, now = attn.agency.state[i].item(), list(Agency.STATES).index(state)
                attn.agency.state[i] = now
                if consent is None and "withdrawn" in (state, list(Agency.STATES)[was]):  # else consent is another matter
                    consent = state != "withdrawn"
            if consent is not None:
                attn.agency.consent[i] = consent
            attn.agency.last_signal[i] = step

    def violations(self):
        """Heads without consent whose gate says that they are in use, as dicts of layer, head, type, gate and state.

        type: "blocked" (held back all the same) or "forced" (it runs: agency_enforce is off, or its gate was set by hand).
        """
        found = []
        for layer, block in enumerate(self.transformer.h):
            a = block.attn
            if a.agency is None:
                continue
            n = len(a.agency.state)
            gate = (a.sentinel(noisy=False) if a.sentinel else torch.ones(n)).tolist()
            hand = [math.nan] * n if a.hand is None else a.hand.tolist()
            heads = a.numbers()
            for i in (~a.agency.consent).nonzero().flatten().tolist():
                by_hand = not math.isnan(hand[i])
                g = hand[i] if by_hand else gate[i]
                if g > a.agency.threshold:
                    found.append(dict(layer=layer, head=heads[i], type="forced" if by_hand or not a.agency.enforce else "blocked", gate=g,
                                      state=list(Agency.STATES)[a.agency.state[i]]))
        return found

    def prune_heads(self, heads, optimizers=()):
        """Remove heads for good, {layer: [head, ...]} by their original numbers: parameters, cache, optimizer moments.

        The logits are those of the model with these heads' gates at 0. Constraint heads stay: their scores are what they
        are for. A compiled or data-parallel wrapper has to be made anew. Raises ValueError for a head that is not there.
        """
        for layer, gone in heads.items():
            if not 0 <= layer < self.config.n_layer or set(gone) - set(self.transformer.h[layer].attn.kept):
                raise ValueError(f"cannot prune {sorted(gone)} from block {layer}: not all of them are there")
        for layer, gone in heads.items():
            self.transformer.h[layer].attn.prune(gone, optimizers)
        self.config = replace(self.config, heads=[block.attn.kept for block in self.transformer.h])

    def packed(self):
        """A copy for evaluation and decoding without the heads whose gate is 0: withdrawn, closed, or set by hand. Same logits."""
        model = copy.deepcopy(self).eval()
        model.prune_heads({layer: block.attn.off() for layer, block in enumerate(model.transformer.h)})
        return model

    # ---- generation ----

    @torch.inference_mode()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, repetition_penalty=1.0,
               stop_token=None, lengths=None, generator=None):
        """Yield the next token of every row, [B], up to max_new_tokens times.

        idx [B, T] holds the prompts, flush right where `lengths` [B] are unequal (left padding, never seen).
        A row reads at most block_size tokens; when it would read more it keeps the last half and goes on
        from there. A row that said stop_token repeats it; when all have, the stream ends.
        """
        check_sampling(temperature, top_k, top_p, repetition_penalty)
        B, T, block_size = *idx.shape, self.config.block_size
        text = torch.cat((idx, idx.new_empty(B, max_new_tokens)), dim=1)
        first = torch.zeros(B, dtype=torch.long) if lengths is None else T - torch.as_tensor(lengths).cpu()
        if T < 1 or first.min() < 0 or first.max() >= T:
            raise ValueError("every prompt needs at least one token and at most the width of idx")
        begin = torch.maximum(first, torch.tensor(T - block_size))  # the first column that each row still reads
        done = torch.zeros(B, dtype=torch.bool, device=idx.device)
        was_training, cache = self.training, None
        self.eval()
        try:
            for n in range(T, T + max_new_tokens):
                if cache is None:
                    left = int(begin.min())
                    pad = (begin - left).to(idx.device) if (begin > left).any() else None
                    cache, unread = KVCache(self.config), text[:, left:n]
                logits = self.head(self.hidden(unread, cache, pad)[:, -1])
                if repetition_penalty != 1.0:
                    for row in range(B):
                        penalise(logits[row], text[row, int(first[row]):n], repetition_penalty)
                token = pick(logits, temperature, top_k, top_p, generator)
                if stop_token is not None:
                    token = torch.where(done, stop_token, token)
                    done |= token == stop_token
                text[:, n] = token
                unread = text[:, n:n + 1]
                yield token
                if stop_token is not None and bool(done.all()):
                    break
                if n + 1 - left > block_size:  # the longest row is full: those that are keep half, and all are read anew
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
        """Number of parameters; non_embedding leaves out what is only looked up: positions, and an untied embedding."""
        n = sum(p.numel() for p in self.parameters())
        if non_embedding:
            n -= self.transformer.wpe.weight.numel() if self.config.pos == "learned" else 0
            n -= 0 if self.config.tied else self.transformer.wte.weight.numel()
        return n

    def flops_per_token(self):
        """Floating-point operations to train on one token, forward and backward, at block_size (PaLM, appendix B).

        6 per parameter in a matrix product, 12 * n_embd * block_size for each block's attention, causality not deducted;
        a window counts as the context that sees as many keys. All heads are computed, selected or not. ACAG's statistics
        are half of another attention, or a whole one with its gradients.
        """
        c = self.config
        width = sum((block.attn.n_head + block.attn.n_extra) * block.attn.head_size for block in self.transformer.h)
        context = c.block_size if not c.window else 2 * self.n_seen.float().mean().item() - 1
        return int(6 * self.num_params(non_embedding=True) + 12 * width * context * (1 + (0.5 if c.acag_detach else 1.0) * bool(c.acag)))

    def mfu(self, tokens_per_s, device, dtype):
        """Share of the device's peak that this training speed is; None where the peak is not known."""
        if torch.device(device).type != "cuda" or dtype == "float32":
            return None
        name = torch.cuda.get_device_name(device)
        peak = next((tflops for part, tflops in PEAK_TFLOPS if part in name), None)
        return None if peak is None else tokens_per_s * self.flops_per_token() / (peak * 1e12)

    def block_matrices(self):
        """[(weight, number of matrices stacked in it by rows)] of the blocks' attention and MLP, for Muon."""
        return [(w, n) for block in self.transformer.h
                for w, n in ((block.attn.c_attn.weight, block.attn.parts), (block.attn.c_proj.weight, 1),
                             *([(block.attn.constraint.c_attn.weight, 3), (block.attn.constraint.c_proj.weight, 1)]
                               if block.attn.constraint else []),
                             (block.mlp.c_fc.weight, 1), (block.mlp.c_proj.weight, 1))]

    def crop_block_size(self, block_size):
        """Shorten the context in place, for instance to fine-tune a long-context checkpoint on short texts."""
        if not 1 <= block_size <= self.config.block_size:
            raise ValueError(f"block_size={block_size} must be from 1 to {self.config.block_size}")
        self.config.block_size = block_size
        if self.config.pos == "learned":
            self.transformer.wpe.weight = nn.Parameter(self.transformer.wpe.weight[:block_size].detach().clone())
            self.transformer.wpe.num_embeddings = block_size
        else:
            for name, buffer in list(self.named_buffers(recurse=False)):
                if name.startswith(("cos", "sin")):
                    setattr(self, name, buffer[:block_size])
        if self.config.window:
            self.n_seen = self.n_seen[:block_size]


# Dense bf16 peaks in TFLOP/s by a part of the device's name, from NVIDIA's datasheets; the first match counts.
PEAK_TFLOPS = (("B200", 2250), ("GH200", 989), ("H200", 989), ("H100 PCIe", 756), ("H100 NVL", 835), ("H100", 989),
               ("A100", 312), ("L40S", 362), ("L40", 181), ("L4", 121), ("A10G", 70), ("A10", 125), ("RTX 4090", 165), ("RTX 3090", 71))


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


def penalise(logits, seen, penalty):
    """Make the tokens in `seen` less likely, in place; logits [V] (CTRL, arXiv 1909.05858, section 4.1)."""
    seen = seen.unique()
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)


def pick(logits, temperature, top_k, top_p, generator):
    """One token per row, [B], from logits [B, V]: the k likeliest, then the likeliest that hold top_p of the mass."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0, so that a tiny temperature cannot overflow
    if top_k is not None and top_k < logits.size(-1):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    probs = F.softmax(logits, dim=-1)
    if top_p is not None and top_p < 1:
        ranked, order = probs.sort(descending=True)
        beyond = ranked.cumsum(-1) - ranked >= top_p  # the mass before it is already enough; the first is never beyond
        probs = probs.masked_fill(beyond.scatter(-1, order, beyond), 0.0)
    return torch.multinomial(probs, 1, generator=generator).squeeze(-1)
