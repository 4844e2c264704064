"""detectors.py and its two probes: patterns against loops, heads made by hand, arrays against the block's own
output, and TransformerLens on the same weights, where it is installed.
"""
import json
from dataclasses import asdict
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from model import ALL_ON, GPT, MECHANISMS, ConstraintHeads, GPTConfig, Sink
from nanoheads.heads import detectors
from nanoheads.heads.detectors import (ARRAYS, MEASURES, PATTERNS, attention_maps, common_tokens,
                                       duplicate_token, head_arrays, induction, needles, pattern_scores,
                                       previous_token, repeats, retrieval_scores, similarity, typical_maps)
from nanoheads.heads.measuring import all_heads, attentions, inputs_of
from nanoheads.heads.pictures import head_scores
from nanoheads.hub import huggingface as hf
from nanoheads.mechanism import Mechanism
from nanoheads.pruning import prune_heads
from nanoheads.training.scoring import load
from probe import main

SIZE = dict(block_size=24, vocab_size=16, n_layer=3, n_head=4, n_embd=64)
EXCLUDES = [(), ("first",), ("self",), ("first", "self")]


def random_model(seed=0, spread=1.0, **flags):
    """A model in which no parameter is 0 and no two heads are alike."""
    model = GPT(GPTConfig(**{**SIZE, **flags})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * spread * torch.randn(p.shape, generator=generator))
    return model


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


@pytest.mark.parametrize("exclude", EXCLUDES, ids="+".join)
@pytest.mark.parametrize("measure", MEASURES)
def test_similarity_is_that_of_loops_over_all_pairs(measure, exclude):
    p, ids = random_maps(), tokens(9, n=3)
    for name, pattern in slow_patterns(ids.tolist()).items():
        hit = total = off = 0.0
        for t, s in product(range(9), range(9)):
            if "first" in exclude and s == 0 or "self" in exclude and s == t:
                continue
            hit, total = hit + p[t, s] * pattern[t, s], total + p[t, s]
            off += abs(p[t, s] - pattern[t, s])
        want = hit / total if measure == "mul" else 1 - round((off / 9).item(), 3)
        assert similarity(p, pattern, measure, exclude).item() == pytest.approx(float(want), abs=1e-6)


def test_a_perfect_head_scores_1_and_an_even_one_what_chance_has():
    T = 8
    ids = torch.tensor([0, 1, 2, 3, 4, 1, 2, 3])
    alike = torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
    perfect = previous_token(ids)
    perfect[0, 0] = 1.0  # the first token has nothing else to look at
    for exclude, best, even in (((), 7 / 8, sum(1 / t for t in range(2, 9)) / 8),
                                (("self",), 1.0, sum(1 / t for t in range(2, 9)) /
                                 sum((t - 1) / t for t in range(1, 9)))):
        assert similarity(perfect, previous_token(ids), "mul", exclude).item() == pytest.approx(best)
        assert similarity(alike, previous_token(ids), "mul", exclude).item() == pytest.approx(even)
    assert similarity(perfect, previous_token(ids), "abs").item() == 1 - 1 / T
    assert similarity(perfect, previous_token(ids), "abs", ("self",)).item() == 1.0
    # the second 1 2 3 stand at 5 6 7, and what followed the first at 2 3 4
    wanted = torch.zeros(T, T)
    wanted[[5, 6, 7], [2, 3, 4]] = 1.0
    assert torch.equal(induction(ids), wanted)
    assert similarity(alike, induction(ids)).item() == pytest.approx((1 / 6 + 1 / 7 + 1 / 8) / 8)
    even, on_it = typical_maps(induction(ids))
    assert torch.equal(even, alike) and similarity(on_it, induction(ids)).item() == 3 / 8
    one_off = F.pad(induction(ids)[:, :-1], (1, 0))
    assert similarity(on_it, one_off).item() == 0
    assert similarity(torch.eye(T), previous_token(ids), "mul", ("self",)).isnan()


