"""plot_curves.py --heads: measured heads, their states and events, as pictures."""

import json
import math
import re

import numpy as np
import pytest
from matplotlib.image import imread

from nanoheads.curves import curves_of
from nanoheads.drawing import COLOURS
from helpers import curve as rows, words_in as text, write_run as write
from lab.heads import pictures as plot_heads
from plot_curves import main


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


NAN = math.nan


# step, heads of each layer, what happened: in layer 0 head 1 is pruned and comes back
LIFE = [(10, [[0, 1, 2], [0, 2]], []),
        (20, [[0, 1, 2], [0, 2]], [("frozen", 0, 1), ("kept", 1, 2)]),
        (30, [[0, 2], [0, 2]], [("pruned", 0, 1)]),
        (40, [[0, 1, 2], [0, 2]], [("grown", 0, 1)])]


def metric(step, layer, head):
    """What the made-up metrics are; of a head that has just grown nothing is known."""
    return None if (step, layer, head) == (40, 0, 1) else (step + 3 * layer + head) / 100


def measured(life=LIFE):
    """Rows of heads.jsonl: all metrics are metric(), the gate a little more."""
    for step, heads, events in life:
        values = [[metric(step, layer, head) for head in own] for layer, own in enumerate(heads)]
        row = dict(step=step, heldout=2.0, seconds=0.1, heads=heads, active=len(sum(heads, [])),
                   entropy=values, importance=values, utilisation=values,
                   gate=[[v and v + 0.1 for v in own] for own in values],
                   static_gate=[[v or 0.0 for v in own] for own in values],
                   state=[["withdrawn" if step > 20 and head == 2 else "active" for head in own]
                          for own in heads])
        if events:
            row["events"] = [dict(what=what, layer=layer, head=head) for what, layer, head in events]
        yield row


def write_heads(run_dir, heads=None, log=None):
    write(run_dir, rows(40, 10) if log is None else log)
    heads = measured() if heads is None else heads
    (run_dir / "heads.jsonl").write_text("".join(json.dumps(row) + "\n" for row in heads))
    return run_dir


def test_heads_stand_under_their_own_numbers(home):
    h = plot_heads.history(write_heads(home / "run"))
    assert h.step.tolist() == [10, 20, 30, 40] and h.active.tolist() == [5, 5, 4, 5]
    for i, (step, heads, _) in enumerate(LIFE):
        want = [[metric(step, layer, head) if head in own else None for head in range(3)]
                for layer, own in enumerate(heads)]
        want = np.array(want, float)
        assert np.allclose(h.gate[i], want + 0.1, equal_nan=True)
        assert np.array_equal(h.gate[i], want + 0.1, equal_nan=True)
    assert h.is_present.sum((1, 2)).tolist() == [5, 5, 4, 5]
    # grown: it is there, its own gate is known, what was measured is not
    assert h.is_present[3, 0, 1] and np.isnan(h.gate[3, 0, 1]) and h.static_gate[3, 0, 1] == 0
    # by place in the list head 2 of the second layer, which has no head 1, would be head 1
    assert np.isnan(h.gate[:, 1, 1]).all() and np.isfinite(h.gate[:, 1, 2]).all()


def test_states_events_and_forced_violations_are_read(home):
    run = write_heads(home / "run")
    kinds = [(30, "forced"), (30, "blocked"), (40, "refused to policy"), (40, "forced")]
    (run / "violations.jsonl").write_text("".join(
        json.dumps(dict(layer=0, head=2, type=kind, gate=1.0, state="withdrawn", step=step, time=0)) + "\n"
        for step, kind in kinds))
    h = plot_heads.history(run)
    assert h.forced == [("forced", 30, 0, 2), ("forced", 40, 0, 2)]
    assert h.events == [("frozen", 20, 0, 1), ("kept", 20, 1, 2), ("pruned", 30, 0, 1), ("grown", 40, 0, 1)]
    withdrawn = plot_heads.STATES.index("withdrawn")
    assert h.state[:, 0, 2].tolist() == [0, 0, withdrawn, withdrawn]
    assert np.isnan(h.state[2, 0, 1])  # gone


