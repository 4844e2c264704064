"""Constraint heads of a rounded size: as many parameters as the write-up's, and runs on file with them."""

from dataclasses import asdict

import pytest
import torch

from model import GPT, GPTConfig
from nanoheads import checkpoint
from lab.hub.layers import ConstraintAttention
from study import records
from helpers import config_of_variant_b as config_of
from helpers import ROOT


modes = pytest.mark.parametrize("mode", ["query", "published"])


def written(model, path):
    """The model's checkpoint."""
    meta = dict(name="x", encoding="byte", vocab_size=37)
    checkpoint.save(path, dict(model=model.state_dict(), config=asdict(model.config), meta=meta, step=3))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("C, H, names, heads, D", [
    (1024, 16, 3, 1, 53), (144, 4, 3, 1, 20), (96, 6, 3, 1, 10), (768, 12, 3, 1, 51), (48, 5, 2, 1, 6),
    (36, 6, 1, 1, 5), (64, 4, 3, 2, 6)])
@modes
def test_variant_b_has_as_many_parameters_as_the_write_up(C, H, names, heads, D, mode):
    E, r = names * heads, 128
    written = {"Wq, Wk, Wv": 3 * C * H * D, "of constraint heads": 3 * C * E * D, "Wo": (H + E) * D * C,
               "router": C * r + r + r * E + E, "scorers": E * (D * D + D + D + 1)}
    config = config_of((C, H, names), constraint_heads=heads, constraint_hidden=r, constraint_mode=mode)
    assert config.head_size_in(0) == D == C // (H + E)
    with torch.device("meta"):
        attn = GPT(config).transformer.h[0].attn
    assert sum(p.numel() for p in attn.parameters()) == sum(written.values())
    layer = ConstraintAttention(C, H, ["a", "b", "c"][:names], 16, variant="B", heads=heads,
                                constraint_mode=mode, **({"head_dim": 8} if C % H else {}))
    assert sum(p.numel() for p in layer.parameters()) == sum(written.values())


@pytest.mark.slow
@pytest.mark.parametrize("file, size", [("all-tiny.json.gz", 8), ("constraints-tiny.json.gz", 8)])
def test_runs_of_variant_b_on_file_are_read_with_their_rounded_size(file, size):
    """Their parameters are counted as they were."""
    study, _ = records.read(ROOT / "results" / file)
    runs = [run for run in study.runs if run.spec["model"].get("constraint_variant") == "B"]
    for run in runs:
        with torch.device("meta"):
            model = GPT(GPTConfig(**run.spec["model"]))
        assert model.transformer.h[1].attn.head_size == size
        if run.stage == "judge":
            assert model.num_params() == study.variant(run.variant).params
    assert runs
