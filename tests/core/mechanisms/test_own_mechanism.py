"""A mechanism in a file of one's own: where it runs, what is kept with a run, what is refused in one line.

The examples of docs/your-own-mechanism.md, and what --check says of them, are tried in
tests/docs/test_your_own_mechanism.py.
"""

import hashlib
import py_compile
import re
import shlex
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import evaluate
import model
import sample
import train
from helpers import CODE, ROOT, forget_own_mechanisms
from nanoheads import own_mechanism as own
from nanoheads.class_checks import problems_of_values, small_models
from nanoheads.common import UserError
from nanoheads.config import TrainConfig
from nanoheads.configurator import Presets, build_configs, keys_of, parse_command
from nanoheads.mechanism import start_at

SIZES = dict(vocab_size=37, block_size=16, n_layer=1, n_head=4, n_embd=32)
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
ASKS = "whose code runs only where it is named: "


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


def gpt_of(flag, **more):
    return model.GPT(model.GPTConfig(**SIZES, **{flag: True}, **more)).eval()


def factor_of(flag):
    """What a mechanism of MINE multiplies by, in a model that has it on."""
    layer, heads = getattr(gpt_of(flag).transformer.h[0].attn, flag), SimpleNamespace(y=1.0)
    layer.after_attention(None, heads)
    return heads.y


# ---- where it runs ----

@pytest.mark.slow
def test_nothing_beside_a_checkpoint_runs_but_by_the_command_that_the_line_ends_in(
        args, mine, tmp_path, monkeypatch):
    """Also where the folder's name has to be quoted, and once the file itself is gone."""
    path, ran = mine(), tmp_path / "it ran"
    path.write_text(f"{CODE}\nopen({str(ran)!r}, 'w').close()\n")
    train.main([*args("a run", max_iters=1), f"--mechanism={path}"])
    path.unlink()
    monkeypatch.chdir(tmp_path)
    for program, *words in (
            (sample, "--ckpt", "a run", "--start=a b", "--max_new_tokens=2", "--device=cpu"),
            (evaluate, "--ckpt=a run/best.pt", "--split=val", "--tokens=32", "--device=cpu"),
            (train, "--resume", "--out_dir=a run", "--max_iters=2"),
            (train, *args("new", init_from="a run", max_iters=1))):
        ran.unlink(missing_ok=True)
        main = ModuleType("__main__")  # of a process that runs the program
        main.__file__, main.__spec__ = str(ROOT / f"{program.__name__}.py"), None
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "__main__", main)
            patch.setattr(sys, "argv", [main.__file__, *words])
            line = line_of(program, *words)
        assert not ran.exists() and "made with the mechanism in mine.py, " in line
        python, file, *command = shlex.split(line.partition(ASKS)[2])
        assert (python, file, command[:-1]) == ("python", main.__file__, words)
        assert command[-1].endswith("=a run/mine.py")
        anew(program, *command)
        assert ran.exists()


@pytest.mark.slow
def test_a_teacher_needs_its_file_too(args, mine, tmp_path):
    heads = dict(max_iters=1, constraint_names="['a']", constraint_layers="[0]", recipe="gpt2")
    train.main([*args("teacher", **heads), f"--mechanism={mine()}"])
    keys = args("pupil", **heads, constraint_match="kl", teacher=tmp_path / "teacher")
    assert f"teacher was made with the mechanism in mine.py, {ASKS}" in line_of(train, *keys)
    anew(train, *keys, f"--own_mechanism={tmp_path / 'teacher' / 'mine.py'}")
    assert (tmp_path / "pupil" / "best.pt").is_file()


@pytest.mark.slow
def test_another_text_a_copy_that_is_gone_and_a_word_that_is_no_file_are_told(args, mine, tmp_path):
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
    assert "--mechanism=xsa must be a file" in line_of(sample, "--ckpt", run, "--mechanism=xsa")
    assert "no mechanism file no.py" in line_of(sample, "--ckpt", run, "--mechanism=no.py")


