"""plot_curves.py: a figure's lines are the numbers of the log, also of a damaged one; labels can be read."""
import json
import math
import re
import shutil

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from matplotlib.figure import Figure
from matplotlib.image import imread

import plot_curves
from helpers import ANYTHING, EDITS, curve as rows, damaged, words_in as text, write_run as write
from labels import hidden_labels
from nanoheads.curves import curves_of, dataset_name, points, read_log
from nanoheads.drawing import COLOURS, canvas, label_right
from nanoheads.files import LONGEST
from plot_curves import main


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def figures(monkeypatch):
    """figures(argument, ...) -> the Figures of a command line, those of single runs first, unwritten."""
    def call(*argv):
        found = []
        with monkeypatch.context() as unwritten:
            unwritten.setattr(Figure, "savefig", lambda figure, *_, **__: found.append(figure))
            main([*map(str, argv)])
        return [*dict.fromkeys(found)]
    return call


def panels(figure):
    """{title: axes} of a Figure."""
    return {ax.get_title("left"): ax for ax in figure.axes}


def legend(figure):
    return {entry.get_text() for entry in figure.legends[0].get_texts()}


# ---- one drawing, as it is written ----


FILES = [f"out/{path}.{kind}" for path in ("base/figures/curves", "unet_short/figures/curves",
                                           "figures/comparison") for kind in ("png", "svg")]


@pytest.mark.slow
def test_no_argument_draws_every_run_under_out_and_the_comparison_always_in_the_same_bytes(home):
    for name, steps in (("base", 60), ("unet_short", 25)):  # one of them is short
        write(home / "out" / name, rows(steps, floor=1.0 + len(name) / 20))
    assert main(["--json=paths.json"]) == 0
    assert json.loads((home / "paths.json").read_text()) == FILES
    for path in FILES[::2]:
        image = imread(path)
        ink = image[..., :3].min(axis=2) < 0.9
        assert image.shape[:2] == (1200, 1760)
        # each quarter, and so each panel, has ink
        assert all(quarter.mean() > 0.005 for half in np.array_split(ink, 2)
                   for quarter in np.array_split(half, 2, axis=1))
    for path in map(home.joinpath, FILES[1::2]):
        for title in ("its per byte", "oss, nats per token", "Learning rate", "Gap, val − train loss, nats",
                      "best val"):
            assert title in text(path), (path, title)
    loss, words = 1.2 + 4 * math.exp(-4) + 0.1, text(home / FILES[1])
    for label in (f"best {loss:.3f}", f"best {loss * 1.5:.3f}", "step 60", "last +0.100", "mean of 3 logged"):
        assert label in words
    assert all(name in text(home / FILES[-1]) for name in ("base", "unet_short"))
    before = [(home / path).read_bytes() for path in FILES[:2]]
    assert main(["out/base"]) == 0
    assert [(home / path).read_bytes() for path in FILES[:2]] == before


# ---- what a figure shows ----


def test_a_comparison_shows_the_losses_of_every_run_in_its_colour(home, figures, capsys):
    """A run's colour follows its place in the list, that of one that is skipped too, in both figures."""
    names = "run_c", "run_b", "run_a"
    for name, floor in zip(names, (1.0, 1.5, 2.0)):
        write(home / name, rows(60, 20, floor))
    (home / "run_b/log.jsonl").write_text("")
    *single, both = figures(*names, "run_c/")
    assert capsys.readouterr().err == "run_b: log.jsonl has no rows to plot, skipped\n" and len(single) == 2
    for alone, name, colour in zip(single, ("run_c", "run_a"), (COLOURS[0], COLOURS[2])):
        assert {line.get_color() for ax in alone.axes for line in ax.lines} & {*COLOURS} == {colour}
        evals = read_log(home / name)[1]
        for ax, ratio in zip(both.axes[:2], (1.5, 1)):
            lines = [line for line in ax.lines if line.get_color() == colour and len(line.get_xdata()) > 1]
            val, train = sorted(lines, key=lambda line: -line.get_linewidth())
            assert [*val.get_xdata()] == [0, 20, 40, 60]
            assert [*val.get_ydata()] == pytest.approx([row["val_loss"] * ratio for row in evals])
            assert [*train.get_ydata()] == pytest.approx([row["train_loss"] * ratio for row in evals])
            low, high = ax.get_ylim()
            assert low < train.get_ydata()[-1] < high
    assert {"run_c", "run_a", "thin: train, evaluated"} <= legend(both)


