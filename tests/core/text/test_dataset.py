"""Data folders and the order in which training reads them."""
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import train
from helpers import (ANY_CHARACTER, ANYTHING, EDITS, ROOT, damaged, in_llm_c, put_meta, put_split, same, tiny,
                     untimed, weights, write_shards)
from nanoheads import corpus, dataset, files, shards
from nanoheads.common import UserError
from nanoheads.batches import Batches
from nanoheads.dataset import Dataset
from nanoheads.files import sha256
from nanoheads.scoring import score


@pytest.fixture
def copy(bytes_data, tmp_path):
    """A copy of the byte dataset as it was written, to be damaged: other tests leave more there."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in ("meta.json", "train.bin", "val.bin", "test.bin"):
        shutil.copy(bytes_data / name, folder)
    return folder


def line(action):
    with pytest.raises(UserError) as e:
        action()
    assert len(str(e.value).splitlines()) == 1
    return str(e.value)


def pieces_of(batches, steps):
    return [(s, s + batches.block_size) for step in steps for s in batches.starts(step)]


# ---- folders ----

def test_a_split_is_a_read_only_memory_map(bytes_data):
    tokens = Dataset(bytes_data).tokens("train")
    assert isinstance(tokens, np.memmap) and len(tokens) == 20000 and not tokens.flags.writeable
    assert Dataset(bytes_data).bytes_per_token("val") == 1.0


@pytest.mark.parametrize("field, value", [
    ("bytes", 22000), ("tokens", 22000), ("vocab_size", 257), ("vocab", ["a"]), ("separator", 0),
    ("encoding", "char"), ("dtype", "uint16"), ("options", {"separator": "\n"}), ("spelled", False)])
def test_each_field_of_meta_json_that_is_read_is_in_its_digest(field, value, copy):
    before = Dataset(copy)
    put_meta(copy, **{field: value})
    after = dataset.digests_of(json.loads((copy / "meta.json").read_text()))
    assert after["meta"] != before.digests["meta"]
    assert {**after, "meta": ""} == {**before.digests, "meta": ""}
    assert after["test"] == sha256(copy / "test.bin")


@pytest.mark.parametrize("field, value", [("name", "other"), ("note", "other"), ("source", "other"),
                                          ("options", {"split": "other"}), ("chars", 5)])
def test_what_nothing_reads_of_meta_json_is_not_in_its_digest(field, value, copy):
    before = Dataset(copy).digests
    put_meta(copy, **{field: value})
    assert Dataset(copy).digests == before


def test_one_error_class_covers_all_data():
    assert UserError is corpus.UserError


def test_a_dataset_that_is_not_prepared_names_the_command(tmp_path, monkeypatch):
    for name in ("enwik8_char", "wikitext9"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "prepare.py").touch()
    monkeypatch.setattr(dataset, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    message = "dataset wikitext9 is not prepared; run: python data/wikitext9/prepare.py"
    assert line(lambda: Dataset("wikitext9")) == message
    assert line(lambda: Dataset("data/wikitext9")).endswith("run: python data/wikitext9/prepare.py")
    message = "run: python data/wikitext9/prepare.py --encoding=byte"
    assert line(lambda: Dataset("wikitext9_byte")).endswith(message)
    assert line(lambda: Dataset("wikitext9_gpt2")).endswith("data/wikitext9/prepare.py --encoding=gpt2")
    assert line(lambda: Dataset("enwik8_char")).endswith("run: python data/enwik8_char/prepare.py")
    said = line(lambda: Dataset("wikitxt9"))
    assert "wikitxt9" in said and said.endswith("wikitext9?")
    said = line(lambda: Dataset("zzz"))
    assert "zzz" in said and said.endswith("enwik8_char, wikitext9")


@pytest.mark.parametrize("damage,words", [
    (lambda d: (d / "train.bin").write_bytes(b"abc"), "train.bin holds 3 "),
    (lambda d: (d / "train.bin").write_bytes(b""), "train.bin holds 0 "),
    (lambda d: (d / "train.bin").unlink(), "'train'; it has val, test"),
])
def test_a_damaged_folder_is_one_line(copy, damage, words):
    damage(copy)
    assert words in line(lambda: Dataset(copy).tokens("train"))


COUNT = "must be a whole number above 0"
SHARD = dict(file="val.bin", tokens=2000, sha256="00", format="plain")
BAD_META = [
    *[("vocab_size", value, f"vocab_size={value!r} {COUNT}") for value in (0, -3, "256", 256.0, True, None)],
    ("vocab_size", 255, "vocab_size=255 must be 256, the size of its vocabulary"),
    ("vocab_size", 2**63, f"vocab_size={2**63} {COUNT}"),
    *[("separator", value, f"separator={value!r} must be a whole number from 0 to below vocab_size")
      for value in ("a", None, 9999, 256, -1, 10.5, False)],
    *[(f"splits.val.{key}", value, f"splits.val.{key}={value!r} {COUNT}")
      for key in ("tokens", "bytes") for value in ("x", 0, -5, math.nan, math.inf, 2000.0, True)],
    ("splits.val.bytes", 2001, "splits.val.bytes=2001 must be as many as tokens, of which each is a byte"),
    ("splits.val.chars", "x", "splits.val.chars='x' must be a whole number"),
    ("splits.val.sha256", 5, "splits.val.sha256=5 must be a text"),
    ("splits.val", 3, "splits.val=3 must be its tokens, bytes and sha256"),
    ("splits.val.sizes_sha256", 5, "splits.val.sizes_sha256=5 must be a text, or left out"),
    *[("splits.val.shards", value, "must be a list of files, each with its file, tokens, sha256 and format")
      for value in ([], {}, [SHARD, 3], *[[{**SHARD, key: bad}] for key, bad in
                    (("file", ""), ("file", 5), ("tokens", 0), ("sha256", None), ("format", "llama"))])],
    ("splits.val.shards", [SHARD, SHARD], "splits.val.tokens=2000 must be as many as its shards have"),
    ("splits.val.shards", [{**SHARD, "format": "llm.c"}], "dtype='uint8' must be uint16, in which"),
    *[("options", value, f"options={value!r} must be what was chosen, by name, its separator a text; or left")
      for value in (["a"], dict(separator=5))],
    ("splits", {}, "splits={} must be the splits by name"), ("splits", ["val"], "splits=['val'] must be"),
    ("name", ["a"], "name=['a'] must be a text"),
    ("encoding", "utf8", "encoding='utf8' must be byte, char, gpt2 or hf"),
    ("encoding", ["byte"], "encoding=['byte'] must be byte, char, gpt2 or hf"),
    *[("dtype", value, f"dtype={value!r} must be uint8, uint16 or") for value in ("float32", 8, "<u1")],
    *[("vocab", value, f"vocab={value!r} must be") for value in (5, [1, 2], "abc")],
    *[(key, ..., f"{key.rpartition('.')[2]} is missing: ") for key in
      ("vocab_size", "separator", "name", "encoding", "dtype", "splits", "splits.val.tokens",
       "splits.val.bytes", "splits.val.sha256")],
]


def change_meta(folder, key, value):
    """Set a key of meta.json, dots between the keys that lead to it; ...: without it."""
    meta = json.loads((folder / "meta.json").read_text())
    *path, last = key.split(".")
    place = meta
    for name in path:
        place = place[name]
    place.pop(last, None)
    if value is not ...:
        place[last] = value
    (folder / "meta.json").write_text(json.dumps(meta))


def read_all(folder):
    """{split: tokens}, once all else is read that programs read of a data folder."""
    data = Dataset(folder)
    splits = {split: data.tokens(split).copy() for split in data.splits}
    for split, tokens in splits.items():
        Batches(data, split, 8, 2, 0)(0)
        data.tokenizer.encode(data.tokenizer.decode(tokens[:9]))
        assert data.sizes_beyond(split).shape == (0, 3) and data.bytes_per_token(split) > 0
        assert data.digests[split]
        try:
            data.documents(split)
        except UserError as e:
            assert "has no documents: " in str(e) or "is a single document" in str(e)
    return splits


def read_or_refused(folder):
    """What read_all() gives, or None where it refuses, in a line that names a file of the folder."""
    try:
        return read_all(folder)
    except UserError as e:
        said = str(e)
        assert str(folder) in said and len(said.splitlines()) == 1, said


@pytest.mark.parametrize("encoding", ["bytes_data", "chars_data"])
@settings(max_examples=60)
@given(st.sampled_from(["meta.json", "train.bin", "val.bin"]), EDITS)
def test_a_damaged_file_is_refused_in_a_line_or_the_text_is_as_it_was(
        encoding, request, tmp_path, name, edits):
    whole, folder = request.getfixturevalue(encoding), tmp_path / "copy"
    before = {path.stem: path.read_bytes() for path in whole.glob("*.bin")}
    shutil.copytree(whole, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.checked"))
    (folder / name).write_bytes(damaged((folder / name).read_bytes(), edits))
    found = read_or_refused(folder)
    assert found is None or all(tokens.tobytes() == before[split] for split, tokens in found.items())


PLACES = ["name", "encoding", "vocab", "vocab_size", "separator", "dtype", "spelled", "options",
          "options.separator", "splits", "splits.val",
          *(f"splits.val.{key}" for key in ("tokens", "bytes", "chars", "sha256", "sizes_sha256", "shards"))]


@pytest.mark.parametrize("encoding", ["bytes_data", "chars_data"])
@settings(max_examples=100)
@given(st.sampled_from(PLACES), ANYTHING | st.lists(ANY_CHARACTER, min_size=10, max_size=10))
def test_whatever_a_key_of_meta_json_holds_is_refused_in_a_line_or_means_something(
        encoding, request, tmp_path, key, value):
    folder = tmp_path / "copy"
    shutil.copytree(request.getfixturevalue(encoding), folder, dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("*.checked"))
    put_meta(folder, options={})
    change_meta(folder, key, value)
    read_or_refused(folder)


@pytest.mark.parametrize("key, value, words", BAD_META)
def test_a_wrong_value_in_meta_json_is_one_line(copy, key, value, words):
    Dataset(copy)  # control
    change_meta(copy, key, value)
    said = line(lambda: Dataset(copy))
    assert said.startswith(f"{copy / 'meta.json'} is not what a prepare script writes: ") and words in said
    assert said.endswith("; run it again with --force")


@pytest.mark.parametrize("vocab", [5, [1, 2], "abcdefgh \n", list("abcdefgh "), list("aabcdefgh ")])
def test_a_wrong_vocabulary_of_characters_is_one_line(chars_data, tmp_path, vocab):
    folder = Path(shutil.copytree(chars_data, tmp_path / "copy"))
    change_meta(folder, "vocab", vocab)
    assert "vocab" in line(lambda: Dataset(folder))


# ---- checksums ----

@pytest.fixture
def reads(monkeypatch):
    """The names of the files that were hashed, as it happens; this process knows no file at the start."""
    names, hashed = [], files.sha256_of

    def counted(file, seen):
        names.append(Path(file.name).name)
        return hashed(file, seen)
    monkeypatch.setattr(files, "sha256_of", counted)
    monkeypatch.setattr(files, "KNOWN", {})
    monkeypatch.setattr(files, "SETTLED", -1e18)  # the files were written a moment ago
    return names


def test_a_changed_split_of_the_same_length_is_refused(copy):
    (copy / "test.bin").write_bytes(b" " * 1000)
    data = Dataset(copy)
    assert len(data.tokens("train")) == 20000, "what is not read is not checked"
    said = line(lambda: data.tokens("test"))
    blank = hashlib.sha256(b" " * 1000).hexdigest()
    for words in (f"{copy}/test.bin is not the file that meta.json describes", blank[:16],
                  data.splits["test"]["sha256"][:16], "run its prepare script again"):
        assert words in said


def test_a_split_that_changes_while_it_is_read_is_refused(copy, monkeypatch):
    monkeypatch.setattr("nanoheads.batches.REOPEN_AFTER", 1)
    batches = Batches(Dataset(copy), "train", 16, 4, 0)
    (copy / "train.bin").write_bytes(b" " * 20000)
    assert "train.bin is not the file" in line(lambda: batches(0))


def test_a_split_without_a_checksum_is_refused(copy):
    meta = json.loads((copy / "meta.json").read_text())
    del meta["splits"]["val"]["sha256"]
    (copy / "meta.json").write_text(json.dumps(meta))
    assert "meta.json is not what a prepare script writes" in line(lambda: Dataset(copy))


def test_a_split_is_read_once_until_it_changes(copy, reads, monkeypatch):
    def start():
        monkeypatch.setattr(files, "KNOWN", {})  # another process
        Dataset(copy).tokens("train")
        Dataset(copy).tokens("train")
    start()
    start()
    assert reads == ["train.bin"] and (copy / "train.bin.checked").is_file()
    os.utime(copy / "train.bin", ns=(1, 1))
    start()
    assert reads == ["train.bin"] * 2
    (copy / "train.bin").write_bytes(b" " * 20000)
    os.utime(copy / "train.bin", ns=(1, 1))  # size and time as they were
    assert "train.bin is not the file" in line(start)


def test_a_file_that_was_just_written_is_not_relied_on(copy, reads, monkeypatch):
    """Two changes within a tick of the file system's clock leave the same time."""
    monkeypatch.setattr(files, "SETTLED", 1e18)
    for _ in range(2):
        Dataset(copy).tokens("val")
    assert reads == ["val.bin"] * 2 and not (copy / "val.bin.checked").exists()


