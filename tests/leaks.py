"""
Mechanisms that look ahead or mix rows where a check of a small new model sees nothing, for test_lookahead.py.

    python train.py --mechanism=tests/leaks.py --check      # what each does wrong, but for leak_grown
"""

from typing import Literal, Optional

import torch
from torch import nn

from nanoheads.mechanism import Mechanism

KINDS = ("block", "rows", "late", "training", "evaluation", "float32", "bfloat16", "little", "grown", "drawn")


class Leak(Mechanism):
    """Each value is moved towards what the token must not know, in some way of `leak`."""

    class Options:
        leak: Optional[Literal[KINDS]] = None  # what it takes, and when

    name = "leaking"
    flag = "leak"
    modes = {f"leak_{kind}": dict(leak=kind) for kind in KINDS}

    def __init__(self, config, attn):
        super().__init__()
        self.kind = config.leak
        if self.kind == "grown":
            self.size = nn.Parameter(torch.zeros(1))

    def before_attention(self, attn, heads):
        v, T = heads.v, heads.v.size(2)
        ahead = torch.cat((v[:, :, 1:], v[:, :, -1:]), 2)  # the next token's
        if self.kind == "block" and T >= 32:  # the mean of the token's own block, where a block is whole
            n = T // 32 * 32
            means = v[:, :, :n].unflatten(2, (-1, 32)).mean(3, keepdim=True).expand(-1, -1, -1, 32, -1)
            heads.v = torch.cat((v[:, :, :n] + means.flatten(2, 3), v[:, :, n:]), 2)
        elif self.kind == "rows" and len(v) >= 3:
            heads.v = v + v.roll(2, 0)
        elif self.kind == "late" and T > 100:
            heads.v = torch.cat((v[:, :, :100], v[:, :, 100:] + ahead[:, :, 100:]), 2)
        elif self.kind == "training" and torch.is_grad_enabled():
            heads.v = v + ahead
        elif self.kind == "evaluation" and not self.training:
            heads.v = v + ahead
        elif self.kind in ("float32", "bfloat16"):
            in_it = (self.kind == "bfloat16") == torch.is_autocast_enabled(v.device.type)
            heads.v = v + ahead if in_it else v
        elif self.kind == "little":
            heads.v = v + 1e-4 * ahead
        elif self.kind == "grown":  # nothing up to 2
            heads.v = v + (self.size.abs() - 2).clamp_min(0) * ahead
            if heads.forward_pass.wants_losses:
                heads.losses["grow"] = -self.size.sum()
        elif self.kind == "drawn" and self.training:  # nothing of other tokens: noise of its own
            heads.v = v + torch.rand(v.shape, generator=GENERATOR, device=v.device)


GENERATOR = torch.Generator().manual_seed(1)  # which no seed of a step reaches
