"""
Draw the loss curves of runs, and of several runs in one picture.

    python plot_curves.py                          # every run under out/, and in folders out-...
    python plot_curves.py out/base out/routing     # these two
    python plot_curves.py out/base --x tokens      # over tokens instead of steps
    python plot_curves.py out/base --heads         # how its heads changed: gates, states, heads at work

Each run gets RUN/figures/curves.png and .svg. Two or more runs also get a comparison in --out, called after
the runs that were named: out/figures/comparison-base+routing.png and .svg. A run's colour follows its place
in the list and is the same in its own picture.

--heads draws what was measured of dynamic heads in training (--controller_log, docs/heads.md): gates, states
and active.png and .svg. Two or more runs also get active-base+routing.png and .svg in --out. A table has a
line for each run: heads at work, time in each state, violations. What heads attend to is drawn by
`python -m lab.probe look`.
"""
import argparse
import difflib
import hashlib
import os
import sys
from pathlib import Path

import nanoheads.threads  # noqa: F401  before torch, whose threads it has wait briefly
from nanoheads import other_names
from nanoheads.common import as_program, from_lab, printable, say, writable, writable_folder, write_json
from nanoheads.curves import AXES, plot_runs
from nanoheads.files import name_of_words, safe_name


def arguments(argv):
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN",
                        help="folders of runs (default: all under out/, and folders out-...)")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="folder of the comparison (default: figures/ beside the runs, or in the first "
                             "of them)")
    parser.add_argument("--x", choices=list(AXES), default="step", help="horizontal axis (default: step)")
    parser.add_argument("--json", help="write the paths of the pictures to this file too")
    parser.add_argument("--heads", action="store_true",
                        help="draw the heads of runs that measured them")
    args = parser.parse_args(argv)
    if args.heads and args.x != "step":
        parser.error("--heads knows steps alone, no other --x")
    return args


@as_program("plot_curves")
def main(argv=None):
    args = arguments(other_names.translate_arguments("plot_curves", sys.argv[1:] if argv is None else argv))
    return run(args)


def name_of(names, x):
    """What stands behind "comparison" in the name of a picture of these runs along x, the same each time."""
    words = [safe_name(name) for name in names]
    name = name_of_words(words, "" if x == "step" else f"by_{x}")
    if not all(word in name for word in words):  # too many to be named
        name += f"-{hashlib.sha256(repr(names).encode()).hexdigest()[:6]}"
    return f"-{name}"


def run(args):
    """Draw what is asked for, print the paths; the exit code. UserError: it cannot be written."""
    listing = writable(args.json) if args.json else None
    what, file = ("measured runs", "heads.jsonl") if args.heads else ("runs", "config.json")
    files_beside = [*Path().glob(f"out-*/{file}")]
    # where there are no runs here, those of the repository
    out = Path("out") if Path("out").is_dir() or files_beside else Path(__file__).resolve().parent / "out"
    known_runs = sorted({path.parent for path in (*out.rglob(file), *files_beside)})
    for run in args.runs:
        if not run.is_dir():
            close_names = difflib.get_close_matches(str(run), map(str, known_runs), n=1, cutoff=0)
            hint = f"did you mean {close_names[0]}?" if close_names else f"no {what} under {out}"
            say(f"{run}: no such run folder; {hint}", file=sys.stderr)
            sys.exit(2)
    # a run that is named twice is one run
    run_dirs = list({run.resolve(): run for run in args.runs or known_runs}.values())
    parent = Path(os.path.commonpath([run.resolve().parent for run in run_dirs])) if run_dirs else out
    names = [printable(os.path.relpath(run.resolve(), parent)) for run in run_dirs]
    suffix = name_of(names, args.x) if args.runs else ""
    # runs in the working folder, out-a and out-b, have no folder in common that git would not show
    beside = run_dirs[0] if run_dirs and parent == Path().resolve() else Path(os.path.relpath(parent))
    comparison_dir = args.out or beside / "figures"
    if args.out:
        writable_folder(args.out)
    if args.heads:
        paths = from_lab("lab.heads.pictures", "--heads").plot_heads(run_dirs, names, comparison_dir, suffix)
    else:
        paths = plot_runs(run_dirs, names, comparison_dir, args.x, suffix)
    if paths:
        say(*paths)
    if listing:
        write_json(listing, [str(path) for path in paths])
    if not paths:
        say("nothing to plot" + ("" if run_dirs else f": no {what} under {out}"), file=sys.stderr)
    return 0 if paths else 1


if __name__ == "__main__":
    sys.exit(main())
