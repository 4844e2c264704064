"""
What every mechanism promises (causal, the same with a cache, neutral), alone and in drawn mixtures.

All lists come from model.py, where a new mechanism is one line. Equalities are in float64. Mistakes that
these tests must find stand in tests/planted.py.
"""

import copy
import itertools
import os
from dataclasses import asdict

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

import model as model_py
import train
from model import ALL_ON, CONSTRAINTS, GPT, MECHANISM_CLASSES, MECHANISMS, NEUTRAL, GPTConfig, KVCache
from nanoheads import checkpoint
from nanoheads.configurator import check, choices, keys_of
from nanoheads.mechanism import flags_of
from nanoheads.neutral import make_neutral
from nanoheads.optim import make_optimizers
from nanoheads.pruning import head_axes, pack, prune_heads
from helpers import TINY_GPT, alive, portions, small_models, tiny
from oracle import agree, plain, tokens
from test_model import FLAGS

# tokens; no other dimension has this size
T = 13


# ---- what is tested: {id: flags} ----

# heads share keys in pairs; where a mechanism does not go with that, llama is left out
GROUPED = dict(recipe="llama", n_kv_head=3, qkv_bias=True, qk_norm=True, qk_scale=True)


def fine(flags):
    return not GPTConfig(**TINY_GPT, **flags).problems()


def in_turn(number, flags):
    """The flags in one of three recipes."""
    recipe = (dict(recipe="gpt2"), dict(recipe="modern"), GROUPED)[number % 3]
    return {**flags, **(recipe if fine({**flags, **recipe}) else dict(recipe="modern"))}


ALONE = {name: in_turn(i, flags) for i, (name, flags) in enumerate(MECHANISMS.items())}
ALONE |= {f"all_on, {recipe}": dict(ALL_ON, recipe=recipe) for recipe in ("gpt2", "modern")}
# what no mode of MECHANISMS has: flags of a plain GPT, and where the router of constraint heads acts
ROUTED = {"score": dict(constraint_gate="score"), "value": dict(constraint_gate="value"),
          "hard router": dict(constraint_router="hard_concrete"),
          "first": dict(constraint_router_input="first"),
          "skip xsa": dict(constraint_skip=0.5, xsa=True, head_norm=True),
          "skip first": dict(constraint_skip=0.5, constraint_router_input="first"),
          "score xsa": dict(constraint_gate="score", xsa=True, head_norm=True),
          "score window": dict(constraint_gate="score", acag="headwise", sink=True, window=3)}
DETAILS = {", ".join(f"{key}={value}" for key, value in flags.items()): flags for flags in FLAGS}
DETAILS |= {name: dict(constraint_names=["a", "b"], constraint_layers=[0, 1], **flags)
            for name, flags in ROUTED.items()}
PAIRS = {(a, b): {**MECHANISMS[a], **MECHANISMS[b]} for a, b in itertools.combinations(MECHANISMS, 2)
         if not MECHANISMS[a].keys() & MECHANISMS[b].keys()}  # else two modes of one thing
REFUSED = {("a2c_published", "constraint_b"), ("value_residual", "constraint_b"),
           ("short_conv", "a2c_published"), ("short_conv_kv", "a2c_published"), ("short_conv_x", "mudd"),
           ("a2c_published", "mudd"), ("diff", "mudd"), ("diff", "diff_v1")}
# every mechanism once, as many together as go
TOGETHER = {"all_on": ALL_ON}
for name, flags in MECHANISMS.items():
    room = next((n for n, there in TOGETHER.items() if n != "all_on"
                 and not flags.keys() & there.keys() and fine({**there, **flags})), None)
    TOGETHER[f"{room}+{name}" if room else name] = {**(TOGETHER.pop(room) if room else {}), **flags}
together = pytest.mark.parametrize("flags", TOGETHER.values(), ids=range(len(TOGETHER)))


@pytest.mark.slow
def test_pairs_that_do_not_go_together_are_refused_by_the_flags_of_both():
    assert {pair for pair, flags in PAIRS.items() if not fine(flags)} == REFUSED
    for pair in REFUSED:
        problem, = GPTConfig(**TINY_GPT, **PAIRS[pair]).problems()
        assert all(any(flag.partition("_")[0] in problem for flag in MECHANISMS[name]) for name in pair)


