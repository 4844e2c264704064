"""The layers of the write-ups, compared with the oracle and nn.MultiheadAttention, and in blocks of torch."""

import copy
import math

import pytest
import torch
from torch import nn

import oracle
from nanoheads import attention
from nanoheads.common import UserError
from nanoheads.traces import explain
from lab.hub.layers import (A2CAttention, AdaptiveContextualAttention, AsMultiheadAttention, AttentionLayer,
                            ConstraintAttention, CriticAttention)
from helpers import alive
from oracle import agree, close, normal

C, H, T = 32, 4, 7


def acag(**how):
    """ACAG, its gates neutral: 1 everywhere."""
    return AdaptiveContextualAttention(C, H, 16, bias=True, **how).double().eval()


def a2c(**how):
    """A2C, its critic at 0."""
    return CriticAttention(C, H, 16, bias=True, **how).double().eval()


def constraint(**how):
    """Constraint heads, of which nothing comes out."""
    layer = ConstraintAttention(C, H, ["a"], 16, bias=True, **how).double().eval()
    layer.attn.constraint.c_proj.weight.data.zero_()
    return layer


def scattered(layer):
    """No projection is small, no bias 0; what makes a layer neutral stays."""
    generator = torch.Generator().manual_seed(4)
    for linear in (layer.attn.c_attn, layer.attn.c_proj):
        for p in linear.parameters():
            p.data.normal_(0, 0.3, generator=generator)
    return layer


def beside(layer):
    """nn.MultiheadAttention with the layer's projections."""
    theirs = nn.MultiheadAttention(C, H, batch_first=True, dtype=torch.float64).eval()
    own = layer.attn.c_attn, layer.attn.c_proj
    theirs.in_proj_weight.data, theirs.in_proj_bias.data = own[0].weight.data, own[0].bias.data
    theirs.out_proj.weight.data, theirs.out_proj.bias.data = own[1].weight.data, own[1].bias.data
    return theirs


def first(found):
    return found if torch.is_tensor(found) else found[0]


# ---- formulas ----

@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("make, how, flags", [
    (AdaptiveContextualAttention, {}, dict(acag="headwise", acag_mode="normalised")),
    (AdaptiveContextualAttention, dict(mode="published", gate="elementwise", detach=True),
     dict(acag="elementwise", acag_mode="published", acag_detach=True)),
    (ConstraintAttention, dict(names=["a", "b"], heads=2, constraint_mode="published"),
     dict(constraint_names=["a", "b"], constraint_heads=2, constraint_mode="published")),
    (ConstraintAttention, dict(names=["a", "b"], variant="B", router="hard_concrete"),
     dict(constraint_variant="B", constraint_router="hard_concrete"))],
    ids=["acag", "acag published", "constraint published", "constraint variant B"])
def test_a_layer_is_the_oracles_formula(make, how, flags, causal):
    """In a constraint layer whose tokens see later ones the router reads the mean of the whole text."""
    layer = alive(make(C, H, max_len=16, causal=causal, bias=True, **how).double().eval(), 0.3)
    assert all(getattr(layer.config, flag) == value for flag, value in flags.items())
    x, seen = normal(2, T, C, grad=True), torch.ones(T, T, dtype=torch.bool)
    seen, before = (seen.tril(), torch.arange(T)) if causal else (seen, torch.full((T,), T - 1))
    hint = None if causal or "names" not in how else x.mean(1)
    want, found = oracle.attend(layer.config, layer.attn, 0, x, seen, before, hint)
    got, scores, traced = layer(x), [], []
    if "names" in how:
        scores = found["head_scores"].unflatten(1, (2, -1)).mean(2).unbind(1)
        traced = [got[1][f"blocks.0.constraint.{name}"] for name in "ab"]
        assert explain(got[1], list("abcdefg"), "b", 1).startswith("b (block 0): '")
    agree([first(got), *traced], [want, *scores], [x, *layer.parameters()], 1e-7)


