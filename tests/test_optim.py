"""Muon against PyTorch's own and against float64, which parameters go where, the learning-rate schedules."""

import copy
import math

import pytest
import torch

from model import GPT, GPTConfig
from optim import MARGIN, QUINTICS, Muon, lr_multiplier, make_optimizers, orthogonalise
from train import TrainConfig


def slow_orthogonalise(G):
    """The iteration as it is written in the paper, one float64 matrix at a time."""
    X = G.double() / (MARGIN * G.double().norm())
    for a, b, c in QUINTICS:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X


@pytest.mark.parametrize("shape", [(16, 16), (16, 64), (1, 5)])
@pytest.mark.parametrize("condition", [1e0, 1e3, 1e7])
def test_orthogonalise_equals_the_written_iteration(shape, condition):
    rows, cols = shape
    torch.manual_seed(0)
    u, v = torch.linalg.qr(torch.randn(3, rows, rows))[0], torch.linalg.qr(torch.randn(3, cols, rows))[0]
    G = u @ torch.diag(torch.logspace(0, -math.log10(condition), rows)) @ v.mT * 37.0
    got = orthogonalise(G, low_precision=False)
    want = torch.stack([slow_orthogonalise(g) for g in G])
    assert (got - want).norm() / want.norm() < 1e-3
    assert orthogonalise(torch.zeros(1, 4, 4), False).isfinite().all()


def test_singular_values_come_out_around_one():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(4, 32, 128), False))
    assert 0.4 < values.min() and values.max() < 1.6


@pytest.mark.parametrize("low_precision", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (128, 512), (256, 1024)])
@pytest.mark.parametrize("noise", [0.0, 0.003, 0.01, 0.1])
def test_a_nearly_rank_one_update_does_not_blow_up(shape, noise, low_precision):
    """One singular value carries the whole norm, as in the first steps after a zero start.

    Rounding may lift it above 1.
    """
    torch.manual_seed(0)
    rows, cols = shape
    G = torch.randn(6, rows, 1) @ torch.randn(6, 1, cols)
    G = G / G.norm(dim=(-2, -1), keepdim=True)
    G = G + noise * torch.randn_like(G) / math.sqrt(rows * cols)
    assert torch.linalg.matrix_norm(orthogonalise(G, low_precision).float(), 2).max() < 1.8


def test_the_blow_up_is_real_without_the_margin(monkeypatch):
    """Negative control: the published quintics as they stand send a singular value of 1.004 far away."""
    monkeypatch.setattr("optim.MARGIN", 1 / 1.004)
    monkeypatch.setattr("optim.QUINTICS",
                        [(a * MARGIN, b * MARGIN**3, c * MARGIN**5) for a, b, c in QUINTICS[:3]]
                        + QUINTICS[3:])
    G = torch.outer(torch.randn(16), torch.randn(16))[None]
    assert torch.linalg.matrix_norm(orthogonalise(G, False), 2).item() > 1e6


def test_muon_agrees_with_pytorchs_muon(monkeypatch):
    """Same momentum, same scaling by the shape, same decoupled decay, once both use the same polynomial."""
    monkeypatch.setattr("optim.QUINTICS", [(3.4445, -4.7750, 2.0315)] * 5)
    torch.manual_seed(0)
    start = [torch.randn(24, 24), torch.randn(24, 96), torch.randn(96, 24)]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    a = Muon([(p, 1) for p in ours], lr=0.05, momentum=0.9, weight_decay=0.1)
    b = torch.optim.Muon(theirs, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True)
    for _ in range(4):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q, s in zip(ours, theirs, start):
        ours_moved, theirs_moved = p - s, q - s
        # PyTorch's runs in bfloat16: the same direction and length to its precision
        cosine = (ours_moved * theirs_moved).sum() / ours_moved.norm() / theirs_moved.norm()
        assert cosine > 0.995
        assert (ours_moved.norm() / theirs_moved.norm()).item() == pytest.approx(1.0, abs=0.03)


