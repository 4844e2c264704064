"""Checkpoints: whole or not at all, foreign ones read or refused in a line, resumed only as the same run."""
import copy
import io
import math
import os
import pickle
import platform
import resource
import shutil
import signal
import subprocess
import sys
import warnings
import zipfile
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial, reduce
from operator import getitem
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

import evaluate
import sample
import train
from helpers import TINY as RUN
from model import GPT, GPTConfig
from nanoheads import checkpoint, common, start
from nanoheads.common import UserError, explain, pick_device
from nanoheads.config import TrainConfig
from nanoheads.dataset import Dataset
from helpers import ANYTHING, EDITS, PLACE, damaged, make_checkpoint
from nanoheads.optim import AdamW, make_optimizers

TINY = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=256)


def line(action, *args, **kw):
    with pytest.raises(UserError) as e:
        action(*args, **kw)
    assert len(str(e.value).splitlines()) == 1
    return str(e.value)


@pytest.fixture
def state(bytes_data):
    """What train.py saves, in little."""
    config = GPTConfig(**TINY)
    return dict(model=GPT(config).state_dict(), config=asdict(config),
                meta=Dataset(bytes_data).meta, step=3)


def alike(a, b):
    """Whether two states, dicts and lists with tensors in them, are the same; NaN is NaN."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b))
    if torch.is_tensor(a) and torch.is_tensor(b):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and (a == b or a != a and b != b)


@pytest.fixture
def saved(state, tmp_path):
    checkpoint.save(tmp_path / "ckpt.pt", state)
    return tmp_path / "ckpt.pt"


@pytest.fixture
def limit():
    """limit(n): no file may grow beyond n bytes, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda n: resource.setrlimit(resource.RLIMIT_FSIZE, (n, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- writing ----

def test_a_checkpoint_comes_back_as_it_was(state, saved):
    back = checkpoint.read(saved)
    assert back.keys() == state.keys() and back["config"] == state["config"] and back["meta"] == state["meta"]
    assert all(torch.equal(back["model"][k], v) for k, v in state["model"].items())
    assert os.listdir(saved.parent) == ["ckpt.pt"]


def test_a_full_disk_is_one_line_and_leaves_the_previous_checkpoint_intact(state, saved, limit):
    before = saved.read_bytes()
    limit(len(before) // 2)
    said = line(checkpoint.save, saved, {**state, "step": 4})
    assert str(saved) in said and "File too large" in said and "intact" in said
    limit(resource.RLIM_INFINITY)
    assert saved.read_bytes() == before and os.listdir(saved.parent) == ["ckpt.pt"]


def test_a_full_disk_at_the_first_save_leaves_nothing(state, tmp_path, limit):
    limit(1000)
    assert str(tmp_path / "ckpt.pt") in line(checkpoint.save, tmp_path / "ckpt.pt", state)
    limit(resource.RLIM_INFINITY)
    assert os.listdir(tmp_path) == []


def test_what_is_wrong_in_the_state_is_not_called_a_full_disk(tmp_path):
    with pytest.raises(Exception) as e:
        checkpoint.save(tmp_path / "ckpt.pt", {"model": lambda: 0})
    assert not isinstance(e.value, (UserError, OSError))


def test_nothing_is_saved_that_the_description_does_not_have(state, tmp_path):
    with pytest.raises(ValueError, match="CONTENT describes no optimiser$"):
        checkpoint.save(tmp_path / "ckpt.pt", {**state, "optimiser": {}})
    assert os.listdir(tmp_path) == []


def test_content_reaches_the_disk_before_the_name_does(state, saved, monkeypatch):
    calls, fsync, rename = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda f: (calls.append("fsync"), fsync(f)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), rename(a, b)))
    checkpoint.save(saved, state)
    assert calls == ["fsync", "rename", "fsync"], "content, name, folder"


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before writing", "half-written", "written, not renamed"])
def test_killing_the_writer_at_any_moment_leaves_the_old_file_or_the_new_one(state, saved, moment):
    new = io.BytesIO()
    torch.save({**state, "step": 4}, new)
    child = os.fork()
    if child == 0:
        def write(f):
            f.write(new.getvalue()[:dict(zip(("b", "h"), (0, 5000))).get(moment[0])])
            f.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        checkpoint.write_atomic(saved, write)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert checkpoint.read(saved)["step"] == 3
    checkpoint.save(saved, {**state, "step": 4})  # what was left behind is in nobody's way
    assert checkpoint.read(saved)["step"] == 4 and os.listdir(saved.parent) == ["ckpt.pt"]


# ---- reading ----

def test_a_run_folder_means_its_best_checkpoint(state, saved):
    assert checkpoint.read(saved.parent)["step"] == 3
    checkpoint.save(saved.with_name("best.pt"), {**state, "step": 2})
    assert checkpoint.read(saved.parent)["step"] == 2


def test_a_missing_checkpoint_is_one_line(tmp_path):
    assert str(tmp_path / "no.pt") in line(checkpoint.read, tmp_path / "no.pt")
    assert "ckpt.pt" in line(checkpoint.read, tmp_path)


@settings(max_examples=150)
@given(EDITS)
def test_a_damaged_checkpoint_is_read_as_it_was_or_refused_in_a_line(finished, tmp_path, edits):
    """Cut, with bits flipped or with bytes inserted, anywhere in the file: of what it holds nothing changes.
    """
    path = tmp_path / "ckpt.pt"
    path.write_bytes(damaged((finished[0] / "ckpt.pt").read_bytes(), edits))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = checkpoint.read(path)
    except UserError as e:
        assert str(path) in str(e) and len(str(e).splitlines()) == 1 and "argument" not in str(e)
    else:
        assert alike(found, finished[1])


def places_in(value, depth=3):
    """Yield the paths, lists of keys, to what stands in nested dicts and lists."""
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield [key]
        if depth > 1 and isinstance(part, (dict, list)):
            yield from ([key, *rest] for rest in places_in(part, depth - 1))


@settings(max_examples=100)
@given(st.data())
def test_whatever_stands_in_a_checkpoint_is_refused_in_a_line_or_means_something(finished, tmp_path, data):
    """Who reads it, builds its model, or goes on from it; of sizes that are damaged no model is made."""
    state = copy.deepcopy(finished[1])
    *path, last = data.draw(st.sampled_from([*places_in(state)]))
    reduce(getitem, path, state)[last] = data.draw(ANYTHING)
    file = tmp_path / "ckpt.pt"
    torch.save(state, file)
    try:
        state = checkpoint.read(file)
        model = checkpoint.build(state, file)
        dataset = Dataset(state["dataset"] or finished[1]["dataset"])  # a converted one names none
        checkpoint.same_vocabulary(state, dataset, file)
        config = TrainConfig(**finished[1]["train"]).for_recipe(model.config.recipe)
        start.same_run(state, file, config, dataset)
        optimizers = make_optimizers(model, config)
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            start.restore(optimizer, saved, file, state["step"])
    except UserError as e:
        assert len(str(e).splitlines()) == 1, e


@given(PLACE)
def test_a_checkpoint_cut_short_is_refused(finished, tmp_path, share):
    content = (finished[0] / "ckpt.pt").read_bytes()
    (tmp_path / "ckpt.pt").write_bytes(content[:int(share * len(content))])
    assert str(tmp_path / "ckpt.pt") in line(checkpoint.read, tmp_path / "ckpt.pt")


@pytest.mark.slow
@pytest.mark.parametrize("content", ["text", "pickle", "zip",
                                     "tensor", "list", "dict", "weights alone", "config of another kind"])
def test_a_foreign_file_is_one_line(saved, state, content):
    if content == "text":
        saved.write_text("not a checkpoint\n" * 100)
    elif content == "pickle":
        saved.write_bytes(pickle.dumps({"model": {}, "config": {}, "meta": None}))
    elif content == "zip":
        with zipfile.ZipFile(saved, "w") as z:
            z.writestr("readme", "hello")
    else:
        torch.save({"tensor": torch.zeros(3), "list": [1], "dict": {"a": 1}, "weights alone": state["model"],
                    "config of another kind": {**state, "config": ["n_layer"]}}[content], saved)
    assert str(saved) in line(checkpoint.read, saved)


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


def test_reading_a_checkpoint_runs_nobodys_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {}, "config": {}, "meta": Attack()}, "ckpt.pt")
    assert "ckpt.pt" in line(checkpoint.read, "ckpt.pt")
    assert not Path("attacked").exists()


