"""Every mechanism against the oracle, values and gradients; its kernels, its details, mistakes once made."""

import functools
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import helpers
import model as model_py
import oracle
from helpers import pass_of
from helpers import TINY_GPT
from model import (ALL_ON, CONSTRAINTS, GPT, MECHANISM_CLASSES, MECHANISMS, A2C, Agency, ConstraintHeads,
                   GPTConfig, Roles, KVCache, Heads, Sentinel, Window)
from nanoheads import attention, optim
from nanoheads.attention import attend, attend_lse, flex
from nanoheads.config import TrainConfig
from nanoheads.logits import discounted_return, label_losses
from nanoheads.mechanism import flags_of
from nanoheads.pruning import constant_gate, pack, prune_heads
from nanoheads.traces import explain, summaries
from oracle import (agree, close, constraint_loss, dense, equals_the_oracle, gradients, normal, sigmoid,
                    softmax, tokens)

# on CPU it is the reference, not a kernel
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
TINY = {**TINY_GPT, "n_embd": 96}
tiny = functools.partial(helpers.tiny, n_embd=96, std=0.08)
INF = MECHANISMS["routing_inf"]  # the write-up's formula: softmax over the selected
STATES = {"active": 1.0, "overloaded": 0.5, "misaligned": 0.7, "withdrawn": 0.0}


# ---- names ----

KEPT = {"Routing": "router", "UNet": "fuse", "ConstraintHeads": "constraint"}  # by which parameters go


@pytest.mark.parametrize("cls", MECHANISM_CLASSES, ids=lambda cls: cls.__name__)
def test_a_mechanisms_class_flag_and_attribute_have_one_name(cls):
    flag = cls.flag.removesuffix("_names")
    assert cls.name == KEPT.get(cls.__name__, flag)
    assert cls.__name__.lower().startswith(flag.replace("_", ""))
    assert all(name.startswith(flag) for name in flags_of(cls))


# ---- the whole model ----

@pytest.mark.parametrize("name", MECHANISMS)
def test_values_and_gradients_equal_the_written_out_formula(name):
    equals_the_oracle(tiny(MECHANISMS[name]))


def test_every_flag_of_a_mechanism_is_in_the_oracle_or_listed_with_a_reason():
    """The list is neither short of one nor has one too many, and the tests that it names are there."""
    flags, read = {name for cls in MECHANISM_CLASSES for name in flags_of(cls)}, oracle.flags_read()
    assert flags - read - set(oracle.WITHOUT) == set(), "tests/oracle.py has neither formula nor reason"
    assert set(oracle.WITHOUT) - (flags - read) == set(), "these have a formula, or are no flags any more"
    files = {path.name: path.read_text(encoding="utf-8") for path in helpers.ROOT.glob("tests/*/*/test_*.py")}
    for file, names_a_test, test in (why.partition("::") for why in oracle.WITHOUT.values()):
        if names_a_test and (file in files or (helpers.ROOT / "tests/lab").is_dir()):  # the core may be alone
            assert f"\ndef {test}(" in files[file]


MIXTURES = {
    "write-ups": dict(INF, routing_top_k=4, sentinel="hard_concrete", unet="published", a2c="published",
                      constraint_names=CONSTRAINTS, constraint_mode="published"),
    "widths": dict(routing="moh", routing_shared=1, head_norm=True, unet="add", a2c="key_bias",
                   constraint_names=["a"], constraint_heads=2, constraint_variant="B",
                   constraint_layers=[0, 1], acag="elementwise", acag_mode="published",
                   output_gate="elementwise", window=3, window_global=1),
    "some blocks": dict(window=2, window_layers=[1], parallel=True, xsa=True, acag="headwise", routing="moh",
                        constraint_names=["a"], constraint_layers=[0, 1]),
    "roles": dict(roles=["previous", "long", "local"], a2c="key_bias", constraint_names=["a"], window=4,
                  routing="sigmoid", acag="headwise", key_offset=True),
    "tempered": dict(roles=["long", "free", "previous"], roles_waves=8, a2c="temperature", xsa=True,
                     constraint_names=["a"], constraint_variant="B", constraint_layers=[0]),
    "switches": dict(routing="sigmoid", agency=True, agency_enforce=False, unet="concat", unet_skips=False,
                     acag="headwise", window=2, bias=True),
    "learned": dict(agency=True, agency_learned=True, agency_enforce=False, sentinel="sigmoid",
                    constraint_names=["a"], constraint_layers=[0, 1], head_norm=True),
    "gated scores": dict(constraint_names=["a", "b"], constraint_gate="score", sink=True, xsa=True,
                         acag="headwise", roles=["long", "local"]),
    "hard gates": dict(constraint_names=["a", "b"], constraint_layers=[0, 1], constraint_gate="value",
                       constraint_router="hard_concrete", constraint_router_input="first", head_norm=True),
    "skipped": dict(constraint_names=["a", "b"], constraint_skip=0.5, constraint_layers=[0, 1],
                    output_gate="headwise"),
    "rivals": dict(short_conv="qkv", short_conv_width=2, value_residual=True, value_embedding=True, fox=True,
                   query_gain=True, stream_scalars=True, constraint_names=["a"], constraint_layers=[0, 1],
                   roles=["previous", "long", "local"], sentinel="sigmoid", agency=True, unet="add"),
    "rivals pruned": dict(head_ids=[[1, 2, 5], [0, 1]], short_conv="kv", short_conv_width=4,
                          value_residual=True, value_embedding=True, fox=True, query_gain=True,
                          sentinel="hard_concrete"),
    "rivals of the input": dict(short_conv="x", routing="sigmoid", a2c="published", value_embedding=True,
                                value_residual=True, fox=True, window=3, output_gate="headwise"),
    "llama": dict(recipe="llama", n_kv_head=3, qkv_bias=True, qk_norm=True, qk_scale=True, norm_eps=1e-3,
                  rope_base=100.0, rope_scaling=[4.0, 1.0, 2.0, 12.0], head_dim=10, constraint_names=["a"],
                  xsa=True, short_conv="qkv", tied=True),
    "grouped": dict(n_kv_head=2, key_offset=True, xsa=True, acag="headwise", query_gain=True, routing="moh",
                    short_conv="qkv", value_residual=True, value_embedding=True, sentinel="sigmoid",
                    bias=True),
    "multi-query": dict(n_kv_head=1, fox=True, roles=["previous", "long"], constraint_names=["a"], sink=True,
                        a2c="key_bias", window=3, short_conv="kv"),
    "grouped, pruned": dict(n_kv_head=3, head_ids=[[2, 3], [0, 1, 4, 5]], short_conv="qkv", fox=True,
                            value_residual=True, value_embedding=True, output_gate="headwise"),
    "two maps": dict(diff=True, fox=True, roles=["previous", "long"], a2c="key_bias", constraint_names=["a"],
                     window=3, head_mix=True, sentinel="sigmoid", xsa=True, routing="moh", key_offset=True),
    "two maps, grouped": dict(diff=True, n_kv_head=3, query_gain=True, sink=True, head_mix=True,
                              head_ids=[[2, 3], [0, 1, 4, 5]], stream_scalars=True),
    "two maps of queries as keys": dict(diff=True, a2c="published", depth_attention=True, acag="headwise"),
    "detached beside another reader": dict(acag="headwise", acag_detach=True, sink=True),
    "pairs": dict(diff_v1=True, fox=True, constraint_names=["a"], constraint_layers=[0, 1], window=4,
                  head_ids=[[2, 3], [0, 1, 4, 5]], depth_attention=True, sentinel="sigmoid",
                  head_mix=True),
    "pairs, sums of outputs": dict(diff_v1=True, mudd=True, mudd_from=1, bias=True, unet="concat",
                                   query_gain=True, key_offset=True, a2c="temperature"),
    "grouped, sums of outputs": dict(n_kv_head=2, mudd=True, mudd_from=1, bias=True, head_mix=True,
                                     short_conv="qkv", stream_scalars=True, value_residual=True),
    "paired heads": dict(paired_heads=True, a2c="key_bias", sink=True, constraint_names=["a"], window=3,
                         constraint_gate="score", acag="headwise", key_offset=True, mudd=True, mudd_from=2),
    "paired, two maps": dict(paired_heads=True, diff=True, xsa=True, head_norm=True, sink=True,
                            head_ids=[[2, 3], [0, 1, 4, 5]], depth_attention=True, stream_scalars=True,
                            unet="add"),
    "pruned": dict(head_ids=[[1, 2, 5], [0]], routing="moh", roles=["previous", "long"], a2c="published",
                   constraint_names=["a"])}


@pytest.mark.parametrize("flags", MIXTURES.values(), ids=MIXTURES)
def test_other_mixtures_equal_the_written_out_formula(flags):
    equals_the_oracle(tiny(flags), tol=1e-9 if flags.get("recipe") != "llama" else 1e-6)  # RoPE: float32


@pytest.mark.parametrize("recipe", [dict(recipe="gpt2", bias=True), dict(recipe="modern")],
                         ids=["gpt2", "modern"])
