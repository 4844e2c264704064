"""sample.py: the same seed gives the same text, characters are whole, and what goes wrong is one line."""
import io
import json
import re
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from helpers import VOCAB, byte_pairs, make_checkpoint, meta_of
from model import GPT, GPTConfig
from nanoheads.sampling import cell_count, encode, generate, model_and_tokenizer, side_by_side, wrap
from nanoheads.tokenizer import Tokenizer
from sample import main


@pytest.fixture
def ckpt(tmp_path):
    return make_checkpoint(tmp_path / "a.pt")


@pytest.fixture
def out(capsys):
    """out(argument, ...) -> what main() prints on standard output."""
    def call(*args):
        main([*map(str, args)])
        return capsys.readouterr().out
    return call


def blocks(text):
    """{sample number: its text} of a several-sample output."""
    parts = re.split(r"^==== sample (\d+) ====\n", text, flags=re.M)[1:]
    return {int(n): body.removesuffix("\n\n") for n, body in zip(parts[::2], parts[1::2])}


# ---- what is generated ----


@torch.no_grad()
def slowly(model, ids, n, seed, temperature=0.8, top_k=None, top_p=1.0, repetition_penalty=1.0):
    """Ids with n more, each from a forward pass over all before it, drawn by the formulas as they are
    written; they must fit into the context."""
    generator, ids = torch.Generator().manual_seed(seed), list(ids)
    for _ in range(n):
        logits = model(torch.tensor([ids])).logits[0, -1]
        for i in {*ids}:
            logits[i] = logits[i] / repetition_penalty if logits[i] > 0 else logits[i] * repetition_penalty
        if temperature == 0:
            ids.append(int(logits.argmax()))
            continue
        likeliest = sorted(range(len(logits)), key=lambda i: -logits[i])
        kept, mass = set(likeliest[:top_k]), 0.0
        probs = torch.tensor([float(logits[i] / temperature) if i in kept else -torch.inf
                              for i in range(len(logits))]).softmax(0)
        for i in likeliest:
            if mass >= top_p:
                kept.discard(i)
            mass += float(probs[i])
        probs = torch.tensor([float(p) if i in kept else 0.0 for i, p in enumerate(probs)])
        ids.append(int(torch.multinomial(probs, 1, generator=generator)))
    return ids


@pytest.mark.parametrize("how", [
    dict(), dict(top_k=3), dict(top_p=0.5), dict(temperature=0, repetition_penalty=3),
    dict(temperature=1.5, top_k=8, top_p=0.9, repetition_penalty=1.2)], ids=str)
def test_a_text_is_what_the_formulas_make_of_the_prompt(ckpt, out, how):
    model, tokenizer = model_and_tokenizer(ckpt, "cpu")
    ids = tokenizer.encode("head").tolist()
    for seed in range(3):
        text = out("--ckpt", ckpt, "--start=head", "--max_new_tokens=12", f"--seed={seed}",
                   *(f"--{name}={value}" for name, value in how.items()))
        assert text == tokenizer.decode(slowly(model, ids, 12, seed, **how)) + "\n"


def test_the_same_seed_gives_the_same_text_whatever_else_is_asked_for(ckpt, out):
    """Whatever the global random numbers are, which stay as they are; more samples do not change those
    before, and none is one of the next seed's. Each begins with the prompt, as it is."""
    args = "--ckpt", ckpt, "--start=ab", "--temperature=1", "--max_new_tokens=40"
    torch.manual_seed(1)
    alone = out(*args, "--seed=7")
    torch.manual_seed(2)
    two, five, others = (blocks(out(*args, f"--seed={seed}", f"--num_samples={n}"))
                         for seed, n in ((7, 2), (7, 5), (8, 5)))
    assert two[1] == alone.removesuffix("\n") and [two[i] for i in (1, 2)] == [five[i] for i in (1, 2)]
    assert len({*five.values(), *others.values()}) == 10
    assert all(text.startswith("ab") and len(text) == 42 for text in five.values())
    greedy = {out(*args, f"--seed={seed}", "--temperature=0", "--num_samples=2") for seed in (1, 2)}
    assert len(greedy) == 1 and len({*blocks(greedy.pop()).values()}) == 1


def test_stop_ends_each_text_before_the_separator(ckpt, out):
    several = blocks(out("--ckpt", ckpt, "--num_samples=5", "--start=a", "--stop"))
    assert all("\n" not in text for text in several.values())
    assert len(set(map(len, several.values()))) > 1
    assert out("--ckpt", ckpt, "--start=a", "--stop").count("\n") == 1


def test_padding_of_the_vocabulary_has_no_text(tmp_path, out):
    path = make_checkpoint(tmp_path / "p.pt", vocab_size=2 * len(VOCAB))
    first = out("--ckpt", path, "--start=j", "--temperature=99", "--max_new_tokens=60").removesuffix("\n")
    assert 10 < len(first) < 50 and {*first} <= {*VOCAB}


# ---- prompts ----


