"""What is decided by name for devices, Macs, Windows and other processors, on which no test runs."""

import ctypes
import platform
import re
import resource
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import train
from nanoheads import attention, cpu, optim, ranks, start
from nanoheads.common import UserError, explain, pick_device
from nanoheads.config import TrainConfig
from nanoheads.ranks import Process

# ---- devices ----


def test_a_device_is_detected_or_refused_in_a_line():
    there = [name for name, kind in (("cuda", torch.cuda), ("mps", torch.backends.mps))
             if kind.is_available()]
    assert pick_device("auto") == [*there, "cpu"][0] and pick_device("cpu") == "cpu"
    for name in ("cpu:x", "gpu", "cuda:99"):
        with pytest.raises(UserError, match=f"^device={name} cannot be used: .+$"):
            pick_device(name)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library decides this by itself")
def test_on_a_cpu_freed_memory_stays_for_the_next_step():
    """Given back and taken again each of its pages is a page fault: a tenth of the time of a small run."""
    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            [torch.ones(1 << 20) for _ in range(3)]
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    for threshold in (-1, -3):  # for trimming and for mmap, as a process begins
        ctypes.CDLL(None).mallopt(threshold, 1 << 17)
    before = faults()
    pick_device("cpu")
    faults()  # the first step takes what the next ones have
    assert faults() < before / 4


def test_a_kernel_without_room_is_not_told_to_run_uncompiled():
    """FlexAttention is compiled with --compile=False too."""
    said = explain(RuntimeError("out of resource: shared memory, Required: 246784, Hardware limit: 232448."))
    assert "246784" in said and "smaller heads" in said and "--compile" not in said


# ---- torch.compile, and what needs Triton ----

@pytest.mark.parametrize("platform, kind, no_triton, compiled, words", [
    ("linux", "cuda", False, True, None), ("linux", "cpu", False, False, None),
    ("darwin", "mps", False, False, "torch.compile is off on a Mac's GPU"),
    ("win32", "cuda", True, False, "torch.compile and FlexAttention's kernels are off"),
    ("win32", "cuda", False, False, "torch.compile is off on Windows; --compile=True")])
