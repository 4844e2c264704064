"""
Mechanisms in Hugging Face models, compared with our own GPT over the same weights, and in a model's use.
"""

import copy
import inspect
import itertools
import json
import math
import pickle
import re
import sys

import pytest
import torch
from torch import nn

from model import GPT, Sink
from nanoheads import checkpoint
from nanoheads.common import UserError
from lab.heads.states import find_violations, states_of
from lab.hub import dropin
from lab.hub.dropin import (FAMILIES, INSERTABLE, Control, aux_losses, insert, inserted_attention, load,
                            mask_heads, predictions)

V, T = 61, 12
REAL = (torch.arange(T) >= torch.tensor([[5], [0]])).long()  # two rows, the first with five tokens of padding
GATES = "xsa,routing_moh,sentinel,output_gate,acag,sink"
CONSTRAINT = dict(constraint_names=["a", "b"], constraint_hidden=8)
EVERYTHING = dict(mechanisms=GATES + ",agency_learned", constraint_heads=2, **CONSTRAINT)
# what insert() is given: every mode of every mechanism by itself, and one mode of each together
ALONE = [dict(mechanisms=name) for cls in INSERTABLE if cls.flag != "constraint_names" for name in cls.modes]
ALONE += [dict(CONSTRAINT, **more) for more in (
    {}, dict(constraint_mode="published"), dict(constraint_gate="value"), dict(constraint_gate="score"),
    dict(constraint_router_input="first"), dict(constraint_router="hard_concrete", constraint_skip=0.4))]
COUNT = max(len(cls.modes) for cls in INSERTABLE)
OWN_HEADS = [dict(mechanisms=names) for names in itertools.islice(
    zip(*(itertools.cycle(cls.modes) for cls in INSERTABLE if cls.flag != "constraint_names")), COUNT)]
TOGETHER = [dict(what, constraint_heads=2, **CONSTRAINT) for what in OWN_HEADS]
ONLY_IN_TRAINING = "routing_published", "routing_train_only", "sentinel_l0"
NOT_NEUTRAL = "head_norm", "routing_published", "routing_train_only"


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
    return module


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
                      "smollm3": dict(no_rope_layers=[1, 0]),  # the second layer has no positions
                      "phi3": dict(attention_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0),
                      "qwen2": dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
                      "starcoder2": dict(attention_dropout=0.0, residual_dropout=0.0,
                                         embedding_dropout=0.0)}.get(kind, {}))
    torch.manual_seed(0)
    config = hf.AutoConfig.for_model(kind, **{**sizes, **tokens, **more})
    return scatter(hf.AutoModelForCausalLM.from_config(config).to(dtype).eval(), 0.1)


def random_insert(model, scale=0.3, **what):
    """insert() with random values on all that is new, states of heads too."""
    names = str(what.get("mechanisms", ""))
    few = dict(routing_top_k=3) if "routing" in names or "moh" in names else {}
    insert(model, anyway=True, **what, **few)
    scatter(model, scale, only="nanoheads")
    for m in model.modules():
        if isinstance(m, Sink):  # from where it changes nothing to where it takes a share
            m.logit.data.add_(12)
    if "agency" in names:
        control = Control(model)
        for layer, head, how in ((0, 1, dict(state="overloaded")), (0, 3, dict(state="misaligned")),
                                 (1, 0, dict(consent=False)), (1, 2, dict(state="withdrawn"))):
            control.set_state(layer, head, **how)
        for gates in inserted_attention(model).values():
            gates.agency.utilisation.copy_(torch.rand(gates.n_total))
            if gates.agency.learned:
                gates.agency.metrics.copy_(torch.rand(gates.n_total, 6))
    return model


def logits(model, tokens, real=None, **more):
    with torch.no_grad():
        return model(tokens, attention_mask=real, use_cache=False, **more).logits


