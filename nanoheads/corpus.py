"""
Finds the files of a text such as WikiText, downloads and checks them, for the prepare scripts of data/.

A corpus has a folder of its own, such as wikitext-2, in the folder of sources: the one that NANOHEADS_DATA
names, or else data/ of this repository. A file that is not there is downloaded to it. With --source a
prepare script reads another folder of the corpus, or its one file, and downloads nothing. Files of text may
be compressed there, as .gz or .xz.
"""

import contextlib
import gzip
import hashlib
import lzma
import os
import re
import time
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from nanoheads.common import ROOT, UserError

HOME = ROOT / "data"
BLOCK = 1 << 22  # bytes read at a time
# halves of surrogate pairs, which JSON may hold, and what "surrogateescape" makes of bytes that are not UTF-8
STRAY = re.compile("[\ud800-\udfff]")
ADVICE = "replace it with a whole copy, or remove it"
OPENERS = {".gz": gzip.open, ".xz": lzma.open}


class File(NamedTuple):
    """A file of a corpus, and what is known of its content once it is decompressed."""
    name: str
    sha256: str = ""
    bytes: int = 0
    lines: int = 0
    url: str = ""  # "": it has no download


BPE_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_MERGES = File("vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
                   456_318, url=BPE_URL + "vocab.bpe")
GPT2_ENCODER = File("encoder.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
                    1_042_301, url=BPE_URL + "encoder.json")


# ---- where they lie ----

def locate(files, corpus, source=None, archive=None):
    """{key: path} of the files {key: File} of a corpus. UserError.

    corpus: the name of its folder. source: what --source names. archive: the File of the zip that they come
    in, which a folder that --source names has unpacked.
    """
    source = source and require(Path(source).expanduser(), "--source")
    if archive and not (source and source.is_dir()):
        path = source or fetch(archive, corpus)
        return {key: zip_member(path, file.name) for key, file in files.items()}
    if source and source.is_file() and len(files) > 1:
        raise UserError(f"{source}: is one file; name the folder that holds all {len(files)} with --source")
    if not source:
        return {key: fetch(file, corpus) for key, file in files.items()}
    paths = {key: source if source.is_file() else find_form(source / file.name)
             for key, file in files.items()}
    for path in paths.values():
        if not path.is_file():
            raise UserError(f"{source}: holds no {path.name} (plain, .gz or .xz); correct --source")
    return paths


def fetch(file, corpus):
    """The path of a file in the folder of sources, downloaded where it is not there. UserError."""
    path = find_form(sources() / corpus / file.name)
    if path.is_file():
        return path
    if not file.url:
        raise UserError(f"{corpus}/{file.name}: not found, and it has no download; put it into the folder "
                        "NANOHEADS_DATA, or name its folder with --source")
    return download(file, path)


def sources():
    """The folder of sources. UserError."""
    folder = os.environ.get("NANOHEADS_DATA")
    return require(Path(folder).expanduser(), "NANOHEADS_DATA") if folder else HOME


def require(path, name):
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; correct {name}")
    return path


def find_form(path):
    """A path, or that of its compressed form, whichever is there."""
    forms = (path, *(path.with_name(path.name + ending) for ending in OPENERS))
    return next(filter(Path.is_file, forms), path)


def zip_member(path, name):
    """The member of a zip with this name, as a path that can be opened; of a file that is no zip the file
    itself. UserError.
    """
    if path.suffix != ".zip":
        return path
    with name_damage(path):
        names = zipfile.ZipFile(path).namelist()
        member = next((member for member in names if Path(member).name == name), None)
    if not member:
        raise UserError(f"{path}: holds no {name}; {ADVICE}")
    return zipfile.Path(path, member)


def gpt2_is_here():
    """Whether GPT-2's byte pairs can be read without a download."""
    return all((HOME / "gpt2_bpe" / file.name).is_file() or (sources() / "gpt2_bpe" / file.name).is_file()
               for file in (GPT2_MERGES, GPT2_ENCODER))


def gpt2_file(file):
    """The path of one of the two files of GPT-2's byte pairs, checked. UserError.

    All programs read them, so that they are kept in data/: nobody needs NANOHEADS_DATA or a network to
    sample from a model whose text was prepared with either.
    """
    path = HOME / "gpt2_bpe" / file.name
    if not path.is_file():
        source = fetch(file, "gpt2_bpe")
        check(source, file)
        if source == path:
            return path
        part = path.with_name(f"{path.name}.{os.getpid()}.part")  # several runs may be the first one
        try:
            path.parent.mkdir(exist_ok=True)
            part.write_bytes(source.read_bytes())
            os.replace(part, path)
        except OSError:  # a checkout that cannot be written
            return source
    check(path, file)
    return path


