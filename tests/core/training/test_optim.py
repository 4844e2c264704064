"""Muon against PyTorch's own and against float64, which parameters go where, the learning-rate schedules."""

import copy
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as mp

import train
from model import GPT, HEAD_MECHANISMS, MECHANISMS, GPTConfig
from nanoheads import checkpoint
from nanoheads.common import ROOT
from nanoheads.config import TrainConfig
from nanoheads.optim import (MARGIN, OPTIMIZERS, QUINTICS, Muon, Role, lr_multiplier, make_optimizers,
                             orthogonalise, roles)
from nanoheads.pruning import prune_heads
from nanoheads.ranks import Process

SIZES = dict(vocab_size=64, n_layer=2, n_head=4, n_embd=32, block_size=16, seed=3)


def slow_orthogonalise(G):
    """The iteration as it is written in the paper, one float64 matrix at a time."""
    X = G.double() / (MARGIN * G.double().norm())
    for a, b, c in QUINTICS:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X


@pytest.mark.parametrize("shape", [(16, 16), (16, 64), (1, 5)])
@pytest.mark.parametrize("condition", [1e0, 1e3, 1e7])
def test_orthogonalise_equals_the_written_iteration(shape, condition):
    rows, cols = shape
    torch.manual_seed(0)
    u, v = torch.linalg.qr(torch.randn(3, rows, rows))[0], torch.linalg.qr(torch.randn(3, cols, rows))[0]
    G = u @ torch.diag(torch.logspace(0, -math.log10(condition), rows)) @ v.mT * 37.0
    got = orthogonalise(G, low_precision=False)
    want = torch.stack([slow_orthogonalise(g) for g in G])
    assert (got - want).norm() / want.norm() < 1e-3
    assert orthogonalise(torch.zeros(1, 4, 4), False).isfinite().all()


def test_singular_values_come_out_around_one():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(4, 32, 128), False))
    assert 0.4 < values.min() and values.max() < 1.6


@pytest.mark.slow
@pytest.mark.parametrize("low_precision", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (128, 512), (256, 1024)])
@pytest.mark.parametrize("noise", [0.0, 0.003, 0.01, 0.1])
def test_a_nearly_rank_one_update_does_not_blow_up(shape, noise, low_precision):
    """One singular value carries the whole norm, as in the first steps after a zero start.

    Rounding may lift it above 1.
    """
    torch.manual_seed(0)
    rows, cols = shape
    G = torch.randn(6, rows, 1) @ torch.randn(6, 1, cols)
    G = G / G.norm(dim=(-2, -1), keepdim=True)
    G = G + noise * torch.randn_like(G) / math.sqrt(rows * cols)
    assert torch.linalg.matrix_norm(orthogonalise(G, low_precision).float(), 2).max() < 1.8


def test_the_blow_up_is_real_without_the_margin(monkeypatch):
    """Negative control: the published quintics as they stand send a singular value of 1.004 far away."""
    monkeypatch.setattr("nanoheads.optim.MARGIN", 1 / 1.004)
    monkeypatch.setattr("nanoheads.optim.QUINTICS",
                        [(a * MARGIN, b * MARGIN**3, c * MARGIN**5) for a, b, c in QUINTICS[:3]]
                        + QUINTICS[3:])
    G = torch.outer(torch.randn(16), torch.randn(16))[None]
    assert torch.linalg.matrix_norm(orthogonalise(G, False), 2).item() > 1e6


def test_muon_agrees_with_pytorchs_muon(monkeypatch):
    """Same momentum, same scaling by the shape, same decoupled decay, once both use the same polynomial."""
    monkeypatch.setattr("nanoheads.optim.QUINTICS", [(3.4445, -4.7750, 2.0315)] * 5)
    torch.manual_seed(0)
    start = [torch.randn(24, 24), torch.randn(24, 96), torch.randn(96, 24)]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    a = Muon([(p, 1) for p in ours], lr=0.05, momentum=0.9, weight_decay=0.1)
    b = torch.optim.Muon(theirs, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True)
    for _ in range(4):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q, s in zip(ours, theirs, start):
        ours_moved, theirs_moved = p - s, q - s
        # PyTorch's runs in bfloat16: the same direction and length to its precision
        cosine = (ours_moved * theirs_moved).sum() / ours_moved.norm() / theirs_moved.norm()
        assert cosine > 0.995
        assert (ours_moved.norm() / theirs_moved.norm()).item() == pytest.approx(1.0, abs=0.03)


