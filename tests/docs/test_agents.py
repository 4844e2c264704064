"""The example of docs/compare.md: its mechanism keeps the promises, its loop keeps what is better."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers import ROOT

import train

PAGE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
CODE, = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)


def loop(verdicts, monkeypatch):
    """Run the script with made-up verdicts, [(verdict, difference)]; the commands that it gave."""
    given, left = [], list(verdicts)

    def run(command):
        given.append(command[1:])
        if command[1] == "compare.py":
            verdict, difference = left.pop(0)
            row = dict(verdict=verdict, mean=difference, words=f"{verdict} by {difference}")
            with open("verdict.json", "w") as file:
                json.dump(dict(comparisons=[row]), file)
        return SimpleNamespace(returncode=0)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["improve.py", "--jobs=2"])
    exec(compile(CODE, "improve.py", "exec"), {})
    return given


@pytest.mark.parametrize("verdicts, times", [
    ([("undecided", -0.02)], 0), ([("better", -0.02), ("better", -0.01)], 1),
    ([("better", -0.02), ("better", -0.03), ("worse", 0.1)], 2)])
def test_the_loop_keeps_what_is_better_than_before(verdicts, times, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = loop(verdicts, monkeypatch)
    assert f"before, {times} times in a row" in (tmp_path / "mine.py").read_text()
    assert len(given) == 2 * len(verdicts) and given[1][-1] == "--jobs=2"


@pytest.mark.slow
def test_its_mechanism_keeps_the_promises(tmp_path, monkeypatch, own_mechanisms_go):
    monkeypatch.chdir(tmp_path)
    loop([("better", -0.02), ("worse", 0.1)], monkeypatch)
    train.main(["--scale=tiny", f"--mechanism={tmp_path / 'mine.py'}", "--check", "--json=check.json"])
    found = json.loads((tmp_path / "check.json").read_text())
    assert found and all(row["broken"] is None for row in found)
