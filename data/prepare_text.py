"""
Any text of your own, byte by byte, character by character or in byte pairs, GPT-2's or another model's.

python data/prepare_text.py --source=my.txt                    # its bytes, into data/my
python data/prepare_text.py --source=folder_of_txt --encoding=gpt2 --out=data/mine --val=0.05 --test=0.05
python data/prepare_text.py --source=my.txt --encoding=hf --tokenizer=SmolLM2-135M --out=data/mine

The text (.txt, also .gz or .xz; those of a folder one after the other, in order of name) is cut in place:
first train, then val, then test. The char vocabulary is that of the whole text; that of hf is in the folder
--tokenizer. All but byte refuse what is not UTF-8; --errors=replace replaces and counts it. --normalise makes
line ends \\n, and removes byte-order marks. You should see three splits that add up to the text.

--separator='<|endoftext|>', say, or '\\n\\n': what stands between documents. In gpt2 and hf the end-of-text
token takes its place; bytes and characters keep it as text, and documents of training end behind it. It also
comes between two files that it does not part yet.
"""
import codecs
import hashlib
import re
import sys
from bisect import bisect_left
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from nanoheads.common import UserError, from_json, plural, text_of, unescaped
from nanoheads.corpus import (HOME, STRAY, File, already, arguments, blocks, build, cut, decoded, first_stray,
                              origin, read, run, wrong)
from nanoheads.files import cleaned
from nanoheads.tokenizer import ENDS, Tokenizer


def files_of(source, between):
    """The checked text files of a --source: itself, or those of a folder in order of name, which are printed.
    UserError.
    """
    if not source.exists():
        raise UserError(f"{source}: no such file or folder; correct --source")
    paths = [source]
    if not source.is_file():
        paths = sorted(path for ending in ("", ".gz", ".xz") for path in source.glob("*.txt" + ending))
        others = sorted(path.name + "/" * path.is_dir() for path in set(source.iterdir()) - set(paths))
        print(f"{source}: {names([path.name for path in paths])}"
              + f", and between two of them {between}" * (len(paths) > 1) + f"; skipped: {names(others)}")
    if not paths:
        raise UserError(f"{source}: holds no .txt file; correct --source")
    for path in paths:
        if complaint := wrong(path, File(())):
            raise UserError(f"{path}: {complaint}; remove it, or choose another --source")
    return paths


def names(those, most=8):
    """A list of files in words."""
    rest = f" and {len(those) - most:,} more" if len(those) > most else ""
    return ", ".join(those[:most]) + rest or "nothing"


def utf16(path):
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


def in_utf16(paths, encoding):
    """A note on the files that are UTF-16 or UTF-32, for bytes; "": there are none.

    UserError for other encodings.
    """
    for path in paths:
        if kind := utf16(path):
            advice = f"convert it: iconv -f {kind} -t UTF-8 {path.name} > new.txt"
            if encoding != "byte":
                raise UserError(f"{path}: is {kind[:6]}, not UTF-8; {advice}")
            print(f"{path} is {kind[:6]}, many of whose bytes say nothing; {advice}")
            return f"{path.name} is {kind[:6]}: its bits per byte are not those of the same text in UTF-8"
    return ""


def stray_bytes(path, member=None):
    """(how many bytes are not UTF-8, the first one's place or None)."""
    count, first = 0, None
    for start, text in decoded(path, member):
        first = first_stray(start, text) if first is None else first
        count += len(STRAY.findall(text))
    return count, first


def replaced(paths):
    """A note on bytes that are not UTF-8 and are replaced; "": there are none."""
    count, first = 0, ""
    for path in paths:
        strays, place = stray_bytes(path)
        if strays and not count:
            first = f"byte {place:,} of {path.name}"
        count += strays
    return (f"bytes that are not UTF-8, replaced by U+FFFD, which counts as 3 bytes: {count:,}, "
            f"the first at {first}") if count else ""


# ---- streams of text, bytes or str in pieces ----

def like(piece, text):
    """A str as what a stream's piece is: bytes or str."""
    return text.encode() if isinstance(piece, bytes) else text


