"""Checkpoints: written whole or not at all, read by strict names and shapes or refused in a line."""

import copy
import itertools
import math
import os
import pickle
import resource
import shutil
import signal
import time
import zipfile
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import evaluate
import sample
import train
from helpers import EDITS, TEXTS, TINY, as_arguments, damaged
from model import GPT, GPTConfig
from nanoheads import checkpoint
from nanoheads.common import UserError, explain
from nanoheads.dataset import Dataset

SIZES = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=256)


def line(action, *args, **kw):
    with pytest.raises(UserError) as e:
        action(*args, **kw)
    assert len(str(e.value).splitlines()) == 1
    return str(e.value)


def equal(a, b):
    """Whether two states, dicts and lists with tensors in them, are the same."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


def command(data, folder, **keys):
    keys = {"dataset": data, **TINY, "optimizer": "muon", "out_dir": folder, **keys}
    return as_arguments(keys)


@pytest.fixture(scope="module")
def finished(bytes_data, tmp_path_factory):
    """(folder, what its ckpt.pt holds) of a run of 6 steps with Muon, whose last evaluation was the best."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train.main(command(bytes_data, folder))
    return folder, checkpoint.read(folder / "ckpt.pt")


@pytest.fixture
def state(bytes_data):
    """What every checkpoint has, and its step."""
    config = GPTConfig(**SIZES)
    return dict(model=GPT(config).state_dict(), config=asdict(config), meta=Dataset(bytes_data).meta, step=3)


@pytest.fixture
def saved(state, tmp_path):
    checkpoint.save(tmp_path / "ckpt.pt", state)
    return tmp_path / "ckpt.pt"


# ---- written whole, or not at all ----

def test_a_checkpoint_comes_back_as_it_was_with_its_version(state, saved):
    assert equal(checkpoint.read(saved), {**state, "version": 1})
    assert os.listdir(saved.parent) == ["ckpt.pt"]


def test_what_going_on_needs_is_in_ckpt_alone(finished):
    best = checkpoint.read(finished[0] / "best.pt").keys()
    assert best == {"version", "model", "config", "meta", "dataset", "train", *checkpoint.PROGRESS}
    assert finished[1].keys() == best | {"optimizers", "scaler"}


