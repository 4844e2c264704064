"""A mechanism in a file of one's own: where it runs, what is kept with a run, what is refused in one line.

The examples of docs/add-a-mechanism.md are tried in tests/lab/mechanisms/test_add_a_mechanism.py.
"""

import hashlib
import shlex
import subprocess
import sys

import pytest
import torch

import evaluate
import model
import sample
import train
from helpers import CODE, ROOT, forget_own_mechanisms
from nanoheads import own_mechanism as own
from nanoheads.common import UserError
from nanoheads.config import TrainConfig
from nanoheads.configurator import Presets, parse_command

SIZES = dict(vocab_size=37, block_size=16, n_layer=1, n_head=2, n_embd=16)
MINE = """
from nanoheads.mechanism import Mechanism, flag
from {module} import factor

class {name}(Mechanism):
    class Options:
        {name}: bool = flag(False, "each head's output is multiplied by a number")

    name = flag = "{name}"
    modes = {{"{name}": dict({name}=True)}}

    def after_attention(self, attn, heads):
        heads.y = factor(heads.y)
"""
GATES = "from project.deep import SIZE\n\ndef factor(y):\n    return SIZE * y\n"


@pytest.fixture
def project(tmp_path, own_mechanisms_go):
    """project(name, size) -> name/name.py, whose gates.py takes `size` from a package beside it."""
    def write(name="mine", size=2.0):
        folder = tmp_path / name
        (folder / "project").mkdir(parents=True, exist_ok=True)
        (folder / "project" / "__init__.py").write_text("")
        (folder / "project" / "deep.py").write_text(f"from .numbers import SIZE  # {name}\n")
        (folder / "project" / "numbers.py").write_text(f"SIZE = {size}\n")
        (folder / "gates.py").write_text(GATES)
        (folder / f"{name}.py").write_text(MINE.format(name=name, module="gates"))
        return folder / f"{name}.py"
    return write


def anew(program, *argv):
    """Call a program as in a process of its own, which has added no file yet."""
    forget_own_mechanisms()
    program.main([*map(str, argv)])


def line_of(program, *argv):
    """The line with which a program ends that cannot go on."""
    with pytest.raises(SystemExit) as e:
        anew(program, *argv)
    assert isinstance(e.value.code, str) and "\n" not in e.value.code, e.value.code
    return e.value.code


def factor_of(flag):
    """What a mechanism of MINE multiplies by, in a model that has it on."""
    gpt = model.GPT(model.GPTConfig(**SIZES, **{flag: True}))
    return getattr(gpt.transformer.h[0].attn, flag).after_attention.__globals__["factor"](1.0)


# ---- where it runs ----

@pytest.mark.slow
def test_the_line_that_asks_for_a_file_ends_in_a_command_that_runs(args, mine, tmp_path):
    """Also where the folder's name has to be quoted."""
    train.main([*args("a run", max_iters=1), f"--mechanism={mine()}"])
    mine().unlink()
    text = next(arg for arg in args() if arg.startswith("--dataset="))
    for words in (["sample.py", "--ckpt", "a run", "--start=a b", "--max_new_tokens=2", "--device=cpu"],
                  ["evaluate.py", "--ckpt=a run/best.pt", "--split=val", "--tokens=32", "--device=cpu"],
                  ["train.py", "--resume", "--out_dir=a run", "--max_iters=2"],
                  ["train.py", "--init_from=a run", "--max_iters=1", "--device=cpu", "--out_dir=new", text]):
        words[0] = str(ROOT / words[0])
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
        line = done.stderr.splitlines()[-1]
        assert done.returncode == 1
        assert "mechanism in mine.py, whose code runs only where it is named: " in line
        python, *command = shlex.split(line.partition("it is named: ")[2])
        assert python == "python" and command[:-1] == words and command[-1].endswith("=a run/mine.py")
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_nothing_beside_a_checkpoint_runs_until_it_is_named(args, mine, tmp_path):
    path, ran, run = mine(), tmp_path / "it ran", tmp_path / "run"
    path.write_text(f"{CODE}\nopen({str(ran)!r}, 'w').close()\n")
    train.main([*args(max_iters=1), f"--mechanism={path}"])
    ran.unlink()
    for program, words in ((sample, ["--ckpt", run]), (evaluate, ["--ckpt", run / "best.pt", "--split=val"]),
                           (train, ["--resume", f"--out_dir={run}"]), (train, args("new", init_from=run)),
                           (train, ["--eval_only", f"--out_dir={run}"])):
        assert "whose code runs only where it is named: " in line_of(program, *words) and not ran.exists()
    evaluate.main(["--ckpt", str(run), "--split=val", "--tokens=32", f"--mechanism={run / 'mine.py'}"])
    assert ran.exists()


