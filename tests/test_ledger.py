"""The ledger: every comparison on file as a row of a page that sorts, filters and opens by hand and key."""

import gzip
import json
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from compare import main
from conftest import ROOT, forget_own_mechanisms, without_own_mechanisms
from nanoheads.hub import own_mechanism as own
from nanoheads.study import analysis, findings, fingerprint, ledger, ledger_page, results, trial
from nanoheads.study.analysis import BOTH
from test_add_a_mechanism import mine  # noqa: F401
from test_compare import finished, here, plain, study_of  # noqa: F401
from test_report import make_found, poisoned

CODE = re.compile(r"(data-code='|class=code>)(older|unknown|today(?:&#x27;|&apos;|')s)")
CLAIMS = """# Claims
## R · Learned routing
| | claim | our test | result | verdict | command |
|---|---|---|---|---|---|
| R1 | heads of choice | `routing_inf`, judged | +0.1 | **worse** | `compare.py config/studies/all.py` |
| | … without a \\| mask | `routing_zero` | +0.2 | worse | the same |
| R2 | fast | steps | 2 x | refuted | as R1 |
## A · A2C attention
| | claim | our test | result | verdict | command |
|---|---|---|---|---|---|
| A1 | better | `temperature`, judged | 0 | undecided | `compare.py config/studies/heads.py` |
"""


@pytest.fixture(scope="module")
def rows():
    with without_own_mechanisms():  # some runs are of mechanisms in files
        return ledger.rows_of(ROOT / "results")


def studies():
    """(file, study) of every size and text on file, and of several texts together."""
    for path in sorted((ROOT / "results").glob("*.json.gz")):
        found = results.read(path)
        for study in trial.studies_in(found).values():
            yield path, study
        if "texts" in found:
            yield path, {**analysis.pooled(found), "screened": None}  # on one text alone


def without_code(page):
    return CODE.sub(r"\1", page)


# ---- rows ----

def test_every_comparison_screened_variant_and_plain_gpt_has_a_row(rows):
    want = []
    for path, study in studies():
        want += [(path.name, c["variant"], findings.interval(c), c["verdict"]) for c in study["comparisons"]]
        want += [(path.name, row["variant"], findings.interval(row), "screened")
                 for row in study["screened"] or ()]
        want += [(path.name, "plain", "–", "baseline")] * bool(study["runs"])  # once for each text
    labels = {(path.name, name): findings.label_of(study, name)
              for path, study in studies() for name in study["arms"]}
    got = [(row["file"], row["label"], row["difference"], row["verdict"]) for row in rows]
    assert sorted(got) == sorted((file, labels.get((file, name), name), *more) for file, name, *more in want)
    assert len({row["id"] for row in rows}) == len(rows) > 150
    assert not [row["id"] for row in rows if re.search(r"[^\w+.-]", row["id"])]


def test_a_difference_is_that_of_the_means_of_its_runs(rows):
    """The slow way: the nats of each run's blocks, summed, in float64."""
    checked = 0
    for path, study in studies():
        bpb = {name: sum(run["block_nats"]) / np.log(2) / run["bytes"]
               for each in study.get("texts", {"": study}).values() for name, run in each["runs"].items()}
        for row in rows:
            of_study = row["file"] == path.name and row["text"] == study["data"]["dataset"]
            if not of_study or row["verdict"] == "baseline" or not {*row["runs"][0][2].split(BOTH)} <= {*bpb}:
                continue
            sides = [np.mean([bpb[part] for run in study["arms"][name]["runs"] for part in run.split(BOTH)])
                     for name in (row["label"], "plain") if name in study["arms"]]
            if row["stage"].startswith("judged") and row["against"] == "plain GPT" and len(sides) == 2:
                seeds_matter = row["id"].startswith(("ladder-nano.0-33M", "controls-tiny", "dose-tiny",
                                                     "value_embedding-depth6", "all-tiny",
                                                     "scenarios-tiny"))
                seeds_matter = seeds_matter and row["text"] != "enwiki15"  # there no effect of a seed shows
                off = 2e-3 if seeds_matter else 1e-6
                assert row["mean"] == pytest.approx(sides[0] - sides[1], abs=off), row["id"]
                checked += 1
    assert checked > 60