def test_all_mechanisms_together_equal_the_written_out_formula(recipe):
    model, idx = tiny(ALL_ON, n_layer=3, **recipe), tokens(2, 7)
    # RoPE's tables are float32
    equals_the_oracle(model, idx, tol=1e-9 if model.config.pos == "learned" else 1e-6)
    # logits are float32
    assert torch.allclose(model(idx).logits.double(), oracle.logits(model, idx), rtol=1e-5, atol=1e-5)


# ---- attention kernels ----

def statistics(p):
    """Entropy and log sum p^2 of rows that are 0 where nothing is seen."""
    entropy, p2 = oracle.row_statistics(p)
    return entropy, p2.log()


def windowed(T, window):
    t = torch.arange(T)
    return ((t <= t[:, None]) & (t[:, None] - t < window))[None, None]


def row_statistics(q, k, v, scale, mask, n_keys, stats="shape", **more):
    """attend() with statistics of the rows."""
    return attend(q, k, v, scale=scale, mask=mask, n_keys=n_keys, stats=stats, **more)


MASKS = {"causal": None,
         "window": windowed(21, 4),
         "window+global": windowed(21, 9) | (torch.arange(21) < 2) & windowed(21, 99)}


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(16,), (0,), (5,), (40,), (16, 16), (0, 7)], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_cpu_flash_equals_dense_attention_in_values_log_sum_exp_and_both_gradients(mask, widths):
    q, k = normal(2, 3, 21, 16, grad=True), normal(2, 3, 21, 16, seed=2, grad=True)
    values = [normal(2, 3, 21, width, seed=3 + i, grad=True) for i, width in enumerate(widths)]
    got = attend_lse(q, k, 0.3, mask, *values)
    want = [dense(q, k, values[0], 0.3, mask)[1], *(dense(q, k, v, 0.3, mask)[0] for v in values)]
    agree(got, want, [q, k, *values], 1e-12)
    for i in range(len(got)):  # each output's gradient alone
        for a, b in zip(gradients(got[i:i + 1], [q, k]), gradients(want[i:i + 1], [q, k])):
            close(a, b, 1e-11)


def test_one_query_over_many_keys_equals_the_last_row_of_dense_attention():
    q, k, v = (normal(2, 3, 21, 16, seed=s) for s in (1, 2, 3))
    y, lse, _ = dense(q, k, v, 0.3)
    got, rows = row_statistics(q[:, :, -1:], k, v, 0.3, None, None, "lse")
    for a, b in zip((rows.lse, got), (lse, y)):
        close(a, b[:, :, -1:], 1e-12)


@pytest.mark.parametrize("mask", [None, windowed(21, 4), windowed(21, 1)],
                         ids=["causal", "window", "oneself"])
def test_row_statistics_equal_those_of_the_stored_attention(mask):
    q, k, v = (normal(2, 3, 21, 16, seed=s, grad=True) for s in (1, 2, 3))
    n = torch.ones(21, 21).tril().double().sum(-1) if mask is None else mask.double().sum(-1)
    y, lse, p = dense(q, k, v, 0.3, mask)
    seen = torch.ones(21, 21).tril().bool() if mask is None else mask
    want = [y, lse, *statistics(p), oracle.spread_of_rows(p, seen)]
    y, rows = row_statistics(q, k, v, 0.3, mask, n, spread=True)
    agree([y, *rows], want, [q, k, v], 1e-10)
    y, rows = row_statistics(q, k, v, 0.3, mask, n, "lse")
    agree([y, rows.lse], want[:2], [q, k, v], 1e-10)
    assert rows.entropy is rows.log_p2 is rows.spread is None
    y, rows = row_statistics(q, k, v, 0.3, mask, n, detach=True, spread=True)
    for a, b in zip((y, *rows), want, strict=True):
        close(a, b, 1e-10)
    assert not any(row.requires_grad for row in rows)
    for a, b in zip(gradients([y], [q, k, v]), gradients(want[:1], [q, k, v])):
        close(a, b, 1e-11)


def deviation(spread, n):
    """As ACAG's published form reads it, of rows of more than one key."""
    return (spread / n + 1e-12).sqrt()[..., 1:]


@pytest.mark.parametrize("size", [1e-3, 1e-2, 1.0, 30.0])
@pytest.mark.parametrize("T", [40, 300])  # 300: more than are computed at once
def test_the_spread_of_nearly_uniform_rows_is_exact(T, size):
    """In float32, with its gradient, however little the logits differ: `size` is about their deviation.

    A control: of Σ p^2 - 1/n there is hardly a digit left at 0.001.
    """
    q, k = size * normal(1, 2, T, 16, seed=1), normal(1, 2, T, 16, seed=2)
    slow, fast = ([t.to(dtype).requires_grad_() for t in (q, k)] for dtype in (torch.float64, torch.float32))
    n = torch.arange(1.0, T + 1)
    seen = torch.ones(T, T).tril().bool()
    want = deviation(oracle.spread_of_rows(dense(*slow, slow[1], 0.25)[2], seen), n.double())
    _, rows = row_statistics(*fast, fast[1], 0.25, None, n, spread=True)
    got, difference = deviation(rows.spread, n), deviation((rows.log_p2.exp() - 1 / n).clamp_min(0), n)
    assert ((got - want).abs() < 1e-3 * want + 1e-8).all()  # of two keys the logits may be closer yet
    assert (difference - want).norm() > 0.05 * want.norm() or size > 1e-3
    for a, b in zip(gradients([got.double()], fast), gradients([want], slow), strict=True):
        assert (a - b).norm() < 1e-3 * b.norm()


def test_row_statistics_of_uniform_and_of_one_hot_rows_are_the_two_extremes():
    q, k, n = torch.zeros(1, 1, 12, 16).double(), normal(1, 1, 12, 16), torch.arange(1, 13).double()
    _, (_, entropy, log_p2, spread) = row_statistics(q, k, k, 0.25, None, n, detach=True, spread=True)
    assert spread.abs().max() < 1e-30
    close(entropy[0, 0], n.log(), 1e-10)
    close(log_p2[0, 0], -n.log(), 1e-10)
    _, (_, entropy, log_p2, spread) = row_statistics(1e4 * k, k, k, 0.25, None, n, detach=True, spread=True)
    close(spread[0, 0], 1 - 1 / n, 1e-4)
    assert (entropy >= 0).all() and (entropy < 1e-4).all() and log_p2.abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_never_takes_the_entropy_out_of_its_range(dtype):
    k, n = normal(2, 4, 64, 16).to(dtype), torch.arange(1.0, 65.0)
    # nearly uniform and nearly one-hot rows
    for q in (1e-3 * normal(2, 4, 64, 16, seed=2).to(dtype), 100 * k):
        _, (_, entropy, *_) = row_statistics(q, k, k, 0.25, None, n, detach=True)
        assert (entropy >= 0).all() and (entropy <= n.log()).all()


def test_bfloat16_entropy_is_within_a_tenth_of_a_nat():
    q, k, v = (normal(2, 4, 256, 64, seed=s).bfloat16() for s in (1, 2, 3))
    _, (_, entropy, *_) = row_statistics(q, k, v, 64**-0.5, None, torch.arange(1.0, 257.0), detach=False)
    want, _ = statistics(dense(q.double(), k.double(), v.double(), 64**-0.5)[2])
    assert (entropy.double() - want).abs().max() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    dict(acag="headwise"),
    dict(acag="elementwise", acag_mode="published"),
    dict(acag="headwise", window=1),
    dict(acag="headwise", acag_mode="published", window=1),
], ids=lambda f: "+".join(map(str, f.values())))
@pytest.mark.parametrize("T", [1, 9])
def test_a_token_that_sees_only_itself_has_finite_values_and_gradients(flags, T):
    model = tiny(flags)
    out = model(tokens(2, T), tokens(2, T, seed=2), logits=True)
    grads = torch.autograd.grad(out.loss, list(model.parameters()))
    assert out.logits.isfinite().all() and all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("mode", ["published", "normalised"])
def test_uniform_attention_rows_have_finite_gradients(mode):
    """The other place where the spread is exactly 0, at any n: queries that are all alike to every key."""
    model = tiny(dict(acag="headwise", acag_mode=mode))
    for block in model.transformer.h:
        torch.nn.init.zeros_(block.attn.c_attn.weight[:96])
    grads = torch.autograd.grad(model(tokens(2, 9), tokens(2, 9, seed=2)).loss, list(model.parameters()))
    assert all(g.isfinite().all() for g in grads) and any(g.any() for g in grads)


def test_a_root_guarded_only_afterwards_gives_nan():
    """Negative control: at n = 1 the variance is exactly 0; to choose a value after the root is too late."""
    s = torch.zeros(1, requires_grad=True)  # the one logit of the first row
    variance = s.softmax(0).square().sum() - 1
    torch.where(torch.tensor(True), 0.0, variance.sqrt()).backward()
    assert s.grad.isnan()


