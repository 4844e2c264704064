"""
Raw text, and the data folder that is made of it: what the prepare scripts of data/ share. It finds a source
file or downloads it, checks it, reads it, writes train/val/test.bin with meta.json, and verifies them.
dataset.py reads what is written here.

A source is searched for in --source (a file or a folder); else in the folder $NANOHEADS_DATA; else here in
data/, where a download is kept. Those folders have one layout, and each file may be plain, .gz or .xz:
  tinyshakespeare/input.txt           enwik8 or enwik8.zip, there or in enwik8/
  wikitext-2/{train,valid,test}.txt   wikitext-103/wiki.{train,valid,test}.tokens or {train,valid,test}.txt,
  enwiki15/{train,valid,test}.txt     or its zip; gpt2_bpe/{vocab.bpe,encoder.json}
"""

import argparse
import codecs
import contextlib
import gzip
import hashlib
import lzma
import os
import re
import sys
import time
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanoheads import answer_interrupts
from nanoheads.common import ArgumentParser, UserError, from_json, output_written, say, write_atomic
from nanoheads.dataset import SPLITS, Writer
from nanoheads.files import remove_abandoned, temporary
from nanoheads.shards import identity
from nanoheads.tokenizer import Tokenizer, count_chars, problem_of_meta


HOME = Path(__file__).resolve().parents[1] / "data"
BLOCK = 1 << 22  # bytes read at a time
STRAY = re.compile("[\udc80-\udcff]")  # what "surrogateescape" makes of a byte that is not UTF-8
ADVICE = "replace it with a whole copy, or remove it"


@dataclass(frozen=True)
class File:
    """A source file: where it lies in a folder of sources (a download takes the first name), its content."""
    names: tuple
    sha256: str = ""        # sha256, bytes, lines: of the raw, decompressed content
    bytes: int = 0
    lines: int = 0
    url: str = ""
    archive: "File" = None  # the zip that it comes in


BPE_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_MERGES = File(("gpt2_bpe/vocab.bpe",),
                   "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
                   456_318, url=BPE_URL + "vocab.bpe")
GPT2_ENCODER = File(("gpt2_bpe/encoder.json",),
                    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
                    1_042_301, url=BPE_URL + "encoder.json")


# ---- find and check ----

def find(file, source=None):
    """(path, member of the zip or None) of a checked copy, downloaded if need be. UserError."""
    env = os.environ.get("NANOHEADS_DATA")
    for folder in [source] if source else [env, HOME] if env else [HOME]:
        folder = Path(folder).expanduser()
        if not folder.exists():
            raise UserError(
                f"{folder}: no such file or folder; correct {'--source' if source else 'NANOHEADS_DATA'}")
        names = [n + end for n in file.names for end in ("", ".gz", ".xz")]
        names += file.archive.names if file.archive else ()
        names += [Path(n).name for n in names] if source else []  # --source may name the corpus' own folder
        for path in [folder] if folder.is_file() else [folder / n for n in names]:
            if path.is_file():
                return check(path, file)
    if source:
        raise UserError(
            f"{folder}: holds no {Path(file.names[0]).name} (plain, .gz or .xz); correct --source")
    target = file.archive or file
    if not target.url:
        raise UserError(f"{file.names[0]}: not found, and it has no download; "
                        f"put it into the folder NANOHEADS_DATA, or name its folder with --source")
    digest.cache_clear()  # a temporary name may have been seen with other content
    return check(download(target, HOME / target.names[0], wrong), file)


def here(*files):
    """Whether copies of all of them can be read without a download, going by their names."""
    folders = [HOME, *filter(None, [os.environ.get("NANOHEADS_DATA")])]
    return any(all((Path(folder) / file.names[0]).is_file() for file in files) for folder in folders)


def check(path, file):
    """(path, member) of a file, once its raw content is that of `file`. UserError, naming the file."""
    member = None
    if path.suffix == ".zip":
        with reading(path):
            names = {Path(name).name for name in file.names}
            member = next((n for n in zipfile.ZipFile(path).namelist() if Path(n).name in names), None)
        if not member:
            raise UserError(f"{path}: holds no {' or '.join(sorted(names))}; {ADVICE}")
    if complaint := wrong(path, file, member):
        raise UserError(f"{path}: {complaint}; {ADVICE}")
    return path, member


