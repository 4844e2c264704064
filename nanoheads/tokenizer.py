"""
Text <-> token ids, for the encodings that the data scripts write.

byte   one token a byte, 256 of them: any input at all
char   one token a character, out of the vocabulary in meta.json
gpt2   GPT-2's byte pairs, 50,257 tokens, through tiktoken
hf     byte pairs of another model, GPT-2's or SentencePiece's kind, out of the tokenizer.json in meta.json,
       through Hugging Face's tokenizers; no space is put before a text

Text that looks like a special token is plain text, unless encode() is told otherwise.
"""
import json
import re
from functools import lru_cache
from itertools import islice

import numpy as np

from nanoheads.common import from_json

END_OF_TEXT = 50256
# how vocabularies call the token behind a text: of those that one has, the first here
ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
SPACE = "\u2581"  # SentencePiece's
SAFE_CUT = re.compile(r"\S(?=[ \n])")
ENCODINGS = ("byte", "char", "gpt2", "hf")
FORMATS = ("plain", "llm.c")  # of shards
DTYPES = {"uint8": 1 << 8, "uint16": 1 << 16, "uint32": 1 << 32}  # the symbols that each can tell apart


# ---- meta.json ----

def is_whole(value, least):
    """Whether a value is a whole number from `least` on that numpy's int64 holds; True and 3.0 are none."""
    return type(value) is int and least <= value < 2**63


def is_text(value):
    """Whether a value is a str that has bytes: half of a surrogate pair, which JSON may hold, has none."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def is_options(value):
    """Whether a value is what was chosen when a text was prepared; a separator is read of it."""
    separator = value.get("separator") if isinstance(value, dict) else None
    return value is None or isinstance(value, dict) and (separator is None or is_text(separator))


def is_vocabulary(value, meta):
    """Whether a value is what Tokenizer takes for the encoding of this meta.json."""
    if meta["encoding"] == "hf":
        return isinstance(value, str) and value != ""
    if meta["encoding"] == "char":
        return isinstance(value, list) and len(value) == meta["vocab_size"] and all(map(is_text, value))
    return value is None


def is_shards(value):
    """Whether a value is the list of a split's shards, as nanoheads/shards.py has them."""
    return isinstance(value, list) and len(value) > 0 and all(
        isinstance(each, dict) and is_text(each.get("file")) and each["file"] != ""
        and is_whole(each.get("tokens"), 1) and is_text(each.get("sha256")) and each.get("format") in FORMATS
        for each in value)


# what meta.json says of a data folder, and a checkpoint of the one that it was trained on. Key -> (what its
# value must be, whether a value is that, where the keys above it are in order)
META = {
    "name": ("a text", lambda value, meta: is_text(value)),
    "encoding": ("byte, char, gpt2 or hf", lambda value, meta: value in ENCODINGS),
    "vocab_size": ("a whole number above 0", lambda value, meta: is_whole(value, 1)),
    "vocab": ("the list of its vocab_size characters (char), the text of a tokenizer.json (hf), or left out",
              is_vocabulary),
    "dtype": ("uint8, uint16 or uint32, which holds vocab_size tokens", lambda value, meta:
              is_text(value) and meta["vocab_size"] <= DTYPES.get(value, 0)),
    "separator": ("a whole number from 0 to below vocab_size, a token", lambda value, meta:
                  is_whole(value, 0) and value < meta["vocab_size"]),
    "options": ("what was chosen, by name, its separator a text; or left out", lambda value, meta:
                is_options(value)),
    "splits": ("the splits by name, one at least", lambda value, meta: isinstance(value, dict) and value),
    "task": ("the flags of a task by name, or left out", lambda value, meta: value is None or (
        isinstance(value, dict) and is_text(value.get("task")))),
}
# of each split; chars is for its reader alone
META_OF_SPLIT = {
    "tokens": ("a whole number above 0", lambda value: is_whole(value, 1)),
    "bytes": ("a whole number above 0", lambda value: is_whole(value, 1)),
    "chars": ("a whole number, or left out", lambda value: value is None or is_whole(value, 0)),
    "sha256": ("a text", is_text),
    "sizes_sha256": ("a text, or left out", lambda value: value is None or is_text(value)),
    "shards": (f"a list of files, each with its file, tokens, sha256 and format ({' or '.join(FORMATS)}), or "
               "left out", lambda value: value is None or is_shards(value)),
}
OF_FOLDER = {"dtype", "separator", "splits"}  # a checkpoint out of a Hugging Face folder has none of these


