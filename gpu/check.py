"""
Compile training, evaluation and decoding for NVIDIA GPUs on a machine without one (docs/gpu.md).

    make gpu-check                     what has changed since it was last compiled; half an hour for all
    make gpu-check QUICK=1             six entries
    make gpu-check ENTRIES="acag sink" those
    make gpu-bytes NANOGPT=/path       bytes moved at GPT-2 124M, beside nanoGPT's model.py
    python -m gpu.check --changed      what has changed, in a line

Results go to results/gpu-compile.json. The exit code is 1 where anything is wrong.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from common import ROOT, UserError, last_words, table, write_atomic
from gpu import environment
from gpu.digest import digest
from gpu.entries import (CARDS, ENTRIES, MUON, NANOGPT, QUICK, STEPS_OF_THAW, Check, byte_checks, checks,
                         quick_checks)

RESULTS = ROOT / "results/gpu-compile.json"
LOG = ROOT / "out/gpu-check.log"  # what torch and triton say meanwhile
WORK = {"steps": "graphs", "train": "binaries", "eval": "binaries", "bytes": "code"}
CHECKS_OF_PROCESS = 30  # Dynamo keeps something of each model
LIMIT = 600  # seconds that one check may take
SAVE = 20  # checks after which the results are written


# ---- the results ----

def read(path=None):
    """{key: row} of the results file; empty where there is none. Raises UserError."""
    path = path or RESULTS
    try:
        return json.loads(path.read_text(encoding="utf-8"))["checks"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is not a results file of this check; delete it") from None


def write(rows, path=None):
    """Write {key: row}, a line each, those of checks that are no more left out."""
    known = [check.key for check in (*checks(), *byte_checks())]
    lines = [f" {json.dumps(key)}: {json.dumps(rows[key], sort_keys=True)}" for key in known if key in rows]
    text = f'{{"torch": "{environment.TORCH}", "checks": {{\n' + ",\n".join(lines) + "\n}}\n"
    write_atomic(path or RESULTS, lambda f: f.write(text.encode()))


def problems(check, row):
    """What is wrong with a check, from its row, a sentence each."""
    if "error" in row:
        yield f"does not compile: {row['error']}"
    for reason in row.get("breaks", ()):
        yield f"graph break: {reason}"
    graphs = row.get("graphs")
    if graphs and graphs[-1] > graphs[0] + (check.entry == STEPS_OF_THAW):
        yield f"recompiled: {graphs} graphs after each step"
    if row.get("shared", 0) > row.get("limit", 0):
        yield (f"{row['largest']} asks for {row['shared']:,} bytes of shared memory, the card has "
               f"{row['limit']:,} (kernels that do: {row['too_large']})")
    calls = [call for call, names in row.get("attention", {}).items() if "cudnn_attention" in names]
    if calls:
        yield f"cuDNN's attention, which plans anew for each length, in {', '.join(calls)}"


def stale(wanted, rows):
    """Those of the wanted checks whose code, flags or recipe are not those of their row."""
    return [check for check in wanted if rows.get(check.key, {}).get("digest") != digest(check)]


# ---- the processes that compile ----

class Worker:
    """A process that compiles for one card."""

    def __init__(self, work, card, nanogpt):
        self.work, self.card, self.left = work, card, CHECKS_OF_PROCESS
        variables = {**os.environ, **environment.variables(sys.prefix, card.removeprefix("sm_"))}
        LOG.parent.mkdir(exist_ok=True)
        with open(LOG, "a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpu.steps", json.dumps(dict(work=work, nanogpt=nanogpt))], cwd=ROOT,
                env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)

    def fits(self, check):
        alive = self.left > 0 and self.process.poll() is None
        return alive and (self.work, self.card) == (WORK[check.kind], check.card)

    def run(self, check):
        """The row of a check; an error where the process died or took too long."""
        self.left -= 1
        watch = threading.Timer(LIMIT, self.process.kill)
        watch.start()
        try:
            self.process.stdin.write(json.dumps(check) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (ValueError, OSError):
            self.process.kill()
            return {"error": f"the process died, or took more than {LIMIT} s; see {LOG.relative_to(ROOT)}"}
        finally:
            watch.cancel()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def compile_all(wanted, jobs, nanogpt=None, done=lambda check, row: None):
    """Compile the wanted checks in `jobs` processes at a time; done(check, row) is called after each."""
    waiting, lock = list(wanted), threading.Lock()

    def take(worker):
        """The next check, one that this worker can do where there is any; of those with the most left."""
        with lock:
            if not waiting:
                return None
            mine = [check for check in waiting if worker and worker.fits(check)]
            left = Counter((WORK[check.kind], check.card) for check in waiting)
            check = (mine or [max(waiting, key=lambda c: left[WORK[c.kind], c.card])])[0]
            waiting.remove(check)
            return check

    def loop():
        worker = None
        while (check := take(worker)) is not None:
            if worker is None or not worker.fits(check):
                if worker:
                    worker.close()
                worker = Worker(WORK[check.kind], check.card, nanogpt)
            row = worker.run(check)
            with lock:
                done(check, row)
        if worker:
            worker.close()

    threads = [threading.Thread(target=loop, daemon=True) for _ in range(min(jobs, len(waiting)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def compile_and_keep(wanted, jobs, nanogpt=None):
    """compile_all(), each row kept in the results file with its digest. Returns all rows of that file."""
    rows = read()
    with tqdm(total=len(wanted), unit="check", smoothing=0.1, mininterval=1) as bar:
        def done(check, row):
            rows[check.key] = {"digest": digest(check), **row}
            bar.set_postfix_str(check.key)
            bar.update()
            if bar.n % SAVE == 0:
                write(rows)
        try:
            compile_all(wanted, jobs, nanogpt, done)
        finally:
            if wanted:
                write(rows)
    return rows


# ---- what is printed ----

def overview(rows, names):
    """A line for each entry, of its training step at head size 64 in bfloat16: kernels, bytes, memory."""
    lines = []
    for name in names:
        of_cards = [rows.get(Check(name, "train", card=card).key, {}) for card in CARDS]
        if not any(of_cards):
            continue
        first = next(row for row in of_cards if row)
        cells = [first.get("kernels", "-"), f"{first.get('bytes', 0) / 1e6:.1f}"]
        cells += [f"{row['shared'] / 1024:.0f}" if "shared" in row else "-" for row in of_cards]
        mine = [check for check in checks((name,)) if check.key in rows]
        bad = sum(bool([*problems(check, rows[check.key])]) for check in mine)
        graph = "no" if "no_cuda_graph" in first else "yes"
        lines.append([name, *cells, graph, f"{bad} of {len(mine)}" if bad else "-"])
    head = ["entry", "kernels", "MB", *(f"KB {card}" for card in CARDS), "CUDA graph", "wrong"]
    return table(head, lines)


def wrong(rows, wanted):
    """Lines: each problem of the wanted checks, with the keys that have it."""
    found = {}
    for check in wanted:
        for problem in problems(check, rows.get(check.key, {})):
            found.setdefault((check.entry, problem), []).append(check)
    lines = []
    for (entry, problem), those in found.items():
        first, more = those[0], f" and {len(those) - 1} more" if len(those) > 1 else ""
        lines.append(f"{first.key}{more}: {problem}")
    return lines


def changed_line():
    """What has changed since it was last compiled, in a line or two."""
    rows, wanted = read(), checks()
    entries = list(dict.fromkeys(check.entry for check in stale(wanted, rows)))
    every = len({check.entry for check in wanted})
    if not entries:
        return f"gpu-check: all {every} entries were compiled as they are"
    names = ", ".join(entries[:8]) + (f", and {len(entries) - 8} more" if len(entries) > 8 else "")
    return (f"gpu-check: {len(entries)} of {every} entries have changed since they were compiled for a GPU "
            f"(make gpu-check):\n  {names}")


def arguments(argv):
    parser = argparse.ArgumentParser(prog="gpu.check", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", nargs="*", help="entries to compile; none: all")
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} entries, head size 64 alone")
    parser.add_argument("--bytes", action="store_true", help="bytes moved at GPT-2 124M instead")
    parser.add_argument("--nanogpt", help="nanoGPT's folder, for --bytes")
    parser.add_argument("--changed", action="store_true", help="list what has changed, and compile nothing")
    parser.add_argument("--again", action="store_true", help="compile what has not changed too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    return parser.parse_args(argv)


def wanted_checks(args):
    """The checks that the command line asks for. Raises UserError."""
    known = (*ENTRIES, MUON, NANOGPT) if args.bytes else (*ENTRIES, MUON)
    for name in args.entries:
        if name not in known:
            raise UserError(f"no entry is called {name!r}; there are {', '.join(known)}")
    entries = tuple(args.entries) or None
    if args.quick:
        return quick_checks(entries)
    if not args.bytes:
        return checks(entries)
    if args.nanogpt and not Path(args.nanogpt, "model.py").is_file():
        raise UserError(f"--nanogpt: there is no {Path(args.nanogpt, 'model.py')}")
    return [check for check in byte_checks(entries) if args.nanogpt or check.entry != NANOGPT]


def main(argv=None):
    args = arguments(argv)
    with last_words("gpu-check"):
        if args.changed:
            print(changed_line())
            return
        wanted = wanted_checks(args)
        todo = wanted if args.again else stale(wanted, read())
        if todo:
            try:
                environment.check_machine(sys.prefix)
                environment.build(sys.prefix)
            except environment.Unusable as e:
                raise UserError(str(e)) from None
        rows = compile_and_keep(todo, args.jobs, args.nanogpt)
        if not args.bytes:
            print(overview(rows, dict.fromkeys(check.entry for check in wanted)))
        lines = wrong(rows, wanted)
        print("\n".join([*lines, f"{len(wanted)} checks, {len(todo)} of them new; "
                                 f"{len(lines)} problems; written to {RESULTS.relative_to(ROOT)}"]))
        sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
