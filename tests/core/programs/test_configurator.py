"""Config files and arguments: what they mean, and that each mistake is answered in plain lines."""

import json
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Optional, get_args

import pytest
from hypothesis import given, settings, strategies as st

from helpers import ANYTHING, ROOT, as_arguments, flags_of, write_settings
from model import ALL_ON, MECHANISMS, GPTConfig
from nanoheads import checkpoint, configurator, start
from nanoheads.common import UserError
from nanoheads.config import (TrainConfig, check_configs, check_data, data_of, flags_by_name, note_on_dropout,
                              note_on_warmup, trained_with, with_extensions)
from nanoheads.configurator import Presets, Scale, build_configs, likely_name, load, parse_command
from nanoheads.mechanism import flag
from train import main

SCALES = get_args(Scale)
# the studies are tests/study/test_plan.py's
CONFIGS = [p for p in sorted((ROOT / "config").glob("[!_]*.py")) if not p.name.startswith("study_")]
BOTH = (GPTConfig, TrainConfig)
NAMES = flags_by_name()  # once: it asks each mechanism whether it takes dropout


@dataclass
class Thing:
    """A key of each type."""
    width: int = flag(8, "how wide", section="size")
    heads: int = flag(2, "how many")
    rate: float = flag(1e-3, "how fast", section="the rest")
    name: str = flag("a", "any text")
    note: Optional[str] = None
    compile: Optional[bool] = flag(None, "whether")
    fast: bool = flag(False, "faster")
    tags: Optional[list[str]] = flag(None, "words")
    layers: Optional[list[int]] = flag(None, "numbers")
    rates: int | list[float] = flag(1, "both")
    flags: dict = flag({}, "names and values")
    shape: Literal["round", "square"] = flag("round", "how it looks")
    size: Optional[Literal[1, 2, 4]] = flag(None, "how big; None: as big as can be")
    mode: Literal["auto", True, None] = flag("auto", "on, off or either")
    sides: list[Literal["left", "right"]] | None = flag(None, "which")

    def problems(self):
        bad = [f"rate={self.rate} must be positive"] if self.rate <= 0 else []
        return bad + [f"width={self.width} must be a multiple of heads={self.heads}"] * (
            self.width % self.heads > 0)


def thing(*argv):
    return load((Thing,), argv)[0]


def lines_of(argv, *classes):
    """What is wrong with arguments, line by line."""
    with pytest.raises(UserError) as e:
        load(classes or (Thing,), argv)
    return str(e.value).splitlines()


def of_train(*argv):
    """((GPTConfig, TrainConfig), {key: value} that was set) as train.py makes them."""
    configs, given = build_configs(parse_command((Presets, *BOTH), argv), mechanisms=NAMES)
    return configurator.validate(configs), given


def named(*argv):
    return of_train(*argv)[0]


def refused(*argv):
    with pytest.raises(UserError) as e:
        named(*argv)
    return str(e.value).splitlines()


