"""
Prepare WikiText-2, the tokenised variant (with <unk> and @-@), in GPT-2's byte pairs or as bytes.

    python data/wikitext2/prepare.py                    writes data/wikitext2/
    python data/wikitext2/prepare.py --encoding=byte    writes data/wikitext2_byte/

You should see 2,448,382 train, 258,659 val and 295,877 test tokens, or 10,797,148, 1,121,681 and 1,256,449
bytes.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanoheads.corpus import File
from nanoheads.prepare import arguments, prepare, run

URL = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/"
FILES = {split: File(f"{name}.txt", sha256, size, url=f"{URL}{name}.txt")
         for split, name, size, sha256 in (
    ("train", "train", 10_797_148, "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"),
    ("val", "valid", 1_121_681, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
    ("test", "test", 1_256_449, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"))}


def main(argv=None):
    prepare(arguments(__doc__, "wikitext2", ["gpt2", "byte"], argv), "wikitext-2", FILES)


if __name__ == "__main__":
    run(main)
