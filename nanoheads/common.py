"""What every program needs: errors in one line, files written whole or not at all, the device, tables."""

import ctypes
import inspect
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


# ---- errors, and how a program ends ----

class UserError(ValueError):
    """What is wrong and what to do, for the person at the terminal: one problem a line, shown without a
    traceback.
    """


# paths of the files of one's own whose code runs in this process: what goes wrong there is no bug of ours
OWN_FILES = set()
LESS = ("lower batch_size (and raise grad_accum to keep the batch) or block_size, "
        "or set checkpoint_activations=True")


@contextmanager
def as_program(name, less="ask for less at once: shorter texts, a smaller batch, fewer samples"):
    """Decorate a program's main(): where it cannot go on, it ends in one line; a bug keeps its traceback.

    It ends quietly where the reader of what it prints has seen enough, as head has. less: what to lower where
    memory ran out.
    """
    answer_interrupts()
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has none
        sys.stdout.reconfigure(errors="replace")  # "?" for what it cannot show, as in a pipe on Windows
    try:
        yield
        print(end="", flush=True)
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        pass
    except SystemExit as e:  # a file of one's own must not end a program as if it had done its work
        if problem := fault_of_own_file(e):
            sys.exit(f"{name}: {problem}")
        raise
    except Exception as e:
        words = explain(e, less)
        if words is None:
            raise
        close_bars()
        sys.exit("\n".join(f"{name}: {line}" for line in printable(words).splitlines()))
    finally:
        try:
            print(end="", flush=True)
        except OSError:  # Python would try it once more, and print a traceback
            drop(sys.stdout.fileno())


def explain(e, less=LESS):
    """What a user can make of an exception that ended a program; None: nothing, it is a bug, and its
    traceback is wanted. less: what to lower where memory ran out.
    """
    if isinstance(e, UserError):
        return str(e)
    if ran_out_of_memory(e):
        return f"out of memory; {less}"
    if problem := fault_of_own_file(e):
        return problem
    if isinstance(e, OSError):
        return f"{e.filename or 'input or output'}: {e.strerror or e}"
    words = " ".join(str(e).split())[:150]
    if "out of resource: shared memory" in str(e):  # --compile=False would meet the same kernel
        return (f"a kernel needs more shared memory than this GPU has ({words}); smaller heads (more n_head) "
                "or dtype=bfloat16 need less")
    if type(e).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return f"torch.compile failed ({words}); --compile=False does without"


def ran_out_of_memory(e):
    """Whether an exception says that memory ran out, on a CPU or a GPU."""
    signs = "out of memory", "can't allocate memory", "ALLOC_FAILED"
    return isinstance(e, MemoryError) or any(sign in str(e) for sign in signs)


def fault_of_own_file(e):
    """What went wrong in which line of a file of one's own, in one line; None: it was not there, or is told.
    """
    if isinstance(e, UserError):
        return None
    if OWN_FILES.intersection(getattr(e, "files", ())):  # an attention.ScoreError
        return str(e)
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(e.__traceback__)]
    if isinstance(e, SyntaxError):
        frames.append((e.filename, e.lineno))
    places = [f"{path}, line {line}" for path, line in frames if path in OWN_FILES]
    words = " ".join(str(getattr(e, "msg", e)).split())[:300]
    return f"{places[-1]}: {type(e).__name__}: {words}" if places else None


def close_bars():
    """Close all open progress bars, so that what is printed next stands on a line of its own."""
    if "tqdm" in sys.modules:  # it is imported late, where a bar is wanted
        for bar in list(getattr(sys.modules["tqdm"].tqdm, "_instances", ())):
            bar.close()


def drop(number):
    """Have what is written to a file of this number, such as 1 or 2, go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def from_lab(name, what):
    """A module of lab/ or study/, imported where it is asked for: nothing else here needs it.

    name: "lab.labels.targets", say. what: the flag or the program that asks. UserError: no such folder.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as e:
        folder = (e.name or "").partition(".")[0]
        if folder not in ("lab", "study"):
            raise
        raise UserError(f"{what} is work of {folder}/, which is not there beside nanoheads/: bring it back, "
                        "or do without") from None


def old_version_message(path):
    """What is said of a file that this program wrote before 2026-11-27, and reads no more."""
    return f"{path} is of an older version of this program; commit 7a2abeb is the last one that reads it"


# ---- files ----

def writable(path, flag="--json"):
    """The Path of a file to write, checked before hours of work. UserError."""
    path = Path(os.path.realpath(path))  # which raises nothing for links in a circle, as resolve() does
    if os.path.lexists(path) and not path.is_file():
        raise UserError(f"{flag}: {path} is not a file")
    try_folder(path.parent, flag)
    return path


def writable_folder(path, flag="--out"):
    """The Path of a folder to write into, which may not be there yet; checked like a file. UserError."""
    path = Path(path)
    folders = path.absolute(), *path.absolute().parents
    existing = next(folder for folder in folders if os.path.lexists(folder))
    if not existing.is_dir():
        raise UserError(f"{flag}: {existing} is a file, not a folder; name another one")
    try_folder(existing, flag)
    return path