def test_running_out_of_memory_is_not_called_damage(saved, monkeypatch):
    def load(*args, **kw):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(torch.OutOfMemoryError):
        checkpoint.read(saved)


# ---- nanoGPT's ----

def nanogpt_state(bias=False, prefix="", old_masks=False):
    """A checkpoint as nanoGPT writes it, with the weights of a model of ours, and that model."""
    ours = GPT(GPTConfig(**TINY, bias=bias, dropout=0.2, seed=3)).eval()
    weights = {prefix + k: v for k, v in ours.state_dict().items()}
    if old_masks:
        weights |= {f"{prefix}transformer.h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril() for i in range(2)}
    args = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, bias=bias, vocab_size=256, dropout=0.2)
    optimizer = torch.optim.AdamW(ours.parameters()).state_dict()
    return dict(model=weights, optimizer=optimizer, model_args=args,
                iter_num=70, best_val_loss=torch.tensor(1.5),
                config=dict(dataset="sums", learning_rate=1e-3, compile=True)), ours


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanogpts_checkpoints_are_read(tmp_path, bias, prefix):
    theirs, ours = nanogpt_state(bias, prefix, old_masks=True)
    torch.save(theirs, tmp_path / "ckpt.pt")
    state = checkpoint.read(tmp_path / "ckpt.pt")
    assert (state["step"], state["dataset"], state["meta"]) == (70, "sums", None)
    model = checkpoint.build(state, "ckpt.pt")
    x = torch.arange(16)[None]
    assert torch.equal(model(x).logits, ours(x).logits) and model.config.dropout == 0.2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_nanogpts_checkpoints_of_january_2023_are_read(tmp_path, bias, tied):
    """No `bias` among their model_args, the tanh form of GELU, two matrices until the 14th."""
    theirs, _ = nanogpt_state(bias)
    del theirs["model_args"]["bias"]
    ours = GPT(GPTConfig(**TINY, bias=bias, act="gelu_tanh", tied=tied, seed=3)).eval()
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(torch.randn_like(p))
    theirs["model"] = ours.state_dict()
    torch.save(theirs, tmp_path / "ckpt.pt")
    model = checkpoint.build(checkpoint.read(tmp_path / "ckpt.pt"), "ckpt.pt")
    x = torch.arange(16)[None]
    assert torch.equal(model(x).logits, ours(x).logits) and model.config.bias == bias


