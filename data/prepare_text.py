"""
Prepare a text of your own: as bytes, as characters, or in the byte pairs of GPT-2 or of another model.

    python data/prepare_text.py --source=my.txt                               # its bytes, into data/my
    python data/prepare_text.py --source=folder --encoding=gpt2 --out=data/mine --val=0.05 --test=0.05
    python data/prepare_text.py --source=my.txt --separator='\\n\\n'            # a blank line ends a document
    python data/prepare_text.py --source=my.txt --encoding=hf --tokenizer=SmolLM2-135M --out=data/mine

The text is a .txt file (also .gz or .xz), or the .txt files of a folder, in order of name. It is read whole
and cut in place: first train, then val, then test. All encodings but byte refuse what is not UTF-8;
--errors=replace replaces and counts it. You should see three splits that add up to the text. The text must
fit into memory several times; a longer one is for data/fineweb/prepare.py --source.

The script prints what it finds of line ends, byte-order marks and special tokens. --normalise makes line ends
\\n, and removes byte-order marks. --separator='<|endoftext|>' says what stands between documents. In gpt2 and
hf the end-of-text token takes its place. In bytes and characters it stays as text, and train.py --documents
goes by it. It is also put between two files, unless the first ends with it.
"""
import codecs
import hashlib
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from nanoheads.common import UserError, plural, unescape
from nanoheads.corpus import HOME, blocks, describe, read_text, require
from nanoheads.dataset import Dataset
from nanoheads.files import safe_name
from nanoheads.prepare import arguments, build, is_prepared, origin, run
from nanoheads.tokenizer import ENDS, Tokenizer


# ---- what is asked for ----

def command_line(argv):
    """The arguments, --separator as it is in the text, "" without one. UserError."""
    more = {split: {"type": float, "default": 0.05, "help": f"share of {split} (default: 0.05)"}
            for split in ("val", "test")}
    more["errors"] = {"choices": ["strict", "replace"], "default": "strict",
                      "help": "bytes that are not UTF-8: strict (default) refuses them, replace puts U+FFFD"}
    more["tokenizer"] = {"help": "hf: the folder of a model, or a tokenizer.json"}
    more["separator"] = {"help": "what stands between documents, such as '<|endoftext|>' or '\\n\\n'"}
    more["normalise"] = {"action": "store_true", "help": "make line ends \\n, and remove byte-order marks"}
    args = arguments(__doc__, "", ["byte", "char", "gpt2", "hf"], argv, **more)
    if not args.source:
        raise UserError("--source is missing: --source=my.txt")
    if not (args.val > 0 and args.test > 0 and args.val + args.test < 1):
        raise UserError(f"--val={args.val:g} --test={args.test:g}: both must be above 0, "
                        "and leave something for train")
    if (args.encoding == "hf") != bool(args.tokenizer):
        raise UserError("--encoding=hf and --tokenizer=FOLDER go together")
    if args.separator == "":
        raise UserError("--separator is empty: name what stands between documents, or leave it out")
    args.separator, args.by_default = unescape(args.separator or ""), args.out is None
    args.out = args.out or folder_for(args.source, args.encoding)
    args.name = args.out.resolve().name
    return args


def folder_for(source, encoding):
    """The folder of data/ that has the name of a source, of bytes alone without the encoding. UserError."""
    name = safe_name(re.sub(r"(\.txt)?(\.gz|\.xz)?$", "", Path(source).resolve().name))
    folder = HOME / (name if encoding == "byte" else f"{name}_{encoding}")
    if not name or (folder / "prepare.py").is_file():
        raise UserError(f"{source}: data/{folder.name} is no name for its folder, or another text's: name "
                        "one with --out")
    return folder


