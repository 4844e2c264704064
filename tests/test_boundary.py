"""
The lines between the core, the study and the lab. In a copy of the repository without study/, lab/, their
tests, configs and results/, the core trains, resumes, samples, evaluates and plots, and what is theirs says
so. compare.py needs study/, and no lab/.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from helpers import CODE, ROOT, as_arguments
from model import ALL_ON

WITHOUT = {"compare.py", "study", "lab", "results", "tests/docs", "tests/lab", "tests/study",
           "tests/test_boundary.py", "out", "config/constraint_train.py", "config/life.py",
           "config/scenarios", "config/studies"}
SMALL = ["--n_layer=2", "--n_head=4", "--n_embd=64", "--block_size=16", "--batch_size=2", "--grad_accum=1",
         "--max_iters=2", "--eval_interval=2", "--eval_tokens=64", "--device=cpu", "--compile=False"]
MISSING = "which is not there beside nanoheads/: bring it back, or do without"

# runs programs one after the other in one process, since to start one takes longer than these runs
PROGRAMS = """
import contextlib, importlib, io, json, sys
answers = []
for name, *argv in json.load(sys.stdin):
    code, said = 0, io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            importlib.import_module(name.removesuffix(".py")).main(argv)
        except SystemExit as e:
            code = e.code or 0
    answers.append((code, said.getvalue()))
json.dump(answers, sys.stdout)
"""


def copied(folder, without):
    """A copy of the repository in a folder, without some of its files and folders."""
    def left_out(path, names):
        inside = os.path.relpath(path, ROOT)
        return [name for name in names
                if os.path.normpath(os.path.join(inside, name)) in without or name == "__pycache__"
                or name.endswith(".bin") or name.startswith(".") and name != ".gitignore"]

    shutil.copytree(ROOT, folder, ignore=left_out, ignore_dangling_symlinks=True)
    return folder


def python(folder, *argv, said=None):
    """What Python printed in a folder, which ends with status 0."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run([sys.executable, *map(str, argv)], cwd=folder, env=env, text=True, input=said,
                          capture_output=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, (argv, done.stdout, done.stderr[-2000:])
    return done.stdout


def programs(folder, *commands):
    """[what a program printed, or the line that it ended with if it failed] of command lines in a folder."""
    lines = python(folder, "-c", PROGRAMS, said=json.dumps([[*map(str, each)] for each in commands]))
    return [code or said for code, said in json.loads(lines)]


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """A folder with the core alone."""
    return copied(tmp_path_factory.mktemp("fork") / "nanoheads", WITHOUT)


def test_the_core_alone_trains_resumes_samples_evaluates_and_plots(core, bytes_data):
    (core / "mine.py").write_text(CODE, encoding="utf-8")
    train = ["train.py", *SMALL, f"--dataset={bytes_data}"]
    scales = "tiny", "paper"
    trained = programs(
        core, [*train, "--out_dir=out/plain"],
        ["train.py", "--resume", "--out_dir=out/plain", "--max_iters=4"],
        *([*train, f"--scale={scale}", f"--out_dir=out/{scale}"] for scale in scales),
        [*train, *as_arguments(ALL_ON), "--out_dir=out/all_on"],
        [*train, "--mechanism=mine.py", "--out_dir=out/mine"])
    assert "going on at step 2 of 4" in trained[1]
    for name in ("plain", *scales, "all_on", "mine"):
        assert (core / "out" / name / "best.pt").is_file()
    text, score, plotted, checked, refused, *helps = programs(
        core, ["sample.py", "--ckpt=out/plain", "--max_new_tokens=9", "--start=1 plus", "--device=cpu"],
        ["evaluate.py", "--ckpt=out/mine", "--device=cpu", "--tokens=64", "--mechanism=out/mine/mine.py"],
        ["plot_curves.py", "out/plain"],
        ["train.py", "--mechanism=mine.py", "--check"],
        [*train, "--mechanism=tests/leaks.py:leak_rows", "--out_dir=out/leak"],
        *([f"{name}.py", "--help"] for name in ("train", "sample", "evaluate", "plot_curves", "bench")))
    assert text.startswith("1 plus") and "bits/byte" in score and ".png" in plotted
    assert all(line.startswith("forget ") and line.endswith(" kept") for line in checked.splitlines()[1:])
    assert "--controller" not in helps[0] and all(".py" in each for each in helps)
    assert refused.startswith("train: before training row ") and "\n" not in refused


