"""
enwiki15 in 4,096 byte pairs that are learnt from its train split: two minutes on a core.

python data/enwiki15_bpe/prepare.py        pip install tokenizers, Hugging Face's, which learns them

There is no download: put enwiki15/{train,valid,test}.txt.xz into the folder NANOHEADS_DATA. You should see
36,364,103 / 2,199,944 / 1,769,702 byte pairs of train, val and test. The vocabulary is kept in meta.json, and
as tokenizer.json: data/prepare_text.py --encoding=hf --tokenizer=data/enwiki15_bpe writes another text in the
same tokens.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.enwiki15.prepare import FILES
from nanoheads.corpus import arguments, prepare, run

VOCAB_SIZE = 4096


def main(argv=None):
    prepare(arguments(__doc__, "enwiki15_bpe", ["hf"], argv), FILES, vocab_size=VOCAB_SIZE)


if __name__ == "__main__":
    run(main)
