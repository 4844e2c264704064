"""The plain GPT: equal to independent references, causal, the same with a cache and compiled as without."""

import ast
import inspect
import math

import pytest
import torch
from torch.nn import functional as F

import model as model_py
import oracle
from model import GPT, MECHANISM_CLASSES, RECIPES, GPTConfig
from nanoheads import logits as logits_py
from nanoheads.kernels import relu2, rms_norm, rope_tables, rotate
from nanoheads.logits import check_sampling, penalise, sample_token
from nanoheads.mechanism import flags_of
from nanoheads.timing import mfu
from helpers import TINY_GPT, tiny
from oracle import tokens

FLAGS = [dict(recipe="gpt2"),
         dict(recipe="gpt2", bias=True),
         dict(recipe="gpt2", tied=False),
         dict(recipe="gpt2", pos="rope"),
         dict(recipe="gpt2", qk_norm=True),
         dict(recipe="gpt2", norm="rmsnorm"),
         dict(recipe="gpt2", act="relu2"),
         dict(recipe="gpt2", act="gelu_tanh"),
         dict(recipe="gpt2", zero_init=True),
         dict(recipe="gpt2", softcap=15.0),
         dict(recipe="gpt2", embed_norm=True),
         dict(recipe="modern"),
         dict(recipe="modern", pos="learned"),
         dict(recipe="modern", qk_max=12.0),
         dict(recipe="gpt2", parallel=True, pos="rope", rope_share=0.25, bias=True, tied=False),
         dict(recipe="modern", rope_share=0.5),
         dict(recipe="modern", softcap=15.0, bias=True, norm="layernorm")]
all_flags = pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "+".join(f"{k}={v}" for k, v in f.items()))


# ---- oracles ----

@all_flags
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


@pytest.mark.parametrize("name, wrong", [("rope", lambda x, *a: x), ("rms", lambda x, *a: x),
                                         ("activation", lambda x, name: x.clamp_min(0)),
                                         ("visible", lambda m, i, T: torch.ones(T, T).bool())])
def test_the_oracle_notices(name, wrong, monkeypatch):
    """Negative controls: with one of its functions wrong, it is not the model."""
    monkeypatch.setattr(oracle, name, wrong)
    model, idx = tiny(dict(recipe="modern")), tokens(3, 11)
    assert not torch.allclose(model(idx).logits.double(), oracle.logits(model, idx), atol=1e-3)


def test_equals_an_independent_gpt2_style_forward_with_copied_weights():
    """PyTorch's own pre-norm encoder layers, given the same weights, are a second opinion on recipe=gpt2."""
    model, idx = tiny(dict(recipe="gpt2", bias=True)), tokens(2, 16)
    c = model.config
    x = model.transformer.wte.weight[idx] + model.transformer.wpe.weight
    mask = torch.nn.Transformer.generate_square_subsequent_mask(16, dtype=torch.float64)
    for block in model.transformer.h:
        layer = torch.nn.TransformerEncoderLayer(c.n_embd, c.n_head, 4 * c.n_embd, 0.0, "gelu",
                                                 batch_first=True, norm_first=True, dtype=torch.float64)
        layer.load_state_dict({
            "self_attn.in_proj_weight": block.attn.c_attn.weight,
            "self_attn.in_proj_bias": block.attn.c_attn.bias,
            "self_attn.out_proj.weight": block.attn.c_proj.weight,
            "self_attn.out_proj.bias": block.attn.c_proj.bias,
            "linear1.weight": block.mlp.c_fc.weight,
            "linear1.bias": block.mlp.c_fc.bias,
            "linear2.weight": block.mlp.c_proj.weight,
            "linear2.bias": block.mlp.c_proj.bias,
            "norm1.weight": block.ln_1.weight,
            "norm1.bias": block.ln_1.bias,
            "norm2.weight": block.ln_2.weight,
            "norm2.bias": block.ln_2.bias})
        x = layer.eval()(x, src_mask=mask, is_causal=True)
    ln_f = model.transformer.ln_f
    want = F.layer_norm(x, (c.n_embd,), ln_f.weight, ln_f.bias) @ model.transformer.wte.weight.T
    assert torch.allclose(model(idx).logits.double(), want, atol=1e-5)