@pytest.fixture
def config_file(tmp_path):
    def write(text, name="x.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)
    return write


# ---- values and their types ----

@pytest.mark.parametrize("argv, key, value", [
    ("--rate 3e-4", "rate", 3e-4), ("--width=1e1", "width", 10),
    ("--compile", "compile", True), ("--compile False", "compile", False),
    ("--compile=None", "compile", None), ("--name=a=b=c", "name", "a=b=c"), ("--name=3", "name", "3"),
    ("--name=none", "name", "none"), ("--note=none", "note", None), ("--tags=['a','b']", "tags", ["a", "b"]),
    ("--tags=[a,b]", "tags", ["a", "b"]), ("--tags=1,2", "tags", ["1", "2"]), ("--tags=[]", "tags", []),
    ("--rates=0.5,1", "rates", [0.5, 1.0]), ("--flags={'a':1}", "flags", {"a": 1}),
    ("--size=2", "size", 2), ("--mode=yes", "mode", True), ("--sides=left", "sides", ["left"])])
def test_a_value_is_read_by_its_keys_type(argv, key, value, config_file):
    for source in (argv.split(), [config_file(f"{key} = {value!r}")]):
        got = getattr(thing(*source), key)
        assert got == value and type(got) is type(value)


def test_a_wrong_type_is_one_line_that_names_key_value_and_source(config_file):
    for arg in ("--rate=nan", "--width=1.5", "--width=True", "--fast=maybe", "--layers=a,b",
                "--layers=[[1],[2]]", "--layers=[1", "--size=3", "--size=True", "--mode=no"):
        key, value = arg[2:].split("=")
        kind = configurator.type_name(configurator.keys_of((Thing,))[key].type)
        assert lines_of([arg]) == [f"command line: {key}={value!r} is not {kind}"]
    for line in ("rate = 'fast'", "rate = True", "rate = float('nan')", "width = 1.5", "tags = 'a'",
                 "tags = [1]", "name = None", "size = True", "mode = False", "width = max",
                 "import math as rate"):
        path, key = config_file(line), line.removeprefix("import math as ").split()[0]
        got, = lines_of([path])
        assert got.startswith(f"{path}: {key}=") and " is not " in got


@pytest.mark.parametrize("argv", [["--name", "--rate=1"], ["--name="]])
def test_a_key_needs_its_value(argv):
    """It is empty where a variable of the shell is not set."""
    assert lines_of(argv)[0].startswith(f"command line: {argv[0].split('=')[0]} needs a value (")


def test_all_that_is_wrong_with_keys_and_types_comes_at_once_and_then_all_else(config_file):
    path = config_file("heds = 2\nrate = -1\nname = 3")
    found = lines_of([path, "--fast=maybe", "--rtae=1", "--note"])
    expected = [f"{path}: unknown key heds", f"{path}: name=3", "command line: fast='maybe'",
                "command line: unknown key rtae", "command line: --note needs"]
    assert all(line.startswith(words) for line, words in zip(found, expected, strict=True)), found
    assert [line.split()[0] for line in lines_of(["--width=9", "--rate=0"])] == ["rate=0.0", "width=9"]


# ---- any flags of a model and of its training ----

NOT_DRAWN = {"own", "dataset"}


def answer(values, *argv, base=None, data=None):
    """The two configs that arguments lead to, or the lines that refuse them, each of which names a key of
    `values`; without a path to its file.
    """
    try:
        command = parse_command(BOTH, [*map(str, argv), f"--dataset={data}"])
        (model, config), _ = build_configs(command, base=base)
        check_configs(model, config)
        check_data(model, config, data_of(config, model.block_size))
        return [model, config]
    except UserError as e:
        lines = str(e).splitlines()
        assert lines and all(any(key in line for key in values) for line in lines), (values, lines)
        return [line.removeprefix(f"{argv[0] if argv else base[0]}: ").removeprefix("command line: ")
                for line in lines]


@settings(max_examples=15)
@given(flags_of(*BOTH, but=NOT_DRAWN))
def test_flags_mean_the_same_on_the_command_line_in_a_file_in_config_json_and_in_a_checkpoint(
        bytes_data, tmp_path, capsys, values):
    """Refused or not, and with the same lines: whatever flags, in their ranges and out of them."""
    path = write_settings(tmp_path / "x.py", values)
    found = answer(values, path, data=bytes_data)
    typed = [f"--{key}={value if isinstance(value, str) else repr(value)}" for key, value in values.items()]
    assert answer(values, *typed, data=bytes_data) == found
    if isinstance(found[0], str):
        return
    model, train = found
    asked = start.settings_of(model, train)
    again, train_again = answer(values, base=("config.json", asked), data=bytes_data)
    of_a_command = {key: getattr(train, key) for key in start.COMMAND_KEYS}
    assert again == model and replace(train_again, **of_a_command) == train
    assert replace(model) == model, "what follows from a flag follows once"
    assert checkpoint.config_of(dict(config=model.flags()), "x.pt") == model
    assert trained_with(asdict(train), "x.pt") == train


def test_what_is_off_or_0_is_kept_of_what_was_asked_for():
    """A run that goes on would otherwise have the default again."""
    off = dict(eval_tokens=0, grad_clip=0.0, compile=False)
    asked = start.settings_of(GPTConfig(), TrainConfig(**off))
    assert {key: asked.get(key) for key in off} == off


@settings(max_examples=15)
@given(st.dictionaries(st.sampled_from(sorted(set(configurator.keys_of(BOTH)) - NOT_DRAWN)), ANYTHING,
                       min_size=1, max_size=3))
def test_whatever_a_file_sets_a_key_to_is_taken_or_refused_by_its_name(
        bytes_data, config_file, capsys, values):
    """Also in the config.json of a run that goes on."""
    lines = "".join(f"{key} = {value!r}\n" for key, value in values.items())
    answer(values, config_file(f"nan, inf = float('nan'), float('inf')\n{lines}del nan, inf\n"),
           data=bytes_data)
    answer(values, base=("config.json", values), data=bytes_data)


# ---- config files ----

SOME = st.dictionaries(st.sampled_from(["heads", "rate", "size"]), st.sampled_from([1, 2, 4]))


@settings(max_examples=25)
@given(st.lists(SOME, max_size=3), SOME, SOME, st.integers(0, 3))
def test_later_files_and_then_the_command_line_win(tmp_path, files, of_program, typed, place):
    """Wherever in it the files stand; what the program sets by itself comes between them."""
    paths = [write_settings(tmp_path / f"{n}.py", values) for n, values in enumerate(files)]
    arguments = as_arguments(typed)
    found, = load((Thing,), [*paths[:place], *arguments, *paths[place:]], more={"a program": of_program})
    assert asdict(found) == {key: value for values in (asdict(Thing()), *files, of_program, typed)
                             for key, value in values.items()}


def test_a_config_file_may_compute_and_no_flag_swallows_it(config_file):
    path = config_file("import math\nfrom pathlib import Path\n_half = 0.5\n\n\n"
                       "def double(x):\n    return 2 * x\n\n\nrate = double(math.sqrt(4)) * _half")
    assert thing("--fast", path).rate == 2.0


def test_a_config_file_is_run_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("open('ran', 'a').write('x')\nscale = 'tiny'\nmechanism = ['moh']")
    with pytest.raises(SystemExit):
        main(["x.py", "--resume", "--out_dir=nowhere", "--help"])
    assert (tmp_path / "ran").read_text() == "x"


@pytest.mark.parametrize("text, words", [
    ("rate = 1\nx = (", "line 2: SyntaxError: '(' was never closed"),
    ("rate = 1\nname = foo", "line 2: NameError"),
    ("raise ValueError('a\\nb')", "line 1: ValueError: a b"),
])
def test_an_error_in_a_config_file_is_one_line_with_its_own(config_file, text, words):
    path = config_file(text)
    line, = lines_of([path])
    assert line.startswith(f"{path}, {words}")


def test_a_missing_file_or_an_unknown_key_is_one_line_with_the_only_near_one():
    for path, hint in (("config/nowhere.py", "config/nowhere.py"), ("lr=3", "--lr=3"), ("-lr=3", "--lr=3"),
                       ("config/routng.py", "did you mean config/routing.py?"),
                       ("config/shakespeare_mod.py", "did you mean config/shakespeare_modern.py?"),
                       ("config/x.py", "config/x.py")):
        line, = lines_of([path])
        assert line.startswith(f"no config file {path}") and line.endswith(hint)
    for name, meant in (("nlayer", "n_layer"), ("sched", "schedule"), ("N_EMBD", "n_embd"),
                        ("lrr", "adamw_lr"), ("learning_rates", "adamw_lr"),
                        ("wandb", None), ("iters", None), ("zzz", None)):
        hint = f"did you mean {meant}?" if meant else "--help lists the keys"
        assert lines_of([f"--{name}=1"], *BOTH) == [f"command line: unknown key {name}; {hint}"]
    for arg, meant in (("--shape=Sqare", "square"), ("--sides=left,rihgt", "right")):
        line, = lines_of([arg])
        assert line.endswith(f"; did you mean {meant}?")


@settings(max_examples=20)
@given(st.data())
def test_a_letter_too_few_too_many_or_swapped_is_near_to_every_key_and_mechanism(data):
    names = data.draw(st.sampled_from([[*configurator.keys_of(BOTH)], [*NAMES]]))
    name = data.draw(st.sampled_from(names))
    for typo in (name[:2] + name[3:], name[:2] + "q" + name[2:], name[:1] + name[2:3] + name[1:2] + name[3:]):
        if typo not in names and len(name) > 2:
            assert likely_name(typo, names), (name, typo)


def test_a_config_starts_from_another_in_any_folder_whatever_else_is_called_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])  # as $PYTHONPATH
    (tmp_path / "config").mkdir()
    (tmp_path / "config/__init__.py").write_text("")
    (tmp_path / "mine.py").write_text("from config.tiny import *\n\nagency = True\n")
    model, _ = named("mine.py", "config/window.py")
    assert model.agency and model.window and model.n_embd == 64