@given(EDITS)
def test_a_damaged_memory_of_a_checksum_is_made_anew(copy, reads, edits):
    data, memory = Dataset(copy), copy / "val.bin.checked"
    memory.unlink(missing_ok=True)
    files.KNOWN.clear()
    data.tokens("val")
    good = memory.read_bytes()
    memory.write_bytes(damaged(good, edits))
    files.KNOWN.clear()
    data.tokens("val")
    assert json.loads(memory.read_bytes()) == json.loads(good)


def test_a_memory_that_cannot_be_kept_is_no_error(copy, reads, monkeypatch):
    def refuse(*names):
        raise PermissionError(13, "read-only")
    monkeypatch.setattr(files.os, "replace", refuse)
    for _ in range(2):
        Dataset(copy).tokens("val")
        monkeypatch.setattr(files, "KNOWN", {})
    assert reads == ["val.bin"] * 2
    assert sorted(path.name for path in copy.iterdir()) == ["meta.json", "test.bin", "train.bin", "val.bin"]


@pytest.mark.slow
def test_of_processes_that_start_together_one_reads(copy, tmp_path):
    """Four processes, as ranks are: each waits for the one that reads, and then finds what it kept."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from nanoheads import files
from nanoheads.dataset import Dataset
hashed, files.SETTLED = files.sha256_of, -1e18
files.sha256_of = lambda file, seen: print("read", flush=True) or hashed(file)
Dataset({str(copy)!r}).tokens("train")
"""
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
               for _ in range(4)]
    assert sorted(process.communicate()[0] for process in started) == ["", "", "", "read\n"]
    assert all(process.returncode == 0 for process in started)