def test_equals_hugging_face_gpt2_with_copied_weights():
    transformers = pytest.importorskip("transformers",
                                       reason="transformers is not installed: requirements-test.txt has it")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=37, n_positions=16, n_embd=48, n_layer=2, n_head=6,
                                     initializer_range=0.2)
    hf = transformers.GPT2LMHeadModel(config).eval()
    model = GPT(GPTConfig(**TINY_GPT, recipe="gpt2", bias=True, act="gelu_tanh")).eval()
    theirs = hf.state_dict()
    with torch.no_grad():
        for name, p in model.named_parameters():
            source = theirs[name]  # HF keeps the matrices of its Conv1D layers transposed
            p.copy_(source.T if p.dim() == 2 and not name.endswith(("wte.weight", "wpe.weight")) else source)
    idx = tokens(2, 16)
    with torch.no_grad():
        assert torch.allclose(model(idx).logits, hf(idx).logits, atol=1e-5)


@pytest.mark.slow
def test_hand_written_cpu_gradients_equal_autograds():
    x = torch.randn(5, 7, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rms_norm, x)
    assert torch.autograd.gradcheck(relu2, x)
    with torch.no_grad():  # without gradients PyTorch's own operations run: the same function
        assert torch.allclose(rms_norm(x), F.rms_norm(x, (8,), eps=1e-6), atol=1e-12)
    assert torch.allclose(rms_norm(x), F.rms_norm(x, (8,), eps=1e-6), atol=1e-12)
    assert torch.equal(relu2(x), F.relu(x).square())


def test_rotated_logits_depend_on_distance_alone():
    config = GPTConfig(**TINY_GPT, recipe="modern")
    cos, sin = (t.double() for t in rope_tables(config.block_size, config.head_size))
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)

    def at(x, t):
        return rotate(x, cos[t], sin[t])

    # the tables are float32
    assert at(q, 9) @ at(k, 5) == pytest.approx((at(q, 6) @ at(k, 2)).item(), abs=1e-6)
    assert at(q, 9) @ at(k, 5) != pytest.approx((at(q, 9) @ at(k, 4)).item(), abs=1e-3)


# ---- promises ----

