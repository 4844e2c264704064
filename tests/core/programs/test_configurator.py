"""Config files and arguments: what works, and that whatever does not is said in full, in plain lines."""
import json
import os
import re
import subprocess
import sys
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal, Optional, get_args

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from model import ALL_ON, GPT, MECHANISMS, GPTConfig
from nanoheads import checkpoint, configurator, start, timing
from nanoheads.common import UserError
from nanoheads.config import (OPTIMIZERS, TrainConfig, conflicts, flags_by_name, note_on_dropout,
                              note_on_warmup, trained_with)
from nanoheads.configurator import Presets, Scale, help_text, load, made, near, read
from nanoheads.mechanism import flag
from nanoheads.tasks import TaskConfig
from train import main
from helpers import ANYTHING, ROOT, flags_of

SCALES = get_args(Scale)
# the studies are tests/study/test_plan.py's
CONFIGS = [p for p in sorted((ROOT / "config").glob("[!_]*.py")) if not p.name.startswith("study_")]


@dataclass
class Sizes:
    width: int = flag(8, "how wide", section="size")
    heads: int = flag(2, "how many")
    depth: Optional[int] = flag(None, "None: as wide")

    def problems(self):
        bad = self.width % self.heads
        return [f"width={self.width} must be a multiple of heads={self.heads}"] if bad else []


@dataclass
class Settings:
    lr: float = flag(1e-3, "rate", section="settings")
    name: str = flag("a", "any text")
    note: Optional[str] = None
    compile: Optional[bool] = flag(None, "whether")
    fast: bool = flag(False, "faster")
    tags: Optional[list[str]] = flag(None, "words")
    layers: Optional[list[int]] = flag(None, "numbers")
    lr_scale: int | list[float] = flag(1, "both")

    def problems(self):
        return [f"lr={self.lr} must be positive"] if self.lr <= 0 else []


@dataclass
class Choices:
    shape: Literal["round", "square"] = flag("round", "how it looks", section="choices")
    size: Optional[Literal[1, 2, 4]] = flag(None, "how big; None: as big as can be")
    mode: Literal["auto", True, None] = flag("auto", "on, off or either")
    sides: list[Literal["left", "right"]] | None = flag(None, "which")
    steps: Optional[list[Literal[1, 2]]] = flag(None, "how far")

    def problems(self):
        return []


def settings(*argv):
    return load((Sizes, Settings), list(argv))[1]


def problems(*argv, classes=(Sizes, Settings), together=None):
    with pytest.raises(UserError) as e:
        made(read(classes, list(argv)), together=together)
    return str(e.value).splitlines()