def test_what_is_shown_is_frequent_tokens_twice_and_a_needle_in_text():
    rng, text = np.random.default_rng(0), np.array([7] * 500 + [2] * 300 + [5] * 198 + [9] * 2)
    assert common_tokens(text).tolist() == [2, 5, 7] and common_tokens(text, 1.0).tolist() == [2, 5, 7, 9]
    twice = repeats([2, 5, 7], 6, 50, 3, rng)
    assert (twice[:, 0] == 3).all() and (twice[:, 1:7] == twice[:, 7:]).all() and twice.shape == (50, 13)
    assert set(np.unique(twice[:, 1:])) == {2, 5, 7}
    text = np.arange(1000)
    ids, at = needles(text, np.arange(1000, 1020), 40, 6, 200, rng)
    for row, place in zip(ids, at):
        needle, rest = row[place:place + 6], np.delete(row[:-5], range(place, place + 6))
        assert needle.min() >= 1000 and len(set(needle)) == 6 and (row[-5:] == needle[:-1]).all()
        assert (np.diff(rest) == 1).all() and rest.max() < 1000 and len(rest) == 40 - 11
    assert at.min() == 0 and at.max() == 40 - 11, "from before the text to behind it"


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


def hidden_facts(n=12):
    """Texts of tokens below 8 with a needle of others, so that nothing else resembles it."""
    return [torch.from_numpy(x) for x in needles(tokens(500, n=8).numpy(), np.arange(8, 15), 40, 6, n,
                                                 np.random.default_rng(1))]


def test_a_head_that_does_induction_is_found():
    """It scores what a perfect head would, its neighbour what even attention does; and it copies needles."""
    model, ids = by_hand(), torch.from_numpy(repeats(range(15), 12, 4, 15, np.random.default_rng(0)))
    scores, nats = pattern_scores(model, ids)
    for i, (name, exact) in product(range(4), (("induction", True), ("duplicate token", False))):
        pattern = PATTERNS[name](ids[i])
        even, best = (similarity(p, pattern).item() for p in typical_maps(pattern))
        assert scores[name][i, 1] == pytest.approx(even, abs=1e-6)
        assert (scores[name][i, 0] == pytest.approx(best, abs=1e-4)) == exact
    assert nats[:, 12:].mean() < nats[:, :12].mean() - 0.5
    texts, at = hidden_facts()
    copied, looked, said = retrieval_scores(model, texts, at, 6, 2)
    assert (copied[:, 0] == 1).all() and (looked[:, 0] == 1).all() and (said == 1).all()
    assert not copied[:, 1].any()


def test_a_head_that_finds_copies_is_another():
    """One key off: what copies a token's copy is a duplicate-token head, and it retrieves nothing."""
    model, ids = by_hand(key_offset=False), torch.from_numpy(repeats(range(15), 12, 4, 15,
                                                                     np.random.default_rng(0)))
    scores, _ = pattern_scores(model, ids, exclude=("self",))
    for i in range(4):
        copies = duplicate_token(ids[i])
        rows = copies.any(-1)
        assert scores["duplicate token"][i, 0] > 0.8 > scores["induction"][i, 0] + 0.4
        _, maps = attention_maps(model, ids[i:i + 1])
        there = (maps[0][0, 0] * (copies + torch.eye(len(copies))))[rows].sum(-1)
        assert torch.allclose(there, torch.ones(len(there)), atol=1e-4)
    texts, at = hidden_facts()
    copied, looked, said = retrieval_scores(model, texts, at, 6, 2)
    assert not copied.any() and not looked.any() and not said.any()


def test_a_role_that_was_given_is_found():
    model = GPT(GPTConfig(**{**SIZE, "n_layer": 1}, roles=["previous", "free"], roles_strength=200.0)).eval()
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight.zero_()
    scores, _ = pattern_scores(model, tokens(3, 24), exclude=("self",))
    previous = scores["previous token"].mean(0)
    assert (previous[[0, 2]] > 0.999).all() and (previous[[1, 3]] < 0.2).all()


def test_retrieval_is_that_of_loops():
    """One sample, head and token at a time; needles that a random model happens to say are among them."""
    model = random_model(spread=3.0, n_layer=2, vocab_size=5)
    texts, at = (torch.from_numpy(x) for x in needles(tokens(300, n=5).numpy(), np.arange(5), 24, 6, 40,
                                                      np.random.default_rng(2)))
    copied, looked, said = retrieval_scores(model, texts, at, 6, 2)
    assert copied.any() and looked.any() and said.any() and not np.array_equal(copied, looked)
    for b, begin in enumerate(at.tolist()):
        row = texts[b].tolist()
        out = model(texts[b:b + 1], traces="maps")
        needle, words = range(begin, begin + 6), out.logits[0].argmax(-1).tolist()
        for i, (layer, head) in enumerate(all_heads(model)):
            copies = looks = 0
            for j in range(2, 6):
                query = 24 - 5 + j - 1  # it has read the needle's first j tokens
                assert row[query] == row[begin + j - 1]
                best = out.traces[f"blocks.{layer}.map"][0, head, query].argmax().item()
                hit = best in needle and row[best] == row[begin + j]
                looks, copies = looks + hit, copies + (hit and words[query] == row[best])
            assert [copied[b, i], looked[b, i]] == [copies / 4, looks / 4]
        assert said[b] == np.mean([words[24 - 6 + j] == row[begin + j] for j in range(2, 6)])


