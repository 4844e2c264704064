"""Constraint heads in training: gates, routers, losses, a teacher, skipping, against slow references."""
import functools
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import helpers
import model as model_py
import oracle
from model import GPT, GPTConfig, Sentinel
from nanoheads import attention
from nanoheads.attention import attend
from oracle import tokens
from helpers import Largest

SMALL = dict(block_size=16, vocab_size=37, n_layer=2, n_head=3, n_embd=24, constraint_names=["a", "b"],
             constraint_layers=[0, 1])
tiny = functools.partial(helpers.tiny, std=0.3, **SMALL)


def read_by_blocks(model, idx, **kw):
    """[what each block's attention was given], and the Output with traces and maps."""
    read, hooks = [], []
    for block in model.transformer.h:
        hooks.append(block.attn.register_forward_pre_hook(lambda module, args: read.append(args[0])))
    out = model(idx, traces="maps", **kw)
    for hook in hooks:
        hook.remove()
    return read, out


# ---- where the router gates ----

GATED = {"score": dict(constraint_gate="score", constraint_heads=2), "value": dict(constraint_gate="value"),
         "output": dict(constraint_gate="output", constraint_heads=2),
         "published": dict(constraint_mode="published"),
         "published scorers": dict(constraint_mode="published", constraint_gate="output"),
         "first": dict(constraint_router_input="first"), "hard": dict(constraint_router="hard_concrete")}


def scores_agree(name, hinted=False):
    """Whether all of the model, scores and gates of each block, and their gradients, are the oracle's."""
    model, idx = tiny(**GATED[name]), tokens(2, 9)
    hint = torch.randn(2, 24, dtype=torch.float64) if hinted else None
    read, out = read_by_blocks(model, idx, router_hint=hint)
    predictions = model.predictions(idx) if hint is None else {}
    for layer, x in enumerate(read):
        want, at = oracle.attention(model, layer, x, hint)[1], f"blocks.{layer}."
        oracle.agree([out.traces[at + "head_scores"], out.traces[at + "router_gates"].expand(2, 9, -1)],
                     [want["head_scores"], want["router_gates"]], list(model.parameters()), 1e-6)
        oracle.close(out.traces[at + "map"].double(), want["map"], 1e-5)  # float32
        if predictions:
            oracle.close(predictions[at + "constraint_y"], want["constraint_y"], 1e-9)
    oracle.equals_the_oracle(model, idx, hint)


@pytest.mark.slow
@pytest.mark.parametrize("hinted", [False, True], ids=["", "hint"])
@pytest.mark.parametrize("name", GATED)
def test_gates_and_scores_equal_the_oracle(name, hinted):
    scores_agree(name, hinted)


@pytest.mark.parametrize("name, function, wrong", [
    ("score", "on_itself", lambda s, gates: s),
    ("published scorers", "constraint_scores", lambda p, y: y.sum(-1)),
    ("first", "constraint_gates", lambda c, p, x, hint, training: x[..., :2].sigmoid()),
])
def test_the_oracle_notices_another_gate(name, function, wrong, monkeypatch):
    monkeypatch.setattr(oracle, function, wrong)
    with pytest.raises(AssertionError):
        scores_agree(name)


@pytest.mark.parametrize("mode, gate", [("query", "output"), ("published", "value")])
def test_where_the_router_gates_follows_the_mode(mode, gate):
    assert tiny(constraint_mode=mode).config.constraint_gate == gate


# ---- gates of scores: rows with log(gate) on the diagonal ----

def gate_of_oneself(gate):
    """The score function of the write-up's gates [B, H, T] on the diagonal."""
    log_gate = gate.clamp_min(1e-30).log()
    return lambda score, b, h, t, s: torch.where(t == s, score + log_gate[b, h, t], score)


