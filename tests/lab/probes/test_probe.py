"""Probes, compared with slow references and hand-made models: what removing a key or a head means."""
import functools
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy.stats import t as student
from torch.nn import functional as F

import helpers
import oracle
from helpers import save_model, small_models, tiny
from nanoheads.dataset import Dataset
from nanoheads.scoring import score, windows_of
from lab.probe import PROBES, main
from lab.probes.constraints.explain import without_each, without_keys
from lab.probes.heads import head_metrics, window_text, without_head
from lab.probes.intervals import over_windows
from lab.probes.shared import open_checkpoints

make_model = functools.partial(helpers.make_model, spread=6.0, noise=0.3, dtype=torch.float64, n_head=2,
                               n_embd=16)


@pytest.fixture
def text(bytes_data):
    return Dataset(bytes_data)


# ---- windows and contexts ----

def test_a_longer_context_leaves_lengths_of_the_training_alone(tmp_path, text):
    model = make_model(block_size=64, recipe="modern", acag="headwise", window=0).float()
    a = SimpleNamespace(ckpt=[save_model(tmp_path / "a.pt", model, text)], split="test", device="cpu",
                        dataset=None, settings=[])
    (run,), _, context = open_checkpoints(a, 200)
    assert (context, run.trained_context, run.model.config.block_size) == (200, 64, 200)
    assert (run.model.config.acag_length, run.model.config.window) == (64, 16)
    (short,), *_ = open_checkpoints(a, 64)
    x = torch.randint(256, (2, 64))
    assert torch.equal(run.model(x).logits, short.model(x).logits)


def test_intervals_are_of_blocks_of_neighbouring_windows():
    values, window = np.arange(640.0), np.arange(640) // 10  # 64 windows in 32 blocks of 20 values
    mean, low, high = over_windows(values, window, 64)
    means = values.reshape(32, 20).mean(1)
    half = student.ppf(0.975, 31) * means.std(ddof=1) / math.sqrt(32)
    assert (mean, high - mean, mean - low) == pytest.approx((values.mean(), half, half))


