"""What README.md and docs/ say is there is there, and what is there is said."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from model import MECHANISM_CLASSES, MECHANISMS, NEUTRAL, GPTConfig
from nanoheads.configurator import choices
from train import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("*.ipynb"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MECHANISMS_PAGE = (ROOT / "docs/mechanisms.md").read_text(encoding="utf-8")
FOLDERS = "data|config|docs|tests|study|results|gpu"


def text_of(page):
    """The text of a page; of a notebook, that of its cells."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return text


def section(name):
    """The README's text under a heading."""
    return README.split(f"\n## {name}\n")[1].split("\n## ")[0]


def rows(text):
    """{what the first cell has between backticks: the other cells} of the tables in a Markdown text."""
    lines = re.findall(r"^\| `(\w+)` \|(.*)\|$", text, re.M)
    return {name: [cell.strip() for cell in cells.replace(r"\|", "/").split("|")] for name, cells in lines}


def anchors(text):
    """What GitHub calls the headings of a Markdown text."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ---- files ----

@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_named_in_the_docs_exist(page):
    named = set(re.findall(rf"(?:{FOLDERS})/[\w/\-]+\.(?:py|md|ipynb|json(?:\.gz)?|css)|\b\w+\.(?:py|sh)\b",
                           text_of(page)))
    places = {p.name for p in [*ROOT.glob("*"), *ROOT.glob("study/*"), *ROOT.glob("gpu/*")]} | {"prepare.py"}
    missing = {n for n in named if not ((ROOT / n).exists() or n in places)}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_no_line_is_wider_than_a_screen(page):
    """110 columns, as in the code; only the tables of docs/ may need more."""
    lines = text_of(page).splitlines()
    in_docs = page.parent.name == "docs"
    assert not [line for line in lines if len(line) > 110 and not (in_docs and line.startswith("|"))]


# ---- the README ----

def test_every_flag_named_in_the_readme_is_a_key_or_an_argument():
    programs = [*ROOT.glob("*.py"), *ROOT.glob("nanoheads/**/*.py"), *ROOT.glob("data/**/*.py")]
    sources = "".join(p.read_text(encoding="utf-8") for p in programs)
    named = set(re.findall(r"(?<!\w)--(\w+)", README)) - {"standalone", "nproc_per_node", "learning_rate"}
    for flag in named:
        assert re.search(rf"""^    {flag}: |--{flag}\b|more\["{flag}"\]""", sources, re.M), f"--{flag}"


def test_a_mistake_is_answered_as_the_readme_shows(capsys):
    command, *said = section("Configure").split("```\n$ python train.py ")[1].split("```")[0].splitlines()
    with pytest.raises(SystemExit) as e:
        main(command.split())
    lines = [line for line in str(e.value.code).splitlines() if "is not prepared" not in line]  # no data here
    assert capsys.readouterr().out == "" and lines == said


def test_every_dataset_of_the_readme_has_its_script_and_the_other_way_round():
    table = re.findall(r"^\| (`.*?) \|", section("Data"), re.M)
    named = {name for row in table for name in re.findall(r"`(\w+)`", row)}
    assert named == {p.parent.name for p in ROOT.glob("data/*/prepare.py")}


def test_the_readme_maps_every_module_of_the_repository():
    house = section("The house")
    for path in [*ROOT.glob("*.py"), *ROOT.glob("study/[!_]*.py")]:
        assert path.name in house


def test_the_readme_lists_every_mechanism():
    table = "\n".join(line for line in section("Mechanisms").splitlines() if line.startswith("|"))
    assert {cls.flag for cls in MECHANISM_CLASSES} <= set(re.findall(r"`(\w+)`", table))
    for names in re.findall(r"\| ([^|]*) \|$", table, re.M)[2:]:
        for name in re.findall(r"`(\w+)`", names):
            assert name in MECHANISMS


# ---- docs/mechanisms.md ----

def flags_of_mechanisms():
    """The fields of GPTConfig that turn a mechanism on, or are its details; and what pruning leaves."""
    names = {name for cls in MECHANISM_CLASSES for name in cls.fields()} | {"head_ids"}
    return [f for f in fields(GPTConfig) if f.name in names]


@pytest.mark.parametrize("flag", flags_of_mechanisms(), ids=lambda f: f.name)
def test_every_flag_of_a_mechanism_is_described(flag):
    """A row of a table in docs/mechanisms.md: what may be chosen, the default, what it means."""
    values, default, meaning = rows(MECHANISMS_PAGE)[flag.name]
    assert all(word in values for word in choices(flag.type))
    assert default.split(":")[0] == str(flag.default)
    assert meaning


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_entry_of_mechanisms_is_described(name):
    """Its flags as they are, and its neutral setting, or that there is none."""
    flags, neutral = rows(MECHANISMS_PAGE.split("## The entries")[1].split("\n## ")[0])[name]
    said = re.findall(r"(\w+)=([^\s`]+)", flags)
    assert dict(said) == {key: "[...]" if isinstance(value, list) else str(value)
                          for key, value in MECHANISMS[name].items()}
    assert neutral.startswith("none") != (name in NEUTRAL)
    for key, value in NEUTRAL.get(name, {}).items():
        if isinstance(value, float) and value:
            assert f"{value:g}" in neutral, key