def test_stacked_matrices_are_orthogonalised_one_by_one():
    torch.manual_seed(0)
    parts = [torch.nn.Parameter(torch.randn(16, 16)) for _ in range(3)]
    stacked = torch.nn.Parameter(torch.cat([p.data for p in parts]))
    a, b = Muon([(p, 1) for p in parts], lr=0.1), Muon([(stacked, 3)], lr=0.1)
    whole = torch.nn.Parameter(stacked.data.clone())
    wrong = Muon([(whole, 1)], lr=0.1)  # negative control: q, k and v as one tall matrix
    for _ in range(3):
        for p in parts:
            p.grad = torch.randn(16, 16)
        stacked.grad = torch.cat([p.grad for p in parts])
        whole.grad = stacked.grad.clone()
        a.step(), b.step(), wrong.step()
    assert torch.allclose(torch.cat([p.data for p in parts]), stacked.data, atol=1e-6)
    assert not torch.allclose(whole.data, stacked.data, atol=1e-2)


def stacked(t, slices):
    """The matrices in t by rows: so many, or of heights in these proportions."""
    if isinstance(slices, int):
        return t.chunk(slices)
    unit = len(t) // sum(slices)
    return [t[unit * sum(slices[:i]):unit * sum(slices[:i + 1])] for i in range(len(slices))]


def slow_normuon(weights, gradients, slices, lr, momentum, beta2):
    """NorMuon as its paper has it (algorithm 1), a row at a time, float64: the weights after all steps.

    Its norm is that of the orthogonal matrix, as in the speedruns, not 0.2 sqrt(mn).
    """
    weights = [w.double() for w in stacked(weights, slices)]
    means, pasts = [torch.zeros_like(w) for w in weights], [[None] * len(w) for w in weights]
    for grad in gradients:
        for w, g, m, past in zip(weights, stacked(grad.double(), slices), means, pasts):
            m.copy_(momentum * m + (1 - momentum) * g)
            update = momentum * m + (1 - momentum) * g
            rows, cols = w.shape
            whole = slow_orthogonalise(update) if rows <= cols else slow_orthogonalise(update.T).T
            even = torch.zeros_like(whole)
            for i, row in enumerate(whole):
                square = sum(x * x for x in row) / cols
                past[i] = square if past[i] is None else beta2 * past[i] + (1 - beta2) * square
                even[i] = row / past[i].sqrt()
            even *= whole.norm() / even.norm()
            w -= lr * math.sqrt(max(1.0, rows / cols)) * even
    return torch.cat(weights)


@pytest.mark.slow
@pytest.mark.parametrize("shape, slices", [((12, 12), 1), ((8, 24), 1), ((24, 8), 1), ((24, 8), 3),
                                           ((24, 8), (4, 1, 1)),
                                           ((6, 1), 2), ((1, 1), 1)], ids=str)
def test_even_rows_equal_the_written_normuon(shape, slices):
    torch.manual_seed(0)
    p, beside = torch.nn.Parameter(torch.randn(shape)), torch.nn.Parameter(torch.randn(shape))
    gradients = [torch.randn(shape) * torch.logspace(0, 2, shape[0])[:, None] for _ in range(4)]
    want = slow_normuon(p.detach(), gradients, slices, lr=0.1, momentum=0.9, beta2=0.8)
    muon = Muon([(p, slices), (beside, slices)], lr=0.1, momentum=0.9, beta2=0.8)
    plain = torch.nn.Parameter(p.detach().clone())
    control = Muon([(plain, slices)], lr=0.1, momentum=0.9)
    for g in gradients:
        p.grad, beside.grad, plain.grad = g.clone(), torch.randn(shape), g.clone()
        muon.step(), control.step()
    assert torch.allclose(p.double(), want, atol=2e-4)
    if min(shape) > 1:  # negative control: without the rows made even
        assert not torch.allclose(plain.double(), want, atol=1e-2)


