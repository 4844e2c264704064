"""Text and token ids: what goes in comes out, and each token stands for bytes of the text itself."""
import json
import os

import numpy as np
import pytest
from helpers import byte_pairs
from hypothesis import given, settings, strategies as st

from nanoheads.tokenizer import Tokenizer, count_chars, cut_at_spaces

PARTS = ["it's", " ", "  ", "\n", "\n\n", "\t", "don't", "'", "日本", "\u3000", "\xa0", "\x1c", "12", "34567",
         "...", ".", "é", "e\u0301", " \n", "😀", "/", "\r\n", "a", "b.", "I'LL ", " 's", "<|endoftext|>"]
TEXT = st.one_of(st.text(), st.lists(st.sampled_from(PARTS), max_size=60).map("".join))


@pytest.fixture
def gpt2(gpt2_files):
    return Tokenizer("gpt2")


def pairs(normalizer=None, **more):
    """The tokenizer of another model, whose tokens may cross spaces."""
    return Tokenizer("hf", byte_pairs("it's a naïve text, 日本 12.\n" * 9, normalizer=normalizer, **more))


@pytest.mark.parametrize("encoding", ["byte", "char", "gpt2", "hf"])
@settings(max_examples=30)
@given(TEXT)
def test_text_comes_back(encoding, request, text):
    tok = (request.getfixturevalue("gpt2") if encoding == "gpt2" else pairs() if encoding == "hf" else
           Tokenizer(encoding, sorted({*text, "a"}) if encoding == "char" else None))
    ids = tok.encode(text)
    assert ids.dtype == tok.dtype and tok.decode_bytes(ids) == text.encode() and tok.decode(ids) == text
    assert tok.encode_sized(text)[1].size == 0  # no token stands for anything but its spelling
    assert b"".join(tok.decode_bytes([i]) for i in ids) == text.encode()


@given(st.binary())
def test_any_bytes_come_back(data):
    tok = Tokenizer("byte")
    assert tok.encode(data).tobytes() == tok.decode_bytes(tok.encode(data)) == data
    assert tok.encode(os.fsdecode(data)).tobytes() == data  # as an argument of a shell
    assert count_chars(data) == sum(byte >> 6 != 2 for byte in data)


@settings(max_examples=40)
@given(st.lists(st.sampled_from(PARTS), min_size=50, max_size=400).map("".join), st.integers(1, 60))
def test_pieces_of_a_long_text_have_the_tokens_of_the_whole(gpt2, text, size):
    pieces = list(cut_at_spaces(text, size))
    assert "".join(pieces) == text
    assert np.concatenate([gpt2.encode(piece) for piece in pieces]).tolist() == gpt2.encode(text).tolist()


def test_gpt2s_tokens_are_the_published_ones(gpt2):
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.decode([50256]) == "<|endoftext|>" and 50256 not in gpt2.encode("<|endoftext|>")
    assert gpt2.encode("Hello<|endoftext|> world", special=True).tolist() == [15496, 50256, 995]


@settings(max_examples=40)
@given(st.lists(st.sampled_from([*PARTS, "e\u0301\u0301", "\ufb01", "2\u00bd"]), min_size=1, max_size=40
                ).map("".join))
def test_tokens_stand_for_the_bytes_of_a_text_that_they_respell(text):
    """Under NFKC an "e" and an accent are one character, a ligature is two: tokens spell what nobody wrote.
    """
    tok = pairs("NFKC")
    ids, sizes, changed = tok.encode_sized(text)
    size, chars = np.array([(len(piece), count_chars(piece))
                            for piece in (tok.decode_bytes([i]) for i in ids)]).T
    np.add.at(size, sizes[:, 0], sizes[:, 1])
    np.add.at(chars, sizes[:, 0], sizes[:, 2])
    assert size.min() >= 0 and size.sum() == len(text.encode()) and chars.sum() == len(text)
    assert (changed > 0) == (tok.decode(ids) != text)


def test_special_tokens_are_text_unless_they_are_asked_for():
    tok = pairs(special=["<pad>", "<|im_end|>", "<|endoftext|>"])
    assert tok.encode("it's<|im_end|>", special=True).tolist() == [*tok.encode("it's").tolist(), 1]
    assert 1 not in tok.encode("it's<|im_end|>") and tok.end == tok.separator == 2
    assert pairs(special=["<pad>"]).end is Tokenizer("char", "ab").end is None  # nothing ends a text


def test_no_space_is_put_before_a_text():
    about = json.loads(byte_pairs("a text"))
    about["pre_tokenizer"] = dict(type="ByteLevel", add_prefix_space=True, trim_offsets=True, use_regex=True)
    tok = Tokenizer("hf", json.dumps(about))
    assert tok.decode(tok.encode("text")) == "text"


@pytest.mark.parametrize("action, words", [
    (lambda: Tokenizer("char", "abc").encode("abX"), "'X' (U+0058) at position 2 is not among the 3 symbols"),
    (lambda: Tokenizer("byte").decode([-1, 256]), "reach from -1 to 256, the vocabulary has 256"),
    (lambda: Tokenizer("utf8"), "encoding must be byte, char, gpt2 or hf"),
    (lambda: Tokenizer("char"), "need a vocabulary"),
    (lambda: Tokenizer("char", ["ab", "c"]), "single characters"),
    (lambda: Tokenizer("char", "aa"), "different"),
    (lambda: Tokenizer("hf", "{}"), "only tokenizers of byte pairs"),
    (lambda: Tokenizer("hf", "no json"), "Expecting value"),
    (lambda: Tokenizer.from_meta(dict(encoding="byte", vocab_size=255)), "vocab_size=255 must be 256")])
def test_what_is_no_text_or_vocabulary_is_named(action, words):
    with pytest.raises(ValueError) as e:
        action()
    assert words in str(e.value) and "\n" not in str(e.value)