# ---- helpers ----

def near(a, b, atol=1e-9):
    return torch.allclose(a, b, rtol=0, atol=atol)


def plain_flags(flags):
    """Of a case's flags, those of its plain GPT."""
    return {name: flags[name] for name in GROUPED if name in flags}


def open_noisy_gates(model):
    """Hard-concrete gates at 1, where their noise does nothing."""
    for block in model.transformer.h:
        if block.attn.sentinel and block.attn.sentinel.hard:
            block.attn.sentinel.logit.data.fill_(50.0)
    return model


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


def gradients(model):
    """{name: gradient} of all losses."""
    model.zero_grad()
    total(model).backward()
    return {name: p.grad for name, p in model.named_parameters()}


# ---- what a model computes of a token depends on that token's text up to it, and on nothing else ----

def changed_before(model, t, ask):
    """What of ask(tokens), {name: tensor with a time axis}, a change of token t changes before it."""
    idx = tokens(2, T)
    other = idx.clone()
    other[:, t] = (other[:, t] + 1) % 37
    torch.manual_seed(3)  # of noise in training
    before = ask(idx)
    torch.manual_seed(3)
    after, (last, *_) = ask(other), before
    assert not near(before[last][:, t], after[last][:, t], 1e-4), f"the change of token {t} is not seen"
    return [name for name, value in before.items() for axis in [value.shape.index(T)]
            if not torch.equal(value.narrow(axis, 0, t), after[name].narrow(axis, 0, t))]


def traces_of(model, idx):
    """Logits and all traces that have a time axis."""
    out = model(idx, traces="maps")
    return {"logits": out.logits, **{name: t for name, t in out.traces.items() if idx.size(1) in t.shape}}


def in_pieces(model, idx, sizes, pad=None):
    """Hidden states of a text that is read in pieces of these sizes, with a cache."""
    cache = KVCache(model.config)
    x = torch.cat([model.hidden(piece, cache, pad) for piece in idx.split(sizes, dim=1)], dim=1)
    assert cache.length == idx.size(1)
    return x


LENGTHS = [3, 9, 6]


def wrong_where_padded(model):
    """Of rows of unequal length, padded in front, which are not what each is alone; how they were read."""
    idx, pad = tokens(3, 9), 9 - torch.tensor(LENGTHS)
    filled = torch.where(torch.arange(9) < pad[:, None], 36, idx)
    padded = {"in pieces": in_pieces(model, filled, [4, 4, 1], pad), "at once": model.hidden(filled, pad=pad)}
    alone = [model.hidden(idx[row:row + 1, 9 - n:])[0] for row, n in enumerate(LENGTHS)]
    return [f"padded, {how}: a row of {n}" for how, x in padded.items() for row, n in enumerate(LENGTHS)
            if not near(x[row, 9 - n:], alone[row])]


IN_ROWS = [4, 1, 8], [7, 6]  # tokens of the documents in each row of T
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in IN_ROWS])


def documents_of(x):
    """The documents in rows x [2, T, ...], each as a row by itself."""
    return [piece[None] for row, sizes in zip(x, IN_ROWS) for piece in row.split(sizes)]


