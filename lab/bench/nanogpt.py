"""nanoGPT's model beside ours: loaded from a checkout, with the training step of its train.py."""

import importlib.util
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch

from nanoheads.common import UserError
from nanoheads.optim import precision


def check(path):
    """UserError unless a folder is a nanoGPT checkout."""
    if not (Path(path) / "model.py").is_file():
        raise UserError("--nanogpt must name a nanoGPT checkout (a folder with model.py)")


def load(path, args, block_size):
    """(its GPT of these sizes on the device, its optimizer)."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(path) / "model.py")
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # it prints what it counts
        config = module.GPTConfig(vocab_size=args.vocab_size, block_size=block_size, n_layer=args.n_layer,
                                  n_head=args.n_head, n_embd=args.n_embd, dropout=0.0, bias=False)
        model = module.GPT(config).to(args.device)
        kind = torch.device(args.device).type
        return model, model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), kind)


def contestant(path, args):
    """What bench.py measures: build() -> (model, its training step, decode)."""
    def build():
        model, optimizer = load(path, args, args.block_size)
        compiled = torch.compile(model) if args.compile else model

        def step(x, y):
            with precision(args.dtype, torch.device(args.device).type)[1]:
                _, loss = compiled(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)  # its train.py reads the loss of every tenth step

        def decode(idx, n):
            model.eval()
            out = model.generate(idx, n)
            model.train()
            return out
        return model, step, decode
    return build
