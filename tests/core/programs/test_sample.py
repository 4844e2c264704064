"""Generation from the command line: same seed, same text; whole characters; a line for what goes wrong."""
import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sample
from model import GPT, GPTConfig
from nanoheads import dataset
from nanoheads.common import UserError
from nanoheads.sampling import cell_count, encode, generate, model_and_tokenizer, side_by_side, wrap
from helpers import ROOT
from helpers import VOCAB, make_checkpoint, meta_of
from sample import main


@pytest.fixture
def ckpt(tmp_path):
    return make_checkpoint(tmp_path / "a.pt")


@pytest.fixture
def out(capsys):
    """out(args...) -> what main() prints on stdout."""
    def call(*args):
        main(list(map(str, args)))
        return capsys.readouterr().out
    return call


def saying(monkeypatch, tokens):
    """Every model now says these tokens, the same in each row; returns the list of those said so far."""
    said = []

    def stream(self, idx, max_new_tokens, *args, **kwargs):
        for t in tokens[:max_new_tokens]:
            said.append(t)
            yield torch.full((len(idx),), t)

    monkeypatch.setattr(GPT, "stream", stream)
    return said


class Screen(io.StringIO):
    """A stdout that notes how many tokens had been said when each text came through to it, flushed."""

    def __init__(self, said):
        super().__init__()
        self.said, self.shown, self.at = said, [], 0

    def flush(self):
        text, self.at = self.getvalue()[self.at:], len(self.getvalue())
        if text:
            self.shown.append((text, len(self.said)))


def blocks(text):
    """{sample number: its text} of a several-sample output."""
    parts = re.split(r"^==== sample (\d+) ====\n", text, flags=re.M)[1:]
    return {int(n): body for n, body in zip(parts[::2], parts[1::2])}


# ---- what is generated ----

@pytest.mark.slow
def test_the_same_seed_gives_the_same_text_whatever_the_global_rng_is(ckpt, out):
    torch.manual_seed(1)
    first = out("--ckpt", ckpt, "--seed", 5, "--temperature", 1)
    torch.manual_seed(2)
    assert out("--ckpt", ckpt, "--seed", 5, "--temperature", 1) == first and len(first) > 300


@pytest.mark.slow
def test_different_seeds_give_different_texts(ckpt, out):
    assert len({out("--ckpt", ckpt, "--seed", seed) for seed in range(4)}) == 4


@pytest.mark.slow
def test_temperature_zero_is_deterministic_whatever_the_seed(ckpt, out):
    assert len({out("--ckpt", ckpt, "--seed", seed, "--temperature", 0) for seed in range(4)}) == 1
    several = blocks(out("--ckpt", ckpt, "--temperature", 0, "--num_samples", 3))
    assert len(several) == 3 and len(set(several.values())) == 1


@pytest.mark.slow
def test_several_samples_of_one_checkpoint_differ_and_begin_with_the_prompt(ckpt, out):
    several = blocks(out("--ckpt", ckpt, "--num_samples", 4, "--start", "abba"))
    assert list(several) == [1, 2, 3, 4] and len(set(several.values())) == 4
    # as it is, unwrapped
    assert all(text.startswith("abba") and len(text) == 4 + 300 + 2 for text in several.values())


def test_more_samples_do_not_change_those_before(ckpt, out):
    args = "--ckpt", ckpt, "--start", "ab", "--temperature", 1, "--seed"
    alone = out(*args, 7)
    two, five = (blocks(out(*args, 7, "--num_samples", n)) for n in (2, 5))
    assert two[1] == alone + "\n" and [two[i].strip() for i in (1, 2)] == [five[i].strip() for i in (1, 2)]
    assert len(set(five.values())) == 5
    # nor is a sample one of the next seed's
    others = blocks(out(*args, 8, "--num_samples", 5))
    assert not {text.strip() for text in five.values()} & {text.strip() for text in others.values()}


