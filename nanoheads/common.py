"""What every program needs once: an error for the person, whole files or none, a device, JSON, tables, the
commit.
"""

import argparse
import ctypes
import errno
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import traceback
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

from nanoheads import answer_interrupts

ROOT = Path(__file__).resolve().parents[1]


# paths of the files of one's own whose code runs in this process: what goes wrong there is no bug of ours
OWN_FILES = set()


class UserError(ValueError):
    """What is wrong and what to do, for the person at the terminal: one problem a line, shown without a
    traceback.
    """


LESS = ("lower batch_size (and raise grad_accum to keep the batch) or block_size, "
        "or set checkpoint_activations=True")


# what torch.compile says where it finds no compiler of its own -> what it lacks, and what to do
CXX = "a working C++ compiler: install one, such as g++, and let CXX name it if it has another name"
COMPILERS = {"No working C++ compiler found": CXX, "InvalidCxxCompiler": CXX,
             "Cannot find a working triton": "a working Triton, its compiler for GPUs: pip install triton",
             "Failed to find C compiler": "a C compiler, which Triton calls: install one, such as gcc, and "
                                          "let CC name it if it has another name"}


def ran_out_of_memory(e):
    """Whether an exception says that memory ran out, on a CPU or a GPU."""
    signs = "out of memory", "can't allocate memory", "ALLOC_FAILED"
    return isinstance(e, MemoryError) or any(sign in str(e) for sign in signs)


def from_lab(name, what):
    """A module of lab/ or study/, imported where it is asked for: nothing else here needs it.

    name: "lab.heads.controller", say. what: the flag or the program that asks. UserError: no such folder.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as e:
        raise UserError(without_lab(e, what)) from None


def without_lab(e, what):
    """What to say where importing something of lab/ or study/ failed, in one line. Raises e where it was not
    that folder that was missing.
    """
    folder = (e.name or "").partition(".")[0]
    if folder not in ("lab", "study"):
        raise e
    return f"{what} is work of {folder}/, which is not there beside nanoheads/: bring it back, or do without"


def explain(e, less=LESS):
    """What a user can make of an exception that ended a program; None: nothing, it is a bug, and its
    traceback is wanted. less: what to lower where memory ran out.
    """
    if isinstance(e, UserError):
        return str(e)
    if isinstance(e, KeyboardInterrupt):
        return "interrupted before the first step"
    if ran_out_of_memory(e):
        return f"out of memory; {less}"
    if problem := fault_of_own_file(e):
        return problem
    if isinstance(e, OSError):
        return f"{e.filename or 'input or output'}: {e.strerror or e}"
    if "out of resource: shared memory" in str(e):  # --compile=False would meet the same kernel
        return (f"a kernel needs more shared memory than this GPU has ({' '.join(str(e).split())[:200]}); "
                "smaller heads (more n_head) or dtype=bfloat16 need less")
    if type(e).__module__.startswith(("torch._dynamo", "torch._inductor")):
        for sign, lacks in COMPILERS.items():
            if sign in str(e):
                return f"torch.compile lacks {lacks}, or do without: --compile=False"
        return f"torch.compile failed ({' '.join(str(e).split())[:200]}); --compile=False does without"


def fault_of_own_file(e):
    """What went wrong in which line of a file of one's own, in one line; None: it was not there, or is told.
    """
    if isinstance(e, UserError):
        return None
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(e.__traceback__)]
    if isinstance(e, SyntaxError):
        frames.append((e.filename, e.lineno))
    places = [f"{path}, line {line}" for path, line in frames if path in OWN_FILES]
    if OWN_FILES.intersection(getattr(e, "files", ())):  # an attention.ScoreError
        return str(e)
    words = " ".join(str(getattr(e, "msg", e)).split())[:300]
    return f"{places[-1]}: {type(e).__name__}: {words}" if places else None


# paths that the program at work has yet to write, by writable() and writable_folder(): it goes on without a
# reader of what it prints
PROMISED = set()
# {file of --json: where the one that an earlier program wrote is now}
ASIDE = {}


def as_program(name):
    """Decorate a program's main(argv=None): output_written(), and what an earlier one wrote into the file of
    --json is never there to be taken for what this one found, however it ends.
    """
    def decorated(main):
        @functools.wraps(main)
        def run(argv=None):
            PROMISED.clear()
            ASIDE.clear()
            with output_written(name):
                for path in json_files(sys.argv[1:] if argv is None else argv):
                    set_aside(path)
                try:
                    return main(argv)
                finally:
                    report_aside(name)
        return run
    return decorated


def json_files(argv):
    """The files that --json=FILE and --json FILE name in a command line."""
    argv = [str(arg) for arg in argv]
    joined = [arg.partition("=")[2] for arg in argv if arg.startswith("--json=")]
    return joined + [after for arg, after in zip(argv, argv[1:]) if arg == "--json"]


def set_aside(path):
    """Rename the file of an earlier program's result to FILE.old. What holds no JSON is no result, and stays:
    it may be a text that was named by mistake.
    """
    with suppress(OSError, ValueError, RuntimeError):  # no JSON; or not to be moved, and writable() says so
        path = Path(path).resolve()
        old = path.with_name(f"{path.name}.old")
        if path.is_file() and isinstance(json.loads(path.read_bytes()), (dict, list)):
            os.replace(path, old)
            ASIDE[path] = old


def report_aside(name):
    """Remove what was set aside of a file that was written anew; a line for each that was not."""
    for path, old in ASIDE.items():
        with suppress(OSError, ValueError):
            if path.exists():
                old.unlink()
            else:
                print(f"{name}: --json: no result was written; the one that was in {path} is in {old}",
                      file=sys.stderr)


class Output:
    """sys.stdout of a program. Where its reader goes away, as head does, and files are still to be written,
    what is printed goes nowhere from then on, and the program goes on.
    """

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        return self.attempt(self.stream.write, text)

    def flush(self):
        return self.attempt(self.stream.flush)

    def attempt(self, action, *args):
        try:
            return action(*args)
        except BrokenPipeError:
            if not PROMISED:
                raise
            drop(self.stream.fileno())


def drop(number):
    """Have what is written to a file of this number, such as 1 or 2, go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