def test_an_incomplete_nanogpt_checkpoint_is_one_line(tmp_path):
    theirs, _ = nanogpt_state()
    del theirs["model_args"]["vocab_size"], theirs["model"]["transformer.ln_f.weight"]
    torch.save(theirs, tmp_path / "ckpt.pt")
    state = checkpoint.read(tmp_path / "ckpt.pt")
    assert line(checkpoint.build, state, "ckpt.pt").startswith("ckpt.pt: ")


# ---- building ----

def test_flags_that_a_checkpoint_does_not_know_take_their_defaults(state):
    del state["config"]["softcap"], state["config"]["checkpoint_activations"]
    assert checkpoint.build(state, "x").config == GPTConfig(**TINY)


def test_a_checkpoint_of_a_newer_version_is_one_line(state):
    state["config"]["flux"] = 3
    said = line(checkpoint.build, state, "x.pt")
    assert said.startswith("x.pt ") and said.endswith("flux")


@pytest.mark.parametrize("change", [dict(n_layer=3), dict(n_embd=15),
                                    dict(n_embd="wide"), dict(vocab_size=None), dict(pos="rope")])
def test_weights_that_do_not_fit_the_config_are_one_line(state, change):
    state["config"].update(change)
    assert line(checkpoint.build, state, "x.pt").startswith("x.pt: its ")


def test_a_vocabulary_that_means_something_else_is_one_line(state, chars_data, bytes_data):
    checkpoint.same_vocabulary(state, Dataset(bytes_data), "x.pt")
    said = line(checkpoint.same_vocabulary, state, Dataset(chars_data), "x.pt")
    assert all(name in said for name in ("x.pt", "sums (byte, 256", "letters (char, 10"))
    state["meta"] = None  # nanoGPT's: only the size can be compared
    checkpoint.same_vocabulary(state, Dataset(chars_data), "x.pt")
    state["config"]["vocab_size"] = 9
    said = line(checkpoint.same_vocabulary, state, Dataset(chars_data), "x.pt")
    assert all(name in said for name in ("x.pt", "9", "letters", "10"))


# ---- where a run starts ----

