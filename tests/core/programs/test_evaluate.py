"""evaluate.py: every token is scored once, in the context that the policy grants it."""
import functools
import json
import math
import re
from dataclasses import asdict, replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import helpers
from evaluate import main
from helpers import byte_pairs, meta_of, put_meta, put_split, write_dataset
from model import GPT
from nanoheads import corpus, dataset, scoring
from nanoheads.common import UserError
from nanoheads.dataset import Dataset
from nanoheads.scoring import nats_of, nats_of_last, score, windows, windows_of
from nanoheads.tokenizer import Tokenizer

make_model = functools.partial(helpers.make_model, spread=8.0, noise=0.0, block_size=8, n_head=2, n_embd=16)


def write_data(folder, encoding="byte", n=23, sizes=None):
    """A data folder whose splits hold n random tokens each; sizes: {"bytes": .., "chars": ..} of a split."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = meta_of(encoding, folder.name) | dict(dtype="uint8" if encoding == "byte" else "uint16")
    (folder / "meta.json").write_text(json.dumps(meta))
    put_meta(folder, **dict(tokens=n, bytes=n, chars=n) | (sizes or {}))
    for i, split in enumerate(meta["splits"]):
        tokens = np.random.default_rng(i).integers(0, meta["vocab_size"], n).astype(meta["dtype"])
        put_split(folder, split, tokens.tobytes())
    return Dataset(folder)


def write_checkpoint(path, model, data, step=7, **train):
    """The path of a checkpoint of a model that was trained on a Dataset."""
    torch.save(dict(model=model.state_dict(), config=asdict(model.config), meta=data.meta,
                    train=dict(dataset=str(data.dir), **train), step=step), path)
    return str(path)


@torch.no_grad()
def oracle(model, data, stride=0):
    """Nats of every position of the test split, one at a time in float64, each in its context."""
    model, tokens, nats = model.double(), [data.separator, *data.tokens("test").tolist()], []
    T = model.config.block_size
    step = stride or T
    for t in range(len(tokens) - 1):
        moves = 0 if t < T else (t - T) // step + 1  # of the window, before it first holds position t
        logits = model(torch.tensor([tokens[moves * step:t + 1]])).logits[0, -1].double()
        nats.append(-F.log_softmax(logits, -1)[tokens[t + 1]].item())
    model.float()
    return np.array(nats)


def positions(cuts):
    """The positions that windows score, in their order."""
    return [t for _, end, n_scored in cuts for t in range(end - n_scored, end)]


def reports_of(path, *argv):
    """What --json holds for a command line."""
    main([*map(str, argv), f"--json={path / 'scores.json'}"])
    return json.loads((path / "scores.json").read_text())


# ---- every token once, in its context ----


@settings(max_examples=20)
@given(st.integers(1, 26), st.integers(1, 8), st.sampled_from([0, 5, 12, 20]), st.sampled_from([0, 3]),
       st.sampled_from(["gpt2", "modern"]), st.data())
def test_scores_are_those_of_one_position_at_a_time(tmp_path, n, block_size, most, longer, recipe, draw):
    """Of a whole split or of a part, also of a part that is chosen by a longer context's windows; whatever
    the batches are, and the ranks, of which there may be more than windows."""
    stride = draw.draw(st.integers(0, block_size))
    data = write_data(tmp_path / str(n), n=n)
    model = make_model(block_size=block_size, recipe=recipe, zero_init=False)
    longest = longer and block_size + longer
    how = dict(stride=stride, max_tokens=most, longest=longest)
    chosen = positions(windows_of(data, "test", longest or block_size, stride, most))
    each = score(model, data, "test", per_token=True, batch_tokens=16, **how)
    assert each.dtype == np.float32 and np.allclose(each, oracle(model, data, stride)[chosen], atol=1e-4)
    whole = score(model, data, "test", **how)
    assert whole == (pytest.approx(each.sum(), rel=1e-5), len(chosen))
    world = draw.draw(st.sampled_from([2, 5, 30]))
    parts = [score(model, data, "test", **how, rank=rank, world=world) for rank in range(world)]
    assert np.sum(parts, axis=0) == pytest.approx(whole, rel=1e-6)


def test_windows_score_each_position_once_and_in_order():
    for n, block_size in product((1, 7, 8, 9, 16, 40), (1, 2, 8, 50)):
        for stride in range(1, block_size + 1):
            cuts = windows(n, block_size, stride)
            assert positions(cuts) == list(range(n))
            assert all(0 <= start < end <= start + block_size for start, end, _ in cuts)
            assert all(end - scored - start == block_size - stride for start, end, scored in cuts[1:])


def test_a_part_of_a_split_is_whole_windows_evenly_spaced_from_the_first_to_the_last():
    for n, block_size, most in product((1, 8, 9, 31, 100), (1, 3, 8, 20), (0, 1, 8, 20, 50, 99)):
        data = SimpleNamespace(tokens=lambda split, n=n: range(n))
        for stride in range(block_size + 1):
            step = stride or block_size
            whole, found = windows(n, block_size, step), windows_of(data, "test", block_size, stride, most)
            if not 0 < most < n:
                assert found == whole
                continue
            full = [cut for cut in whole if cut[1] - cut[0] == block_size] or whole
            places = [full.index(cut) for cut in found]
            assert len(found) == max(1, 1 + (most - block_size) // step)
            assert places[0] == 0 and (len(found) == 1 or places[-1] == len(full) - 1)
            gaps = np.diff(places)
            assert len(gaps) == 0 or 0 < gaps.min() and gaps.max() - gaps.min() <= 1


def test_nats_are_exact_where_logits_are_large_and_in_portions():
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(3, 50, 300, generator=generator) * 1e3, torch.arange(150).view(3, 50)
    want = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none")
    assert np.allclose(nats_of(logits, targets).ravel(), want, rtol=1e-6)
    model, ids = make_model(vocab_size=65), torch.randint(65, (3, 9), generator=generator)
    with torch.no_grad():
        logp = model(ids[:, :-1]).logits.double().log_softmax(-1)
        want = -logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
        for n, most in product((1, 5, 8), (None, 1, 7)):
            assert np.allclose(nats_of_last(model, ids, n, most), want[:, -n:], atol=1e-5)


def test_nothing_but_the_weights_and_the_data_matters(tmp_path):
    """The random numbers of a training go on as they were, the model is in its mode again, also after an
    error, and has no gradient. Autocast changes little."""
    model, data = make_model(spread=3.0, dropout=0.5).train(), write_data(tmp_path, n=100)
    torch.manual_seed(1)
    first, state = score(model, data, "test"), torch.get_rng_state()
    torch.manual_seed(2)
    assert score(model, data, "test") == first == score(model.eval(), data, "test") and not model.training
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)  # scoring drew nothing
    low, _ = score(model.train(), data, "test", autocast=torch.autocast("cpu", torch.bfloat16))
    assert low != first[0] and low == pytest.approx(first[0], rel=0.02)
    data.first = 999  # no such token: the forward pass fails
    with pytest.raises(IndexError):
        score(model, data, "test")
    assert model.training and torch.is_grad_enabled() and all(p.grad is None for p in model.parameters())


# ---- what is reported of several checkpoints ----

SENTENCE = "one two  three\nfour, é is five! "  # eight words, with a character of two bytes


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """(folder of checkpoints a, b, c, d, {name: model}, Dataset of all but d): b has a layer less and other
    training, c a longer context, d was trained on other text."""
    folder = tmp_path_factory.mktemp("several")
    text = (SENTENCE * 12).encode()[:384].decode()  # 64 parts of six bytes
    data = Dataset(write_dataset(folder / "toy", dict(train=text, val=text, test=text)))
    other = Dataset(write_dataset(folder / "other", dict(train=text, val=text, test=text[::-1])))
    make = functools.partial(make_model, spread=2.0)
    models = dict(a=make(), b=make(n_layer=1), c=make(block_size=16), d=make())
    write_checkpoint(folder / "a.pt", models["a"], data, batch_size=4, grad_accum=2)
    write_checkpoint(folder / "b.pt", models["b"], data, 500, batch_size=4, grad_accum=4)
    write_checkpoint(folder / "c.pt", models["c"], data)
    write_checkpoint(folder / "d.pt", models["d"], other)
    return folder, models, data


def ckpts(folder, names):
    return [arg for name in names for arg in ("--ckpt", folder / f"{name}.pt")]


def test_every_figure_of_a_report_follows_from_the_nats_of_its_tokens(several, tmp_path, capsys):
    folder, models, data = several
    a, b = reports_of(tmp_path, *ckpts(folder, "ab"), "--stride=3")["runs"]
    out, text = capsys.readouterr().out, data.tokens("test").tobytes().decode()
    for report, model in ((a, models["a"]), (b, models["b"])):
        nats, size, chars, words = oracle(model, data, 3), len(text.encode()), len(text), len(text.split())
        assert text[-1].isspace() and report["words"] == words + 1  # behind the last space, as others count
        assert (report["tokens"], report["bytes"], report["chars"]) == (size, size, chars) and chars < size
        assert report["nats_per_token"] == pytest.approx(nats.mean(), rel=1e-5)
        assert report["ppl"] == pytest.approx(math.exp(nats.mean()), rel=1e-4)
        assert report["bpb"] == pytest.approx(nats.sum() / math.log(2) / size, rel=1e-5)
        assert report["bpc"] == pytest.approx(nats.sum() / math.log(2) / chars, rel=1e-5)
        assert report["word_ppl"] == pytest.approx(math.exp(nats.sum() / (words + 1)), rel=1e-3)
        assert report["params"] == sum(p.numel() for p in model.parameters())
        assert report["params_non_embedding"] == model.num_params(non_embedding=True)
        assert report["flops_per_token"] == model.flops_per_token() and report["tokens_per_s"] > 0
        shown = (f"{report['bpb']:.4f}", f"{report['bpc']:.4f}", f"{report['params']:,}", f"{report['step']}")
        assert any({*shown} <= {*line.split()} for line in out.splitlines())
        assert f"{report['word_ppl']:.6g}" in out
    assert a["context"] == b["context"] == "windows of 8, stride 3" and a["context"] in out
    assert [a["name"], b["name"]] == [str(folder / "a.pt"), str(folder / "b.pt")]


@pytest.mark.slow
def test_each_checkpoint_is_compared_with_the_first_token_by_token(several, tmp_path, capsys):
    folder, models, data = several
    found = reports_of(tmp_path, *ckpts(folder, "abacd"))
    lines = capsys.readouterr().out.splitlines()
    (b, same, c, d), runs = found["less_the_first"], found["runs"]
    nats = {name: oracle(models[name], data) for name in "abc"}
    size = len(data.tokens("test"))
    for less, name, run in ((b, "b", runs[1]), (c, "c", runs[3])):
        parts = (nats[name] - nats["a"]).reshape(64, -1).sum(1)
        wide = len(parts) / (size * math.log(2))
        interval = stats.t.interval(0.95, len(parts) - 1, parts.mean() * wide, stats.sem(parts) * wide)
        assert less["bpb"][0] == pytest.approx(parts.mean() * wide, abs=1e-5)
        assert less["bpb"][1:] == pytest.approx(interval, abs=0.15 * (interval[1] - interval[0]))
        assert less["bpc"] == pytest.approx([value * size / run["chars"] for value in less["bpb"]])
        assert less["percent"] == pytest.approx(100 * less["bpb"][0] / runs[0]["bpb"])
        assert less["params"] == run["params"] / runs[0]["params"]
        assert any(f"{less['bpb'][0]:+.4f} [{less['bpb'][1]:+.4f}, {less['bpb'][2]:+.4f}]" in line
                   for line in lines)
    assert same["bpb"] == [0.0, 0.0, 0.0] and d is None and "pieces" not in runs[0]
    assert max(len(line) for line in lines if line.count("  ") > 5) <= 120
    assert [line.split(":")[0] for line in lines if "each once" in line] == ["toy, test", "toy, test",
                                                                             "other, test"]
    row, = (line for line in lines if "not compared" in line)
    assert "d.pt" in row and row.split()[-5:] == ["–"] * 5
    for words in (r"steps: .*a.pt 7, .*b.pt 500", r"tokens in each step: .*a.pt 64, .*b.pt 128, .*c.pt –",
                  r"contexts of different lengths.* .*a.pt 8, .*c.pt 16", r"differs: .*d.pt \(the data set"):
        assert any(re.search(words, line) for line in lines), words


def test_a_part_of_the_split_is_the_same_tokens_for_all_checkpoints(several, tmp_path, capsys):
    """Those of the longest context's windows, whose bytes and characters are counted; a quick look."""
    folder, models, data = several
    found = reports_of(tmp_path, *ckpts(folder, "ac"), "--tokens=80", "--batch_size=3")
    out = capsys.readouterr().out
    chosen = positions(windows_of(data, "test", 16, max_tokens=80))
    text = data.tokens("test")[chosen].tobytes()
    losses = [oracle(models[name], data)[chosen] for name in "ac"]
    for run, nats in zip(found["runs"], losses):
        assert run["tokens"] == run["bytes"] == 80 and run["words"] is None
        assert run["chars"] == sum(byte & 0xC0 != 0x80 for byte in text) < 80
        assert run["nats_per_token"] == pytest.approx(nats.mean(), abs=1e-5)
    less, = found["less_the_first"]
    assert less["bpb"][0] == pytest.approx((losses[1] - losses[0]).mean() / math.log(2), abs=1e-5)
    assert "80 of 384 tokens" in out and "quick look" in out and "not compared" not in out


