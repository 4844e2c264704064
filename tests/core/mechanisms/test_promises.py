"""What every mechanism promises: alone with both recipes, and with all together.

In pairs with each other one: it does not leak, sees no padding, and is the same with a cache.
All lists come from model.py, where a new mechanism is one line. Where a promise can be broken by a plausible
mistake, a negative control makes that mistake and has to be caught. Equalities are in float64.
"""

import copy
import itertools
import math
import os
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st

import model as model_py
import train
from model import (ALL_ON, CONSTRAINTS, GPT, MECHANISM_CLASSES, MECHANISMS, NEUTRAL, RECIPES,
                   CausalMask, ConstraintHeads, ForwardPass, GPTConfig, Routing, KVCache, Sentinel)
from nanoheads import attention, checkpoint, rivals
from nanoheads.configurator import check, choices, keys_of
from nanoheads.mechanism import flags_of
from nanoheads.neutral import make_neutral, mode_of
from nanoheads.optim import make_optimizers
from nanoheads.pruning import head_axes, pack, prune_heads
from helpers import ROOT
from helpers import TINY_GPT, alive, portions, small_models, tiny
from oracle import agree, plain, tokens
from test_model import FLAGS

# tokens; no other dimension has this size
T = 13


# ---- what is tested: {id: [(name, flags), ...]} ----

def together(a, b):
    """The flags of two mechanisms; None where both set the same flag: two modes of one thing are no pair."""
    return None if set(MECHANISMS[a]) & set(MECHANISMS[b]) else {**MECHANISMS[a], **MECHANISMS[b]}


def fine(flags):
    return not GPTConfig(**TINY_GPT, **flags).problems()


def small(flags):
    """One block, which is enough for a pair; two for what joins two."""
    return {**flags, "n_layer": 2 if {"unet", "value_residual"} & flags.keys() else 1}


PAIRS = {(a, b): flags for a, b in itertools.combinations(MECHANISMS, 2) if (flags := together(a, b))}
REFUSED = {pair: flags for pair, flags in PAIRS.items() if not fine(flags)}
GROUPED = dict(recipe="llama", n_kv_head=3, qkv_bias=True, qk_norm=True, qk_scale=True)
SINGLES = {name: [(f"{name}, {recipe}", {**flags, "recipe": recipe}) for recipe in ("gpt2", "modern")]
           + [(f"{name}, llama", {**flags, **GROUPED})] * fine({**flags, **GROUPED})
           for name, flags in {**MECHANISMS, "ALL_ON": ALL_ON}.items()}
WITH = {f"{first}+": [(f"{a}+{b}", small(flags)) for (a, b), flags in PAIRS.items()
                      if a == first and fine(flags)]
        for first in MECHANISMS}
WITH = {first: cases for first, cases in WITH.items() if cases}
# what no mode of MECHANISMS has: flags of a plain GPT, and where the router of constraint heads acts
ROUTED = {"score": dict(constraint_gate="score"), "value": dict(constraint_gate="value"),
          "hard router": dict(constraint_router="hard_concrete"),
          "first": dict(constraint_router_input="first"),
          "skip": dict(constraint_skip=0.5), "skip xsa": dict(constraint_skip=0.5, xsa=True, head_norm=True),
          "skip first": dict(constraint_skip=0.5, constraint_router_input="first"),
          "score xsa": dict(constraint_gate="score", xsa=True, head_norm=True),
          "score acag": dict(constraint_gate="score", acag="headwise", sink=True),
          "score window": dict(constraint_gate="score", acag="headwise", sink=True, window=3)}
DETAILS = {"plain": [(f"plain, {flags}", flags) for flags in FLAGS],
           "routed": [(name, dict(constraint_names=["a", "b"], constraint_layers=[0, 1], **flags))
                      for name, flags in ROUTED.items()]}
NOISY = ("sentinel_l0", "hard router")  # gates that are drawn anew in each training step
singles = pytest.mark.parametrize("cases", SINGLES.values(), ids=SINGLES)
with_details = pytest.mark.parametrize("cases", [*SINGLES.values(), *DETAILS.values()],
                                       ids=[*SINGLES, *DETAILS])
in_pairs = pytest.mark.parametrize("cases", WITH.values(), ids=WITH)


def test_every_pair_is_tested_but_those_that_are_refused_for_a_reason():
    problems = {pair: GPTConfig(**TINY_GPT, **flags).problems() for pair, flags in REFUSED.items()}
    narrow = ("a2c='published' takes x in n_head slices as values, "
              "which constraint_variant='B' makes too narrow")
    mudd = "mudd gives queries, keys and values an input each"
    alone = "convolves queries, keys and values of a projection: a2c='published' has queries alone"
    assert problems == {("a2c_published", "constraint_b"): [narrow],
                        ("value_residual", "constraint_b"): [
                            "value_residual=True needs heads of one size: constraint_variant='B' makes some "
                            "layers' narrower"],
                        ("short_conv", "a2c_published"): [f"short_conv='qkv' {alone}"],
                        ("short_conv_kv", "a2c_published"): [f"short_conv='kv' {alone}"],
                        ("short_conv_x", "mudd"): [f"{mudd}: short_conv='x' knows of one"],
                        ("a2c_published", "mudd"): [f"{mudd}: a2c='published' knows of one"],
                        ("diff", "mudd"): [f"{mudd}: diff=True knows of one"],
                        ("diff", "diff_v1"): ["diff=True and diff_v1=True are two forms of one thing: choose "
                                              "one"]}
    modes = {}  # mechanisms that turn on the same thing
    for name, flags in MECHANISMS.items():
        modes.setdefault(next(iter(flags)), []).append(name)
    n = len(MECHANISMS)
    clashing = sum(math.comb(len(names), 2) for names in modes.values())
    tested = sum(map(len, WITH.values()))
    assert tested == n * (n - 1) // 2 - clashing - len(REFUSED)


# ---- helpers ----

def plain_flags(flags):
    """Of a case's flags, those of its plain GPT."""
    return {name: flags[name] for name in GROUPED if name in flags}


def open_noisy_gates(model):
    """Hard-concrete gates at 1, where their noise does nothing."""
    for block in model.transformer.h:
        if block.attn.sentinel and block.attn.sentinel.hard:
            block.attn.sentinel.logit.data.fill_(50.0)
    return model


def near(a, b, atol=1e-9):
    return torch.allclose(a, b, rtol=0, atol=atol)


