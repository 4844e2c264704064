"""attend() with a score function and in portions, against attention whose logits are stored."""

import math

import pytest
import torch

import oracle
from model import GPT, GPTConfig
from nanoheads import attention
from nanoheads.attention import attend, combine_scores
from nanoheads.rivals import Alibi, RelativeBias
from helpers import Largest, tiny
from oracle import agree, close, normal, tokens

T = 21
BAND = torch.ones(T, T).tril().triu(-4).bool()
BEGUN = [torch.ones(T, T).tril().bool() & (torch.arange(T) >= first) | torch.eye(T).bool()
         for first in (0, 6)]  # columns of padding before each row
MASKS = {"causal": None, "window": BAND[None, None], "of each row": torch.stack(BEGUN)[:, None]}


def inputs(kv_heads=3):
    q = normal(2, 3, T, 16, seed=1, grad=True)
    return q, *(normal(2, kv_heads, T, 16, seed=s, grad=True) for s in (2, 3))


def bias_of(rate, c):
    """A score function that captures a number for each head and one for each key."""
    return lambda score, b, h, t, s: 3 * torch.tanh(score / 3) - rate[h] * (t - s) + c[b, h, s]


def stored(q, k, v, mask, rate, c):
    """(y, lse, entropy, log sum p^2, spread) with the same bias, from logits in memory."""
    k, v = (x.repeat_interleave(3 // x.size(1), 1) for x in (k, v))
    s = 3 * torch.tanh(0.3 * q @ k.mT / 3) + c[:, :, None]
    s = s - rate[:, None, None] * (torch.arange(T)[:, None] - torch.arange(T))
    seen = torch.ones(T, T).tril().bool() if mask is None else mask
    s = s.masked_fill(~seen, -math.inf)
    p = s.softmax(-1)
    entropy, p2 = oracle.row_statistics(p)
    return p @ v, s.logsumexp(-1), entropy, p2.log(), oracle.spread_of_rows(p, seen)


@pytest.mark.parametrize("kv_heads", [3, 1])
@pytest.mark.parametrize("at_once", [2**21, 2000, 1], ids=["one", "some", "each"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_score_function_acts_on_the_stored_logits(mask, at_once, kv_heads, monkeypatch):
    """Outputs, all statistics and all gradients, those of what it captures too, in one portion or in many."""
    monkeypatch.setattr(attention, "LOGITS_AT_ONCE", at_once)
    q, k, v = inputs(kv_heads)
    rate, c = normal(3, seed=4, grad=True), normal(2, 3, T, seed=5, grad=True)
    n = (torch.ones(T, T).tril() if mask is None else mask).double().sum(-1)
    n = n if mask is None else n.expand(2, 1, T)
    y, rows = attend(q, k, v, scale=0.3, mask=mask, score_mod=bias_of(rate, c), stats="shape", spread=True,
                     n_keys=n)
    want = stored(q, k, v, mask, rate, c)
    agree([y, *rows], want, [q, k, v, rate, c], 1e-10)
    y, none = attend(q, k, v, scale=0.3, mask=mask, score_mod=bias_of(rate, c))
    assert none is None
    agree([y], want[:1], [q, k, v, rate, c], 1e-10)
    _, rows = attend(q, k, v, scale=0.3, mask=mask, score_mod=bias_of(rate, c), stats="lse", detach=True)
    close(rows.lse, want[1], 1e-10)
    assert not rows.lse.requires_grad and rows.entropy is None


def test_another_order_of_functions_is_another_score():
    """The control: each takes what the one before it returned."""
    double, add = (lambda score, b, h, t, s: 2 * score), (lambda score, b, h, t, s: score + 1)
    score = normal(2, 3, 4, 4)
    numbers = (torch.arange(2)[:, None, None, None], torch.arange(3)[:, None, None], torch.arange(4)[:, None],
               torch.arange(4))
    one, other = (combine_scores([(f, False) for f in order], 3)(score, *numbers)
                  for order in ((double, add), (add, double)))
    close(one, 2 * score + 1, 1e-12)
    close(other, 2 * score + 2, 1e-12)
    assert combine_scores([(None, False), (None, True)], 3) is None


def test_added_heads_keep_their_scores_unless_a_function_serves_them():
    rate = torch.arange(1.0, 3.0)  # of two own heads: a third would be out of range
    score = torch.zeros(1, 3, 1, 1)
    numbers = [torch.zeros(1, dtype=torch.long), torch.arange(3)[:, None, None], *2 * [torch.zeros(1).long()]]
    own = combine_scores([(lambda score, b, h, t, s: score + rate[h], False)], 2, 1)(score, *numbers)
    assert own.flatten().tolist() == [1, 2, 0]
    every = combine_scores([(lambda score, b, h, t, s: score + 1 + h, True)], 2, 1)(score, *numbers)
    assert every.flatten().tolist() == [1, 2, 3]
    pruned = combine_scores([(lambda score, b, h, t, s: score + rate[h], False)], 0, 1)
    assert pruned is None  # all are


def test_dropout_acts_behind_the_statistics():
    q, k, v = inputs()
    how = dict(scale=0.3, score_mod=lambda score, b, h, t, s: score + h, stats="shape")
    torch.manual_seed(0)
    (y, rows), (want, same) = attend(q, k, v, dropout=0.5, **how), attend(q, k, v, **how)
    assert not torch.allclose(y, want)
    for a, b in zip(rows[:3], same[:3]):
        close(a, b, 1e-12)
    with torch.no_grad():
        mean = sum(attend(q, k, v, dropout=0.5, **how)[0] for _ in range(400)) / 400
    assert (mean - want).norm() < 0.1 * want.norm()


WINDOWED = {"window": dict(window=5), "global": dict(window=4, window_global=2),
            "random": dict(window=3, window_global=1, window_random=1, window_block=4)}


READERS = [{}, dict(acag="headwise", sink=True), dict(acag="headwise", acag_mode="published"), dict(fox=True)]


@pytest.mark.parametrize("more", READERS, ids=lambda flags: "+".join(flags) or "plain")
@pytest.mark.parametrize("flags", WINDOWED.values(), ids=WINDOWED)
def test_a_long_window_is_the_stored_mask_some_queries_at_a_time(flags, more, monkeypatch):
    model, idx = tiny(block_size=40, n_head=2, n_embd=32, **flags, **more), tokens(2, 37)
    want = model.hidden(idx)
    monkeypatch.setattr("model.DENSE_UP_TO", 8)
    monkeypatch.setattr(attention, "LOGITS_AT_ONCE", 2000)
    assert model.mask.make(0, 37, None, torch.device("cpu"), False, False, False).seq_lengths == (37, 37)
    agree([model.hidden(idx)], [want], list(model.parameters()), 1e-9)


LONG = [dict(fox=True), dict(roles=["local"]), dict(relative_bias=True), dict(window=8),
        dict(window=8, window_global=1, window_random=1), dict(window=8, sink=True)]


@pytest.mark.parametrize("flags", [{}, *LONG], ids=lambda flags: "+".join(flags) or "plain")
@pytest.mark.parametrize("by_blocks", [False, True], ids=["apart", "by blocks"])
def test_nor_where_rows_hold_several_documents(flags, by_blocks, monkeypatch):
    """In both forms of their mask, also where one document is most of the row."""
    monkeypatch.setattr("model.DENSE_UP_TO", 64)
    monkeypatch.setattr("model.has_flex_attention", lambda device: by_blocks)
    monkeypatch.setattr(attention, "LOGITS_AT_ONCE", 2**14)
    T = 512
    model = GPT(GPTConfig(block_size=T, vocab_size=37, n_layer=1, n_head=2, n_embd=32, **flags))
    positions = torch.cat([torch.arange(n) for n in (400, 100, 12)])[None]
    with Largest() as largest:
        model(tokens(1, T), tokens(1, T), positions=positions).loss.backward()
    assert largest.size < T * T / 3


@pytest.mark.parametrize("flags", LONG, ids=lambda flags: "+".join(flags))
def test_nothing_of_t_by_t_is_stored_in_training(flags, monkeypatch):
    monkeypatch.setattr("model.DENSE_UP_TO", 64)
    monkeypatch.setattr(attention, "LOGITS_AT_ONCE", 2**14)
    T = 512
    model = GPT(GPTConfig(block_size=T, vocab_size=37, n_layer=1, n_head=2, n_embd=32, **flags))
    with Largest() as largest:
        model(tokens(1, T), tokens(1, T)).loss.backward()
    assert largest.size < T * T / 3
    monkeypatch.setattr(attention, "LOGITS_AT_ONCE", 2**24)
    monkeypatch.setattr("model.DENSE_UP_TO", 10**9)
    with Largest() as control:
        model(tokens(1, T), tokens(1, T)).loss.backward()
    assert control.size >= T * T


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
