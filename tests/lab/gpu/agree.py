"""
Does every mechanism compute on this device what it computes on the CPU in float64?

    python -m tests.lab.gpu.agree                                   # all, eager, on this machine's GPU
    python -m tests.lab.gpu.agree --compile --jobs 8 --out agree.jsonl
    python -m tests.lab.gpu.agree plain acag sink --recipes modern --dtypes bfloat16
    python -m tests.lab.gpu.agree --quick --device cpu

The plain GPT, each entry of MECHANISMS, ALL_ON and gated scores get the same drawn weights (not those of
their neutral start) and the same tokens in float64 on the CPU, the reference, and on the device: logits,
loss, each auxiliary loss and every gradient in training, and logits after decoding with the cache, against
the reference's whole forward pass. An error is ||a - b|| / ||b||; where b is next to nothing, a thousandth of
the usual norm stands for ||b||. What is not finite never passes. The worst tensor of a row is the one with
the largest error as a multiple of what is allowed.

What is allowed:
    float32   1e-4. Products in full float32 ("highest"). On CPU the worst tensor of all models is off by
              1e-5; on another device only the order of sums differs. A wrong term shows at 1e-2 and more.
    bfloat16  4 times the error that the CPU's own bf16 autocast makes in the same tensor, or in the median
              one where that is more: a single number may be right by luck. Both round operands to 8 bits,
              so their errors are of one size. How much luck is in it was tried with weights moved by 2^-11,
              which rounds all anew: of 4,220 tensors 12 were off by twice as much, none by three times.
    tf32      a quarter of that, and never less than float32's: TF32 ("high", what training uses) has 11
              bits, an eighth of the rounding, and float32 results.
Top-k routing is no smooth function: where two logits are near, rounding chooses the other head. So routers
are made to choose as the reference did: the logit of a head that falls short is raised by as much. The share
of tokens for which a router left alone chooses otherwise is compared too ("choices", in float32 at most 1 %).
The noise of hard-concrete gates is replaced by numbers that every device makes the same.
"""

import argparse
import copy
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from unittest import mock

import torch

import model
from model import ALL_ON, GPT, MECHANISMS, RECIPES, GPTConfig, KVCache, Routing
from nanoheads.common import UserError, as_program, explain, json_safe, pick_device, writable
from tests.sameness import liven

# two blocks of FlexAttention's 128 tokens, the second cut off; heads of 16, its least
SHAPE = dict(block_size=192, vocab_size=64, n_layer=3, n_head=6, n_embd=96, seed=7)
B, T = 2, 160
PIECES = [130, 1, 1, 28]  # read one after the other when decoding: a prompt, two tokens, a longer piece
PAD = [0, 40]             # columns of padding before each row
CASES = {"plain": {}, "all_on": ALL_ON,
         "constraint_score": dict(constraint_names=["a"], constraint_gate="score"),
         **MECHANISMS}
# one for each kernel and way of gating
QUICK = ("plain", "all_on", "routing_moh", "acag", "sink", "constraint_a", "a2c_key_bias", "fox", "score_cap",
         "relative_bias", "unet_concat", "window")
# {row's dtype: (precision of matrix products, dtype of autocast)}
DTYPES = {"float32": ("highest", None), "tf32": ("high", None), "bfloat16": ("highest", torch.bfloat16)}
FLOAT32, FLOAT32_CHOICES = 1e-4, 0.01
BF16_TIMES, TF32_SHARE = 4, 0.25


# ---- inputs ----

def drawn(recipe, flags):
    """The GPT with weights that are the same everywhere, float32, on the CPU."""
    return liven(GPT(GPTConfig(**SHAPE, **flags, recipe=recipe)), std=0.1)


def placed(gpt, device):
    """The model on the device."""
    return gpt.to(device)