@pytest.fixture
def config_file(tmp_path):
    def write(text, name="x.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)
    return write


# ---- what works ----

@pytest.mark.slow
@pytest.mark.parametrize("argv,key,value", [
    (["--lr=3e-4"], "lr", 3e-4),
    (["--lr", "3e-4"], "lr", 3e-4),
    (["--lr=1"], "lr", 1.0),
    (["--lr", "-2"], "lr", ValueError),
    (["--compile", "False"], "compile", False),
    (["--compile=no"], "compile", False),
    (["--compile"], "compile", True),
    (["--compile=None"], "compile", None),
    (["--fast"], "fast", True),
    (["--fast=0"], "fast", False),
    (["--fast", "true"], "fast", True),
    (["--name=a=b=c"], "name", "a=b=c"),
    (["--name=3"], "name", "3"),
    (["--name=none"], "name", "none"),
    (["--name="], "name", ""),
    (["--note=none"], "note", None),
    (["--note", "two words"], "note", "two words"),
    (["--tags=a,b"], "tags", ["a", "b"]),
    (["--tags=['a', 'b']"], "tags", ["a", "b"]),
    (["--tags=[a, b]"], "tags", ["a", "b"]),
    (["--tags=1,2"], "tags", ["1", "2"]),
    (["--tags=a"], "tags", ["a"]),
    (["--tags=[]"], "tags", []),
    (["--tags=None"], "tags", None),
    (["--layers=1,2"], "layers", [1, 2]),
    (["--layers", "[3]"], "layers", [3]),
    (["--layers=4"], "layers", [4]),
    (["--layers=(1,2)"], "layers", [1, 2]),
    (["--lr-scale=2"], "lr_scale", 2),
    (["--lr_scale=0.5,1"], "lr_scale", [0.5, 1.0]),
    (["--lr=1", "--lr=2"], "lr", 2.0),
])
def test_command_line_values(argv, key, value):
    if value is ValueError:
        assert problems(*argv) == ["lr=-2.0 must be positive"]
    else:
        got = getattr(settings(*argv), key)
        assert got == value and type(got) is type(value)


# ---- any flags of a model and of its training ----

BOTH = (GPTConfig, TrainConfig)
NOT_DRAWN = {"own", "dataset"}


def answer(values, *argv, base=None, data=None):
    """The two configs that arguments lead to, or the lines that refuse them, each of which names a key of
    `values`; without a path to its file.
    """
    try:
        return made(read(BOTH, [*map(str, argv), f"--dataset={data}"]), base=base, together=conflicts)[0]
    except UserError as e:
        lines = str(e).splitlines()
        assert lines and all(any(key in line for key in values) for line in lines), (values, lines)
        return [line.removeprefix(f"{argv[0] if argv else base[0]}: ").removeprefix("command line: ")
                for line in lines]


@hypothesis.settings(max_examples=100)
@hypothesis.given(flags_of(*BOTH, but=NOT_DRAWN))
def test_flags_mean_the_same_on_the_command_line_in_a_file_in_config_json_and_in_a_checkpoint(
        bytes_data, config_file, capsys, values):
    """Refused or not, and with the same lines: whatever flags, in their ranges and out of them."""
    path = config_file("".join(f"{key} = {value!r}\n" for key, value in values.items()))
    found = answer(values, path, data=bytes_data)
    typed = [f"--{key}={value if isinstance(value, str) else repr(value)}" for key, value in values.items()]
    assert answer(values, *typed, data=bytes_data) == found
    if isinstance(found[0], str):
        return
    model, train = found
    asked = start.asked_for(model, train)
    again, train_again = answer(values, base=("config.json", asked), data=bytes_data)
    of_a_command = {key: getattr(train, key) for key in start.OF_A_COMMAND}
    assert again == model and replace(train_again, **of_a_command) == train
    assert replace(model) == model, "what follows from a flag follows once"
    assert checkpoint.config_of(dict(config=model.flags()), "x.pt") == model
    assert trained_with(asdict(train), "x.pt") == train


def test_what_is_off_or_0_is_kept_of_what_was_asked_for():
    """A run that goes on would otherwise have the default again."""
    off = dict(eval_tokens=0, grad_clip=0.0, compile=False)
    asked = start.asked_for(GPTConfig(), TrainConfig(**off))
    assert {key: asked.get(key) for key in off} == off


@hypothesis.settings(max_examples=100)
@hypothesis.given(st.dictionaries(
    st.sampled_from(sorted(set(configurator.keys_of(BOTH)) - NOT_DRAWN)), ANYTHING, min_size=1, max_size=3))
def test_whatever_a_file_sets_a_key_to_is_taken_or_refused_by_its_name(
        bytes_data, config_file, capsys, values):
    """Also in the config.json of a run that goes on."""
    lines = "".join(f"{key} = {value!r}\n" for key, value in values.items())
    answer(values, config_file(f"nan, inf = float('nan'), float('inf')\n{lines}del nan, inf\n"),
           data=bytes_data)
    answer(values, base=("config.json", values), data=bytes_data)


def test_later_files_and_then_the_command_line_win(config_file):
    one, two = config_file("lr = 1\nname = 'one'\nnote = 'kept'"), config_file("lr = 2\nname = 'two'", "y.py")
    s = settings(one, "--lr=3", two)
    assert (s.lr, s.name, s.note) == (3.0, "two", "kept")


def test_a_flag_before_a_config_file_does_not_swallow_it(config_file):
    assert settings("--fast", config_file("lr = 2")).lr == 2.0


def test_config_files_may_compute(config_file):
    path = config_file("import math\nfrom math import sqrt\n_half = 0.5\nlr = sqrt(4) * _half")
    assert settings(path).lr == 1.0


def test_a_config_file_is_run_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("open('ran', 'a').write('x')\nscale = 'tiny'\nmechanism = ['moh']")
    with pytest.raises(SystemExit):
        main(["x.py", "--resume", "--out_dir=nowhere", "--help"])
    assert (tmp_path / "ran").read_text() == "x"


def test_integers_are_floats_and_round_floats_integers(config_file):
    sizes, s = load((Sizes, Settings), [config_file("lr = 1\nwidth = 1e1")])
    assert s.lr == 1.0 and isinstance(s.lr, float) and sizes.width == 10 and isinstance(sizes.width, int)


def test_config_files_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CONFIGS
    named(str(CONFIGS[0].relative_to(ROOT)))


def test_what_was_given_is_known():
    _, given = made(read((Sizes, Settings), ["--width=16", "--lr=1"]))
    assert given == {"width": 16, "lr": 1.0}


# ---- values that may be chosen ----

@pytest.mark.parametrize("argv,key,value", [
    (["--shape=square"], "shape", "square"),
    (["--size=2"], "size", 2),
    (["--size=None"], "size", None),
    (["--mode=auto"], "mode", "auto"),
    (["--mode=yes"], "mode", True),
    (["--mode=none"], "mode", None),
    (["--sides=left,right"], "sides", ["left", "right"]),
    (["--sides=['left']"], "sides", ["left"]),
    (["--sides=right"], "sides", ["right"]),
    (["--sides=none"], "sides", None),
    (["--steps=1,2"], "steps", [1, 2]),
])
def test_choices_on_the_command_line_and_in_a_file(argv, key, value, config_file):
    for source in (argv, [config_file(f"{key} = {value!r}")]):
        got = getattr(load((Choices,), source)[0], key)
        assert got == value and type(got) is type(value)


def names(line, where, key, value, meant=None):
    """Whether a refusal says where, the key with its value, and what was meant (a word), or no such word."""
    suggested = line.partition("did you mean ")[2].rstrip("?")
    return line.startswith(f"{where}: {key}={value!r} ") and suggested == (meant or "")


@pytest.mark.parametrize("key,value,meant", [
    ("shape", "sqare", "square"),
    ("shape", "oval", None),
    ("size", "3", None),
    ("size", "True", None),
    ("mode", "no", None),
    ("sides", "left,rihgt", "right"),
    ("steps", "1,3", None),
])
def test_a_wrong_choice_is_one_line_with_the_choices_and_a_near_one(key, value, meant):
    line, = problems(f"--{key}={value}", classes=(Choices,))
    assert names(line, "command line", key, value, meant)
    kind, *_ = configurator.keys_of((Choices,))[key]
    assert all(str(word) in line for word in configurator.choices(kind))


@pytest.mark.parametrize("key,value,meant", [
    ("shape", "Square", "square"),
    ("shape", 1, None),
    ("size", True, None),
    ("mode", False, None),
    ("sides", ["left", "rigth"], "right"),
    ("sides", "left", None),
])
def test_a_wrong_choice_in_a_file_is_one_line(config_file, key, value, meant):
    path = config_file(f"{key} = {value!r}")
    line, = problems(path, classes=(Choices,))
    assert names(line, path, key, value, meant)


def test_help_shows_the_choices_as_the_type():
    lines = [line.split(None, 1) for line in help_text((Choices,), "").splitlines() if "--" in line[:4]]
    assert [(key, " ".join(rest.split())) for key, rest in lines if key != "----"] == [
        ("--shape", "round or square 'round' how it looks"),
        ("--size", "1, 2, 4 or None None how big; None: as big as can be"),
        ("--mode", "auto, True or None 'auto' on, off or either"),
        ("--sides", "list of left or right or None None which"),
        ("--steps", "list of 1 or 2 or None None how far")]


@pytest.mark.parametrize("key,near_by", [
    ("dtype", "bfloat16"),
    ("optimizer", "muon"),
    ("schedule", "trapezoid"),
    ("wandb_mode", "offline"),
])
def test_the_words_of_training_are_refused_with_their_choices(key, near_by):
    line, = problems(f"--{key}={near_by[:-1]}x", classes=(GPTConfig, TrainConfig))
    assert line.startswith(f"command line: {key}=") and line.endswith(f"; did you mean {near_by}?")
    kind, *_ = configurator.keys_of((TrainConfig,))[key]
    assert all(str(word) in line for word in configurator.choices(kind))


# ---- scale and mechanism ----

NAMES = flags_by_name()  # once: it asks each mechanism whether it takes dropout


def of_train(*argv, more=None):
    """((GPTConfig, TrainConfig), {key: value} that was set) as train.py makes them."""
    return made(read((Presets, GPTConfig, TrainConfig), list(argv), more), mechanisms=NAMES)


def named(*argv, **how):
    return of_train(*argv, **how)[0]


def given(*argv):
    """{key: value} that these arguments set."""
    return of_train(*argv)[1]


def refused(*argv):
    with pytest.raises(UserError) as e:
        named(*argv)
    return str(e.value).splitlines()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_config_file_loads_at_every_scale(path, scale):
    for more in ([], [f"--scale={scale}"], [f"--scale={scale}", "--mechanism=acag"]):
        if scale == "task" and more and re.search(r"^(labels|documents) =", path.read_text(), re.M):
            assert "is of a text, and task='recall' has none" in refused(str(path), *more)[0]
            continue
        model_config, config = named(str(path), *more)
        assert not config.for_recipe(model_config.recipe).problems()
        assert given(str(path), *more), "a config file says something"


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_every_mechanism_loads_at_every_scale_and_changes_nothing_else(name, scale):
    plain, train_plain = named(f"--scale={scale}")
    model, train = named(f"--scale={scale}", f"--mechanism={name}")
    flags = ALL_ON if name == "all_on" else MECHANISMS[name]
    no_kernel = model.attn_dropout is not None  # for dropout on the attention weights
    assert model == replace(plain, **flags, **(dict(attn_dropout=0.0) if no_kernel else {}))
    assert no_kernel == (model.acag is not None or model.window is not None or model.sink
                          or model.paired_heads)
    assert bool(note_on_dropout(model)) == (no_kernel and scale == "paper") and not note_on_dropout(plain)
    more = dict(controller_log=True) if "agency_learned" in flags else {}
    assert train == replace(train_plain, out_dir=f"out/{scale}-{name}", **more)
    assert named(f"--scale={scale}", "--attn_dropout=0")[0] == replace(plain, attn_dropout=0.0)
    asked = given(f"--scale={scale}", f"--mechanism={name}")
    assert {*flags, *given(f"--scale={scale}")} <= set(asked)


def test_a_mechanism_does_not_overrule_dropout_that_was_asked_for():
    line, = refused("--scale=tiny", "--mechanism=acag", "--attn_dropout=0.1")
    assert "acag" in line and "attn_dropout" in line


@pytest.mark.parametrize("scale", SCALES)
def test_a_scale_is_its_file(scale):
    by_name, by_file = named(f"--scale={scale}"), named(f"config/{scale}.py")
    assert by_name == by_file and by_file[1].out_dir == f"out/{scale}"
    values = configurator.read_file(f"config/{scale}.py")
    assert set(given(f"--scale={scale}")) == set(values)
    assert all(value == getattr(by_name[0], key, getattr(by_name[1], key, None))
               for key, value in values.items())


def test_every_mechanism_is_named_in_a_file_of_its_family():
    text = "".join(path.read_text() for path in CONFIGS)
    assert not [name for name in flags_by_name()
                if name not in text.replace(",", " ").replace('"', " ").split()
                and f"{name}:" not in text and f"{name};" not in text]


@pytest.mark.slow
@pytest.mark.parametrize("argv,want", [
    # what a file sets wins over both
    (["x.py"], dict(n_layer=2, n_head=16, routing="moh", adamw_lr=1e-3)),
    # the command line's scale replaces it
    (["x.py", "--scale=small"], dict(n_layer=6, n_head=16, routing="moh", adamw_lr=1e-3)),
    (["x.py", "--n_head=32"], dict(n_layer=2, n_head=32, routing="moh")),
    (["--n_head=32", "--scale=small", "x.py"], dict(n_layer=6, n_head=32)),
    (["x.py", "config/small.py"], dict(n_layer=6, n_head=16, routing="moh")),  # a scale's file is a scale
    (["config/tiny.py", "--scale=small"], dict(n_layer=6, n_head=8, block_size=1024)),
    (["x.py", "--mechanism=agency"], dict(routing=None, routing_shared=0, agency=True)),
    (["x.py", "--mechanism=none"], dict(routing=None, routing_shared=0, n_layer=2)),
    (["x.py", "--scale=none"], dict(n_layer=12, n_head=16, routing="moh")),
    (["x.py", "--mechanism=moh,unet_add", "--routing_shared=2"],
     dict(routing="moh", routing_shared=2, unet="add")),
    (["--mechanism", "[moh, 'unet_add']"], dict(routing="moh", unet="add", n_layer=12)),
    (["y.py"], dict(routing="moh", unet="add", n_layer=2)),
    (["x.py", "y.py"], dict(n_head=16, routing="moh", unet="add")),
])
def test_what_is_set_wins_over_scale_and_mechanism(argv, want, config_file):
    files = {"x.py": config_file("n_head = 16\nadamw_lr = 1e-3\nscale = 'tiny'\nmechanism = ['moh']"),
             "y.py": config_file("mechanism = 'moh, unet_add'\nscale = 'tiny'", "y.py")}
    model, train = named(*(files.get(arg, arg) for arg in argv))
    assert {key: getattr(model, key, getattr(train, key, None)) for key in want} == want


@pytest.mark.slow
@pytest.mark.parametrize("argv,folder", [
    ([], "out/gpt"),
    (["--mechanism=moh"], "out/gpt-moh"),
    (["--scale=tiny"], "out/tiny"),
    (["config/tiny.py", "--mechanism=moh,unet_add"], "out/tiny-moh+unet_add"),
    (["config/acag.py", "--scale=small"], "out/small-acag"),
    (["config/shakespeare_modern.py"], "out/shakespeare_modern"),
    (["config/task.py", "--mechanism=acag"], "out/task-acag"),
    (["config/tiny.py", "--out_dir=here"], "here"),
    (["config/tiny.py", "--out_dir=None"], "out/tiny"),
    (["--scale=tiny", "--routing=published"], "out/tiny-routing=published"),  # not the plain GPT's folder
    (["--scale=tiny", "--mechanism=moh", "--seed=2", "--adamw_lr=0.001"], "out/tiny-moh"),
    (["--scale=tiny", "--n_layer=2", "--seed=1337"], "out/tiny"),  # as it is anyway
    (["--scale=tiny", "--max_iters=9", "--resume", "--device=cpu"], "out/tiny"),
    (["--scale=tiny", "config/scenarios/constrained.py"], "out/tiny-constrained"),
    (["--scale=tiny", "--init_from=out/x/best.pt", "--agency", "--dropout=0.1"],
     "out/tiny-agency=True"),
    (["--init_from=/home/me/a.pt", "--dataset=C:\\texts\\mine/"], "out/gpt"),
    (["--scale=tiny", "--own_mechanism=/a/b/mine.py", "--mechanism=sink"], "out/tiny-sink"),
    (["--scale=tiny", "--mechanism=sentinel_l0", "--mechanism_lr=0.04", "--sentinel_coef=0.1", "--seed=2",
      "--dataset=mine"], "out/tiny-sentinel_l0"),
    # as many as fit into 60 characters
    (["--scale=small", "--mechanism=sink,xsa,key_offset,agency,output_gate_elementwise,unet_concat,moh"],
     "out/small-sink+xsa+key_offset+agency+3_more"),
    (["--sentinel=sigmoid", "--sentinel_init=0.1", "--seed=2"], "out/gpt-sentinel=sigmoid"),
])
def test_the_run_folder_follows_from_the_names(argv, folder):
    config = named(*argv)[1]
    assert config.out_dir == folder and ("out_dir" in given(*argv)) == any("out_dir" in arg for arg in argv)


@pytest.mark.parametrize("recipe, optimizer", [("gpt2", "adamw"), ("llama", "adamw"), ("llama", "muon")])
def test_a_scale_with_another_recipe_has_that_recipes_rates(recipe, optimizer):
    """Those of the scale were tuned for its own; what is set by hand holds."""
    more = [f"--recipe={recipe}"] + ([f"--optimizer={optimizer}"] if optimizer == "muon" else [])
    model, config = named("--scale=tiny", *more)
    plain, own = named(*more)[1].for_recipe(recipe), config.for_recipe(recipe)
    for key in ("adamw_lr", "embed_lr", "muon_momentum"):
        assert getattr(own, key) == getattr(plain, key)
    assert model.recipe == recipe and model.n_embd == 64 and model.qk_max is None and not model.problems()
    assert named("--scale=tiny", *more, "--adamw_lr=0.5")[1].adamw_lr == 0.5
    own, same = named("--scale=tiny")[1], named("--scale=tiny", "--recipe=modern")[1]
    assert same.adamw_lr == own.adamw_lr != plain.adamw_lr


@pytest.mark.parametrize("argv", [
    ["--scale=tiny", f"--constraint_names={list(range(60))}"],
    ["--scale=tiny", f"--constraint_names={list(range(60))}", "--seed=3", "--mechanism=moh"],
    ["--constraint_names=[a|b>c]"]])
def test_a_run_folder_is_short_and_legal_on_every_system(argv):
    out, name = named(*argv)[1].out_dir.split("/")
    assert out == "out" and len(name) <= 60 and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=+-]*(?<!\.)", name)


