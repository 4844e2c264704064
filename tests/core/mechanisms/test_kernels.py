"""
The kernels beside attention, at sizes where they once went wrong: linear maps, norms, RoPE, the loss in
portions.
"""

import importlib.util

import pytest
import torch
from torch.nn import functional as F

import oracle
from helpers import tiny
from model import GPT, GPTConfig
from nanoheads import cpu, kernels
from nanoheads.kernels import ChunkedCrossEntropy, linear32, pad_rows
from oracle import agree, close, normal, tokens


def test_heads_of_size_one_give_the_same_twice():
    model = tiny(n_embd=8, n_head=8, a2c="temperature", acag="headwise")
    one, other = model(tokens(2, 13)).logits, model(tokens(2, 13)).logits
    assert one.isfinite().all() and torch.equal(one, other)


@pytest.mark.parametrize("D", [1, 2, 5, 8, 53])
def test_rope_of_an_odd_size_leaves_the_last_dimension_alone(D):
    x, (cos, sin) = normal(6, D), (t.double() for t in kernels.rope_tables(6, D))
    y = kernels.rotate(x, cos, sin)
    close(y, oracle.rope(x), 1e-9)
    close(y.norm(dim=-1), x.norm(dim=-1), 1e-6)
    assert torch.equal(y[1:, -1], x[1:, -1]) == bool(D % 2)


# ---- linear maps ----

@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 3), (2, 1, 1)], ids=str)
def test_a_linear_map_in_true_float32_equals_a_linear_map(shape, bias):
    x, weight = normal(*shape, seed=1, grad=True), normal(4, shape[-1], seed=2, grad=True)
    inputs = [x, weight, *([normal(4, seed=3, grad=True)] if bias else [])]
    agree([linear32(x, weight, inputs[2] if bias else None)], [F.linear(*inputs)], inputs, 1e-12)


def test_a_linear_map_in_true_float32_sets_the_precision_and_puts_it_back(monkeypatch):
    real, seen = F.linear, []

    def watched(*args):
        seen.append(torch.get_float32_matmul_precision())
        return real(*args)
    monkeypatch.setattr(F, "linear", watched)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        x = torch.randn(3, 4, requires_grad=True)
        linear32(x, torch.randn(2, 4, requires_grad=True), None).sum().backward()
        assert set(seen) == {"highest"} and len(seen) == 3  # the product, and those of both gradients
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_copy_of_the_file_takes_the_operator_that_is_there():
    """As an exported folder does in one process with ours: registered anew, the first would be freed."""
    before = torch.ops.nanoheads.linear32.default
    spec = importlib.util.spec_from_file_location("copy_of_kernels", kernels.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert torch.ops.nanoheads.linear32.default is before
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(3, 4)
    for linear in (linear32, copy.linear32):
        got = linear(x, weight, None)
        assert torch.equal(got, F.linear(x, weight))
        assert torch.equal(torch.autograd.grad(got.sum(), x)[0], weight.sum(0).expand(5, 4))


@pytest.mark.skipif(not cpu.ONEDNN, reason="a CPU whose products oneDNN does not make")
@pytest.mark.parametrize("rows, inside, outside", [(1, 1, 1), (64, 9, 33), (300, 65, 64)])
def test_a_linear_layer_by_onednn_equals_the_product(rows, inside, outside, monkeypatch):
    """Forward, backward, and a second derivative."""
    monkeypatch.setattr(cpu, "ONEDNN_FROM", 0)
    layer = kernels.Linear(inside, outside, bias=False)
    x = torch.randn(2, rows, inside, requires_grad=True)
    g = torch.randn(rows, 2, outside).transpose(0, 1)  # whose rows do not lie one behind the other
    y = layer(x)
    assert "CpuLinear" in y.grad_fn.name()
    wide, weight = x.detach().double().requires_grad_(), layer.weight.detach().double().requires_grad_()
    want = wide @ weight.mT
    exact = torch.autograd.grad(want, (wide, weight), g.double(), retain_graph=True)
    got = torch.autograd.grad(y, (x, layer.weight), g, retain_graph=True)

    def penalty(y, x, weight):
        dx, = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), (x, weight))
    pairs = [(y, want), *zip(got, exact), *zip(penalty(y, x, layer.weight), penalty(want, wide, weight))]
    for a, b in pairs:
        assert torch.allclose(a.double(), b, atol=1e-4 * max(1.0, b.abs().max().item()))


# ---- norms and rotations ----

@pytest.mark.parametrize("dtype, head_size, scaled", [(torch.float32, 8, False), (torch.float32, 7, True),
                                                      (torch.float64, 1, False), (torch.bfloat16, 16, False)])
