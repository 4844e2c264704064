"""Probes against slow references and hand-made models: who remembers, what removing a key or head means."""
import functools
import json
import math
import re
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import helpers
import oracle
from helpers import write_dataset
from scipy.stats import spearmanr
from scipy.stats import t as student
from torch import nn
from torch.nn import functional as F

from nanoheads import checkpoint
from model import MECHANISMS
from nanoheads.config import ControllerConfig
from nanoheads.dataset import Dataset
from nanoheads.scoring import score, windows_of
from lab import needle
from lab.heads.measuring import measure
from lab.probe import PROBES, main
from lab.probes import keys
from lab.probes.facts import DIGITS, names
from lab.probes.heads import head_metrics, without_head
from lab.probes.intervals import over_windows
from lab.probes.keys import gone, gradient_times_input, nats_without, rankings, window_effects, without_keys
from lab.probes.needle import answers, haystacks, recalled
from lab.probes.shared import open_checkpoints, window_text
from lab.probes.states import states_on

LINE = re.compile(rb"\n\[([A-Z]{3})(\d{4})\]\n")


def words(n, seed):
    rng = np.random.default_rng(seed)
    pool = ["".join(rng.choice(list("abcdeilnorst"), rng.integers(2, 8))) for _ in range(200)]
    return (" ".join(rng.choice(pool, n // 4))[:n]).encode()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A byte dataset of made-up words without any fact."""
    folder = tmp_path_factory.mktemp("data") / "words"
    return write_dataset(folder, {"train": words(40000, 0), "val": words(8000, 1), "test": words(9000, 2)})


@pytest.fixture(scope="module")
def facts(source, tmp_path_factory):
    """The same with facts in it, as lab/needle.py writes it."""
    out = tmp_path_factory.mktemp("data") / "needle"
    needle.main([f"--source={source}", f"--out={out}"])
    return Dataset(out)


make_model = functools.partial(helpers.make_model, spread=6.0, noise=0.3, dtype=torch.float64, n_head=2,
                               n_embd=16)


def save(path, model, data):
    state = dict(model=model.float().state_dict(), config=asdict(model.config),
                 meta=data.meta, train=dict(dataset=str(data.dir)), step=1)
    torch.save(state, path)
    return str(path)


@pytest.fixture
def checkpoint_of(tmp_path, facts):
    """checkpoint_of(name, data=facts, **flags) -> path of a tiny model's checkpoint."""
    def make(name, data=facts, **flags):
        return save(tmp_path / f"{name}.pt", make_model(**flags), data)
    return make


def say(capsys, tmp_path, *args):
    """(what main(args) writes as JSON, what it prints)."""
    out = tmp_path / "out.json"
    main([*args, f"--json={out}", "--device=cpu"])
    return json.loads(out.read_text()), capsys.readouterr().out


# ---- the data ----

@pytest.mark.slow
def test_facts_are_planted_the_same_every_time_and_leave_the_text_as_it_was(source, facts, tmp_path, capsys):
    again = tmp_path / "needle"
    needle.main([f"--source={source}", f"--out={again}"])
    sums = [[data.splits[s]["sha256"] for s in facts.splits] for data in (facts, Dataset(again))]
    assert sums[0] == sums[1]
    for split in facts.splits:
        assert LINE.sub(b"", facts.tokens(split).tobytes()) == Dataset(source).tokens(split).tobytes()
    needle.main([f"--source={source}", f"--out={again}"])
    assert "already prepared, verified" in capsys.readouterr().out
    needle.main([f"--source={source}", f"--out={again}", "--seed=1"])
    assert Dataset(again).splits["test"]["sha256"] != facts.splits["test"]["sha256"]


def test_every_question_has_its_answer_before_it_and_no_name_two_answers_at_once(source):
    text, far = Dataset(source).tokens("train").tobytes() * 4, 4000
    planted = b"".join(needle.plant(text, "test", per_kib=16, asks=2, near=64, far=far, seed=3))
    lines, last, runs, distances = list(LINE.finditer(planted)), {}, {}, []
    for m in lines:
        if last.get(m[1], (None,))[0] != m[2]:  # a new fact
            last[m[1]], runs[m[1]] = (m[2], m.start()), runs.get(m[1], 0) + 1
        else:
            distances.append(m.start() - last[m[1]][1])
    assert len(lines) > 5000 and max(runs.values()) > 1, "names come back"
    assert len(distances) > 0.6 * len(lines) and min(distances) > 40 and max(distances) < 1.2 * far
    repeats = len(lines) - len(distances)
    assert sum(runs.values()) == repeats <= 16 * len(text) / 1024, "all others repeat the last of their name"


def test_names_of_the_test_are_never_trained_on(facts):
    seen = {split: {m[1] for m in LINE.finditer(facts.tokens(split).tobytes())} for split in facts.splits}
    assert all(seen.values()) and not seen["train"] & seen["test"] and not seen["train"] & seen["val"]
    assert not seen["val"] & seen["test"]
    pools = [names(s) for s in facts.splits]
    assert sum(map(len, pools)) == len(set().union(*pools)) == 26 ** 3


def test_what_cannot_be_planted_is_refused(source, tmp_path, monkeypatch):
    damaged = write_dataset(tmp_path / "damaged", {s: words(2000, 1) for s in ("train", "val", "test")})
    (damaged / "val.bin").write_bytes(b"x" * 2000)
    with pytest.raises(SystemExit, match="^needle: .*val.bin is not the file that meta.json describes"):
        needle.main([f"--source={damaged}", f"--out={tmp_path / 'out'}"])
    monkeypatch.setattr(needle, "names", lambda split: [b"ABC", b"DEF"])
    with pytest.raises(SystemExit, match="need more than the 2 names of train"):
        needle.main([f"--source={source}", f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out/meta.json").exists()


# ---- needle ----

def test_contexts_differ_in_the_fact_alone(facts):
    text, depths = facts.tokens("test").tobytes(), [0.0, 0.5, 1.0]
    ids = haystacks(text, "test", 300, depths, 12, 7)
    assert ids.shape == (12, 4, 300) and (ids == haystacks(text, "test", 300, depths, 12, 7)).all()
    for control, *planted in ids.astype(np.uint8):
        control = control.tobytes()
        name, digits = control[-7:-4], control[-4:]
        line = b"\n[" + name + digits + b"]\n"
        assert control[-9:-7] == b"\n[" and control.count(b"[" + name) == 1 and name in names("test")
        places = []
        for row in planted:
            row = row.tobytes()
            places.append(row.index(line))
            assert row.count(b"[" + name) == 2 and row.replace(line, b"", 1) == control[len(line):]
        assert places[0] < 64 and 130 < places[1] < 214 and places[2] == 300 - 9 - len(line)


class Reader(nn.Module):
    """Knows that digits come next; equally likely, unless it finds the name in its last `memory` tokens."""

    def __init__(self, memory):
        super().__init__()
        self.memory, self.at = memory, nn.Parameter(torch.zeros(1))

    def hidden(self, idx):
        logits = torch.full((*idx.shape, 256), -100.0)
        logits[..., 48:58] = 0.0
        for row, out in zip(idx, logits):
            text = bytes(row.tolist())
            for t in range(len(text) - DIGITS, len(text)):
                asked = text[text.rindex(b"["):t + 1]
                found = text[:t].rfind(asked, max(0, t - self.memory), t)
                if found >= 0:
                    out[t, text[found + len(asked)]] = 20.0
        return logits

    def head(self, x):
        return x


def test_recall_gain_tells_who_remembers_from_who_ignores(facts):
    ids = haystacks(facts.tokens("test").tobytes(), "test", 256, [0.1, 0.9], 8, 0)
    gains = {}
    for memory in (0, 100, 1000):
        nats, right = (part.reshape(8, 3, DIGITS) for part in answers(Reader(memory), ids.reshape(-1, 256)))
        gains[memory], rows = recalled(nats, right)
        assert nats[:, 0] == pytest.approx(math.log(10))
        assert rows[0]["control_nats_per_byte"] == pytest.approx(math.log(10))
        assert [r["exact"] == 1 for r in rows] == [memory > 256, memory > 50]
    assert np.allclose(gains[0], 0) and np.allclose(gains[1000], DIGITS * math.log2(10), atol=1e-3)
    assert np.allclose(gains[100][:, 0], 0)
    assert np.allclose(gains[100][:, 1], DIGITS * math.log2(10), atol=1e-3)


def test_answers_are_scored_as_the_whole_model_does(facts):
    model = make_model(block_size=128, recipe="modern")
    ids = haystacks(facts.tokens("test").tobytes(), "test", 128, [0.5], 3, 0).reshape(-1, 128)
    x, (nats, right) = torch.from_numpy(ids), answers(model, ids, batch_tokens=256)
    logp = F.log_softmax(model(x[:, :-1]).logits.double(), -1)[:, -DIGITS:]
    assert np.allclose(nats, -logp.gather(-1, x[:, -DIGITS:, None])[..., 0].detach().numpy(), atol=1e-5)
    assert (right == (logp.argmax(-1) == x[:, -DIGITS:]).numpy()).all()


@pytest.mark.slow
def test_needle_reports_every_context_and_depth_of_every_run(checkpoint_of, tmp_path, capsys):
    a = checkpoint_of("a", block_size=64, recipe="modern")
    b = checkpoint_of("b", block_size=64, recipe="modern", seed=2)
    found, text = say(capsys, tmp_path, "needle", "--ckpt", a,
                      "--ckpt", b, "--ckpt", a, "--contexts", "64", "100", "--depths", "0.2", "0.8",
                      "--samples=4")
    first, other, same = (run["results"] for run in found["runs"])
    rows = [(r["context"], r["depth"], r["beyond_training"]) for r in first]
    assert rows == [(c, d, c > 64) for c in (64, 100) for d in (0.2, 0.8)]
    assert text.count("beyond training length") == 6 and first[0]["over_first"] is None
    assert all(r["over_first"] == [0, 0, 0] for r in same), "the same texts for all"
    assert all(r["over_first"][0] != 0 for r in other)
    assert [r["nats_per_byte"] for r in same] == [r["nats_per_byte"] for r in first]


def test_a_longer_context_leaves_lengths_of_the_training_alone(checkpoint_of, facts):
    path = checkpoint_of("a", block_size=64, recipe="modern", acag="headwise", window=0)
    a = SimpleNamespace(ckpt=[path], split="test", device="cpu", dataset=None, settings=[])
    (run,), _, context = open_checkpoints(a, 200)
    assert (context, run.trained, run.model.config.block_size) == (200, 64, 200)
    assert (run.model.config.acag_length, run.model.config.window) == (64, 16)
    (short,), *_ = open_checkpoints(a, 64)
    x = torch.randint(256, (2, 64))
    assert torch.equal(run.model(x).logits, short.model(x).logits)


# ---- late ----

@pytest.mark.slow
def test_loss_by_position_is_that_of_every_position(checkpoint_of, facts, tmp_path, capsys):
    a, b = checkpoint_of("a", block_size=24), checkpoint_of("b", seed=2, block_size=24)
    found, text = say(capsys, tmp_path, "late", "--ckpt", a, "--ckpt", b, "--context=20", "--tokens=0")
    models = [checkpoint.build(checkpoint.read(path), path) for path in (a, b)]
    nats = []
    for model in models:
        model.crop_block_size(20)
        tokens, each = facts.tokens("test"), []
        for start, end, _ in windows_of(facts, "test", 20):
            ids = torch.tensor([facts.separator if i < 0 else int(tokens[i]) for i in range(start - 1, end)])
            logp = F.log_softmax(model(ids[None, :-1]).logits.double(), -1)[0]
            each.append((torch.arange(end - start), -logp.gather(-1, ids[1:, None])[:, 0].detach()))
        nats.append([torch.cat(parts) for parts in zip(*each)])
    for run, (position, values) in zip(found["runs"], nats):
        *buckets, whole = run["results"]
        assert [r["positions"] for r in buckets] == [[0, 0], [1, 1], [2, 3], [4, 7], [8, 15], [16, 19]]
        for r in buckets:
            here = (position >= r["positions"][0]) & (position <= r["positions"][1])
            assert r["tokens"] == here.sum()
            assert r["nats_per_token"][0] == pytest.approx(values[here].mean().item(), abs=1e-5)
        total, count = score(models[found["runs"].index(run)], facts, "test")
        mean = sum(r["tokens"] * r["nats_per_token"][0] for r in buckets) / count
        assert mean == pytest.approx(total / count, abs=1e-5)
        assert whole["tokens"] == count
        assert whole["nats_per_token"][0] == pytest.approx(total / count, abs=1e-5)
    difference = found["runs"][1]["results"][-1]["over_first"]
    assert difference[0] == pytest.approx((nats[1][1] - nats[0][1]).mean().item(), abs=1e-5)
    assert difference[1] < difference[0] < difference[2]
    assert "16-19" in text


@pytest.mark.slow
def test_a_cut_context_is_that_of_the_text_alone(checkpoint_of, facts, tmp_path, capsys):
    """Each token of the second half of a window, by a model that reads only what is left before it."""
    path, context, K = checkpoint_of("a", block_size=16), 16, 4
    found, text = say(capsys, tmp_path, "late", "--ckpt", path, "--tokens=0", f"--cut={K}")
    model = checkpoint.build(checkpoint.read(path), path).eval()
    tokens, less, whole = facts.tokens("test").astype(int), [], []
    for start, end, _ in windows_of(facts, "test", context):
        if end - start < context:
            continue
        for t in range(start + context // 2, end):
            for begins, values in ((t - t % K - K, less), (start, whole)):  # start is a multiple of K here
                ids = torch.tensor([facts.separator if i < 0 else tokens[i] for i in range(begins - 1, t)])
                values.append(-F.log_softmax(model(ids[None]).logits[0, -1].double(), -1)[tokens[t]].item())
    row = found["runs"][0]["results"][-1]
    assert (row["context"], row["positions"], row["tokens"]) == ([K, 2 * K - 1], [8, 15], len(less))
    assert row["nats_per_token"][0] == pytest.approx(np.mean(less), abs=1e-5)
    assert row["over_longer"][0] == pytest.approx(np.mean(less) - np.mean(whole), abs=1e-5)
    assert row["over_longer"][0] != 0 and "over the whole context" in text
    with pytest.raises(SystemExit, match="--cut=3 must divide half of the context, 8"):
        main(["late", "--ckpt", path, "--cut=3"])


def test_intervals_are_of_blocks_of_neighbouring_windows():
    values, window = np.arange(640.0), np.arange(640) // 10  # 64 windows in 32 blocks of 20 values
    mean, low, high = over_windows(values, window, 64)
    means = values.reshape(32, 20).mean(1)
    half = student.ppf(0.975, 31) * means.std(ddof=1) / math.sqrt(32)
    assert (mean, high - mean, mean - low) == pytest.approx((values.mean(), half, half))


def test_positions_beyond_the_training_are_marked(checkpoint_of, tmp_path, capsys):
    found, _ = say(capsys, tmp_path, "late", "--ckpt", checkpoint_of("a", recipe="modern"),
                   "--context=64", "--tokens=1024")
    assert {tuple(r["positions"]) for r in found["runs"][0]["results"] if r["beyond_training"]} == {(32, 63)}


def test_windows_read_one_token_back(facts):
    tokens = torch.from_numpy(facts.tokens("val")[:40].astype(np.int64))
    first, after = window_text(facts, "val", 0, 16, "cpu")
    ids, targets = window_text(facts, "val", 16, 32, "cpu")
    assert first[0] == facts.separator and torch.equal(first[1:], tokens[:15])
    assert torch.equal(after, tokens[:16])
    assert torch.equal(ids, tokens[15:31]) and torch.equal(targets, tokens[16:32])


# ---- keys ----

def reference(model, ids, gone):
    """Logits [T, V] where the keys gone are seen by none but their own queries."""
    earlier = torch.arange(len(ids))[:, None] > torch.arange(len(ids))
    seen = earlier & ~torch.as_tensor(gone) | torch.eye(len(ids)).bool()
    return oracle.logits(model, ids[None], seen=seen)[0]


def test_removal_is_a_column_of_minus_infinity():
    model, ids = make_model(), torch.randint(256, (20,), generator=torch.Generator().manual_seed(0))
    sets = np.stack([gone(20, keys) for keys in ([], [3], [0, 7, 18], [2, 4, 5, 6, 11])])
    nats = nats_without(model, ids, torch.tensor(65), sets)
    assert len(set(nats.round(4))) == 4
    for n, removed in zip(nats, sets):
        truth = -F.log_softmax(reference(model, ids, removed).float().double(), -1)[-1, 65].item()
        assert n == pytest.approx(truth, abs=1e-5)
        with without_keys(model, torch.from_numpy(removed)[None]):
            assert torch.allclose(model(ids[None]).logits[0],
                                  reference(model, ids, removed).float(), atol=1e-5)
    assert "context" not in vars(model), "afterwards all is as before"


# flags by which a token reads earlier ones by more than its keys: convolutions, sums of gates, running means
NOT_BY_KEYS = {"short_conv", "key_offset", "fox", "constraint_names"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, *MECHANISMS])
def test_nobody_can_tell_what_a_removed_key_was(name):
    flags = MECHANISMS.get(name, {})
    model = make_model(recipe="modern", n_head=6, n_embd=48, **flags)
    ids = torch.randint(256, (1, 24), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, 19] = (ids[0, 19] + 1) % 256
    removed = torch.from_numpy(gone(24, [19]))[None]
    def told():
        return (model(ids).logits - model(other).logits)[0].abs().amax(-1)
    with without_keys(model, removed):
        hidden = told()
    assert told()[20:].max() > 1e-4 and hidden[:19].max() < 1e-9 < hidden[19]
    if NOT_BY_KEYS & set(flags):
        assert hidden[20:].max() > 1e-6
    else:
        assert hidden[20:].max() < 1e-9


def test_removing_nothing_changes_nothing():
    for flags in ({}, MECHANISMS["acag"], MECHANISMS["window"]):
        model = make_model(recipe="modern", **flags)
        ids = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))
        plain = model(ids).logits
        with without_keys(model, torch.zeros(2, 24, dtype=torch.bool)):
            assert torch.allclose(model(ids).logits, plain, atol=1e-6)


def test_statistics_count_the_keys_that_are_left():
    model = make_model(recipe="modern", acag="headwise")
    removed = torch.from_numpy(np.stack([gone(8, []), gone(8, [1, 5])]))
    with without_keys(model, removed):
        ctx = model.make_forward_pass(model.mask, slice(0, 8), 0, 8, None, None, torch.device("cpu"))
    assert ctx.n_keys.shape == (2, 1, 8)
    assert ctx.n_keys[:, 0].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 2, 3, 4, 5, 5, 6]]


def test_gradient_times_input_is_the_slope_of_the_loss_as_an_input_fades():
    model = make_model(recipe="modern")
    ids = torch.randint(256, (13,), generator=torch.Generator().manual_seed(0))
    found = gradient_times_input(model, ids[:-1], ids[1:], np.array([6, 11]))
    assert found.shape == (2, 12) and not found[0, 7:].any(), "what comes later has no say"
    model.head = lambda x: model.lm_head(x)  # without the rounding to float32
    for s in (2, 6):
        loss = []
        for fade in (1e-5, -1e-5):
            scale = torch.ones(12, 1, dtype=torch.float64)
            scale[s] -= fade
            hook = model.transformer.drop.register_forward_hook(lambda module, inputs, x: x * scale)
            loss.append(F.cross_entropy(model(ids[None, :-1]).logits[0, 6], ids[7]).item())
            hook.remove()
        assert (loss[0] - loss[1]) / 2e-5 == pytest.approx(found[0, s].item(), abs=1e-4)


def test_rankings_are_what_they_are_called():
    ids, queries = torch.randint(256, (21,), generator=torch.Generator().manual_seed(0)), np.array([15, 19])
    plain, biased = make_model(recipe="modern"), make_model(recipe="modern", **MECHANISMS["a2c_key_bias"])
    found = rankings(plain, ids[:-1], ids[1:], queries)
    assert list(found) == ["attention", "gradient", "recency"]
    assert {s.shape for s in found.values()} == {(2, 20)}
    assert np.allclose(found["attention"].sum(-1), 1) and not found["attention"][0, 16:].any()
    found, traces = rankings(biased, ids[:-1], ids[1:], queries), biased(ids[None, :-1], traces=True).traces
    advantages = [traces[f"blocks.{i}.advantage"][0].detach() for i in range(2)]
    assert list(found)[:2] == ["advantage", "key bias"]
    assert np.allclose(found["advantage"][1], torch.cat(advantages, -1).mean(-1))
    biases = [(a * block.attn.a2c.mix).sum(-1) for a, block in zip(advantages, biased.transformer.h)]
    assert np.allclose(found["key bias"][0], sum(biases).detach() / 4)


def test_effects_of_a_window_are_those_of_each_set_alone(monkeypatch):
    model = make_model(recipe="modern")
    ids = torch.randint(256, (33,), generator=torch.Generator().manual_seed(0))
    a = SimpleNamespace(queries=2, nearest=3, remove=[2, 4], draws=3, singles=8)
    base, rise, like = window_effects(model, ids[:-1], ids[1:], a, np.random.default_rng(5))
    queries = np.sort(np.random.default_rng(5).choice(np.arange(24, 32), 2, replace=False))
    each = [nats_without(model, ids[:t + 1], ids[t + 1],
                         np.stack([gone(t + 1, k) for k in ([], [t - 3, t - 4])])) for t in queries]
    assert base == pytest.approx(np.mean([e[0] for e in each]))
    assert rise["recency", 2] == pytest.approx(np.mean([e[1] - e[0] for e in each]))
    assert set(rise) == {(n, m) for n in ("attention", "gradient", "recency", "random") for m in (2, 4)}
    assert set(like) == {"attention", "gradient", "recency"}
    # a ranking that knows the answer wins, and its opposite loses
    truth = {int(t): nats_without(model, ids[:t + 1], ids[t + 1], np.eye(t + 1, dtype=bool)) for t in queries}
    scores = np.stack([np.pad(truth[int(t)], (0, 31 - t)) for t in queries])
    monkeypatch.setattr(keys, "rankings", lambda *args: {"oracle": scores, "opposite": -scores})
    _, rise, like = window_effects(model, ids[:-1], ids[1:], a, np.random.default_rng(5))
    assert rise["oracle", 2] > rise["random", 2] > rise["opposite", 2]
    assert like == pytest.approx({"oracle": 1, "opposite": -1})


@pytest.mark.slow
def test_keys_asks_all_runs_the_same(checkpoint_of, tmp_path, capsys):
    a = checkpoint_of("a", recipe="modern")
    b = checkpoint_of("b", recipe="modern", seed=2, **MECHANISMS["a2c_temperature"])
    found, text = say(capsys, tmp_path, "keys", "--ckpt", a,
                      "--ckpt", b, "--ckpt", a, "--windows=3", "--queries=2", "--remove", "2",
                      "--draws=2", "--singles=6")
    first, other, same = (run["results"] for run in found["runs"])
    assert first == same
    rankings_of = [r["ranking"] for r in other["rankings"]]
    assert rankings_of == ["advantage", "attention", "gradient", "recency", "random"]
    assert all(r["removed"][0]["over_random"] for r in other["rankings"][:-1]) and "3 windows of 32" in text
    rows = {r["ranking"]: r["removed"][0] for r in other["rankings"]}
    over = rows["advantage"]["rise"][0] - rows["random"]["rise"][0]
    assert rows["advantage"]["over_random"][0] == pytest.approx(over)


# ---- heads ----

@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, dict(recipe="modern"),
                                   dict(recipe="modern", sentinel="sigmoid", acag="headwise")],
                         ids=["gpt2", "modern", "gates"])
