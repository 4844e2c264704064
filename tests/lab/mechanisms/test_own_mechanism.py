"""Code of one's own: what is only read is not run; files that import others; several files and modes."""

import hashlib
import json
import math
import re
import sys
from pathlib import Path
from types import CodeType

import numpy as np
import pytest
import torch

import bench
import compare
import evaluate
from lab import export_hf
import model
import nanoheads.traces
from lab import probe, prune
import sample
import train
from helpers import forget_own_mechanisms
from helpers import CODE
from nanoheads import causality, checkpoint, optim, own_mechanism as own, replaced, scoring
from nanoheads.common import UserError
from nanoheads.config import TrainConfig
from nanoheads.configurator import help_text, keys_of, read
from nanoheads.dataset import Dataset
from lab.hub import huggingface as hf
from study.config import StudyConfig, variants_of

SIZES = dict(vocab_size=256, block_size=16, n_layer=1, n_head=2, n_embd=16)
MODE = """
class {0}(Mechanism):
    class Options:
        {1}: bool = flag(False, "what {1} does")
        {1}_size: float = 1.0
    name, flag, modes = "{0}", "{1}", {2}
    def after_attention(self, attn, heads):
        heads.y = heads.y * {3}
"""
HEAD = "from nanoheads.mechanism import Mechanism, flag\n"
TWO_MODES = "dict(up=dict(twice=True), down=dict(twice=True, twice_size=0.5))"


def written(path, *parts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEAD + "".join(parts), encoding="utf-8")
    return path


@pytest.fixture
def evil(mine, tmp_path):  # noqa: F811
    """(a mechanism's file that leaves a mark where it is run, whether it was)."""
    path, mark = mine(), tmp_path / "it was run"
    path.write_text(f"open({str(mark)!r}, 'w').close()\n{CODE}", encoding="utf-8")
    return path, mark.exists


@pytest.fixture
def ran(evil, bytes_data, tmp_path):
    """(folder with a checkpoint whose code is beside it, whether that was run); nothing stays added."""
    path, was_run = evil
    own.add(path)
    folder = tmp_path / "run"
    folder.mkdir()
    save(folder / "best.pt", bytes_data, **own.held(model.GPTConfig(**SIZES, forget=True), folder))
    forget_own_mechanisms()
    (tmp_path / "it was run").unlink()
    return folder, was_run


def save(path, data, flags=None, config=None, **more):
    gpt = model.GPT(model.GPTConfig(**SIZES, **(dict(forget=True) if flags is None else flags)))
    train_flags = dict(dataset=str(data), **more.pop("train", {}))
    checkpoint.save(
        path,
        dict(
            model=gpt.state_dict(),
            config={**gpt.config.flags(), **(config or {})},
            meta=Dataset(data).meta,
            train=train_flags,
            step=1,
            **more,
        ),
    )


def line_of(program, *argv):
    """The line with which a program ends that cannot go on."""
    with pytest.raises(SystemExit) as e:
        program.main([*map(str, argv)])
    assert isinstance(e.value.code, str) and "\n" not in e.value.code, e.value.code
    return e.value.code


# ---- what is only read is not run ----


@pytest.mark.slow
@pytest.mark.parametrize(
    "program, argv",
    [
        (sample, ["--start=a", "--ckpt"]),
        (evaluate, ["--split=val", "--ckpt"]),
        (export_hf, ["--out=hf", "--ckpt"]),
        (prune, ["--by=random", "--to=0.5", "--ckpt"]),
        (probe, ["heads", "--ckpt"]),
        (probe, ["look", "--start=abc", "--ckpt"]),
        (probe, ["constraints", "explain", "--ckpt"]),
        (probe, ["text", "--ckpt"]),
    ],
)
def test_no_program_runs_the_code_beside_a_checkpoint(program, argv, ran, tmp_path, monkeypatch):
    folder, was_run = ran
    monkeypatch.chdir(tmp_path)
    for path in (folder, folder / "best.pt"):
        said = line_of(program, *argv, path)
        assert (
            "was made with the mechanism in mine.py" in said
            and "--mechanism=FILE, or say --trust_code" in said
        )
        assert not was_run()