@pytest.mark.slow
def test_of_two_files_the_one_that_was_not_named_is_asked_for(args, mine, project, tmp_path):
    run = tmp_path / "run"
    train.main([*args(max_iters=1), f"--mechanism={mine()},{project('gate')}"])
    said = line_of(sample, "--ckpt", run, f"--mechanism={run / 'gate.py'}")
    assert f"was made with the mechanism in mine.py, {ASKS}" in said
    anew(sample, "--ckpt", run, "--start=1", "--max_new_tokens=2",
         f"--mechanism={run / 'gate.py'},{run / 'mine.py'}")


@pytest.mark.slow
def test_a_run_goes_on_with_its_copy_by_its_folder_alone(mine, args, tmp_path):
    """Also one that was killed before its first save: config.json says which file it takes."""
    name = "my mechanism.py"
    anew(train, *args(max_iters=1), f"--mechanism={mine(name=name)}")
    for _ in range(2):
        said = line_of(train, "--resume", f"--out_dir={tmp_path / 'run'}")
        assert f"was made with the mechanism in {name}, {ASKS}" in said
        anew(train, "--resume", f"--out_dir={tmp_path / 'run'}", "--max_iters=2",
             f"--mechanism={tmp_path / 'run' / name}")
        for checkpoint in ("ckpt.pt", "best.pt", "log.jsonl"):
            (tmp_path / "run" / checkpoint).unlink()


@pytest.mark.slow
def test_a_run_that_starts_over_keeps_the_text_of_now(mine, args, tmp_path):
    """Not the one of the run before, with which nothing of it could be read."""
    for text in ("", "# edited\n"):
        path = mine()
        path.write_text(path.read_text() + text)
        anew(train, *args(max_iters=1), f"--mechanism={path}", "--overwrite")
    assert (tmp_path / "run/mine.py").read_text() == path.read_text()


def test_the_record_is_of_the_text_that_runs(mine, tmp_path):
    """A file that is edited during a run, or deleted: the copy and the digest are those of what was read."""
    path = mine()
    own.add(path)
    config = model.GPTConfig(**SIZES, forget=True)
    record = [dict(file="mine.py", digest=hashlib.sha256(CODE.encode()).hexdigest()[:16])]
    path.write_text(CODE + "\n# edited\n")
    assert own.record(config) == record
    own.keep(config, tmp_path / "run")
    assert (tmp_path / "run" / "mine.py").read_text() == CODE
    with pytest.raises(UserError, match="two texts of one mechanism, with the flag forget"):
        own.add(path)
    path.unlink()
    assert own.add(tmp_path / "run" / "mine.py") == ["forget"]


def test_bytecode_beside_a_file_is_not_run(mine):
    """Python would take it by the file's time and size alone."""
    path = mine()
    py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    mine("-60.0}", "-61.0}")
    own.add(path)
    assert model.NEUTRAL["forget"] == {"forgetting.slope": -61.0}


# ---- helpers ----

def test_helpers_are_kept_and_named_with_their_file(project, tmp_path):
    own.add(project())
    config = model.GPTConfig(**SIZES, mine=True)
    helpers = ["gates.py", "project/__init__.py", "project/deep.py", "project/numbers.py"]
    assert own.record(config)[0]["helpers"] == helpers and factor_of("mine") == 2.0
    own.keep(config, tmp_path / "run")
    for name in ("mine.py", *helpers):
        assert (tmp_path / "run" / name).read_text() == (tmp_path / "mine" / name).read_text()
    assert {path.name for path in tmp_path.rglob("*")}.isdisjoint({"__pycache__"})


@pytest.mark.slow
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


@pytest.mark.slow
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
    (run / "project" / "numbers.py").write_text("SIZE = 7.0\n")
    for more in ([], [f"--mechanism={run / 'mine.py'}"]):
        assert "project/numbers.py is another text" in line_of(sample, "--ckpt", run, *more)


@pytest.mark.slow
def test_two_files_have_helpers_of_one_name(project, args):
    """Each its own, also where they are compiled: PyTorch looks for a function's module by its name. But one
    run could not keep both.
    """
    mine, yours = project("mine", 2.0), project("yours", 3.0)
    ids = torch.arange(9)[None]
    for path in (mine, yours):
        flag, = own.add(path)
        gpt = gpt_of(flag)
        assert torch.allclose(torch.compile(gpt, backend="eager")(ids).logits, gpt(ids).logits, atol=1e-6)
    torch._dynamo.reset()
    assert (factor_of("mine"), factor_of("yours")) == (2.0, 3.0)
    assert "gates" not in sys.modules and "project" not in sys.modules
    said = line_of(train, *args(), f"--mechanism={mine},{yours}")
    assert "come with two different project/deep.py" in said


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


