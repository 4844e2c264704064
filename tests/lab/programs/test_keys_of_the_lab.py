"""Keys and subcommands of studies on the command line."""

import re

import pytest

from model import GPTConfig
from nanoheads import configurator
from nanoheads.config import (TrainConfig)
from nanoheads.configurator import Presets, help_text
from nanoheads.common import UserError
from lab.study import commands
from lab.study.variants import StudyConfig


def test_every_key_of_the_real_configs_has_help():
    keys = configurator.keys_of((Presets, GPTConfig, TrainConfig, StudyConfig))
    assert not [k for k, (_, _, words) in keys.items() if not words]


@pytest.mark.parametrize("classes", [(Presets, GPTConfig, TrainConfig), (StudyConfig,)])
def test_columns_of_help_stay_apart_and_hold_all_words(classes):
    """A long type ran into the default, and a long default into the help."""
    keys, lines = configurator.keys_of(classes), help_text(classes, "").splitlines()
    columns = set()  # in which help begins
    for key, (kind, default, about) in keys.items():
        at = next(i for i, line in enumerate(lines) if line.startswith(f"  --{key} "))
        end = next((i for i in range(at + 1, len(lines)) if not lines[i].startswith(" " * 40)), len(lines))
        first, *rest = lines[at:end]
        cells = re.split(r"  +", first.strip(), maxsplit=3)
        assert cells[:3] == [f"--{key}", configurator.type_name(kind), repr(default)]
        assert " ".join([*cells[3:], *map(str.strip, rest)]) == about
        columns |= {first.rindex(cells[3])} if cells[3:] else set()
        columns |= {len(line) - len(line.lstrip()) for line in rest}
    assert len(columns) == 1 and max(map(len, lines)) <= columns.pop() + configurator.HELP_WIDE


# ---- subcommands of compare.py ----

@pytest.mark.parametrize("argv, same", [
    ([], []), (["x.py", "--seeds=1"], ["x.py", "--seeds=1"]), (["run", "x.py"], ["x.py"]),
    (["plan", "x.py", "--seeds=1"], ["x.py", "--seeds=1", "--dry_run"]),
    (["report", "a/results.json.gz", "--json", "v"], ["--from_results=a/results.json.gz", "--json=v"]),
    (["report", "x.py"], ["x.py", "--report_only"]), (["report", "--tables"], ["--tables"]),
    (["recheck", "a.json"], ["--recheck=a.json"]),
    (["scores", "--higher_is_better", "a.csv", "--baseline=a.csv"],
     ["--scores=a.csv", "--higher_is_better=True", "--baseline=a.csv"])])
def test_a_subcommand_means_what_the_flag_of_its_mode_means(argv, same):
    assert commands.taken_apart(argv)[1] == same


@pytest.mark.parametrize("argv, words", [
    (["recheck"], "recheck takes one file, FILE.json.gz: 0 are given"),
    (["scores", "a.csv", "b.csv"], "scores takes one file, FILE.csv: 2 are given"),
    (["scores", "a.csv", "--jobs=3"], "scores has no key jobs: beside its file it takes --baseline, "),
    (["recheck", "a.json", "--json=b"], "recheck has no key json: beside its file it takes no keys"),
    (["report", "a.json", "--seeds=1"], "report has no key seeds: beside its file it takes --json, ")])
def test_a_subcommand_refuses_what_it_does_not_take(argv, words):
    with pytest.raises(UserError) as e:
        commands.taken_apart(argv)
    assert str(e.value).startswith(words)


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_the_help_of_a_subcommand_shows_its_keys_and_no_others(name):
    command, _ = commands.taken_apart([name, "--help"])
    text = commands.help_of(command, "What it does.")
    assert set(re.findall(r"^  --(\w+)", text, re.M)) == {*commands.COMMANDS[name].keys}
    named = set(re.findall(r"^ *python compare.py (\w+)", text, re.M))
    assert named == ({*commands.COMMANDS} if name == "run" else {name})


def test_every_key_of_a_study_is_one_of_a_subcommand():
    keys = {key for command in commands.COMMANDS.values() for key in command.keys}
    assert configurator.keys_of((StudyConfig,)).keys() - keys == {
        "dry_run", "report_only", "from_results", "recheck", "scores"}  # which a subcommand is now
