"""Fine-tuning: rates of their own, late skips, a frozen trunk, documents as rows."""
import json
import os
import re
import signal
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from helpers import put_split, write_dataset
from helpers import byte_pairs, tiny, torchrun, untimed

from model import ALL_ON, GPT, MECHANISMS, GPTConfig, UNet
from nanoheads import checkpoint, dataset
from nanoheads.common import ROOT, UserError
from nanoheads.config import TrainConfig
from nanoheads.batches import DocumentBatches, PackedBatches, best_fit
from nanoheads.dataset import Dataset
from nanoheads.optim import make_optimizers, added_parameters
from nanoheads.ranks import Process
from nanoheads.scoring import score
import train
from train import main

SIZES = dict(block_size=32, vocab_size=256, n_layer=2, n_head=2, n_embd=16)
SKIPS = dict(unet="concat", sentinel="sigmoid", mechanism_lr=0.02, skip_lr=0.005)


def articles(n, seed):
    """n WikiText articles of 1 to 400 words."""
    rng, text = np.random.default_rng(seed), b""
    for i in range(n):
        words = rng.choice(["the", "river", "rivers", "of", "stone", "stones"], int(400 ** rng.random()))
        text += f" = Title {i} = \n \n {' '.join(words)} \n \n = = Section = = \n".encode()
    return text


@pytest.fixture(scope="module")
def wiki(tmp_path_factory):
    """A byte dataset of 120 articles of 40 to 2,500 bytes."""
    folder = tmp_path_factory.mktemp("data") / "wiki"
    return write_dataset(folder, {"train": articles(120, 1), "val": articles(20, 2), "test": articles(20, 3)})


@pytest.fixture
def plain(args, tmp_path, wiki):
    """The run folder of a plain GPT, trained a little."""
    main(args("plain", dataset=wiki, n_layer=2, block_size=32))
    return tmp_path / "plain"


@pytest.fixture
def tuned(args, plain, wiki):
    """tuned(out, **keys) -> the command line of a run over the plain GPT."""
    def make(out, **keys):
        sizes = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size"), ...)
        return args(out, **{**sizes, "dataset": wiki, "init_from": plain, "lr_decay_iters": 20, **keys})
    return make


def weights(path):
    return checkpoint.read(path)["model"]


# ---- rates ----

def rates(config, **flags):
    """{name: its rate} of a model's parameters, muon's aside."""
    model = GPT(GPTConfig(**SIZES, **flags))
    of = {id(p): group["lr"] for optimizer in make_optimizers(model, config.for_recipe("gpt2"))
          for group in optimizer.param_groups for p in group["params"]}
    return {name: of[id(p)] for name, p in model.named_parameters()}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_gates_and_skips_have_rates_of_their_own(optimizer):
    flags = dict(unet="concat", sentinel="sigmoid", output_gate="headwise")
    found = rates(TrainConfig(optimizer=optimizer, adamw_lr=1e-3, mechanism_lr=1e-2, skip_lr=1e-4), **flags)
    assert {found[name] for name in found if name.startswith("fuse.")} == {1e-4}
    assert {found[name] for name in found if "sentinel" in name or "output_gate" in name} == {1e-2}
    assert found["transformer.ln_f.weight"] == 1e-3
    without = rates(TrainConfig(optimizer=optimizer, adamw_lr=1e-3, mechanism_lr=1e-2), **flags)
    assert without == {**found, **{name: 1e-2 for name in found if name.startswith("fuse.")}}


# ---- late skips ----

def test_the_share_of_the_skips_by_hand():
    def shares(**flags):
        config = GPTConfig(**SIZES, unet="add", **flags)
        return [UNet.share_at_step(config, step) for step in range(7)]
    assert shares() == [1.0] * 7
    assert shares(unet_from=3) == [0, 0, 0, 1, 1, 1, 1]
    assert shares(unet_from=2, unet_ramp=4) == [0, 0, 0.25, 0.5, 0.75, 1, 1]
    assert shares(unet_ramp=2) == [0.5, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("mode", ["concat", "add", "scalar", "published"])
def test_before_they_start_skips_are_off_and_at_the_end_all_there(mode):
    idx = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(1))
    models = [GPT(GPTConfig(**SIZES, unet=mode, **flags)).double().eval()
              for flags in ({}, dict(unet_skips=False), dict(unet_from=5, unet_ramp=2))]
    with torch.no_grad():
        on, off, late = ([model(idx).logits for model in models[:2]] + [None])
        found = []
        for step in (4, 5, 6):
            models[2].at_step(step)
            found.append(models[2](idx).logits)
    assert torch.equal(found[0], off) and torch.equal(found[2], on)
    assert not any(torch.allclose(found[1], other) for other in (on, off))
    assert models[2].state_dict().keys() == models[0].state_dict().keys(), "the schedule is no weight"