def problem_of_meta(meta, of_folder=True):
    """What is wrong with what meta.json holds, as its key, its value and what that must be; None: nothing.

    of_folder: of a data folder; of a checkpoint's copy only what is there must be as it should.
    """
    if not isinstance(meta, dict):
        return f"it holds {shown(meta)}, not keys with values"
    for key, (words, fits) in META.items():
        if (of_folder or key in meta or key not in OF_FOLDER) and not fits(meta.get(key), meta):
            return misfit(key, meta, words)
    for split, row in meta.get("splits", {}).items():
        if not isinstance(row, dict):
            return f"splits.{split}={shown(row)} must be its tokens, bytes and sha256"
        for key, (words, fits) in META_OF_SPLIT.items():
            if not fits(row.get(key)):
                return f"splits.{split}.{misfit(key, row, words)}"
        if of_folder and meta["encoding"] == "byte" and row["bytes"] != row["tokens"]:
            return f"splits.{split}.{misfit('bytes', row, 'as many as tokens, of which each is a byte')}"
        shards = row.get("shards") or []
        if shards and sum(shard["tokens"] for shard in shards) != row["tokens"]:
            return f"splits.{split}.{misfit('tokens', row, 'as many as its shards have together')}"
        if any(shard["format"] == "llm.c" for shard in shards) and meta["dtype"] != "uint16":
            return misfit("dtype", meta, f"uint16, in which the shards of {split} are")


def misfit(key, values, words):
    return f"{key}={shown(values[key])} must be {words}" if key in values else f"{key} is missing: {words}"


