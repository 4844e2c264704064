"""A look ahead and rows that are mixed are found at the size at which a model is trained and scored."""

import copy
import re
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from model import ALL_ON, GPT, MECHANISMS, GPTConfig
from nanoheads import causality, own_mechanism as own, promises
from nanoheads.common import ROOT, UserError
from train import main

TINY = dict(vocab_size=256, block_size=128, n_layer=2, n_head=4, n_embd=64, seed=1, recipe="modern")
LEAKS = ROOT / "tests" / "leaks.py"
INNER = GPT.run_blocks


@pytest.fixture
def leaks(own_mechanisms_go):
    own.add(LEAKS)


def gpt(mechanism=None, **keys):
    """A GPT of the tiny scale, with noise on each weight."""
    flags = {**TINY, **(MECHANISMS[mechanism] if mechanism else {}), **keys}
    return causality.with_noise(GPT(GPTConfig(**flags)))


def wrong(model, dtype="float32", batch_size=16):
    return causality.leak_in(model, causality.modes_of(model, batch_size, dtype))[0]


# ---- what is refused ----

@pytest.mark.slow
@pytest.mark.parametrize("name, words", [
    ("leak_block", r"looks ahead: position 0 changes with the token at 1 \(in training, 16 rows"),
    ("leak_rows", r"row 0 of a batch changes with other rows \(in training"),
    ("leak_late", r"looks ahead: position 100 changes with the token at 101 \(in training"),
    ("leak_training", r"looks ahead: position 0 changes with the token at 1 \(in training"),
    ("leak_evaluation", r"looks ahead: position 0 changes with the token at 1 \(when evaluated, 32 rows"),
])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_leak_is_found_where_it_is(name, words, dtype, leaks):
    assert re.search(words, wrong(gpt(name), dtype))


@pytest.mark.slow
def test_a_leak_of_a_weight_that_grew_is_found_once_it_has_grown(leaks):
    model = gpt("leak_grown")
    assert wrong(model) is None
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.leaking.size.fill_(2.05)
    assert "looks ahead" in wrong(model)


@pytest.mark.slow
def test_a_leak_of_either_dtype_alone_is_found(monkeypatch):
    """A study in bfloat16 is trained in it and scored in float32."""
    for dtype in (torch.bfloat16, torch.float32):
        def run_blocks(self, *args, dtype=dtype, **wanted):
            x, found = INNER(self, *args, **wanted)
            low = torch.is_autocast_enabled("cpu")
            return (x.roll(-1, 1) if low == (dtype == torch.bfloat16) else x), found
        with monkeypatch.context() as patched:
            patched.setattr(GPT, "run_blocks", run_blocks)
            assert str(dtype).removeprefix("torch.") in wrong(gpt(), "bfloat16")


def test_noise_that_no_seed_reaches_is_named(leaks):
    with pytest.raises(UserError, match="the same tokens give other results .* must be PyTorch's"):
        wrong(gpt("leak_drawn"))


# ---- what is not ----

@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
@pytest.mark.parametrize("name", ["plain", *MECHANISMS, "all_on"])
def test_no_mechanism_of_the_repository_is_refused(name, recipe):
    """In float32 and bfloat16, with dropout where it goes, in fewer rows than a study has."""
    flags = {"plain": {}, "all_on": ALL_ON, **MECHANISMS}[name]
    config = GPTConfig(**{**TINY, "recipe": recipe, "dropout": 0.1, **flags})
    config = replace(config, dropout=0.0, attn_dropout=0.0) if config.problems() else config
    model = causality.with_noise(GPT(config))
    modes = causality.modes_of(model, 16, "bfloat16", scores=True)
    found = causality.leak_in(model, [mode._replace(rows=4) for mode in modes], step=3)
    assert found == (None, [32] * 4)


@pytest.mark.slow
def test_what_is_to_stay_stays_bit_for_bit(monkeypatch):
    """So that the tolerance, a part of the largest state, need not be near what a small leak changes."""
    monkeypatch.setattr(causality, "rounding_of", lambda *args: 0.0)
    for name in ("routing_moh", "acag", "fox", "constraint_a", "diff", "window"):
        assert wrong(gpt(name), "bfloat16", 4) is None


@pytest.mark.slow
def test_a_small_leak_is_found(monkeypatch):
    """A hundred-thousandth of the next token's state in float32, a tenth in bfloat16."""
    model = gpt()
    for dtype, size in (("float32", 1e-5), ("bfloat16", 0.1)):
        def run_blocks(self, *args, size=size, **wanted):
            x, found = INNER(self, *args, **wanted)
            return x + size * x.roll(-1, 1), found
        monkeypatch.setattr(GPT, "run_blocks", run_blocks)
        modes = [mode for mode in causality.modes_of(model, 16, dtype) if mode.dtype == dtype]
        assert "looks ahead" in causality.leak_in(model, modes)[0]


# ---- what is tried ----

