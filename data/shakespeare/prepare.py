"""
Prepare tiny Shakespeare in GPT-2's byte pairs.

    python data/shakespeare/prepare.py

You should see 301,966 train and 36,059 val tokens. There is no third part: test is val again.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.shakespeare_char import prepare
from nanoheads.prepare import run


def main(argv=None):
    prepare.main(argv, "shakespeare", "gpt2", __doc__)


if __name__ == "__main__":
    run(main)
