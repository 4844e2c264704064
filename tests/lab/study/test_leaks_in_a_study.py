"""A study refuses runs that look ahead or mix rows, before they are trained and before they are scored."""

import re
import subprocess
import sys

import pytest

import train
from nanoheads import causality
from nanoheads.common import ROOT
from lab.study import results, trial

LEAKS = ROOT / "tests" / "leaks.py"


@pytest.fixture(scope="module")
def study(bytes_data, tmp_path_factory):
    """compare.py on two leaks that 13 tokens do not show: (its folder, what it printed, its results)."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "plain.py").write_text(
        "n_layer = 1\nn_head = 2\nn_embd = 16\nblock_size = 64\nbatch_size = 4\nmax_iters = 6\n"
        "eval_interval = 3\neval_tokens = 64\nrecipe = 'modern'\nmechanism_lr = 1.0\n"
        f"dataset = {str(bytes_data)!r}\n")
    done = subprocess.run(
        [sys.executable, ROOT / "compare.py", f"--mechanisms={LEAKS}:leak_block,leak_grown",
         "--base=plain.py", "--seeds=[1]", "--plain_seeds=1", "--budgets=[]", "--device=cpu", "--jobs=2",
         "--out_dir=study"],
        cwd=folder, capture_output=True, text=True)
    return folder, done, results.read(folder / "study/results.json.gz")


@pytest.mark.slow
def test_a_leak_of_the_size_of_the_study_is_refused_before_it_is_trained(study):
    folder, done, found = study
    failed = {row["arm"]: row for row in found["failures"]}
    assert re.search(r"^trial: before training it looks ahead: position 0 changes with the token at 1 "
                     r"\(in training, 4 rows, float32, a block of 64\)", failed["leak_block"]["why"])
    run = (folder / failed["leak_block"]["log"]).parent
    assert not any((run / name).exists() for name in ("log.jsonl", "ckpt.pt", "best.pt", "result.json"))
    assert found["arms"]["leak_block"]["bpb"] == [None]


@pytest.mark.slow
def test_a_leak_that_training_grows_is_refused_before_it_is_scored(study):
    folder, done, found = study
    failed = {row["arm"]: row for row in found["failures"]}
    assert failed["leak_grown"]["why"].startswith("trial: after training it looks ahead: position ")
    run = (folder / failed["leak_grown"]["log"]).parent
    assert (run / "best.pt").is_file()
    assert not any((run / name).exists() for name in ("nats.npy", "result.json"))
    assert found["arms"]["leak_grown"]["bpb"] == [None] and found["done"] == 1
    assert done.returncode == 1 and "2 runs failed, the report names them" in done.stderr


def test_a_study_prints_what_was_checked(study):
    _, done, found = study
    run, = found["runs"].values()
    assert run["looked_for_leaks"] == ("32 positions in 4 rows in training, 63 positions in 64 rows in "
                                       "evaluation, of a block of 64, in float32")
    assert ("1 of 1 scored run neither looks ahead nor mixes rows, before training and after it: "
            + run["looked_for_leaks"]) in done.stdout
    del run["looked_for_leaks"]  # as of a run that is on file since before
    assert results.leaks_looked_for(found).startswith("1 of 1 scored run is older than this check")


@pytest.mark.slow
def test_a_run_has_the_numbers_of_one_without_the_check(bytes_data, tmp_path, monkeypatch):
    """With dropout, whose masks are drawn anew in each step."""
    found = []
    for check in (True, False):
        if not check:
            monkeypatch.setattr(causality, "refuse", lambda *args, **kwargs: "nothing")
        spec = dict(model=dict(vocab_size=256, block_size=16, n_layer=1, n_head=2, n_embd=16, seed=1,
                               recipe="modern", dropout=0.2),
                    train=dict(dataset=str(bytes_data), device="cpu", batch_size=4, max_iters=6,
                               eval_interval=3, eval_tokens=64, log_interval=1),
                    score=dict(split="test", tokens=0))
        folder = trial.make(spec, tmp_path / str(check))
        run = trial.run(folder, train.train)
        found.append((run["bpb"], run["nats"], [row.get("loss") for row in trial.rows(folder)]))
    assert found[0] == found[1] and len(found[0][2]) >= 6
