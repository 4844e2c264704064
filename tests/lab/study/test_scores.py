"""Scores of another program: a file is read or its bad rows named; verdicts as a study has them; the page."""
import json
import math
import re
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from scipy import stats as scipy_stats

from compare import main
from nanoheads.common import ROOT, UserError
from lab.study import findings, pictures, report, scores


def file(tmp_path, text, name="scores.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def csv_of(**variants):
    lines = ["variant,seed,score"]
    for variant, own in variants.items():
        lines += [f"{variant},{seed},{score}" for seed, score in enumerate(own, 1)]
    return "\n".join(lines) + "\n"


def found_in(tmp_path, text, **settings):
    return scores.study_of(scores.read(file(tmp_path, text)), "scores.csv", **settings)


PLAIN, GOOD = [2.00, 2.01, 1.99, 2.005], [1.90, 1.91, 1.895, 1.905]


# ---- the file ----

def test_where_the_baseline_failed_a_variant_is_not_called_unfinished(tmp_path):
    text = "variant,seed,score\nplain,1,failed\nplain,2,failed\na,1,1.9\na,2,1.8\nb,1,1.9\nb,2,1.8\n"
    assert "2 failed" in findings.headline(found_in(tmp_path, text))


def test_every_bad_row_is_named_up_to_twenty(tmp_path):
    path = file(tmp_path, csv_of(plain=PLAIN) + "a,1,x\n" + "\n" + "a,2,y\n")
    with pytest.raises(UserError) as e:
        scores.read(path)
    named = [line.split(": ")[0] for line in str(e.value).splitlines()]
    assert named == [f"{path}, line 6", f"{path}, line 8"]
    path = file(tmp_path, "variant,seed,score\n" + "a,1,x\n" * 30)
    with pytest.raises(UserError, match="and 10 more$"):
        scores.read(path)


@pytest.mark.parametrize("column", ["tokens", "bytes", "cost"])
def test_what_a_run_took_need_not_be_known(tmp_path, column):
    row, = scores.read(file(tmp_path, f"variant,seed,score,{column}\na,1,2.0,\n"))
    assert row[column] is None


def test_columns_may_stand_in_any_order_with_others_quoted_and_marked(tmp_path):
    text = '\ufeffNote, Score ,SEED,variant\n"x, y",1.5,one,"a, b"\n\n,failed,two,"a, b"\n'
    one, two = scores.read(file(tmp_path, text))
    assert (one["variant"], one["seed"], one["score"], two["score"]) == ("a, b", "one", 1.5, None)


def test_a_seed_is_one_however_its_number_is_written(tmp_path):
    """A table of floats writes 1.0."""
    rows = scores.read(file(tmp_path, "variant,seed,score\n" + "".join(
        f"a,{seed},1\n" for seed in ("1.0", "02", "0", "1e3", "1.5", "x1", "-1", "３", "1_0", "0.10"))))
    assert [row["seed"] for row in rows] == ["1", "2", "0", "1e3", "1.5", "x1", "-1", "３", "1_0", "0.10"]


def test_a_verdict_does_not_hang_on_the_names_of_seeds(tmp_path):
    """Two scores were "the same" where both variants called their seeds 1 and 2, and undecided elsewhere."""
    of = {names: found_in(tmp_path, "variant,seed,score\nplain,1,3.28\nplain,2,3.30\n"
                                    f"a,{names[0]},3.28\na,{names[1]},3.30\n").comparisons
          for names in ("12", "21", "34")}
    assert of["12"] == of["21"] == of["34"] and of["12"][0].verdict == "undecided"


def test_ratios_have_digits_enough_to_be_told_from_1():
    assert [findings.in_times(value) for value in (1.0, 1.0026, 0.9974, 2.0, None)] == [
        "1.00", "1.0026", "0.9974", "2.00", "–"]


@pytest.mark.parametrize("own, other", [
    ((1e30, -1e30), (-1e30, 1e30)), ((-1e30, -1e30), (1e30, 1e30)), ((1e30, 1e29), (1e-300, 1e-310)),
    ((1e-300, -1e-300), (1e-310, 0))])
def test_the_largest_and_the_smallest_scores_have_a_page_and_a_picture(tmp_path, own, other):
    found = found_in(tmp_path, csv_of(plain=own, a=other))
    report.write_all(found, tmp_path / "report")
    assert (tmp_path / "report/forest.png").is_file()
    assert findings.verdicts(found)["comparisons"][0]["verdict"] == "undecided"


# ---- the verdicts ----

def test_verdicts_are_those_of_a_study(tmp_path):
    same = (np.array(PLAIN) + [0.001, -0.001, 0, 0]).tolist()
    found = found_in(tmp_path, csv_of(plain=PLAIN, good=GOOD, bad=[2.2, 2.21, 2.19], same=same, lone=[1.9]),
                     margin=0.05)
    by = {c.variant: c for c in found.comparisons}
    assert {name: c.verdict for name, c in by.items()} == dict(good="better", bad="worse", same="same",
                                                                  lone="undecided")
    test = scipy_stats.ttest_ind(GOOD, PLAIN, equal_var=False)
    interval = test.confidence_interval(0.95)
    assert (by["good"].p, by["good"].low, by["good"].high) == pytest.approx(
        (test.pvalue, interval.low, interval.high))
    assert by["good"].p_corrected > 3 * test.pvalue  # corrected for all four
    assert [c.variant for c in findings.against_plain(found)] == ["lone", "good", "same", "bad"]


# ---- a target ----

# final losses of a public speed record, see results/README.md: a baseline, and the record itself
BEFORE = [3.2798, 3.2794, 3.2774, 3.2787, 3.2788, 3.2791, 3.2778]
GATES = [3.2772, 3.2783, 3.2783, 3.2784, 3.2756, 3.2772, 3.2771]


def rows_against(tmp_path, target, higher_is_better=False, alpha=0.05, margin=0.01, **variants):
    found = found_in(tmp_path, csv_of(**variants), target=target, alpha=alpha, margin=margin,
                     higher_is_better=higher_is_better)
    return {findings.label_of(found, row.variant): row for row in found.targets}, found


@pytest.mark.parametrize("higher", [False, True])
def test_against_a_target_a_mean_has_scipys_one_sided_t_test(tmp_path, higher):
    r = np.random.default_rng(3)
    made = {name: r.normal(mean, 0.001, n).round(4).tolist()
            for name, mean, n in (("a", 3.2785, 7), ("b", 3.2792, 10), ("c", 3.2815, 5), ("d", 3.2799, 2))}
    rows, _ = rows_against(tmp_path, 3.28, higher, **made)
    side = dict(alternative="greater" if higher else "less")
    p = {name: scipy_stats.ttest_1samp(own, 3.28, **side).pvalue for name, own in made.items()}
    for name, own in made.items():
        interval = scipy_stats.ttest_1samp(own, 3.28).confidence_interval(0.95)
        assert (rows[name].p, rows[name].mean, rows[name].low, rows[name].high) == pytest.approx(
            (p[name], np.mean(own), *interval), rel=1e-9)
    # Holm by hand, over the rows
    running = 0
    for left, name in zip((4, 3, 2, 1), sorted(p, key=p.get)):
        running = max(running, min(1, left * p[name]))
        assert rows[name].p_corrected == pytest.approx(running)
        word = "above" if higher else "below"
        assert rows[name].verdict == (word if running <= 0.05 else "not shown")
    # negative control: the other side
    other, _ = rows_against(tmp_path, 3.28, not higher, **made)
    assert other["a"].p == pytest.approx(1 - p["a"]) and other["a"].verdict != rows["a"].verdict


def test_a_record_is_below_its_target_and_its_difference_is_another_question(tmp_path):
    rows, found = rows_against(tmp_path, 3.28, alpha=0.01, margin=0.001, before=BEFORE, gates=GATES)
    assert rows["gates"].p == pytest.approx(0.00026, abs=5e-6) and rows["gates"].verdict == "below"
    assert rows["before"].p == pytest.approx(0.00361, abs=5e-6) and rows["before"].verdict == "below"
    c, = found.comparisons
    assert (c.mean, c.p) == pytest.approx((-0.00127, 0.0256), abs=5e-5) and c.verdict == "undecided"
    # the comparisons are those of a file without a target
    without = found_in(tmp_path, csv_of(before=BEFORE, gates=GATES), alpha=0.01, margin=0.001)
    assert without.comparisons == found.comparisons and without.targets is None
    assert "target" not in findings.verdicts(without)
    assert findings.headline(found).endswith(
        "Shown to be below the target of 3.28: before and gates, 2 of 2.")


def test_one_seed_equal_scores_and_failed_runs_have_an_honest_word(tmp_path):
    text = csv_of(plain=GATES, lone=[3.1], flat=[3.27, 3.27, 3.27]) + "".join(
        f"lost,{seed},{score}\n" for seed, score in enumerate([*GATES, "failed"])) + "none,1,failed\n"
    found = found_in(tmp_path, text, target=3.28)
    rows = {row.variant: row for row in found.targets}
    assert {name: row.verdict for name, row in rows.items()} == dict(
        plain="below", lone="no test", flat="no test", lost="not shown", none="no test")
    assert rows["lone"].words == "no test: one seed shows no spread"
    assert rows["flat"].words == "no test: all 3 scores are 3.27, which shows no spread"
    assert rows["none"].words == "no test: no run has a score"
    assert rows["lost"].words.startswith("not called below 3.28, since 1 run of it failed: mean 3.2774")
    # what has no test counts in Holm's m all the same
    assert rows["plain"].p_corrected == pytest.approx(5 * rows["plain"].p)
    said = report.in_text(found).replace("\n", " ")
    assert "lone: no test: one seed shows no spread." in said and "lost: not called below" in said
    assert "A mean is below 3.28 by a one-sided t test, corrected for 5 means apart from" in said


def test_a_lone_variant_may_be_held_against_a_target(tmp_path, capsys):
    path = file(tmp_path, csv_of(gates=GATES))
    main(["scores", str(path), "--target=3.28", f"--out_dir={tmp_path / 'report'}",
          f"--json={tmp_path / 'told.json'}"])
    said = capsys.readouterr().out.replace("\n", " ")
    assert "gates: below 3.28: mean 3.2774, 95 % interval 3.2765 to 3.2784" in said
    assert "compared" not in said
    told = json.loads((tmp_path / "told.json").read_text())
    row, = told["targets"]
    assert (told["target"], row["variant"], row["verdict"]) == (3.28, "gates", "below")
    assert told["comparisons"] == []
    page = (tmp_path / "report/report.html").read_text()
    assert "Against the target of 3.28" in page and "<td class=w>below</td>" in page
    assert "Every verdict in a sentence" not in page
    with pytest.raises(SystemExit, match="one variant, gates: nothing to compare it with; --target=NUMBER"):
        main(["scores", str(path)])


@pytest.mark.parametrize("name, variant, p, difference, p_of_difference", [
    ("gates", "gates", 0.00026, -0.00127, 0.0256), ("gates", "gates20", 0.00314, 0.00021, 0.6505),
    ("mudd", "v1", 0.00401, -0.00042, 0.5015), ("mudd", "v2", 0.00012, -0.00066, 0.1918),
    ("mudd", "v3", 0.00004, -0.00070, 0.1465), ("bigram", "pr299", 0.00236, -0.00020, 0.701),
    ("recursive", "this", 0.00780, 0.00043, 0.477), ("fp8", "fp8", 0.00067, 0.00012, 0.859)])
def test_the_records_on_file_are_as_the_page_says(name, variant, p, difference, p_of_difference):
    path = ROOT / "results" / "records" / f"{name}.csv"
    found = scores.study_of(scores.read(path), path.name, target=3.28)
    row = next(row for row in found.targets if row.variant == variant)
    c = next(c for c in found.comparisons if c.variant == variant)
    assert (row.p, c.mean) == pytest.approx((p, difference), abs=5.1e-6)
    assert c.p == pytest.approx(p_of_difference, abs=5e-4)  # gates20: scipy's is 0.6500
    page = (ROOT / "docs" / "scores.md").read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith(f"| `{name}`: {variant}"))
    ratio = findings.ratio(found, "cost", variant)
    for figure in (f"| {row.mean:.4f} |", findings.interval(c).replace("[", "\\[").replace("]", "\\]"),
                   f"| {c.p:.3f} |", f"| {ratio:.3f} |"):
        assert figure in line


