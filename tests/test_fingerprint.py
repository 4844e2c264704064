"""What a run's hash depends on: the code that makes its numbers, its flags, its data; and nothing else."""

import ast
import copy
import re
import shutil
import subprocess
import sys

import pytest

from model import ALL_ON, MECHANISMS, GPTConfig
from nanoheads import configurator
from nanoheads.common import ROOT
from nanoheads.study import fingerprint, trial
from nanoheads.text import dataset
from nanoheads.training import checkpoint
from nanoheads.training.config import ControllerConfig, TrainConfig
from train import train

SIZE = dict(vocab_size=256, block_size=32, n_layer=2, n_head=8, n_embd=64, recipe="modern")
# a run's two configs: its model's, and how it is trained
CONFIGS = {
    "plain": (GPTConfig(**SIZE), TrainConfig()),
    "adamw": (GPTConfig(**SIZE), TrainConfig(optimizer="adamw")),
    "xsa": (GPTConfig(**SIZE, **MECHANISMS["xsa"]), TrainConfig()),
    "moh": (GPTConfig(**SIZE, **MECHANISMS["moh"]), TrainConfig()),
    "all_on": (GPTConfig(**SIZE, **ALL_ON), TrainConfig()),
    "measured": (GPTConfig(**SIZE), TrainConfig(controller_log=True)),
    "constraint": (GPTConfig(**SIZE, **MECHANISMS["constraint_a"], constraint_gate="score",
                             constraint_router="hard_concrete"), TrainConfig()),
}
NEW_MECHANISM = """
class PositionGate(Mechanism):
    class Options:
        position_gate: bool = False

    name = flag = "position_gate"
    modes = {"position_gate": dict(position_gate=True)}
    needs_positions = True

    def before(self, attn, h):
        h.add_gate("position_gate", (h.positions >= 0)[:, None].to(h.x.dtype))


# ---- mechanisms outside the layers ----
"""
PATHS = {name: ROOT / name for name in ("model.py", "train.py")}
PATHS.update({path.name: path for path in ROOT.glob("nanoheads/**/*.py") if path.name != "__init__.py"})


def digests(root):
    """{name: the hash of its code} of each of CONFIGS."""
    for cached in (fingerprint.definitions, fingerprint.texts):
        cached.cache_clear()
    return {name: fingerprint.code_digest(*configs, root=root) for name, configs in CONFIGS.items()}


@pytest.fixture(scope="module")
def as_they_are():
    return digests(ROOT)


@pytest.fixture
def tree(tmp_path, as_they_are):
    """A copy of the code: tree(file, before, after) edits a file, tree.changed() names those of CONFIGS whose
    hash is another one since.
    """
    for path in [*ROOT.glob("*.py"), *ROOT.glob("nanoheads/**/*.py")]:
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
    fingerprint.definitions.cache_clear()
    fingerprint.texts.cache_clear()


# ---- what repeats nothing ----

class Reworded(ast.NodeTransformer):
    """Another sentence in every UserError; `count`: in how many."""
    count = 0

    def visit_Raise(self, node):
        if isinstance(node.exc, ast.Call) and getattr(node.exc.func, "id", None) == "UserError":
            node.exc.args = [ast.Constant("another sentence")]
            self.count += 1
        return node


def test_rewording_any_error_leaves_every_hash(tree):
    reworded = Reworded()
    for path in fingerprint.trees_of(tree.root):
        code = reworded.visit(ast.parse(path.read_text(encoding="utf-8")))
        path.write_text(ast.unparse(code), encoding="utf-8")
    assert reworded.count > 50 and tree.changed() == set()


@pytest.mark.parametrize("edit", [
    ("kernels.py", '"""Rotate x [..., D] by its position', '"""Turn x [..., D] by its position'),
    ("model.py", "ValueError(f\"{past + T} tokens do not fit", "ValueError(f\"{past + T} are not for"),
    ("mechanism.py", "must be a multiple of n_head", "is no multiple of n_head"),
    ("train.py", "import math", "import math  # a remark"),
    ("train.py", "best val loss {run.best_val_loss:.4f} nats; wrote", "wrote"),
    ("train.py", "def count_time(run, seconds):", "def count_time(run, seconds: float):"),
    ("config.py", "def flags_by_name():", "def flags_by_name(more=None):"),
    ("config.py", "steps between evaluations", "so many steps from one evaluation to the next"),
    ("scoring.py", "def count_words(", "def number_of_words("),
    ("scoring.py", "unit_scale=True", "unit_scale=False"),
    ("dataset.py", "def cut(self, starts, ends):", "def cut(self, starts: list, ends: list) -> list:"),
    ("common.py", "def explain(", "def explains("),
    ("trial.py", "def log_to(", "def logs_to(")], ids=lambda edit: f"{edit[0]}: {edit[1][:30]}")
