"""What a run's hash depends on: all code that it can reach, and its flags; no mechanism that is off."""

import shutil
import subprocess
import sys

import pytest

from model import ALL_ON, MECHANISMS, GPTConfig
from nanoheads.common import ROOT, UserError
from nanoheads.config import ControllerConfig, TrainConfig
from lab.study import digest

from lab_helpers import forget_code as forget

SIZE = dict(vocab_size=256, block_size=32, n_layer=2, n_head=8, n_embd=64, recipe="modern")
# a run's two configs: its model's, and how it is trained
CONFIGS = {
    "plain": (GPTConfig(**SIZE), TrainConfig()),
    "xsa": (GPTConfig(**SIZE, **MECHANISMS["xsa"]), TrainConfig()),
    "sink": (GPTConfig(**SIZE, **MECHANISMS["sink"]), TrainConfig()),
    "moh": (GPTConfig(**SIZE, **MECHANISMS["moh"]), TrainConfig()),
    "all_on": (GPTConfig(**SIZE, **ALL_ON), TrainConfig()),
    "measured": (GPTConfig(**SIZE), TrainConfig(controller_log=True)),
}
NEW_MECHANISM = """
class PositionGate(Mechanism):
    class Options:
        position_gate: bool = False

    name = flag = "position_gate"
    modes = {"position_gate": dict(position_gate=True)}
    needs_positions = True

    def before_attention(self, attn, h):
        heads.add_gate("position_gate", (heads.positions >= 0)[:, None].to(heads.x.dtype))


# ---- mechanisms outside the layers ----
"""
PATHS = {name: ROOT / name for name in ("model.py", "train.py")}
PATHS.update({path.name: path for folder in ("nanoheads", "lab") for path in ROOT.glob(f"{folder}/**/*.py")
              if path.name != "__init__.py"})


def digests(root):
    """{name: the hash of its code} of each of CONFIGS."""
    forget()
    return {name: digest.code_digest(*configs, root=root) for name, configs in CONFIGS.items()}


@pytest.fixture(scope="module")
def as_they_are():
    return digests(ROOT)


@pytest.fixture
def tree(tmp_path, as_they_are):
    """A copy of the code: tree(file, before, after) edits a file, tree.changed() names those of CONFIGS whose
    hash is another one since.
    """
    for path in [*ROOT.glob("*.py"), *ROOT.glob("nanoheads/*.py"), *ROOT.glob("lab/**/*.py")]:
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)

    def edit(file, before, after):
        path = tmp_path / PATHS[file].relative_to(ROOT)
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1, (file, before)
        path.write_text(text.replace(before, after), encoding="utf-8")

    def changed():
        after = digests(tmp_path)
        return {name for name in after if after[name] != as_they_are[name]}

    edit.changed, edit.root = changed, tmp_path
    yield edit
    forget()


def digest_in(root, flags, training=""):
    """The hash that a fresh Python finds in a folder, for a model with these flags."""
    script = ("from model import GPTConfig; from nanoheads.config import TrainConfig; "
              "from lab.study.digest import code_digest; "
              f"print(code_digest(GPTConfig(**{ {**SIZE, **flags} }), TrainConfig({training})))")
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- what repeats nothing ----

@pytest.mark.slow
@pytest.mark.parametrize("edit", [
    ("kernels.py", '"""Rotate x [..., D] by its position', '"""Turn x [..., D] by its position'),
    ("train.py", "import math", "import math  # a remark"),
    ("model.py", '"number of blocks"', '"how many blocks"'),
    ("model.py", 'section="size"', 'section="sizes"'),
    ("train.py", "\nimport math\n", "\n\n\nimport math\n\n")],
    ids=["docstring", "comment", "help", "heading", "blank lines"])
def test_a_comment_a_docstring_or_help_repeats_nothing(tree, edit):
    tree(*edit)
    assert tree.changed() == set()


@pytest.mark.slow
def test_a_program_that_train_does_not_import_repeats_nothing(tree):
    with open(tree.root / "bench.py", "a") as file:
        file.write("\nMORE = 1\n")
    assert tree.changed() == set()


