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
    for cls in MECHANISM_CLASSES:
        assert re.search(rf"^  {cls.flag} ", text, re.MULTILINE)
    warning = "A config file is Python code, and reading it runs it: name only files that you trust."
    assert warning in " ".join(text.split())


def test_every_key_is_in_the_overview_or_behind_a_name_that_it_lists(capsys):
    overview = shown(capsys, "--help")
    names = re.findall(r"^  (\w+) ", overview[overview.index("---- mechanisms by name"):], re.MULTILINE)
    found = {*keys_in(overview)}.union(*(keys_in(usage.about(name, CLASSES)) for name in names))
    assert {*configurator.keys_of(CLASSES)} <= found


def test_no_line_is_wider_than_a_terminal():
    keys = configurator.keys_of(CLASSES)
    texts = [usage.overview("", CLASSES), *(usage.about(key, CLASSES) for key in keys)]
    assert max(len(line) for text in texts for line in text.splitlines()) < 120


def test_help_about_a_word_finds_a_mechanism_by_its_name_its_flag_or_any_key(capsys):
    for word in ("moh", "routing", "routing_top_k", "--routing-shared"):
        text = shown(capsys, f"--help={word}")
        assert keys_in(text.replace("--mechanism=", ""))[0] == "routing" and "arXiv 2410.11842" in text
        assert "--mechanism=moh" in text and "--routing=moh --routing_shared=1" in text
    assert "constraint_names" in keys_in(shown(capsys, "--help=constraint"))
    assert "n_embd" in keys_in(shown(capsys, "--help=n_head", "--scale=tiny"))
    for word in ("lr", "learning_rate"):  # nanoGPT's name of it
        assert "adamw_lr" in keys_in(shown(capsys, f"--help={word}"))


@pytest.mark.parametrize("word, meant", [("routnig", "routing"), ("constraintt_a", "constraint_a")])
def test_help_about_a_word_that_is_none_says_what_was_meant(word, meant):
    with pytest.raises(SystemExit) as end:
        main([f"--help={word}"])
    assert f"did you mean --help={meant}?" in end.value.code


def test_a_row_has_the_key_its_default_what_it_does_and_what_may_be_chosen():
    lines = [" ".join(line.split()) for line in usage.overview("what this is", (Thing,)).splitlines()]
    assert lines == [
        "what this is", "", "---- size ----", "--width 8 how wide", "", "---- the rest: of what moves ----",
        "--rate None how fast (float or None)", "--shape 'round' how it looks (round or square)",
        "--sides None which (list of left or right or None)"]
