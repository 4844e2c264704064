"""lab.probe constraints, compared with slow counts and planted truths: figures, passages, removals."""
import functools
import json
import time

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score, precision_recall_curve, roc_auc_score

import helpers
from helpers import save_model, write_dataset
from lab_helpers import is_digit, write_labels
from nanoheads import checkpoint, timing
from nanoheads.common import UserError
from nanoheads.dataset import Dataset
from nanoheads.scoring import score as lm_score
from lab.probe import main as probe
from lab.probes import intervals
from lab.probes.constraints import metrics, token_probes
from lab.probes.constraints.adjudicate import aggregate, classes, classify, documents, passages
from lab.probes.constraints.explain import removal_sets, window_changes, without_keys
from lab.probes.constraints.metrics import (METRICS, best_threshold, compare, figures, over_documents,
                                            over_text)
from lab.probes.constraints.score import PRIOR
from lab.probes.constraints.setup import HEADS, Part, branch_size, layers_of, parts_of, read_scores, starts_of
from lab.probes.constraints.token_probes import Probe, descend, fit_probe, mlp_width, nats_of_names

NAMES = ["digit", "noise"]
SYMBOLS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456789 \n.,", np.uint8)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Fewer steps of an MLP probe, and fewer blocks of text: enough for these."""
    monkeypatch.setattr(token_probes, "STEPS", 100)
    monkeypatch.setattr(intervals, "BLOCKS", 6)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A byte dataset of independent random symbols: what a token is says nothing of its neighbours."""
    splits = {split: np.random.default_rng(seed).choice(SYMBOLS, n).tobytes()
              for seed, (split, n) in enumerate(dict(train=4000, val=2000, test=2001).items())}
    return Dataset(write_dataset(tmp_path_factory.mktemp("data") / "symbols", splits))


@pytest.fixture(scope="module")
def labels(data, tmp_path_factory):
    return write_labels(tmp_path_factory.mktemp("labels") / "weak", data)


make_model = functools.partial(helpers.make_model, spread=1.0, noise=0.0, recipe="modern", n_layer=3,
                               n_head=2, n_embd=32)


def with_heads(**flags):
    return make_model(**{**dict(constraint_names=NAMES, constraint_hidden=16), **flags})


@pytest.fixture
def saved(tmp_path, data):
    return lambda name, model: save_model(tmp_path / f"{name}.pt", model, data)


@pytest.fixture
def models(saved):
    return ["--ckpt", saved("heads", with_heads()), "--plain", saved("plain", make_model(seed=2))]


@pytest.fixture
def say(capsys, tmp_path):
    """say(args) -> (what the command writes as JSON, what it prints)."""
    def call(*args):
        out = tmp_path / "out.json"
        probe(["constraints", *args, f"--json={out}", "--device=cpu"])
        return json.loads(out.read_text()), capsys.readouterr().out
    return call


# ---- figures ----

def test_figures_are_what_slow_counts_say():
    rng = np.random.default_rng(0)
    y = rng.random(300) < 0.3
    p = np.clip(0.3 * y + rng.random(300), 0, 1).round(2)  # with ties
    found = figures(y, p, 0.6)
    pairs = [(a > b) + 0.5 * (a == b) for a in p[y] for b in p[~y]]
    assert found["auroc"] == pytest.approx(np.mean(pairs))
    ap, recall = 0.0, 0.0
    for threshold in sorted(set(p), reverse=True):
        above = p >= threshold
        ap += (above[y].mean() - recall) * y[above].mean()
        recall = above[y].mean()
    assert found["ap"] == pytest.approx(ap)
    hits, wrong, missed = (y & (p >= 0.6)).sum(), (~y & (p >= 0.6)).sum(), (y & (p < 0.6)).sum()
    assert found["f1"] == pytest.approx(hits / (hits + (wrong + missed) / 2))
    assert found["brier"] == pytest.approx(np.mean((y - p) ** 2))
    ece = 0.0
    for i in range(15):
        here = (p >= i / 15) & ((p < (i + 1) / 15) | (i == 14))
        ece += abs((y[here] - p[here]).sum()) / 300
    assert found["ece"] == pytest.approx(ece)
    assert np.isnan(list(figures(y[y], p[y], 0.6).values())).all()
    assert f1_score(y, p >= best_threshold(y, p)) == max(f1_score(y, p >= t) for t in set(p))


def test_intervals_over_text_leave_out_blocks_in_turn():
    rng = np.random.default_rng(2)
    y, p, block = rng.random(400) < 0.4, rng.random(400), np.arange(400) // 50
    found = over_text(y, p, 0.5, block)
    for metric in METRICS:
        want = [figures(y, p, 0.5)[metric],
                *(figures(y[block != b], p[block != b], 0.5)[metric] for b in range(8))]
        assert found[metric] == pytest.approx(np.array(want))


def test_draws_of_documents_are_weighted_figures():
    rng = np.random.default_rng(0)
    y, p, document = rng.random(60) < 0.5, rng.random(60).round(1), np.repeat(np.arange(3, 15), 5)
    found = over_documents(y, p, 0.4, document, 1)
    draws = np.random.default_rng(1).multinomial(12, np.full(12, 1 / 12), metrics.DRAWS)
    for i, times in enumerate([np.ones(12, int), *draws[:10]]):
        many = np.repeat(np.arange(60), times.repeat(5))
        assert found["accuracy"][i] == pytest.approx(accuracy_score(y[many], p[many] >= 0.4))
        assert found["f1"][i] == pytest.approx(f1_score(y[many], p[many] >= 0.4))
        assert found["auroc"][i] == pytest.approx(roc_auc_score(y[many], p[many]))
    two = over_documents(np.array([True, False]), np.array([0.7, 0.1]), 0.5, np.arange(2), 0)
    assert np.isnan(two["f1"]).any() and two["auroc"][0] == 1 and set(two["accuracy"][1:]) >= {1.0}


def test_differences_are_paired_and_absent_where_there_are_no_pairs():
    found = [{HEADS: dict(m=np.array([0.9 + i])), "MLP probe, plain": dict(m=np.array([0.5 + i])),
              PRIOR: dict(m=np.array([0.25 * i]))} for i in range(3)]
    whole, less = compare(found, ["m"], None, True)
    assert whole[HEADS]["m"][0] == pytest.approx(1.9) and whole[HEADS]["m"][1] < 0
    assert less["MLP probe, plain"]["m"] == pytest.approx([0.4] * 3), "the same in each pair"
    assert set(compare(found, ["m"], None, False)[1]) == {PRIOR}


# ---- what models say ----

@pytest.mark.parametrize("layers, trained", [([0, 2], [0, 2]), ([0, 1, 2], [1, 2])], ids=str)
def test_states_are_what_attention_reads_and_scores_those_that_a_loss_has_seen(layers, trained):
    model = with_heads(noise=0.2, constraint_layers=layers, constraint_loss_layers=trained)
    ids = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(0))
    seen = {}
    for i, block in enumerate(model.transformer.h):
        block.ln_1.register_forward_hook(lambda module, x, y, i=i: seen.update({i: y}))
    assert layers_of(model) == trained and layers_of(make_model()) == []
    states, scores = read_scores(model, ids, trained)
    assert torch.equal(states, torch.cat([seen[i] for i in trained], -1))
    traces = model(ids, traces=True).traces
    for n, name in enumerate(NAMES):
        want = torch.stack([traces[f"blocks.{i}.constraint.{name}"] for i in trained]).mean(0)
        assert torch.allclose(scores[..., n], want, atol=1e-4)
    states, scores = read_scores(make_model(noise=0.2), ids, layers)
    assert states.shape == (2, 20, 32 * len(layers)) and scores.shape == (2, 20, 0)


def test_parts_and_windows_do_not_overlap(data):
    train, val, test = parts_of(data, "test")
    assert (train.split, val.split, test) == ("train", "val", Part("test", 0, 2001))
    _, choose, judge = parts_of(data, "val")
    assert choose == Part("val", 0, 1000) and judge == Part("val", 1000, 2000)
    starts = starts_of(judge, 32)
    assert len(starts) == 31 and starts[0] == 1000 and set(np.diff(starts)) == {32}
    some = starts_of(judge, 32, 320)
    assert len(some) == 10 and set(some) <= set(starts) and some[-1] > 1850


# ---- probes ----

def random_states(n, seed=0, C=8):
    return torch.randn(n, C, generator=torch.Generator().manual_seed(seed)) * 3 + 1


def test_the_linear_probe_is_logistic_regression_on_what_is_known():
    x, decay = random_states(400), 1e-2
    y = (x[:, :2] + random_states(400, 1)[:, :2] > 2).float()
    y[::5, 1] = -1
    linear = Probe(x, y, 0, 0)
    assert len(list(descend(linear, x, y, decay, 0))) == 1
    scaled = ((x - x.mean(0)) / x.std(0)).numpy()
    for n in range(2):
        known = y[:, n].numpy() >= 0
        want = LogisticRegression(C=1 / (known.sum() * decay), tol=1e-8, max_iter=1000)
        want.fit(scaled[known], y[:, n].numpy()[known])
        assert linear(x)[:, n].detach().numpy() == pytest.approx(want.decision_function(scaled), abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("width", [0, 32])
def test_probes_find_what_is_in_the_states_and_nothing_else(width):
    """A half-space is found by both, an exclusive or by the MLP alone; of chance, no more than the prior."""
    def labels_of(x, seed):
        chance = random_states(len(x), seed + 100, 1)[:, 0]
        return torch.stack((x[:, 0] + x[:, 3] > 2, (x[:, 0] > 1) ^ (x[:, 1] > 1), chance > 2.5), 1).float()
    train, val, test = ((x, labels_of(x, seed)) for seed, n in ((10, 1500), (11, 1500), (12, 4000))
                        for x in [random_states(n, seed)])
    said, prior = fit_probe(train, val, width, 0)(test[0]), Probe(*train, width, 0)(test[0])
    plain, either, chance = (roc_auc_score(test[1][:, n], said[:, n]) for n in range(3))
    assert plain > 0.99 and (either > 0.75 if width else abs(either - 0.5) < 0.1) and abs(chance - 0.5) < 0.05
    assert torch.allclose(prior.sigmoid(), train[1].mean(0).expand(4000, 3), atol=1e-5)
    alone = [(x, y[:, 2:]) for x, y in (train, val, test)]
    nats = nats_of_names(fit_probe(*alone[:2], width, 0)(test[0]), alone[2][1]).item()
    of_prior = nats_of_names(prior[:, 2:], alone[2][1]).item()
    assert of_prior - 5e-3 < nats < of_prior + 0.03


def test_the_mlp_probe_has_as_many_parameters_as_the_heads():
    for flags in ({}, dict(constraint_layers=[0, 1]), dict(constraint_variant="B", n_embd=64,
                                                                constraint_hidden=128)):
        model = with_heads(**flags)
        names = [name for name in checkpoint.tensor_shapes(model.config) if ".constraint." in name]
        size = sum(model.state_dict()[name].numel() for name in names)
        assert branch_size(model) == size > 1000
        inputs = len(flags.get("constraint_layers", [1])) * model.config.n_embd
        mlp = Probe(torch.randn(9, inputs), torch.ones(9, 2), mlp_width(model, 2), 0)
        assert abs(mlp.size() / size - 1) < 0.01


# ---- score ----

def known_digits(data, split, n):
    """(which of the first n tokens have a label that is not 1/2, whether each is a digit)."""
    tokens, at = np.asarray(data.tokens(split))[:n], np.arange(n)
    return (at % 7 > 0) & (at % 11 > 0), is_digit(tokens)


def heads_said(model, data, split):
    """(labels [n] of digit, bool, probabilities [n]) of known tokens, by traces, window by window."""
    n = len(data.tokens(split)) // 32 * 32
    known, y = known_digits(data, split, n)
    ids = torch.from_numpy(np.asarray(data.tokens(split))[:n].astype(np.int64)).view(-1, 32)
    with torch.no_grad():
        scores = model(ids, traces=True).traces["blocks.2.constraint.digit"]
    return y[known], scores.double().sigmoid().flatten().numpy()[known]


@pytest.mark.slow
def test_score_tells_what_is_there_from_what_is_not(models, labels, data, tmp_path, say):
    """Digits are in the states of a plain GPT, noise is not, and labels one token off are noise as well."""
    found, text = say("score", *models, "--labels", labels, "--tokens=0", "--own",
                      f"--picture={tmp_path / 'r.png'}")
    rows = {row["name"]: row for row in found["names"]}
    for scorer in ("linear probe, plain", "MLP probe, plain", "linear probe, own"):
        digit, noise = (rows[name]["figures"][scorer] for name in NAMES)
        assert digit["auroc"][0] > 0.99 and digit["f1"][0] > 0.95 and digit["brier"][0] < 0.02
        assert abs(noise["auroc"][0] - 0.5) < 0.05
        assert rows["digit"]["heads_less"][scorer]["auroc"][2] < 0, "heads that nobody trained know less"
    # what the heads say are their traces, at a threshold from val
    (y_val, p_val), (y, p) = (heads_said(with_heads(), data, split) for split in ("val", "test"))
    digit, threshold = rows["digit"], best_threshold(y_val, p_val)
    assert (digit["tokens"], digit["positive"]) == (len(y), pytest.approx(y.mean())), "no unknown, no 1/2"
    assert digit["figures"][HEADS]["auroc"][0] == pytest.approx(roc_auc_score(y, p), abs=1e-4)
    taken, on_test = digit["thresholds"][HEADS][0], best_threshold(y, p)
    assert abs(taken - threshold) < abs(taken - on_test) and taken == pytest.approx(threshold, abs=1e-5)
    assert digit["figures"][HEADS]["f1"][0] == pytest.approx(f1_score(y, p >= threshold), abs=2e-3)
    precision, recall, _ = precision_recall_curve(y, p)
    assert f1_score(y, p >= threshold) < (2 * precision * recall / np.maximum(precision + recall, 1e-9)).max()
    known, digits = known_digits(data, "train", 4000)
    share, prior = digits[known].mean(), digit["figures"][PRIOR]
    assert digit["prior"] == pytest.approx(share) and prior["auroc"] == [0.5, 0.5, 0.5]
    assert prior["ece"][0] == pytest.approx(abs(share - y.mean()))
    assert "weak: unchecked" in text and text.count("heads less") == 10
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    nats, _ = lm_score(make_model(seed=2), data, "test")
    assert found["bits_per_byte"][models[3]] == pytest.approx(nats / 2001 / np.log(2), rel=1e-5)

    shifted = write_labels(tmp_path / "shifted", data, shift=1)
    found, text = say("score", *models, "--labels", shifted, "--tokens=0", "--split=val")
    for scorer in ("linear probe, plain", "MLP probe, plain"):
        assert abs(found["names"][0]["figures"][scorer]["auroc"][0] - 0.5) < 0.06
    assert found["names"][1]["tokens"] < 1000 and "val, second half" in text


@pytest.mark.slow
def test_several_checkpoints_pair_with_as_many_plain_whose_probes_are_kept(saved, labels, tmp_path, say):
    """Kept for the same model and text: of another text others are fitted, and a damaged file is anew."""
    runs = [x for s in (1, 2) for x in ("--ckpt", saved(f"h{s}", with_heads(seed=s)))]
    plain = [x for s in (4, 5) for x in ("--plain", saved(f"p{s}", make_model(seed=s)))]
    pairs = [["score", *runs[i:i + 2], *plain[i:i + 2], "--labels", labels, "--tokens=512"] for i in (0, 2)]

    def files():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("probes/*.pt")}
    found, text = say("score", *runs, *plain, *pairs[0][5:], "--fit=1024")
    kept = files()
    each = [say(*pair, "--fit=1024")[0]["names"][0]["figures"] for pair in pairs]
    assert len(kept) == 4 and files() == kept, "a linear one and an MLP of each"
    for scorer in (HEADS, "MLP probe, plain"):
        assert found["names"][0]["figures"][scorer]["auroc"][0] == pytest.approx(
            np.mean([one[scorer]["auroc"][0] for one in each]))
    values = [one[HEADS]["auroc"][0] - one["MLP probe, plain"]["auroc"][0] for one in each]
    half = 12.7062047 * np.std(values, ddof=1) / np.sqrt(2)
    assert found["names"][0]["heads_less"]["MLP probe, plain"]["auroc"] == pytest.approx(
        [np.mean(values), np.mean(values) - half, np.mean(values) + half], abs=1e-6)
    assert "bits/byte less plain" in text
    for path in kept:
        path.write_bytes(b"damaged")
    assert say(*pairs[0], "--fit=1024")[0]["names"][0]["figures"] == each[0]
    assert sum(path.stat().st_size > 100 for path in kept) == 2
    say(*pairs[0], "--fit=900")
    assert len(files()) == 6


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(timing, "LINE_EVERY", 0.01)
    for _ in timing.progress_bar(range(4), "x"):
        time.sleep(0.02)
    lines = capsys.readouterr().err.splitlines()
    assert 2 < len(lines) < 5 and lines[0] == "x: 1 of 4, 00:00 so far, about 00:00 left"


# ---- adjudicate ----

def numbered_articles(n, first):
    """n WikiText articles of two sections, from one whose words are all "w<first>", the next number, ..."""
    text = b""
    for i in range(first, first + n):
        body = b"w%03d " % i * 60
        text += b" \n = Title %d = \n \n %s\n \n = = Section = = \n \n %s\n" % (i, body, body)
    return text


def test_passages_of_two_parts_never_share_a_document(tmp_path):
    """An article goes on from train into val, another from the first half of val into the second."""
    text = numbered_articles(30, 100)
    a, c = len(text) // 3, 2 * len(text) // 3
    folder = write_dataset(tmp_path / "wiki", {"train": text[:a], "val": text[a:c], "test": text[c:]})
    data, length = Dataset(folder), 64
    for split in ("test", "val"):
        parts, seen = parts_of(data, split), []
        for part, (starts, document) in zip(parts, passages(data, parts, length, 10_000)):
            tokens, own = data.tokens(part.split).tobytes(), {}
            assert len(starts) > 10 and starts.min() >= part.first and starts.max() + length <= part.last
            for start, number in zip(starts, document):
                said = set(tokens[start:start + length].replace(b"w", b" w").split()) & \
                    {b"w%03d" % i for i in range(1000)}
                own.setdefault(number, set()).update(said)
            assert all(len(said) == 1 for said in own.values()), "no passage is of two articles"
            seen.append(set().union(*own.values()))
        assert not seen[0] & seen[1] and not seen[1] & seen[2] and not seen[0] & seen[2]
    raw = data.tokens("val").tobytes()
    cut = raw.index(b" = Section = = \n")  # the rest of a section's line looks like a title
    assert len(documents(data, Part("val", cut, len(raw)))) == raw[cut:].count(b"Title")


def test_titles_are_found_whatever_the_tokens_are(tmp_path):
    text, splits, found = "é ".encode() + numbered_articles(3, 0), ("train", "val", "test"), {}
    for folder in (write_dataset(tmp_path / "chars", dict.fromkeys(splits, text.decode()), "char",
                                 sorted(set(text.decode()))),
                   write_dataset(tmp_path / "bytes", dict.fromkeys(splits, text))):
        data = Dataset(folder)
        tokens = data.tokens("val")
        found[folder.name] = [data.tokenizer.decode_bytes(tokens[a:b])
                              for a, b in documents(data, Part("val", 0, len(tokens)))]
    assert found["chars"] == found["bytes"] and len(found["bytes"]) == 3
    assert all(raw.startswith(b" = Title ") for raw in found["bytes"])


def test_text_without_titles_is_cut_into_blocks(data):
    parts = parts_of(data, "test")
    for part, (starts, document) in zip(parts, passages(data, parts, 32, 10_000)):
        assert starts[0] == 16 * 32, "the first block may go on from elsewhere"
        assert (document == (starts - 512) // 512).all() and set(np.diff(starts)) == {32}
    (some, _), *_ = passages(data, parts, 32, 20)
    assert len(some) == 20 and some[-1] > 3400


def test_classes_are_outer_thirds_by_the_terciles_of_train():
    """A highest mean that a third of them have is the upper class itself."""
    parts = [Part(s, 0, 1) for s in ("train", "val", "test")]

    def rows(*means):
        return np.array([[m, m, -1.0] for m in means])  # unknown is not counted
    chosen, y, (low, high) = classes([rows(0.0, 0.1, 0.2, 0.3, 0.4, 0.5), rows(0.0, 0.25, 0.9),
                                      rows(0.3, 0.9, 0.0, 0.1)], "n", parts)
    assert (low, high) == (pytest.approx(0.5 / 3), pytest.approx(1 / 3))
    assert [c.tolist() for c in chosen] == [[0, 1, 4, 5], [0, 2], [1, 2, 3]]
    assert [c.tolist() for c in y] == [[False, False, True, True], [False, True], [True, False, False]]
    chosen, y, (low, high) = classes([rows(0.2, 0.4, 0.9, 1.0, 1.0, 1.0, 1.0), rows(1.0, 0.9, 0.95),
                                      rows(0.0, 1.0)], "n", parts)
    assert low == high == 0.9, "the lower tercile is 0.9 at most, so that no passage is in both"
    assert [c.tolist() for c in y] == [[False] * 3 + [True] * 4, [True, False, True], [False, True]]
    with pytest.raises(UserError, match="one class only"):
        classes([rows(1.0, 1.0, 1.0)] * 3, "n", parts)


def test_the_threshold_of_a_passage_comes_from_val():
    rng = np.random.default_rng(3)
    y = [rng.random(60) < share for share in (0.5, 0.2, 0.8)]
    x = [rng.normal(size=(60, 2)) + each[:, None] for each in y]
    p, threshold = classify(x, y)
    p_val, swapped = classify([x[0], x[2], x[1]], [y[0], y[2], y[1]])
    assert threshold != swapped
    assert f1_score(y[1], p_val >= threshold) == pytest.approx(
        max(f1_score(y[1], p_val >= t) for t in p_val), abs=0.02)


def test_a_passage_is_summed_up_by_mean_largest_and_quantiles():
    scores = np.random.default_rng(0).normal(size=(3, 40, 2))
    found = aggregate(scores)
    assert found.shape == (3, 14)
    assert np.allclose(found[1, :4], [*scores[1].mean(0), *scores[1].max(0)])
    assert np.allclose(found[2, 8:10], np.median(scores[2], 0))


@pytest.mark.slow
def test_adjudicate_on_held_out_documents(models, tmp_path, say):
    """Blocks rich in digits are told from others by what reads them; labels that are chance are not."""
    rng, digits = np.random.default_rng(0), np.frombuffer(b"0123456789", np.uint8)

    def text(blocks):
        return b"".join(np.where(rng.random(64) < rng.random(), rng.choice(digits, 64),
                                 rng.choice(SYMBOLS, 64)).astype(np.uint8).tobytes() for _ in range(blocks))
    folder = tmp_path / "mixed"
    mixed = Dataset(write_dataset(folder, {s: text(n) for s, n in (("train", 200), ("val", 120),
                                                                  ("test", 200))}))
    write_labels(folder / "labels" / "weak", mixed)
    found, printed = say("adjudicate", *models, "--labels=weak", f"--dataset={folder}", "--passage=64",
                         "--fit=2000")
    digit, noise = found["tasks"]
    assert [digit["task"], noise["task"]] == NAMES and found["features"]["mean hidden state, plain"] == 32
    for features in ("linear probe, plain", "MLP probe, plain", "mean hidden state, plain"):
        assert digit["figures"][features]["auroc"][0] > 0.97
        assert abs(noise["figures"][features]["auroc"][0] - 0.5) < 0.15
        assert digit["heads_less"][features]["auroc"][0] < 0
    low, high = digit["figures"][HEADS]["accuracy"][1:]
    assert low < digit["figures"][HEADS]["accuracy"][0] < high
    assert "classes are made of the labels themselves" in printed


# ---- explain ----

def test_removal_sets_are_what_they_are_called():
    scores = np.array([5.0, 1, 9, 8, 0, 2, 3, 99])
    sets = removal_sets(scores, 2, 3, np.random.default_rng(0))
    assert [np.flatnonzero(row).tolist() for row in sets[:3]] == [[2, 3], [1, 4], [1, 4]]
    assert (sets.sum(1) == 2).all() and not sets[:, -1].any(), "the last token stays"
    assert len({tuple(row) for row in removal_sets(np.arange(50.0), 3, 6, np.random.default_rng(0))}) == 9


def test_changes_are_those_of_keys_that_nobody_sees():
    model, rng = with_heads(noise=0.2), np.random.default_rng(7)
    ids = torch.randint(256, (24,), generator=torch.Generator().manual_seed(0))

    def said(rows):
        with torch.no_grad():
            traces = model(rows, traces=True).traces
        return [traces[f"blocks.2.constraint.{name}"].double().numpy() for name in NAMES]

    before = [each[0] for each in said(ids[None])]
    sets = [removal_sets(each, 3, 4, rng) for each in before]
    found = window_changes(model, ids, 3, 4, np.random.default_rng(7))
    for n, name in enumerate(NAMES):
        with without_keys(model, torch.from_numpy(sets[n])):
            after = said(ids.expand(7, -1))[n]
        move, stays = after - before[n], ~sets[n].any(0)
        final, mean, size, mean_size = found[name, "highest"]
        assert final == pytest.approx(move[0, -1], abs=1e-4) and abs(final) > 1e-3
        assert mean == pytest.approx(move[0, stays].mean(), abs=1e-4)
        assert (size, mean_size) == pytest.approx((abs(final), abs(mean)))
        assert found[name, "neighbours"][0] == pytest.approx(move[2, -1], abs=1e-4)
        assert found[name, "random"][2] == pytest.approx(np.abs(move[3:, -1]).mean(), abs=1e-4)


def test_explain_reports_every_run(models, saved, say):
    args = ["explain", *models[:2], "--ckpt", saved("b", with_heads(seed=5, noise=0.2)), "--windows=6"]
    found, text = say(*args)
    assert found == say(*args)[0] != say(*args, "--seed=1")[0]
    assert len(found["rows"]) == 2 * 2 * 7 and "6 passages of 32 tokens, 5 hidden" in text
    less = [r for r in found["rows"] if r["removed"] == "highest less random"][-1]
    high, chance = ([r for r in found["rows"] if r["removed"] == s][-1] for s in ("highest", "random"))
    assert less["mean"][0] == pytest.approx(high["mean"][0] - chance["mean"][0]) and less["mean"][0] != 0