WINDOWS = [dict(), dict(window=70), dict(window=1), dict(window=200),
           dict(window=70, window_global=3), dict(window=20, window_global=140)]
WINDOWS += [dict(window=30, window_global=5, window_random=2, window_block=size)
            for size in (7, 16, 48, 128, 150, 299)]


BEGINS = torch.tensor([[0] * 128 + [128] * 40 + [168] * 132, [0] * 10 + [10] * 250 + [260] * 40, [0] * 300])


@pytest.mark.slow
@pytest.mark.parametrize("flags", WINDOWS, ids=lambda f: "-".join(map(str, f.values())) or "causal")
def test_the_block_mask_of_documents_in_rows_is_their_dense_mask(flags, monkeypatch):
    """Also by blocks of 16. FlexAttention computes the blocks that are listed, and masks none of the full."""
    T, cpu = 300, torch.device("cpu")
    model = GPT(GPTConfig(block_size=T, vocab_size=5, n_layer=1, n_head=1, n_embd=16, **flags))
    want = model.mask.dense(0, T, BEGINS, cpu)
    for row, begins in enumerate(BEGINS):  # each document is as a text by itself
        for first in begins.unique().tolist():
            n = int((begins == first).sum())
            own, last = model.mask.dense(0, n, None, cpu), first + n
            assert torch.equal(want[row, 0, first:last, first:last], own[0, 0])
        assert not (want[row, 0] & (torch.arange(T) < begins[:, None])).any()
    for size in (128, 16):
        monkeypatch.setattr(attention, "KERNEL_BLOCK", size)
        mask = model.mask.block_mask(T, cpu, BEGINS)
        listed = mask.to_dense()[:, 0].bool()
        for b, i, j in itertools.product(range(3), *[range(-(-T // size))] * 2):
            tile = want[b, 0, i * size:(i + 1) * size, j * size:(j + 1) * size]
            assert listed[b, i, j] or not tile.any(), "nothing that is seen is left out"
            if not flags:
                assert listed[b, i, j] == tile.any(), "and nothing is computed in vain"
            if j in mask.full_kv_indices[b, 0, i, :mask.full_kv_num_blocks[b, 0, i]].tolist():
                assert tile.all()
        q, k, v = (normal(3, 1, T, 16, seed=s).float() for s in (1, 2, 3))
        with torch.no_grad():
            close(attend_lse(q, k, 0.3, mask, v)[1], attend_lse(q, k, 0.3, want, v)[1], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("flags", WINDOWS, ids=lambda f: "-".join(map(str, f.values())) or "causal")
@pytest.mark.parametrize("block_size", [300, 500])
def test_flex_attention_under_its_block_mask_sees_what_the_dense_mask_says(flags, block_size):
    T, size = 300, 128
    model = GPT(GPTConfig(block_size=block_size, vocab_size=5, n_layer=1, n_head=1, n_embd=16, **flags))
    cpu = torch.device("cpu")
    mask, blocks = model.mask.dense(0, T, None, cpu), model.mask.block_mask(T, cpu)
    tiles = [[mask[0, 0, i:i + size, j:j + size] for j in range(0, T, size)] for i in range(0, T, size)]
    some = torch.tensor([[bool(tile.any()) for tile in row] for row in tiles])
    listed = blocks.to_dense()[0, 0].bool()
    assert not (some & ~listed).any()  # nothing that is seen is left out
    if block_size == T:
        assert torch.equal(listed, some)  # and nothing is computed in vain
    for i, row in enumerate(tiles):  # what counts as seen whole is not masked any more
        for j in blocks.full_kv_indices[0, 0, i, :blocks.full_kv_num_blocks[0, 0, i]].tolist():
            assert row[j].all()
    q, k, v = (normal(1, 1, T, 16, seed=s).float() for s in (1, 2, 3))
    with torch.no_grad():  # FlexAttention has no backward pass on CPU
        lse, y = attend_lse(q, k, 0.3, mask, v)
        for got, want, flash in zip(flex(q, k, v, 0.3, blocks), dense(q, k, v, 0.3, mask), (y, lse)):
            close(got, want, 1e-5)
            close(got, flash, 1e-5)


@pytest.mark.parametrize("flags", [
    dict(window=5),
    dict(window=3, window_global=2),
    dict(window=2, window_global=1, window_random=2, window_block=3),
    dict(window=0, window_random=1),
], ids=lambda f: "-".join(map(str, f.values())))
def test_a_window_sees_the_near_the_first_and_the_drawn(flags):
    model = tiny(flags, block_size=32)
    mask = model.mask.dense(0, 32, None, torch.device("cpu"))[0, 0]
    assert torch.equal(mask, oracle.visible(model, 0, 32))
    assert torch.equal(model.mask.n_seen, mask.sum(-1))
    if "window_random" in flags:
        table = model.mask.random_cells
        size, window = model.config.window_block, model.config.window
        for i, row in enumerate(table):  # drawn blocks lie before the window
            before = [j for j in range(len(table)) if (j + 1) * size - 1 <= i * size - window]
            assert row.sum() == min(len(before), flags["window_random"])
            assert set(row.nonzero().flatten().tolist()) <= set(before)


# ---- routing ----

ROUTERS = {"published": dict(routing="published"),
           "inf": INF,
           "inf-2": {**INF, "routing_top_k": 2},
           "zero": MECHANISMS["routing_zero"],
           "inf-linear": {**INF, "routing_hidden": 0},
           "moh": dict(routing="moh"),
           "moh-hidden": dict(routing="moh", routing_hidden=24),
           "moh-shared": dict(routing="moh", routing_shared=2, routing_top_k=4),
           "sigmoid": dict(routing="sigmoid", routing_top_k=2)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTERS)
def test_routing_weights_and_penalty_equal_loops_over_tokens(name):
    model = tiny(ROUTERS[name], routing_coef=0.3).train()  # the write-up's code routes in training alone
    c, router, x = model.config, model.transformer.h[0].attn.router, normal(3, 7, 96, grad=True)
    p = {f"router.{n}": v for n, v in router.named_parameters()}
    got, selected, logits = router(x)
    want = oracle.routing_weights(c, p, x)
    penalty, = router.penalty(got, selected, logits).values()
    if c.routing == "published":  # the mean over tokens of the weights' entropy
        slow = sum(-(w * w.log()) for w in want.flatten() if w > 0) / 21
    else:  # heads times the sum over heads of (mean probability) x (share of tokens that chose it)
        z = oracle.router_logits(p, x).flatten(0, 1)
        probability, share = softmax(z).mean(0), oracle.chosen(c, z).double().mean(0)
        slow = z.size(-1) * sum(probability[h] * share[h] for h in range(z.size(-1)))
    agree([got], [want], [x, *router.parameters()], 1e-10)
    # the write-up's code keeps 1e-8 away from log 0
    agree([penalty[None]], [0.3 * slow[None]], [x, *router.parameters()], 1e-6)
    model_penalty = sum(model(tokens(2, 9), tokens(2, 9)).aux.values())
    assert model_penalty > 0


@pytest.mark.parametrize("name", [name for name, flags in MECHANISMS.items()
                                  if flags.get("routing") == "published"])
def test_the_write_ups_routing_equals_the_written_out_formula_in_training(name):
    """Where its printed code has gates at all."""
    equals_the_oracle(tiny(MECHANISMS[name]).train())


def test_the_write_ups_gates_shrink_the_heads_to_about_one_in_h_at_the_start():
    x = normal(2, 16, 96)

    def size(**flags):
        model = tiny(flags, live=False)
        attn = model.transformer.h[0].attn  # the other weights are the same in all of these
        return attn(x, pass_of(model, x))[0].norm().item()

    plain = size()
    assert size(**INF, routing_top_k=6) / plain == pytest.approx(1 / 6, rel=0.02)
    assert size(**INF) / plain == pytest.approx(1 / math.sqrt(3 * 6), rel=0.1)  # half the heads, a third each
    assert size(routing="moh", routing_top_k=6) / plain == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("flags", [INF, dict(routing="moh"), dict(routing="sigmoid")],
                         ids=lambda f: f["routing"])
def test_different_tokens_select_different_heads_at_the_start(flags):
    router, x = tiny(flags, live=False).transformer.h[0].attn.router, normal(1, 64, 96)

    def choices():
        return {tuple(row) for row in router(x)[1][0].tolist()}

    assert len(choices()) >= 10  # of the 20 ways to choose 3 heads of 6
    torch.nn.init.zeros_(router.out.weight)
    if router.out.bias is not None:
        torch.nn.init.zeros_(router.out.bias)
    assert len(choices()) == 1  # negative control: ties


@pytest.mark.parametrize("flags, total", [({}, 90_397_440), (dict(routing="published"), 93_996_432)],
                         ids=["plain", "routed"])
def test_parameter_counts_are_those_of_the_routing_write_up(flags, total, monkeypatch):
    monkeypatch.setattr(GPT, "init_weights", lambda self: None)
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=1024, vocab_size=6064, n_layer=12, n_head=12, n_embd=768, **flags))
    assert model.num_params() == total
    assert model.num_params(non_embedding=True) == total - 786_432
    assert (total - 786_432) in (89_611_008, 93_210_000)


def test_gates_in_training_alone_make_two_different_models():
    """The write-up's code: what is evaluated is not what was trained."""
    idx = tokens(2, 9)
    for flags, same in ((INF, True), (MECHANISMS["routing_published"], False),
                        (dict(routing="published"), False)):
        model = tiny(flags)
        assert torch.equal(model(idx).logits, model.train()(idx).logits) == same


# ---- sentinel gates ----

def test_hard_concrete_gates_are_the_papers_distribution_in_training_and_its_formula_in_evaluation():
    gate = Sentinel(GPTConfig(sentinel="hard_concrete"), SimpleNamespace(n_total=7)).double()
    gate.logit.data = torch.linspace(-3, 3, 7).double()
    fixed = [min(1.0, max(0.0, 1.2 / (1 + math.exp(-s)) - 0.1)) for s in gate.logit.tolist()]
    close(gate.eval().gate(noisy=False), torch.tensor(fixed, dtype=torch.float64), 1e-12)
    torch.manual_seed(0)
    draws = torch.stack([gate.train().gate(noisy=True) for _ in range(4000)])
    u = (torch.arange(10000).double() + 0.5) / 10000  # every quantile of the noise, evenly
    exact = (1.2 * sigmoid(((u / (1 - u)).log()[:, None] + gate.logit) / (2 / 3)) - 0.1).clamp(0, 1)
    assert (draws.mean(0) - exact.mean(0)).abs().max() < 0.03
    assert (draws.std(0) - exact.std(0)).abs().max() < 0.03
    # deterministic evaluation is near the mean
    assert (draws.mean(0) - gate.eval().gate(noisy=False)).abs().max() < 0.12
    zeros = (draws == 0).double().mean(0)
    assert zeros[0] > 0.5 and (draws == 1).double().mean(0)[-1] > 0.5
    alive = sigmoid(gate.logit - 2 / 3 * math.log(0.1 / 1.1))  # arXiv 1712.01312, eq. 12
    assert (1 - alive - zeros).abs().max() < 0.03
    close(gate.penalty()["gate_l0"], 1e-4 * alive.sum(), 1e-12)


def test_the_training_gradient_of_a_hard_concrete_gate_is_that_of_its_draw():
    config = GPTConfig(sentinel="hard_concrete", sentinel_init=0.2)
    gate = Sentinel(config, SimpleNamespace(n_total=5)).double()
    gate.logit.data = torch.linspace(-1, 1, 5).double()
    torch.manual_seed(3)
    got = gate.train().gate(noisy=True)
    torch.manual_seed(3)
    u = torch.rand(5, dtype=torch.float64)
    want = (1.2 * sigmoid(((u / (1 - u)).log() + gate.logit) / (2 / 3)) - 0.1).clamp(0, 1)
    agree([got], [want], [gate.logit], 1e-10)


@pytest.mark.parametrize("mode, name", [("sigmoid", "gate_l1"), ("hard_concrete", "gate_l0")])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_step_on_the_penalty_alone_closes_every_gate_a_little(mode, name, optimizer):
    model = GPT(GPTConfig(**TINY, sentinel=mode, constraint_names=CONSTRAINTS)).eval()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizers = optim.make_optimizers(model, TrainConfig(optimizer=optimizer).for_recipe("gpt2"))
    model(tokens(2, 9), tokens(2, 9)).aux[name].backward()
    for o in optimizers:
        o.step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {f"transformer.h.{i}.attn.sentinel.logit" for i in range(2)}
    assert all((p < before[n]).all() for n, p in model.named_parameters() if n in moved)
    assert len(model.transformer.h[1].attn.sentinel.logit) == 9  # constraint heads have gates too


@pytest.mark.parametrize("mode", ["sigmoid", "hard_concrete"])
def test_the_gate_penalty_sums_over_all_blocks_and_heads(mode):
    model = tiny(dict(sentinel=mode, sentinel_coef=0.25))
    logits = [s for block in model.transformer.h for s in block.attn.sentinel.logit]
    shift = 0 if mode == "sigmoid" else -2 / 3 * math.log(0.1 / 1.1)
    aux, = model(tokens(2, 9), tokens(2, 9)).aux.values()
    close(aux, 0.25 * sum(sigmoid(s + shift) for s in logits), 1e-12)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_gates_and_fusions_never_decay_and_stay_with_adamw_while_routers_decay(optimizer):
    model = GPT(GPTConfig(**TINY, **{**ALL_ON, "a2c": "key_bias"}, output_gate="headwise"))
    config = TrainConfig(optimizer=optimizer, weight_decay=0.1).for_recipe("gpt2")
    *_, adamw = optim.make_optimizers(model, config)
    decay = {id(p): group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    decays = {n: decay.get(id(p)) for n, p in model.named_parameters()}
    for part in ("sentinel.logit", "acag.weight", "acag.bias", "a2c.mix", "fuse.0.weight",
                 "constraint.w1", "constraint.w2"):
        assert {d for n, d in decays.items() if n.endswith(part)} == {0.0}, part
    for part in ("router.out.weight", "output_gate.proj.weight", "critic.weight", "value.weight",
                 "constraint.fc.weight"):
        assert all(d > 0 for n, d in decays.items() if n.endswith(part)), part


# ---- agency ----

@pytest.mark.parametrize("enforce", [True, False])
def test_the_factor_of_every_state_with_and_without_consent(enforce):
    model = tiny(dict(agency=True, agency_enforce=enforce), live=False)
    agency = model.transformer.h[1].attn.agency
    for head, (state, factor) in enumerate(STATES.items()):
        for consent in (True, False):
            model.set_state(1, head, state=state, consent=consent, step=12)
            want = factor if enforce and consent else 0.0 if enforce else factor or 1.0
            assert agency.gate()[head].item() == pytest.approx(want, abs=1e-7)
            assert agency.last_signal[head] == 12
    assert agency.gate()[4:].tolist() == [1.0, 1.0] and agency.last_signal[4:].tolist() == [0, 0]


def test_withdrawing_a_head_withdraws_consent_and_any_other_state_gives_it_back():
    model = tiny(dict(agency=True))
    agency = model.transformer.h[0].attn.agency
    model.set_state(0, 4, state="withdrawn")
    assert not agency.consent[4]
    model.set_state(0, 4, state="overloaded")
    assert agency.consent[4] and agency.gate()[4] == 0.5
    model.set_state(0, 4, consent=False)
    assert agency.gate()[4] == 0 and agency.state[4] == 1  # the state is kept


LEARNED = MECHANISMS["agency_learned"]


def slopes_of_states(model, idx, targets, layer, eps=1e-5):
    """Gradients of learned agency's weight and bias, from nothing but losses with other gates of agency.

    d loss / d factor by a difference of two; the chain rule of a softmax's mean written out.
    """
    agency = model.transformer.h[layer].attn.agency
    gates = agency.gate().detach()
    weight, bias = torch.zeros_like(agency.weight), torch.zeros_like(agency.bias)
    for head in range(6):
        if not agency.consent[head]:
            continue
        losses = []
        for change in (eps, -eps):
            moved = gates + change * (torch.arange(6) == head)
            agency.gate = lambda noisy=False: moved
            losses.append(F.cross_entropy(model.lm_head(model.hidden(idx)).flatten(0, 1), targets.flatten()))
            del agency.gate
        slope = (losses[0] - losses[1]) / (2 * eps)
        chances = softmax(agency.weight @ agency.metrics[head] + agency.bias)
        mean = sum(p * f for p, f in zip(chances, STATES.values()))
        for s, factor in enumerate(STATES.values()):
            into = slope * chances[s] * (factor - mean)
            bias[s] += into
            weight[s] += into * agency.metrics[head]
    return weight, bias


def learns_states(model):
    """Whether the gradients of learned agency are those of slopes_of_states(), and none is all zeros."""
    idx, targets = tokens(2, 9), tokens(2, 9, seed=2)
    model.zero_grad(set_to_none=True)
    F.cross_entropy(model.lm_head(model.hidden(idx)).flatten(0, 1), targets.flatten()).backward()
    for layer, block in enumerate(model.transformer.h):
        agency = block.attn.agency
        with torch.no_grad():
            want = slopes_of_states(model, idx, targets, layer)
        for parameter, slope in zip((agency.weight, agency.bias), want):
            assert slope.any()
            got = torch.zeros_like(slope) if parameter.grad is None else parameter.grad
            if not torch.allclose(got, slope, rtol=1e-5, atol=1e-8 * slope.abs().max().item()):
                return False
    return True


@pytest.mark.slow
def test_learned_states_pass_the_gradient_of_the_expected_factor():
    """The value is the state's factor to the last bit. The control has the factor alone, and no gradient."""
    model, plain = tiny(LEARNED), tiny(dict(agency=True))
    plain.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model(tokens(2, 9)).logits, plain(tokens(2, 9)).logits)
    assert learns_states(model)


def test_states_without_straight_through_learn_nothing(monkeypatch):
    monkeypatch.setattr(Agency, "gate", lambda self: self.factors[self.state] * self.consent)
    model = tiny(LEARNED)
    assert not learns_states(model)
    assert all(block.attn.agency.weight.grad is None for block in model.transformer.h)


def test_a_head_without_consent_is_withdrawn_and_teaches_nothing():
    model = tiny(LEARNED)
    for layer, head in itertools.product(range(2), range(6)):
        model.set_state(layer, head, consent=layer == 1)
    model(tokens(2, 9), tokens(2, 9, seed=2)).loss.backward()
    none, all_of_them = (block.attn.agency for block in model.transformer.h)
    assert not none.gate().any() and not none.weight.grad.any() and not none.bias.grad.any()
    assert all_of_them.gate()[0] == 1 and all_of_them.weight.grad.any()


def test_learned_states_start_active():
    model = tiny(LEARNED, live=False)
    for agency in (block.attn.agency for block in model.transformer.h):
        assert (agency.gate() == 1).all() and not agency.metrics.any()
        agency.metrics.normal_()
        assert (agency.logits().argmax(-1) == 0).all(), "whatever is measured first"


def test_a_gate_set_by_hand_is_one_more_factor_on_that_head_alone():
    model, idx = tiny(dict(agency=True, sentinel="sigmoid", constraint_names=["a"])), tokens(2, 9)
    attn, gate_of = model.transformer.h[1].attn, {}
    before = constant_gate(attn)
    assert before[3] == 0, "a withdrawn head"
    model.set_gate(1, 1, 0.25)
    model.set_gate(1, 3, 2.0)
    model.set_gate(1, 6, 0.75)  # constraint heads are numbered on
    traces = model(idx, traces=True).traces
    for name in ("by_hand", "sentinel", "agency"):
        gate_of[name] = traces[f"blocks.1.gates.{name}"].flatten()
    assert gate_of["by_hand"].tolist() == [1, 0.25, 1, 2.0, 1, 1, 0.75]
    close(math.prod(gate_of.values()), before * gate_of["by_hand"], 0)
    close(constant_gate(attn), before * gate_of["by_hand"], 0)
    plain = tiny()
    want = plain(idx).logits
    plain.set_gate(0, 2, 0.0)  # works without any mechanism, as does zeroing what the head sends out
    got = plain(idx).logits
    plain.set_gate(0, 2, 1.0)
    assert torch.equal(plain(idx).logits, want)
    plain.transformer.h[0].attn.c_proj.weight.data[:, 32:48] = 0
    assert torch.allclose(plain(idx).logits, got, atol=1e-6) and not torch.allclose(want, got, atol=1e-3)


@pytest.mark.parametrize("arguments, words", [
    ((2, 0, 1.0), "no block 2"),
    ((-1, 0, 1.0), "no block -1"),
    ((0, 6, 1.0), "no head 6"),
    ((0, 0, math.nan), "a number of at most"),
    ((0, 0, "tired"), "must be one of active"),
])
def test_setting_a_head_that_there_is_not_says_so_in_one_line(arguments, words):
    model = tiny(dict(agency=True))
    with pytest.raises(ValueError, match=words) as e:
        (model.set_state if arguments[-1] == "tired" else model.set_gate)(*arguments)
    assert "\n" not in str(e.value)


def test_a_state_without_agency_is_refused_in_one_line():
    with pytest.raises(ValueError, match="agency") as e:
        tiny().set_state(0, 0, state="active")
    assert "\n" not in str(e.value)


# ---- U-Net skips ----

@pytest.mark.slow
@pytest.mark.parametrize("mode", ["concat", "add", "scalar", "published"])
@pytest.mark.parametrize("n_layer", [2, 3, 4, 5])
@pytest.mark.parametrize("on", [True, False])
def test_block_i_joins_the_output_of_block_n_minus_i_plus_1(mode, n_layer, on):
    model = tiny(dict(unet=mode, unet_skips=on), n_layer=n_layer, n_embd=24, n_head=2)
    equals_the_oracle(model, tokens(1, 5))


@pytest.mark.slow
@pytest.mark.parametrize("n_layer, weights", [
    (2, [0.5]),
    (3, [0.5]),
    (8, [0.5, 0.375, 0.25, 0.125]),
    (9, [0.5, 0.375, 0.25, 0.125]),
])
def test_skips_start_as_a_share_that_falls_with_depth(n_layer, weights):
    concat = tiny(dict(unet="concat"), live=False, n_layer=n_layer)
    eye, zero = torch.eye(96).double(), torch.zeros(96, 96).double()
    assert len(concat.fuse) == len(weights)
    for fuse, share in zip(concat.fuse, weights):
        close(fuse.weight, torch.cat((share * eye, zero), 1), 0)
    for fuse, share in zip(tiny(dict(unet="add"), live=False, n_layer=n_layer).fuse, weights):
        assert sigmoid(fuse.logit).item() == pytest.approx(share, abs=1e-6)
    for fuse, share in zip(tiny(dict(unet="scalar", unet_init=0.5), live=False,
                                n_layer=n_layer).fuse, weights):
        assert fuse.weight.item() == share


@pytest.mark.slow
@pytest.mark.parametrize("n_layer", [4, 5, 6, 7])
def test_a_skip_never_meets_itself(n_layer):
    """And it is its block's own input only in the innermost pair of an even stack.

    Joined to a block's input, as in the source, the innermost skip would be joined to itself.
    """
    model, inputs, pairs = tiny(dict(unet="concat"), n_layer=n_layer), [], []
    for block in model.transformer.h:
        block.register_forward_hook(lambda module, args, out: inputs.append(args[0]))
    for fuse in model.fuse:
        fuse.register_forward_hook(lambda module, args, out: pairs.append(args))
    model(tokens(2, 9))
    decoder = inputs[n_layer - n_layer // 2:]
    assert len(pairs) == len(decoder) == n_layer // 2
    assert not any(torch.equal(h, skip) for h, skip in pairs)
    own = [torch.equal(x, skip) for x, (h, skip) in zip(decoder, pairs)]
    assert own == [n_layer % 2 == 0] + [False] * (n_layer // 2 - 1)


# ---- what the traces say ----

def attention_inputs(model, idx, **asked):
    """The model's output and what each block's attention read, [B, T, C] each."""
    read = []

    def note(module, args, out):
        read.append(args[0])
    hooks = [block.attn.register_forward_hook(note) for block in model.transformer.h]
    out = model(idx, **asked)
    for hook in hooks:
        hook.remove()
    return out, read


TRACED = {n: MECHANISMS[n] for n in ("constraint_a", "constraint_b", "constraint_published", "a2c_key_bias",
                                     "acag", "window_global_random", "moh", "head_norm")}
TRACED["all"] = ALL_ON
TRACED["two_each"] = dict(constraint_names=["a", "b"], constraint_heads=2, constraint_layers=[0, 1])
HINTED = [(name, False) for name in TRACED]
HINTED += [(name, True) for name in ("constraint_a", "constraint_published", "two_each")]


@pytest.mark.slow
@pytest.mark.parametrize("name, hinted", HINTED)
def test_traces_equal_what_the_slow_layer_saw(name, hinted):
    model, idx, hint = tiny(TRACED[name]), tokens(2, 9), normal(2, 96, seed=5) if hinted else None
    c = model.config
    out, read = attention_inputs(model, idx, traces=True, router_hint=hint)
    for layer, x in enumerate(read):
        slow = oracle.attention(model, layer, x, hint)[1]

        def trace(key):
            return out.traces[f"blocks.{layer}.{key}"].double()

        for key in ("entropy", "concentration"):
            close(trace(key), slow[key], 1e-6)
        if c.routing:
            close(trace("routing_weights"), slow["routing_weights"], 1e-9)
        if ConstraintHeads.on(c, layer):
            close(trace("head_scores"), slow["head_scores"], 1e-9)
            close(trace("router_gates").expand(2, 9, -1), slow["router_gates"], 1e-9)
            for i, constraint in enumerate(c.constraint_names):
                heads = slice(i * c.constraint_heads, (i + 1) * c.constraint_heads)
                close(trace(f"constraint.{constraint}"), slow["head_scores"][:, heads].mean(1), 1e-9)
    if hinted:
        equals_the_oracle(model, idx, hint)
        assert not torch.allclose(model(idx, router_hint=hint).logits, model(idx).logits, atol=1e-4)


def test_attention_maps_are_the_weights():
    model, idx = tiny(window=3), tokens(2, 9)
    out, read = attention_inputs(model, idx, traces="maps")
    for layer, x in enumerate(read):
        slow = oracle.attention(model, layer, x)[1]
        close(out.traces[f"blocks.{layer}.map"].double(), slow["map"], 1e-6)
        close(out.traces[f"blocks.{layer}.entropy"].double(), slow["entropy"], 1e-6)


# ---- constraint heads ----

def test_variant_a_widens_the_concat_and_variant_b_shrinks_the_heads():
    C, H, n = 96, 6, 3
    for variant, step, D in (("A", 1, 16), ("B", 1, 10), ("B", 8, 8)):  # 96 / 9 heads: 6 dimensions are left
        model = GPT(GPTConfig(**TINY, constraint_names=CONSTRAINTS, constraint_variant=variant,
                              constraint_round=step))
        s = {name: tuple(p.shape) for name, p in model.named_parameters()}
        at = "transformer.h.1.attn."  # the block at 2/3 of depth 2
        assert s[at + "c_attn.weight"] == (3 * H * D, C)
        assert s[at + "constraint.c_attn.weight"] == (3 * n * D, C)
        assert s[at + "c_proj.weight"] == (C, H * D) and s[at + "constraint.c_proj.weight"] == (C, n * D)
        assert s[at + "constraint.fc.weight"] == (128, C) and s[at + "constraint.out.weight"] == (n, 128)
        assert s[at + "constraint.w1"] == (n, D, D) and s[at + "constraint.w2"] == (n, D)
        assert s["transformer.h.0.attn.c_attn.weight"] == (3 * C, C)
        assert not any(k.startswith("transformer.h.0.attn.constraint") for k in s)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [{}, {"a": 0.3, "b": 2.0}], ids=["even", "weighted"])
@pytest.mark.parametrize("focal, positive", [(0.0, 1.0), (2.0, 1.0), (0.0, 3.0), (1.5, 0.5)])
def test_constraint_loss_equals_a_loop_over_tokens(weights, focal, positive):
    scores = {name: normal(2, 9, seed=i, grad=True) for i, name in enumerate("abc")}
    targets = {"a": torch.tensor([0.0, 1.0, -1.0]).repeat(6).view(2, 9),  # hard and unknown
               "b": normal(2, 9, seed=5).sigmoid()}  # soft
    inputs = [scores["a"], scores["b"]]
    terms = label_losses(scores, targets, weights, focal, positive)
    for name, term in terms.items():  # each name's part, and their sum
        alone = constraint_loss(scores, {name: targets[name]}, weights, focal, positive) / 2
        assert term.item() == pytest.approx(alone.item(), rel=1e-6)
    got = sum(terms.values())
    want = constraint_loss(scores, targets, weights, focal, positive)
    agree([got[None].double()], [want[None]], inputs, 1e-6)
    nobody = label_losses(scores, {"a": -torch.ones(2, 9)}, weights, focal, positive)["a"]
    assert nobody == 0 and not torch.autograd.grad(nobody, scores["a"])[0].any()
    for bad in ({"d": targets["a"]}, {}):
        with pytest.raises(ValueError, match="the heads are for a, b, c"):
            label_losses(scores, bad)


def test_the_models_constraint_loss_is_the_mean_over_blocks_times_lambda_and_the_router_pays_for_open_gates():
    model = tiny(dict(constraint_names=["a", "b"], constraint_heads=2, constraint_layers=[0, 1],
                      constraint_coef=0.7, constraint_name_coef=[2.0, 0.5], constraint_focal=1.0,
                      constraint_positive_coef=2.0, constraint_sparsity_coef=0.3))
    idx, targets = tokens(2, 9), {"b": tokens(2, 9, seed=4) % 2, "a": tokens(2, 9, seed=5) % 3 - 1}
    out = model(idx, idx, traces=True, constraint_targets=targets)
    each = [{n: out.traces[f"blocks.{i}.constraint.{n}"] for n in "ab"} for i in range(2)]
    want = 0.7 / 2 * sum(constraint_loss(s, targets, {"a": 2.0, "b": 0.5}, 1.0, 2.0) for s in each)
    assert sum(out.aux[f"constraint.{n}"].item() for n in "ab") == pytest.approx(want.item(), abs=1e-6)
    gates = sum(out.traces[f"blocks.{i}.router_gates"].mean() for i in range(2))
    close(out.aux["constraint_router"], 0.3 * gates, 1e-9)
    close(out.loss, model(idx, idx).loss, 0)  # reported apart


def test_explain_names_the_tokens_with_the_highest_scores():
    score = torch.tensor([[0.0, 3.0, -1.0, 2.0], [5.0, 0.0, 0.0, 0.0]])
    traces = {"blocks.3.constraint.b": score, "blocks.7.constraint.b": -score,
              "blocks.3.constraint.ab": score, "blocks.3.entropy": score}
    lines = explain(traces, list("wxyz"), "b", k=2)
    assert lines == "b (block 3): 'x' 3.00, 'z' 2.00\nb (block 7): 'y' 1.00, 'w' -0.00"
    assert explain(traces, list("wxyz"), "ab", k=1, row=1) == "ab (block 3): 'w' 5.00"
    with pytest.raises(ValueError, match="no scores for 'c'; there are ab, b"):
        explain(traces, list("wxyz"), "c")
    with pytest.raises(ValueError, match="no constraint heads"):
        explain({}, list("wxyz"), "b")
    traces = tiny(dict(constraint_names=CONSTRAINTS))(tokens(1, 3), traces=True).traces
    assert explain(traces, ["u", "v", "w"], "decidability").startswith("decidability (block 1): '")


# ---- A2C ----

@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.999])
def test_the_discounted_return_equals_the_double_loop(T, gamma):
    r = normal(2, T, grad=True)
    want = []
    for t in range(T):
        share = sum(gamma**k for k in range(T - t))  # what lies beyond the end is shared out
        want.append(sum(gamma**k * r[:, t + k] for k in range(T - t)) / share)
    agree([discounted_return(r, torch.ones_like(r), gamma)], [torch.stack(want, 1)], [r], 1e-12)


@pytest.mark.parametrize("mode", ["temperature", "key_bias"])
def test_critic_losses_and_their_metrics_equal_loops(mode):
    model = tiny(dict(a2c=mode, a2c_gamma=0.8, a2c_value_coef=0.3, a2c_advantage_coef=0.2))
    idx, targets = tokens(2, 9), tokens(2, 9, seed=2)
    targets[0, :3] = targets[1, 5] = -1
    out, x = model(idx, targets, traces=True, logits=True), model.hidden(idx)
    logp = out.logits.double().log_softmax(-1)
    G, A = torch.zeros(2, 9).double(), torch.zeros(2, 9).double()
    value_error, advantage_error, scored = [], [], []
    for b, t in itertools.product(range(2), range(9)):
        ahead = [s for s in range(t, 9) if targets[b, s] >= 0]
        G[b, t] = sum(0.8 ** (s - t) * logp[b, s, targets[b, s]].item() for s in ahead)
        G[b, t] /= sum(0.8 ** (s - t) for s in ahead)
        V = (model.value.weight[0] @ x[b, t] + model.value.bias[0]).item()
        A[b, t] = G[b, t] - V
        if targets[b, t] >= 0:
            scored.append((b, t))
            value_error.append(A[b, t].item() ** 2)
            said = [a for i in range(2) for a in out.traces[f"blocks.{i}.advantage"][b, t].tolist()]
            advantage_error.append(sum((a - A[b, t].item()) ** 2 for a in said) / len(said))
    n = len(scored)
    assert n == 14
    assert out.aux["a2c_value"].item() == pytest.approx(0.3 * sum(value_error) / n, rel=1e-5)
    assert out.aux["a2c_advantage"].item() == pytest.approx(0.2 * sum(advantage_error) / n, rel=1e-5)
    close(out.traces["a2c.return"].double(), G, 1e-5)
    close(out.traces["a2c.advantage"].double(), A, 1e-5)
    at = tuple(map(list, zip(*scored)))  # rows and columns
    explained = 1 - A[at].var() / G[at].var()
    found = summaries(out.traces, targets)
    assert found["a2c.explained_variance"].item() == pytest.approx(explained.item(), abs=1e-4)
    for i in range(2):
        said, real = out.traces[f"blocks.{i}.advantage"].mean(-1)[at], A[at]
        cosine = F.cosine_similarity(said - said.mean(), real - real.mean(), dim=0)  # Pearson's correlation
        correlation = found[f"blocks.{i}.advantage_correlation"].item()
        assert correlation == pytest.approx(cosine.item(), abs=1e-4)
    close(out.loss, F.cross_entropy(out.logits[targets >= 0], targets[targets >= 0]), 1e-5)


def test_nothing_is_said_of_a_critic_whose_returns_do_not_vary():
    """In a new model of the modern recipe all tokens have one probability: returns differ by rounding."""
    flags = dict(a2c="temperature", recipe="modern", zero_init=True)
    model = GPT(GPTConfig(**{**TINY_GPT, **flags}))
    idx, targets = tokens(2, 9), tokens(2, 9, seed=2)
    assert not summaries(model(idx, targets, traces=True).traces, targets)


def test_the_value_head_learns_from_its_own_loss_alone_and_gives_the_blocks_no_gradient():
    model = tiny(dict(a2c="temperature"))
    out = model(tokens(2, 9), tokens(2, 9, seed=2))
    names, parameters = zip(*model.named_parameters())

    def moved(loss):
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        return {n for n, g in zip(names, grads) if g is not None and g.any()}

    assert moved(out.aux["a2c_value"]) == {"value.weight", "value.bias"}
    by_advantage = moved(out.aux["a2c_advantage"])
    assert {f"transformer.h.{i}.attn.a2c.critic.weight" for i in range(2)} <= by_advantage
    assert not by_advantage & {"value.weight", "value.bias"}
    assert not moved(out.loss) & {"value.weight", "value.bias"}


# ---- head roles ----

ROLES = MECHANISMS["roles"]["roles"]
LAYER = SimpleNamespace(n_head=4, head_ids=[0, 1, 2, 3], scale=0.4, head_size=16)


def priors(T, dtype=torch.float64):
    """{role: what it adds by distance, [T]} at strength 1, as the class computes it for the last token."""
    config = GPTConfig(block_size=T, n_embd=64, n_head=4, roles=ROLES)
    roles, zero = Roles(config, LAYER).to(dtype), torch.zeros(1, 4, T, 16, dtype=dtype)
    roles.strength.data.fill_(1.0)
    function = roles.score_mod(LAYER, Heads(q=zero, k=zero))
    t = torch.arange(T)
    score = function(torch.zeros(1, 4, T, T), t[:1], torch.arange(4)[:, None, None], t[:, None], t)
    return dict(zip(ROLES, score[0, :, -1].double().flip(-1).detach()))


@pytest.mark.parametrize("past", [0, 40, 1019])
def test_a_role_adds_its_prior_to_the_scores(past):
    """By distance alone: also behind tokens of a cache."""
    roles = Roles(GPTConfig(n_embd=64, n_head=4, roles=ROLES), LAYER).double()
    roles.strength.data = normal(4, seed=5)
    score = normal(2, 4, 5, past + 5, grad=True)
    t, s = past + torch.arange(5), torch.arange(past + 5)
    function = roles.score_mod(LAYER, Heads(q=score[..., :16], k=score.mT[..., :16]))
    got = function(score, torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None], t[:, None], s)
    seen, want = s <= t[:, None], torch.empty_like(score)
    for i, n, m in itertools.product(range(4), range(5), range(past + 5)):
        p = oracle.prior(ROLES[i], past + n - m, 12) if m <= past + n else 0.0
        want[:, i, n, m] = score[:, i, n, m] + roles.strength[i] * p
    agree([got * seen], [want * seen], [score, roles.strength], 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [dict(local=(1, 1, 16)), dict(long=(1, 0, 16)), dict(previous=(1, 0, 2)),
                                     dict(previous=(1, 1, 4)), dict(free=(1, 0, 16))], ids=str)
def test_the_oracle_catches_another_prior(mistake, monkeypatch):
    monkeypatch.setattr(Roles, "ROLES", {**Roles.ROLES, **mistake})
    with pytest.raises(AssertionError, match="off by"):
        equals_the_oracle(tiny(MECHANISMS["roles"]))


def is_a_peak(p, at):
    """Whether a prior [T] by distance is 1 at one distance alone and at most 2/3 away from it."""
    far = [d for d in range(len(p)) if abs(d - at) > (8 if at == 0 else 0)]
    return p[at].item() == pytest.approx(1) and p[far].max() <= 2 / 3


@pytest.mark.parametrize("T", [64, 128, 256, 1024, 2048])
def test_priors_have_one_peak_within_the_context(T):
    p = priors(T)
    assert is_a_peak(p["local"], 0) and is_a_peak(p["previous"], 1)
    assert (p["local"][:9].diff() < 0).all() and 0.35 < p["local"][8] < 0.6
    close(p["long"], -p["local"], 1e-12)
    assert not p["free"].any()


@pytest.mark.parametrize("T", [256, 1024, 2048])
def test_the_peak_test_catches_octaves(T, monkeypatch):
    """Wavelengths that double agree far away, too."""
    monkeypatch.setattr(Roles, "GROWTH", 2.0)
    assert not is_a_peak(priors(T)["previous"], 1)


def test_positions_are_counted_in_float32_under_bfloat16(monkeypatch):
    """The control counts in bfloat16, where 1,000 and 1,001 are one number."""
    want = priors(1024)

    def error():
        return max((p - want[role]).abs().max() for role, p in priors(1024, torch.bfloat16).items())

    assert error() < 0.005
    monkeypatch.setattr(torch, "promote_types", lambda a, b: a)
    assert error() > 0.5


def test_a_prior_learns_from_strength_0_and_a_free_head_has_none():
    model = tiny(MECHANISMS["roles"], live=False, roles_strength=0.0)
    model(tokens(2, 9), tokens(2, 9, seed=2)).loss.backward()
    for block in model.transformer.h:
        slope = block.attn.roles.strength.grad
        assert [bool(g) for g in slope] == [role != "free" for role in (*ROLES, "local", "long")]


@pytest.mark.parametrize("shifted", [False, True])
def test_a_head_keeps_its_role_when_others_go(shifted, monkeypatch):
    """Rebuilt from its config, too. The control gives each of the heads that are left its neighbour's."""
    model, idx = tiny(MECHANISMS["roles"]), tokens(2, 9)
    prune_heads(model, {0: [0, 2], 1: list(range(6))})
    if shifted:
        monkeypatch.setattr(Roles, "role_of", lambda self, config, head: config.roles[(head + 1) % 4])
    again = GPT(model.config).double()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.hidden(idx), model.hidden(idx)) != shifted


