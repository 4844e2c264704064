"""What a run's hash depends on: the code that it reaches, its flags, its data; and nothing else."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from model import ALL_ON, MECHANISMS, GPTConfig
from nanoheads.common import ROOT
from nanoheads.study import fingerprint
from nanoheads.training.config import ControllerConfig, TrainConfig
from tests.test_add_a_mechanism import TOY, apply

SIZE = dict(vocab_size=256, block_size=32, n_layer=2, n_head=8, n_embd=64, recipe="modern")
CONFIGS = {"plain": GPTConfig(**SIZE), "xsa": GPTConfig(**SIZE, **MECHANISMS["xsa"]),
           "moh": GPTConfig(**SIZE, **MECHANISMS["moh"]), "all_on": GPTConfig(**SIZE, **ALL_ON)}


@pytest.fixture
def tree(tmp_path):
    """A copy of the code: tree(file, before, after) edits a file, tree.digests() hashes each of CONFIGS."""
    for path in [*ROOT.glob("*.py"), *ROOT.glob("nanoheads/**/*.py")]:
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)

    def edit(file, before, after):
        text = (tmp_path / file).read_text(encoding="utf-8")
        assert text.count(before) == 1, (file, before)
        (tmp_path / file).write_text(text.replace(before, after), encoding="utf-8")

    def digests():
        fingerprint.parsed.cache_clear()
        fingerprint.digest.cache_clear()
        return {name: fingerprint.code_digest(config, root=tmp_path) for name, config in CONFIGS.items()}

    edit.digests, edit.root = digests, tmp_path
    return edit


def changed(tree, *edit):
    """The names of CONFIGS whose hash an edit changes."""
    before = tree.digests()
    tree(*edit)
    after = tree.digests()
    return {name for name in before if before[name] != after[name]}


def test_a_change_inside_one_mechanism_repeats_its_own_runs_alone(tree):
    assert changed(tree, "model.py", "self.strength.tanh()", "self.strength.sin()") == {"xsa"}
    assert changed(tree, "model.py", "def routing_summary(weights, selected):",
                   "def routing_summary(weights, selected, more=0):") == {"moh", "all_on"}


@pytest.mark.parametrize("edit", [
    ("model.py", '"""LayerNorm whose bias can be left out."""', '"""LayerNorm, its bias optional."""'),
    ("train.py", "import math", "import math  # a remark"),
    ("train.py", "def flags_by_name():", "def flags_by_name(more=None):"),  # the command line's alone
    ("evaluate.py", "def score_table(runs, width=120):", "def score_table(runs, width=100):"),
    ("common.py", "def explain(", "def explains("), ("study/trial.py", "def log_to(", "def logs_to(")])
def test_what_gives_no_numbers_repeats_nothing(tree, edit):
    assert changed(tree, *edit) == set()


@pytest.mark.parametrize("edit", [
    ("model.py", "0.02 / math.sqrt", "0.03 / math.sqrt"),
    ("ranks.py", "class Process:", "class Process(object):"),
    ("optim.py", "1 - group[\"momentum\"]", "2 - group[\"momentum\"]"),
    ("kernels.py", "def rms_norm(x):", "def rms_norm(x, eps=None):"),
    ("evaluate.py", "mass.log() + short", "mass.log() - short"),
    ("dataset.py", "rng.shuffle(order)", "rng.permutation(order)"),
    ("tokenizer.py", "END_OF_TEXT =", "END_OF_TEXT = 1 +"),
    ("checkpoint.py", "def build(state", "def build(given"),
    ("train.py", '"muon": dict(lr=4e-3', '"muon": dict(lr=5e-3'),
    ("study/trial.py", "np.isfinite(nats).all()", "np.isfinite(nats).any()")])
def test_what_gives_every_number_repeats_every_run(tree, edit):
    assert changed(tree, *edit) == set(CONFIGS)


def test_a_new_mechanism_repeats_nothing(tree):
    """Neither the code of a class that is off, nor its flag, is in the hash of those that stood before."""
    before, names = tree.digests(), ["xsa", "moh"]
    apply(TOY, tree.root)
    script = ("from model import GPTConfig, MECHANISMS; from study.fingerprint import code_digest; "
              f"print(*(code_digest(GPTConfig(**{SIZE}, **MECHANISMS.get(n, {{}})))"
              f" for n in ['plain', *{names}, 'position_gate']))")
    done = subprocess.run([sys.executable, "-c", script], cwd=tree.root, capture_output=True, text=True)
    *after, its_own = done.stdout.split()
    assert after == [before[name] for name in ("plain", *names)] and its_own not in after, done.stderr


def test_flags_of_what_is_off_are_not_in_it():
    lists = {name: fingerprint.own_flags(config) for name, config in CONFIGS.items()}
    assert "xsa" in lists["xsa"] and not {"xsa", "sink", "routing_top_k"} & set(lists["plain"])
    assert GPTConfig(**lists["moh"]) == CONFIGS["moh"]


def test_what_moves_heads_counts_where_heads_are_moved(tree):
    """And an edit of it, or of the statements that call it, repeats no other run."""
    off, on = TrainConfig(), TrainConfig(controller_log=True)

    def digest(training):
        fingerprint.parsed.cache_clear()
        fingerprint.digest.cache_clear()
        return fingerprint.code_digest(CONFIGS["plain"], training, root=tree.root)
    for file, before, after in (
            ("controller.py", "    controller.set_sparsity(run)\n    controller.look(run)",
             "    controller.look(run)\n    controller.set_sparsity(run)"),
            ("heads.py", "* len(y)", "* len(y) * 2"),
            ("train.py", "            trainer = controller.step(run)", "            controller.step(run)")):
        plain, moved = digest(off), digest(on)
        tree(file, before, after)
        assert digest(off) == plain and digest(on) != moved, file
    plain = digest(off)
    tree("train.py", "run.step += 1", "run.step += 2")
    assert digest(off) != plain
    assert fingerprint.own_training(on).keys() - fingerprint.own_training(off).keys() == set(
        ControllerConfig.__dataclass_fields__)


def test_the_hash_reaches_every_module_that_a_run_imports():
    """Against what Python itself loads: a module that the numbers come from cannot be forgotten."""
    script = ("import sys; sys.path.insert(0, sys.argv[1]); import study.trial; "
              "print(*(getattr(m, '__file__', None) for m in list(sys.modules.values())), sep='\\n')")
    done = subprocess.run([sys.executable, "-c", script, str(ROOT)],
                          capture_output=True, text=True, check=True)
    own = {Path(line) for line in done.stdout.splitlines() if line != "None"}
    own = {path.relative_to(ROOT).as_posix() for path in own if path.is_relative_to(ROOT)
           and "site-packages" not in path.parts and path.name != "__init__.py"}
    files = {file for file, _ in fingerprint.reached(ROOT, frozenset(), frozenset(), moved=True)}
    without = {f"{name}.py" for name in fingerprint.NO_NUMBERS} | {"study/fingerprint.py"}
    assert own == files | without and not files & without


def test_each_definition_that_is_reached_is_found_by_name():
    """Every name of ours that a reached definition uses is reached too, or left out on purpose."""
    found = fingerprint.reached(ROOT, frozenset(), frozenset(), moved=True)
    assert {("model.py", "GPT"), ("kernels.py", "CpuFlash"), ("optim.py", "Muon"), ("dataset.py", "Batches"),
            ("evaluate.py", "score"), ("tokenizer.py", "Tokenizer")} <= set(found)
    for (file, _), node in found.items():
        definitions, imports, _ = fingerprint.parsed(ROOT / file)
        for part in ast.walk(node):
            name = getattr(part, "id", None)
            if name in definitions:
                assert (file, name) in found
