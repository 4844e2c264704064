"""
Prepare OpenWebText in GPT-2's byte pairs, with an end-of-text token after each document.

    pip install datasets
    python data/openwebtext/prepare.py

8,013,769 documents, streamed: 24 GB of download, an 18 GB train.bin, hours of one or two cores. Where there
are parquet files in openwebtext/ of the folder NANOHEADS_DATA, or in --source, they are read instead.
You should see about 9.0 billion train tokens, and 4.5 million each in val and test: 0.05 % of the documents.
"""
import hashlib
import os
import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanoheads.common import UserError
from nanoheads.corpus import replace_strays, strays_note
from nanoheads.dataset import SPLITS, Writer
from nanoheads.prepare import arguments, is_prepared, report, run
from nanoheads.tokenizer import END_OF_TEXT, Tokenizer, count_chars

import numpy as np

# the commit with all 80 parquet files; the Hub's own refs/convert/parquet holds but a part of them
REPO, REVISION, DOCUMENTS = "Skylion007/openwebtext", "79d93d786212f7344586290adb811d4ae6a1762c", 8_013_769
BATCH = 256  # documents encoded at a time


def split_of(data, share):
    """bytes of a document -> its split, by a hash: in whatever order, copies of a document stay together."""
    point = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") / 2**64
    return "val" if point < share else "test" if point < 2 * share else "train"


def write(args, documents, origin, share=0.0005, options=None, expected=0):
    """Write an iterator of documents (str), holding no more than BATCH of them -> meta (a dict)."""
    tok, sha, documents = Tokenizer("gpt2"), hashlib.sha256(), iter(documents)
    count, size, n_replaced = dict.fromkeys(SPLITS, 0), 0, 0
    with Writer(args.out, args.name, tok, {}, options=options) as writer:
        while batch := [replace_strays(text) for text in islice(documents, BATCH)]:
            n_replaced += sum(n for _, n in batch)
            for (text, _), ids in zip(batch, tok.encode_batch([text for text, _ in batch])):
                data = text.encode()
                split = split_of(data, share)
                writer.add(split, np.append(ids, tok.dtype.type(END_OF_TEXT)), len(data), count_chars(data))
                sha.update(data)
                count[split], size = count[split] + 1, size + len(data)
        total = sum(count.values())
        writer.source = {"file": origin, "bytes": size, "sha256": sha.hexdigest()}
        writer.note = "separator tokens, one a document, not counted in bytes: " + ", ".join(
            f"{split} {n:,}" for split, n in count.items())
        if n_replaced:
            writer.note += f"; {strays_note(n_replaced)}"
        if expected and total != expected:
            writer.note += f"; a part of the corpus, {total:,} of {expected:,} documents"
    return writer.meta


def stream(parquet):
    """The documents of a list of parquet files, or of the Hub where there are none. UserError."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError("openwebtext is read by Hugging Face's datasets: pip install datasets") from None
    try:
        where = {"path": REPO, "revision": REVISION}
        if parquet:
            where = {"path": "parquet", "data_files": [str(path) for path in parquet]}
        for row in load_dataset(**where, split="train", streaming=True):
            yield row["text"]
    except Exception as error:  # the libraries below raise kinds of their own
        why = (str(error) or repr(error)).splitlines()[0]
        raise UserError(f"{parquet[0].parent if parquet else REPO}: cannot be read ({why})") from error


def main(argv=None):
    args = arguments(__doc__, "openwebtext", ["gpt2"], argv,
                     ".parquet files in openwebtext in $NANOHEADS_DATA, or else a download")
    env = os.environ.get("NANOHEADS_DATA")
    folder = Path(args.source).expanduser() if args.source else Path(env) / "openwebtext" if env else None
    parquet = sorted(folder.rglob("*.parquet")) if folder else []
    if args.source and not parquet:
        raise UserError(f"{folder}: holds no .parquet file; correct --source")
    origin = f"{len(parquet)} files of {folder.resolve().name}" if parquet else f"{REPO}@{REVISION}"
    if not is_prepared(args, options={"from": origin}):
        meta = write(args, stream(parquet), origin, options={"from": origin}, expected=DOCUMENTS)
        report(args.out, meta)


if __name__ == "__main__":
    run(main)
