"""gpu_check.sh without a GPU: its parts are those that it lists, and no part stops the others.

The interpreter is a stand-in that writes down what it is asked to run.
"""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from helpers import ROOT

SCRIPT = ROOT / "gpu_check.sh"
TEXT = SCRIPT.read_text(encoding="utf-8")
PARTS = re.search(r'^PLAN="(.*)"$', TEXT, re.M)[1].split()
STAND_IN = f"""#!{sys.executable}
import os, sys, time
command = " ".join(sys.argv[1:])
with open(os.environ["CALLS"], "a") as file:
    file.write(command + "\\n")
print("ran", command, flush=True)
try:
    time.sleep(60 if os.environ.get("SLOW", "nothing") in command else 0)
except KeyboardInterrupt:
    sys.exit(130)
sys.exit(os.environ.get("BAD", "nothing") in command)
"""


def interruptible():
    """In a shell's background job SIGINT is ignored, and bash cannot trap what was ignored when it began."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def start(tmp_path):
    """start(parts, **environment) -> the running script; its files are in tmp_path."""
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)

    def run(*parts, **environment):
        paths = dict(PY=stand_in, OUT=tmp_path / "out", RUNS=tmp_path / "runs", CALLS=tmp_path / "calls")
        env = {**os.environ, "LIMIT": "30", **{k: str(path) for k, path in paths.items()}, **environment}
        return subprocess.Popen(["bash", str(SCRIPT), *parts], env=env, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=interruptible)
    return run


def summary(tmp_path):
    """{part: what became of it}."""
    lines = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    return {line.split()[0]: " ".join(line.split()[1:-2]) for line in lines}


def test_the_script_is_bash():
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0


def test_every_part_is_described_in_its_order_and_is_there():
    described = re.findall(r"^#   (\w+) +\d+  \S", TEXT, re.M)
    cases = re.findall(r"^  (\w+)\)$", TEXT, re.M)
    assert described == cases == PARTS
    assert PARTS[:3] == ["agree", "bench", "decode"]
    assert all(int(minutes) < 9 for minutes in re.findall(r"^#   \w+ +(\d+)  ", TEXT, re.M))


def test_programs_of_the_script_exist():
    programs = set(re.findall(r'"\$PY" (\w+\.py)', TEXT))
    modules = set(re.findall(r'"\$PY" -m ((?:tests|lab)\.[\w.]+)', TEXT))
    assert {"bench.py", "compare.py"} <= programs and modules == {"tests.lab.gpu.agree", "lab.bench.contexts"}
    programs |= {module.replace(".", "/") + ".py" for module in modules}
    assert all((ROOT / program).is_file() for program in programs)


@pytest.mark.slow
def test_a_part_that_fails_or_takes_too_long_stops_no_other(start, tmp_path):
    script = start("agree", "decode", "bench", LIMIT="2", SLOW="lab.bench.contexts", BAD="gpu.agree")
    printed, _ = script.communicate(timeout=60)
    assert script.returncode == 1
    assert summary(tmp_path) == {"agree": "failed", "decode": "cut short", "bench": "done"}
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 4 and sum("gpu.agree" in call for call in calls) == 2  # its second half ran too
    assert "decode       cut short" in printed and "ran bench.py" in (tmp_path / "out/log.txt").read_text()


def test_an_interrupt_ends_the_part_and_the_plan(start, tmp_path):
    script = start("decode", "bench", SLOW="lab.bench.contexts")
    while not (tmp_path / "calls").exists():
        time.sleep(0.05)
    time.sleep(0.5)
    script.send_signal(signal.SIGINT)
    script.communicate(timeout=30)
    assert summary(tmp_path) == {"decode": "failed"}


def test_a_part_that_there_is_not_shows_the_page(start, tmp_path):
    script = start("agree", "agreee")
    printed, _ = script.communicate(timeout=30)
    assert script.returncode == 2 and "./gpu_check.sh agree bench" in printed
    assert not (tmp_path / "calls").exists()
