"""The layers of the write-ups beside nn.MultiheadAttention: masks, weights, dropout.

Their formulas are compared in tests/lab/hub/test_dropin.py.
"""

import copy
import math

import pytest
import torch
from torch import nn

from nanoheads import attention
from nanoheads.common import UserError
from lab.hub.layers import (A2CAttention, AdaptiveContextualAttention, AsMultiheadAttention, AttentionLayer,
                            ConstraintAttention, CriticAttention)
from helpers import alive
from oracle import agree, normal

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


def beside(layer):
    """nn.MultiheadAttention with the layer's projections."""
    theirs = nn.MultiheadAttention(C, H, batch_first=True, dtype=torch.float64).eval()
    own = layer.attn.c_attn, layer.attn.c_proj
    theirs.in_proj_weight.data, theirs.in_proj_bias.data = own[0].weight.data, own[0].bias.data
    theirs.out_proj.weight.data, theirs.out_proj.bias.data = own[1].weight.data, own[1].bias.data
    return theirs


def scattered(layer):
    """No projection is small, no bias 0; what makes a layer neutral stays."""
    generator = torch.Generator().manual_seed(4)
    for linear in (layer.attn.c_attn, layer.attn.c_proj):
        for p in linear.parameters():
            p.data.normal_(0, 0.3, generator=generator)
    return layer


def first(found):
    return found if torch.is_tensor(found) else found[0]


PADDING = torch.tensor([[False] * T, [False] * 5 + [True] * 2, [True] * 2 + [False] * 5])
BLOCKED = torch.rand(T, T, generator=torch.Generator().manual_seed(2)) < 0.4
BLOCKED.fill_diagonal_(False)
MASKS = {"none": {}, "padding": dict(key_padding_mask=PADDING), "mask": dict(attn_mask=BLOCKED),
         "both": dict(key_padding_mask=PADDING, attn_mask=BLOCKED)}


def additive(masks):
    return {name: torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -math.inf)
            for name, mask in masks.items()}


@pytest.mark.slow
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("make, causal", [(acag, True), (acag, False), (a2c, True), (a2c, False),
                                          (constraint, True)])
def test_with_neutral_gates_a_layer_is_multi_head_attention(make, causal, masks):
    """Outputs and gradients at tokens that are no padding, whatever form the masks have."""
    layer = scattered(make() if make is constraint else make(causal=causal))
    theirs, x = beside(layer), normal(3, T, C).requires_grad_()
    seen = {**masks}
    if causal:
        seen["attn_mask"] = seen.get("attn_mask", torch.zeros(T, T, dtype=torch.bool)) | ~torch.ones(
            T, T, dtype=torch.bool).tril()
    want, weights = theirs(x, x, x, **seen, average_attn_weights=False)
    real = ~masks.get("key_padding_mask", torch.zeros(3, T, dtype=torch.bool))
    real &= want.isfinite().all(-1)  # a row that sees nothing is not a number there
    r = normal(int(real.sum()), C, seed=3)
    dx, = torch.autograd.grad((want[real] * r).sum(), x, retain_graph=True)
    for each in (masks, additive(masks)):
        found = layer(x, **each, need_weights=True)
        got, maps = (found[0], found[1]["blocks.0.map"]) if make is constraint else found[:2]
        assert (got[real] - want[real]).abs().max() < 1e-12
        assert (maps[:, :H].transpose(1, 2)[real] - weights.transpose(1, 2)[real]).abs().max() < 1e-6
        assert (first(layer(x, **each))[real] - want[real]).abs().max() < 1e-12
    if not dx.isnan().any():
        assert (torch.autograd.grad((got[real] * r).sum(), x)[0] - dx).abs().max() < 1e-11
    wrong = first(layer(x))  # the control: without masks it is another function
    assert not masks or (wrong[real] - want[real]).abs().max() > 1e-3


@pytest.mark.parametrize("layer", [acag(), acag(causal=False), a2c(), a2c(mode="published"), constraint(),
                                   constraint(causal=False),
                                   constraint(causal=False, constraint_router_input="first"),
                                   AdaptiveContextualAttention(C, H, 16, "published").double().eval()],
                         ids=lambda layer: type(layer).__name__)