def test_of_scores_where_higher_is_better_all_verdicts_turn(tmp_path):
    text = csv_of(plain=PLAIN, good=GOOD, bad=[2.2, 2.21, 2.19])
    lower, higher = (found_in(tmp_path, text, higher_is_better=each) for each in (False, True))
    assert [c.verdict for c in lower.comparisons] == ["better", "worse"]
    assert [c.verdict for c in higher.comparisons] == ["worse", "better"]
    assert [c.variant for c in findings.against_plain(higher)] == ["bad", "good"]
    assert "right is better" in pictures.axis_of(higher) and "left is better" in pictures.axis_of(lower)
    assert [c.mean for c in lower.comparisons] == [c.mean for c in higher.comparisons]
    assert higher.comparisons[0].words.startswith("worse by 0.0987 (95 % interval 0.0")


def test_the_baseline_is_the_one_that_is_named_or_the_first(tmp_path):
    text = csv_of(a=PLAIN, plain=GOOD)
    first, named = found_in(tmp_path, text), found_in(tmp_path, text, baseline="plain")
    assert first.arms["plain"].label == "a" and first.comparisons[0].verdict == "better"
    assert named.arms["plain"].label == "plain" and named.comparisons[0].verdict == "worse"
    assert [row[0] for row in findings.verdicts_table(first).rows] == ["a", "plain"]
    told = findings.verdicts(first)
    assert (told["baseline"], [row["variant"] for row in told["comparisons"]]) == ("a", ["plain"])
    with pytest.raises(UserError, match="--baseline=c is not a variant of scores.csv; it has a, plain"):
        found_in(tmp_path, text, baseline="c")
    with pytest.raises(UserError, match="one variant, a: nothing to compare"):
        found_in(tmp_path, csv_of(a=PLAIN))