def test_screened_rows_have_no_verdict_and_say_where_they_were_scored(rows):
    for row in rows:
        assert (row["verdict"] in findings.MEANING) == row["stage"].startswith("judged")
        assert row["stage"] in ledger.STAGES and row["runs"] and row["date"]
        assert row["file"] not in ledger.TIMES_DISTURBED or (
            row["time"] == "–" and not row["time_value"] and "At equal time" not in dict(row["facts"]))
    assert sum(row["time"] != "–" for row in rows) > 50 and ledger.TIMES_DISTURBED <= {
        row["file"] for row in rows}
    on_validation = {row["file"] for row in rows if row["stage"] == "judged on validation"}
    assert on_validation == {"rivals-tiny.json.gz", "rivals-more-tiny.json.gz"}
    sizes = {row["size"] for row in rows if row["file"] == "ladder-nano.json.gz"}
    assert sizes == {"0.10 M", "0.33 M", "0.98 M"}


def test_a_row_knows_its_claims_and_the_chapter_of_its_formula(rows):
    row = next(row for row in rows if row["id"] == "all-tiny.routing_inf.judged")
    assert {"R1", "R5"} <= {number for number, *_ in row["claims"]} and row["kinds"] == ["routing"]
    page = (ROOT / "docs/mechanisms.md").read_text(encoding="utf-8")
    assert ledger_page.chapter_of("routing", page) == ("1. Routing", "1-routing")
    of_a_file = {"control"}  # tests/controls.py
    assert all(ledger_page.chapter_of(flag, page) for row in rows for flag in {*row["kinds"]} - of_a_file)
    links = re.findall(r"href='(\w+\.md)#([^']*)'", ledger_page.html(rows))
    headings = {name: {ledger.anchor(heading) for heading in re.findall(
        r"^#+ (.*)$", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.M)} for name, _ in links}
    assert {"mechanisms.md", "claims.md"} == {*headings} and all(a in headings[name] for name, a in links)


def test_claims_are_read_with_their_section_names_and_command():
    claims = ledger.claims_of(CLAIMS)
    assert [claim[:4] for claim in claims] == [
        ("R1", "r--learned-routing", "heads of choice", "worse"),
        ("R1", "r--learned-routing", "… without a | mask", "worse"),
        ("R2", "r--learned-routing", "fast", "refuted"),
        ("A1", "a--a2c-attention", "better", "undecided")]
    assert [claim[5] for claim in claims] == [{"all"}, {"all"}, {"all"}, {"heads"}]

    def numbers(name, study):
        return [number for number, *_ in ledger.naming(claims, name, study)]
    assert numbers("routing_zero", "x") == ["R1"] and numbers("a2c_temperature", "x") == ["A1"]
    assert numbers("steps", "x") == [] and numbers("l0", "heads") == ["A1"]


# ---- the page on file ----

def test_the_page_on_file_is_what_results_give_but_for_the_code(rows):
    """Whether the code is today's changes with each commit; everything else follows from results/."""
    page = (ROOT / "docs" / "ledger.html").read_text(encoding="utf-8")
    assert without_code(page) == without_code(ledger_page.html(rows)), "run python compare.py --ledger"
    assert len(page.encode()) < 1_500_000 and len(CODE.findall(page)) == 2 * len(rows)
    assert without_code(page) != without_code(ledger_page.html(rows[1:]))  # control


def test_the_short_table_has_the_most_telling_row_of_a_mechanism(rows):
    def lines_of(rows, start=""):
        return [line for line in ledger.short_table(rows).splitlines() if line.startswith(start)]

    lines = lines_of([{**row, "code": ledger.NOW} for row in rows])
    assert len({line.split(" |")[0] for line in lines}) == len(lines)
    largest, = [line for line in lines if line.startswith("| constraint\\_a |")]
    assert "0.98 M" in largest and "judged on test" in largest
    older = [{**row, "code": ledger.NOW if row["file"] == "all-tiny.json.gz" else ledger.OLDER}
             for row in rows]
    newest, = lines_of(older, "| constraint\\_a |")
    assert "0.10 M | wikitext2\\_byte and enwiki15 |" in newest and "judged on test" in newest
    assert "screened" in next(line for line in lines if line.startswith("| window |"))


# ---- today's code ----