def share(model, other):
    """Give `model` the values of the parameters that it has in common with `other`."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in other.named_parameters():
            if name in own and own[name].shape == p.shape:
                own[name].copy_(p)
    return model


def total(model, n=2, length=T):
    """Cross-entropy and every auxiliary loss that there is."""
    c = model.config
    # -0.5: ignored
    wanted = {name: (tokens(n, length, seed=3) % 4 - 1) / 2 for name in c.constraint_names or ()}
    out = model(tokens(n, length), tokens(n, length, seed=2), constraint_targets=wanted or None)
    return sum(out.aux.values(), out.loss)


def gradients(model, **kw):
    """{name: gradient} of all losses."""
    model.zero_grad()
    total(model, **kw).backward()
    return {name: p.grad for name, p in model.named_parameters()}


# ---- 1. off: bit-identical to the plain GPT, without a parameter or a buffer ----

@pytest.mark.parametrize("recipe", ["gpt2", "modern"])  # llama is held to transformers' in test_hf.py
def test_off_is_the_plain_gpt_to_the_last_bit(recipe):
    model = GPT(GPTConfig(**TINY_GPT, recipe=recipe, zero_init=False)).eval()
    inside = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    if recipe == "gpt2":
        inside += ["ln_1", "ln_2"]
        around = ["transformer.wte", "transformer.wpe", "transformer.ln_f"]
        buffers = set()
    else:
        around = ["transformer.wte", "lm_head"]
        buffers = {"cos8", "sin8"}
    parameters = around + [f"transformer.h.{i}.{n}" for i in range(2) for n in inside]
    assert {n for n, _ in model.named_parameters()} == {f"{n}.weight" for n in parameters}
    assert {n for n, _ in model.named_buffers()} == buffers
    with torch.no_grad():
        out = model(tokens(3, T), tokens(3, T, seed=2), logits=True)
        assert torch.equal(out.logits, plain(model, tokens(3, T))) and out.aux == {} and out.traces is None
        assert torch.equal(alive(model)(tokens(3, T)).logits, plain(model, tokens(3, T)))


@pytest.mark.slow
@singles
def test_on_is_not_off(cases):
    """The control of what equals the plain GPT here and below: with live weights no mechanism does."""
    for name, flags in cases:
        base = tiny(plain_flags(flags))
        model = share(tiny(flags), base).train()
        with torch.no_grad():
            # far below a cap, as the logits of this small model are, a tanh is nearly a line
            tol = 1e-6 if model.config.score_cap else 1e-3
            assert not near(model.hidden(tokens(2, T)), base.hidden(tokens(2, T)), tol), name


# ---- 2. neutral: a setting at which it equals the plain GPT ----

def neutral(names, more):
    """A model with these mechanisms, as NEUTRAL sets them, and a plain one with the same weights."""
    flags = dict(more)
    for name in names:
        flags.update(MECHANISMS[name])
        for key, value in NEUTRAL[name].items():
            if key in GPTConfig.__dataclass_fields__:
                flags[key] = TINY_GPT[value] if isinstance(value, str) else value
    base = tiny(more)
    model = share(tiny(flags, live=False), base)
    make_neutral(model, names)
    assert all(mode_of(cls, model.config) in (*names, None) for cls in MECHANISM_CLASSES
               if cls.is_on(model.config))
    return model, base


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_equals_the_plain_gpt(name):
    assert name in MECHANISMS
    for recipe in RECIPES:
        model, base = neutral([name], dict(recipe=recipe))
        with torch.no_grad():
            assert near(model.hidden(tokens(2, T)), base.hidden(tokens(2, T))), recipe


def test_neutral_together_is_the_plain_gpt():
    """One mode of each mechanism that has a neutral setting, all at once."""
    names, taken = [], set()
    for name in NEUTRAL:
        if not taken & set(MECHANISMS[name]):
            names.append(name)
            taken |= set(MECHANISMS[name])
    model, base = neutral(names, {})
    with torch.no_grad():
        assert len(names) > 8 and near(model.hidden(tokens(2, T)), base.hidden(tokens(2, T)))


# ---- 3. the same start ----

@pytest.mark.slow
@singles
def test_shared_parameters_start_bit_identical(cases):
    for name, flags in cases:
        recipe = plain_flags(flags)
        base, own = (dict(GPT(GPTConfig(**TINY_GPT, **f)).named_parameters()) for f in (recipe, flags))
        shared = [n for n in base if n in own and own[n].shape == base[n].shape]
        resized = "a2c_published" in name or "constraint_b" in name  # projections of another size
        few = 4 + 2 * ("qk_scale" in flags)  # of the layer with other heads
        assert len(shared) == len(base) or resized and len(shared) >= len(base) - few, name
        assert all(torch.equal(own[n], base[n]) for n in shared), name


# ---- 4. causal ----

def seen(model, idx, traces):
    """{name: what the model computes, per token}: logits and traces with a time axis, or hidden states."""
    with torch.no_grad():
        if not traces:
            return {"hidden": model.hidden(idx)}
        out = model(idx, traces=traces)
    return {"logits": out.logits, **{name: t for name, t in out.traces.items() if idx.size(1) in t.shape}}


def leaks(model, traces=True, at=(1, 6, 12)):
    """What a changed token changes before itself, by name; nothing, if the model is causal."""
    idx, found = tokens(2, T), set()
    before = seen(model, idx, traces)
    for t in at:
        other = idx.clone()
        other[:, t] = (other[:, t] + 1) % 37
        after = seen(model, other, traces)
        last = "logits" if traces else "hidden"
        noticed = not near(before[last][:, t], after[last][:, t], 1e-4)
        assert noticed, f"the change of token {t} is not seen at all"
        for name, value in before.items():
            axis = value.shape.index(T)
            if not torch.equal(value.narrow(axis, 0, t), after[name].narrow(axis, 0, t)):
                found.add(name)
    return found


@with_details
def test_future_tokens_do_not_leak(cases):
    for name, flags in cases:
        model = tiny(flags)
        assert leaks(model, "maps") == set(), name
        if not any(each in name for each in NOISY):
            model.train()
        assert leaks(model, False) == set(), name


def test_traces_that_are_looked_at_are_all_there():
    found = {name.split(".", 2)[-1] for name in seen(tiny(ALL_ON), tokens(2, T), "maps")}
    assert found >= {"advantage", "routing_weights", "routing_logits", "router_gates", "head_scores",
                     "entropy", "concentration", "gates.acag", "map",
                     *(f"constraint.{name}" for name in CONSTRAINTS)}


def pooled_router(monkeypatch):
    """The constraint write-up's router: the mean of the whole sequence."""
    logits = ConstraintHeads.router_logits

    def pooled(self, x, forward_pass, layer):
        return logits(self, x, ForwardPass(inputs={"router_hint": x.mean(1)}), layer)
    monkeypatch.setattr(ConstraintHeads, "router_logits", pooled)