def crossing(model, tol=1e-9):
    """By which of the two forms of their mask documents in rows are not what each of them is alone, hidden
    states and gradients; nothing, where none sees another. The one form is what a GPU and a compiled graph
    take.
    """
    idx = tokens(2, T)
    want, found = torch.cat([model.hidden(each)[0] for each in documents_of(idx)]), []
    scale = max(1.0, want.detach().abs().max().item())
    for form, on_gpu in (("apart", False), ("by blocks", True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_py, "has_flex_attention", lambda device: on_gpu)
            got = model.hidden(idx, positions=POSITIONS).flatten(0, 1)
        try:
            agree([got / scale], [want / scale], list(model.parameters()), tol)
        except AssertionError:
            found.append(f"documents in rows, {form}")
    return found


@torch.no_grad()
def broken(model):
    """What is wrong with a model in evaluation, in words; nothing, where it keeps every promise."""
    idx = tokens(2, T)
    found = [f"{name} looks ahead" for t in (1, 9)
             for name in changed_before(model, t, lambda ids: traces_of(model, ids))]
    want = model.hidden(idx)
    found += [f"row {row} sees the other one" for row in range(2)
              if not near(model.hidden(idx[row:row + 1])[0], want[row])]
    found += ["with a cache"] * (not near(in_pieces(model, idx, [1, 1, 5, 1, 5]), want))
    found += wrong_where_padded(model)
    found += [f"{name} looks ahead in training"
              for name in changed_before(model.train(), 6, lambda ids: {"hidden": model.hidden(ids)})]
    open_noisy_gates(model)
    want = model.eval().hidden(idx)
    in_training = model.train().hidden(idx), model.run_blocks(idx, wants_losses=True)[0]
    found += ["in training"] * (not all(near(each, want) for each in in_training))
    model.eval()
    return found


# gates that the write-up's code drops after training
DROP_GATES = {"routing_published", "routing_train_only"}


@pytest.mark.parametrize("name", [*ALONE, *DETAILS])
def test_a_mechanism_keeps_its_promises(name):
    """No look ahead, nor in traces; rows apart; the same with a cache, with padding, in training, and for
    documents that share a row. Where it is on, the model is another one.
    """
    flags = {**ALONE, **DETAILS}[name]
    model = tiny(flags)
    assert crossing(model) == []
    # a router's gates are drawn anew for each text in training, or are dropped below a value after it
    differs = name in DROP_GATES or {"constraint_router", "constraint_skip"} & flags.keys()
    assert broken(copy.deepcopy(model)) == ["in training"] * bool(differs)
    if name in ALONE:
        base = tiny(plain_flags(flags))
        with torch.no_grad():
            # far below a cap, as the logits of this small model are, a tanh is nearly a line
            tol = 1e-6 if model.config.score_cap else 1e-3
            assert not near(share(model, base).train().hidden(tokens(2, T)), base.hidden(tokens(2, T)), tol)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.sampled_from(sorted(PAIRS.keys() - REFUSED)), st.integers(0, 2))
def test_pairs_keep_their_promises(pair, recipe):
    flags = in_turn(recipe, PAIRS[pair])
    assume(fine(flags))
    assert broken(tiny(flags)) == ["in training"] * bool(DROP_GATES & {*pair}), pair


def test_traces_that_are_looked_at_are_all_there():
    found = {name.split(".", 2)[-1] for name in traces_of(tiny(ALL_ON), tokens(2, T))}
    assert found >= {"advantage", "routing_weights", "routing_logits", "router_gates", "head_scores",
                     "entropy", "concentration", "gates.acag", "map",
                     *(f"constraint.{name}" for name in CONSTRAINTS)}


@pytest.mark.slow
@settings(max_examples=25)
@given(small_models(), st.lists(st.integers(1, 12), min_size=2, max_size=3), portions(12), portions(12))
def test_mixtures_read_in_portions_and_padded_are_what_each_row_is_alone(flags, lengths, pieces, of_padded):
    """Of any mechanisms together: rows alone are read in portions with a cache, padded behind, and padded in
    front and read in other portions; documents in rows are what each is alone.
    """
    model, idx = tiny(flags), tokens(len(lengths), 12)
    size, pad = torch.tensor(lengths), 12 - torch.tensor(lengths)
    columns = torch.arange(12)
    with torch.no_grad():
        alone = [model.hidden(row[None, :n])[0] for row, n in zip(idx, lengths)]
        tol = 1e-9 * max(1.0, *(x.abs().max().item() for x in alone))
        behind = model.hidden(torch.where(columns < size[:, None], idx, 36))
        front = torch.where(columns < pad[:, None], 36, idx.gather(1, (columns - pad[:, None]).clamp_min(0)))
        before = in_pieces(model, front, of_padded, pad)
        for row, n in enumerate(lengths):
            assert near(behind[row, :n], alone[row], tol), "padded behind"
            assert near(before[row, 12 - n:], alone[row], tol), "padded in front, in portions"
        assert near(in_pieces(model, idx, pieces), model.hidden(idx), tol), "in portions"
    assert crossing(model, 1e-8) == []


