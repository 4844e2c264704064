"""The measures of text quality, each compared with a slow obvious one; what lab.probe text says of models."""
import functools
import json
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats

import helpers
from helpers import save_model, write_dataset
from nanoheads.dataset import Dataset
from lab.probe import main
from lab.probes.intervals import jackknife
from lab.probes.quality import (distinct_n, first_repeat, leave_one_out, loop, rep_n, sample_figures,
                                self_bleu, words)
from lab.probes.text import nats_after


# ---- slow obvious references ----

def slow_grams(items, n):
    return [tuple(items[i:i + n]) for i in range(len(items)) if i + n <= len(items)]


def slow_rep(items, n):
    grams = slow_grams(items, n)
    again = [gram for i, gram in enumerate(grams) if gram in grams[:i]]
    return len(again) / len(grams) if grams else math.nan


def slow_distinct(texts, n):
    grams = [gram for text in texts for gram in slow_grams(text, n)]
    first = [gram for i, gram in enumerate(grams) if gram not in grams[:i]]
    return len(first) / len(grams) if grams else math.nan


def slow_loop(items):
    longest = 0
    for start in range(len(items)):
        for end in range(start, len(items) + 1):
            part = items[start:end]
            if any(all(part[i] == part[i + p] for i in range(len(part) - p))
                   for p in range(1, len(part) // 2 + 1)):
                longest = max(longest, len(part))
    return longest / len(items) if items else math.nan


def slow_first_repeat(items, n):
    for read in range(n, len(items) + 1):
        if any(items[i:i + n] == items[read - n:read] for i in range(read - n)):
            return read


def slow_bleu(text, others):
    """Papineni's BLEU up to 4-grams, clipped by the best reference; an order without a match halves."""
    log_sum, orders, missed = 0.0, min(4, len(text)), 0
    for n in range(1, orders + 1):
        counts = Counter(slow_grams(text, n))
        hits = sum(min(count, max(slow_grams(other, n).count(gram) for other in others))
                   for gram, count in counts.items())
        if n == 1 and not hits:
            return 0.0
        missed += not hits
        log_sum += math.log((hits or 0.5 ** missed) / sum(counts.values()))
    nearest = min((abs(len(other) - len(text)), len(other)) for other in others)[1]
    return min(1.0, math.exp(1 - nearest / len(text))) * math.exp(log_sum / orders)


def slow_self_bleu(texts):
    texts = [text for text in texts if text]
    if len(texts) < 2:
        return math.nan
    return sum(slow_bleu(text, texts[:i] + texts[i + 1:]) for i, text in enumerate(texts)) / len(texts)


def same(got, want):
    return got == pytest.approx(want, abs=1e-12, nan_ok=True)


WORDS = st.sampled_from("ab") | st.sampled_from("abcdefgh")


@settings(max_examples=30)
@given(texts=st.lists(st.lists(WORDS, max_size=14), max_size=5), n=st.integers(1, 4))
def test_each_measure_is_the_slow_one(texts, n):
    for text in texts:
        assert same(rep_n(text, n), slow_rep(text, n))
        assert same(loop(text), slow_loop(text))
        assert first_repeat(text, n) == slow_first_repeat(text, n)
    assert same(distinct_n(texts, n), slow_distinct(texts, n))
    assert same(self_bleu(texts), slow_self_bleu(texts))


def test_words_lie_between_white_space_and_loops_are_of_bytes():
    assert words(b" a \n b\tc\xff ") == ["a", "b", "c\ufffd"]
    assert loop(b"xyabababa") == 7 / 9 and first_repeat(b"abcdXabc", 3) == 8
    figures = leave_one_out([[b"ab" * 40, b"ab" * 40]] * 3)
    assert figures["loop"][0] == 1 and figures["first_repeat"][0] == 18 and figures["repeats"][0] == 1
    assert math.isnan(figures["rep_2"][0])
    assert all(map(math.isnan, sample_figures(b"").values()))
    one = sample_figures(b"x")
    assert (one["rep_1"], one["loop"], one["repeats"], one["first_repeat"]) == (0, 0, 0, 1)
    assert math.isnan(one["rep_2"])


# ---- many samples ----

def made_up(P=5, S=3, size=30, vocabulary=9, seed=0):
    rng = random.Random(seed)
    return [[" ".join(rng.choice("abcdefghijklmnop"[:vocabulary]) for _ in range(size)).encode()
             for _ in range(S)] for _ in range(P)]


def test_figures_are_means_over_samples_and_over_sets_of_one_of_each_prompt():
    """Those without a prompt are those of the others; the judge's are bits per byte."""
    samples, bits = made_up(), [[10.0 * p + s for s in range(3)] for p in range(5)]
    whole, texts = leave_one_out(samples, bits), [[words(raw) for raw in row] for row in samples]
    assert whole["rep_2"][0] == pytest.approx(np.mean([slow_rep(text, 2) for row in texts for text in row]))
    sets = [*zip(*texts)]
    assert whole["distinct_2"][0] == pytest.approx(np.mean([slow_distinct(each, 2) for each in sets]))
    assert whole["self_bleu"][0] == pytest.approx(np.mean([slow_self_bleu([*each]) for each in sets]))
    assert whole["judge"][0] == pytest.approx(sum(map(sum, bits)) / len(b"".join(sum(samples, []))))
    for left in range(5):
        rest = leave_one_out(samples[:left] + samples[left + 1:], bits[:left] + bits[left + 1:])
        assert all(same(values[1 + left], rest[name][0]) for name, values in whole.items())


def test_the_interval_of_a_mean_is_that_of_t():
    """Over prompts: more samples of a prompt, when they are the same again, say nothing more."""
    samples = made_up(P=6, S=4)
    each = [np.mean([slow_rep(words(raw), 2) for raw in row]) for row in samples]
    value, half = jackknife(leave_one_out(samples)["rep_2"])
    assert (value - half, value + half) == pytest.approx(stats.t.interval(0.95, 5, np.mean(each),
                                                                          stats.sem(each)))
    assert jackknife(leave_one_out([row * 4 for row in samples])["rep_2"])[1] == pytest.approx(half)


def test_the_interval_of_distinct_n_holds_the_truth_most_of_the_time():
    """80 studies of 6 prompts: 95 % intervals that hold the mean of them all in 70 or more."""
    studies = []
    for seed in range(80):
        texts = [[words(raw)] for raw, in made_up(6, 1, 20, 12, seed)]
        without = [distinct_n(sum(texts[:p] + texts[p + 1:], []), 2) for p in range(6)]
        studies.append(jackknife(np.array([distinct_n(sum(texts, []), 2), *without])))
    truth = np.mean([value for value, _ in studies])
    assert sum(abs(value - truth) <= half for value, half in studies) >= 70
    assert sum(abs(value - truth) <= half / 4 for value, half in studies) < 70


# ---- the judge ----

make_model = functools.partial(helpers.make_model, spread=4.0, noise=0.0, block_size=16, n_layer=1, n_head=2,
                               n_embd=16)


@torch.no_grad()
def slow_nats(model, separator, before, after):
    """One position at a time in float64, each in the window that holds it first."""
    model, T = model.double(), model.config.block_size
    text, step, nats = [separator, *before, *after], max(1, T // 2), 0.0
    for t in range(len(before), len(before) + len(after)):
        moves = 0 if t < T else (t - T) // step + 1
        logits = model(torch.tensor([text[moves * step:t + 1]])).logits[0, -1].double()
        nats -= logits.log_softmax(-1)[text[t + 1]].item()
    model.float()
    return nats


@pytest.mark.parametrize("block_size", [1, 7, 8])
def test_the_judge_scores_each_byte_in_its_context(block_size):
    rng, model = np.random.default_rng(0), make_model(block_size=block_size, n_layer=2)
    pairs = [(rng.integers(0, 256, m).tolist(), rng.integers(0, 256, n).tolist())
             for m, n in ((3, 5), (3, 5), (8, 0), (1, 7), (9, 1), (2, 30), (30, 2), (16, 16))]
    want = [slow_nats(model, 10, *pair) for pair in pairs]
    assert np.allclose(nats_after(model, 10, pairs), want, atol=1e-3)


# ---- the command ----

SHORT = ["--num_prompts", "3", "--prompt_tokens", "6", "--samples", "2", "--tokens", "24"]


@pytest.fixture
def save(tmp_path, bytes_data):
    """save(name, data=bytes_data, **flags) -> path of a tiny model's checkpoint."""
    def call(name, data=None, **flags):
        return save_model(tmp_path / f"{name}.pt", make_model(**flags), Dataset(data or bytes_data))
    return call


@pytest.fixture
def written(tmp_path, capsys):
    """written(args) -> (what --json has of each run, then of the text itself; the printed lines)."""
    def call(*args, short=SHORT):
        out = tmp_path / "text.json"
        main(["text", *short, *args, "--json", str(out)])
        lines = capsys.readouterr().out.splitlines()
        assert lines.pop() == str(out)
        found = json.loads(out.read_text())
        every = [*(dict(run["results"], name=run["name"]) for run in found["runs"]), found["text"]]
        return [dict(each, prompts=found["prompts"]) for each in every], lines
    return call


def test_figures_are_of_the_models_own_samples_beside_the_text_itself(save, written, bytes_data):
    """Each prompt has its seed, the judge's bits are of what was said, and the first run is the baseline."""
    first, judge, text = save("a"), save("judge", n_embd=32), Dataset(bytes_data).tokens("test")
    args = ["--ckpt", first, "--ckpt", first, "--ckpt", save("b", n_head=4), "--judge", judge,
            "--seed", "5", "--top_k", "7", "--temperature", "1.5"]
    (run, again, other, real), lines = written(*args)
    assert written(*args)[0][0]["figures"] == run["figures"]
    for p, row in enumerate(run["samples"]):
        prompt = text[p * (1000 // 3):][:6]
        assert run["prompts"][p] == bytes(prompt).decode()
        assert real["samples"][p] == [bytes(text[p * (1000 // 3) + 6:][:24]).decode()]
        ids = make_model().generate(torch.tensor([prompt.tolist()] * 2), 24, temperature=1.5, top_k=7,
                                    generator=torch.Generator().manual_seed(5 + p))[:, 6:]
        assert row == [bytes(one).decode("utf-8", "replace") for one in ids.tolist()]
    nats = [[slow_nats(make_model(n_embd=32), 10, list(prompt.encode()), list(sample.encode()))
             for sample in row] for prompt, row in zip(real["prompts"], real["samples"])]
    figures = leave_one_out([[sample.encode() for sample in row] for row in real["samples"]],
                            (np.array(nats) / math.log(2)).tolist())
    assert real["figures"].keys() == figures.keys()
    for name, values in figures.items():
        got, want = [math.nan if v is None else v for v in real["figures"][name]], list(jackknife(values))
        assert got == pytest.approx(want, abs=1e-3 if name == "judge" else 1e-12, nan_ok=True), name
    assert run["less_the_first"] is None and again["less_the_first"]["loop"] == [0.0, 0.0]
    assert other["less_the_first"]["distinct_1"][0] == pytest.approx(
        other["figures"]["distinct_1"][0] - run["figures"]["distinct_1"][0])
    assert sum(line.startswith("  less the first") for line in lines) == 2
    assert run["tokens_per_s"] > 0 and lines[-1].startswith("the text itself  ")
    assert all(word in lines[0] for word in ("3 prompts, 2 samples of 24 tokens each", "seed 5", "top_k 7",
                                             "temperature 1.5"))
    assert lines[1].startswith(f"judge: {judge}, ") and lines[1].endswith(" parameters")


@pytest.mark.parametrize("more", [["--top_p", "0.3"], ["--set", "gate.0.0=0"]], ids=" ".join)
def test_each_setting_matters_and_is_said(save, written, more):
    (plain, _), _ = written("--ckpt", save("a"))
    (run, _), lines = written("--ckpt", save("a"), *more)
    assert run["samples"] != plain["samples"]
    assert " ".join(more).lstrip("-").removeprefix("set ") in lines[0]


def test_greedy_text_of_a_random_model_loops(save, written):
    """What certainly repeats is told from what does not; prompts may be longer than a block."""
    size = ["--num_prompts", "2", "--prompt_tokens", "20", "--samples", "1", "--tokens", "200"]
    (greedy, _), lines = written("--ckpt", save("a"), "--judge", save("a"), "--temperature", "0", short=size)
    (drawn, _), _ = written("--ckpt", save("a"), "--temperature", "3", short=size)
    assert greedy["figures"]["loop"][0] > 0.5 > 0.1 > drawn["figures"]["loop"][0]
    assert greedy["figures"]["first_repeat"][0] < 150 < 200 == drawn["figures"]["first_repeat"][0]
    assert greedy["figures"]["judge"][0] > 0 and lines[1].endswith("of those it judges")


def test_stop_ends_samples_and_text_before_the_separator(save, written):
    size = ["--num_prompts", "3", "--prompt_tokens", "6", "--samples", "4", "--tokens", "300"]
    (run, real), lines = written("--ckpt", save("a"), "--stop", "--temperature", "3", "--split", "val",
                                 short=size)
    assert lines[0].endswith("stop True")
    assert not any("\n" in text for row in run["samples"] + real["samples"] for text in row)
    assert all(len(row[0]) < 20 for row in real["samples"])
    assert any(len(text) < 300 for row in run["samples"] for text in row)


def test_bits_are_per_byte_whatever_the_tokens_are(save, written, tmp_path, bytes_data):
    """Of a judge that knows nothing 8."""
    flat = save("flat", recipe="modern", n_embd=32)  # its head starts at 0
    for one in written("--ckpt", save("a"), "--judge", flat)[0]:
        assert one["figures"]["judge"] == [pytest.approx(8), pytest.approx(0, abs=1e-9)]
    splits = {path.stem: path.read_text() for path in bytes_data.glob("*.bin")}
    symbols = "0123456789 plusi.\n"
    chars = write_dataset(tmp_path / "chars", splits, "char", sorted(symbols))
    judge = save("judge", n_embd=32)
    (_, as_chars), _ = written("--ckpt", save("c", chars, vocab_size=len(symbols)), "--judge", judge)
    (_, as_bytes), _ = written("--ckpt", save("a"), "--judge", judge)
    assert as_chars["figures"] == as_bytes["figures"] and as_chars["figures"]["judge"][0] > 0
