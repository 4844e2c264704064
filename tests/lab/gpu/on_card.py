"""
Checks numbers and speed on a CUDA GPU in eight minutes: `./gpu_check.sh`, which is the same as
`python -m tests.lab.gpu.on_card`.

    ./gpu_check.sh --nanogpt ../nanoGPT       # agree, plain16, plain32, mechanisms, in this order
    ./gpu_check.sh decode long                # these parts, as long as they need
    ./gpu_check.sh --small --device cpu       # at a small size, to try the script itself

Each part has its own time, and one that fails or takes too long stops no other:
    agree       150 s  does every kernel compute what the CPU does in float64: float32, TF32, bfloat16, eager.
                       Meanwhile the later parts are compiled once, so that they find it done
    plain16      90 s  the plain GPT of both recipes at 124M, bfloat16, compiled, batch 16, beside nanoGPT in
                       the same run: tokens/s, share of the card's peak (MFU), memory
    plain32      90 s  the same with batch 32
    mechanisms  130 s  the step of ten mechanisms beside the plain GPT's, four layers of that width
More, when there is more time:
    decode      240 s  tokens/s of cached decoding at 124M, 1,023 tokens behind the first
    study       400 s  does compare.py run as it should: two mechanisms, two seeds, four runs at once
    compiled    480 s  does every mechanism agree with float64 when it is compiled
    every       480 s  the step of every mechanism, twelve layers
    test        480 s  the test suite on a machine with CUDA
    train       400 s  both recipes on the same bytes, scored on the whole test split, with curves
    long        480 s  context 16,384: peak memory, routing; the step and decoding with pruned heads

All figures go to gpu-check.json in --out as they are made, so that a run that is killed loses none. log.txt
there has all that is printed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Callable, NamedTuple

from nanoheads import threads  # noqa: F401  before torch, whose threads it has wait briefly

import torch

from nanoheads.common import ROOT, UserError, as_program, pick_device, say, table, writable_folder, write_json
from nanoheads.timing import time_table
from lab.bench import nanogpt

MINUTES = 8
GRACE = 10  # seconds from being asked to stop to being killed
ANCHORS = ("elsewhere, at 124M: modded-nanogpt's plain track has 446,000 tokens/s and 39 % MFU on an H100, "
           "llm.c 231,000 tokens/s on an A100")
MECHANISMS = "acag,sink,fox,routing_moh,output_gate,short_conv,window,diff,constraint_a,unet_concat"
LONG = "routing_moh,a2c_key_bias,constraint_a,acag_detach,acag,window,output_gate_elementwise,sink,all_on"


class Part(NamedTuple):
    """seconds: the time it has. commands(args, out): lists of command lines; those of a list run at once, and
    the first of them counts. out(name): where it writes its figures.
    """
    seconds: int
    commands: Callable


def python(*argv):
    return [sys.executable, "-u", *map(str, argv)]


# ---- the parts ----

def agree(args, file, *which):
    return python("-m", "tests.lab.gpu.agree", *which, "--recipes", "modern", "--device", args.device,
                  "--jobs", args.jobs, "--out", file)


def size(args, layers=12):
    if args.small:
        return ["--n_layer", 1, "--n_head", 2, "--n_embd", 32, "--block_size", 16]
    return ["--n_layer", layers, "--n_head", 12, "--n_embd", 768, "--block_size", 1024]


def rounds(args, usual, warms):
    """Arguments: how often a step is measured; warms: not at all, it is only compiled."""
    return ["--rounds", 1, "--steps", 1] if args.small or warms else ["--rounds", usual, "--steps", 10]


def plain(args, batch, file=None):
    beside = ["--nanogpt", args.nanogpt] if args.nanogpt else []
    return bench(args, *beside, "--what", "train", *size(args), "--vocab_size", 64 if args.small else 50304,
                 "--batch_size", 2 if args.small else batch, *rounds(args, 9, not file), file=file)


def mechanisms(args, names, file=None, layers=4):
    return bench(args, "--mechanisms", names, "--recipes", "modern", *size(args, layers),
                 "--batch_size", 2 if args.small else 16, *rounds(args, 7, not file), file=file)


def bench(args, *argv, file=None):
    return python(ROOT / "bench.py", "--device", args.device, "--no-memory", *argv,
                  *(["--json", file] if file else []))


def agree_and_compile(args, out):
    """agree, and beside it what compiles the later parts: what it leaves in the compiler's cache is found."""
    if args.small:
        return [[agree(args, out("agree.jsonl"), "plain", "--dtypes", "float32")]]
    ten = MECHANISMS.split(",")
    return [[agree(args, out("agree.jsonl"), "--quick"), plain(args, 16), plain(args, 32),
             *(mechanisms(args, ",".join(ten[i::3])) for i in range(3))]]