@pytest.mark.parametrize("rotated", [True, False])
def test_norms_and_rotations_equal_their_formula(dtype, head_size, scaled, rotated):
    """Forward, with and without a gradient, backward, and a second derivative; also of zeros."""
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 0.1}[dtype]
    x = torch.randn(2, 5, 2, 3, head_size, dtype=dtype, generator=torch.Generator().manual_seed(1))
    x[0, 1, 0, 2] = 0.0
    cos, sin = (t[:, None, None] for t in kernels.rope_tables(5, head_size))
    scale = torch.linspace(0.5, 2.0, head_size, dtype=dtype) if scaled else None

    def formula(x):
        y = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (1 if scale is None else scale.double())
        half = head_size // 2
        a, b, rest = y[..., :half], y[..., half:2 * half], y[..., 2 * half:]
        c, s = cos[..., :half], sin[..., half:2 * half]
        return torch.cat((a * c - b * s, b * c + a * s, rest), -1) if rotated else y

    def ours(x):
        return kernels.norm_and_rotate(x, True, (cos, sin) if rotated else None, 1e-3, scale)
    wide, x = x.double().requires_grad_(), x.requires_grad_()
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = []
    for f, values, gradient in ((ours, x, g.to(dtype)), (formula, wide, g)):
        with torch.no_grad():
            found.append([f(values)])
        y = f(values)
        dx, = torch.autograd.grad(y, values, gradient, create_graph=True)
        found[-1] += [y, dx, torch.autograd.grad(dx[0].square().sum() + dx[1].sum(), values)[0]]
    for a, b in zip(*found):
        assert a.dtype == dtype
        assert torch.allclose(a.double(), b, atol=tolerance * max(1.0, b.abs().max().item()))
    # as all else in a compiled graph
    assert torch.allclose(torch.compile(ours, backend="eager")(x.detach()), found[0][0], atol=tolerance)


def test_a_training_step_goes_through_torch_func():
    """Gradients of each text by itself, as others compute them for many texts at once."""
    model = GPT(GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=8, recipe="modern",
                          zero_init=False))
    idx = tokens(3, 8) % 11

    def loss(parameters, row):
        return torch.func.functional_call(model, parameters, (row[None], row[None])).loss
    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(model.named_parameters()), idx)
    for i, row in enumerate(idx):
        model.zero_grad()
        model(row[None], row[None]).loss.backward()
        for name, p in model.named_parameters():
            assert torch.allclose(found[name][i], p.grad, atol=1e-6), name


# ---- the loss in portions ----

@pytest.mark.parametrize("rows, padded", [(50, 64), (64, 64), (65, 128)])
def test_a_gpu_pads_a_vocabulary_and_a_cpu_does_not(rows, padded, monkeypatch):
    weight = torch.ones(rows, 8)
    assert pad_rows(weight) is weight
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert pad_rows(weight).shape == (padded, 8) and pad_rows(weight)[rows:].eq(0).all()


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("size", [1, 3, 9])
def test_a_loss_in_portions_equals_the_written_loss(size, softcap, as_on_a_gpu, monkeypatch):
    """Float64, uneven portions, a token that is not scored, another gradient than 1, and a frozen head."""
    x, weight = normal(7, 5, seed=1, grad=True), normal(11, 5, seed=2, grad=True)
    targets = torch.tensor([3, -1, 0, 10, 5, 5, 2])
    options = targets, size, torch.float64, softcap, True
    logits = x @ weight.T
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    want = oracle.nats_of(logits, targets) * (targets >= 0)
    exact = torch.autograd.grad(3 * want.sum(), (x, weight))
    monkeypatch.setattr(torch.Tensor, "is_cuda", as_on_a_gpu)  # which pads the vocabulary
    total, nats = ChunkedCrossEntropy.apply(x, weight, *options)
    frozen, _ = ChunkedCrossEntropy.apply(x, weight.detach(), *options)
    close(nats, want, 1e-12)
    close(total, want.sum(), 1e-12)
    for a, b in zip(torch.autograd.grad(3 * total, (x, weight)), exact):
        close(a, b, 1e-12)
    close(torch.autograd.grad(3 * frozen, x)[0], exact[0], 1e-12)
    with pytest.raises(RuntimeError, match="differentiated again"):
        torch.autograd.grad(ChunkedCrossEntropy.apply(x, weight, *options)[0], x, create_graph=True)


def test_float16_holds_the_sum_of_many_gradients():
    """65,536 tokens with one target: summed in float16 the head's gradient is infinite at any loss scale."""
    x = torch.full((65536, 2), 4.0, requires_grad=True)
    weight = torch.zeros(8, 2, requires_grad=True)
    targets = torch.full((65536,), 3)
    total, _ = ChunkedCrossEntropy.apply(x, weight, targets, 32768, torch.float16, 0.0, True)
    got, = torch.autograd.grad(total, weight)
    want, = torch.autograd.grad(F.cross_entropy(x @ weight.T, targets, reduction="sum"), weight)
    assert want.abs().max() > 65504 and torch.allclose(got, want, rtol=1e-2)
