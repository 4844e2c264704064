"""What a program writes for another program to read, with --json, and for TensorBoard."""

import json
from importlib import import_module

import pytest

from lab import export_hf
import plot_curves
from lab import probe
import sample
import train
from helpers import TINY
from helpers import ROOT
from lab_helpers import OF_LAB

PROGRAMS = [*sorted(path.stem for path in ROOT.glob("*.py") if path.stem != "model"),
            *(f"lab.{name}" for name in OF_LAB if name != "probe")]


@pytest.fixture
def read(tmp_path):
    """read(name) -> what that file holds."""
    return lambda name: json.loads((tmp_path / name).read_text())


@pytest.mark.slow
@pytest.mark.parametrize("command", [*PROGRAMS, *(f"lab.probe {word}" for word in probe.PROBES)])
def test_every_program_and_probe_has_the_flag(command, capsys):
    program, *words = command.replace("constraints", "constraints score").split()
    with pytest.raises(SystemExit) as e:
        import_module(program).main([*words, "--help"])
    assert not e.value.code and "--json" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_writes_its_result(args, rows, read, tmp_path, capsys):
    train.main([*args(), f"--json={tmp_path / 'run.json'}"])
    found, last = read("run.json"), rows(tmp_path / "run")[1][-1]
    assert found.pop("best_val_loss") == min(row["val_loss"] for row in rows(tmp_path / "run")[1][1:])
    assert found.pop("out_dir") == str(tmp_path / "run") and found.pop("parameters") > 0
    assert found == last and found["step"] == TINY["max_iters"]
    # once more: it is finished already, and says the same
    train.main([*args(), "--resume", f"--json={tmp_path / 'again.json'}"])
    assert read("again.json") == read("run.json")
    # the folder of --json does not change what a run is
    assert "changed since the last save" not in capsys.readouterr().out


@pytest.mark.slow
def test_an_evaluation_writes_its_result(args, read, tmp_path):
    train.main(args())
    train.main([*args("other"), f"--init_from={tmp_path / 'run'}", "--eval_only",
                f"--json={tmp_path / 'scores.json'}"])
    found = read("scores.json")
    assert "out_dir" not in found and "best_val_loss" not in found and found["val_bpb"] > 0


def test_a_run_that_did_not_do_what_was_asked_writes_none(args, fails, tmp_path):
    line, = fails([*args(n_head=3), f"--json={tmp_path / 'run.json'}"])
    assert "n_head=3" in line and not (tmp_path / "run.json").exists()
    line, = fails([*args(), f"--json={tmp_path / 'nowhere/run.json'}"])
    assert "--json: cannot write into" in line and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_check_writes_each_promise(read, tmp_path, capsys):
    train.main(["--scale=tiny", "--mechanism=xsa", "--check", f"--json={tmp_path / 'check.json'}"])
    found = read("check.json")
    assert {row["promise"] for row in found} >= {"causal", "rows", "neutral"}
    assert all(row["mechanism"] == "xsa" and row["broken"] is None for row in found)


@pytest.mark.slow
def test_samples_pictures_and_exports_say_what_they_made(args, read, tmp_path, capsys):
    train.main(args())
    run = str(tmp_path / "run")
    sample.main(["--ckpt", run, "--num_samples=2", "--max_new_tokens=3", f"--json={tmp_path / 'texts.json'}"])
    found, = read("texts.json")
    assert found["ckpt"] == run and found["prompt"] == "\n" and len(found["texts"]) == 2
    plot_curves.main([run, f"--json={tmp_path / 'pictures.json'}"])
    assert read("pictures.json") == [f"{run}/figures/curves.png", f"{run}/figures/curves.svg"]
    export_hf.main(["--ckpt", run, "--out", str(tmp_path / "hf"), f"--json={tmp_path / 'hf.json'}"])
    assert read("hf.json")["family"] == "gpt2" and read("hf.json")["folder"] == str(tmp_path / "hf")


@pytest.mark.slow
def test_tensorboard_shows_the_rows_of_the_log(args, rows, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator",
                                      reason="TensorBoard, an optional library, is absent")
    train.main([*args(max_iters=3), "--tensorboard"])
    train.main([*args(), "--tensorboard", "--resume"])
    seen = accumulator.EventAccumulator(str(tmp_path / "run/tensorboard"))
    seen.Reload()
    losses, evals = rows(tmp_path / "run")
    for tag, of in (("loss", losses), ("val_bpb", evals)):
        shown = {event.step: event.value for event in seen.Scalars(tag)}
        assert shown == pytest.approx({row["step"]: row[tag] for row in of})


def test_without_tensorboard_a_line_says_what_to_install(args, fails, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    line, = fails([*args(), "--tensorboard"])
    assert line == "tensorboard=True needs TensorBoard: pip install tensorboard"
