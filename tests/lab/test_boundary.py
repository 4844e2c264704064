"""
The lines between the core, the study and the lab. In a copy of the repository without study/, lab/, their
tests, configs and results/, the core trains, resumes, samples, evaluates, plots and passes its tests, and
what is theirs says so. compare.py needs study/, and no lab/.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from helpers import CODE, ROOT
from model import MECHANISMS

WITHOUT = {"compare.py", "study", "lab", "results", "tests/lab", "tests/study", "out",
           "config/life.py", "config/scenarios", "config/studies"}
SMALL = ["--n_layer=2", "--n_head=4", "--n_embd=64", "--block_size=16", "--batch_size=2", "--grad_accum=1",
         "--max_iters=2", "--eval_interval=2", "--eval_tokens=64", "--device=cpu", "--compile=False"]
MISSING = "which is not there beside nanoheads/: bring it back, or do without"


def copied(folder, without):
    """A copy of the repository in a folder, without some of its files and folders."""
    def left_out(path, names):
        inside = os.path.relpath(path, ROOT)
        return [name for name in names
                if os.path.normpath(os.path.join(inside, name)) in without or name == "__pycache__"
                or name.endswith(".bin") or name.startswith(".") and name != ".gitignore"]

    shutil.copytree(ROOT, folder, ignore=left_out, ignore_dangling_symlinks=True)
    return folder


@pytest.fixture(scope="module")
def core(tmp_path_factory, bytes_data):
    """A folder with the core alone, and a run in it, out/plain."""
    here = In(copied(tmp_path_factory.mktemp("fork") / "nanoheads", WITHOUT), bytes_data)
    here("train.py", *SMALL, f"--dataset={bytes_data}", "--out_dir=out/plain")
    return here


class In:
    """Runs Python in a folder: what it printed. Its status must be 0, or with `fails` 1."""

    def __init__(self, folder, data):
        self.folder, self.data = folder, data

    def __call__(self, *argv, fails=False):
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        env.pop("PYTHONPATH", None)
        env.setdefault("NANOHEADS_DATA", str(ROOT.parent / "shared/data"))  # the copy lies somewhere else
        done = subprocess.run([sys.executable, *map(str, argv)], cwd=self.folder, env=env, text=True,
                              capture_output=True)
        assert done.returncode == int(fails), (argv, done.stdout[-2000:], done.stderr[-2000:])
        assert "Traceback" not in done.stderr
        return done.stderr if fails else done.stdout


def test_there_is_no_study_and_no_lab_in_it(core):
    assert not [path for name in WITHOUT - {"out"} for path in core.folder.glob(name)]
    for name in ("study", "lab"):
        assert core("-c", f"from importlib.util import find_spec; print(find_spec({name!r}))") == "None\n"


@pytest.mark.parametrize("program", ["train", "sample", "evaluate", "plot_curves", "bench"])
def test_programs_of_the_core_say_what_they_take(core, program):
    assert f"{program}.py" in core(f"{program}.py", "--help")


@pytest.mark.parametrize("scale", ["tiny", "nano", "mid", "small", "paper"])
def test_every_scale_trains(core, scale):
    core("train.py", f"--scale={scale}", *SMALL, f"--dataset={core.data}", f"--out_dir=out/{scale}")
    assert (core.folder / "out" / scale / "best.pt").is_file()


def test_every_mechanism_trains(core):
    """One process for all of them, since a start takes longer than these runs. agency_learned is left out:
    its switches learn from what the lab measures of the heads.
    """
    names = [*(name for name in MECHANISMS if name != "agency_learned"), "acag,moh,unet_add,sentinel"]
    core("-c", f"""
import train
for name in {names!r}:
    train.main(['--scale=tiny', f'--mechanism={{name}}', *{SMALL!r}, '--dataset={core.data}',
                f'--out_dir=out/each/{{name}}'])
