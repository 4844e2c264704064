"""
Attention and its kernels, compared with a slow attention that stores its logits: values, statistics,
gradients.
"""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import model as model_py
import oracle
from helpers import Largest, TINY_GPT, flags_of_variant_b, tiny
from model import GPT, MECHANISMS, CausalMask, GPTConfig, KVCache
from nanoheads import attention
from nanoheads.attention import attend, attend_lse, flex
from nanoheads.rivals import Alibi, RelativeBias
from oracle import agree, close, dense, gradients, normal, tokens

# on CPU it is the reference, not a kernel
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
T = 13
CAUSAL = torch.ones(T, T).tril().bool()
BEGUN = [CAUSAL & (torch.arange(T) >= first) | torch.eye(T).bool() for first in (0, 6)]  # padding before rows
MASKS = {"causal": None, "window": CAUSAL.triu(-4)[None, None], "oneself": torch.eye(T).bool()[None, None],
         "of each row": torch.stack(BEGUN)[:, None]}


def inputs(kv_heads=3, width=16):
    q, k = normal(2, 3, T, 16, seed=1, grad=True), normal(2, kv_heads, T, 16, seed=2, grad=True)
    return q, k, normal(2, kv_heads, T, width, seed=3, grad=True)


def bias_of(rate, c):
    """A score function that captures a number for each head and one for each key."""
    return lambda score, b, h, t, s: 3 * torch.tanh(score / 3) - rate[h] * (t - s) + c[b, h, s]


def outputs_of(s, v, seen):
    """[y, lse, entropy, log sum p^2, spread] of logits s [..., T, S] of which each query sees some."""
    s = s.masked_fill(~seen, -math.inf)
    p = s.softmax(-1)
    entropy, p2 = oracle.row_statistics(p)
    return [p @ v, s.logsumexp(-1), entropy, p2.log(), oracle.spread_of_rows(p, seen)]


