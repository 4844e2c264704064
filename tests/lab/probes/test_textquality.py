"""Text quality: each measure against a slow obvious one; what probe.py text says of tiny models."""
import functools
import json
import math
import random
import runpy
import sys
from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT, write_dataset
from scipy import stats
from torch import nn

from nanoheads.dataset import Dataset
import helpers
from model import GPTConfig
from lab.probe import main
from lab.probes import quality as textquality, text as probe_text
from lab.probes.intervals import jackknife
from lab.probes.quality import distinct_n, first_repeat, leave_one_out, loop, rep_n, self_bleu, words
from lab.probes.text import nats_after, text_table

PROGRAM = "probe.py text"  # see the fixture refusal

SUMS = sorted(set("0123456789 plusi.\n"))


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


def random_texts():
    """Lists of words from small vocabularies, empty and short ones among them."""
    rng = random.Random(0)
    return [[rng.choice("abcdefgh"[:rng.randint(1, 8)]) for _ in range(rng.choice([0, 1, 2, 3, 9, 25]))]
            for _ in range(120)]


def same(got, want):
    return got == pytest.approx(want, abs=1e-12, nan_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_each_measure_is_the_slow_one(n):
    texts = random_texts()
    for text in texts:
        assert same(rep_n(text, n), slow_rep(text, n))
        assert same(loop(text), slow_loop(text))
        assert first_repeat(text, n) == slow_first_repeat(text, n)
    for i in range(0, 120, 6):
        assert same(distinct_n(texts[i:i + 6], n), slow_distinct(texts[i:i + 6], n))
        assert same(self_bleu(texts[i:i + 6]), slow_self_bleu(texts[i:i + 6]))


@pytest.mark.slow
@pytest.mark.parametrize("name, wrong", [
    ("rep_n", lambda right: lambda text, n: right(text, n + 1)),
    ("distinct_n", lambda right: lambda texts, n: right([sum(texts, [])], n)),  # n-grams that span two texts
    ("loop", lambda right: lambda text: right(text[:-1])),
    ("first_repeat", lambda right: lambda text, n: right(text, n) and right(text, n) - n),
    ("self_bleu", lambda right: lambda texts: right(texts + texts[:1])),  # a text against itself, too
])
def test_the_references_catch_a_wrong_measure(monkeypatch, name, wrong):
    monkeypatch.setitem(globals(), name, wrong(globals()[name]))
    with pytest.raises(AssertionError):
        test_each_measure_is_the_slow_one(2)


def test_bytes_and_words_are_measured_alike():
    assert loop(b"xyabababa") == loop(list("xyabababa")) == 7 / 9
    assert first_repeat(b"abcdXabc", 3) == 8
    assert words(b" a \n b\tc\xff ") == ["a", "b", "c\ufffd"]


@pytest.mark.parametrize("raw", [b"", b"x"])
def test_a_text_of_nothing_or_of_one_byte_is_defined_or_nan(raw):
    one = textquality.sample_figures(raw)
    assert math.isnan(one["rep_2"]) and math.isnan(one["rep_4"])
    if raw:
        assert (one["rep_1"], one["loop"], one["repeats"], one["first_repeat"]) == (0, 0, 0, 1)
    else:
        assert all(map(math.isnan, one.values()))
    assert math.isnan(self_bleu([words(raw)])) and math.isnan(self_bleu([]))
    assert math.isnan(distinct_n([words(raw)], 2))


# ---- many samples ----

def made_up(P=5, S=3, size=30, vocabulary=9, seed=0):
    rng = random.Random(seed)
    return [[" ".join(rng.choice("abcdefghijklmnop"[:vocabulary]) for _ in range(size)).encode()
             for _ in range(S)] for _ in range(P)]


def worse(figures, than):
    """The measures at which one measured text is clearly worse than another, of those with a direction."""
    signs = {name: -1 if name.startswith("distinct") or name == "first_repeat" else 1 for name in figures}
    return {name for name, sign in signs.items() if sign * (figures[name][0] - than[name][0]) > 0.05}


@pytest.mark.parametrize("looping", [b"the same old song " * 9, b"so it " + b"goes " * 30])
def test_a_looping_text_is_worse_at_everything(looping):
    fine = [[row[0].replace(b" ", b"%d " % p) for row in [made_up(1, 1, 30, 16, seed=p)[0]]]
            for p in range(4)]
    bad = leave_one_out([[looping]] * 4)
    assert worse(bad, leave_one_out(fine)) == set(bad)
    assert not worse(leave_one_out(fine), leave_one_out(fine))


def test_a_loop_without_white_space_shows_in_the_loops_alone():
    figures = leave_one_out([[b"ab" * 40, b"ab" * 40]] * 3)
    assert figures["loop"][0] == 1 and figures["first_repeat"][0] == 18 and figures["repeats"][0] == 1
    assert math.isnan(figures["rep_2"][0])


@pytest.mark.slow
def test_a_measure_without_a_prompt_is_that_of_the_others():
    samples = made_up()
    bits = [[10.0 * p + s for s in range(3)] for p in range(5)]
    whole = leave_one_out(samples, bits)
    for left in range(5):
        rest = leave_one_out(samples[:left] + samples[left + 1:], bits[:left] + bits[left + 1:])
        for name, values in whole.items():
            assert same(values[1 + left], rest[name][0]), name
    size = sum(len(raw) for row in samples for raw in row)
    assert whole["judge"][0] == pytest.approx(sum(map(sum, bits)) / size)


def test_sets_are_one_sample_of_each_prompt():
    samples = made_up()
    texts = [[words(row[s]) for row in samples] for s in range(3)]
    figures = leave_one_out(samples)
    assert figures["distinct_2"][0] == pytest.approx(np.mean([slow_distinct(t, 2) for t in texts]))
    assert figures["self_bleu"][0] == pytest.approx(np.mean([slow_self_bleu(t) for t in texts]))


@pytest.mark.slow
def test_the_interval_of_a_mean_is_that_of_t():
    """Over prompts: more samples of a prompt, when they are the same again, say nothing more."""
    samples = made_up(P=6, S=4)
    each = [np.mean([slow_rep(words(raw), 2) for raw in row]) for row in samples]
    value, half = jackknife(leave_one_out(samples)["rep_2"])
    assert value == pytest.approx(np.mean(each))
    assert (value - half, value + half) == pytest.approx(stats.t.interval(0.95, 5, np.mean(each),
                                                                          stats.sem(each)))
    assert jackknife(leave_one_out([row * 4 for row in samples])["rep_2"])[1] == pytest.approx(half)


@pytest.mark.slow
def test_the_interval_of_distinct_n_holds_the_truth_most_of_the_time():
    """80 studies of 6 prompts: 95 % intervals that hold the mean of them all in 70 or more."""
    studies = [jackknife(leave_one_out(made_up(6, 1, 20, 12, seed))["distinct_2"]) for seed in range(80)]
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


PAIRS = [(3, 5), (3, 5), (5, 3), (8, 0), (1, 7), (9, 1), (2, 30), (30, 2), (7, 11), (16, 16)]


def random_pairs():
    rng = np.random.default_rng(0)
    return [(rng.integers(0, 256, m).tolist(), rng.integers(0, 256, n).tolist()) for m, n in PAIRS]


def judge_agrees(block_size):
    model, pairs = make_model(block_size=block_size, n_layer=2), random_pairs()
    want = [slow_nats(model, 10, *pair) for pair in pairs]
    return np.allclose(nats_after(model, 10, pairs), want, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 2, 7, 8, 64])
