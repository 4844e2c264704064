"""All programs from outside: how they begin, their help, tables and --json, and folders of studies."""
import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module

import pytest
import torch

import compare
import nanoheads
import train
from helpers import ROOT
from lab import export_hf, probe
from lab_helpers import OF_LAB
from model import GPTConfig
from nanoheads import configurator, prepare, threads
from nanoheads.config import TrainConfig
from nanoheads.configurator import Presets
from study.config import StudyConfig

PROGRAMS = [path.name for path in sorted(ROOT.glob("*.py")) if "__main__" in path.read_text()]
PROGRAMS += [f"lab/{name}.py" for name in (*OF_LAB, "label")]


# ---- how they begin: threads that wait briefly, Ctrl-C while they import ----

# imports a program up to the moment where it asks for torch or numpy, and does there what standard input says
AT_IMPORT = """
import json, os, runpy, signal, sys
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
CTRL_C = "os.kill(os.getpid(), signal.SIGINT)"
WAITING = 'print(json.dumps({k: v for k, v in os.environ.items() if k[:4] in ("GOMP", "OMP_", "KMP_")}))'


def at_import(program, code, **more):
    argv = ["heads"] if program == "lab/probe.py" else []  # a probe is imported when its name is known
    environment = {key: v for key, v in os.environ.items() if not key.startswith(("GOMP", "OMP", "KMP"))}
    return subprocess.run([sys.executable, "-c", AT_IMPORT, str(ROOT / program), *argv, "--help"], input=code,
                          text=True, timeout=60, capture_output=True, cwd=ROOT, **more,
                          env={**environment, "PYTHONPATH": str(ROOT)})


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="os.kill() asks nobody there")
@pytest.mark.parametrize("program", [*PROGRAMS, "data/prepare_text.py", "data/wikitext2/prepare.py"])
def test_before_torch_is_there_threads_are_told_to_wait_briefly_and_ctrl_c_is_one_line(program):
    done = at_import(program, f"{WAITING}\nsys.stdout.flush()\n{CTRL_C}")
    name = program.split("/")[-1].removesuffix(".py")
    assert (done.returncode, done.stderr) == (130, f"\n{name}: interrupted\n")
    if program in PROGRAMS and sys.platform == "linux":
        assert json.loads(done.stdout) == {"GOMP_SPINCOUNT": "10000"}


def test_every_program_is_one_of_which_ctrl_c_ends_quietly():
    assert {f"{name}.py" for name in nanoheads.PROGRAMS} == {name for name in PROGRAMS if "/" not in name}


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is started with signals ignored there")
def test_where_ctrl_c_is_ignored_or_another_program_imports_us_it_stays_as_it_is(tmp_path):
    """A job in the background of a script; a program of one's own."""
    done = at_import("plot_curves.py", f"{CTRL_C}\nprint('goes on', flush=True)\nos._exit(0)",
                     preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")
    program = tmp_path / "train.py"
    program.write_text("import nanoheads.threads, os, signal\n"
                       f"try:\n    {CTRL_C}\nexcept KeyboardInterrupt:\n    print('saved')\n")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "saved\n", "")


@pytest.mark.parametrize("program, argv", [
    ("train", ["--nope"]), ("compare", ["--nope"]), ("sample", ["--ckpt=none"]),
    ("lab.prune", ["--ckpt=none", "--to=0.5", "--by=random", "--out_dir=none"]),
    ("lab.probe", ["heads", "--ckpt=none"]), ("data.prepare_text", [])])
