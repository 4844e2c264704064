"""
Reads and writes a prepared text, the folder data/<name>/: meta.json, and a file of tokens for each split.

    train.bin, val.bin, test.bin   token ids, nothing else, of meta.json's dtype; a split may also be the
                                   shards that meta.json names, see shards.py
    <split>.sizes.bin              of a split some of whose tokens stand for other text than they spell
"""

import contextlib
import difflib
import hashlib
import json
import os
import re
from functools import cached_property
from pathlib import Path

import numpy as np

from nanoheads import files, shards
from nanoheads.common import ROOT, UserError, gib, is_there, memory_of_machine, write_atomic
from nanoheads.tokenizer import Tokenizer, count_chars, cut_at_spaces, token_sizes

SPLITS = ("train", "val", "test")
DTYPES = ("uint8", "uint16", "uint32")
# where a document begins in the bytes of a text, whose lines may end in \r\n: the first of these that is
# there at least twice
TITLE = re.compile(rb"^ = (?!= )[^\n]* = \r?$", re.M)  # WikiText's, of an article; " = = " is a section's
BEGINNINGS = (TITLE,
              re.compile(rb"^# ---- \S+ ----\r?$", re.M),  # data/pystdlib: a file
              re.compile(rb"^  <page>\r?$", re.M),          # enwik8: a page
              # after a blank line: a speech, an article
              re.compile(rb"(?:(?<=\n\n)|(?<=\n\r\n))(?=[^\n])(?!\r\n)"))
ADVICE = "run its prepare script again, which writes it anew"
# what a model or a score reads of meta.json, and there of each split; names, notes and sources are for people
META_KEYS = ("encoding", "vocab", "vocab_size", "separator", "dtype", "spelled")
SPLIT_KEYS = ("tokens", "bytes", "sizes_sha256")


# ---- read ----

class NotPrepared(UserError):
    """A dataset, labels or a teacher that a command makes, which has not been run."""