def slow_generate(model, prompt, n, **sampling):
    """The policy: read at most block_size tokens; on overflow keep the last half; no cache, one row."""
    block_size, window, out = model.config.block_size, list(prompt)[-model.config.block_size:], []
    temperature, top_k, top_p = sampling.get("temperature", 0), sampling.get("top_k"), sampling.get("top_p")
    for _ in range(n):
        with torch.no_grad():
            logits = model(torch.tensor([window])).logits[:, -1]
        token = sample_token(logits, temperature, top_k, top_p, None).item()
        out.append(token)
        window.append(token)
        if len(window) > block_size:
            window = window[-(block_size // 2):]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
@pytest.mark.parametrize("T", [1, 5, 15, 16, 30])
def test_generation_keeps_the_last_half_beyond_block_size(recipe, T):
    model, prompt = tiny(dict(recipe=recipe)), tokens(1, T)
    got = model.generate(prompt, 45, temperature=0)
    assert got[0, T:].tolist() == slow_generate(model, prompt[0].tolist(), 45)
    assert torch.equal(got[:, :T], prompt)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
def test_a_batch_of_unequal_prompts_generates_what_each_does_alone(recipe):
    model, lengths = tiny(dict(recipe=recipe)), [1, 13, 6, 20]
    idx = tokens(4, 20)
    got = model.generate(idx, 40, temperature=0, lengths=lengths)
    for row, n in enumerate(lengths):
        want = slow_generate(model, idx[row, 20 - n:].tolist(), 40)
        assert got[row, 20:].tolist() == want, f"prompt of {n}"


@pytest.mark.slow
def test_generation_beyond_block_size_differs_from_a_sliding_window():
    """Negative control: the policy is not 'keep the last block_size tokens', and the test can tell."""
    model, prompt = tiny(dict(recipe="modern")), tokens(1, 16)
    window, out = prompt[0].tolist(), []
    for _ in range(45):
        with torch.no_grad():
            out.append(model(torch.tensor([window[-16:]])).logits[0, -1].argmax().item())
        window.append(out[-1])
    assert out != slow_generate(model, prompt[0].tolist(), 45)


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


@pytest.mark.slow
def test_sampling_by_hand():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    g = torch.Generator().manual_seed(0)

    def draw(t=1.0, k=None, p=None):
        return torch.stack([sample_token(logits, t, k, p, g) for _ in range(4000)]).flatten()

    def is_drawn(shares, **kw):
        d = draw(**kw)
        return torch.allclose(torch.bincount(d, minlength=4) / len(d), torch.tensor(shares), atol=0.03)

    assert is_drawn([0.5, 0.3, 0.15, 0.05])
    assert is_drawn([0.625, 0.375, 0, 0], k=2)
    assert is_drawn([0.625, 0.375, 0, 0], p=0.7)  # 0.5 is not yet 0.7
    assert set(draw(p=0.5).tolist()) == {0} and set(draw(p=1e-9).tolist()) == {0}
    assert is_drawn([0.6849, 0.2466, 0.0616, 0.0068], t=0.5)
    assert sample_token(logits, 0, None, None, None).item() == 0
    assert set(draw(k=99).tolist()) == {0, 1, 2, 3}
    assert set(draw(t=1e-40).tolist()) == {0}  # no overflow on the way to the likeliest


def test_repetition_penalty_pushes_down_what_was_said():
    logits = torch.tensor([2.0, -1.0, 3.0])
    penalise(logits, torch.tensor([0, 1, 0]), 2.0)
    assert logits.tolist() == [1.0, -2.0, 3.0]
    model, prompt = tiny(), tokens(2, 4)
    plain = model.generate(prompt, 30, temperature=0)
    pushed = model.generate(prompt, 30, temperature=0, repetition_penalty=1.8)
    assert len(set(pushed[0].tolist())) > len(set(plain[0].tolist()))


@pytest.mark.parametrize("bad", [dict(temperature=-1), dict(temperature=math.nan), dict(top_k=0),
                                 dict(top_p=0.0), dict(top_p=1.5), dict(repetition_penalty=0)])
def test_impossible_sampling_is_refused_by_name(bad):
    fine = dict(temperature=1.0, top_k=None, top_p=None, repetition_penalty=1.0)
    with pytest.raises(ValueError, match=next(iter(bad))):
        check_sampling(**{**fine, **bad})


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
def test_compiles_in_one_graph_and_computes_the_same(recipe):
    torch._dynamo.reset()
    model = GPT(GPTConfig(**TINY_GPT, recipe=recipe, zero_init=False))
    idx, targets = tokens(2, 16), tokens(2, 16, seed=2)
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)  # fullgraph: a graph break is an error
    want, got = (m(idx, targets, logits=True) for m in (model, fast))
    assert torch.allclose(want.logits, got.logits, atol=1e-5)
    for a, b in zip(torch.autograd.grad(want.loss, list(model.parameters())),
                    torch.autograd.grad(got.loss, list(model.parameters()))):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
def test_activation_checkpointing_changes_nothing(recipe):
    def grads(**kw):
        model = GPT(GPTConfig(**TINY_GPT, recipe=recipe, dropout=0.1, **kw)).train()
        torch.manual_seed(3)
        model(tokens(2, 16), tokens(2, 16, seed=2)).loss.backward()
        return [p.grad for p in model.parameters()]

    for a, b in zip(grads(), grads(checkpoint_activations=True)):
        assert torch.allclose(a, b, atol=1e-7)


@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
def test_bfloat16_is_finite_and_near(recipe):
    model = tiny(dict(recipe=recipe)).float()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(tokens(2, 16), tokens(2, 16, seed=2), logits=True)
    assert out.logits.dtype == torch.float32 and torch.isfinite(out.loss)
    assert abs(out.loss.item() - model(tokens(2, 16), tokens(2, 16, seed=2)).loss.item()) < 0.1


def test_a_loss_comes_without_logits_unless_they_are_asked_for():
    """Where they are returned, autograd makes a zero gradient of their size that nobody reads."""
    model, idx = tiny(), tokens(2, 8)
    assert model(idx, idx).logits is None and model(idx).loss is None
    both = model(idx, idx, logits=True)
    assert torch.equal(both.logits, model(idx).logits) and torch.equal(both.loss, model(idx, idx).loss)


# a batch of 3 x 10 tokens, of which some are not scored
def loss_and_gradients(flags, dtype=torch.float64, **options):
    model, idx, targets = tiny(flags).to(dtype), tokens(3, 10), tokens(3, 10, seed=2)
    targets[0, 4:] = targets[2, 9] = -1
    out = model(idx, targets, **options)
    sum(out.aux.values(), out.loss).backward()
    return [out.loss, *out.aux.values(), *(p.grad for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 3, 30])
@pytest.mark.parametrize("flags", [
    dict(recipe="gpt2"), dict(recipe="modern"), dict(recipe="modern", softcap=3.0), dict(bias=True),
    dict(a2c="temperature"), dict(a2c="key_bias", softcap=2.0)], ids=str)
def test_a_loss_in_portions_is_the_same(flags, chunks):
    flags = dict(flags, zero_init=False)
    for got, want in zip(loss_and_gradients({**flags, "loss_chunks": chunks}), loss_and_gradients(flags)):
        # the logits of a loss at once are float32
        assert torch.allclose(got.double(), want.double(), rtol=1e-6, atol=1e-6)


def test_a_loss_in_portions_knows_what_is_not_scored(monkeypatch):
    """Negative control: one that scores every token differs by far."""
    right = model_py.ChunkedCrossEntropy

    class Careless(right):
        @staticmethod
        def forward(ctx, x, weight, targets, *rest):
            return right.forward(ctx, x, weight, targets.clamp_min(0), *rest)
    want = loss_and_gradients({})
    monkeypatch.setattr(model_py, "ChunkedCrossEntropy", Careless)
    assert not torch.allclose(loss_and_gradients(dict(loss_chunks=2))[0].float(), want[0], rtol=1e-3)


def test_a_loss_in_portions_without_a_gradient_or_of_some_parameters():
    model, idx = tiny(dict(loss_chunks=4)), tokens(2, 8)
    want = tiny()(idx, idx).loss
    with torch.no_grad():
        assert torch.allclose(model(idx, idx).loss.float(), want)
    model.requires_grad_(False).transformer.h[0].requires_grad_(True)
    model(idx, idx).loss.backward()
    assert model.lm_head.weight.grad is None and model.transformer.h[0].mlp.c_fc.weight.grad.any()


def test_a_head_is_called_as_a_module():
    """Hooks, quantisation and adapters of lm_head act."""
    model, seen = tiny(), []
    model.lm_head.register_forward_hook(lambda *a: seen.append(1))
    model(tokens(1, 4)), model(tokens(1, 4), tokens(1, 4))
    assert len(seen) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_in_portions_under_autocast(dtype):
    """No further from float32 than the loss at once is, twice over."""
    exact = loss_and_gradients(dict(zero_init=False), torch.float32)
    with torch.autocast("cpu", dtype):
        at_once = loss_and_gradients(dict(zero_init=False), torch.float32)
        portions = loss_and_gradients(dict(zero_init=False, loss_chunks=5), torch.float32)
    for want, one, other in zip(exact, at_once, portions):
        scale = want.abs().max() + 1e-12
        assert (other - want).abs().max() / scale < 2 * (one - want).abs().max() / scale + 2e-2


def test_portions_follow_from_the_size_of_the_logits(monkeypatch):
    model, x = tiny(), torch.zeros(4, 8, 1)
    V = model.config.vocab_size
    assert logits_py.portions(None, x, V) == 1
    monkeypatch.setattr(logits_py, "MAX_LOGIT_BYTES", 32 * V * 4 / 2.5)
    assert logits_py.portions(None, x, V) == 3 and logits_py.portions(None, x.bfloat16(), V) == 2
    assert logits_py.portions(1, x, V) == 1


@pytest.mark.parametrize("chunks", [3, 5, 16, 100])
def test_the_last_portion_may_be_smaller_or_none(chunks):
    want, got = (tiny(dict(loss_chunks=n))(tokens(2, 8), tokens(2, 8)).loss for n in (1, chunks))
    assert torch.allclose(want.float(), got.float(), atol=1e-5)


@pytest.mark.slow
def test_a_loss_in_portions_compiles_in_one_graph():
    torch._dynamo.reset()
    model, idx = tiny(dict(loss_chunks=4)), tokens(2, 8)
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    want, got = (torch.autograd.grad(m(idx, idx).loss, list(model.parameters())) for m in (model, fast))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(want, got))
    torch._dynamo.reset()