@pytest.mark.slow
def test_a_share_that_moves_compiles_nothing_anew():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph
    torch._dynamo.reset()
    model = GPT(GPTConfig(**SIZES, unet="add", unet_from=2, unet_ramp=3))
    fast, idx, losses = torch.compile(model, backend=backend, fullgraph=True), torch.zeros(1, 8).long(), set()
    for step in range(6):
        model.at_step(step)
        losses.add(fast(idx, idx).loss.item())
    assert len(compiled) == 1 and len(losses) == 4, "0, 1/3, 2/3 and 1"
    model.fuse[0].skips = False  # negative control: what Python decides does
    fast(idx, idx)
    assert len(compiled) == 2
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_run_starts_its_skips_when_it_is_told_to(tuned, rows, tmp_path):
    main(tuned("late", unet="add", unet_init=0.5, unet_from=4, init_anyway=True, max_iters=8))
    main(tuned("never", unet="add", unet_init=0.5, unet_skips=False, init_anyway=True, max_iters=8))
    late, never = ([row["loss"] for row in rows(tmp_path / out)[0]] for out in ("late", "never"))
    assert late[:4] == never[:4] and late[4] != never[4]
    late, never = ([row["val_loss"] for row in rows(tmp_path / out)[1]] for out in ("late", "never"))
    assert late[0] == never[0] and late[-1] != never[-1], "also as it is evaluated"


@pytest.mark.slow
def test_a_checkpoint_has_the_skips_of_its_last_step(tuned, rows, tmp_path, wiki):
    main(tuned("half", unet="add", unet_init=0.5, init_anyway=True, unet_from=2, unet_ramp=8, max_iters=6))
    row = rows(tmp_path / "half")[1][-1]
    model = checkpoint.build(checkpoint.read(tmp_path / "half/ckpt.pt"), "half")

    def val_loss():
        nats, n = score(model, Dataset(wiki), "val", max_tokens=512)
        return nats / n
    assert model.fuse[0].ramp.item() == 0.5 and val_loss() == pytest.approx(row["val_loss"], abs=1e-6)
    model.at_step(100)
    assert abs(val_loss() - row["val_loss"]) > 1e-4
    # a run over it has skips from the start, or a beginning of its own
    for out, keys, share in (("all", {}, None), ("own", dict(unet="add", unet_ramp=5), 0.2)):
        main(tuned(out, init_from=tmp_path / "half", max_iters=1, **keys))
        model = checkpoint.build(checkpoint.read(tmp_path / out / "ckpt.pt"), out)
        assert share == (None if model.fuse[0].ramp is None else pytest.approx(model.fuse[0].ramp.item()))


# ---- a frozen trunk ----

@pytest.mark.slow
@pytest.mark.parametrize("keys", [dict(optimizer="adamw", weight_decay=0.5), dict(optimizer="muon"),
                                  dict(optimizer="muon", dtype="float16")],
                         ids=lambda k: "-".join(map(str, k.values())))