def test_a_shorter_context_keeps_the_waves():
    """Unlike a model made for it."""
    model, idx = tiny(MECHANISMS["roles"], block_size=32, recipe="modern"), tokens(2, 8)
    short = tiny(MECHANISMS["roles"], block_size=8, recipe="modern")
    want = model.hidden(idx)
    model.crop_block_size(8)
    close(model.hidden(idx), want, 1e-12)
    again = GPT(model.config).double()
    again.load_state_dict(model.state_dict())
    close(again.hidden(idx), want, 1e-12)
    short.load_state_dict(model.state_dict())
    assert not torch.allclose(short.hidden(idx), want, atol=1e-4)


# ---- ACAG and the output gate ----

@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("mode", ["published", "normalised"])
@pytest.mark.parametrize("acag", ["headwise", "elementwise"])
def test_context_gates_equal_the_written_out_formula(acag, mode, detach, window):
    flags = dict(acag=acag, acag_mode=mode, acag_detach=detach, window=window)
    equals_the_oracle(tiny(flags, n_layer=1, n_embd=32, n_head=2))


@pytest.mark.parametrize("gated", ["headwise", "elementwise"])
@pytest.mark.parametrize("more", [{}, dict(constraint_names=["a"]), dict(recipe="modern")],
                         ids=["plain", "constraint", "modern"])
