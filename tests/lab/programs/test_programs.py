"""Programs of the lab and compare.py from outside: their help, tables, --json, and folders of studies."""
import io
import json
import re
import subprocess
import sys
from contextlib import suppress
from importlib import import_module

import pytest
import torch

import compare
import train
from helpers import ROOT
from lab import export_hf, probe
from lab_helpers import OF_LAB

PROGRAMS = ["compare", *(f"lab.{name}" for name in OF_LAB if name != "probe"),
            *(f"lab.probe {word}" for word in probe.PROBES)]


def strict(monkeypatch, encoding):
    """A standard output that refuses what its encoding lacks; returns a function: what was printed so far."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, errors="strict"))

    def shown():
        sys.stdout.flush()
        return raw.getvalue().decode(encoding)
    return shown


@pytest.mark.parametrize("name", OF_LAB)
def test_a_program_of_the_lab_that_is_run_as_a_script_says_how_to_type_it(name, tmp_path):
    done = subprocess.run([sys.executable, ROOT / f"lab/{name}.py", "--ckpt", "a b"], cwd=tmp_path, text=True,
                          capture_output=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{name}: type, in the repository's folder: python -m lab.{name} --ckpt 'a b'\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", PROGRAMS)
def test_every_program_and_probe_has_help_in_any_encoding_and_json(command, monkeypatch):
    shown = strict(monkeypatch, "ascii")
    program, *words = command.replace("constraints", "constraints score").split()
    with suppress(SystemExit):  # argparse's own way
        import_module(program).main([*words, "--help"])
    assert "--json" in shown()


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
    probe.main(["heads", *ckpts, "--tokens=64"])
    assert re.search(r"other.pt .*[+-]\d\.\d{4} [?±]\d\.\d{4}", shown())
    (tmp_path / "scores.csv").write_text("variant,seed,score,tokens\n" + "".join(
        f"{variant},{seed},{3 + 0.01 * seed},{tokens}\n"
        for variant, tokens in (("plain", 10), ("wider", 20)) for seed in range(3)))
    monkeypatch.chdir(tmp_path)
    compare.main(["scores", str(tmp_path / "scores.csv")])
    assert "2.00 times plain's tokens" in shown()


@pytest.mark.slow
def test_an_export_says_what_it_made(args, tmp_path):
    train.main(args())
    export_hf.main(["--ckpt", str(tmp_path / "run"), "--out", str(tmp_path / "hf"),
                    f"--json={tmp_path / 'hf.json'}"])
    found = json.loads((tmp_path / "hf.json").read_text())
    assert found["family"] == "gpt2" and found["folder"] == str(tmp_path / "hf")


# ---- folders of studies ----

@pytest.mark.parametrize("keys, name", [
    (dict(mechanism="forget"), "challenge-forget-tiny"),
    (dict(mechanism="up,down"), "challenge-up+down-tiny"),
    (dict(mechanisms=["unet_concat", "unet_add"]), "unet_concat+unet_add-tiny"),
    (dict(mechanisms=["unet_concat"], size="0.33M", scale="nano"), "unet_concat-nano-0.33M"),
    (dict(mechanisms=["sink"], base="some where/my plain.py"), "sink-my_plain"),
    (dict(variants={"a/b: c": {}}), "a_b_c-tiny"),
    (dict(tune_lr=True), "plain-tiny"),
    (dict(variants={f"variant number {i}": {} for i in range(30)}),
     "variant_number_0+variant_number_1+variant_number-tiny")])
def test_a_studys_folder_is_short_and_has_no_path(keys, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compare.StudyConfig(**keys)
    assert compare.folder_of(config, compare.name_of(config, [])).name == name