def test_a_full_disk_is_one_line_and_leaves_the_checkpoint_as_it_was(state, saved):
    before, limits = saved.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        said = line(checkpoint.save, saved, {**state, "step": 4})
        said_first = line(checkpoint.save, saved.with_name("first.pt"), state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said == f"could not write {saved} (File too large); the previous one is intact"
    assert said_first.endswith("there is no previous one")
    assert saved.read_bytes() == before and os.listdir(saved.parent) == ["ckpt.pt"]


@pytest.mark.slow
def test_a_killed_writer_leaves_the_old_checkpoint_or_the_new_one(state, saved):
    """Killed at several instants, while it saves one after the other."""
    for wait in (0.001, 0.002, 0.004, 0.008, 0.016, 0.032):
        child = os.fork()
        while child == 0:  # until it is killed
            checkpoint.save(saved, state)
        time.sleep(wait)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert equal(checkpoint.read(saved)["model"], state["model"])
    checkpoint.save(saved, state)  # what was left behind is in nobody's way
    assert os.listdir(saved.parent) == ["ckpt.pt"]


# ---- read, or refused in a line ----

def test_a_run_folder_means_its_best_checkpoint(state, saved):
    assert checkpoint.read(saved.parent)["step"] == 3
    checkpoint.save(saved.with_name("best.pt"), {**state, "step": 2})
    assert checkpoint.read(saved.parent)["step"] == 2


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


FOREIGN = {
    "nothing there": lambda path, state: path.unlink(),
    "empty": lambda path, state: path.write_bytes(b""),
    "a text": lambda path, state: path.write_text("not a checkpoint\n" * 100),
    "a folder": lambda path, state: (path.unlink(), path.mkdir()),
    "a zip file": lambda path, state: zipfile.ZipFile(path, "w").close(),
    "a pickle": lambda path, state: path.write_bytes(pickle.dumps(dict(model=Attack()))),
    "a pickle in a torch file": lambda path, state: torch.save({**state, "meta": Attack()}, path),
    "a list": lambda path, state: torch.save([1], path),
    "weights alone": lambda path, state: torch.save(state["model"], path),
    "no vocabulary": lambda path, state: torch.save({**state, "meta": dict(name="sums")}, path)}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_what_is_no_checkpoint_is_refused_in_a_line_and_runs_nothing(make, state, saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    make(saved, state)
    assert str(saved) in line(checkpoint.read, saved)
    assert not Path("attacked").exists()


def test_an_object_in_a_checkpoint_is_named_by_its_class(state, saved):
    for more, name, zipped in ((dict(best_val_loss=np.float64(2.0)), "multiarray.scalar", True),
                               (dict(args=Namespace(a=1)), "argparse.Namespace", False)):
        torch.save({**state, **more}, saved, _use_new_zipfile_serialization=zipped)
        said = line(checkpoint.read, saved)
        assert said.startswith(f"{saved} holds an object of ") and f"{name}, " in said
        assert "save plain values" in said


def test_a_newer_version_is_said_as_such(state, saved):
    torch.save({**state, "version": 2}, saved)
    said = line(checkpoint.read, saved)
    assert said.startswith(f"{saved} is of version 2") and said.endswith("update the program")


def test_an_older_version_is_refused_in_a_line_that_names_the_commit(state):
    state["config"]["routing_capacity"] = 0.0
    said = line(checkpoint.build, state, "old.pt")
    assert said.startswith("old.pt is of an older version of this program; commit 7a2abeb")


def test_a_checkpoint_that_may_not_be_read_says_so(saved, unreadable):
    path = unreadable(saved.parent, "ckpt.pt") / "ckpt.pt"
    with pytest.raises(OSError) as e:
        checkpoint.read(path)
    assert explain(e.value) == f"{path}: Permission denied"


@settings(max_examples=40)
@given(EDITS)
def test_a_damaged_file_is_a_model_of_the_same_names_or_a_line(finished, tmp_path, edits):
    """Cut, with bits flipped or with bytes inserted, anywhere in the file."""
    path = tmp_path / "ckpt.pt"
    path.write_bytes(damaged((finished[0] / "ckpt.pt").read_bytes(), edits))
    try:
        model = checkpoint.build(checkpoint.read(path), path)
    except UserError as e:
        assert str(path) in str(e)
    else:
        assert model.state_dict().keys() == finished[1]["model"].keys()
        assert all(p.isfinite().all() for p in model.parameters())


@settings(max_examples=15)
@given(st.floats(0, 1, exclude_max=True))
def test_a_file_cut_short_anywhere_is_refused(finished, tmp_path, share):
    content = (finished[0] / "ckpt.pt").read_bytes()
    (tmp_path / "ckpt.pt").write_bytes(content[:int(share * len(content))])
    assert str(tmp_path / "ckpt.pt") in line(checkpoint.read, tmp_path / "ckpt.pt")


# ---- the model that it becomes ----

def renamed(weights, old, new):
    weights[new] = weights.pop(old)


WTE, NORM = "transformer.wte.weight", "transformer.ln_f.weight"
MISFITS = {  # what a line must name, and what was done to the file
    NORM: lambda s: s["model"].pop(NORM),
    "transformer.ln_g.weight": lambda s: renamed(s["model"], NORM, "transformer.ln_g.weight"),
    WTE: lambda s: s["model"].update({WTE: s["model"][WTE][:9], "lm_head.weight": s["model"][WTE][:9]}),
    f"{NORM} holds NaN": lambda s: s["model"][NORM].fill_(math.nan),
    "n_layer='1' is not int": lambda s: s["config"].update(n_layer="1"),
    "n_embd": lambda s: s["config"].update(n_embd=15),
    "flux": lambda s: s["config"].update(flux=3),
    "own_mechanism must be a list of files": lambda s: s.update(own_mechanism=[dict(file=3, digest="0")]),
    "its meta does not say what its tokens mean": lambda s: s["meta"].update(vocab_size="256"),
    "its step must be of type int, and is of str": lambda s: s.update(step="6"),
    "its last_eval must have a step": lambda s: s.update(last_eval=dict(val_loss=2.0)),
    "a scale above 0": lambda s: s.update(scaler=dict(scale=math.nan, _growth_tracker=0))}
ON_CPU = "--device=cpu", "--ckpt"
PROGRAMS = dict(sample=lambda run, data: sample.main(["--max_new_tokens=9", *ON_CPU, str(run)]),
                evaluate=lambda run, data: evaluate.main([*ON_CPU, str(run)]),
                train=lambda run, data: train.main([*command(data, run, max_iters=7), "--resume"]))


@pytest.fixture
def changed(finished, tmp_path):
    """changed(change) -> a copy of the run, in whose ckpt.pt, best.pt is gone, change(state) was made."""
    def make(change):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        folder, state = shutil.copytree(finished[0], tmp_path / "run"), copy.deepcopy(finished[1])
        change(state)
        torch.save(state, folder / "ckpt.pt")
        (folder / "best.pt").unlink()
        return folder
    return make


@pytest.mark.parametrize("words, program", [*zip(MISFITS, itertools.cycle(PROGRAMS))])
def test_what_does_not_fit_is_named_in_a_line(words, program, changed, bytes_data):
    folder = changed(MISFITS[words])
    before = (folder / "log.jsonl").read_bytes()
    with pytest.raises(SystemExit) as e:
        PROGRAMS[program](folder, bytes_data)
    assert len(str(e.value.code).splitlines()) == 1 and words in e.value.code
    assert e.value.code.startswith(f"{program}: {folder}")
    assert (folder / "log.jsonl").read_bytes() == before


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-3, 40), st.floats(), TEXTS,
                   st.just(torch.zeros(3)), st.lists(st.integers(0, 3), max_size=2),
                   st.dictionaries(TEXTS, st.integers(0, 3), max_size=2))