""")
    assert len([*core.folder.glob("out/each/*/best.pt")]) == len(names)


def test_a_run_goes_on_where_it_was(core):
    said = core("train.py", "--resume", "--out_dir=out/plain", "--max_iters=4")
    assert "going on at step 2 of 4" in said


def test_two_ranks_train_together(core):
    core("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py", *SMALL,
         "--grad_accum=2", f"--dataset={core.data}", "--out_dir=out/ranks")
    assert (core.folder / "out/ranks/best.pt").is_file()


def test_runs_are_sampled_evaluated_and_drawn(core):
    assert core("sample.py", "--ckpt=out/plain", "--max_new_tokens=9", "--start=1 plus", "--device=cpu"
                ).startswith("1 plus")
    assert "bits/byte" in core("evaluate.py", "--ckpt=out/plain", "--device=cpu", "--tokens=64")
    assert ".png" in core("plot_curves.py", "out/plain")


def test_a_mechanism_of_ones_own_is_checked_and_trained(core):
    """One that mixes the rows of a batch is refused before the first step."""
    (core.folder / "mine.py").write_text(CODE, encoding="utf-8")
    checked = core("train.py", "--mechanism=mine.py", "--check").splitlines()[1:]
    assert checked and all(line.startswith("forget ") and line.endswith(" kept") for line in checked)
    run = [*SMALL, f"--dataset={core.data}"]
    core("train.py", "--mechanism=mine.py", *run, "--out_dir=out/mine")
    core("evaluate.py", "--ckpt=out/mine", "--device=cpu",
         "--mechanism=out/mine/mine.py")
    said = core("train.py", "--mechanism=tests/leaks.py:leak_rows", *run, "--out_dir=out/leak", fails=True)
    assert said.startswith("train: before training row ") and said.count("\n") == 1
    assert not (core.folder / "out/leak/best.pt").exists()


@pytest.mark.parametrize("what, command", [
    ("labels=weak", ["train.py", *SMALL, "--mechanism=constraint_a", "--labels=weak"]),
    ("--trial", ["train.py", "--trial", "out/trials/0"]),
    ("--audit", ["sample.py", "--ckpt=out/plain", "--audit=x.jsonl", "--device=cpu"]),
    ("--nanogpt", ["bench.py", "--nanogpt=."]),
    ("--race", ["bench.py", "--race", "--nanogpt=."]),
    ("--heads", ["plot_curves.py", "--heads", "out/plain"]),
    ("no checkpoint nowhere; a folder or a name of Hugging Face's", ["evaluate.py", "--ckpt=nowhere"])],
    ids=lambda each: str(each)[:20])
def test_what_is_the_studys_or_the_labs_says_so_in_a_line(core, what, command):
    if command[0] == "train.py" and "--trial" not in command:
        command = [*command, f"--dataset={core.data}", "--out_dir=out/other"]
    said = core(*command, fails=True)
    folder = "study" if what == "--trial" else "lab"
    assert said == f"{command[0].removesuffix('.py')}: {what} is work of {folder}/, {MISSING}\n"


# ---- keys of training that the lab adds ----

@pytest.mark.parametrize("words, said", [
    (["--controller=rules"], "command line: unknown key controller; --help lists the keys"),
    (["--mechanism=agency_learned"],
     "agency_learned predicts from what is measured of the heads between steps, which is work of lab/heads: "
     "see docs/heads.md")])
def test_without_the_lab_its_keys_are_unknown(core, words, said):
    assert core("train.py", *SMALL, *words, "--out_dir=out/other", fails=True) == f"train: {said}\n"
    assert "--controller" not in core("train.py", "--help")


@pytest.fixture(scope="module")
def with_lab(core):
    """Runs train.py beside the lab, for two steps of four, into a folder of the copy that has none."""
    here = In(ROOT, core.data)

    def make(name, *keys):
        return here("train.py", *SMALL, "--lr_decay_iters=4", f"--dataset={core.data}",
                    f"--out_dir={core.folder / 'out' / name}", *keys)
    return make


def losses(folder):
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row["val_loss"] for row in rows if "val_loss" in row]


def test_a_plain_run_goes_on_with_the_lab_and_without_it(core, with_lab):
    """To the same digits; no key of the other place counts as changed."""
    runs = core.folder / "out"
    with_lab("begun_with")
    core("train.py", *SMALL, "--lr_decay_iters=4", f"--dataset={core.data}", "--out_dir=out/begun_without")
    said = [core("train.py", "--resume", "--out_dir=out/begun_with", "--max_iters=4"),
            with_lab("begun_without", "--resume", "--max_iters=4")]
    with_lab("whole", "--max_iters=4")
    for each in said:
        assert "going on at step 2 of 4" in each
        assert {*re.findall(r"changed since the last save: (\w+)", each)} == {"max_iters", "out_dir"}
    assert losses(runs / "begun_with") == losses(runs / "begun_without") == losses(runs / "whole")


def test_without_the_lab_a_run_whose_heads_were_measured_is_read_and_does_not_go_on(core, with_lab):
    with_lab("measured", "--controller_log", "--controller_interval=2", "--controller_tokens=64",
             "--controller_heldout=64")
    goes_on = ["train.py", "--resume", "--out_dir=out/measured", "--max_iters=4"]
    said = core(*goes_on, fails=True)
    assert said.count("\n") == 1 and "controller_log" in said and "config.json" in said
    assert "bits/byte" in core("evaluate.py", "--ckpt=out/measured", "--device=cpu", "--tokens=64")
    assert core("sample.py", "--ckpt=out/measured", "--max_new_tokens=9", "--start=1 plus", "--device=cpu")
    core("train.py", "--eval_only", "--out_dir=out/measured", *SMALL)
    (core.folder / "out/measured/config.json").unlink()
    said = core(*goes_on, *SMALL[:-1], f"--dataset={core.data}", "--compile=False", fails=True)
    assert said.count("\n") == 1 and "ckpt.pt holds the state of controller" in said


@pytest.mark.slow
def test_the_cores_tests_pass(core):
    said = core("-m", "pytest", "-q", "-n", "2", "-m", "not slow", "-p", "no:cacheprovider", "tests/core")
    assert "[100%]" in said  # and the status says that none failed


# ---- a study without the lab ----

@pytest.mark.slow
def test_a_study_needs_no_lab(tmp_path, bytes_data):
    here = In(copied(tmp_path / "nanoheads", {"lab", "tests", "results", "out"}), bytes_data)
    (here.folder / "plain.py").write_text("".join(
        f"{key} = {value!r}\n" for key, value in dict(
            n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=4, max_iters=4, eval_interval=2,
            eval_tokens=64, dataset=str(bytes_data)).items()))
    study = ["compare.py", "--base=plain.py", "--mechanisms=sink", "--seeds=1,2", "--plain_seeds=2",
             "--budgets=[]", "--jobs=2", "--device=cpu", "--out_dir=out/study"]
    assert "sink" in here(*study)
    assert "all of them the same" in here("compare.py", "recheck", "out/study/results.json.gz")


# ---- what `pip install` gives: model, nanoheads, study and lab, from any folder ----

def test_the_study_and_the_lab_need_no_program(tmp_path):
    """All of them import where there is no train.py, as in an installed package."""
    for name in ("nanoheads", "study", "lab"):
        shutil.copytree(ROOT / name, tmp_path / "site" / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "model.py", tmp_path / "site")
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts)
             for pattern in ("study/*.py", "lab/**/*.py") for path in ROOT.glob(pattern)
             if path.stem not in ("__init__", "modeling_nanoheads")]
    program = f"from importlib import import_module\nfor name in {names!r}: import_module(name)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path / "site")})
    assert (done.returncode, done.stderr) == (0, "")
