"""
What the prepare scripts share: write train/val/test.bin + meta.json, verify them, and the frame of a script.
"""
import argparse
import contextlib
import hashlib
import json
import os
import sys
from itertools import groupby
from pathlib import Path

import numpy as np

from nanoheads import answer_interrupts
from nanoheads.common import (ArgumentParser, UserError, from_json, gib, memory_of_machine, output_written,
                              say, write_atomic)
from nanoheads.locks import remove_abandoned, temporary
from nanoheads.sources import HOME, SPLITS, digest, find, identity, origin, read
from nanoheads.tokenizer import Tokenizer, count_chars, cut_at_spaces, problem_of_meta


# ---- write ----

WHOLE = 160  # bytes of memory for each byte of text that tokenizers encodes at once, measured


class Writer:
    """The .bin files of a data folder under temporary names; they get their own together, meta.json last.

    A context manager: leaving it by an exception removes the temporary files and leaves the folder as it was.
    """

    def __init__(self, args, tok, source, note="", options=None):
        self.out, self.tok = args.out, tok
        meta = {
            "name": args.name, "encoding": tok.encoding, "vocab_size": tok.vocab_size,
            "dtype": tok.dtype.name, "vocab": tok.vocab, "separator": tok.separator,
            "source": source, "note": note, "options": options,
        }
        self.meta = {key: value for key, value in meta.items() if value not in (None, "")}
        self.splits = {s: {"tokens": 0, "bytes": 0, "chars": 0} for s in SPLITS}
        self.sha = {s: hashlib.sha256() for s in SPLITS}
        self.changed = 0  # bytes of text whose tokens spell something else

    def __enter__(self):
        self.out.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.out, "*.bin")
        self.files = {s: temporary(self.out / f"{s}.bin") for s in SPLITS}
        return self

    def add(self, split, ids, size, chars):
        """Append [n] ids, which stand for `size` UTF-8 bytes and `chars` characters of text."""
        self.put(split, ids.astype(self.tok.dtype, copy=False).tobytes())
        for key, n in zip(self.splits[split], (len(ids), size, chars)):
            self.splits[split][key] += n

    def add_pieces(self, split, pieces):
        """Append the encoding of a stream of bytes (byte) or str (the others). None in it is the end of a
        document, an end-of-text token; where there is no text between two, it is one.
        """
        for ends, part in groupby(pieces, lambda piece: piece is None):
            if ends and self.splits[split]["tokens"]:
                self.add(split, np.array([self.tok.end]), 0, 0)
            for piece in () if ends else self.parted(part):
                data = piece if isinstance(piece, bytes) else piece.encode()
                ids, sizes, changed = self.tok.encode_sized(piece)
                self.add_sizes(split, sizes)
                self.changed += changed
                self.add(split, ids, len(data), count_chars(data))

    def parted(self, pieces):
        """A stream in pieces whose tokens are those of the whole. UserError: that takes too much memory."""
        if self.tok.encoding in ("byte", "char"):
            return pieces
        if self.tok.cuts:
            return cut_at_spaces(pieces, cuts=self.tok.cuts)
        whole = "".join(pieces)
        needs = WHOLE * len(whole.encode())
        if needs > 2**30:
            print("where this tokenizer lets a text be cut is not known here, so that it is encoded whole: "
                  f"about {gib(needs)} of memory", flush=True)
        if needs > memory_of_machine():
            raise UserError(f"{self.out}: this machine has {gib(memory_of_machine())} of memory, not "
                            f"{gib(needs)}; take a smaller source, or --separator: its documents are encoded "
                            "one by one")
        return [whole]

    def add_sizes(self, split, sizes):
        """Append what the next tokens stand for beyond what they spell, see Tokenizer.encode_sized()."""
        name = f"{split}.sizes"
        if len(sizes) and name not in self.files:
            self.files[name] = temporary(self.out / f"{name}.bin")
            self.sha[name] = hashlib.sha256()
        if len(sizes):
            self.put(name, (sizes + [self.splits[split]["tokens"], 0, 0]).astype("<i8").tobytes())

    def put(self, name, data):
        with self.disk():
            self.files[name].write(data)
        self.sha[name].update(data)

    def __exit__(self, kind, error, trace):
        try:
            if kind is None:
                self.finish()
        finally:
            for file in self.files.values():
                with contextlib.suppress(OSError):  # a full disk was reported already
                    file.close()
                Path(file.name).unlink(missing_ok=True)

    def finish(self):
        """Give the files their names. Without meta.json a folder is not prepared, so it leaves first."""
        for split in SPLITS:
            if not self.splits[split]["tokens"]:
                raise UserError(
                    f"{self.out}: the {split} split would be empty; take a larger source or other shares")
            self.splits[split]["sha256"] = self.sha[split].hexdigest()
            if f"{split}.sizes" in self.sha:
                self.splits[split]["sizes_sha256"] = self.sha[f"{split}.sizes"].hexdigest()
        if self.tok.encoding == "hf":
            self.meta["spelled"] = not self.changed
        if self.changed:
            size = sum(split["bytes"] for split in self.splits.values())
            self.add_note(f"the encoding changes the text: the tokens of {self.changed:,} of its {size:,} "
                          "bytes spell something else; bits per byte count the bytes of the text")
        with self.disk():
            for file in self.files.values():
                file.flush()
                os.fsync(file.fileno())
            (self.out / "meta.json").unlink(missing_ok=True)
            for split in SPLITS:  # of what was there before
                (self.out / f"{split}.sizes.bin").unlink(missing_ok=True)
            for name, file in self.files.items():
                os.replace(file.name, self.out / f"{name}.bin")
            self.write_meta()

    def write_meta(self):
        self.meta["splits"] = self.splits
        meta = json.dumps(self.meta, indent=1, ensure_ascii=False).encode()
        write_atomic(self.out / "meta.json", lambda file: file.write(meta))

    def add_note(self, note):
        self.meta["note"] = "; ".join(filter(None, [self.meta.get("note"), note]))

    @contextlib.contextmanager
    def disk(self):
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.out}: cannot write ({error.strerror}); make room or take another --out") from None


