"""Scores: every token once, in the context that the policy grants, against an oracle of single positions."""
import functools
import json
import math
import re
import subprocess
import sys
from dataclasses import asdict
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evaluate
import helpers
from helpers import ROOT, put_meta, put_split, write_dataset
from helpers import byte_pairs
from evaluate import compare_reports, main, score_table
from model import GPT, CausalSelfAttention, GPTConfig, Output
from nanoheads import checkpoint, dataset, scoring, corpus
from nanoheads.common import UserError
from nanoheads.dataset import Dataset
from nanoheads.scoring import nats_of, nats_of_last, score, windows
from nanoheads.tokenizer import Tokenizer

VOCAB = [chr(c) for c in range(97, 108)] + ["\n", "é"]
KEYS = {"name", "split", "tokens", "bytes", "nats_per_token",
        "ppl", "words", "word_ppl", "bpb", "bpc", "params", "params_non_embedding",
        "flops_per_token", "tokens_per_s", "context"}


def write_data(folder, encoding="byte", n=23, sizes=None, seed=0):
    """A data folder whose splits hold n random tokens each; sizes: {"bytes": .., "chars": ..} of a split."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab, dtype, symbols, separator = dict(byte=(None, "uint8", 256, 10),
                                            char=(VOCAB, "uint16", len(VOCAB), 11),
                                            gpt2=(None, "uint16", 50257, 50256))[encoding]
    counts = dict(tokens=n, bytes=n, chars=n) | (sizes or {})
    meta = dict(name=folder.name, encoding=encoding, vocab_size=symbols, dtype=dtype, separator=separator,
                splits={s: counts for s in ("train", "val", "test")}, **({"vocab": vocab} if vocab else {}))
    (folder / "meta.json").write_text(json.dumps(meta))
    for i, split in enumerate(("train", "val", "test")):
        tokens = np.random.default_rng([seed, i]).integers(0, symbols, n).astype(dtype)
        put_split(folder, split, tokens.tobytes())
    return Dataset(folder)


make_model = functools.partial(helpers.make_model, spread=8.0, noise=0.0, block_size=8, n_head=2,
                               n_embd=16)


def write_checkpoint(path, model, data, **more):
    torch.save(dict(model=model.state_dict(), config=asdict(model.config),
                    meta=data.meta, train=dict(dataset=str(data.dir)),
                    step=7, **more), path)
    return str(path)


@pytest.fixture
def byte_run(tmp_path):
    """(checkpoint path, model, Dataset) of bytes."""
    data, model = write_data(tmp_path / "toy"), make_model()
    return write_checkpoint(tmp_path / "a.pt", model, data), model, data


@torch.no_grad()
def oracle(model, data, split, stride):
    """Nats of every position, one at a time in float64, each in the context that the policy grants."""
    model, tokens, T = model.double(), [data.separator, *data.tokens(split).tolist()], model.config.block_size
    step, nats = stride or T, []
    for t in range(len(tokens) - 1):
        moves = 0 if t < T else (t - T) // step + 1  # of the window, before it first holds position t
        logits = model(torch.tensor([tokens[moves * step:t + 1]])).logits[0, -1].double()
        nats.append(-F.log_softmax(logits, -1)[tokens[t + 1]].item())
    model.float()
    return np.array(nats)


def agrees(model, data, split, stride):
    nats, count = score(model, data, split, stride)
    truth = oracle(model, data, split, stride)
    return count == len(truth) and abs(nats - truth.sum()) < 1e-4 * len(truth)


# ---- every token once, in its context ----

CASES = [(1, 8, 0), (5, 8, 0), (5, 8, 3), (8, 8, 0), (8, 8, 1),
         (16, 8, 0), (17, 8, 0), (17, 8, 8), (23, 8, 0), (23, 8, 1),
         (24, 8, 3), (17, 8, 7), (26, 8, 4), (9, 1, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
@pytest.mark.parametrize("n, block_size, stride", CASES)
def test_scores_are_those_of_one_position_at_a_time(tmp_path, n, block_size, stride, recipe):
    assert agrees(make_model(block_size=block_size, recipe=recipe, zero_init=False),
                  write_data(tmp_path, n=n), "test", stride)


def drop_the_rest(n, block_size, stride):
    return [c for c in windows(n, block_size, stride) if c[1] - c[0] == block_size]


def overlaps_twice(n, block_size, stride):
    return [(start, end, end - start) for start, end, _ in windows(n, block_size, stride)]


def less_context(n, block_size, stride):
    return [(end - scored, end, scored) for _, end, scored in windows(n, block_size, stride)]


def more_context(n, block_size, stride):
    return [(max(0, end - block_size), end, scored) for _, end, scored in windows(n, block_size, stride)]


@pytest.mark.slow
@pytest.mark.parametrize("wrong, n, stride",
                         [(drop_the_rest, 23, 0), (overlaps_twice, 23, 3),
                          (less_context, 23, 3), (more_context, 23, 0)])
def test_the_oracle_catches_a_wrong_scorer(tmp_path, monkeypatch, wrong, n, stride):
    model, data = make_model(), write_data(tmp_path, n=n)
    assert agrees(model, data, "test", stride)
    monkeypatch.setattr(scoring, "windows", wrong)
    assert not agrees(model, data, "test", stride)


def test_windows_score_each_position_once_and_in_order():
    for n in (1, 7, 8, 9, 16, 17, 40):
        for block_size in (1, 2, 8, 50):
            for stride in range(1, block_size + 1):
                cuts = windows(n, block_size, stride)
                assert [t for _, end, scored in cuts for t in range(end - scored, end)] == list(range(n))
                assert all(0 <= start < end <= start + block_size for start, end, _ in cuts)
                assert all(end - scored - start == block_size - stride for start, end, scored in cuts[1:])


@pytest.mark.parametrize("stride", [-1, 9, 100])
def test_a_stride_outside_the_window_is_refused(tmp_path, stride):
    with pytest.raises(ValueError, match=f"stride={stride} must be from 1 to block_size=8"):
        score(make_model(), write_data(tmp_path), "test", stride)


def test_the_first_token_is_conditioned_on_the_separator(tmp_path):
    data, model = write_data(tmp_path, n=1), make_model()
    with torch.no_grad():
        want = F.cross_entropy(model(torch.tensor([[10]])).logits[0],
                               torch.tensor(data.tokens("test").astype(int)))
    assert score(model, data, "test")[0] == pytest.approx(want.item(), rel=1e-6)


@pytest.mark.parametrize("stride", [0, 3])
def test_per_token_nats_are_in_the_splits_order(tmp_path, stride):
    model, data = make_model(), write_data(tmp_path, n=43)
    every = score(model, data, "test", stride, per_token=True)
    assert every.dtype == np.float32 and np.allclose(every, oracle(model, data, "test", stride), atol=1e-4)
    assert every.sum(dtype=np.float64) == pytest.approx(score(model, data, "test", stride)[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 20])  # 20: more ranks than windows
@pytest.mark.parametrize("stride, max_tokens", [(0, 0), (5, 0), (0, 20)])
def test_the_parts_of_the_ranks_sum_to_the_whole(tmp_path, world, stride, max_tokens):
    model, data = make_model(), write_data(tmp_path, n=43)
    whole = score(model, data, "test", stride, max_tokens)
    parts = [score(model, data, "test", stride, max_tokens, rank=r, world=world) for r in range(world)]
    assert np.sum(parts, axis=0) == pytest.approx(whole, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 5, 8])
@pytest.mark.parametrize("most", [1, 3, 7, 24])
def test_logits_in_portions_score_the_same(n, most):
    """A GPU computes many rows at once, and their logits at a vocabulary of 50,304 some tokens at a time."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, vocab_size=65, n_layer=1, n_head=2, n_embd=16))
    ids = torch.randint(65, (3, 9))
    with torch.no_grad():
        got, want = nats_of_last(model, ids, n, most), nats_of_last(model, ids, n)
        assert got.shape == want.shape == (3, n) and np.allclose(got, want, atol=1e-6)
        logp = model(ids[:, :-1]).logits.double().log_softmax(-1)
    assert np.allclose(want, -logp.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, -n:], atol=1e-6)