def test_positions_are_all_or_those_around_powers_of_two_and_random_ones():
    def positions(T, rows):
        return causality.positions_of(T, rows, torch.Generator().manual_seed(0))
    assert positions(128, 16) == [*range(1, 128)]
    assert positions(2, 4) == [1] and positions(1, 4) == []
    few = positions(1024, 1)
    near = {2**k + d for k in range(10) for d in (-1, 0, 1)}
    assert set(few) == {p for p in near if p} | {1023}
    many = positions(1024, 16)
    assert set(few) < set(many) and len(many) == len(set(many)) == 8 * 16 and max(many) == 1023


@pytest.mark.slow
def test_a_model_and_the_generators_stay_as_they_were():
    """Buffers, gradients, mode, and what PyTorch draws next: the numbers of a run do not change."""
    model = gpt("sentinel_l0", dropout=0.1).train()
    model(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)).loss.backward()
    before = copy.deepcopy(model.state_dict())
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert wrong(model, "bfloat16", 2) is None and model.training and grads
    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(model.get_parameter(name).grad, grad) for name, grad in grads.items())


@pytest.mark.slow
def test_a_buffer_that_training_moves_is_no_leak(monkeypatch):
    """A running mean over batches, as of a batch norm, read back by the next batch."""
    model = gpt()
    model.register_buffer("mean", torch.zeros(1))

    def run_blocks(self, *args, **wanted):
        x, found = INNER(self, *args, **wanted)
        x = x + self.mean
        if self.training:
            self.mean.add_(x.detach().mean())
        return x, found
    monkeypatch.setattr(GPT, "run_blocks", run_blocks)
    assert wrong(model, batch_size=2) is None


def test_evaluation_is_tried_in_as_many_rows_as_are_scored_at_once():
    modes = causality.modes_of(gpt(), 16, "bfloat16")
    assert [(mode.training, mode.rows, mode.dtype) for mode in modes] == [
        (True, 16, "bfloat16"), (True, 16, "float32"), (False, 32, "bfloat16"), (False, 32, "float32")]


# ---- where it is asked ----

@pytest.mark.parametrize("argv, checks", [
    (["--mechanism", "xsa", "--check"], True), (["--check=True", "--mechanism=xsa"], True),
    (["--check", "true", "--mechanism=xsa"], True), (["--check=no", "--mechanism=xsa", "--help"], False)])
def test_check_is_a_key_as_all_others_are(argv, checks, monkeypatch):
    asked = []
    monkeypatch.setattr(promises, "main", lambda command: asked.append(command.names()))
    with suppress(SystemExit):  # of --help
        main(argv)
    assert asked == [{"mechanism": ["xsa"]}] * checks


@pytest.mark.slow
def test_check_finds_what_thirteen_tokens_do_not_show(own_mechanisms_go, capsys):
    with pytest.raises(SystemExit) as e:
        main(["--check", f"--mechanism={LEAKS}"])
    printed = capsys.readouterr().out
    lines = [re.split(r"  +", line.strip()) for line in printed.splitlines()[1:]]
    at_size = {name: wrong for name, recipe, _, wrong in lines if recipe == "of tiny"}
    assert "promises are broken" in str(e.value)
    for name in ("leak_block", "leak_late", "leak_rows"):
        assert {row[3] for row in lines if row[0] == name and row[1] != "of tiny"} == {"kept"}
    assert "position 100 changes with the token at 101" in at_size["leak_late"]
    assert "row 0 of a batch changes" in at_size["leak_rows"] and "looks ahead" in at_size["leak_block"]
    assert at_size["leak_grown"] == "kept"


@pytest.mark.slow
def test_check_takes_a_scale(monkeypatch, fails):
    seen = []
    monkeypatch.setattr(causality, "leak_in", lambda model, modes, step: seen.append(
        (model.config.n_embd, model.config.block_size, modes[0].rows)) or (None, []))
    for words in ((), ("--scale=nano",), ("--scale", "nano"), ("config/nano.py",), ("--n_embd", "32")):
        main(["--check", "--mechanism", "xsa", *words])
    assert seen[0] == (64, 128, 16) and seen[1][0] > 64
    assert seen[1] == seen[2] == seen[3] and seen[4] == (32, 128, 16)
    big, = fails(["--check", "--mechanism=xsa", "--scale=big"])
    assert big.startswith("command line: scale='big' is not task, tiny, nano")


def test_check_takes_details_of_the_mechanism_and_each_by_itself(monkeypatch, capsys, fails):
    seen = []
    monkeypatch.setattr(promises, "check", lambda name, flags: seen.append((name, flags)) or [])
    monkeypatch.setattr(promises, "at_size", lambda model_config, config: seen.append(model_config.acag_mode))
    main(["--check", "--mechanism=acag,acag_published", "--acag_detach", "--dropout=0.1"])
    assert seen == [("acag", dict(acag="headwise", acag_detach=True)), "normalised",
                    ("acag_published", dict(acag="headwise", acag_mode="published", acag_detach=True)),
                    "published"]
    assert fails(["--check", "--mechanism=xsa", "--acag_detach"])[0].endswith("while acag is off")
