"""
Folders and files of runs and texts: what a run's folder is called, who may write into it, and whether a large
file is what its checksum says. Whole files or none is write_atomic() of common.py.

Default folders are out/<name>: a run is called after its scale and mechanisms, and its config.json says all
the rest. A name that is taken gets a number behind it: out/tiny-forget, then out/tiny-forget-2. It is taken
where the folder holds a run, or a study, of another configuration, as the folder itself says. The same
command finds its own folder again.

A lock is the system's own on an open file (flock): it ends with the process, however that ends. There is one
writer for a run's folder, one reader at a time for a large file, and files under temporary names are known by
their lock to be in use. Where there are no locks, as on Windows and some network file systems, everything
goes on without.

Each large file is read once for its checksum, and the result is kept beside it.
"""

import hashlib
import json
import os
import re
import socket
import sys
import time
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from nanoheads.common import UserError, from_json, in_place, opened_anew


LONGEST = 60  # characters of a name, its number aside


# ---- names ----

def cleaned(text):
    """A text in the characters that names of files have on every system and that no shell reads as more."""
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", text).strip("_").rstrip(".")


def setting_in_name(key, value):
    """key=value; of a path only its last part, or where that is a run's checkpoint the run's name."""
    if isinstance(value, str):
        parts = [part for part in re.split(r"[/\\]", value) if part not in ("", ".", "..")]
        if len(parts) > 1 and parts[-1] in ("best.pt", "ckpt.pt"):
            parts.pop()
        value = parts[-1] if parts else ""
    value = cleaned(str(value))
    return f"{key}={value}" if value else key


