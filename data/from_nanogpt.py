"""
Make a folder that nanoGPT's prepare.py wrote (train.bin, val.bin, perhaps meta.pkl) a dataset for train.py.

    python data/from_nanogpt.py ../nanoGPT/data/shakespeare_char
    python train.py --scale=tiny --dataset=../nanoGPT/data/shakespeare_char

It writes meta.json into the folder, and test.bin, a copy of val.bin, if there is none: nanoGPT has no third
part. What is there stays as it is. The characters are those of meta.pkl, of which no code is run. Without a
meta.pkl the tokens are GPT-2's byte pairs. You should see the counts that nanoGPT's script printed.
"""
import argparse
import pickle
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# before NumPy: it answers Ctrl-C meanwhile
from nanoheads.common import UserError, is_there, write_atomic

import numpy as np

from nanoheads.dataset import SPLITS, text_of_tokens, write_meta
from nanoheads.files import sha256
from nanoheads.prepare import report, run
from nanoheads.shards import identity
from nanoheads.tokenizer import Tokenizer

DTYPE, BLOCK = np.dtype("<u2"), 1 << 24  # of nanoGPT's files; tokens counted at a time
NOTE = "nanoGPT has no third part: test is val over again, so a test figure here is a validation figure"


class PlainUnpickler(pickle.Unpickler):
    """Reads dicts, strings and numbers, and refuses whatever would run code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it wants to call {module}.{name}")


def characters(path):
    """The characters of a meta.pkl, in the order of their ids. UserError."""
    try:
        with open(path, "rb") as file:
            names = PlainUnpickler(file).load()["itos"]
        vocab = [names[i] for i in range(len(names))]
        Tokenizer("char", vocab)
    except Exception as error:  # a damaged pickle raises anything
        words = " ".join(str(error).split())
        raise UserError(f"{path} does not name the characters of a vocabulary, as nanoGPT's does "
                        f"({type(error).__name__}: {words})") from None
    return vocab


def occurrences(path):
    """How often each id is in a file of nanoGPT's, int64 [65,536]. UserError."""
    size = path.stat().st_size
    if size % DTYPE.itemsize or not size:
        raise UserError(f"{path}: {size:,} bytes are no tokens of nanoGPT's, which have two each")
    tokens, counts = np.memmap(path, DTYPE, "r"), np.zeros(1 << 16, np.int64)
    for start in range(0, len(tokens), BLOCK):
        counts += np.bincount(tokens[start:start + BLOCK], minlength=len(counts))
    return counts


def tokenizer_of(folder, largest):
    """The Tokenizer of a folder whose largest id is `largest`. UserError."""
    if is_there(folder / "meta.pkl"):
        return Tokenizer("char", characters(folder / "meta.pkl"))
    if largest < 256:  # GPT-2's first 256 tokens are single bytes
        raise UserError(f"{folder}: no token is above {largest}, so that these are no byte pairs of GPT-2; "
                        "meta.pkl, which would name the characters, is missing")
    return Tokenizer("gpt2")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder with nanoGPT's train.bin and val.bin")
    parser.add_argument("--force", action="store_true", help="write meta.json anew, if it is there already")
    args = parser.parse_args(argv)
    folder = args.folder
    for split in ("train", "val"):
        if not (folder / f"{split}.bin").is_file():
            raise UserError(f"{folder} has no {split}.bin; name the folder that nanoGPT's prepare.py wrote")
    if (folder / "meta.json").exists() and not args.force:
        raise UserError(f"{folder} has a meta.json and is a dataset already; --force writes it anew")
    counts = {path.stem: occurrences(path) for path in (folder / f"{split}.bin" for split in SPLITS)
              if path.is_file()}
    largest = max(int(np.flatnonzero(split_counts)[-1]) for split_counts in counts.values())
    tok = tokenizer_of(folder, largest)
    if largest >= tok.vocab_size:
        raise UserError(f"{folder}: a token is {largest:,}, and the {tok.encoding} vocabulary has "
                        f"{tok.vocab_size:,}")
    if "test" not in counts:
        with open(folder / "val.bin", "rb") as val:
            write_atomic(folder / "test.bin", lambda file: shutil.copyfileobj(val, file))
        counts["test"] = counts["val"]

    sizes = text_of_tokens(tok)
    sums = {split: sha256(folder / f"{split}.bin") for split in SPLITS}
    splits = {}
    for split in SPLITS:
        tokens, size, chars = (counts[split][:tok.vocab_size] @ sizes).tolist()
        splits[split] = dict(tokens=tokens, bytes=size, chars=chars, sha256=sums[split])
    own_splits = [split for split in SPLITS if split != "test" or sums["test"] != sums["val"]]
    source = {"file": [f"{split}.bin" for split in own_splits],
              "bytes": sum(splits[split]["bytes"] for split in own_splits),
              "sha256": identity([sums[split] for split in own_splits])}
    note = "" if "test" in own_splits else NOTE
    meta = write_meta(folder, folder.resolve().name, tok, splits, source, note)
    report(folder, meta)


if __name__ == "__main__":
    run(main)
