"""
What a model computes beside attention, where PyTorch has nothing as good: norms, RoPE, short convolutions, a
linear map in true float32, and the loss of a large vocabulary in portions. Attention is in
nanoheads/attention.py, and by which library a CPU multiplies in nanoheads/cpu.py.

Nothing here knows of a model: tensors in, tensors out. B: batch, H: heads, T: queries, S: keys, D: head size.
"""

import importlib.util
import math
import sys
from typing import Optional

import torch
from torch.nn import functional as F

from nanoheads.cpu import CpuLinear, onednn_is_faster

# ---- norms and activations ----

def rms_norm(x, eps=1e-6):
    """x / rms(x) over the last dimension, without a learned scale.

    PyTorch has no fused kernel of it for CPUs, and composes it of some ten operators. Where no gradient is
    wanted, as when decoding, five do, and a token takes less time (docs/results/speed.md).
    """
    if (x.is_cpu and x.dtype in (torch.float32, torch.float64)
            and not torch.is_grad_enabled() and not torch.compiler.is_compiling()):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(x.new_full((1,), eps), length, length, value=1 / x.size(-1)).rsqrt()
    return F.rms_norm(x, (x.size(-1),), eps=eps)


def relu2(x):
    """relu(x)^2."""
    return F.relu(x).square()


# ---- queries, keys and values ----

