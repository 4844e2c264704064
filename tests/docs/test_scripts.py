"""The example of docs/compare.md: it compares what passes the check, and keeps what is better."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT

PAGE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
CODE, = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)


@pytest.mark.parametrize("found, kept", [
    (dict(verdict="better", but_not_at=["time"]), ["a.py"]),
    (dict(verdict="better", but_not_at=["parameters", "FLOPs"]), []),
    (dict(verdict="unfinished", but_not_at=[]), []), ("not compared", []), ("not checked", [])])
def test_the_loop_keeps_what_is_better_at_equal_parameters_too(found, kept, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given, fails = [], {"not checked": "train.py", "not compared": "compare.py"}.get(str(found))

    def run(command):
        given.append(command[1:])
        if command[1] == "compare.py" and fails != "compare.py":
            Path("verdict.json").write_text(json.dumps(dict(comparisons=[dict(found, words="by 0.02")])))
        return SimpleNamespace(returncode=int(command[1] == fails))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["improve.py", "--jobs=2"])
    Path("ideas").mkdir()
    Path("ideas/a.py").touch()
    exec(compile(CODE, "improve.py", "exec"), {})
    assert [path.name for path in Path("kept").iterdir()] == kept
    assert [command[0] for command in given] == ["train.py", "compare.py"][:1 + (fails != "train.py")]
    assert all("--mechanism=ideas/a.py" in command for command in given)
    assert given[0][-1] == "--check" and (fails == "train.py" or given[1][-1] == "--jobs=2")
