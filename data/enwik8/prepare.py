"""
enwik8: the first 10^8 bytes of the English Wikipedia dump of 2006-03-03, byte by byte.

python data/enwik8/prepare.py

You should see 90,000,000 train, 5,000,000 val and 5,000,000 test tokens: the standard split, in bytes.
A source with another checksum is refused. --no-verify takes it, under another name, noted as not enwik8:
python data/enwik8/prepare.py --source=some.txt --no-verify --split=9000,500,500
"""
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanoheads.common import UserError
from nanoheads.text.sources import HOME, File, cut
from nanoheads.text.writing import arguments, prepare, run

ENWIK8 = File(  # its md5 is a1fa5ffddb56f4953e226637dabbb36a
    ("enwik8/enwik8", "enwik8"),
    "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
    100_000_000,
    archive=File(("enwik8/enwik8.zip", "enwik8.zip"), bytes=36_445_475,
                 url="http://mattmahoney.net/dc/enwik8.zip",
                 sha256="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"))


def main(argv=None, name="enwik8", encoding="byte", sizes=(90_000_000, 5_000_000, 5_000_000),
         file=ENWIK8, doc=__doc__):
    args = arguments(doc, name, [encoding], argv,
                     no_verify={"action": "store_true",
                                "help": "take a source that is not enwik8, and note it"},
                     split={"metavar": "TRAIN,VAL,TEST", "help": "sizes of its splits, with --no-verify"})
    note = ""
    if args.split and not args.no_verify:
        raise UserError("--split: the split of enwik8 is fixed; it goes with --no-verify")
    if args.no_verify:
        if not (args.source and args.split):
            raise UserError("--no-verify: needs --source and --split=TRAIN,VAL,TEST")
        try:
            sizes = tuple(int(n) for n in args.split.split(","))
        except ValueError:
            raise UserError(f"--split={args.split}: three whole numbers with commas are expected") from None
        args.out = HOME / f"{name}_unverified" if args.out == HOME / name else args.out
        args.name, file = f"{name}_unverified", replace(file, sha256="", bytes=0)
        note = "this is not enwik8 but an unverified source: figures on it compare with nothing published"
    prepare(args, {"text": file}, lambda read: cut(read("text"), sizes), note, {"split": list(sizes)})


if __name__ == "__main__":
    run(main)