def shown(value):
    """A value in a message, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


class Tokenizer:
    """Text <-> token ids. vocab: char: the list of characters; hf: the text of a tokenizer.json."""

    def __init__(self, encoding, vocab=None):
        if encoding not in ENCODINGS:
            raise ValueError(f"encoding must be byte, char, gpt2 or hf, not {encoding!r}")
        if (encoding in ("char", "hf")) != bool(vocab):
            raise ValueError("the char and hf encodings need a vocabulary, the others have none")
        self.encoding, self.vocab = encoding, vocab
        if encoding == "hf":
            return self.open_hf()
        self.vocab = list(vocab) if vocab else None
        self.dtype = np.dtype("u1" if encoding == "byte" else "<u2")
        self.vocab_size = {"byte": 256, "gpt2": 50257}.get(encoding) or len(self.vocab)
        # the token behind a text; None: there is none
        self.end = {"byte": 10, "gpt2": END_OF_TEXT}.get(encoding)
        self.cuts = SAFE_CUT if encoding == "gpt2" else None  # see cuts_of()
        if encoding == "char":
            different = len(set(self.vocab)) == self.vocab_size
            if not different or set(map(len, self.vocab)) != {1} or self.vocab_size > 65536:
                raise ValueError("a character vocabulary is a list of at most 65,536 different single "
                                 "characters")
            self.symbols = np.array([ord(c) for c in self.vocab], "<u4")
            self.ids = np.full(0x110000, -1, np.int32)  # code point -> id, -1: not in the vocabulary
            self.ids[self.symbols] = np.arange(self.vocab_size)
            self.end = int(self.ids[10]) if self.ids[10] >= 0 else None
        self.separator = self.end or 0

    def open_hf(self):
        """The parts of a tokenizer whose tokens are byte pairs; ValueError for others."""
        try:
            from tokenizers import Tokenizer as Pairs
        except ImportError:
            raise ValueError("this vocabulary is read by Hugging Face's tokenizers: pip install tokenizers"
                             ) from None
        about = from_json(self.vocab)
        self.spelled = spelled_by(about) if isinstance(about, dict) else None
        if self.spelled is None:
            raise ValueError("only tokenizers of byte pairs (decoder: ByteLevel or ByteFallback) are known "
                             "here")
        try:
            as_read = nothing_before(about)
            self.pairs = Pairs.from_str(self.vocab if as_read == about else json.dumps(as_read))
        except Exception as e:  # it knows no kind of its own
            raise ValueError(f"tokenizer.json cannot be read: {' '.join(str(e).split())[:100]}") from None
        self.pairs.no_truncation()  # what the last caller of transformers had set is saved with it
        self.pairs.no_padding()
        self.pairs.post_processor = None  # it puts special tokens around a text, and moves where tokens begin
        ids = self.pairs.get_vocab(with_added_tokens=True)
        added = {each["id"] for each in about.get("added_tokens", ())}
        symbols = byte_symbols() if self.spelled == "bytes" else [f"<0x{byte:02X}>" for byte in range(256)]
        symbols = {symbol: byte for byte, symbol in enumerate(symbols)}
        self.vocab_size = max(ids.values()) + 1
        self.pieces = [b""] * self.vocab_size
        for token, i in ids.items():
            if self.spelled == "pieces":
                spelled = bytes([symbols[token]]) if token in symbols else token.replace(SPACE, " ").encode()
                self.pieces[i] = token.encode() if i in added else spelled
            else:
                plain = i in added or not set(token) <= set(symbols)
                self.pieces[i] = token.encode() if plain else bytes(symbols[c] for c in token)
        # without a token of its own, or one for the unknown, a byte would vanish
        covered = about["model"].get("unk_token") and self.spelled == "bytes"
        self.lost = {symbols[symbol] for symbol in (() if covered else set(symbols) - set(ids))}
        self.dtype = np.dtype("<u2" if self.vocab_size <= 65536 else "<u4")
        self.cuts = cuts_of(as_read, self.pieces)
        self.end = next((ids[end] for end in ENDS if end in ids), None)
        self.separator = self.end or 0

    @classmethod
    def from_meta(cls, meta):
        """The tokenizer that wrote a data folder, from its meta.json (a dict), see problem_of_meta().

        ValueError: its vocabulary is damaged, or has another size than vocab_size.
        """
        tokenizer = cls(meta["encoding"], meta.get("vocab"))
        if meta.get("vocab_size", tokenizer.vocab_size) != tokenizer.vocab_size:
            raise ValueError(f"vocab_size={meta['vocab_size']} must be {tokenizer.vocab_size}, "
                             "the size of its vocabulary")
        return tokenizer

    def encode(self, text, special=False):
        """str -> [n] token ids, typed as on disk. ValueError: a character that the vocabulary lacks.

        special: the name of a special token, such as <|endoftext|>, is that token; else it is text.
        """
        if self.encoding == "byte":
            # surrogateescape: bytes of a shell argument that were not UTF-8 come back
            data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
            return np.frombuffer(data, self.dtype)
        if self.encoding == "gpt2":
            parts = [np.empty(0, self.dtype)]
            for number, between in enumerate(text.split(ENDS[0]) if special else [text]):
                parts += [np.array([END_OF_TEXT], self.dtype)] * (number > 0)
                pieces = cut_at_spaces([between])
                while batch := list(islice(pieces, 4)):  # a few at a time: lists of Python ints are large
                    parts += self.encode_batch(batch)
            return np.concatenate(parts)
        if self.encoding == "hf":
            return np.array(self.encode_hf(text, special).ids, self.dtype)
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        ids = self.ids[codes]
        if ids.size and ids.min() < 0:
            at = int(np.argmax(ids < 0))
            raise ValueError(f"{text[at]!r} (U+{codes[at]:04X}) at position {at} is not among "
                             f"the {self.vocab_size:,} symbols of this model's vocabulary")
        return ids.astype(self.dtype)

    def encode_hf(self, text, special=False):
        """encode() as tokenizers gives it, for hf alone: ids, and the offsets of tokens in the text."""
        lost = self.lost and self.lost & set(text.encode("utf-8", "surrogatepass"))
        if self.spelled == "pieces" and SPACE in text:
            raise ValueError(f"the text has {SPACE!r}, which this vocabulary writes for a space")
        if lost:
            raise ValueError(f"the text has the byte 0x{min(lost):02X}, for which this vocabulary has no "
                             "token")
        self.pairs.encode_special_tokens = not special
        return self.pairs.encode(text, add_special_tokens=False)

    def encode_sized(self, text):
        """(ids [n], sizes [m, 3], bytes): encode(), and which tokens stand for other text than they spell.

        sizes, int64: such a token, and how many bytes and characters of the text it stands for beyond those
        that it spells. A normaliser makes such tokens, and so does a vocabulary that lacks the space. bytes:
        of the text that they stand for.
        """
        none = np.empty((0, 3), np.int64)
        if self.encoding != "hf":
            return self.encode(text), none, 0
        found = self.encode_hf(text)
        ids, raw = np.array(found.ids, self.dtype), text.encode()
        if self.decode_bytes(ids) == raw or not len(ids):
            return ids, none, 0
        # what is between two tokens belongs to the first; a character that several share to the last
        begins = np.maximum.accumulate([start for start, _ in found.offsets])
        begins[0] = 0
        first = np.flatnonzero(np.diff(begins, prepend=-1))
        places = np.append(np.append(0, char_sizes(text).cumsum())[begins[first]], len(raw)).tolist()
        sizes, changed = [], 0
        for at, to, start, end in zip(first, np.append(first[1:], len(ids)), places, places[1:]):
            spelled = [self.pieces[i] for i in ids[at:to].tolist()]
            if raw[start:end] != b"".join(spelled):
                meant = [b""] * (len(spelled) - 1) + [raw[start:end]]
                sizes += [(at + i, len(a) - len(b), count_chars(a) - count_chars(b))
                          for i, (a, b) in enumerate(zip(meant, spelled))]
                changed += end - start
        return ids, np.array(sizes, np.int64).reshape(-1, 3), changed

    def encode_batch(self, texts):
        """gpt2 only: [str] -> [ids], each text on its own, two threads."""
        return [np.array(ids, self.dtype) for ids in gpt2().encode_ordinary_batch(texts, num_threads=2)]

    def decode_bytes(self, ids):
        """[n] token ids -> the UTF-8 bytes of their text. ValueError: an id outside the vocabulary."""
        ids = np.asarray(ids, np.int64).reshape(-1)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(f"token ids reach from {ids.min()} to {ids.max()}, "
                             f"the vocabulary has {self.vocab_size:,}")
        if self.encoding == "byte":
            return ids.astype(np.uint8).tobytes()
        if self.encoding == "gpt2":
            return gpt2().decode_bytes(ids.tolist())
        if self.encoding == "hf":
            return b"".join(self.pieces[i] for i in ids.tolist())
        return self.symbols[ids].tobytes().decode("utf-32-le").encode()

    def decode(self, ids):
        """[n] token ids -> str; bytes that are not UTF-8 show as U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


