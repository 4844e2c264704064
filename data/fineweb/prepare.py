"""
Prepare FineWeb-Edu's sample of 10 billion tokens, or a large text of your own, in shards of 100 million.

    pip install datasets
    python data/fineweb/prepare.py                        # GPT-2's tokens, into data/fineweb
    python data/fineweb/prepare.py --encoding=byte        # bytes, into data/fineweb_byte
    python data/fineweb/prepare.py --source=my_jsonl --out=data/mine                   # a text of your own
    python data/fineweb/prepare.py --shards '../modded-nanogpt/data/fineweb10B/*.bin'  # shards as they lie

The documents are streamed, some 27 GB of download. A run that was killed goes on behind its last whole shard,
once it has passed over the documents before that. --source reads .jsonl files (also .gz or .xz) or .parquet
files instead, with a document in the field "text" of each row: a file, or those of a folder in order of name.

Shards of GPT-2's tokens are in the format of llm.c and modded-nanogpt, laid out as llm.c's script does it: an
end-of-text token before each document, documents that go on in the next shard, the first shard for val and
all others for train. Shards of bytes are bytes alone, with a NUL behind each document. A NUL inside a
document is replaced by U+FFFD, as are halves of surrogate pairs. There is no third part: test is val again.

--shards takes files in that format as they are, in order of name. Their names must hold "train" or "val" (or
"test"), which says what they are for. Only meta.json is written.

You should see a table of the tokens: about 10 billion in train, 20 GB on disk, and 100 million in val.
"""
import glob
import hashlib
import json
import os
import re
import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanoheads.common import UserError, plural, write_atomic, write_json

import numpy as np
from tqdm import tqdm

from nanoheads import shards
from nanoheads.corpus import blocks, replace_strays, strays_note
from nanoheads.dataset import SPLITS, Dataset, text_of_tokens, write_meta
from nanoheads.prepare import arguments, report, run
from nanoheads.shards import identity
from nanoheads.tokenizer import Tokenizer

REPO, SAMPLE = "HuggingFaceFW/fineweb-edu", "sample-10BT"
BATCH = 256  # documents encoded at a time
END_OF_BYTES = "\0"  # behind a document of bytes, whose vocabulary has no token for it
ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet")
NOTE = "there is no third part: test is val over again, so a test figure here is a validation figure"


# ---- the documents ----

def files_of(source):
    """The files of a --source, sorted. UserError."""
    if not source.exists():
        raise UserError(f"{source}: no such file or folder; correct --source")
    paths = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    paths = [path for path in paths if path.name.endswith(ENDINGS)]
    if not paths:
        raise UserError(f"{source}: holds no file of {', '.join(ENDINGS)}; correct --source")
    return paths


def rows_of(path):
    """The "text" of each row of a file. UserError."""
    if path.suffix == ".parquet":
        yield from column_of(path)
        return
    for number, line in enumerate(lines_of(path), 1):
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise UserError(f"{path}: line {number:,} is no JSON object with a \"text\"; correct the file")
        yield text


def lines_of(path):
    """The lines of a file that are not empty, as bytes."""
    rest = b""
    for block in blocks(path):
        *whole, rest = (rest + block).split(b"\n")
        yield from filter(bytes.strip, whole)
    if rest.strip():
        yield rest


def column_of(path):
    """The column "text" of a parquet file. UserError."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: parquet is read by what Hugging Face's datasets brings along: "
                        "pip install datasets") from None
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1024, columns=["text"]):
            for text in batch.column("text").to_pylist():
                if not isinstance(text, (str, bytes, type(None))):
                    raise UserError(f"{path}: its column \"text\" holds no text, but {type(text).__name__}")
                yield text or ""
    except (pyarrow.ArrowException, KeyError, OSError) as error:
        why = (str(error) or repr(error)).splitlines()[0]
        raise UserError(f"{path}: has no column \"text\" that can be read ({why})") from None


def from_hub(call):
    """call(), where what goes wrong is a UserError: the libraries below raise kinds of their own."""
    try:
        return call()
    except ImportError:
        raise UserError("FineWeb-Edu is read by Hugging Face's datasets: pip install datasets") from None
    except Exception as error:
        why = (str(error) or repr(error)).splitlines()[0]
        raise UserError(f"{REPO}: cannot be read ({why}); run this again to go on") from error


def commit():
    """The newest commit of the dataset on the Hub, by which a run that goes on reads the same. UserError."""
    def ask():
        import datasets  # noqa: F401  huggingface_hub may be there without it
        from huggingface_hub import HfApi
        return HfApi().dataset_info(REPO).sha
    return from_hub(ask)


def stream(revision, skip):
    """The documents of the Hub's sample at a commit, without the first `skip`. UserError."""
    def begin():
        from datasets import load_dataset
        dataset = load_dataset(REPO, name=SAMPLE, revision=revision, split="train", streaming=True)
        return iter(dataset.skip(skip))
    rows = from_hub(begin)
    while (row := from_hub(lambda: next(rows, None))) is not None:
        yield row["text"]


