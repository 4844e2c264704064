"""What a report says of a study, in the terminal, in Markdown, for a program and on a page."""
import json
import math
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser

import pytest
from helpers import ROOT

from study import docs_tables, notices, pictures, records, report, tables, words
from study.records import PLAIN, Failure, Pair, Result, Run, Study, Variant
from study.scores import from_csv
from study.verdicts import compare_with_target, comparisons_of

SEEDS = range(1, 9)
NOISE = [0.001 * each for each in (0, 3, -2, 1, -3, 2, -1, 0)]  # over seeds, the same for all
LEAKS = "31 positions in 4 rows"


def study_of(means, texts=("prose",), measure="bits/byte", names=None, spread=1.0, **more):
    """A Study of runs with these {variant: mean, or {text: mean}}; a variant's seeds are shifted ones."""
    names, runs, results = names or {}, [], {}
    for i, (name, mean) in enumerate(means.items()):
        for text in texts:
            for seed in SEEDS:
                run = Run("judge", name, text, seed, dict(model=dict(seed=seed, n_layer=1, n_embd=8),
                                                         train=dict(name=name, text=text, adamw_lr=0.01)))
                value = (mean[text] if isinstance(mean, dict) else mean) + spread * NOISE[(seed + i) % 8]
                curve = dict(steps=[0, 10, 20], scores=[value + 1, value + 0.2, value])
                if measure == "right answers":
                    curve["scores"] = [0.1, value, value]
                runs.append(run)
                results[run.name] = Result(value, 100.0, 1000, curve=curve, seconds=3.0, leaks=LEAKS)
    variants = tuple(Variant(name, "plain" if name == PLAIN else "variant", names.get(name, {}), 1000, 2e6,
                             3e9, (1.0, 0.99, 1.01), 20, 1400.0) for name in means)
    pairs = tuple(Pair(name, PLAIN, each) for name in means if name != PLAIN
                  for each in ([(text,) for text in texts] if measure == "right answers" else [tuple(texts)]))
    found = dict(name="mine", measure=measure, variants=variants, pairs=pairs, texts=tuple(texts),
                 runs=tuple(runs), results=results, question="Is it better?", config=dict(scale="tiny"),
                 command="python compare.py --mechanisms=good,bad,even,open --seeds=1,2,3,4,5,6,7,8")
    return Study(**{**found, **more})


ONE = study_of({PLAIN: 2.0, "good": 1.9, "bad": 2.1, "even": 2.0005})
OPEN = study_of({PLAIN: 2.0, "open": 1.975}, spread=15.0)
TWO = study_of({PLAIN: {"prose": 2.0, "code": 3.0}, "good": {"prose": 1.9, "code": 2.9}}, ("prose", "code"))
TASKS = study_of({PLAIN: 0.4, "good": 0.95, "bad": 0.2}, ("recall", "copy"), "right answers", margin=0.05,
                 guesses={"recall": {"1": 0.25}, "copy": {"1": 0.5}})
CSV = ["variant,seed,score,tokens,cost", "base,1,3.28,1e9,1", "base,2,3.281,1e9,1", "base,3,3.279,1e9,1",
       "mine,1,3.25,2e9,1.5", "mine,2,3.251,2e9,1.5", "mine,3,3.249,2e9,1.5"]


def csv_study(tmp_path, lines=(), **asked):
    path = tmp_path / "scores.csv"
    path.write_text("\n".join([*CSV, *lines]) + "\n")
    return from_csv(path, **asked)


def failed(study, variant, count=1, why="loss is not a finite number"):
    """The same study in which runs of a variant failed."""
    lost = [run.name for run in study.runs if run.variant == variant][-count:]
    return replace(study, results={key: each for key, each in study.results.items() if key not in lost},
                   failures={name: Failure(why) for name in lost})


def unfinished(study):
    """The same study with a run left to do."""
    last = study.runs[-1].name
    return replace(study, results={key: each for key, each in study.results.items() if key != last})


def everything(study):
    """{where: text} of all that is shown of a study."""
    found, beyond = comparisons_of(study), compare_with_target(study)
    return {"terminal": " ".join(report.in_text(study, found, beyond).split()),
            "markdown": " ".join(unescaped(report.in_markdown(study, found, beyond)).split()),
            "program": json.dumps(report.json_report(study, found, beyond), ensure_ascii=False),
            "page": " ".join(Page(report.page(study, found, beyond)).text.replace("−", "-").split())}


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


