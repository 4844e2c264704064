"""The pages: what they name exists, programs take their commands, and what exists is described."""

import argparse
import importlib
import json
import re
import shlex
from dataclasses import fields

import pytest
from helpers import EXAMPLES, ROOT
from lab_helpers import OF_LAB

import compare
from model import MECHANISM_CLASSES, MECHANISMS, NEUTRAL, GPTConfig
from nanoheads import configurator, other_names, own_mechanism, start
from nanoheads.config import TrainConfig
from nanoheads.configurator import choices
from nanoheads.mechanism import flags_of
from nanoheads.tasks import TASKS
from study.config import StudyConfig

DOCS = sorted((ROOT / "docs").glob("**/*.md"))
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "results/README.md")), *DOCS,
         *sorted((ROOT / "docs").glob("*.ipynb"))]
OF_TODAY = [page for page in PAGES if page.name != "log.md"]  # the log names what there was on its day
README, MECHANISMS_PAGE, RIVALS_PAGE = ((ROOT / name).read_text(encoding="utf-8") for name in (
    "README.md", "docs/mechanisms.md", "docs/rivals.md"))
SOURCES = [path for place in ("*.py", "nanoheads/*.py", "study/*.py", "lab/**/*.py", "data/**/*.py")
           for path in ROOT.glob(place)]
# a reader's own file, placeholders, and a write-up's programs in the table of what they are called here
NOT_OURS = {"mine.py", "other.py", "PROGRAM.py", "data/NAME/prepare.py", "base_train.py", "train_novel.py",
            "evaluate_models_binary.py", "plot_training_curves.py", "sample_both_models.py"}


def name_of(page):
    return str(page.relative_to(ROOT))


def text_of(page):
    """The text of a page; of a notebook, that of its cells."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return text


def without_commits(text):
    """A page's text without what is of another commit: in a block all from a line with `git checkout` on, and
    each cell of a table that says "at commit".
    """
    text = re.sub(r"^( *)git checkout .*(?:\n\1(?!```).*\S.*)*", "", text, flags=re.M)
    return re.sub(r"(?<=\|)[^|\n]*\bat commit\b[^|\n]*(?=\|)", "", text)


def section(page, name):
    """A page's text under a heading."""
    return page.split(f"\n## {name}\n")[1].split("\n## ")[0]


def rows(text):
    """{what the first cell has between backticks: the other cells} of the tables in a Markdown text."""
    lines = re.findall(r"^\| `(\w+)` \|(.*)\|$", text, re.M)
    return {name: [cell.strip() for cell in cells.replace(r"\|", "/").split("|")] for name, cells in lines}


def tables(name):
    """The rows of the tables of both pages of mechanisms whose first column has this name."""
    found = re.findall(rf"^\| {name} \|.*\n(?:\|.*\n)+", MECHANISMS_PAGE + RIVALS_PAGE, re.M)
    return rows("".join(found))


