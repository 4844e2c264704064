"""probe.py detectors: patterns against loops, heads made by hand, and TransformerLens on the same weights,
where it is installed; and attention maps against what a layer puts out.
"""
import functools
import json
from dataclasses import asdict
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import helpers
from model import ALL_ON, GPT, MECHANISMS, GPTConfig, Sink
from nanoheads.mechanism import Mechanism
from nanoheads.pruning import prune_heads
from nanoheads.scoring import load
from lab.heads.measuring import all_heads, attentions, inputs_of
from lab.hub import huggingface as hf
from lab.probe import main
from lab.probes.detectors import (PATTERNS, common_tokens, duplicate_token, induction, pattern_scores,
                                  previous_token, repeats, share_on, typical_maps)

SIZE = dict(block_size=24, vocab_size=16, n_layer=3, n_head=4, n_embd=64)
tiny = functools.partial(helpers.tiny, std=0.2, states=False, **SIZE)


def tokens(*shape, n=16, seed=0):
    return torch.randint(n, shape, generator=torch.Generator().manual_seed(seed))


def random_maps(*shape, T=9, seed=0):
    logits = 3 * torch.randn(*shape, T, T, generator=torch.Generator().manual_seed(seed))
    return logits.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)


# ---- patterns ----

def slow_patterns(ids):
    """{name: pattern} of a list of ids, one pair of tokens at a time."""
    T = len(ids)
    found = {name: torch.zeros(T, T) for name in PATTERNS}
    for t, s in product(range(T), range(T)):
        found["previous token"][t, s] = s == t - 1
        found["duplicate token"][t, s] = s < t and ids[s] == ids[t]
        found["induction"][t, s] = 0 < s <= t and ids[s - 1] == ids[t]
    return found


def agrees(pattern, name):
    """Whether a pattern function is what the loops call `name`, on tokens with many copies."""
    return all(torch.equal(pattern(tokens(12, n=4, seed=seed)),
                           slow_patterns(tokens(12, n=4, seed=seed).tolist())[name]) for seed in range(5))


def test_patterns_are_those_of_loops_over_all_pairs():
    """Off by one, or another detector's, and the check fails."""
    for name, pattern in PATTERNS.items():
        assert agrees(pattern, name)
        assert not agrees(lambda ids: F.pad(pattern(ids)[:, :-1], (1, 0)), name)
        assert not agrees(lambda ids: F.pad(pattern(ids)[:, 1:], (0, 1)), name)
        for other in set(PATTERNS) - {name}:
            assert not agrees(pattern, other)


def test_the_share_on_a_pattern_is_that_of_loops_over_all_pairs():
    """Of one map, and of several at once."""
    maps, ids = random_maps(2), tokens(9, n=3)
    for name, pattern in slow_patterns(ids.tolist()).items():
        for p, share in zip(maps, share_on(maps, pattern)):
            hit = sum(p[t, s] * pattern[t, s] for t, s in product(range(9), range(9)))
            assert share.item() == pytest.approx(float(hit / p.sum()), abs=1e-6)
            assert share_on(p, pattern).item() == share.item()


def test_a_perfect_head_scores_1_and_an_even_one_what_chance_has():
    T = 8
    ids = torch.tensor([0, 1, 2, 3, 4, 1, 2, 3])
    alike = torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
    perfect = previous_token(ids)
    perfect[0, 0] = 1.0  # the first token has nothing else to look at
    assert share_on(perfect, previous_token(ids)).item() == 7 / 8
    assert share_on(alike, previous_token(ids)).item() == pytest.approx(sum(1 / t for t in range(2, 9)) / 8)
    # the second 1 2 3 stand at 5 6 7, and what followed the first at 2 3 4
    wanted = torch.zeros(T, T)
    wanted[[5, 6, 7], [2, 3, 4]] = 1.0
    assert torch.equal(induction(ids), wanted)
    assert share_on(alike, induction(ids)).item() == pytest.approx((1 / 6 + 1 / 7 + 1 / 8) / 8)
    even, on_it = typical_maps(induction(ids))
    assert torch.equal(even, alike) and share_on(on_it, induction(ids)).item() == 3 / 8
    one_off = F.pad(induction(ids)[:, :-1], (1, 0))
    assert share_on(on_it, one_off).item() == 0


def test_what_is_shown_is_frequent_tokens_twice():
    rng, text = np.random.default_rng(0), np.array([7] * 500 + [2] * 300 + [5] * 198 + [9] * 2)
    assert common_tokens(text).tolist() == [2, 5, 7] and common_tokens(text, 1.0).tolist() == [2, 5, 7, 9]
    twice = repeats([2, 5, 7], 6, 50, 3, rng)
    assert (twice[:, 0] == 3).all() and (twice[:, 1:7] == twice[:, 7:]).all() and twice.shape == (50, 13)
    assert set(np.unique(twice[:, 1:])) == {2, 5, 7}


