"""
Constraint heads, compared with the oracle's formulas: sizes, noisy gates, losses, hints, old checkpoints.
"""

from dataclasses import asdict

import pytest
import torch

from helpers import TINY_GPT, config_of_variant_b, tiny
from model import CONSTRAINTS, GPT, MECHANISMS, GPTConfig
from nanoheads.logits import label_losses
from oracle import constraint_loss, normal, tokens

SMALL = dict(n_head=3, n_embd=24, std=0.3, constraint_names=["a", "b"], constraint_layers=[0, 1])


# ---- sizes ----

def test_variant_a_widens_the_concat_and_variant_b_shrinks_the_heads():
    C, H, n = 96, 6, 3
    for variant, step, D in (("A", 1, 16), ("B", 1, 10), ("B", 8, 8)):  # 96 / 9 heads: 6 dimensions are left
        model = GPT(GPTConfig(**{**TINY_GPT, "n_embd": C}, constraint_names=CONSTRAINTS,
                              constraint_variant=variant, constraint_round=step))
        s = {name: tuple(p.shape) for name, p in model.named_parameters()}
        at = "transformer.h.1.attn."  # the block at 2/3 of depth 2
        assert s[at + "c_attn.weight"] == (3 * H * D, C)
        assert s[at + "constraint.c_attn.weight"] == (3 * n * D, C)
        assert s[at + "c_proj.weight"] == (C, H * D) and s[at + "constraint.c_proj.weight"] == (C, n * D)
        assert s[at + "constraint.fc.weight"] == (128, C) and s[at + "constraint.out.weight"] == (n, 128)
        assert s[at + "constraint.w1"] == (n, D, D) and s[at + "constraint.w2"] == (n, D)
        assert s["transformer.h.0.attn.c_attn.weight"] == (3 * C, C)
        assert not any(k.startswith("transformer.h.0.attn.constraint") for k in s)


@pytest.mark.parametrize("size, width", [((48, 5, 2), 6), ((36, 6, 1), 5), ((64, 4, 3), 9)])
def test_variant_b_has_the_write_ups_head_size(size, width):
    assert config_of_variant_b(size).head_size_in(0) == width


def test_a_rounded_size_has_fewer_parameters():
    with torch.device("meta"):
        exact, rounded = (GPT(config_of_variant_b((1024, 16, 3), n_layer=1, constraint_layers=[0],
                                                  constraint_round=step)) for step in (1, 8))
    assert [m.transformer.h[0].attn.head_size for m in (exact, rounded)] == [53, 48]
    assert rounded.num_params() < exact.num_params()
    assert rounded.flops_per_token() < exact.flops_per_token()


# ---- gates ----

def test_hard_gates_are_zero_at_last_and_noisy_in_training_alone():
    model, idx = tiny(constraint_router="hard_concrete", **SMALL), tokens(4, 9)

    def gates(layer):
        return model(idx, traces=True).traces[f"blocks.{layer}.router_gates"]

    assert torch.equal(gates(0), gates(0))
    with torch.no_grad():
        model.transformer.h[0].attn.constraint.out.bias.fill_(-9.0)
        model.transformer.h[0].attn.constraint.out.weight.zero_()
    assert not gates(0).any()
    model.train()
    assert not torch.equal(gates(1), gates(1))


@pytest.mark.parametrize("flags", [{}, dict(constraint_router_input="first"), dict(constraint_skip=0.5),
                                   dict(constraint_gate="score", acag="headwise", sink=True)], ids=str)
def test_generation_with_a_hint_is_that_of_whole_passes(flags):
    model, idx, hint = tiny(**SMALL, **flags), tokens(2, 9), normal(2, 24)
    got = model.generate(idx, 12, temperature=0, router_hint=hint)  # beyond the context, too
    assert got.size(1) == 21
    greedy = idx
    for _ in range(5):
        last = model(greedy, router_hint=hint).logits[:, -1].argmax(-1, keepdim=True)
        greedy = torch.cat((greedy, last), 1)
    assert torch.equal(got[:, :14], greedy)
    assert not torch.equal(got, model.generate(idx, 12, temperature=0)), "the hint is read"