def test_a_frozen_trunk_stays_as_it_is_until_it_thaws(keys, tuned, tmp_path):
    keys = {**SKIPS, "unet_ramp": 3, "freeze_trunk": True, "grad_clip": 1.0, **keys}
    main(tuned("frozen", max_iters=6, **keys))
    main(tuned("thawed", max_iters=6, thaw_from=4, **keys))
    main(tuned("start", max_iters=1, adamw_lr=1e-30, min_lr=0, muon_lr=1e-30,
               **{**keys, "mechanism_lr": 1e-30, "skip_lr": 1e-30, "weight_decay": 0}))
    states = {out: checkpoint.read(tmp_path / out / "ckpt.pt") for out in ("frozen", "thawed", "start")}
    start, added = states["start"]["model"], added_parameters(GPT(GPTConfig(**states["start"]["config"])))
    assert added == {name for name in start if "sentinel" in name or name.startswith("fuse.")}
    for name, before in start.items():
        assert torch.equal(states["frozen"]["model"][name], before) == (name not in added), name
        assert not torch.equal(states["thawed"]["model"][name], before), name
    every = len(set(start) - {"lm_head.weight"})  # which is the embedding's
    for out, steps, count in (("frozen", {6}, len(added)), ("thawed", {2, 6}, every)):
        moments = [state for each in states[out]["optimizers"] for state in each["state"].values()]
        assert len(moments) == count, "what is frozen has no moments"
        assert {int(state["step"]) for state in moments if "step" in state} == steps


@pytest.mark.slow
@pytest.mark.parametrize("thaw_from,more", [(8, {}), (12, {}), (12, dict(documents_packed="whole",
                                                                         attn_dropout=0.0))],
                         ids=["thawed", "frozen", "packed"])
def test_20_steps_equal_10_and_10_while_all_of_it_moves(thaw_from, more, tuned, rows, tmp_path, monkeypatch):
    """Stopped after ten steps: skips half there, the trunk as the id says, between documents."""
    keys = dict(SKIPS, unet_from=6, unet_ramp=9, freeze_trunk=True, thaw_from=thaw_from, dropout=0.2,
                documents=8, grad_accum=2, eval_interval=5, max_iters=20, **more)
    main(tuned("once", **keys))
    forward_backward = train.forward_backward

    def stopped(run, *a, **kw):
        if run.step == 9:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward_backward(run, *a, **kw)
    monkeypatch.setattr(train, "forward_backward", stopped)
    with pytest.raises(SystemExit):
        main(tuned("twice", **keys))
    monkeypatch.undo()
    assert checkpoint.read(tmp_path / "twice/ckpt.pt")["step"] == 10
    main([*tuned("twice", **keys), "--resume"])
    once, twice = (rows(tmp_path / out) for out in ("once", "twice"))
    assert [untimed(found) for found in once] == [untimed(found) for found in twice]
    a, b = (weights(tmp_path / out / "ckpt.pt") for out in ("once", "twice"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, dict(documents_packed="whole")], ids=["padded", "packed"])
def test_two_ranks_thaw_and_read_documents_as_one_process_does(more, tuned, rows, tmp_path):
    keys = dict(SKIPS, unet_from=1, unet_ramp=2, freeze_trunk=True, thaw_from=3, documents=8, batch_size=3,
                grad_accum=4, **more)
    main(tuned("one", **keys))
    done = torchrun(tuned("two", **keys), 2)
    assert done.returncode == 0, done.stderr
    for one, two in zip(rows(tmp_path / "one"), rows(tmp_path / "two")):
        for a, b in zip(untimed(one), untimed(two), strict=True):
            assert a == pytest.approx(b, abs=1e-5)
    one, two = (weights(tmp_path / out / "ckpt.pt") for out in ("one", "two"))
    assert max((one[k] - two[k]).abs().max() for k in one) < 1e-4


# ---- where documents are ----

def dataset_of_text(tmp_path, text, encoding="byte"):
    vocab = sorted(set(text)) if encoding == "char" else None
    splits = {split: text if encoding == "char" else text.encode() for split in ("train", "val", "test")}
    return Dataset(write_dataset(tmp_path / encoding, splits, encoding, vocab))


@pytest.mark.slow
@pytest.mark.parametrize("text,pieces", [
    ("before\n = One = \n\n text \n = = Part = = \n more\n = Two = \n\n end\n",
     ["before\n", " = One = \n\n text \n = = Part = = \n more\n", " = Two = \n\n end\n"]),
    ("Anna:\nYes.\n\nBen:\nNo.\nNever.\n\n\nAnna:\nOh.\n",
     ["Anna:\nYes.\n\n", "Ben:\nNo.\nNever.\n\n\n", "Anna:\nOh.\n"]),
    ("# ---- a.py ----\nx = 1\n\n\ny = 2\n\n\n# ---- b/c.py ----\nz\n",
     ["# ---- a.py ----\nx = 1\n\n\ny = 2\n\n\n", "# ---- b/c.py ----\nz\n"]),
    ("<mediawiki>\n  <page>\n a\n\n b\n  </page>\n  <page>\n c\n",
     ["<mediawiki>\n", "  <page>\n a\n\n b\n  </page>\n", "  <page>\n c\n"]),
    ("é\n\nö\n\nü", ["é\n\n", "ö\n\n", "ü"])], ids=["titles", "speeches", "files", "pages", "umlauts"])
