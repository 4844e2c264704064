"""
The optimizers, AdamW and Muon: which parameters each takes, and at which rates. At the end is what else a
training step needs: precision, compilation, seeds, moments.

A new optimizer is a class, as Configured describes it, and a line of OPTIMIZERS.
"""

import functools
import inspect
import math
import sys
import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from model import MECHANISM_CLASSES
from nanoheads.common import UserError, call_without_compiler
from nanoheads.cpu import bfloat16_instructions
from nanoheads.kernels import NO_TRITON, Linear
from nanoheads.log import MAIN_RATE
from nanoheads.mechanism import Mechanism, flag

# ---- what a parameter is to an optimizer ----

class Role(NamedTuple):
    """What a parameter is to an optimizer."""
    name: str         # its name in the model
    kind: str         # "matrix" of a block, "embedding", "head" (the output head) or "other"
    rate: str         # the key of the peak learning rate that it has where AdamW trains it
    stacked: object   # of a matrix: how many matrices are stacked in it, see Linear
    decays: bool      # whether weight decay acts on it
    added: bool       # whether a mechanism adds it to the plain GPT


# name of a mechanism between blocks that has a rate of its own -> the key of that rate
OWN_RATES = {"fuse": "skip_lr"}


def roles(model):
    """{parameter: its Role} of a GPT, in the order of model.named_parameters().

    Only matrices decay: a gate, a norm or a bias has no reason to go to zero. Of a mechanism the matrices of
    its layers decay, and its own parameters do not, whatever their shape.
    """
    outside_layers = {name for cls in MECHANISM_CLASSES for name in cls.model_modules(model.config)}
    added = set()       # names of all parameters of mechanisms
    never_decay = set()  # names of those that are their own, and of no layer in them
    kinds, stacked = {model.lm_head.weight: "head"}, {}
    for path, module in model.named_modules():
        if isinstance(module, Mechanism) or path in outside_layers:
            added.update(f"{path}.{name}" for name, _ in module.named_parameters())
        if isinstance(module, Mechanism):
            never_decay.update(f"{path}.{name}" for name, _ in own_parameters(module))
        if isinstance(module, torch.nn.Embedding):  # also one that shares its weight with the head
            kinds[module.weight] = "embedding"
        if isinstance(module, Linear) and module.stacked:
            kinds[module.weight], stacked[module.weight] = "matrix", module.stacked
    model_roles = {}
    for name, p in model.named_parameters():
        kind, rate = kinds.get(p, "other"), MAIN_RATE
        if name in added:
            rate = "mechanism_lr"
        if kind == "embedding":
            rate = "embed_lr"
        rate = OWN_RATES.get(name.split(".")[0], rate)
        decays = p.dim() >= 2 and name not in never_decay
        model_roles[p] = Role(name, kind, rate, stacked.get(p), decays, name in added)
    return model_roles


def own_parameters(mechanism):
    """Yield (name, parameter) of a mechanism's own, also in a list or dict of them, not of layers in it."""
    yield from mechanism.named_parameters(recurse=False)
    for name, child in mechanism.named_children():
        if isinstance(child, (torch.nn.ParameterList, torch.nn.ParameterDict)):
            yield from child.named_parameters(prefix=name)


def added_parameters(model):
    """Names of the parameters that mechanisms add to the plain GPT, layers inside them included."""
    return {role.name for role in roles(model).values() if role.added}


# ---- AdamW and Muon ----