def far(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


# ---- what they compute ----

def in_ours(name):
    """The name in our GPT of a parameter or buffer that was inserted, or None."""
    before, _, tail = name.partition("nanoheads.")
    layer = re.search(r"\.(\d+)\.", before)
    return tail and (f"transformer.h.{layer[1]}.attn.{tail}" if layer else tail)


def ours(model, state, **more):
    """Our GPT over the weights that were read from a folder, with what is in `model` beyond them.

    insert() scales a model's projections out, to make up for gates: these are taken from the model, too.
    """
    here = GPT(checkpoint.config_of(state, "folder", **model.config.nanoheads, **more)).double().eval()
    extra = {in_ours(name): t for name, t in model.state_dict().items() if in_ours(name)}
    biases = {name: torch.zeros_like(t) for name, t in here.state_dict().items()
              if name.endswith("constraint.c_attn.bias")}  # our GPT with biases has these, too
    projs = {f"transformer.h.{i}.attn.c_proj.weight": proj.weight if isinstance(proj, nn.Linear)
             else proj.weight.T for i, (*_, proj) in enumerate(dropin.places(model))}
    here.load_state_dict({**biases, **state["model"], **extra, **projs})
    return here


@pytest.mark.slow
@pytest.mark.parametrize("kind, cases", [
    ("gpt2", ALONE), ("gpt2", TOGETHER), ("llama", TOGETHER),
    # with windows, or without a scale of scores, constraint heads are not our GPT's but as the model's own
    ("gpt_neo", OWN_HEADS[:4]), ("mistral", OWN_HEADS[:4])],
    ids=["gpt2, alone", "gpt2", "llama", "gpt_neo", "mistral"])
def test_what_is_inserted_computes_what_our_gpt_does(hf, kind, cases, tmp_path):
    """Logits, scores of constraint heads, losses and gradients, in evaluation, training and a padded batch.

    Our GPT reads the model's own folder, and takes the same random values for what is new.
    """
    plain = tiny(hf, kind, torch.float32)
    plain.save_pretrained(tmp_path)
    window = dict(window=plain.config.sliding_window) if kind == "mistral" else {}
    if window:  # which our GPT has, but does not read from a config
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": None}))
    state, before = checkpoint.read(tmp_path), logits(plain, ids())
    labels = ids().masked_fill(torch.arange(T) < 3, -100)
    shifted = torch.cat((labels[:, 1:].clamp_min(-1), torch.full((2, 1), -1)), 1)
    targets = {"a": torch.rand(2, T).round(), "b": torch.full((2, T), -1.0)}
    for what in cases:
        model = random_insert(copy.deepcopy(plain).double(), **what)
        here = ours(model, state, **window)
        got, want = logits(model, ids()), here(ids()).logits
        assert far(got, want) < 1e-5, what
        assert far(before, want) > 1e-3 or what.get("mechanisms") in ONLY_IN_TRAINING, what
        scores, expected = predictions(model), here.predictions(ids())
        assert scores.keys() == expected.keys() and bool(scores) is ("constraint_names" in what)
        assert all(far(scores[key], t) < 1e-5 for key, t in expected.items()), what
        places = (REAL.cumsum(1) - 1).clamp_min(0)
        padded = logits(model, ids() * REAL, REAL, position_ids=places)
        assert far(padded[:1, 5:], here(ids()[:1, 5:]).logits) < 1e-5, what
        assert far(padded[1], want[1]) < 1e-5, what

        known, results = targets if scores else None, []
        torch.manual_seed(3)  # of the noise of gates
        loss = model.train()(ids(), labels=labels).loss
        results.append((loss, aux_losses(model, known)))
        torch.manual_seed(3)
        out = here.train()(ids(), shifted, constraint_targets=known, logits=True)
        results.append((out.loss, out.aux))
        for loss, aux in results:
            (loss + sum(aux.values())).backward()
        (loss, aux), (wanted, wanted_aux) = results
        assert (loss - wanted).abs() < 1e-5 and aux.keys() == wanted_aux.keys(), what
        assert all((aux[key] - t).abs() < 1e-5 * t.abs().clamp_min(1) for key, t in wanted_aux.items()), what
        slopes = {in_ours(name): p.grad for name, p in model.named_parameters() if in_ours(name)}
        slopes["transformer.wte.weight"] = model.get_input_embeddings().weight.grad
        for name, slope in slopes.items():
            want = here.get_parameter(name).grad
            assert (slope is None) == (want is None), (what, name)
            assert want is None or (slope - want).abs().max() < 1e-4 * (1 + want.abs().max()), (what, name)


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
def test_a_constraint_head_attends_as_the_models_own_do(hf, kind):
    """One with the first head's projections and an open router: that head's output, doubled."""
    model = tiny(hf, kind)
    attn = dropin.places(model)[1].attn
    if kind == "qwen2":  # biases of q, k and v alone, which constraint heads have not
        for part in "qkv":
            getattr(attn, f"{part}_proj").bias.data.zero_()
    doubled = copy.deepcopy(model)
    insert(model, constraint_names=["a"], constraint_router="hard_concrete", constraint_layers=[1])
    inserted = inserted_attention(model)[1]
    new, D = inserted.constraint, inserted.head_size
    weight = dropin.places(doubled)[1].proj.weight.data
    column = (weight.T if kind == "gpt2" else weight)[:, :D]
    new.out.bias.data.fill_(9.0)
    weight, bias = first_head(dropin.places(model)[1].attn, kind)
    new.c_attn.weight.data.copy_(weight)
    if new.c_attn.bias is not None:
        new.c_attn.bias.data.copy_(torch.zeros(3 * D) if bias is None else bias)
    new.c_proj.weight.data.copy_(column)
    before = logits(doubled, ids(), REAL)
    column.mul_(2)
    got, want = logits(model, ids(), REAL)[REAL.bool()], logits(doubled, ids(), REAL)[REAL.bool()]
    assert far(got, want) < 1e-6 and far(before[REAL.bool()], want) > 1e-3


@pytest.mark.slow
def test_statistics_are_those_before_dropout(hf):
    """A gate multiplies what dropout has left of a head by what it is without dropout."""
    plain = tiny(hf, "gpt2", attn_pdrop=0.4)
    gated = scatter(insert(copy.deepcopy(plain), "acag,sink"), 0.5, only="nanoheads")

    def sent(model, train):
        """What the first layer's heads put out."""
        found = []
        hook = dropin.places(model)[0].proj.register_forward_pre_hook(lambda m, args: found.append(args[0]))
        torch.manual_seed(0)
        logits(model.train(train), ids(), REAL)
        hook.remove()
        return found[0][REAL.bool()]

    want = sent(plain, True) * sent(gated, False) / sent(plain, False)
    assert far(sent(gated, True), want) < 1e-9
    assert far(sent(gated, False), want) > 1e-2


# ---- neutral, and learning ----

@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_logits_stay_and_what_is_new_can_learn(hf, kind):
    model = tiny(hf, kind, torch.float32)
    before = [logits(model, ids(), real)[REAL.bool()] for real in (REAL, None)]
    each = [what for what in ALONE if what.get("mechanisms") not in NOT_NEUTRAL] if kind == "gpt2" else []
    for what in (EVERYTHING, *each):
        changed = insert(copy.deepcopy(model), **what)
        for want, real in zip(before, (REAL, None)):
            assert (logits(changed, ids(), real)[REAL.bool()] - want).abs().max() < 1e-4, what
        for _ in range(9 if "sentinel_l0" in what.values() else 1):  # most of its draws have no slope
            changed.train()(ids(), labels=ids()).loss.backward()
        slopes = [p.grad.abs().max() for n, p in changed.named_parameters()
                  if "nanoheads" in n and p.grad is not None]
        assert what == dict(mechanisms="agency") or max(slopes) > 1e-9, what
    assert changed.config.nanoheads and not hasattr(model.config, "nanoheads")
    changed = insert(copy.deepcopy(model), "head_norm", anyway=True)
    assert (before[1] - logits(changed, ids())[REAL.bool()]).abs().max() > 1e-2


@pytest.mark.slow
def test_what_is_new_can_be_trained_alone(hf):
    model = insert(tiny(hf, "llama", torch.float32), **EVERYTHING, sentinel_coef=0.1).train()
    own = {name: p for name, p in model.named_parameters() if "nanoheads" in name}
    trunk = {name: p.clone() for name, p in model.named_parameters() if name not in own}
    for gates in inserted_attention(model).values():
        gates.agency.metrics.normal_()
    optimizer = torch.optim.AdamW(own.values(), 3e-2)
    targets, losses, reached = {"a": torch.ones(2, T), "b": torch.zeros(2, T)}, [], set()
    for _ in range(12):
        loss, aux = model(ids(), labels=ids()).loss, aux_losses(model, targets)
        (loss + sum(aux.values())).backward()
        reached |= {name for name, p in own.items() if p.grad is not None and p.grad.any()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), *(t.item() for t in aux.values())))
    assert list(aux) == list(aux_losses(nn.Sequential(model), targets))  # in another's wrapper, too
    assert {"gate_l1", "routing_balance", "constraint.a", "constraint.b"} <= aux.keys()
    assert reached == own.keys()
    assert losses[-1][0] < losses[0][0] - 0.1 and sum(losses[-1]) < sum(losses[0])
    assert all(torch.equal(p, trunk[name]) for name, p in model.named_parameters() if name in trunk)
    model.eval()(ids())
    assert aux_losses(model) == {} and set(aux_losses(model, targets)) == {"constraint.a", "constraint.b"}


