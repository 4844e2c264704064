"""Constraint heads that are trained on labels, or by a teacher."""

import functools
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import helpers
from model import GPTConfig
from nanoheads.config import TrainConfig
from nanoheads.dataset import Dataset
from lab.labels.targets import sha256
from study.digest import digests_of
from oracle import tokens
from helpers import TINY, as_arguments, same, untimed, weights
from lab_helpers import is_digit, model_of, put_labels
from train import main

SMALL = dict(block_size=16, vocab_size=37, n_layer=2, n_head=3, n_embd=24, constraint_names=["a", "b"],
             constraint_layers=[0, 1])
tiny = functools.partial(helpers.tiny, std=0.3, **SMALL)


def test_stopped_heads_send_no_gradient_into_the_trunk():
    """Their own weights learn all the same; the language model's gradient goes the other ways."""
    model, idx = tiny(constraint_stop=3), tokens(2, 9)
    for step, stopped in ((0, True), (2, True), (3, False)):
        model.at_step(step)
        out = model(idx, idx, constraint_targets={"a": torch.ones(2, 9), "b": torch.zeros(2, 9)})
        labelled = out.aux["constraint.a"] + out.aux["constraint.b"]
        trunk, own = torch.autograd.grad(
            labelled, [model.transformer.wte.weight, model.transformer.h[0].attn.constraint.c_attn.weight],
            allow_unused=True, retain_graph=True)
        assert (trunk is None or not trunk.any()) == stopped and own.any()
        assert torch.autograd.grad(out.loss, model.transformer.wte.weight)[0].any()


@pytest.fixture(scope="module")
def labelled(bytes_data, tmp_path_factory):
    """A copy of the sums with labels: "digit" is 1 on a digit; "even" is known of digits alone."""
    data = Dataset(shutil.copytree(bytes_data, tmp_path_factory.mktemp("labelled") / "sums"))

    def nothing(tokens):
        return np.full(len(tokens), np.nan)

    put_labels(data.dir / "labels/truth", data, digit=is_digit, nothing=nothing, unread=nothing,
               even=lambda tokens: np.where(is_digit(tokens), tokens % 2 == 0, np.nan))
    return data.dir


@pytest.fixture
def run(labelled, rows, tmp_path):
    """run(name, key=value, ...) -> the rows of a training run's log that have a loss."""
    def call(name, *flags, **keys):
        keys = {**TINY, "dataset": labelled, "labels": "truth", "constraint_names": ["digit", "even"],
                "constraint_layers": [0], "recipe": "modern", "out_dir": tmp_path / name, **keys}
        main(as_arguments(keys) + list(flags))
        return rows(tmp_path / name)[0]
    return call


@pytest.mark.slow
def test_scorers_learn_what_they_are_shown(run, tmp_path, labelled, capsys):
    """Of each name its mean over what is known of it: where nothing is labelled nothing is paid."""
    rows = run("a", max_iters=150, eval_interval=150, lr_decay_iters=150, constraint_coef=3.0, batch_size=8,
               constraint_names=["digit", "even", "nothing"])
    first, last = ({k: row[f"aux/constraint.{k}"] for k in ("digit", "even")} for row in (rows[0], rows[-1]))
    assert first["digit"] == pytest.approx(3 * math.log(2) / 3, abs=0.1), "nats, of the mean of three names"
    assert last["digit"] < 0.3 * first["digit"] and last["even"] < 0.5 * first["even"]
    assert all(row["aux/constraint.nothing"] == 0 and math.isfinite(row["loss"]) for row in rows)
    assert "weak labels" in (said := capsys.readouterr().out) and "not read: unread" in said
    data = Dataset(labelled)
    model = model_of(tmp_path / "a")
    ids = torch.from_numpy(np.asarray(data.tokens("val"))[:1600].astype(np.int64)).view(100, 16)
    scores = model(ids, traces=True).traces["blocks.0.constraint.digit"] > 0
    digit = is_digit(ids)
    assert (scores == digit).float().mean() > 0.95
    later = (scores[:, :-1] == digit[:, 1:]).float().mean()
    assert later < 0.9, "a control: it is about the token itself, not the next one"