def test_unscored_targets_do_not_count():
    model, idx, targets = tiny(), tokens(1, 8), tokens(1, 8, seed=2)
    part = targets.clone()
    part[:, :4] = -1
    want = F.cross_entropy(model(idx).logits[0, 4:], targets[0, 4:])
    assert model(idx, part).loss.item() == pytest.approx(want.item(), abs=1e-6)


# ---- initial values ----

@pytest.mark.parametrize("one, other", [
    (dict(recipe="gpt2"), dict(recipe="modern")),
    (dict(n_layer=2), dict(n_layer=4)),
    (dict(pos="rope"), dict(pos="learned")),
])
def test_shared_parameters_start_bit_identical(one, other):
    a, b = (dict(GPT(GPTConfig(**{**TINY_GPT, "zero_init": False, **flags})).named_parameters())
            for flags in (one, other))
    shared = [n for n in a if n in b and a[n].shape == b[n].shape and not n.endswith("c_proj.weight")]
    assert len(shared) > 4
    assert all(torch.equal(a[n], b[n]) for n in shared)


@pytest.mark.slow
def test_initial_values_follow_the_seed_and_gpt2s_scales():
    big = dict(TINY_GPT, n_head=4, n_embd=256, n_layer=8)
    a, b = GPT(GPTConfig(**big, seed=1)), GPT(GPTConfig(**big, seed=2))
    assert not torch.equal(a.transformer.wte.weight, b.transformer.wte.weight)
    block = a.transformer.h[0]
    assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)  # / sqrt(2 * 8 layers)
    zero = GPT(GPTConfig(**big, recipe="modern"))
    assert not zero.lm_head.weight.any() and not zero.transformer.h[3].mlp.c_proj.weight.any()
    uniform = math.log(37)
    assert zero(tokens(2, 16), tokens(2, 16)).loss.item() == pytest.approx(uniform, abs=1e-6)


