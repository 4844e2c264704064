"""
Prepare enwik8 as characters, as published figures of character models in bits per character have it.

    python data/enwik8_char/prepare.py

99,621,832 characters, 6,064 symbols. You should see 90,000,000 train, 5,000,000 val and 4,621,832 test
tokens: cut in characters, so these splits are not those of data/enwik8.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.enwik8 import prepare
from nanoheads.prepare import run


def main(argv=None):
    prepare.main(argv, "enwik8_char", "char", (90_000_000, 5_000_000, 4_621_832), __doc__)


if __name__ == "__main__":
    run(main)