def test_a_teacher_needs_its_file_too(args, mine, tmp_path):
    heads = dict(max_iters=1, constraint_names="['a']", constraint_layers="[0]", recipe="gpt2")
    train.main([*args("teacher", **heads), f"--mechanism={mine()}"])
    keys = args("pupil", **heads, constraint_match="kl", teacher=tmp_path / "teacher")
    assert "teacher was made with the mechanism in mine.py, whose code runs only" in line_of(train, *keys)
    anew(train, *keys, f"--own_mechanism={tmp_path / 'teacher' / 'mine.py'}")
    assert (tmp_path / "pupil" / "best.pt").is_file()


def test_a_checkpoint_without_the_mechanism_needs_no_file(args, mine, tmp_path):
    train.main([*args(max_iters=1), f"--own_mechanism={mine()}"])
    anew(sample, "--ckpt", tmp_path / "run", "--start=1", "--max_new_tokens=2")


def test_another_text_and_a_copy_that_is_gone_are_told(args, mine, tmp_path):
    run, path = tmp_path / "run", mine()
    train.main([*args(max_iters=1), f"--mechanism={path}"])
    path.write_text(f"{CODE}\n# edited\n")
    said = line_of(sample, "--ckpt", run, f"--mechanism={path}")
    assert f"{path} is another text (sha256 " in said and said.endswith("name the right file")
    (run / "mine.py").write_text(f"{CODE}\n# edited too\n")
    said = line_of(sample, "--ckpt", run)
    assert f"{run / 'mine.py'} is another text (sha256 " in said and said.endswith("--mechanism=FILE")
    (run / "mine.py").unlink()
    assert f"there is no copy {run / 'mine.py'}: name the right file" in line_of(sample, "--ckpt", run)


def test_of_two_files_the_one_that_was_not_named_is_asked_for(args, mine, project, tmp_path):
    run = tmp_path / "run"
    train.main([*args(max_iters=1), f"--mechanism={mine()},{project('gate')}"])
    said = line_of(sample, "--ckpt", run, f"--mechanism={run / 'gate.py'}")
    assert "was made with the mechanism in mine.py, whose code runs only where it is named" in said
    anew(sample, "--ckpt", run, "--start=1", "--max_new_tokens=2",
         f"--mechanism={run / 'gate.py'},{run / 'mine.py'}")


def test_programs_that_read_checkpoints_take_files_alone(tmp_path):
    for word, said in (("xsa", "--mechanism=xsa must be a file"), ("no.py", "no mechanism file no.py")):
        assert said in line_of(sample, "--ckpt", tmp_path, f"--mechanism={word}")


# ---- helpers ----

def test_a_file_without_helpers_is_known_by_its_text(mine):
    own.add(mine())
    record, = own.record(model.GPTConfig(**SIZES, forget=True))
    assert record == dict(file="mine.py", digest=hashlib.sha256(CODE.encode()).hexdigest()[:16])


def test_helpers_are_kept_and_named_with_their_file(project, tmp_path):
    own.add(project())
    config = model.GPTConfig(**SIZES, mine=True)
    helpers = ["gates.py", "project/__init__.py", "project/deep.py", "project/numbers.py"]
    assert own.record(config)[0]["helpers"] == helpers and factor_of("mine") == 2.0
    own.keep(config, tmp_path / "run")
    for name in ("mine.py", *helpers):
        assert (tmp_path / "run" / name).read_text() == (tmp_path / "mine" / name).read_text()
    assert {path.name for path in tmp_path.rglob("*")}.isdisjoint({"__pycache__"})