def test_once_a_program_works_ctrl_c_is_a_keyboard_interrupt(program, argv, monkeypatch, tmp_path):
    """Which each of them answers in its own way: the last save, the rows that are done."""
    monkeypatch.chdir(tmp_path)
    main = import_module(program).main
    before = signal.signal(signal.SIGINT, nanoheads.stop)
    try:
        with pytest.raises(SystemExit):
            prepare.run(lambda: main(argv)) if program.startswith("data") else main(argv)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("system, variables, found", [
    ("linux", {}, {"GOMP_SPINCOUNT": "10000"}),
    ("linux", {"GOMP_SPINCOUNT": "5"}, {"GOMP_SPINCOUNT": "5"}),  # what the user has set counts
    ("linux", {"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ("darwin", {}, {})])  # other systems are left as they are
def test_threads_wait_briefly_where_nobody_says_how(monkeypatch, system, variables, found):
    for name in threads.WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", system)
    threads.wait_briefly()
    assert {name: os.environ[name] for name in threads.WAIT_VARIABLES if name in os.environ} == found


def test_a_run_says_what_it_computes_on(args, capsys):
    train.main(args(max_iters=1))
    assert re.search(r"float32 on 1 thread of .+, 1 step in ", capsys.readouterr().out)


# ---- help, tables and --json ----


def strict(monkeypatch, encoding):
    """A standard output that refuses what its encoding lacks; returns a function: what was printed so far."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, errors="strict"))

    def shown():
        sys.stdout.flush()
        return raw.getvalue().decode(encoding)
    return shown


def test_every_key_of_the_real_configs_has_help():
    keys = configurator.keys_of((Presets, GPTConfig, TrainConfig, StudyConfig))
    assert not [k for k, (_, _, words) in keys.items() if not words]


@pytest.mark.parametrize("name", OF_LAB)
def test_a_program_of_the_lab_that_is_run_as_a_script_says_how_to_type_it(name, tmp_path):
    done = subprocess.run([sys.executable, ROOT / f"lab/{name}.py", "--ckpt", "a b"], cwd=tmp_path, text=True,
                          capture_output=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{name}: type, in the repository's folder: python -m lab.{name} --ckpt 'a b'\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["compare", *(f"lab.{name}" for name in OF_LAB if name != "probe"),
                                     *(f"lab.probe {word}" for word in probe.PROBES)])
def test_every_program_and_probe_has_help_in_any_encoding_and_json(command, monkeypatch):
    shown = strict(monkeypatch, "ascii")
    program, *words = command.replace("constraints", "constraints score").split()
    with suppress(SystemExit):  # argparse's own way
        import_module(program).main([*words, "--help"])
    assert "--json" in shown()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_tables_lose_no_more_than_a_character(encoding, finished_run, tmp_path, monkeypatch):
    """A dash for steps that are not known, ± behind a mean, and a multiplication sign, each a column wide."""
    shown = strict(monkeypatch, encoding)
    state = torch.load(finished_run / "best.pt", weights_only=True)
    step = state.pop("step")
    torch.save(state, tmp_path / "other.pt")
    ckpts = ["--ckpt", str(finished_run), "--ckpt", str(tmp_path / "other.pt")]
    import_module("evaluate").main(ckpts)
    assert re.search(rf"run +\d.* {step} .*\n.*other.pt +\d.* \? ", shown())
    probe.main(["heads", *ckpts, "--tokens=64"])
    assert re.search(r"other.pt .*[+-]\d\.\d{4} [?±]\d\.\d{4}", shown())
    (tmp_path / "scores.csv").write_text("variant,seed,score,tokens\n" + "".join(
        f"{variant},{seed},{3 + 0.01 * seed},{tokens}\n"
        for variant, tokens in (("plain", 10), ("wider", 20)) for seed in range(3)))
    monkeypatch.chdir(tmp_path)
    compare.main(["scores", str(tmp_path / "scores.csv")])
    assert "2.00 times plain's tokens" in shown()


@pytest.mark.slow
def test_an_export_says_what_it_made(finished_run, tmp_path):
    export_hf.main(["--ckpt", str(finished_run), "--out", str(tmp_path / "hf"),
                    f"--json={tmp_path / 'hf.json'}"])
    found = json.loads((tmp_path / "hf.json").read_text())
    assert found["family"] == "gpt2" and found["folder"] == str(tmp_path / "hf")


# ---- folders of studies ----


@pytest.mark.parametrize("keys, name", [
    (dict(mechanism="up,down"), "challenge-up+down-tiny"),
    (dict(mechanisms=["unet_concat"], size="0.33M", scale="nano"), "unet_concat-nano-0.33M"),
    (dict(mechanisms=["sink"], base="some where/my plain.py"), "sink-my_plain"),
    (dict(variants={"a/b: c": {}}), "a_b_c-tiny"), (dict(tune_lr=True), "plain-tiny"),
    (dict(variants={f"variant number {i}": {} for i in range(30)}),
     "variant_number_0+variant_number_1+variant_number-tiny")])
def test_a_studys_folder_is_short_and_has_no_path(keys, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compare.StudyConfig(**keys)
    assert compare.folder_of(config, compare.name_of(config, [])).name == name
