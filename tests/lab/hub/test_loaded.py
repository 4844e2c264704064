"""Dynamic heads in models of transformers: measured as in our GPT, moved, logged, gone on with."""

import json

import pytest
import torch
from torch.nn import functional as F

from nanoheads import checkpoint
from nanoheads.common import UserError
from lab.heads.loaded import DynamicHeads, measure_heads
from lab.heads.measuring import METRICS, measure
from lab.heads.states import states_of
from lab.hub.dropin import FAMILIES, Control, gates_of, insert, places
from test_dropin import V, hf, scatter  # noqa: F401 (hf is a fixture)
from test_inserted import TOGETHER, logits, ours, tiny

TEXT = torch.randint(3, V, (400,), generator=torch.Generator().manual_seed(0))
ROWS = TEXT[:4 * 13].view(4, 13)
OFTEN = dict(block_size=8, controller_interval=2, controller_tokens=64, controller_heldout=64,
             controller_warmup=1, controller_patience=2)


def dynamic(model, folder, **keys):
    folder.mkdir(exist_ok=True)
    return DynamicHeads(Control(model), TEXT[:200], TEXT[200:], folder, **{**OFTEN, **keys})


def rows_of(folder):
    return [json.loads(line) for line in (folder / "heads.jsonl").read_text().splitlines()]