def test_a_mistake_in_the_last_checkpoint_is_found_before_the_first_is_scored(several, tmp_path, refusal):
    folder, _, data = several
    model = make_model()
    nn.init.constant_(model.transformer.wte.weight, 1e38)  # which gives no score
    first = write_checkpoint(tmp_path / "large.pt", model, data)
    assert "no checkpoint" in refusal(["--ckpt", first, "--ckpt", "nowhere.pt"])


def test_ctrl_c_prints_the_runs_that_are_done(several, capsys):
    def interrupt(module, arguments, output):
        if isinstance(module, GPT) and module.config.n_layer == 1:  # b.pt
            raise KeyboardInterrupt

    hook = register_module_forward_hook(interrupt)
    with pytest.raises(SystemExit) as e:
        main([*map(str, ckpts(several[0], "ab"))])
    hook.remove()
    shown = capsys.readouterr()
    assert e.value.code == 130 and "a.pt" in shown.out and "b.pt" not in shown.out
    assert shown.err.strip() == "evaluate: interrupted"


# ---- bytes, characters and words of a text ----


def test_bytes_and_characters_come_from_meta_not_from_the_token_count(tmp_path, monkeypatch):
    """Words of GPT-2's tokens are not counted where that needs a download."""
    monkeypatch.setattr(corpus, "HOME", tmp_path)
    monkeypatch.delenv("NANOHEADS_DATA", raising=False)
    data = write_data(tmp_path / "bpe", "gpt2", n=17, sizes=dict(bytes=70, chars=60))
    path = write_checkpoint(tmp_path / "a.pt", make_model(vocab_size=50257), data)
    run = scoring.evaluate(path, "test", 0, "cpu", progress=False)
    assert (run["tokens"], run["bytes"], run["chars"]) == (17, 70, 60)
    assert run["bpb"] == pytest.approx(17 * run["nats_per_token"] / math.log(2) / 70)
    assert run["bpc"] == pytest.approx(17 * run["nats_per_token"] / math.log(2) / 60)
    assert run["words"] is run["word_ppl"] is None


