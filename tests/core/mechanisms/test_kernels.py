"""The kernels by themselves, at sizes where they once went wrong; the whole model's oracle is oracle.py."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from model import CausalMask, GPTConfig
from nanoheads import attention, cpu, kernels
from nanoheads.attention import attend, attend_lse, costs_a_plan, flex, flex_tiles, row_statistics
from nanoheads.kernels import ChunkedCrossEntropy, linear32, pad_rows
from helpers import tiny
from oracle import agree, dense, normal, tokens


def laid_out(*shape, seed):
    """A tensor [B, H, T, D] whose last dimension lies apart in memory, as in a projection of narrow heads."""
    B, H, T, D = shape
    return normal(B, T, D, H, seed=seed).permute(0, 3, 1, 2).detach().requires_grad_()


@pytest.mark.parametrize("D", [1, 2, 8])
@pytest.mark.parametrize("widths", [(1,), (3, 1), (0,)], ids=str)
def test_cpu_flash_reads_any_layout(D, widths):
    """The kernel takes the last stride for 1 without a look; padding a tensor keeps its layout."""
    q, k = laid_out(2, 3, 9, D, seed=1), laid_out(2, 3, 9, D, seed=2)
    values = [laid_out(2, 3, 9, width, seed=3 + i) for i, width in enumerate(widths)]
    lse, *y = attend_lse(q, k, 0.3, None, *values)
    want = [dense(q, k, v, 0.3)[0] for v in values]
    agree([lse, *y], [dense(q, k, k, 0.3)[1], *want], [q, k, *values], 1e-10)


def test_heads_of_size_one_give_the_same_twice():
    model = tiny(n_embd=8, n_head=8, a2c="temperature", acag="headwise")
    one, other = model(tokens(2, 13)).logits, model(tokens(2, 13)).logits
    assert one.isfinite().all() and torch.equal(one, other)


def test_no_gradient_of_flash_attention_is_differentiated_twice():
    q, k, v = (normal(1, 2, 5, 4, seed=s, grad=True) for s in (1, 2, 3))
    lse, y = attend_lse(q, k, 0.3, None, v)
    gradient, = torch.autograd.grad(lse.sum() + y.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("D", [1, 8, 15])
def test_flex_attention_takes_narrow_heads(D, monkeypatch):
    """On CUDA it refuses heads below 16; here a stand-in does."""
    real = attention.flex_attention

    def cuda_like(q, k, v, *more, **kw):
        assert min(t.size(-1) for t in (q, k, v)) >= 16
        return real(q, k, v, *more, **kw)
    monkeypatch.setattr(attention, "flex_attention", cuda_like)
    mask = CausalMask(GPTConfig(block_size=160)).block_mask(160, torch.device("cpu"))
    q, k, v = (normal(1, 2, 160, D, seed=s) for s in (1, 2, 3))
    with torch.no_grad():
        for got, want in zip(flex(q, k, v, 0.3, mask), dense(q, k, v, 0.3)):
            assert torch.allclose(got, want, atol=1e-9) and got.shape == want.shape


class NeedsGradientOfY(torch.autograd.Function):
    """Attention whose backward pass, like FlexAttention's on CUDA, fails where y has no gradient."""

    @staticmethod
    def forward(ctx, q, k, v, scale):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        return dense(q, k, v, scale)[:2]

    @staticmethod
    def backward(ctx, dy, dlse):
        assert dy is not None and dlse is not None, "no gradient of y"
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            y, lse, _ = dense(*inputs, ctx.scale)
        return *torch.autograd.grad((y, lse), inputs, (dy, dlse)), None


def stand_in(q, k, v, score_mod, block_mask, scale, kernel_options, return_aux):
    y, lse = NeedsGradientOfY.apply(q, k, v, scale)
    return y, SimpleNamespace(lse=lse)