def tokenizer_json(path):
    """(text, Tokenizer) of a tokenizer.json, or of the one in a folder. UserError: it is none of ours."""
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
        return text, Tokenizer("hf", text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; --tokenizer names a model's folder") from None
    except Exception as error:  # the library's own are bare
        raise UserError(f"{path}: {' '.join(str(error).split())[:120]}") from None


# ---- the files ----

def files_of(source, separator_name):
    """The text files of a --source: itself, or those of a folder in order of name, which are printed.
    UserError.
    """
    if require(source, "--source").is_file():
        return [source]
    paths = sorted(path for ending in ("", ".gz", ".xz") for path in source.glob("*.txt" + ending))
    other_names = sorted(path.name + "/" * path.is_dir() for path in set(source.iterdir()) - set(paths))
    print(f"{source}: {list_names([path.name for path in paths])}"
          + f", and between two of them {separator_name}" * (len(paths) > 1)
          + f"; skipped: {list_names(other_names)}")
    if not paths:
        raise UserError(f"{source}: holds no .txt file; correct --source")
    return paths


def list_names(file_names, n_shown=8):
    """A list of files in words."""
    remainder = f" and {len(file_names) - n_shown:,} more" if len(file_names) > n_shown else ""
    return ", ".join(file_names[:n_shown]) + remainder or "nothing"


def wide_encoding(path):
    """"UTF-16", "UTF-16LE", "UTF-16BE" or "UTF-32", as iconv calls it, where a file begins so, else None.

    Those with LE or BE have no byte-order mark; but in the text of an alphabet every other byte is NUL.
    """
    data = next(blocks(path), b"")
    if data.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):  # one begins like UTF-16 does
        return "UTF-32"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    first, second = (data[i::2].count(0) / max(1, len(data[i::2])) for i in (0, 1))
    if max(first, second) > 0.4 and min(first, second) < 0.1:
        return "UTF-16BE" if first > second else "UTF-16LE"


