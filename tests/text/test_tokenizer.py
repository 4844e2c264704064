"""Text <-> ids: what goes in comes out, in the types on disk, and a character that is not there is named."""
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT
from nanoheads.text import sources, tokenizer
from nanoheads.text.tokenizer import Tokenizer, cut_at_spaces

REAL = os.environ.get("NANOHEADS_DATA") or ROOT / "../shared/data"
TEXTS = ["", "a", "To be, or not to be\n", "naïve — 日本語 😀\r\n\x00\t",
         "  \n\n  x\n\n\n", "<|endoftext|> is text here"]


def corpora():
    """The folder of real corpora: $NANOHEADS_DATA, else a sibling folder; else the test is skipped."""
    folder = Path(REAL).resolve()
    if not folder.is_dir():
        pytest.skip("no real corpora: set NANOHEADS_DATA to their folder")
    return folder


@pytest.fixture
def gpt2(monkeypatch, tmp_path):
    """The GPT-2 tokenizer, from files that are here already; data/ is left alone."""
    folder = ROOT / "data" if (ROOT / "data/gpt2_bpe/vocab.bpe").is_file() else corpora()
    if not (folder / "gpt2_bpe").is_dir():
        pytest.skip("no GPT-2 files: put gpt2_bpe/ into the folder NANOHEADS_DATA")
    monkeypatch.setenv("NANOHEADS_DATA", str(folder))
    monkeypatch.setattr(sources, "HOME", tmp_path)
    return Tokenizer("gpt2")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("encoding", ["byte", "char", "gpt2"])
def test_text_comes_back_unchanged(encoding, text, request):
    tok = (request.getfixturevalue("gpt2") if encoding == "gpt2"
           else Tokenizer(encoding, sorted(set("".join(TEXTS))) if encoding == "char" else None))
    ids = tok.encode(text)
    assert ids.dtype == (np.uint8 if encoding == "byte" else np.uint16)
    assert tok.decode(ids) == text and tok.decode_bytes(ids) == text.encode()
    assert tok.decode(ids.tolist()) == text  # a list will do
    assert encoding == "gpt2" or len(ids) == len(text.encode() if encoding == "byte" else text)


def test_vocabulary_sizes_and_separators():
    assert (Tokenizer("byte").vocab_size, Tokenizer("byte").separator) == (256, 10)
    assert (Tokenizer("gpt2").vocab_size, Tokenizer("gpt2").separator) == (50257, 50256)
    assert (Tokenizer("char", " \nab").vocab_size, Tokenizer("char", " \nab").separator) == (4, 1)
    assert Tokenizer("char", "ab").separator == 0  # no newline: id 0


def test_meta_json_restores_the_tokenizer():
    meta = json.loads(json.dumps({"encoding": "char", "vocab": ["\n", "é", "😀"]}))
    assert Tokenizer.from_meta(meta).decode([2, 1, 0]) == "😀é\n"
    assert Tokenizer.from_meta({"encoding": "byte"}).encode("é").tolist() == [0xC3, 0xA9]


def test_unknown_character_is_named_with_its_position():
    vocab = [chr(c) for c in range(32, 97)]
    with pytest.raises(ValueError) as error:
        Tokenizer("char", vocab).encode("ABCéD")
    assert str(error.value) == ("'é' (U+00E9) at position 3 is not among the 65 symbols "
                                "of this model's vocabulary")
    with pytest.raises(ValueError, match="at position 0"):
        Tokenizer("char", vocab).encode("\ud800")  # a lone surrogate is a character too


def test_ids_outside_the_vocabulary_are_refused(gpt2):
    for tok in (Tokenizer("byte"), Tokenizer("char", "ab"), gpt2):
        for bad in (-1, tok.vocab_size):
            with pytest.raises(ValueError, match="vocabulary has"):
                tok.decode([0, bad])


@pytest.mark.parametrize("arguments",
                         [("bpe",), ("char",), ("char", []),
                          ("byte", "ab"), ("char", "aa"), ("char", ["ab"])])
def test_bad_tokenizers_are_refused(arguments):
    with pytest.raises(ValueError):
        Tokenizer(*arguments)


def test_broken_utf8_decodes_with_replacement_and_keeps_its_bytes():
    tok = Tokenizer("byte")
    assert tok.decode([0xC3, 65]) == "\ufffdA" and tok.decode_bytes([0xC3, 65]) == b"\xc3A"
    assert tok.encode(os.fsdecode(b"\xff a")).tolist() == [0xFF, 32, 97]  # a shell argument that is not UTF-8


def test_end_of_text_is_a_token_only_when_it_is_an_id(gpt2):
    assert 50256 not in gpt2.encode("<|endoftext|>").tolist()
    assert gpt2.decode([50256]) == "<|endoftext|>"


def test_cutting_at_spaces_loses_nothing_and_changes_no_token(gpt2):
    rng = random.Random(0)
    parts = ["it's", " ", "  ", "\n", "\n\n", "\t", "don't",
             "'", "日本", "\u3000", "\xa0", "\x1c", "12", "...", "é", " \n"]
    whole = tokenizer.gpt2().encode_ordinary
    for size in (1, 3, 10, 50):
        text = "".join(rng.choices(parts, k=3000))
        stream = [text[i:i + 37] for i in range(0, len(text), 37)]
        pieces = list(cut_at_spaces(stream, size))
        assert "".join(pieces) == text and len(pieces) > 10
        assert [i for piece in pieces for i in whole(piece)] == whole(text)


def test_cutting_after_the_space_would_change_tokens(gpt2):
    whole = tokenizer.gpt2().encode_ordinary  # negative control: not every cut is safe
    assert whole("a\n\n") + whole("b") != whole("a\n\nb")


def test_real_text_in_pieces_equals_the_whole(gpt2, monkeypatch):
    path = corpora() / "tinyshakespeare/input.txt"
    if not path.is_file():
        pytest.skip("no tinyshakespeare/input.txt in the folder of real corpora")
    text = path.read_text()[:300_000]
    monkeypatch.setattr(tokenizer.cut_at_spaces, "__defaults__", (1000,))
    assert gpt2.encode(text).tolist() == tokenizer.gpt2().encode_ordinary(text)


def test_millions_of_characters_encode():
    text = "the quick brown fox é\n" * 250_000  # 5.5 million
    tok = Tokenizer("char", sorted(set(text)))
    ids = tok.encode(text)
    assert len(ids) == len(text) and tok.decode(ids[-22:]) == text[-22:]