def of_characters(run, size):
    """A run whose tokens are characters of so many bytes in the mean."""
    return write(run, [{**row, "val_bpb": row["val_loss"] / math.log(2) / size,
                        "val_bpc": row["val_loss"] / math.log(2)} if "val_loss" in row else row
                       for row in rows(60, 20)])


@pytest.mark.slow
def test_where_tokens_are_characters_losses_are_in_bits_for_each(home, figures):
    wide, = figures(of_characters(home / "a", 1.25))
    last = read_log(home / "a")[1][-1]["val_loss"]
    for title, bits in (("Bits per byte", last / math.log(2) / 1.25),
                        ("Bits per character", last / math.log(2))):
        assert any(line.get_ydata()[-1] == pytest.approx(bits) for line in panels(wide)[title].lines)
    # one byte each: one curve, called both; beside a run of other tokens they do not compare
    same, = figures(of_characters(home / "b", 1))
    assert "Bits per byte, and per character" in panels(same)
    both = figures("a", write(home / "c", rows(60, 20)))[-1]
    assert "Loss, nats per token" in panels(both) and "Bits per character" not in panels(both)
    for figure, columns in ((same, 1), (wide, 2)):  # panels line up, each with numbers on its axis
        figure.draw_without_rendering()
        edges = {(round(ax.get_position().x0, 3), round(ax.get_position().x1, 3)) for ax in figure.axes}
        assert len(edges) == columns and len({ax.get_xlim() for ax in figure.axes}) == 1
        assert all(any(label.get_text() and label.get_visible() for label in ax.get_xticklabels())
                   for ax in figure.axes)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 8])
def test_no_label_of_a_figure_lies_under_a_curve(home, figures, n):
    """A diverged run goes through the upper right corner. Beyond the palette runs are told apart by number,
    and a dollar sign in a name is no formula."""
    def diverged(i):
        return [{**row, "val_loss": 1.0 + row["step"] / 20, "val_bpb": 1.5 + row["step"] / 15}
                if "val_loss" in row and row["step"] else row for row in rows(60, 10, 1 + i / 10)]
    figure = figures(*(write(home / f"$run{i}", diverged(i)) for i in range(n)))[-1]
    assert hidden_labels(figure) == []
    assert any("from" in ax.get_title("right") for ax in figure.axes)
    if n > len(COLOURS):
        assert {f"{i + 1}: $run{i}" for i in range(n)} <= legend(figure)
        of_runs = [line for line in panels(figure)["Gap, val − train loss, nats per token"].lines
                   if line.get_color() in COLOURS]
        assert len({(line.get_color(), line.get_linestyle()) for line in of_runs}) == n


@pytest.mark.parametrize("inches", [1, 4])
def test_numbers_beside_a_curve_do_not_lie_on_each_other(inches):
    ax = canvas(6, inches).subplots()
    (low, _), (high, _) = label_right(ax, [(0.5, "+0.210", "red"), (0.501, "+0.205", "blue")], size=12)
    assert 72 * inches * ax.get_position().height * (high - low) >= 12 - 1e-9  # points, of letters of 12


@pytest.mark.parametrize("steps", [0, 20])
def test_every_entry_of_the_legend_is_drawn(home, figures, steps):
    """A line through one point is invisible without a marker: as after the first evaluation."""
    figure, = figures(write(home / "run", rows(steps)))
    lines = [line for ax in figure.axes for line in ax.lines if line.get_label() in legend(figure)]
    assert {line.get_label() for line in lines} == legend(figure) - {"val", "best val"}
    for line in lines:
        assert points(line).shape[1] > 1 or line.get_marker() not in ("", "None"), line.get_label()