def test_few_rows_at_a_time_give_the_same(monkeypatch):
    model, ids, (texts, at) = random_model(n_layer=2), tokens(6, 24), hidden_facts(6)
    texts = texts[:, :24] % 16
    whole = pattern_scores(model, ids)[0], retrieval_scores(model, texts, at % 10, 6, 2)
    monkeypatch.setattr(detectors, "FLOATS", 2 * len(all_heads(model)) * 24 ** 2)
    pieces = pattern_scores(model, ids)[0], retrieval_scores(model, texts, at % 10, 6, 2)
    for a, b in zip([*whole[0].values(), *whole[1]], [*pieces[0].values(), *pieces[1]]):
        np.testing.assert_allclose(a, b, atol=1e-6)


# ---- maps and arrays ----

SCORE_GATE = dict(constraint_names=["a", "b"], constraint_gate="score")


@pytest.mark.parametrize("flags", [dict(sink=True), SCORE_GATE, {**SCORE_GATE, "sink": True, "window": 4}],
                         ids=["sink", "score", "both"])
def test_maps_hold_what_reweighs_them_after_the_softmax(flags, monkeypatch):
    """y = map v; without it, y would be another. A gate of 0 leaves a row of one key as it is."""
    model, ids = random_model(**flags), tokens(2, 24)
    if "constraint_names" in flags:
        with torch.no_grad():
            model.transformer.h[2].attn.constraint.out.bias.sub_(1.0)  # gates well below 1
    _, maps = attention_maps(model, ids)
    for cls in (Sink, ConstraintHeads):
        monkeypatch.setattr(cls, "trace_map", Mechanism.trace_map)
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


def pruned(flags):
    model = random_model(**flags)
    prune_heads(model, {0: [1, 3], 2: [0, 1, 2, 3] if not flags else [2]})
    return model


MODELS = {"plain": random_model, "bias": lambda: random_model(bias=True),
          **{name: (lambda name=name: random_model(**MECHANISMS[name]))
             for name in ("routing_moh", "sentinel_l0", "output_gate_elementwise", "constraint_a",
                          "constraint_b", "constraint_published", "a2c_published", "a2c_key_bias", "roles",
                          "acag", "sink", "xsa", "head_norm", "key_offset", "window_global_random")},
          "all": lambda: random_model(recipe="modern", **ALL_ON), "pruned": lambda: pruned({}),
          "pruned, constraint": lambda: pruned(MECHANISMS["constraint_a"])}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_results_of_heads_add_up_to_what_attention_sends(make):
    model, ids, sent = make(), tokens(20), []
    hooks = [attn.register_forward_hook(lambda module, args, out: sent.append(out[0][0]))
             for attn in attentions(model)]
    found = head_arrays(model, ids, results=True)
    for hook in hooks:
        hook.remove()
    assert list(found) == [name for name in ARRAYS if name != "tokens"]
    total = found["result"].sum(1) + found["bias"][:, None]
    np.testing.assert_allclose(total, torch.stack(sent).detach().numpy(), atol=2e-5)
    here = np.zeros_like(found["present"])
    for layer, attn in enumerate(attentions(model)):
        here[layer, attn.all_head_ids()] = True
        D = attn.head_size
        assert not found["z"][layer, :, :, D:].any()
        for head in attn.head_ids:
            own = slice(attn.head_ids.index(head) * D, (attn.head_ids.index(head) + 1) * D)
            want = found["z"][layer, head, :, :D] @ attn.c_proj.weight[:, own].detach().numpy().T
            np.testing.assert_allclose(found["result"][layer, head], want, atol=1e-5)
    assert np.array_equal(found["present"], here)
    for name in ("attention", "z", "result"):
        assert not found[name][~here].any() and found[name][here].any((1, 2)).all()
    rows = found["attention"].sum(-1)
    assert not np.triu(found["attention"], 1).any()
    if model.config.sink:
        assert (rows[here] < 1).all() and rows[here].mean() < 0.95
    else:
        np.testing.assert_allclose(rows[here], 1, atol=1e-5)


