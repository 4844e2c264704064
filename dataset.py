"""A prepared data folder (data/<name>/): meta.json, the splits, the order in which training reads them."""

import difflib
import json
import os
import re
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from common import ROOT, UserError
from tokenizer import Tokenizer

REOPEN_AFTER = 64 << 20  # bytes read through one mapping before it is dropped: resident memory stays bounded


class Dataset:
    """data/<name>, or any folder that a prepare script wrote. UserError when it is missing or damaged."""

    def __init__(self, name):
        folders = (Path(name), ROOT / "data" / name, ROOT / name)
        self.dir = next((folder for folder in folders if (folder / "meta.json").is_file()), None)
        if self.dir is None:
            raise UserError(missing(name))
        try:
            self.meta = json.loads((self.dir / "meta.json").read_text(encoding="utf-8"))
            self.splits, _ = self.meta["splits"], self.meta["name"]
            self.tokenizer = Tokenizer.from_meta(self.meta)
            self.dtype = np.dtype(self.meta["dtype"])
            self.vocab_size, self.separator = self.meta["vocab_size"], self.meta["separator"]
            self.sizes = {split: (size["tokens"], size["bytes"]) for split, size in self.splits.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{self.dir / 'meta.json'} is not what a prepare script writes "
                            f"({type(e).__name__}: {e}); run it again with --force")

    def tokens(self, split):
        """The split as a read-only memory map, [n]."""
        path = self.dir / f"{split}.bin"
        if split not in self.splits or not path.is_file():
            splits = [s for s in self.splits if (self.dir / f"{s}.bin").is_file()]
            raise UserError(f"{self.dir} has no split {split!r}; it has {', '.join(splits) or 'none'}")
        tokens, _ = self.sizes[split]
        size = path.stat().st_size
        if size != tokens * self.dtype.itemsize or not tokens:
            raise UserError(f"{path} holds {size // self.dtype.itemsize:,} tokens "
                            f"where meta.json says {tokens:,}; run its prepare script with --force")
        return np.memmap(path, self.dtype, "r")

    def need(self, split, tokens, block_size):
        """Raise UserError unless the split has as many tokens as a use of it with this block_size takes."""
        if len(self.tokens(split)) < tokens:
            raise UserError(f"block_size={block_size} needs at least {tokens:,} tokens of {split}; "
                            f"{self.dir} has {len(self.tokens(split)):,}")

    def bytes_per_token(self, split):
        tokens, size = self.sizes[split]
        return size / tokens


def missing(name):
    """One line about a data folder that is not there, with the command that makes it or the nearest name."""
    known = {p.parent.name: "" for p in (ROOT / "data").glob("*/prepare.py")}
    # a second encoding has a folder of its own but no script of its own
    match = re.match(r"(.*)_(byte|char|gpt2)$", Path(name).name)
    base, encoding = match.groups() if match else ("", "")
    if base in known:
        known.setdefault(f"{base}_{encoding}", f" --encoding={encoding}")
    close = difflib.get_close_matches(Path(name).name, known, 1, 0.6)
    if not close:
        return f"no dataset {name}: neither a folder with a meta.json nor one of {', '.join(sorted(known))}"
    if close != [Path(name).name]:
        return f"no dataset {name}; did you mean {close[0]}?"
    script = ROOT / "data" / (base if known[close[0]] else close[0]) / "prepare.py"
    return f"dataset {name} is not prepared; run: python {os.path.relpath(script)}{known[close[0]]}"


class Batches:
    """Training batches as a function of (seed, step) alone: resuming needs no state, and ranks need no talk.

    The split is cut into pieces of block_size tokens and passed over in shuffled order, each pass with its
    own shuffle and its own offset of the cuts. A batch is `rows` pieces, each with the token after it.
    """

    def __init__(self, dataset, split, block_size, rows, seed):
        dataset.need(split, 2 * block_size, block_size)
        self.dataset = dataset
        self.split = split
        self.block_size = block_size
        self.rows = rows
        self.seed = seed
        self.data, self.read = np.asarray(dataset.tokens(split)), 0
        # one less than fit, so that every offset below block_size does
        self.pieces = len(self.data) // block_size - 1
        self.one_pass = lru_cache(maxsize=2)(self.one_pass)

    def one_pass(self, number):
        """Offset of the cuts and order of the pieces, uint32 [pieces], in pass `number`."""
        rng = np.random.default_rng([self.seed, number])
        offset, order = int(rng.integers(self.block_size)), np.arange(self.pieces, dtype=np.uint32)
        rng.shuffle(order)
        return offset, order

    def starts(self, step, rank=0, world=1):
        """First token of each of this rank's rows of the batch at `step`, as a list."""
        rows = np.arange(step * self.rows + rank, (step + 1) * self.rows, world)
        number, place = np.divmod(rows, self.pieces)  # pass, place in it: a batch may reach into the next
        starts = []
        for n in range(number[0], number[-1] + 1) if len(rows) else ():
            offset, order = self.one_pass(n)
            starts += (offset + order[place[number == n]].astype(np.int64) * self.block_size).tolist()
        return starts

    def __call__(self, step, rank=0, world=1):
        """This rank's rows of the batch at `step`, int64 [rows / world, T + 1]: inputs, shifted targets."""
        T, starts = self.block_size, self.starts(step, rank, world)
        # the kernel maps 64 KiB around each fault
        self.read += len(starts) * max(T * self.data.itemsize, 1 << 16)
        if self.read > REOPEN_AFTER:
            self.data, self.read = np.asarray(self.dataset.tokens(self.split)), 0
        ids = np.stack([self.data[s:s + T + 1] for s in starts])
        if ids.max() >= self.dataset.vocab_size:  # on a gpu this would be an assertion somewhere in a kernel
            raise UserError(f"{self.dataset.dir / self.split}.bin holds the token {ids.max()}, "
                            f"and the vocabulary ends at {self.dataset.vocab_size - 1}; "
                            "run its prepare script with --force")
        return torch.from_numpy(ids.astype(np.int64))
