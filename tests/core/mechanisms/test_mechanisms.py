"""Every mechanism, and mixtures of them, compared with its formula in tests/oracle.py; mistakes once made."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import model as model_py
import oracle
from helpers import ROOT, TINY_GPT, pass_of, small_models, tiny
from model import (ALL_ON, CONSTRAINTS, GPT, MECHANISM_CLASSES, MECHANISMS, A2C, GPTConfig, Heads, KVCache,
                   Window)
from nanoheads.mechanism import flags_of
from nanoheads.pruning import constant_gate, pack, prune_heads
from nanoheads.traces import explain, summaries
from oracle import close, equals_the_oracle, normal, sigmoid, tokens

# on CPU it is the reference, not a kernel
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
INF = MECHANISMS["routing_inf"]  # the write-up's formula: softmax over the selected


# ---- the whole model ----

@pytest.mark.parametrize("name", MECHANISMS)
def test_values_and_gradients_equal_the_written_out_formula(name):
    """With all auxiliary losses, and what traces say."""
    equals_the_oracle(tiny(MECHANISMS[name]))


@pytest.mark.parametrize("name", [name for name, flags in MECHANISMS.items()
                                  if flags.get("routing") == "published"])
def test_the_write_ups_routing_equals_the_written_out_formula_in_training(name):
    """Where its printed code has gates at all."""
    equals_the_oracle(tiny(MECHANISMS[name]).train())


BOTH = dict(constraint_layers=[0, 1])
MIXTURES = {
    "write-ups": dict(INF, routing_top_k=4, sentinel="hard_concrete", unet="published", a2c="published",
                      constraint_names=CONSTRAINTS, constraint_mode="published", n_embd=24),
    "widths": dict(BOTH, routing="moh", routing_shared=1, head_norm=True, unet="add", a2c="key_bias",
                   constraint_names=["a"], constraint_heads=2, constraint_variant="B", acag="elementwise",
                   acag_mode="published", output_gate="elementwise", window=3, window_global=1),
    "some blocks": dict(BOTH, window=2, window_layers=[1], parallel=True, xsa=True, acag="headwise",
                        routing="moh", routing_shared=2, routing_top_k=4, constraint_names=["a"]),
    "roles": dict(roles=["previous", "long", "local"], roles_waves=8, a2c="key_bias", constraint_names=["a"],
                  window=4, routing="sigmoid", acag="headwise", key_offset=True),
    "switches": dict(routing="sigmoid", agency=True, agency_enforce=False, unet="concat", unet_skips=False,
                     acag="headwise", window=2, bias=True),
    "learned": dict(BOTH, agency=True, agency_learned=True, agency_enforce=False, sentinel="sigmoid",
                    constraint_names=["a"], head_norm=True),
    "gated scores": dict(BOTH, constraint_names=["a", "b"], constraint_gate="score", sink=True, xsa=True,
                         acag="headwise", roles=["long", "local"], constraint_heads=2),
    "gated scores of one key": dict(constraint_names=["a"], constraint_gate="score", acag="headwise",
                                    acag_mode="published", window=1, a2c="temperature", sink=True),
    "hard gates": dict(BOTH, constraint_names=["a", "b"], constraint_gate="value", head_norm=True,
                       constraint_router="hard_concrete", constraint_router_input="first",
                       constraint_sparsity_coef=0.3, constraint_entropy_coef=0.7),
    "skipped": dict(BOTH, constraint_names=["a", "b"], constraint_skip=0.5, output_gate="headwise"),
    "all skipped": dict(BOTH, constraint_names=["a", "b"], constraint_skip=0.99, diff=True, xsa=True),
    "published scorers": dict(BOTH, constraint_names=["a", "b"], constraint_mode="published",
                              constraint_gate="output", constraint_heads=2, constraint_match="huber",
                              constraint_sparsity_coef=0.3),
    "weights of labels": dict(BOTH, constraint_names=["a", "b"], constraint_heads=2, constraint_focal=1.5,
                              constraint_name_coef=[2.0, 0.5], constraint_positive_coef=2.0,
                              constraint_match="kl", constraint_loss_layers=[1]),
    "features": dict(BOTH, constraint_names=["a", "b"], constraint_match="kl", constraint_features=5),
    "heads of size one": dict(BOTH, n_head=4, n_embd=36, head_dim=8, constraint_names=["a", "b", "c"],
                              constraint_heads=10, constraint_variant="B", recipe="modern", qk_max=12.0),
    "heads of an odd size": dict(BOTH, n_head=4, n_embd=64, constraint_names=["a", "b", "c"],
                                 constraint_variant="B", recipe="modern", constraint_mode="published"),
    "rivals": dict(BOTH, short_conv="qkv", short_conv_width=2, value_residual=True, value_embedding=True,
                   fox=True, query_gain=True, stream_scalars=True, constraint_names=["a"], unet="add",
                   roles=["previous", "long", "local"], sentinel="sigmoid", agency=True),
    "rivals pruned": dict(head_ids=[[1, 2, 5], [0, 1]], short_conv="kv", short_conv_width=4, fox=True,
                          value_residual=True, value_embedding=True, query_gain=True,
                          sentinel="hard_concrete"),
    "llama": dict(recipe="llama", n_kv_head=3, qkv_bias=True, qk_norm=True, qk_scale=True, norm_eps=1e-3,
                  rope_base=100.0, rope_scaling=[4.0, 1.0, 2.0, 12.0], head_dim=6, constraint_names=["a"],
                  xsa=True, short_conv="qkv", tied=True),
    "grouped": dict(n_kv_head=2, key_offset=True, xsa=True, acag="headwise", query_gain=True, routing="moh",
                    short_conv="qkv", value_residual=True, value_embedding=True, sentinel="sigmoid",
                    bias=True),
    "multi-query": dict(n_kv_head=1, fox=True, roles=["previous", "long"], constraint_names=["a"], sink=True,
                        a2c="key_bias", window=3, short_conv="kv"),
    "two maps": dict(diff=True, fox=True, roles=["previous", "long"], a2c="key_bias", constraint_names=["a"],
                     window=3, head_mix=True, sentinel="sigmoid", xsa=True, routing="moh", key_offset=True),
    "two maps, grouped": dict(diff=True, n_kv_head=3, query_gain=True, sink=True, head_mix=True,
                              head_ids=[[2, 3], [0, 1, 4, 5]], stream_scalars=True),
    "detached beside another reader": dict(acag="headwise", acag_detach=True, sink=True),
    "pairs": dict(BOTH, diff_v1=True, fox=True, constraint_names=["a"], window=4, head_mix=True,
                  head_ids=[[2, 3], [0, 1, 4, 5]], depth_attention=True, sentinel="sigmoid"),
    "paired heads": dict(paired_heads=True, a2c="key_bias", sink=True, constraint_names=["a"], window=3,
                         constraint_gate="score", acag="headwise", key_offset=True, mudd=True, mudd_from=2),
    "pruned": dict(head_ids=[[1, 2, 5], [0]], routing="moh", roles=["previous", "long"], a2c="published",
                   constraint_names=["a"]),
    "all on": dict(ALL_ON, n_layer=3, recipe="gpt2", bias=True),
    "all on, modern": dict(ALL_ON, n_layer=5, recipe="modern")}


@pytest.mark.slow
@pytest.mark.parametrize("flags", MIXTURES.values(), ids=MIXTURES)
def test_mixtures_equal_the_written_out_formula(flags):
    equals_the_oracle(tiny(flags))


@settings(max_examples=25)
@given(small_models())
def test_drawn_mixtures_equal_the_written_out_formula(flags):
    """And compute in bfloat16, forward and backward, without a kernel that meets two types."""
    model = tiny(flags)
    equals_the_oracle(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.float()(tokens(2, 7), tokens(2, 7)).loss
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["published scorers", "gated scores", "hard gates"])
def test_a_hint_is_what_the_router_reads(name):
    model, hint = tiny(MIXTURES[name]), normal(2, 48, seed=5)
    equals_the_oracle(model, hint=hint)
    assert not torch.allclose(model(tokens(2, 9), router_hint=hint).logits, model(tokens(2, 9)).logits)


@pytest.mark.parametrize("flags", [MECHANISMS["acag"], MECHANISMS["acag_published"], dict(sink=True),
                                   dict(constraint_names=["a"], constraint_gate="score")], ids=str)
def test_rows_of_one_key_and_uniform_rows_have_finite_gradients(flags):
    """Where a spread is exactly 0 its root has no slope, and of one key the logarithm of n is 0."""
    for T, window, uniform in ((1, None, False), (9, 1, False), (9, None, True)):
        model = tiny(flags, window=window)
        if uniform:
            for block in model.transformer.h:
                torch.nn.init.zeros_(block.attn.c_attn.weight[:48])
        loss = model(tokens(2, T), tokens(2, T, seed=2)).loss
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        assert all(g.isfinite().all() for g in grads if g is not None)


def test_every_flag_of_a_mechanism_is_in_the_oracle_or_listed_with_a_reason():
    """The list is neither short of one nor has one too many, and the tests that it names are there. All
    flags of a mechanism are named after its first one.
    """
    flags, read = {name for cls in MECHANISM_CLASSES for name in flags_of(cls)}, oracle.flags_read()
    assert flags - read - set(oracle.WITHOUT) == set(), "tests/oracle.py has neither formula nor reason"
    assert set(oracle.WITHOUT) - (flags - read) == set(), "these have a formula, or are no flags any more"
    files = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("tests/*/*/test_*.py")}
    for file, names_a_test, test in (why.partition("::") for why in oracle.WITHOUT.values()):
        if names_a_test and (file in files or (ROOT / "tests/lab").is_dir()):  # the core may be alone
            assert f"\ndef {test}(" in files[file]
    for cls in MECHANISM_CLASSES:
        assert all(name.startswith(cls.flag.removesuffix("_names")) for name in flags_of(cls))


# ---- routing ----

def test_the_write_ups_gates_shrink_the_heads_to_about_one_in_h_at_the_start():
    x = normal(2, 16, 96)

    def size(**flags):
        model = tiny(flags, live=False, n_embd=96)
        attn = model.transformer.h[0].attn  # the other weights are the same in all of these
        return attn(x, pass_of(model, x))[0].norm().item()

    plain = size()
    assert size(**INF, routing_top_k=6) / plain == pytest.approx(1 / 6, rel=0.02)
    assert size(**INF) / plain == pytest.approx(1 / math.sqrt(3 * 6), rel=0.1)  # half the heads, a third each
    assert size(routing="moh", routing_top_k=6) / plain == pytest.approx(1, rel=0.1)


def test_different_tokens_select_different_heads_at_the_start():
    for flags in (INF, dict(routing="moh"), dict(routing="sigmoid")):
        traces = tiny(flags, live=False, n_embd=96)(tokens(8, 16), traces=True).traces
        chosen = {tuple(row) for row in traces["blocks.0.selected"].flatten(0, 1).tolist()}
        assert len(chosen) >= 10, flags  # of the 20 ways to choose 3 heads of 6


@pytest.mark.parametrize("flags, total, without_positions", [
    ({}, 90_397_440, 89_611_008), (dict(routing="published"), 93_996_432, 93_210_000)],
                         ids=["plain", "routed"])
def test_parameter_counts_are_those_of_the_routing_write_up(flags, total, without_positions):
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=1024, vocab_size=6064, n_layer=12, n_head=12, n_embd=768, **flags))
    assert model.num_params() == total
    assert model.num_params(non_embedding=True) == without_positions


def test_gates_in_training_alone_make_two_different_models():
    """The write-up's code: what is evaluated is not what was trained."""
    idx = tokens(2, 9)
    for flags, same in ((INF, True), (MECHANISMS["routing_published"], False),
                        (dict(routing="published"), False)):
        model = tiny(flags)
        assert torch.equal(model(idx).logits, model.train()(idx).logits) == same


