"""
Dynamic heads in a model of transformers with gates in it: its heads measured, gates and states moved as it
trains.

    insert(model, "sentinel,agency")                        lab/hub/dropin.py, which has Control too
    measure_heads(Control(model), ids)                      once: the metrics of docs/heads.md
    heads = DynamicHeads(Control(model), train, heldout, "out/x", policy=True, policy_budget=0.5)
    heads.step(step)                                        after each of your optimizer's steps

What measures, moves and logs are the other files of this folder; here such a model is shown to them as a GPT
is. transformers is not imported.
"""

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.func import functional_call
from torch.nn import functional as F

from model import Output
from nanoheads.common import UserError
from nanoheads.config import ControllerConfig, TrainConfig, controller_conflicts
from nanoheads.configurator import near
from nanoheads.mechanism import HeadControl
from nanoheads.ranks import Process
from lab.heads import controller
from lab.heads.measuring import measure


# ---- a model of transformers, as lab/heads/ sees a GPT ----

class Projection:
    """A layer's projections into heads, or out of them, under a GPT's name and in its order.

    weight: of q, k and v one below the other, or of what goes out, [C, H * D]. It is a copy that has a
    gradient of its own, so that a frozen model is measured as well; see Measured.train().
    """

    def __init__(self, module, stacked, unstacked):
        self.module, self.stacked, self.unstacked, self.copy = module, stacked, unstacked, None

    @property
    def weight(self):
        if self.copy is None:
            self.copy = self.stacked().detach().clone().requires_grad_()
        return self.copy

    def in_place(self):
        """{parameter of the model: its part of the copy}."""
        return self.unstacked(self.weight)

    def register_forward_pre_hook(self, hook):
        return self.module.register_forward_pre_hook(hook)


def as_it_is(module):
    """The Projection of a linear module that a GPT has as well."""
    return Projection(module, lambda: module.weight, lambda w: {module.weight: w})


class MeasuredLayer:
    """The Gates of a layer with the projections of its model, as the attention of a GPT's block."""

    parts = 3  # q, k, v in c_attn

    def __init__(self, gates, place):
        self.gates, attn, out = gates, place.attn, place.proj
        transposed = not isinstance(out, torch.nn.Linear)  # GPT-2's Conv1D
        self.c_proj = Projection(out, lambda: out.weight.T if transposed else out.weight,
                                 lambda w: {out.weight: w.T if transposed else w})
        H, D = gates.n_head, gates.head_size
        if hasattr(attn, "q_proj"):
            into = [attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight]
            self.c_attn = Projection(None, lambda: torch.cat(into),
                                     lambda w: dict(zip(into, w.split([len(each) for each in into]))))
        elif hasattr(attn, "query_key_value"):  # GPT-NeoX has a head's q, k and v together
            of_heads = attn.query_key_value.weight
            self.c_attn = Projection(
                None, lambda: of_heads.unflatten(0, (H, 3, D)).transpose(0, 1).flatten(0, 2),
                lambda w: {of_heads: w.unflatten(0, (3, H, D)).transpose(0, 1).flatten(0, 2)})
        else:
            whole = attn.c_attn.weight if transposed else attn.qkv_proj.weight
            self.c_attn = Projection(None, lambda: whole.T if transposed else whole,
                                     lambda w: {whole: w.T if transposed else w})

        self.copied = [self.c_attn, self.c_proj]
        if gates.n_extra:
            own = gates.constraint
            self.constraint = SimpleNamespace(gate=own.gate, c_attn=as_it_is(own.c_attn),
                                              c_proj=as_it_is(own.c_proj))
            self.copied += [self.constraint.c_attn, self.constraint.c_proj]

    def __getattr__(self, name):
        return getattr(self.gates, name)

    @property
    def gate_override(self):
        return self.gates.gate_override

    @gate_override.setter
    def gate_override(self, gate):
        self.gates.gate_override = gate