def test_output_gates_equal_the_written_out_formula(gated, more):
    model = tiny(dict(output_gate=gated, **more), n_layer=1, n_embd=32, n_head=2)
    equals_the_oracle(model, tol=1e-6 if "recipe" in more else 1e-9)


# ---- what runs on CUDA alone, as far as a CPU can tell ----

ON_CUDA = {"plain": {},
           "acag": MECHANISMS["acag"],
           "acag_detach+random": {**MECHANISMS["acag_detach"], **MECHANISMS["window_global_random"]},
           "window": MECHANISMS["window"],
           "roles": MECHANISMS["roles"],
           "roles+key_bias+acag": {**MECHANISMS["roles"], **MECHANISMS["a2c_key_bias"], **MECHANISMS["acag"]},
           "key_bias+acag": {**MECHANISMS["a2c_key_bias"], **MECHANISMS["acag"]},
           "ALL_ON": ALL_ON}


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CUDA)
def test_the_flex_attention_branch_computes_what_the_cpu_branch_does(name, monkeypatch):
    model, idx = tiny(ON_CUDA[name], block_size=200, n_embd=96), tokens(2, 150)
    with torch.no_grad():  # FlexAttention on CPU has no backward pass
        want, traced = model.hidden(idx), model(idx, traces=True).traces
        monkeypatch.setattr(model_py, "has_flex_attention", lambda device: True)
        close(model.hidden(idx), want, 1e-9)
        again = model(idx, traces=True).traces
        assert set(again) == set(traced)
        for key, value in traced.items():
            close(again[key].double(), value.double(), 1e-6)
        cache = KVCache(model.config)  # with a cache the mask is dense
        close(torch.cat([model.hidden(part, cache) for part in idx.split((100, 1, 49), 1)], 1), want, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["acag_detach+random", "ALL_ON"])
