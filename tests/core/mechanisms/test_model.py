"""
The plain GPT, compared with independent references; how it generates; its losses, initial values, sizes.
"""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

import oracle
from model import GPT, RECIPES, GPTConfig
from nanoheads import logits as logits_py
from nanoheads.logits import check_sampling, penalise, sample_token
from nanoheads.timing import mfu
from helpers import TINY_GPT, tiny
from oracle import tokens

FLAGS = [dict(recipe="gpt2"),
         dict(recipe="gpt2", bias=True, tied=False),
         dict(recipe="gpt2", pos="rope", qk_norm=True),
         dict(recipe="gpt2", norm="rmsnorm", act="relu2", zero_init=True),
         dict(recipe="gpt2", act="gelu_tanh", softcap=15.0, embed_norm=True),
         dict(recipe="modern"),
         dict(recipe="modern", pos="learned", qk_max=12.0),
         dict(recipe="gpt2", parallel=True, pos="rope", rope_share=0.25, bias=True, tied=False),
         dict(recipe="modern", rope_share=0.5, softcap=15.0, bias=True, norm="layernorm")]
recipes = pytest.mark.parametrize("recipe", ["gpt2", "modern"])


# ---- references ----

@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "+".join(f"{k}={v}" for k, v in f.items()))
def test_forward_and_gradient_equal_the_oracle(flags):
    model, idx, targets = tiny(flags), tokens(3, 11), tokens(3, 11, seed=2)
    out, want = model(idx, targets, logits=True), oracle.logits(model, idx)
    assert torch.allclose(out.logits.double(), want, atol=1e-5)  # logits are float32
    loss = oracle.cross_entropy(want, targets)
    assert out.loss.item() == pytest.approx(loss.item(), abs=1e-6)
    grads = torch.autograd.grad(out.loss, list(model.parameters()))
    wants = torch.autograd.grad(loss, list(model.parameters()))
    for (name, _), g, w in zip(model.named_parameters(), grads, wants):
        assert torch.allclose(g, w, atol=1e-6), name


def test_equals_pytorchs_own_layers_with_copied_weights():
    """PyTorch's pre-norm encoder layers, given the same weights, are a second opinion on recipe=gpt2."""
    model, idx = tiny(dict(recipe="gpt2", bias=True)), tokens(2, 16)
    c = model.config
    x = model.transformer.wte.weight[idx] + model.transformer.wpe.weight
    mask = torch.nn.Transformer.generate_square_subsequent_mask(16, dtype=torch.float64)
    for block in model.transformer.h:
        layer = torch.nn.TransformerEncoderLayer(c.n_embd, c.n_head, 4 * c.n_embd, 0.0, "gelu",
                                                 batch_first=True, norm_first=True, dtype=torch.float64)
        ours = {"self_attn.in_proj_": block.attn.c_attn, "self_attn.out_proj.": block.attn.c_proj,
                "linear1.": block.mlp.c_fc, "linear2.": block.mlp.c_proj,
                "norm1.": block.ln_1, "norm2.": block.ln_2}
        layer.load_state_dict({name + part: getattr(module, part) for name, module in ours.items()
                               for part in ("weight", "bias")})
        x = layer.eval()(x, src_mask=mask, is_causal=True)
    ln_f = model.transformer.ln_f
    want = F.layer_norm(x, (c.n_embd,), ln_f.weight, ln_f.bias) @ model.transformer.wte.weight.T
    assert torch.allclose(model(idx).logits.double(), want, atol=1e-5)


# ---- generating ----