# ---- scale and mechanism ----

@pytest.mark.parametrize("scale", [None, "task"])
def test_every_config_file_loads_by_itself_and_at_the_scale_of_tasks(scale):
    for path in CONFIGS:
        argv = [str(path.relative_to(ROOT)), *([f"--scale={scale}", "--mechanism=acag"] if scale else [])]
        if scale == "task" and re.search(r"^(labels|documents) =", path.read_text(), re.M):
            assert "is of a text, and task='recall' has none" in refused(*argv)[0]
            continue
        (model_config, config), given = of_train(*argv)
        assert given and not config.for_recipe(model_config.recipe).problems(), path


def test_every_mechanism_loads_with_a_scale_and_changes_nothing_else():
    scale = "paper"  # which has dropout
    (plain, train_plain), of_scale = of_train(f"--scale={scale}")
    for name in NAMES:
        (model, train), given = of_train(f"--scale={scale}", f"--mechanism={name}")
        flags = ALL_ON if name == "all_on" else MECHANISMS[name]
        no_kernel = model.attn_dropout is not None  # for dropout on the attention weights
        assert model == replace(plain, **flags, **(dict(attn_dropout=0.0) if no_kernel else {})), name
        assert bool(note_on_dropout(model)) == no_kernel
        more = {key: value for key, value in with_extensions(flags).items() if key not in flags}
        assert train == replace(train_plain, out_dir=f"out/{scale}-{name}", **more)
        assert {*flags, *of_scale} <= set(given)


