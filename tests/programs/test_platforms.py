"""Macs and Windows, where no test runs: what is decided for them, and programs without what they lack."""

import builtins
import io
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sample
import train
from model import GPT, MECHANISMS, GPTConfig
from nanoheads import attention, common, locks
from nanoheads.common import UserError, in_float64, output_written, write_atomic
from nanoheads.study import queue, trial
from nanoheads.training import optim, ranks
from nanoheads.training.config import TrainConfig
from nanoheads.training.ranks import Process
from conftest import ROOT


@pytest.fixture
def windows(monkeypatch):
    """This process without what Windows lacks; opening a folder as a file is refused, as it is there."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "resource", None)
    for name in ("SIGHUP", "SIGKILL", "SIGUSR1"):
        monkeypatch.delattr(signal, name)
    for name in ("sysconf", "posix_fadvise", "getloadavg", "sched_getaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    real = os.open

    def open_file(path, *args, **more):
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **more)
    monkeypatch.setattr(os, "open", open_file)


# ---- torch.compile, and what needs Triton ----

@pytest.mark.parametrize("platform, kind, flag, compiled", [
    ("linux", "cuda", None, True), ("linux", "cpu", None, False), ("linux", "cuda", False, False),
    ("darwin", "mps", None, False), ("darwin", "cpu", None, False), ("darwin", "mps", True, True),
    ("win32", "cuda", None, False), ("win32", "cpu", None, False), ("win32", "cuda", True, True),
])
def test_torch_compile_is_off_by_itself_on_macs_and_windows(platform, kind, flag, compiled, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    assert optim.compiles(TrainConfig(compile=flag), kind) is compiled


@pytest.mark.parametrize("platform, kind, no_triton, words", [
    ("darwin", "mps", False, "torch.compile is off on a Mac's GPU"),
    ("win32", "cuda", True, "torch.compile and FlexAttention's kernels are off"),
    ("win32", "cuda", False, "torch.compile is off on Windows; --compile=True"),
    ("win32", "cpu", True, None), ("linux", "cuda", False, None), ("linux", "cpu", False, None),
])
def test_a_line_says_so_where_nobody_has_set_the_flag(platform, kind, no_triton, words, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(optim, "NO_TRITON", no_triton)
    note = optim.note_on_compile(TrainConfig(), kind)
    assert note is None if words is None else note.startswith(words) and "\n" not in note
    for flag in (True, False):
        assert optim.note_on_compile(TrainConfig(compile=flag), kind) is None


def test_without_triton_compiling_for_a_gpu_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(optim, "NO_TRITON", True)
    with pytest.raises(UserError, match="compile=True compiles for a GPU with Triton, .* triton-windows"):
        optim.check_compile(TrainConfig(compile=True), "cuda")
    for flag, kind in ((None, "cuda"), (False, "cuda"), (True, "cpu")):
        optim.check_compile(TrainConfig(compile=flag), kind)


def test_flexattention_takes_cuda_and_triton(monkeypatch):
    assert [attention.has_flex_attention(torch.device(kind)) for kind in ("cuda", "mps", "cpu")] == [
        True, False, False]
    monkeypatch.setattr(attention, "NO_TRITON", True)
    assert not attention.has_flex_attention(torch.device("cuda"))


def test_a_refusal_comes_before_the_run_has_a_folder(args, fails, monkeypatch, tmp_path):
    monkeypatch.setattr(optim, "NO_TRITON", True)
    monkeypatch.setattr(train, "join_ranks", lambda device: Process("cuda"))
    line, = fails([*args(), "--compile=True"])
    assert line.startswith("compile=True compiles for a GPU with Triton") and not (tmp_path / "run").exists()


# ---- dtypes of a Mac's GPU ----

def on_fake_mps(monkeypatch, make):
    """Have torch.ones() of the device mps be make(size, dtype)."""
    real = torch.ones

    def ones(*size, device=None, dtype=None):
        return make(size, dtype) if str(device) == "mps" else real(*size, device=device, dtype=dtype)
    monkeypatch.setattr(torch, "ones", ones)
    return real


def test_bfloat16_is_refused_where_a_mac_has_none(monkeypatch):
    def refuse(size, dtype):
        raise TypeError("BFloat16 is not supported on MPS")
    on_fake_mps(monkeypatch, refuse)
    with pytest.raises(UserError, match=r"dtype=bfloat16 .* \(BFloat16 is not supported on MPS\)"):
        optim.check_precision("bfloat16", "mps")
    optim.check_precision("float32", "mps")
    optim.check_precision("bfloat16", "cpu")


def test_a_dtype_that_works_on_a_mac_is_taken(monkeypatch):
    real = on_fake_mps(monkeypatch, lambda size, dtype: real(*size, dtype=dtype))
    optim.check_precision("bfloat16", "mps")


@pytest.mark.parametrize("gives_back", [True, False])
def test_float16_is_refused_where_its_scaler_loses_gradients(gives_back, monkeypatch):
    real = on_fake_mps(monkeypatch, lambda size, dtype: real(*size, dtype=dtype))
    assert optim.scaler_gives_back("cpu")
    monkeypatch.setattr(optim, "scaler_gives_back", lambda device: gives_back)
    if gives_back:
        return optim.check_precision("float16", "mps")
    with pytest.raises(UserError, match=r"dtype=float16 .* \(its numbers are wrong\)"):
        optim.check_precision("float16", "mps")


class NoFloat64(TorchDispatchMode):
    """Refuses every float64 tensor, as a Mac's GPU does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(isinstance(t, torch.Tensor) and t.dtype == torch.float64 for t in tree_leaves(out)):
            raise TypeError(f"{func} makes a float64 tensor")
        return out


