"""
What every model computes, written down before a refactor and compared after it, bit for bit.

    python tests/sameness.py write before.pt                 # in the old tree
    python tests/sameness.py compare before.pt               # in the new one, on the same machine and torch
    python tests/sameness.py compare before.pt --renamed '{"gated": "output_gate"}'    # where names changed

For the plain GPT, every entry of MECHANISMS and all of them together, with both recipes, in training and
evaluation, float64: logits, loss, auxiliary losses, traces with attention maps, hidden states with a cache
and with padding, gradients. The file holds the parameters too, so that the comparison does not depend on how
they are made. Digests would be shorter, but say nothing of how far off a value is. It is no test: another
machine's matrix product has other last bits.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nanoheads.pruning import prune_heads
from model import ALL_ON, GPT, MECHANISMS, GPTConfig, KVCache  # noqa: E402

SHAPE = dict(block_size=16, vocab_size=37, n_layer=3, n_head=6, n_embd=72, seed=7)
T = 13


def cases():
    """{name: flags}."""
    return {f"{name}, {recipe}": {**flags, "recipe": recipe} for recipe in ("gpt2", "modern")
            for name, flags in {"plain": {}, **MECHANISMS, "all_on": ALL_ON}.items()}


def tokens(seed, *shape):
    return torch.randint(SHAPE["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def built(flags):
    return GPT(GPTConfig(**SHAPE, **flags)).double()


def liven(model, std=0.15):
    """Parameters drawn one after the other: none is zero, no two heads are alike, every state has a head."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * std + (p.dim() < 2))
    for layer, block in enumerate(model.transformer.h):
        if block.attn.agency is None:
            continue
        for head, state in enumerate(("active", "overloaded", "misaligned", "withdrawn")):
            model.set_state(layer, head, state=state)
        if model.config.agency_learned:
            block.attn.agency.metrics.normal_(generator=generator)
    return model


def computed(model):
    """{what: tensor} of everything that a model gives."""
    found, idx, targets = {}, tokens(1, 2, T), tokens(2, 2, T)
    targets[0, 3] = -1
    for mode in ("train", "eval"):
        getattr(model, mode)()
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)  # the noise of hard-concrete gates
        wanted = {name: (tokens(4, 2, T) % 4 - 1) / 2 for name in model.config.constraint_names or ()}
        out = model(idx, targets, constraint_targets=wanted or None, logits=True)
        sum(out.aux.values(), out.loss).backward()
        found.update({f"{mode}.logits": out.logits, f"{mode}.loss": out.loss,
                      **{f"{mode}.aux.{k}": v for k, v in out.aux.items()}})
        found.update({f"{mode}.gradient.{name}": p.grad for name, p in model.named_parameters()})
        torch.manual_seed(3)
        out = model(idx, targets, traces="maps")
        found.update({f"{mode}.traces.{k}": v for k, v in out.traces.items()})
    with torch.no_grad():
        cache, pad = KVCache(model.config), torch.tensor([0, 4])
        pieces = [model.hidden(piece, cache, pad) for piece in idx.split([6, 1, 1, 5], dim=1)]
        found["cached"] = torch.cat(pieces, 1)
        found["generated"] = model.generate(idx[:, :5], 20, temperature=0)
        prune_heads(model, {0: [1, 4], 1: [0]} if model.config.unit == 1 else {0: [2, 3], 1: [0, 1]})
        found["pruned"] = model.hidden(idx)
    return {name: None if t is None else t.detach().clone() for name, t in found.items()}


def write(path):
    found = {}
    for name, flags in cases().items():
        model = liven(built(flags))
        state = {key: value.clone() for key, value in model.state_dict().items()}
        found[name] = dict(state=state, values=computed(model))
    torch.save(found, path)


def difference(a, b, tolerance):
    """How two values differ, in words; None where they do not. Each may be None: not there."""
    if a is None and b is None:
        return None
    if a is None or b is None or a.shape != b.shape:
        there, here = (None if t is None else tuple(t.shape) for t in (a, b))
        return f"there {there}, here {here}"
    if torch.equal(a, b):
        return None
    if torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()):
        return None
    off = (a.double() - b.double()).abs().max().item()
    return None if off <= tolerance else f"off by {off:.1e}"


def compare(path, renamed, tolerance):
    """Print what differs; returns how many values do."""
    def rename(text):
        for old, new in renamed.items():
            text = text.replace(old, new)
        return text

    before, now, differ, count = {rename(k): v for k, v in torch.load(path).items()}, cases(), 0, 0
    both = sorted(set(now) & set(before))
    print("only here:", sorted(set(now) - set(before)), "\nonly there:", sorted(set(before) - set(now)))
    for name in both:
        model = built(now[name])
        model.load_state_dict({rename(k): v for k, v in before[name]["state"].items()})
        old, new = {rename(k): v for k, v in before[name]["values"].items()}, computed(model)
        for what in sorted(set(old) | set(new)):
            count += 1
            far = difference(old.get(what), new.get(what), tolerance if "all_on" in name else 0)
            if far:
                print(f"{name}: {what}: {far}")
                differ += 1
    print(f"{len(both)} models, {count:,} values, {differ} differ")
    return differ


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("write", "compare"))
    p.add_argument("path")
    p.add_argument("--renamed", type=json.loads, default={}, help="JSON: {old part of a name: new part}")
    p.add_argument("--tolerance", type=float, default=1e-13,
                   help="of all_on alone, whose factors are multiplied in another order")
    a = p.parse_args()
    torch.set_num_threads(1)
    sys.exit(write(a.path) if a.what == "write" else compare(a.path, a.renamed, a.tolerance) > 0)