def test_a_resumed_run_is_the_same(run, tmp_path):
    keys = dict(grad_accum=2, constraint_warmup=6, constraint_stop=4)
    once, _ = run("once", **keys), run("twice", **{**keys, "max_iters": 3})
    assert untimed(once) == untimed(run("twice", "--resume", **keys))
    assert same(*(weights(tmp_path / name / "ckpt.pt") for name in ("once", "twice")))


@pytest.mark.slow
def test_a_run_may_have_another_run_as_its_teacher(run, tmp_path, labelled):
    """And its checkpoint again when it is trained on; one that matches nobody takes none."""
    run("teacher", max_iters=10, eval_interval=10, constraint_coef=1.0)
    rows = run("pupil", labels=None, teacher=tmp_path / "teacher", constraint_match="kl", seed=5,
               max_iters=40, eval_interval=40, constraint_match_coef=5.0)
    assert rows[-1]["aux/constraint_match"] < 0.5 * max(row["aux/constraint_match"] for row in rows)

    def tuned(name):
        keys = {key: TINY[key] for key in ("eval_tokens", "lr_decay_iters", "device")}
        keys.update(max_iters=2, dataset=labelled, init_from=tmp_path / name, out_dir=tmp_path / f"{name}_on",
                    teacher=tmp_path / "teacher")
        main(as_arguments(keys))

    tuned("pupil")
    with pytest.raises(SystemExit, match="teacher"):
        tuned("teacher")
    assert not (tmp_path / "teacher_on").exists()


FEATURES = """
import torch
def features(ids):
    digit = ((ids >= 48) & (ids < 58)).float()
    return torch.stack((4 * digit - 2, 0 * digit), -1)
"""


def test_a_run_may_have_a_function_as_its_teacher(run, tmp_path):
    """Features of a kind that heads can learn: whether a token is a digit, and something that is constant."""
    (tmp_path / "mine.py").write_text(FEATURES)
    keys = dict(labels=None, teacher=tmp_path / "mine.py", constraint_match="huber", constraint_features=2,
                eval_interval=20, constraint_match_coef=5.0, lr_decay_iters=100)
    run("student", **{**keys, "max_iters": 20})
    rows = run("student", "--resume", **{**keys, "max_iters": 40})
    assert [row["step"] for row in rows][-1] == 40
    assert rows[-1]["aux/constraint_match"] < 0.5 * rows[0]["aux/constraint_match"]


@pytest.mark.parametrize("text, words", [
    ("def features(ids):\n    return ids", "gives [1, 16] for ids [1, 16], and must give [1, 16, 2]"),
    ("def features(ids):\n    return ids / nothing", "mine.py, line 2: NameError"),
    (None, "no such file")])
def test_a_function_that_is_no_teacher_is_one_line(run, tmp_path, text, words):
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(SystemExit) as e:
        run("no", labels=None, teacher=tmp_path / "mine.py", constraint_match="kl", constraint_features=2)
    assert words in str(e.value.code) and "\n" not in str(e.value.code)
    assert not (tmp_path / "no").exists()


def test_labels_and_teacher_are_part_of_what_a_run_reads(labelled, tmp_path, run):
    """Other labels are another run; one that has none names none."""
    model = GPTConfig(**SMALL)

    def own(**keys):
        return digests_of(TrainConfig(dataset=str(labelled), **keys), model)["own"]

    run("teacher", max_iters=1)
    names = replace(model, constraint_names=["digit", "even"])
    labels = digests_of(TrainConfig(dataset=str(labelled), labels="truth"), names)["own"]
    assert own() == {} and {"labels digit.train", "labels even.val"} < labels.keys()
    assert len({*labels.values()}) > 2
    (teacher,) = own(teacher=str(tmp_path / "teacher")).values()
    assert teacher == sha256(tmp_path / "teacher" / "best.pt") not in labels.values()
