"""What a report says of a study, in the terminal, in Markdown, for a program and on a page."""

import json
import math
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser

import pytest
from helpers import ROOT
from made_up import LEAKS, study_of

from study import docs_tables, records, report, tables, words
from study.records import PLAIN, Failure, Result, Run, Variant
from study.scores import from_csv
from study.verdicts import compare_with_target, comparisons_of

NOISE = [0.001 * each for each in (0, 3, -2, 1, -3, 2, -1, 0)]  # over seeds, the same for all


def around(means, spread=1.0, **more):
    """A Study of scores around {variant: mean, or {text: mean}}, with a command of its own."""
    def scores(mean, i):
        return [mean + spread * NOISE[(seed + i) % 8] for seed in range(8)]
    by_variant = {name: {text: scores(each, i) for text, each in mean.items()} if isinstance(mean, dict)
                  else scores(mean, i) for i, (name, mean) in enumerate(means.items())}
    names = ",".join(name for name in means if name != PLAIN)
    return study_of(by_variant, **{**dict(
        question="Is it better?", config=dict(scale="tiny"),
        command=f"python compare.py --mechanisms={names} --seeds=1,2,3,4,5,6,7,8"), **more})


ONE = around({PLAIN: 2.0, "good": 1.9, "bad": 2.1, "even": 2.0005})
OPEN = around({PLAIN: 2.0, "open": 1.975}, spread=15.0)
TWO = around({PLAIN: {"prose": 2.0, "code": 3.0}, "good": {"prose": 1.9, "code": 3.1}})
TASKS = around({name: {"recall": mean, "copy": mean} for name, mean in
                ((PLAIN, 0.4), ("good", 0.95), ("bad", 0.2))}, measure="right answers", margin=0.05,
               guesses={"recall": {"1": 0.25}, "copy": {"1": 0.5}})


def failed(study, variant, count=1, why="loss is not a finite number"):
    """The same study in which runs of a variant failed."""
    lost = [run.name for run in study.runs if run.variant == variant][-count:]
    return replace(study, results={key: each for key, each in study.results.items() if key not in lost},
                   failures={name: Failure(why) for name in lost})


def unfinished(study):
    """The same study with a run left to do."""
    last = study.runs[-1].name
    return replace(study, results={key: each for key, each in study.results.items() if key != last})


def program(study):
    """What a program is told of a study."""
    return report.json_report(study, comparisons_of(study), compare_with_target(study))


def everything(study):
    """{where: text} of all that a person is shown of a study."""
    found, beyond = comparisons_of(study), compare_with_target(study)
    shown = {"terminal": report.in_text(study, found, beyond),
             "markdown": unescaped(report.in_markdown(study, found, beyond)),
             "page": Page(report.page(study, found, beyond)).text}
    return {where: plain_words(text) for where, text in shown.items()}


def plain_words(text):
    return " ".join(text.replace("−", "-").split())


