"""What README.md and docs/ name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_named_in_the_docs_exist(page):
    named = set(re.findall(r"(?:data|config|docs|tests)/[\w/]+\.(?:py|md)|\b\w+\.(?:py|sh)\b",
                           page.read_text()))
    places = {p.name for p in [*ROOT.glob("*"), *ROOT.glob("study/*")]} | {"prepare.py"}
    missing = {n for n in named if not ((ROOT / n).exists() or n in places)}
    assert not missing


def test_every_flag_named_in_the_readme_is_a_key_or_an_argument():
    sources = "".join((ROOT / f).read_text() for f in ("model.py", "train.py", "study/arms.py", "compare.py",
                                                       "configurator.py", "evaluate.py", "sample.py",
                                                       "bench.py",
                                                       "probe.py", "plot_curves.py", "data/needle/prepare.py",
                                                       "data/writing.py",
                                                       "data/sources.py", "data/prepare_text.py"))
    for flag in set(re.findall(r"(?<!\w)--(\w+)", (ROOT / "README.md").read_text())) - {"standalone",
                                                                                        "nproc_per_node",
                                                                                        "learning_rate"}:
        assert re.search(rf"^    {flag}: |--{flag}\b", sources, re.M), f"--{flag}"


def test_every_dataset_of_the_readme_has_its_script_and_the_other_way_round():
    table = (ROOT / "README.md").read_text().split("## Data")[1].split("## Configure")[0]
    named = {n for row in re.findall(r"^\| (`.*?) \|", table, re.M) for n in re.findall(r"`(\w+)`", row)}
    assert named == {p.parent.name for p in ROOT.glob("data/*/prepare.py")}
