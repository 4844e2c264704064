"""Optimizers and the learning-rate schedule: AdamW, Muon for the blocks' matrices, and one multiplier over time."""

import math

import torch

# The first four quintics of Polar Express (Amsel et al. 2025, arXiv 2505.16932), as (a, b, c) of ax + bx^3 + cx^5.
# Alone they throw a singular value that rounding has put a little above 1 out to infinity, so, like the paper, we
# leave room: all but the last are stretched by MARGIN, and so is the norm. Singular values above 0.1 % of the
# matrix's norm come out between 0.4 and 1.6. Muon's own choice is five times the same (3.4445, -4.7750, 2.0315);
# these four train better at 4/5 of the cost (docs/log.md).
MARGIN = 1.02
QUINTICS = [(a / MARGIN, b / MARGIN**3, c / MARGIN**5) for a, b, c in
            ((8.28721, -23.59589, 17.30039), (4.10706, -2.94785, 0.54484), (3.94869, -2.90890, 0.55182))] + [(3.31842, -2.48849, 0.51005)]


def orthogonalise(G, low_precision):
    """The nearest semi-orthogonal matrices to G [n, r, c], r <= c, as nearly as Muon needs.

    A step maps X to (aI + bA + cA^2) X with A = XX', which pulls every singular value towards 1. In
    low precision (bf16, for CUDA) step by step. Wide matrices in float32 go on A alone, and X is multiplied
    once at the end: the same polynomial in r x r products, half the time for an MLP's matrices.
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


def quintic(A, a, b, c):
    """aI + bA + cA^2, for A [n, r, r]."""
    P = torch.baddbmm(A, A, A, beta=b, alpha=c)
    P.diagonal(dim1=-2, dim2=-1).add_(a)
    return P


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest orthogonal matrix, as the update (Jordan et al. 2024).

    Like torch.optim.Muon, with two differences: a parameter may be several matrices stacked by rows (q, k
    and v in one projection), given as (parameter, number of slices), and all slices of one shape are
    orthogonalised in one batched call, which is where the time goes in small models.
    """

    def __init__(self, matrices, lr=0.02, momentum=0.95, weight_decay=0.0):
        super().__init__([dict(params=[p for p, n in matrices if n == s], slices=s) for s in sorted({n for _, n in matrices})],
                         dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        by_shape = {}
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            for p in params:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            grads, buffers = [p.grad for p in params], [self.state[p]["momentum"] for p in params]
            if not params:
                continue
            torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
            nesterov = torch._foreach_lerp(grads, buffers, group["momentum"])
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            for p, u in zip(params, nesterov):
                for weight, update in zip(p.chunk(group["slices"]), u.chunk(group["slices"])):
                    rows, cols = weight.shape
                    step = -group["lr"] * math.sqrt(max(1.0, rows / cols))  # the same change of output per unit of input
                    if rows > cols:  # orthogonalise lying down: the Gram matrix is then the small one
                        weight, update = weight.mT, update.mT
                    by_shape.setdefault(weight.shape, []).append((weight, update, step))
        for todo in by_shape.values():
            for (weight, _, step), update in zip(todo, orthogonalise(torch.stack([u for _, u, _ in todo]), todo[0][0].is_cuda)):
                weight.add_(update, alpha=step)
        return loss


def lr_multiplier(step, config):
    """The factor on every learning rate at `step`, from 0 to 1: linear warm-up, then cosine or trapezoid."""
    low, end = config.min_lr / config.lr, config.lr_decay_iters or config.max_iters
    if step < config.warmup_iters:
        return (step + 1) / (config.warmup_iters + 1)
    if step >= end:
        return low
    if config.schedule == "cosine":
        done = (step - config.warmup_iters) / (end - config.warmup_iters)
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
    left = (end - step) / (config.decay_frac * end)  # trapezoid: stable, then down in a straight line
    return low + (1 - low) * min(1.0, left)


def make_optimizers(model, config):
    """[AdamW] or [Muon, AdamW]: Muon takes the blocks' matrices, AdamW embeddings, head, biases, norms and gates.

    Only matrices decay: a gate, a norm or a bias has no reason to go to zero. Learning rates are peaks.
    """
    matrices = model.block_matrices() if config.optimizer == "muon" else []
    taken = {id(p) for p, _ in matrices}
    no_decay = model.no_decay()
    groups = {}  # by role, not by value: the same groups whatever the rates, so that a resumed run may change them
    for name, p in model.named_parameters():
        if id(p) not in taken:
            embeds = "wte" in name or "wpe" in name
            decays = p.dim() >= 2 and name not in no_decay
            group = dict(params=[], lr=config.embed_lr if embeds else config.lr, weight_decay=config.weight_decay if decays else 0.0)
            groups.setdefault((embeds, decays), group)["params"].append(p)
    device = next(model.parameters()).device.type
    adamw = torch.optim.AdamW(list(groups.values()), betas=(config.beta1, config.beta2), fused=device in ("cuda", "cpu"))
    if not matrices:
        return [adamw]
    return [Muon(matrices, config.muon_lr, config.muon_momentum, config.weight_decay), adamw]
