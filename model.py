"""
The GPT in one file, to be read from top to bottom: first a plain GPT, then the mechanisms, each with its
flags. A block computes this, and a mechanism changes it in the hooks that are named on the right:

    x       = mix(x, skips)       # between blocks: before_block (U-Net skips)
    q, k, v = project(x)          # before_projection, after_projection (short convolutions)
                                  # before_attention (A2C changes q; constraint heads are added)
    y       = attend(q, k, v)     # causal and fused, no T x T matrix is stored; CausalMask says who sees whom
                                  # score_mod (roles, FoX, a cap), after_kernel (a second attention map),
                                  # after_attention (ACAG, head norm)
    y       = y * gates           # factors for each head and token, which hooks have put into heads.gates
    x       = x + merge(y)        # the heads side by side, projected out

score_mod returns a function (score, b, h, t, s) -> score, which the kernel applies to each score before the
softmax: that of query t for key s in row b and head h. t and s count columns, so t - s is a distance; a
token's place in its text is in forward_pass.positions, for a class with needs_positions. No hook sees the
weights of attention, which fused kernels do not store: after_kernel acts on y, right after the kernel.

A gate is a factor on the heads' outputs, which broadcasts over [B, H, T, D]. Any hook may put one into
heads.gates, under its mechanism's name, as soon as it knows it: before_projection where it depends on no text
(sentinel, agency), before_attention where it needs the layer's input alone (routing, output gate), and
after_attention where it needs y or statistics of the attention rows (ACAG, sink). A number that a caller sets
for a head, by GPT.set_gate(), is one more gate.

A mechanism that is turned off leaves no parameter, no buffer and no computation. Everything about one is in
its class: flags (Options), modes, formula, checks. What a class inherits, and what each attribute such as
`neutral` or `per_head` means, is in class Mechanism, nanoheads/mechanism.py. At the end of this file the
lists of mechanisms, GPTConfig and MECHANISMS are put together.

Three objects are passed around. `config` is the GPTConfig. `attn` is the attention of one layer, with its
mechanisms as submodules. `heads` is a Heads: the queries, keys, values, outputs and gates of one layer, which
hooks read and rewrite. What is the same in all layers is in `heads.forward_pass`, a ForwardPass: the tokens
and their positions, the mask, the cache, and what the caller wants beside the logits.

docs/mechanisms.md has the formulas, their costs and the faults of their sources; docs/your-own-mechanism.md
has a table of the hooks, and adds a mechanism from a file of your own. Attention itself is in
nanoheads/attention.py, and other kernels are in nanoheads/kernels.py.

References: Radford et al. 2019 (GPT-2); Su et al. 2021, arXiv 2104.09864 (RoPE); Henry et al. 2020,
arXiv 2010.04245 (QK-norm); Zhang & Sennrich 2019, arXiv 1910.07467 (RMSNorm); So et al. 2021,
arXiv 2109.08668 (squared ReLU).
"""

import hashlib
import math
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from typing import Literal, NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nanoheads.attention import (SKIP_FROM, Documents, RowStats, attend, block_mask, columns_of,
                                 combine_scores, has_flex_attention, logits_of, random_cells, reached_blocks)
from nanoheads.by_hand import HeadControl
from nanoheads.kernels import (ChunkedCrossEntropy, Linear, float32_linear, for_each_head, grouped_heads_of,
                               heads_of, norm_and_rotate, pad_rows, product_dtype, relu2, rms_norm,
                               rope_tables, sum_so_far)
from nanoheads.logits import (check_sampling, discounted_return, distance_to_features, distance_to_teacher,
                              label_losses, logit, penalise, portions, sample_token)
from nanoheads.mechanism import (CONSTRAINTS, AddedHeads, BetweenBlocks, Mechanism, Normal, Outcome, Uniform,
                                 choices, flag, flag_problems, flags_of, no_dropout, plain_problems,
                                 range_problems, set_to, start_at)
from nanoheads.pruning import PAIRED, HeadAxis
from nanoheads.rivals import (MUDD, XSA, Alibi, DepthAttention, Diff, DiffV1, FoX, HeadMix, KeyOffset,
                              OutputGate, PairedHeads, QueryGain, RelativeBias, ScoreCap, ShortConv, Sink,
                              SSMax, StreamScalars, ValueEmbedding, ValueResidual)

# What a recipe means: the values taken by the flags that were left at None.
RECIPES = {
    "gpt2": dict(pos="learned", norm="layernorm", norm_scale=False, act="gelu", bias=False, qk_norm=False,
                 embed_norm=False, tied=True, zero_init=False, softcap=0.0),
    "modern": dict(pos="rope", norm="rmsnorm", norm_scale=False, act="relu2", bias=False, qk_norm=True,
                   embed_norm=True, tied=False, zero_init=True, softcap=0.0),
    "llama": dict(pos="rope", norm="rmsnorm", norm_scale=True, act="swiglu", bias=False, qk_norm=False,
                  embed_norm=False, tied=False, zero_init=False, softcap=0.0),
}


@dataclass
class PlainConfig:
    """The flags of a plain GPT. GPTConfig, at the end of this file, has those of every mechanism too, and
    what follows from them: added_heads(), head_size_in(), queries_are_keys() and so on.
    """
    of_recipe = ("qk_max",)  # the keys that a scale sets for its own recipe alone

    block_size: int = flag(1024, "context length, in tokens", at_least=1, section="size")
    vocab_size: Optional[int] = flag(
        None, "number of tokens in the vocabulary; None: the dataset's", at_least=1)
    n_layer: int = flag(12, "number of blocks", at_least=1, at_most=10_000)
    n_head: int = flag(12, "attention heads per block", at_least=1, at_most=10_000)
    n_kv_head: Optional[int] = flag(
        None, "number of key and value heads, each shared by a group of heads; None: n_head", at_least=1)
    head_dim: Optional[int] = flag(None, "width of a head; None: n_embd / n_head", at_least=1)
    n_embd: int = flag(768, "width of the residual stream", at_least=1)
    n_inner: Optional[int] = flag(
        None, "width inside the MLP; None: 4 * n_embd, with swiglu 8/3 * n_embd", at_least=1)
    dropout: float = flag(
        0.0, "dropout on the embedding, the attention weights, and the outputs of attention and MLP",
        at_least=0, below=1)
    attn_dropout: Optional[float] = flag(
        None, "dropout on the attention weights; None: dropout", at_least=0, below=1)
    seed: int = flag(1337, "seed of the initial values and of the order of the data", at_least=0)

    recipe: Literal["gpt2", "modern", "llama"] = flag(
        "gpt2", "gpt2: nanoGPT's model and optimizer; modern: a stronger baseline, with RoPE, QK-norm, "
                "ReLU^2 and Muon; llama: RoPE, RMSNorm and SwiGLU",
        section="recipe: --recipe sets these; a flag that you set wins")
    pos: Optional[Literal["learned", "rope", "none"]] = flag(
        None, "positions: learned embeddings, RoPE, or none")
    norm: Optional[Literal["layernorm", "rmsnorm"]] = flag(
        None, "the norm before attention and MLP, and at the end")
    norm_scale: Optional[bool] = flag(None, "with rmsnorm: a learned scale")
    norm_eps: Optional[float] = flag(None, "the norms' epsilon; None: 1e-5, with rmsnorm 1e-6", above=0)
    act: Optional[Literal["gelu", "gelu_tanh", "relu2", "swiglu"]] = flag(
        None, "activation in the MLP; gelu_tanh is what OpenAI's GPT-2 weights were trained with")
    bias: Optional[bool] = flag(None, "biases in the linear layers and LayerNorms")
    qkv_bias: bool = flag(False, "biases of queries, keys and values only, as in Qwen2")
    qk_norm: Optional[bool] = flag(None, "RMS-normalise every query and key")
    qk_scale: bool = flag(False, "with qk_norm: a learned scale of each dimension, as in Qwen3")
    qk_max: Optional[float] = flag(
        None, "with qk_norm: the largest possible attention logit; None: sqrt(head size)", above=0)
    embed_norm: Optional[bool] = flag(None, "RMS-normalise the embedding before the first block")
    tied: Optional[bool] = flag(None, "the output head shares the embedding's weights")
    zero_init: Optional[bool] = flag(
        None, "the output head, and all that writes into the residual stream, starts at zero")
    softcap: Optional[float] = flag(
        None, "soft cap on the output logits, cap * tanh(logits / cap); 0: off", at_least=0)
    rope_base: float = flag(10000.0, "RoPE: base of the wavelengths", above=0)
    rope_share: float = flag(1.0, "RoPE: share of each head's dimensions that are turned", above=0, at_most=1)
    rope_scaling: Optional[list[float]] = flag(None, "RoPE: Llama 3's scaling, as factor, low, high, context")
    parallel: bool = flag(
        False, "attention and MLP read the same input, and both outputs are added to the stream together")

    checkpoint_activations: bool = flag(
        False, "compute each block again in the backward pass: less memory, but slower",
        section="memory")
    loss_chunks: Optional[int] = flag(
        None, "compute the logits of a training step in this many portions; None: as many as keep each below "
              "1 GB", at_least=1)

    head_ids: Optional[list[list[int]]] = flag(
        None, "the numbers of the heads that are left in each layer; None: all",
        section="pruning")

    @property
    def head_size(self):
        return self.head_dim or self.n_embd // self.n_head

    @property
    def group(self):
        """How many heads share a key and value head."""
        return max(1, self.n_head // (self.n_kv_head or self.n_head or 1))

    @property
    def weight_dropout(self):
        """Dropout on the attention weights."""
        return self.dropout if self.attn_dropout is None else self.attn_dropout


# ---- pieces ----

class RMSNorm(nn.Module):
    """x / rms(x), times a learned scale if there is one."""

    def __init__(self, size, scale, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)) if scale else None, eps

    def forward(self, x):
        y = rms_norm(x, self.eps)
        return y if self.weight is None else y * self.weight.to(y.dtype)


PLAIN_LAYERS = nn.Linear, nn.Embedding, nn.LayerNorm  # whose initial values GPT.init_weights() sets


def plain_parameters(module):
    """The parameters of the plain layers in a module, as a set."""
    return {p for layer in module.modules() if isinstance(layer, PLAIN_LAYERS)
            for p in layer.parameters(recurse=False)}


def make_norm(config):
    if config.norm == "rmsnorm":
        return RMSNorm(config.n_embd, config.norm_scale, config.norm_eps or 1e-6)
    return nn.LayerNorm(config.n_embd, config.norm_eps or 1e-5, bias=config.bias)


# ---- what the hooks of a layer are given ----

@dataclass
class ForwardPass:
    """The text of one forward pass, and what the caller wants of it: the same in all layers with this mask.

    GPT.make_forward_pass() makes it.
    """

    rope: Optional[dict] = None               # head size -> (cos, sin) of the positions
    cache: Optional["KVCache"] = None
    mask: object = None                       # who sees whom, as for attend(); None: causal
    # the next two are for mechanisms with needs_positions or needs_row_stats; without any they may be None
    positions: Optional[torch.Tensor] = None  # of each token in its own text, from 0, [T] or [B, T]
    n_keys: Optional[torch.Tensor] = None     # keys that each query sees, [T] or [B, 1, T]
    valid: Optional[torch.Tensor] = None      # False at padding, [B, T, 1]; None: there is none
    begins: Optional[torch.Tensor] = None     # column where its document begins, [B, T]; None: one per row
    tokens: Optional[torch.Tensor] = None     # the ids that are read, [B, T]
    inputs: dict = field(default_factory=dict)  # name -> what GPT.forward() was given for a mechanism
    shared: dict = field(default_factory=dict)  # name -> what earlier layers have left for later ones
    wants_losses: bool = False                # auxiliary losses
    wants_predictions: bool = False           # scores of constraint heads, also where they have no target
    wants_traces: object = False              # "maps": attention maps too

    @property
    def positions_per_head(self):
        """The positions in a form that broadcasts over heads, [T] or [B, 1, T]."""
        return self.positions if self.positions.dim() == 1 else self.positions[:, None]