def test_curves_of_a_task_show_answers_by_level(home, figures, task_run):
    for name in "ab":
        shutil.copytree(task_run, home / name)
    alone, _, both = figures("a", "b")
    assert {"Answers that are right, by level", "Loss, nats an answer"} <= {*panels(alone)}
    labels = [label.get_text() for label in panels(alone)["Answers that are right, by level"].texts]
    assert any(re.fullmatch(r"3: [01]\.\d\d", label) for label in labels), labels
    assert "Answers that are right, mean over levels" in panels(both)
    assert not any("Bits" in title or "Gap" in title for title in [*panels(alone), *panels(both)])


@pytest.mark.parametrize("x, label, last", [("tokens", "training tokens", 20 * 768),
                                            ("time", "elapsed minutes", 2.0 / 60)])
def test_other_axes(home, figures, capsys, x, label, last):
    figure, = figures(write(home / "run", rows(20, 10)), "--x", x)
    assert {label} == {ax.get_xlabel() for ax in figure.axes} - {""}
    assert figure.axes[0].lines[0].get_xdata()[-1] == pytest.approx(last)
    bare = write(home / "bare", [{"step": 1, "loss": 2.0}])
    assert main([str(bare), "--x", x]) == 1 and "in log.jsonl, skipped" in capsys.readouterr().err


def test_runs_on_different_datasets_are_named_and_said_not_to_compare(home, figures, capsys):
    for name, dataset in (("a", "data/one"), ("b", "two")):
        write(home / name, rows(20, 10))
        (home / name / "config.json").write_text(json.dumps({"train": {"dataset": dataset}}))
    assert {"a (one)", "b (two)"} <= legend(figures("a", "b")[-1])
    assert "do not compare" in capsys.readouterr().err and dataset_name(home) == "?"


# ---- where it goes ----


@pytest.mark.slow
def test_a_comparison_is_called_after_its_runs_and_lies_beside_them(home, figures, capsys):
    """Of runs in the working folder in the first of them, where git does not show it."""
    for name in ("out/a", "out/b", "out/c", "out-a", "out-b"):
        write(home / name, rows(4, 2))

    def last_path(*argv):
        figures(*argv)
        return capsys.readouterr().out.split()[-1]
    assert last_path("out/a", "out/b", "--out=all") == "all/comparison-a+b.svg"
    assert last_path("out/a", "out/c") == "out/figures/comparison-a+c.svg"
    assert last_path("out/a", "out/b", "--x=tokens") == "out/figures/comparison-by_tokens-a+b.svg"
    assert last_path("out-a", "out-b") == "out-a/figures/comparison-out-a+out-b.svg"
    names = [f"a_run_with_a_long_name_{i}" for i in range(9)]
    found = {plot_curves.name_of(names[:n], x) for n in range(2, 9) for x in ("step", "time")}
    assert len(found) == 14 and max(map(len, found)) <= LONGEST + 8


def test_what_cannot_be_drawn_is_said_and_stops_nothing_else(home, figures, capsys):
    (home / "out").mkdir()
    assert main([]) == 1 and "no runs under out" in capsys.readouterr().err
    write(home / "out/empty", "")
    assert main(["out/empty"]) == 1 and "no rows to plot" in capsys.readouterr().err
    shutil.rmtree("out/empty")
    write(home / "out/good_k4", rows(20, 10))
    shutil.copytree("out/good_k4", "out/lost")
    (home / "out/lost/log.jsonl").unlink()
    with pytest.raises(SystemExit) as stop:
        main(["out/good_k4", "out/god_k4"])
    assert stop.value.code == 2 and not (home / "out/good_k4/figures").exists()
    assert re.search("out/god_k4.* did you mean out/good_k4", capsys.readouterr().err)
    assert len(figures()) == 1  # of one run there is no comparison
    assert capsys.readouterr().err == "out/lost: no log.jsonl, skipped\n"