def test_git_does_not_see_what_is_kept_of_checksums():
    assert "*.checked" in (ROOT / "data/.gitignore").read_text().splitlines()


def test_a_token_outside_the_vocabulary_is_one_line(chars_data, tmp_path):
    folder = Path(shutil.copytree(chars_data, tmp_path / "copy"))
    put_split(folder, "train", np.full(1500, 99, "<u2").tobytes())
    message = line(lambda: Batches(Dataset(folder), "train", 16, 4, 0)(0))
    assert "99" in message and " 9" in message


# ---- batches ----

def test_the_batch_is_a_function_of_seed_and_step(bytes_data):
    d = Dataset(bytes_data)
    a, b, other = (Batches(d, "train", 16, 8, seed) for seed in (1, 1, 2))
    forward = [a(step) for step in range(20)]
    assert all(torch.equal(b(step), forward[step])
               for step in reversed(range(20))), "whatever was read before"
    assert not torch.equal(other(3), forward[3])


def test_targets_are_the_next_tokens(bytes_data):
    tokens = Dataset(bytes_data).tokens("train")
    batches = Batches(Dataset(bytes_data), "train", 16, 8, 0)
    ids = batches(5)
    assert ids.shape == (8, 17) and ids.dtype == torch.int64
    for row, start in zip(ids, batches.starts(5)):
        assert row.tolist() == tokens[start:start + 17].tolist()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_share_the_global_batch(bytes_data, world):
    batches = Batches(Dataset(bytes_data), "train", 16, 8, 0)
    shares = [batches(7, rank, world) for rank in range(world)]
    assert all(len(s) == 8 // world for s in shares)
    assert torch.equal(torch.stack(shares, dim=1).flatten(0, 1), batches(7))


def test_a_pass_is_shuffled_and_without_replacement(bytes_data):
    batches = Batches(Dataset(bytes_data), "train", 16, 31, 0)
    assert batches.pieces == 20000 // 16 - 1
    starts = [s for step in range(3 * batches.pieces // 31 + 1) for s in batches.starts(step)]
    one, two = (starts[i * batches.pieces:(i + 1) * batches.pieces] for i in (0, 1))
    for each in (one, two):
        assert len(set(each)) == batches.pieces, "every piece once"
        assert len({s % 16 for s in each}) == 1, "cut at one offset"
        assert min(each) >= 0 and max(each) + 17 <= 20000
        assert np.diff(sorted(each)).tolist() == [16] * (batches.pieces - 1), "the pieces lie side by side"
        assert each != sorted(each)
    assert one != two and one[0] % 16 != two[0] % 16, "each pass has its own order and its own cuts"


def test_a_batch_may_be_larger_than_a_pass(chars_data):
    batches = Batches(Dataset(chars_data), "train", 300, 11, 0)
    assert batches.pieces == 4 and len(set(batches.starts(0)[:4])) == 4 and batches(2).shape == (11, 301)


def test_every_cut_fits_into_the_split(chars_data):
    # the largest block size that 1,500 tokens allow
    batches = Batches(Dataset(chars_data), "train", 750, 8, 0)
    assert all(0 <= s and s + 751 <= 1500 for step in range(200) for s in batches.starts(step))


def test_a_block_size_larger_than_the_split_is_one_line(chars_data):
    message = line(lambda: Batches(Dataset(chars_data), "train", 751, 4, 0))
    assert "block_size=751 needs at least 1,502 tokens of train" in message


@pytest.mark.slow
def test_a_pass_over_a_large_file_keeps_memory_bounded(tmp_path):
    """300 MB, sparse, in a process of its own; the file's pages would all stay resident in one mapping."""
    size = 300 << 20
    for split, n in (("train", size), ("val", 1000), ("test", 1000)):
        with open(tmp_path / f"{split}.bin", "wb") as f:
            f.truncate(n)
    meta = dict(name="large", encoding="byte", vocab_size=256, dtype="uint8", separator=10,
                splits={split: {"tokens": n, "bytes": n, "sha256": sha256(tmp_path / f"{split}.bin")}
                        for split, n in (("train", size), ("val", 1000), ("test", 1000))})
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    code = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
from nanoheads import files
from nanoheads.batches import Batches
from nanoheads.dataset import Dataset
files.SETTLED = -1e18  # as if the file were not from a moment ago

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

batches = Batches(Dataset({str(tmp_path)!r}), "train", 4096, 64, 0)
batches(0)
before = most = resident()
for step in range(1, batches.pieces // 64):
    batches(step)
    if step % 8 == 0:
        most = max(most, resident())
print(batches.pieces * 4096, most - before)
"""
    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read, grown = map(int, done.stdout.split())
    assert read > 290 << 20 and grown < 100 << 20, f"{grown >> 20} MB more after {read >> 20} MB"


# ---- shards ----

CUTS = [[700], [300, 1, 5, 394], [16] * 43 + [12]]  # tokens of each shard; a row has 17


def in_parts(tokens, sizes):
    return np.split(tokens, np.cumsum(sizes)[:-1])


def text_of(kind, n, seed=0):
    return np.random.default_rng(seed).integers(0, 50257 if kind == "llm.c" else 256, n)


@pytest.fixture(params=["llm.c", "plain"])
def sharded(request, tmp_path):
    """sharded(sizes) -> (a folder whose train split is in shards of these sizes, the tokens, the kind)."""
    def make(sizes, name="sharded", **more):
        tokens = text_of(request.param, sum(sizes))
        splits = dict(train=in_parts(tokens, sizes), val=in_parts(text_of(request.param, 350, 1), [200, 150]))
        return write_shards(tmp_path / name, splits, request.param, **more), tokens, request.param
    return make


@pytest.mark.parametrize("sizes", CUTS)
def test_batches_of_shards_are_those_of_their_tokens_in_a_row(sharded, sizes):
    folder, tokens, kind = sharded(sizes)
    whole, _, _ = sharded([sum(sizes)], "whole")
    batches, other = (Batches(Dataset(each), "train", 16, 8, 3) for each in (folder, whole))
    for step in range(20):
        ids = batches(step)
        assert torch.equal(ids, other(step))
        rows = []  # by hand
        for start in batches.starts(step):
            rows.append([int(tokens[start + i]) for i in range(17)])
        assert ids.tolist() == rows


def test_any_slice_of_shards_is_that_of_their_tokens_in_a_row(sharded, monkeypatch):
    monkeypatch.setattr(shards, "MOST_OPEN", 2)
    folder, tokens, _ = sharded(CUTS[1])
    found = Dataset(folder).tokens("train")
    for start in (None, 0, 1, 299, 300, 301, 306, 699, 700, 800, -1, -500):
        for stop in (None, 0, 1, 300, 301, 305, 306, 307, 700, 999, -1):
            part = found[start:stop]
            assert part.dtype == found.dtype and part.tolist() == tokens[start:stop].tolist()
            assert len(found.maps) <= 2
    assert len(found) == 700 and np.array_equal(np.asarray(found), tokens)
    assert found.tobytes() == tokens.astype(found.dtype).tobytes()
    for at in (3, slice(0, 9, 2), [1, 2]):
        with pytest.raises(TypeError):
            found[at]


def test_two_ranks_read_different_rows_of_shards(sharded):
    batches = Batches(Dataset(sharded(CUTS[2])[0]), "train", 16, 8, 0)
    for step in range(6):  # into the second pass
        both = batches(step)
        for rank in (0, 1):
            assert torch.equal(batches(step, rank, 2), both[rank::2])
            assert batches.starts(step, rank, 2) == batches.starts(step)[rank::2]
        if step < 5:
            assert not set(batches.starts(step, 0, 2)) & set(batches.starts(step, 1, 2))


def test_documents_may_cross_shards(sharded):
    folder, tokens, kind = sharded(CUTS[1])
    end, ends = (50256, [50, 300, 301, 500]) if kind == "llm.c" else (0, [50, 300, 301, 500])
    tokens[tokens == end] = 7
    tokens[np.array(ends) - 1] = end
    write_shards(folder, dict(train=in_parts(tokens, CUTS[1])), kind)
    if kind == "plain":
        put_meta(folder, options=dict(separator="\0"))
    assert Dataset(folder).documents("train").tolist() == [0, *ends, 700]


def test_each_token_of_shards_is_scored_once(sharded):
    folder, tokens, kind = sharded(CUTS[1])
    whole, _, _ = sharded([700], "whole")
    model = tiny(dict(vocab_size=50257 if kind == "llm.c" else 256, block_size=16)).float()
    each, other = (score(model, Dataset(data), "train", per_token=True) for data in (folder, whole))
    assert len(each) == 700 and np.array_equal(each, other)


def test_a_run_that_is_killed_in_a_shard_goes_on_as_if_it_was_not(sharded, args, rows, tmp_path, monkeypatch):
    """Rows reach over the borders of shards; and the run is that on one file with the same tokens."""
    folder, _, _ = sharded(CUTS[1])
    whole, _, _ = sharded([700], "whole")
    keys = dict(save_interval=2, eval_tokens=64, eval_interval=6, dropout=0.1)
    train.main(args("unbroken", dataset=folder, **keys))
    train.main(args("one_file", dataset=whole, **keys))

    def killed(run, step):
        if step == 5:
            raise ZeroDivisionError("as if killed")
        return real(run, step)
    real = train.batch_at
    monkeypatch.setattr(train, "batch_at", killed)
    with pytest.raises(ZeroDivisionError):
        train.main(args("killed", dataset=folder, **keys))
    monkeypatch.setattr(train, "batch_at", real)
    train.main([*args("killed", dataset=folder, **keys), "--resume"])
    for other in ("one_file", "killed"):
        assert same(weights(tmp_path / "unbroken/ckpt.pt"), weights(tmp_path / other / "ckpt.pt"))
        assert untimed(rows(tmp_path / "unbroken")[1]) == untimed(rows(tmp_path / other)[1])


def test_a_resumed_run_refuses_other_shards(sharded, args, fails):
    folder, tokens, kind = sharded(CUTS[1])
    keys = dict(eval_tokens=64, dataset=folder)
    train.main(args(**keys))
    val = in_parts(text_of(kind, 350, 1), [200, 150])
    write_shards(folder, dict(train=in_parts(np.flip(tokens), CUTS[1]), val=val), kind)
    said, = fails([*args(max_iters=9, **keys), "--resume"])
    assert f"{folder} holds other data" in said


def test_shards_may_move(sharded, args, tmp_path):
    """Where they lie is not in a checkpoint, and says nothing of a run."""
    folder, _, _ = sharded(CUTS[1])
    train.main(args(dataset=folder, eval_tokens=64))
    assert b"train_2.bin" not in (tmp_path / "run/ckpt.pt").read_bytes()
    sharded(CUTS[1], files=tmp_path / "elsewhere")
    for path in folder.glob("*.bin*"):
        path.unlink()
    train.main([*args(dataset=folder, eval_tokens=64, max_iters=8), "--resume"])


def test_shards_elsewhere_are_read_in_place_and_hashed_once(sharded, reads, tmp_path, monkeypatch):
    folder, _, _ = sharded(CUTS[1], files=tmp_path / "theirs")

    def start():
        monkeypatch.setattr(files, "KNOWN", {})  # another process
        Dataset(folder).tokens("train")
    start()
    start()
    assert reads == [f"train_{i}.bin" for i in range(4)]
    assert sorted(path.name for path in folder.iterdir()) == [
        "meta.json", *(f"train_{i}.bin.checked" for i in range(4))]
    assert len(list((tmp_path / "theirs").iterdir())) == 6, "nothing is written beside them"
    os.utime(tmp_path / "theirs/train_2.bin", ns=(1, 1))
    start()
    assert reads[4:] == ["train_2.bin"], "and only what changed is hashed again"


OTHER = in_llm_c(np.arange(400))
DAMAGED_SHARDS = [
    ("missing", None, "is not there"),
    ("cut short", OTHER[:-2], "is cut short: it has 1,822 bytes where the 400 tokens of its header take"),
    ("too long", OTHER + b"ab", "is too long: it has 1,826 bytes"),
    ("magic", in_llm_c(np.arange(400), magic=20240801), "it begins with 20240801, not 20240520"),
    ("version", in_llm_c(np.arange(400), version=7), "is a shard of version 7; only version 1 is read here"),
    ("no header", b"abc", "it is shorter than its header of 1,024 bytes"),
    ("nothing", b"", "it is shorter than its header of 1,024 bytes"),
    ("no tokens", in_llm_c([]), "is empty: its header says 0 tokens"),
    ("below 0", in_llm_c([], count=-5), "is empty: its header says -5 tokens"),
    ("other count", in_llm_c(np.arange(399)), "holds 399 tokens where meta.json says 400"),
    ("other tokens", OTHER, "is not the file that meta.json describes"),
]


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("damage, content, words", DAMAGED_SHARDS, ids=[each[0] for each in DAMAGED_SHARDS])
def test_a_damaged_shard_is_one_line_before_anything_starts(
        tmp_path, args, fails, split, damage, content, words):
    texts = [text_of("llm.c", n, n) for n in (300, 400)]
    folder = write_shards(tmp_path / "sharded", dict(train=texts, val=texts))
    assert len(Dataset(folder).tokens(split)) == 700  # control
    path = folder / f"{split}_1.bin"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    said, = fails(args(dataset=folder))
    assert said.startswith(f"{path} ") and words in said
    assert not (tmp_path / "run").exists()


def test_a_damaged_plain_shard_is_one_line(tmp_path):
    folder = write_shards(tmp_path / "sharded", dict(val=[np.arange(9), np.arange(5)]), "plain")
    path = folder / "val_1.bin"
    for content, words in ((b"abc", "is cut short: it has 3 bytes where the 5 tokens of meta.json take 5"),
                           (b"abcdef", "is too long"), (b"abcde", "is not the file that"),
                           (None, "is not there")):
        path.unlink()
        if content:
            path.write_bytes(content)
        assert f"{path} " in (said := line(lambda: Dataset(folder).tokens("val"))) and words in said


def test_a_list_of_shards_that_changed_is_refused(tmp_path):
    """Its tokens would be others, and a run that goes on would not see it."""
    folder = write_shards(tmp_path / "sharded", dict(val=[[1, 2], [3, 4]]))
    meta = json.loads((folder / "meta.json").read_text())
    meta["splits"]["val"]["shards"].reverse()
    (folder / "meta.json").write_text(json.dumps(meta))
    assert "the sha256 of val is not that of its shards" in line(lambda: Dataset(folder).tokens("val"))


def test_a_token_of_a_shard_outside_the_vocabulary_is_one_line(tmp_path):
    folder = write_shards(tmp_path / "sharded", dict(train=[[60000] * 50] * 2))
    said = line(lambda: Batches(Dataset(folder), "train", 16, 4, 0)(0))
    assert said.startswith(f"{folder / 'train'} (2 shards) holds the token 60000")


def test_a_folder_of_shards_without_a_meta_json_names_the_command(tmp_path):
    folder = write_shards(tmp_path / "sharded", dict(train=[[1]], val=[[1]]))
    (folder / "meta.json").unlink()
    assert line(lambda: Dataset(folder)).endswith(f"data/fineweb/prepare.py --shards '{folder}/*.bin'")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="sparse files are Linux's here")
def test_training_on_8_gb_of_shards_starts_at_once_in_bounded_memory(tmp_path):
    """Sparse files, with what was found of their checksums: hashing them would take its time."""
    n = 4 * 10**9
    folder = write_shards(tmp_path / "large", dict(train=[[1]] * 2, val=[np.zeros(2000)]), "plain")
    meta = json.loads((folder / "meta.json").read_text())
    for shard in meta["splits"]["train"]["shards"]:
        path = folder / shard["file"]
        os.truncate(path, n)
        shard["tokens"] = n
        (folder / f"{path.name}.checked").write_text(json.dumps(dict(stamp=files.stamp(path),
                                                                     sha256=shard["sha256"])))
    meta["splits"]["train"].update(tokens=2 * n, bytes=2 * n)
    (folder / "meta.json").write_text(json.dumps(meta))
    command = [f"--dataset={folder}", f"--out_dir={tmp_path / 'run'}", "--n_layer=1", "--n_head=1",
               "--n_embd=8", "--block_size=256", "--batch_size=16", "--max_iters=20", "--eval_tokens=2048",
               "--device=cpu"]
    code = f"""
import re, resource, sys, time
from pathlib import Path
began = time.monotonic()
sys.path.insert(0, {str(ROOT)!r})
import train
real, first = train.training_step, []
train.training_step = lambda *given: first.append(time.monotonic()) or real(*given)
train.main({command!r})
# a child's ru_maxrss is at least what its parent had, which late in a run of all tests is above the bound
status = Path("/proc/self/status")
own = re.search(r"VmHWM:\\s+(\\d+)", status.read_text()) if status.exists() else None
print("RESULT", first[0] - began, int(own[1] if own else
                                      resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 2**20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, peak = map(float, done.stdout.split("RESULT")[1].split())
    assert peak < 1.5 and seconds < 30, done.stdout  # a few seconds where nothing else runs