@pytest.mark.parametrize("mode, gate", [("query", "output"), ("published", "value")])
def test_a_checkpoint_from_before_there_were_gates_to_choose_is_read(mode, gate):
    """Where the router gates follows from the mode."""
    model = tiny(constraint_mode=mode, **SMALL)
    config = {key: value for key, value in asdict(model.config).items()
              if key not in ("constraint_gate", "constraint_router", "constraint_skip", "constraint_stop")}
    again = GPT(GPTConfig(**config)).double().eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(tokens(2, 9)).logits, model(tokens(2, 9)).logits)
    assert again.config.constraint_gate == gate


# ---- losses ----

def test_warm_up_weighs_the_loss_on_labels_and_nothing_else():
    flags = dict(constraint_match="kl", constraint_sparsity_coef=0.3, sentinel="sigmoid", **SMALL)
    model, teacher, idx = tiny(constraint_warmup=4, **flags), tiny(draw=3, **SMALL), tokens(2, 9)

    def aux(training):
        model.train(training)
        targets = {"b": torch.ones(2, 9)}
        return model(idx, idx, constraint_targets=targets, teacher=teacher.predictions(idx)).aux
    whole = aux(training=False)
    assert set(whole) == {"constraint.b", "constraint_match", "constraint_router", "gate_l1"}
    for step, share in enumerate((0.25, 0.5, 0.75, 1.0, 1.0)):
        model.at_step(step)
        for name, loss in aux(training=True).items():
            part = share if name in ("constraint.b", "constraint_match") else 1.0
            assert loss.item() == pytest.approx(part * whole[name].item(), rel=1e-6), (step, name)


@pytest.mark.parametrize("kind", ["kl", "huber"])
def test_no_logit_depends_on_a_students_map_to_features(kind):
    """Gradients go through it into the heads; a teacher of another kind is refused."""
    student = tiny(constraint_match=kind, constraint_features=5, **SMALL)
    plain, idx = tiny(**SMALL), tokens(2, 9)
    plain.load_state_dict({name: t for name, t in student.state_dict().items() if ".features." not in name})
    assert torch.equal(student(idx).logits, plain(idx).logits)
    student(idx, idx, teacher=normal(2, 9, 5)).aux["constraint_match"].backward()
    assert student.transformer.h[0].attn.constraint.c_attn.weight.grad.any()
    for wrong in (normal(2, 9, 4), plain.predictions(idx)):
        with pytest.raises(ValueError, match="a tensor .* of that width"):
            student(idx, idx, teacher=wrong)


@pytest.mark.parametrize("targets, words", [({"d": torch.ones(2, 9)}, "targets for .*'d'.* for a, b"),
                                            ({}, "the heads are for a, b")])
def test_labels_of_no_head_are_refused(targets, words):
    with pytest.raises(ValueError, match=words):
        tiny(**SMALL)(tokens(2, 9), tokens(2, 9), constraint_targets=targets)


def test_labels_that_are_all_unknown_make_no_loss():
    model = tiny(**SMALL)
    loss = model(tokens(2, 9), tokens(2, 9), constraint_targets={"a": -torch.ones(2, 9)}).aux["constraint.a"]
    loss.backward()
    assert loss == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("focal", [0.3, 0.99])
def test_a_weak_focus_has_a_finite_gradient_where_a_score_is_right(focal):
    scores = torch.tensor([[40.0, -40.0, 0.3, 120.0]], requires_grad=True)  # sigmoid(40) is 1 in float32
    loss = label_losses({"a": scores}, {"a": torch.tensor([[1.0, 0.0, 1.0, 1.0]])}, focal=focal)["a"]
    gradient, = torch.autograd.grad(loss, scores)
    assert gradient.isfinite().all() and gradient[0, 2] < 0
    want = constraint_loss({"a": scores[:, 2:3].double()}, {"a": torch.ones(1, 1)}, {}, focal, 1.0) / 4
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)


def test_a_constraint_may_be_called_advantage():
    losses = []
    for name in ("advantage", "another"):
        model = tiny({**MECHANISMS["a2c_temperature"], "constraint_names": [name]})
        out = model(tokens(1, 9), tokens(1, 9, seed=2), constraint_targets={name: torch.ones(1, 9)})
        losses.append(out.aux["a2c_advantage"])
    assert losses[0] == losses[1]