@pytest.fixture
def filed(finished, tmp_path, monkeypatch):  # noqa: F811
    """A finished study in a results/ of its own: (path, study's results); --ledger writes beside it."""
    folder = tmp_path / "results"
    folder.mkdir()
    shutil.copy("out/test/results.json.gz", folder / "test.json.gz")
    monkeypatch.setattr(ledger, "RESULTS", folder)
    monkeypatch.setattr(ledger, "PAGE", tmp_path / "ledger.html")
    return folder / "test.json.gz", finished[1]


def write_file(path, found):
    path.write_bytes(gzip.compress(json.dumps(found).encode()))


def test_a_row_is_of_todays_code_until_that_changes(filed, monkeypatch):
    path, found = filed
    assert {row["code"] for row in ledger.rows_of(path.parent)} == {"today's"}
    digest = fingerprint.code_digest

    def changed(config, training=None):
        return "other" if config.output_gate else digest(config, training)
    monkeypatch.setattr(fingerprint, "code_digest", changed)
    codes = {row["name"]: row["code"] for row in ledger.rows_of(path.parent)}
    assert codes == {"output_gate": "older", "unet_concat": "today's", "plain": "today's"}
    monkeypatch.undo()
    for run in found["runs"].values():
        run["spec"]["model"]["a_flag_that_is_gone"] = 1
    write_file(path, found)
    assert {row["code"] for row in ledger.rows_of(path.parent)} == {"older"}


def test_the_command_writes_the_page_and_prints_the_table(filed, capsys):
    path, _ = filed
    main(["--ledger"])
    printed = capsys.readouterr().out
    assert "| output\\_gate | 0.01 M |" in printed and "3 rows of 1 files, 0 of them of older code" in printed
    page = ledger.PAGE.read_text(encoding="utf-8")
    assert page.count("<tbody role=rowgroup") == 3
    main(["--ledger"])
    assert ledger.PAGE.read_text(encoding="utf-8") == page


def test_a_figure_that_its_runs_do_not_give_is_refused(filed):
    path, found = filed
    for change in (lambda f: f["comparisons"][0].__setitem__("mean", -0.5),
                   lambda f: f["comparisons"][1].update(verdict="better"),
                   lambda f: f["arms"]["output_gate"]["bpb"].__setitem__(0, 2.0)):
        copy = json.loads(json.dumps(found))
        change(copy)
        write_file(path, copy)
        with pytest.raises(SystemExit, match="figures are not what its runs give; --recheck="):
            main(["--ledger"])
    assert not ledger.PAGE.exists()


# ---- a challenge's folder ----