# ---- the command line ----

@pytest.mark.parametrize("argv, config, taken", [
    (["--mechanism", "F", "--resume"], None, ["--resume", "--mechanism=forget", "--own_mechanism=F"]),
    (["C"], 'mechanism = "F"', ["C", "--mechanism=forget", "--own_mechanism=F"]),
    (["--own_mechanism=F", "--mechanism=forget"], None, ["--mechanism=forget", "--own_mechanism=F"]),
    (["--mechanism=moh", "--mechanism=[xsa, 'F']"], None, ["--mechanism=xsa,forget", "--own_mechanism=F"])],
    ids=str)
def test_a_file_is_found_in_every_form(argv, config, taken, mine, tmp_path):
    names = {"F": str(mine()), "C": str(tmp_path / "config.py")}

    def put(text):
        return re.sub(r"\b[FC]\b", lambda found: names[found[0]], text)

    (tmp_path / "config.py").write_text(put(config or ""))
    command = parse_command((Presets, model.GPTConfig, TrainConfig), [put(arg) for arg in argv])
    assert own.add_from_command(command).words() == [put(arg) for arg in taken]


def test_its_flags_are_keys_with_ranges_and_help(mine, tmp_path):
    """And take no config file for their value, though nobody knows that one is a bool until its file is read.
    """
    (tmp_path / "config.py").write_text("n_head = 4\nn_embd = 64")
    command = parse_command((Presets, model.GPTConfig, TrainConfig),
                            ["--own_mechanism", str(mine()), "--forget", str(tmp_path / "config.py")])
    (config, _), _ = build_configs(own.add_from_command(command))
    assert config.forget is True and config.n_head == 4
    words = keys_of((model.GPTConfig,))["forget_init"].help
    assert words == "softplus of it is the initial rate, in nats a token"
    assert model.GPTConfig(**SIZES, forget=True, forget_init=1.0).problems() == [
        "forget_init=1.0 must be at most 0"]
    assert model.GPTConfig(**SIZES, forget_init=-1.0).problems() == [
        "forget_init=-1.0 means nothing while forget is off"]


def test_a_run_has_one_mode_of_a_file(mine, args):
    path = mine(MODES, 'modes = {"forget": dict(forget=True), "fast": dict(forget=True, forget_init=-1.0)}')
    assert f"{path} has the modes forget, fast: name one, as in {path}:forget" in line_of(
        train, *args(), f"--mechanism={path}")
    assert "has no mode fats; it has forget, fast" in line_of(train, *args(), f"--mechanism={path}:fats")
    command = parse_command((Presets, model.GPTConfig, TrainConfig), [f"--mechanism=xsa,{path}:fast"])
    command = own.add_from_command(command, all_modes=False)
    assert command.words() == ["--mechanism=xsa,fast", f"--own_mechanism={path}"]


# ---- mistakes, each one line ----

HOOK = "    def score_mod(self, attn, heads):"
AHEAD = "\n        heads.q = heads.q + heads.x.mean(1)[:, None, None, :1]"
MODES = 'modes = {"forget": dict(forget=True)}'
BOOL = 'forget: bool = flag(False, "scores fall with distance, at a learned rate for each head")'
LAYER = "self.slope = nn.Parameter(torch.full((attn.n_head,), config.forget_init))"
PER_HEAD = 'per_head = ("slope",)'