@pytest.mark.slow
@settings(max_examples=20)
@given(st.data())
def test_whatever_value_stands_in_a_checkpoint_a_program_runs_or_ends_in_a_line(changed, bytes_data, data):
    """In the place of any entry, of its config, its training, what is known of its text, or its moments."""
    program = data.draw(st.sampled_from([*PROGRAMS]))

    def change(state):
        where = state
        for _ in range(data.draw(st.integers(0, 4))):
            inner = [each for each in (where.values() if isinstance(where, dict) else where)
                     if isinstance(each, (dict, list)) and each]
            where = data.draw(st.sampled_from(inner)) if inner else where
        key = data.draw(st.sampled_from([*where] if isinstance(where, dict) else range(len(where))))
        where[key] = data.draw(VALUES)
    folder = changed(change)
    try:
        PROGRAMS[program](folder, bytes_data)
    except SystemExit as e:
        assert len(str(e.code).splitlines()) == 1 and e.code.startswith(f"{program}: ")


def moments(state, optimizer):
    """The first parameter's, of Muon (0) or AdamW (1)."""
    return state["optimizers"][optimizer]["state"][0]


def put(state, optimizer, key, change):
    of_it = moments(state, optimizer)
    of_it[key] = change(of_it[key])


NO_START = {
    "no state to go on from": lambda s: s.pop("optimizers"),
    "1 optimizers": lambda s: s["optimizers"].pop(),
    "[256, 16]": lambda s: put(s, 1, "exp_avg", lambda t: t.T.clone()),
    "momentum": lambda s: put(s, 0, "momentum", lambda t: t[:9].clone()),
    "batch_size='four'": lambda s: s["train"].update(batch_size="four"),
    "NaN": lambda s: put(s, 0, "momentum", lambda t: t * math.nan)}


@pytest.mark.parametrize("words, change", NO_START.items(), ids=NO_START)
def test_a_run_goes_on_only_with_moments_of_its_parameters(words, change, changed, fails, bytes_data):
    folder = changed(change)
    said, = fails([*command(bytes_data, folder, max_iters=9), "--resume"])
    assert said.startswith(f"{folder}/ckpt.pt") and words in said


def test_flags_younger_than_a_checkpoint_are_off(state):
    """A flag that a recipe gained later must not change what an older checkpoint computes."""
    config = asdict(GPTConfig(**SIZES, recipe="modern", embed_norm=False))
    model = GPT(GPTConfig(**config))
    del config["embed_norm"], config["softcap"]
    old = checkpoint.build(dict(model=model.state_dict(), config=config, meta=None), "old.pt")
    assert old.config.embed_norm is False and old.config.softcap == GPTConfig().softcap


def test_a_flag_that_left_is_read_where_it_changed_nothing(tmp_path, state):
    for value in ("head", "mlp"):
        config = {**state["config"], "agency_scope": value}
        checkpoint.save(tmp_path / f"{value}.pt", {**state, "config": config})
    read = checkpoint.read(tmp_path / "head.pt")
    assert equal(dict(checkpoint.build(read, "head.pt").state_dict()), dict(state["model"]))
    assert "agency_scope" in line(checkpoint.build, checkpoint.read(tmp_path / "mlp.pt"), "mlp.pt")


def test_a_vocabulary_that_means_something_else_is_one_line(state, chars_data, bytes_data):
    checkpoint.check_vocabulary(state, Dataset(bytes_data), "x.pt")
    said = line(checkpoint.check_vocabulary, state, Dataset(chars_data), "x.pt")
    assert all(name in said for name in ("x.pt", "sums (byte, 256", "letters (char, 10"))
    state["meta"] = None  # nanoGPT's: only the size can be compared
    checkpoint.check_vocabulary(state, Dataset(chars_data), "x.pt")
    state["config"]["vocab_size"] = 9
    said = line(checkpoint.check_vocabulary, state, Dataset(chars_data), "x.pt")
    assert all(name in said for name in ("x.pt", "9", "letters", "10"))