@settings(max_examples=20)
@given(st.text(" \n\u3000\xa0abé", max_size=12), st.integers(1, 5))
def test_words_are_counted_as_by_lm_evaluation_harness(text, piece):
    """Whatever pieces the split is read in; the harness's count is that of re.split()."""
    ids = np.frombuffer(text.encode(), np.uint8)
    data = SimpleNamespace(tokens=lambda split: ids, tokenizer=Tokenizer("byte"), separator=10)
    assert scoring.count_words(data, "test", piece) == len(re.split(r"\s+", text))


def test_a_separator_of_documents_is_no_text():
    """Of a part of a split, as in the bytes that data/openwebtext counts; in bytes a newline is text."""
    tokenizer = Tokenizer("hf", byte_pairs("The river is wide. So is the stone."))
    end = tokenizer.end
    ids = np.array([*tokenizer.encode("The river is"), end, *tokenizer.encode("wide. So"), end])
    data = SimpleNamespace(tokens=lambda split: ids, tokenizer=tokenizer, separator=end)
    cuts = windows(len(ids), 4, 4)
    assert b"".join(scoring.scored_text(data, "test", cuts)) == b"The river iswide. So"
    assert scoring.count_words(data, "test") == 5 + 1  # and what follows the last separator
    plain = SimpleNamespace(tokens=lambda split: np.frombuffer(b"a\nb", np.uint8), separator=10,
                            tokenizer=Tokenizer("byte"))
    assert scoring.scored_text(plain, "test", [(0, 3, 3)]) == [b"a\nb"]