def test_an_edited_helper_is_another_mechanism(project):
    digests = []
    for size in (2.0, 3.0, 2.0):  # of one length, within one second
        own.add(project(size=size))
        assert factor_of("mine") == size
        digests.append(own.record(model.GPTConfig(**SIZES, mine=True))[0]["digest"])
        with pytest.raises(UserError, match="two texts of one mechanism"):
            own.add(project(size=5.0))
        forget_own_mechanisms()
    assert digests[0] == digests[2] != digests[1]


def test_a_run_with_helpers_goes_on_from_its_copies(project, args, rows, tmp_path):
    """As if it was never stopped, after the project is gone; and not with a helper of another text."""
    path, run = project(), tmp_path / "run"
    train.main([*args("whole", max_iters=4), f"--mechanism={path}"])
    anew(train, *args(max_iters=2), f"--mechanism={path}")
    (path.parent / "gates.py").unlink()
    anew(train, "--resume", f"--out_dir={run}", "--max_iters=4", f"--mechanism={run / 'mine.py'}")
    (losses, evals), (its_losses, its_evals) = rows(tmp_path / "whole"), rows(run)
    assert [row["loss"] for row in losses] == [row["loss"] for row in its_losses]
    assert evals[-1]["val_loss"] == its_evals[-1]["val_loss"]
    anew(sample, "--ckpt", run, "--start=1", "--max_new_tokens=2", f"--mechanism={run / 'mine.py'}")
    (run / "project" / "numbers.py").write_text("SIZE = 7.0\n")
    for more in ([], [f"--mechanism={run / 'mine.py'}"]):
        assert "project/numbers.py is another text" in line_of(sample, "--ckpt", run, *more)


def test_two_files_have_helpers_of_one_name(project, args):
    """Each its own; but one run could not keep both."""
    mine, yours = project("mine", 2.0), project("yours", 3.0)
    own.add(mine)
    own.add(yours)
    assert (factor_of("mine"), factor_of("yours")) == (2.0, 3.0)
    assert "gates" not in sys.modules and "project" not in sys.modules
    assert "come with two different project/deep.py" in line_of(
        train, *args(), f"--mechanism={mine},{yours}")


@pytest.mark.slow
def test_helpers_of_one_name_are_compiled_each(project):
    """torch.compile looks for the module of a function by its name."""
    for path in (project("mine", 2.0), project("yours", 3.0)):
        flag, = own.add(path)
        gpt, ids = model.GPT(model.GPTConfig(**SIZES, **{flag: True})).eval(), torch.arange(9)[None]
        assert torch.allclose(torch.compile(gpt)(ids).logits, gpt(ids).logits, atol=1e-6)


def test_libraries_and_the_repositorys_modules_are_no_helpers(tmp_path, monkeypatch, own_mechanisms_go):
    library = tmp_path / "venv" / "site-packages"
    library.mkdir(parents=True)
    (library / "strengths.py").write_text("def factor(y):\n    return 2 * y\n")
    monkeypatch.syspath_prepend(library)
    path = tmp_path / "mine.py"
    path.write_text("import numpy, statistics\nfrom nanoheads.attention import attend\n"
                    + MINE.format(name="mine", module="strengths"))
    own.add(path)
    assert own.find_added(path).helpers == {}


@pytest.mark.parametrize("name", ["mine.py", "my mechanism.py"])
def test_a_run_goes_on_with_its_copy_by_its_folder_alone(name, mine, args, tmp_path):
    """Also one that was killed before its first save: config.json says which file it takes."""
    anew(train, *args(max_iters=1), f"--mechanism={mine(name=name)}")
    for resumed in range(2):
        assert f"was made with the mechanism in {name}, whose code runs only where it is named" in line_of(
            train, "--resume", f"--out_dir={tmp_path / 'run'}")
        anew(train, "--resume", f"--out_dir={tmp_path / 'run'}", "--max_iters=2",
             f"--mechanism={tmp_path / 'run' / name}")
        for checkpoint in ("ckpt.pt", "best.pt", "log.jsonl"):
            (tmp_path / "run" / checkpoint).unlink()


# ---- mistakes, each one line ----