# ---- gates ----

@pytest.mark.parametrize("logit", [-2.0, 0.3, 3.0])
def test_hard_concrete_gates_are_the_papers_distribution_in_training(logit):
    """And in evaluation they are near its mean."""
    model, idx = tiny(sentinel="hard_concrete", n_layer=1, n_head=400, n_embd=400, block_size=2), tokens(1, 2)
    model.transformer.h[0].attn.sentinel.logit.data.fill_(logit)

    def gates():
        return model(idx, traces=True).traces["blocks.0.gates.sentinel"].flatten()

    fixed = gates()
    torch.manual_seed(0)
    model.train()
    draws = torch.cat([gates() for _ in range(10)])
    u = (torch.arange(10000).double() + 0.5) / 10000  # every quantile of the noise, evenly
    exact = (1.2 * sigmoid(((u / (1 - u)).log() + logit) / (2 / 3)) - 0.1).clamp(0, 1)
    assert abs(draws.mean() - exact.mean()) < 0.03 and abs(draws.std() - exact.std()) < 0.03
    assert (draws.mean() - fixed).abs().max() < 0.12
    assert abs((draws == 0).double().mean() - (1 - oracle.chance_open(torch.tensor(logit)))) < 0.03


def agency_gates(model, layer=0):
    return model(tokens(1, 2), traces=True).traces[f"blocks.{layer}.gates.agency"].flatten()