def test_intervals_hold_the_truth_nineteen_times_of_twenty():
    """100 studies of a text whose windows resemble their neighbours."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(100):
        values = np.convolve(rng.normal(size=257), [0.6, 0.4], "valid")
        _, low, high = over_windows(values, np.arange(256), 256)
        held += low <= 0 <= high
    assert 88 <= held <= 99


# ---- keys that are hidden, as `constraints explain` hides them ----

def gone(T, keys):
    """bool [T], True at the keys."""
    return np.isin(np.arange(T), keys)


def reference(model, ids, gone):
    """Logits [T, V] where the keys gone are seen by none but their own queries."""
    earlier = torch.arange(len(ids))[:, None] > torch.arange(len(ids))
    seen = earlier & ~torch.as_tensor(gone) | torch.eye(len(ids)).bool()
    return oracle.logits(model, ids[None], seen=seen)[0]


def test_removal_is_a_column_of_minus_infinity():
    model, ids = make_model(), torch.randint(256, (20,), generator=torch.Generator().manual_seed(0))
    sets = np.stack([gone(20, keys) for keys in ([], [3], [0, 7, 18], [2, 4, 5, 6, 11])])

    def nats_of_65(rows):
        return -F.log_softmax(model(rows).logits[:, -1].double(), -1)[:, 65].detach().numpy()

    nats = without_each(model, ids, sets, nats_of_65)
    assert len(set(nats.round(4))) == 4
    for n, removed in zip(nats, sets):
        truth = -F.log_softmax(reference(model, ids, removed).float().double(), -1)[-1, 65].item()
        assert n == pytest.approx(truth, abs=1e-5)
        with without_keys(model, torch.from_numpy(removed)[None]):
            assert torch.allclose(model(ids[None]).logits[0], reference(model, ids, removed).float(),
                                  atol=1e-5)


# flags by which a token reads earlier ones by more than its keys: convolutions, sums of gates, running means
NOT_BY_KEYS = "short_conv", "key_offset", "fox", "constraint"


@settings(max_examples=15)
@given(flags=small_models())
def test_nobody_can_tell_what_a_removed_key_was(flags):
    flags = {key: value for key, value in flags.items() if not key.startswith(NOT_BY_KEYS)}
    model = tiny(flags, std=0.3, states=False)
    ids = torch.randint(37, (1, 16), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, 11] = (ids[0, 11] + 1) % 37

    def told():
        return (model(ids).logits - model(other).logits)[0].abs().amax(-1)
    plain = model(ids).logits
    with without_keys(model, torch.from_numpy(gone(16, [11]))[None]):
        hidden = told()
    assert hidden[:11].max() < 1e-9 < hidden[11] and hidden[12:].max() < 1e-9
    with without_keys(model, torch.zeros(1, 16, dtype=torch.bool)):
        assert torch.allclose(model(ids).logits, plain, atol=1e-6)
    assert torch.equal(model(ids).logits, plain), "afterwards all is as before"


# ---- heads ----

def test_a_head_off_is_its_columns_of_the_projection_at_zero(text):
    flags = dict(recipe="modern", sentinel="sigmoid", acag="headwise")
    model = make_model(**flags)
    before = score(model, text, "val", max_tokens=512, per_token=True)
    for layer, head in ((0, 1), (1, 0)):
        off, other = without_head(model, layer, head, text, "val", 512), make_model(**flags)
        with torch.no_grad():
            other.transformer.h[layer].attn.c_proj.weight[:, head * 8:head * 8 + 8] = 0
        assert np.allclose(off, score(other, text, "val", max_tokens=512, per_token=True), atol=1e-5)
        assert np.abs(off - before).max() > 1e-3
    assert (score(model, text, "val", max_tokens=512, per_token=True) == before).all()


def test_head_metrics_are_entropy_and_slope(text):
    model = make_model(recipe="modern", sentinel="sigmoid", constraint_names=["one"])
    cuts = windows_of(text, "val", 32, 0, 32)
    entropy, slope = head_metrics(model, text, "val", cuts)
    ids, targets = window_text(text, "val", *cuts[0][:2], "cpu")
    traces, at = model(ids[None], traces="maps").traces, 0
    for i, block in enumerate(model.transformer.h):
        p = traces[f"blocks.{i}.map"][0].detach()
        for j, head in enumerate(block.attn.all_head_ids()):
            want = -(p[j] * p[j].clamp_min(1e-30).log()).sum(-1).mean().item()
            assert entropy[at] == pytest.approx(want, abs=1e-5)
            loss = []
            for step in (1e-2, -1e-2):
                model.set_gate(i, head, 1 + step)
                loss.append(model(ids[None], targets[None]).loss.item())
                block.attn.gate_by_hand = None
            assert slope[at] == pytest.approx(abs(loss[0] - loss[1]) / 2e-2, rel=0.05, abs=1e-3)
            at += 1
    assert at == len(entropy) == len(slope)


def test_a_head_that_does_nothing_has_no_slope_and_can_go(text, tmp_path, capsys):
    model, out = make_model(recipe="modern").float(), tmp_path / "out.json"
    with torch.no_grad():
        model.transformer.h[1].attn.c_proj.weight[:, 8:] = 0
    main(["heads", "--ckpt", save_model(tmp_path / "a.pt", model, text), "--tokens=256", f"--json={out}",
          "--device=cpu"])
    run = json.loads(out.read_text())["runs"][0]["results"]
    *others, idle = run["heads"]
    assert (idle["layer"], idle["head"], idle["gate_gradient"], idle["change"]) == (1, 1, 0, [0, 0, 0])
    assert all(h["gate_gradient"] > 0 and h["change"][0] != 0 for h in others) and run["n"] == 4
    assert set(run["spearman"]) == {"entropy", "gate gradient", "both ranks"}
    assert "n = 4 heads" in capsys.readouterr().out


# ---- the command line ----

def test_help_lists_every_probe_in_a_line_and_each_has_its_own(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for word in PROBES:
        assert sum(bool(re.match(rf"    {word} +\S.*\.$", line)) for line in lines) == 1, word
        with pytest.raises(SystemExit, match="^0$"):
            main([word, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: probe.py {word} ")
