"""Prepared splits as documents of lm-evaluation-harness: what its task files in this folder read."""

import sys
from pathlib import Path

import datasets
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # last: tasks mean other modules of these names
from nanoheads.common import ROOT, UserError  # noqa: E402
from nanoheads.text.dataset import Dataset  # noqa: E402

CORPORA = "wikitext2", "wikitext2_byte"  # the same text


def documents(corpus=None, split="test", **_):
    """{"test": one document, the text of a split}; corpus: a prepared dataset. UserError."""
    prepared = [name for name in CORPORA if (ROOT / "data" / name / "meta.json").is_file()]
    data = Dataset(corpus or [*prepared, CORPORA[-1]][0])
    ids = data.tokens(split)
    text = data.tokenizer.decode(ids)
    if not np.array_equal(data.tokenizer.encode(text), ids):
        raise UserError(f"the {split} split of {data.dir} is more than one text: it holds separators, "
                        "or bytes that are no UTF-8")
    return {"test": datasets.Dataset.from_list([{"text": text}])}
