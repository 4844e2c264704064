"""plot_curves.py --heads: measured heads, their states and events, as pictures and a table."""

import json
import math
import re

import numpy as np
import pytest
from matplotlib.image import imread

from nanoheads.curves import curves_of
from nanoheads.drawing import COLOURS
from helpers import curve, words_in, write_run
from lab.heads import pictures
from plot_curves import main


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
        row = dict(step=step, heads=heads, active=len(sum(heads, [])),
                   entropy=values, importance=values, utilisation=values,
                   gate=[[v and v + 0.1 for v in own] for own in values],
                   static_gate=[[v or 0.0 for v in own] for own in values],
                   state=[["withdrawn" if step > 20 and head == 2 else "active" for head in own]
                          for own in heads])
        if events:
            row["events"] = [dict(what=what, layer=layer, head=head) for what, layer, head in events]
        yield row


def write_heads(run_dir, heads=None, violations=()):
    """The folder of a run whose heads were measured; violations: their types, of head 0.2 at step 30."""
    write_run(run_dir, curve(40, 10))
    for name, rows in (("heads", measured() if heads is None else heads),
                       ("violations", [dict(layer=0, head=2, type=kind, step=30) for kind in violations])):
        (run_dir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def test_a_history_has_heads_under_their_own_numbers(home):
    h = pictures.history(write_heads(home / "run", violations=["forced", "blocked", "refused to policy"]))
    assert h.step.tolist() == [10, 20, 30, 40] and h.active.tolist() == [5, 5, 4, 5]
    for i, (step, heads, _) in enumerate(LIFE):
        want = np.array([[metric(step, layer, head) if head in own else None for head in range(3)]
                         for layer, own in enumerate(heads)], float)
        assert np.array_equal(h.gate[i], want + 0.1, equal_nan=True)
    # grown: it is there, its own gate is known, what was measured is not
    assert h.is_present[3, 0, 1] and np.isnan(h.gate[3, 0, 1]) and h.static_gate[3, 0, 1] == 0
    assert h.forced == [("forced", 30, 0, 2)]
    assert h.events == [("frozen", 20, 0, 1), ("kept", 20, 1, 2), ("pruned", 30, 0, 1), ("grown", 40, 0, 1)]
    assert [pictures.STATES[int(state)] for state in h.state[:, 0, 2]] == ["active"] * 2 + ["withdrawn"] * 2
    assert np.isnan(h.state[2, 0, 1])  # gone


def test_gates_are_drawn_where_heads_are_and_events_where_they_happened(home):
    h = pictures.history(write_heads(home / "run"))
    top, bottom = pictures.gates(h, "run").axes[:2]
    for layer, ax in enumerate((top, bottom)):
        mesh = ax.collections[0]
        assert np.array_equal(mesh.get_array().filled(math.nan), h.static_gate[:, layer].T, equal_nan=True)
    assert mesh.get_coordinates()[0, :, 0].tolist() == [10, 20, 30, 40, 50]
    marks = {line.get_marker(): line.get_xydata()[0].tolist() for line in top.lines + bottom.lines}
    assert {marker: y for marker, (_, y) in marks.items()} == {"s": 1, "X": 1, "^": 1, "o": 2}
    # what ends a head stands before its step, what begins behind it
    assert marks["X"][0] < 30 < marks["X"][0] + 3 and 40 < marks["^"][0] < 43 and 20 < marks["s"][0] < 23
    assert [t.get_text() for t in top.texts] == ["0.40", "0.00", "0.42", "at the end"]
    assert [t.get_text() for t in bottom.texts] == ["0.43", "–", "0.45"]  # there never was a head 1
    h = pictures.history(write_heads(home / "cut", measured(LIFE[:3])))
    assert [t.get_text() for t in pictures.gates(h, "run").axes[0].texts][:3] == ["0.30", "gone", "0.32"]
    # gates that depend on tokens alone are drawn as their mean
    same = [dict(row, static_gate=[[1.0] * len(own) for own in row["heads"]]) for row in measured(LIFE[:2])]
    h = pictures.history(write_heads(home / "mean", same))
    mesh = pictures.gates(h, "run").axes[0].collections[0]
    assert np.array_equal(mesh.get_array().filled(math.nan), h.gate[:, 0].T, equal_nan=True)


def test_heads_at_work_of_several_runs_lie_in_one_picture(home):
    """A measurement speaks until the next; the evaluation at 0 comes before all of them."""
    found = []
    for i, name in enumerate("ab"):
        h = pictures.history(write_heads(home / name))
        found.append((name, h, curves_of(home / name), COLOURS[i], pictures.SHAPES[i]))
    ax = pictures.active(found, "").axes[0]
    lines = [line for line in ax.lines if len(line.get_xdata()) == 4 and line.get_linestyle() == "-"]
    assert [line.get_color() for line in lines] == COLOURS[:2]
    for line, (_, h, c, *_) in zip(lines, found):
        assert np.allclose(line.get_xdata(), [5, 5, 4, 5], atol=0.1)
        assert np.array_equal(line.get_ydata(), c.bpb[1:])
    words = [t.get_text() for t in ax.texts]
    assert "step 40" in words and f"a\n{c.bpb[-1]:.3f}" in words
    c.step = c.step - 1
    assert pictures.points_at_evaluations(h, c)[1].tolist() == [5, 5, 4]


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_every_picture_of_each_run_a_table_and_the_comparison(home, capsys):
    """Of 19 measurements of a head four found it withdrawn. Head 2 of each layer stays active for 20 steps
    and withdrawn for 10, the others stay for 30, but for the one that is gone from step 30 to 40.

    Of the second run one head was measured once, without gates or states: what is not drawn is said.
    """
    write_heads(home / "out/a", violations=["forced", "forced", "blocked"])
    row = next(measured([(10, [[0]], [])]))
    row.update(gate=[[1.0]], static_gate=[[1.0]])
    del row["state"]
    write_heads(home / "out/b", [row])
    assert main(["--heads", "--out", "all"]) == 0
    done, kinds = capsys.readouterr(), ("gates", "states", "active")
    head, *lines = done.out.splitlines()
    assert re.split("  +", head) == ["run", "heads at work", *pictures.STATES, "steps in a state",
                                     "violations: forced", "blocked"]
    assert re.split("  +", lines[0]) == ["a", "5", "79 %", "0 %", "0 %", "21 %", "16", "2", "1"]
    stems = [*(f"out/a/figures/{kind}" for kind in kinds), "out/b/figures/active", "all/active"]
    assert lines[2:] == [f"{stem}.{ext}" for stem in stems for ext in ("png", "svg")]
    assert done.err.splitlines() == ["out/b: all gates are 1: no gates.png",
                                     "out/b: heads have no states, agency is off: no states.png"]
    words = {kind: words_in(home / f"out/a/figures/{kind}.svg") for kind in kinds}
    for kind, want in (("gates", "layer 1 | step | head | pruned | grown | closed, to be pruned"),
                       ("states", "active | withdrawn | step"),
                       ("active", "bits/byte, validation | heads at work")):
        assert all(word in words[kind] for word in want.split(" | ")), kind
    for path in (home / "out/a/figures").glob("*.png"):
        assert (imread(path)[..., :3].min(axis=2) < 0.9).mean() > 0.01, path


def test_broken_lines_are_left_out_and_heads_that_were_never_measured_are_named(home, capsys):
    run = write_heads(home / "damaged")
    lines = (run / "heads.jsonl").read_text().splitlines()
    lines[1] = lines[1][:90]
    lines.insert(3, "[35]")
    (run / "heads.jsonl").write_text("\n".join(lines))
    assert pictures.history(run).step.tolist() == [10, 30, 40]
    assert f"{run}: 2 broken lines in heads.jsonl, the first is line 2" in capsys.readouterr().err
    run = write_run(home / "out/never", curve(4, 2))
    for argv, words in (([str(run)], "train with --controller_log"), ([], "no measured runs under out")):
        assert main([*argv, "--heads"]) == 1
        assert words in capsys.readouterr().err
