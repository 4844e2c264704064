"""What --help prints: what one sets every day first, every key findable, no line too wide for a terminal."""

import re
from dataclasses import dataclass
from typing import Literal, Optional

import pytest

from model import MECHANISM_CLASSES, GPTConfig
from nanoheads import configurator, usage
from nanoheads.config import TrainConfig
from nanoheads.configurator import Presets
from nanoheads.mechanism import flag
from train import main

CLASSES = (Presets, GPTConfig, TrainConfig)


@dataclass
class Thing:
    width: int = flag(8, "how wide", section="size")
    rate: Optional[float] = flag(None, "how fast", section="the rest: of what moves")
    shape: Literal["round", "square"] = flag("round", "how it looks")
    sides: list[Literal["left", "right"]] | None = flag(None, "which")


def shown(capsys, *argv):
    """What train.py prints for these arguments, which ask for help."""
    with pytest.raises(SystemExit) as end:
        main([*argv])
    assert end.value.code == 0
    return capsys.readouterr().out


def keys_in(text):
    return re.findall(r"^  --(\w+)", text, re.MULTILINE)


def test_what_one_sets_every_day_comes_first_and_mechanisms_come_last(capsys):
    text = shown(capsys, "--help")
    keys = keys_in(text)
    assert keys[:6] == ["scale", "mechanism", "check", "dataset", "out_dir", "resume"]
    assert len(keys) == len({*keys}), "no key stands there twice"
    order = [text.index(f"---- {start}") for start in ("what one sets", "size", "optimizer", "mechanisms by")]
    assert order == sorted(order)
    names = re.findall(r"^  (\w+) ", text[order[-1]:], re.MULTILINE)
    assert {cls.flag for cls in MECHANISM_CLASSES} <= {*names}
    warning = "A config file is Python code, and reading it runs it: name only files that you trust."
    assert warning in " ".join(text.split())

    # every key is there, or behind a name that is; no line is wider than a terminal
    texts = [text, *(usage.about(name, CLASSES) for name in names)]
    assert {*configurator.keys_of(CLASSES)} <= {key for each in texts for key in keys_in(each)}
    assert max(len(line) for each in texts for line in each.splitlines()) < 120


def test_help_about_a_word_finds_a_mechanism_by_its_name_its_flag_or_any_key(capsys):
    for word in ("moh", "routing_top_k", "--routing-shared"):
        text = shown(capsys, f"--help={word}")
        assert keys_in(text.replace("--mechanism=", ""))[0] == "routing" and "arXiv 2410.11842" in text
        assert "--mechanism=moh" in text and "--routing=moh --routing_shared=1" in text
    assert "n_embd" in keys_in(shown(capsys, "--help=n_head", "--scale=tiny"))
    assert "adamw_lr" in keys_in(shown(capsys, "--help=lr"))  # nanoGPT's name of it
    for word, meant in (("routnig", "routing"), ("constraintt_a", "constraint_a")):
        with pytest.raises(SystemExit) as end:
            main([f"--help={word}"])
        assert f"did you mean --help={meant}?" in end.value.code


def test_a_row_has_the_key_its_default_what_it_does_and_what_may_be_chosen():
    lines = [" ".join(line.split()) for line in usage.overview("what this is", (Thing,)).splitlines()]
    assert lines == [
        "what this is", "", "---- size ----", "--width 8 how wide", "", "---- the rest: of what moves ----",
        "--rate None how fast (float or None)", "--shape 'round' how it looks (round or square)",
        "--sides None which (list of left or right or None)"]