def test_stacked_matrices_are_orthogonalised_one_by_one():
    torch.manual_seed(0)
    parts = [torch.nn.Parameter(torch.randn(16, 16)) for _ in range(3)]
    stacked = torch.nn.Parameter(torch.cat([p.data for p in parts]))
    a, b = Muon([(p, 1) for p in parts], lr=0.1), Muon([(stacked, 3)], lr=0.1)
    whole = torch.nn.Parameter(stacked.data.clone())
    wrong = Muon([(whole, 1)], lr=0.1)  # negative control: q, k and v as one tall matrix
    for _ in range(3):
        for p in parts:
            p.grad = torch.randn(16, 16)
        stacked.grad = torch.cat([p.grad for p in parts])
        whole.grad = stacked.grad.clone()
        a.step(), b.step(), wrong.step()
    assert torch.allclose(torch.cat([p.data for p in parts]), stacked.data, atol=1e-6)
    assert not torch.allclose(whole.data, stacked.data, atol=1e-2)


def test_muon_takes_the_blocks_matrices_and_nothing_else():
    model = GPT(GPTConfig(vocab_size=11, block_size=8, n_layer=2,
                          n_head=2, n_embd=16, recipe="modern", pos="learned", bias=True, norm="layernorm"))
    muon, adamw = make_optimizers(model, TrainConfig().for_recipe("modern"))
    names = {id(p): n for n, p in model.named_parameters()}
    taken = {names[id(p)] for g in muon.param_groups for p in g["params"]}
    rest = {names[id(p)] for g in adamw.param_groups for p in g["params"]}
    assert taken == {f"transformer.h.{i}.{m}.weight" for i in (0, 1)
                     for m in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert taken | rest == set(names.values()) and not taken & rest
    assert {g["slices"]: len(g["params"]) for g in muon.param_groups} == {1: 6, 3: 2}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_only_matrices_decay(optimizer):
    model = GPT(GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16, bias=True))
    for o in make_optimizers(model, TrainConfig(optimizer=optimizer, weight_decay=0.1).for_recipe("gpt2")):
        for group in o.param_groups:
            assert all((p.dim() >= 2) == (group["weight_decay"] > 0) for p in group["params"])
    assert sum(len(g["params"]) for o in make_optimizers(model, TrainConfig().for_recipe("gpt2"))
               for g in o.param_groups) == len(list(model.parameters()))


def test_a_mechanisms_own_parameter_never_decays():
    """Whatever its shape; the layers inside a mechanism decay like any other."""
    model = GPT(GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16, acag="elementwise",
                          output_gate="headwise"))
    adamw, = make_optimizers(model, TrainConfig().for_recipe("gpt2"))
    attn = model.transformer.h[0].attn
    for p, decays in ((attn.acag.weight, False), (attn.output_gate.proj.weight, True)):
        group = next(g for g in adamw.param_groups if any(q is p for q in g["params"]))
        assert p.dim() >= 2 and (group["weight_decay"] > 0) == decays


def test_muon_state_survives_saving():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(8, 8))
    q = torch.nn.Parameter(p.data.clone())
    a, b = Muon([(p, 1)]), Muon([(q, 1)])
    grads = [torch.randn(8, 8) for _ in range(4)]
    for g in grads[:2]:
        p.grad = g.clone()
        a.step()
    q.data.copy_(p.data)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    for g in grads[2:]:
        p.grad, q.grad = g.clone(), g.clone()
        a.step(), b.step()
    assert torch.equal(p, q)


# ---- schedules ----

def config(**kw):
    return TrainConfig(**{**dict(lr=1.0, min_lr=0.1, warmup_iters=10, max_iters=110, schedule="cosine"),
                          **kw}).for_recipe("gpt2")


def test_cosine_schedule_by_hand():
    def f(step):
        return lr_multiplier(step, config())

    assert f(0) == pytest.approx(1 / 11) and f(9) == pytest.approx(10 / 11)
    assert f(10) == pytest.approx(1.0) and f(60) == pytest.approx(0.55) and f(110) == 0.1 and f(500) == 0.1
    assert f(35) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_trapezoid_schedule_by_hand():
    def f(step):
        return lr_multiplier(step, config(schedule="trapezoid", min_lr=0.0, warmup_iters=0,
                                          max_iters=100, decay_frac=0.5))

    assert f(0) == f(49) == f(50) == 1.0
    assert f(75) == pytest.approx(0.5) and f(99) == pytest.approx(0.02) and f(100) == 0


def test_decay_may_end_before_the_training():
    assert lr_multiplier(60, config(lr_decay_iters=60)) == 0.1
    assert lr_multiplier(35, config(lr_decay_iters=60)) == pytest.approx(0.55)