@pytest.mark.slow
@settings(max_examples=20)
@given(st.sampled_from([n for n in MECHANISMS if n.startswith("routing") or n == "moh"]),
       st.none() | st.sampled_from([*MECHANISMS]), st.integers(0, 2))
def test_decoding_that_skips_heads_equals_decoding_that_does_not(name, other, recipe):
    """Alone, with another mechanism, and with heads that are gone."""
    flags = in_turn(recipe, {**MECHANISMS[name], **MECHANISMS.get(other, {})})
    assume(fine(flags))
    model, idx = tiny(flags), tokens(2, 8)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(model_py, "SKIP_FROM", 1)
        for gone in ({}, {0: [2, 3]}):
            prune_heads(model, gone)
            assert near(in_pieces(model, idx, [4, 1, 1, 1, 1]), model.hidden(idx)), gone


@together
def test_unequal_prompts_generate_what_each_does_alone(flags):
    """Past the end of the context, too."""
    idx, lengths, model = tokens(3, 9), [1, 9, 4], tiny(flags)
    got = model.generate(idx, 9, temperature=0, lengths=lengths)
    for row, n in enumerate(lengths):
        alone = model.generate(idx[row:row + 1, 9 - n:], 9, temperature=0)
        assert torch.equal(got[row, 9:], alone[0, n:]), f"prompt of {n}"


# ---- documents in a row ----

@pytest.mark.parametrize("name", ["plain", "all_on", "a2c_temperature", "a2c_key_bias"])
def test_losses_of_documents_in_rows_are_those_of_rows_with_padding(name):
    """Summed over tokens, and their gradients: logits and losses are float32."""
    model = tiny({"plain": {}, "all_on": ALL_ON, **MECHANISMS}[name])
    idx, targets = tokens(2, T), tokens(2, T, seed=2)
    targets[1, 9:] = -1  # padding at the end of a row

    def padded(rows, fill):
        x = torch.full((5, 8), fill)
        for to, each in zip(x, documents_of(rows)):
            to[:each.size(1)] = each[0]
        return x

    def loss(out):
        return sum((t for key, t in out.aux.items() if key.startswith("a2c")), out.loss)
    want = loss(model(padded(idx, 0), padded(targets, -1)))
    got = loss(model(idx, targets, positions=POSITIONS))
    agree([got], [want], [p for p in model.parameters() if p.requires_grad], 1e-6)


def test_attention_maps_of_documents_in_rows_are_theirs():
    model, idx = tiny({**MECHANISMS["sink"], **MECHANISMS["paired_heads"]}), tokens(2, T)
    with torch.no_grad():
        found = model(idx, traces="maps", positions=POSITIONS).traces["blocks.1.map"]
        maps = [model(each, traces="maps").traces["blocks.1.map"][0] for each in documents_of(idx)]
    want = [torch.stack([torch.block_diag(*(each[head] for each in some)) for head in range(6)])
            for some in (maps[:3], maps[3:])]
    assert near(found, torch.stack(want), 1e-6)


def test_each_document_has_its_own_noise():
    model = tiny(DETAILS["hard router"], live=False).train()  # whose router's logits are near 0
    gates = model(tokens(2, T), traces=True, positions=POSITIONS).traces["blocks.0.router_gates"]
    of_each = [each[0] for each in documents_of(gates)]
    assert all(near(each, each[:1].expand_as(each), 0.1) for each in of_each)
    assert len({tuple(each[0].round(decimals=1).tolist()) for each in of_each}) > 2


@pytest.mark.parametrize("flags, given, words", [
    ({}, dict(positions=POSITIONS[:, 1:]), r"positions are \[2, 12\]; there must be one for each token"),
    ({}, dict(positions=POSITIONS + 1), "positions must count from 0 in each row"),
    ({}, dict(positions=2 * POSITIONS), "positions must count from 0 in each row"),
    (dict(attn_dropout=0.1), dict(positions=POSITIONS), "positions has no fused kernel with dropout"),
    (dict(constraint_names=["a"]), dict(positions=POSITIONS, router_hint=torch.zeros(2, 48)), "router_hint")],
    ids=["too few", "from 1", "in twos", "dropout", "hint"])