@pytest.mark.parametrize("flags", [{}, dict(window=5)], ids=["plain", "window"])
def test_attention_is_that_of_loops_over_all_pairs(flags):
    model, ids = random_model(**flags), tokens(14)
    found = head_arrays(model, ids)
    for layer, attn in enumerate(attentions(model)):
        with inputs_of([attn.c_attn]) as kept, torch.no_grad():
            model(ids[None])
        qkv = attn.c_attn(kept[0])[0].detach().double().numpy().reshape(14, 3, 4, 16)
        q, k, v = qkv.transpose(1, 2, 0, 3)  # (heads, T, D) each
        for head, t in product(range(4), range(14)):
            keys = [s for s in range(t + 1) if t - s < flags.get("window", 99)]
            weight = np.exp([q[head, t] @ k[head, s] / 4 for s in keys])
            weight /= weight.sum()
            np.testing.assert_allclose(found["attention"][layer, head, t, keys], weight, atol=1e-5)
            np.testing.assert_allclose(found["z"][layer, head, t], weight @ v[head][keys], atol=1e-5)


# ---- the probes ----

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
    return random_model(**{"vocab_size": 256, "block_size": 32, "n_layer": 2, **flags})


def test_detectors_are_of_the_heads_that_are_there(checkpoint_of, bytes_data, tmp_path, capsys):
    """The table, the numbers and the picture go by original numbers, pruned and constraint heads too."""
    models = [bytes_model(), bytes_model(seed=1, **MECHANISMS["constraint_a"], sink=True)]
    prune_heads(models[1], {0: [1], 1: [0, 3]})
    paths = [checkpoint_of(f"m{i}", model) for i, model in enumerate(models)]
    main(["detectors", "--ckpt", paths[0], "--ckpt", paths[1], "--samples=5", "--length=8", "--needle=6",
          f"--json={tmp_path / 'o.json'}", f"--picture={tmp_path / 'o.png'}", "--device=cpu"])
    out, numbers = capsys.readouterr().out, json.loads((tmp_path / "o.json").read_text())
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG") and str(tmp_path / "o.png") in out
    _, _, data = load(paths[0], "val", 0, "cpu")
    rng, text = np.random.default_rng(1337), data.tokens("val")
    twice = torch.from_numpy(repeats(common_tokens(text), 8, 5, data.separator, rng))
    texts, at = map(torch.from_numpy, needles(text, common_tokens(text), 32, 6, 5, rng))
    lines = [line.split() for line in out.splitlines() if line.startswith(str(tmp_path)) and "±" in line]
    for run, path, model in zip(numbers["runs"], paths, models):
        want, nats = pattern_scores(model, twice)
        *of_needle, said = retrieval_scores(model, texts, at, 6, 2)
        want.update(zip(("retrieval", "at needle"), of_needle))
        rows = run["results"]["heads"]
        for name, each in dict(nats_first=nats[:, :8], nats_again=nats[:, 8:], said=said).items():
            assert run["results"][name][0] == pytest.approx(each.mean(), abs=1e-6)
        assert [(r["layer"], r["head"]) for r in rows] == all_heads(model)
        for i, row in enumerate(rows):
            for name, each in want.items():
                assert row[name][0] == pytest.approx(each[:, i].mean(), abs=1e-6)
                assert row[name][2] - row[name][1] == pytest.approx(
                    2 * 2.776445 * each[:, i].std(ddof=1) / 5 ** 0.5, rel=1e-5)
        shown = [line for line in lines if line[0] == path and len(line) == 13]
        assert [(int(line[1]), int(line[2])) for line in shown] == all_heads(model)
        assert [line[3] for line in shown] == [f"{row['previous token'][0]:.3f}" for row in rows]
    assert all_heads(models[1]) == [(0, 0), (0, 2), (0, 3), (1, 1), (1, 2), (1, 4), (1, 5), (1, 6)]
    assert numbers["typical"]["previous token"][1] == pytest.approx(16 / 17)


def test_a_picture_says_which_heads_are_gone():
    model = bytes_model(**MECHANISMS["constraint_a"])
    prune_heads(model, {0: [1], 1: [0, 3]})
    rows = [dict(layer=layer, head=head, a=[0.1 * head, 0, 1], b=[0.01, 0, 1])
            for layer, head in all_heads(model)]
    figure = head_scores([("one", model, rows), ("other", model, rows)], dict(a=(0, 0.9), b=(-1, 1)))
    words = [[t.get_text() for t in ax.texts] for part in figure.subfigs for ax in part.axes]
    assert words[0] == words[2] == ["0.00", "gone", "0.20", "0.30", "–", "–", "–",
                                    "gone", "0.10", "0.20", "gone", "0.40", "0.50", "0.60"]
    assert set(words[1]) == {"0.01", "gone", "–"}
    assert [ax.get_title() for ax in figure.subfigs[0].axes] == ["a (best: 0.90)", "b (best: 1.00)"]


