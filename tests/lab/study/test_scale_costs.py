"""What scales cost beside one another."""

import json
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest

import bench
import train
from model import GPTConfig
from lab.study import costs, scale_costs

SMALL = GPTConfig(vocab_size=256, recipe="modern", n_layer=1, n_head=2, n_embd=32, block_size=64)
MODELS = {"tiny": SMALL, "long": replace(SMALL, vocab_size=8192, block_size=256)}


@pytest.fixture
def plain_of(monkeypatch):
    """Scales whose text need not be prepared."""
    config = train.TrainConfig(batch_size=4, max_iters=20, device="cpu").for_recipe("modern")
    monkeypatch.setattr(scale_costs, "plain_of", lambda name: SimpleNamespace(
        name=name, model=MODELS[name], train=config))


def test_what_is_dearer_takes_longer(plain_of, capsys, tmp_path):
    bench.main(["--scales=tiny,long", "--rounds=3", "--threads=1", f"--json={tmp_path / 'costs.json'}"])
    first, head, _, long, path = capsys.readouterr().out.splitlines()
    assert first.startswith("torch ") and ", 1 thread of " in first
    assert "a step over tiny's" in head and path.endswith("costs.json")
    assert long.startswith("long") and float(long.split()[2]) > 2 < float(long.split()[5])
    found = json.loads((tmp_path / "costs.json").read_text())
    row = found["rows"][1]
    assert row["name"] == "long" and found["finished"]
    assert f"{statistics.median(row['step_ratios']):.2f}" == long.split()[2]


def test_tokens_are_compared_and_not_batches(plain_of, monkeypatch):
    """A batch is as long as a context where that is longer."""
    monkeypatch.setattr(scale_costs, "SCORED", 64)
    monkeypatch.setattr(costs, "timed", lambda action, device, clock: action.tokens)
    monkeypatch.setattr(costs, "step_time_ratios", lambda variants, *_: {
        each.name: dict(ms=1.0, ratios=[1.0]) for each in variants})

    def scorer(variant, device):
        def score_text():
            """Takes as long as it has tokens."""
        score_text.tokens = scale_costs.tokens_of(variant)
        return score_text
    monkeypatch.setattr(scale_costs, "scorer", scorer)
    row, = scale_costs.costs_of(["long"], "cpu", 1, 3, 4, train)
    assert row == ("long", 1.0, [1.0], [1.0, 1.0, 1.0])


@pytest.mark.parametrize("options, words", [
    (["--scales=huge,tiny"], "--scales: no huge; there are task, tiny"),
    (["--scales=tiny", "--task=recall"], "--scales times the plain GPTs of scales: leave out")])
def test_what_cannot_be_timed_is_one_line(options, words):
    with pytest.raises(SystemExit, match=f"^bench: {words}"):
        bench.main(options)
