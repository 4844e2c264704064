"""
Any text of your own, byte by byte, character by character or in byte pairs, GPT-2's or another model's.

python data/prepare_text.py --source=my.txt --encoding=byte --out=data/mine
python data/prepare_text.py --source=folder_of_txt --encoding=gpt2 --out=data/mine --val=0.05 --test=0.05
python data/prepare_text.py --source=my.txt --encoding=hf --tokenizer=SmolLM2-135M --out=data/mine

The text (.txt, also .gz or .xz; those of a folder one after the other, in order of name) is cut in place:
first train, then val, then test. The char vocabulary is that of the whole text; that of hf is in the folder
--tokenizer. All but byte refuse what is not UTF-8; --errors=replace replaces and counts it. You should see
three splits that add up to the text.
"""
import hashlib
import sys
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from nanoheads.common import UserError
from nanoheads.text.sources import File, cut, digest, origin, read, stray_bytes, wrong
from nanoheads.text.tokenizer import Tokenizer
from nanoheads.text.writing import already, arguments, build, run


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


def tokenizer_json(path):
    """The text of a tokenizer.json, or of the one in a folder. UserError where it is no tokenizer of ours."""
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
        Tokenizer("hf", text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; --tokenizer names a model's folder") from None
    except Exception as error:  # the library's own are bare
        raise UserError(f"{path}: {' '.join(str(error).split())[:120]}") from None
    return text


def main(argv=None):
    more = {split: {"type": float, "default": 0.05, "help": f"share of {split}"} for split in ("val", "test")}
    more["errors"] = {"choices": ["strict", "replace"], "default": "strict",
                      "help": "replace: U+FFFD for each byte that is not UTF-8 (not for byte)"}
    more["tokenizer"] = {"help": "hf: a model's folder, or a tokenizer.json"}
    args = arguments(__doc__, "", ["byte", "char", "gpt2", "hf"], argv, **more)
    if not args.source or not args.out:
        missing = "--out" if args.source else "--source"
        raise UserError(f"{missing} is missing: --source=my.txt --out=data/mine")
    if not (args.val > 0 and args.test > 0 and args.val + args.test < 1):
        raise UserError(f"--val={args.val:g} --test={args.test:g}: both must be above 0, "
                        "and leave something for train")
    if (args.encoding == "hf") != bool(args.tokenizer):
        raise UserError("--encoding=hf and --tokenizer=FOLDER go together")
    if args.tokenizer:
        args.vocab = tokenizer_json(Path(args.tokenizer))
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
    if args.tokenizer:
        options["tokenizer"] = hashlib.sha256(args.vocab.encode()).hexdigest()
    if not already(args, sha256=about["sha256"], options=options):
        build(args, about, splits, note, options)


if __name__ == "__main__":
    run(main)