@pytest.mark.parametrize("encoding", ["byte", "char"])
def test_documents_begin_where_the_text_says(text, pieces, encoding, tmp_path):
    data = dataset_of_text(tmp_path, text, encoding)
    cuts, tokens = data.documents("train"), data.tokens("train")
    assert [data.tokenizer.decode(tokens[a:b]) for a, b in zip(cuts, cuts[1:])] == pieces


    # with the line ends of Windows the same documents, also where the first one has others
    first, *rest = pieces
    for name, each in (("windows", text), ("mixed", "".join(rest))):
        each = (first if name == "mixed" else "") + each.replace("\n", "\r\n")
        data = dataset_of_text(tmp_path / name, each, encoding)
        cuts, tokens = data.documents("train"), data.tokens("train")
        found = [data.tokenizer.decode(tokens[a:b]) for a, b in zip(cuts, cuts[1:])]
        assert [each.replace("\r\n", "\n") for each in found] == pieces and "".join(found) == each


def tokens_data(folder, tokens):
    """A dataset in GPT-2's tokens, whose text is nobody's business."""
    folder.mkdir()
    meta = dict(name="t", encoding="gpt2", vocab_size=50257, dtype="uint16", separator=50256,
                splits={split: dict(tokens=len(tokens), bytes=1) for split in ("train", "val", "test")})
    (folder / "meta.json").write_text(json.dumps(meta))
    for split in meta["splits"]:
        put_split(folder, split, np.array(tokens, "<u2").tobytes())
    return Dataset(folder)


def test_an_end_of_text_ends_a_document(tmp_path, monkeypatch):
    data = tokens_data(tmp_path / "t", [5, 6, 50256, 7, 50256, 50256, 8, 9])
    assert data.documents("train").tolist() == [0, 3, 5, 6, 8]
    monkeypatch.setattr(dataset, "places_after", partial(dataset.places_after, block=3))
    assert data.documents("train").tolist() == [0, 3, 5, 6, 8], "in blocks"


def test_one_document_is_said_to_be_one(tmp_path):
    with pytest.raises(UserError, match="is a single document, and it takes two or more"):
        tokens_data(tmp_path / "one", [5, 6, 7, 50256]).documents("train")
    with pytest.raises(UserError, match="has no documents: no end-of-text token, title or blank line"):
        dataset_of_text(tmp_path, "words and nothing else").documents("train")


def test_without_an_end_of_text_token_no_other_ends_a_document(tmp_path):
    """The first token of a vocabulary that has none is a text's own."""
    text = "one two\n\nthree!!\n\nfour" * 9
    vocab = byte_pairs(text, r"\S+|\s+", special=["!"])
    data = Dataset(write_dataset(tmp_path / "x", dict(train=text, val=text, test=text), "hf", vocab))
    assert data.separator == 0 and data.tokenizer.end is None
    cuts, tokens = data.documents("train"), data.tokens("train")
    assert len(cuts) == 1 + len(text.split("\n\n"))
    found = [data.tokenizer.decode(tokens[a:b]) for a, b in zip(cuts, cuts[1:])]
    assert found == re.split(r"(?<=\n\n)", text)


# ---- rows of documents ----