ACCENTS = "un cafe\u0301 a\u0300 la cre\u0300me, s'il te plai\u0302t; a cup of tea. 日本\n" * 9


def without_the_space():
    """A tokenizer.json of SentencePiece's kind that lacks the marker for spaces: each becomes three bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab.update({c: 256 + i for i, c in enumerate("abcdefghijkl")})
    space = dict(type="Replace", pattern=dict(String=" "), content="\u2581")
    return json.dumps(dict(
        version="1.0", truncation=None, padding=None, added_tokens=[], normalizer=space, pre_tokenizer=None,
        post_processor=None, decoder=dict(type="ByteFallback"),
        model=dict(type="BPE", vocab=vocab, merges=[], byte_fallback=True)))


@pytest.fixture(params=["NFC", "no space"])
def misspelt(request, tmp_path):
    """(Dataset, text of its test split) whose tokens do not spell the text's own bytes."""
    if request.param == "no space":
        vocab, text = without_the_space(), "a cup of tea, or two\n" * 20
    else:
        vocab, text = byte_pairs(ACCENTS, r" ?\S+|\s", normalizer="NFC"), "a cup " + ACCENTS
    return Dataset(write_dataset(tmp_path / "data", dict(train=text, val=text, test=text), "hf", vocab)), text


def test_bits_per_byte_are_of_the_texts_bytes_also_where_its_tokens_spell_others(misspelt, tmp_path, capsys):
    """A uniform model, on the whole split and on parts of it, in evaluate.py and in a study; the tokenizer's
    own offsets say what a token stands for."""
    data, text = misspelt
    tokens, size = data.tokens("test"), len(text.encode())
    assert len(data.tokenizer.decode_bytes(tokens)) != size and not data.meta["spelled"]
    begins = [start for start, _ in data.tokenizer.encode_hf(text).offsets] + [len(text)]
    for cut in windows(len(tokens), 7, 7):
        own = text[begins[cut[0]]:begins[cut[1]]]
        assert scoring.text_size(data, "test", [cut]) == (len(own.encode()), len(own))
    model = make_model(vocab_size=data.vocab_size, block_size=16)
    nn.init.zeros_(model.lm_head.weight)
    path, bits = write_checkpoint(tmp_path / "a.pt", model, data), math.log2(data.vocab_size)
    whole, = reports_of(tmp_path, "--ckpt", path)["runs"]
    assert whole["bpb"] == pytest.approx(len(tokens) * bits / size) and whole["words"] is None
    assert "note: the encoding changes the text: the tokens of" in capsys.readouterr().out
    part, = reports_of(tmp_path, "--ckpt", path, "--tokens", 64)["runs"]
    own = sum(len(text[begins[start]:begins[end]].encode())
              for start, end, _ in windows_of(data, "test", 16, max_tokens=64))
    assert part["bytes"] == own and part["bpb"] == pytest.approx(64 * bits / own)
    _, studied = scoring.score_windows(model, data, "test", 64)
    assert studied["bytes"] == own and studied["bpb"] == pytest.approx(part["bpb"])