def test_the_flex_attention_branch_has_no_graph_breaks(name, monkeypatch):
    """Graphs are counted: with fullgraph=True Dynamo captures what else breaks a graph, such as nonzero()."""
    monkeypatch.setattr(model_py, "has_flex_attention", lambda device: True)
    torch._dynamo.reset()
    config = GPTConfig(**{**TINY, "n_layer": 2, "block_size": 160}, **ON_CUDA[name])
    model, idx, graphs = GPT(config).eval(), tokens(2, 160), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    fast = torch.compile(model, backend=backend)
    with torch.no_grad():
        close(fast(idx, idx).loss, model(idx, idx).loss, 1e-5)
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("n_queries", [1, 5])
@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
def test_open_heads_alone_are_computed(monkeypatch, n_queries, n_kv_head):
    """Of each row its own, each once; the others give 0, and their keys are never read."""
    q = normal(3, 4, n_queries, 8)
    k, v = (normal(3, n_kv_head, 9, 8, seed=seed) for seed in (2, 3))
    mask = torch.ones(3, 1, n_queries, 9, dtype=torch.bool)
    mask[1, ..., :4] = False  # padding
    computed, fused = [], attention.attend_fused
    monkeypatch.setattr(attention, "attend_fused", lambda *a: computed.append(a[0][..., 0, 0]) or fused(*a))
    some, none = normal(3, 4, seed=4) > 0, torch.zeros(3, 4, dtype=torch.bool)
    for opened in (some, ~some, none, ~none, torch.tensor([1, 1, 0, 1]).bool().expand(3, 4)):
        for m in (None, mask, mask[1:2]):
            want = attend(q, k, v, scale=0.3, mask=m)[0] * opened[..., None, None]
            computed.clear()
            close(attend(q, k, v, scale=0.3, mask=m, open=opened)[0], want, 1e-12)
            read = torch.cat([torch.zeros(0), *(each.flatten() for each in computed)])
            assert torch.equal(read.sort().values, q[..., 0, 0][opened].sort().values)
        closed = ~opened.unflatten(1, (n_kv_head, -1)).any(-1)
        broken = torch.where(closed[..., None, None], math.nan, k)
        assert attend(q, broken, v, scale=0.3, open=opened)[0].isfinite().all()