def test_what_is_the_studys_or_the_labs_says_so_in_a_line(core, bytes_data, finished_run):
    train = ["train.py", *SMALL, f"--dataset={bytes_data}", "--out_dir=out/other"]
    asked = {
        "labels=weak": [*train, "--mechanism=constraint_a", "--labels=weak"],
        "--trial": ["train.py", "--trial", "out/trials/0"],
        "--audit": ["sample.py", f"--ckpt={finished_run}", "--audit=x.jsonl", "--device=cpu"],
        "--nanogpt": ["bench.py", "--nanogpt=."],
        "--race": ["bench.py", "--race", "--nanogpt=."],
        "--heads": ["plot_curves.py", "--heads", finished_run],
        "no checkpoint nowhere; a folder or a name of Hugging Face's": ["evaluate.py", "--ckpt=nowhere"]}
    unknown, learned, *answers = programs(core, [*train, "--controller=rules"],
                                          [*train, "--mechanism=agency_learned"], *asked.values())
    assert unknown == "train: command line: unknown key controller; --help lists the keys"
    assert "agency_learned" in learned and "lab/heads" in learned and "\n" not in learned
    for (what, (program, *_)), said in zip(asked.items(), answers, strict=True):
        folder = "study" if what == "--trial" else "lab"
        assert said == f"{program.removesuffix('.py')}: {what} is work of {folder}/, {MISSING}"


def losses(folder):
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row["val_loss"] for row in rows if "val_loss" in row]


@pytest.mark.slow
def test_a_run_goes_on_with_the_lab_and_without_it(core, bytes_data):
    """A plain run to the same digits, and no key of the other place counts as changed. One whose heads were
    measured is read without the lab, and does not go on."""
    runs = core / "out"

    def begin(name, *more):
        return ["train.py", *SMALL, "--lr_decay_iters=4", f"--dataset={bytes_data}",
                f"--out_dir={runs / name}", *more]

    def go_on(name):
        return ["train.py", "--resume", "--max_iters=4", f"--out_dir={runs / name}"]

    programs(core, begin("without"))
    said, *_ = programs(ROOT, go_on("without"), begin("with"), begin("whole", "--max_iters=4"),
                        begin("measured", "--controller_log", "--controller_interval=2",
                              "--controller_tokens=64", "--controller_heldout=64"))
    again, score, refused = programs(core, go_on("with"), ["evaluate.py", f"--ckpt={runs / 'measured'}",
                                                           "--device=cpu", "--tokens=64"], go_on("measured"))
    for each in (said, again):
        assert "going on at step 2 of 4" in each
        assert {*re.findall(r"changed since the last save: (\w+)", each)} == {"max_iters"}
    assert losses(runs / "with") == losses(runs / "without") == losses(runs / "whole")
    assert "bits/byte" in score
    assert "\n" not in refused and "controller_log" in refused and "config.json" in refused


@pytest.mark.slow
def test_a_study_needs_no_lab(tmp_path, bytes_data):
    here = copied(tmp_path / "nanoheads", {"lab", "tests", "results", "out"})
    (here / "plain.py").write_text("".join(
        f"{key} = {value!r}\n" for key, value in dict(
            n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=4, max_iters=4, eval_interval=2,
            eval_tokens=64, dataset=str(bytes_data)).items()))
    study = ["--base=plain.py", "--mechanisms=sink", "--seeds=1", "--plain_seeds=1", "--budgets=[]",
             "--device=cpu", "--out_dir=out/study"]
    assert "sink" in python(here, "compare.py", *study)


# ---- what `pip install` gives: model, nanoheads, study and lab, from any folder ----

def test_the_study_and_the_lab_need_no_program(tmp_path):
    """All of them import where there is no train.py, as in an installed package."""
    for name in ("nanoheads", "study", "lab"):
        shutil.copytree(ROOT / name, tmp_path / "site" / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "model.py", tmp_path / "site")
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts)
             for pattern in ("study/*.py", "lab/**/*.py") for path in ROOT.glob(pattern)
             if path.stem not in ("__init__", "modeling_nanoheads")]
    python(tmp_path, "-c", f"import sys\nsys.path.insert(0, 'site')\nfrom importlib import import_module\n"
                           f"for name in {names!r}: import_module(name)")
