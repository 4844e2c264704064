"""How programs begin: threads wait briefly unless the user decides, Ctrl-C while they import is one line."""
import importlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest

import nanoheads
from nanoheads import prepare, threads
from helpers import ROOT
from lab_helpers import OF_LAB

PROGRAMS = [path.name for path in sorted(ROOT.glob("*.py"))
            if "__main__" in path.read_text()]
PROGRAMS += [f"lab/{name}.py" for name in OF_LAB]
# imports a program up to the moment where it asks for torch (or, if it never does, to its end), and says what
# the environment is then
UP_TO_TORCH = """
import atexit, json, os, runpy, sys
@atexit.register
def say():
    print("\\n" + json.dumps({k: v for k, v in os.environ.items() if k.startswith(("GOMP", "OMP", "KMP"))}))
class AtTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.exit(0)
sys.meta_path.insert(0, AtTorch())
sys.argv = [sys.argv[1], "--help"]
folder, name = os.path.split(sys.argv[0])
if os.path.basename(folder) == "lab":  # started as modules
    runpy.run_module("lab." + name.removesuffix(".py"), run_name="__main__", alter_sys=True)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def environment_at_torch(program, **env):
    without = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP", "OMP", "KMP"))}
    done = subprocess.run([sys.executable, "-c", UP_TO_TORCH, str(ROOT / program)], cwd=ROOT, text=True,
                          capture_output=True, env={**without, "PYTHONPATH": str(ROOT), **env}, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_these_are_the_programs():
    assert {"train.py", "sample.py", "evaluate.py", "compare.py", "bench.py", "lab/probe.py"} <= set(PROGRAMS)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems' OpenMP is left as it is")
@pytest.mark.parametrize("program", [*PROGRAMS, "lab/label.py"])
def test_threads_are_told_to_wait_briefly_before_torch_is_imported(program):
    assert environment_at_torch(program) == {"GOMP_SPINCOUNT": "10000"}


@pytest.mark.slow
@pytest.mark.parametrize("name, value", [("GOMP_SPINCOUNT", "5"), ("OMP_WAIT_POLICY", "active"),
                                         ("KMP_BLOCKTIME", "0")])
def test_what_the_user_has_set_counts(name, value):
    assert environment_at_torch("train.py", **{name: value}) == {name: value}


def test_the_number_of_threads_says_nothing_of_how_they_wait(monkeypatch):
    for name in threads.WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(sys, "platform", "linux")
    threads.wait_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "10000"


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_left_as_they_are(monkeypatch, system):
    for name in threads.WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", system)
    threads.wait_briefly()
    assert not any(name in os.environ for name in threads.WAIT_VARIABLES)


def test_tests_wait_briefly_too():
    assert any(name in os.environ for name in threads.WAIT_VARIABLES) or sys.platform != "linux"


def processor_of(monkeypatch, tmp_path, text):
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr("builtins.open", lambda path, *args, _open=open, **kw: _open(
        tmp_path / "cpuinfo" if path == "/proc/cpuinfo" else path, *args, **kw))
    return threads.processor()


def test_the_processor_is_named_with_its_generation(monkeypatch, tmp_path):
    text = ("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n"
            "model name\t: AMD EPYC\npower management:\n\nprocessor\t: 1\nmodel name\t: another\n")
    assert processor_of(monkeypatch, tmp_path, text) == "AMD EPYC (family 26, model 2)"


def test_a_processor_without_a_name_gets_what_the_system_says(monkeypatch, tmp_path):
    found = processor_of(monkeypatch, tmp_path, "processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert found and "family" not in found


# ---- Ctrl-C ----

# imports a program up to the moment where it asks for torch or numpy, and does there what standard input says
AT_IMPORT = """
import os, runpy, signal, sys
class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name in ("numpy", "torch"):
            sys.meta_path.remove(self)
            exec(sys.stdin.read())
sys.meta_path.insert(0, AtImport())
sys.argv = sys.argv[1:]
folder, name = os.path.split(sys.argv[0])
if os.path.basename(folder) == "lab":  # started as modules
    runpy.run_module("lab." + name.removesuffix(".py"), run_name="__main__", alter_sys=True)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
IN_DATA = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("data/*/prepare.py"))]
CTRL_C = "os.kill(os.getpid(), signal.SIGINT)"


def at_import(program, code, **more):
    argv = ["heads"] if program == "lab/probe.py" else []  # a probe is imported when its name is known
    return subprocess.run([sys.executable, "-c", AT_IMPORT, str(ROOT / program), *argv, "--help"], input=code,
                          text=True, timeout=60, capture_output=True, cwd=ROOT, **more,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill() asks nobody there")
@pytest.mark.parametrize("program", [*PROGRAMS, "lab/label.py", "data/prepare_text.py", *IN_DATA])
def test_ctrl_c_while_a_program_imports_is_one_line(program):
    done = at_import(program, CTRL_C)
    name = program.split("/")[-1].removesuffix(".py")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"\n{name}: interrupted\n")


def test_every_program_is_one_of_which_ctrl_c_ends_quietly():
    assert {f"{name}.py" for name in nanoheads.PROGRAMS} == {name for name in PROGRAMS if "/" not in name}


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill() asks nobody there")
def test_a_program_of_ones_own_gets_its_keyboard_interrupt(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(f"""
import nanoheads.threads, os, signal
try:
    {CTRL_C}
except KeyboardInterrupt:
    print("saved")
""")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "saved\n", "")


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is started with signals ignored there")
def test_where_a_shell_has_it_ignored_ctrl_c_stays_ignored():
    """A job in the background of a script."""
    done = at_import("plot_curves.py", f"{CTRL_C}\nprint('goes on', flush=True)\nos._exit(0)",
                     preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")


@pytest.mark.parametrize("program, argv", [
    ("train", ["--nope"]), ("compare", ["--nope"]), ("sample", ["--ckpt=none"]),
    ("evaluate", ["--ckpt=none"]),
    ("lab.prune", ["--ckpt=none", "--to=0.5", "--by=random", "--out_dir=none"]),
    ("lab.probe", ["heads", "--ckpt=none"]), ("bench", ["--block_size=1"]), ("plot_curves", ["none"]),
    ("lab.export_hf", ["--ckpt=none", "--out=none"]), ("data.prepare_text", [])])
def test_once_a_program_works_ctrl_c_is_a_keyboard_interrupt(program, argv, monkeypatch, tmp_path):
    """Which each of them answers in its own way: the last save, the rows that are done."""
    monkeypatch.chdir(tmp_path)
    main = importlib.import_module(program).main
    before = signal.signal(signal.SIGINT, nanoheads.stop)
    try:
        with pytest.raises(SystemExit):
            prepare.run(lambda: main(argv)) if program.startswith("data") else main(argv)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


# ---- the processor ----

def test_threads_are_counted(monkeypatch):
    import torch
    monkeypatch.setattr(threads, "processor", lambda: "a processor")
    for n, line in ((1, "1 thread of a processor"), (3, "3 threads of a processor")):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=n: n)
        assert threads.describe_threads() == line


@pytest.mark.slow
def test_a_run_says_what_it_computes_on(args, capsys):
    from train import main
    main(args())
    second = capsys.readouterr().out.splitlines()[1]
    assert re.search(r"float32 on 1 thread of .+, 6 steps in ", second), second