@dataclass(slots=True)  # so that a name that is none of these is refused
class Heads:
    """The heads of one layer in one forward pass: what hooks are given, and what they rewrite."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    x: Optional[torch.Tensor] = None          # the layer's normed input, [B, T, C]
    q: Optional[torch.Tensor] = None          # queries, keys, values, each [B, H, T, D]
    k: Optional[torch.Tensor] = None          # (after attention with those of the cache: [B, H, S, D])
    v: Optional[torch.Tensor] = None
    y: Optional[torch.Tensor] = None          # outputs before the gates, [B, H, T, D]
    score_mod: object = None                  # what all mechanisms make of the scores; None: nothing
    row_stats: Optional[RowStats] = None      # of the attention rows, where needed
    open: Optional[torch.Tensor] = None       # in evaluation, the heads to compute, bool [B, H]; None: all
    gates: dict = field(default_factory=dict)        # name -> factor on y, broadcasting over [B, H, T, D]
    notes: dict = field(default_factory=dict)        # name -> what one hook leaves for another of its class
    for_later: dict = field(default_factory=dict)    # name -> what later layers find in forward_pass.shared
    losses: dict = field(default_factory=dict)       # name -> weighted auxiliary loss
    predictions: dict = field(default_factory=dict)  # name -> what model_losses() compares with a target
    traces: dict = field(default_factory=dict)       # name -> tensor, where traces are wanted

    def results(self):
        """What the layer returns beside its output."""
        return dict(losses=self.losses, predictions=self.predictions, traces=self.traces,
                    for_later=self.for_later)

    def close_all_but(self, open):
        """In evaluation, compute only the heads that are open, bool [B, H]. The gates of the others have to
        be 0 at all tokens of a row.
        """
        self.open = open if self.open is None else self.open & open

    def constant_gate(self):
        """The product of the gates so far that depend on no text, [H, 1, 1]; None: there is none.

        Outside of a forward pass constant_gate() of nanoheads/pruning.py gives it, [H].
        """
        gates = [gate for gate in self.gates.values() if gate.dim() == 3]
        return math.prod(gates) if gates else None


# ---- the transformer ----

class CausalSelfAttention(nn.Module):
    """Multi-head causal attention with the mechanisms of its config, [B, T, C] -> [B, T, C].

    A mechanism may change the projections in three ways: heads of its own that join the layer's (AddedHeads),
    heads of another size, and one projection that gives queries which are keys too (a2c='published').

        layer                 its number
        n_head, n_extra       heads of its own, and heads that constraint heads add behind them; n_total: both
        head_ids              the heads of its own that pruning has left, by their original numbers
        n_base                how many there were before pruning; added heads are numbered from there
        group                 how many heads share a key and a value
        unit                  how many neighbouring heads are pruned together
    """

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.head_size = config.head_size_in(layer)
        self.scale = config.qk_max / self.head_size if config.qk_max else self.head_size ** -0.5
        self.head_ids = list(range(config.n_head)) if config.head_ids is None else config.head_ids[layer]
        self.n_base = config.n_head
        self.n_head = len(self.head_ids)
        self.n_extra = config.added_heads(layer)
        self.rope, self.qk_norm = config.pos == "rope", config.qk_norm
        self.queries_are_keys = config.queries_are_keys  # and values are slices of x
        self.group, self.unit = config.group, config.unit
        self.parts = 1 if self.queries_are_keys else 3  # q, k, v in c_attn
        rows = self.n_head if self.queries_are_keys else self.n_head + 2 * self.n_kv_head
        self.c_attn = Linear(config.n_embd, rows * self.head_size, bias=config.bias or config.qkv_bias,
                             stacked=self.parts if self.group == 1 else (self.group, 1, 1))
        self.norm_eps, self.qk_scale = config.norm_eps or 1e-6, None
        if config.qk_scale:
            self.qk_scale = nn.ParameterList(nn.Parameter(torch.ones(self.head_size)) for _ in "qk")
        self.c_proj = Linear(self.n_head * self.head_size, config.n_embd, bias=config.bias, stacked=1)
        self.attn_dropout = config.weight_dropout
        self.resid_dropout = nn.Dropout(config.dropout)
        self.add_mechanisms(config)

    def add_mechanisms(self, config):
        """Build the mechanisms that are on in this layer; those that are off are None.

        HEAD_MECHANISMS, near the end of this file, lists their classes. cls.is_on(config) says whether a
        model has a mechanism, and cls.on(config, layer) whether this layer does.
        """
        for cls in HEAD_MECHANISMS:
            self.register_module(cls.name, cls(config, self) if cls.on(config, self.layer) else None)
        self.register_buffer("gate_by_hand", None, persistent=False)  # [H], 1 where it is not set
        readers = [m for m in self.mechanisms() if m.needs_row_stats]
        names = {name for m in readers for name in m.needs_row_stats}
        # as attend() takes it: "shape" holds all that "lse" does
        self.needs_row_stats = "shape" if names & {"entropy", "log_p2"} else "lse" if names else None
        self.needs_spread = "spread" in names
        self.detaches_row_stats = all(m.detaches_row_stats for m in readers)
        self.changes_scores = any(m.changes_scores for m in self.mechanisms())

    @property
    def n_total(self):
        """All heads: those of the layer, then those that a mechanism adds."""
        return self.n_head + self.n_extra

    @property
    def n_kv_head(self):
        """Key and value heads, of those that are left."""
        return self.n_head // self.group

    @property
    def per_head(self):
        """Its tensors with rows for each head, as in class Mechanism."""
        stacked = HeadAxis(size=self.head_size, parts=self.parts, shared=self.parts - 1)
        return {"c_attn.weight": stacked, "c_attn.bias": stacked,
                "c_proj.weight": HeadAxis(dim=1, size=self.head_size), "gate_by_hand": HeadAxis()}

    def all_head_ids(self):
        """The original numbers of the heads that are left, then those of the added heads."""
        return self.head_ids + [self.n_base + i for i in range(self.n_extra)]

    def mechanisms(self):
        """The mechanisms that are on, in the order in which they act."""
        return [m for m in self._modules.values() if isinstance(m, Mechanism)]

    # ---- the forward pass ----

    def forward(self, x, forward_pass, inputs=None):
        """(what joins the residual stream, Heads.results()) of the normed stream x [B, T, C].

        inputs: three streams, one each for queries, keys and values, where a mechanism between blocks keeps
        them apart; else None.
        """
        heads, mechanisms = Heads(forward_pass, x), self.mechanisms()
        if self.gate_by_hand is not None:
            heads.gates["by_hand"] = self.gate_by_hand[:, None, None]

        # project
        for m in mechanisms:
            m.before_projection(self, heads)
        qkv = self.project(heads.x, inputs)  # (B, T, heads of q, k and v, D)
        for m in mechanisms:
            qkv = m.after_projection(self, qkv, heads)
        heads.q, heads.k, heads.v = self.own_heads(qkv, heads)

        # attend
        for m in mechanisms:
            m.before_attention(self, heads)
        y, row_stats = self.attend(heads)
        for m in mechanisms:
            y, row_stats = m.after_kernel(self, heads, y, row_stats)
        # compiled by torch 2.13, an attribute that is set after FlexAttention on an object from before it is
        # lost, so there it is set on a copy
        if torch.compiler.is_compiling():
            heads = replace(heads, y=y, row_stats=row_stats)
        heads.y, heads.row_stats = y, row_stats
        for m in mechanisms:
            m.after_attention(self, heads)

        if forward_pass.wants_traces:
            self.trace(heads)

        # multiply by the gates, and merge
        y = heads.y
        if heads.gates:
            # the small factors are multiplied first, so that there is one pass over y
            gates = sorted(heads.gates.values(), key=lambda gate: gate.size(-1) if gate.dim() else 1)
            gate = math.prod(gates)
            y = y * gate.to(y.dtype)
        return self.merge(y), heads.results()

    def project(self, x, inputs=None):
        """x [B, T, C] -> queries, keys and values of all heads, [B, T, heads of q, k and v, D].

        inputs: see forward(); queries, keys and values are then each projected from one of them.
        """
        c_attn = self.c_attn
        if not inputs:
            qkv = c_attn(x)
        else:
            rows = [n * self.head_size for n in (self.n_head, self.n_kv_head, self.n_kv_head)]
            bias = (None,) * 3 if c_attn.bias is None else c_attn.bias.split(rows)
            qkv = torch.cat([F.linear(*part) for part in zip(inputs, c_attn.weight.split(rows), bias)], -1)
        return qkv.view(*x.shape[:2], c_attn.out_features // self.head_size, self.head_size)

    def own_heads(self, qkv, heads):
        """The layer's own q, k and v, each [B, H, T, D], out of qkv; q and k are normed and rotated."""
        if not self.queries_are_keys:
            return self.split(qkv, heads, self.n_head, self.n_kv_head)
        rope = heads.forward_pass.rope[self.head_size] if self.rope else None
        q = norm_and_rotate(qkv[:, :, None], self.qk_norm, rope, self.norm_eps)
        q = q.squeeze(2).transpose(1, 2)
        v = heads.x.unflatten(-1, (-1, self.head_size))
        v = v if v.size(2) == self.n_head else v[..., self.head_ids, :]
        return q, q, v.transpose(1, 2)

    def split(self, qkv, heads, n_head, n_kv_head):
        """[B, T, n_head + 2 n_kv_head, D] -> normed and rotated q and k, and v, each [B, heads, T, D]."""
        rope = heads.forward_pass.rope[self.head_size] if self.rope else None
        if n_kv_head == n_head and self.qk_scale is None and self.norm_eps == 1e-6:
            return heads_of(qkv.view(*qkv.shape[:2], 3, n_head, qkv.size(3)), self.qk_norm, rope)
        return grouped_heads_of(qkv, n_head, n_kv_head, self.qk_norm, rope, self.norm_eps, self.qk_scale)

    def attend(self, heads):
        """(y [B, H, T, D], RowStats where a mechanism reads them, else None), from heads.q, k and v.

        With a cache, heads.k and heads.v then have the earlier tokens too.
        """
        forward_pass = heads.forward_pass
        # kernels take one dtype; under autocast a norm may have made q and k float32
        dtype = product_dtype(heads.v)
        if not heads.q.dtype == heads.k.dtype == heads.v.dtype == dtype:
            heads.q, heads.k, heads.v = heads.q.to(dtype), heads.k.to(dtype), heads.v.to(dtype)
        if forward_pass.cache is not None:
            heads.k, heads.v = forward_pass.cache.append(self.layer, heads.k, heads.v)
        if self.changes_scores:
            functions = [(m.score_mod(self, heads), isinstance(m, AddedHeads)) for m in self.mechanisms()
                         if m.changes_scores]
            heads.score_mod = combine_scores(functions, self.n_head, self.n_extra)
        return attend(heads.q, heads.k, heads.v, scale=self.scale, mask=forward_pass.mask,
                      score_mod=heads.score_mod,
                      stats="shape" if forward_pass.wants_traces else self.needs_row_stats,
                      spread=self.needs_spread, n_keys=forward_pass.n_keys, detach=self.detaches_row_stats,
                      dropout=self.attn_dropout if self.training else 0.0, open=heads.open)

    def merge(self, y):
        """Heads side by side, [B, H, T, D] -> [B, T, C], and out into the residual stream."""
        if self.n_extra:
            y, added = y.split((self.n_head, self.n_extra), 1)
        out = self.c_proj(y.transpose(1, 2).flatten(2))
        if self.n_extra:
            for m in self.mechanisms():
                if isinstance(m, AddedHeads):
                    out = m.merge_added(out, added)
        return self.resid_dropout(out) if self.training else out

    def trace(self, heads):
        """Add to heads.traces the gates, row statistics and, where wanted, the attention maps."""
        heads.traces.update({f"gates.{name}": gate for name, gate in heads.gates.items()})
        heads.traces.update(entropy=heads.row_stats.entropy, concentration=heads.row_stats.log_p2.exp())
        if heads.forward_pass.wants_traces == "maps":
            weights = self.masked_logits(heads, heads.q, heads.k).softmax(-1)
            for m in self.mechanisms():
                weights = m.trace_map(self, weights, heads)
            heads.traces["map"] = weights

    def masked_logits(self, heads, q, k):
        """For attention maps: the logits [B, H, T, S] of queries and keys, -inf where a key is hidden."""
        k = for_each_head(k, q.size(1))
        logits = logits_of(q, k, self.scale, heads.score_mod, columns_of(q, k))
        return logits.masked_fill(~heads.forward_pass.mask, -math.inf)


class MLP(nn.Module):
    """Two linear layers, n_inner (usually 4 C) wide inside, [B, T, C] -> [B, T, C].

    swiglu: silu(a) * b, where a and b are the halves of c_fc's output, each 8/3 C wide, so that there are as
    many parameters.
    """

    def __init__(self, config):
        super().__init__()
        C, self.act = config.n_embd, config.act
        inner = config.n_inner or (4 * C if self.act != "swiglu" else max(8, round(C / 3) * 8))
        parts = 2 if self.act == "swiglu" else 1
        self.c_fc = Linear(C, parts * inner, bias=config.bias, stacked=parts)
        self.c_proj = Linear(inner, C, bias=config.bias, stacked=1)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.c_fc(x)
        if self.act == "swiglu":
            a, b = x.chunk(2, -1)
            x = F.silu(a) * b
        elif self.act == "relu2":
            x = relu2(x)
        else:
            x = F.gelu(x, approximate="tanh" if self.act == "gelu_tanh" else "none")
        x = self.c_proj(x)
        return self.dropout(x) if self.training else x


class Block(nn.Module):
    """Attention, then MLP: each reads the normed residual stream and adds to it, [B, T, C] -> [B, T, C]."""

    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)
        self.parallel = config.parallel  # both at once, as in GPT-J and GPT-NeoX (2204.06745, section 2.1.2)

    def forward(self, x, forward_pass):
        """(what the block sends on, Heads.results())."""
        # a mechanism between blocks may give queries, keys and values an input each (MUDD)
        inputs = forward_pass.shared.get(("inputs", self.attn.layer))
        y, results = self.attn(self.ln_1(x), forward_pass, inputs and [self.ln_1(part) for part in inputs])
        after = x + y
        return after + self.mlp(self.ln_2(x if self.parallel else after)), results