@pytest.mark.parametrize("enforce", [True, False])
def test_the_factor_of_every_state_with_and_without_consent(enforce):
    model = tiny(dict(agency=True, agency_enforce=enforce), live=False)
    for head, (state, factor) in enumerate(oracle.STATES.items()):
        for consent in (True, False):
            model.set_state(1, head, state=state, consent=consent, step=12)
            want = factor if enforce and consent else 0.0 if enforce else factor or 1.0
            assert agency_gates(model, 1)[head].item() == pytest.approx(want, abs=1e-7)
    assert agency_gates(model, 1)[4:].tolist() == [1.0, 1.0]
    signals = model(tokens(1, 2), traces=True).traces["blocks.1.agency_last_signal"]
    assert signals.tolist() == [12, 12, 12, 12, 0, 0]


def test_withdrawing_a_head_takes_its_consent_and_coming_back_gives_it_but_no_other_move():
    model = tiny(dict(agency=True), live=False)
    for change, gate in ((dict(state="withdrawn"), 0.0), (dict(state="overloaded"), 0.5),
                         (dict(consent=False), 0.0), (dict(state="active"), 0.0), (dict(consent=True), 1.0),
                         (dict(consent=False), 0.0), (dict(state="withdrawn", consent=True), 0.0),
                         (dict(state="active"), 1.0)):
        model.set_state(0, 4, **change)
        assert agency_gates(model)[4] == gate, change


