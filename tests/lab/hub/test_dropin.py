"""Layers and gates outside our GPT: against slow formulas in float64, and against the models they go into."""

import pickle
import copy
import json
import math
import os
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import oracle
from model import GPT, Agency, ConstraintHeads, GPTConfig, Sentinel, Sink
from nanoheads import checkpoint
from nanoheads.common import UserError
from nanoheads.traces import explain
from lab.hub import dropin
from lab.hub.dropin import FAMILIES, INSERTABLE, InsertedAttention, aux_losses, insert, load, mask_heads
from lab.hub.inserted import Call
from lab.hub.layers import AdaptiveContextualAttention, ConstraintAttention

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
APART = (Agency, ConstraintHeads)  # tests/lab/hub/test_inserted.py has them
MODES = [name for cls in INSERTABLE if cls not in APART for name in cls.modes]
NEUTRAL = [name for name in MODES if name not in ("head_norm", "routing_published", "routing_train_only")]
ALL = "xsa,routing_moh,sentinel,output_gate,acag,sink"
V, T = 61, 12
REAL = (torch.arange(T) >= torch.tensor([[5], [0]])).long()  # two rows, the first with five tokens of padding


@pytest.fixture(scope="module")
def hf():
    transformers = pytest.importorskip("transformers", reason="transformers is optional")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids(rows=2, length=T, seed=1):
    return torch.randint(3, V, (rows, length), generator=torch.Generator().manual_seed(seed))


def scatter(module, scale, only=""):
    """Random numbers onto the parameters that have `only` in their names."""
    for i, (name, p) in enumerate(module.named_parameters()):
        if only in name:
            p.data.add_(scale * normal(*p.shape, seed=i).to(p.dtype))


def tiny(hf, kind, dtype=torch.float64, **more):
    """A random model of a family: 2 layers, 4 heads of 8; some share keys, have windows or wider heads."""
    tokens = dict(vocab_size=V, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32)
    if kind == "gpt2":
        sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=32, attn_pdrop=0.0, resid_pdrop=0.0,
                     embd_pdrop=0.0)
    elif kind == "gpt_neo":
        sizes = dict(hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=32, window_size=4,
                     attention_types=[[["global", "local"], 1]])
    else:
        sizes.update(intermediate_size=48, sliding_window=None)
        sizes.update(dict(num_key_value_heads=2) if kind != "gpt_neox" else {})
        sizes.update({"mistral": dict(sliding_window=5), "qwen3": dict(head_dim=16),
                      "phi3": dict(attention_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0),
                      "qwen2": dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
                      "starcoder2": dict(attention_dropout=0.0, residual_dropout=0.0,
                                         embedding_dropout=0.0)}.get(kind, {}))
    torch.manual_seed(0)
    config = hf.AutoConfig.for_model(kind, **{**sizes, **tokens, **more})
    model = hf.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    scatter(model, 0.1)
    return model


def logits(model, tokens, real=None, **more):
    with torch.no_grad():
        return model(tokens, attention_mask=real, use_cache=False, **more).logits


# ---- slow formulas ----

def slow_gates(model, gates, x, q, k, v, scale, seen, before, head_mask=None):
    """Gated outputs [B, H, T, D] by whole T x T matrices; q, k, v [B, H, T, D], seen [B, T, T].

    before [B, 1, T]: tokens before each query, padding aside.
    """
    seen = seen[:, None]
    s = (q @ k.mT * scale).masked_fill(~seen, -math.inf)
    P = oracle.softmax(s)
    if head_mask is not None:
        P = P * head_mask[:, None, None]  # version 4
    if gates is None:
        return P @ v
    c, p = dropin.gpt_config(model, (), model.config.nanoheads), dict(gates.named_parameters())
    factors = oracle.factors(c, p, {}, x, s, P, seen, before, gates.head_ids, gates.training)
    return oracle.rewritten(c, p, {}, x, P @ v, v, gates.head_ids, gates.training) * factors


