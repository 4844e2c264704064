"""
Chooses the library that multiplies matrices on this machine's CPU: oneDNN where it is the faster one, with a
gradient of its own.

Who reads for a GPU need not read this file: nanoheads/kernels.py chooses, in one place.
"""

import itertools
import math
import platform

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula


def cpuinfo():
    """{field: value} of the first processor in Linux's /proc/cpuinfo; empty on other systems."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = list(itertools.takewhile(str.strip, file))
    except OSError:
        return {}
    fields = (line.partition(":") for line in first if ":" in line)
    return {name.strip(): value.strip() for name, _, value in fields}


def bfloat16_instructions():
    """The fastest that this CPU has for products in bfloat16: "amx_bf16", "avx512_bf16", or None."""
    info = cpuinfo()
    if info:
        features = info.get("flags", "").split()
    else:
        features = [name for name, is_there in torch.cpu.get_capabilities().items() if is_there]
    return next((name for name in ("amx_bf16", "avx512_bf16") if name in features), None)


def prefers_onednn():
    """Whether this CPU's large float32 products are computed by oneDNN; else PyTorch chooses, mostly MKL.

    It goes by the vendor. A measurement would come out differently on a busy machine, and the last bits of a
    run's numbers, which must be the same when it is resumed, depend on the library.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return False
    # without Linux, the system's own name of the processor: "Intel64 Family 6 Model 143 ..., GenuineIntel"
    vendor = cpuinfo().get("vendor_id") or platform.processor()
    return not ("GenuineIntel" in vendor and torch.backends.mkl.is_available())


# MKL has no AVX-512 products for CPUs of AMD, where oneDNN's, float32 too, take half the time. On one thread
# of a Zen 5 a training step without them takes 1.21 [1.17, 1.22] times as long at the tiny scale, 1.30 [1.28,
# 1.30] at nano and 1.33 [1.32, 1.41] at 124M (python tests/onednn.py --scale nano). On a Xeon with AMX a step
# of recipe=gpt2 takes 1.04 of nanoGPT's time with oneDNN's products and 0.99 with MKL's
ONEDNN = prefers_onednn()
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
