"""
Any text of your own, byte by byte, character by character or in GPT-2 byte pairs.

python data/prepare_text.py --source=my.txt --encoding=byte --out=data/mine
python data/prepare_text.py --source=folder_of_txt --encoding=gpt2 --out=data/mine --val=0.05 --test=0.05

The text (.txt, also .gz or .xz; those of a folder one after the other, in order of name) is cut in place:
first train, then val, then test. The char vocabulary is that of the whole text. char and gpt2 refuse what is
not UTF-8; --errors=replace replaces and counts it. You should see three splits that add up to the text.
"""
import sys
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import UserError
from sources import File, cut, digest, origin, read, stray_bytes, wrong
from data.writing import already, arguments, build, run


def files_of(source):
    """The checked text files of a --source: itself, or those of a folder in order of name. UserError."""
    if not source.exists():
        raise UserError(f"{source}: no such file or folder; correct --source")
    paths = [source]
    if not source.is_file():
        paths = sorted(path for ending in ("", ".gz", ".xz") for path in source.glob("*.txt" + ending))
    if not paths:
        raise UserError(f"{source}: holds no .txt file; correct --source")
    for path in paths:
        if complaint := wrong(path, File(())):
            raise UserError(f"{path}: {complaint}; remove it, or choose another --source")
    return paths


def replacing(paths):
    """(characters, note) of texts whose bytes that are not UTF-8 are replaced."""
    chars, count, first, note = 0, 0, "", ""
    for path in paths:
        size, strays, place = stray_bytes(path)
        if strays and not count:
            first = f"byte {place:,} of {path.name}"
        chars, count = chars + size, count + strays
    if count:
        note = (f"bytes that are not UTF-8, replaced by U+FFFD, which counts as 3 bytes: {count:,}, "
                f"the first at {first}")
    return chars, note


def main(argv=None):
    more = {split: {"type": float, "default": 0.05, "help": f"share of {split}"} for split in ("val", "test")}
    more["errors"] = {"choices": ["strict", "replace"], "default": "strict",
                      "help": "replace: U+FFFD for each byte that is not UTF-8 (char and gpt2 alone)"}
    args = arguments(__doc__, "", ["byte", "char", "gpt2"], argv, **more)
    if not args.source or not args.out:
        missing = "--out" if args.source else "--source"
        raise UserError(f"{missing} is missing: --source=my.txt --out=data/mine")
    if not (args.val > 0 and args.test > 0 and args.val + args.test < 1):
        raise UserError(f"--val={args.val:g} --test={args.test:g}: both must be above 0, "
                        "and leave something for train")
    source, args.name = Path(args.source).expanduser(), args.out.resolve().name
    paths = files_of(source)
    options, note = {"val": args.val, "test": args.test}, ""
    if args.errors == "replace" and args.encoding == "byte":
        print("--errors=replace changes nothing here: with --encoding=byte, bytes need not be UTF-8")
    if args.errors == "replace" and args.encoding != "byte":
        total, note = replacing(paths)
        options["errors"] = "replace"
    else:
        total = sum(digest(path)["bytes" if args.encoding == "byte" else "chars"] for path in paths)
    val, test = int(total * args.val), int(total * args.test)
    if not (val and test):
        raise UserError(f"{source}: is too small ({total:,}): a split would be empty; "
                        "take larger --val and --test")

    def splits():
        text = chain.from_iterable(read(path, None, args.encoding, args.errors) for path in paths)
        return cut(text, (total - val - test, val, test))

    about = origin((path, None) for path in paths)
    if not already(args, sha256=about["sha256"], options=options):
        build(args, about, splits, note, options)


if __name__ == "__main__":
    run(main)
