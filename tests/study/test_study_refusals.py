"""What compare.py refuses, each in one line that names the mistake, and nothing is written."""

import gzip
import json

import pytest
from helpers import check_refusal, under

from study import records

NO_RESULTS = {  # files that are no results of a study, and what is said of them
    "empty": (b"", "is no results file, or it is damaged"),
    "two_bytes": (b"\x1f\x8b", "is no results file, or it is damaged"),
    "cut_short": (gzip.compress(b"{}", mtime=0)[:-9], "is no results file, or it is damaged"),
    "damaged": (gzip.compress(b"{}" * 50, mtime=0)[:12] + bytes(40),
                "cannot read damaged.json.gz: it is damaged"),
    "binary": (bytes(range(256)), "is no results file, or it is damaged"),
    "list": (b"[3]", "is no results file of this version"),
    "before": (json.dumps(dict(name="all", runs={}, comparisons=[])).encode(),
               "is no results file of this version; files from before it are read at commit 86da9e9"),
    "other": (json.dumps(dict(version=records.VERSION + 1)).encode(), "is no results file of this version"),
    "no_study": (json.dumps(dict(version=records.VERSION)).encode(), "is damaged: KeyError, 'study'"),
    "no_fields": (json.dumps(dict(version=records.VERSION, study={}, comparisons=[])).encode(), "is damaged")}
# tables of another program's scores: a line that is wrong, and what is said of it
LINES = [
    ("a,9", "2 cells, where the first line has 3"), ("a,9,1,1", "4 cells, where the first line has 3"),
    (",9,1", "no variant"), ("a,,1", "no seed"), (",,1", "no variant and no seed"), ("a,9,", "no score"),
    *((f"a,9,{score}", f"score '{score}' is not a finite number, nor 'failed'")
      for score in ("nan", "inf", "two", "1e400", "1_4695", "١.٤", "0x1")),
    ("a,9,-1e200", "score '-1e200' is beyond 1e+50"),
    *((f"a,{seed},1.5", "a with seed 2 is on line 4 already") for seed in ("2", "02", "2.0", "002.00"))]
SCORES = [("variant,seed,score", line, f"line 5: {words}") for line, words in LINES]
SCORES += [(f"variant,seed,score,{column}", f"a,9,2.0,{value}",
            f"line 5: {column} '{value}' is not a number above 0")
           for column in ("tokens", "bytes", "cost") for value in ("0", "-1", "many", "nan", "1_0")]
NO_SCORES = [
    ("", "line 1: no column variant, seed, score; it must name variant, seed, score, and has nothing"),
    ("variant,score\na,1\n", "line 1: no column seed"),
    ("variant;seed;score\na;1;1,4\n", "and has variant;seed;score; commas separate columns"),
    ("variant,seed,score,score\n", "score is there twice"), ("variant,seed,score\n", "has no runs"),
    ("variant,seed,score\na,1,2.0\n", "has one variant, a: nothing to compare it with"),
    ("x" * 200_000, "line 1: field larger than field limit")]


@pytest.fixture(scope="module")
def home(tmp_path_factory, bytes_data):
    """The files that the rows below name."""
    home = tmp_path_factory.mktemp("home")
    (home / "plain.py").write_text("".join(f"{key} = {value!r}\n" for key, value in dict(
        n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=4, max_iters=6, eval_interval=3,
        eval_tokens=64, dataset=str(bytes_data)).items()))
    for name, (content, _) in NO_RESULTS.items():
        (home / f"{name}.json.gz").write_bytes(content)
    for i, (head, line, _) in enumerate(SCORES):
        more = "," * (head.count(",") - 2)
        before = "".join(f"{row}{more}\n" for row in ("plain,1,2.0", "plain,2,2.1", "a,2,1.9"))
        (home / f"scores{i}.csv").write_text(f"{head}\n{before}{line}\n", encoding="utf-8")
    for i, (text, _) in enumerate(NO_SCORES):
        (home / f"no_scores{i}.csv").write_text(text)
    (home / "utf16.csv").write_bytes(b"\xff\xfe")
    (home / "two.csv").write_text("variant,seed,score\nplain,1,2\nplain,2,3\na,1,1\na,2,2\n")
    (home / "file").write_text("")
    return home


