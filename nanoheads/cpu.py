"""
What a CPU computes in its own way. Every pass over memory counts there, so norms, activations, heads and
convolutions have hand-written gradients, and matrix products go through the faster library.

nanoheads/kernels.py chooses, each at one place, and has the form for every other device: who reads for a GPU
need not read this file. B: batch, H: heads, T: queries, S: keys, D: head size.
"""

import math

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula


def eager_on_cpu(x):
    """True where these pay; compiled code fuses by itself, and bfloat16 wants float32 sums."""
    return x.is_cpu and x.dtype in (torch.float32, torch.float64) and not torch.compiler.is_compiling()


def first_derivative_only():
    """Called by a backward pass that refuses create_graph=True.

    What it saved is no function of x: a second derivative would be wrong, or drop out of a sum, unnoticed.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("this hand-written gradient cannot be differentiated again: "
                           "do without create_graph=True")


# ---- norms and activations ----

def inverse_rms(x, eps=1e-6):
    """1 / rms(x) over the last dimension [..., 1]."""
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.size(-1))
    return square.add_(eps).rsqrt_()


class CpuRMSNorm(torch.autograd.Function):
    """rms_norm with a hand-written gradient: half the time of PyTorch's own on CPU, which has no fused
    kernel.
    """

    @staticmethod
    def forward(ctx, x, eps):
        scale = inverse_rms(x, eps)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, g):
        first_derivative_only()
        y, scale = ctx.saved_tensors
        along = (g * y).mean(-1, keepdim=True)
        return torch.addcmul(g, y, along, value=-1).mul_(scale), None


class CpuSquaredReLU(torch.autograd.Function):
    """relu(x)^2 with a hand-written gradient: a third of the time on CPU."""

    @staticmethod
    def forward(ctx, x):
        r = x.clamp_min(0)
        ctx.save_for_backward(r)
        return r * r

    @staticmethod
    def backward(ctx, g):
        first_derivative_only()
        r, = ctx.saved_tensors
        return (g * r).mul_(2)


# ---- queries, keys and values ----

class CpuHeads(torch.autograd.Function):
    """heads_of() with norm and rotation, whose gradient is written where it belongs, with no copy more."""

    @staticmethod
    def forward(ctx, qkv, cos, sin, halves_swapped):
        qk = qkv[:, :, :2]
        scale = inverse_rms(qk)
        y = qk * scale
        ctx.save_for_backward(y, scale, cos, sin)
        ctx.halves_swapped = halves_swapped
        q, k = torch.addcmul(y * cos, halves_swapped(y), sin).type_as(y).transpose(1, 3).unbind(2)
        return q, k, qkv[:, :, 2].transpose(1, 2)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        first_derivative_only()
        y, scale, cos, sin = ctx.saved_tensors
        dqkv = y.new_empty(*y.shape[:2], 3, *y.shape[3:])
        for part, g in zip(dqkv.unbind(2), (dq, dk, dv)):
            part.copy_(g.transpose(1, 2))
        g = dqkv[:, :, :2]
        g = torch.addcmul(ctx.halves_swapped(g * sin), g, cos)  # turned back
        along = (g * y).mean(-1, keepdim=True)
        torch.mul(g.addcmul_(y, along, value=-1), scale, out=dqkv[:, :, :2])
        return dqkv, None, None, None


class CpuShortConvolution(torch.autograd.Function):
    """short_convolution() with a hand-written gradient: in place, and no copy for each shift."""

    @staticmethod
    def forward(ctx, x, weight, bias, first):
        ctx.save_for_backward(x, weight)
        ctx.first, y = first, x.clone()
        read, out = (t.narrow(2, first, weight.size(1)) for t in (x, y))
        out.mul_(1 + weight[0]).add_(bias)
        for i in range(1, min(len(weight), x.size(1))):
            out[:, i:].addcmul_(read[:, :-i], weight[i])
        return y

    @staticmethod
    def backward(ctx, g):
        first_derivative_only()
        x, weight = ctx.saved_tensors
        dx, dw = g.clone(), torch.zeros_like(weight)
        read, given, into = (t.narrow(2, ctx.first, weight.size(1)) for t in (x, g, dx))
        into.mul_(1 + weight[0])
        dw[0] = (given * read).sum((0, 1))
        for i in range(1, min(len(weight), x.size(1))):
            into[:, :-i].addcmul_(given[:, i:], weight[i])
            dw[i] = (given[:, i:] * read[:, :-i]).sum((0, 1))
        return dx, dw, given.sum((0, 1))[None], None


# ---- linear maps ----

# MKL has no AVX-512 products for CPUs of AMD, where oneDNN's, float32 too, take half the time
ONEDNN = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()
ONEDNN_FROM = 2**20  # multiplications from which that outweighs its longer call, 10 us


def onednn_is_faster(x, weight):
    """Whether x W' of x [..., I] and weight [O, I] is computed by oneDNN in training and evaluation."""
    return (ONEDNN and x.numel() * weight.size(0) >= ONEDNN_FROM
            and x.is_cpu and x.dtype == weight.dtype == torch.float32
            and not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu"))


def onednn_product(x, weight):
    """x W' of x [N, I] and weight [O, I], in float32."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


# PyTorch's own counter does not know it; an exported model brings a second copy of this file
if ONEDNN and torch.ops.mkldnn._linear_pointwise not in flop_registry:
    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def onednn_flops(x, weight, *_, **__):
        return 2 * math.prod(x) * weight[0]


class CpuLinear(torch.autograd.Function):
    """x W' by oneDNN: x [..., I], weight [O, I] -> [..., O]."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return onednn_product(x, weight)

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        dx = dw = None
        if torch.is_grad_enabled():  # a second derivative may be wanted: operators that have one
            return g @ weight, g.flatten(0, -2).mT @ x.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            dx = onednn_product(g, weight.mT)
        if ctx.needs_input_grad[1]:
            x, g = x.flatten(0, -2), g.flatten(0, -2)
            # the first factor is copied, as its columns are its rows: the narrower one
            narrow = g.size(1) <= x.size(1)
            dw = onednn_product(g.mT, x.mT) if narrow else onednn_product(x.mT, g.mT).mT.contiguous()
        return dx, dw
