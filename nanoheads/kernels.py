"""
The kernels that PyTorch lacks, none of which stores a T x T tensor: attention that returns the log-sum-exp of
its rows, their statistics, attention of selected queries; a linear map in true float32; and the loss of a
large vocabulary in portions. What a CPU computes in another way is in nanoheads/cpu.py.

Nothing here knows of a model: tensors in, tensors out. B: batch, H: heads, T: queries, S: keys, D: head size.
"""

import functools
import importlib.util
import math
import sys
from contextlib import contextmanager
from typing import NamedTuple, Optional

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from nanoheads.cpu import (CpuFlash, CpuHeads, CpuLinear, CpuRMSNorm, CpuShortConvolution, CpuSquaredReLU,
                           eager_on_cpu, first_derivative_only, inverse_rms, onednn_is_faster)

# ---- norms and activations ----

def rms_norm(x, eps=1e-6):
    """x / rms(x) over the last dimension, without a learned scale."""
    if eager_on_cpu(x):
        return CpuRMSNorm.apply(x, eps) if torch.is_grad_enabled() else x * inverse_rms(x, eps)
    return F.rms_norm(x, (x.size(-1),), eps=eps)


def relu2(x):
    """relu(x)^2."""
    if eager_on_cpu(x) and torch.is_grad_enabled():
        return CpuSquaredReLU.apply(x)
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
    turned = max(1, round(share * half))
    freq = base ** (-torch.arange(half, dtype=torch.float64) / turned)
    freq[turned:] = 0.0
    if scaling:
        factor, low, high, context = scaling
        kept = ((context * freq / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        freq = freq * (kept + (1 - kept) / factor)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * freq
    still = angle.new_zeros(length, head_size % 2)  # the angles of a dimension without a partner
    cos = torch.cat((angle.cos(), angle.cos(), still.cos()), -1)
    sin = torch.cat((-angle.sin(), angle.sin(), still.sin()), -1)
    return cos.float(), sin.float()


def rotate(x, cos, sin):
    """Rotate x [..., D] by its position's angles, given as rope_tables' cos and sin [..., D]."""
    return torch.addcmul(x * cos, halves_swapped(x), sin).type_as(x)


def halves_swapped(x):
    """x [..., D] with dimensions i and i + D // 2 exchanged; of an odd D the last one stays where it is."""
    half = x.size(-1) // 2
    if x.size(-1) % 2 == 0:
        return x.roll(half, -1)
    return torch.cat((x[..., half:2 * half], x[..., :half], x[..., 2 * half:]), -1)


def heads_of(qkv, normed, rope):
    """Queries, keys and values, each [B, H, T, D], of qkv [B, T, 3, H, D]: the first two are RMS-normed and
    turned by rope, a pair of cos and sin, where wanted.
    """
    if normed and rope and eager_on_cpu(qkv) and torch.is_grad_enabled():
        return CpuHeads.apply(qkv, *rope, halves_swapped)
    if not normed and not rope:  # their gradients are put together in one copy
        q, k, v = qkv.unbind(2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    qk, v = qkv.split_with_sizes((2, 1), 2)
    q, k = normed_and_rotated(qk, normed, rope).transpose(1, 3).unbind(2)
    return q, k, v.squeeze(2).transpose(1, 2)


def grouped_heads_of(qkv, n_head, n_kv_head, normed, rope, eps=1e-6, scale=None):
    """The same of qkv [B, T, n_head + 2 n_kv_head, D]: fewer keys and values than queries.

    scale: (of queries, of keys), each [D], a factor on what is normed.
    """
    qk, v = qkv.split_with_sizes((n_head + n_kv_head, n_kv_head), 2)
    if scale is not None:
        scale = torch.cat([s.to(qkv.dtype).expand(n, -1) for s, n in zip(scale, (n_head, n_kv_head))])
    qk = normed_and_rotated(qk[:, :, None], normed, rope, eps, scale).squeeze(2).transpose(1, 2)
    return *qk.split_with_sizes((n_head, n_kv_head), 1), v.transpose(1, 2)


def for_each_head(x, n_head):
    """x [B, H or fewer, T, D] of groups of heads -> [B, H, T, D]: a copy for each head of a group."""
    return x if x.size(1) >= n_head else x.repeat_interleave(n_head // x.size(1), 1)


def normed_and_rotated(x, normed, rope, eps=1e-6, scale=None):
    """x [B, T, n, H, D], RMS-normed, times a scale, and turned by rope, (cos, sin), where wanted."""
    x = rms_norm(x, eps) if normed else x
    x = x if scale is None else x * scale
    return rotate(x, *rope) if rope else x


def short_convolution(x, weight, bias, first=0):
    """x [B, T, C] of whose channels some, from `first`, become x_t + bias + sum_i weight_i x_{t-i}.

    weight [width, channels], bias [1, channels]; zeros before the first token. Shifted products, since conv1d
    has a slow backward pass on CPUs.
    """
    if eager_on_cpu(x) and torch.is_grad_enabled():
        return CpuShortConvolution.apply(x, weight, bias, first)
    n = weight.size(1)
    read = y = x.narrow(2, first, n)
    y = y * (1 + weight[0]) + bias
    for i in range(1, min(len(weight), x.size(1))):
        y = y + F.pad(read[:, :-i] * weight[i], (0, 0, i, 0))
    return y if n == x.size(2) else torch.cat((x[..., :first], y, x[..., first + n:]), 2)


# ---- linear maps ----


class Linear(torch.nn.Linear):
    """nn.Linear, by the faster of a CPU's libraries."""

    def forward(self, x):
        if self.bias is None and onednn_is_faster(x, self.weight):
            return CpuLinear.apply(x, self.weight)
        return F.linear(x, self.weight, self.bias)


def true_float32(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
    """F.linear in true float32 on a GPU.

    Under set_float32_matmul_precision("high") F.linear alone would be TF32, of 10 bits.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return F.linear(x, weight, bias)
    finally:
        torch.set_float32_matmul_precision(before)


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


def padded_rows(weight, multiple=64):
    """A head's weight [V, C] with rows of zeros up to a multiple, without which a GPU reads its logits
    unaligned, as at GPT-2's 50,257. On a CPU as it is.
    """
    missing = -len(weight) % multiple
    return F.pad(weight, (0, 0, 0, missing)) if weight.is_cuda and missing else weight


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy in nats of logits x W', some tokens at a time: never are all logits in memory.

    x [N, C], weight [V, C], targets [N] (-1: not scored) -> (sum, of each token [N]). The gradient, of the
    sum alone, is made in the forward pass, where the logits are, so that no product is computed twice.
    size: tokens in a portion. dtype: of the products. softcap: logits are cap * tanh(logits / cap); 0: off.
    learns: is a gradient wanted?
    """

    @staticmethod
    def forward(ctx, x, weight, targets, size, dtype, softcap, learns):
        w, vocabulary = padded_rows(weight.to(dtype)), torch.arange(len(weight), device=x.device)
        total = torch.promote_types(weight.dtype, torch.float32)
        # the weight's gradient is a sum over tokens, made before a loss scale: float16 could not hold it
        sums = torch.float32 if dtype == torch.float16 else dtype
        learns_weight = learns and weight.requires_grad
        nats, dx, dw = [], [], torch.zeros(weight.shape if learns_weight else 0, dtype=total, device=x.device)
        for rows, wanted in zip(x.split(size), targets.split(size)):
            rows, scored, at = rows.to(dtype), wanted != -1, wanted.clamp_min(0)[:, None]
            z = (rows @ w.mT)[:, :len(weight)].to(total)
            z = softcap * torch.tanh(z / softcap) if softcap else z
            lse = z.logsumexp(-1, keepdim=True)
            nats.append(torch.where(scored, (lse - z.gather(-1, at)).squeeze(-1), 0.0))
            if learns:
                slope = (z - lse).exp() - (vocabulary == at).to(total)
                slope = slope * (1 - (z / softcap).square()) if softcap else slope
                slope = torch.where(scored[:, None], slope, 0.0).to(sums)
                slope = F.pad(slope, (0, len(w) - len(weight)))
                dx.append(slope.to(dtype) @ w)
                if learns_weight:
                    dw += (slope.mT @ rows.to(sums))[:len(weight)]
        nats = torch.cat(nats)
        ctx.save_for_backward(*([torch.cat(dx), dw] if learns else []))
        ctx.dtypes = x.dtype, weight.dtype
        ctx.mark_non_differentiable(nats)
        return nats.sum(), nats

    @staticmethod
    def backward(ctx, g, _):
        first_derivative_only()
        dx, dw = ctx.saved_tensors
        dw = (dw * g).to(ctx.dtypes[1]) if dw.numel() else None
        return (dx * g).to(ctx.dtypes[0]), dw, None, None, None, None, None


# ---- attention ----

def attend(q, k, v, scale, mask, dropout):
    """Causal attention of q [B, H, T, D] over k, v [B, H or fewer, S, D], the last T of S being the queries'
    own tokens.
    """
    if not q.numel():
        return q @ k.mT @ v  # torch 2.11 divides by the number of heads
    if isinstance(mask, BlockMask):
        if not dropout:
            return flex(q, for_each_head(k, q.size(1)), for_each_head(v, q.size(1)), scale, mask)[0]
        mask = None  # it is there for traces alone: a window is refused with dropout
    causal = mask is None and q.size(2) > 1  # one query sees all there is
    options = dict(attn_mask=mask, is_causal=causal, scale=scale, dropout_p=dropout)
    if k.size(1) != q.size(1):
        options["enable_gqa"] = True
    width = v.size(-1)
    q, k, v = in_eights(q, k, v)
    if not torch.compiler.is_compiling() and costs_a_plan(q):
        with without_cudnn():
            y = F.scaled_dot_product_attention(q, k, v, **options)
    else:
        y = F.scaled_dot_product_attention(q, k, v, **options)
    return y if y.size(-1) == width else y[..., :width]


def in_eights(q, k, v):
    """q, k and v with zeros behind their last dimension, up to a multiple of 8, where a kernel wants that.

    They add nothing to a logit, and what they make of the output is 0 and cut off. The scale has to be given:
    a kernel's own would be that of the wider heads.
    """
    return [F.pad(t, (0, -t.size(-1) % 8)) if t.size(-1) % 8 and wants_eights(t.device) else t
            for t in (q, k, v)]


def wants_eights(device):
    """Whether attention kernels want head sizes that are multiples of 8.

    On a GPU, cuDNN's and the memory-efficient one refuse others, so that only one that stores all T x T
    logits is left wherever there is a mask, or float32; flash attention pads them itself, and FlexAttention
    would read them unaligned. CPU kernels take any size, and padding only costs them time.
    """
    return device.type == "cuda"


def costs_a_plan(q):
    """Whether cuDNN's attention would make a plan for each of many lengths: when decoding, and when texts are
    scored uncompiled.
    """
    return q.is_cuda and (q.size(2) == 1 or not torch.is_grad_enabled())


@contextmanager
def without_cudnn():
    """PyTorch picks another of its attention kernels."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


# PyTorch comes with Triton, which compiles for GPUs, on Linux alone; others make triton-windows
NO_TRITON = sys.platform == "win32" and importlib.util.find_spec("triton") is None


def has_flex_attention(device):
    """Whether FlexAttention has fused kernels here, forward and backward: on a Mac's GPU it has no backward.
    """
    return device.type == "cuda" and not NO_TRITON


def allow_graphs():
    """Let torch.compile keep a graph of each model, shape and schedule: after its limit of 8 for one function
    it runs eager, without a word.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(256, config.recompile_limit)
    config.accumulated_recompile_limit = max(4096, config.accumulated_recompile_limit)


@functools.cache
def compiled_flex():
    """FlexAttention is a fused kernel only when compiled, also where the model around it is not."""
    allow_graphs()  # one for each shape; eager is T x T
    return torch.compile(flex_attention, dynamic=False)


KERNEL_BLOCK = 128  # tokens in a block of FlexAttention's masks


def block_mask(T, device, mask_mod, window=None, n_global=0, random_blocks=None):
    """BlockMask of T tokens: which blocks of keys each block of queries sees in part, and which whole.

    mask_mod(query, key): whether the one sees the other. window: tokens seen, beside the first n_global and
    random_blocks [blocks, blocks]; None: all before. Nothing is T x T.
    """
    size, n = KERNEL_BLOCK, -(-T // KERNEL_BLOCK)
    i = torch.arange(n, device=device)[:, None]
    j = i.T
    partial_blocks, full_blocks = i >= j, i > j
    if window:
        near = ((i - j) * size - (size - 1) < window) | (j * size < n_global)
        if random_blocks is not None:
            near = near | random_blocks[:n, :n]
        partial_blocks = partial_blocks & near
        full_blocks = full_blocks & (((i - j) * size + size - 1 < window) | (j * size + size - 1 < n_global))

    def listed(table):
        """How many blocks each row of a table has, and which, in the form of BlockMask."""
        order = table.int().argsort(dim=-1, descending=True, stable=True)
        return table.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]

    return BlockMask.from_kv_blocks(*listed(partial_blocks & ~full_blocks), *listed(full_blocks),
                                    BLOCK_SIZE=size, seq_lengths=(T, T),
                                    mask_mod=lambda b, h, query, key: mask_mod(query, key))


def random_cells(T, cell, window, n_random):
    """Which cells of tokens before its window each cell also sees, bool [cells, cells] (BigBird).

    The draw is the same for every seed: a checkpoint trained on with another seed keeps its pattern.
    """
    n = -(-T // cell)
    reach = -(-(window - 1) // cell)  # cells that the window touches
    generator, table = torch.Generator().manual_seed(1337), torch.zeros(n, n, dtype=torch.bool)
    for row in range(reach + 1, n):
        table[row, torch.randperm(row - reach, generator=generator)[:n_random]] = True
    return table


def blocks_reached(cells, cell, T):
    """The kernel's blocks that cells of so many tokens reach into, bool [blocks, blocks]; cells: the same of
    cells. Made once: a number of cells that depends on data breaks a compiled graph.
    """
    i = torch.arange(len(cells))[:, None]
    blocks = torch.arange(-(-T // KERNEL_BLOCK))
    # which blocks each cell reaches into: it begins before their end, and ends after their beginning
    reaches = (i * cell < (blocks + 1) * KERNEL_BLOCK) & ((i + 1) * cell > blocks * KERNEL_BLOCK)
    reaches = reaches.float()
    return reaches.T @ cells.float() @ reaches > 0


FLEX_MIN = 16  # head sizes below it are refused by FlexAttention on CUDA


def flex(q, k, v, scale, mask):
    """FlexAttention: (y, log-sum-exp), differentiable in both; mask is a BlockMask. Narrow heads are padded
    with zeros, and so are those whose size is no multiple of 8.
    """
    width = v.size(-1)
    q, k, v = in_eights(q, k, v)
    q, k, v = (F.pad(t, (0, FLEX_MIN - t.size(-1))) if t.size(-1) < FLEX_MIN else t for t in (q, k, v))
    kernel = flex_attention if torch.compiler.is_compiling() or not q.is_cuda else compiled_flex()
    options = None
    if q.is_cuda:
        roomy = torch.cuda.get_device_capability(q.device) in ROOMY
        options = flex_tiles(max(q.size(-1), v.size(-1)), q.element_size(), roomy)
    y, aux = kernel(q, k, v, block_mask=mask, scale=scale, kernel_options=options,
                    return_aux=AuxRequest(lse=True))
    if not width and torch.is_grad_enabled():  # the backward pass needs a gradient of y: here it is 0
        return y[..., :0], aux.lse + 0.0 * y[..., 0]
    return y[..., :width], aux.lse


ROOMY = {(8, 0), (8, 7), (9, 0), (10, 0), (10, 3), (11, 0)}  # cards with 163 KB of shared memory or more


def flex_tiles(width, itemsize, roomy):
    """Kernel options of FlexAttention for heads so wide, each number so many bytes; None: its own.

    Its own tiles need more shared memory than a card has once a row of a head, padded to a power of two,
    takes over 256 bytes, or over 128 where the card is not roomy: 99 KB, as on an L4 or an RTX 4090. These
    need 70 KB at most (docs/gpu.md).
    """
    row = itemsize << (width - 1).bit_length()
    if row <= (256 if roomy else 128):
        return None
    side = 32 if row <= 512 else 16
    forward = dict(fwd_BLOCK_M=2 * side, fwd_BLOCK_N=side, fwd_num_stages=1)
    sides = {f"bwd_BLOCK_{name}": side for name in ("M1", "N1", "M2", "N2")}
    return {**forward, **sides, "bwd_num_stages": 1}


def attend_lse(q, k, scale, mask, *values):
    """Causal attention over one or more values: (log-sum-exp of each row [B, H, T] in float32 or better, y,
    ...).
    """
    if isinstance(mask, BlockMask):
        y, lse = flex(q, k, torch.cat(values, -1), scale, mask)
    elif q.size(2) > 1 and q.device.type == "cpu" and q.numel():
        return CpuFlash.apply(q, k, mask, scale, *values)
    else:  # all logits in memory: for one query, and for prompts outside the CPU
        s = (q @ k.mT).float() * scale if q.dtype != torch.float64 else q @ k.mT * scale
        s = s if mask is None else s.masked_fill(~mask, -math.inf)
        y, lse = s.softmax(-1).to(q.dtype) @ torch.cat(values, -1), s.logsumexp(-1)
    return lse, *y.split([v.size(-1) for v in values], -1)


class RowStats(NamedTuple):
    """What is known of every attention row, each [B, H, T]; None where it was not asked for."""

    lse: torch.Tensor                       # log-sum-exp of its logits
    entropy: Optional[torch.Tensor] = None  # in nats
    log_p2: Optional[torch.Tensor] = None   # log of the sum of its squared weights
    spread: Optional[torch.Tensor] = None   # sum of squared differences of its weights from their mean, 1 / n


def row_statistics(q, k, v, scale, mask, n_keys, detach=False, dropout=0.0, shape=True, spread=False):
    """(y [B, H, T, D], RowStats), with s the logits: entropy = LSE(s) - scale q.SDPA(q, k, k), log p2 =
    LSE(2s) - 2 LSE(s).

    n_keys: how many keys each row sees. detach: no gradient into the statistics, and none of its cost.
    shape: entropy and log_p2 too, which take another pass over the logits; else the log-sum-exp alone. All
    are those of the weights before dropout. spread: spread_of_rows() too.
    """
    squares = spread_of_rows(q, k, scale, mask, n_keys, detach) if spread else None
    if shape and q.size(2) == 1 and not dropout and not torch.is_grad_enabled():
        y, rows = one_row(q, k, v, scale, mask)
        return y, rows._replace(spread=squares)
    if not shape:
        lse, y = attend_lse(q, k, scale, mask, v)
        y = attend(q, k, v, scale, mask, dropout) if dropout else y
        return y, RowStats(lse.detach() if detach else lse, spread=squares)
    # one pass is faster, but on CPU all becomes as wide as v and k, and a GPU has no shared memory beyond 128
    small = q.size(2) <= 1024 if q.device.type == "cpu" else k.size(-1) + v.size(-1) <= 128
    together = not detach and not dropout and small
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
        lse, mean_key, *y = attend_lse(q, k, scale, mask, k.view_as(k), *([v] if together else []))
        lse2 = attend_lse(q, k, 2 * scale, mask, k[..., :0])[0]  # its values do not matter
        mean_logit = scale * (q.to(lse.dtype) * mean_key.to(lse.dtype)).sum(-1)
        entropy = (lse - mean_logit).clamp_min(0).minimum(n_keys.log())
    y = y[0] if together else attend(q, k, v, scale, mask, dropout)
    log_p2 = lse2 - 2 * lse
    if q.is_cuda and not together:  # gives mean_key a gradient, of 0, where the entropy is not read
        log_p2 = log_p2 + 0.0 * entropy
    return y, RowStats(lse, entropy, log_p2, squares)


QUERIES_AT_ONCE = 128  # whose weights spread_of_rows() stores


def spread_of_rows(q, k, scale, mask, n_keys, detach=False):
    """Σ (p - 1/n)^2 over the n keys that each row sees, [B, H, T], p the row's weights; float32 or better.

    Σ p^2 - 1/n would be the same, but of a nearly uniform row hardly a digit of it is left. So this is taken
    from the weights themselves, some queries at a time, and the backward pass computes them again.
    """
    total, T, S = torch.promote_types(q.dtype, torch.float32), q.size(2), k.size(2)
    n = n_keys.to(total).view(-1, 1, T, 1)
    keys = torch.arange(S, device=q.device)
    queries = torch.arange(S - T, S, device=q.device)[:, None]
    first = torch.zeros_like(keys[0])  # a BlockMask is that of every sequence and every head

    def of_some(q, k, n, seen):
        with torch.autocast(q.device.type, enabled=False):  # it would round the logits
            s = q.to(total) @ k.to(total).mT * scale
        p = s.masked_fill(~seen, -math.inf).softmax(-1)
        return torch.where(seen, p - 1 / n, 0.0).square().sum(-1)

    found = []
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
        for start in range(0, T, QUERIES_AT_ONCE):
            some = slice(start, start + QUERIES_AT_ONCE)
            if mask is None:
                seen = keys <= queries[some]
            elif isinstance(mask, BlockMask):
                seen = mask.mask_mod(first, first, queries[some], keys)
            else:
                seen = mask[:, :, some]
            given = q[:, :, some], k, n[:, :, some], seen
            found.append(checkpoint(of_some, *given, use_reentrant=False, preserve_rng_state=False)
                         if torch.is_grad_enabled() else of_some(*given))
    return torch.cat(found, -1)


SMALLEST_GATE = 1e-30  # in the logarithm of a gate: below it a gate is as good as 0, and gets no gradient


def self_gated_rows(q, k, v, scale, mask, n_keys, gate, shape=True, spread=False):
    """row_statistics() of attention in which log(gate) is added to each token's logit with itself.

    gate [B, H, T or 1], in [0, 1]. The row is that of the other keys, joined with the token's own key by the
    log-sum-exp of both, lse = log(exp(lse_others) + exp(own)). With w = exp(own - lse), the token's weight on
    itself:

        y        = (1 - w) y_others + w v
        entropy  = (1 - w) (entropy_others - log(1 - w)) - w log w
        sum p^2  = (1 - w)^2 sum p^2_others + w^2
        spread   = (1 - w)^2 spread_others + (w - 1/n)^2 n / (n - 1)

    Statistics of whole rows would do in exact numbers, with the token's own key taken out again. But where
    the weight on it is near 1, they hold few digits of the others, or none, and a small gate makes the others
    all that is left. A token that sees no other key keeps y = v whatever its gate; its lse has log(gate).
    """
    T, total = q.size(2), torch.promote_types(q.dtype, torch.float32)
    alone = n_keys <= 1  # [T] or [B, 1, T]
    v_own = v[:, :, k.size(2) - T:]
    own = (q.to(total) * k[:, :, k.size(2) - T:].to(total)).sum(-1) * scale
    own = own + gate.to(total).clamp_min(SMALLEST_GATE).log()
    if k.size(2) == 1:
        nothing = torch.zeros_like(own)
        return v_own, RowStats(own, *([nothing] * 2 if shape else [None] * 2), nothing if spread else None)
    if mask is None:  # causal: all keys but the last, of which the first of several queries sees none
        first = int(T > 1)
        y, others = row_statistics(q[:, :, first:], k[:, :, :-1], v[:, :, :-1], scale, None,
                                   (n_keys[..., first:] - 1).clamp_min(1), shape=shape, spread=spread)
        y = F.pad(y, (0, 0, first, 0))
        others = RowStats(*(None if s is None else F.pad(s, (first, 0)) for s in others))
    else:
        y, others = row_statistics(q, k, v, scale, without_oneself(mask, alone, T), (n_keys - 1).clamp_min(1),
                                   shape=shape, spread=spread)
    log_w, log_others = F.logsigmoid(own - others.lse), F.logsigmoid(others.lse - own)
    w = torch.where(alone, 1.0, log_w.exp())
    lse = torch.where(alone, own, torch.logaddexp(own, others.lse))
    y = torch.lerp(y.to(total), v_own.to(total), w[..., None]).to(y.dtype)
    squares = None
    if spread:
        squares = (1 - w).square() * others.spread
        squares = squares + (w - 1 / n_keys).square() * n_keys / (n_keys - 1).clamp_min(1)
        squares = torch.where(alone, 0.0, squares)
    if not shape:
        return y, RowStats(lse, spread=squares)
    entropy = (1 - w) * (others.entropy - log_others) - w * log_w
    log_p2 = torch.logaddexp(2 * log_w, 2 * log_others + others.log_p2)
    return y, RowStats(lse, torch.where(alone, 0.0, entropy), torch.where(alone, 0.0, log_p2), squares)


def without_oneself(mask, alone, T):
    """A mask, bool [1 or B, 1, T, S] or a BlockMask, of all keys but the token's own.

    alone [T] or [B, 1, T]: the tokens that see no other key, and so keep their own: a softmax needs one.
    """
    if not isinstance(mask, BlockMask):
        S = mask.size(-1)
        own = torch.arange(S, device=mask.device) == torch.arange(S - T, S, device=mask.device)[:, None]
        return mask & ~own | own & alone[..., None]
    blocks = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    seen = mask.mask_mod  # blocks that are seen whole lie before the diagonal
    return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=mask.BLOCK_SIZE, seq_lengths=mask.seq_lengths,
                                    mask_mod=lambda b, h, query, key: seen(b, h, query, key)
                                    & ((key != query) | alone[query]))


def one_row(q, k, v, scale, mask):
    """row_statistics() of one query, as when decoding, from its weights: few enough to be stored."""
    total = torch.promote_types(q.dtype, torch.float32)
    s = (q @ k.mT).to(total) * scale
    hidden = s if mask is None else s.masked_fill(~mask, -math.inf)
    lse = hidden.logsumexp(-1)
    p = (hidden - lse[..., None]).exp()
    entropy = (lse - (p * s).sum(-1)).clamp_min(0)
    return p.to(v.dtype) @ v, RowStats(lse, entropy, p.square().sum(-1).log())


# ---- attention of some heads or some queries ----


def attend_in_rows(q, k, v, scale, rows, n, mask):
    """attend() of the first n heads, and of those after them in some rows alone: y of the others is 0.

    rows: [indices of rows] of each later head. q, k, v hold them, or the first n heads where no row has any.
    """
    y = F.pad(attend(q[:, :n], k[:, :n], v[:, :n], scale, mask, 0.0), (0, 0, 0, 0, 0, len(rows)))
    for head, some in enumerate(rows, n):
        if len(some) == len(q):
            y[:, head] = attend(*(t[:, head:head + 1] for t in (q, k, v)), scale, mask, 0.0)[:, 0]
        elif len(some):
            seen = mask if mask is None or len(mask) == 1 else mask[some]
            y[some, head] = attend(*(t[some, head:head + 1] for t in (q, k, v)), scale, seen, 0.0)[:, 0]
    return y


def attend_packed(q, k, v, scale, used, capacity, mask_mod, size=128):
    """Attention of the selected queries alone: used [B, H, T] -> (y [B, H, T, D], queries dropped [B, H]); 0
    where not used.

    Each head's queries are packed in order of position, and FlexAttention gets the positions; a block of
    queries reads the keys up to its last position. A head takes `capacity` queries of a sequence: later ones
    are dropped, which no earlier token can notice. mask_mod(query, key): who sees whom, by position.
    """
    B, H, T, D = q.shape
    rooms = min(math.ceil(capacity / size), -(-T // size)) * size
    # positions of used queries, in order
    place = used.int().argsort(dim=-1, descending=True, stable=True)[..., :rooms]
    count = used.sum(-1, keepdim=True)
    place = F.pad(place, (0, rooms - place.size(-1)))
    filled = torch.arange(rooms, device=q.device) < count
    blocks = torch.where(filled, place, 0).unflatten(-1, (-1, size))
    block_filled = filled.unflatten(-1, (-1, size)).any(-1)
    # how many each block of queries reads
    key_blocks = torch.where(block_filled, blocks.amax(-1) // size + 1, 0).int()
    every = torch.arange(-(-T // size), dtype=torch.int32,
                         device=q.device).expand(*key_blocks.shape, -1).contiguous()

    def packed_mask(b, h, i, j):
        return filled[b, h, i] & mask_mod(place[b, h, i], j)

    mask = BlockMask.from_kv_blocks(key_blocks, every, BLOCK_SIZE=size,
                                    seq_lengths=(rooms, T), mask_mod=packed_mask)
    packed = flex(q.gather(2, place[..., None].expand(-1, -1, -1, D)), k, v, scale, mask)[0]
    packed = torch.where(filled[..., None], packed, 0.0)
    y = torch.zeros(B, H, T, v.size(-1), dtype=packed.dtype, device=q.device)
    return y.scatter_add(2, place[..., None].expand_as(packed),
                         packed), (count.squeeze(-1) - rooms).clamp_min(0)
