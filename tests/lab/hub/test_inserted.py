"""Head states and constraint heads in models of transformers: against our own GPT."""

import copy
import pickle
import re

import pytest
import torch

from model import GPT
from nanoheads import checkpoint
from nanoheads.common import UserError
from lab.heads.states import find_violations, states_of
from lab.hub import dropin
from lab.hub.dropin import (FAMILIES, Control, aux_losses, insert, inserted_attention, load, mask_heads,
                            predictions)
from test_dropin import (REAL, T, V, hf, ids, logits, normal, scatter, told,  # noqa: F401 (hf is a fixture)
                         told_with_and_without_cache_and_padding)
from test_dropin import tiny as of_two_layers

STATES, CONSTRAINT = dict(agency=True), dict(constraint_names=["a", "b"], constraint_hidden=8)
TOGETHER = dict(**STATES, **CONSTRAINT, acag="headwise", xsa=True, constraint_heads=2,
                constraint_layers=[1, 2])
NEUTRAL = {
    "agency": STATES, "agency_learned": dict(**STATES, agency_learned=True),
    "constraint": CONSTRAINT, "constraint_published": dict(**CONSTRAINT, constraint_mode="published"),
    "constraint_value": dict(**CONSTRAINT, constraint_gate="value"),
    "constraint_score": dict(**CONSTRAINT, constraint_gate="score"),
    "constraint_first": dict(**CONSTRAINT, constraint_router_input="first"),
    "constraint_closed": dict(**CONSTRAINT, constraint_router="hard_concrete", constraint_skip=0.4),
    "together": TOGETHER,
}
KINDS = ["gpt2", "llama"]
PLACES = [(name, kind) for name in NEUTRAL for kind in KINDS]


def tiny(hf, kind, dtype=torch.float64, **more):  # noqa: F811
    """As in test_dropin.py, but of four layers."""
    layers = {"gpt2": dict(n_layer=4),
              "gpt_neo": dict(num_layers=4, attention_types=[[["global", "local"], 2]])}
    return of_two_layers(hf, kind, dtype, **{**layers.get(kind, dict(num_hidden_layers=4)), **more})


def random_insert(model, name):
    """With random values on all that is new, states of heads too."""
    insert(model, **NEUTRAL[name])
    scatter(model, 0.3, only="nanoheads")
    if "agency" in NEUTRAL[name]:
        control = Control(model)
        for layer, head, how in ((0, 1, dict(state="overloaded")), (1, 3, dict(state="misaligned")),
                                 (1, 0, dict(consent=False)), (3, 2, dict(state="withdrawn"))):
            control.set_state(layer, head, **how)
        for gates in inserted_attention(model).values():
            gates.agency.utilisation.copy_(torch.rand(gates.n_total))
            if gates.agency.learned:
                gates.agency.metrics.copy_(torch.rand(gates.n_total, 6))
    return model


def ours(model, state, folder):
    """Our GPT over the weights in a folder, with what is in `model` beyond them."""
    flags = model.config.nanoheads
    for name, t in model.state_dict().items():
        before, _, tail = name.partition("nanoheads.")
        if not tail:
            continue
        layer = re.search(r"\.(\d+)\.", before)
        state["model"][f"transformer.h.{layer[1]}.attn.{tail}" if layer else tail] = t
    config = checkpoint.config_of(state, folder, **flags)
    here = GPT(config).eval()
    there = {name: t.clone() for name, t in here.state_dict().items()}
    for name in set(there) - set(state["model"]):
        assert name.endswith("constraint.c_attn.bias"), name
        state["model"][name] = torch.zeros_like(there[name])
    here.load_state_dict(state["model"])
    return here