def test_a_config_files_name_that_is_long_or_odd_makes_a_legal_folder(config_file):
    for stem in ("a" * 90, "-x ü", "con fig.v2."):
        path = config_file("n_layer = 3", f"{stem}.py")
        name = named(path, "--mechanism=moh,sink")[1].out_dir.removeprefix("out/")
        assert len(name) <= 60 and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=+-]*-moh\+sink", name), name


def test_a_config_made_without_names_has_a_folder_too():
    assert TrainConfig().out_dir == "out/gpt" and TrainConfig(out_dir="x").for_recipe("gpt2").out_dir == "x"


@pytest.mark.parametrize("argv,named", [
    (["--scale=tniy", "--n_head=7"], ["scale='tniy'", "tiny?"]),
    (["--mechanism=mohh,agency"], ["mohh", "moh?"]),
    (["--mechanism=sentinl_l0"], ["sentinl_l0", "sentinel_l0?"]),
    (["--mechanism=zzz"], ["zzz", *flags_by_name(), "HEAD_MECHANISMS", "mine.py"]),
    (["--mechanism"], ["--mechanism"]),
    # also where no flag differs: two modes of one mechanism are no pair, in either order
    (["--mechanism=acag,agency,acag_elementwise"], ["acag", "acag_elementwise", "both set acag"]),
    (["--mechanism=acag,sink,acag_published"], ["acag", "acag_published", "both set acag"]),
    (["--mechanism=sink,agency,sink"], ["sink", "both set sink"]),
    (["--mechanism=all_on,sink,acag"], ["all_on", "acag", "both set acag"]),
    (["--mechanism=acag,sink,all_on"], ["all_on", "acag", "both set acag"]),
])
def test_what_is_wrong_with_scale_and_mechanism_is_one_line(argv, named):
    line, = refused(*argv)
    assert line.startswith("command line: ") and all(name in line for name in named), line