def stored(q, k, v, mask, rate=None, c=None):
    """outputs_of() logits in memory, with the same bias where there is one."""
    k, v = (x.repeat_interleave(3 // x.size(1), 1) for x in (k, v))
    s = 0.3 * q @ k.mT
    if rate is not None:
        distance = torch.arange(T)[:, None] - torch.arange(T)
        s = 3 * torch.tanh(s / 3) + c[:, :, None] - rate[:, None, None] * distance
    return outputs_of(s, v, CAUSAL if mask is None else mask)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [2**21, 500], ids=["at once", "in portions"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "score function"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_outputs_statistics_and_gradients_equal_those_of_stored_logits(mask, biased, at_once, monkeypatch):
    """Together and each alone, of what a score function captures too, and of the last queries alone."""
    monkeypatch.setattr(attention, "LOGITS_AT_ONCE", at_once)
    n = (CAUSAL if mask is None else mask).double().sum(-1)
    n = n if mask is None else n.expand(2, 1, T)
    rate, c = normal(3, seed=4, grad=True), normal(2, 3, T, seed=5, grad=True)
    captured = [rate, c] * biased
    for kv_heads, width in ((3, 16), (1, 5), (1, 40)):
        q, k, v = inputs(kv_heads, width)
        learn = [q, k, v, *captured]
        want = stored(q, k, v, mask, *captured)
        how = dict(scale=0.3, mask=mask, score_mod=bias_of(*captured) if biased else None)
        shape = dict(stats="shape", spread=True, n_keys=n)
        y, rows = attend(q, k, v, **how, **shape)
        agree([y, *rows], want, learn, 1e-10)
        for got, one in zip([y, *rows], want):
            for a, b in zip(gradients([got], learn), gradients([one], learn)):
                close(a, b, 1e-9)
        y, none = attend(q, k, v, **how)
        agree([y], want[:1], learn, 1e-10)
        y, rows = attend(q, k, v, stats="lse", **how)
        agree([y, rows.lse], want[:2], learn, 1e-10)
        assert none is rows.entropy is rows.log_p2 is rows.spread is None
        y, rows = attend(q, k, v, detach=True, **how, **shape)
        for a, b in zip([y, *rows], want, strict=True):
            close(a, b, 1e-10)
        assert not any(row.requires_grad for row in rows)
        for a, b in zip(gradients([y], learn), gradients(want[:1], learn)):
            close(a, b, 1e-9)
        for last in (1, 5):  # as with a cache
            how["mask"] = None if mask is None else mask[:, :, -last:]
            y, rows = attend(q[:, :, -last:], k, v, **how, **{**shape, "n_keys": n[..., -last:]})
            for a, b in zip([y, *rows], want, strict=True):
                close(a, b[:, :, -last:], 1e-10)


@pytest.mark.parametrize("D, width", [(1, 1), (2, 3), (8, 0)])
def test_a_cpus_kernel_reads_any_layout(D, width):
    """It takes the last stride for 1 without a look; padding a tensor keeps its layout."""
    q, k, v = (normal(2, T, size, 3, seed=i).permute(0, 3, 1, 2).detach().requires_grad_()
               for i, size in enumerate((D, D, width)))
    lse, y = attend_lse(q, k, 0.3, None, v)
    agree([y, lse], dense(q, k, v, 0.3)[:2], [q, k, v], 1e-10)


def test_no_gradient_of_flash_attention_is_differentiated_twice():
    q, k, v = inputs()
    y, rows = attend(q, k, v, scale=0.3, stats="lse")
    gradient, = torch.autograd.grad(rows.lse.sum() + y.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


def test_no_head_at_all_is_no_attention():
    q = torch.zeros(2, 0, 3, 8)
    assert attend(q, q, q, scale=1.0)[0].shape == (2, 0, 3, 8)


def test_dropout_acts_behind_the_statistics():
    q, k, v = inputs()
    how = dict(scale=0.3, score_mod=lambda score, b, h, t, s: score + h, stats="shape")
    torch.manual_seed(0)
    (y, rows), (want, same) = attend(q, k, v, dropout=0.5, **how), attend(q, k, v, **how)
    assert not torch.allclose(y, want)
    for a, b in zip(rows[:3], same[:3]):
        close(a, b, 1e-12)
    with torch.no_grad():
        mean = sum(attend(q, k, v, dropout=0.5, **how)[0] for _ in range(200)) / 200
    assert (mean - want).norm() < 0.15 * want.norm()


def test_portions_are_computed_once_more_with_the_dropout_that_they_had(monkeypatch):
    """An output is linear in the values, so that with their gradient it is found again."""
    monkeypatch.setattr(attention, "LOGITS_AT_ONCE", 500)
    q, k, v = inputs()
    y, _ = attend(q, k, v, scale=0.3, score_mod=lambda score, b, h, t, s: score + h, dropout=0.5)
    total = (y * normal(*y.shape, seed=9)).sum()
    gradient, = torch.autograd.grad(total, v)
    close((v * gradient).sum(), total, 1e-9)


# ---- rounding ----

def deviation(spread, n):
    """As ACAG's published form reads it, of rows of more than one key."""
    return (spread / n + 1e-12).sqrt()[..., 1:]


@pytest.mark.parametrize("T, size", [(40, 1e-3), (300, 1e-3), (40, 1.0), (40, 30.0)])
def test_the_spread_of_nearly_uniform_rows_is_exact(T, size):
    """In float32, with its gradient, however little the logits differ: `size` is about their deviation.

    Of sum p^2 - 1/n there would be hardly a digit left at 0.001.
    """
    q, k = size * normal(1, 2, T, 16, seed=1), normal(1, 2, T, 16, seed=2)
    slow, fast = ([t.to(dtype).requires_grad_() for t in (q, k)] for dtype in (torch.float64, torch.float32))
    n, seen = torch.arange(1.0, T + 1), torch.ones(T, T).tril().bool()
    want = deviation(oracle.spread_of_rows(dense(*slow, slow[1], 0.25)[2], seen), n.double())
    _, rows = attend(*fast, fast[1], scale=0.25, stats="shape", spread=True, n_keys=n)
    got = deviation(rows.spread, n)
    assert ((got - want).abs() < 1e-3 * want + 1e-8).all()  # of two keys the logits may be closer yet
    for a, b in zip(gradients([got.double()], fast), gradients([want], slow), strict=True):
        assert (a - b).norm() < 1e-3 * b.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_never_takes_the_entropy_out_of_its_range(dtype):
    """Nearly uniform and nearly one-hot rows. Between them it is within a tenth of a nat."""
    q, k = (normal(2, 4, 64, 16, seed=seed).to(dtype) for seed in (1, 2))
    n = torch.arange(1.0, 65.0)
    for queries, detach in itertools.product((1e-3 * q, 100 * k, q), (True, False)):
        how = dict(scale=0.25, stats="shape", n_keys=n, detach=detach)
        entropy = attend(queries, k, k, **how)[1].entropy
        assert (entropy >= 0).all() and (entropy <= n.log()).all()
        want, _ = oracle.row_statistics(dense(queries.double(), k.double(), k.double(), 0.25)[2])
        assert queries is not q or (entropy - want).abs().max() < 0.1


def gated_on_itself(gate, dtype, strength, T=9):
    """What attend() gives of rows with the logarithm of a gate on the diagonal; outputs_of() the same logits
    in float64; the inputs of each. strength: what each token's logit with itself is raised by.
    """
    q, k, v = (normal(2, 3, T, 16, seed=seed) for seed in (1, 2, 3))
    k = k + 4 * strength * q / q.square().sum(-1, keepdim=True)
    slow = [t.to(dtype).double().requires_grad_() for t in (q, k, v)]
    slow.append(torch.full((2, 3, T), gate).double().requires_grad_())
    fast = [t.detach().to(dtype).requires_grad_() for t in slow[:3]]
    fast.append(slow[3].detach().float().requires_grad_())
    log_gate = fast[3].clamp_min(1e-30).log()
    y, rows = attend(*fast[:3], scale=0.25, stats="shape", spread=True, n_keys=torch.arange(1.0, T + 1),
                     score_mod=lambda score, b, h, t, s: score + (t == s) * log_gate[b, h, t])
    seen = torch.ones(T, T).tril().bool()
    s = oracle.on_itself(0.25 * slow[0] @ slow[1].mT, slow[3])
    return [y, *rows], outputs_of(s, slow[2], seen), fast, slow


@pytest.mark.parametrize("gate, strength", [(1.0, 9.0), (1e-2, 4.0), (1e-8, 9.0), (1e-8, 20.0)])
@pytest.mark.parametrize("dtype, tol, slack", [(torch.float32, 2e-5, 1e-5), (torch.bfloat16, 0.1, 0.03)])
def test_self_gated_rows_are_exact_beside_a_weight_near_one(dtype, tol, slack, gate, strength):
    """At 20 a token's weight on itself is 1 to float32, and its gate leaves what the others have."""
    got, want, fast, slow = gated_on_itself(gate, dtype, strength)
    for a, b in zip(got, want, strict=True):
        close(a.double(), b, tol)
    for a, b in zip(gradients([t.double() for t in got], fast[:3]), gradients(want, slow[:3])):
        assert (a.double() - b).norm() < slack * b.norm()


def test_one_key_has_no_entropy_and_its_own_value():
    """Whatever its gate, 0 too, and in float32 without a rounding error; no gradient is not a number."""
    for T, gate in itertools.product((1, 9), (0.0, 1e-8, 0.5)):
        rows, _, fast, _ = gated_on_itself(gate, torch.float32, 4.0, T=T)
        assert torch.equal(rows[0][:, :, 0], fast[2][:, :, 0])
        assert not any(row[..., 0].any() for row in rows[2:])
        own = 0.25 * (fast[0] * fast[1]).sum(-1)[..., 0]
        assert torch.allclose(rows[1][..., 0], own + math.log(max(gate, 1e-30)))
        assert all(g.isfinite().all() for g in gradients(rows, fast))


# ---- masks of windows and documents ----

@pytest.mark.parametrize("more", [{}, dict(acag="headwise", sink=True),
                                  dict(acag="headwise", acag_mode="published"), dict(fox=True)],
                         ids=lambda flags: "+".join(flags) or "plain")
def test_a_long_window_is_the_stored_mask_some_queries_at_a_time(more, monkeypatch):
    for flags in (dict(window=5), dict(window=3, window_global=2, window_random=1, window_block=4)):
        model, idx = tiny(block_size=40, n_head=2, n_embd=32, **flags, **more), tokens(2, 37)
        with monkeypatch.context() as m:
            want = model.hidden(idx)
            m.setattr("model.DENSE_UP_TO", 8)
            m.setattr(attention, "LOGITS_AT_ONCE", 2000)
            agree([model.hidden(idx)], [want], list(model.parameters()), 1e-9)


@pytest.mark.parametrize("flags", [
    {}, dict(fox=True), dict(roles=["local"]), dict(relative_bias=True), dict(window=8, sink=True),
    dict(window=8, window_global=1, window_random=1),
    dict(constraint_names=["a"], constraint_gate="score", acag="headwise")],
    ids=lambda flags: "+".join(flags) or "plain")
def test_nothing_of_t_by_t_is_stored_in_training(flags, monkeypatch):
    """Nor where rows hold several documents, in both forms of their mask."""
    monkeypatch.setattr("model.DENSE_UP_TO", 64)
    monkeypatch.setattr(attention, "LOGITS_AT_ONCE", 2**14)
    T = 384
    model = GPT(GPTConfig(block_size=T, vocab_size=37, n_layer=1, n_head=2, n_embd=32, **flags))
    positions = torch.cat([torch.arange(n) for n in (300, 72, 12)])[None]
    for by_blocks, given in ((False, None), (False, positions), (True, positions)):
        monkeypatch.setattr("model.has_flex_attention", lambda device: by_blocks)
        with Largest() as largest:
            model(tokens(1, T), tokens(1, T), positions=given).loss.backward()
        assert largest.size < T * T / 2
    with Largest() as control:
        model(tokens(1, T), traces="maps")
    assert control.size >= T * T


BEGINS = torch.tensor([[0] * 128 + [128] * 40 + [168] * 132, [0] * 10 + [10] * 250 + [260] * 40, [0] * 300])


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, dict(window=70), dict(window=1), dict(window=20, window_global=140),
                                   *(dict(window=30, window_global=5, window_random=2, window_block=size)
                                     for size in (7, 150))],
                         ids=lambda flags: "-".join(map(str, flags.values())) or "causal")
@pytest.mark.parametrize("size", [128, 16])
@pytest.mark.parametrize("begins", [None, BEGINS], ids=["texts", "documents"])
def test_a_mask_by_blocks_is_the_dense_mask(flags, size, begins, monkeypatch):
    """FlexAttention computes the blocks that are listed, and masks none of the full."""
    monkeypatch.setattr(attention, "KERNEL_BLOCK", size)
    T, cpu, B = 300, torch.device("cpu"), 1 if begins is None else 3
    mask = GPT(GPTConfig(block_size=T, vocab_size=5, n_layer=1, n_head=1, n_embd=16, **flags)).mask
    want, blocks = mask.dense(0, T, begins, cpu), mask.block_mask(T, cpu, begins)
    for row, first_columns in enumerate([] if begins is None else begins):
        for first in first_columns.unique().tolist():  # each document is as a text by itself
            n = int((first_columns == first).sum())
            alone, last = mask.dense(0, n, None, cpu), first + n
            assert torch.equal(want[row, 0, first:last, first:last], alone[0, 0])
            assert not want[row, 0, first:last, :first].any()
    listed = blocks.to_dense()[:, 0].bool()
    for b, i, j in itertools.product(range(B), *[range(-(-T // size))] * 2):
        tile = want[b, 0, i * size:(i + 1) * size, j * size:(j + 1) * size]
        assert listed[b, i, j] or not tile.any(), "nothing that is seen is left out"
        if begins is None or not flags:
            assert listed[b, i, j] == tile.any(), "and nothing is computed in vain"
        if j in blocks.full_kv_indices[b, 0, i, :blocks.full_kv_num_blocks[b, 0, i]].tolist():
            assert tile.all()
    q, k, v = (normal(B, 1, T, 16, seed=s).float() for s in (1, 2, 3))
    with torch.no_grad():  # FlexAttention has no backward pass on CPU
        for got, by_rows in zip(flex(q, k, v, 0.3, blocks), dense(q, k, v, 0.3, want)):
            close(got, by_rows, 1e-5)


# ---- FlexAttention as on CUDA ----

@pytest.mark.slow
@pytest.mark.parametrize("D", [1, 15, 53])
def test_flex_attention_takes_narrow_heads_and_odd_ones(D, monkeypatch):
    """On CUDA it refuses heads below 16 and reads odd sizes unaligned; here a stand-in refuses them."""
    real = attention.flex_attention

    def cuda_like(q, k, v, *more, **kw):
        assert all(t.size(-1) >= 16 and t.size(-1) % 8 == 0 for t in (q, k, v))
        return real(q, k, v, *more, **kw)
    monkeypatch.setattr(attention, "flex_attention", cuda_like)
    monkeypatch.setattr(attention, "wants_eights", lambda device: True)
    mask = CausalMask(GPTConfig(block_size=160)).block_mask(160, torch.device("cpu"))
    q, k, v = (normal(1, 2, 160, D, seed=s) for s in (1, 2, 3))
    with torch.no_grad():
        for got, want in zip(flex(q, k, v, 0.3, mask), dense(q, k, v, 0.3)):
            close(got, want, 1e-9)


def test_the_log_sum_exp_alone_has_a_gradient(monkeypatch):
    """The second pass of row statistics reads no y. Compiled for CUDA, FlexAttention's backward pass fails
    where y has no gradient, so it gets one of zeros.
    """
    received = []

    def stand_in(q, k, v, score_mod, block_mask, scale, kernel_options, return_aux):
        y, lse, _ = dense(q, k, F.pad(v, (0, 16 - v.size(-1))), scale)
        y.register_hook(received.append)
        return y, SimpleNamespace(lse=lse)
    monkeypatch.setattr(attention, "flex_attention", stand_in)
    q, k, v = inputs()
    _, lse = flex(q, k, v[..., :0], 0.3, None)
    agree([lse], [dense(q, k, v, 0.3)[1]], [q, k], 1e-12)
    assert received and not any(g.any() for g in received)


def test_wide_heads_take_smaller_tiles():
    """Where a padded row of a head takes over 256 bytes, or 128 on a card that is not roomy."""
    for width, itemsize, roomy, own in ((128, 2, True, True), (136, 2, True, False), (64, 4, True, True),
                                        (65, 4, True, False), (64, 2, False, True), (72, 2, False, False)):
        options = attention.flex_tiles(width, itemsize, roomy)
        assert (options is None) == own
        sides = [value for key, value in (options or {}).items() if "BLOCK" in key]
        assert all(128 % side == 0 and side >= 16 for side in sides)  # they divide a mask's block


# ---- what the fused kernel is asked for ----

@pytest.fixture
def asked(monkeypatch):
    """(rows, heads, size of q, k and v, whether cuDNN may be taken) of each call of PyTorch's kernel."""
    calls, real = [], F.scaled_dot_product_attention

    def watched(q, k, v, **options):
        sizes = {t.size(-1) for t in (q, k, v)}
        calls.append((len(q), q.size(1), sizes, torch.backends.cuda.cudnn_sdp_enabled()))
        return real(q, k, v, **options)
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    return calls


@pytest.mark.parametrize("cuda, queries, grad, leave", [
    (True, 1, True, True), (True, 8, False, True), (True, 8, True, False), (False, 1, False, False)])
def test_cudnn_makes_no_plans_for_one_query_or_for_scoring(cuda, queries, grad, leave, asked, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", cuda)
    q, before = normal(1, 2, queries, 8), torch.backends.cuda.cudnn_sdp_enabled()
    with torch.set_grad_enabled(grad):
        attend(q, q, q, scale=0.3)
    assert [call[3] for call in asked] == [before and not leave]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.parametrize("flags", [{}, MECHANISMS["diff"], dict(window=3), dict(constraint_skip=0.5)],
                         ids=str)
def test_zeros_for_a_gpus_kernel_change_neither_output_nor_gradient(flags, asked, monkeypatch):
    """Heads 9 wide, as variant B makes them: a GPU's kernels want multiples of 8, and a CPU's do not."""
    model = tiny(flags_of_variant_b((64, 4, 3), recipe="modern", **flags))
    as_it_is = model.hidden(tokens(2, 9))
    assert {size for call in asked for size in call[2]} == {9}
    asked.clear()
    assert attention.wants_eights(torch.device("cuda"))
    monkeypatch.setattr(attention, "wants_eights", lambda device: True)
    agree([model.hidden(tokens(2, 9))], [as_it_is], list(model.parameters()), 1e-9)
    assert {size for call in asked for size in call[2]} == {16}


@pytest.mark.parametrize("n_queries", [1, 5])
@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
def test_open_heads_alone_are_computed(asked, n_queries, n_kv_head):
    """Of each row its own, each once; the others give 0, and their keys are never read."""
    q = normal(3, 4, n_queries, 8)
    k, v = (normal(3, n_kv_head, 9, 8, seed=seed) for seed in (2, 3))
    mask = torch.ones(3, 1, n_queries, 9, dtype=torch.bool)
    mask[1, ..., :4] = False  # padding
    some, none = normal(3, 4, seed=4) > 0, torch.zeros(3, 4, dtype=torch.bool)
    for opened in (some, ~some, none, ~none, torch.tensor([1, 1, 0, 1]).bool().expand(3, 4)):
        for m in (None, mask, mask[1:2]):
            want = attend(q, k, v, scale=0.3, mask=m)[0] * opened[..., None, None]
            asked.clear()
            close(attend(q, k, v, scale=0.3, mask=m, open=opened)[0], want, 1e-12)
            assert sum(rows * heads for rows, heads, *_ in asked) == opened.sum()
        closed = ~opened.unflatten(1, (n_kv_head, -1)).any(-1)
        broken = torch.where(closed[..., None, None], math.nan, k)
        assert attend(q, broken, v, scale=0.3, open=opened)[0].isfinite().all()


@torch.no_grad()
def heads_computed(model, idx, asked, pieces=None):
    """How many heads the kernel is asked for in each layer and row, of idx [B, T] read in pieces."""
    asked.clear()
    cache = KVCache(model.config)
    for piece in idx.split(pieces or [idx.size(1)], dim=1):
        model.hidden(piece, cache if pieces else None)
    return sum(rows * heads for rows, heads, *_ in asked)


def test_six_of_twelve_heads_are_computed_for_a_decoded_token(asked, monkeypatch):
    monkeypatch.setattr(model_py, "SKIP_FROM", 1)
    model = GPT(GPTConfig(**{**TINY_GPT, "n_head": 12}, routing="moh")).eval()
    assert heads_computed(model, tokens(2, 9), asked, [1] * 9) == 6 * 2 * 9 * model.config.n_layer
    assert heads_computed(model, tokens(2, 9), asked) == 12 * 2 * model.config.n_layer


ADDED = dict(n_head=3, n_embd=24, std=0.3, constraint_names=["a", "b"], constraint_layers=[0, 1])


def test_constraint_heads_below_the_threshold_are_not_computed(asked):
    """In a row or token where all gates of a head are below; values are the oracle's."""
    model, idx = tiny(constraint_skip=0.5, **ADDED), tokens(3, 9)
    gates = [g > 0 for name, g in model(idx, traces=True).traces.items() if name.endswith("router_gates")]
    in_rows, in_tokens = [sum(g.any(1).sum().item() for g in gates), sum(g.sum().item() for g in gates)]
    assert 0 < in_rows < 2 * 3 * 2
    assert heads_computed(model, idx, asked) == 2 * 3 * 3 + in_rows
    assert heads_computed(model, idx, asked, [1] * 9) == 2 * 3 * 3 * 9 + in_tokens
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.constraint.out.bias.fill_(-99.0)
    assert heads_computed(model, idx, asked) == 2 * 3 * 3, "with all of them closed, the layer's own alone"


@pytest.mark.parametrize("flags, skipped", [
    (dict(n_kv_head=1), True), (dict(window=3), True), (dict(head_mix=True), True),
    (dict(routing="sigmoid", routing_top_k=1, n_kv_head=1), True), (dict(value_residual=True), True),
    (dict(acag="headwise"), False), (dict(sink=True), False), (dict(roles=["local"]), False)], ids=str)
def test_heads_are_skipped_where_nothing_else_reads_them(flags, skipped, asked, monkeypatch):
    monkeypatch.setattr(model_py, "SKIP_FROM", 1)
    model, every = tiny(constraint_skip=0.8, **ADDED, **flags), tiny(**ADDED, **flags)
    few, many = (heads_computed(each, tokens(3, 9), asked, [6, 1, 2]) for each in (model, every))
    assert (few < many) == skipped


@pytest.mark.slow
def test_skipping_heads_compiles_in_one_graph():
    model, idx = tiny(constraint_skip=0.5, **ADDED), tokens(3, 9)
    torch._dynamo.reset()
    with torch.no_grad():
        fast = torch.compile(model, fullgraph=True, backend="eager")(idx).logits
        close(fast, model(idx).logits, 1e-6)
    torch._dynamo.reset()


# ---- numbers of the papers ----

def test_slopes_of_alibi_are_the_papers():
    assert Alibi.slopes(8) == [2.0**-i for i in range(1, 9)]
    assert Alibi.slopes(16)[:2] == [2**-0.5, 2**-1.0]
    # of 12: those of 8, then every second one of 16
    assert Alibi.slopes(12) == [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert [len(Alibi.slopes(n)) for n in range(1, 20)] == [*range(1, 20)]


def test_buckets_of_distances_are_t5s():
    """16 of one distance each, then by the logarithm up to 128 tokens: numbers from T5's own code."""
    buckets = RelativeBias.buckets(400, 32, 128)
    assert buckets[:17] == [*range(17)]
    assert [buckets[d] for d in (20, 32, 64, 100, 127, 128, 399)] == [17, 21, 26, 30, 31, 31, 31]
    assert buckets == sorted(buckets)