def test_a_folder_that_does_not_say_what_its_tokens_stand_for_is_one_line(misspelt):
    data, _ = misspelt
    (data.dir / "test.sizes.bin").unlink()
    with pytest.raises(UserError, match="test.sizes.bin is not there, .* run its"):
        scoring.text_size(data, "test", windows(8, 8, 8))
    for split in data.meta["splits"].values():  # as folders were written before there were such files
        del split["sizes_sha256"]
    del data.meta["spelled"]
    with pytest.raises(UserError, match="spell .* bytes where its text has .*; run its prepare script with"):
        scoring.text_size(data, "test", windows(8, 8, 8))


# ---- whose data ----


def test_data_is_found_by_the_name_that_a_checkpoint_has_of_it(tmp_path, monkeypatch):
    """Also where the path of the training leads nowhere from here; nanoGPT's may name a dataset or none."""
    data = write_data(tmp_path / "data/toy", "char")
    monkeypatch.setattr(dataset, "ROOT", tmp_path)
    model, plain = make_model(vocab_size=13), ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    args = dict({key: getattr(model.config, key) for key in plain}, bias=False, dropout=0.0)
    weights = {f"_orig_mod.{key}": value for key, value in model.state_dict().items()}
    theirs = dict(model=weights, model_args=args, iter_num=3)
    torch.save({**theirs, "config": dict(dataset="toy")}, tmp_path / "named.pt")
    torch.save({**theirs, "config": {}}, tmp_path / "unnamed.pt")
    moved = write_checkpoint(tmp_path / "moved.pt", model, data)
    state = torch.load(moved)
    torch.save({**state, "train": dict(dataset="../elsewhere/toy")}, moved)
    want = score(model, data, "test")[0] / 23
    for argv in (["named.pt"], ["unnamed.pt", "--dataset=toy"], ["moved.pt"]):
        found = reports_of(tmp_path, f"--ckpt={tmp_path / argv[0]}", *argv[1:])["runs"][0]
        assert found["nats_per_token"] == pytest.approx(want), argv
    with pytest.raises(SystemExit, match="unnamed.pt does not say .*; name it with --dataset$"):
        main([f"--ckpt={tmp_path / 'unnamed.pt'}"])
    with pytest.raises(SystemExit, match="no dataset wrong"):  # what the user names is not replaced
        main(["--ckpt", moved, "--dataset=wrong"])