def try_folder(folder, flag):
    """UserError unless files can be made in a folder. Only trying tells: root may write everywhere, and yet
    some file systems take no files.
    """
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        raise UserError(f"{flag}: cannot write into {folder} ({e.strerror}); name another place") from None


def is_there(path):
    """Whether there is a file of this name. UserError: there is a folder, or a link whose file is gone. To
    take that for a missing file would be to read another one, or none, without a word.
    """
    path = Path(path)
    if os.path.lexists(path) and not path.is_file():
        what = "a link, and leads to no file" if path.is_symlink() else "no file"
        raise UserError(f"{path} is {what}: put the file there, or remove it")
    return path.is_file()


def write_atomic(path, write):
    """write(file) into a temporary name, fsync, rename: after a crash `path` is the old file or the new one.

    Raises UserError when the disk is full or refuses, and then leaves the old file as it was.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as f:
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


def git_commit():
    """The commit of this tree, with "-dirty" where it has changed; None without git."""
    with suppress(OSError):
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or None


# ---- the machine ----

def pick_device(name):
    """'auto' -> cuda, mps or cpu, whichever is there first; else the name, checked. Raises UserError.

    On a GPU every program then takes TF32 for products in float32: scoring takes the same. On a CPU the
    process keeps the memory that it frees.
    """
    import torch  # late: plot_curves.py does without
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        if name != "cuda" or not torch.cuda.is_available():  # torchrun gives each process a GPU of its own
            torch.empty(1, device=name)
        if name.startswith("cuda:"):
            torch.cuda.set_device(name)  # seeds, streams and statistics are those of the current device
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"device={name} cannot be used: {(str(e) or 'not there').splitlines()[0][:120]}")
    if name.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    elif name == "cpu":
        keep_freed_memory()
    return name


def call_without_compiler(method):
    """Have torch call one of its methods without importing its compiler, which takes 1 to 2 s.

    torch keeps some methods out of compiled graphs, and imports the compiler for that when one of them is
    first called. It calls what it finds under this attribute instead.
    """
    plain = inspect.unwrap(method)
    setattr(plain, "__dynamo_disable", plain)


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


def memory_of_machine():
    """Bytes of this machine's memory; where the system does not say, a petabyte, which no machine has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2**50


def gib(size):
    return f"{size / 2**30:,.1f} GiB" if size < 2**60 else f"{size / 2**30:.1e} GiB"


# ---- text and numbers ----

# what moves a terminal's cursor, colours it, or is half a character
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text):
    """Text without what no page, no font and no terminal should get: a byte model may write escapes."""
    return UNPRINTABLE.sub("�", str(text))


def say(*lines, **options):
    """Print lines that may hold what a model wrote, or a name: printable()."""
    print(*map(printable, lines), sep="\n", **options)


def number(value):
    """A float; NaN for whatever is missing, not a number, or infinite."""
    with suppress(OverflowError):  # of an int that no float can be
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else math.nan
    return math.nan


def unescape(text):
    """A text from the command line: \\n and \\t are a newline and a tab, with two backslashes what they look
    like with one.
    """
    def replacement(match):
        twice, letter = match.groups()
        return "\\" + letter if twice else dict(n="\n", t="\t")[letter]
    return re.sub(r"\\(\\?)([nt])", replacement, text)


def plural(n, noun, spec=","):
    """1 run, 2 runs: a number and what there are so many of."""
    return f"{n:{spec}} {noun}{'s' * (n != 1)}"


def shorten(text, width):
    """A text of at most `width` characters: of a longer one its beginning."""
    return text if len(text) <= width else text[:width - 1].rstrip() + "…"


def last_folders(path, width):
    """A path of at most `width` characters: of a longer one as many of its last folders as fit."""
    parts = path.split("/")
    tails = ("/".join(["…", *parts[start:]]) for start in range(1, len(parts)))
    return path if len(path) <= width else next((tail for tail in tails if len(tail) <= width),
                                                shorten(parts[-1], width))


def table(head, rows, left=1, width=None, cut=shorten):
    """Aligned lines, no rule, two spaces between: the columns `left` to the left, the others to the right.

    left: how many columns, from the first; or their numbers.
    width: where a line would be longer, heads but the first go over several lines, and then cut(text, cells)
    shortens the first column, not below 12 cells.
    """
    left = range(left) if isinstance(left, int) else left
    heads, rows = [[printable(title) for title in head]], [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*heads, *rows)]
    if width and sum(2 + w for w in widths) - 2 > width:
        longest = [max(map(len, column)) for column in zip(*rows)] or [1] * len(widths)
        wrapped_titles = [textwrap.wrap(title, max([1, w, *map(len, title.split())]), break_on_hyphens=False)
                          for title, w in zip(heads[0], longest)]
        wrapped_titles[0] = heads[0][:1]
        height = max(map(len, wrapped_titles))
        heads = [*zip(*([""] * (height - len(lines)) + lines for lines in wrapped_titles))]
        widths = [max(map(len, column)) for column in zip(*heads, *rows)]
        widths[0] = min(widths[0], max(12, width - sum(2 + w for w in widths[1:])))
    lines = []
    for first, *rest in [*heads, *rows]:
        cells = [c.ljust(w) if i in left else c.rjust(w)
                 for i, (c, w) in enumerate(zip([cut(first, widths[0]), *rest], widths))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
