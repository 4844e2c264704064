"""Constraint heads in training: gates, routers, losses, a teacher, skipping, against slow references."""
import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import model as model_py
import oracle
from model import GPT, ConstraintHeads, GPTConfig, SentinelGate
from nanoheads import kernels
from nanoheads.study import fingerprint, trial
from nanoheads.text.dataset import Dataset
from nanoheads.text.targets import encode, label_file, sha256, write_meta
from nanoheads.training import checkpoint
from nanoheads.training.config import TrainConfig
from oracle import tokens
from tests.conftest import TINY
from train import main

SMALL = dict(block_size=16, vocab_size=37, n_layer=2, n_head=3, n_embd=24, constraint_names=["a", "b"],
             constraint_layers=[0, 1])


def alive(seed=0, **flags):
    """A small GPT in float64 with a signal in every path."""
    model = GPT(GPTConfig(**{**SMALL, **flags})).double().eval()
    torch.manual_seed(seed)
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.0 if p.dim() >= 2 else 1.0, 0.3 if p.dim() >= 2 else 0.1)
    return model


def read_by_blocks(model, idx, **kw):
    """[what each block's attention was given], and the Output with traces and maps."""
    read, hooks = [], []
    for block in model.transformer.h:
        hooks.append(block.attn.register_forward_pre_hook(lambda module, args: read.append(args[0])))
    out = model(idx, traces="maps", **kw)
    for hook in hooks:
        hook.remove()
    return read, out


# ---- where the router gates ----

GATED = {"score": dict(constraint_gate="score", constraint_heads=2), "value": dict(constraint_gate="value"),
         "output": dict(constraint_gate="output", constraint_heads=2),
         "published": dict(constraint_mode="published"),
         "published scorers": dict(constraint_mode="published", constraint_gate="output"),
         "first": dict(constraint_router_input="first"), "hard": dict(constraint_router="hard_concrete")}


def scores_agree(name, hinted=False):
    """Whether all of the model, scores and gates of each block, and their gradients, are the oracle's."""
    model, idx = alive(**GATED[name]), tokens(2, 9)
    hint = torch.randn(2, 24, dtype=torch.float64) if hinted else None
    read, out = read_by_blocks(model, idx, router_hint=hint)
    predictions = model.predictions(idx) if hint is None else {}
    for layer, x in enumerate(read):
        want, at = oracle.attention(model, layer, x, hint)[1], f"blocks.{layer}."
        oracle.agree([out.traces[at + "head_scores"], out.traces[at + "router_gates"].expand(2, 9, -1)],
                     [want["head_scores"], want["router_gates"]], list(model.parameters()), 1e-6)
        oracle.close(out.traces[at + "map"].double(), want["map"], 1e-5)  # float32
        if predictions:
            oracle.close(predictions[at + "constraint_y"], want["constraint_y"], 1e-9)
    oracle.equals_the_oracle(model, idx, hint)


@pytest.mark.parametrize("hinted", [False, True], ids=["", "hint"])
@pytest.mark.parametrize("name", GATED)
def test_gates_and_scores_equal_the_oracle(name, hinted):
    scores_agree(name, hinted)


@pytest.mark.parametrize("name, function, wrong", [
    ("score", "on_itself", lambda P, gates: P),
    ("published scorers", "constraint_scores", lambda p, y: y.sum(-1)),
    ("first", "constraint_gates", lambda c, p, x, hint, training: x[..., :2].sigmoid()),
])
def test_the_oracle_notices_another_gate(name, function, wrong, monkeypatch):
    monkeypatch.setattr(oracle, function, wrong)
    with pytest.raises(AssertionError):
        scores_agree(name)


@pytest.mark.parametrize("mode, gate", [("query", "output"), ("published", "value")])
def test_where_the_router_gates_follows_the_mode(mode, gate):
    assert alive(constraint_mode=mode).config.constraint_gate == gate


@pytest.mark.parametrize("gate", [0.0, 1e-8, 1e-4])
def test_a_token_that_sees_itself_alone_keeps_its_output(gate):
    """Its weight is 1 whatever the gate; in float32 what is left of it without would be rounding errors."""
    heads, generator = alive(constraint_gate="score").transformer.h[0].attn, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, 5, 3, 8, generator=generator) for _ in range(3))
    logits = (4 * q @ k.mT * heads.scale).masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf)
    h = model_py.Pass(q=4 * q, k=k, v=v, y=logits.softmax(-1) @ v, n_keys=torch.arange(1.0, 4),
                      row_stats=kernels.RowStats(logits.logsumexp(-1), None, None),
                      self_factor=torch.full((4, 2, 3, 1), gate))
    h.y, _ = heads.constraint.behind_softmax(heads, h, h.y, h.row_stats)
    assert torch.equal(h.y[:, 3:, 0], v[:, 3:, 0])
    weights = logits.double().softmax(-1) * (1 - (1 - gate) * torch.eye(3))
    want = (weights / weights.sum(-1, keepdim=True)) @ v.double()
    assert (h.y - want)[:, 3:, 1:].abs().max() < 1e-3
    assert (h.y - want)[:, :3, 1:].abs().max() > 0.1, "a control: base heads are left as they were"


