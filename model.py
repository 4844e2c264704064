"""
The GPT, and every head mechanism as a flag of GPTConfig, in one file to be read top to bottom.

One attention equation holds everything together (docs/decisions.md says where each mechanism joins it):

    q, k, v = project(x)                 # 1. project
    y       = attend(q, k, v)            # 2. attend: causal, a fused kernel, no stored T x T
    y       = y * factors                # 3. one factor per head and token (mechanisms; none in the plain GPT)
    x       = x + merge(y)               # 4. merge the heads and project out

References: Radford et al. 2019 (GPT-2); Su et al. 2021, arXiv 2104.09864 (RoPE); Henry et al. 2020,
arXiv 2010.04245 (QK-norm); Zhang & Sennrich 2019, arXiv 1910.07467 (RMSNorm); So et al. 2021,
arXiv 2109.08668 (squared ReLU); Zhou et al. 2024, arXiv 2410.17897 (value residual).
"""

import hashlib
import math
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple, Optional

import torch
import torch.nn as nn
from torch.nn import functional as F

# What a recipe means: the values taken by the flags that were left at None.
RECIPES = {
    "gpt2": dict(pos="learned", norm="layernorm", act="gelu", bias=False, qk_norm=False,
                 tied=True, zero_init=False, softcap=0.0, value_residual=False),
    "modern": dict(pos="rope", norm="rmsnorm", act="relu2", bias=False, qk_norm=True,
                   tied=False, zero_init=True, softcap=0.0, value_residual=False),
}


@dataclass
class GPTConfig:
    # ---- size ----
    block_size: int = 1024               # context length, in tokens
    vocab_size: int = 256                # set from the dataset when training
    n_layer: int = 12                    # number of blocks
    n_head: int = 12                     # attention heads per block
    n_embd: int = 768                    # width of the residual stream
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
    tied: Optional[bool] = None          # output head shares the embedding's weights
    zero_init: Optional[bool] = None     # projections back into the residual stream and the head start at zero
    softcap: Optional[float] = None      # logits = cap * tanh(logits / cap); 0: off
    value_residual: Optional[bool] = None  # mix the first block's values into every later block's
    rope_base: float = 10000.0           # wavelength base of the rotary positions
    # ---- memory ----
    checkpoint_activations: bool = False  # recompute each block in the backward pass: less memory, slower

    def __post_init__(self):
        for name, value in RECIPES.get(self.recipe, {}).items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    @property
    def head_size(self):
        return self.n_embd // self.n_head

    def problems(self):
        """Everything that is wrong with this config, as a list of sentences (empty: fine)."""
        bad = []
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
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
        if self.softcap is not None and self.softcap < 0:
            bad.append(f"softcap={self.softcap} must be 0 (off) or positive")
        return bad


class Output(NamedTuple):
    """What a forward pass returns: logits [B, T, V], cross-entropy in nats (or None), aux terms, traces."""

    logits: torch.Tensor
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
    """x / rms(x) over the last dimension, without a learned scale."""

    def forward(self, x):
        return rms_norm(x)


def rms_norm(x):
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)


def rope_tables(config):
    """cos and sin of every position's angles, each [block_size, head_size / 2] (RoPE, eq. 34)."""
    half = config.head_size // 2
    freq = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(config.block_size, dtype=torch.float64)[:, None] * freq
    return angle.cos().float(), angle.sin().float()