def rope_tables(length, head_size, base=10000.0, share=1.0, scaling=None):
    """cos and signed sin of every position's angles, each [length, head_size] (RoPE, eq. 34).

    Dimension i is paired with i + head_size // 2, so rotating is x * cos + (x, halves swapped) * sin; of an
    odd size the last dimension has no partner, and is not turned. Of those pairs the first share turn, at
    frequencies as of a head of that size; the others stand still. scaling: Llama 3's (factor, low, high,
    context): what turns less than low times in that context turns `factor` times slower, what turns more than
    high times as before, between them a mixture.
    """
    half = head_size // 2
    n_rotated = max(1, round(share * half))
    freq = base ** (-torch.arange(half, dtype=torch.float64) / n_rotated)
    freq[n_rotated:] = 0.0
    if scaling:
        factor, low, high, context = scaling
        kept_share = ((context * freq / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        freq = freq * (kept_share + (1 - kept_share) / factor)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * freq
    still = angle.new_zeros(length, head_size % 2)  # the angles of a dimension without a partner
    cos = torch.cat((angle.cos(), angle.cos(), still.cos()), -1)
    sin = torch.cat((-angle.sin(), angle.sin(), still.sin()), -1)
    return cos.float(), sin.float()


def rotate(x, cos, sin):
    """Rotate x [..., D] by its position's angles, given as rope_tables' cos and sin [..., D]."""
    return torch.addcmul(x * cos, swap_halves(x), sin).type_as(x)


def swap_halves(x):
    """x [..., D] with dimensions i and i + D // 2 exchanged; of an odd D the last one stays where it is."""
    half = x.size(-1) // 2
    if x.size(-1) % 2 == 0:
        return x.roll(half, -1)
    return torch.cat((x[..., half:2 * half], x[..., :half], x[..., 2 * half:]), -1)


def heads_of(qkv, norm, rope):
    """Queries, keys and values, each [B, H, T, D], of qkv [B, T, 3, H, D]: the first two are RMS-normed and
    turned by rope, a pair of cos and sin, where wanted.
    """
    if not norm and not rope:  # their gradients are put together in one copy
        q, k, v = qkv.unbind(2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    qk, v = qkv.split_with_sizes((2, 1), 2)
    q, k = norm_and_rotate(qk, norm, rope).transpose(1, 3).unbind(2)
    return q, k, v.squeeze(2).transpose(1, 2)


def grouped_heads_of(qkv, n_head, n_kv_head, norm, rope, eps=1e-6, scale=None):
    """The same of qkv [B, T, n_head + 2 n_kv_head, D]: fewer keys and values than queries.

    scale: (of queries, of keys), each [D], a factor on what is normed.
    """
    qk, v = qkv.split_with_sizes((n_head + n_kv_head, n_kv_head), 2)
    if scale is not None:
        scale = torch.cat([s.to(qkv.dtype).expand(n, -1) for s, n in zip(scale, (n_head, n_kv_head))])
    qk = norm_and_rotate(qk[:, :, None], norm, rope, eps, scale).squeeze(2).transpose(1, 2)
    return *qk.split_with_sizes((n_head, n_kv_head), 1), v.transpose(1, 2)


def for_each_head(x, n_head):
    """x [B, H or fewer, T, D] of groups of heads -> [B, H, T, D]: a copy for each head of a group."""
    return x if x.size(1) >= n_head else x.repeat_interleave(n_head // x.size(1), 1)


def norm_and_rotate(x, norm, rope, eps=1e-6, scale=None):
    """x [..., D], RMS-normed, times a scale, and turned by rope, (cos, sin), where wanted."""
    x = rms_norm(x, eps) if norm else x
    x = x if scale is None else x * scale
    return rotate(x, *rope) if rope else x


def sum_so_far(x, begins=None):
    """The sum of x [B, T, C] over the tokens up to each one; begins [B, T]: from that column on alone."""
    total = x.cumsum(1)
    if begins is None:
        return total
    # over the columns before it
    sum_before = F.pad(total, (0, 0, 1, 0)).gather(1, begins[..., None].expand_as(x))
    return total - sum_before


def short_convolution(x, weight, bias, first=0, positions=None):
    """x [B, T, C] of whose channels some, from `first`, become x_t + bias + sum_i weight_i x_{t-i}.

    weight [width, channels], bias [1, channels]; zeros before the first token. positions [B, T]: tokens of
    its document before each token, where a row has several documents. Shifted products, since conv1d has a
    slow backward pass on CPUs.
    """
    n = weight.size(1)
    read = y = x.narrow(2, first, n)
    y = y * (1 + weight[0]) + bias
    for i in range(1, min(len(weight), x.size(1))):
        earlier = F.pad(read[:, :-i] * weight[i], (0, 0, i, 0))
        y = y + (earlier if positions is None else earlier * (positions >= i)[..., None])
    return y if n == x.size(2) else torch.cat((x[..., :first], y, x[..., first + n:]), 2)


# ---- linear maps ----


class Linear(torch.nn.Linear):
    """nn.Linear, by the faster of a CPU's libraries.

    stacked: the number of a block's matrices that the weight holds, one above the other: 1, or 3 for queries,
    keys and values. Their heights in proportion where they differ: (4, 1, 1) where four heads share a key.
    None: the weight is no matrix of a block. An optimizer may treat each matrix by itself.
    """

    def __init__(self, in_features, out_features, bias=True, stacked=None):
        super().__init__(in_features, out_features, bias)
        self.stacked = stacked

    def forward(self, x):
        weight, bias = self.weight, self.bias  # read once, which takes time in a module
        if bias is None and onednn_is_faster(x, weight):
            return CpuLinear.apply(x, weight)
        return F.linear(x, weight, bias)


def true_float32(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
    """F.linear in true float32 on a GPU.

    Under set_float32_matmul_precision("high") F.linear alone would be TF32, of 10 bits.
    """
    old_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return F.linear(x, weight, bias)
    finally:
        torch.set_float32_matmul_precision(old_precision)


def linear32_backward(ctx, g):
    """Gradients of linear32, in true float32 too."""
    x, weight = ctx.saved_tensors
    flat = g.flatten(0, -2)
    dx = linear32(g, weight.T, None) if ctx.needs_input_grad[0] else None
    dw = linear32(flat.T, x.flatten(0, -2).T, None) if ctx.needs_input_grad[1] else None
    return dx, dw, flat.sum(0) if ctx.has_bias else None


def keep_inputs(ctx, inputs, output):
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


# true_float32() as an operator of its own, since the setting is read when a kernel starts, compiled or not.
# An exported folder brings a copy of this file. In one process with ours it takes the operator that is there:
# registered once more, it would free the one that models already use.
if hasattr(torch.ops.nanoheads, "linear32"):
    linear32 = torch.ops.nanoheads.linear32
else:
    linear32 = torch.library.custom_op("nanoheads::linear32", true_float32, mutates_args=())
    linear32.register_fake(lambda x, weight, bias: x.new_empty(*x.shape[:-1], len(weight)))
    linear32.register_autograd(linear32_backward, setup_context=keep_inputs)


def float32_linear(layer, x):
    """layer(x) in float32 also under autocast, whose rounding would make ties of near logits."""
    return float32_product(x, layer.weight, layer.bias)


def float32_product(x, weight, bias=None):
    """F.linear in float32 also under autocast."""
    with torch.autocast(x.device.type, enabled=False):
        dtype = torch.promote_types(weight.dtype, torch.float32)
        linear = linear32 if x.is_cuda and dtype == torch.float32 else F.linear
        return linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def weighted_sum(weights, sources):
    """Σ_i weights[..., i] sources[i], [..., C], of [..., n] and n of [..., C], one after the other.

    Side by side in one tensor, for one product, they take two to four times as long on a CPU.
    """
    first, *others = weights.split(1, -1)
    total = first * sources[0].to(weights.dtype)
    for weight, source in zip(others, sources[1:]):
        total = torch.addcmul(total, weight, source.to(weights.dtype))
    return total


def product_dtype(x):
    """The dtype of a matrix product with x: autocast's, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def pad_rows(weight, multiple=64):
    """A head's weight [V, C] with rows of zeros up to a multiple, without which a GPU reads its logits
    unaligned, as at GPT-2's 50,257. On a CPU as it is.
    """
    n_missing = -len(weight) % multiple
    return F.pad(weight, (0, 0, 0, n_missing)) if weight.is_cuda and n_missing else weight


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy in nats of logits x W', some tokens at a time: never are all logits in memory.

    x [N, C], weight [V, C], targets [N] (-1: not scored) -> (sum, of each token [N]). The gradient, of the
    sum alone, is made in the forward pass, where the logits are, so that no product is computed twice.
    size: tokens in a portion. dtype: of the products. softcap: logits are cap * tanh(logits / cap); 0: off.
    learns: is a gradient wanted?
    """

    @staticmethod
    def forward(ctx, x, weight, targets, size, dtype, softcap, learns):
        w, vocabulary = pad_rows(weight.to(dtype)), torch.arange(len(weight), device=x.device)
        sum_dtype = torch.promote_types(weight.dtype, torch.float32)
        # the weight's gradient is a sum over tokens, made before a loss scale: float16 could not hold it
        grad_dtype = torch.float32 if dtype == torch.float16 else dtype
        learns_weight = learns and weight.requires_grad
        nats, dx = [], []
        dw = torch.zeros(weight.shape if learns_weight else 0, dtype=sum_dtype, device=x.device)
        for rows, row_targets in zip(x.split(size), targets.split(size)):
            rows, is_scored = rows.to(dtype), row_targets != -1
            target_index = row_targets.clamp_min(0)[:, None]
            z = (rows @ w.mT)[:, :len(weight)].to(sum_dtype)
            z = softcap * torch.tanh(z / softcap) if softcap else z
            lse = z.logsumexp(-1, keepdim=True)
            nats.append(torch.where(is_scored, (lse - z.gather(-1, target_index)).squeeze(-1), 0.0))
            if learns:
                slope = (z - lse).exp() - (vocabulary == target_index).to(sum_dtype)
                slope = slope * (1 - (z / softcap).square()) if softcap else slope
                slope = torch.where(is_scored[:, None], slope, 0.0).to(grad_dtype)
                slope = F.pad(slope, (0, len(w) - len(weight)))
                dx.append(slope.to(dtype) @ w)
                if learns_weight:
                    dw += (slope.mT @ rows.to(grad_dtype))[:len(weight)]
        nats = torch.cat(nats)
        ctx.save_for_backward(*([torch.cat(dx), dw] if learns else []))
        ctx.dtypes = x.dtype, weight.dtype
        ctx.mark_non_differentiable(nats)
        return nats.sum(), nats

    @staticmethod
    def backward(ctx, g, _):
        # what was saved is no function of x: a second derivative would be wrong, or drop out of a sum unseen
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("this hand-written gradient cannot be differentiated again: "
                               "do without create_graph=True")
        dx, dw = ctx.saved_tensors
        dw = (dw * g).to(ctx.dtypes[1]) if dw.numel() else None
        return (dx * g).to(ctx.dtypes[0]), dw, None, None, None, None, None


# ---- compiling ----

# PyTorch comes with Triton, which compiles for GPUs, on Linux alone; others make triton-windows
NO_TRITON = sys.platform == "win32" and importlib.util.find_spec("triton") is None


def allow_graphs():
    """Let torch.compile keep a graph of each model, shape and schedule: after its limit of 8 for one function
    it runs eager, without a word.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(256, config.recompile_limit)
    config.accumulated_recompile_limit = max(4096, config.accumulated_recompile_limit)
