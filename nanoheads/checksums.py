"""Whether large files are what their checksums say: each is read once, and the result is kept beside it."""

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from nanoheads.common import UserError, from_json, opened_anew
from nanoheads.locks import lock

KNOWN = {}  # {path: (its stamp, its sha256)}, of this process
SETTLED = 2e9  # nanoseconds: file systems give changes that follow each other as fast one and the same time


def sha256(path):
    """The sha256 of a file, in hex."""
    with open(path, "rb") as file:
        return sha256_of(file)


def sha256_of(file):
    """The sha256 of an open file, in hex."""
    if hasattr(os, "posix_fadvise"):
        # else Linux caches the file in pieces of up to 2 MiB, and a training that maps it later and reads
        # 4 KiB somewhere in a piece has all of the piece in its resident memory
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    found = hashlib.sha256()
    while block := file.read(1 << 20):
        found.update(block)
    return found.hexdigest()


def stamp(path):
    """[size, time of the last change of the content, of the file]: what a change of a file changes; ns."""
    now = os.stat(path)
    return [now.st_size, now.st_mtime_ns, now.st_ctime_ns]


def check(path, expected, source, advice):
    """UserError unless a file has the sha256 that `source` names; advice: what to do where it has not.

    The file is read when its stamp() is not the one of the last reading, which is kept in this process and,
    where the folder can be written, in <name>.checked beside it. A change that leaves the size and both
    times as they were is not seen: that takes a changed clock or a direct write to the disk. On Windows there
    is no time of the file's change, so that there it takes no more than setting the time of the content.
    """
    named, path = path, Path(path).absolute()
    found = confirmed(path, expected)
    if not found:
        with open(path, "rb") as file:
            if os.access(path.parent, os.W_OK):
                lock(file)  # of several ranks or runs that start together one reads it, for all of them
                found = confirmed(path, expected)
            found = found or read_anew(path, file)
    if found != expected:
        raise UserError(f"{named} is not the file that {source} describes: its sha256 is {found[:16]}... and "
                        f"should be {str(expected)[:16]}...; {advice}")


def confirmed(path, expected):
    """`expected` where an earlier reading found it and the file has not changed since; else None."""
    now = stamp(path)
    if KNOWN.get(path) == (now, expected):
        return expected
    with suppress(OSError, ValueError, KeyError, TypeError):  # none there, or damaged
        kept = from_json(memory(path).read_text(encoding="utf-8"))
        if (kept["stamp"], kept["sha256"]) == (now, expected):
            KNOWN[path] = now, expected
            return expected


def read_anew(path, file):
    """The sha256 of an open file, kept for the next time unless it was changed a moment ago."""
    before, began = stamp(path), time.time_ns()
    found = sha256_of(file)
    if min(abs(began - changed) for changed in before[1:]) > SETTLED:  # also a time that lies in the future
        KNOWN[path] = before, found
        with suppress(OSError):  # a folder that is read-only, or full
            own = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            try:
                with opened_anew(own) as out:
                    out.write(json.dumps(dict(stamp=before, sha256=found)).encode())
                os.replace(own, memory(path))
            finally:
                own.unlink(missing_ok=True)
    return found


def memory(path):
    return path.with_name(f"{path.name}.checked")
