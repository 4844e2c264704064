"""
Prepare the source of Python's standard library, byte by byte: a text that every machine has.

    python data/pystdlib/prepare.py

With Python 3.11.7 you should see 11,036,122 train, 710,763 val and 357,768 test tokens.
A file goes to train, val or test (about 90/5/5) by a hash of its path, and begins with a line that names it.
The text differs from one Python version to the next: compare runs on the same one (meta.json says which).
"""
import hashlib
import platform
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanoheads.common import UserError
from nanoheads.dataset import SPLITS
from nanoheads.prepare import arguments, build, is_prepared, run

# not the library itself, or different on every machine, or (tests) full of broken text
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
MADE_AT_BUILD = ("_sysconfigdata", "config-")


def library(folder):
    """[(split, path relative to the folder, bytes)] of the .py files that are UTF-8, in order of path."""
    files = []
    for path in sorted(Path(folder).rglob("*.py"), key=lambda p: p.relative_to(folder).as_posix()):
        name = path.relative_to(folder)
        if LEFT_OUT & set(name.parts) or name.parts[0].startswith(MADE_AT_BUILD):
            continue
        data = path.read_bytes()
        try:
            data.decode()
        except UnicodeDecodeError:
            continue
        bucket = int(hashlib.sha256(name.as_posix().encode()).hexdigest()[:8], 16) % 100
        files.append(("train" if bucket < 90 else "val" if bucket < 95 else "test", name.as_posix(), data))
    return files


def main(argv=None):
    args = arguments(__doc__, "pystdlib", ["byte"], argv, "the library of this Python")
    folder = Path(args.source or sysconfig.get_paths()["stdlib"])
    files = [(split, f"# ---- {name} ----\n".encode() + data.rstrip() + b"\n\n\n")
             for split, name, data in library(folder)]
    if not files:
        raise UserError(f"{folder}: holds no .py file; name the standard library's folder with --source")
    all_bytes = b"".join(text for _, text in files)
    source = {"file": f"standard library of Python {platform.python_version()}, {len(files)} files",
              "bytes": len(all_bytes), "sha256": hashlib.sha256(all_bytes).hexdigest()}
    options = {"python": platform.python_version()}
    if not is_prepared(args, source["sha256"], options):
        texts = {split: b"".join(text for file_split, text in files if file_split == split)
                 for split in SPLITS}
        build(args, texts, source, options=options)


if __name__ == "__main__":
    run(main)