def test_it_runs_where_its_file_is_named_or_trusted(ran, capsys):
    folder, was_run = ran
    evaluate.main(["--ckpt", str(folder), "--split=val", "--tokens=32", f"--mechanism={folder / 'mine.py'}"])
    assert was_run() and "runs" not in capsys.readouterr().err
    forget_own_mechanisms()
    evaluate.main(["--ckpt", str(folder), "--split=val", "--tokens=32", "--trust_code"])
    assert capsys.readouterr().err == f"--trust_code runs {folder / 'mine.py'}\n"


@pytest.mark.slow
def test_a_checkpoint_whose_flag_is_off_needs_no_code(ran, bytes_data):
    """Although the file was added when it was made."""
    folder, was_run = ran
    own.add(folder / "mine.py")
    off = model.GPTConfig(**SIZES, forget=False)
    save(folder / "best.pt", bytes_data, flags={}, config=off.flags(), **own.held(off, folder))
    forget_own_mechanisms()
    (folder.parent / "it was run").unlink()
    for more in ([], ["--trust_code"]):
        sample.main(["--ckpt", str(folder), "--start=a", "--max_new_tokens=2", *more])
        assert not was_run()


@pytest.mark.parametrize("record", ["mine.py", ["mine.py"], [dict(file="mine.py")]])
def test_a_record_that_is_none_is_one_line(record, ran, bytes_data):
    folder, was_run = ran
    save(folder / "best.pt", bytes_data, flags={}, own_mechanism=record)
    for more in ([], ["--trust_code"]):
        said = line_of(sample, "--ckpt", folder, "--start=a", *more)
        assert "must be a list of files' names and digests" in said and not was_run()


@pytest.mark.slow
def test_a_file_with_a_byte_order_mark_is_read(mine, bytes_data, tmp_path, own_mechanisms_go):  # noqa: F811
    """As some editors on Windows write it."""
    path = Path(mine())
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    sizes = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=4"]
    train.main([f"--mechanism={path}", f"--dataset={bytes_data}", f"--out_dir={tmp_path / 'run'}", *sizes,
                "--eval_tokens=64", "--device=cpu", "--max_iters=1"])
    assert (tmp_path / "run" / "mine.py").is_file()


@pytest.mark.slow
def test_a_resumed_run_names_the_file_again(mine, bytes_data, tmp_path, own_mechanisms_go):  # noqa: F811
    """Or it is trusted: the folder's config.json says which of its modes is trained."""
    folder = tmp_path / "run"
    args = [f"--dataset={bytes_data}", "--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16",
            "--batch_size=4", "--eval_tokens=64", "--device=cpu"]
    train.main([f"--mechanism={mine()}", *args, "--max_iters=1", f"--out_dir={folder}"])
    forget_own_mechanisms()
    said = line_of(train, "--resume", f"--out_dir={folder}")
    assert "mine.py" in said and "--mechanism=FILE, or say --trust_code" in said
    for steps, named in ((2, "--trust_code"), (3, f"--mechanism={folder / 'mine.py'}")):
        forget_own_mechanisms()
        train.main(["--resume", f"--out_dir={folder}", f"--max_iters={steps}", named])
        assert torch.load(folder / "ckpt.pt", weights_only=True)["step"] == steps


