"""
Compile training, evaluation and decoding for NVIDIA GPUs on a machine without one (docs/gpu.md).

    make gpu-check                     what has changed since it was last compiled; half an hour for all
    make gpu-check QUICK=1             six entries
    make gpu-check ENTRIES="acag sink" those
    make gpu-bytes NANOGPT=/path       bytes moved at GPT-2 124M, beside nanoGPT's model.py
    python -m nanoheads.gpu.check --changed      what has changed, in a line

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

from nanoheads.common import ROOT, UserError, last_words
from nanoheads.gpu import environment, report
from nanoheads.gpu.digest import digest
from nanoheads.gpu.entries import ENTRIES, MUON, NANOGPT, QUICK, byte_checks, checks, quick_checks

LOG = ROOT / "out/gpu-check.log"  # what torch and triton say meanwhile
WORK = {"steps": "graphs", "train": "binaries", "eval": "binaries", "bytes": "code"}
CHECKS_OF_PROCESS = 30  # Dynamo keeps something of each model
LIMIT = 600  # seconds that one check may take
SAVE = 5  # checks after which the results are written


def stale(wanted, rows):
    """Those of the wanted checks whose code, flags or recipe are not those of their row."""
    return [check for check in wanted
            if check.key not in rows or rows[check.key].get("digest") != digest(check)]


# ---- the processes that compile ----

class Worker:
    """A process that compiles for one card."""

    def __init__(self, work, card, nanogpt):
        self.work, self.card, self.left = work, card, CHECKS_OF_PROCESS
        variables = {**os.environ, **environment.variables(sys.prefix, card.removeprefix("sm_"))}
        LOG.parent.mkdir(exist_ok=True)
        with open(LOG, "a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nanoheads.gpu.steps", json.dumps(dict(work=work, nanogpt=nanogpt))],
                cwd=ROOT,
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
    rows = report.read()
    with tqdm(total=len(wanted), unit="check", smoothing=0.1, mininterval=1) as bar:
        def done(check, row):
            rows[check.key] = {"digest": digest(check), **row}
            bar.set_postfix_str(check.key)
            bar.update()
            if bar.n % SAVE == 0:
                report.write(rows)
        try:
            compile_all(wanted, jobs, nanogpt, done)
        finally:
            if wanted:
                report.write(rows)
    return rows


# ---- the command line ----

def arguments(argv):
    parser = argparse.ArgumentParser(prog="nanoheads.gpu.check", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", nargs="*", help="entries to compile; none: all")
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} entries, head size 64 alone")
    parser.add_argument("--bytes", action="store_true", help="bytes moved at GPT-2 124M instead")
    parser.add_argument("--nanogpt", help="nanoGPT's folder, for --bytes")
    parser.add_argument("--changed", action="store_true", help="list what has changed, and compile nothing")
    parser.add_argument("--tables", action="store_true", help="write the tables of docs/gpu.md")
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


def prepare():
    """Check this environment, and build what is preloaded. Raises UserError."""
    try:
        environment.check_machine(sys.prefix)
        environment.build(sys.prefix)
    except environment.Unusable as e:
        raise UserError(str(e)) from None


def main(argv=None):
    args = arguments(argv)
    with last_words("gpu-check"):
        if args.changed:
            return print(report.changed(stale(checks(), report.read())))
        if args.tables:
            return report.write_page()
        wanted = wanted_checks(args)
        todo = wanted if args.again else stale(wanted, report.read())
        if todo:
            prepare()
        rows = compile_and_keep(todo, args.jobs, args.nanogpt)
        print(report.byte_tables(rows) if args.bytes else report.overview(rows, wanted))
        if args.bytes and report.write_page():
            print(f"{report.PAGE.relative_to(ROOT)}: table written")
        lines = report.wrong(rows, wanted)
        print("\n".join([*lines, f"{len(wanted)} checks, {len(todo)} of them compiled now, {len(lines)} "
                                 f"problems: {report.RESULTS.relative_to(ROOT)}"]))
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