def trained(model, heads, steps, first=1, optimizer=None):
    """Steps of AdamW on a little text, the heads measured and moved between them; the optimizer."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(first, first + steps):
        model.train()(ROWS, labels=ROWS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        heads.step(step)
    return optimizer


# ---- measured ----

@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3"])
def test_the_metrics_are_those_of_our_gpt_with_the_same_weights(hf, kind, tmp_path):  # noqa: F811
    """Of all gates together, of a head in a state, and of constraint heads; frozen or not."""
    model = tiny(hf, kind, torch.float32)
    model.save_pretrained(tmp_path)
    insert(model, **TOGETHER, sentinel="hard_concrete")
    scatter(model, 0.3, only="nanoheads")
    for at, state in (((0, 1), "overloaded"), ((2, 1), "withdrawn"), ((3, 0), "misaligned")):
        Control(model).set_head(*at, state=state)
    here = ours(model, checkpoint.read(tmp_path), tmp_path)
    want = measure(here, ROWS[:, :-1], ROWS[:, 1:])
    for frozen in (False, True):
        got = measure_heads(Control(model.requires_grad_(not frozen)), ROWS)
        assert got.keys() == METRICS.keys()
        for name, layers in want.items():
            for mine, theirs in zip(got[name], layers, strict=True):
                assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("kind", FAMILIES)
def test_rows_and_columns_of_a_head_are_its_own_in_every_family(hf, kind):  # noqa: F811
    """A withdrawn head has no gradient, and those of all heads together are those of the projections."""
    more = {} if kind in ("gpt2", "gpt_neo", "gpt_neox") else dict(num_key_value_heads=4)
    model = insert(tiny(hf, kind, torch.float32, **more), "agency").eval()
    Control(model).set_head(1, 2, state="withdrawn")
    before = logits(model, ROWS)
    found = measure_heads(Control(model), ROWS)
    assert torch.equal(logits(model, ROWS), before)
    for gates in gates_of(model).values():
        assert not gates.wants_traces and gates.traces.keys() == {"n_keys"}  # no graph is kept
    assert [g == 0 for g in found["gradient"][1]] == [False, False, True, False]
    assert all(((0 < e) & (e <= 1)).all() for e in found["entropy"])
    F.cross_entropy(model(ROWS[:, :-1]).logits.flatten(0, 1), ROWS[:, 1:].flatten()).backward()
    for place, gradient in zip(places(model), found["gradient"]):
        into = [p for name, p in place.attn.named_parameters()
                if p.dim() == 2 and "nanoheads" not in name and p is not place.proj.weight]
        total = sum(p.grad.square().sum() for p in (*into, place.proj.weight))
        assert torch.allclose(gradient.square().sum().float(), total, rtol=1e-3)


# ---- moved ----

def test_rules_lower_the_gates_of_a_pretrained_model(hf, tmp_path):  # noqa: F811
    """A gate sinks where the entropy stays high: all do, with a threshold of 0."""
    model = insert(tiny(hf, "gpt2", torch.float32), "sentinel")
    before = [gates.sentinel.logit.detach().clone() for gates in gates_of(model).values()]
    heads = dynamic(model, tmp_path, controller="rules", controller_entropy=0.0)
    trained(model, heads, 3)
    assert len(rows_of(tmp_path)) == 1  # what is counted has to last
    for step in (4, 6):
        heads.step(step)
    for gates, logit in zip(gates_of(model).values(), before):
        assert (gates.sentinel.logit < logit - 0.4).all()
    assert [row["step"] for row in rows_of(tmp_path)] == [2, 4, 6]
    gate = gates_of(model)[0].static_gate()
    assert rows_of(tmp_path)[-1]["static_gate"][0] == [round(g, 5) for g in gate.tolist()]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_policy_keeps_to_its_budget_and_consent(hf, kind, tmp_path):  # noqa: F811
    model = insert(tiny(hf, kind, torch.float32), "agency")
    heads = dynamic(model, tmp_path, policy=True, policy_budget=0.5, policy_no_consent=["2.1"])
    assert states_of(Control(model))[2, 1] == "withdrawn"  # from the start
    trained(model, heads, 8)
    states = [*states_of(Control(model)).values()]
    assert states.count("withdrawn") >= 8 and states_of(Control(model))[2, 1] == "withdrawn"
    last = rows_of(tmp_path)[-1]
    assert last["active"] <= 8 and sum(last["state"], []) == states
    assert any(event["who"] == "policy" for row in rows_of(tmp_path) for event in row.get("events", ()))


@pytest.mark.parametrize("mover", ["rules", "ann", "rl"])
def test_gone_on_with_it_moves_as_if_it_had_not_stopped(hf, mover, tmp_path):  # noqa: F811
    keys = dict(controller=mover, policy=True, policy_budget=0.5)
    models = [insert(tiny(hf, "gpt2", torch.float32), "sentinel,agency") for _ in range(2)]
    whole = dynamic(models[0], tmp_path / "whole", **keys)
    trained(models[0], whole, 12)
    first = dynamic(models[1], tmp_path / "parts", **keys)
    optimizer = trained(models[1], first, 7)
    torch.save(first.state(), tmp_path / "state.pt")
    again = dynamic(models[1], tmp_path / "parts", state=torch.load(tmp_path / "state.pt"), **keys)
    trained(models[1], again, 5, 8, optimizer)
    a, b = (model.state_dict() for model in models)
    assert all(torch.equal(t, b[name]) for name, t in a.items())
    rows = [[{k: v for k, v in row.items() if k != "seconds"} for row in rows_of(tmp_path / name)]
            for name in ("whole", "parts")]
    assert rows[0] == rows[1] and len(rows[0]) == 6


def test_what_cannot_be_asked_for_is_one_clear_line(hf, tmp_path):  # noqa: F811
    plain, gated = tiny(hf, "gpt2", torch.float32), insert(tiny(hf, "gpt2", torch.float32), "acag")
    for model, keys, words in ((plain, {}, "the model has no gates: insert some"),
                               (gated, dict(prune_gate=0.1), "prune.py prunes our GPT"),
                               (gated, dict(grow_heads=1), "grow_heads changes the shapes"),
                               (gated, dict(controler="rules"), "did you mean controller?"),
                               (gated, dict(controller="rules"), "needs gates: set sentinel"),
                               (gated, dict(policy=True), "policy needs states: set agency"),
                               (gated, dict(block_size=300), "windows of 32 tokens; the text has 200"),
                               (gated, dict(controller_interval=0), "controller_interval=0")):
        with pytest.raises(UserError, match=words.replace("?", r"\?")) as e:
            dynamic(model, tmp_path, **{**keys, "controller_tokens": 10**6} if "block_size" in keys else keys)
        assert "\n" not in str(e.value)
    with pytest.raises(UserError, match="takes two sequences"):
        measure_heads(Control(gated), ROWS[:1])