def test_a_prompt_is_taken_as_it_is_typed_or_stands_in_its_file(tmp_path, out):
    """A prompt beyond the context goes on; a backslash before an n has a way to stay one."""
    path = make_checkpoint(tmp_path / "b.pt", "byte")
    (tmp_path / "p.txt").write_bytes("a\r\nprint('\\n') é\n".encode())
    for typed, prompt in ((f"FILE:{tmp_path}/p.txt", "a\r\nprint('\\n') é\n"), (r"a\n\tb", "a\n\tb"),
                          (r"print(\"a\\nb\")\n", 'print(\\"a\\nb\\")\n'), ("a" * 50, "a" * 50),
                          (r"\\tau and \alpha, \\ too", r"\tau and \alpha, \\ too")):
        args = "--ckpt", path, "--start", typed, "--max_new_tokens=2"
        assert out(*args).startswith(prompt)


@pytest.mark.slow
def test_an_empty_prompt_begins_at_the_separator(ckpt, out, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    newline, empty, from_file = (out("--ckpt", ckpt, "--start", start)  # a newline is this one's separator
                                 for start in ("\n", "", f"FILE:{tmp_path}/empty.txt"))
    assert newline == "\n" + empty == "\n" + from_file


def test_special_tokens_of_a_prompt_are_tokens_unless_it_says_text(tmp_path, out):
    """As in nanoGPT, whose <|endoftext|> is one token."""
    tokenizer = Tokenizer("hf", byte_pairs("All the world's a stage."))
    config = GPTConfig(block_size=32, vocab_size=tokenizer.vocab_size, n_layer=1, n_head=2, n_embd=16)
    model = GPT(config).eval()
    nn.init.normal_(model.lm_head.weight)
    meta = dict(meta_of("byte"), encoding="hf", vocab=tokenizer.vocab, vocab_size=tokenizer.vocab_size,
                separator=tokenizer.end)
    torch.save(dict(model=model.state_dict(), config=asdict(config), meta=meta, step=1), tmp_path / "h.pt")
    prompt = "<|endoftext|>"
    (tmp_path / "p.txt").write_text(prompt)
    as_text = tokenizer.encode(prompt).tolist()
    assert len(as_text) > 1
    for more, ids in (([prompt], [tokenizer.end]), ([f"FILE:{tmp_path}/p.txt"], [tokenizer.end]),
                      ([prompt, "--special=text"], as_text)):
        text = out("--ckpt", tmp_path / "h.pt", "--temperature=0", "--max_new_tokens=9", "--start", *more)
        new = slowly(model, ids, 9, 0, temperature=0)[len(ids):]
        assert text == prompt + tokenizer.decode(new) + "\n"


# ---- streaming ----


class Screen(io.StringIO):
    """A standard output that keeps what comes through to it at each flush; after `enough` of it, Ctrl-C."""

    def __init__(self, enough):
        super().__init__()
        self.enough, self.shown, self.at = enough, [], 0

    def flush(self):
        text, self.at = self.getvalue()[self.at:], len(self.getvalue())
        if text:
            self.shown.append(text)
        if len(self.shown) == self.enough:
            raise KeyboardInterrupt


def test_text_appears_as_it_is_made_and_ctrl_c_leaves_one_line(ckpt, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", screen := Screen(9))
    with pytest.raises(SystemExit) as e:
        main(["--ckpt", ckpt, "--start=head", "--max_new_tokens=10000000"])  # which would take hours
    assert e.value.code == 130 and capsys.readouterr().err.strip() == "sample: interrupted"
    assert screen.shown[0] == "head" and all(len(piece) == 1 for piece in screen.shown[1:9])


class Saying(nn.Module):
    """A model that says these tokens, whatever it reads."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens, self.weight = tokens, nn.Parameter(torch.zeros(1))

    def stream(self, idx, max_new_tokens, **settings):
        for t in self.tokens:
            yield torch.full((len(idx),), t)


def test_a_character_of_several_tokens_is_shown_whole():
    said = "é日😀".encode() + b"\xe6"  # the last one stays unfinished
    shown, tokenizer = [], Tokenizer("byte")
    how = SimpleNamespace(num_samples=1, max_new_tokens=99, temperature=1.0, top_k=None, top_p=None,
                          repetition_penalty=1.0, seed=1, stop=False)
    made = generate(Saying(list(said)), tokenizer, encode(tokenizer, "-", "x"), how, shown.append)
    assert [piece for piece in shown if piece] == ["é", "日", "😀", "\ufffd"]
    assert made.texts == ["é日😀\ufffd"] and made.tokens_per_s > 0


# ---- side by side ----


@pytest.mark.slow
def test_several_checkpoints_stand_side_by_side_with_the_same_seed_and_prompt(tmp_path, out, monkeypatch):
    """Three texts of 200 tokens, each out of the 200 likeliest; alone it is one of 300, out of all."""
    monkeypatch.setenv("COLUMNS", "80")
    a, b = (make_checkpoint(tmp_path / f"{name}.pt", encoding)
            for name, encoding in (("a", "byte"), ("b", "char")))

    def texts(*args):
        text = out(*args, "--start=abc", f"--json={tmp_path / 'texts.json'}")
        return text, json.loads((tmp_path / "texts.json").read_text())
    shown, (first, other, again) = texts("--ckpt", a, "--ckpt", b, "--ckpt", a)
    assert [first["ckpt"], other["ckpt"]] == [a, b] and first["prompt"] == "abc"
    assert first == {**again, "tokens_per_s": first["tokens_per_s"]}
    assert len(first["texts"]) == 3 and {len(text) for text in other["texts"]} == {200}
    alone, = texts("--ckpt", a, "--num_samples=3", "--max_new_tokens=200", "--top_k=200")[1]
    assert alone["texts"] == first["texts"]
    one, = texts("--ckpt", b)[1]
    assert [len(text) for text in one["texts"]] == [300]
    shown = blocks(shown)
    assert [*shown] == [1, 2, 3]
    for part in shown.values():
        lines = part.splitlines()
        assert [title.strip()[-4:] for title in lines[0].split(" | ")] == ["a.pt", "b.pt", "a.pt"]
        assert len(lines) > 3 and all(len(line) <= 80 for line in lines) and lines[2].count("abc") == 3


def test_columns_align_with_wide_and_control_characters_and_come_below_where_there_is_no_room():
    shown = side_by_side(["one", "two"], ["日本語" * 10 + "\x1b[2J\tx\x00", "plain\r\n" * 4], 60).splitlines()
    left = [row.split(" | ")[0] for row in shown if " | " in row]
    assert len(left) > 4 and {len(text) + sum(text.count(c) for c in "日本語") for text in left} == {28}
    assert not set("".join(shown)) & set("\x1b\x00\r\t")
    shown = side_by_side(list("abcde"), ["x" * 30] * 5, 50)
    assert max(map(len, shown.splitlines())) <= 50
    assert [part.split()[0] for part in shown.split("\n\n")] == ["a", "c", "e"]


@settings(max_examples=20)
@given(st.text("ab 日c", max_size=60))
def test_wrapping_loses_nothing_and_fits(line):
    assert "".join(wrap(line, 20)) == line and all(cell_count(row) <= 20 for row in wrap(line, 20))


# ---- switches of a trained model, and what goes wrong ----


@pytest.mark.slow
def test_switches_and_heads_by_hand_change_the_text_and_are_said(tmp_path, ckpt, capsys):
    switched = make_checkpoint(tmp_path / "s.pt", n_layer=2, unet="concat", agency=True)

    def shown(*settings, more=()):
        main(["--ckpt", switched, *more, "--start=abc", "--temperature=0", "--max_new_tokens=40",
              *(f"--set={each}" for each in settings)])
        return capsys.readouterr()
    plain, skips, gate, withdrawn, open_gate = (shown(*each).out for each in (
        [], ["unet_skips=False"], ["gate.0.1=0"], ["state.0.1=withdrawn"], ["gate.0.1=1"]))
    assert skips != plain != gate == withdrawn and open_gate == plain
    settings = "gate.0.1=0", "attn_dropout=0"
    alone, both = shown(*settings), shown(*settings, more=["--ckpt", ckpt])
    assert alone.out.startswith("abc") and "with gate.0.1=0, attn_dropout=0" in alone.err
    assert both.out.startswith("with gate.0.1=0, attn_dropout=0\n") and "s.pt, with gate" in both.err
    assert "with" not in "".join(shown(more=["--ckpt", ckpt]))


def test_withdrawn_heads_are_packed_away_before_the_first_token(tmp_path, out):
    """Same text; what is wrong in such a head reaches nothing."""
    path = make_checkpoint(tmp_path / "a.pt", agency=True)
    args = "--ckpt", path, "--start=ab", "--max_new_tokens=20", "--set=state.0.1=withdrawn"
    withdrawn = out(*args)
    assert withdrawn == out(*args, "--pack=False") != out(*args[:-1])
    state = torch.load(path)
    for part in range(3):  # the second head's rows of queries, keys and values, which overflow
        state["model"]["transformer.h.0.attn.c_attn.weight"][part * 16 + 8:part * 16 + 16] = 3e38
    torch.save(state, path)
    assert out(*args) == withdrawn
    with pytest.raises(SystemExit, match="not numbers"):
        main([*args, "--pack=False"])


def test_probabilities_that_are_no_numbers_are_one_clear_line(ckpt, capsys):
    """Of weights that are finite, and too large for logits; greedily NaN would be symbol 0 all along."""
    state = torch.load(ckpt)
    state["model"]["lm_head.weight"].fill_(3e38)
    torch.save(state, ckpt)
    for temperature in ("0", "0.8"):
        with pytest.raises(SystemExit, match="sample: the probabilities are not numbers"):
            main(["--ckpt", ckpt, "--start=abc", "--temperature", temperature])
        assert capsys.readouterr().out == "abc\n"  # so that the message has a line of its own