@pytest.mark.slow
def test_an_absolute_path_in_a_checkpoint_is_never_run(evil, bytes_data, tmp_path):
    """Neither where its training names one, nor where its record does, trusted or not."""
    path, was_run = evil
    own.add(path)
    forget, = own.record(model.GPTConfig(**SIZES, forget=True))
    alone = tmp_path / "alone"
    alone.mkdir()
    save(alone / "x.pt", bytes_data, own_mechanism=[forget], train=dict(own_mechanism=str(path)))
    for name in (str(path), "../mine.py", "a/../../mine.py", "", "..\\mine.py", "C:mine.py"):
        save(alone / f"{len(name)}.pt", bytes_data, own_mechanism=[dict(forget, file=name)])
    (alone / "mine.py").symlink_to(path)
    save(alone / "link.pt", bytes_data, own_mechanism=[forget])
    forget_own_mechanisms()
    (tmp_path / "it was run").unlink()
    for file in sorted(alone.glob("*.pt")):
        said = line_of(sample, "--ckpt", file, "--start=a")
        assert "what is only read is not run" in said and not was_run(), file
        said = line_of(sample, "--ckpt", file, "--start=a", "--trust_code")
        assert re.search("such a file is never run|which is not in", said) and not was_run(), file
    (alone / "mine.py").unlink()
    assert f"mine.py (sha256 {forget['digest']}...), which is not in" in line_of(
        sample, "--ckpt", alone / "x.pt", "--trust_code"
    )


def test_a_folder_for_transformers_is_read_and_not_run(ran, tmp_path):
    folder, was_run = ran
    gpt = checkpoint.build(checkpoint.read(str(folder), trust_code=True), folder)
    hf.export(gpt, None, tmp_path / "hf")
    forget_own_mechanisms()
    (tmp_path / "it was run").unlink()
    about = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert about["gpt"]["forget"] is True and about["own_mechanism"][0]["file"] == "own/mine.py"
    state = checkpoint.read(str(tmp_path / "hf"))
    with pytest.raises(UserError, match="what is only read is not run"):
        checkpoint.build(state, tmp_path / "hf")
    about["own_mechanism"][0]["file"] = str(folder / "mine.py")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match="leads out of .*: such a file is never run"):
        checkpoint.read(tmp_path / "hf", trust_code=True)
    assert not was_run()


@pytest.mark.slow
def test_training_runs_no_code_of_what_it_starts_from(ran, bytes_data, tmp_path):
    folder, was_run = ran
    args = [
        f"--dataset={bytes_data}",
        "--device=cpu",
        "--max_iters=1",
        "--eval_tokens=32",
        "--batch_size=2",
        *(f"--{key}={value}" for key, value in SIZES.items() if key != "vocab_size"),
    ]
    said = line_of(train, *args, f"--init_from={folder}", f"--out_dir={tmp_path / 'new'}")
    assert "what is only read is not run" in said and not was_run()
    train.main([*args, f"--init_from={folder}", f"--out_dir={tmp_path / 'new'}", "--trust_code"])
    assert was_run() and (tmp_path / "new" / "mine.py").is_file()
    forget_own_mechanisms()
    (tmp_path / "it was run").unlink()
    # going on names the file again
    on = [*args[:2], "--max_iters=2", *args[3:], "--resume", f"--out_dir={tmp_path / 'new'}"]
    assert "what is only read is not run" in line_of(train, *on) and not was_run()
    train.main([*on, f"--mechanism={tmp_path / 'new' / 'mine.py'}"])
    assert torch.load(tmp_path / "new" / "ckpt.pt", weights_only=True)["step"] == 2


def test_another_text_of_the_file_is_refused(ran):
    folder, was_run = ran
    other = folder.parent / "mine.py"
    other.write_text(CODE + "\n# another\n")
    said = line_of(sample, "--ckpt", folder, "--start=a", f"--mechanism={other}")
    assert f"{other} is another text (sha256" in said and not was_run()


# ---- programs that it replaces ----