def test_a_table_has_a_line_for_each_run(home):
    """Of 19 measurements of a head four found it withdrawn. Head 2 of each layer stays active for 20 steps
    and withdrawn for 10, the others stay for 30, but for the one that is gone from step 30 to 40.
    """
    for name, forced in (("a", 0), ("b", 2)):
        run = write_heads(home / name)
        (run / "violations.jsonl").write_text("".join(
            json.dumps(dict(layer=0, head=2, type=kind, step=30)) + "\n"
            for kind in ["forced"] * forced + ["blocked"]))
    histories = [(name, plot_heads.history(home / name)) for name in "ab"]
    assert plot_heads.stay_lengths(histories[0][1]) == [30, 10, 0, 20, 10, 30, 20, 10]
    head, *lines = plot_heads.table_of_runs(histories).splitlines()
    assert re.split("  +", head) == ["run", "heads at work", *plot_heads.STATES, "steps in a state",
                                     "violations: forced", "blocked"]
    for line, name, forced in zip(lines, "ab", "02", strict=True):
        assert re.split("  +", line) == [name, "5", "79 %", "0 %", "0 %", "21 %", "16", forced, "1"]


def test_a_measurement_speaks_until_the_next(home):
    assert plot_heads.edges(np.array([10, 20, 35])).tolist() == [10, 20, 35, 47.5]
    assert plot_heads.edges(np.array([10])).tolist() == [10, 11]
    h = plot_heads.history(write_heads(home / "run"))
    c = curves_of(home / "run")
    step, n, bpb = plot_heads.points_at_evaluations(h, c)  # the evaluation at 0 comes before all measurements
    assert step.tolist() == [10, 20, 30, 40] and n.tolist() == [5, 5, 4, 5]
    assert bpb.tolist() == c.bpb[1:].tolist()
    c.step = c.step + 5
    assert plot_heads.points_at_evaluations(h, c)[1].tolist() == [5, 5, 4, 5]
    c.step = c.step - 6
    assert plot_heads.points_at_evaluations(h, c)[1].tolist() == [5, 5, 4]


@pytest.mark.slow
def test_gates_are_drawn_where_heads_are_and_events_where_they_happened(home):
    h = plot_heads.history(write_heads(home / "run"))
    figure = plot_heads.gates(h, "run")
    top, bottom = figure.axes[:2]
    for layer, ax in enumerate((top, bottom)):
        mesh = ax.collections[0]
        assert np.array_equal(mesh.get_array().filled(NAN), h.static_gate[:, layer].T, equal_nan=True)
    assert mesh.get_coordinates()[0, :, 0].tolist() == [10, 20, 30, 40, 50]
    marks = {line.get_marker(): line.get_xydata()[0].tolist() for line in top.lines + bottom.lines}
    assert {marker: y for marker, (_, y) in marks.items()} == {"s": 1, "X": 1, "^": 1, "o": 2}
    # what ends a head stands before its step, what begins behind it
    assert marks["X"][0] < 30 < marks["X"][0] + 3 and 40 < marks["^"][0] < 43 and 20 < marks["s"][0] < 23
    words = [t.get_text() for t in top.texts]
    assert words == ["0.40", "0.00", "0.42", "at the end"]
    assert [t.get_text() for t in bottom.texts] == ["0.43", "–", "0.45"]  # there never was a head 1
    h = plot_heads.history(write_heads(home / "cut", measured(LIFE[:3])))
    assert [t.get_text() for t in plot_heads.gates(h, "run").axes[0].texts][:3] == ["0.30", "gone", "0.32"]


def test_gates_that_depend_on_tokens_alone_are_drawn_as_their_mean(home):
    same = [dict(row, static_gate=[[1.0] * len(own) for own in row["heads"]]) for row in measured(LIFE[:2])]
    h = plot_heads.history(write_heads(home / "run", same))
    mesh = plot_heads.gates(h, "run").axes[0].collections[0]
    assert np.array_equal(mesh.get_array().filled(NAN), h.gate[:, 0].T, equal_nan=True)
    for row in same:
        row.update(gate=row["static_gate"], events=[])
    h = plot_heads.history(write_heads(home / "shut", same))
    assert plot_heads.gates(h, "run") is None  # nothing to see


