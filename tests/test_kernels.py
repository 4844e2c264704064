"""The kernels by themselves, at sizes where they once went wrong; their oracles are in test_mechanisms.py."""

import pytest
import torch

import kernels
from kernels import CpuRMSNorm, CpuSquaredReLU, attend_lse, flex
from model import GPT, CausalMask, GPTConfig
from test_mechanisms import agree, dense, normal, tokens


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
    config = GPTConfig(block_size=16, vocab_size=37, n_layer=2, n_embd=8, n_head=8,
                       a2c="temperature", acag="headwise")
    model = GPT(config).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.3)
    one, other = model(tokens(2, 13)).logits, model(tokens(2, 13)).logits
    assert one.isfinite().all() and torch.equal(one, other)


@pytest.mark.parametrize("function", [CpuRMSNorm, CpuSquaredReLU], ids=lambda f: f.__name__)
def test_a_second_derivative_is_refused_rather_than_wrong(function):
    """Also of a plain sum, whose gradient would come back without a graph."""
    x = normal(3, 8, grad=True)
    for loss in (function.apply(x).square().sum(), function.apply(x).sum()):
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(loss, x, create_graph=True)
    torch.autograd.grad(function.apply(x).sum(), x)


def test_no_gradient_of_flash_attention_is_differentiated_twice():
    q, k, v = (normal(1, 2, 5, 4, seed=s, grad=True) for s in (1, 2, 3))
    lse, y = attend_lse(q, k, 0.3, None, v)
    gradient, = torch.autograd.grad(lse.sum() + y.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("D", [1, 8, 15])
def test_flex_attention_takes_narrow_heads(D, monkeypatch):
    """On CUDA it refuses heads below 16; here a stand-in does."""
    real = kernels.flex_attention

    def cuda_like(q, k, v, **kw):
        assert min(t.size(-1) for t in (q, k, v)) >= 16
        return real(q, k, v, **kw)
    monkeypatch.setattr(kernels, "flex_attention", cuda_like)
    mask = CausalMask(GPTConfig(block_size=160)).block_mask(160, torch.device("cpu"))
    q, k, v = (normal(1, 2, 160, D, seed=s) for s in (1, 2, 3))
    with torch.no_grad():
        for got, want in zip(flex(q, k, v, 0.3, mask), dense(q, k, v, 0.3)):
            assert torch.allclose(got, want, atol=1e-9) and got.shape == want.shape