def test_a_head_off_is_its_columns_of_the_projection_at_zero(facts, flags):
    model = make_model(**flags)
    before = score(model, facts, "val", max_tokens=512, per_token=True)
    for layer, head in ((0, 1), (1, 0)):
        off, other = without_head(model, layer, head, facts, "val", 512), make_model(**flags)
        with torch.no_grad():
            other.transformer.h[layer].attn.c_proj.weight[:, head * 8:head * 8 + 8] = 0
        assert np.allclose(off, score(other, facts, "val", max_tokens=512, per_token=True), atol=1e-5)
        assert np.abs(off - before).max() > 1e-3
    assert (score(model, facts, "val", max_tokens=512, per_token=True) == before).all()
    assert model.transformer.h[0].attn.gate_override is None


@pytest.mark.parametrize("flags", [{}, dict(sentinel="sigmoid", constraint_names=["one"])],
                         ids=["plain", "gates"])
def test_head_metrics_are_entropy_and_slope(facts, flags):
    model = make_model(recipe="modern", **flags)
    model.head = lambda x: model.lm_head(x)
    cuts = windows_of(facts, "val", 32, 0, 32)
    entropy, slope = head_metrics(model, facts, "val", cuts)
    ids, targets = window_text(facts, "val", *cuts[0][:2], "cpu")
    traces, at = model(ids[None], traces="maps").traces, 0
    for i, block in enumerate(model.transformer.h):
        p = traces[f"blocks.{i}.map"][0].detach()
        for j, head in enumerate(block.attn.all_head_ids()):
            want = -(p[j] * p[j].clamp_min(1e-30).log()).sum(-1).mean().item()
            assert entropy[at] == pytest.approx(want, abs=1e-5)
            gate = block.attn.static_gate(noisy=False)
            gate, loss = 1.0 if gate is None else gate[j].item(), []
            for step in (1e-4, -1e-4):
                model.set_head(i, head, gate=gate + step)
                loss.append(model(ids[None], targets[None]).loss.item())
                block.attn.gate_override = None
            assert slope[at] == pytest.approx(abs(loss[0] - loss[1]) / 2e-4, rel=0.02, abs=1e-3)
            at += 1
    assert at == len(entropy) == len(slope)