def full_matrix_statistics(monkeypatch):
    """ACAG's statistics taken over the rows of all tokens."""
    rows = model_py.attend

    def pooled(*a, **kw):
        y, stats = rows(*a, **kw)
        return y, stats and type(stats)(*(t if t is None else t.mean(-1, keepdim=True).expand_as(t)
                                          for t in stats))
    monkeypatch.setattr(model_py, "attend", pooled)


def pooled_norm(*dims):
    """The write-up's normalisation of a head's output, over batch and sequence."""
    def patch(monkeypatch):
        monkeypatch.setattr(model_py, "rms_norm", lambda y: y / y.square().mean(dims, keepdim=True).sqrt())
    return patch


def no_mask(monkeypatch):
    """Each token reads all tokens."""
    attend = model_py.attend

    def unmasked(q, k, v, mask=None, **how):
        return attend(q, k, v, mask=torch.ones(1, 1, q.size(2), k.size(2), dtype=torch.bool), **how)
    monkeypatch.setattr(model_py, "attend", unmasked)


MISTAKES = {"query_gain": no_mask,
            "constraint_a": pooled_router,
            "constraint_published": pooled_router,
            "acag": full_matrix_statistics,
            "acag_published": full_matrix_statistics,
            "head_norm": pooled_norm(0, 2, 3)}


@pytest.mark.parametrize("name, mistake", MISTAKES.items(), ids=MISTAKES)
def test_the_leak_test_catches(name, mistake, monkeypatch):
    mistake(monkeypatch)
    assert "logits" in leaks(tiny(MECHANISMS[name]))
    assert leaks(tiny(MECHANISMS[name]), False) == {"hidden"}


# ---- 5. rows of a batch ----

def meets_its_neighbours(model):
    idx = tokens(2, T)
    with torch.no_grad():
        whole = model.hidden(idx)
        return not all(near(whole[row], model.hidden(idx[row:row + 1])[0]) for row in range(2))


@with_details
def test_rows_of_a_batch_do_not_see_each_other(cases):
    for name, flags in cases:
        assert not meets_its_neighbours(tiny(flags)), name


def test_the_batch_test_catches_a_norm_over_the_batch(monkeypatch):
    pooled_norm(0)(monkeypatch)
    assert meets_its_neighbours(tiny(MECHANISMS["head_norm"]))


# ---- 6. training and evaluation ----

DROPS_GATES = {"routing_published", "routing_train_only"}


def same_in_training(model):
    """Whether training mode, with and without losses, computes what evaluation does."""
    idx = tokens(2, T)
    with torch.no_grad():
        want = model.eval().hidden(idx)
        trained = model.train().hidden(idx), model.run_blocks(idx, wants_losses=True)[0]
    return all(near(each, want) for each in trained)


@pytest.mark.slow
@singles
def test_training_and_evaluation_are_the_same_function(cases):
    """But the two whose gates the write-up's code drops after training: they have to be caught."""
    for name, flags in cases:
        drops = name.split(", ")[0] in DROPS_GATES
        assert same_in_training(open_noisy_gates(tiny(flags))) == (not drops), name


@pytest.mark.slow
def test_hard_concrete_gates_are_the_same_in_expectation():
    """Over many draws a gate's mean is near the gate of evaluation, and so is what the model computes.

    Near, not at it: the paper's is an estimate. One draw is not near.
    """
    gate = Sentinel(GPTConfig(sentinel="hard_concrete"), SimpleNamespace(n_total=7))
    gate.logit.data = torch.linspace(-3, 3, 7)
    torch.manual_seed(0)
    with torch.no_grad():
        draws = torch.stack([gate.train().gate(noisy=True) for _ in range(4000)])
        assert near(draws.mean(0), gate.eval().gate(noisy=False), 0.12)
        assert not near(draws[0], gate.gate(noisy=False), 0.12)
        assert (draws == 0).any() and (draws == 1).any() and draws.min() == 0 and draws.max() == 1
        model, idx = tiny(MECHANISMS["sentinel_l0"], n_layer=1), tokens(1, 4)
        want = model.hidden(idx)
        model.train()
        draws = torch.stack([model.hidden(idx) for _ in range(400)])
        assert (draws.mean(0) - want).norm() < 0.4 * (draws - want).norm(dim=(-2, -1)).mean()


# ---- 7. the KV cache ----

def cache_differs(model, *splits):
    """The splits of a text at which reading it in pieces is not reading it at once."""
    idx = tokens(2, sum(splits[0]))
    with torch.no_grad():
        want = model.hidden(idx)
        found = []
        for sizes in splits:
            cache = KVCache(model.config)
            got = torch.cat([model.hidden(piece, cache) for piece in idx.split(sizes, dim=1)], dim=1)
            found += [] if near(got, want) and cache.length == idx.size(1) else [sizes]
        return found


ONE_BY_ONE, UNEVEN = [1] * 9, [4, 1, 1, 3]


@with_details
def test_cached_equals_uncached(cases):
    for name, flags in cases:
        assert cache_differs(tiny(flags), ONE_BY_ONE, UNEVEN, [9]) == [], name


def padding_differs(model, whole=True):
    """The lengths of rows that, padded and read in pieces or at once, are not what they are alone."""
    lengths, idx = [3, 9, 6], tokens(3, 9)
    pad = 9 - torch.tensor(lengths)
    filled = torch.where(torch.arange(9) < pad[:, None], 36, idx)
    with torch.no_grad():
        cache = KVCache(model.config)
        pieces = [model.hidden(piece, cache, pad) for piece in filled.split([4, 4, 1], dim=1)]
        padded = {"in pieces": torch.cat(pieces, dim=1)}
        if whole:
            padded["at once"] = model.hidden(filled, pad=pad)
        alone = [model.hidden(idx[row:row + 1, 9 - n:])[0] for row, n in enumerate(lengths)]
    return [(how, n) for how, x in padded.items() for row, n in enumerate(lengths)
            if not near(x[row, 9 - n:], alone[row])]


@with_details
def test_rows_padded_and_read_in_pieces_equal_rows_alone(cases):
    """Each row of an unevenly long batch, whatever its padding, gives what it gives alone without a cache."""
    for name, flags in cases:
        assert padding_differs(tiny(flags)) == [], name