def test_even_rows_leave_what_has_no_gradient():
    """Rows of zeros, as of an MLP whose output projection is still zero, or of a head that is closed."""
    p = torch.nn.Parameter(torch.ones(4, 4))
    muon = Muon([(p, 1)], lr=0.1, beta2=0.9)
    for g in (torch.zeros(4, 4), torch.diag(torch.tensor([0.0, 1.0, 1.0, 1.0])), torch.eye(4)):
        before, p.grad = p.detach().clone(), g
        muon.step()
        changed = (p != before).any(1)
        assert p.isfinite().all() and not changed[0] or g[0].any()
    assert changed.all()
    moved = (p - before).norm(dim=1)
    assert moved[0] < 1.1 * moved[1]  # as it would not be if its past were one of zeros


def test_mean_squares_follow_the_rows_that_are_pruned():
    model = GPT(GPTConfig(**SIZES, recipe="modern"))
    muon, _ = optimizers = make_optimizers(model, TrainConfig().for_recipe("modern"))
    model(*torch.randint(64, (2, 2, 16))).loss.backward()
    muon.step()
    attn, before = model.transformer.h[0].attn, {}
    for name in ("c_attn", "c_proj"):
        before[name] = muon.state[getattr(attn, name).weight]["row_square"].clone()
    prune_heads(model, {0: [1]}, optimizers)
    after = {name: muon.state[getattr(attn, name).weight]["row_square"] for name in before}
    kept = [i for i in range(96) if i // 8 % 4 != 1]  # three parts of four heads of 8
    assert torch.equal(after["c_attn"], before["c_attn"][kept])
    assert torch.equal(after["c_proj"], before["c_proj"])  # its heads are its columns
    model(*torch.randint(64, (2, 2, 16))).loss.backward()
    muon.step()


# ---- which parameters go where ----

OF_BLOCKS = {"attn.c_attn": 3, "attn.c_proj": 1, "mlp.c_fc": 1, "mlp.c_proj": 1, "constraint.c_attn": 3,
             "constraint.c_proj": 1, "diff.c_q": 1}  # layers whose weights are matrices of a block


def role_by_hand(model, plain, name):
    """The Role of a parameter from its name and its module alone; plain: the names of a plain GPT's."""
    path, _, tensor = name.rpartition(".")
    module, layer = model.get_submodule(path), ".".join(path.split(".")[-2:])
    is_matrix = tensor == "weight" and layer in OF_BLOCKS
    kind, rate = "other", "adamw_lr" if name in plain else "mechanism_lr"
    if isinstance(module, torch.nn.Embedding):
        kind, rate = "embedding", "embed_lr"
    if name == "lm_head.weight":
        kind = "head"
    if is_matrix:
        kind = "matrix"
    if name.startswith("fuse."):
        rate = "skip_lr"
    decays = tensor == "weight" and isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
    stacked = OF_BLOCKS[layer] if is_matrix else None
    if is_matrix and layer == "attn.c_attn" and model.config.queries_are_keys:
        stacked = 1
    return Role(name, kind, rate, stacked, decays, name not in plain)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["plain", *MECHANISMS])
def test_roles_are_those_written_by_hand(name, tied):
    flags = dict(recipe="modern", tied=tied, bias=True, pos="learned", norm="layernorm")
    model = GPT(GPTConfig(**SIZES, **{**flags, **MECHANISMS.get(name, {})}))
    plain = {name for name, _ in GPT(GPTConfig(**SIZES, **flags)).named_parameters()}
    assert [*roles(model).values()] == [role_by_hand(model, plain, name)
                                        for name, _ in model.named_parameters()]


@pytest.mark.parametrize("recipe, n_kv_head, c_attn, c_fc", [
    ("llama", None, 3, 2), ("llama", 1, (4, 1, 1), 2), ("gpt2", 2, (2, 1, 1), 1)])
