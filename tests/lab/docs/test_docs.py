"""What README.md and docs/ name exists, and what exists is described."""

import argparse
import ast
import importlib
import json
import re
import shlex
from dataclasses import fields

import pytest

from model import MECHANISM_CLASSES, MECHANISMS, NEUTRAL, GPTConfig
from nanoheads import configurator, other_names, start
from nanoheads.config import TrainConfig
from nanoheads.configurator import choices
from nanoheads.mechanism import flags_of
from nanoheads.tasks import TASKS
from study import docs_tables
from study.config import StudyConfig
from train import main
from helpers import ROOT
from helpers import EXAMPLES
from lab_helpers import OF_LAB

DOCS = sorted((ROOT / "docs").glob("**/*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, *sorted((ROOT / "docs").glob("*.ipynb"))]
OF_TODAY = [page for page in PAGES if page.parent.name != "log"]  # the log names what there was on its day
README = (ROOT / "README.md").read_text(encoding="utf-8")
MECHANISMS_PAGE = (ROOT / "docs/mechanisms.md").read_text(encoding="utf-8")
PROGRAMS_PAGE = (ROOT / "docs/programs.md").read_text(encoding="utf-8")
FOLDERS = "data|config|docs|tests|results|nanoheads|study|lab"

# a reader's own file, and placeholders
NOT_OURS = {"mine.py", "other.py", "PROGRAM.py", "data/NAME/prepare.py", "base_train.py"}
# a write-up's programs, in the table of what they are called here
NOT_OURS |= {"train_novel.py", "evaluate_models_binary.py", "plot_training_curves.py",
             "sample_both_models.py"}
SOURCES = [path for place in ("*.py", "nanoheads/*.py", "study/*.py", "lab/**/*.py", "data/**/*.py")
           for path in ROOT.glob(place)]


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

@pytest.mark.parametrize("page", OF_TODAY, ids=name_of)
def test_files_named_in_the_docs_exist(page):
    """By their path from the root, by their path in the package, or a module by its name alone."""
    files = rf"(?:{FOLDERS})/[\w/\-]+\.(?:py|md|ipynb|json(?:\.gz)?|css)|\b[\w/]+\.(?:py|sh)\b"
    known = {p.name for p in (*SOURCES, *ROOT.glob("*.sh"), *ROOT.glob("tests/**/*.py"))}
    known |= {f"{p.parent.name}/{p.name}" for p in SOURCES} | NOT_OURS
    missing = {n for n in re.findall(files, without_commits(text_of(page))) if n not in known
               and not (ROOT / n).exists() and not (page.parent / n).exists() and not n.endswith("/mine.py")}
    assert not missing


def test_pages_named_in_the_code_exist():
    named = {n for p in SOURCES for n in re.findall(r"\bdocs/[\w/\-]+\.md\b", p.read_text(encoding="utf-8"))}
    assert named and all((ROOT / n).exists() for n in named), {n for n in named if not (ROOT / n).exists()}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


def texts_in(path):
    """The texts in the code of a file, docstrings left out; what stands in braces is "?"."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "?" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def test_advice_to_lower_or_raise_something_names_a_key():
    keys = configurator.keys_of((configurator.Presets, GPTConfig, TrainConfig, StudyConfig))
    # "lower is better", "lower than", "a lower val loss", "validation loss", a place in a picture
    found, words = set(), {"is", "than", "val", "validation", "center", "right", "it"}
    for path in SOURCES:
        for text in texts_in(path):
            found |= set(re.findall(r"\b(?:lower|higher|raise) ([a-z]\w*)", text))
    assert found - words - set(keys) == set() and {"block_size", "n_embd"} <= found


def test_every_test_that_the_page_of_trust_names_is_there():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")))
    there = {name for path in ROOT.glob("tests/**/test_*.py")
             for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)}
    assert len(named) > 20 and named - there == set()


# ---- the README ----

@pytest.mark.parametrize("page", [README, PROGRAMS_PAGE], ids=["README.md", "docs/programs.md"])
def test_every_flag_named_beside_the_programs_is_a_key_or_an_argument(page):
    sources = "".join(p.read_text(encoding="utf-8") for p in SOURCES)
    text = re.sub(r"^```python.*?^```$", "", page, flags=re.M | re.S)  # the flags of an example are its own
    named = set(re.findall(r"(?<!\w)--(?:no-)?(\w+)", text)) - {"dropot", *other_names.NAMES}
    assert len(named) > 10
    for flag in named:
        assert re.search(rf"""^    {flag}: |--{flag}\b|more\["{flag}"\]""", sources, re.M), f"--{flag}"


def test_a_mistake_is_answered_as_the_page_shows(capsys):
    shown = PROGRAMS_PAGE.split("```\n$ python train.py ")[1].split("```")[0]
    command, *lines_there = shown.splitlines()
    with pytest.raises(SystemExit) as e:
        main(command.split())
    lines = [line for line in str(e.value.code).splitlines() if "is not prepared" not in line]  # no data here
    assert capsys.readouterr().out == "" and lines == lines_there


def test_the_mechanism_of_the_readme_is_the_first_of_its_page():
    """Which tests/lab/mechanisms/test_add_a_mechanism.py holds to every promise."""
    on_readme = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    assert len(on_readme) == 2 and set(on_readme) < set(EXAMPLES)


def test_the_table_of_the_front_page_is_the_explained_one_with_fewer_columns():
    found = docs_tables.read_and_judge(ROOT / "results" / "all-tiny.json.gz")
    short, whole = ([line.strip("|").split("|")
                     for line in docs_tables.TABLES[kind](*found, ["diff"]).splitlines()]
                    for kind in ("front", "explained"))
    columns = [whole[0].index(title) for title in short[0]]
    assert len(columns) == 6 < len(whole[0]) and short == [[row[i] for i in columns] for row in whole]


def test_every_dataset_of_the_readme_has_its_script_and_the_other_way_round():
    table = re.findall(r"^\| (`.*?) \|", section("Data"), re.M)
    named = {name for row in table for name in re.findall(r"`(\w+)`", row)}
    assert named == {p.parent.name for p in ROOT.glob("data/*/prepare.py")}


def test_the_readme_has_a_command_of_every_program_and_its_page_a_section():
    """What makes or measures something for one program alone, such as lab/label.py, has the section alone."""
    at_root = {path.stem for path in ROOT.glob("*.py")} - {"model"}
    of_lab = {path.stem for path in ROOT.glob("lab/*.py")} - {"__init__"}
    for program in (*(f"{name}.py" for name in at_root), *(f"-m lab.{name}" for name in OF_LAB)):
        assert f"\npython {program} " in README, program
    for program in (*(f"{name}.py" for name in at_root), *(f"lab/{name}.py" for name in of_lab)):
        assert f"\n## {program}\n" in PROGRAMS_PAGE, program


def test_the_readme_names_the_tests():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = set(re.findall(r"\bmake ([\w-]+)", README))
    assert {"demo", "test", "test-all", "gpu-check"} <= named
    assert named <= targets


def test_the_readme_lists_every_mechanism():
    named = set(re.findall(r"`(\w+)[=`]", section("Mechanisms")))
    assert {cls.flag for cls in MECHANISM_CLASSES} <= named


def test_the_page_of_tasks_has_each_with_its_levels_and_a_row():
    page = (ROOT / "docs/tasks.md").read_text(encoding="utf-8")
    found = {name: [cell.strip() for cell in cells[1:4]] for name, cells in rows(page).items()}
    assert found == {name: [task.unit, *(", ".join(map(str, levels)) for levels in (
        task.levels, task.test_levels))] for name, task in TASKS.items()}
    assert re.findall(r"^==== (\w+), \d+ ", page, re.M) == list(TASKS)


# ---- docs/mechanisms.md ----

def flags_of_mechanisms():
    """The fields of GPTConfig that turn a mechanism on, or are its details; and what pruning leaves."""
    names = {name for cls in MECHANISM_CLASSES for name in flags_of(cls)} | {"head_ids"}
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
    described = re.findall(r"(\w+)=([^\s`]+)", flags)
    assert dict(described) == {key: "[...]" if isinstance(value, list) else str(value)
                          for key, value in MECHANISMS[name].items()}
    assert neutral.startswith("none") != (name in NEUTRAL)
    for key, value in NEUTRAL.get(name, {}).items():
        if isinstance(value, float) and value:
            assert f"{value:g}" in neutral, key


@pytest.mark.parametrize("page", ["mechanisms.md", "claims.md"])
def test_every_name_of_code_is_in_the_code(page):
    """Flags, entries, classes, functions, tests, keys of traces: what stands alone between backticks."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    named = set(re.findall(r"`([A-Za-z_][A-Za-z0-9_]+)(?:\([^`]*\))?`", text))
    paths = (*SOURCES, *ROOT.glob("tests/**/test_*.py"))
    words = set(re.findall(r"\w+", "".join(path.read_text(encoding="utf-8") for path in paths)))
    assert len(named) > 20 and named - words == set()


# ---- commands ----

class Read(Exception):
    """A program has read its arguments, and would now begin."""


def commands(page):
    """The command lines of a page that begin with python, whole, without comments; none of another commit."""
    text = without_commits(text_of(page))
    text = re.sub(r"^    ", "", text, flags=re.M) if page.suffix == ".md" else text
    found = re.findall(r"^(?:\.venv/bin/)?python (.*)$", text.replace("\\\n", "\0"), re.M)
    lines = (line.replace("\0--", " --").replace("\0", "") for line in found)
    return [shlex.split(line, comments=True) for line in lines]


def is_whole(words):
    """Whether no part of a command stands for what a reader chooses: FILE, DIR, <plain>, ..."""
    line = " ".join(word for word in words if not word.startswith("--settings"))
    return not re.search(r"\.\.\.|[<>\[\]]|\b(FILE|DIR|NAME|PROGRAM)\b|mine\.(py|yaml)", line)


def read_arguments(words, monkeypatch):
    """Run a command until it has read its arguments; SystemExit with its message where it refuses them."""
    def until_read(function):
        def stop(*args, **kwargs):
            function(*args, **kwargs)
            raise Read
        return stop
    if words[0] == "-m":
        words = [words[1].replace(".", "/") + ".py", *words[2:]]
    for place, name in ((argparse.ArgumentParser, "parse_args"), (configurator, "validate"),
                        (start, "check_configs")):
        monkeypatch.setattr(place, name, until_read(getattr(place, name)))
    with pytest.raises(Read):
        importlib.import_module(words[0].removesuffix(".py").replace("/", ".")).main(words[1:])


COMMANDS = sorted({tuple(words) for page in OF_TODAY for words in commands(page)
                   if is_whole(words)})
MISSING = "is not prepared|no dataset data/mine|no labels 'weak'"  # here, and made by a command before


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_of_the_docs_is_read(words, monkeypatch, own_mechanisms_go):
    """The program, its flags and their values exist; what they do, its own tests say."""
    try:
        read_arguments(words, monkeypatch)
    except SystemExit as e:
        lines = str(e.code).splitlines()
        assert lines and all(re.search(MISSING, line) for line in lines), e.code


# ---- docs/claims.md: the commands in its tables ----

def claimed():
    """{command as it is printed: its words}: what a reader fills in is x; commands of older commits aside."""
    found = {}
    cells = re.split(r"[|\n]", without_commits((ROOT / "docs/claims.md").read_text(encoding="utf-8")))
    for cell in cells:
        for text in re.findall(r"`((?:python |pytest |\w+\.py )[^`]*)`", cell):
            line = re.sub(r"(?<=--ckpt )(<[^>]*>|\.\.\.)", "x", text.replace("ALL", "config/studies/all.py"))
            line = line.replace(" ... ", " --ckpt x ")
            found[text] = shlex.split(line.removeprefix("python ").removeprefix("-m pytest "))
    return found


CLAIMED = claimed()


@pytest.mark.parametrize("text", [text for text in CLAIMED if "pytest" not in text])
def test_every_command_of_a_claim_is_read(text, monkeypatch, own_mechanisms_go, capsys):
    """Some are named by their program and part alone: of these no more may be wrong than that."""
    try:
        read_arguments(CLAIMED[text], monkeypatch)
    except SystemExit as e:
        said = capsys.readouterr().err if e.code == 2 else str(e.code)
        lines = said.strip().splitlines()[-1:] if e.code == 2 else said.splitlines()
        assert lines and all(re.search(f"{MISSING}|arguments are required: --ckpt", line) for line in lines)


def test_the_tests_of_a_claim_are_there():
    """Files, and with -k a word that is in the name of a test of theirs."""
    tested = [words for text, words in CLAIMED.items() if "pytest" in text]
    assert len(tested) > 2
    for words in tested:
        word = words[words.index("-k") + 1] if "-k" in words else ""
        for file in (file for file in words if file.endswith(".py")):
            assert re.search(rf"^def test_\w*{word}", (ROOT / file).read_text(encoding="utf-8"), re.M), file


def read_before_made(page):
    """The run folders and label sets that commands of a page read and no command before it has made."""
    made, lacking = set(), []
    for words in commands(page):
        line = " ".join(words)
        lacking += [at for at in re.findall(r"--(?:ckpt|plain)[ =](\S+)|--(labels[ =]\w+)", line)
                    if not made & {*at}]
        made.update(re.findall(r"--out_dir[ =](\S+)", line))
        made.update(f"labels {name}" for name in re.findall(r"--by[ =](\w+)", line))
    return lacking


def test_no_page_repeats_a_command_that_refuses_to_be_repeated():
    """A run's folder and an exported one are not written twice, so a reader of README.md is refused."""
    first = {tuple(words) for words in commands(ROOT / "README.md")
             if is_whole(words) and {"train.py", "lab.export_hf"} & {*words}}
    repeated = {page.name: first & {tuple(words) for words in commands(page)}
                for page in OF_TODAY if page != ROOT / "README.md"}
    assert len(first) > 2 and not any(repeated.values()), repeated


def test_the_page_of_constraint_heads_makes_what_its_commands_read(tmp_path):
    page = ROOT / "docs" / "constraints.md"
    assert len(commands(page)) > 8 and read_before_made(page) == []
    for gone in ("--out_dir=out/p1", "--by=weak"):  # a control
        (tmp_path / "page.md").write_text(text_of(page).replace(gone, ""))
        assert read_before_made(tmp_path / "page.md")


def test_commands_of_another_commit_are_not_read(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("    python a.py\n    git checkout 86da9e9    # lab/x.py\n    python b.py \\\n"
                    "        --one\n\n    python c.py\n\n```sh\npython d.py\ngit checkout 86da9e9\n"
                    "python e.py\n```\n"
                    "\n    python f.py\n")
    assert commands(page) == [["a.py"], ["c.py"], ["d.py"], ["f.py"]]
    assert "lab/x.py" not in without_commits(page.read_text())
    assert without_commits("| a | at commit 86da9e9: `b.py` | c |") == "| a || c |"


@pytest.mark.parametrize("line", ["train.py --scale=tiny --muon_rate=1",
                                  "sample.py --ckpt x --temprature 1",
                                  "compare.py config/studies/none.py",
                                  "-m lab.prune --ckpt x --to much --by all"])
def test_a_command_with_a_mistake_is_not_read(line, monkeypatch):
    with pytest.raises(SystemExit):
        read_arguments(line.split(), monkeypatch)
