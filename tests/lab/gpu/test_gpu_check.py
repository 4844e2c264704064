"""gpu_check.sh without a GPU: its parts are those that it lists, none stops the others, no figure is lost.

Parts are stand-ins here, but for the last test, which runs a real one at a small size.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import bench
from helpers import ROOT
from tests.lab.gpu import agree, on_card

PARSERS = {"bench.py": bench.arguments, "tests.lab.gpu.agree": agree.arguments}
# writes two rows, waits until they are among the results, and goes on as sys.argv says
WRITER = """
import json, os, signal, sys, time
from pathlib import Path
folder, then = Path(sys.argv[1]), sys.argv[2]
rows = [dict(what="train", name=name, tokens_per_s=1.0, ms=1.0, time_ratio=1.0, time_ratio_low=1.0,
             time_ratio_high=1.0, reference="plain", rounds=1) for name in ("plain", "sink")]
rows.append(dict(name="xsa", passed=True))
(folder / "rows.json").write_text(json.dumps(dict(rows=rows)))
until = time.monotonic() + 20
while f'"sink"' not in (folder.parent / "gpu-check.json").read_text().split(f'"{folder.name}"')[1]:
    assert time.monotonic() < until
    time.sleep(0.05)
print("has written", folder.name, flush=True)
if then == "interrupt":
    os.kill(os.getppid(), signal.SIGINT)
time.sleep(0 if then in ("done", "fail") else 60)
sys.exit(then == "fail")
"""


@pytest.fixture
def card(tmp_path, monkeypatch):
    """card({part: (seconds, what it does in the end)}, *arguments) -> (exit code, the results)."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(on_card, "GRACE", 0.5)

    def run(parts, *argv):
        def stand_in(seconds, then):
            command = [sys.executable, "-c", WRITER]
            return on_card.Part(seconds, lambda args, out: [[[*command, str(out(".")), then]]])
        monkeypatch.setattr(on_card, "PARTS", {name: stand_in(*each) for name, each in parts.items()})
        with pytest.raises(SystemExit) as e:
            on_card.main([*parts, "--small", "--device=cpu", f"--out={tmp_path / 'out'}", *argv])
        return e.value.code, json.loads((tmp_path / "out/gpu-check.json").read_text())
    yield run
    signal.signal(signal.SIGTERM, before)


def states(results):
    return {name: part["state"] for name, part in results["parts"].items()}


def test_every_part_is_described_with_its_time_and_its_commands_take_their_arguments(checkout, tmp_path):
    described = re.findall(r"^    (\w+) +(\d+) s  \S", on_card.__doc__, re.M)
    assert [*map(tuple, described)] == [(name, str(part.seconds)) for name, part in on_card.PARTS.items()]
    assert tuple(on_card.PARTS)[:4] == on_card.QUICK
    assert sum(on_card.PARTS[name].seconds for name in on_card.QUICK) < 60 * on_card.MINUTES
    assert {*on_card.MECHANISMS.split(",")} < {*bench.mechanisms()}
    for name in on_card.PARTS:
        for small in ([], ["--small"]):
            args = on_card.arguments([name, "--device=cpu", "--nanogpt", checkout, *small])
            groups = on_card.PARTS[name].commands(args, tmp_path.joinpath)
            for _, _, *argv in (argv for group in groups for argv in group):
                if argv[0] != "-m":
                    assert Path(argv[0]).is_file()
                elif argv[1] != "pytest":
                    assert (ROOT / f"{argv[1].replace('.', '/')}.py").is_file()
                program, rest = (argv[1], argv[2:]) if argv[0] == "-m" else (Path(argv[0]).name, argv[1:])
                PARSERS.get(program, lambda rest: None)(rest)


def test_a_part_that_fails_or_takes_too_long_stops_no_other(card, capsys):
    parts = {"bad": (60, "fail"), "slow": (2, "sleep"), "good": (60, "done")}
    code, results = card(parts)
    assert code == 1
    assert states(results) == {"bad": "failed", "slow": "cut short", "good": "done"}
    for part in results["parts"].values():
        assert [row["name"] for row in part["rows"]] == ["plain", "sink", "xsa"]
    printed = capsys.readouterr().out
    assert "has written slow" in printed and re.search(r"^slow +cut short ", printed, re.M)
    assert len(re.findall(r"^(?:bad|slow|good) +sink +1 ", printed, re.M)) == 3, "the table of all figures"
    assert "numbers: 3 of 3 agree with float64" in printed


def test_an_interrupt_and_the_end_of_the_time_keep_what_there_is_and_print_it(card, capsys):
    code, results = card({"first": (60, "interrupt"), "second": (60, "done")})
    assert code == 130 and states(results) == {"first": "interrupted", "second": "not begun"}
    assert len(results["parts"]["first"]["rows"]) == 3
    assert re.search(r"^first +sink +1 ", capsys.readouterr().out, re.M)
    code, results = card({"slow": (60, "sleep"), "late": (60, "done")}, "--minutes=0.03")
    assert code == 0 and states(results) == {"slow": "cut short", "late": "not begun"}


@pytest.mark.parametrize("argv, words", [
    (["agreee"], "gpu_check: no part agreee; there are agree, plain16"),
    (["--device=cpu"], "gpu_check: device=cpu is no CUDA GPU; --small tries the script without one"),
    (["--minutes=0"], "gpu_check: --minutes must be above 0")])
def test_what_makes_no_sense_is_refused_in_one_line(argv, words, tmp_path):
    with pytest.raises(SystemExit, match=f"^{words}[^\n]*$"):
        on_card.main([*argv, f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", ["-S", None])
def test_a_python_without_torch_is_named_in_one_line(options, tmp_path):
    """One without packages, and one that is not there."""
    python = tmp_path / "python"
    if options:
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" {options} "$@"\n')
        python.chmod(0o755)
    done = subprocess.run([ROOT / "gpu_check.sh", "--help"], env={**os.environ, "PY": str(python)},
                          capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.splitlines() == [
        f"gpu_check: {python} finds no torch: activate .venv, or set PY to a Python that has it"]


@pytest.mark.slow
def test_a_real_part_at_a_small_size(checkout, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        on_card.main(["mechanisms", "--small", "--device=cpu", "--nanogpt", checkout, f"--out={tmp_path}"])
    part = json.loads((tmp_path / "gpu-check.json").read_text())["parts"]["mechanisms"]
    assert not e.value.code and part["state"] == "done"
    assert [row["name"] for row in part["rows"]] == ["modern", "acag", "sink"]
    assert on_card.ANCHORS in capsys.readouterr().out