# ---- read ----

@contextlib.contextmanager
def name_damage(path):
    """Damage in a compressed file -> UserError naming it."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: damaged ({error}); {ADVICE}") from None


def blocks(path):
    """A file's bytes, decompressed, block by block. UserError."""
    ending = os.path.splitext(path.name)[1]
    with name_damage(path), OPENERS[ending](path) if ending in OPENERS else path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


def describe(path):
    """File of what a file holds. UserError: nothing."""
    sha, size, lines = hashlib.sha256(), 0, 0
    for block in blocks(path):
        sha.update(block)
        size += len(block)
        lines += block.count(b"\n")
    return File(path.name, sha.hexdigest(), size, lines)


def difference(actual, file):
    """What describe() says of a file that is not as `file` has it, in a few words; "": nothing."""
    if not actual.bytes:
        return "is empty"
    for key in ("bytes", "lines"):
        got, expected = getattr(actual, key), getattr(file, key)
        if expected and got != expected:
            return f"holds {got:,} {key} where {expected:,} are expected"
    if file.sha256 and actual.sha256 != file.sha256:
        return f"has the sha256 {actual.sha256}, not {file.sha256}"
    return ""


def check(path, file):
    """What describe() says of a file. UserError unless it is what is known of `file`."""
    actual = describe(path)
    if complaint := difference(actual, file):
        raise UserError(f"{path}: {complaint}; {ADVICE}")
    return actual


def read_text(path, errors=None):
    """(str, how many bytes are not UTF-8, the place of the first) of a file. UserError.

    errors="replace": each such byte becomes U+FFFD. Otherwise it is refused, and where the script has that
    option (errors="strict") it is named.
    """
    data = b"".join(blocks(path))
    try:
        return data.decode(), 0, None
    except UnicodeDecodeError as error:
        if errors == "replace":
            return *replace_strays(data), error.start
        ways = ["convert it", *(["take --errors=replace or --encoding=byte"] if errors else [])]
        raise UserError(f"{path}: is not UTF-8 at byte {error.start:,}; {', or '.join(ways)}") from None


def replace_strays(text, mark=""):
    """(a text, str or bytes, as a str that is UTF-8; how much of it was replaced by U+FFFD).

    mark: what stands between documents, which is replaced as well: inside one it would part it.
    """
    if isinstance(text, bytes):
        text = text.decode(errors="surrogateescape")
    text, count = STRAY.subn("\ufffd", text)
    return (text.replace(mark, "\ufffd"), count + text.count(mark)) if mark else (text, count)


def strays_note(count):
    """What meta.json says of what replace_strays() replaced; "": nothing."""
    return f"characters of no text, replaced by U+FFFD, which counts as 3 bytes: {count:,}" if count else ""


# ---- from the network ----

def download(file, path, tries=3):
    """Fetch file.url to `path` with progress and retries; only what is checked gets the name. UserError."""
    import requests  # here and below: it takes half a second
    part = path.with_name(path.name + ".part")
    by_hand = f"put {path.parent.name}/{file.name} into the folder NANOHEADS_DATA by hand"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for tries_left in reversed(range(tries)):
            try:
                receive(file.url, part)
                break
            except requests.RequestException as error:
                if not tries_left or error.response is not None and error.response.status_code < 500:
                    raise
                time.sleep(2)  # no connection, one that was cut off, or a fault of the server
        if complaint := difference(describe(part), file):
            raise UserError(f"{file.url}: the download {complaint}; {by_hand}")
        os.replace(part, path)
        return path
    except requests.RequestException as error:
        why = str(error) if len(str(error)) < 80 else type(error).__name__  # some are a paragraph
        why = why if error.response is None else f"HTTP {error.response.status_code}"
        raise UserError(f"{file.url}: the download failed ({why}); try later, or {by_hand}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot write ({error.strerror}); make room, or name another folder as "
                        "NANOHEADS_DATA") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def receive(url, path):
    """Write the content of a URL into a file. Raises requests.RequestException, also where it was cut off."""
    import requests
    headers = {"User-Agent": "nanoHeads/1.0", "Accept-Encoding": "identity"}  # its length is the file's own
    with requests.get(url, stream=True, timeout=30, headers=headers) as reply, open(path, "wb") as out:
        reply.raise_for_status()
        size, received = int(reply.headers.get("Content-Length") or 0), 0
        with tqdm(total=size or None, unit="B", unit_scale=True, desc=url.rpartition("/")[2]) as bar:
            for block in reply.iter_content(1 << 16):
                received += out.write(block)
                bar.update(len(block))
    if size and received != size and "Content-Encoding" not in reply.headers:
        raise requests.ConnectionError(f"{received:,} of {size:,} bytes came")