# ---- heads made by hand ----

def by_hand(key_offset=True):
    """A GPT whose head 0 reads what followed an earlier copy of a token, and says it; head 1 reads all alike.

    Key offset puts the token before into half of each key; without it head 0 finds copies of the token.
    """
    model = GPT(GPTConfig(block_size=40, vocab_size=16, n_layer=1, n_head=2, n_embd=64, norm="rmsnorm",
                          tied=False, key_offset=key_offset)).eval()
    attn = model.transformer.h[0].attn
    moved = [i for i in range(32) if i % 16 >= 8]  # KeyOffset's half of a head's 32 dimensions
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        for v in range(16):
            model.transformer.wte.weight[v, v] = 1.0
            attn.c_attn.weight[[moved[v], 64 + moved[v]], v] = 2.0  # query, key
            attn.c_attn.weight[128 + v, v] = 1.0                    # value
            attn.c_proj.weight[16 + v, v] = 1.0
            model.lm_head.weight[v, 16 + v] = 1.0
    return model


def test_a_head_that_does_induction_is_found():
    """It scores what a perfect head would, its neighbour what even attention does."""
    model, ids = by_hand(), torch.from_numpy(repeats(range(15), 12, 4, 15, np.random.default_rng(0)))
    scores, nats = pattern_scores(model, ids)
    for i, (name, exact) in product(range(4), (("induction", True), ("duplicate token", False))):
        pattern = PATTERNS[name](ids[i])
        even, best = (share_on(p, pattern).item() for p in typical_maps(pattern))
        assert scores[name][i, 1] == pytest.approx(even, abs=1e-6)
        assert (scores[name][i, 0] == pytest.approx(best, abs=1e-4)) == exact
    assert nats[:, 12:].mean() < nats[:, :12].mean() - 0.5


def test_a_head_that_finds_copies_is_another():
    """One key off: what reads a token's copies, and the token itself, is a duplicate-token head."""
    model, ids = by_hand(key_offset=False), torch.from_numpy(repeats(range(15), 12, 4, 15,
                                                                     np.random.default_rng(0)))
    scores, _ = pattern_scores(model, ids)
    for i in range(4):
        copies = duplicate_token(ids[i])
        rows = copies.any(-1)
        assert scores["duplicate token"][i, 0] > scores["induction"][i, 0] + 0.1
        maps = maps_of(model, ids[i:i + 1])
        there = (maps[0][0, 0] * (copies + torch.eye(len(copies))))[rows].sum(-1)
        assert torch.allclose(there, torch.ones(len(there)), atol=1e-4)


def test_a_role_that_was_given_is_found():
    model = GPT(GPTConfig(**{**SIZE, "n_layer": 1}, roles=["previous", "free"], roles_strength=200.0)).eval()
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight.zero_()
    scores, _ = pattern_scores(model, tokens(3, 24))
    previous = scores["previous token"].mean(0)
    assert (previous[[0, 2]] > 0.999 * 23 / 24).all() and (previous[[1, 3]] < 0.2).all()


# ---- maps ----

def maps_of(model, ids):
    """[attention weights [B, heads, T, T] of each block] of ids [B, T]."""
    with torch.no_grad():
        traces = model(ids, traces="maps").traces
    return [traces[f"blocks.{i}.map"] for i in range(model.config.n_layer)]


SCORE_GATE = dict(constraint_names=["a", "b"], constraint_gate="score")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [dict(sink=True), {**SCORE_GATE, "sink": True, "window": 4}],
                         ids=["sink", "both"])
def test_maps_hold_what_reweighs_them_after_the_softmax(flags, monkeypatch):
    """y = map v; without it, y would be another. A gate of 0 leaves a row of one key as it is."""
    model, ids = tiny(**flags).float(), tokens(2, 24)
    if "constraint_names" in flags:
        with torch.no_grad():
            model.transformer.h[2].attn.constraint.out.bias.sub_(1.0)  # gates well below 1
    maps = maps_of(model, ids)
    monkeypatch.setattr(Sink, "trace_map", Mechanism.trace_map)
    traces = model(ids, traces="maps").traces
    for layer, attn in enumerate(attentions(model)):
        outs = [attn.c_proj] + ([attn.constraint.c_proj] if attn.n_extra else [])
        ins = [attn.c_attn] + ([attn.constraint.c_attn] if attn.n_extra else [])
        with inputs_of([*outs, *ins]) as kept:
            model(ids)
        y = torch.cat([t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in kept[:len(outs)]], 1)
        v = torch.cat([into(x).unflatten(-1, (3, -1, 16))[:, :, 2].transpose(1, 2)
                       for into, x in zip(ins, kept[len(outs):])], 1)
        assert torch.allclose(maps[layer] @ v, y, atol=1e-4)
        if flags.get("sink") or attn.n_extra:
            assert not torch.allclose(traces[f"blocks.{layer}.map"] @ v, y, atol=1e-2)
        left = traces[f"blocks.{layer}.sink_gate"][..., 0] if flags.get("sink") else torch.ones(1)
        assert torch.allclose(maps[layer].sum(-1), left.expand(maps[layer].shape[:-1]), atol=1e-5)