def batch(names, device):
    """(idx, targets, constraint targets) of [B, T]."""
    generator = torch.Generator().manual_seed(1)
    idx, targets, marks = torch.randint(SHAPE["vocab_size"], (3, B, T), generator=generator)
    targets[0, 3] = -1
    wanted = {name: ((marks + i) % 4 - 1) / 2 for i, name in enumerate(names or ())}
    return idx.to(device), targets.to(device), {name: t.to(device) for name, t in wanted.items()}


def steady_noise(t):
    """For torch.rand_like(t): the same numbers on every device, multiples of the golden ratio."""
    n = torch.arange(1, t.numel() + 1, device=t.device, dtype=torch.float64)
    return (n * 0.6180339887498949 % 1).to(t.dtype).view(t.shape)


# ---- routers that choose as the reference did ----

def routers(gpt):
    return [m for m in gpt.modules() if isinstance(m, Routing)]


@contextmanager
def watched(gpt):
    """[which routed heads are selected, bool [B, T, H]], one for each call of a router in the meantime."""
    found = []
    hooks = [router.register_forward_hook(lambda m, _, out: found.append(out[1][..., m.n_shared:]))
             for router in routers(gpt)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def force(gpt, choices, columns=slice(None)):
    """Have each router choose `choices` of these columns; none: let them choose."""
    for router, chosen in zip_longest(routers(gpt), choices):
        router.out.chosen = None if chosen is None else chosen[:, columns].to(router.out.weight.device)


def forced_linear(layer, x, linear=model.float32_linear):
    """model.float32_linear(); a router's logits are raised where another head would come before a chosen one.
    """
    logits, chosen = linear(layer, x), getattr(layer, "chosen", None)
    if chosen is None:
        return logits
    others = logits.masked_fill(chosen, -math.inf).amax(-1, keepdim=True)
    short = (others - logits + 1e-5 * (1 + others.abs())).clamp_min(0)
    return logits + torch.where(chosen & others.isfinite(), short, 0.0).detach()


# ---- what a model gives ----

def context_of(device, dtype):
    return torch.autocast(torch.device(device).type, dtype) if dtype else nullcontext()


def trained(gpt, run, device, dtype, choices):
    """{what: tensor} of a training step; run: gpt, or gpt compiled."""
    gpt.train().zero_grad(set_to_none=True)
    force(gpt, choices)
    idx, targets, wanted = batch(gpt.config.constraint_names, device)
    with torch.no_grad(), context_of(device, dtype):
        logits = run(idx).logits
    with context_of(device, dtype):
        out = run(idx, targets, constraint_targets=wanted or None)
        total = sum(out.aux.values(), out.loss)
    total.backward()
    return {"logits": logits, "loss": out.loss, **{f"aux {name}": t for name, t in out.aux.items()},
            **{f"gradient {name}": p.grad for name, p in gpt.named_parameters()}}


@torch.inference_mode()
def decoded(gpt, device, dtype, choices, pad=None):
    """Logits [B, T, V] of tokens that come in pieces; 0 in the padding."""
    gpt.eval()
    idx, _, _ = batch(None, device)
    cache, pieces = KVCache(gpt.config), []
    for piece in idx.split(PIECES, 1):
        force(gpt, choices, slice(cache.length, cache.length + piece.size(1)))
        with context_of(device, dtype):
            pieces.append(gpt.head(gpt.hidden(piece, cache, pad)))
    return without_padding(torch.cat(pieces, 1), pad)


def without_padding(logits, pad):
    if pad is None:
        return logits
    seen = torch.arange(T, device=logits.device) >= pad[:, None]
    return torch.where(seen[..., None], logits, 0.0)


class Reference:
    """What the model gives in float64 on the CPU: values {what: tensor}, and what its routers chose."""

    def __init__(self, gpt):
        gpt = copy.deepcopy(gpt).double()
        idx, targets, _ = batch(None, "cpu")
        with watched(gpt) as self.in_training, torch.no_grad():
            gpt.train()(idx, targets)
        self.values = trained(gpt, gpt, "cpu", None, [])
        gpt.eval()
        pad = torch.tensor(PAD)
        with torch.inference_mode(), watched(gpt) as self.whole:
            self.values["decoding"] = gpt(idx).logits
        with torch.inference_mode(), watched(gpt) as self.padded:
            self.values["decoding after padding"] = without_padding(gpt.head(gpt.hidden(idx, pad=pad)), pad)


def errors_of(gpt, reference, device, dtype, compiled=False):
    """{what: its error} of a model on a device."""
    if compiled:
        torch._dynamo.reset()
        found = trained(gpt, torch.compile(gpt, dynamic=False), device, dtype, reference.in_training)
    else:
        found = trained(gpt, gpt, device, dtype, reference.in_training)
        found["decoding"] = decoded(gpt, device, dtype, reference.whole)
        pad = torch.tensor(PAD, device=device)
        found["decoding after padding"] = decoded(gpt, device, dtype, reference.padded, pad)
    floors = floors_of(reference.values)
    errors = {what: error(t, reference.values[what], floors[what.split()[0]]) for what, t in found.items()}
    if not compiled and reference.in_training:
        errors["choices"] = other_choices(gpt, reference, device, dtype)
    return errors


def other_choices(gpt, reference, device, dtype):
    """Share of tokens and layers where the routers, left alone, choose other heads than the reference."""
    force(gpt, [])
    idx, targets, _ = batch(None, device)
    with torch.no_grad(), watched(gpt) as found, context_of(device, dtype):
        gpt.train()(idx, targets)
    different = [(a.cpu() != b).any(-1) for a, b in zip(found, reference.in_training, strict=True)]
    return torch.stack(different).double().mean().item()


def floors_of(values):
    """{kind: the norm below which a tensor of it counts as nothing}: 1e-3 of what the kind has on average."""
    norms = {}
    for what, t in values.items():
        if t is not None:
            norms.setdefault(what.split()[0], []).append(t.norm().item())
    return {kind: 1e-3 * math.sqrt(statistics.mean(n * n for n in each)) for kind, each in norms.items()}


def error(found, wanted, floor):
    """||found - wanted|| / ||wanted||; infinite where one is missing, of another shape or not finite."""
    if found is None and wanted is None:
        return 0.0
    if found is None or wanted is None or found.shape != wanted.shape:
        return math.inf
    far = (found.detach().cpu().double() - wanted).norm().item()
    return far / max(wanted.norm().item(), floor) if math.isfinite(far) else math.inf


def allowed(what, dtype, cpu_bf16):
    """The largest error that passes; cpu_bf16: {what: error} of the CPU's bf16 autocast."""
    least = FLOAT32_CHOICES if what == "choices" else FLOAT32
    if dtype == "float32":
        return least
    bf16 = BF16_TIMES * max(cpu_bf16[what], statistics.median(cpu_bf16.values()))
    return max(least, bf16 * (1 if dtype == "bfloat16" else TF32_SHARE))


# ---- rows ----

def rows_of(name, recipe, args):
    """Yield a row for each of args.dtypes; one with an error where there is nothing to compare."""
    kind = dict(name=name, recipe=recipe, compiled=args.compile)
    try:
        gpt = drawn(recipe, CASES[name])
        reference = Reference(gpt)
        cpu_bf16 = errors_of(gpt, reference, "cpu", torch.bfloat16)
        gpt = placed(gpt, args.device)
    except Exception as e:
        yield {**kind, "passed": False, "error": in_a_line(e)}
        return
    for dtype in args.dtypes:
        began, precision = time.perf_counter(), DTYPES[dtype]
        try:
            torch.set_float32_matmul_precision(precision[0])
            errors = errors_of(gpt, reference, args.device, precision[1], args.compile)
            row = judged(errors, dtype, cpu_bf16)
        except Exception as e:
            row = dict(passed=False, error=in_a_line(e))
        yield {**kind, "dtype": dtype, **row, "seconds": round(time.perf_counter() - began, 2)}


def judged(errors, dtype, cpu_bf16):
    """What a row says of {what: error}: the worst tensor, and the largest error of each kind."""
    limits = {what: allowed(what, dtype, cpu_bf16) for what in errors}
    worst = max(errors, key=lambda what: errors[what] / limits[what])
    largest = {}
    for what, far in errors.items():
        kind = what.split()[0]
        largest[kind] = max(largest.get(kind, 0.0), far)
    return dict(passed=errors[worst] <= limits[worst], worst=worst, off=errors[worst], allowed=limits[worst],
                compared=len(errors), largest=largest)


def in_a_line(e):
    """An exception in one line."""
    return (explain(e) or f"{type(e).__name__}: {' '.join(str(e).split())}")[:300]


def keep(row, args):
    """Print a row, and append it to args.out."""
    result = row.get("error") or f"{row['off']:.1e} of {row['allowed']:.1e} allowed, {row['worst']}"
    print(f"{row['name']:<24}{row['recipe']:<8}{row.get('dtype', ''):<10}"
          f"{'compiled' if row['compiled'] else 'eager':<10}{'ok' if row['passed'] else 'FAILED':<8}{result}",
          flush=True)
    if args.out:
        row = {**row, "machine": args.machine, "torch": torch.__version__}
        with open(args.out, "a") as file:  # one write: several processes may append
            file.write(json.dumps(json_safe(row)) + "\n")
    return row["passed"]


def in_turn(args):
    """Every case in this process; how many rows failed."""
    failed = 0
    with mock.patch.object(model, "float32_linear", forced_linear), \
            mock.patch.object(torch, "rand_like", steady_noise):
        for name in args.names:
            for recipe in args.recipes:
                failed += sum(not keep(row, args) for row in rows_of(name, recipe, args))
    return failed


def at_once(args, argv):
    """A process for each name, args.jobs at once: a crash takes no other name with it. How many failed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}

    def one(name):
        command = [sys.executable, "-m", "tests.lab.gpu.agree", name, *argv, "--jobs", "1"]
        code = subprocess.run(command, env=env).returncode
        if code not in (0, 1, 130, -signal.SIGINT):
            keep(dict(name=name, recipe="", compiled=args.compile, passed=False,
                      error=f"its process ended with {code}"), args)
        return code != 0

    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(one, name) for name in args.names]
        try:
            return sum(job.result() for job in jobs)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# ---- command line ----

def arguments(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; default all")
    p.add_argument("--quick", action="store_true", help=f"these alone: {', '.join(QUICK)}")
    p.add_argument("--recipes", nargs="+", choices=sorted(RECIPES), default=sorted(RECIPES))
    p.add_argument("--dtypes", nargs="+", choices=list(DTYPES), help="default all, on cpu without tf32")
    p.add_argument("--compile", action="store_true", help="the training step compiled; no decoding")
    p.add_argument("--device", default="auto")
    p.add_argument("--jobs", type=int, default=1, help="processes at once, each for one name")
    p.add_argument("--out", help="append every row to this file, JSON lines")
    args = p.parse_args(argv)
    args.names = args.names or list(QUICK if args.quick else CASES)
    return args


def check(args):
    """Fill in what follows from the device. Raises UserError for the first argument that makes no sense."""
    if unknown := sorted({*args.names} - {*CASES}):
        raise UserError(f"no {', '.join(unknown)}; there are {', '.join(CASES)}")
    if args.jobs < 1:
        raise UserError("--jobs must be at least 1")
    args.device = pick_device(args.device)
    on_cuda = args.device.startswith("cuda")
    args.machine = torch.cuda.get_device_name(args.device) if on_cuda else args.device
    args.dtypes = args.dtypes or [dtype for dtype in DTYPES if dtype != "tf32" or on_cuda]
    args.out = args.out and str(writable(args.out, "--out"))


@as_program("agree")
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = arguments(argv)
    check(args)
    failed = in_turn(args) if args.jobs == 1 else at_once(args, [a for a in argv if a not in args.names])
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