def long(args, out):
    one = ["--n_layer", 2, "--n_head", 12, "--n_embd", 768, "--batch_size", 1]
    times = ["--rounds", 7, "--steps", 5]
    routing = [[bench(args, "--what", "train", *one, "--block_size", context, *times,
                      "--mechanisms", "routing_moh", file=out(f"routing-{context}.json"))]
               for context in (1024, 16384)]
    return [[bench(args, "--what", "memory", *one, "--block_size", 16384, "--mechanisms", LONG,
                   file=out("memory.json"))], *routing,
            [bench(args, "--heads_off", 0, .25, .5, .75, *times, file=out("pruned.json"))]]


def decode(args, out):
    beside = ["--nanogpt", args.nanogpt] if args.nanogpt else []
    return [[bench(args, *beside, "--what", "decode", "--no-compile", *size(args), "--vocab_size", 50304,
                   "--batch_size", 1, "--rounds", 3, file=out("decode.json"))]]


def study(args, out):
    return [[python(ROOT / "data/pystdlib/prepare.py")],
            [python(ROOT / "compare.py", "config/studies/demo.py", "--mechanisms=acag,output_gate",
                    "--seeds=1,2", "--jobs_per_gpu=4", "--question=Does a study run as it should on a GPU?",
                    f"--out_dir={out('study')}")]]


def train(args, out):
    shape = ["--dataset=pystdlib", "--n_layer=6", "--n_head=6", "--n_embd=384", "--block_size=512",
             "--batch_size=64", "--eval_interval=250", "--max_iters=1500", f"--device={args.device}"]
    runs = [out("gpt2"), out("modern")]
    return [[python(ROOT / "data/pystdlib/prepare.py")],
            *([python(ROOT / "train.py", *shape, f"--recipe={run.name}", f"--out_dir={run}", "--overwrite")]
              for run in runs),
            [python(ROOT / "evaluate.py", "--ckpt", runs[0], "--ckpt", runs[1],
                    "--json", out("scores.json"))],
            [python(ROOT / "plot_curves.py", *runs, "--out", out("."))]]


PARTS = {
    "agree": Part(150, agree_and_compile),
    "plain16": Part(90, lambda args, out: [[plain(args, 16, out("plain16.json"))]]),
    "plain32": Part(90, lambda args, out: [[plain(args, 32, out("plain32.json"))]]),
    "mechanisms": Part(130, lambda args, out: [[mechanisms(args, "acag,sink" if args.small else MECHANISMS,
                                                           out("mechanisms.json"))]]),
    "decode": Part(240, decode),
    "study": Part(400, study),
    "compiled": Part(480, lambda args, out: [[agree(args, out("compiled.jsonl"), "--compile")]]),
    "every": Part(480, lambda args, out: [[mechanisms(args, "all", out("every.json"), layers=12)]]),
    "test": Part(480, lambda args, out: [[python("-m", "pytest", "-q")]]),
    "train": Part(400, train),
    "long": Part(480, long),
}
QUICK = ("agree", "plain16", "plain32", "mechanisms")


# ---- running them ----

class Card:
    """The parts, one after the other, and what they have found: results, which gpu-check.json holds."""

    def __init__(self, args):
        self.args, self.folder, self.ends = args, args.out, time.monotonic() + 60 * args.minutes
        self.running = []
        machine = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else args.device
        self.results = dict(torch=torch.__version__, machine=machine, small=args.small, minutes=args.minutes,
                            parts={name: dict(state="not begun", rows=[]) for name in args.parts})
        self.log = open(self.folder / "log.txt", "a", encoding="utf-8", buffering=1)
        self.write()

    def write(self):
        write_json(self.folder / "gpu-check.json", self.results)

    def run(self, name):
        """One part, in its time; the last one has all that is left."""
        began, last = time.monotonic(), name == self.args.parts[-1]
        left = self.ends - began
        limit = left if last else min(PARTS[name].seconds, left)
        if left < GRACE:
            return
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        for path in figures(folder):
            path.unlink()
        say(f"\n---- {name}, at most {limit:.0f} s ----", flush=True)
        part = self.results["parts"][name]
        part["state"] = "running"
        for group in PARTS[name].commands(self.args, folder.joinpath):
            first, *_ = self.running = [self.start(argv, shown=i == 0) for i, argv in enumerate(group)]
            while any(process.poll() is None for process in self.running):
                time.sleep(0.2)
                self.take(part, folder, began)
                if time.monotonic() - began > limit:
                    if first.poll() is None:
                        part["state"] = "cut short"
                    self.stop()
            self.take(part, folder, began)
            if part["state"] == "cut short":
                break
            if first.returncode:
                part["state"] = "failed"
        if part["state"] == "running":
            part["state"] = "done"
        self.write()

    def start(self, argv, shown):
        """A process of its own session; what it prints goes into the log, and to the terminal where shown."""
        self.log.write(f"$ {' '.join(argv)}\n")
        process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE if shown else self.log,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        if shown:
            threading.Thread(target=self.copy, args=(process.stdout,), daemon=True).start()
        return process

    def copy(self, stream):
        for line in stream:
            text = line.decode(errors="replace")
            self.log.write(text)
            say(text.rstrip("\n"), flush=True)

    def take(self, part, folder, began):
        """Put what a part has found by now into the results, and write them where that is more."""
        rows = [row for path in figures(folder) for row in rows_in(path)]
        part["seconds"] = round(time.monotonic() - began, 1)
        if rows != part["rows"]:
            part["rows"] = rows
            self.write()

    def stop(self):
        """Ask what runs to stop, and end what does not."""
        for number, patience in ((signal.SIGINT, GRACE), (signal.SIGKILL, GRACE)):
            for process in self.running:
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
            until = time.monotonic() + patience
            while any(p.poll() is None for p in self.running) and time.monotonic() < until:
                time.sleep(0.1)


