"""
The GPT in one file, to be read top to bottom.

One attention equation holds everything together; each mechanism is to be a flag that joins at one of its steps:

    q, k, v = project(x)                 # 1. project
    y       = attend(q, k, v)            # 2. attend: causal, a fused kernel, no stored T x T
    y       = y * factors                # 3. one factor per head and token (mechanisms; none in the plain GPT)
    x       = x + merge(y)               # 4. merge the heads and project out

References: Radford et al. 2019 (GPT-2); Su et al. 2021, arXiv 2104.09864 (RoPE); Henry et al. 2020,
arXiv 2010.04245 (QK-norm); Zhang & Sennrich 2019, arXiv 1910.07467 (RMSNorm); So et al. 2021,
arXiv 2109.08668 (squared ReLU).
"""

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch
import torch.nn as nn
from torch.nn import functional as F
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
    embed_norm: Optional[bool] = None    # RMS-normalise the embedding before the first block
    tied: Optional[bool] = None          # output head shares the embedding's weights
    zero_init: Optional[bool] = None     # projections back into the residual stream and the head start at zero
    softcap: Optional[float] = None      # logits = cap * tanh(logits / cap); 0: off
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


def rope_tables(config):
    """cos and signed sin of every position's angles, each [block_size, head_size] (RoPE, eq. 34).

    Dimension i is paired with i + head_size / 2, so rotating is x * cos + (x, halves swapped) * sin.
    """
    half = config.head_size // 2
    freq = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(config.block_size, dtype=torch.float64)[:, None] * freq
    return torch.cat((angle.cos(), angle.cos()), -1).float(), torch.cat((-angle.sin(), angle.sin()), -1).float()


def rotate(x, cos, sin):
    """Rotate x [..., D] by its position's angles, given as rope_tables' cos and sin [..., D]."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin).type_as(x)


class KVCache:
    """Keys and values of the tokens already read, per block: [B, H, block_size, D], filled up to `length`."""

    def __init__(self, config):
        self.k, self.v = [None] * config.n_layer, [None] * config.n_layer
        self.block_size, self.length = config.block_size, 0

    def append(self, layer, k, v):
        """Store k, v [B, H, T, D] after what is there; return all keys and values so far."""
        if self.k[layer] is None:  # made here, where the dtype under autocast is known
            self.k[layer], self.v[layer] = (t.new_empty(*t.shape[:2], self.block_size, t.size(3)) for t in (k, v))
        end = self.length + k.size(2)
        self.k[layer][:, :, self.length:end] = k
        self.v[layer][:, :, self.length:end] = v
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]


# ---- the transformer ----

class CausalSelfAttention(nn.Module):
    """Multi-head causal attention, [B, T, C] -> [B, T, C]."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.n_head, self.head_size = layer, config.n_head, config.head_size
        self.rope, self.qk_norm = config.pos == "rope", config.qk_norm
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = config.dropout if config.attn_dropout is None else config.attn_dropout
        self.resid_dropout = nn.Dropout(config.dropout)

    def project(self, x, rope):
        """Queries, keys and values of x, each [B, H, T, D]."""
        B, T, _ = x.shape
        qk, v = self.c_attn(x).view(B, T, 3, self.n_head, self.head_size).split((2, 1), dim=2)
        if self.qk_norm:
            qk = rms_norm(qk)
        if self.rope:
            qk = rotate(qk, *rope)
        q, k = qk.transpose(1, 3).unbind(2)  # (B, H, 2, T, D) -> 2 x (B, H, T, D)
        return q, k, v.squeeze(2).transpose(1, 2)

    def attend(self, q, k, v, mask):
        """Causal attention of q [B, H, T, D] over k, v [B, H, S, D], the last T of S being the queries' own tokens."""
        causal = mask is None and q.size(2) > 1  # one query sees all there is
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal,
                                              dropout_p=self.attn_dropout if self.training else 0.0)

    def merge(self, y):
        """Heads side by side, [B, H, T, D] -> [B, T, C], and out into the residual stream."""
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))

    def forward(self, x, rope=None, cache=None, mask=None):
        q, k, v = self.project(x, rope)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        y = self.attend(q, k, v, mask)
        # per-head factors join here: y = y * factor, [B, H, T, 1], one line per mechanism
        return self.merge(y)


class MLP(nn.Module):
    """Two linear layers, four times wider inside, [B, T, C] -> [B, T, C]."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
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

    def forward(self, x, rope=None, cache=None, mask=None):
        x = x + self.attn(self.ln_1(x), rope, cache, mask)
        return x + self.mlp(self.ln_2(x))


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
            for name, table in zip(("cos", "sin"), rope_tables(config)):
                self.register_buffer(name, table, persistent=False)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.transformer.wte.weight
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
            if p.dim() < 2:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
            elif self.config.zero_init and (out or name == "lm_head.weight"):
                p.zero_()
            else:
                p.normal_(0.0, 0.02 / math.sqrt(2 * self.config.n_layer) if out else 0.02, generator=generator)

    # ---- forward ----

    def hidden(self, idx, cache=None, pad=None):
        """Final hidden states [B, T, C] of idx [B, T], after what `cache` holds; row b's first pad[b] columns are empty."""
        B, T = idx.shape
        past = cache.length if cache else 0
        if past + T > self.config.block_size:
            raise ValueError(f"{past + T} tokens do not fit block_size={self.config.block_size}")
        mask = None
        if pad is None:
            at = slice(past, past + T)
        else:
            at = (torch.arange(past, past + T, device=idx.device) - pad[:, None]).clamp_min(0)  # (B, T)
        if pad is not None or (past and T > 1):
            mask = self.mask(past, T, pad, idx.device)
        x = self.transformer.wte(idx)
        rope = None
        if self.config.pos == "learned":
            x = x + self.transformer.wpe.weight[at]
        else:
            rope = self.cos[at][..., None, None, :], self.sin[at][..., None, None, :]  # over [B, T, (q, k), H, D]
        if self.config.embed_norm:
            x = rms_norm(x)
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            if self.config.checkpoint_activations and self.training:
                x = checkpoint(block, x, rope, use_reentrant=False)
            else:
                x = block(x, rope, cache, mask)
        if cache:
            cache.length += T
        return self.transformer.ln_f(x)

    def mask(self, past, T, pad, device):
        """Who sees whom, True for yes, [1 or B, 1, T, past + T]: causal, and no row sees its padding."""
        query, key = torch.arange(past, past + T, device=device)[:, None], torch.arange(past + T, device=device)
        sees = key <= query
        if pad is not None:  # an empty query sees itself, since a softmax over nothing is not a number
            sees = sees & (key >= pad[:, None, None]) | (key == query)
            return sees[:, None]
        return sees[None, None]

    def head(self, x):
        """Logits in float32, [..., C] -> [..., V]."""
        logits = self.lm_head(x).float()
        if self.config.softcap:
            logits = self.config.softcap * torch.tanh(logits / self.config.softcap)
        return logits

    def forward(self, idx, targets=None, traces=False):
        """idx, targets [B, T] -> Output; targets of -1 are not scored. Without targets the loss is None."""
        logits = self.head(self.hidden(idx))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return Output(logits, loss, {}, {} if traces else None)

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

        6 per parameter in a matrix product, 12 * n_layer * n_embd * block_size for attention, causality not deducted.
        """
        c = self.config
        return 6 * self.num_params(non_embedding=True) + 12 * c.n_layer * c.n_embd * c.block_size

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
                for w, n in ((block.attn.c_attn.weight, 3), (block.attn.c_proj.weight, 1),
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
            self.cos, self.sin = self.cos[:block_size], self.sin[:block_size]


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