def test_an_optimizer_keeps_its_moments_and_takes_the_new_rates():
    p = torch.nn.Parameter(torch.ones(3))
    old = AdamW([p], lr=1.0, weight_decay=0.1)
    new = AdamW([p], lr=2.0, weight_decay=0.3)
    p.grad = torch.ones(3)
    old.step()
    start.restore(new, old.state_dict(), "x.pt", steps=1)
    assert (new.param_groups[0]["lr"], new.param_groups[0]["weight_decay"]) == (2.0, 0.3)
    assert torch.equal(new.state[p]["exp_avg"], old.state[p]["exp_avg"])


def test_an_optimizer_state_that_does_not_fit_is_one_line():
    old = AdamW([torch.nn.Parameter(torch.ones(3))])
    new = AdamW([torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))])
    assert "x.pt" in line(start.restore, new, old.state_dict(), "x.pt", steps=1)


def test_resuming_with_changed_model_flags_names_them_all(state):
    start.same_model(state, "x.pt", replace(GPTConfig(**TINY), vocab_size=None), set(TINY))
    said = line(start.same_model, state, "x.pt", GPTConfig(**{**TINY, "n_layer": 3, "n_head": 4}),
                {"n_layer", "n_head", "dropout"})
    assert all(name in said for name in ("x.pt", "n_layer=3", "n_head=4")) and "dropout" not in said
    assert "qk_norm" in line(start.same_model, state, "x.pt",
                             GPTConfig(**TINY, qk_norm=True), set(state["config"]))


def test_a_flag_that_the_checkpoint_does_not_know_yet_counts_as_its_default(state):
    del state["config"]["softcap"]
    start.same_model(state, "x.pt", GPTConfig(**TINY), {"softcap"})
    softcap = line(start.same_model, state, "x.pt", GPTConfig(**TINY, softcap=5.0), {"softcap"})
    assert "softcap=5.0" in softcap


def test_a_checkpoint_without_a_state_to_go_on_from_is_one_line(state, bytes_data):
    said = line(start.same_run, state, "best.pt", TrainConfig().for_recipe("gpt2"), Dataset(bytes_data))
    assert said.startswith("best.pt ") and "--init_from=best.pt" in said