def test_measures_and_exclusions_reach_the_scores(checkpoint_of, tmp_path, capsys):
    path = checkpoint_of("m", bytes_model())
    found = {}
    for name, options in dict(mul=[], abs=["--measure=abs"], left=["--exclude", "first", "self"]).items():
        main(["detectors", "--ckpt", path, "--samples=2", "--length=4", "--needle=4", *options,
              f"--json={tmp_path / 'o.json'}", "--device=cpu"])
        found[name] = json.loads((tmp_path / "o.json").read_text())
    of = {name: each["runs"][0]["results"]["heads"][0]["previous token"][0] for name, each in found.items()}
    assert len(set(of.values())) == 3 and 0 < of["mul"] < of["left"] < 1 and of["abs"] < 0
    assert found["left"]["typical"]["induction"][1] == pytest.approx(1.0)


def test_what_detectors_cannot_do_is_one_line(checkpoint_of, tmp_path, refusal, request):
    request.module.main = main
    path = checkpoint_of("m", bytes_model())
    for options, said in ((["--length=16"], "more than a context of 32"), (["--needle=11"], "from 2 to 10"),
                          (["--needle=1"], "from 2 to 10"),
                          (["--picture=o.gif"], "must end in .png, .svg or .pdf"),
                          ([f"--picture={tmp_path / 'no/o.png'}"], "cannot write into"),
                          (["--split=dev"], "no split 'dev'"), (["--seed=-1"], "must not be negative")):
        assert said in refusal(["detectors", "--ckpt", path, "--device=cpu", *options])
    damaged = bytes_model()
    with torch.no_grad():
        damaged.lm_head.weight.fill_(torch.nan)
    assert "damaged" in refusal(["detectors", "--ckpt", checkpoint_of("nan", damaged), "--device=cpu"])


def test_arrays_are_written_as_other_tools_take_them(checkpoint_of, tmp_path, capsys):
    model, out = bytes_model(**MECHANISMS["constraint_a"]), tmp_path / "maps.npz"
    prune_heads(model, {0: [1]})
    (tmp_path / "text").write_text("the cat\nsaw: é and the dog saw the cat once again")
    main(["arrays", "--ckpt", checkpoint_of("m", model), f"--text={tmp_path / 'text'}", f"--out={out}",
          "--tokens=20", "--device=cpu"])
    said = capsys.readouterr().out
    with np.load(out) as maps:  # without pickle
        maps = dict(maps)
    assert maps["tokens"].tolist() == [*"the·cat↵saw:·", "c3", "a9", *"·and·"]
    want = head_arrays(model, torch.from_numpy(maps["ids"]))
    for name, array in want.items():
        np.testing.assert_allclose(maps[name], array, atol=1e-6)
    assert bytes(maps["ids"].tolist()).decode() == "the cat\nsaw: é and "
    assert maps["attention"].shape == (2, 7, 20, 20) and maps["attention"].dtype == np.float32
    assert "20 of 50 tokens" in said and "2 x 7 x 20 x 20" in said and said.endswith(f"{out}\n")
    main(["arrays", "--ckpt", str(tmp_path / "m.pt"), f"--text={tmp_path / 'text'}", f"--out={out}",
          "--results", "--device=cpu"])
    assert "32 of 50 tokens" in capsys.readouterr().out
    with np.load(out) as maps:
        assert maps["result"].shape == (2, 7, 32, 64)


def test_bertviz_and_circuitsvis_take_the_arrays(checkpoint_of, tmp_path, capsys):
    bertviz = pytest.importorskip("bertviz", reason="bertviz is not installed: pip install bertviz")
    views = pytest.importorskip("circuitsvis.attention", reason="circuitsvis is not installed")
    (tmp_path / "text").write_text("thecat")
    main(["arrays", "--ckpt", checkpoint_of("m", bytes_model()), f"--text={tmp_path / 'text'}",
          f"--out={tmp_path / 'maps.npz'}", "--device=cpu"])
    maps = np.load(tmp_path / "maps.npz")
    tokens = maps["tokens"].tolist()
    layers = [torch.from_numpy(layer)[None] for layer in maps["attention"]]
    assert json.dumps(tokens)[1:-1] in bertviz.head_view(layers, tokens, html_action="return").data
    assert json.dumps(tokens) in str(views.attention_heads(attention=maps["attention"][0], tokens=tokens))