def counted(pieces, counts):
    """The same stream; how often each key of `counts`, a str, is in it is added to that key's value."""
    tail, longest = None, 4 * max(map(len, counts))  # bytes of a character: four at most
    for piece in pieces:
        tail = piece[:0] if tail is None else tail
        for mark in counts:
            own = like(piece, mark)
            counts[mark] += (tail[len(tail) - len(own) + 1:] + piece).count(own)
        tail = (tail + piece[-longest:])[-longest:]
        yield piece


def normalised(pieces):
    """A stream whose lines all end in \\n alone, without byte-order marks."""
    rest = None
    for piece in pieces:
        mark, cr = like(piece, "\ufeff"), like(piece, "\r")
        piece = piece if rest is None else rest + piece
        # what may go on in the next piece
        held = 1 if piece.endswith(cr) else next((n for n in (2, 1) if piece.endswith(mark[:n])), 0)
        piece, rest = piece[:len(piece) - held], piece[len(piece) - held:]
        yield in_lines(piece)
    if rest:
        yield in_lines(rest)


def in_lines(piece):
    """normalised() of a text that is whole."""
    mark, crlf, cr, lf = (like(piece, each) for each in ("\ufeff", "\r\n", "\r", "\n"))
    return piece.replace(mark, mark[:0]).replace(crlf, lf).replace(cr, lf)


def joined(streams, between):
    """Streams one after the other, and `between` two of them, a str, unless the first ends with it."""
    end = None
    for pieces in streams:
        begins = end is not None
        for piece in pieces:
            own = like(piece, between)
            if begins and not end.endswith(own):
                yield own
            begins, end = False, ((end or piece[:0]) + piece)[-len(own):]
            yield piece


def marked(pieces, separator):
    """A stream with None in the place of each `separator`, a str."""
    rest = None
    for piece in pieces:
        own = like(piece, separator)
        *whole, rest = (piece if rest is None else rest + piece).split(own)
        for text in whole:
            yield from [text, None] if text else [None]
        done = max(0, len(rest) - len(own) + 1)  # a separator may begin behind it
        if done:
            yield rest[:done]
        rest = rest[done:]
    if rest:
        yield rest


def measured(pieces, length):
    """(length, where in it the separators begin) of a stream with None for each separator, `length` long."""
    total, places = 0, []
    for piece in pieces:
        if piece is None:
            places.append(total)
        total += length if piece is None else len(piece)
    return total, places


def outside(place, separators, length):
    """A place in the text, or the end of the separator that it is in. separators: where they begin."""
    i = bisect_left(separators, place) - 1
    return max(place, separators[i] + length) if i >= 0 else place


def report(counts, args):
    """Print what of the line ends, marks and special tokens that were counted needs a word."""
    crlf, marks = counts["\r\n"], counts["\ufeff"]
    alone = counts["\r"] - crlf
    lines = counts["\n"] + alone
    if crlf or alone:
        line = f"line ends: {crlf:,} of {lines:,} are CRLF" + f", {alone:,} are CR" * bool(alone)
        print(line + ("; all are LF now" if args.normalise else "; --normalise makes all of them LF"))
    if marks:
        print(f"byte-order marks (U+FEFF): {marks:,}, which "
              + ("are removed" if args.normalise else "stay in the text; --normalise removes them"))
    for end in ENDS:
        if counts[end] and end != args.separator:
            print(f"{end} is {plural(counts[end], 'time')} in the text and stays text; --separator='{end}' "
                  "makes documents of what is between")


