"""Each command of README.md runs, in order and as it stands, with less to do."""

import importlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT, as_arguments, without_own_mechanisms
from runs import run_here

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", README, re.M | re.S)
COMMANDS = [shlex.split(line, comments=True) for block in BLOCKS for line in block.splitlines()]

MODEL = dict(n_layer=2, n_head=4, n_embd=16, block_size=16)
RUN = dict(MODEL, batch_size=4, max_iters=4, eval_interval=2, eval_tokens=64)
STUDY = ["--seeds=[1, 2]", "--plain_seeds=2", "--budgets=[]", "--match_parameters=False", "--test_tokens=64"]
# what is added to the commands of a program, so that they have less to do
LESS = {
    "data/pystdlib/prepare.py": ["--out=pystdlib"],
    "sample.py": ["--max_new_tokens=4", "--num_samples=1"],
    "bench.py": as_arguments({**MODEL, "batch_size": 2, "vocab_size": 64, "rounds": 1, "steps": 1}),
    "lab.probe": ["--tokens=256"],
    "lab.prune": ["--tokens=256", "--text=256", "--rounds=0"],
}


def less(program, argv):
    if program == "train.py" and not {"--check", "--resume"} & set(argv):
        task = any(word.startswith("--task=") for word in argv)
        return as_arguments({key: value for key, value in RUN.items()
                             if not task or key not in ("block_size", "eval_tokens")})
    if program == "compare.py":
        dataset = "pystdlib" if "config/studies/demo.py" in argv else "wikitext2_byte"
        return [f"--settings={dict(RUN, dataset=dataset)}", *STUDY]
    return LESS.get(program, [])


def run(words):
    """A command line that begins with python, in this process."""
    program, *argv = words[2:] if words[1] == "-m" else words[1:]
    module = program.removesuffix(".py").replace("/", ".")
    try:
        with without_own_mechanisms():
            importlib.import_module(module).main([*argv, *less(program, argv)])
    except SystemExit as e:
        assert not e.code, f"{shlex.join(words)}: {e.code}"


@pytest.mark.slow
def test_every_command_runs_in_the_order_of_the_page(bytes_data, tmp_path, monkeypatch):
    """Those of make demo are read from the Makefile; the other targets are what runs this test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", run_here)  # of the runs of a study
    shutil.copytree(bytes_data, tmp_path / "wikitext2_byte")  # the download itself has tests of its own
    (tmp_path / "mine.py").write_text(*re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S))
    for words in COMMANDS:
        if words == ["make", "demo"]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", makefile, re.M)[1]
            for line in recipe.splitlines():
                run(shlex.split(line))
        elif words[0] == "python" and words[1] != "data/wikitext2/prepare.py":
            run(words)
    there = {str(path) for path in Path().glob("out/*/*")}
    assert {"out/demo/report.html", "out/tiny/best.pt", "out/tiny-unet_add+agency/log.jsonl"} < there
    assert Path("exported/a/config.json").is_file()
