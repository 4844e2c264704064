"""
Where raw text comes from: find a source file, check it, read it (download.py fetches it).

A source is searched for in --source (a file or a folder); else in the folder $NANOHEADS_DATA; else here in
data/, where a download is kept. Those folders have one layout, and each file may be plain, .gz or .xz:
  tinyshakespeare/input.txt           enwik8 or enwik8.zip, there or in enwik8/
  wikitext-2/{train,valid,test}.txt   wikitext-103/wiki.{train,valid,test}.tokens or {train,valid,test}.txt,
  enwiki15/{train,valid,test}.txt     or its zip; gpt2_bpe/{vocab.bpe,encoder.json}
"""
import codecs
import contextlib
import gzip
import hashlib
import lzma
import os
import re
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

from nanoheads.common import UserError, write_atomic
from nanoheads.tokenizer import count_chars

HOME = Path(__file__).resolve().parents[2] / "data"
SPLITS = ("train", "val", "test")
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
    from nanoheads.download import download  # here: requests takes half a second to import
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
            wanted = {Path(name).name for name in file.names}
            member = next((n for n in zipfile.ZipFile(path).namelist() if Path(n).name in wanted), None)
        if not member:
            raise UserError(f"{path}: holds no {' or '.join(sorted(wanted))}; {ADVICE}")
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


def identity(shas):
    """One sha256 for a source: its file's own; of several files, that of their hex digests in a row."""
    return shas[0] if len(shas) == 1 else hashlib.sha256("".join(shas).encode()).hexdigest()


def origin(found):
    """What meta.json holds of checked sources [(path, member)]: file, bytes, sha256."""
    found = list(found)
    names, got = [Path(member or path).name for path, member in found], [digest(*where) for where in found]
    return {"file": names[0] if len(names) == 1 else names, "bytes": sum(d["bytes"] for d in got),
            "sha256": identity([d["sha256"] for d in got])}


def keep(file):
    """The path of a checked copy in data/, made at first use: later runs need neither folder nor network."""
    path = HOME / file.names[0]
    if path.is_file():
        if not wrong(path, file):
            return path
        path.unlink()
    found, _ = find(file)
    if found != path:
        try:
            path.parent.mkdir(exist_ok=True)
            own = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # several runs may be the first one
            write_atomic(own, lambda file: file.writelines(blocks(found)))
            os.replace(own, path)
        except (OSError, UserError):  # a read-only checkout
            return found
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


def stray_bytes(path, member=None):
    """(how many bytes are not UTF-8, the first one's place or None)."""
    count, first = 0, None
    for start, text in decoded(path, member):
        first = first_stray(start, text) if first is None else first
        count += len(STRAY.findall(text))
    return count, first


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


def utf16(path):
    """"UTF-16", "UTF-16LE", "UTF-16BE" or "UTF-32", as iconv calls it, where a file begins so, else None.

    Those with LE or BE have no byte-order mark; but in the text of an alphabet every other byte is NUL.
    """
    data = next(blocks(path), b"")
    if data.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):  # one begins like UTF-16 does
        return "UTF-32"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    first, second = (data[i::2].count(0) / max(1, len(data[i::2])) for i in (0, 1))
    if max(first, second) > 0.4 and min(first, second) < 0.1:
        return "UTF-16BE" if first > second else "UTF-16LE"


# ---- streams of text, bytes or str in pieces ----

def like(piece, text):
    """A str as what a stream's piece is: bytes or str."""
    return text.encode() if isinstance(piece, bytes) else text


def counted(pieces, found):
    """The same stream; how often each key of `found`, a str, is in it is added to that key's value."""
    tail, longest = None, 4 * max(map(len, found))  # bytes of a character: four at most
    for piece in pieces:
        tail = piece[:0] if tail is None else tail
        for mark in found:
            own = like(piece, mark)
            found[mark] += (tail[len(tail) - len(own) + 1:] + piece).count(own)
        tail = (tail + piece[-longest:])[-longest:]
        yield piece


def normalised(pieces):
    """A stream whose lines all end in \\n alone, without byte-order marks."""
    rest = None
    for piece in pieces:
        mark, cr = like(piece, "\ufeff"), like(piece, "\r")
        piece = piece if rest is None else rest + piece
        # what may go on in the next piece
        held = 1 if piece.endswith(cr) else next((n for n in (2, 1) if piece.endswith(mark[:n])), 0)
        piece, rest = piece[:len(piece) - held], piece[len(piece) - held:]
        yield in_lines(piece)
    if rest:
        yield in_lines(rest)


def in_lines(piece):
    """normalised() of a text that is whole."""
    mark, crlf, cr, lf = (like(piece, each) for each in ("\ufeff", "\r\n", "\r", "\n"))
    return piece.replace(mark, mark[:0]).replace(crlf, lf).replace(cr, lf)


def joined(streams, between):
    """Streams one after the other, and `between` two of them, a str, unless the first ends with it."""
    end = None
    for pieces in streams:
        begins = end is not None
        for piece in pieces:
            own = like(piece, between)
            if begins and not end.endswith(own):
                yield own
            begins, end = False, ((end or piece[:0]) + piece)[-len(own):]
            yield piece


def marked(pieces, separator):
    """A stream with None in the place of each `separator`, a str."""
    rest = None
    for piece in pieces:
        own = like(piece, separator)
        *whole, rest = (piece if rest is None else rest + piece).split(own)
        for text in whole:
            yield from [text, None] if text else [None]
        done = max(0, len(rest) - len(own) + 1)  # a separator may begin behind it
        if done:
            yield rest[:done]
        rest = rest[done:]
    if rest:
        yield rest


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
