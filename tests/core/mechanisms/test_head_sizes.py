"""Head sizes that divide nothing: variant B of constraint heads, RoPE of an odd size, zeros for a kernel."""

from dataclasses import asdict

import pytest
import torch
from torch.nn import functional as F

import oracle
from model import GPT, MECHANISMS, GPTConfig, KVCache
from nanoheads import attention, checkpoint, kernels, start
from nanoheads.common import UserError
from helpers import config_of_variant_b as config_of, flags_of_variant_b as flags_of
from helpers import tiny
from oracle import agree, close, dense, normal, rms, tokens, turned, write_up

# on CPU it is the reference, not a kernel
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

# (n_embd, heads, names) -> the head size that the write-up gives all heads of the block, n_embd // all heads
SIZES = {(48, 5, 2): 6, (36, 6, 1): 5, (64, 4, 3): 9}
sizes = pytest.mark.parametrize("size", SIZES, ids=lambda size: "{}-{}+{}".format(*size))
recipes = pytest.mark.parametrize("recipe", ["gpt2", "modern"])
modes = pytest.mark.parametrize("mode", ["query", "published"])


# ---- the write-up's layer ----

def equals_the_write_up(model, tol=1e-9):
    """Whether both blocks' outputs and scores are the write-up's, and all gradients too."""
    read, put_out = [], []

    def note(module, args, out):
        read.append(args[0])
        put_out.append(out[0])

    hooks = [block.attn.register_forward_hook(note) for block in model.transformer.h]
    traces = model(tokens(2, 7), traces=True).traces
    for hook in hooks:
        hook.remove()
    for layer, (x, y) in enumerate(zip(read, put_out)):
        attn = model.transformer.h[layer].attn
        want, scores = write_up(attn, model.config, x)
        got = traces[f"blocks.{layer}.head_scores"]
        agree([y, got], [want, scores], [x, *attn.parameters()], tol)


@pytest.mark.slow
@sizes
@recipes
@modes
def test_variant_b_equals_the_write_up_forward_and_gradient(size, recipe, mode):
    model = tiny(flags_of(size, recipe=recipe, constraint_mode=mode))
    assert {block.attn.head_size for block in model.transformer.h} == {SIZES[size]}
    equals_the_write_up(model)
    oracle.equals_the_oracle(model, tol=1e-6)  # the whole model; its RoPE has tables of float64


@pytest.mark.slow
@recipes
def test_logits_may_have_a_largest_value_and_heads_several_for_a_name(recipe):
    equals_the_write_up(tiny(flags_of((64, 4, 2), recipe=recipe, constraint_heads=2, qk_norm=True,
                                        qk_max=12.0)))


@recipes
@modes
def test_a_rounded_size_does_not_equal_the_write_up(recipe, mode):
    model = tiny(flags_of((64, 4, 3), recipe=recipe, constraint_mode=mode, constraint_round=8))
    assert model.transformer.h[0].attn.head_size == 8
    with pytest.raises(AssertionError, match="heads of another size"):
        equals_the_write_up(model)


def test_the_write_up_notices_the_scale_of_a_padded_size():
    model = tiny(flags_of((64, 4, 3)))
    model.transformer.h[1].attn.scale = 16 ** -0.5
    with pytest.raises(AssertionError, match="off by"):
        equals_the_write_up(model)


