"""
Prepare enwiki15, plain text of English Wikipedia articles of 2015, byte by byte or in GPT-2's byte pairs.
It is not enwik8, and no standard benchmark: figures on it compare only with others on these same files.

    python data/enwiki15/prepare.py                    writes data/enwiki15/
    python data/enwiki15/prepare.py --encoding=gpt2    writes data/enwiki15_gpt2/

There is no download: put enwiki15/{train,valid,test}.txt.xz into the folder NANOHEADS_DATA.
You should see 123,191,546 train, 7,467,041 val and 5,972,296 test bytes, or 26,706,806, 1,611,367 and
1,294,810 of GPT-2's byte pairs.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanoheads.corpus import File
from nanoheads.prepare import arguments, prepare, run

FILES = {split: File(f"{name}.txt", sha256, size) for split, name, size, sha256 in (
    ("train", "train", 123_191_546, "186cd7102cda263d5cc0e59eb2618f17e7ccb9f8a09d5984c7b03fdc62600c09"),
    ("val", "valid", 7_467_041, "ebcb93fe04d23c8908cab73af35e360044cd6c9233590afcdd1a85692bbd999b"),
    ("test", "test", 5_972_296, "ddec835de2154248207dc9538056850500a3ef65fc433ec3e7015ad135e250ce"))}


def main(argv=None):
    args = arguments(__doc__, "enwiki15", ["byte", "gpt2"], argv, "enwiki15 in $NANOHEADS_DATA or in data/")
    prepare(args, "enwiki15", FILES)


if __name__ == "__main__":
    run(main)
