"""
Prepare enwik8, the first 10^8 bytes of the English Wikipedia dump of 2006-03-03, byte by byte.

    python data/enwik8/prepare.py

You should see 90,000,000 train, 5,000,000 val and 5,000,000 test tokens: the standard split, in bytes.
A source with another checksum is refused: data/prepare_text.py takes any text.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanoheads.corpus import File
from nanoheads.prepare import arguments, prepare, run

ENWIK8 = File("enwik8",  # its md5 is a1fa5ffddb56f4953e226637dabbb36a
              "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8", 100_000_000)
ZIP = File("enwik8.zip", "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc", 36_445_475,
           url="http://mattmahoney.net/dc/enwik8.zip")


def main(argv=None, name="enwik8", encoding="byte", sizes=(90_000_000, 5_000_000, 5_000_000), doc=__doc__):
    def splits(texts):
        train, val, _ = sizes
        text = texts["text"]
        return {"train": text[:train], "val": text[train:train + val], "test": text[train + val:]}

    args = arguments(doc, name, [encoding], argv)
    prepare(args, "enwik8", {"text": ENWIK8}, ZIP, splits, options={"split": list(sizes)})


if __name__ == "__main__":
    run(main)
