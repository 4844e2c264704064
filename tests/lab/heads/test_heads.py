"""Heads measured, gated, closed and inserted, with every mechanism, compared with one head at a time."""
import copy
import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings

import helpers
from helpers import small_models
from model import GPT, MECHANISMS
from nanoheads.common import UserError
from nanoheads.config import TrainConfig
from nanoheads.dataset import Dataset
from nanoheads.optim import make_optimizers
from nanoheads.pruning import joined_by, prune_heads
from nanoheads.tasks import TaskData
from lab.heads.measuring import attentions, fixed_text, measure
from lab.heads.surgery import insert_heads, is_read_by_others

SIZE = dict(block_size=12, vocab_size=19, n_layer=3, n_head=4, n_embd=64, recipe="modern")
tiny = functools.partial(helpers.tiny, states=False, **SIZE)


def tokens(*shape, seed=0):
    return torch.randint(SIZE["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


X, Y = tokens(4, 12), tokens(4, 12, seed=1)


# ---- metrics ----

def slow_metrics(model, x, y):
    """{metric: [blocks][heads]} of a plain GPT, one head, one sequence, one token at a time.

    Attention maps come from the traces (compared with materialised attention in test_mechanisms.py).
    """
    found = {name: [] for name in ("entropy", "gradient", "importance", "utilisation", "conflict")}
    halves = []
    for rows in (slice(0, len(x) // 2), slice(len(x) // 2, None)):
        model.zero_grad()
        model(x[rows], y[rows]).loss.backward()
        halves.append([(attn.c_attn.weight.grad.clone(), attn.c_proj.weight.grad.clone())
                       for attn in attentions(model)])
    maps = model(x, traces="maps").traces
    for layer, attn in enumerate(attentions(model)):
        D, H, row = attn.head_size, attn.n_head, {name: [] for name in found}
        norms = []
        for h in range(H):
            p = maps[f"blocks.{layer}.map"][:, h]
            shares = [-(r[r > 0] * r[r > 0].log()).sum().item() / math.log(t + 1)
                      for b in p for t, r in enumerate(b) if t > 0]
            row["entropy"].append(np.mean(shares))
            slopes = []
            for into, out in halves[0][layer], halves[1][layer]:
                qkv = [into[part * H * D + h * D:part * H * D + (h + 1) * D].flatten() for part in range(3)]
                slopes.append(torch.cat([*qkv, out[:, h * D:(h + 1) * D].flatten()]))
            row["gradient"].append(((slopes[0] + slopes[1]) / 2).norm().item())
            row["conflict"].append((slopes[0] @ slopes[1] / slopes[0].norm() / slopes[1].norm()).item())
            # a gate on the head: d loss / d gate = y . d loss / d y
            changes = []
            for b in range(len(x)):
                gate = torch.ones(H, dtype=torch.float64, requires_grad=True)
                attn.gate_by_hand = gate
                loss = model(x[b:b + 1], y[b:b + 1]).loss
                changes.append(torch.autograd.grad(loss, gate)[0][h].abs().item())
                attn.gate_by_hand = None
            row["importance"].append(np.mean(changes))
            seen = []
            hook = attn.c_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
            model(x)
            hook.remove()
            sent = seen[0][..., h * D:(h + 1) * D] @ attn.c_proj.weight[:, h * D:(h + 1) * D].T
            norms.append(sent.square().sum(-1).mean().sqrt().item())
        row["utilisation"] = [norm / sum(norms) for norm in norms]
        for name in found:
            found[name].append(row[name])
    return found


@pytest.mark.parametrize("size", [{}, dict(head_ids=[[0, 2], [3], [0, 1, 2]])], ids=str)
def test_metrics_are_those_of_a_head_at_a_time(size):
    model = tiny(**size)
    got, want = measure(model, X, Y), slow_metrics(model, X, Y)
    for name, values in want.items():
        for mine, reference in zip(got[name], values):
            assert np.allclose(mine.numpy(), reference, rtol=1e-6, atol=1e-9), name
    assert all((gate == 1).all() for gate in got["gate"])


def test_a_gate_is_what_multiplies_a_heads_output_and_none_is_one_on_scores():
    """The product of all of them, as the traces say, a mean over tokens."""
    model = tiny(sentinel="sigmoid", agency=True, acag="headwise", output_gate="elementwise")
    model.set_state(0, 1, state="overloaded")
    model.set_gate(2, 3, 0.5)
    traces, found = model(X, traces=True).traces, measure(model, X, Y)["gate"]
    for layer, gate in enumerate(found):
        factors = [trace for key, trace in traces.items() if key.startswith(f"blocks.{layer}.gates.")]
        assert len(factors) == 4 + (layer == 2)
        product = functools.reduce(torch.mul, [torch.ones(4, 4, 12, 16).double(), *factors])
        assert torch.allclose(gate, product.mean((0, 2, 3)), rtol=1e-6)
    for kind in ("output", "score"):
        model = tiny(constraint_names=["a"], constraint_layers=[1], constraint_gate=kind)
        assert (measure(model, X, Y)["gate"][1] == 1).tolist() == [True] * 4 + [kind == "score"]


@settings(max_examples=8)
@given(flags=small_models())
def test_every_mechanism_is_measured_and_left_as_it_was(flags):
    """Importance beside its definition: the loss's slope by a gate on the head, of each row."""
    model, x, y = helpers.tiny(flags, states=False), *torch.randint(
        37, (2, 2, 12), generator=torch.Generator().manual_seed(0))
    before = copy.deepcopy(model.state_dict())
    found, layers = measure(model, x, y), attentions(model)
    assert all(p.grad is None for p in model.parameters()) and not model.training
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())
    gates = [torch.ones(attn.n_total, dtype=torch.float64, requires_grad=True) for attn in layers]
    for attn, gate in zip(layers, gates):
        attn.gate_by_hand = gate
    slopes = [torch.autograd.grad(model(x[row:row + 1], y[row:row + 1]).loss, gates) for row in (0, 1)]
    for layer, attn in enumerate(layers):
        assert all(len(values[layer]) == attn.n_total for values in found.values())
        assert found["utilisation"][layer].sum().item() == pytest.approx(1.0)
        if not any(map(is_read_by_others, layers)):  # they read it through the gate, too
            want = (slopes[0][layer].abs() + slopes[1][layer].abs()) / 2
            assert torch.allclose(found["importance"][layer], want, rtol=1e-4, atol=1e-7)


def test_what_cannot_be_measured_is_said():
    for x in (X[:1], X[:, :1]):
        with pytest.raises(ValueError, match="two sequences of two tokens"):
            measure(tiny(), x, x)
    model = tiny()
    with torch.no_grad():
        attentions(model)[1].c_proj.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="of a head in block . is not finite"):
        measure(model, X, Y)


# ---- text, closing ----

def test_the_text_to_measure_on_is_fixed_and_shared_among_ranks(bytes_data):
    data = Dataset(bytes_data)
    task = TaskData(dict(task="recall", task_levels=[1, 2, 3], task_test_levels=[1]), 12)
    for data, T, n in ((data, 16, 160), (task, 12, 120)):
        x, y = fixed_text(data, "train", T, n)
        assert x.shape == y.shape == (10, T) and torch.equal(x, fixed_text(data, "train", T, n)[0])
        shares = [fixed_text(data, "train", T, n, rank, 2)[0] for rank in (0, 1)]
        assert torch.equal(torch.stack(shares, 1).flatten(0, 1), x)
        assert not torch.equal(x, fixed_text(data, "val", T, n)[0])
    assert (y != -1).sum(1).tolist() == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]  # all levels of training in turn
    x, y = fixed_text(Dataset(bytes_data), "train", 16, 160)
    assert torch.equal(x[:, 1:], y[:, :-1])
    with pytest.raises(UserError, match="measuring heads takes"):
        fixed_text(Dataset(bytes_data), "val", 1500, 16)


# ---- inserting ----

@settings(max_examples=12)
@given(flags=small_models())
def test_inserted_heads_leave_the_logits_alone_and_learn(flags):
    flags = {**flags, "zero_init": False}  # else new heads would be silent by themselves
    whole = helpers.tiny(flags, states=False)
    unit, n = whole.config.unit, whole.config.n_head
    assume(n > unit and not any(map(joined_by, attentions(whole))))
    ids = [list(range(unit, n))] * whole.config.n_layer
    model, new = helpers.tiny(flags, head_ids=ids, states=False), list(range(unit))
    x = torch.arange(24).view(2, 12)
    plain, before = model(x).logits, copy.deepcopy(model.state_dict())
    layer = whole.config.n_layer - 1
    if is_read_by_others(attentions(model)[layer]):
        with pytest.raises(ValueError, match=f"cannot insert into block {layer}: others read"):
            insert_heads(model, {layer: new})
        return
    insert_heads(model, {layer: new}, seed=5)
    assert model.config.head_ids == [*ids[:-1], list(range(n))]
    assert torch.allclose(model(x).logits, plain, atol=1e-10)
    assert GPT(model.config).double().load_state_dict(model.state_dict())
    model(x, x).loss.backward()
    attn = attentions(model)[layer]
    assert (attn.c_proj.weight.grad[:, :attn.head_size] != 0).any(), "it can learn to send something"
    prune_heads(model, {layer: new})
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items()), "and be gone again"


def test_moments_move_along_and_begin_at_zero():
    model = tiny(MECHANISMS["sentinel"], head_ids=[[0, 2]] * 3)
    config = TrainConfig(optimizer="muon").for_recipe("modern")
    optimizers = make_optimizers(model.train(), config)

    def step():
        model(X, Y).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    step()
    attn = attentions(model)[1]
    old = {key: t.clone() for key, t in optimizers[1].state[attn.sentinel.logit].items()}
    momentum = optimizers[0].state[attn.c_proj.weight]["momentum"].clone()
    insert_heads(model, {1: [1]}, optimizers)
    new, D = optimizers[1].state[attn.sentinel.logit], attn.head_size
    assert torch.equal(new["exp_avg"], torch.stack((old["exp_avg"][0], torch.zeros(()), old["exp_avg"][1])))
    moved = optimizers[0].state[attn.c_proj.weight]["momentum"]
    assert torch.equal(moved[:, :D], momentum[:, :D]) and (moved[:, D:2 * D] == 0).all()
    assert torch.equal(moved[:, 2 * D:], momentum[:, D:])
    step()