# ---- verdicts ----

@pytest.mark.parametrize("study, said", [
    (ONE, ["good better", "bad worse", "even same", "1 of 3 variants was shown to be better"]),
    (OPEN, ["undecided", "would decide four times in five", "Do not add seeds to this study"]),
    (study_of({PLAIN: 2.0, "good": 1.9}), ["better by 0.10"]),
    (TASKS, ["2 better, 2 worse", "0.95+", "0.20−", "guessing"]),
    (TWO, ["better"]),
], ids=["one text", "undecided", "one variant", "tasks", "two texts"])
def test_verdicts_are_said(study, said):
    found = everything(study)
    for text in said:
        assert text in found["terminal"].replace("-0.", "−0."), text
    words_of = {"better", "worse", "same", "undecided"} & {c.verdict for c in comparisons_of(study)}
    for where, text in found.items():
        assert all(word in text for word in words_of), where


def test_what_did_nothing_is_identical():
    base = study_of({PLAIN: 2.0, "idle": 2.0})
    scores = {run.seed: base.results[run.name].score for run in base.runs if run.variant == PLAIN}
    results = {run.name: replace(base.results[run.name], score=scores[run.seed]) for run in base.runs}
    for text in everything(replace(base, results=results)).values():
        assert "identical" in text and "nothing acted" in text


def test_each_text_is_judged_alone_too():
    mixed = study_of({PLAIN: {"prose": 2.0, "code": 3.0}, "good": {"prose": 1.9, "code": 3.1}},
                     ("prose", "code"))
    (pooled,) = comparisons_of(mixed)
    assert pooled.verdict not in ("better", "worse")
    found = report.json_report(mixed, comparisons_of(mixed))["on_each_text"]
    assert {text: rows[0]["verdict"] for text, rows in found.items()} == {"prose": "better", "code": "worse"}
    head, rows, _ = tables.single_texts_table(mixed)
    assert (head, rows) == (("variant", "on prose alone", "on code alone"), [("good", "better", "worse")])


def test_the_plain_gpt_has_an_interval_on_each_text():
    uneven = failed(TWO, PLAIN, 4)  # of the last text alone
    head, (plain, _), _ = tables.texts_table(uneven, comparisons_of(uneven))
    prose, code = plain[head.index("on prose")], plain[head.index("on code")]
    assert prose.startswith("its mean ±") and code.startswith("its mean ±") and prose != code


def test_better_is_not_better_at_any_cost():
    dear = study_of({PLAIN: 2.0, "good": 1.97}, names={"good": dict(xsa=True)})
    budgets = {f"plain x {of:g}": 2.0 - 0.2 * math.log2(of) for of in (0.5, 2.0)}
    more = study_of({PLAIN: 2.0, "good": 1.97, **budgets})
    variants = [Variant(name, "budget", dict(max_iters=1), 1000, 2e6 * float(name[8:]), 3e9 * float(name[8:]),
                        (1.0, 1.0, 1.0), 20, 1400.0) for name in budgets]
    plain, good = dear.variants
    good = replace(good, flops=4.5e9, time=(1.9, 1.8, 1.95), params=1500)
    study = replace(more, variants=(plain, good, *variants), pairs=dear.pairs)
    (c,) = comparisons_of(study)
    assert c.verdict == "better" and c.equal_flops.low > 0 and c.equal_time.low > 0
    assert words.limits_at_equal(study, [c], c) == ["FLOPs", "time"]
    for where, text in everything(study).items():
        assert "but not at equal FLOPs or time" in text, where
    found = report.json_report(study, [c])["comparisons"][0]
    assert found["but_not_at"] == ["FLOPs", "time"]
    assert found["worth"]["mean"] == pytest.approx(c.worth.mean)


def at(cost, low, high):
    """What is left of a difference at an equal cost."""
    return records.DifferenceAtCost(cost, (low + high) / 2, low, high, 0.01)


