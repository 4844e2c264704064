"""
Prepare tiny Shakespeare, one token a character.

    python data/shakespeare_char/prepare.py

65 symbols. You should see 1,003,854 train and 111,540 val tokens. There is no third part: test is val again.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanoheads.corpus import File
from nanoheads.prepare import arguments, prepare, run

TEXT = File("input.txt", "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed", 1_115_394,
            url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt")
NOTE = "the corpus has no third part: test is val over again, so a test figure here is a validation figure"


def splits(texts):
    """The first 90 % of the characters train, the rest val, and once more as test."""
    train, val = texts["text"][:1_003_854], texts["text"][1_003_854:]
    return {"train": train, "val": val, "test": val}


def main(argv=None, name="shakespeare_char", encoding="char", doc=__doc__):
    args = arguments(doc, name, [encoding], argv)
    prepare(args, "tinyshakespeare", {"text": TEXT}, splits=splits, note=NOTE)


if __name__ == "__main__":
    run(main)