@pytest.mark.parametrize("change, words", [
    (lambda folder: put_split(folder, "test", b"x" * 23), "test split of .* is not the one of its training"),
    (lambda folder: put_meta(folder, bytes=46), "bytes=23 for test, and it has 46 now")])
def test_data_that_is_not_that_of_the_training_is_scored_only_by_name(tmp_path, capsys, change, words):
    """Prepared anew with other fractions, the test split may hold what the model was trained on; twice the
    bytes would halve the bits per byte, without a word."""
    data = write_data(tmp_path / "toy")
    path = write_checkpoint(tmp_path / "a.pt", make_model(), data)
    put_meta(data.dir, note="made up")
    change(data.dir)
    with pytest.raises(SystemExit, match=f"{words}.*--dataset={data.dir} scores it"):
        main(["--ckpt", path])
    run, = reports_of(tmp_path, "--ckpt", path, "--dataset", data.dir)["runs"]
    meta = json.loads((data.dir / "meta.json").read_text())
    assert run["split_sha256"] == meta["splits"]["test"]["sha256"] and run["note"] == "made up"
    assert "note: made up" in capsys.readouterr().out


# ---- switches of a trained model ----


@pytest.fixture
def switched(tmp_path):
    """(checkpoint path, model, Dataset) of a model with something to switch."""
    data = write_data(tmp_path / "toy")
    model = make_model(n_head=4, spread=3.0, unet="concat", agency=True, routing="moh", routing_top_k=3)
    return write_checkpoint(tmp_path / "a.pt", model, data), model, data


