"""
Reads a split whose text is in many files, its shards, as if it were one file.

meta.json lists them for the split, in the order in which they make up the text, each with
    file     its name in the data folder, or its whole path
    tokens   how many it holds
    sha256   of the file
    format   plain: nothing but tokens, as in a train.bin; llm.c: the format of llm.c and modded-nanogpt, 256
             numbers of int32 (20240520, version 1, how many tokens, and zeros) before tokens of uint16
The sha256 of the split is that of its shards' in a row.

The split is its shards one after the other, without a gap: a row of a batch may begin in one shard and end in
the next, as documents do. So batches and scores are exactly those of one file with the same tokens.
"""

import hashlib
from bisect import bisect_right
from itertools import accumulate

import numpy as np

from nanoheads import files
from nanoheads.common import UserError, plural

MAGIC, VERSION = 20240520, 1  # of llm.c's format, in tokens of uint16
MAGIC_UINT32 = 20240801       # of its format for Llama 3
HEADER = 1024                 # its bytes
MOST_OPEN = 128  # shards mapped at a time: each holds a file open, of which macOS gives a process 256
ADVICE = "put the whole file there, or run the text's prepare script again, with --force"


def identity(shas):
    """One sha256 for a source: its file's own; of several files, that of their hex digests in a row."""
    return shas[0] if len(shas) == 1 else hashlib.sha256("".join(shas).encode()).hexdigest()


def header(tokens):
    """The header of a file with so many tokens in llm.c's format, in bytes."""
    words = np.zeros(HEADER // 4, "<i4")
    words[:3] = MAGIC, VERSION, tokens
    return words.tobytes()


def tokens_of(path):
    """How many tokens a file in llm.c's format holds. UserError, where it is not one that is whole."""
    check_exists(path)
    with open(path, "rb") as file:
        words = np.frombuffer(file.read(HEADER), "<i4", 3) if path.stat().st_size >= HEADER else None
    if words is None:
        raise UserError(f"{path} is no shard in llm.c's format: it is shorter than its header of "
                        f"{HEADER:,} bytes; {ADVICE}")
    magic, version, tokens = words.tolist()
    if magic == MAGIC_UINT32:
        raise UserError(f"{path} holds Llama 3's tokens, of uint32: shards are read of GPT-2's, of uint16; "
                        "prepare the text itself, with data/prepare_text.py --encoding=hf")
    if magic != MAGIC:
        raise UserError(f"{path} is no shard in llm.c's format: it begins with {magic}, not {MAGIC}; "
                        f"{ADVICE}")
    if version != VERSION:
        raise UserError(f"{path} is a shard of version {version}; only version {VERSION} is read here, whose "
                        "tokens are uint16")
    if tokens < 1:
        raise UserError(f"{path} is empty: its header says {plural(tokens, 'token')}; {ADVICE}")
    check_size(path, HEADER + 2 * tokens, f"the {tokens:,} tokens of its header")
    return tokens


def check_size(path, expected, why):
    size = path.stat().st_size
    if size != expected:
        raise UserError(f"{path} is {'cut short' if size < expected else 'too long'}: it has {size:,} bytes "
                        f"where {why} take {expected:,}; {ADVICE}")


def check_exists(path):
    if not path.is_file():
        raise UserError(f"{path} is not there; {ADVICE}")


def check_whole(path, shard, dtype):
    """UserError unless a file is there and has as many tokens as meta.json says of this shard."""
    tokens = shard["tokens"]
    if shard["format"] == "plain":
        check_exists(path)
        check_size(path, tokens * dtype.itemsize, f"the {tokens:,} tokens of meta.json")
    elif tokens_of(path) != tokens:
        raise UserError(f"{path} holds {tokens_of(path):,} tokens where meta.json says {tokens:,}; {ADVICE}")


def open_shards(dataset, split):
    """The Shards of a split of a Dataset. UserError where one of them is not what meta.json says."""
    shards, paths = dataset.shards[split], dataset.files(split)
    for path, shard in zip(paths, shards):  # before the first is read, which may take long
        check_whole(path, shard, dataset.dtype)
    for path, shard in zip(paths, shards):  # noted in the data folder: a shard's own may be another's
        files.check(path, shard["sha256"], "meta.json", ADVICE, dataset.dir)
    return Shards(paths, shards, dataset.dtype)


class Shards:
    """The tokens of shards, one shard after the other, of which slices are read, [n].

    A slice within a shard is a view of its memory map; one that crosses a border is a copy.
    """

    def __init__(self, paths, shards, dtype):
        self.paths, self.shards, self.dtype = paths, shards, dtype
        self.ends = list(accumulate(shard["tokens"] for shard in shards))
        self.maps = {}

    def __len__(self):
        return self.ends[-1]

    def __getitem__(self, key):
        if not isinstance(key, slice) or key.step not in (None, 1):
            raise TypeError("of shards, only slices of step 1 are read")
        start, stop, _ = key.indices(len(self))
        parts = []
        i = bisect_right(self.ends, start)
        while start < stop:
            first = self.ends[i] - self.shards[i]["tokens"]
            parts.append(self.map_shard(i)[start - first:stop - first])
            start = self.ends[i]
            i += 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def __array__(self, dtype=None, copy=None):
        """All of it, in memory."""
        return np.asarray(self[:], dtype)

    def tobytes(self):
        return self[:].tobytes()

    def map_shard(self, i):
        """The tokens of the i-th shard, as a memory map."""
        if i not in self.maps:
            if len(self.maps) == MOST_OPEN:
                del self.maps[next(iter(self.maps))]
            shard = self.shards[i]
            offset = HEADER if shard["format"] == "llm.c" else 0
            tokens = np.memmap(self.paths[i], self.dtype, "r", offset, shard["tokens"])
            self.maps[i] = np.asarray(tokens)  # a memmap is slow to cut
        return self.maps[i]