def test_the_text_is_the_models_own_continuation(ckpt, out):
    model, tokenizer = model_and_tokenizer(ckpt, "cpu")
    idx = torch.tensor([tokenizer.encode("head").tolist()])
    want = model.generate(idx, 40, temperature=0.7, top_k=5,
                          top_p=0.9, repetition_penalty=1.2, generator=torch.Generator().manual_seed(3))
    got = out("--ckpt", ckpt, "--start", "head", "--max_new_tokens",
              40, "--temperature", 0.7, "--top_k", 5, "--top_p", 0.9,
              "--repetition_penalty", 1.2, "--seed", 3)
    assert got == tokenizer.decode(want[0].tolist()) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("flag, value",
                         [("--top_k", 1), ("--top_p", 1e-9),
                          ("--repetition_penalty", 5), ("--temperature", 0.01)])
def test_each_sampling_setting_matters(ckpt, out, flag, value):
    assert out("--ckpt", ckpt, flag, value) != out("--ckpt", ckpt)


@pytest.mark.slow
def test_an_empty_prompt_begins_at_the_separator(ckpt, out, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    newline = out("--ckpt", ckpt, "--start", "\n")  # this vocabulary's separator
    empty = out("--ckpt", ckpt, "--start", "")
    from_file = out("--ckpt", ckpt, "--start", f"FILE:{tmp_path}/empty.txt")
    assert "\n" + empty == newline == "\n" + from_file


@pytest.mark.slow
def test_a_prompt_file_is_taken_as_it_is(tmp_path, out):
    path = make_checkpoint(tmp_path / "b.pt", "byte")
    (tmp_path / "p.txt").write_bytes("a\r\nprint('\\n') é\n".encode())
    assert out("--ckpt", path, "--start", f"FILE:{tmp_path}/p.txt").startswith("a\r\nprint('\\n') é\n")
    assert out("--ckpt", path, "--start", r"a\n\tb").startswith("a\n\tb")


def test_a_backslash_before_an_n_has_a_way_to_stay_one(tmp_path, out):
    path = make_checkpoint(tmp_path / "b.pt", "byte")
    assert out("--ckpt", path, "--start", r"print(\"a\\nb\")\n").startswith('print(\\"a\\nb\\")\n')
    assert out("--ckpt", path, "--start", r"\\tau and \alpha, \\ too").startswith(r"\tau and \alpha, \\ too")


def test_special_tokens_of_a_prompt_are_tokens_unless_it_says_text(tmp_path, gpt2_files, monkeypatch):
    """As in nanoGPT, whose <|endoftext|> is one token, 50256."""
    path, seen = make_checkpoint(tmp_path / "g.pt", "gpt2"), []

    def stream(self, idx, *args, **settings):
        seen.append(idx[0].tolist())
        yield torch.zeros(len(idx), dtype=torch.long)
    monkeypatch.setattr(GPT, "stream", stream)
    (tmp_path / "p.txt").write_text("<|endoftext|>")
    for more in (["<|endoftext|>"], [f"FILE:{tmp_path}/p.txt"], ["<|endoftext|>", "--special=text"]):
        main(["--ckpt", path, "--start", *more])
    text = model_and_tokenizer(path, "cpu")[1].encode("<|endoftext|>").tolist()
    assert seen == [[50256], [50256], text] and len(text) == 7


def test_a_prompt_longer_than_the_block_goes_on(ckpt, out):
    assert len(out("--ckpt", ckpt, "--start", "abcdefghij" * 5, "--max_new_tokens", 20)) == 50 + 20 + 1


def test_stop_ends_each_text_before_the_separator(ckpt, out):
    several = blocks(out("--ckpt", ckpt, "--num_samples", 5, "--start", "a", "--stop"))
    assert all("\n" not in text.rstrip("\n") for text in several.values())
    assert len(set(map(len, several.values()))) > 1
    assert out("--ckpt", ckpt, "--start", "a", "--stop").count("\n") == 1


@pytest.mark.parametrize("samples", [1, 2])
def test_padding_of_the_vocabulary_has_no_text(tmp_path, out, monkeypatch, samples):
    path = make_checkpoint(tmp_path / "p.pt", vocab_size=len(VOCAB) + 7)
    saying(monkeypatch, [2, len(VOCAB) + 3, 3])
    assert "jab\n" in out("--ckpt", path, "--start", "j", "--num_samples", samples)


# ---- streaming ----

def test_text_appears_before_generation_ends(ckpt, monkeypatch):
    said = saying(monkeypatch, [2, 3, 4])
    monkeypatch.setattr(sys, "stdout", screen := Screen(said))
    main(["--ckpt", ckpt, "--start", "j"])
    assert screen.shown == [("j", 0), ("a", 1), ("b", 2), ("c", 3), ("\n", 3)]


def test_a_character_of_several_tokens_is_streamed_whole(tmp_path, monkeypatch):
    said = saying(monkeypatch, list("é日😀".encode()) + [0xE6])  # the last one never gets its other two bytes
    monkeypatch.setattr(sys, "stdout", screen := Screen(said))
    main(["--ckpt", make_checkpoint(tmp_path / "b.pt", "byte"), "--start", "-"])
    assert screen.shown == [("-", 0), ("é", 2), ("日", 5), ("😀", 9), ("\ufffd", 10), ("\n", 10)]


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["byte", "char"])
def test_the_streamed_pieces_are_the_text(tmp_path, encoding):
    path, pieces, state = make_checkpoint(tmp_path / "b.pt", encoding), [], torch.get_rng_state()
    model, tokenizer = model_and_tokenizer(path, "cpu")
    torch.set_rng_state(state)  # making a model draws from it
    args = SimpleNamespace(num_samples=1, max_new_tokens=200, temperature=1.0,
                           top_k=None, top_p=None, repetition_penalty=1.0, seed=1, stop=False)
    model.train()
    made = generate(model, tokenizer, encode(tokenizer, "a", path), args, pieces.append)
    assert ["".join(pieces)] == made.texts and made.tokens_per_s > 0
    # generation draws nothing from it, and keeps the mode
    assert model.training and torch.equal(torch.get_rng_state(), state)