def wrong(path, file, member=None):
    """What is wrong with a file's raw content, in a few words; "": nothing."""
    got = digest(path, member)
    if not got["bytes"]:
        return "is empty"
    for key in ("bytes", "lines"):
        if getattr(file, key) not in (0, got[key]):
            return f"holds {got[key]:,} {key} where {getattr(file, key):,} are expected"
    if file.sha256 not in ("", got["sha256"]):
        return f"has the sha256 {got['sha256']}, not {file.sha256}"
    return ""


@lru_cache
def digest(path, member=None):
    """bytes, chars, lines and sha256 of a file's raw content. Cached: one reading checks and describes it."""
    sha, total = hashlib.sha256(), {"bytes": 0, "chars": 0, "lines": 0}
    for block in blocks(path, member):
        sha.update(block)
        for key, n in zip(total, (len(block), count_chars(block), block.count(b"\n"))):
            total[key] += n
    return {**total, "sha256": sha.hexdigest()}


def origin(sources):
    """What meta.json holds of checked sources [(path, member)]: file, bytes, sha256."""
    sources = list(sources)
    names, got = [Path(member or path).name for path, member in sources], [digest(*each) for each in sources]
    return {"file": names[0] if len(names) == 1 else names, "bytes": sum(d["bytes"] for d in got),
            "sha256": identity([d["sha256"] for d in got])}


def keep(file):
    """The path of a checked copy in data/, made at first use: later runs need neither folder nor network."""
    path = HOME / file.names[0]
    if path.is_file():
        if not wrong(path, file):
            return path
        path.unlink()
    source, _ = find(file)
    if source != path:
        try:
            path.parent.mkdir(exist_ok=True)
            own = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # several runs may be the first one
            write_atomic(own, lambda file: file.writelines(blocks(source)))
            os.replace(own, path)
        except (OSError, UserError):  # a read-only checkout
            return source
    return path


# ---- read ----

@contextlib.contextmanager
def reading(path):
    """Damage in a compressed file -> UserError naming it."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: damaged ({error}); {ADVICE}") from None


def blocks(path, member=None):
    """A file's raw bytes, block by block; .gz, .xz and the member of a .zip are decompressed. UserError."""
    path = Path(path)
    with reading(path):
        with (zipfile.ZipFile(path).open(member) if member
              else {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)(path, "rb")) as f:
            while block := f.read(BLOCK):
                yield block


def decoded(path, member=None):
    """A file's text in pieces: (place of the first byte, str). Bytes that are not UTF-8 are STRAY in it."""
    decoder, end, start = codecs.getincrementaldecoder("utf-8")("surrogateescape"), 0, 0
    for block in chain(blocks(path, member), [b""]):
        yield start, decoder.decode(block, final=not block)
        end += len(block)
        start = end - len(decoder.getstate()[0])  # a character may go on in the next block


def first_stray(start, text):
    """The place in the file of the first byte of a piece of decoded() that is not UTF-8; None if all are."""
    stray = STRAY.search(text)
    return start + len(text[:stray.start()].encode()) if stray else None


def read(path, member, encoding, errors=None):
    """A file's content as an encoding wants it, piece by piece: bytes for byte, str for char and gpt2.

    errors="replace": each byte that is not UTF-8 becomes U+FFFD. Otherwise it is refused (UserError), and
    where the script has that option (errors="strict") it is named.
    """
    if encoding == "byte":
        yield from blocks(path, member)
        return
    for start, text in decoded(path, member):
        if errors == "replace":
            text = STRAY.sub("\ufffd", text)
        elif (place := first_stray(start, text)) is not None:
            ways = ["convert it", *(["take --errors=replace or --encoding=byte"] if errors else [])]
            raise UserError(f"{path}: is not UTF-8 at byte {place:,}; {', or '.join(ways)}")
        yield text