def joined(words, base="", longest=LONGEST):
    """base-word+word; where that is too long, the first words and how many more: tiny-moh+agency+3_more."""
    base = cleaned(base)[:2 * longest // 3].lstrip("-.")
    words = [cleaned(word) or "x" for word in words]
    start = base + "-" * bool(base and words)
    for kept in range(len(words), 0, -1):
        more = [f"{len(words) - kept}_more"] * (kept < len(words))
        if len(name := start + "+".join((*words[:kept], *more))) <= longest:
            return name
    if not words:
        return start
    more = f"+{len(words) - 1}_more" * (len(words) > 1)
    return start + words[0][:longest - len(start + more)] + more


# ---- which of several ----

def find(name, asked, files, asked_in, goes_on=False, free=()):
    """(the folder that a command means, a line where its name is taken by others or None).

    It is that of out/name, out/name-2, ... which holds what is asked for, the newest of several, and else the
    first that is free. asked: {key: value}. files: names of files; a folder without any of them is free.
    asked_in(folder): what was asked for there; None: it does not say, and then out/name itself is taken for
    what is asked for, since that is all that there was before folders had numbers. goes_on: the command
    begins nothing new, so where no folder holds what is asked for it means the newest that has the name.
    free: keys in which a folder may differ from what is asked for, where none holds exactly that.
    """
    def but_for(values, keys):
        return values and {key: value for key, value in values.items() if key not in keys}

    first, numbered = Path("out", name), re.compile(rf"{re.escape(name)}-([2-9]|[1-9]\d+)")
    several = {1: first, **{int(match[1]): path for path in first.parent.glob("*")
                            if (match := numbered.fullmatch(path.name))}}
    held = {number: path for number, path in several.items() if written(path, files)}
    there = {number: asked_in(path) for number, path in held.items()}
    for keys in ((), free):
        own = [path for number, path in held.items() if but_for(there[number], keys) == but_for(asked, keys)]
        if own:
            return max(own, key=lambda path: written(path, files)), None
    if goes_on and held:
        return max(held.values(), key=lambda path: written(path, files)), None
    if 1 not in held or there[1] is None:
        return first, None
    new = first.with_name(f"{name}-{next(number for number in count(2) if number not in held)}")
    return new, (f"{first} holds another configuration ({differences(there[1], asked)}): this one goes into "
                 f"{new}")


def written(folder, files):
    """When the newest of these files of a folder was written, in seconds; 0: none of them is there."""
    return max([(folder / file).stat().st_mtime for file in files if (folder / file).is_file()], default=0)


def differences(there, here, most=3):
    """What differs of two {key: value}, in words; a key that one lacks has its default there."""
    def said(values, key):
        text = repr(values[key]) if key in values else "its default"
        return text if len(text) <= 60 else f"{text[:59]}…"

    keys = [key for key in {**there, **here} if there.get(key, ...) != here.get(key, ...)]
    more = [f"{len(keys) - most} more"] if len(keys) > most else []
    return "; ".join([f"{key} is {said(there, key)} there and {said(here, key)} here"
                      for key in keys[:most]] + more)


# ---- locks between processes ----

HELD = set()  # the folders, resolved, that this process is the writer of


def lock(file, wait=True):
    """Hold this open file until it is closed; False where another process does and `wait` is False."""
    try:
        import fcntl  # not on every system
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # OSError: a file system without locks
        pass
    return True


@contextmanager
def only_writer(folder, wait=False):
    """Be the one process that writes into a run's folder, which is made where it is not there.

    The lock is on the folder's file `lock`, which names the process. Inside, this process may ask for the
    same folder again, and a process that it starts may too. wait: until another process has let it go;
    else UserError, which names that process. A folder that was made here and stays empty is removed.
    """
    folder = Path(folder)
    key = folder.resolve()
    if key in HELD:
        yield
        return
    made_here = not folder.is_dir()
    file = hold(folder, wait)
    if file is None:  # by the process that started this one
        yield
        return
    HELD.add(key)
    try:
        yield
    finally:
        HELD.discard(key)
        if sys.platform == "win32":  # where no open file can be removed
            file.close()
        if made_here and os.listdir(folder) == ["lock"]:
            (folder / "lock").unlink()
            folder.rmdir()
        file.close()


def hold(folder, wait):
    """The open and locked file `lock` of a folder; None where the parent of this process holds it. UserError.
    """
    path = folder / "lock"
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+", encoding="utf-8", opener=in_place)
        if not lock(file, wait):
            file.seek(0)
            number, host, since = (file.read().split(" ", 2) + ["?"] * 3)[:3]
            file.close()
            if number == str(os.getppid()) and host == socket.gethostname():
                return None
            where = "" if host in ("?", socket.gethostname()) else f" on {host}"
            raise UserError(f"{folder} is being written by process {number}{where} (since {since}); wait for "
                            "it, stop it, or choose another --out_dir")
        # between opening and locking, the process before may have removed its empty folder; on Windows an
        # open file cannot be removed
        if sys.platform == "win32" or same_file(path, file):
            break
        file.close()
    file.truncate(0)
    file.write(f"{os.getpid()} {socket.gethostname()} {time.strftime('%Y-%m-%d %H:%M:%S')}")
    file.flush()
    return file


def temporary(path):
    """A new file <name>.<process>.tmp beside a path, open for bytes and locked until it is closed."""
    path = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    while True:
        path.unlink(missing_ok=True)
        file = open(path, "xb")  # a new one, never what a link of this name leads to
        lock(file)
        if sys.platform == "win32" or same_file(path, file):  # else remove_abandoned() came in between
            return file
        file.close()


def remove_abandoned(folder, pattern):
    """Remove the temporary() files of a folder, of names like `pattern`, whose process ended before its time.
    """
    for path in folder.glob(f"{pattern}.*.tmp"):
        with suppress(OSError):
            if sys.platform == "win32":  # which has no such locks, and removes no file that is open
                path.unlink()
                continue
            with open(path, "rb") as file:
                if lock(file, wait=False):
                    path.unlink()


def same_file(path, file):
    """Whether the open file is the one that stands at the path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


# ---- checksums ----

KNOWN = {}  # {path: (its stamp, its sha256)}, of this process
SETTLED = 2e9  # nanoseconds: file systems give changes that follow each other as fast one and the same time


def sha256(path):
    """The sha256 of a file, in hex."""
    with open(path, "rb") as file:
        return sha256_of(file)


def sha256_of(file, seen=None):
    """The sha256 of an open file, in hex; seen: a function that is given each block of it, 1 MiB at most."""
    if hasattr(os, "posix_fadvise"):
        # else Linux caches the file in pieces of up to 2 MiB, and a training that maps it later and reads
        # 4 KiB somewhere in a piece has all of the piece in its resident memory
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    found = hashlib.sha256()
    while block := file.read(1 << 20):
        found.update(block)
        if seen:
            seen(block)
    return found.hexdigest()


def stamp(path):
    """[size, time of the last change of the content, of the file]: what a change of a file changes; ns."""
    now = os.stat(path)
    return [now.st_size, now.st_mtime_ns, now.st_ctime_ns]


def check(path, expected, source, advice, kept=None):
    """UserError unless a file has the sha256 that `source` names; advice: what to do where it has not.

    The file is read when its stamp() is not the one of the last reading, which is kept in this process and,
    where the folder can be written, in <name>.checked beside it, or in the file `kept`. A change that leaves
    the size and both times as they were is not seen: that takes a changed clock or a direct write to the
    disk. On Windows there is no time of the file's change, so that there it takes no more than setting the
    time of the content.
    """
    named, path = path, Path(path).absolute()
    kept = kept or memory(path)
    found = confirmed(path, expected, kept)
    if not found:
        with open(path, "rb") as file:
            if os.access(kept.parent, os.W_OK):
                lock(file)  # of several ranks or runs that start together one reads it, for all of them
                found = confirmed(path, expected, kept)
            found = found or read_anew(path, file, kept)
    if found != expected:
        raise UserError(f"{named} is not the file that {source} describes: its sha256 is {found[:16]}... and "
                        f"should be {str(expected)[:16]}...; {advice}")


def confirmed(path, expected, kept=None):
    """`expected` where an earlier reading found it and the file has not changed since; else None."""
    now = stamp(path)
    if KNOWN.get(path) == (now, expected):
        return expected
    with suppress(OSError, ValueError, KeyError, TypeError):  # none there, or damaged
        last = from_json((kept or memory(path)).read_text(encoding="utf-8"))
        if (last["stamp"], last["sha256"]) == (now, expected):
            KNOWN[path] = now, expected
            return expected


def read_anew(path, file, kept, seen=None):
    """The sha256 of an open file, kept for the next time in the file `kept` unless it was changed a moment
    ago; seen: see sha256_of().
    """
    before, began = stamp(path), time.time_ns()
    found = sha256_of(file, seen)
    if min(abs(began - changed) for changed in before[1:]) > SETTLED:  # also a time that lies in the future
        KNOWN[path] = before, found
        with suppress(OSError):  # a folder that is read-only, or full
            own = kept.with_name(f"{path.name}.{os.getpid()}.tmp")
            try:
                with opened_anew(own) as out:
                    out.write(json.dumps(dict(stamp=before, sha256=found)).encode())
                os.replace(own, kept)
            finally:
                own.unlink(missing_ok=True)
    return found


def memory(path):
    return path.with_name(f"{path.name}.checked")
