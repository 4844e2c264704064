"""What compare.py refuses, each in one line that names the mistake, and nothing is written."""

import gzip
import json

import pytest
from helpers import check_refusal, under
from runs import write_study

from study import records
from study.config import StudyConfig

NO_RESULTS = {  # files that are no results of a study, and what is said of them
    "cut_short": (gzip.compress(b"{}", mtime=0)[:-9], "is no results file, or it is damaged"),
    "list": (b"[3]", "is no results file of this version"),
    "before": (json.dumps(dict(name="all", runs={}, comparisons=[])).encode(),
               "is no results file of this version; files from before it are read at commit 86da9e9"),
    "no_study": (json.dumps(dict(version=records.VERSION)).encode(), "is damaged: KeyError, 'study'")}
# tables of another program's scores: a line that is wrong, and what is said of it
LINES = [
    ("variant,seed,score", "a,9", "2 cells, where the first line has 3"),
    ("variant,seed,score", ",,1", "no variant and no seed"),
    *(("variant,seed,score", f"a,9,{score}", f"score '{score}' is not a finite number, nor 'failed'")
      for score in ("inf", "1_4695")),
    ("variant,seed,score", "a,9,-1e200", "score '-1e200' is beyond 1e+50"),
    ("variant,seed,score", "a,02.0,1.5", "a with seed 2 is on line 4 already"),
    ("variant,seed,score,tokens", "a,9,2.0,0", "tokens '0' is not a number above 0")]
NO_SCORES = [
    ("", "line 1: no column variant, seed, score; it must name variant, seed, score, and has nothing"),
    ("variant,seed,score,score\n", "score is there twice"),
    ("variant,seed,score\na,1,2.0\n", "has one variant, a: nothing to compare it with"),
    ("x" * 200_000, "line 1: field larger than field limit")]


@pytest.fixture(scope="module")
def home(tmp_path_factory, bytes_data):
    """The files that the rows below name."""
    home = tmp_path_factory.mktemp("home")
    write_study(home, bytes_data)
    for name, (content, _) in NO_RESULTS.items():
        (home / f"{name}.json.gz").write_bytes(content)
    for i, (head, line, _) in enumerate(LINES):
        more = "," * (head.count(",") - 2)
        before = "".join(f"{row}{more}\n" for row in ("plain,1,2.0", "plain,2,2.1", "a,2,1.9"))
        (home / f"line{i}.csv").write_text(f"{head}\n{before}{line}\n", encoding="utf-8")
    for i, (text, _) in enumerate(NO_SCORES):
        (home / f"no_scores{i}.csv").write_text(text)
    (home / "utf16.csv").write_bytes(b"\xff\xfe")
    (home / "two.csv").write_text("variant,seed,score\nplain,1,2\nplain,2,3\na,1,1\na,2,2\n")
    return home


