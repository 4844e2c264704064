"""AdamW, Muon and NorMuon, compared with written-out references; which parameters each takes; the rates."""

import importlib
import math
import sys

import pytest
import torch
import torch.multiprocessing as mp

import train
from helpers import ending, forks, in_child
from model import GPT, MECHANISMS, GPTConfig, UNet
from nanoheads import checkpoint
from nanoheads.config import TrainConfig
from nanoheads.optim import MARGIN, QUINTICS, Muon, lr_multiplier, make_optimizers, orthogonalise
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
def test_orthogonalise_equals_the_written_iteration(shape):
    rows, cols = shape
    for condition in (1e0, 1e3, 1e7):
        torch.manual_seed(0)
        u, v = (torch.linalg.qr(torch.randn(3, size, rows))[0] for size in (rows, cols))
        G = u @ torch.diag(torch.logspace(0, -math.log10(condition), rows)) @ v.mT * 37.0
        got = orthogonalise(G, low_precision=False)
        want = torch.stack([slow_orthogonalise(g) for g in G])
        assert (got - want).norm() / want.norm() < 1e-3
    assert orthogonalise(torch.zeros(1, 4, 4), False).isfinite().all()
    values = torch.linalg.svdvals(orthogonalise(torch.randn(4, 32, 128), False))
    assert 0.4 < values.min() and values.max() < 1.6


@pytest.mark.parametrize("low_precision", [False, True])
def test_a_nearly_rank_one_update_does_not_blow_up(low_precision):
    """One singular value carries the whole norm, as in the first steps after a zero start.

    Rounding may lift it above 1.
    """
    torch.manual_seed(0)
    for rows, cols in ((64, 64), (128, 512)):
        for noise in (0.0, 0.003, 0.1):
            G = torch.randn(6, rows, 1) @ torch.randn(6, 1, cols)
            G = G / G.norm(dim=(-2, -1), keepdim=True)
            G = G + noise * torch.randn_like(G) / math.sqrt(rows * cols)
            assert torch.linalg.matrix_norm(orthogonalise(G, low_precision).float(), 2).max() < 1.8


def stacked(t, slices):
    """The matrices in t by rows: so many, or of heights in these proportions."""
    if isinstance(slices, int):
        return t.chunk(slices)
    unit = len(t) // sum(slices)
    return [t[unit * sum(slices[:i]):unit * sum(slices[:i + 1])] for i in range(len(slices))]


def slow_normuon(weights, gradients, slices, lr, momentum, decay, beta2):
    """NorMuon as its paper has it (algorithm 1), a row at a time, float64: the weights after all steps. With
    beta2=0 it is Muon.

    Its norm is that of the orthogonal matrix, as in the speedruns, not 0.2 sqrt(mn).
    """
    weights = [w.double() for w in stacked(weights, slices)]
    means, pasts = [torch.zeros_like(w) for w in weights], [[None] * len(w) for w in weights]
    for grad in gradients:
        for w, g, m, past in zip(weights, stacked(grad.double(), slices), means, pasts):
            m.copy_(momentum * m + (1 - momentum) * g)
            update = momentum * m + (1 - momentum) * g
            rows, cols = w.shape
            step = whole = slow_orthogonalise(update) if rows <= cols else slow_orthogonalise(update.T).T
            if beta2:
                step = torch.zeros_like(whole)
                for i, row in enumerate(whole):
                    square = sum(x * x for x in row) / cols
                    past[i] = square if past[i] is None else beta2 * past[i] + (1 - beta2) * square
                    step[i] = row / past[i].sqrt()
                step *= whole.norm() / step.norm()
            w *= 1 - lr * decay
            w -= lr * math.sqrt(max(1.0, rows / cols)) * step
    return torch.cat(weights)


@pytest.mark.parametrize("beta2", [0.0, 0.8])
@pytest.mark.parametrize("shape, slices", [((12, 12), 1), ((8, 24), 1), ((24, 8), 1), ((24, 8), 3),
                                           ((24, 8), (4, 1, 1)), ((6, 1), 2), ((1, 1), 1)], ids=str)
