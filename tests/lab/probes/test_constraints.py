"""probe.py constraints against slow counts and planted truths: figures, passages, removals, refusals."""
import functools
import json
import time
from dataclasses import asdict

import numpy as np
import pytest
import torch
from helpers import write_dataset
from lab_helpers import write_labels
from sklearn.calibration import calibration_curve
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score, precision_recall_curve, roc_auc_score
from torch.nn import functional as F

import helpers
from nanoheads import checkpoint, timing
from nanoheads.common import UserError
from nanoheads.dataset import Dataset
from nanoheads.scoring import score as lm_score
from lab.probe import main as probe
from lab.probes import intervals
from lab.probes.constraints import explain, metrics, token_probes
from lab.probes.constraints.adjudicate import aggregate, classes, classify, documents, passages
from lab.probes.constraints.explain import removal_sets, scores_without, window_changes, without_keys
from lab.probes.constraints.metrics import (METRICS, best_threshold, bins, compare, figures, over_documents,
                                            over_text)
from lab.probes.constraints.score import PRIOR
from lab.probes.constraints.setup import HEADS, Part, branch_size, layers_of, parts_of, read_scores, starts_of
from lab.probes.constraints.token_probes import Probe, descend, fit_probe, mlp_width, nats_of_names

NAMES = ["digit", "noise"]
SYMBOLS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456789 \n.,", np.uint8)


def symbols(n, seed):
    return np.random.default_rng(seed).choice(SYMBOLS, n).tobytes()


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Fewer blocks, draws and steps: enough for these."""
    monkeypatch.setattr(token_probes, "STEPS", 400)
    monkeypatch.setattr(intervals, "BLOCKS", 6)
    monkeypatch.setattr(metrics, "DRAWS", 200)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A byte dataset of independent random symbols: what a token is says nothing of its neighbours."""
    folder = tmp_path_factory.mktemp("data") / "symbols"
    return Dataset(write_dataset(folder, {"train": symbols(12000, 0), "val": symbols(6000, 1),
                                          "test": symbols(6001, 2)}))


@pytest.fixture(scope="module")
def labels(data, tmp_path_factory):
    return write_labels(tmp_path_factory.mktemp("labels") / "weak", data)


make_model = functools.partial(helpers.make_model, spread=1.0, noise=0.0, recipe="modern", n_layer=3,
                               n_head=2, n_embd=32)


def with_heads(**flags):
    return make_model(**{**dict(constraint_names=NAMES, constraint_hidden=16), **flags})


@pytest.fixture
def saved(tmp_path, data):
    """saved(name, model, data=data) -> path of a checkpoint."""
    def save(name, model, data=data):
        path = tmp_path / f"{name}.pt"
        checkpoint.save(path, dict(model=model.state_dict(), config=asdict(model.config), meta=data.meta,
                                   dataset=str(data.dir), train=dict(dataset=str(data.dir)), step=1))
        return str(path)
    return save


def main(args):
    probe(["constraints", *args])


def say(capsys, tmp_path, *args):
    """(what main(args) writes as JSON, what it prints)."""
    out = tmp_path / "out.json"
    main([*args, f"--json={out}", "--device=cpu"])
    return json.loads(out.read_text()), capsys.readouterr().out


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
        said = p >= threshold
        ap += (said[y].mean() - recall) * y[said].mean()
        recall = said[y].mean()
    assert found["ap"] == pytest.approx(ap)
    hits, wrong, missed = (y & (p >= 0.6)).sum(), (~y & (p >= 0.6)).sum(), (y & (p < 0.6)).sum()
    assert found["f1"] == pytest.approx(hits / (hits + (wrong + missed) / 2))
    assert found["brier"] == pytest.approx(np.mean((y - p) ** 2))
    ece = 0.0
    for i in range(15):
        here = (p >= i / 15) & ((p < (i + 1) / 15) | (i == 14))
        ece += abs((y[here] - p[here]).sum()) / 300
    assert found["ece"] == pytest.approx(ece)
    smooth = rng.random(300) ** 2  # none on the edge of a bin, which scikit-learn counts to the left
    count, mean, share = bins(y, smooth)
    want_share, want_mean = calibration_curve(y, smooth, n_bins=15)
    assert np.allclose(share[count > 0], want_share) and np.allclose(mean[count > 0], want_mean)
    assert np.isnan(list(figures(y[y], p[y], 0.6).values())).all()