@settings(max_examples=60)
@given(small_models(), st.lists(st.integers(1, 12), min_size=2, max_size=3), portions(12), portions(12))
def test_mixtures_read_in_portions_and_padded_are_what_each_row_is_alone(flags, lengths, pieces, of_padded):
    """Of any mechanisms together: rows alone are read in portions with a cache, padded behind, and padded in
    front and read in other portions.
    """
    model, idx = tiny(flags), tokens(len(lengths), 12)
    size, pad = torch.tensor(lengths), 12 - torch.tensor(lengths)
    columns = torch.arange(12)
    with torch.no_grad():
        alone = [model.hidden(row[None, :n])[0] for row, n in zip(idx, lengths)]
        tol = 1e-9 * max(1.0, *(x.abs().max().item() for x in alone))
        behind = model.hidden(torch.where(columns < size[:, None], idx, 36))
        front = torch.where(columns < pad[:, None], 36, idx.gather(1, (columns - pad[:, None]).clamp_min(0)))
        cache = KVCache(model.config)
        before = torch.cat([model.hidden(x, cache, pad) for x in front.split(of_padded, dim=1)], dim=1)
        for row, n in enumerate(lengths):
            assert near(behind[row, :n], alone[row], tol), "padded behind"
            assert near(before[row, 12 - n:], alone[row], tol), "padded in front, in portions"
        cache, whole = KVCache(model.config), model.hidden(idx)
        cached = torch.cat([model.hidden(piece, cache) for piece in idx.split(pieces, dim=1)], dim=1)
        assert near(cached, whole, tol) and cache.length == 12, "in portions"


@pytest.mark.slow
@in_pairs
def test_pairs_do_not_leak_and_rows_padded_equal_rows_alone(cases):
    """Both promises of one model: to make a model takes as long as to ask it."""
    for name, flags in cases:
        model = tiny(flags)
        assert leaks(model, "maps", (6,)) == set(), name
        assert padding_differs(model, whole=False) == [], name


@pytest.mark.slow
@singles
def test_unequal_prompts_generate_what_each_does_alone(cases):
    """Past the end of the context, too."""
    idx, lengths = tokens(3, 9), [1, 9, 4]
    for name, flags in cases:
        model = tiny(flags)
        got = model.generate(idx, 9, temperature=0, lengths=lengths)
        for row, n in enumerate(lengths):
            alone = model.generate(idx[row:row + 1, 9 - n:], 9, temperature=0)
            assert torch.equal(got[row, 9:], alone[0, n:]), f"{name}: prompt of {n}"


@pytest.mark.parametrize("name", ["constraint_a", "constraint_b", "constraint_published"])
def test_the_cache_test_catches_a_running_mean_that_starts_anew(name, monkeypatch):
    monkeypatch.setattr(KVCache, "swap", lambda self, layer, name, value: None)
    assert cache_differs(tiny(MECHANISMS[name]), ONE_BY_ONE, UNEVEN) == [ONE_BY_ONE, UNEVEN]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in MECHANISMS if n.startswith("routing") or n == "moh"])
def test_decoding_that_skips_heads_equals_decoding_that_does_not(name, monkeypatch):
    """Alone, with every other mechanism, and with heads that are gone."""
    calls, skipping = [], attention.attend_open_heads

    def counted(*a):
        calls.append(1)
        return skipping(*a)
    monkeypatch.setattr(model_py, "SKIP_FROM", 1)
    monkeypatch.setattr(attention, "attend_open_heads", counted)
    pairs = [case for cases in WITH.values() for case in cases if name in case[0].split("+")]
    for other, flags in SINGLES[name] + pairs:
        model = tiny(flags)
        calls.clear()
        assert cache_differs(model, [4] + [1] * 4) == [], other
        prune_heads(model, {0: [2, 3]})
        assert cache_differs(model, [4] + [1] * 4) == [], other
        # with the zero mask no head is unused
        dense = (model.needs_row_stats or model.changes_scores or model.config.in_pairs
                 or name in DROPS_GATES | {"routing_zero"})
        assert bool(calls) != dense or name == "routing_zero", other


# ---- 7b. documents in a row ----

IN_ROWS = [4, 1, 8], [7, 6]  # tokens of the documents in each row of T
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in IN_ROWS])


def alone(x):
    """The documents in rows x [2, T, ...], each as a row by itself."""
    return [piece[None] for row, sizes in zip(x, IN_ROWS) for piece in row.split(sizes)]