@pytest.mark.slow
@pytest.mark.parametrize("T,shortest", [(64, 8), (64, 32), (128, 1)])
def test_a_pass_has_each_token_once_and_no_row_two_documents(wiki, T, shortest):
    data, rows = Dataset(wiki), 3
    batches = DocumentBatches(data, "train", T, rows, 5, shortest)
    tokens, cuts = np.asarray(data.tokens("train")), data.documents("train")
    wanted = [(a, b) for a, b in zip(cuts, cuts[1:]) if b - a >= shortest]
    assert 50 < len(wanted) and any(b - a < T for a, b in wanted) and any(b - a > T for a, b in wanted)
    passes = []
    for number in (0, 1):
        steps = range(batches.ends[0][0] if number else 0, 10**9)
        seen, lengths = np.zeros(len(tokens), int), []
        for step in steps:
            if batches.place(step)[0] != number:
                break
            ids, at = batches(step), batches.place(step)[1]
            for row, first, length in zip(ids.tolist(), *(each[at] for each in batches.one_pass(number))):
                a, b = next((a, b) for a, b in wanted if a <= first < b)
                assert first + length <= b, "within its document"
                assert length <= T and length >= shortest and (length == b - a or b - a > T)
                assert row[0] == (data.separator if first == a else tokens[first - 1])
                assert row[1:1 + length] == tokens[first:first + length].tolist()
                assert set(row[1 + length:]) <= {-1} and len(row) <= T + 1
                seen[first:first + length] += 1
                lengths.append(length)
        left_out = sum(b - a for a, b in wanted) - seen.sum()
        assert set(seen) <= {0, 1} and 0 <= left_out < rows * T
        passes.append(sorted(lengths))
    assert passes[0] != passes[1], "long documents are cut anew"


def test_the_batch_is_a_function_of_seed_and_step_alone(wiki):
    data = Dataset(wiki)

    def made(seed=1):
        return DocumentBatches(data, "train", 64, 8, seed, 8)
    a, b = made(), made()
    last = len(a.one_pass(0)[0]) + 20
    forward = [a(step) for step in range(last)]
    assert [a.place(step) for step in (0, last - 1)] == [(0, 0), (1, 19)]
    assert all(torch.equal(b(step), forward[step]) for step in reversed(range(last)))
    assert not torch.equal(made(2)(3)[0, :5], forward[3][0, :5])
    for world in (2, 4):
        for step in (0, 7, last - 1):
            shares = torch.stack([b(step, rank, world) for rank in range(world)], 1).flatten(0, 1)
            assert torch.equal(shares, forward[step])
    counts = [int((ids[:, 1:] != -1).sum()) for ids in forward]
    assert [b.n_scored(step) for step in range(last)] == counts
    assert [b.tokens(step) for step in range(last)] == [sum(counts[:step]) for step in range(last)]


def test_rows_of_similar_length_come_together(wiki):
    batches = DocumentBatches(Dataset(wiki), "train", 512, 8, 1, 8)
    first, length = batches.one_pass(0)
    padded = sum(batches.width(row) for row in length) * 8
    share = 1 - length.sum() / padded
    assert share < 0.15 and f"{share:.1%} of it is padding" in str(batches)
    longest = length.max(1)
    assert (np.diff(longest) < 0).mean() == pytest.approx(0.5, abs=0.2), "but short and long ones in turn"
    few = DocumentBatches(Dataset(wiki), "train", 512, 8, 1, 8, few_widths=True)
    assert torch.equal(few(3)[:, :batches(3).shape[1]], batches(3)), "the same rows, padded further"
    assert few.widths.tolist() == [8, 16, 24, 32, 48, 64, 96, 128, 184, 256, 368, 512]
    assert {few(step).shape[1] - 1 for step in range(len(length))} <= set(few.widths)
    shuffled = np.random.default_rng(0).permutation(length.ravel()).reshape(length.shape)
    assert 1 - length.sum() / (8 * shuffled.max(1)).sum() > 0.4, "negative control: in any order"


# ---- rows full of documents ----

def packed(data, T=64, rows=3, seed=5, shortest=8, cut=False):
    return PackedBatches(data, "train", T, rows, seed, shortest, cut)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("T,shortest", [(64, 8), (512, 1), (512, 200)])