class Configured:
    """What a class of OPTIMIZERS has beside its step()."""

    kinds = ()        # the kinds of parameters that it trains, see Role; AdamW trains all others
    rate = None       # the key of their peak learning rate
    tuned = ()        # its keys that a search for the best rates varies
    # defaults of keys of TrainConfig with this optimizer, and that of embed_lr as a multiple of adamw_lr
    values = dict(adamw_lr=1e-3, min_lr=1e-4, beta2=0.95, weight_decay=0.1, grad_clip=1.0, schedule="cosine",
                  warmup_iters=100)
    embed_factor = 1

    class Options:
        """Its flags, which TrainConfig inherits: annotated fields, named after it."""

    def __init_subclass__(cls):
        cls.Options = dataclass(cls.Options)

    @classmethod
    def make(cls, parameters, config, rank, world, compiled):
        """An optimizer of {parameter: its Role} for a TrainConfig in which every key has its value.

        rank, world: the number of this process and how many there are, to share work. compiled: whether a
        step may be compiled.
        """
        raise NotImplementedError

    def moments(self, p, group):
        """{name in the state of a parameter of a group: its shape}, by which a loaded state is checked."""
        raise NotImplementedError


for method in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
    call_without_compiler(getattr(torch.optim.Optimizer, method))


class AdamW(Configured, torch.optim.AdamW):
    """PyTorch's AdamW. It trains what no other optimizer takes, so its rates and betas are keys of every run.
    """

    # without the decorator that imports torch's compiler
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))

    @classmethod
    def make(cls, parameters, config, rank, world, compiled):
        # groups go by the keys of rates, not by their values, which a resumed run may change
        groups = {}
        for p, role in parameters.items():
            group = dict(params=[], lr=getattr(config, role.rate) or config.mechanism_lr,
                         weight_decay=config.weight_decay if role.decays else 0.0)
            groups.setdefault((role.rate, role.decays), group)["params"].append(p)
        fused = next(iter(parameters)).device.type in ("cuda", "cpu")
        return cls(list(groups.values()), betas=(config.beta1, config.beta2), fused=fused)

    def moments(self, p, group):
        return dict(step=(), exp_avg=p.shape, exp_avg_sq=p.shape)


# The first four quintics of Polar Express (Amsel et al. 2025, arXiv 2505.16932), as (a, b, c) of
# ax + bx^3 + cx^5. As they are, a singular value that rounding puts a little above 1 diverges. So, as in the
# paper, all but the last are stretched by MARGIN, and so is the norm. Singular values above 0.1 % of the
# matrix's norm come out between 0.4 and 1.6. The original Muon takes (3.4445, -4.7750, 2.0315) five times.
# On Shakespeare's characters these four give 1.864 nats, four of the original 1.881 (2026-11-21, 250 steps at
# the sizes of config/shakespeare_cpu.py, three seeds).
MARGIN = 1.02
STRETCHED = ((8.28721, -23.59589, 17.30039), (4.10706, -2.94785, 0.54484), (3.94869, -2.90890, 0.55182))
QUINTICS = [(a / MARGIN, b / MARGIN**3, c / MARGIN**5) for a, b, c in STRETCHED]
QUINTICS += [(3.31842, -2.48849, 0.51005)]


def orthogonalise(G, low_precision):
    """The nearest semi-orthogonal matrices to G [n, r, c], r <= c, as exactly as Muon needs them.

    A step maps X to (aI + bA + cA^2) X with A = XX', which moves every singular value towards 1. In low
    precision, which is bf16, each step is computed so. For wide matrices in float32 the steps multiply r x r
    polynomials of A alone, and X is multiplied once at the end, in half the time for an MLP's matrices.
    """
    X = G.float()
    X = X / (MARGIN * X.norm(dim=(-2, -1), keepdim=True)).clamp_min(1e-7)
    if low_precision:
        X = X.bfloat16()
    if low_precision or G.size(-1) < 2 * G.size(-2):
        for a, b, c in QUINTICS:
            A = X @ X.mT
            X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
        return X.to(G.dtype)
    A = X @ X.mT
    P = total = quintic(A, *QUINTICS[0])
    for coefficients in QUINTICS[1:]:
        A = P @ A @ P
        P = quintic(A, *coefficients)
        total = P @ total
    return (total @ X).to(G.dtype)


@functools.cache
def cpu_multiplies_bfloat16():
    """Whether this CPU has instructions for products in bfloat16."""
    return bfloat16_instructions() is not None


