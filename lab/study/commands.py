"""
The subcommands of compare.py: which keys each takes, and what the words behind it mean.

Each says by a key of StudyConfig what is to be done, and for one more release that key alone means the same:
--dry_run is `plan`, --from_results=FILE and --report_only are `report`, --recheck=FILE and --scores=FILE the
commands of these names.
"""

import textwrap
from typing import NamedTuple

from nanoheads import configurator
from nanoheads.common import UserError
from lab.study.variants import StudyConfig

RESULTS = (".json", ".json.gz")  # how a results file's name ends
# keys that say what is done, or belong to one subcommand alone: those of a study are the others
MODES = ("dry_run", "report_only", "from_results", "recheck", "tables", "scores", "baseline",
         "higher_is_better", "target")
OF_STUDY = tuple(key for key in configurator.keys_of((StudyConfig,)) if key not in MODES)


class Command(NamedTuple):
    usage: str
    about: str
    keys: tuple  # that it takes


COMMANDS = {
    "run": Command("[config.py] [--key=value ...]", "train what is not done, judge, write the report",
                   OF_STUDY),
    "plan": Command("[config.py] [--key=value ...]", "print what would run, and for how long",
                    tuple(key for key in OF_STUDY if key != "json")),
    "report": Command("FILE.json.gz | --tables | [config.py] [--key=value ...]",
                      "write the report of a results file once more, without its runs; with --tables the "
                      "tables of README.md and docs/; else the report of a study from the runs that are "
                      "done, which takes the keys of run", ("json", "out_dir", "tables")),
    "recheck": Command("FILE.json.gz", "compute every figure of a results file once more, and compare", ()),
    "scores": Command("FILE.csv [--key=value ...]",
                      "judge the runs of another program; its columns: variant, seed, score, and where they "
                      "are known tokens, bytes, cost",
                      ("baseline", "higher_is_better", "target", "alpha", "margin", "json", "out_dir")),
}


def taken_apart(argv):
    """(subcommand, argv that says the same by keys alone); run, where none is named. UserError."""
    if not argv or argv[0] not in COMMANDS:
        return "run", argv
    name, *rest = argv
    if {"--help", "-h"} & {*rest}:
        return name, rest
    keys = configurator.keys_of((StudyConfig,))
    files, given = configurator.split_args(rest, keys)
    if name == "run":
        return name, rest
    if name == "plan":
        return name, [*rest, "--dry_run"]
    if name == "report" and not any(file.endswith(RESULTS) for file in files):
        return name, rest if dict(given).get("tables") else [*rest, "--report_only"]
    if len(files) != 1:
        raise UserError(f"{name} takes one file, {COMMANDS[name].usage.split()[0]}: {len(files)} are given")
    if other := [key for key, _ in given if key not in COMMANDS[name].keys]:
        takes = ", ".join(f"--{key}" for key in COMMANDS[name].keys) or "no keys"
        raise UserError(f"{name} has no key {other[0]}: beside its file it takes {takes}")
    key = "from_results" if name == "report" else name
    return name, [f"--{key}={files[0]}", *(f"--{key}" if text is None else f"--{key}={text}"
                                            for key, text in given)]


def help_of(name, doc):
    """The help of a subcommand, as text; doc: what stands before that of run, the whole program's."""
    lines = [doc.strip(), "", "---- subcommands; each has its own --help ----"] if name == "run" else []
    for each, command in COMMANDS.items() if name == "run" else [(name, COMMANDS[name])]:
        lines.append(f"  python compare.py {each} {command.usage}")
        lines += textwrap.wrap(command.about, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return configurator.help_text((StudyConfig,), "\n".join(lines), only=COMMANDS[name].keys)