class Dataset:
    """data/<name>, or any folder that a prepare script wrote. UserError when it is missing or damaged.

    A split is compared with its sha256 in meta.json when it is opened; see files.check().
    """

    def __init__(self, name):
        self.dir = next((folder for folder in folders_of(name) if is_there(folder / "meta.json")), None)
        if self.dir is None:
            raise missing_error(name)
        path = self.dir / "meta.json"
        try:
            self.meta = json.loads(path.read_bytes())
            self.tokenizer = Tokenizer.from_meta(self.meta)
            self.vocab_size, self.separator = self.tokenizer.vocab_size, int(self.meta["separator"])
            self.first = self.separator  # what the first token of a split is predicted from
            if not 0 <= self.separator < self.vocab_size:
                raise ValueError(f"separator={self.separator} is no token of its vocabulary")
            if self.meta["dtype"] not in DTYPES:
                raise ValueError(f"dtype={self.meta['dtype']!r} must be {', '.join(DTYPES)}")
            self.dtype = np.dtype(self.meta["dtype"])
            self.splits = self.meta["splits"]
            self.sizes = {split: (int(size["tokens"]), int(size["bytes"]))
                          for split, size in self.splits.items()}
            self.sums = {split: size["sha256"] for split, size in self.splits.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            why = f"{e.args[0]} is missing" if isinstance(e, KeyError) else e
            raise UserError(f"{path} is not what a prepare script writes: {why}; run it again with --force"
                            ) from None
        # out of what checkpoints keep: where files lie on this machine is nothing to a model
        self.shards = {split: size.pop("shards", None) for split, size in self.splits.items()}

    @cached_property
    def digests(self):
        """digests_of() its meta.json, as it was when this was made."""
        return digests_of(self.meta)

    def files(self, split):
        """The paths of the files that a split is read from."""
        return [self.dir / shard["file"] for shard in self.shards.get(split) or [dict(file=f"{split}.bin")]]

    def tokens(self, split):
        """The split as a read-only memory map, [n], or as Shards. UserError where it is not what meta.json
        says.
        """
        if self.shards.get(split):
            return shards.open_shards(self, split)
        path = self.dir / f"{split}.bin"
        if split not in self.splits or not is_there(path):
            splits = [s for s in self.splits if all(map(Path.is_file, self.files(s)))]
            raise UserError(f"{self.dir} has no split {split!r}; it has {', '.join(splits) or 'none'}")
        tokens, _ = self.sizes[split]
        size = path.stat().st_size
        if size != tokens * self.dtype.itemsize or not tokens:
            raise UserError(f"{path} holds {size // self.dtype.itemsize:,} tokens "
                            f"where meta.json says {tokens:,}; run its prepare script with --force")
        files.check(path, self.sums[split], "meta.json", ADVICE)
        return np.memmap(path, self.dtype, "r")

    def name_of(self, split):
        """What a split is called in messages: its file or, of shards, the folder's name for them."""
        split_shards = self.shards.get(split)
        if split_shards:
            return f"{self.dir / split} ({len(split_shards):,} shards)"
        return f"{self.dir / split}.bin"

    def sizes_beyond(self, split):
        """[n, 3], int64: the tokens that stand for other text than they spell, in their order, and how many
        more bytes and characters they stand for; see Tokenizer.encode_sized(). UserError as for tokens().
        """
        path, expected = self.dir / f"{split}.sizes.bin", self.splits[split].get("sizes_sha256")
        if expected is None:
            return np.empty((0, 3), np.int64)
        if not path.is_file():
            raise UserError(f"{path} is not there, which meta.json describes; {ADVICE}")
        files.check(path, expected, "meta.json", ADVICE)
        return np.memmap(path, "<i8", "r").reshape(-1, 3)

    def need(self, split, tokens, block_size):
        """Raise UserError unless the split has as many tokens as a use of it with this block_size takes."""
        if len(self.tokens(split)) < tokens:
            raise UserError(f"block_size={block_size} needs at least {tokens:,} tokens of {split}; "
                            f"{self.dir} has {len(self.tokens(split)):,}")

    def bytes_per_token(self, split):
        tokens, size = self.sizes[split]
        return size / tokens

    def documents(self, split):
        """Where the documents of a split begin, and the end of the last one: tokens, int64 [n + 1].

        A document ends with an end-of-text token, and in bytes or characters with the --separator that the
        text was prepared with. Where there are none one begins as BEGINNINGS has it, and what stands before
        the first is one too. UserError where there are not two.
        """
        tokens, separator = self.tokens(split), (self.meta.get("options") or {}).get("separator")
        plain, cuts = self.meta["encoding"] in ("byte", "char"), []  # where a separator is text
        if plain and separator:
            mark = separator.encode()
            if self.meta["encoding"] == "byte" and len(mark) == 1:
                cuts = places_after(tokens, mark[0])
            else:
                cuts = after_matches(self.tokenizer, tokens, re.compile(re.escape(mark)))
        elif not plain and self.separator == self.tokenizer.end:  # else the vocabulary has none
            cuts = places_after(tokens, self.separator)
        if not len(cuts):
            cuts = beginnings(self.tokenizer, tokens, *BEGINNINGS)
        has_marks = len(cuts) > 0
        cuts = np.unique([0, *cuts, len(tokens)])
        if len(cuts) < 3:
            raise UserError(self.name_of(split) + (
                " is a single document, and it takes two or more" if has_marks else
                " has no documents: no end-of-text token, title or blank line says where one begins"))
        return cuts


def digests_of(meta):
    """{what: sha256} of all that a model or a score reads of a data folder, from its meta.json (a dict).

    Each split's is there by its name, and as "meta" the one of the fields that META_KEYS and SPLIT_KEYS name.
    """
    splits = meta.get("splits") or {}
    content = {key: meta.get(key) for key in META_KEYS}
    content["documents"] = (meta.get("options") or {}).get("separator")
    content["splits"] = {name: [split.get(key) for key in SPLIT_KEYS] for name, split in splits.items()}
    split_digests = {name: split.get("sha256") for name, split in splits.items()}
    return {**split_digests, "meta": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def places_after(tokens, token, block=1 << 26):
    """The places behind each `token` in tokens [n], int64; block by block, for files beyond memory."""
    return np.concatenate([first + 1 + np.flatnonzero(tokens[first:first + block] == token)
                           for first in range(0, len(tokens), block)])


def beginnings(tokenizer, tokens, *patterns):
    """The tokens, int64 [n], in which the matches of a pattern in their text begin.

    Of several patterns: of the first with two matches, or else of the last.
    """
    raw = raw_text(tokenizer, tokens)
    for pattern in patterns:
        places = [match.start() for match in pattern.finditer(raw)]
        if len(places) > 1:
            break
    return tokens_at(tokenizer, tokens, places)


def after_matches(tokenizer, tokens, pattern):
    """The tokens, int64 [n], that come after the matches of a pattern in their text."""
    places = [match.end() for match in pattern.finditer(raw_text(tokenizer, tokens))]
    return tokens_at(tokenizer, tokens, places)


def raw_text(tokenizer, tokens):
    return tokens.tobytes() if tokenizer.encoding == "byte" else tokenizer.decode_bytes(tokens)


def tokens_at(tokenizer, tokens, places):
    """The tokens, int64 [n], that the bytes at these places of their text are in."""
    places = np.array(places, np.int64)
    if tokenizer.encoding == "byte":
        return places
    return np.searchsorted(token_sizes(tokenizer)[tokens].cumsum(), places, "right")


def folders_of(name):
    """The folders that a dataset's name may stand for."""
    return Path(name), ROOT / "data" / name, ROOT / name


def missing_error(name):
    """The UserError for a missing data folder. It names the command that makes it, or the nearest name."""
    base_name = Path(name).name
    scripts = {script.parent.name: script for script in (ROOT / "data").glob("*/prepare.py")}
    commands = {dataset: f"python {os.path.relpath(script)}" for dataset, script in scripts.items()}
    # a second encoding has a folder but no script of its own; the first one names it in its docstring
    first_part, _, encoding = base_name.rpartition("_")
    flag = f"--encoding={encoding}"
    if first_part in commands and f"prepare.py {flag} " in scripts[first_part].read_text(encoding="utf-8"):
        commands.setdefault(base_name, f"{commands[first_part]} {flag}")
    for folder in folders_of(name):
        if folder.resolve().parent == (ROOT / "data").resolve() and folder.name in commands:
            continue
        if all((folder / f"{split}.bin").is_file() for split in ("train", "val")):
            return UserError(f"{folder} has train.bin and val.bin but no meta.json; if nanoGPT wrote them, "
                             f"run: python {os.path.relpath(ROOT / 'data/from_nanogpt.py')} {folder}")
        names = [path.name for path in folder.glob("*.bin")]
        if all(any(split in file for file in names) for split in ("train", "val")):
            return UserError(f"{folder} has shards but no meta.json; if they are in llm.c's format, run: "
                             f"python {os.path.relpath(ROOT / 'data/fineweb/prepare.py')} --shards "
                             f"'{folder / '*.bin'}'")
    if base_name in commands:
        return NotPrepared(f"dataset {name} is not prepared; run: {commands[base_name]}")
    if close := difflib.get_close_matches(base_name, commands, 1, 0.6):
        return UserError(f"no dataset {name}; did you mean {close[0]}?")
    return UserError(f"no dataset {name}: neither a folder with a meta.json nor one of "
                     f"{', '.join(sorted(commands))}")


# ---- write ----

PIECE = 1 << 22        # bytes or characters of text that are encoded at a time
MEMORY_PER_BYTE = 160  # what tokenizers takes for each byte of text that it encodes at once, measured


class Writer:
    """Writes a data folder. The files are under temporary names until all are whole, and meta.json is last.

    A context manager: leaving it by an exception leaves the folder as it was. UserError where another process
    writes it.
    """

    def __init__(self, folder, name, tok, source, note="", options=None):
        self.folder, self.tok = folder, tok
        self.name, self.options = name, options
        self.source, self.note = source, note  # may be set until the end, where a text is streamed
        self.splits = {split: dict(tokens=0, bytes=0, chars=0) for split in SPLITS}
        self.changed_bytes = 0  # bytes of text whose tokens spell something else

    def __enter__(self):
        self.files, self.sums = {}, {}
        with contextlib.ExitStack() as exit_stack:
            exit_stack.enter_context(files.only_writer(self.folder, flag="--out", lock_stays=False))
            for split in SPLITS:
                self.open(split)
            self.exit_stack = exit_stack.pop_all()  # until the end
        return self

    def open(self, name):
        self.files[name] = files.open_temporary(self.folder / f"{name}.bin")
        self.sums[name] = hashlib.sha256()

    def add_text(self, split, text):
        """Append the tokens of a text, or of a document: bytes for byte, str for the others. UserError."""
        for piece in self.pieces(text):
            data = piece if isinstance(piece, bytes) else piece.encode()
            try:
                ids, sizes, changed_bytes = self.tok.encode_sized(piece)
            except ValueError as e:  # of hf: some of its vocabularies lack a byte
                raise UserError(f"{self.folder}: {e}; take another --tokenizer, or --encoding=byte") from None
            if len(sizes):
                self.add_sizes(split, sizes)
            self.changed_bytes += changed_bytes
            self.add(split, ids, len(data), count_chars(data))

    def end_document(self, split):
        """Append the token that stands behind a document, which is no text."""
        self.add(split, np.array([self.tok.end]), 0, 0)

    def pieces(self, text):
        """A text in parts whose tokens are those of the whole. UserError: it takes too much memory."""
        if self.tok.encoding == "gpt2":
            return cut_at_spaces(text)
        if self.tok.encoding != "hf":
            return (text[start:start + PIECE] for start in range(0, len(text), PIECE))
        needed = MEMORY_PER_BYTE * len(text.encode())
        if needed > memory_of_machine():
            raise UserError(f"{self.folder}: this machine has {gib(memory_of_machine())} of memory, not "
                            f"{gib(needed)}; take a smaller source, or --separator: its documents are "
                            "encoded one by one")
        return [text]

    def add(self, split, ids, size, chars):
        """Append [n] ids, which stand for `size` UTF-8 bytes and `chars` characters of text."""
        self.put(split, ids.astype(self.tok.dtype, copy=False).tobytes())
        for key, n in zip(self.splits[split], (len(ids), size, chars)):
            self.splits[split][key] += n

    def add_sizes(self, split, sizes):
        """Append what the next tokens stand for beyond what they spell, see Tokenizer.encode_sized()."""
        name = f"{split}.sizes"
        if name not in self.files:
            self.open(name)
        self.put(name, (sizes + [self.splits[split]["tokens"], 0, 0]).astype("<i8").tobytes())

    def put(self, name, data):
        with self.disk():
            self.files[name].write(data)
        self.sums[name].update(data)

    def __exit__(self, kind, error, trace):
        with self.exit_stack:
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
                raise UserError(f"{self.folder}: the {split} split would be empty; take a larger source or "
                                "other shares")
            self.splits[split]["sha256"] = self.sums[split].hexdigest()
            if f"{split}.sizes" in self.sums:
                self.splits[split]["sizes_sha256"] = self.sums[f"{split}.sizes"].hexdigest()
        if self.changed_bytes:
            size = sum(split["bytes"] for split in self.splits.values())
            self.note = "; ".join(filter(None, [
                self.note, f"the encoding changes the text: the tokens of {self.changed_bytes:,} of its "
                f"{size:,} bytes spell something else; bits per byte count the bytes of the text"]))
        spelled = {"spelled": not self.changed_bytes} if self.tok.encoding == "hf" else {}
        with self.disk():
            for file in self.files.values():
                file.flush()
                os.fsync(file.fileno())
                file.close()
            (self.folder / "meta.json").unlink(missing_ok=True)
            for split in SPLITS:  # of what was there before
                (self.folder / f"{split}.sizes.bin").unlink(missing_ok=True)
            for name, file in self.files.items():
                os.replace(file.name, self.folder / f"{name}.bin")
            self.meta = write_meta(self.folder, self.name, self.tok, self.splits, self.source, self.note,
                                   self.options, **spelled)

    @contextlib.contextmanager
    def disk(self):
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.folder}: cannot write ({error.strerror}); make room or take another "
                            "--out") from None


def write_meta(folder, name, tok, splits, source, note="", options=None, **more):
    """Write the meta.json of a data folder, by which it is prepared, and return what it says (a dict)."""
    meta = dict(name=name, encoding=tok.encoding, vocab_size=tok.vocab_size, dtype=tok.dtype.name,
                vocab=tok.vocab, separator=tok.separator, source=source, note=note, options=options, **more)
    meta = {key: value for key, value in meta.items() if value not in (None, "")}
    meta["splits"] = splits
    text = json.dumps(meta, indent=1, ensure_ascii=False).encode()
    write_atomic(folder / "meta.json", lambda file: file.write(text))
    return meta


def text_of_tokens(tok):
    """What each token of a vocabulary adds to a split's tokens, bytes and characters, int64 [V, 3]: the token
    at the end of a document is no text.
    """
    pieces = [tok.decode_bytes([i]) for i in range(tok.vocab_size)]
    if tok.encoding == "gpt2":
        pieces[tok.end] = b""
    return np.array([(1, len(piece), count_chars(piece)) for piece in pieces])