# ---- side by side ----

@pytest.mark.slow
def test_several_checkpoints_stand_side_by_side(tmp_path, out, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    paths = [make_checkpoint(tmp_path / f"{n}.pt", encoding, seed)
             for seed, (n, encoding) in enumerate([("a", "char"), ("b", "byte"), ("a2", "char")])]
    text = out(*(x for p in paths for x in ("--ckpt", p)), "--start",
               "abc", "--max_new_tokens", 100, "--num_samples", 2)
    for part in blocks(text).values():
        lines = part.rstrip().splitlines()
        assert [c.strip()[-4:] for c in lines[0].split(" | ")] == ["a.pt", "b.pt", "2.pt"]
        assert len(lines) > 3 and all(len(line) <= 80 for line in lines) and lines[2].count("abc") == 3


def test_each_checkpoint_gets_the_same_seed_and_prompt(ckpt, out):
    rows = out("--ckpt", ckpt, "--ckpt", ckpt, "--max_new_tokens", 30).rstrip().splitlines()
    pairs = [row.split(" | ") for row in rows[2:] if " | " in row]
    assert all(left.strip() == right.strip() for left, right in pairs)


def test_side_by_side_has_the_write_ups_defaults(ckpt, monkeypatch):
    """Three of 200 tokens, each out of the 200 likeliest; one checkpoint alone gets one of 300 out of all."""
    asked = []

    def check(args):
        asked.append((args.num_samples, args.max_new_tokens, args.top_k))
        raise UserError("enough")
    monkeypatch.setattr(sample, "check", check)
    for argv in (["--ckpt", ckpt], ["--ckpt", ckpt] * 2, [*["--ckpt", ckpt] * 2, "--top_k", "5"],
                 [*["--ckpt", ckpt] * 2, "--max_new_tokens", "9"]):
        with pytest.raises(SystemExit, match="enough"):
            sample.main(list(map(str, argv)))
    assert asked == [(1, 300, None), (3, 200, 200), (3, 200, 5), (3, 9, 200)]


def test_columns_align_with_wide_and_control_characters():
    shown = side_by_side(["one", "two"], ["日本語" * 10 + "\x1b[2J\tx\x00", "plain\r\n" * 4], 60).splitlines()
    left = [row.split(" | ")[0] for row in shown if " | " in row]
    assert len(left) > 4 and {len(text) + sum(text.count(c) for c in "日本語") for text in left} == {28}
    assert not set("".join(shown)) & set("\x1b\x00\r\t")


def test_columns_that_find_no_room_come_below():
    shown = side_by_side(list("abcde"), ["x" * 30] * 5, 50)
    assert max(map(len, shown.splitlines())) <= 50
    assert [b.split()[0] for b in shown.split("\n\n")] == ["a", "c", "e"]


@pytest.mark.parametrize("line", ["", "a", "to be or not to be that is the question",
                                  "x" * 45, "日本 " * 9, "ab " + "c" * 30])
def test_wrapping_loses_nothing_and_fits(line):
    assert "".join(wrap(line, 20)) == line and all(cell_count(row) <= 20 for row in wrap(line, 20))


# ---- switches of a trained model ----

@pytest.fixture
def switched(tmp_path):
    return make_checkpoint(tmp_path / "s.pt", n_layer=2, unet="concat", agency=True)


@pytest.mark.slow
def test_switches_and_heads_by_hand_change_the_text(switched, out):
    args = "--ckpt", switched, "--start", "abc", "--temperature", 0
    plain = out(*args)
    without = [out(*args, "--set", setting)
               for setting in ("unet_skips=False", "gate.0.1=0", "state.0.1=withdrawn", "gate.0.1=1")]
    assert without[0] != plain != without[1] == without[2] and without[3] == plain


@pytest.mark.slow
def test_what_was_set_is_said(switched, ckpt, capsys):
    settings = "--set", "gate.0.1=0", "--set", "attn_dropout=0"
    main(["--ckpt", switched, "--ckpt", ckpt, *settings])
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == "with gate.0.1=0, attn_dropout=0"
    assert shown.err.count("s.pt, with gate.0.1=0, attn_dropout=0: ") == 1
    main(["--ckpt", switched, *settings, "--start", "abc"])  # a single text is streamed as it is
    shown = capsys.readouterr()
    assert shown.out.startswith("abc") and "with gate.0.1=0, attn_dropout=0: " in shown.err
    main(["--ckpt", switched, "--ckpt", ckpt])
    assert "with" not in "".join(capsys.readouterr())


# ---- nanoGPT's checkpoints ----

def nanogpt(path, vocab_size=len(VOCAB), **config):
    model = GPT(GPTConfig(block_size=16, vocab_size=vocab_size, n_layer=1, n_head=2, n_embd=16))
    args = {k: getattr(model.config, k)
            for k in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "dropout")}
    torch.save(dict(model=model.state_dict(), model_args=args, iter_num=3, config=config), path)
    return str(path)


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """data/toy is prepared, in a checkout of its own."""
    (tmp_path / "data/toy").mkdir(parents=True)
    (tmp_path / "data/toy/meta.json").write_text(json.dumps(meta_of("char")))
    monkeypatch.setattr(dataset, "ROOT", tmp_path)