def test_what_makes_no_number_repeats_nothing(tree, edit):
    tree(*edit)
    assert tree.changed() == set()


MOVES = {"nanoheads.training.optim": "nanoheads.updates", "nanoheads.kernels": "nanoheads.text.fused",
         "nanoheads.training.checkpoint": "nanoheads.saves", "nanoheads.text.dataset": "nanoheads.data"}


class Moved(ast.NodeTransformer):
    """Imports of a file whose modules have moved as MOVES has it, and what stands before a dot."""

    def __init__(self):
        self.names = {}  # of modules in this file: old name -> new name

    def visit_ImportFrom(self, node):
        lines = []
        for alias in node.names:
            if (module := f"{node.module}.{alias.name}") in MOVES:
                folder, name = MOVES[module].rsplit(".", 1)
                self.names[alias.name] = name
                lines.append(ast.ImportFrom(folder, [ast.alias(name, alias.asname)], 0))
            else:
                lines.append(ast.ImportFrom(MOVES.get(node.module, node.module), [alias], 0))
        return lines

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if isinstance(node.value, ast.Name):
            node.value.id = self.names.get(node.value.id, node.value.id)
        return node


def test_a_file_may_be_moved_and_renamed(tree):
    """Its imports with it, in every form in which a file is imported."""
    for old, new in MOVES.items():
        old, new = ((tree.root / name.replace(".", "/")).with_suffix(".py") for name in (old, new))
        old.rename(new)
    for path in tree.root.rglob("*.py"):
        code = Moved().visit(ast.parse(path.read_text(encoding="utf-8")))
        path.write_text(ast.unparse(ast.fix_missing_locations(code)), encoding="utf-8")
    names = {path.name for path in fingerprint.trees_of(tree.root)}
    assert {"updates.py", "fused.py", "saves.py", "data.py"} <= names and "optim.py" not in names
    assert tree.changed() == set()


def test_the_order_of_definitions_does_not_matter(tree):
    """model.py from its end to its beginning; imports stay in front."""
    path = tree.root / "model.py"
    body = ast.parse(path.read_text(encoding="utf-8")).body
    first = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    rest = [node for node in reversed(body) if node not in first]
    path.write_text("\n".join(map(ast.unparse, first + rest)), encoding="utf-8")
    assert tree.changed() == set()


def test_a_new_mechanism_repeats_nothing(tree):
    """Neither the code of a class that is off, nor its flag, is in the hash of those that stood before."""
    names = ["plain", "xsa", "moh"]
    before = [fingerprint.code_digest(CONFIGS[name][0], root=tree.root) for name in names]
    tree("model.py", "\n# ---- mechanisms outside the layers ----\n", NEW_MECHANISM)
    tree("model.py", "ContextGate, Sink]", "ContextGate, Sink, PositionGate]")
    script = ("from model import GPTConfig, MECHANISMS; from nanoheads.study.fingerprint import code_digest; "
              f"print(*(code_digest(GPTConfig(**{SIZE}, **MECHANISMS.get(n, {{}})))"
              f" for n in [*{names}, 'position_gate']))")
    done = subprocess.run([sys.executable, "-c", script], cwd=tree.root, capture_output=True, text=True)
    *after, its_own = done.stdout.split()
    assert after == before and its_own not in after, done.stderr


# ---- what repeats some runs, or all ----