def anchors(text):
    """What GitHub calls the headings of a Markdown text."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ---- what is named is there ----

@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


def test_every_page_and_picture_is_linked_from_another_page():
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in PAGES
              for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page))}
    there = [path for path in (ROOT / "docs").rglob("*") if path.is_file()]
    assert there and [name_of(path) for path in there if path not in linked] == []


@pytest.mark.parametrize("page", OF_TODAY, ids=name_of)
def test_files_named_in_the_docs_exist(page):
    """By their path from the root, by their path in the package, or a module by its name alone."""
    folders = "data|config|docs|tests|results|nanoheads|study|lab"
    files = rf"(?:{folders})/[\w/\-]+\.(?:py|md|ipynb|json(?:\.gz)?|css)|\b[\w/]+\.(?:py|sh)\b"
    known = {path.name for path in (*SOURCES, *ROOT.glob("*.sh"), *ROOT.glob("tests/**/*.py"))} | NOT_OURS
    known |= {f"{path.parent.name}/{path.name}" for path in SOURCES}
    missing = {name for name in re.findall(files, without_commits(text_of(page))) if name not in known
               and not name.endswith("/mine.py") and not (ROOT / name).exists()
               and not (page.parent / name).exists() and not (page.parent.parent / name).exists()}
    assert not missing


def test_pages_named_in_the_code_and_tests_named_in_the_docs_exist():
    pages = {name for path in SOURCES
             for name in re.findall(r"\bdocs/[\w/\-]+\.md\b", path.read_text(encoding="utf-8"))}
    assert pages and not [name for name in pages if not (ROOT / name).exists()]
    there = {name for path in ROOT.glob("tests/**/test_*.py")
             for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)}
    named = set(re.findall(r"`(test_\w+)`", text_of(ROOT / "docs/trust.md")))
    assert len(named) > 20 and named - there == set()


def test_only_the_readme_and_contributing_speak_of_history():
    """Pages and code say what holds today."""
    texts = {name_of(path): text_of(path) for path in (*PAGES, *SOURCES, *ROOT.glob("config/**/*.py"))}
    assert {name for name, text in texts.items() if re.search(r"history/(log|decisions)\b", text)} <= {
        "README.md", "CONTRIBUTING.md"}


@pytest.mark.parametrize("page", ["mechanisms.md", "rivals.md", "claims.md"])
def test_every_name_of_code_is_in_the_code(page):
    """Flags, entries, classes, functions, tests, keys of traces: what stands alone between backticks."""
    text = re.sub(r"^```.*?^```$", "", text_of(ROOT / "docs" / page), flags=re.M | re.S)
    named = set(re.findall(r"`([A-Za-z_][A-Za-z0-9_]+)(?:\([^`]*\))?`", text))
    paths = (*SOURCES, *ROOT.glob("tests/**/test_*.py"))
    words = set(re.findall(r"\w+", "".join(path.read_text(encoding="utf-8") for path in paths)))
    assert len(named) > 20 and named - words == set()


def test_the_page_of_results_has_every_file_or_its_folder():
    folder = ROOT / "results"
    named = set(re.findall(r"`([\w/.*-]+)`", text_of(folder / "README.md")))
    for path in (path.relative_to(folder) for path in folder.rglob("*") if path.is_file()):
        ways = {str(path), f"{path.parent}/", f"{path.parent}/*{path.suffix}"}
        assert ways & named or path.name == "README.md", path


def test_every_flag_that_the_readme_names_is_a_key_or_an_argument():
    sources = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    text = re.sub(r"^```python.*?^```$", "", README, flags=re.M | re.S)  # the flags of an example are its own
    named = set(re.findall(r"(?<!\w)--(?:no-)?(\w+)", text)) - {"dropot", *other_names.NAMES}
    assert len(named) > 10
    for flag in named:
        assert re.search(rf"""^    {flag}: |--{flag}\b|more\["{flag}"\]""", sources, re.M), f"--{flag}"


# ---- commands ----

def commands(page):
    """The command lines of a page that begin with python, whole, without comments; none of another commit.

    Also those in the cells of its tables, where what a reader fills in is x.
    """
    text = without_commits(text_of(page))
    lines = re.sub(r"^    ", "", text, flags=re.M) if page.suffix == ".md" else text
    found = re.findall(r"^(?:\.venv/bin/)?python (.*)$", lines.replace("\\\n", "\0"), re.M)
    found = [line.replace("\0--", " --").replace("\0", "") for line in found]
    for cell in re.findall(r"`((?:python |\w+\.py )[^`]*)`", text) if page.name == "claims.md" else ():
        cell = re.sub(r"(?<=--ckpt )(<[^>]*>|\.\.\.)", "x", cell.replace("ALL", "config/studies/all.py"))
        found.append(cell.replace(" ... ", " --ckpt x ").removeprefix("python "))
    return [shlex.split(line, comments=True) for line in found]


def is_whole(words):
    """Whether no part of a command stands for what a reader chooses: FILE, DIR, <plain>, ..."""
    line = " ".join(word for word in words if not word.startswith("--settings"))
    return not re.search(r"\.\.\.|[<>\[\]]|\b(FILE|DIR|NAME|PROGRAM)\b|mine\.(py|yaml)", line)


class Read(Exception):
    """A program has read its arguments, and would now begin."""


def read_arguments(words, monkeypatch):
    """Read a command's arguments as its program does; SystemExit or UserError where it refuses them."""
    if words[0] == "-m":
        words = [words[1].replace(".", "/") + ".py", *words[2:]]
    (program, *argv), of_compare = words, words[0] == "compare.py"
    if program not in ("train.py", "compare.py"):
        parse_args = argparse.ArgumentParser.parse_args

        def until_read(*args, **kwargs):
            parse_args(*args, **kwargs)
            raise Read
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", until_read)
        with pytest.raises(Read):
            importlib.import_module(program.removesuffix(".py").replace("/", ".")).main(argv)
    elif any(map(configurator.is_help, argv)) or argv == ["report", "--tables"]:
        pass
    elif of_compare and any(word.endswith((".json.gz", ".csv")) for word in argv):
        compare.one_file(argv[0], argv[1:])
    else:
        classes = (StudyConfig,) if of_compare else (configurator.Presets, GPTConfig, TrainConfig)
        argv = argv[1:] if argv and argv[0] in compare.COMMANDS else argv
        command = own_mechanism.add_from_command(configurator.parse_command(classes, argv))
        if not of_compare and not command.values().get("check"):
            start.configure(command)
        else:
            configs, _ = configurator.build_configs(command)
            configurator.validate(configs)