class Measured(HeadControl):
    """A model of transformers with gates in it, by its Control, as far as this folder asks a GPT.

    block_size: tokens of a text that heads are measured on.
    """

    def __init__(self, control, block_size=None):
        self.control, self.model = control, control.model
        self.layers = [MeasuredLayer(block.attn, place)
                       for block, place in zip(control.transformer.h, control.layers)]
        config = self.layers[0].config
        self.config = replace(config, block_size=min(block_size or config.block_size, config.block_size))
        self.transformer = SimpleNamespace(
            h=[SimpleNamespace(attn=layer, agency=None) for layer in self.layers],
            wte=self.model.get_input_embeddings())
        self.names = {p: name for name, p in self.model.named_parameters()}

    def set_head(self, layer, head, **how):
        """As of its Control."""
        self.control.set_head(layer, head, **how)

    @property
    def training(self):
        return self.model.training

    def eval(self):
        self.model.eval()

    def train(self, mode=True):
        """As of a module. It is called behind each measurement, so that the copies of weights go here."""
        self.model.train(mode)
        for layer in self.layers:
            for projection in layer.copied:
                projection.copy = None

    def mask_of(self, layer):
        """An object whose n_keys(positions) says how many keys each token of the last traced text saw."""
        n_keys = self.layers[layer].traces["n_keys"]
        return SimpleNamespace(n_keys=lambda positions: n_keys[positions])

    def __call__(self, x, y, traces=False):
        """The Output of x, y [B, T]; traces: those of a GPT, with the copies of weights in their place."""
        parts, traced = {}, {}
        for layer in self.layers if traces else ():
            for projection in layer.copied:
                parts.update(projection.in_place())
            layer.gates.wants_traces = True
        parts = {self.names[p]: part for p, part in parts.items()}
        try:
            logits = functional_call(self.model, parts, (x,), dict(use_cache=False)).logits
        finally:
            for layer in self.layers:
                layer.gates.wants_traces = False
        for i, layer in enumerate(self.layers if traces else ()):
            traced.update({f"blocks.{i}.{name}": t for name, t in layer.traces.items()})
            layer.gates.traces = {"n_keys": layer.traces["n_keys"]}  # the others hold the graph
        dtype = torch.promote_types(logits.dtype, torch.float32)
        loss = F.cross_entropy(logits.to(dtype).flatten(0, 1), y.flatten())
        return Output(logits, loss, {}, traced)


# ---- what a training loop calls ----

def measure_heads(control, ids):
    """{metric: [a float64 tensor [H] a layer]} of METRICS on ids [B, 1 + T], B at least 2; see docs/heads.md.

    control: the Control of a model. Constraint heads stand behind a layer's own. Raises UserError.
    """
    try:
        return measure(Measured(control), ids[:, :-1], ids[:, 1:])
    except ValueError as e:
        raise UserError(str(e)) from None


def settings(keys, config):
    """The TrainConfig of DynamicHeads from its keys, beside the GPTConfig of its gates. Raises UserError."""
    known = [f.name for f in fields(ControllerConfig) if not f.name.startswith(("prune_", "grow_"))]
    for name in keys:
        if name.startswith(("prune_", "grow_")):
            raise UserError(f"{name} changes the shapes of weights, which a model of transformers keeps: "
                            "prune.py prunes our GPT of the same weights, and mask_heads() turns heads off")
        if name not in known:
            meant = near(name, known)
            raise UserError(f"no key {name!r} of dynamic heads; " + (
                f"did you mean {meant}?" if meant else f"there are {', '.join(known)}"))
    config_of_run = TrainConfig(**{"controller_log": True, "dtype": "float32", "max_iters": 2**62, **keys})
    problems = [*config_of_run.problems(), *controller_conflicts(config, config_of_run)]
    if problems:
        raise UserError("; ".join(problems))
    return config_of_run


class DynamicHeads:
    """Measures the heads of a model every controller_interval steps, and moves gates and states by it.

    control: the Control of the model. train, heldout: 1-D token ids, of which controller_tokens and
    controller_heldout are read, in rows of block_size (None: 1,024 at most). out_dir gets heads.jsonl and
    violations.jsonl. keys: those of docs/heads.md but for pruning and growth. state: what state() gave, to go
    on from. Raises UserError.
    """

    def __init__(self, control, train, heldout, out_dir, block_size=None, state=None, **keys):
        measured = Measured(control, block_size or 1024)
        texts = dict(train=np.asarray(train), val=np.asarray(heldout))
        ranks = (0, 1)
        if dist.is_available() and dist.is_initialized():
            ranks = dist.get_rank(), dist.get_world_size()
        self.run = SimpleNamespace(
            model=measured, config=settings(keys, measured.config), optimizers=(), step=0, elapsed_s=0.0,
            dataset=SimpleNamespace(dir="the text", tokens=texts.get), out_dir=Path(out_dir), controller=None,
            process=Process(str(measured.transformer.wte.weight.device), *ranks))
        self.run.step = state["step"] if state else 0
        self.run.controller = controller.start(self.run, state)

    def step(self, step):
        """After the optimizer's step of this number, from 1: measure and move, where it is due."""
        self.run.step = step
        self.run.controller.step(self.run)

    def state(self):
        """For a checkpoint: what a later DynamicHeads of the same model goes on from."""
        return dict(step=self.run.step, controller=self.run.controller.state())