HOOK = "    def score_mod(self, attn, heads):"
MODES = 'modes = {"forget": dict(forget=True)}'
BOOL = 'forget: bool = flag(False, "scores fall with distance, at a learned rate for each head")'


@pytest.mark.parametrize("before, after, words", [
    (MODES, 'modes = {"forget": dict(forget=True, forget_int=-2)}',
     "modes: forget sets forget_int, and there is no such flag; did you mean forget_init?"),
    (MODES, 'modes = ["forget"]', "modes=['forget'] must be a dict of dicts"),
    (MODES, 'modes = {"forget": True}', "must be a dict of dicts"),
    (MODES, "modes = {}", "modes must name at least one mode"),
    (MODES, 'modes = {"for-get": dict(forget=True)}', "'for-get' must be a name"),
    (MODES, 'modes = {"forget": dict(forget_init=-2.0)}', "'forget' does not set forget, the flag that"),
    (MODES, "modes = {\"forget\": dict(forget=True, forget_init='x')}", "forget_init='x' is not float"),
    (BOOL, "forget: bool", "every flag needs a default"),
    ("forget_init: float", "forget_init: 'Number'", "an annotation cannot be read: NameError: name 'Number'"),
    ('name = "forgetting"', "name = 5", "name=5 must be a name of its own"),
    ('flag = "forget" ', "flag = None ", "flag=None must be one of its Options"),
    ('{"forget": {"forgetting.slope": -60.0}}', "1", "neutral=1 must be a dict of dicts"),
])
def test_a_mistake_in_a_declaration_is_one_line(before, after, words, mine):
    path = mine(before, after)
    said = line_of(train, f"--mechanism={path}")
    assert said.startswith(f"train: {path}: Forgetting: ") and words in said and not own.FILES


@pytest.mark.parametrize("before, after, words", [
    ("import torch\n", "def f(:\n", "mine.py, line 2: SyntaxError"),
    ("import torch\n", "import nowhere\n", "mine.py, line 2: ModuleNotFoundError: No module named 'nowhere'"),
    ("        super().__init__()\n", "", "mine.py, line 23: AttributeError: cannot assign parameters before"),
    (HOOK, f"{HOOK}\n        boom  #", "mine.py, line 27: NameError: name 'boom' is not defined"),
    ("config.forget_init)", "config.forget_in)", "mine.py, line 24: AttributeError: a GPTConfig has no"),
    ("import torch\n", "import sys\nsys.exit(0)\n", "mine.py, line 3: SystemExit: 0"),
    ("        super().__init__()\n", "        exit()\n", "mine.py, line 23: SystemExit"),
    (HOOK, f"{HOOK}\n        exit(0)  #", "mine.py, line 27: SystemExit: 0"),
    (HOOK, f"    def after_attention(self, attn, heads):\n        heads.gate = heads.y\n\n{HOOK}",
     "AttributeError: 'Heads' object has no attribute 'gate'"),
])
def test_a_mistake_in_the_code_names_file_and_line(before, after, words, mine, args):
    assert words in line_of(train, *args(), f"--mechanism={mine(before, after)}")