def test_grouped_heads_and_swiglu_are_stacked_by_their_heights(recipe, n_kv_head, c_attn, c_fc):
    model = GPT(GPTConfig(**SIZES, recipe=recipe, n_kv_head=n_kv_head))
    block, role_of = model.transformer.h[0], roles(model)
    assert [role_of[layer.weight].stacked for layer in (
        block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)] == [c_attn, 1, c_fc, 1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["plain", *MECHANISMS])
def test_each_parameter_is_in_one_group_at_its_rate_and_decay(name, optimizer):
    model = GPT(GPTConfig(**SIZES, recipe="modern", **MECHANISMS.get(name, {})))
    config = TrainConfig(optimizer=optimizer, muon_lr=1.0, adamw_lr=2.0, embed_lr=3.0, mechanism_lr=4.0,
                         skip_lr=5.0, weight_decay=0.1).for_recipe("modern")
    optimizers = make_optimizers(model, config)
    assert [type(each).__name__ for each in optimizers] == {
        "adamw": ["AdamW"], "muon": ["Muon", "AdamW"]}[optimizer]
    groups = [(p, each, group) for each in optimizers for group in each.param_groups for p in group["params"]]
    assert sorted(map(id, model.parameters())) == sorted(id(p) for p, *_ in groups)
    for p, each, group in groups:
        role = roles(model)[p]
        assert (type(each).__name__ == "Muon") == (optimizer == "muon" and role.kind == "matrix")
        rate = "muon_lr" if type(each).__name__ == "Muon" else role.rate
        assert group["lr"] == group["peak_lr"] == getattr(config, rate)
        assert group["weight_decay"] == (0.1 if role.decays else 0.0)
        assert group.get("slices") == (role.stacked if rate == "muon_lr" else None)