# what is missing here, and made by a command before
MISSING = "is not prepared|no dataset data/mine|no labels 'weak'|--ckpt|holds no run to go on with"


@pytest.mark.parametrize("page", [page for page in OF_TODAY if commands(page)], ids=name_of)
def test_every_command_of_a_page_is_read(page, monkeypatch, own_mechanisms_go, capsys):
    """The program, its flags and their values exist; what they do, its own tests say."""
    for words in (words for words in commands(page) if is_whole(words) and "pytest" not in words):
        try:
            read_arguments(words, monkeypatch)
        except (configurator.UserError, SystemExit) as e:
            said = capsys.readouterr().err.splitlines()[-1:] if e.args == (2,) else str(e).splitlines()
            assert said and all(re.search(MISSING, line) for line in said), (words, said)
        monkeypatch.undo()


def test_the_tests_of_a_claim_are_there():
    """Files, and with -k a word that is in the name of a test of theirs."""
    text = without_commits(text_of(ROOT / "docs/claims.md"))
    tested = [shlex.split(line) for line in re.findall(r"`(?:python -m )?pytest ([^`]*)`", text)]
    assert len(tested) > 2
    for words in tested:
        word = words[words.index("-k") + 1] if "-k" in words else ""
        for file in (file for file in words if file.endswith(".py")):
            assert re.search(rf"^def test_\w*{word}", (ROOT / file).read_text(encoding="utf-8"), re.M), file


# ---- what is there is described ----

def test_the_readme_has_every_program_and_dataset():
    at_root = {path.stem for path in ROOT.glob("*.py")} - {"model"}
    for program in (*(f"{name}.py" for name in at_root), *(f"-m lab.{name}" for name in OF_LAB)):
        assert f"\npython {program} " in README, program
    named = set(re.findall(r"`(\w+)`", section(README, "Data")))
    assert named == {path.parent.name for path in ROOT.glob("data/*/prepare.py")}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert {"demo", "test"} <= set(re.findall(r"\bmake ([\w-]+)", README)) <= targets


def test_the_mechanism_of_the_readme_is_one_of_its_page():
    """Whose examples are held to every promise."""
    on_readme, = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    assert on_readme in EXAMPLES


def test_every_flag_of_a_mechanism_is_described():
    """A row of a table in mechanisms.md or rivals.md: what may be chosen, the default, what it means."""
    names = {name for cls in MECHANISM_CLASSES for name in flags_of(cls)} | {"head_ids"}
    described = tables("flag")
    for flag in (f for f in fields(GPTConfig) if f.name in names):
        values, default, meaning = described[flag.name]
        assert all(word in values for word in choices(flag.type)), flag.name
        assert default.split(":")[0] == str(flag.default) and meaning, flag.name


def test_every_entry_of_mechanisms_is_described():
    """Its flags as they are, and its neutral setting, or that there is none; on the front page its name."""
    entries = tables("entry")
    for name, flags in MECHANISMS.items():
        described, neutral = entries[name]
        assert dict(re.findall(r"(\w+)=([^\s`]+)", described)) == {
            key: "[...]" if isinstance(value, list) else str(value) for key, value in flags.items()}, name
        assert neutral.startswith("none") != (name in NEUTRAL), name
        for key, value in NEUTRAL.get(name, {}).items():
            assert not (isinstance(value, float) and value) or f"{value:g}" in neutral, key
    named = set(re.findall(r"`(\w+)[=`]", section(README, "Mechanisms")))
    assert {cls.flag for cls in MECHANISM_CLASSES} <= named


def test_the_page_of_tasks_has_each_with_its_levels():
    page = text_of(ROOT / "docs/compare.md")
    found = {name: cells[1:4] for name, cells in rows(section(page, "Tasks")).items()}
    assert found == {name: [task.unit, *(", ".join(map(str, levels)) for levels in (
        task.levels, task.test_levels))] for name, task in TASKS.items()}
    assert {*re.findall(r"^==== (\w+), \d+ ", page, re.M)} < {*TASKS}