def spelled_by(about):
    """How the tokens of a tokenizer.json (a dict) spell text: "bytes" (GPT-2's way), "pieces"
    (SentencePiece's, with a token for each byte), or None: another.
    """
    decoder = json.dumps(about.get("decoder"))
    return "bytes" if "ByteLevel" in decoder else "pieces" if "ByteFallback" in decoder else None


def nothing_before(about):
    """The same tokenizer.json with no space put before a text, so that its tokens spell the text's bytes and
    no more.
    """
    if isinstance(about, list):
        return [nothing_before(each) for each in about if each.get("type") != "Prepend"]
    if about.get("type") == "Metaspace":
        return {**about, "prepend_scheme": "never", "add_prefix_space": False}
    if about.get("type") == "ByteLevel":
        return {**about, "add_prefix_space": False}
    steps = ("normalizer", "normalizers", "pre_tokenizer", "pretokenizers")
    changed = {step: nothing_before(about[step]) for step in steps if about.get(step)}
    return None if about.get("type") == "Prepend" else {**about, **changed}


# Patterns of Split, no match of which has a space behind another character: those of Llama 3 (and of GPT-4's
# vocabulary), Qwen 2 and 3, gpt-oss. A letter and the newline behind it are in no match together, either.
AT_SPACES = re.compile(r"\S(?= )|[A-Za-z\u4e00-\u9fa5](?=\n)")
WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s"
         r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?")