def prepared(out, **want):
    """The meta.json of a whole, undamaged folder made as `want` has it; else None, and why is printed."""
    try:
        meta = from_json((out / "meta.json").read_bytes())
        if problem := problem_of_meta(meta):
            return say(f"{out}/meta.json: {problem}: preparing it anew")
        for key, value in want.items():
            if {**meta["source"], **meta}.get(key) != value:
                return say(f"{out}: was made with another {key}: preparing it anew")
        for split in SPLITS:
            for name, key in ((f"{split}.bin", "sha256"), (f"{split}.sizes.bin", "sizes_sha256")):
                expected = meta["splits"][split].get(key)
                if expected and digest.__wrapped__(out / name)["sha256"] != expected:
                    return say(f"{out / name}: differs from its checksum: preparing it anew")
        return meta
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return say(f"{out}/meta.json: unreadable: preparing it anew")


def already(args, **want):
    """True, after printing the counts, when the folder is whole and was made as args and `want` have it."""
    remove_abandoned(args.out, "*.bin")
    meta = None if args.force else prepared(args.out, name=args.name, encoding=args.encoding, **want)
    if meta:
        report(args.out, meta, "already prepared, verified: ")
    return bool(meta)


def report(out, meta, head=""):
    """Print the counts of every split, aligned."""
    say(f"{head}{os.path.relpath(out)}: {meta['encoding']}, {meta['vocab_size']:,} symbols")
    print(f"{'split':<6}{'tokens':>16}{'bytes':>16}{'characters':>16}")
    for split in SPLITS:
        print(f"{split:<6}" + "".join(f"{meta['splits'][split][k]:>16,}"
                                      for k in ("tokens", "bytes", "chars")))
    if "note" in meta:
        say(f"note: {meta['note']}")


# ---- a whole script ----

def arguments(doc, name, encodings, argv=None, **more):
    """The command line of a prepare script; args.name and args.out follow the encoding (the first one).

    name: what the dataset is called; "" where that follows from --source, and then args.out may be None.
    """
    parser = ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    download, called = (" (default: $NANOHEADS_DATA, else a download)", "name") if name else ("", "source")
    parser.add_argument("--source", help=f"file or folder to read{download}")
    parser.add_argument("--out", type=Path, help=f"folder to write (default: data/<{called}>, of other "
                                                 f"encodings than the first data/<{called}>_<encoding>)")
    parser.add_argument("--force", action="store_true", help="write anew what is already there")
    parser.add_argument("--encoding", choices=encodings, default=encodings[0])
    for flag, options in more.items():
        parser.add_argument("--" + flag.replace("_", "-"), **options)
    args = parser.parse_args(argv)
    args.name = name if args.encoding == encodings[0] else f"{name}_{args.encoding}"
    args.out = args.out or (HOME / args.name if name else None)
    return args


def prepare(args, files, splits=None, note="", options=None):
    """Find the files {key: File} and build from them, unless the folder is there already. UserError.

    splits(read) -> [(split, stream)], where read(key) streams a file; the default takes one file a split.
    """
    shas = [file.sha256 for file in files.values()]
    known = {"sha256": identity(shas)} if all(shas) else {}
    if (known or not args.source) and already(args, options=options, **known):
        return  # a corpus with fixed content is recognised without its source
    if args.source and len(files) > 1 and Path(args.source).is_file() and not args.source.endswith(".zip"):
        raise UserError(
            f"{args.source}: is one file; name the folder that holds all {len(files)} with --source")
    found = {key: find(file, args.source) for key, file in files.items()}
    splits = splits or (lambda read: [(split, read(split)) for split in SPLITS])
    build(args, origin(found.values()), lambda: splits(lambda key: read(*found[key], args.encoding)),
          note, options)


def build(args, source, splits, note="", options=None):
    """Write a data folder: source as in meta.json, splits() -> [(split, stream of bytes or str)]."""
    vocab = symbols(splits()) if args.encoding == "char" else getattr(args, "vocab", None)
    tok = Tokenizer(args.encoding, vocab)
    with Writer(args, tok, source, note, options) as writer:
        for split, pieces in splits():
            writer.add_pieces(split, pieces)
    report(args.out, writer.meta)


def symbols(splits):
    """The sorted characters of all splits: the char vocabulary."""
    seen = np.zeros(0x110000, bool)
    for _, pieces in splits:
        for piece in pieces:
            seen[np.frombuffer(piece.encode("utf-32-le"), "<u4")] = True
    return [chr(c) for c in np.flatnonzero(seen)]


def run(main):
    """Run a script: what goes wrong outside the code is one line on stderr and exit code 1."""
    with output_written("error"):
        run_main(main)


def run_main(main):
    """run(), but for what could not be printed."""
    answer_interrupts()
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # output_written() knows what to do
        raise
    except OSError as error:
        sys.exit(f"error: {error.filename or 'input or output'}: {error.strerror or error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