# ---- sizes and refusals ----

def test_parameter_counts_are_those_of_gpt2(monkeypatch):
    monkeypatch.setattr(GPT, "init_weights", lambda self: None)
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


@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
def test_cropping_the_context_keeps_the_function(recipe):
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


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_dropout_is_off_in_eval_mode_and_on_in_training(dropout):
    model, idx = GPT(GPTConfig(**TINY_GPT, dropout=dropout)), tokens(2, 16)
    a, b = model.train()(idx).logits, model(idx).logits
    assert torch.equal(a, b) == (dropout == 0)
    assert torch.equal(model.eval()(idx).logits, model(idx).logits)


# ---- the interface of mechanisms ----

def words_in(cls):
    """The names, attributes, arguments and texts in the code of a class."""
    nodes = [*ast.walk(ast.parse(inspect.getsource(cls)))]
    return {getattr(node, key) for node in nodes for key in ("id", "attr", "arg", "value")
            if isinstance(getattr(node, key, None), str)}


def test_the_plain_gpt_names_no_mechanism():
    """So a mechanism is deleted without an edit in what computes the plain GPT."""
    of_mechanisms = {"A2CValue", "UNetSkip"}
    for cls in MECHANISM_CLASSES:
        of_mechanisms |= {cls.__name__, cls.name, *cls.takes, *flags_of(cls)}
    for cls in (model_py.CausalSelfAttention, model_py.MLP, model_py.Block, GPT,
                model_py.KVCache, model_py.CausalMask):
        assert words_in(cls) & of_mechanisms == set(), cls.__name__
    assert words_in(model_py.Agency) >= {"agency", "agency_learned"}, "a control"