def test_a_scale_is_its_file():
    for scale in SCALES:
        (configs, given), by_file = of_train(f"--scale={scale}"), named(f"config/{scale}.py")
        assert configs == by_file and by_file[1].out_dir == f"out/{scale}"
        values = configurator.read_file(f"config/{scale}.py")
        assert set(given) == set(values)
        assert all(value == getattr(configs[0], key, getattr(configs[1], key, None))
                   for key, value in values.items())


@pytest.mark.parametrize("argv, want", [
    # what a file sets wins over both
    (["x.py"], dict(n_layer=2, n_head=16, routing="moh", adamw_lr=1e-3)),
    # the command line's scale replaces it
    (["--n_head=32", "--scale=small", "x.py"], dict(n_layer=6, n_head=32, routing="moh")),
    (["x.py", "config/small.py"], dict(n_layer=6, n_head=16, routing="moh")),  # a scale's file is a scale
    (["x.py", "--mechanism=agency"], dict(routing=None, routing_shared=0, agency=True)),
    (["x.py", "--scale=none"], dict(n_layer=12, n_head=16, routing="moh")),
    (["x.py", "--mechanism=[moh, 'unet_add']", "--routing_shared=2"],
     dict(routing="moh", routing_shared=2, unet="add")),
    (["--task=recall"], dict(task="recall", n_layer=2, n_embd=64)),  # alone it has the scale of tasks
    (["--task=recall", "--scale=small"], dict(task="recall", n_layer=6)),
])
def test_what_is_set_wins_over_scale_and_mechanism(argv, want, config_file):
    path = config_file("n_head = 16\nadamw_lr = 1e-3\nscale = 'tiny'\nmechanism = ['moh']")
    model, train = named(*(path if arg == "x.py" else arg for arg in argv))
    assert {key: getattr(model, key, getattr(train, key, None)) for key in want} == want