@pytest.mark.parametrize("width", [0, 8])
def test_the_log_sum_exp_alone_has_a_gradient(width, monkeypatch):
    """The second pass of row statistics reads no y: compiled for CUDA, that was an error."""
    monkeypatch.setattr(attention, "flex_attention", stand_in)
    q, k, v = (normal(1, 2, 9, 8, seed=s, grad=True) for s in (1, 2, 3))
    y, lse = flex(q, k, v[..., :width], 0.3, None)
    want = torch.autograd.grad(dense(q, k, v, 0.3)[1].square().sum(), (q, k))
    got = torch.autograd.grad(lse.square().sum() + (0.0 * y).sum(), (q, k))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got, want))


def test_the_stand_in_demands_a_gradient_of_y():
    """Negative control of the test above."""
    q, k, v = (normal(1, 2, 9, 8, seed=s, grad=True) for s in (1, 2, 3))
    lse = NeedsGradientOfY.apply(q, k, v, 0.3)[1]
    with pytest.raises(AssertionError, match="no gradient of y"):
        lse.sum().backward()


@pytest.mark.parametrize("head_size, together", [(64, True), (72, False), (128, False)])
def test_statistics_take_no_values_wider_than_shared_memory_holds(head_size, together, monkeypatch):
    """What is too wide takes a pass of its own."""
    widths = []

    def attend_lse(q, k, scale, mask, *values):
        widths.append(sum(v.size(-1) for v in values))
        return q[..., 0].float(), *(q.new_zeros(*q.shape[:3], v.size(-1)) for v in values)
    monkeypatch.setattr(attention, "attend_lse", attend_lse)
    q = k = v = torch.zeros(1, 2, 32, head_size, device="meta")
    y, stats = row_statistics(q, k, v, 0.1, None, torch.ones(32, device="meta"), "shape")
    assert widths == [2 * head_size if together else head_size, 0] and y.shape == v.shape


@pytest.mark.parametrize("width, itemsize, roomy, own", [
    (16, 2, True, True), (64, 2, True, True), (72, 2, True, True), (128, 2, True, True),
    (136, 2, True, False), (256, 2, True, False), (64, 4, True, True), (65, 4, True, False),
    (128, 4, True, False), (136, 4, True, False), (64, 2, False, True), (72, 2, False, False),
    (32, 4, False, True), (64, 4, False, False)])
def test_wide_heads_take_smaller_tiles(width, itemsize, roomy, own):
    options = flex_tiles(width, itemsize, roomy)
    assert (options is None) == own
    if options:
        sides = [value for key, value in options.items() if "BLOCK" in key]
        assert all(128 % side == 0 and side >= 16 for side in sides)  # they divide a mask's block


@pytest.mark.parametrize("cuda, queries, grad, leave", [
    (True, 1, True, True), (True, 1, False, True), (True, 8, False, True), (True, 8, True, False),
    (False, 1, False, False)])
def test_cudnn_makes_no_plans_for_one_query_or_for_scoring(cuda, queries, grad, leave):
    with torch.set_grad_enabled(grad):
        assert costs_a_plan(SimpleNamespace(is_cuda=cuda, size=lambda dim: queries)) == leave


@pytest.mark.parametrize("plan", [True, False])
def test_attention_runs_without_cudnn_where_it_would_make_plans(plan, monkeypatch):
    real, seen = F.scaled_dot_product_attention, []

    def watched(*args, **kwargs):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return real(*args, **kwargs)
    monkeypatch.setattr(attention, "costs_a_plan", lambda q: plan)
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    q = normal(1, 2, 5, 4)
    attend(q, q, q, scale=0.3)
    assert seen == [before and not plan] and torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3), (2, 1, 1)], ids=str)
def test_a_linear_map_in_true_float32_equals_a_linear_map(shape, bias):
    x, weight = normal(*shape, seed=1, grad=True), normal(4, shape[-1], seed=2, grad=True)
    inputs = [x, weight, *([normal(4, seed=3, grad=True)] if bias else [])]
    got, want = linear32(x, weight, inputs[2] if bias else None), F.linear(*inputs)
    assert torch.equal(got, want)
    g = normal(*want.shape, seed=4)
    for a, b in zip(torch.autograd.grad(got, inputs, g), torch.autograd.grad(want, inputs, g)):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("keys", [1, 2, 9])
