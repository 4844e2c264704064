"""A prepared data folder (data/<name>/): its meta.json, its splits, and the order in which training reads them."""

import difflib
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent
REOPEN_AFTER = 64 << 20  # bytes read through one mapping before it is dropped, so that resident memory stays bounded


class DataError(Exception):
    """What is wrong with a data folder, in one line."""


class Dataset:
    """data/<name>, or any folder that a prepare script wrote. Raises DataError when it is missing or damaged."""

    def __init__(self, name):
        self.dir = next((p for p in (Path(name), ROOT / "data" / name) if (p / "meta.json").is_file()), None)
        if self.dir is None:
            raise DataError(missing(name))
        try:
            self.meta = json.loads((self.dir / "meta.json").read_text())
            self.splits = self.meta["splits"]
            self.tokenizer = Tokenizer.from_meta(self.meta)
            self.dtype = np.dtype(self.meta["dtype"])
            self.vocab_size, self.separator = self.meta["vocab_size"], self.meta["separator"]
        except (ValueError, KeyError, TypeError) as e:
            raise DataError(f"{self.dir / 'meta.json'} is not what a prepare script writes ({type(e).__name__}: {e}); "
                            "run it again with --force")

    def tokens(self, split):
        """The split as a read-only memory map, [n]."""
        path = self.dir / f"{split}.bin"
        if split not in self.splits or not path.is_file():
            raise DataError(f"{self.dir} has no split {split!r}; it has {', '.join(self.splits)}")
        want = self.splits[split]["tokens"]
        if path.stat().st_size != want * self.dtype.itemsize or not want:
            raise DataError(f"{path} holds {path.stat().st_size // self.dtype.itemsize:,} tokens where meta.json says {want:,}; "
                            "run its prepare script with --force")
        return np.memmap(path, self.dtype, "r")

    def bytes_per_token(self, split):
        return self.splits[split]["bytes"] / self.splits[split]["tokens"]


def missing(name):
    script = ROOT / "data" / name / "prepare.py"
    if script.is_file():
        return f"dataset {name} is not prepared; run: python {script}"
    known = sorted(p.parent.name for p in (ROOT / "data").glob("*/prepare.py"))
    close = difflib.get_close_matches(name, known, 1, 0.5)
    return (f"no dataset {name}; did you mean {close[0]}?" if close else
            f"no dataset {name}: neither a folder with a meta.json nor one of {', '.join(known)}")


class Batches:
    """Training batches as a function of (seed, step) alone: resuming needs no state, and ranks need no talk.

    The split is cut into pieces of block_size tokens and passed over in shuffled order, each pass with its
    own shuffle and its own offset of the cuts. A batch is `rows` pieces: x [rows, T] and y, the next tokens.
    """

    def __init__(self, dataset, split, block_size, rows, seed):
        self.dataset, self.split, self.block_size, self.rows, self.seed = dataset, split, block_size, rows, seed
        self.data, self.read = dataset.tokens(split), 0
        self.pieces = len(self.data) // block_size - 1  # one less than fit, so that every offset below block_size does
        if self.pieces < 1:
            raise DataError(f"block_size={block_size} needs at least {2 * block_size:,} tokens of {split}; "
                            f"{dataset.dir} has {len(self.data):,}")
        self.one_pass = lru_cache(maxsize=2)(self.one_pass)

    def one_pass(self, number):
        """Offset of the cuts and order of the pieces [n] in pass `number`."""
        rng = np.random.default_rng([self.seed, number])
        return int(rng.integers(self.block_size)), rng.permutation(np.arange(self.pieces, dtype=np.uint32))

    def starts(self, step):
        """First token of each row of the global batch at `step`."""
        for i in range(step * self.rows, (step + 1) * self.rows):
            number, at = divmod(i, self.pieces)
            offset, order = self.one_pass(number)
            yield offset + int(order[at]) * self.block_size

    def __call__(self, step, rank=0, world=1):
        """This rank's rows of the batch at `step`: x, y, each int64 [rows / world, T]."""
        T = self.block_size
        mine = list(self.starts(step))[rank::world]
        self.read += len(mine) * max(T * self.dtype_size, 1 << 16)  # the kernel maps 64 KiB around each fault
        if self.read > REOPEN_AFTER:
            self.data, self.read = self.dataset.tokens(self.split), 0
        rows = torch.from_numpy(np.stack([self.data[s:s + T + 1] for s in mine]).astype(np.int64))
        return rows[:, :-1], rows[:, 1:]

    @property
    def dtype_size(self):
        return self.data.dtype.itemsize