def in_low_precision(updates):
    """Whether matrices [n, r, c] are orthogonalised in bf16: on a GPU always, and on a CPU where that is
    faster. There it takes half the time at r = 128, and as much as in float32 at 64 and 96.
    """
    return updates.is_cuda or (updates.size(1) >= 128 and updates.device.type == "cpu"
                               and cpu_multiplies_bfloat16())


def quintic(A, a, b, c):
    """aI + bA + cA^2, for A [n, r, r]."""
    P = torch.baddbmm(A, A, A, beta=b, alpha=c)
    P.diagonal(dim1=-2, dim2=-1).add_(a)
    return P


def even_rows(updates, squares, beta2, transposed):
    """NorMuon (Li et al. 2025, arXiv 2510.05491): in orthogonal updates [n, r, c] the row of each output is
    divided by the root of a moving average of its mean square. The norm of each matrix stays what it was.

    squares: these averages, [r, 1] for each matrix, which are updated in place. transposed: whether updates
    and squares are, so that the outputs are columns.
    """
    now = updates.square().mean(-2 if transposed else -1, keepdim=True)
    past = torch.stack(squares)
    past = torch.where(past > 0, past.lerp(now, 1 - beta2), now)  # a new row has no average yet
    torch._foreach_copy_(squares, past.unbind())
    scale = past.clamp_min(1e-20).rsqrt()
    after = (now * scale.square()).sum((-2, -1), keepdim=True)
    norm = now.sum((-2, -1), keepdim=True) / after.clamp_min(1e-20)
    return updates * (scale * norm.sqrt())