def tokenizer_json(path):
    """(text, Tokenizer) of a tokenizer.json, or of the one in a folder. UserError: it is none of ours."""
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        text = text_of(path)
        tok = Tokenizer("hf", text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; --tokenizer names a model's folder") from None
    except Exception as error:  # the library's own are bare
        raise UserError(f"{path}: {' '.join(str(error).split())[:120]}") from None
    return text, tok


def command_line(argv):
    """The arguments, --separator as it is in the text, "" without one. UserError."""
    more = {split: {"type": float, "default": 0.05, "help": f"share of {split}"} for split in ("val", "test")}
    more["errors"] = {"choices": ["strict", "replace"], "default": "strict",
                      "help": "replace: U+FFFD for each byte that is not UTF-8 (not for byte)"}
    more["tokenizer"] = {"help": "hf: a model's folder, or a tokenizer.json"}
    more["separator"] = {"help": "what stands between documents, such as '<|endoftext|>' or '\\n\\n'"}
    more["normalise"] = {"action": "store_true", "help": "line ends become \\n, byte-order marks go"}
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
    args.separator, args.by_default = unescaped(args.separator or ""), args.out is None
    args.out = args.out or folder_for(args.source, args.encoding)
    args.name = args.out.resolve().name
    return args


def folder_for(source, encoding):
    """The folder of data/ that has the name of a source, of bytes alone without the encoding. UserError."""
    name = cleaned(re.sub(r"(\.txt)?(\.gz|\.xz)?$", "", Path(source).resolve().name))
    folder = HOME / (name if encoding == "byte" else f"{name}_{encoding}")
    if not name or (folder / "prepare.py").is_file():
        raise UserError(f"{source}: data/{folder.name} is no name for its folder, or another text's: name "
                        "one with --out")
    return folder


def is_of_another_text(folder, sha256):
    """Whether a folder was prepared from other text than that of this SHA-256, or cannot be read."""
    try:
        return from_json((folder / "meta.json").read_bytes())["source"]["sha256"] != sha256
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):
        return True


def main(argv=None):
    args = command_line(argv)
    options, source, separator = {"val": args.val, "test": args.test}, Path(args.source), args.separator
    if args.tokenizer:
        args.vocab, tok = tokenizer_json(Path(args.tokenizer))
        options["tokenizer"] = hashlib.sha256(args.vocab.encode()).hexdigest()
        if separator and tok.end is None:
            raise UserError(f"--separator: {args.tokenizer} has no end-of-text token ({', '.join(ENDS)})")

    # the files, and what is done to their text
    as_token = separator and args.encoding in ("gpt2", "hf")
    between = "an end-of-text token" if as_token else repr(separator) if separator else "nothing"
    paths = files_of(source.expanduser(), between)
    note = in_utf16(paths, args.encoding)
    if args.errors == "replace" and args.encoding == "byte":
        print("--errors=replace changes nothing here: with --encoding=byte, bytes need not be UTF-8")
    elif args.errors == "replace":
        note, options["errors"] = replaced(paths), "replace"
    options.update({"normalise": True} if args.normalise else {})
    options.update({"separator": separator} if separator else {})

    def text(counts=None):
        """The text with these options, a stream; counts: what of the files' own is counted, see counted()."""
        streams = (read(path, None, args.encoding, args.errors) for path in paths)
        if counts:
            streams = (counted(pieces, counts) for pieces in streams)
        if args.normalise:
            streams = map(normalised, streams)
        return joined(streams, separator) if separator else chain.from_iterable(streams)

    # where the splits end, but not inside a separator
    counts = dict.fromkeys(("\r\n", "\r", "\n", "\ufeff", *ENDS), 0)
    length = len(separator.encode() if args.encoding == "byte" else separator)
    total, places = measured(marked(text(counts), separator) if separator else text(counts), length)
    report(counts, args)
    if separator and not places:
        crlf = counts["\r\n"] and not args.normalise
        raise UserError(f"{source}: --separator={separator!r} is not in the text"
                        + ("; lines end in CRLF: take --normalise as well" if crlf else ""))
    if separator:
        print(f"{separator!r} ends a document {plural(len(places), 'time')}")
    val, test = int(total * args.val), int(total * args.test)
    ends = [outside(place, places, length) for place in (total - val - test, total - test)]
    sizes = ends[0], ends[1] - ends[0], total - ends[1]
    if not (val and test and min(sizes)):
        raise UserError(f"{source}: is too small ({total:,}): a split would be empty; "
                        "take larger --val and --test")

    def splits():
        for split, pieces in cut(text(), sizes):
            yield split, marked(pieces, separator) if as_token else pieces

    about = origin((path, None) for path in paths)
    if args.by_default and not args.force and is_of_another_text(args.out, about["sha256"]):
        raise UserError(f"{args.out} holds another text: name another folder with --out, or write it anew "
                        "with --force")
    if not already(args, sha256=about["sha256"], options=options):
        build(args, about, splits, note, options)


if __name__ == "__main__":
    run(main)