@pytest.mark.parametrize("params, wider, flops, time, lost", [
    (1000, None, at(1.0, -0.2, -0.1), at(1.1, -0.2, -0.1), []),  # no larger: nothing to make equal
    (1500, ("better", -0.1), at(1.5, -0.2, -0.1), at(1.5, -0.2, -0.1), []),
    (1500, ("undecided", -0.1), at(1.5, -0.2, 0.1), at(1.5, -0.2, -0.1), ["FLOPs", "parameters"]),
    (1500, ("worse", 0.2), at(1.5, -0.2, -0.1), at(1.5, 0.1, 0.2), ["parameters", "time"]),
    (1500, None, at(1.5, -0.2, -0.1), records.DifferenceAtCost(3.0), []),  # not measured is not lost
])
def test_where_better_is_shown_too(params, wider, flops, time, lost):
    study = study_of({PLAIN: 2.0, "good": 1.9})
    plain, good = study.variants
    study = replace(study, variants=(plain, replace(good, params=params)))
    (c,) = comparisons_of(study)
    c = replace(c, equal_flops=flops, equal_time=time)
    found = [c]
    if wider:
        found.append(replace(c, baseline="plain, MLP 9", equal="parameters", verdict=wider[0], high=wider[1]))
    assert sorted(words.limits_at_equal(study, found, c)) == lost


# ---- what stands beside them ----

def test_failed_runs_withhold_a_verdict_and_are_named():
    study = failed(ONE, "good", 2)
    for where, text in everything(study).items():
        assert "not called better, since 2 runs failed" in text, where
        assert "Failed: good, seed 8: loss is not a finite number" in text, where
    row = report.json_report(study, comparisons_of(study))["comparisons"][0]
    assert (row["variant"], row["verdict"], row["failed"]) == ("good", "undecided", 2)
    assert row["withheld"] == "better"
    assert next(c for c in comparisons_of(failed(ONE, "bad")) if c.variant == "bad").verdict == "worse"


def test_an_unfinished_study_says_so_and_gives_a_program_no_verdict():
    study = unfinished(ONE)
    for text in everything(study).values():
        assert "UNFINISHED, 31 of 32 runs" in text
    found = report.json_report(study, comparisons_of(study))
    assert not found["finished"] and (found["planned"], found["done"]) == (32, 31)
    assert {row["verdict"] for row in found["comparisons"]} == {"unfinished"}
    assert found["comparisons"][0]["interim_verdict"] == "better"
    assert "interim: better" in report.in_text(study, comparisons_of(study))
    assert found["follow_up"] is None


def test_a_study_without_runs_has_a_report():
    study = replace(ONE, results={})
    for text in everything(study).values():
        assert "UNFINISHED, 0 of 32 runs" in text and "no runs yet" in text


@pytest.mark.parametrize("change, said", [
    (dict(untuned={"good": {"mechanism_lr": 0.016}, "bad": {}}),
     "No learning rate was tuned: what good adds learns at mechanism_lr=0.016, the default."),
    (dict(rates={PLAIN: {"adamw_lr": 0.01}}), "have their own best rates"),
    (dict(notes=("test is val over again",)), "Test is val over again."),
    (dict(other_code={"bad": 3}),
     "3 runs were made by other code or other libraries, which --accept_code allowed: of bad."),
    (dict(left_out={"good": [9, 10, 11, 15]}), "left out: 4 of good (seeds 9 to 11, 15)"),
    (dict(made=dict(commit="abc-dirty")), "The code had changes that are in no commit."),
    (dict(whole=dict(steps=60, tokens=6e6, bytes=dict(prose=1000))),
     "Short runs, 20 of the tiny scale's 60 steps (2M of 6M tokens)."),
    (dict(whole=dict(steps=20, tokens=2e6, bytes=dict(prose=10000))), "Scored on 10 % of the scored split."),
], ids=lambda each: next(iter(each)) if isinstance(each, dict) else "")
def test_what_a_reader_must_know_stands_on_top(change, said):
    for where, text in everything(replace(ONE, **change)).items():
        assert said in text, where


def test_other_tokens_than_the_plain_gpts_are_said():
    plain, good, *rest = ONE.variants
    study = replace(ONE, variants=(plain, replace(good, tokens=3e6), *rest))
    for text in everything(study).values():
        assert "good trains on 1.50 times the plain GPT's tokens" in text