def test_a_gate_on_scores_is_exact_in_bfloat16():
    """Logits of tokens with themselves are not rounded to bfloat16, whose errors the division would blow up.
    """
    heads, generator = alive(constraint_gate="score").transformer.h[0].attn, torch.Generator().manual_seed(0)
    q, v = (torch.randn(2, 5, 16, 8, generator=generator).bfloat16() for _ in range(2))
    logits = (4 * q.float() @ q.float().mT * heads.scale)
    logits = logits.masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf)
    h = model_py.Pass(q=4 * q, k=q, v=v, y=logits.softmax(-1) @ v.float(), n_keys=torch.arange(1.0, 17),
                      row_stats=kernels.RowStats(logits.logsumexp(-1), None, None),
                      self_factor=torch.full((2, 2, 16, 1), 0.01))
    h.y, _ = heads.constraint.behind_softmax(heads, h, h.y, h.row_stats)
    weights = logits.softmax(-1) * (1 - 0.99 * torch.eye(16))
    want = (weights / weights.sum(-1, keepdim=True)) @ v.float()
    assert (h.y - want)[:, 3:].abs().max() < 1e-2


ROUTED = {"first": dict(constraint_router_input="first"), "score": dict(constraint_gate="score"),
          "hard": dict(constraint_router="hard_concrete"), "value": dict(constraint_gate="value"),
          "skip": dict(constraint_skip=0.5), "skip xsa": dict(constraint_skip=0.5, xsa=True, head_norm=True),
          "score xsa": dict(constraint_gate="score", xsa=True, head_norm=True),
          "skip first": dict(constraint_skip=0.5, constraint_router_input="first")}


@pytest.mark.parametrize("name", ROUTED)
def test_cached_padded_and_cut_short_it_says_the_same(name):
    """A token at a time with a cache, rows of other lengths beside it, and without what comes later."""
    model, idx = alive(**ROUTED[name]), tokens(2, 9)
    whole = model(idx).logits
    assert (model(idx[:, :5]).logits - whole[:, :5]).abs().max() < 1e-10
    cache, parts = model_py.KVCache(model.config), []
    for t in range(9):
        parts.append(model.head(model.hidden(idx[:, t:t + 1], cache)))
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-5
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), idx), 1)
    shifted = model.head(model.hidden(padded, pad=torch.tensor([3, 3])))[:, 3:]
    assert (shifted - whole).abs().max() < 1e-5
    hint = torch.randn(2, 24, dtype=torch.float64)
    one = model.generate(idx, 12, temperature=0, router_hint=hint)  # beyond the context, too
    assert len(model.generate(idx, 12, temperature=0)[0]) == len(one[0]) == 21
    greedy = idx
    for _ in range(5):
        last = model(greedy, router_hint=hint).logits[:, -1].argmax(-1, keepdim=True)
        greedy = torch.cat((greedy, last), 1)
    assert torch.equal(one[:, :14], greedy)


# ---- the router's gates and penalties ----

def test_hard_gates_are_zero_at_last_and_noisy_in_training_alone():
    model, idx = alive(constraint_router="hard_concrete"), tokens(4, 9)
    out = model(idx, traces=True)
    gates = out.traces["blocks.0.router_gates"]
    assert torch.equal(gates, model(idx, traces=True).traces["blocks.0.router_gates"])
    with torch.no_grad():
        model.transformer.h[0].attn.constraint.out.bias.fill_(-9.0)
        model.transformer.h[0].attn.constraint.out.weight.zero_()
    assert not model(idx, traces=True).traces["blocks.0.router_gates"].any()
    model.train()
    one, two = (model(idx, traces=True).traces["blocks.1.router_gates"] for _ in range(2))
    assert not torch.equal(one, two)