def test_a_head_that_does_nothing_has_no_slope_and_can_go(checkpoint_of, facts, tmp_path, capsys):
    model = make_model(recipe="modern")
    with torch.no_grad():
        model.transformer.h[1].attn.c_proj.weight[:, 8:] = 0
    found, text = say(capsys, tmp_path, "heads", "--ckpt", save(tmp_path / "a.pt", model, facts),
                      "--tokens=256")
    run = found["runs"][0]["results"]
    *others, idle = run["heads"]
    assert (idle["layer"], idle["head"], idle["gate_gradient"], idle["change"]) == (1, 1, 0, [0, 0, 0])
    assert all(h["gate_gradient"] > 0 and h["change"][0] != 0 for h in others) and run["n"] == 4
    assert set(run["spearman"]) == {"entropy", "gate gradient", "both ranks"} and "n = 4 heads" in text


# ---- states ----

@pytest.mark.slow
def test_states_are_those_of_the_policy_piece_by_piece(facts, tmp_path, capsys):
    """Counted once more from the metrics of each piece; ranks by scipy."""
    model = make_model(recipe="modern")
    found, text = say(capsys, tmp_path, "states", "--ckpt", save(tmp_path / "a.pt", model, facts),
                      "--pieces=7", "--windows=3")
    result = found["runs"][0]["results"]
    tokens, limits = facts.tokens("val").astype(np.int64), ControllerConfig()
    for start, piece in zip(np.linspace(0, len(tokens) - 97, 7).astype(int), result["pieces"]):
        ids = torch.from_numpy(tokens[start:start + 97])
        x, y = ids[:96].view(3, 32), ids[1:].view(3, 32)
        metrics, counts = measure(model, x, y), dict(overloaded=0, misaligned=0, idle=0)
        for i, layer in enumerate(metrics["utilisation"]):
            for h, share in enumerate(layer.tolist()):
                counts["overloaded"] += share > limits.policy_overloaded / 2
                counts["misaligned"] += metrics["conflict"][i][h].item() < limits.policy_conflict
                counts["idle"] += metrics["entropy"][i][h].item() > limits.policy_entropy and share < 0.25
        assert {key: piece[key] for key in counts} == counts
        assert piece["largest"] == pytest.approx(2 * max(t.max().item() for t in metrics["utilisation"]))
        assert piece["nats"] == pytest.approx(model(x, y).loss.item(), rel=1e-5)
    want = spearmanr(*([piece[key] for piece in result["pieces"]] for key in ("largest", "nats")))
    assert result["spearman"]["largest"]["rho"] == pytest.approx(want.statistic)
    assert "7 pieces of 96 tokens" in text and text.count("hardest") == 1


def test_a_withdrawn_head_makes_no_other_look_overloaded():
    """Two heads a layer: the one that is left sends all of its layer's output, which is no overload."""
    model = make_model(recipe="modern", agency=True).eval()
    model.set_head(0, 1, state="withdrawn")
    ids = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))
    found = states_on(model, ids[:, :-1], ids[:, 1:])
    assert measure(model, ids[:, :-1], ids[:, 1:])["utilisation"][0].tolist() == [1.0, 0.0]
    assert found["overloaded"] == 0 and found["largest"] < 1.5


# ---- the command line ----

def test_help_lists_every_probe_in_a_line(capsys):
    with pytest.raises(SystemExit) as e:
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert e.value.code == 0
    for word in PROBES:
        assert sum(bool(re.match(rf"    {word} +\S.*\.$", line)) for line in lines) == 1, word


@pytest.mark.parametrize("word", PROBES)
def test_a_probe_gets_what_follows_its_word(word, capsys):
    with pytest.raises(SystemExit) as e:
        main([word, "--help"])
    assert e.value.code == 0 and capsys.readouterr().out.startswith(f"usage: probe.py {word} ")


# ---- refusals ----