def test_the_run_folder_follows_from_the_names(config_file):
    for line, folder in {
        "": "out/gpt",
        "--scale=tiny": "out/tiny",
        "config/tiny.py --mechanism=moh,unet_add": "out/tiny-moh+unet_add",
        "config/shakespeare_modern.py": "out/shakespeare_modern",
        "--task=recall --mechanism=acag": "out/recall-acag",
        "config/tiny.py --out_dir=here": "here",
        "--scale=tiny --routing=published": "out/tiny-routing=published",  # not the plain GPT's folder
        "--scale=tiny --mechanism=moh --seed=2 --adamw_lr=0.001": "out/tiny-moh",
        "--scale=tiny --own_mechanism=/a/b/mine.py --mechanism=sink": "out/tiny-sink",
    }.items():
        (_, config), given = of_train(*line.split())
        assert config.out_dir == folder and ("out_dir" in given) == ("out_dir" in line), line
    # short, legal on every system, and with its mechanism
    for stem in ("a" * 90, "-x ü", "con fig.v2."):
        path = config_file("n_layer = 3", f"{stem}.py")
        name = named(path, "--mechanism=moh,sink")[1].out_dir.removeprefix("out/")
        assert len(name) <= 60 and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=+-]*-moh\+sink", name), name


def test_a_scale_with_another_recipe_has_that_recipes_rates():
    """Those of the scale were tuned for its own; what is set by hand holds."""
    more = ["--recipe=llama", "--optimizer=muon"]
    model, config = named("--scale=tiny", *more)
    plain, own = named(*more)[1].for_recipe("llama"), config.for_recipe("llama")
    for key in ("adamw_lr", "embed_lr", "muon_momentum"):
        assert getattr(own, key) == getattr(plain, key)
    assert model.recipe == "llama" and model.n_embd == 64 and model.qk_max is None
    assert named("--scale=tiny", *more, "--adamw_lr=0.5")[1].adamw_lr == 0.5
    own, same = named("--scale=tiny")[1], named("--scale=tiny", "--recipe=modern")[1]
    assert same.adamw_lr == own.adamw_lr != plain.adamw_lr


@pytest.mark.parametrize("argv, words", [
    (["--scale=tniy", "--n_head=7"], ["scale='tniy'", "tiny?"]),
    (["--mechanism=mohh,agency"], ["mohh", "moh?"]),
    (["--mechanism=zzz"], ["zzz", *NAMES, "HEAD_MECHANISMS", "mine.py"]),
    # also where no flag differs: two modes of one mechanism are no pair, in either order
    (["--mechanism=acag,agency,acag_elementwise"], ["acag", "acag_elementwise", "both set acag"]),
    (["--mechanism=sink,agency,sink"], ["sink", "both set sink"]),
    (["--scale=tiny", "--mechanism=acag", "--attn_dropout=0.1"], ["acag", "attn_dropout"]),
])
def test_what_is_wrong_with_scale_and_mechanism_is_one_line(argv, words):
    line, = refused(*argv)
    assert all(word in line for word in words), line