@pytest.mark.parametrize("edit, stale", [
    (("rivals.py", "self.strength.tanh()", "self.strength.sin()"), {"xsa"}),
    (("model.py", "logits.topk(self.k, -1)", "logits.topk(self.k, -1, False)"), {"moh", "all_on"}),
    (("optim.py", "1 - group[\"momentum\"]", "2 - group[\"momentum\"]"), set(CONFIGS) - {"adamw"}),
    (("optim.py", "MARGIN = 1.02", "MARGIN = 1.03"), set(CONFIGS) - {"adamw"}),
    (("kernels.py", "small = q.size(2) <= 1024", "small = q.size(2) <= 512"),
     {"all_on", "measured", "constraint"}),
    (("model.py", "BETA, LOW, HIGH = 2 / 3", "BETA, LOW, HIGH = 1 / 3"), {"all_on", "constraint"}),
    (("measuring.py", "* len(y)", "* len(y) * 2"), {"measured"}),
    (("controller.py", "def starting_config(", "def starting_config(*more, "), {"measured"}),
], ids=lambda edit: f"{edit[0]}: {edit[1][:30]}" if isinstance(edit, tuple) else "")
def test_a_change_repeats_the_runs_that_it_concerns(tree, edit, stale):
    tree(*edit)
    assert tree.changed() == stale


@pytest.mark.parametrize("edit", [
    ("model.py", "0.02 / math.sqrt", "0.03 / math.sqrt"),
    ("kernels.py", "KERNEL_BLOCK = 128", "KERNEL_BLOCK = 64"),
    ("ranks.py", "self.world == 1:", "self.world < 2:"),
    ("kernels.py", "def rms_norm(x, eps=1e-6):", "def rms_norm(x, eps=1e-5):"),
    ("scoring.py", "mass.log() + short", "mass.log() - short"),
    ("dataset.py", "rng.shuffle(order)", "rng.permutation(order)"),
    ("tokenizer.py", "END_OF_TEXT =", "END_OF_TEXT = 1 +"),
    ("checkpoint.py", "model.load_state_dict(state[\"model\"])\n    except (ValueError, TypeError",
     "model.load_state_dict(state[\"model\"], False)\n    except (ValueError, TypeError"),
    ("train.py", "run.step += 1", "run.step += 2"),
    ("checkpoint.py", 'n in ("best.pt", "ckpt.pt")', 'n in ("ckpt.pt", "best.pt")'),
    ("trial.py", "score_windows(model, Dataset", "score_windows(model.train(), Dataset"),
    ("scoring.py", "np.isfinite(nats).all()", "np.isfinite(nats).any()"),
], ids=lambda edit: f"{edit[0]}: {edit[1][:30]}")
def test_what_makes_every_number_repeats_every_run(tree, edit):
    tree(*edit)
    assert tree.changed() == set(CONFIGS)


def test_flags_of_what_is_off_are_not_in_it():
    lists = {name: fingerprint.own_flags(config) for name, (config, _) in CONFIGS.items()}
    assert "xsa" in lists["xsa"] and not {"xsa", "sink", "routing_top_k"} & set(lists["plain"])
    assert GPTConfig(**lists["moh"]) == CONFIGS["moh"][0]
    off, on = (fingerprint.own_training(CONFIGS[name][1]) for name in ("plain", "measured"))
    assert on.keys() - off.keys() == set(ControllerConfig.__dataclass_fields__)


# ---- nothing is forgotten ----

def test_a_name_that_no_file_defines_is_an_error(tree):
    tree("kernels.py", "def rms_norm(x, eps", "def norm_of_rms(x, eps")
    with pytest.raises(ValueError, match="names rms_norm, which no file of a run defines"):
        tree.changed()


def test_every_name_is_there_and_stands_for_one_definition():
    """But for two limits of equal name, both of which make numbers, and a list that is made in two lines."""
    found = fingerprint.definitions(ROOT)
    assert fingerprint.named() <= set(found)
    several = {name for name in fingerprint.named() - fingerprint.NOT_NUMBERS if len(found[name]) > 1}
    assert several <= {"LOGITS_AT_ONCE", "QUINTICS"}


