"""
Folders and files of runs and texts: what a folder is called, who may write into it, and whether a large file
is what its checksum says. Whole files or none is write_atomic() of common.py.

Default folders are out/<name>: a run is called after its scale and mechanisms, and its config.json says all
the rest. A name that is taken gets a number behind it: out/tiny-forget, then out/tiny-forget-2. It is taken
where the folder holds a run, or a study, of another configuration, as the folder itself says. The same
command finds its own folder again.
"""

import hashlib
import json
import os
import re
import socket
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from nanoheads.common import UserError, write_json

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
    """base-word+word, cut where it is too long: tiny-moh+agency. A long base leaves room for the words."""
    base = cleaned(base)[:2 * longest // 3].lstrip("-.")
    words = "+".join(cleaned(word) or "x" for word in words)
    return "-".join(filter(None, (base, words)))[:longest].rstrip("-+.")


# ---- which of several ----

def called(name, files):
    """Those of the folders out/name, out/name-2, ... that hold one of these files, the newest first."""
    first = Path("out", name)
    numbered = [path for path in first.parent.glob(f"{name}-*") if path.name[len(name) + 1:].isdecimal()]
    return sorted((path for path in (first, *numbered) if written(path, files)),
                  key=lambda path: written(path, files), reverse=True)


def find(name, asked, asked_there, goes_on=False, free=()):
    """(the folder that a command means, a line where its name is taken by others or None).

    It is that of out/name, out/name-2, ... which holds what is asked for, the newest of several, and else the
    first that is free. asked: {key: value}. asked_there: {folder: what was asked for there, or None} of those
    called() so; others are free. goes_on: the command begins nothing new, so where no folder holds what is
    asked for it means the newest that has the name. free: keys in which a folder may differ from what is
    asked for, where none holds exactly that.
    """
    def but_for(values, keys):
        return values and {key: value for key, value in values.items() if key not in keys}

    for keys in ((), free):
        for path, there in asked_there.items():
            if but_for(there, keys) == but_for(asked, keys):
                return path, None
    if goes_on and asked_there:
        return next(iter(asked_there)), None
    first = Path("out", name)
    if first not in asked_there:
        return first, None
    new = next(path for n in count(2) if (path := first.with_name(f"{name}-{n}")) not in asked_there)
    return new, f"{first} holds another run: this one goes into {new}"


def written(folder, files):
    """When the newest of these files of a folder was written, in seconds; 0: none of them is there."""
    return max([(folder / file).stat().st_mtime for file in files if (folder / file).is_file()], default=0)


# ---- one writer ----

@contextmanager
def only_writer(folder, wait=False, flag="--out_dir", lock_stays=True):
    """Be the one process that writes into a folder, which is made where it is not there.

    The lock is on the folder's file `lock`, which names the process, and ends with the process, however that
    ends. Inside, this process may ask for the same folder again, and a process that it starts may too. wait:
    until another process has let it go; else UserError, which names the flag of the folder. One that was made
    here and stays empty is removed. lock_stays: False removes the file `lock` at the end.
    """
    folder = Path(folder)
    made_here = not folder.is_dir()
    file = hold(folder, wait, flag)
    if file is None:
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes no open file
            empty = made_here and os.listdir(folder) == ["lock"]
            if empty or not lock_stays:
                (folder / "lock").unlink()
            if empty:
                folder.rmdir()
        file.close()


def hold(folder, wait, flag):
    """The open and locked file `lock` of a folder; None: this process has it, or the one that started it."""
    this, parent = (f"{number} on {socket.gethostname()}" for number in (os.getpid(), os.getppid()))
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "lock", "a+", encoding="utf-8")
        if not lock(file, wait=False):
            file.seek(0)
            owner = file.read()
            if owner in (this, parent):
                file.close()
                return None
            if not wait:
                file.close()
                raise UserError(f"{folder} is being written by process {owner}; wait for it, stop it, or "
                                f"choose another {flag}")
            lock(file)
        if os.fstat(file.fileno()).st_nlink:  # else its process has just removed it with an empty folder
            break
        file.close()
    file.truncate(0)
    file.write(this)
    file.flush()
    return file


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


def temporary(path):
    """A new file, open for bytes, under the name that it has until it is whole. The next run overwrites what
    a killed one left.
    """
    return open(path.with_name(f"{path.name}.part"), "wb")


# ---- checksums ----

CHECKED = {}  # {path: what check() found}, of this process: a folder may be read-only


def sha256(path):
    """The sha256 of a file, in hex."""
    so_far = hashlib.sha256()
    with open(path, "rb") as file:
        if hasattr(os, "posix_fadvise"):
            # else Linux caches the file in pieces of up to 2 MiB, and a training that maps it later and reads
            # 4 KiB somewhere in a piece has all of the piece in its resident memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        while block := file.read(1 << 20):
            so_far.update(block)
    return so_far.hexdigest()


def check(path, expected, source, advice, folder=None):
    """UserError unless a file has the sha256 that `source` names; advice: what to do where it has not.

    It is read where its size or its times are not those of the last reading, which is noted in
    <name>.checked beside it, or in a folder: once after it was prepared or copied, and when it has changed.
    """
    note, now = note_of(path, folder), os.stat(path)
    good = [now.st_size, now.st_mtime_ns, now.st_ctime_ns, expected]
    if good in (CHECKED.get(path), noted(note)):
        return
    if (actual := sha256(path)) != expected:
        raise UserError(f"{path} is not the file that {source} describes: its sha256 is {actual[:16]}... and "
                        f"should be {str(expected)[:16]}...; {advice}")
    CHECKED[path] = good
    with suppress(UserError):  # a folder that is read-only, or full
        write_json(note, good, indent=None)


def noted(note):
    with suppress(OSError, ValueError):
        return json.loads(note.read_bytes())


def note_of(path, folder=None):
    return Path(folder or path.parent, f"{path.name}.checked")


def forget(path, folder=None):
    """Have the next check() of a file read it, whatever was noted."""
    CHECKED.pop(path, None)
    with suppress(OSError):
        note_of(path, folder).unlink()