def test_the_statistics_of_one_query_equal_those_of_many(keys, masked):
    q, k, v = normal(2, 3, 1, 4, seed=1), normal(2, 3, keys, 4, seed=2), normal(2, 3, keys, 4, seed=3)
    mask = torch.ones(2, 1, 1, keys, dtype=torch.bool)
    mask[1, ..., :-1] = not masked
    mask = mask if masked else None
    n_keys = torch.tensor([[[keys]], [[1 if masked else keys]]], dtype=q.dtype)
    how = dict(mask=mask, n_keys=n_keys, stats="shape", spread=True)
    y, got = attend(q, k, v, scale=0.7, **how)
    _, control = attend(q, k, v, scale=0.8, **how)
    p = (q @ k.mT * 0.7).masked_fill(~mask if masked else torch.tensor(False), -torch.inf).softmax(-1)
    assert torch.allclose(y, p @ v, atol=1e-12)
    logits = (q @ k.mT * 0.7).masked_fill(~mask if masked else torch.tensor(False), -torch.inf)
    assert torch.allclose(got.lse, logits.logsumexp(-1), atol=1e-12)
    assert torch.allclose(got.entropy, torch.special.entr(p).sum(-1), atol=1e-12)
    assert torch.allclose(got.log_p2, p.square().sum(-1).log(), atol=1e-12)
    differences = (p - 1 / n_keys[..., None]).where(mask if masked else torch.tensor(True), 0.0)
    assert torch.allclose(got.spread, differences.square().sum(-1), atol=1e-12)
    assert not torch.allclose(control.lse, got.lse, atol=1e-6)


@pytest.mark.parametrize("B, T, H, D", [(2, 5, 3, 4), (1, 1, 1, 2), (2, 7, 1, 8)])
def test_heads_are_normed_and_rotated_as_by_single_steps(B, T, H, D):
    """Queries, keys, values and their gradient."""
    angle = normal(T, 1, 1, D // 2, seed=1)
    rope = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
    qkv = normal(B, T, 3, H, D, seed=2, grad=True)
    got = kernels.heads_of(qkv, True, rope)
    x = qkv[:, :, :2] / (qkv[:, :, :2].square().mean(-1, keepdim=True) + 1e-6).sqrt()
    first, second = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    x = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    want = [t.transpose(1, 2) for t in (x[:, :, 0], x[:, :, 1], qkv[:, :, 2])]
    weights = [normal(*t.shape, seed=i) for i, t in enumerate(want)]
    for a, b in zip(got, want):
        assert torch.allclose(a, b, atol=1e-12)
    for used in ((0, 1, 2), (0,), (2,)):  # what nothing reads has a gradient of 0
        a, b = (torch.autograd.grad(sum((t[i] * weights[i]).sum() for i in used), qkv, retain_graph=True)[0]
                for t in (got, want))
        assert torch.allclose(a, b, atol=1e-10)
    for wrong in (False, None), (False, rope), (True, None):  # negative controls
        assert not torch.allclose(kernels.heads_of(qkv, *wrong)[0], want[0])


@pytest.mark.skipif(not cpu.ONEDNN, reason="a CPU whose products oneDNN does not make")
@pytest.mark.parametrize("rows, inside, outside",
                         [(1, 1, 1), (7, 3, 5), (64, 9, 33), (64, 33, 9), (300, 64, 65)])
def test_a_linear_layer_by_onednn_equals_the_product(rows, inside, outside, monkeypatch):
    monkeypatch.setattr(cpu, "ONEDNN_FROM", 0)
    layer = kernels.Linear(inside, outside, bias=False)
    x = torch.randn(2, rows, inside, requires_grad=True)
    g = torch.randn(rows, 2, outside).transpose(0, 1)  # whose rows do not lie one behind the other
    y = layer(x)
    assert "CpuLinear" in y.grad_fn.name()
    wide, weight = x.detach().double().requires_grad_(), layer.weight.detach().double().requires_grad_()
    want = wide @ weight.mT
    assert torch.allclose(y.double(), want, atol=1e-5)
    exact = torch.autograd.grad(want, (wide, weight), g.double())
    for a, b in zip(torch.autograd.grad(y, (x, layer.weight), g), exact):
        assert torch.allclose(a.double(), b, atol=1e-4 * max(1.0, b.abs().max().item()))


@pytest.mark.skipif(not cpu.ONEDNN, reason="a CPU whose products oneDNN does not make")
def test_a_linear_layer_by_onednn_has_a_second_derivative(monkeypatch):
    monkeypatch.setattr(cpu, "ONEDNN_FROM", 0)
    layer, x = kernels.Linear(4, 3, bias=False), torch.randn(5, 4, requires_grad=True)

    def penalty(y):
        dx, = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), (x, layer.weight))
    for a, b in zip(penalty(layer(x)), penalty(x @ layer.weight.mT)):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize("rows, padded", [(50, 64), (64, 64), (65, 128)])