def rows_of_their_own(gate, dtype=torch.float64, strength=4.0, T=9, mask=None):
    """([y, lse, entropy, log sum p^2, spread] of the kernel, and of the T x T logits in float64, inputs of
    each).

    gate: of every token; strength: what the logit of each token with itself is raised by.
    """
    q, k, v = (oracle.normal(2, 3, T, 16, seed=seed) for seed in (1, 2, 3))
    k = k + 4 * strength * q / q.square().sum(-1, keepdim=True)
    slow = [t.to(dtype).double().requires_grad_() for t in (q, k, v)]
    slow.append(torch.full((2, 3, T), gate).double().requires_grad_())
    fast = [t.detach().to(dtype).requires_grad_() for t in slow[:3]]
    fast.append(slow[3].detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_())
    seen = torch.ones(T, T).tril().bool() if mask is None else mask[0, 0]
    y, rows = attend(*fast[:3], scale=0.25, mask=mask, score_mod=gate_of_oneself(fast[3]), stats="shape",
                     spread=True, n_keys=seen.sum(-1).to(fast[3].dtype))
    s = oracle.on_itself(0.25 * slow[0] @ slow[1].mT, slow[3]).masked_fill(~seen, -math.inf)
    lse, p = s.logsumexp(-1), s.softmax(-1)
    entropy, p2 = oracle.row_statistics(p)
    return [y, *rows], [p @ slow[2], lse, entropy, p2.log(), oracle.spread_of_rows(p, seen)], fast, slow


BAND = torch.ones(9, 9).tril().triu(-2).bool()[None, None]


@pytest.mark.slow
@pytest.mark.parametrize("mask", [None, BAND, torch.eye(9).bool()[None, None]],
                         ids=["causal", "window", "oneself"])
@pytest.mark.parametrize("gate", [1.0, 0.3, 1e-8])
def test_self_gated_rows_equal_those_of_the_stored_logits(gate, mask):
    got, want, fast, slow = rows_of_their_own(gate, mask=mask)
    for a, b in zip(got, want, strict=True):
        oracle.close(a, b, 1e-12)
    for i in range(4):  # each output's gradient alone
        pairs = zip(oracle.gradients(got[i:i + 1], fast), oracle.gradients(want[i:i + 1], slow), strict=True)
        for a, b in pairs:
            oracle.close(a * gate if a.dim() == 3 else a, b * gate if b.dim() == 3 else b, 1e-11)


@pytest.mark.parametrize("T", [1, 2, 9])
def test_one_key_has_no_entropy_and_its_own_value(T):
    """Whatever its gate, 0 too, and in float32 without a rounding error; no gradient is not a number."""
    for gate in (0.0, 1e-8, 0.5):
        (y, lse, entropy, log_p2, spread), _, fast, _ = rows_of_their_own(gate, torch.float32, T=T)
        assert torch.equal(y[:, :, 0], fast[2][:, :, 0])
        assert not entropy[..., 0].any() and not log_p2[..., 0].any() and not spread[..., 0].any()
        own = 0.25 * (fast[0] * fast[1]).sum(-1)[..., 0]
        assert torch.allclose(lse[..., 0], own + math.log(max(gate, 1e-30)))
        assert all(g.isfinite().all() for g in oracle.gradients([y, lse, entropy, log_p2, spread], fast))


@pytest.mark.slow
@pytest.mark.parametrize("strength", [4.0, 9.0, 20.0])
@pytest.mark.parametrize("gate", [1.0, 1e-2, 1e-8])
@pytest.mark.parametrize("dtype, tol, slack", [(torch.float32, 2e-5, 1e-5), (torch.bfloat16, 0.1, 0.03)])
def test_self_gated_rows_are_exact_beside_a_weight_near_one(dtype, tol, slack, gate, strength):
    """At 20 a token's weight on itself is 1 to float32, and its gate leaves what the others have."""
    got, want, fast, slow = rows_of_their_own(gate, dtype, strength)
    for a, b in zip(got, want, strict=True):
        oracle.close(a.double(), b, tol)
    for a, b in zip(oracle.gradients([t.double() for t in got], fast[:3]), oracle.gradients(want, slow[:3])):
        assert (a.double() - b).norm() < slack * b.norm()


@pytest.mark.slow
def test_gated_scores_store_no_t_by_t(monkeypatch):
    T = 512
    monkeypatch.setattr(attention, "LOGITS_AT_ONCE", 2**16)
    model = tiny(constraint_gate="score", acag="headwise", sink=True, n_layer=1, constraint_layers=[0],
                  block_size=T)
    model, idx = model.float(), tokens(1, T)
    with Largest() as largest:
        model.hidden(idx).sum().backward()
    assert largest.size < T * T
    with Largest() as control:
        model(idx, traces="maps")
    assert control.size >= T * T


SCORE = dict(constraint_gate="score")
READERS = {"acag": dict(acag="headwise"), "elementwise": dict(acag="elementwise"),
           "published": dict(acag="headwise", acag_mode="published"),
           "detach": dict(acag="headwise", acag_detach=True), "sink": dict(sink=True),
           "acag+sink": dict(acag="headwise", sink=True),
           "a2c": dict(a2c="published"), "a2c+acag+sink": dict(a2c="temperature", acag="headwise", sink=True),
           "a2c bias+acag": dict(a2c="key_bias", acag="headwise"),
           "window": dict(acag="headwise", sink=True, window=3),
           "oneself": dict(acag="headwise", sink=True, window=1),
           "global": dict(acag="headwise", sink=True, window=2, window_global=1)}