COMMANDS = [
    # ---- the command line, mechanisms, places ----
    *under("compare.py --base=base.py --device=cpu",
        ("", "mechanisms and variants are empty: name at least one variant to compare"),
        ("--mechanisms=output_gat", "unknown 'output_gat'; did you mean output_gate?"),
        ("--mechanism=nowhere.py", "no mechanism file nowhere.py"),
        ("--mechanisms=sink --seeds=[1,1]", "seeds=[1, 1] must be different numbers"),
        ("--mechanisms=sink --settings=\"{'dataset': 'nowhere'}\"", "no dataset nowhere"),
        ("--mechanisms=sink --json=no/such.json", "--json: cannot write into"),
        ("--mechanisms=sink --fresh --accept_code", "fresh trains everything anew, and accept_code takes"),
        ("--mechanisms=sink --target=3", "target goes with compare.py scores FILE alone"),
        ("--variants=\"{'x': {'output_gatee': 1}}\"", "unknown key output_gatee; did you mean output_gate?"),
        ("--variants=\"{'x': {'n_head': 3}}\"", "x: n_embd=16 must be a multiple of n_head=3")),
    ("compare.py --mechanisms=sink --scale=task", ["config/task.py trains on the task recall: add --task"]),
    ("compare.py --mechanisms=sink,xsa,acag --task=all --seeds=1", ["seeds=[1] are too few for a verdict"]),

    # ---- a plan, also where the data is not prepared ----
    *under("compare.py plan --device=cpu --settings=\"{'dataset': 'wikitext103'}\"",
        ("--variants=\"{'x': {'nonsense': 1}}\"", "x: variant with {'nonsense': 1}: unknown key nonsense"),
        ("--variants=\"{'x': {'teacher': 'a'}}\"", "x: teacher='a' is for constraint heads")),

    # ---- files of results ----
    *under("compare.py",
        ("recheck", "recheck takes one file, FILE.json.gz: 0 are given"),
        ("report nowhere.json.gz", "cannot read nowhere.json.gz: No such file"),
        ("report a.json.gz --seeds=1", "report has no key seeds: beside its file it takes --json, --out_dir"),
        *((f"recheck {name}.json.gz", words) for name, (_, words) in NO_RESULTS.items())),

    # ---- scores of another program ----
    *under("compare.py scores",
        ("two.csv --jobs=3", "scores has no key jobs: beside its file it takes --baseline, "),
        ("two.csv --baseline=b", "--baseline=b is no variant of two.csv; it has plain, a"),
        ("two.csv --alpha=2", "alpha=2.0 must be below 1"),
        ("none.csv", "compare: cannot read none.csv: No such file"),
        ("utf16.csv", "cannot read utf16.csv: not UTF-8 text"),
        *((f"line{i}.csv", f"^compare: line{i}.csv, line 5: {words}") for i, (*_, words) in enumerate(LINES)),
        *((f"no_scores{i}.csv", words) for i, (_, words) in enumerate(NO_SCORES))),
]


@pytest.mark.parametrize("command, words", COMMANDS)
def test_a_command_that_cannot_be_is_one_line(command, words, home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    check_refusal(command, words, home, capsys)


# ---- keys that go together, or not ----

PROBLEMS = [
    (dict(mechanism="xsa", mechanisms=["fox"]), "mechanism='xsa' is a study of its own: leave out"),
    (dict(variants={"a": 3}), "variants: 'a' must be a dict of flags, not 3"),
    (dict(variants={"a": dict(dataset="x")}), "a: dataset cannot be set here: a study decides it for every "
                                              "run; settings can"),
    (dict(settings=dict(seed=3)), "settings: seed cannot be set here"),
    (dict(variants={"a, adamw_lr x 2": {}}), "variants: the name 'a, adamw_lr x 2' is taken"),
    (dict(contrasts=[["xsa", "nobody"]]), "contrasts: ['xsa', 'nobody'] must be two of this"),
    (dict(texts=["a", "x/a"]), "each once"),
    (dict(texts=["a", "b"], settings=dict(dataset="c")), "without settings of a dataset beside them"),
    (dict(base="config/nano.py", scale="mid"), "scale='mid' means nothing beside base='config/nano.py'"),
    (dict(task=["recal"]), "task: unknown 'recal'; there are recall"),
    (dict(task=["recall"], screen=True), "screen is for a study of texts"),
    (dict(task=["recall"], settings=dict(dataset="a")), "dataset='a' is of a text, not of a task"),
    (dict(budgets=[1.0]), "budgets=[1.0] must be different, positive, at most 1000, and not 1"),
    (dict(screen=True, seeds=[101]), "screen_seeds=[101, 102] choose, and seeds=[101] judge: none in both"),
    (dict(plain_seeds=2), "plain_seeds=2 must be at least a variant's, 5"),
    (dict(split="val", tune_lr=True), "split='val' must be test, since val chooses"),
]


@pytest.mark.parametrize("keys, words", PROBLEMS, ids=[words[:40] for _, words in PROBLEMS])
def test_keys_that_cannot_be_together_are_named_in_a_line(keys, words):
    (problem,) = StudyConfig(**{"mechanisms": [] if "mechanism" in keys else ["xsa"], **keys}).problems()
    assert words in problem and "\n" not in problem