def slow_attention(model, layer, x, real, **more):
    """What a layer's attention gives for x [B, T, C], by its weights; real [B, T]: 0 for padding."""
    kind = model.config.model_type
    _, _, attn, proj = dropin.places(model)[layer]
    apart = lambda t: t.unflatten(-1, (-1, 8)).transpose(1, 2)  # noqa: E731
    if kind == "gpt2":
        q, k, v = map(apart, (x @ attn.c_attn.weight + attn.c_attn.bias).chunk(3, -1))
    else:
        q, k, v = (apart(F.linear(x, p.weight, p.bias)) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
    if kind in ("llama", "mistral"):
        q, k, v = oracle.rope(q), oracle.rope(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    i, j = torch.arange(x.size(1))[:, None], torch.arange(x.size(1))
    window = {"mistral": 5, "gpt_neo": 4 if layer else None}.get(kind)
    seen = (j <= i) & ((i - j < window) if window else True) & real.bool()[:, None]
    seen = seen | ((j == i) & ~real.bool()[:, :, None])  # rows of padding, which nobody compares
    scale = 1.0 if kind == "gpt_neo" else 8 ** -0.5
    before = (real.cumsum(1) - 1).clamp_min(0)[:, None]
    y = slow_gates(model, getattr(attn, "nanoheads", None), x, q, k, v, scale, seen, before, **more)
    y = y.transpose(1, 2).flatten(2)
    return y @ proj.weight + proj.bias if kind == "gpt2" else F.linear(y, proj.weight, proj.bias)


def seen_by_hooks(model, layer, tokens, real):
    """(input, output) of a layer's attention in a pass of the whole model."""
    got, attn = {}, dropin.places(model)[layer].attn
    hook = attn.register_forward_hook(
        lambda m, args, kwargs, out: got.update(x=args[0] if args else kwargs["hidden_states"], y=out[0]),
        with_kwargs=True)
    model(tokens, attention_mask=real, use_cache=False)
    hook.remove()
    return got["x"], got["y"]


def off(model, layer, real=REAL):
    """How far a layer's attention is from the slow formulas, over all but padding."""
    x, y = seen_by_hooks(model, layer, ids(), real)
    return ((y - slow_attention(model, layer, x, real)) * real[..., None]).abs().max().item()


# ---- layers ----

@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("flags", [{}, dict(gate="elementwise"), dict(mode="published"), dict(detach=True),
                                   dict(mode="published", gate="elementwise")], ids=str)
@pytest.mark.parametrize("heads,width,length", [(3, 8, 9), (1, 8, 9), (4, 1, 9), (2, 8, 1)])
def test_the_acag_layer_is_the_formula(heads, width, length, flags, causal):
    layer = AdaptiveContextualAttention(heads * width, heads, 16, causal=causal, bias=True, **flags).double()
    scatter(layer, 0.5)
    config = GPTConfig(block_size=16, n_layer=1, n_head=heads, n_embd=heads * width, bias=True,
                       acag=flags.get("gate", "headwise"), acag_mode=flags.get("mode", "normalised"),
                       acag_detach=flags.get("detach", False))
    attn, x = layer.attn, normal(2, length, heads * width).requires_grad_()
    seen = torch.ones(length, length, dtype=torch.bool)
    before = torch.arange(length) if causal else torch.full((length,), length - 1)
    want, _ = oracle.attend(config, attn, 0, x, seen.tril() if causal else seen, before)
    got = layer(x)
    assert got.shape == x.shape and (got - want).abs().max() < 1e-9
    r, tensors = normal(*got.shape, seed=5), [x, attn.acag.weight, attn.acag.bias]
    for a, b in zip(torch.autograd.grad((got * r).sum(), tensors),
                    torch.autograd.grad((want * r).sum(), tensors)):
        assert (a - b).abs().max() < 1e-5 * (1 + b.abs().max())  # steep where a row is nearly even


def leaks(layer, output=lambda out: out):
    """Does what comes before token 5 change with it?"""
    x = normal(2, 9, 32)
    y = x.clone()
    y[:, 5] += 1
    with torch.no_grad():
        return not torch.equal(output(layer(x))[:, :5], output(layer(y))[:, :5])


def test_only_the_open_form_lets_later_tokens_in():
    for flags in ({}, dict(mode="published"), dict(gate="elementwise")):
        layer = AdaptiveContextualAttention(32, 4, 16, **flags).double()
        scatter(layer, 0.3)
        assert not leaks(layer)
    layer = AdaptiveContextualAttention(32, 4, 16, mode="published", causal=False).double()
    assert leaks(layer)


def test_the_write_ups_first_example():
    attn = AdaptiveContextualAttention(d_model=768, num_heads=12, max_len=2048)
    with torch.no_grad():
        assert attn(torch.randn(2, 32, 768)).shape == (2, 32, 768)
    assert set(attn.state_dict()) == {"attn.c_attn.weight", "attn.c_proj.weight", "attn.acag.weight",
                                      "attn.acag.bias"}
    assert AdaptiveContextualAttention.__init__.__defaults__[:3] == (768, 12, 2048)


@pytest.mark.slow
@pytest.mark.parametrize("make", [AdaptiveContextualAttention, ConstraintAttention])
def test_layers_are_saved_copied_and_compiled(make):
    torch.manual_seed(1)
    layer, other = make(32, 4).double(), make(32, 4).double()
    run = (lambda m, x: m(x)) if make is AdaptiveContextualAttention else (lambda m, x: m(x)[0])
    x = normal(2, 9, 32)
    assert not torch.equal(layer.attn.c_attn.weight, other.attn.c_attn.weight)  # layers do not start alike
    scatter(layer, 0.2)
    assert not torch.allclose(run(layer, x), run(other, x))
    other.load_state_dict(layer.state_dict())
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for same in (other, copy.deepcopy(layer)):
        assert torch.equal(run(layer, x), run(same, x))
    # 5e-8 with torch 2.11, whose compiler rounds numbers of Python to float32; else 0
    assert (run(layer, x) - run(compiled, x)).abs().max() < 1e-6


@pytest.mark.parametrize("variant", ["A", "B"])
@pytest.mark.parametrize("flags", [{}, dict(router="hard_concrete"), dict(constraint_mode="published"),
                                   dict(heads=2)], ids=str)
def test_the_constraint_layer_is_the_formula(variant, flags):
    names = ["reciprocity", "decidability"]
    layer = ConstraintAttention(64, 4, names, 16, variant=variant, **flags).double().eval()
    scatter(layer, 0.2)
    flags = {f"constraint_{key.removeprefix('constraint_')}": value for key, value in flags.items()}
    config = GPTConfig(block_size=16, n_layer=1, n_head=4, n_embd=64, constraint_names=names,
                       constraint_layers=[0], constraint_variant=variant, **flags)
    seen, x = torch.ones(9, 9, dtype=torch.bool).tril(), normal(2, 9, 64)
    want, found = oracle.attend(config, layer.attn, 0, x, seen, torch.arange(9))
    score = found["head_scores"].unflatten(1, (2, -1)).mean(2)
    got, traces = layer(x)
    assert (got - want).abs().max() < 1e-12
    for i, name in enumerate(names):
        assert (traces[f"blocks.0.constraint.{name}"] - score[:, i]).abs().max() < 1e-12
    assert explain(traces, list("abcdefghi"), "decidability", 1).startswith("decidability (block 0): '")


def test_the_constraint_layer_is_causal_but_for_a_hint():
    layer = ConstraintAttention(32, 2, max_len=16).double()
    scatter(layer, 0.3)
    assert not leaks(layer, lambda out: out[0])
    assert leaks(lambda x: layer(x, hint=x.mean(1)), lambda out: out[0])  # the source's pooled router
    assert layer(normal(1, 1, 32))[0].shape == (1, 1, 32)
    everything = layer(normal(1, 4, 32), traces="maps")[1]
    assert everything["blocks.0.map"].shape == (1, 5, 4, 4) and "blocks.0.router_gates" in everything


@pytest.mark.parametrize("make,words", [
    (lambda: AdaptiveContextualAttention(10, 3), "n_embd=10"),
    (lambda: AdaptiveContextualAttention(8, 2, mode="raw"), "acag_mode='raw'"),
    (lambda: AdaptiveContextualAttention(8, 2, 4)(torch.zeros(1, 5, 8)), "max_len=4"),
    (lambda: ConstraintAttention(16, 2, ["a", "a"]), "constraint_names=['a', 'a']"),
    (lambda: ConstraintAttention(16, 2, variant="B", heads=5), "constraint_variant='B'"),
])
def test_layers_say_what_is_wrong(make, words):
    with pytest.raises(UserError) as e:
        make()
    assert words in str(e.value) and "\n" not in str(e.value)


# ---- gates: what they compute ----

@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo", "llama", "mistral"])
@pytest.mark.parametrize("name", [*MODES, ALL])
def test_gates_are_the_formula(hf, kind, name):
    """In a padded batch, with random parameters, in training too, where published routing gates at all."""
    model = tiny(hf, kind)
    assert max(off(model, layer) for layer in range(2)) < 2e-6  # the slow formulas are this model's
    insert(model, name, anyway=True, **(dict(routing_top_k=3) if "routing" in name or name == "moh" else {}))
    scatter(model, 0.5, only="nanoheads")
    for training in (False, True) if name != "sentinel_l0" else (False,):  # noise
        model.train(training)
        for layer in range(2):
            x, y = seen_by_hooks(model, layer, ids(), REAL)
            want = slow_attention(model, layer, x, REAL)
            assert ((y - want) * REAL[..., None]).abs().max() < 5e-6
    r = normal(*y.shape, seed=5) * REAL[..., None]
    tensors = [x, *(p for n, p in dropin.places(model)[1].attn.named_parameters() if "nanoheads" in n)]
    got, expected = (torch.autograd.grad((out * r).sum(), tensors, retain_graph=True, allow_unused=True)
                     for out in (y, want))
    assert len(tensors) > 1 or name == "head_norm"
    for a, b in zip(got, expected):
        assert (a is None) == (b is None) and (a is None or (a - b).abs().max() < 1e-4 * (1 + b.abs().max()))


@pytest.mark.slow
def test_head_masks_are_version_4s(hf):
    """Attention weights times 0 after the softmax, as head_mask did there."""
    model = tiny(hf, "gpt2")
    mask_heads(model, {0: [1, 3], 1: [0]})
    for layer, mask in enumerate(([1, 0, 1, 0], [0, 1, 1, 1])):
        x, y = seen_by_hooks(model, layer, ids(), REAL)
        want = slow_attention(model, layer, x, REAL, head_mask=torch.tensor(mask).double())
        assert ((y - want) * REAL[..., None]).abs().max() < 1e-12
        assert off(model, layer) > 1e-3


def without_padding(sdpa_mask, *args, attention_mask=None, **kwargs):
    return dropin.mask_and_positions(sdpa_mask, *args, **kwargs)


def without_positions(sdpa_mask, *args, **kwargs):
    return dropin.mask_and_positions(sdpa_mask, *args, **kwargs).bool()


@pytest.mark.slow
@pytest.mark.parametrize("mask,kind,right", [
    (dropin.mask_and_positions, "gpt2", True), (without_padding, "gpt2", False), (None, "gpt2", False),
    (dropin.mask_and_positions, "mistral", True), (without_positions, "mistral", False)])
def test_padding_and_positions_come_by_the_registered_mask(hf, monkeypatch, mask, kind, right):
    """Controls: a mask without padding, none at all, and one that does not tell positions in a window."""
    model = insert(tiny(hf, kind), "acag,sink")
    scatter(model, 0.5, only="nanoheads")
    masks = hf.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    table = {k: v for k, v in masks._global_mapping.items() if k != "nanoheads"}
    if mask is not None:
        table["nanoheads"] = partial(mask, hf.masking_utils.sdpa_mask)
    monkeypatch.setattr(type(masks), "_global_mapping", table)
    if mask is None:
        with pytest.raises(UserError, match="attention_mask"):
            off(model, 1)
    else:
        assert (off(model, 1) < 5e-6) is right


@pytest.mark.parametrize("mechanisms", ["acag,sink", "sink"])
def test_statistics_are_those_before_dropout(hf, mechanisms):
    model = insert(tiny(hf, "gpt2"), mechanisms)
    scatter(model, 0.5, only="nanoheads")
    gates = dropin.places(model)[0].attn.nanoheads.train()
    q, k, v = (normal(2, 4, 7, 8, seed=i) for i in range(3))
    seen = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()

    def run(dropout):
        torch.manual_seed(0)
        gates.call = Call(None, q)
        return gates(q, k, v, seen, dropout, 0.3).transpose(1, 2)

    torch.manual_seed(0)
    dropped = F.scaled_dot_product_attention(q, k, v, seen, 0.4, scale=0.3)
    whole = F.scaled_dot_product_attention(q, k, v, seen, scale=0.3)
    assert (run(0.4) - dropped * run(0.0) / whole).abs().max() < 1e-9
    assert not torch.allclose(run(0.4), run(0.0))


# ---- gates: in a model ----

@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_logits_stay_and_every_mechanism_can_learn(hf, kind):
    model = tiny(hf, kind, torch.float32)
    before = logits(model, ids(), REAL), logits(model, ids())
    for name in NEUTRAL:
        gated = insert(copy.deepcopy(model), name)
        for a, b in zip(before, (logits(gated, ids(), REAL), logits(gated, ids()))):
            assert (a - b)[REAL.bool()].abs().max() < 1e-4, name
        for _ in range(9 if name == "sentinel_l0" else 1):  # most of its draws are beyond 1, without a slope
            gated.train()(ids(), labels=ids()).loss.backward()
        slopes = [p.grad.abs().max().item() for n, p in gated.named_parameters()
                  if "nanoheads" in n and p.grad is not None]
        assert max(slopes) > 1e-9, name
        assert gated.config.nanoheads and not hasattr(model.config, "nanoheads")
    changed = insert(copy.deepcopy(model), "head_norm", anyway=True)
    assert (before[1] - logits(changed, ids())).abs().max() > 1e-2


def test_gpt_neos_logits_stay_in_float32(hf):
    """They have no scale: large queries and keys that float16 would not hold."""
    model = tiny(hf, "gpt_neo", torch.float16)
    for place in dropin.places(model):
        place.attn.q_proj.weight.data.mul_(300)
        place.attn.k_proj.weight.data.mul_(300)
    before = [logits(model, ids(length=n)) for n in (T, 1)]
    insert(model, "acag")
    for n, want in zip((T, 1), before):
        assert want.isfinite().all() and (logits(model, ids(length=n)) - want).abs().max() < 1e-2


def test_sinks_start_below_what_the_model_does(hf):
    """At -12 a sink would take much of a row whose log-sum-exp is -8, and far below all it cannot learn."""
    for factor in (1, 5):
        model = tiny(hf, "gpt_neo", torch.float32)
        for place in dropin.places(model):
            place.attn.q_proj.weight.data.mul_(factor)
        before = logits(model, ids())
        insert(model.train(), "sink")(ids(), labels=ids()).loss.backward()
        assert model.training
        sinks = [m for m in model.modules() if isinstance(m, Sink)]
        assert (logits(model.eval(), ids()) - before).abs().max() < 1e-4
        assert all(sink.logit.grad.abs().max() > 0 for sink in sinks)
    for sink in sinks:
        sink.logit.data.fill_(-12)
    assert (logits(model, ids()) - before).abs().max() > 1e-2


@pytest.mark.parametrize("kind,dropout", [("gpt_neo", dict(resid_dropout=0.5, embed_dropout=0.3)),
                                          ("gpt2", dict(attn_pdrop=0.4, resid_pdrop=0.2))])
def test_dropout_stays_where_it_was(hf, kind, dropout):
    model = tiny(hf, kind, **dropout).train()

    def run():
        torch.manual_seed(3)
        return logits(model, ids(), REAL)[REAL.bool()]

    before = run()
    insert(model, "xsa")
    assert (run() - before).abs().max() < 1e-6 and model.training
    model.eval()
    assert (run() - before).abs().max() > 1e-2


@pytest.mark.slow
def test_gates_alone_can_be_trained(hf):
    model = insert(tiny(hf, "llama", torch.float32), ALL, sentinel_coef=0.1)
    trunk = {name: p.clone() for name, p in model.named_parameters() if "nanoheads" not in name}
    own = [p.requires_grad_("nanoheads" in name) for name, p in model.named_parameters()]
    optimizer, losses = torch.optim.Adam([p for p in own if p.requires_grad], 0.05), []
    model.train()
    for _ in range(30):
        loss = model(ids(), labels=ids()).loss
        extra = aux_losses(model)
        assert set(extra) == {"gate_l1", "routing_balance"}
        (loss + sum(extra.values())).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(p, trunk[name]) for name, p in model.named_parameters() if name in trunk)
    gate = SimpleNamespace(logit=torch.full((4,), 3.0), coef=0.1, hard=False)
    assert extra["gate_l1"] < 2 * Sentinel.penalty(gate)["gate_l1"]  # it has fallen, over two layers
    model.eval()(ids())
    assert aux_losses(model) == {}


def told(model, tokens, real, **more):
    """The logits of eight greedy steps, [B, 8, V]."""
    out = model.generate(tokens, attention_mask=real, max_new_tokens=8, min_new_tokens=8, do_sample=False,
                         output_logits=True, return_dict_in_generate=True, **more)
    return torch.stack(out.logits, 1)


def told_with_and_without_cache_and_padding(model):
    """(padded prompts, what the model says of them), once that is the same without a cache or padding."""
    tokens = ids() * REAL
    cached = told(model, tokens, REAL)
    assert (cached - told(model, tokens, REAL, use_cache=False)).abs().max() < 1e-6
    assert (cached[:1] - told(model, tokens[:1, 5:], REAL[:1, 5:])).abs().max() < 1e-6
    beams = [model.generate(tokens, attention_mask=REAL, num_beams=3, max_new_tokens=6, use_cache=cache)
             for cache in (True, False)]
    assert torch.equal(*beams)
    return tokens, cached


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo", "llama", "mistral", "qwen2", "gpt_neox"])
def test_generation_is_the_same_with_a_cache_and_with_padding(hf, kind):
    """Longer than the windows, random gates, a router that leaves heads out."""
    model = insert(tiny(hf, kind), ALL, anyway=True, routing_top_k=3)
    scatter(model, 0.5, only="nanoheads")
    tokens, cached = told_with_and_without_cache_and_padding(model)
    if kind != "gpt_neo":  # which takes none
        static = told(model, tokens, REAL, cache_implementation="static")
        assert (cached - static).abs().max() < 1e-6
    assert (cached - told(tiny(hf, kind), tokens, REAL)).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo", "llama"])
def test_models_with_gates_are_copied_compiled_and_checkpointed(hf, kind):
    model = insert(tiny(hf, kind), ALL)
    scatter(model, 0.5, only="nanoheads")
    model.train()(ids(), labels=ids()).loss.backward()
    slopes = {name: p.grad.clone() for name, p in model.named_parameters()}
    twin = copy.deepcopy(model)  # after a pass that left tensors of a graph behind
    twin.zero_grad()
    twin.gradient_checkpointing_enable()
    twin(ids(), labels=ids()).loss.backward()
    for name, p in twin.named_parameters():
        assert (p.grad - slopes[name]).abs().max() < 1e-9, name
    model.eval()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    # 2e-7 with torch 2.11
    assert (logits(compiled, ids(), REAL) - logits(model, ids(), REAL)).abs().max() < 1e-6
    places = [place.attn.nanoheads for place in dropin.places(twin)]
    originals = [m for m in model.modules() if isinstance(m, InsertedAttention)]
    assert len(originals) == len(places) == 2 and not set(originals) & set(places)
    assert all(gates.call is None for gates in (*originals, *places))  # no input is kept


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo", "llama"])
def test_gates_in_a_model_are_those_of_ours(hf, kind, tmp_path):
    """The same folder read into our GPT with the same flags and parameters: the same logits."""
    model = tiny(hf, kind, torch.float32)
    model.save_pretrained(tmp_path)
    insert(model, "acag,xsa,sink,routing_moh", anyway=True, routing_top_k=3)
    scatter(model, 0.5, only="nanoheads")
    state = checkpoint.read(tmp_path)
    here = GPT(checkpoint.config_of(state, tmp_path, **model.config.nanoheads)).eval()
    for name, p in model.named_parameters():
        if "nanoheads" in name:
            layer, tail = re.search(r"\.(\d)\..*nanoheads(.*)", name).groups()
            state["model"][f"transformer.h.{layer}.attn{tail}"] = p
    here.load_state_dict(state["model"])
    assert (here(ids()).logits - logits(model, ids())).abs().max() < 1e-4 * logits(model, ids()).abs().max()


def test_another_attention_would_lose_the_gates(hf):
    model = insert(tiny(hf, "llama"), "acag")
    model.set_attn_implementation("eager")
    with pytest.raises(UserError, match="eager"):
        logits(model, ids())
    model.set_attn_implementation("nanoheads")
    assert logits(model, ids()).isfinite().all()


def test_documents_in_one_row_do_not_see_each_other(hf):
    """Position ids that begin anew: transformers then masks one document from the next."""
    model = insert(tiny(hf, "llama"), ALL)
    scatter(model, 0.5, only="nanoheads")
    tokens, position = ids(1), torch.tensor([[*range(5), *range(7)]])
    both = logits(model, tokens, position_ids=position)
    assert (both[:, 5:] - logits(model, tokens[:, 5:])).abs().max() < 1e-9
    assert (both[:, 5:] - logits(model, tokens)[:, 5:]).abs().max() > 1e-3


# ---- files ----

@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_saved_and_loaded_a_model_is_the_same(hf, kind, tmp_path):
    model = insert(tiny(hf, kind, torch.float32), ALL + ",head_norm", anyway=True, routing_top_k=3)
    scatter(model, 0.5, only="nanoheads")
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = load(tmp_path)
    assert isinstance(again, type(model)) and not again.training
    assert type(copy.deepcopy(again)) is type(model) is type(pickle.loads(pickle.dumps(again)))
    assert torch.equal(logits(again, ids(), REAL), logits(model, ids(), REAL))
    assert again.config.nanoheads == model.config.nanoheads == json.loads(
        (tmp_path / "config.json").read_text())["nanoheads"]
    again.save_pretrained(tmp_path / "b")
    half = load(tmp_path / "b", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert (logits(half, ids()) - logits(model, ids())).abs().max() < 1


def test_a_model_without_its_gates_is_not_gated_again(hf, tmp_path):
    insert(tiny(hf, "gpt2", torch.float32), "acag").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="acag"):
        insert(hf.AutoModelForCausalLM.from_pretrained(tmp_path), "acag")


@pytest.mark.slow
def test_load_says_what_is_missing(hf, tmp_path):
    model = insert(tiny(hf, "gpt2", torch.float32), "acag")
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    config = json.loads((tmp_path / "config.json").read_text())

    def refused(words):
        with pytest.raises(UserError) as e:
            load(tmp_path)
        assert words in str(e.value) and "\n" not in str(e.value)

    (tmp_path / "config.json").write_text(json.dumps({**config, "nanoheads": {"acag": "elementwise"}}))
    refused("another size of the tensor transformer.h.0.attn.nanoheads.acag.bias")
    (tmp_path / "config.json").write_text(json.dumps({**config, "nanoheads": {"xsa": True}}))
    refused("xsa.strength")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["GPT3"]}))
    refused("GPT3")
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gpt3"}))
    refused("gpt3")
    (tmp_path / "config.json").write_text(json.dumps(config))
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-99])
    refused(str(tmp_path))
    shard.unlink()
    refused(shard.name)
    (tmp_path / "config.json").unlink()
    refused("config.json")