def test_padding_is_as_if_it_were_not_there(layer):
    """Gates too: a row gives what its real tokens alone give, wherever the padding is."""
    alive(layer, 0.3)
    x = normal(3, T, C)
    got = first(layer(x, key_padding_mask=PADDING))
    for row, padded in enumerate(PADDING):
        alone = first(layer(x[row:row + 1, ~padded]))
        assert (got[row, ~padded] - alone[0]).abs().max() < 1e-9
    other = first(layer(torch.where(PADDING[..., None], 9.0, x), key_padding_mask=PADDING))
    assert torch.equal(other[~PADDING], got[~PADDING])


def test_dropout_acts_in_training_alone():
    for make in (acag, a2c, constraint):
        layer, x = scattered(make(dropout=0.5)), normal(2, T, C)
        assert torch.equal(first(layer(x)), first(layer(x)))
        layer.train()
        assert not torch.equal(first(layer(x)), first(layer(x)))
    assert acag(dropout=0.5).attn.attn_dropout == 0 and a2c(dropout=0.5).attn.attn_dropout == 0.5


@pytest.mark.parametrize("mode", ["normalised", "published"])
def test_under_a_causal_mask_a_layer_is_causal(mode):
    """What ACAG's gates count, too."""
    causal, free = (AdaptiveContextualAttention(C, H, 16, mode, causal=on).double() for on in (True, False))
    alive(causal, 0.3)
    free.load_state_dict(causal.state_dict())
    x, later = normal(3, T, C), torch.ones(T, T, dtype=torch.bool).triu(1)
    assert (free(x, attn_mask=later) - causal(x)).abs().max() < 1e-12 < (free(x) - causal(x)).abs().max()
    got, want = (layer(x, PADDING, later)[~PADDING] for layer in (free, causal))
    assert (got - want).abs().max() < 1e-12


# ---- in the place of nn.MultiheadAttention ----

@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", [{}, dict(key_padding_mask=PADDING), dict(attn_mask=BLOCKED),
                                   dict(attn_mask=BLOCKED.expand(3 * H, T, T))],
                         ids=["none", "padding", "mask", "a mask for each head"])
@pytest.mark.parametrize("make", [acag, a2c])
def test_it_is_called_as_multi_head_attention_is(make, masks, batch_first):
    layer = scattered(make(causal=False))
    theirs, ours = beside(layer), AsMultiheadAttention(layer, batch_first)
    theirs.batch_first, x = batch_first, normal(3, T, C)
    x = x if batch_first else x.transpose(0, 1)
    real = ~masks.get("key_padding_mask", torch.zeros(3, T, dtype=torch.bool))
    real = real if batch_first else real.T
    for how in ({}, dict(average_attn_weights=False), dict(need_weights=False)):
        (got, weights), (want, wanted) = (attn(x, x, x, **masks, **how) for attn in (ours, theirs))
        assert (got - want)[real].abs().max() < 1e-12
        assert (weights is None) == (wanted is None) == ("need_weights" in how)
        if wanted is not None:  # rows of padding mean nothing
            apart = (weights - wanted).abs().amax(-1)
            apart = apart if apart.dim() == 2 else apart.amax(1)
            assert weights.shape == wanted.shape and apart[real if batch_first else real.T].max() < 1e-6
    row = x[0] if batch_first else x[:, 0]
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    got = ours(row, row, row, is_causal=True)
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(got, theirs(row, row, row, attn_mask=later)))


def test_what_it_cannot_attend_to_is_one_clear_line():
    attn, x = AsMultiheadAttention(acag(), True), normal(2, T, C)
    with pytest.raises(UserError, match="must be one and the same tensor"):
        attn(x, x.clone(), x)
    mask = BLOCKED.repeat(2 * H, 1, 1)
    mask[1] = ~mask[1]
    with pytest.raises(UserError, match="differs between heads"):
        attn(x, x, x, attn_mask=mask)


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
                assert (got - want)[kept].abs().max() < 1e-10
    gates = ours.layers[1].self_attn.layer.attn.acag
    with torch.no_grad():
        gates.weight.normal_()
        assert (ours(x) - plain(x)).abs().max() > 1e-3, "the gates act in evaluation, too"
    ours.requires_grad_(False)(x, src_key_padding_mask=padding)  # frozen, and evaluated with gradients on
    copy.deepcopy(ours)