def test_learned_states_start_active():
    model = tiny(MECHANISMS["agency_learned"], live=False)
    for i, agency in enumerate(block.attn.agency for block in model.transformer.h):
        assert (agency_gates(model, i) == 1).all()
        agency.metrics.normal_()
        assert (agency.logits().argmax(-1) == 0).all(), "whatever is measured first"


def test_a_gate_set_by_hand_is_one_more_factor_on_that_head_alone():
    model, idx = tiny(dict(agency=True, sentinel="sigmoid", constraint_names=["a"])), tokens(2, 9)
    before = constant_gate(model.transformer.h[1].attn)
    model.set_gate(1, 1, 0.25)
    model.set_gate(1, 3, 2.0)  # a withdrawn head
    model.set_gate(1, 6, 0.75)  # constraint heads are numbered on
    traces = model(idx, traces=True).traces
    gates = [traces[f"blocks.1.gates.{name}"].flatten() for name in ("by_hand", "sentinel", "agency")]
    assert gates[0].tolist() == [1, 0.25, 1, 2.0, 1, 1, 0.75] and before[3] == 0
    close(math.prod(gates), before * gates[0], 0)
    plain = tiny(n_embd=96)
    want = plain(idx).logits
    plain.set_gate(0, 2, 0.0)  # works without any mechanism, as does zeroing what the head sends out
    got = plain(idx).logits
    plain.set_gate(0, 2, 1.0)
    assert torch.equal(plain(idx).logits, want)
    plain.transformer.h[0].attn.c_proj.weight.data[:, 32:48] = 0
    assert torch.allclose(plain(idx).logits, got, atol=1e-6) and not torch.allclose(want, got, atol=1e-3)


