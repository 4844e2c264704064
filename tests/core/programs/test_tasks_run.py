"""Runs on a task: they go on bit for bit, and are scored on fresh rows and shown."""

import json
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import evaluate
import sample
import train
from helpers import TINY_TASK, same, untimed, weights
from nanoheads import checkpoint
from nanoheads.tasks import TaskData

FLAGS = dict(task="recall", task_keys=6, task_values=4, task_levels=[1, 2, 3], task_test_levels=[1, 3])
OF_CHECKPOINT = dict.fromkeys(("block_size", "n_layer", "n_head", "n_embd"), ...)


@pytest.fixture
def scored(tmp_path, capsys):
    """scored(argument, ...) -> (what evaluate.py writes as JSON, what it prints)."""
    def call(*args):
        capsys.readouterr()
        evaluate.main([*map(str, args), "--json", str(tmp_path / "scores.json")])
        return json.loads((tmp_path / "scores.json").read_text()), capsys.readouterr().out
    return call


@pytest.fixture
def shown(capsys, monkeypatch):
    """shown(argument, ...) -> what sample.py prints on a terminal of `columns`.

    The default is wide: rows are labelled with the paths of runs, and those of tests may be long.
    """
    def call(*args, columns=1000):
        monkeypatch.setenv("COLUMNS", str(columns))
        capsys.readouterr()
        sample.main([*map(str, args)])
        return capsys.readouterr().out
    return call


# ---- training ----

def test_a_run_on_a_task_goes_on_bit_for_bit(task_args, rows, tmp_path, capsys):
    """Its folder says which task it goes on with, or evaluates."""
    train.main(task_args("whole", save_interval=2))
    train.main(task_args("parts", max_iters=4, save_interval=2))
    train.main([f"--out_dir={tmp_path / 'parts'}", "--resume", "--max_iters=6"])
    assert same(weights(tmp_path / "whole/ckpt.pt"), weights(tmp_path / "parts/ckpt.pt"))
    (train_rows, evals), (again, evals_again) = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert untimed(train_rows) == untimed(again)
    assert untimed(evals)[-1] == untimed(evals_again)[-1] and "val_acc" in evals[-1]
    capsys.readouterr()
    train.main([f"--out_dir={tmp_path / 'parts'}", "--eval_only"])
    best = min(evals_again[1:], key=lambda row: row["val_loss"])
    assert f"right {best['val_acc']:.3f}" in capsys.readouterr().out


def test_a_run_does_not_go_on_with_other_rows(task_args, fails, bytes_data):
    train.main(task_args(max_iters=3))
    line, = fails([*task_args(task_levels="1"), "--resume"])
    assert "task_levels=[1] here is [1, 2, 3] there" in line
    train.main([*task_args(task_test_levels="2"), "--resume"])  # which rows are scored is no part of it
    text = dict.fromkeys((key for key in TINY_TASK if key.startswith("task_")), ...)
    lines = fails([*task_args(**text, task=None, dataset=bytes_data, max_iters=9), "--resume"])
    assert lines and all("means nothing without task" in line for line in lines)


@pytest.mark.slow
def test_a_run_starts_from_a_checkpoint_whose_words_it_has(task_args, args, task_run, fails, finished_run,
                                                          rows, tmp_path):
    keys = dict(init_from=task_run, recipe="modern", n_layer=2, n_head=4)
    train.main(task_args(**keys))
    first, last = rows(tmp_path / "run")[1][0], rows(task_run)[1][-1]
    assert first["acc/3"] == last["acc/3"] and first["val_loss"] == last["val_loss"]
    train.main(task_args("levels", **keys, task_levels="2", max_iters=1))
    line, = fails(task_args("other", **keys, task="noisy_recall"))
    assert "was trained on task recall" in line
    line, = fails(args("text", init_from=task_run, **OF_CHECKPOINT))
    assert "was trained on task recall (char, 11 symbols), whose vocabulary is not that of sums" in line
    line, = fails(task_args("task", init_from=finished_run, **OF_CHECKPOINT))
    assert "was trained on" in line and "task recall" in line


@pytest.mark.slow
def test_an_own_mechanism_is_trained_and_scored_on_a_task(task_args, mine, scored, tmp_path):
    train.main([*task_args(recipe="modern", n_layer=2), f"--mechanism={mine()}"])
    found, _ = scored("--ckpt", tmp_path / "run", f"--mechanism={tmp_path / 'run' / 'mine.py'}",
                      "--rows", 3)
    assert set(found["runs"][0]["levels"]) == {"1", "3"}


# ---- evaluate.py ----