def first_stray(data):
    """Where bytes are not UTF-8; None: they are all."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start


def read_files(paths, encoding, errors):
    """(the text of each file: bytes for byte, str for the others; a note on what is odd in them). UserError.
    """
    texts, note, n_replaced, first_place = [], "", 0, ""
    for path in paths:
        if encoding_name := wide_encoding(path):
            advice = f"convert it: iconv -f {encoding_name} -t UTF-8 {path.name} > new.txt"
            if encoding != "byte":
                raise UserError(f"{path}: is {encoding_name[:6]}, not UTF-8; {advice}")
            print(f"{path} is {encoding_name[:6]}, many of whose bytes say nothing; {advice}")
            note = note or (f"{path.name} is {encoding_name[:6]}: its bits per byte are not those of the "
                            "same text in UTF-8")
        if encoding == "byte":
            data = b"".join(blocks(path))
            texts.append(data)
            if not encoding_name and (place := first_stray(data)) is not None:
                print(f"{path} is not UTF-8 at byte {place:,}, so that nothing tells its characters apart; "
                      f"convert it: iconv -f ENCODING -t UTF-8 {path.name} > new.txt, where ENCODING is that "
                      "of the text, such as WINDOWS-1252 or GB18030")
                note = note or f"{path.name} is not UTF-8: its bits per character are of no character"
            continue
        text, strays, place = read_text(path, errors)
        first_place = first_place or (f"byte {place:,} of {path.name}" if strays else "")
        n_replaced += strays
        texts.append(text)
    if n_replaced:
        note = (f"bytes that are not UTF-8, replaced by U+FFFD, which counts as 3 bytes: {n_replaced:,}, "
                f"the first at {first_place}")
    return texts, note


# ---- the text, bytes or str ----

def as_text(text, mark):
    """`mark`, a str, in the type of a text: bytes or str."""
    return mark.encode() if isinstance(text, bytes) else mark


def report(texts, args):
    """Print notes on the line ends, byte-order marks and special tokens in the files."""
    counts = {mark: sum(text.count(as_text(text, mark)) for text in texts)
              for mark in ("\r\n", "\r", "\n", "\ufeff", *ENDS)}
    crlf, n_marks = counts["\r\n"], counts["\ufeff"]
    cr_alone = counts["\r"] - crlf
    lines = counts["\n"] + cr_alone
    if crlf or cr_alone:
        line = f"line ends: {crlf:,} of {lines:,} are CRLF" + f", {cr_alone:,} are CR" * bool(cr_alone)
        print(line + ("; all are LF now" if args.normalise else "; --normalise makes all of them LF"))
    if n_marks:
        print(f"byte-order marks (U+FEFF): {n_marks:,}, which "
              + ("are removed" if args.normalise else "stay in the text; --normalise removes them"))
    for end in ENDS:
        if counts[end] and end != args.separator:
            print(f"{end} is {plural(counts[end], 'time')} in the text and stays text; --separator='{end}' "
                  "makes documents of what is between")


def normalise(text):
    """A text whose lines all end in \\n alone, without byte-order marks."""
    mark, crlf, cr, lf = (as_text(text, mark_text) for mark_text in ("\ufeff", "\r\n", "\r", "\n"))
    return text.replace(mark, mark[:0]).replace(crlf, lf).replace(cr, lf)


def join_texts(texts, separator):
    """The texts one after the other, and the separator between two unless the first ends with it."""
    mark, parts = as_text(texts[0], separator), []
    for text in texts:
        if parts and not parts[-1].endswith(mark):
            parts.append(mark)
        parts.append(text)
    return mark[:0].join(parts)


def split_text(text, args):
    """{split: text}, cut where the shares say, but not inside a separator. UserError."""
    val, test = int(len(text) * args.val), int(len(text) * args.test)
    ends, documents = [len(text) - val - test, len(text) - test], 0
    if args.separator:
        for match in re.finditer(re.escape(as_text(text, args.separator)), text):
            documents += 1
            ends = [match.end() if match.start() < end < match.end() else end for end in ends]
        if not documents:
            crlf = not args.normalise and as_text(text, "\r\n") in text
            raise UserError(f"{args.source}: --separator={args.separator!r} is not in the text"
                            + ("; lines end in CRLF: take --normalise as well" if crlf else ""))
        print(f"{args.separator!r} ends a document {plural(documents, 'time')}")
    texts = {"train": text[:ends[0]], "val": text[ends[0]:ends[1]], "test": text[ends[1]:]}
    if not (val and test and all(texts.values())):
        raise UserError(f"{args.source}: is too small ({len(text):,}): a split would be empty; "
                        "take larger --val and --test")
    return texts


def main(argv=None):
    args = command_line(argv)
    options, separator, vocab = {"val": args.val, "test": args.test}, args.separator, None
    if args.tokenizer:
        vocab, tok = tokenizer_json(Path(args.tokenizer))
        options["tokenizer"] = hashlib.sha256(vocab.encode()).hexdigest()
        if separator and tok.end is None:
            raise UserError(f"--separator: {args.tokenizer} has no end-of-text token ({', '.join(ENDS)})")
    if args.errors == "replace" and args.encoding == "byte":
        print("--errors=replace changes nothing here: with --encoding=byte, bytes need not be UTF-8")
    elif args.errors == "replace":
        options["errors"] = "replace"
    if args.normalise:
        options["normalise"] = True
    if separator:
        options["separator"] = separator

    ends_documents = separator and args.encoding in ("gpt2", "hf")
    separator_name = "an end-of-text token" if ends_documents else repr(separator) if separator else "nothing"
    paths = files_of(Path(args.source).expanduser(), separator_name)
    sources = [describe(path) for path in paths]
    for path, file in zip(paths, sources):
        if not file.bytes:
            raise UserError(f"{path}: is empty; remove it, or choose another --source")
    source = origin(sources)
    texts, note = read_files(paths, args.encoding, args.errors)
    report(texts, args)
    text = join_texts([normalise(each) for each in texts] if args.normalise else texts, separator)
    texts = split_text(text, args)
    if args.by_default and not args.force and is_of_another_text(args.out, source["sha256"]):
        raise UserError(f"{args.out} holds another text: name another folder with --out, or write it anew "
                        "with --force")
    if not is_prepared(args, source["sha256"], options):
        build(args, texts, source, note, options, vocab, separator if ends_documents else None)


def is_of_another_text(folder, sha256):
    """Whether a folder was prepared from other text than that of this SHA-256."""
    return (folder / "meta.json").is_file() and Dataset(folder).meta.get("source", {}).get("sha256") != sha256


if __name__ == "__main__":
    run(main)