@pytest.mark.parametrize("split, digests, more, said", [
    (None, dict(val="1", test="1"), (),
     "Scored on the validation split, of which test is a copy, which also chose best.pt."),
    (None, dict(val="1", test="1"), ("tune",), "test is a copy, which also chose rates and best.pt."),
    ("val", dict(val="1", test="2"), ("screen",), "split, which also chose what is judged and best.pt."),
    (None, dict(val="1", test="2"), (), None), ("test", dict(test="2"), (), None)])
def test_a_score_on_validation_is_called_that_first(split, digests, more, said):
    """Also where the test split is the validation split over again, whatever is noted of the data."""
    runs = [replace(run, spec={**run.spec, "data": digests}) for run in ONE.runs]
    results = {run.name: each for run, each in zip(runs, ONE.results.values())}
    runs += [Run(stage, "good, rates as they are", "prose", 101, dict(stage=stage)) for stage in more]
    study = replace(ONE, runs=tuple(runs), config=dict(scale="tiny", split=split),
                    results={**results, **{run.name: Result(2.0) for run in runs[32:]}})
    program = json.loads(everything(study)["program"])
    assert program["scored_on_validation"] == (["prose"] if said else [])
    for where, text in {**everything(study), "headline": program["headline"]}.items():
        assert said in text if said else "Scored on" not in text, where


def test_leaks_that_were_looked_for_are_named():
    text = everything(ONE)
    assert all(f"none was found: {LEAKS}" in text[where] for where in ("terminal", "markdown", "page"))
    other = {run.name: replace(ONE.results[run.name], leaks="9 positions") for run in ONE.runs[:3]}
    assert notices.leaks_in_words(replace(ONE, results={**ONE.results, **other})) == [
        "Every judged run was searched for a model that looks ahead or mixes rows, and none was found: "
        f"{len(ONE.results) - len(other)} runs at {LEAKS}; {len(other)} runs at 9 positions."]


def test_a_new_study_is_proposed_with_fresh_seeds():
    following = notices.next_study(OPEN, comparisons_of(OPEN))
    assert following["variants"] == ["open"] and following["seeds"] > 8
    assert following["command"].startswith("python compare.py --mechanisms=good,bad,even,open")
    seeds = re.search(r"--seeds=([\d,]+)", following["command"])[1].split(",")
    assert len(seeds) == following["seeds"] and min(map(int, seeds)) == 9
    assert following["command"].count("--seeds=") == 1
    assert notices.next_study(ONE, comparisons_of(ONE)) is None
    more = replace(OPEN, left_out={"open": [9, 10]})
    assert "--seeds=11," in notices.next_study(more, comparisons_of(more))["command"]
    assert notices.next_study(replace(OPEN, command="make it"), comparisons_of(OPEN))["command"] is None


@pytest.mark.parametrize("last, more, said", [
    (0.04, dict(whole=dict(steps=960, tokens=1e8)), "(a whole run has 960 steps): over the last tenth of"),
    (0.04, dict(whole=dict(steps=960, tokens=1e8), config=dict(scale="tiny", settings=dict(max_iters=20))),
     "(a whole run has 960 steps: leave max_iters out): over the last"),
    (0.04, dict(config=dict(base="mine.py")), "(raise max_iters): over the last tenth of its 20 steps"),
    (0.04, {}, None),  # a whole run of its scale
    (0.004, dict(whole=dict(steps=960, tokens=1e8)), None), (0.0, dict(config=dict(base="mine.py")), None)])
def test_longer_runs_come_before_seeds_where_the_plain_gpt_still_falls(last, more, said):
    """last: by how much its score falls over the last tenth of its steps; the margin is 0.01."""
    results = {name: replace(each, curve=dict(steps=[0, 18, 20], scores=[8, 2 + last, 2]))
               for name, each in OPEN.results.items()}
    study = replace(OPEN, results=results, **more)
    following = notices.next_study(study, comparisons_of(study))
    assert following["variants"] == ["open"] and following["undecided"][0]["seeds"] > 8
    if said:
        assert said in following["words"] and "fresh seeds" not in following["words"]
        assert following["seeds"] is None and following["command"] is None
        assert all("Longer runs come first" in text for where, text in everything(study).items()
                   if where != "markdown")
        assert not any("would probably decide" in text for text in everything(study).values())
    else:
        assert "Longer" not in following["words"] and following["command"]