@pytest.mark.parametrize("before, after, words", [
    ("class Forgetting(Mechanism)", "class Forgetting", "must define a class that extends Mechanism"),
    ("\nclass Forgetting", "\nclass Forgetting(Mechanism):\n    pass\n\nclass Forgetting",
     "class Forgetting of line 9 is defined anew in line 12"),
    ("import torch\n", "import torch\nboom\n", "line 3: NameError: name 'boom'"),
    ("import torch\n", "import sys\nsys.exit(0)\n", "mine.py, line 3: SystemExit: 0"),
    ('    flag = "forget" ', "    flag = None ", "flag=None must be one of its Options"),
    ("forget_init: float", "init: float", "init must begin with forget"),
    (BOOL, "forget: bool", "every flag needs a default"),
    ("forget: bool = flag(False", "forget: bool = flag(True", "forget must be off"),
    ("forget_init: float", "forget_init: 'Number'", "an annotation cannot be read: NameError: name 'Number'"),
    ('name = "forgetting"', 'name = "router"', "name='router' must be a name of its own"),
    (MODES, "modes = {}", "modes must name at least one mode"),
    (MODES, 'modes = {"forget": True}', "must be a dict of dicts"),
    (MODES, 'modes = {"for-get": dict(forget=True)}', "'for-get' must be a name"),
    (MODES, 'modes = {"forget": dict(forget_init=-2.0)}', "'forget' does not set forget, the flag that"),
    (MODES, 'modes = {"forget": dict(forget=True, forget_int=-2)}',
     "modes: forget sets forget_int, and there is no such flag; did you mean forget_init?"),
    (MODES, "modes = {\"forget\": dict(forget=True, forget_init='x')}", "forget_init='x' is not float"),
    ('neutral = {"forget"', 'neutral = {"forgt"', "there is no mode forgt; did you mean forget"),
    ('{"forgetting.slope": -60.0}', '{"forgeting.slope": -60.0}', "did you mean forgetting.slope?"),
    ("def score_mod", "def scoremod", "did you mean score_mod?"),
    (PER_HEAD, 'per_head = ("slop",)', "per_head names 'slop', which is none of its tensors; did you mean"),
    (PER_HEAD, 'per_head = ("slope")', "per_head='slope' must be a tuple of names, ('slope',)"),
    (PER_HEAD, 'needs_row_stats = ("entropie",)', "no entropie; there are lse, entropy"),
    (HOOK, "    def score_mod(self, attn): return None\n    def old(self, attn, heads):",
     "score_mod() is called with (self, attn, heads): too many"),
    (HOOK, "    def before_attention(self, heads, attn): pass\n    def old(self, attn, heads):",
     "(self, attn, heads): it has these arguments in another order, (self, heads, attn)"),
    (HOOK, f"    @staticmethod\n    def problems(config): return [5]\n{HOOK}",
     "problems() must give a list of sentences, or yield them; for forget it gives [5]"),
    (HOOK, "    def __init__(self, config, attn): self.a = 5\n    def old(self, attn, heads):",
     "__init__ must begin with super().__init__()"),
    (LAYER, f"{LAYER}; self.a = attn", "it keeps attn,"),
    # a value that is missing, or that the model would overwrite
    ("torch.full((attn.n_head,), config.forget_init)", "torch.empty(attn.n_head)",
     "slope has no initial value: fill it in __init__, as torch.zeros() does, or have the model draw it, "
     "start_at(self.slope, Normal(0.02))"),
    (LAYER, f"{LAYER}; self.map = nn.LazyLinear(2)", "map.weight has no shape yet, as those of lazy layers"),
    (LAYER, f"{LAYER}; self.register_buffer('kept', torch.empty(3, dtype=torch.long))",
     "the buffer kept has no initial value: fill it in __init__"),
    (LAYER, f"{LAYER}; self.map = nn.Linear(4, 4); nn.init.zeros_(self.map.weight)",
     "forget: __init__ fills map.weight, and the model would start it as GPT-2 starts all such layers; say "
     "start_at(self.map"),
    (LAYER, f"{LAYER}; self.map = nn.Linear(4, 4); self.map.weight.data[0] = 0.5", "fills map.weight")],
    ids=lambda text: text.strip()[:40])
def test_a_file_that_cannot_be_added_is_one_line(before, after, words, mine):
    path = mine(before, after)
    with pytest.raises(UserError) as e:
        own.add(path)
    said = str(e.value)
    assert words in said and "\n" not in said and str(path) in said
    assert not own.FILES and all(cls.flag != "forget" for cls in model.MECHANISM_CLASSES)


