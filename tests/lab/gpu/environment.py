"""
The environment of the GPU check: torch's CUDA build, triton, and a CUDA runtime on which nothing runs.

    python -m tests.lab.gpu.environment .venv-gpu

Makes the folder where it is missing (5 GB), and builds two libraries in it where their source has changed.
Needs Linux, gcc and nm. An environment that is there already has to hold the CUDA build of the torch below.
Only Python's own modules are used: the environment does not exist yet.
"""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TORCH = "2.13.0"  # whose inner parts tests/lab/gpu/fake.py patches
PACKAGES = (f"torch==={TORCH}", "numpy", "tqdm")
ROOM = 5 << 30  # bytes, of torch, triton and the CUDA libraries
LIBRARIES = "fake_cuda"  # their folder inside the environment

# functions of the driver that triton asks before it compiles; the others return 0 and do nothing
DRIVER = {
    "cuInit": "int cuInit(unsigned flags) { return 0; }",
    "cuDeviceGetCount": "int cuDeviceGetCount(int *n) { *n = 1; return 0; }",
    "cuDeviceGet": "int cuDeviceGet(int *device, int i) { *device = 0; return 0; }",
    "cuDriverGetVersion": "int cuDriverGetVersion(int *version) { *version = 13000; return 0; }",
    "cuCtxGetCurrent": "int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }",
    "cuDevicePrimaryCtxGetState":
        "int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) "
        "{ *flags = 0; *active = 1; return 0; }",
}


class Unusable(Exception):
    """What is missing and what to do, in one line."""


def site_packages(venv):
    """The folder of an environment that packages lie in; None: there is no environment."""
    return next(iter(sorted(Path(venv).glob("lib/python3*/site-packages"))), None)


def torch_version(venv):
    """(version, CUDA version or None) of the torch in an environment; None: there is no torch."""
    site = site_packages(venv)
    path = site and site / "torch/version.py"
    if not path or not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    version, cuda = (re.search(rf"^{name}\b[^=]*= '([^']*)'", text, re.M)
                     for name in ("__version__", "cuda"))
    return version.group(1) if version else "unknown", cuda.group(1) if cuda else None


def check_machine(venv):
    """Raises Unusable where there is no compiler, no room for torch, or a torch that is not ours."""
    if not sys.platform.startswith("linux"):
        raise Unusable(f"the check needs Linux, where torch's CUDA build is; this is {sys.platform}")
    for tool in ("gcc", "nm"):
        if not shutil.which(tool):
            raise Unusable(f"no {tool}: triton and the stand-in for CUDA are built with it "
                           "(apt-get install gcc)")
    found = torch_version(venv)
    if found is None:
        place = next(p for p in (Path(venv).resolve(), *Path(venv).resolve().parents) if p.exists())
        left = shutil.disk_usage(place).free
        if left < ROOM:
            raise Unusable(f"no room for torch's CUDA build: {left / 2**30:.1f} GB are free in {place}, "
                           f"{ROOM / 2**30:.0f} GB are needed")
    elif found[0].split("+")[0] != TORCH:
        raise Unusable(f"torch {found[0]} in {venv}: tests/lab/gpu/fake.py knows the inner parts of {TORCH} "
                       "alone; another GPU_VENV, or adapt it")
    elif found[1] is None:
        raise Unusable(f"torch {found[0]} in {venv} is a CPU build, which cannot compile for CUDA: "
                       "another GPU_VENV")


def run(command, what):
    """Run a command; Unusable, with the last line of its output, where it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise Unusable(f"{what} failed: {lines[-1][:200]}")
    return done.stdout


def install(venv):
    """Make the environment where it is missing, and add the packages that it lacks."""
    site = site_packages(venv)
    if site is None:
        run([sys.executable, "-m", "venv", venv], f"making {venv}")
        site = site_packages(venv)
    missing = [p for p in PACKAGES if not (site / p.split("=")[0]).is_dir()]
    if missing:
        print(f"installing {', '.join(missing)} into {venv}", flush=True)
        run([Path(venv) / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
             *missing], f"installing {', '.join(missing)}")


def returning_zero(site, defined):
    """C code: a function that returns 0 for each CUDA runtime function that torch calls and we lack."""
    wanted = set()
    for name in ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so"):
        symbols = run(["nm", "-D", "--undefined-only", site / "torch/lib" / name], f"reading {name}")
        wanted |= set(re.findall(r" (cuda[A-Z]\w*)", symbols))
    lines = []
    for name in sorted(wanted - defined):
        says = name in ("cudaGetErrorString", "cudaGetErrorName")
        lines.append(f'const char *{name}(void) {{ return "stand-in"; }}' if says else
                     f"int {name}(void) {{ return 0; }}")
    return "\n".join(lines) + "\n"


def driver_code(header):
    """C code of a libcuda from NVIDIA's header: what DRIVER has, and functions that return 0."""
    names = {*re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", header),
             *re.findall(r"\b(cu[A-Z]\w+_v\d+)\b", header)}
    return "\n".join(DRIVER.get(name, f"int {name}(void) {{ return 0; }}")
                     for name in sorted(names | set(DRIVER))) + "\n"


def build(venv):
    """Build the runtime to preload and libcuda.so.1, unless they were built from the same sources."""
    site, folder = site_packages(venv), Path(venv, LIBRARIES)
    source = HERE / "fake_runtime.c"
    digest = hashlib.sha256(source.read_bytes() + Path(__file__).read_bytes()).hexdigest()
    built = folder / "built"
    if built.is_file() and built.read_text() == digest:
        return
    try:
        folder.mkdir(exist_ok=True)
        include = site / "triton/backends/nvidia/include"
        defined = set(re.findall(r"^cudaError_t (cuda\w+)\(", source.read_text(), re.M))
        (folder / "others.c").write_text(returning_zero(site, defined))
        (folder / "driver.c").write_text(driver_code((include / "cuda.h").read_text(errors="replace")))
    except OSError as e:
        raise Unusable(f"{e.filename}: {e.strerror}") from None
    flags = ["gcc", "-shared", "-fPIC", "-O1", "-w"]
    run([*flags, "-o", folder / "runtime.so", source, folder / "others.c", f"-I{include}"],
        "building the stand-in for CUDA's runtime")
    run([*flags, "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1", folder / "driver.c"],
        "building the stand-in for CUDA's driver")
    (folder / "libcuda.so").unlink(missing_ok=True)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")
    built.write_text(digest)


def variables(venv, card):
    """The environment variables of a process that compiles for a card: 90 for sm_90, and so on."""
    folder, caches = Path(venv, LIBRARIES).resolve(), Path(venv, "cache").resolve()
    return {"NANOHEADS_CARD": str(card), "LD_PRELOAD": str(folder / "runtime.so"),
            "LD_LIBRARY_PATH": str(folder), "TRITON_LIBCUDA_PATH": str(folder),
            "TRITON_CACHE_DIR": str(caches / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "OMP_NUM_THREADS": "1"}


def main(argv):
    try:
        check_machine(argv[0])
        install(argv[0])
        build(argv[0])
    except Unusable as e:
        sys.exit(f"gpu-check: {e}")


if __name__ == "__main__":
    main(sys.argv[1:])