@pytest.fixture
def library(tmp_path, monkeypatch):
    """The folder of installed libraries that this test alone has, first on Python's path."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in {*sys.modules} & {"strengths"}:
        del sys.modules[name]


SCORING = "nanoheads.scoring"
PATCHES = {  # what a file of one's own may do -> (what it changes, a name in it, how that is named)
    "scoring.nats_of = lambda *a, f=scoring.nats_of: 0.9 * f(*a)": (scoring, "nats_of", f"{SCORING}.nats_of"),
    "scoring.nats_of.__code__ = (lambda logits, targets: 0).__code__":
        (scoring.nats_of, "__code__", f"{SCORING}.nats_of"),
    "scoring.score.__wrapped__.__defaults__ = None":
        (scoring.score.__wrapped__, "__defaults__", f"{SCORING}.score"),
    "scoring.float = lambda x: 0.9 * float(x)": (scoring, "float", f"{SCORING}.float"),
    "scoring.BLOCK = 1": (scoring, "BLOCK", f"{SCORING}.BLOCK"),
    f"sys.modules['{SCORING}'] = types.ModuleType('scoring')": (sys.modules, SCORING, SCORING),
    "causality.refuse = lambda *a, **k: 'all'": (causality, "refuse", "nanoheads.causality.refuse"),
    "Dataset.tokens = lambda self, split: []": (Dataset, "tokens", "nanoheads.dataset.Dataset.tokens"),
    "GPT.hidden = None": (model.GPT, "hidden", "model.GPT.hidden"),
    "GPT.__call__ = lambda self, *a: None": (model.GPT, "__call__", "model.GPT.__call__"),
    "GPTConfig.head_size.fget.__code__ = (lambda self: 1).__code__":
        (model.GPTConfig.head_size.fget, "__code__", "model.PlainConfig.head_size"),
    "math.log = lambda x: 1.1": (math, "log", "math.log"),
    "torch.Tensor.double = torch.Tensor.float": (torch.Tensor, "double", "torch.Tensor.double"),
    "F.linear = None": (torch.nn.functional, "linear", "torch.nn.functional.linear"),
    "np.concatenate = None": (np, "concatenate", "numpy.concatenate"),
}
IMPORTS = """import math, sys, types
import numpy as np
import torch
from torch.nn import functional as F
from model import GPT, GPTConfig
from nanoheads import causality
from nanoheads.dataset import Dataset
from nanoheads import scoring
"""


@pytest.fixture
def restored(own_mechanisms_go):
    """restored(place, name): what is there under this name now is put back after the test."""
    before = []

    def note(place, name):
        before.append((place, name, vars(place).get(name, place)))

    yield note
    for place, name, value in before:
        if value is place:  # there was none
            delattr(place, name)
        else:
            setattr(place, name, value)


@pytest.mark.parametrize("patch", PATCHES)
def test_a_file_that_replaces_what_scores_is_refused(patch, restored, tmp_path, monkeypatch):
    place, name, said = PATCHES[patch]
    if place is sys.modules:
        monkeypatch.setitem(place, name, place[name])
    elif isinstance(getattr(place, name, None), CodeType) or name == "__defaults__":
        monkeypatch.setattr(place, name, getattr(place, name))
    else:
        restored(place, name)
    path = written(tmp_path / "mine.py", IMPORTS, f"{patch}\n", MODE.format("Twice", "twice", TWICE, 2))
    with pytest.raises(UserError) as e:
        own.add(path)
    assert re.fullmatch(rf"{re.escape(f'{path} replaced {said}')}(, .*)?; a mechanism must not change the "
                        "programs that train and score it", str(e.value))
    assert not own.ADDED


def test_a_module_that_was_loaded_since_has_no_functions_of_the_file(restored, tmp_path, monkeypatch):
    """It is imported in a way that no import statement shows."""
    monkeypatch.delitem(sys.modules, "nanoheads.traces")
    monkeypatch.delattr(nanoheads, "traces")
    path = written(tmp_path / "mine.py", "import importlib\n",
                   "importlib.import_module('nanoheads.traces').summaries = lambda *a: {}\n",
                   MODE.format("Twice", "twice", TWICE, 2))
    with pytest.raises(UserError, match="mine.py replaced nanoheads.traces.summaries; "):
        own.add(path)


def test_what_pytorch_puts_around_a_function_is_not_the_files(tmp_path, monkeypatch, own_mechanisms_go):
    """As when it compiles, and when the first optimizer of a class is made."""
    own.add(written(tmp_path / "mine.py", MODE.format("Twice", "twice", TWICE, 2)))
    monkeypatch.setattr(torch, "manual_seed", torch._disable_dynamo(torch.manual_seed))
    monkeypatch.setattr(optim.Muon, "step", torch.optim.Optimizer.profile_hook_step(optim.Muon.step))
    assert replaced.changed() == []
    monkeypatch.setattr(torch, "manual_seed", torch.no_grad()(lambda seed: None))
    monkeypatch.setattr(optim.Muon, "step", lambda self: None)
    assert replaced.changed() == ["nanoheads.optim.Muon.step", "torch.manual_seed"]


def test_what_a_library_does_when_it_is_imported_is_not_the_files(library, restored, tmp_path):
    restored(torch.nn.functional, "linear")
    (library / "strengths.py").write_text("from torch.nn import functional as F\n"
                                          "F.linear = lambda *a, f=F.linear, **k: f(*a, **k)\n")
    path = written(tmp_path / "mine.py", "import strengths\n", MODE.format("Twice", "twice", TWICE, 2))
    assert own.add(path) == ["twice"] and replaced.changed() == []


# ---- a file stands alone ----

TWICE = "dict(twice=dict(twice=True))"


@pytest.mark.parametrize("imports, words", [
    ("import rates\n", "imports rates, which is .*rates.py: a mechanism's file stands alone"),
    ("from parts.one import ONE\n", "imports parts, which is .*parts: a mechanism's file stands alone"),
    ("def f():\n    import rates\n", "imports rates"),
    ("from . import rates\n", "line 2: ImportError: .*; a mechanism's file stands alone"),
    ("import train\n", "imports train, which is .*train.py"),  # a program, whose text no digest would hold
])
def test_code_of_another_file_is_refused_before_anything_runs(imports, words, tmp_path, monkeypatch,
                                                              own_mechanisms_go):
    monkeypatch.syspath_prepend(tmp_path)
    mark = tmp_path / "it was run"
    for name in ("rates.py", "parts/one.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"open({str(mark)!r}, 'w').close()\n")
    path = written(tmp_path / "mine.py", imports, MODE.format("Twice", "twice", TWICE, 2))
    with pytest.raises(UserError, match=words) as e:
        own.add(path)
    assert "\n" not in str(e.value) and not own.ADDED and not mark.exists()


def test_a_file_beside_it_that_python_does_not_find_is_one_line(tmp_path, own_mechanisms_go):
    (tmp_path / "rates.py").write_text("")
    with pytest.raises(UserError, match="line 2: .*No module named 'rates'; a mechanism's file stands alone"):
        own.add(written(tmp_path / "mine.py", "import rates\n"))


def test_installed_libraries_and_this_repository_may_be_imported(tmp_path, own_mechanisms_go):
    """Also where something beside the file has a library's name, which Python does not take."""
    (tmp_path / "numpy.py").write_text("1 / 0\n")
    imports = ("import json, torch, numpy as np\nfrom model import GPT\n"
               "from nanoheads.attention import attend\n")
    path = written(tmp_path / "mine.py", imports, MODE.format("Twice", "twice", TWICE, 2))
    assert own.add(path) == ["twice"]
    assert own.opened(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_name_that_is_nowhere_is_one_line(tmp_path, own_mechanisms_go):
    before = {*sys.modules}
    with pytest.raises(UserError, match="mine.py, line 2: ModuleNotFoundError: No module named 'nowhere'"):
        own.add(written(tmp_path / "mine.py", "import nowhere\n"))
    assert not [name for name in {*sys.modules} - before if name.startswith("own_mechanism_")]


# ---- every class, every mode, several files ----


@pytest.fixture
def two(tmp_path, own_mechanisms_go):
    """A file with two classes, the first of two modes; another file with one."""
    return (
        written(
            tmp_path / "mine.py",
            MODE.format("Twice", "twice", TWO_MODES, "2"),
            MODE.format("Thrice", "thrice", "dict(thrice=dict(thrice=True))", "3"),
        ),
        written(tmp_path / "yours.py", MODE.format("Half", "half", "dict(half=dict(half=True))", "0.5")),
    )


def taken(argv, **how):
    """The arguments of compare.py after take()."""
    command = read((StudyConfig,), argv)
    own.take(command, **how)
    return command.words()


def test_a_file_stands_for_every_mode_of_every_class(two):
    mine, yours = two  # noqa: F811
    assert taken([f"--mechanisms=xsa,{mine},{yours}"]) == [
        "--mechanisms=xsa,up,down,thrice,half",
        f"--own_mechanism={mine},{yours}",
    ]
    config = StudyConfig(mechanisms=["up", "down", "thrice", "half"])
    assert config.problems() == [] and variants_of(config)["down"] == dict(twice=True, twice_size=0.5)
    challenge = StudyConfig(mechanism="up,down,thrice")
    assert (
        challenge.problems() == [] and challenge.mechanisms == ["up", "down", "thrice"] and challenge.screen
    )
    assert taken([f"--mechanisms={mine}:down,{yours}:half"])[0] == "--mechanisms=down,half"


def test_one_run_names_one_mode(two, bytes_data):
    mine, yours = two  # noqa: F811
    assert f"{mine} has the modes up, down, thrice: name one, as in {mine}:up" in line_of(
        train, f"--mechanism={mine}"
    )
    assert f"{mine} has no mode dwon; it has up, down, thrice" in line_of(train, f"--mechanism={mine}:dwon")
    assert taken([f"--mechanism={mine}:down,{mine}:thrice,{yours}"], every=False) == [
        "--mechanism=down,thrice,half",
        f"--own_mechanism={mine},{yours}",
    ]


@pytest.mark.slow
def test_a_run_keeps_the_files_of_all_that_it_has_on(two, bytes_data, tmp_path):
    mine, yours = two  # noqa: F811
    out = tmp_path / "run"
    train.main(
        [
            f"--mechanism={mine}:down,{yours}",
            f"--dataset={bytes_data}",
            f"--out_dir={out}",
            "--device=cpu",
            "--n_layer=1",
            "--n_head=2",
            "--n_embd=16",
            "--block_size=16",
            "--max_iters=1",
            "--eval_tokens=32",
            "--batch_size=2",
        ]
    )
    state = torch.load(out / "best.pt", weights_only=True)
    assert [each["file"] for each in state["own_mechanism"]] == ["mine.py", "yours.py"]
    assert {
        key: value for key, value in state["config"].items() if key[:4] in ("twic", "thri", "half")
    } == dict(twice=True, twice_size=0.5, half=True, half_size=1.0)
    forget_own_mechanisms()
    assert "in mine.py (sha256" in (said := line_of(sample, "--ckpt", out)) and "and yours.py" in said
    for allowed in (
        [f"--mechanism={out / 'mine.py'},{yours}"],
        [f"--mechanism={mine}", "--mechanism", str(yours)],
        ["--trust_code"],
    ):
        sample.main(["--ckpt", str(out), "--start=a", "--max_new_tokens=2", *allowed])
        forget_own_mechanisms()


def test_flags_are_flat_to_the_person_and_in_one_field_of_the_config(two):
    mine, _ = two  # noqa: F811
    bases = model.GPTConfig.__bases__
    own.add(mine)
    config = model.GPTConfig(**SIZES, twice=True, twice_size=0.25)
    assert model.GPTConfig.__bases__ == bases and "twice" not in model.GPTConfig.__dataclass_fields__
    assert config.own == dict(twice=True, twice_size=0.25) and config.twice_size == 0.25
    assert keys_of((model.GPTConfig,))["twice"][1:] == (False, "what twice does")
    assert "--twice_size" in help_text((model.GPTConfig, TrainConfig), "")
    assert "own" not in keys_of((model.GPTConfig,)) and config.flags()["twice_size"] == 0.25
    assert checkpoint.read_settings(["twice_size=0.5"]) == (dict(twice_size=0.5), [])
    with pytest.raises(TypeError, match="thrce"):
        model.GPTConfig(**SIZES, thrce=True)


HALF = ("Half", "half", "dict(half=dict(half=True))")


@pytest.mark.parametrize(
    "second, words",
    [
        (("Half", "half", "dict(less=dict(half=True))"), "two texts of one mechanism, with the flag half"),
        (
            ("Half", "less", "dict(less=dict(less=True))"),
            "name='Half' must be a name of its own|defines Half twice",
        ),
        (("Less", "less", "dict(half=dict(less=True))"), "there is a mode half already"),
        (("Less", "half_size", "dict(less=dict(half_size=True))"), "there is a flag half_size already"),
    ],
)
def test_what_two_files_or_classes_may_not_share_is_one_line(second, words, tmp_path, own_mechanisms_go):
    classes = [MODE.format(*each, "1") for each in (HALF, second)]
    own.add(written(tmp_path / "a.py", classes[0]))
    with pytest.raises(UserError, match=words) as e:
        own.add(written(tmp_path / "b.py", classes[1]))
    assert "\n" not in str(e.value) and len(own.ADDED) == 1
    if "two texts" not in words:
        forget_own_mechanisms()
        with pytest.raises(UserError, match=words):
            own.add(written(tmp_path / "c.py", *classes))
    assert len(model.OWN) == len(own.ADDED)


def test_two_files_of_one_name_are_one_line(two, tmp_path):
    own.add(two[0])
    other = written(
        tmp_path / "there" / "mine.py", MODE.format("Half", "half", "dict(half=dict(half=True))", "1")
    )
    with pytest.raises(UserError, match="have one name, and a run keeps both"):
        own.add(other)


# ---- mistakes, each one line ----


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after, words",
    [
        (
            'modes = {"forget": dict(forget=True)}',
            'modes = {"forget": dict(forget=True, forget_int=-2)}',
            "modes: forget sets forget_int, and there is no such flag; did you mean forget_init?",
        ),
        (
            'modes = {"forget": dict(forget=True)}',
            'modes = ["forget"]',
            "modes=['forget'] must be a dict of dicts",
        ),
        ('modes = {"forget": dict(forget=True)}', "modes = 3", "modes=3 must be a dict of dicts"),
        (
            'modes = {"forget": dict(forget=True)}',
            'modes = {"forget": dict(forget_init=-2.0)}',
            "modes: 'forget' does not set forget, the flag that turns the class on",
        ),
        ('modes = {"forget": dict(forget=True)}', 'modes = {"forget": True}', "must be a dict of dicts"),
        ("dict(forget=True)}", "dict(forget=True, forget_init='x')}", "forget_init='x' is not float"),
        (
            "forget_init: float",
            "forget_init: 'Number'",
            "an annotation cannot be read: NameError: name 'Number'",
        ),
        ('name = "forgetting"', "name = 5", "name=5 must be a text"),
        ('flag = "forget" ', "flag = None ", "flag=None must be a text"),
        (
            'neutral = {"forget": {"forgetting.slope": -60.0}}',
            "neutral = 1",
            "neutral=1 must be a dict of dicts",
        ),
    ],
)
def test_a_mistake_in_a_declaration_is_one_line(before, after, words, mine, capsys):  # noqa: F811
    path = mine(before, after)
    said = line_of(train, f"--mechanism={path}")
    assert said.startswith(f"train: {path}: Forgetting: ") and words in said
    assert line_of(compare, f"--mechanism={path}").startswith("compare: ") and not own.ADDED