def encode_documents(tok, documents):
    """Yield the tokens of each document, with the separator between documents, and how many of its characters
    were replaced: see replace_strays().
    """
    documents, mark = iter(documents), END_OF_BYTES if tok.encoding == "byte" else ""
    while batch := [replace_strays(text, mark) for text in islice(documents, BATCH)]:
        if tok.encoding == "byte":
            for text, n_replaced in batch:
                yield np.frombuffer((text + mark).encode(), tok.dtype), n_replaced
        else:
            for ids, (_, n_replaced) in zip(tok.encode_batch([text for text, _ in batch]), batch):
                yield np.append(tok.dtype.type(tok.end), ids), n_replaced


# ---- shards of our own ----

def write_shards(args, tok, documents, progress):
    """Write documents, those from progress["documents"] on, as shards; `progress` is kept after each one.

    progress: what was asked for, and of the shards that are there their names and sha256, the documents that
    are whole in them, and `into`: how many tokens of the document after these are in them as well; and how
    many characters of the whole ones were replaced.
    """
    room = np.empty(args.shard_tokens, tok.dtype)
    n_held, n_documents, n_written = 0, progress["documents"], progress["into"]
    replaced = progress.get("replaced", 0)

    def put(tokens):
        put_shard(args, tokens, dict(documents=n_documents, into=n_written, replaced=replaced), progress)
    with tqdm(desc="tokens", unit="", unit_scale=True, mininterval=0.5) as bar:
        for ids, n_replaced in encode_documents(tok, documents):
            while n_written < len(ids):
                part = ids[n_written:n_written + len(room) - n_held]
                room[n_held:n_held + len(part)] = part
                n_held, n_written = n_held + len(part), n_written + len(part)
                bar.update(len(part))
                if n_held == len(room):
                    put(room)
                    n_held = 0
            n_documents, n_written, replaced = n_documents + 1, 0, replaced + n_replaced
    if n_held:
        put(room[:n_held])
    keep(args, progress, done=True, replaced=replaced)


def put_shard(args, tokens, position, progress):
    """Write a shard, whole or not at all, then that it is there, and the new position, into `progress`."""
    number = len(progress["shards"])
    name = f"fineweb_{'train' if number else 'val'}_{number:06d}.bin"
    head = shards.header(len(tokens)) if args.encoding == "gpt2" else b""
    write_atomic(args.out / name, lambda file: file.writelines([head, tokens]))
    sha = hashlib.sha256(head)
    sha.update(tokens)
    progress.update(position)
    keep(args, progress, shards=[*progress["shards"], dict(file=name, sha256=sha.hexdigest())])


def keep(args, progress, **more):
    progress.update(more)
    write_json(args.out / "progress.json", progress)


def load_progress(args, settings):
    """The progress.json of a folder: that of a run which asked for the same, or a new one. UserError."""
    path = args.out / "progress.json"
    new_progress = dict(asked=settings, documents=0, into=0, done=False, shards=[])
    shard_paths = sorted(args.out.glob("fineweb_*.bin"))
    if args.force:
        for old in shard_paths if path.is_file() else ():  # this script's
            old.unlink()
        return new_progress
    if not path.is_file():
        if shard_paths:
            raise UserError(f"{shard_paths[0]} is there, and no progress.json says that this script wrote "
                            "it: name another folder with --out, read it with --shards, or write over it "
                            "with --force")
        return new_progress
    try:
        progress = json.loads(path.read_bytes())
        old_settings = progress["asked"]
        if new_progress.keys() - progress.keys():
            raise ValueError("keys are missing")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}); --force begins anew") from None
    if old_settings != settings:
        raise UserError(f"{args.out} holds shards of {old_settings}, and this asks for {settings}: name "
                        "another folder with --out, or begin anew with --force")
    return progress


