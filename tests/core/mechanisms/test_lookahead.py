"""A mechanism that looks ahead or mixes rows is found at the size at which a model is trained and scored."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from model import ALL_ON, GPT, MECHANISMS, GPTConfig
from nanoheads import causality, own_mechanism as own, promises
from nanoheads.common import ROOT, UserError
from nanoheads.config import TrainConfig
from nanoheads.configurator import Presets, parse_command
from helpers import without_own_mechanisms
from train import main

SIZES = dict(vocab_size=256, block_size=32, n_layer=1, n_head=4, n_embd=32, seed=1, recipe="modern")
LEAKS = ROOT / "tests" / "leaks.py"


@pytest.fixture(scope="module")
def leaks():
    with without_own_mechanisms():
        own.add(LEAKS)
        yield


def gpt(mechanism=None, **keys):
    """A small GPT with noise on each weight."""
    flags = {**SIZES, **(MECHANISMS[mechanism] if mechanism else {}), **keys}
    return causality.with_noise(GPT(GPTConfig(**flags)))


def wrong(model, dtype="float32", batch_size=4):
    return causality.leak_in(model, causality.modes_of(model, batch_size, dtype))[0]


# ---- what is refused ----

@pytest.mark.parametrize("name, words", [
    ("leak_block", "looks ahead: position 3 changes with the token at 4 (in training, 4 rows"),
    ("leak_rows", "row 0 of a batch changes with other rows (in training"),
    ("leak_training", "looks ahead: position 0 changes with the token at 1 (in training"),
    ("leak_evaluation", "looks ahead: position 0 changes with the token at 1 (when evaluated, 128 rows"),
    ("leak_float32", "looks ahead: position 0 changes with the token at 1 (in training, 4 rows, float32"),
    ("leak_bfloat16", "looks ahead: position 0 changes with the token at 1 (in training, 4 rows, bfloat16"),
    ("leak_little", "rows, float32, a block of 32)")])
def test_each_leak_is_found_where_it_is(name, words, leaks):
    """A study in bfloat16 is trained in it and scored in float32: what either shows alone is found."""
    assert words in wrong(gpt(name), "bfloat16")


def test_a_leak_of_far_tokens_is_found_in_a_long_block(leaks):
    model = gpt("leak_late", block_size=112)
    assert "looks ahead: position 100 changes with the token at 101" in wrong(model, batch_size=16)


def test_a_leak_of_a_weight_that_grew_is_found_once_it_has_grown(leaks):
    model = gpt("leak_grown")
    assert wrong(model) is None
    with torch.no_grad():
        model.transformer.h[0].attn.leaking.size.fill_(2.05)
    assert "looks ahead" in wrong(model)


def test_noise_that_no_seed_reaches_is_named(leaks):
    with pytest.raises(UserError, match="the same tokens give other results .* must be PyTorch's"):
        wrong(gpt("leak_drawn"))


# ---- what is not ----

@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "all_on", "constraint_b", "routing_moh", "acag", "diff_v1", "mudd"])
def test_what_is_to_stay_stays_bit_for_bit(name):
    """In float32 and bfloat16, with dropout where it goes: so the tolerance, a part of the largest state,
    need not be near what a small leak changes.
    """
    flags = {"all_on": ALL_ON, **MECHANISMS}[name]
    config = GPTConfig(**{**SIZES, "n_layer": 2, "dropout": 0.1, **flags})
    config = replace(config, dropout=0.0, attn_dropout=0.0) if config.problems() else config
    model = causality.with_noise(GPT(config))
    for mode in causality.modes_of(model, 2, "bfloat16", scores=True):
        perturbation, positions = causality.perturbation_of(model, mode._replace(rows=2))
        batches = [[p, p] for p in positions[::3]]
        assert [*perturbation.find_ahead(batches)] == [] and perturbation.find_mixed_rows() is None
        assert perturbation.largest_difference == 0, mode


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


def test_evaluation_is_tried_in_as_many_rows_as_are_scored_at_once():
    modes = causality.modes_of(gpt(block_size=128), 16, "bfloat16")
    assert [(mode.training, mode.rows, mode.dtype) for mode in modes] == [
        (True, 16, "bfloat16"), (True, 16, "float32"), (False, 32, "bfloat16"), (False, 32, "float32")]


# ---- where it is asked ----

@pytest.mark.slow
def test_check_finds_what_thirteen_tokens_do_not_show(own_mechanisms_go, capsys, tmp_path):
    """At the size of a run of the scale tiny, where none is named; the small models keep all promises."""
    path = tmp_path / "check.json"
    with pytest.raises(SystemExit) as e:
        main(["--check", f"--mechanism={LEAKS}:leak_late", f"--json={path}"])
    found = json.loads(path.read_text())
    assert e.value.code == f"train: 1 of {len(found)} promises are broken"
    assert {row["broken"] for row in found[:-1]} == {None}
    assert {row["mechanism"] for row in found} == {"leak_late"}
    last = found[-1]
    assert (last["recipe"], last["promise"]) == ("of tiny", "causal, rows")
    assert "position 100 changes with the token at 101" in last["broken"]
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + len(found) and last["broken"] in printed[-1]


def test_check_takes_a_scale_and_details_of_each_mechanism_by_itself():
    def configs(*argv):
        return promises.configs_of(parse_command((Presets, GPTConfig, TrainConfig), [*argv]))
    scale, config, found = configs("--mechanism=acag,acag_published", "--acag_detach", "--dropout=0.1")
    assert scale == "tiny" and config.batch_size == 16
    assert {name: flags for name, (_, flags) in found.items()} == {
        "acag": dict(acag="headwise", acag_detach=True),
        "acag_published": dict(acag="headwise", acag_mode="published", acag_detach=True)}
    assert [(c.acag_mode, c.n_embd, c.block_size) for c, _ in found.values()] == [
        ("normalised", 64, 128), ("published", 64, 128)]
    nano = configs("--mechanism=xsa", "--scale=nano")
    assert nano[0] == "nano" and nano[2]["xsa"][0].n_embd > 64
    assert configs("--mechanism=xsa", "config/nano.py")[2]["xsa"][0] == nano[2]["xsa"][0]
    assert configs("--mechanism=xsa", "--n_embd=32")[2]["xsa"][0].n_embd == 32


@pytest.mark.parametrize("argv, words", [
    (["--check"], "--check: name a mechanism"),
    (["--check", "true"], "--check: name a mechanism"),
    (["--check", "--mechanism=xsa", "--n_head=3"], "n_embd=64 must be a multiple of n_head=3"),
    (["--check", "--mechanism=xsa", "--acag_detach"], "while acag is off"),
    (["--check", "--mechanism=nowhere.py"], "no mechanism file nowhere.py")], ids=" ".join)
def test_what_cannot_be_checked_is_one_line(argv, words, fails):
    line, = fails(argv)
    assert words in line