def test_the_judge_scores_each_byte_in_its_context(block_size):
    assert judge_agrees(block_size)


def test_the_slow_judge_catches_another_context(monkeypatch):
    right = probe_text.windows
    monkeypatch.setattr(probe_text, "windows", lambda n, T, stride: right(n, T, T))
    assert not judge_agrees(8)


class Bigrams(nn.Module):
    """A judge that counted pairs of bytes."""

    def __init__(self, text):
        super().__init__()
        counts = torch.full((256, 256), 0.1)
        for a, b in zip(text, text[1:]):
            counts[a, b] += 1
        self.logits = nn.Parameter(counts.log())
        self.config = GPTConfig(vocab_size=256, block_size=16)

    def forward(self, idx):
        return SimpleNamespace(logits=self.logits[idx])


@pytest.mark.slow
def test_the_judge_prefers_its_kind_of_text_to_the_same_bytes_shuffled(bytes_data):
    data = Dataset(bytes_data)
    judge = Bigrams(data.tokens("train").tolist())
    text = data.tokens("test")[:200].tolist()
    shuffled = random.Random(0).sample(text[100:], 100)
    real, wrong = nats_after(judge, 10, [(text[:100], text[100:]), (text[:100], shuffled)])
    assert wrong > 2 * real


# ---- the command ----