def crossing(model, idx, tol=1e-9):
    """By which of the two forms of their mask documents in rows are not what each of them is alone, hidden
    states and gradients; nothing, where none sees another. The one form is what a GPU and a compiled graph
    take.
    """
    want, found = torch.cat([model.hidden(each)[0] for each in alone(idx)]), []
    scale = max(1.0, want.detach().abs().max().item())
    for form, flex in (("apart", False), ("by blocks", True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_py, "has_flex_attention", lambda device: flex)
            got = model.hidden(idx, positions=POSITIONS).flatten(0, 1)
        try:
            agree([got / scale], [want / scale], list(model.parameters()), tol)
        except AssertionError:
            found.append(form)
    return found


@with_details
def test_documents_in_rows_are_what_each_is_alone(cases):
    for name, flags in cases:
        assert crossing(tiny(flags), tokens(2, T)) == [], name


@settings(max_examples=20)
@given(small_models())
def test_of_mixtures_too_documents_in_rows_are_what_each_is_alone(flags):
    model, idx = tiny(flags), tokens(2, T)
    assert crossing(model, idx, 1e-8) == []


def without_begins(monkeypatch):
    """Attention that crosses documents."""
    make = CausalMask.make
    monkeypatch.setattr(CausalMask, "make", lambda self, *a: make(self, *a[:7]))


def as_one_text(*names):
    """A mistake: rivals.py or model.py calls functions of these names without what divides a row."""
    def mistake(monkeypatch):
        for module in (model_py, rivals):
            for name in set(names) & set(vars(module)):
                function = getattr(module, name)
                count = {"sum_so_far": 1, "short_convolution": 4}[name]
                monkeypatch.setattr(module, name, lambda *a, f=function, n=count: f(*a[:n]))
    return mistake


def in_columns_of_the_row(monkeypatch):
    """Positions that do not begin anew, of which the mask knows nothing."""
    make = GPT.make_forward_pass

    def wrong(self, mask, positions, *a, **how):
        if torch.is_tensor(positions):
            positions = torch.arange(T).expand_as(positions)
        return make(self, mask, positions, *a, **how)
    monkeypatch.setattr(GPT, "make_forward_pass", wrong)


CROSSING = {"plain": ({}, without_begins), "fox": (MECHANISMS["fox"], without_begins),
            "window": (dict(window=3, window_global=1), without_begins),
            "short_conv": (MECHANISMS["short_conv"], as_one_text("short_convolution")),
            "short_conv_x": (MECHANISMS["short_conv_x"], as_one_text("short_convolution")),
            "router's mean": (MECHANISMS["constraint_a"], as_one_text("sum_so_far")),
            "router's first": (dict(constraint_names=["a"], constraint_router_input="first"),
                               as_one_text("sum_so_far")),
            **{name: (MECHANISMS[name], in_columns_of_the_row) for name in ("key_offset", "ssmax", "acag")}}


@pytest.mark.parametrize("flags, mistake", CROSSING.values(), ids=CROSSING)
def test_the_test_of_documents_catches(flags, mistake, monkeypatch):
    mistake(monkeypatch)
    assert crossing(tiny(flags), tokens(2, T)) == ["apart", "by blocks"]


def summed(outs, counts):
    """The loss over all tokens of some batches with so many each, and what the critic's losses add to it."""
    return sum(n * sum((t for key, t in out.aux.items() if key.startswith("a2c")), out.loss)
               for out, n in zip(outs, counts))


LEARNS_FROM_RETURNS = ["a2c_temperature", "a2c_key_bias"]


@pytest.mark.parametrize("name", ["plain", "all_on", "acag", *LEARNS_FROM_RETURNS])
def test_losses_of_documents_in_rows_are_those_of_rows_with_padding(name):
    """Summed over tokens, and their gradients: logits and losses are float32."""
    flags = dict(plain={}, all_on=ALL_ON).get(name, MECHANISMS.get(name))
    model, idx, targets = tiny(flags), tokens(2, T), tokens(2, T, seed=2)
    targets[1, 9:] = -1  # padding at the end of a row

    def padded(rows, fill):
        x = torch.full((5, 8), fill)
        for to, each in zip(x, alone(rows)):
            to[:each.size(1)] = each[0]
        return x
    count = (targets != -1).sum()
    want = summed([model(padded(idx, 0), padded(targets, -1))], [count])
    got = summed([model(idx, targets, positions=POSITIONS)], [count])
    parameters = [p for p in model.parameters() if p.requires_grad]
    agree([got / count], [want / count], parameters, 1e-6)


@pytest.mark.parametrize("name", LEARNS_FROM_RETURNS)
def test_a_return_that_runs_over_the_end_of_a_document_is_caught(name, monkeypatch):
    model, idx, targets = tiny(MECHANISMS[name]), tokens(2, T), tokens(2, T, seed=2)
    found = []
    for wrong in (False, True):
        if wrong:
            returned = model_py.discounted_return
            monkeypatch.setattr(model_py, "discounted_return", lambda *a: returned(*a[:3]))
        found.append(summed([model(idx, targets, positions=POSITIONS)], [1]))
    assert not near(*found, 1e-4)


def test_attention_maps_of_documents_in_rows_are_theirs():
    model, idx = tiny({**MECHANISMS["sink"], **MECHANISMS["paired_heads"]}), tokens(2, T)
    with torch.no_grad():
        found = model(idx, traces="maps", positions=POSITIONS).traces["blocks.1.map"]
        maps = [model(each, traces="maps").traces["blocks.1.map"][0] for each in alone(idx)]
    want = [torch.stack([torch.block_diag(*(each[head] for each in some)) for head in range(6)])
            for some in (maps[:3], maps[3:])]
    assert near(found, torch.stack(want), 1e-6)


def test_each_document_has_its_own_noise():
    model = tiny(constraint_names=["a", "b"], **ROUTED["hard router"]).train()
    router = next(block.attn.constraint for block in model.transformer.h if block.attn.constraint)
    gates = router.router_gates(torch.zeros(2, T, 2, dtype=torch.float64), torch.arange(T) - POSITIONS)
    of_each = [each[0] for each in alone(gates)]
    assert all((each == each[0]).all() for each in of_each)
    assert len({each[0, 0].item() for each in of_each}) > 2


@pytest.mark.parametrize("flags, given, words", [
    ({}, dict(positions=POSITIONS[:, 1:]), r"positions are \[2, 12\]; there must be one for each token"),
    ({}, dict(positions=POSITIONS + 1), "positions must count from 0 in each row"),
    ({}, dict(positions=2 * POSITIONS), "positions must count from 0 in each row"),
    (dict(attn_dropout=0.1), dict(positions=POSITIONS), "positions has no fused kernel with dropout"),
    (dict(constraint_names=["a"]), dict(positions=POSITIONS, router_hint=torch.zeros(2, 48)), "router_hint")])
def test_documents_in_rows_refuse_what_they_do_not_go_with(flags, given, words):
    model = tiny(flags).train()
    with pytest.raises(ValueError, match=words):
        model(tokens(2, T), tokens(2, T), **given)


# ---- 8. compiled: one graph, and no other when a head's state moves ----

AT_ONCE = {"ALL_ON": ALL_ON}  # and then every mechanism, as many together as go
for name, flags in MECHANISMS.items():
    room = next((n for n, there in AT_ONCE.items() if n != "ALL_ON"
                 and not set(flags) & set(there) and fine({**there, **flags})), None)
    AT_ONCE[f"{room}+{name}" if room else name] = {**(AT_ONCE.pop(room) if room else {}), **flags}

def losses_of(model, forward, idx, targets):
    model.zero_grad()
    out = forward(idx, targets)
    loss = sum(out.aux.values(), out.loss)
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters() if p.grad is not None]


def compiles_like_eager(flags, name, **options):
    torch._dynamo.reset()
    model = GPT(GPTConfig(**{**TINY_GPT, "block_size": 8, **small(flags)}))
    open_noisy_gates(alive(model)).train()  # compiled, noise is other noise
    fast, idx, targets = torch.compile(model, fullgraph=True, **options), tokens(2, 8), tokens(2, 8, seed=2)
    want, grads = losses_of(model, model, idx, targets)
    got, fast_grads = losses_of(model, fast, idx, targets)
    assert got == pytest.approx(want, abs=1e-4) and len(grads) == len(fast_grads), name
    assert all(near(a, b, 1e-3) for a, b in zip(grads, fast_grads)), name
    return model, fast, idx, targets


@pytest.mark.slow
@pytest.mark.parametrize("flags", AT_ONCE.values(), ids=AT_ONCE)
def test_compiles_in_one_graph_and_trains_the_same(flags):
    compiles_like_eager(flags, "", backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "window+fox+short_conv", "a2c_temperature+constraint_a+acag"])