def cut(pieces, sizes):
    """A stream of bytes or str -> (split, its pieces): train, val, test. UserError: another total."""
    pieces, rest = filter(None, pieces), None

    def take(split, n):
        nonlocal rest
        while n > 0 and (piece := rest or next(pieces, None)):
            yield piece[:n]
            rest, n = piece[n:], n - len(piece)
        if n > 0:
            raise UserError(f"the source ends {n:,} short of its {split} split")

    for split, size in zip(SPLITS, sizes):
        yield split, take(split, size)
    if rest or next(pieces, None):
        raise UserError(f"the source goes on after its {split} split: it is larger than {sum(sizes):,}")


# ---- from the network ----

def download(file, path, wrong, tries=3):
    """Fetch file.url to `path` with progress and retries; only a checked file gets the name. UserError.

    wrong(path, file): what is wrong with its content, in a few words; "": nothing.
    """
    import requests  # here and below: it takes half a second
    temp = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(path.parent, path.name)
        temp = temporary(path)
        for left in reversed(range(tries)):
            try:
                receive(file.url, temp)
                break
            except requests.RequestException as error:
                if not left or error.response is not None and error.response.status_code < 500:
                    raise
                time.sleep(2)  # no connection, one that was cut off, or a fault of the server
        if complaint := wrong(Path(temp.name), file):
            raise UserError(f"{file.url}: the download {complaint}; put {file.names[0]} from elsewhere "
                            f"into the folder NANOHEADS_DATA")
        temp.close()
        os.replace(temp.name, path)
        return path
    except requests.RequestException as error:
        why = str(error) if len(str(error)) < 80 else type(error).__name__  # some are a paragraph
        why = why if error.response is None else f"HTTP {error.response.status_code}"
        raise UserError(f"{file.url}: the download failed ({why}); try later, or put {file.names[0]} "
                        f"into the folder NANOHEADS_DATA by hand") from None
    except OSError as error:
        raise UserError(f"{path}: cannot write ({error.strerror}); make room") from None
    finally:
        if temp:
            with suppress(OSError):  # a full disk, which was reported
                temp.close()
            Path(temp.name).unlink(missing_ok=True)


def receive(url, out):
    """Write the content of a URL into an open file, anew. Raises requests.RequestException, also where it was
    cut off.
    """
    import requests
    out.seek(0)
    out.truncate()
    headers = {"User-Agent": "nanoHeads/1.0", "Accept-Encoding": "identity"}  # its length is the file's own
    with requests.get(url, stream=True, timeout=30, headers=headers) as reply:
        reply.raise_for_status()
        size = int(reply.headers.get("Content-Length") or 0)
        with tqdm(total=size or None, unit="B", unit_scale=True, desc=url.rpartition("/")[2]) as bar:
            for block in reply.iter_content(1 << 16):
                bar.update(out.write(block))
    out.flush()
    came = out.tell()
    if size and came != size and "Content-Encoding" not in reply.headers:
        raise requests.ConnectionError(f"{came:,} of {size:,} bytes came")


# ---- the data folder that a prepare script writes ----

def prepared(out, **want):
    """The meta.json of a whole, undamaged folder made as `want` has it; else None, and why is printed."""
    try:
        meta = from_json((out / "meta.json").read_bytes())
        if problem := problem_of_meta(meta):
            return say(f"{out}/meta.json: {problem}: preparing it anew")
        for key, value in want.items():
            if {**meta["source"], **meta}.get(key) != value:
                return say(f"{out}: was made with another {key}: preparing it anew")
        for split in SPLITS:
            for name, key in ((f"{split}.bin", "sha256"), (f"{split}.sizes.bin", "sizes_sha256")):
                expected = meta["splits"][split].get(key)
                if expected and digest.__wrapped__(out / name)["sha256"] != expected:
                    return say(f"{out / name}: differs from its checksum: preparing it anew")
        return meta
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return say(f"{out}/meta.json: unreadable: preparing it anew")