def test_what_arrays_cannot_do_is_one_line(checkpoint_of, tmp_path, refusal, request):
    request.module.main = main
    path, text = checkpoint_of("m", bytes_model()), tmp_path / "text"
    text.write_text("the cat")
    (tmp_path / "empty").touch()
    for options, said in (([], "--text: name the file"), ([f"--text={tmp_path / 'none'}"], "cannot be read"),
                          ([f"--text={tmp_path / 'empty'}"], "is empty"),
                          ([f"--text={text}", "--ckpt", path], "one at a time, not 2"),
                          ([f"--text={text}", f"--out={tmp_path}"], "is not a file"),
                          ([f"--text={text}", "--tokens=-1"], "must not be negative")):
        assert said in refusal(["arrays", "--ckpt", path, "--device=cpu", *options])
    damaged = bytes_model()
    with torch.no_grad():
        damaged.transformer.wte.weight.fill_(torch.nan)
    assert "damaged" in refusal(["arrays", "--ckpt", checkpoint_of("nan", damaged), "--device=cpu",
                                 f"--text={text}", f"--out={tmp_path / 'o.npz'}"])
    assert not (tmp_path / "o.npz").exists()


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


@pytest.mark.parametrize("exclude", EXCLUDES, ids="+".join)
@pytest.mark.parametrize("measure", MEASURES)
def test_scores_are_those_of_transformer_lens(lens, measure, exclude):
    """Its own functions, on the same maps."""
    maps, ids = random_maps(3, T=12), tokens(12, n=4)
    for name, pattern in PATTERNS.items():
        theirs = getattr(lens.detector, f"get_{name.replace(' ', '_')}_head_detection_pattern")(ids[None])
        assert torch.equal(theirs, pattern(ids))
        ours = similarity(maps, pattern(ids), measure, exclude)
        for p, score in zip(maps, ours):
            want = lens.detector.compute_head_attention_similarity_score(
                p, theirs, exclude_bos="first" in exclude, exclude_current_token="self" in exclude,
                error_measure=measure)
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


@pytest.mark.parametrize("flags", FOLDERS.values(), ids=FOLDERS)
def test_transformer_lens_says_the_same_of_an_exported_folder(lens, flags, tmp_path):
    """Logits, maps and what heads put out, to 1e-4; the detectors' scores on texts that its tokenizer reads.
    """
    model = random_model(spread=0.3, **flags)
    folder = tmp_path / flags["recipe"]
    hf.export(model, None, folder)
    save_words(lens, folder, 16)
    bridge = lens.Bridge.boot_transformers(str(folder), device="cpu")
    ids = torch.from_numpy(repeats(range(1, 16), 8, 3, 0, np.random.default_rng(0)))
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(ids)
        ours, maps = attention_maps(model, ids)
    assert (logits - ours).abs().max() < 1e-4 and ours.std() > 0.1
    for layer in range(3):
        assert (cache["pattern", layer] - maps[layer]).abs().max() < 1e-4
        z = head_arrays(model, ids[0])["z"][layer]
        assert np.abs(cache["z", layer][0].transpose(0, 1).numpy() - z).max() < 1e-4
    texts = [" ".join(f"t{i}" for i in row[1:].tolist()) for row in ids]
    assert torch.equal(bridge.to_tokens(texts), ids)
    for name, measure in product(PATTERNS, MEASURES):
        theirs = lens.detector.detect_head(bridge, texts, f"{name.replace(' ', '_')}_head",
                                           error_measure=measure)
        scores = pattern_scores(model, ids, measure)[0][name]
        assert np.abs(theirs.flatten().numpy() - scores.mean(0)).max() < (1e-4 if measure == "mul" else 2e-3)
        assert scores.mean(0).std() > 1e-3


@pytest.mark.filterwarnings("ignore:.*did not resolve")  # what is inside attention has no hooks
@pytest.mark.parametrize("mode", ["plain", "constraint_a", "sink", "unet_concat", "all"])
def test_the_nanogpt_adapter_wraps_a_model_as_it_is(lens, mode):
    """Any mechanism of recipe gpt2: the same logits, and hooks of the residual stream that can be patched."""
    flags = {"plain": {}, "all": ALL_ON}.get(mode, MECHANISMS.get(mode))
    model, ids, sent = random_model(**flags), tokens(2, 20), []
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