def test_what_is_wrong_with_them_in_a_file_names_the_file(config_file):
    path = config_file("mechanism = ['moh', 'sentinal']")
    assert refused(path, "--n_head=7") == [f"{path}: unknown mechanism sentinal; did you mean sentinel?"]
    path = config_file("mechanism = 3\nscale = 'huge'")
    assert [line.split(" is not ")[0] for line in refused(path)] == [
        f"{path}: mechanism=3", f"{path}: scale='huge'"]
    with pytest.raises(UserError, match="mechanism big: n_layer='two' is not int"):
        build_configs(parse_command((Presets, *BOTH), ["--mechanism=big"]),
                      mechanisms={"big": dict(n_layer="two")})


# ---- what follows from the recipe, and what does not go together ----

def test_a_default_never_contradicts_a_small_value_and_a_long_warm_up_is_shortened_and_said():
    c = TrainConfig(adamw_lr=1e-5, max_iters=20).for_recipe("gpt2")
    assert c.min_lr == 1e-5 and c.warmup_iters == 2 and not c.problems()
    c = TrainConfig(warmup_iters=2000, max_iters=500, lr_decay_iters=100)
    assert not c.problems() and c.for_recipe("gpt2").warmup_iters == 10
    note = note_on_warmup(c)
    assert note.startswith("warmup_iters=2000 ") and "the first 10 steps" in note
    for fits in (dict(), dict(warmup_iters=0), dict(warmup_iters=1999), dict(max_iters=5)):
        assert note_on_warmup(TrainConfig(**fits)) is None


@pytest.mark.parametrize("argv, words", [
    # each config by itself, all at once
    ("--n_embd=10 --n_head=3 --dropout=1.5 --adamw_lr=-1 --resume --overwrite",
     ["dropout=1.5", "n_embd=10", "adamw_lr=-1.0", "overwrite=True"]),
    ("--init_from=out/c --constraint_focal=2",  # a detail of what the checkpoint may have
     ["constraint_focal=2.0", "leave those out"]),
    # both together, by the defaults; with the data; a task beside a text
    ("--min_lr=1 --block_size=16", ["adamw_lr=0.001 is below min_lr=1.0, to which it falls: set both"]),
    ("--vocab_size=5 --block_size=15000", ["vocab_size=5", "30,000 tokens of train", "of val"]),
    ("--task=recall --labels=x", ["labels='x' is of a text, and task='recall' has none"]),
])
def test_what_does_not_go_together_is_refused_by_name_before_anything_is_trained(
        argv, words, fails, bytes_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = fails([f"--dataset={bytes_data}", "--device=cpu", *argv.split()])
    assert all(word in line for line, word in zip(lines, words, strict=True)), lines
    assert not [*tmp_path.glob("out/*")]


# ---- a run that goes on ----

@pytest.fixture
def small(bytes_data, tmp_path, monkeypatch):
    """Arguments that make any scale small enough to train; out/ is in a temporary folder."""
    monkeypatch.chdir(tmp_path)
    sizes = dict(n_layer=2, n_head=8, n_embd=32, block_size=16, batch_size=4, eval_tokens=64, warmup_iters=0)
    sizes.update(dataset=str(bytes_data), device="cpu")
    write_settings(tmp_path / "small.py", sizes)
    return ["small.py"]


@pytest.mark.slow
def test_a_resume_that_names_its_folder_need_not_repeat_the_command(small, fails, capsys):
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
    main(["--init_from=resume", out, "--max_iters=5", "--learning_rate=0.001"])  # as nanoGPT's users type it
    said = capsys.readouterr().out
    assert "going on at step 4 of 5" in said
    assert "changed since the last save: adamw_lr=0.001, was 0.016" in said
    for more, words in (("--seed=6", "seed=6 here is 5 there"), ("--mechanism=acag_elementwise", "acag="),
                         ("--batch_size=9", "batch_size * grad_accum=9 here is 4 there")):
        assert words in fails(["--resume", out, "--max_iters=7", more])[0]
    for more, words in ((["--mechanism=agency", "--eval_only", out], "agency=True here is False there"),
                        (["--mechanism=routing_sigmoid", "--init_from=out/here"],
                         "routing='sigmoid' here is 'moh'")):
        said, = fails(["--scale=tiny", *small, *more])
        assert "holds another model" in said and words in said