def test_gpt_neos_logits_stay_in_float32(hf):
    """They have no scale: large queries and keys that float16 would not hold."""
    model = tiny(hf, "gpt_neo", torch.float16)
    for place in dropin.places(model):
        place.attn.q_proj.weight.data.mul_(300)
        place.attn.k_proj.weight.data.mul_(300)
    before = logits(model, ids())
    assert before.isfinite().all() and (logits(insert(model, "acag"), ids()) - before).abs().max() < 1e-2


def test_sinks_start_where_they_change_nothing_and_can_learn(hf):
    """At -12 a sink would take much of a row whose log-sum-exp is low, and far below all it cannot learn."""
    for factor in (1, 5):
        model = tiny(hf, "gpt_neo", torch.float32)
        for place in dropin.places(model):
            place.attn.q_proj.weight.data.mul_(factor)
        before = logits(model, ids())
        insert(model.train(), "sink")(ids(), labels=ids()).loss.backward()
        sinks = [m for m in model.modules() if isinstance(m, Sink)]
        assert model.training and all(sink.logit.grad.abs().max() > 0 for sink in sinks)
        assert (logits(model.eval(), ids()) - before).abs().max() < 1e-4
    for sink in sinks:
        sink.logit.data.fill_(-12)
    assert (logits(model, ids()) - before).abs().max() > 1e-2


