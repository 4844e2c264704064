"""What the prepare scripts of data/ share: their options, the folder that they write, what they print."""

import argparse
import os
from pathlib import Path

from nanoheads.common import UserError, as_program, say
from nanoheads.corpus import HOME, blocks, check, locate, read_text
from nanoheads.dataset import SPLITS, Dataset, Writer
from nanoheads.shards import identity
from nanoheads.tokenizer import Tokenizer


DOWNLOAD = "its files in $NANOHEADS_DATA or else in data/, to which they are downloaded"


def arguments(doc, name, encodings, argv=None, without_source=DOWNLOAD, **more):
    """The command line of a prepare script; args.name and args.out follow the encoding (the first one).

    name: what the dataset is called; "" where that follows from --source, and then args.out may be None.
    without_source: what is read where there is no --source.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = f" (default: {without_source})" if name else ""
    folder = f"data/{name or 'SOURCE'}"
    other = f", or {folder}_ENCODING if the encoding is not {encodings[0]}" if encodings[1:] else ""
    parser.add_argument("--source", help=f"file or folder to read{default}")
    parser.add_argument("--out", type=Path, help=f"folder to write (default: {folder}{other})")
    parser.add_argument("--force", action="store_true", help="write the folder anew, if it is there already")
    parser.add_argument("--encoding", choices=encodings, default=encodings[0],
                        help=f"what a token is (default: {encodings[0]})")
    for flag, options in more.items():
        parser.add_argument(*dict.fromkeys(["--" + flag.replace("_", "-"), "--" + flag]), **options)
    args = parser.parse_args(argv)
    args.name = name if args.encoding == encodings[0] else f"{name}_{args.encoding}"
    args.out = args.out or (HOME / args.name if name else None)
    return args


def prepare(args, corpus, files, archive=None, splits=None, note="", options=None):
    """Write the data folder of a corpus, unless it is there already. UserError.

    corpus, files, archive: see corpus.located(). splits(texts by key) -> {split: text}; without it the files
    are the splits.
    """
    shas = [file.sha256 for file in files.values()]
    if is_prepared(args, identity(shas) if all(shas) else None, options):
        return  # by its checksums, without its source
    paths = locate(files, corpus, args.source, archive)
    source = origin([check(path, files[key]) for key, path in paths.items()])
    texts = {key: text_of(path, args.encoding) for key, path in paths.items()}
    build(args, splits(texts) if splits else texts, source, note, options)


def origin(files):
    """What meta.json says of the files, described() ones, that a text comes from."""
    return {"file": files[0].name if len(files) == 1 else [file.name for file in files],
            "bytes": sum(file.bytes for file in files),
            "sha256": identity([file.sha256 for file in files])}


def text_of(path, encoding):
    """A file's content as an encoding takes it: bytes for byte, str for the others. UserError."""
    return b"".join(blocks(path)) if encoding == "byte" else read_text(path)[0]


def build(args, texts, source, note="", options=None, vocab=None, separator=None):
    """Write a data folder of {split: text, bytes for byte and str for the others}; source: as in meta.json.

    vocab: of hf. separator: the text in whose place an end-of-text token comes.
    """
    if args.encoding == "char":
        vocab = sorted(set().union(*texts.values()))
    tok = Tokenizer(args.encoding, vocab)
    with Writer(args.out, args.name, tok, source, note, options) as writer:
        for split, text in texts.items():
            *documents, last = text.split(separator) if separator else [text]
            for document in filter(None, documents):
                writer.add_text(split, document)
                writer.end_document(split)
            writer.add_text(split, last)
    report(args.out, writer.meta)


def is_prepared(args, sha256=None, options=None):
    """Whether the folder is complete and was made with these args and options; if so, its counts are printed.

    sha256: of the source; None: any. Where there is another folder, a line says what it has instead.
    """
    if args.force or not (args.out / "meta.json").is_file():
        return False
    try:
        data = Dataset(args.out)
        for split in SPLITS:
            data.tokens(split)
            data.sizes_beyond(split)
    except UserError as error:
        say(f"preparing it anew: {error}")
        return False
    actual = {**data.meta, **data.meta["source"]}
    expected = {"encoding": args.encoding, "sha256": sha256 or actual["sha256"], "options": options}
    for key, value in expected.items():
        if actual.get(key) != value:
            say(f"{args.out}: was made with another {key}: preparing it anew")
            return False
    report(args.out, data.meta, "already prepared, verified: ")
    return True


def report(out, meta, head=""):
    """Print the counts of every split, aligned."""
    say(f"{head}{os.path.relpath(out)}: {meta['encoding']}, {meta['vocab_size']:,} symbols")
    print(f"{'split':<6}{'tokens':>16}{'bytes':>16}{'characters':>16}")
    for split in SPLITS:
        print(f"{split:<6}" + "".join(f"{meta['splits'][split][k]:>16,}"
                                      for k in ("tokens", "bytes", "chars")))
    if "note" in meta:
        say(f"note: {meta['note']}")


def run(main):
    """Run a script: what goes wrong outside the code is one line on stderr and exit code 1."""
    with as_program("error"):
        main()