def test_packed_rows_hold_each_token_once_behind_the_one_before_it(wiki, T, shortest, cut):
    data = Dataset(wiki)
    batches = packed(data, T, shortest=shortest, cut=cut)
    tokens, cuts = np.asarray(data.tokens("train")), data.documents("train")
    wanted = [(a, b) for a, b in zip(cuts, cuts[1:]) if b - a >= shortest]
    first, length, bounds = batches.parts(0)
    steps = len(batches.one_pass(0)[0])
    seen, uncut, found = np.zeros(len(tokens), int), 0, []
    for step in range(steps):
        x, y, positions = (each.numpy() for each in batches(step))
        assert x.shape == y.shape == positions.shape == (3, T)
        for i, row in enumerate(batches.one_pass(0)[0][step]):
            column = 0
            for start, n in zip(first[bounds[row]:bounds[row + 1]], length[bounds[row]:bounds[row + 1]]):
                a, b = next((a, b) for a, b in wanted if a <= start < b)
                assert start + n <= b, "within its document"
                here, column = slice(column, column + n), column + n
                before = data.separator if start == a else tokens[start - 1]
                assert y[i, here].tolist() == tokens[start:start + n].tolist()
                assert x[i, here].tolist() == [before, *tokens[start:start + n - 1]]
                assert positions[i, here].tolist() == [*range(n)]
                seen[start:start + n] += 1
                uncut += n == b - a
            assert set(y[i, column:]) <= {-1} and positions[i, column:].tolist() == [*range(T - column)]
            assert not (cut and column < T), "a row is full"
            found.append(column)
    left_out = sum(b - a for a, b in wanted) - seen.sum()
    assert set(seen) <= {0, 1} and 0 <= left_out < 4 * T
    fit = sum(b - a <= T for a, b in wanted)
    assert uncut < 0.9 * fit if cut else fit - 3 * T / shortest <= uncut <= fit
    full = np.mean(found) / T
    assert full == 1 if cut else full > 0.9 or shortest == 200
    assert f"{1 - full:.1%} of it is padding" in str(batches)


def test_a_last_row_that_is_not_full_counts_where_documents_stay_whole(wiki):
    data = Dataset(wiki)
    T = int(packed(data).size.sum() / 2.5)
    assert [each.shape for each in packed(data, T)(0)] == 3 * [(3, T)]
    with pytest.raises(UserError, match="has 2 rows of documents of at least 8 tokens: fewer than the 3"):
        packed(data, T, cut=True)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_a_packed_batch_is_a_function_of_seed_and_step_alone(wiki, cut):
    data = Dataset(wiki)
    a, b = packed(data, rows=4, cut=cut), packed(data, rows=4, cut=cut)
    last = len(a.one_pass(0)[0]) + 5
    forward = [a(step) for step in range(last)]
    assert [a.place(step) for step in (0, last - 1)] == [(0, 0), (1, 4)]
    for step in reversed(range(last)):
        assert all(torch.equal(*each) for each in zip(b(step), forward[step]))
    for step in (0, last - 1):
        shares = [torch.stack([b(step, rank, 2)[i] for rank in (0, 1)], 1).flatten(0, 1) for i in range(3)]
        assert all(torch.equal(*each) for each in zip(shares, forward[step]))
    assert not torch.equal(packed(data, rows=4, seed=6, cut=cut)(3)[0], forward[3][0])
    counts = [int((y != -1).sum()) for _, y, _ in forward]
    assert [b.n_scored(step) for step in range(last)] == ([None] * last if cut else counts)
    assert [b.tokens(step) for step in range(last)] == [sum(counts[:step]) for step in range(last)]


def test_the_fullest_row_with_room_takes_the_next_document():
    assert best_fit([7, 6, 4, 3, 3, 2, 1], 10).tolist() == [0, 1, 1, 0, 2, 2, 2]
    assert best_fit([10, 10, 5], 10).tolist() == [0, 1, 2]


def test_losses_over_packed_rows_are_those_over_padded_rows(tmp_path):
    """A pass over the same documents in both forms: summed losses, and gradients of the sums."""
    splits = dict(train=articles(24, 1), val=articles(4, 2), test=articles(4, 3))
    data, T = Dataset(write_dataset(tmp_path / "few", splits)), 128

    def summed(batches, as_taken):
        model = tiny(acag="headwise", fox=True, short_conv="qkv", **{**SIZES, "block_size": T})
        steps = len(batches.one_pass(0)[0])
        losses = []
        for step in range(steps):
            x, y, *positions = as_taken(batches(step))
            loss = model(x, y, **(dict(positions=positions[0]) if positions else {})).loss * (y != -1).sum()
            loss.backward()
            losses.append(loss.item())
        return batches.tokens(steps), sum(losses), {name: p.grad for name, p in model.named_parameters()}

    count, want, gradients = summed(DocumentBatches(data, "train", T, 1, 5, 8),
                                    lambda ids: (ids[:, :-1].clamp_min(0), ids[:, 1:]))
    n, got, found = summed(packed(data, T, rows=1), lambda batch: batch)
    assert n == count > 3000 and got == pytest.approx(want, rel=1e-6)
    for name, grad in gradients.items():
        assert torch.allclose(found[name], grad, rtol=0, atol=1e-5 * grad.abs().max().item()), name
    _, crossing, _ = summed(packed(data, T, rows=1), lambda batch: batch[:2])
    assert crossing != pytest.approx(want, rel=1e-4), "the control: a row is one text"