@pytest.mark.parametrize("flags", [{}, dict(window=5)], ids=["plain", "window"])
def test_attention_is_that_of_loops_over_all_pairs(flags):
    model, ids = tiny(**flags).float(), tokens(1, 14)
    maps = maps_of(model, ids)
    for layer, attn in enumerate(attentions(model)):
        with inputs_of([attn.c_attn]) as kept, torch.no_grad():
            model(ids)
        qkv = attn.c_attn(kept[0])[0].detach().double().numpy().reshape(14, 3, 4, 16)
        q, k, _ = qkv.transpose(1, 2, 0, 3)  # (heads, T, D) each
        for head, t in product(range(4), range(14)):
            keys = [s for s in range(t + 1) if t - s < flags.get("window", 99)]
            weight = np.exp([q[head, t] @ k[head, s] / 4 for s in keys])
            weight /= weight.sum()
            np.testing.assert_allclose(maps[layer][0, head, t, keys], weight, atol=1e-5)


# ---- the probe ----

@pytest.fixture
def checkpoint_of(tmp_path, bytes_data):
    """checkpoint_of(name, model) -> path of its checkpoint."""
    def make(name, model):
        meta = json.loads((bytes_data / "meta.json").read_text())
        torch.save(dict(model=model.state_dict(), config=asdict(model.config), meta=meta, step=1,
                        train=dict(dataset=str(bytes_data))), tmp_path / f"{name}.pt")
        return str(tmp_path / f"{name}.pt")
    return make


def bytes_model(**flags):
    return tiny(**{"vocab_size": 256, "block_size": 32, "n_layer": 2, **flags}).float()


@pytest.mark.slow
def test_detectors_are_of_the_heads_that_are_there(checkpoint_of, bytes_data, tmp_path, capsys):
    """The table and the numbers go by original numbers, pruned and constraint heads too."""
    models = [bytes_model(), bytes_model(seed=1, **MECHANISMS["constraint_a"], sink=True)]
    prune_heads(models[1], {0: [1], 1: [0, 3]})
    paths = [checkpoint_of(f"m{i}", model) for i, model in enumerate(models)]
    main(["detectors", "--ckpt", paths[0], "--ckpt", paths[1], "--samples=5", "--length=8",
          f"--json={tmp_path / 'o.json'}", "--device=cpu"])
    out, numbers = capsys.readouterr().out, json.loads((tmp_path / "o.json").read_text())
    _, _, data = load(paths[0], "val", 0, "cpu")
    rng, text = np.random.default_rng(1337), data.tokens("val")
    twice = torch.from_numpy(repeats(common_tokens(text), 8, 5, data.separator, rng))
    lines = [line.split() for line in out.splitlines() if line.startswith(str(tmp_path)) and "±" in line]
    for run, path, model in zip(numbers["runs"], paths, models):
        want, nats = pattern_scores(model, twice)
        rows = run["results"]["heads"]
        for name, each in dict(nats_first=nats[:, :8], nats_again=nats[:, 8:]).items():
            assert run["results"][name][0] == pytest.approx(each.mean(), abs=1e-6)
        assert [(r["layer"], r["head"]) for r in rows] == all_heads(model)
        for i, row in enumerate(rows):
            for name, each in want.items():
                assert row[name][0] == pytest.approx(each[:, i].mean(), abs=1e-6)
                assert row[name][2] - row[name][1] == pytest.approx(
                    2 * 2.776445 * each[:, i].std(ddof=1) / 5 ** 0.5, rel=1e-5)
        shown = [line for line in lines if line[0] == path and len(line) == 9]
        assert [(int(line[1]), int(line[2])) for line in shown] == all_heads(model)
        assert [line[3] for line in shown] == [f"{row['previous token'][0]:.3f}" for row in rows]
    assert all_heads(models[1]) == [(0, 0), (0, 2), (0, 3), (1, 1), (1, 2), (1, 4), (1, 5), (1, 6)]
    assert numbers["typical"]["previous token"][1] == pytest.approx(16 / 17)


# ---- TransformerLens ----