# what moves a terminal's cursor, colours it, or is half a character
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text):
    """Text without what no page, no font and no terminal should get, such as the escapes in a file's name."""
    return UNPRINTABLE.sub("�", str(text))


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, whose own lines about a wrong argument show it without what a terminal would obey."""

    def error(self, message):
        super().error(printable(message))


def say(*lines, **how):
    """Print lines in which names stand, or paths: printable()."""
    print(*map(printable, lines), sep="\n", **how)


@contextmanager
def output_written(program):
    """End a program in one line where what it printed cannot be written, such as to a full disk, and quietly
    where its reader has seen enough and no file is to be written, see Output. What it cannot show is printed
    as "?". Everything else passes through.
    """
    show_the_rest_as_question_marks()
    stdout = sys.stdout
    if stdout:  # None where it was closed before the program began
        sys.stdout = Output(stdout)
    try:
        try:
            yield
        except SystemExit as e:
            if isinstance(e.code, str):
                e.code = printable(e.code)
            if not e.code:  # behind --help
                flush_output()
            raise
        flush_output()
    except BrokenPipeError:  # such as head
        pass
    except OSError as e:
        sys.exit(printable(f"{program}: {explain(e)}"))
    finally:
        try:
            flush_output()
        except (OSError, ValueError):  # Python would try it once more, and print a traceback
            with suppress(OSError, ValueError):
                drop(sys.stdout.fileno())
        sys.stdout = stdout


def show_the_rest_as_question_marks():
    """From here on a character that standard output cannot show is printed as "?", and ends no program: an
    encoding such as ASCII or Latin-1, and the code page of a file or a pipe on Windows, lack some of ours.
    """
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has none
        sys.stdout.reconfigure(errors="replace")


def flush_output():
    if sys.stdout:
        sys.stdout.flush()


@contextmanager
def last_words(program, less="ask for less at once: shorter texts, a smaller batch, fewer samples"):
    """End a program in one line where it cannot go on, and quietly where its reader has seen enough.

    less: what to lower where memory ran out. A bug keeps its traceback.
    """
    answer_interrupts()
    with output_written(program):
        try:
            yield
        except KeyboardInterrupt:
            print(f"\n{program}: interrupted", file=sys.stderr)
            sys.exit(130)
        except BrokenPipeError:  # such as head, see output_written()
            raise
        except Exception as e:
            words = fault_of_own_file(e) or (str(e) if isinstance(e, ValueError) else explain(e, less))
            if words is None:
                raise
            close_bars()
            sys.exit(f"{program}: {words}")


def close_bars():
    """Close all open progress bars, so that what is printed next stands on a line of its own."""
    if "tqdm" in sys.modules:  # it is imported late, where a bar is wanted
        for bar in list(getattr(sys.modules["tqdm"].tqdm, "_instances", ())):
            bar.close()


def writable(path, flag="--json"):
    """The Path to write, checked before hours of work, and promised. Raises UserError.

    Of --json it no longer holds what an earlier program wrote: see as_program().
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        raise UserError(f"{flag}: {path} is not a file")
    if not (path.parent.is_dir() and takes_files(path.parent)):
        raise UserError(f"{flag}: cannot write into {path.parent}: no such folder, or not allowed")
    if flag == "--json":
        set_aside(path)
    PROMISED.add(path)
    return path