@pytest.mark.parametrize("name", ["plain", *MECHANISMS])
def test_a_training_step_and_traces_need_no_float64(name):
    model = GPT(GPTConfig(block_size=16, vocab_size=32, n_layer=2, n_head=4, n_embd=32,
                          **MECHANISMS.get(name, {})))
    run = train.ready_to_step(model, TrainConfig(batch_size=2).for_recipe(model.config.recipe))
    ids = torch.randint(32, (2, 16))
    with NoFloat64():
        train.training_step(run, ids, ids)
        model.eval()(ids, ids, traces=True)


def test_float64_is_made_on_the_cpu_where_a_mac_has_none():
    moved = SimpleNamespace(double=lambda: "on the CPU")
    mac = SimpleNamespace(device=torch.device("mps"), cpu=lambda: moved)
    assert in_float64(mac) == "on the CPU"
    assert in_float64(torch.ones(2)).dtype == torch.float64


def test_nothing_but_the_cpu_is_asked_for_float64():
    """In what measures heads, each .double() is of a tensor that was brought to the CPU, or never left it."""
    on_the_cpu = {"gates.py": "nn.Sequential", "promises.py": "GPT(", "adjudicate.py": "labels_of("}
    for path in [*ROOT.glob("nanoheads/heads/*.py"), *ROOT.glob("nanoheads/probes/**/*.py")]:
        for line in path.read_text(encoding="utf-8").splitlines():
            if ".double()" in line and not re.search(r"\.cpu\(\)\.double\(\)", line):
                assert on_the_cpu.get(path.name, "nothing") in line, f"{path}: {line.strip()}"


# ---- several processes ----

@pytest.mark.parametrize("device, here, words", [
    ("mps", {}, "device=mps under torchrun would put every process on the Mac's one GPU"),
    ("cuda", dict(nccl=False), "device=cuda under torchrun needs NCCL"),
    ("cuda", dict(gpus=1), "torchrun started more processes than there are GPUs (1)"),
    ("cuda:1", {}, "device=cuda:1 under torchrun"),
    ("cpu", dict(distributed=False), "torchrun needs torch.distributed"),
    ("cpu", dict(nccl=False), None), ("cuda", {}, None),
])
def test_ranks_that_cannot_work_together_are_refused_by_name(device, here, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here.get("gpus", 2))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: here.get("nccl", True))
    monkeypatch.setattr(dist, "is_available", lambda: here.get("distributed", True))
    problem = ranks.problem_of_ranks(device, 1)
    assert problem is None if words is None else problem.startswith(words) and "\n" not in problem
    if words:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setattr(ranks, "pick_device", lambda name: name)
        with pytest.raises(UserError, match=re.escape(words)):
            ranks.join_ranks(device)


# ---- what Windows lacks ----

def test_a_run_and_a_sample_without_what_windows_lacks(args, rows, windows, tmp_path, capsys):
    train.main(args())
    train.main([*args(max_iters=8), "--resume"])
    assert rows(tmp_path / "run")[1][-1]["step"] == 8
    sample.main(["--ckpt", str(tmp_path / "run"), "--max_new_tokens=3", f"--json={tmp_path / 'texts.json'}"])
    assert (tmp_path / "texts.json").is_file()


def test_a_file_is_whole_where_no_folder_can_be_opened(windows, tmp_path):
    write_atomic(tmp_path / "a", lambda f: f.write(b"whole"))
    assert (tmp_path / "a").read_bytes() == b"whole" and os.listdir(tmp_path) == ["a"]


def test_an_empty_folders_lock_is_closed_before_it_is_removed(windows, tmp_path, monkeypatch):
    opened, real = [], Path.unlink

    def unlink(path, *args, **more):
        assert all(file.closed for file in opened), "Windows removes no open file"
        real(path, *args, **more)

    def open_file(*args, **more):
        opened.append(builtins.open(*args, **more))
        return opened[-1]
    monkeypatch.setattr(Path, "unlink", unlink)
    monkeypatch.setattr(locks, "open", open_file, raising=False)
    monkeypatch.setattr(locks, "same_file", lambda *args: False)  # numbers of files may not agree there
    with locks.only_writer(tmp_path / "new"):
        pass
    assert opened and not (tmp_path / "new").exists()


def test_a_trial_is_asked_to_save_by_its_closed_pipe(windows, monkeypatch):
    processes = queue.Processes.__new__(queue.Processes)
    processes.lock, processes.stopped = queue.Lock(), False
    done = []
    job = SimpleNamespace(stdin=SimpleNamespace(close=lambda: done.append("closed")),
                          wait=lambda seconds: done.append("waited"))
    processes.jobs = [job]
    processes.stop()
    assert done == ["closed", "waited"]


def test_a_closed_pipe_raises_the_signal_in_this_process(windows, monkeypatch):
    raised = []
    monkeypatch.setattr(os, "read", lambda *args: b"")
    monkeypatch.setattr(os, "kill", lambda *args: pytest.fail("ends it unsaved on Windows"))
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    trial.stop_with_parent()
    assert raised == [signal.SIGTERM]


def test_what_a_code_page_lacks_becomes_a_question_mark(windows, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="cp1252"))
    with output_written("train"):
        print("2 ≥ 1 ± 0")
    assert raw.getvalue().split() == [b"2", b"?", b"1", b"\xb1", b"0"]


def test_memory_is_unlimited_where_the_system_does_not_say(windows):
    assert common.memory_of_machine() == 2**50