@pytest.mark.parametrize("call, arguments, words", [
    ("set_gate", (2, 0, 1.0), "no block 2"), ("set_gate", (-1, 0, 1.0), "no block -1"),
    ("set_gate", (0, 6, 1.0), "no head 6"), ("set_gate", (0, 0, math.nan), "a number of at most"),
    ("set_state", (0, 0, "tired"), "'tired' must be one of active"), ("set_state", (0, 0), "agency off")])
def test_what_cannot_be_set_of_a_head_is_said_in_one_line(call, arguments, words):
    model = tiny(dict(agency="agency" not in words))
    with pytest.raises(ValueError, match=words) as e:
        getattr(model, call)(*arguments)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("gated", ["headwise", "elementwise"])
def test_heads_can_go_one_after_the_other(gated):
    model, idx = tiny(dict(output_gate=gated, agency=True)), tokens(2, 9)
    for head in (1, 4, 0):
        model.set_gate(0, head, 0.0)
    want = model.hidden(idx)
    for head in (1, 4, 0):
        prune_heads(model, {0: [head]})
    close(model.hidden(idx), want, 1e-9)
    close(pack(model).hidden(idx), want, 1e-9)


# ---- U-Net skips ----

@pytest.mark.slow
@pytest.mark.parametrize("mode", ["concat", "add", "scalar", "published"])
def test_block_i_joins_the_output_of_block_n_minus_i_plus_1(mode):
    for n_layer in (2, 3, 4, 5, 8):
        equals_the_oracle(tiny(dict(unet=mode), n_layer=n_layer, n_embd=24, n_head=2), tokens(1, 5))


def test_skips_start_as_a_share_that_falls_with_depth():
    for n_layer, shares in ((2, [0.5]), (3, [0.5]), (8, [0.5, 0.375, 0.25, 0.125])):
        concat, add, scalar = (tiny(flags, live=False, n_layer=n_layer).fuse for flags in (
            dict(unet="concat"), dict(unet="add"), dict(unet="scalar", unet_init=0.5)))
        assert len(concat) == len(shares)
        for i, share in enumerate(shares):
            close(concat[i].weight, torch.cat((share * torch.eye(48), torch.zeros(48, 48)), 1).double(), 0)
            assert sigmoid(add[i].logit).item() == pytest.approx(share, abs=1e-6)
            assert scalar[i].weight.item() == share
    for mode, name in (("scalar", "weight"), ("add", "logit")):  # modded-nanogpt reports gains with 1
        fuse = tiny(dict(unet=mode, unet_init=1.0), live=False).fuse[0]
        fused = fuse(torch.zeros(1), torch.ones(1))
        fused.sum().backward()
        assert fused.item() == pytest.approx(1.0, abs=1e-3) and getattr(fuse, name).grad > 5e-4


# ---- A2C ----

def test_a_critic_is_summed_up_by_explained_variance_and_correlation():
    model, idx, targets = tiny(dict(a2c="temperature")), tokens(2, 9), tokens(2, 9, seed=2)
    targets[0, :3] = -1
    traces, scored = model(idx, targets, traces=True).traces, targets != -1
    found = summaries(traces, targets)
    G, A = (traces[f"a2c.{name}"][scored].numpy() for name in ("return", "advantage"))
    assert found["a2c.explained_variance"].item() == pytest.approx(1 - A.var() / G.var(), abs=1e-4)
    for i in range(2):
        said = traces[f"blocks.{i}.advantage"].mean(-1)[scored].detach().numpy()
        correlation = found[f"blocks.{i}.advantage_correlation"].item()
        assert correlation == pytest.approx(np.corrcoef(said, A)[0, 1], abs=1e-4)


def test_nothing_is_said_of_a_critic_whose_returns_do_not_vary():
    """In a new model of the modern recipe all tokens have one probability: returns differ by rounding."""
    model = GPT(GPTConfig(**TINY_GPT, a2c="temperature", recipe="modern", zero_init=True))
    idx, targets = tokens(2, 9), tokens(2, 9, seed=2)
    assert not summaries(model(idx, targets, traces=True).traces, targets)


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