def test_even_rows_equal_the_written_normuon(shape, slices, beta2):
    """And Muon the written Muon, where rows are not made even."""
    torch.manual_seed(0)
    p, beside = torch.nn.Parameter(torch.randn(shape)), torch.nn.Parameter(torch.randn(shape))
    gradients = [torch.randn(shape) * torch.logspace(0, 2, shape[0])[:, None] for _ in range(4)]
    want = slow_normuon(p.detach(), gradients, slices, lr=0.1, momentum=0.9, decay=0.1, beta2=beta2)
    muon = Muon([(p, slices), (beside, slices)], lr=0.1, momentum=0.9, weight_decay=0.1, beta2=beta2)
    for g in gradients:
        p.grad, beside.grad = g.clone(), torch.randn(shape)
        muon.step()
    assert torch.allclose(p.double(), want, atol=2e-4)


def test_adamw_equals_the_written_adamw():
    model = GPT(GPTConfig(**SIZES))
    config = TrainConfig(optimizer="adamw", adamw_lr=0.01, beta1=0.8, beta2=0.9, weight_decay=0.1)
    adamw, = make_optimizers(model, config.for_recipe("gpt2"))
    names = "transformer.h.0.mlp.c_fc.weight", "transformer.ln_f.weight"
    wanted = {name: model.get_parameter(name).detach().double() for name in names}
    m, v = (dict.fromkeys(names, 0.0) for _ in range(2))
    for step in range(1, 5):
        for p in model.parameters():
            p.grad = torch.randn(p.shape)
        for name, w in wanted.items():
            g = model.get_parameter(name).grad.double()
            m[name], v[name] = 0.8 * m[name] + 0.2 * g, 0.9 * v[name] + 0.1 * g * g
            w *= 1 - 0.01 * (0.1 if w.dim() > 1 else 0.0)
            w -= 0.01 * (m[name] / (1 - 0.8 ** step)) / ((v[name] / (1 - 0.9 ** step)).sqrt() + 1e-8)
        adamw.step()
    for name, w in wanted.items():
        assert torch.allclose(model.get_parameter(name).double(), w, atol=1e-5)


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
    attn = model.transformer.h[0].attn
    rows, columns = (muon.state[layer.weight]["row_square"].clone() for layer in (attn.c_attn, attn.c_proj))
    prune_heads(model, {0: [1]}, optimizers)
    kept = [i for i in range(96) if i // 8 % 4 != 1]  # three parts of four heads of 8
    assert torch.equal(muon.state[attn.c_attn.weight]["row_square"], rows[kept])
    assert torch.equal(muon.state[attn.c_proj.weight]["row_square"], columns)  # its heads are its columns


# ---- which parameters go where ----

OF_BLOCKS = {"attn.c_attn": 3, "attn.c_proj": 1, "mlp.c_fc": 1, "mlp.c_proj": 1, "constraint.c_attn": 3,
             "constraint.c_proj": 1, "diff.c_q": 1}  # layers whose weights are matrices of a block


@pytest.mark.parametrize("optimizer, tied", [("adamw", False), ("muon", True), ("muon", False)])
def test_each_parameter_is_in_one_group_at_its_rate_and_decay(optimizer, tied):
    """Of every mechanism, as its name and its module say. Only matrices of layers decay."""
    flags = dict(recipe="modern", tied=tied, bias=True, pos="learned", norm="layernorm")
    plain = {name for name, _ in GPT(GPTConfig(**SIZES, **flags)).named_parameters()}
    config = TrainConfig(optimizer=optimizer, muon_lr=1.0, adamw_lr=2.0, embed_lr=3.0, mechanism_lr=4.0,
                         skip_lr=5.0, weight_decay=0.1).for_recipe("modern")
    for mechanism in ({}, *MECHANISMS.values()):
        model = GPT(GPTConfig(**SIZES, **{**flags, **mechanism}))
        groups = {p: (each, group) for each in make_optimizers(model, config) for group in each.param_groups
                  for p in group["params"]}
        assert len(groups) == len([*model.parameters()])
        for name, p in model.named_parameters():
            path, _, tensor = name.rpartition(".")
            module, layer = model.get_submodule(path), ".".join(path.split(".")[-2:])
            by_muon = optimizer == "muon" and tensor == "weight" and layer in OF_BLOCKS
            rate = (1.0 if by_muon else 5.0 if name.startswith("fuse.") else
                    3.0 if isinstance(module, torch.nn.Embedding) else 2.0 if name in plain else 4.0)
            decays = tensor == "weight" and isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
            stacked = 1 if layer == "attn.c_attn" and model.config.queries_are_keys else OF_BLOCKS.get(layer)
            each, group = groups[p]
            assert isinstance(each, Muon) == by_muon and group["lr"] == group["peak_lr"] == rate, name
            assert group["weight_decay"] == (0.1 if decays else 0.0), name
            assert group.get("slices") == (stacked if by_muon else None), name


def test_skips_have_the_rate_of_mechanisms_unless_they_have_their_own():
    model = GPT(GPTConfig(**SIZES, unet="concat", recipe="modern"))
    optimizers = make_optimizers(model, TrainConfig(mechanism_lr=4.0).for_recipe("modern"))
    assert {group["lr"] for each in optimizers for group in each.param_groups for p in group["params"]
            if any(p is q for q in model.fuse.parameters())} == {4.0}


@pytest.mark.parametrize("recipe, n_kv_head, c_attn, c_fc", [
    ("llama", None, 3, 2), ("llama", 1, (4, 1, 1), 2), ("gpt2", 2, (2, 1, 1), 1)])
def test_grouped_heads_and_swiglu_are_stacked_by_their_heights(recipe, n_kv_head, c_attn, c_fc):
    model = GPT(GPTConfig(**SIZES, recipe=recipe, n_kv_head=n_kv_head))
    muon, _ = make_optimizers(model, TrainConfig(optimizer="muon").for_recipe(recipe))
    slices = {p: group["slices"] for group in muon.param_groups for p in group["params"]}
    block = model.transformer.h[0]
    layers = block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj
    assert [slices[layer.weight] for layer in layers] == [c_attn, 1, c_fc, 1]


def add_sgd():
    """An optimizer of one's own, where nothing of this repository has been read: a class and a line."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("model", "nanoheads", "train")]:
        del sys.modules[name]
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


@pytest.mark.slow
@forks
def test_a_third_optimizer_is_a_class_and_a_line(args, rows, tmp_path):
    """Whose rate is a key, whose steps are logged, and whose moments a run goes on with."""
    command = args(optimizer="sgd", sgd_lr=0.3, max_iters=3, schedule="constant", warmup_iters=0)
    def begin():
        add_sgd()
        importlib.import_module("train").main(command)
    assert ending(in_child([*command, "--resume", "--max_iters=6"], begin)) == 0
    assert [row["sgd_lr"] for row in rows(tmp_path / "run")[0]] == [0.3] * 6
    sgd, adamw = checkpoint.read(tmp_path / "run/ckpt.pt")["optimizers"]
    assert len(sgd["state"]) == 4  # the matrices of a block; the head is the embedding
    assert {int(state["step"]) for state in adamw["state"].values()} == {6}


# ---- schedules ----

def config(**kw):
    return TrainConfig(**{**dict(adamw_lr=1.0, min_lr=0.1, warmup_iters=10, max_iters=110, schedule="cosine"),
                          **kw}).for_recipe("gpt2")


def test_schedules_by_hand():
    def f(step, **kw):
        return lr_multiplier(step, config(**kw))

    assert f(0) == pytest.approx(1 / 11) and f(9) == pytest.approx(10 / 11)
    assert f(10) == pytest.approx(1.0) and f(60) == pytest.approx(0.55) and f(110) == 0.1 and f(500) == 0.1
    assert f(35) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    # decay may end before the training does
    assert f(60, lr_decay_iters=60) == 0.1 and f(35, lr_decay_iters=60) == pytest.approx(0.55)
    trapezoid = dict(schedule="trapezoid", min_lr=0.0, warmup_iters=0, max_iters=100, decay_frac=0.5)
    found = [f(step, **trapezoid) for step in (0, 49, 50, 75, 99, 100)]
    assert found == pytest.approx([1, 1, 1, 0.5, 0.02, 0])


def test_a_trapezoid_falls_over_a_share_of_the_steps_to_its_end():
    trapezoid = config(schedule="trapezoid", min_lr=0.0, warmup_iters=0, lr_decay_iters=50, decay_frac=0.5)
    found = [lr_multiplier(step, trapezoid) for step in (0, 25, 30, 45, 50, 109)]
    assert found == pytest.approx([1, 1, 0.8, 0.2, 0, 0])


# ---- one step ----

def ready(flags={}, **keys):
    """A run of train.py that can take steps."""
    model = GPT(GPTConfig(**SIZES, **{"recipe": "modern", **flags}))
    config = TrainConfig(**{"max_iters": 20, **keys}).for_recipe(model.config.recipe)
    return train.ready_to_step(model, config)


def text(rows=8, seed=1):
    ids = torch.randint(64, (rows, 17), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_that_is_set_up_again_takes_the_steps_that_it_would_have_taken(optimizer):
    """As between two steps in which heads come or go: all other parameters keep their moments."""
    once, again = (ready(optimizer=optimizer, warmup_iters=0) for _ in range(2))
    for step in range(3):
        for run in (once, again):
            run.step = step
            train.training_step(run, *text(seed=step))
        train.set_up_again(again)
    for name, p in once.model.named_parameters():
        assert torch.equal(again.model.get_parameter(name), p), name


# ---- many graphs in one process ----

@pytest.fixture
def graphs(monkeypatch):
    """The graphs that torch.compile makes from here on; they run as they are, at most two of a function."""
    torch._dynamo.reset()
    made, real = [], torch.compile

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward
    monkeypatch.setattr(torch, "compile", lambda f, **k: real(f, backend=backend, dynamic=k.get("dynamic")))
    with torch._dynamo.config.patch(recompile_limit=2):
        yield made
    torch._dynamo.reset()


@pytest.mark.slow
def test_every_model_of_a_process_has_a_graph_and_a_pruned_one_another(graphs):
    """Beyond torch.compile's limit for one function, which is 8, it runs eager without a word."""
    model = GPT(GPTConfig(**{**SIZES, "n_layer": 1}))
    config = TrainConfig(compile=True).for_recipe("gpt2")
    for i in range(3):
        train.training_step(train.ready_to_step(model, config), *text())
        assert len(graphs) == i + 1
        prune_heads(model, {0: [i]})


@pytest.mark.slow
def test_what_moves_with_the_steps_makes_no_new_graph(graphs):
    """The penalty of gates, and the share of skips that begin late."""
    run = ready(MECHANISMS["sentinel_l0"] | dict(unet="add", unet_from=2, unet_ramp=3), compile=True)
    for run.step in range(6):
        for block in run.model.transformer.h:
            block.attn.sentinel.set_coef(0.01 * run.step)
        means = train.training_step(run, *text())
        chance = sum(b.attn.sentinel.penalty()["gate_l0"] for b in run.model.transformer.h).item()
        assert means["aux/gate_l0"].item() == pytest.approx(chance, rel=1e-2)
        assert run.model.fuse[0].ramp.item() == pytest.approx(UNet.share_at_step(run.model.config, run.step))
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


# ---- several ranks ----

def work_of_rank(rank, world, port, out):
    """A process of test_ranks_share_muons_work_and_average_gradients."""
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    params = gradients_of(rank)
    Process(rank=rank, world=world).average_gradients(params, size=10)
    torch.save((three_steps(rank, world), [p.grad for p in params]), f"{out}/{rank}.pt")
    torch.distributed.destroy_process_group()


def three_steps(rank=0, world=1):
    """Weights after three steps of Muon on five, three and two matrices of a shape."""
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
def test_ranks_share_muons_work_and_average_gradients(tmp_path, free_port):
    mp.start_processes(work_of_rank, (3, free_port, str(tmp_path)), nprocs=3, start_method="fork")
    weights, gradients = three_steps(), [gradients_of(rank) for rank in range(3)]
    for rank in range(3):
        found, (*averages, none) = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, weights))
        assert none is None and len(averages) == 4
        for mean, *each in zip(averages, *gradients):
            assert torch.allclose(mean, sum(p.grad for p in each) / 3)