def test_documents_in_rows_compile_in_one_graph(name):
    """On a CPU too by the mask that a GPU takes: how many documents there are depends on the data."""
    flags = {key: value for each in name.split("+") for key, value in MECHANISMS.get(each, {}).items()}
    torch._dynamo.reset()
    model = open_noisy_gates(tiny(small(flags))).float()
    fast, idx, targets = torch.compile(model, fullgraph=True, backend="aot_eager"), tokens(2, T), tokens(2, T)
    want = model(idx, targets, positions=POSITIONS)
    got = fast(idx, targets, positions=POSITIONS)
    assert near(got.loss, want.loss, 1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("flags", [{}, ALL_ON], ids=["plain", "ALL_ON"])
@pytest.mark.skipif("INDUCTOR" not in os.environ,
                    reason="C++ takes minutes to compile at first: INDUCTOR=1 compiles it")
def test_compiles_with_inductor_and_trains_the_same(flags):
    compiles_like_eager(flags, "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a2c_temperature", "a2c_key_bias"])
def test_traces_and_losses_of_the_critic_compile_in_one_graph(name):
    torch._dynamo.reset()
    model, idx, targets = tiny(MECHANISMS[name]).float(), tokens(2, 8), tokens(2, 8, seed=2)
    targets[0, :3] = -1
    fast = torch.compile(lambda *a: model(*a, traces=True), fullgraph=True, backend="eager")
    with torch.no_grad():
        got, want = fast(idx, targets).traces, model(idx, targets, traces=True).traces
    assert got.keys() == want.keys()
    assert {"a2c.value", "a2c.return", "blocks.1.advantage"} <= set(got)
    assert all(near(got[key].double(), want[key].double(), 1e-4) for key in want)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [ALL_ON, {**ALL_ON, "agency_learned": True}], ids=["ALL_ON", "learned"])
def test_a_state_moves_without_recompiling(flags):
    torch._dynamo.reset()
    model = tiny(flags).float()
    fast, idx = torch.compile(model, fullgraph=True, backend="aot_eager"), tokens(2, 8)
    with torch.no_grad():
        before = fast(idx).logits
        with torch._dynamo.config.patch(error_on_recompile=True):
            for change in (dict(state="misaligned"), dict(state="overloaded"), dict(consent=False),
                           dict(state="active", consent=True)):
                model.set_state(1, 4, **change, step=7)
                if model.config.agency_learned:
                    model.transformer.h[1].attn.agency.metrics.normal_()
                after = fast(idx).logits
                assert near(after, model(idx).logits, 1e-4) and not near(after, before, 1e-3)
                before = after
            # what the guard is worth: another shape is noticed
            with pytest.raises(Exception, match="[Rr]ecompil"):
                fast(tokens(2, 7))
    torch._dynamo.reset()


# ---- 9. gradients and bfloat16 ----

def more_losses(flags):
    """The losses that have a weight of 0 unless asked for."""
    router = dict(constraint_sparsity_coef=0.1, constraint_entropy_coef=0.1)
    return {**flags, **(router if "constraint_names" in flags else {})}


@singles
def test_every_parameter_has_a_gradient(cases):
    """With all auxiliary losses on; finite from the first step on, not zero once the weights are alive."""
    for name, flags in cases:
        model = GPT(GPTConfig(**{**TINY_GPT, **more_losses(flags)})).train()
        assert all(g is not None and g.isfinite().all() for g in gradients(model).values()), name
        dead = [n for n, g in gradients(alive(model)).items()
                if g is None or not g.isfinite().all() or not g.any()]
        assert dead == [], name


def test_every_auxiliary_loss_is_there():
    model = GPT(GPTConfig(**TINY_GPT, **more_losses(ALL_ON))).train()
    out = model(tokens(2, T), tokens(2, T, seed=2),
                constraint_targets={name: torch.ones(2, T) for name in CONSTRAINTS})
    assert set(out.aux) == {"routing_balance", "gate_l1", "constraint_router", "constraint_entropy",
                            "a2c_value", "a2c_advantage", *(f"constraint.{name}" for name in CONSTRAINTS)}
    assert model(tokens(2, T)).aux == {} and model(tokens(2, T)).loss is None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["weights", "autocast"])
@singles
def test_bfloat16_is_finite(cases, how):
    for name, flags in cases:
        config = GPTConfig(**TINY_GPT, **more_losses(flags))
        model = GPT(config).train()
        want = total(model).item()
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            loss = total(model.bfloat16() if how == "weights" else model)
        loss.backward()
        assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters()), name
        assert loss.item() == pytest.approx(want, abs=0.2), name


# ---- 10. checkpoints ----

@singles
def test_a_saved_model_is_the_same_model(cases, tmp_path, monkeypatch):
    """Head states included; also after heads are pruned, and the context is cropped."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # takes most of the time, and no power fails here
    for name, flags in cases:
        model, idx, path = tiny(flags).float(), tokens(2, 8), tmp_path / "ckpt.pt"
        for smaller in (False, True) if flags["recipe"] == "gpt2" else (True,):
            if smaller:
                prune_heads(model, {0: [4, 5], 1: list(range(6))})
                model.crop_block_size(8)
            checkpoint.save(path, dict(model=model.state_dict(), config=asdict(model.config), meta=None))
            again = checkpoint.build(checkpoint.read(path), path)
            with torch.no_grad():
                assert torch.equal(again(idx).logits, model(idx).logits), name
            assert again.config == model.config, name
        assert [len(block.attn.head_ids) for block in again.transformer.h] == [4, 0]
        if model.config.agency:
            assert again.transformer.h[0].attn.agency.state.tolist() == [0, 1, 2, 3]


# ---- 11. two ranks ----

@pytest.mark.slow
def test_two_ranks_train_as_one_process_does_with_everything_on(bytes_data, rows, tmp_path):
    settings = dict(dataset=bytes_data, n_layer=2, n_head=6, n_embd=48, block_size=16, batch_size=4,
                    max_iters=6, eval_interval=6, eval_tokens=256, log_interval=1, device="cpu",
                    **{**ALL_ON, "routing_coef": 1.0})
    argv = [f"--{key}={value}" for key, value in settings.items()]
    train.main([*argv, f"--out_dir={tmp_path / 'one'}"])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               str(ROOT / "train.py"), *argv, f"--out_dir={tmp_path / 'two'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    for one, two in zip(rows(tmp_path / "one"), rows(tmp_path / "two")):
        assert len(one) == len(two) > 0
        for a, b in zip(one, two):
            assert a.keys() == b.keys()
            same = set(a) - {"elapsed_s", "tokens_per_s"}
            assert all(a[k] == pytest.approx(b[k], abs=1e-5) for k in same), (a, b)
    losses = {"aux/routing_balance", "aux/gate_l1", "aux/a2c_value", "aux/a2c_advantage"}
    assert losses <= set(rows(tmp_path / "two")[0][-1])
    one, two = (checkpoint.read(tmp_path / out / "ckpt.pt")["model"] for out in ("one", "two"))
    assert one.keys() == two.keys() and all(near(one[k].float(), two[k].float(), 1e-4) for k in one)


def test_load_balance_is_that_of_the_whole_batch(monkeypatch):
    """Two halves of a batch, as two ranks see them. The control: without the exchange the mean differs."""
    router = Routing(GPTConfig(**TINY_GPT, routing="moh", routing_coef=1.0), None).double()
    x = torch.randn(2, T, TINY_GPT["n_embd"], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x + torch.tensor([[[1.0]], [[-1.0]]])

    def penalty(x):
        return router.penalty(*router(x))["routing_balance"].item()

    load = [router(half)[1].flatten(0, 1).double().mean(0) for half in x[:, None]]
    whole, alone = penalty(x), [penalty(half) for half in x[:, None]]
    assert abs(sum(alone) / 2 - whole) > 1e-3
    monkeypatch.setattr(model_py.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(model_py.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(model_py.dist, "all_reduce", lambda t: t.copy_(load[0] + load[1]))
    assert sum(penalty(half) for half in x[:, None]) / 2 == pytest.approx(whole, abs=1e-12)


# ---- 12. heads that are closed, packed away, and pruned ----

def close(model, gone):
    """Close heads, {layer: [head, ...]}, by every means that the model has in turn.

    By hand, withdrawn, by a gate that has learned to be 0.
    """
    for layer, heads in gone.items():
        attn = model.transformer.h[layer].attn
        means = ["hand"]
        if attn.agency:
            means.append("withdrawn")
        if attn.sentinel and attn.sentinel.hard:
            means.append("learned")
        for head, how in zip(heads, itertools.cycle(means)):
            if how == "hand":
                model.set_gate(layer, head, 0.0)
            elif how == "withdrawn":
                model.set_state(layer, head, state="withdrawn")
            else:
                attn.sentinel.logit.data[head] = -50.0
    return model


GONE = {0: [2, 3], 1: [0, 1, 2, 3, 4, 5]}


def cached_heads(attn):
    """Heads whose keys a layer's cache holds: of groups, one each, but where heads have keys of their own."""
    return len(attn.head_ids) // (1 if attn.n_extra else attn.group) + attn.n_extra