def trained(path, data):
    return [
        f"--mechanism={path}",
        f"--dataset={data}",
        "--device=cpu",
        "--n_layer=1",
        "--n_head=2",
        "--n_embd=16",
        "--block_size=16",
        "--max_iters=1",
        "--eval_tokens=32",
        "--batch_size=2",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after, words",
    [
        (
            "        super().__init__()\n",
            "",
            "mine.py, line 23: AttributeError: cannot assign parameters before Module.__init__() call",
        ),
        (
            "    def score_mod(self, attn, heads):",
            "    def score_mod(self, attn, heads):\n        boom  #",
            "mine.py, line 33: NameError: name 'boom' is not defined",
        ),
        (
            "    def score_mod(self, attn, heads):",
            "    def score_mod(self, attn, heads):\n        raise ValueError('so')  #",
            "mine.py, line 33: ValueError: so",
        ),
        (
            "        self.start = config.forget_init\n",
            "        self.start = config.forget_in\n",
            "mine.py, line 23: AttributeError: a GPTConfig has no flag 'forget_in'",
        ),
        (
            "    def head_axes(self):",
            "    @staticmethod\n    def problems(config):\n        yield 1 / 0\n\n    def head_axes(self):",
            "mine.py, line 31: ZeroDivisionError: division by zero",
        ),
    ],
)
def test_a_mistake_in_a_hook_names_file_and_line(
    before, after, words, mine, bytes_data, tmp_path, monkeypatch  # noqa: F811
):
    monkeypatch.chdir(tmp_path)
    path = mine(before, after)
    assert words in line_of(train, *trained(path, bytes_data))
    assert words in line_of(
        compare, "plan", f"--mechanism={path}", f"--settings={{'dataset': {str(bytes_data)!r}}}"
    )


