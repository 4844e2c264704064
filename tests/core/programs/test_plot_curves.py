import json
import math
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from matplotlib.image import imread

import plot_curves
from helpers import ANYTHING, EDITS, curve as rows, damaged, words_in as text, write_run as write
from labels import hidden_labels
from nanoheads import curves
from nanoheads.curves import curves_of, plot_runs, read_log
from nanoheads.drawing import COLOURS, canvas, label_right
from nanoheads.files import LONGEST
from plot_curves import main


def strokes(svg):
    """The palette colours that an SVG draws with."""
    return {c for c in COLOURS if re.search(f"stroke: {c}", svg.read_text(), re.I)} - {"#000000"}


@pytest.mark.parametrize("inches", [1, 2, 4])
def test_numbers_beside_a_curve_do_not_lie_on_each_other(inches):
    ax = canvas(6, inches).subplots()
    (low, _), (high, _) = label_right(ax, [(0.5, "+0.210", "red"), (0.501, "+0.205", "blue")], size=12)
    assert 72 * inches * ax.get_position().height * (high - low) >= 12 - 1e-9  # points, of letters of 12


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three runs, one short, drawn once with no argument by the script itself from another folder."""
    home = tmp_path_factory.mktemp("three")
    for name, steps in (("base", 60), ("routing", 60), ("unet_short", 25)):
        write(home / "out" / name, rows(steps, floor=1.0 + len(name) / 20))
    done = subprocess.run([sys.executable, plot_curves.__file__], cwd=home, capture_output=True, text=True,
                          env={**os.environ, "MPLBACKEND": "Agg"})
    return home, done


@pytest.mark.slow
def test_no_argument_draws_every_run_under_out_and_the_comparison(three):
    home, done = three
    assert (done.returncode, done.stderr) == (0, "")
    paths = [f"out/{name}/figures/curves.{ext}" for name in ("base", "routing", "unet_short")
             for ext in ("png", "svg")]
    assert done.stdout.split() == paths + ["out/figures/comparison.png", "out/figures/comparison.svg"]
    assert all((home / path).is_file() for path in done.stdout.split())


@pytest.mark.slow
def test_png_has_its_size_and_is_not_blank(three):
    for path in (three[0] / "out").rglob("*.png"):
        image = imread(path)
        assert image.shape[:2] == (1200, 1760), path
        ink = (image[..., :3].min(axis=2) < 0.9)
        assert ink.mean() > 0.01
        # each quarter, and so each panel, has ink
        assert all(q.mean() > 0.005 for half in np.array_split(ink, 2)
                   for q in np.array_split(half, 2, axis=1))


@pytest.mark.slow
def test_svg_is_xml_and_has_the_panels(three):
    for path in (three[0] / "out").rglob("*.svg"):
        assert ET.parse(path).getroot().tag.endswith("svg")
        for title in ("its per byte", "oss, nats per token",
                      "Learning rate", "Gap, val − train loss, nats per token", "best val"):
            assert title in text(path), (path, title)


def test_a_run_has_one_colour_in_both_figures(three):
    out = three[0] / "out"
    for i, name in enumerate(("base", "routing", "unet_short")):
        assert strokes(out / name / "figures" / "curves.svg") == {COLOURS[i]}
    assert strokes(out / "figures" / "comparison.svg") == set(COLOURS[:3])
    for name in ("base", "routing", "unet_short"):
        assert name in text(out / "figures" / "comparison.svg")


def test_best_point_has_its_number_and_the_smoothing_is_stated(three):
    words = text(three[0] / "out" / "base" / "figures" / "curves.svg")
    loss = 1.2 + 4 * math.exp(-4) + 0.1
    assert f"best {loss:.3f}" in words and f"best {loss * 1.5:.3f}" in words and "step 60" in words
    assert "train, mean of 3 logged steps" in words and "last +0.100" in words


def plotted(run):
    """The paths of plot_runs() of one run."""
    return plot_runs([run], [run.name], run.parent / "figures")


def drawn_figures(monkeypatch, given):
    """{file stem: Figure} of plot_runs()."""
    figures = {}
    monkeypatch.setattr(curves, "save", lambda figure, stem: figures.update({stem.name: figure}) or [])
    curves.plot_runs(given, [run.name for run in given], given[0].parent / "figures")
    return figures


@pytest.mark.slow
def test_the_comparison_shows_train_and_validation_losses_of_every_run(home, monkeypatch):
    given = [write(home / name, rows(60, 20, floor)) for name, floor in (("a", 1.0), ("b", 2.0))]
    figure = drawn_figures(monkeypatch, given)["comparison"]
    for ax, ratio in zip(figure.axes[:2], (1.5, 1)):
        assert "alidation" not in ax.get_title("left")
        for run, colour in zip(given, COLOURS):
            lines = [line for line in ax.lines if line.get_color() == colour and len(line.get_xdata()) > 1]
            val, train = sorted(lines, key=lambda line: -line.get_linewidth())
            evals = read_log(run)[1]
            assert list(val.get_ydata()) == pytest.approx([row["val_loss"] * ratio for row in evals])
            assert list(train.get_ydata()) == pytest.approx([row["train_loss"] * ratio for row in evals])
            low, high = ax.get_ylim()
            assert low < train.get_ydata()[-1] < high
    assert "thin: train, evaluated" in {text.get_text() for text in figure.legends[0].get_texts()}


def of_characters(run, size):
    """A run whose tokens are characters of so many bytes in the mean."""
    return write(run, [{**row, "val_bpb": row["val_loss"] / math.log(2) / size,
                        "val_bpc": row["val_loss"] / math.log(2)} if "val_loss" in row else row
                       for row in rows(60, 20)])


def test_where_tokens_are_characters_losses_are_in_bits_for_each(home, monkeypatch):
    wide, = drawn_figures(monkeypatch, [of_characters(home / "a", 1.25)]).values()
    panels = {ax.get_title('left'): ax for ax in wide.axes}
    assert {"Bits per byte", "Bits per character"} < panels.keys()
    last, = (row["val_loss"] for row in read_log(home / "a")[1] if row["step"] == 60)
    for title, bits in (("Bits per byte", last / math.log(2) / 1.25),
                        ("Bits per character", last / math.log(2))):
        assert any(line.get_ydata()[-1] == pytest.approx(bits) for line in panels[title].lines)
    # one byte each: one curve, called both; beside a run of other tokens they do not compare
    same, = drawn_figures(monkeypatch, [of_characters(home / "b", 1)]).values()
    assert [ax.get_title("left") for ax in same.axes][0] == "Bits per byte, and per character"
    both = drawn_figures(monkeypatch, [home / "a", write(home / "c", rows(60, 20))])["comparison"]
    assert "Loss, nats per token" in {ax.get_title("left") for ax in both.axes}


def test_every_panel_has_numbers_on_its_x_axis_and_panels_line_up(home, monkeypatch):
    for name, run in (("one", of_characters(home / "a", 1)), ("two", of_characters(home / "b", 1.25))):
        figure, = drawn_figures(monkeypatch, [run]).values()
        figure.draw_without_rendering()
        edges = [(round(ax.get_position().x0, 3), round(ax.get_position().x1, 3)) for ax in figure.axes]
        assert all(any(label.get_text() and label.get_visible() for label in ax.get_xticklabels())
                   for ax in figure.axes), name
        assert len({*edges}) == (1 if name == "one" else 2), "one above the other, or in two columns"
        assert len({ax.get_xlim() for ax in figure.axes}) == 1


def test_a_comparison_of_runs_in_the_working_folder_lies_where_git_does_not_show_it(home, capsys):
    for name in ("out-a", "out-b"):
        write(home / name, rows(20, 10))
    assert main(["out-a", "out-b"]) == 0
    assert "out-a/figures/comparison-out-a+out-b.png" in capsys.readouterr().out
    assert sorted(path.name for path in home.iterdir()) == ["out-a", "out-b"]


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3, 16])
def test_no_label_of_a_figure_lies_under_a_curve(home, monkeypatch, n):
    """A diverged run goes through the upper right corner, where a label once stood."""
    def diverged(i):
        return [{**row, "val_loss": 1.0 + row["step"] / 20, "val_bpb": 1.5 + row["step"] / 15}
                if "val_loss" in row and row["step"] else row for row in rows(60, 10, 1 + i / 10)]
    given = [write(home / f"run_{i}", diverged(i)) for i in range(n)]
    for figure in drawn_figures(monkeypatch, given).values():
        assert hidden_labels(figure) == []
        assert any("from" in ax.get_title("right") for ax in figure.axes)


@pytest.mark.slow
def test_colour_follows_the_order_given_and_a_skipped_run_keeps_its_place(home, capsys):
    for name in "abc":
        write(home / "out" / name, rows(20, 10))
    (home / "out/b/log.jsonl").write_text("")
    assert main(["out/c", "out/b", "out/a", "out/c/", "--out", "elsewhere"]) == 0
    assert strokes(home / "out/c/figures/curves.svg") == {COLOURS[0]}
    assert strokes(home / "out/a/figures/curves.svg") == {COLOURS[2]}
    assert strokes(home / "elsewhere/comparison-c+b+a.svg") == {COLOURS[0], COLOURS[2]}
    printed = capsys.readouterr()
    assert printed.out.split()[-1] == "elsewhere/comparison-c+b+a.svg" and len(printed.out.split()) == 6
    assert printed.err == "out/b: log.jsonl has no rows to plot, skipped\n"


@pytest.mark.slow
def test_another_comparison_is_another_file(home, capsys):
    for name in "abc":
        write(home / "out" / name, rows(4, 2))

    def compared(*argv):
        assert main([*argv, "--out=all"]) == 0
        return capsys.readouterr().out.split()[-2:]
    assert compared("out/a", "out/b") == [f"all/comparison-a+b.{kind}" for kind in ("png", "svg")]
    before = (home / "all/comparison-a+b.svg").read_bytes()
    assert compared("out/a", "out/c")[1] == "all/comparison-a+c.svg"
    assert compared("out/a", "out/b", "--x=tokens")[1] == "all/comparison-by_tokens-a+b.svg"
    assert (home / "all/comparison-a+b.svg").read_bytes() == before


def test_comparisons_of_many_runs_have_names_of_their_own():
    names = [f"a_run_with_a_long_name_{i}" for i in range(9)]
    found = {plot_curves.name_of(names[:n], x) for n in range(2, 9) for x in ("step", "time")}
    assert len(found) == 14 and max(map(len, found)) <= LONGEST + 8


@pytest.mark.slow
def test_the_same_log_gives_the_same_bytes(home):
    run = write(home / "run", rows(20, 10))
    first = [path.read_bytes() for path in plotted(run)]
    assert [path.read_bytes() for path in plotted(run)] == first
    assert strokes(run / "figures/curves.svg") == {COLOURS[0]}


@pytest.mark.slow
def test_a_line_cut_in_half_is_named_and_the_rest_drawn(home, capsys):
    run = write(home / "run", "".join(json.dumps(r) + "\n" for r in rows(20, 10)) + '{"step": 21, "lo')
    train, evals = read_log(run)
    assert [r["step"] for r in train] == list(range(21)) and [r["step"] for r in evals] == [0, 10, 20]
    message = f"{run}: 1 broken line in log.jsonl, the first is line 25; the rest is used\n"
    assert capsys.readouterr().err == message
    assert len(plotted(run)) == 2


def test_what_is_no_row_is_passed_over(home, capsys):
    broken = ["7", "[]", '"x"', "{}", '{"loss": 1}', '{"step": "1", "loss": 1}', "\0\0"]
    run = write(home / "run", "\n".join(broken + ["", '{"step": 1, "note": 0}', '{"step": 2, "loss": 1}']))
    assert read_log(run) == ([{"step": 2, "loss": 1}], [])
    assert "7 broken lines" in capsys.readouterr().err


@settings(max_examples=60)
@given(EDITS, st.dictionaries(st.sampled_from(["step", "loss", "val_loss", "val_bpb", "adamw_lr"]), ANYTHING))
@pytest.mark.filterwarnings("error")
def test_a_log_with_any_damage_is_drawn_from_what_is_left_of_it(home, capsys, edits, values):
    """Cut, flipped and inserted bytes, and a row whose keys hold anything at all."""
    lines = [json.dumps(row) for row in [*rows(20, 10), {"step": 21, "loss": 1.0, **values}]]
    (home / "run").mkdir(exist_ok=True)
    (home / "run/log.jsonl").write_bytes(damaged("\n".join(lines).encode(), edits))
    found = curves_of(home / "run")
    assert found is None or np.isfinite(found.smooth).sum() == np.isfinite(found.loss).sum()
    assert all(line.startswith(f"{home / 'run'}: ") for line in capsys.readouterr().err.splitlines())


def test_after_a_resume_the_later_row_wins(home, capsys):
    run = write(home / "run", list(rows(30, 10))
                + [{**r, **({"loss": 9.0} if "loss" in r else {"val_loss": 9.0})}
                                                   for r in rows(40, 10) if r["step"] >= 20])
    train, evals = read_log(run)
    assert [r["step"] for r in train] == list(range(41)) and [r["step"] for r in evals] == [0, 10, 20, 30, 40]
    assert all((r["loss"] == 9.0) == (r["step"] >= 20) for r in train)
    assert [r["val_loss"] == 9.0 for r in evals] == [False, False, True, True, True]
    assert capsys.readouterr().err == ""


def test_training_rows_take_the_ratio_of_the_evaluations(home):
    c = curves_of(write(home / "run", rows()))
    assert c.ratio == pytest.approx(1.5) and np.allclose(c.gap, 0.1)
    assert math.isnan(curves_of(write(home / "none", [r for r in rows() if "loss" in r])).ratio)


def test_the_running_mean_is_centred_and_steps_over_nan(home, capsys):
    losses = [float(i) for i in range(80)]
    losses[40] = math.nan
    c = curves_of(write(home / "run", [{"step": i, "loss": v} for i, v in enumerate(losses)]))
    assert c.window == 5 and np.isnan(c.smooth[40]) and np.isfinite(np.delete(c.smooth, 40)).all()
    assert np.allclose(c.smooth[2:38], np.arange(2, 38)) and c.smooth[0] == 1.0
    assert c.smooth[41] == (39 + 41 + 42 + 43) / 4
    assert "1 loss(es) not finite, the first at step 40; drawn as gaps" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("log, said", [
    ([r for r in rows(20) if "loss" in r], "no evaluation rows yet"),
    ([r for r in rows(20) if "val_loss" in r], ""),
    (list(rows(0)), ""),
    ([{**r, "loss": math.nan} if "loss" in r else {**r, "val_loss": math.inf} for r in rows(20)],
     "not finite"),
    ([{"step": 3, "loss": None}], "not finite"),
    ([{**r, "loss": (-1) ** r["step"] * 1e308} if "loss" in r else r for r in rows(20)], "not finite"),
], ids=["training rows only", "evaluation rows only", "one step", "every loss NaN or inf", "null loss",
        "losses that overflow"])
@pytest.mark.filterwarnings("error")
def test_an_odd_log_is_drawn_all_the_same(home, capsys, log, said):
    paths = plotted(write(home / "out" / "run", log))
    assert [p.name for p in paths] == ["curves.png", "curves.svg"]
    assert all(p.stat().st_size > 5000 for p in paths)
    err = capsys.readouterr().err
    assert said in err and bool(said) == bool(err)


@pytest.mark.slow
def test_one_bad_run_does_not_stop_the_others(home, capsys):
    write(home / "out/good", rows(20, 10))
    shutil.copytree(home / "out/good", home / "out/lost")
    (home / "out/lost/log.jsonl").unlink()
    assert main([]) == 0
    printed = capsys.readouterr()
    assert printed.err == "out/lost: no log.jsonl, skipped\n"
    # one run: no comparison
    assert printed.out == "out/good/figures/curves.png\nout/good/figures/curves.svg\n"


def test_exit_1_when_nothing_can_be_plotted(home, capsys):
    (home / "out").mkdir()
    assert main([]) == 1
    assert capsys.readouterr().err == "nothing to plot: no runs under out\n"
    write(home / "out/empty", "")
    assert main(["out/empty"]) == 1
    assert "no rows to plot" in capsys.readouterr().err and plotted(home / "out/empty") == []


def test_time_that_restarts_is_said(home, capsys):
    run = write(home / "run", [{"step": i, "loss": 2.0, "elapsed_s": i % 5} for i in range(10)])
    curves_of(run, "time")
    assert "elapsed_s restarts" in capsys.readouterr().err


def test_an_unknown_folder_is_refused_with_the_nearest(home, capsys):
    for name in ("base", "routing_k4"):
        write(home / "out" / name, rows(0))
    with pytest.raises(SystemExit) as stop:
        main(["out/base", "out/routng_k4"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "out/routng_k4: no such run folder; did you mean out/routing_k4?\n"
    assert not (home / "out/base/figures").exists()


@pytest.mark.slow
@pytest.mark.parametrize("x, label", [("tokens", "training tokens"), ("time", "elapsed minutes")])
def test_other_axes(home, capsys, x, label):
    run = write(home / "run", rows(20, 10))
    assert main([str(run), "--x", x]) == 0 and label in text(run / "figures/curves.svg")
    bare = write(home / "bare", [{"step": 1, "loss": 2.0}])
    assert main([str(bare), "--x", x]) == 1 and "in log.jsonl, skipped" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_beyond_the_palette_are_told_apart(home, capsys):
    c = curves_of(write(home / "run", rows(4, 2)))
    runs = [(f"_$run{i}", c, COLOURS[i % 7], curves.DASHES[i // 7]) for i in range(9)]
    words = text(curves.draw(runs, home / "many")[1])
    assert all(f"{i + 1}: $run{i}" in words for i in range(9)) and "1: +0.100" in words


@pytest.mark.slow
def test_runs_on_different_datasets_are_named_and_said_not_to_compare(tmp_path, capsys):
    rows = [dict(step=s, tokens=s, train_loss=2.0, val_loss=2.0 - s / 100,
                 val_bpb=3.0 - s / 100, elapsed_s=1.0) for s in (0, 10, 20)]
    for name, dataset in (("a", "data/one"), ("b", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"train": {"dataset": dataset}}))
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert plot_curves.main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path)]) == 0
    assert "do not compare" in capsys.readouterr().err
    assert curves.dataset_name(tmp_path / "a") == "one" and curves.dataset_name(tmp_path) == "?"


# ---- heads ----


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 20, 60])
def test_every_entry_of_the_legend_is_drawn(home, monkeypatch, steps):
    """A line through one point is invisible without a marker: as after the first evaluation."""
    figures = []
    monkeypatch.setattr(curves, "save", lambda figure, stem: figures.append(figure) or [])
    c = curves_of(write(home / "out/run", rows(steps)))
    curves.draw([("run", c, COLOURS[0], "-")], home / "x")
    entries = {text.get_text() for text in figures[0].legends[0].get_texts()}
    lines = [line for ax in figures[0].axes for line in ax.lines if line.get_label() in entries]
    assert {line.get_label() for line in lines} == entries - {"val", "best val"}
    for line in lines:
        assert curves.points(line).shape[1] > 1 or line.get_marker() not in ("", "None"), line.get_label()


# ---- what cannot be written, and damaged logs of heads ----