@pytest.mark.slow
@singles
def test_packed_is_the_same_function_without_the_closed_heads(cases):
    """Read in pieces with a cache that is smaller; the router still selects among all heads."""
    idx = tokens(2, 16)
    for name, flags in cases:
        model = tiny(flags)
        with torch.no_grad():
            before = model.hidden(idx)
            packed = pack(close(model, GONE))
            want, cache = model.hidden(idx), KVCache(packed.config)
            got = torch.cat([packed.hidden(piece, cache) for piece in idx.split([7, 1, 8], dim=1)], dim=1)
        assert near(got, want) and not near(want, before), name
        left = packed.config.head_ids
        assert model.config.head_ids is None, name
        assert not set(GONE[0]) & set(left[0]) and left[1] == [], name
        attentions = [block.attn for block in packed.transformer.h]
        assert [k.size(1) for k in cache.k] == [cached_heads(a) for a in attentions], name
        assert cache.k[0].size(1) < 6 + attentions[0].n_extra, name
        assert packed.num_params() < model.num_params(), name


def trained(flags, optimizer, gone=None, prune=False):
    """(model, optimizers) after two steps, then with heads closed or pruned, and three steps more."""
    model = open_noisy_gates(tiny(flags)).train()
    optimizers = make_optimizers(model, train.TrainConfig(optimizer=optimizer).for_recipe("gpt2"))
    for step in range(5):
        if step == 2 and gone and prune:
            prune_heads(model, gone, optimizers)
        elif step == 2 and gone:
            for layer, heads in gone.items():
                for head in heads:
                    model.set_gate(layer, head, 0.0)
        model(tokens(2, T, seed=step), tokens(2, T, seed=step + 9)).loss.backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
    return model, optimizers


@pytest.mark.slow
@singles
def test_training_goes_on_after_pruning_as_with_closed_heads(cases):
    """AdamW's moments are those of the heads that are left. The control: with others the ways part."""
    (name, flags), *_ = cases
    pruned, _ = trained(flags, "adamw", GONE, prune=True)
    masked, _ = trained(flags, "adamw", GONE)
    prune_heads(masked, GONE)
    assert all(near(a, b) for a, b in zip(pruned.parameters(), masked.parameters(), strict=True))
    never, _ = trained(flags, "adamw")
    prune_heads(never, GONE)
    assert not all(near(a, b) for a, b in zip(pruned.parameters(), never.parameters(), strict=True))


PRUNED = {"plain": {},
          "ALL_ON": ALL_ON,
          "a2c_published": MECHANISMS["a2c_published"],
          "output_gate_elementwise": MECHANISMS["output_gate_elementwise"]}


@pytest.mark.slow
@pytest.mark.parametrize("flags", PRUNED.values(), ids=PRUNED)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_pruning_takes_rows_from_projections_and_moments(flags, optimizer):
    model, optimizers = trained(flags, optimizer)
    attn = model.transformer.h[0].attn

    def held(p):
        """A parameter, under "", and its moments."""
        state = next(o.state[p] for o in optimizers if p in o.state)
        return {"": p, **{k: v for k, v in state.items() if v.shape == p.shape}}

    D, left = TINY_GPT["n_embd"] // 6, (0, 1, 4, 5)
    columns = torch.cat([torch.arange(h * D, (h + 1) * D) for h in left])
    rows = torch.cat([part * 6 * D + columns for part in range(attn.parts)])
    want = [{k: v.detach()[rows].clone() for k, v in held(attn.c_attn.weight).items()},
            {k: v.detach()[:, columns].clone() for k, v in held(attn.c_proj.weight).items()}]
    prune_heads(model, GONE, optimizers)
    got = [held(attn.c_attn.weight), held(attn.c_proj.weight)]
    assert all(torch.equal(a[k], b[k]) for a, b in zip(want, got, strict=True) for k in a | b)
    assert len(want[0]) > 1
    inside = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    assert inside == {id(p) for p in model.parameters()}
    assert all(p in inside for p in map(id, (p for o in optimizers for p in o.state)))
    losses = []
    for _ in range(8):
        losses.append(total(model))
        losses[-1].backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
    assert all(p.isfinite().all() for p in model.parameters()) and losses[-1] < losses[0]


def shapes(flags, n_left):
    """{parameter or buffer: shape} of a model of which this many heads are left in each layer."""
    left = [list(range(n_left))] * flags.get("n_layer", TINY_GPT["n_layer"])
    model = GPT(GPTConfig(**{**TINY_GPT, **flags, "head_ids": left}))
    return {name: t.shape for name, t in (*model.named_parameters(), *model.named_buffers())}