@pytest.mark.parametrize("at_once", [2**21, 64])  # 64: one query in each portion
def test_layers_take_score_functions(at_once, monkeypatch):
    """Also where later tokens are seen, which no portion may leave out: a cap, then ALiBi's distances."""
    monkeypatch.setattr(attention, "LOGITS_AT_ONCE", at_once)
    layer = AttentionLayer(C, H, 16, False, bias=True, alibi="fixed", score_cap=2.0)
    layer, x = scattered(layer.double().eval()), normal(2, T, C, seed=3).requires_grad_()
    q, k, v = layer.attn.c_attn(x).unflatten(-1, (3, H, C // H)).permute(2, 0, 3, 1, 4)
    t, slopes = torch.arange(T), 2 ** (-8 * torch.arange(1, H + 1).double() / H)
    score = 2 * torch.tanh(q @ k.mT * (C // H) ** -0.5 / 2) - slopes[:, None, None] * (t[:, None] - t).abs()
    want = layer.attn.c_proj((score.softmax(-1) @ v).transpose(1, 2).flatten(2))
    agree([layer.run(x)[0]], [want], [x, *layer.parameters()], 1e-10)


# ---- beside nn.MultiheadAttention ----

PADDING = torch.tensor([[False] * T, [False] * 5 + [True] * 2, [True] * 2 + [False] * 5])
BLOCKED = torch.rand(T, T, generator=torch.Generator().manual_seed(2)) < 0.4
BLOCKED.fill_diagonal_(False)
LATER = torch.ones(T, T, dtype=torch.bool).triu(1)
MASKS = {"none": {}, "padding": dict(key_padding_mask=PADDING), "mask": dict(attn_mask=BLOCKED),
         "both": dict(key_padding_mask=PADDING, attn_mask=BLOCKED)}


def additive(masks):
    return {name: torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -math.inf)
            for name, mask in masks.items()}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("make, causal", [(acag, True), (acag, False), (a2c, True), (constraint, True)])
def test_with_neutral_gates_a_layer_is_multi_head_attention(make, causal, masks):
    """Outputs, weights and gradients at tokens that are no padding, whatever form the masks have."""
    layer = scattered(make(causal=causal))
    theirs, x, seen = beside(layer), normal(3, T, C).requires_grad_(), {**masks}
    if causal:
        seen["attn_mask"] = seen.get("attn_mask", torch.zeros(T, T, dtype=torch.bool)) | LATER
    want, weights = theirs(x, x, x, **seen, average_attn_weights=False)
    real = ~masks.get("key_padding_mask", torch.zeros(3, T, dtype=torch.bool))
    real &= want.isfinite().all(-1)  # a row that sees nothing is not a number there
    r = normal(int(real.sum()), C, seed=3)
    dx, = torch.autograd.grad((want[real] * r).sum(), x, retain_graph=True)
    for each in (masks, additive(masks)):
        found = layer(x, **each, need_weights=True)
        got, maps = (found[0], found[1]["blocks.0.map"]) if make is constraint else found[:2]
        close(got[real], want[real], 1e-12)
        close(maps[:, :H].transpose(1, 2)[real].double(), weights.transpose(1, 2)[real], 1e-6)
        close(first(layer(x, **each))[real], want[real], 1e-12)
    if not dx.isnan().any():
        close(torch.autograd.grad((got[real] * r).sum(), x)[0], dx, 1e-11)


@pytest.mark.parametrize("layer", [acag(), acag(causal=False), a2c(mode="published"), constraint(),
                                   constraint(causal=False, constraint_router_input="first"),
                                   AdaptiveContextualAttention(C, H, 16, "published").double().eval()],
                         ids=lambda layer: type(layer).__name__)
def test_padding_is_as_if_it_were_not_there(layer):
    """Gates too: a row gives what its real tokens alone give, wherever the padding is."""
    alive(layer, 0.3)
    x = normal(3, T, C)
    got = first(layer(x, key_padding_mask=PADDING))
    for row, padded in enumerate(PADDING):
        close(got[row, ~padded], first(layer(x[row:row + 1, ~padded]))[0], 1e-9)
    other = first(layer(torch.where(PADDING[..., None], 9.0, x), key_padding_mask=PADDING))
    assert torch.equal(other[~PADDING], got[~PADDING])


@pytest.mark.parametrize("make, how", [(AdaptiveContextualAttention, {}), (ConstraintAttention, {}),
                                       (AdaptiveContextualAttention, dict(mode="published")),
                                       (CriticAttention, dict(mode="published"))])
def test_a_layer_is_causal_by_itself_or_by_a_mask_and_open_where_asked(make, how):
    causal, free = (make(C, H, max_len=16, causal=on, **how).double().eval() for on in (True, False))
    alive(causal, 0.3)
    free.load_state_dict(causal.state_dict())
    x = normal(3, T, C)
    want, part = first(causal(x)), first(causal(x[:, :4]))
    close(want[:, :4], part, 1e-12)
    close(first(free(x, attn_mask=LATER)), want, 1e-12)
    assert (first(free(x)) - want).abs().max() > 1e-4
    got, want = (first(layer(x, key_padding_mask=PADDING, attn_mask=LATER)) for layer in (free, causal))
    close(got[~PADDING], want[~PADDING], 1e-12)


def test_a_hint_takes_the_place_of_the_mean_and_traces_hold_all_that_a_models_do():
    layer, x = alive(ConstraintAttention(C, H, ["a"], max_len=16).double().eval(), 0.3), normal(2, T, C)
    assert (layer(x, hint=x.mean(1))[0] - layer(x)[0]).abs().max() > 1e-4
    traces = layer(x, traces="maps")[1]
    assert traces["blocks.0.map"].shape == (2, H + 1, T, T) and "blocks.0.router_gates" in traces
    assert layer(x[:1, :1])[0].shape == (1, 1, C)


def test_dropout_acts_in_training_alone():
    for make in (acag, a2c, constraint):
        layer, x = scattered(make(dropout=0.5)), normal(2, T, C)
        assert torch.equal(first(layer(x)), first(layer(x)))
        layer.train()
        assert not torch.equal(first(layer(x)), first(layer(x)))


def test_layers_are_saved_copied_and_compiled():
    torch.manual_seed(1)
    for make in (acag, constraint):
        layer, other, x = make(), make(), normal(2, T, C)
        assert not torch.equal(layer.attn.c_attn.weight, other.attn.c_attn.weight)  # they do not start alike
        other.load_state_dict(alive(layer, 0.2).state_dict())
        for same in (other, copy.deepcopy(layer)):
            assert torch.equal(first(same(x)), first(layer(x)))
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    # torch 2.11's compiler rounds Python's numbers to float32
    close(first(compiled(x)), first(layer(x)), 1e-6)


def test_the_write_ups_first_example_and_the_layers_former_name():
    attn = AdaptiveContextualAttention(d_model=768, num_heads=12, max_len=2048)
    assert attn(torch.randn(2, 32, 768)).shape == (2, 32, 768)
    assert AdaptiveContextualAttention.__init__.__defaults__[:3] == (768, 12, 2048)
    assert A2CAttention is CriticAttention


# ---- in the place of nn.MultiheadAttention ----

@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", [{}, dict(key_padding_mask=PADDING),
                                   dict(attn_mask=BLOCKED.expand(3 * H, T, T))],
                         ids=["none", "padding", "a mask for each head"])
@pytest.mark.parametrize("make", [acag, a2c])
def test_it_is_called_as_multi_head_attention_is(make, masks, batch_first):
    layer = scattered(make(causal=False))
    theirs, ours = beside(layer), AsMultiheadAttention(layer, batch_first)
    theirs.batch_first, x = batch_first, normal(3, T, C)
    x = x if batch_first else x.transpose(0, 1)
    real = ~masks.get("key_padding_mask", torch.zeros(3, T, dtype=torch.bool))
    for how in ({}, dict(average_attn_weights=False), dict(need_weights=False)):
        (got, weights), (want, wanted) = (attn(x, x, x, **masks, **how) for attn in (ours, theirs))
        close(got[real if batch_first else real.T], want[real if batch_first else real.T], 1e-12)
        assert (weights is None) == (wanted is None) == ("need_weights" in how)
        if wanted is not None:  # rows of padding mean nothing
            rows = real if wanted.dim() == 3 else real[:, None].expand(-1, H, -1)
            close(weights[rows].double(), wanted[rows], 1e-6)
    row = x[0] if batch_first else x[:, 0]
    for a, b in zip(ours(row, row, row, is_causal=True), theirs(row, row, row, attn_mask=LATER)):
        close(a.double(), b, 1e-6)


@pytest.mark.parametrize("when", ["in the layer", "in the encoder"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_it_fits_an_encoder_of_torch(batch_first, when):
    """In training and evaluation, whose fast paths would compute plain attention; neutral gates are that."""
    layer = scattered(acag(causal=False))
    made = nn.TransformerEncoderLayer(C, H, 48, 0.0, batch_first=batch_first, dtype=torch.float64)
    plain = nn.TransformerEncoder(copy.deepcopy(made), 2, enable_nested_tensor=False)
    for each in plain.layers:
        each.self_attn = beside(layer)
        each.self_attn.batch_first = batch_first
    if when == "in the layer":
        made.self_attn = AsMultiheadAttention(layer, batch_first)
    ours = nn.TransformerEncoder(made, 2, enable_nested_tensor=batch_first and when == "in the encoder")
    for each in ours.layers:
        each.self_attn = AsMultiheadAttention(copy.deepcopy(layer), batch_first)
    x, padding = normal(2, T, C), PADDING[:2]
    x = x if batch_first else x.transpose(0, 1)
    real = ~padding if batch_first else ~padding.T
    causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    for grad, train in ((True, True), (True, False), (False, False)):
        with torch.set_grad_enabled(grad):
            for how in ({}, dict(src_key_padding_mask=padding), dict(mask=causal, is_causal=True)):
                kept = real if "src_key_padding_mask" in how else torch.ones_like(real)
                got, want = (encoder.train(train)(x, **how) for encoder in (ours, plain))
                close(got[kept], want[kept], 1e-10)
    gates = ours.layers[1].self_attn.layer.attn.acag
    with torch.no_grad():
        gates.weight.normal_()
        assert (ours(x) - plain(x)).abs().max() > 1e-3, "the gates act in evaluation, too"
    ours.requires_grad_(False)(x, src_key_padding_mask=padding)  # frozen, and evaluated with gradients on


def test_a_block_of_torch_with_constraint_heads_trains_on_its_labels():
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(C, H, 4 * C, 0.0, batch_first=True, norm_first=True)
    block.self_attn = AsMultiheadAttention(ConstraintAttention(C, H, ["a", "b"], 16), batch_first=True)
    x = normal(4, T, C).float()
    labels = {"a": (x[..., 0] > 0).float(), "b": torch.full((4, T), -1.0)}
    optimizer, losses = torch.optim.Adam(block.parameters(), lr=1e-2), []
    for _ in range(25):
        y = block(x)
        terms = block.self_attn.layer.losses(*block.self_attn.side_outputs, labels)
        losses.append(terms["a"].item())
        assert y.shape == x.shape and terms["b"] == 0
        optimizer.zero_grad()
        (sum(terms.values()) + 0 * y.sum()).backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 2
    assert all(p.grad is not None for p in block.parameters())
    copy.deepcopy(block)  # after a pass that left tensors of a graph behind


def test_the_critics_scalars_have_a_gradient():
    layer, x = a2c(), normal(2, T, C)
    y, weights, advantage = layer(x, need_weights=True)
    assert advantage.shape == (2, T, H) and (weights.sum(-1) - 1).abs().max() < 1e-6
    (y.sum() + (advantage - 1).square().sum()).backward()
    assert layer.attn.a2c.critic.weight.grad.any()


# ---- mistakes ----

def called(x=torch.zeros(2, T, C), **masks):
    return lambda: acag().float()(x, **masks)


@pytest.mark.parametrize("mistake, words", [
    (lambda: AdaptiveContextualAttention(10, 3), "n_embd=10"),
    (lambda: AdaptiveContextualAttention(8, 2, mode="raw"), "acag_mode='raw'"),
    (lambda: ConstraintAttention(16, 2, variant="B", heads=5), "constraint_variant='B'"),
    (called(torch.zeros(1, 17, C)), "17 tokens are more than max_len=16"),
    (called(attn_mask=torch.ones(T, T)), "attn_mask must be boolean, True where nothing may be seen"),
    (called(attn_mask=torch.zeros(T, 3)), "attn_mask [7, 3] must be [7, 7], [2, 7, 7] or [2, 1, 7, 7]"),
    (called(attn_mask=torch.zeros(2, H, T, T)), "one for all heads"),
    (called(key_padding_mask=torch.zeros(2, 3)), "key_padding_mask [2, 3] must be [2, 7]"),
    (lambda: AsMultiheadAttention(acag(), True)(normal(1, T, C), normal(1, T, C), None),
     "must be one and the same tensor"),
    (lambda: AsMultiheadAttention(acag(), True)(*[normal(1, T, C)] * 3,
                                                attn_mask=torch.stack([BLOCKED, LATER, LATER, LATER])),
     "differs between heads")], ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_is_one_clear_line(mistake, words):
    with pytest.raises(UserError) as e:
        mistake()
    assert words in str(e.value) and "\n" not in str(e.value)