def takes_files(folder):
    """Whether a file can be made in a folder that is there. Only trying tells: root may write everywhere, and
    yet some file systems take no files.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def writable_folder(path, flag="--out"):
    """The Path of a folder to write into, which may not be there yet; checked before hours of work, promised.

    Raises UserError.
    """
    path = Path(path)
    there = next(each for each in (path.absolute(), *path.absolute().parents) if os.path.lexists(each))
    if not there.is_dir():
        raise UserError(f"{flag}: {there} is a file, not a folder; name another one")
    if not takes_files(there):
        raise UserError(f"{flag}: cannot write into {there}; name another folder")
    PROMISED.add(path)
    return path


def no_link(path):
    """The path. UserError where a link stands there: what is written would land wherever it leads.

    A run's folder may be a link, as out -> /scratch/out is. What stands in it may come from somebody else.
    """
    if os.path.islink(path):
        raise UserError(f"{path} is a link to {os.readlink(path)!r}: remove it; nothing in a run's folder is "
                        "written through a link")
    return path


def in_place(path, flags):
    """The opener, see open(), of a file that keeps what it holds. UserError: it is a link."""
    return os.open(no_link(path), flags | getattr(os, "O_NOFOLLOW", 0), 0o666)  # Windows has no such flag


def opened_anew(path):
    """A new file, open for bytes, in the place of what is there: a killed process left it, or it is a link.
    """
    while True:
        try:
            return open(path, "xb")  # which follows no link
        except FileExistsError:
            Path(path).unlink(missing_ok=True)


MOST_READ = 1 << 28  # bytes of a file that is read as a whole: 256 MiB


def read_whole(path, opener=open):
    """The bytes of a file that a person named; opener: gzip.open for what is compressed.

    Raises OSError, also where it holds more than MOST_READ, as /dev/zero does.
    """
    with opener(path, "rb") as file:
        data = file.read(MOST_READ + 1)
    if len(data) > MOST_READ:
        raise OSError(errno.EFBIG, f"more than {MOST_READ >> 20} MiB, the most that is read at once",
                      str(path))
    return data


def text_of(path):
    """read_whole() of UTF-8 text, whose lines end with a newline alone. Raises UnicodeDecodeError too."""
    return read_whole(path).decode().replace("\r\n", "\n").replace("\r", "\n")


def write_atomic(path, write):
    """write(file) into a temporary name, fsync, rename: after a crash `path` is the old file or the new one.

    A link at `path` is replaced, and not followed. Raises UserError when the disk is full or refuses, and
    then leaves the old file as it was.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        with opened_anew(part) as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
        if sys.platform != "win32":  # which opens no folder as a file
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # the rename itself must reach the disk
            finally:
                os.close(folder)
    except (OSError, RuntimeError) as e:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        # torch wraps a failed write in a RuntimeError
        cause = e.__context__ if isinstance(e.__context__, OSError) else e
        if not isinstance(cause, OSError):
            raise
        before = "the previous one is intact" if path.exists() else "there is no previous one"
        raise UserError(f"could not write {path} ({cause.strerror or cause}); {before}") from None


def pick_device(name):
    """'auto' -> cuda, mps or cpu, whichever is there first; else the name, checked. Raises UserError.

    On a GPU every program then takes TF32 for products in float32: scoring takes the same. On a CPU the
    process keeps the memory that it frees.
    """
    import torch  # late: plot_curves.py does without
    device = checked_device(name)
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    elif device == "cpu":
        keep_freed_memory()
    return device