def already(args, **want):
    """True, after printing the counts, when the folder is whole and was made as args and `want` have it."""
    remove_abandoned(args.out, "*.bin")
    meta = None if args.force else prepared(args.out, name=args.name, encoding=args.encoding, **want)
    if meta:
        report(args.out, meta, "already prepared, verified: ")
    return bool(meta)


def report(out, meta, head=""):
    """Print the counts of every split, aligned."""
    say(f"{head}{os.path.relpath(out)}: {meta['encoding']}, {meta['vocab_size']:,} symbols")
    print(f"{'split':<6}{'tokens':>16}{'bytes':>16}{'characters':>16}")
    for split in SPLITS:
        print(f"{split:<6}" + "".join(f"{meta['splits'][split][k]:>16,}"
                                      for k in ("tokens", "bytes", "chars")))
    if "note" in meta:
        say(f"note: {meta['note']}")


# ---- a whole script ----

def arguments(doc, name, encodings, argv=None, **more):
    """The command line of a prepare script; args.name and args.out follow the encoding (the first one).

    name: what the dataset is called; "" where that follows from --source, and then args.out may be None.
    """
    parser = ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    download, called = (" (default: $NANOHEADS_DATA, else a download)", "name") if name else ("", "source")
    parser.add_argument("--source", help=f"file or folder to read{download}")
    parser.add_argument("--out", type=Path, help=f"folder to write (default: data/<{called}>, of other "
                                                 f"encodings than the first data/<{called}>_<encoding>)")
    parser.add_argument("--force", action="store_true", help="write anew what is already there")
    parser.add_argument("--encoding", choices=encodings, default=encodings[0])
    for flag, options in more.items():
        parser.add_argument(*dict.fromkeys(["--" + flag.replace("_", "-"), "--" + flag]), **options)
    args = parser.parse_args(argv)
    args.name = name if args.encoding == encodings[0] else f"{name}_{args.encoding}"
    args.out = args.out or (HOME / args.name if name else None)
    return args


def prepare(args, files, splits=None, note="", options=None):
    """Find the files {key: File} and build from them, unless the folder is there already. UserError.

    splits(read) -> [(split, stream)], where read(key) streams a file; the default takes one file a split.
    """
    shas = [file.sha256 for file in files.values()]
    known = {"sha256": identity(shas)} if all(shas) else {}
    if (known or not args.source) and already(args, options=options, **known):
        return  # a corpus with fixed content is recognised without its source
    if args.source and len(files) > 1 and Path(args.source).is_file() and not args.source.endswith(".zip"):
        raise UserError(
            f"{args.source}: is one file; name the folder that holds all {len(files)} with --source")
    sources = {key: find(file, args.source) for key, file in files.items()}
    splits = splits or (lambda read: [(split, read(split)) for split in SPLITS])

    def streams():
        return splits(lambda key: read(*sources[key], args.encoding))

    build(args, origin(sources.values()), streams, note, options)


def build(args, source, splits, note="", options=None):
    """Write a data folder: source as in meta.json, splits() -> [(split, stream of bytes or str)]."""
    vocab = symbols(splits()) if args.encoding == "char" else getattr(args, "vocab", None)
    tok = Tokenizer(args.encoding, vocab)
    with Writer(args, tok, source, note, options) as writer:
        for split, pieces in splits():
            writer.add_pieces(split, pieces)
    report(args.out, writer.meta)


def symbols(splits):
    """The sorted characters of all splits: the char vocabulary."""
    seen = np.zeros(0x110000, bool)
    for _, pieces in splits:
        for piece in pieces:
            seen[np.frombuffer(piece.encode("utf-32-le"), "<u4")] = True
    return [chr(c) for c in np.flatnonzero(seen)]


def run(main):
    """Run a script: what goes wrong outside the code is one line on stderr and exit code 1."""
    with output_written("error"):
        run_main(main)


def run_main(main):
    """run(), but for what could not be printed."""
    answer_interrupts()
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # output_written() knows what to do
        raise
    except OSError as error:
        sys.exit(f"error: {error.filename or 'input or output'}: {error.strerror or error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