# ---- heads off ----

def test_masks_stay_with_gates_and_are_not_saved(hf):
    """By the original numbers; a new mask takes the old one's place."""
    model = tiny(hf, "gpt2")
    whole = logits(model, ids())
    mask_heads(model, {0: [0, 2], 1: [3]})
    want = logits(model, ids())
    assert (want - whole).abs().max() > 1e-3
    mask_heads(model, {1: [3]})
    assert (want - logits(model, ids())).abs().max() > 1e-3
    mask_heads(model, {0: [2, 0], 1: [3]})
    insert(model, ALL)
    assert (want - logits(model, ids())).abs().max() < 1e-4
    assert "head_mask" not in "".join(model.state_dict())
    for nothing in (None, {}):
        mask_heads(model, nothing)
        assert (whole - logits(model, ids())).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["gpt_neo", "llama", "qwen3"])
def test_heads_of_any_family_can_be_masked(hf, kind):
    """The same as their columns of the projection out at 0."""
    model = tiny(hf, kind)
    want, D = copy.deepcopy(model), 16 if kind == "qwen3" else 8
    dropin.places(want)[1].proj.weight.data[:, D:2 * D] = 0
    mask_heads(model, {1: [1]})
    assert (logits(want, ids()) - logits(model, ids())).abs().max() < 1e-12