@torch.no_grad()
def slow_generate(model, prompt, n):
    """The policy: read at most block_size tokens; on overflow keep the last half; no cache, one row."""
    block_size, out = model.config.block_size, []
    window = list(prompt)[-block_size:]
    for _ in range(n):
        out.append(model(torch.tensor([window])).logits[0, -1].argmax().item())
        window.append(out[-1])
        if len(window) > block_size:
            window = window[-(block_size // 2):]
    return out


@recipes
def test_a_batch_of_unequal_prompts_generates_what_each_does_alone(recipe):
    """Beyond block_size too, where the last half is kept."""
    model, lengths = tiny(dict(recipe=recipe)), [1, 15, 16, 6, 30]
    idx = tokens(5, 30)
    got = model.generate(idx, 40, temperature=0, lengths=lengths)
    assert torch.equal(got[:, :30], idx)
    for row, n in enumerate(lengths):
        assert got[row, 30:].tolist() == slow_generate(model, idx[row, 30 - n:].tolist(), 40), n


def test_generation_stops_at_the_stop_token_row_by_row():
    model, prompt = tiny(), tokens(3, 4)
    free = model.generate(prompt, 12, temperature=0)[:, 4:]
    stop = free[0, 3].item()
    got = model.generate(prompt, 12, temperature=0, stop_token=stop)[:, 4:]
    for row, want in zip(got.tolist(), free.tolist()):
        end = want.index(stop) if stop in want else len(want)
        assert row[:end + 1] == want[:len(row)][:end + 1]
        assert all(t == stop for t in row[end:])


def test_generation_returns_to_training_mode_and_leaves_no_gradient():
    model = tiny().train()
    out = model.generate(tokens(1, 4), 3, temperature=0)
    assert model.training and not out.requires_grad
    stream = model.stream(tokens(1, 4), 10)
    next(stream)
    stream.close()  # given up half-way
    assert model.training


@pytest.mark.parametrize("settings, shares", [
    ({}, [0.5, 0.3, 0.15, 0.05]),
    (dict(k=2), [0.625, 0.375, 0, 0]),
    (dict(p=0.7), [0.625, 0.375, 0, 0]),  # 0.5 is not yet 0.7
    (dict(p=0.5), [1, 0, 0, 0]),
    (dict(t=0.5), [0.6849, 0.2466, 0.0616, 0.0068]),
    (dict(t=0), [1, 0, 0, 0]),
    (dict(t=1e-40), [1, 0, 0, 0])], ids=str)  # no overflow on the way to the likeliest
def test_tokens_are_drawn_in_the_shares_of_temperature_top_k_and_top_p(settings, shares):
    settings = {**dict(t=1.0, k=None, p=None), **settings}
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(8000, 1)
    drawn = sample_token(logits, *settings.values(), torch.Generator().manual_seed(0))
    found, shares = torch.bincount(drawn, minlength=4) / len(drawn), torch.tensor(shares, dtype=torch.float)
    assert torch.allclose(found, shares, rtol=0, atol=0.02) and not found[shares == 0].any()


def test_repetition_penalty_pushes_down_what_was_said():
    logits = torch.tensor([2.0, -1.0, 3.0])
    penalise(logits, torch.tensor([0, 1, 0]), 2.0)
    assert logits.tolist() == [1.0, -2.0, 3.0]
    model, prompt = tiny(), tokens(2, 4)
    plain = model.generate(prompt, 30, temperature=0)
    pushed = model.generate(prompt, 30, temperature=0, repetition_penalty=1.8)
    assert len(set(pushed[0].tolist())) > len(set(plain[0].tolist()))


def test_the_repetition_penalty_reads_no_padding():
    model, idx = tiny(), tokens(2, 9)
    other = torch.cat(((idx[:, :5] + 1) % model.config.vocab_size, idx[:, 5:]), 1)
    got, want = (model.generate(prompts, 12, temperature=0, repetition_penalty=1.8, lengths=[4, 4])[:, 9:]
                 for prompts in (idx, other))
    assert torch.equal(got, want)


@pytest.mark.parametrize("bad", [dict(temperature=-1), dict(temperature=math.nan), dict(top_k=0),
                                 dict(top_p=0.0), dict(top_p=1.5), dict(repetition_penalty=0)], ids=str)
def test_impossible_sampling_is_refused_by_name(bad):
    fine = dict(temperature=1.0, top_k=None, top_p=None, repetition_penalty=1.0)
    with pytest.raises(ValueError, match=next(iter(bad))):
        check_sampling(**{**fine, **bad})


# ---- losses ----

def test_a_loss_comes_without_logits_unless_they_are_asked_for():
    """Where they are returned, autograd makes a zero gradient of their size that nobody reads."""
    model, idx = tiny(), tokens(2, 8)
    assert model(idx, idx).logits is None and model(idx).loss is None
    both = model(idx, idx, logits=True)
    assert torch.equal(both.logits, model(idx).logits) and torch.equal(both.loss, model(idx, idx).loss)


def test_unscored_targets_do_not_count():
    model, idx, targets = tiny(), tokens(1, 8), tokens(1, 8, seed=2)
    part = targets.clone()
    part[:, :4] = -1
    want = F.cross_entropy(model(idx).logits[0, 4:], targets[0, 4:])
    assert model(idx, part).loss.item() == pytest.approx(want.item(), abs=1e-6)


def loss_and_gradients(flags, dtype=torch.float64):
    """Of a batch of 3 x 10 tokens, of which some are not scored."""
    model, idx, targets = tiny(flags, zero_init=False).to(dtype), tokens(3, 10), tokens(3, 10, seed=2)
    targets[0, 4:] = targets[2, 9] = -1
    out = model(idx, targets)
    sum(out.aux.values(), out.loss).backward()
    return [out.loss, *out.aux.values(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("chunks, flags", [
    (3, dict(recipe="modern", softcap=3.0)), (7, dict(a2c="temperature")), (100, dict(bias=True))], ids=str)
def test_a_loss_in_portions_is_the_same(chunks, flags):
    """The last portion may be smaller, or none."""
    for got, want in zip(loss_and_gradients({**flags, "loss_chunks": chunks}),
                         loss_and_gradients({**flags, "loss_chunks": 1})):
        # the logits of a loss at once are float32
        assert torch.allclose(got.double(), want.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_loss_in_portions_under_autocast(dtype):
    """No further from float32 than the loss at once is, twice over; logits are float32."""
    exact = loss_and_gradients({}, torch.float32)
    with torch.autocast("cpu", dtype):
        at_once = loss_and_gradients({}, torch.float32)
        in_portions = loss_and_gradients(dict(loss_chunks=5), torch.float32)
        assert tiny().float()(tokens(1, 4)).logits.dtype == torch.float32
    for want, one, other in zip(exact, at_once, in_portions):
        scale = want.abs().max() + 1e-12
        assert (other - want).abs().max() / scale < 2 * (one - want).abs().max() / scale + 2e-2


def test_a_loss_in_portions_without_a_gradient_or_of_some_parameters():
    model, idx = tiny(dict(loss_chunks=4)), tokens(2, 8)
    want = tiny()(idx, idx).loss
    with torch.no_grad():
        assert torch.allclose(model(idx, idx).loss.float(), want)
    model.requires_grad_(False).transformer.h[0].requires_grad_(True)
    model(idx, idx).loss.backward()
    assert model.lm_head.weight.grad is None and model.transformer.h[0].mlp.c_fc.weight.grad.any()


def test_portions_follow_from_the_size_of_the_logits():
    n, V = 2**16, 50257
    x = torch.zeros(2, n // 2, 1)
    gigabytes = n * V * 4 / 1e9
    assert logits_py.portions(None, x, V) == math.ceil(gigabytes)
    assert logits_py.portions(None, x.bfloat16(), V) == math.ceil(gigabytes / 2)
    assert logits_py.portions(None, x[:, :9], V) == 1 and logits_py.portions(5, x, V) == 5


def test_a_head_is_called_as_a_module():
    """Hooks, quantisation and adapters of lm_head act."""
    model, seen = tiny(), []
    model.lm_head.register_forward_hook(lambda *a: seen.append(1))
    model(tokens(1, 4)), model(tokens(1, 4), tokens(1, 4))
    assert len(seen) == 2


def test_recomputed_activations_have_the_same_dropout():
    def grads(**kw):
        model = GPT(GPTConfig(**TINY_GPT, dropout=0.1, **kw)).train()
        torch.manual_seed(3)
        model(tokens(2, 16), tokens(2, 16, seed=2)).loss.backward()
        return [p.grad for p in model.parameters()]

    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(grads(), grads(checkpoint_activations=True)))


def test_dropout_is_off_in_eval_mode_and_on_in_training():
    model, idx = GPT(GPTConfig(**TINY_GPT, dropout=0.2)), tokens(2, 16)
    assert not torch.equal(model.train()(idx).logits, model(idx).logits)
    assert torch.equal(model.eval()(idx).logits, model(idx).logits)


@torch.no_grad()
def test_dropout_acts_on_the_embedding_on_attention_weights_and_on_both_projections():
    """Of nearly 1 it leaves nothing of what it acts on."""
    model, idx = tiny(dict(bias=True, dropout=1 - 1e-12)).train(), tokens(2, 16)
    nothing = model.head(model.transformer.ln_f.bias)
    assert torch.allclose(model(idx).logits, nothing.expand(2, 16, -1))
    model = tiny(dict(attn_dropout=1 - 1e-12))
    got = model.train()(idx).logits
    for layer, head in itertools.product(range(model.config.n_layer), range(model.config.n_head)):
        model.set_gate(layer, head, 0.0)
    assert torch.equal(got, model.eval()(idx).logits)


# ---- initial values ----

@pytest.mark.parametrize("one, other", [
    (dict(recipe="gpt2"), dict(recipe="modern")),
    (dict(n_layer=2), dict(n_layer=4)),
    (dict(pos="rope"), dict(pos="learned"))], ids=str)
def test_shared_parameters_start_bit_identical(one, other):
    a, b = (dict(GPT(GPTConfig(**{**TINY_GPT, "zero_init": False, **flags})).named_parameters())
            for flags in (one, other))
    shared = [n for n in a if n in b and a[n].shape == b[n].shape and not n.endswith("c_proj.weight")]
    assert len(shared) > 4
    assert all(torch.equal(a[n], b[n]) for n in shared)


def test_initial_values_follow_the_seed_and_gpt2s_scales():
    big = dict(TINY_GPT, n_head=4, n_embd=256, n_layer=8)
    a, b = GPT(GPTConfig(**big, seed=1)), GPT(GPTConfig(**big, seed=2))
    assert not torch.equal(a.transformer.wte.weight, b.transformer.wte.weight)
    block = a.transformer.h[0]
    assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)  # / sqrt(2 * 8 layers)
    zero = GPT(GPTConfig(**big, recipe="modern"))
    assert not zero.lm_head.weight.any() and not zero.transformer.h[3].mlp.c_proj.weight.any()
    assert zero(tokens(2, 16), tokens(2, 16)).loss.item() == pytest.approx(math.log(37), abs=1e-6)


# ---- sizes and refusals ----

def test_parameter_counts_are_those_of_gpt2():
    config = GPTConfig(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768, bias=True)
    with torch.device("meta"):
        model = GPT(config)
    assert model.num_params() == 124_439_808  # OpenAI's smallest GPT-2
    assert model.num_params(non_embedding=True) == 124_439_808 - 1024 * 768


def test_flops_count_agrees_with_pytorchs_counter():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    model = GPT(GPTConfig(**{**TINY_GPT, "n_head": 4, "n_embd": 64}, tied=False, pos="rope"))
    idx = tokens(4, 16)
    # the counter knows no CPU flash attention
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(idx, idx).loss.backward()
    # ours counts them as if they were matrices
    norms = 6 * sum(p.numel() for p in model.parameters() if p.dim() < 2)
    assert model.flops_per_token() - norms == counter.get_total_flops() / idx.numel()


def test_an_unknown_device_has_no_utilisation_rather_than_a_wrong_one(monkeypatch):
    model = GPT(GPTConfig(**TINY_GPT))
    assert mfu(model, 1e6, "cpu", "bfloat16") is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert mfu(model, 1e6, "cuda", "float32") is None
    assert mfu(model, 1e9, "cuda", "bfloat16") == pytest.approx(1e9 * model.flops_per_token() / 989e12)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Frobnicator 9000")
    assert mfu(model, 1e9, "cuda", "bfloat16") is None


@recipes
def test_a_cropped_context_keeps_the_function_and_refuses_longer_texts(recipe):
    model, idx = tiny(dict(recipe=recipe)), tokens(2, 8)
    want = model(idx).logits
    model.crop_block_size(8)
    assert torch.equal(model(idx).logits, want)
    with pytest.raises(ValueError, match="block_size=8"):
        model(tokens(2, 9))
    with pytest.raises(ValueError, match="block_size=9"):
        model.crop_block_size(9)


def test_a_recipe_sets_only_the_flags_left_open():
    assert GPTConfig(recipe="modern").act == "relu2" and GPTConfig(recipe="modern", act="gelu").act == "gelu"
    assert GPTConfig(recipe="modern", tied=True).tied and not GPTConfig(recipe="modern").tied
    for recipe, flags in RECIPES.items():
        assert all(getattr(GPTConfig(recipe=recipe), flag) is not None for flag in flags)