@pytest.mark.parametrize("router", ["sigmoid", "hard_concrete"])
def test_the_routers_penalties(router):
    model = alive(constraint_router=router, constraint_sparsity_coef=0.3, constraint_entropy_coef=0.7)
    idx, seen, few, coins = tokens(2, 9), [], [], []
    for c in (block.attn.constraint for block in model.transformer.h):
        c.fc.register_forward_hook(lambda module, args, out, c=c: seen.append(c.out(out.relu())))
    aux = model(idx, idx).aux
    for logits in seen:
        p = 1 / (1 + (-logits).exp())
        beta, low, high = SentinelGate.BETA, SentinelGate.LOW, SentinelGate.HIGH
        opened = 1 / (1 + (-(logits - beta * math.log(-low / high))).exp())
        few.append((p if router == "sigmoid" else opened).mean())
        coins.append(-(p * p.log() + (1 - p) * (1 - p).log()).mean())
    assert len(seen) == 2
    assert aux["constraint_router"].item() == pytest.approx(0.3 * sum(few).item(), rel=1e-6)
    assert aux["constraint_entropy"].item() == pytest.approx(0.7 * sum(coins).item(), rel=1e-6)


# ---- what it is trained on ----

def test_scores_are_judged_in_the_chosen_blocks_alone():
    model, idx = alive(constraint_loss_layers=[1]), tokens(2, 9)
    out = model(idx, idx, traces=True, constraint_targets={"b": torch.ones(2, 9)})
    want = 0.2 * F.softplus(-out.traces["blocks.1.constraint.b"]).mean()
    assert out.aux["constraint.b"].item() == pytest.approx(want.item(), rel=1e-6)


def test_warm_up_weighs_the_loss_on_labels_and_nothing_else():
    config = GPTConfig(**SMALL, constraint_warmup=4)
    aux = {"constraint.a": 8.0, "constraint_match": 4.0, "constraint_router": 1.0, "gate_l1": 2.0}
    shares = [ConstraintHeads.aux_at_step(config, aux, step)["constraint.a"] / 8 for step in range(6)]
    assert shares == [0.25, 0.5, 0.75, 1, 1, 1]
    half = ConstraintHeads.aux_at_step(config, aux, 1)
    assert (half["constraint_match"], half["constraint_router"], half["gate_l1"]) == (2.0, 1.0, 2.0)
    assert ConstraintHeads.aux_at_step(GPTConfig(**SMALL), aux, 0) == aux


def test_stopped_heads_send_no_gradient_into_the_trunk():
    """Their own weights learn all the same; the language model's gradient goes the other ways."""
    model, idx = alive(constraint_stop=3), tokens(2, 9)
    for step, stopped in ((0, True), (2, True), (3, False)):
        model.at_step(step)
        out = model(idx, idx, constraint_targets={"a": torch.ones(2, 9), "b": torch.zeros(2, 9)})
        labelled = out.aux["constraint.a"] + out.aux["constraint.b"]
        trunk, own = torch.autograd.grad(
            labelled, [model.transformer.wte.weight, model.transformer.h[0].attn.constraint.c_attn.weight],
            allow_unused=True, retain_graph=True)
        assert (trunk is None or not trunk.any()) == stopped and own.any()
        assert torch.autograd.grad(out.loss, model.transformer.wte.weight)[0].any()


