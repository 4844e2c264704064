"""
Score whole splits: every token once, bits per byte first.

    python evaluate.py --ckpt out/a/best.pt [--ckpt out/b/best.pt ...] [--split test] [--stride 128] [--json scores.json]

The context policy is part of the number. Without --stride the split is cut into disjoint windows of
block_size tokens, so that a token sees between 1 and block_size tokens of context; with --stride S the
window moves by S tokens and scores the last S of each, so that (after the first window) every token sees
at least block_size - S. The first token is conditioned on the corpus separator.
"""

import argparse
import json
import math
import sys
import time
from contextlib import nullcontext

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

import checkpoint
from dataset import DataError, Dataset


def windows(n, block_size, stride):
    """[(start, end, scored)]: read tokens [start, end), score the last `scored` of them; each of n is scored once."""
    cuts = [(0, min(block_size, n), min(block_size, n))]
    while cuts[-1][1] < n:
        end = min(cuts[-1][1] + stride, n)
        start = cuts[-1][1] + stride - block_size
        cuts.append((start, end, end - cuts[-1][1]))
    return cuts


@torch.no_grad()
def score(model, dataset, split, stride=0, max_tokens=0, batch_tokens=16384, rank=0, world=1, autocast=None,
          per_token=False, progress=False):
    """Cross-entropy of a split under a model: (nats summed, tokens scored), or the nats of every token, [n] float32.

    stride 0: disjoint windows. max_tokens > 0 scores evenly spaced windows of that many tokens in all, the
    same ones at each call. Windows go to ranks in turn; the caller adds the ranks' sums up.
    """
    device, T = next(model.parameters()).device, model.config.block_size
    tokens = dataset.tokens(split)
    cuts = windows(len(tokens), T, stride or T)
    if max_tokens and max_tokens < len(tokens):
        keep = max(1, min(len(cuts) - 1, max_tokens // (stride or T)))
        cuts = [cuts[i * (len(cuts) - 1) // keep] for i in range(keep)]
    was_training = model.training
    model.eval()
    # a window of T tokens makes T x vocab logits: keep a batch of them within a few hundred MB
    rows = max(1, min(batch_tokens, (1 << 26) // model.config.vocab_size) // T)
    total, count, every = 0.0, 0, [np.empty(0, np.float32)]
    mine = cuts[rank::world]
    bar = tqdm(total=sum(c[2] for c in mine), unit="tok", unit_scale=True, desc=split, disable=not progress, leave=False, mininterval=0.5)
    at = 0
    while at < len(mine):
        batch = [c for c in mine[at:at + rows] if c[1] - c[0] == mine[at][1] - mine[at][0]]
        at += len(batch)
        pieces = [np.concatenate(([dataset.separator], tokens[:e])) if s == 0 else tokens[s - 1:e] for s, e, _ in batch]
        ids = torch.from_numpy(np.stack(pieces).astype(np.int64)).to(device)
        with autocast or nullcontext():
            logits = model(ids[:, :-1]).logits
        nats = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none").view(len(batch), -1)
        for row, (_, _, scored) in zip(nats, batch):
            row = row[-scored:]
            total, count = total + row.double().sum().item(), count + scored
            if per_token:
                every.append(row.cpu().numpy())
            bar.update(scored)
    bar.close()
    model.train(was_training)
    return np.concatenate(every) if per_token else (total, count)


def bits(nats, count):
    return nats / (math.log(2) * count)


def evaluate(path, split, stride, device, dataset=None, progress=True):
    """Everything that is reported of one checkpoint, as a dict. Raises CheckpointError, DataError."""
    state = checkpoint.read(path, device)
    model = checkpoint.build(state, path, device)
    data = Dataset(dataset or state.get("dataset") or state["meta"]["name"])
    checkpoint.same_vocabulary(state, data, path)
    T = model.config.block_size
    if not 0 <= stride <= T:
        raise checkpoint.CheckpointError(f"--stride={stride} must be from 1 to block_size={T} (0: disjoint)")
    began = time.perf_counter()
    nats, tokens = score(model, data, split, stride, progress=progress)
    seconds = time.perf_counter() - began
    size = data.splits[split]
    return dict(name=str(path), dataset=data.meta["name"], split=split, step=state.get("step"), tokens=tokens, bytes=size["bytes"],
                nats_per_token=nats / tokens, ppl=math.exp(min(nats / tokens, 700)),
                bpb=bits(nats, size["bytes"]), bpc=bits(nats, size["chars"]),
                params=model.num_params(), params_non_embedding=model.num_params(non_embedding=True),
                flops_per_token=model.flops_per_token(), tokens_per_s=tokens / seconds,
                context=f"stride {stride} of {T}" if stride and stride < T else f"disjoint {T}", device=device)


def table(runs):
    """The runs as aligned lines, best bits per byte last column first in the eye: name, split, counts, scores."""
    head = ["run", "split", "context", "tokens", "bytes", "nats/token", "perplexity", "bits/char", "bits/byte", "params", "tokens/s"]
    rows = [[r["name"], r["split"], r["context"], f"{r['tokens']:,}", f"{r['bytes']:,}", f"{r['nats_per_token']:.4f}", f"{r['ppl']:.3f}",
             f"{r['bpc']:.4f}", f"{r['bpb']:.4f}", f"{r['params']:,}", f"{r['tokens_per_s']:,.0f}"] for r in runs]
    wide = [max(len(row[i]) for row in [head] + rows) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(row, wide))) for row in [head] + rows)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ckpt", action="append", required=True, help="a checkpoint or a run folder (its best.pt); may be repeated")
    p.add_argument("--split", default="test", help="train, val or test")
    p.add_argument("--stride", type=int, default=0, help="move the window by this many tokens; 0: disjoint windows")
    p.add_argument("--dataset", help="score another dataset with the same vocabulary")
    p.add_argument("--json", help="write the scores to this file as well")
    p.add_argument("--device", default="auto")
    a = p.parse_args(argv)
    try:
        runs = [evaluate(path, a.split, a.stride, checkpoint.pick_device(a.device), a.dataset, sys.stderr.isatty()) for path in a.ckpt]
        print(table(runs))
        if a.json:
            checkpoint.write_atomic(a.json, lambda f: f.write(json.dumps({"runs": runs}, indent=1).encode()))
            print(a.json)
    except (checkpoint.CheckpointError, DataError) as e:
        sys.exit(f"evaluate: {e}")


if __name__ == "__main__":
    main()
