"""Standard output that cannot be written ends every program in one line and with an error's status."""
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY

import train

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")


def said_when_full(*command):
    """What a program whose standard output is a full disk says on stderr; its status is an error's."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, *map(str, command)], stdout=full, stderr=subprocess.PIPE,
                              text=True, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("program", ["train", "compare"])
def test_help_on_a_full_disk_is_one_line(program):
    """The other programs' --help is argparse's, which takes a full disk for written."""
    said = said_when_full(f"{program}.py", "--help")
    assert said == f"{program}: input or output: No space left on device\n"


def test_what_programs_print_on_a_full_disk_is_one_line(bytes_data, tmp_path):
    keys = [f"--{key}={value}" for key, value in TINY.items()]
    train.main([*keys, f"--dataset={bytes_data}", f"--out_dir={tmp_path / 'run'}"])
    for command in (["train.py", *keys, f"--dataset={bytes_data}", f"--out_dir={tmp_path / 'other'}"],
                    ["evaluate.py", "--ckpt", tmp_path / "run", "--device=cpu"],
                    ["prune.py", "--ckpt", tmp_path / "run", "--device=cpu", "--to=0.5", "--by=random",
                     "--rounds=0"],
                    ["export_hf.py", "--ckpt", tmp_path / "run", "--out", tmp_path / "hf"],
                    ["plot_curves.py", tmp_path / "run"],
                    ["sample.py", "--ckpt", tmp_path / "run", "--device=cpu", "--max_new_tokens=3"]):
        lines = [line for line in said_when_full(*command).splitlines() if "\r" not in line]
        assert lines == [f"{command[0][:-3]}: input or output: No space left on device"]


def test_a_reader_that_has_seen_enough_is_no_error():
    done = subprocess.run(f"{sys.executable} evaluate.py --help | head -1", shell=True, cwd=ROOT,
                          capture_output=True, text=True)
    assert done.stdout.startswith("usage") and done.stderr == ""
