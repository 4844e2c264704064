"""Locks between processes: one writer for a run's folder, one reader at a time for a large file; and files
under temporary names, which are known by their lock to be in use.

A lock is the system's own on an open file (flock): it ends with the process, however that ends. Where there
are none, as on Windows and some network file systems, everything goes on without.
"""

import os
import socket
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from nanoheads.common import UserError, in_place

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
