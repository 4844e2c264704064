"""From a plain checkpoint to a model with heads: with a mechanism turned on the logits start the same."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

import train
from model import ALL_ON, GPT, MECHANISMS, NEUTRAL, GPTConfig
from nanoheads import checkpoint, neutral, start
from nanoheads.common import UserError
from nanoheads.dataset import Dataset
from nanoheads.ranks import Process
from helpers import tiny

SIZES = dict(block_size=16, vocab_size=256, n_layer=2, n_head=6, n_embd=72)
NEUTRAL_FLAGS = {"window": 16, "score_cap": 1e6}  # what has to be said for a setting to be neutral


def saved(path, flags):
    """A checkpoint of a model that is alive: no weight is zero."""
    model = tiny(flags, **SIZES).float()
    checkpoint.save(path, dict(model=model.state_dict(), config=asdict(model.config), meta=None))
    return model


def started(path, dataset, flags, anyway=False, recipe="gpt2"):
    """The model that a run with these flags over a checkpoint starts from."""
    config = GPTConfig(**{**SIZES, "recipe": recipe, **flags})
    run = train.TrainConfig(init_from=str(path), init_anyway=anyway, out_dir=str(path.parent / "run"),
                            dataset=str(dataset.dir))
    return start.model_of(start.begin(config, run, flags, Process())).eval()


@pytest.fixture
def data(bytes_data):
    return Dataset(bytes_data)


IDX = torch.randint(256, (2, 13), generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
@pytest.mark.parametrize("name", [*NEUTRAL, "all"])
def test_a_mechanism_turned_on_starts_with_the_checkpoints_logits(name, recipe, tmp_path, data):
    plain = saved(tmp_path / "plain.pt", dict(recipe=recipe))
    flags = ALL_ON if name == "all" else MECHANISMS[name]
    flags = {key: NEUTRAL_FLAGS.get(key, value) for key, value in flags.items()}
    model = started(tmp_path / "plain.pt", data, flags, recipe=recipe)
    with torch.no_grad():
        got, want = model(IDX).logits, plain(IDX).logits
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    assert all(getattr(model.config, key) == value for key, value in flags.items())
    loss = model.train()(IDX, IDX)
    sum(loss.aux.values(), loss.loss).backward()  # and it trains
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in MECHANISMS if n not in NEUTRAL or n.startswith("window")])
def test_one_without_a_neutral_setting_is_refused_by_name(name, tmp_path, data):
    plain, flags = saved(tmp_path / "plain.pt", {}), MECHANISMS[name]
    with pytest.raises(UserError) as e:
        started(tmp_path / "plain.pt", data, flags)
    said = str(e.value)
    assert "\n" not in said and "--init_anyway" in said
    assert f"{next(iter(flags))}=" in said and ("window=16" in said) == name.startswith("window")
    if name in ("constraint_b", "a2c_published"):  # whose projections have other shapes
        with pytest.raises(UserError, match=next(iter(flags))):
            started(tmp_path / "plain.pt", data, flags, anyway=True)
    else:
        model = started(tmp_path / "plain.pt", data, flags, anyway=True).train()
        with torch.no_grad():
            assert not torch.allclose(model(IDX).logits, plain(IDX).logits, atol=1e-3)


def test_a_flag_that_was_given_is_not_overruled(tmp_path, data):
    saved(tmp_path / "plain.pt", {})
    assert started(tmp_path / "plain.pt", data, dict(routing="moh")).config.routing_top_k == 6
    for flags, needed in ((dict(routing="moh", routing_top_k=3), "routing_top_k=6"),
                          (dict(window=4), "window=16")):
        with pytest.raises(UserError, match=needed):
            started(tmp_path / "plain.pt", data, flags)


@pytest.mark.parametrize("name", ["window", "window_global_random"])
def test_a_window_over_a_checkpoint_follows_its_context(name, tmp_path, data):
    """window=0 is a quarter of the checkpoint's block_size, not of the default's."""
    saved(tmp_path / "plain.pt", {})
    config = GPTConfig(**MECHANISMS[name])  # of which nothing else is known, as at the command line
    assert config.window == 256
    run = train.TrainConfig(init_from=str(tmp_path / "plain.pt"), init_anyway=True,
                            out_dir=str(tmp_path / "run"), dataset=str(data.dir))
    model = start.model_of(start.begin(config, run, MECHANISMS[name], Process()))
    assert (model.config.block_size, model.config.window, model.mask.window) == (16, 4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [dict(sentinel="sigmoid"), dict(sentinel="sigmoid", sentinel_init=-1.0),
                                   dict(sentinel="hard_concrete", sentinel_init=0.5)], ids=str)
def test_gates_over_a_checkpoint_can_learn(flags, tmp_path, data):
    """Gates at 1 sharp would have no slope: the projection behind them makes up for where they start."""
    plain = saved(tmp_path / "plain.pt", dict(constraint_names=["a"]))
    model = started(tmp_path / "plain.pt", data, flags)
    with torch.no_grad():
        assert torch.allclose(model(IDX).logits, plain(IDX).logits, atol=1e-4)
    attn = model.transformer.h[1].attn
    assert (attn.sentinel.logit == flags.get("sentinel_init", 3.0)).all() and len(attn.sentinel.logit) == 7
    model(IDX, IDX).loss.backward()
    assert (attn.sentinel.logit.grad.abs() > 1e-8).all()


def test_a_setting_that_is_not_neutral_after_all_is_noticed(tmp_path, data, monkeypatch):
    saved(tmp_path / "plain.pt", {})
    monkeypatch.setattr(neutral, "scale_heads", lambda attn, factor: None)
    with pytest.raises(UserError, match="sentinel"):
        started(tmp_path / "plain.pt", data, dict(sentinel="sigmoid"))


def test_over_a_model_with_heads_more_can_be_turned_on(tmp_path, data):
    before = saved(tmp_path / "gated.pt", dict(output_gate="headwise"))
    model = started(tmp_path / "gated.pt", data, dict(xsa=True, sentinel="hard_concrete"))
    with torch.no_grad():
        assert torch.allclose(model(IDX).logits, before(IDX).logits, atol=1e-4)
    with pytest.raises(UserError, match="output_gate='elementwise'"):
        started(tmp_path / "gated.pt", data, dict(xsa=True, output_gate="elementwise"))


def test_nanogpts_checkpoint_gets_heads(tmp_path, data):
    sizes = dict(n_layer=2, n_head=2, n_embd=8, block_size=32, vocab_size=300, bias=True, dropout=0.0)
    theirs = GPT(GPTConfig(**sizes)).eval()
    weights = {f"_orig_mod.{k}": v for k, v in theirs.state_dict().items()}
    torch.save(dict(model=weights, model_args=sizes, iter_num=5, config=dict(dataset="x")),
               tmp_path / "theirs.pt")
    model = started(tmp_path / "theirs.pt", data, dict(agency=True, unet="concat"))
    with torch.no_grad():
        assert torch.allclose(model(IDX).logits, theirs(IDX).logits, atol=1e-5)


@pytest.mark.slow
def test_a_run_over_a_checkpoint_trains_and_goes_on(bytes_data, tmp_path, capsys):
    """As at the command line; the second call resumes with the very same flags."""
    common = [f"--dataset={bytes_data}", "--device=cpu", "--batch_size=4", "--eval_tokens=256",
              "--eval_interval=3"]
    sizes = [f"--{key}={value}" for key, value in {**SIZES, "n_layer": 1}.items()]
    train.main([*common, *sizes, "--max_iters=3", f"--out_dir={tmp_path}/plain"])
    over = [*common, f"--init_from={tmp_path}/plain", "--sentinel=sigmoid", f"--out_dir={tmp_path}/gates"]
    train.main([*over, "--max_iters=3"])
    train.main([*over, "--max_iters=6", "--resume"])
    state = checkpoint.read(tmp_path / "gates/ckpt.pt")
    assert state["step"] == 6 and state["config"]["sentinel"] == "sigmoid"
    assert state["config"]["sentinel_init"] == 3.0
    refused = [f"--init_from={tmp_path}/plain", "--routing=published", f"--out_dir={tmp_path}/x"]
    with pytest.raises(SystemExit) as e:
        train.main([*common, *refused])
    assert "routing='published'" in str(e.value) and "\n" not in str(e.value)
    assert SimpleNamespace(**state["train"]).init_anyway is False
