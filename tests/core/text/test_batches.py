"""
The batches of training: every piece once a pass, the same at each resume, shared by ranks, documents apart.

Tokens of a text here are all different, so that each says where it stands.
"""
import hashlib
import json
import resource
import shutil
import tempfile
from collections import Counter
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import put_meta, put_split, write_dataset, write_shards
from hypothesis import given, settings, strategies as st

from nanoheads.batches import Batches, DocumentBatches, PackedBatches
from nanoheads.common import UserError
from nanoheads.dataset import Dataset
from nanoheads.files import sha256

END, SEPARATOR = 0, 10  # the byte behind a document; the one that the first token of a text is predicted from


@pytest.fixture(scope="module")
def folder():
    """make(text) -> the Dataset of a text in bytes, of documents that end with END."""
    with tempfile.TemporaryDirectory() as root:
        numbers = count()

        def make(text):
            path = write_dataset(Path(root) / str(next(numbers)), dict(train=text, val=text, test=text))
            put_meta(path, options=dict(separator=chr(END)))
            return Dataset(path)
        yield make


def parts_of(batch):
    return batch if isinstance(batch, tuple) else (batch,)


def check_resume_and_ranks(make, steps, rows):
    """Any order of steps gives the same batches, and `world` ranks have the rows of one in turn."""
    batches = make()
    first = [parts_of(batches(step)) for step in range(steps)]
    again = make()
    for step in reversed(range(steps)):
        for world in range(1, min(3, rows) + 1):
            for rank in range(world):
                for mine, all_rows in zip(parts_of(again(step, rank, world)), first[step]):
                    assert torch.equal(mine, all_rows[rank::world])


# ---- a text as a whole ----