def test_constraint_heads_in_an_encoder_keep_their_traces_for_the_losses():
    made = nn.TransformerEncoderLayer(C, H, 48, 0.0, batch_first=True)
    made.self_attn = AsMultiheadAttention(ConstraintAttention(C, H, ["a"], 16), True)
    out = made(torch.randn(2, T, C))
    traces, = made.self_attn.side_outputs
    loss = out.sum() + sum(made.self_attn.layer.losses(traces, {"a": torch.rand(2, T)}).values())
    loss.backward()
    assert all(p.grad is not None for p in made.parameters())
    copy.deepcopy(made)  # a graph cannot be copied


def test_the_critics_scalars_have_a_gradient():
    layer, x = a2c(), normal(2, T, C)
    y, weights, advantage = layer(x, need_weights=True)
    assert advantage.shape == (2, T, H) and (weights.sum(-1) - 1).abs().max() < 1e-6
    (y.sum() + (advantage - 1).square().sum()).backward()
    assert layer.attn.a2c.critic.weight.grad.any()


def test_the_layers_former_name_is_still_read():
    """Its page had it; the printed class of that name takes other arguments."""
    assert A2CAttention is CriticAttention


def test_a_block_of_torch_with_constraint_heads_trains_on_its_labels():
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(C, H, 4 * C, 0.0, batch_first=True, norm_first=True)
    block.self_attn = AsMultiheadAttention(ConstraintAttention(C, H, ["a", "b"], 16), batch_first=True)
    x = normal(4, T, C).float()
    labels = {"a": (x[..., 0] > 0).float(), "b": torch.full((4, T), -1.0)}
    optimizer, losses = torch.optim.Adam(block.parameters(), lr=1e-2), []
    for _ in range(40):
        y = block(x)
        terms = block.self_attn.layer.losses(*block.self_attn.side_outputs, labels)
        losses.append(terms["a"].item())
        assert y.shape == x.shape and terms["b"] == 0
        optimizer.zero_grad()
        sum(terms.values()).backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("masks, words", [
    (dict(attn_mask=torch.ones(T, T)), "attn_mask must be boolean, True where nothing may be seen, or of 0"),
    (dict(attn_mask=torch.zeros(T, 3)), r"attn_mask \[7, 3\] must be \[7, 7\], \[2, 7, 7\] or \[2, 1, 7,"),
    (dict(attn_mask=torch.zeros(2, H, T, T)), "one for all heads"),
    (dict(key_padding_mask=torch.zeros(2, 3)), r"key_padding_mask \[2, 3\] must be \[2, 7\]")])
def test_masks_that_cannot_be_are_one_clear_line(masks, words):
    with pytest.raises(UserError, match=words):
        acag()(normal(2, T, C), **masks)


def test_constraint_heads_as_a_layer_see_later_tokens_where_asked():
    """Its page promises it, and causal=False was an error."""
    x, layers = torch.randn(1, 9, C), {}
    for causal in (True, False):
        torch.manual_seed(1)
        layers[causal] = ConstraintAttention(C, H, ["a"], 16, causal=causal).eval()
    other = x.clone()
    other[:, -1] += 1
    for causal, layer in layers.items():
        first = [layer(each)[0][:, :-1] for each in (x, other)]
        assert torch.equal(*first) == causal


# ---- score functions ----

@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("at_once", [2**21, 64])  # 64: one query in each portion
def test_layers_take_score_functions(causal, at_once, monkeypatch):
    """Also where later tokens are seen, which no portion may leave out: a cap, then ALiBi's distances."""
    monkeypatch.setattr(attention, "LOGITS_AT_ONCE", at_once)
    layer = AttentionLayer(C, H, 16, causal, bias=True, alibi="fixed", score_cap=2.0)
    layer = scattered(layer.double().eval())
    x = normal(2, T, C, seed=3).requires_grad_()
    y = layer.run(x)[0]
    q, k, v = layer.attn.c_attn(x).unflatten(-1, (3, H, C // H)).permute(2, 0, 3, 1, 4)
    score = 2 * torch.tanh(q @ k.mT * (C // H) ** -0.5 / 2)
    t = torch.arange(T)
    slopes = torch.tensor([2 ** (-8 * (h + 1) / H) for h in range(H)], dtype=torch.float64)
    score = score - slopes[:, None, None] * (t[:, None] - t).abs()
    if causal:
        score = score.masked_fill(t > t[:, None], -math.inf)
    want = layer.attn.c_proj((score.softmax(-1) @ v).transpose(1, 2).flatten(2))
    agree([y], [want], [x, *layer.parameters()], 1e-10)