@pytest.mark.slow
def test_the_write_up_notices_other_pairs_of_a_rotation(monkeypatch):
    """Rolled by half of an odd size, dimensions meet others than their partners."""
    monkeypatch.setattr(kernels, "swap_halves", lambda x: x.roll(x.size(-1) // 2, -1))
    with pytest.raises(AssertionError, match="off by"):
        equals_the_write_up(tiny(flags_of((64, 4, 3), recipe="modern")))
    equals_the_write_up(tiny(flags_of((48, 5, 2), recipe="modern")))  # of an even size it is the same


# ---- parameters ----


def test_a_rounded_size_has_fewer_parameters():
    with torch.device("meta"):
        exact, rounded = (GPT(config_of((1024, 16, 3), n_layer=1, constraint_layers=[0],
                                        constraint_round=step)) for step in (1, 8))
    assert [m.transformer.h[0].attn.head_size for m in (exact, rounded)] == [53, 48]
    assert rounded.num_params() < exact.num_params()
    assert rounded.flops_per_token() < exact.flops_per_token()


# ---- what every model does ----

@pytest.mark.slow
@sizes
@recipes
@modes
def test_it_is_causal_and_the_same_with_a_cache_and_padding(size, recipe, mode):
    model, idx = tiny(flags_of(size, recipe=recipe, constraint_mode=mode)), tokens(2, 9)
    whole = model(idx).logits
    for t in (1, 5, 8):
        other = idx.clone()
        other[:, t] = (other[:, t] + 1) % 37
        changed = (model(other).logits - whole).abs().amax((0, 2)) > 0
        assert not changed[:t].any() and changed[t:].all()
    cache = KVCache(model.config)
    parts = [model.head(model.hidden(idx[:, t:t + 1], cache)) for t in range(9)]
    close(torch.cat(parts, 1), whole, 1e-5)  # logits are float32
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), idx), 1)
    close(model.head(model.hidden(padded, pad=torch.tensor([3, 3])))[:, 3:], whole, 1e-5)


@recipes
def test_bfloat16_is_near_float64(recipe):
    model, idx = tiny(flags_of((64, 4, 3), recipe=recipe)), tokens(2, 9)
    want = model(idx).logits
    with torch.autocast("cpu", torch.bfloat16):
        out = model.float()(idx, idx, logits=True)
    out.loss.backward()
    assert (out.logits - want).abs().max() < 0.05 * want.abs().max()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


# ---- RoPE ----

@pytest.mark.parametrize("D", [1, 2, 5, 8, 53])
def test_rope_of_an_odd_size_leaves_the_last_dimension_alone(D):
    x, (cos, sin) = normal(6, D), (t.double() for t in kernels.rope_tables(6, D))
    y = kernels.rotate(x, cos, sin)
    close(y, turned(x), 1e-12)
    close(y.norm(dim=-1), x.norm(dim=-1), 1e-6)
    assert torch.equal(y[1:, -1], x[1:, -1]) == bool(D % 2)
    assert D < 2 or not torch.equal(y[1:, 0], x[1:, 0])
    if D % 2:
        even = kernels.rope_tables(6, D - 1)
        assert torch.equal(cos[:, :-1].float(), even[0]) and torch.equal(sin[:, :-1].float(), even[1])


@pytest.mark.slow
@pytest.mark.parametrize("D", [1, 5, 6, 53])
def test_heads_of_odd_sizes_and_their_gradient(D):
    rope = [t[:, None, None].double() for t in kernels.rope_tables(5, D)]
    qkv = normal(2, 5, 3, 3, D, grad=True)
    got = kernels.heads_of(qkv, True, rope)
    q, k, v = qkv.transpose(1, 3).unbind(2)
    want = [torch.stack([torch.stack([turned(row) for row in rows]) for rows in rms(t)]) for t in (q, k)]
    agree(list(got), [*want, v], [qkv], 1e-9)


# ---- zeros for a kernel ----