def far(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


# ---- what they compute ----

@pytest.mark.slow
@pytest.mark.parametrize("name, kind", PLACES)
def test_what_is_inserted_is_ours(hf, name, kind, tmp_path):  # noqa: F811
    """The same folder read into our GPT, with the same random values: the same logits."""
    model = tiny(hf, kind, torch.float32)
    model.save_pretrained(tmp_path)
    before = logits(model, ids())
    random_insert(model, name)
    here = ours(model, checkpoint.read(tmp_path), tmp_path)
    got, want = logits(model, ids()), here(ids()).logits
    assert far(got, want) < 1e-4
    assert far(before, want) > 1e-3  # and not by being off
    scores, expected = predictions(model), here.predictions(ids())
    assert scores.keys() == expected.keys() and bool(scores) is any(key in name for key in (
        "constraint", "together"))
    assert all(far(scores[key], want) < 1e-4 for key, want in expected.items())


def first_head(attn, kind):
    """(weight [3 D, C], bias or None) of the first head's query, key and value."""
    if kind == "gpt2":
        weights, biases = ([t[..., part * 32:part * 32 + 8].mT if t.dim() == 2 else t[part * 32:part * 32 + 8]
                            for part in range(3)] for t in (attn.c_attn.weight, attn.c_attn.bias))
        return torch.cat(weights), torch.cat(biases)
    if kind == "gpt_neox":
        return attn.query_key_value.weight[:24], attn.query_key_value.bias[:24]
    if kind == "phi3":  # 4 heads of queries, then 2 of keys, then 2 of values
        return torch.cat([attn.qkv_proj.weight[i:i + 8] for i in (0, 32, 48)]), None
    layers = [getattr(attn, f"{part}_proj") for part in "qkv"]
    D, bias = getattr(attn, "head_dim", 8), layers[0].bias
    return (torch.cat([layer.weight[:D] for layer in layers]),
            None if bias is None else torch.cat([layer.bias[:D] for layer in layers]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_constraint_head_attends_as_the_models_own_do(hf, kind):  # noqa: F811
    """One with the first head's projections and an open router: that head's output, doubled."""
    model = tiny(hf, kind)
    place = dropin.places(model)[2]
    if kind == "qwen2":  # biases of q, k and v alone, which constraint heads have not
        for part in "qkv":
            getattr(place.attn, f"{part}_proj").bias.data.zero_()
    doubled = copy.deepcopy(model)
    insert(model, constraint_names=["a"], constraint_router="hard_concrete")
    weight, D = dropin.places(doubled)[2].proj.weight.data, inserted_attention(model)[2].head_size
    column = (weight.T if kind == "gpt2" else weight)[:, :D]
    new = inserted_attention(model)[2].constraint
    new.out.bias.data.fill_(9.0)
    weight, bias = first_head(dropin.places(model)[2].attn, kind)
    new.c_attn.weight.data.copy_(weight)
    if new.c_attn.bias is not None:
        new.c_attn.bias.data.copy_(torch.zeros(3 * D) if bias is None else bias)
    new.c_proj.weight.data.copy_(column)
    before = logits(doubled, ids(), REAL)
    column.mul_(2)
    got, want = logits(model, ids(), REAL)[REAL.bool()], logits(doubled, ids(), REAL)[REAL.bool()]
    assert far(got, want) < 1e-6 and far(before[REAL.bool()], want) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_their_losses_are_ours(hf, kind, tmp_path):  # noqa: F811
    """Those of constraint scores and of their router, as in training; gradients too."""
    model = tiny(hf, kind, torch.float32)
    model.save_pretrained(tmp_path)
    insert(model, **TOGETHER, constraint_sparsity_coef=0.1, constraint_entropy_coef=0.1)
    scatter(model, 0.3, only="nanoheads")
    here = ours(model, checkpoint.read(tmp_path), tmp_path).train()
    labels = ids().masked_fill(torch.arange(T) < 3, -100)
    targets = {"a": torch.rand(2, T).round(), "b": torch.full((2, T), -1.0)}
    out = model.train()(ids(), labels=labels)
    got = aux_losses(model, targets)
    shifted = torch.cat((labels[:, 1:].clamp_min(-1), torch.full((2, 1), -1)), 1)
    want = here(ids(), shifted, constraint_targets=targets, logits=True)
    assert (out.loss - want.loss).abs() < 1e-5
    assert got.keys() == want.aux.keys() >= {"constraint.a", "constraint_router"}
    for name, loss in want.aux.items():
        assert (got[name] - loss).abs() < 1e-5 * loss.abs().clamp_min(1), name
    assert got["constraint.b"] == 0 < got["constraint.a"]
    wrapped = torch.nn.Sequential(model)  # as torch's and others' wrappers do
    assert aux_losses(wrapped, targets).keys() == got.keys()
    sum(got.values()).backward()
    sum(want.aux.values()).backward()
    slopes, mine = ([p.grad for n, p in m.named_parameters()
                     if n.endswith("w1")] for m in (here, model))
    assert len(slopes) == len(mine) == 2
    assert all(a.any() and min(far(a, b) for b in mine if b.shape == a.shape) < 1e-3 for a in slopes)
    model.eval()(ids())
    assert aux_losses(model) == {} and set(aux_losses(model, constraint_targets=targets)) == {
        "constraint.a", "constraint.b"}


# ---- in a model ----

@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_logits_stay_in_every_family(hf, kind):  # noqa: F811
    model = tiny(hf, kind, torch.float32)
    before = logits(model, ids(), REAL)[REAL.bool()]
    for name, flags in NEUTRAL.items():
        after = logits(insert(copy.deepcopy(model), **flags), ids(), REAL)[REAL.bool()]
        assert far(after, before) < 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize("name, kind", PLACES)
def test_training_reaches_all_that_is_new(hf, name, kind):  # noqa: F811
    """A few steps of AdamW with the trunk frozen, but where that can lower no loss by itself.

    States move by hand, learned or not.
    """
    model = insert(tiny(hf, kind, torch.float32), **NEUTRAL[name]).train()
    own = {n: p for n, p in model.named_parameters() if "nanoheads" in n}
    for gates in inserted_attention(model).values():
        if gates.agency is not None and gates.agency.learned:
            gates.agency.metrics.normal_()
    alone = "agency" not in name
    optimizer = torch.optim.AdamW(own.values() if alone else model.parameters(), 3e-2 if alone else 1e-2)
    targets = {"a": torch.ones(2, T), "b": torch.zeros(2, T)} if "constraint_names" in NEUTRAL[name] else None
    losses, reached = [], set()
    for _ in range(10):
        out = model(ids(), labels=ids())
        total = out.loss + sum(aux_losses(model, targets).values())
        total.backward()
        reached |= {n for n, p in own.items() if p.grad is not None and p.grad.abs().max() > 0}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    assert losses[-1] < losses[0]
    assert reached == own.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name, kind", PLACES)
def test_a_cache_and_padding_change_nothing(hf, name, kind):  # noqa: F811
    model = random_insert(tiny(hf, kind), name)
    tokens, cached = told_with_and_without_cache_and_padding(model)
    if "constraint_names" in NEUTRAL[name]:
        with pytest.raises(UserError, match="dynamic cache.*StaticLayer"):
            told(model, tokens, REAL, cache_implementation="static")
    else:
        static = told(model, tokens, REAL, cache_implementation="static")
        assert (cached - static).abs().max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in KINDS])
def test_a_cache_changes_nothing_in_other_families(hf, kind):  # noqa: F811
    """Windows, norms of queries, RoPE in part or none, keys of groups."""
    model = random_insert(tiny(hf, kind), "together")
    tokens = ids() * REAL
    cached = told(model, tokens, REAL)
    assert (cached - told(model, tokens, REAL, use_cache=False)).abs().max() < 1e-6
    assert (cached[:1] - told(model, tokens[:1, 5:], REAL[:1, 5:])).abs().max() < 1e-6


@pytest.mark.slow
def test_a_cache_made_by_hand_is_taken(hf):  # noqa: F811
    """One that makes its layers as it needs them, token by token."""
    model, cache = random_insert(tiny(hf, "llama"), "together"), hf.DynamicCache()
    with torch.no_grad():
        steps = [model(token, past_key_values=cache).logits for token in ids().split(1, 1)]
    assert (torch.cat(steps, 1) - logits(model, ids())).abs().max() < 1e-9
    assert cache.layers[0].keys.size(1) == 2 and cache.layers[1].keys.size(1) == 4 + 4 + 2


@pytest.mark.parametrize("router", ["mean", "first"])
def test_a_router_reads_its_own_document_alone(hf, router):  # noqa: F811
    model = insert(tiny(hf, "llama"), **CONSTRAINT, constraint_router_input=router)
    scatter(model, 0.5, only="nanoheads")
    tokens, position = ids(1), torch.tensor([[*range(5), *range(7)]])
    both = logits(model, tokens, position_ids=position)
    assert (both[:, 5:] - logits(model, tokens[:, 5:])).abs().max() < 1e-9
    assert (both[:, 5:] - logits(model, tokens)[:, 5:]).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo", "llama"])
def test_models_are_copied_pickled_compiled_and_checkpointed(hf, kind):  # noqa: F811
    model = random_insert(tiny(hf, kind), "together")

    def slopes(m):
        m.zero_grad()
        out = m.train()(ids(), labels=ids())
        (out.loss + sum(aux_losses(m).values())).backward()
        return {name: p.grad for name, p in m.named_parameters()}

    want, twin = slopes(model), copy.deepcopy(model)
    twin.gradient_checkpointing_enable()
    for name, grad in slopes(twin).items():
        assert (grad is None) == (want[name] is None), name
        assert grad is None or (grad - want[name]).abs().max() < 1e-9, name
    model.eval()
    for same in (twin.eval(), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(same, ids(), REAL), logits(model, ids(), REAL))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert (logits(compiled, ids(), REAL) - logits(model, ids(), REAL)).abs().max() < 1e-6
    scatter(twin, 0.3, only="nanoheads")  # a copy is on its own
    assert (logits(twin, ids()) - logits(model, ids())).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name, kind", PLACES)
def test_saved_and_loaded_a_model_is_the_same(hf, name, kind, tmp_path):  # noqa: F811
    model = random_insert(tiny(hf, kind, torch.float32), name)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    state, there = model.state_dict(), again.state_dict()
    assert state.keys() == there.keys() and all(torch.equal(t, there[key]) for key, t in state.items())
    assert torch.equal(logits(again, ids(), REAL), logits(model, ids(), REAL))
    assert again.config.nanoheads == model.config.nanoheads
    for same in (copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        assert torch.equal(logits(same, ids(), REAL), logits(model, ids(), REAL))
    half = load(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16} and logits(half, ids()).isfinite().all()
    assert half.generate(ids(), max_new_tokens=2).shape == (2, T + 2)


def test_a_flag_that_left_is_read_over_where_it_changes_nothing(hf, tmp_path):  # noqa: F811
    model = insert(tiny(hf, "gpt2", torch.float32), "agency")
    for value in ("mlp", "head"):
        model.config.nanoheads["agency_scope"] = value
        model.save_pretrained(tmp_path)
        if value == "mlp":
            with pytest.raises(UserError, match="no flag 'agency_scope'"):
                load(tmp_path)
    assert torch.equal(logits(load(tmp_path), ids(), REAL), logits(model, ids(), REAL))


# ---- heads by hand, and off ----

@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_a_factor_and_consent_is_kept(hf, kind):  # noqa: F811
    model = tiny(hf, kind)
    masked, halved = copy.deepcopy(model), copy.deepcopy(model)
    insert(model, "agency,sentinel_l0")
    control = Control(model)
    control.set_state(1, 2, state="withdrawn", step=7)
    mask_heads(masked, {1: [2]})
    assert far(logits(model, ids()), logits(masked, ids())) < 1e-6
    assert states_of(control)[1, 2] == "withdrawn" and states_of(control)[1, 1] == "active"
    row, = find_violations(control)
    assert (row["layer"], row["head"], row["type"]) == (1, 2, "blocked")
    control.set_state(1, 2, state="overloaded", step=7)
    weight = dropin.places(halved)[1].proj.weight.data
    (weight if kind == "llama" else weight.T)[:, 16:24] *= 0.5
    assert far(logits(model, ids()), logits(halved, ids())) < 1e-6
    assert find_violations(control) == []
    gates = inserted_attention(model)[1]
    assert gates.agency.last_signal.tolist() == [0, 0, 7, 0] and gates.agency.consent[2]
    control.set_state(1, 2, state="active")
    control.set_gate(1, 2, 0.5)
    assert far(logits(model, ids()), logits(halved, ids())) < 1e-6


def test_constraint_heads_can_be_turned_off_by_number(hf):  # noqa: F811
    model = insert(tiny(hf, "gpt2"), **CONSTRAINT)
    before = logits(model, ids())
    scatter(model, 0.5, only="nanoheads")
    assert far(logits(model, ids()), before) > 1e-3
    for head in (4, 5):
        Control(model).set_gate(2, head, 0.0)
    assert torch.equal(logits(model, ids()), before)


# ---- bad input ----

@pytest.mark.slow
@pytest.mark.parametrize("kind, act, words", [
    ("gpt2", lambda m: insert(m, "a2c_temperature"), "a2c cannot be inserted"),
    ("gpt2", lambda m: insert(m, "acag,unet_concat"), "unet cannot be inserted"),
    ("gpt2", lambda m: insert(m, "constraint_b"), "constraint_variant='B'"),
    ("gpt2", lambda m: insert(m, "constraint_a", constraint_stop=9), "constraint_stop=9"),
    ("gpt2", lambda m: insert(m, "constraint_a", constraint_layers=[4]), "constraint_layers=[4]"),
    ("gpt2", lambda m: insert(m, "constraint_a", constraint_names=["a", "a"]), "constraint_names=['a', 'a']"),
    ("gpt2", lambda m: insert(m, agency_learned=True), "agency"),
    ("gpt2", lambda m: Control(m), "no gates"),
])
def test_bad_input_is_one_clear_line_and_changes_nothing(hf, kind, act, words):  # noqa: F811
    model = tiny(hf, kind)
    names, before = list(model.state_dict()), logits(model, ids())
    with pytest.raises(UserError) as e:
        act(model)
    assert words in str(e.value) and "\n" not in str(e.value)
    assert list(model.state_dict()) == names and torch.equal(logits(model, ids()), before)
    assert not hasattr(model.config, "nanoheads")


@pytest.mark.slow
def test_what_is_asked_of_a_model_without_it_is_one_clear_line(hf):  # noqa: F811
    model = insert(tiny(hf, "gpt2"), "constraint_a").train()
    model(ids(), labels=ids())
    for act, words in ((lambda: aux_losses(model, {"c": ids()}), "['c']"),
                       (lambda: aux_losses(insert(tiny(hf, "gpt2"), "acag"), constraint_targets={"a": ids()}),
                        "insert some"),
                       (lambda: aux_losses(insert(tiny(hf, "gpt2"), **CONSTRAINT),
                                           constraint_targets={"a": ids()}), "call the model before"),
                       (lambda: Control(model).set_gate(4, 0, 1), "no block 4"),
                       (lambda: Control(model).set_gate(0, 4, 1), "no head 4"),
                       (lambda: Control(model).set_state(0, 0, state="active"), "agency off"),
                       (lambda: insert(model, "acag"), "already")):
        with pytest.raises(UserError) as e:
            act()
        assert words in str(e.value) and "\n" not in str(e.value)
    dropping = tiny(hf, "llama", attention_dropout=0.1)
    with pytest.raises(UserError, match="constraint_gate='score'"):
        insert(dropping, **CONSTRAINT, constraint_gate="score")