def test_what_a_named_definition_uses_is_named_too():
    """Every name of ours in its code: a constant, a helper, a class."""
    found, named = fingerprint.definitions(ROOT), fingerprint.named()
    apart = frozenset(name for name in named if "." in name)
    for name in named - fingerprint.NOT_NUMBERS:
        for node, modules in found[name]:
            node = fingerprint.Bare(modules, apart).visit(copy.deepcopy(node))
            parts = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
            own = {part.id for part in parts if not isinstance(part.ctx, ast.Load)}
            own |= {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
            own |= {part.name for part in ast.walk(node) if isinstance(part, ast.FunctionDef)}
            unnamed = {part.id for part in parts} & set(found) - own - named
            assert not unnamed, f"{name} uses {unnamed}: name them in fingerprint.py"


def first_line(node):
    return min(part.lineno for part in (node, *node.decorator_list))


def spans_of(path):
    """[(first line, last line, name)] of the functions, methods and classes of a file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            for method in methods if isinstance(node, ast.ClassDef) else ():
                yield first_line(method), method.end_lineno, f"{node.name}.{method.name}"
            yield first_line(node), node.end_lineno, node.name


def executed(run):
    """The names of the definitions in a run's files that run() executes."""
    spans, seen = {str(path): [*spans_of(path)] for path in fingerprint.trees_of(ROOT)}, set()

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename in spans:
            seen.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return {next((name for first, last, name in spans[file] if first <= line <= last), None)
            for file, line in seen} - {None}


DYNAMIC = dict(controller_interval=1, controller_tokens=64, controller_heldout=64, controller_warmup=1,
               controller_patience=1)
MOVED = dict(sentinel="hard_concrete", agency=True)
RUNS = {
    **{name: (flags, DYNAMIC | {"controller_log": True} if "agency_learned" in flags else {})
       for name, flags in MECHANISMS.items()},
    "plain": ({}, {}), "all_on": (ALL_ON, {}),
    "gpt2": (dict(recipe="gpt2", dropout=0.1), dict(grad_accum=2, dtype="bfloat16")),
    "ann": (MOVED, dict(**DYNAMIC, controller="ann", prune_gate=0.4, prune_margin=5.0, grow_from=2,
                        grow_heads=1, grow_delta=5.0, policy=True, policy_budget=0.8)),
    "rules": (MOVED, dict(**DYNAMIC, controller="rules", sparsity_warmup=4)),
    "rl": (MOVED, dict(**DYNAMIC, controller="rl")),
    "blocks": (dict(agency=True, agency_scope="block"),
               dict(**DYNAMIC, policy=True, policy_budget=0.5, policy_dwell=1)),
    "mlps": (dict(agency=True, agency_scope="mlp", agency_learned=True),
             dict(**DYNAMIC, controller_log=True)),
    "stacked": ({}, dict(**DYNAMIC, grow_stack=True, grow_delta=5.0)),
    "documents": ({}, dict(documents=4)),
    "tuned": (MECHANISMS["unet_add"], dict(init_from="plain", freeze_trunk=True, thaw_from=2)),
}
# these return at once in a run that does without
RETURN_AT_ONCE = {"start", "starting_config", "teacher_of"}


@pytest.mark.parametrize("name", RUNS)
def test_whatever_a_run_executes_is_named(name, bytes_data, tmp_path, monkeypatch):
    """Each function that train() and the score come to is in the run's hash, or listed as no number's."""
    monkeypatch.setattr(dataset, "BEGINNINGS", [re.compile(rb"^\d", re.M)])  # a line is a document
    monkeypatch.chdir(tmp_path)
    flags, keys = RUNS[name]
    sizes = {**SIZE, "n_layer": 4, "block_size": 16, "n_embd": 128}
    model = GPTConfig(**{**sizes, **flags})
    common = dict(dataset=str(bytes_data), device="cpu", batch_size=4, max_iters=4, eval_interval=2,
                  eval_tokens=64, log_interval=1)
    config = TrainConfig(out_dir="run", **common, **keys)
    given = {}
    if config.init_from:  # which flags were given is known from a command line
        train(GPTConfig(**sizes), TrainConfig(out_dir=config.init_from, **common))
        argv = {**sizes, **flags, **vars(config)}
        (model, config), given = configurator.load_given(
            (GPTConfig, TrainConfig), [f"--{key}={value}" for key, value in argv.items()])

    def run():
        train(model, config, given)
        trained = checkpoint.build(checkpoint.read("run"), "run")
        trial.score_windows(trained, dataset.Dataset(bytes_data), "test", 100)

    names, apart = fingerprint.run_names(model, config), fingerprint.named()
    off = {cls.__name__ for cls in fingerprint.off_mechanisms(model)}  # asked whether they are on
    for each in executed(run) - RETURN_AT_ONCE:
        cls, _, method = each.rpartition(".")
        if each in names | fingerprint.NOT_NUMBERS or method.endswith(("problems", "conflicts")):
            continue
        assert each not in apart and cls in names | fingerprint.NOT_NUMBERS | off, each