# ---- bad input ----

def family(hf):
    return hf.AutoModelForCausalLM.from_config(hf.OPTConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16,
        max_position_embeddings=8, word_embed_proj_dim=16))


@pytest.mark.slow
@pytest.mark.parametrize("act,words", [
    (lambda m: insert(m, "acga"), "'acga'"),
    (lambda m: insert(m, "acag", acag_mod=1), "'acag_mod'"),
    (lambda m: insert(m, "acag", n_head=3), "'n_head'"),
    (lambda m: insert(m), "xsa, head_norm"),
    (lambda m: insert(m, ["value_residual", "acag"]), "value_residual"),
    (lambda m: insert(m, "window"), "window"),
    (lambda m: insert(m, "acag", acag_length=0), "acag_length=0"),
    (lambda m: insert(m, "head_norm"), "head_norm"),
    (lambda m: insert(m, "acag,routing_published"), "routing=published"),
    (lambda m: insert(m, "routing_moh", routing_top_k=2), "routing_top_k=2"),
    (lambda m: insert(m, "sentinel", sentinel_init=-9.0), "sentinel_init=-9.0"),
    (lambda m: insert(insert(m, "acag,xsa"), "sink"), "xsa, acag already"),
    (lambda m: mask_heads(m, {2: [0]}), "layer 2"),
    (lambda m: mask_heads(m, {1: [4]}), "head 4"),
    (lambda m: mask_heads(m, {0: [1], 1: [-1]}), "head -1"),
    (lambda m: mask_heads(m, {"0": [1]}), "layer '0'"),
])
def test_bad_input_is_one_clear_line_and_changes_nothing(hf, act, words):
    model = tiny(hf, "gpt2")
    names, before = list(model.state_dict()), logits(model, ids())
    with pytest.raises(UserError) as e:
        act(model)
    assert words in str(e.value) and "\n" not in str(e.value)
    if "already" not in words:
        assert list(model.state_dict()) == names and torch.equal(logits(model, ids()), before)
        assert not hasattr(model.config, "nanoheads")