def test_every_key_in_which_a_variant_differs_is_shown():
    runs = []
    for run in ONE.runs:
        train = dict(adamw_lr=0.02 if run.variant == "good" else 0.01)
        spec = dict(model={**run.spec["model"], "xsa": run.variant == "good", "of": run.variant}, train=train)
        runs.append(replace(run, spec=spec))
    rows = {row[1]: row[3] for row in tables.variants_table(replace(ONE, runs=tuple(runs))).rows}
    assert rows[PLAIN] == "–"
    assert rows["good"] == "xsa=True of=good adamw_lr=0.02"


def test_keys_that_differ_are_named_everywhere_and_no_sentence_denies_them():
    """Also keys of training alone, and of a task rates that another task has otherwise."""
    def with_keys(study, keys):
        runs = [replace(run, spec={**run.spec, "train": {**run.spec["train"], "name": "", **keys(run)}})
                for run in study.runs]
        return replace(study, runs=tuple(runs), untuned={name: {} for name in ("good", "bad")},
                       results={run.name: each for run, each in zip(runs, study.results.values())})
    one = with_keys(ONE, lambda run: dict(adamw_lr=0.02, dtype="float32") if run.variant == "bad" else {})
    for where, text in everything(one).items():
        if where == "program":
            assert json.loads(text)["differing"] == {PLAIN: {}, "good": {}, "even": {},
                                                     "bad": dict(adamw_lr=0.02, dtype="float32")}
        else:
            assert "adamw_lr=0.02 dtype=float32" in text, where
        assert "No learning rate was tuned" in text and "all learn at" not in text, where
    of_one_task = with_keys(TASKS, lambda run: dict(adamw_lr=0.1) if (run.variant, run.text) == (
        "bad", "copy") else {})
    assert words.differing_keys(of_one_task) == {PLAIN: {}, "good": {}, "bad": dict(adamw_lr=dict(copy=0.1))}


def test_screening_and_rates_that_were_tried_are_shown():
    more = []
    for name, score in ((PLAIN, 2.0), ("good", 1.9), ("lost", 2.2)):
        more += [(Run("screen", name, "prose", seed, dict(screen=name, seed=seed)), score + NOISE[seed % 8])
                 for seed in (101, 102)]
    for factor, score in ((1, 1.9), (2, 1.8)):
        of = f"good, adamw_lr x {factor}" if factor != 1 else "good, rates as they are"
        more.append((Run("tune", of, "prose", 101, dict(train=dict(adamw_lr=0.005 * factor))), score))
    study = replace(ONE, runs=(*[run for run, _ in more], *ONE.runs),
                    rates={PLAIN: {}, "good": {"adamw_lr": 0.01}},
                    results={**ONE.results, **{run.name: Result(score) for run, score in more}})
    rows = tables.screened_table(study).rows
    assert [(row[0], row[3]) for row in rows] == [("plain GPT", "yes"), ("good", "yes"), ("lost", "no")]
    assert [(row[1], row[4]) for row in tables.rates_table(study).rows] == [("as they are", ""),
                                                                          ("adamw_lr × 2", "taken")]
    text = everything(study)["terminal"]
    assert "2 variants were screened" in text and "edge of the grid for good (adamw_lr)" in text


# ---- tasks, and scores of another program ----

def test_tasks_say_how_many_learn_them_and_from_which_step():
    found = report.json_report(TASKS, comparisons_of(TASKS))
    row = next(row for row in found["comparisons"] if (row["variant"], row["task"]) == ("good", "copy"))
    assert (row["learned"], row["learned_plain"], row["step"], row["step_plain"]) == (8, 0, 10, None)
    assert row["acc"] == pytest.approx(0.95) and row["acc_plain"] == pytest.approx(0.4)
    text = everything(TASKS)
    for where in ("terminal", "page", "program"):
        assert "runs that learn it: 8 of 8 from step 10 on, of plain GPT 0 of 8" in text[where], where
    assert tables.tasks_table(TASKS, comparisons_of(TASKS)).rows[-1] == ("guessing", "0.25", "0.50")