@pytest.mark.slow
def test_the_folder_does_not_matter(tree):
    assert tree.changed() == set()


@pytest.mark.slow
def test_a_new_mechanism_repeats_nothing(tree):
    """Neither the code of a class that is off, nor its place in the list of all, nor its flag."""
    before = [digest_in(tree.root, MECHANISMS.get(name, {})) for name in ("plain", "xsa")]
    tree("model.py", "\n# ---- mechanisms outside the layers ----\n", NEW_MECHANISM)
    tree("model.py", "ACAG, Sink]", "ACAG, Sink, PositionGate]")
    assert [digest_in(tree.root, MECHANISMS.get(name, {})) for name in ("plain", "xsa")] == before
    assert digest_in(tree.root, dict(position_gate=True)) not in before


# ---- what repeats some runs, or all ----

@pytest.mark.slow
@pytest.mark.parametrize("edit, stale", [
    (("rivals.py", "self.strength.tanh()", "self.strength.sin()"), {"xsa"}),
    (("model.py", "logits.topk(self.k, -1)", "logits.topk(self.k, -1, False)"), {"moh", "all_on"}),
], ids=lambda edit: f"{edit[0]}: {edit[1][:30]}" if isinstance(edit, tuple) else "")
def test_a_change_of_a_mechanism_repeats_the_runs_that_have_it(tree, edit, stale):
    tree(*edit)
    assert tree.changed() == stale


@pytest.mark.slow
@pytest.mark.parametrize("edit", [
    ("model.py", "0.02 / math.sqrt", "0.03 / math.sqrt"),
    ("attention.py", "KERNEL_BLOCK = 128", "KERNEL_BLOCK = 64"),
    ("optim.py", "MARGIN = 1.02", "MARGIN = 1.03"),
    ("ranks.py", "self.world == 1:", "self.world < 2:"),
    ("measuring.py", "* len(y)", "* len(y) * 2"),
    ("scoring.py", "mass.log() + short", "mass.log() - short"),
    ("dataset.py", "rng.shuffle(order)", "rng.permutation(order)"),
    ("tokenizer.py", "END_OF_TEXT =", "END_OF_TEXT = 1 +"),
    ("train.py", "run.step += 1", "run.step += 2"),
    ("trial.py", "score_windows(model, data", "score_windows(model.train(), data"),
    ("scoring.py", "np.isfinite(nats).all()", "np.isfinite(nats).any()"),
    ("mechanism.py", "must be a multiple of n_head", "is no multiple of n_head"),
], ids=lambda edit: f"{edit[0]}: {edit[1][:30]}")
def test_a_change_of_what_all_can_reach_repeats_every_run(tree, edit):
    """Too careful is right: a message is among them, for which there is --accept_code."""
    tree(*edit)
    assert tree.changed() == set(CONFIGS)


@pytest.mark.slow
def test_a_helper_that_a_mechanism_newly_calls_is_in_the_hash(tree):
    """A list of names, made by hand, missed such a helper, and runs of other code counted as done."""
    tree("rivals.py", "\nclass Sink(", "\ndef raised(x):\n    return x\n\n\nclass Sink(")
    tree("rivals.py", "(heads.row_stats.lse - self.logit[:, None]).sigmoid()",
         "raised(heads.row_stats.lse - self.logit[:, None]).sigmoid()")
    before = digests(tree.root)
    tree("rivals.py", "def raised(x):\n    return x\n", "def raised(x):\n    return 0 * x\n")
    assert digests(tree.root)["sink"] != before["sink"]


@pytest.mark.slow
@pytest.mark.parametrize("words, counts", [
    ("OTHERS = [XSA]", False), ("from nanoheads.rivals import XSA", False),
    ("OTHER = XSA", True), ("OTHERS = {'x': XSA}", True),
    ("def other():\n    return XSA", True)])