def test_a_state_of_a_head_that_there_is_not_is_one_line():
    config = GPTConfig(**SIZES, agency=True)
    weights = GPT(config).state_dict()
    for state in (4, -1):
        weights["transformer.h.1.attn.agency.state"][1] = state
        said = line(checkpoint.build, dict(model=weights, config=config.flags(), meta=None), "x.pt")
        assert said.endswith(f"agency.state=[0, {state}] must be from 0 to 3")


# ---- nanoGPT's ----

def nanogpts(bias, tied):
    """{name: tensor} of a model of nanoGPT's, drawn at random."""
    draw, C = torch.Generator().manual_seed(0), SIZES["n_embd"]
    shapes = {"transformer.wte.weight": (256, C), "transformer.wpe.weight": (16, C)}
    for i in range(SIZES["n_layer"]):
        h = f"transformer.h.{i}."
        shapes |= {f"{h}ln_1.weight": (C,), f"{h}attn.c_attn.weight": (3 * C, C),
                   f"{h}attn.c_proj.weight": (C, C), f"{h}ln_2.weight": (C,),
                   f"{h}mlp.c_fc.weight": (4 * C, C), f"{h}mlp.c_proj.weight": (C, 4 * C)}
    shapes["transformer.ln_f.weight"] = (C,)
    if bias:
        shapes |= {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in shapes.items()
                   if ".h." in name or "ln_f" in name}
    weights = {name: torch.randn(shape, generator=draw) / 4 for name, shape in shapes.items()}
    weights["lm_head.weight"] = weights[WTE] if tied else torch.randn(256, C, generator=draw) / 4
    return weights


def logits(w, ids, gelu):
    """Those of nanoGPT's model with these weights, written out; ids [T]."""
    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w.get(f"{name}.bias"))

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    T, nh = len(ids), SIZES["n_head"]
    x = w[WTE][ids] + w["transformer.wpe.weight"][:T]
    for i in range(SIZES["n_layer"]):
        h = f"transformer.h.{i}"
        q, k, v = (t.view(T, nh, -1).transpose(0, 1)
                   for t in linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").chunk(3, -1))
        scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        x = x + linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"{h}.attn.c_proj")
        hidden = F.gelu(linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc"), approximate=gelu)
        x = x + linear(hidden, f"{h}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ w["lm_head.weight"].T


@pytest.mark.slow
@pytest.mark.parametrize("bias, flag, tied, prefix", [
    (True, True, True, ""), (False, True, True, "_orig_mod."), (True, False, True, ""),
    (False, False, False, ""), (True, True, False, "module._orig_mod.")],
    ids=["bias", "compiled", "of January 2023", "of 13 January 2023", "two matrices on several ranks"])
def test_nanogpts_checkpoints_give_nanogpts_logits(tmp_path, bias, flag, tied, prefix):
    """Of January 2023: no `bias` in model_args, the tanh form of GELU, and two matrices until the 14th."""
    weights = nanogpts(bias, tied)
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril() for i in range(2)}
    torch.save(dict(model={prefix + name: t for name, t in {**weights, **masks}.items()}, optimizer={},
                    model_args=dict(SIZES, dropout=0.2, **(dict(bias=bias) if flag else {})), iter_num=70,
                    best_val_loss=torch.tensor(1.5), config=dict(dataset="sums", learning_rate=1e-3)),
               tmp_path / "ckpt.pt")
    state = checkpoint.read(tmp_path / "ckpt.pt")
    assert (state["step"], state["dataset"], state["meta"]) == (70, "sums", None)
    model, ids = checkpoint.build(state, "ckpt.pt"), torch.arange(16) * 7
    torch.testing.assert_close(model(ids[None]).logits[0], logits(weights, ids, "none" if flag else "tanh"),
                               atol=1e-4, rtol=1e-4)
    assert model.config.tied == tied


def test_a_checkpoint_of_a_fork_is_refused_by_what_nanogpt_does_not_have(tmp_path):
    """Read without reluify=True, its logits would be off, and nothing would say so."""
    torch.save(dict(model=nanogpts(bias=False, tied=True), model_args=dict(SIZES, bias=False, reluify=True)),
               tmp_path / "ckpt.pt")
    said = line(checkpoint.read, tmp_path / "ckpt.pt")
    assert said.startswith(f"{tmp_path}/ckpt.pt is of a fork") and "reluify=True" in said
