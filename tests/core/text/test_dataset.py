"""A prepared folder: what is read of it, and what is said of one that is not whole."""
import json
import os
import shutil

import numpy as np
import pytest
from helpers import ROOT, in_llm_c, put_meta, write_dataset, write_shards

from nanoheads.common import UserError
from nanoheads.dataset import Dataset


@pytest.fixture
def copy(bytes_data, tmp_path):
    """A copy of the byte dataset as it was written: 20,000, 2,000 and 1,000 tokens."""
    (tmp_path / "copy").mkdir()
    for name in ("meta.json", "train.bin", "val.bin", "test.bin"):
        shutil.copy(bytes_data / name, tmp_path / "copy")
    return tmp_path / "copy"


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


@pytest.mark.parametrize("field, value, seen", [
    ("bytes", 22000, True), ("tokens", 22000, True), ("separator", 0, True), ("dtype", "uint16", True),
    ("options", {"separator": "\n"}, True), ("spelled", False, True), ("name", "other", False),
    ("note", "other", False), ("source", "other", False), ("options", {"split": "other"}, False),
    ("chars", 5, False)])
def test_digests_change_with_what_a_model_or_a_score_reads(field, value, seen, copy):
    before = Dataset(copy).digests
    put_meta(copy, **{field: value})
    after = Dataset(copy).digests
    assert {key for key in before if after[key] != before[key]} == ({"meta"} if seen else set())


# ---- documents ----

@pytest.mark.parametrize("text, options, begins", [
    (b"one|two|three", {"separator": "|"}, [0, 4, 8]),
    (b"one||two|three", {"separator": "||"}, [0, 5]),
    (b"First Citizen:\nSpeak.\n\nAll:\nWe do.\n", None, [0, 23]),
    (b" = A = \n\n = = B = = \n\n = C = \n x", None, [0, 22]),
    (b"# ---- a.py ----\nx\n\n\n# ---- b.py ----\n", None, [0, 21]),
    (b"<mediawiki>\n  <page>\n a\n\n b\n  </page>\n  <page>\n", None, [0, 12, 38])])
def test_a_document_begins_where_the_text_says(text, options, begins, tmp_path):
    folder = write_dataset(tmp_path / "data", dict(train=text, val=text, test=text))
    put_meta(folder, options=options)
    assert Dataset(folder).documents("train").tolist() == [*begins, len(text)]


def test_documents_of_tokens_end_with_end_of_text_and_may_cross_shards(tmp_path):
    tokens = np.arange(100, 130)
    tokens[[4, 12, 13]] = 50256
    folder = write_shards(tmp_path / "shards", dict(train=np.split(tokens, [3, 20]), val=[tokens]))
    for split in ("train", "val"):
        assert Dataset(folder).documents(split).tolist() == [0, 5, 13, 14, 30]


# ---- what is not there ----

def test_what_is_not_there_names_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    name = next((name for name in ("wikitext103", "openwebtext", "enwik8", "fineweb")
                 if not (ROOT / "data" / name / "meta.json").exists()), None)
    if name:
        assert line(lambda: Dataset(name)) == (
            f"dataset {name} is not prepared; run: python data/{name}/prepare.py")
        assert line(lambda: Dataset(f"{name}_byte")).endswith(f"data/{name}/prepare.py --encoding=byte")
    assert line(lambda: Dataset("wikitxt103")) == "no dataset wikitxt103; did you mean wikitext103?"
    assert "neither a folder with a meta.json nor one of enwik8, " in line(lambda: Dataset("zzz"))
    shards = f"data/fineweb/prepare.py --shards '{tmp_path}/*.bin'"
    for names, command in ((("train.bin", "val.bin"), f"data/from_nanogpt.py {tmp_path}"),
                           (("x_train_1.bin", "x_val_0.bin"), shards)):
        for path in names:
            (tmp_path / path).touch()
        assert line(lambda: Dataset(tmp_path)).endswith(f"run: python {command}")
        for path in names:
            (tmp_path / path).unlink()


# ---- what is damaged ----

def other(path, data):
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))


ANEW = "run its prepare script again, which writes it anew"
DAMAGE = [
    (lambda d: other(d / "train.bin", b"abc"), "train.bin holds 3 tokens where meta.json says 20,000; run "
                                               "its prepare script with --force"),
    (lambda d: other(d / "train.bin", b""), "train.bin holds 0 tokens"),
    (lambda d: other(d / "train.bin", bytes(20000)), f"{ANEW}"),
    (lambda d: (d / "train.bin").unlink(), "has no split 'train'; it has val, test"),
    (lambda d: (d / "meta.json").write_text("{"), "meta.json is not what a prepare script writes: Expecting"),
    (lambda d: (d / "meta.json").write_text("[]"), "run it again with --force"),
    (lambda d: put_meta(d, sizes_sha256=5) or put_meta(d, tokens="x"), "invalid literal for int"),
    (lambda d: put_meta(d, vocab_size=255), "vocab_size=255 must be 256, the size of its vocabulary"),
    (lambda d: put_meta(d, encoding="char"), "need a vocabulary"),
    (lambda d: put_meta(d, encoding="utf8"), "encoding must be byte, char, gpt2 or hf, not 'utf8'"),
    (lambda d: put_meta(d, dtype="object"), "dtype='object' must be uint8, uint16, uint32"),
    (lambda d: put_meta(d, separator=256), "separator=256 is no token of its vocabulary"),
    (lambda d: put_meta(d, splits=[1]), "run it again with --force"),
    *[(lambda d, key=key: lacking(d, key), f"{key} is missing; run it again with --force")
      for key in ("encoding", "dtype", "separator", "splits")],
]


def lacking(folder, key):
    meta = json.loads((folder / "meta.json").read_text())
    del meta[key]
    (folder / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize("damage, words", DAMAGE, ids=[words[:40] for _, words in DAMAGE])
def test_a_damaged_folder_is_one_line(damage, words, copy):
    damage(copy)
    said = line(lambda: read(copy))
    assert words in said and str(copy) in said


SHARD = in_llm_c(np.arange(400))
DAMAGED_SHARDS = [
    (None, "is not there"), (SHARD[:-2], "is cut short: it has 1,822 bytes where the 400 tokens of its "),
    (SHARD + b"ab", "is too long"), (in_llm_c(np.arange(400), magic=7), "it begins with 7, not 20240520"),
    (in_llm_c(np.arange(400), version=7), "is a shard of version 7; only version 1 is read here"),
    (b"abc", "it is shorter than its header of 1,024 bytes"), (in_llm_c([]), "is empty"),
    (in_llm_c(np.arange(399)), "holds 399 tokens where meta.json says 400"),
    (in_llm_c(np.arange(1, 401)), "put the whole file there, or run the text's prepare script again")]


@pytest.mark.parametrize("content, words", DAMAGED_SHARDS, ids=[words[:30] for _, words in DAMAGED_SHARDS])
def test_a_damaged_shard_is_one_line(content, words, tmp_path):
    folder = write_shards(tmp_path / "shards", dict(train=[np.arange(300), np.arange(400)], val=[[1, 2]]))
    path = folder / "train_1.bin"
    assert path.read_bytes() == SHARD and len(Dataset(folder).tokens("train")) == 700
    path.unlink()
    if content is not None:
        path.write_bytes(content)
        os.utime(path, ns=(1, 1))
    said = line(lambda: Dataset(folder).tokens("train"))
    assert said.startswith(f"{path} ") and words in said
    assert len(Dataset(folder).tokens("val")) == 2
