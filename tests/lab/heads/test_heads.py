"""Heads: metrics against materialised attention, closing, inserting; for every mechanism."""
import copy
import functools
import math

import numpy as np
import pytest
import torch

import helpers
from model import ALL_ON, GPT, MECHANISMS, GPTConfig
from nanoheads.common import UserError
from nanoheads.config import TrainConfig
from nanoheads.dataset import Dataset
from nanoheads.optim import make_optimizers
from nanoheads.pruning import prune_heads
from nanoheads.tasks import TaskData
from lab.heads.measuring import all_heads, attentions, closed, fixed_text, measure, nats_on
from lab.heads.surgery import insert_heads

SIZE = dict(block_size=12, vocab_size=19, n_layer=3, n_head=4, n_embd=64, recipe="modern")
tiny = functools.partial(helpers.tiny, states=False, **SIZE)


def whole(flags, ids):
    """Heads to leave in each layer: these, or with mechanisms that join heads in pairs, pairs."""
    return [sorted({h // 2 * 2 + i for h in own for i in (0, 1)}) for own in ids] \
        if GPTConfig(**SIZE, **flags).in_pairs else ids


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


@pytest.mark.slow
@pytest.mark.parametrize("size", [{}, dict(n_head=1), dict(n_head=64), dict(n_layer=1, n_head=8)])
@pytest.mark.parametrize("ids", [None, "some"])
def test_metrics_are_those_of_a_head_at_a_time(size, ids):
    n_head, n_layer = size.get("n_head", 4), size.get("n_layer", 3)
    if size.get("n_head") == 64:  # RoPE wants an even head size
        size = {**size, "pos": "learned"}
    ids = ids and [list(range(0, n_head, 2))] * n_layer
    model = tiny(head_ids=ids, **size)
    got, want = measure(model, X, Y), slow_metrics(model, X, Y)
    for name, values in want.items():
        for mine, reference in zip(got[name], values):
            assert np.allclose(mine.numpy(), reference, rtol=1e-6, atol=1e-9), name
    assert all((gate == 1).all() for gate in got["gate"])


@pytest.mark.parametrize("gate", ["output", "score"])
def test_a_gate_on_scores_is_no_factor_on_an_output(gate):
    model = tiny(dict(constraint_names=["a"], constraint_layers=[1], constraint_gate=gate))
    assert (measure(model, X, Y)["gate"][1] == 1).tolist() == [True] * 4 + [gate == "score"]


def test_the_metrics_that_a_slip_would_give_are_others():
    """Negative controls: importance of the whole batch at once, entropy without the row's length."""
    model = tiny()
    got = measure(model, X, Y)
    for attn in attentions(model):
        attn.gate_by_hand = torch.ones(4, dtype=torch.float64, requires_grad=True)
    loss = model(X, Y).loss
    whole = torch.autograd.grad(loss, [attn.gate_by_hand for attn in attentions(model)])
    assert all((mine > batch.abs() + 1e-6).any() for mine, batch in zip(got["importance"], whole))
    entropy = model(X, traces=True).traces["blocks.0.entropy"][..., 1:].mean((0, 2))
    assert not torch.allclose(got["entropy"][0], entropy, rtol=0.1)


# ---- metrics of every mechanism ----

@pytest.mark.slow
@pytest.mark.parametrize("name", [*MECHANISMS, "all_on"])
@pytest.mark.parametrize("ids", [None, [[0, 2, 3], [], [1]]])
def test_every_mechanism_is_measured_and_its_gate_is_what_multiplies(name, ids):
    flags = ALL_ON if name == "all_on" else MECHANISMS[name]
    model = tiny(flags, head_ids=ids and whole(flags, ids))
    before = copy.deepcopy(model.state_dict())
    found = measure(model, X, Y)
    assert all(p.grad is None for p in model.parameters()) and not model.training
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())
    for metric, values in found.items():
        assert [len(v) for v in values] == [attn.n_total for attn in attentions(model)], metric
    for layer, attn in enumerate(attentions(model)):
        assert found["utilisation"][layer].sum().item() == pytest.approx(1.0) or not attn.n_total
        if not attn.n_head:
            continue
        # every gate at once, over the outputs that they multiply
        merge, attend, seen = attn.merge, attn.attend, {}

        def attending(h):
            seen["before"], stats = attend(h)
            return seen["before"], stats

        def merging(y):
            seen["after"] = y
            return merge(y)
        attn.attend, attn.merge = attending, merging
        model(X)
        del attn.attend, attn.merge
        if {"head_norm", "xsa", "head_mix", "diff", "diff_v1", "paired_heads"} & flags.keys():
            continue  # the output is rewritten too
        ratio = (seen["after"] / seen["before"]).mean((0, 2, 3))
        if model.config.constraint_mode == "published":  # whose gate is on the values
            ratio[attn.n_head:] = found["gate"][layer][attn.n_head:]
        assert torch.allclose(found["gate"][layer], ratio, rtol=1e-6, atol=1e-9), layer


def test_one_sequence_or_one_token_is_too_little_to_measure():
    for x in (X[:1], X[:, :1]):
        with pytest.raises(ValueError, match="two sequences of two tokens"):
            measure(tiny(), x, x)


def test_what_is_not_finite_raises_by_name():
    model = tiny()
    with torch.no_grad():
        attentions(model)[1].c_proj.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="of a head in block . is not finite"):
        measure(model, X, Y)


# ---- text, closing ----

def test_the_text_to_measure_on_is_fixed_and_shared_among_ranks(bytes_data):
    data = Dataset(bytes_data)
    x, y = fixed_text(data, "train", 16, 160)
    assert x.shape == y.shape == (10, 16) and torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(x, fixed_text(data, "train", 16, 160)[0])
    shares = [fixed_text(data, "train", 16, 160, rank, 2)[0] for rank in (0, 1)]
    assert torch.equal(torch.stack(shares, 1).flatten(0, 1), x)
    with pytest.raises(UserError, match="measuring heads takes"):
        fixed_text(data, "val", 1500, 16)


def test_rows_of_a_task_are_what_heads_are_measured_on():
    data = TaskData(dict(task="recall", task_levels=[1, 2, 3], task_test_levels=[1]), 12)
    x, y = fixed_text(data, "train", 99, 84)
    assert x.shape == y.shape == (7, 12) and torch.equal(x, fixed_text(data, "train", 99, 84)[0])
    assert (y != -1).sum(1).tolist() == [1, 2, 3, 1, 2, 3, 1]  # of all levels of training in turn
    shares = [fixed_text(data, "train", 99, 96, rank, 2)[0] for rank in (0, 1)]
    assert torch.equal(torch.stack(shares, 1).flatten(0, 1), fixed_text(data, "train", 99, 96)[0])
    assert not torch.equal(x, fixed_text(data, "val", 99, 84)[0])


def test_nats_are_the_loss():
    model = tiny()
    assert nats_on(model, X, Y, rows=3) == pytest.approx(model(X, Y).loss.item(), rel=1e-6)


def test_a_closed_head_sends_nothing_and_comes_back():
    model = tiny()
    plain = model(X).logits
    with closed(model, [(0, 1), (2, 3)]):
        shut = model(X).logits
    assert torch.equal(model(X).logits, plain) and not torch.allclose(shut, plain)
    pruned = copy.deepcopy(model)
    prune_heads(pruned, {0: [1], 2: [3]})
    assert torch.allclose(pruned(X).logits, shut, atol=1e-12)
    assert all_heads(pruned) == [place for place in all_heads(model) if place not in ((0, 1), (2, 3))]


# ---- inserting ----

@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", *MECHANISMS, "all_on"])
def test_inserted_heads_leave_the_logits_alone_and_learn(name):
    flags = {"plain": {}, "all_on": ALL_ON}.get(name) or MECHANISMS.get(name, {})
    flags = {**flags, "zero_init": False}  # else new heads would be silent by themselves
    pairs = GPTConfig(**{**SIZE, **flags}).in_pairs
    model = tiny(flags, head_ids=[[2, 3], [], [0, 1]] if pairs else [[1], [], [0, 2, 3]])
    model.eval()
    plain = model(X).logits
    if name in ("value_residual", "head_mix"):
        with pytest.raises(ValueError, match="cannot insert into block 0: others read what its heads hold"):
            insert_heads(model, {0: [0, 3]})
        return
    insert_heads(model, {0: [0, 1], 1: [2, 3]} if pairs else {0: [0, 3], 1: [2]}, seed=5)
    assert model.config.head_ids == ([[0, 1, 2, 3], [2, 3], [0, 1]] if pairs else [[0, 1, 3], [2], [0, 2, 3]])
    assert torch.allclose(model(X).logits, plain, atol=1e-10)
    assert GPT(model.config).double().load_state_dict(model.state_dict())
    model(X, Y).loss.backward()
    c_proj, D = attentions(model)[0].c_proj.weight, attentions(model)[0].head_size
    assert (c_proj[:, :D] == 0).all() and (c_proj.grad[:, :D] != 0).any(), "it can learn to send something"
    with torch.no_grad():  # negative control: were it to send something, the logits would be others
        c_proj[:, :D] = 0.1
    assert not torch.allclose(model(X).logits, plain, atol=1e-6)


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
    in_groups = {id(p) for optimizer in optimizers for group in optimizer.param_groups
                 for p in group["params"]}
    assert in_groups == {id(p) for p in model.parameters()}
    step()


def test_grown_and_pruned_again_is_what_it_was():
    model = tiny(ALL_ON, head_ids=[[0, 2]] * 3)
    before = copy.deepcopy(model.state_dict())
    insert_heads(model, {0: [1, 3]})
    prune_heads(model, {0: [1, 3]})
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())


@pytest.mark.parametrize("heads, words", [
    ({0: [0]}, "free are 1, 3"), ({0: [4]}, "free are 1, 3"),
    ({3: [1]}, "cannot insert into block 3"), ({1: [0]}, "free are none")])
def test_a_number_that_is_taken_or_not_there_is_refused(heads, words):
    with pytest.raises(ValueError, match=words):
        insert_heads(tiny(head_ids=[[0, 2], [0, 1, 2, 3], [0]]), heads)