def write_checkpoint(path, model, folder):
    meta = json.loads((folder / "meta.json").read_text())
    torch.save(dict(model=model.state_dict(), config=asdict(model.config), meta=meta,
                    train=dict(dataset=str(folder)), step=7), path)
    return str(path)


SHORT = ["--num_prompts", "3", "--prompt_tokens", "6", "--samples", "2", "--tokens", "24"]


@pytest.fixture
def ckpt(tmp_path, bytes_data):
    return write_checkpoint(tmp_path / "a.pt", make_model(), bytes_data)


@pytest.fixture
def sums_as_chars(tmp_path, bytes_data):
    """The text of bytes_data with a vocabulary of its characters."""
    splits = {path.stem: path.read_text() for path in bytes_data.glob("*.bin")}
    return write_dataset(tmp_path / "chars", splits, "char", SUMS)


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


def test_figures_are_those_of_the_samples(ckpt, written):
    (run, real), lines = written("--ckpt", ckpt)
    figures = leave_one_out([[text.encode("utf-8", "replace") for text in row] for row in real["samples"]])
    for name, values in figures.items():
        got = [math.nan if v is None else v for v in real["figures"][name]]
        assert same(got, list(jackknife(values))), name
    assert "judge" not in run["figures"] and "bits/byte" not in lines[1]
    assert run["tokens_per_s"] > 0
    assert run["name"] == ckpt and lines[-2].split("  ")[0].endswith("/a.pt")
    assert lines[-1].startswith("the text itself  ")
    assert lines[0] == ("sums, test: 3 prompts, 2 samples of 24 tokens each, seed 1337, temperature 0.8")


@pytest.mark.slow
def test_samples_are_the_models_own_with_the_seed_of_their_prompt(ckpt, written, bytes_data):
    (run, _), _ = written("--ckpt", ckpt, "--seed", "5", "--top_k", "7", "--temperature", "1.5")
    text, model = Dataset(bytes_data).tokens("test"), make_model()
    for p, row in enumerate(run["samples"]):
        prompt = text[p * (1000 // 3):][:6]
        assert run["prompts"][p] == bytes(prompt).decode()
        idx = torch.tensor([prompt.tolist()] * 2)
        ids = model.generate(idx, 24, temperature=1.5, top_k=7,
                             generator=torch.Generator().manual_seed(5 + p))[:, 6:]
        assert row == [bytes(one).decode("utf-8", "replace") for one in ids.tolist()]


def test_the_text_itself_is_what_follows_each_prompt(ckpt, written, bytes_data):
    (_, real), _ = written("--ckpt", ckpt, "--split", "val")
    text = (bytes_data / "val.bin").read_bytes().decode()
    for prompt, (sample,) in zip(real["prompts"], real["samples"]):
        at = text.index(prompt + sample)
        assert len(prompt) == 6 and len(sample) == 24 and at >= 0


@pytest.mark.slow
def test_the_same_seed_says_the_same_and_another_something_else(ckpt, written):
    samples = [written("--ckpt", ckpt, "--seed", seed)[0][0]["samples"] for seed in ("1", "1", "2")]
    assert samples[0] == samples[1] != samples[2]


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--temperature", "1.7"], ["--top_k", "2"], ["--top_p", "0.3"],
                                  ["--repetition_penalty", "3"], ["--set", "gate.0.0=0"]])