def gated_rows_agree(flags, T):
    """Whether hidden states, their gradients, and the traces of rows are those of the stored T x T."""
    model, idx = tiny(**SCORE, **flags), tokens(2, T)
    oracle.equals_the_oracle(model, idx, tol=1e-9 if model.config.pos == "learned" else 1e-6)
    read, out = read_by_blocks(model, idx)
    oracle.close(out.logits.double(), oracle.logits(model, idx), 1e-5)  # float32
    for layer, x in enumerate(read):
        want = oracle.attention(model, layer, x)[1]
        for name in ("entropy", "concentration", "map"):
            oracle.close(out.traces[f"blocks.{layer}.{name}"].double(), want[name], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 2, 7, 16])
@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
@pytest.mark.parametrize("name", READERS)
def test_who_reads_rows_reads_those_of_gated_scores(name, recipe, T):
    gated_rows_agree(dict(READERS[name], recipe=recipe), T)


def ungated_statistics(q, k, v, *, score_mod, **how):
    """The outputs of gated rows, and what is known of the rows before the gate."""
    return attend(q, k, v, score_mod=score_mod, **how)[0], attend(q, k, v, **how)[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["acag", "published", "sink", "acag+sink", "a2c", "window"])
def test_statistics_from_before_the_gate_are_noticed(name, monkeypatch):
    """A control. With a2c alone nothing but the traces reads them."""
    monkeypatch.setattr(model_py, "attend", ungated_statistics)
    with pytest.raises(AssertionError, match="off by"):
        gated_rows_agree(READERS[name], 7)


@pytest.mark.parametrize("flags", [{}, dict(constraint_router_input="first"), dict(constraint_skip=0.5),
                                   dict(constraint_gate="score", acag="headwise", sink=True)], ids=str)
def test_generation_with_a_hint_is_that_of_whole_passes(flags):
    model, idx = tiny(**flags), tokens(2, 9)
    hint = torch.randn(2, 24, dtype=torch.float64)
    got = model.generate(idx, 12, temperature=0, router_hint=hint)  # beyond the context, too
    assert got.size(1) == 21
    greedy = idx
    for _ in range(5):
        last = model(greedy, router_hint=hint).logits[:, -1].argmax(-1, keepdim=True)
        greedy = torch.cat((greedy, last), 1)
    assert torch.equal(got[:, :14], greedy)
    assert not torch.equal(got, model.generate(idx, 12, temperature=0)), "a control: the hint is read"


# ---- the router's gates and penalties ----

def test_hard_gates_are_zero_at_last_and_noisy_in_training_alone():
    model, idx = tiny(constraint_router="hard_concrete"), tokens(4, 9)
    out = model(idx, traces=True)
    gates = out.traces["blocks.0.router_gates"]
    assert torch.equal(gates, model(idx, traces=True).traces["blocks.0.router_gates"])
    with torch.no_grad():
        model.transformer.h[0].attn.constraint.out.bias.fill_(-9.0)
        model.transformer.h[0].attn.constraint.out.weight.zero_()
    assert not model(idx, traces=True).traces["blocks.0.router_gates"].any()
    model.train()
    one, two = (model(idx, traces=True).traces["blocks.1.router_gates"] for _ in range(2))
    assert not torch.equal(one, two)


@pytest.mark.parametrize("router", ["sigmoid", "hard_concrete"])
def test_the_routers_penalties(router):
    model = tiny(constraint_router=router, constraint_sparsity_coef=0.3, constraint_entropy_coef=0.7)
    idx, seen, few, coins = tokens(2, 9), [], [], []
    for c in (block.attn.constraint for block in model.transformer.h):
        c.fc.register_forward_hook(lambda module, args, out, c=c: seen.append(c.out(out.relu())))
    aux = model(idx, idx).aux
    for logits in seen:
        p = 1 / (1 + (-logits).exp())
        beta, low, high = Sentinel.BETA, Sentinel.LOW, Sentinel.HIGH
        opened = 1 / (1 + (-(logits - beta * math.log(-low / high))).exp())
        few.append((p if router == "sigmoid" else opened).mean())
        coins.append(-(p * p.log() + (1 - p) * (1 - p).log()).mean())
    assert len(seen) == 2
    assert aux["constraint_router"].item() == pytest.approx(0.3 * sum(few).item(), rel=1e-6)
    assert aux["constraint_entropy"].item() == pytest.approx(0.7 * sum(coins).item(), rel=1e-6)