def test_other_models_are_refused_by_name(hf):
    cross = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=V, n_embd=8, n_head=2, n_layer=1, n_positions=8,
                                             add_cross_attention=True))
    for model, words in ((family(hf), "OPTForCausalLM"),
                         (torch.nn.Linear(2, 2), "Linear"),
                         (cross, "cross-attention")):
        for act in (lambda m: insert(m, "acag"), lambda m: mask_heads(m, {0: [0]})):
            with pytest.raises(UserError, match=words):
                act(model)
    whole = tiny(hf, "gpt2")
    whole.transformer.h[1].attn.c_proj.weight = torch.nn.Parameter(torch.zeros(32, 32).char(), False)
    with pytest.raises(UserError, match="torch.int8"):
        insert(whole, "acag")


def test_masks_of_numbers_are_refused(hf):
    """Added to the logits they may be anything; who sees whom is what statistics count."""
    model = insert(tiny(hf, "gpt2"), "acag")
    seen = torch.ones(1, 1, T, T, dtype=torch.bool).tril()
    assert torch.equal(logits(model, ids(1), seen), logits(model, ids(1)))
    with pytest.raises(UserError, match="attention_mask"):
        logits(model, ids(1), torch.zeros(1, 1, T, T, dtype=torch.float64).masked_fill(~seen, -math.inf))


def test_without_transformers_layers_work_and_the_rest_says_so(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="transformers"):
        load(tmp_path)
    assert AdaptiveContextualAttention(16, 2, 8)(torch.zeros(1, 3, 16)).shape == (1, 3, 16)


@pytest.mark.parametrize("version", ["4.57.6", "5.3.0"])
def test_an_old_version_of_transformers_is_refused(version, hf, monkeypatch):
    """It calls masks in another way."""
    model = tiny(hf, "gpt2")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(UserError, match=f"transformers 5.4 and later, and here is {version}: pip install"):
        insert(model, "acag")