def test_lists_and_imports_alone_name_a_class_without_using_it(tree, words, counts):
    path = tree.root / "nanoheads" / "logits.py"
    path.write_text(path.read_text() + f"\n\n{words}\n")
    before = digests(tree.root)
    tree("rivals.py", "self.strength.tanh()", "self.strength.sin()")
    assert (digests(tree.root)["plain"] != before["plain"]) == counts


@pytest.mark.slow
@pytest.mark.parametrize("words", [
    "from . import late", "from .late import LATE", "import nanoheads.late as x",
    "x = __import__('nanoheads.late')"])
def test_every_way_to_import_a_file_is_known(tree, words):
    (tree.root / "nanoheads" / "late.py").write_text("LATE = 1\n")
    path = tree.root / "nanoheads" / "logits.py"
    path.write_text(path.read_text() + f"\n\n{words}\n")
    before = digests(tree.root)
    (tree.root / "nanoheads" / "late.py").write_text("LATE = 2\n")
    assert digests(tree.root)["plain"] != before["plain"]


@pytest.mark.slow
def test_with_a_teacher_every_mechanism_counts(tree):
    """It may have other mechanisms than its student, and the run executes them."""
    config, training = CONFIGS["plain"][0], TrainConfig(teacher="out/teacher")
    forget()
    before = digest.code_digest(config, training, root=tree.root)
    tree("rivals.py", "self.strength.tanh()", "self.strength.sin()")
    forget()
    assert digest.code_digest(config, training, root=tree.root) != before


@pytest.mark.slow
def test_an_imported_file_is_found_wherever_the_import_stands(tree):
    (tree.root / "nanoheads" / "late.py").write_text("LATE = 1\n")
    tree("train.py", "def send(t, process):\n", "def send(t, process):\n    from nanoheads import late\n")
    before = digests(tree.root)
    (tree.root / "nanoheads" / "late.py").write_text("LATE = 2\n")
    after = digests(tree.root)
    assert all(after[name] != before[name] for name in CONFIGS)


@pytest.mark.slow
def test_a_class_that_other_code_names_counts_although_its_mechanism_is_off(tree):
    tree("rivals.py", "self.strength.tanh()", "self.strength.sin()")
    assert tree.changed() == {"xsa"}
    text = (tree.root / "nanoheads" / "rivals.py").read_text()
    cls = next(line for line in text[:text.index("self.strength.sin()")].splitlines()[::-1]
               if line.startswith("class ")).split("(")[0].split()[1]
    tree("train.py", "def send(t, process):\n", f"def send(t, process):\n    {cls}\n")
    before = digests(tree.root)
    tree("rivals.py", "self.strength.sin()", "self.strength.cos()")
    after = digests(tree.root)
    assert all(after[name] != before[name] for name in CONFIGS)


@pytest.mark.slow
def test_what_is_no_python_is_named(tree):
    (tree.root / "nanoheads" / "kernels.py").write_text("def half(\n")
    with pytest.raises(UserError, match="kernels.py cannot be read as Python"):
        digests(tree.root)


# ---- files of one's own ----

@pytest.mark.slow
def test_the_text_of_a_mechanism_of_ones_own_is_in_the_hash(tmp_path):
    mine, found = tmp_path / "mine.py", []
    for text in ("def strength(x):\n    return x\n", "def strength(x):\n    return 0 * x\n"):
        mine.write_text(text)
        forget()
        found.append(digest.code_digest(GPTConfig(**SIZE), TrainConfig(own_mechanism=str(mine))))
    assert len(set(found)) == 2 and digest.code_digest(GPTConfig(**SIZE)) not in found
    forget()


# ---- flags ----

def test_flags_of_what_is_off_are_not_in_it():
    lists = {name: digest.own_flags(config) for name, (config, _) in CONFIGS.items()}
    assert "xsa" in lists["xsa"] and not {"xsa", "sink", "routing_top_k"} & set(lists["plain"])
    assert GPTConfig(**lists["moh"]) == CONFIGS["moh"][0]
    off, on = (digest.own_training(CONFIGS[name][1]) for name in ("plain", "measured"))
    assert on.keys() - off.keys() == set(ControllerConfig.__dataclass_fields__)
