"""A prepared text: what is read of its folder, and what is said of one that is not whole."""
import importlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import (ANYTHING, EDITS, ROOT, byte_pairs, damaged, in_llm_c, put_meta, write_dataset,
                     write_shards)
from hypothesis import given, settings, strategies as st

from nanoheads.common import UserError
from nanoheads.dataset import Dataset, missing_error


@pytest.fixture
def copy(bytes_data, tmp_path):
    """A copy of the byte dataset as it was written: 20,000, 2,000 and 1,000 tokens."""
    return Path(shutil.copytree(bytes_data, tmp_path / "copy", ignore=shutil.ignore_patterns("labels")))


def line(action):
    with pytest.raises(UserError) as e:
        action()
    assert "\n" not in str(e.value)
    return str(e.value)


def read(folder):
    data = Dataset(folder)
    return [data.tokens(split) for split in data.splits]


def test_a_split_is_what_was_written(copy):
    data = Dataset(copy)
    assert data.tokens("val").tobytes() == (copy / "val.bin").read_bytes()
    assert not data.tokens("val").flags.writeable
    assert data.sizes == dict(train=(20000, 20000), val=(2000, 2000), test=(1000, 1000))


# ---- what a checkpoint remembers of its data ----

def test_digests_of_a_folder_are_those_of_checkpoints_of_before(tmp_path):
    """A run of an earlier version goes on only where they are."""
    text = b"".join(b"%d plus %d is %d.\n" % (i % 13, i % 7, i % 13 + i % 7) * (1 + i * i % 5) + b"\n"
                    for i in range(300))
    data = Dataset(write_dataset(tmp_path / "sums", dict(train=text, val=text[:500], test=text[:300])))
    assert {key: value[:16] for key, value in data.digests.items()} == dict(
        train="88ceba0ffe097be2", val="f52dd4b764b25e60", test="132da0702638e25c", meta="f74c3e52880edb59")


def test_digests_change_with_what_a_model_or_a_score_reads(copy):
    before, meta = Dataset(copy).digests, (copy / "meta.json").read_bytes()
    read = (dict(bytes=22000), dict(tokens=22000), dict(separator=0), dict(dtype="uint16"),
            dict(options={"separator": "\n"}), dict(spelled=False))
    of_people = (dict(name="other", note="other", source="other", chars=5), dict(options={"split": "other"}))
    for change in (*read, *of_people):
        put_meta(copy, **change)
        after = Dataset(copy).digests
        assert [key for key in before if after[key] != before[key]] == ["meta"] * (change in read), change
        (copy / "meta.json").write_bytes(meta)


# ---- documents ----

def documents_of(folder, text, encoding="byte", vocab=None, **options):
    """The documents of a dataset that is made of a text, as texts."""
    if encoding == "char":
        vocab = sorted(set(text))
    splits = dict.fromkeys(("train", "val", "test"), text.encode() if encoding == "byte" else text)
    put_meta(write_dataset(folder, splits, encoding, vocab), options=options)
    data = Dataset(folder)
    cuts, tokens = data.documents("train"), data.tokens("train")
    return [data.tokenizer.decode(tokens[a:b]) for a, b in zip(cuts, cuts[1:])]


@pytest.mark.parametrize("documents, options", [
    (["é|", "two|", "three"], dict(separator="|")),
    (["é||", "two|three"], dict(separator="||")),
    (["before\n", " = One = \n\n text \n = = Part = = \n more\n", " = Two = \n\n end\n"], {}),
    (["Anna:\nYes.\n\n", "Ben:\nNo.\nNever.\n\n\n", "Anna:\nOh.\n"], {}),
    (["# ---- a.py ----\nx = 1\n\n\ny = 2\n\n\n", "# ---- b/c.py ----\nz\n"], {}),
    (["<mediawiki>\n", "  <page>\n a\n\n b\n  </page>\n", "  <page>\n c\n"], {}),
    (["é\n\n", "ö\n\n", "ü"], {})],
    ids=["separator", "long separator", "titles", "speeches", "files", "pages", "umlauts"])
def test_a_document_begins_where_the_text_says(documents, options, tmp_path):
    """In bytes and in characters; with the line ends of Windows the same, also where the first has others."""
    text = "".join(documents)
    for encoding in ("byte", "char"):
        assert documents_of(tmp_path / encoding, text, encoding, **options) == documents
        rest = "".join(documents[1:]).replace("\n", "\r\n")
        for name, first in (("windows", documents[0].replace("\n", "\r\n")), ("mixed", documents[0])):
            found = documents_of(tmp_path / f"{encoding}_{name}", first + rest, encoding, **options)
            assert "".join(found) == first + rest
            assert [each.replace("\r\n", "\n") for each in found] == documents


def test_documents_of_tokens_end_with_end_of_text_and_may_cross_shards(tmp_path):
    tokens = np.arange(100, 130)
    tokens[[4, 12, 13]] = 50256
    splits = dict(train=np.split(tokens, [3, 20]), val=[tokens], test=[[5, 6, 7, 50256]])
    folder = write_shards(tmp_path / "shards", splits)
    for split in ("train", "val"):
        assert Dataset(folder).documents(split).tolist() == [0, 5, 13, 14, 30]
    assert "is a single document, and it takes two or more" in line(lambda: Dataset(folder).documents("test"))


def test_without_an_end_of_text_token_no_other_ends_a_document(tmp_path):
    """The first token of a vocabulary that has none is a text's own."""
    text = "one two\n\nthree!!\n\nfour" * 9
    found = documents_of(tmp_path / "x", text, "hf", byte_pairs(text, r"\S+|\s+", special=["!"]))
    assert found == re.split(r"(?<=\n\n)", text)