@pytest.mark.slow
def test_a_mistake_in_a_hook_of_a_read_checkpoint_is_one_line(ran):
    folder, _ = ran
    path = folder / "mine.py"
    hook = "    def score_mod(self, attn, heads):"
    broken = CODE.replace(hook, f"{hook}\n        1 / 0  #")
    path.write_text(broken)
    state = torch.load(folder / "best.pt", weights_only=True)
    state["own_mechanism"][0]["digest"] = own.opened(path).digest
    checkpoint.save(folder / "best.pt", state)
    for program, argv in ((sample, ["--start=a"]), (evaluate, ["--split=val"]), (probe, [])):
        words = ["heads"] if program is probe else []
        said = line_of(program, *words, "--ckpt", folder, "--trust_code", *argv)
        assert f"{path}, line 33: ZeroDivisionError" in said


@pytest.mark.parametrize("text, words", [("def f(:\n", "SyntaxError"), ("\n1 / 0\n", "ZeroDivisionError")])
def test_a_file_that_is_no_python_is_one_line(text, words, tmp_path, own_mechanisms_go):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=f"mine.py, line {text.count(chr(10))}: {words}"):
        own.add(tmp_path / "mine.py")
    assert not own.ADDED


def test_the_arguments_take_files_alone(ran):
    folder, was_run = ran
    assert "--mechanism=xsa must be a file" in line_of(sample, "--ckpt", folder, "--mechanism=xsa")
    assert "no mechanism file nowhere.py" in line_of(sample, "--ckpt", folder, "--mechanism=nowhere.py")
    assert not was_run()
    assert bench.arguments(["--own_mechanism=a.py,b.py"]).own_mechanism == "a.py,b.py"


def test_what_the_compiler_adds_to_a_module_is_no_replacement(mine, monkeypatch):
    """A compiled run with a file of one's own ended at its first look. Another new name is told as ever."""
    own.add(mine())
    monkeypatch.setattr(model, "__compiled_fn_1_0a1b", lambda: None, raising=False)
    monkeypatch.setattr(model, "__resume_at_20_1", lambda: None, raising=False)
    assert replaced.changed() == []
    monkeypatch.setattr(model, "sum", lambda values: 0, raising=False)
    assert replaced.changed() == ["model.sum"]