SPLITS_AT_SPACES = {
    "|".join((WORD, r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*", REST)),
    "|".join((WORD, r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*", REST)),
    "|".join((CASED % ("*", "+"), CASED % ("+", "*"), r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*", REST))}
# steps that look at one character at a time, or at what is combined with it, and leave spaces as they are
ALONE = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Digits", "Punctuation", "ByteLevel")


def cuts_of(about, pieces):
    """Behind which characters a text may be cut so that the tokens of its parts are those of the whole: a
    pattern, or None: behind none that is known to do no harm, so that a long text is encoded whole.

    about: a tokenizer.json, a dict; pieces: how its tokens are spelled. Either its pre-tokenizer is known to
    part a character from the space behind it, or it does not look at spaces, and no token has both, so that
    no merge crosses a cut between them. No other step may look across it.
    """
    model, cuts, respelled = about["model"], None, False
    for step in [*steps_of(about.get("normalizer")), *steps_of(about.get("pre_tokenizer"))]:
        kind, pattern = step["type"], step.get("pattern") or {}
        if kind == "ByteLevel" and step.get("use_regex", True):
            cuts = cuts or SAFE_CUT
        elif kind == "Split" and pattern.get("Regex") in SPLITS_AT_SPACES and step["behavior"] == "Isolated":
            cuts = AT_SPACES
        elif kind == "Metaspace" and step.get("replacement", SPACE) == SPACE:
            respelled = True
        elif kind == "Replace" and pattern.get("String") == " " and step["content"] == SPACE:
            respelled = True
        elif not (kind in ALONE or kind == "Split" and len(pattern.get("String", "")) == 1):
            return None
    across = re.compile(rb"\S[ \n]")
    for token in about.get("added_tokens") or ():  # found in a text before it is split; special ones are not
        flags = token.get("lstrip") or token.get("rstrip") or token.get("single_word")
        if not token.get("special") and (flags or across.search(token["content"].encode())):
            return None
    if cuts:
        return None if respelled else cuts
    at_the_end = model.get("end_of_word_suffix") or model.get("continuing_subword_prefix")
    fused = model.get("fuse_unk") and not model.get("byte_fallback")
    if model.get("type", "BPE") != "BPE" or at_the_end or fused or any(map(across.search, pieces)):
        return None
    return SAFE_CUT


def steps_of(part):
    """The steps of a normaliser or pre-tokenizer of a tokenizer.json, those of a sequence one by one."""
    if not part:
        return []
    inside = part.get("normalizers") or part.get("pretokenizers")
    return [step for each in inside for step in steps_of(each)] if part["type"] == "Sequence" else [part]


def cut_at_spaces(texts, size=1 << 20, cuts=SAFE_CUT):
    """Cut a stream of str into pieces of about `size` characters whose tokens join to the whole's.

    cuts: see cuts_of(). By default it is GPT-2's, whose pattern never puts a non-space and the space or
    newline after it into one pre-token, and looks ahead only out of a run of spaces: between those two
    characters, and nowhere later in the run, a cut changes nothing.
    """
    tail = ""
    for text in texts:
        tail, start = tail + text, 0
        while cut := cuts.search(tail, start + size):
            yield tail[start:cut.end()]
            start = cut.end()
        tail = tail[start:]
    if tail:
        yield tail


def byte_symbols():
    """The printable character that stands for each byte in a byte-pair vocabulary, GPT-2's convention."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def token_sizes(tokenizer):
    """Bytes of each token of a vocabulary, [V]."""
    return np.array([len(tokenizer.decode_bytes([i])) for i in range(tokenizer.vocab_size)])


def count_chars(data):
    """Characters in UTF-8 bytes: all bytes but the continuations 10xxxxxx."""
    return int(np.count_nonzero((np.frombuffer(data, np.uint8) & 0xC0) != 0x80))


def char_sizes(text):
    """Bytes of each character of a text decoded with surrogateescape, [n]: what is no UTF-8 has one."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    size = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    size[(points >= 0xDC80) & (points <= 0xDCFF)] = 1
    return size


@lru_cache(maxsize=1)
def gpt2():
    """tiktoken's GPT-2 encoding, built from local files, so that nothing here needs the network twice."""
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from nanoheads.corpus import GPT2_ENCODER, GPT2_MERGES, keep
    merges, encoder = keep(GPT2_MERGES), keep(GPT2_ENCODER)
    ranks = data_gym_to_mergeable_bpe_ranks(str(merges), str(encoder),
                                            GPT2_MERGES.sha256, GPT2_ENCODER.sha256)
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    return tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": END_OF_TEXT}, explicit_n_vocab=50257)
