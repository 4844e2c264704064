"""
Labels for constraint heads: a value in [0, 1], or none, for each token of a dataset's splits.

python data/label.py --dataset=wikitext2_byte --by=weak                      rules of data/weak.py, unchecked
python data/label.py --dataset=wikitext2_byte --by=synthetic --noise=0.1     a known truth, to test learning
python data/label.py --dataset=mine --by=spans --file=labels.jsonl --split=val                   your own
python data/label.py --dataset=mine --by=hf --model=DIR --map='{"testifiability": "LABEL_1"}'    a model's

Writes <dataset>/labels/<by>/, or --out: another name there, or a folder. targets.py says what it holds,
docs/labels.md what the labels mean. Killed in the middle, the same command goes on where it was; given once
more, it verifies what is there. You should see, at the end, a table and texts with the labels in them.
"""
import argparse
import json
import os
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from nanoheads.common import UserError, table, write_atomic
from nanoheads.text.dataset import Dataset
from nanoheads.text.labellers import LABELLERS, NAME, Text
from nanoheads.text.targets import UNKNOWN, Targets, decode, label_file, write_meta
from nanoheads.text.writing import run

# what each way to label asks for, and nothing else
FLAGS = {"weak": ("splits", "reach"), "synthetic": ("splits", "seed", "noise"),
         "spans": ("file", "split", "rest"), "hf": ("splits", "model", "map", "hypothesis")}


# ---- a folder of labels, written so that it can be killed ----

class Progress:
    """<folder>/progress.json: the note, and how many tokens of each split are done, by which names.

    While a split is worked on, its labels are in <name>.<split>.u8.part; labels.json comes last.
    """

    def __init__(self, folder, note):
        self.path, self.folder = folder / "progress.json", folder
        try:
            self.rows = json.loads(self.path.read_text(encoding="utf-8"))
            if self.rows.pop("note") != note:
                self.rows = {}
        except (OSError, ValueError, KeyError, AttributeError):
            self.rows = {}
        self.note = note

    def begin(self, split, names, sha, total):
        """How many tokens of the split are done by these names; 0: anew."""
        row = self.rows.get(split)
        done = row["tokens"] if row and (row["names"], row["sha256"]) == (names, sha) else 0
        for name in names:
            path = label_file(self.folder, name, split)
            ready = done == total and path.is_file() and path.stat().st_size == total
            part = part_of(path)
            if not (ready or part.is_file() and part.stat().st_size >= done):
                done = 0
        self.rows[split] = dict(names=names, sha256=sha, tokens=done)
        return done

    def save(self, split, tokens):
        self.rows[split]["tokens"] = tokens
        text = json.dumps(dict(note=self.note, **self.rows), indent=1)
        write_atomic(self.path, lambda file: file.write(text.encode()))


def part_of(path):
    return path.with_name(path.name + ".part")


def label_split(folder, text, labeller, split, names, progress):
    """Write <name>.<split>.u8 of these names; what a killed run left is kept."""
    total = len(text.dataset.tokens(split))
    done = progress.begin(split, names, text.dataset.splits[split]["sha256"], total)
    paths = {name: label_file(folder, name, split) for name in names}
    with ExitStack() as stack:
        files = {}
        for name, path in paths.items() if done < total else ():
            part_of(path).touch()
            files[name] = stack.enter_context(open(part_of(path), "r+b"))
            files[name].truncate(done)  # beyond it may be a piece that was not finished
            files[name].seek(done)
        bar = stack.enter_context(tqdm(total=total, initial=done, desc=split, unit=" tokens", unit_scale=True,
                                       disable=None, leave=False))
        for piece in text.pieces(split, done):
            labels = labeller(piece)
            for name, file in files.items():
                assert len(labels[name]) == piece.stop - piece.start
                file.write(labels[name].tobytes())
                file.flush()
                os.fsync(file.fileno())
            progress.save(split, piece.stop)
            bar.update(piece.stop - piece.start)
    for path in paths.values():
        if part_of(path).is_file():
            os.replace(part_of(path), path)


def finished(folder, dataset, note, force):
    """The Targets of a folder, made as `note` says; None: it has no labels. UserError: it has other ones."""
    if not (folder / "labels.json").is_file():
        return None
    if force:
        for path in (folder / "labels.json", folder / "progress.json", *folder.glob("*.u8*")):
            path.unlink(missing_ok=True)
        return None
    found = Targets(dataset, folder)
    about = found.meta.get("dataset"), found.meta.get("note")
    if about != (dataset.meta["name"], note):
        raise UserError(f"{folder} holds other labels, of {about[0]}: {about[1]}; --out keeps both, "
                        "--force replaces them")
    return found


def holds(found, name, split):
    """Is the file of a name whole, and of these tokens?"""
    try:
        return bool(found and split in found.splits and len(found.codes(name, split)))
    except UserError as e:
        return print(e)