@pytest.fixture
def challenge(plain, here, mine, tmp_path, monkeypatch):  # noqa: F811
    """The folder that a challenge with a mechanism in a file of one's own has left; results/ is empty."""
    path = mine()
    own.add(path)
    folder = tmp_path / "out" / "challenge-forget-tiny"
    study = study_of(plain, seeds=[5, 6], mechanisms=["forget"], out_dir=str(folder), match_parameters=False)
    study.run(here)
    found = results.collect(study, "python compare.py --mechanism=mine.py")
    results.write(found, folder)
    shutil.copy(path, folder)
    results.write_sums(folder)
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(ledger, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(ledger, "PAGE", tmp_path / "ledger.html")
    return folder


def test_a_challenge_is_rechecked_and_then_a_row(challenge, capsys, monkeypatch):
    main(["--ledger", "add", str(challenge)])
    printed = capsys.readouterr().out
    assert "all of them the same" in printed and "nothing was trained again" in printed
    target = ledger.RESULTS / "challenge-forget-tiny.json.gz"
    assert target.read_bytes() == (challenge / "results.json.gz").read_bytes()
    row, = [row for row in ledger.rows_of(ledger.RESULTS) if row["name"] == "forget"]
    assert row["code"] == "today's" and row["verdict"] in findings.MEANING
    assert "id='challenge-forget-tiny.forget.judged'" in ledger.PAGE.read_text(encoding="utf-8")
    # its file went along, and its figures are computed once more without running it
    copy = ledger.RESULTS / "challenge-forget-tiny" / "mine.py"
    assert own.digest(copy) == own.digest(challenge / "mine.py")
    forget_own_mechanisms()
    monkeypatch.setattr(own, "add", None)
    assert "; 3 more, of models, need the code of a mechanism" in results.recheck(target)


def test_the_ledger_runs_nothing_of_a_results_file(challenge, tmp_path, monkeypatch):
    """Neither what lies beside it, nor what its runs name by an absolute path."""
    marker, evil = tmp_path / "marker", tmp_path / "evil.py"
    (challenge / "mine.py").write_text(f"open({str(marker)!r}, 'w')")
    evil.write_text(f"open({str(marker)!r}, 'w')")

    def change(found):
        for run in found["runs"].values():
            if "mechanism" in run["spec"]["data"]:
                run["spec"]["train"]["own_mechanism"] = str(evil)
                run["spec"]["data"]["mechanism"] = own.opened(evil).sha256
    resummed(challenge, change)
    forget_own_mechanisms()
    for argv in (["--ledger", "add", str(challenge)], ["--ledger"],
                 [f"--recheck={challenge / 'results.json.gz'}"],
                 [f"--from_results={challenge / 'results.json.gz'}", f"--out_dir={tmp_path / 'again'}"]):
        with suppress(SystemExit):
            main(argv)
        assert not marker.exists(), argv
    assert (tmp_path / "again" / "results.json.gz").is_file() or any((tmp_path / "again").iterdir())


def resummed(folder, change):
    found = results.read(folder / "results.json.gz")
    change(found)
    write_file(folder / "results.json.gz", found)
    results.write_sums(folder)


def unlisted(folder):
    lines = (folder / "SHA256SUMS").read_text().splitlines(keepends=True)
    (folder / "SHA256SUMS").write_text("".join(line for line in lines if "mine.py" not in line))


def changed_score(found):
    found["arms"]["forget"]["bpb"][0] -= 0.1


REFUSED = {
    "no SHA256SUMS": lambda folder: (folder / "SHA256SUMS").unlink(),
    "is not the file": lambda folder: (folder / "mine.py").write_text("# another"),
    "is missing": lambda folder: (folder / "mine.py").unlink(),
    "does not list mine.py": unlisted,
    "is no digest and name": lambda folder: (folder / "SHA256SUMS").write_text("0 ../../etc/passwd\n"),
    "figures are not what its runs give": lambda folder: resummed(folder, changed_score),
    "another study's": lambda folder: (ledger.RESULTS / f"{folder.name}.json.gz").write_bytes(b"x"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_folder_that_is_not_whole_or_not_true_is_refused(challenge, words):
    REFUSED[words](challenge)
    before = sorted(path.name for path in ledger.RESULTS.rglob("*"))
    with pytest.raises(SystemExit) as e:
        main(["--ledger", "add", str(challenge)])
    assert words in e.value.code and "\n" not in e.value.code and e.value.code.startswith("compare: ")
    assert sorted(path.name for path in ledger.RESULTS.rglob("*")) == before and not ledger.PAGE.exists()


def test_add_needs_a_folder():
    assert ledger.folder_to_add(["--ledger", "add", "x", "--alpha=0.1"]) == (["--ledger", "--alpha=0.1"], "x")
    assert ledger.folder_to_add(["a.py", "--ledger"]) == (["a.py", "--ledger"], None)
    with pytest.raises(SystemExit, match="name a challenge's folder"):
        main(["--ledger", "add"])
    with pytest.raises(SystemExit, match="nowhere has no SHA256SUMS"):
        main(["--ledger", "add", "nowhere"])


# ---- a browser ----

PAGE = ROOT / "docs" / "ledger.html"
SHOWN = "[...document.querySelectorAll('#ledger > tbody')].filter(e => !e.hidden)"
COUNT = "document.querySelector('#count').textContent"
OPEN = "[...document.querySelectorAll('.more')].filter(e => e.offsetHeight > 0).length"
HEAD = "[...document.querySelectorAll('#ledger > thead th')]"


def column(browser, i):
    return browser.ask(f"{SHOWN}.map(e => e.rows[0].cells[{i}].dataset.sort)")


def test_in_a_browser_headers_sort_by_click_and_by_key(browser):
    browser.open(PAGE, 1280)
    i = browser.ask(f"{HEAD}.findIndex(h => h.textContent.startsWith('difference'))")
    listed = column(browser, i)

    def is_sorted(way):
        got = column(browser, i)
        values = [float(v) for v in got if v]
        assert values == sorted(values, reverse=way == "descending") != [] and values != listed
        assert not any(got[len(values):]) and sorted(got) == sorted(listed)  # what is unknown is last
        said = browser.ask(f"{HEAD}.map(h => h.getAttribute('aria-sort'))")
        assert said == [way if k == i else "none" for k in range(len(said))]

    browser.point(f"{HEAD}[{i}].firstChild", click=True)
    is_sorted("ascending")
    browser.press("Enter")  # the button that was clicked has the focus
    is_sorted("descending")
    for _ in range(2):
        browser.press("Tab")
    browser.press("Enter")
    assert browser.ask(f"{HEAD}[{i + 2}].getAttribute('aria-sort')") == "ascending"
    browser.point(f"{HEAD}[0].firstChild", click=True)
    names = column(browser, 0)
    assert names == browser.ask(f"{json.dumps(names)}.sort((a, b) => a.localeCompare(b))")


def test_in_a_browser_filters_and_search_leave_what_matches(rows, browser):
    browser.open(PAGE, 1280)
    assert browser.ask(COUNT) == f"{len(rows)} of {len(rows)} rows"

    def choose(key, value):
        browser.ask(f"document.querySelector('#{key}').value = {json.dumps(value)};"
                    f"document.querySelector('#{key}').dispatchEvent(new Event('input', {{bubbles: true}}))")

    def left():
        return sorted(browser.ask(f"{SHOWN}.map(e => e.id)"))

    for key in ("verdict", "size", "text", "recipe", "stage"):
        for value in {row[key] for row in rows}:
            choose(key, value)
            assert left() == sorted(row["id"] for row in rows if row[key] == value)
        choose(key, "")
    choose("verdict", "better")
    choose("stage", "judged on test")
    browser.ask("document.querySelector('#search').focus()")
    for key in "constraint_a":
        browser.press(key)
    found = [row for row in rows if row["verdict"] == "better" and row["label"].startswith("constraint_a")]
    assert left() == sorted(row["id"] for row in found) and len(found) > 1
    assert browser.ask(COUNT) == f"{len(found)} of {len(rows)} rows"
    browser.point("document.querySelector('button[type=reset]')", click=True)
    end = time.monotonic() + 10
    while browser.ask(COUNT) != f"{len(rows)} of {len(rows)} rows":
        assert time.monotonic() < end
    assert left() == sorted(row["id"] for row in rows) and browser.ask("search.value") == ""


@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser_a_row_opens_by_key_and_by_link(width, rows, browser):
    browser.open(PAGE, width)
    assert browser.ask(OPEN) == 0
    browser.ask("document.querySelector('#ledger summary').focus()")
    browser.press("Enter")
    assert browser.ask(OPEN) == 1
    text = browser.ask("document.querySelector('.more').innerText")
    for words in ("What the study says", f"Runs ({rows[0]['seeds']})", "Write-up and claims",
                  "--from_results=results/all-"):
        assert words in text
    browser.press(" ")
    assert browser.ask(OPEN) == 0
    browser.open(PAGE, width, place="#all-tiny.key_offset.judged")
    assert browser.ask(OPEN) == 1
    top = browser.ask("document.getElementById('all-tiny.key_offset.judged').getBoundingClientRect().top")
    assert 0 <= top < 844


def test_in_a_browser_any_text_is_text_and_every_width_fits(browser, tmp_path):
    found = poisoned(make_found(3))
    found["arms"]["plain"]["label"] = "plain GPT"
    study = {**found, "plain": {**found["plain"], "recipe": "modern", "optimizer": "muon"}}
    made = ledger.File(Path("bad.json.gz"), "", study, [], {})
    made.code_of = lambda runs: "unknown"
    made.flags_of = lambda runs: {}
    bad = tmp_path / "bad.html"
    bad.write_bytes(ledger_page.html(made.rows()).encode("utf-8", "replace"))
    assert "<script>alert" not in bad.read_text(encoding="utf-8")
    for page in (PAGE, bad):
        for width, dark in ((390, True), (360, False), (1200, False)):
            browser.open(page, width, dark)
            assert browser.ask("getComputedStyle(document.body).backgroundColor") == (
                "rgb(21, 24, 27)" if dark else "rgb(255, 255, 255)")
            assert browser.ask("document.documentElement.scrollWidth") <= width
            browser.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
            assert browser.ask("document.documentElement.scrollWidth") <= width
            assert browser.ask("[...document.querySelectorAll('body :not(script)')].every(x => "
                               "![...x.childNodes].some(n => n.nodeType == 3 && n.data.trim())"
                               " || parseFloat(getComputedStyle(x).fontSize) >= 14)")