def test_documents_in_rows_refuse_what_they_do_not_go_with(flags, given, words):
    model = tiny(flags).train()
    with pytest.raises(ValueError, match=words):
        model(tokens(2, T), tokens(2, T), **given)


# ---- off, neutral, and at the start ----

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


def equals_plain_where_neutral(names, more):
    """A model with these mechanisms, as NEUTRAL sets them, is a plain one with the same weights."""
    flags = dict(more)
    for name in names:
        flags.update(MECHANISMS[name])
        for key, value in NEUTRAL[name].items():
            if key in GPTConfig.__dataclass_fields__:
                flags[key] = TINY_GPT[value] if isinstance(value, str) else value
    base = tiny(more)
    model = share(tiny(flags, live=False), base)
    make_neutral(model, names)
    with torch.no_grad():
        return near(model.hidden(tokens(2, T)), base.hidden(tokens(2, T)))


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_equals_the_plain_gpt(name):
    assert equals_plain_where_neutral([name], dict(recipe=("gpt2", "modern")[len(name) % 2]))


def test_neutral_together_is_the_plain_gpt():
    """One mode of each mechanism that has a neutral setting, all at once."""
    names, taken = [], set()
    for name in NEUTRAL:
        if not taken & set(MECHANISMS[name]):
            names.append(name)
            taken |= set(MECHANISMS[name])
    assert len(names) > 8 and equals_plain_where_neutral(names, {})


def with_more_losses(flags):
    """Those too that have a weight of 0 unless asked for."""
    router = dict(constraint_sparsity_coef=0.1, constraint_entropy_coef=0.1)
    return {**flags, **(router if "constraint_names" in flags else {})}


@pytest.mark.parametrize("name", ALONE)
def test_a_new_model_starts_as_the_plain_gpt_does_and_every_parameter_learns(name):
    """Parameters that both have are the same to the last bit. Gradients, of all auxiliary losses too, are
    finite from the first step on, and not zero once the weights are alive.
    """
    flags = ALONE[name]
    base = dict(GPT(GPTConfig(**TINY_GPT, **plain_flags(flags))).named_parameters())
    model = GPT(GPTConfig(**{**TINY_GPT, **with_more_losses(flags)})).train()
    own = dict(model.named_parameters())
    shared = [n for n in base if n in own and own[n].shape == base[n].shape]
    if name not in ("a2c_published", "constraint_b"):  # some of their projections have another size
        assert len(shared) == len(base)
    assert len(shared) >= 4 and all(torch.equal(own[n], base[n]) for n in shared)
    assert all(g is not None and g.isfinite().all() for g in gradients(model).values())
    assert [n for n, g in gradients(alive(model)).items() if not g.isfinite().all() or not g.any()] == []


def test_every_auxiliary_loss_is_there():
    model = GPT(GPTConfig(**TINY_GPT, **with_more_losses(ALL_ON))).train()
    out = model(tokens(2, T), tokens(2, T, seed=2),
                constraint_targets={name: torch.ones(2, T) for name in CONSTRAINTS})
    assert set(out.aux) == {"routing_balance", "gate_l1", "constraint_router", "constraint_entropy",
                            "a2c_value", "a2c_advantage", *(f"constraint.{name}" for name in CONSTRAINTS)}
    assert model(tokens(2, T)).aux == {} and model(tokens(2, T)).loss is None


# ---- trained, in other forms ----

