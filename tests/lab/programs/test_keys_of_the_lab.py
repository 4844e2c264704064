"""Keys of studies on the command line."""

import re

import pytest

from model import GPTConfig
from nanoheads import configurator
from nanoheads.config import TrainConfig
from nanoheads.configurator import Presets, help_text
from study.config import StudyConfig


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
    assert len(columns) == 1 and max(map(len, lines)) <= columns.pop() + configurator.HELP_WIDTH