@pytest.mark.slow
def test_the_threshold_is_that_of_the_highest_f1():
    rng = np.random.default_rng(1)
    y = rng.random(200) < 0.2
    p = 0.2 * y + rng.random(200)
    scores = {t: f1_score(y, p >= t) for t in p}
    assert f1_score(y, p >= best_threshold(y, p)) == max(scores.values())


@pytest.mark.slow
def test_intervals_over_text_leave_out_blocks_in_turn():
    rng = np.random.default_rng(2)
    y, p, block = rng.random(400) < 0.4, rng.random(400), np.arange(400) // 50
    found = over_text(y, p, 0.5, block)
    for metric in METRICS:
        want = [figures(y, p, 0.5)[metric],
                *(figures(y[block != b], p[block != b], 0.5)[metric] for b in range(8))]
        assert found[metric] == pytest.approx(np.array(want))


def test_differences_are_paired_and_absent_where_there_are_no_pairs():
    found = [{HEADS: dict(m=np.array([0.9 + i])), "MLP probe, plain": dict(m=np.array([0.5 + i])),
              PRIOR: dict(m=np.array([0.25 * i]))} for i in range(3)]
    whole, less = compare(found, ["m"], None, True)
    assert whole[HEADS]["m"][0] == pytest.approx(1.9) and whole[HEADS]["m"][1] < 0
    assert less["MLP probe, plain"]["m"] == pytest.approx([0.4] * 3), "the same in each pair"
    assert set(compare(found, ["m"], None, False)[1]) == {PRIOR}


# ---- what models say ----

@pytest.mark.parametrize("layers", [[1], [0, 2]])
def test_states_are_what_the_blocks_attention_reads(layers):
    model = with_heads(noise=0.2, constraint_layers=layers)
    ids = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(0))
    seen = {}
    for i, block in enumerate(model.transformer.h):
        block.ln_1.register_forward_hook(lambda module, x, y, i=i: seen.update({i: y}))
    states, scores = read_scores(model, ids, layers)
    assert torch.equal(states, torch.cat([seen[i] for i in layers], -1))
    assert not torch.allclose(states[..., :32], seen[layers[0] + 1], atol=0.1), "the next block reads another"
    traces = model(ids, traces=True).traces
    for n, name in enumerate(NAMES):
        want = torch.stack([traces[f"blocks.{i}.constraint.{name}"] for i in layers]).mean(0)
        assert torch.allclose(scores[..., n], want, atol=1e-5)
    plain = make_model(noise=0.2)
    states, scores = read_scores(plain, ids, layers)
    assert states.shape == (2, 20, 32 * len(layers)) and scores.shape == (2, 20, 0)
    assert not plain.transformer.h[1].attn._forward_pre_hooks, "nothing stays behind"


def test_blocks_whose_scores_no_loss_has_seen_are_left_out():
    flags = dict(noise=0.2, constraint_layers=[0, 1, 2], constraint_loss_layers=[2, 1])
    model, ids = with_heads(**flags), torch.arange(20)[None]
    assert layers_of(model) == [1, 2] and layers_of(make_model()) == []
    scores, traces = read_scores(model, ids, [1])[1], model(ids, traces=True).traces
    for n, name in enumerate(NAMES):
        want = (traces[f"blocks.1.constraint.{name}"] + traces[f"blocks.2.constraint.{name}"]) / 2
        assert torch.allclose(scores[..., n], want, atol=1e-4)
    assert branch_size(model) == 2 * branch_size(with_heads())


def test_parts_and_windows_do_not_overlap(data):
    train, val, test = parts_of(data, "test")
    assert (train.split, val.split, test) == ("train", "val", Part("test", 0, 6001))
    _, choose, judge = parts_of(data, "val")
    assert choose == Part("val", 0, 3000) and judge == Part("val", 3000, 6000)
    starts = starts_of(judge, 32)
    assert len(starts) == 93 and starts[0] == 3000 and set(np.diff(starts)) == {32}
    few = starts_of(judge, 32, 320)
    assert len(few) == 10 and set(few) <= set(starts) and few[-1] > 5500


# ---- probes ----

def random_states(n, seed=0, C=8):
    return torch.randn(n, C, generator=torch.Generator().manual_seed(seed)) * 3 + 1


