"""
Makes Ctrl-C end a program in one line while it is still importing torch.

Importing torch takes a second or more, in which no main() runs yet. The first import of this package by one
of the repository's programs has Ctrl-C end it in that line, until the program itself knows what to do about
it. No exception is raised: code that is being imported might catch one, or turn it into another. Whatever
else imports this package is left alone.
"""

import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# each of them calls answer_interrupts(), as do the programs in data/ and lab/
PROGRAMS = {"bench", "compare", "evaluate", "plot_curves", "sample", "train"}


def stop(number, frame):
    """End this process, in the words of common.as_program()."""
    os.write(2, f"\n{Path(sys.argv[0]).stem}: interrupted\n".encode())
    os._exit(128 + number)


def is_ours(program):
    """Whether the path of a main module is that of one of the repository's programs."""
    path = Path(program).resolve()
    return (path.parent == ROOT and path.stem in PROGRAMS or path.is_relative_to(ROOT / "data")
            or path.is_relative_to(ROOT / "lab"))


def begin_quietly():
    """Have stop() answer Ctrl-C, where nothing else does and one of our programs runs."""
    program = getattr(sys.modules["__main__"], "__file__", None)
    if program and is_ours(program) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)


def answer_interrupts():
    """From here on Ctrl-C raises KeyboardInterrupt again: the caller says what that means."""
    if signal.getsignal(signal.SIGINT) is stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


begin_quietly()