def test_a_verdict_that_favours_a_side_with_failed_runs_is_withheld(tmp_path):
    text = csv_of(plain=PLAIN, a=GOOD, b=[2.2, 2.21, 2.19], c=["failed", "failed"])
    control = found_in(tmp_path, text).comparisons
    assert [c.verdict for c in control][:2] == ["better", "worse"]
    found = found_in(tmp_path, text + "a,9,failed\nb,9,failed\n")
    a, b, c = found.comparisons
    assert a.verdict == "undecided"
    assert a.words.startswith("not called better, since 1 of its runs failed")
    assert b.verdict == "worse"
    assert tuple(findings.verdicts_table(found).rows[-1][:2]) == ("c", "failed") and math.isnan(c.mean)
    assert any("4 failed runs" in line for line in findings.notices(found))
    told = findings.verdicts(found)
    assert (told["finished"], told["planned"], told["done"]) == (True, 15, 11)
    one = findings.notices(found_in(tmp_path, csv_of(plain=PLAIN, a=GOOD) + "a,9,failed\n"))
    assert [line[:24] for line in one] == ["1 failed run is missing "]


def test_what_a_variant_took_stands_beside_its_verdict(tmp_path):
    rows = ["variant,seed,score,tokens,cost"]
    rows += [f"plain,{seed},{score},1000,2" for seed, score in enumerate(PLAIN)]
    rows += [f"good,{seed},{score},1500,3" for seed, score in enumerate(GOOD)]
    rows += [f"other,{seed},{score + 0.2},1000,3" for seed, score in enumerate(PLAIN)]
    found = found_in(tmp_path, "\n".join(rows))
    table = findings.verdicts_table(found)
    assert table.head[-2:] == ["tokens ×", "cost ×"]
    assert {row[0]: row[-2:] for row in table.rows} == dict(plain=["1", "1"], good=["1.50", "1.50"],
                                                            other=["1.00", "1.50"])
    lines = findings.notices(found)
    assert lines[0].startswith("good trains on 1.50 times plain's tokens") and len(lines) == 2
    assert lines[1].startswith("Better and dearer: good.")
    plain = found_in(tmp_path, csv_of(plain=PLAIN, good=GOOD))
    assert findings.notices(plain) == [] and len(findings.verdicts_table(plain).head) == 6