def matrices_in(t, slices):
    """The matrices stacked in t by rows. slices: how many, or their heights in proportion."""
    if isinstance(slices, int):
        return t.chunk(slices)
    return t.split([len(t) * height // sum(slices) for height in slices])


class Muon(Configured, torch.optim.Optimizer):
    """Momentum, then the nearest orthogonal matrix, as the update (Jordan et al. 2024).

    It differs from torch.optim.Muon in four ways:
    - With beta2 above 0 the rows of an update are made even, see even_rows().
    - A parameter may be several matrices stacked by rows, such as q, k and v in one projection. matrices:
      (parameter, number of slices, or their heights in proportion).
    - All slices of one shape are orthogonalised in one batched call, which saves time in small models.
    - Each of several ranks orthogonalises a share of a shape, and sends it while it works on the next shape.
    compiled: orthogonalise by torch.compile, with a graph for each shape.
    """
    kinds, rate, tuned = ("matrix",), "muon_lr", ("muon_lr", "muon_momentum")
    # tuned on Shakespeare's characters, in runs of 250 and 300 steps (2026-11-21)
    values = dict(adamw_lr=4e-3, min_lr=0.0, beta2=0.95, weight_decay=0.0, grad_clip=0.0,
                  schedule="trapezoid", warmup_iters=0)
    embed_factor = 5

    class Options:
        muon_lr: float = flag(
            0.02, "Muon's peak learning rate", above=0,
            section="muon: trains the blocks' matrices with optimizer=muon")
        muon_momentum: float = flag(0.95, "Muon's momentum", at_least=0, below=1)
        muon_beta2: float = flag(
            0.95, "NorMuon: weight of the past in the mean square of each output's updates, by which Muon "
                  "divides them; 0: it does not divide", at_least=0, below=1)

    # a copy of an optimizer does not get its attributes, so that it takes these and does all of the work
    rank, world, orthogonalise = 0, 1, staticmethod(orthogonalise)

    def __init__(self, matrices, lr=0.02, momentum=0.95, weight_decay=0.0, beta2=0.0, rank=0, world=1,
                 compiled=False):
        groups = [dict(params=[p for p, n in matrices if n == slices], slices=slices)
                  for slices in sorted({n for _, n in matrices}, key=str)]
        super().__init__(groups, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, beta2=beta2))
        self.rank, self.world = rank, world
        if compiled:
            self.orthogonalise = torch.compile(orthogonalise, dynamic=False)

    @classmethod
    def make(cls, parameters, config, rank, world, compiled):
        matrices = [(p, role.stacked) for p, role in parameters.items()]
        return cls(matrices, config.muon_lr, config.muon_momentum, config.weight_decay, config.muon_beta2,
                   rank, world, compiled)

    def moments(self, p, group):
        return dict(momentum=p.shape, **(dict(row_square=p[:, :1].shape) if group["beta2"] else {}))

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        by_shape = {}  # {(shape, transposed, beta2): [(weight, update, squares, step size) of each slice]}
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            if not params:
                continue
            for p in params:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                if group["beta2"] and "row_square" not in state:
                    state["row_square"] = torch.zeros_like(p[:, :1])
            grads = [p.grad for p in params]
            buffers = [self.state[p]["momentum"] for p in params]
            torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
            nesterov = torch._foreach_lerp(grads, buffers, group["momentum"])
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            for p, updates in zip(params, nesterov):
                squares = self.state[p]["row_square"] if group["beta2"] else p[:, :0]
                stacks = (matrices_in(t, group["slices"]) for t in (p, updates, squares))
                for weight, update, square in zip(*stacks):
                    rows, cols = weight.shape
                    # so that a step changes the output of a matrix of any shape as much per unit of input
                    step_size = -group["lr"] * math.sqrt(max(1.0, rows / cols))
                    transposed = rows > cols  # the Gram matrix of a transposed tall matrix is smaller
                    if transposed:
                        weight, update, square = weight.mT, update.mT, square.mT
                    key = weight.shape, transposed, group["beta2"]
                    by_shape.setdefault(key, []).append((weight, update, square, step_size))
        pending = []  # for each entry of by_shape a function that returns the orthogonal matrices
        for slices in by_shape.values():
            updates = torch.stack([update for _, update, *_ in slices])
            low_precision = in_low_precision(updates)
            pending.append(self.shared(updates) if self.world > 1 else
                           functools.partial(self.orthogonalise, updates, low_precision))
        for ((_, transposed, beta2), slices), orthogonal in zip(by_shape.items(), pending):
            updates = orthogonal()
            if beta2:
                updates = even_rows(updates, [square for _, _, square, _ in slices], beta2, transposed)
            for (weight, *_, step_size), update in zip(slices, updates):
                weight.add_(update, alpha=step_size)
        return loss

    def shared(self, updates):
        """A function that waits for and returns the orthogonal matrices of updates [n, r, c], of which this
        rank computes one of `world` shares.
        """
        size = -(-len(updates) // self.world)
        share = updates[self.rank * size:(self.rank + 1) * size]
        low_precision = in_low_precision(updates)
        dtype = torch.bfloat16 if low_precision else updates.dtype  # bf16 holds the values exactly
        orthogonal = updates.new_zeros(size, *updates.shape[1:], dtype=dtype)
        if len(share):
            orthogonal[:len(share)] = self.orthogonalise(share, low_precision)
        gathered = orthogonal.new_empty(self.world * size, *updates.shape[1:])
        work = dist.all_gather(list(gathered.chunk(self.world)), orthogonal, async_op=True)

        def wait():
            work.wait()
            return gathered[:len(updates)].to(updates.dtype)
        return wait


OPTIMIZERS = {"adamw": AdamW, "muon": Muon}  # by the names that `optimizer` chooses from


def make_optimizers(model, config, rank=0, world=1, compiled=False):
    """The optimizers of a model: the one that a TrainConfig chooses for its kinds, AdamW for the rest.

    Learning rates are peaks, which each group keeps as its peak_lr. rank, world, compiled: see
    Configured.make().
    """
    chosen, model_roles = OPTIMIZERS[config.optimizer], roles(model)
    of_chosen = {p: role for p, role in model_roles.items() if role.kind in chosen.kinds}
    rest = {p: role for p, role in model_roles.items() if role.kind not in chosen.kinds}
    optimizers = [cls.make(parameters, config, rank, world, compiled)
                  for cls, parameters in ((chosen, of_chosen), (AdamW, rest)) if parameters]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["peak_lr"] = group["lr"]
    return optimizers


# ---- learning rates ----

# the keys of all peak learning rates, of which skip_lr may be None
PEAK_RATES = (*(cls.rate for cls in OPTIMIZERS.values() if cls.rate), MAIN_RATE, "embed_lr", "mechanism_lr",
              "skip_lr")
# key that a search for the best rates varies -> the keys that change with it: min_lr must not exceed the main
# rate
TUNED = {**{key: (key,) for cls in OPTIMIZERS.values() for key in cls.tuned},
         MAIN_RATE: (MAIN_RATE, "min_lr"), "embed_lr": ("embed_lr",), "mechanism_lr": ("mechanism_lr",)}
# the keys that determine the learning rate of a step, see lr_multiplier()
SCHEDULE = (MAIN_RATE, "min_lr", "max_iters", "lr_decay_iters", "warmup_iters", "schedule", "decay_frac")


def rate_of(role, optimizer):
    """The key of the peak learning rate of a parameter with this Role, with an optimizer of this name."""
    cls = OPTIMIZERS[optimizer]
    return cls.rate if role.kind in cls.kinds else role.rate


def keys_of_rates(config):
    """The keys of a run's peak learning rates: the main one and the optimizer's own."""
    return [key for key in (MAIN_RATE, OPTIMIZERS[config.optimizer].rate) if key]


def rates_at(config, step):
    """{key: learning rate} in the step of this number, of keys_of_rates()."""
    return {key: getattr(config, key) * lr_multiplier(step, config) for key in keys_of_rates(config)}


def lr_multiplier(step, config):
    """The factor on every learning rate at `step`, from 0 to 1: linear warm-up, then what schedule says."""
    low, end = config.min_lr / config.adamw_lr, config.lr_decay_iters or config.max_iters
    if step < config.warmup_iters:
        return (step + 1) / (config.warmup_iters + 1)
    if config.schedule == "constant":
        return 1.0
    if step >= end:
        return low
    if config.schedule == "cosine":
        done = (step - config.warmup_iters) / (end - config.warmup_iters)
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
    left = (end - step) / (config.decay_frac * end)  # trapezoid: stable, then down in a straight line
    return low + (1 - low) * min(1.0, left)


# ---- what else a training step needs ----

def precision(dtype, kind):
    """(float32 | bfloat16 | float16, the autocast context for it) on a kind of device; dtype may be auto."""
    if dtype == "auto" and kind == "cuda":
        dtype = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    elif dtype == "auto":  # also on CPUs with bfloat16, so that a study's result is the same on all machines
        dtype = "float32"
    return dtype, torch.autocast(kind, getattr(torch, dtype)) if dtype != "float32" else nullcontext()


def check_precision(dtype, device):
    """UserError where a Mac's GPU cannot train in a dtype, which depends on the GPU, macOS and PyTorch."""
    if dtype == "float32" or torch.device(device).type != "mps":
        return
    try:
        a = torch.ones(8, 8, device=device, dtype=getattr(torch, dtype))
        works = (a @ a).float().eq(8).all().item()
        if dtype == "float16":
            works = works and scaler_gives_back(device)
        why = "its numbers are wrong"
    except (RuntimeError, TypeError) as e:
        works, why = False, str(e).splitlines()[0][:120]
    if not works:
        raise UserError(f"dtype={dtype} does not work on this device, {device} ({why}): use --dtype=float32")


def scaler_gives_back(device):
    """Whether a gradient of 1 is 1 again after the loss was scaled, as for float16, and unscaled."""
    weight = torch.zeros(8, device=device, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler(torch.device(device).type)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    return weight.grad.eq(1).all().item()


def compiles(config, kind):
    """Whether a run's model is compiled on a kind of device; with compile=None on CUDA, but not on Windows.
    """
    if config.compile is None:
        return kind == "cuda" and sys.platform != "win32"
    return config.compile


def check_compile(config, kind):
    """UserError where torch.compile is asked for and has no Triton to compile with for a GPU on Windows."""
    if config.compile and kind == "cuda" and NO_TRITON:
        raise UserError("compile=True compiles for a GPU with Triton, which PyTorch for Windows does not "
                        "bring: pip install triton-windows, or --compile=False")


def note_on_compile(config, kind):
    """A line that says why a run on a GPU is not compiled although compile is None; else None."""
    if config.compile is not None:
        return None
    if kind == "mps":
        return ("torch.compile is off on a Mac's GPU, where PyTorch calls it a prototype; "
                "--compile=True tries it")
    if kind == "cuda" and NO_TRITON:
        return ("torch.compile and FlexAttention's kernels are off: PyTorch for Windows brings no Triton "
                "(pip install triton-windows)")
    if kind == "cuda" and sys.platform == "win32":
        return "torch.compile is off on Windows; --compile=True compiles with the Triton that is installed"


# time of a step with dtype=bfloat16 and compile=True, as a share of that in float32: docs/results/speed.md
BFLOAT16_TIMES = {"amx_bf16": "about half", "avx512_bf16": "0.7 to 0.9 of"}
LONG_RUN = 3e13  # floating-point operations, some five minutes: a shorter run ends before compiling has paid
LARGE_MODEL = 5_000_000  # parameters: with either a step of one with 0.8 million took more time, not less


def note_on_bfloat16(config, kind, model, tokens):
    """A line that says what bfloat16 would gain on this CPU; None where it would gain nothing, or a dtype was
    chosen. tokens: how many the run still trains on.
    """
    if kind != "cpu" or config.dtype != "auto" or tokens * model.flops_per_token() < LONG_RUN:
        return None
    instructions = bfloat16_instructions()
    if instructions is None or model.num_params() < LARGE_MODEL:
        return None
    return (f"this CPU has {instructions}: where it was measured a step took {BFLOAT16_TIMES[instructions]} "
            "the time with --dtype=bfloat16 --compile=True; the default on every CPU is float32, so that "
            "verdicts do not depend on the machine")


def seed_step(kind, *key):
    """Seed all randomness of a step by `key`, so that a resumed run draws the same dropout masks."""
    seed = zlib.crc32(repr(key).encode())
    torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every backend, and takes 0.1 ms
    if kind != "cpu":
        getattr(torch, kind).manual_seed(seed)


CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile that replay a step's kernels


def carry_moments(before, after):
    """Give the new optimizers `after` the moments that those `before` have of the same parameters."""
    moments = {p: state for optimizer in before for p, state in optimizer.state.items()}
    for optimizer in after:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p in moments:
                optimizer.state[p] = moments[p]


def load_moments(optimizers, saved, path):
    """Load the saved moments into optimizers; rates, betas and decay stay those of the config.

    UserError where they do not fit. PyTorch itself matches moments and parameters by their order alone. A
    fused step raises no error for moments of a wrong shape, and writes beyond the end of small ones.
    """
    try:
        if len(optimizers) != len(saved):
            raise ValueError(f"{len(saved)} optimizers there, {len(optimizers)} here")
        for optimizer, state in zip(optimizers, saved):
            settings = [{key: value for key, value in group.items() if key != "params"}
                        for group in optimizer.param_groups]
            optimizer.load_state_dict(state)
            for group, values in zip(optimizer.param_groups, settings):
                group.update(values)
                for p in group["params"]:
                    check_moments(optimizer.state.get(p), optimizer.moments(p, group))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as e:
        why = " ".join(str(e).split())[:120]
        raise UserError(f"{path}: its optimizer state does not fit this config ({why})") from None


def check_moments(moments, shapes):
    """ValueError where a parameter's moments have other shapes than {name: shape}, or are not finite."""
    for name, shape in shapes.items() if moments else ():
        if name not in moments or moments[name].shape != shape:
            there = f"has {list(moments[name].shape)}" if name in moments else "is missing"
            raise ValueError(f"{name} must have the shape {list(shape)}, and {there}")
        if not moments[name].isfinite().all():
            raise ValueError(f"{name} holds NaN or infinities")