def named_axes(flags):
    """The names of the tensors that per_head lists in the layers and their mechanisms."""
    model = GPT(GPTConfig(**{**TINY_GPT, **flags}))
    paths = {id(module): path for path, module in model.named_modules()}
    axes = [axis for block in model.transformer.h for axis in head_axes(block.attn)]
    return {f"{paths[id(module)]}.{name}" for module, name, _ in axes}


@pytest.mark.slow
@singles
def test_every_tensor_with_a_head_axis_is_named(cases):
    """And therefore pruned: built with four heads left and with two, no other tensor has another shape."""
    for name, flags in cases:
        four, two = shapes(flags, 4), shapes(flags, 2)
        changed = {tensor for tensor in four if four[tensor] != two[tensor]}
        assert changed <= named_axes(flags) and len(changed) >= 4, name
        pruned = GPT(GPTConfig(**{**TINY_GPT, **flags}))
        prune_heads(pruned, {layer: [2, 3, 4, 5] for layer in range(2)})
        assert {n: t.shape for n, t in (*pruned.named_parameters(), *pruned.named_buffers())} == two, name


def test_the_head_axis_test_catches_a_tensor_that_is_not_named(monkeypatch):
    monkeypatch.setattr(Sentinel, "per_head", ())
    flags = MECHANISMS["sentinel"]
    four, two = shapes(flags, 4), shapes(flags, 2)
    changed = {tensor for tensor in four if four[tensor] != two[tensor]}
    assert "transformer.h.0.attn.sentinel.logit" in changed - named_axes(flags)


@pytest.mark.slow
@singles
def test_a_deep_copy_is_optimised_alike(cases):
    settings = train.TrainConfig(optimizer="muon", weight_decay=0.1).for_recipe("gpt2")
    for name, flags in cases:
        model = GPT(GPTConfig(**{**TINY_GPT, **flags}))
        groups = []
        for m in (model, copy.deepcopy(model)):
            names = {id(p): n for n, p in m.named_parameters()}
            optimizers = make_optimizers(m, settings)
            groups.append([[(sorted(names[id(p)] for p in group["params"]), group["weight_decay"])
                            for group in o.param_groups] for o in optimizers])
        assert groups[0] == groups[1], name


def test_cropping_leaves_the_callers_config_alone():
    config = GPTConfig(**TINY_GPT, acag="headwise", window=6)
    model = GPT(config)
    model.crop_block_size(8)
    assert (config.block_size, model.config.block_size) == (16, 8)


def test_heads_that_are_not_there_are_refused():
    model = tiny(MECHANISMS["agency"])
    prune_heads(model, {0: [2]})
    for wrong in (lambda: prune_heads(model, {0: [2]}),
                  lambda: prune_heads(model, {2: [0]}),
                  lambda: model.set_gate(0, 2, 0.0),
                  lambda: model.set_gate(0, 6, 0.0),
                  lambda: model.set_gate(-1, 0, 0.0),
                  lambda: model.set_state(0, 0, state="asleep"),
                  lambda: tiny({}).set_state(0, 0, state="active")):
        with pytest.raises(ValueError) as e:
            wrong()
        assert "\n" not in str(e.value)


# ---- 13. what is refused ----

CONSTRAINED = dict(constraint_names=CONSTRAINTS)


# flags of one model, and the key that is named with its value


VALUES = [None, False, True, *range(18), *(i / 20 for i in range(41)), 0.001, 0.01, 1e9]
DETAILS = {name: cls.flag for cls in MECHANISM_CLASSES for name in flags_of(cls) if name != cls.flag}


@pytest.mark.parametrize("key, flag", DETAILS.items(), ids=DETAILS)
def test_a_detail_is_refused_while_its_mechanism_is_off(key, flag):
    """Whatever its value, unless that is the default, which it has where nobody sets it."""
    kind, default, _ = keys_of((GPTConfig,))[key]
    tried = 0
    for value in [*VALUES, *choices(kind), ["free"], [0], [0.5]]:
        try:
            value = check(value, kind)
        except ValueError:
            continue
        if value == default:
            continue
        problem, = GPTConfig(**TINY_GPT, **{key: value}).problems()
        out_of_range = f"{key}={value!r} must" in problem
        assert out_of_range or problem == f"{key}={value!r} means nothing while {flag} is off"
        tried += not out_of_range
    assert tried


def test_an_impossible_config_names_every_problem():
    wrong = dict(n_embd=30, n_head=4, dropout=1.5, recipe="mamba", softcap=-1.0)
    with pytest.raises(ValueError) as e:
        GPT(GPTConfig(vocab_size=10, **wrong))
    assert all(f"{key}={wrong[key]!r}" in str(e.value) for key in ("n_embd", "dropout", "recipe", "softcap"))
    with pytest.raises(ValueError, match="vocab_size"):
        GPT(GPTConfig())


@pytest.mark.parametrize("flags", [
    dict(routing="sigmoid", routing_top_k=1),
    dict(routing="published", routing_mask="zero", routing_top_k=1),
    dict(acag="headwise", dropout=0.1, attn_dropout=0.0),
    dict(window=0, dropout=0.1, attn_dropout=0.0),
    dict(CONSTRAINED, constraint_layers=[0, 1]),
], ids=lambda v: "+".join(v))
def test_what_is_near_a_refusal_but_means_something_trains(flags):
    model = GPT(GPTConfig(**TINY_GPT, **flags)).train()
    assert all(g is not None and g.isfinite().all() for g in gradients(model).values())


# ---- 14. recomputed, and with a shorter context ----

@pytest.mark.slow
@singles
def test_activation_checkpointing_changes_nothing(cases):
    for name, flags in cases:
        found = []
        for on in (False, True):
            model = tiny(flags, checkpoint_activations=on).train()
            torch.manual_seed(3)  # for hard-concrete noise
            found.append(gradients(model))
        assert all(near(found[0][n], found[1][n]) for n in found[0]), name


@pytest.mark.slow
@singles
def test_cropping_the_context_keeps_the_function(cases):
    """Unlike a model of the shorter context with the same weights, where length or window follow from it."""
    for name, flags in cases:
        model, idx = tiny(flags), tokens(2, 8)
        short = share(tiny(flags, live=False, block_size=8), model)
        with torch.no_grad():
            want = model.hidden(idx)
            model.crop_block_size(8)
            assert near(model.hidden(idx), want) and cache_differs(model, [3, 1, 4]) == [], name
            if flags.get("acag") or "window" in flags:
                assert not near(short.hidden(idx), want), name
