"""
Score whole splits: every token once, bits per byte first.

    python evaluate.py --ckpt out/a [--ckpt out/b/ckpt.pt ...] [--split test] [--stride 128] [--json FILE]
    python evaluate.py --ckpt out/a --set unet_skips=False --set gate.0.3=0    # switches moved, heads set

The context policy is part of the number. Without --stride the split is cut into disjoint windows of
block_size tokens, and a token sees from 1 to block_size tokens before it. With --stride S the window moves on
by S tokens and scores its last S: after the first window, every token sees more than block_size - S. The very
first token is conditioned on the corpus separator. FLOPs/token count training: forward and backward.
"""

import argparse
import json
import math
import os
import sys
import time
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import checkpoint
from common import UserError, pick_device, table, write_atomic
from dataset import Dataset


BLOCK = 4096  # tokens whose nats a study keeps as one sum: neighbours resemble each other for less than that


# ---- scoring ----

def windows(n, block_size, stride):
    """[(start, end, scored)]: read tokens [start, end), score the last `scored`; each of n is scored once."""
    if not 1 <= stride <= block_size:
        raise ValueError(f"stride={stride} must be from 1 to block_size={block_size} (0: disjoint windows)")
    cuts = [(0, min(block_size, n), min(block_size, n))]
    while (done := cuts[-1][1]) < n:
        end = min(done + stride, n)
        cuts.append((done + stride - block_size, end, end - done))
    return cuts


