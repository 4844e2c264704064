"""
Prepare WikiText-103, the tokenised variant (with <unk> and @-@), in GPT-2's byte pairs or as bytes.

    python data/wikitext103/prepare.py                    writes data/wikitext103/
    python data/wikitext103/prepare.py --encoding=byte    writes data/wikitext103_byte/

You should see some 540 million train bytes; the token counts have not been checked. The zip has 190 MB.
--source takes it, or the folder that it unpacks to, whose files are checked by their lines: 1,801,350
train, 3,760 val and 4,358 test.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanoheads.corpus import File
from nanoheads.prepare import arguments, prepare, run

ZIP = File("wikitext-103-v1.zip", "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
           url="https://wikitext.smerity.com/wikitext-103-v1.zip")
FILES = {split: File(f"wiki.{name}.tokens", lines=lines) for split, name, lines in (
    ("train", "train", 1_801_350), ("val", "valid", 3_760), ("test", "test", 4_358))}


def main(argv=None):
    prepare(arguments(__doc__, "wikitext103", ["gpt2", "byte"], argv), "wikitext-103", FILES, ZIP)


if __name__ == "__main__":
    run(main)