@pytest.fixture
def padding(monkeypatch):
    """As on a GPU, zeros up to a multiple of 8; {(q's, k's, v's size)} that the kernel was given."""
    seen, sdpa = set(), F.scaled_dot_product_attention

    def watched(q, k, v, **options):
        seen.add((q.size(-1), k.size(-1), v.size(-1)))
        return sdpa(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(attention, "wants_eights", lambda device: True)
    return seen


ON_TOP = {"alone": {}, "two maps": MECHANISMS["diff"], "window": dict(window=3),
          "skipped": dict(constraint_skip=0.5)}


@pytest.mark.slow
@pytest.mark.parametrize("flags", ON_TOP.values(), ids=ON_TOP)
@recipes
def test_zeros_for_a_kernel_change_neither_output_nor_gradient(flags, recipe, padding, monkeypatch):
    model, idx = tiny(flags_of((64, 4, 3), recipe=recipe, **flags)), tokens(2, 9)
    padded = model.hidden(idx)
    assert padding and all(size % 8 == 0 for sizes in padding for size in sizes)
    padding.clear()
    monkeypatch.setattr(attention, "wants_eights", lambda device: False)
    as_it_is = model.hidden(idx)
    assert padding and all(size == 9 for sizes in padding for size in sizes)
    agree([padded], [as_it_is], list(model.parameters()), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("D, to", [(5, 8), (8, 8), (53, 56)])
def test_attention_of_padded_heads_is_the_formula(D, to, padding):
    q, k, v = (normal(2, 3, 6, D, seed=i, grad=True) for i in range(3))
    y = attention.attend(q, k, v, scale=D ** -0.5)[0]
    agree([y], [dense(q, k, v, D ** -0.5)[0]], [q, k, v], 1e-10)
    assert padding == {(to,) * 3}
    mask = attention.block_mask(6, q.device, lambda query, key: key <= query)
    with torch.no_grad():  # on a CPU it has no backward pass here
        y, lse = attention.flex(q, k, v, D ** -0.5, mask)
    close(y, dense(q, k, v, D ** -0.5)[0], 1e-6)
    close(lse, dense(q, k, v, D ** -0.5)[1], 1e-6)


def test_the_scale_of_a_padded_head_would_be_noticed(padding):
    q, k, v = (normal(2, 3, 6, 53, seed=i) for i in range(3))
    y = attention.attend(q, k, v, scale=56 ** -0.5)[0]
    assert (y - dense(q, k, v, 53 ** -0.5)[0]).abs().max() > 1e-3


def test_a_kernel_on_the_cpu_gets_no_zeros():
    assert attention.wants_eights(torch.device("cuda")) and not attention.wants_eights(torch.device("cpu"))
    q = normal(1, 2, 3, 5)
    assert all(t is q for t in attention.pad_to_eights(q, q, q))


# ---- refusals ----

@pytest.mark.slow
@recipes
def test_heads_may_be_one_wide(recipe):
    model = tiny(flags_of((36, 4, 3), constraint_heads=10, recipe=recipe))
    assert model.config.head_size_in(0) == 1
    equals_the_write_up(model, 1e-7)


# ---- checkpoints and results ----

def written(model, path):
    """The model's checkpoint."""
    meta = dict(name="x", encoding="byte", vocab_size=37)
    checkpoint.save(path, dict(model=model.state_dict(), config=asdict(model.config), meta=meta, step=3))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("step, size", [(8, 8), (1, 9)])
def test_a_checkpoint_of_variant_b_keeps_its_head_size(step, size, tmp_path):
    model = tiny(flags_of((64, 4, 3), constraint_round=step))
    path = written(model, tmp_path / "ckpt.pt")
    again = checkpoint.build(checkpoint.read(path), path)
    assert {block.attn.head_size for block in again.transformer.h} == {size}
    assert again.config.constraint_round == step
    assert torch.equal(again(tokens(2, 9)).logits, model.float()(tokens(2, 9)).logits)


def test_a_checkpoint_with_a_rounded_size_is_another_model(tmp_path):
    """Nothing loads it with heads of the exact size, not even by mistake."""
    model = tiny(flags_of((64, 4, 3), constraint_round=8))
    path = written(model, tmp_path / "ckpt.pt")
    state, flags = checkpoint.read(path), set(GPTConfig.defaults())
    saved = checkpoint.config_of(state, path)
    with pytest.raises(UserError, match="constraint_round=1 here is 8 there"):
        start.check_same_model(saved, path, config_of((64, 4, 3)), flags)
    start.check_same_model(saved, path, config_of((64, 4, 3), constraint_round=8), flags)
    with pytest.raises(UserError, match="constraint_round cannot be changed after training"):
        checkpoint.build(state, path, settings=["constraint_round=1"])