# ---- what it is trained on ----

def test_scores_are_judged_in_the_chosen_blocks_alone():
    model, idx = tiny(constraint_loss_layers=[1]), tokens(2, 9)
    out = model(idx, idx, traces=True, constraint_targets={"b": torch.ones(2, 9)})
    want = 0.2 * F.softplus(-out.traces["blocks.1.constraint.b"]).mean()
    assert out.aux["constraint.b"].item() == pytest.approx(want.item(), rel=1e-6)


def test_warm_up_weighs_the_loss_on_labels_and_nothing_else():
    losses = dict(constraint_match="kl", constraint_sparsity_coef=0.3, sentinel="sigmoid")
    model, teacher, idx = tiny(constraint_warmup=4, **losses).train(), tiny(draw=3), tokens(2, 9)

    def aux(training):
        model.train(training)
        targets = {"b": torch.ones(2, 9)}
        return model(idx, idx, constraint_targets=targets, teacher=teacher.predictions(idx)).aux
    whole, share = aux(training=False), {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0}
    assert set(whole) == {"constraint.b", "constraint_match", "constraint_router", "gate_l1"}
    for step, part in share.items():
        model.at_step(step)
        for name, loss in aux(training=True).items():
            part_of_it = part if name in ("constraint.b", "constraint_match") else 1.0
            assert loss.item() == pytest.approx(part_of_it * whole[name].item(), rel=1e-6), (step, name)