@pytest.fixture(scope="module")
def lens():
    """TransformerLens, transformers and tokenizers, without a network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TRANSFORMERS_OFFLINE", "1")
        why = "transformer_lens is not installed: pip install transformer_lens"
        detector = pytest.importorskip("transformer_lens.head_detector", reason=why)
        import tokenizers
        import transformers
        from transformer_lens.config import TransformerBridgeConfig
        from transformer_lens.model_bridge import TransformerBridge
        from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
        yield SimpleNamespace(detector=detector, Bridge=TransformerBridge, Config=TransformerBridgeConfig,
                              around=build_bridge_from_module, transformers=transformers,
                              tokenizers=tokenizers)


@pytest.mark.slow
def test_scores_are_those_of_transformer_lens(lens):
    """Its own functions, on the same maps."""
    maps, ids = random_maps(3, T=12), tokens(12, n=4)
    for name, pattern in PATTERNS.items():
        theirs = getattr(lens.detector, f"get_{name.replace(' ', '_')}_head_detection_pattern")(ids[None])
        assert torch.equal(theirs, pattern(ids))
        for p, score in zip(maps, share_on(maps, pattern(ids))):
            want = lens.detector.compute_head_attention_similarity_score(
                p, theirs, exclude_bos=False, exclude_current_token=False, error_measure="mul")
            assert score.item() == pytest.approx(want, abs=1e-6)


def save_words(lens, folder, n):
    """A tokenizer of the words t0 ... t<n - 1>, whose first begins a text."""
    words = lens.tokenizers.models.WordLevel({f"t{i}": i for i in range(n)}, unk_token="t0")
    tokenizer = lens.tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = lens.tokenizers.pre_tokenizers.Whitespace()
    fast = lens.transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="t0",
                                                     eos_token="t0", pad_token="t0", unk_token="t0")
    fast.save_pretrained(folder)


FOLDERS = {"gpt2": dict(recipe="gpt2"), "gpt2, bias": dict(recipe="gpt2", bias=True),
           "modern": dict(recipe="modern")}


@pytest.mark.slow
@pytest.mark.parametrize("flags", FOLDERS.values(), ids=FOLDERS)
def test_transformer_lens_says_the_same_of_an_exported_folder(lens, flags, tmp_path):
    """Logits and maps, to 1e-4; the detectors' scores on texts that its tokenizer reads."""
    model = tiny(std=0.06, **flags).float()
    folder = tmp_path / flags["recipe"]
    hf.export(model, None, folder)
    save_words(lens, folder, 16)
    bridge = lens.Bridge.boot_transformers(str(folder), device="cpu")
    ids = torch.from_numpy(repeats(range(1, 16), 8, 3, 0, np.random.default_rng(0)))
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(ids)
    ours, maps = model(ids).logits, maps_of(model, ids)
    assert (logits - ours).abs().max() < 1e-4 and ours.std() > 0.1
    for layer in range(3):
        assert (cache["pattern", layer] - maps[layer]).abs().max() < 1e-4
    texts = [" ".join(f"t{i}" for i in row[1:].tolist()) for row in ids]
    assert torch.equal(bridge.to_tokens(texts), ids)
    scores, _ = pattern_scores(model, ids)
    for name in PATTERNS:
        theirs = lens.detector.detect_head(bridge, texts, f"{name.replace(' ', '_')}_head",
                                           error_measure="mul")
        assert np.abs(theirs.flatten().numpy() - scores[name].mean(0)).max() < 1e-4
        assert scores[name].mean(0).std() > 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*did not resolve")  # what is inside attention has no hooks
@pytest.mark.parametrize("mode", ["plain", "constraint_a", "sink", "unet_concat", "all"])
def test_the_nanogpt_adapter_wraps_a_model_as_it_is(lens, mode):
    """Any mechanism of recipe gpt2: the same logits, and hooks of the residual stream that can be patched."""
    flags = {"plain": {}, "all": ALL_ON}.get(mode, MECHANISMS.get(mode))
    model, ids, sent = tiny(**flags).float(), tokens(2, 20), []
    hook = attentions(model)[1].register_forward_hook(lambda module, args, out: sent.append(out[0]))
    with torch.no_grad():
        want = model(ids).logits
    hook.remove()
    c = model.config
    config = lens.Config(d_model=c.n_embd, d_head=c.head_size, n_layers=c.n_layer, n_heads=c.n_head,
                         n_ctx=c.block_size, d_vocab=c.vocab_size, d_mlp=4 * c.n_embd, act_fn="gelu",
                         normalization_type="LN", architecture="NanoGPTForCausalLM")
    bridge = lens.around(model, "NanoGPTForCausalLM", tl_config=config)
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(ids)
        assert (logits - want).abs().max() < 1e-4
        assert (cache["blocks.1.hook_attn_out"] - sent[0]).abs().max() < 1e-4
        assert "blocks.1.attn.hook_pattern" not in cache
        without = bridge.run_with_hooks(ids, fwd_hooks=[("blocks.1.hook_attn_out", lambda t, hook: 0 * t)])
    assert (without - want).abs().max() > 1e-2