@pytest.mark.parametrize("kind", ["kl", "huber"])
def test_a_student_is_compared_with_its_teacher(kind):
    student, teacher = alive(constraint_match=kind, constraint_match_coef=0.5), alive(seed=3)
    idx = tokens(2, 9)
    said = teacher.predictions(idx)
    out = student(idx, idx, teacher=said, traces=True)
    ours = student.predictions(idx)
    if kind == "kl":
        terms = []
        for block in range(2):
            for name in "ab":
                p, q = (1 / (1 + (-each[f"blocks.{block}.constraint.{name}"]).exp()) for each in (said, ours))
                terms.append((p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean())
    else:
        away = [(ours[f"blocks.{i}.constraint_y"] - said[f"blocks.{i}.constraint_y"]).abs() for i in range(2)]
        terms = [torch.where(d < 1, d.square() / 2, d - 0.5).mean() for d in away]
    want = 0.5 * np.mean([t.item() for t in terms])
    assert out.aux["constraint_match"].item() == pytest.approx(want, rel=1e-5)
    assert student(idx, idx, teacher=ours).aux["constraint_match"].item() == pytest.approx(0, abs=1e-6)


# ---- skipping ----

@pytest.mark.parametrize("cached", [False, True], ids=["rows", "decoding"])
def test_heads_below_the_threshold_are_not_computed(monkeypatch, cached):
    """The same function as with their gates at 0, and no attention of a closed head."""
    model, idx, rows = alive(constraint_skip=0.5), tokens(3, 9), []
    gates = [g for name, g in model(idx, traces=True).traces.items() if name.endswith("router_gates")]
    opened = [(g > 0).any(1) for g in gates]
    assert any(o.any() and not o.all() for o in opened), "some are open, some closed"
    skipping = model_py.attend_in_rows
    monkeypatch.setattr(model_py, "attend_in_rows", lambda *a: rows.append(a[4]) or skipping(*a))
    if not cached:
        fast = model(idx).logits
        found = [[len(r) for r in each] for each in rows]
        assert found == [o.sum(0).tolist() for o in opened]
    else:
        cache = model_py.KVCache(model.config)
        fast = torch.cat([model.head(model.hidden(idx[:, t:t + 1], cache)) for t in range(9)], 1)
        assert len(rows) == 18
    monkeypatch.setattr(ConstraintHeads, "open_rows", lambda *a: None)
    assert (model(idx).logits - fast).abs().max() < 1e-5
    model.transformer.h[0].attn.constraint.skip = 0.0
    assert (model(idx).logits - fast).abs().max() > 1e-4, "a control: the threshold changes something"


def test_a_layer_whose_heads_are_all_closed_does_not_even_project_them():
    model, idx, called = alive(constraint_skip=0.5, xsa=True), tokens(2, 9), []
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.constraint.out.bias.fill_(-99.0)
            block.attn.constraint.c_attn.register_forward_hook(lambda *a: called.append(1))
    fast = model(idx).logits
    assert not called
    for block in model.transformer.h:
        block.attn.constraint.skip = 0.0
    assert (model(idx).logits - fast).abs().max() < 1e-12 and len(called) == 2


def test_no_head_at_all_is_no_attention():
    q = torch.zeros(2, 0, 3, 8)
    assert kernels.attend(q, q, q, 1.0, None, 0.0).shape == (2, 0, 3, 8)


# ---- train.py ----

@pytest.fixture(scope="module")
def labelled(bytes_data):
    """Labels of the sums: "digit" is 1 on a digit; "even" knows digits alone, 1 on an even one."""
    dataset = Dataset(bytes_data)
    folder = dataset.dir / "labels" / "truth"
    folder.mkdir(parents=True)
    for split in ("train", "val"):
        ids = np.asarray(dataset.tokens(split))
        digit = (ids >= 48) & (ids < 58)
        encode(digit).tofile(label_file(folder, "digit", split))
        encode(np.where(digit, ids % 2 == 0, np.nan)).tofile(label_file(folder, "even", split))
        encode(np.full(len(ids), np.nan)).tofile(label_file(folder, "nothing", split))
    write_meta(folder, dataset, ["digit", "even", "nothing"], ["train", "val"], weak=True, note="made up")
    return dataset.dir


@pytest.fixture
def run(labelled, tmp_path):
    """run(name, key=value, ...) -> the rows of a training run's log that have a loss."""
    def call(name, *flags, **keys):
        keys = {**TINY, "dataset": labelled, "labels": "truth", "constraint_names": ["digit", "even"],
                "constraint_layers": [0], "recipe": "modern", "out_dir": tmp_path / name, **keys}
        main([f"--{key}={value}" for key, value in keys.items()] + list(flags))
        rows = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        return [row for row in rows if "loss" in row]
    return call


def test_scorers_learn_what_they_are_shown(run, tmp_path, labelled, capsys):
    rows = run("a", max_iters=300, lr_decay_iters=300, eval_interval=300, constraint_coef=3.0, batch_size=8)
    first, last = ({k: row[f"aux/constraint.{k}"] for k in ("digit", "even")} for row in (rows[0], rows[-1]))
    assert first["digit"] == pytest.approx(3 * math.log(2) / 2, abs=0.1), "nats, of the mean of two names"
    assert last["digit"] < 0.3 * first["digit"] and last["even"] < 0.5 * first["even"]
    assert "weak labels" in (said := capsys.readouterr().out) and "not read: nothing" in said
    data = Dataset(labelled)
    model = checkpoint.build(checkpoint.read(tmp_path / "a"), tmp_path / "a", "cpu")
    ids = torch.from_numpy(np.asarray(data.tokens("val"))[:1600].astype(np.int64)).view(100, 16)
    scores = model(ids, traces=True).traces["blocks.0.constraint.digit"] > 0
    digit = (ids >= 48) & (ids < 58)
    assert (scores == digit).float().mean() > 0.95
    later = (scores[:, :-1] == digit[:, 1:]).float().mean()
    assert later < 0.9, "a control: it is about the token itself, not the next one"


@pytest.mark.parametrize("keys", [dict(grad_accum=2), dict(constraint_warmup=6, constraint_stop=4)], ids=str)
def test_a_resumed_run_is_the_same(run, tmp_path, keys):
    once, _ = run("once", **keys), run("twice", **{**keys, "max_iters": 3})
    twice = run("twice", "--resume", **keys)

    def untimed(rows):
        return [{k: v for k, v in row.items() if k not in ("elapsed_s", "tokens_per_s")} for row in rows]
    assert untimed(once) == untimed(twice)
    one, two = (checkpoint.read(tmp_path / name / "ckpt.pt")["model"] for name in ("once", "twice"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_where_nothing_is_labelled_nothing_is_paid(run):
    rows = run("a", constraint_names=["nothing"], constraint_coef=5.0)
    assert all(row["aux/constraint.nothing"] == 0 and math.isfinite(row["grad_norm"]) for row in rows
               if "grad_norm" in row)
    assert all(row["aux/constraint.nothing"] == 0 for row in rows)


@pytest.mark.parametrize("kind", ["kl", "huber"])
def test_a_run_may_have_a_teacher(run, tmp_path, kind):
    run("teacher", max_iters=20, constraint_coef=1.0)
    rows = run("student", labels=None, teacher=tmp_path / "teacher", constraint_match=kind, seed=5,
               max_iters=60, eval_interval=60, constraint_match_coef=5.0)
    assert rows[-1]["aux/constraint_match"] < 0.5 * max(row["aux/constraint_match"] for row in rows)


def test_a_checkpoint_that_matches_nobody_takes_no_teacher(run, labelled, tmp_path):
    run("alone")
    run("pupil", teacher=tmp_path / "alone", constraint_match="kl")

    def tuned(name):
        main([f"--{key}={TINY[key]}" for key in ("max_iters", "eval_tokens", "lr_decay_iters", "device")]
             + [f"--dataset={labelled}", f"--init_from={tmp_path / name}", f"--teacher={tmp_path / 'alone'}",
                f"--out_dir={tmp_path / name}_on"])

    tuned("pupil")
    with pytest.raises(SystemExit, match="teacher"):
        tuned("alone")
    assert not (tmp_path / "alone_on").exists()


def test_what_does_not_go_together_is_refused(run, tmp_path, capsys):
    def refused(words, **keys):
        with pytest.raises(SystemExit) as e:
            run("no", **keys)
        assert words in str(e.value.code) and not (tmp_path / "no").exists(), e.value.code

    refused("truth", constraint_names=["digit", "truth"])
    refused("'lies'", labels="lies")
    refused("labels='truth'", constraint_names=None,
            constraint_layers=None)
    refused("constraint_focal=2.0", labels=None, constraint_focal=2.0)
    refused("constraint_warmup=3", labels=None, constraint_warmup=3)
    refused("constraint_match", constraint_match="kl")
    refused("teacher", teacher=tmp_path)
    run("small", max_iters=3, constraint_heads=2)
    refused(str(tmp_path / "small"), teacher=tmp_path / "small",
            constraint_match="huber")
    run("other", max_iters=3, constraint_names=["even"])
    refused("constraint_names", teacher=tmp_path / "other", constraint_match="kl")


def test_a_checkpoint_from_before_there_were_these_flags_is_read(tmp_path):
    model = alive(constraint_mode="published")
    config = {key: value for key, value in asdict(model.config).items()
              if key not in ("constraint_gate", "constraint_router", "constraint_skip", "constraint_stop")}
    again = GPT(GPTConfig(**config)).double().eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(tokens(2, 9)).logits, model(tokens(2, 9)).logits)


# ---- in a study ----

def test_labels_and_teacher_are_part_of_what_a_run_reads(labelled, tmp_path, run):
    """Other labels are another run; a run of none keeps its folder."""
    data = Dataset(labelled)
    bare = trial.data_of(data)
    assert set(bare) == {"train", "val", "test"}
    with_labels = trial.data_of(data, "truth")
    assert {"labels digit.train", "labels even.val"} < set(with_labels) and bare.items() < with_labels.items()
    run("teacher", max_iters=3)
    one = trial.data_of(data, "truth", tmp_path / "teacher")["teacher"]
    assert one == sha256(tmp_path / "teacher" / "best.pt") != with_labels["labels digit.train"]
    assert not {"labels", "teacher"} & set(fingerprint.own_training(TrainConfig()))
    assert fingerprint.own_training(TrainConfig(labels="truth"))["labels"] == "truth"