def test_what_is_wrong_with_them_in_a_file_names_the_file(config_file):
    path = config_file("mechanism = ['moh', 'sentinal']")
    line, = refused(path, "--n_head=7")
    assert line.startswith(f"{path}: ") and "sentinal" in line and line.endswith("sentinel?")
    path = config_file("mechanism = 3\nscale = 'huge'")
    one, other = refused(path)
    assert names(one, path, "mechanism", 3) and names(other, path, "scale", "huge")


def test_without_mechanisms_the_two_keys_do_not_exist():
    scale, mechanism = problems("--scale=tiny", "--mechanism=moh")
    assert scale.split(";")[0] == "command line: unknown key scale"
    assert mechanism.split(";")[0] == "command line: unknown key mechanism"
    lines = help_text((Presets, GPTConfig), "", flags_by_name()).splitlines()
    line = next(line for line in lines if "--scale" in line)
    assert "tiny, nano, mid, small, paper or None" in line
    at = next(i for i, line in enumerate(lines) if "--mechanism" in line)
    listed = " ".join(lines[at + 1:lines.index("", at)]).replace(",", " ").split()
    assert listed == list(flags_by_name())


def test_more_wins_over_scale_and_files(config_file):
    model, _ = named(config_file("scale = 'tiny'\nn_layer = 3"),
                     more={"variant": dict(n_layer=5, mechanism=["agency"])})
    assert (model.n_layer, model.n_head, model.agency) == (5, 4, True)