@contextmanager
def alone(folder):
    """No other process labels in this folder meanwhile. UserError: one does."""
    held = None
    try:
        import fcntl  # not on every system
        held = os.open(folder, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise UserError(f"{folder}: another process is labelling there") from None
    except (ImportError, OSError):  # OSError: a file system without locks
        pass
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def label(folder, text, labeller, splits, force=False):
    """Label splits into a folder, beside those labelled in the same way before. False: all were there."""
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        found, missing = finished(folder, text.dataset, labeller.note, force), False
        if found:
            splits = list(dict.fromkeys((*found.splits, *splits)))
        progress = Progress(folder, labeller.note)
        for split in splits:
            todo = [name for name in labeller.names if not holds(found, name, split)]
            if todo:
                label_split(folder, text, labeller, split, todo, progress)
                missing = True
        if missing:
            write_meta(folder, text.dataset, labeller.names, splits, labeller.weak, labeller.note)
        progress.path.unlink(missing_ok=True)
    return missing


# ---- what a person sees ----

def report(folder, dataset, show):
    """Print what is in the folder: a row for each name and split, then `show` texts of each name."""
    targets, rows = Targets(dataset, folder), []
    for name in targets.names:
        for split, row in targets.splits.items():
            about = row["names"][name]
            mean = "-" if about["mean"] is None else f"{about['mean']:.4f}"
            rows.append((name, split, f"{row['tokens']:,}", f"{about['labelled'] / row['tokens']:.4f}", mean))
    print(f"{folder}: {targets.meta['note']}{' (weak: nobody has checked them)' * targets.meta['weak']}")
    print(table(("name", "split", "tokens", "labelled", "mean"), rows, left=2))
    if show:
        print("\n{1} before text that is labelled 1, {0} 0, {-} what is not labelled")
    for name in targets.names if show else ():
        print(f"\n{name}")
        for split, at in examples(targets, name, show):
            print(f"  {split} {at:,}: {snippet(targets, name, split, at)}")


def examples(targets, name, count):
    """[(split, token)] of labelled tokens, the same every time; every other one is 0.5 or more, if any is."""
    rng, found = np.random.default_rng(0), []
    splits = list(targets.splits)
    for i in range(count):
        for trial in range(2000):
            split = splits[rng.integers(len(splits))]
            codes = targets.codes(name, split)
            at = int(rng.integers(len(codes)))
            high = UNKNOWN > codes[at] >= UNKNOWN // 2
            if codes[at] != UNKNOWN and (high == (i % 2 == 0) or trial > 1000):
                found.append((split, at))
                break
    return found


def snippet(targets, name, split, at, near=150):
    """About 2 * near bytes of text around a token, with the value before each run of equal labels."""
    dataset, codes = targets.dataset, targets.codes(name, split)
    reach = max(1, round(near / dataset.bytes_per_token(split)))
    start, stop = max(0, at - reach), min(len(codes), at + reach)
    values, ids = decode(np.array(codes[start:stop])).numpy().round(1), dataset.tokens(split)[start:stop]
    text = ""
    for same in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(values)) + 1):
        value = values[same[0]]
        text += f"{{{'-' if value < 0 else f'{value:g}'}}}{dataset.tokenizer.decode(ids[same])}"
    return " ".join(text.split())


# ---- the program ----

def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True, help="data/<name>, or a folder of a prepare script")
    parser.add_argument("--by", required=True, choices=list(FLAGS), help="who labels")
    parser.add_argument("--names", nargs="+", help="the names to label (default: all that there are)")
    parser.add_argument("--out", help="name of the set, or a folder (default: the --by)")
    parser.add_argument("--force", action="store_true", help="replace what is there")
    parser.add_argument("--show", type=int, default=3, help="texts to show of each name")
    parser.add_argument("--splits", nargs="+", help="weak, synthetic, hf: the splits to label (default: all)")
    parser.add_argument("--from", dest="reach", choices=["trigger", "start"],
                        help="weak: what a sentence is labelled from on (default: trigger)")
    parser.add_argument("--seed", type=int, help="synthetic: of the noise (default: 0)")
    parser.add_argument("--noise", type=float, help="synthetic: share of wrong labels (default: 0)")
    parser.add_argument("--file", action="append", help="spans: JSON lines; one for each --split")
    parser.add_argument("--split", action="append", help="spans: the split that the --file is about")
    parser.add_argument("--rest", choices=["0", "ignore"], help="spans: what no line names (default: ignore)")
    parser.add_argument("--model", help="hf: the model's folder")
    parser.add_argument("--map", help="hf: JSON, which label of the model each name takes")
    parser.add_argument("--hypothesis", action="append", metavar="NAME=TEXT",
                        help="hf, sequence classification: what a name's sentences are read with")
    args = parser.parse_args(argv)
    args.names = args.names and list(dict.fromkeys(args.names))
    for by, flags in FLAGS.items():
        for flag in flags:
            if getattr(args, flag) is not None and flag not in FLAGS[args.by]:
                flag = "from" if flag == "reach" else flag
                raise UserError(f"--{flag} is for --by={by}, not for --by={args.by}")
    return args


def main(argv=None):
    args = arguments(argv)
    dataset = Dataset(args.dataset)
    splits = list(dict.fromkeys(args.split or args.splits or dataset.splits))
    for split in splits:
        dataset.tokens(split)
    out = args.out or args.by
    folder = Path(out) if os.sep in out else dataset.dir / "labels" / out
    labeller = LABELLERS[args.by](args, dataset)
    if wrong := [name for name in labeller.names if not NAME.fullmatch(name)]:
        raise UserError(f"{wrong[0]!r} is no name: letters, digits, _ and -, a letter first")
    if not label(folder, Text(dataset, labeller.size), labeller, splits, args.force):
        print("already labelled, verified")
    report(folder, dataset, args.show)


if __name__ == "__main__":
    run(main)