def test_each_setting_matters_and_is_said(ckpt, written, more):
    (plain, _), _ = written("--ckpt", ckpt)
    (run, _), lines = written("--ckpt", ckpt, *more)
    assert run["samples"] != plain["samples"]
    assert " ".join(more).lstrip("-").removeprefix("set ") in lines[0]


@pytest.mark.slow
def test_the_first_is_the_baseline_of_the_others(tmp_path, ckpt, written, bytes_data):
    other = write_checkpoint(tmp_path / "b.pt", make_model(n_head=4), bytes_data)
    (first, again, second, real), lines = written("--ckpt", ckpt, "--ckpt", ckpt, "--ckpt", other)
    assert first["less_the_first"] is None
    assert {value for value, _ in again["less_the_first"].values()} == {0.0}
    assert again["less_the_first"]["loop"] == [0.0, 0.0]
    assert second["less_the_first"]["distinct_1"][0] == pytest.approx(
        second["figures"]["distinct_1"][0] - first["figures"]["distinct_1"][0])
    assert sum(line.startswith("  less the first") for line in lines) == 2


@pytest.mark.slow
def test_greedy_text_of_a_random_model_loops(ckpt, written):
    """A negative control of the whole command: what certainly repeats is told from what does not."""
    size = ["--num_prompts", "3", "--prompt_tokens", "6", "--samples", "1", "--tokens", "300"]
    (greedy, _), _ = written("--ckpt", ckpt, "--temperature", "0", short=size)
    (random, _), _ = written("--ckpt", ckpt, "--temperature", "3", short=size)
    assert greedy["figures"]["loop"][0] > 0.5 > 0.1 > random["figures"]["loop"][0]
    assert greedy["figures"]["first_repeat"][0] < 150 < 300 == random["figures"]["first_repeat"][0]


def test_a_prompt_longer_than_the_block_goes_on(ckpt, written):
    (run, _), _ = written("--ckpt", ckpt, "--judge", ckpt,
                          short=["--num_prompts", "2", "--prompt_tokens", "40", "--tokens", "40",
                                 "--samples", "1"])
    assert run["figures"]["judge"][0] > 0


@pytest.mark.slow
def test_stop_ends_samples_and_text_before_the_separator(ckpt, written):
    size = ["--num_prompts", "3", "--prompt_tokens", "6", "--samples", "4", "--tokens", "400"]
    _, lines = written("--ckpt", ckpt, "--stop", short=["--tokens", "300", "--num_prompts", "2"])
    assert lines[0].endswith("stop True")
    (run, real), _ = written("--ckpt", ckpt, "--stop", "--temperature", "3", "--split", "val", short=size)
    assert not any("\n" in text for row in run["samples"] + real["samples"] for text in row)
    assert all(len(row[0]) < 20 for row in real["samples"])
    assert any(len(text) < 400 for row in run["samples"] for text in row)


def test_a_model_that_stops_at_once_says_nothing(tmp_path, written, bytes_data, ckpt):
    model = make_model()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.transformer.wpe.weight[:, 0] = 1  # the same at every position, and what only the newline wants
        model.transformer.ln_f.weight.fill_(1)
        model.transformer.wte.weight[10, 0] = 40
    path = write_checkpoint(tmp_path / "mute.pt", model, bytes_data)
    (run, _), lines = written("--ckpt", path, "--judge", ckpt, "--stop", "--temperature", "0")
    assert run["samples"] == [["", ""]] * 3
    assert all(value == [None, None] for value in run["figures"].values())
    assert set(lines[-2].split()[1:-1]) == {"–"}


