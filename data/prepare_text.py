"""
Any text of your own, byte by byte, character by character or in GPT-2 byte pairs.

python data/prepare_text.py --source=my.txt --encoding=byte --out=data/mine
python data/prepare_text.py --source=folder_of_txt --encoding=gpt2 --out=data/mine --val=0.05 --test=0.05

The text (.txt, also .gz or .xz; those of a folder one after the other, in order of name) is cut in place: first train,
then val, then test. The char vocabulary is that of the whole text. You should see three splits that add up to it.
"""
import sys
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import UserError
from data.common import already, arguments, build, run
from data.sources import File, cut, digest, origin, read, wrong


def main(argv=None):
    shares = {split: {"type": float, "default": 0.05, "help": f"share of {split}"} for split in ("val", "test")}
    args = arguments(__doc__, "", ["byte", "char", "gpt2"], argv, **shares)
    if not args.source or not args.out:
        raise UserError(f"{'--out' if args.source else '--source'} is missing: --source=my.txt --out=data/mine")
    if not (args.val > 0 and args.test > 0 and args.val + args.test < 1):
        raise UserError(f"--val={args.val:g} --test={args.test:g}: both must be above 0, and leave something for train")
    source, args.name = Path(args.source).expanduser(), args.out.resolve().name
    if not source.exists():
        raise UserError(f"{source}: no such file or folder; correct --source")
    paths = [source] if source.is_file() else sorted(p for e in ("", ".gz", ".xz") for p in source.glob("*.txt" + e))
    if not paths:
        raise UserError(f"{source}: holds no .txt file; correct --source")
    for path in paths:
        if complaint := wrong(path, File(())):
            raise UserError(f"{path}: {complaint}; remove it, or choose another --source")
    found = [(path, None) for path in paths]
    total = sum(digest(*where)["bytes" if args.encoding == "byte" else "chars"] for where in found)
    val, test = int(total * args.val), int(total * args.test)
    if not (val and test):
        raise UserError(f"{source}: is too small ({total:,}): a split would be empty; take larger --val and --test")
    about, options = origin(found), {"val": args.val, "test": args.test}
    if not already(args, sha256=about["sha256"], options=options):
        text = lambda: chain.from_iterable(read(*where, args.encoding) for where in found)
        build(args, about, lambda: cut(text(), (total - val - test, val, test)), options=options)


if __name__ == "__main__":
    run(main)