# ---- logs ----


def test_after_a_resume_the_later_row_wins_and_what_is_no_row_is_said(home, capsys):
    again = [{**row, **({"loss": 9.0} if "loss" in row else {"val_loss": 9.0})} for row in rows(40, 10)
             if row["step"] >= 20]
    lines = [json.dumps(row) for row in [*rows(30, 10), *again]]
    broken = ["7", "[]", '"x"', "{}", '{"loss": 1}', '{"step": "1", "loss": 1}', "\0\0"]
    cut = ['{"step": 1, "note": 0}', "", '{"step": 41, "lo']
    train, evals = read_log(write(home / "run", "\n".join(lines + broken + cut)))
    assert [row["step"] for row in train] == [*range(41)]
    assert [row["step"] for row in evals] == [0, 10, 20, 30, 40]
    assert all((row.get("loss", row.get("val_loss")) == 9.0) == (row["step"] >= 20) for row in train + evals)
    assert f"8 broken lines in log.jsonl, the first is line {len(lines) + 1}" in capsys.readouterr().err


@settings(max_examples=30)
@given(EDITS, st.dictionaries(st.sampled_from(["step", "loss", "val_loss", "val_bpb", "adamw_lr"]), ANYTHING))
@pytest.mark.filterwarnings("error")
def test_a_log_with_any_damage_is_read_as_what_is_left_of_it(home, capsys, edits, values):
    """Cut, flipped and inserted bytes, and a row whose keys hold anything at all."""
    lines = [json.dumps(row) for row in [*rows(20, 10), {"step": 21, "loss": 1.0, **values}]]
    (home / "run").mkdir(exist_ok=True)
    (home / "run/log.jsonl").write_bytes(damaged("\n".join(lines).encode(), edits))
    found = curves_of(home / "run")
    assert found is None or np.isfinite(found.smooth).sum() == np.isfinite(found.loss).sum()
    assert all(line.startswith(f"{home / 'run'}: ") for line in capsys.readouterr().err.splitlines())


def test_the_running_mean_is_centred_and_steps_over_nan_and_ratios_are_those_of_evaluations(home, capsys):
    losses = [float(i) for i in range(80)]
    losses[40] = math.nan
    c = curves_of(write(home / "run", [{"step": i, "loss": v} for i, v in enumerate(losses)]))
    wanted = [np.nanmean(losses[max(0, i - 2):i + 3]) if i != 40 else math.nan for i in range(80)]
    assert c.window == 5 and np.allclose(c.smooth, wanted, equal_nan=True) and math.isnan(c.ratio)
    assert "1 loss(es) not finite, the first at step 40" in capsys.readouterr().err
    c = curves_of(write(home / "evaluated", rows()))
    assert c.ratio == pytest.approx(1.5) and np.allclose(c.gap, 0.1)
    again = write(home / "again", [{"step": i, "loss": 2.0, "elapsed_s": i % 5} for i in range(10)])
    curves_of(again, "time")
    assert "elapsed_s restarts" in capsys.readouterr().err


@pytest.mark.parametrize("log, said", [
    ([r for r in rows(20) if "loss" in r], "no evaluation rows yet"),
    ([r for r in rows(20) if "val_loss" in r], ""),
    ([{"step": 3, "loss": None}], "not finite"),
    ([{**r, "loss": math.nan} if "loss" in r else {**r, "val_loss": math.inf} for r in rows(20)],
     "not finite"),
    ([{**r, "loss": (-1) ** r["step"] * 1e308} if "loss" in r else r for r in rows(20)], "not finite"),
], ids=["training rows only", "evaluation rows only", "no number", "NaN or inf", "losses that overflow"])
@pytest.mark.filterwarnings("error")
def test_an_odd_log_is_drawn_all_the_same(home, figures, capsys, log, said):
    figure, = figures(write(home / "run", log))
    figure.draw_without_rendering()
    err = capsys.readouterr().err
    assert said in err and bool(said) == bool(err)