@pytest.mark.slow
@together
def test_bfloat16_recomputation_copies_and_files_change_nothing(flags, tmp_path, monkeypatch):
    """bfloat16, of weights or by autocast, is finite and near; recomputed activations have the same
    gradients; a deep copy is optimised alike; a saved model with fewer heads and a shorter context is the
    same model, states of heads included.
    """
    flags = with_more_losses(flags)
    new, model = GPT(GPTConfig(**TINY_GPT, **flags)).train(), tiny(flags).train()
    sorted_groups = []
    for m in (new, copy.deepcopy(new)):
        names = {id(p): n for n, p in m.named_parameters()}
        made = make_optimizers(m, train.TrainConfig(optimizer="muon", weight_decay=0.1).for_recipe("gpt2"))
        sorted_groups.append([[(sorted(names[id(p)] for p in group["params"]), group["weight_decay"])
                               for group in o.param_groups] for o in made])
    assert sorted_groups[0] == sorted_groups[1]
    want = total(new).item()
    for autocast in (True, False):
        new.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = total(new if autocast else new.bfloat16())
        loss.backward()
        assert loss.item() == pytest.approx(want, abs=0.2)
        assert all(p.grad.isfinite().all() for p in new.parameters())
    torch.manual_seed(3)  # for hard-concrete noise
    found = gradients(model)
    model.config.checkpoint_activations = True
    torch.manual_seed(3)
    assert all(near(found[name], g) for name, g in gradients(model).items())
    monkeypatch.setattr(os, "fsync", lambda file: None)  # takes most of the time, and no power fails here
    model, path = model.float().eval(), tmp_path / "ckpt.pt"
    prune_heads(model, {0: [4, 5], 1: list(range(6))})
    model.crop_block_size(8)
    checkpoint.save(path, dict(model=model.state_dict(), config=asdict(model.config), meta=None))
    again = checkpoint.build(checkpoint.read(path), path)
    with torch.no_grad():
        assert torch.equal(again(tokens(2, 8)).logits, model(tokens(2, 8)).logits)
    assert again.config == model.config
    assert [len(block.attn.head_ids) for block in again.transformer.h] == [4, 0]
    if model.config.agency:
        assert again.transformer.h[0].attn.agency.state.tolist() == [0, 1, 2, 3]


@together
def test_a_shorter_context_keeps_the_function(flags):
    """Unlike a model of the shorter context with the same weights, where length or window follow from it.
    The config that the model was made with stays as it is.
    """
    model, idx = tiny(flags), tokens(2, 8)
    short = share(tiny(flags, live=False, block_size=8), model)
    config = model.config
    with torch.no_grad():
        want = model.hidden(idx)
        model.crop_block_size(8)
        assert near(model.hidden(idx), want) and near(in_pieces(model, idx, [3, 1, 4]), want)
        if flags.get("acag") or "window" in flags:
            assert not near(short.hidden(idx), want)
    assert config.block_size == 16 and model.config.block_size == 8


def losses_of(model, forward, idx, targets):
    model.zero_grad()
    out = forward(idx, targets)
    loss = sum(out.aux.values(), out.loss)
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters() if p.grad is not None]


def compiles_like_eager(flags, **options):
    torch._dynamo.reset()
    flags = {**flags, "n_layer": 2 if {"unet", "value_residual"} & flags.keys() else 1}
    model = GPT(GPTConfig(**{**TINY_GPT, "block_size": 8, **flags}))
    open_noisy_gates(alive(model)).train()  # compiled, noise is other noise
    fast, idx, targets = torch.compile(model, fullgraph=True, **options), tokens(2, 8), tokens(2, 8, seed=2)
    want, grads = losses_of(model, model, idx, targets)
    got, fast_grads = losses_of(model, fast, idx, targets)
    torch._dynamo.reset()
    assert got == pytest.approx(want, abs=1e-4) and len(grads) == len(fast_grads)
    assert all(near(a, b, 1e-3) for a, b in zip(grads, fast_grads))


@pytest.mark.slow
@together
def test_compiles_in_one_graph_and_trains_the_same(flags):
    if flags == ALL_ON:  # one block, since compiling it takes long; others join blocks
        flags = {key: value for key, value in flags.items() if key != "unet"}
        compiles_like_eager({**flags, "recipe": "modern", "loss_chunks": 4}, backend="aot_eager")
    else:
        compiles_like_eager(flags, backend="eager")