@settings(max_examples=25)
@given(st.data())
def test_each_pass_reads_each_piece_once(folder, data):
    n = data.draw(st.integers(4, 256))
    T, rows = data.draw(st.integers(1, n // 2)), data.draw(st.integers(1, 9))
    seed = data.draw(st.integers(0, 2**31))
    batches, pieces = Batches(folder(bytes(range(n))), "train", T, rows, seed), n // T - 1
    read = torch.cat([batches(step) for step in range(-(-3 * pieces // rows))])
    assert (read.diff(dim=1) == 1).all() and read.shape[1] == T + 1  # the tokens, each with the one after it
    for number in range(3):
        starts = sorted(read[number * pieces:(number + 1) * pieces, 0].tolist())
        assert starts[0] < T and np.diff(starts).tolist() == [T] * (pieces - 1)
    assert batches.tokens(7) == 7 * rows * T and batches.n_scored(7) is None
    check_resume_and_ranks(lambda: Batches(batches.dataset, "train", T, rows, seed), 5, rows)


def test_passes_and_seeds_differ(folder):
    text = folder(bytes(range(256)))
    orders = {tuple(Batches(text, "train", 2, 127, seed)(step)[:, 0].tolist())
              for seed in range(3) for step in range(3)}
    assert len(orders) == 9 and not any(list(order) == sorted(order) for order in orders)


# ---- documents ----

@st.composite
def documents(draw):
    """Documents of tokens that are all different, each with END behind it; a row's length; the shortest."""
    sizes = draw(st.lists(st.integers(1, 60), min_size=2, max_size=12))
    tokens, texts = iter(range(SEPARATOR + 1, 256)), []
    for size in sizes:
        text = bytes(token for token, _ in zip(tokens, range(size)))
        texts += [text + bytes([END])] if text else []
    T = draw(st.integers(2, 40))
    shortest = draw(st.integers(1, min(T, max(map(len, texts)))))
    return texts, T, shortest


def is_part(before, part, text):
    """Whether a row reads this part of a document, after the token before it or the separator."""
    at = text.find(part) if part[:1] != bytes([END]) else len(text) - 1
    return at >= 0 and before == (text[at - 1] if at else SEPARATOR)


@settings(max_examples=25)
@given(documents(), st.integers(0, 2**31), st.booleans())
def test_a_row_is_a_document_alone(folder, drawn, seed, few_widths):
    texts, T, shortest = drawn
    data = folder(b"".join(texts))
    batches = DocumentBatches(data, "train", T, 1, seed, shortest, few_widths)
    long_enough = [text for text in texts if len(text) >= shortest]
    wanted, read, tokens = Counter(b"".join(long_enough)), Counter(), 0
    for step in count():  # a pass
        row, = batches(step)
        n = int((row[1:] >= 0).sum())
        assert 1 <= n <= T and (row[1 + n:] == -1).all() and len(row) - 1 <= T
        part = bytes(row[1:1 + n].tolist())
        assert any(is_part(int(row[0]), part, text) for text in long_enough)
        assert part in long_enough or any(part in text and len(text) > T for text in long_enough)
        assert batches.n_scored(step) == n and batches.tokens(step) == tokens
        read.update(part)
        tokens += n
        if tokens >= sum(wanted.values()):
            break
    assert read == wanted  # each token of each document once
    rows = min(3, len(long_enough))
    check_resume_and_ranks(lambda: DocumentBatches(data, "train", T, rows, seed, shortest, few_widths),
                           4, rows)


@settings(max_examples=40)
@given(documents(), st.integers(0, 2**31), st.booleans())
def test_documents_in_a_row_do_not_meet(folder, drawn, seed, cut):
    texts, T, shortest = drawn
    long_enough = [text for text in texts if len(text) >= shortest]
    wanted = Counter(b"".join(long_enough))
    total = sum(wanted.values()) // T * T if cut else sum(wanted.values())
    data = folder(b"".join(texts))
    if total < T and cut:
        with pytest.raises(UserError, match="fewer than the 1 of a batch"):
            PackedBatches(data, "train", T, 1, seed, shortest, cut)
        return
    batches, read = PackedBatches(data, "train", T, 1, seed, shortest, cut), Counter()
    for step in count():  # a pass
        x, y, positions = (each[0].tolist() for each in batches(step))
        assert batches.tokens(step) == sum(read.values())
        assert batches.n_scored(step) == (None if cut else sum(token >= 0 for token in y))
        begins = [i for i in range(T) if positions[i] == 0]
        for start, end in zip(begins, [*begins[1:], T]):
            part = [token for token in y[start:end] if token >= 0]
            assert positions[start:end] == list(range(end - start))
            if not part:  # padding behind the last document
                assert not cut and end == T
                continue
            assert len(part) == end - start and x[start + 1:end] == part[:-1]
            assert any(is_part(x[start], bytes(part), text) for text in long_enough)
            if not cut:  # those that fit stay whole
                assert bytes(part) in long_enough or any(bytes(part) in text and len(text) > T
                                                         for text in long_enough)
            read.update(part)
        if sum(read.values()) >= total:
            break
    assert read == wanted if not cut else read <= wanted and sum(read.values()) == total
    rows = min(3, max(1, total // T))
    check_resume_and_ranks(lambda: PackedBatches(data, "train", T, rows, seed, shortest, cut), 3, rows)


def test_rows_of_documents_hold_little_padding(articles_data):
    """Rows of similar length come together, and packed rows are nearly full; each batch says how many are."""
    data = Dataset(articles_data)

    def read(batches):
        """{a row's scored tokens} of the batches of a pass, and the share of padding that they say."""
        share = float(str(batches).split("% of it is padding")[0].split()[-1]) / 100
        steps = int(str(batches).split("a pass is ")[1].split()[0])
        targets = [batch[1] if isinstance(batch, tuple) else batch[:, 1:]
                   for batch in map(batches, range(2 * steps))]
        scored = sum((y >= 0).sum().item() for y in targets[:steps])
        assert share == pytest.approx(1 - scored / sum(y.numel() for y in targets[:steps]), abs=6e-4)
        lengths = [sorted(n for y in part for n in (y >= 0).sum(1).tolist())
                   for part in (targets[:steps], targets[steps:])]
        return share, targets, lengths

    padded, targets, lengths = read(DocumentBatches(data, "train", 512, 8, 1, 8))
    assert padded < 0.15 and lengths[0] != lengths[1], "a pass cuts long documents anew"
    few = read(DocumentBatches(data, "train", 512, 8, 1, 8, few_widths=True))[1]
    assert all((a[:, :b.size(1)] == b).all() for a, b in zip(few, targets)), "the same rows, padded further"
    assert {y.size(1) for y in few} <= {8, 16, 24, 32, 48, 64, 96, 128, 184, 256, 368, 512}
    assert read(PackedBatches(data, "train", 512, 3, 5, 1, cut=True))[0] == 0
    for T in (64, 512):
        assert read(PackedBatches(data, "train", T, 3, 5, 8, cut=False))[0] < 0.1
    for make in (DocumentBatches, PackedBatches):
        first, other = (make(data, "train", 64, 8, seed, 8, False)(3) for seed in (1, 2))
        assert not torch.equal(parts_of(first)[0][:, :5], parts_of(other)[0][:, :5])


# ---- a text in shards ----

@settings(max_examples=15)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 20),
       st.sampled_from(["llm.c", "plain"]))
def test_batches_of_shards_are_those_of_one_file(sizes, T, kind):
    tokens = np.random.default_rng(0).integers(1, 256, sum(sizes) + 2 * T)
    parts, text = np.split(tokens, np.cumsum(sizes)), tokens.astype("u1").tobytes()
    with tempfile.TemporaryDirectory() as root:
        elsewhere = Path(root) / "elsewhere"
        data = Dataset(write_shards(Path(root) / "shards", dict(train=parts, val=parts), kind, elsewhere))
        one = write_dataset(Path(root) / "one", dict(train=text, val=text, test=text))
        read, whole = data.tokens("train"), Dataset(one).tokens("train")
        assert len(read) == len(whole) and np.array_equal(read, whole)
        for start in range(0, len(tokens), 7):
            assert read[start:start + T].tolist() == whole[start:start + T].tolist()
        ours, theirs = (Batches(each, "train", T, 3, 1) for each in (data, Dataset(one)))
        assert all(torch.equal(ours(step), theirs(step)) for step in range(9))


# ---- as before ----

def test_the_batches_are_those_of_runs_that_go_on():
    """A checkpoint of an earlier version resumes with the batches that it would have had."""
    text = b"".join(b"%d plus %d is %d.\n" % (i % 13, i % 7, i % 13 + i % 7) * (1 + i * i % 5) + b"\n"
                    for i in range(300))

    def sha(batches):
        found = hashlib.sha256()
        for step in range(100):
            for part in parts_of(batches(step)):
                found.update(part.numpy().tobytes())
        return found.hexdigest()[:16]

    with tempfile.TemporaryDirectory() as root:
        data = Dataset(write_dataset(Path(root) / "sums", dict(train=text, val=text[:500], test=text[:300])))
        assert sha(Batches(data, "train", 24, 6, 3)) == "cea761b48e21afc0"
        assert sha(DocumentBatches(data, "train", 40, 6, 3, 15)) == "2d4837a05b857a21"
        assert sha(DocumentBatches(data, "train", 48, 6, 3, 15, few_widths=True)) == "b07a8d1996c6183d"
        assert sha(PackedBatches(data, "train", 48, 6, 3, 15, cut=False)) == "04452ee7a0ac4a58"
        assert sha(PackedBatches(data, "train", 48, 6, 3, 15, cut=True)) == "a858ff88a4d5569a"


# ---- refusals, memory ----

@pytest.mark.parametrize("token, action, words", [
    (3, lambda data: Batches(data, "train", 751, 4, 0), "block_size=751 needs at least 1,502 tokens of"),
    (10, lambda data: Batches(data, "train", 16, 4, 0)(0), "the token 10, and the vocabulary ends at 9"),
    (3, lambda data: DocumentBatches(data, "train", 16, 4, 0, 9), "has no documents: no end-of-text token")])
def test_what_cannot_be_read_is_one_line(token, action, words, chars_data, tmp_path):
    folder = Path(shutil.copytree(chars_data, tmp_path / "copy"))
    put_split(folder, "train", np.full(1500, token, "<u2").tobytes())
    with pytest.raises(UserError) as e:
        action(Dataset(folder))
    assert words in str(e.value) and "\n" not in str(e.value)


def resident():
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_a_pass_over_a_large_file_keeps_memory_bounded(tmp_path):
    """100 MB, sparse; the file's pages would all stay resident in one mapping."""
    sizes = dict(train=100 << 20, val=1000, test=1000)
    for split, n in sizes.items():
        with open(tmp_path / f"{split}.bin", "wb") as file:
            file.truncate(n)
    splits = {split: dict(tokens=n, bytes=n, sha256=sha256(tmp_path / f"{split}.bin"))
              for split, n in sizes.items()}
    meta = dict(name="large", encoding="byte", vocab_size=256, dtype="uint8", separator=10, splits=splits)
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    batches = Batches(Dataset(tmp_path), "train", 4096, 64, 0)
    batches(0)
    before = most = resident()
    for step in range(1, batches.pieces // 64):
        batches(step)
        most = max(most, resident())
    assert most - before < 75 << 20