def keep_freed_memory():
    """Have glibc keep freed memory for the next allocation; no more where the C library is another.

    A step frees and takes the same tensors as the one before; given back to the system, each page of them
    would be cleared once more. 32 MiB is the largest mmap threshold that glibc takes.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD in malloc.h
    with suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 1 << 30)
        libc.mallopt(mmap_threshold, 1 << 25)


def checked_device(name):
    """pick_device() without a change of precision."""
    import torch
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda" and torch.cuda.is_available():
        return name  # without touching it: under torchrun each process has a GPU of its own
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds shapes and no numbers")
        count = torch.cuda.device_count() if device.type == "cuda" else 0
        if count and (device.index or 0) >= count:
            raise RuntimeError(f"GPUs here: {count}, and the last one is cuda:{count - 1}")
        torch.empty(1, device=device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # seeds, streams and statistics are those of the current device
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"device={name} cannot be used: {(str(e) or 'not there').splitlines()[0][:120]}")
    return name


def number(value):
    """A float; NaN for whatever is missing, not a number, or infinite."""
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else math.nan
    except OverflowError:  # an int beyond all floats
        return math.nan


def of_an_older_version(path):
    """What is said of a file that this program wrote before 2026-11-27, and reads no more."""
    return f"{path} is of an older version of this program; commit 7a2abeb is the last one that reads it"


MOST_LEVELS = 100  # lists and dicts in each other; what is written here has ten


def from_json(text, **how):
    """The value that a JSON text, str or bytes, stands for; how: see json.loads().

    ValueError: it is no JSON, no UTF-8, or nested in more than MOST_LEVELS, which no reader of it expects and
    which ends Python's recursion.
    """
    try:
        value = json.loads(text, **how)
    except RecursionError:
        raise ValueError(f"nested in more than {MOST_LEVELS} levels") from None
    level = [value] if len(text) > MOST_LEVELS else []
    for _ in range(MOST_LEVELS):
        inner = (each.values() if isinstance(each, dict) else each
                 for each in level if isinstance(each, (dict, list)))
        level = [item for items in inner for item in items]
        if not level:
            return value
    raise ValueError(f"nested in more than {MOST_LEVELS} levels")


def json_safe(value):
    """The same with NaN, infinities and numpy numbers made plain: JSON has none of them."""
    if isinstance(value, dict):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(v) for v in value]
    if hasattr(value, "item"):  # a number of numpy's
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path, value, indent=1):
    """write_atomic() of a value as JSON, json_safe() before. Raises UserError."""
    write_atomic(path, lambda f: f.write(json.dumps(json_safe(value), indent=indent).encode() + b"\n"))


def unescaped(text):
    """A text from the command line: \\n and \\t are a newline and a tab, with two backslashes what they look
    like with one.
    """
    def meant(match):
        twice, letter = match.groups()
        return "\\" + letter if twice else dict(n="\n", t="\t")[letter]
    return re.sub(r"\\(\\?)([nt])", meant, text)


def memory_of_machine():
    """Bytes of this machine's memory; where the system does not say, a petabyte, which no machine has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2**50


def gib(size):
    return f"{size / 2**30:,.1f} GiB" if size < 2**60 else f"{size / 2**30:.1e} GiB"


def plural(n, noun, spec=","):
    """1 run, 2 runs: a number and what there are so many of."""
    return f"{n:{spec}} {noun}{'s' * (n != 1)}"


def cut_short(text, width):
    """A text of at most `width` characters: of a longer one its beginning."""
    return text if len(text) <= width else text[:width - 1].rstrip() + "…"


def last_folders(path, width):
    """A path of at most `width` characters: of a longer one as many of its last folders as fit."""
    parts = path.split("/")
    tails = ("/".join(["…", *parts[at:]]) for at in range(1, len(parts)))
    return path if len(path) <= width else next((tail for tail in tails if len(tail) <= width),
                                                cut_short(parts[-1], width))


def table(head, rows, left=1, width=None, cut=cut_short):
    """Aligned lines, no rule, two spaces between: the columns `left` to the left, the others to the right.

    left: how many columns, from the first; or their numbers.
    width: where a line would be longer, heads but the first go over several lines, and then cut(text, cells)
    shortens the first column, not below 12 cells.
    """
    left = range(left) if isinstance(left, int) else left
    heads, rows = [[printable(title) for title in head]], [[printable(cell) for cell in row] for row in rows]
    wide = [max(map(len, column)) for column in zip(*heads, *rows)]
    if width and sum(2 + w for w in wide) - 2 > width:
        longest = [max(map(len, column)) for column in zip(*rows)] or [1] * len(wide)
        broken = [textwrap.wrap(title, max([1, w, *map(len, title.split())]), break_on_hyphens=False)
                  for title, w in zip(heads[0], longest)]
        broken[0] = heads[0][:1]
        height = max(map(len, broken))
        heads = [*zip(*([""] * (height - len(lines)) + lines for lines in broken))]
        wide = [max(map(len, column)) for column in zip(*heads, *rows)]
        wide[0] = min(wide[0], max(12, width - sum(2 + w for w in wide[1:])))
    lines = []
    for first, *rest in [*heads, *rows]:
        cells = [c.ljust(w) if i in left else c.rjust(w)
                 for i, (c, w) in enumerate(zip([cut(first, wide[0]), *rest], wide))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def git_commit():
    """The commit of this tree, with "-dirty" where it has changed; None without git."""
    with suppress(OSError):
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or None
