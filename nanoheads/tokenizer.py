"""
Turns text into token ids and back, for each encoding that the data scripts write.

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

END_OF_TEXT = 50256
# how vocabularies call the token behind a text: of those that one has, the first here
ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
SPACE = "\u2581"  # SentencePiece's
SAFE_CUT = re.compile(r"\S(?=[ \n])")
ENCODINGS = ("byte", "char", "gpt2", "hf")


class Tokenizer:
    """Text <-> token ids. vocab: char: the list of characters; hf: the text of a tokenizer.json.

    published: hf: the model was trained by others, and its prompts begin as its tokenizer.json says.
    """

    def __init__(self, encoding, vocab=None, published=False):
        if encoding not in ENCODINGS:
            raise ValueError(f"encoding must be byte, char, gpt2 or hf, not {encoding!r}")
        if (encoding in ("char", "hf")) != bool(vocab):
            raise ValueError("the char and hf encodings need a vocabulary, the others have none")
        self.encoding, self.vocab, self.whole = encoding, vocab, None
        if encoding == "hf":
            return self.open_hf(published)
        self.vocab = list(vocab) if vocab else None
        self.dtype = np.dtype("u1" if encoding == "byte" else "<u2")
        self.vocab_size = {"byte": 256, "gpt2": 50257}.get(encoding) or len(self.vocab)
        # the token behind a text; None: there is none
        self.end = {"byte": 10, "gpt2": END_OF_TEXT}.get(encoding)
        if encoding == "char":
            all_different = len(set(self.vocab)) == self.vocab_size
            if not all_different or set(map(len, self.vocab)) != {1} or self.vocab_size > 65536:
                raise ValueError("a character vocabulary is a list of at most 65,536 different single "
                                 "characters")
            self.symbols = np.array([ord(c) for c in self.vocab], "<u4")
            self.ids = np.full(0x110000, -1, np.int32)  # code point -> id, -1: not in the vocabulary
            self.ids[self.symbols] = np.arange(self.vocab_size)
            self.end = int(self.ids[10]) if self.ids[10] >= 0 else None
        self.first = self.separator = self.end or 0

    def open_hf(self, published):
        """The parts of a tokenizer whose tokens are byte pairs; ValueError for others."""
        from tokenizers import Tokenizer as Pairs  # only here: most runs read no other model's vocabulary
        settings = json.loads(self.vocab)
        self.spelling = spelling(settings) if isinstance(settings, dict) else None
        if self.spelling is None:
            raise ValueError("only tokenizers of byte pairs (decoder: ByteLevel or ByteFallback) are known "
                             "here")
        try:
            self.pairs = Pairs.from_str(json.dumps(of_text_alone(settings)))
            if published:
                self.whole = Pairs.from_str(json.dumps({**settings, "truncation": None, "padding": None}))
        except Exception as e:  # it knows no kind of its own
            raise ValueError(f"tokenizer.json cannot be read: {' '.join(str(e).split())[:100]}") from None
        ids = self.pairs.get_vocab(with_added_tokens=True)
        added_ids = {token["id"] for token in settings.get("added_tokens", ())}
        symbols = byte_symbols() if self.spelling == "bytes" else [f"<0x{byte:02X}>" for byte in range(256)]
        byte_of = {symbol: byte for byte, symbol in enumerate(symbols)}
        self.vocab_size = max(ids.values()) + 1
        self.pieces = [b""] * self.vocab_size  # the bytes that each token spells
        for token, i in ids.items():
            if i in added_ids:
                self.pieces[i] = token.encode()
            elif self.spelling == "pieces":
                is_byte = token in byte_of
                self.pieces[i] = bytes([byte_of[token]]) if is_byte else token.replace(SPACE, " ").encode()
            else:
                in_symbols = set(token) <= byte_of.keys()
                self.pieces[i] = bytes(byte_of[symbol] for symbol in token) if in_symbols else token.encode()
        # without a token of its own, or one for the unknown, a byte would vanish
        has_unknown = self.spelling == "bytes" and settings["model"].get("unk_token")
        missing_symbols = set() if has_unknown else byte_of.keys() - ids.keys()
        self.missing_bytes = {byte_of[symbol] for symbol in missing_symbols}
        self.dtype = np.dtype("<u2" if self.vocab_size <= 65536 else "<u4")
        self.end = next((ids[end] for end in ENDS if end in ids), None)
        self.separator = self.end or 0
        self.first = (self.encode_prompt("") or [self.separator])[0]  # what stands before a text

    @classmethod
    def from_meta(cls, meta):
        """The tokenizer that wrote a data folder, from its meta.json (a dict).

        ValueError: its vocabulary is damaged, or has another size than vocab_size.
        """
        tokenizer = cls(meta["encoding"], meta.get("vocab"), meta.get("published", False))
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
                pieces = cut_at_spaces(between)
                while batch := list(islice(pieces, 4)):  # a few at a time: lists of Python ints are large
                    parts += self.encode_batch(batch)
            return np.concatenate(parts)
        if self.encoding == "hf":
            return np.array(self.encode_hf(text, special).ids, self.dtype)
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        ids = self.ids[codes]
        if ids.size and ids.min() < 0:
            place = int(np.argmax(ids < 0))
            raise ValueError(f"{text[place]!r} (U+{codes[place]:04X}) at position {place} is not among "
                             f"the {self.vocab_size:,} symbols of this model's vocabulary")
        return ids.astype(self.dtype)

    def encode_prompt(self, text, special=False):
        """encode() of a prompt, a list: of a published model with the tokens that are put before a text."""
        if self.whole is None:
            return self.encode(text, special).tolist()
        self.whole.encode_special_tokens = not special
        return self.whole.encode(text).ids

    def encode_hf(self, text, special=False):
        """encode() as tokenizers gives it, for hf alone: ids, and the offsets of tokens in the text."""
        missing = self.missing_bytes and self.missing_bytes & set(text.encode("utf-8", "surrogatepass"))
        if self.spelling == "pieces" and SPACE in text:
            raise ValueError(f"the text has {SPACE!r}, which this vocabulary writes for a space")
        if missing:
            raise ValueError(f"the text has the byte 0x{min(missing):02X}, for which this vocabulary has no "
                             "token")
        self.pairs.encode_special_tokens = not special
        return self.pairs.encode(text, add_special_tokens=False)

    def meaning(self):
        """hf: what decides on the ids of a text, as values that can be compared."""
        settings = json.loads(self.pairs.to_str())
        del settings["decoder"]
        return self.spelling, settings

    def encode_sized(self, text):
        """(ids [n], sizes [m, 3], bytes): encode(), and which tokens stand for other text than they spell.

        sizes, int64: such a token, and how many bytes and characters of the text it stands for beyond those
        that it spells. A normaliser makes such tokens, and so does a vocabulary that lacks the space. bytes:
        of the text that they stand for.
        """
        none = np.empty((0, 3), np.int64)
        if self.encoding != "hf":
            return self.encode(text), none, 0
        encoded = self.encode_hf(text)
        ids, raw = np.array(encoded.ids, self.dtype), text.encode()
        if self.decode_bytes(ids) == raw or not len(ids):
            return ids, none, 0
        # what is between two tokens belongs to the first; a character that several share to the last
        begins = np.maximum.accumulate([start for start, _ in encoded.offsets])
        begins[0] = 0
        first = np.flatnonzero(np.diff(begins, prepend=-1))
        last = np.append(first[1:], len(ids))
        places = np.append(np.append(0, char_sizes(text).cumsum())[begins[first]], len(raw)).tolist()
        sizes, changed_bytes = [], 0
        for i_first, i_last, start, end in zip(first, last, places, places[1:]):  # tokens, and bytes of text
            spellings = [self.pieces[i] for i in ids[i_first:i_last].tolist()]
            if raw[start:end] != b"".join(spellings):
                texts = [b""] * (len(spellings) - 1) + [raw[start:end]]
                sizes += [(i_first + i, len(a) - len(b), count_chars(a) - count_chars(b))
                          for i, (a, b) in enumerate(zip(texts, spellings))]
                changed_bytes += end - start
        return ids, np.array(sizes, np.int64).reshape(-1, 3), changed_bytes

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


def spelling(settings):
    """How the tokens of a tokenizer.json (a dict) spell text: "bytes" (GPT-2's way), "pieces"
    (SentencePiece's, with a token for each byte), or None: another.
    """
    decoder = json.dumps(settings.get("decoder"))
    return "bytes" if "ByteLevel" in decoder else "pieces" if "ByteFallback" in decoder else None


def of_text_alone(settings):
    """The same tokenizer.json (a dict) with nothing put before a text or around it, and nothing cut off: its
    tokens spell the text's bytes and no more.
    """
    return {**without_space_before(settings), "truncation": None, "padding": None, "post_processor": None}


def without_space_before(settings):
    """The same tokenizer.json, or a part of it, with no space put before a text nor taken off again."""
    if isinstance(settings, list):
        return [without_space_before(item) for item in settings if not is_of_space_before(item)]
    if settings.get("type") == "Metaspace":
        return {**settings, "prepend_scheme": "never", "add_prefix_space": False}
    if settings.get("type") == "ByteLevel":
        return {**settings, "add_prefix_space": False}
    steps = ("normalizer", "normalizers", "pre_tokenizer", "pretokenizers", "decoder", "decoders")
    changed_steps = {step: without_space_before(settings[step]) for step in steps if settings.get(step)}
    return None if is_of_space_before(settings) else {**settings, **changed_steps}


def is_of_space_before(step):
    """Whether a step puts a space before a text, or takes it off when tokens are spelled."""
    return step.get("type") == "Prepend" or step.get("type") == "Strip" and step.get("content") == " "


def same_vocabulary(one, other):
    """Whether token ids mean the same in two vocabularies, each (encoding, vocab) as Tokenizer takes them.

    Two files of a tokenizer may say the same in another order or layout.
    """
    if one == other or not one[0] == other[0] == "hf":
        return one == other
    try:
        return Tokenizer(*one).meaning() == Tokenizer(*other).meaning()
    except ValueError:  # one of them is damaged
        return False


def cut_at_spaces(text, size=1 << 20):
    """Cut a str into pieces of about `size` characters whose GPT-2 tokens join to those of the whole.

    GPT-2's pattern never puts a non-space and the space or newline after it into one pre-token, and looks
    ahead only out of a run of spaces: between those two characters, and nowhere later in the run, a cut
    changes nothing.
    """
    start = 0
    while cut := SAFE_CUT.search(text, start + size):
        yield text[start:cut.end()]
        start = cut.end()
    if start < len(text):
        yield text[start:]


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
    from nanoheads.corpus import GPT2_ENCODER, GPT2_MERGES, gpt2_file  # only here: most runs need no files
    merges, encoder = gpt2_file(GPT2_MERGES), gpt2_file(GPT2_ENCODER)
    ranks = data_gym_to_mergeable_bpe_ranks(str(merges), str(encoder),
                                            GPT2_MERGES.sha256, GPT2_ENCODER.sha256)
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    return tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": END_OF_TEXT}, explicit_n_vocab=50257)