@pytest.mark.parametrize("before, after, words", [
    (HOOK, f"{HOOK}\n        boom  #", "mine.py, line 27: NameError: name 'boom' is not defined"),
    ("config.forget_init)", "config.forget_in)", "mine.py, line 24: AttributeError: a GPTConfig has no"),
    (HOOK, f"{HOOK}\n        exit(0)  #", "mine.py, line 27: SystemExit: 0"),
    (HOOK, f"    def after_attention(self, attn, heads):\n        heads.row_stats.entropy\n\n{HOOK}",
     "heads.row_stats is None unless the class names in needs_row_stats what it reads")],
    ids=["name", "flag", "exit", "none"])
def test_a_mistake_in_the_code_names_file_and_line(before, after, words, mine, args):
    assert words in line_of(train, *args(), f"--mechanism={mine(before, after)}")


@pytest.mark.parametrize("code, words", [
    ("def f(:\n", "gates.py, line 1: SyntaxError"),
    ("def factor(y):\n    return y.boom\n", "gates.py, line 2: AttributeError")], ids=["syntax", "attribute"])
def test_a_mistake_in_a_helper_names_file_and_line(code, words, project, args):
    path = project()
    (path.parent / "gates.py").write_text(code)
    assert words in line_of(train, *args(), f"--mechanism={path}")


@pytest.mark.parametrize("hook, words", [
    ("before_projection(self, attn, heads): heads.x = heads.x[:, :-1]",
     "must leave in heads.x a tensor of the shape [2, 16, 16], and its shape is [2, 15, 16]"),
    ("after_projection(self, attn, qkv, heads): qkv * 2",
     "must return a tensor of the shape [2, 16, 6, 8], and it is None"),
    ("before_attention(self, attn, heads): heads.k = heads.k[..., :-1]",
     "must leave in heads.q and heads.k heads of one size, and theirs are 8 and 7"),
    ("after_attention(self, attn, heads): heads.y = heads.y[..., :-1]",
     ": the layer cannot go on after it: RuntimeError: mat1 and mat2"),
    ("before_attention(self, attn, heads): heads.losses['a'] = heads.x",
     "must leave in heads.losses a dictionary of losses, each a tensor of no dimension, and 'a' has"),
    ("score_mod(self, attn, heads): return lambda score, h, b, t, s: score",
     "it has these arguments in another order, (score, h, b, t, s)"),
    ("after_kernel(self, attn, heads, y, row_stats): return y", "must return y and row_stats, and returned"),
    ("after_attention(self, attn, heads): heads.gates['a'] = torch.ones(3, 3, 3)",
     "what broadcasts over the outputs [2, 2, 16, 8], and its shape is [3, 3, 3]"),
    ("before_attention(self, attn, heads): return heads.q * 2",
     "must return nothing, and returned a Tensor, which would be ignored: set heads.x, heads.q,"),
    ("model_losses(cls, model, outcome): pass",
     "must return a dictionary of losses, each a tensor of no dimension, and it is None")],
    ids=lambda text: text.partition(": ")[2] if "self" in text or "cls" in text else "")
def test_what_a_layer_cannot_go_on_with_names_class_and_hook(hook, words, mine, args, capsys):
    """Before a run; --check has it in its one row."""
    path = mine(HOOK, f"    {'@classmethod' * hook.startswith('model_')}\n    def {hook}\n"
                      f"    def {'old' * hook.startswith('score_')}score_mod(self, attn, heads):")
    place = f"Forgetting.{hook.partition('(')[0]}()"
    said = line_of(train, *args(), f"--mechanism={path}")
    assert said.startswith(f"train: {path}, line 2") and place in said and words in said
    if "score_mod" in hook:
        assert line_of(train, f"--mechanism={path}", "--check") == "train: 1 of 1 promises are broken"
        assert place in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_names_that_are_taken_are_one_line(project, mine, args):
    path = project()
    assert f"{mine()} and {path} come with two different mine.py" in line_of(
        train, *args(), f"--mechanism={path},{mine()}")
    forget_own_mechanisms()
    own.add(path)
    for before, after, words in (
            (CODE, MINE.format(name="mine", module="math").replace("factor", "exp"),
             "two texts of one mechanism, with the flag mine: one at a time"),
            (CODE, CODE.replace("forget", "sink"), "there is a flag sink already"),
            ('modes = {"forget"', 'modes = {"mine"', "there is a mode mine already"),
            ('name = "forgetting"', 'name = "mine"', "name='mine' must be a name of its own")):
        with pytest.raises(UserError, match=words):
            own.add(mine(before, after, name="yours.py"))
    assert len(own.FILES) == 1