@pytest.mark.slow
def test_the_log_counts_the_tokens_that_were_read(tuned, rows, tmp_path, wiki, capsys):
    main(tuned("run", documents=8, grad_accum=2))
    batches = DocumentBatches(Dataset(wiki), "train", 32, 8, 1337, 8)
    losses, evals = rows(tmp_path / "run")
    assert [r["tokens"] for r in losses] == [batches.tokens(step) for step in range(1, 7)]
    assert [r["tokens"] for r in evals] == [batches.tokens(step) for step in (0, 3, 6)]
    assert f"{batches}\n" in capsys.readouterr().out


# ---- nothing crosses documents ----

def padded(row, width, fill):
    """(x, y) [1, width] of a row of tokens, padded behind with `fill`."""
    x = torch.full((1, width), fill)
    y = torch.full((1, width), -1)
    x[0, :len(row) - 1], y[0, :len(row) - 1] = torch.tensor(row[:-1]), torch.tensor(row[1:])
    return x, y


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MECHANISMS, "all_on"])
def test_neither_padding_nor_another_document_changes_a_logit_or_a_loss(name):
    """Causal attention needs no mask for it; router losses would count padding, and are refused."""
    flags = ALL_ON if name == "all_on" else MECHANISMS[name]
    model = tiny(flags, **{**SIZES, "n_head": 6, "n_embd": 72, "block_size": 24}).train()
    generator = torch.Generator().manual_seed(3)
    row, other, third = (torch.randint(256, (n,), generator=generator).tolist() for n in (12, 20, 17))

    def computed(*rows, fill=0, width=24):
        pairs = [padded(each, width, fill) for each in rows]
        x, y = (torch.cat(each) for each in zip(*pairs))
        torch.manual_seed(1)  # of hard-concrete gates
        return model(x, y, logits=True)

    alone, two = computed(row, width=11), computed(other, width=24)
    for rows_, fill in (((row, other), 0), ((row, other), 77), ((row, third), 0)):
        both = computed(*rows_, fill=fill)
        assert torch.allclose(both.logits[0, :11], alone.logits[0], atol=1e-10)
        if rows_[1] is other:  # the mean over tokens of both
            assert torch.allclose(both.loss, (11 * alone.loss + 19 * two.loss) / 30, atol=1e-10)
            if fill:
                a, b = computed(*rows_).aux, both.aux
                routed = {key for key in a if key.startswith("routing")}
                assert all(torch.allclose(a[key], b[key], atol=1e-10) for key in set(a) - routed)
                assert not any(torch.allclose(a[key], b[key], atol=1e-10) for key in routed), "the control"
    assert not torch.allclose(computed(row[:5] + row[6:], width=11).logits[0, :9], alone.logits[0, :9])