def unescaped(markdown):
    return re.sub(r"\\(.)", r"\1", markdown.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


class Page(HTMLParser):
    """A page that was read: its text, its tags with their attributes; AssertionError: tags do not match."""
    EMPTY = {"meta", "img", "source", "wbr", "br"}

    def __init__(self, page):
        super().__init__()
        self.tags, self.open, self.text, self.styles = [], [], "", ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["style"]:
            self.styles += data
        else:
            self.text += data


# ---- one truth, in four places ----

@pytest.mark.parametrize("study, verdicts", [
    (ONE, {"good": "better", "bad": "worse", "even": "same"}), (OPEN, {"open": "undecided"}),
    (TWO, {"good": "same"}), (TASKS, {"good": "better", "bad": "worse"}),
    (failed(ONE, "good", 2), {"good": "undecided", "bad": "worse", "even": "same"}),
    (unfinished(ONE), dict.fromkeys(("good", "bad", "even"), "unfinished")),
    (replace(ONE, results={}), dict.fromkeys(("good", "bad", "even"), "unfinished"))],
    ids=["one text", "undecided", "two texts", "tasks", "failed", "unfinished", "no runs"])
def test_verdicts_and_figures_are_the_same_everywhere(study, verdicts):
    told = program(study)
    assert {row["variant"]: row["verdict"] for row in told["comparisons"]} == verdicts
    for where, text in everything(study).items():
        for line in (told["headline"], *told["notices"]):
            assert plain_words(line) in text, where
        for row in told["comparisons"]:
            assert study.results == {} or (row["interim_verdict"] or row["verdict"]) in text, where
    if study in (ONE, OPEN):
        for c in comparisons_of(study):
            assert all(plain_words(words.interval(c)) in text for text in everything(study).values())


def test_a_program_gets_no_verdict_of_an_unfinished_study_nor_one_that_a_failure_may_change():
    told = program(unfinished(ONE))
    assert (told["finished"], told["planned"], told["done"], told["follow_up"]) == (False, 32, 31, None)
    row = told["comparisons"][0]
    assert (row["verdict"], row["interim_verdict"]) == ("unfinished", "better")
    told = program(failed(ONE, "good", 2))
    row = told["comparisons"][0]
    assert (row["variant"], row["verdict"], row["failed"], row["withheld"]) == ("good", "undecided", 2,
                                                                                "better")
    for seed in (7, 8):
        assert any(f"good, seed {seed}: loss is not a finite number" in line for line in told["notices"])


@pytest.mark.parametrize("change, facts", [
    (dict(untuned={"good": {"mechanism_lr": 0.016}, "bad": {}}), ["good", "mechanism_lr=0.016"]),
    (dict(other_code={"bad": 3}), ["3 runs", "--accept_code", "bad"]),
    (dict(left_out={"good": [9, 10, 11, 15]}), ["4 of good", "9 to 11, 15"]),
    (dict(whole=dict(steps=60, tokens=6e6, bytes=dict(prose=1000))), ["20 steps", "of 6,000,000 tokens"]),
    (dict(whole=dict(steps=20, tokens=2e6, bytes=dict(prose=10000))), ["10 %"]),
    (dict(variants=(ONE.variants[0], replace(ONE.variants[1], tokens=3e6), *ONE.variants[2:])),
     ["good", "1.50 times"]),
], ids=lambda each: next(iter(each)) if isinstance(each, dict) else "")
def test_what_a_reader_must_know_stands_on_top(change, facts):
    study = replace(ONE, **change)
    (line,) = {*program(study)["notices"]} - {*program(ONE)["notices"]}
    assert all(fact in line for fact in facts)
    for where, text in everything(study).items():
        assert all(text.index(plain_words(line)) < text.index(plain_words(words.interval(c)))
                   for c in comparisons_of(study)), where


@pytest.mark.parametrize("split, digests, stages, said", [
    (None, dict(val="1", test="1"), (), True), ("val", dict(val="1", test="2"), ("screen",), True),
    (None, dict(val="1", test="2"), (), False)])
def test_a_score_on_validation_is_called_that_first(split, digests, stages, said):
    """Also where the test split is the validation split over again, whatever is noted of the data."""
    runs = [replace(run, spec={**run.spec, "data": digests}) for run in ONE.runs]
    results = {run.name: each for run, each in zip(runs, ONE.results.values())}
    runs += [Run(stage, "good, rates as they are", "prose", 101, dict(stage=stage)) for stage in stages]
    study = replace(ONE, runs=tuple(runs), config=dict(scale="tiny", split=split),
                    results={**results, **{run.name: Result(2.0) for run in runs[32:]}})
    told = program(study)
    assert told["scored_on_validation"] == (["prose"] if said else [])
    assert told["headline"].startswith("Scored on") == said
    for text in (told["headline"], *everything(study).values()):
        assert ("Scored on" in text) == said


def test_leaks_that_were_looked_for_and_keys_that_differ_are_named():
    assert all(LEAKS in text for text in everything(ONE).values())

    def with_keys(study, keys):
        runs = [replace(run, spec={**run.spec, "train": {**run.spec["train"], "name": "", **keys(run)}})
                for run in study.runs]
        return replace(study, runs=tuple(runs),
                       results={run.name: each for run, each in zip(runs, study.results.values())})
    one = with_keys(ONE, lambda run: dict(adamw_lr=0.02, dtype="float32") if run.variant == "bad" else {})
    assert program(one)["differing"] == {PLAIN: {}, "good": {}, "even": {},
                                         "bad": dict(adamw_lr=0.02, dtype="float32")}
    assert all("adamw_lr=0.02 dtype=float32" in text for text in everything(one).values())
    of_one_task = with_keys(TASKS, lambda run: dict(adamw_lr=0.1) if (run.variant, run.text) == (
        "bad", "copy") else {})
    assert program(of_one_task)["differing"]["bad"] == dict(adamw_lr=dict(copy=0.1))


# ---- what stands beside a verdict ----

def test_each_text_is_judged_alone_too():
    found = program(TWO)["on_each_text"]
    assert {text: rows[0]["verdict"] for text, rows in found.items()} == {"prose": "better", "code": "worse"}


def test_better_is_not_better_at_any_cost():
    budgets = {f"plain x {of:g}": 2.0 - 0.2 * math.log2(of) for of in (0.5, 2.0)}
    more = around({PLAIN: 2.0, "good": 1.97, **budgets})
    variants = [Variant(name, "budget", dict(max_iters=1), 1000, 2e6 * float(name[8:]), 3e9 * float(name[8:]),
                        (1.0, 1.0, 1.0), 20, 1400.0) for name in budgets]
    plain, good, *_ = more.variants
    good = replace(good, flops=4.5e9, time=(1.9, 1.8, 1.95), params=1500)
    study = replace(more, variants=(plain, good, *variants), pairs=more.pairs[:1])
    (row,) = program(study)["comparisons"]
    assert row["verdict"] == "better" and row["but_not_at"] == ["FLOPs", "time"]
    assert row["equal_flops"]["low"] > 0 and row["equal_time"]["low"] > 0
    assert 1 < row["worth"]["low"] < row["worth"]["mean"] < row["worth"]["high"] < 1.5
    assert all("but not at equal FLOPs or time" in text for text in everything(study).values())


def at(cost, low, high):
    """What is left of a difference at an equal cost."""
    return records.DifferenceAtCost(cost, (low + high) / 2, low, high, 0.01)


@pytest.mark.parametrize("params, wider, flops, time, lost", [
    (1500, ("better", -0.1), at(1.5, -0.2, -0.1), at(1.5, -0.2, -0.1), []),
    (1500, ("undecided", -0.1), at(1.5, -0.2, 0.1), at(1.5, -0.2, -0.1), ["FLOPs", "parameters"]),
    (1500, None, at(1.5, -0.2, -0.1), records.DifferenceAtCost(3.0), []),  # not measured is not lost
])
def test_where_better_is_shown_too(params, wider, flops, time, lost):
    study = around({PLAIN: 2.0, "good": 1.9})
    plain, good = study.variants
    study = replace(study, variants=(plain, replace(good, params=params)))
    (c,) = comparisons_of(study)
    c = replace(c, equal_flops=flops, equal_time=time)
    found = [c]
    if wider:
        found.append(replace(c, baseline="plain, MLP 9", equal="parameters", verdict=wider[0], high=wider[1]))
    assert sorted(words.limits_at_equal(study, found, c)) == lost


def test_tasks_say_how_many_learn_them_and_from_which_step():
    row = next(row for row in program(TASKS)["comparisons"]
               if (row["variant"], row["task"]) == ("good", "copy"))
    assert (row["learned"], row["learned_plain"], row["step"], row["step_plain"]) == (8, 0, 10, None)
    assert (row["acc"], row["acc_plain"]) == (pytest.approx(0.95), pytest.approx(0.4))
    assert tables.tasks_table(TASKS, comparisons_of(TASKS)).rows[-1] == ("guessing", "0.25", "0.50")


def test_screening_and_rates_that_were_tried_are_shown():
    more = [(Run("screen", name, "prose", seed, dict(screen=name, seed=seed)), score + NOISE[seed % 8])
            for name, score in ((PLAIN, 2.0), ("good", 1.9), ("lost", 2.2)) for seed in (101, 102)]
    more += [(Run("tune", f"good, {rates}", "prose", 101, dict(train=dict(adamw_lr=rate))), score)
             for rates, rate, score in (("rates as they are", 0.005, 1.9), ("adamw_lr x 2", 0.01, 1.8))]
    study = replace(ONE, runs=(*[run for run, _ in more], *ONE.runs),
                    rates={PLAIN: {}, "good": {"adamw_lr": 0.01}},
                    results={**ONE.results, **{run.name: Result(score) for run, score in more}})
    rows = tables.screened_table(study).rows
    assert [(row[0], row[3]) for row in rows] == [("plain GPT", "yes"), ("good", "yes"), ("lost", "no")]
    assert [(row[1], row[4]) for row in tables.rates_table(study).rows] == [("as they are", ""),
                                                                            ("adamw_lr × 2", "taken")]
    assert any("good (adamw_lr)" in line for line in program(study)["notices"]), "the best is the last tried"


# ---- what to run next ----

def test_a_new_study_is_proposed_with_fresh_seeds():
    following = program(OPEN)["follow_up"]
    assert following["variants"] == ["open"] and following["seeds"] > 8
    seeds, = re.findall(r"--seeds=([\d,]+)", following["command"])
    assert len(seeds.split(",")) == following["seeds"] and min(map(int, seeds.split(","))) == 9
    assert following["command"].startswith("python compare.py --mechanisms=open")
    assert program(ONE)["follow_up"] is None
    assert "--seeds=11," in program(replace(OPEN, left_out={"open": [9, 10]}))["follow_up"]["command"]
    assert program(replace(OPEN, command="make it"))["follow_up"]["command"] is None


@pytest.mark.parametrize("last, more, longer", [
    (0.04, dict(whole=dict(steps=960, tokens=1e8)), True), (0.04, {}, False),  # a whole run of its scale
    (0.004, dict(whole=dict(steps=960, tokens=1e8)), False)])
def test_longer_runs_come_before_seeds_where_the_plain_gpt_still_falls(last, more, longer):
    """last: by how much its score falls over the last tenth of its steps; the margin is 0.01."""
    results = {name: replace(each, curve=dict(steps=[0, 18, 20], scores=[8, 2 + last, 2]))
               for name, each in OPEN.results.items()}
    following = program(replace(OPEN, results=results, **more))["follow_up"]
    assert following["variants"] == ["open"] and following["undecided"][0]["seeds"] > 8
    assert (following["seeds"] is None, following["command"] is None) == (longer, longer)


# ---- scores of another program ----

def test_scores_of_another_program_keep_its_names(tmp_path):
    """One run failed; of what is undecided there is no command, since compare.py cannot train it."""
    rows = dict(base=("1e9,1", 3.28, 3.281, 3.279), mine=("2e9,1.5", 3.25, 3.251, 3.249),
                near=("1e9,1", 3.279, 3.2805, 3.278), lost=("1e9,1", 3.25, 3.251, "failed"))
    (tmp_path / "scores.csv").write_text("variant,seed,score,tokens,cost\n" + "".join(
        f"{name},{seed},{score},{costs}\n" for name, (costs, *scores) in rows.items()
        for seed, score in enumerate(scores, 1)))
    study = from_csv(tmp_path / "scores.csv", target=3.26, margin=0.001)
    told = program(replace(study, command="python compare.py scores scores.csv"))
    assert (told["baseline"], told["target"], {*told["scores"]}) == ("base", 3.26,
                                                                     {"base", "mine", "near", "lost"})
    rows = {row["variant"]: row for row in told["comparisons"]}
    assert (rows["mine"]["verdict"], rows["near"]["verdict"]) == ("better", "undecided")
    assert rows["lost"]["withheld"] == "better" and rows["mine"]["cost_ratio"] == pytest.approx(1.5)
    beyond = {row["variant"]: row["verdict"] for row in told["targets"]}
    assert beyond == {"base": "not shown", "mine": "below", "near": "not shown", "lost": "not shown"}
    assert told["follow_up"]["command"] is None and told["follow_up"]["undecided"][0]["seeds"] > 3
    for text in everything(study).values():
        assert "plain GPT" not in text and all(plain_words(line) in text for line in told["notices"])


# ---- files ----

def test_a_report_survives_the_results_file(tmp_path):
    for study in (failed(TASKS, "good"), unfinished(TWO)):
        records.write(tmp_path / "results.json.gz", study, comparisons_of(study))
        again, _ = records.read(tmp_path / "results.json.gz")
        assert everything(again) == everything(study)


def test_markdown_tables_can_be_read_again():
    table = tables.Table(("a|b", "n"), [("x_y *z* <b> `c`", "-0.1 [-0.2, +0.3]"), ("p\\q ~ #1", "–")])
    first, rule, *rows = tables.in_markdown(table).splitlines()
    cells = [[unescaped(cell).strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
             for line in (first, *rows)]
    assert [tuple(line) for line in cells] == [table.head, *table.rows] and rule == "|---|---:|"


def test_a_program_finds_the_fields_that_the_docs_name():
    found = program(OPEN)
    text = (ROOT / "docs/compare.md").read_text()
    example = text[text.index('{"finished"'):].partition("```")[0]
    named = set(re.findall(r'"(\w+)":', example)) - {"plain", "mine"}
    assert len(named) > 20 and named <= {*found, *found["comparisons"][0]}
    assert {*asdict(comparisons_of(OPEN)[0])} - {"seeds"} <= {*found["comparisons"][0]}
    json.dumps(found, allow_nan=False)


NASTY = "</td><script>alert(1)</script> <img src=http://evil.example/x.png> {{ 1 }} \x1b[31m"


@pytest.mark.slow
def test_the_page_is_whole_and_loads_nothing(tmp_path):
    study = failed(TASKS, "good")
    paths = report.write(study, comparisons_of(study), tmp_path / "out")
    assert {path.name for path in paths} == {"report.html", "report.md", "forest.svg", "forest.png"}
    page = Page((tmp_path / "out/report.html").read_text())
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object")
        for key in ("src", "srcset", "href"):
            assert attributes.get(key, "data:").startswith(("data:", "#")), (tag, key)
    assert "url(" not in page.styles and "@import" not in page.styles
    policy = next(each["content"] for tag, each in page.tags if "Content-Security-Policy" in each.values())
    assert policy.startswith("default-src 'none'")


def test_what_names_hold_is_text():
    study = around({PLAIN: 2.0, NASTY: 1.9}, question=NASTY, notes=(NASTY,), command=NASTY)
    study = failed(study, NASTY, why=NASTY)
    page = Page(report.page(study, comparisons_of(study)))
    assert not [tag for tag, _ in page.tags if tag in ("script", "img")]
    assert "alert(1)" in page.text and "\x1b" not in page.text
    assert "\x1b" not in report.in_text(study, comparisons_of(study))
    assert "<script>" not in report.in_markdown(study, comparisons_of(study))


@pytest.mark.slow
def test_tables_of_the_docs_come_from_results(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "docs").mkdir()
    drawn = {"docs/one.png": ["one.json.gz"], "docs/two.png": ["one.json.gz", "two.json.gz"]}
    for name, study in (("one", ONE), ("two", TWO), ("tasks", TASKS)):
        records.write(tmp_path / f"results/{name}.json.gz", study, comparisons_of(study))
    marks = ["short one.json.gz good", "verdicts one.json.gz", "ladder one.json.gz two.json.gz",
             "each_text two.json.gz", "learned tasks.json.gz"]
    page = "# A page\n" + "".join(f"<!-- table: {mark} -->\nold\n<!-- end -->\n\n" for mark in marks)
    (tmp_path / "README.md").write_text(page)
    assert len(docs_tables.write(tmp_path, drawn)) == 3
    text = (tmp_path / "README.md").read_text()
    assert "old" not in text and text.count("| good | better |") == 2
    assert "| good | two | same |" in text
    assert docs_tables.write(tmp_path, drawn) == []
    (tmp_path / "README.md").write_text("<!-- table: nothing one.json.gz -->\n<!-- end -->\n")
    with pytest.raises(docs_tables.UserError, match="no table is called nothing"):
        docs_tables.write(tmp_path, drawn)
