"""
Mechanisms whose verdict is known beforehand, to try a comparison on: config/studies/controls.py.

    python train.py --mechanism=tests/controls.py --check      # names what each does wrong
"""

from typing import Literal, Optional

import torch
from torch import nn

from nanoheads.mechanism import Mechanism, flag


class Control(Mechanism):
    """Nothing that helps: noise on what heads give, parameters without effect, a look ahead."""

    class Options:
        control: Optional[Literal["noise", "dead", "leak"]] = None  # what is done
        control_noise: float = flag(1.0, at_least=0)                # its deviation, in that of the output

    name = "controls"
    flag = "control"
    modes = {"control_noise": dict(control="noise"), "control_dead": dict(control="dead"),
             "control_leak": dict(control="leak")}
    neutral = {"control_noise": {"control_noise": 0.0}, "control_dead": {}}

    no_effect_because = "parameters without effect are the control that they are to be"

    def __init__(self, config, attn):
        super().__init__()
        self.kind, self.noise = config.control, config.control_noise
        if self.kind == "dead":
            self.unused = nn.Parameter(torch.zeros(config.n_embd, config.n_embd))

    def before_projection(self, attn, heads):
        if self.kind == "leak":  # half of the next token's input
            heads.x = heads.x + 0.5 * torch.cat((heads.x[:, 1:], heads.x[:, -1:]), 1)
        elif self.kind == "dead":
            heads.x = heads.x + 0 * self.unused.sum()

    def after_attention(self, attn, heads):
        if self.kind == "noise" and self.training:
            size = heads.y.detach().square().mean(-1, keepdim=True).sqrt()
            heads.y = heads.y + self.noise * size * torch.randn_like(heads.y)