@pytest.fixture
def small(bytes_data, tmp_path, monkeypatch):
    """Arguments that make any scale small enough to train; out/ is in a temporary folder."""
    monkeypatch.chdir(tmp_path)
    sizes = dict(n_layer=2, n_head=8, n_embd=32, block_size=16, batch_size=4, eval_tokens=64, warmup_iters=0)
    sizes.update(dataset=str(bytes_data), device="cpu")
    (tmp_path / "small.py").write_text("\n".join(f"{key} = {value!r}" for key, value in sizes.items()))
    return ["small.py"]


@pytest.mark.slow
def test_a_run_by_names_goes_on_and_is_scored(small, capsys, bytes_data):
    run = ["--scale=tiny", "--mechanism=moh,acag", *small]
    main([*run, "--max_iters=2"])
    main([*run, "--max_iters=3", "--resume"])
    assert "going on at step 2 of 3 in out/tiny-small-moh+acag" in capsys.readouterr().out
    main([*run, "--eval_only"])
    capsys.readouterr()
    main(["--eval_only", "--out_dir=out/tiny-small-moh+acag"])  # its text and its eval_tokens
    scored = capsys.readouterr().out
    main([f"--dataset={bytes_data}", "--eval_only", "--eval_tokens=64", "--out_dir=out/tiny-small-moh+acag"])
    assert scored.splitlines()[-1].partition("   val ")[2].split(" s")[0] in capsys.readouterr().out
    assert scored.startswith("out/tiny-small-moh+acag/config.json says what this command leaves open: ")


def test_a_resume_that_names_its_folder_need_not_repeat_the_command(small, capsys):
    """What the folder's config.json says holds, what is given by hand is obeyed or refused by name."""
    out = "--out_dir=out/here"
    main([*small, "--scale=tiny", "--mechanism=moh,acag", "--max_iters=2", "--seed=5", out])
    asked = json.loads(Path("out/here/config.json").read_text())["asked"]
    capsys.readouterr()
    main(["--resume", out, "--max_iters=4"])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("out/here/config.json says what this command leaves open: ")
    assert [line for line in said if line.startswith("changed")] == [
        "changed since the last save: max_iters=4, was 2"]
    assert any("going on at step 2 of 4 in out/here" in line for line in said)
    assert json.loads(Path("out/here/config.json").read_text())["asked"] == {**asked, "max_iters": 4}
    main(["--init_from=resume", out, "--max_iters=5"])  # as nanoGPT's users type it
    assert "going on at step 4 of 5" in capsys.readouterr().out
    main(["--resume", out, "--max_iters=6", "--learning_rate=0.001"])
    said = capsys.readouterr().out
    assert "changed since the last save: adamw_lr=0.001, was 0.016" in said and "open: dataset=" in said
    assert "adamw_lr=0.016" not in said
    for given, words in (("--seed=6", "seed=6 here is 5 there"), ("--mechanism=acag_elementwise", "acag="),
                         ("--batch_size=9", "batch_size * grad_accum=9 here is 4 there")):
        with pytest.raises(SystemExit, match=re.escape(words)):
            main(["--resume", out, "--max_iters=7", given])


@pytest.mark.slow
def test_names_that_contradict_a_checkpoint_are_refused(small, bytes_data):
    """Flags out of a scale or a mechanism are given flags, where a model is read from disk, too."""
    main(["--scale=tiny", "--mechanism=moh,acag", *small, "--max_iters=1"])
    here, it = "--out_dir=out/tiny-small-moh+acag", "--init_from=out/tiny-small-moh+acag"
    for argv, words in [
        ([*small, "--mechanism=agency", "--eval_only", here], "agency=True here is False there"),
        ([*small, "--mechanism=routing_sigmoid,agency", it], "routing='sigmoid' here is 'moh' there"),
        ([*small, "--mechanism=agency", "--resume", here], "agency=True here is False there"),
        ([f"--dataset={bytes_data}", it], "n_embd=64 here is 32 there"),
    ]:
        with pytest.raises(SystemExit) as e:
            main(["--scale=tiny", *argv])
        assert "holds another model" in e.value.code and words in e.value.code


@pytest.mark.slow
def test_dropout_that_a_mechanism_takes_away_is_said(small, capsys):
    main(["--scale=paper", "--mechanism=window", *small, "--max_iters=1"])
    assert capsys.readouterr().out.startswith("no dropout on the attention weights, ")
    main(["--scale=paper", "--mechanism=agency", *small, "--max_iters=1"])
    assert "no dropout" not in capsys.readouterr().out


def test_all_is_the_corrected_form_of_all_seven():
    assert named("config/all.py")[0] == replace(named("--scale=tiny")[0], attn_dropout=0.0, **ALL_ON)


@pytest.mark.slow
@pytest.mark.parametrize("argv, count", [
    (["config/paper.py"], 90_397_440),
    (["--scale=paper", "--mechanism=routing_inf"], 93_996_432),
    (["config/train_enwik8_routing_ablation.py"], 90_397_440),
    (["config/train_enwik8_routing.py"], 93_996_432),
])
def test_the_pair_at_paper_scale_has_the_size_of_its_write_up(argv, count):
    with torch.device("meta"):
        model = GPT(replace(named(*argv)[0], vocab_size=6064))
    assert model.num_params() == count and model.num_params(non_embedding=True) == count - 1024 * 768


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_enwik8_routing_ablation", "train_enwik8_routing"])
def test_the_hours_of_the_enwik8_pair_are_counted(name):
    """From the FLOPs of a token, at the share of the peak that the file names."""
    path = f"config/{name}.py"
    flops, share, a100, h100 = re.search(
        r"(4\.\de18) FLOPs: at (\d+) % .* ([\d.]+) hours on an A100, ([\d.]+) on an H100",
        (ROOT / path).read_text()).groups()
    model, config = named(path)
    with torch.device("meta"):
        each = GPT(replace(model, vocab_size=6064)).flops_per_token()
    total = each * config.max_iters * config.batch_size * config.grad_accum * model.block_size
    assert f"{total:.1e}".replace("e+", "e") == flops and config.max_iters == 200_000
    peaks = dict(reversed(timing.PEAK_TFLOPS))
    for hours, card in ((a100, "A100"), (h100, "H100")):
        assert f"{total / (float(share) / 100 * peaks[card] * 1e12) / 3600:.1f}" == hours