class GPT(HeadControl, nn.Module):
    """The language model. Its parameters have nanoGPT's names. Raises ValueError on an impossible config."""

    def __init__(self, config):
        super().__init__()
        bad = config.problems() + (["vocab_size is not set"] if config.vocab_size is None else [])
        if bad:
            raise ValueError("; ".join(bad))
        self.config = config
        with torch.random.fork_rng(devices=[]):
            # for what constructors of mechanisms may draw
            torch.default_generator.manual_seed(config.seed % 2**63)
            self.build(config)
        self.init_weights()

    def build(self, config):
        """Make the layers, and the mechanisms in and between them."""
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
            ln_f=make_norm(config)))
        layers = [block.attn for block in self.transformer.h]
        if config.pos == "learned":
            self.transformer.wpe = nn.Embedding(config.block_size, config.n_embd)
        elif config.pos == "rope":
            self.head_sizes = {attn.head_size for attn in layers}
            for size in self.head_sizes:
                tables = rope_tables(config.block_size, size, config.rope_base, config.rope_share,
                                     config.rope_scaling)
                for name, table in zip(("cos", "sin"), tables):  # over [T, (q, k), H, D]
                    self.register_buffer(f"{name}{size}", table[:, None, None], persistent=False)
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.transformer.wte.weight
        self.between = [cls.name for cls in BETWEEN_BLOCKS if cls.is_on(config)]
        for cls in BETWEEN_BLOCKS:
            if cls.is_on(config):
                self.add_module(cls.name, cls(config))
        for cls in HEAD_MECHANISMS:
            for name, module in cls.model_modules(config).items():
                self.add_module(name, module)
        self.mask = next((cls for cls in MASKS if cls.is_on(config)), CausalMask)(config)
        everywhere = all(self.has_mask(layer) for layer in range(config.n_layer))
        self.whole_mask = None if everywhere else CausalMask(config)  # of the other blocks
        self.needs_row_stats = any(attn.needs_row_stats is not None for attn in layers)
        self.changes_scores = any(attn.changes_scores for attn in layers)
        self.needs_positions = any(m.needs_positions for attn in layers for m in attn.mechanisms())
        self.needs_nats = any(m.needs_nats for attn in layers for m in attn.mechanisms())
        # a mechanism that is off takes its arguments too, and does nothing with them
        self.takes = {name for cls in MECHANISM_CLASSES for name in cls.takes}

    @torch.no_grad()
    def init_weights(self):
        """Set the initial values that depend on the seed, and those of plain layers: once, when it is made.

            what start_at() declared                   that value; a random one is drawn here
            weights of plain layers (PLAIN_LAYERS)     N(0, 0.02), as in GPT-2; scales 1, biases 0
                row padding_idx of an nn.Embedding     0, as PyTorch has it
                c_proj, into the residual stream       N(0, 0.02 / sqrt(2 n_layer)); with zero_init 0
                lm_head                                as the others; with zero_init 0
            all else                                   what its constructor has filled in

        Each parameter has a generator of its own, keyed by the seed and its name. So two models start
        bit-identical in every parameter that they share, whatever else they have.
        """
        plain = plain_parameters(self)
        padding = {layer.weight: layer.padding_idx for layer in self.modules()
                   if isinstance(layer, nn.Embedding) and layer.padding_idx is not None}
        for name, p in self.named_parameters():
            start = getattr(p, "initial_value", None)
            if start is None:
                if p not in plain:
                    continue
                start = self.plain_start(name, p)
            digest = hashlib.sha256(f"{self.config.seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            set_to(p, start, generator)
            if p in padding and isinstance(start, (Normal, Uniform)):
                p[padding[p]] = 0.0

    def plain_start(self, name, p):
        """The initial value of a parameter of a plain layer, a number or a Normal: see init_weights()."""
        if p.dim() < 2:
            return 0.0 if name.endswith("bias") else 1.0
        into_stream = name.endswith("c_proj.weight")
        if self.config.zero_init and (into_stream or name == "lm_head.weight"):
            return 0.0
        return Normal(0.02 / math.sqrt(2 * self.config.n_layer) if into_stream else 0.02)

    # ---- forward ----

    def forward(self, idx, targets=None, traces=False, logits=False, positions=None, **inputs):
        """idx, targets [B, T] -> Output. Targets of -1 are not scored; without targets there is no loss.

        logits: return them together with a loss, too; without targets they are always returned. traces: True,
        or "maps" for attention maps too. positions [B, T]: tokens of its document before each token, where
        rows hold several documents, of which none sees another; None: a row is one text. inputs: what a
        mechanism takes by name, see `takes` of its class; None is the same as leaving it out.
        """
        x, results = self.run_blocks(idx, inputs=inputs, wants_losses=targets is not None,
                                     wants_traces=traces, positions=positions)
        aux, traced = results["losses"], results["traces"] if traces else None
        out = self.head(x) if logits or targets is None else None
        loss = nats = None
        if targets is not None:
            loss, nats = self.cross_entropy(x, targets, out, per_token=self.needs_nats)
        outcome = Outcome(x, results["predictions"], inputs, positions, targets, nats, traced)
        for cls in MECHANISM_CLASSES:
            aux.update(cls.model_losses(self, outcome))
        return Output(out, loss, aux, traced)

    def run_blocks(self, idx, cache=None, pad=None, inputs=None, wants_losses=False, wants_predictions=False,
                   wants_traces=False, positions=None):
        """(final hidden states [B, T, C], Heads.results() of all blocks) of idx [B, T].

        Losses are summed over blocks, {name: sum}; predictions and traces are {"blocks.<i>.<name>": tensor}.
        cache: a KVCache of the tokens before idx. pad [B]: the column at which each row's text begins.
        inputs: {name: value} for mechanisms. TypeError: no mechanism takes an argument of that name.
        positions: see forward(). ValueError: they do not go with the other arguments.
        """
        c, N = self.config, self.config.n_layer
        B, T = idx.shape
        past = cache.length if cache else 0
        if past + T > c.block_size:
            raise ValueError(f"{past + T} tokens do not fit block_size={c.block_size}")
        for name in inputs or ():
            # TransformerLens asks every model for its attention weights, which are not stored here
            if name not in (*self.takes, "output_attentions"):
                raise TypeError(f"{name} is no argument of a GPT: no mechanism takes it")
        begins = None
        if positions is not None:
            self.check_documents(idx, positions, cache, pad)
            begins = torch.arange(T, device=idx.device) - positions
        elif pad is None:
            positions = slice(past, past + T)
        else:
            columns = torch.arange(past, past + T, device=idx.device)
            positions = (columns - pad[:, None]).clamp_min(0)  # (B, T)
        masks = [self.mask_of(i) for i in range(N)]
        shared = {}  # what layers leave for later layers
        common = dict(tokens=idx, shared=shared, begins=begins, wants_losses=wants_losses,
                      wants_traces=wants_traces, wants_predictions=wants_predictions,
                      inputs={name: value for name, value in (inputs or {}).items() if value is not None})
        passes = {mask: self.make_forward_pass(mask, positions, past, T, cache, pad, idx.device, **common)
                  for mask in dict.fromkeys(masks)}
        x = self.transformer.wte(idx)
        if c.pos == "learned":
            x = x + self.transformer.wpe.weight[positions]
        if c.embed_norm:
            x = rms_norm(x)
        x = self.transformer.drop(x) if self.training else x
        losses, predictions, traces, outputs = {}, {}, {}, [x]
        for i, block in enumerate(self.transformer.h):
            if self.between:
                x = self.before_block(x, i, outputs, shared)
            if c.checkpoint_activations and self.training:
                x, results = checkpoint(block, x, passes[masks[i]], use_reentrant=False)
            else:
                x, results = block(x, passes[masks[i]])
            if self.between:
                outputs.append(x)
            shared.update(results["for_later"])
            for name, loss in results["losses"].items():
                losses[name] = losses[name] + loss if name in losses else loss
            predictions.update({f"blocks.{i}.{name}": t for name, t in results["predictions"].items()})
            traces.update({f"blocks.{i}.{name}": t for name, t in results["traces"].items()})
        if self.between:
            x = self.before_block(x, N, outputs, shared)
        if cache:
            cache.length += T
        return self.transformer.ln_f(x), dict(losses=losses, predictions=predictions, traces=traces)

    def check_documents(self, idx, positions, cache, pad):
        """ValueError where positions are wrong, or do not go with a cache, padding or dropout."""
        if positions.shape != idx.shape:
            raise ValueError(f"positions are {[*positions.shape]}; there must be one for each token of "
                             f"{[*idx.shape]}")
        if positions.device.type == "cpu" and not torch.compiler.is_compiling():  # a GPU would have to wait
            goes_on = positions[:, 1:] == positions[:, :-1] + 1
            if positions[:, :1].any() or not (goes_on | (positions[:, 1:] == 0)).all():
                raise ValueError("positions must count from 0 in each row, and from 0 again where another "
                                 "document begins")
        if cache is not None or pad is not None:
            raise ValueError("positions of several documents in a row go with no cache and no padding before")
        for problem in no_dropout(self.config, "positions") if self.training else ():
            raise ValueError(problem)

    def before_block(self, x, layer, outputs, shared):
        """The input of block `layer`, or of the last norm at n_layer; x is the last of the outputs so far."""
        for name in self.between:
            x = getattr(self, name).before_block(x, layer, outputs, shared)
        return x

    def make_forward_pass(self, mask, positions, past, T, cache, pad, device, **common):
        """The ForwardPass of the blocks that have this CausalMask.

        positions: a slice, or [B, T] where rows are padded or hold several documents. common: its fields that
        no mask changes. A field that no mechanism needs is None.
        """
        traces = common.get("wants_traces", False)
        row_stats = self.needs_row_stats or bool(traces)
        # statistics of the rows and score functions take FlexAttention on a GPU
        by_flex = row_stats or self.changes_scores
        seen = mask.make(past, T, pad, device, cache is not None, by_flex, traces == "maps",
                         common.get("begins"))
        rope = n_keys = valid = None
        if self.config.pos == "rope":
            rope = {size: tuple(getattr(self, f"{name}{size}")[positions] for name in ("cos", "sin"))
                    for size in self.head_sizes}
        are_read = row_stats or self.needs_positions
        if isinstance(positions, slice):
            positions = torch.arange(past, past + T, device=device) if are_read else None
        elif self.needs_positions and pad is not None:
            valid = (torch.arange(past, past + T, device=device) >= pad[:, None])[..., None]
        if are_read:
            dtype = torch.promote_types(self.transformer.wte.weight.dtype, torch.float32)
            n_keys = mask.n_keys(positions if positions.dim() == 1 else positions[:, None]).to(dtype)
        return ForwardPass(rope, cache, seen, positions, n_keys, valid, **common)

    def mask_of(self, layer):
        """The CausalMask of a block."""
        return self.mask if self.has_mask(layer) else self.whole_mask

    def has_mask(self, layer):
        """Whether a block has the mask of a mechanism, if one is on that has a mask."""
        return all(cls.on(self.config, layer) for cls in MASKS if cls.is_on(self.config))

    def hidden(self, idx, cache=None, pad=None, positions=None, **inputs):
        """run_blocks()' final hidden states [B, T, C] alone."""
        return self.run_blocks(idx, cache, pad, inputs, positions=positions)[0]

    @torch.no_grad()
    def predictions(self, idx):
        """{"blocks.<i>.<name>": tensor}: what constraint heads and A2C predict for idx [B, T].

        Constraint heads of a student are trained to match those of its teacher.
        """
        return self.run_blocks(idx, wants_predictions=True)[1]["predictions"]

    def head(self, x):
        """Logits in float32, [..., C] -> [..., V]."""
        vocabulary = self.config.vocab_size
        if x.is_cuda and vocabulary % 64 and torch.is_grad_enabled():  # decoding would pad it for each token
            logits = F.linear(x, pad_rows(self.lm_head.weight))[..., :vocabulary].float()
        else:
            logits = self.lm_head(x).float()
        if self.config.softcap:
            logits = self.config.softcap * torch.tanh(logits / self.config.softcap)
        return logits

    def cross_entropy(self, x, targets, logits=None, per_token=False):
        """(mean nats of the scored tokens, the nats of each token [B, T] or None).

        logits: head(x), if it was computed already. per_token: whether the nats of each token are needed; a
        loss that is computed in portions has them anyway.
        """
        chunks, flat_targets = 1, targets.flatten()
        if logits is None:
            chunks = portions(self.config.loss_chunks, x, self.config.vocab_size)
        if chunks > 1:
            size = -(-targets.numel() // chunks)
            total, nats = ChunkedCrossEntropy.apply(
                x.flatten(0, 1), self.lm_head.weight, flat_targets, size, product_dtype(x),
                self.config.softcap, torch.is_grad_enabled())
            return total / (targets != -1).sum(), nats.view_as(targets)
        logits = (self.head(x) if logits is None else logits).flatten(0, 1)
        if not per_token:
            return F.cross_entropy(logits, flat_targets, ignore_index=-1), None
        nats = F.cross_entropy(logits, flat_targets, ignore_index=-1, reduction="none").view_as(targets)
        return nats.sum() / (targets != -1).sum(), nats

    # ---- generation ----

    @torch.inference_mode()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, repetition_penalty=1.0,
               stop_token=None, lengths=None, generator=None, **inputs):
        """Yield the next token of every row, [B], up to max_new_tokens times.

        idx [B, T] holds the prompts. Where they are unequal, `lengths` [B] says how long each is, and those
        that are shorter have padding on the left, which is never read. A row reads at most block_size tokens;
        when it would read more it keeps the last half and goes on from there. A row that ended with
        stop_token repeats it; when all have, the stream ends. generator: one for all rows, or a list with one
        for each. inputs: those of forward().
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
                    first_read = int(begin.min())
                    pad = (begin - first_read).to(idx.device) if (begin > first_read).any() else None
                    cache, unread = KVCache(self.config), text[:, first_read:n]
                logits = self.head(self.hidden(unread, cache, pad, **inputs)[:, -1])
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
                # the longest row is full: such rows keep half, and all start anew
                if n + 1 - first_read > block_size:
                    begin = torch.where(n + 1 - begin > block_size, n + 1 - max(1, block_size // 2), begin)
                    cache = None
        finally:
            self.train(was_training)

    @torch.inference_mode()
    def generate(self, idx, max_new_tokens, **sampling):
        """idx [B, T] -> [B, T + new]: the prompts and what follows them. Arguments as for stream()."""
        # the generator itself: through stream() it enters inference_mode anew for each token
        new = list(GPT.stream.__wrapped__(self, idx, max_new_tokens, **sampling))
        return torch.cat((idx, torch.stack(new, dim=1)), dim=1) if new else idx

    @classmethod
    def from_pretrained(cls, model_type, override_args=None):
        """nanoGPT's: the GPT of gpt2, gpt2-medium, gpt2-large or gpt2-xl, as --init_from reads it, or of any
        other checkpoint; override_args may have `dropout`. UserError: it cannot be read.
        """
        if set(override_args or {}) - {"dropout"}:
            raise ValueError(f"override_args={override_args} may set dropout alone: weights fix all else")
        # no import statement, since transformers would ask for it in a folder that has this file alone
        checkpoints = import_module("nanoheads.checkpoint")
        return checkpoints.build(checkpoints.read(model_type), model_type, **(override_args or {})).train()

    # ---- sizes ----

    def num_params(self, non_embedding=False):
        """Number of parameters; non_embedding: without tables that are looked up."""
        n = sum(p.numel() for p in self.parameters())
        if non_embedding:
            tables = (m.weight for m in self.modules() if isinstance(m, nn.Embedding))
            n -= sum(table.numel() for table in tables if table is not self.lm_head.weight)
        return n

    def flops_per_token(self):
        """Floating-point operations to train on one token, forward and backward (PaLM, appendix B).

        6 per parameter in a matrix product, and 12 * n_embd * block_size for each block's attention, as if
        every token saw the whole context. A block with a window counts as one with a context so short that
        its tokens see as many keys on average. Heads that routing does not select count, too.
        """
        attention = 0
        for layer, block in enumerate(self.transformer.h):
            width = block.attn.n_total * block.attn.head_size * self.mask_of(layer).mean_context()
            attention += width * (1 + sum(map(attention_cost, block.attn.mechanisms())))
        return int(6 * self.num_params(non_embedding=True) + 12 * attention)

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

    # ---- what mechanisms add ----

    def at_step(self, step):
        """Before each training step: set what depends on its number."""
        for m in self.modules():
            if isinstance(m, Mechanism):
                m.at_step(self.config, step)


def attention_cost(mechanism):
    """FLOPs of a mechanism beyond those of plain attention, as a share of these.

    A mechanism that acts right after the kernel computes a second attention map. Statistics of the rows
    beyond their log-sum-exp take products of size T x T, of which plain attention has six.
    """
    second_map = type(mechanism).after_kernel is not Mechanism.after_kernel
    values = gradients = 0
    if "spread" in mechanism.needs_row_stats:
        values, gradients = 1, 2  # the logits again
    elif "entropy" in mechanism.needs_row_stats or "log_p2" in mechanism.needs_row_stats:
        values, gradients = 3, 3  # the logits again for log_p2, and the mean key for the entropy
    return second_map + (values if mechanism.detaches_row_stats else values + gradients) / 6


# ---- what a forward pass returns, its cache and its mask ----

class Output(NamedTuple):
    """What a forward pass returns; None: not asked for."""

    logits: Optional[torch.Tensor]  # [B, T, V]
    loss: Optional[torch.Tensor]    # cross-entropy in nats a token
    aux: dict                       # name -> weighted extra loss
    traces: Optional[dict]


class KVCache:
    """Keys and values of the tokens already read, per block: [B, H, block_size, D], filled up to `length`."""

    def __init__(self, config):
        self.k = [None] * config.n_layer
        self.v = [None] * config.n_layer
        self.values = {}  # (layer, name) -> what a mechanism needs of earlier tokens, [B, ...]
        self.block_size = config.block_size
        self.length = 0

    def append(self, layer, k, v):
        """Store k, v [B, H, T, D] after what is there; return all keys and values so far."""
        if self.k[layer] is None:  # made here, where the dtype under autocast is known
            self.k[layer] = k.new_empty(*k.shape[:2], self.block_size, k.size(3))
            self.v[layer] = v.new_empty(*v.shape[:2], self.block_size, v.size(3))
        start, new, every_k, every_v = self.length, k.size(2), self.k[layer], self.v[layer]
        every_k.narrow(2, start, new).copy_(k)
        every_v.narrow(2, start, new).copy_(v)
        return every_k.narrow(2, 0, start + new), every_v.narrow(2, 0, start + new)

    def extend(self, layer, name, value):
        """Keep a mechanism's value [B, T, ...] of the new tokens; return those of all tokens, [B, S, ...]."""
        before = self.values.get((layer, name))
        self.values[layer, name] = value if before is None else torch.cat((before, value), 1)
        return self.values[layer, name]

    def swap(self, layer, name, value):
        """Keep a mechanism's value in place of the one before, which is returned; None at first."""
        before = self.values.get((layer, name))
        self.values[layer, name] = value
        return before


DENSE_UP_TO = 2048  # tokens up to which a window is stored as T x T, 4 MB, where there is no FlexAttention


class CausalMask(nn.Module):
    """Who sees whom: each token sees itself and all tokens before it. A Window shows it fewer."""

    windowed = False

    def __init__(self, config):
        super().__init__()
        self.block_size = config.block_size

    def crop(self, block_size):
        """Shorten the context in place."""
        self.block_size = block_size

    def mask_mod(self, query, key):
        """Whether the token at position `query` may read position `key`, both from 0, broadcast."""
        return key <= query

    def n_keys(self, positions):
        """How many keys the tokens at these positions see."""
        return positions + 1

    def mean_context(self):
        """The block_size of a plain GPT whose tokens see as many keys, on average."""
        return self.block_size

    def make(self, past, T, pad, device, cached, by_flex, maps, begins=None):
        """The mask for T tokens after `past` others, as attend() takes it: a BlockMask, a bool tensor
        [1 or B, 1, T, past + T], Documents, or None, which means causal.

        cached: whether there is a KVCache. by_flex: whether a GPU needs FlexAttention for another reason than
        a window. maps: whether attention maps are traced. begins: see ForwardPass.
        """
        if begins is not None and maps:
            return self.dense(0, T, begins, device)
        if begins is not None:
            # Documents are as many as the data has, and a compiled graph cannot depend on that
            if has_flex_attention(device) or torch.compiler.is_compiling():
                return self.block_mask(T, device, begins)
            return Documents(begins, lambda length: self.make(0, length, None, device, False, False, False))
        if not cached and pad is None and not maps:
            if has_flex_attention(device):
                return self.block_mask(T, device) if self.windowed or by_flex else None
            if self.windowed and T > DENSE_UP_TO:
                return self.block_mask(T, device)
        if pad is not None or (past and T > 1) or self.windowed or maps:
            return self.dense(past, T, pad, device)
        return None

    def dense(self, past, T, pad, device):
        """The mask as booleans, True where a query sees a key, [1 or B, 1, T, past + T]; padding is not seen.

        pad: the column at which the text of each row [B], or of each token [B, T], begins; None: the first.
        """
        query = torch.arange(past, past + T, device=device)[:, None]
        key = torch.arange(past + T, device=device)
        if pad is None:
            return self.mask_mod(query, key)[None, None]
        first = pad[:, None, None] if pad.dim() == 1 else pad[..., None]
        query, key = query - first, key - first
        # a query that is padding sees itself, since a softmax needs at least one key
        return (self.mask_mod(query, key) & (key >= 0) | (key == query))[:, None]

    def block_mask(self, T, device, begins=None):
        """The mask as a BlockMask, for FlexAttention, without a T x T tensor. begins: see ForwardPass."""
        return block_mask(T, device, self.mask_mod, begins=begins)


# ---- the mechanisms of a layer ----

class HeadNorm(Mechanism):
    """RMS-normalise every head's output, per token, before the gates (Adaptive Transformer, section 5.3).

    The write-up normalises over batch and sequence, which would leak.
    """

    class Options:
        head_norm: bool = flag(False, "RMS-normalise every head's output, per token, before the gates")

    name = flag = "head_norm"
    modes = {"head_norm": dict(head_norm=True)}

    def after_attention(self, attn, heads):
        heads.y = rms_norm(heads.y)


class Routing(Mechanism):
    """A router chooses which heads each token uses, and how much of each.

    It computes weights [B, T, H] from x [B, T, C]; where a head is not selected its weight is 0.
    published: a softmax over an MLP's logits, which sums to 1 (Learnable Attention Head Routing). The
        write-up's printed code multiplies the logits of heads beyond the top k by 0, which leaves them some
        weight, and it gates in training only. routing_mask=inf undoes the one, routing_eval_gate the other.
    moh: a softmax over the top k, times k, so that the mean is 1. Shared heads are always on, and a second
        softmax weighs the two groups (MoH, arXiv 2410.11842, eqs. 5-8, in the scale of its published code).
    sigmoid: 2 sigmoid(logit) of each of the top k.
    """

    class Options:
        routing: Optional[Literal["published", "moh", "sigmoid"]] = flag(
            None, "how a token's weights for its heads are computed. published: a softmax, they sum to 1; "
                  "moh: a softmax over the top k, their mean is 1; sigmoid: each head by itself")
        routing_top_k: Optional[int] = flag(
            None, "number of heads that a token uses, shared ones included; None: half of them, but at least "
                  "two more than are shared")
        routing_shared: int = flag(0, "moh: number of heads that every token uses", at_least=0)
        routing_hidden: Optional[int] = flag(
            None, "width of the router's hidden layer; 0: a linear router; None: n_embd // 2 with published, "
                  "else 0", at_least=0)
        routing_coef: float = flag(
            0.01, "weight of the router's own loss: with published the entropy of a token's weights, else "
                  "the heads' load balance", at_least=0)
        routing_mask: Optional[Literal["inf", "zero"]] = flag(
            None, "what becomes of the logits of heads that are not selected: inf removes them, zero "
                  "multiplies them by 0, as the write-up's code does; None: zero with published, else inf")
        routing_eval_gate: Optional[bool] = flag(
            None, "use the weights in evaluation too; False: in training only, as the write-up's code does; "
                  "None: False with published, else True")
        routing_skip: bool = flag(True, "when decoding, read only the selected heads where that saves time")

    name, flag = "router", "routing"  # router: its parameters, and so checkpoints, go by that name
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
        # paired heads read each other's attention maps, so there none can be skipped
        self.skip = config.routing_skip and not config.in_pairs
        self.n_shared = config.routing_shared
        self.k = self.top_k(config) - self.n_shared  # routed heads that a token uses
        self.fc = nn.Linear(C, hidden) if hidden else None
        self.out = nn.Linear(hidden or C, config.n_head - self.n_shared, bias=hidden > 0)
        if self.n_shared > 1:  # one alone has nothing to share
            self.shared = nn.Linear(C, self.n_shared, bias=False)
        if self.n_shared:
            self.split = nn.Linear(C, 2, bias=False)

    @staticmethod
    def top_k(config):
        """Heads that a token uses; None: half of them, or two beside the shared ones."""
        if config.routing_top_k is not None:
            return config.routing_top_k
        return max(1, config.n_head // 2, config.routing_shared and config.routing_shared + 2)

    @staticmethod
    def zero_mask(config):
        """Whether unselected logits are multiplied by 0; else they become -inf."""
        return config.routing == "published" if config.routing_mask is None else config.routing_mask == "zero"

    @staticmethod
    def problems(c):
        k, shared, zero = Routing.top_k(c), c.routing_shared, Routing.zero_mask(c)
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

    def forward(self, x):
        """(weights, whether each head is selected, both [B, T, H] with the shared heads first; the logits
        [B, T, R] of the R routed heads).
        """
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

    def before_attention(self, attn, heads):
        if not (self.training or self.in_eval):
            return
        weights, selected, logits = self(heads.x)
        # the router weighs all heads of before pruning
        kept = weights if attn.n_head == weights.size(-1) else weights[..., attn.head_ids]
        gate = F.pad(kept, (0, attn.n_extra), value=1.0).transpose(1, 2)  # constraint heads are always on
        heads.gates[self.name] = gate[..., None]
        if self.skips(heads):
            heads.close_all_but(gate.squeeze(-1) > 0)
        if heads.forward_pass.wants_losses:
            heads.losses.update(self.penalty(weights, selected, logits))
        if heads.forward_pass.wants_traces:
            heads.traces.update(routing_weights=weights, selected=selected, routing_logits=logits)

    def skips(self, heads):
        """Whether only the heads that the token uses are computed: when decoding, where that pays."""
        if heads.x.size(1) != 1 or self.training or not self.skip:
            return False
        cache = heads.forward_pass.cache
        keys = 1 + (cache.length if cache is not None else 0)
        return keys >= SKIP_FROM and not (heads.x.is_cuda or torch.is_grad_enabled())

    def penalty(self, weights, selected, logits):
        """{name: weighted loss}: published the entropy of a token's weights in nats, else the load balance
        R sum_i P_i f_i of the R routed heads (MoH, eq. 9).
        """
        if self.mode == "published":
            return {"routing_entropy": self.coef * -(weights * (weights + 1e-8).log()).sum(-1).mean()}
        share = logits.softmax(-1).flatten(0, -2).mean(0)
        load = selected[..., self.n_shared:].flatten(0, -2).to(logits.dtype).mean(0)
        # the loss is a product of means, so the means are taken over all ranks before they are multiplied
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(load)
            load = load / dist.get_world_size()
        return {"routing_balance": self.coef * load.numel() * (share * load).sum()}


class Sentinel(Mechanism):
    """Each head's output is multiplied by a learned gate, one number a head (Adaptive Transformer, 2.1).

    sigmoid: g = sigmoid(logit). hard_concrete: a stretched and clamped sigmoid, which reaches 0 exactly and
    is noisy in training (arXiv 1712.01312, eqs. 10-13).
    """

    class Options:
        sentinel: Optional[Literal["sigmoid", "hard_concrete"]] = flag(
            None, "the form of the gates; hard_concrete (L0) can close a gate entirely")
        sentinel_init: float = flag(3.0, "initial logit of the gates, which start near 1")
        sentinel_coef: float = flag(
            1e-4, "weight of the loss that closes gates: their sum, with hard_concrete the probability that "
                  "they are open", at_least=0)

    name = flag = "sentinel"
    modes = {"sentinel": dict(sentinel="sigmoid"), "sentinel_l0": dict(sentinel="hard_concrete")}
    neutral = {"sentinel": {"sentinel_init": 50.0}, "sentinel_l0": {}}  # l0: as it starts, when evaluated
    per_head = ("logit",)
    BETA, LOW, HIGH = 2 / 3, -0.1, 1.1  # the paper's values

    def __init__(self, config, attn):
        super().__init__()
        self.hard = config.sentinel == "hard_concrete"
        self.coef = config.sentinel_coef
        self.logit = nn.Parameter(torch.full((attn.n_total,), config.sentinel_init))

    def gate(self, noisy=False):
        """The gates, [H]; noisy: with the noise that hard_concrete has in training."""
        if not self.hard:
            return self.logit.sigmoid()
        # one draw for the whole batch: the gates are weights
        return self.hard_concrete(self.logit, torch.rand_like(self.logit) if noisy else None)

    @classmethod
    def hard_concrete(cls, s, u=None):
        """Gates in [0, 1] of logits s, with real zeros; u: uniform noise, in training."""
        if u is not None:
            u = u.clamp(1e-6, 1 - 1e-6)
            s = (u.log() - (1 - u).log() + s) / cls.BETA
        return (s.sigmoid() * (cls.HIGH - cls.LOW) + cls.LOW).clamp(0, 1)

    @classmethod
    def chance_open(cls, s):
        """The probability that such a gate is not 0."""
        return (s - cls.BETA * math.log(-cls.LOW / cls.HIGH)).sigmoid()

    def before_projection(self, attn, heads):
        heads.gates[self.name] = self.gate(noisy=self.training)[:, None, None]
        if heads.forward_pass.wants_losses:
            heads.losses.update(self.penalty())

    def set_coef(self, value):
        """Set the weight of the penalty, as a tensor, since each new number would compile the model anew."""
        if not torch.is_tensor(self.coef):
            self.coef = torch.zeros((), dtype=self.logit.dtype, device=self.logit.device)
        self.coef.fill_(value)

    def penalty(self):
        """{name: weighted loss}: the sum of the gates (L1), or of P(gate != 0) (L0)."""
        if not self.hard:
            return {"gate_l1": self.coef * self.logit.sigmoid().sum()}
        return {"gate_l0": self.coef * self.chance_open(self.logit).sum()}


class Agency(Mechanism):
    """Each head has a state, which scales its output, and may withhold consent (Adaptive Transformer, 2.2).

    Both are buffers and change between two steps, so that no change compiles the model anew. The controller
    (lab/heads/controller.py) changes them, or a caller by set(). agency_learned: the heads of a layer
    share a linear map from what was measured of a head to the logits of its states. Between two steps a head
    takes the likeliest state; the gradient is that of the expected factor (straight-through, arXiv
    1308.3432).
    """

    class Options:
        agency: bool = flag(
            False, "give heads states, each with a factor: active 1, overloaded 0.5, misaligned 0.7, "
                   "withdrawn 0")
        agency_enforce: bool = flag(
            True, "a head without consent is withdrawn; False: it runs all the same, and is recorded as "
                  "forced")
        agency_threshold: float = flag(0.05, "a gate above this counts as in use", at_least=0)
        agency_learned: bool = flag(
            False, "the states are predicted from what is measured of the heads; needs controller_log")

    name = flag = "agency"
    modes = {"agency": dict(agency=True), "agency_learned": dict(agency=True, agency_learned=True)}
    neutral = dict.fromkeys(modes, {})  # all heads active
    no_effect_because = "all heads are active at first; between steps the controller changes their states"
    STATES = {"active": 1.0, "overloaded": 0.5, "misaligned": 0.7, "withdrawn": 0.0}  # and their factors
    per_head = ("state", "consent", "utilisation", "last_signal", "metrics")
    METRICS = 6  # numbers that are measured of a head: those of features() in lab/heads/measuring.py

    def __init__(self, config, attn):
        super().__init__()
        n = attn.n_total
        self.enforce, self.threshold = config.agency_enforce, config.agency_threshold
        self.learned = config.agency_learned
        if self.learned:
            self.weight = nn.Parameter(torch.zeros(len(self.STATES), self.METRICS))
            self.bias = nn.Parameter(torch.tensor([3.0, 0.0, 0.0, 0.0]))
            self.register_buffer("metrics", torch.zeros(n, self.METRICS))
        self.register_buffer("state", torch.zeros(n, dtype=torch.long))
        self.register_buffer("consent", torch.ones(n, dtype=torch.bool))
        self.register_buffer("utilisation", torch.zeros(n))
        self.register_buffer("last_signal", torch.zeros(n, dtype=torch.long))  # the step of the last change
        *factors, withdrawn = self.STATES.values()
        factors = torch.tensor([*factors, withdrawn if self.enforce else 1.0])
        self.register_buffer("factors", factors, persistent=False)
        self.register_load_state_dict_post_hook(self.check_states)

    def logits(self):
        """The logits of each head's states, [H, states], where they are learned."""
        return float32_linear(self, self.metrics)

    def gate(self):
        """The factors of the heads' states, [H]. A head without consent is withdrawn, where that is enforced.
        """
        withdrawn = len(self.STATES) - 1
        gate = self.factors[self.state.masked_fill(~self.consent, withdrawn) if self.enforce else self.state]
        if self.learned:  # the value stays, and the gradient is the expected factor's, of heads with consent
            expected = (self.logits().softmax(-1) * self.factors).sum(-1)
            gate = gate + torch.where(self.consent, expected - expected.detach(), 0.0)
        return gate

    def before_projection(self, attn, heads):
        heads.gates[self.name] = self.gate()[:, None, None]
        if heads.forward_pass.wants_traces:
            # both change between steps, so a trace has copies
            heads.traces.update(agency_utilisation=self.utilisation.clone(),
                                agency_last_signal=self.last_signal.clone())

    def check_states(self, *args):
        """ValueError where a state that was loaded is none of STATES."""
        if not {*self.state.flatten().tolist()} <= {*range(len(self.STATES))}:
            raise ValueError(f"agency.state={self.state.tolist()} must be from 0 to {len(self.STATES) - 1}")

    def set(self, i, state=None, consent=None, step=0):
        """Move head i to a state, or set its consent. Raises ValueError for a state that there is not."""
        names = list(self.STATES)
        if state is not None:
            if state not in names:
                raise ValueError(f"state {state!r} must be one of {', '.join(names)}")
            old = names[self.state[i]]
            self.state[i] = names.index(state)
            # withdrawing takes consent away, and coming back gives it; other moves leave it as it is
            if consent is None and "withdrawn" in (state, old):
                consent = state != "withdrawn"
        if consent is not None:
            self.consent[i] = consent
        self.last_signal[i] = step


class A2C(Mechanism):
    """A2C attention: a critic's scalar a [B, T, H], linear in x, acts on the logits of its head.

    published: the logits are a_t q_t . q_s / sqrt(d), so a is a signed temperature of the query.
    temperature: exp(a_t) in place of a_t. key_bias: w a_s is added to the logits of key s. In the last two a
    is trained to predict the advantage, which itself is known only from later tokens.
    """

    class Options:
        a2c: Optional[Literal["published", "temperature", "key_bias"]] = flag(
            None, "what the critic's scalar a does. published: multiplies the query's logits by a; "
                  "temperature: by exp(a); key_bias: adds a learned multiple of a to the logits of a key")
        a2c_gamma: float = flag(0.9, "discount of the return, per token", at_least=0, below=1)
        a2c_value_coef: float = flag(
            0.1, "weight of the loss of the value head: its squared error", at_least=0)
        a2c_advantage_coef: float = flag(
            0.01, "weight of the loss of the predicted advantages: their squared error", at_least=0)

    name = flag = "a2c"
    modes = {"a2c_published": dict(a2c="published"), "a2c_temperature": dict(a2c="temperature"),
             "a2c_key_bias": dict(a2c="key_bias")}
    neutral = {"a2c_temperature": {}, "a2c_key_bias": {}}  # as they start
    per_head = ("critic.weight", "critic.bias", "mix")
    MAX = 8.0  # of a in temperature, since exp(a) overflows at 88 in float32 and at 11 in float16

    def __init__(self, config, attn):
        super().__init__()
        self.mode, self.needs_nats = config.a2c, self.learns(config)
        self.critic = nn.Linear(config.n_embd, attn.n_head, bias=self.mode == "published")
        if self.mode == "published":  # nn.Linear's own
            start_at(self.critic.weight, Uniform(config.n_embd ** -0.5))
            start_at(self.critic.bias, Uniform(config.n_embd ** -0.5))
        elif self.mode == "temperature":
            start_at(self.critic.weight, 0.0)
        else:
            self.mix = nn.Parameter(torch.zeros(attn.n_head))

    @staticmethod
    def problems(config):
        if config.a2c == "published" and config.group > 1:
            yield f"a2c='published' has queries as keys, one for each head: not n_kv_head={config.n_kv_head}"
        if config.a2c == "published" and config.n_head * config.head_size != config.n_embd:
            yield (f"a2c='published' has the layer's input as values, {config.n_embd} wide: not "
                   f"{config.n_head} heads of head_dim={config.head_dim}")

    @staticmethod
    def learns(config):
        """Whether a critic and a value head are trained on the returns to come."""
        return config.a2c in ("temperature", "key_bias")

    @classmethod
    def model_modules(cls, config):
        return {"value": A2CValue(config)} if cls.learns(config) else {}

    @classmethod
    def model_losses(cls, model, outcome):
        if outcome.targets is None or not cls.learns(model.config):
            return {}
        return model.value.losses(outcome.x, outcome.nats.detach(), outcome.targets != -1,
                                  outcome.predictions, outcome.traces, outcome.positions)

    def before_attention(self, attn, heads):
        a = float32_linear(self.critic, heads.x)
        heads.predictions["advantage"] = a
        if heads.forward_pass.wants_traces:
            heads.traces["advantage"] = a
        factor = a.transpose(1, 2)[..., None]
        if self.mode == "published":
            heads.q = heads.q * factor.to(heads.q.dtype)
        elif self.mode == "temperature":
            heads.q = heads.q * factor.clamp_max(self.MAX).exp().to(heads.q.dtype)

    @property
    def changes_scores(self):
        return self.mode == "key_bias"

    def score_mod(self, attn, heads):
        a = heads.predictions["advantage"]
        if heads.forward_pass.cache is not None:
            a = heads.forward_pass.cache.extend(attn.layer, self.name, a)
        bias = self.mix[:, None] * a.transpose(1, 2)  # (B, H, S), one for each key
        return lambda score, b, h, t, s: score + bias[b, h, s]


class A2CValue(nn.Linear):
    """A2C's value of the text so far, [B, T, C] -> [B, T, 1], and the two losses that need the logits.

    The return G_s is the discounted sum of the log-probabilities of the tokens to come. It is a target and
    never an input. The value reads the last hidden state, and sends no gradient into it.
    """

    def __init__(self, config):
        super().__init__(config.n_embd, 1)
        self.gamma = config.a2c_gamma
        self.value_coef, self.advantage_coef = config.a2c_value_coef, config.a2c_advantage_coef

    def losses(self, x, nats, scored, predictions, traces=None, positions=None):
        """{name: weighted loss} of the value and of the advantages that blocks have predicted.

        x [B, T, C]: the last hidden state. nats, scored [B, T]: each token's loss, and whether it counts.
        traces: a dict that gets return, value and advantage, [B, T]. positions: see GPT.forward().
        """
        G = discounted_return(-nats, scored, self.gamma, positions)
        V = float32_linear(self, x.detach()).squeeze(-1)
        advantage = (G - V).detach()
        predicted = {key: a for key, a in predictions.items()
                     if key.split(".", 2)[2] == "advantage" and a.size(-1)}
        errors = [((a - advantage[..., None]).square().mean(-1) * scored).sum() for a in predicted.values()]
        if traces is not None:
            traces.update({"a2c.return": G, "a2c.value": V, "a2c.advantage": advantage})
        return {"a2c_value": self.value_coef * ((V - G).square() * scored).sum() / scored.sum(),
                "a2c_advantage": self.advantage_coef * (sum(errors) / max(1, len(predicted))) / scored.sum()}


class Roles(Mechanism):
    """Each head starts with a preference for certain distances: logits[t, s] += sign strength_h p(t - s).

    Source: Adaptive Transformer, section 5.4, which names specialised heads and gives no formula. p(d) is the
    mean of cos(2 pi (d - offset) / wavelength) over growing wavelengths: 1 at d = offset, and less elsewhere.
    """

    class Options:
        roles: Optional[list[str]] = flag(
            None, "the heads' roles in order, repeated if there are more heads: local, long, previous or "
                  "free; None: off")
        roles_strength: float = flag(
            4.0, "initial strength of the preference, in nats at its peak", at_least=0)
        roles_waves: Optional[int] = flag(
            None, "number of cosines that make up a preference; None: follows from block_size")

    name = flag = "roles"
    modes = {"roles": dict(roles=["local", "long", "previous", "free"])}
    neutral = {"roles": {"roles_strength": 0.0}}
    per_head = ("strength", "priors")
    # role -> (sign, offset, shortest wavelength), in tokens
    ROLES = {"local": (1, 0, 16), "long": (-1, 0, 16), "previous": (1, 1, 2), "free": (0, 0, 16)}
    GROWTH = 1.5  # ratio of one wavelength to the one before; with 2 there would be more peaks

    def __init__(self, config, attn):
        super().__init__()
        self.waves = config.roles_waves
        self.strength = nn.Parameter(torch.full((attn.n_head,), config.roles_strength))
        priors = torch.tensor([self.ROLES[self.role_of(config, head)] for head in attn.head_ids],
                              dtype=torch.float32)
        self.register_buffer("priors", priors.view(-1, 3), persistent=False)

    @staticmethod
    def settle(config):
        if config.roles and config.roles_waves is None:  # stays when the context is cropped
            config.roles_waves = 4 * max(1, -(-(config.block_size - 1).bit_length() // 4))

    @staticmethod
    def problems(c):
        if not 1 <= len(c.roles) <= c.n_head or set(c.roles) - set(Roles.ROLES):
            yield f"roles={c.roles} must be one to n_head={c.n_head} of {', '.join(Roles.ROLES)}"
        elif c.roles_waves < 1:
            yield f"roles_waves={c.roles_waves} must be at least 1"

    @staticmethod
    def role_of(config, head):
        """The role of a base head, by its original number."""
        return config.roles[head % len(config.roles)]

    def score_mod(self, attn, heads):
        dtype = torch.promote_types(self.strength.dtype, torch.float32)  # bfloat16 cannot count to 257
        distance = torch.arange(heads.k.size(2), dtype=dtype, device=heads.k.device)[:, None]
        sign, offset, shortest = self.priors.to(dtype)[..., None, None].unbind(1)  # (H, 1, 1)
        wavelength = shortest * self.GROWTH ** torch.arange(self.waves, dtype=dtype, device=distance.device)
        prior = (sign * (2 * math.pi * (distance - offset) / wavelength).cos()).mean(-1)  # (H, S)
        strength = self.strength
        return lambda score, b, h, t, s: score + strength[h] * prior[h, (t - s).abs()]


class ConstraintHeads(AddedHeads):
    """Extra heads for named constraints, with projections of their own, a router and a score per token.

    Source: the constraint write-up. The router reads the running mean of x, or its first token, or a hint
    [B, C]; the write-up's mean over the whole sequence would leak. It gates the heads' outputs, or their
    values, or (score) each token's weight on itself, which is the write-up's log(gate) on the diagonal of the
    logits. published: the values are gated, and the scores read the gated outputs.
    """

    class Options:
        constraint_names: Optional[list[str]] = flag(
            None, "turn the extra heads on: the constraints that they are for, by name; None: off")
        constraint_heads: int = flag(1, "extra heads for each name", at_least=1)
        constraint_variant: Literal["A", "B"] = flag(
            "A", "A: the extra heads are as wide as the others; B: all heads of the layer are narrower, so "
                 "that together they are as wide as n_embd")
        constraint_round: int = flag(
            1, "variant B: the head size is rounded down to a multiple of this", at_least=1)
        constraint_layers: Optional[list[int]] = flag(
            None, "blocks that have the extra heads, counted from 0; None: one, at two thirds of the depth")
        constraint_mode: Literal["query", "published"] = flag(
            "query", "query: scores are read from the heads before their gate; published: values are gated, "
                     "and scores are read after that")
        constraint_gate: Optional[Literal["output", "value", "score"]] = flag(
            None, "what the router's gate multiplies; None: output, with constraint_mode=published value")
        constraint_router: Literal["sigmoid", "hard_concrete"] = flag(
            "sigmoid", "the form of the router's gates; hard_concrete can close a gate entirely")
        constraint_router_input: Literal["mean", "first"] = flag(
            "mean", "what the router reads: the running mean of the tokens so far, or the first token")
        constraint_hidden: int = flag(128, "width of the router's hidden layer", at_least=1)
        constraint_skip: float = flag(
            0.0, "in evaluation, gates below this are closed and their heads are not computed", at_least=0)
        constraint_coef: float = flag(
            0.2, "weight of the constraint loss, where there are labels", at_least=0)
        constraint_warmup: int = flag(
            0, "steps over which constraint_coef and constraint_match_coef rise from 0", at_least=0)
        constraint_stop: int = flag(
            0, "for this many steps these heads send no gradient into the rest of the model",
            at_least=0)
        constraint_loss_layers: Optional[list[int]] = flag(
            None, "blocks whose scores count in the constraint loss; None: all that have these heads")
        constraint_name_coef: Optional[list[float]] = flag(
            None, "weight of each name in the constraint loss; None: 1 each")
        constraint_positive_coef: float = flag(
            1.0, "weight of positive labels in the constraint loss", at_least=0)
        constraint_focal: float = flag(
            0.0, "focal exponent of the constraint loss; 0: plain cross-entropy", at_least=0)
        constraint_sparsity_coef: float = flag(
            0.0, "weight of a loss that closes the gates: their mean, with hard_concrete the probability "
                 "that they are open", at_least=0)
        constraint_entropy_coef: float = flag(0.0, "weight of a loss of the gates' mean entropy", at_least=0)
        constraint_match: Optional[Literal["kl", "huber"]] = flag(
            None, "match a teacher: its scores (kl) or its outputs (huber)")
        constraint_features: Optional[int] = flag(
            None, "the teacher is a function with features of this width, which a linear map of these heads' "
                  "outputs is to match; None: the teacher is a GPT with such heads", at_least=1)
        constraint_match_coef: float = flag(1.0, "weight of the loss that matches the teacher", at_least=0)

    name, flag = "constraint", "constraint_names"
    modes = {"constraint_a": dict(constraint_names=CONSTRAINTS),
             "constraint_b": dict(constraint_names=CONSTRAINTS, constraint_variant="B"),
             "constraint_published": dict(constraint_names=CONSTRAINTS, constraint_mode="published")}
    neutral = {"constraint_a": {"constraint.c_proj.weight": 0.0},
               # constraint_b has no neutral setting: all heads of its layers have another size
               "constraint_published": {"constraint.c_proj.weight": 0.0}}
    needs_positions = True
    # {name: [B, T]}, see label_losses(); [B, C], which the router reads instead of the text so far; another
    # model's predictions() on the same tokens, or with constraint_features a tensor [B, T, C] of that width
    takes = ("constraint_targets", "router_hint", "teacher")
    SMALLEST_GATE = 1e-30  # whose logarithm is taken of any smaller one, which then gets no gradient

    @classmethod
    def on(cls, config, layer):
        layers = [2 * config.n_layer // 3] if config.constraint_layers is None else config.constraint_layers
        return cls.is_on(config) and layer in layers

    @classmethod
    def added_heads(cls, config, layer):
        return config.constraint_heads * len(config.constraint_names) if cls.on(config, layer) else 0

    @classmethod
    def head_size_in(cls, config, layer):
        if config.constraint_variant == "B" and cls.on(config, layer):
            return cls.size_in_b(config)

    @staticmethod
    def size_in_b(config):
        """Variant B's head size: n_embd / all heads of the block, floored to a multiple of constraint_round.
        """
        heads = config.n_head + config.constraint_heads * len(config.constraint_names)
        return config.n_embd // heads // config.constraint_round * config.constraint_round

    def __init__(self, config, attn):
        super().__init__()
        n, C, D = attn.n_extra, config.n_embd, attn.head_size
        self.names, self.n_head, self.per_name = config.constraint_names, n, config.constraint_heads
        self.published, self.gate_on = config.constraint_mode == "published", config.constraint_gate
        self.hard = config.constraint_router == "hard_concrete"
        self.of_first = config.constraint_router_input == "first"
        self.sparsity_coef = config.constraint_sparsity_coef
        self.entropy_coef = config.constraint_entropy_coef
        self.skip, self.stopped = config.constraint_skip, False
        warmup = torch.ones(()) if config.constraint_warmup else None
        self.register_buffer("warmup", warmup, persistent=False)  # a tensor: moving it compiles nothing anew
        self.c_attn = Linear(C, 3 * n * D, bias=config.bias, stacked=3)
        self.c_proj = Linear(n * D, C, bias=False, stacked=1)
        self.fc = nn.Linear(C, config.constraint_hidden)
        self.out = nn.Linear(config.constraint_hidden, n)
        # the scorers, one MLP per head
        self.w1 = start_at(nn.Parameter(torch.empty(n, D, D)), Normal(0.02))
        self.b1 = nn.Parameter(torch.zeros(n, D))
        self.w2 = start_at(nn.Parameter(torch.empty(n, D)), Normal(0.02))
        self.b2 = nn.Parameter(torch.zeros(n))
        # maps the outputs to a teacher's features, to compare them in training
        self.features = nn.Linear(n * D, config.constraint_features) if config.constraint_features else None

    @staticmethod
    def settle(config):
        if config.constraint_names and config.constraint_gate is None:
            config.constraint_gate = "value" if config.constraint_mode == "published" else "output"

    @staticmethod
    def problems(c):
        names = c.constraint_names
        if c.constraint_features and not c.constraint_match:
            yield f"constraint_features={c.constraint_features} needs constraint_match: how they are compared"
        if not len(names) == len(set(names)) > 0 or any("." in name for name in names):
            yield f"constraint_names={names} must be different names, at least one, without dots"
        if c.constraint_layers is not None and not set() < set(c.constraint_layers) <= set(range(c.n_layer)):
            yield f"constraint_layers={c.constraint_layers} must be blocks from 0 to {c.n_layer - 1}"
        scored, blocks = c.constraint_loss_layers, ConstraintHeads.blocks(c)
        if scored is not None and not set() < set(scored) <= set(blocks):
            yield f"constraint_loss_layers={scored} must be of the blocks with constraint heads, {blocks}"
        if c.constraint_skip and c.constraint_gate != "output":
            yield (f"constraint_skip={c.constraint_skip} needs constraint_gate='output': a gate on "
                   f"{c.constraint_gate}s does not turn a head off")
        if c.constraint_variant == "B":
            n, size = c.n_head + c.constraint_heads * len(names), ConstraintHeads.size_in_b(c)
            if size == 0:
                yield (f"constraint_variant='B' leaves {c.n_embd} / {n} heads, less than "
                       f"{c.constraint_round} wide each")
            if c.queries_are_keys:
                yield ("a2c='published' takes x in n_head slices as values, which constraint_variant='B' "
                       "makes too narrow")
        elif c.constraint_round != 1:
            yield (f"constraint_round={c.constraint_round} needs constraint_variant='B': heads of 'A' are as "
                   "wide as the layer's others")
        if c.constraint_name_coef is not None and len(c.constraint_name_coef) != len(names):
            yield f"constraint_name_coef={c.constraint_name_coef} must be one for each name"
        if min(c.constraint_name_coef or [0.0]) < 0:
            yield f"constraint_name_coef={c.constraint_name_coef} must not be negative"

    @classmethod
    def blocks(cls, config):
        """The blocks that have such heads."""
        return [layer for layer in range(config.n_layer) if cls.on(config, layer)]

    def before_attention(self, attn, heads):
        heads.k, heads.v = for_each_head(heads.k, attn.n_head), for_each_head(heads.v, attn.n_head)
        x = heads.x.detach() if self.stopped else heads.x
        logits = self.router_logits(x, heads.forward_pass, attn.layer)
        gates = self.router_gates(logits, heads.forward_pass.begins)
        if heads.forward_pass.wants_losses:
            heads.losses.update(self.penalty(logits, gates))
        if heads.forward_pass.wants_traces:
            heads.traces["router_gates"] = gates
        factor = gates.transpose(1, 2)[..., None]  # (B, heads, T or 1, 1)
        if self.gate_on == "output":
            heads.gates[self.name] = F.pad(gates, (attn.n_head, 0), value=1.0).transpose(1, 2)[..., None]
            # a closed head is skipped, unless scores are wanted, which every head gives
            if self.skip and not self.training and not self.wants_scores(heads.forward_pass):
                heads.close_all_but(F.pad((gates > 0).any(1), (attn.n_head, 0), value=True))
        qkv = self.c_attn(x).view(*x.shape[:2], 3 * self.n_head, attn.head_size)
        q, k, v = attn.split(qkv, heads, self.n_head, self.n_head)
        if self.gate_on == "value":
            v = v * factor.to(heads.x.dtype)
        if self.gate_on == "score":
            heads.notes["self_gate"] = factor.squeeze(-1)
        heads.q, heads.k, heads.v = (torch.cat(both, 1) for both in
                                     ((heads.q, q), (heads.k, k), (heads.v, v)))

    @property
    def changes_scores(self):
        return self.gate_on == "score"

    def score_mod(self, attn, heads):
        """The logarithm of each token's gate is added to its score for itself."""
        gate = heads.notes["self_gate"]  # (B, added heads, T or 1)
        n, past = attn.n_head, heads.k.size(2) - heads.q.size(2)
        gate = gate.to(torch.promote_types(gate.dtype, torch.float32)).clamp_min(self.SMALLEST_GATE)
        log_gate = gate.log().expand(-1, -1, heads.q.size(2))

        def score_mod(score, b, h, t, s):
            gated = score + log_gate[b, (h - n).clamp_min(0), t - past]
            return torch.where((h >= n) & (t == s), gated, score)
        return score_mod

    def penalty(self, logits, gates):
        """{name: weighted loss} of the router: sparsity closes gates, entropy drives them to 0 or 1."""
        losses = {}
        if self.sparsity_coef:
            opened = Sentinel.chance_open(logits) if self.hard else gates
            losses["constraint_router"] = self.sparsity_coef * opened.mean()
        if self.entropy_coef:
            entropy = F.binary_cross_entropy_with_logits(logits, logits.sigmoid(), reduction="none")
            losses["constraint_entropy"] = self.entropy_coef * entropy.mean()
        return losses

    def merge_added(self, out, y):
        return out + self.c_proj(y.transpose(1, 2).flatten(2))

    @staticmethod
    def wants_scores(forward_pass):
        """Whether the scores of these heads are asked for."""
        inputs = forward_pass.inputs
        return forward_pass.wants_predictions or "constraint_targets" in inputs or "teacher" in inputs

    def after_attention(self, attn, heads):
        wants_scores, wants_traces = self.wants_scores(heads.forward_pass), heads.forward_pass.wants_traces
        if not (wants_scores or wants_traces):
            return
        y = heads.y[:, attn.n_head:]
        if self.published and self.gate_on == "output":
            y = y * heads.gates[self.name][:, attn.n_head:].to(y.dtype)
        if wants_scores:
            heads.predictions["constraint_y"] = y
            if self.features is not None:
                heads.predictions["constraint_features"] = self.features(y.transpose(1, 2).flatten(2))
        scores = self.scores(y)
        means = scores.unflatten(1, (len(self.names), self.per_name)).mean(2).unbind(1)
        named = {f"constraint.{name}": score for name, score in zip(self.names, means)}
        heads.predictions.update(named)
        if wants_traces:
            heads.traces.update(named, head_scores=scores)

    def router_logits(self, x, forward_pass, layer):
        """The router's logits, [B, T, heads]; with a hint [B, 1, heads]."""
        if (hint := forward_pass.inputs.get("router_hint")) is not None:
            if forward_pass.begins is not None:
                raise ValueError("router_hint has one entry for a row, and by positions a row holds several "
                                 "documents")
            read = hint[:, None].to(x.dtype)
        else:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            x = x if forward_pass.valid is None else x * forward_pass.valid
            x = x * (forward_pass.positions == 0)[..., None] if self.of_first else x
            read = sum_so_far(x, forward_pass.begins)
            if forward_pass.cache is not None:
                before = forward_pass.cache.values.get((layer, "sum"))
                read = read if before is None else read + before
                forward_pass.cache.swap(layer, "sum", read[:, -1:])
            if not self.of_first:
                read = read / (forward_pass.positions + 1)[..., None]
        return float32_linear(self.out, F.relu(self.fc(read.to(self.fc.weight.dtype))))

    def router_gates(self, logits, begins=None):
        """Gates in [0, 1] of logits [B, T, heads]; hard_concrete: one draw of noise a text and head."""
        if not self.hard:
            gates = logits.sigmoid()
        else:
            noise = None
            if self.training and begins is None:
                noise = torch.rand_like(logits[:, :1])
            elif self.training:  # all tokens of a document have that of its first
                noise = torch.rand_like(logits).gather(1, begins[..., None].expand_as(logits))
            gates = Sentinel.hard_concrete(logits, noise)
        return gates if self.training or not self.skip else gates * (gates >= self.skip)

    def scores(self, y):
        """One logit per head and token, [B, heads, T], of the heads' outputs y [B, heads, T, D]."""
        hidden = torch.einsum("bhtd,hed->bhte", y, self.w1.to(y.dtype)) + self.b1[:, None].to(y.dtype)
        return torch.einsum("bhtd,hd->bht", F.relu(hidden), self.w2.to(y.dtype)) + self.b2[:, None]

    @classmethod
    def model_losses(cls, model, outcome):
        losses, inputs = {}, outcome.inputs
        if inputs.get("constraint_targets") is not None:
            losses = cls.losses(model.config, outcome.predictions, inputs["constraint_targets"])
        if inputs.get("teacher") is not None:
            losses.update(cls.match(model.config, outcome.predictions, inputs["teacher"]))
        if losses and model.training and model.config.constraint_warmup:
            share = model.transformer.h[cls.blocks(model.config)[0]].attn.constraint.warmup
            losses = {name: loss * share for name, loss in losses.items()}
        return losses

    @classmethod
    def losses(cls, config, predictions, targets):
        """{constraint.<name>: its part of the weighted loss}, means over blocks; see label_losses()."""
        names = config.constraint_names or ()
        coefs = dict(zip(names, config.constraint_name_coef or ()))
        blocks = config.constraint_loss_layers or cls.blocks(config)
        scores = [{n: predictions[f"blocks.{i}.constraint.{n}"] for n in names} for i in blocks] or [{}]
        focal, positive = config.constraint_focal, config.constraint_positive_coef
        terms = [label_losses(s, targets, coefs, focal, positive) for s in scores]
        return {f"constraint.{name}": config.constraint_coef * sum(term[name] for term in terms) / len(terms)
                for name in targets}

    @staticmethod
    def match(config, predictions, teacher):
        """{constraint_match: weighted distance of the scores or outputs from a teacher's}, mean over blocks.

        teacher: what its heads predict, whose blocks with heads are taken in their order; or with
        constraint_features a tensor [B, T, C].
        """
        by_scores = config.constraint_match == "kl"
        if config.constraint_features:
            if not torch.is_tensor(teacher) or teacher.size(-1) != config.constraint_features:
                raise ValueError(f"with constraint_features={config.constraint_features} the teacher must be "
                                 "a tensor [B, T, C] of that width")
            mapped = [value.float() for name, value in predictions.items()
                      if name.endswith(".constraint_features")]
            terms = [distance_to_features(s, teacher.float(), config.constraint_match) for s in mapped]
            return {"constraint_match": config.constraint_match_coef * sum(terms) / len(terms)}
        keys = [f"constraint.{name}" for name in config.constraint_names] if by_scores else ["constraint_y"]
        terms = []
        for key in keys:
            ours, theirs = ([value.float() for name, value in model.items() if name.split(".", 2)[2] == key]
                            for model in (predictions, teacher))
            terms += [distance_to_teacher(s, t, config.constraint_match)
                      for s, t in zip(ours, theirs, strict=True)]
        return {"constraint_match": config.constraint_match_coef * sum(terms) / len(terms)}

    def at_step(self, config, step):
        self.stopped = step < config.constraint_stop
        if self.warmup is not None:
            self.warmup.fill_(min(1.0, (step + 1) / config.constraint_warmup))


class ACAG(Mechanism):
    """ACAG: a gate on each head, from the context's length and the shape of its attention row.

    Source: the ACAG README. c is the length of the context so far, as a share of acag_length; n is the number
    of keys that the token sees, and p is the row of its n attention weights.
    published: sigmoid(W [c, mean, std] + b). The mean of p is always 1/n, so it says nothing of the row's
        shape, and the std shrinks with n.
    normalised: 2 sigmoid(W [c, 1 - entropy / log n, log(n sum p^2)] + b), with W and b zero at the start, and
        the length in c on a logarithmic scale.
    """

    class Options:
        acag: Optional[Literal["headwise", "elementwise"]] = flag(
            None, "a gate for each head, or for each dimension of each head")
        acag_mode: Literal["normalised", "published"] = flag(
            "normalised", "what the gate reads of the attention row: normalised: its entropy and "
                          "concentration; published: its mean and standard deviation")
        acag_detach: bool = flag(False, "send no gradient into the attention rows: cheaper")
        acag_length: Optional[int] = flag(
            None, "context length that counts as full; None: block_size", at_least=1)

    name = flag = "acag"
    modes = {"acag": dict(acag="headwise"), "acag_elementwise": dict(acag="elementwise"),
             "acag_detach": dict(acag="headwise", acag_detach=True),
             "acag_published": dict(acag="headwise", acag_mode="published")}
    neutral = {"acag": {}, "acag_elementwise": {}, "acag_detach": {},  # as they start
               "acag_published": {"acag.weight": 0.0, "acag.bias": 50.0}}
    per_head = ("weight", "bias")
    needs_row_stats = ("entropy", "log_p2")

    def __init__(self, config, attn):
        super().__init__()
        shape = (attn.n_total,) if config.acag == "headwise" else (attn.n_total, attn.head_size)
        self.published, self.detaches_row_stats = config.acag_mode == "published", config.acag_detach
        if self.published:
            self.needs_row_stats = ("lse", "spread")
        self.length = config.acag_length
        self.weight = nn.Parameter(torch.zeros(*shape, 3))
        self.bias = nn.Parameter(torch.zeros(*shape))
        if self.published:
            start_at(self.weight, Uniform(3 ** -0.5))
            start_at(self.bias, Uniform(3 ** -0.5))

    @staticmethod
    def settle(config):
        if config.acag and config.acag_length is None:
            config.acag_length = config.block_size  # stays when the context is cropped

    def forward(self, stats, n_keys, positions):
        """Gate [B, H, T, 1 or D] from RowStats, the keys seen and the tokens before each token, [T] or
        [B, 1, T].
        """
        if self.detaches_row_stats:  # another mechanism may have asked for the gradient
            stats = RowStats(*(s if s is None else s.detach() for s in stats))
        lse, entropy, log_p2, spread = stats
        before = positions.to(lse.dtype)
        alone = n_keys == 1  # such a row has no spread; its logarithm and root would have no gradient
        n = n_keys.masked_fill(alone, 2).to(lse.dtype)
        if self.published:
            std = torch.where(alone, 0.0, (spread / n + 1e-12).sqrt())  # the population's
            features = (before + 1) / self.length, 1 / n_keys, std
        else:
            features = ((1 + before).log() / math.log(1 + self.length),
                        torch.where(alone, 0.0, 1 - entropy / n.log()),
                        torch.where(alone, 0.0, n.log() + log_p2))
        z = torch.stack([f.expand_as(lse).to(lse.dtype) for f in features], -1)
        w = self.weight if self.weight.dim() == 3 else self.weight[:, None]  # (H, 1 or D, 3)
        z = torch.einsum("bhtf,hdf->bhtd", z, w.to(z.dtype)) + self.bias.view(len(w), 1, w.size(1))
        return z.sigmoid() if self.published else 2 * z.sigmoid()

    def after_attention(self, attn, heads):
        forward_pass = heads.forward_pass
        heads.gates[self.name] = self(heads.row_stats, forward_pass.n_keys, forward_pass.positions_per_head)


# ---- mechanisms outside the layers ----

def identity_of_x(shape):
    """[0, I], the matrix that takes x out of [skip; x], in the shape [C, 2 C]."""
    return torch.cat((torch.zeros(shape[0], shape[0]), torch.eye(shape[0])), 1)


class UNet(BetweenBlocks, nn.ModuleList):
    """U-Net: a later block's output also gets that of its partner among the earlier blocks.

    Source: Adaptive Transformer, section 2.3. It is a list of UNetSkips, one for each of the later blocks.
    """

    class Options:
        unet: Optional[Literal["concat", "add", "scalar", "published"]] = flag(
            None, "how an earlier block's output s joins a later block's x. concat: W[s; x] is added; add: "
                  "sigmoid(w) s is added; scalar: w s is added; published: W[s; x] takes x's place")
        unet_init: Optional[float] = flag(
            None, "initial weight of the skip into the first of the later blocks; None: 0.5, with scalar 1",
            at_least=0)
        unet_skips: bool = flag(
            True, "False: skips add nothing, to see what a trained model does without them")
        unet_from: int = flag(0, "skips add nothing before this step", at_least=0)
        unet_ramp: int = flag(0, "steps over which they then rise to their full weight", at_least=0)

    name, flag = "fuse", "unet"  # fuse: its parameters, and so checkpoints, go by that name
    modes = {"unet_concat": dict(unet="concat"), "unet_add": dict(unet="add"),
             "unet_scalar": dict(unet="scalar"),
             "unet_published": dict(unet="published")}
    neutral = {"unet_concat": {"unet_init": 0.0}, "unet_add": {"unet_init": 0.0},
               "unet_scalar": {"unet_init": 0.0},
               "unet_published": {"fuse.*.weight": identity_of_x, "fuse.*.bias": 0.0}}

    def __init__(self, config):
        super().__init__()
        self.extend(UNetSkip(config, depth) for depth in range(config.n_layer // 2))
        self.n_layer = config.n_layer

    @staticmethod
    def settle(config):
        if config.unet and config.unet_init is None:  # at 1 others report that a free number helps
            config.unet_init = 1.0 if config.unet == "scalar" else 0.5

    @staticmethod
    def problems(c):
        if c.n_layer < 2:
            yield f"unet={c.unet!r} needs at least two layers to join"
        if c.unet == "add" and c.unet_init > 1:
            yield f"unet_init={c.unet_init} must be at most 1 for unet='add', whose weight is a sigmoid"

    def at_step(self, config, step):
        for skip in self:
            if skip.ramp is not None:
                skip.ramp.fill_(self.share_at_step(config, step))

    @staticmethod
    def share_at_step(config, step):
        """The factor on the skips in a training step, from 0 to 1."""
        return min(1.0, max(0.0, (step + 1 - config.unet_from) / max(1, config.unet_ramp)))

    def before_block(self, x, layer, outputs, shared):
        """The output x of decoder block layer - 1, joined by that of its partner; a middle block has none.
        """
        depth = layer - 1 - (self.n_layer - len(self))
        return x if depth < 0 else self[depth](x, outputs[self.n_layer - layer + 1])


class UNetSkip(Mechanism):
    """Joins an encoder block's output `skip` to a decoder block's output x, both [B, T, C].

    concat: x + W [skip; x]; add: x + sigmoid(logit) skip; scalar: x + weight skip, as speedruns have it;
    published: the write-up's Linear([skip; x]). The initial weight of the skip falls with depth (its section
    5.3). Its flags are those of UNet.
    """

    def __init__(self, config, depth):
        super().__init__()
        C = config.n_embd
        self.mode, self.skips = config.unet, config.unet_skips
        ramp = torch.ones(()) if config.unet_from or config.unet_ramp else None
        self.register_buffer("ramp", ramp, persistent=False)  # a tensor: moving it compiles nothing anew
        share = config.unet_init * (1 - depth / (config.n_layer // 2))
        if self.mode == "add":
            # 7 is 0.999: at 1 itself the sigmoid has no slope to learn by
            self.logit = nn.Parameter(torch.full((1,), max(-50.0, min(7.0, logit(share)))))
        elif self.mode == "scalar":
            self.weight = nn.Parameter(torch.full((1,), share))
        elif self.mode == "concat":
            self.weight = nn.Parameter(torch.cat((share * torch.eye(C), torch.zeros(C, C)), 1))
        else:  # nn.Linear's own
            self.weight = start_at(nn.Parameter(torch.empty(C, 2 * C)), Uniform((2 * C) ** -0.5))
            self.bias = start_at(nn.Parameter(torch.empty(C)), Uniform((2 * C) ** -0.5))

    def forward(self, x, skip):
        if self.ramp is not None:
            skip = self.ramp * skip
        if self.mode in ("add", "scalar"):
            share = self.logit.sigmoid() if self.mode == "add" else self.weight
            return x + share * skip if self.skips else x
        both = torch.cat((skip if self.skips else torch.zeros_like(skip), x), -1)
        mixed = F.linear(both, self.weight, getattr(self, "bias", None))
        return mixed.to(x.dtype) if self.mode == "published" else x + mixed  # the stream stays float32


class Window(CausalMask, Mechanism):
    """A token sees only the tokens shortly before it, and on request the first tokens and random blocks.

    Source: Longformer (arXiv 2004.05150), BigBird (arXiv 2007.14062).
    """

    class Options:
        window: Optional[int] = flag(
            None, "number of tokens that a token sees, itself included; 0: block_size // 4",
            at_least=0, at_most=10**12)
        window_global: int = flag(
            0, "number of first tokens of the context that every token sees too", at_least=0)
        window_random: int = flag(
            0, "number of earlier blocks, drawn at random, that a block of tokens sees too", at_least=0)
        window_block: Optional[int] = flag(
            None, "number of tokens in such a block; None: block_size // 16", at_least=1)
        window_layers: Optional[list[int]] = flag(
            None, "transformer blocks that have the window, counted from 0; None: all")

    name = flag = "window"
    modes = {"window": dict(window=0),
             "window_global_random": dict(window=0, window_global=1, window_random=1)}
    neutral = {"window": {"window": "block_size"}, "window_global_random": {"window": "block_size"}}
    windowed = True

    def __init__(self, config):
        super().__init__(config)
        self.window, self.cell = config.window, config.window_block
        self.n_global, self.n_random = config.window_global, config.window_random
        if self.n_random:
            cells = random_cells(self.block_size, self.cell, self.window, self.n_random)
            self.register_buffer("random_cells", cells, persistent=False)
            random_blocks = reached_blocks(self.random_cells, self.cell, self.block_size)
            self.register_buffer("random_blocks", random_blocks, persistent=False)
        t = torch.arange(self.block_size)
        n = torch.cat([self.mask_mod(rows[:, None], t).sum(-1) for rows in t.split(256)])
        self.register_buffer("n_seen", n, persistent=False)

    @staticmethod
    def settle(config):
        if config.window is not None:  # sizes that must stay when the context is cropped
            config.window = config.window or max(1, config.block_size // 4)
            config.window_block = config.window_block or max(1, config.block_size // 16)

    @classmethod
    def on(cls, config, layer):
        return cls.is_on(config) and (config.window_layers is None or layer in config.window_layers)

    @staticmethod
    def problems(config):
        blocks = config.window_layers
        if blocks is not None and (not blocks or sorted(set(blocks) & {*range(config.n_layer)}) != blocks):
            yield f"window_layers={blocks} must list blocks from 0 to {config.n_layer - 1} in order"
        yield from no_dropout(config, "window")

    def crop(self, block_size):
        super().crop(block_size)
        self.n_seen = self.n_seen[:block_size]

    def n_keys(self, positions):
        return self.n_seen[positions]

    def mean_context(self):
        return 2 * self.n_seen.float().mean().item() - 1

    def mask_mod(self, query, key):
        near = (query - key < self.window) | (key < self.n_global)
        if self.n_random:
            row, column = query.clamp_min(0) // self.cell, key.clamp_min(0) // self.cell
            near = near | self.random_cells[row, column]
        return (key <= query) & near

    def block_mask(self, T, device, begins=None):
        random_blocks = self.random_blocks.to(device) if self.n_random else None
        return block_mask(T, device, self.mask_mod, self.window, self.n_global, random_blocks, begins)


# ---- all of them ----


# To delete a mechanism, delete its class and its name here: nothing in Block, GPT and CausalSelfAttention
# knows it. ConstraintHeads alone needs another class, Sentinel, for its noisy gates. A new class is tried
# before it is trained, see TRIED in nanoheads/causality.py.

# those of a layer, in the order in which they act
HEAD_MECHANISMS = [ShortConv, ValueResidual, ValueEmbedding, QueryGain, SSMax, KeyOffset, XSA, HeadNorm,
                   HeadMix, Routing, Sentinel, Agency, ScoreCap, A2C, Roles, Alibi, RelativeBias, FoX,
                   PairedHeads, Diff, DiffV1, OutputGate, ConstraintHeads, ACAG, Sink]
# those between blocks, in the same way
BETWEEN_BLOCKS = [DepthAttention, MUDD, StreamScalars, UNet]
# those that replace CausalMask: the first that is on is the model's
MASKS = [Window]
MECHANISM_CLASSES = [*HEAD_MECHANISMS, *BETWEEN_BLOCKS, *MASKS]
# those from files of one's own, which add_mechanism() adds here and to HEAD_MECHANISMS
OWN = []


def own_defaults():
    """{flag: default} of the mechanisms in files of one's own."""
    return {f.name: f.default for cls in OWN for f in fields(cls.Options)}


@dataclass
class NamedFlags(*(cls.Options for cls in reversed(MECHANISM_CLASSES)), PlainConfig):
    """The fields of GPTConfig: the flags of a plain GPT, and the Options of every mechanism here."""

    # {flag: value} of mechanisms in files of one's own, where it is not the default
    own: dict = field(default_factory=dict)


class GPTConfig(NamedFlags):
    """All flags; those of mechanisms in files of one's own, in `own`, are given and read as all others.

    They are no fields, since a dataclass gets no new fields after it is made. A new class for each such
    mechanism would not be the GPTConfig that other modules have imported, and its configs would not equal
    older ones.
    """

    def __init__(self, own=(), **flags):
        flags, of_own = {**dict(own), **flags}, own_defaults()
        super().__init__(**{name: value for name, value in flags.items() if name not in of_own}, own={})
        for name in set(flags) & set(of_own):
            setattr(self, name, flags[name])
        for name, value in RECIPES.get(self.recipe, {}).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.n_kv_head == self.n_head:
            self.n_kv_head = None
        for cls in MECHANISM_CLASSES:
            cls.settle(self)

    def __getattr__(self, name):  # where there is no attribute of this name
        of_own = own_defaults()
        if name not in of_own:
            raise AttributeError(f"a GPTConfig has no flag {name!r}")
        return vars(self).get("own", {}).get(name, of_own[name])

    def __setattr__(self, name, value):
        of_own = own_defaults()
        if name not in of_own:
            super().__setattr__(name, value)
        elif value == of_own[name]:
            self.own.pop(name, None)
        else:
            self.own[name] = value

    @staticmethod
    def own_options():
        """The Options of the mechanisms in files of one's own."""
        return [cls.Options for cls in OWN]

    @classmethod
    def defaults(cls):
        """{flag: default} of all flags, those of mechanisms in files of one's own too."""
        return {**{f.name: f.default for f in fields(cls) if f.name != "own"}, **own_defaults()}

    def flags(self):
        """{flag: value} of all flags; of mechanisms in files of one's own, where they are on."""
        of_own = {name: getattr(self, name) for cls in OWN if cls.is_on(self) for name in flags_of(cls)}
        return {**{name: value for name, value in asdict(self).items() if name != "own"}, **of_own}

    @property
    def unit(self):
        """How many neighbouring heads are pruned together: those of a group, and of a pair."""
        return math.lcm(self.group, 2 if self.in_pairs else 1)

    @property
    def in_pairs(self):
        """Whether a mechanism that is on joins heads in pairs."""
        return any(cls.flag in PAIRED for cls in self.mechanisms())

    def mechanisms(self):
        """The classes of the mechanisms that are on."""
        return [cls for cls in MECHANISM_CLASSES if cls.is_on(self)]

    def added_heads(self, layer):
        """How many heads mechanisms add to those of block `layer`."""
        return sum(cls.added_heads(self, layer) for cls in HEAD_MECHANISMS if issubclass(cls, AddedHeads))

    def head_size_in(self, layer):
        """The head size of block `layer`."""
        sizes = [cls.head_size_in(self, layer) for cls in HEAD_MECHANISMS if issubclass(cls, AddedHeads)]
        return next((size for size in sizes if size is not None), self.head_size)

    @property
    def queries_are_keys(self):
        """Whether a layer's projection gives one set of vectors, which are queries and keys; values are then
        slices of its input.
        """
        return getattr(self, "a2c", None) == "published"

    def problems(self):
        """Everything that is wrong with this config, as a list of sentences (empty: fine)."""
        plain = [f.name for f in fields(PlainConfig)]
        chosen = [name for name in choices(type(self)) if name not in plain]
        bad = [*range_problems(self, plain), *plain_problems(self), *range_problems(self, chosen)]
        # the mechanisms' checks assume that the sizes make sense
        return bad or [problem for cls in MECHANISM_CLASSES for problem in flag_problems(cls, self)]


def add_mechanism(cls):
    """Add a mechanism of a layer, out of a file of one's own, and the names of its modes.

    It acts before constraint heads join the layer's own, so that queries, keys and values are of the layer's
    own heads, and before the mechanisms that read statistics of the attention rows.
    """
    OWN.append(cls)
    MECHANISM_CLASSES.append(cls)
    last = len(HEAD_MECHANISMS)
    first = next((i for i, other in enumerate(HEAD_MECHANISMS) if issubclass(other, AddedHeads)), last)
    HEAD_MECHANISMS.insert(first, cls)
    MECHANISMS.update(cls.modes)
    NEUTRAL.update(cls.neutral)


def remove_mechanism(cls):
    """Undo add_mechanism()."""
    for classes in (OWN, MECHANISM_CLASSES, HEAD_MECHANISMS):
        classes.remove(cls)
    for name in cls.modes:
        MECHANISMS.pop(name)
        NEUTRAL.pop(name, None)


# name -> flags: every mechanism in each of its modes. Tests, bench.py, compare.py and the docs read it.
MECHANISMS = {name: flags for cls in MECHANISM_CLASSES for name, flags in cls.modes.items()}

# name -> {flag, or parameter: value} that makes it equal to the plain GPT, where such a setting exists. A
# value may also be the name of a flag that holds it, like "n_head", or a function of the parameter's shape.
NEUTRAL = {name: values for cls in MECHANISM_CLASSES for name, values in cls.neutral.items()}

# The corrected form of all seven together; one whose class was deleted is missing.
ALL_ON = {flag: value for name in ("routing_moh", "sentinel", "agency", "unet_concat", "constraint_a",
                                   "a2c_temperature", "acag")
          for flag, value in MECHANISMS.get(name, {}).items()}