def figures(folder):
    """The files of a part's figures, in the order of their names."""
    return sorted([*folder.glob("*.json"), *folder.glob("*.jsonl")])


def rows_in(path):
    """The rows of a file that bench.py or agree.py is writing."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    with suppress(ValueError):
        found = json.loads(text)
        return found.get("rows", []) if isinstance(found, dict) else []
    return []


# ---- what is printed at the end ----

def summary(results):
    """The figures of all parts, as lines."""
    lines = [f"{results['machine']}, torch {results['torch']}{', small' if results['small'] else ''}"]
    timed, compared = [], []
    for name, part in results["parts"].items():
        timed += [dict(row, what=name if row["what"] == "train" else f"{name} {row['what']}")
                  for row in part["rows"] if "time_ratio" in row]
        compared += [row for row in part["rows"] if "passed" in row]
        failed = [row for row in part["rows"] if row.get("error") or row.get("passed") is False]
        lines += [f"{name}: {row['name']} failed: {row.get('error') or row['worst']}" for row in failed]
    if compared:
        passed = sum(row["passed"] for row in compared)
        lines.append(f"numbers: {passed} of {len(compared)} agree with float64")
    if timed:
        lines += [time_table(timed), ANCHORS]
    states = [(name, part["state"], f"{part.get('seconds', 0):.0f} s", str(len(part["rows"])))
              for name, part in results["parts"].items()]
    return "\n".join([*lines, table(("part", "", "time", "rows"), states, left=2)])


# ---- command line ----

def arguments(argv):
    p = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("parts", nargs="*", help=f"any of {', '.join(PARTS)} (default: {', '.join(QUICK)})")
    p.add_argument("--nanogpt", help="a checkout of nanoGPT, which is measured in the same run")
    p.add_argument("--minutes", type=float,
                   help=f"time for all parts together (default: {MINUTES}, or what the named parts need)")
    p.add_argument("--out", default="out/gpu", help="folder of all figures (default: out/gpu)")
    p.add_argument("--device", default="auto", help="auto (default), cuda, cuda:1; with --small cpu too")
    p.add_argument("--jobs", type=int, default=((os.cpu_count() or 1) + 1) // 2,
                   help="processes at once in agree (default: half of the cores)")
    p.add_argument("--small", action="store_true", help="a tiny size, to try this script on a CPU")
    return p.parse_args(argv)


def check(args):
    """Fill in what follows from the device. Raises UserError for the first argument that makes no sense."""
    if unknown := [name for name in args.parts if name not in PARTS]:
        raise UserError(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    needed = sum(PARTS[name].seconds for name in args.parts) / 60
    args.minutes = (needed or MINUTES) if args.minutes is None else args.minutes
    args.parts = args.parts or list(QUICK)
    if args.minutes <= 0 or args.jobs < 1:
        raise UserError("--minutes must be above 0, and --jobs at least 1")
    args.jobs = 1 if args.small else args.jobs
    if args.nanogpt:
        nanogpt.check(args.nanogpt)
        args.nanogpt = str(Path(args.nanogpt).resolve())
    args.device = pick_device(args.device)
    if not (args.device.startswith("cuda") or args.small):
        raise UserError(f"device={args.device} is no CUDA GPU; --small tries the script without one")
    args.out = writable_folder(args.out).resolve()
    args.out.mkdir(parents=True, exist_ok=True)


@as_program("gpu_check")
def main(argv=None):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    args = arguments(argv)
    check(args)
    if not args.nanogpt:
        print("without nanoGPT beside: --nanogpt names a checkout "
              "(git clone https://github.com/karpathy/nanoGPT)", flush=True)
    card = Card(args)
    try:
        for name in args.parts:
            card.run(name)
    finally:
        card.stop()
        for part in card.results["parts"].values():
            part["state"] = "interrupted" if part["state"] == "running" else part["state"]
        card.write()
        text = summary(card.results)
        card.log.write(text + "\n")
        say(f"\n{text}", card.folder / "gpu-check.json", flush=True)
    sys.exit(any(part["state"] == "failed" for part in card.results["parts"].values()))


if __name__ == "__main__":
    main()