@pytest.mark.slow
def test_a_config_starts_from_another_whatever_else_is_called_config(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config/__init__.py").write_text("")
    (tmp_path / "mine.py").write_text("from config.tiny import *\n\nagency = True\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for path in ("mine.py", "config/all.py"):  # where the data is not prepared, a second line says so
        done = subprocess.run([sys.executable, str(ROOT / "train.py"), path, "--n_layer=x"],
                              cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.stderr.splitlines()[0] == "train: command line: n_layer='x' is not int"
        assert "no config" not in done.stderr and "Error" not in done.stderr


# ---- what does not ----

def test_an_unknown_key_is_named_with_the_nearest_valid_one(config_file):
    path = config_file("heds = 2")
    for argv, where, key, meant in (([path], path, "heds", "heads"), (["--widht=4"], "command line", "widht",
                                                                      "width")):
        line, = problems(*argv)
        assert line.startswith(f"{where}: ") and key in line and line.endswith(f"did you mean {meant}?")
    line, = problems("--zzz", "5")
    assert "zzz" in line and "--help" in line


@pytest.mark.slow
@pytest.mark.parametrize("theirs,ours,line", [
    ("--gradient_accumulation_steps=8", dict(grad_accum=8), "sets grad_accum=8"),
    ("--learning_rate=3e-4", dict(adamw_lr=3e-4, muon_lr=0.02), "sets adamw_lr=0.0003: the peak rate"),
    ("--lr=3e-4", dict(adamw_lr=3e-4, muon_lr=0.02), "lr=0.0003 sets adamw_lr=0.0003: the peak rate"),
    ("--eval_iters=20 --batch_size=3 --block_size=8", dict(eval_tokens=480), "sets eval_tokens=480: 20 "),
    ("--decay_lr=True", dict(schedule=None), "decay_lr=True sets nothing here: "),
    ("--decay_lr=False", dict(schedule="constant", warmup_iters=0), "sets schedule=constant, warmup_iters=0"),
    ("--decay_lr", dict(schedule=None), "decay_lr=True sets nothing here: "),
    ("--backend=nccl", dict(device="auto"), "backend=nccl sets nothing here: "),
    ("--always_save_checkpoint=False", {}, "ckpt.pt is always the last save"),
    ("--init_from=scratch", dict(init_from=None, resume=False), "init_from=scratch sets resume=False"),
    ("--init_from=resume", dict(init_from=None, resume=True), "init_from=resume sets resume=True"),
    # the head-routing write-up's, with its defaults for those that are not set
    ("--use_routing=True", dict(routing="published", routing_top_k=12, routing_mask="zero",
                                routing_coef=0.01, routing_eval_gate=False), "sets routing=published"),
    ("--use_routing --n_head=6", dict(routing="published", routing_top_k=6), "routing_top_k=6"),
    ("--use_routing=True --top_k_heads=4", dict(routing_top_k=4), "top_k_heads=4 sets routing_top_k=4"),
    ("--top_k_heads=4 --use_routing=True", dict(routing_top_k=4), "top_k_heads=4 sets routing_top_k=4"),
    ("--use_routing=True --top_k_heads=None", dict(routing_top_k=12), "top_k_heads=None sets routing_top_k"),
    ("--entropy_reg_coef=0.5 --use_routing=True", dict(routing_coef=0.5), "sets routing_coef=0.5"),
    ("--routing=moh --top_k_heads=4", dict(routing="moh", routing_top_k=4), "sets routing_top_k=4"),
    ("--use_routing=False --top_k_heads=4", dict(routing=None, routing_top_k=None), "there is no routing"),
    ("--entropy_reg_coef=0.0", dict(routing=None, routing_coef=0.01), "there is no routing"),
])
def test_keys_of_other_programs_are_taken_with_a_line_that_says_what_they_set(theirs, ours, line, capsys):
    both = load((GPTConfig, TrainConfig), theirs.split())
    for key, value in ours.items():
        assert next(getattr(config, key) for config in both if hasattr(config, key)) == value, key
    said = capsys.readouterr().out
    assert line in said and all(each.startswith("command line: ") for each in said.splitlines())


def test_of_two_names_for_one_key_the_later_wins(config_file):
    path = config_file("eval_iters = 20\nlearning_rate = 3e-4\nbatch_size = 1\nblock_size = 2")
    _, config = load((GPTConfig, TrainConfig), [path])
    assert config.eval_tokens == 40 and config.adamw_lr == 3e-4
    _, config = load((GPTConfig, TrainConfig), [path, "--eval_tokens=7", "--adamw_lr=1e-3"])
    assert config.eval_tokens == 7 and config.adamw_lr == 1e-3
    _, config = load((GPTConfig, TrainConfig), [path, "--eval_iters=3", "--batch_size=10", "--lr=2e-3"])
    assert config.eval_tokens == 60 and config.adamw_lr == 2e-3


@pytest.mark.parametrize("given, line", [
    (["--eval_iters=many"], "command line: eval_iters='many' is not int"),
    (["--lr=fast"], "command line: lr='fast' is not float"),
    (["--use_routing=perhaps"], "command line: use_routing='perhaps' is not bool"),
    (["--eval_iters"], "command line: --eval_iters needs a value (int)"),
    (["--eval_itres=3"], "command line: unknown key eval_itres; did you mean eval_tokens?"),
])
def test_wrong_values_of_other_programs_keys_are_refused_by_their_names(given, line):
    with pytest.raises(UserError) as e:
        load((GPTConfig, TrainConfig), given)
    assert str(e.value) == line


@pytest.mark.parametrize("arg", ["--lr=fast", "--lr=nan", "--lr=inf", "--width=1.5", "--width=True",
                                 "--width=[1]", "--fast=maybe", "--layers=a,b", "--layers=[[1]]",
                                 "--layers=[[1],[2]]", "--layers=[1", "--lr_scale=[[0.5]]"])
def test_a_wrong_type_is_refused(arg):
    line, = problems(arg)
    assert line.startswith(f"command line: {arg[2:].split('=')[0]}=") and " is not " in line


@pytest.mark.parametrize("line", ["lr = 'fast'", "lr = True", "lr = float('nan')", "width = 1.5",
                                  "tags = 'a'", "tags = [1]", "fast = 1", "name = None", "layers = [1.5]"])
def test_a_wrong_type_in_a_file_is_refused(config_file, line):
    path = config_file(line)
    got, = problems(path)
    assert got.startswith(f"{path}: {line.split()[0]}=") and " is not " in got


def test_help_says_that_a_config_file_runs(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "A config file is Python code, and reading it runs it: name only files that you trust." in said


def test_a_key_without_its_value_is_refused():
    line, = problems("--name", "--lr=1")
    assert line.startswith("command line: --name ")


def test_all_problems_come_at_once(config_file):
    path = config_file("heds = 2\nlr = -1\nname = 3")
    argv = [path, "--fast=maybe", "--lrr=1", "--note"]
    found = problems(*argv, together=lambda sizes, s: ["together they are wrong"])
    named = [f"{path}: unknown key heds", f"{path}: name=3", "command line: fast='maybe'",
             "command line: unknown key lrr", "command line: --note", "together they are wrong"]
    assert all(line.startswith(name) for line, name in zip(found, named, strict=True)), found
    found = problems("--width=9", "--lr=0")
    assert [line.split()[0] for line in found] == ["width=9", "lr=0.0"]


def test_a_default_that_stands_in_for_a_wrong_value_is_not_blamed():
    line, = problems("--width=9", "--heads=x")
    assert names(line, "command line", "heads", "x")


@pytest.mark.parametrize("path,hint", [
    ("config/nowhere.py", ""),
    ("lr=3", "--lr=3"),
    ("-lr=3", "--lr=3"),
    ("config/ruoting.py", "config/routing.py?"),
])
def test_a_missing_config_file_is_one_line(path, hint):
    line = problems(path)[0]
    assert path in line and line.endswith(hint or path)


@pytest.mark.parametrize("name,meant", [
    ("routng", "routing"),
    ("uent", "unet"),
    ("trainshakespearechar", "train_shakespeare_char"),
    ("constrant", "constraint"),
    ("acg", "acag"),
    ("shakespeare_mod", "shakespeare_modern"),
    ("train_gpt", "train_gpt2"),
    ("tinny", "tiny"),
    *((name, None) for name in ("nosuch", "nowhere", "tiny_moh", "mine", "x", "gpt2")),
])
def test_only_near_files_are_suggested(name, meant):
    line, = problems(f"config/{name}.py")
    suggestion = f"did you mean config/{meant}.py?" if meant else f"config/{name}.py"
    assert f"config/{name}.py" in line and line.endswith(suggestion)


@pytest.mark.parametrize("name,meant", [
    ("nlayer", "n_layer"),
    ("n_layers", "n_layer"),
    ("batchsize", "batch_size"),
    ("sched", "schedule"),
    ("blok_sise", "block_size"),
    ("N_EMBD", "n_embd"),
    ("warmup", "warmup_iters"),
    ("clip", "grad_clip"),
    ("lrr", "adamw_lr"),
    ("dtpye", "dtype"),
    ("learning_rates", "adamw_lr"),
    *((name, None) for name in ("wandb", "epochs", "iters", "temperature", "zzz", "model")),
])
def test_only_near_keys_are_suggested(name, meant):
    line, = problems(f"--{name}=1", classes=(GPTConfig, TrainConfig))
    assert line.startswith("command line: ") and f" {name};" in line
    assert line.endswith(f"did you mean {meant}?") if meant else "did you mean" not in line


@pytest.mark.slow
def test_a_letter_too_few_too_many_or_swapped_is_near_to_every_key_and_mechanism():
    for names in (configurator.keys_of((GPTConfig, TrainConfig)), flags_by_name()):
        for name in names:
            for typo in (name[:2] + name[3:], name[:2] + "q" + name[2:],
                         name[:1] + name[2:3] + name[1:2] + name[3:]):
                if typo not in names and len(name) > 2:
                    assert near(typo, names), (name, typo)


@pytest.mark.parametrize("text,words", [
    ("lr = 1\nx = (", "line 2: SyntaxError: '(' was never closed"),
    ("lr = 1\nname = foo", "line 2: NameError"),
    ("import nowhere_at_all", "line 1: ModuleNotFoundError"),
    ("\0", ": "),
    ("raise ValueError('a\\nb')", "line 1: ValueError: a b"),
])
def test_a_broken_config_file_is_one_line(config_file, text, words):
    path = config_file(text)
    line, = problems(path)
    assert line.startswith(f"{path}, line") and words in line


def test_impossible_values_of_the_real_configs_come_at_once(bytes_data):
    bad = problems("--n_embd=10", "--n_head=3", "--dropout=1.5", "--recipe=old", "--optimizer=sgd",
                   "--adamw_lr=-1", "--warmup_iters=-30", "--max_iters=20", "--block_size=15000",
                   "--vocab_size=5",
                   "--resume", "--overwrite", f"--dataset={bytes_data}",
                   classes=(GPTConfig, TrainConfig), together=conflicts)
    for named in ("n_embd=10", "dropout=1.5", "recipe='old'", "optimizer='sgd'", "adamw_lr=-1.0",
                  "warmup_iters=-30",
                  "30,000 tokens of train", "of val", "vocab_size=5", "overwrite=True"):
        assert sum(named in line for line in bad) == 1, (named, bad)
    assert len(bad) == 10


@pytest.mark.parametrize("argv,named", [
    (["--min_lr=1", "--block_size=16"], [["min_lr=1.0", "adamw_lr=0.001"]]),  # by the defaults
    (["--constraint_focal=2"], [["constraint_focal=2.0", "constraint_names"]]),
    (["--init_from=out/c", "--constraint_focal=2"],  # a detail of what the checkpoint may have
     [["constraint_focal=2.0", "constraint_names"], ["init_from"]]),
])
def test_what_conflicts_is_refused_by_name(argv, named, bytes_data):
    bad = problems(*argv, f"--dataset={bytes_data}", classes=(GPTConfig, TrainConfig), together=conflicts)
    assert all(name in line for line, names in zip(bad, named, strict=True) for name in names), bad


# ---- defaults and help ----

@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_key_has_a_value_once_the_recipe_is_known(optimizer):
    c = TrainConfig(optimizer=optimizer).for_recipe("gpt2")
    may_be_none = {"init_from", "compile", "lr_decay_iters", "wandb_run_name", "wandb_mode", "wandb_tags",
                   "controller", "grow_from", "policy_rules", "labels", "teacher", "documents",
                   "documents_packed", "thaw_from", "skip_lr", "own_mechanism", "json", "patience",
                   "profile",
                   *(name for name in TaskConfig.__dataclass_fields__ if name != "task_rows")}
    assert {f.name for f in fields(c) if getattr(c, f.name) is None} <= may_be_none
    assert not c.problems()


def test_filling_in_defaults_leaves_the_original_alone():
    c = TrainConfig()
    assert c.for_recipe("modern").optimizer == "muon" and c == TrainConfig()


def test_a_default_never_contradicts_a_small_value():
    c = TrainConfig(adamw_lr=1e-5, max_iters=20).for_recipe("gpt2")
    assert c.min_lr == 1e-5 and c.warmup_iters == 2 and not c.problems()


def test_a_warm_up_longer_than_the_schedule_becomes_a_tenth_of_it_and_a_line_says_so():
    for keys, steps in ((dict(max_iters=20), 2), (dict(max_iters=500, lr_decay_iters=100), 10)):
        c = TrainConfig(warmup_iters=2000, **keys)
        assert not c.problems() and c.for_recipe("gpt2").warmup_iters == steps
        note = note_on_warmup(c)
        assert note.startswith("warmup_iters=2000 ") and f"the first {steps} steps" in note
    for fits in (dict(), dict(warmup_iters=0), dict(warmup_iters=1999), dict(max_iters=5)):
        assert note_on_warmup(TrainConfig(**fits)) is None


def test_help_beside_other_arguments_says_where_each_value_comes_from(config_file, capsys):
    path = config_file("n_head = 8\nmuon_lr = 0.03")
    with pytest.raises(SystemExit) as end:
        of_train("--help", "--scale=tiny", path, "--mechanism=moh", "--seed=2", "--lr=0.5")
    assert end.value.code == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    lines = [words for words in lines if words and words[0].startswith("--")]
    found = {words[0]: (words[1], " ".join(words[2:])) for words in lines}
    assert len(found) > 150
    for key, value, source in (
            ("n_embd", "64", "config/tiny.py"), ("n_head", "8", path), ("muon_lr", "0.03", path),
            ("routing", "'moh'", "mechanism moh"), ("seed", "2", "command line"),
            ("adamw_lr", "0.5", "command line"), ("dropout", "0.0", "default"),
            ("qk_norm", "True", "follows from recipe=modern and what is set"),
            ("mechanism_lr", "0.5", "follows from recipe=modern and what is set")):
        assert found[f"--{key}"] == (value, source)


def test_help_prints_every_key_with_type_default_and_words():
    lines = help_text((GPTConfig, TrainConfig), "what this is").splitlines()
    assert lines[0] == "what this is" and "---- run ----" in lines
    for cls in (GPTConfig, TrainConfig):
        for f in (f for f in fields(cls) if f.name != "own"):  # which holds flags and is none
            line, = [x for x in lines if x.startswith(f"  --{f.name} ")]
            assert repr(f.default if f.default is not MISSING else f.default_factory()) in line
    line, = [x for x in lines if x.startswith("  --grad_clip ")]
    assert line.split() == "--grad_clip float or None None clip the gradient's norm; 0: off".split()
    line, = [x for x in help_text((Sizes,), "").splitlines() if "--depth" in x]
    assert line.split() == "--depth int or None None None: as wide".split()


@pytest.mark.slow
def test_the_script_runs_from_any_folder_and_ends_without_a_traceback(tmp_path):
    def train(*argv):
        command = [sys.executable, str(ROOT / "train.py"), *argv]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    done = train("--help")
    assert done.returncode == 0 and "--n_layer" in done.stdout and not done.stderr
    done = train("--lrr=1", "--n_layer=x")
    assert done.returncode == 1 and done.stdout == ""
    lines = done.stderr.splitlines()  # where the default dataset is not prepared, a third line says so
    assert lines[:2] == ["train: command line: unknown key lrr; did you mean adamw_lr?",
                         "train: command line: n_layer='x' is not int"]
    assert all(line.startswith("train: dataset shakespeare_char is not prepared") for line in lines[2:])


@pytest.mark.parametrize("text, words", [
    ("n_layer = 2\nimport sys\nsys.exit(3)\n", "line 3: SystemExit: 3: a config file cannot end the program"),
    ("exit()\n", "line 1: SystemExit"),
    ("def adamw_lr():\n    return 1\n", "adamw_lr is a function, and a config file holds values"),
    ("dropout = lambda: 0\n", "dropout is a function"),
    ("class seed:\n    pass\n", "seed is a class"),
    ("def helper():\n    pass\n", "helper is a function"),
    ("import math\nadamw_lr = math.sqrt\n", "adamw_lr is a function"),
    ("from math import sqrt as adamw_lr\n", "adamw_lr is a function"),
    ("import math as seed\n", "seed is a module"),
])
def test_a_config_file_that_is_a_program_is_named(tmp_path, text, words):
    path = tmp_path / "c.py"
    path.write_text(text)
    with pytest.raises(UserError) as e:
        configurator.load((GPTConfig, TrainConfig), [str(path)])
    said = str(e.value)
    assert said.startswith(str(path)) and words in said and "\n" not in said


def test_what_a_config_file_imports_is_its_own_business(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("import math\nfrom pathlib import Path\n"
                    "def _half(x):\n    return x / 2\nlr = _half(math.sqrt(0.04))\n")
    assert configurator.load((GPTConfig, TrainConfig), [str(path)])[1].adamw_lr == 0.1