def test_a_nanogpt_checkpoint_speaks_the_dataset_that_it_names(tmp_path, prepared, out):
    named, unnamed = nanogpt(tmp_path / "n.pt", dataset="toy"), nanogpt(tmp_path / "u.pt")
    text = out("--ckpt", named, "--start", "abc", "--max_new_tokens", 30)
    assert text.startswith("abc") and set(text) <= set(VOCAB) and len(text) == 34
    assert out("--ckpt", unnamed, "--dataset", "toy", "--start", "abc", "--max_new_tokens", 30) == text


# ---- bad input: one line ----

def test_withdrawn_heads_are_packed_away_before_the_first_token(tmp_path, out):
    """Same text; what is wrong in such a head reaches nothing."""
    path = make_checkpoint(tmp_path / "a.pt", agency=True)
    args = ["--ckpt", path, "--start", "ab", "--max_new_tokens", 20]
    withdrawn = out(*args, "--set=state.0.1=withdrawn")
    assert withdrawn == out(*args, "--set=state.0.1=withdrawn", "--pack=False") != out(*args)
    state = torch.load(path)
    for part in range(3):  # the second head's rows of queries, keys and values, which overflow
        state["model"]["transformer.h.0.attn.c_attn.weight"][part * 16 + 8:part * 16 + 16] = 3e38
    torch.save(state, tmp_path / "b.pt")
    args[1] = str(tmp_path / "b.pt")
    assert out(*args, "--set=state.0.1=withdrawn") == withdrawn
    with pytest.raises(SystemExit, match="not numbers"):
        main([*map(str, args), "--set=state.0.1=withdrawn", "--pack=False"])