# an optimizer of one's own: a class, and a line of the table
SGD = """
import sys
import torch
from nanoheads import optim
from nanoheads.mechanism import flag

class SGD(optim.Configured, torch.optim.SGD):
    kinds, rate = ("matrix", "head"), "sgd_lr"

    class Options:
        sgd_lr: float = flag(0.1, "peak learning rate of SGD", above=0)

    @classmethod
    def make(cls, parameters, config, rank, world, compiled):
        return cls(list(parameters), config.sgd_lr, momentum=0.9)

    def moments(self, p, group):
        return dict(momentum_buffer=p.shape)

optim.OPTIMIZERS["sgd"] = SGD
import train
train.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_third_optimizer_is_a_class_and_a_line(args, rows, tmp_path):
    def run(**keys):
        command = args(**{"optimizer": "sgd", "sgd_lr": 0.3, "max_iters": 3, "log_interval": 1,
                          "schedule": "constant", "warmup_iters": 0, **keys})
        done = subprocess.run([sys.executable, "-c", SGD, *command], cwd=ROOT, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return checkpoint.read(tmp_path / "run/ckpt.pt")
    state = run()
    assert [row["sgd_lr"] for row in rows(tmp_path / "run")[0]] == [0.3] * 3
    sgd, adamw = state["optimizers"]
    model = GPT(GPTConfig(**state["config"]))
    taken = [role for role in roles(model).values() if role.kind in ("matrix", "head")]
    assert len(sgd["state"]) == len(taken)
    assert len(adamw["state"]) == len([*model.parameters()]) - len(taken)
    moved = run(resume=True, max_iters=6)["model"]
    assert all(moved[role.name].ne(state["model"][role.name]).any() for role in taken)


def test_muon_state_survives_saving():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(8, 8))
    q = torch.nn.Parameter(p.data.clone())
    a, b = Muon([(p, 1)]), Muon([(q, 1)])
    grads = [torch.randn(8, 8) for _ in range(4)]
    for g in grads[:2]:
        p.grad = g.clone()
        a.step()
    q.data.copy_(p.data)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    for g in grads[2:]:
        p.grad, q.grad = g.clone(), g.clone()
        a.step(), b.step()
    assert torch.equal(p, q)


# ---- schedules ----

def config(**kw):
    return TrainConfig(**{**dict(adamw_lr=1.0, min_lr=0.1, warmup_iters=10, max_iters=110, schedule="cosine"),
                          **kw}).for_recipe("gpt2")


def test_cosine_schedule_by_hand():
    def f(step):
        return lr_multiplier(step, config())

    assert f(0) == pytest.approx(1 / 11) and f(9) == pytest.approx(10 / 11)
    assert f(10) == pytest.approx(1.0) and f(60) == pytest.approx(0.55) and f(110) == 0.1 and f(500) == 0.1
    assert f(35) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_trapezoid_schedule_by_hand():
    def f(step):
        return lr_multiplier(step, config(schedule="trapezoid", min_lr=0.0, warmup_iters=0,
                                          max_iters=100, decay_frac=0.5))

    assert f(0) == f(49) == f(50) == 1.0
    assert f(75) == pytest.approx(0.5) and f(99) == pytest.approx(0.02) and f(100) == 0


def test_decay_may_end_before_the_training():
    assert lr_multiplier(60, config(lr_decay_iters=60)) == 0.1
    assert lr_multiplier(35, config(lr_decay_iters=60)) == pytest.approx(0.55)


# ---- one step ----

def ready(flags={}, **keys):
    """A run of train.py that can take steps."""
    model = GPT(GPTConfig(**SIZES, **{"recipe": "modern", **flags}))
    config = TrainConfig(**{"max_iters": 20, **keys}).for_recipe(model.config.recipe)
    return train.ready_to_step(model, config)


def text(rows=8, seed=1):
    ids = torch.randint(64, (rows, 17), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def test_a_copy_of_a_run_trains_the_same():
    run = ready(dtype="bfloat16", grad_accum=2)
    train.training_step(run, *text())
    other = copy.deepcopy(run)
    for each in (run, other):
        each.step = 1
        train.training_step(each, *text(seed=2))
    states = [each.model.state_dict() for each in (run, other)]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert not torch.equal(ready().model.lm_head.weight, other.model.lm_head.weight)


def test_a_frozen_weight_gets_no_gradient():
    run = ready(MECHANISMS["xsa"], dtype="bfloat16", grad_accum=2, init_from="x", freeze_trunk=True)
    train.forward_backward(run, *text())
    assert {name for name, p in run.model.named_parameters() if p.grad is not None} \
        == {f"transformer.h.{i}.attn.xsa.strength" for i in range(2)}


# ---- many graphs in one process ----

@pytest.fixture
def graphs(monkeypatch):
    """The graphs that torch.compile makes from here on; they run as they are."""
    torch._dynamo.reset()
    made, real = [], torch.compile

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward
    monkeypatch.setattr(torch, "compile", lambda f, **k: real(f, backend=backend, dynamic=k.get("dynamic")))
    yield made
    torch._dynamo.reset()


@pytest.mark.slow
def test_every_model_of_a_process_has_a_graph(graphs):
    """Beyond torch.compile's limit of 8 for one function it runs eager without a word."""
    for i, cls in enumerate(HEAD_MECHANISMS[:10]):
        train.training_step(ready(next(iter(cls.modes.values())), compile=True), *text())
        assert len(graphs) == i + 1 > 0, cls.flag
    assert len(graphs) > 8


@pytest.mark.slow
def test_a_model_that_is_pruned_again_and_again_has_a_graph_each_time(graphs):
    model = GPT(GPTConfig(**{**SIZES, "n_head": 16, "n_embd": 64}, recipe="modern"))
    config = TrainConfig(compile=True).for_recipe("modern")
    for i in range(10):
        train.training_step(train.ready_to_step(model, config), *text())
        assert len(graphs) == i + 1
        prune_heads(model, {0: [i]})