@pytest.mark.parametrize("hook, words", [
    ("before_projection(self, attn, heads): heads.x = heads.x[:, :-1]",
     "must leave in heads.x a tensor of the shape [2, 16, 16], and its shape is [2, 15, 16]"),
    ("after_projection(self, attn, qkv, heads): qkv * 2",
     "must return a tensor of the shape [2, 16, 6, 8], and it is None"),
    ("after_projection(self, attn, qkv, heads): return qkv[:, :, :2]", "and its shape is [2, 16, 2, 8]"),
    ("before_attention(self, attn, heads): heads.q = heads.q[:, :1]",
     "must leave in heads.q a tensor of the shape [2, 2, 16, 8], and its shape is [2, 1, 16, 8]"),
    ("before_attention(self, attn, heads): heads.v = heads.v[:, :, :-1]", "heads.v a tensor of the shape"),
    ("before_attention(self, attn, heads): heads.k = heads.k[..., :-1]",
     "must leave in heads.q and heads.k heads of one size, and theirs are 8 and 7"),
    ("after_attention(self, attn, heads): heads.y = heads.y[..., :-1]",
     ": the layer cannot go on after it: RuntimeError: mat1 and mat2"),
    ("before_attention(self, attn, heads): heads.losses['a'] = heads.x",
     "must leave in heads.losses a dictionary of losses, each a tensor of no dimension, and 'a' has"),
    ("score_mod(self, attn, heads): return 5",
     "must return None or a function of (score, b, h, t, s): 5 is not a callable object"),
    ("score_mod(self, attn, heads): return lambda score, b: score", "(score, b, h, t, s): too many"),
    ("score_mod(self, attn, heads): return torch.tanh", ": the layer cannot go on after it: TypeError"),
    ("after_kernel(self, attn, heads, y, row_stats): return y", "must return y and row_stats, and returned"),
    ("after_attention(self, attn, heads): heads.y = heads.y.mean(1)", "heads.y a tensor of the shape"),
    ("after_attention(self, attn, heads): heads.gates['a'] = 0.5",
     "must put a tensor into heads.gates['a'], not 0.5"),
    ("after_kernel(self, attn, heads, y, row_stats): return [y, row_stats]", "and returned a list"),
    ("score_mod(self, attn, heads): return self.slope", "a Parameter is not a callable object"),
    ("score_mod(self, attn, heads): return lambda score, h, b, t, s: score",
     "it has these arguments in another order, (score, h, b, t, s)"),
    ("before_attention(self, attn, heads): return heads.q * 2",
     "must return nothing, and returned a Tensor, which would be ignored: set heads.x, heads.q,"),
    ("after_attention(self, attn, heads): yield heads.y", "must return nothing, and returned a generator"),
    ("after_attention(self, attn, heads): heads.gates['a'] = torch.ones(3, 3, 3)",
     "what broadcasts over the outputs [2, 2, 16, 8], and its shape is [3, 3, 3]"),
    ("trace_map(self, attn, weights, heads): return weights.mean(1)",
     "must return a tensor of the shape [2, 2, 16, 16], and its shape is [2, 16, 16]"),
    ("model_losses(cls, model, outcome): pass",
     "must return a dictionary of losses, each a tensor of no dimension, and it is None"),
])
def test_what_a_layer_cannot_go_on_with_names_class_and_hook(hook, words, mine, args, capsys):
    """Before a run, and by --check."""
    path = mine(HOOK, f"    {'@classmethod' * hook.startswith('model_')}\n    def {hook}\n"
                      f"    def {'old' * hook.startswith('score_')}score_mod(self, attn, heads):")
    place = f"Forgetting.{hook.partition('(')[0]}()"
    said = line_of(train, *args(), f"--mechanism={path}")
    assert said.startswith(f"train: {path}, line 2") and place in said and words in said
    assert line_of(train, f"--mechanism={path}", "--check") == "train: 1 of 1 promises are broken"
    assert place in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("value", ["row_stats.entropy", "forward_pass.n_keys.log()"])
def test_what_is_none_unless_a_class_asks_for_it_is_named(value, mine, args):
    path = mine(HOOK, f"    def after_attention(self, attn, heads):\n        heads.{value}\n\n{HOOK}")
    said = line_of(train, *args(), f"--mechanism={path}")
    assert "heads.row_stats is None unless the class names in needs_row_stats what it reads" in said
    assert "positions and n_keys unless it has needs_positions = True" in said


@pytest.mark.parametrize("hook, words", [
    ("score_mod(self, attn): return None", "score_mod() is called with (self, attn, heads): too many"),
    ("before_attention(self, heads, attn): pass",
     "(self, attn, heads): it has these arguments in another order, (self, heads, attn)"),
    ("at_step(self, step): pass", "at_step() is called with (self, config, step): too many positional"),
    ("problems(self, config): return []", "problems() is called with (config), as a staticmethod: missing"),
    ("__init__(self, config): pass", "__init__() is called with (self, config, attn): too many positional"),
    ("__init__(self, config, attn): self.a = 5", "__init__ must begin with super().__init__()"),
    ("__init__(self, config, attn):\n        super().__init__()\n        self.a = attn", "it keeps attn,"),
])
def test_a_method_that_cannot_be_called_is_one_line(hook, words, mine):
    path = mine(HOOK, f"    def {hook}\n    def old(self, attn, heads):")
    said = line_of(train, f"--mechanism={path}")
    assert said.startswith(f"train: {path}: Forgetting: ") and words in said and not own.FILES