@pytest.mark.parametrize("kind", ["kl", "huber"])
def test_a_student_is_compared_with_its_teacher(kind):
    student, teacher = tiny(constraint_match=kind, constraint_match_coef=0.5), tiny(draw=3)
    idx = tokens(2, 9)
    said = teacher.predictions(idx)
    out = student(idx, idx, teacher=said, traces=True)
    ours = student.predictions(idx)
    if kind == "kl":
        terms = []
        for block in range(2):
            for name in "ab":
                p, q = (1 / (1 + (-each[f"blocks.{block}.constraint.{name}"]).exp()) for each in (said, ours))
                terms.append((p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean())
    else:
        away = [(ours[f"blocks.{i}.constraint_y"] - said[f"blocks.{i}.constraint_y"]).abs() for i in range(2)]
        terms = [torch.where(d < 1, d.square() / 2, d - 0.5).mean() for d in away]
    want = 0.5 * np.mean([t.item() for t in terms])
    assert out.aux["constraint_match"].item() == pytest.approx(want, rel=1e-5)
    assert student(idx, idx, teacher=ours).aux["constraint_match"].item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("kind", ["kl", "huber"])
def test_a_student_is_compared_with_any_features(kind):
    """By a map of its heads' outputs, of which no logit depends; gradients reach the heads."""
    student = tiny(constraint_match=kind, constraint_match_coef=0.5, constraint_features=5)
    plain, idx = tiny(), tokens(2, 9)
    plain.load_state_dict({name: t for name, t in student.state_dict().items() if ".features." not in name})
    assert torch.equal(student(idx).logits, plain(idx).logits)
    said = 2 * torch.randn(2, 9, 5, dtype=torch.float64)
    terms = []
    for i, block in enumerate(student.transformer.h):
        y = student.predictions(idx)[f"blocks.{i}.constraint_y"].transpose(1, 2).reshape(2, 9, 16)
        mapped = y @ block.attn.constraint.features.weight.T + block.attn.constraint.features.bias
        p, q = (each.exp() / each.exp().sum(-1, keepdim=True) for each in (said, mapped))
        d = (mapped - said).abs()
        each = (p * (p / q).log()).sum(-1) if kind == "kl" else torch.where(d < 1, d.square() / 2, d - 0.5)
        terms.append(each.mean().item())
    out = student(idx, idx, teacher=said)
    assert out.aux["constraint_match"].item() == pytest.approx(0.5 * np.mean(terms), rel=1e-5)
    out.aux["constraint_match"].backward()
    assert student.transformer.h[0].attn.constraint.c_attn.weight.grad.any()
    for wrong in (said[..., :4], plain.predictions(idx)):
        with pytest.raises(ValueError, match="a tensor .* of that width"):
            student(idx, idx, teacher=wrong)


# ---- skipping ----

@pytest.fixture
def pairs(monkeypatch):
    """How many pairs of a row and a head each call of the fused kernel was asked for."""
    found, fused = [], attention.attend_fused

    def counted(q, *rest):
        found.append(len(q) * q.size(1))
        return fused(q, *rest)
    monkeypatch.setattr(attention, "attend_fused", counted)
    return found


def decoded(model, idx):
    """Logits of idx [B, T], token by token."""
    cache = model_py.KVCache(model.config)
    return torch.cat([model.head(model.hidden(token, cache)) for token in idx.split(1, dim=1)], 1)


@pytest.mark.parametrize("cached", [False, True], ids=["rows", "decoding"])
def test_heads_below_the_threshold_are_not_computed(monkeypatch, pairs, cached):
    """The same function as with their gates at 0, and no attention of a closed head."""
    model, idx = tiny(constraint_skip=0.5), tokens(3, 9)
    gates = [g > 0 for name, g in model(idx, traces=True).traces.items() if name.endswith("router_gates")]
    opened = [g if cached else g.any(1) for g in gates]
    assert any(o.any() and not o.all() for o in opened), "some are open, some closed"
    own = 3 * 3 * (9 if cached else 1)  # rows, heads of the layer, tokens
    pairs.clear()
    fast = decoded(model, idx) if cached else model(idx).logits
    assert sum(pairs) == sum(own + o.sum().item() for o in opened)
    monkeypatch.setattr(model_py.Heads, "close_all_but", lambda *a: None)
    assert (model(idx).logits - fast).abs().max() < 1e-12
    model.transformer.h[0].attn.constraint.skip = 0.0
    assert (model(idx).logits - fast).abs().max() > 1e-4, "a control: the threshold changes something"


def test_a_layer_whose_added_heads_are_all_closed_computes_its_own_alone(pairs):
    model, idx = tiny(constraint_skip=0.5, xsa=True), tokens(2, 9)
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.constraint.out.bias.fill_(-99.0)
    fast = model(idx).logits
    assert pairs == [2 * 3] * 2
    for block in model.transformer.h:
        block.attn.constraint.skip = 0.0
    assert (model(idx).logits - fast).abs().max() < 1e-12 and pairs[2:] == [2 * 5] * 2


@pytest.mark.parametrize("flags, skipped", [
    (dict(n_kv_head=1), True), (dict(window=3), True), (dict(head_mix=True), True),
    (dict(routing="sigmoid", routing_top_k=1, n_kv_head=1), True), (dict(value_residual=True), True),
    (dict(acag="headwise"), False), (dict(sink=True), False), (dict(roles=["local"]), False)], ids=str)
def test_heads_are_skipped_where_nothing_else_reads_them(monkeypatch, pairs, flags, skipped):
    """And values stay: in rows, decoded, padded, with documents in a row, and in a compiled graph."""
    monkeypatch.setattr(model_py, "SKIP_FROM", 1)
    model, idx = tiny(constraint_skip=0.5, **flags), tokens(3, 9)
    documents = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]).expand(3, 9)

    @torch.no_grad()
    def all_ways():
        pairs.clear()
        cache, pad = model_py.KVCache(model.config), torch.tensor([0, 4, 2])
        padded = [model.hidden(piece, cache, pad) for piece in idx.split([6, 1, 2], dim=1)]
        found = [model(idx).logits, decoded(model, idx), torch.cat(padded, 1)]
        count = sum(pairs)
        return [*found, model(idx, positions=documents).logits], count
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")(idx).logits
    torch._dynamo.reset()
    fast, few = all_ways()
    monkeypatch.setattr(model_py.Heads, "close_all_but", lambda *a: None)
    slow, many = all_ways()
    assert all((a - b).abs().max() < 1e-12 for a, b in zip([*fast, compiled], [*slow, slow[0]]))
    assert (few < many) == skipped


def test_no_head_at_all_is_no_attention():
    q = torch.zeros(2, 0, 3, 8)
    assert attend(q, q, q, scale=1.0)[0].shape == (2, 0, 3, 8)


# ---- train.py ----


def test_a_checkpoint_from_before_there_were_these_flags_is_read(tmp_path):
    model = tiny(constraint_mode="published")
    config = {key: value for key, value in asdict(model.config).items()
              if key not in ("constraint_gate", "constraint_router", "constraint_skip", "constraint_stop")}
    again = GPT(GPTConfig(**config)).double().eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(tokens(2, 9)).logits, model(tokens(2, 9)).logits)