def test_six_of_twelve_heads_are_computed_for_a_decoded_token(monkeypatch):
    model = GPT(GPTConfig(**{**TINY, "n_head": 12, "n_embd": 96}, routing="moh")).double().eval()
    idx, computed, fused = tokens(2, 9), [], attention.attend_fused
    monkeypatch.setattr(model_py, "SKIP_FROM", 1)
    with torch.no_grad():
        want, cache = model.hidden(idx), KVCache(model.config)
        monkeypatch.setattr(attention, "attend_fused",
                            lambda *a: computed.extend(a[0][..., 0, 0]) or fused(*a))
        got = [model.hidden(token, cache) for token in idx.split(1, dim=1)]
    close(torch.cat(got, 1), want, 1e-12)
    assert sum(map(len, computed)) == 6 * 2 * 9 * model.config.n_layer, "in a layer, of a token of two rows"


# ---- mistakes once made ----

def test_a_temperature_that_would_overflow_is_bounded():
    """exp(a) is infinite from a = 89 in float32 and from 12 in float16: held at exp(8) for any larger a."""
    attn = SimpleNamespace(n_head=2, scale=0.5)
    a2c = A2C(GPTConfig(n_embd=4, a2c="temperature"), attn)
    torch.nn.init.constant_(a2c.critic.weight, 100.0)
    for dtype in (torch.float32, torch.float16):
        q = torch.ones(1, 2, 3, 2, dtype=dtype)
        heads = Heads(x=torch.ones(1, 3, 4, dtype=dtype), q=q, k=q, v=q)
        a2c.before_attention(attn, heads)
        assert heads.q.isfinite().all() and (heads.q - math.exp(8)).abs().max() < 2
    torch.nn.init.constant_(a2c.critic.weight, 1.0)  # a = 4 is as ever
    q = torch.ones(1, 2, 3, 2)
    heads = Heads(x=torch.ones(1, 3, 4), q=q, k=q, v=q)
    a2c.before_attention(attn, heads)
    close(heads.q, torch.full((1, 2, 3, 2), math.exp(4)), 1e-4)