@pytest.mark.parametrize("kind, dropout", [("gpt_neo", dict(resid_dropout=0.5, embed_dropout=0.3)),
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


# ---- as models of transformers are used ----

def told(model, tokens, real, **more):
    """The logits of eight greedy steps, [B, 8, V]."""
    out = model.generate(tokens, attention_mask=real, max_new_tokens=8, min_new_tokens=8, do_sample=False,
                         output_logits=True, return_dict_in_generate=True, **more)
    return torch.stack(out.logits, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_cache_and_padding_change_nothing(hf, kind):
    """Longer than the windows, with a router that leaves heads out; beams, and a cache of fixed size."""
    model, tokens = random_insert(tiny(hf, kind), **EVERYTHING), ids() * REAL
    cached = told(model, tokens, REAL)
    assert (cached - told(model, tokens, REAL, use_cache=False)).abs().max() < 1e-6
    assert (cached[:1] - told(model, tokens[:1, 5:], REAL[:1, 5:])).abs().max() < 1e-6
    assert (cached - told(tiny(hf, kind), tokens, REAL)).abs().max() > 1e-2
    if kind not in ("gpt2", "llama", "mistral"):
        return
    beams = [model.generate(tokens, attention_mask=REAL, num_beams=3, max_new_tokens=6, use_cache=cache)
             for cache in (True, False)]
    assert torch.equal(*beams)
    with pytest.raises(UserError, match="dynamic cache.*Static.*Layer"):
        told(model, tokens, REAL, cache_implementation="static")
    gated = random_insert(tiny(hf, kind), mechanisms=GATES)
    static = told(gated, tokens, REAL, cache_implementation="static")
    assert (told(gated, tokens, REAL, use_cache=False) - static).abs().max() < 1e-6


def test_a_cache_made_by_hand_is_taken(hf):
    """One that makes its layers as it needs them, token by token."""
    model, cache = random_insert(tiny(hf, "llama"), **EVERYTHING), hf.DynamicCache()
    names = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in names else "past_key_values"  # the former since 5.24
    with torch.no_grad():
        steps = [model(token, **{name: cache}).logits for token in ids().split(1, 1)]
    assert (torch.cat(steps, 1) - logits(model, ids())).abs().max() < 1e-9


@pytest.mark.parametrize("router", ["mean", "first"])
def test_documents_in_one_row_do_not_see_each_other(hf, router):
    """Position ids that begin anew: transformers then masks one document from the next."""
    model = random_insert(tiny(hf, "llama"), **EVERYTHING, constraint_router_input=router)
    tokens, position = ids(1), torch.tensor([[*range(5), *range(7)]])
    both = logits(model, tokens, position_ids=position)
    assert (both[:, 5:] - logits(model, tokens[:, 5:])).abs().max() < 1e-9
    assert (both[:, 5:] - logits(model, tokens)[:, 5:]).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_models_are_copied_pickled_and_checkpointed(hf, kind):
    model = random_insert(tiny(hf, kind), **EVERYTHING)

    def slopes(m):
        m.zero_grad()
        out = m.train()(ids(), labels=ids())
        (out.loss + sum(aux_losses(m).values())).backward()
        return {name: p.grad for name, p in m.named_parameters()}

    want, twin = slopes(model), copy.deepcopy(model)  # after a pass that left tensors of a graph behind
    enable = getattr(twin, "activation_checkpointing_enable", None) or twin.gradient_checkpointing_enable
    enable()
    for name, grad in slopes(twin).items():
        assert (grad is None) == (want[name] is None), name
        assert grad is None or (grad - want[name]).abs().max() < 1e-9, name
    model.eval()
    for same in (twin.eval(), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(same, ids(), REAL), logits(model, ids(), REAL))
    scatter(twin, 0.3, only="nanoheads")  # a copy is on its own
    assert (logits(twin, ids()) - logits(model, ids())).abs().max() > 1e-3


@pytest.mark.slow
def test_models_are_compiled_without_a_break(hf):
    model = insert(tiny(hf, "llama", num_hidden_layers=1), **EVERYTHING, constraint_layers=[0])
    scatter(model, 0.3, only="nanoheads")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert (logits(compiled, ids(), REAL) - logits(model, ids(), REAL)).abs().max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo", "phi3"])
def test_saved_and_loaded_a_model_is_the_same(hf, kind, tmp_path):
    model = random_insert(tiny(hf, kind, torch.float32), **EVERYTHING)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = load(tmp_path)
    state, there = model.state_dict(), again.state_dict()
    assert state.keys() == there.keys() and all(torch.equal(t, there[key]) for key, t in state.items())
    assert isinstance(again, type(model)) and not again.training
    assert again.config.nanoheads == model.config.nanoheads
    for same in (again, copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        assert torch.equal(logits(same, ids(), REAL), logits(model, ids(), REAL))
        assert same is again or type(same) is type(model)
    again.save_pretrained(tmp_path / "b")
    half = load(tmp_path / "b", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert (logits(half, ids()) - logits(model, ids())).abs().max() < 1
    assert half.generate(ids(), max_new_tokens=2).shape == (2, T + 2)


# ---- heads by hand, and off ----

def test_masks_of_heads_are_zeros_that_stay_with_gates_and_are_not_saved(hf):
    """Of any family, by the original numbers; a new mask takes the old one's place."""
    for kind in ("gpt2", "gpt_neo", "llama", "qwen3"):
        model = tiny(hf, kind)
        whole, want, D = logits(model, ids()), copy.deepcopy(model), 16 if kind == "qwen3" else 8
        weight = dropin.places(want)[1].proj.weight.data
        (weight.T if kind == "gpt2" else weight)[:, D:2 * D] = 0
        mask_heads(model, {0: [0, 2], 1: [3]})
        assert far(logits(model, ids()), logits(want, ids())) > 1e-4
        mask_heads(model, {1: [1]})
        assert far(logits(model, ids()), logits(want, ids())) < 1e-12
    insert(model, GATES)
    assert far(logits(model, ids()), logits(want, ids())) < 1e-4
    assert "head_mask" not in "".join(model.state_dict())
    for nothing in (None, {}):
        mask_heads(model, nothing)
        assert far(logits(model, ids()), whole) < 1e-4


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_state_is_a_factor_and_consent_is_kept(hf, kind):
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
    agency = inserted_attention(model)[1].agency
    assert agency.last_signal.tolist() == [0, 0, 7, 0] and agency.consent[2]
    control.set_state(1, 2, state="active")
    control.set_gate(1, 2, 0.5)
    assert far(logits(model, ids()), logits(halved, ids())) < 1e-6


def test_constraint_heads_are_turned_off_by_the_numbers_after_the_models_own(hf):
    model = insert(tiny(hf, "gpt2"), **CONSTRAINT, constraint_layers=[1])
    before = logits(model, ids())
    scatter(model, 0.5, only="nanoheads")
    assert far(logits(model, ids()), before) > 1e-3
    for head in (4, 5):
        Control(model).set_gate(1, head, 0.0)
    assert torch.equal(logits(model, ids()), before)


# ---- bad input ----

def said_by(act):
    with pytest.raises(UserError) as e:
        act()
    assert "\n" not in str(e.value)
    return str(e.value)


@pytest.mark.parametrize("act, words", [
    (lambda m: insert(m, "acga"), "'acga'"),
    (lambda m: insert(m, "acag", acag_mod=1), "'acag_mod'"),
    (lambda m: insert(m), "nothing to insert; there are xsa, head_norm"),
    (lambda m: insert(m, ["value_residual", "acag"]), "value_residual cannot be inserted"),
    (lambda m: insert(m, "acag", acag_length=0), "acag_length=0"),
    (lambda m: insert(m, "constraint_b"), "constraint_variant='B'"),
    (lambda m: insert(m, "head_norm"), "head_norm has no neutral setting"),
    (lambda m: insert(m, "routing_moh", routing_top_k=2), "routing_top_k=2"),
    (lambda m: insert(m, "sentinel", sentinel_init=-9.0), "sentinel_init=-9.0"),
    (lambda m: mask_heads(m, {2: [0]}), "layer 2"),
    (lambda m: mask_heads(m, {1: [4]}), "head 4"),
    (lambda m: Control(m), "no gates"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_inserted_is_one_line_and_changes_nothing(hf, act, words):
    model = tiny(hf, "gpt2")
    names, before = list(model.state_dict()), logits(model, ids())
    assert words in said_by(lambda: act(model))
    assert list(model.state_dict()) == names and torch.equal(logits(model, ids()), before)
    assert not hasattr(model.config, "nanoheads")


def test_what_is_asked_of_an_inserted_model_and_cannot_be_is_one_line(hf):
    model = insert(tiny(hf, "gpt2"), "constraint_a,acag").train()
    assert "call the model before" in said_by(lambda: aux_losses(model, {"reciprocity": ids()}))
    model(ids(), labels=ids())
    seen = torch.ones(1, 1, T, T, dtype=torch.bool).tril()
    added = torch.zeros(1, 1, T, T, dtype=torch.float64).masked_fill(~seen, -math.inf)
    gated = insert(tiny(hf, "gpt2"), "acag")
    assert torch.equal(logits(gated, ids(1), seen), logits(gated, ids(1)))
    for act, words in (
            (lambda: aux_losses(model, {"c": ids()}), "['c']"),
            (lambda: aux_losses(gated, {"a": ids()}), "insert some"),
            (lambda: Control(model).set_gate(2, 0, 1), "no block 2"),
            (lambda: Control(model).set_state(0, 0, state="active"), "agency off"),
            (lambda: insert(gated, "sink"), "acag already"),
            (lambda: logits(gated, ids(1), added), "give an attention_mask of 0 and 1"),
            (lambda: insert(tiny(hf, "llama", attention_dropout=0.1), **CONSTRAINT, constraint_gate="score"),
             "constraint_gate='score'")):
        assert words in said_by(act)
    gated.set_attn_implementation("eager")
    assert "set_attn_implementation('nanoheads')" in said_by(lambda: logits(gated, ids()))
    gated.set_attn_implementation("nanoheads")
    assert logits(gated, ids()).isfinite().all()


def test_other_models_are_refused_by_name(hf):
    opt = hf.AutoModelForCausalLM.from_config(hf.OPTConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16,
        max_position_embeddings=8, word_embed_proj_dim=16))
    cross = tiny(hf, "gpt2", add_cross_attention=True)
    for model, words in ((opt, "OPTForCausalLM"), (nn.Linear(2, 2), "Linear"),
                         (cross, "cross-attention")):
        for act in (lambda: insert(model, "acag"), lambda: mask_heads(model, {0: [0]})):
            assert words in said_by(act)
    whole = tiny(hf, "gpt2")
    whole.transformer.h[1].attn.c_proj.weight = nn.Parameter(torch.zeros(32, 32).char(), False)
    assert "torch.int8" in said_by(lambda: insert(whole, "acag"))


@pytest.mark.slow
def test_load_says_what_is_missing(hf, tmp_path):
    insert(tiny(hf, "gpt2", torch.float32), "acag").save_pretrained(tmp_path, max_shard_size="30KB")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for change, words in (
            (dict(nanoheads={"acag": "elementwise"}), "another size of the tensor transformer.h.0.attn.nano"),
            (dict(nanoheads={"xsa": True}), "xsa.strength"),
            (dict(nanoheads={"acag": "headwise", "agency_scope": "mlp"}), "no flag 'agency_scope'"),
            (dict(architectures=["GPT3"]), "GPT3"), (dict(model_type="gpt3"), "gpt3")):
        path.write_text(json.dumps({**config, **change}))
        assert words in said_by(lambda: load(tmp_path))
    # a flag that is gone is read over where it changes nothing
    path.write_text(json.dumps({**config, "nanoheads": {**config["nanoheads"], "agency_scope": "head"}}))
    load(tmp_path)
    without = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "was saved with acag, which only dropin.load" in said_by(lambda: insert(without, "acag"))
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-99])
    assert str(tmp_path) in said_by(lambda: load(tmp_path))
    shard.unlink()
    assert shard.name in said_by(lambda: load(tmp_path))
    path.unlink()
    assert "config.json" in said_by(lambda: load(tmp_path))


def test_without_transformers_or_with_an_old_one_a_line_says_what_to_install(hf, monkeypatch, tmp_path):
    """Before 5.4 masks were called in another way."""
    model = tiny(hf, "gpt2")
    for version in ("4.57.6", "5.3.0"):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        assert f"transformers 5.4 and later, and here is {version}: pip install" in said_by(
            lambda: insert(model, "acag"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "transformers is missing: pip install" in said_by(lambda: load(tmp_path))