def with_head(ckpt, value):
    """A checkpoint beside another one, whose head's weights are all this value; its path."""
    state, path = torch.load(ckpt, weights_only=True), Path(ckpt).with_name("damaged.pt")
    state["model"]["lm_head.weight"].fill_(value)
    torch.save(state, path)
    return str(path)


@pytest.mark.parametrize("temperature", ["0", "0.8", "1"])
def test_probabilities_that_are_no_numbers_are_one_clear_line(ckpt, capsys, temperature):
    """Of weights that are finite, and too large for logits. Greedily it was symbol 0 all along."""
    with pytest.raises(SystemExit, match="sample: the probabilities are not numbers"):
        main(["--ckpt", with_head(ckpt, 3e38), "--start", "abc", "--temperature", temperature])
    assert capsys.readouterr().out == "abc\n"  # so that the message has a line of its own


def test_no_mass_is_too_little_for_the_likeliest_token(ckpt, capsys):
    main(["--ckpt", ckpt, "--top_p", "1e-300", "--max_new_tokens", "9"])
    least = capsys.readouterr().out
    main(["--ckpt", ckpt, "--temperature", "0", "--max_new_tokens", "9"])
    assert least == capsys.readouterr().out


# ---- as a process ----

def start(*args, **more):
    return subprocess.Popen([sys.executable, ROOT / "sample.py", *map(str, args)],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 2])
def test_a_reader_that_has_enough_causes_no_traceback(ckpt, tmp_path, samples):
    p = start("--ckpt", ckpt, "--num_samples", samples, "--max_new_tokens", 3000 // samples, cwd=tmp_path)
    if samples == 1:
        assert len(p.stdout.read(20)) == 20
    p.stdout.close()
    assert p.stderr.read() == b"" and p.wait(20) == 0


@pytest.mark.slow
def test_ctrl_c_while_generating_leaves_one_line(ckpt):
    p = start("--ckpt", ckpt, "--max_new_tokens", 10 ** 6)
    assert len(p.stdout.read(20)) == 20  # long before generation ends
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=60)
    assert p.returncode == 130 and err.decode().strip() == "sample: interrupted"


@pytest.mark.slow
def test_a_terminal_that_cannot_show_a_character_gets_a_question_mark(tmp_path):
    p = start("--ckpt", make_checkpoint(tmp_path / "b.pt", "byte"), "--start", "日", "--max_new_tokens", 1,
              env={"PYTHONIOENCODING": "latin-1", "OMP_NUM_THREADS": "1"})
    text, err = p.communicate(timeout=60)
    assert p.returncode == 0 and text.startswith(b"?") and b"Traceback" not in err
