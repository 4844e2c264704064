"""Text <-> ids: what goes in comes out, in the types on disk, and a character that is not there is named."""
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from helpers import ROOT, write_dataset
from helpers import byte_pairs, meta_of
from nanoheads import corpus, tokenizer
from nanoheads.common import UserError
from nanoheads.dataset import Dataset
from nanoheads.tokenizer import (AT_SPACES, SAFE_CUT, SPLITS_AT_SPACES, Tokenizer, cut_at_spaces,
                                 problem_of_meta)

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
    monkeypatch.setattr(corpus, "HOME", tmp_path)
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
    assert [Tokenizer("char", vocab).end for vocab in ("ab", "\nab")] == [None, 0]  # what ends a text


def test_meta_json_restores_the_tokenizer():
    meta = json.loads(json.dumps({"encoding": "char", "vocab": ["\n", "é", "😀"]}))
    assert Tokenizer.from_meta(meta).decode([2, 1, 0]) == "😀é\n"
    assert Tokenizer.from_meta({"encoding": "byte"}).encode("é").tolist() == [0xC3, 0xA9]


@pytest.mark.parametrize("meta, words", [
    (meta_of("gpt2"), None), (meta_of("byte"), None), (meta_of("char"), None),
    (dict(meta_of("gpt2"), dtype="uint8"), "dtype='uint8' must be uint8, uint16 or uint32, which holds"),
    (dict(meta_of("gpt2"), dtype="uint32", vocab_size=70_000), None),
    (dict(meta_of("gpt2"), vocab_size=70_000), "dtype='uint16' must be"),
    (dict(meta_of("gpt2"), vocab="{}"), "vocab='{}' must be the list of its vocab_size characters (char)"),
    (dict(meta_of("byte"), encoding="hf"), "vocab is missing: the list of"),
    (dict(meta_of("byte"), encoding="hf", vocab=""), "vocab='' must be"),
    (dict(meta_of("byte"), encoding="hf", vocab="{}"), None),
    ([1], "it holds [1], not keys with values")])
def test_what_meta_json_must_hold_is_one_table(meta, words):
    said = problem_of_meta(meta)
    assert said is None if words is None else said.startswith(words)


def test_a_checkpoint_of_a_hugging_face_folder_says_less_than_a_data_folder():
    less = dict(name="x", encoding="byte", vocab_size=256)
    assert problem_of_meta(less, of_folder=False) is None
    assert problem_of_meta(less).startswith("dtype is missing")
    for key, value in dict(separator=300, dtype="float32", splits=3).items():  # what is there is checked
        assert problem_of_meta({**less, key: value}, of_folder=False).startswith(f"{key}=")


@pytest.mark.parametrize("vocab", ["x", "[]", "3", "{}", "[" * 100_000])
def test_a_damaged_tokenizer_json_is_a_value_error(vocab):
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError):
        Tokenizer("hf", vocab)


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


def test_the_name_of_a_special_token_is_that_token_on_request(gpt2):
    """As in nanoGPT, where <|endoftext|> is the token 50256 in a prompt."""
    assert gpt2.encode("<|endoftext|>", special=True).tolist() == [50256]
    whole = gpt2.encode("a <|endoftext|><|endoftext|> b", special=True).tolist()
    assert whole == [*gpt2.encode("a ").tolist(), 50256, 50256, *gpt2.encode(" b").tolist()]
    theirs = Tokenizer("hf", byte_pairs("a text", special=["<pad>", "<|im_end|>", "<|endoftext|>"]))
    for name, i in (("<pad>", 0), ("<|im_end|>", 1), ("<|endoftext|>", 2)):
        assert theirs.encode(f"a{name}", special=True).tolist() == [*theirs.encode("a").tolist(), i]
        assert i not in theirs.encode(f"a{name}").tolist() and theirs.decode(theirs.encode(name)) == name
    assert theirs.end == theirs.separator == 2
    assert Tokenizer("hf", byte_pairs("a text", special=["<pad>"])).end is None
    assert Tokenizer("byte").encode("<|endoftext|>", special=True).tobytes() == b"<|endoftext|>"


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


PARTS = ["it's", " ", "  ", "\n", "\n\n", "\t", "don't", "'", "日本", "\u3000", "\xa0", "\x1c", "12", "34567",
         "...", ".", "é", "e\u0301", " \n", "。", "/", "\r\n", "a", "b.", "I'LL ", " 's", "ab ab"]


def kinds_of_pairs():
    """{name: (pre-tokenizers, normaliser, where long texts may be cut)} of tokenizers."""
    pre = pytest.importorskip("tokenizers", reason="tokenizers is optional").pre_tokenizers
    gpt2 = pre.ByteLevel(False, use_regex=True)
    return {"gpt2": ([gpt2], None, SAFE_CUT), "digits": ([pre.Digits(True), gpt2], "NFC", SAFE_CUT),
            **{f"known {i}": ([each], "NFC", AT_SPACES) for i, each in enumerate(sorted(SPLITS_AT_SPACES))},
            "two words in a match": ([r"\S+ \S+|\s"], None, None),
            "merges across spaces": ([], None, None), "strips its ends": ([gpt2], "Strip", None)}