@pytest.mark.parametrize("focal", [0.3, 0.5, 0.99])
def test_a_weak_focus_has_a_finite_gradient_where_a_score_is_right(focal):
    scores = torch.tensor([[40.0, -40.0, 0.3, 120.0]], requires_grad=True)  # sigmoid(40) is 1 in float32
    loss = label_losses({"a": scores}, {"a": torch.tensor([[1.0, 0.0, 1.0, 1.0]])}, focal=focal)["a"]
    gradient, = torch.autograd.grad(loss, scores)
    assert gradient.isfinite().all() and gradient[0, 2] < 0
    want = constraint_loss({"a": scores[:, 2:3].double()}, {"a": torch.ones(1, 1)}, {}, focal, 1.0) / 4
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)


def test_variant_a_takes_narrow_heads():
    """Only variant B shrinks heads, and only it has a least size."""
    model = tiny(dict(constraint_names=["a"]), n_embd=24)
    assert model.transformer.h[1].attn.head_size == 4
    equals_the_oracle(model)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [
    ("acag", "a2c_published"),
    ("acag", "constraint_published"),
    ("acag_detach", "window"),
], ids="+".join)
@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
def test_queries_keys_and_values_have_one_type_under_autocast(pair, recipe, monkeypatch):
    model = GPT(GPTConfig(**TINY, recipe=recipe, **MECHANISMS[pair[0]], **MECHANISMS[pair[1]]))
    seen = []
    monkeypatch.setattr(model_py, "attend",
                        lambda q, k, v, **how: seen.append((q, k, v)) or attend(q, k, v, **how))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(tokens(2, 9), tokens(2, 9))
    out.loss.backward()
    assert {t.dtype for qkv in seen for t in qkv} == {torch.bfloat16} and out.loss.isfinite()


@pytest.mark.parametrize("gated", ["headwise", "elementwise"])
def test_heads_can_go_one_after_the_other(gated):
    model, idx = tiny(dict(output_gate=gated, agency=True), live=True), tokens(2, 9)
    for head in (1, 4, 0):
        model.set_gate(0, head, 0.0)
    want = model.hidden(idx)
    for head in (1, 4, 0):
        prune_heads(model, {0: [head]})
    close(model.hidden(idx), want, 1e-9)
    close(pack(model).hidden(idx), want, 1e-9)


def test_a_constraint_may_be_called_advantage():
    losses = []
    for name in ("advantage", "another"):
        model = tiny({**MECHANISMS["a2c_temperature"], "constraint_names": [name]})
        out = model(tokens(1, 9), tokens(1, 9, seed=2), constraint_targets={name: torch.ones(1, 9)})
        losses.append(out.aux["a2c_advantage"])
    assert losses[0] == losses[1]


def test_the_return_counts_scored_tokens_alone():
    r, scored = -normal(1, 12).abs(), torch.ones(1, 12, dtype=torch.bool)
    scored[:, 8:] = False
    close(discounted_return(r, scored, 0.9)[:, :8], discounted_return(r[:, :8], scored[:, :8], 0.9), 1e-12)
    assert not discounted_return(r, scored, 0.9)[:, 8:].any()


def test_random_blocks_do_not_follow_the_seed():
    one, other = (Window(GPTConfig(block_size=64, vocab_size=5, window=4, window_random=2, seed=seed))
                  for seed in (1, 2))
    assert torch.equal(one.random_cells, other.random_cells)


def test_a_new_state_does_not_give_consent_back_unless_the_head_was_withdrawn():
    model = tiny(dict(agency=True), live=False)
    agency = model.transformer.h[0].attn.agency
    model.set_state(0, 1, consent=False)
    model.set_state(0, 1, state="overloaded")
    assert not agency.consent[1]
    model.set_state(0, 1, state="withdrawn", consent=True)
    model.set_state(0, 1, state="withdrawn")
    assert not agency.consent[1]
    model.set_state(0, 1, state="active")
    assert agency.consent[1]


@pytest.mark.parametrize("mode, moves", [("published", False), ("temperature", False), ("key_bias", True)])
def test_a2c_as_published_cannot_move_one_position_past_another(mode, moves):
    """Its advantage is one scalar a query row: with another critic a row's order of keys stays, or turns.

    A bias of the keys moves them.
    """
    model, idx, orders = tiny(dict(a2c=mode), n_layer=1), tokens(2, 12), []
    for seed in (3, 4):
        critic = model.transformer.h[0].attn.a2c.critic
        torch.nn.init.normal_(critic.weight, 0.0, 0.1, generator=torch.Generator().manual_seed(seed))
        if mode == "published":
            torch.nn.init.zeros_(critic.bias)  # so that a has either sign
        row = model(idx, traces="maps").traces["blocks.0.map"][:, :, -1]
        orders.append(row.argsort(-1))
    same = (orders[0] == orders[1]).all(-1) | (orders[0] == orders[1].flip(-1)).all(-1)
    assert same.all() if not moves else not same.any()
    if mode == "published":
        assert (orders[0] != orders[1]).any(), "some rows turn round: a negative scalar inverts attention"
