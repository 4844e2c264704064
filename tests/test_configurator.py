"""Config files and arguments: what works, and that whatever does not is said in full, in plain lines."""
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Optional

import pytest
import torch

from common import UserError
import configurator
from configurator import help_text, load
from model import ALL_ON, GPT, MECHANISMS, GPTConfig
from train import OPTIMIZERS, TrainConfig, conflicts

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(p for p in (ROOT / "config").glob("*.py") if p.name != "__init__.py")  # tests/test_compare.py has the studies
TWELVE = "routing sentinel agency unet constraint a2c acag moh output_gate window all".split()
FAMILIES = {family: [p.stem for p in CONFIGS if p.stem.startswith(family) and p.stem != "enwiki15_quick"]
            for family in ("tiny_", "enwiki15_", "enwik8_")}
PLAIN = {"tiny_": "tiny", "enwiki15_": "small", "enwik8_": "paper"}


@dataclass
class Sizes:
    # ---- size ----
    width: int = 8                       # how wide
    heads: int = 2                       # how many
    depth: Optional[int] = None          # None: as wide

    def problems(self):
        return [f"width={self.width} must be a multiple of heads={self.heads}"] if self.width % self.heads else []


@dataclass
class Settings:
    # ---- settings ----
    lr: float = 1e-3                     # rate
    name: str = "a"                      # any text
    note: Optional[str] = None
    compile: Optional[bool] = None       # whether
    fast: bool = False                   # faster
    tags: Optional[list[str]] = None     # words
    layers: Optional[list[int]] = None   # numbers
    lr_scale: int | list[float] = 1      # both

    def problems(self):
        return [f"lr={self.lr} must be positive"] if self.lr <= 0 else []


def settings(*argv):
    return load((Sizes, Settings), list(argv))[1]


def problems(*argv, classes=(Sizes, Settings), together=None):
    with pytest.raises(UserError) as e:
        load(classes, list(argv), together=together)
    return str(e.value).splitlines()