def test_padding_of_the_vocabulary_has_no_text(tmp_path, written, chars_data):
    path = write_checkpoint(tmp_path / "padded.pt", make_model(vocab_size=64, spread=0.1), chars_data)
    (run, _), _ = written("--ckpt", path, "--judge", path)
    lengths = [len(text) for row in run["samples"] for text in row]
    assert max(lengths) < 24 and set("".join(sum(run["samples"], []))) <= set("abcdefgh \n")
    assert run["figures"]["judge"][0] == pytest.approx(6, abs=0.2)  # log2 of 64, a byte a symbol


# ---- who judges ----

def test_a_uniform_judge_gives_8_bits_a_byte(tmp_path, ckpt, written, bytes_data):
    # its head starts at 0
    judge = write_checkpoint(tmp_path / "flat.pt", make_model(recipe="modern", n_embd=32), bytes_data)
    (run, real), lines = written("--ckpt", ckpt, "--judge", judge)
    for one in (run, real):
        assert one["figures"]["judge"] == [pytest.approx(8), pytest.approx(0, abs=1e-9)]
    assert lines[1].startswith(f"judge: {judge}, ") and lines[1].endswith(" parameters")


def test_a_judge_that_is_not_larger_is_named(ckpt, written):
    _, lines = written("--ckpt", ckpt, "--judge", ckpt)
    assert lines[1].endswith("of those it judges")


@pytest.mark.slow
def test_bytes_judge_a_model_of_characters(tmp_path, ckpt, written, sums_as_chars):
    """The same text, whatever its tokens are: the same bits per byte."""
    chars = write_checkpoint(tmp_path / "c.pt", make_model(vocab_size=len(SUMS)), sums_as_chars)
    (_, as_chars), _ = written("--ckpt", chars, "--judge", ckpt)
    (_, as_bytes), _ = written("--ckpt", ckpt, "--judge", ckpt)
    assert as_chars["figures"] == as_bytes["figures"] and as_chars["figures"]["judge"][0] > 0


@pytest.mark.slow
def test_bits_are_the_judges_of_what_was_said(ckpt, written, tmp_path, bytes_data):
    judge = make_model(n_embd=32)
    path = write_checkpoint(tmp_path / "judge.pt", judge, bytes_data)
    (_, real), _ = written("--ckpt", ckpt, "--judge", path)
    nats = sum(slow_nats(judge, 10, list(prompt.encode()), list(text.encode()))
               for prompt, (text,) in zip(real["prompts"], real["samples"]))
    assert real["figures"]["judge"][0] == pytest.approx(nats / math.log(2) / (3 * 24), abs=1e-3)


# ---- bad input: one line ----

def test_a_mistake_in_the_judge_is_found_before_anything_is_written(ckpt, refusal, monkeypatch):
    monkeypatch.setattr(probe_text, "continuations", lambda *a, **k: pytest.fail("written"))
    assert "no checkpoint" in refusal(["text", "--ckpt", ckpt, *SHORT, "--judge", "nowhere.pt"])


# ---- the table ----

def test_the_table_is_aligned_and_fits_120_columns():
    figures = {name: (v, h) for name, v, h in [("rep_4", 0.0164, 0.03), ("distinct_2", 0.9, 0.01),
                                               ("self_bleu", 0.31, 0.02), ("loop", 1.0, math.nan),
                                               ("first_repeat", 1024.0, 12.34), ("judge", 2.5, 0.1)]}
    lines = text_table([("/a/long/way/to/the/folder/of/a/run/seed1", figures, 12345.6),
                        ("  less the first", figures, None), ("b", figures, 3.0)]).splitlines()
    assert max(map(len, lines)) <= 120 and len({len(lines[i]) for i in (0, 1, 3)}) == 1
    assert "0.016 ±0.030" in lines[1] and "1024.0 ±12.3" in lines[1] and "  1.000  " in lines[1]
    assert "+0.016 ±0.030" in lines[2] and "12,346" in lines[1]


def test_the_library_of_bleu_is_loaded_only_where_it_is_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)  # importing it fails
    fresh = runpy.run_path(str(ROOT / "lab/probes/quality.py"))
    assert fresh["rep_n"](["a", "a"], 1) == 0.5
    with pytest.raises(ImportError):
        fresh["self_bleu"]([["a"], ["a"]])
