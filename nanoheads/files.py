"""
The names of run folders, who may write into one, and whether a large file is what its checksum says. Whole
files or none is write_atomic() of common.py.

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

def safe_name(text):
    """A text in the characters that names of files have on every system and that no shell reads as more."""
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", text).strip("_").rstrip(".")


def setting_in_name(key, value):
    """key=value; of a path only its last part, or where that is a run's checkpoint the run's name."""
    if isinstance(value, str):
        parts = [part for part in re.split(r"[/\\]", value) if part not in ("", ".", "..")]
        if len(parts) > 1 and parts[-1] in ("best.pt", "ckpt.pt"):
            parts.pop()
        value = parts[-1] if parts else ""
    value = safe_name(str(value))
    return f"{key}={value}" if value else key


def name_of_words(words, base="", longest=LONGEST):
    """base-word+word, cut where it is too long: tiny-moh+agency. A long base leaves room for the words."""
    base = safe_name(base)[:2 * longest // 3].lstrip("-.")
    words = "+".join(safe_name(word) or "x" for word in words)
    return "-".join(filter(None, (base, words)))[:longest].rstrip("-+.")


# ---- which of several ----

def folders_named(name, files):
    """The folders out/name, out/name-2, ... that hold one of these files, the newest first."""
    first = Path("out", name)
    numbered = [path for path in first.parent.glob(f"{name}-*") if path.name[len(name) + 1:].isdecimal()]
    return sorted((path for path in (first, *numbered) if newest_time(path, files)),
                  key=lambda path: newest_time(path, files), reverse=True)


def choose_folder(name, settings, settings_of, goes_on=False, free_keys=()):
    """(the folder that a command means, a line where its name is taken by others or None).

    It is the one of out/name, out/name-2, ... that holds a run of these settings, the newest of several, and
    else the first that is free. settings: {key: value}. settings_of: {folder: its settings, or None} of
    folders_named() so; others are free. goes_on: the command begins nothing new, so where no folder has these
    settings it means the newest that has the name. free_keys: keys in which a folder may differ from the
    settings, where none has exactly them.
    """
    def without(values, keys):
        return values and {key: value for key, value in values.items() if key not in keys}

    for keys in ((), free_keys):
        for path, folder_settings in settings_of.items():
            if without(folder_settings, keys) == without(settings, keys):
                return path, None
    if goes_on and settings_of:
        return next(iter(settings_of)), None
    first = Path("out", name)
    if first not in settings_of:
        return first, None
    new = next(path for n in count(2) if (path := first.with_name(f"{name}-{n}")) not in settings_of)
    return new, f"{first} holds another run: this one goes into {new}"


def newest_time(folder, files):
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
    is_new = not folder.is_dir()
    file = hold(folder, wait, flag)
    if file is None:
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes no open file
            empty = is_new and os.listdir(folder) == ["lock"]
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


def open_temporary(path):
    """A new file, open for bytes, under the name that it has until it is whole. The next run overwrites what
    a killed one left.
    """
    return open(path.with_name(f"{path.name}.part"), "wb")


# ---- checksums ----

GOOD_STATES = {}  # {path: the state in which this process checked it}: a folder may be read-only


def sha256(path):
    """The sha256 of a file, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        if hasattr(os, "posix_fadvise"):
            # else Linux caches the file in pieces of up to 2 MiB, and a training that maps it later and reads
            # 4 KiB somewhere in a piece has all of the piece in its resident memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check(path, expected, source, advice, folder=None):
    """UserError unless a file has the sha256 that `source` names; advice: what to do where it has not.

    The file is read where its size or its times are not those of the last reading, which are noted in
    <name>.checked beside it, or in a folder: once after it was prepared or copied, and when it has changed.
    """
    note, stat = note_path(path, folder), os.stat(path)
    state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, expected]
    if state in (GOOD_STATES.get(path), read_note(note)):
        return
    if (actual := sha256(path)) != expected:
        raise UserError(f"{path} is not the file that {source} describes: its sha256 is {actual[:16]}... and "
                        f"should be {str(expected)[:16]}...; {advice}")
    GOOD_STATES[path] = state
    with suppress(UserError):  # a folder that is read-only, or full
        write_json(note, state, indent=None)


def read_note(note):
    with suppress(OSError, ValueError):
        return json.loads(note.read_bytes())


def note_path(path, folder=None):
    return Path(folder or path.parent, f"{path.name}.checked")


def forget(path, folder=None):
    """Have the next check() of a file read it, whatever was noted."""
    GOOD_STATES.pop(path, None)
    with suppress(OSError):
        note_path(path, folder).unlink()
