"""
The rivals: mechanisms from the literature, with which a new one can be compared. Each is a class, as in
model.py, which imports them from here. Hooks and shapes: docs/your-own-mechanism.md.
"""

import math
from typing import Literal, Optional

import torch
from torch import nn
from torch.nn import functional as F

from nanoheads.attention import attend
from nanoheads.kernels import (Linear, float32_linear, float32_product, for_each_head, norm_and_rotate,
                               rms_norm, short_convolution, weighted_sum)
from nanoheads.mechanism import BetweenBlocks, Mechanism, Normal, Uniform, flag, start_at
from nanoheads.pruning import HeadAxis


class ShortConv(Mechanism):
    """A short causal convolution of each channel, y_t = x_t + b + sum_i w_i x_{t-i}, before norm and RoPE.

    Source: arXiv 2607.18413, where weights that start at N(0, 0.02) do better than zeros; Primer
    (2109.08668). "x" convolves the layer's input instead of queries, keys and values (Canon-A, arXiv
    2512.17351). Before the first token there are zeros.
    """

    class Options:
        short_conv: Optional[Literal["qkv", "kv", "q", "k", "v", "x"]] = flag(
            None, "what is convolved: queries, keys and values, some of them, or (x) the layer's input")
        short_conv_width: int = flag(3, "number of tokens that an output reads, its own included", at_least=2)

    name = flag = "short_conv"
    modes = {"short_conv": dict(short_conv="qkv"), "short_conv_kv": dict(short_conv="kv"),
             "short_conv_x": dict(short_conv="x")}
    neutral = dict.fromkeys(modes, {"short_conv.weight": 0.0, "short_conv.bias": 0.0})
    needs_positions = True

    def __init__(self, config, attn):
        super().__init__()
        self.of = config.short_conv
        channels = config.n_embd
        if self.of != "x":
            channels = attn.head_size * sum(self.head_counts(attn)[part] for part in self.of)
            shared = len(self.of.lstrip("q"))
            axis = HeadAxis(dim=1, size=attn.head_size, parts=len(self.of), shared=shared)
            self.per_head = {"weight": axis, "bias": axis}
        self.weight = start_at(nn.Parameter(torch.empty(config.short_conv_width, channels)), Normal(0.02))
        self.bias = start_at(nn.Parameter(torch.empty(1, channels)), Normal(0.02))

    @staticmethod
    def problems(config):
        if config.queries_are_keys and config.short_conv != "x":
            yield (f"short_conv={config.short_conv!r} convolves queries, keys and values of a projection: "
                   "a2c='published' has queries alone")

    @staticmethod
    def head_counts(attn):
        """How many heads of queries, keys and values a layer has."""
        return dict(q=attn.n_head, k=attn.n_head // attn.group, v=attn.n_head // attn.group)

    def before_projection(self, attn, heads):
        if self.of == "x":
            heads.x = self.convolve(heads.x, attn, heads.forward_pass)

    def after_projection(self, attn, qkv, heads):
        if self.of == "x":
            return qkv
        counts = self.head_counts(attn)
        first = sum(counts[part] for part in "qkv"[:"qkv".index(self.of)])
        return self.convolve(qkv.flatten(2), attn, heads.forward_pass, first * attn.head_size).view(qkv.shape)

    def convolve(self, x, attn, forward_pass, first=0):
        """x [B, T, C] with the channels from `first` convolved."""
        if forward_pass.valid is not None:
            x = x * forward_pass.valid  # padding is no token
        both, T, cache = x, x.size(1), forward_pass.cache
        reach = len(self.weight) - 1  # earlier tokens that an output reads
        if cache is not None:
            before = cache.swap(attn.layer, self.name, None)
            both = x if before is None else torch.cat((before, x), 1)
            cache.swap(attn.layer, self.name, both[:, -reach:])
        positions = None if forward_pass.begins is None else forward_pass.positions
        y = short_convolution(both, self.weight.to(x.dtype), self.bias.to(x.dtype), first, positions)
        return y[:, -T:]


class ValueResidual(Mechanism):
    """Values are mixed with those of the first layer: (1 - share) v_l + share v_1.

    Source: ResFormer (arXiv 2410.17897). Each layer learns a share, which starts at 0.5. A head of the first
    layer whose gate is 0 counts as one that was pruned: later layers mix with 0.
    """

    class Options:
        value_residual: bool = flag(False, "mix the values with those of the first layer")

    name = flag = "value_residual"
    modes = {"value_residual": dict(value_residual=True)}
    neutral = {"value_residual": {"value_residual.share": 0.0}}

    def __init__(self, config, attn):
        super().__init__()
        self.share = nn.Parameter(torch.full((1,), 0.5)) if attn.layer else None

    @staticmethod
    def problems(config):
        if config.n_layer < 2:
            yield "value_residual=True mixes later layers' values with the first one's: n_layer=1 has none"
        if len({config.head_size_in(layer) for layer in range(config.n_layer)}) > 1:
            yield ("value_residual=True needs heads of one size: constraint_variant='B' makes some layers' "
                   "narrower")

    def before_attention(self, attn, heads):
        if self.share is None:
            heads.for_later["values"] = self.of_all_heads(attn, heads)
            return
        first = heads.forward_pass.shared["values"]
        first = first if attn.n_head == attn.n_base else first[:, self.groups(attn)]
        heads.v = torch.lerp(heads.v, first.to(heads.v.dtype), self.share.to(heads.v.dtype))

    @staticmethod
    def of_all_heads(attn, heads):
        """The layer's values as before pruning; those of heads that are closed or pruned are 0."""
        v = heads.v
        gate = heads.constant_gate()
        if gate is not None:  # a group's values count while any of its heads is open
            opened = (gate[:attn.n_head] != 0).unflatten(0, (v.size(1), attn.group)).any(1)
            v = v * opened.to(v.dtype)
        if attn.n_head == attn.n_base:
            return v
        ids = torch.tensor(ValueResidual.groups(attn), dtype=torch.long, device=v.device)
        return v.new_zeros(len(v), attn.n_base // attn.group, *v.shape[2:]).index_copy(1, ids, v)

    @staticmethod
    def groups(attn):
        """The key and value heads that pruning left, by their original numbers."""
        return [i // attn.group for i in attn.head_ids[::attn.group]]


class ValueEmbedding(Mechanism):
    """A table of values for the tokens of the vocabulary, v_h += 3 sigmoid(W x[:12])_h table[token]_h.

    Source: nanochat (2026), modded-nanogpt. Every second layer has one, the last layer included. The table is
    an nn.Embedding, which is trained at the embeddings' rate. W starts at N(0, 0.02), so the gate near 1.5.
    """

    class Options:
        value_embedding: bool = flag(
            False, "in every second layer, add to the values an embedding of the token itself")

    name = flag = "value_embedding"
    modes = {"value_embedding": dict(value_embedding=True)}
    neutral = {"value_embedding": {"value_embedding.wte.weight": 0.0}}
    CHANNELS = 12  # of x that the gate reads, as in nanochat

    def __init__(self, config, attn):
        super().__init__()
        n = attn.n_head // attn.group
        self.wte = nn.Embedding(config.vocab_size, n * attn.head_size)
        self.gate = nn.Linear(min(self.CHANNELS, config.n_embd), n, bias=False)
        self.per_head = {"wte.weight": HeadAxis(dim=1, size=attn.head_size, shared=1),
                         "gate.weight": HeadAxis(shared=1)}

    @classmethod
    def on(cls, config, layer):
        return cls.is_on(config) and (config.n_layer - 1 - layer) % 2 == 0

    def before_attention(self, attn, heads):
        rows = self.wte(heads.forward_pass.tokens)
        of_tokens = rows.unflatten(-1, (heads.v.size(1), attn.head_size)).transpose(1, 2)
        share = 3 * self.gate(heads.x[..., :self.gate.in_features]).sigmoid()
        heads.v = heads.v + (share.transpose(1, 2)[..., None] * of_tokens).to(heads.v.dtype)


class QueryGain(Mechanism):
    """A learned factor on each head's logits, 1 at the start: how sharply the head attends.

    Under qk_norm a head's largest logit is qk_max times this factor.
    """

    class Options:
        query_gain: bool = flag(False, "multiply each head's logits by a learned factor")

    name = flag = "query_gain"
    modes = {"query_gain": dict(query_gain=True)}
    neutral = {"query_gain": {}}  # as it starts
    per_head = ("gain",)

    def __init__(self, config, attn):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(attn.n_head))

    def before_attention(self, attn, heads):
        heads.q = heads.q * self.gain[:, None, None].to(heads.q.dtype)


class SSMax(Mechanism):
    """Scalable softmax: a query that sees n keys has its logits multiplied by s_h log n (arXiv 2501.19399).

    This keeps attention from flattening as the context grows. s is learned for each head. Here it starts
    where the mean of s log n over the context is 1, so that a new model is about as sharp as the plain GPT.
    The queries are multiplied instead of the logits, which is the same and costs nothing.
    """

    class Options:
        ssmax: bool = flag(
            False, "multiply the logits by s log n, where n is the number of keys that a token sees")
        ssmax_init: Optional[float] = flag(
            None, "initial s; None: so that s log n is 1 on average", at_least=0)

    name = flag = "ssmax"
    modes = {"ssmax": dict(ssmax=True)}
    needs_positions = True
    per_head = ("strength",)

    def __init__(self, config, attn):
        super().__init__()
        self.strength = nn.Parameter(torch.full((attn.n_head,), config.ssmax_init))

    @staticmethod
    def settle(config):
        if config.ssmax and config.ssmax_init is None:  # stays when the context is cropped
            logs = [math.log(n) for n in range(1, config.block_size + 1)]
            config.ssmax_init = len(logs) / (sum(logs) or 1.0)

    def before_attention(self, attn, heads):
        log_n = heads.forward_pass.n_keys.log()[..., None]  # [T, 1] or [B, 1, T, 1]
        heads.q = heads.q * (self.strength[:, None, None] * log_n).to(heads.q.dtype)


class ScoreCap(Mechanism):
    """A soft cap on the attention scores, cap tanh(score / cap) (Gemma 2, arXiv 2408.00118, section 2).

    It acts on q . k alone: what other mechanisms add to the scores comes after it.
    """

    class Options:
        score_cap: Optional[float] = flag(
            None, "soft cap on the attention scores, cap * tanh(score / cap); 50 in Gemma 2", above=0)

    name = flag = "score_cap"
    modes = {"score_cap": dict(score_cap=50.0)}
    neutral = {"score_cap": {"score_cap": 1e6}}

    def __init__(self, config, attn):
        super().__init__()
        self.cap = config.score_cap

    def score_mod(self, attn, heads):
        cap = self.cap
        return lambda score, b, h, t, s: cap * torch.tanh(score / cap)


class Alibi(Mechanism):
    """ALiBi: a key d tokens back has d times the head's slope taken off its score (arXiv 2108.12409).

    The slopes of n heads are 2^(-8 i / n); where n is no power of two, those of the power below it, then
    every second one of the power above, as in the paper's code. learned: each head learns its slope, which
    starts there. The paper's models have no other positions, which is pos=none here.
    """

    class Options:
        alibi: Optional[Literal["fixed", "learned"]] = flag(
            None, "lower a score by the distance of the key times the head's slope, which is fixed or "
                  "learned")

    name = flag = "alibi"
    modes = {"alibi": dict(alibi="fixed"), "alibi_learned": dict(alibi="learned")}
    neutral = {"alibi_learned": {"alibi.log_slope": -60.0}}
    per_head = ("slope", "log_slope")

    def __init__(self, config, attn):
        super().__init__()
        slopes = torch.tensor(self.slopes(config.n_head))[attn.head_ids]
        self.learned = config.alibi == "learned"
        if self.learned:
            self.log_slope = nn.Parameter(slopes.log())
        else:
            self.register_buffer("slope", slopes, persistent=False)

    @staticmethod
    def slopes(n):
        """The slopes of n heads."""
        power = 2 ** int(math.log2(n))
        first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
        finer = [2 ** (-4 * (i + 1) / power) for i in range(2 * power)]
        return first + finer[::2][:n - power]

    def score_mod(self, attn, heads):
        slope = self.log_slope.exp() if self.learned else self.slope
        slope = slope.to(torch.promote_types(slope.dtype, torch.float32))  # bfloat16 cannot count to 257
        return lambda score, b, h, t, s: score - slope[h] * (t - s).abs()  # a layer may see later keys


class RelativeBias(Mechanism):
    """T5's relative positions: a learned number for each head and bucket of distances is added to the score.

    Source: arXiv 1910.10683, section 2.1, and its code. Half of the buckets are one distance each; the others
    grow with the logarithm of the distance up to relative_bias_far, and the last one holds all beyond. T5
    shares them among its layers; here each layer has its own.
    """

    class Options:
        relative_bias: bool = flag(
            False, "add a learned number to the score, for each head and each bucket of distances")
        relative_bias_buckets: int = flag(
            32, "number of buckets; half of them hold one distance each", at_least=2)
        relative_bias_far: int = flag(
            128, "distance, in tokens, from which on all are in the last bucket", at_least=2)

    name = flag = "relative_bias"
    modes = {"relative_bias": dict(relative_bias=True)}
    neutral = {"relative_bias": {"relative_bias.bias": 0.0}}
    per_head = ("bias",)

    def __init__(self, config, attn):
        super().__init__()
        n = config.relative_bias_buckets
        self.bias = start_at(nn.Parameter(torch.empty(attn.n_head, n)), Normal(0.02))
        buckets = self.buckets(config.block_size, n, config.relative_bias_far)
        self.register_buffer("bucket", torch.tensor(buckets), persistent=False)

    @staticmethod
    def problems(config):
        if config.relative_bias_far <= config.relative_bias_buckets // 2:
            yield (f"relative_bias_far={config.relative_bias_far} must be above half of "
                   f"relative_bias_buckets={config.relative_bias_buckets}, which are one distance each")

    @staticmethod
    def buckets(length, n, far):
        """The bucket of each distance from 0 to length - 1."""
        exact = n // 2
        share = [math.log(max(d, 1) / exact) / math.log(far / exact) for d in range(length)]
        return [d if d < exact else min(n - 1, exact + int(share[d] * (n - exact))) for d in range(length)]

    def score_mod(self, attn, heads):
        by_distance = self.bias[:, self.bucket[:heads.k.size(2)]]  # (H, S)
        return lambda score, b, h, t, s: score + by_distance[h, (t - s).abs()]


class FoX(Mechanism):
    """FoX: a forget gate f = sigmoid(w x + b) of each head and token fades all keys before it.

    Source: arXiv 2503.02130, eq. 3: logits + c_t - c_s, where c is the running sum of log f, in float32.
    """

    class Options:
        fox: bool = flag(False, "a gate of each head and token fades all keys before it")

    name = flag = "fox"
    modes = {"fox": dict(fox=True)}
    neutral = {"fox": {"fox.proj.weight": 0.0, "fox.proj.bias": 50.0}}
    needs_positions = True
    per_head = ("proj.weight", "proj.bias")

    def __init__(self, config, attn):
        super().__init__()
        self.proj = nn.Linear(config.n_embd, attn.n_head)

    def score_mod(self, attn, heads):
        log_f, forward_pass = F.logsigmoid(float32_linear(self.proj, heads.x)), heads.forward_pass
        if forward_pass.valid is not None:
            log_f = log_f * forward_pass.valid  # padding fades nothing
        if forward_pass.wants_traces:
            heads.traces["log_forget"] = log_f
        if forward_pass.cache is not None:
            log_f = forward_pass.cache.extend(attn.layer, self.name, log_f)
        # (B, H, S), one for each key. It runs on over documents: c_t - c_s cancels what both have before them
        c = log_f.cumsum(1).transpose(1, 2)
        minus_c = -c  # FlexAttention has no gradient of a tensor that is indexed twice
        return lambda score, b, h, t, s: score + (c[b, h, t] + minus_c[b, h, s])


def own_qkv(attn, heads):
    """The queries, keys and values of the layer's own heads, as attention reads them, each [B, H, ...]."""
    k, v = (for_each_head(x[:, :attn.n_head], attn.n_head) for x in (heads.k, heads.v))
    return heads.q[:, :attn.n_head], k, v


def replace_own(attn, y_own, y):
    """y [B, H, ...] of all heads, with that of the layer's own heads replaced by y_own."""
    return torch.cat((y_own.to(y.dtype), y[:, attn.n_head:]), 1) if attn.n_extra else y_own.to(y.dtype)


def attend_once_more(attn, heads, q, k, v):
    """Attention of the layer's own heads with other queries, keys or values, [B, H, T, D]."""
    dropout = attn.attn_dropout if attn.training else 0.0
    return attend(q.to(v.dtype), k, v, scale=attn.scale, mask=heads.forward_pass.mask,
                  score_mod=heads.score_mod, dropout=dropout)[0]


class Diff(Mechanism):
    """Differential attention V2: y1 - sigmoid(w_h x_t) y2, two maps over the same keys and values.

    Source: microsoft/unilm, Diff-Transformer-V2 (2026). The second map has queries of its own, normed and
    rotated like those of the first. A mechanism that changes the scores acts on both maps; one that changes
    queries acts on the first map alone.
    """

    class Options:
        diff: bool = flag(False, "subtract a second attention map's output from each head's")

    name = flag = "diff"
    modes = {"diff": dict(diff=True)}

    def __init__(self, config, attn):
        super().__init__()
        self.c_q = Linear(config.n_embd, attn.n_head * attn.head_size, bias=config.bias or config.qkv_bias,
                          stacked=1)
        self.share = nn.Linear(config.n_embd, attn.n_head, bias=False)
        queries = HeadAxis(size=attn.head_size)
        self.per_head = {"c_q.weight": queries, "c_q.bias": queries, "share.weight": HeadAxis()}

    def queries(self, attn, heads):
        """The queries of the second map, [B, H, T, D]."""
        q = self.c_q(heads.x).unflatten(-1, (attn.n_head, attn.head_size))[:, :, None]
        rope = heads.forward_pass.rope[attn.head_size] if attn.rope else None
        scale = None if attn.qk_scale is None else attn.qk_scale[0].to(q.dtype)
        return norm_and_rotate(q, attn.qk_norm, rope, attn.norm_eps, scale).squeeze(2).transpose(1, 2)

    def shares(self, heads):
        """The share of the second map that is subtracted, [B, H, T, 1]."""
        return self.share(heads.x).sigmoid().transpose(1, 2)[..., None]

    def after_kernel(self, attn, heads, y, row_stats):
        n = attn.n_head  # added heads have no second map
        second = attend_once_more(attn, heads, self.queries(attn, heads), heads.k[:, :n], heads.v[:, :n])
        return replace_own(attn, y[:, :n] - self.shares(heads).to(y.dtype) * second, y), row_stats

    def trace_map(self, attn, weights, heads):
        second = attn.masked_logits(heads, self.queries(attn, heads), own_qkv(attn, heads)[1]).softmax(-1)
        second = self.shares(heads).to(weights.dtype) * second.to(weights.dtype)
        return replace_own(attn, weights[:, :attn.n_head] - second, weights)


class DiffV1(Mechanism):
    """Differential attention of pairs of heads: norm((P_1 - l P_2) (v_1, v_2)) (1 - l_0).

    Source: arXiv 2410.05258, eqs. 1 to 3, and transformers' DiffLlama. l = exp(a . b) - exp(c . d) + l_0,
    learned, with l_0 = 0.8 - 0.6 exp(-0.3 layer). Heads 0 and 1 are a pair, 2 and 3, and so on.
    """

    class Options:
        diff_v1: bool = flag(False, "heads in pairs: the difference of their two attention maps, normalised")

    name = flag = "diff_v1"
    modes = {"diff_v1": dict(diff_v1=True)}

    def __init__(self, config, attn):
        super().__init__()
        # a, b, c and d; in the paper they start at N(0, 0.1)
        self.vectors = start_at(nn.Parameter(torch.empty(4, attn.head_size)), Normal(0.02))
        self.start = 0.8 - 0.6 * math.exp(-0.3 * attn.layer)

    @staticmethod
    def problems(config):
        if any(cls.flag == "diff" for cls in config.mechanisms()):
            yield "diff=True and diff_v1=True are two forms of one thing: choose one"
        if config.group > 1:
            yield f"diff_v1 joins the values of two heads, which n_kv_head={config.n_kv_head} makes one"
        if config.n_head % 2:
            yield f"diff_v1=True joins heads in pairs: n_head={config.n_head} is odd"

    def after_kernel(self, attn, heads, y, row_stats):
        (q, k, v), pairs = own_qkv(attn, heads), (attn.n_head // 2, 2)
        # the kernel has given P_1 v_1 and P_2 v_2; once more it gives P_1 v_2 and P_2 v_1
        p1_v1, p2_v2 = y[:, :attn.n_head].unflatten(1, pairs).unbind(2)
        p1_v2, p2_v1 = attend_once_more(attn, heads, q, k, swap_pairs(v)).unflatten(1, pairs).unbind(2)
        a, b, c, d = self.vectors
        share = ((a * b).sum().exp() - (c * d).sum().exp() + self.start).to(y.dtype)
        both = torch.cat((p1_v1 - share * p2_v1, p1_v2 - share * p2_v2), -1)
        both = rms_norm(both, 1e-5) * (1 - self.start)
        return replace_own(attn, torch.stack(both.chunk(2, -1), 2).flatten(1, 2), y), row_stats


def swap_pairs(x):
    """x [B, H, ...] with the two heads of each pair exchanged."""
    return x.unflatten(1, (x.size(1) // 2, 2)).flip(2).flatten(1, 2)


class PairedHeads(Mechanism):
    """Each head's softmax runs over its own keys and over those of its neighbour, whose values it reads too.

    Source: modded-nanogpt (2026-01), where the tokens of two heads are interleaved into a sequence of 2 T.
    Here there are two maps, joined by their log-sum-exp, and a token also reads both heads' keys of its own
    position.
    """

    class Options:
        paired_heads: bool = flag(False, "heads in pairs: each reads the other's keys and values too")

    name = flag = "paired_heads"
    modes = {"paired_heads": dict(paired_heads=True)}
    needs_row_stats = ("lse",)

    @staticmethod
    def problems(config):
        if config.group > 1:
            yield f"paired_heads needs keys and values of each head: not n_kv_head={config.n_kv_head}"
        if config.n_head % 2:
            yield f"paired_heads=True joins heads in pairs: n_head={config.n_head} is odd"

    def after_kernel(self, attn, heads, y, row_stats):
        if not attn.n_head:
            return y, row_stats
        n, (q, k, v) = attn.n_head, own_qkv(attn, heads)
        other, other_stats = attend(q, swap_pairs(k), swap_pairs(v), scale=attn.scale,
                                    mask=heads.forward_pass.mask, score_mod=heads.score_mod, stats="lse")
        own_lse, other_lse = row_stats.lse[:, :n], other_stats.lse
        share = (own_lse - other_lse).sigmoid()[..., None].to(y.dtype)
        y = replace_own(attn, torch.lerp(other, y[:, :n], share), y)
        joined = torch.logaddexp(own_lse, other_lse)
        return y, row_stats._replace(lse=torch.cat((joined, row_stats.lse[:, n:]), 1))

    def trace_map(self, attn, weights, heads):
        """The weights on both heads' keys of a token are added, since a map has one column for each token."""
        if not attn.n_head:
            return weights
        q, k, _ = own_qkv(attn, heads)
        logits = attn.masked_logits(heads, q, swap_pairs(k))
        other = (logits - heads.row_stats.lse[:, :attn.n_head, :, None]).exp()  # on the neighbour's keys
        own = weights[:, :attn.n_head] * (1 - other.sum(-1, keepdim=True))  # on its own keys
        return replace_own(attn, own + other.to(weights.dtype), weights)


class HeadMix(Mechanism):
    """Heads add to one another's outputs, weighted by the token: y_h + (b_h . x) sum_g (a_g . x) y_g.

    That is a dynamic composition (arXiv 2405.08553) of rank 1. It mixes outputs, since no fused kernel can
    mix attention weights, as talking heads do (2003.02436). The weights depend on the token, since constant
    ones would be a part of the output projection.
    """

    class Options:
        head_mix: bool = flag(
            False, "heads' outputs are added to one another's, with weights that depend on the token")

    name = flag = "head_mix"
    modes = {"head_mix": dict(head_mix=True)}
    neutral = {"head_mix": {}}  # as it starts
    per_head = ("read_from.weight", "write.weight")

    def __init__(self, config, attn):
        super().__init__()
        self.read_from = nn.Linear(config.n_embd, attn.n_head, bias=False)
        self.write = nn.Linear(config.n_embd, attn.n_head, bias=False)
        start_at(self.write.weight, 0.0)

    def after_attention(self, attn, heads):
        y = heads.y[:, :attn.n_head]
        a, b = (layer(heads.x).transpose(1, 2)[..., None].to(y.dtype)
                for layer in (self.read_from, self.write))
        for gate in (heads.constant_gate(), heads.gates.get("router")):
            if gate is not None:  # a head that is closed, or that routing did not select, gives nothing
                a = a * (gate[..., :attn.n_head, :, :] != 0)
        heads.y = replace_own(attn, y + b * (a * y).sum(1, keepdim=True), heads.y)


class KeyOffset(Mechanism):
    """Half of each key's dimensions come from the token before (modded-nanogpt, 2025-12).

    One layer then finds what followed an earlier copy of a token, for which a plain GPT needs two. The moved
    dimensions are those that RoPE turns slowest; the first token keeps its own. Constraint heads stay as they
    are.
    """

    class Options:
        key_offset: bool = flag(False, "half of each key's dimensions come from the token before")

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
        smallest = min(config.head_size_in(layer) for layer in range(config.n_layer))
        if 0 < smallest < 4:  # then no part of a key is moved
            which = "constraint_variant='B' leaves" if smallest < config.head_size else "it is"
            yield f"key_offset needs a head size of at least 4: {which} {smallest}"

    def before_attention(self, attn, heads):
        cache = heads.forward_pass.cache
        last = None if cache is None else cache.swap(attn.layer, "key", heads.k[:, :, -1:])
        before = torch.cat((heads.k[:, :, :1] if last is None else last, heads.k[:, :, :-1]), 2)
        is_first = heads.forward_pass.positions_per_head[..., None] == 0
        heads.k = torch.where(self.moved & ~is_first, before, heads.k)


class XSA(Mechanism):
    """XSA: remove from each head's output the part along the token's own value (arXiv 2603.09078, eq. 3).

    y - tanh(strength_h) * (y . v) v / |v|^2. It is neutral at strength 0, where it starts; the paper removes
    the whole part.
    """

    class Options:
        xsa: bool = flag(False, "remove from each output the part along the token's own value")

    name = flag = "xsa"
    modes = {"xsa": dict(xsa=True)}
    neutral = {"xsa": {}}
    per_head = ("strength",)

    def __init__(self, config, attn):
        super().__init__()
        self.strength = nn.Parameter(torch.zeros(attn.n_total))

    def after_attention(self, attn, heads):
        v = for_each_head(heads.v, heads.y.size(1))
        v = v[:, :, -heads.y.size(2):, :attn.head_size]  # a cache holds earlier tokens too
        wide = dict(dim=-1, keepdim=True, dtype=torch.promote_types(v.dtype, torch.float32))
        # in float32, since 1e-8 is 0 in float16
        share = (heads.y * v).sum(**wide) / v.square().sum(**wide).clamp_min(1e-8)
        heads.y = heads.y - self.strength.tanh()[:, None, None].to(v.dtype) * share.to(v.dtype) * v


class OutputGate(Mechanism):
    """Gated attention: a gate sigmoid(x W) on the outputs, per head or element (arXiv 2505.06708, eq. 5).

    width: the gate reads the first channels of x alone (12 in modded-nanogpt, 2025-08).
    """

    class Options:
        output_gate: Optional[Literal["headwise", "elementwise"]] = flag(
            None, "multiply the outputs by sigmoid(x W): a number for each head, or for each element")
        output_gate_width: Optional[int] = flag(
            None, "number of channels of x that the gate reads; None: all")

    name = flag = "output_gate"
    modes = {"output_gate": dict(output_gate="headwise"),
             "output_gate_elementwise": dict(output_gate="elementwise"),
             "output_gate_narrow": dict(output_gate="headwise", output_gate_width=12)}

    def __init__(self, config, attn):
        super().__init__()
        self.size = attn.head_size if config.output_gate == "elementwise" else 1
        self.width = config.output_gate_width or config.n_embd
        self.proj = Linear(self.width, attn.n_total * self.size, bias=False)
        self.per_head = {"proj.weight": HeadAxis(size=self.size)}

    @staticmethod
    def problems(c):
        if c.output_gate_width is not None and not 1 <= c.output_gate_width <= c.n_embd:
            yield f"output_gate_width={c.output_gate_width} must be from 1 to n_embd={c.n_embd}"

    def before_attention(self, attn, heads):
        gate = self.proj(heads.x[..., :self.width]).sigmoid().unflatten(-1, (attn.n_total, self.size))
        heads.gates[self.name] = gate.transpose(1, 2)  # (B, H, T, 1 or D)


class Sink(Mechanism):
    """A learned logit in each head's softmax, to attend to nothing: y * sigmoid(LSE - logit_h).

    Source: gpt-oss (2025). It is the same as one more key, with that logit and with 0 as its value.
    """

    class Options:
        sink: bool = flag(False, "add a learned logit to each head's softmax, which attends to nothing")

    name = flag = "sink"
    modes = {"sink": dict(sink=True)}
    neutral = {"sink": {"sink.logit": -50.0}}
    per_head = ("logit",)
    needs_row_stats = ("lse",)

    def __init__(self, config, attn):
        super().__init__()
        self.logit = nn.Parameter(torch.zeros(attn.n_total))

    def after_attention(self, attn, heads):
        heads.gates[self.name] = (heads.row_stats.lse - self.logit[:, None]).sigmoid()[..., None]

    def trace_map(self, attn, weights, heads):
        return weights * heads.gates[self.name].to(weights.dtype)  # rows sum to what the sink leaves


class StreamScalars(BetweenBlocks):
    """Each block reads a x + b x_0, with two learned numbers, where x is the stream and x_0 the embedding.

    Source: nanochat (2026), modded-nanogpt. From the first block to the last, a starts at 1.15 down to 1.05,
    and b at 0.2 down to 0.05.
    """

    class Options:
        stream_scalars: bool = flag(
            False, "each block reads a x + b x_0, where x_0 is the embedding and a, b are learned")

    name = flag = "stream_scalars"
    modes = {"stream_scalars": dict(stream_scalars=True)}
    neutral = {"stream_scalars": {"stream_scalars.stream": 1.0, "stream_scalars.embedding": 0.0}}

    def __init__(self, config):
        super().__init__()
        self.stream = nn.Parameter(torch.linspace(1.15, 1.05, config.n_layer))
        self.embedding = nn.Parameter(torch.linspace(0.2, 0.05, config.n_layer))

    def before_block(self, x, layer, outputs, shared):
        """What block `layer` reads; the last norm reads the stream as it is."""
        if layer == len(self.stream):
            return x
        return self.stream[layer] * x + self.embedding[layer] * outputs[0]


class DepthAttention(BetweenBlocks):
    """Attention over depth: a block reads a softmax-weighted mean of all outputs before it.

    Source: Attention Residuals (arXiv 2603.15031), with one of its blocks of layers for each block here. The
    keys are the RMS-normed outputs. The query is one learned vector a block, and starts at 0: a plain mean.
    """

    class Options:
        depth_attention: bool = flag(
            False, "a block reads a weighted mean of all outputs before it, not their sum")

    name = flag = "depth_attention"
    modes = {"depth_attention": dict(depth_attention=True)}

    def __init__(self, config):
        super().__init__()
        self.query = nn.Parameter(torch.zeros(config.n_layer, config.n_embd))

    def before_block(self, x, layer, outputs, shared):
        sources, logits = shared.setdefault("depth", ([], []))
        sources.append(x - shared["depth_read"] if layer else x)  # what the last block has added
        logits.append(float32_product(rms_norm(sources[-1]), self.query))  # of all blocks' queries
        if layer:
            weights = torch.stack([of_source[..., layer - 1] for of_source in logits], -1).softmax(-1)
            x = weighted_sum(weights.to(x.dtype), sources)
        shared["depth_read"] = x
        return x


class MUDD(BetweenBlocks):
    """MUDD: queries, keys, values and the stream of a block each read a sum of all outputs so far, weighted
    by the token: (static + W2 gelu(W1 norm(x))) . outputs.

    Source: MUDDFormer (arXiv 2502.12170, eqs. 6 to 9) and its code. The last norm reads a single sum, which
    has as many hidden units as the four of a block. W1 is N(0, 1 / C) in the paper, and here uniform with the
    same variance. W2 starts at 0, and static so that each sum is x.
    """

    class Options:
        mudd: bool = flag(False, "a block reads sums of all outputs before it, weighted by the token")
        mudd_from: Optional[int] = flag(
            None, "number of the first block that does; None: half of the blocks do, the last ones",
            at_least=1)

    name = flag = "mudd"
    modes = {"mudd": dict(mudd=True)}
    neutral = {"mudd": {}}  # as it starts

    def __init__(self, config):
        super().__init__()
        C, N = config.n_embd, config.n_layer
        self.n_layer, self.first = N, config.mudd_from
        self.fc, self.out, self.static = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()
        for layer in range(self.first, N + 1):
            ways, sources = 4 if layer < N else 1, layer + 1
            hidden = 4 * sources
            self.fc.append(start_at(nn.Parameter(torch.empty(hidden, C)), Uniform((3 / C) ** 0.5)))
            self.out.append(nn.Parameter(torch.zeros(ways * sources, hidden)))
            x_itself = torch.eye(sources)[-1:].expand(ways, sources).clone()
            self.static.append(nn.Parameter(x_itself))

    @staticmethod
    def settle(config):
        if config.mudd and config.mudd_from is None:
            config.mudd_from = max(1, config.n_layer // 2)

    @staticmethod
    def problems(config):
        if config.mudd_from is not None and config.mudd_from > config.n_layer:
            yield f"mudd_from={config.mudd_from} must be at most n_layer={config.n_layer}, the last norm's"
        one_input = {"short_conv": "x", "diff": True, "a2c": "published"}
        for key, value in one_input.items():
            if getattr(config, key, None) == value:
                yield f"mudd gives queries, keys and values an input each: {key}={value!r} knows of one"

    def before_block(self, x, layer, outputs, shared):
        """The stream of block `layer`; the inputs of its queries, keys and values go into shared."""
        i = layer - self.first
        if i < 0:
            return x
        hidden = F.gelu(F.linear(rms_norm(x), self.fc[i]))
        weights = F.linear(hidden, self.out[i]).unflatten(-1, self.static[i].shape) + self.static[i]
        *ways, x = [weighted_sum(way, [*outputs[:-1], x]).to(x.dtype) for way in weights.unbind(-2)]
        shared["inputs", layer] = ways
        return x
