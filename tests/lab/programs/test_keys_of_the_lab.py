"""Keys of studies on the command line."""

from model import GPTConfig
from nanoheads import configurator
from nanoheads.config import TrainConfig
from nanoheads.configurator import Presets
from study.config import StudyConfig


def test_every_key_of_the_real_configs_has_help():
    keys = configurator.keys_of((Presets, GPTConfig, TrainConfig, StudyConfig))
    assert not [k for k, (_, _, words) in keys.items() if not words]