def test_a_run_that_ends_early_stays_at_its_last_score():
    steps, scores = pictures.on_one_axis([([0, 10], [0.2, 1.0]), ([0, 10, 20], [0.2, 0.4, 0.6])])
    assert [*steps] == [0, 10, 20] and scores.tolist() == [[0.2, 1.0, 1.0], [0.2, 0.4, 0.6]]


def test_scores_of_another_program_keep_its_names(tmp_path):
    study = csv_study(tmp_path, target=3.26)
    text = everything(study)
    for where in ("terminal", "markdown", "page"):
        assert "mine against base: better by 0.0300" in text[where] and "plain GPT" not in text[where], where
        assert "Better and dearer: mine" in text[where] and "2.00 times base's tokens" in text[where]
        assert "Shown to be below the target of 3.26: mine, 1 of 2" in text[where]
    found = report.json_report(study, comparisons_of(study), compare_with_target(study))
    assert (found["baseline"], found["target"], set(found["scores"])) == ("base", 3.26, {"base", "mine"})
    assert [(row["variant"], row["verdict"]) for row in found["targets"]] == [("base", "not shown"),
                                                                            ("mine", "below")]
    assert found["comparisons"][0]["cost_ratio"] == pytest.approx(1.5)


def test_a_failed_run_of_another_program_withholds(tmp_path):
    study = csv_study(tmp_path, ["mine,4,failed,2e9,1.5"], target=3.26)
    text = everything(study)["terminal"]
    assert "not called better, since 1 run failed" in text and "mine is not called below it" in text


def test_what_another_program_leaves_undecided_has_seeds_and_no_command(tmp_path):
    """Its seeds are names, and compare.py cannot train them."""
    near = ["near,1,3.279,1e9,1", "near,2,3.2805,1e9,1", "near,3,3.278,1e9,1"]
    study = replace(csv_study(tmp_path, near, margin=0.001), command="python compare.py scores scores.csv")
    text = everything(study)["terminal"]
    found = report.json_report(study, comparisons_of(study))["follow_up"]
    assert found["undecided"][0].keys() == {"variant", "baseline", "seeds"}
    assert (found["undecided"][0]["variant"], found["undecided"][0]["baseline"]) == ("near", "base")
    assert found["command"] is None and found["words"].split()[0] in text


# ---- one figure, one place ----

def test_figures_are_the_same_everywhere():
    found = {c.variant: c for c in comparisons_of(ONE)}
    rows = {row["variant"]: row for row in report.json_report(ONE, comparisons_of(ONE))["comparisons"]}
    text = everything(ONE)
    for name, c in found.items():
        assert (rows[name]["mean"], rows[name]["p_corrected"]) == (c.mean, c.p_corrected)
        for where in ("terminal", "markdown", "page"):
            assert words.interval(c) in text[where], where


@pytest.mark.parametrize("study", [ONE, TWO, TASKS, failed(ONE, "good"), unfinished(TWO)])
def test_a_report_survives_the_results_file(study, tmp_path):
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
    found = report.json_report(OPEN, comparisons_of(OPEN))
    text = (ROOT / "docs/compare.md").read_text()
    example = text[text.index('{"finished"'):]
    example = example[:example.index("```")]
    names = set(re.findall(r'"(\w+)":', example)) - {"plain", "mine"}
    assert names >= {"finished", "planned", "headline", "notices", "cut", "comparisons", "interim_verdict"}
    assert names <= {*found, *found["comparisons"][0]}
    assert {"follow_up", "tokens_ratio", "worth", "equal_flops", "equal_time"} <= {*found,
                                                                                *found["comparisons"][0]}
    json.dumps(found, allow_nan=False)


# ---- the page ----

NASTY = "</td><script>alert(1)</script> <img src=http://evil.example/x.png> {{ 1 }} \x1b[31m"


@pytest.mark.parametrize("study", [ONE, TWO, TASKS, OPEN, failed(TASKS, "good"), unfinished(ONE)])
def test_the_page_is_whole_and_loads_nothing(study, tmp_path):
    paths = report.write(study, comparisons_of(study), tmp_path / "out")
    assert {path.name for path in paths} == {"report.html", "report.md", "forest.svg", "forest.png"}
    text = (tmp_path / "out/report.html").read_text()
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object")
        for key in ("src", "srcset", "href"):
            assert attributes.get(key, "data:").startswith(("data:", "#")), (tag, key)
    assert "url(" not in page.styles and "@import" not in page.styles
    policy = next(each["content"] for tag, each in page.tags if "Content-Security-Policy" in each.values())
    assert policy.startswith("default-src 'none'")
    assert ("meta", dict(name="viewport", content="width=device-width, initial-scale=1")) in page.tags
    assert "prefers-color-scheme: dark" in page.styles