COMMANDS = [
    # ---- keys and mechanisms ----
    *under("compare.py --base=plain.py --device=cpu",
        ("", "mechanisms and variants are empty: name at least one variant to compare"),
        ("--mechanisms=output_gat", "unknown 'output_gat'; did you mean output_gate?"),
        ("--mechanism=qqqq", "unknown 'qqqq'; model.MECHANISMS lists them, docs/add-a-mechanism.md adds one"),
        ("--mechanism=nowhere.py", "no mechanism file nowhere.py"),
        ("--mechanisms=sink --sedes=1,2", "unknown key sedes; did you mean seeds?"),
        ("--mechanisms=sink --seeds=one", "seeds='one' is not"),
        ("--mechanisms=sink --seeds=[1e30]", "numbers of at most"),
        ("--mechanisms=sink --jobs_per_gpu=2", "jobs_per_gpu=2 means nothing on device=cpu"),
        ("--mechanisms=sink --device=cuda:99", "device=cuda:99"),
        ("--mechanisms=sink --settings=\"{'dataset': 'nowhere'}\"", "no dataset nowhere"),
        ("--mechanisms=sink --out_dir=/proc/none", "--out_dir: cannot write into /proc"),
        ("--mechanisms=sink --out_dir=file", "is a file, not a folder"),
        ("--mechanisms=sink --json=/proc/x", "--json: cannot write into /proc"),
        ("--mechanisms=sink --json=no/such.json", "--json: cannot write into"),
        ("--mechanisms=sink --fresh --accept_code", "fresh trains everything anew, and accept_code takes"),
        ("--mechanisms=sink --target=3", "target goes with compare.py scores FILE alone"),
        ("--variants=\"{'x': {'output_gatee': 1}}\"", "unknown key output_gatee; did you mean output_gate?"),
        ("--variants=\"{'x': {'agency': True, 'agency_learned': True}}\"", "agency_learned"),
        ("none.py", "none.py")),

    # ---- a plan, also where the data is not prepared ----
    *under("compare.py plan --device=cpu --settings=\"{'dataset': 'wikitext103'}\"",
        ("--variants=\"{'x': {'nonsense': 1}}\"", "x: variant with {'nonsense': 1}: unknown key nonsense"),
        ("--variants=\"{'x': {'teacher': 'a'}}\"", "x: teacher='a' is for constraint heads"),
        ("--mechanisms=sink --nonsense=1", "unknown key nonsense"),
        ("--mechanisms=sink --settings=\"{'nonsense': 1}\"", "unknown key nonsense")),

    # ---- files of results ----
    *under("compare.py",
        ("recheck", "recheck takes one file, FILE.json.gz: 0 are given"),
        ("recheck a.json.gz b.json.gz", "recheck takes one file, FILE.json.gz: 2 are given"),
        ("recheck a.json.gz --json=b", "recheck has no key json: beside its file it takes no keys"),
        ("recheck nowhere.json.gz", "cannot read nowhere.json.gz: No such file"),
        ("report nowhere.json.gz", "cannot read nowhere.json.gz: No such file"),
        ("report a.json.gz --seeds=1", "report has no key seeds: beside its file it takes --json, --out_dir"),
        *((f"{command} {name}.json.gz", words) for name, (_, words) in NO_RESULTS.items()
          for command in ("recheck", "report"))),

    # ---- scores of another program ----
    *under("compare.py scores",
        ("", "scores takes one file, FILE.csv: 0 are given"),
        ("two.csv two.csv", "scores takes one file, FILE.csv: 2 are given"),
        ("two.csv --jobs=3", "scores has no key jobs: beside its file it takes --baseline, "),
        ("two.csv --baseline=b", "--baseline=b is no variant of two.csv; it has plain, a"),
        ("two.csv --target=low", "target='low' is not"),
        ("two.csv --alpha=2", "alpha=2.0 must be below 1"),
        ("none.csv", "compare: cannot read none.csv: No such file"),
        ("utf16.csv", "cannot read utf16.csv: not UTF-8 text"),
        *((f"scores{i}.csv", f"^compare: scores{i}.csv, {words}") for i, (*_, words) in enumerate(SCORES)),
        *((f"no_scores{i}.csv", words) for i, (_, words) in enumerate(NO_SCORES))),
]


@pytest.mark.parametrize("command, words", COMMANDS)
def test_a_command_that_cannot_be_is_one_line(command, words, home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    check_refusal(command, words, home, capsys)


def test_each_line_of_a_csv_that_is_wrong_is_named(tmp_path, capsys):
    from compare import main
    (tmp_path / "s.csv").write_text("variant,seed,score\nplain,1,2\na,1,x\nb,1\n")
    with pytest.raises(SystemExit) as e:
        main(["scores", str(tmp_path / "s.csv")])
    named = [line.partition("s.csv, ")[2][:7] for line in e.value.code.splitlines()]
    assert named == ["line 3:", "line 4:"]