def test_a_gpu_scores_many_rows_of_a_large_vocabulary_at_once(tmp_path, monkeypatch):
    """One row of 1,024 at a time left it idle; a CPU still takes what fits its caches."""
    seen = []

    def watched(model, ids, n, most):
        seen.append((len(ids), most))
        return np.zeros((len(ids), n))
    monkeypatch.setattr(scoring, "nats_of_last", watched)
    data = SimpleNamespace(tokens=lambda split: np.zeros(64 * 1024, np.uint16), first=0)
    for kind in ("cuda", "cpu"):
        model = SimpleNamespace(config=SimpleNamespace(block_size=1024, vocab_size=50304), training=False,
                                parameters=lambda: iter([SimpleNamespace(device=SimpleNamespace(type=kind))]),
                                eval=lambda: None, train=lambda mode: None)
        monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
        score(model, data, "val")
    assert seen[0] == (16, (1 << 26) // 50304) and seen[-1] == (1, None)


@pytest.mark.slow
@pytest.mark.parametrize("batch_tokens", [1, 8, 16, 1 << 20])
@pytest.mark.parametrize("stride", [0, 3])
def test_the_batch_size_does_not_change_the_score(tmp_path, batch_tokens, stride):
    model, data = make_model(), write_data(tmp_path, n=43)
    whole = score(model, data, "test", stride)
    assert score(model, data, "test", stride, batch_tokens=batch_tokens) == pytest.approx(whole, rel=1e-6)


# ---- a part of a split ----

class Watcher(nn.Module):
    """Uniform over its vocabulary; remembers what it was given."""

    def __init__(self, vocab_size=256, block_size=8):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.config = GPTConfig(vocab_size=vocab_size, block_size=block_size)
        self.seen = []

    def forward(self, idx):
        self.seen.append(idx.clone())
        return Output(torch.zeros(*idx.shape, self.config.vocab_size), None, {}, None)


def windows_read(data, stride, max_tokens, block_size=8):
    """First positions of the windows that score() reads; the tokens of `data` are their own positions."""
    model = Watcher(data.vocab_size, block_size)
    _, count = score(model, data, "test", stride, max_tokens)
    return [-1 if row[0] == data.separator else int(row[0]) for x in model.seen for row in x], count


@pytest.fixture
def numbered(tmp_path):
    """203 tokens, each its own position."""
    write_data(tmp_path, "gpt2", n=203)
    put_split(tmp_path, "test", np.arange(203, dtype="uint16").tobytes())
    return Dataset(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stride, max_tokens", [(0, 40), (0, 16), (0, 193), (4, 60), (1, 50)])
def test_max_tokens_takes_evenly_spaced_windows_from_the_first_to_the_last(numbered, stride, max_tokens):
    starts, count = windows_read(numbered, stride, max_tokens)
    gaps, step = np.diff(starts), stride or 8
    assert starts[0] == -1 and 0 <= 203 - (starts[-1] + 1 + 8) < step and gaps.max() - gaps.min() <= step
    assert gaps.min() > 0
    assert max_tokens - step < count <= max_tokens and (count - 8) % step == 0  # whole windows
    assert windows_read(numbered, stride, max_tokens) == (starts, count)  # the same at each call


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [0, 203, 10 ** 9])
def test_max_tokens_of_zero_or_beyond_the_split_is_the_whole_split(numbered, max_tokens):
    assert windows_read(numbered, 0, max_tokens)[1] == 203


def test_max_tokens_below_one_window_takes_one_window(numbered):
    assert windows_read(numbered, 0, 3)[1] == 8
    assert windows_read(numbered, 0, 3, block_size=500)[1] == 203  # the split is shorter than a window


def test_batches_stay_within_batch_tokens(numbered):
    model = Watcher(numbered.vocab_size)
    score(model, numbered, "test", batch_tokens=33)
    assert {tuple(x.shape) for x in model.seen} == {(4, 8), (1, 8), (1, 3)}


# ---- the numbers ----

def test_a_uniform_model_gives_exactly_8_bits_per_byte(tmp_path, capsys):
    data = write_data(tmp_path / "toy", n=1001)
    # its head starts at zero
    path = write_checkpoint(tmp_path / "a.pt", make_model(recipe="modern", block_size=64), data)
    for stride in ("0", "5"):
        main(["--ckpt", path, "--stride", stride, "--json", str(tmp_path / "s.json")])
        run = json.loads((tmp_path / "s.json").read_text())["runs"][0]
        assert run["bpb"] == pytest.approx(8, abs=1e-12) and run["ppl"] == pytest.approx(256, abs=1e-9)
        assert "  8.0000  " in capsys.readouterr().out


def test_nats_stay_exact_where_logits_are_large():
    logits = torch.randn(3, 50, 300, generator=torch.Generator().manual_seed(0)) * 1e3
    targets = torch.arange(150).view(3, 50)
    want = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none")
    assert np.allclose(nats_of(logits, targets).ravel(), want, rtol=1e-6)


@pytest.mark.slow
def test_bytes_and_characters_come_from_meta_not_from_the_token_count(tmp_path):
    data = write_data(tmp_path / "bpe", "gpt2", n=17, sizes=dict(bytes=70, chars=60))
    path = write_checkpoint(tmp_path / "a.pt", make_model(vocab_size=50257), data)
    run = scoring.evaluate(path, "test", 0, "cpu", progress=False)
    nats, count = score(make_model(vocab_size=50257), data, "test")
    assert (run["tokens"], run["bytes"], run["chars"]) == (count, 70, 60) == (17, 70, 60)
    assert run["nats_per_token"] == pytest.approx(nats / 17)
    assert run["ppl"] == pytest.approx(math.exp(nats / 17))
    assert run["bpb"] == pytest.approx(nats / math.log(2) / 70)
    assert run["bpc"] == pytest.approx(nats / math.log(2) / 60)


def test_the_perplexity_of_a_word_is_that_of_the_splits_words(tmp_path, capsys):
    write_data(tmp_path / "toy", n=60)
    text = b"one two  three\nfour five six seven eight nine ten, 11 12 13."
    put_split(tmp_path / "toy", "test", text)
    data = Dataset(tmp_path / "toy")
    path = write_checkpoint(tmp_path / "a.pt", make_model(spread=2.0), data)
    run = scoring.evaluate(path, "test", 0, "cpu", progress=False)
    assert run["words"] == len(text.split()) == 13
    assert run["word_ppl"] == pytest.approx(math.exp(run["nats_per_token"] * 60 / 13))
    main(["--ckpt", path])
    said = f"perplexity of a word, of 13 parted by whitespace: {run['word_ppl']:.6g}"
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_words_of_gpt2_tokens_are_not_counted_where_that_needs_a_download(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "HOME", tmp_path)
    monkeypatch.delenv("NANOHEADS_DATA", raising=False)
    data = write_data(tmp_path / "bpe", "gpt2", n=17)
    path = write_checkpoint(tmp_path / "a.pt", make_model(vocab_size=50257), data)
    run = scoring.evaluate(path, "test", 0, "cpu", progress=False)
    assert run["words"] is run["word_ppl"] is None and "word" not in score_table([run])


def test_chosen_windows_are_those_of_the_whole_list():
    """They are made one by one; here all are made, and then chosen."""
    def by_hand(n, block_size, stride, most):
        whole, step = windows(n, block_size, stride or block_size), stride or block_size
        if not 0 < most < n:
            return whole
        full = [cut for cut in whole if cut[1] - cut[0] == block_size] or whole
        count = max(1, 1 + (most - block_size) // step)
        return [full[i * (len(full) - 1) // max(1, count - 1)] for i in range(count)]
    for n, block_size, most in product((1, 7, 8, 9, 31, 100), (1, 3, 8, 20), (0, 1, 8, 20, 50, 99)):
        data = SimpleNamespace(tokens=lambda split, n=n: range(n))
        for stride in range(block_size + 1):
            found = scoring.windows_of(data, "test", block_size, stride, most)
            assert found == by_hand(n, block_size, stride, most)


def test_a_separator_of_documents_is_no_text(gpt2_files, tmp_path):
    """Of a part of a split, as in the bytes that data/openwebtext counts; in bytes a newline is text."""
    tokenizer = Tokenizer("gpt2")
    first, second = (tokenizer.encode(text).tolist() for text in ("The river is", "wide. So"))
    ids = np.array([*first, 50256, *second, 50256])
    data = SimpleNamespace(tokens=lambda split: ids, tokenizer=tokenizer, separator=50256)
    cuts = scoring.windows(len(ids), 4, 4)
    assert b"".join(scoring.scored_text(data, "test", cuts)) == b"The river iswide. So"
    assert scoring.count_words(data, "test") == 5 + 1  # and what follows the last separator
    plain = SimpleNamespace(tokens=lambda split: np.frombuffer(b"a\nb", np.uint8), separator=10,
                            tokenizer=Tokenizer("byte"))
    assert scoring.scored_text(plain, "test", [(0, 3, 3)]) == [b"a\nb"]


SPACED = "", "a", " ", " a  b\n\n c", "a b ", "\u3000é \xa0\u2003x\n", " \n" * 9 + "ab c"


@pytest.mark.parametrize("text", SPACED)
@pytest.mark.parametrize("piece", [1, 2, 3, 1000])
def test_words_are_counted_as_by_lm_evaluation_harness(text, piece):
    """Whatever pieces the split is read in; the harness's count is that of re.split()."""
    ids = np.frombuffer(text.encode(), np.uint8)
    data = SimpleNamespace(tokens=lambda split: ids, tokenizer=Tokenizer("byte"), separator=10)
    assert scoring.count_words(data, "test", piece) == len(re.split(r"\s+", text))


def test_the_json_holds_every_promised_key_for_every_checkpoint_in_order(tmp_path, byte_run, capsys):
    path, model, data = byte_run
    (tmp_path / "run").mkdir()
    write_checkpoint(tmp_path / "run/best.pt", make_model(n_layer=1), data)
    main(["--ckpt", path, "--ckpt", str(tmp_path / "run"), "--split",
          "val", "--stride", "2", "--json", str(tmp_path / "s.json")])
    runs = json.loads((tmp_path / "s.json").read_text())["runs"]
    assert [r["name"] for r in runs] == [path, str(tmp_path / "run")] and all(KEYS <= set(r) for r in runs)
    assert {r["context"] for r in runs} == {"windows of 8, stride 2"}
    assert {r["split"] for r in runs} == {"val"}
    nats, count = score(model, data, "val", 2)
    assert runs[0]["nats_per_token"] == nats / count and runs[0]["tokens"] == runs[0]["bytes"] == count == 23
    assert runs[0]["params"] == sum(p.numel() for p in model.parameters())
    assert runs[0]["flops_per_token"] == model.flops_per_token()
    assert runs[0]["params_non_embedding"] == model.num_params(non_embedding=True)
    assert runs[0]["tokens_per_s"] > 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "s.json")


@pytest.mark.parametrize("stride, context", [("0", "disjoint windows of 8"),
                                             ("8", "disjoint windows of 8"), ("3", "windows of 8, stride 3")])
def test_the_context_policy_is_named(byte_run, capsys, stride, context):
    main(["--ckpt", byte_run[0], "--stride", stride])
    scored, *_ = capsys.readouterr().out.splitlines()
    assert scored == f"toy, test: 23 tokens, 23 bytes, 23 characters, each once, in {context}"


# ---- nothing but the weights and the data matters ----

def test_scores_are_the_same_each_time_and_whatever_the_training_rng_is(tmp_path):
    model, data = make_model(dropout=0.5).train(), write_data(tmp_path)
    torch.manual_seed(1)
    first, state = score(model, data, "test"), torch.get_rng_state()
    torch.manual_seed(2)
    assert score(model, data, "test") == first == score(model.eval(), data, "test")
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)  # scoring drew nothing


@pytest.mark.parametrize("mode", [True, False])
def test_the_model_returns_to_its_mode(tmp_path, mode):
    model, data = make_model().train(mode), write_data(tmp_path)
    score(model, data, "test")
    assert model.training is mode
    data.first = 999  # no such token: the forward pass fails
    with pytest.raises(IndexError):
        score(model, data, "test")
    assert model.training is mode


def test_no_gradient_is_kept(tmp_path):
    model = make_model()
    score(model, write_data(tmp_path), "test")
    assert all(p.grad is None for p in model.parameters()) and torch.is_grad_enabled()


def test_autocast_is_used_and_changes_little(tmp_path):
    model, data = make_model(spread=3.0), write_data(tmp_path, n=200)
    plain, low = (score(model, data, "test", autocast=a)[0]
                  for a in (None, torch.autocast("cpu", torch.bfloat16)))
    assert plain != low and low == pytest.approx(plain, rel=0.02)


# ---- the table ----

def fake_run(name, **more):
    return dict(dict(name=name, dataset="enwik8", split="test",
                     tokens=5000000, bytes=5000000, chars=4978313, words=793210,
                     context="windows of 1,024, stride 128", word_ppl=135.4213,
                     bpb=1.12345, bpc=1.12834, nats_per_token=0.77871,
                     ppl=2.17868, params=124439808, params_non_embedding=123653376,
                     flops_per_token=8.5e8, tokens_per_s=123456.7, of=5000000, heads=[12, 12], routing=[],
                     pieces=np.full(1220, 4096 * 0.77871), split_sha256="s", stride=128, block_size=1024,
                     step=20000, tokens_a_step=None, separator=10),
                **more)


def test_the_table_is_aligned_in_the_order_given_and_fits_120_columns():
    names = ["out/enwik8_seed3", "out/b/best.pt",
             "/a/very/long/path/to/some/experiments/folder/seed2/best.pt"]
    lines = score_table([fake_run(n, bpb=b, ppl=3.2e9) for n, b in zip(names, (2, 1, 3))]).splitlines()
    assert max(map(len, lines)) <= 120 and len(set(map(len, lines[1:5]))) == 1
    assert lines[2].startswith("out/enwik8_seed3 ") and lines[3].startswith("out/b ")
    assert lines[4].startswith("…")
    assert "folder/seed2 " in lines[4]
    assert [line.split()[1] for line in lines[2:5]] == ["2.0000", "1.0000", "3.0000"]
    for title in evaluate.HEAD[1:]:
        # numbers end under their titles
        assert all(line[lines[1].index(title) + len(title) - 1] != " " for line in lines[2:5])
    assert lines[5] == "perplexity of a word, of 793,210 parted by whitespace: 135.421, 135.421, 135.421"


def test_what_was_scored_is_said_again_where_it_changes():
    lines = score_table([fake_run("a"), fake_run("b"), fake_run("c", dataset="bpe", tokens=9)]).splitlines()
    assert [line.split(":")[0] for line in lines if "each once" in line] == ["enwik8, test", "bpe, test"]
    names = [line[0] for line in lines if line and line[0] in "abc" and "each" not in line]
    assert names == ["a", "b", "c", "b", "c"]  # then those beside the first


# ---- compared ----

def scored_pair(tmp_path, capsys, *more, first=(), **other):
    """(what is printed, the json) of two checkpoints on one text; first, other: flags of the two."""
    data = write_data(tmp_path / "data", n=600)
    for name, flags in (("a", dict(first)), ("b", other)):
        write_checkpoint(tmp_path / f"{name}.pt", make_model(spread=2.0, **flags), data)
    args = [arg for name in "ab" for arg in ("--ckpt", str(tmp_path / f"{name}.pt"))]
    main([*args, "--json", str(tmp_path / "s.json"), *more])
    return capsys.readouterr().out, json.loads((tmp_path / "s.json").read_text()), data


def test_two_checkpoints_are_compared_token_by_token(tmp_path, capsys):
    out, found, data = scored_pair(tmp_path, capsys, n_layer=1)
    (less,), (a, b) = found["less_the_first"], found["runs"]
    assert less["bpb"][0] == pytest.approx(b["bpb"] - a["bpb"], abs=1e-6)
    assert less["percent"] == pytest.approx(100 * (b["bpb"] - a["bpb"]) / a["bpb"], abs=1e-4)
    assert less["params"] == b["params"] / a["params"] < 1 and "pieces" not in a
    # the interval over text is that of the mean of its parts, drawn again
    each = [score(checkpoint.build(checkpoint.read(tmp_path / f"{name}.pt"), name), data, "test",
                  per_token=True).astype(float) for name in "ab"]
    piece = len(each[0]) // 64
    parts = np.add.reduceat(each[1] - each[0], np.arange(len(each[0]) // piece) * piece)
    half = 2 * parts.std() * len(parts) ** 0.5 / (a["bytes"] * math.log(2))
    assert less["bpb"][2] - less["bpb"][1] == pytest.approx(2 * half, rel=0.3)
    assert f"{less['bpb'][0]:+.4f} [{less['bpb'][1]:+.4f}, {less['bpb'][2]:+.4f}]" in out
    assert f"{b['params'] - a['params']:+,}" in out and "heads at work" not in out


def test_the_difference_is_given_per_character_too():
    a, b = fake_run("a", bytes=30, chars=20), fake_run("b", bytes=30, chars=20)
    b["pieces"] = [nats + 0.1 for nats in b["pieces"]]
    found = compare_reports(b, a)
    assert found["bpb"][0] > 0 and found["bpc"] == pytest.approx([1.5 * value for value in found["bpb"]])
    assert f"  {found['bpc'][0]:+.4f}  " in score_table([a, b]) and "bits/char" in score_table([a, b])


def test_a_checkpoint_beside_itself_differs_by_nothing(tmp_path, capsys):
    out, found, _ = scored_pair(tmp_path, capsys)
    assert found["less_the_first"][0]["bpb"] == [0.0, 0.0, 0.0] and "+0.0000 [+0.0000, +0.0000]" in out


def test_other_text_is_not_compared():
    lines = score_table([fake_run("a"), fake_run("b", split="val"), fake_run("c", bpb=2.0)]).splitlines()
    assert any(line.startswith("b ") and "other text: not compared" in line for line in lines)
    assert any(line.startswith("c ") and "+0.0000 [+0.0000, +0.0000]" in line for line in lines)


@pytest.mark.parametrize("other, words", [
    (dict(bytes=5500000), "scored bytes: 5,500,000 and 5,000,000"),
    (dict(tokens=9), "scored tokens: 9 and 5,000,000"), (dict(split_sha256="t"), "the sha256 of the split"),
    (dict(separator=0), "the token before the first: 0 and 10"),
    (dict(split="val"), "the split: val and test"), (dict(dataset="x"), "the data set: x and enwik8")])
def test_what_keeps_two_checkpoints_from_being_compared_is_said(other, words):
    reports = [fake_run("a"), fake_run("b", **other)]
    lines = score_table(reports).splitlines()
    assert f"Not compared with a, since the scored text differs: b ({words})." in lines
    assert evaluate.compare_reports(*reports[::-1]) is None
    row, = (line for line in lines if line.startswith("b ") and "other text: not compared" in line)
    assert row.split()[-4:] == ["–"] * 4


def test_other_tokens_in_as_many_steps_are_said():
    lines = score_table([fake_run("a", tokens_a_step=4096), fake_run("b", tokens_a_step=8192),
                         fake_run("c")]).splitlines()
    said = "The checkpoints were trained on different numbers of tokens in each step: a 4,096, b 8,192, c –."
    assert said in lines
    lines = score_table([fake_run("a", tokens_a_step=4096), fake_run("c")]).splitlines()
    assert not any("tokens in each step" in line for line in lines)


@pytest.mark.parametrize("train, tokens", [
    (dict(batch_size=4, grad_accum=2), 128), (dict(batch_size=4), None), (None, None),
    (dict(batch_size=4, grad_accum=2, documents=8), None)])
def test_the_tokens_of_a_step_are_those_of_the_whole_batch(train, tokens):
    assert scoring.tokens_a_step(dict(train=train), 16) == tokens


def test_a_part_of_the_split_is_a_quick_look(tmp_path, capsys):
    """Evenly spaced windows, whose bytes and characters are counted; the output says what it is."""
    out, found, data = scored_pair(tmp_path, capsys, "--tokens", "80", "--batch_size", "3", n_layer=1)
    run, n = found["runs"][0], len(data.tokens("test"))
    assert run["tokens"] == run["bytes"] == 80 < n and run["words"] is None
    cuts = scoring.windows_of(data, "test", run["block_size"], max_tokens=80)
    text = b"".join(scoring.scored_text(data, "test", cuts))
    assert run["chars"] == sum(byte & 0xC0 != 0x80 for byte in text) < 80  # cut at window's edges or not
    assert out.startswith(f"data, test: 80 of {n:,} tokens") and "a quick look, not the split's score" in out
    model = checkpoint.build(checkpoint.read(tmp_path / "a.pt"), "a")
    assert run["nats_per_token"] == pytest.approx(score(model, data, "test", max_tokens=80)[0] / 80, abs=1e-9)


ACCENTS = "un cafe\u0301 a\u0300 la cre\u0300me, s'il te plai\u0302t; a cup of tea. 日本\n" * 9


def without_the_space():
    """A tokenizer.json of SentencePiece's kind that lacks the marker for spaces: each becomes three bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab.update({c: 256 + i for i, c in enumerate("abcdefghijkl")})
    space = dict(type="Replace", pattern=dict(String=" "), content="\u2581")
    return json.dumps(dict(
        version="1.0", truncation=None, padding=None, added_tokens=[], normalizer=space, pre_tokenizer=None,
        post_processor=None, decoder=dict(type="ByteFallback"),
        model=dict(type="BPE", vocab=vocab, merges=[], byte_fallback=True)))


@pytest.fixture(params=["NFC", "no space"])
def misspelt(request, tmp_path):
    """(Dataset, text of its test split) whose tokens do not spell the text's own bytes."""
    if request.param == "no space":
        vocab, text = without_the_space(), "a cup of tea, or two\n" * 20
    else:
        vocab, text = byte_pairs(ACCENTS, r" ?\S+|\s", normalizer="NFC"), "a cup " + ACCENTS
    return Dataset(write_dataset(tmp_path / "data", dict(train=text, val=text, test=text), "hf", vocab)), text


def test_bytes_are_those_of_the_text_also_where_its_tokens_spell_others(misspelt):
    """Of each part of a split, by the tokenizer's own offsets; the parts add up to the whole."""
    data, text = misspelt
    tokens, whole = data.tokens("test"), data.splits["test"]
    assert whole["bytes"] == len(text.encode()) and whole["chars"] == len(text) and not data.meta["spelled"]
    spelled = data.tokenizer.decode_bytes(tokens)
    assert len(spelled) != whole["bytes"]  # negative control
    begins = [start for start, _ in data.tokenizer.encode_hf(text).offsets] + [len(text)]
    for size in (1, 7, 40):
        parts = [scoring.text_size(data, "test", [cut]) for cut in windows(len(tokens), size, size)]
        assert np.sum(parts, 0).tolist() == [whole["bytes"], whole["chars"]]
        for (start, end, _), found in zip(windows(len(tokens), size, size), parts):
            own = text[begins[start]:begins[end]]
            assert found == (len(own.encode()), len(own))


def test_one_model_has_one_number_of_bits_per_byte(misspelt, tmp_path, capsys):
    """A uniform model, on the whole split and on parts of it, in evaluate.py and in a study."""
    data, text = misspelt
    model = make_model(vocab_size=data.vocab_size, block_size=16)
    nn.init.zeros_(model.lm_head.weight)
    path = write_checkpoint(tmp_path / "a.pt", model, data)
    size, n = len(text.encode()), len(data.tokens("test"))
    main(["--ckpt", path, "--json", str(tmp_path / "whole.json")])
    main(["--ckpt", path, "--json", str(tmp_path / "part.json"), "--tokens", "64"])
    whole, part = (json.loads((tmp_path / f"{name}.json").read_text())["runs"][0]
                   for name in ("whole", "part"))
    assert whole["bpb"] == pytest.approx(n * math.log2(data.vocab_size) / size)
    assert whole["words"] is None  # they are not in the tokens
    assert "note: the encoding changes the text: the tokens of" in capsys.readouterr().out
    begins = [start for start, _ in data.tokenizer.encode_hf(text).offsets] + [len(text)]
    cuts = scoring.windows_of(data, "test", 16, max_tokens=64)
    own = sum(len(text[begins[start]:begins[end]].encode()) for start, end, _ in cuts)
    assert part["bytes"] == own and part["bpb"] == pytest.approx(64 * math.log2(data.vocab_size) / own)
    _, studied = scoring.score_windows(model, data, "test", 64)
    assert studied["bytes"] == own and studied["bpb"] == pytest.approx(part["bpb"])


def test_a_folder_that_does_not_say_what_its_tokens_stand_for_is_one_line(misspelt):
    data, _ = misspelt
    cuts = windows(8, 8, 8)
    (data.dir / "test.sizes.bin").unlink()
    with pytest.raises(UserError, match="test.sizes.bin is not there, which meta.json describes; run its"):
        scoring.text_size(data, "test", cuts)
    meta = data.meta.copy()
    for split in meta["splits"].values():  # as folders were written before there were such files
        del split["sizes_sha256"]
    del data.meta["spelled"]
    with pytest.raises(UserError, match="spell .* bytes where its text has .*; run its prepare script with"):
        scoring.text_size(data, "test", cuts)


# of 600 tokens there are 18 whole windows of 32: the first, the middle and the last of them
CHOSEN = [*range(0, 32), *range(256, 288), *range(544, 576)]


@pytest.mark.slow
@pytest.mark.parametrize("first, other", [(16, 32), (32, 16), (32, 12)])  # 12: its windows end elsewhere
def test_a_part_of_the_split_is_the_same_tokens_for_unequal_contexts(tmp_path, capsys, first, other):
    out, found, data = scored_pair(tmp_path, capsys, "--tokens", "96", first=dict(block_size=first),
                                   block_size=other)
    losses = []
    for name, context, run in zip("ab", (first, other), found["runs"]):
        model = checkpoint.build(checkpoint.read(tmp_path / f"{name}.pt"), name)
        each = score(model, data, "test", max_tokens=96, longest=32, per_token=True)
        by_hand = oracle(model, data, "test", 0)[CHOSEN]  # as they are scored in the whole split
        assert each.shape == by_hand.shape and np.allclose(each, by_hand, atol=1e-4)
        assert run["tokens"] == run["bytes"] == 96 and run["block_size"] == context
        assert run["nats_per_token"] == pytest.approx(by_hand.mean(), abs=1e-5)
        losses.append(by_hand)
    less, = found["less_the_first"]
    assert less["bpb"][0] == pytest.approx((losses[1] - losses[0]).mean() / math.log(2), abs=1e-5)
    assert "not compared" not in out and f"b.pt {other}." in out and "contexts of different lengths" in out
    # negative control: tokens chosen by a shorter context's own windows are others
    i = int(first == 32)  # the model of the shorter context
    shorter = checkpoint.build(checkpoint.read(tmp_path / f"{'ab'[i]}.pt"), "")
    alone = score(shorter, data, "test", max_tokens=96, per_token=True)
    assert len(alone) == 96 and abs(alone.mean() - losses[i].mean()) > 1e-3


@pytest.mark.slow
def test_with_a_stride_too_the_tokens_are_the_same_for_unequal_contexts(tmp_path):
    data = write_data(tmp_path, n=100)  # windows of 32 that score their last 5: ends are 32, 37, ..., 97
    chosen = [*range(0, 32), *range(57, 62), *range(92, 97)]
    for context in (32, 16, 7):
        model = make_model(block_size=context)
        each = score(model, data, "test", 5, max_tokens=42, longest=32, per_token=True)
        assert np.allclose(each, oracle(model, data, "test", 5)[chosen], atol=1e-4)


@pytest.mark.slow
def test_over_whole_splits_unequal_contexts_are_compared_on_all_tokens(tmp_path, capsys):
    out, found, data = scored_pair(tmp_path, capsys, first=dict(block_size=16), block_size=32)
    models = [checkpoint.build(checkpoint.read(tmp_path / f"{name}.pt"), name) for name in "ab"]
    each = [oracle(model, data, "test", 0) for model in models]
    less, = found["less_the_first"]
    assert less["bpb"][0] == pytest.approx((each[1] - each[0]).mean() / math.log(2), abs=1e-5)
    assert [run["tokens"] for run in found["runs"]] == [600, 600] and "not compared" not in out


def test_training_steps_are_shown_and_a_line_says_where_they_differ():
    lines = score_table([fake_run("a"), fake_run("b", step=500), fake_run("c", step=None)]).splitlines()
    at = lines[1].index("steps") + len("steps")
    assert [line[:at].split()[-1] for line in lines[2:5]] == ["20,000", "500", "–"]
    said = "The checkpoints were trained for different numbers of steps: a 20,000, b 500, c –."
    assert lines.count(said) == 1
    for runs in ([fake_run("a")], [fake_run("a"), fake_run("b"), fake_run("c", step=None)]):
        assert "different" not in score_table(runs)


@pytest.mark.slow
def test_heads_at_work_and_the_load_of_each_head_are_shown(tmp_path, capsys):
    out, found, _ = scored_pair(tmp_path, capsys, "--set", "gate.0.1=0", routing="moh", routing_top_k=2)
    assert [run["heads"] for run in found["runs"]] == [[3, 4], [3, 4]]
    assert "heads at work: 3 of 4, 3 of 4" in out
    routing = found["runs"][1]["routing"]
    assert [each["block"] for each in routing] == [0, 1] and found["runs"][0]["routing"] == []
    for each in routing:
        assert sum(each["routing_load"]) == pytest.approx(2, abs=1e-6)  # two heads a token
        assert each["dead_heads"] == sum(load == 0 for load in each["routing_load"])
    assert "load of each head, %" in out and "routing of" in out


@pytest.mark.slow
def test_scoring_imports_no_probe_and_nothing_about_heads():
    code = ("import sys, evaluate\n"
            "apart = ('lab.probes', 'lab.heads', 'study')\n"
            "print([name for name in sys.modules if name.startswith(apart)])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr


# ---- whose data ----

def nanogpt(path, model, **config):
    args = {k: getattr(model.config, k)
            for k in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "dropout")}
    torch.save(dict(model={"_orig_mod." + k: v for k, v in model.state_dict().items()},
                    model_args=args, iter_num=3, config=config), path)
    return str(path)


def test_a_nanogpt_checkpoint_is_scored_on_the_dataset_that_it_names(tmp_path, monkeypatch):
    data = write_data(tmp_path / "data/toy", "char")
    monkeypatch.setattr(dataset, "ROOT", tmp_path)
    model = make_model(vocab_size=len(VOCAB))
    named, unnamed = nanogpt(tmp_path / "n.pt", model, dataset="toy"), nanogpt(tmp_path / "u.pt", model)
    want = score(model, data, "test")[0] / 23
    assert scoring.evaluate(named, "test", 0, "cpu", progress=False)["nats_per_token"] == pytest.approx(want)
    by_name = scoring.evaluate(unnamed, "test", 0, "cpu", "toy", progress=False)
    assert by_name["nats_per_token"] == pytest.approx(want)
    with pytest.raises(SystemExit, match="u.pt does not say what it was trained on; name it with --dataset$"):
        main(["--ckpt", unnamed])


def test_data_is_found_by_name_where_the_path_of_training_leads_nowhere(tmp_path, monkeypatch):
    data = write_data(tmp_path / "data/toy")
    monkeypatch.setattr(dataset, "ROOT", tmp_path)
    state = dict(meta=data.meta, train=dict(dataset="../elsewhere/toy"))
    assert scoring.dataset_of(state, "a.pt").dir == tmp_path / "data/toy"
    with pytest.raises(UserError, match="no dataset wrong"):
        scoring.dataset_of(state, "a.pt", "wrong")  # what the user names is not replaced


def test_another_dataset_of_the_same_vocabulary_can_be_scored(tmp_path, byte_run):
    other = write_data(tmp_path / "other", n=31, seed=5)
    run = scoring.evaluate(byte_run[0], "test", 0, "cpu", str(other.dir), progress=False)
    assert run["dataset"] == "other" and run["tokens"] == 31


# ---- switches of a trained model ----

@pytest.fixture
def switched(tmp_path):
    """(checkpoint path, model, Dataset) of a model with something to switch."""
    data = write_data(tmp_path / "toy")
    model = make_model(n_head=4, spread=3.0, unet="concat", agency=True, routing="moh", routing_top_k=3)
    return write_checkpoint(tmp_path / "a.pt", model, data), model, data


def scored(path, *settings):
    return scoring.evaluate(path, "test", 0, "cpu", settings=settings, progress=False)["nats_per_token"]


@pytest.mark.slow
@pytest.mark.parametrize("key, value", [("unet_skips", False), ("routing_eval_gate", False),
                                        ("routing_top_k", 2), ("routing", "sigmoid"),
                                        ("window", 3), ("act", "relu2")])
def test_a_flag_that_is_set_makes_the_model_with_that_flag(switched, key, value):
    path, model, data = switched
    other = make_model(n_head=4, **{**dict(unet="concat", agency=True, routing="moh", routing_top_k=3),
                                    key: value})
    other.load_state_dict(model.state_dict())
    assert scored(path, f"{key}={value}") == score(other, data, "test")[0] / 23 != scored(path)


def test_a_window_can_be_taken_away(tmp_path):
    data, model = write_data(tmp_path / "toy"), make_model(window=2, window_global=1)
    path, plain = write_checkpoint(tmp_path / "a.pt", model, data), make_model()
    assert scored(path, "window=None") == score(plain, data, "test")[0] / 23 != scored(path)


@pytest.mark.slow
def test_a_gate_of_zero_by_hand_a_withdrawn_head_and_no_consent_are_the_same(switched):
    path, model, data = switched
    with torch.no_grad():
        model.transformer.h[1].attn.c_proj.weight[:, 4:8] = 0  # what head 1 gives
    gone = score(model, data, "test")[0] / 23
    assert scored(path) != gone
    for setting in ("gate.1.1=0", "state.1.1=withdrawn", "consent.1.1=false"):
        assert scored(path, setting) == pytest.approx(gone, rel=1e-6)
    assert scored(path, "consent.1.1=false", "agency_enforce=False") == scored(path)
    assert scored(path, "gate.1.1=0.5") == pytest.approx(scored(path, "state.1.1=overloaded")) != scored(path)
    assert scored(path, "gate.1.1=0", "gate.1.1=1") == scored(path)  # the last one counts


@pytest.mark.parametrize("settings", [[], ["state.0.3=withdrawn"], ["gate.0.3=0"], ["consent.1.2=False"]],
                         ids=str)
def test_withdrawn_heads_are_packed_away_before_scoring(tmp_path, monkeypatch, settings):
    """Whatever is said of the model is of all heads; --pack=False computes them, as in training."""
    data, model = write_data(tmp_path / "toy"), make_model(n_head=4, agency=True, routing="moh")
    model.set_state(1, 0, state="withdrawn")
    path, ran = write_checkpoint(tmp_path / "a.pt", model, data), []

    def count(self, heads):
        ran.append(heads.q.size(1))
        return attend(self, heads)

    attend = CausalSelfAttention.attend
    monkeypatch.setattr(CausalSelfAttention, "attend", count)
    found = {}
    for pack in ("True", "False"):
        ran.clear()
        args = [path, "--pack", pack, "--json", str(tmp_path / "a.json")]
        main(["--ckpt", *args, *(f"--set={each}" for each in settings)])
        found[pack] = json.loads((tmp_path / "a.json").read_text())["runs"][0], ran[-2:]
    packed, whole = found["True"][0], found["False"][0]
    assert packed["nats_per_token"] == pytest.approx(whole["nats_per_token"], rel=1e-6)
    assert sum(found["True"][1]) == 7 - len(settings) and found["False"][1] == [4, 4]
    for key in ("params", "flops_per_token", "heads", "routing"):
        assert packed[key] == whole[key]
    assert packed["heads"] == [7 - len(settings), 8]


def test_an_infinity_in_a_withdrawn_head_does_not_reach_the_score(tmp_path):
    data, model = write_data(tmp_path / "toy"), make_model(n_head=4, agency=True)
    model.set_state(0, 3, state="withdrawn")
    finite = scored(write_checkpoint(tmp_path / "a.pt", model, data))
    with torch.no_grad():
        for part in range(3):  # the rows of its query, key and value, which overflow
            model.transformer.h[0].attn.c_attn.weight[part * 16 + 12:part * 16 + 16] = 3e38
    path = write_checkpoint(tmp_path / "b.pt", model, data)
    main(["--ckpt", path, "--json", str(tmp_path / "a.json")])
    got = json.loads((tmp_path / "a.json").read_text())["runs"][0]["nats_per_token"]
    assert got == pytest.approx(finite, rel=1e-6)
    with pytest.raises(SystemExit, match="gives nan nats"):
        main(["--ckpt", path, "--pack=False"])


@pytest.mark.slow
def test_what_was_set_is_said_and_written(switched, tmp_path, capsys):
    path, out = switched[0], tmp_path / "s.json"
    main(["--ckpt", path, "--set", "unet_skips=False", "--set", "gate.0.3=0.25", "--json", str(out)])
    scored, *_ = capsys.readouterr().out.splitlines()
    assert scored.endswith("in disjoint windows of 8, with unet_skips=False, gate.0.3=0.25")
    assert json.loads(out.read_text())["runs"][0]["set"] == ["unet_skips=False", "gate.0.3=0.25"]
    main(["--ckpt", path, "--json", str(out)])
    assert capsys.readouterr().out.splitlines()[0].endswith("windows of 8")
    assert json.loads(out.read_text())["runs"][0]["set"] == []


def test_a_model_without_head_states_takes_gates_alone(byte_run, refusal):
    message = refusal(["--ckpt", byte_run[0], "--set", "state.0.1=withdrawn"])
    assert "state.0.1=withdrawn: the model has no head states" in message
    assert scored(byte_run[0], "gate.0.1=0") != scored(byte_run[0])


# ---- bad input: one line ----

def test_a_mistake_in_the_last_checkpoint_is_found_before_the_first_is_scored(byte_run, refusal, monkeypatch):
    monkeypatch.setattr(scoring, "score", lambda *a, **k: pytest.fail("scored"))
    assert "no checkpoint" in refusal(["--ckpt", byte_run[0], "--ckpt", "nowhere.pt"])


def test_ctrl_c_prints_the_runs_that_are_done(byte_run, capsys, monkeypatch):
    calls = []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return score(*args, **kwargs)

    monkeypatch.setattr(scoring, "score", interrupted)
    with pytest.raises(SystemExit) as e:
        main(["--ckpt", byte_run[0], "--ckpt", byte_run[0]])
    shown = capsys.readouterr()
    assert e.value.code == 130 and shown.out.count("a.pt") == 1
    assert shown.err.strip() == "evaluate: interrupted"


@pytest.mark.slow
def test_it_runs_as_a_script_from_anywhere(tmp_path, byte_run):
    made = subprocess.run([sys.executable, ROOT / "evaluate.py", "--ckpt", byte_run[0]],
                          cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 0 and made.stderr == "" and "bits/byte" in made.stdout


def test_a_split_that_was_overwritten_is_refused(byte_run, refusal):
    """With blanks of the same length a study once said: better by 3.1573 bits/byte."""
    path, _, data = byte_run
    (data.dir / "test.bin").write_bytes(b" " * 23)
    assert "test.bin is not the file that meta.json describes" in refusal(["--ckpt", path])


def test_a_split_that_is_not_the_one_of_the_training_is_refused_unless_named(byte_run, tmp_path, capsys):
    """Prepared anew with other fractions, the test split may hold what the model was trained on."""
    path, model, data = byte_run
    path = write_checkpoint(tmp_path / "b.pt", model, data)
    put_split(data.dir, "test", b"x" * 23)
    meta = json.loads((data.dir / "meta.json").read_text())
    (data.dir / "meta.json").write_text(json.dumps({**meta, "note": "made up"}))
    with pytest.raises(SystemExit, match="test split of .* is not the one of its training"):
        main(["--ckpt", str(path)])
    main(["--ckpt", str(path), "--split", "val"])  # the others are as they were
    out = tmp_path / "s.json"
    main(["--ckpt", str(path), "--dataset", str(data.dir), "--json", str(out)])
    run, = json.loads(out.read_text())["runs"]
    assert run["split_sha256"] == meta["splits"]["test"]["sha256"] and run["note"] == "made up"
    assert "note: made up" in capsys.readouterr().out


@pytest.mark.parametrize("field, value", [("bytes", 46), ("separator", 10)])
def test_a_meta_json_that_says_something_else_than_at_the_training_is_refused(tmp_path, capsys, field, value):
    """Twice the bytes once halved the bits per byte, without a word."""
    data = write_data(tmp_path / "toy", "char")
    path = write_checkpoint(tmp_path / "a.pt", make_model(vocab_size=len(VOCAB)), data)
    before = dict(bytes=23, separator=11)[field]
    put_meta(data.dir, **{field: value})
    with pytest.raises(SystemExit) as e:
        main(["--ckpt", path])
    assert e.value.code == (
        f"evaluate: {path}: at its training {data.dir / 'meta.json'} had {field}={before} for test, and it "
        f"has {value} now; --dataset={data.dir} scores it all the same")
    main(["--ckpt", path, "--dataset", str(data.dir)])
    assert "bits/byte" in capsys.readouterr().out


def test_memory_that_is_not_there_is_one_line(monkeypatch, refusal):
    def scored(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        yield
    monkeypatch.setattr(evaluate, "score_runs", scored)
    assert refusal(["--ckpt", "any"]) == "evaluate: out of memory; lower --batch_size or --tokens"