def make_shards(args, settings, paths):
    """({split: paths of its shards}, {path: sha256}, where they come from), once all are written. UserError.

    paths: the files of --source, None: the Hub.
    """
    progress, tok = load_progress(args, settings), Tokenizer(args.encoding)
    if paths is None and "commit" not in progress:
        progress["commit"] = commit()
    if progress["shards"] and not progress["done"]:
        print(f"{args.out}: {plural(len(progress['shards']), 'shard')} there; going on behind them, after "
              f"{progress['documents']:,} documents", flush=True)
    if not progress["done"]:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "meta.json").unlink(missing_ok=True)
        keep(args, progress)
        skip = progress["documents"]
        rows = (text for path in paths or () for text in rows_of(path))
        write_shards(args, tok, stream(progress["commit"], skip) if paths is None else
                     islice(rows, skip, None), progress)
    names = [shard["file"] for shard in progress["shards"]]
    if len(names) < 2:
        raise UserError(f"{args.out}: the text fills {plural(len(names), 'shard')}, and the first is val: "
                        f"nothing is left for train; take less than --shard-tokens={args.shard_tokens}, with "
                        "--force")
    files = {"val": [args.out / names[0]], "train": [args.out / name for name in names[1:]]}
    sums = {args.out / shard["file"]: shard["sha256"] for shard in progress["shards"]}
    source = {"file": f"{REPO}@{progress['commit']}, {SAMPLE}"} if paths is None else {
        "file": [path.name for path in paths], "bytes": sum(path.stat().st_size for path in paths)}
    source["documents"] = progress["documents"]
    return files, sums, {**source, "replaced": progress["replaced"]} if progress.get("replaced") else source


# ---- shards that are there ----

def shards_by_split(patterns):
    """{split: paths} of the files of --shards. UserError."""
    matches = (path for pattern in patterns for path in glob.glob(os.path.expanduser(pattern)))
    paths = sorted({Path(path).absolute() for path in matches})
    if not paths:
        raise UserError(f"--shards {' '.join(patterns)}: no such file")
    if folders := [path for path in paths if path.is_dir()]:
        raise UserError(f"--shards: {folders[0]} is a folder; name the files in it, as '{folders[0]}/*.bin'")
    names = [path.name for path in paths]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--shards: two files are called {repeated[0]}; give them different names")
    files = {}
    for path in paths:
        # by a word of its name, or else by a part of one: pretrain_val.bin is of val
        words = re.findall("[a-z]+", path.name)
        splits = next(filter(None, ([split for split in group if split in name] for name in (words, path.name)
                                    for group in (("train", "val"), ("test",)))), [])
        if len(splits) != 1:
            raise UserError(f"{path}: its name must have train, val or test in it, which says what it is for")
        files.setdefault(splits[0], []).append(path)
    for split in ("train", "val"):
        if split not in files:
            raise UserError(f"--shards {' '.join(patterns)}: no file has {split!r} in its name")
    return files


# ---- meta.json ----

def describe_splits(out, tok, files, sums):
    """{split: what meta.json says of it}; each file is read once, for its sha256 and for what its tokens are.

    files: {split: paths}; sums: {path: sha256} of those that have one already. UserError.
    """
    kind = "llm.c" if tok.encoding == "gpt2" else "plain"
    for path in (path for paths in files.values() for path in paths) if kind == "llm.c" else ():
        shards.tokens_of(path)  # what is wrong with any of them is said before the first is read
    table, splits = text_of_tokens(tok), {}
    size = sum(path.stat().st_size for paths in files.values() for path in paths)
    with tqdm(total=size, desc="read", unit="B", unit_scale=True, mininterval=0.5) as bar:
        for split, paths in files.items():
            sizes, rows = 0, []
            for path in paths:
                sha256, counts = read_shard(path, shards.HEADER if kind == "llm.c" else 0, tok.dtype, bar)
                if sums.get(path, sha256) != sha256:
                    raise UserError(f"{path} is not what was written: its sha256 is {sha256[:16]}... and "
                                    f"should be {sums[path][:16]}...; --force begins anew")
                beyond = np.flatnonzero(counts[tok.vocab_size:])
                if len(beyond):
                    raise UserError(f"{path} holds the token {tok.vocab_size + beyond[-1]:,}, and the "
                                    f"{tok.encoding} vocabulary ends at {tok.vocab_size - 1:,}")
                file = path.name if path.parent == out.absolute() else str(path)
                rows.append(dict(file=file, tokens=int(counts.sum()), sha256=sha256, format=kind))
                sizes = sizes + counts[:tok.vocab_size] @ table
            tokens, size, chars = sizes.tolist()
            splits[split] = dict(tokens=tokens, bytes=size, chars=chars,
                                 sha256=identity([row["sha256"] for row in rows]), shards=rows)
    return splits


