"""
Makes the labels that lab/label.py writes: by rules, from a known truth, or from a user's file.

A labeller has names, weak (True: no person has checked its labels), note (what its labels depend on:
with the same note they are the same) and size (tokens of a piece); labeller(piece) gives {name: codes of the
piece's tokens}, as targets.py has them. The label of a token depends on the piece's blocks of text and the
characters before them, never on where pieces are cut.
"""

import json
import re
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanoheads.common import UserError
from nanoheads.mechanism import CONSTRAINTS
from nanoheads.tokenizer import char_sizes, token_sizes
from lab.labels import weak
from lab.labels.targets import UNKNOWN, encode, sha256

LONG = 1 << 20    # tokens: a block of text without a blank line is cut there
BLANK = re.compile(rb"(?<=\n)[ \t\r]*\n")
NAME = re.compile(r"[A-Za-z][\w-]*")


# ---- pieces of text, and the tokens of their characters ----

class Piece(NamedTuple):
    """Tokens `start` to `stop` of a split: whole blocks between blank lines, so that no sentence is cut."""
    split: str
    start: int
    stop: int
    sizes: np.ndarray  # bytes of each of its tokens
    text: str          # their text; a byte that is not UTF-8 is a character of its own
    before: str        # the characters before it, weak.WINDOW + 1 of them


class Text:
    """The text of a dataset's splits, in pieces of about `size` tokens."""

    def __init__(self, dataset, size):
        self.dataset, self.size, self.sizes = dataset, size, token_sizes(dataset.tokenizer)

    def bytes(self, split, start, stop):
        return self.dataset.tokenizer.decode_bytes(self.dataset.tokens(split)[max(start, 0):stop])

    def pieces(self, split, start=0):
        """Yield the Pieces of a split from token `start` on, where an earlier piece has ended."""
        tokens = self.dataset.tokens(split)
        while start < len(tokens):
            stop = self.cut(split, start, len(tokens))
            text = self.bytes(split, start, stop).decode("utf-8", "surrogateescape")
            before = self.bytes(split, start - 4 * weak.WINDOW - 8, start).decode("utf-8", "surrogateescape")
            yield Piece(split, start, stop, self.sizes[tokens[start:stop]], text, before[-weak.WINDOW - 1:])
            start = stop

    def cut(self, split, start, total):
        """Where a piece from `start` on ends: between blocks; a block over LONG is cut by its own length."""
        n_read = self.size
        while True:
            ids = self.dataset.tokens(split)[start:start + n_read]
            data, ends = self.dataset.tokenizer.decode_bytes(ids), np.cumsum(self.sizes[ids])
            starts = np.array(block_starts(data), np.int64)
            token = np.searchsorted(ends, starts)
            cuts = (token + 1)[ends[token] == starts].tolist()  # not inside a token
            if start + len(ids) == total:
                cuts.append(len(ids))
            stop = 0
            for cut in cuts:
                if cut - stop > LONG:
                    break
                stop = cut
            if stop:
                return start + stop
            if len(ids) > LONG + 3 or start + len(ids) == total:
                break
            n_read *= 2
        stop = LONG
        # not inside a character
        while stop < min(LONG + 3, len(ids)) and data[ends[stop - 1]] & 0xC0 == 0x80:
            stop += 1
        return start + stop


def block_starts(data):
    """The places in bytes at which a line that is not blank follows one that is."""
    blank = [m.span() for m in BLANK.finditer(data)]
    blank_starts = {a for a, _ in blank}
    starts = [b for _, b in blank if b not in blank_starts]
    if starts and not data[starts[-1]:].strip(b" \t\r"):  # the next line may be blank, too: not read yet
        starts.pop()
    return starts


def to_tokens(codes, piece):
    """Codes of a piece's characters -> of its tokens: of the last labelled character a token has part in.

    So a token that overlaps a span by a character, or by a byte of one, belongs to it.
    """
    codes = np.repeat(codes, char_sizes(piece.text))
    last = np.maximum.accumulate(np.where(codes != UNKNOWN, np.arange(len(codes)), -1))
    ends = np.cumsum(piece.sizes)
    last = last[ends - 1]
    return np.where(last >= ends - piece.sizes, codes[last], UNKNOWN).astype(np.uint8)


def paint(spans, length, rest=UNKNOWN):
    """[(start, end, value)] -> codes, uint8 [length]; what is in no span gets `rest`."""
    codes, code_of = np.full(length, rest, np.uint8), {}
    for start, end, value in spans:
        if value not in code_of:
            code_of[value] = encode(value)
        codes[start:end] = code_of[value]
    return codes


# ---- rules ----

