"""
The labels that constraint heads are trained on: for each name a value in [0, 1] for each token of a dataset's
splits.

A set of labels is a folder, <dataset>/labels/<set>: labels.json, and <name>.<split>.u8, one byte a token. 0
to 254 stand for the values 0 to 1 in steps of 1/254 (0 and 254 are the hard ones), 255 for "not labelled",
which no loss and no figure counts. Byte i is about token i of the split, judged from the tokens up to it:
where a model reads tokens s to s + T, bytes s to s + T belong to its scores. Nothing is shifted.

labels.json: dataset, note, weak (unchecked), names, and for each split its tokens, the sha256
of its .bin, and for each name the sha256 of its file, how many tokens are labelled, and their mean.
lab/label.py writes such folders.
"""

import json
from pathlib import Path

import numpy as np
import torch

from nanoheads import files
from nanoheads.common import UserError, is_there, write_json
from nanoheads.dataset import NotPrepared, folders_of
from nanoheads.files import sha256

UNKNOWN = 255
VALUES = torch.cat((torch.arange(UNKNOWN) / (UNKNOWN - 1), torch.tensor([-1.0])))  # of each byte; -1: unknown


def encode(values):
    """Values in [0, 1], NaN: unknown -> bytes, uint8 of the same shape. Raises ValueError beyond [0, 1]."""
    values = np.asarray(values, dtype=np.float64)
    is_known = ~np.isnan(values)
    if values[is_known].size and not 0 <= values[is_known].min() <= values[is_known].max() <= 1:
        raise ValueError(f"targets from {values[is_known].min():g} to {values[is_known].max():g} must be in "
                         "[0, 1]")
    return np.where(is_known, np.rint(np.nan_to_num(values) * (UNKNOWN - 1)), UNKNOWN).astype(np.uint8)


def decode(codes):
    """Bytes -> float32 values in [0, 1], -1 where unknown."""
    return VALUES[torch.as_tensor(codes).long()]


def label_file(folder, name, split):
    return Path(folder) / f"{name}.{split}.u8"


def write_meta(folder, dataset, names, splits, weak, note):
    """Write labels.json of finished files. note: what made them."""
    meta = dict(dataset=dataset.meta["name"], note=note, weak=weak, names=list(names), splits={})
    for split in splits:
        meta["splits"][split] = row = dict(tokens=len(dataset.tokens(split)),
                                           sha256=dataset.splits[split]["sha256"], names={})
        for name in names:
            path = label_file(folder, name, split)
            codes = np.memmap(path, np.uint8, "r")  # in blocks: bincount takes eight times their size
            counts = sum(np.bincount(codes[i:i + (1 << 22)], minlength=256)
                         for i in range(0, len(codes), 1 << 22))[:UNKNOWN]
            n_known = int(counts.sum())
            mean = float(counts @ VALUES[:UNKNOWN].double().numpy() / n_known) if n_known else None
            row["names"][name] = dict(sha256=sha256(path), labelled=n_known, mean=mean)
    write_json(Path(folder) / "labels.json", meta)


def command_for(dataset, labels):
    """The command that makes a set of labels, or what is known of it."""
    data_folder = dataset.dir.resolve()
    folders = [folder.resolve() for folder in folders_of(data_folder.name)]
    name = data_folder.name if data_folder in folders else dataset.dir
    by = f" --by={labels}" if labels in ("weak", "synthetic") else ", see docs/constraints.md,"
    return f"python -m lab.label --dataset={name}{by}"


class Targets:
    """Labels of a Dataset: a folder <dataset>/labels/<set>, or a path. UserError: not for these tokens.

    names: those to read (None: all). Files are verified when a split is first read.
    """

    def __init__(self, dataset, labels, names=None):
        folders = (dataset.dir / "labels" / str(labels), Path(labels))
        self.dir = next((folder for folder in folders if is_there(folder / "labels.json")), None)
        if self.dir is None:
            label_sets = sorted(path.parent.name for path in dataset.dir.glob("labels/*/labels.json"))
            raise NotPrepared(f"no labels {labels!r} for {dataset.dir}; there are "
                              f"{', '.join(label_sets) or 'none'}: {command_for(dataset, labels)} makes them")
        try:
            self.meta = json.loads((self.dir / "labels.json").read_text(encoding="utf-8"))
            names_there, self.splits = [str(name) for name in self.meta["names"]], self.meta["splits"]
            self.sums = {(name, split): row["names"][name]["sha256"]
                         for split, row in self.splits.items() for name in names_there}
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{self.dir / 'labels.json'} is not what lab/label.py writes "
                            f"({type(e).__name__}: {e}): label it anew with --force") from None
        self.dataset, self.names = dataset, names_there if names is None else list(names)
        if missing := [name for name in self.names if name not in names_there]:
            raise UserError(f"{self.dir} has no labels for {', '.join(missing)}; it has "
                            f"{', '.join(names_there)}")
        self.unread = [name for name in names_there if name not in self.names]
        self.files = {}

    def codes(self, name, split):
        """The bytes of a name, a read-only memory map [tokens of the split]. UserError names the file."""
        if (name, split) in self.files:
            return self.files[name, split]
        path, row = label_file(self.dir, name, split), self.splits.get(split)
        if row is None:
            raise UserError(f"{self.dir} labels no split {split!r}; it has {', '.join(self.splits)}")
        tokens = len(self.dataset.tokens(split))
        if row["sha256"] != self.dataset.splits[split].get("sha256"):
            raise UserError(f"{self.dir} was made for another {split} split than that of {self.dataset.dir}: "
                            "label it anew")
        if not path.is_file():
            raise UserError(f"{path} is missing: label {name} anew")
        if path.stat().st_size != tokens:
            raise UserError(f"{path} holds {path.stat().st_size:,} bytes for {tokens:,} tokens: "
                            f"label {name} anew")
        files.check(path, self.sums[name, split], "labels.json", f"label {name} anew")
        self.files[name, split] = np.memmap(path, np.uint8, "r")
        return self.files[name, split]

    def check(self, split):
        """Verify all files of a split. Raises UserError."""
        for name in self.names:
            self.codes(name, split)

    def rows(self, split, starts, length):
        """{name: float32 [rows, length]}: the targets of the tokens from each start on; -1: unknown."""
        return {name: decode(np.stack([self.codes(name, split)[s:s + length] for s in starts]))
                for name in self.names}