def windows_of(dataset, split, block_size, stride=0, max_tokens=0):
    """The windows of a split that score() scores.

    max_tokens > 0: whole windows, evenly spaced from the first to the last, at least one, and beyond that so
    many tokens at most.
    """
    n, step = len(dataset.tokens(split)), stride or block_size
    cuts = windows(n, block_size, step)
    if 0 < max_tokens < n:
        cuts = [c for c in cuts if c[1] - c[0] == block_size] or cuts
        count = max(1, 1 + (max_tokens - block_size) // step)
        cuts = [cuts[i * (len(cuts) - 1) // max(1, count - 1)] for i in range(count)]
    return cuts


def window_ids(tokens, separator, start, end):
    """Tokens [start, end) after the one before them, at the beginning the separator; int64 [1 + n]."""
    ids = tokens[start - 1:end] if start else np.concatenate(([separator], tokens[:end]))
    return ids.astype(np.int64)


def nats_of(logits, targets):
    """-log p(target), float64 [B, T] on the CPU, from logits [B, T, V].

    The sum over V is float32, its log float64.
    """
    top = logits.amax(-1)
    mass = (logits - top[..., None]).exp().sum(-1)
    short = top - logits.gather(-1, targets[..., None]).squeeze(-1)
    mass, short = torch.stack((mass, short)).cpu().double()
    return (mass.log() + short).numpy()


@torch.no_grad()
def score(model, dataset, split, stride=0, max_tokens=0, batch_tokens=16384, rank=0, world=1, autocast=None,
          per_token=False, progress=False):
    """Cross-entropy of a split: (nats summed, tokens scored), or with per_token those of each, [n] float32.

    stride 0: disjoint windows. max_tokens > 0 scores at most so many tokens, the same at each call, see
    windows_of(). Windows go to ranks in turn; the caller adds the ranks' sums up.
    """
    device, T, tokens = next(model.parameters()).device, model.config.block_size, dataset.tokens(split)
    cuts = windows_of(dataset, split, T, stride, max_tokens)[rank::world]
    # logits are vocab_size floats a token, 256 MB of them at most; a CPU is fastest while they fit its caches
    batch_tokens = min(batch_tokens, (1 << 26) // model.config.vocab_size)
    if device.type == "cpu":
        batch_tokens = min(batch_tokens, 4096)
    rows = max(1, batch_tokens // T)

    nats, count, parts = 0.0, 0, [np.empty(0, np.float32)]
    bar = tqdm(total=sum(scored for _, _, scored in cuts), desc=split, unit="tok", unit_scale=True,
               disable=not progress, leave=False, mininterval=0.5)
    was_training = model.training
    model.eval()
    try:
        with autocast or nullcontext(), bar:
            # windows of one length and one scored part go together
            for (_, scored), group in groupby(cuts, lambda c: (c[1] - c[0], c[2])):
                group = list(group)
                for at in range(0, len(group), rows):
                    ids = np.stack([window_ids(tokens, dataset.separator, start, end)
                                    for start, end, _ in group[at:at + rows]])
                    ids = torch.from_numpy(ids).to(device)
                    each = nats_of(model(ids[:, :-1]).logits[:, -scored:], ids[:, -scored:])
                    nats += float(each.sum())
                    count += each.size
                    if per_token:
                        parts.append(each.astype(np.float32).ravel())
                    bar.update(each.size)
    finally:
        model.train(was_training)
    return np.concatenate(parts) if per_token else (nats, count)


def bits(nats, count):
    """Bits for each of `count` bytes (or characters)."""
    return nats / (math.log(2) * count)


# ---- checkpoints and their data ----

def dataset_of(state, path, name=None):
    """The Dataset called `name`, or else the one that a read checkpoint was trained on. UserError."""
    meta, train = state["meta"] or {}, state.get("train") or {}
    names = [name] if name else [train.get("dataset"), state.get("dataset"), meta.get("name")]
    names = [n for n in names if n]
    if not names:
        raise UserError(f"{path} does not say what it was trained on; name it with --dataset")
    for other in names[:-1]:  # a path may lead nowhere from here, while data/<name> is there
        try:
            return Dataset(other)
        except UserError:
            pass
    return Dataset(names[-1])


def load(path, split, stride, device, dataset=None, settings=()):
    """(state, model, Dataset) of one checkpoint, after every check that needs no scoring."""
    state = checkpoint.read(path)
    model = checkpoint.build(state, path, device, settings)
    data = dataset_of(state, path, dataset)
    checkpoint.same_vocabulary(state, data, path)
    then, now = ((m or {}).get("splits", {}).get(split, {}).get("sha256") for m in (state["meta"], data.meta))
    if then and then != now and not dataset:
        raise UserError(f"{path}: the {split} split of {data.dir} is not the one of its training, "
                        f"and may hold what it was trained on; --dataset={data.dir} scores it all the same")
    windows(len(data.tokens(split)), model.config.block_size, stride or model.config.block_size)
    return state, model, data


def evaluate(path, split, stride, device, dataset=None, settings=(), progress=True):
    """Everything that is reported of one checkpoint, as a dict. Raises UserError, ValueError."""
    state, model, data = load(path, split, stride, device, dataset, settings)
    T, size = model.config.block_size, data.splits[split]
    began = time.perf_counter()
    nats, tokens = score(model, data, split, stride, progress=progress)
    seconds = time.perf_counter() - began
    if not math.isfinite(nats):
        raise UserError(f"{path} gives {nats} nats on {split}: "
                        "its weights are damaged, or its training diverged")
    stride = stride or T
    context = f"disjoint windows of {T:,}" if stride == T else f"windows of {T:,}, stride {stride:,}"
    return dict(name=str(path), dataset=data.meta["name"], split=split, tokens=tokens, bytes=size["bytes"],
                chars=size["chars"], context=context, block_size=T, stride=stride,
                bpb=bits(nats, size["bytes"]), bpc=bits(nats, size["chars"]),
                nats_per_token=nats / tokens, ppl=math.exp(min(nats / tokens, 700)),
                params=model.num_params(), params_non_embedding=model.num_params(non_embedding=True),
                flops_per_token=model.flops_per_token(), tokens_per_s=tokens / seconds,
                step=state.get("step"), device=device, split_sha256=size.get("sha256"),
                note=data.meta.get("note"), set=list(settings))


# ---- output ----

HEAD = ("run", "bits/byte", "bits/char", "nats/token", "perplexity", "params", "non-embed.", "FLOPs/token",
        "tokens/s")


def scored_line(run):
    """What was scored, and how."""
    line = (f"{run['dataset']}, {run['split']}: {run['tokens']:,} tokens, {run['bytes']:,} bytes, "
            f"{run['chars']:,} characters, each once, in {run['context']}")
    return line + (f", with {', '.join(run['set'])}" if run.get("set") else "")


def score_table(runs, width=120):
    """The runs in the order given, one aligned line each, under a line that says what was scored and how."""
    rows = [(r["name"].removesuffix("/best.pt"), f"{r['bpb']:.4f}", f"{r['bpc']:.4f}",
             f"{r['nats_per_token']:.4f}", f"{r['ppl']:.5g}",
             f"{r['params']:,}", f"{r['params_non_embedding']:,}",
             f"{r['flops_per_token'] / 1e6:,.2f}M", f"{r['tokens_per_s']:,.0f}") for r in runs]
    head, *rows = table(HEAD, rows, width=width).splitlines()
    lines, before = [], None
    for run, row in zip(runs, rows):
        if scored_line(run) != before:
            before = scored_line(run)
            lines += ["", before] if lines else [before]
            lines += [f"note: {run['note']}", head] if run.get("note") else [head]
        lines.append(row)
    return "\n".join(lines)


def writable(path):
    """The Path to write, checked before hours of scoring. Raises UserError."""
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        raise UserError(f"--json: {path} is not a file")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise UserError(f"--json: cannot write into {path.parent}: no such folder, or not allowed")
    return path


def add_arguments(parser, split):
    """The arguments of every program that scores checkpoints; split: the default one."""
    checkpoint.add_arguments(parser)
    parser.add_argument("--split", default=split, help=f"train, val or test (default: {split})")
    parser.add_argument("--dataset", help="read this dataset, which must have the same vocabulary "
                                          "(default: the one trained on)")
    parser.add_argument("--json", help="write the numbers to this file as well")


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(p, "test")
    p.add_argument("--stride", type=int, default=0,
                   help="move the window by so many tokens; 0: disjoint windows (default)")
    args = p.parse_args(argv)
    runs = []
    try:
        device = pick_device(args.device)
        out = writable(args.json) if args.json else None
        options = args.split, args.stride, device, args.dataset, args.settings
        for path in args.ckpt[1:]:  # what is wrong with the last should not cost the time of those before it
            load(path, *options)
        for path in args.ckpt:
            runs.append(evaluate(path, *options, progress=sys.stderr.isatty()))
        if out:
            write_atomic(out, lambda f: f.write(json.dumps({"runs": runs}, indent=1).encode() + b"\n"))
        print(score_table(runs), *([args.json] if out else []), sep="\n")
    except ValueError as e:
        sys.exit(f"evaluate: {e}")
    except KeyboardInterrupt:
        if runs:
            print(score_table(runs))
        print("\nevaluate: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