@pytest.mark.parametrize("name", ["gpt2", "digits", "known 0", "known 1", "known 2", "two words in a match",
                                  "merges across spaces", "strips its ends"])
def test_a_long_text_has_the_tokens_of_the_whole(name, tmp_path, monkeypatch):
    """Whatever it splits a text by: the text is cut where that is known to change nothing, or not at all."""
    steps, normalizer, cuts = kinds_of_pairs()[name]
    text = "".join(random.Random(0).choices(PARTS, k=3000))
    vocab = byte_pairs(text, *steps, normalizer=normalizer)
    tok = Tokenizer("hf", vocab)
    assert tok.cuts is cuts
    monkeypatch.setattr(cut_at_spaces, "__defaults__", (20, SAFE_CUT))
    data = Dataset(write_dataset(tmp_path / "x", dict(train=text, val=text, test=text), "hf", vocab))
    assert data.tokens("train").tolist() == tok.encode(text).tolist()
    if cuts:
        assert len(list(cut_at_spaces([text], cuts=cuts))) > 50
    else:  # negative control
        parts = [tok.encode(part).tolist() for part in cut_at_spaces([text])]
        assert sum(parts, []) != tok.encode(text).tolist()


def test_a_text_that_is_too_long_to_encode_whole_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nanoheads.dataset.memory_of_machine", lambda: 1 << 30)
    monkeypatch.setattr("nanoheads.dataset.WHOLE", 1 << 30)
    split = {split: "aa bb\n" for split in ("train", "val", "test")}
    with pytest.raises(UserError, match="1.0 GiB of memory, not 6.0 GiB; take a smaller source, or --sep"):
        write_dataset(tmp_path / "x", split, "hf", byte_pairs("aa bb\n" * 9))
    assert "it is encoded whole: about 6.0 GiB of memory" in capsys.readouterr().out


def test_tokens_stand_for_the_texts_own_bytes_whatever_they_spell():
    """Decomposed accents under NFC: what the tokens spell is shorter than what they stand for."""
    text = "cafe\u0301 au lait, 日本 e\u0301\u0301"
    tok = Tokenizer("hf", byte_pairs(text, r"\S+|\s", normalizer="NFC"))
    ids, sizes, changed = tok.encode_sized(text)
    spelled = [tok.decode_bytes([i]) for i in ids]
    assert b"".join(spelled) == "caf\xe9 au lait, 日本 \xe9\u0301".encode() != text.encode()
    stands_for = np.array([len(piece) for piece in spelled])
    stands_for[sizes[:, 0]] += sizes[:, 1]
    assert stands_for.sum() == len(text.encode()) and stands_for.min() >= 0
    assert sizes[:, 2].sum() == 2  # two accents are one character with their letters
    begins = {0, 6, 7, 9, 10, 15, 16, 22, 23, 28}  # of words and spaces, in bytes
    assert begins <= {0, *stands_for.cumsum().tolist()}
    assert changed == 6 + 5  # the two words with accents, each one token
    plain, none, nothing = tok.encode_sized("cafe au lait")
    assert tok.decode(plain) == "cafe au lait" and not len(none) and not nothing


def test_no_space_is_put_before_a_text():
    about = json.loads(byte_pairs("a text"))
    about["pre_tokenizer"] = dict(type="ByteLevel", add_prefix_space=True, trim_offsets=True, use_regex=True)
    tok = Tokenizer("hf", json.dumps(about))
    assert tok.decode(tok.encode("text")) == "text"


def test_cutting_after_the_space_would_change_tokens(gpt2):
    whole = tokenizer.gpt2().encode_ordinary  # negative control: not every cut is safe
    assert whole("a\n\n") + whole("b") != whole("a\n\nb")


@pytest.mark.slow
def test_real_text_in_pieces_equals_the_whole(gpt2, monkeypatch):
    path = corpora() / "tinyshakespeare/input.txt"
    if not path.is_file():
        pytest.skip("no tinyshakespeare/input.txt in the folder of real corpora")
    text = path.read_text()[:300_000]
    monkeypatch.setattr(tokenizer.cut_at_spaces, "__defaults__", (1000, tokenizer.SAFE_CUT))
    assert gpt2.encode(text).tolist() == tokenizer.gpt2().encode_ordinary(text)


@pytest.mark.slow
def test_millions_of_characters_encode():
    text = "the quick brown fox é\n" * 250_000  # 5.5 million
    tok = Tokenizer("char", sorted(set(text)))
    ids = tok.encode(text)
    assert len(ids) == len(text) and tok.decode(ids[-22:]) == text[-22:]