@pytest.mark.parametrize("gives", ["None", "'no'", "[5]"])
def test_problems_that_are_no_sentences_are_one_line(gives, mine):
    path = mine(HOOK, f"    @staticmethod\n    def problems(config):\n        return {gives}\n{HOOK}")
    assert f"problems() must give a list of sentences, or yield them; for forget it gives {gives}" in line_of(
        train, f"--mechanism={path}")


def test_a_gate_may_be_one_number(mine, args, tmp_path):
    path = mine(HOOK, f"    def after_attention(self, attn, heads):\n"
                      f"        heads.gates[self.name] = torch.tensor(0.5)\n\n{HOOK}")
    train.main([*args(max_iters=1), f"--mechanism={path}"])
    assert (tmp_path / "run" / "best.pt").is_file()


@pytest.mark.parametrize("code, words", [
    ("boom\n", "gates.py, line 1: NameError: name 'boom'"), ("def f(:\n", "gates.py, line 1: SyntaxError"),
    ("def factor(y):\n    return y.boom\n", "gates.py, line 2: AttributeError")])
def test_a_mistake_in_a_helper_names_file_and_line(code, words, project, args):
    path = project()
    (path.parent / "gates.py").write_text(code)
    assert words in line_of(train, *args(), f"--mechanism={path}")


def test_names_that_are_taken_are_one_line(project, mine):
    own.add(project())
    for before, after, words in (
            (CODE, MINE.format(name="mine", module="math").replace("factor", "exp"),
             "two texts of one mechanism, with the flag mine: one at a time"),
            ("class Options:", "class Options:\n        sink: int = 0", "sink must begin with forget"),
            ('modes = {"forget"', 'modes = {"mine"', "there is a mode mine already"),
            ('name = "forgetting"', 'name = "mine"', "name='mine' must be a name of its own")):
        with pytest.raises(UserError, match=words):
            own.add(mine(before, after, name="yours.py"))
    assert len(own.FILES) == 1


def test_two_files_of_one_name_are_one_line(mine, project, args):
    path = project()
    assert f"{mine()} and {path} come with two different mine.py" in line_of(
        train, *args(), f"--mechanism={path},{mine()}")


def test_a_run_has_one_mode_of_a_file(mine, args):
    path = mine(MODES, 'modes = {"forget": dict(forget=True), "fast": dict(forget=True, forget_init=-1.0)}')
    assert f"{path} has the modes forget, fast: name one, as in {path}:forget" in line_of(
        train, *args(), f"--mechanism={path}")
    assert "has no mode fats; it has forget, fast" in line_of(train, *args(), f"--mechanism={path}:fats")
    command = parse_command((Presets, model.GPTConfig, TrainConfig), [f"--mechanism=xsa,{path}:fast"])
    command = own.add_from_command(command, all_modes=False)
    assert command.words() == ["--mechanism=xsa,fast", f"--own_mechanism={path}"]


# ---- before training ----

def test_a_look_ahead_is_refused_before_training(mine, args, tmp_path):
    path = mine(HOOK, f"{HOOK}\n        heads.q = heads.q + heads.x.mean(1)[:, None, None, :1]")
    assert "before training it looks ahead: position " in line_of(train, *args(), f"--mechanism={path}")
    assert not (tmp_path / "run" / "best.pt").exists()


def test_a_difference_with_a_cache_is_said_before_training(mine, args, capsys):
    """It trains, since neither training nor scoring decodes."""
    path = mine("rate[h] * (t - s)", "rate[h] * (t - s) * heads.q.size(2)")
    train.main([*args(max_iters=1), f"--mechanism={path}"])
    note, = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Note: Forgetting: ")]
    assert "with a cache the hidden states are off" in note and "what is sampled will be wrong" in note
    anew(train, *args("right", max_iters=1), f"--mechanism={mine()}")
    assert "Note: Forgetting" not in capsys.readouterr().out