def test_the_linear_probe_is_logistic_regression():
    x, decay = random_states(400), 1e-2
    y = (x[:, :2] + random_states(400, 1)[:, :2] > 2).float()
    y[::5, 1] = -1
    probe = Probe(x, y, 0, 0)
    assert len(list(descend(probe, x, y, decay, 0))) == 1
    scaled = ((x - x.mean(0)) / x.std(0)).numpy()
    for n in range(2):
        known = y[:, n].numpy() >= 0
        want = LogisticRegression(C=1 / (known.sum() * decay), tol=1e-8, max_iter=1000)
        want.fit(scaled[known], y[:, n].numpy()[known])
        assert probe(x)[:, n].detach().numpy() == pytest.approx(want.decision_function(scaled), abs=2e-3)


def test_cross_entropy_counts_known_tokens_alone():
    logits, labels = random_states(50, 3, 2), random_states(50, 4, 2).sigmoid()
    labels[::3, 0], labels[:, 1] = -1, -1
    known = labels[:, 0] >= 0
    want = F.binary_cross_entropy_with_logits(logits[known, 0], labels[known, 0])
    assert torch.allclose(nats_of_names(logits, labels), torch.stack((want, torch.tensor(0.0))))


def pairs(labels_of, seeds=(10, 11, 12)):
    return [(x, labels_of(x)) for x in (random_states(1500, seed) for seed in seeds)]


@pytest.mark.slow
def test_probes_find_what_is_in_the_states():
    """A half-space is found by both; an exclusive or by the MLP alone."""
    train, val, test = pairs(lambda x: torch.stack(
        (x[:, 0] + x[:, 3] > 2, (x[:, 0] > 1) ^ (x[:, 1] > 1)), 1).float())
    aurocs = {}
    for width in (0, 32):
        said = fit_probe(train, val, width, 0)(test[0])
        aurocs[width] = [roc_auc_score(test[1][:, n], said[:, n]) for n in (0, 1)]
    assert aurocs[0][0] > 0.99 and aurocs[32][0] > 0.99
    assert abs(aurocs[0][1] - 0.5) < 0.1 and aurocs[32][1] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("width", [0, 32])
def test_probes_find_nothing_where_there_is_nothing(width):
    """Labels by chance: on tokens not fitted to, no better than the prior, and hardly worse."""
    sizes = {1: 400, 2: 400, 3: 4000}
    train, val, test = ((random_states(n, seed, 30), (random_states(n, seed + 100, 1) > 2.5).float())
                        for seed, n in sizes.items())
    prior = Probe(*train, width, 0)
    nats, of_prior = (nats_of_names(each(test[0]), test[1]).item()
                      for each in (fit_probe(train, val, width, 0), prior))
    assert of_prior - 5e-3 < nats < of_prior + 0.03
    assert torch.allclose(prior(test[0]).sigmoid(), train[1].mean().expand(4000, 1), atol=1e-5)


@pytest.mark.slow
def test_probes_depend_on_their_seed_alone():
    train, val, _ = pairs(lambda x: (x[:, :1] > 1).float())
    first, same, other = (fit_probe(train, val, 8, seed)(train[0]) for seed in (0, 0, 1))
    assert torch.equal(first, same) and not torch.equal(first, other)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, dict(n_embd=64, constraint_hidden=128), dict(constraint_heads=3),
                                   dict(constraint_layers=[0, 1]), dict(constraint_variant="B", n_embd=64)])
def test_the_mlp_probe_has_as_many_parameters_as_the_heads(flags):
    model = with_heads(**flags)
    names = [name for name in checkpoint.tensor_shapes(model.config) if ".constraint." in name]
    size = sum(model.state_dict()[name].numel() for name in names)
    assert branch_size(model) == size > 1000
    blocks = len(flags.get("constraint_layers", [1]))
    probe = Probe(torch.randn(9, blocks * model.config.n_embd), torch.ones(9, 2), mlp_width(model, 2), 0)
    assert abs(probe.size() / size - 1) < 0.01


# ---- score ----

@pytest.fixture
def models(saved):
    return ["--ckpt", saved("heads", with_heads()), "--plain", saved("plain", make_model(seed=2))]