def test_only_tables_scroll_sideways():
    page = Page(report.page(TWO, comparisons_of(TWO)))
    inside = re.findall(r"<div class=\"scroll\"[^>]*><table>", report.page(TWO, comparisons_of(TWO)))
    assert len(inside) == sum(tag == "table" for tag, _ in page.tags) > 3
    assert "pre-wrap" in page.styles and "max-width: 100%" in page.styles


def test_what_names_hold_is_text():
    study = study_of({PLAIN: 2.0, NASTY: 1.9}, question=NASTY, notes=(NASTY,), command=NASTY)
    study = failed(study, NASTY, why=NASTY)
    page = Page(report.page(study, comparisons_of(study)))
    assert not [tag for tag, _ in page.tags if tag in ("script", "img")]
    assert "alert(1)" in page.text and "\x1b" not in page.text
    assert "\x1b" not in report.in_text(study, comparisons_of(study))
    assert "<script>" not in report.in_markdown(study, comparisons_of(study))


# ---- several files, and the docs ----

def test_one_table_of_several_studies():
    larger = study_of({PLAIN: 1.8, "good": 1.75})
    head, rows, _ = tables.sizes_table({size: (study, comparisons_of(study)) for size, study in
                                         (("0.1M", ONE), ("1M", larger))})
    assert head[:3] == ("variant", "size", "verdict")
    assert [row[:3] for row in rows] == [
        ("plain GPT", "0.1M", "–"), ("plain GPT", "1M", "–"), ("good", "0.1M", "better"),
        ("good", "1M", "better"), ("even", "0.1M", "same"), ("bad", "0.1M", "worse")]


def test_tables_of_the_docs_come_from_results(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "docs").mkdir()
    drawn = {"docs/one.png": ["one.json.gz"], "docs/two.png": ["one.json.gz", "two.json.gz"]}
    for name, study in (("one", ONE), ("two", TWO), ("tasks", TASKS)):
        records.write(tmp_path / f"results/{name}.json.gz", study, comparisons_of(study))
    marks = ["short one.json.gz good", "verdicts one.json.gz", "ladder one.json.gz two.json.gz",
             "each_text two.json.gz", "learned tasks.json.gz", "counted one.json.gz"]
    page = "# A page\n" + "".join(f"<!-- table: {mark} -->\nold\n<!-- end -->\n\n" for mark in marks)
    (tmp_path / "README.md").write_text(page)
    assert len(docs_tables.write(tmp_path, drawn)) == 3
    text = (tmp_path / "README.md").read_text()
    assert "old" not in text and text.count("| good | better |") == 2 and "| good | two | better |" in text
    assert docs_tables.write(tmp_path, drawn) == []
    (tmp_path / "README.md").write_text("<!-- table: nothing one.json.gz -->\n<!-- end -->\n")
    with pytest.raises(docs_tables.UserError, match="no table is called nothing"):
        docs_tables.write(tmp_path, drawn)


def test_json_of_a_comparison_has_every_field_of_it():
    row = report.json_report(ONE, comparisons_of(ONE))["comparisons"][0]
    assert {*asdict(comparisons_of(ONE)[0])} - {"seeds"} <= {*row}


def test_the_page_begins_with_variant_difference_and_verdict_where_a_phone_shows_them():
    html = report.page(ONE, comparisons_of(ONE))
    head, body = re.search(r"<thead>(.*?)</thead><tbody>(.*?)</tbody>", html, re.DOTALL).groups()
    titles = [re.sub("<.*?>", "", title) for title in re.findall(r"<th\b.*?</th>", head)]
    assert titles[0] == "variant" and titles[1].startswith("difference") and titles[2] == "verdict"
    rows = [re.findall(r"<t[dh]\b.*?</t[dh]>", row, re.DOTALL) for row in body.split("<tr>")[1:]]
    good, = [row for row in rows if ">good<" in row[0]]
    assert "−0.1000" in good[1] and "better" in good[2]