@pytest.mark.slow
def test_traces_and_losses_of_documents_in_rows_compile_in_one_graph():
    """On a CPU too by the mask that a GPU takes: how many documents there are depends on the data."""
    torch._dynamo.reset()
    names = ("window", "fox", "short_conv", "a2c_temperature", "constraint_a")
    flags = {key: value for name in names for key, value in MECHANISMS[name].items()}
    model, idx, targets = tiny(flags, n_layer=1).float(), tokens(2, T), tokens(2, T, seed=2)
    targets[0, :3] = -1
    fast = torch.compile(lambda *a: model(*a, traces=True, positions=POSITIONS), fullgraph=True,
                         backend="eager")
    with torch.no_grad():
        got, want = fast(idx, targets), model(idx, targets, traces=True, positions=POSITIONS)
    torch._dynamo.reset()
    assert near(got.loss, want.loss, 1e-5) and got.traces.keys() == want.traces.keys()
    assert {"a2c.value", "a2c.return", "blocks.0.advantage"} <= set(got.traces)
    assert all(near(got.traces[key].double(), want.traces[key].double(), 1e-4) for key in want.traces)


@pytest.mark.slow
def test_a_state_moves_without_recompiling():
    torch._dynamo.reset()
    model = tiny({**ALL_ON, "agency_learned": True}).float()
    fast, idx = torch.compile(model, fullgraph=True, backend="eager"), tokens(2, 8)
    with torch.no_grad():
        before = fast(idx).logits
        with torch._dynamo.config.patch(error_on_recompile=True):
            for change in (dict(state="misaligned"), dict(state="overloaded"), dict(consent=False),
                           dict(state="active", consent=True)):
                model.set_state(0, 4, **change, step=7)
                model.transformer.h[0].attn.agency.metrics.normal_()
                after = fast(idx).logits
                assert near(after, model(idx).logits, 1e-4) and not near(after, before, 1e-3)
                before = after
            # what the guard is worth: another shape is noticed
            with pytest.raises(Exception, match="[Rr]ecompil"):
                fast(tokens(2, 7))
    torch._dynamo.reset()


def test_the_load_balance_of_ranks_is_that_of_the_whole_batch(monkeypatch):
    """Two rows of a batch, as two ranks see them: each tells the other how often it chose each head."""
    model, idx = tiny(MECHANISMS["routing_moh"], routing_coef=1.0).train(), tokens(2, T)

    def balance(idx):
        return model(idx, idx).aux["routing_balance"].item()
    whole, alone = balance(idx), [balance(row) for row in idx[:, None]]
    assert abs(sum(alone) / 2 - whole) > 1e-3
    told = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t: told.append(t.clone()))
    for row in idx[:, None]:
        balance(row)
    of_both = [a + b for a, b in zip(told[:2], told[2:], strict=True)]  # one of each layer
    answers = itertools.cycle(of_both)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t: t.copy_(next(answers)))
    assert sum(balance(row) for row in idx[:, None]) / 2 == pytest.approx(whole, abs=1e-6)


# ---- heads that are closed, packed away, and pruned ----

GONE = {0: [2, 3], 1: [0, 1, 2, 3, 4, 5]}


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


def cached_heads(attn):
    """Heads whose keys a layer's cache holds: of groups, one each, but where heads have keys of their own."""
    return len(attn.head_ids) // (1 if attn.n_extra else attn.group) + attn.n_extra


@pytest.mark.parametrize("flags", [GROUPED, *itertools.starmap(in_turn, enumerate(TOGETHER.values()))],
                         ids=["grouped", *range(len(TOGETHER))])
def test_packed_is_the_same_function_without_the_closed_heads(flags):
    """Read in pieces with a cache that is smaller; the router still selects among all heads."""
    idx, model = tokens(2, 16), tiny(flags)
    with torch.no_grad():
        before = model.hidden(idx)
        packed = pack(close(model, GONE))
        want, cache = model.hidden(idx), KVCache(packed.config)
        got = torch.cat([packed.hidden(piece, cache) for piece in idx.split([7, 1, 8], dim=1)], dim=1)
    assert near(got, want) and not near(want, before)
    left = packed.config.head_ids
    assert model.config.head_ids is None and not set(GONE[0]) & set(left[0]) and left[1] == []
    attentions = [block.attn for block in packed.transformer.h]
    assert [k.size(1) for k in cache.k] == [cached_heads(a) for a in attentions]
    assert cache.k[0].size(1) < 6 + attentions[0].n_extra
    assert packed.num_params() < model.num_params()