def test_a_temperature_that_would_overflow_is_bounded():
    """exp(a) is infinite from a = 89 in float32 and from 12 in float16: held at exp(8) for any larger a."""
    attn = model_py.CausalSelfAttention(GPTConfig(n_embd=4, n_head=2, n_layer=1, a2c="temperature"), 0)
    for weight, factor in ((100.0, math.exp(8)), (1.0, math.exp(4))):
        torch.nn.init.constant_(attn.a2c.critic.weight, weight)
        for dtype in (torch.float32, torch.float16):
            heads = Heads(x=torch.ones(1, 3, 4, dtype=dtype), q=torch.ones(1, 2, 3, 2, dtype=dtype))
            A2C.before_attention(attn.a2c, attn, heads)
            assert (heads.q - factor).abs().max() < 1e-3 * factor


# ---- priors of roles, random blocks ----

@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-4), (torch.bfloat16, 0.01)], ids=str)
def test_priors_have_one_peak_within_the_context(dtype, tol):
    """Positions are counted in float32, since 1,000 and 1,001 are one number in bfloat16."""
    T, roles = 1024, ["local", "long", "previous", "free"]
    model = GPT(GPTConfig(block_size=T, vocab_size=37, n_layer=1, n_head=4, n_embd=32, roles=roles))
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight.zero_()  # so that there is nothing but the priors
        model.transformer.h[0].attn.roles.strength.fill_(1.0)
        maps = model.to(dtype)(tokens(1, T), traces="maps").traces["blocks.0.map"]
    for role, row in zip(roles, maps[0, :, -1].double().flip(-1)):
        want = torch.tensor([oracle.prior(role, d, model.config.roles_waves) for d in range(T)]).double()
        close((row / row[0]).log(), want - want[0], tol)
        if role in ("local", "previous"):  # 1 at one distance, and elsewhere at most 2/3
            at, near = (0, 8) if role == "local" else (1, 0)
            assert want[at] == 1 and max(p for d, p in enumerate(want) if abs(d - at) > near) <= 2 / 3


@pytest.mark.parametrize("flags", [dict(window=2, window_global=1, window_random=2, window_block=3),
                                   dict(window=0, window_random=1)], ids=str)
def test_random_blocks_lie_before_the_window_and_do_not_follow_the_seed(flags):
    configs = [GPTConfig(block_size=32, vocab_size=5, seed=seed, **flags) for seed in (1, 2)]
    table, other = (Window(config).random_cells for config in configs)
    assert torch.equal(table, other)
    size, window = configs[0].window_block, configs[0].window
    for i, row in enumerate(table):
        before = [j for j in range(len(table)) if (j + 1) * size - 1 <= i * size - window]
        assert row.sum() == min(len(before), flags["window_random"])
        assert set(row.nonzero().flatten().tolist()) <= set(before)


# ---- what runs on CUDA alone, as far as a CPU can tell ----

ON_CUDA = {"acag_detach+random": {**MECHANISMS["acag_detach"], **MECHANISMS["window_global_random"]},
           "roles+key_bias+acag": {**MECHANISMS["roles"], **MECHANISMS["a2c_key_bias"], **MECHANISMS["acag"]},
           "ALL_ON+window": {**ALL_ON, "window": 40}}


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
def test_the_flex_attention_branch_has_no_graph_breaks(monkeypatch):
    """Graphs are counted: with fullgraph=True Dynamo captures what else breaks a graph, such as nonzero()."""
    monkeypatch.setattr(model_py, "has_flex_attention", lambda device: True)
    torch._dynamo.reset()
    flags = dict(ON_CUDA["acag_detach+random"], routing="moh", block_size=160, n_layer=1)
    model, idx, graphs = GPT(GPTConfig(**{**TINY_GPT, **flags})).eval(), tokens(2, 160), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    fast = torch.compile(model, backend=backend)
    with torch.no_grad():
        close(fast(idx, idx).loss, model(idx, idx).loss, 1e-5)
    assert len(graphs) == 1
    torch._dynamo.reset()


# ---- scores in words ----

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