def read_shard(path, header, dtype, bar):
    """(sha256 of a shard; how often each token is in it, int64 [65,536]). header: how many bytes it has."""
    counts = np.zeros(1 << 16, np.int64)
    with open(path, "rb") as file:
        sha256 = hashlib.sha256(file.read(header))
        while block := file.read(1 << 20):
            sha256.update(block)
            counts += np.bincount(np.frombuffer(block, dtype), minlength=len(counts))
            bar.update(len(block))
    return sha256.hexdigest(), counts


def is_prepared(args, options, files):
    """Whether the folder is complete and was made with these options; if so, prints its counts. UserError.

    files: those of --shards by split, None: any.
    """
    if args.force or not (args.out / "meta.json").is_file():
        return False
    data = Dataset(args.out)
    changed_splits = [split for split in files or () if data.files(split) != files[split]]
    if changed_splits or data.meta.get("options") != options:
        raise UserError(f"{args.out} holds another text: name another folder with --out, or write this one "
                        "anew with --force")
    for split in data.splits:
        data.tokens(split)
    report(args.out, data.meta, "already prepared, verified: ")
    return True


def command_line(argv):
    more = {"shards": {"nargs": "+", "metavar": "FILES",
                       "help": "read shards that are there already, as 'DIR/*.bin'"},
            "shard_tokens": {"type": int, "default": 100_000_000,
                             "help": "tokens in a shard (default: 100,000,000); the first shard is val"}}
    args = arguments(__doc__, "fineweb", ["gpt2", "byte"], argv, "a download", **more)
    if args.shards and (args.source or args.encoding != "gpt2"):
        raise UserError("--shards names files of GPT-2's tokens: leave --source and --encoding=byte out")
    if not 0 < args.shard_tokens < 2**31:
        raise UserError(f"--shard-tokens={args.shard_tokens} must be from 1 to {2**31 - 1:,}, the most that "
                        "the header of a shard can say")
    args.out = args.out.absolute()
    return args


def main(argv=None):
    args = command_line(argv)
    files, paths = None, None
    if args.shards:
        files, options = shards_by_split(args.shards), {"from": "shards"}
    else:
        paths = files_of(Path(args.source).expanduser()) if args.source else None
        size = sum(path.stat().st_size for path in paths or ())
        text = f"{plural(len(paths), 'file')} of {size:,} bytes" if paths else f"{REPO}, {SAMPLE}"
        options = {"from": text, "shard_tokens": args.shard_tokens}
    options.update({"separator": END_OF_BYTES} if args.encoding == "byte" else {})
    if is_prepared(args, options, files):
        return
    sums, source = {}, None
    if files is None:
        files, sums, source = make_shards(args, {**options, "encoding": args.encoding}, paths)
    args.out.mkdir(parents=True, exist_ok=True)
    tok = Tokenizer(args.encoding)
    splits = describe_splits(args.out, tok, files, sums)
    source = source or {"file": [path.name for paths_of_split in files.values() for path in paths_of_split]}
    notes = ["" if "test" in splits else NOTE, strays_note(source.get("replaced", 0))]
    splits.setdefault("test", splits["val"])
    source["sha256"] = identity([splits[split]["sha256"] for split in files])
    meta = write_meta(args.out, args.name, tok, {split: splits[split] for split in SPLITS}, source,
                      "; ".join(filter(None, notes)), options)
    report(args.out, meta)


if __name__ == "__main__":
    run(main)
