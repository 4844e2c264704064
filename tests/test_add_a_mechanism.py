"""docs/add-a-mechanism.md: its diff is what stands in model.py; a new mechanism is tested by its diff alone.

Diffs are applied by their lines, wherever those stand: line numbers do not matter.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from model import MECHANISMS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "add-a-mechanism.md").read_text(encoding="utf-8")
TOY = (ROOT / "tests" / "toy_mechanism.diff").read_text(encoding="utf-8")


def hunks(diff):
    """Yield (file, what stood there, what stands there instead) of a unified diff, in whole lines."""
    for part in re.split(r"^--- .*\n", diff, flags=re.M)[1:]:
        head, *bodies = re.split(r"^@@ .*\n", part, flags=re.M)
        for body in bodies:
            lines = body.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] not in other) for other in "+-")
            yield head.strip().removeprefix("+++ b/"), old, new


def apply(diff, folder):
    """Apply a diff to the files of a folder; what it replaces has to stand there once."""
    for file, old, new in hunks(diff):
        text = (folder / file).read_text(encoding="utf-8")
        assert f"\n{text}".count(f"\n{old}") == 1, f"{file} has moved on; the diff no longer fits at:\n{old}"
        (folder / file).write_text(f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:], encoding="utf-8")


def reverse(diff):
    swapped = {"+": "-", "-": "+"}
    return "".join(line if line[:3] in ("---", "+++") else swapped.get(line[0], line[0]) + line[1:]
                   for line in diff.splitlines(keepends=True))


# ---- the page ----

def test_the_diff_of_the_page_is_what_stands_in_the_code(tmp_path):
    """Taken back, it leaves no trace of the mechanism; put in again, it gives the very same files."""
    diff, = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.M | re.S)
    files = dict.fromkeys(file for file, _, _ in hunks(diff))
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    apply(reverse(diff), tmp_path)
    for file in files:
        assert not re.search("xsa|ExclusiveAttention", (tmp_path / file).read_text(encoding="utf-8"))
    apply(diff, tmp_path)
    assert all((tmp_path / file).read_text() == (ROOT / file).read_text() for file in files)
    assert sum(line[0] == "+" for line in diff.splitlines()) - len(files) <= 40


def test_the_oracle_of_the_page_is_that_of_the_tests():
    oracle, = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    assert oracle in (ROOT / "tests" / "oracle.py").read_text(encoding="utf-8")


def test_a_diff_that_does_not_fit_is_refused(tmp_path):
    (tmp_path / "model.py").write_text("HEAD_MECHANISMS = ()\n")
    with pytest.raises(AssertionError, match="model.py has moved on"):
        apply(TOY, tmp_path)


# ---- one more mechanism ----

COPIED = ("*.py", "pyproject.toml", "data/*.py", "nanoheads/**/*.py", "tests/conftest.py",
          "tests/slow.txt", "tests/oracle.py", "tests/test_promises.py")


@pytest.fixture
def invariants(tmp_path):
    """invariants(diff, which) -> (tests passed, {names of those that failed}) in a copy with the diff."""
    def run(diff, which):
        for pattern in COPIED:
            for path in ROOT.glob(pattern):
                copy = tmp_path / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
        apply(diff, tmp_path)
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "PYTHON"))}
        command = [sys.executable, "-m", "pytest", "-rf", "-p", "no:cacheprovider", "-p", "no:xdist",
                   "tests/test_promises.py", "-k", which]
        done = subprocess.run(command, cwd=tmp_path, env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True,
                              text=True, timeout=300)
        passed = re.search(r"^(\d+) passed|, (\d+) passed", done.stdout, re.M)
        assert passed, done.stdout + done.stderr
        return int(passed[1] or passed[2]), set(re.findall(r"^FAILED \S*::(\w+)", done.stdout, re.M))
    return run


def test_a_new_mechanism_is_tested_by_its_diff_alone(invariants):
    """A class, a flag and a name: then every invariant knows it, alone and with every other mechanism."""
    assert "position_gate" not in MECHANISMS
    passed, failed = invariants(TOY, "position_gate or every_pair")
    assert failed == set() and passed >= 20


OWN = "position_gate] and not compiles"  # alone, the quick ones
MISTAKES = {
    "its tensor's head axis is not named": (
        '+    def head_axes(self):\n+        return [HeadAxis(self, "weight")]\n+\n', "",
        {"test_every_tensor_with_a_head_axis_is_named",
         "test_packed_is_the_same_function_without_the_closed_heads"}),
    "positions are those of the piece that is read": (
        "(ctx.positions if ctx.positions.dim() == 1 else ctx.positions[:, None])",
        "torch.arange(h.x.size(1))",
        {"test_cached_equals_uncached", "test_rows_padded_and_read_in_pieces_equal_rows_alone"}),
    "it reads the mean of the whole text": (
        "t.log()", "h.x.mean((1, 2))[:, None, None]", {"test_future_tokens_do_not_leak"}),
    "it starts at another value": (
        '{"weight": 0.0}', '{"weight": 0.5}', {"test_neutral_equals_the_plain_gpt"})}


@pytest.mark.parametrize("right, wrong, caught", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_new_mechanism_is_caught(right, wrong, caught, invariants):
    assert TOY.count(right) == 1
    passed, failed = invariants(TOY.replace(right, wrong), OWN)
    assert failed >= caught and passed >= 10