def rotate(x, cos, sin):
    """Rotate the pairs (x_i, x_{i + D/2}) by their position's angles; x [..., D], cos and sin [..., D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


class KVCache:
    """Keys and values of the tokens already read, per block: [B, H, block_size, D], filled up to `length`."""

    def __init__(self, config, batch, device, dtype):
        shape = (config.n_layer, batch, config.n_head, config.block_size, config.head_size)
        self.k = torch.empty(shape, device=device, dtype=dtype).unbind(0)
        self.v = torch.empty(shape, device=device, dtype=dtype).unbind(0)
        self.length = 0

    def append(self, layer, k, v):
        """Store k, v [B, H, T, D] after what is there; return all keys and values so far."""
        end = self.length + k.size(2)
        self.k[layer][:, :, self.length:end] = k
        self.v[layer][:, :, self.length:end] = v
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]


class CausalSelfAttention(nn.Module):
    """Multi-head causal attention, [B, T, C] -> [B, T, C]."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.n_head, self.head_size = config.n_head, config.head_size
        self.rope, self.qk_norm = config.pos == "rope", config.qk_norm
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = config.dropout if config.attn_dropout is None else config.attn_dropout
        self.dropout = nn.Dropout(config.dropout)
        if config.value_residual and layer > 0:
            self.v_mix = nn.Parameter(torch.tensor(0.5))

    def project(self, x, rope):
        """q, k, v [B, H, T, D] of x [B, T, C]."""
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, self.head_size).unbind(2)
        if self.qk_norm:
            q, k = rms_norm(q), rms_norm(k)
        if self.rope:
            q, k = rotate(q, *rope), rotate(k, *rope)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, x, rope=None, v_first=None, cache=None, mask=None):
        q, k, v = self.project(x, rope)
        if v_first is not None:
            v = torch.lerp(v, v_first, self.v_mix)
        v_own = v
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and q.size(2) == k.size(2) and q.size(2) > 1,
            dropout_p=self.attn_dropout if self.training else 0.0)
        y = y.transpose(1, 2).reshape(x.shape)
        return self.dropout(self.c_proj(y)), v_own


class MLP(nn.Module):
    """Two linear layers, four times wider inside."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.act = config.act
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.c_fc(x)
        if self.act == "relu2":
            x = F.relu(x).square()
        else:
            x = F.gelu(x, approximate="tanh" if self.act == "gelu_tanh" else "none")
        return self.dropout(self.c_proj(x))


def make_norm(config):
    return RMSNorm() if config.norm == "rmsnorm" else LayerNorm(config.n_embd, config.bias)


class Block(nn.Module):
    """Attention, then MLP, each reading the normed residual stream and adding to it."""

    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x, rope=None, v_first=None, cache=None, mask=None):
        y, v = self.attn(self.ln_1(x), rope, v_first, cache, mask)
        x = x + y
        return x + self.mlp(self.ln_2(x)), v


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.problems():
            raise ValueError("; ".join(config.problems()))
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList(Block(config, i) for i in range(config.n_layer)),
            ln_f=make_norm(config)))
        if config.pos == "learned":
            self.transformer.wpe = nn.Embedding(config.block_size, config.n_embd)
        else:
            cos, sin = rope_tables(config)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.transformer.wte.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        for name, p in self.named_parameters():
            g = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{self.config.seed}:{name}".encode()).digest()[:7], "big"))
            if p.dim() >= 2:
                out = name.endswith("c_proj.weight")
                if self.config.zero_init and (out or name == "lm_head.weight"):
                    p.zero_()
                else:
                    p.normal_(0, 0.02 / math.sqrt(2 * self.config.n_layer) if out else 0.02, generator=g)
            elif name.endswith("bias"):
                p.zero_()

    def forward(self, idx, targets=None, traces=False):
        B, T = idx.shape
        x = self.transformer.wte(idx)
        rope = None
        if self.config.pos == "learned":
            x = x + self.transformer.wpe.weight[:T]
        else:
            rope = self.cos[:T, None], self.sin[:T, None]
        if self.config.recipe == "modern": x = rms_norm(x)
        x = self.transformer.drop(x)
        v_first = None
        for block in self.transformer.h:
            x, v = block(x, rope, v_first)
            if self.config.value_residual and v_first is None:
                v_first = v
        logits = self.lm_head(self.transformer.ln_f(x)).float()
        if self.config.softcap:
            logits = self.config.softcap * torch.tanh(logits / self.config.softcap)
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
        return Output(logits, loss, {}, None)
