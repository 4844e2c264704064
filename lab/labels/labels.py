"""
Writes a folder of labels, verifies it, and shows it as a table with texts.

targets.py says what such a folder holds. Each file gets its name when its split is done, labels.json is last:
a run that was stopped starts over.
"""

import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanoheads.common import UserError, say, table
from nanoheads.files import only_writer, open_temporary
from lab.labels.targets import UNKNOWN, Targets, decode, label_file, write_meta


# ---- writing ----

def label(folder, text, labeller, splits, force=False):
    """Label splits into a folder, beside those labelled in the same way before. False: all were there."""
    with only_writer(folder, flag="--out", lock_stays=False):
        targets, missing = finished_targets(folder, text.dataset, labeller.note, force), False
        if targets:
            splits = list(dict.fromkeys((*targets.splits, *splits)))
        for split in splits:
            todo = [name for name in labeller.names if not has_labels(targets, name, split)]
            if todo:
                label_split(folder, text, labeller, split, todo)
                missing = True
        if missing:
            write_meta(folder, text.dataset, labeller.names, splits, labeller.weak, labeller.note)
    return missing


def label_split(folder, text, labeller, split, names):
    """Write <name>.<split>.u8 of these names, under temporary names until the split is done."""
    paths, files = {name: label_file(folder, name, split) for name in names}, {}
    try:
        with ExitStack() as stack:
            for name, path in paths.items():
                files[name] = stack.enter_context(open_temporary(path))
            bar = stack.enter_context(tqdm(total=len(text.dataset.tokens(split)), desc=split, unit=" tokens",
                                           unit_scale=True, disable=None, leave=False))
            for piece in text.pieces(split):
                labels = labeller(piece)
                for name, file in files.items():
                    assert len(labels[name]) == piece.stop - piece.start
                    file.write(labels[name].tobytes())
                bar.update(piece.stop - piece.start)
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        for name, path in paths.items():
            os.replace(files[name].name, path)
    finally:
        for file in files.values():
            Path(file.name).unlink(missing_ok=True)


def finished_targets(folder, dataset, note, force):
    """The Targets of a folder, made as `note` describes; None: it has none. UserError: it has other ones."""
    if not (folder / "labels.json").is_file():
        return None
    if force:
        for path in (folder / "labels.json", *folder.glob("*.u8*")):
            path.unlink(missing_ok=True)
        return None
    targets = Targets(dataset, folder)
    origin = targets.meta.get("dataset"), targets.meta.get("note")
    if origin != (dataset.meta["name"], note):
        raise UserError(f"{folder} holds other labels, of {origin[0]}: {origin[1]}; --out keeps both, "
                        "--force replaces them")
    return targets


def has_labels(targets, name, split):
    """Whether the file of a name is whole, and of these tokens; what is wrong with it is printed."""
    try:
        return bool(targets and split in targets.splits and len(targets.codes(name, split)))
    except UserError as e:
        return say(e)


# ---- shown ----

def report(folder, dataset, show):
    """Print what is in the folder: a row for each name and split, then `show` texts of each name."""
    targets, rows = Targets(dataset, folder), []
    for name in targets.names:
        for split, row in targets.splits.items():
            summary = row["names"][name]
            mean = "-" if summary["mean"] is None else f"{summary['mean']:.4f}"
            share = f"{summary['labelled'] / row['tokens']:.4f}"
            rows.append((name, split, f"{row['tokens']:,}", share, mean))
    say(f"{folder}: {targets.meta['note']}{' (weak: not checked by a person)' * targets.meta['weak']}")
    print(table(("name", "split", "tokens", "labelled", "mean"), rows, left=2))
    if show:
        print("\n{1} before text that is labelled 1, {0} 0, {-} what is not labelled")
    for name in targets.names if show else ():
        print(f"\n{name}")
        for split, token in examples(targets, name, show):
            print(f"  {split} {token:,}: {snippet(targets, name, split, token)}")


def examples(targets, name, count):
    """[(split, token)] of labelled tokens, the same every time; every other one is 0.5 or more, if any is."""
    rng, places = np.random.default_rng(0), []
    splits = list(targets.splits)
    for i in range(count):
        for trial in range(2000):
            split = splits[rng.integers(len(splits))]
            codes = targets.codes(name, split)
            token = int(rng.integers(len(codes)))
            high = UNKNOWN > codes[token] >= UNKNOWN // 2
            if codes[token] != UNKNOWN and (high == (i % 2 == 0) or trial > 1000):
                places.append((split, token))
                break
    return places


def snippet(targets, name, split, token, near=150):
    """About 2 * near bytes of text around a token, with the value before each run of equal labels."""
    dataset, codes = targets.dataset, targets.codes(name, split)
    reach = max(1, round(near / dataset.bytes_per_token(split)))
    start, stop = max(0, token - reach), min(len(codes), token + reach)
    values, ids = decode(np.array(codes[start:stop])).numpy().round(1), dataset.tokens(split)[start:stop]
    text = ""
    for same in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(values)) + 1):
        value = values[same[0]]
        text += f"{{{'-' if value < 0 else f'{value:g}'}}}{dataset.tokenizer.decode(ids[same])}"
    return " ".join(text.split())
