"""--init_from: a mechanism that is turned on over a plain checkpoint starts with the same logits."""

from dataclasses import asdict

import pytest
import torch

import train
from model import ALL_ON, GPT, MECHANISMS, NEUTRAL, GPTConfig
from nanoheads import checkpoint, start
from nanoheads.common import UserError
from nanoheads.ranks import Process
from helpers import tiny

SIZES = dict(block_size=16, vocab_size=256, n_layer=2, n_head=6, n_embd=72)
NEUTRAL_FLAGS = {"window": 16, "score_cap": 1e6}  # what has to be said for a setting to be neutral


def saved(path, flags):
    """A checkpoint of a model that is alive: no weight is zero."""
    model = tiny(flags, **SIZES).float()
    checkpoint.save(path, dict(model=model.state_dict(), config=asdict(model.config), meta=None))
    return model


@pytest.fixture
def started(tmp_path, bytes_data):
    """started(checkpoint, flags) -> the model that a run with these flags over a checkpoint starts from."""
    def begin(path, flags, anyway=False, sizes=SIZES, recipe="gpt2"):
        run = train.TrainConfig(init_from=str(tmp_path / path), init_anyway=anyway, dataset=str(bytes_data),
                                out_dir=str(tmp_path / "run"))
        config = GPTConfig(**{**sizes, "recipe": recipe, **flags})
        return start.model_of(start.begin(config, run, flags, Process())).eval()
    return begin


IDX = torch.randint(256, (2, 13), generator=torch.Generator().manual_seed(1))


def logits(model):
    with torch.no_grad():
        return model(IDX).logits


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
def test_a_mechanism_turned_on_starts_with_the_checkpoints_logits(recipe, tmp_path, started):
    want = logits(saved(tmp_path / "plain.pt", dict(recipe=recipe)))
    for name in [*NEUTRAL][recipe == "modern"::2] + ["all"]:
        flags = ALL_ON if name == "all" else MECHANISMS[name]
        flags = {key: NEUTRAL_FLAGS.get(key, value) for key, value in flags.items()}
        model = started("plain.pt", flags, recipe=recipe)
        assert (logits(model) - want).abs().max() <= 1e-5 * want.abs().max(), name
        assert all(getattr(model.config, key) == value for key, value in flags.items()), name
        loss = model.train()(IDX, IDX)
        sum(loss.aux.values(), loss.loss).backward()  # and it trains
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()), name


@pytest.mark.slow
def test_one_without_a_neutral_setting_is_refused_by_name(tmp_path, started):
    plain = logits(saved(tmp_path / "plain.pt", {}))
    for name in [n for n in MECHANISMS if n not in NEUTRAL or n.startswith("window")]:
        flags = MECHANISMS[name]
        with pytest.raises(UserError) as e:
            started("plain.pt", flags)
        said = str(e.value)
        assert "\n" not in said and "--init_anyway" in said and f"{next(iter(flags))}=" in said
        assert ("window=16" in said) == name.startswith("window")
        if name in ("constraint_b", "a2c_published"):  # whose projections have other shapes
            with pytest.raises(UserError, match=next(iter(flags))):
                started("plain.pt", flags, anyway=True)
        else:
            model = started("plain.pt", flags, anyway=True).train()
            assert not torch.allclose(logits(model), plain, atol=1e-3), name


def test_a_flag_that_was_given_is_not_overruled(tmp_path, started):
    saved(tmp_path / "plain.pt", {})
    assert started("plain.pt", dict(routing="moh")).config.routing_top_k == 6
    for flags, needed in ((dict(routing="moh", routing_top_k=3), "routing_top_k=6"),
                          (dict(window=4), "window=16")):
        with pytest.raises(UserError, match=needed):
            started("plain.pt", flags)


def test_a_window_over_a_checkpoint_follows_its_context(tmp_path, started):
    """window=0 is a quarter of the checkpoint's block_size, not of the default's."""
    saved(tmp_path / "plain.pt", {})
    for name in ("window", "window_global_random"):
        model = started("plain.pt", MECHANISMS[name], anyway=True, sizes={})
        assert (model.config.block_size, model.config.window) == (16, 4)


@pytest.mark.parametrize("flags", [dict(sentinel="sigmoid"),
                                   dict(sentinel="hard_concrete", sentinel_init=0.5)], ids=str)
def test_gates_over_a_checkpoint_can_learn(flags, tmp_path, started):
    """Gates at 1 sharp would have no slope: the projection behind them makes up for where they start."""
    plain = saved(tmp_path / "plain.pt", dict(constraint_names=["a"]))
    model = started("plain.pt", flags)
    assert torch.allclose(logits(model), logits(plain), atol=1e-4)
    gates = model.transformer.h[1].attn.sentinel.logit
    assert (gates == flags.get("sentinel_init", 3.0)).all() and len(gates) == 7
    model(IDX, IDX).loss.backward()
    assert (gates.grad.abs() > 1e-8).all()


def test_over_a_model_with_heads_more_can_be_turned_on(tmp_path, started):
    before = saved(tmp_path / "gated.pt", dict(output_gate="headwise"))
    model = started("gated.pt", dict(xsa=True, sentinel="hard_concrete"))
    assert torch.allclose(logits(model), logits(before), atol=1e-4)
    with pytest.raises(UserError, match="output_gate='elementwise'"):
        started("gated.pt", dict(xsa=True, output_gate="elementwise"))


def test_nanogpts_checkpoint_gets_heads(tmp_path, started):
    sizes = dict(n_layer=2, n_head=2, n_embd=8, block_size=32, vocab_size=300, bias=True, dropout=0.0)
    theirs = GPT(GPTConfig(**sizes)).eval()
    weights = {f"_orig_mod.{k}": v for k, v in theirs.state_dict().items()}
    torch.save(dict(model=weights, model_args=sizes, iter_num=5, config=dict(dataset="x")),
               tmp_path / "theirs.pt")
    model = started("theirs.pt", dict(agency=True, unet="concat"))
    assert torch.allclose(logits(model), logits(theirs), atol=1e-5)