# ---- what is written ----

class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "link", "img", "source", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.slow
def test_the_command_prints_the_table_and_writes_page_picture_and_json(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    evil = "<script>alert('x')</script>"
    file(tmp_path, csv_of(**{"plain": PLAIN, "good": GOOD, evil: [2.2, 2.21, 2.19]}))
    main(["scores", "scores.csv", "--json=verdicts.json", "--margin=0.02"])
    printed = capsys.readouterr().out
    assert re.search(r"^good +better +1\.9025 +-0\.0987 \[-0\.1\d+, -0\.0\d+\] +<0\.001$", printed, re.M)
    assert printed.splitlines()[-4:] == [f"out/scores-report/{name}" for name in (
        "report.html", "forest.svg", "forest.png")] + ["verdicts.json"]
    page = Tags((tmp_path / "out/scores-report/report.html").read_text())
    text = " ".join(" ".join(page.words).split())
    assert page.open == [] and "script" not in page.tags and text.count(evil) >= 3
    assert "−0.0987 [" in text and "Margin: ±0.02, set beforehand" in text and "bits/byte" not in text
    found = json.loads((tmp_path / "verdicts.json").read_text())
    assert found["baseline"] == "plain" and found["margin"] == 0.02
    assert (found["finished"], found["planned"], found["done"]) == (True, 11, 11)
    assert [(row["variant"], row["verdict"]) for row in found["comparisons"]] == [
        ("good", "better"), (evil, "worse")]
    good = found["comparisons"][0]
    assert good["mean"] == pytest.approx(np.mean(GOOD) - np.mean(PLAIN))
    assert good["low"] < good["mean"] < good["high"] and good["cost_ratio"] is None
    assert not re.search(r"NaN|Infinity", (tmp_path / "verdicts.json").read_text())


# ---- the page of the docs ----

DOC = (ROOT / "docs/scores.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_example_of_the_docs_prints_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file(tmp_path, re.search(r"```csv\n(.*?)```", DOC, re.S).group(1))
    main(["scores", "scores.csv", "--baseline=plain"])
    shown = re.search(r"```\n(scores.csv: swiglu against.*?)```", DOC, re.S).group(1)
    assert capsys.readouterr().out.startswith(shown)


LINES = {"nanogpt": "step 0: train loss 4.2, val loss 4.3\niter 0: loss 4.2, time 5ms\n"
                    "step 9: train loss 1.7, val loss {}\n",
         "nanochat": "Step 00000 | Validation bpb: 3.1\nStep 00009 | Validation bpb: {}\n"
                     "Step 00009 | CORE metric: 0.1234\n"}


@pytest.mark.slow
@pytest.mark.parametrize("program", LINES)
def test_the_scripts_of_the_docs_read_the_logs_that_they_name(tmp_path, program):
    script = re.findall(r"```sh\n(.*?)```", DOC, re.S)[list(LINES).index(program)]
    script = script.replace("python compare.py", "true")
    (tmp_path / "logs").mkdir()
    for variant, own in (("plain", PLAIN), ("my-idea", GOOD)):
        for seed, score in enumerate(own):
            (tmp_path / f"logs/{variant}-{seed}.txt").write_text(LINES[program].format(score))
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, check=True)
    rows = scores.read(tmp_path / ("scores.csv" if program == "nanogpt" else "bpb.csv"))
    assert {(row["variant"], row["seed"], row["score"]) for row in rows} == {
        *(("plain", str(i), each) for i, each in enumerate(PLAIN)),
        *(("my-idea", str(i), each) for i, each in enumerate(GOOD))}
    if program == "nanochat":
        assert {row["score"] for row in scores.read(tmp_path / "core.csv")} == {0.1234}