def test_torch_compile_is_off_by_itself_on_macs_and_windows_and_a_line_says_so(
        platform, kind, no_triton, compiled, words, monkeypatch):
    """Unless the flag is set."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(optim, "NO_TRITON", no_triton)
    assert optim.compiles(TrainConfig(), kind) is compiled
    note = optim.note_on_compile(TrainConfig(), kind)
    assert note is None if words is None else note.startswith(words) and "\n" not in note
    for flag in (True, False):
        assert optim.compiles(TrainConfig(compile=flag), kind) is flag
        assert optim.note_on_compile(TrainConfig(compile=flag), kind) is None


def test_without_triton_compiling_for_a_gpu_is_refused_before_the_run_has_a_folder(
        args, fails, monkeypatch, tmp_path):
    kinds = [torch.device(kind) for kind in ("cuda", "mps", "cpu")]
    assert [attention.has_flex_attention(kind) for kind in kinds] == [True, False, False]
    monkeypatch.setattr(optim, "NO_TRITON", True)
    monkeypatch.setattr(attention, "NO_TRITON", True)
    assert not attention.has_flex_attention(torch.device("cuda"))
    for flag, kind in ((None, "cuda"), (False, "cuda"), (True, "cpu")):
        optim.check_compile(TrainConfig(compile=flag), kind)
    monkeypatch.setattr(start, "join_ranks", lambda device: Process("cuda"))
    line, = fails(args(compile=True))
    assert re.match("compile=True compiles for a GPU with Triton, .* triton-windows", line)
    assert not (tmp_path / "run").exists()


# ---- processors ----

# the first processor of /proc/cpuinfo, shortened; more flags, and all fields between, stand there
CPUINFO = {
    "Intel with AMX": "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n"
                      "model name\t: Intel(R) Xeon(R) Platinum 8481C\n"
                      "flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile\npower management:\n",
    "Intel without": "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 85\n"
                     "model name\t: Intel(R) Xeon(R) CPU @ 2.00GHz\nflags\t\t: fpu avx2 avx512f\n",
    "AMD Zen 4": "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\n"
                 "model name\t: AMD EPYC 9R14\nflags\t\t: fpu avx2 avx512f avx512_bf16\n",
    "ARM": "processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: fp asimd bf16\nCPU implementer\t: 0x41\n",
}
SECOND = "\nprocessor\t: 1\nvendor_id\t: another\nflags\t\t: amx_bf16\n"


@pytest.fixture
def on(monkeypatch, tmp_path):
    """on(name of CPUINFO, or None: there is no such file) makes this machine such a one, with AVX-512."""
    def there(name):
        path = tmp_path / "cpuinfo"
        if name:
            path.write_text(CPUINFO[name] + SECOND)
        monkeypatch.setattr("builtins.open", lambda file, *args, _open=open, **kw: _open(
            path if file == "/proc/cpuinfo" else file, *args, **kw))
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    return there


@pytest.mark.parametrize("name, onednn, instructions", [
    ("Intel with AMX", False, "amx_bf16"), ("Intel without", False, None),
    ("AMD Zen 4", True, "avx512_bf16"), ("ARM", True, None)])
def test_the_library_and_bfloat16_go_by_the_processor(name, onednn, instructions, on):
    on(name)
    assert cpu.prefers_onednn() is onednn
    assert cpu.bfloat16_instructions() == instructions


@pytest.mark.parametrize("vendor, onednn", [
    ("Intel64 Family 6 Model 143 Stepping 8, GenuineIntel", False),
    ("AMD64 Family 25 Model 17 Stepping 1, AuthenticAMD", True)])
def test_without_cpuinfo_the_system_names_the_processor(vendor, onednn, on, monkeypatch):
    on(None)
    monkeypatch.setattr(platform, "processor", lambda: vendor)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": False, "avx512_bf16": True})
    assert cpu.cpuinfo() == {} and cpu.prefers_onednn() is onednn
    assert cpu.bfloat16_instructions() == "avx512_bf16"


def test_onednn_takes_avx512_or_a_pytorch_without_mkl(on, monkeypatch):
    on("Intel with AMX")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert cpu.prefers_onednn()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not cpu.prefers_onednn()


SMALL, LARGE = (SimpleNamespace(num_params=lambda n=n: n, flops_per_token=lambda n=n: 6 * n)
                for n in (800_000, 10_000_000))
LONG = 10_000_000  # tokens: 5e13 operations of the small model, 6e14 of the large


@pytest.mark.parametrize("name, model, tokens, keys, words", [
    ("Intel with AMX", LARGE, LONG, {},
     "this CPU has amx_bf16: .* took about half the time with --dtype=bfloat16 --compile=True; "),
    ("Intel with AMX", LARGE, LONG, dict(dtype="float32"), None),
    ("Intel with AMX", SMALL, LONG, {}, None),
    ("AMD Zen 4", LARGE, LONG, {}, "this CPU has avx512_bf16: .* took 0.7 to 0.9 of the time with "),
    ("AMD Zen 4", SMALL, LONG, {}, None)])
def test_a_long_run_on_a_cpu_with_bfloat16_says_so(name, model, tokens, keys, words, on):
    on(name)
    note = optim.note_on_bfloat16(TrainConfig(**keys), "cpu", model, tokens)
    assert note is None if words is None else re.match(words, note) and "\n" not in note
    assert optim.note_on_bfloat16(TrainConfig(**keys), "cuda", model, tokens) is None
    assert optim.precision(TrainConfig(**keys).dtype, "cpu")[0] == "float32", "whatever the processor"


def test_the_line_is_among_a_runs_first_ones(args, on, monkeypatch, capsys):
    on("Intel with AMX")
    train.main(args("short", max_iters=1))
    assert "amx_bf16" not in capsys.readouterr().out
    monkeypatch.setattr(optim, "LONG_RUN", 0)
    monkeypatch.setattr(optim, "LARGE_MODEL", 0)
    train.main(args(max_iters=1))
    assert capsys.readouterr().out.partition("step  ")[0].count("this CPU has amx_bf16") == 1


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