# ---- initial values ----

@pytest.mark.parametrize("make, want", [
    ("self.map = nn.Parameter(torch.linspace(0, 1, 4))", "torch.linspace(0, 1, 4)"),
    ("self.map = nn.Linear(4, 4); start_at(self.map.weight, torch.eye(4))", "torch.eye(4)"),
    ("self.map = nn.MultiheadAttention(4, 2)", None),
    ("self.map = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))", None),
    ("self.map = nn.Conv1d(4, 4, 3)", None)], ids=lambda text: text and text[11:])
def test_a_parameter_starts_at_what_its_constructor_says(make, want, mine):
    """A random one is the same in each model of one seed, whatever was drawn before."""
    path = mine(LAYER, f"{LAYER}; {make}")
    path.write_text(path.read_text().replace("Mechanism, flag", "Mechanism, flag, start_at"))
    own.add(path)
    first, second = (gpt_of("forget", seed=5).state_dict() for _ in range(2))
    made = [name for name in first if ".map" in name]
    assert made and all(torch.equal(first[name], second[name]) for name in made)
    values = first[next(name for name in made if not name.endswith("bias"))]
    assert values.any() and (want is None or torch.equal(values, eval(want, dict(torch=torch))))


def test_a_padding_row_of_an_embedding_starts_at_0_and_no_other(mine):
    own.add(mine(LAYER, f"{LAYER}; self.map = nn.Embedding(5, 4, padding_idx=2)"))
    layer = gpt_of("forget").transformer.h[0].attn.forgetting.map
    assert layer.weight.any(1).tolist() == [True, True, False, True, True]


def test_a_value_that_does_not_fill_its_parameter_is_refused():
    start_at(torch.nn.Parameter(torch.empty(2, 3)), torch.zeros(3))
    for value, words in ((torch.zeros(4), r"\[3\] .*of the shape \[4\]"), ("zero", "'zero'")):
        with pytest.raises(ValueError, match=f"start_at.*{words}"):
            start_at(torch.nn.Parameter(torch.empty(3)), value)
    with pytest.raises(TypeError, match="takes a parameter, such as self.proj.weight: not a Linear"):
        start_at(torch.nn.Linear(2, 2), 0.0)


@pytest.mark.slow
def test_every_parameter_of_the_repositorys_mechanisms_has_an_initial_value():
    found = [built for cls in model.MECHANISM_CLASSES for built in small_models(cls)]
    assert len(found) > 40
    assert [problem for built in found for problem in problems_of_values(*built)] == []


# ---- before training ----

def test_a_look_ahead_is_refused_before_training(mine, args, tmp_path):
    path = mine(HOOK, HOOK + AHEAD)
    assert "before training it looks ahead: position " in line_of(train, *args(), f"--mechanism={path}")
    assert not (tmp_path / "run" / "best.pt").exists()


@pytest.mark.slow
def test_a_difference_with_a_cache_is_said_before_training(mine, args, capsys):
    """It trains, since neither training nor scoring decodes."""
    path = mine("rate[h] * (t - s)", "rate[h] * (t - s) * heads.q.size(2)")
    train.main([*args(max_iters=1), f"--mechanism={path}"])
    note, = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Note: Forgetting: ")]
    assert "with a cache the hidden states are off" in note and "what is sampled will be wrong" in note
    anew(train, *args("right", max_iters=1), f"--mechanism={mine()}")
    assert "Note: Forgetting" not in capsys.readouterr().out


def test_a_class_that_is_called_as_one_of_the_repositorys_is_tried_all_the_same(mine, args):
    path = mine(HOOK, HOOK + AHEAD)
    path.write_text(path.read_text().replace("Forgetting", "FoX"))
    assert "before training it looks ahead: position " in line_of(train, *args(), f"--mechanism={path}")