class Weak:
    """The rules of lab/labels/weak.py."""
    size, weak = 1 << 20, True

    def __init__(self, args, dataset):
        self.names = args.names or CONSTRAINTS
        if unknown := [name for name in self.names if name not in weak.LABELLERS]:
            raise UserError(f"no weak labeller {unknown[0]!r}; there are {', '.join(weak.LABELLERS)}")
        self.whole_sentence = args.reach == "start"
        self.note = (f"{', '.join(self.names)} by the rules of text/weak.py ({sha256(weak.__file__)[:12]}), "
                     f"from the {'start of a sentence' if self.whole_sentence else 'trigger'} on")

    def __call__(self, piece):
        return {name: to_tokens(paint(weak.LABELLERS[name](piece.text, piece.before, self.whole_sentence),
                                      len(piece.text)), piece) for name in self.names}


# ---- a known truth ----

TASKS = {
    "comma": "1 where the last of ,.;:?!() within 64 characters is a comma, else 0",
    "capital": "1 at a capital letter A-Z, 1/16 less at each character after it, 0 from the 16th on",
    "parity": "1 where the last 8 characters hold an odd number of the letter e, else 0"}


def truth(task, text):
    """float [n]: the task of TASKS for each of n characters, from it and the 63 before it alone."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    places = np.arange(len(points))
    if task == "parity":
        count = np.cumsum(points == ord("e"))
        count[8:] -= count[:-8].copy()
        return (count % 2).astype(float)
    marks = "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if task == "capital" else ",.;:?!()"
    last = np.maximum.accumulate(np.where(np.isin(points, [ord(c) for c in marks]), places, -1000))
    if task == "capital":
        return np.clip(1 - (places - last) / 16, 0, 1)
    return ((places - last < 64) & (points[last.clip(0)] == ord(","))).astype(float)


class Synthetic:
    """A truth that is known: TASKS, in turn or by --names NAME=TASK; noise turns labels v to 1 - v."""
    size, weak = 1 << 20, False

    def __init__(self, args, dataset):
        pairs = [name.partition("=")[::2] for name in args.names or CONSTRAINTS]
        self.tasks = {name: task or list(TASKS)[i % len(TASKS)] for i, (name, task) in enumerate(pairs)}
        if unknown := set(self.tasks.values()) - set(TASKS):
            raise UserError(f"no synthetic task {unknown.pop()!r}; there are {', '.join(TASKS)}")
        self.names, self.noise, self.seed = list(self.tasks), args.noise or 0.0, args.seed or 0
        if not 0 <= self.noise <= 0.5:
            raise UserError(f"--noise={self.noise:g} must be from 0 to 0.5")
        tasks = ", ".join(f"{name} = {task}" for name, task in self.tasks.items())
        self.note = f"synthetic labels: {tasks}; noise {self.noise:g}, seed {self.seed}"

    def __call__(self, piece):
        labels, n = {}, len(piece.before)
        for name, task in self.tasks.items():
            codes = to_tokens(encode(truth(task, piece.before + piece.text)[n:]), piece)
            flip = self.draws(name, piece) < self.noise
            labels[name] = np.where(flip, UNKNOWN - 1 - codes, codes)
        return labels

    def draws(self, name, piece, block=1 << 16):
        """Uniform draws of the piece's tokens, the same however a split is cut."""
        first, name = piece.start // block, zlib.crc32(f"{name}.{piece.split}".encode())
        rows = [np.random.default_rng([self.seed, name, i]).random(block)
                for i in range(first, (piece.stop - 1) // block + 1)]
        return np.concatenate(rows)[piece.start - first * block:][:piece.stop - piece.start]


# ---- a user's labels ----

SHAPES = {frozenset(("name", "start", "end", "value")): "characters",
          frozenset(("name", "token", "value")): "tokens", frozenset(("name", "token", "values")): "tokens"}


def refuse_constant(word):
    """ValueError: Python reads NaN and Infinity as numbers, and JSON has none of them."""
    raise ValueError(f"{word} is no number; null: not labelled")


def read_line(line):
    """A line of JSON -> (name, "characters" or "tokens", start, codes, length). ValueError: what is wrong."""
    try:
        row = json.loads(line, parse_constant=refuse_constant)
    except ValueError as e:
        raise ValueError(f"is not JSON: {e}") from None
    unit = SHAPES.get(frozenset(row)) if isinstance(row, dict) else None
    if unit is None:
        keys = f"the keys {', '.join(row)}" if isinstance(row, dict) else "no keys"
        raise ValueError(f"has {keys} where it needs name, start, end, value or name, token, value(s)")
    if not isinstance(row["name"], str) or not NAME.fullmatch(row["name"]):
        raise ValueError(f"{row['name']!r} is no name: letters, digits, _ and -, a letter first")
    places = [row[key] for key in ("start", "end", "token") if key in row]
    if any(type(number) is not int or number < 0 for number in places):
        raise ValueError(f"{places} must be whole numbers, counted from 0")
    values = row.get("values", [row.get("value")])
    if not isinstance(values, list) or not values or {type(v) for v in values} - {int, float, type(None)}:
        raise ValueError("its values must be numbers from 0 to 1, or null: not labelled")
    codes = encode([np.nan if v is None else v for v in values])
    start, end = places if unit == "characters" else (places[0], places[0] + len(codes))
    if start >= end:
        raise ValueError(f"the span from {start} to {end} holds nothing")
    return row["name"], unit, start, codes, end - start


def read_spans(path, lengths):
    """A user's file -> {name: (unit, starts, ends, codes)}, sorted, without overlaps. UserError names a line.

    lengths: {"characters": n, "tokens": n} of the split.
    """
    spans_of_name, units = {}, {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                name, unit, start, codes, length = read_line(line)
                if start + length > lengths[unit]:
                    raise ValueError(f"ends at {start + length:,}; the split has {lengths[unit]:,} {unit}")
                first = units.setdefault(name, (unit, number))
                if first[0] != unit:
                    raise ValueError(f"counts {unit}, and line {first[1]} counts {first[0]} for {name}")
            except (ValueError, OverflowError) as e:
                raise UserError(f"{path}, line {number}: {e}") from None
            starts = start + np.arange(len(codes))
            ends = starts + (length if len(codes) == 1 else 1)
            spans_of_name.setdefault(name, []).append((starts, ends, codes, np.full(len(codes), number)))
    return {name: (units[name][0], *without_overlaps(path, name, *map(np.concatenate, zip(*rows))))
            for name, rows in spans_of_name.items()}


def without_overlaps(path, name, starts, ends, codes, lines):
    """Sort spans; each begins where those before it end -> starts, ends, codes. UserError: two disagree."""
    order = np.argsort(starts, kind="stable")
    starts, ends, codes, lines = (row[order] for row in (starts, ends, codes, lines))
    reach = np.concatenate(([0], np.maximum.accumulate(ends)[:-1]))  # how far those before it go
    holder = np.maximum.accumulate(np.where(ends > reach, np.arange(len(ends)), 0))[:-1]  # which of them does
    disagrees = np.flatnonzero((starts[1:] < reach[1:]) & (codes[1:] != codes[holder]))
    if disagrees.size:
        pair = sorted((lines[holder[disagrees[0]]], lines[disagrees[0] + 1]))
        raise UserError(f"{path}, lines {pair[0]} and {pair[1]}: spans of {name} overlap and disagree")
    starts = np.maximum(starts, reach)
    return starts[starts < ends], ends[starts < ends], codes[starts < ends]


class Spans:
    """A user's JSON lines; what they do not name is not labelled, or 0 with --rest=0."""
    size, weak = 1 << 20, False

    def __init__(self, args, dataset):
        files, splits = args.file or [], args.split or []
        if not files or len(files) != len(splits) or len(set(splits)) < len(splits):
            raise UserError("--by=spans needs --file=labels.jsonl --split=val, or several such pairs, "
                            "a file for a split")
        self.rest_code, self.spans, self.bases = 0 if args.rest == "0" else UNKNOWN, {}, {}
        for path, split in zip(files, splits):
            self.bases[split], chars = {}, 0
            for piece in Text(dataset, self.size).pieces(split):
                self.bases[split][piece.start] = chars
                chars += len(piece.text)
            self.spans[split] = read_spans(path, dict(characters=chars, tokens=len(dataset.tokens(split))))
        names_there = list(dict.fromkeys(name for spans in self.spans.values() for name in spans))
        self.names = args.names or names_there
        if missing := [name for name in self.names if name not in names_there]:
            raise UserError(f"{', '.join(files)}: nothing about {missing[0]!r}; there is "
                            f"{', '.join(names_there)}")
        if not names_there:
            raise UserError(f"{', '.join(files)}: holds no label")
        sources = ", ".join(f"{split} from {Path(path).name} ({sha256(path)[:12]})"
                            for path, split in zip(files, splits))
        rest = "not labelled" if self.rest_code else "0"
        self.note = f"{', '.join(self.names)} of {sources}; the rest {rest}"

    def __call__(self, piece):
        labels = {}
        for name in self.names:
            unit, starts, ends, codes = self.spans[piece.split].get(name, ("tokens", *[np.zeros(0, int)] * 3))
            base = piece.start if unit == "tokens" else self.bases[piece.split][piece.start]
            length = piece.stop - piece.start if unit == "tokens" else len(piece.text)
            span_range = slice(np.searchsorted(ends, base, "right"), np.searchsorted(starts, base + length))
            codes_of_spans, is_held = np.full((2, length), UNKNOWN, np.uint8)
            for a, b, code in zip(starts[span_range] - base, ends[span_range] - base, codes[span_range]):
                codes_of_spans[max(a, 0):b] = code
                is_held[max(a, 0):b] = 0
            if unit == "characters":
                codes_of_spans, is_held = to_tokens(codes_of_spans, piece), to_tokens(is_held, piece)
            labels[name] = np.where(is_held == UNKNOWN, self.rest_code, codes_of_spans).astype(np.uint8)
        return labels


LABELLERS = {"weak": Weak, "synthetic": Synthetic, "spans": Spans}