def scored(path, *settings):
    return scoring.evaluate(path, "test", 0, "cpu", settings=settings, progress=False)["nats_per_token"]


@pytest.mark.slow
def test_a_flag_that_is_set_makes_the_model_with_that_flag(switched):
    path, model, data = switched
    for key, value in (("unet_skips", False), ("act", "relu2")):
        other = GPT(replace(model.config, **{key: value}))
        other.load_state_dict(model.state_dict())
        assert scored(path, f"{key}={value}") == score(other, data, "test")[0] / 23 != scored(path)


def test_a_gate_of_zero_by_hand_a_withdrawn_head_and_no_consent_are_the_same(switched):
    path, model, data = switched
    with torch.no_grad():
        model.transformer.h[1].attn.c_proj.weight[:, 4:8] = 0  # what head 1 gives
    gone, whole = score(model, data, "test")[0] / 23, scored(path)
    assert whole != gone
    for setting in ("gate.1.1=0", "state.1.1=withdrawn", "consent.1.1=false"):
        assert scored(path, setting) == pytest.approx(gone, rel=1e-6)
    assert scored(path, "consent.1.1=false", "agency_enforce=False") == whole
    assert scored(path, "gate.1.1=0.5") == pytest.approx(scored(path, "state.1.1=overloaded")) != whole
    assert scored(path, "gate.1.1=0", "gate.1.1=1") == whole  # the last one counts


def test_what_was_set_the_heads_at_work_and_the_load_of_routed_heads_are_said(switched, tmp_path, capsys):
    set_by_hand = ["unet_skips=False", "gate.0.3=0"]
    run, = reports_of(tmp_path, "--ckpt", switched[0], *(f"--set={each}" for each in set_by_hand))["runs"]
    out = capsys.readouterr().out
    assert run["set"] == set_by_hand and "with unet_skips=False, gate.0.3=0" in out
    assert run["heads"] == [7, 8] and "7 of 8" in out and "load of each head, %" in out
    assert [each["block"] for each in run["routing"]] == [0, 1]
    for each in run["routing"]:
        assert sum(each["routing_load"]) == pytest.approx(3, abs=1e-6)  # three heads a token
        assert each["dead_heads"] == sum(load == 0 for load in each["routing_load"])


def test_withdrawn_heads_are_packed_away_before_scoring(tmp_path):
    """What is wrong in them reaches nothing; what is said of the model is of all heads. --pack=False computes
    them, as in training."""
    data = write_data(tmp_path / "toy")
    model = make_model(n_head=4, agency=True, routing="moh")
    for block, head in ((0, 3), (1, 0)):
        model.set_state(block, head, state="withdrawn")
    argv = ["--ckpt", write_checkpoint(tmp_path / "a.pt", model, data), "--set=gate.0.1=0"]
    whole, = reports_of(tmp_path, *argv, "--pack=False")["runs"]
    packed, = reports_of(tmp_path, *argv)["runs"]
    assert packed["nats_per_token"] == pytest.approx(whole["nats_per_token"], rel=1e-6)
    for key in ("params", "flops_per_token", "heads", "routing"):
        assert packed[key] == whole[key]
    assert packed["heads"] == [5, 8]
    with torch.no_grad():
        for part in range(3):  # the rows of a head's query, key and value, which overflow
            model.transformer.h[0].attn.c_attn.weight[part * 16 + 12:part * 16 + 16] = 3e38
    write_checkpoint(tmp_path / "a.pt", model, data)
    again, = reports_of(tmp_path, *argv)["runs"]
    assert again["nats_per_token"] == pytest.approx(packed["nats_per_token"], rel=1e-6)
    with pytest.raises(SystemExit, match="gives nan nats"):
        main([*argv, "--pack=False"])