@pytest.mark.parametrize("name", ["cpu:x", "gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_one_line(name):
    if name == "cuda:99" and torch.cuda.device_count() > 99:
        pytest.skip("it is there")
    assert f"device={name}" in line(pick_device, name)


def test_a_gpu_that_is_not_there_is_said_with_those_that_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    said = line(pick_device, "cuda:2")
    assert "device=cuda:2" in said and said.endswith("cuda:1")


def test_the_device_is_detected():
    there = [name for name, kind in (("cuda", torch.cuda), ("mps", torch.backends.mps))
             if kind.is_available()]
    assert pick_device("auto") == [*there, "cpu"][0]
    assert pick_device("cpu") == "cpu"


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library decides this by itself")
def test_on_a_cpu_freed_memory_stays_for_the_next_step():
    """Given back and taken again each of its pages is a page fault: a tenth of the time of a small run."""
    program = """
import resource, torch
from nanoheads.common import pick_device
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        [torch.ones(6 << 20) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults()); pick_device("cpu"); print(faults())
"""
    before, after = map(int, subprocess.run([sys.executable, "-c", program], cwd=common.ROOT, check=True,
                                            capture_output=True, text=True).stdout.split())
    assert after < before / 4


def test_a_checkpoint_of_an_older_version_is_refused_in_a_line_that_names_the_commit(state):
    state["config"]["routing_capacity"] = 0.0
    with pytest.raises(UserError) as e:
        checkpoint.build(state, "old.pt")
    assert str(e.value) == ("old.pt is of an older version of this program; commit 7a2abeb is the last one "
                            "that reads it")


@pytest.mark.parametrize("value, problem", [("head", None), ("mlp", "unknown flags agency_scope")])
def test_a_flag_that_left_is_unknown_but_where_it_changes_nothing(tmp_path, state, value, problem):
    state["config"]["agency_scope"] = value
    checkpoint.save(tmp_path / "old.pt", state)
    read = checkpoint.read(tmp_path / "old.pt")
    with pytest.raises(UserError, match=problem) if problem else nullcontext():
        assert alike(dict(checkpoint.build(read, "old.pt").state_dict()), dict(state["model"]))


def test_flags_younger_than_a_checkpoint_are_off(tmp_path):
    """A flag that a recipe gained later must not change what an older checkpoint computes."""
    model = GPT(GPTConfig(vocab_size=7, block_size=4, n_layer=1,
                          n_head=1, n_embd=8, recipe="modern", embed_norm=False))
    config = {k: v for k, v in asdict(model.config).items() if k != "embed_norm"}
    old = checkpoint.build(dict(model=model.state_dict(), config=config, meta=None), "old.pt")
    assert old.config.embed_norm is False


@pytest.mark.parametrize("device, precision", [("cuda", "high"), ("cuda:1", "high"), ("cpu", "highest")])
def test_every_program_computes_as_training_does(monkeypatch, device, precision):
    """Training took TF32 on a GPU, and scoring its checkpoint did not."""
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(common, "checked_device", lambda name: name)
    try:
        torch.set_float32_matmul_precision("highest")
        assert pick_device(device) == device and torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_kernel_without_room_is_not_told_to_run_uncompiled():
    """FlexAttention is compiled with --compile=False too."""
    said = explain(RuntimeError("out of resource: shared memory, Required: 246784, Hardware limit: 232448."))
    assert "246784" in said and "smaller heads" in said and "--compile" not in said


# ---- what is in the file ----

@pytest.fixture(scope="module")
def finished(bytes_data, tmp_path_factory):
    """(folder, what its ckpt.pt holds) of a run of 6 steps with Muon, whose last evaluation was the best."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train.main(command(bytes_data, folder))
    return folder, checkpoint.read(folder / "ckpt.pt")


def test_a_run_saves_what_the_description_says(finished):
    """What only going on needs is in ckpt.pt alone."""
    of_both = checkpoint.entries(checkpoint.EVERY, checkpoint.RUN, checkpoint.PROGRESS)
    assert finished[1].keys() == {*of_both, *checkpoint.entries(checkpoint.GOING_ON)}
    assert checkpoint.read(finished[0] / "best.pt").keys() == {*of_both}


def command(data, folder, **keys):
    keys = {"dataset": data, **RUN, "optimizer": "muon", "out_dir": folder, **keys}
    return [f"--{key}={value}" for key, value in keys.items()]


@pytest.fixture
def changed(finished, tmp_path):
    """changed(change) -> a copy of the run, in whose ckpt.pt, best.pt are gone, change(state) was made."""
    def make(change):
        folder = shutil.copytree(finished[0], tmp_path / "run")
        state = copy.deepcopy(finished[1])
        change(state)
        torch.save(state, folder / "ckpt.pt")
        (folder / "best.pt").unlink()
        return folder
    return make


def moments(state, optimizer):
    """The first parameter's, of Muon (0) or AdamW (1)."""
    return state["optimizers"][optimizer]["state"][0]


def of_kind(dtype):
    name = "transformer.wpe.weight"
    return lambda s: s["model"].update({name: s["model"][name].to(dtype)})


DAMAGED = {  # whoever reads it
    "meta, its dataset's: encoding is missing: byte, char, gpt2 or hf": lambda s: s["meta"].pop("encoding"),
    "meta='x' must be a dict or None": lambda s: s.update(meta="x"),
    "splits=[] must be the splits by name": lambda s: s["meta"].update(splits=[]),
    "splits.val=3 must be its tokens, bytes and sha256": lambda s: s["meta"]["splits"].update(val=3),
    "must be a dict of tensors by name": lambda s: s["model"].update({3: torch.zeros(2)}),
    "model.x=3 must be a tensor": lambda s: s["model"].update(x=3),
    "config=['n_layer'] must be a dict of flags": lambda s: s.update(config=["n_layer"]),
    "train='adamw' must be a dict of flags or None": lambda s: s.update(train="adamw"),
    "dataset=['x'] must be a text or None": lambda s: s.update(dataset=["x"]),
    "step='ten' must be a number of steps": lambda s: s.update(step="ten"),
    "step=-3 must be a number of steps": lambda s: s.update(step=-3),
    "step=True must be a number of steps": lambda s: s.update(step=True),
    "step=None must be a number of steps": lambda s: s.update(step=None),
    "step=7 must be at most max_iters=6": lambda s: s.update(step=7),
    "step=1000000000 must be at most max_iters=6": lambda s: s.update(step=10**9),
    "step=6 must be at most max_iters='6'": lambda s: s["train"].update(max_iters="6"),
    "best_val_loss=nan must be a loss, at least 0": lambda s: s.update(best_val_loss=math.nan),
    "best_val_loss=-1.0 must be a loss, at least 0": lambda s: s.update(best_val_loss=-1.0),
    "best_val_loss='low' must be a loss, at least 0": lambda s: s.update(best_val_loss="low"),
    "elapsed_s='long' must be seconds, at least 0": lambda s: s.update(elapsed_s="long"),
    "elapsed_s=inf must be seconds, at least 0": lambda s: s.update(elapsed_s=math.inf),
    "elapsed_s=-2 must be seconds, at least 0": lambda s: s.update(elapsed_s=-2),
    "run_id=5 must be a text": lambda s: s.update(run_id=5),
    "last_eval=None must be an evaluation": lambda s: s.update(last_eval=None),
    "last_eval={} must be an evaluation": lambda s: s.update(last_eval={}),
    "last_eval={'step': 6} must be an evaluation": lambda s: s.update(last_eval=dict(step=6)),
    "last_eval.val_loss='x' must be a number": lambda s: s["last_eval"].update(val_loss="x"),
    "last_eval.step=9 must be from -1 to step=6": lambda s: s["last_eval"].update(step=9),
    "last_eval.step=nan must be from -1 to step=6": lambda s: s["last_eval"].update(step=math.nan),
    "optimizers=None must be a list of dicts": lambda s: s.update(optimizers=None),
    "optimizers=['a', 'b'] must be a list of dicts": lambda s: s.update(optimizers=["a", "b"]),
    "optimizers.1.state=None must be a dict": lambda s: s["optimizers"][1].pop("state"),
    "optimizers.0.state.0=[] must be a dict of moments":
        lambda s: s["optimizers"][0]["state"].update({0: []}),
    "optimizers.1.state.0.exp_avg='x' must be a tensor of floats":
        lambda s: moments(s, 1).update(exp_avg="x"),
    "optimizers.1.state.0.exp_avg=tensor": lambda s: moments(s, 1).update(exp_avg=torch.zeros(2, dtype=int)),
    "optimizers.1.param_groups=None must be a list of dicts":
        lambda s: s["optimizers"][1].pop("param_groups"),
    "optimizers.1.param_groups.0.params=['x'] must be a list of numbers":
        lambda s: s["optimizers"][1]["param_groups"][0].update(params=["x"]),
    "scaler='x' must be a dict of numbers": lambda s: s.update(scaler="x"),
    "scaler.scale=0.0 must be a number above 0": lambda s: s.update(scaler=dict(scale=0.0)),
    "scaler._growth_tracker=None must be a number of steps": lambda s: s.update(scaler=dict(scale=1.0)),
    "controller=[] must be a dict": lambda s: s.update(controller=[]),
    "own_mechanism='mine.py' must be a list of files' names": lambda s: s.update(own_mechanism="mine.py"),
    "own_mechanism=[{'file': 'mine.py'}] must be a list of files' names":
        lambda s: s.update(own_mechanism=[dict(file="mine.py")]),
}
MISFITS = {  # who builds the model
    "n_layer=20000, and there are tensors of 1 block": lambda s: s["config"].update(n_layer=20000),
    "n_embd=1000000000, and the embedding is": lambda s: s["config"].update(n_embd=10**9),
    "block_size=1000000000, and the table of positions is": lambda s: s["config"].update(block_size=10**9),
    "vocab_size=1000000000, and the embedding is": lambda s: s["config"].update(vocab_size=10**9),
    "its config is impossible: n_layer='1' is not int": lambda s: s["config"].update(n_layer="1"),
    "its config is impossible: block_size='16' is not int": lambda s: s["config"].update(block_size="16"),
    "its config is impossible: vocab_size='256' is not int or None":
        lambda s: s["config"].update(vocab_size="256"),
    "transformer.wpe.weight holds torch.int64 in the place of torch.float32": of_kind(torch.int64),
    "transformer.wpe.weight holds torch.complex64 in the place of torch.float32": of_kind(torch.complex64),
    "transformer.wpe.weight holds NaN or infinities":
        lambda s: s["model"]["transformer.wpe.weight"][1, 2].fill_(math.nan),
    "transformer.wte.weight holds NaN or infinities":
        lambda s: s["model"]["transformer.wte.weight"][0].fill_(-math.inf),
}
NO_START = {  # --resume
    "no state to go on from (no train)": lambda s: s.update(train=None),
    "no state to go on from (no meta)": lambda s: s.update(meta=None),
    "no state to go on from (no last_eval, optimizers)":
        lambda s: (s.pop("optimizers"), s.pop("last_eval")),
    "no state to go on from (no evals_since_best)": lambda s: s.pop("evals_since_best"),
    "sums holds other data than sums did": lambda s: s["meta"].pop("splits"),
    "trained with is impossible: batch_size='4' is not int": lambda s: s["train"].update(batch_size="4"),
    "trained with is impossible: adamw_lr=nan is not float or None":
        lambda s: s["train"].update(adamw_lr=math.nan),
    "trained with is impossible: adamw_lr=-1.0 must be above 0": lambda s: s["train"].update(adamw_lr=-1.0),
    "it has the states of 0 optimizers, and this run has 2": lambda s: s.update(optimizers=[]),
    "it has the states of 1 optimizers, and this run has 2": lambda s: s["optimizers"].pop(),
    "transformer.h.0.attn.c_proj.weight was trained and has no moments":
        lambda s: s["optimizers"][0].update(state={}),
    "transformer.wte.weight was trained and has no moments": lambda s: s["optimizers"][1]["state"].pop(0),
    "no parameter has the number 99": lambda s: s["optimizers"][0]["state"].update({99: moments(s, 0)}),
    "exp_avg must have the shape [256, 16], and there is shape [16, 256]":
        lambda s: moments(s, 1).update(exp_avg=moments(s, 1)["exp_avg"].T.clone()),
    "exp_avg_sq must have the shape [256, 16], and there is none": lambda s: moments(s, 1).pop("exp_avg_sq"),
    "row_square must have the shape [16, 1], and there is none": lambda s: moments(s, 0).pop("row_square"),
    "exp_avg_sq, a mean of squares, holds numbers below 0":
        lambda s: moments(s, 1)["exp_avg_sq"][0].fill_(-1),
    "momentum holds NaN or infinities": lambda s: moments(s, 0)["momentum"][0].fill_(math.nan),
    "moments of 7 steps in a run of 6": lambda s: moments(s, 1)["step"].fill_(7),
    "moments of -3 steps in a run of 6": lambda s: moments(s, 1)["step"].fill_(-3),
    "different number of parameter groups": lambda s: s["optimizers"][1]["param_groups"].pop(),
    "does not fit this config ('beta2')": lambda s: s["optimizers"][0]["param_groups"][0].pop("beta2"),
}


@pytest.mark.parametrize("words, change", {**DAMAGED, **MISFITS, **NO_START}.items())
def test_a_run_goes_on_from_what_it_wrote_alone(words, change, changed, fails, bytes_data):
    folder = changed(change)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    said, = fails([*command(bytes_data, folder, max_iters=9), "--resume"])
    assert said.startswith(f"{folder}/ckpt.pt") and words in said
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after | {"lock": before["lock"]} == before


PROGRAMS = dict(sample=lambda run, data: sample.main(["--ckpt", str(run), "--device=cpu"]),
                evaluate=lambda run, data: evaluate.main(["--ckpt", str(run), "--device=cpu"]),
                train=lambda run, data: train.main([f"--init_from={run}", f"--dataset={data}", "--device=cpu",
                                                    "--out_dir=out"]))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("words", ["step=-3", "best_val_loss=nan", "model.x=3", "block_size='16'",
                                   "transformer.wpe.weight holds torch.int64",
                                   "transformer.wpe.weight holds NaN"])
def test_every_reader_finds_what_is_damaged(words, program, changed, bytes_data, tmp_path, monkeypatch):
    change, = [change for key, change in {**DAMAGED, **MISFITS}.items() if words in key]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as e:
        PROGRAMS[program](changed(change), bytes_data)
    assert len(str(e.value.code).splitlines()) == 1
    assert e.value.code.startswith(f"{program}: {tmp_path}/run") and words in e.value.code
    assert not list(tmp_path.glob("out/*.*"))


def test_a_config_that_is_damaged_is_refused_before_a_model_is_built(changed, fails, bytes_data, monkeypatch):
    """20,000 layers take minutes to build."""
    folder = changed(MISFITS["n_layer=20000, and there are tensors of 1 block"])
    monkeypatch.setattr(checkpoint, "GPT", None)
    assert "n_layer=20000" in fails([*command(bytes_data, folder, max_iters=9), "--resume"])[0]


@pytest.mark.parametrize("change", [lambda s: s.update(best_val_loss=math.inf),
                                    lambda s: s["last_eval"].update(val_loss=math.nan, val_bpb=math.inf),
                                    lambda s: s["train"].update(of_another_version=[1])])
def test_what_a_run_may_write_is_no_damage(change, changed, bytes_data):
    folder = changed(change)
    train.main([*command(bytes_data, folder, max_iters=7), "--resume"])
    assert checkpoint.read(folder / "ckpt.pt")["step"] == 7


def test_a_run_on_a_task_goes_on(tmp_path, fails, capsys):
    """Its evaluations have other numbers than those of text, and its rows follow from its flags."""
    sizes = dict(n_layer=1, n_head=2, n_embd=16, block_size=24, batch_size=4, device="cpu")
    folder = f"--out_dir={tmp_path / 'run'}"
    train.main(["--task=parity", *(f"--{key}={value}" for key, value in sizes.items()), "--max_iters=2",
                "--eval_interval=2", folder])
    train.main(["--resume", folder, "--max_iters=3"])
    assert checkpoint.read(tmp_path / "run/ckpt.pt")["step"] == 3
    said, = fails(["--resume", folder, "--max_iters=4", "--task_levels=2,4"])
    assert "cannot go on like this: task_levels=[2, 4] here is [" in said
    capsys.readouterr()
    train.main(["--eval_only", folder])
    assert "nats/answer" in capsys.readouterr().out


@pytest.mark.parametrize("keys", [dict(dtype="float16"), dict(constraint_names="a,b")], ids=lambda k: [*k][0])
def test_parameters_that_had_no_gradient_need_no_moments(keys, bytes_data, tmp_path, monkeypatch):
    """In float16 while every step so far has overflowed; scores of constraint heads that have no labels."""
    monkeypatch.setattr(train, "FIRST_SCALE", 2.0 ** 60)
    run = partial(command, bytes_data, tmp_path / "run", optimizer="adamw", **keys)
    train.main(run(max_iters=2))
    adamw, = checkpoint.read(tmp_path / "run/ckpt.pt")["optimizers"]
    count = sum(len(group["params"]) for group in adamw["param_groups"])
    assert len(adamw["state"]) == (0 if "dtype" in keys else count - 4)
    train.main([*run(max_iters=3), "--resume"])
    assert checkpoint.read(tmp_path / "run/ckpt.pt")["step"] == 3


def test_a_checkpoint_that_may_not_be_read_says_so(saved, unreadable):
    path = unreadable(saved.parent, "ckpt.pt") / "ckpt.pt"
    assert line(checkpoint.read, path) == f"{path} cannot be read as a checkpoint (Permission denied)"


@pytest.mark.parametrize("state", [4, -1])
def test_a_state_of_a_head_that_there_is_not_is_one_line(state):
    config = GPTConfig(**TINY, agency=True)
    weights = GPT(config).state_dict()
    weights["transformer.h.1.attn.agency.state"][1] = state
    said = line(checkpoint.build, dict(model=weights, config=config.flags(), meta=None), "x.pt")
    assert said.endswith(f"transformer.h.1.attn.agency.state=[0, {state}] must be from 0 to 3")


@pytest.mark.parametrize("meta, words", [
    *[(dict(vocab=value), f"vocab={value} must be") for value in (5, [1, 2])],
    *[(dict(vocab_size=value), f"vocab_size={value!r} must be") for value in (0, -3, "256", 256.0, True)],
    *[(dict(separator=value), f"separator={value!r} must be") for value in ("a", 9999, -1, 10.5)],
    (dict(splits=dict(val=dict(tokens=3, bytes=math.nan))), "splits.val.bytes=nan must be"),
    (dict(name=["a"]), "name=['a'] must be a text")])
def test_a_wrong_value_in_the_meta_of_a_checkpoint_is_one_line(tmp_path, meta, words):
    path = make_checkpoint(tmp_path / "a.pt")
    state = checkpoint.read(path)
    torch.save({**state, "meta": {**state["meta"], **meta}}, path)
    with pytest.raises(UserError) as e:
        checkpoint.read(path)
    said = str(e.value)
    assert said.startswith(f"{path} is damaged, or") and f": meta, its dataset's: {words}" in said
    assert len(said.splitlines()) == 1
