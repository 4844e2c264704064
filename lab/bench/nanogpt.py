"""
nanoGPT's model and training step, loaded from a checkout, to be timed beside ours.

On CUDA it computes in the dtype that ours does, and is compiled where ours is. Elsewhere it computes in
float32 and is not compiled: its programs use autocast on CUDA alone, and its README says --compile=False for
a CPU.
"""

import importlib.util
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch

from nanoheads.common import UserError
from nanoheads.optim import precision
from nanoheads.timing import on_cuda


def check(path):
    """UserError unless a folder is a nanoGPT checkout."""
    if not (Path(path) / "model.py").is_file():
        raise UserError("--nanogpt must name a nanoGPT checkout (a folder with model.py): "
                        f"{path} is none; git clone https://github.com/karpathy/nanoGPT makes one")


def autocast(args):
    """The context of its forward pass."""
    kind = torch.device(args.device).type
    return precision(args.dtype, kind)[1] if kind == "cuda" else torch.autocast(kind, enabled=False)


def setting(args):
    """How it computes, for the first line, where ours computes in another way; else ""."""
    differs = not on_cuda(args) and (args.dtype != "float32" or args.compile)
    return "; nanoGPT float32, not compiled" if differs else ""


def load(path, args):
    """(its GPT of these sizes on the device, its optimizer)."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(path) / "model.py")
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # it prints what it counts
        config = module.GPTConfig(vocab_size=args.vocab_size, block_size=args.block_size,
                                  n_layer=args.n_layer, n_head=args.n_head, n_embd=args.n_embd,
                                  dropout=0.0, bias=False)
        model = module.GPT(config).to(args.device)
        kind = torch.device(args.device).type
        return model, model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), kind)


def contestant(path, args):
    """What bench.py measures: build() -> (model, its training step, decode)."""
    def build():
        model, optimizer = load(path, args)
        context = autocast(args)
        compiled = torch.compile(model) if args.compile and on_cuda(args) else model

        def step(x, y):
            with context:
                _, loss = compiled(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)  # its train.py reads the loss of every tenth step

        def decode(idx, n):
            model.eval()
            with context:
                out = model.generate(idx, n)
            model.train()
            return out
        return model, step, decode
    return build