@pytest.mark.slow
def test_the_penalty_of_gates_moves_without_a_new_graph(graphs):
    run = ready(MECHANISMS["sentinel_l0"], compile=True)
    for step in range(6):
        for block in run.model.transformer.h:
            block.attn.sentinel.set_coef(0.01 * step)
        means = train.training_step(run, *text())
        chance = sum(b.attn.sentinel.penalty()["gate_l0"] for b in run.model.transformer.h).item()
        assert means["aux/gate_l0"].item() == pytest.approx(chance, rel=1e-2)
    assert len(graphs) == 1


# ---- CUDA graphs ----

def test_gradients_that_are_added_up_in_place_train_the_same(monkeypatch):
    """What a step under CUDA graphs does with them, but for the graphs."""
    found = []
    for graphed in (False, True):
        run = ready(grad_accum=2)
        if graphed:
            monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
            run.replays_graphs = True
        train.clear_gradients(run)
        held = [p.grad for p in run.model.parameters()]
        for run.step in range(3):
            train.training_step(run, *text(seed=run.step))
        kept = [p.grad is not None and p.grad is g for p, g in zip(run.model.parameters(), held)]
        assert kept == [graphed] * len(held)
        found.append(run.model.state_dict())
    assert all(torch.equal(found[0][k], found[1][k]) for k in found[0])


# ---- Muon on several ranks ----

def rank_of_muon(rank, world, port, out, gathers):
    """A process of test_ranks_share_muons_work: three steps on the same gradients."""
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    if not gathers:
        def forgotten(every, made, async_op):
            for part in every:
                part.zero_()
            every[0].copy_(made)
            return SimpleNamespace(wait=lambda: None)
        torch.distributed.all_gather = forgotten
    torch.save(three_steps(rank, world), f"{out}/{rank}.pt")
    torch.distributed.destroy_process_group()


def three_steps(rank=0, world=1):
    """Weights after three steps of Muon on five, three and one matrices of a shape."""
    torch.manual_seed(0)
    shapes = [(8, 16)] * 4 + [(16, 8), (12, 4), (6, 6), (6, 6)]
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    stacked = [3 if shape == (12, 4) else 1 for shape in shapes]
    muon = Muon(list(zip(weights, stacked)), lr=0.1, rank=rank, world=world)
    for _ in range(3):
        for p in weights:
            p.grad = torch.randn(p.shape)
        muon.step()
    return [p.detach() for p in weights]


@pytest.mark.slow
@pytest.mark.parametrize("world, gathers", [(2, True), (3, True), (2, False)])
def test_ranks_share_muons_work(world, gathers, tmp_path, free_port):
    """Negative control: without the exchange the weights are others."""
    mp.spawn(rank_of_muon, (world, free_port, str(tmp_path), gathers), nprocs=world)
    want = three_steps()
    for rank in range(world):
        got = torch.load(tmp_path / f"{rank}.pt")
        far = max((a - b).abs().max().item() for a, b in zip(got, want))
        assert far < 1e-6 if gathers else far > 1e-2


def rank_of_gradients(rank, world, port, out):
    """A process of test_gradients_are_averaged_in_buckets."""
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    params = gradients_of(rank)
    Process(rank=rank, world=world).average_gradients(params, size=10)
    torch.save([p.grad for p in params], f"{out}/{rank}.pt")
    torch.distributed.destroy_process_group()


def gradients_of(rank):
    """Parameters with gradients of this rank: large and small, of two dtypes, and one without."""
    generator = torch.Generator().manual_seed(rank)
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in
              [((3, 7), torch.float32), ((2,), torch.float32), ((), torch.float32), ((4,), torch.float64),
               ((3, 3), torch.float32)]]
    for p in params[:-1]:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return params


@pytest.mark.slow
def test_gradients_are_averaged_in_buckets(tmp_path, free_port):
    mp.spawn(rank_of_gradients, (2, free_port, str(tmp_path)), nprocs=2)
    one, two = gradients_of(0), gradients_of(1)
    for rank in range(2):
        *got, none = torch.load(tmp_path / f"{rank}.pt")
        assert none is None and len(got) == 4
        assert all(torch.allclose(g, (a.grad + b.grad) / 2) for g, a, b in zip(got, one, two))