@pytest.mark.slow
def test_a_token_weighs_the_same_in_portions_ranks_and_one_batch():
    """Gradients of portions with 2 to 24 scored tokens, against those of all rows at once."""
    x, y = (torch.cat(each) for each in zip(*(padded(list(range(9, 10 + n)), 24, 0)
                                              for n in (2, 3, 5, 7, 11, 20, 23, 24))))
    config = replace(TrainConfig(batch_size=8, max_iters=10), grad_accum=1).for_recipe("gpt2")

    def gradients(portions, scored, rank=0, world=1):
        model = GPT(GPTConfig(**SIZES, acag="headwise", sentinel="sigmoid", a2c="temperature")).double()
        run = train.ready_to_step(model, replace(config, grad_accum=portions))
        run.process = Process(rank=rank, world=world)
        run.portions = portions // world
        means = train.forward_backward(run, x[rank::world], y[rank::world], scored=scored)
        return means["loss"], {name: p.grad for name, p in model.named_parameters()}

    def far(found, wanted):  # logits and losses are float32
        return max(((found[k] - wanted[k]).abs().max() / wanted[k].abs().max()).item() for k in wanted)
    n = int((y != -1).sum())
    loss, whole = gradients(1, None)
    for portions in (2, 4, 8):
        mean, found = gradients(portions, n)
        assert mean.item() == pytest.approx(loss.item(), rel=1e-6) and far(found, whole) < 1e-6
        mean, found = gradients(portions, None)  # negative control: portions alike
        assert abs(mean - loss) > 1e-4 and far(found, whole) > 1e-2
    (one, a), (two, b) = (gradients(2, n, rank, 2) for rank in (0, 1))
    assert (one + two).item() / 2 == pytest.approx(loss.item(), rel=1e-6)
    assert far({name: (a[name] + b[name]) / 2 for name in a}, whole) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("how", [None, "whole", "cut"])
@pytest.mark.parametrize("change", [dict(batch_size=2, grad_accum=4), dict(compile=True)],
                         ids=["portions", "compiled"])
def test_a_run_over_documents_has_the_same_losses(change, how, tuned, rows, tmp_path, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(inputs)
        return graph
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    keys = dict(documents=4, acag="headwise", batch_size=8, max_iters=20)
    keys |= dict(documents_packed=how) if how else {}
    main(tuned("whole", **keys))
    main(tuned("changed", **{**keys, **change}))
    a, b = (rows(tmp_path / out)[0] for out in ("whole", "changed"))
    assert [r["loss"] for r in a] == pytest.approx([r["loss"] for r in b], abs=1e-5)
    widths = [1] if how else [2, 3, 4]  # of 8, 16, 24 and 32
    assert len(graphs) in (widths if "compile" in change else [0])
    torch._dynamo.reset()


@pytest.mark.parametrize("how, shortest, words", [
    (None, 8, "have at least 8 tokens, "), ("whole", 8, "have at least 8 tokens, "),
    ("cut", 1, "have at least 1 token, 100.0% of train")])
def test_the_first_lines_say_how_full_a_step_is(how, shortest, words, tuned, capsys):
    """Rows that are cut have no padding, so each step has the same number of tokens."""
    keys = dict(documents=shortest, batch_size=8, max_iters=1)
    main(tuned("run", **keys, **(dict(documents_packed=how) if how else {})))
    said = capsys.readouterr().out
    assert words in said and "256 tokens a step" in said
    assert ("at most 256 tokens" in said) == (how != "cut") and ("and 0.0% of it" in said) == (how == "cut")


# ---- what means nothing ----

@pytest.mark.slow
@pytest.mark.parametrize("name", ["finetune_gpt2", "finetune_gpt_neo_acag", "finetune_smollm2"])
def test_the_config_runs_over_a_gpt_of_our_own(name, plain, wiki, rows, tmp_path):
    """With the command that stands there, in fewer steps."""
    text = (ROOT / f"config/{name}.py").read_text()
    command = text.split("python train.py config/")[1].split("\n\n")[0]
    words = command.replace("#", "").replace("\\", "").split()
    assert words[0] == f"{name}.py" and words[1] == "--init_from=out/tiny"
    main([str(ROOT / f"config/{words[0]}"), *words[3:], f"--init_from={plain}", f"--dataset={wiki}",
          f"--out_dir={tmp_path}/run", "--max_iters=4", "--warmup_iters=1", "--eval_interval=2",
          "--eval_tokens=256", "--device=cpu",
          dict(finetune_gpt2="--unet_from=1", finetune_smollm2="--block_size=32",
               finetune_gpt_neo_acag="--documents=8")[name]])
    before, after = rows(plain)[1][-1]["val_loss"], rows(tmp_path / "run")[1][0]["val_loss"]
    assert after == pytest.approx(before, abs=0.2), "it begins where the plain GPT ended"
    config = checkpoint.read(tmp_path / "run/ckpt.pt")["config"]
    want = dict(finetune_gpt2="unet", finetune_gpt_neo_acag="acag", finetune_smollm2="xsa")
    assert [key for key in want.values() if config[key]] == [want[name]]
