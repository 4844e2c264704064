"""
The attention maps of a text and what each head puts out, as arrays that other tools take (bertviz,
circuitsvis).
"""

import numpy as np
import torch

from nanoheads.common import UserError, table, writable, write_atomic
from nanoheads.heads.detectors import ARRAYS, head_arrays
from nanoheads.heads.look import read_ids
from nanoheads.heads.pictures import spelled
from nanoheads.training.sampling import model_and_tokenizer


def probe(args):
    """Attention maps of a text and what each head puts out, for other tools."""
    if len(args.ckpt) > 1:
        raise UserError(f"--ckpt: one at a time, not {len(args.ckpt)}")
    if not args.text:
        raise UserError("--text: name the file to read")
    out = writable(args.out, "--out")
    model, tokenizer = model_and_tokenizer(args.ckpt[0], args.device, args.dataset, args.settings)
    ids = read_ids(args.text, tokenizer)
    n = min(args.tokens or len(ids), len(ids), model.config.block_size)
    found = head_arrays(model, torch.tensor(ids[:n], device=args.device), args.results)
    if not np.isfinite(found["z"]).all():
        raise UserError(f"{args.ckpt[0]}: its heads put out what is no number: its weights are damaged")
    found = dict(tokens=np.array([spelled(tokenizer, i) for i in ids[:n]]), **found)
    write_atomic(out, lambda f: np.savez_compressed(f, **found))
    cells = [(name, " x ".join(map(str, found[name].shape)), *about)
             for name, about in ARRAYS.items() if name in found]
    return None, [f"{args.text}: {n:,} of {len(ids):,} tokens",
                  table(("array", "shape", "axes", ""), cells, left=4), args.out]