def test_probes_are_fitted_once_for_the_same_model_and_text(models, labels, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(token_probes, "STEPS", 40)
    asked = ["score", *models, "--labels", labels, "--tokens=500", "--fit=1000"]
    fitted, fit = [], fit_probe
    monkeypatch.setattr(token_probes, "fit_probe", lambda *args: fitted.append(args[2]) or fit(*args))
    first = say(capsys, tmp_path, *asked)[0]
    assert len(fitted) == 2 and fitted[0] == 0, "a linear one, and an MLP"
    assert say(capsys, tmp_path, *asked)[0] == first and len(fitted) == 2
    say(capsys, tmp_path, *asked, "--seed=1")  # of other initial values
    say(capsys, tmp_path, *asked[:-1], "--fit=900")
    assert len(fitted) == 6
    for path in tmp_path.rglob("probes/*.pt"):
        path.write_bytes(b"damaged")
    assert say(capsys, tmp_path, *asked)[0] == first and len(fitted) == 8


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(timing, "LINE_EVERY", 0.01)
    for _ in timing.progress_bar(range(4), "x"):
        time.sleep(0.02)
    lines = capsys.readouterr().err.splitlines()
    assert 2 < len(lines) < 5 and lines[0] == "x: 1 of 4, 00:00 so far, about 00:00 left"
    monkeypatch.undo()
    assert [*timing.progress_bar(range(4), "x")] == [0, 1, 2, 3] and capsys.readouterr().err == ""


@pytest.mark.slow
def test_score_tells_what_is_there_from_what_is_not(models, labels, data, tmp_path, capsys):
    """Digits are in the states of a plain GPT, noise is not, and labels one token off are noise as well."""
    found, text = say(capsys, tmp_path, "score", *models, "--labels", labels, "--tokens=0", "--own",
                      f"--picture={tmp_path / 'r.png'}")
    rows = {row["name"]: row for row in found["names"]}
    for scorer in ("linear probe, plain", "MLP probe, plain", "linear probe, own"):
        digit, noise = (rows[name]["figures"][scorer] for name in NAMES)
        assert digit["auroc"][0] > 0.99 and digit["f1"][0] > 0.95 and digit["brier"][0] < 0.02
        assert abs(noise["auroc"][0] - 0.5) < 0.04
        low, high = rows["digit"]["heads_less"][scorer]["auroc"][1:]
        assert high < 0, "heads that nobody trained know less"
    tokens = np.asarray(data.tokens("test"))[:6001 // 32 * 32]
    known = (np.arange(len(tokens)) % 7 > 0) & (np.arange(len(tokens)) % 11 > 0)
    is_digit = ((tokens >= 48) & (tokens < 58))[known]
    assert rows["digit"]["tokens"] == known.sum(), "unknown and 1/2 are left out"
    assert rows["digit"]["positive"] == pytest.approx(is_digit.mean())
    train = np.asarray(data.tokens("train"))
    known = (np.arange(len(train)) % 7 > 0) & (np.arange(len(train)) % 11 > 0)
    share = ((train >= 48) & (train < 58))[known].mean()
    prior = rows["digit"]["figures"][PRIOR]
    assert rows["digit"]["prior"] == pytest.approx(share)
    assert prior["auroc"] == [0.5, 0.5, 0.5]
    assert prior["ece"][0] == pytest.approx(abs(share - is_digit.mean()))
    assert "weak: unchecked" in text and text.count("heads less") == 10
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    nats, _ = lm_score(make_model(seed=2), data, "test")
    assert found["bits_per_byte"][models[3]] == pytest.approx(nats / 6001 / np.log(2), rel=1e-5)

    shifted = write_labels(tmp_path / "shifted", data, shift=1)
    found, _ = say(capsys, tmp_path, "score", *models, "--labels", shifted, "--tokens=0")
    for scorer in ("linear probe, plain", "MLP probe, plain"):
        assert abs(found["names"][0]["figures"][scorer]["auroc"][0] - 0.5) < 0.05


def heads_said(model, data, split):
    """(labels [n] of digit, bool, probabilities [n]) of known tokens, by traces, window by window."""
    tokens, y, p = torch.from_numpy(np.asarray(data.tokens(split)).astype(np.int64)), [], []
    for start in range(0, len(tokens) - 31, 32):
        ids = tokens[start:start + 32]
        traces = model(ids[None], traces=True).traces
        said = traces["blocks.2.constraint.digit"][0].detach().double().sigmoid()
        at = torch.arange(start, start + 32)
        known = (at % 7 > 0) & (at % 11 > 0)
        y.append(((ids >= 48) & (ids < 58))[known])
        p.append(said[known])
    return torch.cat(y).numpy(), torch.cat(p).numpy()


@pytest.mark.slow
def test_heads_are_scored_by_their_traces_at_a_threshold_from_val(models, labels, data, tmp_path, capsys):
    found, _ = say(capsys, tmp_path, "score", *models[:2], "--labels", labels, "--tokens=0")
    model = with_heads()
    (y_val, p_val), (y, p) = (heads_said(model, data, split) for split in ("val", "test"))
    row = found["names"][0]
    assert row["figures"][HEADS]["auroc"][0] == pytest.approx(roc_auc_score(y, p), abs=1e-4)
    precision, recall, _ = precision_recall_curve(y, p)
    best_on_test = (2 * precision * recall / np.maximum(precision + recall, 1e-9)).max()
    threshold = best_threshold(y_val, p_val)
    assert row["thresholds"][HEADS][0] == pytest.approx(threshold, abs=1e-5)
    f1 = row["figures"][HEADS]["f1"][0]
    assert f1 == pytest.approx(f1_score(y, p >= threshold), abs=2e-3)
    assert f1 < best_on_test - 1e-4 and row["thresholds"][HEADS][0] != best_threshold(y, p)


@pytest.mark.slow
def test_val_is_halved_where_there_is_no_test(models, labels, tmp_path, capsys):
    found, text = say(capsys, tmp_path, "score", *models[:2], "--labels", labels, "--tokens=0", "--split=val")
    assert found["names"][1]["tokens"] < 3000 and "val, second half" in text


@pytest.mark.slow
def test_several_checkpoints_pair_with_as_many_plain(saved, labels, tmp_path, capsys):
    runs = [x for s in (1, 2) for x in ("--ckpt", saved(f"h{s}", with_heads(seed=s)))]
    plain = [x for s in (4, 5) for x in ("--plain", saved(f"p{s}", make_model(seed=s)))]
    short = ["--labels", labels, "--tokens=1024", "--fit=2048"]
    found, text = say(capsys, tmp_path, "score", *runs, *plain, *short)
    each = []
    for i in (0, 2):
        one, _ = say(capsys, tmp_path, "score", *runs[i:i + 2], *plain[i:i + 2], *short)
        each.append(one["names"][0]["figures"])
    again, _ = say(capsys, tmp_path, "score", *runs[2:], *plain[2:], *short)
    assert one == again, "the same seed, the same figures"
    for scorer in (HEADS, "MLP probe, plain"):
        assert found["names"][0]["figures"][scorer]["auroc"][0] == pytest.approx(
            np.mean([one[scorer]["auroc"][0] for one in each]))
    less = found["names"][0]["heads_less"]["MLP probe, plain"]["auroc"]
    values = [one[HEADS]["auroc"][0] - one["MLP probe, plain"]["auroc"][0] for one in each]
    half = 12.7062047 * np.std(values, ddof=1) / np.sqrt(2)
    assert less == pytest.approx([np.mean(values), np.mean(values) - half, np.mean(values) + half], abs=1e-6)
    assert "bits/byte less plain" in text
    found, _ = say(capsys, tmp_path, "score", *runs, *plain[:2], *short)
    assert "MLP probe, plain" in found["names"][0]["figures"]
    assert set(found["names"][0]["heads_less"]) == {PRIOR}, "one plain GPT makes no pairs"


# ---- adjudicate ----

def articles(n, first, words=60):
    """n WikiText articles; the words of article i are all "w<first + i>", and of two sections each."""
    text = b""
    for i in range(first, first + n):
        body = b"w%03d " % i * words
        text += b" \n = Title %d = \n \n %s\n \n = = Section = = \n \n %s\n" % (i, body, body)
    return text


@pytest.mark.slow
def test_passages_of_two_parts_never_share_a_document(tmp_path):
    """An article goes on from train into val, another from the first half of val into the second."""
    text = articles(30, 100)
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
                assert len(said) <= 1, "no passage is of two articles"
                own.setdefault(number, set()).update(said)
            assert all(len(said) == 1 for said in own.values())
            seen.append(set().union(*own.values()))
        assert not seen[0] & seen[1] and not seen[1] & seen[2] and not seen[0] & seen[2]
    raw = data.tokens("val").tobytes()
    cut = raw.index(b" = Section = = \n")  # the rest of a section's line looks like a title
    assert raw[cut - 2:cut] == b" ="
    assert len(documents(data, Part("val", cut, len(raw)))) == raw[cut:].count(b"Title")


def test_titles_are_found_whatever_the_tokens_are(tmp_path):
    text, splits = "é ".encode() + articles(3, 0), ("train", "val", "test")
    chars = write_dataset(tmp_path / "chars", dict.fromkeys(splits, text.decode()), "char",
                          sorted(set(text.decode())))
    raw = write_dataset(tmp_path / "bytes", dict.fromkeys(splits, text))
    found = {}
    for folder in (chars, raw):
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
    assert len(some) == 20 and some[-1] > 11000


def test_classes_are_outer_thirds_by_the_terciles_of_train():
    def rows(means):
        return np.array([[m, m, -1.0] for m in means])  # unknown is not counted
    train = rows([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    chosen, y, (low, high) = classes([train, rows([0.0, 0.25, 0.9]), rows([0.3, 0.9, 0.0, 0.1])], "n",
                                     [Part(s, 0, 1) for s in ("train", "val", "test")])
    assert low == pytest.approx(0.5 / 3) and high == pytest.approx(1 / 3)
    assert [c.tolist() for c in chosen] == [[0, 1, 4, 5], [0, 2], [1, 2, 3]]
    assert [c.tolist() for c in y] == [[False, False, True, True], [False, True], [True, False, False]]


def test_a_highest_mean_that_a_third_have_is_the_upper_class():
    def rows(*means):
        return np.array([[m, m] for m in means])
    parts = [Part(s, 0, 1) for s in ("train", "val", "test")]
    train = rows(0.2, 0.4, 0.9, 1.0, 1.0, 1.0, 1.0)
    chosen, y, (low, high) = classes([train, rows(1.0, 0.9, 0.95), rows(0.0, 1.0)], "n", parts)
    assert low == high == 0.9, "the lower tercile is 0.9 at most, so that no passage is in both"
    assert [c.tolist() for c in chosen] == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2], [0, 1]]
    assert [c.tolist() for c in y] == [[False] * 3 + [True] * 4, [True, False, True], [False, True]]
    with pytest.raises(UserError, match="one class only"):
        classes([rows(1.0, 1.0, 1.0)] * 3, "n", parts)


@pytest.mark.slow
def test_draws_of_documents_are_weighted_figures():
    rng = np.random.default_rng(0)
    y, p, document = rng.random(60) < 0.5, rng.random(60).round(1), np.repeat(np.arange(3, 15), 5)
    found = over_documents(y, p, 0.4, document, 1)
    draws = np.random.default_rng(1).multinomial(12, np.full(12, 1 / 12), metrics.DRAWS)
    for i, times in enumerate([np.ones(12, int), *draws[:20]]):
        many = np.repeat(np.arange(60), times.repeat(5))
        assert found["accuracy"][i] == pytest.approx(accuracy_score(y[many], p[many] >= 0.4))
        assert found["f1"][i] == pytest.approx(f1_score(y[many], p[many] >= 0.4))
        assert found["auroc"][i] == pytest.approx(roc_auc_score(y[many], p[many]))
    assert len(found["f1"]) == metrics.DRAWS + 1
    two = over_documents(np.array([True, False]), np.array([0.7, 0.1]), 0.5, np.arange(2), 0)
    assert np.isnan(two["f1"]).any() and two["auroc"][0] == 1 and set(two["accuracy"][1:]) >= {1.0}


@pytest.mark.slow
def test_the_threshold_of_a_passage_comes_from_val():
    rng = np.random.default_rng(3)
    y = [rng.random(300) < share for share in (0.5, 0.2, 0.8)]
    x = [rng.normal(size=(300, 2)) + each[:, None] for each in y]
    p, threshold = classify(x, y)
    p_val, swapped = classify([x[0], x[2], x[1]], [y[0], y[2], y[1]])
    assert threshold != swapped
    assert f1_score(y[1], p_val >= threshold) == pytest.approx(
        max(f1_score(y[1], p_val >= t) for t in p_val), abs=0.02)


@pytest.mark.slow
def test_adjudicate_on_held_out_documents(models, data, tmp_path, capsys):
    """Blocks rich in digits are told from others by what reads them; labels that are chance are not."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "mixed"
    digits = np.frombuffer(b"0123456789", np.uint8)

    def text(blocks):
        return b"".join(np.where(rng.random(64) < rng.random(), rng.choice(digits, 64),
                                 rng.choice(SYMBOLS, 64)).astype(np.uint8).tobytes() for _ in range(blocks))
    mixed = Dataset(write_dataset(folder, {s: text(n) for s, n in (("train", 300), ("val", 200),
                                                                  ("test", 200))}))
    (folder / "labels").mkdir()
    write_labels(folder / "labels" / "weak", mixed)
    args = ["adjudicate", *models, "--labels=weak", f"--dataset={folder}", "--passage=64", "--fit=4000"]
    found, text = say(capsys, tmp_path, *args)
    digit, noise = found["tasks"]
    assert [digit["task"], noise["task"]] == NAMES and found["features"]["mean hidden state, plain"] == 32
    for features in ("linear probe, plain", "MLP probe, plain", "mean hidden state, plain"):
        assert digit["figures"][features]["auroc"][0] > 0.97
        assert abs(noise["figures"][features]["auroc"][0] - 0.5) < 0.15
        assert digit["heads_less"][features]["auroc"][0] < 0
    low, high = digit["figures"][HEADS]["accuracy"][1:]
    assert low < digit["figures"][HEADS]["accuracy"][0] < high
    assert "classes are made of the labels themselves" in text
    one, _ = say(capsys, tmp_path, *args, "--task=digit")
    assert one["tasks"] == [digit]


def test_a_passage_is_summed_up_by_mean_largest_and_quantiles():
    scores = np.random.default_rng(0).normal(size=(3, 40, 2))
    found = aggregate(scores)
    assert found.shape == (3, 14)
    assert np.allclose(found[1, :4], [*scores[1].mean(0), *scores[1].max(0)])
    assert np.allclose(found[2, 8:10], np.median(scores[2], 0))


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
    nothing = scores_without(model, ids, np.zeros((1, 24), bool))
    assert nothing[0, :, 1] == pytest.approx(before[1], abs=1e-4)


def test_top_tokens_explain_where_they_are_what_is_read(models, data, tmp_path, capsys, monkeypatch):
    """A score that counts digits falls by k without the highest; one that is constant by nothing."""
    def count(model, ids, removed):
        digit = ((ids >= 48) & (ids < 58)).double().numpy()
        seen = digit * ~removed
        return np.stack((seen.cumsum(-1) + 100 * digit, np.zeros_like(seen)), -1)

    monkeypatch.setattr(explain, "scores_without", count)
    found, _ = say(capsys, tmp_path, "explain", *models[:2], "--k=2", "--windows=40")
    rows = {(r["name"], r["removed"]): r for r in found["rows"]}
    assert rows["digit", "highest"]["final"] == pytest.approx([-2, -2, -2])
    assert rows["digit", "lowest"]["final"] == pytest.approx([0, 0, 0])
    share = rows["digit", "random"]["final"][0]
    assert -0.8 < share < -0.3, "ten of forty symbols are digits"
    less = rows["digit", "highest less random"]
    assert less["final"][0] == pytest.approx(-2 - share) and less["|final|"][1] > 0
    assert all(rows["noise", s]["mean"] == [0, 0, 0] for s in ("highest", "random", "highest less random"))


@pytest.mark.slow
def test_explain_reports_every_run(models, saved, tmp_path, capsys):
    args = ["explain", *models[:2], "--ckpt", saved("b", with_heads(seed=5, noise=0.2)), "--windows=6"]
    found, text = say(capsys, tmp_path, *args)
    again, _ = say(capsys, tmp_path, *args)
    other, _ = say(capsys, tmp_path, *args, "--seed=1")
    assert found == again != other
    assert len(found["rows"]) == 2 * 2 * 7 and "6 passages of 32 tokens, 5 hidden" in text
    less = [r for r in found["rows"] if r["removed"] == "highest less random"][-1]
    high, chance = ([r for r in found["rows"] if r["removed"] == s][-1] for s in ("highest", "random"))
    assert less["mean"][0] == pytest.approx(high["mean"][0] - chance["mean"][0]) and less["mean"][0] != 0