@pytest.fixture
def config_file(tmp_path):
    def write(text, name="x.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)
    return write


# ---- what works ----

@pytest.mark.parametrize("argv,key,value", [
    (["--lr=3e-4"], "lr", 3e-4), (["--lr", "3e-4"], "lr", 3e-4), (["--lr=1"], "lr", 1.0), (["--lr", "-2"], "lr", ValueError),
    (["--compile", "False"], "compile", False), (["--compile=no"], "compile", False), (["--compile"], "compile", True),
    (["--compile=None"], "compile", None), (["--fast"], "fast", True), (["--fast=0"], "fast", False), (["--fast", "true"], "fast", True),
    (["--name=a=b=c"], "name", "a=b=c"), (["--name=3"], "name", "3"), (["--name=none"], "name", "none"), (["--name="], "name", ""),
    (["--note=none"], "note", None), (["--note", "two words"], "note", "two words"),
    (["--tags=a,b"], "tags", ["a", "b"]), (["--tags=['a', 'b']"], "tags", ["a", "b"]), (["--tags=[a, b]"], "tags", ["a", "b"]),
    (["--tags=1,2"], "tags", ["1", "2"]), (["--tags=a"], "tags", ["a"]), (["--tags=[]"], "tags", []), (["--tags=None"], "tags", None),
    (["--layers=1,2"], "layers", [1, 2]), (["--layers", "[3]"], "layers", [3]), (["--layers=4"], "layers", [4]),
    (["--lr-scale=2"], "lr_scale", 2), (["--lr_scale=0.5,1"], "lr_scale", [0.5, 1.0]),
    (["--lr=1", "--lr=2"], "lr", 2.0),
])
def test_command_line_values(argv, key, value):
    if value is ValueError:
        assert problems(*argv) == ["lr=-2.0 must be positive"]
    else:
        got = getattr(settings(*argv), key)
        assert got == value and type(got) is type(value)


def test_later_files_and_then_the_command_line_win(config_file):
    one, two = config_file("lr = 1\nname = 'one'\nnote = 'kept'"), config_file("lr = 2\nname = 'two'", "y.py")
    s = settings(one, "--lr=3", two)
    assert (s.lr, s.name, s.note) == (3.0, "two", "kept")


def test_a_flag_before_a_config_file_does_not_swallow_it(config_file):
    assert settings("--fast", config_file("lr = 2")).lr == 2.0


def test_config_files_may_compute(config_file):
    assert settings(config_file("import math\nfrom math import sqrt\n_half = 0.5\nlr = sqrt(4) * _half")).lr == 1.0


def test_integers_are_floats_and_round_floats_integers(config_file):
    sizes, s = load((Sizes, Settings), [config_file("lr = 1\nwidth = 1e1")])
    assert s.lr == 1.0 and isinstance(s.lr, float) and sizes.width == 10 and isinstance(sizes.width, int)


def test_config_files_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CONFIGS
    load((GPTConfig, TrainConfig), [str(CONFIGS[0].relative_to(ROOT))])


def test_what_was_given_is_known():
    sizes, s = load((Sizes, Settings), ["--width=16", "--lr=1"])
    assert sizes.given == {"width"} and s.given == {"lr"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_config_file_loads(path):
    model_config, config = load((GPTConfig, TrainConfig), [str(path)])
    assert not config.for_recipe(model_config.recipe).problems()
    assert model_config.given | config.given, "a config file says something"


# ---- the families of configs ----

def shipped(name):
    return load((GPTConfig, TrainConfig), [f"config/{name}.py"])


def differing(one, other):
    """The keys in which two configs differ."""
    one, other = asdict(one), asdict(other)
    return {key for key in one if one[key] != other[key]}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_the_plain_gpt_and_every_mechanism(family):
    assert {family + name for name in TWELVE} <= set(FAMILIES[family])


@pytest.mark.parametrize("family, name", [(f, name) for f, names in FAMILIES.items() for name in names])
def test_a_family_differs_in_mechanisms_alone(family, name):
    (base, train_base), (model, config) = shipped(PLAIN[family]), shipped(name)
    every = [f.name for f in fields(GPTConfig)]
    mechanisms = every[every.index("routing"):every.index("heads")]
    differs = differing(base, model)
    assert config.out_dir == f"out/{name.replace('_', '-', 1)}" and differing(train_base, config) <= {"out_dir"}
    assert differs <= {*mechanisms, "attn_dropout"} and differs and base != model
    assert ("attn_dropout" in differs) == bool(base.dropout and (model.acag or model.window))  # those have no fused kernel with it


@pytest.mark.parametrize("flags", MECHANISMS.values(), ids=MECHANISMS)
def test_every_mechanism_has_a_tiny_config(flags):
    want = replace(shipped("tiny")[0], **flags)
    assert sum(shipped(name)[0] == want for name in FAMILIES["tiny_"]) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_all_is_the_corrected_form_of_all_seven(family):
    base, model = shipped(PLAIN[family])[0], shipped(family + "all")[0]
    assert model == replace(base, attn_dropout=model.attn_dropout, **ALL_ON)


@pytest.mark.parametrize("name, count", [("paper", 90_397_440), ("enwik8_routing", 93_996_432)])
def test_the_enwik8_pair_has_the_size_of_its_write_up(name, count):
    with torch.device("meta"):
        model = GPT(replace(shipped(name)[0], vocab_size=6064))
    assert model.num_params() == count and model.num_params(non_embedding=True) == count - 1024 * 768


def test_a_config_starts_from_another_wherever_train_runs_and_whatever_else_is_called_config(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config/__init__.py").write_text("")
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), "config/tiny_all.py", "--n_layer=x"], cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.stderr.splitlines()[0] == "train: command line: n_layer='x' is not int" and "config/" not in done.stderr


# ---- what does not ----

def test_an_unknown_key_is_named_with_the_nearest_valid_one(config_file):
    path = config_file("heds = 2")
    assert problems(path) == [f"{path}: unknown key heds; did you mean heads?"]
    assert problems("--widht=4") == ["command line: unknown key widht; did you mean width?"]
    assert problems("--zzz", "5") == ["command line: unknown key zzz; --help lists the keys"]


@pytest.mark.parametrize("theirs,ours", [("learning_rate=1e-3", "lr"), ("gradient_accumulation_steps=8", "grad_accum"),
                                         ("decay_lr=True", "schedule"), ("eval_iters=200", "eval_tokens"), ("backend=nccl", "device"),
                                         ("always_save_checkpoint=False", "save_interval")])
def test_nanogpts_names_are_translated(theirs, ours):
    line, = problems(f"--{theirs}", classes=(GPTConfig, TrainConfig))
    assert f"nanoGPT's {theirs.split('=')[0]} is {ours} " in line


@pytest.mark.parametrize("arg", ["--lr=fast", "--lr=nan", "--lr=inf", "--width=1.5", "--width=True", "--width=[1]", "--fast=maybe",
                                 "--layers=a,b"])
def test_a_wrong_type_is_refused(arg):
    line, = problems(arg)
    assert line.startswith(f"command line: {arg[2:].split('=')[0]}=") and " is not " in line


@pytest.mark.parametrize("line", ["lr = 'fast'", "lr = True", "lr = float('nan')", "width = 1.5", "tags = 'a'", "tags = [1]", "fast = 1",
                                  "name = None", "layers = [1.5]"])
def test_a_wrong_type_in_a_file_is_refused(config_file, line):
    path = config_file(line)
    got, = problems(path)
    assert got.startswith(f"{path}: {line.split()[0]}=") and " is not " in got


def test_a_key_without_its_value_is_refused():
    assert problems("--name", "--lr=1") == ["command line: --name needs a value (str)"]


def test_all_problems_come_at_once(config_file):
    path = config_file("heds = 2\nlr = -1\nname = 3")
    assert problems(path, "--fast=maybe", "--lrr=1", "--note", together=lambda sizes, s: ["together they are wrong"]) == [
        f"{path}: unknown key heds; did you mean heads?", f"{path}: name=3 is not str", "command line: fast='maybe' is not bool",
        "command line: unknown key lrr; did you mean lr?", "command line: --note needs a value (str or None)", "together they are wrong"]
    assert problems("--width=9", "--lr=0") == ["width=9 must be a multiple of heads=2", "lr=0.0 must be positive"]


def test_a_default_that_stands_in_for_a_wrong_value_is_not_blamed():
    assert problems("--width=9", "--heads=x") == ["command line: heads='x' is not int"]


def test_a_missing_config_file_is_one_line(config_file):
    assert problems("config/nowhere.py")[0].startswith("no config file config/nowhere.py")
    assert problems("lr=3") == ["no config file lr=3; a key takes two dashes: --lr=3"]
    assert problems("-lr=3") == ["no config file -lr=3; a key takes two dashes: --lr=3"]
    near = [p for p in CONFIGS if p.stem == "demo"]
    assert not near or problems("config/demmo.py") == ["no config file config/demmo.py; did you mean config/demo.py?"]


@pytest.mark.parametrize("text,words", [("lr = 1\nx = (", "line 2: SyntaxError: '(' was never closed"),
                                        ("lr = 1\nname = foo", "line 2: NameError"),
                                        ("import nowhere_at_all", "line 1: ModuleNotFoundError"), ("\0", ": "),
                                        ("raise ValueError('a\\nb')", "line 1: ValueError: a b")])
def test_a_broken_config_file_is_one_line(config_file, text, words):
    path = config_file(text)
    line, = problems(path)
    assert line.startswith(f"{path}, line") and words in line


def test_impossible_values_of_the_real_configs_come_at_once(bytes_data):
    bad = problems("--n_embd=10", "--n_head=3", "--dropout=1.5", "--recipe=old", "--optimizer=sgd", "--lr=-1", "--warmup_iters=30",
                   "--max_iters=20", "--block_size=15000", f"--dataset={bytes_data}", "--vocab_size=5", "--resume", "--overwrite",
                   classes=(GPTConfig, TrainConfig), together=conflicts)
    for words in ("n_embd=10 must be a multiple of n_head=3", "dropout=1.5", "recipe='old'", "optimizer='sgd'", "lr=-1.0",
                  "warmup_iters=30", "block_size=15000 needs at least 30,000 tokens of train", "of val",
                  "vocab_size=5 is smaller than sums's 256", "overwrite=True"):
        assert sum(words in line for line in bad) == 1, (words, bad)
    assert len(bad) == 10


def test_values_that_conflict_only_after_the_defaults_are_filled_in_are_refused(bytes_data):
    assert problems("--min_lr=1", f"--dataset={bytes_data}", "--block_size=16", classes=(GPTConfig, TrainConfig), together=conflicts) \
        == ["min_lr=1.0 must not be above lr=0.001"]


def test_nanogpts_init_from_is_explained(bytes_data):
    assert problems("--init_from=resume", f"--dataset={bytes_data}", classes=(GPTConfig, TrainConfig), together=conflicts) \
        == ["init_from='resume' must be a checkpoint; to go on with a run there is --resume"]


# ---- defaults and help ----

@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_key_has_a_value_once_the_recipe_is_known(optimizer):
    c = TrainConfig(optimizer=optimizer).for_recipe("gpt2")
    may_be_none = {"init_from", "compile", "lr_decay_iters", "wandb_run_name", "wandb_tags"}
    assert {f.name for f in fields(c) if getattr(c, f.name) is None} <= may_be_none
    assert not c.problems()


def test_filling_in_defaults_leaves_the_original_alone():
    c = TrainConfig()
    assert c.for_recipe("modern").optimizer == "muon" and c == TrainConfig()


def test_a_default_never_contradicts_a_small_value():
    c = TrainConfig(lr=1e-5, max_iters=20).for_recipe("gpt2")
    assert c.min_lr == 1e-5 and c.warmup_iters == 2 and not c.problems()


def test_help_prints_every_key_with_type_default_and_comment():
    lines = help_text((GPTConfig, TrainConfig), "what this is").splitlines()
    assert lines[0] == "what this is" and "---- run ----" in lines
    for cls in (GPTConfig, TrainConfig):
        for f in fields(cls):
            line, = [x for x in lines if x.startswith(f"  --{f.name} ")]
            assert repr(f.default) in line
    line, = [x for x in lines if x.startswith("  --grad_clip ")]
    assert line.split() == "--grad_clip float or None None clip the gradient's norm; 0: off".split()
    line, = [x for x in help_text((Sizes,), "").splitlines() if "--depth" in x]
    assert line.split() == "--depth int or None None None: as wide".split()


def test_every_key_of_the_real_configs_has_a_comment():
    keys = configurator.keys_of((GPTConfig, TrainConfig))
    assert not [k for k, (_, _, comment) in keys.items() if not comment]


def test_the_script_runs_from_any_folder_and_ends_without_a_traceback(tmp_path):
    def train(*argv):
        return subprocess.run([sys.executable, str(ROOT / "train.py"), *argv], cwd=tmp_path, capture_output=True, text=True)
    done = train("--help")
    assert done.returncode == 0 and "--n_layer" in done.stdout and not done.stderr
    done = train("--lrr=1", "--n_layer=x")
    assert done.returncode == 1 and done.stdout == ""
    lines = done.stderr.splitlines()  # where the default dataset is not prepared, a third line says so
    assert lines[:2] == ["train: command line: unknown key lrr; did you mean lr?", "train: command line: n_layer='x' is not int"]
    assert all(line.startswith("train: dataset shakespeare_char is not prepared") for line in lines[2:])