def test_active_heads_of_several_runs_lie_in_one_picture(home):
    found = []
    for i, name in enumerate("ab"):
        h = plot_heads.history(write_heads(home / name))
        found.append((name, h, curves_of(home / name), COLOURS[i], plot_heads.SHAPES[i]))
    ax = plot_heads.active(found, "").axes[0]
    lines = [line for line in ax.lines if len(line.get_xdata()) == 4 and line.get_linestyle() == "-"]
    assert [line.get_color() for line in lines] == COLOURS[:2]
    for line, (_, h, c, *_) in zip(lines, found):
        assert np.allclose(line.get_xdata(), [5, 5, 4, 5], atol=0.1)
        assert np.array_equal(line.get_ydata(), c.bpb[1:])
    words = [t.get_text() for t in ax.texts]
    assert "step 40" in words and f"a\n{c.bpb[-1]:.3f}" in words
    assert plot_heads.active([("a", h, None, "", "")], "") is None


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_heads_draws_every_picture_of_a_run_and_the_comparison(home, capsys):
    for name in "ab":
        write_heads(home / "out" / name)
    assert main(["--heads", "--out", "all"]) == 0
    done = capsys.readouterr()
    pictures = ("gates", "states", "active")
    stems = [f"out/{name}/figures/{picture}" for name in "ab" for picture in pictures] + ["all/active"]
    assert done.err == ""
    head, a, b, *paths = done.out.splitlines()
    assert head.split()[0] == "run" and [line.split()[:2] for line in (a, b)] == [["a", "5"], ["b", "5"]]
    assert paths == [f"{stem}.{ext}" for stem in stems for ext in ("png", "svg")]
    words = {picture: text(home / f"out/a/figures/{picture}.svg") for picture in pictures}
    for picture, want in (("gates", "layer 1 | step | head | pruned | grown | closed, to be pruned"),
                          ("states", "active | withdrawn | step"),
                          ("active", "bits/byte, validation | heads at work")):
        assert all(word in words[picture] for word in want.split(" | ")), picture
    for path in (home / "out/a/figures").glob("*.png"):
        assert (imread(path)[..., :3].min(axis=2) < 0.9).mean() > 0.01, path


@pytest.mark.slow
def test_one_head_measured_once_without_gates_or_states(home, capsys):
    row = next(measured([(10, [[0]], [])]))
    row.update(gate=[[1.0]], static_gate=[[1.0]])
    del row["state"]
    run = write_heads(home / "run", [row])
    assert main([str(run), "--heads"]) == 0
    done = capsys.readouterr()
    assert re.findall(r"(\w+)\.png", done.out) == ["active"]
    assert done.err.splitlines() == [
        f"{run}: all gates are 1: no gates.png",
        f"{run}: heads have no states, agency is off: no states.png"]


def test_damaged_measurements_are_named_and_the_rest_drawn(home, capsys):
    run = write_heads(home / "run")
    lines = (run / "heads.jsonl").read_text().splitlines()
    lines[1] = lines[1][:90]
    lines.insert(3, "[35]")
    (run / "heads.jsonl").write_text("\n".join(lines))
    assert plot_heads.history(run).step.tolist() == [10, 30, 40]
    assert capsys.readouterr().err == \
        f"{run}: 2 broken lines in heads.jsonl, the first is line 2; the rest is used\n"


def test_a_run_whose_heads_were_not_measured_is_said(home, capsys):
    run = write(home / "out/run", rows(4, 2))
    assert main([str(run), "--heads"]) == 1
    said = f"{run}: no heads.jsonl; train with --controller_log to have the heads measured\nnothing to plot\n"
    assert capsys.readouterr().err == said
    assert main(["--heads"]) == 1
    assert capsys.readouterr().err == "nothing to plot: no measured runs under out\n"