def test_a_gpu_pads_a_vocabulary_and_a_cpu_does_not(rows, padded, monkeypatch):
    weight = torch.ones(rows, 8)
    assert pad_rows(weight) is weight
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert pad_rows(weight).shape == (padded, 8) and pad_rows(weight)[rows:].eq(0).all()


def test_a_padded_vocabulary_changes_no_loss(monkeypatch):
    x, targets, found = normal(6, 5, seed=1, grad=True), torch.tensor([3, -1, 0, 10, 5, 2]), []
    weight = normal(11, 5, seed=2, grad=True)
    for padded in (kernels.pad_rows, lambda w: F.pad(w, (0, 0, 0, 53))):
        monkeypatch.setattr(kernels, "pad_rows", padded)
        loss, nats = ChunkedCrossEntropy.apply(x, weight, targets, 4, torch.float64, 0.0, True)
        found.append([loss, nats, *torch.autograd.grad(loss, (x, weight))])
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*found))


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("size", [1, 3, 7, 9])
def test_a_loss_in_portions_equals_the_written_loss(size, softcap):
    """Float64, uneven portions, a token that is not scored, and another gradient than 1."""
    x, weight = normal(7, 5, seed=1, grad=True), normal(11, 5, seed=2, grad=True)
    targets = torch.tensor([3, -1, 0, 10, 5, 5, 2])
    options = targets, size, torch.float64, softcap, True
    total, nats = ChunkedCrossEntropy.apply(x, weight, *options)
    logits = x @ weight.T
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    want = torch.stack([logits[i].logsumexp(0) - logits[i, t] if t >= 0 else logits[i, 0] * 0
                        for i, t in enumerate(targets.tolist())])
    assert torch.allclose(nats, want, atol=1e-12) and torch.allclose(total, want.sum(), atol=1e-12)
    for got, expected in zip(torch.autograd.grad(3 * total, (x, weight)),
                             torch.autograd.grad(3 * want.sum(), (x, weight))):
        assert torch.allclose(got, expected, atol=1e-12)
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


def test_a_frozen_head_has_no_gradient_made():
    x, weight = normal(4, 3, grad=True), normal(5, 3, seed=2)
    total, _ = ChunkedCrossEntropy.apply(x, weight, torch.tensor([0, 1, 2, 3]), 2, torch.float64, 0.0, True)
    assert total.grad_fn.saved_tensors[1].numel() == 0
    want = F.cross_entropy(x @ weight.T, torch.tensor([0, 1, 2, 3]), reduction="sum")
    for got, expected in zip(torch.autograd.grad(total, x), torch.autograd.grad(want, x)):
        assert torch.allclose(got, expected, atol=1e-12)