def test_scores_are_counted_on_fresh_rows(task_run, scored, rows):
    found, text = scored("--ckpt", task_run, "--rows", 7)
    run, data = found["runs"][0], TaskData(FLAGS, 12)
    model = checkpoint.build(checkpoint.read(task_run), task_run)
    nats, asked = 0.0, 0
    for level in (1, 3):
        x, y = map(torch.from_numpy, data.rows("test", level, 7))
        right = [int(logits.argmax()) == int(answer) for row, want in zip(model(x).logits, y)
                 for logits, answer in zip(row, want) if answer >= 0]
        assert run["levels"][str(level)] == np.mean(right) and len(right) == 7 * level
        nats += F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten(), ignore_index=-1,
                                reduction="sum").item()
        asked += len(right)
        guesses = data.guesses("test", level, 7)
        assert found["guessing"][str(level)] == guesses
        assert f"{max(guesses.values()):.3f}" in text
    assert run["nats"] == pytest.approx(nats / asked, rel=1e-5)
    assert run["right"] == np.mean([run["levels"]["1"], run["levels"]["3"]])
    assert f"{run['params']:,}" in text and run["step"] == 6
    assert not np.array_equal(data.rows("test", 3, 7)[0], data.rows("val", 3, 7)[0])
    # those of val are the run's own
    found, _ = scored("--ckpt", task_run, "--split", "val", "--rows", TINY_TASK["task_rows"])
    best = min(rows(task_run)[1], key=lambda row: row["val_loss"])
    assert found["runs"][0]["levels"] == {level: best[f"acc/{level}"] for level in ("1", "3")}
    assert found["runs"][0]["nats"] == pytest.approx(best["val_loss"], rel=1e-6)


def test_levels_beyond_training_get_rows_twice_as_long(task_args, task_run, scored, tmp_path):
    """Where positions are learned there is nothing to read them with."""
    found, text = scored("--ckpt", task_run, "--levels", "2,5", "--rows", 4)
    assert found["length"] == 24 and "was trained on no rows with 5 pairs, and on rows of 12 tokens." in text
    model = checkpoint.build(checkpoint.read(task_run), task_run, block_size=24)
    x, y = map(torch.from_numpy, TaskData(FLAGS, 24).rows("test", 5, 4))
    right = (model(x).logits.argmax(-1) == y).sum() / (y >= 0).sum()
    assert found["runs"][0]["levels"]["5"] == pytest.approx(right.item())
    assert scored("--ckpt", task_run, "--levels", "4", "--rows", 4)[0]["length"] == 12
    train.main(task_args(max_iters=1, recipe="gpt2"))
    with pytest.raises(SystemExit, match="has learned positions, which end at 12: it cannot read a context"):
        evaluate.main(["--ckpt", str(tmp_path / "run"), "--levels", "5"])


def test_checkpoints_of_one_task_stand_side_by_side(task_args, task_run, scored, tmp_path):
    train.main(task_args("b", max_iters=1))
    found, text = scored("--ckpt", task_run, "--ckpt", tmp_path / "b")
    assert [run["step"] for run in found["runs"]] == [6, 1] and found["rows"] == 256
    head, first, second, guess, *_ = text.splitlines()[1:]
    assert head.split() == ["run", "1", "3", "mean", "nats/answer", "parameters", "steps"]
    assert [line.split()[-1] for line in (first, second, guess)] == ["6", "1", "–"]


# ---- sample.py ----

def test_rows_are_shown_with_wrong_answers_marked(task_run, shown):
    text = shown("--ckpt", task_run, "--levels", 3)
    title, tokens, wanted, answers, *_ = text.splitlines()
    assert title == "==== recall, 3 pairs ===="
    data = TaskData(FLAGS, 12)
    x, y = data.rows("test", 3, 1, seed=1337)
    assert tokens.split() == [data.words.text_of(word) for word in x[0]]
    assert wanted.split() == ["wanted", *(data.words.text_of(word) for word in y[0] if word >= 0)]
    model = checkpoint.build(checkpoint.read(task_run), task_run)
    best = model(torch.from_numpy(x)).logits.argmax(-1)[0].tolist()
    expected = [data.words.text_of(a) + ("!" if a != w else "") for a, w in zip(best, y[0]) if w >= 0]
    right = sum(not word.endswith("!") for word in expected)
    assert answers.split()[1:] == [*expected, *f"{right} of 3 right".split()]
    # an answer stands below the token behind which it is asked
    places = [i for i, want in enumerate(y[0]) if want >= 0]
    starts = [match.start() for match in re.finditer(r"\S+", tokens)]
    assert [wanted[starts[i]] for i in places] == wanted.split()[1:]


def test_rows_follow_the_seed_and_fit_the_terminal(task_args, task_run, shown, tmp_path):
    one = shown("--ckpt", task_run, "--num_samples", 2, "--seed", 5)
    assert one == shown("--ckpt", task_run, "--num_samples", 2, "--seed", 5)
    assert one != shown("--ckpt", task_run, "--num_samples", 2, "--seed", 6)
    assert one.count("====\n") == 4 and "recall, 3 pairs, row 2" in one
    width = len(str(task_run)) + 12
    narrow = shown("--ckpt", task_run, "--num_samples", 2, "--seed", 5, columns=width)
    assert max(map(len, narrow.splitlines())) <= width + len(" 3 of 3 right")
    assert sorted(narrow.replace("\n", " ").split()).count(".") == one.split().count(".")
    # values that are numbers are shown in numbers
    train.main(task_args(task="count", task_keys=2, task_values=..., task_levels="12", task_test_levels="12",
                         max_iters=1))
    wanted = shown("--ckpt", tmp_path / "run").splitlines()[2].split()[1:]
    assert sorted(map(int, wanted))[:2] == [1, 1] and len(wanted) == 12