# ---- what is not there ----

def test_what_is_not_there_names_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert "did you mean wikitext103?" in line(lambda: Dataset("wikitxt103"))
    assert "neither a folder with a meta.json nor one of enwik8, " in line(lambda: Dataset("zzz"))
    shards = f"data/fineweb/prepare.py --shards '{tmp_path}/*.bin'"
    for names, command in ((("train.bin", "val.bin"), f"data/from_nanogpt.py {tmp_path}"),
                           (("x_train_1.bin", "x_val_0.bin"), shards)):
        for path in names:
            (tmp_path / path).touch()
        assert line(lambda: Dataset(tmp_path)).endswith(f"run: python {command}")
        for path in names:
            (tmp_path / path).unlink()


@pytest.mark.parametrize("name", sorted(path.parent.name for path in ROOT.glob("data/*/prepare.py")))
def test_the_command_that_is_named_makes_the_folder(name, monkeypatch, capsys):
    """In each encoding that the script offers; of another one, the script's own dataset is named."""
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        importlib.import_module(f"data.{name}.prepare").main(["--help"])
    offered = re.search(r"--encoding \{(.*?)\}", capsys.readouterr().out)[1].split(",")
    script = f"python data/{name}/prepare.py"
    assert str(missing_error(name)).endswith(f"run: {script}")
    for encoding in ("byte", "gpt2"):
        said = str(missing_error(f"{name}_{encoding}"))
        if encoding in offered[1:]:  # the first one's folder has no encoding in its name
            assert said.endswith(f"run: {script} --encoding={encoding}")
        else:
            assert said == f"no dataset {name}_{encoding}; did you mean {name}?"


# ---- what is damaged ----

def other(path, data):
    """Write other bytes into a file, at another time."""
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))


def lacking(folder, key):
    meta = json.loads((folder / "meta.json").read_text())
    del meta[key]
    (folder / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize("damage, words", [
    (lambda d: other(d / "train.bin", b"abc"), "train.bin holds 3 tokens where meta.json says 20,000; run "
                                               "its prepare script with --force"),
    (lambda d: other(d / "train.bin", bytes(20000)), "run its prepare script again, which writes it anew"),
    (lambda d: (d / "train.bin").unlink(), "has no split 'train'; it has val, test"),
    (lambda d: (d / "meta.json").write_text("{"), "meta.json is not what a prepare script writes: Expecting"),
    (lambda d: put_meta(d, vocab_size=255), "vocab_size=255 must be 256, the size of its vocabulary"),
    (lambda d: put_meta(d, dtype="object"), "dtype='object' must be uint8, uint16, uint32"),
    (lambda d: put_meta(d, separator=256), "separator=256 is no token of its vocabulary"),
    (lambda d: lacking(d, "splits"), "splits is missing; run it again with --force")],
    ids=lambda value: value[:30] if isinstance(value, str) else "")
def test_a_damaged_folder_is_one_line(damage, words, copy):
    damage(copy)
    said = line(lambda: read(copy))
    assert words in said and str(copy) in said


@settings(max_examples=40)
@given(st.one_of(EDITS, st.tuples(st.sampled_from(["encoding", "vocab", "vocab_size", "separator", "dtype",
                                                   "splits", "tokens", "bytes", "options"]), ANYTHING)))
def test_a_damaged_meta_json_is_read_or_refused_in_a_line(bytes_data, tmp_path, damage):
    """Bytes of it that changed, or a field with any value that JSON has."""
    (tmp_path / "meta.json").write_bytes((bytes_data / "meta.json").read_bytes())
    for split in ("train", "val", "test"):
        shutil.copy(bytes_data / f"{split}.bin", tmp_path)
    if isinstance(damage, list):
        (tmp_path / "meta.json").write_bytes(damaged((tmp_path / "meta.json").read_bytes(), damage))
    else:
        put_meta(tmp_path, **{damage[0]: damage[1]})
    try:
        assert all(map(len, read(tmp_path)))
    except UserError as e:
        assert "\n" not in str(e) and str(tmp_path) in str(e)


SHARD = in_llm_c(np.arange(400))


@pytest.mark.parametrize("content, words", [
    (None, "is not there"), (SHARD[:-2], "is cut short: it has 1,822 bytes where the 400 tokens of its "),
    (in_llm_c(np.arange(400), magic=7), "it begins with 7, not 20240520"),
    (in_llm_c(np.arange(400), version=7), "is a shard of version 7; only version 1 is read here"),
    (b"abc", "it is shorter than its header of 1,024 bytes"), (in_llm_c([]), "is empty"),
    (in_llm_c(np.arange(399)), "holds 399 tokens where meta.json says 400"),
    (in_llm_c(np.arange(1, 401)), "put the whole file there, or run the text's prepare script again")],
    ids=lambda value: value[:30] if isinstance(value, str) else "")
def test_a_damaged_shard_is_one_line(content, words, tmp_path):
    folder = write_shards(tmp_path / "shards", dict(train=[np.arange(300), np.arange(400)], val=[[1, 2]]))
    path = folder / "train_1.bin"
    assert path.read_bytes() == SHARD and len(Dataset(folder).tokens("train")) == 700
    path.unlink()
    if content is not None:
        other(path, content)
    said = line(lambda: Dataset(folder).tokens("train"))
    assert said.startswith(f"{path} ") and words in said
    assert len(Dataset(folder).tokens("val")) == 2
