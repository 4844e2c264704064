"""study/dynamic.py: figures of dynamic heads, against rows written by hand."""
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

from model import GPT, GPTConfig
from nanoheads.pruning import pack
from lab.heads.measuring import attentions, cache_bytes
from lab.study import dynamic, findings

STATES = [("active", "active"), ("active", "overloaded"), ("withdrawn", "overloaded"),
          ("active", "overloaded")]
ROWS = [dict(step=10 * i, heads=[[0, 1]], state=[list(both)], active=2) for i, both in enumerate(STATES, 1)]


def written(folder, rows, violations=()):
    folder.mkdir()
    for name, lines in (("heads.jsonl", rows), ("violations.jsonl", violations)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_occupancy_and_dwell_are_counted_by_hand(tmp_path):
    found = dynamic.history_of(written(tmp_path / "run", ROWS, [
        dict(step=10, type="forced"), dict(step=20, type="forced"), dict(step=20, type="blocked"),
        dict(step=30, type="refused to policy")]))
    assert found["occupancy"] == {"active": 4 / 8, "overloaded": 3 / 8, "withdrawn": 1 / 8}
    # head 0: active 10-30, withdrawn 30-40, active 40-40; head 1: active 10-20, overloaded 20-40
    assert found["dwell"] == pytest.approx(np.mean([20, 10, 0, 10, 20])) and found["changes"] == 3
    assert (found["forced"], found["blocked"]) == (2, 1)


def test_a_head_that_comes_late_or_goes_is_counted_while_it_is_there(tmp_path):
    rows = [dict(step=10, heads=[[0, 3]], state=[["active", "active"]], active=2),
            dict(step=20, heads=[[3]], state=[["misaligned"]], active=1)]
    found = dynamic.history_of(written(tmp_path / "run", rows))
    assert found["occupancy"] == {"active": 2 / 3, "misaligned": 1 / 3}


def test_a_stay_ends_where_the_head_was_last_seen(tmp_path):
    """Head 1 stays for 90 steps, head 0 for none: it is seen once."""
    rows = [dict(step=step, heads=[[0, 1] if step == 10 else [1]], active=1,
                 state=[["active"] * (2 if step == 10 else 1)]) for step in range(10, 101, 10)]
    assert dynamic.history_of(written(tmp_path / "run", rows))["dwell"] == 45
    for row in rows[5:]:  # another head takes the number: 10-10 and 60-100 beside 10-100
        row.update(heads=[[0, 1]], state=[["active"] * 2])
    found = dynamic.history_of(written(tmp_path / "back", rows))
    assert found["dwell"] == pytest.approx((0 + 40 + 90) / 3) and found["changes"] == 0


def test_a_plain_run_has_no_history(tmp_path):
    (tmp_path / "plain").mkdir()
    found = dynamic.history_of(tmp_path / "plain")
    assert found["occupancy"] == {} and found["dwell"] is None and found["forced"] == 0


def test_flops_of_a_run_whose_heads_went(tmp_path):
    """A row has the heads after what was done at its step: here 15 steps with four heads, 25 with two."""
    flags = dict(n_layer=1, n_head=4, n_embd=32, block_size=16, vocab_size=19, recipe="modern")
    config, small = GPTConfig(**flags), GPTConfig(**flags, head_ids=[[0, 1]])
    rows = [dict(step=5, heads=[[0, 1, 2, 3]]), dict(step=15, heads=[[0, 1]]), dict(step=35, heads=[[0, 1]])]
    folder = written(tmp_path / "run", rows)
    (folder / "log.jsonl").write_text(json.dumps(dict(step=40, tokens=4000)) + "\n")
    counts = [GPT(c).flops_per_token() for c in (config, small)]
    assert counts[1] < counts[0]
    assert dynamic.flops_of(folder, GPT(small)) == pytest.approx(1500 * counts[0] + 2500 * counts[1])
    plain = written(tmp_path / "plain", [])
    (plain / "log.jsonl").write_text(json.dumps(dict(step=20, tokens=2000)) + "\n")
    assert dynamic.flops_of(plain, GPT(config)) == pytest.approx(2000 * counts[0])


def test_engagement_is_the_share_of_what_a_role_sends(bytes_data):
    from nanoheads.dataset import Dataset
    model = GPT(GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=256, recipe="modern",
                          roles=["local", "free"]))
    with torch.no_grad():
        for attn in attentions(model):
            attn.c_proj.weight.normal_()
            attn.c_proj.weight[:, 8:16] = 0  # heads 1 and 3 are free
            attn.c_proj.weight[:, 24:] = 0
    found = dynamic.engagement(model.eval(), Dataset(bytes_data))
    assert found["free"] == 0 and found["local"] == pytest.approx(2.0)
    assert dynamic.engagement(GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=256)), None) == {}


def test_the_cache_of_a_packed_model_is_smaller():
    model = GPT(GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=19, agency=True))
    whole = cache_bytes(model.eval())
    model.set_head(0, 1, state="withdrawn")
    assert cache_bytes(pack(model)) == whole * 7 / 8


def test_means_have_the_interval_of_a_t_test():
    values = [1.0, 2.0, 4.0, None, math.nan]
    mean, half = dynamic.mean_and_half(values)
    low, high = scipy_stats.t.interval(0.95, 2, np.mean(values[:3]), scipy_stats.sem(values[:3]))
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert dynamic.mean_and_half([3.0]) == [3.0, None] and dynamic.mean_and_half([None]) is None


def test_tables_show_every_figure_of_every_variant():
    one = dict(active=4, forced=1, occupancy={"active": 0.5, "withdrawn": 0.5}, engagement={"local": 1.5})
    lives = {"plain": {"1": dict(active=8, forced=0)}, "x": {"1": one, "2": {**one, "active": 6}}}
    arms = {name: SimpleNamespace(label=label, kind="variant")
            for name, label in (("plain", "plain GPT"), ("x", "x"))}
    found = SimpleNamespace(lives=lives, arms=arms)
    figures, states, roles = findings.dynamic_tables(found)
    assert figures.head[1:] == ("plain GPT", "x")
    assert ("heads at work", "8.0", "5.0 ±12.7") in figures.rows
    assert ("violations forced", "0.0", "1.0") in figures.rows
    assert ("withdrawn", "–", "0.500") in states.rows and ("local", "–", "1.500") in roles.rows
    assert findings.dynamic_tables(SimpleNamespace(lives=None, arms={})) == []
