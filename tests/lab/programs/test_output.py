"""What programs print: output that cannot be written ends each in one line and with an error's status, what
an encoding cannot show is a question mark, and names do not steer the terminal.
"""
import io
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from helpers import TINY
from helpers import ROOT
from lab_helpers import OF_LAB

import compare
import train

full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
PROGRAMS = [*sorted(path.stem for path in ROOT.glob("*.py") if path.stem != "model"),
            *(f"lab.{name}" for name in OF_LAB)]


def said_when_full(*command):
    """What a program whose standard output is a full disk says on stderr; its status is an error's."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, *map(str, command)], stdout=full, stderr=subprocess.PIPE,
                              text=True, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    return done.stderr


@pytest.mark.slow
@full_disk
@pytest.mark.parametrize("program", ["train", "compare"])
def test_help_on_a_full_disk_is_one_line(program):
    """The other programs' --help is argparse's, which takes a full disk for written."""
    said = said_when_full(f"{program}.py", "--help")
    assert said == f"{program}: input or output: No space left on device\n"


@pytest.mark.slow
@full_disk
def test_what_programs_print_on_a_full_disk_is_one_line(bytes_data, tmp_path):
    keys = [f"--{key}={value}" for key, value in TINY.items()]
    train.main([*keys, f"--dataset={bytes_data}", f"--out_dir={tmp_path / 'run'}"])
    for command in (["train.py", *keys, f"--dataset={bytes_data}", f"--out_dir={tmp_path / 'other'}"],
                    ["evaluate.py", "--ckpt", tmp_path / "run", "--device=cpu"],
                    ["-m", "lab.prune", "--ckpt", tmp_path / "run", "--device=cpu", "--to=0.5", "--by=random",
                     "--rounds=0"],
                    ["-m", "lab.export_hf", "--ckpt", tmp_path / "run", "--out", tmp_path / "hf"],
                    ["plot_curves.py", tmp_path / "run"],
                    ["sample.py", "--ckpt", tmp_path / "run", "--device=cpu", "--max_new_tokens=3"]):
        lines = [line for line in said_when_full(*command).splitlines() if "\r" not in line]
        program = command[1].removeprefix("lab.") if command[0] == "-m" else command[0].removesuffix(".py")
        assert lines == [f"{program}: input or output: No space left on device"]


@pytest.mark.parametrize("name", OF_LAB)
def test_a_program_of_the_lab_that_is_run_as_a_script_says_how_to_type_it(name, tmp_path):
    done = subprocess.run([sys.executable, ROOT / f"lab/{name}.py", "--ckpt", "a b"], cwd=tmp_path, text=True,
                          capture_output=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{name}: type, in the repository's folder: python -m lab.{name} --ckpt 'a b'\n"


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error():
    done = subprocess.run(f"{sys.executable} evaluate.py --help | head -1", shell=True, cwd=ROOT,
                          capture_output=True, text=True)
    assert done.stdout.startswith("usage") and done.stderr == ""


# ---- encodings that lack some characters ----

def strict(monkeypatch, encoding):
    """A standard output that refuses what its encoding lacks; returns a function: what was printed so far."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, errors="strict"))

    def shown():
        sys.stdout.flush()
        return raw.getvalue().decode(encoding)
    return shown


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_shown_whatever_the_encoding(program, monkeypatch):
    shown = strict(monkeypatch, "ascii")
    with pytest.raises(SystemExit) as e:
        import_module(program).main(["--help"])
    print("…")
    called = f"-m {program}" if program.startswith("lab.") else f"{program}.py"
    assert not e.value.code and f"python {called}" in shown() and shown().endswith("\n?\n")


def test_all_else_that_runs_prints_in_the_same_way():
    """Every script of data/."""
    for path in ROOT.glob("data/**/*.py"):
        text = path.read_text(encoding="utf-8")
        if "__main__" in text:
            assert text.endswith('if __name__ == "__main__":\n    run(main)\n')


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_tables_lose_no_more_than_a_character(encoding, args, tmp_path, monkeypatch):
    """A dash for steps that are not known, ± behind a mean, and a multiplication sign, each a column wide."""
    shown = strict(monkeypatch, encoding)
    train.main(args(max_iters=3))
    state = torch.load(tmp_path / "run/best.pt", weights_only=True)
    del state["step"]
    torch.save(state, tmp_path / "other.pt")
    ckpts = ["--ckpt", str(tmp_path / "run"), "--ckpt", str(tmp_path / "other.pt")]
    import_module("evaluate").main(ckpts)
    assert re.search(r"run +\d.* 3 .*\n.*other.pt +\d.* \? ", shown())
    import_module("lab.probe").main(["heads", *ckpts, "--tokens=64"])
    assert re.search(r"other.pt .*[+-]\d\.\d{4} [?±]\d\.\d{4}", shown())
    (tmp_path / "scores.csv").write_text("variant,seed,score,tokens\n" + "".join(
        f"{variant},{seed},{3 + 0.01 * seed},{tokens}\n"
        for variant, tokens in (("plain", 10), ("wider", 20)) for seed in range(3)))
    monkeypatch.chdir(tmp_path)
    compare.main(["scores", str(tmp_path / "scores.csv")])
    assert "2.00 times plain's tokens" in shown()
