"""
Mechanisms from the literature, compared with other people's code for them, and in float16. The oracle is
tests/oracle.py.
"""

import functools
import os
from types import SimpleNamespace

import pytest
import torch

from helpers import pass_of, tiny
from model import GPT, GPTConfig
from oracle import close, normal, tokens


wide = functools.partial(tiny, n_embd=96, std=0.08)


@pytest.mark.slow
def test_the_sink_is_that_of_gpt_oss():
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss",
                                  reason="transformers is optional")
    model, x, projected = wide(dict(sink=True)), normal(2, 9, 96), []
    attn = model.transformer.h[0].attn
    attn.c_proj.register_forward_pre_hook(lambda module, args: projected.append(args[0]))
    attn(x, pass_of(model, x))
    q, k, v = (t.unflatten(-1, (6, 16)).transpose(1, 2) for t in attn.c_attn(x).chunk(3, -1))
    theirs = SimpleNamespace(num_key_value_groups=1, sinks=attn.sink.logit, training=False)
    mask = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)
    y, _ = gpt_oss.eager_attention_forward(theirs, q, k, v, mask, attn.scale)
    close(projected[0], y.flatten(2), 1e-12)


def test_the_elementwise_output_gate_is_that_of_afmoe():
    """A whole layer of transformers' AFMoE without rotary positions: projections, q/k norm, gate, output."""
    afmoe = pytest.importorskip("transformers.models.afmoe.modeling_afmoe", reason="transformers is optional")
    model, x = wide(dict(output_gate="elementwise"), qk_norm=True), normal(2, 9, 96)
    config = afmoe.AfmoeConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=6, head_dim=16,
                               num_hidden_layers=1, layer_types=["full_attention"], attention_bias=False,
                               attention_dropout=0.0, rms_norm_eps=1e-6)
    config._attn_implementation = "eager"
    theirs, attn = afmoe.AfmoeAttention(config, 0).double().eval(), model.transformer.h[0].attn
    for layer, w in zip((theirs.q_proj, theirs.k_proj, theirs.v_proj), attn.c_attn.weight.chunk(3)):
        layer.weight.data = w
    theirs.gate_proj.weight.data = attn.output_gate.proj.weight
    theirs.o_proj.weight.data = attn.c_proj.weight
    mask = torch.full((1, 1, 9, 9), -torch.inf, dtype=torch.float64).triu(1)
    want, _ = theirs(x, position_embeddings=None, attention_mask=mask)
    got, _ = attn(x, pass_of(model, x))
    close(got, want, 1e-6)  # their norms are in float32


def test_differences_of_pairs_are_those_of_diffllama():
    """A whole layer of transformers' DiffLlama without rotary positions; its pairs are heads i and i + 3."""
    diffllama = pytest.importorskip("transformers.models.diffllama.modeling_diffllama",
                                    reason="transformers is optional")
    model, x = wide(dict(diff_v1=True), qk_norm=False), normal(2, 9, 96)
    config = diffllama.DiffLlamaConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=6,
                                       head_dim=16, num_hidden_layers=2, attention_bias=False,
                                       attention_dropout=0.0, rms_norm_eps=1e-5)
    config._attn_implementation = "eager"
    order = [0, 2, 4, 1, 3, 5]
    mask = torch.full((1, 1, 9, 9), -torch.inf, dtype=torch.float64).triu(1)
    still = torch.ones(2, 9, 16, dtype=torch.float64), torch.zeros(2, 9, 16, dtype=torch.float64)
    for layer, block in enumerate(model.transformer.h):
        theirs, attn = diffllama.DiffLlamaAttention(config, layer).double().eval(), block.attn
        for linear, w in zip((theirs.q_proj, theirs.k_proj, theirs.v_proj), attn.c_attn.weight.chunk(3)):
            linear.weight.data = w.unflatten(0, (6, 16))[order].flatten(0, 1)
        # a pair's output is one head of twice the width: the first three heads' halves, as ours
        theirs.o_proj.weight.data = attn.c_proj.weight
        for name, vector in zip(("q1", "k1", "q2", "k2"), attn.diff_v1.vectors):
            getattr(theirs, f"lambda_{name}").data = vector.data
        want, _ = theirs(x, position_embeddings=still, attention_mask=mask)
        got, _ = attn(x, pass_of(model, x))
        close(got, want, 1e-6)  # their norms and softmax are in float32


@pytest.mark.slow
def test_forget_gates_are_compiled_with_blocks_recomputed():
    """Inductor on a CPU once gave other losses there, where RoPE or QK-norm is on; INDUCTOR=1 asks it, whose
    C++ takes long to compile.
    """
    backend = "inductor" if "INDUCTOR" in os.environ else "aot_eager"
    flags = dict(n_layer=1, n_head=2, n_embd=32, recipe="modern", fox=True)
    model, other = (tiny(flags, std=0.3, checkpoint_activations=again).float().train()
                    for again in (False, True))
    idx, targets = tokens(2, 12), tokens(2, 12, seed=2)
    torch._dynamo.reset()
    compiled = torch.compile(other, fullgraph=True, backend=backend)
    losses = model(idx, targets).loss, compiled(idx, targets).loss
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-5)
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.allclose(p.grad, q.grad, atol=1e-5)


@pytest.mark.parametrize("length, qk_max", [(64, None), (2048, 1.0)])
def test_fox_stays_finite_in_float16(length, qk_max):
    """In long texts its running sum over the scale is beyond what float16 holds."""
    config = GPTConfig(vocab_size=16, block_size=length, n_layer=1, n_head=1, n_embd=64, recipe="modern",
                       fox=True, qk_max=qk_max)
    model, idx = GPT(config).eval(), torch.arange(length)[None] % 16
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.05, generator=torch.Generator().manual_seed(p.numel()))
        want = model(idx).logits
        with torch.autocast("cpu", torch.float16):
            got = model(idx).logits
    assert got.isfinite().all() and (got.float() - want).abs().max() < 0.02


def test_xsa_of_values_that_are_0_takes_nothing_away_in_float16():
    model = GPT(GPTConfig(vocab_size=16, block_size=8, n_layer=1, n_head=2, n_embd=16, xsa=True))
    attn = model.transformer.h[0].attn
    attn.xsa.strength.data.fill_(1.0)
    y = torch.ones(1, 2, 8, 8).half()
    heads = SimpleNamespace(y=y, v=torch.zeros_like(y))
    attn.xsa.after_attention(attn, heads)
    assert torch.equal(heads.y, y)
