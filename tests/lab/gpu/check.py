"""
Check on a machine without a GPU that all mechanisms compile for NVIDIA GPUs (docs/gpu.md).

    make gpu-check                     every entry; more than an hour on two cores
    make gpu-check QUICK=1             six entries
    make gpu-check ENTRIES="acag sink" those
    make gpu-check CARDS="sm_75 sm_120" six entries on T4 and RTX 20 (float16), RTX 50; sm_100 is B200

Results go to results/gpu-compile.json, each with the commit whose code was compiled. What that commit has
there already is not compiled again, so that an interrupted check goes on. The exit code is 1 where anything
is wrong.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import date

from tqdm import tqdm

from nanoheads.common import ROOT, UserError, as_program
from tests.lab.gpu import environment, report
from tests.lab.gpu.entries import ENTRIES, MORE_CARDS, MUON, QUICK, checks, more_checks, quick_checks

LOG = ROOT / "out/gpu-check.log"  # what torch and triton say meanwhile
WORK = {"steps": "graphs", "train": "binaries", "eval": "binaries"}
CHECKS_OF_PROCESS = 30  # Dynamo keeps something of each model
LIMIT = 600  # seconds that one check may take


# ---- the processes that compile ----

def compile_all(wanted, jobs, done):
    """Compile the wanted checks in `jobs` processes at a time; done(check, row) is called after each."""
    alike, lock = {}, threading.Lock()
    for check in wanted:
        alike.setdefault((WORK[check.kind], check.card), []).append(check)
    portion = min(CHECKS_OF_PROCESS, -(-len(wanted) // jobs))
    portions = [checks[i:i + portion] for checks in alike.values() for i in range(0, len(checks), portion)]

    def done_in_turn(check, row):
        with lock:
            done(check, row)

    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(compile_alike, checks, done_in_turn) for checks in portions]
        try:
            for each in running:
                each.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def compile_alike(checks, done):
    """Compile checks of one kind of work and one card in a process; where it dies, the rest in another."""
    left = list(checks)
    while left:
        process = start(left)
        for check in list(left):
            row = answer(process)
            if row is None and process.wait() == -signal.SIGINT:  # Ctrl-C reaches this process too
                return
            left.remove(check)
            if row is None:
                done(check, {"error": f"the process died, or took more than {LIMIT} s; "
                                      f"see {LOG.relative_to(ROOT)}"})
                break
            done(check, row)
        process.stdout.close()
        process.wait()


def start(checks):
    """A process that compiles checks of one kind of work and one card: steps.py."""
    kind, card = checks[0].kind, checks[0].card
    request = dict(work=WORK[kind], checks=checks)
    variables = {**os.environ, **environment.variables(sys.prefix, card.removeprefix("sm_"))}
    LOG.parent.mkdir(exist_ok=True)
    with open(LOG, "a") as log:
        return subprocess.Popen([sys.executable, "-m", "tests.lab.gpu.steps", json.dumps(request)], cwd=ROOT,
                                env=variables, stdout=subprocess.PIPE, stderr=log, text=True)


def answer(process):
    """The next row that a process writes; None where it died, or took too long and was killed."""
    watch = threading.Timer(LIMIT, process.kill)
    watch.start()
    line = process.stdout.readline()
    watch.cancel()
    return json.loads(line) if line.endswith("\n") else None


def compile_and_keep(wanted, commit, jobs):
    """compile_all(), each row kept in the results file. Returns all rows of that file."""
    rows = report.read()
    with tqdm(total=len(wanted), unit="check", smoothing=0.1, mininterval=1) as bar:
        def done(check, row):
            rows[check.key] = {"commit": commit or "unknown", "date": date.today().isoformat(), **row}
            report.write(rows)
            bar.set_postfix_str(check.key)
            bar.update()

        compile_all(wanted, jobs, done)
    return rows


# ---- the command line ----

def arguments(argv):
    parser = argparse.ArgumentParser(prog="tests.lab.gpu.check", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", nargs="*", help="what to compile (default: all entries)")
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} entries, head size 64 only")
    parser.add_argument("--cards", nargs="+", choices=list(MORE_CARDS), metavar="CARD",
                        help=f"compile a training step of a few entries for these: {', '.join(MORE_CARDS)}")
    parser.add_argument("--tables", action="store_true", help="only write the tables of docs/gpu.md")
    parser.add_argument("--again", action="store_true", help="compile also what has a result of this commit")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(),
                        help="processes at a time (default: one a core)")
    return parser.parse_args(argv)


def wanted_checks(args):
    """The checks that the command line asks for. Raises UserError."""
    known = *ENTRIES, MUON
    for name in args.entries:
        if name not in known:
            raise UserError(f"no entry is called {name!r}; there are {', '.join(known)}")
    if args.jobs < 1:
        raise UserError(f"--jobs={args.jobs} must be at least 1")
    entries = tuple(args.entries) or None
    if args.cards:
        return more_checks(args.cards, entries)
    return (quick_checks if args.quick else checks)(entries)


def prepare():
    """Check this environment, and build what is preloaded. Raises UserError."""
    try:
        environment.check_machine(sys.prefix)
        environment.build(sys.prefix)
    except environment.Unusable as e:
        raise UserError(str(e)) from None


@as_program("gpu-check")
def main(argv=None):
    args = arguments(argv)
    if args.tables:
        return report.write_page()
    wanted, commit = wanted_checks(args), report.code_commit()
    todo = wanted if args.again else report.missing(wanted, commit)
    if todo:
        prepare()
    rows = compile_and_keep(todo, commit, args.jobs)
    print(report.overview(rows, wanted))
    if report.write_page():
        print(f"{report.PAGE.relative_to(ROOT)}: tables written")
    lines = report.wrong(rows, wanted)
    print("\n".join([*lines, f"{len(wanted)} checks, {len(todo)} of them compiled now, {len(lines)} "
                             f"problems: {report.RESULTS.relative_to(ROOT)}"]))
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
