"""lm-evaluation-harness: every request in batches as one token at a time has it, and the launcher's table."""
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from conftest import write_dataset
from model import GPT, MECHANISMS, GPTConfig
from nanoheads.common import UserError
from nanoheads.hub import huggingface as hf
from nanoheads.text import dataset
from nanoheads.text.dataset import Dataset
from nanoheads.training import checkpoint, scoring
from nanoheads.training.scoring import evaluate, score

ROOT = Path(__file__).resolve().parents[1]
VOCAB = ["\n", " ", *"abcdefgh", "é"]
TEXT = "".join(VOCAB[i * i % 11] + VOCAB[i * 7 % 10 + 1] for i in range(59))
T = 12  # block_size
needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None,
                                   reason="lm_eval is not installed: pip install 'lm_eval>=0.4.13'")


@pytest.fixture(scope="module")
def harness():
    """The module, which imports lm_eval: once, and not before a test asks for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        from nanoheads.hub import harness as module
    return module


def write_checkpoint(path, encoding="char", dataset=None, spread=4.0, **flags):
    """A checkpoint of a tiny model whose weights are large enough that every token shows in the logits."""
    vocab, size, separator = dict(byte=(None, 256, 10), char=(VOCAB, len(VOCAB), 0),
                                  gpt2=(None, 50257, 50256))[encoding]
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**dict(block_size=T, vocab_size=size, n_layer=2, n_head=2, n_embd=16,
                                  tied=False), **flags}))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(spread)
    meta = dict(name="toy", encoding=encoding, vocab_size=size, dtype="uint16", separator=separator,
                splits={}, **({"vocab": vocab} if vocab else {}))
    torch.save(dict(model=model.state_dict(), config=asdict(model.config), meta=meta,
                    train=dict(dataset=str(dataset))), path)
    return str(path)


@pytest.fixture
def load(harness, tmp_path):
    """load(encoding, model_args={}, **flags) -> the harness's model of a tiny checkpoint."""
    def call(encoding="char", model_args={}, **flags):
        path = write_checkpoint(tmp_path / "a.pt", encoding, **flags)
        return harness.NanoHeads(path, **{"device": "cpu", **model_args})
    return call


def ask(method, *requests):
    return method([SimpleNamespace(args=request) for request in requests], disable_tqdm=True)


@torch.no_grad()
def one_by_one(model, before, after):
    """(log-probability, whether greedy) of ids after others, a forward pass in float64 for each, unpadded."""
    model, total, greedy = model.double(), 0.0, True
    for i, token in enumerate(after):
        logits = model(torch.tensor([[*before, *after[:i]]])).logits[0, -1].double()
        total += float(F.log_softmax(logits, -1)[token])
        greedy &= int(logits.argmax()) == token
    model.float()
    return total, greedy


def agree(found, truth):
    return (np.allclose([one[0] for one in found], [one[0] for one in truth], atol=2e-4)
            and [one[1] for one in found] == [one[1] for one in truth])


# ---- loglikelihood ----

def truths(lm, requests):
    """What is true of requests (context, continuation); spaces between them belong to the continuation."""
    found = []
    for context, text in requests:
        before = lm.tokenizer.encode(context.rstrip()).tolist()
        after = lm.tokenizer.encode(context + text).tolist()[len(before):]
        before = before or [lm.tokenizer.separator]
        found.append(one_by_one(lm.model, before[max(0, len(before) + len(after) - T - 1):], after))
    return found