@torch.no_grad()
def test_a_group_of_which_a_head_is_open_is_not_packed_away():
    model, idx = tiny(dict(n_kv_head=2)), tokens(2, 16)
    for layer, head in ((0, 0), (0, 4), (1, 0), (1, 1), (1, 2)):
        model.set_gate(layer, head, 0.0)
    packed = pack(model)
    assert packed.config.head_ids == [[*range(6)], [3, 4, 5]]
    assert near(packed(idx).logits, model(idx).logits, 1e-6)


def shapes(model):
    """{parameter or buffer: shape}."""
    return {name: t.shape for name, t in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("flags", ALONE.values(), ids=ALONE)
def test_every_tensor_with_a_head_axis_is_pruned(flags):
    """Built with four heads left and with two, no tensor has another shape but those that are named."""
    model = GPT(GPTConfig(**{**TINY_GPT, **flags}))
    paths = {id(module): path for path, module in model.named_modules()}
    named = {f"{paths[id(module)]}.{name}" for block in model.transformer.h
             for module, name, _ in head_axes(block.attn)}
    four, two = (shapes(GPT(GPTConfig(**{**TINY_GPT, **flags, "head_ids": [[*range(left)]] * 2})))
                 for left in (4, 2))
    changed = {tensor for tensor in four if four[tensor] != two[tensor]}
    assert changed <= named and len(changed) >= 4
    prune_heads(model, {layer: [2, 3, 4, 5] for layer in range(2)})
    assert shapes(model) == two


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
@together
def test_training_goes_on_after_pruning_as_with_closed_heads(flags):
    """AdamW's moments are those of the heads that are left; with others the ways would part."""
    pruned, _ = trained(flags, "adamw", GONE, prune=True)
    masked, _ = trained(flags, "adamw", GONE)
    never, _ = trained(flags, "adamw")
    for model in (masked, never):
        prune_heads(model, GONE)
    assert all(near(a, b) for a, b in zip(pruned.parameters(), masked.parameters(), strict=True))
    assert not all(near(a, b) for a, b in zip(pruned.parameters(), never.parameters(), strict=True))


@pytest.mark.parametrize("flags", [ALL_ON, MECHANISMS["a2c_published"]], ids=["all_on", "a2c_published"])
def test_pruning_takes_rows_from_projections_and_moments(flags):
    """Of Muon, and of AdamW, which has all else."""
    model, optimizers = trained(flags, "muon")
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
    assert {id(p) for o in optimizers for p in o.state} <= inside


def test_heads_that_are_not_there_are_refused():
    model = tiny(MECHANISMS["agency"])
    prune_heads(model, {0: [2]})
    for wrong in (lambda: prune_heads(model, {0: [2]}),
                  lambda: prune_heads(model, {2: [0]}),
                  lambda: model.set_gate(0, 2, 0.0)):
        with pytest.raises(ValueError) as e:
            wrong()
        assert "\n" not in str(e.value)


# ---- what is refused ----

OF_MECHANISMS = {name: cls.flag for cls in MECHANISM_CLASSES for name in flags_of(cls) if name != cls.flag}


def test_a_detail_is_refused_while_its_mechanism_is_off():
    """A value that is not its default, which it has where nobody sets it."""
    for key, flag in OF_MECHANISMS.items():
        kind, default, _ = keys_of((GPTConfig,))[key]
        for value in [*choices(kind), False, True, 0, 1, 2, 5, 0.25, 0.5, 0.75, ["free"], [0], [0.5]]:
            try:
                value = check(value, kind)
            except ValueError:
                continue
            problem = [] if value == default else GPTConfig(**TINY_GPT, **{key: value}).problems()
            if problem == [f"{key}={value!r} means nothing while {flag} is off"]:
                break
            assert value == default or f"{key}={value!r} must" in problem[0]  # out of range
        else:
            pytest.fail(f"{key}: no value is refused")


def test_an_impossible_config_names_every_problem():
    wrong = dict(n_embd=30, n_head=4, dropout=1.5, recipe="mamba", softcap=-1.0)
    with pytest.raises(ValueError) as e:
        GPT(GPTConfig(vocab_size=10, **wrong))
    assert all(f"{key}={wrong[key]!r}" in str(e.value) for key in ("n_embd", "dropout", "recipe", "softcap"))
    with pytest.raises(ValueError, match="vocab_size"):
        GPT(GPTConfig())