@torch.no_grad()
def likeliest(lm, context, n):
    """The n characters that greedy decoding of a char model says after a context."""
    ids = lm.tokenizer.encode(context).tolist()
    for _ in range(n):
        ids.append(int(lm.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return lm.tokenizer.decode(ids[-n:])


def some_requests(lm):
    """Of all lengths: alone, after an empty context, filling the window, with too long a context; greedy."""
    texts = [("abc", "d"), ("", "abc\nd"), ("", "\n"), ("a", TEXT[:T]), (TEXT, "bad"), (TEXT[:7], "a"),
             (TEXT[:40], TEXT[40:40 + T]), ("ab  ", "c"), (" ", "ab"), ("a", TEXT[3:T])]
    if lm.tokenizer.encoding == "char":
        said = likeliest(lm, "abcab", 4)
        wrong = "a" if said[-1] != "a" else "b"
        texts += [("abcab", said), ("abcab", said[:3] + wrong), ("abcab", wrong + said[1:])]
    return texts


@needs_lm_eval
@pytest.mark.parametrize("batch_size", ["auto", 1, 3])
@pytest.mark.parametrize("encoding, recipe", [("char", "gpt2"), ("char", "modern"), ("byte", "gpt2"),
                                              ("gpt2", "gpt2")])
def test_loglikelihoods_are_those_of_one_token_at_a_time(load, gpt2_files, encoding, recipe, batch_size):
    flags = dict(recipe=recipe, **({} if recipe == "gpt2" else dict(zero_init=False)))
    lm = load(encoding, dict(batch_size=batch_size), spread=1.5 if encoding == "gpt2" else 4.0, **flags)
    requests = some_requests(lm)
    found = ask(lm.loglikelihood, *requests)
    assert agree(found, truths(lm, requests))
    if encoding == "char":
        assert [greedy for _, greedy in found][-3:] == [True, False, False]


@needs_lm_eval
def test_the_oracle_catches_wrong_batches(load, harness, monkeypatch):
    """Padding that is read, targets one off, answers in another order."""
    lm = load()
    requests, nats_of, padded = some_requests(lm), scoring.nats_of, harness.padded
    truth = truths(lm, requests)
    assert agree(ask(lm.loglikelihood, *requests), truth)
    with monkeypatch.context() as wrong:
        wrong.setattr(harness, "padded", lambda rows, left=False: padded(rows, not left))
        assert not agree(ask(lm.loglikelihood, *requests), truth)
    with monkeypatch.context() as wrong:
        wrong.setattr(scoring, "nats_of", lambda logits, ids: nats_of(logits.roll(1, 1), ids))
        assert not agree(ask(lm.loglikelihood, *requests), truth)
    assert not agree(ask(lm.loglikelihood, *requests), truth[::-1])


@needs_lm_eval
def test_a_continuation_longer_than_a_window_goes_on_in_further_ones(load):
    from lm_eval.utils import get_rolling_token_windows
    lm = load()
    before, after = lm.tokenizer.encode("abc").tolist(), lm.tokenizer.encode(TEXT[:2 * T + 5]).tolist()
    want = 0.0
    for seen, scored in get_rolling_token_windows(after, before[-1], T, 1):
        want += one_by_one(lm.model, seen[:len(seen) - len(scored) + 1], scored)[0]
    [(found, _)] = ask(lm.loglikelihood, ("abc", TEXT[:2 * T + 5]))
    assert found == pytest.approx(want, abs=1e-3)


@needs_lm_eval
def test_a_continuation_is_greedy_only_where_every_window_of_it_is(load):
    lm = load()
    ids = lm.tokenizer.encode("c").tolist()
    for i in range(2 * T):
        ids += lm.tokenizer.encode(likeliest(lm, lm.tokenizer.decode(ids[i // T * T:]), 1)).tolist()
    text = lm.tokenizer.decode(ids[1:])
    others = ["ab"[text[0] == "a"] + text[1:], text[:-1] + "ab"[text[-1] == "a"]]
    found = ask(lm.loglikelihood, *[("c", each) for each in (text, *others)])
    assert [greedy for _, greedy in found] == [True, False, False]


@needs_lm_eval
@pytest.mark.parametrize("context", ["abc", ""])
def test_an_empty_text_is_certain(load, context):
    lm = load()
    assert ask(lm.loglikelihood, (context, "")) == [(0.0, True)]
    assert ask(lm.loglikelihood_rolling, ("",)) == [0.0]


@needs_lm_eval
def test_answers_go_into_the_harness_cache(load):
    lm, kept = load(), []
    lm.set_cache_hook(SimpleNamespace(add_partial=lambda *args: kept.append(args)))
    for name, request in (("loglikelihood", ("abc", "d")), ("loglikelihood_rolling", (TEXT,)),
                          ("generate_until", ("abc", dict(max_gen_toks=3)))):
        [answer] = ask(getattr(lm, name), request)
        assert kept.pop() == (name, request, answer) and not kept


@needs_lm_eval
@pytest.mark.parametrize("name", ["routing_published", "constraint_a", "key_offset"])
def test_mechanisms_see_nothing_of_the_other_requests(load, name):
    lm = load(**{**MECHANISMS[name], "n_head": 4})
    requests = some_requests(lm)[:8]
    together = ask(lm.loglikelihood, *requests)
    asked = [(context, dict(until=["e"], max_gen_toks=9)) for context, _ in requests]
    texts = ask(lm.generate_until, *asked)
    lm.batch_size = 1
    assert agree(together, ask(lm.loglikelihood, *requests))
    assert texts == ask(lm.generate_until, *asked)


@needs_lm_eval
def test_bfloat16_is_used_and_changes_little(load):
    requests = [("abc", "d"), ("", TEXT[:T])]
    full, low = ([one for one, _ in ask(load(model_args=dict(dtype=dtype)).loglikelihood, *requests)]
                 for dtype in ("float32", "bfloat16"))
    assert full != low and low == pytest.approx(full, rel=0.05)


# ---- loglikelihood_rolling ----

TEXTS = ["", "a", TEXT[:T - 1], TEXT[:T], TEXT[:T + 1], TEXT[:2 * T], TEXT[:2 * T + 3], TEXT]


@needs_lm_eval
@pytest.mark.parametrize("stride", [0, 5, T])
def test_rolling_windows_are_the_harness_own(load, stride):
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    lm, want = load(model_args=dict(stride=stride)), []
    for text in TEXTS:
        cuts = get_rolling_token_windows(lm.tokenizer.encode(text).tolist(), lm.tokenizer.separator, T,
                                         T - (stride or T) + 1)
        want.append(sum(one_by_one(lm.model, *cut)[0] for cut in map(make_disjoint_window, cuts)))
    found = ask(lm.loglikelihood_rolling, *[(text,) for text in TEXTS])
    assert np.allclose(found, want, atol=1e-3)
    assert not np.allclose(found[:-1], want[1:], atol=1e-3)


@needs_lm_eval
@pytest.mark.parametrize("stride", [0, 5])
def test_windows_of_evaluate_give_evaluates_score(load, tmp_path, stride):
    lm, own = (load(model_args=dict(stride=stride, **more)) for more in (dict(windows="evaluate"), {}))
    for n, text in enumerate(TEXTS[1:]):
        folder = write_dataset(tmp_path / f"d{n}", dict(train="a", val="a", test=text), "char", VOCAB)
        nats, count = score(lm.model, Dataset(folder), "test", stride)
        [found] = ask(lm.loglikelihood_rolling, (text,))
        assert count == len(text) and found == pytest.approx(-nats, rel=1e-6)
    # the last text ends in a window that is not full, whose context is what the two differ in
    assert ask(own.loglikelihood_rolling, (text,))[0] != pytest.approx(found, rel=1e-6)


@needs_lm_eval
def test_both_ways_are_logged(load, monkeypatch):
    ways, logged = {}, []
    monkeypatch.setattr(logging.getLogger("lm_eval.nanoheads"), "info", logged.append)
    for way in ("harness", "evaluate"):
        ways[way] = sum(ask(load(model_args=dict(windows=way)).loglikelihood_rolling, (TEXT,), ("ab\ncd ",)))
    size, words = len((TEXT + "ab\ncd ").encode()), len(re.split(r"\s+", TEXT)) + 3
    for way, line in zip(ways, logged):
        assert f"{size} bytes, {words} words, windows of {T}, stride {T}\n" in line
        assert line.endswith(f"the table has windows={way}")
        for name, total in ways.items():
            bits, perplexity = -total / np.log(2) / size, np.exp(-total / words)
            figures = f"{bits:.5f} bits/byte, word perplexity {perplexity:.6g}\n"
            assert re.search(rf"windows={name}, .*: +{re.escape(figures)}", line)


# ---- generate_until ----

@torch.no_grad()
def written(lm, context, until=(), max_gen_toks=256):
    """What a model of characters or bytes says after a context, a forward pass for each, without a cache."""
    T, seen, text = lm.max_length, lm.tokenizer.encode(context).tolist() or [lm.tokenizer.separator], ""
    seen = seen[-max(T - max_gen_toks, T // 2):]
    for _ in range(max_gen_toks):
        seen.append(int(lm.model(torch.tensor([seen])).logits[0, -1].argmax()))
        text += lm.tokenizer.decode(seen[-1:])
        seen = seen[-(T // 2):] if len(seen) > T else seen
    return text[:min([text.index(end) for end in until if end in text], default=len(text))]


CONTEXTS = ["abc", "", TEXT, "a", TEXT[:T], TEXT[5:11], "hgf"]


def asked(lm, **kwargs):
    return ([(context, kwargs) for context in CONTEXTS],
            [written(lm, context, **kwargs) for context in CONTEXTS])


@needs_lm_eval
@pytest.mark.parametrize("batch_size", ["auto", 1, 2])
@pytest.mark.parametrize("kwargs", [dict(max_gen_toks=3), dict(max_gen_toks=T + 5), dict(max_gen_toks=40),
                                    dict(until=["d", "bb"], max_gen_toks=30),
                                    dict(until=["gfb", "ég", "ae"], max_gen_toks=60)])
def test_texts_are_those_of_one_token_at_a_time(load, kwargs, batch_size):
    lm = load(model_args=dict(batch_size=batch_size), spread=8.0)
    requests, want = asked(lm, **kwargs)
    assert ask(lm.generate_until, *requests) == want
    assert len(set(want)) > 5


@needs_lm_eval
def test_requests_of_several_kinds_come_back_in_order(load):
    lm = load(spread=8.0)
    kinds = [dict(until=["d"], max_gen_toks=20), dict(max_gen_toks=4), dict(until="b", max_gen_toks=20)]
    requests = [(context, kinds[i % 3]) for i, context in enumerate(CONTEXTS)]
    want = [written(lm, context, **kind) for context, kind in requests]
    assert ask(lm.generate_until, *requests) == want


@needs_lm_eval
def test_the_oracle_catches_padding_that_is_seen(load, harness, monkeypatch):
    lm, padded = load(spread=8.0), harness.padded
    requests, want = asked(lm, max_gen_toks=20)
    assert ask(lm.generate_until, *requests) == want
    with monkeypatch.context() as wrong:
        wrong.setattr(harness, "padded", lambda rows, left=False: padded(rows, not left))
        assert ask(lm.generate_until, *requests) != want
    stream = lm.model.stream
    monkeypatch.setattr(lm.model, "stream", lambda *args, lengths, **more: stream(*args, **more))
    assert ask(lm.generate_until, *requests) != want


@needs_lm_eval
@pytest.mark.parametrize("encoding, steps, until, want", [
    ("byte", [b"H\xc3", b"i\xa9", b"!x"], [], ["Hi!", "éx"]),
    ("byte", [b"aa", b"bx", b"cb", b"dc", b"dd"], ["cd", "bcd"], ["a", "ax"]),  # the first to begin
    ("byte", [b"a\n", b"\nb"], [], ["a\n", "\nb"]),  # a newline ends nothing by itself
    ("byte", [b"\xc3a", b"\xa9b", b"zz"], ["é"], ["", "abz"]),
    ("gpt2", [[15496, 50256], [50256, 15496], [15496, 15496]], [], ["Hello", ""]),  # the end of a text
    ("gpt2", [[15496, 11], [50300, 995]], [], ["Hello", ", world"[:1] + " world"]),  # beyond the vocabulary
])
def test_texts_end_where_they_should(load, gpt2_files, monkeypatch, encoding, steps, until, want):
    """steps: what each of two rows says, token by token."""
    lm = load(encoding)
    monkeypatch.setattr(lm.model, "stream", lambda *_, **__: (torch.tensor(list(step)) for step in steps))
    assert lm.write([[1], [2, 3]], 9, tuple(end.encode() for end in until), {}) == want


@needs_lm_eval
def test_writing_stops_once_every_text_has_ended(load, monkeypatch):
    lm, steps = load("byte"), iter([b"ax", b"xy", b"yz", b"zz"])
    monkeypatch.setattr(lm.model, "stream", lambda *_, **__: (torch.tensor(list(step)) for step in steps))
    assert lm.write([[1], [2]], 9, (b"xy",), {}) == ["a", ""]
    assert next(steps) == b"zz"


@needs_lm_eval
def test_sampling_is_as_asked(load, monkeypatch):
    lm, seen = load(), []
    stream = lm.model.stream
    monkeypatch.setattr(lm.model, "stream", lambda *args, **more: seen.append(more) or stream(*args, **more))

    def settings(**kwargs):
        [text] = ask(lm.generate_until, ("abc", dict(max_gen_toks=30, until=[], **kwargs)))
        return {key: value for key, value in seen[-1].items() if key != "lengths"}, text

    assert settings()[0] == settings(do_sample=False, temperature=2.0)[0] == dict(temperature=0.0)
    assert settings(do_sample=True)[0] == {}  # stream()'s own temperature, 1
    assert settings(temperature=0.7, top_p=0.9)[0] == dict(temperature=0.7, top_p=0.9)
    assert settings(do_sample=True, top_k=1)[1] == settings()[1]
    torch.manual_seed(1)
    one = settings(do_sample=True, temperature=1.5)[1]
    torch.manual_seed(1)
    assert settings(do_sample=True, temperature=1.5)[1] == one != settings(temperature=1.5)[1]


@needs_lm_eval
@pytest.mark.parametrize("kwargs, words", [
    (dict(num_beams=4), "gen_kwargs: nanoheads does not know num_beams; there are until, max_gen_toks"),
    (dict(penalty_alpha=0.6), "nanoheads does not know penalty_alpha"),
    (dict(temperature=-1.0), "temperature=-1.0 must be 0"),
])
def test_settings_that_mean_nothing_are_refused(load, kwargs, words):
    with pytest.raises(ValueError, match=words):
        ask(load().generate_until, ("abc", dict(do_sample=True, **kwargs)))


# ---- beside the harness's own model ----

@needs_lm_eval
def test_an_exported_folder_gets_the_answers_of_the_harness_own_model(harness, gpt2_files, tmp_path):
    """GPT-2's class and byte pairs, through transformers there: every kind of request."""
    for name in ("transformers", "accelerate", "safetensors"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'lm_eval[hf]' safetensors")
    from lm_eval.models.huggingface import HFLM
    path = write_checkpoint(tmp_path / "a.pt", "gpt2", spread=2.0, block_size=32, tied=True)
    state = checkpoint.read(path)
    hf.export(checkpoint.build(state, path), state["meta"], tmp_path / "exported")
    theirs = HFLM(pretrained=str(tmp_path / "exported"), device="cpu", dtype="float32", batch_size=2)
    long = "The river runs down to the sea, and nobody has counted its stones. " * 3
    pairs = [("The river", " runs"), ("", "The sea"), ("a b  ", "c"), (long, " and so on"), ("x", long[3:70])]
    kwargs = dict(until=["e", " a"], max_gen_toks=9)
    asked = [(text, kwargs) for text in ("The river", long, "x", "The sea, the")]
    for folder in (tmp_path / "exported", path):
        own = harness.NanoHeads(folder, device="cpu")
        assert agree(ask(own.loglikelihood, *pairs), ask(theirs.loglikelihood, *pairs))
        texts = (long,), ("The sea",), (long[:100],)
        want = ask(theirs.loglikelihood_rolling, *texts)
        assert np.allclose(ask(own.loglikelihood_rolling, *texts), want, atol=1e-3)
        own.windows = "evaluate"
        assert not np.allclose(ask(own.loglikelihood_rolling, *texts), want, atol=1e-3)
        assert ask(own.generate_until, *asked) == ask(theirs.generate_until, *asked)


# ---- what goes wrong ----

@needs_lm_eval
def test_a_character_outside_the_vocabulary_is_named_with_its_request(load):
    lm, kwargs = load(), dict(max_gen_toks=3)
    words = (r"a.pt cannot read the request 'ab 日本 c': '日' \(U\+65E5\) at position 3 is not among the 11 "
             "symbols of this model's vocabulary$")
    for method, request in ((lm.loglikelihood, ("ab 日本", " c")), (lm.loglikelihood_rolling, ("ab 日本 c",)),
                            (lm.generate_until, ("ab 日本 c", kwargs))):
        with pytest.raises(UserError, match=words):
            ask(method, ("a", "b")[:len(request)] if request[1:] != (kwargs,) else ("a", kwargs), request)


@needs_lm_eval
@pytest.mark.parametrize("model_args, words", [
    ({}, "--model_args must name a checkpoint or a run folder: ckpt=out/a"),
    (dict(ckpt="a.pt", cpkt="a.pt"), "--model_args: unknown key cpkt; did you mean ckpt?"),
    (dict(pretrained="a.pt"), "--model_args: unknown key pretrained; there are ckpt, device, batch_size, "),
    (dict(dtype="float16"), "--model_args: dtype=float16 must be float32 or bfloat16"),
    (dict(windows="rolling"), "--model_args: windows=rolling must be harness or evaluate"),
    (dict(stride=13), "--model_args: stride=13 must be from 1 to block_size=12 (0: disjoint windows)"),
    (dict(stride="x"), "--model_args: stride=x must be from 1 to block_size=12 (0: disjoint windows)"),
    (dict(batch_size=0), "batch_size=0 must be auto or a positive number"),
    (dict(batch_size="many"), "batch_size=many must be auto or a positive number"),
    (dict(device="tpu"), "device=tpu cannot be used"),
])
def test_wrong_model_args_are_one_clear_line(harness, tmp_path, model_args, words):
    path = write_checkpoint(tmp_path / "a.pt")
    given = {**dict(ckpt=path, device="cpu"), **model_args} if model_args else {}
    with pytest.raises(UserError) as e:
        harness.NanoHeads(**given)
    assert str(e.value).startswith(words) and "\n" not in str(e.value)


@needs_lm_eval
def test_checkpoints_that_cannot_be_read_are_one_clear_line(harness, bad_checkpoint):
    path, words = bad_checkpoint
    with pytest.raises(UserError, match=re.escape(words)):
        harness.NanoHeads(path, device="cpu")


@needs_lm_eval
def test_a_nanogpt_checkpoint_takes_its_vocabulary_from_the_dataset_named(harness, tmp_path):
    path = tmp_path / "n.pt"
    model = GPT(GPTConfig(block_size=T, vocab_size=256, n_layer=1, n_head=1, n_embd=8))
    shape = {key: getattr(model.config, key) for key in ("n_layer", "n_head", "n_embd", "block_size", "bias")}
    torch.save(dict(model=model.state_dict(), model_args=dict(shape, vocab_size=256)), path)
    folder = write_dataset(tmp_path / "toy", dict(train="a", val="a", test="a"))
    assert harness.NanoHeads(path, device="cpu", dataset=str(folder)).tok_encode("é") == [0xc3, 0xa9]
    with pytest.raises(UserError, match="n.pt does not say what it was trained on"):
        harness.NanoHeads(path, device="cpu")


@needs_lm_eval
def test_damaged_weights_are_one_clear_line(load):
    lm = load()
    with torch.no_grad():
        lm.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="a.pt gives nan nats: its weights are damaged"):
        ask(lm.loglikelihood, ("a", "b"))


@needs_lm_eval
def test_model_args_win_over_the_harness_own(harness, tmp_path):
    """Its command line hands on batch_size=1 and device=cuda:0 where nobody has asked for them."""
    path, make = write_checkpoint(tmp_path / "a.pt"), harness.NanoHeads.create_from_arg_obj
    usual = dict(batch_size=1, max_batch_size=None, device="cuda:0")
    if not torch.cuda.is_available():
        assert str(make(dict(ckpt=path), usual).device) != "cuda:0"
    lm = make(dict(ckpt=path, batch_size=7, device="cpu"), dict(batch_size="3", device="cuda:7"))
    assert lm.batch_size == 7 and str(lm.device) == "cpu"
    assert make(dict(ckpt=path, device="cpu"), usual).batch_size is None
    assert make(dict(ckpt=path), dict(batch_size="8", device="cpu")).batch_size == 8


@needs_lm_eval
def test_a_chat_template_is_refused(load):
    with pytest.raises(UserError, match="has no chat template; leave --apply_chat_template out"):
        load().chat_template(True)


def test_without_lm_eval_the_launcher_says_what_to_install(tmp_path):
    (tmp_path / "lm_eval.py").write_text("raise ModuleNotFoundError(\"No module named 'lm_eval'\")")
    run = subprocess.run([sys.executable, "-m", "nanoheads.hub.harness", "--help"], capture_output=True,
                         cwd=ROOT, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr == "nanoheads.hub.harness: No module named 'lm_eval'; pip install 'lm_eval>=0.4.13'\n"


@needs_lm_eval
def test_what_the_harness_runs_into_ends_in_one_line(load, harness, monkeypatch, capsys):
    lm = load()
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(harness, "cli_evaluate", lambda: ask(lm.loglikelihood, ("a", "日")))
    with pytest.raises(SystemExit) as e:
        harness.main()
    problem = f"{lm.path} cannot read the request 'a日': '日' (U+65E5)"
    assert e.value.code.startswith(f"nanoheads.hub.harness: {problem}")
    assert "\n" not in e.value.code
    assert [path for path in sys.path if path == str(ROOT)] == sys.path[-1:]


# ---- in the harness ----

@needs_lm_eval
def test_the_local_task_reads_a_split_as_one_text(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("splits", ROOT / "data/lm_eval/splits.py")
    splits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(splits)
    folder = write_dataset(tmp_path / "toy", dict(train=b"a", val=b"\xff", test=" né\n \n".encode()))
    assert splits.documents(corpus=str(folder), ckpt="a.pt", version=1.0)["test"][0] == dict(text=" né\n \n")
    with pytest.raises(UserError, match="the val split of .*toy is more than one text: it holds separators"):
        splits.documents(corpus=str(folder), split="val")
    monkeypatch.setattr(splits, "ROOT", tmp_path)  # nothing is prepared there
    monkeypatch.setattr(dataset, "ROOT", tmp_path)
    (tmp_path / "data/wikitext2").mkdir(parents=True)
    (tmp_path / "data/wikitext2/prepare.py").touch()
    with pytest.raises(UserError, match="wikitext2_byte is not prepared; run: python .*--encoding=byte"):
        splits.documents()


@needs_lm_eval
def test_the_entry_point_names_the_registered_class(harness):
    from lm_eval.api.registry import get_model
    [named] = re.findall(r'^\[project.entry-points."lm_eval.models"\].*\nnanoheads = "(.*)"$',
                         (ROOT / "pyproject.toml").read_text(), re.M)
    cls = get_model("nanoheads")
    assert cls is harness.NanoHeads and named == f"{cls.__module__}:{cls.__name__}"


TASK = """dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/docs.jsonl}}
process_docs: !function docs.same
test_split: test
doc_to_text: "{{question}}"
"""
CHOICE = """task: choice
output_type: multiple_choice
doc_to_choice: ["a", "bad", "cab"]
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WRITE = """task: write
output_type: generate_until
doc_to_target: said
generation_kwargs: {until: ["d"], max_gen_toks: 9}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
DOCS = """import evaluate

def same(docs):
    assert evaluate.EvaluationModule  # Hugging Face's, not this repository's
    return docs
"""


@needs_lm_eval
def test_the_launchers_table_is_that_of_evaluate_and_of_direct_computation(load, tmp_path):
    """Three kinds of tasks in one run: the local one, with evaluate.py's windows, and two from files."""
    text = " ".join(TEXT[i:i + 2] for i in range(0, len(TEXT), 2)) + " \n"
    folder = write_dataset(tmp_path / "toy", dict(train="a", val="a", test=text), "char", VOCAB)
    lm, path = load(spread=2.0), write_checkpoint(tmp_path / "run.pt", dataset=folder, spread=2.0)
    docs = []
    for i, question in enumerate(["abc", "hgf a", TEXT[:9], "a b c d", "éé"]):
        scores = [one for one, _ in truths(lm, [(question, f" {word}") for word in ("a", "bad", "cab")])]
        best = int(np.argmax(scores))
        docs.append(dict(question=question, answer=best if i < 2 else (best + 1) % 3,
                         said=written(lm, question, ["d"], 9) if i != 1 else "no"))
    (tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
    (tmp_path / "docs.py").write_text(DOCS)
    for name, task in (("choice", CHOICE), ("write", WRITE)):
        (tmp_path / f"{name}.yaml").write_text(task + TASK.replace("FOLDER", str(tmp_path)))
    offline = dict(HF_HOME=str(tmp_path / "cache"), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    run = subprocess.run(
        [sys.executable, "-m", "nanoheads.hub.harness", "--model", "nanoheads",
         "--model_args", f"ckpt={path},device=cpu,windows=evaluate", "--include_path", "data/lm_eval",
         "--tasks", f"nanoheads_wikitext2,{tmp_path}/choice.yaml,{tmp_path}/write.yaml",
         "--metadata", f"corpus={folder}", "--output_path", str(tmp_path / "out.json")],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, **offline})
    assert run.returncode == 0, run.stderr[-3000:]
    for way in ("harness", "evaluate"):
        assert re.search(rf"windows={way}, .*: +\d+\.\d+ bits/byte, word perplexity \d", run.stderr)

    want = evaluate(path, "test", 0, "cpu", progress=False)
    table = dict(re.findall(r"\|none +\| +0\|(\w+) *\|.  \| *([\d.]+)\|", run.stdout))
    assert float(table["bits_per_byte"]) == pytest.approx(want["bpb"], abs=1e-4)
    assert float(table["word_perplexity"]) == pytest.approx(want["word_ppl"], rel=1e-6, abs=1e-4)
    assert float(table["acc"]) == 0.4 and float(table["exact_match"]) == 0.8
    [file] = tmp_path.glob("out*.json")
    results = json.loads(file.read_text())
    figures = results["results"]["nanoheads_wikitext2"]
    assert figures["bits_per_byte,none"] == pytest.approx(want["bpb"], rel=1e-6)
    assert figures["word_perplexity,none"] == pytest.approx(want["word_ppl"], rel=1e-5)
    assert results["config"]["windows"] == "evaluate" and results["config"]["stride"] == T


# ---- its own tasks of long texts ----

STORIES = [dict(context="It was a long road. " * 40, question=question, input=question, length=200,
                dataset="narrativeqa", language="en", all_classes=None, _id=question)
           for question in ("Who met?", "What fell then?", "How was it?")]
needs_rouge = pytest.mark.skipif(importlib.util.find_spec("rouge") is None,
                                 reason="rouge is not installed: pip install rouge, or 'lm_eval[longbench]'")
LOCAL = """include: {config}
task: local_{name}
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
"""


@pytest.fixture
def speaker(harness, tmp_path):
    """A model that writes words of the letters b to h, and can write nothing else."""
    path = write_checkpoint(tmp_path / "a.pt", "byte", spread=8.0, block_size=160)
    lm = harness.NanoHeads(path, device="cpu")
    with torch.no_grad():
        silent = torch.ones(256, dtype=bool)
        silent[[*b"bcdefgh "]] = False
        lm.model.lm_head.weight[silent] = 0
    return lm


@pytest.fixture
def long_task(tmp_path, monkeypatch):
    """long_task(name, docs) -> the harness's own task of LongBench, its hub data replaced by these."""
    import lm_eval.tasks
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.longbench.metrics", raising=False)
    for name in ("jieba", "fuzzywuzzy", "rouge"):  # metrics.py imports them; English F1 calls none of them
        if importlib.util.find_spec(name) is None:
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(fuzz=None, Rouge=None))

    def make(name, docs):
        config = Path(lm_eval.tasks.__file__).parent / "longbench" / f"{name}.yaml"
        (tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
        (tmp_path / "local.yaml").write_text(LOCAL.format(
            config=config, name=name, data=tmp_path / "docs.jsonl", cache=tmp_path / "cache"))
        return lm_eval.tasks.TaskManager(include_path=str(tmp_path), include_defaults=False), config
    return make


def prompts_of(config, docs):
    """What a task's file asks of each document, filled in by hand."""
    [quoted] = re.findall(r'^doc_to_text: (".*")$', config.read_text(), re.M)
    text = json.loads(quoted)
    return [text.replace("{{context}}", doc["context"]).replace("{{question}}", doc["question"])
            for doc in docs]


def f1(hits, written, wanted):
    """The harmonic mean of precision and recall, of numbers of words."""
    return 2 * hits / (written + wanted)


def scored(lm, task, manager):
    """(its figures, what the model said) of one of the harness's tasks."""
    from lm_eval import simple_evaluate
    results = simple_evaluate(model=lm, tasks=[task], task_manager=manager, bootstrap_iters=0)
    said = [sample["filtered_resps"][0].strip() for sample in results["samples"][task]]
    return results["results"][task], said


@needs_lm_eval
def test_narrativeqa_is_scored_as_by_hand(speaker, long_task):
    """F1 of words without case, marks and articles, the best of a question's answers."""
    manager, config = long_task("narrativeqa", [dict(doc, answers=["x"]) for doc in STORIES])
    texts = [written(speaker, prompt, max_gen_toks=128).strip() for prompt in prompts_of(config, STORIES)]
    words = [text.split() for text in texts]
    assert len(set(texts)) == 3 and all(len(set(each)) > 3 for each in words), "questions change what is said"
    docs = [dict(STORIES[0], answers=["x", f"The {words[0][0].upper()}, {words[0][1]}!"]),
            dict(STORIES[1], answers=[texts[1]]), dict(STORIES[2], answers=["neither of them", "x"])]
    (manager, _), want = long_task("narrativeqa", docs), [f1(2, len(words[0]), 2), 1.0, 0.0]
    found, answered = scored(speaker, "local_narrativeqa", manager)
    assert answered == texts
    assert found["qa_f1_score,none"] == found["score,none"] == pytest.approx(np.mean(want), abs=1e-6)


@needs_lm_eval
@needs_rouge
def test_govreport_is_scored_as_by_hand(speaker, long_task):
    """ROUGE-L of the words in common, in order; 512 tokens go on beyond the window."""
    manager, config = long_task("gov_report", [dict(doc, answers=["x"]) for doc in STORIES[:1]])
    [prompt] = prompts_of(config, STORIES[:1])
    text = written(speaker, prompt, max_gen_toks=512).strip()
    distinct = list(dict.fromkeys(text.split()))
    common = distinct[:4]  # in the order in which they first come
    assert len(distinct) > 8 and len(text) > 400
    for answer, hits in ((" ".join(["none", *common, "other"]), 4), ("none of it", 0)):
        manager, _ = long_task("gov_report", [dict(STORIES[0], answers=[answer])])
        found, answered = scored(speaker, "local_gov_report", manager)
        assert answered == [text]
        want = f1(hits, len(distinct), len(answer.split()))
        assert found["rouge_score,none"] == found["score,none"] == pytest.approx(want, abs=1e-6)


@needs_lm_eval
@pytest.mark.parametrize("raised, words", [
    (ConnectionError("Couldn't reach 'a/b'\n(offline)"), "Couldn't reach 'a/b' (offline); a task's data come "
     "from the hub: it must be reached once, then they are in its cache"),
    (ModuleNotFoundError("No module named 'jieba'"), "a task: No module named 'jieba'; it needs what is not "
     "installed here, or another version of it")])
def test_what_a_task_lacks_is_one_clear_line(harness, monkeypatch, raised, words):
    def fail():
        raise raised
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(harness, "cli_evaluate", fail)
    with pytest.raises(SystemExit, match=f"^nanoheads.hub.harness: {re.escape(words)}$"):
        harness.main()


@needs_lm_eval
def test_a_task_that_lacks_a_package_is_named(harness, long_task, monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)  # as if it were not installed
    manager, _ = long_task("narrativeqa", [dict(STORIES[0], answers=["x"])])
    monkeypatch.setattr(harness, "cli_evaluate", lambda: manager.load(["local_narrativeqa"]))
    with pytest.raises(SystemExit, match=r"longbench/metrics.py: Please install .*lm_eval\[.longbench.\]"):
        harness.main()
